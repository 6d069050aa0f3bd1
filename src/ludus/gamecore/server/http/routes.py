"""The pages of the server: its REST form. `v2.py` has the other one."""

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
from ludus.gamecore.server.http.middleware import KNOWN, on_error, on_http, on_refused, read_body
from ludus.gamecore.server.process_table import Hall
from ludus.gamecore.server.request import decoded, read_id, read_order, read_task
from ludus.gamecore.server.settings import HttpLimits

MAX_WAIT_S, MAX_GRACE_S = 60.0, 600.0
MAX_LINES = 10_000
KEPT = ("recording", "video")
DOWNLOADS = 8
"""Files that are handed out at once; others wait."""
_CHUNK = 1 << 18


class _File(Response):
    """A file, part by part: neither a large one nor a slow reader takes much of the server's memory."""

    media_type = "application/octet-stream"

    def __init__(self, hall: Hall, file: BinaryIO, size: int, turn: asyncio.Semaphore) -> None:
        super().__init__(headers={"Content-Length": str(size)})
        self._hall, self._file, self._size, self._turn = hall, file, size, turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = self._size if scope["method"] != "HEAD" else 0
            async with self._turn:
                while left:
                    part = await self._hall.read(self._file, min(left, _CHUNK))
                    if not part:
                        raise OSError("a file that is handed out has become shorter")
                    left -= len(part)
                    await send({"type": "http.response.body", "body": part, "more_body": left > 0})
            if not self._size or scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})


def application(hall: Hall, limits: HttpLimits, replies: Mapping[int, int]) -> Starlette:
    """`replies`: how many there were, by status; whoever sends them counts them."""
    pages = Pages(hall, limits, replies)
    routes = [
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/v1/catalogue", pages.catalogue),
        Route("/v1/games", pages.list, methods=["GET"]),
        Route("/v1/games", pages.start, methods=["POST"]),
        Route("/v1/games/{runtime_id}", pages.status, methods=["GET"]),
        Route("/v1/games/{runtime_id}", pages.stop, methods=["DELETE"]),
        Route("/v1/games/{runtime_id}/wait", pages.wait),
        Route("/v1/games/{runtime_id}/log", pages.log),
        *(Route(f"/v1/games/{{runtime_id}}/{what}", pages.kept(what)) for what in KEPT),
        Route("/v1/games/{runtime_id}/forget", pages.forget, methods=["POST"]),
        Route("/v1/clear", pages.clear, methods=["POST"]),
        *routes_v2.routes(hall, limits),
    ]
    handlers: Mapping[Any, Any] = {Refused: on_refused, HTTPException: on_http, Exception: on_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class Pages:
    def __init__(self, hall: Hall, limits: HttpLimits, replies: Mapping[int, int]) -> None:
        self._hall, self._limits, self._replies = hall, limits, replies
        self._downloads = asyncio.Semaphore(DOWNLOADS)

    async def health(self, request: Request) -> Response:
        said = {"status": "closing" if self._hall.is_closing else "ok"}
        counted = {"running": len(self._hall.running)} if getattr(request.state, KNOWN) else {}
        return JSONResponse({**said, **counted}, 503 if self._hall.is_closing else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(prometheus.text(self._hall, self._replies), media_type=prometheus.MEDIA)

    async def catalogue(self, request: Request) -> Response:
        return JSONResponse({"games": await self._hall.offered()})

    async def list(self, request: Request) -> Response:
        state = request.query_params.get("state")
        if state is not None and state not in STATES:
            raise Refused(400, "bad_request", f"state is {state[:64]!r}.", f"It is one of {', '.join(STATES)}.")
        task_id = read_task(request.query_params.get("task_id"))
        return JSONResponse({"games": self._hall.listed(state, task_id)})

    async def start(self, request: Request) -> Response:
        order = read_order(decoded(await read_body(request, self._limits)), self._hall.catalogue)
        match, is_new = await self._hall.start(order)
        return JSONResponse(match.shown(), 201 if is_new else 200)

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._hall.look(_id(request)))

    async def wait(self, request: Request) -> Response:
        return JSONResponse(await self._hall.wait(_id(request), _seconds(request, "timeout_s", 30.0, MAX_WAIT_S)))

    async def stop(self, request: Request) -> Response:
        grace_s = _seconds(request, "grace_s", None, MAX_GRACE_S)
        return JSONResponse(await self._hall.stop(_id(request), grace_s))

    async def log(self, request: Request) -> Response:
        lines = await self._hall.log_lines(_id(request), int(_seconds(request, "lines", 100, MAX_LINES)))
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    def kept(self, what: str) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            return _File(self._hall, *await self._hall.kept(_id(request), what), self._downloads)

        return page

    async def forget(self, request: Request) -> Response:
        await self._hall.forget(_id(request))
        return JSONResponse({"forgotten": _id(request)})

    async def clear(self, request: Request) -> Response:
        return JSONResponse({"forgotten": await self._hall.clear()})


def _id(request: Request) -> str:
    return read_id(request.path_params["runtime_id"])


def _seconds(request: Request, key: str, default: Any, most: float) -> Any:
    """A number of the query, from 0 on."""
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
