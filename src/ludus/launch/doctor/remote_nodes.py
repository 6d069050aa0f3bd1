"""Runs the doctor on the machines of a run in parallel, over SSH or srun, and compares their clocks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludus.errors import LudusError, UsageError
from ludus.launch.agent_process import AgentProcess, ExplainFailure
from ludus.launch.doctor.clock import ClockSample, check_clock
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, redact_secrets
from ludus.launch.doctor.local_checks import DoctorRequest

MARK = "ludus-doctor "
ANSWER_S = 90.0
"""Time limit per machine: connection, start of Python from a network drive, and checks."""

_CLOCK_SAMPLES = 3
_MAX_LINE = 1 << 20
_END_S = 2.0


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
        with contextlib.closing(AgentProcess(node.words, MARK, node.name, node.explain, _MAX_LINE)) as agent:
            _run_checks(agent, node, report, request, environment, end)
    except LudusError as error:
        connected = report.versions or "Ludus" in error.message or "Python" in error.message
        report.findings.append(failure("ludus there" if connected else node.by, error.message, error.hint))


def _run_checks(
    agent: AgentProcess,
    node: RemoteNode,
    report: NodeReport,
    request: DoctorRequest,
    environment: Mapping[str, str],
    end: float,
) -> None:
    started_at = time.monotonic()
    hello = agent.receive(end).get("hello")
    if not isinstance(hello, dict):
        raise UsageError("Ludus there has another protocol version.", "Install the same version as here.")
    report.versions = {str(key): str(value) for key, value in dict(hello.get("versions", {})).items()}
    took = time.monotonic() - started_at
    report.findings.append(ok(node.by, f"answers as {hello.get('host')} after {took:.1f} s ({hello.get('python')})"))
    ticks = []
    for _ in range(_CLOCK_SAMPLES):
        sent = time.time()
        agent.send({"clock": 1})
        remote = agent.receive(end).get("time")
        if isinstance(remote, float | int):
            ticks.append(ClockSample(sent, time.time(), float(remote)))
    report.findings.append(check_clock(ticks))
    agent.send({"look": request.to_json(), "environment": dict(environment)})
    while "end" not in (message := agent.receive(end)):
        if isinstance(message.get("finding"), dict):
            report.findings.append(DoctorFinding.from_json(message["finding"]))
    report.token = str(message["token"]) if "token" in message else None
