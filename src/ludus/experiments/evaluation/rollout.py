"""Rollouts: trained agents play complete episodes, in this process or in workers; steps go to one `.npz`, frames to an mp4.

Episode i has the environment seed `seed + i` and its own noise, and steps are written in the order of the episodes. The result does not
depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from ludus.config.schema import EXTERNAL, PreprocessConfig
from ludus.core import spaces, statistics, trust
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Tree
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs.faults import environment_errors
from ludus.envs.pettingzoo import MultiAgentMatch, make_match
from ludus.envs.preprocessing import for_evaluation, preprocess_of
from ludus.envs.registry import factory_of
from ludus.envs.vector_env import make_one, without_central_state
from ludus.envs.video_writer import FrameProgress
from ludus.envs.wrappers import WrapperList, load_wrappers, wrapper_names
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.experiments.evaluation.rollout_file import FINAL, AgentStepWriter, EpisodeSteps, RolloutFile
from ludus.experiments.evaluation.video import (
    GRID_CELLS,
    FrameFile,
    check_depth,
    check_renders,
    check_rgb,
    depth_to_rgb,
    frame_rate,
    identity,
    write_grid,
    write_video,
)
from ludus.experiments.result import Result
from ludus.experiments.runs.checkpoint import FOLDER, agents_of, open_checkpoint
from ludus.experiments.runs.remote_runs import is_remote, write_cached_weights
from ludus.experiments.runs.run_agent import RunAgent
from ludus.models.centralized_critic import actor_policy
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process import screen_choice
from ludus.process.screen_choice import AUTO
from ludus.process.workers.supervisor import Context
from ludus.process.workers.task_pool import TaskPool
from ludus.sampling.episode_runner import Score, episode_step_limit
from ludus.sampling.multi_agent.play import Step, play_episode
from ludus.sampling.trained_agent import TrainedAgent

log = logging.getLogger(__name__)

VIDEO_EPISODES = 3  # a longer video than that is rarely watched
MAX_AHEAD = 4  # episodes that a process may be ahead of the one that is written next
_HANG_TIMEOUT_S = 300.0
_POLL_S = 1.0
FRAMES = "frames"
"""File of the frames in the directory of an episode."""


@dataclass
class RolloutResult:
    """Returns and lengths of completed episodes, and the paths of the files."""

    returns: list[float] = field(default_factory=list)
    """With several agents: the sum over them."""
    lengths: list[int] = field(default_factory=list)
    agents: dict[str, list[float]] = field(default_factory=dict)
    """Returns by agent if there are several."""
    cut: int = 0
    """Number of episodes that were truncated at the step limit."""
    steps_file: Path | None = None
    video: Path | None = None

    def add(self, played: EpisodeResult, *, cut: bool) -> None:
        """Count an episode that ended or was `cut` at the step limit."""
        self.cut += cut
        self.returns.append(played.total_return)
        self.lengths.append(played.length)
        for agent, total_return in played.agents.items():
            self.agents.setdefault(agent, []).append(total_return)

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns)) if self.returns else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrapped 95 % interval of the mean."""
        return statistics.confidence_interval(self.returns) if self.returns else (float("nan"), float("nan"))

    def to_json(self) -> dict[str, Any]:
        numbers = np.asarray(self.returns) if self.returns else np.asarray([np.nan])
        stats = {f"return_{name}": _finite(getattr(numbers, name)()) for name in ("mean", "std", "min", "max")}
        low, high = self.interval
        result: dict[str, Any] = {
            "episodes": len(self.returns),
            **stats,
            "return_low": _finite(low),
            "return_high": _finite(high),
            "length_mean": float(np.mean(self.lengths)) if self.lengths else None,
            "returns": self.returns,
            "lengths": self.lengths,
            "cut": self.cut,
            "steps_file": str(self.steps_file) if self.steps_file else None,
            "video": str(self.video) if self.video else None,
        }
        return result | ({"agents": self.agents} if self.agents else {})


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


