"""Contract suite for message streams. A backend is correct if it passes:

class TestMyExchange(ExchangeContract):
    @pytest.fixture
    def make(self) -> MakeExchange:
        return lambda channel, room: MyStream("scheme://…", channel, room)      # a client of an empty channel

The suite closes all clients. Each is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ludus.testing.background_call import Call
from ludus.transport.message_stream import Delivery, MessageStream

MakeExchange = Callable[[str, int], MessageStream]
Open = Callable[..., MessageStream]

_WAIT_S = 60.0  # how long a test waits for what must happen; never reached when it does
_SHORT_S = 0.05
_LATE_S = 20.0  # a wait of _SHORT_S that takes so long is none that ends


class ExchangeContract:
    @pytest.fixture
    def make(self) -> MakeExchange:
        raise NotImplementedError("Override the fixture `make`: (channel, room) → an end of that channel.")

    @pytest.fixture
    def open_stream(self, make: MakeExchange) -> Iterator[Open]:
        """Return a factory of clients of new channels."""
        with contextlib.ExitStack() as stack:
            prefix = f"{time.time_ns():x}"

            def open_one(channel: str = "a", room: int = 100) -> MessageStream:
                exchange = make(f"{prefix}-{channel}", room)
                stack.callback(exchange.close)
                return exchange

            yield open_one

    # -- messages

    def test_messages_come_out_as_they_went_in_oldest_first(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        sent = [b"", b"\r\n$5\r\n*1\r\n", bytes(range(256)) * 5, b"last"]
        for message in sent:
            assert writer.push(message, 0)
        assert contents(pull_all(reader, len(sent))) == sent

    def test_the_pieces_of_a_message_are_joined(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        large = bytearray(range(256)) * 8192
        assert writer.push([b"head", memoryview(large)[100:-100], b"", bytearray(b"tail")], _WAIT_S)
        large[:] = bytes(len(large))  # once pushed, the buffer is the writer's again
        (got,) = contents(pull_all(reader, 1))
        assert got == b"head" + (bytes(range(256)) * 8192)[100:-100] + b"tail"

    def test_messages_of_every_size_come_one_after_the_other(self, open_stream: Open) -> None:
        sizes = [
            size + extra for size in (0, 1000, 2048, 4096, 8192, 65536, 300_000) for extra in range(-3, 4) if size + extra >= 0
        ]
        writer, reader = open_stream("a", 1000), open_stream("a", 1000)
        for turn in range(3):
            for size in sizes:
                assert writer.push(bytes([turn + size % 251]) * size, 0)
            got = pull_all(reader, len(sizes))
            assert contents(got) == [bytes([turn + size % 251]) * size for size in sizes]
            reader.acknowledge([delivery.id for delivery in got])

    def test_messages_pushed_before_the_first_read_are_delivered(self, open_stream: Open) -> None:
        writer = open_stream()
        writer.push(b"early", 0)
        writer.close()
        assert contents(pull_all(open_stream(), 1)) == [b"early"]

    def test_an_empty_exchange_gives_nothing(self, open_stream: Open) -> None:
        reader, began = open_stream(), time.monotonic()
        assert reader.pull(10, 0) == []
        assert reader.pull(10, _SHORT_S) == []
        assert time.monotonic() - began < _LATE_S
        assert reader.waiting() == 0

    def test_at_most_the_requested_messages_are_pulled_without_waiting_for_more(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        for number in range(5):
            writer.push(b"%d" % number, 0)
        assert contents(reader.pull(2, _WAIT_S)) == [b"0", b"1"]
        began = time.monotonic()
        assert contents(reader.pull(100, _WAIT_S)) == [b"2", b"3", b"4"]
        assert time.monotonic() - began < _LATE_S

    def test_a_waiting_reader_gets_a_message_when_it_is_pushed(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        waiting = Call(lambda: contents(reader.pull(10, _WAIT_S)))
        writer.push(b"at last", 0)
        assert waiting.result() == [b"at last"]

    # -- room

    def test_a_full_exchange_pushes_back(self, open_stream: Open) -> None:
        writer, reader = open_stream("a", 2), open_stream("a", 2)
        assert writer.push(b"1", 0)
        assert writer.push(b"2", 0)
        assert not writer.push(b"3", 0)
        assert not writer.push(b"3", _SHORT_S)
        assert writer.waiting() == 2, "what was refused is there all the same"
        first, second = pull_all(reader, 2)
        assert not writer.push(b"3", 0), "what was pulled but not acknowledged still takes up its room"
        reader.acknowledge([first.id])
        assert writer.push(b"3", _WAIT_S)
        assert not writer.push(b"4", 0)
        reader.acknowledge([second.id])
        assert contents(pull_all(reader, 1)) == [b"3"]

    def test_a_waiting_writer_gets_room_when_a_message_is_acknowledged(self, open_stream: Open) -> None:
        writer, reader = open_stream("a", 1), open_stream("a", 1)
        writer.push(b"1", 0)
        (first,) = pull_all(reader, 1)
        waiting = Call(lambda: writer.push(b"2", _WAIT_S))
        reader.acknowledge([first.id])
        assert waiting.result() is True
        assert contents(pull_all(reader, 1)) == [b"2"]

    def test_many_writers_overrun_the_room_by_one_each_at_most(self, open_stream: Open) -> None:
        writers = [open_stream("a", 5) for _ in range(4)]

        def fill(writer: MessageStream) -> int:
            return sum(writer.push(b"x", 0) for _ in range(10))

        calls = [Call(partial(fill, writer)) for writer in writers]
        pushed = sum(call.result() for call in calls)
        assert 5 <= pushed <= 5 + len(writers) - 1
        assert open_stream("a", 5).waiting() == pushed

    def test_waiting_counts_what_is_not_acknowledged(self, open_stream: Open) -> None:
        exchange = open_stream()
        for number in range(3):
            exchange.push(b"%d" % number, 0)
        assert exchange.waiting() == 3
        first, second = pull_all(exchange, 2)
        assert exchange.waiting() == 3
        exchange.acknowledge([first.id, second.id])
        assert exchange.waiting() == 1

    # -- once is enough, at least once is promised

    def test_two_readers_share_the_messages(self, open_stream: Open) -> None:
        writer, one, two = open_stream(), open_stream(), open_stream()
        for number in range(6):
            writer.push(b"%d" % number, 0)
        first, second = pull_all(one, 3), pull_all(two, 3)
        assert contents(first) + contents(second) == [b"%d" % number for number in range(6)]
        assert one.pull(10, 0) == two.pull(10, 0) == []

    def test_what_a_reader_did_not_acknowledge_comes_again_to_the_next(self, open_stream: Open) -> None:
        writer, dead = open_stream(), open_stream()
        for number in range(5):
            writer.push(b"%d" % number, 0)
        done, *_ = pull_all(dead, 3)
        dead.acknowledge([done.id])
        dead.close()
        heir = open_stream()
        assert heir.reclaim(0) == 2
        assert contents(pull_all(heir, 4)) == [b"1", b"2", b"3", b"4"], "the old ones first, then the new"
        assert heir.pull(10, 0) == []

    def test_what_was_reclaimed_is_delivered_in_portions_and_can_be_acknowledged(self, open_stream: Open) -> None:
        writer, dead, heir = open_stream(), open_stream(), open_stream()
        for number in range(7):
            writer.push(b"%d" % number, 0)
        pull_all(dead, 7)
        assert heir.reclaim(0) == 7
        got = list[bytes]()
        while portion := heir.pull(3, 0):
            assert len(portion) <= 3
            got += contents(portion)
            heir.acknowledge([delivery.id for delivery in portion])
        assert got == [b"%d" % number for number in range(7)]
        assert heir.waiting() == 0
        assert open_stream().reclaim(0) == 0

    def test_a_message_that_came_again_comes_a_third_time_if_need_be(self, open_stream: Open) -> None:
        writer, readers = open_stream(), [open_stream() for _ in range(3)]
        writer.push(b"stubborn", 0)
        assert contents(pull_all(readers[0], 1)) == [b"stubborn"]
        for reader in readers[1:]:
            assert reader.reclaim(0) == 1
            assert contents(pull_all(reader, 1)) == [b"stubborn"]

    def test_what_was_acknowledged_never_comes_again(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        writer.push(b"1", 0)
        (delivery,) = pull_all(reader, 1)
        reader.acknowledge([delivery.id])
        reader.acknowledge([delivery.id])  # again: no effect
        reader.acknowledge([])
        assert open_stream().reclaim(0) == 0
        assert open_stream().pull(10, 0) == []

    def test_nothing_is_taken_from_a_reader_that_was_not_idle_for_so_long(self, open_stream: Open) -> None:
        writer, reader, other = open_stream(), open_stream(), open_stream()
        writer.push(b"1", 0)
        (delivery,) = pull_all(reader, 1)
        assert other.reclaim(3600) == 0
        assert other.pull(10, 0) == []
        reader.acknowledge([delivery.id])

    def test_a_reader_does_not_reclaim_what_it_has_in_hand(self, open_stream: Open) -> None:
        writer, reader = open_stream(), open_stream()
        writer.push(b"1", 0)
        pull_all(reader, 1)
        assert reader.reclaim(0) == 0
        assert reader.pull(10, 0) == []

    def test_what_was_reclaimed_from_a_reader_before_it_saw_it_comes_only_once(self, open_stream: Open) -> None:
        writer, dead, slow, quick = open_stream(), open_stream(), open_stream(), open_stream()
        writer.push(b"1", 0)
        pull_all(dead, 1)
        assert slow.reclaim(0) == 1
        assert quick.reclaim(0) == 1
        assert contents(pull_all(quick, 1)) == [b"1"]
        assert slow.pull(10, 0) == []

    def test_many_writers_and_readers_lose_and_double_nothing(self, open_stream: Open) -> None:
        each, writers, readers = 40, 3, 3
        seen: list[list[bytes]] = [[] for _ in range(readers)]
        over = threading.Event()

        def produce(who: int, exchange: MessageStream) -> None:
            for number in range(each):
                assert exchange.push(b"%d %d" % (who, number), _WAIT_S)

        def consume(mine: list[bytes], exchange: MessageStream) -> None:
            while not over.is_set():
                portion = exchange.pull(4, _SHORT_S)
                mine += contents(portion)
                exchange.acknowledge([delivery.id for delivery in portion])

        reading = [Call(partial(consume, mine, open_stream("a", 7))) for mine in seen]
        writing = [Call(partial(produce, who, open_stream("a", 7))) for who in range(writers)]
        for call in writing:
            call.result()
        watch, end = open_stream("a", 7), time.monotonic() + _WAIT_S
        while watch.waiting() and time.monotonic() < end:
            time.sleep(0.01)
        over.set()
        for call in reading:
            call.result()
        assert Counter(message for mine in seen for message in mine) == Counter(
            b"%d %d" % (who, number) for who in range(writers) for number in range(each)
        )

    # -- the board

    def test_a_notice_is_read_by_others_and_replaced(self, open_stream: Open) -> None:
        one, other = open_stream(), open_stream()
        assert other.read("news") is None
        assert one.post("news", b"old")
        assert one.post("news", b"\x00 12 new\r\n")
        assert other.read("news") == b"\x00 12 new\r\n"
        assert one.post("news", b"")
        assert other.read("news") == b""
        other.erase("news")
        other.erase("news")
        assert one.read("news") is None

    def test_notices_of_every_size_are_read_as_they_were_posted(self, open_stream: Open) -> None:
        one, other = open_stream(), open_stream()
        notices = {f"{size}": bytes([size % 251]) * size for size in (1, 2040, 2048, 2060, 4096, 100_000, 1_000_000)}
        for key, value in notices.items():
            assert one.post(key, value, rank=1)
            assert other.read(key) == value
        assert other.posted("") == notices

    def test_a_notice_of_a_lower_rank_changes_nothing(self, open_stream: Open) -> None:
        one, other = open_stream(), open_stream()
        assert one.post("owner", b"second", rank=2)
        assert not other.post("owner", b"first", rank=1)
        assert not other.post("owner", b"nobody")
        assert one.read("owner") == b"second"
        assert one.post("owner", b"second again", rank=2)
        assert other.post("owner", b"tenth", rank=10)
        assert one.read("owner") == b"tenth"
        assert one.post("other", b"", rank=-1), "ranks are of their key"
        one.erase("owner")
        assert other.post("owner", b"anew", rank=1)

    def test_of_many_who_post_at_once_the_highest_rank_stays(self, open_stream: Open) -> None:
        for attempt in range(5):
            ends = [open_stream() for _ in range(4)]
            calls = [Call(partial(end.post, f"owner{attempt}", b"%d" % rank, rank)) for rank, end in enumerate(ends)]
            for call in calls:
                call.result()
            assert ends[0].read(f"owner{attempt}") == b"3"

    def test_notices_are_found_by_how_their_key_begins(self, open_stream: Open) -> None:
        one, other = open_stream(), open_stream()
        for key in ("worker/a", "worker/b", "work", "w*", "w?r", "wörter/ä"):
            one.post(key, key.encode())
        assert other.posted("worker/") == {"worker/a": b"worker/a", "worker/b": b"worker/b"}
        assert other.posted("w*") == {"w*": b"w*"}
        assert other.posted("wör") == {"wörter/ä": "wörter/ä".encode()}
        assert len(other.posted("")) == 6
        assert other.posted("nothing") == {}

    # -- channels and the end

    def test_channels_do_not_know_of_each_other(self, open_stream: Open) -> None:
        ends = {channel: open_stream(channel, 1) for channel in ("a", "b", "a:b", "a}", "{a", "ä b\n*")}
        for channel, end in ends.items():
            assert end.push(channel.encode(), 0), "the room of another channel was taken"
            assert end.post("name", channel.encode())
        ends["b"].drop()
        for channel, end in ends.items():
            if channel != "b":
                assert contents(end.pull(10, 0)) == [channel.encode()]
                assert end.posted("") == {"name": channel.encode()}

    def test_a_dropped_channel_is_empty_and_can_be_used_again(self, open_stream: Open) -> None:
        writer, reader = open_stream("a", 2), open_stream("a", 2)
        writer.push(b"1", 0)
        writer.push(b"2", 0)
        writer.post("key", b"", rank=9)
        (held,) = pull_all(reader, 1)
        writer.drop()
        assert (writer.waiting(), writer.posted("")) == (0, {})
        assert reader.pull(10, 0) == []
        reader.acknowledge([held.id])
        assert writer.push(b"3", 0)
        assert writer.push(b"4", 0)
        assert contents(pull_all(reader, 2)) == [b"3", b"4"]
        assert reader.post("key", b"", rank=1)

    def test_closing_one_end_leaves_the_others(self, open_stream: Open) -> None:
        one, other = open_stream(), open_stream()
        one.push(b"1", 0)
        one.post("key", b"value")
        one.close()
        one.close()
        assert contents(pull_all(other, 1)) == [b"1"]
        assert other.read("key") == b"value"


def contents(deliveries: list[Delivery]) -> list[bytes]:
    return [bytes(delivery.data) for delivery in deliveries]


def pull_all(exchange: MessageStream, count: int) -> list[Delivery]:
    """Pull `count` messages, in any number of calls."""
    found = list[Delivery]()
    end = time.monotonic() + _WAIT_S
    while len(found) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} messages came"
        found += exchange.pull(count - len(found), _SHORT_S)
    assert len({delivery.id for delivery in found}) == count, "a message came twice"
    return found
