"""One way at one size for so many seconds: what arrived, what was lost, and what it cost whom."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

from bench.fleets import items, ways
from bench.fleets.services import RedisServer, password_known, redis_server
from bench.fleets.ways import Place, Way
from bench.train import Row
from ludus.process.host import keep_freed_memory


def measured(way: Way, records: Path, size: str, seconds: float) -> Row:
    keep_freed_memory()  # as in our own processes, for all: half of what an item of 1 MB costs is faults otherwise
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server(durable=way.server == "durable")) if way.server else None
        if server is not None:
            stack.enter_context(password_known(server.password))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-bench-", dir="/dev/shm"))
        flight = np.frombuffer(mmap.mmap(-1, 16), np.int64)
        place = Place(items.load(records, size), Path(directory), flight, server)
        if way is ways.WAYS["ring"]:
            ways.prepare_ring(place)
        empty = _memory(server)
        writer = stack.enter_context(producing(lambda: way.produce(place), way.threads))
        row = _metered(way, place, seconds, writer)
        return row | ({"server_peak_mb": (_memory(server) - empty) / 1e6, **_hung_up(server)} if server else {})


def _metered(way: Way, place: Place, seconds: float, writer: int) -> Row:
    """Counts once the room was filled twice, or for a second at most where that takes long."""
    watched = {"reader": os.getpid(), "writer": writer} | ({"server": place.server.pid} if place.server else {})
    if way.threads:
        del watched["writer"]  # the same process
    arrivals = way.consume(place)
    expected, lost = 0, 0
    warm_until, began, count = time.perf_counter() + min(1.0, seconds), 0.0, 0
    for seen, number in enumerate(arrivals, 1):
        place.flight[1] = number + 1
        if number < expected:
            raise AssertionError(f"item {number} came after {expected - 1}")
        lost, expected = lost + number - expected, number + 1
        now = time.perf_counter()
        if began:
            count += 1
            if now >= began + seconds:
                break
        elif seen >= 2 * ways.ROOM or now > warm_until:
            began, lost, used = now, 0, _cpu(watched)
    if lost and not way.lossy:
        raise AssertionError(f"{lost} items were lost")
    took = now - began
    cpu = {
        f"{who}_cpu_us": (after - before) / count * 1e6
        for (who, after), before in zip(_cpu(watched).items(), used.values(), strict=True)
    }
    row: Row = {"items": count, "seconds": took, "items_per_s": count / took, "mb_per_s": count * place.item.nbytes / took / 1e6}
    row |= cpu | {"cpu_us": sum(cpu.values()), "lost": lost, "lost_share": lost / (lost + count)}
    return row


def _cpu(watched: dict[str, int]) -> dict[str, float]:
    """Seconds so far of each of them."""
    times = {who: psutil.Process(pid).cpu_times() for who, pid in watched.items()}
    return {who: float(t.user + t.system) for who, t in times.items()}


def _memory(server: RedisServer | None) -> int:
    return 0 if server is None else int(server.client().info("memory")["used_memory_peak"])


def _hung_up(server: RedisServer) -> Row:
    """How often the server cut off a reader that did not keep up; not every version counts it."""
    found = server.client().info("stats").get("client_output_buffer_limit_disconnections")
    return {} if found is None else {"hung_up": found}


@contextlib.contextmanager
def producing(work: Callable[[], None], threads: bool) -> Iterator[int]:
    """The writer beside this process, or in it, for as long as the block lasts; its pid. A writer that fails says why."""
    if threads:
        threading.Thread(target=work, daemon=True).start()  # ends with the process, which measures nothing else
        yield os.getpid()
        return
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
