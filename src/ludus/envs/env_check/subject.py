"""The environment under check behind one interface: a single agent, or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core import spaces
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Tree, map_tree
from ludus.envs import pettingzoo
from ludus.envs.env_check.session import CallFailed, CheckSession
from ludus.envs.pettingzoo import MatchStep, MultiAgentMatch, sample_action
from ludus.envs.vector_env import make_one
from ludus.errors import ConfigError

RESERVED_INFOS = ("final_obs", "final_info", "final_observation", "lost")
"""Keys of infos that belong to vector environments."""


@dataclass(slots=True)
class Moment:
    """The environment after a reset or a step."""

    observations: dict[str, Any]
    """Agent that acts next → observation."""
    masks: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Agent whose episode has ended → `terminated`, `truncated` or `both`."""
    over: bool = False
    infos: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentView:
    """Spaces of one agent as the environment declares them, and without the action mask."""

    declared: gym.Space[Any]
    observation: gym.Space[Any]
    action: gym.Space[Any]


def is_match(session: CheckSession) -> bool:
    """Whether the environment has several agents. May make it."""
    request = session.request
    found: bool = session.call("its constructor", pettingzoo.is_multi_agent, request.env, request.env_config, kind="construct")
    return found


def make_subject(session: CheckSession, render_mode: str | None = None) -> Subject:
    """Make a copy as training would. Raises CallFailed, UsageError."""
    request, preprocess = session.request, session.preprocessing
    kind = "construct" if render_mode is None else "render"
    if is_match(session):
        match = session.call(
            "its constructor", pettingzoo.make_match, request.env, request.env_config, render_mode, request.wrappers, preprocess,
            kind=kind,
        )  # fmt: skip
        return MatchSubject(session, match)
    env = session.call(
        "its constructor", make_one, request.env, request.env_config, render_mode, preprocess=preprocess,
        wrappers=request.wrappers, kind=kind,
    )  # fmt: skip
    return SoloSubject(session, env)


def random_actions(subject: Subject, moment: Moment, random: np.random.Generator) -> dict[str, Any]:
    """Actions of all agents that act, uniform over what their masks allow."""
    return {
        agent: _as_given(sample_action(subject.agents[agent].action, flat_mask(subject, agent, moment), random))
        for agent in moment.observations
    }


def _as_given(action: Tree) -> Tree:
    """A scalar as training passes it: a NumPy number, not an array without dimensions."""
    return map_tree(lambda part: part[()] if isinstance(part, np.ndarray) and not part.ndim else part, action)


def flat_mask(subject: Subject, agent: str, moment: Moment) -> Any:
    """The mask of an agent as a vector; None if it has none, or an unusable one."""
    mask = moment.masks.get(agent)
    if mask is None:
        return None
    action = subject.agents[agent].action
    try:
        flat = spaces.flat_mask(mask, action)
    except (ConfigError, TypeError, ValueError):
        return None
    return flat if all(flat[part].any() for part in spaces.choices(action)) else None


