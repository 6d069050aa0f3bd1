from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.io import json_lines
from ludus.io.json_lines import LineReader, LineSplitter, LineTooLong


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for end in (reader, writer):
            with contextlib.suppress(OSError):  # closed by the test
                os.close(end)


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=10), st.integers(1, 7))
def test_lines_are_the_same_in_whatever_pieces_they_arrive(lines: list[bytes], size: int) -> None:
    data = b"".join(line + b"\n" for line in lines) + b"torn"
    splitter = LineSplitter()
    found = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    assert found == lines
    assert splitter.has_partial_line


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_long_line_is_refused(size: int) -> None:
    splitter = LineSplitter(max_bytes=10)
    assert splitter.feed(b"0123456789\n") == [b"0123456789"]
    pieces = [b"x" * size] * (20 // size + 1)
    with pytest.raises(LineTooLong):
        list(map(splitter.feed, pieces))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_long_line_is_skipped_where_that_is_wanted(size: int) -> None:
    splitter = LineSplitter(max_bytes=10, skip_long=True)
    data = b"first\n" + b"x" * 50 + b"\nsecond\n"
    assert [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])] == [b"first", b"second"]


def test_a_message_comes_back_as_it_was() -> None:
    message = {"name": "Ä\n", "values": [1, 2.5, None]}
    line = json_lines.encode(message)
    assert line.count(b"\n") == 1
    assert json_lines.decode(line) == message


@pytest.mark.parametrize("line", [b"", b"[1]", b"{", b"1", b"\xff{}", b"[" * 100_000])
def test_anything_but_an_object_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        json_lines.decode(line)
    assert list(json_lines.decode_valid([line, b'{"a": 1}'])) == [{"a": 1}]


def test_only_lines_with_the_mark_count() -> None:
    assert json_lines.decode_marked(b'mark {"a": 1}', "mark ") == {"a": 1}
    assert json_lines.decode_marked(b'{"a": 1}', "mark ") is None
    assert json_lines.decode_marked(b"mark welcome", "mark ") is None


def test_a_line_is_waited_for_and_the_next_is_kept(pipe: tuple[int, int]) -> None:
    reader = LineReader(pipe[0])
    threading.Timer(0.05, lambda: os.write(pipe[1], b"one\ntwo\nto")).start()
    assert reader.read_line(10) == b"one"
    assert reader.read_line(10) == b"two"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.read_line(0.05)
    assert time.monotonic() - began < 5
    os.write(pipe[1], b"rn")
    os.close(pipe[1])
    assert reader.read_line(10) is None
    assert reader.at_end
    assert reader.has_partial_line


def test_what_is_there_is_read_without_waiting(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[0], False)
    reader = LineReader(pipe[0])
    assert list(reader.read_available()) == []
    json_lines.write(pipe[1], {"a": 1})
    json_lines.write(pipe[1], {"b": 2})
    assert list(json_lines.decode_valid(reader.read_available())) == [{"a": 1}, {"b": 2}]
    assert not reader.at_end
    os.close(pipe[1])
    assert list(reader.read_available()) == []
    assert reader.at_end


def test_a_line_larger_than_the_pipe_is_written_whole(pipe: tuple[int, int]) -> None:
    writing = threading.Thread(target=json_lines.write, args=(pipe[1], {"text": "x" * 1_000_000}))
    writing.start()
    line = LineReader(pipe[0]).read_line(10)
    writing.join(10)
    assert line is not None
    assert len(json_lines.decode(line)["text"]) == 1_000_000


def test_a_time_out_of_a_socket_is_not_its_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        reader = LineReader(ours)
        with pytest.raises(TimeoutError):
            reader.read()
        assert not reader.at_end
        theirs.sendall(b"a\nb\n")
        assert reader.read() == [b"a", b"b"]
        theirs.sendall(b"unread")
        ours.send(b"!")
        theirs.close()
        reader.read()
        assert reader.read() == []
        assert reader.at_end
