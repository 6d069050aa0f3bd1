"""`ludus.testing.check_env`, called as a user's test suite calls it."""

from __future__ import annotations

import pytest

import ludus
from ludus.errors import EnvironmentFault
from ludus.testing import check_env
from tests.envs.env_check import zoo


def test_a_class_without_a_fault_passes() -> None:
    report = check_env(zoo.Walk, steps=300, measure_s=0.01)
    assert report.kinds == set()
    assert 250 < report.facts["steps"] <= 300


def test_all_mistakes_of_a_registered_environment_are_named() -> None:
    ludus.register_env("zoo-bounds", lambda: zoo.OutOfBounds())
    with pytest.raises(
        EnvironmentFault, match=r"zoo-bounds has 1 fault:\nObservations are inside their space: the observation\[0\] is"
    ):
        check_env("zoo-bounds", steps=300, measure_s=0.01)


def test_warnings_are_faults_if_asked_for() -> None:
    assert check_env(zoo.Doubles, steps=100, measure_s=0.01).kinds == {"dtype"}
    with pytest.raises(EnvironmentFault, match="declared dtype"):
        check_env(zoo.Doubles, strict=True, steps=100, measure_s=0.01)
