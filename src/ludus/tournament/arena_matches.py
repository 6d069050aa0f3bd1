"""Stage for matches of the Arena in this process: many at once, one inference batch per policy and step.

A slot whose match is over starts the next one, so batches stay full. Each match has its own random streams, so its course does not
depend on the other matches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
from ludus.games.arena.engine import layout
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.recording import Recorder, Recording, write_recording
from ludus.games.arena.engine.settings import MAX_SIZE, SECONDS, rows_of, size_of
from ludus.games.arena.engine.vector import Arena, building_health
from ludus.games.arena.env.seats import ArenaOptions, Seats, action_space, observation_space
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.policy import Policy
from ludus.sampling.league_policies import PolicySpaces, ScriptedPolicy
from ludus.tournament.contestants import RULE, Contestant, FunctionContestant, ScriptedContestant, TrainedContestant
from ludus.tournament.result import HeroStats, MatchResult, contestant_in_camp, lopsidedness
from ludus.tournament.settings import RANDOM, BattleSettings, Heroes, Pairing, noise_seed, schedule
from ludus.tournament.stage import MatchEnd, OnMatchEnd, Stage, single_torch_thread

DEFAULT_DECISION_TICKS: Final = 3
MAX_PARALLEL: Final = 64
RECORDING_SUFFIX: Final = ".arena"
VIDEO_SPEED: Final = 4.0
_NOISE_STEPS: Final = 64  # drawn at a time


# -- settings of the matches ------------------------------------------------------------------------------------------


def team_size(settings: BattleSettings, contestants: Sequence[Contestant]) -> int:
    """Heroes per camp: from the mode, the first policy that fits, or the line-up. Raises ConfigError."""
    if settings.mode is not None:
        return size_of(settings.mode)
    for one in contestants:
        if isinstance(one, TrainedContestant):
            fits = [size for size in range(1, MAX_SIZE + 1) if not find_mismatch(one.policy, size)]
            if fits:
                return fits[0]
    if isinstance(settings.lineups, tuple):
        return size_of(max(len(camp) for camp in settings.lineups[0]))
    return 1


def decision_interval(settings: BattleSettings, contestants: Sequence[Contestant]) -> tuple[int, list[str]]:
    """Ticks between decisions, and notes about policies that were trained with another interval."""
    known = [(one, one.every or DEFAULT_DECISION_TICKS) for one in contestants if isinstance(one, TrainedContestant)]
    every = settings.every or (known[0][1] if known else DEFAULT_DECISION_TICKS)
    return every, [
        f"{one.label} was trained to decide every {trained} ticks, and decides every {every} here"
        for one, trained in known
        if trained != every
    ]


def schedule_matches(settings: BattleSettings, size: int) -> list[Pairing]:
    """Raises ConfigError for unknown heroes."""
    if isinstance(settings.lineups, tuple):
        for heroes in settings.lineups:
            rows_of(heroes, size)

    def draw(rng: np.random.Generator) -> Heroes:
        return draw_lineup(rng, size)

    return schedule(settings, size, draw if settings.lineups == RANDOM else None)


def check_contestant(one: Contestant, size: int) -> None:
    """Raises UsageError, IncompatibleCheckpoint."""
    if isinstance(one, ScriptedContestant) and one.name not in BOTS:
        message = (
            f"There is no built-in player {one.name!r}." if one.name else f"The Arena needs the name of a player after {RULE!r}."
        )
        raise UsageError(message, did_you_mean(f"{RULE}:{one.name}", [f"{RULE}:{name}" for name in BOTS]))
    if isinstance(one, TrainedContestant) and one.several:
        raise UsageError(f"{one.label} has the models {', '.join(one.several)}.", "Choose one: --model-a, --model-b.")
    if isinstance(one, TrainedContestant) and (mismatch := find_mismatch(one.policy, size)):
        others = [other for other in range(1, MAX_SIZE + 1) if other != size and not find_mismatch(one.policy, other)]
        hint = (
            f"It plays --mode {others[0]}v{others[0]}."
            if others
            else "Other games are played with --env, or --server and --game."
        )
        raise IncompatibleCheckpoint(f"{one.label} cannot play the Arena {size}v{size}: {mismatch}.", hint)


def _with_policy(one: Contestant, size: int) -> Contestant:
    """A contestant whose function, if it is one, is a policy. An exception of the function ends the battle."""
    if not isinstance(one, FunctionContestant):
        return one

    def end(reason: str) -> None:
        raise UsageError(f"{one.label}: {reason}.", "Correct the function.")

    like = PolicySpaces(spaces.split_mask(observation_space(size))[0], action_space(size))
    return TrainedContestant(one.label, ScriptedPolicy(one.function, like, end), settings=one.settings)


def fits_arena(policy: ActingPolicy) -> bool:
    """Whether a policy fits the Arena with any team size."""
    return not all(find_mismatch(policy, size) for size in range(1, MAX_SIZE + 1))


def find_mismatch(policy: ActingPolicy, size: int) -> str:
    """How the spaces of a policy differ from those of the Arena with that team size; empty if they fit."""
    observed, _ = spaces.split_mask(observation_space(size))
    for verb, mine, there in (
        ("observes", policy.observation_space, observed),
        ("acts in", policy.action_space, action_space(size)),
    ):
        if _network_shape(mine) != _network_shape(there):
            return f"it {verb} {_format_space(mine)}, and the match has {_format_space(there)}"
    return ""


def _network_shape(space: gym.Space[Any]) -> Any:
    """The parts of a space that a network depends on; bounds are not among them."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _network_shape(part) for key, part in space.spaces.items()}
    return space.nvec.tolist() if isinstance(space, gym.spaces.MultiDiscrete) else (type(space), space.shape)


