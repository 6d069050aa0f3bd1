"""Evaluation of a multi-agent run: matches of its policies among themselves, against chance, or against another run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from ludus.config.schema import AlgorithmConfig, MultiAgentConfig
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs import pettingzoo
from ludus.envs.pettingzoo import MatchSpaces, MultiAgentMatch, network_spaces
from ludus.envs.preprocessing import for_evaluation
from ludus.envs.wrappers import wrapper_names
from ludus.errors import ConfigError, Interrupted
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import Notice, make_notice, warn_truncated_episodes
from ludus.experiments.evaluation.evaluation_workers import EvaluationWorkers, worker_settings
from ludus.experiments.evaluation.match_plan import (
    MatchEvaluationPlan,
    MatchEvaluationPlayer,
    MatchVideoRecorder,
    OpponentDescription,
    acting_sources,
    find_recording_problem,
)
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.centralized_critic import OWN, STATE
from ludus.models.policy import Policy
from ludus.sampling.episode_runner import Score, preserve_random_state
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.opponents import RANDOM, Opponent, ZeroSum

log = logging.getLogger(__name__)

_DISPLAY_EVERY_S = 10.0


def make_match(env: str, config: AlgorithmConfig, render_mode: str | None = None) -> MultiAgentMatch:
    """Make the environment with the wrappers and the preprocessing of the config."""
    return pettingzoo.make_match(env, config.env_config, render_mode, config.wrappers, config.preprocess)


@dataclass(frozen=True)
class AgentAssignment:
    """`agents`: agent → model. `spaces`: model → observation and action space of its network."""

    agents: Mapping[str, str]
    spaces: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]

    def own_spaces(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation and action space of an agent, without the state of a centralised value."""
        observation, action = self.spaces[self.agents[agent]]
        if isinstance(observation, gym.spaces.Dict) and set(observation.spaces) == {OWN, STATE}:
            return observation[OWN], action
        return observation, action


def assign_agents(match: MatchSpaces, section: MultiAgentConfig) -> AgentAssignment:
    """The assignment of a resolved configuration. With a centralised value, networks also take the state of the whole match."""
    assert isinstance(section.policy_mapping, Mapping)
    agents = dict(section.policy_mapping)
    spaces = {policy: network_spaces(match, agent, central=section.centralized_value) for agent, policy in agents.items()}
    return AgentAssignment(agents, {policy: spaces[policy] for policy in section.names()})


