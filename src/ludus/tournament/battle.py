"""Battles: two contestants play many matches against each other, from both sides; the result is a win rate with its interval.

battle(contestant("runs/arena/PPO_…"), contestant("rule:hard"), BattleSettings(games=200))

Matches of the Arena and of PettingZoo environments run in this process, many at once. A gamecore server runs all other games, and the
Arena when a contestant is reached over HTTP. The server is the one that `GameLocation` names, or a private one.
"""

from __future__ import annotations

import contextlib
import heapq
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium as gym

from ludus.core import trust
from ludus.envs.video_writer import FrameProgress
from ludus.errors import LudusError, MissingExtra, StoreError, UsageError
from ludus.tournament.contestants import Contestant, FunctionContestant, ServedContestant, TrainedContestant
from ludus.tournament.gamecore_matches import GamecoreStage, GameLocation
from ludus.tournament.result import BattleResult, MatchRecording, MatchResult, failure_text, lopsidedness_key, most_lopsided
from ludus.tournament.settings import BattleSettings, RecordingSettings
from ludus.tournament.stage import MatchEnd, Stage

if TYPE_CHECKING:
    from ludus.tournament.env_matches import BattleEnv

OnResult = Callable[[MatchResult], None]
Pair = tuple[Contestant, Contestant]


def battle(
    a: Contestant,
    b: Contestant,
    settings: BattleSettings | None = None,
    recording_settings: RecordingSettings | None = None,
    location: GameLocation | None = None,
    on_result: OnResult = lambda result: None,
    video_progress: FrameProgress | None = None,
) -> BattleResult:
    """Play a battle and block until its last match has ended.

    `on_result` is called after each match, `video_progress` after each frame of a video.
    Raises UsageError, IncompatibleCheckpoint, Unreachable, Refused.
    """
    settings, location = settings or BattleSettings(), location or GameLocation()
    trust.allow(location.env)
    began = time.monotonic()
    env, notes = _choose_env((a, b), location)
    results: list[MatchResult] = []
    with _RecordingStore(recording_settings or RecordingSettings(), video_progress) as store:
        with _open_stage((a, b), settings, location, env, store) as stage:

            def on_end(match: MatchEnd) -> None:
                results.append(match.result if match.recording is None else store.add(match.result, match.recording))
                on_result(results[-1])

            stage.play(stage.pairings, on_end)
        results = store.finish(results)
    ordered = tuple(sorted(results, key=lambda result: result.number))
    notes += [*stage.notes, *store.notes]
    terms = settings.to_json() | stage.description
    return BattleResult(a.to_json(), b.to_json(), terms, ordered, tuple(notes), time.monotonic() - began)


def _choose_env(pair: Pair, location: GameLocation) -> tuple[BattleEnv | None, list[str]]:
    """The multi-agent environment to play, if any, and notes about it. Policies that fit the Arena play the Arena."""
    from ludus.tournament.env_matches import choose_env

    if location.server is not None or location.game is not None or (location.env is None and any(map(_fits_arena, pair))):
        chosen: tuple[BattleEnv | None, list[str]] = None, []
    else:
        chosen = choose_env(pair, location.env, location.options)
    if chosen[0] is None and location.camps is not None:
        raise UsageError("--camps is for environments with several agents.", "Leave it out.")
    return chosen


def _fits_arena(contestant: Contestant) -> bool:
    if not isinstance(contestant, TrainedContestant) or not isinstance(contestant.policy.observation_space, gym.spaces.Dict):
        return False
    try:
        from ludus.tournament.arena_matches import fits_arena
    except MissingExtra:
        return False
    return fits_arena(contestant.policy)


