"""Runs one node of a job's Ray cluster, as a role of the job: `python -P -m ludus.launch.ray_role`. Node 0 is the head.

The environment has the addresses and ports (`JobEnv`). This process does not import Ray: it starts a `RayNode`, which is
guarded. On SIGTERM the guard kills all processes of Ray, which itself takes half a minute to stop, and deletes its directory. When Ray
ends by itself, this process exits with code 1, and the supervisor restarts it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io.atomic_file import open_new
from ludus.process import job_env
from ludus.process.host import usable_cores
from ludus.process.job_env import JobEnv
from ludus.process.signals import SignalQueue
from ludus.ray_cluster import cluster
from ludus.ray_cluster.membership import SHARES
from ludus.ray_cluster.node import NodeSpec, RayNode
from ludus.ray_cluster.ray_temp_dir import ray_temp_dir, sweep_leftovers

GAMECORE = "GAMECORE_SERVER_ADDR"
AUTO = "auto"

GRAIN = 50
"""Ports are reserved in units of this many."""

_FIXED_PORTS = (
    "node_manager_port", "object_manager_port", "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)  # fmt: skip
_SPARE_WORKERS = 30
_SHM_SHARE = 0.5
_MIN_STORE = 80 << 20
"""Ray requires 75 MB."""

_UNWANTED = ("LD_PRELOAD", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "ip_head", job_env.RUN, job_env.RAY, job_env.LEARNERS)
"""Variables that are meant for the main role only, or would mislead Ray and its workers."""

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LINES = 6


@dataclass(frozen=True)
class RayNodeOptions:
    """`cpus`, `gpus`: None: detected. `store_bytes`: upper limit. `stay`: wait for the head without a time limit.

    `leave_s`: how long to wait for the head, and then exit with 0: the job is over.
    """

    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    store_bytes: int = cluster.STORE_BYTES
    gamecore: str = ""
    share_weights: bool = False
    log_dir: Path | None = None
    stay: bool = False
    leave_s: float | None = None


# -- resources, ports and environment -----------------------------------------------------------------------------------------


def node_cpus(options: RayNodeOptions, environ: Mapping[str, str]) -> int:
    """Return the option, else Slurm's number, else the number of cores that this process may use."""
    if options.cpus is not None:
        return options.cpus
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(given) if given.isdigit() else usable_cores()


