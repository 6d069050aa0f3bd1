"""The built-in actor: plays games that send JSON or msgpack, without user code.

    tick   {"observation": …, "reward": 0.5, "action_mask": …}                    → {"action": …}
    tick   {"observation": …, "reward": 1, "terminated": true}                    → {"action": null}: the next tick starts an episode
    tick   {"seats": {"blue": {"observation": …, "reward": 0}, …}}                → {"actions": {"blue": …}}
    end    empty, or the same with the last reward (and, when truncated, the last observation)

A game whose `start` has {"format": "raw"} exchanges binary arrays instead: see `ludus.gateway.raw_codec`.
The reward of a tick belongs to the previous action. The reply has the format of the request.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.core.tree import map_tree
from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.agent import Agent, Seat
from ludus.gateway.raw_codec import MASKED, TERMINATED, TRUNCATED, RawCodec, RawStep
from ludus.protocol import codec
from ludus.protocol.codec import ONLY_SEAT

_KEYS = frozenset({"observation", "reward", "terminated", "truncated", "action_mask"})
_INFO = "info"
"""Top-level key for additional data of the game; ignored here."""
_MAX_QUOTE = 80  # characters of a quoted name


class BuiltinActor(Actor):
    """Plays every seat of a session with the seat's model, and records segments if the seat has a memory."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._agents: dict[str, Agent] = {}
        self.set_seats(seats)
        self._raw: RawCodec | None = None
        self._temperature: float | None = None

    def set_seats(self, seats: Mapping[str, Seat]) -> None:
        """Set the seats and their models. Call before the first tick."""
        self._seats = seats
        self._single = set(seats) == {ONLY_SEAT}

    def move(self, seats: Mapping[str, Seat], *, carry: bool) -> bool:
        """Replace the models of the seats, between two calls. Returns whether every recurrent state was carried over."""
        self._seats = seats
        carried = [agent.move(seats[name], carry=carry) for name, agent in self._agents.items()]
        return all(carried)

    async def start(self, session: str, body: bytes) -> bytes:
        try:
            form = decode_message(body)[0].get("format", "")
        except Refused:  # the body of start is free-form
            form = ""
        if form == "raw":
            self._raw = self._raw_codec()
            self.tick = self._raw_tick  # type: ignore[method-assign]  # saves a call per tick: measured
        elif form not in ("", "json", "msgpack"):
            raise Refused(422, "format", f"The format is {reprlib.repr(form)}.", "It is json, msgpack or raw.")
        return b""

    def _raw_codec(self) -> RawCodec:
        if not self._single:
            raise Refused(422, "format", "A game with several seats cannot send raw arrays.", "Send JSON or msgpack.")
        return self._seats[ONLY_SEAT].raw

    async def tick(self, body: bytes) -> bytes:
        message, packed = decode_message(body)
        message.pop(_INFO, None)
        parts = {name: self._check_step(name, part) for name, part in self._seat_steps(message).items()}
        # All steps are valid: nothing can be refused from here on.
        if self._single:
            return encode_message({"action": await parts[ONLY_SEAT].play(self._agent(ONLY_SEAT))}, packed)
        played = (part.play(self._agent(name)) for name, part in parts.items())
        actions = await asyncio.gather(*played, return_exceptions=True)  # wait for all seats even if one fails
        for failed in (action for action in actions if isinstance(action, BaseException)):
            raise failed
        return encode_message({"actions": dict(zip(parts, actions, strict=True))}, packed)

    async def _raw_tick(self, body: bytes) -> bytes:
        raw = self._raw
        assert raw is not None
        step = raw.read(body)
        agent = self._agents.get(ONLY_SEAT) or self._agent(ONLY_SEAT)
        if step.plain and step.flags == 0 and agent.can_ask:  # nearly every tick takes this path
            if step.reward:
                agent.reward(step.reward)
            return raw.write(agent.take(step.observation, None, await agent.ask(step.observation, None)))
        part = _SeatStep(self._seats[ONLY_SEAT], agent, _step_fields(step), False)
        action = await part.play(agent, as_array=True)
        return b"" if action is None else raw.write(action)

    async def end(self, body: bytes) -> bytes:
        vars(self).pop("tick", None)  # breaks the reference cycle, so that the actor is freed at once
        if self.ended_by != "game":
            for agent in self._agents.values():
                agent.break_off()
            return b""
        if self._raw is not None:
            if body:
                part = _SeatStep(self._seats[ONLY_SEAT], self._agents.get(ONLY_SEAT), _step_fields(self._raw.read(body)), True)
                await part.conclude(self._agent(ONLY_SEAT))
            for agent in self._agents.values():
                agent.break_off()
            return b""
        message, packed = decode_message(body) if body.strip() else ({}, False)
        message.pop(_INFO, None)
        parts = (
            {name: self._check_step(name, part, last=True) for name, part in self._seat_steps(message).items()} if message else {}
        )
        for name, part in parts.items():
            await part.conclude(self._agent(name))
        for agent in self._agents.values():
            agent.break_off()  # seats that the body does not mention
        return encode_message({}, packed)

    def _agent(self, name: str) -> Agent:
        if name not in self._agents:
            self._agents[name] = Agent(self._seats[name], self._temperature)
        return self._agents[name]

    def _seat_steps(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._single:
            return {ONLY_SEAT: message}
        seats = message.get("seats")
        if not isinstance(seats, dict) or message.keys() - {"seats"} or not seats:
            names = ", ".join(sorted(self._seats))
            raise Refused(422, "seats", "This game has several seats.", f'Send {{"seats": {{name: …}}}}; the names are {names}.')
        return seats

    def _check_step(self, name: str, part: Any, *, last: bool = False) -> _SeatStep:
        if name not in self._seats:
            quoted = str(name)[:_MAX_QUOTE]
            raise Refused(422, "seats", f"There is no seat {quoted!r}.", did_you_mean(quoted, self._seats))
        where = f" of seat {name!r}" if name else ""
        if not isinstance(part, dict):
            raise Refused(422, "malformed", f"The step{where} is not an object.", 'Send {"observation": …, "reward": …}.')
        unknown = part.keys() - _KEYS
        if unknown:
            key = str(min(unknown, key=str))[:_MAX_QUOTE]
            raise Refused(422, "unknown_key", f"The step{where} has an unknown key {key!r}.", did_you_mean(key, _KEYS))
        return _SeatStep(self._seats[name], self._agents.get(name), part, last)


class _SeatStep:
    """The validated part of a request for one seat."""

    def __init__(self, seat: Seat, agent: Agent | None, given: dict[str, Any], last: bool) -> None:
        playing = agent is not None and agent.playing
        self.terminated, self.truncated = _flag(given, "terminated"), _flag(given, "truncated")
        self.reward = seat.check_reward(given.get("reward", 0.0))
        if self.reward and not playing:
            raise Refused(422, "reward", f"A reward of {self.reward:g} came before any action.", "Send rewards after an action.")
        if last:
            self.terminated = self.terminated or not self.truncated
        over = self.terminated or self.truncated
        self._raw = given.get("observation")
        if self._raw is None and not self.terminated:
            hint = "A truncated episode needs its last" if over else "Send it as"
            raise Refused(422, "observation", "The observation is missing.", f'{hint} "observation".')
        self.observation = None if self._raw is None else seat.observation(self._raw)
        self.allowed = None if over else seat.mask(given.get("action_mask"))

    async def play(self, agent: Agent, *, as_array: bool = False) -> Any:
        if self.reward:
            agent.reward(self.reward)
        if self.terminated or self.truncated:
            await agent.finish(self.terminated, self.truncated, None if self.terminated else self._raw)
            return None
        action = await agent.act_on(self.observation, self.allowed)
        return action if as_array else to_plain(action)

    async def conclude(self, agent: Agent) -> None:
        if self.reward:
            agent.reward(self.reward)
        await agent.finish(self.terminated, self.truncated, None if self.terminated else self._raw)


def _step_fields(step: RawStep) -> dict[str, Any]:
    """Return a raw step as the fields of the other formats."""
    flags = {"terminated": bool(step.flags & TERMINATED), "truncated": bool(step.flags & TRUNCATED)}
    mask = {"action_mask": step.mask} if step.flags & MASKED else {}
    return {"observation": step.observation, "reward": step.reward, **flags, **mask}


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise Refused(422, key, f"{key} is {reprlib.repr(value)}.", "It is true or false.")
    return value


# -- formats


def decode_message(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the message and whether it is msgpack. Raises Refused (422)."""
    packed = codec.is_msgpack(body)
    try:
        message = codec.decode(body)
    except ValueError as error:
        kind = "msgpack" if packed else "JSON"
        raise Refused(422, "malformed", f"The body is not {kind}: {error}.", 'Send {"observation": …}.') from None
    if not isinstance(message, dict):
        raise Refused(422, "malformed", "The body is not an object.", 'Send {"observation": …}.')
    return message, packed


def encode_message(message: dict[str, Any], packed: bool) -> bytes:
    return codec.encode(message, "msgpack" if packed else "json")


def to_plain(action: Any) -> Any:
    """Convert an action to plain lists and numbers."""
    if isinstance(action, (np.ndarray, np.generic)):
        return action.tolist()
    return map_tree(lambda x: np.asarray(x).tolist(), action)
