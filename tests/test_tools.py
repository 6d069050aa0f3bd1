"""The tools of the tests themselves."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from tests import tools
from tests.system.kubernetes import build, cgroups


def test_a_missing_program_skips_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tools.REQUIRE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program"):
        tools.need("no-such-program")


def test_a_missing_program_is_a_failure_where_all_tests_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tools.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        tools.need("no-such-program")


def test_a_kubernetes_that_cannot_be_built_is_a_failure_where_all_tests_are_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "build.sh"
    program.write_text("#!/bin/sh\necho cannot compile >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(build, "_PROGRAM", program)
    monkeypatch.setattr(tools, "need", str)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(tools.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="cannot compile"):
        build.build(tmp_path / "kubernetes")
    monkeypatch.delenv(tools.REQUIRE)
    with pytest.raises(pytest.skip.Exception, match="cannot compile"):
        build.build(tmp_path / "kubernetes")


def test_control_groups_of_version_2_are_a_failure_where_all_tests_are_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setenv(tools.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="version 1"):
        cgroups.require()
