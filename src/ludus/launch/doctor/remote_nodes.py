"""Runs the doctor on the machines of a run in parallel, over SSH or srun, and compares their clocks."""

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
from ludus.launch.doctor.checks.network import ClockSample, check_clock
from ludus.launch.doctor.finding import DoctorFinding, Status, failed, ok, redact_secrets
from ludus.launch.doctor.local_checks import DoctorRequest

MARK = "ludus-doctor "
ANSWER_S = 90.0
"""Time limit per machine: connection, start of Python from a network drive, and checks."""

_CLOCK_SAMPLES = 3
_MAX_LINE = 1 << 20
_END_S = 2.0

ExplainFailure = Callable[[int | None, str], LudusError]
"""Translates an exit code (None: still running) and stderr into an error."""


@dataclass(frozen=True)
class RemoteNode:
    """`words`: local command that starts the doctor's agent there. `by`: ssh or srun."""

    name: str
    words: tuple[str, ...]
    by: str
    explain: ExplainFailure


@dataclass
class NodeReport:
    """`token`: fingerprint of the machine's token; "" if it has none; None if it is unknown."""

    node: str
    findings: list[DoctorFinding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    token: str | None = None


def check_nodes(
    nodes: Sequence[RemoteNode], request: DoctorRequest, environment: Mapping[str, str], timeout_s: float = ANSWER_S
) -> list[NodeReport]:
    """Check all nodes in parallel within the time; return their reports in order. A node that does not answer is a finding."""
    reports = [NodeReport(node.name) for node in nodes]
    end = time.monotonic() + timeout_s
    threads = [
        threading.Thread(
            target=_check_node, args=(node, report, request, environment, end), name=f"doctor-{node.name}", daemon=True
        )
        for node, report in zip(nodes, reports, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + _END_S + 1.0)
    secrets = request.secrets
    for report in reports:
        report.findings = [redact_secrets(finding.on_node(report.node), secrets) for finding in report.findings]
    return reports


def _check_node(node: RemoteNode, report: NodeReport, request: DoctorRequest, environment: Mapping[str, str], end: float) -> None:
    try:
        with _NodeConnection(node, end) as connection:
            _run_checks(connection, node, report, request, environment)
    except LudusError as error:
        report.findings.append(failed(_failed_check(node, report, error), error.message, error.hint))


def _failed_check(node: RemoteNode, report: NodeReport, error: LudusError) -> str:
    return node.by if not report.versions and "Ludus" not in error.message and "Python" not in error.message else "ludus there"


def _run_checks(
    connection: _NodeConnection, node: RemoteNode, report: NodeReport, request: DoctorRequest, environment: Mapping[str, str]
) -> None:
    started_at = time.monotonic()
    hello = connection.receive().get("hello")
    if not isinstance(hello, dict):
        raise UsageError("Ludus there has another protocol version.", "Install the same version as here.")
    report.versions = {str(key): str(value) for key, value in dict(hello.get("versions", {})).items()}
    took = time.monotonic() - started_at
    report.findings.append(ok(node.by, f"answers as {hello.get('host')} after {took:.1f} s ({hello.get('python')})"))
    ticks = []
    for _ in range(_CLOCK_SAMPLES):
        sent = time.time()
        remote = connection.request({"clock": 1}).get("time")
        if isinstance(remote, float | int):
            ticks.append(ClockSample(sent, time.time(), float(remote)))
    report.findings.append(check_clock(ticks))
    connection.send({"look": request.to_json(), "environment": dict(environment)})
    while "end" not in (message := connection.receive()):
        if (finding := finding_from_json(message.get("finding"))) is not None:
            report.findings.append(finding)
    report.token = str(message["token"]) if "token" in message else None


def finding_from_json(data: Any) -> DoctorFinding | None:
    """Return None if the data is not a finding. An unknown status counts as failed."""
    if not isinstance(data, dict):
        return None
    status: Status = data["status"] if data.get("status") in ("ok", "warning", "failed", "skipped") else "failed"
    return DoctorFinding(
        str(data.get("check")), status, str(data.get("found")), str(data.get("fix", "")), str(data.get("node", ""))
    )


class _NodeConnection:
    """Process of the agent on a node, and its JSON lines, until `end`. Leaving the block kills it."""

    def __init__(self, node: RemoteNode, end: float) -> None:
        self._node, self._end = node, end
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        try:
            self._process = subprocess.Popen(  # noqa: S603
                node.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
            )
        except OSError as error:
            self._stderr.close()
            raise UsageError(f"{node.words[0]} cannot be run: {error.strerror}.", f"Install {node.words[0]}.") from error
        assert self._process.stdout is not None
        self._reader = LineReader(self._process.stdout.fileno(), _MAX_LINE)

    def __enter__(self) -> _NodeConnection:
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
        self._stderr.close()

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.receive()

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json_lines.encode(request))
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error

    def receive(self) -> dict[str, Any]:
        """Return the next marked line. Raises LudusError."""
        while True:
            try:
                line = self._reader.read_line(self._end - time.monotonic())
            except TimeoutError as error:
                raise self._failure(silent=True) from error
            except LineTooLong as error:
                raise WorkerFailed(
                    f"{self._node.name} sent a line without end.", "Does its login script write to stdout?"
                ) from error
            if line is None:
                raise self._failure()
            message = json_lines.decode_marked(line, MARK)
            if message is not None:
                return message

    def _failure(self, *, silent: bool = False) -> LudusError:
        code: int | None = None
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_S)
        data = os.pread(self._stderr.fileno(), 100_000, 0).decode(errors="replace")
        return self._node.explain(code, data)
