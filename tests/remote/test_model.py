"""RemoteModel: created once, found by name, published from anywhere, versions never decrease."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import ludus
from ludus.errors import IncompatibleCheckpoint, NotFound, UnknownName, UsageError
from ludus.gateway.agent import Seat, SeatAgent
from ludus.models.policy import Policy
from ludus.models.weights import model_registry
from ludus.models.weights.version_store import list_versions
from ludus.remote.context import RunContext
from ludus.storage.local import LocalStore
from tests.remote.parts import Other, Scale, scaled

X = np.ones(3, np.float32)


def made(name: str = "m", **kwargs: Any) -> ludus.RemoteModel:
    return ludus.RemoteModel(name, Scale(), forward_args=(X,), **kwargs)


def stored(run: RunContext, name: str = "m") -> list[int]:
    return list_versions(LocalStore(run.directory), name)


def opened(directory: Path) -> RunContext:
    return ludus.init(project=directory.parent, trial=directory.name)


# -- asking


def test_the_snippet_of_the_documentation_works(run: RunContext) -> None:
    model = made()
    np.testing.assert_array_equal(asyncio.run(model.forward(X)), X)  # type: ignore[arg-type]
    np.testing.assert_array_equal(model(X), X)
    network = model.get_model()
    weights = ludus.get_torch_model_weights(network)
    weights["factor"] = weights["factor"] * 3
    assert model.publish_weights(weights) == model.version == model.step == 2
    np.testing.assert_array_equal(model(X), 3 * X)
    assert float(model.get_model().factor.detach()) == 3.0  # type: ignore[operator]


def test_published_weights_are_used_from_the_next_batch_on(run: RunContext) -> None:
    model, other = made(), ludus.RemoteModel("m")

    async def play() -> list[tuple[float, int]]:
        seen = []
        for factor in (1, 2, 3):
            if factor > 1:
                model.publish_weights(scaled(factor))
            output, version = await other.forward_versioned(X)
            seen.append((float(output[0]), version))
        return seen

    assert asyncio.run(play()) == [(1.0, 1), (2.0, 2), (3.0, 3)]


def test_inputs_are_checked_where_they_were_declared(run: RunContext) -> None:
    made()
    with pytest.raises(UsageError, match="float32"):
        ludus.RemoteModel("m")(np.ones(4, np.float32))


def test_the_users_own_module_is_not_touched(run: RunContext) -> None:
    mine = Scale()
    model = ludus.RemoteModel("m", mine)
    model.publish_weights(scaled(9))
    model(X)
    assert float(mine.factor.detach()) == 1.0
    assert mine.training


def test_the_batch_size_given_where_it_is_made_counts_everywhere(run: RunContext) -> None:
    made(max_batch_size=3)
    model = ludus.RemoteModel("m")

    async def play() -> None:
        await asyncio.gather(*(model.forward(X) for _ in range(9)))

    asyncio.run(play())
    engine = model._shared_model.backend.engine  # type: ignore[attr-defined]
    assert engine.batches == 3
    with pytest.raises(UsageError, match="max_batch_size=3 in this process, not 5"):
        ludus.RemoteModel("m", max_batch_size=5)


def test_a_handle_travels_as_its_name(run: RunContext) -> None:
    again = pickle.loads(pickle.dumps(made()))
    np.testing.assert_array_equal(again(X), X)


def test_many_handles_share_one_network(run: RunContext) -> None:
    made()
    handles = [ludus.RemoteModel("m") for _ in range(1000)]
    for handle in handles[:3]:
        handle(X)
    assert len({id(handle._shared_model) for handle in handles}) == 1
    assert handles[0]._shared_model.backend.engine.rows == 3  # type: ignore[attr-defined]


# -- making and finding


def test_an_unknown_name_lists_those_that_are_known(run: RunContext) -> None:
    made("atari")
    with pytest.raises(UnknownName, match="atari"):
        ludus.RemoteModel("atary")


def test_making_it_again_attaches_and_changes_nothing(run: RunContext) -> None:
    model = made()
    model.publish_weights(scaled(5))
    again = made()
    assert again.version == 2
    np.testing.assert_array_equal(again(X), 5 * X)


def test_another_model_of_the_same_name_is_refused_unless_it_is_meant(run: RunContext) -> None:
    model = made()
    before = model.version
    with pytest.raises(UsageError, match="another model already") as caught:
        ludus.RemoteModel("m", Other())
    assert "override_model" in caught.value.hint
    with pytest.raises(UsageError, match="another model already"):
        ludus.RemoteModel("m", Scale, model_args=[2.0])
    replaced = ludus.RemoteModel("m", Other(), override_model=True)
    assert replaced.version > before
    assert replaced.get_model().layer.out_features == 2  # type: ignore[union-attr]
    assert json.loads((run.directory / "models/m/model.json").read_text())["class"] == "tests.remote.parts:Other"


def test_a_class_comes_with_its_arguments(run: RunContext) -> None:
    model = ludus.RemoteModel("m", Scale, model_args=(2.5,), model_kwargs={"width": 4})
    np.testing.assert_array_equal(model(X), 2.5 * X)


def test_what_is_on_disk_is_data(run: RunContext) -> None:
    made()
    description = json.loads((run.directory / "models/m/model.json").read_text())
    assert description == {
        "class": "tests.remote.parts:Scale",
        "args": [],
        "kwargs": {},
        "inputs": {"args": [{"array": ["float32", [3]]}], "kwargs": {}},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_onnx": "fast"}, "use_onnx='fast'"),
        ({"local_mode": True, "num_workers": 2}, "contradict"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"checkpoint_interval": 0.5}, "checkpoint_interval=0.5"),
        ({"keep": 0}, "keep=0"),
        ({"model": None, "model_args": [1]}, "no model="),
        ({"model": None, "checkpoint_interval": 5}, "no model="),
        ({"model": None, "forward_args": (X,)}, "no model="),
        ({"name": "a b"}, "plain name"),
        ({"name": "../m"}, "plain name"),
        ({"forward_args": ("text",)}, "not an array"),
    ],
)
def test_what_makes_no_sense_is_refused(run: RunContext, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ludus.RemoteModel(**{"name": "m", "model": Scale(), **arguments})
    assert not list((run.directory).glob("models/*"))
    assert not list(Path(run.location.staging).iterdir())


def test_local_mode_is_a_model_in_this_process(run: RunContext) -> None:
    model = made(local_mode=True, num_workers=0)
    model.publish_weights(scaled(2))
    np.testing.assert_array_equal(model(X), 2 * X)


def test_many_threads_may_make_and_publish_at_once(run: RunContext) -> None:
    def work(i: int) -> None:
        for k in range(5):
            versions.append(made().publish_weights(scaled(i * 10 + k)))

    versions: list[int] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(versions) == list(range(2, 32))


# -- weights


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"factor": np.zeros(2, np.float32)},
        {"factor": np.zeros(())},
        scaled(1) | {"more": np.zeros(1)},
        {"other": np.zeros(())},
    ],
)
def test_weights_of_another_network_are_refused(run: RunContext, wrong: dict[str, Any]) -> None:
    model = made()
    with pytest.raises(IncompatibleCheckpoint, match="do not fit"):
        model.publish_weights(wrong)
    assert model.version == 1
    assert not list(Path(run.location.staging).iterdir())


def test_tensors_may_be_published_as_they_are(run: RunContext) -> None:
    model = made()
    model.publish_weights({"factor": nn.Parameter(torch.tensor(4.0))})
    np.testing.assert_array_equal(model(X), 4 * X)


def test_a_version_may_be_chosen_if_it_is_higher(run: RunContext) -> None:
    model = made()
    assert model.publish_weights(scaled(2), step=5000) == 5000
    assert model.publish_weights(scaled(3)) == 5001
    with pytest.raises(UsageError, match="does not come after"):
        model.publish_weights(scaled(4), step=5001)
    assert model.version == 5001
    np.testing.assert_array_equal(model(X), 3 * X)


def test_a_trial_that_is_opened_again_goes_on_from_its_newest_weights(run: RunContext) -> None:
    model = made()
    for factor in (2, 3, 4):
        model.publish_weights(scaled(factor))
    run.close()
    assert stored(run) == [1, 4]
    with opened(run.directory):
        again = made()  # its fresh weights are not what counts
        assert again.version == 5
        np.testing.assert_array_equal(again(X), 4 * X)
        assert again.publish_weights(scaled(6)) == 6
    with opened(run.directory):
        np.testing.assert_array_equal(ludus.RemoteModel("m")(X), 6 * X)


def test_a_class_that_changed_since_is_not_filled_with_old_weights(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    ludus.RemoteModel("m", Other())
    run.close()
    with opened(run.directory), monkeypatch.context() as patch:
        grown = Other.__init__

        def larger(self: Other) -> None:
            grown(self)
            self.layer = nn.Linear(3, 5)

        patch.setattr(Other, "__init__", larger)
        with pytest.raises(UsageError, match="has changed since"):
            ludus.RemoteModel("m", Other())


def test_every_so_many_versions_are_kept_and_old_ones_forgotten(run: RunContext) -> None:
    model = made(checkpoint_interval=2, keep=3)
    for factor in range(2, 12):
        model.publish_weights(scaled(factor))
    run.close()
    assert stored(run) == [7, 9, 11]


def test_by_default_time_decides_what_is_kept(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    model.publish_weights(scaled(2))
    monkeypatch.setattr(model_registry, "CHECKPOINT_S", 0.0)
    model.publish_weights(scaled(3))
    monkeypatch.setattr(model_registry, "CHECKPOINT_S", 600.0)
    model.publish_weights(scaled(4))
    model.publish_weights(scaled(5))
    run.close()
    assert stored(run) == [1, 3, 5]


# -- clones


def test_a_clone_is_a_separate_frozen_model(run: RunContext) -> None:
    model = made(checkpoint_interval=2)
    for factor in range(2, 8):
        model.publish_weights(scaled(factor))
    clone = model.clone(step=4)
    assert clone.name == "m/clone-step-3"
    assert clone.version == 3
    np.testing.assert_array_equal(clone(X), 3 * X)
    model.publish_weights(scaled(50))
    np.testing.assert_array_equal(ludus.RemoteModel("m/clone-step-3")(X), 3 * X)
    with pytest.raises(UsageError, match="never change"):
        clone.publish_weights(scaled(1))
    with pytest.raises(UsageError, match="clone already"):
        clone.clone()


def test_a_clone_of_the_newest_is_kept_for_later(run: RunContext) -> None:
    model = made()
    model.publish_weights(scaled(7))
    model.publish_weights(scaled(8))
    assert model.clone().name == "m/clone-step-3"
    assert model.clone(step=2).name == "m/clone-step-1"
    run.close()
    with opened(run.directory):
        np.testing.assert_array_equal(ludus.RemoteModel("m/clone-step-3")(X), 8 * X)
        with pytest.raises(UnknownName):
            ludus.RemoteModel("m/clone-step-2")


def test_there_is_nothing_to_clone_before_the_first_kept_version(run: RunContext) -> None:
    model = made()
    with pytest.raises(NotFound, match="at or below 0"):
        model.clone(step=0)


def test_a_version_that_a_clone_plays_outlives_retention(run: RunContext) -> None:
    model = made(checkpoint_interval=1, keep=1)
    assert model.clone().version == 1
    for factor in range(2, 6):
        model.publish_weights(scaled(factor))
    run.close()
    assert stored(run) == [1, 5]


# -- policies


def test_a_policy_of_ours_is_a_remote_model_too(run: RunContext) -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2))
    model = ludus.RemoteModel("p", policy)
    found = ludus.RemoteModel("p")
    assert found.policy.action_space == gym.spaces.Discrete(2)

    async def play() -> None:
        agent = SeatAgent(Seat(found))
        assert await agent.act(np.zeros(3, np.float32), mask=[False, True]) == 1
        first = await found.decide(np.zeros(3, np.float32))
        model.publish_weights({name: w + 1 for name, w in policy.weights().items()})
        second = await found.decide(np.zeros(3, np.float32))
        assert (first.version, second.version) == (1, 2)
        assert first.value != second.value

    asyncio.run(play())
    action, *_ = found(np.zeros(3, np.float32))
    assert int(action) in (0, 1)
    assert isinstance(found.get_model(), Policy)


def test_a_module_that_is_no_policy_cannot_decide(run: RunContext) -> None:
    with pytest.raises(UsageError, match="does not choose actions"):
        _ = made().policy
