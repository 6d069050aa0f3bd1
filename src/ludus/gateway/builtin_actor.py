"""The built-in actor: games that speak JSON or msgpack need no Python of their own.

    tick   {"observation": …, "reward": 0.5, "action_mask": …}                    → {"action": …}
    tick   {"observation": …, "reward": 1, "terminated": true}                    → {"action": null}: the next tick begins anew
    tick   {"seats": {"blue": {"observation": …, "reward": 0}, …}}                → {"actions": {"blue": …}}
    end    empty, or the same with the last reward (and, when truncated, the last observation)

A game whose `start` says {"format": "raw"} sends and gets arrays as they are in memory instead: `ludus.gateway.raw_codec`.
The reward of a tick belongs to the action before it. The format of the reply is that of the request.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.core.tree import map_tree
from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.agent import Agent, Seat
from ludus.gateway.raw_codec import MASKED, TERMINATED, TRUNCATED, RawForm, RawStep

ONLY_SEAT = ""
"""The name of the seat of a game that has one."""

_KEYS = frozenset({"observation", "reward", "terminated", "truncated", "action_mask"})
_INFO = "info"
"""At the top of a message: what a game tells actors that care."""
_SHOWN = 80  # characters of what a game calls something


class BuiltinActor(Actor):
    """Plays every seat of a session with the model of that seat, and records when there is somebody to learn."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._agents: dict[str, Agent] = {}
        self.sit(seats)
        self._raw: RawForm | None = None
        self._temperature: float | None = None

    def sit(self, seats: Mapping[str, Seat]) -> None:
        """Before the first tick: which seats there are, and who plays them."""
        self._seats = seats
        self._single = set(seats) == {ONLY_SEAT}

    def move(self, seats: Mapping[str, Seat], *, carry: bool) -> bool:
        """Between two calls: go on with other models in the same seats. True: every recurrent state was carried over."""
        self._seats = seats
        carried = [agent.move(seats[name], carry=carry) for name, agent in self._agents.items()]
        return all(carried)

    async def start(self, session: str, body: bytes) -> bytes:
        try:
            form = decoded(body)[0].get("format", "")
        except Refused:  # what else a game says at its start is its own affair
            form = ""
        if form == "raw":
            self._raw = self._raw_form()
            self.tick = self._raw_tick  # type: ignore[method-assign]  # every call less counts: measured
        elif form not in ("", "json", "msgpack"):
            raise Refused(422, "format", f"The format is {reprlib.repr(form)}.", "It is json, msgpack or raw.")
        return b""

    def _raw_form(self) -> RawForm:
        if not self._single:
            raise Refused(422, "format", "A game with several seats cannot send raw arrays.", "Send JSON or msgpack.")
        return self._seats[ONLY_SEAT].raw

    async def tick(self, body: bytes) -> bytes:
        message, packed = decoded(body)
        message.pop(_INFO, None)
        parts = {name: self._checked(name, part) for name, part in self._parts(message).items()}
        # All of them are right: from here on nothing can be refused.
        if self._single:
            return encoded({"action": await parts[ONLY_SEAT].play(self._agent(ONLY_SEAT))}, packed)
        played = (part.play(self._agent(name)) for name, part in parts.items())
        actions = await asyncio.gather(*played, return_exceptions=True)  # nobody plays on when one has failed and `end` comes
        for failed in (action for action in actions if isinstance(action, BaseException)):
            raise failed
        return encoded({"actions": dict(zip(parts, actions, strict=True))}, packed)

    async def _raw_tick(self, body: bytes) -> bytes:
        raw = self._raw
        assert raw is not None
        step = raw.read(body)
        agent = self._agents.get(ONLY_SEAT) or self._agent(ONLY_SEAT)
        if step.plain and step.flags == 0 and agent.settled:  # the path of nearly every tick
            if step.reward:
                agent.reward(step.reward)
            return raw.write(agent.take(step.observation, None, await agent.ask(step.observation, None)))
        part = _Part(self._seats[ONLY_SEAT], agent, _said(step), False)
        action = await part.play(agent, as_it_is=True)
        return b"" if action is None else raw.write(action)

    async def end(self, body: bytes) -> bytes:
        vars(self).pop("tick", None)  # it refers to us: without it we are freed at once, not by some later collection
        if self.ended_by != "game":
            for agent in self._agents.values():
                agent.break_off()
            return b""
        if self._raw is not None:
            if body:
                part = _Part(self._seats[ONLY_SEAT], self._agents.get(ONLY_SEAT), _said(self._raw.read(body)), True)
                await part.conclude(self._agent(ONLY_SEAT))
            for agent in self._agents.values():
                agent.break_off()
            return b""
        message, packed = decoded(body) if body.strip() else ({}, False)
        message.pop(_INFO, None)
        parts = {name: self._checked(name, part, last=True) for name, part in self._parts(message).items()} if message else {}
        for name, part in parts.items():
            await part.conclude(self._agent(name))
        for agent in self._agents.values():
            agent.break_off()  # seats of which the game said nothing
        return encoded({}, packed)

    def _agent(self, name: str) -> Agent:
        if name not in self._agents:
            self._agents[name] = Agent(self._seats[name], self._temperature)
        return self._agents[name]

    def _parts(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._single:
            return {ONLY_SEAT: message}
        seats = message.get("seats")
        if not isinstance(seats, dict) or message.keys() - {"seats"} or not seats:
            names = ", ".join(sorted(self._seats))
            raise Refused(422, "seats", "This game has several seats.", f'Send {{"seats": {{name: …}}}}; the names are {names}.')
        return seats

    def _checked(self, name: str, part: Any, *, last: bool = False) -> _Part:
        if name not in self._seats:
            shown = str(name)[:_SHOWN]
            raise Refused(422, "seats", f"There is no seat {shown!r}.", did_you_mean(shown, self._seats))
        where = f" of seat {name!r}" if name else ""
        if not isinstance(part, dict):
            raise Refused(422, "malformed", f"The step{where} is not an object.", 'Send {"observation": …, "reward": …}.')
        unknown = part.keys() - _KEYS
        if unknown:
            key = str(min(unknown, key=str))[:_SHOWN]
            raise Refused(422, "unknown_key", f"The step{where} has an unknown key {key!r}.", did_you_mean(key, _KEYS))
        return _Part(self._seats[name], self._agents.get(name), part, last)


class _Part:
    """What one seat said in one request, checked."""

    def __init__(self, seat: Seat, agent: Agent | None, given: dict[str, Any], last: bool) -> None:
        playing = agent is not None and agent.playing
        self.terminated, self.truncated = _flag(given, "terminated"), _flag(given, "truncated")
        self.reward = seat.number(given.get("reward", 0.0))
        if self.reward and not playing:
            raise Refused(422, "reward", f"A reward of {self.reward:g} came before any action.", "Reward what an action did.")
        if last:
            self.terminated = self.terminated or not self.truncated
        over = self.terminated or self.truncated
        self._raw = given.get("observation")
        if self._raw is None and not self.terminated:
            what = "A truncated episode is learned from only with its last" if over else "Send it as"
            raise Refused(422, "observation", "The observation is missing.", f'{what} "observation".')
        self.seen = None if self._raw is None else seat.observation(self._raw)
        self.allowed = None if over else seat.mask(given.get("action_mask"))

    async def play(self, agent: Agent, *, as_it_is: bool = False) -> Any:
        if self.reward:
            agent.reward(self.reward)
        if self.terminated or self.truncated:
            await agent.finish(self.terminated, self.truncated, None if self.terminated else self._raw)
            return None
        action = await agent.act_on(self.seen, self.allowed)
        return action if as_it_is else plain(action)

    async def conclude(self, agent: Agent) -> None:
        if self.reward:
            agent.reward(self.reward)
        await agent.finish(self.terminated, self.truncated, None if self.terminated else self._raw)


def _said(step: RawStep) -> dict[str, Any]:
    """A raw step as the other formats would have said it."""
    flags = {"terminated": bool(step.flags & TERMINATED), "truncated": bool(step.flags & TRUNCATED)}
    mask = {"action_mask": step.mask} if step.flags & MASKED else {}
    return {"observation": step.observation, "reward": step.reward, **flags, **mask}


def _flag(given: dict[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise Refused(422, key, f"{key} is {reprlib.repr(value)}.", "It is true or false.")
    return value


# -- formats


def decoded(body: bytes) -> tuple[dict[str, Any], bool]:
    """The message, and whether it was msgpack (whose maps never begin like a JSON text). Raises Refused (422)."""
    packed = bool(body) and (body[0] & 0xF0 == 0x80 or body[0] in (0xDE, 0xDF))
    try:
        message = msgpack.unpackb(body) if packed else json.loads(body)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        kind = "msgpack" if packed else "JSON"
        raise Refused(422, "malformed", f"The body is not {kind}: {error}.", 'Send {"observation": …}.') from None
    if not isinstance(message, dict):
        raise Refused(422, "malformed", "The body is not an object.", 'Send {"observation": …}.')
    return message, packed


def encoded(message: dict[str, Any], packed: bool) -> bytes:
    if packed:
        out: bytes = msgpack.packb(message)
        return out
    return json.dumps(message).encode()


def plain(action: Any) -> Any:
    """An action as JSON and msgpack can say it."""
    if isinstance(action, (np.ndarray, np.generic)):
        return action.tolist()
    return map_tree(lambda x: np.asarray(x).tolist(), action)
