"""Every fault of an inhabitant of the zoo is found, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core import trust
from ludus.envs.env_check.findings import EnvReport
from ludus.envs.env_check.play import PlayRecorder
from ludus.envs.env_check.session import CheckRequest, CheckSession
from ludus.envs.env_check.stages import check_in_process
from ludus.envs.env_check.subject import Moment, make_subject
from ludus.errors import LudusError

ZOO = "tests.envs.env_check.zoo:make"


def check(kind: str, **settings: Any) -> EnvReport:
    settings = {"seconds": 60.0, "steps": 1_200, "measure_s": 0.01, **settings}
    return check_in_process(CheckRequest(ZOO, {"kind": kind}, **settings))


def seen(report: EnvReport, kind: str) -> str:
    return next(finding.seen for finding in report.findings if finding.check.kind == kind)


@pytest.mark.parametrize("kind", ["Walk", "Grid", "Masked", "Nested"])
def test_a_good_environment_has_no_findings(kind: str) -> None:
    report = check(kind)
    assert report.kinds == set()
    assert {row.state for row in report.rows if row.check.stage not in ("second process", "training")} == {"ok"}


def test_processes_of_a_copy_are_counted() -> None:
    report = check("Game", steps=100)
    assert (report.kinds, report.facts["processes"]["count"]) == (set(), 1)


def test_a_text_part_is_left_out_and_the_rest_is_checked() -> None:
    report = check_in_process(CheckRequest(ZOO, {"kind": "Mission"}, seconds=60.0, steps=300, measure_s=0.01))
    assert (report.kinds, report.facts["drop"]) == ({"text_part"}, ["mission"])


def test_an_error_of_the_check_itself_is_not_taken_for_one_of_the_environment() -> None:
    request = CheckRequest(ZOO, {"kind": "Walk"}, seed=-1)
    with pytest.raises(LudusError, match=r"The stage 'play' of the check failed at .*py:\d+: ValueError"):
        check_in_process(request)


def test_all_rewards_count_for_the_share_that_is_not_0() -> None:
    trust.allow(ZOO)
    session = CheckSession(CheckRequest(ZOO, {"kind": "Walk"}))
    recorder = PlayRecorder(session, make_subject(session))
    crowd = Moment({}, rewards={str(number): -0.5 for number in range(1_000)})
    for _ in range(110):
        recorder.step(crowd)
    recorder.conclude()
    assert session.facts["reward"]["nonzero_share"] == 1.0


FAULTS = {
    "OutOfBounds": ("bounds", "declared is −1.50 … 1.50"),
    "WrongShape": ("structure", "has shape [3], declared is float32[2]"),
    "LacksKey": ("structure", "has no 'direction'"),
    "Doubles": ("dtype", "float64, declared is float32[2]"),
    "FractionsInBytes": ("structure", "fractions would be lost"),
    "NotANumber": ("finite", "the observation[0] is nan, at step 6"),
    "OldGym": ("interface", "step returned 4 values"),
    "ResetWithoutInfo": ("interface", "reset returned a ndarray"),
    "RewardNan": ("reward", "the reward is nan at step 1"),
    "RewardNone": ("reward", "the reward is None"),
    "RewardArray": ("reward_type", "shape [1]"),
    "FlagIsInt": ("flags", "truncated is 0, a int"),
    "InfoIsNone": ("info", "step returned a NoneType as info"),
    "ReservedInfo": ("info_keys", "'final_obs'"),
    "SpacesChange": ("spaces_change", "after reset"),
    "Constant": ("observation_constant", "none of 2 numbers"),
    "NotASpace": ("spaces", "observation_space is (2,)"),
    "OnlyText": ("spaces", "Text"),
    "UnboundedAction": ("action_bounds", "-inf … inf"),
    "NoConstructor": ("construct", "no licence server (tests/envs/env_check/zoo.py"),
    "Raises": ("raises", "KeyError"),
    "EqualBounds": ("bounds_equal", "1 of 3 numbers"),
    "ResetWithoutOptions": ("reset_arguments", "reset(seed) has no options"),
    "OneBuffer": ("observation_reused", "step 1 has changed the observation before"),
    "CloseOnce": ("close_again", "the window is closed"),
    "TimeIsUp": ("time_limit", "after exactly 20 steps"),
    "Endless": ("endless", "no episode has ended in 1,200 steps"),
    "LargeObservations": ("observation_scale", "the observation is from −"),
    "WideBounds": ("bounds_wide", "−1,000,000 … 1,000,000"),
    "LargeRewards": ("reward_scale", "rewards are from −5.00 to 495.0"),
    "RareRewards": ("reward_sparse", "all "),
    "NoChoice": ("mask_empty", "every action is forbidden (options 0 to 1) at step"),
    "LongMask": ("mask", "The action mask has 3 entries, the actions have 2 options"),
    "ForgetsMask": ("mask", "there is no action_mask in the infos"),
    "Unseeded": ("seeding", "the same copy with the same seed, step 1: the observation[0] is"),
    "Shared": ("shared_state", "while another copy plays"),
    "Leaks": ("memory", "per step"),
    "LeavesThread": ("threads_left", "3 more threads"),
    "LeavesProcess": ("processes_left", "3 more processes"),
    "LeavesFile": ("files_left", "3 more open files"),
    "CloseFails": ("close", "close raised AttributeError: window"),
    "NoResetMidway": ("reset_midway", "the episode is not over"),
    "Depth": ("render", "float32[32, 64], which is a depth map and not an image"),
    "NoPicture": ("render", "render() returned None"),
    "NoFps": ("render_fps", "rgb_array"),
    "Slow": ("slow", "in one process"),
    "Uneven": ("uneven", "one in a hundred"),
}
ALSO = {
    "LargeRewards": {"reward_outliers"},
    "Endless": {"reward_sparse"},
    "RewardNan": {"reward_sparse"},
    "RewardNone": {"reward_sparse"},
}
"""Findings that follow from the fault."""


SETTINGS = {"Slow": {"steps": 60, "seconds": 0.4}, "Uneven": {"steps": 100, "seconds": 5.0}}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_nothing_else(kind: str) -> None:
    expected, text = FAULTS[kind]
    report = check(kind, **SETTINGS.get(kind, {}))
    assert expected in report.kinds
    assert text in seen(report, expected)
    assert report.kinds - {expected} <= ALSO.get(kind, set())


def test_a_vector_environment_without_a_fault_has_no_findings() -> None:
    report = check_in_process(CheckRequest("tests.envs.env_check.zoo:make_rows", seconds=60.0, steps=300, measure_s=0.02))
    assert report.kinds == set()
    assert report.facts["native_vector"] is True


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("shape", "vector", "has shape [4, 1] at step 0, not [4, 2]"),
        ("reward", "vector", "reward has shape [4, 1]"),
        ("count", "vector", "it has 5 rows where num_envs was 4"),
        ("equal", "rows_equal", "all 4 rows had the same observations"),
    ],
)
def test_a_fault_of_a_vector_environment_is_found(fault: str, kind: str, text: str) -> None:
    request = CheckRequest("tests.envs.env_check.zoo:make_rows", {"fault": fault}, seconds=60.0, steps=300, measure_s=0.02)
    report = check_in_process(request)
    assert text in seen(report, kind)
