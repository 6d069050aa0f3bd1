"""Hosts matches: asks the actors of all of them at once, plays what they answer, and tells them how it ended. A match whose actors take
longer than those of the others stands still meanwhile.

Where the plan says so, actors hand over further matches in their replies, which take the places of those that are over.
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
from ludus.games.arena.engine.central_observation import central_observation
from ludus.games.arena.engine.heroes import HEROES, TABLE
from ludus.games.arena.engine.layout import AIMED, ALIVE, EVERY, HEADS, HERO_ROW, LIMIT, OVER, RULES, TICKS_PER_SECOND
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.saved_state import read_state, write_state
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.host.actor_session import ActorReply, ActorSession
from ludus.games.arena.host.codec import Action, BodyCodec, HeroObservation, SeatStep, explain_refusal, options_of
from ludus.games.arena.host.match import CAMPS, MAX_TOGETHER, ActorCamp, HostedMatch, MatchPlan, match_result, read_handed_match
from ludus.protocol.client import AsyncClient

log = logging.getLogger(__name__)

HERO_TABLE: Final = hashlib.blake2b(TABLE.tobytes(), digest_size=8).hexdigest()
"""Changes when a hero does."""
_SILENT_S: Final = 20.0
"""A camp whose heroes are all dead for longer is asked nevertheless: sessions end by silence."""
_STOP_S: Final = 2.0
"""For telling the actors, when we are told to stop."""
CAMP_NAMES: Final = ("blue", "red")
_MOMENT_S: Final = 0.005
"""Matches are played a decision further together with all that are answered within so long."""
_LOGGED: Final = 20
"""Refusals of one match that are logged; the others are counted."""


@dataclass
class RunningMatch:
    """A match of an Arena while it is played."""

    match: HostedMatch
    began: float
    saves: bool
    """A state of it is kept."""
    decisions: int = 0
    logged: int = 0
    """Refusals."""
    kept: tuple[int, bytes] | None = None
    """The tick and the state of a moment."""
    pending: list[PendingReply] | None = None
    """Who was asked for the decision that is due; None: nobody has been."""

    @property
    def answered(self) -> bool:
        return self.pending is not None and all(pending.answer.done() for pending in self.pending)


class PendingReply(NamedTuple):
    """A session that was asked for these heroes, and what it says."""

    link: SessionLink
    heroes: Sequence[int]
    answer: asyncio.Future[ActorReply]


@dataclass
class SessionLink:
    """A session, and the heroes that are played through it."""

    m: int
    match: HostedMatch
    camps: tuple[int, ...]
    heroes: Sequence[int]
    codec: BodyCodec
    session: ActorSession
    seats: Mapping[int, str]
    """How its heroes are called in it."""
    asked: float = 0.0


Turns: TypeAlias = Mapping[int, Sequence[tuple[SessionLink, Sequence[int], ActorReply]]]
"""By match: sessions that were asked for these heroes, and what they say."""


async def _wait_for_replies(answer: Collection[asyncio.Future[ActorReply]], some: bool) -> None:
    """Until all have spoken; or, when the first has, for a moment. `some`: of somebody nothing is awaited."""
    silent = [one for one in answer if not one.done()]
    if not silent:
        await asyncio.sleep(0)  # a signal is heard in between
        return
    loop = asyncio.get_running_loop()
    enough: asyncio.Future[None] = loop.create_future()
    left = len(silent)

    def end() -> None:
        if not enough.done():
            enough.set_result(None)

    timer = loop.call_later(_MOMENT_S, end) if some else None

    def told(_: object) -> None:
        nonlocal left, timer
        left -= 1
        if left == 0:
            end()
        elif timer is None:
            timer = loop.call_later(_MOMENT_S, end)

    for one in silent:
        one.add_done_callback(told)
    try:
        await enough
    finally:
        if timer is not None:
            timer.cancel()
        for one in silent:
            one.remove_done_callback(told)


async def _cancel_all(answer: Sequence[asyncio.Future[ActorReply]]) -> None:
    """Nobody waits for these any more."""
    for one in answer:
        one.cancel()
    await asyncio.gather(*answer, return_exceptions=True)


def _seats(match: HostedMatch, heroes: Sequence[int], camps: Sequence[int]) -> dict[int, str]:
    """As their camp calls them; where one session plays both, as everybody does."""
    if len(camps) == 1:
        return {hero: match.seat_of(hero) for hero in heroes}
    return {hero: f"{CAMP_NAMES[match.camp_of(hero)]}_{hero % match.plan.size}" for hero in heroes}


def _plan_sessions(match: HostedMatch) -> list[tuple[tuple[int, ...], list[int], ActorCamp]]:
    """Camps and heroes of each session, and who plays them."""
    players = {camp: player for camp, player in enumerate(match.plan.camps) if isinstance(player, ActorCamp)}
    sessions = match.plan.options.sessions
    one_actor = len({(player.url, player.token) for player in players.values()}) == 1
    if sessions == "match" and len(players) == CAMPS and one_actor:
        return [(tuple(players), [hero for camp in players for hero in match.heroes_of(camp)], players[0])]
    if sessions == "hero":
        return [((camp,), [hero], player) for camp, player in players.items() for hero in match.heroes_of(camp)]
    return [((camp,), match.heroes_of(camp), player) for camp, player in players.items()]


def set_up_match(arena: Arena, m: int, plan: MatchPlan) -> None:
    """Match `m` stands where it is to begin. Raises LudusError for a saved state that cannot be used."""
    arena.reset([plan.seed], [m], [plan.lineup])
    if plan.options.start == "lane":
        arena.move_to_lane([m])
    if plan.start_from is not None:
        arena.load(m, read_state(plan.start_from).data)
    # A saved state may be of a match with another limit, or later than ours: it goes on for one tick at least.
    limit = arena.settings.limit
    arena.match[m, LIMIT] = max(min(limit, plan.max_ticks or limit), int(arena.tick[m]) + 1)


class MatchHost:
    """M matches in one Arena, a decision of all of them at a time."""

    def __init__(
        self,
        arena: Arena,
        matches: Sequence[HostedMatch],
        *,
        states: Path | None = None,
        share: float = 1.0,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        """The first places of `arena` stand where the matches begin; the others are free. `states`: where a state of this `share` of
        the matches is kept, of a moment chosen at random."""
        self.arena = arena
        self.results: dict[int, dict[str, Any]] = {}
        """Of the last match of every place."""
        self.played = self.completed = 0
        """Matches that are over, and those of them that came to their own end."""
        self.stopped = False
        self._first = matches[0].plan
        self._options = self._first.options
        self._states, self._share, self._recorders = states, share, recorders
        self._chance = np.random.default_rng(self._first.seed)
        self._actions = np.zeros((arena.matches, arena.heroes, len(HEADS)), np.int32)
        self._bots = np.zeros((arena.matches, arena.heroes), np.int8)  # of the scripts that play now
        self._places = np.divmod(np.arange(arena.matches * arena.heroes), arena.heroes)
        self._whole: npt.NDArray[np.float32] | None = None  # [M, H, S]
        self._observe()  # what is compiled for it keeps nobody waiting
        self._playing: dict[int, RunningMatch] = {}
        self._clients: list[AsyncClient] = []
        self._idle: dict[ActorCamp, list[AsyncClient]] = {}  # those of talks that are over
        self._links: list[SessionLink] = []
        self._queued: list[tuple[ActorCamp, Any]] = []  # matches that are yet to begin
        self._recent: deque[str] = deque(maxlen=4 * MAX_TOGETHER)  # matches that have begun
        self._unplayed = 0
        for m, match in enumerate(matches):
            self._add_match(m, match)
        self._losses = False  # camps were lost whose sessions are still there
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until all matches are over. Cancelled once, it stops them, tells the actors, and returns."""
        try:
            await self._begin(self._links)
            at = time.monotonic()
            while True:
                if self._queued:
                    await self._begin_handed()
                if not self._any_running():
                    break
                await self._decide()
                if self._any_over():
                    await self._finish()
                if self._options.pace:
                    at = await self._pause(at)
        except asyncio.CancelledError:
            self.stopped = self._any_running()
            for place in self._playing.values():
                place.match.end("stopped")
                await _cancel_all([pending.answer for pending in place.pending or ()])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._finish()
        finally:
            self._close_remaining()
            if self._endings:
                _, deaf = await asyncio.wait(self._endings, timeout=_STOP_S)
                for ending in deaf:
                    ending.cancel()
            for client in self._clients:
                await client.close()

    def _any_running(self) -> bool:
        for place in self._playing.values():  # `any` takes three times as long, and every decision asks
            if not place.match.reason:
                return True
        return False

    def _any_over(self) -> bool:
        """A match is over, and nobody has been told."""
        for place in self._playing.values():
            if place.match.reason:
                return True
        return False

    # -- further matches

    async def _begin_handed(self) -> None:
        """Matches that were handed over begin, as long as there is room."""
        while self._queued:
            taken, self._queued = self._queued, []
            began = len(self._links)
            for actor, given in taken:
                try:
                    plan = read_handed_match(given, self._first, actor, BOTS)
                    if plan.runtime_id in self._recent:  # it is told of until it begins
                        continue
                    m = self._free_place()
                    set_up_match(self.arena, m, plan)
                except LudusError as error:
                    self._unplayed += 1
                    if self._unplayed <= _LOGGED:
                        log.error("a further match is not played: %s", error)
                    continue
                self.arena.rewards = plan.options.rewards
                self._add_match(m, HostedMatch(plan, BOTS))
            await self._begin(self._links[began:])

    def _free_place(self) -> int:
        if self._options.together:
            for m in range(self.arena.matches):
                if m not in self._playing:
                    return m
        raise ConfigError(f"All {len(self._playing)} places are taken.", "The option `together` says how many there are.")

    # -- sessions

    def _add_match(self, m: int, match: HostedMatch) -> None:
        saves = self._states is not None and self._chance.random() < self._share
        self._playing[m] = RunningMatch(match, time.monotonic(), saves)
        self._recent.append(match.plan.runtime_id)
        self._links += self._open_links(m, match)

    def _open_links(self, m: int, match: HostedMatch) -> list[SessionLink]:
        made = []
        options, plan = match.plan.options, match.plan
        rows = self.arena.units[m, HERO_ROW, : match.heroes].tolist()
        ids = [HEROES[row].id for row in rows]
        for camps, group, player in _plan_sessions(match):
            lone, seats = options.sessions == "hero", _seats(match, group, camps)
            codec = BodyCodec(options.format, options_of(self.arena.units.shape[2]), lone=lone, packed_masks=options.lockstep)
            about = {
                "game": "arena",
                "rules": RULES,
                "hero_table": HERO_TABLE,
                "mode": plan.mode,
                **({"camp": camps[0]} if len(camps) == 1 else {"camps": list(camps)}),
                "seats": list(seats.values()),
                "heroes": [ids[: plan.size], ids[plan.size :]],
                "ticks_per_second": TICKS_PER_SECOND,
                "ticks_per_decision": int(self.arena.match[m, EVERY]),
                "eval_mode": plan.eval_mode,
            }
            name = "-".join([plan.runtime_id, *map(str, camps), *([str(group[0] % plan.size)] if lone else [])])
            idle = self._idle.get(player)
            session = ActorSession(
                player, name, plan.runtime_id, codec.start(about), options.patience_s, idle.pop() if idle else None
            )
            if session.client not in self._clients:
                self._clients.append(session.client)
            made.append(SessionLink(m, match, camps, group, codec, session, seats, time.monotonic()))
        return made

    async def _begin(self, links: Sequence[SessionLink]) -> None:
        for link, answer in zip(links, await asyncio.gather(*(link.session.start() for link in links)), strict=True):
            if answer.gone:
                self._lose(link, answer.why)
            self._queue_matches(link, link.codec.matches_in(answer.reply or b""))
        self._drop_lost()
        await self._finish()

    def _queue_matches(self, link: SessionLink, matches: Sequence[Any]) -> None:
        """An actor hands over further matches."""
        if matches and self._options.together:
            self._queued += [(link.session.remote, match) for match in matches[: self.arena.matches]]

    def _lose(self, link: SessionLink, why: str) -> None:
        for camp in link.camps:
            if camp not in link.match.lost:
                log.error("%s: the actor of camp %d is gone: %s", link.match.plan.runtime_id, camp, why)
            link.match.lose(camp, why)
        self._losses = True

    def _drop_lost(self) -> None:
        """Sessions of a camp that plays no more end, if anybody hears it. Nobody waits for that."""
        self._losses = False
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
        m, place = next(iter(self._playing.items()))
        turns = await self._single_turn(m) if len(self._playing) == 1 and place.pending is None else await self._ready_turns()
        actions, names = self._actions, self._bots
        actions.fill(0)
        names.fill(-1)
        chosen: list[tuple[SessionLink, int, Action]] = []
        for told in turns.values():
            for link, heroes, one in told:
                for hero, action in self._read_reply(link, heroes, one, names).items():
                    actions[link.m, hero] = action
                    chosen.append((link, hero, action))
        if chosen:
            self._check(chosen, actions, names)
        if self._losses:
            self._drop_lost()
        if not self._any_running():
            return
        waiting = []
        for m, place in self._playing.items():
            if m not in turns:
                waiting.append(m)
            if m not in turns or place.match.reason:
                arena.match[m, OVER] = 1  # it stands still, whatever has ended it
            else:
                np.maximum(names[m], place.match.script, out=names[m])
        arena.fill_bot_actions(names, actions)
        self._play(actions, turns)
        for m in waiting:
            arena.match[m, OVER] = 0

    async def _single_turn(self, m: int) -> Turns:
        """What the actors of the only match say."""
        asked = self._sessions_due(self._links)
        if not asked:
            await asyncio.sleep(0)  # a signal is heard in between
        pending = [self._ask(link, heroes) for link, heroes in asked]
        answer = [await pending[0]] if len(pending) == 1 else await asyncio.gather(*pending)  # a task costs 20 µs
        return {m: [(link, heroes, one) for (link, heroes), one in zip(asked, answer, strict=True)]}

    async def _ready_turns(self) -> Turns:
        """What the actors say, of all matches whose actors have all spoken."""
        by_match: dict[int, list[SessionLink]] = {m: [] for m, place in self._playing.items() if place.pending is None}
        for link in self._links:
            if link.m in by_match:
                by_match[link.m].append(link)
        for m, links in by_match.items():
            asked = self._sessions_due(links)
            self._playing[m].pending = [PendingReply(*one, asyncio.ensure_future(self._ask(*one))) for one in asked]
        places = self._playing.values()
        await _wait_for_replies(
            [one.answer for place in places for one in place.pending or ()], any(place.answered for place in places)
        )
        turns = {}
        for m, place in self._playing.items():
            if place.answered and place.pending is not None:
                turns[m] = [(one.link, one.heroes, one.answer.result()) for one in place.pending]
                place.pending = None
        return turns

    def _sessions_due(self, links: Sequence[SessionLink]) -> list[tuple[SessionLink, Sequence[int]]]:
        """Who of them is asked now, for which heroes: those alive, or all of them."""
        alive = None if self._options.lockstep else self.arena.units[:, ALIVE]
        now, asked = time.monotonic(), []
        for link in links:
            heroes = link.heroes if alive is None else [hero for hero in link.heroes if alive[link.m, hero]]
            if not heroes and now - link.asked > _SILENT_S:
                heroes = link.heroes
            if heroes:
                link.asked = now
                asked.append((link, heroes))
        return asked

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
            self._whole = central_observation(arena, *self._places).reshape(arena.matches, arena.heroes, -1)

    def _read_reply(
        self, link: SessionLink, heroes: Sequence[int], answer: ActorReply, names: npt.NDArray[np.int8]
    ) -> dict[int, Action]:
        """Actions of the heroes that were asked for; who has none is entered into `names`, where the rule is to stand in."""
        match = link.match
        if answer.reply is None:
            for hero in heroes:
                match.counts[hero].asked += 1
                match.counts[hero].late += 1
                self._stand_in(link, hero, names)
            if answer.gone:
                self._lose(link, answer.why)
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
            self._stand_in(link, seats[name], names)
        if reply.others and (strange := reply.others - set(link.seats.values())):  # for the dead an answer is only superfluous
            self._refuse(link, heroes[0], f"There is no seat {min(strange)!r}.", garbled=True)
        return {seats[name]: action for name, action in reply.actions.items()}

    def _check(
        self, chosen: Sequence[tuple[SessionLink, int, Action]], actions: npt.NDArray[np.int32], names: npt.NDArray[np.int8]
    ) -> None:
        """Whether what the actors chose is allowed."""
        legal = self.arena.legal(actions)
        for link, hero, action in chosen:
            m = link.m
            if not legal[m, hero] and not self._is_retargeted(m, hero, action):
                why = explain_refusal(action, self.arena.mask[m, hero], self.arena.target_mask[m, hero])
                self._refuse(link, hero, why, garbled=False)
                actions[m, hero] = 0
                self._stand_in(link, hero, names)

    def _is_retargeted(self, m: int, hero: int, action: Action) -> bool:
        """The Arena finds a target for it."""
        return self._options.lenient and action[0] in AIMED and bool(self.arena.mask[m, hero, action[0]])

    def _stand_in(self, link: SessionLink, hero: int, names: npt.NDArray[np.int8]) -> None:
        if self._options.on_illegal == "rule":
            names[link.m, hero] = link.match.rule

    def _refuse(self, link: SessionLink, hero: int, why: str, *, garbled: bool) -> None:
        link.match.refuse(hero, why, garbled=garbled)
        self._log_problem(link, f"{link.seats[hero]} refused: {why}")

    def _log_problem(self, link: SessionLink, what: str) -> None:
        place = self._playing[link.m]
        place.logged += 1
        if place.logged <= _LOGGED:
            log.warning("%s, camp %s: %s", link.match.plan.runtime_id, " and ".join(map(str, link.camps)), what)
        if place.logged == _LOGGED:
            log.warning("%s: further ones are counted only.", link.match.plan.runtime_id)

    def _play(self, actions: npt.NDArray[np.int32], turns: Collection[int]) -> None:
        arena = self.arena
        for recorder in self._recorders:
            recorder.add(actions)
        arena.step(actions)
        for m, place in self._playing.items():
            match = place.match
            if match.reason or m not in turns:
                continue
            place.decisions += 1
            match.reward(arena.reward[m])
            if arena.over[m]:
                match.end_by_rules(int(arena.winner[m]), int(arena.tick[m]), int(arena.match[m, LIMIT]))
            elif place.saves and self._chance.random() * place.decisions < 1:
                # So every moment of the match is as likely as any other to be the last one that is kept.
                place.kept = int(arena.tick[m]), arena.save(m)

    async def _pause(self, at: float) -> float:
        """As long as the pace asks for. When the last decision ended, or should have."""
        at += int(self.arena.match[0, EVERY]) / self._options.pace
        left_s = at - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
            return at
        return time.monotonic()  # late: it is not caught up with

    # -- ends

    async def _finish(self) -> None:
        """Tell those whose match is over, and keep what came of it."""
        over = [m for m, place in self._playing.items() if place.match.reason]
        if not over:
            return
        self._observe()
        closing = [link for link in self._links if link.m in over]
        self._links = [link for link in self._links if link.m not in over]
        for m in over:
            place = self._close_match(m)
            log.info("%s: %s after %d ticks", place.match.plan.runtime_id, place.match.reason, self.arena.tick[m])
            self._save_state(place)
        for link, reply in zip(closing, await asyncio.gather(*(self._end(link) for link in closing)), strict=True):
            self._idle.setdefault(link.session.remote, []).append(link.session.client)
            self._queue_matches(link, link.codec.matches_in(reply))

    def _end(self, link: SessionLink) -> Coroutine[Any, Any, bytes]:
        """Whoever won or lost saw the end; whoever was interrupted, or ran out of time, sees where it was cut."""
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
        """The place of a match is free; how it went is kept."""
        place, arena = self._playing.pop(m), self.arena
        seconds = time.monotonic() - place.began
        self.results[m] = match_result(place.match, arena.units[m], int(arena.tick[m]), seconds, arena.hash(m))
        self.played += 1
        self.completed += place.match.completed
        arena.match[m, OVER] = 1
        return place

    def _close_remaining(self) -> None:
        """What was not told to anybody any more."""
        for m in list(self._playing):
            self._close_match(m)

    def _save_state(self, place: RunningMatch) -> None:
        if self._states is None or place.kept is None or not place.match.completed:
            return
        tick, data = place.kept
        name = f"{place.match.plan.runtime_id}-{tick}"
        try:
            write_state(self._states / name, data)
        except LudusError as error:  # the match itself was played
            log.warning("%s: the state was not kept: %s", name, error)
