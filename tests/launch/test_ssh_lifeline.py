"""The lifeline of a job on several machines: authentication, notification of the end, reconnection and time-out."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.launch.ssh.lifeline import LifelineServer, hold, listen
from ludus.process.auth import MAX_UNAUTHENTICATED, write_token
from ludus.process.job_env import JobEnv, find_free_ports

TOKEN = b"0123456789abcdef0123456789abcdef"
HERE = "127.0.0.1"
_WAIT_S = 30.0


def run_scene(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(_WAIT_S):
            await scene()

    asyncio.run(bounded())


def test_all_clients_are_notified_of_the_end() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            where = listening.getsockname()
            server = LifelineServer(TOKEN, (1, 2))
            serving = asyncio.create_task(server.serve(listening))
            clients = [asyncio.create_task(hold(where, node, TOKEN, 10)) for node in (1, 2)]
            await wait_for_clients(server, 2)
            assert not any(task.done() for task in clients)
            server.close()
            assert await asyncio.gather(*clients) == [True, True]
            await serving

    run_scene(scene)


def test_a_late_client_is_notified_of_the_end() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            server = LifelineServer(TOKEN, (1,))
            server.close()
            serving = asyncio.create_task(server.serve(listening))
            assert await hold(listening.getsockname(), 1, TOKEN, 10)
            await serving

    run_scene(scene)


def test_the_server_does_not_wait_for_ever_for_a_dead_node() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            server = LifelineServer(TOKEN, (1, 2), linger_s=0.1)
            clients = asyncio.create_task(hold(listening.getsockname(), 2, TOKEN, 10))
            serving = asyncio.create_task(server.serve(listening))
            await wait_for_clients(server, 1)
            server.close()
            await serving
            assert await clients

    run_scene(scene)


def test_a_disconnected_client_reconnects() -> None:
    async def scene() -> None:
        listening = listen(HERE, 0)
        where = listening.getsockname()
        first = LifelineServer(TOKEN, (1,))
        serving = asyncio.create_task(first.serve(listening))
        clients = asyncio.create_task(hold(where, 1, TOKEN, 10))
        await wait_for_clients(first, 1)
        serving.cancel()  # as when it is killed
        await asyncio.gather(serving, return_exceptions=True)
        for writer in list(first._clients):
            writer.transport.abort()
        listening.close()
        with listen(HERE, where[1]) as again:
            second = LifelineServer(TOKEN, (1,))
            serving = asyncio.create_task(second.serve(again))
            await wait_for_clients(second, 1)
            assert not clients.done()
            second.close()
            assert await clients
            await serving

    run_scene(scene)


def test_infinite_patience_reconnects_for_ever() -> None:
    async def scene() -> None:
        port = find_free_ports("lifeline", 1)
        waits = asyncio.create_task(hold((HERE, port), 1, TOKEN, math.inf))
        assert not await hold((HERE, port), 2, TOKEN, 0.3)
        assert not waits.done()
        with listen(HERE, port) as listening:
            server = LifelineServer(TOKEN, (1,))
            serving = asyncio.create_task(server.serve(listening))
            await wait_for_clients(server, 1)
            server.close()
            assert await waits
            await serving

    run_scene(scene)


def test_unauthenticated_connections_are_refused_and_block_no_client() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            where = listening.getsockname()
            server = LifelineServer(TOKEN, (1,))
            serving = asyncio.create_task(server.serve(listening))
            silent = [await asyncio.open_connection(*where) for _ in range(2 * MAX_UNAUTHENTICATED)]
            reader, writer = await asyncio.open_connection(*where)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(200))
            assert not await hold(where, 1, b"another-token-of-32-bytes-or-so.", 0.3)
            assert server._clients == {}
            clients = asyncio.create_task(hold(where, 1, TOKEN, 10))
            await wait_for_clients(server, 1)
            server.close()
            assert await clients
            await serving
            assert b"over" not in await reader.read(1000)
            for _, each in [*silent, (reader, writer)]:
                each.close()

    run_scene(scene)


async def wait_for_clients(server: LifelineServer, count: int) -> None:
    while len(server._clients) < count:
        await asyncio.sleep(0.01)


def test_the_server_listens_on_a_reachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(HERE, 0) as here:
        assert here.getsockname()[0] == HERE
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:1.*address"):
        listen("192.0.2.1", 1)
    known_as_itself = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known_as_itself)
    with listen("this-machine", 0) as everywhere:
        assert everywhere.getsockname()[0] == "0.0.0.0"


# -- as processes -----------------------------------------------------------------------------------------------------------


def start_process(tmp_path: Path, node: int, port: int, *words: str) -> subprocess.Popen[str]:
    token = tmp_path / "token"
    if not token.exists():
        write_token(token)
    around = JobEnv((HERE, HERE), node, port, token).environment()
    command = [sys.executable, "-P", "-m", "ludus.launch.ssh.lifeline", *words]
    return subprocess.Popen(command, env=os.environ | around, stderr=subprocess.PIPE, text=True)


def test_client_process_ends_with_the_server_process(tmp_path: Path) -> None:
    port = find_free_ports("lifeline", 2, salt=tmp_path.name)
    with start_process(tmp_path, 0, port, "serve") as server, start_process(tmp_path, 1, port, "hold") as client:
        assert server.stderr is not None
        assert "node 1 connected" in server.stderr.readline()
        server.send_signal(signal.SIGTERM)
        assert client.wait(_WAIT_S) == 0
        assert server.wait(_WAIT_S) == 0


def test_a_client_that_times_out_logs_the_reason_and_fails(tmp_path: Path) -> None:
    port = find_free_ports("lifeline", 2, salt=tmp_path.name)
    with start_process(tmp_path, 1, port, "hold", "--patience-s", "0.2") as client:
        _, output = client.communicate(timeout=_WAIT_S)
        assert client.returncode == 1
        assert f"no connection to the first node, {HERE}:{port + 1}, for 0.2 s" in output.splitlines()[-1]


def test_outside_of_a_job_it_is_a_usage_error() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LUDUS_JOB_")}
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.lifeline", "serve"]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "belongs to no job" in done.stderr
    assert "Traceback" not in done.stderr
