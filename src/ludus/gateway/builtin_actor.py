"""The built-in actor: plays games that send JSON or msgpack, without user code.

    tick   {"observation": …, "reward": 0.5, "action_mask": …}                    → {"action": …}
    tick   {"observation": …, "reward": 1, "terminated": true}                    → {"action": null}: the next tick starts an episode
    tick   {"seats": {"blue": {"observation": …, "reward": 0}, …}}                → {"actions": {"blue": …}}
    end    empty, or the same with the last reward (and, when truncated, the last observation); in a league also the winner:
           {"reward": 1, "terminated": true, "info": {"result": {"winner": 0}}}

A game whose `start` has {"format": "raw"} exchanges binary arrays instead: see `ludus.gateway.raw_codec`.
The reward of a tick belongs to the previous action. The reply has the format of the request.
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludus.config.schema import SelfPlayConfig
from ludus.core.tree import map_tree
from ludus.errors import Refused
from ludus.gateway.actor import Actor
from ludus.gateway.agent import Seat, SeatAgent
from ludus.gateway.raw_codec import MASKED, TERMINATED, TRUNCATED, RawCodec, RawStep
from ludus.protocol.codec import ONLY_SEAT
from ludus.protocol.step_message import StepFields, decode_message, encode_message, parse_step, split_seats
from ludus.sampling.session_opponents import MatchOpponents, SessionResult, seats_are_sides, sides_of

log = logging.getLogger(__name__)

_INFO = "info"
"""Top-level key for additional data of the game. In a league the result in the last one counts; all else is ignored."""
_MAX_SIDE = 80  # characters of a side that an error quotes


class BuiltinActor(Actor):
    """Plays every seat of a session with the seat's model, and records segments if the seat has a memory."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._agents: dict[str, SeatAgent] = {}
        self.set_seats(seats)
        self._raw: RawCodec | None = None
        self._temperature: float | None = None
        self.complete = False
        """Whether the game has ended the session, and all episodes before it."""

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
            if not self._single:
                raise Refused(422, "format", "A game with several seats cannot send raw arrays.", "Send JSON or msgpack.")
            self._raw = self._seats[ONLY_SEAT].raw
            self.tick = self._raw_tick  # type: ignore[method-assign]  # saves a call per tick: measured
        elif form not in ("", "json", "msgpack"):
            raise Refused(422, "format", f"The format is {reprlib.repr(form)}.", "It is json, msgpack or raw.")
        return b""

    async def tick(self, body: bytes) -> bytes:
        message, packed = decode_message(body)
        message.pop(_INFO, None)
        steps = self._check_steps(message)
        # All steps are valid: nothing can be refused from here on.
        if self._single:
            return encode_message({"action": to_plain(await steps[ONLY_SEAT].play(self._agent(ONLY_SEAT)))}, packed)
        played = (step.play(self._agent(name)) for name, step in steps.items())
        actions = await asyncio.gather(*played, return_exceptions=True)  # wait for all seats even if one fails
        for failed in (action for action in actions if isinstance(action, BaseException)):
            raise failed
        return encode_message({"actions": dict(zip(steps, map(to_plain, actions), strict=True))}, packed)

    async def _raw_tick(self, body: bytes) -> bytes:
        raw = self._raw
        assert raw is not None
        step = raw.read(body)
        agent = self._agents.get(ONLY_SEAT) or self._agent(ONLY_SEAT)
        if step.plain and step.flags == 0 and agent.can_ask:  # nearly every tick takes this path
            if step.reward:
                agent.reward(step.reward)
            return raw.write(agent.take(step.observation, None, await agent.ask(step.observation, None)))
        action = await self._check_step(ONLY_SEAT, _step_fields(step)).play(agent)
        return b"" if action is None else raw.write(action)

    async def end(self, body: bytes) -> bytes:
        vars(self).pop("tick", None)  # breaks the reference cycle, so that the actor is freed at once
        packed, steps = False, dict[str, _CheckedStep]()
        if self.ended_by != "game":
            pass
        elif self._raw is not None:
            if body:
                steps = {ONLY_SEAT: self._check_step(ONLY_SEAT, _step_fields(self._raw.read(body)), last=True)}
        elif body.strip():
            message, packed = decode_message(body)
            self._check_result(message.pop(_INFO, None))
            steps = self._check_steps(message, last=True) if message else {}
        for name, step in steps.items():
            await step.play(self._agent(name))
        self.complete = self.ended_by == "game" and not any(agent.playing for agent in self._agents.values())
        for agent in self._agents.values():
            agent.break_off()  # seats that the body does not mention
        return b"" if self._raw is not None or self.ended_by != "game" else encode_message({}, packed)

    def _check_result(self, info: Any) -> None:
        """Read `info` of the end of a session. Raises Refused (422)."""

    def _agent(self, name: str) -> SeatAgent:
        if name not in self._agents:
            self._agents[name] = SeatAgent(self._seats[name], self._temperature)
        return self._agents[name]

    def _check_steps(self, message: dict[str, Any], *, last: bool = False) -> dict[str, _CheckedStep]:
        return {name: self._check_step(name, part, last=last) for name, part in split_seats(message, self._seats).items()}

    def _check_step(self, name: str, part: Any, *, last: bool = False) -> _CheckedStep:
        agent = self._agents.get(name)
        step = parse_step(part, name, playing=agent is not None and agent.playing, last=last)
        return _CheckedStep(self._seats[name], step)


