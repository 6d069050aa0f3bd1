"""Memory between processes of one machine: segments travel as messages over a unix socket in a private directory.

The writing half lives in workers that play, the reading half where the learner is. Nothing blocks whoever plays: what cannot
be sent is dropped and counted there, and what waits too long for the learner is dropped, oldest first, and counted here.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ludus.errors import Damaged, MemoryClosed
from ludus.memory.memory import MemoryStats
from ludus.tree import decode, encode
from ludus.types import Segments, SegmentSpec

log = logging.getLogger(__name__)

_SIZE = struct.Struct("<Q")
_MAX_MESSAGE = 1 << 30
_OUTBOX_BYTES = 64 << 20  # what waits to be sent
_CONNECT_S = 30.0


class StreamWriter:
    """For the event loop of a worker that plays. `reserve` always finds room; a thread sends."""

    def __init__(self, spec: SegmentSpec, path: str) -> None:
        self._spec = spec
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CONNECT_S)
        self._socket.connect(path)
        self._socket.settimeout(None)
        self._outbox: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._committed = self._dropped = 0
        threading.Thread(target=self._send, name="segments", daemon=True).start()

    def reserve(self, timeout_s: float) -> Segments | None:
        return Segments.empty(self._spec, 1)

    def commit(self, segments: Segments) -> None:
        segments = segments.trimmed()
        self.send(segments.arrays(), {"model": segments.model, "steps": segments.spec.steps})
        self._committed += 1

    def send(self, arrays: Any, meta: dict[str, Any]) -> None:
        data = encode(arrays, meta)
        with self._changed:
            self._outbox.append(data)
            self._bytes += len(data)
            while len(self._outbox) > 1 and self._bytes > _OUTBOX_BYTES:
                self._bytes -= len(self._outbox.popleft())
                self._dropped += 1
            self._changed.notify()

    def abandon(self, segments: Segments) -> None:
        pass

    def stats(self) -> MemoryStats:
        return MemoryStats(committed=self._committed, dropped=self._dropped, waiting=len(self._outbox))

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._closed)
                if not self._outbox:
                    return
                data = self._outbox.popleft()
                self._bytes -= len(data)
            try:
                self._socket.sendall(_SIZE.pack(len(data)))
                self._socket.sendall(data)
            except OSError:
                if not self._closed:
                    log.exception("segments cannot be sent any more: the learner has gone")
                return

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._socket.close()


class StreamMemory:
    """For the learner: takes what all writers send, in the order of arrival, for the models of `specs`.

    Of each model at most `capacity` steps wait; what is older is dropped and counted, so that nothing stale is learned from.
    """

    def __init__(self, specs: dict[str, SegmentSpec], path: str, capacity: int) -> None:
        self._specs, self._capacity = specs, capacity
        self._steps = dict.fromkeys(specs, 0)
        self._ready: dict[str, deque[Segments]] = {name: deque() for name in specs}
        self._changed = threading.Condition()
        self._closed = False
        self._committed = self._taken = self._released = self._dropped = 0
        self.counters: dict[str, dict[str, float]] = {}
        """What each writer said of itself last, by its name."""
        self.past: dict[str, float] = {}
        """What those had counted that were replaced."""
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(path)
        self._server.listen(64)
        self._path = Path(path)
        threading.Thread(target=self._accept, name="segments", daemon=True).start()

    def of(self, model: str) -> ModelStream:
        return ModelStream(self, model)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._receive, args=(peer,), name="segments", daemon=True).start()

    def _receive(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            while True:
                head = stream.read(_SIZE.size)
                if len(head) < _SIZE.size:
                    return  # the writer has gone; what it had not finished is lost with it
                (size,) = _SIZE.unpack(head)
                if size > _MAX_MESSAGE:
                    log.error("a writer of segments sent rubbish; it is cut off")
                    return
                data = stream.read(size)
                if len(data) < size:
                    return
                try:
                    self._take_in(data)
                except (Damaged, KeyError, TypeError, ValueError) as error:
                    log.error("a segment could not be read: %s", error)

    def _take_in(self, data: bytes) -> None:
        arrays, meta = decode(data)
        with self._changed:
            if "counters" in meta:
                self._count(str(meta["writer"]), {str(key): float(value) for key, value in meta["counters"].items()})
                return
            spec = replace(self._specs[meta["model"]], steps=int(meta["steps"]))
            waiting = self._ready[spec.model]
            waiting.append(replace(Segments.empty(replace(spec, steps=0), 0), spec=spec, model=spec.model, **arrays))
            self._committed += 1
            self._steps[spec.model] += spec.steps
            while len(waiting) > 1 and self._steps[spec.model] > self._capacity:
                self._steps[spec.model] -= waiting.popleft().spec.steps
                self._dropped += 1
            self._changed.notify_all()

    def _count(self, writer: str, counters: dict[str, float]) -> None:
        before = self.counters.get(writer, {})
        if counters.get("requests", 0.0) < before.get("requests", 0.0):  # it was replaced, and counts from 0 again
            for key, value in before.items():
                self.past[key] = self.past.get(key, 0.0) + value
        self.counters[writer] = counters

    def total(self, key: str) -> float:
        """Over all writers, those that died included."""
        return self.past.get(key, 0.0) + sum(counters.get(key, 0.0) for counters in self.counters.values())

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, or the time is up."""
        with self._changed:
            before = self._committed
            self._changed.wait_for(lambda: self._committed != before or self._closed, timeout_s)

    def take(self, model: str, timeout_s: float) -> Segments | None:
        with self._changed:
            waiting = self._ready[model]
            if timeout_s > 0:
                self._changed.wait_for(lambda: waiting or self._closed, timeout_s)
            if waiting:
                self._taken += 1
                oldest = waiting.popleft()
                self._steps[model] -= oldest.spec.steps
                return oldest
            if self._closed:
                raise MemoryClosed("The memory was closed.")
            return None

    def released(self) -> None:
        self._released += 1

    def stats(self) -> MemoryStats:
        with self._changed:
            waiting = sum(map(len, self._ready.values()))
            return MemoryStats(self._committed, self._taken, self._released, self._dropped, waiting)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._path.unlink(missing_ok=True)


class ModelStream:
    """One model's part of a StreamMemory."""

    def __init__(self, memory: StreamMemory, model: str) -> None:
        self._memory, self._model = memory, model

    def take(self, timeout_s: float) -> Segments | None:
        return self._memory.take(self._model, timeout_s)

    def release(self, segments: Segments) -> None:
        self._memory.released()

    def stats(self) -> MemoryStats:
        return self._memory.stats()

    def close(self) -> None:
        self._memory.close()


def counted(writer: StreamWriter, name: str, counters: dict[str, float]) -> None:
    """Tell the learner's side how this worker is doing."""
    writer.send(np.zeros(0, np.uint8), {"writer": name, "counters": counters})
