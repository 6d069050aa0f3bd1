"""Segments of 100 KB from one process to another on one machine: our ring, Ray's object store, pipes, queues and sockets.

    python -m bench.transport            every way, five interleaved rounds (about three minutes)
    python -m bench.transport --quick    one short round
    python -m bench.transport --only ring,memcpy

In every way the producer writes each segment out of a source of its own and the consumer ends with it in a batch of 64, its number
checked at both ends of the segment. `memcpy` is the ceiling: two processes that copy segments into, and out of, the same 256 MB at
the same time without ever speaking to each other. The ring has 256 MB, too, so that neither lives in a cache. A round is measured
after everything was touched once. A complete comparison is kept with date and commit in `bench/results/`, others in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.train import RESULTS, Row, provenance, spread
from ludus.core.spaces import ArraySpec
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Segments, SegmentSpec
from ludus.transport.ring_buffer import RingReader, RingWriter, Wakeup, create_ring
from ludus.transport.shared_memory import BlockLayout, SharedReader, SharedWriter, ring_capacity

HERE = Path(__file__).parent
BUILD = HERE / ".build"
SIZE = 100 << 10
RING = 256 << 20
LAP = RING // SIZE
BATCH = 64
GATHERED = 16
WAIT_S = 10.0
LIMIT_S = 120.0
SPEC = SegmentSpec(steps=13, observation=ArraySpec((84, 84, 1), np.dtype(np.uint8)), action=ArraySpec((), np.dtype(np.int64)))
"""A segment of one environment with frames of the usual size: 99 KB."""


# -- what every way has in common ---------------------------------------------------------------------------------------


class Maker:
    """The producer's part: a segment, written where it is to be."""

    def __init__(self) -> None:
        self._source = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)

    def write(self, target: np.ndarray, number: int) -> None:
        np.copyto(target, self._source)
        target[:8].view(np.uint64)[0] = number
        target[-8:].view(np.uint64)[0] = number


class Batch:
    """The consumer's part: every segment ends here, and must be the one that is due."""

    def __init__(self) -> None:
        self.slots = np.zeros((BATCH, SIZE), np.uint8)

    def take(self, data: np.ndarray, number: int) -> None:
        np.copyto(self.slots[number % BATCH], data)
        self.check(number)

    def check(self, number: int) -> None:
        slot = self.slots[number % BATCH]
        if not slot[:8].view(np.uint64)[0] == slot[-8:].view(np.uint64)[0] == number:
            raise AssertionError(f"segment {number} did not arrive whole")


class Meter:
    """Counts from the moment at which everything was touched once, for so many seconds."""

    def __init__(self, seconds: float, warm: int) -> None:
        self._seconds, self._warm = seconds, warm
        self.count = 0
        self._began = self._end = self._cpu = 0.0

    def more(self) -> bool:
        """Called before each segment."""
        if self.count == self._warm:
            self._began, self._cpu = time.perf_counter(), tree_cpu()
            self._end = self._began + self._seconds
        self.count += 1
        return not self._end or time.perf_counter() < self._end

    def row(self) -> Row:
        made, took = self.count - 1 - self._warm, time.perf_counter() - self._began
        cpu = tree_cpu() - self._cpu
        return {"segments": made, "seconds": took, "segments_per_s": made / took, "cpu_us_per_segment": cpu / made * 1e6}


def tree_cpu() -> float:
    """Seconds of this process and all that it started."""
    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


