"""Rollouts: a trained agent plays whole episodes; every step is written to one portable file, the pictures to an mp4."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus import spaces
from ludus.actor.agent import Agent
from ludus.errors import EnvironmentFault, StoreFull
from ludus.experiment.video import VideoWriter, check_renders, check_rgb, frame_rate
from ludus.game.environment import translated
from ludus.spaces import ACTION_MASK
from ludus.tree import Tree, leaves

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
    """Columns of all steps; observations and actions are flattened into one column per leaf."""

    def __init__(self, save_info: bool) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._save_info = save_info

    def add(
        self,
        episode: int,
        step: int,
        observation: Tree,
        action: Tree,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> None:
        row: dict[str, Any] = {
            "episode": episode,
            "step": step,
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }
        for kind, tree in (("observation", observation), ("action", action)):
            for path, leaf in leaves(tree):
                row[f"{kind}.{path}" if path else kind] = np.asarray(leaf).copy()
        if self._save_info:
            row["info"] = json.dumps(info, default=_readable, sort_keys=True)
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)

    def write(self, path: Path) -> None:
        """`.npz`: columns of equal length, no pickled objects; `numpy.load` opens it with its defaults."""
        arrays = {name: np.asarray(values) for name, values in self._columns.items()}
        for name, array in arrays.items():
            if array.dtype == object:
                raise EnvironmentFault(f"The column {name!r} changes its shape from step to step and cannot be written.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.part")
            with aside.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            aside.replace(path)
        except OSError as error:
            raise StoreFull(f"Cannot write {path}: {error.strerror}.") from error


def _readable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value)


def play(
    agent: Agent,
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
    played, log = Played(), StepLog(save_info) if steps_file else None
    if video is not None:
        check_renders(env, name)
    total = 0
    with contextlib.ExitStack() as stack:
        writer: VideoWriter | None = None
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
                    log.add(episode, length, _seen(before, env), action, float(reward), terminated, truncated, info)
                gained, length, total = gained + float(reward), length + 1, total + 1
                over = terminated or truncated
            if over:
                played.returns.append(gained)
                played.lengths.append(length)
            if max_steps is not None and total >= max_steps:
                break
    if log is not None and steps_file is not None and total:
        log.write(steps_file)
        played.steps_file = steps_file
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
