"""Export of a policy to the ONNX layout that Unity ML-Agents (version 3 of its models) runs inside a game.

Names, types and shapes are those of the published trainer (`model_serialization.py`) and of the checks in
`com.unity.ml-agents` (`SentisModelParamLoader`). Unity reads the constants either as named initialisers (Sentis 1) or as outputs of a
run on zeros (Inference Engine), so each constant is an initialiser that is also an output. Random numbers are drawn inside the graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import ludus
from ludus.core import spaces
from ludus.core.spaces import ArraySpec, array_spec
from ludus.core.tree import Array, Tree, leaves
from ludus.errors import UsageError
from ludus.models.distributions import EpsilonGreedy
from ludus.models.export import onnx_export
from ludus.models.export.onnx_export import EXAMPLE_ROWS, Feed, for_environment, require_onnx, unflatten_tree
from ludus.models.image_encoder import channels_last
from ludus.models.policy import Policy

OPSET = 15
"""The newest opset that every version of Sentis reads."""
MODEL_VERSION = 3
"""`ModelApiVersion.MLAgents2_0`: inputs named by sensor, recurrent memory as a tensor."""
LAYOUT = "ml-agents"
_ORDER = (
    "version_number",
    "memory_size",
    "continuous_actions",
    "continuous_action_output_shape",
    "deterministic_continuous_actions",
    "discrete_actions",
    "discrete_action_output_shape",
    "deterministic_discrete_actions",
    "recurrent_out",
)
_BYTE = 255.0
_TINY = 1e-20  # a uniform number of 0 has no logarithm
_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True)
class Sensor:
    """One observation of a policy as an input of the graph."""

    name: str
    path: str
    """Path of the leaf in the observation; empty if the observation is one array."""
    space: gym.spaces.Box | gym.spaces.MultiBinary
    factor: float
    """Factor from the number that Unity writes to the number that the network reads."""
    channels_last: bool
    """Whether the policy has the channels of an image last."""

    @property
    def image(self) -> bool:
        return len(self.space.shape or ()) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in Unity: images are [channels, height, width]."""
        shape = self.space.shape or (1,)
        return (shape[2], shape[0], shape[1]) if self.channels_last else shape

    def to_unity(self, observation: Array) -> Array:
        """Return observations [N, …] of the policy as Unity writes them: float32, images with bytes from 0 to 1."""
        rows = observation.astype(np.float32)
        if self.channels_last:
            rows = rows.transpose(0, 3, 1, 2)
        if self.image and self.space.dtype == np.uint8:
            rows = rows / np.float32(_BYTE)
        return np.ascontiguousarray(rows).reshape(-1, *self.shape)

    def to_network(self, value: Tensor) -> Tensor:
        if self.channels_last:
            value = value.permute(0, 2, 3, 1)
        value = value if self.factor == 1.0 else value * self.factor
        return value.reshape(-1, *(self.space.shape or ()))


def sensors_of(policy: Policy, images_channels_last: bool | None = None) -> list[Sensor]:
    """Return the observations of a policy in the order of Unity's sensors: by the number at the end of their keys, if all have one.

    `images_channels_last`: the layout of images in the policy; None: judged by their shapes. Raises UsageError for observations that
    no sensor of Unity writes.
    """
    found = spaces.space_leaves(policy.observation_space)
    numbers = [_NUMBER.search(path) for path, _ in found]
    if len(found) > 1 and all(numbers):
        found.sort(key=lambda item: int(_NUMBER.search(item[0])[1]))  # type: ignore[index]  # checked above; obs_10 follows obs_9
    divisors = dict(policy.config.byte_scales)
    return [_sensor(i, path, space, divisors, images_channels_last) for i, (path, space) in enumerate(found)]


def _sensor(index: int, path: str, space: gym.Space[Any], divisors: Mapping[str, float], last: bool | None) -> Sensor:
    if not isinstance(space, (gym.spaces.Box, gym.spaces.MultiBinary)) or len(space.shape or ()) > 3:
        shown = f"observation {path}" if path else "The observation"
        raise UsageError(
            f"{shown} is {space}; sensors of ML-Agents write arrays of numbers with one to three dimensions.",
            "Use --format onnx for this agent.",
        )
    factor = 1.0
    if space.dtype == np.uint8:
        factor = (_BYTE if len(space.shape) == 3 else 1.0) / divisors.get(path, _BYTE)
    is_last = len(space.shape) == 3 and (channels_last(space.shape) if last is None else last)
    return Sensor(f"obs_{index}", path, space, factor, is_last)


