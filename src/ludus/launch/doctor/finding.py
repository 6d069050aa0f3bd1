"""Result of one check of `ludus doctor`, with helpers to create and format it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ludus.errors import LudusError
from ludus.storage.redact import redact_passwords
from ludus.transport.message_stream import split_password

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

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DoctorFinding:
        """An unknown status, as of a newer version, counts as failed."""
        status: Status = data["status"] if data.get("status") in get_args(Status) else "failed"
        return DoctorFinding(
            str(data.get("check")), status, str(data.get("found")), str(data.get("fix", "")), str(data.get("node", ""))
        )


def ok(check: str, found: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check, "ok", found, fix)


def warning(check: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, "warning", found, fix)


def failure(check: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, "failed", found, fix)


def skip(check: str, found: str, fix: str = "") -> DoctorFinding:
    return DoctorFinding(check, "skipped", found, fix)


def is_healthy(findings: Iterable[DoctorFinding]) -> bool:
    """Return whether nothing failed; warnings are allowed."""
    return all(finding.status != "failed" for finding in findings)


def find_secrets(environ: Mapping[str, str], *urls: str) -> list[str]:
    """Return the passwords in URLs and the values of variables with names of secrets, which must not be shown."""
    found = [value for name, value in environ.items() if re.search(r"PASSWORD|SECRET|TOKEN$|API_KEY|ACCESS_KEY", name)]
    for url in urls:
        with contextlib.suppress(LudusError, ValueError):
            found.append(urlsplit(url).password or "")  # as written
            found.append(split_password(url)[1] or "")  # decoded
    return [secret for secret in found if secret]


def redact_url(url: str) -> str:
    """Return a URL without user, password and query."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if separator else url


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


def last_line(output: str) -> str:
    """Return the last line of a program's output that is not empty, shortened."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")[:300]
