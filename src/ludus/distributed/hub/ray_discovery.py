"""Discovery of a run's hub in a Ray cluster: the hub publishes its address through a named actor.

The actor belongs to the Ray job of the hub's process and runs on its node, so it ends with the hub. Since a name can be taken only
once, it also decides which process becomes the hub when several start at the same time; file locks are unreliable between machines.

Ray terminates processes that use it when its head node is lost. Therefore a child process (`RayDiscoveryProcess`) talks to Ray; it
is connected by a private pipe and ends with this process. The actor's process and that child import this file: keep imports light.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.addresses import interface_addresses
from ludus.io.json_lines import LineReader
from ludus.process.user import user_name
from ludus.ray_cluster.cluster import LOCAL, Cluster, address_of

log = logging.getLogger(__name__)

NAMESPACE = "ludus"
NET_CARD = "NET_CARD_NAME"
"""Environment variable with the network interface on which other machines reach this one."""
REPLY_TIMEOUT_S = 10.0
JOIN_S = 60.0
"""Time limit for joining the Ray cluster."""
_END_S = 20.0
_POLL_S = 0.1


@dataclass(frozen=True)
class HubAddress:
    """Address and token of a hub."""

    address: str
    token: str = field(repr=False)


class HubAddressActor:
    """Ray actor that stores the address and token of the hub."""

    def __init__(self) -> None:
        self._entry: tuple[str, str] | None = None

    def publish(self, address: str, token: str) -> None:
        self._entry = address, token

    def read(self) -> tuple[str, str] | None:
        return self._entry


class RayDiscoveryProcess:
    """Child process that is connected to the Ray cluster. `close` ends it, and with it the hub's actor."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self._address = directory, address
        script = f"import sys; sys.path[:] = {sys.path!r}; from ludus.distributed.hub.ray_discovery import main; main()"
        self._closing = False
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a script of ours
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it; `close` ends it
        )
        assert self._process.stdout is not None
        self._reader = LineReader(self._process.stdout.fileno())

    def find_or_claim(self, within_s: float) -> HubAddress | str:
        """Find the hub; returns the address of this node if there is none and this process is to become it.

        Raises UsageError when the cluster cannot be joined, WorkerFailed after a time-out.
        """
        reply = self._request(
            {"directory": str(self._directory), "address": self._address, "within_s": within_s}, within_s + JOIN_S
        )
        return HubAddress(*reply["hub"]) if "hub" in reply else str(reply["host"])

    def publish(self, hub: HubAddress) -> None:
        """Publish the address of the hub."""
        self._request({"publish": [hub.address, hub.token]}, 6 * REPLY_TIMEOUT_S)
        threading.Thread(target=self._log_unexpected_end, name="ludus-discovery", daemon=True).start()

    def _request(self, request: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        from ludus.distributed.hub.rpc import error_from

        assert self._process.stdin is not None
        line = None
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            self._process.stdin.write(json_lines.encode(request))
            self._process.stdin.flush()
            line = self._reader.read_line(within_s)
        if line is None:
            raise WorkerFailed(f"The Ray cluster at {self._address} does not respond.", "Check that its head is running.")
        reply = json_lines.decode(line)
        if "error" in reply:
            raise error_from(reply)
        return reply

    def _log_unexpected_end(self) -> None:
        self._process.wait()
        if not self._closing:
            log.error(
                "the Ray cluster at %s is gone; the run %s goes on, but processes on other nodes cannot find it until it is restarted",
                self._address,
                self._directory,
            )

    def release_after_fork(self) -> None:
        """In a fork of this process, which must not keep the child alive."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        self._closing = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._process.stdout.close()


def main() -> None:
    """Program of the child process: one request and one reply per line, until end of file."""
    from ludus.distributed.hub.rpc import error_fields
    from ludus.errors import LudusError

    out = os.dup(1)
    os.dup2(2, 1)  # output of Ray must not mix with replies
    discovery: ActorDiscovery | None = None
    for line in sys.stdin:
        request = json_lines.decode(line)
        reply: dict[str, Any] = {}
        try:
            if "publish" in request and discovery is not None:
                discovery.publish(HubAddress(*request["publish"]))
            else:
                discovery = discovery or ActorDiscovery(Path(request["directory"]), request["address"])
                hub = discovery.find_or_claim(time.monotonic() + request["within_s"])
                reply = {"host": discovery.host()} if hub is None else {"hub": [hub.address, hub.token]}
        except LudusError as error:
            reply = error_fields(error)
        json_lines.write(out, reply)
    if discovery is not None:
        discovery.close()


class ActorDiscovery:
    """Access to the actor of a run. `close` also ends the actor if this process created it."""

    def __init__(self, directory: Path, address: str) -> None:
        """Join the cluster unless this process is in one already. Raises UsageError, WorkerFailed, MissingExtra."""
        self.name = run_name(directory)
        self._actor: Any = None
        connected = "ray" in sys.modules and importlib.import_module("ray").is_initialized()
        self._cluster = None if connected else Cluster(address, announce=log.info)
        self._ray: Any = importlib.import_module("ray")

    def find_or_claim(self, deadline: float) -> HubAddress | None:
        """Address of the hub; None if there is none and this process is to become it. Raises WorkerFailed."""
        ray = self._ray
        while time.monotonic() < deadline:
            try:
                notice = ray.get_actor(self.name, namespace=NAMESPACE)
            except ValueError:
                if self._try_claim():
                    return None
                continue  # another process was faster
            try:
                read = ray.get(notice.read.remote(), timeout=REPLY_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                log.debug("cannot read the address of the hub: %s", error)  # its process is starting, or has just died
                read = None
            if read is not None:
                return HubAddress(*read)
            time.sleep(_POLL_S)
        raise WorkerFailed(f"The hub of {self.name} did not publish its address in time.", "Try again.")

    def _try_claim(self) -> bool:
        ray = self._ray
        near = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = near(ray.get_runtime_context().get_node_id(), soft=False)
        try:
            self._actor = (
                ray.remote(HubAddressActor)
                .options(name=self.name, namespace=NAMESPACE, num_cpus=0, max_restarts=0, scheduling_strategy=here)
                .remote()
            )
        except ValueError:  # the name is taken
            return False
        return True

    def publish(self, hub: HubAddress) -> None:
        """Publish the address of the hub."""
        self._ray.get(self._actor.publish.remote(hub.address, hub.token), timeout=6 * REPLY_TIMEOUT_S)

    def host(self) -> str:
        """Address at which the other nodes reach this one."""
        card = card_address()
        if card:
            return card
        here = self._ray.get_runtime_context().get_node_id()
        return next(str(node["NodeManagerAddress"]) for node in self._ray.nodes() if node["NodeID"] == here)

    def close(self) -> None:
        ray = self._ray
        if self._actor is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):  # the cluster is gone, and the actor with it
                ray.kill(self._actor)
        self._actor = None
        if self._cluster is not None:
            self._cluster.close()


def run_name(directory: Path) -> str:
    """Name of a run in the whole cluster, from its user and directory. The path itself is hashed."""
    private = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return f"{user_name()}/{directory.parent.name}/{directory.name}/{private}"


def rendezvous_address(given: str | None) -> str | None:
    """Address for joining a run: `given`, or that of the environment; None for a Ray cluster of one machine."""
    if given is not None and given.startswith("tcp://"):
        return given
    address = address_of(given, os.environ)
    return None if address == LOCAL else address


def card_address() -> str:
    """IPv4 address of the interface named by NET_CARD_NAME; empty if it is not set. Raises UsageError."""
    card = os.environ.get(NET_CARD, "")
    if not card:
        return ""
    addresses = interface_addresses()
    if not addresses.get(card):
        raise UsageError(f"{NET_CARD}={card!r} is not an interface with an address here.", f"Known: {', '.join(addresses)}.")
    return addresses[card]
