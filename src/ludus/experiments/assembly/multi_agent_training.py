"""Training of several agents in one environment (`config.multiagent`), in this process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.core.types import SegmentSpec
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
    whole_agent_episodes,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.match_evaluation import (
    AgentAssignment,
    assign_agents,
    find_opponent,
    load_opponent,
    make_match,
    make_match_evaluation,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import make_run_policy, measure_largest_values_of_agents
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.validation.agent_mapping import policy_config
from ludus.models.byte_scales import LargestValues
from ludus.models.devices import copy_for_acting, parse_device
from ludus.models.policy import Policy
from ludus.sampling.fixed_opponents import seat_fixed_opponents
from ludus.sampling.match_opponents import result_names, seat_self_play
from ludus.sampling.multi_agent import EnvCopies, MultiAgentSampler, MultiAgentSettings, match_batches
from ludus.sampling.sampler import Interruption
from ludus.sampling.segment_recorder import session_spec


def assemble_multi_agent(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run whose agents share an environment, with one algorithm for every policy."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    section = config.multiagent
    assert section is not None
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    with stop.interruptible():
        copies = stack.own(
            EnvCopies(
                lambda: make_match(e.env, config), config.num_envs_per_worker,
                forgiving=config.restart_failed_sub_environments, beat=stop.raise_if_due,
            )
        )  # fmt: skip
    assignment = assign_agents(copies[0], section)
    opponent = find_opponent(assignment, config)

    each = {name: policy_config(resolved.algorithm.Config, config, name) for name in section.names()}
    policies = make_policies(assignment, each, prepared, hooks)
    check_memory(resolved, policies)

    learning = open_learning_run(prepared, policies, stack, each)

    settings = sampling_settings(config, config.train_batch_size)
    batches = stack.own(match_batches(trained_specs(policies, config), settings, copies))
    seed, sources = prepared.environment_seed, {name: learning.pool.source(name) for name in assignment.spaces}
    seating = None
    if config.self_play.checkpoint is not None:
        frozen = load_opponent(config.self_play.checkpoint, assignment, "config.self_play.checkpoint")
        seating = seat_fixed_opponents(config.self_play, assignment.agents, frozen.policies, seed)
    elif config.self_play.opponents is not None:
        (source,) = sources.values()
        seating = seat_self_play(config.self_play, assignment.agents, source, seed, learning.run.directory)
    sampler = stack.own(
        MultiAgentSampler(
            copies, assignment.agents, sources, batches, settings, seed,
            interruption=Interruption(stop.before_step, stop.interruptible), make_seating=seating,
        )
    )  # fmt: skip

    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = Trainer(
        learning.algorithms,
        whole_agent_episodes(batches, config),
        learning.pool,
        smoothing=smoothing,
        by_model=False,
        clock=clock,
    )
    evaluation = make_match_evaluation(
        resolved, assignment, policies, opponent, sampler.zero_sum, learning.run, stop, hooks.announce
    )
    return add_controller(prepared, hooks, stack, learning, sampler, trainer, evaluation)


def sampling_settings(config: AlgorithmConfig, batch_steps: int) -> MultiAgentSettings:
    assert config.multiagent is not None
    return MultiAgentSettings(
        batch_steps,
        by_env_steps=config.multiagent.count_steps_by == "env_steps",
        central=config.multiagent.centralized_value,
        explore=config.explore,
        smoothing=config.metrics_num_episodes_for_smoothing,
    )


def make_policies(
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


def trained_specs(policies: Mapping[str, Policy], config: AlgorithmConfig) -> list[SegmentSpec]:
    """Specs of the segments of the policies that are trained."""
    assert config.multiagent is not None
    trained = config.multiagent.policies_to_train or list(policies)
    results = result_names(config.self_play)
    return [replace(session_spec(policies[name], config.steps, name), results=results) for name in trained]
