"""The C++ client, compiled under the sanitizers; what all clients promise, and what only this one does."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from ludus.actor.actor import Actor
from ludus.actor.gateway import GatewaySettings
from tests.clients.contract import SOON_S, Contract, HostileContract, actor, environment
from tests.clients.driving import CLIENTS, DRIVERS, Driver, driver
from tests.clients.hostile import OK, Misbehaviour, answering, hostile, listening, read_request, wire
from tests.serving import Served, gateway
from tests.tools import need

CLIENT = CLIENTS / "cpp"
_LIMIT_S = 240.0
_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wold-style-cast", "-Werror"]
_SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiled(source: Path, *options: str | Path) -> None:
    """Without a warning."""
    command = [need("g++"), *_WARNINGS, f"-I{CLIENT}", *options, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cpp") / "driver"
    compiled(DRIVERS / "driver.cpp", "-std=c++11", *_SANITIZED, "-o", made)
    return made


@pytest.fixture(scope="class")
def driven(program: Path) -> Iterator[Driver]:
    with driver([program], environment(program.parent)) as driven:
        yield driven


class TestClient(Contract, HostileContract):
    has_tls = False

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, driven: Driver) -> Driver:
        return driven


class TestHeader:
    @pytest.mark.parametrize("options", ["-std=c++11 -fno-exceptions -fno-rtti", "-std=c++14", "-std=c++17", "-std=c++20 -O2"])
    def test_it_compiles_in_every_dialect_without_a_warning(self, options: str) -> None:
        compiled(CLIENT / "ludus.hpp", "-fsyntax-only", "-x", "c++", *options.split())

    def test_two_files_may_include_it(self, tmp_path: Path) -> None:
        for name, text in (("a.cpp", "int main() { ludus::Client c; return 0; }"), ("b.cpp", "void f() { ludus::Client c; }")):
            (tmp_path / name).write_text('#include "ludus.hpp"\n' + text)
        compiled(tmp_path / "a.cpp", "-std=c++11", tmp_path / "b.cpp", "-o", tmp_path / "both")


class TestBytes:
    """What nobody has thought of."""

    def test_whatever_comes_back_is_an_answer_or_an_error(self, driven: Driver) -> None:
        rng = random.Random(20240611)
        replies = [mutated(rng) for _ in range(500)]
        with answering_and_closing(replies) as port:
            driven.open(f"http://127.0.0.1:{port}", timeout_ms=2000, deadline_ms=1000, retries=0)
            driven.ok("start")
            outcomes = [driven.do("tick", b"x") for _ in replies]
        kinds = {outcome.kind for outcome in outcomes}
        assert kinds <= {"ok", "refused", "lost", "unreachable", "deadline"}
        assert {"ok", "unreachable", "refused"} <= kinds, "the bytes were all of one kind"

    def test_a_reply_beyond_the_limit_is_an_error_and_is_not_read(self, driven: Driver) -> None:
        just = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(1000)
        above = just.replace(b"1000", b"1001") + b"x"
        chunked = (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"64\r\n" + bytes(100) + b"\r\n") * 11 + b"0\r\n\r\n"
        )
        for reply, kind in ((just, "ok"), (above, "unreachable"), (chunked, "unreachable")):
            with answering(reply) as server:
                driven.open(server.url, max_reply_bytes=1000)
                assert driven.do("start").kind == kind

    @pytest.mark.parametrize(
        "head",
        [
            "Content-Length: 18446744073709551618\r\n\r\nok",
            "Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\nok\r\n0\r\n\r\n",
        ],
    )
    def test_a_length_that_would_overflow_is_not_small(self, driven: Driver, head: str) -> None:
        with answering(b"HTTP/1.1 200 OK\r\n" + head.encode()) as server:
            driven.open(server.url, retries=0)
            assert driven.do("start").kind == "unreachable"

    def test_endless_chunks_end_at_the_limit(self, driven: Driver) -> None:
        chunks = Misbehaviour(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", pour=b"400\r\n" + bytes(1024) + b"\r\n")
        with hostile(chunks) as server:
            driven.open(server.url, max_reply_bytes=1_000_000)
            outcome = driven.do("start")
        assert (outcome.kind, b"too large" in outcome.said) == ("unreachable", True)

    def test_a_reply_that_drips_byte_by_byte_is_read(self, driven: Driver) -> None:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 100 + b"\r\n\r\n"
        reply = early + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nx: y\r\n\r\n"

        def drip(connected: socket.socket, over: object) -> None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while read_request(connected) is not None:
                for byte in reply:
                    connected.sendall(bytes([byte]))

        with listening(drip) as port:
            driven.open(f"http://127.0.0.1:{port}")
            assert [driven.ok("start"), driven.ok("tick", b"x"), driven.ok("tick", b"y")] == [b"abcde"] * 3


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

    def test_a_name_that_nobody_has_is_an_error(self, driven: Driver) -> None:
        driven.open("http://no-such-host.invalid:80", timeout_ms=3000)
        assert driven.do("start").kind == "unreachable"

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
                assert driven._answer().said == b"ok"

    def test_an_address_that_swallows_everything_costs_the_time_out(self, driven: Driver) -> None:
        """A full backlog drops what knocks, as a firewall does."""
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            knocking = [socket.socket() for _ in range(4)]
            for one in knocking:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            driven.open(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_ms=200)
            outcome = driven.do("start")
            assert (outcome.kind, outcome.took_s < SOON_S) == ("unreachable", True)
            for one in knocking:
                one.close()

    def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_retry(self, driven: Driver) -> None:
        def once(connected: socket.socket, over: object) -> None:
            read_request(connected)
            connected.sendall(OK)

        with listening(once) as port:
            driven.open(f"http://127.0.0.1:{port}")
            assert [driven.ok("start"), driven.ok("tick", b"x"), driven.ok("end")] == [b"ok"] * 3

    def test_a_refusal_that_comes_before_the_body_was_sent_is_heard(self, driven: Driver) -> None:
        large = b'{"error": "body_too_large", "message": "m", "hint": "h"}'
        early = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(large), large)

        def refuse(connected: socket.socket, over: object) -> None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connected.recv(1000)
            connected.sendall(early)
            while connected.recv(65536):
                pass

        with listening(refuse) as port:
            driven.open(f"http://127.0.0.1:{port}")
            assert driven.do("start", bytes(8 << 20)).refusal == ("refused", 413, "body_too_large")

    def test_a_connection_that_breaks_while_a_large_body_is_being_sent_kills_nobody(self, driven: Driver) -> None:
        """Whoever writes to such a connection gets a signal, unless he has said that he wants none."""

        def hang_up(connected: socket.socket, over: object) -> None:
            """At once: the signal comes to who writes on after the end of the other side."""

        with listening(hang_up) as port:
            driven.open(f"http://127.0.0.1:{port}", retries=0)
            for _ in range(10):
                assert driven.do("start", bytes(4 << 20)).kind == "unreachable"

    def test_a_start_without_an_answer_may_be_made_again(self, driven: Driver, served: Served) -> None:
        before = served.gateway.sessions.stats.started
        with wire(served.port) as between:
            driven.open(between.url, timeout_ms=300)
            between.plan("swallow reply")
            assert driven.do("start", b"map").kind == "unreachable"
            assert driven.ok("start", b"map", again=1).startswith(b"started")
            assert driven.ok("tick", b"x") == b"1 x"
        assert between.requests[0] == between.requests[1]
        assert served.gateway.sessions.stats.started == before + 1

    def test_an_end_without_an_answer_may_be_made_again(self, driven: Driver, served: Served) -> None:
        with wire(served.port) as between:
            driven.open(between.url, timeout_ms=300)
            driven.ok("start")
            between.plan("swallow reply")
            assert driven.do("end", b"won").kind == "unreachable"
            assert driven.ok("end", b"won") == b"ended 0 won"
        assert between.requests[1] == between.requests[2]

    def test_what_is_not_open_cannot_be_ticked(self, driven: Driver, served: Served) -> None:
        driven.open(served.url)
        driven.do("start", session="x" * 300)
        assert driven.do("tick", b"x").kind == "usage"
        driven.ok("start")
        driven.ok("end")
        assert driven.do("tick", b"x").kind == "usage"

    def test_a_tick_allocates_nothing(self, driven: Driver, served: Served) -> None:
        driven.open(served.url, fallback="repeat")
        driven.ok("start")
        body = bytes(2000)
        for _ in range(3):
            driven.ok("tick", body)
        assert [driven.do("tick", body).more["allocated"] for _ in range(5)] == ["0"] * 5


# -- the example


class Balance(Actor):
    """Keeps the pole up, and remembers what it saw."""

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


class TestExample:
    def test_it_plays_the_cartpole_that_everybody_knows(self, tmp_path: Path) -> None:
        need("g++")
        Balance.matches.clear()
        built = tmp_path / "cartpole"
        compiled(CLIENT / "example" / "cartpole.cpp", "-std=c++11", *_SANITIZED, "-o", built)
        with gateway(Balance) as served:
            command = [str(built), "127.0.0.1", str(served.port), "3", "10000"]
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

    def test_without_a_server_it_says_so(self, tmp_path: Path) -> None:
        made = subprocess.run(
            [need("make"), "-C", str(CLIENT / "example"), "-n"], capture_output=True, text=True, timeout=_LIMIT_S
        )
        assert "cartpole.cpp" in made.stdout
        compiled(CLIENT / "example" / "cartpole.cpp", "-std=c++11", "-o", tmp_path / "cartpole")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = subprocess.run([tmp_path / "cartpole", "127.0.0.1", str(port)], capture_output=True, text=True, timeout=_LIMIT_S)
        assert (done.returncode, f"Nothing listens on 127.0.0.1:{port}." in done.stderr) == (1, True)


# -- bytes


def mutated(rng: random.Random) -> bytes:
    """Rubbish, or a reply in which something is wrong, or nothing."""
    whole = rng.choice(_WHOLE)
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 300))
    if kind == 1:
        return whole[: rng.randrange(len(whole))]
    changed = bytearray(whole)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed))
        if kind == 2:
            changed[at] = rng.randrange(256)
        elif kind == 3:
            del changed[at : at + rng.randrange(1, 8)]
            changed = changed or bytearray(b"H")
        else:
            changed[at:at] = rng.choice([b"\r\n", b"\0", b"9", b":", b" ", b"\xff", b"Content-Length: 3\r\n", b"\r\n\r\n"])
    return bytes(changed)


_REFUSED = b'{"error": "seq", "message": "m\\u00f6\\ud83d\\ude00\\n", "hint": [1, {"a": "]"}], "last": 7}'
_WHOLE = [
    OK,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n3;a=b\r\nabc\r\n1f\r\n" + bytes(31) + b"\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    b"HTTP/1.1 409 Conflict\r\nRetry-After: 0.01\r\nContent-Length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED),
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}",
]


def answering_and_closing(replies: list[bytes]) -> contextlib.AbstractContextManager[int]:
    """The start is answered well; every later connection gets one of these, then the end."""
    left = [OK, *replies]

    def serve(connected: socket.socket, over: object) -> None:
        if read_request(connected) is not None and left:
            connected.sendall(left.pop(0))

    return listening(serve)
