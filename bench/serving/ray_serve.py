"""Ray Serve with its own batching, on a Ray instance of its own: `python -m bench.serving.ray_serve --port P --temp DIR`.

Which proxy serves is decided by the environment (`RAY_SERVE_ENABLE_HA_PROXY`), as documented; see `bench.serving.stacks`.
"""

from __future__ import annotations

import argparse
import signal
import threading

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from bench.serving.module import Forward

# A wait of 3 ms gives 8 % more requests/s at 64 and 256 connections, and 5 times the latency at one.
BATCH, WAIT_S, ONGOING = 64, 0.0, 2048


@serve.deployment(num_replicas=1, max_ongoing_requests=ONGOING, ray_actor_options={"num_cpus": 1})
class Mlp:
    def __init__(self) -> None:
        self._forward = Forward()

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def forward(self, bodies: list[bytes]) -> list[bytes]:
        return self._forward(bodies)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        return Response(await self.forward(body) if body else b"", media_type="application/octet-stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        serve.run(Mlp.options(logging_config={"enable_access_log": False}).bind(), name="bench", route_prefix="/step")
        asked_to_end.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
