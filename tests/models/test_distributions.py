from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from ludus.core.spaces import mask_size
from ludus.core.tree import Tree, leaves, map_tree
from ludus.errors import ConfigError
from ludus.models.distributions import make_distribution

Space = gym.Space[Any]

SPACES: dict[str, Space] = {
    "discrete": gs.Discrete(5),
    "discrete from 3": gs.Discrete(4, start=3),
    "discrete int32": gs.Discrete(4, dtype=np.int32),
    "one choice": gs.Discrete(1),
    "multidiscrete": gs.MultiDiscrete([2, 3, 4]),
    "multidiscrete 2-D": gs.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [-2, 3]])),
    "multidiscrete int32": gs.MultiDiscrete([2, 3], dtype=np.int32),
    "multibinary": gs.MultiBinary(3),
    "multibinary 2-D": gs.MultiBinary((2, 3)),
    "bounded": gs.Box(np.array([-0.1, 0.3, -7.0], np.float32), np.array([0.3, 0.7, 11.0], np.float32)),
    "bounded float64": gs.Box(-1 / 3, 0.1, (2,), np.float64),
    "unbounded 2-D": gs.Box(-np.inf, np.inf, (2, 2)),
    "half bounded": gs.Box(0.0, np.inf, (2,)),
    "scalar box": gs.Box(-2.0, 2.0, ()),
    "dict": gs.Dict([("move", gs.Discrete(3)), ("aim", gs.Box(-1, 1, (2,))), ("keys", gs.MultiBinary(2))]),
    "tuple": gs.Tuple([gs.Discrete(3, start=-1), gs.MultiDiscrete([2, 2])]),
    "nested": gs.Dict(
        {"a": gs.Tuple([gs.Box(-3, 5, (1,)), gs.Discrete(2)]), "b": gs.Dict({"c": gs.MultiDiscrete(np.array([[3], [2]]))})}
    ),
}
EVERY = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def drawn(space: Space, *lead: int, seed: int = 0) -> tuple[Any, Tensor, Tree, Tensor]:
    """(distribution, random outputs, sampled actions, their log-probabilities)."""
    generator = torch.Generator().manual_seed(seed)
    distribution = make_distribution(space)
    outputs = torch.randn(*lead, distribution.num_outputs, generator=generator).clamp(-1.9, 1.9)
    action, log_prob = distribution.sample(outputs, None, distribution.noise(lead, generator))
    return distribution, outputs, action, log_prob


