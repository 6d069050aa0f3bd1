"""Determinism: the same seed and actions must give the same episode, in this copy, another copy, beside other copies, in another process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.formatting import format_number
from ludus.core.tree import leaves
from ludus.envs.env_check.session import CallFailed, CheckSession
from ludus.envs.env_check.subject import Moment, Subject, make_subject, random_actions
from ludus.io import json_lines
from ludus.process import children, procfs

TRACE_STEPS = 200
_TRACE_BYTES = 64 << 20
_PROCESS_S = 60.0
"""Limit of the second process, in addition to the longest duration of a trace."""
_POLL_S = 0.1


@dataclass(frozen=True)
class TracePoint:
    """Everything that the environment returned at one step: (name, value)."""

    values: Sequence[tuple[str, Any]]
    over: bool

    def difference(self, other: TracePoint) -> str:
        """Describe the first difference; empty if there is none."""
        for (name, mine), (other_name, theirs) in zip(self.values, other.values, strict=False):
            if name != other_name:
                return f"{name} instead of {other_name}"
            first, second = np.asarray(mine), np.asarray(theirs)
            if first.shape != second.shape:
                return f"{name} has shape {list(second.shape)}, not {list(first.shape)}"
            if first.dtype == object or first.dtype.kind in "US":
                if not np.array_equal(first, second):
                    return f"{name} is {theirs!r}, not {mine!r}"[:200]
                continue
            unequal = ~((first == second) | ((first != first) & (second != second)))
            if unequal.any():
                index = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
                place = f"[{', '.join(map(str, index))}]" if index else ""
                return f"{name}{place} is {_show(second[index])}, not {_show(first[index])}"
        if len(self.values) != len(other.values):
            return f"{len(other.values)} values instead of {len(self.values)}"
        return ""

    @property
    def digest(self) -> str:
        found = hashlib.sha256()
        for name, value in self.values:
            array = np.ascontiguousarray(value)
            found.update(f"{name}{array.dtype}{array.shape}".encode())
            found.update(array.tobytes() if array.dtype != object else repr(value).encode())
        return found.hexdigest()[:16]


def _show(value: Any) -> str:
    number = float(value)
    shown = format_number(number)
    return shown if len(repr(number)) < len(shown) + 3 else repr(number)


def point_of(moment: Moment) -> TracePoint:
    values: list[tuple[str, Any]] = []
    for agent in sorted(moment.observations):
        who = f"{agent}: " if agent else ""
        for path, leaf in leaves(_sortable(moment.observations[agent])):
            values.append((f"{who}{path or 'the observation'}", np.array(leaf)))
        if agent in moment.masks:
            values += [(f"{who}action_mask{path and '.'}{path}", np.array(leaf)) for path, leaf in leaves(moment.masks[agent])]
    for agent in sorted(moment.rewards):
        values.append((f"{agent}: reward" if agent else "the reward", np.float64(moment.rewards[agent])))
    values += [(f"{agent}: end" if agent else "the end", np.array(kind)) for agent, kind in sorted(moment.ended.items())]
    return TracePoint(values, moment.over)


def _sortable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _sortable(item) for key, item in value.items()}
    return tuple(map(_sortable, value)) if isinstance(value, tuple) else value


def trace(session: CheckSession, subject: Subject, seed: int, steps: int = TRACE_STEPS) -> Iterator[TracePoint]:
    """Play with a seed and random actions that depend on it alone, over several episodes."""
    random = np.random.default_rng([seed, 1])
    session.step = 0
    moment = subject.reset(seed)
    yield point_of(moment)
    for step in range(1, steps + 1):
        session.step = step
        moment = subject.reset(seed + step) if moment.over else subject.step(random_actions(subject, moment, random))
        yield point_of(moment)


def check_seeding(session: CheckSession) -> None:
    """Stage `seeding`."""
    seed, log = session.request.seed + 1, session.findings
    if "reset_midway" in log:
        raise CallFailed("reset")
    first = make_subject(session)
    try:
        expected = _record(session, first, seed)
        session.facts["trace_digests"] = [point.digest for point in expected]
        found = _compare(expected, trace(session, first, seed))
        if found:
            log.add("seeding", f"the same copy with the same seed, {found}")
            return
    finally:
        session.try_call("close", first.close)
    second, third = make_subject(session), make_subject(session)
    try:
        found = _compare(expected, trace(session, second, seed))
        if found:
            log.add("seeding", f"another copy with the same seed, {found}")
            return
        disturbing = trace(session, third, seed + 1)
        found = _compare(expected, _alternate(trace(session, second, seed), disturbing))
        if found:
            log.add("shared_state", f"while another copy plays, {found}")
    finally:
        session.try_call("close", second.close)
        session.try_call("close", third.close)


def _record(session: CheckSession, subject: Subject, seed: int) -> list[TracePoint]:
    """As many steps as fit into memory and time."""
    points: list[TracePoint] = []
    size, until = 0, session.deadline()
    for point in trace(session, subject, seed):
        points.append(point)
        size += sum(np.asarray(value).nbytes for _, value in point.values)
        if size > _TRACE_BYTES or time.perf_counter() > until:
            break
    return points


def _compare(expected: Sequence[TracePoint], points: Iterator[TracePoint]) -> str:
    for number, (mine, theirs) in enumerate(zip(expected, points, strict=False)):
        found = mine.difference(theirs)
        if found:
            return f"{'after reset' if number == 0 else f'step {number}'}: {found}"
    return ""


def _alternate(points: Iterator[TracePoint], others: Iterator[TracePoint]) -> Iterator[TracePoint]:
    for point in points:
        next(others, None)
        yield point


# -- another process ------------------------------------------------------------------------------------------------------


def check_second_process(session: CheckSession) -> None:
    """Stage `second process`: while a copy is open here, make one in another process and compare what it returns."""
    here = make_subject(session)
    try:
        session.step = 0
        here.reset(session.request.seed)
        code, replies, last_line = _run_second_process(session)
    finally:
        session.marks.leave()
        session.try_call("close", here.close)
    reply = next((each for each in replies if "digests" in each or "failed" in each), None)
    if code is None:
        limit = _PROCESS_S + session.request.seconds
        session.findings.add("second_process", f"a second copy in another process did not finish in {limit:g} s")
    elif reply is None:
        session.findings.add("second_process", f"the second process ended with code {code}: {last_line}")
    elif "failed" in reply:
        session.findings.add("second_process", f"while one copy is open here: {reply['failed']}")
    elif "seeding" not in session.findings:
        mine, theirs = session.facts.get("trace_digests", []), reply["digests"]
        differs = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if differs is not None:
            place = "after reset" if differs == 0 else f"from step {differs} on"
            session.findings.add("process_seed", f"another process got other values for the same seed and actions, {place}")


def _run_second_process(session: CheckSession) -> tuple[int | None, list[dict[str, Any]], str]:
    """Run the trace in another process. Returns (exit code, its replies, last line of its stderr); the code is None after a time-out.

    Its output goes to files: a pipe would stay open as long as helper processes of the environment that have inherited it.
    """
    with tempfile.TemporaryDirectory(prefix="ludus-check-env-") as directory:
        task, replies, log = (Path(directory) / name for name in ("task.json", "replies", "log"))
        task.write_text(json.dumps({"request": asdict(session.request), "drop": session.drop}), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "ludus.envs.env_check.child", "--trace", str(task)]
        with replies.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)  # noqa: S603 - this interpreter
        code = _wait(process, _PROCESS_S + session.request.seconds, session.beat("a second process"))
        last_line = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return code, list(json_lines.decode_valid(replies.read_bytes().splitlines())), last_line


def _wait(process: subprocess.Popen[bytes], timeout_s: float, beat: Callable[[], None]) -> int | None:
    """Wait for the process itself, not for its descendants; after `timeout_s` kill all of them and return None."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        beat()  # this wait has its own limit: the runner must not take it for a call that hangs
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
    children.kill(*procfs.list_descendants(process.pid))
    children.wait_or_kill(process, 0)
    return None


def trace_digests(session: CheckSession) -> list[str]:
    """The digests of a trace, as the second process sends them."""
    subject = make_subject(session)
    try:
        return [point.digest for point in _record(session, subject, session.request.seed + 1)]
    finally:
        session.try_call("close", subject.close)
