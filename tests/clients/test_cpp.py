"""The C++ client, compiled under the sanitizers; what all clients promise, and what only this one does."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from ludus.gateway.actor import Actor
from ludus.gateway.server import GatewaySettings
from tests.clients.contract import SOON_S, Contract, CornerContract, HostileContract, actor, environment
from tests.clients.driving import CLIENTS, DRIVERS, Driver, driver
from tests.clients.hostile import OK, listening, read_request
from tests.local_servers import Served, gateway
from tests.tools import need

CLIENT = CLIENTS / "cpp"
_LIMIT_S = 240.0
_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wold-style-cast", "-Werror"]
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiled(source: Path, *options: str | Path) -> None:
    """Compile without warnings."""
    command = [need("g++"), *_WARNINGS, f"-I{CLIENT}", *options, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cpp") / "driver"
    compiled(DRIVERS / "driver.cpp", "-std=c++11", *SANITIZED, "-o", made)
    return made


@pytest.fixture(scope="class")
def driven(program: Path) -> Iterator[Driver]:
    with driver([program], environment(program.parent)) as driven:
        yield driven


class TestClient(Contract, HostileContract, CornerContract):
    has_tls = False

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, driven: Driver) -> Driver:
        return driven


class TestHeader:
    @pytest.mark.parametrize("options", ["-std=c++11 -fno-exceptions -fno-rtti", "-std=c++20"])
    def test_it_compiles_in_every_dialect_without_a_warning(self, options: str) -> None:
        compiled(CLIENT / "ludus.hpp", "-fsyntax-only", "-x", "c++", *options.split())

    def test_two_files_may_include_it(self, tmp_path: Path) -> None:
        for name, text in (("a.cpp", "int main() { ludus::Client c; return 0; }"), ("b.cpp", "void f() { ludus::Client c; }")):
            (tmp_path / name).write_text('#include "ludus.hpp"\n' + text)
        compiled(tmp_path / "a.cpp", "-std=c++11", tmp_path / "b.cpp", "-o", tmp_path / "both")


class TestMore:
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls) -> Iterator[Served]:
        with gateway(actor, GatewaySettings()) as served:
            yield served

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    def test_names_are_looked_up(self, driven: Driver, served: Served, host: str) -> None:
        driven.open(f"http://{host}:{served.port}")
        assert driven.ok("start", session=f"at-{host}").startswith(b"started")

    def test_ipv6(self, driven: Driver) -> None:
        try:
            listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError as error:
            pytest.skip(f"there is no IPv6 here: {error}")
        with listener:
            driven.open(f"http://::1:{listener.getsockname()[1]}", timeout_ms=2000)
            assert driven.process.stdin is not None
            driven.process.stdin.write("start\n")
            driven.process.stdin.flush()
            listener.settimeout(SOON_S)
            with listener.accept()[0] as connected:
                request = read_request(connected)
                connected.sendall(OK)
                assert request is not None
                assert f"Host: [::1]:{listener.getsockname()[1]}".encode() in request
                assert driven._answer().body == b"ok"

    def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_retry(self, driven: Driver) -> None:
        def once(connected: socket.socket, over: object) -> None:
            read_request(connected)
            connected.sendall(OK)

        with listening(once) as port:
            driven.open(f"http://127.0.0.1:{port}")
            assert [driven.ok("start"), driven.ok("tick", b"x"), driven.ok("end")] == [b"ok"] * 3

    def test_a_connection_that_breaks_while_a_large_body_is_being_sent_kills_nobody(self, driven: Driver) -> None:
        """Writing to such a connection raises SIGPIPE, unless it is disabled."""

        def hang_up(connected: socket.socket, over: object) -> None:
            """Writes again at once: the signal comes with a write after the peer has closed."""

        with listening(hang_up) as port:
            driven.open(f"http://127.0.0.1:{port}", retries=0)
            for _ in range(10):
                assert driven.do("start", zeros=4 << 20).kind == "unreachable"

    def test_a_tick_allocates_nothing(self, driven: Driver, served: Served) -> None:
        driven.open(served.url, fallback="repeat")
        driven.ok("start")
        body = bytes(2000)
        for _ in range(3):
            driven.ok("tick", body)
        assert [driven.do("tick", body).more["allocated"] for _ in range(5)] == ["0"] * 5


# -- the example


class Balance(Actor):
    """Balances the pole and records its observations."""

    matches: ClassVar[list[list[tuple[float, int, tuple[float, ...]]]]] = []

    async def start(self, session: str, body: bytes) -> bytes:
        assert json.loads(body) == {"format": "raw"}
        self.seen: list[tuple[float, int, tuple[float, ...]]] = []
        self.matches.append(self.seen)
        return b""

    async def tick(self, body: bytes) -> bytes:
        self.seen.append(read_step(body))
        return struct.pack("<q", push(self.seen[-1][2]))

    async def end(self, body: bytes) -> bytes:
        self.seen.append(read_step(body))
        return b""


def read_step(body: bytes) -> tuple[float, int, tuple[float, ...]]:
    reward, flags, *observation = struct.unpack("<fI4f", body)
    return reward, flags, tuple(observation)


def push(seen: tuple[float, ...]) -> int:
    return int(seen[2] + 0.2 * seen[3] + 0.01 * seen[0] + 0.05 * seen[1] > 0)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with its makefile."""
    directory = tmp_path_factory.mktemp("example") / "cpp"
    shutil.copytree(CLIENT, directory, ignore=shutil.ignore_patterns("cartpole"))
    command = [need("make"), "-C", str(directory / "example"), f"CXX={need('g++')}", "CXXFLAGS=-O2 " + " ".join(_WARNINGS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return directory / "example" / "cartpole"


class TestExample:
    def test_it_plays_the_cartpole_that_everybody_knows(self, example: Path) -> None:
        Balance.matches.clear()
        with gateway(Balance) as served:
            command = [str(example), "127.0.0.1", str(served.port), "3", "10000"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        assert (done.returncode, done.stderr) == (0, "")
        lengths = [len(match) - 1 for match in Balance.matches]
        printed = [f"match {i + 1}: {length} frames" for i, length in enumerate(lengths)]
        assert done.stdout.splitlines() == [*printed, f"mean {sum(lengths) / 3:.1f} frames, 0 ticks late"]
        assert max(lengths) == 500, "it never lets go of the pole"
        model = gym.make("CartPole-v1").unwrapped
        for match in Balance.matches:
            assert [reward for reward, _, _ in match] == [0.0, *[1.0] * (len(match) - 1)]
            for (_, flags, seen), (_, _, then) in itertools.pairwise(match):
                model.reset()
                model.state = np.array(seen)  # type: ignore[attr-defined]
                observed, _, fell, _, _ = model.step(push(seen))
                assert (flags, np.allclose(observed, then, atol=1e-5)) == (0, True)
            assert match[-1][1] == (1 if fell else 2)

    def test_without_a_server_it_says_so(self, example: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = subprocess.run([example, "127.0.0.1", str(port)], capture_output=True, text=True, timeout=_LIMIT_S)
        assert (done.returncode, f"Nothing listens on 127.0.0.1:{port}." in done.stderr) == (1, True)
