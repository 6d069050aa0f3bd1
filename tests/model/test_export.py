"""Export: every kind of network and action as ONNX, compared with PyTorch; broken and quantised models."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.errors import IncompatibleCheckpoint, MissingExtra, UsageError
from ludus.model import export, parity
from ludus.model import module as modules
from ludus.model.networks import NetworkConfig
from ludus.model.onnx import OnnxModule, OnnxPolicy
from ludus.model.policy import Policy

ENTITIES = spaces.Dict(
    {
        "units": spaces.Box(-1, 1, (6, 5)),
        "units_mask": spaces.MultiBinary(6),
        "me": spaces.Box(-np.inf, np.inf, (4,)),
        "kind": spaces.Discrete(3, start=1),
    }
)
HYBRID = spaces.Dict(
    {
        "move": spaces.Box(-2, np.array([1, 3], np.float32)),
        "fire": spaces.Discrete(3, start=1),
        "bits": spaces.MultiBinary(4),
        "pair": spaces.MultiDiscrete([2, 3]),
    }
)
VECTOR = spaces.Box(-1, 1, (8,))
PICTURE = spaces.Box(0, 255, (4, 36, 36), np.uint8)

KINDS: dict[str, tuple[gym.Space[Any], gym.Space[Any], NetworkConfig, bool]] = {
    "mlp": (VECTOR, spaces.Discrete(5), NetworkConfig(), False),
    "normalised box": (VECTOR, spaces.Box(-2, 2, (3,)), NetworkConfig(fcnet_activation="relu"), True),
    "unbounded float64 box": (VECTOR, spaces.Box(-np.inf, 2, (2, 2), np.float64), NetworkConfig(fcnet_hiddens=(16,)), False),
    "nature": (PICTURE, spaces.Discrete(4), NetworkConfig(), False),
    "channels last and a vector": (
        spaces.Dict({"image": spaces.Box(0, 255, (36, 40, 3), np.uint8), "v": VECTOR}),
        spaces.MultiDiscrete([3, 2]),
        NetworkConfig(fcnet_hiddens=(32,), fcnet_activation="elu"),
        True,
    ),
    "resnet": (spaces.Box(0, 1, (3, 16, 16)), spaces.Discrete(4), NetworkConfig(conv="resnet"), False),
    "entities": (ENTITIES, spaces.Discrete(3), NetworkConfig(entity_dim=16, fcnet_activation="silu"), False),
    "lstm, entities, hybrid": (ENTITIES, HYBRID, NetworkConfig(entity_dim=16, core="lstm", cell_size=24), True),
    "gru, tuple": (
        spaces.Tuple((spaces.Box(-1, 1, (3, 3)), spaces.MultiDiscrete([3, 4]))),
        spaces.Tuple((spaces.MultiDiscrete(np.array([[3, 4], [2, 2]])), spaces.Discrete(2))),
        NetworkConfig(core="gru", cell_size=24),
        False,
    ),
    "bits": (spaces.MultiBinary(9), spaces.MultiBinary((2, 3)), NetworkConfig(fcnet_activation="gelu"), False),
}


def made(kind: str, seed: int = 0) -> Policy:
    """A policy with an opinion: its weights are not those of the beginning, where biases are zero and all logits alike."""
    observation, action, config, normalise = KINDS[kind]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        policy = Policy(observation, action, config, normalise)
        for name, value in policy.named_parameters():
            value.add_(torch.randn_like(value) * (0.3 if "head" in name else 0.05))
        if policy.network.norm is not None:
            policy.network.norm.mean.normal_()
            policy.network.norm.variance.uniform_(0.2, 3)
    return policy


@functools.cache
def traced(kind: str) -> bytes:
    return export.export_policy(made(kind), name="it", version=7)


@pytest.fixture(params=KINDS)
def exported(request: pytest.FixtureRequest) -> tuple[Policy, bytes]:
    return made(request.param), traced(request.param)


@pytest.fixture
def small() -> tuple[Policy, bytes]:
    return made("mlp"), traced("mlp")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Batches as small as these are slower by several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_an_exported_policy_acts_like_the_original(exported: tuple[Policy, bytes]) -> None:
    policy, model = exported
    report = parity.verify(policy, model)
    assert report.passed, report.reasons
    assert report.equal_actions >= 0.999
    assert max(report.max_logit_difference, report.max_state_difference) <= 1e-4
    assert report.max_value_difference <= 1e-3
    assert report.max_log_prob_difference <= 1e-3
    assert report.batch_sizes == list(range(1, 65))
    assert report.unrolled == (1600 if policy.recurrent else 0)
    assert report.decisions == report.random + report.unrolled >= 4000


def test_every_weight_is_an_initialiser_and_can_be_exchanged(exported: tuple[Policy, bytes]) -> None:
    policy, model = exported
    named = {item.name for item in onnx.load_from_string(model).graph.initializer}
    assert named >= policy.state_dict().keys() - {"network.norm.count"}  # the count is for the learner alone
    other = Policy.from_description(policy.description())
    other.load_weights({name: (value * 1.25 + 0.001).astype(value.dtype) for name, value in policy.weights().items()})
    assert not np.array_equal(other.weights()["network.head.weight"], policy.weights()["network.head.weight"])
    report = parity.verify(other, export.with_weights(model, other.weights(), 8))
    assert report.passed, report.reasons
    assert report.version == 8


def test_a_file_names_its_inputs_and_outputs_and_says_what_it_is(exported: tuple[Policy, bytes]) -> None:
    policy, model = exported
    graph = onnx.load_from_string(model).graph
    assert [item.name for item in graph.input] == list(export.policy_inputs(policy))
    assert all(item.type.tensor_type.shape.dim[0].dim_param == "batch" for item in [*graph.input, *graph.output])
    mine = OnnxPolicy(model)
    assert (mine.model, mine.version, mine.precision) == ("it", 7, "float32")
    assert mine.observation_space == policy.observation_space
    assert mine.action_space == policy.action_space


def test_nothing_in_a_file_tells_where_it_was_made(small: tuple[Policy, bytes]) -> None:
    assert not re.search(rb"site-packages|\.py\b|/ludus", small[1])


@pytest.mark.parametrize("opset", [15, 17, 22])
def test_other_opsets_do_the_same(opset: int) -> None:
    policy = made("lstm, entities, hybrid")
    model = export.at_opset(traced("lstm, entities, hybrid"), opset)
    assert {item.version for item in onnx.load_from_string(model).opset_import if item.domain == ""} == {opset}
    report = parity.verify(policy, model)
    assert report.passed, report.reasons
    assert report.opset == opset


def test_an_opset_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="opset 9"):
        export.export_policy(made("mlp"), opset=9)


def test_weights_of_another_network_are_refused(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    weights = policy.weights()
    with pytest.raises(IncompatibleCheckpoint, match="missing"):
        export.with_weights(model, {"network.head.weight": weights["network.head.weight"]})
    with pytest.raises(IncompatibleCheckpoint, match=r"network\.head\.bias"):
        export.with_weights(model, weights | {"network.head.bias": np.zeros(6, np.float32)})


# -- verification -------------------------------------------------------------------------------------------------------


def broken(model: bytes, name: str, by: Any) -> bytes:
    loaded = onnx.load_from_string(model)
    item = next(item for item in loaded.graph.initializer if item.name == name)
    item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item) + np.asarray(by, np.float32), name))
    return bytes(loaded.SerializeToString())


@pytest.mark.parametrize(("name", "what"), [("network.head.bias", "logits"), ("network.value_head.bias", "value")])
def test_a_model_that_is_a_little_off_does_not_pass(small: tuple[Policy, bytes], name: str, what: str) -> None:
    policy, model = small
    report = parity.verify(policy, broken(model, name, 2e-3))
    assert not report.passed
    assert what in report.reason
    assert json.loads(json.dumps(report.to_json()))["passed"] is False


def test_other_actions_do_not_pass(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    report = parity.verify(policy, broken(model, "network.head.bias", [0, 0.5, 0, 0, 0]))
    assert any("actions are equal" in reason for reason in report.reasons)
    assert report.equal_actions < 0.999


def test_a_model_that_answers_nan_does_not_pass(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    report = parity.verify(policy, broken(model, "network.value_head.bias", np.nan))
    assert not report.passed
    json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_a_recurrent_state_that_drifts_does_not_pass() -> None:
    policy = made("gru, tuple")
    report = parity.verify(policy, broken(traced("gru, tuple"), "network.core.recurrent.bias", 1e-3))
    assert any("state" in reason for reason in report.reasons)


def test_recorded_observations_are_compared_too(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    seen = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)
    report = parity.verify(policy, model, seen)
    assert report.passed
    assert report.recorded == 600  # with and without noise


def test_random_masks_allow_some_option_of_every_choice() -> None:
    mask = parity.random_mask(HYBRID, 500, np.random.default_rng(0))
    assert mask is not None
    assert mask.shape == (500, 4 + 3 + 5)
    for part in (slice(4, 7), slice(7, 9), slice(9, 12)):
        assert mask[:, part].any(axis=1).all()
    assert not mask.all()


# -- int8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nature", "mlp", "lstm, entities, hybrid"])
def test_int8_is_smaller_and_close(kind: str) -> None:
    policy, model = made(kind), traced(kind)
    small = export.quantize(model, parity.calibration_of(policy))
    assert len(small) < 0.9 * len(model)
    assert OnnxPolicy(small).precision == "int8"
    assert 0 < parity.rounding_error(policy, small) < parity.INT8_ERROR
    with pytest.raises(UsageError, match="int8"):
        export.with_weights(small, policy.weights())


def test_int8_passes_for_a_policy_that_is_sure_and_not_for_one_that_is_not() -> None:
    policy = made("mlp")
    with torch.no_grad():
        policy.network.head.weight.mul_(10)
        policy.network.head.bias.copy_(torch.tensor([0.0, 3, 1, -2, 6]))
    sure = export.quantize(export.with_weights(traced("mlp"), policy.weights()), parity.calibration_of(policy))
    assert parity.verify(policy, sure).passed
    fresh = Policy(VECTOR, spaces.MultiBinary(100))
    report = export.artefact(fresh, int8=True)[1]
    assert report.equal_actions < 0.99
    assert "hardly been trained" in report.reason


def test_a_model_without_a_layer_in_the_middle_is_not_quantised() -> None:
    policy = made("unbounded float64 box")
    with pytest.raises(UsageError, match="no layer"):
        export.quantize(traced("unbounded float64 box"), parity.calibration_of(policy))


# -- any module ---------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> dict[str, Any]:
        h = torch.relu(self.norm(self.hidden(torch.cat([x, more["b"] * more["a"].unsqueeze(-1)], dim=-1))))
        return {"z": self.out(h), "a": [h.argmax(dim=-1), h.mean(dim=-1)]}


def test_any_module_keeps_its_structure() -> None:
    module = Two()
    args, kwargs = (np.zeros(4, np.float32),), {"more": {"b": np.zeros(2, np.float32), "a": np.float32(0)}}
    inputs = modules.inputs_of(args, kwargs)
    model = export.export_module(module, inputs)
    assert module.training
    feeds = parity.module_feeds(args, kwargs)
    assert parity.verify_module(module.eval(), model, feeds, export.arguments_of(inputs)) == []
    outputs = OnnxModule(model)(feeds[3])
    assert outputs["z"].shape == (64, 3)
    assert outputs["a"][0].dtype == np.int64
    module.out.bias.data.add_(0.01)
    assert parity.verify_module(module, model, feeds, export.arguments_of(inputs)) == ["output.z differs by more than 0.0001"]


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_module_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be written as ONNX.*torch\.where"):
        export.export_module(Branching(), modules.inputs_of((np.zeros(2, np.float32),), {}))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"ludus\[serve\]"):
        export.export_policy(made("mlp"))
