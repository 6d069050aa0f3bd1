"""Side channels: messages between trainer and player beside observations and actions.

    class Weather(SideChannel):
        channel_id = UUID("5f4f9b4a-…")

        def receive(self, data: bytes) -> None:
            self.statistics["weather/wind"] = MessageReader(data).read_float32()

`env_config: {side_channels: [my_game:Weather]}` registers it. All numbers are little-endian; the layout of messages is that of the
C# classes IncomingMessage and OutgoingMessage.
"""

from __future__ import annotations

import inspect
import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from uuid import UUID

from ludus.core.plugins import import_object
from ludus.envs.faults import construction_errors
from ludus.envs.unity.unity_config import (
    GaussianSampler,
    MultirangeSampler,
    UniformSampler,
    UnityConfig,
)
from ludus.errors import ConfigError, EnvironmentFault

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<16si")
_AVERAGE, _MOST_RECENT, _SUM = 0, 1, 2


class MessageWriter:
    """Writes the values of a message one after the other; `bytes(writer)` is the message."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bytes__(self) -> bytes:
        return bytes(self._data)

    def write_bool(self, value: bool) -> MessageWriter:
        return self._write("<?", value)

    def write_int32(self, value: int) -> MessageWriter:
        return self._write("<i", value)

    def write_float32(self, value: float) -> MessageWriter:
        return self._write("<f", value)

    def write_float32_list(self, values: Sequence[float]) -> MessageWriter:
        return self._write(f"<i{len(values)}f", len(values), *values)

    def write_string(self, text: str) -> MessageWriter:
        encoded = text.encode("ascii")
        return self._write(f"<i{len(encoded)}s", len(encoded), encoded)

    def _write(self, layout: str, *values: Any) -> MessageWriter:
        self._data += struct.pack(layout, *values)
        return self


class MessageReader:
    """Reads the values of a message in the order in which they were written. Raises ValueError beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_bool(self) -> bool:
        return bool(self._read("<?")[0])

    def read_int32(self) -> int:
        return int(self._read("<i")[0])

    def read_float32(self) -> float:
        return float(self._read("<f")[0])

    def read_float32_list(self) -> list[float]:
        return list(self._read(f"<{self._length(4)}f"))

    def read_string(self) -> str:
        return bytes(self._read(f"<{self._length(1)}s")[0]).decode("ascii")

    def _length(self, size: int) -> int:
        length = self.read_int32()
        if not 0 <= length * size <= len(self._data) - self._at:
            raise ValueError(f"a length of {length} at byte {self._at - 4} of {len(self._data)}")
        return length

    def _read(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        if self._at + size > len(self._data):
            raise ValueError(f"it ends after {len(self._data)} bytes, {size} more were expected at byte {self._at}")
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += size
        return values


class SideChannel:
    """One channel, with the id that the player's class has. Base class."""

    channel_id: UUID

    def __init__(self) -> None:
        self.statistics: dict[str, float] = {}
        """Name → value, reported with the metrics of the run as `unity/NAME`."""
        self._outgoing: list[bytes] = []

    def send(self, message: bytes | MessageWriter) -> None:
        """Queue a message for the next step or reset."""
        self._outgoing.append(bytes(message))

    def receive(self, data: bytes) -> None:
        """Called with every message of the player, during a step or reset."""
        raise ValueError("it takes no messages")

    def take_outgoing(self) -> list[bytes]:
        queued, self._outgoing = self._outgoing, []
        return queued


class EngineConfigurationChannel(SideChannel):
    channel_id = UUID("e951342c-4f7e-11ea-b238-784f4387d1f7")
    _SCREEN, _QUALITY, _TIME_SCALE, _TARGET_FRAME_RATE, _CAPTURE_FRAME_RATE = range(5)

    def configure(self, config: UnityConfig) -> None:
        new = MessageWriter
        self.send(new().write_int32(self._SCREEN).write_int32(config.width).write_int32(config.height))
        self.send(new().write_int32(self._QUALITY).write_int32(config.quality_level))
        self.send(new().write_int32(self._TIME_SCALE).write_float32(config.time_scale))
        self.send(new().write_int32(self._TARGET_FRAME_RATE).write_int32(config.target_frame_rate))
        self.send(new().write_int32(self._CAPTURE_FRAME_RATE).write_int32(config.capture_frame_rate))


class EnvironmentParametersChannel(SideChannel):
    channel_id = UUID("534c891e-810f-11ea-a9d0-822485860400")
    _FLOAT, _SAMPLER = 0, 1
    _UNIFORM, _GAUSSIAN, _MULTIRANGE = 0, 1, 2

    def configure(self, config: UnityConfig, seed: int) -> None:
        for number, (name, value) in enumerate(config.environment_parameters.items()):
            message = MessageWriter().write_string(name)
            if isinstance(value, float):
                self.send(message.write_int32(self._FLOAT).write_float32(value))
                continue
            message.write_int32(self._SAMPLER).write_int32(seed + number)
            if isinstance(value, UniformSampler):
                limits = value.sampler_parameters
                message.write_int32(self._UNIFORM).write_float32(limits.min_value).write_float32(limits.max_value)
            elif isinstance(value, GaussianSampler):
                shape = value.sampler_parameters
                message.write_int32(self._GAUSSIAN).write_float32(shape.mean).write_float32(shape.st_dev)
            elif isinstance(value, MultirangeSampler):
                ends = [end for interval in value.sampler_parameters.intervals for end in interval]
                message.write_int32(self._MULTIRANGE).write_float32_list(ends)
            self.send(message)


class StatisticsChannel(SideChannel):
    """What the game reports with `StatsRecorder`: averages and sums since the last report, or the last values."""

    channel_id = UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = {}

    def receive(self, data: bytes) -> None:
        message = MessageReader(data)
        name, value, way = message.read_string(), message.read_float32(), message.read_int32()
        before, count = self.statistics.get(name, 0.0), self._counts.get(name, 0)
        if way == _SUM:
            value += before
        elif way != _MOST_RECENT:  # the average, also in place of a histogram
            value = before + (value - before) / (count + 1)
        self.statistics[name], self._counts[name] = value, count + 1

    def take_statistics(self) -> dict[str, float]:
        taken = dict(self.statistics)
        self.statistics.clear()
        self._counts.clear()
        return taken


class FloatPropertiesChannel(SideChannel):
    """Numbers that the game publishes as FloatPropertiesChannel."""

    channel_id = UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7")

    def receive(self, data: bytes) -> None:
        message = MessageReader(data)
        name = message.read_string()
        self.statistics[name] = message.read_float32()


class SideChannels:
    """All channels of a player: the built-in ones and those of `env_config.side_channels`."""

    _QUIET: ClassVar = {UUID("b664a4a9-d86f-5a5f-95cb-e8353a7e8356")}  # analytics

    def __init__(self, config: UnityConfig, seed: int) -> None:
        engine, parameters = EngineConfigurationChannel(), EnvironmentParametersChannel()
        engine.configure(config)
        parameters.configure(config, seed)
        self._game_statistics = StatisticsChannel()
        own = [_make_channel(each) for each in config.side_channels]
        self._channels: dict[bytes, SideChannel] = {}
        self._unknown: set[bytes] = {each.bytes_le for each in self._QUIET}
        for channel in (engine, parameters, self._game_statistics, FloatPropertiesChannel(), *own):
            key = channel.channel_id.bytes_le
            if key in self._channels and channel in own:
                raise ConfigError(
                    f"config.env_config.side_channels: {type(channel).__name__} has the id {channel.channel_id} of"
                    f" {type(self._channels[key]).__name__}.",
                    "Every channel needs an id of its own.",
                )
            self._channels[key] = channel

    def take_outgoing(self) -> bytes:
        """All queued messages as one."""
        parts = []
        for key, channel in self._channels.items():
            if channel._outgoing:
                parts += [_HEADER.pack(key, len(message)) + message for message in channel.take_outgoing()]
        return b"".join(parts)

    def receive(self, data: bytes) -> None:
        """Raises EnvironmentFault."""
        at = 0
        while at < len(data):
            if at + _HEADER.size > len(data):
                raise EnvironmentFault(f"The player sent side channel data that ends in a header, at byte {at} of {len(data)}.")
            key, size = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            if size < 0 or at + size > len(data):
                raise EnvironmentFault(
                    f"The player sent a message of {size} bytes to side channel {UUID(bytes_le=key)}, and {len(data) - at} follow."
                )
            self._deliver(key, data[at : at + size])
            at += size

    def _deliver(self, key: bytes, message: bytes) -> None:
        channel = self._channels.get(key)
        if channel is None:
            if key not in self._unknown:
                self._unknown.add(key)
                log.warning("The player sends to side channel %s, which is not in env_config.side_channels.", UUID(bytes_le=key))
            return
        try:
            channel.receive(message)
        except Exception as error:  # user code may raise anything
            raise EnvironmentFault(
                f"Side channel {type(channel).__name__} cannot read a message of {len(message)} bytes: {error}."
            ) from error

    def take_statistics(self) -> dict[str, float]:
        """Statistics since the last call."""
        found = self._game_statistics.take_statistics()
        for channel in self._channels.values():
            if channel.statistics:
                found |= channel.statistics
                channel.statistics.clear()
        return found


def _make_channel(given: str | Mapping[str, Mapping[str, Any]]) -> SideChannel:
    where = "config.env_config.side_channels"
    if not isinstance(given, str) and len(given) != 1:
        raise ConfigError(f"{where} has an entry with {len(given)} keys.", "Write one channel as {module:Class: {arguments}}.")
    ((path, arguments),) = [(given, {})] if isinstance(given, str) else given.items()
    kind = import_object(path, "side channel", _is_channel)
    if not _is_channel(kind):
        raise ConfigError(f"{where} names {path}, which is no class derived from {SideChannel.__module__}.SideChannel.")
    with construction_errors(path):
        channel = kind(**arguments)
    if not isinstance(getattr(channel, "channel_id", None), UUID) or not hasattr(channel, "_outgoing"):
        raise ConfigError(
            f"{where}: {path} has no channel_id, or its constructor does not call that of SideChannel.",
            "Set channel_id to the UUID that the class of the game has, and call super().__init__().",
        )
    return channel  # type: ignore[no-any-return]


def _is_channel(found: Any, _: bool = False) -> bool:
    return inspect.isclass(found) and issubclass(found, SideChannel)


def names_of(given: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """Paths of the classes."""
    return [each if isinstance(each, str) else next(iter(each), "") for each in given]
