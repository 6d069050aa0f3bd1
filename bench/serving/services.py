"""The stacks that `bench.serve` compares: each plays the same agent from the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.serving.stacks import MICRO, OURS, RAY, RAY_BASE, RAY_FAST, RAY_PROXY_PLACES, STACKS, UVICORN, Stack

TOKEN = "a-token-of-the-bench"
BACKENDS = ("torch", "onnx", "onnx-int8")
BARE = "bare gateway mlp"
RAY_BEST, RAY_PLAIN, FASTAPI, FASTAPI_BATCHED, LITSERVE = (
    "ray serve (HAProxy)",
    "ray serve",
    "fastapi",
    "fastapi batched",
    "litserve",
)


@dataclass(frozen=True)
class Served:
    """An agent on disk: the run that Ludus serves, the arrays that the peers load, the tokens."""

    kind: str
    run: Path
    arrays: Path
    tokens: Path


def ludus(
    agent: Served, backend: str = "torch", options: tuple[str, ...] = (), *, workers: int = 1, pinned: bool = True
) -> Stack:
    how = "" if pinned else f" {workers} worker{'s'[: workers - 1]} not pinned"
    shown = " ".join(("--token-file …", f"--backend {backend}", f"--workers {workers}", *options))
    words = ("ludus.cli.main", "serve", str(agent.run), "--port", "{port}", "--token-file", str(agent.tokens))
    return Stack(
        name=f"ludus serve {agent.kind} ({backend}{how})",
        workload=agent.kind,
        words=(*words, "--backend", backend, "--workers", str(workers), "--drain-s", "0", *options),
        settings=f"ludus serve RUN {shown}; raw format, seq numbers, metrics on",
        python=OURS,
        pinned=pinned,
        ready_s=120.0,
        token=TOKEN,
    )


def bare() -> Stack:
    """The gateway and an actor of one's own, as `bench.gateway` measures it: no token, no seq, no service around it."""
    return replace(STACKS["ludus mlp"], name=BARE)


def _peer(agent: Served, name: str, module: str, settings: str, *options: str) -> Stack:
    return Stack(
        name=f"{name} {agent.kind}",
        workload=agent.kind,
        words=(f"bench.serving.{module}", "--agent", str(agent.arrays), "--port", "{port}", *options),
        settings=settings,
    )


def _ray(agent: Served, fast: bool) -> Stack:
    switches = "default proxy" if not fast else " ".join(f"{key}={value}" for key, value in RAY_FAST.items())
    name = RAY_BEST if fast else RAY_PLAIN
    return replace(
        _peer(agent, name, "play_ray", f"{switches}; {RAY}", "--temp", "{temp}"),
        environment=RAY_BASE | (RAY_FAST | RAY_PROXY_PLACES if fast else {}),
        pinned=False,
        ready_s=120.0,
    )


def peers(agent: Served) -> list[Stack]:
    lit = "1 API server (uvloop, httptools), 1 worker, max_batch_size=64, batch_timeout=0, fast_queue, access log off"
    return [
        _peer(agent, FASTAPI, "play_fastapi", f"{UVICORN}; a forward pass per request"),
        _peer(agent, FASTAPI_BATCHED, "play_fastapi", f"{UVICORN}; {MICRO}", "--batched"),
        replace(_peer(agent, LITSERVE, "play_litserve", lit), pinned=False),
        _ray(agent, fast=False),
        _ray(agent, fast=True),
    ]


def compared(agents: dict[str, Served]) -> list[Stack]:
    found = [bare()] if "mlp" in agents else []
    for agent in agents.values():
        found += [ludus(agent, backend) for backend in BACKENDS]
        found += peers(agent)
    return found
