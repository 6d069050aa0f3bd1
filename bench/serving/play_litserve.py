"""LitServe plays an agent, with its own batching: `python -m bench.serving.play_litserve --agent FILE --port P`."""

# No `from __future__ import annotations`: LitServe takes the annotation of decode_request as it finds it.
import argparse
from pathlib import Path
from typing import Annotated

import litserve
from fastapi import Depends, Request, Response

from bench.serving.player import Player

BATCH = 64


async def sent(request: Request) -> tuple[str, str, bytes]:
    """(session, kind, body): LitServe itself would take the body for JSON."""
    return request.headers.get("session", ""), request.headers.get("step_kind", ""), await request.body()


Sent = Annotated[tuple, Depends(sent)]


class Agent(litserve.LitAPI):
    def __init__(self, path: Path, **settings: object) -> None:
        super().__init__(**settings)
        self._path = path

    def setup(self, device: str) -> None:
        self._player = Player(self._path)

    def decode_request(self, request: Sent) -> tuple[str, str, bytes]:
        return request

    def batch(self, inputs: list[tuple[str, str, bytes]]) -> list[tuple[str, str, bytes]]:
        return inputs

    def predict(self, x: list[tuple[str, str, bytes]]) -> list[bytes]:
        for session, kind, _ in x if self._player.recurrent else ():
            if kind == "start":
                self._player.start(session)
            elif kind == "end":
                self._player.end(session)
        ticks = [(session, body) for session, _, body in x if body]
        actions = iter(self._player(ticks) if ticks else ())
        return [next(actions) if body else b"" for _, _, body in x]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    agent = Agent(args.agent, max_batch_size=BATCH, batch_timeout=0.0, api_path="/step")
    server = litserve.LitServer(agent, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=False)
    server.run(
        host="127.0.0.1",
        port=args.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
    )


if __name__ == "__main__":
    main()
