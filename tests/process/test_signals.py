from __future__ import annotations

import os
import selectors
import signal
import threading

import pytest

from ludus.process.signals import SignalQueue


def test_a_signal_ends_a_wait() -> None:
    with SignalQueue(signal.SIGUSR1, signal.SIGUSR2) as queue, selectors.DefaultSelector() as selector:
        selector.register(queue, selectors.EVENT_READ)
        assert queue.take() == b""
        assert not selector.select(0)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert selector.select(10)
        assert list(queue.take()) == [signal.SIGUSR1]
        assert not selector.select(0)


def test_signals_of_one_moment_arrive_together() -> None:
    with SignalQueue(signal.SIGUSR1, signal.SIGUSR2) as queue:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert set(queue.take()) == {signal.SIGUSR1, signal.SIGUSR2}


def test_the_handlers_of_before_are_put_back() -> None:
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    try:
        with SignalQueue(signal.SIGUSR1):
            signal.raise_signal(signal.SIGUSR1)
        assert numbers == []
        signal.raise_signal(signal.SIGUSR1)
        assert numbers == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_queues_can_be_nested() -> None:
    with SignalQueue(signal.SIGUSR1) as outer:
        with SignalQueue(signal.SIGUSR1) as inner:
            signal.raise_signal(signal.SIGUSR1)
            assert list(inner.take()) == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGUSR1)
        assert list(outer.take()) == [signal.SIGUSR1]


def test_a_process_about_to_exit_stays_deaf() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        queue = SignalQueue(signal.SIGUSR1, restore=False)
        queue.close()
        queue.close()
        signal.raise_signal(signal.SIGUSR1)  # would end this process
        with pytest.raises(OSError, match="descriptor"):
            queue.take()
    finally:
        signal.signal(signal.SIGUSR1, before)
