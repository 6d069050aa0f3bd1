"""A whole service on this machine: workers on one port, and somebody who looks after what they serve."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ludus.distributed.gateway_workers import GatewayFleet
from ludus.gateway.server import GatewaySettings, read_tokens, tls_context
from ludus.process.temp_dirs import TempDir
from ludus.process.workers.supervisor import Supervisor
from ludus.serving.access_log import AccessLog
from ludus.serving.checkpoint_follower import Follower, Offering, Source
from ludus.serving.worker import Service, ServiceSettings
from ludus.transport.replay_log import check_writable

log = logging.getLogger(__name__)

_READY_S = 120.0
_LOOK_S = 0.2
_AGAIN_S = 10.0


class RunningService:
    """Serves when it is entered; leaving it drains and stops.

    with RunningService({"default": Source("runs/duel")}, port=8000) as service:
        service.follow()        # in a thread of its own, or call look_after() yourself
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        offering: Offering | None = None,
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
        self._following: threading.Thread | None = None
        self._scratch = TempDir(Path(tempfile.gettempdir()))
        self._supervisor = Supervisor()
        try:
            self.follower = Follower(sources, self._scratch.path, offering or Offering())
            self.follower.open()
            told = replace(gateway, spec=spec_of(sources))
            service = Service(self._scratch.path, settings or ServiceSettings())
            self.fleet = GatewayFleet(
                self._supervisor,
                service,
                host=host,
                port=port,
                workers=workers,
                settings=told,
                prepare=service.load,
                house=service,
            )
        except BaseException:
            self._supervisor.close()
            self._scratch.close()
            raise

    @property
    def url(self) -> str:
        host, port = self.fleet.address
        return f"{'http' if self._plain else 'https'}://{host}:{port}"

    def __enter__(self) -> RunningService:
        try:
            self.fleet.wait_ready(_READY_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()  # who follows may be in the middle of something: it is not waited for
        try:
            self.fleet.close()
        except KeyboardInterrupt:  # a second Ctrl-C: at once
            for worker in self.fleet.workers:
                worker.kill()
            raise
        finally:
            self._supervisor.close()
            if self._following is not None:
                self._following.join(_READY_S)
            self._scratch.close()

    def follow(self) -> None:
        """Look after it in the background until it is left."""
        self._following = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._following.start()

    def _follow(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                self.look_after()
            except Exception:  # whatever it is, the games go on, and the next look may be better
                log.exception("looking after the service failed")
                self._closing.wait(_AGAIN_S)

    def look_after(self) -> None:
        """Call it a few times a second: new versions, trials, numbers."""
        self.follower.poll(sum(worker.incarnation - 1 for worker in self.fleet.workers))


def _check(gateway: GatewaySettings, settings: ServiceSettings) -> None:
    """What every worker would stumble over is told here, once. Raises UsageError."""
    read_tokens(gateway)
    if gateway.tls is not None:
        tls_context(gateway.tls)
    if settings.access_log is not None:
        AccessLog(settings.access_log).close()
    if settings.recording is not None:
        check_writable(settings.recording.directory)


def spec_of(sources: Mapping[str, Source]) -> dict[str, Any]:
    """What `GET /spec` says: of the first agent, and of each by its name where there are several."""
    specs = {name: source.spec() for name, source in sources.items()}
    first = next(iter(specs.values()))
    return first if len(specs) == 1 else {**first, "models": specs}
