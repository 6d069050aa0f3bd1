"""`ludus check-game`: the server reports the mistakes of a client."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.cli.serving.check_game import print_summary
from ludus.errors import Refused, UsageError
from ludus.gateway.http_connection import HttpLimits
from ludus.protocol.client import Client
from ludus.protocol.codec import SeatSpaces, seats_to_spec
from ludus.protocol.conformance import CHECKS, Conformance, ConformanceReport, ReportRow
from ludus.remote.fake_peers import FakeGamecore
from tests.cli.programs import program
from tests.local_servers import LIMIT_S, Checked, checking, received, say, step
from tests.waiting import wait_until

ONE = {"": SeatSpaces(gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(3))}


@contextlib.contextmanager
def connected(checked: Checked) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", checked.port), LIMIT_S) as connection:
        yield connection


def exchange(connection: socket.socket, raw: bytes) -> int:
    connection.sendall(raw)
    return int(received(connection).split(b" ")[1])


def wait_until_it_has(checked: Checked, requests: int) -> None:
    def count() -> int:
        return int(json.loads(say(checked.port, b"GET /health HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2])["requests"])

    wait_until(lambda: count() >= requests)


# -- what is right


def test_our_own_client_is_flawless_and_hears_an_echo() -> None:
    with checking() as checked:
        with Client(checked.url) as client:
            client.start("a")
            assert client.tick("a", b"hello") == b"hello"
            client.end("a")
        FakeGamecore(checked.url, games=5, ticks=5).run(matches=2)
    summary = checked.server.summary
    assert (summary.matches, summary.mistakes, summary.warnings, checked.findings) == (11, 0, 0, [])


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_game_with_spaces_hears_random_actions_that_fit(form: Any) -> None:
    with checking(Conformance(form, ONE), seats=ONE) as checked:
        stats = FakeGamecore(checked.url, games=2, ticks=10, form=form).run(matches=2)
    assert (stats.errors, checked.server.summary.matches, checked.findings) == ({}, 4, [])


def test_a_retry_gets_the_stored_reply_and_is_not_a_mistake() -> None:
    with checking() as checked, connected(checked) as connection:
        for seq, kind in enumerate(("start", "tick", "end")):
            assert [exchange(connection, step(kind, "a", b"x", f"seq: {seq}")) for _ in range(2)] == [200, 200]
    assert (checked.server.summary.retries, checked.findings) == (3, [])


# -- mistakes, one by one


@pytest.mark.parametrize(
    ("raw", "status", "kind"),
    [
        (b"GET /step HTTP/1.1\r\n\r\n", 405, "path"),
        (b"POST /tick HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 404, "path"),
        (b"POST /step HTTP/1.1\r\nsession: a\r\nContent-Length: 0\r\n\r\n", 400, "step_kind"),
        (step("auto", "a"), 400, "step_kind"),
        (b"POST /step HTTP/1.1\r\nstep_kind: start\r\nContent-Length: 0\r\n\r\n", 400, "session"),
        (step("start", "x" * 300), 400, "session"),
        (step("start", "a", b"", "seq: one"), 400, "seq_number"),
        (step("tick", "a"), 404, "tick_before_start"),
        (step("end", "a"), 404, "tick_before_start"),
        (b"hello there\r\n\r\n", 400, "malformed"),
        (b"POST /step HTTP/1.1\r\nsession: a\r\nstep_kind: start\r\nContent-Length: 2000000\r\n\r\n", 413, "too_large"),
        (step("start", "a", b"", *(f"X-{i}: y" for i in range(100))), 431, "headers"),
    ],
)
def test_a_request_that_is_wrong_by_itself(raw: bytes, status: int, kind: str) -> None:
    with checking(http=HttpLimits(body_bytes=1 << 20)) as checked:
        assert int(say(checked.port, raw).split(b" ")[1]) == status
        checked.hears(kind)
    assert checked.kinds == {kind}


def test_a_session_id_that_is_not_text() -> None:
    with checking() as checked, connected(checked) as connection:
        assert exchange(connection, step("start", "a", b"", "seq: 0").replace(b"session: a", b"session: \xff\xfe")) == 400
        assert "UTF-8" in checked.hears("session")


@pytest.mark.parametrize(
    ("requests", "status", "kind"),
    [
        ([("start", "seq: 0"), ("start", "seq: 1")], 409, "double_start"),
        ([("start", "seq: 0"), ("tick", "seq: 2")], 409, "seq_skipped"),
        ([("start", "seq: 0"), ("tick", "seq: 1"), ("end", "seq: 1")], 409, "seq_changed"),
        ([("start", "seq: 0"), ("tick", "X-no: seq")], 400, "seq_mixed"),
        ([("start", "seq: 0"), ("tick", "seq: 1"), ("end", "seq: 2"), ("tick", "seq: 3")], 404, "after_end"),
        ([("start", "X-no: seq")], 200, "no_seq"),
        ([("start", "seq: 0"), ("end", "seq: 1")], 200, "no_ticks"),
        ([("start", "seq: 0"), ("tick", "seq: 1"), ("end", "seq: 2"), ("start", "seq: 0")], 200, "session_reuse"),
    ],
)
def test_a_request_that_is_wrong_in_its_session(requests: list[tuple[str, str]], status: int, kind: str) -> None:
    with checking() as checked, connected(checked) as connection:
        answers = [exchange(connection, step(what, "a", b"", header)) for what, header in requests]
        checked.hears(kind)
    assert answers == [200] * (len(requests) - 1) + [status]
    assert checked.kinds == {kind}


def test_a_number_that_comes_again_with_another_body() -> None:
    with checking() as checked, connected(checked) as connection:
        exchange(connection, step("start", "a", b"", "seq: 0"))
        for body, status in ((b"x", 200), (b"y", 409)):
            assert exchange(connection, step("tick", "a", body, "seq: 1")) == status
        assert "another body" in checked.hears("seq_changed")


def test_two_ticks_of_one_session_at_once() -> None:
    with checking(think_s=0.5) as checked, connected(checked) as one, connected(checked) as other:
        exchange(one, step("start", "a", b"", "seq: 0"))
        one.sendall(step("tick", "a", b"", "seq: 1"))
        wait_until_it_has(checked, requests=2)
        assert exchange(other, step("tick", "a", b"", "seq: 2")) == 409
        assert received(one).startswith(b"HTTP/1.1 200")
    assert checked.kinds == {"concurrent"}


def test_two_ticks_sent_in_one_breath() -> None:
    with checking() as checked, connected(checked) as connection:
        exchange(connection, step("start", "a", b"", "seq: 0"))
        connection.sendall(step("tick", "a", b"", "seq: 1") + step("tick", "a", b"", "seq: 2"))
        assert "still being processed" in checked.hears("concurrent")


@pytest.mark.parametrize("abruptly", [False, True])
def test_a_client_that_does_not_wait_for_the_reply(abruptly: bool) -> None:
    with checking(think_s=0.3) as checked:
        with connected(checked) as connection:
            exchange(connection, step("start", "a", b"", "seq: 0"))
            connection.sendall(step("tick", "a", b"", "seq: 1"))
            if abruptly:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        checked.hears("hung_up")
    assert checked.kinds == {"hung_up"}


def test_a_session_that_is_never_ended() -> None:
    with checking(silent_s=0.2) as checked, connected(checked) as connection:
        exchange(connection, step("start", "a", b"", "seq: 0"))
        assert "'a'" in checked.hears("silent")
        assert exchange(connection, step("tick", "a", b"", "seq: 1")) == 410
        checked.hears("lost")


def test_a_connection_for_every_request() -> None:
    with checking() as checked:
        for seq in range(8):
            say(checked.port, step("tick" if seq else "start", "a", b"", f"seq: {seq}"))
        checked.hears("reconnecting")
    assert checked.kinds == {"reconnecting"}


def test_old_http() -> None:
    with checking() as checked:
        say(checked.port, step("start", "a", b"", "seq: 0").replace(b"HTTP/1.1", b"HTTP/1.0"))
        checked.hears("old_http")


def test_a_client_that_sends_in_drops() -> None:
    with checking(http=HttpLimits(receive_s=30.0)) as checked, connected(checked) as connection:
        raw = step("start", "a", b"body", "seq: 0")
        connection.sendall(raw[:40])
        time.sleep(0.6)  # being slow is what is tested
        assert exchange(connection, raw[40:]) == 200
        checked.hears("slow_send")


def test_a_client_that_never_finishes_its_request() -> None:
    with checking(http=HttpLimits(receive_s=0.2)) as checked, connected(checked) as connection:
        assert exchange(connection, step("start", "a", b"body")[:40]) == 408
        checked.hears("too_slow")


def test_a_wrong_token() -> None:
    with checking(token="right") as checked:
        with Client(checked.url, token="wrong") as client, pytest.raises(Refused):
            client.start("a")
        checked.hears("token")
        with Client(checked.url, token="right") as client:
            client.start("a")


def test_a_body_that_does_not_fit_is_refused_as_the_real_one_would_and_may_be_corrected() -> None:
    with checking(Conformance("json", ONE), seats=ONE) as checked, Client(checked.url) as client:
        client.start("a")
        with pytest.raises(Refused) as refused:
            client.tick("a", b'{"observation": [0.5]}')
        assert (refused.value.status, refused.value.error) == (422, "observation")
        assert json.loads(client.tick("a", b'{"observation": [0.5, 0.5], "action_mask": [0, 1, 0]}')) == {"action": 1}
        client.end("a", b'{"reward": 1}')
        assert "shape" in checked.hears("observation")
    assert checked.kinds == {"observation"}


def test_leaving_is_not_held_against_the_game() -> None:
    with contextlib.ExitStack() as later, checking(think_s=5.0) as checked:
        connection = later.enter_context(connected(checked))
        exchange(connection, step("start", "a", b"", "seq: 0"))
        connection.sendall(step("tick", "a", b"", "seq: 1"))
        wait_until_it_has(checked, requests=2)
    assert checked.findings == []
    assert {row.check.kind for row in checked.server.summary.rows if row.count} == {"no_match", "unfinished"}


# -- the command


def test_the_command_ends_after_the_matches_and_is_content(tmp_path: Path) -> None:
    spec = tmp_path / "game.yaml"
    spec.write_text(yaml.safe_dump({"mygame": {"env": "external", "config": {"env_config": seats_to_spec(ONE)}}}))
    with program("check-game", "--port", "0", "--spec", spec, "--matches", "4", "--json") as server:
        stats = FakeGamecore(server.url, games=2, ticks=5, form="json").run(matches=2)
        code, out, _ = server.finish()
    summary = json.loads(out)
    assert (code, stats.errors) == (0, {})
    assert (summary["ok"], summary["matches"], summary["requests"]) == (True, 4, 28)


def test_the_command_tells_mistakes_once_and_ends_with_1() -> None:
    with program("check-game", "--port", "0", "--seconds", "60") as server:
        for _ in range(3):
            say(server.port, step("tick", "m-17"))
        server.wait_for("start comes first")
        server.process.send_signal(signal.SIGINT)
        code, out, _ = server.finish()
    assert code == 1
    assert out.count("session 'm-17'") == 1
    row = next(line for line in out.splitlines() if line.startswith("mistake      3"))
    assert "Send start" in row
    assert out.splitlines()[-1].startswith("0 matches, 3 requests: 4 mistakes, 0 warnings")


def test_the_summary_of_one_mistake_is_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ReportRow(CHECKS["path"], "mistake", 1, ""), ReportRow(CHECKS["no_seq"], "warning", 1, "")]
    print_summary(ConformanceReport(rows, 1, 1, 1), as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == "1 match, 1 request, 1 retry: 1 mistake, 1 warning"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "json"], "--spec"),
        (["--host", "0.0.0.0"], "token"),
        (["--spec", "/nonexistent.yaml"], "Cannot read"),
        (["--token-file", "/nonexistent"], "Cannot read"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, ["check-game", *arguments], catch_exceptions=False)
