"""Assembly of a run: chooses the training mode and makes its components. A mode is imported only when it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch

from ludus.errors import LudusError
from ludus.experiments.assembly.components import ComponentStack, PreparedRun, RunHooks, TrainingComponents
from ludus.experiments.evaluation.gap_warning import gap_sinks
from ludus.experiments.resolve import ResolvedExperiment
from ludus.process.host import keep_freed_memory
from ludus.transport.message_stream import EMBEDDED

log = logging.getLogger(__name__)

Assemble = Callable[[PreparedRun, RunHooks, ComponentStack], TrainingComponents]


@contextlib.contextmanager
def assemble_run(prepared: PreparedRun, hooks: RunHooks | None = None) -> Iterator[TrainingComponents]:
    """Make the components of a run in this process, restored from its checkpoint; close all of them at the end."""
    hooks = hooks or RunHooks()
    resolved = prepared.resolved
    keep_freed_memory()
    threads = torch.get_num_threads()
    warnings = gap_sinks(resolved.experiment.env, resolved.config, hooks.announce)
    hooks = dataclasses.replace(hooks, sinks=[*hooks.sinks, *warnings])
    try:
        with ComponentStack() as stack:
            components = assemble_of(resolved)(prepared, hooks, stack)
            try:
                yield components
            except LudusError as error:
                log.error("%s", error)
                raise
    finally:
        torch.set_num_threads(threads)  # the process may belong to a caller


def assemble_of(resolved: ResolvedExperiment) -> Assemble:
    """The function that assembles runs of this training mode."""
    if resolved.is_external:
        from ludus.experiments.assembly.http_training import assemble_http

        return assemble_http
    if resolved.config.multiagent is not None:
        from ludus.experiments.assembly.multi_agent_training import assemble_multi_agent

        return assemble_multi_agent
    if resolved.experiment.memory != EMBEDDED:
        from ludus.experiments.assembly.fleet_training import assemble_fleet

        return assemble_fleet
    if resolved.config.workers:
        from ludus.experiments.assembly.worker_training import assemble_workers

        return assemble_workers
    from ludus.experiments.assembly.local_training import assemble_local

    return assemble_local
