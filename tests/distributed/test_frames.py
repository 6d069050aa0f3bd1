"""Frames over blocking sockets, and the listener for ranks of other nodes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from ludus.distributed.frames import FrameSocket
from ludus.distributed.learners.listener import LearnerListener, connect
from ludus.errors import Damaged, UsageError, WorkerFailed
from ludus.io.addresses import host_and_port
from ludus.process import auth

TOKEN = b"a token of the run that is long enough"


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ours, theirs = (FrameSocket(end, name) for end, name in zip(socket.socketpair(), ("Learner 1", "Learner 0"), strict=True))
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


@pytest.fixture
def entrance() -> Iterator[LearnerListener]:
    with contextlib.closing(LearnerListener("127.0.0.1", TOKEN)) as one:
        yield one


def test_a_frame_arrives_as_it_was_sent(pair: tuple[FrameSocket, FrameSocket]) -> None:
    ours, theirs = pair
    body = bytes(range(256)) * 400
    sender = threading.Thread(target=ours.send, args=({"op": "learn", "number": -7, "big": 1 << 40}, b"head", memoryview(body)))
    sender.start()
    assert theirs.has_data(10)
    header, received = theirs.receive("learn")
    sender.join()
    assert header == {"op": "learn", "number": -7, "big": 1 << 40}
    assert bytes(received) == b"head" + body
    assert not theirs.has_data()


def test_a_frame_with_another_operation_is_refused(pair: tuple[FrameSocket, FrameSocket]) -> None:
    ours, theirs = pair
    ours.send({"op": "state"})
    with pytest.raises(Damaged, match="Learner 0 sent 'state' where 'done' was expected"):
        theirs.receive("done")


def test_the_end_is_noticed_by_name(pair: tuple[FrameSocket, FrameSocket]) -> None:
    ours, theirs = pair
    before = theirs.is_closed
    ours.close()
    assert (before, theirs.is_closed) == (False, True)
    with pytest.raises(WorkerFailed, match="Learner 0 is gone"):
        theirs.receive()
    with pytest.raises(WorkerFailed, match="Learner 0 does not read any more"):
        theirs.send({"op": "done"})


def test_silence_has_an_end(pair: tuple[FrameSocket, FrameSocket]) -> None:
    with pytest.raises(WorkerFailed, match="Learner 1 did not answer"):
        pair[0].receive(timeout_s=0.05)


def test_a_rank_with_the_token_is_accepted(entrance: LearnerListener) -> None:
    links: list[FrameSocket] = []
    caller = threading.Thread(target=lambda: links.append(connect(entrance.address, TOKEN)))
    caller.start()
    ours = entrance.accept_rank(10)
    caller.join()
    assert ours is not None
    with contextlib.closing(ours), contextlib.closing(links[0]):
        assert ours.is_remote
        links[0].send({"op": "done", "number": 5})
        assert ours.receive("done")[0]["number"] == 5


def test_unauthenticated_peers_are_disconnected_and_do_not_block_others(entrance: LearnerListener) -> None:
    refused: list[BaseException] = []

    def come_with_another_token() -> None:
        try:
            connect(entrance.address, b"another token, which is long, too")
        except UsageError as error:
            refused.append(error)

    def call() -> None:
        with socket.create_connection(host_and_port(entrance.address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        come_with_another_token()
        connect(entrance.address, TOKEN).close()

    caller = threading.Thread(target=call)
    caller.start()
    ours = entrance.accept_rank(30)
    caller.join()
    assert ours is not None
    ours.close()
    assert "refused the token" in str(refused[0])


def test_a_slow_peer_does_not_block_others(entrance: LearnerListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_S", 0.3)
    cut_off, first = threading.Event(), threading.Event()

    def drip() -> None:
        with socket.create_connection(host_and_port(entrance.address)) as stranger:
            first.set()
            stranger.settimeout(0.1)
            with contextlib.suppress(OSError):  # it is refused, as it should be
                while not cut_off.is_set():
                    stranger.sendall(b"x")
                    cut_off.wait(0.1)

    def call() -> None:
        first.wait(10)
        with contextlib.suppress(WorkerFailed):
            connect(entrance.address, TOKEN, timeout_s=10).close()

    callers = [threading.Thread(target=target) for target in (drip, call)]
    for caller in callers:
        caller.start()
    ours = entrance.accept_rank(5)  # the stranger would need longer for all that he could say
    cut_off.set()
    for caller in callers:
        caller.join()
    assert ours is not None
    ours.close()


def test_a_listener_with_another_token_is_not_trusted() -> None:
    with contextlib.closing(LearnerListener("127.0.0.1", b"somebody else's token")) as other:
        listening = threading.Thread(target=other.accept_rank, args=(0.5,))
        listening.start()
        with pytest.raises((UsageError, WorkerFailed)):
            connect(other.address, TOKEN)
        listening.join()


def test_without_learners_there_is_a_time_out_and_without_listener_an_error(entrance: LearnerListener) -> None:
    assert entrance.accept_rank(0.05) is None
    entrance.close()
    with pytest.raises(WorkerFailed, match=r"There is no learner at tcp://127\.0"):
        connect(entrance.address, TOKEN, timeout_s=1)


def test_short_tokens_and_other_addresses_are_refused() -> None:
    with pytest.raises(UsageError, match="too short"):
        LearnerListener("127.0.0.1", b"123")
    with pytest.raises(UsageError, match="not an address"):
        connect("127.0.0.1:80", TOKEN)
