"""Evaluation of a multi-agent run: matches of its policies among themselves, against chance, or against another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.config.schema import AlgorithmConfig, MultiAgentConfig
from ludus.envs import pettingzoo
from ludus.envs.pettingzoo import CentralState, MultiAgentMatch, central_space
from ludus.errors import ConfigError, Interrupted
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import warn_truncated_episodes
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.runs import checkpoint
from ludus.models.centralized_critic import OWN, STATE, actor_policy
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource
from ludus.sampling.episode_runner import Score, episode_step_limit, preserve_random_state
from ludus.sampling.multi_agent import EnvCopies, play_matches
from ludus.sampling.opponents import RANDOM, Opponent, ZeroSum

_ROWS = 16
"""Matches that are evaluated at the same time."""

_DISPLAY_EVERY_S = 10.0


def make_match(env: str, config: AlgorithmConfig, render_mode: str | None = None) -> MultiAgentMatch:
    """Make the environment with the wrappers of the config."""
    return pettingzoo.make_match(env, config.env_config, render_mode, config.wrappers)


@dataclass(frozen=True)
class AgentAssignment:
    """`agents`: agent → model. `spaces`: model → observation and action space of its network."""

    agents: Mapping[str, str]
    spaces: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]


def assign_agents(match: MultiAgentMatch, section: MultiAgentConfig) -> AgentAssignment:
    """The assignment of a resolved configuration. With a centralised value, networks also take the state of the whole match."""
    assert isinstance(section.policy_mapping, Mapping)
    agents = dict(section.policy_mapping)
    whole = CentralState(match.agents, match.state_space).space if section.centralized_value else None
    spaces = {}
    for agent, policy in agents.items():
        own = match.agents[agent]
        spaces[policy] = (own.observation if whole is None else central_space(own.observation, whole), own.action)
    return AgentAssignment(agents, {policy: spaces[policy] for policy in section.names()})


class MatchEvaluation:
    """Plays matches in environments of its own with seeds of its own, so that training is not affected."""

    def __init__(
        self,
        resolved: ResolvedExperiment,
        assignment: AgentAssignment,
        policies: Mapping[str, Policy],
        opponent: Opponent | None,
        zero_sum: ZeroSum,
        stop: StopCheck,
    ) -> None:
        """`opponent` None: the policies of the run, or chance once its matches turn out to be zero-sum."""
        self._resolved, self._assignment, self._stop = resolved, assignment, stop
        self._opponent, self._zero_sum = opponent, zero_sum
        self._sources = {name: FixedSource(actor_policy(policy)) for name, policy in policies.items()}
        self._copies: EnvCopies | None = None

    @property
    def every_s(self) -> float | None:
        """Seconds of training between two evaluations for the display; None: only those of the config.

        The training return of a zero-sum game is always 0: only an evaluation shows whether anything is learned.
        """
        configured = self._resolved.config.evaluation_interval != "checkpoint"
        return None if configured or not self._zero_sum else _DISPLAY_EVERY_S

    def __call__(self, iteration: int) -> Score:
        try:
            with self._stop.interruptible():
                return self._evaluate(iteration)
        except Interrupted:
            return Score((), (), complete=False)

    def _evaluate(self, iteration: int) -> Score:
        config, env = self._resolved.config, self._resolved.experiment.env
        if self._copies is None:
            changes = config.evaluation_config.env_config
            other = config if changes is None else config.model_copy(update={"env_config": {**config.env_config, **changes}})
            self._copies = EnvCopies(
                lambda: make_match(env, other),
                min(config.evaluation_duration, _ROWS),
                forgiving=config.restart_failed_sub_environments,
                beat=self._stop.before_evaluation_step,
            )
        with preserve_random_state():
            score = self._play(self._copies, (config.seed * 7919 + iteration * 104_729 + 1) % (1 << 31))
        warn_truncated_episodes(score, env)
        return score

    def _play(self, copies: EnvCopies, seed: int) -> Score:
        config = self._resolved.config
        return play_matches(
            copies,
            self._assignment.agents,
            self._sources,
            config.evaluation_duration,
            seed,
            deterministic=not config.evaluation_config.explore,
            opponent=self._opponent or (RANDOM if self._plays_chance else None),
            max_steps=episode_step_limit(self._resolved.experiment.env),
            interrupted=self._stop.ends_evaluation,
        )

    @property
    def _plays_chance(self) -> bool:
        section = self._resolved.config.multiagent
        return section is not None and section.evaluation_opponents is None and bool(self._zero_sum)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def find_opponent(assignment: AgentAssignment, config: AlgorithmConfig) -> Opponent | None:
    """The opponent of evaluations that the config names. Raises UsageError, NotFound when a run does not fit the agents."""
    assert config.multiagent is not None
    named = config.multiagent.evaluation_opponents
    if named in (None, "policies") or not config.evaluation_duration:
        return None
    return RANDOM if named == "random" else load_opponent(str(named), assignment)


def load_opponent(where: str, assignment: AgentAssignment, key: str = "config.multiagent.evaluation_opponents") -> Opponent:
    """The policies of a run or checkpoint, by the agents that they played in training. `key`: that names it, for errors.

    Raises UsageError, NotFound.
    """
    agents, hint = assignment.agents, "Name a run of the same environment."
    run, loaded = checkpoint.open_checkpoint(where)
    section = loaded.state["config"]["config"].get("multiagent") or {}
    mapping = section.get("policy_mapping")
    if not isinstance(mapping, Mapping) or not agents.keys() <= mapping.keys():
        raise ConfigError(f"{key} is {where}, which was not trained with the agents {', '.join(agents)}.", hint)
    models = {model: loaded.policy(model) for model in dict.fromkeys(mapping[agent] for agent in agents)}
    policies = {agent: models[mapping[agent]] for agent in agents}
    for agent, model in agents.items():
        observation, action = assignment.spaces[model]
        own = (
            observation[OWN]
            if isinstance(observation, gym.spaces.Dict) and set(observation.spaces) == {OWN, STATE}
            else observation
        )
        theirs = policies[agent]
        if (theirs.observation_space, theirs.action_space) != (own, action):
            raise ConfigError(
                f"{key} is {where}, whose policy for {agent!r} has the spaces {theirs.observation_space} and {theirs.action_space}; "
                f"here they are {own} and {action}.",
                hint,
            )
    return Opponent(run.name, policies)
