"""Hosts on one machine: each has its own address, PID space, host name, /tmp and /dev/shm; a switch joins them. Linux, root.

    with up(3) as hosts:
        process = hosts.run(0, ["ray", "start", "--head", "--block"])
        hosts.cut(2); hosts.mend(2); hosts.power_off(1); hosts.power_on(1)

Every host is a nameless network namespace that one process of ours holds: when that process dies, so does everything in the
host, and the kernel takes the interfaces away. So nothing is left behind, also when the tests are killed, and the machine's own
network never knows of it: the switch has a namespace of its own too, unless `connect_machine` plugs the machine into it. Hosts end
by themselves after `LIFE_S`, or after the time given.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests import tools

LIFE_S = 600
SHARED = Path("/mnt")
SUBNET = "10.77.0"
_CALL_S = 20.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Host:
    """One machine: `popen` is its power supply, `pid` its first process as seen from outside."""

    name: str
    address: str
    popen: subprocess.Popen[bytes]
    pid: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def on(self) -> bool:
        return self.popen.poll() is None

    def off(self) -> None:
        self.popen.kill()
        self.popen.wait(_CALL_S)
        for process in self.started:  # they died with the host: their exit codes are to be collected
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CALL_S)


class Hosts:
    """Counted from 0. Made by `up`."""

    def __init__(
        self, n: int, shared: Path | None = None, shm_mb: int = 512, *, subnet: str = SUBNET, life_s: int = LIFE_S
    ) -> None:
        self._shared, self._shm_mb, self._subnet, self._life_s = shared, shm_mb, subnet, life_s
        self._switch = _boot("switch", "", "ip link set lo up && ip link add br0 type bridge && ip link set br0 up", life_s)
        self._hosts: list[Host] = []
        try:
            for index in range(n):
                self._hosts.append(self._boot(index))
        except BaseException:
            self.down()
            raise

    def __len__(self) -> int:
        return len(self._hosts)

    def address(self, host: int) -> str:
        return self._hosts[host].address

    @property
    def machine_address(self) -> str:
        """Of the machine itself in the network of the hosts, after `connect_machine`."""
        return f"{self._subnet}.254"

    def connect_machine(self, interface: str) -> None:
        """Plug the machine into the switch by a new interface of that name. The interface vanishes with the switch.

        Raises CalledProcessError when the machine has an interface of that name.
        """
        inside = [*_enter(self._switch.pid), "ip", "link"]
        _call(*inside, "add", "machine", "type", "veth", "peer", "name", interface, "netns", str(os.getpid()))
        _call(*inside, "set", "machine", "master", "br0", "up")
        _call("ip", "addr", "add", f"{self.machine_address}/24", "dev", interface)
        _call("ip", "link", "set", interface, "up")

    def run(
        self,
        host: int,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: IO[bytes] | int | None = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a program there. It dies with the host; `end` ends it before. Its process group is its own."""
        there = self._hosts[host]
        process = subprocess.Popen(
            [*_enter(there.pid), "--pid", "--mount", "--uts", "--wd=" + str(cwd or Path.cwd()), "--", *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
        there.started.append(process)
        return process

    def processes(self, host: int) -> list[psutil.Process]:
        """Whatever runs there, as seen from outside."""
        space = os.readlink(f"/proc/{self._hosts[host].pid}/ns/pid")
        return [process for process in psutil.process_iter(["name"]) if _pid_space(process.pid) == space]

    def cut(self, host: int) -> None:
        """Pull the cable: no packet goes in or out, nobody is told."""
        self._link(host, "down")

    def mend(self, host: int) -> None:
        self._link(host, "up")

    def power_off(self, host: int) -> None:
        """Everything that runs there is gone at once, with its /tmp and /dev/shm."""
        self._hosts[host].off()

    def power_on(self, host: int) -> None:
        """The same address, nothing running."""
        assert not self._hosts[host].on
        self._hosts[host] = self._boot(host)

    def down(self) -> None:
        for host in (*self._hosts, self._switch):
            host.off()

    def _boot(self, index: int) -> Host:
        name, address = f"h{index}", f"{self._subnet}.{index + 11}"
        tmpfs = f"mount -t tmpfs -o size=1g tmpfs /tmp && mount -t tmpfs -o size={self._shm_mb}m tmpfs /dev/shm"
        bind = f"mount --bind {shlex.quote(str(self._shared))} {SHARED} && " if self._shared else ""
        host = _boot(name, address, f"hostname {name} && {bind}{tmpfs} && ip link set lo up", self._life_s)
        try:
            inside = [*_enter(self._switch.pid), "ip", "link"]
            with contextlib.suppress(subprocess.CalledProcessError):  # of a former life; the kernel may have been faster
                _call(*inside, "del", f"v{index}")
            _call(*inside, "add", f"v{index}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            _call(*inside, "set", f"v{index}", "master", "br0", "up")
            _call(*_enter(host.pid), "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _call(*_enter(host.pid), "ip", "link", "set", "eth0", "up")
            # Programs that look for "the" address of a machine ask for the way out.
            _call(*_enter(host.pid), "ip", "route", "add", "default", "via", self.machine_address, "onlink", "dev", "eth0")
        except BaseException:
            host.off()
            raise
        return host

    def _link(self, host: int, state: str) -> None:
        _call(*_enter(self._switch.pid), "ip", "link", "set", f"v{host}", state)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM, within_s: float = 10.0) -> int:
    """Signal the program, after `within_s` kill it and what else is in its group; the program's exit code.

    `nsenter` waits for the program and says what it said; it must not be ended before it.
    """
    with contextlib.suppress(OSError):  # it has just ended
        os.kill(_child(process.pid, 0.0), number)
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait(within_s)


@contextlib.contextmanager
def up(n: int, shared: Path | None = None, *, subnet: str = SUBNET, life_s: int = LIFE_S) -> Iterator[Hosts]:
    """n hosts, joined; down when the block is left. Skips the test where that is not possible, and says why.

    The directory `shared` is what a network file system would be: all hosts see it at `SHARED`.
    """
    if sys.platform != "linux":
        pytest.skip("hosts in network namespaces need Linux")
    if os.geteuid() != 0:
        pytest.skip("hosts in network namespaces need root")
    for program in ("ip", "unshare", "nsenter", "bash"):
        tools.need(program)
    try:
        hosts = Hosts(n, shared, subnet=subnet, life_s=life_s)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"network namespaces cannot be made here: {_said(error)}")
    try:
        yield hosts
    finally:
        hosts.down()


def _boot(name: str, address: str, prepare: str, life_s: int) -> Host:
    """A process that holds new namespaces, is PID 1 in them, and dies with us."""
    prctl = ctypes.CDLL(None).prctl
    # As PID 1 it has to reap whatever is orphaned in the host, which `sleep` alone does not.
    live = f"for ((turn = 0; turn < {life_s}; turn++)); do sleep 1 & wait $!; done"
    popen = subprocess.Popen(
        [
            "unshare",
            "--net",
            "--uts",
            "--pid",
            "--mount",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "bash",
            "-c",
            f"{prepare} && echo up && {live}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    assert popen.stdout is not None
    with popen.stdout:
        said = popen.stdout.readline()
        if said != b"up\n":
            popen.kill()
            popen.wait(_CALL_S)
            raise OSError(f"{name}: {said.decode().strip()}")
    return Host(name, address, popen, _child(popen.pid))


def _child(pid: int, within_s: float = _CALL_S) -> int:
    deadline = time.monotonic() + within_s
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if time.monotonic() >= deadline:
            raise OSError(f"process {pid} has no child")
        time.sleep(0.01)
    return int(children[0])


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has just ended
        return ""


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net"]


def _call(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=_CALL_S, capture_output=True)


def _said(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return stderr.decode().strip() if isinstance(stderr, bytes) else str(error)
