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
from ludus.games.arena.bots.bots import SCRIPTS
from ludus.games.arena.engine.central_observation import whole
from ludus.games.arena.engine.heroes import HEROES, TABLE
from ludus.games.arena.engine.layout import AIMED, ALIVE, EVERY, HEADS, HERO_ROW, LIMIT, OVER, RULES, TICKS_PER_SECOND
from ludus.games.arena.engine.recording import Recorder
from ludus.games.arena.engine.saved_state import read_state, write_state
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.host.actor_session import Heard, Talk
from ludus.games.arena.host.codec import Action, Form, Seen, Step, options_of, refusal
from ludus.games.arena.host.match import CAMPS, MAX_TOGETHER, Match, Plan, Remote, outcome, read_further
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
class Place:
    """A match of an Arena while it is played."""

    match: Match
    began: float
    saves: bool
    """A state of it is kept."""
    decisions: int = 0
    logged: int = 0
    """Refusals."""
    kept: tuple[int, bytes] | None = None
    """The tick and the state of a moment."""
    asking: list[Asking] | None = None
    """Who was asked for the decision that is due; None: nobody has been."""

    @property
    def answered(self) -> bool:
        return self.asking is not None and all(asking.heard.done() for asking in self.asking)


class Asking(NamedTuple):
    """A session that was asked for these heroes, and what it says."""

    line: Line
    heroes: Sequence[int]
    heard: asyncio.Future[Heard]


@dataclass
class Line:
    """A session, and the heroes that are played through it."""

    m: int
    match: Match
    camps: tuple[int, ...]
    heroes: Sequence[int]
    form: Form
    talk: Talk
    seats: Mapping[int, str]
    """How its heroes are called in it."""
    asked: float = 0.0


Turns: TypeAlias = Mapping[int, Sequence[tuple[Line, Sequence[int], Heard]]]
"""By match: sessions that were asked for these heroes, and what they say."""


async def _enough(heard: Collection[asyncio.Future[Heard]], some: bool) -> None:
    """Until all have spoken; or, when the first has, for a moment. `some`: of somebody nothing is awaited."""
    silent = [one for one in heard if not one.done()]
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


async def _withdrawn(heard: Sequence[asyncio.Future[Heard]]) -> None:
    """Nobody waits for these any more."""
    for one in heard:
        one.cancel()
    await asyncio.gather(*heard, return_exceptions=True)


def _seats(match: Match, heroes: Sequence[int], camps: Sequence[int]) -> dict[int, str]:
    """As their camp calls them; where one session plays both, as everybody does."""
    if len(camps) == 1:
        return {hero: match.seat_of(hero) for hero in heroes}
    return {hero: f"{CAMP_NAMES[match.camp_of(hero)]}_{hero % match.plan.size}" for hero in heroes}


def _sessions(match: Match) -> list[tuple[tuple[int, ...], list[int], Remote]]:
    """Camps and heroes of each session, and who plays them."""
    players = {camp: player for camp, player in enumerate(match.plan.camps) if isinstance(player, Remote)}
    sessions = match.plan.options.sessions
    one_actor = len({(player.url, player.token) for player in players.values()}) == 1
    if sessions == "match" and len(players) == CAMPS and one_actor:
        return [(tuple(players), [hero for camp in players for hero in match.heroes_of(camp)], players[0])]
    if sessions == "hero":
        return [((camp,), [hero], player) for camp, player in players.items() for hero in match.heroes_of(camp)]
    return [((camp,), match.heroes_of(camp), player) for camp, player in players.items()]


def set_up(arena: Arena, m: int, plan: Plan) -> None:
    """Match `m` stands where it is to begin. Raises LudusError for a saved state that cannot be used."""
    arena.reset([plan.seed], [m], [plan.lineup])
    if plan.options.start == "lane":
        arena.to_lane([m])
    if plan.start_from is not None:
        arena.load(m, read_state(plan.start_from).data)
    # A saved state may be of a match with another limit, or later than ours: it goes on for one tick at least.
    limit = arena.settings.limit
    arena.match[m, LIMIT] = max(min(limit, plan.max_ticks or limit), int(arena.tick[m]) + 1)


