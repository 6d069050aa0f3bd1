"""The machine of a gamecore server vanishes: whoever asks it hears of that, however long an answer may take."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.hosts import SHARED, up

LIMIT_S = 60.0

SERVER = """
    import http.server, pathlib, sys, time

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = b'{"games": {"arena": {}}}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            (pathlib.Path(sys.argv[1]) / "asked").touch()
            time.sleep(3600)  # a game that takes long to start

    http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Answers).serve_forever()
"""
CLIENT = """
    import pathlib, sys, time

    from ludus.errors import Unreachable
    from ludus.game.gamecore import GamecoreClient

    address, shared, case = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    for _ in range(600):
        try:
            client = GamecoreClient(address + ":8000", timeout_s=3)
            client.catalogue()  # its connection is kept
            break
        except Unreachable:
            time.sleep(0.1)
    (shared / "ready").touch()
    while case == "unheard" and not (shared / "cut").exists():
        time.sleep(0.05)
    try:
        client.start_game("one", [None, None], {"mode": "1v1"})
    except Unreachable as error:
        print(error.message, flush=True)
"""


@pytest.mark.parametrize("case", ["waiting", "unheard"])
def test_a_machine_that_is_gone_is_noticed(tmp_path: Path, case: str) -> None:
    """While an answer is waited for, and when the request itself is lost. An answer may take 153 s."""
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "client.py").write_text(textwrap.dedent(CLIENT))
    with up(2, tmp_path) as hosts, (tmp_path / "said").open("wb") as said:
        hosts.run(0, [sys.executable, SHARED / "server.py", SHARED])
        asking = hosts.run(1, [sys.executable, SHARED / "client.py", hosts.address(0), SHARED, case], output=said)
        until((tmp_path / ("asked" if case == "waiting" else "ready")).exists)
        hosts.cut(0)
        (tmp_path / "cut").touch()
        assert asking.wait(60) == 0
        # Noticed by the connection; then it was tried once more to connect.
        assert (tmp_path / "said").read_text() == f"{hosts.address(0)}:8000 did not answer within 3 s.\n"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