def reference(space: Space, outputs: Tensor, action: Tree) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) by torch.distributions, leaf by leaf."""
    if isinstance(space, gs.Dict):
        parts: list[tuple[Space, Tree]] = [(space.spaces[key], action[key]) for key in sorted(space.spaces)]
    elif isinstance(space, gs.Tuple):
        parts = [(item, action[i]) for i, item in enumerate(space.spaces)]
    else:
        return elementary(space, outputs, action)
    sizes = [make_distribution(item).num_outputs for item, _ in parts]
    pairs = [reference(item, piece, a) for (item, a), piece in zip(parts, outputs.split(sizes, dim=-1), strict=True)]
    return sum((lp for lp, _ in pairs), torch.zeros(())), sum((e for _, e in pairs), torch.zeros(()))


def elementary(space: Space, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    flat = action.reshape(*outputs.shape[:-1], -1)
    if isinstance(space, gs.Discrete):
        sizes = [int(space.n)]
    elif isinstance(space, gs.MultiDiscrete):
        sizes = space.nvec.reshape(-1).tolist()
    elif isinstance(space, gs.MultiBinary):
        bits = Bernoulli(logits=outputs)
        return bits.log_prob(flat.float()).sum(-1), bits.entropy().sum(-1)
    else:
        mean, log_std = outputs.chunk(2, dim=-1)
        normal = Normal(mean, log_std.exp())
        return normal.log_prob(flat).sum(-1), normal.entropy().sum(-1)
    choices = [Categorical(logits=piece) for piece in outputs.split(sizes, dim=-1)]
    log_probs = [choice.log_prob(flat[..., i]) for i, choice in enumerate(choices)]
    return torch.stack(log_probs).sum(0), torch.stack([choice.entropy() for choice in choices]).sum(0)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- every space --------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("lead", [(6,), (4, 3)], ids=str)
def test_log_probability_and_entropy_are_those_of_torch(space: Space, lead: tuple[int, ...]) -> None:
    distribution, outputs, action, _ = drawn(space, *lead)
    log_prob, entropy = distribution.evaluate(outputs, action, None)
    expected_log_prob, expected_entropy = reference(space, outputs, action)
    close(log_prob, expected_log_prob.expand(lead))
    close(entropy, expected_entropy.expand(lead))


@EVERY
def test_evaluating_a_sample_gives_the_log_probability_it_was_drawn_with(space: Space) -> None:
    distribution, outputs, action, log_prob = drawn(space, 4, 3)
    close(distribution.evaluate(outputs, action, None)[0], log_prob)
    best, best_log_prob = distribution.sample(outputs, None, None)
    close(distribution.evaluate(outputs, best, None)[0], best_log_prob)


@EVERY
def test_samples_have_the_shape_of_the_space_behind_any_leading_dimensions(space: Space) -> None:
    _, _, action, log_prob = drawn(space, 4, 3)
    assert log_prob.shape == (4, 3)
    shapes = {path: tuple(leaf.shape[2:]) for path, leaf in leaves(action)}
    assert shapes == {path: np.shape(leaf) for path, leaf in leaves(space.sample())}


@EVERY
def test_an_action_for_the_environment_lies_in_its_space(space: Space) -> None:
    distribution, outputs, _, _ = drawn(space, 200)
    noise = 5 * distribution.noise((200,), torch.Generator().manual_seed(1))
    action, _ = distribution.sample(outputs, None, noise)
    sent = distribution.to_environment(map_tree(Tensor.numpy, action))
    for i in range(200):
        one = map_tree(lambda x, i=i: x[i, ...], sent)
        assert space.contains(one), one


@EVERY
def test_the_mode_is_more_probable_than_any_sample(space: Space) -> None:
    distribution, outputs, _, _ = drawn(space, 3)
    _, best = distribution.sample(outputs, None, None)
    many = outputs.expand(500, *outputs.shape)
    _, log_prob = distribution.sample(many, None, distribution.noise((500, 3), torch.Generator().manual_seed(2)))
    assert (log_prob <= best + 1e-6).all()


@EVERY
def test_the_same_generator_gives_the_same_actions(space: Space) -> None:
    for (_, a), (_, b) in zip(leaves(drawn(space, 5, seed=3)[2]), leaves(drawn(space, 5, seed=3)[2]), strict=True):
        assert torch.equal(a, b)


# -- frequencies --------------------------------------------------------------------------------------------------------

DRAWS = 20_000
SIGMAS = 5.0  # a fair sampler leaves this band once in 1.7 million frequencies; the seed is fixed besides


def assert_frequencies(drawn_T: Tensor, p: Tensor) -> None:
    """How often each option came, against its probability, within SIGMAS standard errors of a binomial."""
    frequency = drawn_T.double().mean(dim=0)
    error = (p.double() * (1 - p.double()) / DRAWS).sqrt()
    assert ((frequency - p).abs() <= SIGMAS * error + 1e-9).all(), (frequency, p)


def test_choice_frequencies_match_their_probability() -> None:
    distribution = make_distribution(gs.MultiDiscrete([4, 3]))
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0, -1.0, 0.0])
    noise = distribution.noise((DRAWS,), torch.Generator().manual_seed(0))
    action, _ = distribution.sample(logits.expand(DRAWS, 7), None, noise)
    assert_frequencies(torch.nn.functional.one_hot(action[:, 0], 4), logits[:4].softmax(-1))
    assert_frequencies(torch.nn.functional.one_hot(action[:, 1], 3), logits[4:].softmax(-1))


def test_parts_of_a_choice_are_drawn_independently() -> None:
    distribution = make_distribution(gs.Tuple([gs.Discrete(2), gs.Discrete(2)]))
    action, _ = distribution.sample(torch.zeros(DRAWS, 4), None, distribution.noise((DRAWS,), torch.Generator().manual_seed(0)))
    assert_frequencies(torch.nn.functional.one_hot(2 * action[0] + action[1], 4), torch.full((4,), 0.25))


def test_bit_frequencies_match_their_probability() -> None:
    distribution = make_distribution(gs.MultiBinary(4))
    logits = torch.tensor([-4.0, -0.5, 0.0, 2.0])
    noise = distribution.noise((DRAWS,), torch.Generator().manual_seed(0))
    bits, _ = distribution.sample(logits.expand(DRAWS, 4), None, noise)
    assert_frequencies(bits, logits.sigmoid())


def test_continuous_actions_have_the_mean_and_deviation_of_the_outputs() -> None:
    distribution = make_distribution(gs.Box(-1, 1, (2,)))
    outputs = torch.tensor([0.3, -2.0, math.log(0.5), math.log(2.0)])
    noise = distribution.noise((DRAWS,), torch.Generator().manual_seed(0))
    action, _ = distribution.sample(outputs.expand(DRAWS, 4), None, noise)
    mean, std = torch.tensor([0.3, -2.0]), torch.tensor([0.5, 2.0])
    assert ((action.mean(0) - mean).abs() <= SIGMAS * std / math.sqrt(DRAWS)).all()
    assert ((action.std(0) - std).abs() <= SIGMAS * std / math.sqrt(2 * DRAWS)).all()


# -- masks --------------------------------------------------------------------------------------------------------------


def random_mask(space: Space, rows: int) -> Tensor:
    """Masks with at least one option left in every choice: each choice's first option is always allowed."""
    mask = torch.rand(rows, mask_size(space), generator=torch.Generator().manual_seed(5)) < 0.5
    sizes = space.nvec.reshape(-1) if isinstance(space, gs.MultiDiscrete) else [mask_size(space)]
    if not isinstance(space, gs.MultiBinary):
        mask[:, np.cumsum([0, *sizes[:-1]])] = True
    return mask


