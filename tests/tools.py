"""What tests share: programs that Python does not bring (compilers, engines, proxies), and ways into a policy."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ludus.models.networks import Network
from ludus.models.policy import Policy

REQUIRE = "LUDUS_TESTS_REQUIRE"
"""Environment variable: 1 turns skipped tests whose programs are missing into failures, for a machine that should run all of them."""
_INSTALLER = Path(__file__).parents[1] / "scripts" / "tools.sh"
_INSTALL_S = 240.0  # measured: 5 s for each from the mirror, 25 s for godot4
_UNKNOWN = 2  # exit code of the installer
_UNPACKED = frozenset({"godot4", "docker-compose"})
"""From a later Debian, below ~/.cache/ludus."""


def need(program: str) -> str:
    """Where the program is. It is installed first where that is possible, else the test is skipped, with the reason."""
    found = _find(program)
    if found is None and (reason := _install(program)):
        skip(reason)
    return found or _find(program) or skip(f"{program} was installed but is not on the PATH")


def skip(reason: str) -> NoReturn:
    """Skip a test that needs something which this machine does not have. With LUDUS_TESTS_REQUIRE=1 the test fails."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason} ({REQUIRE}=1)", pytrace=False)
    pytest.skip(reason)


def _find(program: str) -> str | None:
    if program in _UNPACKED:
        unpacked = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ludus" / program / "run"
        if unpacked.exists():
            return str(unpacked)
    if program == "docker-compose":  # Debian 12 has version 1
        return None
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@functools.cache  # at most one attempt in a session
def _install(program: str) -> str:
    """Why it could not be installed; empty when it was."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{program} is not installed (as root on Debian it would be: scripts/tools.sh {program})"
    try:
        done = subprocess.run([_INSTALLER, program], capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        return f"{program}: scripts/tools.sh took longer than {_INSTALL_S:g} s"
    if done.returncode == _UNKNOWN:
        return f"{program} is not installed, and scripts/tools.sh has no package for it"
    return "" if done.returncode == 0 else f"{program}: scripts/tools.sh failed: {done.stderr.strip()[-300:]}"


def network_of(policy: Policy) -> Network:
    """The network of a policy, which is one of ours and not a user's: its parts may be reached into."""
    assert isinstance(policy.network, Network)
    return policy.network
