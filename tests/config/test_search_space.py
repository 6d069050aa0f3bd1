"""Search values: what is drawn, how often, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.config import search_space
from ludus.config.search_space import apply_values, find_mutations, find_searches, make_trials, parse_search, perturb
from ludus.errors import ConfigError

LR, GAMMA, SEED = ("config", "lr"), ("config", "gamma"), ("config", "seed")


def experiment(**config: Any) -> dict[str, Any]:
    return {"env": "CartPole-v1", "run": "PPO", "config": config}


# -- trials


def test_a_grid_is_every_combination() -> None:
    data = experiment(lr={"grid_search": [1e-3, 1e-4]}, gamma={"grid_search": [0.9, 0.95, 0.99]})
    found = [(trial.values[LR], trial.values[GAMMA]) for trial in make_trials(data, 1, 0)]
    assert found == [(lr, gamma) for lr in (1e-3, 1e-4) for gamma in (0.9, 0.95, 0.99)]


def test_the_trials_of_one_sample_share_a_seed_and_those_of_another_do_not() -> None:
    data = experiment(lr={"grid_search": [1e-3, 1e-4]})
    found = [(trial.values[LR], trial.values[SEED]) for trial in make_trials(data, 3, 40)]
    assert found == [(1e-3, 40), (1e-4, 40), (1e-3, 41), (1e-4, 41), (1e-3, 42), (1e-4, 42)]


def test_a_single_sample_keeps_the_seed_of_the_experiment() -> None:
    (trial,) = make_trials(experiment(lr={"choice": [1e-3]}), 1, 7)
    assert SEED not in trial.values


def test_a_seed_that_is_searched_is_left_alone() -> None:
    found = [trial.values[SEED] for trial in make_trials(experiment(seed={"grid_search": [5, 9]}), 2, 0)]
    assert found == [5, 9, 5, 9]


def test_seeds_alone_are_a_sweep() -> None:
    assert [trial.values for trial in make_trials(experiment(lr=1e-3), 3, 0)] == [{SEED: 0}, {SEED: 1}, {SEED: 2}]


def test_the_same_seed_draws_the_same_trials_and_another_one_others() -> None:
    data = experiment(lr={"loguniform": [1e-5, 1e-2]})
    first, again, other = (make_trials(data, 8, seed) for seed in (1, 1, 2))
    assert first == again
    assert [t.values[LR] for t in first] != [t.values[LR] for t in other]
    assert len({t.values[LR] for t in first}) == 8


def test_names_are_different_and_plain_and_say_what_is_special() -> None:
    data = experiment(lr={"loguniform": [1e-5, 1e-2]}, model={"fcnet_hiddens": {"choice": [[64, 64], [256]]}})
    names = [trial.name for trial in make_trials(data, 20, 0)]
    assert len(set(names)) == 20
    assert all(name.replace("_", "").replace("-", "").replace(".", "").isalnum() and len(name) <= 80 for name in names)
    assert all("lr-" in name and "fcnet_hiddens-" in name for name in names)


def test_an_environment_and_an_algorithm_can_be_searched() -> None:
    data = {"env": {"grid_search": ["CartPole-v1", "Acrobot-v1"]}, "run": {"grid_search": ["PPO", "DQN"]}, "config": {}}
    made = [apply_values(data, trial.values) for trial in make_trials(data, 1, 0)]
    assert [(m["env"], m["run"]) for m in made] == [
        ("CartPole-v1", "PPO"),
        ("CartPole-v1", "DQN"),
        ("Acrobot-v1", "PPO"),
        ("Acrobot-v1", "DQN"),
    ]


def test_a_trials_experiment_has_nothing_of_the_sweep_left_and_the_original_is_as_it_was() -> None:
    data = experiment(model={"cell_size": {"choice": [64]}}) | {"num_samples": 2, "tune": {"scheduler": "asha"}}
    trial = make_trials(data, 2, 0)[1]
    made = apply_values(data, trial.values)
    assert made == {"env": "CartPole-v1", "run": "PPO", "config": {"model": {"cell_size": 64}, "seed": 1}}
    assert data["config"]["model"] == {"cell_size": {"choice": [64]}}


def test_a_sweep_without_end_is_refused() -> None:
    grids = {f"k{n}": {"grid_search": list(range(10))} for n in range(6)}
    with pytest.raises(ConfigError, match="1,000,000 trials"):
        make_trials(experiment(**grids), 1, 0)


# -- values

RANGES: dict[str, list[Any]] = {
    "uniform": [0.5, 2.5],
    "loguniform": [1e-5, 1e-2],
    "quniform": [0.2, 1.0, 0.2],
    "qloguniform": [1.0, 1000.0, 1.0],
    "randint": [3, 6],
    "qrandint": [64, 256, 64],
}


@pytest.mark.parametrize("kind", RANGES)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_drawn_is_in_its_range(kind: str, seed: int) -> None:
    key = parse_search(LR, {kind: RANGES[kind]})
    value = key.draw(np.random.default_rng(seed))
    low, high = RANGES[kind][:2]
    assert low <= value <= high
    assert key.clamp(value) == value
    if kind.startswith("q"):
        step = RANGES[kind][2]
        assert math.isclose(value / step, round(value / step), abs_tol=1e-6)


def test_an_upper_end_of_randint_is_excluded_and_of_qrandint_included() -> None:
    generator = np.random.default_rng(0)
    plain, stepped = parse_search(LR, {"randint": [3, 6]}), parse_search(LR, {"qrandint": [64, 256, 64]})
    assert {plain.draw(generator) for _ in range(200)} == {3, 4, 5}
    assert {stepped.draw(generator) for _ in range(200)} == {64, 128, 192, 256}


def test_loguniform_gives_every_magnitude_the_same_chance() -> None:
    generator = np.random.default_rng(0)
    key = parse_search(LR, {"loguniform": [1e-5, 1e-1]})
    drawn = np.log10([key.draw(generator) for _ in range(4000)])
    shares = np.histogram(drawn, bins=[-5, -4, -3, -2, -1])[0] / 4000
    assert np.abs(shares - 0.25).max() < 0.03  # 4 deviations of a share of 4,000


def test_randn_has_the_mean_and_the_deviation_that_were_asked_for() -> None:
    generator = np.random.default_rng(0)
    drawn = [parse_search(LR, {"randn": [10, 2]}).draw(generator) for _ in range(4000)]
    assert abs(np.mean(drawn) - 10) < 0.15
    assert abs(np.std(drawn) - 2) < 0.15


def test_what_ray_tune_itself_draws_is_understood() -> None:
    from ray import tune

    theirs = {
        "a": tune.uniform(0, 1), "b": tune.quniform(0, 1, 0.25), "c": tune.loguniform(1e-5, 1e-2), "d": tune.randn(1, 2),
        "e": tune.randint(1, 5), "f": tune.qrandint(8, 64, 8), "g": tune.choice(["x", "y"]), "h": {"i": tune.grid_search([1, 2])},
    }  # fmt: skip
    assert search_space.replace_tune_domains(theirs) == {
        "a": {"uniform": [0, 1]}, "b": {"quniform": [0, 1, 0.25]}, "c": {"loguniform": [1e-5, 1e-2]}, "d": {"randn": [1, 2]},
        "e": {"randint": [1, 5]}, "f": {"qrandint": [8, 64, 8]}, "g": {"choice": ["x", "y"]}, "h": {"i": {"grid_search": [1, 2]}},
    }  # fmt: skip
    for foreign in (tune.sample_from(lambda spec: 1.0), tune.lograndint(1, 100), tune.qrandn(0, 1, 0.5)):
        with pytest.raises(ConfigError, match=r"config\.lr is a .* of Ray Tune, which is not supported"):
            search_space.replace_tune_domains(experiment(lr=foreign))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"grid_search": []}, "config.lr.grid_search is empty"),
        ({"grid_search": 3}, "is 3, which is not a list"),
        ({"choice": []}, "config.lr.choice is empty"),
        ({"uniform": [1]}, "has 1 values, and takes 2"),
        ({"uniform": [2, 1]}, "goes from 2 to 1"),
        ({"uniform": [0, "a"]}, "contains 'a', which is not a number"),
        ({"uniform": [0, math.inf]}, "contains inf"),
        ({"uniform": [False, True]}, "contains False"),
        ({"loguniform": [0, 1]}, "begins at 0, which has no logarithm"),
        ({"quniform": [0, 1, 0]}, "goes in steps of 0"),
        ({"qrandint": [65, 70, 64]}, "Less than 2 multiples of it are between 65 and 70"),
        ({"qloguniform": [1, 2, 9.0]}, "Less than 2 multiples"),
        ({"randint": [0.5, 2]}, "contains 0.5, which is not a whole number"),
        ({"randn": [0, -1]}, "has the deviation -1"),
    ],
)
def test_a_wrong_search_value_is_refused_with_its_name(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_searches(experiment(lr=value))


def test_search_values_where_all_trials_are_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match="'stop' contains search values"):
        find_searches(experiment() | {"stop": {"timesteps": {"choice": [1, 2]}}})


def test_a_search_value_inside_a_list_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"inside a list. Search the whole list"):
        find_searches(experiment(model={"fcnet_hiddens": [{"choice": [64, 128]}]}))


# -- population based training


def test_mutations_are_all_that_is_searched_unless_they_are_named() -> None:
    data = experiment(lr={"loguniform": [1e-5, 1e-2]}, seed={"grid_search": [0, 1]})
    assert [key.path for key in find_mutations(data, {})] == [LR]
    named = find_mutations(data, {"gamma": [0.9, 0.99], "config.lr": {"uniform": [0, 1]}})
    assert [(key.path, key.kind) for key in named] == [(GAMMA, "grid_search"), (LR, "uniform")]


def test_a_mutation_that_is_not_searched_gets_its_first_value_drawn() -> None:
    data = experiment()
    keys = find_mutations(data, {"lr": {"loguniform": [1e-5, 1e-2]}})
    assert all(1e-5 <= trial.values[LR] <= 1e-2 for trial in make_trials(data, 4, 0, keys))


@pytest.mark.parametrize(
    "path",
    [
        "model.cell_size",
        "hiddens",
        "dueling",
        "n_step",
        "replay_buffer_config.capacity",
        "seed",
        "num_workers",
        "observation_filter",
    ],
)
def test_what_cannot_change_within_a_training_is_no_mutation(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be changed during a trial"):
        find_mutations(experiment(), {path: [1, 2]})


def test_nothing_to_mutate_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has nothing to change"):
        find_mutations(experiment(lr=1e-3), {})


@given(seed=st.integers(0, 1 << 30))
def test_a_mutation_is_a_step_from_the_better_value_and_stays_in_its_range(seed: int) -> None:
    keys = [parse_search(LR, {"loguniform": [1e-4, 1e-2]}), parse_search(GAMMA, {"grid_search": [0.9, 0.95, 0.99]})]
    found = perturb(keys, {LR: 9e-3, GAMMA: 0.95, SEED: 3}, np.random.default_rng(seed), resample=0.0)
    assert found[LR] in (9e-3 * 0.8, 1e-2)  # × 1.2 would be beyond the end
    assert found[GAMMA] in (0.9, 0.99)
    assert found[SEED] == 3


def test_a_mutation_that_is_drawn_anew_may_be_anything_in_its_range() -> None:
    key = parse_search(LR, {"choice": ["a", "b", "c"]})
    generator = np.random.default_rng(0)
    assert {perturb([key], {LR: "a"}, generator, resample=1.0)[LR] for _ in range(50)} == {"a", "b", "c"}


def test_a_whole_number_stays_one() -> None:
    key = parse_search(("config", "num_epochs"), {"randint": [1, 20]})
    for seed in range(20):
        value = perturb([key], {key.path: 10}, np.random.default_rng(seed), 0.0)[key.path]
        assert isinstance(value, int)
        assert value in (8, 12)


def test_values_are_written_briefly() -> None:
    assert [search_space.format_value(v) for v in (0.000123456, [64, 64], "relu", 3, True)] == [
        "0.0001235",
        "64x64",
        "relu",
        "3",
        "True",
    ]