class MatchEvaluation:
    """Plays matches in this process while training waits, in environments of its own with seeds of its own."""

    def __init__(
        self,
        plan: MatchEvaluationPlan,
        policies: Mapping[str, Policy],
        choice: OpponentChoice,
        stop: StopCheck,
        *,
        recorder: MatchVideoRecorder | None = None,
        notice: Notice = log.warning,
        displayed: bool = False,
    ) -> None:
        """`notice` is called once if videos cannot be recorded. `displayed`: also evaluate for the display, see `every_s`."""
        self._plan, self._choice, self._stop = plan, choice, stop
        self._recorder, self._notice, self._displayed = recorder, notice, displayed
        self._sources = acting_sources(policies)
        self._copies: MatchCopies | None = None

    @property
    def every_s(self) -> float | None:
        """Seconds of training between two evaluations for the display; None: only those of the config.

        The training return of a zero-sum game is always 0: only an evaluation shows whether anything is learned.
        """
        return _DISPLAY_EVERY_S if self._displayed and self._choice.zero_sum else None

    def __call__(self, iteration: int) -> Score:
        opponent = self._choice.choose()
        try:
            with preserve_random_state(), self._stop.interruptible():
                score = self._play(iteration, opponent)
        except Interrupted:
            return Score((), (), complete=False)
        warn_truncated_episodes(score, self._plan.env)
        return replace(score, videos=self._record(iteration, opponent)) if score.complete else score

    def _play(self, iteration: int, opponent: Opponent | None) -> Score:
        if self._copies is None:
            self._copies = self._plan.copies(self._plan.groups, self._stop.before_evaluation_step)
        seed, interrupted = self._plan.seed_of(iteration), self._stop.ends_evaluation
        return self._plan.play(self._sources, self._copies, seed, opponent=opponent, interrupted=interrupted)

    def _record(self, iteration: int, opponent: Opponent | None) -> tuple[Path, ...]:
        if self._recorder is None:
            return ()
        try:
            with preserve_random_state(), self._stop.interruptible():
                recorded = self._recorder.record(self._sources, iteration, opponent)
        except Interrupted:  # the score is valid
            return ()
        if recorded.problem is not None:
            self._notice(recorded.problem)
            self._close_recorder()
        return recorded.paths

    def _close_recorder(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def close(self) -> None:
        self._close_recorder()
        if self._copies is not None:
            self._copies.close()


@dataclass(frozen=True)
class OpponentChoice:
    """Who plays the other agents in the next evaluation."""

    named: Opponent | None
    """The one that the config names; None: the policies of the run."""
    zero_sum: ZeroSum
    may_be_random: bool
    """Whether chance takes the place of the policies once the matches of the training turn out to be zero-sum."""

    @property
    def plays_chance(self) -> bool:
        return self.named is None and self.may_be_random and bool(self.zero_sum)

    def choose(self) -> Opponent | None:
        return RANDOM if self.plays_chance else self.named


def make_match_evaluation(
    resolved: ResolvedExperiment,
    assignment: AgentAssignment,
    policies: Mapping[str, Policy],
    opponent: Opponent | None,
    zero_sum: ZeroSum,
    run: Run,
    stop: StopCheck,
    announce: Notice | None = None,
) -> MatchEvaluation | EvaluationWorkers | None:
    """The evaluation of a run with several agents, in this process or by workers; None: it has none.

    Raises ConfigError, EnvironmentFault if the environment of `evaluation_config` cannot be made or has other agents.
    """
    config = resolved.config
    if not config.evaluation_duration:
        return None
    assert config.multiagent is not None
    choice = OpponentChoice(opponent, zero_sum, config.multiagent.evaluation_opponents is None)
    plan = _make_plan(resolved.experiment.env, config, assignment, policies)
    if config.evaluation_config.env_config is not None:
        _check_spaces(plan, assignment)
    notice = make_notice(announce)
    if plan.videos and (problem := find_recording_problem(plan)) is not None:
        notice(problem)
        plan = replace(plan, videos=0)
    if not config.evaluation_num_workers:
        recorder = MatchVideoRecorder(plan, run.directory, stop.before_evaluation_step) if plan.videos else None
        displayed = config.evaluation_interval == "checkpoint"
        return MatchEvaluation(plan, policies, choice, stop, recorder=recorder, notice=notice, displayed=displayed)
    if opponent is not None:
        plan = replace(plan, opponent=OpponentDescription.of(opponent))
    custom = [description["network"].get("custom_model") for description in plan.descriptions.values()]
    return EvaluationWorkers(
        plan,
        CodeBundle.of(plan.env, *wrapper_names(plan.wrappers), models=custom),
        run.directory,
        worker_settings(config),
        stop.ends_evaluation,
        notice,
        player=MatchEvaluationPlayer,
        details=lambda: {"random": choice.plays_chance},
    )


def _make_plan(
    env: str, config: AlgorithmConfig, assignment: AgentAssignment, policies: Mapping[str, Policy]
) -> MatchEvaluationPlan:
    return MatchEvaluationPlan(
        env=env,
        env_config={**config.env_config, **(config.evaluation_config.env_config or {})},
        preprocess=for_evaluation(config.preprocess),
        wrappers=config.wrappers,
        agents=assignment.agents,
        descriptions={name: policy.description() for name, policy in policies.items()},
        duration=config.evaluation_duration,
        by_steps=config.evaluation_duration_unit == "timesteps",
        explore=config.evaluation_config.explore,
        seed=config.seed,
        forgiving=config.restart_failed_sub_environments,
        display=config.display,
        videos=min(config.evaluation_video, config.evaluation_duration),
    )


def _check_spaces(plan: MatchEvaluationPlan, assignment: AgentAssignment) -> None:
    with preserve_random_state():
        match = plan.make()
        match.close()
    for agent in {*match.agents, *assignment.agents}:
        theirs = match.agents.get(agent)
        ours = assignment.own_spaces(agent) if agent in assignment.agents else None
        if theirs is None or (theirs.observation, theirs.action) != ours:
            raise ConfigError(
                f"config.evaluation_config.env_config changes the agents of {plan.env}: {agent!r} has the spaces "
                f"{'none' if theirs is None else f'{theirs.observation} and {theirs.action}'}.",
                "Agents and their spaces must be the same as in training.",
            )


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
    for agent in agents:
        own, action = assignment.own_spaces(agent)
        theirs = policies[agent]
        if (theirs.observation_space, theirs.action_space) != (own, action):
            raise ConfigError(
                f"{key} is {where}, whose policy for {agent!r} has the spaces {theirs.observation_space} and {theirs.action_space}; "
                f"here they are {own} and {action}.",
                hint,
            )
    return Opponent(run.name, policies)
