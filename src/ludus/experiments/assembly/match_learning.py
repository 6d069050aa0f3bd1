"""The learning side of a run with several agents, wherever its matches are played."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ludus.algorithms.trainer import Publisher, Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.experiments.assembly.components import (
    ComponentStack,
    LearningRun,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.match_evaluation import (
    AgentAssignment,
    assign_agents,
    find_opponent,
    make_match,
    make_match_evaluation,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import make_run_policy, measure_largest_values_of_agents
from ludus.experiments.control.experience_source import ExperienceSource
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.validation.agent_mapping import policy_config
from ludus.models.byte_scales import LargestValues
from ludus.models.devices import copy_for_acting, parse_device
from ludus.models.policy import Policy
from ludus.sampling.opponents import Opponent, ZeroSum
from ludus.transport.base import SegmentReader


@dataclass(frozen=True)
class MatchLearning:
    """An open run with several agents: who plays which agent, and the algorithms that learn its policies."""

    prepared: PreparedRun
    hooks: RunHooks
    stack: ComponentStack
    stop: StopCheck
    assignment: AgentAssignment
    opponent: Opponent | None
    """Of evaluations."""
    policies: Mapping[str, Policy]
    learning: LearningRun

    def add_trainer(
        self, source: ExperienceSource, batches: SegmentReader, pool: Publisher, zero_sum: ZeroSum
    ) -> TrainingComponents:
        """Make the trainer, the evaluation and the controller, the last components of the run.

        `source` plays the matches, `batches` holds what was recorded in them, `pool` publishes new versions to `source`.
        """
        resolved, run = self.prepared.resolved, self.learning.run
        trainer = Trainer(
            self.learning.algorithms,
            batches,
            pool,
            smoothing=resolved.config.metrics_num_episodes_for_smoothing,
            by_model=False,
            clock=self.stop.clock,
        )
        evaluation = make_match_evaluation(
            resolved, self.assignment, self.policies, self.opponent, zero_sum, run, self.stop, self.hooks.announce
        )
        return add_controller(self.prepared, self.hooks, self.stack, self.learning, source, trainer, evaluation)


def open_match_learning(
    assignment: AgentAssignment, prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack, stop: StopCheck
) -> MatchLearning:
    """Make every policy of the config with its algorithm, and open the run."""
    resolved = prepared.resolved
    config = resolved.config
    assert config.multiagent is not None
    opponent = find_opponent(assignment, config)
    each = {name: policy_config(resolved.algorithm.Config, config, name) for name in config.multiagent.names()}
    policies = _make_policies(assignment, each, prepared, hooks)
    check_memory(resolved, policies)
    learning = open_learning_run(prepared, policies, stack, each)
    return MatchLearning(prepared, hooks, stack, stop, assignment, opponent, policies, learning)


def probe_agents(env: str, config: AlgorithmConfig, stop: StopCheck) -> AgentAssignment:
    """Make one environment to find its agents, and close it. Raises Interrupted."""
    assert config.multiagent is not None
    with stop.interruptible():
        match = make_match(env, config)
        try:
            return assign_agents(match, config.multiagent)
        finally:
            match.close()


def _make_policies(
    assignment: AgentAssignment, each: Mapping[str, AlgorithmConfig], prepared: PreparedRun, hooks: RunHooks
) -> dict[str, Policy]:
    env, config, before = prepared.resolved.experiment.env, prepared.resolved.config, prepared.before
    assert config.multiagent is not None
    central = config.multiagent.centralized_value

    @functools.cache
    def largest_values() -> dict[str, LargestValues]:
        return measure_largest_values_of_agents(lambda: make_match(env, config), assignment.agents, config.seed, central=central)

    policies = {}
    for name, spaces in assignment.spaces.items():
        look = functools.partial(lambda model: largest_values()[model], name)
        policy = make_run_policy(*spaces, each[name], before, look=look, announce=hooks.announce, model=name, central=central)
        policies[name] = copy_for_acting(policy, parse_device(each[name].inference_device, "inference_device"))
    return policies
