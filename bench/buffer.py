"""Items per second through a RemoteBuffer: two producer processes, one consumer process, large items in shared memory or not.

    python -m bench.buffer [--seconds 3] [--rounds 3]

In turn, several times: through rings (as it is), and all through the hub's socket (`SHARED_BYTES` out of reach). *kept* pushes
with drop=False and 32 of them under way, so that every item arrives; *flood* pushes as fast as it can, and what the consumer
got is counted. The hub is in the process that measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

import ludus
from bench.train import provenance
from ludus.process.workers.supervisor import Context
from ludus.remote import buffer as buffers
from ludus.remote.context import RunContext, adopt

ROOT = Path(__file__).parent.parent
SIZES = {"1 KB": 1 << 10, "100 KB": 100 << 10, "1 MB": 1 << 20}
BATCH, UNDER_WAY, NEVER = 16, 32, 1 << 40


def produce(context: Context, ticket, name: str, size: int, shared: bool, drop: bool) -> None:
    adopt(ticket)
    if not shared:
        buffers.SHARED_BYTES = NEVER
    buffer = ludus.RemoteBuffer(name)
    item = {"observation": np.random.default_rng(os.getpid()).integers(0, 255, size, np.uint8), "reward": 1.0}
    under_way: deque[buffers.Pushed] = deque()
    while not context.stopping:
        under_way.append(buffer.push(item, drop=drop))
        if len(under_way) >= UNDER_WAY:
            under_way.popleft().wait(30)


def consume(context: Context, ticket, name: str) -> None:
    adopt(ticket)
    buffer = ludus.RemoteBuffer(name, batch_size=BATCH)
    while not context.stopping:
        try:
            batch = buffer.take(0.2)
        except TimeoutError:
            continue
        assert batch["reward"].shape == (BATCH,)


def measured(session: RunContext, number: int, size: int, shared: bool, drop: bool, seconds: float) -> dict:
    name = f"b{number}"
    buffer = ludus.RemoteBuffer(name, size=128)
    start = session.supervisor.start
    words = (session.ticket(1), name)
    workers = [start(f"consumer-{number}", consume, *words)]
    workers += [start(f"producer-{number}-{i}", produce, *words, size, shared, drop) for i in range(2)]
    while buffer.stats()["taken"] < 200:  # everything runs, the rings are there
        time.sleep(0.05)
    before, began = buffer.stats(), time.perf_counter()
    time.sleep(seconds)
    after, took = buffer.stats(), time.perf_counter() - began
    for worker in reversed(workers):
        worker.stop()
    counts = {key: after[key] - before[key] for key in ("taken", "pushed", "dropped", "shared")}
    return {"items_per_s": counts["taken"] / took, "shared": counts["shared"] / max(1, counts["pushed"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[dict]] = {}
    number = 0
    with tempfile.TemporaryDirectory() as project, ludus.init(project=project, trial="bench", report_interval_s=600) as session:
        for _ in range(options.rounds):
            for label, size in SIZES.items():
                for manner, drop in (("kept", False), ("flood", True)):
                    for way, shared in (("socket", False), ("ring", True)):
                        found = measured(session, number, size, shared, drop, options.seconds)
                        figures.setdefault(f"{label} {manner} {way}", []).append(found)
                        number += 1
    rows = {}
    for key, found in figures.items():
        rates = [each["items_per_s"] for each in found]
        rows[key] = {"items_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
        rows[key]["shared"] = statistics.median(each["shared"] for each in found)
        print(f"{key:20s} {statistics.median(rates):10,.0f} [{min(rates):,.0f}–{max(rates):,.0f}] items/s", flush=True)
    out = ROOT / "bench" / "results" / "buffer.json"
    out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
