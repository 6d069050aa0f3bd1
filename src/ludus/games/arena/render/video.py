"""Render a recorded match as a video; positions are interpolated between ticks."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ludus.core.tree import Array
from ludus.core.types import Ints32
from ludus.envs.video_writer import FrameProgress, VideoWriter
from ludus.errors import StoreError, UsageError
from ludus.games.arena.engine.layout import ALIVE, BORN, KIND, TICKS_PER_SECOND, X, Y
from ludus.games.arena.engine.recording import Recording, replay
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.render.renderer import NAMES, WIDTH, Renderer
from ludus.games.arena.render.yuv import Yuv420
from ludus.io.atomic_file import path_for_replace

FPS: Final = 30
MAX_SPEED: Final = 1_000.0
HOLD_S: Final = 2.5
"""Duration of the last frame."""
_JUMP = 9_500  # millimetres per tick: interpolates dashes but not recalls

State = tuple[Ints32, Ints32]
"""`units[FIELDS, U]` and `match[MATCH_FIELDS]`."""


def write_video(
    recording: Recording,
    out: Path,
    *,
    speed: float = 1.0,
    camp: int | None = None,
    width: int = WIDTH,
    fps: int = FPS,
    first_s: float = 0.0,
    last_s: float | None = None,
    progress: FrameProgress | None = None,
) -> int:
    """Write an mp4 atomically; return its number of frames. `first_s` and `last_s` are in game time. Raises Damaged if the replay
    differs from the recording."""
    if not 0 < speed <= MAX_SPEED:
        raise UsageError(f"The speed of the video is {speed:g}.", f"Give more than 0 and at most {MAX_SPEED:g}.")
    if not 1 <= fps <= 120:
        raise UsageError(f"The video has {fps} frames per second.", "Give 1 to 120.")
    if out.suffix.lower() != ".mp4":
        raise UsageError(f"{out.name} is not the name of an mp4 file.", f"Use {out.stem}.mp4.")
    renderer = Renderer(recording.size, width, camp=camp, names=camp_titles(recording))
    seconds = max(0.0, min(recording.seconds, last_s if last_s is not None else math.inf) - first_s) / speed
    hold = round(HOLD_S * fps)
    total = round(seconds * fps) + 1 + hold
    try:
        with path_for_replace(out) as temporary, VideoWriter(temporary, fps, "yuv420p") as writer:
            planes = Yuv420(renderer.height, renderer.width)
            planes.update(renderer.frame, [(0, 0, renderer.width, renderer.height)])
            for state in resample(
                ticks(recording, math.floor(first_s * TICKS_PER_SECOND) - 1), speed * TICKS_PER_SECOND / fps, first_s, last_s
            ):
                planes.update(renderer.frame, renderer.update(*state))
                writer.add(planes.planes)
                if progress is not None:
                    progress(writer.frames, max(total, writer.frames))
            for _ in range(hold if writer.frames else 0):
                writer.add(planes.planes)
            if progress is not None:
                progress(writer.frames, writer.frames)
            if not writer.frames:
                raise UsageError(f"The recording has no frames after {first_s:g} s.", f"The match has {recording.seconds:g} s.")
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error}.", "Check that the directory exists and has free space.") from error
    return writer.frames


def camp_titles(recording: Recording) -> tuple[str, str]:
    """Return the titles of the camps: colour and, if known, the player."""
    a, b = (f"{colour} · {name}" if name else colour for colour, name in zip(NAMES, recording.names, strict=True))
    return a, b


def ticks(recording: Recording, first: int = 0) -> Iterator[State]:
    """Yield copies of the state at the start and after every tick. Before tick `first` the state of a decision is repeated for its
    ticks, which saves most of the time."""
    within = Arena(recording.size, 1, lenient=recording.lenient)
    for decision, moment in enumerate(replay(recording)):
        if moment.decision is not None and (decision + 1) * recording.every < first:
            state = moment.units, moment.match
            yield from itertools.repeat(state, recording.every)
            continue
        yield moment.units.copy(), moment.match.copy()
        if moment.decision is None:
            return
        for number in range(1, recording.every):
            # Restarts from the decision each time: legality is checked once per decision, not per tick.
            within.units[0], within.match[0] = moment.units, moment.match
            within.advance(moment.decision[None], number)
            if within.over[0]:
                break
            yield within.units[0].copy(), within.match[0].copy()


def resample(states: Iterator[State], step: float, first_s: float = 0.0, last_s: float | None = None) -> Iterator[State]:
    """Yield a state every `step` ticks from `first_s` to `last_s`, and always the very last one."""
    wanted = first_s * TICKS_PER_SECOND
    end = math.inf if last_s is None else last_s * TICKS_PER_SECOND
    before: State | None = None
    at = 0
    for at, state in enumerate(states):
        while before is not None and wanted < at and wanted <= end:
            share = wanted - (at - 1)
            yield before if share <= 0 else interpolate(before, state, share)
            wanted += step
        before = state
        if at > end:
            return
    if before is not None and at >= first_s * TICKS_PER_SECOND:
        yield before


def interpolate(before: State, after: State, share: float) -> State:
    """Return `before` with the positions interpolated by `share`."""
    units, later = before[0].copy(), after[0]
    same = (units[ALIVE] == 1) & (later[ALIVE] == 1) & (units[BORN] == later[BORN]) & (units[KIND] == later[KIND])
    ways: Array = later[[X, Y]].astype(np.int64) - units[[X, Y]]
    moved = same & (np.abs(ways).max(axis=0) <= _JUMP)
    units[[X, Y]] += np.where(moved, np.rint(ways * share), 0).astype(np.int32)
    return units, before[1]


def state_at(recording: Recording, seconds: float) -> State:
    """Return the state `seconds` after the start, or the last one. Raises UsageError for a negative time."""
    if not seconds >= 0:
        raise UsageError(f"There is no state at {seconds:g} s.", f"The match has {recording.seconds:g} s.")
    return deque(itertools.islice(ticks(recording), round(seconds * TICKS_PER_SECOND) + 1), maxlen=1)[0]
