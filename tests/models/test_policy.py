from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from ludus.core import tree
from ludus.core.spaces import mask_size
from ludus.core.tree import Tree, map_tree, stack
from ludus.errors import IncompatibleCheckpoint
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from tests.tools import network_of

Space = gym.Space[Any]

SIGHT = gs.Dict(
    {
        "map": gs.Box(0, 255, (6, 6, 2), np.uint8),
        "self": gs.Box(-1, 1, (3,)),
        "units": gs.Box(-1, 1, (4, 3)),
        "units_mask": gs.MultiBinary(4),
    }
)
HYBRID = gs.Dict(  # pairs keep their order, a dict would be sorted
    [
        ("move", gs.Discrete(5, start=1)),
        ("aim", gs.Box(-2, 2, (2,))),
        ("keys", gs.Tuple([gs.MultiBinary(3), gs.MultiDiscrete([2, 3])])),
    ]
)
VECTOR = gs.Box(-1, 1, (4,))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def observations(space: Space, *lead: int) -> Tree:
    space.seed(0)
    rows = stack([map_tree(np.asarray, space.sample()) for _ in range(int(np.prod(lead)))])
    return map_tree(lambda x: torch.from_numpy(x).unflatten(0, lead), rows)


def sharpened(policy: Policy) -> Policy:
    """Make the heads large, so that an action depends on the observation and mistakes show in its probability."""
    with torch.no_grad():
        network_of(policy).head.weight.mul_(100)
        log_std = network_of(policy).log_std
        if log_std is not None:
            log_std.uniform_(-1, 1)
    return policy


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


PAIRS = pytest.mark.parametrize(
    ("sight", "action"),
    [
        (VECTOR, gs.Discrete(3, start=2)),
        (VECTOR, gs.Box(-1, 1, (2,))),
        (VECTOR, HYBRID),
        (gs.Discrete(7), gs.MultiBinary(3)),
        (SIGHT, gs.MultiDiscrete(np.array([[2], [3]]))),
        (SIGHT, HYBRID),
    ],
    ids=["discrete", "continuous", "hybrid", "categories", "everything", "everything hybrid"],
)


@PAIRS
@pytest.mark.parametrize("normalise", [False, True], ids=["raw", "normalised"])
def test_evaluating_a_step_gives_its_log_probability_and_value(sight: Space, action: Space, normalise: bool) -> None:
    policy = sharpened(Policy(sight, action, normalise_observations=normalise))
    seen = observations(sight, 20)
    policy.update_normaliser(seen)
    chosen, log_prob, value, _ = policy.step(seen, noise=policy.distribution.noise((20,), torch.Generator().manual_seed(0)))
    again_log_prob, entropy, again_value = policy.evaluate(seen, chosen)
    close(again_log_prob, log_prob)
    close(again_value, value)
    close(policy.value(seen), value)
    assert entropy.shape == (20,)
    assert log_prob.std() > 0.01