@dataclass(frozen=True)
class JoinedSession:
    """A session of a match."""

    match: str
    """Empty: it belongs to none, and all its seats learn."""
    seats: Mapping[str, Seat]
    sides: Mapping[str, int]
    """Seat → its side, 0 or 1."""


class SelfPlaySeats:
    """Seats of sessions in self-play, for all actors of a process: one side of a match learns, the opponent plays the other."""

    def __init__(
        self, seats: Mapping[str, Seat], settings: SelfPlayConfig, opponents: MatchOpponents, *, whole_matches: bool = False
    ) -> None:
        """`whole_matches`: a session must play both sides, because the sessions of a match may be in different processes."""
        self._seats, self._opponents, self._whole_matches = seats, opponents, whole_matches
        self._sides = sides_of(settings, list(seats))
        self._by_seat = seats_are_sides(settings, list(seats))
        self._warned = False
        self.opponent_sessions = 0
        """Sessions, so far, of which the opponent played a seat."""

    def join(self, session: str, match: str, side: str) -> JoinedSession:
        """Seat a session, which has to be left at its end. Raises Refused (422)."""
        if side:
            number = self.parse_side(side)
            if not match:
                message = "The session names a side and no match."
                raise Refused(422, "match", message, "Send the same Ludus-Match with the sessions of both sides.")
            if self._whole_matches:
                message = "Several processes serve this game, and the sessions of a match must be in one of them."
                raise Refused(422, "side", message, "Set num_workers to 1, or let one session play the seats of both sides.")
            sides = dict.fromkeys(self._seats, number)
        elif self._by_seat and self._sides is not None:
            match, sides = match or session, {name: int(name in self._sides[1]) for name in self._seats}
        else:
            self._warn()
            return JoinedSession("", self._seats, {})
        learning, opponent = self._opponents.join(match)
        if any(side != learning for side in sides.values()):
            self.opponent_sessions += 1
        seats = {name: seat if sides[name] == learning else Seat(opponent(name)) for name, seat in self._seats.items()}
        return JoinedSession(match, seats, sides)

    def leave(self, match: str, result: SessionResult) -> None:
        self._opponents.leave(match, result)

    def count_tick(self) -> None:
        self._opponents.steps += 1

    def update(self) -> None:
        """Do periodic work; call it about once a second."""
        self._opponents.update()

    def close(self) -> None:
        """No session will follow."""
        self._opponents.close()

    def parse_side(self, side: str) -> int:
        """Raises Refused (422)."""
        for number, names in enumerate(self._sides or ()):
            if side in names:
                return number
        if side not in ("0", "1"):
            known = ["0", "1", *(name for names in self._sides or () for name in sorted(names))]
            raise Refused(422, "side", f"There is no side {side[:_MAX_SIDE]!r}.", f"It is one of {', '.join(known)}.")
        return int(side)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "a session named no side, so all of it is learned from: games in self-play send Ludus-Match and Ludus-Side with start"
            )


