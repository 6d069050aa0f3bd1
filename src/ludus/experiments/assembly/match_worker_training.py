"""Training of several agents in one environment with sampling workers, on this machine or on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ludus.algorithms.run_clock import RunClock
from ludus.buffers.collate import packed_rows
from ludus.buffers.model_batches import ModelBatches
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.match_blocks import MatchSamplingPlan
from ludus.distributed.match_results import WORKER_RESULTS, MatchResults
from ludus.distributed.publishing_pool import PublishingPool
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import BlockAccounting, SamplingPool
from ludus.distributed.sampling_worker import PolicyBoard
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    whole_agent_episodes,
)
from ludus.experiments.assembly.match_evaluation import AgentAssignment
from ludus.experiments.assembly.match_learning import open_match_learning, probe_agents
from ludus.experiments.assembly.multi_agent_training import sampling_settings, trained_specs
from ludus.experiments.assembly.worker_training import BATCHES_AHEAD, cluster_nodes, code_bundle_of, worker_restart
from ludus.experiments.control.stopping import StopCheck
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.sampling.match_opponents import result_names
from ludus.sampling.multi_agent.batches import recorded_bound


def assemble_match_workers(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run whose matches are played by workers, with one algorithm for every policy."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    stop = StopCheck(hooks.interrupted, RunClock(e.stop.time_s))

    connect = cluster_nodes(resolved.cluster, hooks.announce, stack)  # first: the cluster may be unreachable
    assignment = probe_agents(e.env, config, stop)
    match_learning = open_match_learning(assignment, prepared, hooks, stack, stop)
    learning, policies = match_learning.learning, match_learning.policies
    run, pool, models = learning.run, learning.pool, list(policies)

    plan = make_plan(e.env, config, assignment, policies, prepared.environment_seed)
    plan = replace(plan, first_version=newest_of_all(pool, models)[0], run=str(run.directory.absolute()))
    results = MatchResults(models, config.metrics_num_episodes_for_smoothing)
    logs = run.directory / "logs" / "sampler"
    if hooks.announce is not None:
        hooks.announce(f"starting {config.workers} workers …" if config.workers > 1 else "starting 1 worker …")
    sampling = stack.own(
        SamplingPool(
            lambda wakeup: connect(plan, wakeup, logs), config.workers, lambda: newest_of_all(pool, models),
            accounting=BlockAccounting(_count_steps, results.metrics),
        )
    )  # fmt: skip
    batches = sampling.batches = ModelBatches(
        sampling,
        plan.layouts.models,
        config.workers,
        blocks_of_batch(config),
        in_turn=config.sampling != "async",
        newest=lambda model: pool.newest(model)[1],
        max_lag=config.max_lag,
        on_block=results.add,
        results=result_names(config.self_play),
    )

    publisher = PublishingPool(pool, lambda name, version: sampling.publish(*newest_of_all(pool, models)))
    return match_learning.add_trainer(sampling, whole_agent_episodes(batches, config), publisher, results.zero_sum)


def _count_steps(block: Segments) -> int:
    return block.steps if block.env_steps is None else block.env_steps


def _block_steps(config: AlgorithmConfig) -> int:
    """Steps that a worker samples for one block."""
    if config.sampling == "async" or config.replays:
        return config.num_envs_per_worker * config.steps
    return -(-config.train_batch_size // config.workers)


def blocks_of_batch(config: AlgorithmConfig) -> int:
    if config.sampling != "async":
        return config.workers
    return 1 if config.replays else max(1, -(-config.train_batch_size // _block_steps(config)))


def make_match_plan(config: AlgorithmConfig, assignment: AgentAssignment, policies: Mapping[str, Policy]) -> MatchSamplingPlan:
    specs = tuple(replace(spec, results=(*spec.results, *WORKER_RESULTS)) for spec in trained_specs(policies, config))
    settings = replace(sampling_settings(config, _block_steps(config)), joint=True)
    agents, copies = len(assignment.agents), config.num_envs_per_worker
    decisions = recorded_bound(settings, agents, len(specs), copies)
    return MatchSamplingPlan(
        policy_mapping=dict(assignment.agents),
        descriptions={name: policy.description() for name, policy in policies.items()},
        specs=specs,
        rows=decisions if config.replays else packed_rows(specs[0].steps, decisions, agents * copies),
        settings=settings,
        separate_rows=config.replays,
    )


def make_plan(
    env: str, config: AlgorithmConfig, assignment: AgentAssignment, policies: Mapping[str, Policy], seed: int
) -> SamplingPlan:
    """What a worker has to know, without the first version and the run directory."""
    matches = make_match_plan(config, assignment, policies)
    return SamplingPlan(
        env=env,
        env_config=config.env_config,
        preprocess=config.preprocess,
        wrappers=config.wrappers,
        display=config.display,
        min_nodes=config.min_nodes,
        num_envs=config.num_envs_per_worker,
        description={},
        spec=matches.specs[0],
        seed=seed,
        first_version=0,
        ahead=BATCHES_AHEAD[config.sampling],
        slots=config.blocks_ahead,
        hang_s=config.worker_hang_s,
        restart=worker_restart(config),
        forgiving=config.restart_failed_sub_environments,
        explore=config.explore,
        device=config.inference_device,
        self_play=config.self_play,
        code_bundle=code_bundle_of(env, config),
        matches=matches,
    )


def newest_of_all(pool: LocalVersionStore, models: list[str]) -> tuple[int, Mapping[str, Array]]:
    """The weights of all models as a PolicyBoard loads them, not copied; the version is the sum of all versions."""
    newest = [pool.newest(model) for model in models]
    board = PolicyBoard(policy for policy, _ in newest)
    for number, (_, version) in enumerate(newest):
        board.versions[number] = version
    weights = {name: tensor.detach().cpu().numpy() for name, tensor in board.state_dict().items()}
    return sum(version for _, version in newest), weights
