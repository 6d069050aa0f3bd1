"""Videos of evaluation episodes during training (`evaluation_video`): recorded after an evaluation, in an environment of their own."""

from __future__ import annotations

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
from ludus.experiments.evaluation.rollout import FRAMES, SoloPlayer, Stage
from ludus.experiments.evaluation.rollout_file import written_to
from ludus.experiments.evaluation.video import check_renders, write_video
from ludus.experiments.runs.remote_runs import EVALUATION_VIDEO
from ludus.models.centralized_critic import actor_policy
from ludus.models.policy import Policy
from ludus.sampling.episode_runner import preserve_random_state

log = logging.getLogger(__name__)

MAX_STEPS: Final = 2_000
"""A video shows at most this many steps of an episode, so that a long game does not hold up training for long."""


@dataclass(frozen=True)
class Recorded:
    """Files of the episodes, in order, and the reason if there is none of the others."""

    paths: tuple[Path, ...] = ()
    problem: str | None = None


class VideoRecorder:
    """Plays episodes of an evaluation again, with rendering, and writes each to `videos/` of the run as an mp4.

    `stage.filmed` is the number of episodes. Episode i has the seed of row i of the evaluation: a deterministic policy in an
    environment that follows its seed plays the same episode, unless a vector implementation draws all rows from one generator
    (CartPole). `before_step` runs before every step and every encoded frame; what it raises ends the recording, and no file is
    left of the episode that was open.
    """

    def __init__(self, stage: Stage, policy: Policy, directory: Path, before_step: Callable[[], None]) -> None:
        self._stage, self._policy, self._before_step = stage, policy, before_step
        self._videos = directory / "videos"
        self._env: gym.Env[Any, Any] | None = None

    def record(self, weights: Mapping[str, Array], iteration: int, seed: int) -> Recorded:
        """Never raises what the environment, its renderer or the disk raise: that is `Recorded.problem`."""
        paths: list[Path] = []
        try:
            self._policy.load_weights(weights)
            self._env = self._env or make_rendering(self._stage)
            actor = actor_policy(self._policy)
            player = SoloPlayer(replace(self._stage, seed=seed), self._env, actor)
            for episode in range(self._stage.filmed):
                path = self._videos / f"{EVALUATION_VIDEO}{iteration:06d}-episode-{episode + 1}.mp4"
                with actor.acting():
                    self._record_episode(player, episode, path)
                paths.append(path)
        except Exception as error:  # whatever a renderer raises: a video is not worth a training
            return Recorded(tuple(paths), describe_failure(self._stage.env, error))
        return Recorded(tuple(paths))

    def _record_episode(self, player: SoloPlayer, episode: int, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="ludus-") as aside:
            told = player.play(episode, MAX_STEPS, Path(aside), self._before_step)
            encoded = Path(aside) / path.name
            write_video(encoded, [Path(aside) / FRAMES], told.fps, progress=lambda *_: self._before_step())
            with written_to(path):
                self._videos.mkdir(parents=True, exist_ok=True)
                shutil.move(encoded, path)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def make_rendering(stage: Stage) -> gym.Env[Any, Any]:
    """A copy of the environment that renders. Raises UsageError if it cannot, EnvironmentFault if it cannot be made."""
    env = make_one(stage.env, stage.env_config, "rgb_array", preprocess=stage.preprocess, wrappers=stage.wrappers)
    try:
        check_renders(env, stage.env)
    except BaseException:
        env.close()
        raise
    return env


def why_not_recorded(stage: Stage) -> str | None:
    """Makes a copy of the environment to find out why it cannot be recorded; None: it says that it renders RGB frames."""
    try:
        with preserve_random_state():
            make_rendering(stage).close()
    except Exception as error:  # whatever a renderer raises: a video is not worth a training
        return describe_failure(stage.env, error)
    return None


def describe_failure(env: str, error: Exception) -> str:
    """Without the hint of an error, which is for rollouts."""
    lines = (error.message if isinstance(error, LudusError) else f"{type(error).__name__}: {error}").splitlines()
    reason = lines[0] if lines else type(error).__name__
    return f"no videos of evaluations of {env} are recorded from now on (evaluation_video); training goes on. Reason: {reason}"