MASKABLE = pytest.mark.parametrize(
    "name", ["discrete", "discrete from 3", "multidiscrete", "multidiscrete 2-D", "multibinary", "multibinary 2-D"]
)


def options(space: Space, action: Tensor) -> Tensor:
    """[N, mask_size]: which options an action takes."""
    if isinstance(space, gs.MultiBinary):
        return action.flatten(1) > 0
    sizes = space.nvec.reshape(-1).tolist() if isinstance(space, gs.MultiDiscrete) else [mask_size(space)]
    flat = action.reshape(len(action), -1)
    return torch.cat([torch.nn.functional.one_hot(flat[:, i], n) for i, n in enumerate(sizes)], dim=1) > 0


@MASKABLE
def test_a_masked_option_is_never_taken(name: str) -> None:
    distribution, outputs, _, _ = drawn(SPACES[name], 2000)
    mask, outputs = random_mask(SPACES[name], 2000), 20 * outputs
    noise = distribution.noise((2000,), torch.Generator().manual_seed(6))
    for n in (noise, None):
        action, log_prob = distribution.sample(outputs, mask, n)
        assert not (options(SPACES[name], action) & ~mask).any()
        assert torch.isfinite(log_prob).all()


@MASKABLE
def test_a_masked_option_has_probability_zero(name: str) -> None:
    distribution, outputs, action, _ = drawn(SPACES[name], 500)
    mask = random_mask(SPACES[name], 500)
    forbidden = (options(SPACES[name], action) & ~mask).any(dim=1)
    assert forbidden.any()
    log_prob, _ = distribution.evaluate(outputs, action, mask)
    assert (log_prob[forbidden].exp() == 0).all()
    assert (log_prob[~forbidden] > -100).all()


def test_a_masked_distribution_is_that_of_the_options_left() -> None:
    distribution, outputs, _, _ = drawn(gs.Discrete(5), 1)
    mask = torch.tensor([[True, False, True, True, False]])
    left = Categorical(logits=outputs[0, mask[0]])
    log_prob, entropy = distribution.evaluate(outputs.expand(3, 5), torch.tensor([0, 2, 3]), mask.expand(3, 5))
    close(log_prob, left.log_prob(torch.arange(3)))
    close(entropy, left.entropy().expand(3))


def test_a_masked_bit_stays_zero_and_adds_no_entropy() -> None:
    distribution = make_distribution(gs.MultiBinary(3))
    outputs, mask = torch.tensor([[9.0, 0.4, 9.0]]), torch.tensor([[False, True, False]])
    log_prob, entropy = distribution.evaluate(outputs, torch.tensor([[0, 1, 0]], dtype=torch.int8), mask)
    left = Bernoulli(logits=torch.tensor([0.4]))
    close(log_prob, left.log_prob(torch.ones(1)))
    close(entropy, left.entropy())


def test_each_part_of_a_hybrid_action_gets_its_own_piece_of_the_mask() -> None:
    space = SPACES["dict"]
    distribution, outputs, _, _ = drawn(space, 300)
    mask = torch.tensor([[True, False, False, True, False]]).expand(300, 5)  # keys: the first bit, move: the second of three
    action, _ = distribution.sample(outputs, mask, distribution.noise((300,), torch.Generator().manual_seed(7)))
    assert (action["move"] == 1).all()
    assert (action["keys"][:, 1] == 0).all()
    assert action["keys"][:, 0].float().mean() > 0.2
    _, entropy = distribution.evaluate(outputs, action, mask)
    expected = Bernoulli(logits=outputs[:, 4]).entropy() + Normal(0.0, outputs[:, 2:4].exp()).entropy().sum(-1)
    close(entropy, expected)


