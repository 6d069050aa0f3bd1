"""The messages of ML-Agents' protocol, from the player's side."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.unity_player import wire

METHOD = "/communicator_objects.UnityToExternalProto/Exchange"
OK, STOPPED = 200, 400
STEP, RESET, QUIT = 0, 1, 2
RAW, PNG = 0, 1
VARIABLE_SIZE = 4  # property of a dimension

ENGINE_CONFIGURATION = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
ENVIRONMENT_PARAMETERS = uuid.UUID("534c891e-810f-11ea-a9d0-822485860400")
STATISTICS = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")


@dataclass(frozen=True)
class Behaviour:
    name: str
    """With its team, for example `Soccer?team=1`."""
    continuous: int = 0
    branches: tuple[int, ...] = ()

    def encode_old(self) -> bytes:
        """As players before API 1.3 do, which have numbers or branches."""
        sizes = wire.integers(3, self.branches or (self.continuous,))
        return sizes + wire.integer(6, int(not self.branches)) + wire.text(7, self.name) + wire.integer(8, 1)

    def encode(self) -> bytes:
        actions = wire.integer(1, self.continuous) + wire.integer(2, len(self.branches))
        if self.branches:
            actions += wire.integers(3, self.branches)
        return wire.text(7, self.name) + wire.integer(8, 1) + wire.block(9, actions)


class Sensor:
    """Encodes the observations of one sensor; the parts that never change are encoded once."""

    def __init__(self, name: str, shape: Sequence[int], properties: Sequence[int] = (), mapping: Sequence[int] = ()) -> None:
        self._head = wire.integers(1, shape) + wire.text(8, name)
        if properties:
            self._head += wire.integers(6, properties)
        if mapping:
            self._head += wire.integers(5, mapping)
        self._floats: dict[int, tuple[struct.Struct, bytes]] = {}

    def floats(self, values: Sequence[float]) -> bytes:
        count = len(values)
        if count not in self._floats:
            data = wire.varint(1 << 3 | wire.BYTES) + wire.varint(4 * count)
            block = wire.varint(4 << 3 | wire.BYTES) + wire.varint(len(data) + 4 * count)
            self._floats[count] = struct.Struct(f"<{count}f"), self._head + block + data
        packer, head = self._floats[count]
        return head + packer.pack(*values)

    def pictures(self, files: bytes) -> bytes:
        """One or several PNG files, one behind the other."""
        return self._head + wire.integer(2, PNG) + wire.block(3, files)


class Action(NamedTuple):
    continuous: Sequence[float] = ()
    discrete: Sequence[int] = ()


@dataclass
class AgentInfo:
    """What the player tells about one agent."""

    id: int
    observations: Sequence[bytes]
    reward: float = 0.0
    done: bool = False
    interrupted: bool = False
    mask: Sequence[bool] = ()
    """True: the action must not be chosen. All branches one behind the other."""
    group: int = 0
    group_reward: float = 0.0

    def encode(self) -> bytes:
        parts = [_REWARD.pack(0x3D, self.reward)] if self.reward else []
        if self.done:
            parts.append(b"\x40\x01")
        if self.interrupted:
            parts.append(b"\x48\x01")
        parts.append(b"\x50" + wire.varint(self.id))
        if self.mask:
            parts.append(wire.block(11, bytes(self.mask)))
        parts += [wire.block(13, observation) for observation in self.observations]
        if self.group:
            parts.append(b"\x70" + wire.varint(self.group))
        if self.group_reward:
            parts.append(_REWARD.pack(0x7D, self.group_reward))
        return b"".join(parts)


_REWARD = struct.Struct("<Bf")  # key and value of a float

Infos = Mapping[str, Sequence[AgentInfo]]
"""Name of a behaviour → its agents that finished or want a decision."""


@dataclass
class Orders:
    """What Python answers."""

    command: int = STEP
    stopped: bool = False
    actions: dict[str, list[Action]] = field(default_factory=dict)
    side_channel: bytes = b""


def hello(version: str, package_version: str = "3.0.0") -> bytes:
    capabilities = b"".join(wire.integer(number, 1) for number in range(1, 8))
    first = wire.text(1, "stand-in") + wire.text(2, version) + wire.text(7, package_version) + wire.block(8, capabilities)
    return message(wire.block(2, first))


def step(infos: Infos, new: Sequence[Behaviour] = (), side_channel: bytes = b"", *, old: bool = False) -> bytes:
    """`new`: behaviours that Python does not know yet. `old`: as players before API 1.3 do."""
    lists = [wire.entry(2, name, b"".join([wire.block(1, info.encode()) for info in agents])) for name, agents in infos.items()]
    if side_channel:
        lists.append(wire.block(3, side_channel))
    output = wire.block(1, b"".join(lists))
    if new:
        output += wire.block(
            2, b"".join(wire.block(5, behaviour.encode_old() if old else behaviour.encode()) for behaviour in new)
        )
    return message(output)


def message(output: bytes = b"") -> bytes:
    head = wire.block(1, wire.integer(1, OK))
    return head + wire.block(2, output) if output else head


def read_hello(answer: bytes) -> dict[str, int | str]:
    """Seed, versions and number of areas from the first answer."""
    found: dict[str, int | str] = {}
    names = {1: "seed", 2: "communication_version", 3: "package_version", 5: "num_areas"}
    for number, value in wire.fields(_part(_part(answer, 3), 2)):
        if number in names:
            found[names[number]] = value if isinstance(value, int) else value.decode()
    return found


def read_orders(answer: bytes, *, actions: bool = True, old: bool = False) -> Orders:
    """`old`: with the actions that players before API 1.3 read."""
    orders = Orders()
    for number, value in wire.fields(answer):
        if number == 1 and isinstance(value, bytes):
            orders.stopped = any(value != OK for number, value in wire.fields(value) if number == 1)
        elif number == 3 and isinstance(value, bytes):
            _read_input(orders, _part(value, 1), read_actions=actions, old=old)
    return orders


def _read_input(orders: Orders, received: bytes, *, read_actions: bool, old: bool) -> None:
    for number, value in wire.fields(received):
        if number == 4 and isinstance(value, int):
            orders.command = value
        elif number == 5 and isinstance(value, bytes):
            orders.side_channel = value
        elif number == 1 and isinstance(value, bytes) and read_actions:
            name, actions = "", []
            for part, content in wire.fields(value):
                assert isinstance(content, bytes)
                if part == 1:
                    name = content.decode()
                else:
                    read = _read_old_action if old else _read_action
                    actions = [read(action) for _, action in wire.fields(content) if isinstance(action, bytes)]
            orders.actions[name] = actions


def _read_action(received: bytes) -> Action:
    continuous: Sequence[float] = ()
    discrete: Sequence[int] = ()
    for number, value in wire.fields(received):
        if number == 6:
            assert isinstance(value, bytes)
            continuous = wire.read_reals(value)
        elif number == 7:
            assert isinstance(value, bytes)
            discrete = wire.read_integers(value)
    return Action(continuous, discrete)


def _read_old_action(received: bytes) -> Action:
    numbers = next(
        (wire.read_reals(value) for number, value in wire.fields(received) if number == 1 and isinstance(value, bytes)), ()
    )
    return Action(numbers, [int(number) for number in numbers])


def _part(received: bytes, wanted: int) -> bytes:
    return next((value for number, value in wire.fields(received) if number == wanted and isinstance(value, bytes)), b"")


# -- side channels --------------------------------------------------------------------------------------------------------------


def side_message(channel: uuid.UUID, payload: bytes) -> bytes:
    return channel.bytes_le + struct.pack("<i", len(payload)) + payload


def statistic(name: str, value: float, aggregation: int = 0) -> bytes:
    """A value for the metrics. Aggregation: 0 average, 1 most recent, 2 sum, 3 histogram."""
    return side_message(STATISTICS, _string(name) + struct.pack("<fi", value, aggregation))


def _string(value: str) -> bytes:
    encoded = value.encode("ascii")
    return struct.pack("<i", len(encoded)) + encoded


def read_side_messages(received: bytes) -> list[tuple[uuid.UUID, bytes]]:
    found, at = [], 0
    while at < len(received):
        channel, (size,) = uuid.UUID(bytes_le=received[at : at + 16]), struct.unpack_from("<i", received, at + 16)
        found.append((channel, received[at + 20 : at + 20 + size]))
        at += 20 + size
    return found


ENGINE_SETTINGS = ("screen_resolution", "quality_level", "time_scale", "target_frame_rate", "capture_frame_rate")


def read_engine_configuration(payload: bytes) -> tuple[str, Sequence[int | float]]:
    """Name of the setting and its values."""
    (kind,) = struct.unpack_from("<i", payload)
    layout = {0: "<ii", 2: "<f"}.get(kind, "<i")
    return ENGINE_SETTINGS[kind], struct.unpack_from(layout, payload, 4)


def read_environment_parameter(payload: bytes) -> tuple[str, float] | None:
    """Name and value; None for parameters that are drawn at random."""
    (size,) = struct.unpack_from("<i", payload)
    (kind,) = struct.unpack_from("<i", payload, 4 + size)
    if kind != 0:
        return None
    (value,) = struct.unpack_from("<f", payload, 8 + size)
    return payload[4 : 4 + size].decode("ascii"), value
