from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludus.errors import UsageError
from ludus.gateway.auth import Tokens
from ludus.protocol.spec import read_token


def lines(tmp_path: Path, text: str) -> Tokens:
    (tmp_path / "tokens").write_text(text)
    return Tokens.read(tmp_path / "tokens", 7.0)


def test_each_line_is_a_token_with_its_name_and_rate(tmp_path: Path) -> None:
    tokens = lines(tmp_path, "# of the studio\n\nplain\nmatchmaker abc\n  load-test def 2.5  \n")
    assert len(tokens) == 3
    found = [tokens.caller(f"Bearer {token}".encode()) for token in ("plain", "abc", "def")]
    assert [(caller.name, caller.rate) for caller in found if caller] == [
        ("default", 7.0),
        ("matchmaker", 7.0),
        ("load-test", 2.5),
    ]
    for wrong in (b"", b"abc", b"Bearer", b"Bearer ab", b"Bearer abcd", b"bearer abc", b"Bearer matchmaker", b"Bearer abc "):
        assert tokens.caller(wrong) is None


@pytest.mark.parametrize(
    "text", ["", "# none\n", "a b c d", "a b many", "a b -1", "a b nan", "a b inf", "a b 1_0", "tökén", "same\nx same\n"]
)
def test_an_invalid_token_file_is_reported_without_its_tokens(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        lines(tmp_path, text)
    assert str(tmp_path / "tokens") in refused.value.message
    assert not any(word in refused.value.message.replace(str(tmp_path), "") for word in ("same", "tökén", "many"))


def test_a_missing_token_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read the token file"):
        Tokens.read(tmp_path / "nothing")


def test_a_rate_allows_a_burst_of_a_second_and_then_its_pace() -> None:
    caller = Tokens.single("t", 10.0).caller(b"Bearer t")
    assert caller is not None
    assert [caller.allow(100.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert not caller.allow(100.05)
    assert caller.allow(100.11)
    assert not caller.allow(100.12)
    assert [caller.allow(200.0) for _ in range(11)] == [True] * 10 + [False]


def test_a_slow_rate_still_lets_one_through() -> None:
    caller = Tokens.single("t", 0.5).caller(b"Bearer t")
    assert caller is not None
    assert [caller.allow(now) for now in (1.0, 1.1, 2.9, 3.2)] == [True, False, False, True]


def test_tokens_are_stored_only_as_hashes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        tokens = Tokens.single("s3cret")
    assert "s3cret" not in repr(vars(tokens)) + caplog.text


def test_short_tokens_and_readable_files_cause_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text("studio 0123456789abcdef\nx a\n")
    path.chmod(0o644)
    for read in (Tokens.read, lambda path: read_token(path)):
        caplog.clear()
        path.write_text("a\n")
        read(path)
        assert "has only 1 characters" in caplog.text
        assert "readable by others (mode 0644)" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    path.write_text("0123456789abcdef\n")
    Tokens.read(path)
    assert caplog.text == ""


def test_a_file_whose_mode_cannot_be_changed_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the read-only directory of a Secret, also in a pod whose user owns the files."""
    path = tmp_path / "tokens"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o440)
    Tokens.read(path)
    assert "readable by others" in caplog.text
    caplog.clear()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    Tokens.read(path)
    assert caplog.text == ""


@pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o444, True)])
def test_a_file_that_another_user_gives_to_our_group_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: int, warned: bool
) -> None:
    """As the kubelet mounts a Secret in a pod: it belongs to root and to the group of the pod."""
    path = tmp_path / "tokens"
    path.write_text("0123456789abcdef\n")
    path.chmod(mode)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    Tokens.read(path)
    assert ("readable by others" in caplog.text) is warned