class SoloSubject:
    """A Gymnasium environment. Checks the form of what it returns."""

    def __init__(self, session: CheckSession, env: gym.Env[Any, Any]) -> None:
        self._session, self.env = session, env
        self.metadata: Mapping[str, Any] = env.metadata or {}
        for what in ("observation_space", "action_space"):
            if not isinstance(getattr(env, what, None), gym.Space):
                session.findings.add("spaces", f"{what} is {getattr(env, what, None)!r}, not a gymnasium.Space")
                raise CallFailed("its constructor")
        declared, action = env.observation_space, env.action_space
        self._spaces = declared, action
        self._inside = isinstance(declared, gym.spaces.Dict) and ACTION_MASK in declared.spaces
        self._masked = self._inside
        own = spaces.split_mask(declared)[0] if self._inside else declared
        self.agents: Mapping[str, AgentView] = {"": AgentView(declared, own, action)}

    def reset(self, seed: int | None) -> Moment:
        made = self._session.call("reset", self.env.reset, seed=seed)
        if not isinstance(made, tuple) or len(made) != 2:
            self._fail(f"reset returned {_count(made)}, not (observation, info)")
        observation, info = made
        self._check_info("reset", info)
        self._masked = self._inside or (isinstance(info, Mapping) and ACTION_MASK in info)
        for what, now, before in zip(
            ("observation", "action"), (self.env.observation_space, self.env.action_space), self._spaces, strict=True
        ):
            if now is not before and now != before:
                self._session.findings.add("spaces_change", f"the {what} space was {before}, and is {now} after reset")
                raise CallFailed("reset")
        return Moment({"": observation}, self._masks(observation, info), infos=info)

    def step(self, actions: Mapping[str, Any]) -> Moment:
        made = self._session.call("step", self.env.step, actions[""])
        if not isinstance(made, tuple) or len(made) != 5:
            self._fail(f"step returned {_count(made)}, not (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = made
        self._check_info("step", info)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                self._session.findings.add("flags", f"{name} is {flag!r}, a {type(flag).__name__}, at step {self._session.step}")
        ends = _ending(terminated, truncated)
        masks = self._masks(observation, info, ended=bool(ends))
        return Moment(
            {} if ends else {"": observation}, masks, {"": self._reward(reward)}, {"": ends} if ends else {}, bool(ends), info
        )

    def render(self) -> Any:
        return self._session.call("render", self.env.render, kind="render")

    def close(self) -> None:
        self._session.call("close", self.env.close, kind="close")

    def _fail(self, text: str) -> None:
        self._session.findings.add("interface", text)
        raise CallFailed(text)

    def _check_info(self, call: str, info: Any) -> None:
        log = self._session.findings
        if not isinstance(info, Mapping):
            log.add("info", f"{call} returned a {type(info).__name__} as info")
            raise CallFailed(call)
        for key in info:
            if not isinstance(key, str) or key in RESERVED_INFOS or key.startswith("_"):
                log.add("info_keys", f"{call} returned the key {key!r} in its info")

    def _reward(self, reward: Any) -> float:
        log, step = self._session.findings, self._session.step
        if isinstance(reward, (np.ndarray, list, tuple)) and np.size(reward) == 1:
            if np.ndim(reward):
                log.add("reward_type", f"the reward is an array of shape {list(np.shape(reward))} at step {step}")
            reward = np.reshape(reward, ())[()]
        try:
            number = float(reward)
        except (TypeError, ValueError):
            log.add("reward", f"the reward is {repr(reward)[:60]}, a {type(reward).__name__}, at step {step}")
            return 0.0
        if not np.isfinite(number):
            log.add("reward", f"the reward is {number} at step {step}")
            return 0.0
        return number

    def _masks(self, observation: Any, info: Any, ended: bool = False) -> dict[str, Any]:
        if not self._masked:
            return {}
        holder = observation if self._inside else info
        where = "the observation" if self._inside else "the infos"
        if not isinstance(holder, Mapping) or ACTION_MASK not in holder:
            if not ended:
                self._session.findings.add("mask", f"there is no {ACTION_MASK} in {where} at step {self._session.step}")
            return {}
        mask = holder[ACTION_MASK]
        if not ended:
            self._check_mask(mask)
        return {"": mask}

    def _check_mask(self, mask: Any) -> None:
        log, step, action = self._session.findings, self._session.step, self._spaces[1]
        try:
            flat = spaces.flat_mask(mask, action)
        except (ConfigError, TypeError, ValueError) as error:
            log.add("mask", f"{str(error).rstrip('.')}, at step {step}")
            return
        for part in spaces.choices(action):
            if not flat[part].any():
                log.add("mask_empty", f"every action is forbidden (options {part.start} to {part.stop - 1}) at step {step}")


def _ending(terminated: Any, truncated: Any) -> str:
    try:
        one, two = bool(terminated), bool(truncated)
    except ValueError:  # an array of several flags
        return ""
    return "both" if one and two else "terminated" if one else "truncated" if two else ""


def _count(made: Any) -> str:
    return f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"


class MatchSubject:
    """An environment with several agents, as Ludus presents it."""

    def __init__(self, session: CheckSession, match: MultiAgentMatch) -> None:
        self._session, self.match, self._resets = session, match, 0
        self.metadata: Mapping[str, Any] = match.metadata or {}
        self.agents: Mapping[str, AgentView] = {
            agent: AgentView(own.observation, own.observation, own.action) for agent, own in match.agents.items()
        }

    def reset(self, seed: int | None) -> Moment:
        self._resets += 1
        drawn = np.random.default_rng([self._session.request.seed, self._resets]).integers(1 << 30)
        return self._moment(self._session.call("reset", self.match.reset, int(drawn) if seed is None else seed))

    def step(self, actions: Mapping[str, Any]) -> Moment:
        return self._moment(self._session.call("step", self.match.step, actions))

    def render(self) -> Any:
        return self._session.call("render", self.match.render, kind="render")

    def close(self) -> None:
        self._session.call("close", self.match.close, kind="close")

    def _moment(self, step: MatchStep) -> Moment:
        rewards = {turn.agent: turn.reward for turn in step.turns}
        for left in step.departures:
            rewards[left.agent] = rewards.get(left.agent, 0.0) + left.reward
        return Moment(
            {turn.agent: turn.observation for turn in step.turns},
            {turn.agent: turn.mask for turn in step.turns if turn.mask is not None},
            rewards,
            {left.agent: _ending(left.terminated, left.truncated) or "terminated" for left in step.departures},
            step.over,
        )


Subject = SoloSubject | MatchSubject
"""One copy of the environment. Its calls go through `CheckSession.call`: they raise CallFailed."""
