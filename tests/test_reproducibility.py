"""Recorded trainings are compared value by value, and the first difference is named."""

from __future__ import annotations

import json

import pytest

from bench.reproducibility import Outcome, Recording, Report, compare, hash_tensors, read_reports, summarize

NAMES = ["fps", "iterations", "learner/loss"]
REPORTS: list[Report] = [{"iterations": 1, "learner/loss": 0.5}, {"iterations": 2, "learner/loss": 0.25}]
OUTCOME = Outcome(NAMES, REPORTS, {"model.safetensors": "aa"})
REPEATABLE = Recording(True, NAMES, [], REPORTS, {"model.safetensors": "aa"})


def changed_loss(value: float | None) -> list[Report]:
    return [REPORTS[0], {"iterations": 2, "learner/loss": value}]


def test_equal_outcomes_have_no_differences() -> None:
    assert compare(REPEATABLE, OUTCOME) == []


@pytest.mark.parametrize("value", [0.2500001, None])
def test_the_first_different_value_is_named_with_its_update(value: float | None) -> None:
    found = compare(REPEATABLE, Outcome(NAMES, changed_loss(value), {"model.safetensors": "aa"}))
    assert found == [f"learner/loss at iterations=2: 0.25, now {value}"]


def test_other_weights_differ_even_if_all_metrics_are_equal() -> None:
    assert compare(REPEATABLE, Outcome(NAMES, REPORTS, {"model.safetensors": "bb"})) == ["weights differ: model.safetensors"]
    assert compare(REPEATABLE, Outcome(NAMES, REPORTS, {})) == ["weights differ: model.safetensors"]


def test_a_missing_report_is_a_difference() -> None:
    assert compare(REPEATABLE, Outcome(NAMES, REPORTS[:1], {"model.safetensors": "aa"})) == ["2 reports, now 1"]


def test_a_metric_that_one_report_lacks_is_a_difference() -> None:
    found = compare(REPEATABLE, Outcome(NAMES, [REPORTS[0], {"iterations": 2}], {"model.safetensors": "aa"}))
    assert found == ["not in both at iterations=2: learner/loss"]


def test_only_metric_names_count_where_trainings_cannot_be_repeated() -> None:
    expected = Recording(False, ["iterations", "learner/loss"], ["episode_return_mean"])
    assert compare(expected, Outcome(["iterations", "learner/loss"], [], {})) == []
    assert compare(expected, Outcome(["episode_return_mean", "iterations", "learner/loss"], changed_loss(9.0), {})) == []
    assert compare(expected, Outcome(["iterations", "loss"], [], {})) == ["metrics missing: learner/loss", "metrics added: loss"]


def test_repeats_with_one_different_value_are_not_deterministic() -> None:
    assert summarize([OUTCOME, OUTCOME]) == REPEATABLE
    other = Outcome([*NAMES, "episodes"], changed_loss(0.3), {"model.safetensors": "aa"})
    assert summarize([OUTCOME, other]) == Recording(False, NAMES, ["episodes"])


def test_reports_merge_evaluations_and_drop_values_of_the_clock() -> None:
    lines = [
        {"iterations": 1, "time_s": 0.3, "sampler/fps": 9.0, "learner_share": 0.1, "learner/loss": 1.0},
        {"iterations": 1, "evaluation/return_mean": 7.0},
    ]
    names, reports = read_reports([json.dumps(line) for line in lines])
    assert names == ["evaluation/return_mean", "iterations", "learner/loss", "learner_share", "sampler/fps", "time_s"]
    assert reports == [{"iterations": 1, "learner/loss": 1.0, "evaluation/return_mean": 7.0}]


def test_tensors_are_hashed_without_metadata_and_order() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save

    first, second = torch.arange(3.0), torch.ones(2)
    digest = hash_tensors(save({"a": first, "b": second}, {"made": "today"}))
    assert digest == hash_tensors(save({"b": second, "a": first}))
    assert digest != hash_tensors(save({"a": first, "b": second * 2}))
    assert digest != hash_tensors(save({"a": first, "c": second}))
