"""FastAPI on uvicorn, one worker: `python -m bench.serving.fast_api --workload echo|mlp [--batched] --port P`.

Without --batched the route runs the network for its own request and nothing is tuned, as most services are written.
"""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI, Request, Response

from bench.serving.batching import Batcher, spare_the_collector
from bench.serving.module import Forward

BINARY = "application/octet-stream"


def application(workload: str, batched: bool) -> FastAPI:
    app = FastAPI()
    forward = Forward() if workload == "mlp" else None
    batcher = Batcher(forward) if forward is not None and batched else None

    @app.post("/step")
    async def step(request: Request) -> Response:
        body = await request.body()
        if body and batcher is not None:
            body = await batcher.submit(body)
        elif body and forward is not None:
            body = forward([body])[0]
        return Response(body, media_type=BINARY)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=["echo", "mlp"], required=True)
    parser.add_argument("--batched", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = application(args.workload, args.batched)
    if args.batched:
        spare_the_collector()
    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