def node_gpus(options: RayNodeOptions, environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs; None: Ray detects it."""
    if options.gpus is not None:
        return options.gpus
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    if given.isdigit():
        return int(given)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return 0 if visible in ("NoDevFiles", "-1") else len([word for word in visible.split(",") if word.strip()])


def limit_store(limit: int, free: int) -> int:
    """Return the bytes of the object store: at most half of the free shared memory, beyond which Ray falls back to disk."""
    return max(_MIN_STORE, min(limit, int(free * _SHM_SHARE)))


def block_size(cpus: int) -> int:
    """Return the number of ports of a node: those of Ray itself, and one for every worker or driver process."""
    return GRAIN * math.ceil((len(_FIXED_PORTS) + _SPARE_WORKERS + 2 * cpus) / GRAIN)


def assign_ports(first: int, size: int) -> dict[str, int]:
    named = dict(zip(_FIXED_PORTS, range(first, first + size), strict=False))
    return named | {"min_worker_port": first + len(_FIXED_PORTS), "max_worker_port": first + size - 1}


def node_environment(environ: Mapping[str, str], options: RayNodeOptions, directory: Path) -> dict[str, str]:
    """Return the environment of Ray and its workers."""
    kept = {name: value for name, value in environ.items() if name not in _UNWANTED}
    kept |= cluster.SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(directory / "token")}
    if options.gamecore:
        kept[GAMECORE] = options.gamecore
    if options.log_dir is not None:
        kept[cluster.NODE_LOG_DIR] = str(options.log_dir.absolute())
    return kept


@contextlib.contextmanager
def reserve_ports(job: str, node: int, size: int, taken: Sequence[int]) -> Iterator[int]:
    """Reserve a block of free ports that no other Ray node on this machine has reserved; yield its first port.

    The search starts at a hash of the job's name, so that jobs rarely collide. Raises UsageError if there is none.
    """
    for first in job_env.candidate_ports(job, size, f"ray-{node}"):
        span = range(first, first + size)
        if any(port in span for port in taken):
            continue
        with contextlib.ExitStack() as reserved:
            try:
                for grain in range(first, first + size, GRAIN):
                    reserved.enter_context(_reserve_grain(grain))
            except OSError:  # reserved by another node, which may not listen yet
                continue
            if not all(job_env.is_port_free(port) for port in span):
                continue
            yield first
            return
    raise UsageError(f"No block of {size} free ports is left on this machine, of those from {job_env.FIRST_PORT} on.")


def _reserve_grain(grain: int) -> socket.socket:
    """Bind an abstract Unix socket, which is reserved until its process ends; like ports, these belong to the network namespace."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            lock.bind(f"\0ludus-ports-{grain}")
    except OSError:
        lock.close()
        raise
    return lock


def error_lines(lines: Sequence[str]) -> list[str]:
    """Return the last critical and error lines of a Ray log."""
    errors = [line for line in lines if " C " in line[:60] or " E " in line[:60] or "Check failed" in line]
    return errors[-_LINES:]


# -- process ------------------------------------------------------------------------------------------------------------------


class RayNodeRunner:
    """Runs a Ray node once."""

    def __init__(self, job: JobEnv, options: RayNodeOptions, directory: Path) -> None:
        self._job, self._options, self._directory = job, options, directory
        self._environ = node_environment(os.environ, options, directory)
        self._logs: Path | None = None
        self._failure = ""
        self._absent = False
        self._output: collections.deque[str] = collections.deque(maxlen=_LINES)

    def run(self, signals: SignalQueue) -> int:
        """Return 1 when Ray has ended; 0 after a stop signal, or if the head did not come back within `leave_s`."""
        if os.environ.get("LD_PRELOAD"):
            say(f"LD_PRELOAD={os.environ['LD_PRELOAD']} is removed from the environment of Ray")
        cpus = node_cpus(self._options, os.environ)
        first_node = self._job.node == 0
        taken = range(self._job.port, self._job.port + job_env.PORTS)
        if first_node and not job_env.is_port_free(self._job.port):
            raise WorkerFailed(f"Port {self._job.port} of this job is used by another process.", "Submit it again.")
        name = os.environ.get("LUDUS_JOB_ID", self._job.head)
        with reserve_ports(name, self._job.node, block_size(cpus), taken) as first:
            ports = assign_ports(first, block_size(cpus))
            spec = self._node_spec(cpus, ports)
            say(
                f"node {self._job.node} of {len(self._job.nodes)}, {spec.address}: {'the head' if spec.first else 'joins'} "
                f"{spec.head}, {cpus} cores, ports {first}-{ports['max_worker_port']}, object store {spec.store_bytes >> 20} MB"
            )
            return self._run_process(spec, signals)

    def _node_spec(self, cpus: int, ports: Mapping[str, int]) -> NodeSpec:
        job, options = self._job, self._options
        shm = Path("/dev/shm")  # noqa: S108
        free = shutil.disk_usage(shm).free if shm.is_dir() else options.store_bytes
        return NodeSpec(
            first=job.node == 0,
            head=job.head,
            address=cluster.resolve_host(job.nodes[job.node]),
            name=cluster.node_name(job.node),
            directory=str(self._directory / "r"),
            store_bytes=limit_store(options.store_bytes, free),
            wait_s=None if options.stay else options.leave_s or job.wait_s,
            cpus=cpus,
            gpus=node_gpus(options, os.environ),
            memory=options.memory,
            ports=dict(ports),
            labels={SHARES: "1"} if options.share_weights else {},
        )

    def _run_process(self, spec: NodeSpec, signals: SignalQueue) -> int:
        with RayNode(spec, self._environ, self._directory) as node, selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            selector.register(node, selectors.EVENT_READ)
            while not node.has_ended:
                for key, _ in selector.select():
                    if key.fileobj is node:
                        for message in node.read_reports():
                            self._handle_message(message)
                    elif set(signals.take()) & set(_ENDS):
                        return 0
            return self._report_end()

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        if "waiting" in message:
            say(f"waiting for the head at {message['waiting']} …")
        elif "ready" in message:
            self._logs = Path(message["logs"])
            say(f"Ray is up after {message['ready']:.1f} s")
        elif "failed" in message:
            self._failure = f"{message['failed']} {message['hint']}".strip()
            self._absent = bool(message.get("absent"))

    def _report_end(self) -> int:
        say(self._failure or "the process of Ray was killed")
        for line in self._log_errors():
            say(f"  {line}")
        return 0 if self._absent and self._options.leave_s is not None else 1

    def _log_errors(self) -> list[str]:
        logs = self._logs or next(iter((self._directory / "r").glob("session_[0-9]*/logs")), None)
        lines: list[str] = []
        for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            with contextlib.suppress(OSError, TypeError):
                text = (logs / name).read_text(errors="replace") if logs is not None else ""
                lines += error_lines(text.splitlines())
        return lines[-_LINES:]


def say(sentence: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} ray: {sentence}\n")
    sys.stdout.flush()


def run_node(job: JobEnv, options: RayNodeOptions) -> int:
    """Run a Ray node until it ends or SIGTERM, then kill all its processes and delete its files. Raises LudusError."""
    token = job.token()
    with SignalQueue(*_ENDS) as signals, ray_temp_dir() as directory:
        with open_new(directory / "token", 0o600) as file:
            file.write(token)
        try:
            return RayNodeRunner(job, options, directory).run(signals)
        finally:
            sweep_leftovers()


def parse_options(words: Sequence[str]) -> RayNodeOptions:
    parser = argparse.ArgumentParser(prog="python -m ludus.launch.ray_role", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpus", type=_number, metavar="N|auto", help="cores for workers")
    parser.add_argument("--gpus", type=_number, metavar="N|auto")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="memory that trials may request")
    parser.add_argument(
        "--store-bytes", type=int, default=cluster.STORE_BYTES, metavar="B", help="upper limit of the object store"
    )
    parser.add_argument("--gamecore", default="", metavar="HOST:PORT", help=f"{GAMECORE} for the workers")
    parser.add_argument("--share-weights", action="store_true", help="a learner on this machine uses these cores itself")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="directory of the workers' logs, actor_N.log")
    parser.add_argument("--stay", action="store_true", help="wait for the head without a time limit")
    parser.add_argument("--leave-s", type=float, metavar="S", help="exit with 0 when the head was not reachable for so long")
    return RayNodeOptions(**vars(parser.parse_args(words)))


def _number(text: str) -> int | None:
    if text == AUTO:
        return None
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def main(words: Sequence[str]) -> int:
    try:
        job = JobEnv.from_environ(os.environ)
        if job is None or not job.port:
            raise UsageError(
                f"This process belongs to no job with Ray: {job_env.NODES} or {job_env.PORT} is not set.", "Only jobs start it."
            )
        return run_node(job, parse_options(words))
    except LudusError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
