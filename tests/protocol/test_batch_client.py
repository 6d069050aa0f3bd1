"""The client for many sessions: the same replies as one by one, in few packets, and errors that concern only their session."""

from __future__ import annotations

import socket

import pytest

from ludus.errors import LudusError, Refused, Unreachable
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.protocol.batch_client import BatchClient
from tests.local_servers import Served, gateway
from tests.protocol.test_client import OK, Counting, scripted


@pytest.fixture
def served() -> object:
    with gateway(Counting) as found:
        yield found


@pytest.mark.parametrize("number", [1, 31, 300])
def test_every_session_has_its_own_count(served: Served, number: int) -> None:
    names = [f"s{i}" for i in range(number)]
    with BatchClient(served.url) as client:
        for round_ in range(1, 4):
            replies = client.tick_all({name: name.encode() for name in names})
            assert replies == {name: b"%d %b" % (round_, name.encode()) for name in names}
        assert len(served.gateway.sessions) == number
        assert served.gateway.connections == 1
        client.tick_all({}, ended=[*names, "unknown"])
        assert (len(served.gateway.sessions), client.open_sessions) == (0, [])
        assert client.tick_all({"s0": b"again"}) == {"s0": b"1 again"}


def test_an_error_concerns_its_session_alone(served: Served) -> None:
    with BatchClient(served.url) as client:
        client.tick_all(dict.fromkeys("abcd", b"x"))
        replies = client.tick_all({"a": b"x", "b": b"refuse", "c": b"raise", "d": b"x"})
        assert (replies["a"], replies["d"]) == (b"2 x", b"2 x")
        assert [one.status for one in replies.values() if isinstance(one, Refused)] == [422, 500]
        assert sorted(client.open_sessions) == ["a", "d"]
        assert client.tick_all({"c": b"y"}) == {"c": b"1 y"}, "a new session with the name of a lost one"


def test_sessions_that_do_not_fit_on_the_server_are_refused() -> None:
    with (
        gateway(Counting, GatewaySettings(sessions=SessionLimits(sessions=3))) as served,
        BatchClient(served.url, retries=0) as client,
    ):
        replies = client.tick_all({f"s{i}": b"x" for i in range(5)})
    assert [isinstance(one, LudusError) for one in replies.values()] == [False] * 3 + [True] * 2


def test_a_server_that_takes_few_requests_at_a_time_answers_all() -> None:
    with gateway(Counting, GatewaySettings(http=HttpLimits(pipelined=2))) as served, BatchClient(served.url) as client:
        body = b"x" * 50_000
        assert set(client.tick_all({f"s{i}": body for i in range(100)}).values()) == {b"1 " + body}


def test_requests_after_a_closed_connection_are_sent_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    with scripted(closing, OK, OK + OK) as (url, requests), BatchClient(url) as client:
        assert client.tick_all({"a": b"1", "b": b"2"}) == {"a": b"ok", "b": b"ok"}
    assert [request.count(b"POST") for request in requests] == [2, 1, 2]  # both starts, the second again, both ticks


def test_a_broken_connection_is_replaced_and_no_request_counts_twice(served: Served) -> None:
    with BatchClient(served.url) as client:
        client.tick_all(dict.fromkeys("abc", b"x"))
        ((connected, _),) = client._kept.values()
        connected.shutdown(socket.SHUT_RDWR)
        assert set(client.tick_all(dict.fromkeys("abc", b"x")).values()) == {b"2 x"}


def test_surplus_replies_break_the_connection() -> None:
    with scripted(OK, OK + OK, OK, OK) as (url, _), BatchClient(url, retries=0) as client:
        assert isinstance(client.tick_all({"a": b"x"})["a"], bytes)
        assert client._kept == {}


def test_all_sessions_get_the_error_of_a_server_that_is_gone() -> None:
    with gateway(Counting) as served:
        client = BatchClient(served.url, timeout_s=2.0, retries=1)
        client.tick_all(dict.fromkeys("ab", b"x"))
    replies = client.tick_all(dict.fromkeys("abc", b"x"))
    assert [type(one) for one in replies.values()] == [Unreachable] * 3
    assert client.open_sessions == []
    client.close()
