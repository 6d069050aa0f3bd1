"""RemoteModel(use_onnx=…): onnxruntime computes with the newest published weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ludus
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.models.inference.engine import Inference, Inputs
from ludus.models.inference.onnx_hot_reload import FLOAT32, OnnxEngine, OnnxGraph, OnnxPolicySource
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules
from ludus.remote.context import RunContext
from tests.remote.parts import Scale

X = np.linspace(-1, 1, 4, dtype=np.float32)


class Small(nn.Module):
    """At the top level of a module, where worker processes find it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return {"logits": y, "best": y.argmax(dim=-1)}


def policy() -> Policy:
    return Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3), NetworkConfig(core="gru", cell_size=8, fcnet_hiddens=(8,)))


def by_torch(model: ludus.RemoteModel, x: Any) -> Any:
    with torch.inference_mode():
        return model.get_model().eval()(torch.from_numpy(x[None]))["logits"][0].numpy()


def published(model: ludus.RemoteModel, seed: int) -> int:
    random = np.random.default_rng(seed)
    weights = ludus.get_torch_model_weights(model.get_model())
    return model.publish_weights({k: random.normal(size=v.shape).astype(v.dtype) for k, v in weights.items()})


async def followed(model: ludus.RemoteModel, version: int) -> Any:
    """The answer of this version: on an event loop the one before goes on until the next is ready."""
    async with asyncio.timeout(30):
        while True:
            answer, seen = await model.forward_versioned(X)
            if seen == version:
                return answer
            assert seen < version
            await asyncio.sleep(0.01)


def check_follows(model: ludus.RemoteModel, atol: float) -> None:
    """The answers are those of torch with the newest weights, and say so."""
    for seed in range(3):
        version = published(model, seed)
        answer = asyncio.run(followed(model, version))
        assert version == model.version
        expected = by_torch(model, X)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(answer["logits"], expected, atol=atol * np.abs(expected).max())
        np.testing.assert_allclose(model(X)["logits"], answer["logits"], atol=1e-6)


def test_a_module_is_run_by_onnxruntime_and_follows_new_weights(run: RunContext) -> None:
    model = ludus.RemoteModel("small", Small(), forward_args=(X,), use_onnx=True)
    inference = model._shared_model.backend
    assert isinstance(inference, Inference)
    assert isinstance(inference.engine, OnnxEngine)
    np.testing.assert_allclose(model(X)["logits"], by_torch(model, X), atol=1e-5)
    assert model(X)["best"].dtype == np.int64
    check_follows(model, 1e-5)
    assert ludus.RemoteModel("small")._shared_model is model._shared_model
    again = ludus.RemoteModel("small", Small(), forward_args=(X,), use_onnx="train")  # made already: not traced again
    assert again._shared_model.graph == model._shared_model.graph
    frozen = model.clone()
    before = frozen(X)["logits"]
    published(model, 7)
    assert frozen._shared_model.graph == model._shared_model.graph
    np.testing.assert_array_equal(frozen(X)["logits"], before)
    assert np.abs(model(X)["logits"] - before).max() > 0.1


def test_int8_follows_new_weights_until_another_model_has_the_name(run: RunContext) -> None:
    model = ludus.RemoteModel("small", Small(), forward_args=(X,), use_onnx="quantize")
    check_follows(model, 0.1)
    assert np.abs(model(X)["logits"] - by_torch(model, X)).max() > 1e-6  # it is int8 that answers
    plain = ludus.RemoteModel("small", Scale(2.0), forward_args=(X,), override_model=True)
    np.testing.assert_array_equal(plain(X), 2 * X)


def test_a_policy_decides_as_in_torch(run: RunContext) -> None:
    made = policy()
    model = ludus.RemoteModel("agent", made, use_onnx=True)

    async def play(deterministic: float) -> list[Any]:
        one = await model.decide(X, temperature=deterministic)
        return [one, await model.decide(X, one.state, np.array([True, False, True]), temperature=deterministic)]

    for seed in range(2):
        version = published(model, seed)
        now = model.get_model()
        assert isinstance(now, Policy)
        one, two = asyncio.run(play(0.0))
        first = now.act(X[None], (np.zeros((1, 8), np.float32),))
        second = now.act(X[None], first.state, np.array([[True, False, True]]))
        assert (one.action, two.action, one.version) == (first.action[0], second.action[0], version)
        np.testing.assert_allclose([one.log_prob, two.log_prob], [first.log_prob[0], second.log_prob[0]], atol=1e-4)
        np.testing.assert_allclose(two.state[0], second.state[0][0], atol=1e-4)
        # `forward` takes what Policy.step takes; `first` sets the state back
        chosen, _, _, after = model(X.astype(np.float64), one.state, np.bool_(True), None, np.zeros(3, np.float32))
        assert chosen == first.action[0]
        np.testing.assert_allclose(after[0], first.state[0][0], atol=1e-4)
    assert {int(d.action) for _ in range(30) for d in asyncio.run(play(50.0))} == {0, 1, 2}
    asyncio.run(check_players_are_there(model))


