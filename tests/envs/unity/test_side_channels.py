"""Side channels, with bytes as mlagents-envs 1.1.0 writes them."""

from __future__ import annotations

import contextlib
import logging
import struct
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("google.protobuf")

from ludus.envs.unity.match import UnityMatch
from ludus.envs.unity.side_channels import MessageReader, MessageWriter, SideChannel, SideChannels
from ludus.envs.unity.unity_config import parse_unity_config
from ludus.errors import EnvironmentFault, UsageError
from tests.unity_player.executable import write_player
from tests.unity_player.ports import first_port

STATISTICS = UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
WEATHER = "tests.envs.unity.test_side_channels:Weather"


class Weather(SideChannel):
    channel_id = UUID("0123abcd-0000-1111-2222-333344445555")

    def __init__(self, wind: float = 1.0) -> None:
        super().__init__()
        self.send(MessageWriter().write_string("wind").write_float32(wind))

    def receive(self, data: bytes) -> None:
        message = MessageReader(data)
        name = message.read_string()
        self.statistics[f"Weather/{name}"] = message.read_float32()


class Silent(SideChannel):
    def __init__(self) -> None:
        """Without the constructor of the base class, and without an id."""


def channels(**env_config: Any) -> SideChannels:
    return SideChannels(parse_unity_config(env_config), 100)


def packed(channel: UUID, message: bytes) -> bytes:
    return channel.bytes_le + struct.pack("<i", len(message)) + message


def statistic(name: str, value: float, way: int) -> bytes:
    return packed(STATISTICS, struct.pack(f"<i{len(name)}sfi", len(name), name.encode(), value, way))


def test_settings_are_written_as_the_official_package_writes_them() -> None:
    """The bytes were made with EngineConfigurationChannel and EnvironmentParametersChannel of mlagents-envs 1.1.0."""
    sampler = {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[1, 2], [4, 5]]}}
    found = channels(time_scale=2.5, environment_parameters={"mass": 0.5, "gap": sampler}).take_outgoing().hex()
    engine, parameters = "2c3451e97e4fea11b238784f4387d1f7", "1e894c530f81ea11a9d0822485860400"
    assert f"{engine}080000000200000000002040" in found  # time scale 2.5
    assert f"{engine}0c000000000000005400000054000000" in found  # 84 × 84
    assert f"{parameters}10000000040000006d617373000000000000003f" in found
    expected = "030000006761700100000065000000020000000400000000" + "00803f000000400000804000"  # seed 101
    assert f"{parameters}27000000{expected}00a040" in found


def test_statistics_are_averaged_summed_or_replaced() -> None:
    found = channels()
    for name, value, way in [
        ("a", 1, 0),
        ("a", 3, 0),
        ("b", 1, 1),
        ("b", 5, 1),
        ("c", 2, 2),
        ("c", 3, 2),
        ("d", 2, 3),
        ("d", 4, 3),
    ]:
        found.receive(statistic(name, value, way))
    assert found.take_statistics() == {"a": 2.0, "b": 5.0, "c": 5.0, "d": 3.0}
    assert found.take_statistics() == {}


def test_a_channel_of_your_own_sends_and_receives() -> None:
    found = channels(side_channels=[{WEATHER: {"wind": 7}}])
    assert packed(Weather.channel_id, struct.pack("<i4sf", 4, b"wind", 7.0)) in found.take_outgoing()
    assert found.take_outgoing() == b""
    found.receive(packed(Weather.channel_id, struct.pack("<i4sf", 4, b"rain", 0.25)))
    assert found.take_statistics() == {"Weather/rain": 0.25}


def test_a_channel_of_your_own_reaches_the_player(tmp_path: Path) -> None:
    player = write_player(tmp_path)
    settings = {"file_name": str(player), "no_graphics": True, "base_port": first_port(21_500), "side_channels": [WEATHER]}
    with contextlib.closing(UnityMatch("unity", {**settings, "log_folder": str(tmp_path / "logs")})):
        pass
    (log,) = (tmp_path / "logs").iterdir()
    assert f"Side channel {Weather.channel_id}: " in log.read_text()


def test_an_unknown_channel_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    found = channels()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found.receive(packed(UUID(int=5), b"abc"))
    assert caplog.text.count(str(UUID(int=5))) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (STATISTICS.bytes_le[:9], "ends in a header"),
        (STATISTICS.bytes_le + struct.pack("<i", 50) + b"abc", "a message of 50 bytes .* and 3 follow"),
        (STATISTICS.bytes_le + struct.pack("<i", -1), "a message of -1 bytes"),
        (packed(STATISTICS, b"\xff\xff\xff\x7f"), "StatisticsChannel cannot read a message of 4 bytes: a length of 2147483647"),
        (packed(STATISTICS, b""), "it ends after 0 bytes"),
        (packed(UUID("e951342c-4f7e-11ea-b238-784f4387d1f7"), b"x"), "it takes no messages"),
    ],
)
def test_damaged_messages_are_named(data: bytes, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        channels().receive(data)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tests.envs.unity.test_side_channels:packed"], "side channel"),
        (["tests.envs.unity.test_side_channels:Silent"], "has no channel_id"),
        ([WEATHER, WEATHER], "has the id 0123abcd"),
        ([{WEATHER: {}, "b:C": {}}], "2 keys"),
    ],
)
def test_wrong_channels_are_named(given: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        channels(side_channels=given)
