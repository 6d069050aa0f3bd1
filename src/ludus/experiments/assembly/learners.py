"""The learning side of a run: its algorithms, distributed over learners on this machine and other nodes of a job, and its models."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ludus.algorithms.base import Algorithm
from ludus.config.schema import AlgorithmConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.errors import UsageError
from ludus.experiments.assembly.components import ComponentStack, LearningRun, PreparedRun
from ludus.experiments.assembly.policies import threads_of
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_dir import Run
from ludus.models.devices import copy_for_learning, learner_device
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.process.job_env import LEARNERS, JobEnv

log = logging.getLogger(__name__)


def make_algorithm(
    kind: type[Algorithm], policy: Policy, config: AlgorithmConfig, before: Checkpoint | None, model: str = DEFAULT_MODEL
) -> Algorithm:
    """Make the algorithm that learns `policy`, on the learner's device; restored from `before`. Sets the threads of PyTorch."""
    threads = threads_of(policy, config)
    torch.set_num_threads(threads["torch_threads"])
    learning = copy_for_learning(policy, learner_device(config.learner_device, config.num_gpus))
    algorithm = kind(learning, config.model_copy(update=threads), config.seed)
    if before is not None:
        before.restore(model, algorithm)
    return algorithm


def open_learning_run(
    prepared: PreparedRun,
    policies: Mapping[str, Policy],
    stack: ComponentStack,
    configs: Mapping[str, AlgorithmConfig] | None = None,
) -> LearningRun:
    """Make the algorithms of the policies, open the run, and claim its models: from here on only this process writes it.

    `configs`: model → configuration, where policies differ in it.
    """
    resolved, before = prepared.resolved, prepared.before
    configs = configs or dict.fromkeys(policies, resolved.config)
    algorithms = {
        name: stack.own(make_algorithm(resolved.algorithm, policy, configs[name], before, name))
        for name, policy in policies.items()
    }
    run = stack.own(prepared.open_run())
    run.start_log()
    run.write_meta(threads_of(next(iter(policies.values())), resolved.config))
    for name, policy in policies.items():
        algorithms[name] = _distribute(algorithms[name], policy, configs[name], run, stack, name)
    began = checkpoint.resume_origin(run.store, prepared.resumed_checkpoint)
    check_newest = functools.partial(checkpoint.check_newest, run.store, began)
    pool = stack.own(LocalVersionStore(run.store, {checkpoint.BEGUN_FROM: began}, check_newest))
    run.guard = pool.check
    for name, policy in policies.items():
        pool.add(name, policy, above=before.state["models"][name]["version"] if before else 0)
    return LearningRun(run, algorithms, pool)


def _distribute(
    algorithm: Algorithm, policy: Policy, config: AlgorithmConfig, run: Run, stack: ComponentStack, model: str
) -> Algorithm:
    """The algorithm on as many learners as the config sets. `policy`: the one that acts, possibly on another device."""
    job = JobEnv.from_environ(os.environ)
    shared = algorithm
    if job is not None and job.learners:
        shared = stack.own(_distribute_to_nodes(algorithm, policy, config, run, job, model))
    elif config.learners > 1:
        from ludus.distributed.learners.group import share_learning

        logs = run.directory / "logs" / "learner"
        options = config.model_copy(update=threads_of(policy, config))
        shared = stack.own(share_learning(algorithm, options, config.learners, logs if model == DEFAULT_MODEL else logs / model))
    if shared.policy is policy:
        return shared
    from ludus.algorithms.device_copy import AcceleratedAlgorithm

    return AcceleratedAlgorithm(shared, policy)


def _distribute_to_nodes(
    algorithm: Algorithm, policy: Policy, config: AlgorithmConfig, run: Run, job: JobEnv, model: str
) -> Algorithm:
    """The learners of the config run here; those of other nodes are as many more, and connect to this process."""
    from ludus.distributed.learners.group import share_learning
    from ludus.distributed.learners.listener import JobLearnerListener

    if model != DEFAULT_MODEL:
        error = UsageError(
            f"Learners of other machines ({job.learners}) need a run with one model; this run also learns {model}.",
            "List one machine for learners.",
        )
        error.final = True
        raise error
    hint = f"Check their machines and logs; `ludus train --resume {display_path(run.directory)}` continues the run."
    with contextlib.closing(JobLearnerListener(job, hint)) as listener:
        log.info("waiting for %d learners of other machines at %s", job.learners, listener.address)
        options: Any = {"remote": job.learners, "listener": listener, "start_s": job.wait_s}
        made_with = config.model_copy(update=threads_of(policy, config))
        return share_learning(algorithm, made_with, config.learners + job.learners, run.directory / "logs" / "learner", **options)


def has_remote_learners() -> bool:
    """Whether this process is the main role of a job with learners on other nodes, which connect to its training."""
    job = JobEnv.from_environ(os.environ)
    return job is not None and job.learners > 0


@contextlib.contextmanager
def without_remote_learners() -> Iterator[None]:
    """Hide the learners of other nodes from this process, and from those it starts meanwhile."""
    hidden = os.environ.pop(LEARNERS, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[LEARNERS] = hidden
