"""All-reduce of gradients between the learners of a group, in shared memory or over torch.distributed.

All members start from the same weights, random state and batch, and apply the same sums: their weights stay equal without
further communication.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludus.errors import StoreFull, UsageError, WorkerFailed
from ludus.transport.ring_buffer import MemoryFence

COLLECTIVE_S = 60.0
"""Time-out of an all-reduce. Members do the same work, so a longer wait means that one of them hangs."""

NET_CARD = "NET_CARD_NAME"
"""Environment variable with the network interface between learners on several machines."""

_SPINS = 3000  # about 0.2 ms of polling before the core is yielded
_YIELD_S = 0.005
_SLEEP_S = 0.0005
_CHECK_S = 0.02
_CACHE_LINE = 64
_PAGE = 4096


class SharedMemoryAllReduce:
    """Learners of one machine, on CPUs, over a file in shared memory.

    A sum is one copy into this member's slot, a wait for the counters of all members and one pass over the slots: about 10 µs
    for a small network, where a collective over loopback sockets takes hundreds. Two sets of slots alternate: a member that
    starts a sum has finished reading the one before the last, so no member overwrites a slot that another still reads.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        *,
        timeout_s: float = COLLECTIVE_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called periodically while waiting; it raises if a member is known to be lost."""
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        head = _head_bytes(size)
        self._capacity = (len(self._map) - head) // (2 * size * 4)
        floats = torch.frombuffer(self._map, dtype=torch.float32, offset=head, count=2 * size * self._capacity)
        self._slots = floats.view(2, size, self._capacity)
        self._counts = memoryview(self._map)[:head].cast("q")
        self._turn = 0
        self._fence = MemoryFence()

    @staticmethod
    def create(path: Path, size: int, numbers: int) -> None:
        """Create the file for sums of up to `numbers` floats. Raises StoreFull."""
        slot_bytes = -(-numbers * 4 // _CACHE_LINE) * _CACHE_LINE
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _head_bytes(size) + 2 * size * slot_bytes)
        except OSError as error:
            path.unlink()
            raise StoreFull(
                f"{path.parent} has no space for the gradients of {size} learners ({2 * size * slot_bytes:,} bytes): {error}.",
                "Enlarge it, or use fewer learners.",
            ) from error
        finally:
            os.close(fd)

    def sum_(self, tensor: Tensor) -> None:
        n = tensor.numel()
        if n > self._capacity:
            raise UsageError(f"Cannot sum {n} numbers: the shared memory of the learners holds {self._capacity}.")
        self._turn += 1
        slots, mine = self._slots[self._turn & 1], self.rank * 8
        slots[self.rank, :n].copy_(tensor)
        self._counts[mine + 1 + (self._turn & 1)] = n
        self._fence()
        self._counts[mine] = self._turn
        for other in range(self.size):
            if other != self.rank:
                self._wait_for(other, n)
        self._fence()
        torch.add(slots[0, :n], slots[1, :n], out=tensor)  # in the order of ranks: the same rounding on every member
        for other in range(2, self.size):
            tensor.add_(slots[other, :n])

    def _wait_for(self, other: int, n: int) -> None:
        counts, at, turn = self._counts, other * 8, self._turn
        for _ in range(_SPINS):
            if counts[at] >= turn:
                break
        else:
            if not _wait_until(lambda: counts[at] >= turn, self._timeout_s, self._check):
                raise WorkerFailed(
                    f"Learner {other} did not join an all-reduce within {self._timeout_s:g} s; learner {self.rank} gave up.",
                    "It hangs or its machine is overloaded: see its log, and use fewer learners than cores.",
                )
        if counts[at + 1 + (turn & 1)] != n:
            raise WorkerFailed(
                f"Learner {other} sums {counts[at + 1 + (turn & 1)]} numbers where learner {self.rank} sums {n}: "
                "they have diverged.",
                "An algorithm with several learners must take its random numbers from its own seeded generator.",
            )

    def close(self) -> None:
        with contextlib.suppress(ValueError):  # already closed
            self._counts.release()
        self._slots = torch.empty(0)  # drop the view of the mapping
        with contextlib.suppress(BufferError):  # a view still exists; the mapping is freed with it
            self._map.close()


class TorchAllReduce:
    """Learners over torch.distributed: gloo (also between machines), or nccl if each has its own accelerator."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        address: str = "127.0.0.1",
        timeout_s: float = COLLECTIVE_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Blocks until all members have joined. `address`: of this member, unless NET_CARD_NAME selects an interface.

        `check` as in SharedMemoryAllReduce.
        """
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        try:
            self._backend = _process_group(backend, store, rank, size, datetime.timedelta(seconds=timeout_s), address)
        except RuntimeError as error:
            raise WorkerFailed(
                f"Learner {rank} of {size} could not join the others: {_error_line(error)}",
                f"All must reach each other; {NET_CARD} selects the network interface.",
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        try:
            work = self._backend.allreduce([tensor])
            # Not wait(): it detects the death of a direct neighbour only.
            if not _wait_until(work.is_completed, self._timeout_s + 1.0, self._check):
                raise RuntimeError("timed out")
            work.wait()
        except RuntimeError as error:
            raise WorkerFailed(
                f"Learner {self.rank} of {self.size} lost the others in an all-reduce: {_error_line(error)}",
                f"One of them died or did not join within {self._timeout_s:g} s: see their logs.",
            ) from error

    def close(self) -> None:
        """Wait for a running sum: its other members must have exited or given up."""
        self._backend = None


def _process_group(backend: str, store: Any, rank: int, size: int, timeout: datetime.timedelta, address: str) -> Any:
    card, cards = os.environ.get(NET_CARD), [name for _, name in socket.if_nameindex()]
    if card and card not in cards:
        raise UsageError(f"{NET_CARD} is {card!r}, which is not a network interface.", f"Available: {', '.join(cards)}.")
    if backend == "nccl":
        if card:
            os.environ["NCCL_SOCKET_IFNAME"] = card
        kind: Any = torch.distributed.ProcessGroupNCCL  # only in builds for accelerators
        options = kind.Options()
    else:
        kind = torch.distributed.ProcessGroupGloo  # absent where torch is built without it
        options = kind._Options()
        options._threads = 1
        options._devices = [kind.create_device(interface=card) if card else kind.create_device(hostname=address)]
    options._timeout = timeout
    return kind(store, rank, size, options)


def _wait_until(over: Callable[[], bool], timeout_s: float, check: Callable[[], None]) -> bool:
    """Poll until `over` returns True; first continuously, later with sleeps. Errors of `check` are passed on."""
    began = checked = time.monotonic()
    while not over():
        now = time.monotonic()
        if now - checked >= _CHECK_S:
            checked = now
            check()
        if now - began >= timeout_s:
            return False
        if now - began < _YIELD_S:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)
    return True


def _head_bytes(size: int) -> int:
    return -(-size * _CACHE_LINE // _PAGE) * _PAGE


def _error_line(error: Exception) -> str:
    """The message of a C++ error without source location and advice."""
    line = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line)
