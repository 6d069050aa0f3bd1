"""Spaces, observations and actions of behaviours, from messages as players of different ages send them."""

from __future__ import annotations

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from ludus.envs.unity.behaviors import Behavior
from ludus.envs.unity.messages import PNG, AgentInfo, BrainParameters, message_class
from ludus.errors import EnvironmentFault

LIMIT = 1e15


def parameters(continuous: int = 0, branches: tuple[int, ...] = (2,), name: str = "Camera?team=3") -> Any:
    found = BrainParameters(brain_name=name)
    found.action_spec.num_continuous_actions = continuous
    found.action_spec.num_discrete_actions = len(branches)
    found.action_spec.discrete_branch_sizes.extend(branches)
    return found


def agent(*observations: dict[str, Any], **fields: Any) -> Any:
    made = AgentInfo(id=4, **fields)
    for each in observations:
        floats = each.pop("floats", None)
        added = made.observations.add(**each)
        if floats is not None:
            added.float_data.data.extend(floats)
    return made


def png(image: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_a_name_has_a_behaviour_and_a_team() -> None:
    seen = agent({"shape": [1], "floats": [0.0]})
    assert (Behavior.of(parameters(), seen).name, Behavior.of(parameters(), seen).team) == ("Camera", 3)
    assert (Behavior.of(parameters(name="My Behavior"), seen).name, Behavior.of(parameters(name="x"), seen).team) == (
        "My Behavior",
        0,
    )


@pytest.mark.parametrize(("properties", "shape"), [([1, 2, 2], [1, 20, 30]), ([], [3, 20, 30]), ([1, 2, 2], [20, 20, 3])])
def test_images_of_new_players_have_their_channels_first(properties: list[int], shape: list[int]) -> None:
    floats = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    seen = agent({"shape": shape, "dimension_properties": properties, "floats": floats.reshape(-1)})
    behavior = Behavior.of(parameters(), seen)
    assert behavior.observation_space.shape == (*shape[1:], shape[0])
    np.testing.assert_array_equal(behavior.observation(seen), np.moveaxis(floats, 0, -1))


@pytest.mark.parametrize(("properties", "shape"), [([2, 2, 1], [20, 30, 1]), ([], [20, 30, 3]), ([2, 2, 1], [3, 3, 8])])
def test_images_of_old_players_have_their_channels_last(properties: list[int], shape: list[int]) -> None:
    floats = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    seen = agent({"shape": shape, "dimension_properties": properties, "floats": floats.reshape(-1)})
    behavior = Behavior.of(parameters(), seen)
    np.testing.assert_array_equal(behavior.observation(seen), floats)


def test_pictures_in_grey_are_one_channel_and_channels_of_a_mapping_are_averaged() -> None:
    random = np.random.default_rng(0)
    colour = random.integers(0, 256, (6, 9, 3), np.uint8)
    grey = {"shape": [1, 6, 9], "dimension_properties": [1, 2, 2], "compression_type": PNG, "compressed_data": png(colour)}
    mapped = {**grey, "shape": [2, 6, 9], "compressed_channel_mapping": [0, 1, 1]}
    seen = agent(grey, mapped)
    found = Behavior.of(parameters(), seen).observation(seen)
    np.testing.assert_array_equal(found["obs_0"][..., 0], np.rint(colour.mean(axis=-1)))
    np.testing.assert_array_equal(found["obs_1"][..., 0], colour[..., 0])
    np.testing.assert_array_equal(found["obs_1"][..., 1], np.rint(colour[..., 1:].mean(axis=-1)))


def test_a_player_before_api_1_3_has_its_actions_in_other_fields() -> None:
    seen = agent({"shape": [1], "floats": [0.0]})
    old = BrainParameters(brain_name="Old", vector_action_size_deprecated=[3, 2], vector_action_space_type_deprecated=0)
    discrete = Behavior.of(old, seen)
    assert discrete.action_space == gym.spaces.MultiDiscrete([3, 2])
    old.vector_action_space_type_deprecated = 1
    assert Behavior.of(old, seen).action_space == gym.spaces.Box(-1.0, 1.0, (5,), np.float32)
    listed = message_class("ListAgentActionProto")()
    discrete.add_action(listed, np.array([2, 1]), deprecated=True)
    assert list(listed.value[0].vector_actions_deprecated) == [2.0, 1.0]
    discrete.add_action(listed, None, deprecated=False)
    assert list(listed.value[1].discrete_actions) == [0, 0]
    assert not listed.value[1].vector_actions_deprecated


def test_masks_are_allowed_options_of_all_branches() -> None:
    seen = agent({"shape": [1], "floats": [0.0]})
    behavior = Behavior.of(parameters(branches=(2, 3)), seen)
    assert behavior.mask(seen).tolist() == [True] * 5  # type: ignore[union-attr]
    seen.action_mask.extend([True, False, False, True, False])
    assert behavior.mask(seen).tolist() == [False, True, True, False, True]  # type: ignore[union-attr]
    assert Behavior.of(parameters(2, ()), seen).mask(seen) is None


def test_the_reward_of_the_group_is_added() -> None:
    seen = agent({"shape": [1], "floats": [0.0]}, reward=0.25, group_reward=-1.0)
    assert Behavior.of(parameters(), seen).reward(seen, LIMIT) == -0.75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info.action_mask.extend([False] * 3), "an action mask of 3 entries; its branches have 2 options"),
        (lambda info: info.action_mask.extend([True] * 2), "forbids every action of branch 0"),
        (lambda info: info.observations.add(shape=[1]), "has 2 observations, 1 were expected"),
        (lambda info: info.observations[0].float_data.data.append(1.0), "it has 2 numbers"),
        (lambda info: setattr(info.observations[0], "compression_type", PNG), "it is compressed, and was not before"),
        (lambda info: setattr(info, "group_reward", float("nan")), "the group reward nan"),
    ],
)
def test_damaged_agents_are_named(change: Any, message: str) -> None:
    seen = agent({"shape": [1], "floats": [0.0], "name": "Eye"})
    behavior = Behavior.of(parameters(), seen)

    def read() -> None:
        behavior.observation(seen)
        behavior.mask(seen)
        behavior.reward(seen, LIMIT)

    read()
    change(seen)
    with pytest.raises(EnvironmentFault, match=f"The agent 4 of 'Camera\\?team=3' .*{message}"):
        read()


@pytest.mark.parametrize(
    "data", [b"", b"not a picture", png(np.zeros((6, 9, 3), np.uint8))[:40], png(np.zeros((5, 9, 3), np.uint8))]
)
def test_a_damaged_picture_is_named(data: bytes) -> None:
    image = {"shape": [3, 6, 9], "dimension_properties": [1, 2, 2], "compression_type": PNG}
    first = agent({**image, "compressed_data": png(np.zeros((6, 9, 3), np.uint8))})
    behavior = Behavior.of(parameters(), first)
    behavior.observation(first)
    with pytest.raises(EnvironmentFault, match="sent observation 0"):
        behavior.observation(agent({**image, "compressed_data": data}))


def test_a_behaviour_without_actions_or_observations_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="has 0 continuous actions"):
        Behavior.of(parameters(0, ()), agent({"shape": [1], "floats": [0.0]}))
    with pytest.raises(EnvironmentFault, match="has no observations"):
        Behavior.of(parameters(), agent())
