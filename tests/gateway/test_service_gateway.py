"""Operation of a gateway: token rotation, rate limits, TLS, draining, access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import UsageError
from ludus.gateway import server as gateways
from ludus.gateway.actor import Actor
from ludus.gateway.http_connection import AccessRecord, HttpLimits, Page
from ludus.gateway.server import Gateway, GatewaySettings, owner_of
from ludus.serving.access_log import AccessEntry, AccessLog
from tests.gateway.wire import PATIENCE_S, Reply, Wire, ask, raw, step
from tests.local_servers import Served, gateway
from tests.waiting import wait_until


class Echo(Actor):
    async def start(self, session: str, body: bytes) -> bytes:
        return json.dumps(list(self.about)).encode()

    async def tick(self, body: bytes) -> bytes:
        if body == b"raise":
            raise ValueError("as told")
        return body

    async def end(self, body: bytes) -> bytes:
        return body


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check files more often than once a second."""
    monkeypatch.setattr(gateways, "_WATCH_S", 0.05)


def bearer(token: str) -> list[str]:
    return [f"Authorization: Bearer {token}"]


def replace(path: Path, text: str) -> None:
    """Replace a file atomically, as tools for secret rotation do."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


# -- tokens -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("studio old\nload-test other 5\n")
    return path


def test_every_token_of_the_file_is_accepted_and_no_other(tokens: Path) -> None:
    with gateway(Echo, GatewaySettings(token_file=tokens)) as server:
        for token in ("old", "other"):
            assert ask(server.port, step("start", token, headers=bearer(token))).status == 200
        for wrong in ("", "olD", "old2", "studio", "studio old"):
            assert ask(server.port, step("start", "x", headers=bearer(wrong))).refusal == (401, "unauthorized")
        for page in ("/spec", "/metrics"):
            assert ask(server.port, raw(f"GET {page}")).refusal == (401, "unauthorized")
        for page in ("/health", "/ready"):
            assert ask(server.port, raw(f"GET {page}")).status == 200
        assert "requests" not in ask(server.port, raw("GET /health")).json
        assert "requests" in ask(server.port, raw("GET /health", bearer("old"))).json


def test_a_changed_token_file_is_reloaded_and_open_connections_need_a_new_token(tokens: Path) -> None:
    with gateway(Echo, GatewaySettings(token_file=tokens)) as server, Wire(server.port) as kept:
        assert kept.ask(step("start", "s", headers=bearer("old"))).status == 200
        for n in range(5):  # from the second one on the header block is known
            assert kept.ask(step("tick", "s", b"%d" % n, headers=bearer("old"))).body == b"%d" % n
        replace(tokens, "studio new\n")
        wait_until(lambda: ask(server.port, step("tick", "s", b"x", headers=bearer("new"))).status == 200, PATIENCE_S)
        assert kept.ask(step("tick", "s", b"5", headers=bearer("old"))).refusal == (401, "unauthorized")
        for n in range(5):
            assert kept.ask(step("tick", "s", b"%d" % n, headers=bearer("new"))).body == b"%d" % n
        assert kept.ask(step("tick", "s", b"5", headers=bearer("old"))).refusal == (401, "unauthorized")
        tokens.write_text("studio newer\nstudio new\n")  # both for a while: in place, too
        wait_until(lambda: ask(server.port, step("tick", "s", b"x", headers=bearer("newer"))).status == 200, PATIENCE_S)
        assert kept.ask(step("tick", "s", b"x", headers=bearer("new"))).body == b"x"


@pytest.mark.parametrize("broken", ["", "# nobody\n", "a b c d e\n", "tökén\n", "a b minus\n", None])
def test_an_invalid_token_file_keeps_the_previous_tokens(
    tokens: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(Echo, GatewaySettings(token_file=tokens)) as server, Wire(server.port) as kept:
        assert kept.ask(step("start", "s", headers=bearer("old"))).status == 200
        if broken is None:
            tokens.unlink()
        else:
            replace(tokens, broken)
        wait_until(lambda: "cannot reload the tokens" in caplog.text, PATIENCE_S)
        assert kept.ask(step("tick", "s", b"x", headers=bearer("old"))).body == b"x"
        assert ask(server.port, step("tick", "s", b"x", headers=bearer("wrong"))).status == 401
        replace(tokens, "studio new\n")
        wait_until(lambda: kept.ask(step("tick", "s", b"x", headers=bearer("new"))).status == 200, PATIENCE_S)
        assert ask(server.port, step("tick", "s", b"x", headers=bearer("old"))).status == 401
    assert "other" not in caplog.text.replace("readable by others", ""), "the log contains no token"


def test_a_home_directory_is_watched_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokens").write_text("old\n")
    with gateway(Echo, GatewaySettings(token_file=Path("~/tokens"))) as server:
        assert ask(server.port, step("start", "s", headers=bearer("old"))).status == 200
        replace(tmp_path / "tokens", "new\n")
        wait_until(lambda: ask(server.port, step("tick", "s", b"x", headers=bearer("new"))).status == 200, PATIENCE_S)


def test_a_token_above_its_rate_gets_429_and_others_are_unaffected(tokens: Path) -> None:
    with gateway(Echo, GatewaySettings(token_file=tokens)) as server, Wire(server.port) as fast, Wire(server.port) as other:
        assert fast.ask(step("start", "f", headers=bearer("other"))).status == 200
        assert other.ask(step("start", "o", headers=bearer("old"))).status == 200
        replies = [fast.ask(step("tick", "f", b"x", headers=bearer("other"))) for _ in range(12)]
        refused = [reply for reply in replies if reply.status != 200]
        assert len(refused) >= 6
        assert {reply.refusal for reply in refused} == {(429, "too_many_requests")}
        assert all(reply.headers["retry-after"] == "1" for reply in refused)
        for _ in range(40):
            assert other.ask(step("tick", "o", b"x", headers=bearer("old"))).status == 200
        wait_until(lambda: fast.ask(step("tick", "f", b"again", headers=bearer("other"))).body == b"again", PATIENCE_S)
        assert ask(server.port, raw("GET /health", bearer("old"))).json["refused_before"]["too_many_requests"] >= 6


def test_the_rate_is_that_of_the_token_over_all_its_connections(tokens: Path) -> None:
    with gateway(Echo, GatewaySettings(token_file=tokens, token_rate=3.0)) as server:
        statuses = [ask(server.port, step("start", f"s{n}", headers=bearer("old"))).status for n in range(8)]
        assert statuses[:3] == [200] * 3
        assert statuses.count(429) >= 3


@pytest.mark.parametrize("text", ["", "a b c d e\n"])
def test_invalid_files_are_reported_before_serving(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(UsageError, match="token file"):
        asyncio.run(built(GatewaySettings(token_file=tmp_path / "tokens")))


async def built(settings: GatewaySettings) -> Gateway:
    return Gateway(Echo, settings)


# -- TLS ----------------------------------------------------------------------------------------------------------------------

_SUBJECT = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]


def certificate(where: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    where.mkdir(exist_ok=True)
    pair = where / "cert.pem", where / "key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-out", str(pair[0]), "-keyout", str(pair[1])]
    subprocess.run([openssl, "req", "-x509", *kind, *_SUBJECT, *files], check=True, capture_output=True, timeout=60)
    return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    return [certificate(tmp_path_factory.mktemp("tls") / name) for name in ("one", "two")]


@pytest.fixture
def pair(pairs: list[tuple[Path, Path]], tmp_path: Path) -> tuple[Path, Path]:
    """A replaceable copy of the first certificate."""
    mine = tmp_path / "cert.pem", tmp_path / "key.pem"
    for source, target in zip(pairs[0], mine, strict=True):
        shutil.copy(source, target)
    return mine


class SecureWire(Wire):
    def __init__(self, port: int, trusted: Path) -> None:
        super().__init__(port)
        context = ssl.create_default_context(cafile=str(trusted))
        try:
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        except BaseException:
            self.socket.close()
            raise


def trusts(port: int, certificate_: Path) -> bool:
    try:
        with SecureWire(port, certificate_) as wire:
            return wire.ask(raw("GET /ready")).status == 200
    except ssl.SSLCertVerificationError:
        return False


def test_sessions_are_played_over_tls(pair: tuple[Path, Path]) -> None:
    with (
        gateway(Echo, GatewaySettings(tls=pair, token="t"), direct_port=4711) as server,
        SecureWire(server.port, pair[0]) as wire,
    ):
        started = wire.ask(step("start", "s", headers=bearer("t")))
        assert started.headers["ludus-endpoint"] == "127.0.0.1:4711"
        large = os.urandom(1 << 20)
        for body in (b"", b"x", large, b"y"):
            assert wire.ask(step("tick", "s", body, headers=bearer("t"))).body == body
        assert isinstance(wire.socket, ssl.SSLSocket)
        assert wire.socket.version() in ("TLSv1.2", "TLSv1.3")
        wire.send(raw("GET /spec", ["Connection: close"]))
        assert [reply.status for reply in wire.rest()] == [401]


def test_plain_http_on_a_tls_port_is_rejected_harmlessly(pair: tuple[Path, Path]) -> None:
    settings = GatewaySettings(http=HttpLimits(receive_s=0.3), tls=pair)
    with gateway(Echo, settings) as server, SecureWire(server.port, pair[0]) as wire:
        assert wire.ask(step("start", "s")).status == 200
        for said in (step("tick", "s", b"x"), b"\x00" * 500, b"\x16\x03\x01\x02\x00" + b"\xff" * 600, os.urandom(3000)):
            with Wire(server.port) as plain:
                plain.send(said)
                with pytest.raises((ConnectionError, ValueError, AssertionError, TimeoutError)):
                    plain.read()
        with Wire(server.port) as silent:  # connected, and no handshake
            assert silent.closed()
        assert wire.ask(step("tick", "s", b"still here")).body == b"still here"
        assert len(server.gateway.sessions) == 1


def test_a_replaced_certificate_is_used_by_new_connections(
    pair: tuple[Path, Path], pairs: list[tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(Echo, GatewaySettings(tls=pair)) as server, SecureWire(server.port, pairs[0][0]) as kept:
        assert kept.ask(step("start", "s")).status == 200
        replace(pair[0], pairs[1][0].read_text())  # the key is not there yet: they do not fit
        wait_until(lambda: "cannot reload the certificate" in caplog.text, PATIENCE_S)
        assert trusts(server.port, pairs[0][0]), "half a change must not spoil what is in use"
        replace(pair[1], pairs[1][1].read_text())
        wait_until(lambda: trusts(server.port, pairs[1][0]), PATIENCE_S)
        assert not trusts(server.port, pairs[0][0])
        assert kept.ask(step("tick", "s", b"x")).body == b"x"
        replace(pair[0], "nonsense")
        wait_until(lambda: caplog.text.count("cannot reload the certificate") == 2, PATIENCE_S)
        assert trusts(server.port, pairs[1][0])


def test_invalid_tokens_do_not_prevent_a_certificate_reload(
    pair: tuple[Path, Path], pairs: list[tuple[Path, Path]], tokens: Path
) -> None:
    with gateway(Echo, GatewaySettings(tls=pair, token_file=tokens)) as server:
        tokens.write_text("")
        for source, target in zip(pairs[1], pair, strict=True):
            replace(target, source.read_text())
        wait_until(lambda: trusts(server.port, pairs[1][0]), PATIENCE_S)


def test_an_unusable_certificate_is_reported_before_serving(pairs: list[tuple[Path, Path]], tmp_path: Path) -> None:
    mixed = pairs[0][0], pairs[1][1]
    missing = tmp_path / "cert.pem", pairs[0][1]
    for files in (mixed, missing, (pairs[0][1], pairs[0][0])):
        with pytest.raises(UsageError, match="certificate"):
            asyncio.run(built(GatewaySettings(tls=files)))


@contextlib.contextmanager
def workers(directory: Path, settings: GatewaySettings) -> Iterator[list[Served]]:
    """Two of them, in threads."""
    paths = [str(directory / str(slot)) for slot in range(2)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(gateway(Echo, settings, slot=slot, peer_paths=paths, direct_port=1 + slot)) for slot in range(2)
        ]


def owned(slot: int, count: int) -> list[str]:
    return [id_ for id_ in (f"s{n}" for n in range(100)) if owner_of(id_.encode(), 2) == slot][:count]


def test_with_tls_workers_forward_requests_to_the_owner(pair: tuple[Path, Path], tmp_path: Path) -> None:
    asked = ["model: hard", "side: red", "version: 3", "temperature: 0.25", *bearer("t")]
    with workers(tmp_path, GatewaySettings(tls=pair, token="t")) as served, SecureWire(served[0].port, pair[0]) as wire:
        for slot in (1, 0):
            for id_ in owned(slot, 3):
                started = wire.ask(step("start", id_, seq=0, headers=asked))
                assert json.loads(started.body) == ["", "hard", 3, 0.25, "red"]
                assert started.headers["ludus-endpoint"] == f"127.0.0.1:{1 + slot}"
                for n in range(1, 6):
                    body = f"{id_} {n}".encode()
                    assert wire.ask(step("tick", id_, body, seq=n, headers=bearer("t"))).body == body
                    assert wire.ask(step("tick", id_, body, seq=n, headers=bearer("t"))).body == body
        assert [len(one.gateway.sessions) for one in served] == [3, 3]
        counters = [one.gateway.counters() for one in served]
        assert [(one["handed_over"], one["forwarded"]) for one in counters] == [(0, 3 * 11), (0, 0)]


# -- draining -----------------------------------------------------------------------------------------------------------------


def test_a_draining_gateway_accepts_no_new_sessions_and_finishes_open_ones() -> None:
    with gateway(Echo) as server, Wire(server.port) as wire:
        assert wire.ask(step("start", "s", seq=0)).status == 200
        assert ask(server.port, raw("GET /ready")).status == 200
        server.run(called(server.gateway.drain))
        ready = ask(server.port, raw("GET /ready"))
        assert (ready.status, ready.json) == (503, {"status": "draining"})
        assert ask(server.port, raw("GET /health")).status == 200, "it lives"
        refused = ask(server.port, step("start", "new"))
        assert refused.refusal == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert wire.ask(step("start", "s", seq=0)).status == 200, "a retry of what had begun before"
        assert wire.ask(step("tick", "s", b"x", seq=1)).body == b"x"
        assert server.run(server.gateway.has_open_sessions())
        assert wire.ask(step("end", "s", seq=2)).status == 200
        assert not server.run(server.gateway.has_open_sessions())
        assert wire.ask(step("start", "s", seq=3)).refusal == (503, "draining")


def test_a_draining_worker_waits_for_sessions_forwarded_through_it(tmp_path: Path) -> None:
    (theirs,) = owned(1, 1)
    with workers(tmp_path, GatewaySettings()) as served, Wire(served[0].port) as wire:
        assert wire.ask(raw("GET /spec")).status == 200  # from here on the connection stays
        assert wire.ask(step("start", theirs)).status == 200
        for one in served:
            one.run(called(one.gateway.drain))
        assert served[0].run(served[0].gateway.has_open_sessions())
        assert wire.ask(step("tick", theirs, b"x")).body == b"x"
        assert wire.ask(step("end", theirs)).status == 200
        assert not served[0].run(served[0].gateway.has_open_sessions())
        assert not served[1].run(served[1].gateway.has_open_sessions())


def test_draining_does_not_wait_for_dead_workers(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(slot)) for slot in range(2)]
    (theirs,) = owned(1, 1)
    with gateway(Echo, slot=0, peer_paths=paths) as mine, Wire(mine.port) as wire:
        assert wire.ask(raw("GET /spec")).status == 200
        with gateway(Echo, slot=1, peer_paths=paths):
            assert wire.ask(step("start", theirs)).status == 200
            assert mine.run(mine.gateway.has_open_sessions())
        assert not mine.run(mine.gateway.has_open_sessions())


async def called(function: Callable[[], None]) -> None:
    function()


# -- what a start may ask for -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with gateway(Echo) as served:
        yield served


def start(port: int, *headers: str, path: str = "/step") -> Reply:
    with Wire(port) as wire:
        reply = wire.ask(raw(f"POST {path}", ["session: s", "step_kind: start", "Content-Length: 0", *headers]))
        if reply.status == 200:
            assert wire.ask(step("end", "s")).status == 200
        return reply


@pytest.mark.parametrize("prefix", ["", "Ludus-", "LUDUS-"])
def test_model_version_and_temperature_reach_the_actor(server: Served, prefix: str) -> None:
    headers = [
        f"{prefix}model: hard",
        f"{prefix}version: 12",
        f"{prefix}temperature: 0.5",
        f"{prefix}match: m",
        f"{prefix}side: red",
    ]
    assert json.loads(start(server.port, *headers).body) == ["m", "hard", 12, 0.5, "red"]
    assert json.loads(start(server.port).body) == ["", "", -1, -1.0, ""]


@pytest.mark.parametrize(("said", "means"), [("0", 0.0), ("100", 100.0), ("1e1", 10.0), (".5", 0.5)])
def test_temperatures_in_every_spelling(server: Served, said: str, means: float) -> None:
    assert json.loads(start(server.port, f"temperature: {said}").body)[3] == means


@pytest.mark.parametrize(
    ("header", "error"),
    [
        ("version: -1", "version"),
        ("version: 1.5", "version"),
        ("version: latest", "version"),
        ("version: 99999999999999999999", "version"),
        ("version:", "version"),
        ("temperature: -0.1", "temperature"),
        ("temperature: 101", "temperature"),
        ("temperature: nan", "temperature"),
        ("temperature: inf", "temperature"),
        ("temperature: hot", "temperature"),
        ("temperature:", "temperature"),
        (f"temperature: 0.{'1' * 60}", "temperature"),
        (f"model: {'m' * 257}", "model"),
    ],
)
def test_invalid_start_headers_get_400_with_their_name(server: Served, header: str, error: str) -> None:
    assert start(server.port, header).refusal == (400, error)
    assert len(server.gateway.sessions) == 0


@pytest.mark.parametrize(
    ("path", "model"),
    [("/step/hard", "hard"), ("/step/", ""), ("/step/a%2Fb", "a/b"), ("/step/%C3%A4%20b", "ä b"), ("/step/x?y=z", "x")],
)
def test_the_path_names_the_model_too(server: Served, path: str, model: str) -> None:
    assert json.loads(start(server.port, path=path).body)[1] == model


def test_unknown_paths_and_methods_are_reported(server: Served) -> None:
    assert start(server.port, path="/step/" + "m" * 257).refusal == (400, "model")
    assert start(server.port, path="/steps").refusal == (404, "not_found")
    for path in ("/step", "/step/hard"):
        refused = ask(server.port, raw(f"GET {path}"))
        assert refused.refusal == (405, "method")
        assert refused.headers["allow"] == "POST"
    refused = ask(server.port, raw("POST /ready", ["Content-Length: 0"]))
    assert refused.refusal == (405, "method")
    assert refused.headers["allow"] == "GET"


# -- ids and the log ----------------------------------------------------------------------------------------------------------


def test_a_request_id_comes_back_with_every_reply(server: Served) -> None:
    with Wire(server.port) as wire:
        for n, kind in enumerate(("start", "tick", "tick", "end", "end")):
            reply = wire.ask(step(kind, "ids", b"x", headers=[f"X-Request-Id: id-{n}"]))
            assert reply.headers["x-request-id"] == f"id-{n}"
        assert reply.status == 404
        assert wire.ask(raw("GET /spec", ["x-request-id: page"])).headers["x-request-id"] == "page"
        assert "x-request-id" not in wire.ask(raw("GET /spec")).headers


@pytest.mark.parametrize("id_", ["a\tb", "ä", "x" * 129])
def test_an_unprintable_or_long_request_id_is_dropped_or_cut(server: Served, id_: str) -> None:
    found = ask(server.port, raw("GET /spec", [f"X-Request-Id: {id_}"])).headers.get("x-request-id", "")
    assert found in ("", "x" * 128)


class RecordingExtension:
    """A gateway extension that only writes the access log."""

    def __init__(self, path: Path, ticks: bool = False) -> None:
        self._log, self._ticks = AccessLog(path, flush_s=0.02), ticks

    def on_start(self, gateway: Gateway) -> None:
        gateway.access_log, gateway.log_ticks = self._log_request, self._ticks

    def _log_request(self, record: AccessRecord) -> None:
        fields = record._asdict()
        fields["kind"], fields["ms"] = record.kind or fields.pop("path"), fields.pop("seconds") * 1e3
        fields.pop("path", None)
        self._log.record(AccessEntry(**fields))

    def sweep(self, now: float) -> None: ...

    def page(self, path: str) -> Page | None:
        return None

    async def on_stop(self) -> None:
        self._log.close()


SECRETS = ("s3cret", "b0dy", "st0len")


def logged(tmp_path: Path, *, ticks: bool = False) -> list[dict[str, Any]]:
    """Send requests of every kind, and return the access log."""
    (tmp_path / "tokens").write_text("studio s3cret\n")
    settings = GatewaySettings(token_file=tmp_path / "tokens")
    with gateway(Echo, settings, extension=RecordingExtension(tmp_path / "log", ticks)) as server, Wire(server.port) as wire:
        good = bearer("s3cret")
        assert wire.ask(step("start", "s", b"b0dy", seq=0, headers=good)).status == 200
        for n in range(1, 4):
            assert wire.ask(step("tick", "s", b"b0dy", seq=n, headers=good)).status == 200
        told = wire.ask(step("tick", "s", b"b0dy", seq=9, headers=good))
        assert told.refusal == (409, "seq")
        assert told.headers["x-request-id"], "an error has an id, so that it can be found in the log"
        assert wire.ask(step("end", "s", b"b0dy", seq=4, headers=[*good, "X-Request-Id: mine"])).status == 200
        assert wire.ask(step("start", "t", headers=bearer("st0len"))).status == 401
        assert wire.ask(step("start", "f", headers=good)).status == 200
        assert wire.ask(step("tick", "f", b"raise", headers=good)).status == 500
        assert wire.ask(raw("GET /spec?token=s3cret", good)).status == 200
        assert wire.ask(raw("GET /nowhere?token=s3cret", good)).status == 404
    text = (tmp_path / "log").read_text()
    assert not any(secret in text for secret in SECRETS)
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert told.headers["x-request-id"] in [line.get("request_id") for line in lines]
    return lines


def test_the_access_log_has_starts_ends_and_refusals_and_no_secrets(tmp_path: Path) -> None:
    lines = logged(tmp_path)
    assert [(line["kind"], line["status"], line.get("session"), line.get("error")) for line in lines] == [
        ("start", 200, "s", None),
        ("tick", 409, "s", "seq"),
        ("end", 200, "s", None),
        ("start", 401, "t", "unauthorized"),
        ("start", 200, "f", None),
        ("tick", 500, "f", "actor_failed"),
        ("/nowhere", 404, None, "not_found"),
    ]
    assert [line.get("seq") for line in lines[:3]] == [0, 9, 4]
    assert lines[2]["request_id"] == "mine"
    assert [line.get("caller") for line in lines] == ["studio"] * 3 + [None] + ["studio"] * 3
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    assert all(0 <= line["ms"] < 10_000 for line in lines)


def test_the_access_log_has_ticks_when_enabled(tmp_path: Path) -> None:
    lines = logged(tmp_path, ticks=True)
    assert [line["seq"] for line in lines if line["kind"] == "tick" and line["status"] == 200] == [1, 2, 3]


def test_a_connection_that_is_refused_is_logged(tmp_path: Path) -> None:
    with gateway(Echo, extension=RecordingExtension(tmp_path / "log")) as server, Wire(server.port) as wire:
        wire.send(b"NONSENSE\r\n\r\n")
        assert [reply.status for reply in wire.rest()] == [400]
    (line,) = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (line["status"], line["error"]) == (400, "malformed")


def test_a_page_of_an_extension_needs_a_token(tmp_path: Path) -> None:
    class Home(RecordingExtension):
        def page(self, path: str) -> Page | None:
            return Page(200, b"welcome", "text/plain") if path == "/metrics" else None

    with gateway(Echo, GatewaySettings(token="t"), extension=Home(tmp_path / "log")) as server:
        found = ask(server.port, raw("GET /metrics", bearer("t")))
        assert (found.status, found.body, found.headers["content-type"]) == (200, b"welcome", "text/plain")
        assert ask(server.port, raw("GET /metrics")).status == 401
        with Wire(server.port) as wire:
            wire.send(raw("HEAD /metrics", bearer("t")))
            assert wire.read(bodiless=True).headers["content-length"] == "7"
