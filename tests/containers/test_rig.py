"""The rig of the image tests, as far as it works without images."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ludus.process import identity
from tests.system.containers import is_stale, pinned_version

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the start time of a process is in /proc")


def test_what_a_killed_rig_has_left_behind_is_stale() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        name = f"{process.pid}-{identity.start_ticks(process.pid)}-abc123"
        assert not is_stale(name)
        assert not is_stale(f"{name}_secrets-data"), "a volume of its Compose project"
        process.kill()
    assert is_stale(name)


def test_a_reused_process_id_does_not_keep_what_a_killed_rig_has_left_behind() -> None:
    assert not is_stale(f"{os.getpid()}-{identity.start_ticks(os.getpid())}-abc123")
    assert is_stale(f"{os.getpid()}-1-abc123")


@pytest.mark.parametrize("name", ["", "default", "abc-1-2", "podman-default"])
def test_other_names_are_never_stale(name: str) -> None:
    assert not is_stale(name)


def test_the_wheel_of_torch_is_that_of_the_constraints() -> None:
    assert pinned_version("torch")[0].isdigit()
    with pytest.raises(AssertionError, match="no-such"):
        pinned_version("no-such")
