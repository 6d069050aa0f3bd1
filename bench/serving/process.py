"""A server under test as a tree of processes: started, found ready, measured, and ended to the last descendant."""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import psutil

from bench.serving.stacks import Stack, base_environment

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER_CPU, LOAD_CPU = 0, 1
POLL_S = 0.1
GRACE_S = 25.0
TAIL_CHARS = 1500
PR_SET_CHILD_SUBREAPER = 36


class ServerFailed(Exception):
    """It did not come up, or went down; the message is the end of what it wrote."""


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of leaving the tree (daemons, haproxy)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def can_pin() -> bool:
    return {SERVER_CPU, LOAD_CPU} <= os.sched_getaffinity(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Server:
    """All descendants of this process are the server's, except `not_mine`: only one server runs at a time."""

    stack: Stack
    port: int
    pinned: bool

    def tree(self, not_mine: int = -1) -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process.pid != not_mine]


def cpu_seconds(tree: list[psutil.Process]) -> float:
    """Of these processes and of the children that they have already reaped."""
    total = 0.0
    for process in tree:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def resident_bytes(tree: list[psutil.Process]) -> int:
    total = 0
    for process in tree:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def end_tree() -> list[str]:
    """End every descendant of this process, politely and then not; says which ones needed force."""
    # Those that ended are reaped by wait_procs; new orphans may arrive while their parents end, hence the second look.
    forced = []
    deadline = time.monotonic() + 3 * GRACE_S
    while left := [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]:
        if time.monotonic() > deadline:
            raise ServerFailed(f"these would not end: {[process.pid for process in left]}")
        for process in left:
            _signal(process, "terminate")
        _, alive = psutil.wait_procs(left, timeout=5.0)
        for process in alive:
            forced.append(f"{process.name()} {process.pid}")
            _signal(process, "kill")
        psutil.wait_procs(alive, timeout=5.0)
    _reap()
    return forced


def _reap() -> None:
    """Adopted processes that have ended wait for this; nothing else is a child of this process by now."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, how: str) -> None:
    try:
        getattr(process, how)()
    except psutil.NoSuchProcess:
        return


@contextmanager
def serving(stack: Stack) -> Iterator[Server]:
    """Raises ServerFailed. On leaving, the server and all that it started is gone."""
    if stack.missing:
        raise ServerFailed(stack.missing)
    port, pinned = free_port(), stack.pinned and can_pin()
    # Directly under /tmp: below a longer path Ray's sockets would exceed the 107 bytes of a Unix address.
    with tempfile.TemporaryDirectory(prefix="lb-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        command = [str(stack.python), "-m", *(_filled(word, port, temp) for word in stack.words)]
        if pinned:
            command = ["taskset", "-c", str(SERVER_CPU), *command]
        own = {name: _filled(value, port, temp) for name, value in stack.environment.items()}
        output = Path(temp) / "output"
        with _process(command, base_environment() | own | {"TMPDIR": temp}, output) as process:
            _await_ready(stack, port, process, output)
            yield Server(stack, port, pinned)


def _filled(word: str, port: int, temp: str) -> str:
    values = {
        "{port}": lambda: str(port),
        "{temp}": lambda: temp,
        "{free}": lambda: str(free_port()),
        "{secret}": lambda: token_hex(32),
    }
    for place, value in values.items():
        if place in word:
            word = word.replace(place, value())
    return word


@contextmanager
def _process(command: list[str], variables: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=variables)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(GRACE_S)
            end_tree()


def _await_ready(stack: Stack, port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + stack.ready_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"{stack.name} ended with {process.returncode}\n{_tail(output)}")
        if _answers(stack, port):
            return
        time.sleep(POLL_S)
    raise ServerFailed(f"{stack.name} was not ready after {stack.ready_s:.0f} s\n{_tail(output)}")


def _answers(stack: Stack, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    token = {"Authorization": f"Bearer {stack.token}"} if stack.token else {}
    try:
        for kind in ("start", "end"):
            connection.request("POST", "/step", b"", {"session": "probe", "step_kind": kind, **token})
            reply = connection.getresponse()
            reply.read()
            if reply.status != 200:
                return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL_CHARS:]
