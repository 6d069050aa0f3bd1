"""The last lines of a followed log, then all new ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ludus.cli import log_tail
from ludus.cli.log_tail import BackgroundReader, tail_lines
from ludus.errors import WorkerFailed

WAIT_S = 30.0


def process_of(line: str) -> str:
    return line.partition(":")[0]


def following(before: list[str], gate: threading.Event, after: list[str]) -> Iterator[str]:
    """A log that has some lines, and others when somebody opens the gate."""
    yield from before
    assert gate.wait(WAIT_S)
    yield from after


def test_the_last_lines_are_shown_and_then_all_that_come() -> None:
    gate = threading.Event()
    lines = tail_lines(following(["a:1", "a:2", "a:3"], gate, ["a:4", "a:5", "a:6"]), 2, {"a": 3}, process_of, WAIT_S)
    assert [next(lines), next(lines)] == ["a:2", "a:3"]
    gate.set()
    assert list(lines) == ["a:4", "a:5", "a:6"]


def test_when_fewer_are_left_than_were_counted_nothing_that_comes_is_taken_for_them() -> None:
    gate = threading.Event()
    lines = tail_lines(following(["a:8", "a:9"], gate, [f"a:{n}" for n in range(10, 30)]), 1, {"a": 9}, process_of, 0.2)
    assert next(lines) == "a:9"
    gate.set()
    assert list(lines) == [f"a:{n}" for n in range(10, 30)]


def test_new_lines_of_one_process_are_kept_while_old_lines_of_another_are_read() -> None:
    log = ["a:old", "a:new 1", "a:new 2", "b:old 1", "b:old 2", "b:new"]
    assert list(tail_lines(iter(log), 1, {"a": 1, "b": 2}, process_of, WAIT_S)) == ["b:old 2", "a:new 1", "a:new 2", "b:new"]
    assert list(tail_lines(iter(log), 0, {"a": 1, "b": 2}, process_of, WAIT_S)) == ["a:new 1", "a:new 2", "b:new"]


@pytest.mark.parametrize("counted", [1, 2, 9])
def test_lines_read_before_an_error_are_printed_first(counted: int) -> None:
    def breaks() -> Iterator[str]:
        yield from ("a:1", "a:2")
        raise WorkerFailed("The connection is gone.")

    lines = tail_lines(breaks(), 5, {"a": counted}, process_of, WAIT_S)
    assert [next(lines), next(lines)] == ["a:1", "a:2"]
    with pytest.raises(WorkerFailed, match="gone"):
        next(lines)


def test_the_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "_MAX_BUFFERED", 3)
    taken = threading.Event()
    given: list[int] = []

    def endless() -> Iterator[str]:
        for n in range(1_000_000):
            given.append(n)
            if n == 3:  # has three before it that nobody has taken
                taken.set()
            yield str(n)

    with BackgroundReader(endless()) as reader:
        assert taken.wait(WAIT_S)
        assert len(given) == 4
        found: list[str] = []
        while len(found) < 20:
            found += reader.take(WAIT_S)
            assert len(given) <= len(found) + 4
        assert found == [str(n) for n in range(len(found))]
