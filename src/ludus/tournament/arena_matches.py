"""Matches of the Arena in this process: many at once, each policy asked for all its seats together.

A place whose match is over takes the next one, so that batches stay full. Every match has random numbers of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.core.tree import Array, Tree, map_tree
from ludus.envs.video_writer import FrameProgress
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.bots.round_robin import draw_lineup
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.layout import (
    ALIVE,
    ASSISTS,
    DAMAGE,
    DAMAGE_BUILDINGS,
    DEATHS,
    EARNED,
    HP,
    ILLEGAL,
    KILLS,
    LAST_HITS,
    LEVEL,
    LIMIT,
    MAX_HP,
    STRUCTURES,
    TAKEN,
    TICKS_PER_SECOND,
    structure_slot,
)
from ludus.games.arena.engine.recording import Recorder, Recording, write_recording
from ludus.games.arena.engine.settings import MAX_SIZE, SECONDS, rows_of, size_of
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.env.seats import ArenaOptions, Seats, action_space, observation_space
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.policy import Policy
from ludus.tournament.contestants import RULE, Contestant, Script, Trained
from ludus.tournament.result import Hero, Played, lopsided, who_of
from ludus.tournament.settings import RANDOM, Heroes, Pairing, Terms, noise_seed, schedule

EVERY: Final = 3
"""Ticks from decision to decision where nobody says otherwise."""
AT_ONCE: Final = 64
ENDING: Final = ".arena"
FILM_SPEED: Final = 4.0
_NOISE_STEPS: Final = 64  # drawn at a time
_COUNTED: Final = {
    "kills": KILLS,
    "deaths": DEATHS,
    "assists": ASSISTS,
    "gold": EARNED,
    "level": LEVEL,
    "last_hits": LAST_HITS,
    "damage": DAMAGE,
    "damage_buildings": DAMAGE_BUILDINGS,
    "taken": TAKEN,
    "illegal": ILLEGAL,
}


# -- what is agreed ---------------------------------------------------------------------------------------------------


def size_for(terms: Terms, contestants: Sequence[Contestant]) -> int:
    """Heroes of a camp: as asked for, or as somebody was trained. Raises ConfigError."""
    if terms.mode is not None:
        return size_of(terms.mode)
    for one in contestants:
        if isinstance(one, Trained):
            fits = [size for size in range(1, MAX_SIZE + 1) if not misfit(one.policy, size)]
            if fits:
                return fits[0]
    if isinstance(terms.lineups, tuple):
        return size_of(max(len(camp) for camp in terms.lineups[0]))
    return 1


def every_for(terms: Terms, contestants: Sequence[Contestant]) -> tuple[int, list[str]]:
    """Ticks from decision to decision; and what is to be said about it."""
    known = [(one, one.every or EVERY) for one in contestants if isinstance(one, Trained)]
    every = terms.every or (known[0][1] if known else EVERY)
    return every, [
        f"{one.label} was trained to decide every {trained} ticks, and decides every {every} here"
        for one, trained in known
        if trained != every
    ]


def pairings(terms: Terms, size: int) -> list[Pairing]:
    """Raises ConfigError for heroes that there are not."""
    if isinstance(terms.lineups, tuple):
        for heroes in terms.lineups:
            rows_of(heroes, size)

    def drawn(rng: np.random.Generator) -> Heroes:
        return draw_lineup(rng, size)

    return schedule(terms, size, drawn if terms.lineups == RANDOM else None)


def check(one: Contestant, size: int) -> None:
    """Raises UsageError, IncompatibleCheckpoint."""
    if isinstance(one, Script) and one.name not in BOTS:
        shown = f"There is no built-in player {one.name!r}." if one.name else f"{RULE} alone is no player of the Arena."
        raise UsageError(shown, did_you_mean(f"{RULE}:{one.name}", [f"{RULE}:{name}" for name in BOTS]))
    if isinstance(one, Trained) and one.several:
        raise UsageError(f"{one.label} has the models {', '.join(one.several)}.", "Choose one: --model-a, --model-b.")
    if isinstance(one, Trained) and (wrong := misfit(one.policy, size)):
        raise IncompatibleCheckpoint(f"{one.label} does not play the Arena {size}v{size}: {wrong}.", _instead(one.policy, size))


def plays_it(policy: ActingPolicy) -> bool:
    """Whether a policy fits the Arena, in whatever size."""
    return not all(misfit(policy, size) for size in range(1, MAX_SIZE + 1))


def misfit(policy: ActingPolicy, size: int) -> str:
    """What is other in a match of that size than in the training of a policy; empty: nothing."""
    seen, _ = spaces.split_mask(observation_space(size))
    for what, mine, there in (("observes", policy.observation_space, seen), ("acts in", policy.action_space, action_space(size))):
        if _form(mine) != _form(there):
            return f"it {what} {_short(mine)}, and the match has {_short(there)}"
    return ""


def _instead(policy: ActingPolicy, size: int) -> str:
    others = [other for other in range(1, MAX_SIZE + 1) if other != size and not misfit(policy, other)]
    return f"It plays --mode {others[0]}v{others[0]}." if others else "Other games are played with --env, or --server and --game."


def _form(space: gym.Space[Any]) -> Any:
    """What a network must fit: bounds may change without harm."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _form(part) for key, part in space.spaces.items()}
    return space.nvec.tolist() if isinstance(space, gym.spaces.MultiDiscrete) else (type(space), space.shape)


