"""Messages of ML-Agents' protocol. The bytes were written by mlagents-envs 1.1.0 with protobuf 3.20.3."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf")

from ludus.envs.unity.messages import PNG, QUIT, SHUT_DOWN, UnityMessage

FROM_PLAYER = bytes.fromhex(
    "0a0708c8011202686912ad010a62125c0a0b42616c6c3f7465616d3d31124d0a4b3d0000c03f4001480150075a0201006a170a0102220a0a080000003f0000"
    "803f32010138014201766a1a0a0303010110011a03706e672a0c00ffffffffffffffffff010170037d000000c01a02736312470a016e1205312e352e301a01"
    "6c2a231a01022a017830013a0b42616c6c3f7465616d3d3140014a0a080210011a01032201643a03322e30420e0801100118012001280130013801"
)
TO_PLAYER = bytes.fromhex(
    "0a030890031a530a300a290a0b42616c6c3f7465616d3d31121a0a180a080000003f00000040250000803f32040000003f3a010220022a0178121f08ffffff"
    "ffffffffffff011205312e352e301a05312e312e30220208012804"
)


def test_a_message_of_a_player_has_every_value_that_the_official_package_wrote() -> None:
    message = UnityMessage.FromString(FROM_PLAYER)
    assert (message.header.status, message.header.message) == (200, "hi")
    output = message.unity_output.rl_output
    assert output.side_channel == b"sc"
    (agent,) = output.agentInfos["Ball?team=1"].value
    assert (agent.reward, agent.done, agent.max_step_reached, agent.id) == (1.5, True, True, 7)
    assert (list(agent.action_mask), agent.group_id, agent.group_reward) == ([True, False], 3, -2.0)
    vector, image = agent.observations
    assert (list(vector.shape), list(vector.float_data.data), list(vector.dimension_properties)) == ([2], [0.5, 1.0], [1])
    assert (vector.observation_type, vector.name) == (1, "v")
    assert (list(image.shape), image.compression_type, image.compressed_data) == ([3, 1, 1], PNG, b"png")
    assert list(image.compressed_channel_mapping) == [0, -1, 1]
    start = message.unity_output.rl_initialization_output
    assert (start.name, start.communication_version, start.log_path, start.package_version) == ("n", "1.5.0", "l", "2.0")
    assert all(getattr(start.capabilities, field.name) for field in start.capabilities.DESCRIPTOR.fields)
    assert len(start.capabilities.DESCRIPTOR.fields) == 7
    (brain,) = start.brain_parameters
    assert (list(brain.vector_action_size_deprecated), brain.vector_action_space_type_deprecated) == ([2], 1)
    assert (brain.brain_name, brain.is_training) == ("Ball?team=1", True)
    spec = brain.action_spec
    assert (spec.num_continuous_actions, spec.num_discrete_actions, list(spec.discrete_branch_sizes)) == (2, 1, [3])


def test_a_message_to_a_player_has_every_value_that_the_official_package_wrote() -> None:
    message = UnityMessage.FromString(TO_PLAYER)
    assert message.header.status == SHUT_DOWN
    step = message.unity_input.rl_input
    assert (step.command, step.side_channel) == (QUIT, b"x")
    (action,) = step.agent_actions["Ball?team=1"].value
    assert (list(action.vector_actions_deprecated), action.value) == ([0.5, 2.0], 1.0)
    assert (list(action.continuous_actions), list(action.discrete_actions)) == ([0.5], [2])
    start = message.unity_input.rl_initialization_input
    assert (start.seed, start.communication_version, start.package_version, start.num_areas) == (-1, "1.5.0", "1.1.0", 4)
    assert start.capabilities.baseRLCapabilities
    assert not start.capabilities.hybridActions


@pytest.mark.parametrize("data", [FROM_PLAYER, TO_PLAYER])
def test_messages_are_written_byte_by_byte_like_the_official_package(data: bytes) -> None:
    assert UnityMessage.FromString(data).SerializeToString(deterministic=True) == data


@pytest.mark.parametrize("data", [FROM_PLAYER, TO_PLAYER])
def test_messages_have_no_field_that_is_unknown(data: bytes) -> None:
    from google.protobuf.unknown_fields import UnknownFieldSet

    def check(message: object) -> None:
        assert len(UnknownFieldSet(message)) == 0
        for _, value in message.ListFields():  # type: ignore[attr-defined]
            for part in value.values() if hasattr(value, "values") else value if hasattr(value, "__len__") else [value]:
                if hasattr(part, "ListFields"):
                    check(part)

    check(UnityMessage.FromString(data))
