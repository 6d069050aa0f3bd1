"""FastAPI on uvicorn plays an agent: `python -m bench.serving.play_fastapi --agent FILE [--batched] --port P`.

Without --batched the route runs the network for its own request and nothing is tuned, as most services are written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response

from bench.serving.batching import Batcher, spare_the_collector
from bench.serving.player import Player

BINARY = "application/octet-stream"


def application(player: Player, batched: bool) -> FastAPI:
    app = FastAPI()
    batcher = Batcher(player) if batched else None

    async def act(session: str, body: bytes) -> bytes:
        return player([(session, body)])[0] if batcher is None else await batcher.submit((session, body))

    @app.post("/step")
    async def step(request: Request) -> Response:
        body = await request.body()
        session = ""
        if player.recurrent:
            session, kind = request.headers["session"], request.headers["step_kind"]
            if kind == "start":
                player.start(session)
            elif kind == "end":
                player.end(session)
        return Response(await act(session, body) if body else b"", media_type=BINARY)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", type=Path, required=True)
    parser.add_argument("--batched", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = application(Player(args.agent), args.batched)
    if args.batched:
        spare_the_collector()
    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
