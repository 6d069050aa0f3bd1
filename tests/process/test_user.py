"""Name of the user of this process."""

from __future__ import annotations

import getpass
import os

import pytest

from ludus.cli.evaluation.tensorboard import SshTunnel
from ludus.process.user import user_name

pwd = pytest.importorskip("pwd", reason="passwd entries need POSIX")
_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")


@pytest.fixture
def unknown_uid(monkeypatch: pytest.MonkeyPatch) -> int:
    """Run as a user without a passwd entry, as `docker run --user` does."""
    uid = next(uid for uid in range(54321, 60000) if uid not in {entry.pw_uid for entry in pwd.getpwall()})
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    return uid


def test_a_user_without_a_passwd_entry_is_named_by_its_id(unknown_uid: int) -> None:
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    assert user_name() == str(unknown_uid)


def test_a_user_is_named_by_its_login_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    assert user_name() == "ada"


def test_the_ssh_tunnel_of_such_a_user_can_be_printed(unknown_uid: int) -> None:
    assert SshTunnel.of({"SSH_CONNECTION": "203.0.113.7 50122 198.51.100.4 22"}).user == str(unknown_uid)
