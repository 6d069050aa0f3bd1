"""The server under its watchdog: stopped, killed, restarted; and the fate of its games."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.gamecore.server.settings import Settings
from ludus.process import identity
from tests.gamecore.callers import Caller, catalogue_file
from tests.waiting import wait_until

pytestmark = pytest.mark.system

PROGRAM = """
import sys
from ludus.gamecore.server.http.app import Settings, serve
serve(Settings.from_json(sys.argv[1]), supervise=sys.argv[2] == "True", announce=lambda host, port: print(port, flush=True))
"""


@contextlib.contextmanager
def served(directory: Path, *, supervise: bool) -> Iterator[tuple[subprocess.Popen[str], Caller]]:
    settings = Settings(port=0, games=catalogue_file(directory), state_dir=directory / "state")
    words = [sys.executable, "-P", "-c", PROGRAM, settings.to_json(), str(supervise)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Caller("127.0.0.1", int(process.stdout.readline()))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def lock_holder(directory: Path) -> int:
    return int((directory / "state" / "lock").read_text())


def test_a_stopped_server_stops_its_games_and_keeps_their_records(tmp_path: Path) -> None:
    with served(tmp_path, supervise=False) as (process, call):
        game = call.start("one", "sleep").json["pid"]
        process.terminate()
        assert process.wait(20) == 0
        assert identity.start_time(game) is None
    with served(tmp_path, supervise=False) as (process, call):
        found = call("GET", "/v1/games/one").json
        assert (found["state"], found["reason"]) == ("stopped", "The server was stopped.")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_killed_server_is_replaced_and_its_games_are_lost(tmp_path: Path) -> None:
    with served(tmp_path, supervise=True) as (process, call):
        games = [call.start(name, game).json["pid"] for name, game in (("one", "sleep"), ("two", "stubborn"), ("three", "forks"))]
        server = lock_holder(tmp_path)
        assert server != process.pid
        os.kill(server, signal.SIGKILL)
        listed = call("GET", "/v1/games").json["games"]  # waits in the queue of the socket until there is a server again
        assert {game["runtime_id"]: game["state"] for game in listed} == dict.fromkeys(("one", "two", "three"), "lost")
        assert [pid for pid in games if identity.start_time(pid) is not None] == []
        assert lock_holder(tmp_path) != server
        again = call.start("one", "sleep")
        assert again.status == 201
        process.terminate()
        assert process.wait(20) == 0
        assert identity.start_time(again.json["pid"]) is None


def test_a_server_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    with served(tmp_path, supervise=True) as (process, call):
        game = call.start("one", "sleep").json["pid"]
        server = lock_holder(tmp_path)
        process.kill()
        wait_until(
            lambda: identity.start_time(server) is None and identity.start_time(game) is None, what="the end of server and game"
        )


def test_a_server_with_invalid_settings_is_not_restarted(tmp_path: Path) -> None:
    with served(tmp_path, supervise=False):
        settings = Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")
        words = [sys.executable, "-P", "-c", PROGRAM, settings.to_json(), "True"]
        second = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert second.returncode == 2
        assert "Another gamecore server" in second.stderr
