"""A policy trained in a Unity player, exported for inference inside the game."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

import ludus
from ludus.core import plugins
from tests.envs.unity.test_runs import SMALL, settings


def test_an_exported_policy_has_the_sensors_of_its_scene(tmp_path: Path) -> None:
    """Planes of pictures come first in Unity, and last in the environment."""
    more = SMALL | {"evaluation_duration": 0}
    result = ludus.train("unity", stop={"iterations": 1}, local_dir=tmp_path, env_config=settings(tmp_path, "pictures"), **more)
    exported = result.agent.export(tmp_path / "it.onnx", layout="ml-agents")
    session = plugins.require("onnxruntime", "serve", "tests").InferenceSession(exported.file)
    sensors = {"obs_0": [3, 8, 12], "obs_1": [1, 8, 12], "obs_2": [4, 8, 12]}
    assert {item.name: item.shape[1:] for item in session.get_inputs()} == {**sensors, "action_masks": [4]}
    rng = np.random.default_rng(0)
    pictures = {name: rng.random((1, *shape)).astype(np.float32) for name, shape in sensors.items()}
    feed = {**pictures, "action_masks": np.array([[0, 0, 1, 0]], np.float32)}
    assert session.run(["discrete_actions"], feed)[0].tolist() == [[2]]
