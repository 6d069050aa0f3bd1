"""Ray Serve plays an agent, with its own batching: `python -m bench.serving.play_ray --agent FILE --port P --temp DIR`.

One replica, because it holds the recurrent states. Which proxy serves is decided by the environment: `bench.serving.stacks`.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from bench.serving.player import Player
from bench.serving.ray_serve import BATCH, ONGOING, WAIT_S


@serve.deployment(num_replicas=1, max_ongoing_requests=ONGOING, ray_actor_options={"num_cpus": 1})
class Agent:
    def __init__(self, path: str) -> None:
        self._player = Player(Path(path))

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def act(self, requests: list[tuple[str, bytes]]) -> list[bytes]:
        return self._player(requests)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        session = ""
        if self._player.recurrent:
            session, kind = request.headers["session"], request.headers["step_kind"]
            if kind == "start":
                self._player.start(session)
            elif kind == "end":
                self._player.end(session)
        return Response(await self.act((session, body)) if body else b"", media_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--temp", required=True, help="short: Ray puts Unix sockets below it")
    args = parser.parse_args()
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=200 * 1024 * 1024,
        include_dashboard=False,
        _temp_dir=args.temp,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": args.port}, logging_config={"enable_access_log": False})
        agent = Agent.options(logging_config={"enable_access_log": False}).bind(args.agent)
        serve.run(agent, name="bench", route_prefix="/step")
        asked_to_end.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
