"""The door of a job and those who hold on to it: who is let in, who hears of the end, who gives up."""

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
from ludus.launch.ssh.lifeline import Door, hold, listen
from ludus.process.auth import MAX_UNAUTHENTICATED, write_token
from ludus.process.job_env import Surroundings, free_block

TOKEN = b"0123456789abcdef0123456789abcdef"
HERE = "127.0.0.1"
_WAIT_S = 30.0


def played(scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(_WAIT_S):
            await scene()

    asyncio.run(bounded())


def test_all_who_hold_hear_of_the_end() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            where = listening.getsockname()
            door = Door(TOKEN, (1, 2))
            serving = asyncio.create_task(door.serve(listening))
            holding = [asyncio.create_task(hold(where, node, TOKEN, 10)) for node in (1, 2)]
            await arrived(door, 2)
            assert not any(task.done() for task in holding)
            door.close()
            assert await asyncio.gather(*holding) == [True, True]
            await serving

    played(scene)


def test_one_who_comes_when_all_is_over_hears_of_it_too() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            door = Door(TOKEN, (1,))
            door.close()
            serving = asyncio.create_task(door.serve(listening))
            assert await hold(listening.getsockname(), 1, TOKEN, 10)
            await serving

    played(scene)


def test_a_door_does_not_wait_for_ever_for_a_node_that_is_dead() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            door = Door(TOKEN, (1, 2), linger_s=0.1)
            holding = asyncio.create_task(hold(listening.getsockname(), 2, TOKEN, 10))
            serving = asyncio.create_task(door.serve(listening))
            await arrived(door, 1)
            door.close()
            await serving
            assert await holding

    played(scene)


def test_one_who_is_cut_off_calls_again() -> None:
    async def scene() -> None:
        listening = listen(HERE, 0)
        where = listening.getsockname()
        first = Door(TOKEN, (1,))
        serving = asyncio.create_task(first.serve(listening))
        holding = asyncio.create_task(hold(where, 1, TOKEN, 10))
        await arrived(first, 1)
        serving.cancel()  # as when it is killed
        await asyncio.gather(serving, return_exceptions=True)
        for writer in list(first._held):
            writer.transport.abort()
        listening.close()
        with listen(HERE, where[1]) as again:
            second = Door(TOKEN, (1,))
            serving = asyncio.create_task(second.serve(again))
            await arrived(second, 1)
            assert not holding.done()
            second.close()
            assert await holding
            await serving

    played(scene)


def test_one_with_patience_for_ever_holds_on_where_another_gives_up() -> None:
    async def scene() -> None:
        port = free_block("tether", 1)
        waits = asyncio.create_task(hold((HERE, port), 1, TOKEN, math.inf))
        assert not await hold((HERE, port), 2, TOKEN, 0.3)
        assert not waits.done()
        with listen(HERE, port) as listening:
            door = Door(TOKEN, (1,))
            serving = asyncio.create_task(door.serve(listening))
            await arrived(door, 1)
            door.close()
            assert await waits
            await serving

    played(scene)


def test_strangers_neither_get_in_nor_keep_others_out() -> None:
    async def scene() -> None:
        with listen(HERE, 0) as listening:
            where = listening.getsockname()
            door = Door(TOKEN, (1,))
            serving = asyncio.create_task(door.serve(listening))
            silent = [await asyncio.open_connection(*where) for _ in range(2 * MAX_UNAUTHENTICATED)]
            reader, writer = await asyncio.open_connection(*where)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(200))
            assert not await hold(where, 1, b"another-token-of-32-bytes-or-so.", 0.3)
            assert door._held == {}
            holding = asyncio.create_task(hold(where, 1, TOKEN, 10))
            await arrived(door, 1)
            door.close()
            assert await holding
            await serving
            assert b"over" not in await reader.read(1000)
            for _, each in [*silent, (reader, writer)]:
                each.close()

    played(scene)


async def arrived(door: Door, count: int) -> None:
    while len(door._held) < count:
        await asyncio.sleep(0.01)


def test_the_door_opens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(HERE, 0) as here:
        assert here.getsockname()[0] == HERE
    with pytest.raises(UsageError, match=r"cannot be opened at 192\.0\.2\.1:1.*address"):
        listen("192.0.2.1", 1)
    known_as_itself = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known_as_itself)
    with listen("this-machine", 0) as everywhere:
        assert everywhere.getsockname()[0] == "0.0.0.0"


# -- as processes -----------------------------------------------------------------------------------------------------------


def started(tmp_path: Path, node: int, port: int, *words: str) -> subprocess.Popen[str]:
    token = tmp_path / "token"
    if not token.exists():
        write_token(token)
    around = Surroundings((HERE, HERE), node, port, token).environment()
    command = [sys.executable, "-P", "-m", "ludus.launch.ssh.lifeline", *words]
    return subprocess.Popen(command, env=os.environ | around, stderr=subprocess.PIPE, text=True)


def test_as_processes_they_end_with_the_job(tmp_path: Path) -> None:
    port = free_block("tether", 2, salt=tmp_path.name)
    with started(tmp_path, 0, port, "door") as door, started(tmp_path, 1, port, "hold") as holds:
        assert door.stderr is not None
        assert "node 1 is here" in door.stderr.readline()
        door.send_signal(signal.SIGTERM)
        assert holds.wait(_WAIT_S) == 0
        assert door.wait(_WAIT_S) == 0


def test_one_that_gives_up_says_why_and_fails(tmp_path: Path) -> None:
    port = free_block("tether", 2, salt=tmp_path.name)
    with started(tmp_path, 1, port, "hold", "--patience-s", "0.2") as holds:
        _, said = holds.communicate(timeout=_WAIT_S)
        assert holds.returncode == 1
        assert f"{HERE}:{port + 1}, was not reached for 0.2 s" in said.splitlines()[-1]


def test_outside_of_a_job_it_says_so() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LUDUS_JOB_")}
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.lifeline", "door"]
    done = subprocess.run(words, env=clean, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no process of a job" in done.stderr
    assert "Traceback" not in done.stderr
