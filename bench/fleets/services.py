"""Servers that a measurement starts for itself on free ports of this machine, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

BUILD = Path(__file__).parents[1] / ".build"
START_S = 15.0
PASSWORD_VARIABLE = "LUDUS_MEMORY_PASSWORD"


class Missing(Exception):
    """A program or package that this way needs is not here."""


@dataclass(frozen=True)
class RedisServer:
    port: int
    pid: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, resp: int = 2) -> redis.Redis:
        return redis.Redis(port=self.port, password=self.password, socket_timeout=30, protocol=resp)


@contextlib.contextmanager
def redis_server(*, durable: bool = False) -> Iterator[RedisServer]:
    """A server of its own, with a password, as Debian has it but without snapshots. `durable`: an append-only file, synced every second."""
    program = shutil.which("redis-server", path="/usr/bin") or shutil.which("redis-server")  # wheels bring older ones
    if program is None:
        raise Missing("redis-server is not installed (scripts/tools.sh redis-server)")
    with tempfile.TemporaryDirectory(prefix="ludus-bench-redis-") as directory:
        port, password = free_port(), secrets.token_hex(16)
        settings = {
            "bind": "127.0.0.1",
            "port": port,
            "requirepass": password,
            "save": '""',
            "dir": directory,
            "appendonly": "yes" if durable else "no",
        }
        log = (Path(directory) / "log").open("wb")
        process = subprocess.Popen(
            [program, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log
        )  # no password in the process list
        try:
            assert process.stdin is not None
            with process.stdin as entry:
                entry.write("".join(f"{key} {value}\n" for key, value in settings.items()).encode())
            server = RedisServer(port, process.pid, password)
            _await(server, process)
            yield server
        finally:
            process.kill()
            process.wait()
            log.close()


def _await(server: RedisServer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            server.client().ping()
            return
        except redis.ConnectionError:
            if process.poll() is not None or time.monotonic() > end:
                raise Missing(f"redis-server did not start within {START_S:g} s") from None
            time.sleep(0.02)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


@contextlib.contextmanager
def password_known(password: str) -> Iterator[None]:
    """In the variable in which our own client looks for it."""
    before = os.environ.get(PASSWORD_VARIABLE)
    os.environ[PASSWORD_VARIABLE] = password
    try:
        yield
    finally:
        if before is None:
            del os.environ[PASSWORD_VARIABLE]
        else:
            os.environ[PASSWORD_VARIABLE] = before


# -- SeaweedFS: S3, and a file system over the network --------------------------------------------------------------------


@dataclass(frozen=True)
class Seaweed:
    s3_port: int
    filer: str
    pid: int
    environment: dict[str, str]
    """What a client needs to be let in."""

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.s3_port}"


BUCKET = "bench"


@contextlib.contextmanager
def seaweed() -> Iterator[Seaweed]:
    """One server of everything, with credentials; its data lies on the disk of this checkout."""
    program = _weed()
    key, secret = secrets.token_hex(8), secrets.token_hex(20)
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weed-", dir=BUILD) as name:
        directory = Path(name)
        allowed = {
            "name": "bench",
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (directory / "s3.json").touch(mode=0o600)
        (directory / "s3.json").write_text(json.dumps({"identities": [allowed]}))
        ports = free_ports(8)
        words = [program, "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
        words += [f"-s3.config={directory}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        words += ["-master.volumeSizeLimitMB=1024", "-volume.max=16"]
        for role, (port, grpc) in zip(
            ("master", "volume", "filer", "s3"), zip(ports[::2], ports[1::2], strict=True), strict=True
        ):
            words += [f"-{role}.port={port}", f"-{role}.port.grpc={grpc}"]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, cwd=directory)
        environment = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}
        server = Seaweed(ports[6], f"127.0.0.1:{ports[4]}.{ports[5]}", process.pid, environment)
        try:
            _await_bucket(server, process)
            yield server
        finally:
            _end(process)


@contextlib.contextmanager
def mounted(server: Seaweed, directory: Path) -> Iterator[Path]:
    """What the server keeps, as files; each mount has a cache of its own, as each machine has."""
    if shutil.which("fusermount3") is None or not Path("/dev/fuse").exists():
        raise Missing("nothing can be mounted here (scripts/tools.sh fusermount3, and /dev/fuse)")
    directory.mkdir()
    cache = directory.with_name(f"{directory.name}-cache")
    words = [
        _weed(),
        "mount",
        f"-filer={server.filer}",
        f"-dir={directory}",
        "-filer.path=/shared",
        "-dirAutoCreate",
        f"-cacheDir={cache}",
    ]
    with directory.with_name(f"{directory.name}-log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while not directory.is_mount():
            if process.poll() is not None or time.monotonic() > end:
                raise Missing(f"weed mount did not come up within {START_S:g} s")
            time.sleep(0.05)
        yield directory
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False, capture_output=True, timeout=START_S)
        _end(process)


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        raise Missing("weed is not installed (scripts/tools.sh weed)")
    return program


def bucket(server: Seaweed) -> Any:
    """A client without anything of ours."""
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{server.s3_port}",
        access_key_id=server.environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=server.environment["AWS_SECRET_ACCESS_KEY"],
        region=server.environment["AWS_REGION"],
        client_options={"allow_http": True},
    )


def _await_bucket(server: Seaweed, process: subprocess.Popen[bytes]) -> None:
    import obstore

    client, end = bucket(server), time.monotonic() + 2 * START_S
    while True:
        try:
            obstore.put(client, "ready", b"yes")  # SeaweedFS makes the bucket with its first object, for one who may
            return
        except obstore.exceptions.BaseError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise Missing(f"SeaweedFS did not start: {error}") from error
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # what it kept goes with it, and asked politely it takes ten seconds
    process.wait()
