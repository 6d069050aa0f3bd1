"""Hosts matches: asks the actors of all of them at once, plays what they answer, and tells them how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ludus.errors import LudusError
from ludus.games.arena.arena import Arena
from ludus.games.arena.bodies import Action, Form, Seen, Step, options_of, refusal
from ludus.games.arena.heroes import HEROES, TABLE
from ludus.games.arena.layout import AIMED, ALIVE, EVERY, HEADS, HERO_ROW, LIMIT, OVER, RULES, TICKS_PER_SECOND
from ludus.games.arena.match import CAMPS, Match, Remote, outcome
from ludus.games.arena.recording import Recorder
from ludus.games.arena.states import write_state
from ludus.games.arena.talk import Heard, Talk
from ludus.games.arena.whole import whole

log = logging.getLogger(__name__)

HERO_TABLE: Final = hashlib.blake2b(TABLE.tobytes(), digest_size=8).hexdigest()
"""Changes when a hero does."""
_SILENT_S: Final = 20.0
"""A camp whose heroes are all dead for longer is asked nevertheless: sessions end by silence."""
_STOP_S: Final = 2.0
"""For telling the actors, when we are told to stop."""
CAMP_NAMES: Final = ("blue", "red")
_LOGGED: Final = 20
"""Refusals of one match that are logged; the others are counted."""


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


class Host:
    """M matches in one Arena, a decision of all of them at a time."""

    def __init__(
        self,
        arena: Arena,
        matches: Sequence[Match],
        *,
        states: Path | None = None,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        """`states`: where a state of every match is kept, of a moment chosen at random."""
        self.arena, self.matches = arena, matches
        self.results: dict[int, dict[str, Any]] = {}
        self._options = matches[0].plan.options
        self._states, self._recorders = states, recorders
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._chance = np.random.default_rng(matches[0].plan.seed)
        self._decisions = 0
        self._actions = np.zeros((arena.matches, arena.heroes, len(HEADS)), np.int32)
        self._names = np.zeros((arena.matches, arena.heroes), np.int8)  # of the scripts that play now
        self._places = np.divmod(np.arange(arena.matches * arena.heroes), arena.heroes)
        self._whole: npt.NDArray[np.float32] | None = None  # [M, H, S]
        self._observe()  # what is compiled for it keeps nobody waiting
        self._logged = [0] * len(matches)
        self._began = time.monotonic()
        self._lines = [line for m, match in enumerate(matches) for line in self._lines_of(m, match)]
        self._talks = [line.talk for line in self._lines]
        self._losses = False  # camps were lost whose sessions are still there
        self._farewells: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until all matches are over. Cancelled once, it stops them, tells the actors, and returns."""
        try:
            await self._begin()
            at = time.monotonic()
            while self._going():
                await self._decide()
                if self._news():
                    await self._finish()
                if self._options.pace:
                    at = await self._pause(at)
        except asyncio.CancelledError:
            for match in self.matches:
                match.end("stopped")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._finish()
        finally:
            self._summarise()
            if self._farewells:
                _, deaf = await asyncio.wait(self._farewells, timeout=_STOP_S)
                for farewell in deaf:
                    farewell.cancel()
            for talk in self._talks:
                await talk.close()

    def _going(self) -> bool:
        for match in self.matches:  # `any` takes three times as long, and every decision asks
            if not match.reason:
                return True
        return False

    def _news(self) -> bool:
        """A match is over, and nobody has been told."""
        for m, match in enumerate(self.matches):
            if match.reason and m not in self.results:
                return True
        return False

    # -- sessions

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
            talk = Talk(player, name, plan.runtime_id, form.start(about), options.patience_s)
            made.append(Line(m, match, camps, group, form, talk, seats, time.monotonic()))
        return made

    async def _begin(self) -> None:
        self._began = time.monotonic()
        for line, heard in zip(self._lines, await asyncio.gather(*(line.talk.start() for line in self._lines)), strict=True):
            if heard.gone:
                self._lose(line, heard.why)
        self._drop_lost()
        await self._finish()

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
            self._farewells.add(asyncio.ensure_future(line.talk.end(b"")))

    # -- one decision

    async def _decide(self) -> None:
        arena = self.arena
        self._observe()
        asked = self._asked()
        if asked:
            asking = [self._ask(line, heroes) for line, heroes in asked]
            heard = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)  # a task costs 20 µs
        else:
            heard = []
            await asyncio.sleep(0)  # a signal is heard in between
        actions, names = self._actions, self._names
        actions.fill(0)
        names.fill(-1)
        chosen: list[tuple[Line, int, Action]] = []
        for (line, heroes), one in zip(asked, heard, strict=True):
            for hero, action in self._heard(line, heroes, one, names).items():
                actions[line.m, hero] = action
                chosen.append((line, hero, action))
        if asked:
            self._check(chosen, actions, names)
        if self._losses:
            self._drop_lost()
        if not self._going():
            return
        for m, match in enumerate(self.matches):
            if match.reason:
                arena.match[m, OVER] = 1  # it stands still, whatever has ended it
            else:
                np.maximum(names[m], match.script, out=names[m])
        arena.fill(names, actions)
        self._play(actions)

    def _asked(self) -> list[tuple[Line, Sequence[int]]]:
        """Who is asked now, for which heroes: those alive, or all of them."""
        alive = None if self._options.lockstep else self.arena.units[:, ALIVE]
        now, asked = time.monotonic(), []
        for line in self._lines:
            if line.match.reason:
                continue
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
        self._logged[line.m] += 1
        if self._logged[line.m] <= _LOGGED:
            log.warning("%s, camp %s: %s", line.match.plan.runtime_id, " and ".join(map(str, line.camps)), what)
        if self._logged[line.m] == _LOGGED:
            log.warning("%s: further ones are counted only.", line.match.plan.runtime_id)

    def _play(self, actions: npt.NDArray[np.int32]) -> None:
        arena = self.arena
        for recorder in self._recorders:
            recorder.add(actions)
        arena.step(actions)
        self._decisions += 1
        for m, match in enumerate(self.matches):
            if match.reason:
                continue
            match.reward(arena.reward[m])
            if arena.over[m]:
                match.judge(int(arena.winner[m]), int(arena.tick[m]), int(arena.match[m, LIMIT]))
            elif self._states is not None and self._chance.random() * self._decisions < 1:
                # So every moment of the match is as likely as any other to be the last one that is kept.
                self._kept[m] = int(arena.tick[m]), arena.save(m)

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
        over = [m for m, match in enumerate(self.matches) if match.reason and m not in self.results]
        if not over:
            return
        self._observe()
        for m in over:
            self.results[m] = self._result(m)
            log.info("%s: %s after %d ticks", self.matches[m].plan.runtime_id, self.matches[m].reason, self.arena.tick[m])
            self._keep(m)
        ending = [line for line in self._lines if line.m in over]
        self._lines = [line for line in self._lines if line.m not in over]
        await asyncio.gather(*(self._end(line) for line in ending))

    def _end(self, line: Line) -> Coroutine[Any, Any, None]:
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

    def _result(self, m: int) -> dict[str, Any]:
        arena = self.arena
        seconds = time.monotonic() - self._began
        return outcome(self.matches[m], arena.units[m], int(arena.tick[m]), seconds, arena.hash(m))

    def _summarise(self) -> None:
        """What was not told to anybody any more."""
        for m in range(len(self.matches)):
            self.results.setdefault(m, self._result(m))

    def _keep(self, m: int) -> None:
        if self._states is None or m not in self._kept or not self.matches[m].completed:
            return
        tick, data = self._kept.pop(m)
        name = f"{self.matches[m].plan.runtime_id}-{tick}"
        try:
            write_state(self._states / name, data)
        except LudusError as error:  # the match itself was played
            log.warning("%s: the state was not kept: %s", name, error)
