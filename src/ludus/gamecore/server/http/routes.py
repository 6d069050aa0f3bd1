"""REST endpoints of the server, below /v1. `routes_v2.py` has the older protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, BinaryIO

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ludus.errors import Refused
from ludus.gamecore.server.game_status import STATES
from ludus.gamecore.server.http import prometheus, routes_v2
from ludus.gamecore.server.http.middleware import AUTHORIZED, on_error, on_http_exception, on_refused, read_body
from ludus.gamecore.server.process_table import ProcessTable
from ludus.gamecore.server.request import parse_id, parse_json, parse_request, parse_task_id
from ludus.gamecore.server.settings import ServerLimits

MAX_WAIT_S, MAX_GRACE_S = 60.0, 600.0
MAX_LINES = 10_000
ARTIFACTS = ("recording", "video")
DOWNLOADS = 8
"""Concurrent file downloads; further ones wait."""
_CHUNK = 1 << 18


class _FileResponse(Response):
    """Streams a file in parts, so that large files and slow readers use little memory."""

    media_type = "application/octet-stream"

    def __init__(self, table: ProcessTable, file: BinaryIO, size: int, semaphore: asyncio.Semaphore) -> None:
        super().__init__(headers={"Content-Length": str(size)})
        self._table, self._file, self._size, self._semaphore = table, file, size, semaphore

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = self._size if scope["method"] != "HEAD" else 0
            async with self._semaphore:
                while left:
                    part = await self._table.read(self._file, min(left, _CHUNK))
                    if not part:
                        raise OSError("the file became shorter during its download")
                    left -= len(part)
                    await send({"type": "http.response.body", "body": part, "more_body": left > 0})
            if not self._size or scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})


def build_app(table: ProcessTable, limits: ServerLimits, replies: Mapping[int, int]) -> Starlette:
    """`replies`: number of replies by status, counted by the middleware."""
    endpoints = Routes(table, limits, replies)
    routes = [
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/v1/catalogue", endpoints.catalogue),
        Route("/v1/games", endpoints.list, methods=["GET"]),
        Route("/v1/games", endpoints.start, methods=["POST"]),
        Route("/v1/games/{runtime_id}", endpoints.status, methods=["GET"]),
        Route("/v1/games/{runtime_id}", endpoints.stop, methods=["DELETE"]),
        Route("/v1/games/{runtime_id}/wait", endpoints.wait),
        Route("/v1/games/{runtime_id}/log", endpoints.log),
        *(Route(f"/v1/games/{{runtime_id}}/{what}", endpoints.artifact(what)) for what in ARTIFACTS),
        Route("/v1/games/{runtime_id}/forget", endpoints.forget, methods=["POST"]),
        Route("/v1/clear", endpoints.clear, methods=["POST"]),
        *routes_v2.routes(table, limits),
    ]
    handlers: Mapping[Any, Any] = {Refused: on_refused, HTTPException: on_http_exception, Exception: on_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class Routes:
    def __init__(self, table: ProcessTable, limits: ServerLimits, replies: Mapping[int, int]) -> None:
        self._table, self._limits, self._replies = table, limits, replies
        self._downloads = asyncio.Semaphore(DOWNLOADS)

    async def health(self, request: Request) -> Response:
        status = {"status": "closing" if self._table.is_closing else "ok"}
        counts = {"running": len(self._table.running)} if getattr(request.state, AUTHORIZED) else {}
        return JSONResponse({**status, **counts}, 503 if self._table.is_closing else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(prometheus.render(self._table, self._replies), media_type=prometheus.MEDIA)

    async def catalogue(self, request: Request) -> Response:
        return JSONResponse({"games": await self._table.describe_catalogue()})

    async def list(self, request: Request) -> Response:
        state = request.query_params.get("state")
        if state is not None and state not in STATES:
            raise Refused(400, "bad_request", f"state is {state[:64]!r}.", f"It is one of {', '.join(STATES)}.")
        task_id = parse_task_id(request.query_params.get("task_id"))
        return JSONResponse({"games": self._table.list_games(state, task_id)})

    async def start(self, request: Request) -> Response:
        game_request = parse_request(parse_json(await read_body(request, self._limits)), self._table.catalogue)
        record, is_new = await self._table.start(game_request)
        return JSONResponse(record.to_json(), 201 if is_new else 200)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._table.refresh(_id(request)))

    async def wait(self, request: Request) -> Response:
        return JSONResponse(await self._table.wait(_id(request), _seconds(request, "timeout_s", 30.0, MAX_WAIT_S)))

    async def stop(self, request: Request) -> Response:
        grace_s = _seconds(request, "grace_s", None, MAX_GRACE_S)
        return JSONResponse(await self._table.stop(_id(request), grace_s))

    async def log(self, request: Request) -> Response:
        lines = await self._table.log_lines(_id(request), int(_seconds(request, "lines", 100, MAX_LINES)))
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    def artifact(self, what: str) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            return _FileResponse(self._table, *await self._table.open_artifact(_id(request), what), self._downloads)

        return page

    async def forget(self, request: Request) -> Response:
        await self._table.forget(_id(request))
        return JSONResponse({"forgotten": _id(request)})

    async def clear(self, request: Request) -> Response:
        return JSONResponse({"forgotten": await self._table.clear()})


def _id(request: Request) -> str:
    return parse_id(request.path_params["runtime_id"])


def _seconds(request: Request, key: str, default: Any, most: float) -> Any:
    """Read a number from 0 to `most` from the query."""
    given = request.query_params.get(key)
    if given is None:
        return default
    try:
        value = float(given) if len(given) < 40 and "_" not in given else math.nan  # Python also reads 1_0 as a number
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise Refused(400, "bad_request", f"{key} is {given[:64]!r}: a number from 0 to {most:g} is expected.")
    return value
