"""The ceiling of a Python event loop: a hand-written protocol on uvloop that does only what this benchmark asks for.

Not an HTTP server: it looks for the blank line and the content-length, and knows no limits, time-outs, chunks or errors.
`python -m bench.serving.raw --workload echo|mlp --port P`
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence

import uvloop

from bench.serving.batching import spare_the_collector

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


class Raw(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                break
            head = data[:end].lower()
            at = head.find(b"content-length:")
            line = head.find(b"\r\n", at)
            length = int(head[at + 15 : line if line > 0 else end]) if at > 0 else 0
            if len(data) < end + 4 + length:
                break
            body, data = data[end + 4 : end + 4 + length], data[end + 4 + length :]
            self.answer(body)
        self._rest = data

    def answer(self, body: bytes) -> None:
        self.transport.write(HEAD % len(body) + body)


class Batched(Raw):
    """All connections of the process share the rows that wait."""

    forward: Callable[[Sequence[bytes]], list[bytes]]
    waiting: list[tuple[asyncio.Transport, bytes]] = []

    def answer(self, body: bytes) -> None:
        if not body:
            super().answer(body)
            return
        if not self.waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self.waiting.append((self.transport, body))

    def flush(self) -> None:
        rows = self.waiting.copy()
        self.waiting.clear()
        for (transport, _), reply in zip(rows, self.forward([body for _, body in rows]), strict=True):
            transport.write(HEAD % len(reply) + reply)


async def serve(protocol: type[Raw], port: int) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["echo", "mlp"], required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    if args.workload == "mlp":
        from bench.serving.module import Forward  # an echo needs no torch

        Batched.forward = Forward()
    spare_the_collector()
    uvloop.run(serve(Batched if args.workload == "mlp" else Raw, args.port))


if __name__ == "__main__":
    main()
