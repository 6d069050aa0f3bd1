"""How a process finds the hub of a run in a Ray cluster: the hub leaves its address with an actor of the run's name.

The actor belongs to the Ray job of the hub's process and lives on its node, so it is gone when the hub is, however that ends. That
a name can be taken only once is what decides who becomes the hub when several come at the same moment: file locks are not to be
relied on between machines.

Ray ends the processes that use it when its head is lost, so ours does not: a `Keeper` is a process beside it that speaks to Ray, over
a private pipe to us, and is gone when we are. The actor's process and the keeper import this file, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import getpass
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
from ludus.ray_cluster.cluster import LOCAL, Cluster, address_of

log = logging.getLogger(__name__)

NAMESPACE = "ludus"
NET_CARD = "NET_CARD_NAME"
"""The environment variable that names the network interface on which other machines reach this one."""
ASK_S = 10.0
JOIN_S = 60.0
"""How long Ray may take to let a process in."""
_END_S = 20.0
_LOOK_S = 0.1


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


class Keeper:
    """The hub's or a visitor's process beside it that is in the Ray cluster. `close` ends it, and with it the hub's notice."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory, self._address = directory, address
        script = f"import sys; sys.path[:] = {sys.path!r}; from ludus.distributed.hub.ray_discovery import keep; keep()"
        self._closing = False
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a script of ours
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, and we tell it
        )
        assert self._process.stdout is not None
        self._reader = LineReader(self._process.stdout.fileno())

    def find_or_claim(self, within_s: float) -> Spot | str:
        """Where the hub is; or the address of this node, when there is none and this process is to become it.

        Raises UsageError when the cluster cannot be joined, WorkerFailed when nothing comes of it.
        """
        said = self._ask({"directory": str(self._directory), "address": self._address, "within_s": within_s}, within_s + JOIN_S)
        return Spot(*said["spot"]) if "spot" in said else str(said["host"])

    def leave(self, spot: Spot) -> None:
        """Tell where the hub is: from now on others find it."""
        self._ask({"leave": [spot.address, spot.token]}, 6 * ASK_S)
        threading.Thread(target=self._mourn, name="ludus-meeting", daemon=True).start()

    def _ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        from ludus.distributed.hub.rpc import error_from

        assert self._process.stdin is not None
        line = None
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            self._process.stdin.write(json_lines.encode(question))
            self._process.stdin.flush()
            line = self._reader.read_line(within_s)
        if line is None:
            raise WorkerFailed(f"The Ray cluster at {self._address} does not answer.", "Is its head running?")
        said = json_lines.decode(line)
        if "error" in said:
            raise error_from(said)
        return said

    def _mourn(self) -> None:
        self._process.wait()
        if not self._closing:
            log.error(
                "The Ray cluster at %s is gone. The run %s goes on; processes on further nodes cannot find it until it is started again.",
                self._address,
                self._directory,
            )

    def forget(self) -> None:
        """In a copy of this process made by fork(), which must not keep it alive."""
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


def keep() -> None:
    """The keeper's life: a question a line, an answer a line, until the other side is gone."""
    from ludus.distributed.hub.rpc import error_fields
    from ludus.errors import LudusError

    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no answer
    meeting: Meeting | None = None
    for line in sys.stdin:
        question = json_lines.decode(line)
        said: dict[str, Any] = {}
        try:
            if "leave" in question and meeting is not None:
                meeting.leave(Spot(*question["leave"]))
            else:
                meeting = meeting or Meeting(Path(question["directory"]), question["address"])
                spot = meeting.find_or_claim(time.monotonic() + question["within_s"])
                said = {"host": meeting.host()} if spot is None else {"spot": [spot.address, spot.token]}
        except LudusError as error:
            said = error_fields(error)
        json_lines.write(out, said)
    if meeting is not None:
        meeting.close()


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
    addresses = interface_addresses()
    if not addresses.get(card):
        raise UsageError(f"{NET_CARD}={card!r} is not an interface with an address here.", f"There are: {', '.join(addresses)}.")
    return addresses[card]