def _open_stage(
    pair: Pair, settings: BattleSettings, location: GameLocation, env: BattleEnv | None, store: _RecordingStore
) -> Stage:
    served = any(isinstance(contestant, ServedContestant) for contestant in pair)
    functions = [one.label for one in pair if isinstance(one, FunctionContestant)]
    if env is None and functions and (location.needs_server or served):
        raise UsageError(f"{functions[0]} plays in this process only.", "Name the environment (--env), or serve the function.")
    if env is None and (location.needs_server or served):
        return GamecoreStage(pair, settings, location, scratch_dir=store.scratch_dir, videos=bool(store.videos))
    server_options = {"--limit": location.limit_s, "--advertise": location.advertise, "--token-file": location.token_file}
    for name, value in server_options.items():
        if value is not None:
            raise UsageError(f"{name} is for games of a server.", "Leave it out: this is played in this process.")
    if env is not None:
        from ludus.tournament import env_matches

        if store.videos:
            env.check_renders()
        parallel = location.parallel or env_matches.MAX_PARALLEL
        return env_matches.EnvStage(
            pair, env, settings, camps=location.camps, scratch_dir=store.scratch_dir, max_parallel=parallel
        )
    from ludus.tournament import arena_matches

    size = arena_matches.team_size(settings, pair)
    every, notes = arena_matches.decision_interval(settings, pair)
    parallel = location.parallel or arena_matches.MAX_PARALLEL
    records = store.scratch_dir is not None
    stage = arena_matches.ArenaStage(pair, size, every, settings, records=records, max_parallel=parallel)
    stage.notes += notes
    return stage


class _RecordingStore:
    """Writes recordings and videos into the directory of the battle. A context manager.

    Recordings that are not written at once are held until the end, and only as many as will be written: the most lopsided ones.
    """

    def __init__(self, settings: RecordingSettings, video_progress: FrameProgress | None = None) -> None:
        self._settings, self._video_progress = settings, video_progress
        self.videos = settings.videos
        self._held: list[tuple[tuple[float, ...], MatchResult, MatchRecording]] = []  # a heap: the least lopsided first
        self._stack = contextlib.ExitStack()
        self.notes: list[str] = []
        self.scratch_dir: Path | None = None
        """For files that are not yet part of the result; deleted with the store. None: nothing is recorded."""

    def __enter__(self) -> _RecordingStore:
        if self._settings.directory is not None:
            with _translate_os_errors(self._settings.directory):
                self._settings.directory.mkdir(parents=True, exist_ok=True)
                scratch = tempfile.TemporaryDirectory(prefix=".battle-", dir=self._settings.directory)
                self.scratch_dir = Path(self._stack.enter_context(scratch))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def add(self, result: MatchResult, recording: MatchRecording) -> MatchResult:
        """Write or hold a recording; returns the result with the path of what was written."""
        settings = self._settings
        if settings.most is None:
            result = self._write(result, recording)
        heapq.heappush(self._held, (lopsidedness_key(result), result, recording))
        if len(self._held) > max(settings.videos, settings.most or 0):
            heapq.heappop(self._held)[2].discard()
        return result

    def finish(self, results: list[MatchResult]) -> list[MatchResult]:
        """Write the held recordings and the videos; returns all results with the paths of these files."""
        held = {result.number: (result, recording) for _, result, recording in self._held}
        candidates = [result for result, _ in held.values()]
        changed: dict[int, MatchResult] = {}
        if self._settings.most is not None:
            for result in most_lopsided(candidates, self._settings.most):
                changed[result.number] = self._write(result, held[result.number][1])
        for result in most_lopsided(candidates, self._settings.videos):
            recording = held[result.number][1]
            try:
                video = recording.write_video(self._stem(result), self._settings.speed, self._video_progress)
            except (LudusError, OSError) as error:  # the result of the match stays valid
                self.notes.append(f"game {result.number} has no video: {failure_text(error)}")
                continue
            changed[result.number] = replace(changed.get(result.number, result), video=str(video))
        return [changed.get(result.number, result) for result in results]

    def _stem(self, result: MatchResult) -> Path:
        """Path of the files of a match, without a suffix."""
        assert self._settings.directory is not None
        return self._settings.directory / f"game-{result.number:04d}"

    def _write(self, result: MatchResult, recording: MatchRecording) -> MatchResult:
        path = self._stem(result)
        with _translate_os_errors(path):
            file = recording.write(path)
        return result if file is None else replace(result, recording=str(file))


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise UsageError(f"{path} cannot be created: a part of it is a file.", "Name another directory.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.", "Check free space and write permission.") from error
