from __future__ import annotations

import pytest

from ludus.storage.redact import redact_command


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("redis://user:hidden@host:6379/0", "redis://user:***@host:6379/0"),
        ("--memory=redis://:hid@den/more@host", "--memory=redis://:***@host"),
        ("s3://bucket/run?endpoint=http://127.0.0.1:8333", "s3://bucket/run?endpoint=http://127.0.0.1:8333"),
        ("--redis-password=hidden", "--redis-password=***"),
    ],
)
def test_a_command_is_kept_without_passwords(word: str, kept: str) -> None:
    assert redact_command(["ludus", word, "x=1"]) == ["ludus", kept, "x=1"]
    assert redact_command(["--redis-password", "hidden", "more"]) == ["--redis-password", "***", "more"]
