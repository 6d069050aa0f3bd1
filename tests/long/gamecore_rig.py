"""A gamecore server as a user starts it, which may be killed and started again, and games to try it with."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.process import procfs
from tests.waiting import wait_until

READY_S = 60.0
STOP_S = 60.0
MARK = "GAMECORE_RIG"
"""In the environment of all that a rig starts, so that whatever is left of it can be found."""

PACED = textwrap.dedent(
    """
    import sys, time
    at = time.monotonic()
    print("up", flush=True)
    while True:
        sum(range(5000))
        at += 1 / 15
        time.sleep(max(0.0, at - time.monotonic()))
    """
)
"""Fifteen ticks a second, each a fraction of a millisecond."""


class Late(AssertionError):
    """What had to happen did not."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Answer(Exception):
    """Another one than was hoped for."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class Server:
    """`games`: entries of its catalogue; None: the built-in one."""

    def __init__(self, directory: Path, games: dict[str, Any] | None, *words: str, max_games: int = 250) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.state_dir = directory, directory / "state"
        self.port = free_port()
        self.mark = f"{MARK}={directory}"
        self._words = [*words, "--port", str(self.port), "--state-dir", str(self.state_dir), "--max-games", str(max_games)]
        if games is not None:
            catalogue = directory / "games.yaml"
            catalogue.write_text(json.dumps({"games": games}))  # which is YAML too
            self._words += ["--games", str(catalogue)]
        self._mine = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self.process: subprocess.Popen[bytes] | None = None

    # -- its process

    def start(self) -> None:
        with (self.directory / "server.out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ludus.cli.main", "gamecore", "serve", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, MARK: str(self.directory)},
                start_new_session=True,
            )
        wait_until(self.is_up, READY_S, what="the server")

    def is_up(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise Late(f"the server ended: {self.said()[-2000:]}")
        try:
            return bool(self.ask("GET", "/health"))
        except (OSError, http.client.HTTPException, Answer):
            return False

    def said(self) -> str:
        return (self.directory / "server.out").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of the process that serves: below --supervise it is another than the first."""
        assert self.process is not None
        if "--supervise" not in self._words:
            return self.process.pid
        return wait_until(
            lambda: procfs.list_children(self.process.pid if self.process else 0), what="the server below its supervisor"
        )[0]

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
            self.process.kill()
            self.process.wait(STOP_S)
        while self._connections:
            self._connections.pop().close()
        for pid in self.everything():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def everything(self) -> dict[int, str]:
        """All processes that were started by it, whoever looks after them now, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self.mark in procfs.read_environment(int(entry.name)):
                with contextlib.suppress(OSError):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        return found

    # -- what it is asked

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        """Raises Answer if it is no 2xx, OSError or HTTPException if there is none."""
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if connection is not None:
            with contextlib.suppress(ConnectionError, http.client.BadStatusLine):  # the server that it was to is gone
                return self._answered(connection, method, path, body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        self._connections.append(connection)
        self._mine.connection = connection
        return self._answered(connection, method, path, body)

    def hang_up(self) -> None:
        """Close the connection of this thread."""
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        if connection is not None:
            self._mine.connection = None
            self._connections.remove(connection)
            connection.close()

    def _answered(self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            self.hang_up()
            raise
        kind = response.headers.get_content_type()
        answer = json.loads(data) if kind == "application/json" else data.decode(errors="replace")
        if not 200 <= response.status < 300:
            raise Answer(response.status, answer)
        return answer

    def play(self, runtime_id: str, game: str, **more: Any) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("POST", "/v1/games", {"runtime_id": runtime_id, "game": game, **more})
        return state

    def state(self, runtime_id: str) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("GET", f"/v1/games/{runtime_id}")
        return state

    def halt(self, runtime_id: str, grace_s: float = 5.0) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("DELETE", f"/v1/games/{runtime_id}?grace_s={grace_s:g}")
        return state

    def games(self, state: str = "") -> list[dict[str, Any]]:
        games: list[dict[str, Any]] = self.ask("GET", f"/v1/games?state={state}" if state else "/v1/games")["games"]
        return games


def python(script: str, **more: Any) -> dict[str, Any]:
    """An entry of a catalogue; the script finds its place by LUDUS_GAME_CONFIG, not in its words."""
    script = script.replace("{", "{{").replace("}", "}}")
    return {
        "command": ["{python}", "-I", "-S", "-c", script],
        "modes": ["1v1"],
        "inherit": [MARK],
        "restart": {"on": "never"},
        **more,
    }


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
