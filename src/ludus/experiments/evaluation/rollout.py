"""Rollouts: trained agents play whole episodes, in this process or in several; every step is written to one portable file, the
pictures to an mp4.

Episode i starts from `seed + i` and has random numbers of its own, and steps are put together in the order of the episodes: how
many processes play makes no difference to what is played or written.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
from ludus.distributed.code_bundle import Luggage
from ludus.envs.pettingzoo import make_match
from ludus.envs.preprocessing import saved_preprocess
from ludus.envs.registry import factory_of
from ludus.envs.vector_env import environment_errors, make_one, without_central_state
from ludus.envs.video_writer import FrameProgress
from ludus.envs.wrappers import WrapperList, load_wrappers, wrapper_names
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.experiments.evaluation.rollout_file import FINAL, Ledger, Part, StepLog
from ludus.experiments.evaluation.video import (
    GRID_CELLS,
    FrameFile,
    as_it_is,
    check_depth,
    check_renders,
    check_rgb,
    depth_colours,
    frame_rate,
    write_grid,
    write_video,
)
from ludus.experiments.result import Result
from ludus.experiments.runs.checkpoint import FOLDER, Checkpoint, open_checkpoint
from ludus.experiments.runs.remote_runs import is_remote, write_cached_weights
from ludus.experiments.runs.run_agent import RunAgent
from ludus.models.centralized_critic import actor_policy
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process.workers.supervisor import Context
from ludus.process.workers.task_pool import Errands
from ludus.sampling.episode_runner import Score, episode_step_limit
from ludus.sampling.multi_agent import Step, play_episode
from ludus.sampling.trained_agent import TrainedAgent

log = logging.getLogger(__name__)

VIDEO_EPISODES = 3  # a longer video than that is rarely watched
AHEAD = 4  # episodes that a process may be ahead of the one that is written next
_HANG_S = 300.0
_LOOK_S = 1.0
FRAMES = "frames"
"""The file of an episode's pictures, in the directory of the episode."""


@dataclass
class Played:
    """Returns and lengths of whole episodes, and where the files are."""

    returns: list[float] = field(default_factory=list)
    """Of several agents: the sum over them."""
    lengths: list[int] = field(default_factory=list)
    agents: dict[str, list[float]] = field(default_factory=dict)
    """Returns by agent, where there are several."""
    cut: int = 0
    """Episodes among them that were cut because they did not end by themselves."""
    steps_file: Path | None = None
    video: Path | None = None

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


