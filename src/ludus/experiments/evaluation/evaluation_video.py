"""Videos of evaluation episodes during training (`evaluation_video`), recorded after an evaluation in a separate environment."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym

from ludus.core.tree import Array
from ludus.envs.vector_env import make_one
from ludus.errors import LudusError
from ludus.experiments.evaluation.rollout import FRAMES, RolloutSpec, SingleAgentPlayer
from ludus.experiments.evaluation.rollout_file import translate_write_errors
from ludus.experiments.evaluation.video import check_renders, write_video
from ludus.experiments.runs.remote_runs import EVALUATION_VIDEO
from ludus.models.centralized_critic import actor_policy
from ludus.models.policy import Policy
from ludus.sampling.episode_runner import preserve_random_state

log = logging.getLogger(__name__)

MAX_STEPS: Final = 2_000
"""Maximum steps in a video, which bounds the time that training waits."""


@dataclass(frozen=True)
class RecordedVideos:
    """Files of the episodes in order, and the reason if some are missing."""

    paths: tuple[Path, ...] = ()
    problem: str | None = None


class VideoRecorder:
    """Plays episodes of an evaluation again, with rendering, and writes each to `videos/` of the run as an mp4.

    `stage.recorded_episodes` is the number of episodes. Episode i has the seed of row i of the evaluation: a deterministic policy in an
    environment that follows its seed plays the same episode, unless a vector implementation draws all rows from one generator
    (CartPole). `before_step` runs before every step and every encoded frame; what it raises ends the recording, and no file is
    left of the episode that was open.
    """

    def __init__(self, stage: RolloutSpec, policy: Policy, directory: Path, before_step: Callable[[], None]) -> None:
        self._stage, self._policy, self._before_step = stage, policy, before_step
        self._videos = directory / "videos"
        self._env: gym.Env[Any, Any] | None = None

    def record(self, weights: Mapping[str, Array], iteration: int, seed: int) -> RecordedVideos:
        """Never raises what the environment, its renderer or the disk raise: that is `RecordedVideos.problem`."""
        paths: list[Path] = []
        with RecordingErrors(self._stage.env) as errors:
            self._policy.load_weights(weights)
            self._env = self._env or make_rendering_env(self._stage)
            actor = actor_policy(self._policy)
            player = SingleAgentPlayer(replace(self._stage, seed=seed), self._env, actor)
            for episode in range(self._stage.recorded_episodes):
                path = video_path(self._videos, iteration, episode)
                with actor.acting():
                    self._record_episode(player, episode, path)
                paths.append(path)
        return RecordedVideos(tuple(paths), errors.problem)

    def _record_episode(self, player: SingleAgentPlayer, episode: int, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="ludus-") as scratch_dir:
            result = player.play(episode, MAX_STEPS, Path(scratch_dir), self._before_step)
            encode_episode(path, Path(scratch_dir) / FRAMES, result.fps, self._before_step)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def video_path(videos: Path, iteration: int, episode: int) -> Path:
    """File of an episode of an evaluation, counted from 0."""
    return videos / f"{EVALUATION_VIDEO}{iteration:06d}-episode-{episode + 1}.mp4"


def encode_episode(path: Path, frames: Path, fps: float, before_frame: Callable[[], None]) -> None:
    """Write the video of one episode; the file appears when it is complete. `frames`: a frame file in a scratch directory."""
    encoded = frames.parent / path.name
    write_video(encoded, [frames], fps, progress=lambda *_: before_frame())
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(encoded, path)


def make_rendering_env(stage: RolloutSpec) -> gym.Env[Any, Any]:
    """A copy of the environment that renders. Raises UsageError if it cannot, EnvironmentFault if it cannot be made."""
    from ludus.experiments.evaluation.screen_video import make_recorded

    make = functools.partial(make_one, stage.env, stage.env_config, preprocess=stage.preprocess, wrappers=stage.wrappers)
    env = make_recorded(lambda mode: make(render_mode=mode), stage.env)
    with contextlib.ExitStack() as made:
        made.callback(env.close)
        check_renders(env, stage.env)
        made.pop_all()
    return env


def find_recording_problem(stage: RolloutSpec) -> str | None:
    """Why an environment cannot be recorded, found by making a copy of it; None: it declares RGB rendering."""
    with RecordingErrors(stage.env) as errors, preserve_random_state():
        make_rendering_env(stage).close()
    return errors.problem


class RecordingErrors:
    """Turns any error of the environment, its renderer or the disk into `problem`: none of them may stop training."""

    def __init__(self, env: str) -> None:
        self._env = env
        self.problem: str | None = None

    def __enter__(self) -> RecordingErrors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        # Without the hint of our own errors, which is about rollouts.
        lines = (error.message if isinstance(error, LudusError) else f"{type(error).__name__}: {error}").splitlines()
        reason = lines[0] if lines else type(error).__name__
        self.problem = f"videos of evaluations of {self._env} are no longer recorded (evaluation_video); training continues. Reason: {reason}"
        return True
