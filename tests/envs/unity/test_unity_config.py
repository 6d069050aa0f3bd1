"""Settings of `env: unity` that its messages cannot carry are problems of the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.envs.unity.unity_config import parse_unity_config
from ludus.errors import ConfigError


@pytest.mark.parametrize(
    "config",
    [
        {"file_name": ""},
        {"environment_parameters": {"größe": 1.0}},
        {"environment_parameters": {"size": 1e40}},
        {"environment_parameters": {"size": float("nan")}},
        {"environment_parameters": {"size": {"sampler_type": "gaussian", "sampler_parameters": {"mean": 1e40, "st_dev": 1}}}},
        {"width": 1 << 31},
    ],
    ids=str,
)
def test_values_that_a_message_cannot_carry_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_unity_config({"file_name": "Game"} | config)


def test_usual_values_are_accepted() -> None:
    config = parse_unity_config({"file_name": "Game", "environment_parameters": {"size": 1, "wind": -2.5}})
    assert config.environment_parameters == {"size": 1.0, "wind": -2.5}
