"""The machines of a run, asked side by side over SSH or srun: what each says of itself, its clock, and why one does not answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader, LineTooLong
from ludus.launch.doctor.checks.network import Tick, judge_clock
from ludus.launch.doctor.finding import Finding, Status, failed, ok, without_secrets
from ludus.launch.doctor.local_checks import Request

MARK = "ludus-doctor "
ANSWER_S = 90.0
"""For a whole machine: connecting, a Python from a network drive, and looking."""

_CLOCKS = 3
_MOST_LINE = 1 << 20
_END_S = 2.0

Explain = Callable[[int | None, str], LudusError]
"""Exit code (None: it did not end) and what was said → why."""


@dataclass(frozen=True)
class Node:
    """`words`: what is run here so that the far side of the doctor runs there. `by`: ssh or srun."""

    name: str
    words: tuple[str, ...]
    by: str
    explain: Explain


@dataclass
class Answer:
    """`token`: the fingerprint of the one that roles have there; empty: there is none; None: it was not said."""

    node: str
    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    token: str | None = None


def ask(nodes: Sequence[Node], request: Request, environment: Mapping[str, str], timeout_s: float = ANSWER_S) -> list[Answer]:
    """In the order of the nodes, within the time: one that does not answer is a finding."""
    answers = [Answer(node.name) for node in nodes]
    end = time.monotonic() + timeout_s
    threads = [
        threading.Thread(target=_ask, args=(node, answer, request, environment, end), name=f"doctor-{node.name}", daemon=True)
        for node, answer in zip(nodes, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + _END_S + 1.0)
    secrets = request.secrets
    for answer in answers:
        answer.findings = [without_secrets(finding.at(answer.node), secrets) for finding in answer.findings]
    return answers


def _ask(node: Node, answer: Answer, request: Request, environment: Mapping[str, str], end: float) -> None:
    try:
        with _Line(node, end) as line:
            _converse(line, node, answer, request, environment)
    except LudusError as error:
        answer.findings.append(failed(_check_of(node, answer, error), error.message, error.hint))


def _check_of(node: Node, answer: Answer, error: LudusError) -> str:
    return node.by if not answer.versions and "Ludus" not in error.message and "Python" not in error.message else "ludus there"


def _converse(line: _Line, node: Node, answer: Answer, request: Request, environment: Mapping[str, str]) -> None:
    begun = time.monotonic()
    hello = line.receive().get("hello")
    if not isinstance(hello, dict):
        raise UsageError("Ludus there speaks another protocol.", "Install the same version as here.")
    answer.versions = {str(key): str(value) for key, value in dict(hello.get("versions", {})).items()}
    took = time.monotonic() - begun
    answer.findings.append(ok(node.by, f"answers as {hello.get('host')} after {took:.1f} s ({hello.get('python')})"))
    ticks = []
    for _ in range(_CLOCKS):
        asked = time.time()
        told = line.asked({"clock": 1}).get("time")
        if isinstance(told, float | int):
            ticks.append(Tick(asked, time.time(), float(told)))
    answer.findings.append(judge_clock(ticks))
    line.send({"look": request.to_json(), "environment": dict(environment)})
    while "end" not in (said := line.receive()):
        if (finding := finding_of(said.get("finding"))) is not None:
            answer.findings.append(finding)
    answer.token = str(said["token"]) if "token" in said else None


def finding_of(said: Any) -> Finding | None:
    """One that came as JSON; None: it is none. A status that is not known is a failure."""
    if not isinstance(said, dict):
        return None
    status: Status = said["status"] if said.get("status") in ("ok", "warning", "failed", "skipped") else "failed"
    return Finding(str(said.get("check")), status, str(said.get("found")), str(said.get("fix", "")), str(said.get("node", "")))


class _Line:
    """One process, and lines to and from it, until `end`. It is killed when the block is left."""

    def __init__(self, node: Node, end: float) -> None:
        self._node, self._end = node, end
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the line
        try:
            self._process = subprocess.Popen(  # noqa: S603
                node.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
            )
        except OSError as error:
            self._said.close()
            raise UsageError(f"{node.words[0]} cannot be run: {error.strerror}.", f"Install {node.words[0]}.") from error
        assert self._process.stdout is not None
        self._reader = LineReader(self._process.stdout.fileno(), _MOST_LINE)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.receive()

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json_lines.encode(request))
            self._process.stdin.flush()
        except OSError as error:
            raise self._why() from error

    def receive(self) -> dict[str, Any]:
        """The next line with the mark. Raises LudusError."""
        while True:
            try:
                line = self._reader.read_line(self._end - time.monotonic())
            except TimeoutError as error:
                raise self._why(silent=True) from error
            except LineTooLong as error:
                raise WorkerFailed(
                    f"{self._node.name} says things without end.", "Does its login script write to its output?"
                ) from error
            if line is None:
                raise self._why()
            found = json_lines.decode_marked(line, MARK)
            if found is not None:
                return found

    def _why(self, *, silent: bool = False) -> LudusError:
        code: int | None = None
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_S)
        said = os.pread(self._said.fileno(), 100_000, 0).decode(errors="replace")
        return self._node.explain(code, said)
