"""Comparing runs: groups of seeds, common grids, and differences held against every way of sharing the values."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core.metrics import JsonLinesSink
from ludus.errors import ConfigError, NotFound, UsageError
from ludus.experiments.runs import compare, plot
from ludus.experiments.runs.compare import compare_groups, group_runs, holm, smallest_p, value_at
from ludus.experiments.runs.plot import Curve, align_curves, confidence_band, read_curve, read_curves, smooth
from ludus.experiments.runs.run_dir import Run, find_runs


def made(
    directory: Path, points: dict[int, float], *, name: str = "mine", run: str = "PPO", env: str = "CartPole-v1", **config: Any
) -> Path:
    """A finished run with these values of episode_return_mean."""
    opened = Run.create(directory, {name: {"env": env, "run": run, "config": config}})
    sink = JsonLinesSink(opened.metrics_path)
    for i, (timesteps, value) in enumerate(points.items(), 1):
        sink.write({"iterations": i, "timesteps": timesteps, "episode_return_mean": value})
    sink.close()
    opened.write_meta({"status": "finished"})
    return directory


def flat_run(directory: Path, value: float, **settings: Any) -> Path:
    return made(directory, {100 * i: value for i in range(1, 11)}, **settings)


# -- curves -------------------------------------------------------------------------------------------------------------


def test_a_common_grid_is_where_all_curves_have_values_and_joins_points_by_straight_lines() -> None:
    a = Curve(Path("a"), np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 0.0]))
    b = Curve(Path("b"), np.array([5.0, 15.0, 40.0]), np.array([4.0, 4.0, 100.0]))
    x, y = align_curves([a, b], points=4)
    assert x.tolist() == [5.0, 10.0, 15.0, 20.0]
    assert y[0].tolist() == [5.0, 10.0, 5.0, 0.0]
    assert y[1].tolist() == pytest.approx([4.0, 4.0, 4.0, 4.0 + 96 / 5])
    x, y = align_curves([a, Curve(Path("c"), np.array([50.0]), np.array([1.0]))])
    assert (x.size, y.shape) == (0, (2, 0))


def test_smoothing_is_the_weighted_mean_of_all_that_came_before() -> None:
    y = np.array([3.0, -1.0, 4.0, 1.0])
    weights = [[0.6**k for k in range(i, -1, -1)] for i in range(4)]
    expected = [np.average(y[: i + 1], weights=weights[i]) for i in range(4)]
    assert smooth(y, 0.6) == pytest.approx(expected)
    assert smooth(y, 0.0) is y
    with pytest.raises(UsageError, match="smoothing of 1"):
        smooth(y, 1.0)


def test_the_shade_of_two_runs_is_between_them_and_of_many_around_their_mean() -> None:
    low, high = confidence_band(np.array([[1.0, 5.0], [3.0, 2.0]]))
    assert (low.tolist(), high.tolist()) == ([1.0, 2.0], [3.0, 5.0])
    y = np.random.default_rng(0).normal(10.0, 2.0, (12, 3))
    low, high = confidence_band(y)
    assert (low < y.mean(axis=0)).all()
    assert (high > y.mean(axis=0)).all()
    assert (high - low < 4 * 2.0 / math.sqrt(12) * 1.5).all()


def test_a_run_without_the_metric_is_left_out_unless_it_is_the_only_one(tmp_path: Path) -> None:
    good, empty = flat_run(tmp_path / "good", 3.0), made(tmp_path / "empty", {})
    assert [c.run for c in read_curves([good, empty])] == [good]
    with pytest.raises(NotFound, match=r"None of the 1 runs has values of 'episode_return_mean'"):
        read_curves([empty])
    with pytest.raises(NotFound, match=r"has no values of 'happiness'"):
        read_curve(good, "happiness")


# -- groups -------------------------------------------------------------------------------------------------------------


def labels(runs: list[Path], by: str = "auto") -> dict[str, list[str]]:
    return {group.label: [c.run.name for c in group.curves] for group in group_runs(read_curves(runs), by)}


def test_runs_that_differ_only_in_their_seed_are_one_group(tmp_path: Path) -> None:
    runs = [
        flat_run(tmp_path / f"{lr}-{seed}", 1.0, name=f"name{seed}", lr=lr, seed=seed, model={"core": None})
        for lr in (0.001, 0.0001)
        for seed in range(3)
    ]
    assert labels(runs) == {
        "lr=0.001": ["0.001-0", "0.001-1", "0.001-2"],
        "lr=0.0001": ["0.0001-0", "0.0001-1", "0.0001-2"],
    }
    assert labels(runs[:3]) == {"PPO CartPole-v1": ["0.001-0", "0.001-1", "0.001-2"]}


def test_groups_may_be_made_by_any_setting(tmp_path: Path) -> None:
    runs = [
        flat_run(tmp_path / "a", 1.0, name="old", run="PPO", lr=1e-3, seed=0, model={"core": "lstm"}),
        flat_run(tmp_path / "b", 1.0, name="old", run="PPO", lr=1e-4, seed=0, model={"core": None}),
        flat_run(tmp_path / "c", 1.0, name="new", run="DQN", lr=1e-3, seed=0, dueling=True),
    ]
    assert labels(runs, "name") == {"old": ["a", "b"], "new": ["c"]}
    assert labels(runs, "algorithm") == {"PPO": ["a", "b"], "DQN": ["c"]}
    assert labels(runs, "config.lr") == labels(runs, "lr") == {"lr=0.001": ["a", "c"], "lr=0.0001": ["b"]}
    assert labels(runs, "env") == {"CartPole-v1": ["a", "b", "c"]}
    assert labels(runs, "name, model.core") == {
        "old, model.core=lstm": ["a"],
        "old, model.core=None": ["b"],
        "new": ["c"],
    }
    assert labels(runs) == {"PPO, lr=0.001, model.core=lstm": ["a"], "PPO, lr=0.0001, model.core=None": ["b"], "DQN": ["c"]}
    with pytest.raises(ConfigError, match=r"--group-by 'lrr' is no setting.*config\.lr"):
        group_runs(read_curves(runs), "lrr")


def test_the_same_seed_twice_counts_once(tmp_path: Path) -> None:
    runs = [flat_run(tmp_path / f"run{i}", 1.0 + i, lr=1e-3, seed=seed) for i, seed in enumerate((0, 0, 1))]
    for age, run in enumerate(runs):
        for file in ("config.yaml", "meta.json"):
            os.utime(run / file, (1000 + age, 1000 + age))
    (group,) = group_runs(read_curves(runs))
    assert [c.run.name for c in group.curves] == ["run1", "run2"]
    assert [one.run.name for one in group.left_out] == ["run0"]
    assert any(re.search(r"run0 left out: .*run1 has the same seed and is newer", note) for note in compare_groups([group]).notes)


def test_a_short_newer_run_does_not_displace_a_long_one_of_the_same_seed(tmp_path: Path) -> None:
    long, short = flat_run(tmp_path / "long", 5.0, seed=0), made(tmp_path / "short", {10: 1.0, 20: 1.0}, seed=0)
    for age, run in enumerate((long, short)):
        for file in ("config.yaml", "meta.json"):
            os.utime(run / file, (1000 + age, 1000 + age))
    (group,) = group_runs(read_curves([long, short]))
    assert [c.run.name for c in group.curves] == ["long"]
    (note,) = compare_groups([group]).notes
    assert re.search(r"short left out: .*long has the same seed and is longer \(1,000, not 20\)", note)


def test_runs_with_other_numbers_of_workers_and_threads_are_repetitions_and_that_is_said(tmp_path: Path) -> None:
    batch = {"train_batch_size": 512, "num_envs_per_worker": 8, "lr": 1e-3}
    runs = [
        flat_run(
            tmp_path / f"{seed}", 1.0, **batch, seed=seed, num_workers=workers, torch_threads=seed, rollout_fragment_length=length
        )
        for seed, (workers, length) in enumerate(((0, 64), (1, 64), (2, 32)))
    ]
    (group,) = group_runs(read_curves(runs))
    assert len(group.curves) == 3
    (note,) = compare_groups([group]).notes
    assert "its runs differ in num_workers (0, 1, 2), torch_threads (0, 1, 2), which do not define the experiment" in note
    shorter = flat_run(tmp_path / "shorter", 1.0, **batch, seed=0, num_workers=0, torch_threads=0, rollout_fragment_length=16)
    assert len(group_runs(read_curves([*runs, shorter]))) == 2, "a length that was chosen defines the experiment"


def test_environments_are_never_compared_with_each_other(tmp_path: Path) -> None:
    runs = [
        flat_run(tmp_path / f"{env}-{lr}", value, env=env, lr=lr, seed=0)
        for env, lr, value in (("A-v0", 1e-3, 5.0), ("A-v0", 1e-4, 6.0), ("B-v0", 1e-3, 900.0))
    ]
    for by in ("auto", "lr", "algorithm"):
        groups = group_runs(read_curves(runs), by)
        assert all(len({compare.settings_of(c.run)["env"] for c in group.curves}) == 1 for group in groups)
        result = compare_groups(groups)
        assert all(("A-v0" in v.a or "B-v0" not in v.a) and "B-v0" not in v.b for v in result.differences)
        assert "2 environments; groups are compared only within one of them" in result.notes
    assert list(labels(runs, "lr")) == ["A-v0, lr=0.001", "A-v0, lr=0.0001", "B-v0, lr=0.001"]
    assert [(v.a, v.b) for v in compare_groups(group_runs(read_curves(runs))).differences] == [
        ("A-v0, lr=0.0001", "A-v0, lr=0.001")
    ]


def test_a_key_that_an_older_version_did_not_have_makes_no_group_of_its_own(tmp_path: Path) -> None:
    runs = [flat_run(tmp_path / "old", 1.0, lr=1e-3, seed=0), flat_run(tmp_path / "new", 1.0, lr=1e-3, seed=1, explore=True)]
    assert list(labels(runs).values()) == [["old", "new"]]


def test_trials_of_scripts_are_found_and_stand_for_themselves(tmp_path: Path) -> None:
    flat_run(tmp_path / "runs" / "mine" / "one", 1.0, seed=0)
    trial = tmp_path / "runs" / "atari" / "ppo-v0"
    trial.mkdir(parents=True)
    (trial / "meta.json").write_text(json.dumps({"kind": "session"}))
    (tmp_path / "runs" / "atari" / "no-run").mkdir()
    (tmp_path / "runs" / "atari" / "no-run" / "meta.json").write_text("{}")
    sink = JsonLinesSink(trial / "metrics.jsonl")
    sink.write({"iterations": 1, "timesteps": 5, "episode_return_mean": 2.0})
    sink.close()
    assert {run.name for run in find_runs(tmp_path / "runs")} == {"one", "ppo-v0"}
    assert labels(find_runs(tmp_path / "runs"), "name") == {"mine": ["one"], "atari": ["ppo-v0"]}
    assert sorted(labels(find_runs(tmp_path / "runs")).values()) == [["one"], ["ppo-v0"]]


# -- values and differences ------------------------------------------------------------------------------------------------


def test_a_run_is_judged_by_its_last_tenth_its_best_or_what_it_was_then() -> None:
    x = np.arange(1.0, 101.0)
    c = Curve(Path("a"), x, x**2 * np.where(x == 50, 100.0, 1.0))
    assert value_at(c, "last") == pytest.approx(np.mean(x[90:] ** 2))
    assert value_at(c, "best") == 100 * 50**2
    assert value_at(c, "best", lower_is_better=True) == 1.0
    assert value_at(c, "40") == pytest.approx(np.mean(x[36:40] ** 2))
    assert math.isnan(value_at(c, "101"))
    assert value_at(Curve(Path("b"), np.array([1.0, 100.0]), np.array([0.0, 99.0])), "50") == pytest.approx(49.0)
    with pytest.raises(UsageError, match="neither last, nor best"):
        value_at(c, "first")


def test_holm_is_the_textbook_procedure() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    rng = np.random.default_rng(0)
    for _ in range(200):
        p = rng.uniform(0, 0.1, rng.integers(1, 8)).tolist()
        rejected = set()
        for k, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):  # step down until one fails
            if p[i] > 0.05 / (len(p) - k):
                break
            rejected.add(i)
        assert {i for i, q in enumerate(holm(p)) if q <= 0.05} == rejected


def test_the_smallest_p_is_that_of_groups_without_overlap() -> None:
    for n, m in itertools.product((3, 4, 5), repeat=2):
        pooled = [*range(100, 100 + n), *range(m)]
        apart = [
            abs(sum(way) / n - (sum(pooled) - sum(way)) / m) for way in itertools.combinations(pooled, n)
        ]  # every way of sharing the values
        found = sum(value >= apart[0] - 1e-9 for value in apart) / len(apart)
        assert smallest_p(n, m) == pytest.approx(found) if n == m else smallest_p(n, m) <= found + 1e-12


def groups_of(tmp_path: Path, values: dict[float, list[float]]) -> list[compare.RunGroup]:
    runs = [
        flat_run(tmp_path / f"{lr}-{seed}", value, lr=lr, seed=seed)
        for lr, all_values in values.items()
        for seed, value in enumerate(all_values)
    ]
    return group_runs(read_curves(runs))


def test_a_clear_difference_of_five_seeds_is_significant_and_says_so(tmp_path: Path) -> None:
    result = compare_groups(groups_of(tmp_path, {1e-3: [480, 490, 500, 470, 495], 1e-4: [300, 310, 290, 305, 320]}))
    assert [(s.label, s.n, s.mean) for s in result.scores] == [("lr=0.001", 5, 487.0), ("lr=0.0001", 5, 305.0)]
    (verdict,) = result.differences
    assert verdict.significant
    assert verdict.difference == 182.0
    assert verdict.p == pytest.approx(2 / 252)
    assert verdict.low < 182 < verdict.high
    assert "lr=0.001 is 182 higher than lr=0.0001" in verdict.sentence
    assert "n = 5 and 5): significant" in verdict.sentence


def test_where_lower_is_better_the_lowest_is_first_and_the_best_of_a_run(tmp_path: Path) -> None:
    falls = made(tmp_path / "falls", {100: 90.0, 200: 5.0, 300: 30.0}, lr=0.1)
    stays = made(tmp_path / "stays", {100: 20.0, 200: 20.0, 300: 20.0}, lr=0.2)
    groups = group_runs(read_curves([stays, falls]))
    best = compare_groups(groups, "best", lower_is_better=True)
    assert [(s.label, s.mean) for s in best.scores] == [("lr=0.1", 5.0), ("lr=0.2", 20.0)]
    assert "lr=0.1 is 15 lower than lr=0.2" in best.differences[0].sentence
    last = compare_groups(groups, "last", lower_is_better=True)
    assert [(s.label, s.mean) for s in last.scores] == [("lr=0.2", 20.0), ("lr=0.1", 30.0)]


def test_the_same_distribution_is_not_a_difference(tmp_path: Path) -> None:
    (verdict,) = compare_groups(groups_of(tmp_path, {1e-3: [5, 1, 4, 2, 3], 1e-4: [1.5, 4.5, 2.5, 3.5, 3.2]})).differences
    assert not verdict.significant
    assert verdict.enough
    assert "could be chance" in verdict.sentence


@pytest.mark.parametrize("n", [1, 2, 3])
def test_with_three_seeds_or_fewer_nobody_can_tell(tmp_path: Path, n: int) -> None:
    """3 against 3: the clearest difference there can be has p = 2 / 20."""
    (verdict,) = compare_groups(
        groups_of(tmp_path, {1e-3: [500.0 + i for i in range(n)], 1e-4: [float(i) for i in range(n)]})
    ).differences
    assert not verdict.enough
    assert not verdict.significant
    assert f"not enough seeds to tell (n = {n} and {n})" in verdict.sentence


def test_many_comparisons_are_corrected_for(tmp_path: Path) -> None:
    values: dict[float, list[float]] = {0.1: [10, 11, 12, 13, 14], 0.2: [20, 21, 22, 23, 24], 0.3: [11.5, 12.5, 12, 10.5, 13.2]}
    result = compare_groups(groups_of(tmp_path, values))
    assert len(result.differences) == 3
    assert {(v.a, v.b): v.significant for v in result.differences} == {
        ("lr=0.2", "lr=0.1"): True,
        ("lr=0.2", "lr=0.3"): True,
        ("lr=0.1", "lr=0.3"): False,
    }
    assert all(v.p >= v.p_value for v in result.differences)
    assert result.differences[0].p == pytest.approx(3 * 2 / 252)


@pytest.mark.long
def test_false_alarms_are_as_rare_as_promised() -> None:
    """The whole road, from values to verdict, on groups that do not differ: at most 5 % of families alarm."""
    rng = np.random.default_rng(1)
    alarms, families = 0, 400
    for _ in range(families):
        scores = [compare._score(str(g), {str(i): v for i, v in enumerate(rng.normal(size=5))}) for g in range(3)]
        differences = compare._test_pairs(list(itertools.combinations(scores, 2)), 0.05)
        alarms += any(v.significant for v in differences)
    assert alarms / families <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / families)


def test_runs_that_end_at_different_points_are_pointed_out(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / f"{seed}", {100 * i: 1.0 for i in range(1, 11 + 5 * (seed == 2))}, lr=1e-3, seed=seed)
        for seed in range(3)
    ]
    groups = group_runs(read_curves(runs))
    assert any("end at different points (1,000 to 1,500); --at 1000" in note for note in compare_groups(groups).notes)
    assert compare_groups(groups, "1000").notes == []
    late = compare_groups(groups, "1400")
    assert late.scores[0].n == 1
    assert any("0, " in note and "left out: not trained up to 1400" in note for note in late.notes)


def test_a_comparison_as_json_has_no_number_that_is_none(tmp_path: Path) -> None:
    text = json.dumps(compare_groups(groups_of(tmp_path, {1e-3: [1.0], 1e-4: [2.0, 3.0]})).to_json(), allow_nan=False)
    data = json.loads(text)
    assert data["groups"][0]["label"] == "lr=0.0001"
    assert data["differences"][0]["p"] is None
    assert "not enough seeds" in data["differences"][0]["said"]


def test_the_picture_of_groups_has_a_line_for_every_run_and_group_and_a_shade(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    groups = groups_of(tmp_path, {1e-3: [1.0, 2.0, 4.0], 1e-4: [9.0]})
    axes = Figure().subplots()
    for group in groups:
        plot._draw_group(axes, "C0", group.label, group.curves, 0.0)
    assert len(axes.lines) == 3 + 1 + 1
    assert len(axes.collections) == 1
    assert np.asarray(axes.lines[3].get_ydata()) == pytest.approx(np.full(200, 7 / 3))
    out = plot.draw({g.label: g.curves for g in groups}, tmp_path / "x" / "c.png", plot.METRIC, "timesteps", 0.5, "title")
    assert out.read_bytes().startswith(b"\x89PNG")
