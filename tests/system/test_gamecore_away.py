"""The machine of a gamecore server vanishes: whoever asks it hears of that, however long an answer may take."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path

from tests.system.hosts import SHARED, up
from tests.waiting import wait_until

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
    from ludus.protocol.gamecore_client import GamecoreClient

    address, shared, case = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    for _ in range(600):
        try:
            client = GamecoreClient(address + ":8000", timeout_s=1)
            client.catalogue()  # its connection is kept
            break
        except Unreachable:
            time.sleep(0.1)
    (shared / f"ready-{case}").touch()
    while case == "unheard" and not (shared / "cut").exists():
        time.sleep(0.05)
    try:
        client.start_game("one", [None, None], {"mode": "1v1"})
    except Unreachable as error:
        print(error.message, flush=True)
"""


def test_a_machine_that_is_gone_is_noticed(tmp_path: Path) -> None:
    """While an answer is waited for, and when the request itself is lost. An answer may take 151 s."""
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "client.py").write_text(textwrap.dedent(CLIENT))
    with up(2, tmp_path) as hosts, contextlib.ExitStack() as stack:
        hosts.run(0, [sys.executable, SHARED / "server.py", SHARED])
        asking = []
        for case in ("waiting", "unheard"):
            said = stack.enter_context((tmp_path / case).open("wb"))
            asking.append(hosts.run(1, [sys.executable, SHARED / "client.py", hosts.address(0), SHARED, case], output=said))
        wait_until(lambda: (tmp_path / "asked").exists() and (tmp_path / "ready-unheard").exists(), 60.0, what="both connections")
        hosts.cut(0)
        (tmp_path / "cut").touch()
        assert [one.wait(60) for one in asking] == [0, 0]
        for case in ("waiting", "unheard"):  # noticed by the connection; then it was tried once more to connect
            assert (tmp_path / case).read_text() == f"{hosts.address(0)}:8000 did not answer within 1 s.\n"
