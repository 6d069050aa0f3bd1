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
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.errors import MissingExtra, UsageError, WorkerFailed

log = logging.getLogger(__name__)

NAMESPACE = "ludus"
NET_CARD = "NET_CARD_NAME"
"""The environment variable that names the network interface on which other machines reach this one."""
ASK_S = 10.0
REACH_S = 5.0
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
        self.name = run_name(directory)
        self._ray = _imported()
        self._ours = not self._ray.is_initialized()
        self._actor: Any = None
        if self._ours:
            _check_reachable(address)
            with _signals_kept():
                self._join(address)

    def _join(self, address: str) -> None:
        log.info("joining the Ray cluster at %s", address)
        try:
            self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises many kinds, from ConnectionError to its own
            raise WorkerFailed(
                f"The Ray cluster at {address} cannot be joined: {_first_line(error)}",
                "Does Ray run on this machine (ray start --address=…), with the same token and version?",
            ) from error

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
        if self._ours and ray.is_initialized():
            with _signals_kept():
                ray.shutdown()


def run_name(directory: Path) -> str:
    """One name for a run in the whole cluster: its user and its directory. No path is shown to others."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without an entry, as in many containers
        user = str(os.getuid())
    private = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    return f"{user}/{directory.parent.name}/{directory.name}/{private}"


def address_of(given: str | None) -> str | None:
    """The Ray cluster that was named: by the call, or by the environment."""
    return given or os.environ.get("RAY_ADDRESS") or os.environ.get("ip_head") or None  # noqa: SIM112 - Slurm scripts call it so


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


def _imported() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            "Runs on several machines meet in a Ray cluster.", "Install it: pip install 'ludus[cluster]'."
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself tries for half a minute, and then says little."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:  # "auto", and what only Ray understands
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise WorkerFailed(f"There is no Ray cluster at {address}: {error}.", "Start it: ray start --head.") from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a program that closes its run in order wants it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
