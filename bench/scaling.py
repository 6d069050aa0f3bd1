"""How sampling scales: frames/s and CPU seconds per frame with 0, 1, 2, 4 workers, and with workers on other hosts.

    python -m bench.scaling                  workers on this machine (about 4 minutes)
    python -m bench.scaling --hosts          the same number of workers on one host, and on three that are joined by Ray

The learner discards: it takes blocks and gives them back. So sampling is the limit, and what is measured is the way from the
environment to the learner's hands. The environments cost real CPU time: ALE Pong with the Nature CNN, and one that computes
checksums, whose policy is small. With `--hosts` each host has its own address, PID space and /dev/shm (network namespaces, root);
the cores are the same two, so the difference is what crossing costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from bench.peers.report import tree_usage
from bench.train import RESULTS, Row, provenance, spread

HERE = Path(__file__).parent
BURN_BYTES = 1_000_000
WORKERS = (0, 1, 2, 4)
HOSTS = 3
WARM_BLOCKS = 2
START_S = 90.0
PORT = 6391
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "pong": {"env": "ALE/Pong-v5", "env_config": {"num_threads": 1}, "num_envs": 16, "steps": 32},
    "checksums": {"env": "bench.scaling:Checksums", "env_config": {}, "num_envs": 8, "steps": 64},
}
"""Blocks of 14.9 MB, and of 148 KB."""


class Checksums(gym.Env[Any, Any]):
    """Every step takes the checksum of a megabyte: CPU time that neither waits nor shares a lock with anybody."""

    observation_space = gym.spaces.Box(0, 1, (64,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self._bytes = np.random.default_rng(0).bytes(BURN_BYTES)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._seen(zlib.crc32(self._bytes, int(action))), 0.0, False, self._steps >= 1000, {}

    def _seen(self, number: int) -> Any:
        return np.full(64, number / 2**32, np.float32)


# -- one measurement ----------------------------------------------------------------------------------------------------


def measure(kind: str, workers: int, seconds: float, address: str | None = None) -> Row:
    """Frames/s of so many workers, 0: the sampler in this process; with an address on the nodes of that Ray cluster."""
    import torch

    from ludus.algorithms.base import algorithm_class
    from ludus.config.validation import parse_algorithm_config
    from ludus.experiments.assembly.policies import make_policy
    from ludus.experiments.assembly.worker_training import make_plan, probe_environment

    torch.set_num_threads(1)
    task = ENVIRONMENTS[kind]
    block = task["num_envs"] * task["steps"]
    keys = {
        "env_config": task["env_config"],
        "num_workers": max(1, workers),
        "num_envs_per_worker": task["num_envs"],
        "rollout_fragment_length": task["steps"],
        "train_batch_size": block,
    }
    config = parse_algorithm_config(algorithm_class("APPO").Config, keys)
    shape = probe_environment(task["env"], config)
    policy = make_policy(shape.observation_space, shape.action_space, config)
    if not workers:
        made = _alone(task, policy, config.steps, seconds)
    else:
        made = _with_workers(make_plan(task["env"], config, shape, policy, 1, 1), policy, workers, seconds, address)
    return {"env": kind, "workers": workers, "hosts": HOSTS if address else 1, "block_frames": block} | made


def _alone(task: dict[str, Any], policy: Any, steps: int, seconds: float) -> Row:
    from ludus.envs.vector_env import make_environments
    from ludus.sampling.sampler import Sampler, segment_spec
    from ludus.transport.local import LocalMemory

    class Fixed:
        def newest(self) -> tuple[Any, int]:
            return policy, 1

    with contextlib.closing(make_environments(task["env"], task["num_envs"], task["env_config"])) as environments:
        memory = LocalMemory(segment_spec(policy, environments, steps), environments.num, 1)
        sampler = Sampler(environments, Fixed(), memory, 1)

        def turn() -> int:
            sampler.step()
            block = memory.take(0)
            assert block is not None
            memory.release(block)
            return block.rows * steps

        for _ in range(WARM_BLOCKS):
            turn()
        return _measure(turn, seconds)


def _with_workers(plan: Any, policy: Any, workers: int, seconds: float, address: str | None) -> Row:
    from ludus.buffers.block_batches import BlockBatches
    from ludus.distributed.sampling_pool import LocalNode, SamplingNodes, SamplingPool, SingleNode

    weights = {name: tensor.detach().numpy() for name, tensor in policy.state_dict().items()}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(_cluster(address)) if address else None

        def nodes(wakeup: Path) -> SamplingNodes:
            if cluster is None:
                return SingleNode(LocalNode(plan, wakeup))
            from ludus.distributed.ray_nodes import RayNodes

            return RayNodes(cluster, plan, wakeup)

        sampling = SamplingPool(nodes, workers, lambda: (1, weights))
        stack.callback(sampling.close)
        sampling.batches = batches = BlockBatches(sampling, workers, 1, in_turn=False, newest=lambda: 1)

        def turn() -> int:
            sampling.step()
            block = batches.take()
            if block is None:
                return 0
            rows = block.rows
            batches.release(block)
            return rows * plan.spec.steps

        deadline = time.monotonic() + START_S
        while sum(_blocks(sampling) >= WARM_BLOCKS) < workers or len(_blocks(sampling)) < workers:
            turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{workers} workers did not all make {WARM_BLOCKS} blocks within {START_S:.0f} s")
        return _measure(turn, seconds, sampling) | {"where": sorted({w["node"] for w in sampling.status()["workers"]})}


def _blocks(sampling: Any) -> Any:
    return np.array([worker["blocks"] for worker in sampling.status()["workers"]])


def _measure(turn: Any, seconds: float, sampling: Any = None) -> Row:
    frames, began, cpu_s = 0, time.perf_counter(), tree_usage().cpu_s
    if sampling is not None:
        sampling.metrics()
    while time.perf_counter() - began < seconds:
        frames += turn()
    wall_s, cpu_s = time.perf_counter() - began, tree_usage().cpu_s - cpu_s
    row = {"frames": frames, "fps": frames / wall_s, "cpu_us_per_frame": 1e6 * cpu_s / max(frames, 1), "cores": cpu_s / wall_s}
    numbers = {} if sampling is None else sampling.metrics()
    shares = {key: round(value, 3) for key, value in numbers.items() if key.endswith("_share")}
    return {key: round(value, 3) for key, value in row.items()} | shares


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    from ludus.ray_cluster.cluster import Cluster

    with Cluster(address) as cluster:
        yield cluster


# -- rounds -------------------------------------------------------------------------------------------------------------


def one(kind: str, workers: int, seconds: float) -> Row:
    """In a process of its own: nothing is warm that is not warm in a run."""
    words = [sys.executable, "-m", "bench.scaling", "--one", kind, str(workers), "--seconds", str(seconds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    out = subprocess.run(words, capture_output=True, text=True, timeout=seconds + START_S + 60, env=environment, cwd=HERE.parent)
    return _read(out.stdout, out.stderr, kind, workers)


def _read(stdout: str, stderr: str, kind: str, workers: int) -> Row:
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    row: Row = json.loads(lines[-1]) if lines else {"env": kind, "workers": workers, "error": (stderr or stdout)[-400:]}
    print(json.dumps(row), flush=True)
    return row


def on_this_machine(kinds: list[str], rounds: int, seconds: float) -> list[Row]:
    return [one(kind, workers, seconds) for _ in range(rounds) for kind in kinds for workers in WORKERS]


def on_hosts(kinds: list[str], rounds: int, seconds: float, workers: int = HOSTS) -> list[Row]:
    """The same number of workers in one host, and one on each of three; all in namespaces, so that both have the same kernel way."""
    from tests.system.hosts import up

    rows = []
    with up(HOSTS) as hosts, _ray_on(hosts) as address:
        for _ in range(rounds):
            for kind in kinds:
                for there in (None, address):
                    rows.append(_inside(hosts, kind, workers, seconds, there))
    return rows


@contextlib.contextmanager
def _ray_on(hosts: Any) -> Iterator[str]:
    """A Ray over all hosts. Nobody else is on their network, so that it needs no token."""
    from ludus.ray_cluster.cluster import HEALTH
    from tests.system.hosts import end

    address = f"{hosts.address(0)}:{PORT}"
    environment = os.environ | _RAY_ENVIRONMENT
    common = ["--block", "--disable-usage-stats", "--num-cpus=2", f"--object-store-memory={256 << 20}"]
    ray = Path(sys.executable).with_name("ray")
    started = []
    try:
        for host in range(HOSTS):
            who = (
                ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={json.dumps(HEALTH)}"]
                if host == 0
                else [f"--address={address}"]
            )
            words = [ray, "start", *who, f"--node-ip-address={hosts.address(host)}", *common]
            started.append(hosts.run(host, words, env=environment))
            if host == 0:
                _await_port(hosts, address)
        yield address
    finally:
        for process in reversed(started):
            end(process)


_RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def _await_port(hosts: Any, address: str) -> None:
    host, _, port = address.partition(":")
    probe = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    deadline = time.monotonic() + START_S
    while hosts.run(0, [sys.executable, "-c", probe], output=subprocess.DEVNULL).wait(30):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no Ray at {address} after {START_S:.0f} s")
        time.sleep(0.5)


def _inside(hosts: Any, kind: str, workers: int, seconds: float, address: str | None) -> Row:
    words = [sys.executable, "-m", "bench.scaling", "--one", kind, str(workers), "--seconds", str(seconds)]
    words += ["--address", address] if address else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | _RAY_ENVIRONMENT
    process = hosts.run(0, words, env=environment, cwd=HERE.parent, output=subprocess.PIPE)
    out, _ = process.communicate(timeout=seconds + 2 * START_S)
    return _read(out.decode(errors="replace"), "", kind, workers)


# -- tables -------------------------------------------------------------------------------------------------------------


def _values(rows: list[Row], key: str, **where: Any) -> list[float]:
    return [row[key] for row in rows if key in row and all(row.get(k) == v for k, v in where.items())]


def table(rows: list[Row]) -> str:
    lines = [
        "| environment | workers | frames/s | ÷ one worker | CPU µs/frame | ÷ one worker | cores used |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(row["env"] for row in rows):
        base = {key: _values(rows, key, env=kind, workers=1) for key in ("fps", "cpu_us_per_frame")}
        for workers in WORKERS:
            fps, cpu, cores = (_values(rows, key, env=kind, workers=workers) for key in ("fps", "cpu_us_per_frame", "cores"))
            if not fps:
                continue
            faster = statistics.median(fps) / statistics.median(base["fps"])
            dearer = statistics.median(cpu) / statistics.median(base["cpu_us_per_frame"])
            shown = workers or "0 (in the learner's process)"
            lines.append(
                f"| {kind} | {shown} | {spread(fps)} | {faster:.2f} | {spread(cpu)} | {dearer:.2f} | {spread(cores, 2)} |"
            )
    return "\n".join(lines)


def hosts_table(rows: list[Row]) -> str:
    lines = ["| environment | workers | on one host, frames/s | on three hosts | overhead |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(row["env"] for row in rows):
        here, there = _values(rows, "fps", env=kind, hosts=1), _values(rows, "fps", env=kind, hosts=HOSTS)
        if here and there:
            overhead = 1 - statistics.median(there) / statistics.median(here)
            lines.append(f"| {kind} | {HOSTS} | {spread(here)} | {spread(there)} | {100 * overhead:.0f} % |")
    return "\n".join(lines)


def save(name: str, rows: list[Row], text: str) -> None:
    head = provenance()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(head | {"rows": rows}, indent=1))
    page = f"# {name}\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\nmedian [quartiles]\n\n{text}\n"
    (RESULTS / f"{name}.md").write_text(page)
    print(f"\n{page}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--envs", nargs="*", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--one", nargs=2, metavar=("ENV", "WORKERS"), help="a single measurement; prints one line of JSON")
    parser.add_argument("--address", help="of a Ray cluster, with --one")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.seconds, args.address)))
    elif args.hosts:
        rows = on_hosts(args.envs, args.rounds, args.seconds)
        save("scaling-hosts", rows, hosts_table(rows))
    else:
        rows = on_this_machine(args.envs, args.rounds, args.seconds)
        save("scaling", rows, table(rows))


if __name__ == "__main__":
    main()