def _short(space: gym.Space[Any]) -> str:
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{key}: {list(part.shape or ())}" for key, part in space.spaces.items()) + "}"
    return str(space)


# -- who plays --------------------------------------------------------------------------------------------------------


class _Player:
    """A policy in its seats: a recurrent state for each, and noise for each match."""

    def __init__(self, policy: ActingPolicy, rows: Array, size: int, matches: int, deterministic: bool) -> None:
        """`rows`: [M, size] of the seats that are its own."""
        self.policy, self.rows = policy, rows
        self._size, self._draws = size, not deterministic
        self._fresh = tuple(spec.zeros(size) for spec in policy.state_spec())
        self._state = tuple(np.repeat(part[None], matches, 0) for part in self._fresh)  # [M, size, …]
        self._generators = [torch.Generator() for _ in range(matches)]
        self._noise: list[Array] = [np.zeros((0,), np.float32)] * matches
        self._used = np.zeros(matches, np.int64)

    def begin(self, m: int, seed: int) -> None:
        for state, fresh in zip(self._state, self._fresh, strict=True):
            state[m] = fresh
        self._generators[m].manual_seed(seed)
        self._noise[m], self._used[m] = np.zeros((0,), np.float32), 0

    def act(self, observation: Tree, mask: Array, live: Array) -> Array:
        """For all seats of the matches `live`, [L · size, 4]. `observation`, `mask`: of all rows."""
        rows = self.rows[live].reshape(-1)
        state = tuple(part[live].reshape(-1, *part.shape[2:]) for part in self._state)
        noise = np.concatenate([self._drawn(m) for m in live]) if self._draws else None
        acted = self.policy.act(map_tree(lambda part: part[rows], observation), state, mask[rows], noise)
        for part, after in zip(self._state, acted.state, strict=True):
            part[live] = after.reshape(len(live), *part.shape[1:])
        action: Array = np.asarray(acted.action)
        return action

    def _drawn(self, m: int) -> Array:
        """Of the seats of one match, from a stream that is its own: who else plays makes no difference."""
        at = int(self._used[m]) % _NOISE_STEPS
        if at == 0:
            drawn = self.policy.draw_noise(_NOISE_STEPS * self._size, self._generators[m])
            self._noise[m] = drawn.reshape(_NOISE_STEPS, self._size, *drawn.shape[1:])
        self._used[m] += 1
        noise: Array = self._noise[m][at]
        return noise


