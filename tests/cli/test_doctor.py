"""`ludus doctor`: output and exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.calling import Call, one_line

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="supports Linux and macOS only")

KEYS = {"node", "check", "status", "found", "fix"}


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's own troubles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    for name in (
        "RAY_ADDRESS",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_MODE",
        "LD_PRELOAD",
        "LUDUS_JOB_TOKEN_FILE",
        "LUDUS_TOKEN_FILE",
        "LUDUS_SCREEN",
        "LUDUS_SHM",
        "http_proxy",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


def test_each_check_is_one_line_below_the_name_of_its_node(call: Call) -> None:
    result = call("doctor", "--quick", "--num-workers", "1")
    first, *lines, last = result.out.splitlines()
    assert not first.startswith(" ")
    assert all(line.startswith("  ") and line.split()[0] in ("ok", "warning", "failed", "skipped") for line in lines)
    assert len(lines) > 10
    assert last.startswith("healthy" if result.code == 0 else "not healthy")


def test_as_json_it_is_a_list_and_its_exit_code_is_its_verdict(call: Call, tmp_path: Path) -> None:
    result = call("doctor", "--quick", "--json", "--num-workers", "1")
    found = result.json
    assert all(finding.keys() == KEYS for finding in found)
    assert result.code == (1 if any(finding["status"] == "failed" for finding in found) else 0)
    assert {finding["node"] for finding in found} == {found[0]["node"]}

    game = tmp_path / "game.x86_64"
    game.write_bytes(b"MZ")
    result = call("doctor", "--quick", "--json", "--game", game)
    (finding,) = [finding for finding in result.json if finding["check"] == "game"]
    assert finding["status"] == "failed"
    assert result.code == 1


def test_a_fix_is_printed_next_to_the_finding_without_secrets(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("feedfacecafebeef" * 4)
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", "hunter22")
    result = call("doctor", "--quick", "--memory", "redis://:swordfish@127.0.0.1:1")
    assert result.code == 1
    (line,) = [line for line in result.out.splitlines() if " token " in line]
    assert f"(mode 0640)  → chmod 600 {token}" in line
    for secret in ("feedfacecafebeef", "hunter22", "swordfish"):
        assert secret not in result.out + result.err


def test_a_store_is_tried_for_real(call: Call, tmp_path: Path) -> None:
    result = call("doctor", "--json", "--store", tmp_path / "shared" / "runs")
    (finding,) = [finding for finding in result.json if finding["check"] == "store"]
    assert finding["status"] in ("ok", "warning")
    assert "written, read back and removed" in finding["found"]
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--on", "ssh"), "No machines are given"),
        (("--on", "mainframe"), "mainframe is unknown"),
        (("--iplist", "nowhere.iplist"), "nowhere.iplist"),
        (("-f", "nowhere.yaml"), "nowhere.yaml"),
        (("--on", "os:getcwd"), "ludus doctor does not support os:getcwd"),
    ],
)
def test_invalid_options_are_refused(call: Call, options: tuple[str, ...], message: str) -> None:
    refused = call("doctor", "--quick", *options)
    assert refused.code == 2
    assert message in one_line(refused)


def test_an_allocation_is_requested_with_the_same_options_and_without_the_password(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salloc = tmp_path / "bin" / "salloc"
    salloc.parent.mkdir()
    salloc.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho "$LUDUS_MEMORY_PASSWORD" > {tmp_path}/password\nexit 1\n')
    salloc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{salloc.parent}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    options = ("--on=slurm", "--time=5", "--memory=redis://:swordfish@127.0.0.1:1", "--port=80", "--port=81", "--num-workers=3")
    result = call("doctor", "--json", *options)
    assert result.code == 1
    words = (tmp_path / "words").read_text()
    assert "swordfish" not in words + result.out + result.err
    assert (tmp_path / "password").read_text() == "swordfish\n"
    for option in ("--on slurm", "--time 5", "--memory redis://127.0.0.1:1", "--port 80", "--port 81", "--num-workers 3"):
        assert option in words
    assert "None" not in words


def test_machines_come_from_the_file_of_the_cluster(call: Call, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        '"on": ssh\nmachines:\n  - {host: 127.0.0.1, port: 1}\n  - {host: no-such-host.invalid}\n'
    )
    result = call("doctor", "--quick", "--json", "-f", "cluster.yaml")
    assert result.code == 1
    failures = {finding["node"]: finding for finding in result.json if finding["status"] == "failed"}
    assert failures.keys() >= {"127.0.0.1", "no-such-host.invalid"}
    assert failures["no-such-host.invalid"]["check"] == "ssh"
