"""New weights to four processes: from the call that publishes them until the last has them in its network.

    python -m bench.weights            1, 10 and 100 MB, five interleaved rounds (about five minutes)
    python -m bench.weights --quick    one short round of 1 and 10 MB

Every process copies the weights into the parameters of a module of its own and checks the version in them. The processes of the
board and of the files look for a new version every 0.2 ms, as a sampler does between two blocks; Ray's are called. A complete
comparison is kept with date and commit in `bench/results/`, others in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.train import Row, spread
from bench.transport import WAIT_S, keep, one, own_ray, producing, scratch
from ludus.models.weights import module_spec as modules
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader, stage

PROCESSES = 4
SIZES = (1, 10, 100)
LOOK_S = 0.0002
START_S = 90.0  # four workers of Ray that import torch
LAYERS = 8


class Network(nn.Module):
    """So many megabytes of float32 in eight matrices, as a network has them."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        rows = megabytes * 1_000_000 // 4 // LAYERS // 256
        self.layers = nn.ParameterList([torch.zeros(rows, 256) for _ in range(LAYERS)])

    def sign(self, version: int) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer[0, 0] = layer[-1, -1] = version

    def check(self, version: int) -> None:
        for layer in self.layers:
            if not layer[0, 0] == layer[-1, -1] == version:
                raise AssertionError(f"version {version} did not arrive whole")


def through_board(megabytes: int, seconds: float) -> list[float]:
    return _through(megabytes, seconds, staged=False)


def through_files(megabytes: int, seconds: float) -> list[float]:
    return _through(megabytes, seconds, staged=True)


def _through(megabytes: int, seconds: float, *, staged: bool) -> list[float]:
    network = Network(megabytes)
    have = np.frombuffer(mmap.mmap(-1, 8 * PROCESSES), np.int64)
    with scratch() as directory, contextlib.ExitStack() as stack:
        board = SharedWeights(directory)

        def follow(index: int) -> None:
            torch.set_num_threads(1)
            reader, own = SharedWeightsReader(directory), Network(megabytes)
            while True:
                while reader.version == have[index]:
                    time.sleep(LOOK_S)
                version = reader.load_into(own)
                own.check(version)
                have[index] = version

        for index in range(PROCESSES):
            stack.enter_context(producing(lambda index=index: follow(index)))  # type: ignore[misc]

        def publish(version: int) -> None:
            network.sign(version)
            began = time.perf_counter()
            board.publish(version, stage(directory, modules.weights_of(network)) if staged else network)
            while (have < version).any():
                if time.perf_counter() - began > WAIT_S:
                    raise TimeoutError(f"version {version} did not reach {int((have < version).sum())} processes")
                time.sleep(LOOK_S)
            took.append(time.perf_counter() - began)

        took: list[float] = []
        return _repeated(publish, took, seconds)


def through_ray(megabytes: int, seconds: float) -> list[float]:
    network = Network(megabytes)
    with own_ray(2 << 30) as ray:

        class Follower:
            def __init__(self) -> None:
                torch.set_num_threads(1)
                self._own = Network(megabytes)

            def ready(self) -> bool:
                return True

            def load(self, version: int, weights: dict[str, Any]) -> int:
                modules.load_weights(self._own, weights)
                self._own.check(version)
                return version

        followers = [ray.remote(num_cpus=1)(Follower).remote() for _ in range(PROCESSES)]
        ray.get([follower.ready.remote() for follower in followers], timeout=START_S)

        def publish(version: int) -> None:
            network.sign(version)
            began = time.perf_counter()
            weights = ray.put({name: tensor.numpy() for name, tensor in network.state_dict().items()})
            ray.get([follower.load.remote(version, weights) for follower in followers], timeout=WAIT_S)
            took.append(time.perf_counter() - began)

        took: list[float] = []
        return _repeated(publish, took, seconds)


def _repeated(publish: Callable[[int], None], took: list[float], seconds: float) -> list[float]:
    """Three times unmeasured, so that every page is there; then for so long, at least five times."""
    for version in (1, 2, 3):
        publish(version)
    took.clear()
    version, end = 4, time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 5:
        publish(version)
        version += 1
    return took


WAYS: dict[str, tuple[Callable[[int, float], list[float]], str]] = {
    "board": (through_board, "ludus.models.weights.shared_weights, slots of shared memory: copied in once, copied out by each"),
    "file and mmap": (
        through_files,
        "ludus.models.weights.shared_weights with staged files: a safetensors file per version, map_weights by each",
    ),
    "ray": (through_ray, "ray.put of a dict of arrays, an actor call to each process that takes the reference"),
}


def table(rows: Sequence[Row], sizes: Sequence[int]) -> str:
    lines = ["| MB | way | publications | ms until the last of 4 has them | ÷ ray |", "|---:|---|---:|---:|---:|"]
    for size in sizes:
        medians = {name: statistics.median(v) for name in WAYS if (v := _column(rows, name, size))}
        for name in medians:
            count = sum(row["count"] for row in rows if row["way"] == name and row["megabytes"] == size and "count" in row)
            ratio = f"{medians[name] / medians['ray']:.2f}" if "ray" in medians else ""
            lines.append(f"| {size} | {name} | {count} | {spread(_column(rows, name, size), 2)} | {ratio} |")
    lines += [f"\n{row['way']}, {row['megabytes']} MB failed: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def _column(rows: Sequence[Row], name: str, size: int) -> list[float]:
    return [row["median_ms"] for row in rows if row["way"] == name and row["megabytes"] == size and "median_ms" in row]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="one round of half a second, 1 and 10 MB")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        name, size = args.one.rsplit(":", 1)
        times = sorted(WAYS[name][0](int(size), args.seconds))
        print(json.dumps({"count": len(times), "median_ms": statistics.median(times) * 1e3, "worst_ms": times[-1] * 1e3}))
        sys.stdout.flush()
        os._exit(0)  # what torch and Ray have to say at the end is not waited for
    sizes: Sequence[int] = SIZES
    if args.quick:
        args.rounds, args.seconds, sizes = 1, 0.5, SIZES[:2]
    rows = []
    for round_number in range(args.rounds):
        for size in sizes:
            for name in WAYS:
                row = one(f"{name}:{size}", args.seconds, "bench.weights")
                row |= {"way": name, "megabytes": size, "round": round_number}
                rows.append(row)
                print(f"{round_number} {size} MB {name}: {row.get('median_ms', 0):.2f} ms {row.get('error', '')}", flush=True)
    how = (
        f"From publishing until the last of {PROCESSES} processes has the weights in its own network. Median [quartiles] of the "
        f"medians of {args.rounds} interleaved rounds of {args.seconds:g} s.\n\n"
        + "\n".join(f"- {name}: {what}" for name, (_, what) in WAYS.items())
    )
    keep("weights", args.rounds >= 3 and sizes == SIZES, rows, table(rows, sizes), how)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
