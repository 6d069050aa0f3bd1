"""Repeated lines are counted, and the counts add up."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.io.log_dedup import BURST, LINE_BYTES, MARK, REPORT_S, SHAPES, WINDOW_S, LogDeduplicator

_REPEATED = re.compile(r"… the last (?:line was|(\d) lines were) repeated ([\d,]+) times?".encode())
_MORE = re.compile(r"… ([\d,]+) more lines? like this one, apart from numbers, left out".encode())
_DROPPED = re.compile(r"… ([\d,]+) lines? \([\d,]+ bytes\) came too fast and were left out".encode())

ENDLESS = 10**9


def expand(written: bytes) -> list[bytes | None]:
    """Every line that was fed in, in order; None for one of which only the number is known."""
    found: list[bytes | None] = []
    literal: list[bytes] = []
    for line in written.split(b"\n")[:-1]:
        if repeated := _REPEATED.fullmatch(line):
            size = int(repeated[1] or 1)
            found += literal[-size:] * _number(repeated[2])
        elif left_out := _MORE.fullmatch(line) or _DROPPED.fullmatch(line):
            found += [None] * _number(left_out[1])
        else:
            assert not line.startswith(MARK)
            text = line[1:] if line.lstrip(b" ").startswith(MARK) else line
            literal.append(text)
            found.append(text)
    return found


def _number(digits: bytes) -> int:
    return int(digits.replace(b",", b""))


def told(lines: list[bytes], now: float = 0.0) -> list[str]:
    repeats = LogDeduplicator()
    written = repeats.feed(b"".join(line + b"\n" for line in lines), now) + repeats.end()
    return written.decode().splitlines()


_few = st.sampled_from([b"a", b"b", b"c", b"", b"frame 1", b"frame 2", MARK + b"the last line was repeated 5 times", b" " + MARK])
_groups = st.lists(st.tuples(st.lists(_few, min_size=1, max_size=5), st.integers(1, 9)), max_size=12)
_lines = _groups.map(lambda groups: [line for group, times in groups for line in group * times])
_cuts = st.lists(st.integers(1, 40), min_size=1, max_size=20)
_waits = st.lists(st.sampled_from([0.0, 0.1, 1.0, 6.0, 11.0]), min_size=1, max_size=10)


def run(repeats: LogDeduplicator, data: bytes, cuts: list[int], waits: list[float], *, ticks: bool) -> bytes:
    """Fed in pieces, with time passing in between."""
    written, now, at, turn = b"", 0.0, 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        written += repeats.feed(data[at : at + step], now)
        at, turn = at + step, turn + 1
        now += waits[turn % len(waits)]
        if ticks and data[at - 1 : at] == b"\n":  # half a line that is waited for too long becomes two
            written += repeats.tick(now)
    return written + repeats.end()


@given(_lines, _cuts, _waits, st.booleans())
def test_groups_that_repeat_are_given_back_exactly_and_in_order(
    lines: list[bytes], cuts: list[int], waits: list[float], ticks: bool
) -> None:
    repeats = LogDeduplicator(burst=ENDLESS)
    written = run(repeats, b"".join(line + b"\n" for line in lines), cuts, waits, ticks=ticks)
    assert expand(written) == lines
    assert repeats.lines == len(lines)
    assert not repeats.pending


@given(_lines, _cuts, _waits, st.booleans(), st.integers(1, 5), st.sampled_from([(100, 200), (5000, 9000)]))
def test_whatever_is_left_out_is_counted(
    lines: list[bytes], cuts: list[int], waits: list[float], ticks: bool, burst: int, rate: tuple[int, int]
) -> None:
    repeats = LogDeduplicator(burst, *rate)
    written = run(repeats, b"".join(line + b"\n" for line in lines), cuts, waits, ticks=ticks)
    assert len(expand(written)) == len(lines)
    assert repeats.lines == len(lines)
    assert {line for line in expand(written) if line is not None} <= set(lines)


@given(st.lists(st.binary(max_size=40), max_size=30), _cuts)
def test_any_bytes_come_through(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(pieces)
    repeats = LogDeduplicator(burst=ENDLESS)
    written = run(repeats, data, cuts, [0.0], ticks=False)
    lines = re.sub(rb"\r+\n?", b"\n", data[:-1] if data.endswith(b"\r") else data)  # one at the very end ends nothing
    expected = lines.split(b"\n")
    assert expand(written) == (expected[:-1] if not expected[-1] else expected)


def test_a_line_that_came_twice_is_counted_from_then_on() -> None:
    assert told([b"hello", *[b"tick"] * 1206, b"bye"]) == [
        "hello", "tick", "tick", "… the last line was repeated 1,204 times", "bye",
    ]  # fmt: skip


def test_a_group_that_came_twice_is_counted_from_then_on_and_its_beginning_is_written() -> None:
    assert told([b"a", b"b", b"c"] * 10 + [b"a", b"x"]) == [
        "a", "b", "c", "a", "b", "c", "… the last 3 lines were repeated 8 times", "a", "x",
    ]  # fmt: skip


def test_a_group_that_contains_a_repetition_is_found() -> None:
    assert told([b"a", b"a", b"a", b"b"] * 50)[-1] == "… the last 4 lines were repeated 48 times"


def test_a_group_that_goes_on_is_spoken_of_every_few_seconds() -> None:
    repeats = LogDeduplicator()
    repeats.feed(b"a\nb\n" * 2, 0.0)
    assert repeats.feed(b"a\nb\n" * 7 + b"a\n", 1.0) == b""
    assert repeats.pending
    assert repeats.tick(REPORT_S - 0.1) == b""
    assert repeats.tick(REPORT_S).decode() == "… the last 2 lines were repeated 7 times\n"
    assert repeats.feed(b"b\n", REPORT_S + 1).decode() == ""
    assert repeats.tick(2 * REPORT_S).decode() == "… the last 2 lines were repeated 1 time\n"
    assert not repeats.pending


def test_a_group_that_stops_on_its_way_is_written_so_far() -> None:
    repeats = LogDeduplicator()
    repeats.feed(b"a\nb\n" * 2 + b"a\n", 0.0)
    assert repeats.tick(REPORT_S) == b"a\n"
    assert not repeats.pending


def test_lines_that_differ_in_numbers_are_counted_once_they_flood() -> None:
    repeats = LogDeduplicator()
    lines = [f"frame {i} took 0x{i:08x} and {i / 7:.3f} ms".encode() for i in range(300)]
    first = repeats.feed(b"".join(line + b"\n" for line in lines), 0.0).decode().splitlines()
    assert first == [line.decode() for line in lines[:BURST]]
    said = repeats.tick(WINDOW_S).decode().splitlines()
    assert said == [lines[-1].decode(), f"… {300 - BURST - 1} more lines like this one, apart from numbers, left out"]
    assert repeats.feed(lines[7] + b"\n", WINDOW_S + 0.1) == b"", "the flood is not over until a window had few of them"
    assert repeats.tick(2 * WINDOW_S + 0.1) == lines[7] + b"\n"
    assert repeats.feed(lines[8] + b"\n", 3 * WINDOW_S) == lines[8] + b"\n"


def test_few_lines_that_differ_in_numbers_are_all_written() -> None:
    repeats = LogDeduplicator()
    for i in range(200):
        assert repeats.feed(f"epoch {i}\n".encode(), i * 0.5) == f"epoch {i}\n".encode()


def test_a_flood_in_the_midst_of_other_lines_leaves_those_alone() -> None:
    lines = [word for i in range(200) for word in (f"x={i}".encode(), f"y={i}".encode(), b"p", b"q", b"r", b"s" * (i % 5))]
    lines.insert(600, b"Segmentation fault")
    written = told(lines)
    assert "Segmentation fault" in written
    assert len(written) <= 10 * (BURST + 2) + 1


def test_a_repetition_of_lines_that_were_left_out_does_not_bring_them_back() -> None:
    lines = [f"x={i // 3}".encode() for i in range(3000)]
    written = told(lines)
    assert len(expand("\n".join(written).encode() + b"\n")) == 3000
    assert len(written) < 2 * BURST


def test_what_comes_too_fast_is_counted_unread() -> None:
    repeats = LogDeduplicator(rate=6000, rate_burst=6000)
    block = b"".join(f"{chr(97 + i % 26) * (i % 9 + 1)}\n".encode() for i in range(100))
    written = repeats.feed(block, 0.0) + repeats.feed(block, 0.1) + repeats.feed(block, 0.2)
    assert len(expand(written)) == 100
    assert repeats.pending
    after = repeats.feed(b"calm again\n", 5.0)
    assert after.decode() == f"… 200 lines ({2 * len(block):,} bytes) came too fast and were left out\ncalm again\n"


def test_a_progress_bar_is_lines_and_a_windows_end_is_one() -> None:
    repeats = LogDeduplicator()
    written = repeats.feed(b"10 %\r20 %\r", 0.0) + repeats.feed(b"\nnext\r", 0.0) + repeats.feed(b"\n", 0.0) + repeats.end()
    assert written == b"10 %\n20 %\nnext\n"


def test_a_long_line_is_truncated_with_a_note_in_any_chunking() -> None:
    line = b"x" * 50_000 + b"\n"
    whole, parts = LogDeduplicator(), LogDeduplicator()
    once = whole.feed(line, 0.0)
    assert once == b"".join(parts.feed(line[i : i + 999], 0.0) for i in range(0, len(line), 999))
    assert len(once) <= LINE_BYTES + 1
    assert "bytes more" in once.decode()[-20:]
    kept = once.decode().partition(" … and ")
    assert len(kept[0]) + int(kept[2].split()[0].replace(",", "")) == 50_000


def test_half_a_line_is_written_when_nothing_follows() -> None:
    repeats = LogDeduplicator()
    assert repeats.feed(b"Connecting", 0.0) == b""
    assert repeats.pending
    assert repeats.tick(WINDOW_S) == b"Connecting\n"


@pytest.mark.parametrize("length", [5, 5000])
def test_memory_use_is_bounded_for_any_input(length: int) -> None:
    repeats = LogDeduplicator(rate=10**9, rate_burst=10**9)
    for i in range(600):
        text = "".join(chr(97 + (i >> shift & 15)) for shift in (0, 4, 8)) + "y" * length
        repeats.feed(f"{text}\n".encode() * 2, 0.0)
    assert len(repeats._shapes) <= SHAPES
    assert sum(len(key) for key in repeats._shapes if isinstance(key, bytes)) < 100_000