@dataclass(frozen=True)
class Actions:
    """The action space of a policy as ML-Agents sees it: numbers, then branches."""

    continuous: int
    branches: tuple[int, ...]


def actions_of(space: gym.Space[Any]) -> Actions:
    """Raises UsageError for actions that ML-Agents does not have."""
    continuous, branches = 0, list[int]()
    for path, leaf in spaces.space_leaves(space, "action"):
        if isinstance(leaf, gym.spaces.Box):
            continuous += math.prod(leaf.shape)
        elif isinstance(leaf, gym.spaces.Discrete):
            branches.append(int(leaf.n))
        elif isinstance(leaf, gym.spaces.MultiDiscrete):
            branches += [int(n) for n in leaf.nvec.reshape(-1)]
        else:
            raise UsageError(
                f"{path} is {leaf}; ML-Agents has continuous actions and branches of discrete ones.",
                "Train with MultiDiscrete([2, 2, …]) instead of MultiBinary, or use --format onnx.",
            )
    return Actions(continuous, tuple(branches))


# -- the graph ----------------------------------------------------------------------------------------------------------


class _MlAgentsStep(nn.Module):
    """One decision for N rows, from Unity's tensors to Unity's tensors."""

    def __init__(self, policy: Policy, sensors: list[Sensor]) -> None:
        super().__init__()
        self.network = policy.network
        self.distribution = policy.distribution  # the attribute name is part of its weight names
        self._space, self._sensors = policy.action_space, sensors
        self._observation = array_spec(policy.observation_space)
        self._cells = [math.prod(spec.shape) for spec in policy.state_spec()]
        self._states = [spec.shape for spec in policy.state_spec()]

    def forward(self, seen: tuple[Tensor, ...], masks: Tensor | None, memory: Tensor | None) -> dict[str, Tensor]:
        values = {sensor.path: sensor.to_network(value) for sensor, value in zip(self._sensors, seen, strict=True)}
        observation = unflatten_tree(self._observation, (values[path] for path, _ in leaves(self._observation)))
        logits, _, after = self.network.decide(observation, self._split(memory))
        allowed = None if masks is None else masks > 0.5
        best, _ = self.distribution.sample(logits, allowed, None)
        sampled, _ = self.distribution.sample(logits, allowed, self._noise(logits))
        outputs = self._outputs(sampled, "") | self._outputs(best, "deterministic_")
        if after:
            outputs["recurrent_out"] = torch.cat([state.flatten(1) for state in after], dim=-1).unsqueeze(1)
        return outputs

    def _split(self, memory: Tensor | None) -> tuple[Tensor, ...]:
        if memory is None:
            return ()
        parts = memory.squeeze(1).split(self._cells, dim=-1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self._states, strict=True))

    def _noise(self, logits: Tensor) -> Tensor:
        if isinstance(self.distribution, EpsilonGreedy):
            return torch.rand_like(logits[..., :1].expand(-1, self.distribution.noise_size))
        return torch.cat([_draw_noise(leaf, logits) for _, leaf in spaces.space_leaves(self._space)], dim=-1)

    def _outputs(self, chosen: Tree, prefix: str) -> dict[str, Tensor]:
        """Numbers are those that the environment got in training; branches count from 0."""
        numbers, picks = list[Tensor](), list[Tensor]()
        for (_, pick), (_, leaf) in zip(leaves(chosen), spaces.space_leaves(self._space), strict=True):
            if isinstance(leaf, gym.spaces.Box):
                numbers.append(for_environment(_in_float32(leaf), pick).reshape(-1, math.prod(leaf.shape)))
            else:
                picks.append(pick.reshape(-1, _branches_of(leaf)))
        found = {}
        if numbers:
            found[f"{prefix}continuous_actions"] = torch.cat(numbers, dim=-1)
        if picks:
            found[f"{prefix}discrete_actions"] = torch.cat(picks, dim=-1)
        return found


def _in_float32(box: gym.spaces.Box) -> gym.spaces.Box:
    """Unity's inference has no float64."""
    return gym.spaces.Box(box.low.astype(np.float32), box.high.astype(np.float32))


def _branches_of(leaf: gym.Space[Any]) -> int:
    return leaf.nvec.size if isinstance(leaf, gym.spaces.MultiDiscrete) else 1


