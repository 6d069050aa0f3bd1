"""Host matches whose camps are played by actors over HTTP: request actions for all matches at once, step them, report their ends.

A match waits while its actors are slower than others. With the option `together`, replies of actors contain further matches, which
take the slots of finished ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ludus.errors import ConfigError, LudusError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.heroes import HEROES, TABLE
from ludus.games.arena.engine.layout import ALIVE, EVERY, LIMIT, OVER
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.saved_state import read_state, write_state
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.host.actor_session import ActorReply, ActorSession
from ludus.games.arena.host.codec import Action, BodyCodec, HeroObservation, SeatStep, explain_refusal
from ludus.games.arena.host.match import CAMPS, MAX_TOGETHER, ActorCamp, HostedMatch, MatchPlan, match_result, read_further_match
from ludus.protocol.client import AsyncClient

log = logging.getLogger(__name__)

HERO_TABLE: Final = hashlib.blake2b(TABLE.tobytes(), digest_size=8).hexdigest()
"""Digest of the hero table; changes with any attribute of a hero."""
_KEEPALIVE_S: Final = 20.0
"""Interval of requests for a camp whose heroes are all dead: actors drop sessions without requests."""
_STOP_S: Final = 2.0
"""Time for ending the sessions after a stop."""
_BATCH_S: Final = 0.005
"""After the first complete match, time to wait for others to step together with it."""
_MAX_LOGGED: Final = 20
"""Problems logged per match; further ones are only counted."""


@dataclass
class RunningMatch:
    """A match in progress and its slot-local bookkeeping."""

    match: HostedMatch
    began: float
    samples_state: bool
    """Whether a state of it is written at the end."""
    decisions: int = 0
    problems: int = 0
    """Refused and missing replies so far."""
    sampled_state: tuple[int, bytes] | None = None
    """Tick and state of the moment sampled so far."""
    pending: list[SessionRequest] | None = None
    """Requests for the current decision; None: not sent yet."""

    @property
    def answered(self) -> bool:
        return self.pending is not None and all(request.answer.done() for request in self.pending)


class SessionRequest(NamedTuple):
    """A request to a session for the actions of `heroes`."""

    link: SessionLink
    heroes: Sequence[int]
    answer: asyncio.Future[ActorReply]


@dataclass
class SessionLink:
    """A session with an actor and the heroes that it plays."""

    m: int
    match: HostedMatch
    camps: tuple[int, ...]
    heroes: Sequence[int]
    codec: BodyCodec
    session: ActorSession
    seats: Mapping[int, str]
    """Seat names of the heroes in the session."""
    last_request: float = 0.0
    """Time of the last request."""


Turns: TypeAlias = Mapping[int, Sequence[tuple[SessionLink, Sequence[int], ActorReply]]]
"""By match: sessions, the heroes they were asked for, and their replies."""


async def _wait_for_replies(answers: Collection[asyncio.Future[ActorReply]], some: bool) -> None:
    """Wait for all replies, or at most `_BATCH_S` after the first one. `some`: a match is already complete."""
    missing = [one for one in answers if not one.done()]
    if not missing:
        await asyncio.sleep(0)  # lets signal handlers run
    elif not some:
        await asyncio.wait(missing, return_when=asyncio.FIRST_COMPLETED)
    missing = [one for one in missing if not one.done()]
    if missing:
        await asyncio.wait(missing, timeout=_BATCH_S)


def _plan_sessions(match: HostedMatch) -> list[tuple[tuple[int, ...], list[int], ActorCamp]]:
    """Return camps, heroes and actor of each session."""
    players = {camp: player for camp, player in enumerate(match.plan.camps) if isinstance(player, ActorCamp)}
    sessions = match.plan.options.sessions
    one_actor = len({(player.url, player.token) for player in players.values()}) == 1
    if sessions == "match" and len(players) == CAMPS and one_actor:
        return [(tuple(players), [hero for camp in players for hero in match.heroes_of(camp)], players[0])]
    if sessions == "hero":
        return [((camp,), [hero], player) for camp, player in players.items() for hero in match.heroes_of(camp)]
    return [((camp,), match.heroes_of(camp), player) for camp, player in players.items()]


def set_up_match(arena: Arena, m: int, plan: MatchPlan) -> None:
    """Put match `m` into its start state. Raises LudusError for an unusable saved state."""
    arena.reset([plan.seed], [m], [plan.lineup])
    if plan.options.start == "lane":
        arena.move_to_lane([m])
    if plan.start_from is not None:
        arena.load(m, read_state(plan.start_from).data)
    # A saved state may have another limit or a later tick than the plan allows: play at least one tick.
    limit = arena.settings.limit
    arena.match[m, LIMIT] = max(min(limit, plan.max_ticks or limit), int(arena.tick[m]) + 1)


class MatchHost:
    """Plays M matches of one Arena, one decision of all of them at a time."""

    def __init__(
        self,
        arena: Arena,
        matches: Sequence[HostedMatch],
        *,
        states: Path | None = None,
        share: float = 1.0,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        """`arena` holds the start states of `matches` in its first slots; the other slots are free. `states`: directory for one
        random state of each of a `share` of the matches."""
        self.arena = arena
        self.results: dict[int, dict[str, Any]] = {}
        """By slot: result of its last match."""
        self.played = self.completed = 0
        """Number of finished matches, and of those that ended by the rules or by forfeit."""
        self.stopped = False
        self._plan = matches[0].plan
        self._options = self._plan.options
        self._states, self._share, self._recorders = states, share, recorders
        self._random = np.random.default_rng(self._plan.seed)
        self._actions = np.zeros((arena.matches, arena.heroes, len(layout.HEADS)), np.int32)
        self._bots = np.zeros((arena.matches, arena.heroes), np.int8)  # of each hero in this decision; -1: none
        self._rows = np.divmod(np.arange(arena.matches * arena.heroes), arena.heroes)
        self._whole: npt.NDArray[np.float32] | None = None  # [M, H, S]
        self._observe()  # compiles now rather than during a match
        self._running: dict[int, RunningMatch] = {}
        self._clients: list[AsyncClient] = []
        self._idle: dict[ActorCamp, list[AsyncClient]] = {}  # connections of ended sessions, for reuse
        self._links: list[SessionLink] = []
        self._queued: list[tuple[ActorCamp, Any]] = []  # matches received from actors
        self._begun_ids: deque[str] = deque(maxlen=4 * MAX_TOGETHER)  # ids of matches that have begun
        self._rejected = 0
        for m, match in enumerate(matches):
            self._add_match(m, match)
        self._has_lost_camps = False  # sessions of lost camps are still open
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Play until all matches are over. On cancellation, stop them, end the sessions and return."""
        try:
            await self._start_sessions(self._links)
            at = time.monotonic()
            while True:
                if self._queued:
                    await self._begin_queued()
                if not self._any_running():
                    break
                await self._decide()
                await self._finish()
                if self._options.pace:
                    at = await self._pause(at)
        except asyncio.CancelledError:
            self.stopped = self._any_running()
            for running in self._running.values():
                running.match.end("stopped")
                unanswered = [request.answer for request in running.pending or ()]
                for answer in unanswered:
                    answer.cancel()
                await asyncio.gather(*unanswered, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._finish()
        finally:
            for m in list(self._running):  # their sessions could not be ended
                self._close_match(m)
            if self._endings:
                _, unfinished = await asyncio.wait(self._endings, timeout=_STOP_S)
                for ending in unfinished:
                    ending.cancel()
            for client in self._clients:
                await client.close()

    def _any_running(self) -> bool:
        for running in self._running.values():  # hot path: `any` takes three times as long
            if not running.match.reason:
                return True
        return False

    # -- further matches

    async def _begin_queued(self) -> None:
        """Begin the queued matches while there are free slots."""
        while self._queued:
            taken, self._queued = self._queued, []
            began = len(self._links)
            for actor, given in taken:
                try:
                    plan = read_further_match(given, self._plan, actor, BOTS)
                    if plan.runtime_id in self._begun_ids:  # actors repeat a match until it begins
                        continue
                    m = next((m for m in range(self.arena.matches) if m not in self._running), None)
                    if m is None or not self._options.together:
                        raise ConfigError(
                            f"All {len(self._running)} slots are taken.", "The option `together` sets their number."
                        )
                    set_up_match(self.arena, m, plan)
                except LudusError as error:
                    self._rejected += 1
                    if self._rejected <= _MAX_LOGGED:
                        log.error("further match rejected: %s", error)
                    continue
                self.arena.rewards = plan.options.rewards
                self._add_match(m, HostedMatch(plan, BOTS))
            await self._start_sessions(self._links[began:])

    # -- sessions

    def _add_match(self, m: int, match: HostedMatch) -> None:
        samples_state = self._states is not None and self._random.random() < self._share
        self._running[m] = RunningMatch(match, time.monotonic(), samples_state)
        self._begun_ids.append(match.plan.runtime_id)
        self._links += self._open_links(m, match)

    def _open_links(self, m: int, match: HostedMatch) -> list[SessionLink]:
        made = []
        options, plan = match.plan.options, match.plan
        rows = self.arena.units[m, layout.HERO_ROW, : match.heroes].tolist()
        ids = [HEROES[row].id for row in rows]
        for camps, group, player in _plan_sessions(match):
            lone = options.sessions == "hero"
            # `hero_0` in a session of one camp, `blue_0` in a session of both.
            prefixes = ("hero", "hero") if len(camps) == 1 else layout.CAMP_NAMES
            seats = {hero: f"{prefixes[match.camp_of(hero)]}_{hero % plan.size}" for hero in group}
            codec = BodyCodec(options.format, layout.options_of(self.arena.size), lone=lone, packed_masks=options.lockstep)
            about = {
                "game": "arena",
                "rules": layout.RULES,
                "hero_table": HERO_TABLE,
                "mode": plan.mode,
                **({"camp": camps[0]} if len(camps) == 1 else {"camps": list(camps)}),
                "seats": list(seats.values()),
                "heroes": [ids[: plan.size], ids[plan.size :]],
                "ticks_per_second": layout.TICKS_PER_SECOND,
                "ticks_per_decision": int(self.arena.match[m, EVERY]),
                "eval_mode": plan.eval_mode,
            }
            name = "-".join([plan.runtime_id, *map(str, camps), *([str(group[0] % plan.size)] if lone else [])])
            idle, side = self._idle.get(player), str(camps[0]) if len(camps) == 1 else None
            client = idle.pop() if idle else None
            session = ActorSession(player, name, plan.runtime_id, codec.start(about), options.patience_s, client, side)
            if session.client not in self._clients:
                self._clients.append(session.client)
            made.append(SessionLink(m, match, camps, group, codec, session, seats, time.monotonic()))
        return made

    async def _start_sessions(self, links: Sequence[SessionLink]) -> None:
        for link, answer in zip(links, await asyncio.gather(*(link.session.start() for link in links)), strict=True):
            if answer.gone:
                self._mark_lost(link, answer.why)
            self._queue_matches(link, link.codec.matches_in(answer.reply or b""))
        self._drop_lost()
        await self._finish()

    def _queue_matches(self, link: SessionLink, matches: Sequence[Any]) -> None:
        """Queue further matches from a reply."""
        if matches and self._options.together:
            self._queued += [(link.session.remote, match) for match in matches[: self.arena.matches]]

    def _mark_lost(self, link: SessionLink, why: str) -> None:
        for camp in link.camps:
            if camp not in link.match.lost:
                log.error("%s: the actor of camp %d is gone: %s", link.match.plan.runtime_id, camp, why)
            link.match.lose(camp, why)
        self._has_lost_camps = True

    def _drop_lost(self) -> None:
        """End the sessions of lost camps in the background."""
        self._has_lost_camps = False
        for link in [link for link in self._links if link.camps[0] in link.match.lost]:
            self._links.remove(link)
            ending = asyncio.ensure_future(self._end_session(link.session))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end_session(self, session: ActorSession) -> None:
        await session.end(b"")
        self._clients.remove(session.client)
        await session.client.close()

    # -- one decision

    async def _decide(self) -> None:
        arena = self.arena
        self._observe()
        m, running = next(iter(self._running.items()))
        turns = await self._single_turn(m) if len(self._running) == 1 and running.pending is None else await self._ready_turns()
        actions, bots = self._actions, self._bots
        actions.fill(0)
        bots.fill(-1)
        chosen: list[tuple[SessionLink, int, Action]] = []
        for replies in turns.values():
            for link, heroes, one in replies:
                for hero, action in self._read_reply(link, heroes, one, bots).items():
                    actions[link.m, hero] = action
                    chosen.append((link, hero, action))
        if chosen:
            self._check(chosen, actions, bots)
        if self._has_lost_camps:
            self._drop_lost()
        if not self._any_running():
            return
        waiting = []
        for m, running in self._running.items():
            if m not in turns:
                waiting.append(m)
            if m not in turns or running.match.reason:
                arena.match[m, OVER] = 1  # excluded from this step
            else:
                np.maximum(bots[m], running.match.bot_of_hero, out=bots[m])
        arena.fill_bot_actions(bots, actions)
        self._play(actions, turns)
        for m in waiting:
            arena.match[m, OVER] = 0

    async def _single_turn(self, m: int) -> Turns:
        """Request and return the replies of the only match."""
        due = self._sessions_due(self._links)
        if not due:
            await asyncio.sleep(0)  # lets signal handlers run
        pending = [self._ask(link, heroes) for link, heroes in due]
        answer = [await pending[0]] if len(pending) == 1 else await asyncio.gather(*pending)  # a task costs 20 µs
        return {m: [(link, heroes, one) for (link, heroes), one in zip(due, answer, strict=True)]}

    async def _ready_turns(self) -> Turns:
        """Request actions where due; return the replies of all matches that have all of theirs."""
        by_match: dict[int, list[SessionLink]] = {m: [] for m, running in self._running.items() if running.pending is None}
        for link in self._links:
            if link.m in by_match:
                by_match[link.m].append(link)
        for m, links in by_match.items():
            due = self._sessions_due(links)
            self._running[m].pending = [SessionRequest(*one, asyncio.ensure_future(self._ask(*one))) for one in due]
        matches = self._running.values()
        await _wait_for_replies(
            [one.answer for running in matches for one in running.pending or ()], any(running.answered for running in matches)
        )
        turns = {}
        for m, running in self._running.items():
            if running.answered and running.pending is not None:
                turns[m] = [(one.link, one.heroes, one.answer.result()) for one in running.pending]
                running.pending = None
        return turns

    def _sessions_due(self, links: Sequence[SessionLink]) -> list[tuple[SessionLink, Sequence[int]]]:
        """Return the sessions to ask now and their heroes: the living ones, or with `lockstep` all."""
        alive = None if self._options.lockstep else self.arena.units[:, ALIVE]
        now, due = time.monotonic(), []
        for link in links:
            heroes = link.heroes if alive is None else [hero for hero in link.heroes if alive[link.m, hero]]
            if not heroes and now - link.last_request > _KEEPALIVE_S:
                heroes = link.heroes
            if heroes:
                link.last_request = now
                due.append((link, heroes))
        return due

    def _ask(self, link: SessionLink, heroes: Sequence[int]) -> Coroutine[Any, Any, ActorReply]:
        m, match = link.m, link.match
        steps = [
            SeatStep(link.seats[hero], match.take_reward(hero), self._observation(m, hero), self.arena.mask[m, hero])
            for hero in heroes
        ]
        wrong = {link.seats[hero]: why for hero in link.heroes if (why := match.refusals.pop(hero, ""))} if match.refusals else {}
        if not wrong:
            return link.session.tick(link.codec.steps(steps))
        return link.session.tick(link.codec.steps(steps, {"refused": wrong}), link.codec.steps(steps))

    def _observation(self, m: int, hero: int) -> HeroObservation:
        arena = self.arena
        state = None if self._whole is None else self._whole[m, hero]
        return HeroObservation(arena.entities[m, hero], arena.scalars[m, hero], arena.target_mask[m, hero], state)

    def _observe(self) -> None:
        arena = self.arena
        arena.observe()
        if self._options.whole:
            self._whole = arena.central_observation(*self._rows).reshape(arena.matches, arena.heroes, -1)

    def _read_reply(
        self, link: SessionLink, heroes: Sequence[int], answer: ActorReply, bots: npt.NDArray[np.int8]
    ) -> dict[int, Action]:
        """Return the actions in a reply. Heroes without a valid one are entered into `bots` if the rule stands in."""
        match = link.match
        if answer.reply is None:
            for hero in heroes:
                match.counts[hero].asked += 1
                match.counts[hero].late += 1
                self._stand_in(link, hero, bots)
            if answer.gone:
                self._mark_lost(link, answer.why)
            elif answer.fresh:
                match.reset_session(link.heroes)
            else:
                self._log_problem(link, f"no answer: {answer.why}")
            return {}
        seats = {link.seats[hero]: hero for hero in heroes}
        reply = link.codec.read(answer.reply, seats)
        if reply.matches:
            self._queue_matches(link, reply.matches)
        for hero in heroes:
            match.acted[hero] = True
            match.counts[hero].asked += 1
        for name, why in reply.wrong.items():
            self._refuse(link, seats[name], why, garbled=True)
            self._stand_in(link, seats[name], bots)
        if reply.others and (unknown := reply.others - set(link.seats.values())):  # actions of dead heroes are ignored
            self._refuse(link, heroes[0], f"There is no seat {min(unknown)!r}.", garbled=True)
        return {seats[name]: action for name, action in reply.actions.items()}

    def _check(
        self, chosen: Sequence[tuple[SessionLink, int, Action]], actions: npt.NDArray[np.int32], bots: npt.NDArray[np.int8]
    ) -> None:
        """Replace illegal actions."""
        legal = self.arena.legal(actions)
        for link, hero, action in chosen:
            m = link.m
            # With `lenient` the Arena replaces an invalid target.
            retargeted = self._options.lenient and action[0] in layout.AIMED and self.arena.mask[m, hero, action[0]]
            if not legal[m, hero] and not retargeted:
                why = explain_refusal(action, self.arena.mask[m, hero], self.arena.target_mask[m, hero])
                self._refuse(link, hero, why, garbled=False)
                actions[m, hero] = 0
                self._stand_in(link, hero, bots)

    def _stand_in(self, link: SessionLink, hero: int, bots: npt.NDArray[np.int8]) -> None:
        if self._options.on_illegal == "rule":
            bots[link.m, hero] = link.match.rule

    def _refuse(self, link: SessionLink, hero: int, why: str, *, garbled: bool) -> None:
        link.match.refuse(hero, why, garbled=garbled)
        self._log_problem(link, f"{link.seats[hero]} refused: {why}")

    def _log_problem(self, link: SessionLink, what: str) -> None:
        running = self._running[link.m]
        running.problems += 1
        if running.problems <= _MAX_LOGGED:
            log.warning("%s, camp %s: %s", link.match.plan.runtime_id, " and ".join(map(str, link.camps)), what)
        if running.problems == _MAX_LOGGED:
            log.warning("%s: further problems are counted but not logged", link.match.plan.runtime_id)

    def _play(self, actions: npt.NDArray[np.int32], turns: Collection[int]) -> None:
        arena = self.arena
        for recorder in self._recorders:
            recorder.add(actions)
        arena.step(actions)
        for m, running in self._running.items():
            match = running.match
            if match.reason or m not in turns:
                continue
            running.decisions += 1
            match.reward(arena.reward[m])
            if arena.over[m]:
                match.end_by_rules(int(arena.winner[m]), int(arena.tick[m]), int(arena.match[m, LIMIT]))
            elif running.samples_state and self._random.random() * running.decisions < 1:
                # Reservoir sampling: every moment of the match is equally likely.
                running.sampled_state = int(arena.tick[m]), arena.save(m)

    async def _pause(self, at: float) -> float:
        """Sleep according to `pace`; return the time at which this decision ended or should have ended."""
        at += int(self.arena.match[0, EVERY]) / self._options.pace
        left_s = at - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
            return at
        return time.monotonic()  # late: the delay is not made up

    # -- ends

    async def _finish(self) -> None:
        """Close finished matches, end their sessions and write their states."""
        over = [m for m, running in self._running.items() if running.match.reason]
        if not over:
            return
        self._observe()
        closing = [link for link in self._links if link.m in over]
        self._links = [link for link in self._links if link.m not in over]
        for m in over:
            running = self._close_match(m)
            log.info("%s: %s after %d ticks", running.match.plan.runtime_id, running.match.reason, self.arena.tick[m])
            self._save_state(running)
        for link, reply in zip(closing, await asyncio.gather(*(self._end(link) for link in closing)), strict=True):
            self._idle.setdefault(link.session.remote, []).append(link.session.client)
            self._queue_matches(link, link.codec.matches_in(reply))

    def _end(self, link: SessionLink) -> Coroutine[Any, Any, bytes]:
        """End a session. Only truncated matches (and `lockstep`) send a final observation."""
        match, m = link.match, link.m
        steps = [
            SeatStep(
                link.seats[hero],
                match.take_reward(hero),
                None if match.decided and not self._options.lockstep else self._observation(m, hero),
                terminated=match.decided,
                truncated=not match.decided,
            )
            for hero in link.heroes
            if match.acted[hero]
        ]
        return link.session.end(link.codec.steps(steps, {"result": self.results[m]}), link.codec.steps(steps))

    def _close_match(self, m: int) -> RunningMatch:
        """Free the slot of a match and store its result."""
        running, arena = self._running.pop(m), self.arena
        seconds = time.monotonic() - running.began
        self.results[m] = match_result(running.match, arena.units[m], int(arena.tick[m]), seconds, arena.hash(m))
        self.played += 1
        self.completed += running.match.completed
        arena.match[m, OVER] = 1
        return running

    def _save_state(self, running: RunningMatch) -> None:
        if self._states is None or running.sampled_state is None or not running.match.completed:
            return
        tick, data = running.sampled_state
        name = f"{running.match.plan.runtime_id}-{tick}"
        try:
            write_state(self._states / name, data)
        except LudusError as error:  # the match result is not affected
            log.warning("%s: state not written: %s", name, error)