class Host:
    """M matches in one Arena, a decision of all of them at a time."""

    def __init__(
        self,
        arena: Arena,
        matches: Sequence[Match],
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
        self._names = np.zeros((arena.matches, arena.heroes), np.int8)  # of the scripts that play now
        self._places = np.divmod(np.arange(arena.matches * arena.heroes), arena.heroes)
        self._whole: npt.NDArray[np.float32] | None = None  # [M, H, S]
        self._observe()  # what is compiled for it keeps nobody waiting
        self._playing: dict[int, Place] = {}
        self._clients: list[AsyncClient] = []
        self._idle: dict[Remote, list[AsyncClient]] = {}  # those of talks that are over
        self._lines: list[Line] = []
        self._handed: list[tuple[Remote, Any]] = []  # matches that are yet to begin
        self._recent: deque[str] = deque(maxlen=4 * MAX_TOGETHER)  # matches that have begun
        self._unplayed = 0
        for m, match in enumerate(matches):
            self._place(m, match)
        self._losses = False  # camps were lost whose sessions are still there
        self._farewells: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until all matches are over. Cancelled once, it stops them, tells the actors, and returns."""
        try:
            await self._begin(self._lines)
            at = time.monotonic()
            while True:
                if self._handed:
                    await self._take()
                if not self._going():
                    break
                await self._decide()
                if self._news():
                    await self._finish()
                if self._options.pace:
                    at = await self._pause(at)
        except asyncio.CancelledError:
            self.stopped = self._going()
            for place in self._playing.values():
                place.match.end("stopped")
                await _withdrawn([asking.heard for asking in place.asking or ()])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._finish()
        finally:
            self._summarise()
            if self._farewells:
                _, deaf = await asyncio.wait(self._farewells, timeout=_STOP_S)
                for farewell in deaf:
                    farewell.cancel()
            for client in self._clients:
                await client.close()

    def _going(self) -> bool:
        for place in self._playing.values():  # `any` takes three times as long, and every decision asks
            if not place.match.reason:
                return True
        return False

    def _news(self) -> bool:
        """A match is over, and nobody has been told."""
        for place in self._playing.values():
            if place.match.reason:
                return True
        return False

    # -- further matches

    async def _take(self) -> None:
        """Matches that were handed over begin, as long as there is room."""
        while self._handed:
            taken, self._handed = self._handed, []
            began = len(self._lines)
            for actor, given in taken:
                try:
                    plan = read_further(given, self._first, actor, SCRIPTS)
                    if plan.runtime_id in self._recent:  # it is told of until it begins
                        continue
                    m = self._free_place()
                    set_up(self.arena, m, plan)
                except LudusError as error:
                    self._unplayed += 1
                    if self._unplayed <= _LOGGED:
                        log.error("a further match is not played: %s", error)
                    continue
                self.arena.rewards = plan.options.rewards
                self._place(m, Match(plan, SCRIPTS))
            await self._begin(self._lines[began:])

    def _free_place(self) -> int:
        if self._options.together:
            for m in range(self.arena.matches):
                if m not in self._playing:
                    return m
        raise ConfigError(f"All {len(self._playing)} places are taken.", "The option `together` says how many there are.")

    # -- sessions

    def _place(self, m: int, match: Match) -> None:
        saves = self._states is not None and self._chance.random() < self._share
        self._playing[m] = Place(match, time.monotonic(), saves)
        self._recent.append(match.plan.runtime_id)
        self._lines += self._lines_of(m, match)

    def _lines_of(self, m: int, match: Match) -> list[Line]:
        made = []
        options, plan = match.plan.options, match.plan
        rows = self.arena.units[m, HERO_ROW, : match.heroes].tolist()
        ids = [HEROES[row].id for row in rows]
        for camps, group, player in _sessions(match):
            lone, seats = options.sessions == "hero", _seats(match, group, camps)
            form = Form(options.format, options_of(self.arena.units.shape[2]), lone=lone, packed_masks=options.lockstep)
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
            talk = Talk(player, name, plan.runtime_id, form.start(about), options.patience_s, idle.pop() if idle else None)
            if talk.client not in self._clients:
                self._clients.append(talk.client)
            made.append(Line(m, match, camps, group, form, talk, seats, time.monotonic()))
        return made

    async def _begin(self, lines: Sequence[Line]) -> None:
        for line, heard in zip(lines, await asyncio.gather(*(line.talk.start() for line in lines)), strict=True):
            if heard.gone:
                self._lose(line, heard.why)
            self._hand(line, line.form.handed(heard.reply or b""))
        self._drop_lost()
        await self._finish()

    def _hand(self, line: Line, matches: Sequence[Any]) -> None:
        """An actor hands over further matches."""
        if matches and self._options.together:
            self._handed += [(line.talk.remote, match) for match in matches[: self.arena.matches]]

    def _lose(self, line: Line, why: str) -> None:
        for camp in line.camps:
            if camp not in line.match.lost:
                log.error("%s: the actor of camp %d is gone: %s", line.match.plan.runtime_id, camp, why)
            line.match.lose(camp, why)
        self._losses = True

    def _drop_lost(self) -> None:
        """Sessions of a camp that plays no more end, if anybody hears it. Nobody waits for that."""
        self._losses = False
        for line in [line for line in self._lines if line.camps[0] in line.match.lost]:
            self._lines.remove(line)
            farewell = asyncio.ensure_future(self._farewell(line.talk))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _farewell(self, talk: Talk) -> None:
        await talk.end(b"")
        self._clients.remove(talk.client)
        await talk.client.close()

    # -- one decision

    async def _decide(self) -> None:
        arena = self.arena
        self._observe()
        m, place = next(iter(self._playing.items()))
        turns = await self._alone(m) if len(self._playing) == 1 and place.asking is None else await self._turns()
        actions, names = self._actions, self._names
        actions.fill(0)
        names.fill(-1)
        chosen: list[tuple[Line, int, Action]] = []
        for told in turns.values():
            for line, heroes, one in told:
                for hero, action in self._heard(line, heroes, one, names).items():
                    actions[line.m, hero] = action
                    chosen.append((line, hero, action))
        if chosen:
            self._check(chosen, actions, names)
        if self._losses:
            self._drop_lost()
        if not self._going():
            return
        waiting = []
        for m, place in self._playing.items():
            if m not in turns:
                waiting.append(m)
            if m not in turns or place.match.reason:
                arena.match[m, OVER] = 1  # it stands still, whatever has ended it
            else:
                np.maximum(names[m], place.match.script, out=names[m])
        arena.fill(names, actions)
        self._play(actions, turns)
        for m in waiting:
            arena.match[m, OVER] = 0

    async def _alone(self, m: int) -> Turns:
        """What the actors of the only match say."""
        asked = self._asked(self._lines)
        if not asked:
            await asyncio.sleep(0)  # a signal is heard in between
        asking = [self._ask(line, heroes) for line, heroes in asked]
        heard = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)  # a task costs 20 µs
        return {m: [(line, heroes, one) for (line, heroes), one in zip(asked, heard, strict=True)]}

    async def _turns(self) -> Turns:
        """What the actors say, of all matches whose actors have all spoken."""
        by_match: dict[int, list[Line]] = {m: [] for m, place in self._playing.items() if place.asking is None}
        for line in self._lines:
            if line.m in by_match:
                by_match[line.m].append(line)
        for m, lines in by_match.items():
            asked = self._asked(lines)
            self._playing[m].asking = [Asking(*one, asyncio.ensure_future(self._ask(*one))) for one in asked]
        places = self._playing.values()
        await _enough([one.heard for place in places for one in place.asking or ()], any(place.answered for place in places))
        turns = {}
        for m, place in self._playing.items():
            if place.answered and place.asking is not None:
                turns[m] = [(one.line, one.heroes, one.heard.result()) for one in place.asking]
                place.asking = None
        return turns

    def _asked(self, lines: Sequence[Line]) -> list[tuple[Line, Sequence[int]]]:
        """Who of them is asked now, for which heroes: those alive, or all of them."""
        alive = None if self._options.lockstep else self.arena.units[:, ALIVE]
        now, asked = time.monotonic(), []
        for line in lines:
            heroes = line.heroes if alive is None else [hero for hero in line.heroes if alive[line.m, hero]]
            if not heroes and now - line.asked > _SILENT_S:
                heroes = line.heroes
            if heroes:
                line.asked = now
                asked.append((line, heroes))
        return asked

    def _ask(self, line: Line, heroes: Sequence[int]) -> Coroutine[Any, Any, Heard]:
        m, match = line.m, line.match
        steps = [Step(line.seats[hero], match.take(hero), self._seen(m, hero), self.arena.mask[m, hero]) for hero in heroes]
        wrong = {line.seats[hero]: why for hero in line.heroes if (why := match.told.pop(hero, ""))} if match.told else {}
        if not wrong:
            return line.talk.tick(line.form.steps(steps))
        return line.talk.tick(line.form.steps(steps, {"refused": wrong}), line.form.steps(steps))

    def _seen(self, m: int, hero: int) -> Seen:
        arena = self.arena
        state = None if self._whole is None else self._whole[m, hero]
        return Seen(arena.entities[m, hero], arena.scalars[m, hero], arena.target_mask[m, hero], state)

    def _observe(self) -> None:
        arena = self.arena
        arena.observe()
        if self._options.whole:
            self._whole = whole(arena, *self._places).reshape(arena.matches, arena.heroes, -1)

    def _heard(self, line: Line, heroes: Sequence[int], heard: Heard, names: npt.NDArray[np.int8]) -> dict[int, Action]:
        """Actions of the heroes that were asked for; who has none is entered into `names`, where the rule is to stand in."""
        match = line.match
        if heard.reply is None:
            for hero in heroes:
                match.counts[hero].asked += 1
                match.counts[hero].late += 1
                self._stand_in(line, hero, names)
            if heard.gone:
                self._lose(line, heard.why)
            elif heard.fresh:
                match.forget(line.heroes)
            else:
                self._complain(line, f"no answer: {heard.why}")
            return {}
        seats = {line.seats[hero]: hero for hero in heroes}
        reply = line.form.read(heard.reply, seats)
        if reply.matches:
            self._hand(line, reply.matches)
        for hero in heroes:
            match.acted[hero] = True
            match.counts[hero].asked += 1
        for name, why in reply.wrong.items():
            self._refuse(line, seats[name], why, garbled=True)
            self._stand_in(line, seats[name], names)
        if reply.others and (strange := reply.others - set(line.seats.values())):  # for the dead an answer is only superfluous
            self._refuse(line, heroes[0], f"There is no seat {min(strange)!r}.", garbled=True)
        return {seats[name]: action for name, action in reply.actions.items()}

    def _check(
        self, chosen: Sequence[tuple[Line, int, Action]], actions: npt.NDArray[np.int32], names: npt.NDArray[np.int8]
    ) -> None:
        """Whether what the actors chose is allowed."""
        legal = self.arena.legal(actions)
        for line, hero, action in chosen:
            m = line.m
            if not legal[m, hero] and not self._forgiven(m, hero, action):
                why = refusal(action, self.arena.mask[m, hero], self.arena.target_mask[m, hero])
                self._refuse(line, hero, why, garbled=False)
                actions[m, hero] = 0
                self._stand_in(line, hero, names)

    def _forgiven(self, m: int, hero: int, action: Action) -> bool:
        """The Arena finds a target for it."""
        return self._options.lenient and action[0] in AIMED and bool(self.arena.mask[m, hero, action[0]])

    def _stand_in(self, line: Line, hero: int, names: npt.NDArray[np.int8]) -> None:
        if self._options.on_illegal == "rule":
            names[line.m, hero] = line.match.rule

    def _refuse(self, line: Line, hero: int, why: str, *, garbled: bool) -> None:
        line.match.refuse(hero, why, garbled=garbled)
        self._complain(line, f"{line.seats[hero]} refused: {why}")

    def _complain(self, line: Line, what: str) -> None:
        place = self._playing[line.m]
        place.logged += 1
        if place.logged <= _LOGGED:
            log.warning("%s, camp %s: %s", line.match.plan.runtime_id, " and ".join(map(str, line.camps)), what)
        if place.logged == _LOGGED:
            log.warning("%s: further ones are counted only.", line.match.plan.runtime_id)

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
                match.judge(int(arena.winner[m]), int(arena.tick[m]), int(arena.match[m, LIMIT]))
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
        ending = [line for line in self._lines if line.m in over]
        self._lines = [line for line in self._lines if line.m not in over]
        for m in over:
            place = self._leave(m)
            log.info("%s: %s after %d ticks", place.match.plan.runtime_id, place.match.reason, self.arena.tick[m])
            self._keep(place)
        for line, reply in zip(ending, await asyncio.gather(*(self._end(line) for line in ending)), strict=True):
            self._idle.setdefault(line.talk.remote, []).append(line.talk.client)
            self._hand(line, line.form.handed(reply))

    def _end(self, line: Line) -> Coroutine[Any, Any, bytes]:
        """Whoever won or lost saw the end; whoever was interrupted, or ran out of time, sees where it was cut."""
        match, m = line.match, line.m
        steps = [
            Step(
                line.seats[hero],
                match.take(hero),
                None if match.decided and not self._options.lockstep else self._seen(m, hero),
                terminated=match.decided,
                truncated=not match.decided,
            )
            for hero in line.heroes
            if match.acted[hero]
        ]
        return line.talk.end(line.form.steps(steps, {"result": self.results[m]}), line.form.steps(steps))

    def _leave(self, m: int) -> Place:
        """The place of a match is free; how it went is kept."""
        place, arena = self._playing.pop(m), self.arena
        seconds = time.monotonic() - place.began
        self.results[m] = outcome(place.match, arena.units[m], int(arena.tick[m]), seconds, arena.hash(m))
        self.played += 1
        self.completed += place.match.completed
        arena.match[m, OVER] = 1
        return place

    def _summarise(self) -> None:
        """What was not told to anybody any more."""
        for m in list(self._playing):
            self._leave(m)

    def _keep(self, place: Place) -> None:
        if self._states is None or place.kept is None or not place.match.completed:
            return
        tick, data = place.kept
        name = f"{place.match.plan.runtime_id}-{tick}"
        try:
            write_state(self._states / name, data)
        except LudusError as error:  # the match itself was played
            log.warning("%s: the state was not kept: %s", name, error)