# -- who plays what -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What is played, by whom, and what is kept of it: plain values, which may go to another process."""

    env: str
    trained_on: str
    models: Mapping[str, tuple[Mapping[str, Any], str]]
    """Name → how it is built, and the file of its weights."""
    cast: Mapping[str, str] | None = None
    """Agent → model; None: there is one agent, and one model."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    wrappers: WrapperList = ()
    seed: int = 0
    deterministic: bool = True
    steps: bool = False
    save_info: bool = False
    filmed: int = 0
    """So many of the first episodes are filmed."""
    depth: bool = False
    luggage: Luggage = field(default_factory=Luggage)

    def policies(self) -> dict[str, Policy]:
        return {name: actor_policy(_policy(description, Path(weights))) for name, (description, weights) in self.models.items()}

    def noise_seed(self, episode: int) -> int:
        """Far from the seeds of the environments, which are small numbers in a row."""
        return int(np.random.SeedSequence((self.seed % (1 << 64), episode)).generate_state(1, np.uint64)[0] >> 1)


def _policy(description: Mapping[str, Any], weights: Path) -> Policy:
    policy = serialization.policy_from(description)
    policy.load_weights(serialization.decode_weights(weights.read_bytes(), str(weights))[0])
    return policy


@dataclass(frozen=True)
class Told:
    """What became of one episode."""

    gained: float
    length: int
    over: bool
    fps: float
    agents: Mapping[str, float] = field(default_factory=dict)


class Player(Protocol):
    """Plays one episode after the other, and leaves each in a directory of its own."""

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> Told: ...

    def close(self) -> None: ...


def stage_of(
    where: str | Path, *, env: str | None = None, env_config: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, str, Stage]:
    """(run directory, name of the checkpoint, what it plays): the environment of the run, or another with the same spaces.

    `options` are those of the stage: seed, deterministic, save_info, depth. Raises NotFound, Damaged, UsageError.
    """
    trust.allow(env)
    run, found = open_checkpoint(where)
    made_with = found.state["config"]
    name = env or made_with["env"]
    if name == EXTERNAL:
        raise UsageError("Trained with env: external, so there is nothing to roll out.", f"Use ludus serve {where}.")
    settings = made_with["config"]
    mapping = (settings.get("multiagent") or {}).get("policy_mapping")
    models = {
        model: (found.state["models"][model]["description"], str(_weights_file(run, found, model).resolve()))
        for model in found.weights
    }
    wrappers = settings.get("wrappers") or ()
    custom = [description["network"].get("custom_model") for description, _ in models.values()]
    factory_of(name)  # before another process, which trusts what this one does, is asked to play it
    load_wrappers(wrappers)
    stage = Stage(
        env=name,
        trained_on=made_with["env"],
        models=models,
        cast=mapping if isinstance(mapping, dict) else None,
        env_config={**settings.get("env_config", {}), **(env_config or {})},
        preprocess=saved_preprocess(settings),
        wrappers=wrappers,
        luggage=Luggage.of(name, *wrapper_names(wrappers), models=custom),
        **options,
    )
    return run, found.name, stage


def _weights_file(run: Path, found: Checkpoint, model: str) -> Path:
    """For processes that read files: of a checkpoint on a store, a copy."""
    if is_remote(run):
        return write_cached_weights(run, serialization.encode_weights(found.weights[model]))
    return run / FOLDER / found.name / f"{model}.safetensors"


@contextlib.contextmanager
def staged_agent(
    agent: TrainedAgent, env: str | None, env_config: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Stage]:
    """What an agent plays whose weights are in this process; one that knows its run, as it was trained there. Raises UsageError."""
    trust.allow(env)
    made_with = agent.experiment() if isinstance(agent, RunAgent) else {}
    settings, name = made_with.get("config", {}), env or made_with.get("env")
    if name is None:
        raise UsageError("An agent alone does not name an environment.", "Give env=…")
    _check_playable(name, settings, agent)
    wrappers = settings.get("wrappers") or ()
    factory_of(name)  # before another process, which trusts what this one does, is asked to play it
    load_wrappers(wrappers)
    with tempfile.TemporaryDirectory(prefix="ludus-") as aside:
        weights = Path(aside) / "weights.safetensors"
        weights.write_bytes(serialization.encode_weights(agent.policy.weights()))
        described = agent.policy.description()
        yield Stage(
            name,
            made_with.get("env", "another environment"),
            {DEFAULT_MODEL: (described, str(weights))},
            env_config={**settings.get("env_config", {}), **(env_config or {})},
            preprocess=saved_preprocess(settings),
            wrappers=wrappers,
            luggage=Luggage.of(name, *wrapper_names(wrappers), models=[described["network"].get("custom_model")]),
            **options,
        )


def _check_playable(env: str, settings: Mapping[str, Any], agent: TrainedAgent) -> None:
    where = agent.run_dir if isinstance(agent, RunAgent) else "RUN"
    if env == EXTERNAL:
        raise UsageError("Trained with env: external, so there is nothing to roll out.", f"Use ludus serve {where}.")
    if settings.get("multiagent"):
        raise UsageError(
            "This agent was trained beside others in one environment, and cannot play it alone.",
            f"ludus.evaluate({str(where)!r}) plays all of them.",
        )


def make_player(stage: Stage) -> Player:
    """Raises EnvironmentFault, IncompatibleCheckpoint, UsageError when the agents and the environment do not go together."""
    return SoloPlayer(stage) if stage.cast is None else MatchPlayer(stage, stage.cast)


def _names(space: gym.Space[Any]) -> set[str]:
    return set(space.spaces) if isinstance(space, gym.spaces.Dict) else set()


class _Recording:
    """What is written down of an episode: nothing, its steps, its pictures."""

    def __init__(self, stage: Stage, episode: int, directory: Path, stack: contextlib.ExitStack) -> None:
        self._stage, self._episode = stage, episode
        directory.mkdir(parents=True, exist_ok=True)
        self.part = stack.enter_context(Part(directory / "steps", stage.save_info)) if stage.steps else None
        wanted = episode < stage.filmed
        self._frames = stack.enter_context(FrameFile(directory / FRAMES)) if wanted else None

    def film(self, render: Callable[[], Any], gained: float) -> None:
        if self._frames is not None:
            check = check_depth if self._stage.depth else check_rgb
            self._frames.add(check(render(), self._stage.env), gained)

    def end(self, prefix: str, observation: Tree) -> None:
        """What was seen last."""
        if self.part is not None:
            self.part.add({f"{prefix}{FINAL}episode": self._episode}, {f"{prefix}{FINAL}observation": observation})


class SoloPlayer:
    """One agent in one environment."""

    def __init__(self, stage: Stage, env: gym.Env[Any, Any] | None = None, policy: Policy | None = None) -> None:
        self._stage = stage
        self.env = env if env is not None else self._made()
        try:
            if stage.filmed:
                check_renders(self.env, stage.env)
            self._policy = policy if policy is not None else next(iter(stage.policies().values()))
            if "state" not in _names(self._policy.observation_space):  # of one with a centralised value the actor plays
                self.env = without_central_state(self.env)
            _check_spaces(self._policy, self.env, stage)
        except BaseException:
            self.env.close()
            raise

    def _made(self) -> gym.Env[Any, Any]:
        s = self._stage
        make = partial(make_one, s.env, s.env_config, preprocess=s.preprocess, wrappers=s.wrappers)
        env = make("rgb_array" if s.filmed else None)
        if s.filmed and s.depth and "depth_array" in env.metadata.get("render_modes", ()):
            env.close()
            env = make("depth_array")
        return env

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> Told:
        env, stage = self.env, self._stage
        agent = TrainedAgent(self._policy, stage.noise_seed(episode))
        gained, length, over = 0.0, 0, False
        with contextlib.ExitStack() as stack:
            recording = _Recording(stage, episode, directory, stack)
            with environment_errors(stage.env, "reset", 0):
                observation, info = env.reset(seed=stage.seed + episode)
            state = None
            while not over and length < max_steps:
                beat()
                recording.film(env.render, gained)
                mask = info.get(ACTION_MASK)
                action, state = agent.act(observation, state, mask, deterministic=stage.deterministic)
                before = observation
                with environment_errors(stage.env, "step", length + 1):
                    observation, reward, terminated, truncated, info = env.step(action)
                if recording.part is not None:
                    counters = {"episode": episode, "step": length, "reward": float(reward)}
                    ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
                    recording.part.add(counters | ends, {"observation": _seen(before, env), "action": action}, info)
                gained, length = gained + float(reward), length + 1
                over = bool(terminated or truncated)
            if length:
                recording.end("", _seen(observation, env))
        return Told(gained, length, over, frame_rate(env.metadata))

    def close(self) -> None:
        self.env.close()


class MatchPlayer:
    """Several agents in one environment, each played by the model that the cast names."""

    def __init__(self, stage: Stage, cast: Mapping[str, str]) -> None:
        if stage.save_info:
            raise UsageError("Infos of environments with several agents are not written.", "Leave out --save-info.")
        self._stage = stage
        self._match = make_match(stage.env, stage.env_config, "rgb_array" if stage.filmed else None, stage.wrappers)
        try:
            missing = sorted(set(self._match.agents) - set(cast))
            if missing:
                raise IncompatibleCheckpoint(f"No policy was trained to play {missing[0]!r} of {stage.env}: it has other agents.")
            policies = stage.policies()
            self._policies = {agent: policies[cast[agent]] for agent in self._match.agents}
        except BaseException:
            self._match.close()
            raise

    def play(self, episode: int, max_steps: int, directory: Path, beat: Callable[[], None]) -> Told:
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
            ledger = None if recording.part is None else Ledger(recording.part, episode, agents)

            def before_step() -> None:
                beat()
                recording.film(match.render, sum(returns.values()))

            def on_step(step: Step) -> None:
                nonlocal length
                length = step.number + 1
                for agent, reward in step.rewards.items():
                    returns[agent] += reward
                if ledger is not None:
                    ledger.note(step)

            finished = play_episode(
                match, agents, stage.seed + episode,
                deterministic=stage.deterministic, max_steps=max_steps, before_step=before_step, on_step=on_step,
            )  # fmt: skip
            if ledger is not None:
                ledger.close()
        if finished is not None:
            returns = dict(finished.returns)
        return Told(sum(returns.values()), length, finished is not None, frame_rate(match.metadata), returns)

    def close(self) -> None:
        self._match.close()


def _check_spaces(policy: Policy, env: gym.Env[Any, Any], stage: Stage) -> None:
    seen, _ = spaces.split_mask(env.observation_space)
    theirs = (spaces.array_spec(seen), spaces.to_json(env.action_space))
    ours = (spaces.array_spec(policy.observation_space), spaces.to_json(policy.action_space))
    if ours != theirs:
        raise IncompatibleCheckpoint(
            f"The agent was trained on {stage.trained_on}; the spaces of {stage.env} are others ({env.observation_space})."
        )


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


# -- playing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """Where things go; None: nowhere."""

    steps: Path | None = None
    video: Path | None = None
    grid: bool = False
    """Episodes side by side instead of one after the other."""
    video_progress: FrameProgress | None = None
    """Told of every frame of the video while it is written, after the last episode."""


NOWHERE = Files()

Watch = Callable[[int, Told], None]
"""Told of every episode, in order."""


def rollout(
    stage: Stage,
    episodes: int,
    *,
    max_steps: int | None = None,
    files: Files = NOWHERE,
    workers: int = 0,
    log_dir: Path | None = None,
    watch: Watch = lambda episode, told: None,
    player: Player | None = None,
) -> Played:
    """Play until `episodes` have ended or `max_steps` were made. An unfinished episode is in the file, not in the returns."""
    film = 0 if files.video is None else min(episodes, GRID_CELLS if files.grid else VIDEO_EPISODES)
    stage = replace(stage, steps=files.steps is not None, filmed=film)
    played = Played()
    with contextlib.ExitStack() as stack:
        steps = stack.enter_context(StepLog(files.steps, stage.save_info)) if files.steps is not None else None
        aside = steps.aside if steps is not None else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-")))
        limit = max(episode_step_limit(stage.env), max_steps or 0)
        crew = _Crew(stage, aside, episodes, limit, workers, log_dir, player)
        stack.callback(crew.close)
        made, fps, gained = 0, 0.0, list[float]()
        for episode in range(episodes):
            left = limit if max_steps is None else max_steps - made
            told = crew.episode(episode, left)
            made, fps = made + told.length, told.fps
            gained.append(told.gained)
            _count(played, told, cut=not told.over and told.length >= limit and (max_steps is None or made < max_steps))
            watch(episode, told)
            if steps is not None:
                steps.extend(aside / str(episode) / "steps")
                shutil.rmtree(aside / str(episode) / "steps", ignore_errors=True)
            if max_steps is not None and made >= max_steps:
                break
        played.steps_file = steps.write() if steps is not None else None
        if files.video is not None:
            frames = [aside / str(i) / FRAMES for i in range(min(film, len(gained)))]
            played.video = _video(files, stage, frames, fps, gained)
    return played


def _count(played: Played, told: Told, cut: bool) -> None:
    if not told.over and not cut:
        return
    played.cut += cut
    played.returns.append(told.gained)
    played.lengths.append(told.length)
    for agent, gained in told.agents.items():
        played.agents.setdefault(agent, []).append(gained)


def _video(files: Files, stage: Stage, frames: list[Path], fps: float, gained: list[float]) -> Path | None:
    assert files.video is not None
    path = files.video.with_name(f"{files.video.stem}-depth{files.video.suffix}") if stage.depth else files.video
    shown = depth_colours(frames) if stage.depth else as_it_is
    if files.grid:
        return write_grid(path, frames, fps, shown, gained, files.video_progress)
    return write_video(path, frames, fps, shown, files.video_progress)


class _Crew:
    """Gives the episodes in order, whoever plays them: this process when asked, or others ahead of that."""

    def __init__(
        self, stage: Stage, aside: Path, episodes: int, limit: int, workers: int, log_dir: Path | None, player: Player | None
    ) -> None:
        self._stage, self._aside, self._limit = stage, aside, limit
        self._player, self._errands = player, None
        self._told: dict[int, Told] = {}
        self._to_come: Iterator[int] = iter(range(episodes))
        if workers:
            self._errands = Errands(
                "rollout",
                Worker,
                stage,
                str(aside),
                workers=min(workers, episodes),
                hang_s=_HANG_S,
                log_dir=log_dir,
                preload=("torch", __name__),
            )
            self._give(AHEAD * workers)

    def _give(self, count: int) -> None:
        for _, episode in zip(range(count), self._to_come, strict=False):
            assert self._errands is not None
            self._errands.give(episode, {"episode": episode, "max_steps": self._limit})

    def episode(self, episode: int, left: int) -> Told:
        """Played to its end, or to `left` steps. Raises what went wrong."""
        most = min(left, self._limit)
        if self._errands is None:
            return self._own().play(episode, most, self._aside / str(episode), lambda: None)
        while episode not in self._told:
            for done in self._errands.take(_LOOK_S):
                if done.error is not None:
                    raise done.error
                self._told[done.number] = Told(**done.answer)
        self._give(1)
        told = self._told.pop(episode)
        if told.length <= most:
            return told
        return self._own().play(episode, most, self._aside / str(episode), lambda: None)  # once more, and not as far

    def _own(self) -> Player:
        if self._player is None:
            self._player = make_player(self._stage)
        return self._player

    def close(self) -> None:
        if self._errands is not None:
            self._errands.close()
        if self._player is not None:
            self._player.close()


class Worker:
    """What another process does: play the episodes it is told to."""

    def __init__(self, context: Context, stage: Stage, aside: str) -> None:
        torch.set_num_threads(1)
        stage.luggage.unpack()
        self._context, self._aside = context, Path(aside)
        self._player = make_player(stage)

    def __call__(self, errand: Mapping[str, Any]) -> dict[str, Any]:
        episode = int(errand["episode"])
        told = self._player.play(episode, int(errand["max_steps"]), self._aside / str(episode), self._context.beat)
        return {"gained": told.gained, "length": told.length, "over": told.over, "fps": told.fps, "agents": dict(told.agents)}

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
    steps_file: Path | None = None,
    save_info: bool = False,
    video: Path | None = None,
) -> Played:
    """The same with an agent and an environment that are there already; the environment is left open."""
    stage = Stage(
        name, name, {DEFAULT_MODEL: (agent.policy.description(), "")}, seed=seed, deterministic=deterministic, save_info=save_info
    )
    filmed = replace(stage, filmed=0 if video is None else min(episodes, VIDEO_EPISODES), steps=steps_file is not None)
    player = _Borrowed(filmed, env, agent.policy)
    return rollout(stage, episodes, max_steps=max_steps, files=Files(steps_file, video), player=player)


class _Borrowed(SoloPlayer):
    def close(self) -> None:
        """Whoever lent the environment closes it."""


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
    """Returns and lengths of so many episodes, without any file."""
    with contextlib.ExitStack() as stack:
        if isinstance(what, TrainedAgent):
            stage = stack.enter_context(staged_agent(what, env, env_config, seed=seed, deterministic=deterministic))
        else:
            where = (what.checkpoint or what.run_dir) if isinstance(what, Result) else what
            *_, stage = stage_of(where, env=env, env_config=env_config, seed=seed, deterministic=deterministic)
        played = rollout(stage, episodes, workers=workers)
    return Score(tuple(played.returns), tuple(played.lengths), cut=played.cut)
