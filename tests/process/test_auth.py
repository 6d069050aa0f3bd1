"""Authentication on a TCP port: nothing of an unauthenticated peer is parsed, and its cost is bounded."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import os
import socket
import struct
import warnings
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ludus.distributed.frames import Header, encode_frame
from ludus.distributed.gateway_workers import bind
from ludus.distributed.hub.rpc import Peer, RpcConnection, listen_tcp
from ludus.errors import UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, tcp_address
from ludus.process import auth
from ludus.process.auth import Authenticator, Handshake, HandshakeFailed, is_unresponsive, read_token, write_token

TOKEN = b"a" * 64


class Port:
    """A guarded listener that echoes frames, for one test."""

    def __init__(self, directory: Path) -> None:
        self.guard = Authenticator(TOKEN)
        self.seen: list[Header] = []
        self.file = str(directory / "token")
        write_token(Path(self.file), TOKEN)
        self.host, self.port = "127.0.0.1", 0

    def echo(self, peer: Peer, header: Header, body: bytes) -> None:
        assert peer.is_remote
        self.seen.append(header)
        peer.send({"id": header["id"]}, body)

    async def open(self) -> asyncio.Server:
        bound = bind(self.host, 0)
        self.port = bound.getsockname()[1]
        return await listen_tcp(bound, self.guard, self.echo)

    async def connect(self, token_file: str | None = None) -> RpcConnection:
        return await RpcConnection.open(tcp_address(self.host, self.port), "The hub", token_file=token_file or self.file)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def still_serves(self) -> None:
        connection = await self.connect()
        reply = await connection.request({"op": "x"}, b"body", timeout_s=5)
        assert reply[-1][1] == b"body"
        await connection.close()


def with_port(directory: Path, work: Callable[[Port], Awaitable[None]]) -> Port:
    async def main() -> None:
        server = await port.open()
        try:
            async with asyncio.timeout(30):
                await work(port)
                await port.still_serves()
        finally:
            server.close()
            await let_go()

    port = Port(directory)
    asyncio.run(main())
    return port


async def let_go() -> None:
    """End the remaining tasks and close their connections, which takes an iteration of the loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    await asyncio.sleep(0)


async def cut_off(reader: asyncio.StreamReader) -> bytes:
    """What came before the other side closed."""
    try:
        return await reader.read(-1)
    except ConnectionResetError:
        return b""


def test_a_peer_with_the_token_is_served(tmp_path: Path) -> None:
    async def work(port: Port) -> None:
        connection = await port.connect()
        reply = await connection.request({"op": "x"}, bytes(1 << 22), timeout_s=10)
        assert len(reply[-1][1]) == 1 << 22
        assert connection.local_host == "127.0.0.1"
        await connection.close()

    assert with_port(tmp_path, work).guard.refused == 0


def test_a_peer_with_another_token_gets_an_error_and_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_bytes(b"b" * 64)

    async def work(port: Port) -> None:
        for _ in range(3):
            with pytest.raises(UsageError, match="refused the token"):
                await port.connect(str(tmp_path / "other"))

    with caplog.at_level(logging.WARNING):
        assert with_port(tmp_path, work).guard.refused == 3
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(told) == 1
    assert "127.0.0.1" in told[0]
    assert not any(token in caplog.text for token in ("aaaa", "bbbb"))


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        bytes(100),
        struct.pack("<IQ", 1 << 31, 1 << 31),
        b"".join(bytes(part) for part in encode_frame({"op": "x", "id": 1})),
        b"LUDUS-1\n" + bytes(64),
    ],
    ids=["http", "random", "zeros", "huge lengths", "a frame", "no proof"],
)
def test_rubbish_is_cut_off_before_anything_of_it_is_parsed(tmp_path: Path, rubbish: bytes) -> None:
    async def work(port: Port) -> None:
        reader, writer = await port.raw()
        writer.write(rubbish)
        assert len(await cut_off(reader)) <= 40, "it learns a random number, nothing else"
        writer.close()
        assert port.seen == []

    assert with_port(tmp_path, work).guard.refused == 1


def test_a_silent_peer_is_disconnected_after_a_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_S", 0.2)

    async def work(port: Port) -> None:
        silent, slow = await port.raw(), await port.raw()
        slow[1].write(b"LUDUS-1\n")
        for reader, writer in (silent, slow):
            assert len(await cut_off(reader)) == 40
            writer.close()

    assert with_port(tmp_path, work).guard.refused == 2


def test_many_silent_unauthenticated_do_not_keep_us_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(auth, "HANDSHAKE_S", 60.0)

    async def work(port: Port) -> None:
        strangers = [await port.raw() for _ in range(12)]
        await port.still_serves()
        gone = await asyncio.gather(*(cut_off(reader) for reader, _ in strangers[:8]))
        assert len(gone) == 8
        assert len(port.guard._unauthenticated) <= 4
        for _, writer in strangers:
            writer.close()

    with_port(tmp_path, work)