@PAIRS
@pytest.mark.parametrize("core", [None, "gru"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
def test_the_faster_form_for_acting_chooses_the_same(sight: Space, action: Space, core: str | None, activation: str) -> None:
    policy = sharpened(Policy(sight, action, NetworkConfig(core=core, fcnet_activation=activation, cell_size=8)))
    seen, state = observations(sight, 20), policy.initial_state(20)
    noise = policy.distribution.noise((20,), torch.Generator().manual_seed(0))
    chosen, log_prob, value, _ = policy.step(seen, state, noise=noise)
    with policy.acting():
        fast, fast_log_prob, fast_value, _ = policy.step(seen, state, noise=noise)
    close(map_tree(lambda x: x.clone(), fast), map_tree(lambda x: x.detach(), chosen))
    close(fast_log_prob.clone(), log_prob.detach())
    close(fast_value.clone(), value.detach())


def test_after_acting_the_policy_learns_and_acts_on_its_new_weights() -> None:
    policy, seen = sharpened(Policy(VECTOR, gs.Discrete(3))), observations(VECTOR, 5)
    with policy.acting():
        before = policy.value(seen).clone()
    with torch.no_grad():
        network_of(policy).value_head.bias.add_(1)
    with policy.acting():
        close(policy.value(seen).clone(), before + 1)
    policy.value(seen).sum().backward()
    assert network_of(policy).value_head.bias.grad is not None


def unrolled(
    policy: Policy, seen: Tree, first: Tensor, mask: Tensor | None, state: tuple[Tensor, ...]
) -> tuple[Tree, Tensor, Tensor]:
    """Step by step, as a sampler does: (actions, log-probabilities, values), each [T, B, …]."""
    generator, rows = torch.Generator().manual_seed(1), []
    for t in range(first.shape[0]):
        noise = policy.distribution.noise((first.shape[1],), generator)
        now = map_tree(lambda x, t=t: x[t], seen)
        action, log_prob, value, state = policy.step(now, state, first[t], None if mask is None else mask[t], noise)
        rows.append((action, log_prob, value))
    joined: tuple[Tree, Tensor, Tensor] = map_tree(lambda *items: torch.stack(items), *rows)
    return joined


@pytest.mark.parametrize("core", ["lstm", "gru"])
@PAIRS
def test_unrolling_a_sequence_gives_what_its_steps_gave(sight: Space, action: Space, core: str) -> None:
    policy = sharpened(Policy(sight, action, NetworkConfig(core=core, cell_size=16), normalise_observations=True))
    seen, first = observations(sight, 9, 4), torch.rand(9, 4, generator=torch.Generator().manual_seed(2)) < 0.25
    state = tuple(torch.randn(4, 16) for _ in policy.initial_state(4))
    chosen, log_prob, value = unrolled(policy, seen, first, None, state)
    again_log_prob, _, again_value = policy.evaluate(seen, chosen, None, state, first)
    assert first.any()
    close(again_log_prob, log_prob)
    close(again_value, value)


def test_masks_memory_and_hybrid_actions_work_together() -> None:
    policy = sharpened(Policy(SIGHT, HYBRID, NetworkConfig(core="lstm", cell_size=16)))
    seen, first = observations(SIGHT, 9, 4), torch.rand(9, 4, generator=torch.Generator().manual_seed(2)) < 0.25
    mask = torch.rand(9, 4, mask_size(HYBRID), generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., [3, 5, 8]] = True  # of keys: 3 bits, 2 and 3 options; of move: 5 options: one is left in each choice
    chosen, log_prob, value = unrolled(policy, seen, first, mask, policy.initial_state(4))
    again_log_prob, entropy, again_value = policy.evaluate(seen, chosen, mask, policy.initial_state(4), first)
    close(again_log_prob, log_prob)
    close(again_value, value)
    assert torch.isfinite(entropy).all()
    assert mask[..., 8:].gather(-1, chosen["move"].unsqueeze(-1)).all()
    assert not (chosen["keys"][0].bool() & ~mask[..., :3]).any()
    assert mask[..., 3:5].gather(-1, chosen["keys"][1][..., :1]).all()
    assert mask[..., 5:8].gather(-1, chosen["keys"][1][..., 1:]).all()


def test_a_recurrent_policy_remembers_until_an_episode_begins() -> None:
    policy, seen = Policy(VECTOR, gs.Discrete(3), NetworkConfig(core="gru")), observations(VECTOR, 4)
    _, _, _, state = policy.step(seen, policy.initial_state(4))
    fresh = policy.value(seen, policy.initial_state(4))
    assert (policy.value(seen, state) - fresh).abs().max() > 1e-3
    close(policy.value(seen, state, torch.ones(4, dtype=torch.bool)), fresh)
    assert [spec.shape for spec in policy.state_spec()] == [tuple(s.shape[1:]) for s in state]


def test_without_noise_the_same_most_probable_action_is_taken() -> None:
    policy, seen = sharpened(Policy(VECTOR, gs.Discrete(4))), observations(VECTOR, 30)
    chosen, _, _, _ = policy.step(seen)
    outputs, _, _ = policy.network(seen, (), None)
    assert torch.equal(chosen, outputs.argmax(dim=-1))
    assert len(set(chosen.tolist())) > 1


def test_the_normaliser_learns_from_batches_and_leaves_images_alone() -> None:
    policy = Policy(SIGHT, gs.Discrete(2), normalise_observations=True)
    seen = observations(SIGHT, 5, 8)
    policy.update_normaliser(seen)
    norm = policy.network.norm
    assert norm is not None
    close(norm.mean, seen["self"].reshape(-1, 3).mean(0))
    assert float(norm.count) == 40
    assert Policy(gs.Box(0, 255, (3, 8, 8), np.uint8), gs.Discrete(2), normalise_observations=True).network.norm is None


# -- description and weights --------------------------------------------------------------------------------------------


@PAIRS
@pytest.mark.parametrize(
    "config",
    [
        NetworkConfig(),
        NetworkConfig(fcnet_hiddens=(9,), conv_filters=((4, 3, 1), (5, 2, 1)), core="lstm", cell_size=6, free_log_std=False),
    ],
    ids=["default", "own"],
)
def test_a_policy_is_rebuilt_from_its_description_and_weights(sight: Space, action: Space, config: NetworkConfig) -> None:
    policy = sharpened(Policy(sight, action, config, normalise_observations=True))
    policy.update_normaliser(observations(sight, 9))
    twin = Policy.from_description(json.loads(json.dumps(policy.description(), allow_nan=False)))
    assert twin.description() == policy.description()
    twin.load_weights(policy.weights())
    seen, state = observations(sight, 5), policy.initial_state(5)
    for a, b in zip(policy.step(seen, state), twin.step(seen, state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_weights_survive_the_wire() -> None:
    policy = sharpened(Policy(VECTOR, gs.Box(-1, 1, (2,)), normalise_observations=True))
    policy.update_normaliser(observations(VECTOR, 9))
    twin = Policy(VECTOR, gs.Box(-1, 1, (2,)), normalise_observations=True)
    decoded, _ = tree.decode(tree.encode(policy.weights()))
    twin.load_weights(decoded)
    assert all(np.array_equal(policy.weights()[name], value) for name, value in twin.weights().items())


def test_weights_are_a_copy() -> None:
    policy = Policy(VECTOR, gs.Discrete(2), normalise_observations=True)
    weights = policy.weights()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1)
    policy.update_normaliser(observations(VECTOR, 9))
    assert all(not np.array_equal(weights[name], value) for name, value in policy.weights().items())
    weights["network.head.bias"][:] = 77
    assert not (policy.weights()["network.head.bias"] == 77).any()


def test_loaded_weights_are_written_in_place_and_copied() -> None:
    policy, other = Policy(VECTOR, gs.Discrete(2)), Policy(VECTOR, gs.Discrete(2))
    shared, weights = network_of(policy).head.weight.data, other.weights()
    policy.load_weights(weights)
    assert torch.equal(shared, network_of(other).head.weight.data)
    weights["network.head.weight"][:] = 5
    assert torch.equal(shared, network_of(other).head.weight.data)


def without(weights: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda w: without(w, "network.value_head.bias"), r"missing \['network.value_head.bias'\]"),
        (lambda w: w | {"network.extra": np.zeros(1)}, r"unexpected \['network.extra'\]"),
        (
            lambda w: w | {"network.value_head.bias": np.zeros(2)},
            r"network.value_head.bias has shape \(2,\), this model has \(1,\)",
        ),
        (lambda w: w | {"network.value_head.bias": np.zeros(())}, r"has shape \(\)"),
        (lambda w: {}, "missing"),
    ],
    ids=["missing", "unexpected", "another shape", "no dimensions", "nothing"],
)
def test_weights_that_do_not_fit_change_nothing(break_it: Any, message: str) -> None:
    policy, other = Policy(VECTOR, gs.Discrete(2)), Policy(VECTOR, gs.Discrete(2))
    before = policy.weights()
    with pytest.raises(IncompatibleCheckpoint, match=message):
        policy.load_weights(break_it(other.weights()))
    assert all(np.array_equal(before[name], value) for name, value in policy.weights().items())
