"""Hostile callers: invalid names, paths, numbers, bodies and connections."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import ConfigError, UsageError
from ludus.gamecore.server.http.app import ServerLimits, Settings, running
from tests.gamecore.callers import Caller, catalogue_file
from tests.waiting import wait_until

pytestmark = pytest.mark.system

EVIL = (
    "../up",
    "a/b",
    "..",
    ".hidden",
    "-rf",
    "a b",
    "a;touch /tmp/x",
    "$(id)",
    "`id`",
    "a|b",
    "a\nb",
    "a\0b",
    "a\\b",
    "ü",
    "{python}",
    "%2e%2e",
    "a" * 201,
    "",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def call(home: Path) -> Iterator[Caller]:
    limits = ServerLimits(body_bytes=20_000, receive_s=1.0, idle_s=1.5, connections=12)
    settings = Settings(port=0, games=catalogue_file(home), state_dir=home / "state", max_games=2, http=limits)
    with running(settings) as server:
        yield Caller(server.host, server.port)


@pytest.mark.parametrize("key", ["runtime_id", "game", "mode", "start_from", "task_id"])
def test_invalid_names_are_refused_in_every_field(call: Caller, home: Path, key: str) -> None:
    for name in EVIL:
        if key == "task_id" and name == "":
            continue  # as if it were not there
        answer = call("POST", "/v1/games", {"runtime_id": "x", "game": "saver", key: name})
        assert answer.status in (400, 404), (name, answer)
        assert set(answer.json) == {"error", "message", "hint"}
    assert call("GET", "/v1/games").json["games"] == []
    assert sorted(path.name for path in home.iterdir()) == ["games.yaml", "state"]


def test_ids_in_paths_are_validated_the_same_way(call: Caller) -> None:
    for path in ("..%2f..%2fetc", "..", "%2e%2e", "a%00b", "a%20b", "$(id)", "-x", "a%0d%0aX:1", "x" * 200):
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/log"), ("GET", "/wait"), ("POST", "/forget")):
            answer = call(method, f"/v1/games/{path}{rest}")
            assert answer.status in (400, 404, 405), (path, answer)
    assert call("GET", "/v1/games/nobody").json["error"] == "unknown_id"
    assert call("GET", "/v1/games/").status == 404
    assert call("DELETE", "/v1/games").status == 405


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"seed": 1 << 63},
        {"seed": 1.5},
        {"seed": True},
        {"max_frames": 0},
        {"max_frames": 10**30},
        {"timeout_s": 0},
        {"timeout_s": 1e300},
        {"timeout_s": "5"},
        {"eval_mode": 1},
        {"heroes": {}},
        {"heroes": [[190]]},
        {"heroes": [[{"hero_id": -1}]]},
        {"heroes": [[{"hero_id": [[1]]}]]},
        {"heroes": [[{"../x": 1}]]},
        {"heroes": [[{"hero_id": 1}] * 65]},
        {"heroes": [[]] * 17},
        {"heroes": [[{"hero_id": 1}]], "camps": [None, None]},
        {"camps": []},
        {"camps": ["http://h"]},
        {"camps": [{}]},
        {"camps": [{"url": "http://h", "address": "h:1"}]},
        {"camps": [{"url": "file:///etc/passwd"}]},
        {"camps": [{"url": "http://user:word@h"}]},
        {"camps": [{"url": "http://h/?a=b"}]},
        {"camps": [{"url": "http://h;id"}]},
        {"camps": [{"url": "http://h:0"}]},
        {"camps": [{"url": "http://h:99999"}]},
        {"camps": [{"url": "http://-h"}]},
        {"camps": [{"url": "http://h\n"}]},
        {"camps": [{"url": "http://" + "h" * 600}]},
        {"camps": [{"address": "h/../x"}]},
        {"camps": [{"url": "http://h", "timeout_s": -1}]},
        {"camps": [{"url": "http://h", "token": "a b"}]},
        {"camps": [{"url": "http://h", "token": "a\nX: y"}]},
        {"camps": [{"url": "http://h", "tokn": "x"}]},
        {"options": []},
        {"options": {"speed": 11}},
        {"options": {"speed": "fast"}},
        {"options": {"speed": 10**400}},
        {"seed": 10**400},
        {"timeout_s": 10**400},
        {"options": {"hue": "-rf"}},
        {"options": {"hue": "a b"}},
        {"options": {"hue": 1}},
        {"options": {"sped": 1}},
        {"command": ["sh"]},
        {"directory": "/"},
        {"environment": {"PATH": "/"}},
    ],
    ids=str,
)
def test_invalid_values_are_refused(call: Caller, wrong: dict[str, Any]) -> None:
    answer = call("POST", "/v1/games", {"runtime_id": "x", "game": "environment", **wrong})
    assert answer.status == 400, answer
    assert answer.json["error"] in ("bad_request", "option")
    assert call("GET", "/v1/games/x").status == 404


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b"\xff", b'{"seed": NaN}', b'{"seed": Infinity}', b'{"seed": 1e999}', b"[" * 5000, b"9" * 5000],
    ids=repr,
)
def test_invalid_bodies_are_refused(call: Caller, body: bytes) -> None:
    for path in ("/v1/games", "/v2/newGame", "/v2/exists", "/v2/taskDetail"):
        answer = call("POST", path, raw=body)
        assert (answer.status, answer.json["error"]) in ((400, "bad_request"), (400, "runtime_id")), (path, answer)


def test_an_internal_error_does_not_show_a_token(call: Caller) -> None:
    camps = [{"url": "http://h", "token": "hush-hush", "wrong": 1}]
    assert b"hush" not in call("POST", "/v1/games", {"runtime_id": "x", "game": "sleep", "camps": camps}).body
    assert b"hush" not in call("POST", "/v1/games", {"runtime_id": "x", "game": "sleep", "camps": [{"token": "hush-hush"}]}).body


@pytest.mark.parametrize("query", ["timeout_s=nan", "timeout_s=-1", "timeout_s=61", "timeout_s=1e999", "timeout_s=x"])
def test_a_wait_is_bounded(call: Caller, query: str) -> None:
    assert call("GET", f"/v1/games/nobody/wait?{query}").status == 400


def test_a_body_that_is_too_large_is_refused_before_it_is_read(call: Caller) -> None:
    answer = call("POST", "/v1/games", raw=b" " * 20_001)
    assert (answer.status, answer.json["error"], answer.headers["connection"]) == (413, "body", "close")
    with connected(call) as line:
        line.sendall(b"POST /v1/games HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 4")
    with connected(call) as line:
        line.sendall(b"POST /v1/games HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        line.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n" + b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 413")


def test_an_incomplete_body_times_out(call: Caller) -> None:
    with connected(call) as line:
        line.sendall(b"POST /v1/games HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert read_all(line).startswith(b"HTTP/1.1 408")


def test_a_connection_without_a_request_is_closed(call: Caller) -> None:
    with connected(call) as line:
        over = threading.Event()

        def trickle() -> None:  # one byte of a header now and then
            while not over.wait(0.2):
                try:
                    line.sendall(b"X")
                except OSError:
                    return

        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        slow = threading.Thread(target=trickle)
        slow.start()
        try:
            assert read_all(line) == b""
        finally:
            over.set()
            slow.join()


def test_headers_without_an_end_are_refused(call: Caller) -> None:
    with connected(call) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 40_000)
        assert b" 400 " in read_all(line)


def test_there_are_never_more_connections_than_allowed(call: Caller) -> None:
    lines = [connected(call) for _ in range(30)]
    try:
        wait_until(lambda: sum(is_closed(line) for line in lines) >= 18, what="the rest to be closed")
    finally:
        for line in lines:
            line.close()
    wait_until(lambda: answers(call), what="room again")


def test_web_pages_cannot_use_a_server_without_a_token(call: Caller) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example:80"}, {"Origin": "null"}):
        answer = call("POST", "/v1/games", {"runtime_id": "x", "game": "sleep"}, headers=headers)
        assert (answer.status, answer.json["error"]) == (403, "browser")
    for host in ("localhost", "127.0.0.1:1", "[::1]:23432", "LOCALHOST:5"):
        assert call("GET", "/health", headers={"Host": host}).status == 200


def test_there_are_never_more_games_than_allowed(call: Caller) -> None:
    for name in ("f1", "f2"):
        assert call.start(name, "sleep").status == 201
    refused = call.start("f3", "sleep")
    assert (refused.status, refused.json["error"]) == (503, "full")
    assert "--max-games" in refused.json["message"]
    for name in ("f1", "f2"):
        call("DELETE", f"/v1/games/{name}?grace_s=0")
    assert call.start("f3", "sleep").status == 201
    call("DELETE", "/v1/games/f3?grace_s=0")


def test_a_valid_request_id_is_returned(call: Caller) -> None:
    assert call("GET", "/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(call("GET", "/health", headers={"X-Request-ID": "a b<script>"}).headers["x-request-id"]) == 32
    assert len(call("GET", "/nowhere").headers["x-request-id"]) == 32


def test_a_server_with_tokens_requires_one(home: Path) -> None:
    tokens = home / "tokens"
    tokens.write_text("ci first-token\nslow second-token 0.1\n")
    settings = Settings(port=0, games=home / "games.yaml", state_dir=home / "with-token", token_file=tokens)
    with running(settings) as server:
        stranger, wrong, friend = (Caller(server.host, server.port, token) for token in (None, "first-tokem", "first-token"))
        for caller in (stranger, wrong):
            for method, path in (("GET", "/v1/games"), ("GET", "/metrics"), ("POST", "/v2/taskClear"), ("GET", "/v1/nowhere")):
                answer = caller(method, path)
                assert (answer.status, answer.json["error"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"] == "Bearer"
            assert caller("GET", "/health").json == {"status": "ok"}
        assert friend("GET", "/health").json == {"status": "ok", "running": 0}
        assert friend("GET", "/v1/games", headers={"Origin": "http://console.example"}).status == 200
        assert friend("GET", "/metrics").status == 200
        slow = Caller(server.host, server.port, "second-token")
        assert [slow("GET", "/v1/games").status for _ in range(2)] == [200, 429]
        tokens.write_text("ci second-token-now\n")
        second = Caller(server.host, server.port, "second-token-now")
        wait_until(lambda: second("GET", "/v1/games").status == 200, what="the new token to be read")
        assert friend("GET", "/v1/games").status == 401


def test_a_log_replaced_by_a_link_is_not_read(call: Caller) -> None:
    assert call("POST", "/v1/games", {"runtime_id": "linked", "game": "link-log"}).status == 201
    wait_until(lambda: call("GET", "/v1/games/linked").json["state"] == "finished", what="the game to end")
    shown = call("GET", "/v1/games/linked/log").body + call("GET", "/v1/games/linked").body
    assert b"root:" not in shown


def test_listening_beyond_loopback_requires_a_token(home: Path) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(UsageError, match="without a token would give anyone access"):
            Settings(host=host, state_dir=home / "never").check()
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        Settings(host=host, state_dir=home / "never").check()


def test_invalid_settings_are_reported_before_the_server_starts(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Settings(games=tmp_path / "none.yaml").check()
    with pytest.raises(UsageError, match="max-games"):
        Settings(max_games=0).check()
    with pytest.raises(UsageError, match="token file"):
        Settings(token_file=tmp_path / "none").check()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(port=taken.getsockname()[1], games=home / "games.yaml", state_dir=tmp_path / "s")
        with pytest.raises(UsageError, match="Cannot listen"), running(settings):
            pass


PROGRAM = """
import resource, sys
from ludus.gamecore.server.http.app import ServerLimits, Settings
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(*(
    settings.affordable_limits().connections
    for settings in (Settings(max_games=200), Settings(max_games=2000), Settings(http=ServerLimits(connections=5), max_games=1))
), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard", "said"), [(1024, 1024, "760 32 5 1024"), (1024, 7000, "4096 4096 5 6160")])
def test_connections_leave_files_for_the_games(soft: int, hard: int, said: str) -> None:
    """The soft limit is raised as needed, and connections are bounded by the hard limit."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(soft), str(hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == said.split()


def test_connections_without_a_token_never_keep_a_caller_out(home: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ci a-token-of-some-length\n")
    limits = ServerLimits(connections=4, unauthorized_idle_s=60.0)
    settings = Settings(port=0, games=home / "games.yaml", state_dir=tmp_path / "state", token_file=tokens, http=limits)
    with running(settings) as server, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection((server.host, server.port)))
        caller = Caller(server.host, server.port, "a-token-of-some-length")
        assert caller("GET", "/v1/games").status == 200


def test_a_request_with_two_tokens_is_refused(call: Caller) -> None:
    with socket.create_connection((call.host, call.port)) as raw:
        raw.sendall(b"GET /v1/games HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def test_two_servers_do_not_share_a_directory(call: Caller, home: Path) -> None:
    settings = Settings(port=0, games=home / "games.yaml", state_dir=home / "state")
    with pytest.raises(UsageError, match="Another gamecore server"), running(settings):
        pass
    assert call("GET", "/health").status == 200


def connected(call: Caller) -> socket.socket:
    return socket.create_connection((call.host, call.port), timeout=15)


def read_all(line: socket.socket) -> bytes:
    """Read until the server closes."""
    data = b""
    try:
        while part := line.recv(65_536):
            data += part
    except ConnectionError:
        pass
    return data


def is_closed(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def answers(call: Caller) -> bool:
    time.sleep(0.02)
    try:
        return call("GET", "/health").status == 200
    except OSError:
        return False
