"""Training of several agents in one environment (`config.multiagent`), in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ludus.algorithms.run_clock import RunClock
from ludus.config.schema import AlgorithmConfig
from ludus.core.types import SegmentSpec
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    whole_agent_episodes,
)
from ludus.experiments.assembly.match_evaluation import assign_agents, load_opponent
from ludus.experiments.assembly.match_learning import open_match_learning
from ludus.experiments.control.stopping import StopCheck
from ludus.models.policy import Policy
from ludus.sampling.fixed_opponents import seat_fixed_opponents
from ludus.sampling.match_opponents import result_names, seat_self_play
from ludus.sampling.multi_agent.batches import MultiAgentSettings, match_batches
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.multi_agent.vector_copies import make_copies
from ludus.sampling.sampler import Interruption
from ludus.sampling.segment_recorder import session_spec


def assemble_multi_agent(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run whose agents share an environment, with one algorithm for every policy."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    assert config.multiagent is not None
    stop = StopCheck(hooks.interrupted, RunClock(e.stop.time_s))

    with stop.interruptible():
        copies = stack.own(
            make_copies(
                e.env, config.num_envs_per_worker, config.env_config, wrappers=config.wrappers, preprocess=config.preprocess,
                forgiving=config.restart_failed_sub_environments, beat=stop.raise_if_due,
            )
        )  # fmt: skip
    assignment = assign_agents(copies, config.multiagent)
    match_learning = open_match_learning(assignment, prepared, hooks, stack, stop)
    learning, policies = match_learning.learning, match_learning.policies

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

    return match_learning.add_trainer(sampler, whole_agent_episodes(batches, config), learning.pool, sampler.zero_sum)


def sampling_settings(config: AlgorithmConfig, batch_steps: int) -> MultiAgentSettings:
    assert config.multiagent is not None
    return MultiAgentSettings(
        batch_steps,
        by_env_steps=config.multiagent.count_steps_by == "env_steps",
        central=config.multiagent.centralized_value,
        explore=config.explore,
        smoothing=config.metrics_num_episodes_for_smoothing,
    )


def trained_specs(policies: Mapping[str, Policy], config: AlgorithmConfig) -> list[SegmentSpec]:
    """Specs of the segments of the policies that are trained."""
    assert config.multiagent is not None
    trained = config.multiagent.policies_to_train or list(policies)
    results = result_names(config.self_play)
    return [replace(session_spec(policies[name], config.steps, name), results=results) for name in trained]