@pytest.mark.parametrize("name", ["discrete", "multidiscrete", "multibinary"])
def test_the_entropy_and_gradient_of_a_mask_with_one_option_left_are_finite(name: str) -> None:
    distribution, outputs, _, _ = drawn(SPACES[name], 4)
    mask = torch.zeros(4, mask_size(SPACES[name]), dtype=torch.bool)
    if name != "multibinary":
        mask[:, [0] if name == "discrete" else [0, 2, 5]] = True
    logits = (30 * outputs).requires_grad_()
    action, _ = distribution.sample(logits, mask, None)
    log_prob, entropy = distribution.evaluate(logits, action, mask)
    close(torch.stack([log_prob, entropy]), torch.zeros(2, 4))
    (log_prob + entropy).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# -- particular spaces --------------------------------------------------------------------------------------------------


def test_a_choice_that_starts_elsewhere_is_shifted_for_the_environment_only() -> None:
    distribution = make_distribution(gs.Discrete(4, start=3))
    action, _ = distribution.sample(torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 9.0]]), None, None)
    assert action.tolist() == [0, 3]
    assert distribution.to_environment(action.numpy()).tolist() == [3, 6]


def test_a_bounded_action_spreads_over_the_box() -> None:
    distribution = make_distribution(gs.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)))
    sent = distribution.to_environment(np.array([[-1, -1], [0, 0], [1, 1], [-9, 9], [0.5, -0.5]], np.float32))
    np.testing.assert_allclose(sent, [[-2.0, 0.0], [0.0, 5.0], [2.0, 10.0], [-2.0, 10.0], [1.0, 2.5]], atol=1e-6)


def test_rounding_never_carries_an_action_over_the_edge_of_its_box() -> None:
    random = np.random.default_rng(0)
    for low, high in np.sort(random.normal(size=(500, 2)) * 10 ** random.uniform(-3, 3, (500, 1)), axis=1).astype(np.float32):
        box = gs.Box(low, high, (1,))
        for action in (-1.0, 1.0):
            sent = make_distribution(box).to_environment(np.array([action], np.float32))
            assert box.contains(sent), (low, high, sent)


def test_a_box_as_wide_as_its_type_gives_finite_actions() -> None:
    largest = np.finfo(np.float32).max
    sent = make_distribution(gs.Box(-largest, largest, (3,))).to_environment(np.array([-1.0, 0.0, 0.5], np.float32))
    np.testing.assert_allclose(sent / largest, [-1, 0, 0.5], atol=1e-6)


def test_an_unbounded_action_is_sent_as_it_is() -> None:
    sent = make_distribution(gs.Box(-np.inf, np.inf, (2,))).to_environment(np.array([[7.5, -30.0]], np.float32))
    assert sent.tolist() == [[7.5, -30.0]]


def test_an_extreme_deviation_is_held_within_finite_bounds() -> None:
    distribution = make_distribution(gs.Box(-1, 1, (1,)))
    outputs = torch.tensor([[0.0, 1e6], [0.0, -1e6]])
    action, log_prob = distribution.sample(outputs, None, torch.ones(2, 1))
    assert torch.isfinite(action).all()
    assert torch.isfinite(log_prob).all()
    close(action[0], torch.tensor([math.exp(2.0)]))


def test_only_the_deviations_may_be_free_of_the_observation() -> None:
    assert make_distribution(gs.Discrete(3)).free_outputs == []
    assert make_distribution(gs.Box(-1, 1, (2,))).free_outputs == [2, 3]
    assert make_distribution(SPACES["dict"]).free_outputs == [2, 3]  # aim comes first of aim, keys, move
    assert make_distribution(gs.Tuple([gs.Discrete(3), gs.Box(-1, 1, (1,)), gs.Box(-1, 1, (1,))])).free_outputs == [4, 6]


@pytest.mark.parametrize("space", [gs.Text(3), gs.Box(0, 9, (2,), np.int64), gs.Dict({"x": gs.Tuple([gs.Text(3)])})], ids=repr)
def test_an_action_space_that_cannot_be_chosen_from_is_refused_with_its_path(space: Space) -> None:
    where = "action.x.0" if isinstance(space, gs.Dict) else "action"
    with pytest.raises(ConfigError, match=f"^{where} is a "):
        make_distribution(space)
