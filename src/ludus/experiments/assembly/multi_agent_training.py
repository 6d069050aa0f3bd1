"""Training of several agents in one environment (`config.multiagent`), in this process."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.experiments.assembly import byte_scales
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    make_controller,
    make_pool,
    open_run,
    restore_counters,
)
from ludus.experiments.assembly.learners import distribute_all, make_algorithms
from ludus.experiments.assembly.match_evaluation import (
    AgentAssignment,
    MatchEvaluation,
    assign_agents,
    find_opponent,
    make_match,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import embedding_bound, make_policy
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.validation.agent_mapping import policy_config
from ludus.models.byte_scales import LargestValues
from ludus.models.devices import copy_for_acting, named_device
from ludus.models.policy import Policy
from ludus.sampling.multi_agent import EnvCopies, MatchBatches, MultiAgentSampler, MultiAgentSettings
from ludus.sampling.sampler import Interruption
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory


def assemble_multi_agent(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run whose agents share an environment, with one algorithm for every policy."""
    resolved, before = prepared.resolved, prepared.before
    e, config = resolved.experiment, resolved.config
    section = config.multiagent
    assert section is not None
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    copies = stack.own(_make_copies(e.env, config, stop))
    assignment = assign_agents(copies[0], section)
    opponent = find_opponent(assignment, config)

    each = {name: policy_config(resolved.algorithm.Config, config, name) for name in section.names()}
    policies = _make_policies(assignment, each, prepared, hooks)
    check_memory(resolved, policies)

    algorithms = make_algorithms(resolved.algorithm, policies, each, before, stack)
    run = stack.own(open_run(prepared, next(iter(policies.values()))))
    algorithms = distribute_all(algorithms, policies, each, run, stack)
    pool = make_pool(run, policies, prepared, stack)

    batches = stack.own(_make_batches(policies, copies, config))
    settings = MultiAgentSettings(
        config.train_batch_size,
        by_env_steps=section.count_steps_by == "env_steps",
        central=section.centralized_value,
        explore=config.explore,
        smoothing=config.metrics_num_episodes_for_smoothing,
    )
    sources = {name: pool.source(name) for name in assignment.spaces}
    interruption = Interruption(stop.before_step, stop.interruptible)
    sampler = MultiAgentSampler(
        copies, assignment.agents, sources, batches, settings, prepared.environment_seed, interruption=interruption
    )

    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = Trainer(algorithms, batches, pool, smoothing=smoothing, by_model=False, clock=clock)
    restore_counters(prepared, trainer, sampler)
    evaluation = None
    if config.evaluation_duration:
        evaluation = stack.own(MatchEvaluation(resolved, assignment, policies, opponent, sampler.zero_sum, stop))
    controller = stack.own(make_controller(prepared, run, pool, sampler, trainer, evaluation, hooks.sinks))
    return TrainingComponents(run, pool, sampler, trainer, controller)


def _make_copies(env: str, config: AlgorithmConfig, stop: StopCheck) -> EnvCopies:
    """Raises Interrupted."""
    forgiving = config.restart_failed_sub_environments
    with stop.interruptible():
        return EnvCopies(lambda: make_match(env, config), config.num_envs_per_worker, forgiving=forgiving, beat=stop.raise_if_due)


def _make_policies(
    assignment: AgentAssignment, each: Mapping[str, AlgorithmConfig], prepared: PreparedRun, hooks: RunHooks
) -> dict[str, Policy]:
    env, config, before = prepared.resolved.experiment.env, prepared.resolved.config, prepared.before
    assert config.multiagent is not None
    central = config.multiagent.centralized_value

    @functools.cache
    def largest_values() -> dict[str, LargestValues]:
        return byte_scales.largest_seen_of_agents(
            lambda: make_match(env, config), assignment.agents, config.seed, central=central
        )

    policies = {}
    for name, (observation_space, action_space) in assignment.spaces.items():
        look = functools.partial(lambda model: largest_values()[model], name)
        scales = byte_scales.choose(observation_space, each[name], look, before, hooks.announce, name)
        bound = embedding_bound(before, name)
        policy = make_policy(observation_space, action_space, each[name], scales, central=central, embed_above=bound)
        policies[name] = copy_for_acting(policy, named_device(each[name].inference_device, "inference_device"))
    return policies


def _make_batches(policies: Mapping[str, Policy], copies: EnvCopies, config: AlgorithmConfig) -> MatchBatches:
    """Blocks for all that may be recorded until a batch is complete, even in segments of one step."""
    assert config.multiagent is not None
    trained = config.multiagent.policies_to_train or list(policies)
    agents = len(copies[0].agents)
    per_step = agents if config.multiagent.count_steps_by == "env_steps" else 1  # decisions in one counted step
    blocks = config.train_batch_size * per_step + 4 * len(copies) * agents + 16
    return MatchBatches({name: LocalMemory(session_spec(policies[name], config.steps, name), 1, blocks) for name in trained})
