"""A gamecore server with /v2 only, which records its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class OldServer:
    address: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(verb, body)"""
    looks: dict[str, int] = field(default_factory=dict)
    """How many more times a game is reported to exist."""
    connections: int = 0

    def answer(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((verb, body))
        game = str(body.get("runtime_id", ""))
        if verb == "newGame":
            self.looks.setdefault(game, 3)
        if verb == "stopGame":
            self.looks[game] = 0
        if verb == "exists":
            self.looks[game] = self.looks.get(game, 0) - 1
            return {"exists": self.looks[game] >= 0}
        if verb == "taskList":
            return {"data": {"task_ids": ["7", "8"]}}
        if verb == "taskDetail":
            return {"data": {"game_states": [{"task": body["task_id"]}]}}
        return {}

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1][1]


@contextmanager
def old_server() -> Iterator[OldServer]:
    known = OldServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5

        def setup(self) -> None:
            super().setup()
            known.connections += 1

        def do_GET(self) -> None:
            self._reply(404, b"404 page not found\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(200, json.dumps(known.answer(self.path.removeprefix("/v2/"), body)).encode())
            # As servers do with connections that were idle for long; the client is not told.
            self.close_connection = self.path == "/v2/taskClear"

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Request-ID", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        known.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield known
        finally:
            server.shutdown()
            thread.join()
