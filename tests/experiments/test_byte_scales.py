"""Runs on grids of uint8: how the divisor is found, announced, stored, and kept by whatever goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import EnvironmentFault
from ludus.experiments import runner
from ludus.experiments.assembly import worker_training
from ludus.experiments.assembly.components import RunHooks
from ludus.experiments.assembly.policies import measure_largest_values
from ludus.experiments.resolve import resolve
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import store_of
from ludus.experiments.training import prepare_new_run
from ludus.models.weights.serialization import policy_from
from tests.experiments import small

GRID = "tests.experiments.grids:SymbolGrid"


def start(where: Path, said: list[str] | None = None, **settings: Any) -> Result:
    data = small.data(1, env=GRID, **{"train_batch_size": 64, "minibatch_size": 32, "evaluation_duration": 0, **settings})
    announce = None if said is None else said.append
    return runner.train(data, project=where.parent, trial=where.name, announce=announce)


def scales(result: Result) -> Any:
    return result.agent.policy.config.byte_scales


def forget_scales(run: Path) -> None:
    """Make the newest checkpoint of a run look as earlier releases wrote it."""
    store = store_of(run)
    name = checkpoint.names(store)[-1]
    files = dict(store.get_bundle(f"{checkpoint.FOLDER}/{name}"))
    state = json.loads(files["state.json"])
    for model in state["models"].values():
        del model["description"]["network"]["byte_scales"]
    files["state.json"] = json.dumps(state).encode()
    store.delete(f"{checkpoint.FOLDER}/{name}")
    store.put_bundle(f"{checkpoint.FOLDER}/{name}", files)


def test_a_grid_of_symbols_is_recognised_announced_and_stored(tmp_path: Path) -> None:
    said: list[str] = []
    result = start(tmp_path / "run", said)
    assert scales(result) == (("", 8.0),)
    assert any("is divided by 8: a grid of small integers" in sentence for sentence in said)
    stored = checkpoint.newest(store_of(tmp_path / "run"))
    assert stored.byte_scales("model") == (("", 8.0),)
    assert stored.policy("model").config.byte_scales == (("", 8.0),)


@pytest.mark.parametrize(
    ("env_config", "preprocess", "wanted"),
    [
        ({"largest": 200}, {}, ()),
        ({"size": 40}, {}, ()),
        ({"declared": 9}, {}, (("", 9.0),)),
        ({}, {"scale": 255}, ()),
        ({}, {"scale": 10}, (("", 10.0),)),
        ({}, {"scale": False}, (("", 1.0),)),
        ({}, {"stack": 2}, (("", 8.0),)),
    ],
)
def test_pictures_bounds_and_settings_decide(tmp_path: Path, env_config: Any, preprocess: Any, wanted: Any) -> None:
    assert scales(start(tmp_path / "run", env_config=env_config, preprocess=preprocess)) == wanted


def test_looking_at_observations_does_not_change_what_is_learned(tmp_path: Path) -> None:
    looked, told = start(tmp_path / "a"), start(tmp_path / "b", preprocess={"scale": 8})
    for name, weight in looked.agent.policy.weights().items():
        assert (weight == told.agent.policy.weights()[name]).all(), name


def test_a_resumed_run_keeps_its_divisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path / "run")
    monkeypatch.setattr("ludus.experiments.assembly.local_training.measure_largest_values", lambda *given: {"": 3})
    result = runner.resume(tmp_path / "run", stop={"iterations": 2})
    assert scales(result) == (("", 8.0),)


@pytest.mark.parametrize("setting", [None, False])
def test_a_run_of_an_earlier_release_goes_on_dividing_by_255(tmp_path: Path, setting: bool | None) -> None:
    start(tmp_path / "run", preprocess={"scale": 255})
    forget_scales(tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("scale: 255.0", f"scale: {json.dumps(setting)}"))
    result = runner.resume(tmp_path / "run", stop={"iterations": 2})
    assert scales(result) == ()


def test_an_environment_that_fails_is_named_by_training_and_not_by_the_look_at_it(tmp_path: Path) -> None:
    data = small.data(1, env="tests.experiments.grids:FailingGrid")
    with pytest.raises(EnvironmentFault, match="broken"):
        runner.train(data, project=tmp_path, trial="run")


def test_workers_get_the_divisor_with_the_policy(tmp_path: Path) -> None:
    resolved = resolve(small.data(1, env=GRID, num_workers=2))
    shape = worker_training.probe_environment(GRID, resolved.config)
    policy = worker_training.make_sampled_policy(shape, prepare_new_run(resolved, tmp_path / "run"), RunHooks())
    plan = worker_training.make_plan(GRID, resolved.config, shape, policy, 1, 0)
    assert policy_from(dict(plan.description)).config.byte_scales == (("", 8.0),)


def test_several_agents_are_looked_at_in_a_match(tmp_path: Path) -> None:
    said: list[str] = []
    data = small.data(1, env="tests.experiments.grids:pair", train_batch_size=64, evaluation_duration=0)
    result = runner.train(data, project=tmp_path, trial="run", announce=said.append)
    assert scales(result) == (("", 6.0),)
    assert any("is divided by 6" in sentence for sentence in said)


def test_the_largest_values_are_those_of_random_play() -> None:
    config = resolve(small.data(1, env=GRID)).config
    assert measure_largest_values(GRID, config) == {"": 8}
