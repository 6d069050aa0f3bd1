"""Removal of passwords from URLs and command lines before they are stored or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECRET = re.compile(r"--[\w-]*(?:password|secret|token|access-key|credentials)")


def redact_passwords(text: str) -> str:
    """Replace passwords in URLs by ***. A password may contain any character: everything up to the last @ is replaced."""
    return re.sub(r"(://[^/\s:@]*):\S*@", r"\1:***@", text)


def redact_command(words: Sequence[str]) -> list[str]:
    """Replace passwords in URLs and values of options such as --password in the words of a command."""
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