# -- players ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutSpec:
    """What to play, with which models, and what to record. Plain values, which can be sent to another process."""

    env: str
    trained_on: str
    models: Mapping[str, tuple[Mapping[str, Any], str]]
    """Name → description and weights file."""
    cast: Mapping[str, str] | None = None
    """Agent → model; None: one agent and one model."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    wrappers: WrapperList = ()
    display: str = AUTO
    seed: int = 0
    deterministic: bool = True
    steps: bool = False
    save_info: bool = False
    recorded_episodes: int = 0
    """Number of first episodes whose frames are recorded."""
    depth: bool = False
    code_bundle: CodeBundle = field(default_factory=CodeBundle)

    def policies(self) -> dict[str, Policy]:
        loaded = {}
        for name, (description, weights) in self.models.items():
            loaded[name] = serialization.policy_from(description)
            loaded[name].load_weights(serialization.decode_weights(Path(weights).read_bytes(), weights)[0])
        return {name: actor_policy(policy) for name, policy in loaded.items()}

    def noise_seed(self, episode: int) -> int:
        """Independent of the seeds of the environments, which are consecutive."""
        return int(np.random.SeedSequence((self.seed % (1 << 64), episode)).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class EpisodeResult:
    """The outcome of one episode. `over`: it ended before the step limit."""

    total_return: float
    length: int
    over: bool
    fps: float
    agents: Mapping[str, float] = field(default_factory=dict)


class EpisodePlayer(Protocol):
    """Plays episodes and records each in its own directory. `beat` is called before every step."""

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> EpisodeResult: ...

    def close(self) -> None: ...


def rollout_spec(
    where: str | Path, *, env: str | None = None, env_config: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, str, RolloutSpec]:
    """(run directory, name of the checkpoint, spec) for the environment of the run or another with the same spaces.

    `options` are those of the spec: seed, deterministic, save_info, depth. Raises NotFound, Damaged, UsageError.
    """
    trust.allow(env)
    run, found = open_checkpoint(where)
    models = {}
    for model, weights in found.weights.items():
        file = run / FOLDER / found.name / f"{model}.safetensors"
        if is_remote(run):
            file = write_cached_weights(run, serialization.encode_weights(weights))
        models[model] = found.state["models"][model]["description"], str(file.resolve())
    mapping = agents_of(found.state["config"]["config"])
    return run, found.name, _make_spec(env, found.state["config"], models, where, env_config, cast=mapping or None, **options)


@contextlib.contextmanager
def agent_rollout_spec(
    agent: TrainedAgent, env: str | None, env_config: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[RolloutSpec]:
    """The spec for a loaded agent; a `RunAgent` plays with the settings of its run. Raises UsageError."""
    trust.allow(env)
    experiment = agent.experiment() if isinstance(agent, RunAgent) else {}
    where = agent.run_dir if isinstance(agent, RunAgent) else "RUN"
    if experiment.get("config", {}).get("multiagent"):
        raise UsageError(
            "This agent was trained with others in one environment and cannot play it alone.",
            f"ludus.evaluate({str(where)!r}) plays all of them.",
        )
    with tempfile.TemporaryDirectory(prefix="ludus-") as scratch_dir:
        weights = Path(scratch_dir) / "weights.safetensors"
        weights.write_bytes(serialization.encode_weights(agent.policy.weights()))
        models = {DEFAULT_MODEL: (agent.policy.description(), str(weights))}
        yield _make_spec(env, experiment, models, where, env_config, **options)


def _make_spec(
    env: str | None,
    experiment: Mapping[str, Any],
    models: Mapping[str, tuple[Mapping[str, Any], str]],
    where: str | Path,
    env_config: Mapping[str, Any] | None,
    **options: Any,
) -> RolloutSpec:
    """`experiment`: the one of the training, empty if it is unknown. `where`: the run, for messages."""
    settings, name = experiment.get("config", {}), env or experiment.get("env")
    if name is None:
        raise UsageError("The agent has no run that names an environment.", "Give env=…")
    if name == EXTERNAL:
        raise UsageError("Trained with env: external, so there is nothing to roll out.", f"Use ludus serve {where}.")
    wrappers = settings.get("wrappers") or ()
    factory_of(name)  # before another process, which trusts what this one does, is asked to play it
    load_wrappers(wrappers)
    custom = [description["network"].get("custom_model") for description, _ in models.values()]
    return RolloutSpec(
        env=name,
        trained_on=experiment.get("env", "another environment"),
        models=models,
        env_config={**settings.get("env_config", {}), **(env_config or {})},
        preprocess=preprocess_of(settings),
        wrappers=wrappers,
        display=settings.get("display", AUTO),
        code_bundle=CodeBundle.of(name, *wrapper_names(wrappers), models=custom),
        **options,
    )


def make_player(stage: RolloutSpec) -> EpisodePlayer:
    """Raises EnvironmentFault, IncompatibleCheckpoint, UsageError if the agents do not fit the environment."""
    screen_choice.configure(stage.display)
    return SingleAgentPlayer(stage) if stage.cast is None else MultiAgentPlayer(stage, stage.cast)


class _Recording:
    """Writers for the steps and frames of one episode, as far as the spec wants them."""

    def __init__(self, stage: RolloutSpec, episode: int, directory: Path, stack: contextlib.ExitStack) -> None:
        self._stage, self._episode = stage, episode
        directory.mkdir(parents=True, exist_ok=True)
        self.part = stack.enter_context(EpisodeSteps(directory / "steps", stage.save_info)) if stage.steps else None
        wanted = episode < stage.recorded_episodes
        self._frames = stack.enter_context(FrameFile(directory / FRAMES)) if wanted else None

    def add_frame(self, render: Callable[[], Any], total_return: float) -> None:
        if self._frames is not None:
            check = check_depth if self._stage.depth else check_rgb
            self._frames.add(check(render(), self._stage.env), total_return)

    def end(self, prefix: str, observation: Tree) -> None:
        """Write the observation after the last step."""
        if self.part is not None:
            self.part.add({f"{prefix}{FINAL}episode": self._episode}, {f"{prefix}{FINAL}observation": observation})


class SingleAgentPlayer:
    """One agent in one environment."""

    def __init__(self, stage: RolloutSpec, env: gym.Env[Any, Any] | None = None, policy: Policy | None = None) -> None:
        self._stage = stage
        self.env = env if env is not None else self._make_env()
        with contextlib.ExitStack() as made:
            made.callback(self.env.close)
            if stage.recorded_episodes:
                check_renders(self.env, stage.env)
            self._policy = policy if policy is not None else next(iter(stage.policies().values()))
            seen = self._policy.observation_space
            if (
                not isinstance(seen, gym.spaces.Dict) or "state" not in seen.spaces
            ):  # only the actor plays, without the centralised critic
                self.env = without_central_state(self.env)
            _check_spaces(self._policy, self.env, stage)
            made.pop_all()

    def _make_env(self) -> gym.Env[Any, Any]:
        s = self._stage
        make = partial(make_one, s.env, s.env_config, preprocess=s.preprocess, wrappers=s.wrappers)
        if not s.recorded_episodes:
            return make(None)
        if s.depth:
            env = make("rgb_array")
            if "depth_array" in env.metadata.get("render_modes", ()):
                env.close()
                env = make("depth_array")
            return env
        from ludus.experiments.evaluation.screen_video import make_recorded

        return make_recorded(make, s.env)

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> EpisodeResult:
        env, stage = self.env, self._stage
        spec = spaces.array_spec(env.observation_space)
        agent = TrainedAgent(self._policy, stage.noise_seed(episode))
        total_return, length, over = 0.0, 0, False
        with contextlib.ExitStack() as stack:
            recording = _Recording(stage, episode, directory, stack)
            with environment_errors(stage.env, "reset", 0):
                observation, info = env.reset(seed=stage.seed + episode)
            state = None
            while not over and length < max_steps:
                beat()
                recording.add_frame(env.render, total_return)
                mask = info.get(ACTION_MASK)
                action, state = agent.act(observation, state, mask, deterministic=stage.deterministic)
                before = observation
                with environment_errors(stage.env, "step", length + 1):
                    observation, reward, terminated, truncated, info = env.step(action)
                if recording.part is not None:
                    counters = {"episode": episode, "step": length, "reward": float(reward)}
                    ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
                    recording.part.add(counters | ends, {"observation": _as_arrays(spec, before), "action": action}, info)
                total_return, length = total_return + float(reward), length + 1
                over = bool(terminated or truncated)
            if length:
                recording.end("", _as_arrays(spec, observation))
        return EpisodeResult(total_return, length, over, frame_rate(env.metadata))

    def close(self) -> None:
        self.env.close()


class MultiAgentPlayer:
    """Several agents in one environment. `cast`: agent → model."""

    def __init__(self, stage: RolloutSpec, cast: Mapping[str, str]) -> None:
        if stage.save_info:
            raise UsageError("Infos of multi-agent environments cannot be written.", "Leave out --save-info.")
        self._stage = stage
        self._match = self._make_match()
        with contextlib.ExitStack() as made:
            made.callback(self._match.close)
            missing = sorted(set(self._match.agents) - set(cast))
            if missing:
                raise IncompatibleCheckpoint(f"No policy was trained to play {missing[0]!r} of {stage.env}: it has other agents.")
            policies = stage.policies()
            self._policies = {agent: policies[cast[agent]] for agent in self._match.agents}
            made.pop_all()

    def _make_match(self) -> MultiAgentMatch:
        s = self._stage

        def make(render_mode: str | None) -> MultiAgentMatch:
            return make_match(s.env, s.env_config, render_mode, s.wrappers, for_evaluation(s.preprocess))

        if not s.recorded_episodes or s.depth:
            return make("rgb_array" if s.recorded_episodes else None)
        from ludus.experiments.evaluation.screen_video import make_recorded_match

        return make_recorded_match(make, s.env)

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> EpisodeResult:
        stage, match = self._stage, self._match
        seeds = np.random.SeedSequence(stage.noise_seed(episode)).spawn(len(self._policies))
        agents = {
            agent: TrainedAgent(policy, int(seed.generate_state(1)[0]))
            for (agent, policy), seed in zip(self._policies.items(), seeds, strict=True)
        }
        returns = dict.fromkeys(agents, 0.0)
        length = 0
        with contextlib.ExitStack() as stack:
            recording = _Recording(stage, episode, directory, stack)
            step_writer = None if recording.part is None else AgentStepWriter(recording.part, episode, agents)

            def before_step() -> None:
                beat()
                recording.add_frame(match.render, sum(returns.values()))

            def on_step(step: Step) -> None:
                nonlocal length
                length = step.number + 1
                for agent, reward in step.rewards.items():
                    returns[agent] += reward
                if step_writer is not None:
                    step_writer.add(step)

            finished = play_episode(
                match, agents, stage.seed + episode,
                deterministic=stage.deterministic, max_steps=max_steps, before_step=before_step, on_step=on_step,
            )  # fmt: skip
            if step_writer is not None:
                step_writer.close()
        if finished is not None:
            returns = dict(finished.returns)
        return EpisodeResult(sum(returns.values()), length, finished is not None, frame_rate(match.metadata), returns)

    def close(self) -> None:
        self._match.close()


def _check_spaces(policy: Policy, env: gym.Env[Any, Any], stage: RolloutSpec) -> None:
    seen, _ = spaces.split_mask(env.observation_space)
    theirs = (spaces.array_spec(seen), spaces.to_json(env.action_space))
    ours = (spaces.array_spec(policy.observation_space), spaces.to_json(policy.action_space))
    if ours != theirs:
        raise IncompatibleCheckpoint(
            f"The agent was trained on {stage.trained_on}; the spaces of {stage.env} are others ({env.observation_space})."
        )


def _as_arrays(spec: Tree, value: Any) -> Tree:
    """An observation as arrays in the structure of its space."""
    if isinstance(spec, dict):
        return {key: _as_arrays(item, value[key]) for key, item in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_as_arrays(item, v) for item, v in zip(spec, value, strict=True))
    return np.asarray(value)


# -- playing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutFiles:
    """Output files; None: not written."""

    steps: Path | None = None
    video: Path | None = None
    grid: bool = False
    """Episodes side by side instead of one after the other."""
    video_progress: FrameProgress | None = None
    """Called for each frame while the video is written, after the last episode."""


NO_FILES = RolloutFiles()

OnEpisode = Callable[[int, EpisodeResult], None]
"""Called after every episode, in order."""


def rollout(
    stage: RolloutSpec,
    episodes: int,
    *,
    max_steps: int | None = None,
    files: RolloutFiles = NO_FILES,
    workers: int = 0,
    log_dir: Path | None = None,
    on_episode: OnEpisode = lambda episode, result: None,
    player: EpisodePlayer | None = None,
) -> RolloutResult:
    """Play until `episodes` have ended or `max_steps` are reached. An unfinished episode is in the file, but not in the returns."""
    stage = _with_recording(stage, episodes, files)
    played = RolloutResult()
    with contextlib.ExitStack() as stack:
        steps = stack.enter_context(RolloutFile(files.steps, stage.save_info)) if files.steps is not None else None
        scratch_dir = (
            steps.scratch_dir if steps is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-")))
        )
        limit = max(episode_step_limit(stage.env), max_steps or 0)
        queue = _EpisodeQueue(stage, scratch_dir, episodes, limit, workers, log_dir, player)
        stack.callback(queue.close)
        made, fps, total_return = 0, 0.0, list[float]()
        for episode in range(episodes):
            left = limit if max_steps is None else max_steps - made
            result = queue.episode(episode, left)
            made, fps = made + result.length, result.fps
            total_return.append(result.total_return)
            cut = not result.over and result.length >= limit and (max_steps is None or made < max_steps)
            if result.over or cut:
                played.add(result, cut=cut)
            on_episode(episode, result)
            if steps is not None:
                steps.extend(scratch_dir / str(episode) / "steps")
                shutil.rmtree(scratch_dir / str(episode) / "steps", ignore_errors=True)
            if max_steps is not None and made >= max_steps:
                break
        played.steps_file = steps.write() if steps is not None else None
        if files.video is not None:
            frames = [scratch_dir / str(i) / FRAMES for i in range(min(stage.recorded_episodes, len(total_return)))]
            played.video = _video(files, stage, frames, fps, total_return)
    return played


def _with_recording(stage: RolloutSpec, episodes: int, files: RolloutFiles) -> RolloutSpec:
    recorded = 0 if files.video is None else min(episodes, GRID_CELLS if files.grid else VIDEO_EPISODES)
    return replace(stage, steps=files.steps is not None, recorded_episodes=recorded)


def _video(files: RolloutFiles, stage: RolloutSpec, frames: list[Path], fps: float, total_return: list[float]) -> Path | None:
    assert files.video is not None
    path = files.video.with_name(f"{files.video.stem}-depth{files.video.suffix}") if stage.depth else files.video
    shown = depth_to_rgb(frames) if stage.depth else identity
    if files.grid:
        return write_grid(path, frames, fps, shown, total_return, files.video_progress)
    return write_video(path, frames, fps, shown, files.video_progress)


class _EpisodeQueue:
    """Returns episodes in order, played on demand in this process or ahead of time by workers."""

    def __init__(
        self,
        stage: RolloutSpec,
        scratch_dir: Path,
        episodes: int,
        limit: int,
        workers: int,
        log_dir: Path | None,
        player: EpisodePlayer | None,
    ) -> None:
        self._stage, self._scratch_dir, self._limit = stage, scratch_dir, limit
        self._player, self._task_pool = player, None
        self._results: dict[int, EpisodeResult] = {}
        self._remaining: Iterator[int] = iter(range(episodes))
        if workers:
            self._task_pool = TaskPool(
                "rollout",
                RolloutWorker,
                stage,
                str(scratch_dir),
                workers=min(workers, episodes),
                hang_s=_HANG_TIMEOUT_S,
                log_dir=log_dir,
                preload=("torch", __name__),
            )
            self._submit(MAX_AHEAD * workers)

    def _submit(self, count: int) -> None:
        for _, episode in zip(range(count), self._remaining, strict=False):
            assert self._task_pool is not None
            self._task_pool.submit(episode, {"episode": episode, "max_steps": self._limit})

    def episode(self, episode: int, left: int) -> EpisodeResult:
        """The result of an episode, played to its end or to `left` steps. Raises the error of the worker."""
        most = min(left, self._limit)
        if self._task_pool is None:
            return self._local_player().play(episode, most, self._scratch_dir / str(episode), lambda: None)
        while episode not in self._results:
            for done in self._task_pool.take(_POLL_S):
                if done.error is not None:
                    raise done.error
                self._results[done.number] = EpisodeResult(**done.answer)
        self._submit(1)
        result = self._results.pop(episode)
        if result.length <= most:
            return result
        return self._local_player().play(episode, most, self._scratch_dir / str(episode), lambda: None)  # again, with fewer steps

    def _local_player(self) -> EpisodePlayer:
        if self._player is None:
            self._player = make_player(self._stage)
        return self._player

    def close(self) -> None:
        if self._task_pool is not None:
            self._task_pool.close()
        if self._player is not None:
            self._player.close()


class RolloutWorker:
    """Plays episodes in a worker process."""

    def __init__(self, context: Context, stage: RolloutSpec, scratch_dir: str) -> None:
        torch.set_num_threads(1)
        stage.code_bundle.unpack()
        self._context, self._scratch_dir = context, Path(scratch_dir)
        self._player = make_player(stage)

    def __call__(self, task: Mapping[str, Any]) -> dict[str, Any]:
        episode = int(task["episode"])
        return asdict(self._player.play(episode, int(task["max_steps"]), self._scratch_dir / str(episode), self._context.beat))

    def close(self) -> None:
        self._player.close()


def play(
    agent: TrainedAgent,
    env: gym.Env[Any, Any],
    name: str,
    *,
    episodes: int,
    max_steps: int | None = None,
    seed: int = 0,
    deterministic: bool = True,
    files: RolloutFiles = NO_FILES,
) -> RolloutResult:
    """As `rollout`, with a loaded agent and an open environment, which stays open."""
    models = {DEFAULT_MODEL: (agent.policy.description(), "")}
    stage = _with_recording(RolloutSpec(name, name, models, seed=seed, deterministic=deterministic), episodes, files)
    player = _BorrowedEnvPlayer(stage, env, agent.policy)
    return rollout(stage, episodes, max_steps=max_steps, files=files, player=player)


class _BorrowedEnvPlayer(SingleAgentPlayer):
    def close(self) -> None:
        """The caller owns the environment."""


def evaluate(
    what: str | Path | Result | TrainedAgent,
    episodes: int,
    *,
    env: str | None = None,
    env_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    deterministic: bool = True,
    workers: int = 0,
) -> Score:
    """Returns and lengths of `episodes` episodes, without files."""
    with contextlib.ExitStack() as stack:
        if isinstance(what, TrainedAgent):
            stage = stack.enter_context(agent_rollout_spec(what, env, env_config, seed=seed, deterministic=deterministic))
        else:
            where = (what.checkpoint or what.run_dir) if isinstance(what, Result) else what
            *_, stage = rollout_spec(where, env=env, env_config=env_config, seed=seed, deterministic=deterministic)
        played = rollout(stage, episodes, workers=workers)
    return Score(tuple(played.returns), tuple(played.lengths), cut=played.cut)
