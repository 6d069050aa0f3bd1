"""The actors that `bench.serving.ours` serves. A module of their own, so that worker processes can import it by name."""

from __future__ import annotations

import numpy as np

import ludus


class Echo(ludus.Actor):
    async def tick(self, body: bytes) -> bytes:
        return body


class Mlp(ludus.Actor):
    def __init__(self, model: str) -> None:
        self.model = ludus.RemoteModel(name=model)

    async def tick(self, body: bytes) -> bytes:
        return (await self.model.forward(np.frombuffer(body, np.float32))).tobytes()


class Counter(ludus.Actor):
    """Knows who it is and how often it was asked, so that a reply of another session or a lost tick shows."""

    async def start(self, session: str, body: bytes) -> bytes:
        self.name, self.count = session, 0
        return b""

    async def tick(self, body: bytes) -> bytes:
        self.count += 1
        return b"%s:%d" % (self.name.encode(), self.count)