def _format_space(space: gym.Space[Any]) -> str:
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{key}: {list(part.shape or ())}" for key, part in space.spaces.items()) + "}"
    return str(space)


# -- playing ----------------------------------------------------------------------------------------------------------


class _SeatedPolicy:
    """A policy with the recurrent state of each of its seats and the noise of each match."""

    def __init__(self, policy: ActingPolicy, rows: Array, size: int, matches: int, deterministic: bool) -> None:
        """`rows`: [M, size], its rows among all seats."""
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
        """Actions for all its seats in the matches `live`, [L · size, 4]. `observation` and `mask` have all rows."""
        rows = self.rows[live].reshape(-1)
        state = tuple(part[live].reshape(-1, *part.shape[2:]) for part in self._state)
        noise = np.concatenate([self._draw_noise(m) for m in live]) if self._draws else None
        acted = self.policy.act(map_tree(lambda part: part[rows], observation), state, mask[rows], noise)
        for part, after in zip(self._state, acted.state, strict=True):
            part[live] = after.reshape(len(live), *part.shape[1:])
        action: Array = np.asarray(acted.action)
        return action

    def _draw_noise(self, m: int) -> Array:
        """Noise for the seats of one match, from the stream of that match."""
        at = int(self._used[m]) % _NOISE_STEPS
        if at == 0:
            drawn = self.policy.draw_noise(_NOISE_STEPS * self._size, self._generators[m])
            self._noise[m] = drawn.reshape(_NOISE_STEPS, self._size, *drawn.shape[1:])
        self._used[m] += 1
        noise: Array = self._noise[m][at]
        return noise