class SelfPlayActor(BuiltinActor):
    """Plays a session of a match with two sides. Side and opponent stay the same for the whole session."""

    def __init__(self, seats: Mapping[str, Seat], self_play: SelfPlaySeats) -> None:
        super().__init__(seats)
        self._self_play, self._joined = self_play, JoinedSession("", seats, {})
        self._winners: frozenset[int | None] = frozenset()

    async def start(self, session: str, body: bytes) -> bytes:
        reply = await super().start(session, body)
        self._joined = self._self_play.join(session, self.match, self.about.side)
        self.set_seats(self._joined.seats)
        return reply

    async def tick(self, body: bytes) -> bytes:
        if self._joined.match:
            self._self_play.count_tick()
        return await super().tick(body)

    async def _raw_tick(self, body: bytes) -> bytes:
        if self._joined.match:
            self._self_play.count_tick()
        return await super()._raw_tick(body)

    async def end(self, body: bytes) -> bytes:
        try:
            reply = await super().end(body)
        except Refused:  # the session continues
            raise
        except BaseException:
            self._leave()
            raise
        self._leave()
        return reply

    def _check_result(self, info: Any) -> None:
        """`{"result": {"winner": …}}`: the number or name of a side, or null for a draw."""
        result = info.get("result") if isinstance(info, Mapping) else None
        if not isinstance(result, Mapping) or "winner" not in result:
            return
        winner = result["winner"]
        if winner is not None and (isinstance(winner, bool) or not isinstance(winner, int | str)):
            raise Refused(422, "result", f"The winner is {reprlib.repr(winner)}.", "It is a side, or null for a draw.")
        self._winners = frozenset({None if winner is None else self._self_play.parse_side(str(winner))})

    def _leave(self) -> None:
        joined, self._joined = self._joined, JoinedSession("", self._joined.seats, {})
        if joined.match:
            returns = {name: agent.total_reward for name, agent in self._agents.items()}
            sides = [[returns.get(name, 0.0) for name, on in joined.sides.items() if on == side] for side in (0, 1)]
            acted = frozenset(joined.sides[name] for name in self._agents)
            self._self_play.leave(joined.match, SessionResult(self.complete, (sides[0], sides[1]), acted, self._winners))


class _CheckedStep:
    """The step of one seat, with a valid observation and mask."""

    def __init__(self, seat: Seat, step: StepFields) -> None:
        self._step = step
        self._observation = None if step.observation is None else seat.observation(step.observation)
        self._allowed = None if step.over else seat.mask(step.action_mask)

    async def play(self, agent: SeatAgent) -> Any:
        """Return the next action, or None at the end of an episode."""
        step = self._step
        if step.reward:
            agent.reward(step.reward)
        if not step.over:
            return await agent.act_on(self._observation, self._allowed)
        await agent.finish(step.terminated, step.truncated, None if step.terminated else step.observation)
        return None


def _step_fields(step: RawStep) -> dict[str, Any]:
    """Return a raw step as the fields of the other formats."""
    flags = {"terminated": bool(step.flags & TERMINATED), "truncated": bool(step.flags & TRUNCATED)}
    mask = {"action_mask": step.mask} if step.flags & MASKED else {}
    return {"observation": step.observation, "reward": step.reward, **flags, **mask}


def to_plain(action: Any) -> Any:
    """Convert an action to plain lists and numbers."""
    if action is None or isinstance(action, (np.ndarray, np.generic)):
        return action if action is None else action.tolist()
    return map_tree(lambda x: np.asarray(x).tolist(), action)
