"""What people typed, as it may be kept and shown: without the passwords in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECRET = re.compile(r"--[\w-]*(?:password|secret|token|access-key|credentials)")


def redact_passwords(text: str) -> str:
    """The same without passwords in addresses. One may contain anything: all up to the last @ goes."""
    return re.sub(r"(://[^/\s:@]*):\S*@", r"\1:***@", text)


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command as they may be kept: no passwords, in addresses or after an option that takes one."""
    kept: list[str] = []
    for at, word in enumerate(words):
        option, equals, _ = word.partition("=")
        if equals and _SECRET.fullmatch(option):
            kept.append(f"{option}=***")
        elif at and _SECRET.fullmatch(words[at - 1]):
            kept.append("***")
        else:
            kept.append(redact_passwords(word))
    return kept
