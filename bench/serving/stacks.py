"""The stacks that are compared: which command serves what, with which settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.run import THREAD_VARIABLES
from bench.serving.install import SERVING

OURS = Path(sys.executable)
UVICORN = "uvicorn 1 process, uvloop, httptools, access log off"
RAY = "own Ray instance, 2 CPUs, 1 replica, @serve.batch(max_batch_size=64, batch_wait_timeout_s=0), max_ongoing_requests=2048, logs off"
MICRO = "micro-batched (what is queued in one turn of the loop shares a forward pass), gc.freeze() after loading"


@dataclass(frozen=True)
class Stack:
    """`words` follow `python -m`; `{port}`, `{temp}` (a short-lived directory), `{free}` (any free port) and `{secret}` are
    filled in, in `environment` too."""

    name: str
    workload: str
    words: tuple[str, ...]
    settings: str
    python: Path = SERVING.python
    environment: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = True
    """To one core, and the load generator to another: for servers of which one process does the work."""
    ready_s: float = 60.0
    token: str = ""
    """That every request must carry."""

    @property
    def missing(self) -> str:
        """Why it cannot run here, or nothing."""
        return "" if self.python.exists() else "not installed: python -m bench.serving.install"


def base_environment() -> dict[str, str]:
    """One torch thread everywhere; nothing that would point a stack at somebody else's Ray."""
    foreign = ("PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in foreign and not name.startswith("RAY_")}
    return {**kept, **dict.fromkeys(THREAD_VARIABLES, "1")}


def _ours(workload: str, workers: int, pinned: bool = False) -> Stack:
    how = "" if pinned else f", {workers} worker{'s'[: workers - 1]} not pinned"
    return Stack(
        name=f"ludus {workload}{how}",
        workload=workload,
        words=("bench.serving.ours", "--workload", workload, "--port", "{port}", "--workers", str(workers)),
        settings=f"num_workers={workers}" + (", RemoteModel(max_batch_size=512)" if workload == "mlp" else ""),
        python=OURS,
        pinned=pinned,
    )


def _raw(workload: str) -> Stack:
    return Stack(
        name=f"raw {workload}",
        workload=workload,
        words=("bench.serving.raw", "--workload", workload, "--port", "{port}"),
        settings="hand-written asyncio protocol on uvloop: a ceiling, not a server" + (f"; {MICRO}" if workload == "mlp" else ""),
        python=OURS,
    )


def _uvicorn(workload: str) -> Stack:
    return Stack(
        name=f"uvicorn {workload}",
        workload=workload,
        words=("bench.serving.asgi", "--workload", workload, "--port", "{port}"),
        settings=f"bare ASGI; {UVICORN}, no lifespan, no server and date headers" + (f"; {MICRO}" if workload == "mlp" else ""),
    )


def _fastapi(name: str, *options: str) -> Stack:
    return Stack(
        name=name,
        workload="mlp",
        words=("bench.serving.fast_api", "--workload", "mlp", "--port", "{port}", *options),
        settings=f"{UVICORN}; {MICRO if options else 'a forward pass per request'}",
    )


# Ray listens on every interface, so it gets a token of its own; a local ray.init() would make one, too.
RAY_BASE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "{secret}", "RAY_USAGE_STATS_ENABLED": "0"}
RAY_FAST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
# Not tuning: files and ports of its own, so that a proxy left behind by another Ray is not in the way.
RAY_PROXY_PLACES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "{temp}/ha/haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "{temp}/ha/admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "{temp}/ha",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "{temp}/ha/server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "{temp}/ha/metrics.sock",
    "RAY_SERVE_HAPROXY_METRICS_PORT": "{free}",
    "RAY_SERVE_HAPROXY_STATS_PORT": "{free}",
}


def _ray(name: str, fast: bool) -> Stack:
    switches = "default proxy" if not fast else " ".join(f"{key}={value}" for key, value in RAY_FAST.items())
    return Stack(
        name=name,
        workload="mlp",
        words=("bench.serving.ray_serve", "--port", "{port}", "--temp", "{temp}"),
        settings=f"{switches}; {RAY}",
        environment=RAY_BASE | (RAY_FAST | RAY_PROXY_PLACES if fast else {}),
        pinned=False,
        ready_s=120.0,
    )


STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        _raw("echo"),
        _ours("echo", 1, pinned=True),
        _ours("echo", 1),
        _ours("echo", 2),
        _uvicorn("echo"),
        _raw("mlp"),
        _ours("mlp", 1, pinned=True),
        _ours("mlp", 1),
        _ours("mlp", 2),
        _uvicorn("mlp"),
        _fastapi("fastapi mlp"),
        _fastapi("fastapi batched mlp", "--batched"),
        _ray("ray serve mlp", fast=False),
        _ray("ray serve mlp, HAProxy", fast=True),
    )
}

COUNTER = _ours("counter", 1, pinned=True)
"""Not compared with anything: for the counts of `bench.gateway --sessions`."""
