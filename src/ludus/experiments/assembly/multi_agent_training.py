"""Training of several agents in one environment (`config.multiagent`), in this process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.match_evaluation import (
    AgentAssignment,
    MatchEvaluation,
    assign_agents,
    find_opponent,
    load_opponent,
    make_match,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import largest_seen_of_agents, make_run_policy
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.validation.agent_mapping import policy_config
from ludus.models.byte_scales import LargestValues
from ludus.models.devices import copy_for_acting, parse_device
from ludus.models.policy import Policy
from ludus.sampling.fixed_opponents import seat_fixed_opponents
from ludus.sampling.match_opponents import result_names, seat_self_play
from ludus.sampling.multi_agent import EnvCopies, MatchBatches, MultiAgentSampler, MultiAgentSettings
from ludus.sampling.sampler import Interruption
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory


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
    policies = _make_policies(assignment, each, prepared, hooks)
    check_memory(resolved, policies)

    learning = open_learning_run(prepared, policies, stack, each)

    batches = stack.own(_make_batches(policies, copies, config))
    settings = MultiAgentSettings(
        config.train_batch_size,
        by_env_steps=section.count_steps_by == "env_steps",
        central=section.centralized_value,
        explore=config.explore,
        smoothing=config.metrics_num_episodes_for_smoothing,
    )
    seed, sources = prepared.environment_seed, {name: learning.pool.source(name) for name in assignment.spaces}
    seating = None
    if config.self_play.checkpoint is not None:
        frozen = load_opponent(config.self_play.checkpoint, assignment, "config.self_play.checkpoint")
        seating = seat_fixed_opponents(config.self_play, assignment.agents, frozen.policies, seed)
    elif config.self_play.opponents is not None:
        (source,) = sources.values()
        seating = seat_self_play(config.self_play, assignment.agents, source, seed, learning.run.directory)
    sampler = MultiAgentSampler(
        copies, assignment.agents, sources, batches, settings, seed,
        interruption=Interruption(stop.before_step, stop.interruptible), make_seating=seating,
    )  # fmt: skip

    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = Trainer(learning.algorithms, batches, learning.pool, smoothing=smoothing, by_model=False, clock=clock)
    evaluation = None
    if config.evaluation_duration:
        evaluation = MatchEvaluation(resolved, assignment, policies, opponent, sampler.zero_sum, stop)
    return add_controller(prepared, hooks, stack, learning, sampler, trainer, evaluation)


def _make_policies(
    assignment: AgentAssignment, each: Mapping[str, AlgorithmConfig], prepared: PreparedRun, hooks: RunHooks
) -> dict[str, Policy]:
    env, config, before = prepared.resolved.experiment.env, prepared.resolved.config, prepared.before
    assert config.multiagent is not None
    central = config.multiagent.centralized_value

    @functools.cache
    def largest_values() -> dict[str, LargestValues]:
        return largest_seen_of_agents(lambda: make_match(env, config), assignment.agents, config.seed, central=central)

    policies = {}
    for name, spaces in assignment.spaces.items():
        look = functools.partial(lambda model: largest_values()[model], name)
        policy = make_run_policy(*spaces, each[name], before, look=look, announce=hooks.announce, model=name, central=central)
        policies[name] = copy_for_acting(policy, parse_device(each[name].inference_device, "inference_device"))
    return policies


def _make_batches(policies: Mapping[str, Policy], copies: EnvCopies, config: AlgorithmConfig) -> MatchBatches:
    """Blocks for all that may be recorded until a batch is complete, even in segments of one step."""
    assert config.multiagent is not None
    trained = config.multiagent.policies_to_train or list(policies)
    agents = len(copies[0].agents)
    per_step = agents if config.multiagent.count_steps_by == "env_steps" else 1  # decisions in one counted step
    blocks = config.train_batch_size * per_step + 4 * len(copies) * agents + 16
    specs = {name: session_spec(policies[name], config.steps, name) for name in trained}
    results = result_names(config.self_play)
    return MatchBatches({name: LocalMemory(replace(spec, results=results), 1, blocks) for name, spec in specs.items()})
