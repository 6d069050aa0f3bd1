"""Sizes of the images of docker/Dockerfile, and the time from `podman run` to the end of the first training step.

    python -m bench.container_images             build all targets (the first time half an hour) and measure them
    python -m bench.container_images cpu gym     these only; kept in bench/.build, with --keep in bench/results

Needs root on Debian (`scripts/tools.sh podman debootstrap`). The base is a minimal Debian instead of python:3.11-slim-bookworm, because no registry
is used; torch is the CPU build that pip installs on this machine. `gpu` is left out: it needs another base and a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from bench.train import Row
from bench.transport import keep
from tests.system.containers import BASE, ContainerRig, default_directory, targets

GOAL_BYTES = 1.2e9
ROUNDS = 3
TRAIN = (
    "train",
    "CartPole-v1",
    "--num-workers",
    "0",
    "--stop",
    "iterations=1",
    "--set",
    "evaluation_duration=0",
    "--local-dir",
    "/tmp/runs",
)


def measure(rig: ContainerRig, target: str) -> Row:
    began = time.monotonic()
    image = rig.build(target)
    build_s = time.monotonic() - began
    sbom = json.loads(rig.run(image, "/usr/local/lib/ludus/sbom.cdx.json", options=("--entrypoint", "cat")).stdout)
    row: Row = {
        "target": target,
        "bytes": rig.size(image),
        "compressed_bytes": rig.compressed_size(image),
        "packages": len(sbom["components"]),
        "build_s": round(build_s, 1),
    }
    if target == "cpu":
        row["train_s"] = sorted(round(seconds_of_training(rig, image), 2) for _ in range(ROUNDS))
    print(json.dumps(row), flush=True)
    return row


def seconds_of_training(rig: ContainerRig, image: str) -> float:
    """A whole container: start, one update of CartPole, a checkpoint, end."""
    began = time.monotonic()
    done = rig.run(image, *TRAIN)
    if done.returncode != 0:
        raise SystemExit(f"the training failed: {done.stderr[-2000:]}")
    return time.monotonic() - began


def table(rows: Sequence[Row], base: int) -> str:
    lines = ["| target | size, GB | compressed, GB | packages |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['target']} | {row['bytes'] / 1e9:.2f} | {row['compressed_bytes'] / 1e9:.2f} | {row['packages']} |"
        for row in rows
    ]
    lines += ["", f"The base has {base / 1e6:.0f} MB of these."]
    for row in rows:
        if row["target"] == "cpu":
            verdict = "met" if row["bytes"] <= GOAL_BYTES else "missed"
            lines += [f"`cpu`: the goal of at most {GOAL_BYTES / 1e9:.1f} GB is {verdict}.", ""]
            lines += [
                f"A container of `cpu` that makes one update of CartPole and a checkpoint takes {statistics.median(row['train_s']):.1f} s from "
                f"start to end (median of {ROUNDS}: {', '.join(map(str, row['train_s']))}), on a read-only root file system."
            ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--keep", action="store_true", help="keep the result of some targets in bench/results")
    given = parser.parse_args(argv)
    every = [target for target in targets() if target != "gpu"]
    rig = ContainerRig(default_directory())
    try:
        rows = [measure(rig, target) for target in given.targets or sorted(every, key=lambda target: target != "cpu")]
        how = (
            "Images built by buildah on a minimal Debian 12 without documentation (as python:3.11-slim-bookworm is), with the CPU build of torch of "
            "constraints.txt. *Size* is the sum of the uncompressed layers, as `docker images` shows it; *compressed* the sum of the layers "
            "packed by gzip, as a registry stores them. All but gamecore share the layers of cpu."
        )
        keep("container-images", given.keep or not given.targets, rows, table(rows, rig.size(BASE)), how)
    finally:
        rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
