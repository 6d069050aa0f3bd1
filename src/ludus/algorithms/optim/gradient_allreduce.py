"""Learners that share a gradient: each computes a part of it, and `sum_` gives all of them the whole.

Every member has the same weights, the same random numbers and the same batch. As long as each applies the same sums, they stay
equal, and none has to be told what another did.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ludus.errors import StoreFull, UsageError, WorkerFailed

COLLECTIVE_S = 60.0
"""How long members wait for the slowest of them: they do the same work, so that more than moments mean that one is stuck."""

NET_CARD = "NET_CARD_NAME"
"""The environment variable that names the network interface over which learners of several machines talk."""

_SPINS = 3000  # about 0.2 ms of looking before the core is offered to somebody else
_YIELDING_S = 0.005
_NAP_S = 0.0005
_CHECK_S = 0.02
_LINE = 64
_PAGE = 4096


class Group(Protocol):
    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous float32 vector by its sum over all members, the same bits on each. Raises WorkerFailed."""
        ...

    def close(self) -> None: ...


class Alone:
    """One learner: nothing to add."""

    rank, size = 0, 1

    def sum_(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


ALONE: Group = Alone()


class SharedGroup:
    """Learners of one machine, on CPUs, over a file in shared memory.

    A sum is one copy into the own slot, a look at everybody's counter and one pass over the slots: about 10 µs for a small
    network, where a collective over loopback sockets takes hundreds. There are two sets of slots, used in turn: whoever begins
    a sum has read all of the one before the last, so that nobody overwrites what another still reads.
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
        """`check` is called now and then while waiting; it raises when it knows that waiting is in vain."""
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        head = _head_bytes(size)
        self._room = (len(self._map) - head) // (2 * size * 4)
        floats = torch.frombuffer(self._map, dtype=torch.float32, offset=head, count=2 * size * self._room)
        self._slots = floats.view(2, size, self._room)
        self._counts = memoryview(self._map)[:head].cast("q")
        self._turn = 0

    @staticmethod
    def create(path: Path, size: int, numbers: int) -> None:
        """Room for sums of up to `numbers` floats. Raises StoreFull."""
        room = -(-numbers * 4 // _LINE) * _LINE
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _head_bytes(size) + 2 * size * room)
        except OSError as error:
            path.unlink()
            raise StoreFull(
                f"{path.parent} has no room for the gradients of {size} learners ({2 * size * room:,} bytes): {error}.",
                "Enlarge it, or use fewer learners.",
            ) from error
        finally:
            os.close(fd)

    def sum_(self, tensor: Tensor) -> None:
        n = tensor.numel()
        if n > self._room:
            raise UsageError(f"A sum of {n} numbers over learners that have room for {self._room}.")
        self._turn += 1
        slots, mine = self._slots[self._turn & 1], self.rank * 8
        slots[self.rank, :n].copy_(tensor)
        self._counts[mine + 1 + (self._turn & 1)] = n
        _fence()
        self._counts[mine] = self._turn
        for other in range(self.size):
            if other != self.rank:
                self._await(other, n)
        _fence()
        torch.add(slots[0, :n], slots[1, :n], out=tensor)  # in order of ranks: the same rounding everywhere
        for other in range(2, self.size):
            tensor.add_(slots[other, :n])

    def _await(self, other: int, n: int) -> None:
        counts, at, turn = self._counts, other * 8, self._turn
        for _ in range(_SPINS):
            if counts[at] >= turn:
                break
        else:
            self._await_long(other)
        if counts[at + 1 + (turn & 1)] != n:
            raise WorkerFailed(
                f"Learner {other} adds {counts[at + 1 + (turn & 1)]} numbers where learner {self.rank} adds {n}: "
                "they no longer do the same.",
                "An algorithm that several learners share must take its random numbers from its own seeded generator.",
            )

    def _await_long(self, other: int) -> None:
        if not _wait_until(lambda: self._counts[other * 8] >= self._turn, self._timeout_s, self._check):
            raise WorkerFailed(
                f"Learner {other} did not come to a common sum within {self._timeout_s:g} s; learner {self.rank} gave up.",
                "It hangs, or its machine is overloaded: see its log, and use fewer learners than cores.",
            )

    def close(self) -> None:
        with contextlib.suppress(ValueError):  # closed before
            self._counts.release()
        self._slots = torch.empty(0)  # of the mapping
        with contextlib.suppress(BufferError):  # a tensor of it still lives; the mapping goes with it
            self._map.close()


class TorchGroup:
    """Learners over torch.distributed: gloo, between machines too; nccl where each has an accelerator of its own."""

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
        """All members call this at about the same time. `address`: the own one, unless NET_CARD_NAME selects an interface.

        `check` as in SharedGroup.
        """
        self.rank, self.size = rank, size
        self._timeout_s, self._check = timeout_s, check
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        try:
            self._backend = (_nccl if backend == "nccl" else _gloo)(
                store, rank, size, datetime.timedelta(seconds=timeout_s), address
            )
        except RuntimeError as error:
            raise WorkerFailed(
                f"Learner {rank} of {size} could not join the others: {_said(error)}",
                f"All must reach each other; {NET_CARD} selects the network interface.",
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        try:
            work = self._backend.allreduce([tensor])
            # Not wait(): it would notice the death of a neighbour, but not that of a neighbour's neighbour.
            if not _wait_until(work.is_completed, self._timeout_s + 1.0, self._check):
                raise RuntimeError("no answer")
            work.wait()
        except RuntimeError as error:
            raise WorkerFailed(
                f"Learner {self.rank} of {self.size} lost the others in a common sum: {_said(error)}",
                f"One of them died, or did not come within {self._timeout_s:g} s: see their logs.",
            ) from error

    def close(self) -> None:
        """Waits for a sum that is under way: those who were in it must be gone, or have given up."""
        self._backend = None


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, address: str) -> Any:
    kind: Any = torch.distributed.ProcessGroupGloo  # absent where torch is built without it
    options = kind._Options()
    options._timeout = timeout
    options._threads = 1
    card = os.environ.get(NET_CARD)
    if card:
        _check_card(card)
    options._devices = [kind.create_device(interface=card) if card else kind.create_device(hostname=address)]
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta, address: str) -> Any:
    card = os.environ.get(NET_CARD)
    if card:
        _check_card(card)
        os.environ["NCCL_SOCKET_IFNAME"] = card
    kind: Any = torch.distributed.ProcessGroupNCCL  # of builds for accelerators
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)


def _check_card(card: str) -> None:
    names = [name for _, name in socket.if_nameindex()]
    if card not in names:
        raise UsageError(f"{NET_CARD} is {card!r}, and there is no such network interface.", f"There are: {', '.join(names)}.")


def _wait_until(over: Callable[[], bool], timeout_s: float, check: Callable[[], None]) -> bool:
    """Looking at it all the time at first, less often later; what `check` raises ends it."""
    began = checked = time.monotonic()
    while not over():
        now = time.monotonic()
        if now - checked >= _CHECK_S:
            checked = now
            check()
        if now - began >= timeout_s:
            return False
        if now - began < _YIELDING_S:
            os.sched_yield()
        else:
            time.sleep(_NAP_S)
    return True


def _head_bytes(size: int) -> int:
    return -(-size * _LINE // _PAGE) * _PAGE


def _said(error: Exception) -> str:
    """What a library in C++ complains of, without the place in its sources and its advice."""
    line = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line)


_lock = threading.Lock()


def _fence() -> None:
    """What was written before is seen before what is written after, on any processor: two locked operations in a row."""
    with _lock:
        pass
    with _lock:
        pass
