"""Machines that are reached by SSH: hosts in network namespaces, each with its own sshd, host key and state; and a laptop. Linux, root.

    with up(3) as rig:
        orchestrator = rig.orchestrator(directory)
        rig.hosts.cut(1); rig.power_off(2); rig.power_on(2)

The laptop is one more host: `ssh` is run in its network, by whichever process asks. The directory `shared` is the same everywhere.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from ludus.launch.ssh.backend import SshNode, SshOrchestrator, SshSettings
from tests import tools
from tests.system import hosts as namespaces

_CALL_S = 20.0


class SshRig:
    """Hosts are counted from 0; the laptop is the last."""

    def __init__(self, hosts: namespaces.Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.size = len(hosts) - 1
        self.shared = directory / "shared"
        self.shared.mkdir()
        self.identity, self.known_hosts = _key(directory / "id"), directory / "known_hosts"
        for host in range(self.size):
            key = _key(directory / f"h{host}_key")
            kind, public, *_ = key.with_suffix(".pub").read_text().split()
            with open(self.known_hosts, "a") as file:
                file.write(f"{hosts.address(host)} {kind} {public}\n")
            self.state(host).mkdir()
            (directory / f"h{host}_home").mkdir()
            self._configure(host)
        for host in range(self.size):
            self._boot(host)
        for host in range(self.size):
            self._await(host)
        self.ssh = self._program()

    def state(self, host: int) -> Path:
        """Its disk: where its parts of jobs are, which a loss of power does not touch."""
        return self.directory / f"h{host}_state"

    def settings(self, n: int | None = None) -> SshSettings:
        nodes = tuple(SshNode(self.hosts.address(host), "root") for host in range(self.size if n is None else n))
        return SshSettings(nodes, self.identity, self.known_hosts, sys.executable, connect_s=3.0, program=str(self.ssh))

    def orchestrator(self, directory: Path, n: int | None = None, **changes: object) -> SshOrchestrator:
        return SshOrchestrator(directory, replace(self.settings(n), **changes))  # type: ignore[arg-type]

    def power_off(self, host: int) -> None:
        self.hosts.power_off(host)

    def power_on(self, host: int) -> None:
        self.hosts.power_on(host)
        for other in range(
            len(self.hosts)
        ):  # its card has another number now; a machine that takes longer is forgotten meanwhile
            if other != host and self.hosts._hosts[other].on:
                self.hosts.run(other, ["ip", "neigh", "flush", "all"]).wait(_CALL_S)
        self._boot(host)
        self._await(host)

    def processes(self, host: int) -> list[psutil.Process]:
        """Of Ludus, and what it started: neither sshd nor what keeps the host up."""
        found = []
        for process in self.hosts.processes(host):
            with contextlib.suppress(psutil.Error):
                if process.name() not in ("sshd", "bash", "nsenter") and not _keeps_up(process):
                    found.append(process)
        return found

    def down(self) -> None:
        self.hosts.down()

    def _configure(self, host: int) -> None:
        lines = [
            "Port 22",
            f"ListenAddress {self.hosts.address(host)}",
            f"HostKey {self.directory}/h{host}_key",
            f"AuthorizedKeysFile {self.directory}/id.pub",
            "PasswordAuthentication no",
            "PermitRootLogin prohibit-password",
            "UsePAM no",
            "StrictModes no",
            "PidFile none",
            "MaxStartups 100",
            # Not the machine's own home: what its login scripts lock, a loss of power would leave locked for everybody.
            f"SetEnv LUDUS_STATE_DIR={self.state(host)} HOME={self.directory}/h{host}_home",
        ]
        (self.directory / f"h{host}_sshd").write_text("\n".join(lines) + "\n")

    def _boot(self, host: int) -> None:
        boot = self.directory / f"h{host}_boot"
        boot.write_text(f"{uuid.uuid4()}\n")  # a machine that was started anew says so
        script = (
            f"mount --bind {boot} /proc/sys/kernel/random/boot_id && mkdir -p /run/sshd && "
            f"exec {shlex.quote(tools.need('sshd'))} -D -e -f {self.directory}/h{host}_sshd"
        )
        with open(self.directory / f"h{host}_log", "ab") as log:
            self.hosts.run(host, ["sh", "-c", script], output=log)

    def _await(self, host: int) -> None:
        words = ["nsenter", f"--target={self.hosts._hosts[self.size].pid}", "--net", sys.executable, "-S", "-c", _KNOCK]
        done = subprocess.run([*words, self.hosts.address(host)], capture_output=True, timeout=_CALL_S, check=False)
        said = (self.directory / f"h{host}_log").read_text()
        assert done.returncode == 0, f"the sshd of host {host} did not come up: {said}"

    def _program(self) -> Path:
        path = self.directory / "ssh"
        laptop = self.hosts._hosts[self.size].pid
        path.write_text(f'#!/bin/sh\nexec nsenter --target={laptop} --net {shlex.quote(tools.need("ssh"))} -F none "$@"\n')
        path.chmod(0o700)
        return path


_KNOCK = """
import socket, sys, time
for turn in range(200):
    try:
        socket.create_connection((sys.argv[1], 22), 1).close()
        sys.exit(0)
    except OSError:
        time.sleep(0.05)
sys.exit(1)
"""


@contextlib.contextmanager
def up(n: int) -> Iterator[SshRig]:
    """n machines and a laptop; down when the block is left. Skips the test where that is not possible, and says why."""
    for program in ("sshd", "ssh", "ssh-keygen"):
        tools.need(program)
    # Not in /tmp, of which every host has its own.
    directory = Path(tempfile.mkdtemp(prefix="ludus-ssh-", dir="/var/tmp"))
    try:
        with namespaces.up(n + 1) as hosts:
            yield SshRig(hosts, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _key(path: Path) -> Path:
    subprocess.run([tools.need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=_CALL_S)
    return path


def _keeps_up(process: psutil.Process) -> bool:
    """The first process of a host, and its sleep."""
    try:
        inside = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:  # it has just ended
        return True
    own = next(line.split()[-1] for line in inside.splitlines() if line.startswith("NSpid:"))
    return own == "1" or process.cmdline() == ["sleep", "1"]


def until_gone(rig: SshRig, host: int, timeout_s: float = 30.0) -> list[str]:
    """What still runs there when the time is up."""
    deadline = time.monotonic() + timeout_s
    while (left := rig.processes(host)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [str(process) for process in left if os.path.exists(f"/proc/{process.pid}")]
