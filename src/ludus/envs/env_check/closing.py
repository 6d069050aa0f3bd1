"""What is left after close(): threads, processes, open files."""

from __future__ import annotations

import os
import time

import numpy as np

from ludus.envs.env_check.session import CheckSession
from ludus.envs.env_check.subject import SoloSubject, make_subject, random_actions
from ludus.process import procfs

_CYCLES = 4
_SETTLE_S = 1.0
"""Threads and processes that were told to end get this long to do so."""


def check_closing(session: CheckSession) -> None:
    """Stage `closing`: make, use and close copies in turn. Libraries may keep what the first ones have started, so growth counts."""
    _close_twice(session)
    counts = [_use_once(session) for _ in range(_CYCLES)]
    for kind, noun, numbers in zip(
        ("threads_left", "processes_left", "files_left"),
        ("threads", "processes", "open files"),
        zip(*counts, strict=True),
        strict=True,
    ):
        rises = np.diff(numbers)
        if (rises > 0).all():
            session.findings.add(
                kind, f"{numbers[-1] - numbers[0]} more {noun} after {_CYCLES - 1} more copies were made and closed"
            )
    if "processes_left" not in session.findings and counts[-1][1] > 0 and counts[-1][1] >= counts[0][1] > 0:
        session.facts["processes_after_close"] = counts[-1][1]


def _close_twice(session: CheckSession) -> None:
    subject = make_subject(session)
    subject.close()
    close = subject.env.close if isinstance(subject, SoloSubject) else subject.match.close
    _, failure = session.try_call("a second close", close)
    if failure:
        session.findings.add("close_again", f"the second call raised {failure}")


def _use_once(session: CheckSession) -> tuple[int, int, int]:
    """Counts after one copy was closed."""
    random, session.step = np.random.default_rng(session.request.seed), 0
    before = _counts()
    subject = make_subject(session)
    moment = subject.reset(session.request.seed)
    for _ in range(5):
        session.step += 1
        moment = subject.reset(None) if moment.over else subject.step(random_actions(subject, moment, random))
    subject.close()
    until = time.monotonic() + _SETTLE_S
    while any(now > then for now, then in zip(_counts(), before, strict=True)) and time.monotonic() < until:
        time.sleep(0.02)
    return _counts()


def _counts() -> tuple[int, int, int]:
    """Threads of this process, processes below it, its open files."""
    own = procfs.read_stat(os.getpid())
    return own.threads if own else 0, len(procfs.list_descendants(os.getpid())), len(procfs.list_open_files())
