"""The suite of exchanges itself: one that is right passes it, and one that is wrong in a plausible way does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ludus.testing import exchange_contract
from ludus.testing.exchange_contract import ExchangeContract, MakeExchange
from ludus.transport.message_stream import Buffer, Delivery, MessageStream

# -- an exchange within one process, as simple as it can be -------------------------------------------------------------


@dataclass
class _Channel:
    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[str, bytes] = field(default_factory=dict)
    holders: dict[str, tuple[object, float]] = field(default_factory=dict)
    board: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    count: int = 0


class Simple:
    channels: dict[str, _Channel]

    def __init__(self, channel: str, room: int) -> None:
        self.room, self.channel = room, self.channels.setdefault(channel, _Channel())
        self.again: list[str] = []

    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        pieces = [message] if isinstance(message, (bytes, bytearray, memoryview)) else message
        with self.channel.changed:
            if not self.channel.changed.wait_for(lambda: len(self.channel.messages) < self.room, timeout_s):
                return False
            self.channel.count += 1
            self.channel.messages[str(self.channel.count)] = b"".join(pieces)
            self.channel.changed.notify_all()
            return True

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        with self.channel.changed:
            self.channel.changed.wait_for(lambda: bool(self._free()), timeout_s)
            taken = self._free()[:most]
            for name in taken:
                self.channel.holders[name] = self, time.monotonic()
            self.again = [name for name in self.again if name not in taken]
            return [Delivery(name, self.channel.messages[name]) for name in taken]

    def _free(self) -> list[str]:
        mine = [name for name in self.again if self.channel.holders.get(name, (None,))[0] is self]
        return mine + [name for name in self.channel.messages if name not in self.channel.holders]

    def acknowledge(self, ids: Sequence[str]) -> None:
        with self.channel.changed:
            for name in ids:
                self.channel.messages.pop(name, None)
                self.channel.holders.pop(name, None)
            self.channel.changed.notify_all()

    def reclaim(self, idle_s: float) -> int:
        with self.channel.changed:
            old = time.monotonic() - idle_s
            names = [name for name, (who, since) in self.channel.holders.items() if who is not self and since <= old]
            for name in names:
                self.channel.holders[name] = self, time.monotonic()
            self.again = sorted({*self.again, *names}, key=int)
            return len(names)

    def waiting(self) -> int:
        return len(self.channel.messages)

    def post(self, key: str, value: bytes, rank: int = 0) -> bool:
        with self.channel.changed:
            if key in self.channel.board and self.channel.board[key][0] > rank:
                return False
            self.channel.board[key] = rank, value
            return True

    def read(self, key: str) -> bytes | None:
        return self.channel.board.get(key, (0, None))[1]

    def posted(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (_, value) in self.channel.board.items() if key.startswith(prefix)}

    def erase(self, key: str) -> None:
        self.channel.board.pop(key, None)

    def drop(self) -> None:
        with self.channel.changed:
            for part in (self.channel.messages, self.channel.holders, self.channel.board):
                part.clear()

    def close(self) -> None:
        pass


def fresh(kind: type[Simple]) -> type[Simple]:
    return type("_Fresh", (kind,), {"channels": {}})


class TestSimpleExchange(ExchangeContract):
    @pytest.fixture
    def make(self) -> MakeExchange:
        return fresh(Simple)


# -- and such as are wrong ----------------------------------------------------------------------------------------------


class _Forgets(Simple):
    """As pub/sub does: nothing is kept for those who come later."""

    def __init__(self, channel: str, room: int) -> None:
        super().__init__(channel, room)
        self.channel.messages.clear()


class _Unbounded(Simple):
    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        self.room = 1 << 30
        return super().push(message, timeout_s)


class _Eager(Simple):
    """What was delivered is gone, whether it was learned from or not."""

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        pulled = super().pull(most, timeout_s)
        self.acknowledge([delivery.id for delivery in pulled])
        return pulled


class _Broadcasts(Simple):
    """Everyone gets everything."""

    def __init__(self, channel: str, room: int) -> None:
        super().__init__(channel, room)
        self.seen: set[str] = set()

    def pull(self, most: int, timeout_s: float) -> list[Delivery]:
        with self.channel.changed:
            names = [name for name in self.channel.messages if name not in self.seen][:most]
            self.seen.update(names)
            return [Delivery(name, self.channel.messages[name]) for name in names]


class _Greedy(Simple):
    """Takes from others what they are working on."""

    def reclaim(self, idle_s: float) -> int:
        return super().reclaim(0)


class _Steals(Simple):
    """Delivers what it once reclaimed although somebody else has it by now."""

    def _free(self) -> list[str]:
        return self.again + [name for name in super()._free() if name not in self.again]


class _Rankless(Simple):
    def post(self, key: str, value: bytes, rank: int = 0) -> bool:
        self.channel.board.pop(key, None)
        return super().post(key, value, rank)


class _Aliases(Simple):
    """Keeps the writer's buffer instead of what was in it."""

    def push(self, message: Buffer | Sequence[Buffer], timeout_s: float) -> bool:
        pieces = [message] if isinstance(message, (bytes, bytearray, memoryview)) else message
        self.channel.count += 1
        self.channel.messages[str(self.channel.count)] = _Later(pieces)  # type: ignore[assignment]
        return True


class _Later:
    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = pieces

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)


class _OneChannel(Simple):
    def __init__(self, channel: str, room: int) -> None:
        super().__init__("the only one", room)


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (_Forgets, "test_messages_pushed_before_the_first_read_are_delivered"),
        (_Unbounded, "test_a_full_exchange_pushes_back"),
        (_Unbounded, "test_many_writers_overrun_the_room_by_one_each_at_most"),
        (_Eager, "test_a_full_exchange_pushes_back"),
        (_Eager, "test_what_a_reader_did_not_acknowledge_comes_again_to_the_next"),
        (_Broadcasts, "test_two_readers_share_the_messages"),
        (_Greedy, "test_nothing_is_taken_from_a_reader_that_was_not_idle_for_so_long"),
        (_Steals, "test_what_was_reclaimed_from_a_reader_before_it_saw_it_comes_only_once"),
        (_Rankless, "test_a_notice_of_a_lower_rank_changes_nothing"),
        (_Aliases, "test_the_pieces_of_a_message_are_joined"),
        (_OneChannel, "test_channels_do_not_know_of_each_other"),
    ],
)
def test_an_exchange_that_is_wrong_is_caught(wrong: type[Simple], caught_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_contract, "_WAIT_S", 0.3)  # what never comes need not be waited for
    kind = fresh(wrong)
    check: Callable[[Any, Any], None] = getattr(ExchangeContract(), caught_by)

    def open_stream(channel: str = "a", room: int = 100) -> MessageStream:
        return kind(channel, room)

    with pytest.raises((AssertionError, KeyError)):
        check(open_stream)  # type: ignore[call-arg]


def test_a_suite_without_its_hook_names_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match="make"):
        ExchangeContract.make.__wrapped__(ExchangeContract())  # type: ignore[attr-defined]
