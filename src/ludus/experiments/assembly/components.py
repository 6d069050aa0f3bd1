"""The components that every run has, whoever provides its experience."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch

from ludus.algorithms.base import Algorithm
from ludus.algorithms.device_copy import AcceleratedAlgorithm
from ludus.algorithms.trainer import Trainer
from ludus.buffers.complete_episodes import CompleteEpisodes
from ludus.config.schema import EXTERNAL, AlgorithmConfig, ExperimentConfig
from ludus.core.metrics import Sink
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.learners.group import share_learning
from ludus.distributed.learners.listener import FarEntrance
from ludus.errors import ConfigError, UsageError
from ludus.experiments.control.run_controller import Conductor, Evaluate, Experience, Schedule
from ludus.experiments.runs import checkpoint, tracking
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.remote_runs import shown
from ludus.experiments.runs.run_dir import Run
from ludus.models.autoregressive_actions import Branch
from ludus.models.categories import EMBED_ABOVE
from ludus.models.centralized_critic import OWN, STATE
from ludus.models.devices import copy_for_learning, learner_device
from ludus.models.networks import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.process.host import usable_cores
from ludus.process.job_env import LEARNERS, Surroundings
from ludus.transport.base import Batches
from ludus.transport.message_stream import EMBEDDED

log = logging.getLogger(__name__)

_MANY_PIXELS = 32 * 32

START_TIMEOUT_S = 300.0
"""Default of `start_timeout_s` where this run starts its workers itself."""


@dataclass(frozen=True)
class ClusterOptions:
    """The Ray cluster that a run was pointed at: HOST:PORT, `auto`, or `local` for one that is started for it."""

    address: str
    num_cpus: int | None = None
    object_store_memory: int | None = None
    asked_for: bool = True
    """By an option, not by a variable that may have been set for others."""


@dataclass(frozen=True)
class Resolved:
    """A whole experiment, checked: every key has its value."""

    experiment: ExperimentConfig
    algorithm: type[Algorithm]
    config: AlgorithmConfig
    cluster: ClusterOptions | None = None
    """Not part of the experiment: the same one runs here and there."""

    def saved(self) -> dict[str, Any]:
        """As it is written to `config.yaml`."""
        data = self.experiment.model_dump(mode="json")
        name = data.pop("name")
        return {name: data}


def make_policy(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: AlgorithmConfig,
    scales: tuple[tuple[str, float], ...] = (),
    *,
    central: bool = False,
    embed_above: int | None = EMBED_ABOVE,
) -> Policy:
    """A fresh policy for these spaces; the same seed gives the same weights. `scales`: as `experiment.byte_scales` chooses them."""
    section = config.model
    network = NetworkConfig(
        fcnet_hiddens=None if section.fcnet_hiddens is None else tuple(section.fcnet_hiddens),
        fcnet_activation=section.fcnet_activation,
        conv=section.conv,
        conv_filters=None if section.conv_filters is None else tuple(section.conv_filters),
        entity_dim=section.entity_dim,
        entity_present=tuple(section.entity_present.items()),
        autoregressive=tuple(Branch(b.part, tuple(b.after), b.points_at, b.mask) for b in section.autoregressive),
        vf_share_layers=section.vf_share_layers,
        core=section.core or ("lstm" if section.use_lstm else None),
        cell_size=section.cell_size,
        max_seq_len=section.max_seq_len,
        free_log_std=section.free_log_std,
        log_std_init=section.log_std_init,
        dueling=bool(getattr(config, "dueling", False)),
        head_hiddens=tuple(getattr(config, "hiddens", ())),
        central=central or section.centralized_value,
        central_shares=(central or section.centralized_value) and section.vf_share_layers is True,
        custom_model=section.custom_model,
        custom_model_config=section.custom_model_config,
        byte_scales=scales,
        embed_above=embed_above,
    )
    if not network.central and isinstance(observation_space, gym.spaces.Dict) and set(observation_space.spaces) == {OWN, STATE}:
        log.warning(
            "Observations are {%s, %s}, and the policy sees both. For the value alone: model.centralized_value.", OWN, STATE
        )
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(config.seed)
        policy = Policy(observation_space, action_space, network, config.observation_filter == "MeanStdFilter", config.learns)
    if policy.recurrent and config.batch_mode == "complete_episodes":
        raise ConfigError(
            "config.batch_mode is complete_episodes, and the model is recurrent.",
            "Use truncate_episodes: recurrent models learn from sequences of max_seq_len steps in either case.",
        )
    if section.custom_model is not None:
        if getattr(config, "hiddens", None):
            log.warning(
                "config.hiddens is %s and has no effect: custom_model %s has all of its layers itself.",
                config.hiddens,  # type: ignore[attr-defined] # DQN has it
                section.custom_model,
            )
        from ludus.models.custom.validation import check_custom  # the others start without it

        check_custom(policy)
    return policy


def embedding_bound(before: Checkpoint | None, model: str = DEFAULT_MODEL) -> int | None:
    """`embed_above` of a run: that of the checkpoint that it begins with, if there is one."""
    return EMBED_ABOVE if before is None else before.embed_above(model)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """An orthogonal start is rounded differently by every number of threads; the same seed is to be the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_of(policy: Policy, config: AlgorithmConfig) -> dict[str, int]:
    """Convolutions over real pictures fill all cores, divided among the learners; a small network is faster on one."""
    usual = max(1, usable_cores() // config.learners) if policy.network.pixels >= _MANY_PIXELS else 1
    return {"torch_threads": config.torch_threads or usual, "learner_threads": config.learner_threads or usual}


def make_algorithm(
    kind: type[Algorithm], policy: Policy, config: AlgorithmConfig, before: Checkpoint | None, model: str = DEFAULT_MODEL
) -> Algorithm:
    threads = threads_of(policy, config)
    torch.set_num_threads(threads["torch_threads"])
    learning = copy_for_learning(policy, learner_device(config.learner_device, config.num_gpus))
    algorithm = kind(learning, config.model_copy(update=threads), config.seed)
    if before is not None:
        before.restore(model, algorithm)
    return algorithm


def share(algorithm: Algorithm, policy: Policy, config: AlgorithmConfig, run: Run, model: str = DEFAULT_MODEL) -> Algorithm:
    """The algorithm on as many learners as the config says; `policy` is the one that acts, wherever it is learned."""
    logs = run.directory / "logs" / "learner"
    made_with = config.model_copy(update=threads_of(policy, config))
    job = Surroundings.of(os.environ)
    if job is not None and job.learners:
        shared = _shared_with_nodes(algorithm, made_with, run, job, model)
    else:
        shared = share_learning(algorithm, made_with, config.learners, logs if model == DEFAULT_MODEL else logs / model)
    return shared if algorithm.policy is policy else AcceleratedAlgorithm(shared, policy)


def _shared_with_nodes(algorithm: Algorithm, config: AlgorithmConfig, run: Run, job: Surroundings, model: str) -> Algorithm:
    """The learners that the config says are here; those of other nodes are as many more, and come to us."""
    if model != DEFAULT_MODEL:
        error = UsageError(
            f"The model {model} shall be learned by {job.learners} learners of other machines too, which is for runs with one model.",
            "List one machine for learners.",
        )
        error.final = True
        raise error
    hint = f"Are their machines up, and what do their logs say? `ludus train --resume {shown(run.directory)}` goes on."
    with contextlib.closing(FarEntrance(job, hint)) as entrance:
        log.info("waiting for %d learners of other machines at %s", job.learners, entrance.address)
        options: Any = {"away": job.learners, "entrance": entrance, "start_s": job.wait_s}
        return share_learning(algorithm, config, config.learners + job.learners, run.directory / "logs" / "learner", **options)


def has_far_learners() -> bool:
    """Whether learners of other machines come to the training of this process: it is the main role of a job that has some."""
    job = Surroundings.of(os.environ)
    return job is not None and job.learners > 0


@contextlib.contextmanager
def without_far_learners() -> Iterator[None]:
    """Nor do they come to what this process starts meanwhile."""
    hidden = os.environ.pop(LEARNERS, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[LEARNERS] = hidden


def opened(open_run: Callable[[], Run], policy: Policy, config: AlgorithmConfig) -> Run:
    run = open_run()
    run.start_log()
    run.write_meta(threads_of(policy, config))
    return run


def make_pool(run: Run, before: Checkpoint | None = None) -> LocalVersionStore:
    """`before`: the checkpoint that the run goes on from. From here on the run is written only while it is ours."""
    began = checkpoint.origin(run.store, before)
    pool = LocalVersionStore(run.store, {checkpoint.FROM: began}, functools.partial(checkpoint.check_newest, run.store, began))
    run.guard = pool.check
    return pool


def whole_episodes(blocks: Batches, config: AlgorithmConfig) -> Batches:
    """The blocks themselves, or whole episodes made of them, as the config says."""
    if config.batch_mode == "truncate_episodes":
        return blocks
    return CompleteEpisodes(blocks, config.train_batch_size)


def make_conductor(
    trainer: Trainer,
    source: Experience,
    pool: LocalVersionStore,
    run: Run,
    resolved: Resolved,
    evaluate: Evaluate | None,
    sinks: Sequence[Sink],
) -> Conductor:
    e, config = resolved.experiment, resolved.config
    schedule = Schedule(
        e.stop,
        e.checkpoint_freq,
        e.keep_checkpoints_num,
        0 if config.evaluation_interval == "checkpoint" else config.evaluation_interval,
        config.report_every_s,
        e.checkpoint_time_s,
        config.evaluation_interval_unit,
        config.least_iteration,
        start_timeout(resolved),
    )
    incarnation = pool.incarnation(pool.names()[0])
    if incarnation > 1:
        pool.confirm()  # not before it is ours: another trainer may have been writing until now
        run.sweep()
    run.taken_up()
    written = [*tracking.sinks_of(run, e, incarnation), *sinks]
    restarts = run.meta().get("learner_restarts")
    always = {} if restarts is None else {"learner/restarts": float(restarts)}
    return Conductor(trainer, source, pool, run.store, schedule, written, e, evaluate, always)


def start_timeout(resolved: Resolved) -> float | None:
    """Seconds within which the first step has to be sampled; None: no limit.

    Games and workers of a fleet come by themselves, possibly much later: without a setting of its own their limit is `time_s`.
    """
    config, e = resolved.config, resolved.experiment
    if config.start_timeout_s is not None:
        return config.start_timeout_s or None
    return e.stop.time_s if e.env == EXTERNAL or e.memory != EMBEDDED else START_TIMEOUT_S


def timesteps_of(before: Checkpoint | None) -> int:
    """That a run has behind it when it goes on from there."""
    return 0 if before is None else int(before.state["progress"]["timesteps"])


def count_on(before: Checkpoint | None, trainer: Trainer, source: Experience) -> None:
    """A resumed run goes on counting, and drawing, where it was."""
    if before is not None:
        trainer.load_progress(before.state["progress"])
        source.load_state(before.sampler)