@dataclass(frozen=True)
class ArenaRecording:
    """The recording of a match, from which it can be replayed bit for bit. Held in memory."""

    recording: Recording

    def write(self, path: Path) -> Path:
        return write_recording(path.with_suffix(RECORDING_SUFFIX), self.recording)

    def write_video(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        from ludus.games.arena.render.video import write_video

        path = path.with_suffix(".mp4")
        write_video(self.recording, path, speed=VIDEO_SPEED if speed is None else speed, progress=progress)
        return path

    def discard(self) -> None:
        """Nothing to delete."""


class ArenaStage(Stage):
    """Plays Arena matches of two contestants, `max_parallel` at a time."""

    def __init__(
        self,
        contestants: tuple[Contestant, Contestant],
        size: int,
        every: int,
        settings: BattleSettings,
        *,
        records: bool = False,
        max_parallel: int = MAX_PARALLEL,
    ) -> None:
        """`size`: heroes per camp; `every`: ticks between decisions. Raises UsageError, IncompatibleCheckpoint."""
        super().__init__()
        contestants = _with_policy(contestants[0], size), _with_policy(contestants[1], size)
        for one in contestants:
            check_contestant(one, size)
        self._contestants, self._size, self._every, self._settings = contestants, size, every, settings
        self._records = records
        self._matches = min(max_parallel, settings.games)
        seated = [who for who, one in enumerate(contestants) if isinstance(one, TrainedContestant)]
        options = ArenaOptions(mode=size, opponent="self", side=0, every=every, seconds=settings.seconds or SECONDS)
        self._seats = Seats(options, [range(len(seated) * size)] * self._matches)
        self._arena: Arena = self._seats.arena
        rows = np.arange(self._matches * len(seated) * size).reshape(self._matches, len(seated), size)
        self._policies: dict[int, _SeatedPolicy] = {}
        for index, who in enumerate(seated):
            one = contestants[who]
            assert isinstance(one, TrainedContestant)
            self._policies[who] = _SeatedPolicy(one.policy, rows[:, index], size, self._matches, settings.deterministic)
        self._scripts: npt.NDArray[np.int8] = np.full((self._matches, self._arena.heroes), -1, np.int8)
        self._playing: list[Pairing | None] = [None] * self._matches
        self._recorders: list[Recorder | None] = [None] * self._matches

    @property
    def pairings(self) -> list[Pairing]:
        return schedule_matches(self._settings, self._size)

    @property
    def description(self) -> dict[str, object]:
        return {"game": "arena", "mode": f"{self._size}v{self._size}", "every": self._every, "where": "this process"}

    def play(self, pairings: Sequence[Pairing], on_end: OnMatchEnd) -> None:
        waiting = iter(pairings)
        with contextlib.ExitStack() as stack:
            stack.enter_context(single_torch_thread())
            for seated in self._policies.values():
                if isinstance(seated.policy, Policy):
                    stack.enter_context(seated.policy.acting())
            for m in range(self._matches):
                self._begin(m, next(waiting, None))
            while live := [m for m, pairing in enumerate(self._playing) if pairing is not None]:
                self._decide(np.array(live))
                over = self._arena.over
                for m in live:
                    if over[m]:
                        on_end(self._end(m))
                        self._begin(m, next(waiting, None))

    def _begin(self, m: int, pairing: Pairing | None) -> None:
        self._playing[m], self._recorders[m] = pairing, None
        if pairing is None:
            return
        size = self._size
        ids = tuple(HEROES[row].id for row in rows_of(None, size))
        self._arena.reset([pairing.seed], [m], [pairing.heroes or (ids[:size], ids[size:])])
        for who, one in enumerate(self._contestants):
            first = (pairing.a_camp if who == 0 else 1 - pairing.a_camp) * size
            if who in self._policies:
                seated = self._policies[who]
                self._seats.hero_of[seated.rows[m]] = np.arange(first, first + size)
                seated.begin(m, noise_seed(pairing.seed, who))
            self._scripts[m, first : first + size] = BOTS.index(one.name) if isinstance(one, ScriptedContestant) else -1
        if self._records:
            labels = [one.label for one in self._contestants]
            self._recorders[m] = Recorder(self._arena, m, labels[:: -1 if pairing.a_camp else 1])

    def _decide(self, live: Array) -> None:
        arena, seats = self._arena, self._seats
        orders = arena.bot_actions(self._scripts)
        if self._policies:
            observed = seats.observe()
            mask = spaces.flat_mask(observed[spaces.ACTION_MASK], action_space(self._size), seats.rows)
            observation = spaces.without_mask(observed, unwrap=False)
            for seated in self._policies.values():
                rows = seated.rows[live].reshape(-1)
                orders[seats.match_of[rows], seats.hero_of[rows]] = seated.act(observation, mask, live)
        for recorder in self._recorders:
            if recorder is not None:
                recorder.add(orders)
        arena.step(orders)

    def _end(self, m: int) -> MatchEnd:
        pairing, arena, recorder = self._playing[m], self._arena, self._recorders[m]
        assert pairing is not None
        units, tick = arena.units[m], int(arena.tick[m])
        winner = int(arena.winner[m])
        reason = (
            "base destroyed" if winner >= 0 else "time is up" if tick >= arena.match[m, layout.LIMIT] else "both bases destroyed"
        )
        heroes = tuple(
            HeroStats(
                contestant_in_camp(hero // self._size, pairing.a_camp),
                HEROES[int(arena.lineup[m, hero])].name,
                {name: int(units[row, hero]) for name, row in layout.STATISTICS.items()},
            )
            for hero in range(arena.heroes)
        )
        buildings = [float(building_health(units, self._size, camp).mean()) for camp in (0, 1)]
        gold = [float(units[layout.EARNED, camp * self._size : (camp + 1) * self._size].sum()) for camp in (0, 1)]
        result = MatchResult(
            pairing.number,
            pairing.a_camp,
            pairing.seed,
            winner=None if winner < 0 else contestant_in_camp(winner, pairing.a_camp),
            reason=reason,
            ticks=tick,
            seconds=tick / layout.TICKS_PER_SECOND,
            heroes=heroes,
            lopsided=lopsidedness(buildings, gold),
        )
        if recorder is None:
            return MatchEnd(result)
        recording = recorder.recording()
        return MatchEnd(result, ArenaRecording(replace(recording, result=recording.result | {"game": pairing.number})))
