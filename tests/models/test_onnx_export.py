"""Export: every kind of network and action as ONNX, compared with PyTorch; broken and quantised models."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ludus.core import plugins
from ludus.core.tree import map_tree
from ludus.errors import Damaged, IncompatibleCheckpoint, MissingExtra, UsageError
from ludus.models.autoregressive_actions import Branch
from ludus.models.centralized_critic import actor_policy, without_critic
from ludus.models.export import onnx_export, parity
from ludus.models.export.quantize import quantize
from ludus.models.inference.onnx_policy import OnnxModule, OnnxPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules
from tests.tools import network_of

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
AIMED = spaces.Dict({"units": spaces.Box(-1, 1, (6, 5)), "me": spaces.Box(-1, 1, (4,)), "aim": spaces.MultiBinary((2, 6))})
BRANCHES = (Branch(1, (1,)), Branch(3, (2, 3), "units", "aim"))
VECTOR = spaces.Box(-1, 1, (8,))
PICTURE = spaces.Box(0, 255, (4, 36, 36), np.uint8)

KINDS: dict[str, tuple[gym.Space[Any], gym.Space[Any], NetworkConfig, bool]] = {
    "mlp": (VECTOR, spaces.Discrete(5), NetworkConfig(), False),
    "relu, boxes": (
        VECTOR,
        spaces.Tuple((spaces.Box(-2, 2, (3,)), spaces.Box(-np.inf, 2, (2, 2), np.float64))),
        NetworkConfig(fcnet_activation="relu"),
        True,
    ),
    "nature": (PICTURE, spaces.Discrete(4), NetworkConfig(), False),
    "grid of symbols and bytes": (
        spaces.Dict({"grid": spaces.Box(0, 255, (7, 7, 3), np.uint8), "cells": spaces.Box(0, 255, (5,), np.uint8)}),
        spaces.Discrete(4),
        NetworkConfig(byte_scales=(("grid", 10.0), ("cells", 4.0))),
        False,
    ),
    "resnet, channels last and a vector": (
        spaces.Dict({"image": spaces.Box(0, 1, (16, 20, 3)), "v": VECTOR}),
        spaces.MultiBinary((2, 3)),
        NetworkConfig(conv="resnet", fcnet_hiddens=(32,), fcnet_activation="elu"),
        True,
    ),
    "lstm, entities, hybrid": (
        ENTITIES,
        HYBRID,
        NetworkConfig(entity_dim=16, core="lstm", cell_size=24, fcnet_activation="silu"),
        True,
    ),
    "gru, tuple": (
        spaces.Tuple((spaces.Box(-1, 1, (3, 3)), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(5))),
        spaces.Tuple((spaces.MultiDiscrete(np.array([[3, 4], [2, 2]])), spaces.Discrete(2))),
        NetworkConfig(core="gru", cell_size=24, fcnet_activation="gelu"),
        False,
    ),
    "lstm, parts in turn": (
        AIMED,
        spaces.MultiDiscrete([4, 3, 2, 6], start=[0, 1, 0, 0]),
        NetworkConfig(entity_dim=16, entity_present=(("units", 0),), autoregressive=BRANCHES, core="lstm", cell_size=24),
        True,
    ),
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
    return onnx_export.export_policy(made(kind), name="it", version=7)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def test_an_exported_policy_acts_like_the_original(kind: str) -> None:
    policy, model = made(kind), traced(kind)
    report = parity.verify(policy, model)
    assert report.passed, report.reasons
    assert report.equal_actions >= 0.999
    assert max(report.max_logit_difference, report.max_state_difference) <= 1e-4
    assert report.max_value_difference <= 1e-3
    assert report.max_log_prob_difference <= 1e-3
    assert report.max_company_difference <= 1
    assert report.alone >= 20
    assert report.batch_sizes == list(range(1, 65))
    assert report.unrolled == (1600 if policy.recurrent else 0)
    assert report.decisions == report.random + report.unrolled >= 4000


def test_of_a_policy_with_a_centralised_value_the_actor_is_exported() -> None:
    """It sees what its agent sees, and needs nothing of the value: neither what that sees nor its weights."""
    _, action, config, _ = KINDS["lstm, parts in turn"]
    whole = spaces.Dict({"observation": AIMED, "state": spaces.Box(-1, 1, (7,))})
    torch.manual_seed(0)
    trained = Policy(whole, action, replace(config, central=True), normalise_observations=True)
    description, weights = without_critic(trained.description(), trained.weights())
    stored = Policy.from_description(json.loads(json.dumps(description)))
    stored.load_weights(weights)
    model = onnx_export.export_policy(actor_policy(trained))
    assert OnnxPolicy(model).observation_space == AIMED
    report = parity.verify(stored, model)
    assert report.passed, report.reasons
    assert report.unrolled


def test_options_that_are_hidden_do_not_hide_what_differs() -> None:
    """Their logits are numbers without meaning, so large that beside them all others look alike."""
    kind = "lstm, parts in turn"
    policy, weights = made(kind), made(kind).weights()
    weights["network.head.bias"][0] += 5e-4
    report = parity.verify(policy, onnx_export.with_weights(traced(kind), weights))
    assert report.max_logit_difference == pytest.approx(5e-4, rel=0.05)
    assert any("logits differ" in reason for reason in report.reasons)
    weights["network.head.bias"] += 5.0 * np.arange(len(weights["network.head.bias"]), dtype=np.float32)
    assert parity.rounding_error(policy, onnx_export.with_weights(traced(kind), weights)) > parity.INT8_ERROR


def test_every_weight_is_an_initialiser_and_can_be_exchanged(kind: str) -> None:
    policy, model = made(kind), traced(kind)
    named = {item.name for item in onnx.load_from_string(model).graph.initializer}
    assert named >= policy.state_dict().keys() - {"network.norm.count"}  # the count is for the learner alone
    other = Policy.from_description(policy.description())
    other.load_weights({name: (value * 1.25 + 0.001).astype(value.dtype) for name, value in policy.weights().items()})
    assert not np.array_equal(other.weights()["network.head.weight"], policy.weights()["network.head.weight"])
    exported = OnnxPolicy(onnx_export.with_weights(model, other.weights(), 8))
    assert exported.version == 8
    seen = parity.random_observations(policy.observation_space, 20, np.random.default_rng(0))
    mine, theirs = other.act(seen, exported.initial_state(20)), exported.act(seen)
    np.testing.assert_allclose(theirs.value, mine.value, atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(theirs.log_prob, mine.log_prob, atol=1e-3, rtol=1e-4)
    assert np.abs(theirs.value - OnnxPolicy(model).act(seen).value).max() > 1e-3


def test_an_exported_file_names_its_inputs_outputs_and_metadata(kind: str) -> None:
    policy, model = made(kind), traced(kind)
    graph = onnx.load_from_string(model).graph
    assert [item.name for item in graph.input] == list(onnx_export.policy_inputs(policy))
    assert all(item.type.tensor_type.shape.dim[0].dim_param == "batch" for item in [*graph.input, *graph.output])
    mine = OnnxPolicy(model)
    assert (mine.model, mine.version, mine.precision) == ("it", 7, "float32")
    assert mine.observation_space == policy.observation_space
    assert mine.action_space == policy.action_space


def test_nothing_in_a_file_tells_where_it_was_made(small: tuple[Policy, bytes]) -> None:
    assert not re.search(rb"site-packages|\.py\b|/ludus", small[1])


@pytest.mark.parametrize("opset", [15, 22])
def test_other_opsets_do_the_same(opset: int) -> None:
    policy = made("lstm, entities, hybrid")
    model = onnx_export.at_opset(traced("lstm, entities, hybrid"), opset)
    assert {item.version for item in onnx.load_from_string(model).opset_import if item.domain == ""} == {opset}
    report = parity.verify(policy, model)
    assert report.passed, report.reasons
    assert report.opset == opset


@pytest.mark.parametrize("opset", [15, 22])
def test_int8_in_other_opsets_is_as_close(opset: int) -> None:
    policy = made("relu, boxes")
    model = quantize(onnx_export.at_opset(traced("relu, boxes"), opset), parity.calibration_of(policy))
    onnx.checker.check_model(onnx.load_from_string(model))
    assert 0 < parity.rounding_error(policy, model) < parity.INT8_ERROR


def test_an_opset_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="opset 9"):
        onnx_export.export_policy(made("mlp"), opset=9)


def test_weights_of_another_network_are_refused(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    weights = policy.weights()
    with pytest.raises(IncompatibleCheckpoint, match="missing"):
        onnx_export.with_weights(model, {"network.head.weight": weights["network.head.weight"]})
    with pytest.raises(IncompatibleCheckpoint, match=r"network\.head\.bias"):
        onnx_export.with_weights(model, weights | {"network.head.bias": np.zeros(6, np.float32)})


# -- verification -------------------------------------------------------------------------------------------------------


def broken(model: bytes, name: str, by: Any) -> bytes:
    loaded = onnx.load_from_string(model)
    item = next(item for item in loaded.graph.initializer if item.name == name)
    item.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(item) + np.asarray(by, np.float32), name))
    return bytes(loaded.SerializeToString())


def with_output(model: bytes, name: str, kind: str, by: Any) -> bytes:
    """The same graph with one node more, behind this output."""
    loaded = onnx.load_from_string(model)
    for node in loaded.graph.node:
        for names in (node.input, node.output):
            for i, used in enumerate(names):
                if used == name:
                    names[i] = f"{name}.original"
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(by), "by"))
    loaded.graph.node.append(onnx.helper.make_node(kind, [f"{name}.original", "by"], [name]))
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


@pytest.mark.parametrize(
    ("output", "precision"), [("log_prob", "float32"), ("log_prob", "int8"), ("value", "int8"), ("next_state.0", "int8")]
)
def test_every_output_must_be_a_number(output: str, precision: str) -> None:
    policy, model = made("gru, tuple"), eight("gru, tuple") if precision == "int8" else traced("gru, tuple")
    report = parity.verify(policy, with_output(model, output, "Mul", np.float32(np.nan)))
    assert any(output in reason and "numbers" in reason for reason in report.reasons)
    assert not report.passed


def test_what_is_recorded_must_be_what_was_chosen(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    assert "actions are equal" in parity.verify(policy, with_output(model, "chosen", "Add", np.int64(1))).reason
    boxed = with_output(traced("relu, boxes"), "chosen.0", "Add", np.float32(0.01))
    assert "actions are equal" in parity.verify(made("relu, boxes"), boxed).reason


def test_probabilities_must_be_those_of_the_original(small: tuple[Policy, bytes]) -> None:
    policy, model = small
    report = parity.verify(policy, with_output(model, "log_prob", "Add", np.float32(0.01)))
    assert [reason for reason in report.reasons if "log_prob" in reason] == report.reasons != []


def test_the_largest_number_of_a_type_is_no_bound() -> None:
    largest = float(np.finfo(np.float32).max)
    (name, width), (chosen, scaled) = parity.action_widths(spaces.Box(-largest, largest, (2,))).items()
    assert (name, chosen) == ("action", "chosen")
    mine = np.array([[0.5, -0.25]], np.float32)
    assert width is not None
    assert not parity.equal_rows(mine, mine + np.float32(0.01), width, 1e-4).any()
    assert not parity.equal_rows(mine * largest, mine * largest * np.float32(0.99), width, 1e-4).any()
    assert parity.equal_rows(mine * largest, mine * largest * np.float32(1.00001), width, 1e-4).all()
    assert not parity.equal_rows(mine, mine + np.float32(0.01), scaled, 1e-4).any()


def test_a_recurrent_state_that_drifts_does_not_pass() -> None:
    policy = made("gru, tuple")
    report = parity.verify(policy, broken(traced("gru, tuple"), "network.core.recurrent.bias", 1e-3))
    assert any("state" in reason for reason in report.reasons)
    whole = parity.verify(policy, eight("gru, tuple"))
    assert 0 < whole.state_drift < parity.INT8_DRIFT
    drifted = parity.verify(policy, broken(eight("gru, tuple"), "network.core.recurrent.bias", 0.5))
    assert drifted.state_drift > parity.INT8_DRIFT
    assert any("the states differ" in reason for reason in drifted.reasons)


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


@functools.cache
def eight(kind: str) -> bytes:
    return quantize(traced(kind), parity.calibration_of(made(kind)))


@pytest.mark.parametrize("kind", ["nature", "mlp", "relu, boxes", "lstm, entities, hybrid", "gru, tuple", "lstm, parts in turn"])
def test_int8_is_smaller_and_close(kind: str) -> None:
    policy, model, small = made(kind), traced(kind), eight(kind)
    assert len(small) < 0.95 * len(model)
    assert OnnxPolicy(small).precision == "int8"
    assert 0 < parity.rounding_error(policy, small) < parity.INT8_ERROR
    assert parity.independent(policy, small) == []
    with pytest.raises(UsageError, match="int8"):
        onnx_export.with_weights(small, policy.weights())


@pytest.mark.parametrize("kind", ["relu, boxes", "lstm, entities, hybrid"])
@pytest.mark.parametrize("size", [1e3, -1e6])
def test_in_int8_a_strange_row_does_not_change_the_others(kind: str, size: float) -> None:
    """They are other players."""
    exported, rng = OnnxPolicy(eight(kind)), np.random.default_rng(0)
    seen = parity.random_observations(exported.observation_space, 64, rng)
    usual = exported.outputs(seen, (), None, None)
    strange = parity._make_extreme(exported.observation_space, seen, np.array([63]), size)
    among = exported.outputs(strange, (), None, None)
    for name, array in usual.items():
        np.testing.assert_allclose(among[name][:63], array[:63], rtol=1e-4, atol=1e-5, err_msg=name)
    alone = exported.outputs(map_tree(lambda x: x[63:], strange), (), None, None)
    np.testing.assert_allclose(alone["logits"][0], among["logits"][63], rtol=1e-4)


def test_ranges_that_are_measured_over_a_batch_do_not_pass(tmp_path: Path) -> None:
    """What onnxruntime calls dynamic quantisation."""
    (tmp_path / "it.onnx").write_bytes(traced("relu, boxes"))
    quantization = plugins.require("onnxruntime.quantization", "serve", "this test")
    quantization.quantize_dynamic(tmp_path / "it.onnx", tmp_path / "small.onnx")
    small = onnx.load(tmp_path / "small.onnx")
    onnx.helper.set_model_props(small, {onnx_export.META: json.dumps(onnx_export.facts_of(small) | {"precision": "int8"})})
    model = small.SerializeToString()
    assert any("the others in its batch" in reason for reason in parity.independent(made("relu, boxes"), model))
    assert any("the others in its batch" in reason for reason in parity.verify(made("relu, boxes"), model).reasons)


def test_int8_passes_for_a_policy_that_is_sure_and_not_for_one_that_is_not() -> None:
    policy = made("mlp")
    with torch.no_grad():
        network_of(policy).head.weight.mul_(10)
        network_of(policy).head.bias.copy_(torch.tensor([0.0, 3, 1, -2, 6]))
    report = parity.artefact(policy, onnx_export.with_weights(traced("mlp"), policy.weights()), int8=True)[1]
    assert report.passed, report.reasons
    assert report.precision == "int8"
    unsure = made("nature")
    seen = parity.random_observations(PICTURE, 64, np.random.default_rng(3))
    with torch.no_grad():  # all actions are as good, but for what little one picture differs from another
        network_of(unsure).head.bias.sub_(torch.from_numpy(OnnxPolicy(traced("nature")).logits(seen)).mean(dim=0))
    report = parity.artefact(unsure, onnx_export.with_weights(traced("nature"), unsure.weights()), int8=True)[1]
    assert report.equal_actions < 0.99
    assert "hardly been trained" in report.reason


def test_a_row_of_zeros_stays_one() -> None:
    """Where nothing behind a ReLU is active there is no largest number to measure by."""
    policy = made("relu, boxes")
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if name.endswith("0.bias"):
                value.fill_(-1e3)
    model = quantize(onnx_export.with_weights(traced("relu, boxes"), policy.weights()), parity.calibration_of(policy))
    seen = parity.random_observations(policy.observation_space, 5, np.random.default_rng(0))
    np.testing.assert_allclose(OnnxPolicy(model).act(seen).value, policy.act(seen).value, rtol=1e-5)


def test_weights_that_are_not_numbers_are_not_quantised() -> None:
    policy = made("mlp")
    with torch.no_grad():
        dict(policy.named_parameters())["network.trunk.dense.1.weight"][0, 0] = float("nan")
    with pytest.raises(Damaged, match="not finite"):
        quantize(onnx_export.with_weights(traced("mlp"), policy.weights()), parity.calibration_of(policy))


@functools.cache
def one_layer() -> bytes:
    return onnx_export.export_module(nn.Linear(2, 2), modules.inputs_of((np.zeros(2, np.float32),), {}))


def test_a_model_without_a_layer_in_the_middle_is_not_quantised() -> None:
    with pytest.raises(UsageError, match="no layer"):
        quantize(one_layer(), [])


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
    model = onnx_export.export_module(module, inputs)
    assert module.training
    feeds = parity.module_feeds(args, kwargs)
    assert parity.verify_module(module.eval(), model, feeds, onnx_export.arguments_of(inputs)) == []
    outputs = OnnxModule(model)(feeds[3])
    assert outputs["z"].shape == (64, 3)
    assert outputs["a"][0].dtype == np.int64
    module.out.bias.data.add_(0.01)
    assert parity.verify_module(module, model, feeds, onnx_export.arguments_of(inputs)) == [
        "output.z differs by more than 0.0001"
    ]


class AutoregressiveDistribution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_module_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be written as ONNX.*torch\.where"):
        onnx_export.export_module(AutoregressiveDistribution(), modules.inputs_of((np.zeros(2, np.float32),), {}))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"ludus\[serve\]"):
        onnx_export.export_policy(made("mlp"))
