"""The check in a child process: what ends or blocks the process is a finding."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.core import trust
from ludus.envs.env_check import seeding
from ludus.envs.env_check.findings import EnvReport
from ludus.envs.env_check.runner import ALL_STAGES, check_env
from ludus.envs.env_check.seeding import check_second_process
from ludus.envs.env_check.session import CallMarks, CheckRequest, CheckSession, NoMarks
from ludus.envs.env_check.stages import SECOND_PROCESS, run_stage
from ludus.errors import UnknownName
from tests.envs.env_check.test_findings import ZOO, seen

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def request(kind: str) -> CheckRequest:
    return CheckRequest(ZOO, {"kind": kind}, seconds=60.0, steps=300, measure_s=0.02)


def check(kind: str, *stages: str, timeout_s: float = 30.0) -> EnvReport:
    return check_env(request(kind), stages=stages or ("spaces", "play"), timeout_s=timeout_s)


def test_a_good_environment_has_no_findings_in_all_stages() -> None:
    found: list[Any] = []
    report = check_env(request("Masked"), on_finding=found.append)
    assert (report.kinds, found) == (set(), [])
    assert set(report.stages) == set(ALL_STAGES)
    assert report.facts["illegal_action"] == "is accepted"
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_hang_is_found_with_its_line() -> None:
    report = check("Hangs", timeout_s=4.0)
    assert report.kinds == {"hang"}
    assert "step has not returned within 4 s (tests/envs/env_check/zoo.py:" in seen(report, "hang")
    assert ", in step), step 6" in seen(report, "hang")


def test_a_crash_is_found_with_its_signal_and_line() -> None:
    report = check("Crashes")
    assert report.kinds == {"crash"}
    assert "ended by signal SIGSEGV in step (tests/envs/env_check/zoo.py:" in seen(report, "crash")


@pytest.mark.parametrize(("kind", "text"), [("Exits", "step called exit(game over)"), ("ExitsHard", "ended with code 3 in step")])
def test_an_exit_is_found(kind: str, text: str) -> None:
    report = check(kind)
    assert report.kinds == {"exits"}
    assert text in seen(report, "exits")
    assert report.stages == ["spaces"]


def test_stages_continue_in_another_process_after_a_crash() -> None:
    report = check("CrashesAfterEnd", "spaces", "play", "endings", "rendering")
    assert report.kinds == {"after_end"}
    assert report.stages == ["spaces", "play", "rendering"]


def test_a_crash_on_a_forbidden_action_is_a_warning() -> None:
    report = check("CrashesOnForbidden", "illegal action")
    assert (report.kinds, report.count("mistake")) == ({"illegal_action"}, 0)


def test_what_steps_print_is_counted_and_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    report = check("Prints")
    assert report.kinds == {"prints"}
    assert "bytes on the standard output in 300 steps" in seen(report, "prints")
    assert capfd.readouterr().out == ""


def test_an_unknown_name_is_an_error_of_usage() -> None:
    with pytest.raises(UnknownName, match="CartPole-v1"):
        check_env(CheckRequest("CartPoll-v1"))


# -- another process


class CountedMarks(NoMarks):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def enter(self, call: str, step: int) -> None:
        self.calls[call] += 1


def beside(kind: str, marks: CallMarks | None = None) -> CheckSession:
    session = CheckSession(request(kind), marks=marks)
    trust.allow(ZOO)
    assert run_stage(session, "spaces")
    assert run_stage(session, "seeding")
    check_second_process(session)
    return session


def test_what_depends_on_hashes_differs_in_another_process() -> None:
    found = {finding.check.kind: finding.seen for finding in beside("HashOrder").findings}
    assert found == {"process_seed": "another process got other values for the same seed and actions, after reset"}


def test_a_port_that_only_one_process_can_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ZOO_PORT", str(free.getsockname()[1]))
    found = {finding.check.kind: finding.seen for finding in beside("OnePort").findings}
    assert list(found) == ["second_process"]
    assert "Address already in use" in found["second_process"]


def test_a_helper_process_that_keeps_stderr_open_is_not_a_hang() -> None:
    report = check("LeavesProcess", "spaces", "seeding", SECOND_PROCESS, timeout_s=5.0)
    assert report.kinds == set()
    assert SECOND_PROCESS in report.stages


def test_the_wait_for_the_second_process_is_not_taken_for_a_call_that_hangs() -> None:
    marks = CountedMarks()
    beside("Walk", marks)
    assert marks.calls["a second process"] > 1


def test_a_second_process_that_does_not_finish_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_PROCESS_S", 0.1)
    session = CheckSession(replace(request("Walk"), seconds=0.1))
    trust.allow(ZOO)
    check_second_process(session)
    assert [finding.seen for finding in session.findings] == ["a second copy in another process did not finish in 0.2 s"]


def test_a_text_part_does_not_make_the_second_process_differ() -> None:
    report = check("Mission", "spaces", "seeding", SECOND_PROCESS)
    assert (report.kinds, report.facts["drop"]) == ({"text_part"}, ["mission"])
    assert SECOND_PROCESS in report.stages


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="needs Xvfb")
def test_the_environment_gets_the_screen_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("LUDUS_SCREEN", raising=False)
    stages = ("spaces", "play", "seeding", SECOND_PROCESS, "closing")
    report = check_env(replace(request("NeedsScreen"), display="xvfb"), stages=stages)
    assert (report.kinds, report.facts["processes"]["count"]) == (set(), 0)
    assert report.stages == list(stages)


def test_the_second_process_comes_after_the_seeds() -> None:
    assert ALL_STAGES.index("seeding") < ALL_STAGES.index(SECOND_PROCESS)
