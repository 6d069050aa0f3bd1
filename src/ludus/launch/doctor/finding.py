"""What one look at one thing gave: a line of `ludus doctor`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ludus.core.formatting import format_bytes
from ludus.storage.redact import redacted

Status = Literal["ok", "warning", "failed", "skipped"]
"""`failed`: a run as it was asked for will not work. `warning`: it may, but slowly, or not always. `skipped`: not looked at, or not needed."""

MARK = "***"
_SHORT = 6
"""What is shorter is no secret, and would be found everywhere."""


@dataclass(frozen=True)
class Finding:
    """`fix`: a command, or a sentence; empty where there is nothing to do."""

    check: str
    status: Status
    found: str
    fix: str = ""
    node: str = ""

    def at(self, node: str) -> Finding:
        return replace(self, node=node)

    def to_json(self) -> dict[str, str]:
        said = asdict(self)
        return {key: said[key] for key in ("node", "check", "status", "found", "fix")}


def ok(check: str, found: str, fix: str = "") -> Finding:
    return Finding(check, "ok", found, fix)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "warning", found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(check, "failed", found, fix)


def skipped(check: str, found: str, fix: str = "") -> Finding:
    return Finding(check, "skipped", found, fix)


def healthy(findings: Iterable[Finding]) -> bool:
    """Warnings are allowed."""
    return all(finding.status != "failed" for finding in findings)


def without_secrets(finding: Finding, secrets: Sequence[str]) -> Finding:
    """The same, on one line, with whatever is secret left out: what programs of others say may contain anything."""
    return replace(finding, found=_clean(finding.found, secrets), fix=_clean(finding.fix, secrets))


def _clean(text: str, secrets: Sequence[str]) -> str:
    text = redacted(text)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = text.replace(secret, MARK)
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text).strip()


def size(count: float) -> str:
    return format_bytes(count)


def several(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
