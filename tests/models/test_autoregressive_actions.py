"""Actions whose parts are chosen one after the other, against the whole joint distribution written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.core.tree import map_tree
from ludus.errors import ConfigError
from ludus.models.autoregressive_actions import AutoregressiveDistribution, Branch
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy

SIZES = (4, 3, 2, 5)
BRANCHES = (Branch(1, (1,)), Branch(3, (2, 3), "things", "aim"))
"""Part 2 always counts, part 1 after option 1, part 3 after options 2 and 3, each in its own way."""


@pytest.fixture
def distribution() -> AutoregressiveDistribution:
    return AutoregressiveDistribution(gym.spaces.MultiDiscrete(list(SIZES)), BRANCHES)


def softmax(logits: list[float], allowed: list[bool]) -> list[float]:
    powers = [math.exp(x) if may else 0.0 for x, may in zip(logits, allowed, strict=True)]
    return [power / sum(powers) for power in powers]


def joint(outputs: list[float], mask: list[bool]) -> dict[tuple[int | None, ...], float]:
    """Every action there is, with its probability; None where a part does not count. Outputs: parts 0 and 2, branch 1, branch 3."""
    what, always, one, aimed = outputs[:4], outputs[4:6], outputs[6:9], (outputs[9:14], outputs[14:19])
    p_what, p_always = softmax(what, mask[:4]), softmax(always, mask[7:9])
    table: dict[tuple[int | None, ...], float] = {}
    for w, a in itertools.product(range(4), range(2)):
        if w == 1:
            for k, p in enumerate(softmax(one, mask[4:7])):
                table[w, k, a, None] = p_what[w] * p_always[a] * p
        elif w in (2, 3):
            for k, p in enumerate(softmax(aimed[w - 2], mask[9:])):
                table[w, None, a, k] = p_what[w] * p_always[a] * p
        else:
            table[w, None, a, None] = p_what[w] * p_always[a]
    return table


def whole(action: tuple[int | None, ...]) -> list[int]:
    return [0 if part is None else part for part in action]


def case(seed: int) -> tuple[Tensor, Tensor, dict[tuple[int | None, ...], float]]:
    random = np.random.default_rng(seed)
    outputs = random.normal(size=19) * 2
    mask = random.random(14) < 0.7
    for part in (slice(0, 4), slice(4, 7), slice(7, 9), slice(9, 14)):
        mask[part.start + int(random.integers(part.stop - part.start))] = True
    return torch.tensor(outputs, dtype=torch.float32), torch.tensor(mask), joint(outputs.tolist(), mask.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_those_of_the_table_and_sum_to_one(distribution: AutoregressiveDistribution, seed: int) -> None:
    outputs, mask, table = case(seed)
    possible = {action: p for action, p in table.items() if p > 0}
    actions = torch.tensor([whole(action) for action in possible])
    log_prob, _ = distribution.evaluate(outputs.expand(len(actions), -1), actions, mask.expand(len(actions), -1))
    np.testing.assert_allclose(log_prob.exp(), list(possible.values()), rtol=1e-4, atol=1e-7)
    assert float(log_prob.exp().sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_is_that_of_the_table(distribution: AutoregressiveDistribution, seed: int) -> None:
    outputs, mask, table = case(seed)
    _, entropy = distribution.evaluate(outputs, torch.zeros(4, dtype=torch.int64), mask)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in table.values() if p > 0), abs=1e-4)


def test_samples_are_as_frequent_as_they_should_be(distribution: AutoregressiveDistribution) -> None:
    outputs, mask, table = case(7)
    n = 40_000
    noise = distribution.noise((n,), torch.Generator().manual_seed(0))
    action, log_prob = distribution.sample(outputs.expand(n, -1), mask.expand(n, -1), noise)
    again, _ = distribution.evaluate(outputs.expand(n, -1), action, mask.expand(n, -1))
    np.testing.assert_allclose(log_prob, again, atol=1e-5)
    counts: dict[tuple[int | None, ...], int] = {}
    for w, k, a, t in action.tolist():
        seen: tuple[int | None, ...] = (w, k if w == 1 else None, a, t if w in (2, 3) else None)
        counts[seen] = counts.get(seen, 0) + 1
    assert counts.keys() <= {seen for seen, p in table.items() if p > 0}
    for meant, p in table.items():
        assert abs(counts.get(meant, 0) / n - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-9, meant


def test_without_noise_the_most_probable_of_each_choice(distribution: AutoregressiveDistribution) -> None:
    outputs, mask, _ = case(3)
    action, _ = distribution.sample(outputs, mask, None)
    what = int(torch.where(mask[:4], outputs[:4], -torch.inf).argmax())
    assert action[0] == what
    if what in (2, 3):
        rows = outputs[9:].reshape(2, 5)
        assert action[3] == int(torch.where(mask[9:], rows[what - 2], -torch.inf).argmax())


def test_what_does_not_count_does_not_matter(distribution: AutoregressiveDistribution) -> None:
    """The gradient of a part that is not used is zero: nothing is learned from it."""
    outputs, mask, _ = case(1)
    outputs.requires_grad_(True)
    mask[:] = True
    log_prob, _ = distribution.evaluate(outputs, torch.tensor([1, 2, 0, 4]), mask)
    log_prob.backward()
    assert outputs.grad is not None
    assert outputs.grad[9:].abs().max() == 0  # nobody is aimed at
    assert outputs.grad[6:9].abs().max() > 0


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ([Branch(4, (1,))], "names part 4"),
        ([Branch(0, (1,))], "names part 0"),
        ([Branch(1, (4,))], r"after \[4\]"),
        ([Branch(1, ())], r"after \[\]"),
        ([Branch(1, (1, 1))], r"after \[1, 1\]"),
        ([Branch(1, (1,)), Branch(1, (2,))], "twice"),
    ],
)
def test_branches_that_cannot_be_are_named(branches: list[Branch], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoregressiveDistribution(gym.spaces.MultiDiscrete(list(SIZES)), branches)


def test_other_actions_have_no_branches() -> None:
    with pytest.raises(ConfigError, match="needs a MultiDiscrete"):
        AutoregressiveDistribution(gym.spaces.Discrete(3), [Branch(1, (1,))])


# -- the policy that has them -----------------------------------------------------------------------------------------------

THINGS = 5
SEEN = gym.spaces.Dict(
    {
        "things": gym.spaces.Box(-1, 1, (THINGS, 6), np.float32),
        "self": gym.spaces.Box(-1, 1, (3,), np.float32),
        "aim": gym.spaces.MultiBinary((2, THINGS)),
    }
)
CONFIG = NetworkConfig(
    fcnet_hiddens=(16,), entity_dim=8, entity_present=(("things", 0),), vf_share_layers=True, autoregressive=BRANCHES
)


def observations(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    things = torch.rand((rows, THINGS, 6), generator=generator)
    things[..., 0] = (things[..., 0] < 0.7).float()
    things = things * things[..., :1]
    aim = (torch.rand((rows, 2, THINGS), generator=generator) < 0.6).to(torch.int8)
    aim[:, :, 0] = 1
    return {"things": things, "self": torch.rand((rows, 3), generator=generator), "aim": aim}


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(SEEN, gym.spaces.MultiDiscrete(list(SIZES)), CONFIG)


def test_masked_entities_are_never_chosen(policy: Policy) -> None:
    seen = observations(4_000)
    noise = policy.distribution.noise((4_000,), torch.Generator().manual_seed(1))
    action, log_prob, _, _ = policy.step(seen, noise=noise)
    aimed = action[action[:, 0] >= 2]
    rows = torch.nonzero(action[:, 0] >= 2).squeeze(-1)
    assert len(aimed) > 500
    assert bool((seen["aim"][rows, aimed[:, 0] - 2, aimed[:, 3]] == 1).all())
    assert bool(torch.isfinite(log_prob).all())


def test_an_empty_place_may_be_meant_where_the_mask_allows_it(policy: Policy) -> None:
    """Somebody who stands for nobody. Not being there, it is like any other that is not there."""
    seen = observations(4_000)
    seen["things"][:, 0] = 0.0
    seen["aim"][:, :, 0] = 1
    noise = policy.distribution.noise((4_000,), torch.Generator().manual_seed(1))
    action = policy.step(seen, noise=noise)[0]
    aimed = action[action[:, 0] >= 2]
    assert 0.1 < float((aimed[:, 3] == 0).float().mean()) < 0.6


def test_pointing_follows_the_entities_when_they_change_places(policy: Policy) -> None:
    """Who is pointed at is a question of what somebody is, not of the place in the list."""
    seen = observations(64)
    order = torch.tensor([3, 1, 4, 0, 2])
    turned = seen | {"things": seen["things"][:, order], "aim": seen["aim"][:, :, order]}
    outputs, value, _ = policy.network(seen, (), None)
    other, same, _ = policy.network(turned, (), None)
    np.testing.assert_allclose(value.detach(), same.detach(), atol=1e-5)
    np.testing.assert_allclose(outputs[:, :9].detach(), other[:, :9].detach(), atol=1e-5)
    pointed = outputs[:, 9:].reshape(64, 2, THINGS)[:, :, order]
    np.testing.assert_allclose(pointed.detach(), other[:, 9:].reshape(64, 2, THINGS).detach(), atol=1e-5)


def test_a_description_makes_the_same_policy_again(policy: Policy) -> None:
    import json

    again = Policy.from_description(json.loads(json.dumps(policy.description())))
    again.load_weights(policy.weights())
    seen = observations(8)
    for mine, theirs in zip(policy.step(seen)[:3], again.step(seen)[:3], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("core", [None, "lstm"])
def test_every_weight_is_learned(core: str | None) -> None:
    torch.manual_seed(0)
    policy = Policy(SEEN, gym.spaces.MultiDiscrete(list(SIZES)), NetworkConfig(**{**vars(CONFIG), "core": core, "cell_size": 16}))
    seen: Any = observations(256)
    state, first = policy.initial_state(64), None
    if core is not None:
        seen = map_tree(lambda x: x.reshape(4, 64, *x.shape[1:]), seen)
        first = torch.zeros(4, 64, dtype=torch.bool)
    lead = (4, 64) if core else (256,)
    random = torch.Generator().manual_seed(2)
    action = torch.stack([torch.randint(n, lead, generator=random) for n in SIZES], dim=-1)
    log_prob, entropy, value = policy.evaluate(seen, action, None, state, first)
    (log_prob.clamp(min=-20).sum() + entropy.sum() + value.square().sum()).backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entity_present": ()}, "not an entity set"),
        ({"entity_present": (("self", 0),)}, "'self'"),
        ({"entity_present": (("things", 6),)}, "no feature 6"),
        ({"entity_present": (("things", 0), ("thing", 0))}, "'thing', which is not in the observation. Did you mean 'things'"),
        ({"autoregressive": (Branch(3, (2, 3), "foes"),)}, "'foes'"),
        ({"autoregressive": (Branch(3, (2,), "things", "aim"),)}, "'aim'"),
        ({"autoregressive": (Branch(3, (2, 3), "things", "target"),)}, "'target'"),
    ],
)
def test_an_impossible_network_is_rejected_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy(SEEN, gym.spaces.MultiDiscrete(list(SIZES)), NetworkConfig(**{**vars(CONFIG), **change}))


@pytest.mark.parametrize("options", [THINGS - 1, THINGS + 1, 4 * THINGS])
def test_a_part_that_points_has_an_option_for_each_entity(options: int) -> None:
    """Else the logits of its neighbours would be taken for its own."""
    with pytest.raises(ConfigError, match=rf"part 3 has {options} options .* 'things', which has {THINGS} entities"):
        Policy(SEEN, gym.spaces.MultiDiscrete([*SIZES[:3], options]), CONFIG)


@pytest.mark.parametrize(
    ("space", "change", "message"),
    [
        (SEEN, {}, "model.autoregressive applies to"),
        (
            gym.spaces.Dict({"observation": SEEN, "state": SEEN["self"]}),
            {"autoregressive": (), "central": True},
            "centralized_value",
        ),
    ],
)
def test_q_networks_have_neither_branches_nor_a_centralised_critic(
    space: gym.Space[Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy(space, gym.spaces.Discrete(4), NetworkConfig(**{**vars(CONFIG), **change}), kind=VALUES)
