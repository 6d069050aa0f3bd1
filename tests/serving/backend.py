"""A host behind a proxy: `python -m tests.serving.backend PORT` answers every tick with "pid:number of the tick".

The first line that it prints is its port. SIGUSR1: it drains.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from ludus.distributed.gateway_workers import bind
from ludus.gateway.actor import Actor
from ludus.gateway.server import Gateway


class Counting(Actor):
    ticks = 0

    async def start(self, session: str, body: bytes) -> bytes:
        return b"%d" % os.getpid()

    async def tick(self, body: bytes) -> bytes:
        self.ticks += 1
        return b"%d:%d" % (os.getpid(), self.ticks)

    async def end(self, body: bytes) -> bytes:
        return b""


async def serve(port: int) -> None:
    listening = bind("127.0.0.1", port)
    bound = listening.getsockname()[1]
    gateway = Gateway(Counting, direct_port=bound)
    await gateway.start([listening])
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, gateway.drain)
    print(bound, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
