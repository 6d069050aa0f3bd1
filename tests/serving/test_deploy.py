"""The files of deploy/ with real proxies and hosts, promtool and systemd-analyze."""

from __future__ import annotations

import configparser
import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

import ludus
from ludus.distributed.gateway_workers import bind
from tests.gateway.wire import Reply, Wire, raw
from tests.tools import need
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="Debian's programs")]

DEPLOY = Path(__file__).parents[2] / "deploy"
SOON_S = 20.0
LOST = {404, 410, 502, 503, 504}
PROXIES = ["nginx", "haproxy"]


def free_port() -> int:
    with bind("127.0.0.1", 0) as bound:
        return int(bound.getsockname()[1])


# -- hosts ---------------------------------------------------------------------------------------------------------------


class Host:
    """A stand-in for one `ludus serve` behind a proxy."""

    def __init__(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.serving.backend", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def name(self) -> bytes:
        return b"%d" % self.process.pid

    def drain(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made = [Host(), Host()]
    try:
        yield made
    finally:
        for host in made:
            host.kill()


@dataclass
class Silent:
    """A host that closes the connection on each step, or answers when enabled."""

    answers: bool = False
    heard: list[bytes] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._listening = bind("127.0.0.1", 0)
        self._listening.setblocking(True)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        stepped = False
        with peer, peer.makefile("rb") as stream, contextlib.suppress(OSError):
            while line := stream.readline():
                headers = http.client.parse_headers(stream)
                stream.read(int(headers.get("Content-Length", 0)))
                if line.startswith(b"POST"):
                    self.heard.append(line)
                    self.connections += not stepped
                    stepped = True
                    if not self.answers:
                        peer.shutdown(socket.SHUT_RDWR)
                        return
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


# -- proxies -------------------------------------------------------------------------------------------------------------


def configured(name: str, directory: Path, port: int, ports: list[int]) -> Path:
    """A file of deploy/ with replaced addresses."""
    text = (DEPLOY / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]).read_text()
    replacements = [(f"127.0.0.1:{8001 + i}", f"127.0.0.1:{host}") for i, host in enumerate(ports)]
    if name == "nginx":
        replacements.append(("listen 8000;", f"listen 127.0.0.1:{port};"))
        temporary = "".join(
            f"    {kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        replacements.append(("http {\n", "http {\n" + temporary))
        replacements.append(("access_log /var/log/nginx/", f"access_log {directory}/"))
    else:
        replacements.append(("bind :8000", f"bind 127.0.0.1:{port}"))
        replacements.append(("maxconn 20000", "maxconn 500"))  # so many descriptors need not be allowed here
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = directory / f"{name}.conf"
    path.write_text(text)
    return path


def command(name: str, path: Path, *, check: bool = False) -> list[str]:
    if name == "haproxy":
        return [need(name), *(["-c"] if check else ["-db"]), "-f", str(path)]
    user = " user root;" if os.geteuid() == 0 else ""
    aside = f"daemon off; pid {path.parent}/nginx.pid; error_log stderr;{user}"
    return [need(name), *(["-t"] if check else []), "-p", str(path.parent), "-c", str(path), "-g", aside]


@contextlib.contextmanager
def proxy(name: str, directory: Path, ports: list[int]) -> Iterator[int]:
    """Start a proxy for these hosts, and return its port."""
    port = free_port()
    path = configured(name, directory, port, ports)
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(command(name, path), stdout=said, stderr=said)
    try:
        wait_until(lambda: answers(port) or process.poll() is not None)
        assert process.poll() is None, (directory / "said").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(SOON_S)


def answers(port: int) -> bool:
    try:
        with Wire(port) as wire:
            return wire.ask(raw("GET /spec", ["Host: ludus"])).status == 200
    except OSError:
        return False


def step(kind: str, session: str, seq: int | None = None, *more: str, header: str = "Ludus-Session") -> bytes:
    numbered = [] if seq is None else [f"Ludus-Seq: {seq}"]
    lines = ["Host: ludus", f"{header}: {session}", f"Ludus-Step: {kind}", "Content-Length: 3", *numbered, *more]
    return raw("POST /step", lines, b"abc")


@dataclass
class Session:
    id: str
    host: bytes
    ticks: int = 0

    @property
    def seq(self) -> int:
        return self.ticks + 1


class Games:
    """Sessions that share connections."""

    def __init__(self, port: int, connections: int = 8) -> None:
        self._port = port
        self._wires = [Wire(port) for _ in range(connections)]
        self._turn = 0

    def __enter__(self) -> Games:
        return self

    def __exit__(self, *exc: object) -> None:
        for wire in self._wires:
            wire.socket.close()

    def ask(self, data: bytes) -> Reply:
        self._turn = (self._turn + 1) % len(self._wires)
        try:
            return self._wires[self._turn].ask(data)
        except ConnectionError:  # a proxy may close after an error
            self._wires[self._turn].socket.close()
            self._wires[self._turn] = Wire(self._port)
            return Reply(503, {}, b"")

    def start(self) -> Session | None:
        id_ = uuid.uuid4().hex
        reply = self.ask(step("start", id_, 0))
        return Session(id_, reply.body) if reply.status == 200 else None

    def started(self, count: int) -> list[Session]:
        found = [self.start() for _ in range(count)]
        assert None not in found
        return [session for session in found if session is not None]

    def tick(self, session: Session) -> Reply:
        reply = self.ask(step("tick", session.id, session.seq))
        if reply.status == 200:
            session.ticks += 1
            assert reply.body == b"%s:%d" % (session.host, session.ticks), "the session is not where it was"
        return reply


# -- traffic -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROXIES)
def test_every_session_stays_with_its_host_and_only_those_of_a_dead_one_are_lost(
    name: str, tmp_path: Path, hosts: list[Host]
) -> None:
    one, two = hosts
    with proxy(name, tmp_path, [host.port for host in hosts]) as port, Games(port) as games:
        sessions = games.started(40)
        for _ in range(5):
            assert {games.tick(session).status for session in sessions} == {200}
        mine = {host.name: [session for session in sessions if session.host == host.name] for host in hosts}
        assert min(map(len, mine.values())) >= 5, "the load is spread"
        one.kill()
        for session in mine[one.name]:
            assert games.tick(session).status in LOST
        for _ in range(3):
            assert {games.tick(session).status for session in mine[two.name]} == {200}
        fresh = games.started(20)
        assert {session.host for session in fresh} == {two.name}
        assert {games.tick(session).status for session in fresh} == {200}
        hosts[0] = Host(one.port)
        wait_until(lambda: any(s is not None and s.host == hosts[0].name for s in (games.start() for _ in range(5))))
        for session in mine[two.name]:
            assert games.tick(session).status == 200
        if name == "haproxy":  # it knows where each session is, wherever it would be put today
            assert {games.tick(session).status for session in fresh} == {200}


def test_a_host_that_drains_keeps_its_sessions_and_gets_no_new_ones_from_haproxy(tmp_path: Path, hosts: list[Host]) -> None:
    one, two = hosts
    with proxy("haproxy", tmp_path, [host.port for host in hosts]) as port, Games(port) as games:
        sessions = games.started(30)
        one.drain()
        wait_until(lambda: all(session is not None for session in [games.start() for _ in range(20)]))
        assert {session.host for session in games.started(20)} == {two.name}
        for _ in range(3):
            assert {games.tick(session).status for session in sessions} == {200}
        assert {session.host for session in sessions} == {one.name, two.name}


@pytest.mark.parametrize("name", PROXIES)
def test_internal_pages_are_blocked_by_the_proxy_and_requests_have_ids(name: str, tmp_path: Path, hosts: list[Host]) -> None:
    with Wire(hosts[0].port) as wire:
        assert "ludus-endpoint" in wire.ask(step("start", "direct", 0)).headers, "a host alone says where it is"
    with proxy(name, tmp_path, [host.port for host in hosts]) as port, Wire(port) as wire:
        started = wire.ask(step("start", "s", 0))
        assert started.status == 200
        assert "ludus-endpoint" not in started.headers
        assert len(started.headers["x-request-id"]) >= 32
        assert wire.ask(step("tick", "s", 1, "X-Request-Id: mine")).headers["x-request-id"] == "mine"
        for path in ("/metrics", "/health", "/ready", "/"):
            reply = wire.ask(raw(f"GET {path}", ["Host: ludus"]))
            assert reply.refusal == (404, "not_found"), path
        spec = wire.ask(raw("GET /spec", ["Host: ludus"]))
        assert (spec.status, spec.json["protocol"]) == (200, 1)
        large = wire.ask(
            raw(
                "POST /step",
                ["Host: ludus", "Ludus-Session: s", "Ludus-Step: tick", "Ludus-Seq: 2", "Content-Length: 3000000"],
                bytes(3_000_000),
            )
        )
        assert large.body == started.body + b":2"


@pytest.mark.parametrize("name", PROXIES)
def test_every_spelling_of_the_id_finds_its_host(name: str, tmp_path: Path, hosts: list[Host]) -> None:
    with proxy(name, tmp_path, [host.port for host in hosts]) as port, Wire(port) as wire:
        for header in ("session", "game_id", "game-id", "Ludus-Session"):
            ids = [uuid.uuid4().hex for _ in range(24)]
            first = [wire.ask(step("start", id_, 0, header=header)).body for id_ in ids]
            assert len(set(first)) == 2, header
            for id_, host in zip(ids, first, strict=True):
                spelt = raw("POST /step", ["Host: ludus", f"{header}: {id_}", "step_kind: tick", "seq: 1", "Content-Length: 0"])
                assert wire.ask(spelt).body == host + b":1", header


@pytest.fixture
def silent() -> Iterator[list[Silent]]:
    made = [Silent(), Silent()]
    try:
        yield made
    finally:
        for host in made:
            host.close()


@pytest.mark.parametrize("name", PROXIES)
def test_a_request_that_may_have_arrived_is_not_sent_twice_unless_it_has_a_number(
    name: str, tmp_path: Path, silent: list[Silent]
) -> None:
    with proxy(name, tmp_path, [host.port for host in silent]) as port:
        with Wire(port) as wire:
            assert wire.ask(step("tick", "a", None)).status in {502, 503}
        assert sum(len(host.heard) for host in silent) == 1
        with Wire(port) as wire:
            assert wire.ask(step("tick", "b", 3)).status in {502, 503}
        heard = sum(len(host.heard) for host in silent) - 1
        assert heard == 1 if name == "nginx" else 2 <= heard <= 3


@pytest.mark.parametrize("name", PROXIES)
def test_connections_to_hosts_are_kept(name: str, tmp_path: Path, silent: list[Silent]) -> None:
    for host in silent:
        host.answers = True
    with proxy(name, tmp_path, [host.port for host in silent]) as port, Wire(port) as wire:
        for number in range(200):
            assert wire.ask(step("tick", "a", number)).body == b"ok"
    assert sorted(len(host.heard) for host in silent) == [0, 200]
    assert sum(host.connections for host in silent) <= 2


# -- what each program says of its file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROXIES)
def test_the_config_file_is_valid_for_its_program(name: str, tmp_path: Path) -> None:
    path = configured(name, tmp_path, free_port(), [8001, 8002])
    done = subprocess.run(command(name, path, check=True), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower(), done.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool = need("promtool")
    for arguments in (["check", "rules", "prometheus-alerts.yml"], ["test", "rules", "prometheus-alerts-test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    tests = yaml.safe_load((DEPLOY / "prometheus-alerts-test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == alerts
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == alerts


def test_the_unit_is_valid_for_systemd_and_sandboxed(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze")
    text = (DEPLOY / "ludus.service").read_text()
    unit = tmp_path / "ludus.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", "--threshold=25", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert rated.returncode == 0, rated.stdout[-300:]


def test_the_unit_allows_time_for_draining() -> None:
    unit = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "ludus.service")
    service = unit["Service"]
    drain = re.search(r"--drain-s (\d+)", service["ExecStart"])
    assert drain is not None
    assert int(service["TimeoutStopSec"]) >= int(drain[1]) + 15
    assert service["KillMode"] == "mixed", "workers are asked by their supervisor"
    assert "token" in service["LoadCredential"]
    assert "${CREDENTIALS_DIRECTORY}/token" in service["ExecStart"]


def test_alerts_use_existing_metrics() -> None:
    told = (Path(ludus.__file__).parent / "serving" / "prometheus.py").read_text()
    for name in set(re.findall(r"\bludus_[a-z_]+", (DEPLOY / "prometheus-alerts.yml").read_text())):
        assert f'"{name.removesuffix("_bucket")}"' in told, name
