"""How a process finds the hub of a run in a Ray cluster: the hub leaves its address with an actor of the run's name.

The actor belongs to the Ray job of the hub's process and lives on its node, so it is gone when the hub is, however that ends. That
a name can be taken only once is what decides who becomes the hub when several come at the same moment: file locks are not to be
relied on between machines.

The actor's process imports this file, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib
import logging
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.runtime.cluster import LOCAL, Cluster, address_of

log = logging.getLogger(__name__)

NAMESPACE = "ludus"
NET_CARD = "NET_CARD_NAME"
"""The environment variable that names the network interface on which other machines reach this one."""
ASK_S = 10.0
_LOOK_S = 0.1
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Spot:
    """Where a hub listens, and what it asks for."""

    address: str
    token: str = field(repr=False)


class Notice:
    """The actor: one note, left by the hub."""

    def __init__(self) -> None:
        self._note: tuple[str, str] | None = None

    def leave(self, address: str, token: str) -> None:
        self._note = address, token

    def note(self) -> tuple[str, str] | None:
        return self._note


class Meeting:
    """This process's way to the actor of a run. `close` ends what it began: also the hub's notice, when it is ours."""

    def __init__(self, directory: Path, address: str) -> None:
        """Joins the cluster, unless this process is in one already. Raises UsageError, WorkerFailed, MissingExtra."""
        self.name = run_name(directory)
        self._actor: Any = None
        connected = "ray" in sys.modules and importlib.import_module("ray").is_initialized()
        self._cluster = None if connected else Cluster(address, announce=log.info)
        self._ray: Any = importlib.import_module("ray")

    def find_or_claim(self, deadline: float) -> Spot | None:
        """Where the hub is; None when there is none, and this process is the one to become it. Raises WorkerFailed."""
        ray = self._ray
        while time.monotonic() < deadline:
            try:
                notice = ray.get_actor(self.name, namespace=NAMESPACE)
            except ValueError:
                if self._claimed():
                    return None
                continue  # somebody was faster
            try:
                note = ray.get(notice.note.remote(), timeout=ASK_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                log.debug("the notice of the hub cannot be read: %s", error)  # its process is starting, or just died
                note = None
            if note is not None:
                return Spot(*note)
            time.sleep(_LOOK_S)
        raise WorkerFailed(f"The hub of {self.name} is being started, or left, and nothing came of it.", "Try again.")

    def _claimed(self) -> bool:
        ray = self._ray
        near = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = near(ray.get_runtime_context().get_node_id(), soft=False)
        try:
            self._actor = (
                ray.remote(Notice)
                .options(name=self.name, namespace=NAMESPACE, num_cpus=0, max_restarts=0, scheduling_strategy=here)
                .remote()
            )
        except ValueError:  # the name is taken
            return False
        return True

    def leave(self, spot: Spot) -> None:
        """Tell where the hub is: from now on others find it."""
        self._ray.get(self._actor.leave.remote(spot.address, spot.token), timeout=6 * ASK_S)

    def host(self) -> str:
        """The address at which the other nodes reach this one."""
        card = card_address()
        if card:
            return card
        here = self._ray.get_runtime_context().get_node_id()
        return next(str(node["NodeManagerAddress"]) for node in self._ray.nodes() if node["NodeID"] == here)

    def close(self) -> None:
        ray = self._ray
        if self._actor is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # the cluster may be gone, and the actor with it
                ray.kill(self._actor)
        self._actor = None
        if self._cluster is not None:
            self._cluster.close()


def run_name(directory: Path) -> str:
    """One name for a run in the whole cluster: its user and its directory. No path is shown to others."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in many containers
        user = str(os.getuid())
    private = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return f"{user}/{directory.parent.name}/{directory.name}/{private}"


def meeting_place(given: str | None) -> str | None:
    """Where a run meets: as the call says, else as the environment does. A Ray of one machine is no place to meet."""
    if given is not None and given.startswith("tcp://"):
        return given
    address = address_of(given, os.environ)
    return None if address == LOCAL else address


def card_address() -> str:
    """The IPv4 address of the interface that NET_CARD_NAME names; empty without it. Raises UsageError."""
    card = os.environ.get(NET_CARD, "")
    if not card:
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(card)[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(f"{NET_CARD}={card!r} is not an interface with an address here.", f"There are: {names}.") from error
    return socket.inet_ntoa(answer[20:24])
