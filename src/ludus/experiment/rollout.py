"""Rollouts: a trained agent plays whole episodes; every step is written to one portable file, the pictures to an mp4."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np

from ludus import spaces
from ludus.actor.trained import TrainedAgent
from ludus.errors import EnvironmentFault, StoreFull
from ludus.experiment.video import VideoWriter, check_renders, check_rgb, frame_rate
from ludus.game.environment import translated
from ludus.spaces import ACTION_MASK
from ludus.tree import Array, Tree, leaves

VIDEO_EPISODES = 3  # a longer video than that is rarely watched


@dataclass
class Played:
    """Returns and lengths of whole episodes, and where the files are."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    steps_file: Path | None = None
    video: Path | None = None

    def to_json(self) -> dict[str, Any]:
        numbers = np.asarray(self.returns) if self.returns else np.asarray([np.nan])
        stats = {f"return_{name}": _finite(getattr(numbers, name)()) for name in ("mean", "std", "min", "max")}
        files = {
            "steps_file": str(self.steps_file) if self.steps_file else None,
            "video": str(self.video) if self.video else None,
        }
        mean_length = float(np.mean(self.lengths)) if self.lengths else None
        return {
            "episodes": len(self.returns),
            **stats,
            "length_mean": mean_length,
            "returns": self.returns,
            "lengths": self.lengths,
            **files,
        }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


class StepLog:
    """Columns of all steps; observations and actions are flattened into one column per leaf.

    Columns wait on disk, beside the file they end up in, so that a long rollout of pictures does not fill the memory.
    """

    def __init__(self, path: Path, save_info: bool) -> None:
        self._path, self._save_info, self._rows = path, save_info, 0
        self._infos: list[str] = []
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], IO[bytes]]] = {}
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside = tempfile.TemporaryDirectory(prefix=".steps-", dir=path.parent)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, _, file in self._columns.values():
            file.close()
        self._aside.cleanup()

    def add(self, counters: Mapping[str, Any], observation: Tree, action: Tree, info: Mapping[str, Any]) -> None:
        row = {name: np.asarray(value) for name, value in counters.items()}
        for kind, tree in (("observation", observation), ("action", action)):
            for path, leaf in leaves(tree):
                row[f"{kind}.{path}" if path else kind] = np.asarray(leaf)
        with _translated(self._path):
            for name, value in row.items():
                self._append(name, value)
        if self._save_info:
            self._infos.append(json.dumps(_plain(info), default=_readable, sort_keys=True))
        self._rows += 1

    def _append(self, name: str, value: Array) -> None:
        if name not in self._columns:
            waiting = (Path(self._aside.name) / str(len(self._columns))).open("w+b")
            self._columns[name] = value.dtype, value.shape, waiting
        dtype, shape, file = self._columns[name]
        if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise EnvironmentFault(f"The column {name!r} changes its shape from step to step and cannot be written.")
        file.write(np.ascontiguousarray(value, dtype).tobytes())

    def write(self) -> Path | None:
        """`.npz`: columns of equal length, no pickled objects; `numpy.load` opens it with its defaults. None if empty."""
        if not self._rows:
            return None
        finished = Path(self._aside.name) / "steps.npz"
        with _translated(self._path):
            with zipfile.ZipFile(finished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, (dtype, shape, file) in self._columns.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                        header = {"descr": dtype.str, "fortran_order": False, "shape": (self._rows, *shape)}
                        np.lib.format.write_array_header_2_0(out, header)
                        file.seek(0)
                        shutil.copyfileobj(file, out, 1 << 20)
                if self._save_info:
                    with archive.open("info.npy", "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, np.asarray(self._infos), allow_pickle=False)
            finished.replace(self._path)
        return self._path


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreFull(f"Cannot write {path}: {error.strerror}.") from error


def _plain(info: Any) -> Any:
    """JSON has words for keys."""
    return {str(key): _plain(item) for key, item in info.items()} if isinstance(info, Mapping) else info


def _readable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value)


def play(
    agent: TrainedAgent,
    env: gym.Env[Any, Any],
    name: str,
    *,
    episodes: int,
    max_steps: int | None = None,
    seed: int = 0,
    deterministic: bool = True,
    steps_file: Path | None = None,
    save_info: bool = False,
    video: Path | None = None,
) -> Played:
    """Play until `episodes` have ended or `max_steps` were made. An unfinished episode is in the file, not in the returns."""
    played = Played()
    if video is not None:
        check_renders(env, name)
    total = 0
    with contextlib.ExitStack() as stack:
        writer: VideoWriter | None = None
        log = stack.enter_context(StepLog(steps_file, save_info)) if steps_file else None
        for episode in range(episodes):
            with translated(name, "reset", total):
                observation, info = env.reset(seed=seed + episode)
            state, gained, length, over = None, 0.0, 0, False
            while not over and (max_steps is None or total < max_steps):
                if video is not None and episode < VIDEO_EPISODES:
                    frame = check_rgb(env.render(), name)
                    writer = writer or stack.enter_context(VideoWriter(video, frame_rate(env)))
                    writer.add(frame)
                action, state = agent.act(observation, state, info.get(ACTION_MASK), deterministic=deterministic)
                before = observation
                with translated(name, "step", total + 1):
                    observation, reward, terminated, truncated, info = env.step(action)
                if log is not None:
                    counters = {"episode": episode, "step": length, "reward": float(reward)}
                    ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
                    log.add(counters | ends, _seen(before, env), action, info)
                gained, length, total = gained + float(reward), length + 1, total + 1
                over = terminated or truncated
            if over:
                played.returns.append(gained)
                played.lengths.append(length)
            if max_steps is not None and total >= max_steps:
                break
        played.steps_file = log.write() if log is not None else None
    played.video = video if writer is not None else None
    return played


def _seen(observation: Any, env: gym.Env[Any, Any]) -> Tree:
    """As arrays, in the structure of the space."""
    spec = spaces.array_spec(env.observation_space)
    return _as_arrays(spec, observation)


def _as_arrays(spec: Tree, value: Any) -> Tree:
    if isinstance(spec, dict):
        return {key: _as_arrays(item, value[key]) for key, item in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_as_arrays(item, v) for item, v in zip(spec, value, strict=True))
    return np.asarray(value)
