"""A real Slurm on this machine: munged, slurmctld and some slurmd, each node with an address of its own (127.0.0.2 …).

No systemd, no cgroups, ports of its own: several can stand side by side. Every daemon runs under `ludus.launch.remote_process`, whose line
this process holds: whatever happens to it, they end with all that they have started. So a node can also lose its power (`lose`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.tools import need
from tests.waiting import wait_until

_START_S = 30.0
_ASK_S = 30.0
KILL_WAIT_S = 3
"""Between SIGTERM and SIGKILL, where Slurm itself ends a job."""

CPUS = 4
GPUS = 2
"""Of each node; nothing stands behind them."""


class SlurmRig:
    """Two partitions over the same nodes: `main`, and `urgent`, whose jobs have those of `main` put back into the queue."""

    def __init__(self, base: Path, nodes: int = 3) -> None:
        self.base, self.nodes = base, nodes
        self.conf = base / "etc" / "slurm.conf"
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("etc", "log", "run", "state", *(f"spool/{node}" for node in self.names)):
            (base / name).mkdir(parents=True, exist_ok=True)
        for path in (base, base / "run", base / "etc"):  # munged insists, and other users read the configuration
            path.chmod(0o755)
        self._configure()

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        munge = self.base / "run" / "munge.socket"
        self._daemon("munged", "--foreground", "--force", f"--key-file={self.base}/etc/munge.key", f"--socket={munge}",
                     f"--pid-file={self.base}/run/munged.pid", f"--log-file={self.base}/log/munged.log",
                     f"--seed-file={self.base}/state/munge.seed")  # fmt: skip
        self._until("munged", munge.exists)
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        self._until("the nodes", lambda: self.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", str(self.nodes)])

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-D")
        self._until("slurmctld", lambda: "UP" in self.ask("scontrol", "ping"))

    def start_node(self, name: str) -> None:
        self._daemon("slurmd", "-D", "-N", name, called=name)

    def lose(self, name: str) -> None:
        """A node, or `slurmctld`: without a word, with all that it has started."""
        daemon = self._daemons.pop(name)
        assert daemon.stdin is not None
        daemon.stdin.close()
        daemon.wait(_START_S)

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for name in reversed(list(self._daemons)):
            self.lose(name)

    def ask(self, *words: str, timeout_s: float = _ASK_S) -> str:
        """What a program of Slurm says; its complaints too."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return done.stdout + done.stderr

    def jobs(self) -> list[str]:
        """Those that run, wait or are ending."""
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def log(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self.base / "log" / f"{name}.log").read_text(errors="replace")
        return ""

    # -- how

    def _configure(self) -> None:
        key = self.base / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        port = free_ports(self.nodes + 1)
        here, last = platform.node(), self.nodes
        (self.base / "etc" / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        devices = ("/dev/null", "/dev/zero")[:GPUS]
        (self.base / "etc" / "gres.conf").write_text("".join(f"NodeName=n[1-{last}] Name=gpu File={it}\n" for it in devices))
        self.conf.write_text(
            f"""\
ClusterName=rig{port}
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.base}/run/munge.socket,cred_expire=5
StateSaveLocation={self.base}/state
SlurmdSpoolDir={self.base}/spool/%n
SlurmctldPidFile={self.base}/run/slurmctld.pid
SlurmdPidFile={self.base}/run/slurmd-%n.pid
SlurmctldLogFile={self.base}/log/slurmctld.log
SlurmdLogFile={self.base}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait={KILL_WAIT_S}
OverTimeLimit=0
MinJobAge=300
GresTypes=gpu
NodeName=n[1-{last}] NodeHostname={here} NodeAddr=127.0.0.[2-{last + 1}] Port=[{port + 1}-{port + last}] CPUs={CPUS} RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""
        )

    def _daemon(self, program: str, *options: str, called: str = "") -> None:
        path = need(program)
        with open(self.base / "log" / f"{called or program}.out", "ab") as said:
            self._daemons[called or program] = subprocess.Popen(
                [sys.executable, "-P", "-m", "ludus.launch.remote_process", "run", path, *options],
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _until(self, what: str, happened: Callable[[], bool]) -> None:
        wait_until(
            happened,
            _START_S,
            what=lambda: f"{what} did not come up\n{self._said()}",
            failed=lambda: [name for name, daemon in self._daemons.items() if daemon.poll() is not None],
        )

    def _said(self) -> str:
        files = sorted((self.base / "log").iterdir())
        return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-600:]}" for file in files)


@contextlib.contextmanager
def slurm_rig(nodes: int = 3) -> Iterator[SlurmRig]:
    """The test is skipped, with the reason, where there cannot be one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a Slurm of our own needs root on Linux")
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        need(program)
    base = Path(tempfile.mkdtemp(prefix="slurm-rig-"))  # a socket's path must be short, which those of pytest are not
    rig = SlurmRig(base, nodes)
    try:
        rig.start()
        yield rig
    finally:
        rig.close()
        shutil.rmtree(base, ignore_errors=True)


def free_ports(count: int) -> int:
    """The first of so many in a row that nobody listens on."""
    for first in range(33_000 + (os.getpid() * 16) % 20_000, 60_000, count):
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind(("", port))
        return True
    return False


def processes_of(job_id: str) -> list[int]:
    """All of a job of ours on this machine, on whichever of its nodes, by what is in their environment."""
    return _with_variable("LUDUS_JOB_ID", job_id)


def _with_variable(name: str, value: str) -> list[int]:
    wanted, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def as_user(name: str, words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program of another user of this machine."""
    user = pwd.getpwnam(name)
    return subprocess.run(
        words, env=dict(environment), cwd=cwd, user=user.pw_uid, group=user.pw_gid, extra_groups=[], umask=0o077,
        capture_output=True, text=True, timeout=_ASK_S, check=False,
    )  # fmt: skip
