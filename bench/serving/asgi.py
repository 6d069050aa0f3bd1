"""Bare ASGI on uvicorn, no framework: `python -m bench.serving.asgi --workload echo|mlp --port P`."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from bench.serving.batching import Batcher, spare_the_collector

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def application(workload: str) -> App:
    batcher = None
    if workload == "mlp":
        from bench.serving.module import Forward  # an echo needs no torch

        batcher = Batcher(Forward())

    async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        message = await receive()
        body: bytes = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        if batcher is not None and body:
            body = await batcher.submit(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["echo", "mlp"], required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = application(args.workload)
    spare_the_collector()
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
    )


if __name__ == "__main__":
    main()
