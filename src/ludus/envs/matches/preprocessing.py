"""Preprocessing of environments with several agents: the settings of `config.preprocess`, for every agent on its own.

Observations go through the wrappers of single environments (`envs/preprocessing.py`); each agent has its own stack of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import gymnasium as gym
import numpy as np

from ludus.config.schema import PreprocessConfig
from ludus.core.tree import Tree
from ludus.envs.pettingzoo import AgentSpaces, Departure, MatchStep, MatchWrapper, MultiAgentMatch, ParallelMatch, Turn
from ludus.envs.preprocessing import (
    Clip,
    Leaf,
    has_images,
    is_plain,
    noop_action,
    preprocess_observations,
    reward_clip,
    skip_frames_of_video,
)
from ludus.errors import ConfigError

AGENT: Final = "agent"
"""Part of an observation that marks the agent, see `preprocess.agent_indicator`."""
_NOOPS = 3  # the random stream of no-op starts, apart from the others that come from the seed of a reset


def preprocess_match(match: MultiAgentMatch, config: PreprocessConfig) -> MultiAgentMatch:
    """Wrap the match, from which `drop` has been removed. Raises ConfigError for settings that do not apply to it."""
    _check_applies(match, config)
    if is_plain(config):
        return match
    if config.noop_max:
        match = NoopStartMatch(match, config.noop_max)
    if config.frame_skip and config.frame_skip > 1:
        match = FrameSkipMatch(match, config.frame_skip)
    if config.max_episode_steps:
        match = TimeLimitMatch(match, config.max_episode_steps)
    clip = reward_clip(config)
    if clip is not None:
        match = ClipRewardMatch(match, clip)
    return ObservationMatch(match, config)


def _check_applies(match: MultiAgentMatch, config: PreprocessConfig) -> None:
    if config.standard:
        raise ConfigError(
            f"preprocess.standard: {match.name} has several agents; the standard preprocessing exists for Atari and ViZDoom with one.",
            "Set the single steps: resize, grey, stack, frame_skip ….",
        )
    if config.episodic_life:
        raise ConfigError(
            f"preprocess.episodic_life: {match.name} has several agents, which do not report their lives.", "Leave it out."
        )
    if isinstance(match, ParallelMatch):
        return
    for key, value in (("frame_skip", (config.frame_skip or 1) > 1), ("noop_max", config.noop_max)):
        if value:
            raise ConfigError(
                f"preprocess.{key}: the agents of {match.name} act in turn, so an action cannot be repeated before the others act.",
                "Leave it out: it is for environments whose agents act at the same time.",
            )


# -- actions and rewards ------------------------------------------------------------------------------------------------


class NoopStartMatch(MatchWrapper):
    """Starts a match with 0 to `most` no-op actions of all agents, to vary the initial state. Their rewards do not count."""

    def __init__(self, match: MultiAgentMatch, most: int) -> None:
        super().__init__(match)
        self._most = most
        self._idle = {agent: noop_action(own.action, f"{agent!r} of {match.name}") for agent, own in match.agents.items()}

    def reset(self, seed: int) -> MatchStep:
        random = np.random.default_rng([seed, _NOOPS])
        step = self.match.reset(seed)
        for _ in range(int(random.integers(self._most + 1))):
            if step.over:  # also a match that ended before any agent acted
                break
            step = self.match.step({turn.agent: self._idle[turn.agent] for turn in step.turns})
            if step.over:
                step = self.match.reset(int(random.integers(1 << 31)))
        return MatchStep([turn._replace(reward=0.0) for turn in step.turns], over=step.over)


class FrameSkipMatch(MatchWrapper):
    """Repeats the actions of all agents; returns the sums of the rewards and the last observations.

    The repetition ends early when the match is over, or when an agent must act that has not chosen an action: one that has arrived,
    returned or waited.
    """

    def __init__(self, match: MultiAgentMatch, times: int) -> None:
        super().__init__(match)
        self._times = times
        self._gained: dict[str, float] = {}  # agent → rewards of repeated actions, which its next turn reports

    @property
    def metadata(self) -> Mapping[str, Any]:
        return skip_frames_of_video(self.match.metadata, self._times)

    def reset(self, seed: int) -> MatchStep:
        self._gained.clear()
        return self.match.reset(seed)

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        chosen, repeated = dict(actions), actions
        departures: list[Departure] = []
        for left in range(self._times - 1, -1, -1):
            step = self.match.step(repeated)
            departures += map(self._add_gained, step.departures)
            for departure in step.departures:
                chosen.pop(departure.agent, None)
            if not left or step.over or any(turn.agent not in chosen for turn in step.turns):
                break
            for turn in step.turns:
                self._gained[turn.agent] = self._gained.get(turn.agent, 0.0) + turn.reward
            repeated = {turn.agent: chosen[turn.agent] for turn in step.turns}
        turns = [turn._replace(reward=turn.reward + self._gained.pop(turn.agent, 0.0)) for turn in step.turns]
        return MatchStep(turns, departures, step.over)

    def truncate(self) -> Sequence[Departure]:
        return [self._add_gained(departure) for departure in self.match.truncate()]

    def _add_gained(self, departure: Departure) -> Departure:
        return departure._replace(reward=departure.reward + self._gained.pop(departure.agent, 0.0))


class TimeLimitMatch(MatchWrapper):
    """Truncates the match after `limit` steps: all agents leave, with their present observation where there is one."""

    def __init__(self, match: MultiAgentMatch, limit: int) -> None:
        super().__init__(match)
        self._limit, self._steps = limit, 0

    def reset(self, seed: int) -> MatchStep:
        self._steps = 0
        return self.match.reset(seed)

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        self._steps += 1
        step = self.match.step(actions)
        if step.over or self._steps < self._limit:
            return step
        gone = {departure.agent for departure in step.departures}  # those that have returned at once have not acted again
        cut = {turn.agent: Departure(turn.agent, turn.reward, False, True, turn.observation) for turn in step.turns}
        waiting = {departure.agent: departure for departure in self.match.truncate() if departure.agent not in cut}
        truncated = [departure for agent, departure in {**cut, **waiting}.items() if agent not in gone]
        return MatchStep((), [*step.departures, *truncated], over=True)


class ClipRewardMatch(MatchWrapper):
    """Clips the reward of every agent since its last action."""

    def __init__(self, match: MultiAgentMatch, clip: Clip) -> None:
        super().__init__(match)
        self._clip = clip

    def reset(self, seed: int) -> MatchStep:
        return self._map(self.match.reset(seed))

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        return self._map(self.match.step(actions))

    def _map(self, step: MatchStep) -> MatchStep:
        turns = [turn._replace(reward=float(self._clip(turn.reward))) for turn in step.turns]
        departures = [departure._replace(reward=float(self._clip(departure.reward))) for departure in step.departures]
        return MatchStep(turns, departures, step.over)


# -- observations -------------------------------------------------------------------------------------------------------


class ObservationMatch(MatchWrapper):
    """Maps the observations of every agent. `grey` and `resize` apply to the agents that see images; at least one must."""

    def __init__(self, match: MultiAgentMatch, config: PreprocessConfig) -> None:
        super().__init__(match)
        spaces = {agent: own.observation for agent, own in match.agents.items()}
        with_images = {agent for agent, space in spaces.items() if has_images(space)} or set(spaces)  # none: that is an error
        undropped = config.model_copy(update={"drop": None})  # the match has removed parts already: they may be of any space
        blind = undropped.model_copy(update={"grey": None, "resize": None})
        self._observers = {
            agent: AgentObserver(
                space, undropped if agent in with_images else blind, f"{agent!r} of {match.name}", number, len(spaces)
            )
            for number, (agent, space) in enumerate(spaces.items())
        }
        self.agents: Mapping[str, AgentSpaces] = {
            agent: replace(own, observation=self._observers[agent].space) for agent, own in match.agents.items()
        }

    def reset(self, seed: int) -> MatchStep:
        for observer in self._observers.values():
            observer.reset()
        return self._map(self.match.reset(seed))

    def step(self, actions: Mapping[str, Any]) -> MatchStep:
        return self._map(self.match.step(actions))

    def _map(self, step: MatchStep) -> MatchStep:
        departures = [self._leave(departure) for departure in step.departures]  # first: an agent may return in the same step
        return MatchStep([self._turn(turn) for turn in step.turns], departures, step.over)

    def _turn(self, turn: Turn) -> Turn:
        return turn._replace(observation=self._observers[turn.agent](turn.observation))

    def _leave(self, departure: Departure) -> Departure:
        observer = self._observers[departure.agent]
        last = None if departure.observation is None else observer(departure.observation)
        observer.reset()
        return departure._replace(observation=last)


class AgentObserver:
    """Preprocesses the observations of one agent, with the wrappers of single environments."""

    def __init__(self, space: gym.Space[Any], config: PreprocessConfig, name: str, number: int, agents: int) -> None:
        """`number`: of the agent, from 0 up to the number of `agents`."""
        self._feed = _ObservationFeed(space)
        self._env = preprocess_observations(self._feed, config, name)
        self._begins = True
        self.space: gym.Space[Any] = self._env.observation_space
        self._mark: Callable[[Any], Tree] | None = None
        if config.agent_indicator:
            self.space, self._mark = _agent_indicator(self.space, number, agents, name)

    def reset(self) -> None:
        """The next observation is the first one of an episode."""
        self._begins = True

    def __call__(self, observation: Tree) -> Tree:
        self._feed.observation = observation
        seen: Tree = self._env.reset()[0] if self._begins else self._env.step(None)[0]
        self._begins = False
        return seen if self._mark is None else self._mark(seen)


def _agent_indicator(space: gym.Space[Any], number: int, agents: int, name: str) -> Leaf:
    """Return the space with a one-hot mark of the agent, and the function that adds the mark. Raises ConfigError.

    The mark is at the end of a vector of floats; otherwise it is the part `agent`.
    """
    mark, mark_space = np.eye(agents, dtype=np.float32)[number], gym.spaces.Box(0.0, 1.0, (agents,), np.float32)
    if isinstance(space, gym.spaces.Dict):
        if AGENT in space.spaces:
            raise ConfigError(
                f"preprocess.agent_indicator: the observation of {name} already has a part {AGENT!r}.", "Leave it out."
            )
        return gym.spaces.Dict({**space.spaces, AGENT: mark_space}), lambda seen: {**seen, AGENT: mark}
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        low, high = np.append(space.low, mark_space.low), np.append(space.high, mark_space.high)
        return gym.spaces.Box(low, high, dtype=space.dtype.type), lambda seen: np.append(seen, mark)
    whole = gym.spaces.Dict({"observation": space, AGENT: mark_space})
    return whole, lambda seen: {"observation": seen, AGENT: mark}


class _ObservationFeed(gym.Env[Any, Any]):
    """An environment that returns the observations that it is given."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = space, gym.spaces.Discrete(1)
        self.observation: Tree = ()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation, 0.0, False, False, {}
