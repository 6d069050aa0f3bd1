"""Addresses of memories: what is taken apart, and what is refused without showing a secret."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.errors import UnknownName, UsageError
from ludus.transport.message_stream import PASSWORD, check_url, open_message_stream, split_password


class Noted:
    """Stands for a user's exchange; it only remembers how it was made."""

    def __init__(self, *given: Any) -> None:
        self.given = given


@pytest.mark.parametrize(
    ("url", "plain", "password"),
    [
        ("redis://host", "redis://host", None),
        ("redis://:pw@host:6379/0", "redis://host:6379/0", "pw"),
        ("rediss://me:p%2Fw@host:6380/2?ssl_ca_certs=/ca", "rediss://me@host:6380/2?ssl_ca_certs=/ca", "p/w"),
        ("redis://me:p@w@host", "redis://me@host", "p@w"),
        ("redis://[::1]:6379", "redis://[::1]:6379", None),
        ("some_module:Class", "some_module:Class", None),
        ("some_module:Class://me:pw@host/x", "some_module:Class://me@host/x", "pw"),
    ],
)
def test_a_password_is_taken_out(url: str, plain: str, password: str | None) -> None:
    assert split_password(url) == (plain, password)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://me:12/hush@host", "redis://:hush/er@host", "redis://:hush?er@host", "redis://:hush#er@host"),
        *("redis://me:a@b/hush@host", "redis://me:[hush@host", "redis://host?password=hush"),
    ],
)
def test_an_ambiguous_password_in_a_url_is_rejected_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        split_password(url)
    assert PASSWORD in str(refused.value)
    assert "hush" not in repr(refused.value)


def test_a_user_class_receives_the_url() -> None:
    for url in (f"{__name__}:Noted", f"{__name__}:Noted://host:1/0"):
        check_url(url)
        opened: Any = open_message_stream(url, "channel", 3)
        assert opened.given == (url, "channel", 3)
    with pytest.raises(UnknownName, match="Nobody"):
        open_message_stream(f"{__name__}:Nobody://host", "channel", 3)
