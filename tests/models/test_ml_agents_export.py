"""Export for ML-Agents: the published names, types and shapes, Unity's own way of reading them, and the decisions of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import onnx
import pytest
import torch
from gymnasium import spaces

from ludus.core import plugins
from ludus.errors import UsageError
from ludus.models.export import ml_agents, ml_agents_parity
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy
from tests.tools import network_of

FLOAT, INT64 = "tensor(float)", "tensor(int64)"
Kind = tuple[gym.Space[Any], gym.Space[Any], NetworkConfig, dict[str, list[int]], list[int], int]
BOTH = spaces.Dict({"continuous": spaces.Box(-1, 1, (2,)), "discrete": spaces.MultiDiscrete([2, 3])})
SENSORS = spaces.Dict(
    {
        "obs_0": spaces.Box(0, 1, (3, 36, 40), np.float32),
        "obs_1": spaces.Box(-1, 1, (6,)),
        "obs_2": spaces.Box(-1, 1, (5, 4)),
    }
)
# observation, action, network, sensors as Unity has them, branches, continuous actions
KINDS: dict[str, Kind] = {
    "vector, discrete": (spaces.Box(-1, 1, (8,)), spaces.Discrete(5, start=2), NetworkConfig(), {"obs_0": [8]}, [5], 0),
    "vector, continuous": (spaces.Box(-1, 1, (8,)), spaces.Box(-1, 1, (3,)), NetworkConfig(), {"obs_0": [8]}, [], 3),
    "image of bytes, channels last": (
        spaces.Box(0, 255, (20, 36, 3), np.uint8),
        spaces.MultiDiscrete([3, 2]),
        NetworkConfig(fcnet_hiddens=(16,), conv_filters=((4, 8, 4),)),
        {"obs_0": [3, 20, 36]},
        [3, 2],
        0,
    ),
    "three sensors, hybrid, LSTM": (
        SENSORS,
        BOTH,
        NetworkConfig(core="lstm", cell_size=16, fcnet_hiddens=(16,)),
        {"obs_0": [3, 36, 40], "obs_1": [6], "obs_2": [5, 4]},
        [2, 3],
        2,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_MADE: dict[str, tuple[Policy, bytes]] = {}


def made(kind: str) -> tuple[Policy, bytes]:
    if kind not in _MADE:
        torch.manual_seed(1)
        observation, action, config, *_ = KINDS[kind]
        policy = Policy(observation, action, config)
        _MADE[kind] = policy, ml_agents.export_policy(policy, name="brain", version=7)
    return _MADE[kind]


# Of the page "Supported ONNX operators" of Sentis, those that networks may become.
SENTIS_OPERATORS = {
    *("Add", "And", "ArgMax", "Cast", "Clip", "Concat", "Constant", "Conv", "Div", "Equal", "Exp", "Expand", "Flatten"),
    *("Gather", "GatherElements", "Gemm", "Greater", "GreaterOrEqual", "Identity", "Less", "Log", "LogSoftmax", "MatMul"),
    *("Max", "MaxPool", "Min", "Mul", "Neg", "Not", "Or", "Pow", "RandomNormalLike", "RandomUniformLike", "Reciprocal"),
    *("ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt"),
    *("Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where"),
}


def opened(data: bytes) -> Any:
    return plugins.require("onnxruntime", "serve", "tests").InferenceSession(data, providers=["CPUExecutionProvider"])


def run(session: Any, feed: dict[str, Any], *names: str) -> Any:
    found = session.run(list(names), feed)
    return found[0] if len(names) == 1 else found


@pytest.mark.parametrize("kind", KINDS)
def test_names_types_and_shapes_are_those_of_the_published_trainer(kind: str) -> None:
    _, _, config, sensors, branches, continuous = KINDS[kind]
    memory = 2 * config.cell_size if config.core == "lstm" else 0
    inputs = {name: ["batch", *shape] for name, shape in sensors.items()}
    outputs: dict[str, tuple[str, list[Any]]] = {"version_number": (FLOAT, [1]), "memory_size": (FLOAT, [1])}
    if continuous:
        outputs["continuous_actions"] = (FLOAT, ["batch", continuous])
        outputs["continuous_action_output_shape"] = (FLOAT, [1])
        outputs["deterministic_continuous_actions"] = (FLOAT, ["batch", continuous])
    if branches:
        inputs["action_masks"] = ["batch", sum(branches)]
        outputs["discrete_actions"] = (INT64, ["batch", len(branches)])
        outputs["discrete_action_output_shape"] = (FLOAT, [1, len(branches)])
        outputs["deterministic_discrete_actions"] = (INT64, ["batch", len(branches)])
    if memory:
        inputs["recurrent_in"] = ["batch", 1, memory]
        outputs["recurrent_out"] = (FLOAT, ["batch", 1, memory])
    session = opened(made(kind)[1])
    assert {item.name: item.shape for item in session.get_inputs()} == inputs
    assert {item.type for item in session.get_inputs()} == {FLOAT}
    assert [(item.name, (item.type, item.shape)) for item in session.get_outputs()] == list(outputs.items())


@pytest.mark.parametrize("kind", KINDS)
def test_unity_reads_the_constants_from_the_file_and_from_a_run_on_zeros(kind: str) -> None:
    _, _, config, _, branches, continuous = KINDS[kind]
    wanted: dict[str, Any] = {"version_number": [3.0], "memory_size": [2.0 * config.cell_size if config.core == "lstm" else 0.0]}
    if continuous:
        wanted["continuous_action_output_shape"] = [float(continuous)]
    if branches:
        wanted["discrete_action_output_shape"] = [[float(size) for size in branches]]
    model = onnx.load_from_string(made(kind)[1])
    assert [item.version for item in model.opset_import if item.domain == ""] == [15]
    stored = {item.name: onnx.numpy_helper.to_array(item).tolist() for item in model.graph.initializer if item.name in wanted}
    assert stored == wanted
    session = opened(made(kind)[1])
    zeros = {item.name: np.zeros([1, *item.shape[1:]], np.float32) for item in session.get_inputs()}
    found = {name: value.tolist() for name, value in zip(wanted, session.run(list(wanted), zeros), strict=True)}
    assert found == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_uses_only_operators_and_types_that_sentis_lists(kind: str) -> None:
    graph = onnx.load_from_string(made(kind)[1]).graph
    assert {node.op_type for node in graph.node} <= SENTIS_OPERATORS
    assert {node.domain for node in graph.node} == {""}
    kinds = {item.data_type for item in graph.initializer}
    assert kinds <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL}


@pytest.mark.parametrize("kind", KINDS)
def test_decisions_are_those_of_the_policy(kind: str) -> None:
    policy, data = made(kind)
    report = ml_agents_parity.verify(policy, data)
    assert report.passed, report.reason
    assert report.equal_actions == 1.0
    assert report.decisions >= 2080
    assert (report.unroll_steps == 100) == policy.recurrent


def test_actions_of_unity_are_those_that_the_game_got_in_training() -> None:
    """Branches count from 0, also where the space of the policy does not; numbers are inside the Box."""
    seen = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    policy, data = made("vector, discrete")
    feed = {"obs_0": seen, "action_masks": np.ones((64, 5), np.float32)}
    best = run(opened(data), feed, "deterministic_discrete_actions")
    np.testing.assert_array_equal(best[:, 0] + 2, policy.act(seen).action)

    policy, data = made("vector, continuous")
    numbers, best = run(opened(data), {"obs_0": seen * 100}, "continuous_actions", "deterministic_continuous_actions")
    np.testing.assert_allclose(best, policy.act(seen * 100).action, atol=1e-6)
    assert np.abs(numbers).max() <= 1
    assert np.unique(numbers).size > 10


def test_pictures_are_planes_of_numbers_from_0_to_1() -> None:
    policy, data = made("image of bytes, channels last")
    with torch.no_grad():
        network_of(policy).head.weight.mul_(100)  # so that the picture decides
    data = ml_agents.export_policy(policy)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 20, 36, 3), np.uint8)
    feed = {"obs_0": (pixels / 255).astype(np.float32).transpose(0, 3, 1, 2), "action_masks": np.ones((64, 5), np.float32)}
    best = run(opened(data), feed, "deterministic_discrete_actions")
    np.testing.assert_array_equal(best, policy.act(pixels).action)
    assert len(np.unique(best, axis=0)) > 1


def test_sampled_actions_have_the_probabilities_of_the_policy() -> None:
    policy, data = made("vector, discrete")
    rows = 40_000
    seen = np.tile(np.linspace(-1, 1, 8, dtype=np.float32), (rows, 1))
    allowed = np.array([True, False, True, True, False])
    feed = {"obs_0": seen, "action_masks": np.tile(allowed.astype(np.float32), (rows, 1))}
    session = opened(data)
    picks = run(session, feed, "discrete_actions")[:, 0]
    wanted = policy.action_probabilities(seen[:1], allowed[None])[0]
    found = np.bincount(picks, minlength=5) / rows
    np.testing.assert_allclose(found, wanted, atol=5 * math.sqrt(0.25 / rows))
    assert found[1] == found[4] == 0.0
    assert (picks != run(session, feed, "discrete_actions")[:, 0]).any()


def test_sampled_numbers_have_the_spread_of_the_policy() -> None:
    torch.manual_seed(0)
    policy = Policy(spaces.Box(-1, 1, (8,)), spaces.Box(-np.inf, np.inf, (2,)), NetworkConfig(log_std_init=-1.0))
    session = opened(ml_agents.export_policy(policy))
    seen = np.tile(np.linspace(-1, 1, 8, dtype=np.float32), (40_000, 1))
    numbers, best = run(session, {"obs_0": seen}, "continuous_actions", "deterministic_continuous_actions")
    np.testing.assert_allclose(numbers.mean(axis=0), best[0], atol=0.02)
    np.testing.assert_allclose(numbers.std(axis=0), math.exp(-1), rtol=0.02)


def test_memory_goes_around() -> None:
    """Two episodes in one batch, one of which begins anew with zeros, as in Unity."""
    policy, data = made("three sensors, hybrid, LSTM")
    session, rng = opened(data), np.random.default_rng(0)
    memory = np.zeros((2, 1, 32), np.float32)
    state = tuple(spec.zeros(2) for spec in policy.state_spec())
    for step in range(20):
        seen = {key: rng.random((2, *(space.shape or ()))).astype(np.float32) for key, space in SENSORS.spaces.items()}
        if step == 10:
            memory[1] = 0
            for part in state:
                part[1] = 0
        feed = {**seen, "action_masks": np.ones((2, 5), np.float32), "recurrent_in": memory}
        numbers, picks, memory = run(
            session, feed, "deterministic_continuous_actions", "deterministic_discrete_actions", "recurrent_out"
        )
        decision = policy.act(seen, state)
        state = tuple(np.array(part) for part in decision.state)
        np.testing.assert_allclose(numbers, decision.action["continuous"], atol=1e-5)
        np.testing.assert_array_equal(picks, decision.action["discrete"])
        np.testing.assert_allclose(memory[:, 0], np.concatenate(state, axis=1), atol=1e-5)


def test_sensors_are_ordered_by_number() -> None:
    keys = [f"obs_{i}" for i in range(12)]
    policy = Policy(spaces.Dict({key: spaces.Box(-1, 1, (i + 1,)) for i, key in enumerate(keys)}), spaces.Discrete(2))
    assert [(sensor.name, sensor.path, sensor.shape) for sensor in ml_agents.sensors_of(policy)] == [
        (key, key, (i + 1,)) for i, key in enumerate(keys)
    ]


def test_the_layout_of_pictures_may_be_given() -> None:
    """By its shape alone, a grid with many channels looks like one with its channels first."""
    space = spaces.Box(0, 1, (12, 12, 20), np.float32)
    policy = Policy(space, spaces.Discrete(2), NetworkConfig(fcnet_hiddens=(8,)))
    sensors = ml_agents.sensors_of(policy, images_channels_last=True)
    assert [sensor.shape for sensor in sensors] == [(20, 12, 12)]
    data = ml_agents.export_policy(policy, sensors)
    assert ml_agents_parity.verify(policy, data, sensors=sensors).passed
    seen = np.random.default_rng(0).random((50, 12, 12, 20)).astype(np.float32)
    feed = {"obs_0": seen.transpose(0, 3, 1, 2), "action_masks": np.ones((50, 2), np.float32)}
    np.testing.assert_array_equal(run(opened(data), feed, "deterministic_discrete_actions")[:, 0], policy.act(seen).action)


def test_a_policy_of_action_values_is_exported_too() -> None:
    torch.manual_seed(0)
    policy = Policy(spaces.Box(-1, 1, (4,)), spaces.Discrete(3), NetworkConfig(), kind=VALUES)
    data = ml_agents.export_policy(policy)
    assert ml_agents_parity.verify(policy, data).passed


@pytest.mark.parametrize(
    ("observation", "action", "named"),
    [
        (spaces.Discrete(5), spaces.Discrete(2), "The observation is Discrete"),
        (spaces.Dict({"kind": spaces.Discrete(5)}), spaces.Discrete(2), "observation kind is Discrete"),
        (spaces.Box(-1, 1, (4,)), spaces.MultiBinary(3), "action is MultiBinary"),
    ],
)
def test_what_ml_agents_does_not_have_is_named(observation: gym.Space[Any], action: gym.Space[Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ml_agents.export_policy(Policy(observation, action))


@pytest.mark.parametrize("name", ["deterministic_continuous_actions", "deterministic_discrete_actions", "recurrent_out"])
def test_a_file_that_decides_otherwise_does_not_pass(name: str) -> None:
    policy, data = made("three sensors, hybrid, LSTM")
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        for i, output in enumerate(node.output):
            if output == name:
                node.output[i] = "before"
    (output,) = (item for item in model.graph.output if item.name == name)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((), dtype), "one"))
    model.graph.node.append(onnx.helper.make_node("Add", ["before", "one"], [name]))
    assert not ml_agents_parity.verify(policy, model.SerializeToString()).passed


def test_a_file_with_another_version_number_does_not_pass() -> None:
    policy, data = made("vector, continuous")
    model = onnx.load_from_string(data)
    for item in model.graph.initializer:
        if item.name == "version_number":
            item.CopyFrom(onnx.numpy_helper.from_array(np.array([2], np.float32), item.name))
    assert ml_agents_parity.verify(policy, model.SerializeToString()).reasons == ["version_number is [2.0], not [3]."]


def test_a_file_for_unity_is_not_taken_for_one_of_ludus() -> None:
    with pytest.raises(UsageError, match="not a policy"):
        OnnxPolicy(made("vector, continuous")[1])
