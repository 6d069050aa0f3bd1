"""Launches a service on this machine: gateway workers on one port, and the checkpoint follower."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers
from ludus.errors import LudusError
from ludus.gateway.server import GatewaySettings, read_tokens, tls_context
from ludus.io.addresses import url_host
from ludus.process.temp_dirs import TempDir
from ludus.process.workers.supervisor import Supervisor
from ludus.serving.access_log import AccessLog
from ludus.serving.checkpoint_follower import CheckpointFollower, CheckpointSource, UpdateSettings
from ludus.serving.worker import ServiceSettings, ServingWorker
from ludus.transport.replay_log import check_writable

log = logging.getLogger(__name__)

_READY_S = 120.0
_POLL_S = 0.2
_RETRY_S = 10.0


class RunningService:
    """Context manager: serves inside the block; on exit drains and stops.

    with RunningService({"default": CheckpointSource("runs/duel")}, port=8000) as service:
        service.follow()        # in a background thread, or call poll() yourself
    """

    def __init__(
        self,
        sources: Mapping[str, CheckpointSource],
        updates: UpdateSettings | None = None,
        settings: ServiceSettings | None = None,
        gateway: GatewaySettings | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: int = 1,
    ) -> None:
        gateway = gateway or GatewaySettings()
        _check(gateway, settings or ServiceSettings())
        self._plain = gateway.tls is None
        self._closing = threading.Event()
        self._follow_thread: threading.Thread | None = None
        with ExitStack() as stack:
            scratch = stack.enter_context(closing(TempDir(Path(tempfile.gettempdir()))))
            stack.callback(self._join_follower)
            supervisor = stack.enter_context(closing(Supervisor()))
            self.follower = CheckpointFollower(sources, scratch.path, updates or UpdateSettings())
            self.follower.open()
            worker = ServingWorker(scratch.path, settings or ServiceSettings())
            program = GatewayProgram(worker, replace(gateway, spec=service_spec(sources)), prepare=worker.load, extension=worker)
            self.fleet = GatewayWorkers(supervisor, program, host=host, port=port, workers=workers)
            self._resources = stack.pop_all()

    @property
    def url(self) -> str:
        host, port = self.fleet.address
        return f"{'http' if self._plain else 'https'}://{url_host(host)}:{port}"

    def __enter__(self) -> RunningService:
        with ExitStack() as stack:
            stack.push(self)
            self.fleet.wait_ready(_READY_S)
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        with self._resources:
            try:
                self.fleet.close()
            except KeyboardInterrupt:  # a second Ctrl-C stops at once
                for worker in self.fleet.workers:
                    worker.kill()
                raise

    def _join_follower(self) -> None:
        """Wait for the follower, which may be busy; called after the workers have ended."""
        if self._follow_thread is not None:
            self._follow_thread.join(_READY_S)

    def follow(self) -> None:
        """Poll in a background thread until the service stops."""
        self._follow_thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._follow_thread.start()

    def _follow(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                self.poll()
            except (LudusError, OSError, LookupError, TypeError, ValueError):  # of a store or a file; the games continue
                log.exception("polling the checkpoint follower failed")
                self._closing.wait(_RETRY_S)

    def poll(self) -> None:
        """Check for new versions, judge canaries, write metrics. Call it a few times a second."""
        self.follower.poll(sum(worker.incarnation - 1 for worker in self.fleet.workers))


def _check(gateway: GatewaySettings, settings: ServiceSettings) -> None:
    """Check settings once, before every worker would fail on them. Raises UsageError."""
    read_tokens(gateway)
    if gateway.tls is not None:
        tls_context(gateway.tls)
    if settings.access_log is not None:
        AccessLog(settings.access_log).close()
    if settings.recording is not None:
        check_writable(settings.recording.directory)


def service_spec(sources: Mapping[str, CheckpointSource]) -> dict[str, Any]:
    """Content of `GET /spec`: of the first agent, and with several agents of each by name."""
    specs = {name: source.spec() for name, source in sources.items()}
    first = next(iter(specs.values()))
    return first if len(specs) == 1 else {**first, "models": specs}
