"""Training of several agents with a fleet: workers started elsewhere play the matches; one policy plays all agents."""

from __future__ import annotations

from dataclasses import asdict, replace

from ludus.algorithms.run_clock import RunClock
from ludus.buffers.model_batches import TrimmedBatches
from ludus.buffers.segment_validation import SegmentValidator
from ludus.distributed.match_results import MatchResults
from ludus.distributed.publishing_pool import PublishingPool
from ludus.distributed.redis.learner import BatchSettings
from ludus.distributed.redis.messages import MatchSpec
from ludus.experiments.assembly.components import ComponentStack, PreparedRun, RunHooks, TrainingComponents
from ludus.experiments.assembly.fleet_training import max_block_age, open_fleet, worker_spec
from ludus.experiments.assembly.match_learning import open_match_learning, probe_agents
from ludus.experiments.assembly.match_worker_training import blocks_of_batch, make_match_plan
from ludus.experiments.assembly.worker_training import newest_weights
from ludus.experiments.control.stopping import StopCheck
from ludus.sampling.match_opponents import result_names
from ludus.transport.shared_memory import BlockLayout


def assemble_match_fleet(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of the learner of a fleet whose workers play matches."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    assert config.multiagent is not None
    (model,) = config.multiagent.names()
    stop = StopCheck(hooks.interrupted, RunClock(e.stop.time_s))

    assignment = probe_agents(e.env, config, stop)
    match_learning = open_match_learning(assignment, prepared, hooks, stack, stop)
    learning, policies = match_learning.learning, match_learning.policies
    pool = learning.pool

    plan = make_match_plan(config, assignment, policies)
    layout = BlockLayout(plan.specs[0], plan.rows)
    matches = MatchSpec(plan.policy_mapping, asdict(plan.settings), plan.rows, layout.spec.results, plan.separate_rows)
    spec = worker_spec(prepared, policies[model], learning.run, blocks_of_batch(config))
    validator = SegmentValidator(*assignment.spaces[model], layout.spec)
    blocks = BatchSettings(layout, blocks_of_batch(config), max_block_age(config), validator.find_error)
    results = MatchResults([model], config.metrics_num_episodes_for_smoothing)
    fleet = stack.own(
        open_fleet(
            prepared, hooks, learning, replace(spec, matches=matches.encode()), blocks,
            lambda: newest_weights(pool, model), lambda version: 0, results.metrics,
        )
    )  # fmt: skip
    return match_learning.add_trainer(
        fleet,
        TrimmedBatches(fleet.batches, result_names(config.self_play), results.add),
        PublishingPool(pool, lambda name, version: fleet.publish(*newest_weights(pool, model))),
        results.zero_sum,
    )
