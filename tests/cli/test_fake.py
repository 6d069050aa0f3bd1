"""`ludus fake actor` and `ludus fake gamecore`: the printed numbers are correct."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.cli.serving.fake import TrafficSample, game_line, server_line, usage
from ludus.errors import Refused, UsageError
from ludus.gateway.server import GatewaySettings
from ludus.protocol.client import Client
from ludus.remote.fake_peers import FakeActor, FakeGamecore
from tests.cli.programs import program
from tests.local_servers import gateway, say


def test_the_fake_actor_counts_requests_and_prints_a_summary_at_ctrl_c() -> None:
    with program("fake", "actor", "--port", "0", "--tick-return", "left", "--json") as server:
        stats = FakeGamecore(server.url, games=2, ticks=10, body=bytes(100)).run(matches=2)
        say(server.port, b"POST /step HTTP/1.1\r\nsession: a\r\nContent-Length: 0\r\n\r\n")
        server.wait_for("step_kind")
        server.process.send_signal(signal.SIGINT)
        code, out, _ = server.finish()
    *lines, summary = map(json.loads, out.splitlines())
    assert code == 0
    assert (stats.errors, stats.bytes_in) == ({}, 4 * (10 * 4 + len("fake_actor_end_return")))
    assert (summary["requests"], summary["bytes_in"], summary["bytes_out"]) == (stats.requests, stats.bytes_out, stats.bytes_in)
    assert summary["errors"] == {"step_kind": 1}
    assert {"seconds", "sessions", "requests_per_s", "cpu_percent", "rss_bytes", "errors"} <= lines[0].keys()
    assert summary["rss_bytes"] > 10_000_000


def test_workers_count_together(tmp_path: Path) -> None:
    token, reply = tmp_path / "token", tmp_path / "reply"
    token.write_text("s3cret\n")
    reply.write_bytes(bytes(range(256)))
    arguments: list[str | Path] = ["--port", "0", "--workers", "2", "--token-file", token, "--tick-return-file", reply, "--json"]
    with program("fake", "actor", *arguments) as server:
        stats = FakeGamecore(server.url, games=6, ticks=10, token="s3cret").run(matches=2)
        with Client(server.url, token="wrong") as stranger, pytest.raises(Refused):
            stranger.start("x")
        server.wait_for("unauthorized")
        server.process.send_signal(signal.SIGTERM)
        code, out, _ = server.finish()
    summary = json.loads(out.splitlines()[-1])
    assert (code, stats.errors, stats.matches) == (0, {}, 12)
    assert (summary["requests"], summary["bytes_in"], summary["bytes_out"]) == (stats.requests, stats.bytes_out, stats.bytes_in)
    assert summary["errors"] == {"unauthorized": 1}


def test_the_fake_game_plays_and_prints_its_measurements() -> None:
    with gateway(FakeActor) as served:
        arguments = ["--url", served.url, "--games", "3", "--ticks", "20", "--body-size", "10", "--matches", "2", "--json"]
        with program("fake", "gamecore", *arguments, listens=False) as game:
            code, out, _ = game.finish()
        ended = served.gateway.counters()["ended"]
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["requests"], summary["matches"], ended) == (0, 3 * 2 * 22, 6, 6)
    assert summary["bytes_out"] == 3 * 2 * 20 * 10
    assert 0 < summary["p50_ms"] <= summary["p99_ms"]


def test_the_game_leaves_in_order_at_ctrl_c() -> None:
    with gateway(FakeActor) as served:
        with program("fake", "gamecore", "--url", served.url, "--games", "3", "--ticks", "1000000", listens=False) as game:
            game.wait_for("requests/s")
            game.process.send_signal(signal.SIGINT)
            code, out, _ = game.finish()
        counters = served.gateway.counters()
    assert code == 0
    assert (counters["started"], counters["ended"], counters["sessions"]) == (3, 3, 0)
    assert re.search(r"total [\d,]+ requests in 3 matches .* no errors", out)


def test_the_game_makes_bodies_from_the_spec_and_ends_with_1_when_actions_do_not_fit() -> None:
    spec = {"observation_space": {"type": "Discrete", "n": 3}, "action_space": {"type": "Discrete", "n": 2}}
    with gateway(lambda: FakeActor(b'{"action": 2}'), GatewaySettings(spec=spec)) as served:
        arguments = ["--url", served.url, "--format", "json", "--ticks", "2", "--matches", "1"]
        with program("fake", "gamecore", *arguments, listens=False) as game:
            code, out, err = game.finish()
    assert code == 1
    assert "errors: action 2" in out
    assert "categories" in err


def test_an_unreachable_server_is_an_error() -> None:
    arguments = ["--url", "http://127.0.0.1:9", "--matches", "1"]
    with program("fake", "gamecore", *arguments, listens=False) as game:
        code, _, err = game.finish()
    assert (code, "127.0.0.1:9" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gamecore", "--format", "json", "--body-size", "3"], "--body-size"),
        (["gamecore", "--body-size", "3", "--body-file", "x"], "one of them"),
        (["gamecore", "--url", "localhost"], "url"),
        (["actor", "--host", "0.0.0.0", "--port", "0"], "token"),
        (["actor", "--tick-return-file", "/nonexistent"], "Cannot read"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, ["fake", *arguments], catch_exceptions=False)


# -- the numbers


def at(seconds: float, **totals: Any) -> TrafficSample:
    return TrafficSample(
        seconds, totals.pop("requests", 0), totals.pop("bytes_in", 0), 0, totals.pop("cpu_s", 0.0), 5_000_000, **totals
    )


def test_a_line_covers_the_time_since_the_previous_line() -> None:
    before = at(10.0, requests=100, bytes_in=1_000, cpu_s=3.0)
    now = at(12.0, requests=300, bytes_in=5_001_000, cpu_s=4.0, sessions=7)
    before.errors["silent"] = 2
    now.errors.update({"silent": 5, "seq": 1})
    row = {"seconds": 12.0, **now.since(before)}
    line = server_line(row)
    for words in ("7 sessions", "100 requests/s", "in   2.5 MB/s", "CPU   50 %", "RSS 5.0 MB", "errors: seq 1, silent 3"):
        assert words in line
    assert "p50 0.50 ms  p99 2.00 ms" in game_line(row | {"p50_ms": 0.5, "p99_ms": 2.0})


def test_errors_are_refusals_by_word_and_sessions_that_ended_badly() -> None:
    health = {"sessions": 3, "requests": 9, "silent": 2, "failed": 0, "ended": 5, "refused_before": {"session": 1}}
    sample = TrafficSample.of((1, 2, 3), [health, health, {}], [])
    assert (sample.sessions, sample.errors) == (6, {"silent": 4, "session": 2})


def test_the_usage_of_this_process_is_known_and_that_of_no_process_is_nothing() -> None:
    cpu_s, rss = usage(os.getpid())
    assert cpu_s > 0
    assert rss > 10_000_000
    assert usage(2**22 + 1) == (0.0, 0)


@pytest.mark.parametrize("hard", [256, 4096])
def test_the_actor_outlives_more_silent_connections_than_it_may_have_files(hard: int) -> None:
    """With a hard limit of 4,096 it raises its soft one; with 256 it cannot, and turns connections away."""
    limits = (256, hard)
    with program("fake", "actor", "--port", "0", "--json", files=limits) as server, contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.wait_for_lines(2)
        assert server.process.poll() is None
        stack.close()
        stats = FakeGamecore(server.url, games=1, ticks=3).run(matches=1)
        server.process.send_signal(signal.SIGINT)
        code, _, err = server.finish()
    assert (code, stats.errors) == (0, {})
    assert "Traceback" not in err