def test_both_sides_of_a_handshake_prove_the_token() -> None:
    handshake = Handshake(TOKEN)
    opening = handshake.opening()
    answer = handshake.answer(opening)
    confirmation = handshake.confirmation(opening, answer)
    assert (len(opening), len(answer), len(confirmation)) == (
        handshake.opening_bytes, handshake.answer_bytes, handshake.confirmation_bytes,
    )  # fmt: skip
    handshake.check(opening, answer, confirmation)
    assert "a" * 8 not in repr(handshake)


@pytest.mark.parametrize("context", [b"", b"LUDUS-1\n"])
def test_the_bytes_of_a_handshake_are_those_of_earlier_releases(context: bytes) -> None:
    handshake = Handshake(TOKEN, context=context)
    opening = b"LUDUS-1\n" + b"l" * 32
    answer = b"LUDUS-1\n" + b"c" * 32
    answer += hmac.digest(TOKEN, context + b"caller" + b"l" * 32 + b"c" * 32, "sha256")
    confirmation = handshake.confirmation(opening, answer)
    assert confirmation == hmac.digest(TOKEN, context + b"listener" + b"l" * 32 + b"c" * 32, "sha256")


@pytest.mark.parametrize(
    "other", [Handshake(b"b" * 64), Handshake(TOKEN, magic=b"LUDUS-2\n"), Handshake(TOKEN, context=b"other")]
)
def test_a_handshake_fails_on_any_difference(other: Handshake) -> None:
    handshake = Handshake(TOKEN)
    opening = handshake.opening()
    answer = handshake.answer(opening)
    theirs = other.magic + opening[8:]
    with pytest.raises(HandshakeFailed):
        handshake.confirmation(opening, other.answer(theirs))
    with pytest.raises(HandshakeFailed):
        handshake.check(opening, answer, other.confirmation(theirs, other.answer(theirs)))
    with pytest.raises(HandshakeFailed):
        handshake.confirmation(opening, answer[:-1])
    with pytest.raises(HandshakeFailed):
        handshake.check(opening, answer, answer[-32:])  # a proof of the caller is none of the listener


def test_a_proof_cannot_be_used_again(tmp_path: Path) -> None:
    async def work(port: Port) -> None:
        reader, writer = await port.raw()
        answer = Handshake(TOKEN).answer(await reader.readexactly(40))
        writer.write(answer)
        assert len(await reader.readexactly(32)) == 32
        writer.close()
        reader, writer = await port.raw()
        writer.write(answer)
        assert len(await cut_off(reader)) == 40
        writer.close()

    assert with_port(tmp_path, work).guard.refused == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request" * 9, b"LUDUS-1\n" + bytes(64)])
def test_another_process_on_the_port_does_not_learn_the_token_and_is_not_trusted(tmp_path: Path, answer: bytes) -> None:
    heard = bytearray()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(answer)
            heard.extend(await reader.read(4096))
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        write_token(tmp_path / "token", TOKEN)
        with pytest.raises(WorkerFailed):
            await RpcConnection.open(tcp_address(host, port), "The hub", timeout_s=1.0, token_file=str(tmp_path / "token"))
        server.close()
        await let_go()

    asyncio.run(main())
    assert TOKEN not in bytes(heard)


def test_a_token_file_is_private_and_never_replaced(tmp_path: Path) -> None:
    write_token(tmp_path / "token")
    token = read_token(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len(token) == 64
    with pytest.raises(FileExistsError):
        write_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(UsageError, match="has 6 bytes"):
        read_token(tmp_path / "short")
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")


@pytest.mark.parametrize("text", ["tcp://h", "tcp://:1", "tcp://h:x", "tcp://h:99999", "h:1", "tcp://"])
def test_an_invalid_address_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://host:port"):
        host_and_port(text)


def test_addresses_are_read_as_they_are_written() -> None:
    for host, port in (("h1", 7), ("10.0.0.1", 65535), ("::1", 80)):
        assert host_and_port(tcp_address(host, port)) == (host, port)


def test_a_live_connection_is_not_taken_for_a_dead_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        auth.enable_keepalive(caller)
        answering: Any = server.accept()[0]
        caller.setblocking(False)
        try:
            while caller.send(bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
        assert not is_unresponsive(caller), "it does not read, but its machine answers"
        answering.close()


def test_an_unused_connection_is_released(tmp_path: Path) -> None:
    async def work(port: Port) -> None:
        connection = weakref.ref(await port.connect())
        deadline = asyncio.get_running_loop().time() + 10
        while connection() is not None:
            gc.collect()
            await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() < deadline, "something holds it"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with_port(tmp_path, work)
