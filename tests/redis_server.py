"""A real Redis server on a free port of this machine, to be used and maltreated by tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools import need

_START_S = 30.0


def redis_binary() -> str | None:
    """The one that LUDUS_REDIS_SERVER names, or Debian's: wheels put older ones into the environment's bin."""
    if chosen := os.environ.get("LUDUS_REDIS_SERVER"):
        return chosen
    return "/usr/bin/redis-server" if Path("/usr/bin/redis-server").exists() else shutil.which("redis-server")


def require_redis() -> str:
    """It is installed first where that is possible; else the test is skipped, with the reason."""
    return redis_binary() or need("redis-server")


class RedisServer:
    """With a password (of the default user, and of the user `player`, who may use nothing but keys of ludus) and, unless told
    otherwise, a log that is written before anything is answered: what was answered survives a kill."""

    def __init__(
        self, directory: Path, *, aof: bool = True, fsync: str = "no", tls: bool = False, options: Sequence[str] = ()
    ) -> None:
        self.directory, self.port = directory, _free_port()
        self.password, self.player_password = secrets.token_hex(12), secrets.token_hex(12)
        self._tls = tls
        directory.mkdir(parents=True, exist_ok=True)
        if tls:
            make_certificate(directory)
        (directory / "redis.conf").write_text(self._config(aof, fsync, tls, options), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _config(self, aof: bool, fsync: str, tls: bool, options: Sequence[str]) -> str:
        lines = [
            *("bind 127.0.0.1", f"dir {self.directory}", 'save ""', f"requirepass {self.password}"),
            f"user player on >{self.player_password} ~ludus:* +@read +@write +@scripting +@connection",
            *(f"appendonly {'yes' if aof else 'no'}", f"appendfsync {fsync}", "auto-aof-rewrite-percentage 0"),
        ]
        if tls:
            lines += [
                f"port 0\ntls-port {self.port}",
                "tls-cert-file server.crt",
                "tls-key-file server.key",
                "tls-ca-cert-file ca.crt",
            ]
            lines += ["tls-auth-clients no"]
        else:
            lines += [f"port {self.port}"]
        return "\n".join([*lines, *options, ""])

    @property
    def url(self) -> str:
        """Without the password, which is for the variable LUDUS_MEMORY_PASSWORD."""
        return (
            f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.directory}/ca.crt"
            if self._tls
            else f"redis://127.0.0.1:{self.port}"
        )

    @property
    def full_url(self) -> str:
        return self.url.replace("://", f"://:{self.password}@")

    @property
    def player_url(self) -> str:
        return self.url.replace("://", f"://player:{self.player_password}@")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Any:
        """Of redis-py, as an oracle that is not ours."""
        import redis

        return redis.Redis.from_url(self.full_url, protocol=2)

    def start(self) -> None:
        assert self._process is None
        with open(self.directory / "redis.log", "ab") as out:
            self._process = subprocess.Popen(
                [require_redis(), str(self.directory / "redis.conf")], stdout=out, stderr=out, cwd=self.directory
            )
        end = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                told = (self.directory / "redis.log").read_text(encoding="utf-8")[-2000:]
                if self._tls and ("tls-port" in told or "TLS support" in told):
                    pytest.skip("this redis-server was built without TLS")
                pytest.fail(f"redis-server did not start:\n{told}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        import redis

        client = self.client()
        try:
            return bool(client.ping())
        except redis.exceptions.RedisError:
            return False
        finally:
            client.close()

    def kill(self) -> None:
        """With -9: nothing is written any more."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Connections are accepted by the kernel, and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def set(self, name: str, value: str) -> None:
        with contextlib.closing(self.client()) as client:
            client.config_set(name, value)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def make_certificate(directory: Path) -> None:
    """An authority of our own, and a certificate of it for 127.0.0.1."""

    def run(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificates can be made")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test authority")
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (directory / "extra").write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
    run("x509", "-req", "-in", "server.csr", "-out", "server.crt", *sign)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Line:
    """A line to a server that can be cut: connections break after so many more bytes in one direction."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._left: dict[str, int | None] = {"up": None, "down": None}
        self.cuts = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, *, up: int | None = None, down: int | None = None) -> None:
        """Once: the connection on which it happens is gone, the next one is whole."""
        with self._lock:
            self._left = {"up": up, "down": down}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                for source, target, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._carry, args=(source, target, way), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    left = self._left[way]
                    over = left is not None and len(data) >= left
                    if over:
                        self._left[way], data, self.cuts = None, data[:left], self.cuts + 1
                    elif left is not None:
                        self._left[way] = left - len(data)
                target.sendall(data)
                if over:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