@contextlib.contextmanager
def producing(work: Callable[[], None]) -> Iterator[None]:
    """A process beside this one, for as long as the block lasts."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BrokenPipeError, ConnectionError, KeyboardInterrupt):
            work()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ludus-bench-", dir="/dev/shm") as directory:
        yield Path(directory)


# -- the ways -----------------------------------------------------------------------------------------------------------


def memcpy(seconds: float) -> Row:
    shared = np.frombuffer(mmap.mmap(-1, LAP * SIZE), np.uint8).reshape(LAP, SIZE)
    done = np.frombuffer(mmap.mmap(-1, 16), np.float64)

    def produce() -> None:
        maker, meter = Maker(), Meter(seconds, LAP)
        while meter.more():
            maker.write(shared[meter.count % LAP], meter.count)
        done[0] = meter.row()["segments_per_s"]
        while True:  # until the consumer is done, too: neither has the memory to itself
            maker.write(shared[0], 0)

    batch, meter = np.zeros((BATCH, SIZE), np.uint8), Meter(seconds, LAP)
    with producing(produce):
        while meter.more():
            slot = batch[meter.count % BATCH]
            np.copyto(slot, shared[meter.count % LAP])
            slot[:8].view(np.uint64)[0] == slot[-8:].view(np.uint64)[0]  # noqa: B015  (the work of a check)
        row = meter.row()
        end = time.monotonic() + WAIT_S
        while not done[0] and time.monotonic() < end:
            time.sleep(0.001)
        return row | {"segments_per_s": min(row["segments_per_s"], float(done[0]))}


def ring(seconds: float, records: int = LAP) -> Row:
    with scratch() as directory:
        path = directory / "ring"
        create_ring(path, records * SIZE)
        wakeup = Wakeup.create(directory / "wakeup")

        def produce() -> None:
            maker, writer = Maker(), RingWriter(path, directory / "wakeup")
            while (room := writer.reserve(SIZE, WAIT_S)) is not None:
                maker.write(np.frombuffer(room, np.uint8), writer.committed)
                writer.commit()

        batch, meter, reader = Batch(), Meter(seconds, LAP), RingReader(path)
        with producing(produce):
            while meter.more():
                while (record := reader.take()) is None:
                    wakeup.wait(WAIT_S)
                batch.take(np.frombuffer(record.data, np.uint8), record.number)
                reader.release(record)
            return meter.row()


def small_ring(seconds: float) -> Row:
    return ring(seconds, 16)


def segments(seconds: float) -> Row:
    """The same with segments of a sampler: ten arrays, written one by one, and gathered sixteen at a time."""
    layout = BlockLayout(SPEC, 1)
    with scratch() as directory:
        path = directory / "ring"
        create_ring(path, ring_capacity(layout, RING // layout.nbytes))
        wakeup = Wakeup.create(directory / "wakeup")

        def produce() -> None:
            source, writer = _fields(Segments.empty(SPEC, 1)), SharedWriter(path, layout, directory / "wakeup")
            while (block := writer.reserve(WAIT_S)) is not None:
                for target, array in zip(_fields(block), source, strict=True):
                    np.copyto(target, array)
                block.version.fill(writer.committed)
                writer.commit(block)

        batch = Segments.empty(SPEC, GATHERED)
        meter, reader, held = Meter(seconds, RING // layout.nbytes), SharedReader(path, layout), []
        with producing(produce):
            while meter.more():
                while (block := reader.take()) is None:
                    wakeup.wait(WAIT_S)
                held.append(block)
                if len(held) == GATHERED:
                    for target, arrays in zip(_fields(batch), zip(*map(_fields, held), strict=True), strict=True):
                        np.concatenate(arrays, axis=1, out=target)
                    if (batch.version != np.arange(meter.count - GATHERED, meter.count)).any():
                        raise AssertionError(f"the blocks up to {meter.count - 1} did not arrive whole")
                    for block in held:
                        reader.release(block)
                    held.clear()
            return meter.row()


def _fields(block: Segments) -> list[np.ndarray]:
    """The arrays that a learner reads."""
    if "fields" not in block.cache:
        block.cache["fields"] = [getattr(block, name) for name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER) if name != "action_mask"]
    fields: list[np.ndarray] = block.cache["fields"]
    return fields


def pipe(seconds: float) -> Row:
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def produce() -> None:
        maker, made, number = Maker(), np.zeros(SIZE, np.uint8), 0
        while True:
            maker.write(made, number)
            theirs.send_bytes(made.data)
            number += 1

    batch, meter = Batch(), Meter(seconds, LAP // 8)
    with producing(produce):
        while meter.more():
            number = meter.count - 1
            ours.recv_bytes_into(batch.slots[number % BATCH].data)
            batch.check(number)
        return meter.row()


def queue(seconds: float) -> Row:
    made_of: multiprocessing.Queue[np.ndarray] = multiprocessing.Queue(maxsize=BATCH)

    def produce() -> None:
        maker, number = Maker(), 0
        while True:
            made = np.empty(SIZE, np.uint8)  # the queue's thread pickles it later
            maker.write(made, number)
            made_of.put(made, timeout=WAIT_S)
            number += 1

    batch, meter = Batch(), Meter(seconds, LAP // 8)
    with producing(produce):
        while meter.more():
            batch.take(made_of.get(timeout=WAIT_S), meter.count - 1)
        return meter.row()


def unix_socket(seconds: float) -> Row:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.settimeout(WAIT_S)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, side, 1 << 20)

    def produce() -> None:
        maker, made, number = Maker(), np.zeros(SIZE, np.uint8), 0
        while True:
            maker.write(made, number)
            theirs.sendall(struct.pack("<I", SIZE))
            theirs.sendall(made.data)
            number += 1

    def receive(into: memoryview) -> None:
        got = 0
        while got < len(into):
            got += ours.recv_into(into[got:])

    head, batch, meter = bytearray(4), Batch(), Meter(seconds, LAP // 8)
    with producing(produce):
        while meter.more():
            number = meter.count - 1
            receive(memoryview(head))
            receive(batch.slots[number % BATCH].data)
            batch.check(number)
        return meter.row()


@contextlib.contextmanager
def own_ray(store_bytes: int) -> Iterator[Any]:
    """A Ray instance of this process alone: own directory, own token, nothing of anybody else's environment."""
    directory = Path(tempfile.mkdtemp(prefix="lray-", dir="/tmp"))  # a short path: sockets lie in it
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(directory / "ray"),
        _node_ip_address="127.0.0.1",
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _through_ray(seconds: float, refs_per_call: int) -> Row:
    with own_ray(1 << 30) as ray:

        class Consumer:
            def __init__(self) -> None:
                self._batch, self._number = Batch(), 0

            def take(self, refs: list[Any]) -> int:
                for data in ray.get(refs):
                    self._batch.take(data, self._number)
                    self._number += 1
                return len(refs)

        consumer = ray.remote(num_cpus=1)(Consumer).remote()
        maker, made, number = Maker(), np.zeros(SIZE, np.uint8), 0
        under_way: list[Any] = []
        ahead = max(2, BATCH // refs_per_call)
        warm = 4 * BATCH // refs_per_call
        meter = Meter(seconds, warm)
        while meter.more():
            refs = []
            for _ in range(refs_per_call):
                maker.write(made, number)
                refs.append(ray.put(made))
                number += 1
            under_way.append(consumer.take.remote(refs))
            if len(under_way) >= ahead:
                ray.get(under_way.pop(0), timeout=WAIT_S)
        ray.get(under_way, timeout=WAIT_S)
        row = meter.row()
        calls = row.pop("segments")
        row["segments"] = calls * refs_per_call
        row["segments_per_s"] *= refs_per_call
        row["cpu_us_per_segment"] /= refs_per_call
        return row


def ray_objects(seconds: float) -> Row:
    return _through_ray(seconds, 1)


def ray_objects_in_lots(seconds: float) -> Row:
    return _through_ray(seconds, 16)


WAYS: dict[str, tuple[Callable[[float], Row], str]] = {
    "memcpy": (memcpy, "two processes copy into and out of the same 256 MB, no hand-over: the ceiling"),
    "ring": (ring, "ludus.transport.ring_buffer, records of 100 KB written in place, copied once into the batch"),
    "ring of 16": (small_ring, "the same with room for 16 records, as a worker's ring has: it stays in the cache"),
    "segments": (
        segments,
        "ludus.transport.shared_memory, segments of 99 KB: ten arrays written in place, gathered 16 at a time into a batch",
    ),
    "ray": (ray_objects, "ray.put, one actor call per segment (64 under way), ray.get, copied into the batch"),
    "ray, 16 a call": (ray_objects_in_lots, "ray.put of each segment, 16 references per actor call"),
    "pipe": (pipe, "multiprocessing.Pipe, send_bytes, recv_bytes_into the batch"),
    "queue": (queue, "multiprocessing.Queue of 64, pickled arrays, copied into the batch"),
    "unix socket": (unix_socket, "a stream with 1 MB buffers, sendall, recv_into the batch"),
}


# -- rounds and their record --------------------------------------------------------------------------------------------


def one(name: str, seconds: float, module: str = "bench.transport") -> Row:
    """In a process of its own, so that none inherits what another left."""
    command = [sys.executable, "-m", module, "--one", name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, timeout=LIMIT_S)
    if done.returncode:
        return {"way": name, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return {"way": name} | row


def table(rows: Sequence[Row]) -> str:
    bases = ("memcpy", "ray", "ray, 16 a call")
    titles = " | ".join(f"÷ {base}" for base in bases)
    lines = [f"| way | rounds | segments/s | MB/s | CPU µs/segment | {titles} |", "|---|" + "---:|" * 7]
    medians = {name: statistics.median(v) for name in WAYS if (v := _column(rows, name, "segments_per_s"))}
    for name in WAYS:
        rates = _column(rows, name, "segments_per_s")
        failed = [row["error"] for row in rows if row["way"] == name and "error" in row]
        if failed:
            lines.append(f"| {name} | failed: {failed[0][:100]} | | | | | | |")
        if rates:
            ratios = " | ".join(f"{medians[name] / medians[base]:.2f}" if base in medians else "" for base in bases)
            mb = medians[name] * SIZE / 1e6
            cpu = spread(_column(rows, name, "cpu_us_per_segment"), 1)
            lines.append(f"| {name} | {len(rates)} | {spread(rates)} | {mb:,.0f} | {cpu} | {ratios} |")
    return "\n".join(lines)


def _column(rows: Sequence[Row], name: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["way"] == name and key in row]


def keep(name: str, complete: bool, rows: list[Row], body: str, how: str) -> None:
    head = provenance()
    place = RESULTS if complete else BUILD
    place.mkdir(exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps(head | {"how": how, "rows": rows}, indent=1))
    text = f"# {name}\n\n{head['date']}, commit {head['commit']}, {head['cpu']}, Python {head['python']}\n\n{how}\n\n{body}\n"
    (place / f"{name}.md").write_text(text)
    print(f"\n{text}\nkept in {place / name}.md and .json")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help=f"by comma; all: {', '.join(WAYS)}")
    parser.add_argument("--quick", action="store_true", help="one round of half a second")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(WAYS[args.one][0](args.seconds)))
        return 0
    if args.quick:
        args.rounds, args.seconds = 1, 0.5
    names = [name.strip() for name in args.only.split(",") if name.strip()] or list(WAYS)
    rows = []
    for round_number in range(args.rounds):
        for name in names:
            row = one(name, args.seconds) | {"round": round_number}
            rows.append(row)
            print(f"{round_number} {name}: {row.get('segments_per_s', 0):,.0f} segments/s {row.get('error', '')}", flush=True)
    how = (
        f"Segments of {SIZE:,} bytes from one process to another. Median [quartiles] of {args.rounds} interleaved rounds of "
        f"{args.seconds:g} s, after one lap. "
        "CPU counts all processes of a way.\n\n" + "\n".join(f"- {name}: {WAYS[name][1]}" for name in names)
    )
    keep("transport", names == list(WAYS) and args.rounds >= 3, rows, table(rows), how)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
