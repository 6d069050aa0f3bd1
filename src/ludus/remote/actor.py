"""RemoteActor: the port that games connect to, and the processes that run the actors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers
from ludus.errors import UsageError
from ludus.gateway.server import GatewaySettings
from ludus.remote.context import adopt, current

READY_S = 60.0


class RemoteActor:
    """Serves games: one `Actor` object per session, in one of `num_workers` processes that share the port.

        class Bot(ludus.Actor):
            def __init__(self, model: str) -> None:
                self.model = ludus.RemoteModel(name=model)

            async def tick(self, body: bytes) -> bytes:
                …

        remote_actor = ludus.RemoteActor(port=8000, num_workers=2)
        remote_actor.serve(Bot, model="atari")
        ludus.run_until_asked_to_stop()

    For an address other than loopback (`host="0.0.0.0"`) a `token` is required, which games send as `Authorization: Bearer <token>`.
    A call of an actor that takes longer than `tick_timeout` seconds, and a game that is silent for `session_timeout` seconds, end
    their session. `settings` has all other limits.
    """

    def __init__(
        self,
        port: int = 8000,
        num_workers: int = 1,
        host: str = "127.0.0.1",
        token: str | None = None,
        *,
        tick_timeout: float | None = None,
        session_timeout: float | None = None,
        settings: GatewaySettings | None = None,
    ) -> None:
        if not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(f"num_workers={num_workers!r}: at least one process answers games.")
        settings = settings or GatewaySettings()
        limits = settings.sessions
        limits = limits if tick_timeout is None else replace(limits, tick_s=float(tick_timeout))
        limits = limits if session_timeout is None else replace(limits, silent_s=float(session_timeout))
        self._settings = replace(settings, sessions=limits, token=settings.token if token is None else token)
        self._host, self._port, self._workers = host, port, num_workers
        self._run = current("RemoteActor")
        self._gateway_workers: GatewayWorkers | None = None

    def serve(self, Actor: Any, *args: Any, **kwargs: Any) -> None:
        """Serve games with `Actor(*args, **kwargs)`, one object per session. Returns when the port is served.

        Raises UsageError when the port is in use; WorkerFailed when the processes do not start.
        """
        if not callable(Actor) or not callable(getattr(Actor, "tick", None)):
            raise UsageError(f"Actor={Actor!r} is not an actor class.", "Give a class with tick(body), such as a ludus.Actor.")
        if self._gateway_workers is not None:
            raise UsageError("This RemoteActor serves already.", "Make another one, with another port.")
        run = self._run
        self._gateway_workers = GatewayWorkers(
            run.supervisor,
            GatewayProgram(
                functools.partial(Actor, *args, **kwargs),
                self._settings,
                prepare=functools.partial(adopt, run.ticket(threads=1)),
            ),
            host=self._host,
            port=self._port,
            workers=self._workers,
        )
        run.on_close(self.close)
        self._gateway_workers.wait_ready(READY_S)
        host, port = self.address
        details = {"actor": getattr(Actor, "__qualname__", repr(Actor)), "host": host, "port": port}
        run.client.call({"op": "component", "kind": "actor", "name": f"actor-{port}", "details": details})

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) that games connect to; the actual port if it was given as 0."""
        if self._gateway_workers is None:
            raise UsageError("This RemoteActor does not serve yet.", "Call serve() first.")
        return self._gateway_workers.address

    def close(self) -> None:
        """End every session, with a call of its actor, and free the port."""
        if self._gateway_workers is not None:
            self._gateway_workers.close()