async def check_players_are_there(model: ludus.RemoteModel) -> None:
    """A source of players gives the newest that is ready, and never makes an event loop wait."""
    engine = model._shared_model.onnx_engine()
    source = OnnxPolicySource(engine)
    player, before = source.newest()
    version = published(model, 9)
    with engine._preparing:  # another thread prepares
        assert source.newest() == (player, before)
    async with asyncio.timeout(30):
        while source.newest()[1] != version:
            await asyncio.sleep(0.001)
    assert source.newest()[0] is not player


# -- new weights --------------------------------------------------------------------------------------------------------


class Held:
    """Versions whose weights can be held back, as large ones are."""

    def __init__(self, module: nn.Module) -> None:
        self.version, self.reads = 1, 0
        self.weights = ludus.get_torch_model_weights(module)
        self.let_go = threading.Event()
        self.let_go.set()

    def publish(self, change: float) -> None:
        self.weights = {name: value + np.float32(change) for name, value in self.weights.items()}
        self.version += 1

    def read(self) -> tuple[int, dict[str, Any]]:
        self.reads += 1
        assert self.let_go.wait(5)
        return self.version, self.weights


@pytest.fixture(scope="module")
def small() -> tuple[Small, OnnxGraph]:
    module = Small().eval()
    return module, OnnxGraph.trace(module, modules.inputs_of((X,), {}), (X,), {}, FLOAT32)


def engine_of(small: tuple[Small, OnnxGraph]) -> tuple[Held, OnnxEngine, Callable[[], tuple[Any, int]]]:
    module, graph = small
    versions = Held(module)
    engine = OnnxEngine(module, versions, graph)
    structure, _ = Inputs(modules.inputs_of((X,), {})).flatten((X,), {})

    def ask() -> tuple[Any, int]:
        outputs, version = engine.run(structure, [X[None]], 1)
        return outputs["logits"][0], version

    return versions, engine, ask


def test_an_event_loop_does_not_wait_for_new_weights(small: tuple[Small, OnnxGraph]) -> None:
    versions, engine, ask = engine_of(small)
    before, _ = ask()

    async def play() -> None:
        versions.let_go.clear()
        for _ in range(3):
            versions.publish(0.1)
            answer, version = ask()
            assert version == engine.newest() == 1  # the reported version is the one that computed
            np.testing.assert_array_equal(answer, before)
        versions.let_go.set()
        async with asyncio.timeout(30):
            while ask()[1] == 1:
                await asyncio.sleep(0.001)
        assert ask()[1] == engine.newest() == 4
        assert np.abs(ask()[0] - before).max() > 0.1
        assert versions.reads == 2  # the first one, and the newest: not one for each, nor several at once

    asyncio.run(play())


def test_plain_code_gets_the_newest(small: tuple[Small, OnnxGraph]) -> None:
    versions, _, ask = engine_of(small)
    before, _ = ask()
    versions.publish(0.1)
    answer, version = ask()
    assert version == 2
    assert np.abs(answer - before).max() > 0.1


def test_weights_that_do_not_fit_are_an_error_and_the_previous_version_stays(
    small: tuple[Small, OnnxGraph], caplog: pytest.LogCaptureFixture
) -> None:
    versions, engine, ask = engine_of(small)
    right = versions.weights
    versions.weights, versions.version = {}, 2

    async def play() -> None:
        async with asyncio.timeout(30):
            while not caplog.records:
                assert ask()[1] == 1
                await asyncio.sleep(0.001)
        reads = versions.reads
        assert ask()[1] == ask()[1] == 1
        assert versions.reads == reads == 2  # it is not tried over and over
        versions.weights, versions.version = right, 3
        async with asyncio.timeout(30):
            while ask()[1] != 3:
                await asyncio.sleep(0.001)

    asyncio.run(play())
    assert "Version 2" in caplog.text
    versions.weights, versions.version = {}, 4
    with pytest.raises(IncompatibleCheckpoint):
        ask()
    assert engine.newest() == 3


# -- what else it is ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_made(run: RunContext) -> None:
    with pytest.raises(UsageError, match="'fast'"):
        ludus.RemoteModel("a", Small(), forward_args=(X,), use_onnx="fast")
    with pytest.raises(UsageError, match="forward_args"):
        ludus.RemoteModel("a", Small(), use_onnx=True)
    with pytest.raises(UsageError, match="cannot be written as ONNX"):
        ludus.RemoteModel("a", Scale(), forward_args=(X,), use_onnx=True)
    assert run.client.call({"op": "names"})["models"] == []
    ludus.RemoteModel("b", Small())
    with pytest.raises(UsageError, match="use_onnx"):
        ludus.RemoteModel("b", use_onnx=True)


def test_workers_run_it_too(busy: RunContext) -> None:
    model = ludus.RemoteModel("apart", Small(), forward_args=(X,), use_onnx=True, num_workers=1)
    process = busy.supervisor._processes["inference-apart-0"]
    process.wait_ready(60)
    check_follows(model, 1e-5)
    process.stop()
