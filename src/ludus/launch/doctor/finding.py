"""Result of one check of `ludus doctor`, with helpers to create and format it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ludus.storage.redact import redact_passwords

Status = Literal["ok", "warning", "failed", "skipped"]
"""`failed`: the requested run will not work. `warning`: it may be slow or unreliable. `skipped`: not checked, or not needed."""

MARK = "***"
_MIN_SECRET_CHARS = 6
"""Shorter values are not redacted: they would match by chance."""


@dataclass(frozen=True)
class DoctorFinding:
    """`fix`: a command or a sentence; empty if there is nothing to do."""

    check: str
    status: Status
    found: str
    fix: str = ""
    node: str = ""

    def on_node(self, node: str) -> DoctorFinding:
        return replace(self, node=node)

    def to_json(self) -> dict[str, str]:
        fields = asdict(self)
        return {key: fields[key] for key in ("node", "check", "status", "found", "fix")}


def ok(check: str, found: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check, "ok", found, fix)


def warning(check: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, "warning", found, fix)


def failed(check: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, "failed", found, fix)


def skipped(check: str, found: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check, "skipped", found, fix)


def is_healthy(findings: Iterable[DoctorFinding]) -> bool:
    """Return whether nothing failed; warnings are allowed."""
    return all(finding.status != "failed" for finding in findings)


def redact_secrets(finding: DoctorFinding, secrets: Sequence[str]) -> DoctorFinding:
    """Replace secrets, which the output of other programs may contain, and join the text into one line."""
    return replace(finding, found=_clean(finding.found, secrets), fix=_clean(finding.fix, secrets))


def _clean(text: str, secrets: Sequence[str]) -> str:
    text = redact_passwords(text)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, MARK)
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text).strip()


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