@dataclass(frozen=True)
class ArenaRecording:
    """A match that can be played again, bit for bit."""

    recording: Recording

    def write(self, path: Path) -> Path:
        return write_recording(path.with_suffix(ENDING), self.recording)

    def film(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        from ludus.games.arena.render.video import write_video

        path = path.with_suffix(".mp4")
        write_video(self.recording, path, speed=FILM_SPEED if speed is None else speed, progress=progress)
        return path

    def drop(self) -> None:
        """It is in memory alone."""


@dataclass(frozen=True)
class Ended:
    """A match, and its recording if there is one."""

    played: Played
    recording: ArenaRecording | None


class ArenaStage:
    """Plays pairings of two contestants, `at_once` side by side."""

    def __init__(
        self,
        contestants: tuple[Contestant, Contestant],
        size: int,
        every: int,
        terms: Terms,
        *,
        records: bool = False,
        at_once: int = AT_ONCE,
    ) -> None:
        for one in contestants:
            check(one, size)
        self._contestants, self._size, self._terms, self._records = contestants, size, terms, records
        self._matches = min(at_once, terms.games)
        seated = [who for who, one in enumerate(contestants) if isinstance(one, Trained)]
        options = ArenaOptions(mode=size, opponent="self", side=0, every=every, seconds=terms.seconds or SECONDS)
        self._seats = Seats(options, [range(len(seated) * size)] * self._matches)
        self._arena: Arena = self._seats.arena
        rows = np.arange(self._matches * len(seated) * size).reshape(self._matches, len(seated), size)
        self._players: dict[int, _Player] = {}
        for place, who in enumerate(seated):
            one = contestants[who]
            assert isinstance(one, Trained)
            self._players[who] = _Player(one.policy, rows[:, place], size, self._matches, terms.deterministic)
        self._scripts: npt.NDArray[np.int8] = np.full((self._matches, self._arena.heroes), -1, np.int8)
        self._playing: list[Pairing | None] = [None] * self._matches
        self._recorders: list[Recorder | None] = [None] * self._matches

    def play(self, queue: Sequence[Pairing], tell: Callable[[Ended], None]) -> None:
        """All of them; `tell` is told of each as it ends."""
        waiting = iter(queue)
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # batches are small: threads would only wait for each other
            for player in self._players.values():
                if isinstance(player.policy, Policy):
                    stack.enter_context(player.policy.acting())
            for m in range(self._matches):
                self._begin(m, next(waiting, None))
            while live := [m for m, pairing in enumerate(self._playing) if pairing is not None]:
                self._decide(np.array(live))
                over = self._arena.over
                for m in live:
                    if over[m]:
                        tell(self._ended(m))
                        self._begin(m, next(waiting, None))

    def _begin(self, m: int, pairing: Pairing | None) -> None:
        self._playing[m], self._recorders[m] = pairing, None
        if pairing is None:
            return
        size = self._size
        ids = tuple(HEROES[row].id for row in rows_of(None, size))
        self._arena.reset([pairing.seed], [m], [pairing.heroes or (ids[:size], ids[size:])])
        for who, one in enumerate(self._contestants):
            first = _camp(who, pairing) * size
            if who in self._players:
                player = self._players[who]
                self._seats.hero_of[player.rows[m]] = np.arange(first, first + size)
                player.begin(m, noise_seed(pairing.seed, who))
            self._scripts[m, first : first + size] = BOTS.index(one.name) if isinstance(one, Script) else -1
        if self._records:
            labels = [one.label for one in self._contestants]
            self._recorders[m] = Recorder(self._arena, m, labels[:: -1 if pairing.a_camp else 1])

    def _decide(self, live: Array) -> None:
        arena, seats = self._arena, self._seats
        orders = arena.bot_actions(self._scripts)
        if self._players:
            seen = seats.observe()
            mask = spaces.flat_mask(seen[spaces.ACTION_MASK], action_space(self._size), seats.rows)
            observation = spaces.without_mask(seen, unwrap=False)
            for player in self._players.values():
                rows = player.rows[live].reshape(-1)
                orders[seats.match_of[rows], seats.hero_of[rows]] = player.act(observation, mask, live)
        for recorder in self._recorders:
            if recorder is not None:
                recorder.add(orders)
        arena.step(orders)

    def _ended(self, m: int) -> Ended:
        pairing, arena, recorder = self._playing[m], self._arena, self._recorders[m]
        assert pairing is not None
        units, tick = arena.units[m], int(arena.tick[m])
        winner = int(arena.winner[m])
        reason = "base destroyed" if winner >= 0 else "time is up" if tick >= arena.match[m, LIMIT] else "both bases destroyed"
        heroes = tuple(
            Hero(who_of(hero // self._size, pairing.a_camp), HEROES[int(arena.lineup[m, hero])].name, _numbers(units, hero))
            for hero in range(arena.heroes)
        )
        buildings = [_left(units, self._size, camp) for camp in (0, 1)]
        gold = [float(units[EARNED, camp * self._size : (camp + 1) * self._size].sum()) for camp in (0, 1)]
        played = Played(
            pairing.number,
            pairing.a_camp,
            pairing.seed,
            winner=None if winner < 0 else who_of(winner, pairing.a_camp),
            reason=reason,
            ticks=tick,
            seconds=tick / TICKS_PER_SECOND,
            heroes=heroes,
            lopsided=lopsided(buildings, gold),
        )
        return Ended(played, None if recorder is None else _finished(recorder, pairing))


def _finished(recorder: Recorder, pairing: Pairing) -> ArenaRecording:
    recording = recorder.recording()
    return ArenaRecording(replace(recording, result=recording.result | {"game": pairing.number}))


def _camp(who: int, pairing: Pairing) -> int:
    return pairing.a_camp if who == 0 else 1 - pairing.a_camp


def _numbers(units: npt.NDArray[np.int32], hero: int) -> dict[str, float]:
    return {name: int(units[row, hero]) for name, row in _COUNTED.items()}


def _left(units: npt.NDArray[np.int32], size: int, camp: int) -> float:
    """Of the health of a camp's buildings, as a share of all."""
    slots = [structure_slot(size, camp, which) for which in range(STRUCTURES)]
    return float(np.mean(units[HP, slots] * units[ALIVE, slots] / np.maximum(1, units[MAX_HP, slots])))
