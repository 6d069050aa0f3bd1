"""Whatever can be trained can be saved, loaded and exported, or is refused before the first step: over generated spaces."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ludus
from ludus.core import spaces
from ludus.core.tree import map_tree
from ludus.envs import registry
from ludus.errors import ConfigError
from ludus.models.export import onnx_export, parity
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.serialization import decode_weights, encode_weights, policy_from
from ludus.sampling.trained_agent import TrainedAgent
from tests.generated_spaces import (
    EVERY_ACTION,
    EVERY_OBSERVATION,
    EXPORTED_ACTION,
    EXPORTED_OBSERVATION,
    Random,
    action_spaces,
    observation_spaces,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of Gymnasium and torch, about parts without elements


def policy_of(observation: gym.Space[Any], action: gym.Space[Any], core: str | None = None, norm: bool = False) -> Policy:
    torch.manual_seed(0)
    return Policy(observation, action, NetworkConfig(fcnet_hiddens=(4,), core=core, cell_size=4), norm)


def rows_of(space: gym.Space[Any], count: int) -> Any:
    fit = spaces.SpaceParser(space)
    return map_tree(lambda *items: torch.from_numpy(np.stack(items)), *(fit(space.sample()) for _ in range(count)))


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(observation_spaces, action_spaces, st.sampled_from([None, "lstm"]), st.booleans())
def test_a_policy_learns_and_comes_back_the_same_or_is_refused(
    observation: gym.Space[Any], action: gym.Space[Any], core: str | None, norm: bool
) -> None:
    try:
        policy = policy_of(observation, action, core, norm)
    except ConfigError:
        return
    seen = rows_of(observation, 3)
    policy.update_normaliser(seen)
    noise = policy.distribution.noise((3,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        chosen, log_prob, _, _ = policy.step(seen, policy.initial_state(3), None, None, noise)
    if core is None:
        again, entropy, value = policy.evaluate(seen, chosen)
        (again.sum() + entropy.sum() + value.sum()).backward()
        torch.testing.assert_close(again, log_prob, atol=1e-4, rtol=1e-4)
    weights, _ = decode_weights(encode_weights(policy.weights()), "weights")
    loaded = policy_from(json.dumps(policy.description(), allow_nan=False).encode())
    loaded.load_weights(weights)
    assert (loaded.observation_space, loaded.action_space) == (observation, action)
    shown = observation.sample()
    first, second = TrainedAgent(policy).act(shown)[0], TrainedAgent(loaded).act(shown)[0]
    assert action.contains(second)
    map_tree(np.testing.assert_array_equal, first, second)


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(observation_spaces, action_spaces)
def test_a_whole_training_ends_with_an_agent_that_loads_or_is_refused(
    observation: gym.Space[Any], action: gym.Space[Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            agent = ludus.load(trained(observation, action, Path(folder)))
        except ConfigError:
            assert not list(Path(folder).rglob("metrics.jsonl"))  # before the run began
            return
        assert action.contains(agent.act(observation.sample())[0])


def trained(observation: gym.Space[Any], action: gym.Space[Any], folder: Path, **settings: Any) -> Path:
    ludus.register_env("generated", lambda: Random(observation, action))
    try:
        small: Any = {"num_envs": 2, "train_batch_size": 8, "minibatch_size": 8, "num_epochs": 1, "model": {"fcnet_hiddens": [4]}}
        return ludus.train("generated", stop={"timesteps": 8}, local_dir=folder, **small, **settings).run_dir
    finally:
        registry._registered.pop("generated")


def test_a_space_with_a_part_of_every_kind_is_trained_on_and_its_agent_loads(tmp_path: Path) -> None:
    agent = ludus.load(trained(EVERY_OBSERVATION, EVERY_ACTION, tmp_path))
    assert EVERY_ACTION.contains(agent.act(EVERY_OBSERVATION.sample())[0])


def test_an_observation_with_a_text_trains_without_it_and_is_played_without_it(tmp_path: Path) -> None:
    observation = gs.Dict({"direction": gs.Discrete(4), "mission": gs.Text(9)})
    with pytest.raises(ConfigError, match=r"observation\.mission is a Text space.*preprocess: {drop: \[mission\]}"):
        trained(observation, gs.Discrete(2), tmp_path)
    agent = ludus.load(trained(observation, gs.Discrete(2), tmp_path, preprocess={"drop": ["mission"]}))
    assert agent.observation_space == gs.Dict({"direction": gs.Discrete(4)})
    ludus.register_env("generated", lambda: Random(observation, gs.Discrete(2)))
    try:
        assert agent.evaluate(2).returns == (3.0, 3.0)
    finally:
        registry._registered.pop("generated")


def test_a_policy_of_every_kind_of_space_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "BATCH_SIZES", (1, 20))  # all sizes take ten seconds
    policy = policy_of(EXPORTED_OBSERVATION, EXPORTED_ACTION, norm=True)
    policy.update_normaliser(rows_of(EXPORTED_OBSERVATION, 50))  # the only category of `one` never varies
    _, report = parity.artefact(policy, onnx_export.export_policy(policy))
    assert report.passed, report.reasons


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (gs.Dict({}), gs.Discrete(2), "The observation space has no elements"),
        (gs.Box(0, 1, (0,)), gs.Discrete(2), "The observation space has no elements"),
        (gs.Discrete(2), gs.Tuple([]), "The action space has no elements"),
        (gs.Discrete(2), gs.Dict({"a": gs.Discrete(2), "b": gs.Dict({})}), "A part of the action space has no elements"),
        (
            gs.Dict({"a.b": gs.Discrete(2), "a": gs.Dict({"b": gs.Discrete(2)})}),
            gs.Discrete(2),
            "two parts that are called 'a.b'",
        ),
        (
            gs.Dict({1: gs.Discrete(2)}),  # type: ignore[dict-item]
            gs.Discrete(2),
            "observation has the key 1",
        ),
        (gs.Text(5), gs.Discrete(2), "observation is a Text space"),
    ],
)
def test_spaces_of_which_no_agent_can_be_made_are_refused(
    observation: gym.Space[Any], action: gym.Space[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_of(observation, action)
