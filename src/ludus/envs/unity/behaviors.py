"""Behaviours of a scene: their spaces, and the conversion of observations, masks and actions."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import squares_are_finite
from ludus.core.tree import Array, Tree
from ludus.core.types import Bools
from ludus.envs.unity.messages import PNG
from ludus.errors import EnvironmentFault

CONTINUOUS, DISCRETE = "continuous", "discrete"
"""Parts of an action with both."""

_TRANSLATIONAL = 2  # dimension property: the height or width of an image
_PNG_HEADER = b"\x89PNG\r\n\x1a\n"
_MOST_CHANNELS = 16


@dataclass(frozen=True)
class Sensor:
    """One observation of a behaviour."""

    name: str
    shape: tuple[int, ...]
    """As the player sends it."""
    is_png: bool = False
    channels_first: bool = False
    """Of images: [C, H, W], as players since version 3 of the Unity package send them; before it was [H, W, C]."""

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    def space(self) -> gym.spaces.Box:
        """Images have their channels last; those sent as PNG have bytes."""
        shape = self.shape
        if self.is_image and self.channels_first:
            shape = (*shape[1:], shape[0])
        return gym.spaces.Box(0, 255, shape, np.uint8) if self.is_png else gym.spaces.Box(-np.inf, np.inf, shape, np.float32)

    def read(self, message: Any) -> Array:
        """Raises ValueError."""
        if message.compression_type == PNG:
            if not self.is_png:
                raise ValueError("it is compressed, and was not before")
            image = _read_png(message.compressed_data, message.compressed_channel_mapping, self._channels)
            expected = self.space().shape
            if image.shape != expected:
                raise ValueError(f"its PNG has the shape {list(image.shape)}, {list(expected)} was expected")
            return image
        if self.is_png:
            raise ValueError("it is not compressed, and was before")
        array = _read_floats(message.float_data)
        try:
            array = array.reshape(self.shape)
        except ValueError:
            raise ValueError(f"it has {array.size} numbers, and its shape is {list(self.shape)}") from None
        if not squares_are_finite(array) and not np.isfinite(array).all():
            raise ValueError(f"it contains {array[~np.isfinite(array)][0]}")
        if self.is_image and self.channels_first:
            array = np.ascontiguousarray(np.moveaxis(array, 0, -1))
        return array

    @property
    def _channels(self) -> int:
        return self.shape[0] if self.channels_first else self.shape[-1]


class Behavior:
    """A behaviour with its full name, such as `Striker?team=1`. The agents of all its copies have the same spaces."""

    def __init__(self, full_name: str, sensors: Sequence[Sensor], continuous: int, branches: Sequence[int]) -> None:
        self.full_name = full_name
        self.name, _, query = full_name.partition("?")
        team = query.partition("team=")[2]
        self.team = int(team) if team.isdigit() else 0
        self.sensors = tuple(sensors)
        self.continuous, self.branches = continuous, tuple(branches)
        self.observation_space = self._observation_space()
        self.action_space = self._action_space()
        self._mask_size = sum(self.branches)
        self._allowed: Bools = np.ones(self._mask_size, np.bool_)

    @classmethod
    def of(cls, parameters: Any, agent: Any) -> Behavior:
        """From BrainParameters and the first agent that was sent. Raises EnvironmentFault."""
        spec = parameters.action_spec
        continuous, branches = spec.num_continuous_actions, tuple(spec.discrete_branch_sizes)
        if not continuous and not branches:  # a player before API 1.3
            sizes = tuple(parameters.vector_action_size_deprecated)
            continuous, branches = (sum(sizes), ()) if parameters.vector_action_space_type_deprecated == 1 else (0, sizes)
        name = parameters.brain_name
        if (not continuous and not branches) or any(size < 1 for size in branches):
            raise EnvironmentFault(
                f"The behaviour {name!r} has {continuous} continuous actions and discrete branches {list(branches)}.",
                "Give it actions in its Behavior Parameters.",
            )
        if not agent.observations:
            raise EnvironmentFault(f"The behaviour {name!r} has no observations.", "Give its agents a sensor.")
        return cls(name, [_sensor_of(each) for each in agent.observations], continuous, branches)

    def _observation_space(self) -> gym.Space[Any]:
        if len(self.sensors) == 1:
            return self.sensors[0].space()
        return gym.spaces.Dict({f"obs_{number}": sensor.space() for number, sensor in enumerate(self.sensors)})

    def _action_space(self) -> gym.Space[Any]:
        continuous = gym.spaces.Box(-1.0, 1.0, (self.continuous,), np.float32)
        if not self.branches:
            return continuous
        one = len(self.branches) == 1
        discrete: Any = gym.spaces.Discrete(self.branches[0]) if one else gym.spaces.MultiDiscrete(list(self.branches))
        return gym.spaces.Dict({CONTINUOUS: continuous, DISCRETE: discrete}) if self.continuous else discrete

    def same_spaces(self, other: Behavior) -> bool:
        return self.observation_space == other.observation_space and self.action_space == other.action_space

    def observations(self, agents: Sequence[Any]) -> list[Tree]:
        """The observations in some AgentInfos. Raises EnvironmentFault."""
        if len(self.sensors) == 1 and len(agents) > 1 and (rows := self._read_together(agents)) is not None:
            return rows
        return [self.observation(agent) for agent in agents]

    def _read_together(self, agents: Sequence[Any]) -> list[Tree] | None:
        """Rows of one array, which costs a third of an array for each agent; None if they have to be read one by one."""
        (sensor,) = self.sensors
        if sensor.is_image:
            return None
        count = math.prod(sensor.shape)
        parts = []
        for agent in agents:
            given = agent.observations
            if len(given) != 1 or given[0].compression_type == PNG:
                return None
            numbers = given[0].float_data
            if len(numbers.data) != count:
                return None
            parts.append(numbers.SerializeToString()[-4 * count :])
        block = np.frombuffer(bytearray(b"".join(parts)), "<f4").astype(np.float32, copy=False)
        if not count or not squares_are_finite(block):
            return None
        return list(block.reshape(len(agents), *sensor.shape))

    def observation(self, agent: Any) -> Tree:
        """The observation in an AgentInfo. Raises EnvironmentFault."""
        given = agent.observations
        if len(given) != len(self.sensors):
            raise self._fault(agent, f"has {len(given)} observations, {len(self.sensors)} were expected")
        if len(self.sensors) == 1:
            return self._read(agent, 0, given[0])
        return {f"obs_{number}": self._read(agent, number, each) for number, each in enumerate(given)}

    def _read(self, agent: Any, number: int, message: Any) -> Array:
        sensor = self.sensors[number]
        try:
            if sensor.is_image and tuple(message.shape) != sensor.shape:
                raise ValueError(f"it has the shape {list(message.shape)}, {list(sensor.shape)} was expected")
            return sensor.read(message)
        except ValueError as error:
            raise self._fault(agent, f"sent observation {number} ({sensor.name or 'without a name'}): {error}") from error

    def mask(self, agent: Any) -> Bools | None:
        """Options that the agent may choose, of all branches one after the other; None: it has no discrete actions."""
        if not self.branches:
            return None
        forbidden = agent.action_mask
        if not forbidden:
            return self._allowed
        if len(forbidden) != self._mask_size:
            raise self._fault(
                agent, f"sent an action mask of {len(forbidden)} entries; its branches have {self._mask_size} options"
            )
        mask: Bools = ~np.fromiter(forbidden, np.bool_, self._mask_size)
        at = 0
        for number, size in enumerate(self.branches):
            if not mask[at : at + size].any():
                raise self._fault(agent, f"forbids every action of branch {number}")
            at += size
        return mask

    def reward(self, agent: Any, limit: float) -> float:
        """The reward of the agent and of its group. Raises EnvironmentFault."""
        reward = float(agent.reward + agent.group_reward)
        if not abs(reward) <= limit:  # also rejects NaN
            raise self._fault(agent, f"has the reward {agent.reward} and the group reward {agent.group_reward}")
        return reward

    def add_action(self, actions: Any, action: Tree | None, *, deprecated: bool) -> None:
        """Append the action of one agent to a ListAgentActionProto; None: zeros. `deprecated`: for players before API 1.3."""
        continuous: list[float] = []
        discrete: list[int] = []
        if action is None:
            continuous, discrete = [0.0] * self.continuous, [0] * len(self.branches)
        elif not self.branches:
            continuous = _numbers(action)
        elif not self.continuous:
            discrete = _numbers(action)
        else:
            continuous, discrete = _numbers(action[CONTINUOUS]), _numbers(action[DISCRETE])
        added = actions.value.add(continuous_actions=continuous, discrete_actions=discrete)
        if deprecated:
            added.vector_actions_deprecated.extend([*continuous, *discrete])

    def _fault(self, agent: Any, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"The agent {agent.id} of {self.full_name!r} {what}.")


def _numbers(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.tolist()  # type: ignore[no-any-return]
    numbers: list[Any] = np.asarray(values).reshape(-1).tolist()
    return numbers


def _sensor_of(message: Any) -> Sensor:
    shape = tuple(message.shape)
    is_png = message.compression_type == PNG
    return Sensor(message.name, shape, is_png, len(shape) == 3 and _is_channels_first(shape, tuple(message.dimension_properties)))


def _is_channels_first(shape: tuple[int, ...], properties: tuple[int, ...]) -> bool:
    if len(properties) == 3 and (properties[0] == _TRANSLATIONAL) != (properties[2] == _TRANSLATIONAL):
        return properties[2] == _TRANSLATIONAL
    return shape[0] <= _MOST_CHANNELS and not shape[2] < shape[0]


def _read_floats(message: Any) -> Array:
    """The numbers of a FloatData as a new array.

    Its encoding is a tag, the number of bytes as a varint and the numbers: an array of them costs a thousandth of a list.
    """
    count = len(message.data)
    if not count:
        return np.zeros(0, np.float32)
    data = message.SerializeToString()
    return np.frombuffer(data, "<f4", count, len(data) - 4 * count).astype(np.float32)


def _read_png(data: bytes, mapping: Sequence[int], channels: int) -> Array:
    """[H, W, C] of one or more PNG files of three channels each.

    `mapping`: channel of the observation to which each channel of the files belongs, of which the mean is taken; -1: none.
    """
    starts = _positions(data, _PNG_HEADER)
    if not starts or starts[0] != 0:
        raise ValueError("it does not begin with a PNG file")
    files = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    images = [_decode_png(file) for file in files]
    if len({image.shape[:2] for image in images}) > 1:
        raise ValueError("its PNG files differ in size")
    if len(mapping):
        planes = np.concatenate(images, axis=-1)
        wanted = np.asarray(mapping)
        if len(wanted) != planes.shape[-1] or set(wanted[wanted >= 0].tolist()) != set(range(channels)):
            raise ValueError(
                f"its channel mapping is {list(mapping)}, with {planes.shape[-1]} channels sent and {channels} wanted"
            )
        if np.array_equal(wanted, np.arange(channels)):
            return planes
        return np.stack([_mean(planes[..., wanted == channel]) for channel in range(channels)], axis=-1)
    if channels == 1:
        return _mean(images[0])[..., None]
    return np.ascontiguousarray(np.concatenate(images, axis=-1)[..., :channels])


def _mean(planes: Array) -> Array:
    if planes.shape[-1] == 1 or all(np.array_equal(planes[..., 0], planes[..., other]) for other in range(1, planes.shape[-1])):
        return np.ascontiguousarray(planes[..., 0])
    mean: Array = np.rint(planes.mean(axis=-1)).astype(np.uint8)
    return mean


def _positions(data: bytes, pattern: bytes) -> list[int]:
    found, at = [], data.find(pattern)
    while at >= 0:
        found.append(at)
        at = data.find(pattern, at + len(pattern))
    return found


def _decode_png(data: bytes) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            return np.asarray(image.convert("RGB"), np.uint8)
    except (OSError, UnidentifiedImageError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"its PNG cannot be decoded: {error}") from error
