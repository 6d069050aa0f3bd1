"""Environments with several agents: every fault is found, and nothing else."""

from __future__ import annotations

import pytest

from ludus.envs.env_check.findings import EnvReport
from ludus.envs.env_check.session import CheckRequest
from ludus.envs.env_check.stages import check_in_process
from tests.envs.env_check.test_findings import seen

ZOO = "tests.envs.env_check.match_zoo"


def check(env: str, kind: str | None = None) -> EnvReport:
    config = {} if kind is None else {"kind": kind}
    return check_in_process(CheckRequest(env, config, seconds=60.0, steps=800, measure_s=0.02))


def test_good_matches_have_no_findings() -> None:
    report = check(f"{ZOO}:make", "Chase")
    assert report.kinds == set()
    assert list(report.facts["spaces"]) == ["hunter", "prey"]
    assert report.facts["frame"] == [32, 32, 3]


def test_good_matches_in_turns_have_no_findings() -> None:
    pytest.importorskip("pettingzoo")
    assert check("pettingzoo/tictactoe_v3").kinds == set()


def test_a_game_of_arrays_has_no_findings() -> None:
    report = check("ludus/ConnectFour-v0")
    assert report.kinds == set()
    assert (report.facts["native_vector"], report.facts["illegal_action"]) == (True, "raises an exception")


FAULTS = {
    "RewardNan": ("reward", "gave 'hunter' the reward nan"),
    "UnknownAgent": ("agents", "The agent 'ghost'"),
    "OutOfBounds": ("bounds", "prey: the observation[0] is"),
    "WrongShape": ("structure", "has shape [3]"),
    "NotANumber": ("finite", "contains nan"),
    "NoChoice": ("mask_empty", "forbids every action of 'hunter'"),
    "LongMask": ("mask", "3 entries"),
    "Raises": ("raises", "raised KeyError"),
    "Unseeded": ("seeding", "after reset: hunter: the observation[0] is"),
    "Depth": ("render", "a depth map and not an image"),
    "TimeIsUp": ("time_limit", "terminated after exactly 20 steps"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_nothing_else(kind: str) -> None:
    expected, text = FAULTS[kind]
    report = check(f"{ZOO}:make", kind)
    assert report.kinds == {expected}
    assert text in seen(report, expected)


def test_a_fault_of_a_game_of_arrays_is_found() -> None:
    report = check(f"{ZOO}:LeakyFour")
    assert report.kinds == {"bounds"}