def _draw_noise(leaf: gym.Space[Any], logits: Tensor) -> Tensor:
    """Standard noise of one part of the action, drawn by the graph: Gumbel for choices, normal for numbers."""
    if isinstance(leaf, gym.spaces.Box):
        return torch.randn_like(logits[..., :1].expand(-1, math.prod(leaf.shape)))
    options = int(leaf.n) if isinstance(leaf, gym.spaces.Discrete) else int(leaf.nvec.sum())  # type: ignore[attr-defined]
    uniform = torch.rand_like(logits[..., :1].expand(-1, options))
    exponential = -uniform.clamp(min=_TINY).log()
    return -exponential.clamp(min=_TINY).log()


def export_policy(
    policy: Policy,
    sensors: list[Sensor] | None = None,
    *,
    opset: int = OPSET,
    name: str = "model",
    version: int = 0,
    trained: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a policy as the bytes of an ONNX file for ML-Agents; `sensors`: of `sensors_of`. Raises UsageError, MissingExtra."""
    sensors, actions = sensors or sensors_of(policy), actions_of(policy.action_space)
    memory = memory_size(policy)
    inputs = _inputs(sensors, actions, memory)

    def arguments(flat: Iterator[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seen = tuple(next(flat) for _ in sensors)
        return (seen, next(flat) if actions.branches else None, next(flat) if memory else None), {}

    facts = {
        "kind": LAYOUT,
        "model": name,
        "version": version,
        "sensors": {sensor.name: sensor.path for sensor in sensors},
        "observation_space": spaces.to_json(policy.observation_space),
        "action_space": spaces.to_json(policy.action_space),
        "decides_by": policy.kind,
        "trained": dict(trained or {}),
    }
    example = {key: np.ones((EXAMPLE_ROWS, *spec.shape), spec.dtype) for key, spec in inputs.items()}
    data = onnx_export.trace(_MlAgentsStep(policy, sensors), example, arguments, "", opset, facts)
    return _with_constants(data, actions, memory)


def memory_size(policy: Policy) -> int:
    """Return the number of values in `recurrent_in`."""
    return sum(math.prod(spec.shape) for spec in policy.state_spec())


def _inputs(sensors: list[Sensor], actions: Actions, memory: int) -> dict[str, ArraySpec]:
    """Inputs by name, in order; shapes are per row. Like the trainer of ML-Agents, leaves out what the graph does not use."""
    number = np.dtype(np.float32)
    inputs = {sensor.name: ArraySpec(sensor.shape, number) for sensor in sensors}
    if actions.branches:
        inputs["action_masks"] = ArraySpec((sum(actions.branches),), number)
    if memory:
        inputs["recurrent_in"] = ArraySpec((1, memory), number)
    return inputs


def _with_constants(data: bytes, actions: Actions, memory: int) -> bytes:
    """Add the constants that Unity reads, and put the outputs into the order of the trainer of ML-Agents."""
    onnx, _ = require_onnx("export to ONNX")
    model = onnx.load_from_string(data)
    constants: dict[str, list[Any]] = {"version_number": [MODEL_VERSION], "memory_size": [memory]}
    if actions.continuous:
        constants["continuous_action_output_shape"] = [actions.continuous]
    if actions.branches:
        constants["discrete_action_output_shape"] = [list(actions.branches)]
    outputs = {item.name: item for item in model.graph.output}
    for key, value in constants.items():
        numbers = np.array(value, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, key))
        outputs[key] = onnx.helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, numbers.shape)
    ordered = [outputs[key] for key in _ORDER if key in outputs]
    model.graph.ClearField("output")
    model.graph.output.extend(ordered)
    model.producer_name, model.producer_version = "ludus", ludus.__version__
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def feed_of(policy: Policy, sensors: list[Sensor], observation: Tree, mask: Array | None, state: tuple[Array, ...]) -> Feed:
    """Return the inputs of the graph for observations [N, …] of the policy, as Unity would write them."""
    given = dict(leaves(observation))
    rows = len(next(iter(given.values())))
    feed = {sensor.name: sensor.to_unity(given[sensor.path]) for sensor in sensors}
    branches = actions_of(policy.action_space).branches
    if branches:
        feed["action_masks"] = np.ones((rows, sum(branches)), np.float32) if mask is None else mask.astype(np.float32)
    if state:
        feed["recurrent_in"] = np.concatenate([part.reshape(rows, 1, -1) for part in state], axis=-1)
    return feed
