from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from ludus.core.tree import Tree, map_tree, stack
from ludus.errors import ConfigError
from ludus.models.entity_encoder import EntityEncoder, Pointer
from ludus.models.image_encoder import ImageEncoder
from ludus.models.layers import ACTIVATIONS, Dense, RunningNorm
from ludus.models.network_config import NetworkConfig
from ludus.models.networks import Network
from ludus.models.observation_encoder import VectorPart, plan_encoders
from ludus.models.recurrent_core import RecurrentCore

Space = gym.Space[Any]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def observations(space: Space, *lead: int) -> Tree:
    """Random observations as tensors [*lead, …], stored as Ludus stores them."""
    space.seed(0)
    count = int(np.prod(lead))
    rows = stack([map_tree(np.asarray, space.sample()) for _ in range(count)])
    return map_tree(lambda x: torch.from_numpy(x).unflatten(0, lead), rows)


# -- dense --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 64), (64, 64), (64, 5)], ids=["wide", "square", "narrow"])
def test_the_fused_tanh_layer_is_tanh(inputs: int, outputs: int) -> None:
    layer, x = Dense(inputs, outputs, "tanh"), 3 * torch.randn(200, inputs)
    plain = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=3e-7)
    exact = torch.tanh(nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()))
    assert (layer(x) - exact).abs().max() < 4e-6  # float32 products of 64 terms


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 64), (64, 64), (64, 5)], ids=["wide", "square", "narrow"])
def test_the_gradients_of_the_fused_tanh_layer_are_those_of_autograd(inputs: int, outputs: int) -> None:
    layer, x, pull = Dense(inputs, outputs, "tanh"), torch.randn(50, inputs).requires_grad_(), torch.randn(50, outputs)
    wanted = (x, layer.weight, layer.bias)
    found = torch.autograd.grad((layer(x) * pull).sum(), wanted)
    exact = [v.detach().double().requires_grad_() for v in wanted]
    expected = torch.autograd.grad((torch.tanh(nn.functional.linear(*exact)) * pull).sum(), exact)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_saturated_units_stay_within_one_and_have_no_gradient() -> None:
    layer = Dense(1, 2, "tanh")
    x = torch.tensor([[1e4], [-1e4], [float("inf")]], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.abs() == 1).all()
    assert layer.bias.grad is not None
    assert (layer.bias.grad == 0).all()


def test_the_fused_layer_acts_the_same_without_gradients_and_with_more_dimensions() -> None:
    layer, x = Dense(4, 8, "tanh"), torch.randn(6, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer(x.flatten(0, 1)).unflatten(0, (6, 5)), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer(x).flatten(0, 1), layer(x.flatten(0, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("relu", nn.ReLU()),
        ("elu", nn.ELU()),
        ("silu", nn.SiLU()),
        ("swish", nn.SiLU()),
        ("gelu", nn.GELU()),
        ("linear", nn.Identity()),
    ],
)
def test_an_activation_is_the_one_it_is_called(name: str, module: nn.Module) -> None:
    layer, x = Dense(5, 7, name), torch.randn(9, 5)
    torch.testing.assert_close(layer(x), module(nn.functional.linear(x, layer.weight, layer.bias)))


def test_a_dense_layer_starts_orthogonal_and_unbiased() -> None:
    layer = Dense(16, 8, "linear", gain=0.5)
    torch.testing.assert_close(layer.weight @ layer.weight.T, 0.25 * torch.eye(8), atol=1e-5, rtol=0)
    assert not layer.bias.any()


def test_an_unknown_activation_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'tahn'.*tanh, relu"):
        Network(gs.Box(-1, 1, (2,)), 2, NetworkConfig(fcnet_activation="tahn"))


# -- entities -----------------------------------------------------------------------------------------------------------


def test_the_order_of_entities_does_not_matter() -> None:
    encoder, entities, present = EntityEncoder(3, 16), torch.randn(4, 6, 3), torch.rand(4, 6) < 0.6
    order = torch.randperm(6)
    torch.testing.assert_close(encoder(entities[:, order], present[:, order]), encoder(entities, present))


def test_absent_entities_are_as_if_they_were_not_in_the_list() -> None:
    encoder, entities = EntityEncoder(3, 16), torch.randn(2, 5, 3)
    present = torch.tensor([True, False, True, False, True])
    alone = encoder(entities[:, present], torch.ones(2, 3, dtype=torch.bool))
    entities[:, ~present] = 1e6
    torch.testing.assert_close(encoder(entities, present.expand(2, 5)), alone)


def test_a_present_entity_does_matter() -> None:
    encoder, entities, present = EntityEncoder(3, 16), torch.randn(1, 5, 3), torch.ones(1, 5, dtype=torch.bool)
    changed = entities.clone()
    changed[0, 2] += 1
    assert (encoder(entities, present) - encoder(changed, present)).abs().max() > 1e-3


def test_no_entity_at_all_is_zero_with_finite_gradients() -> None:
    encoder = EntityEncoder(3, 16)
    entities = torch.randn(2, 5, 3, requires_grad=True)
    features = encoder(entities, torch.zeros(2, 5, dtype=torch.bool))
    assert (features == 0).all()
    features.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in (entities, *encoder.parameters()))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_pointer_masks_also_hold_in_half_precision(half: torch.dtype) -> None:
    encoder, pointer = EntityEncoder(3, 16), Pointer(8, 16, 2)
    present = torch.tensor([[True, False, True, False, True], [False] * 4 + [True]])
    allowed = torch.rand(2, 2, 5) < 0.5
    with torch.no_grad(), torch.autocast("cpu", half):
        encode_entities = encoder.encode_entities(torch.randn(2, 5, 3), present)
        logits = pointer(torch.randn(2, 8), encode_entities, allowed).unflatten(-1, (2, 5))
    assert torch.isfinite(logits).all(), "what hides them has to be a number that half precision does not have"
    assert (logits[~allowed] < -1e6).all()
    assert (logits[allowed & present[:, None]].abs() < 1e3).all()


# -- images -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 6, 7, 20, 35, 36, 84])
@pytest.mark.parametrize("conv", ["nature", "resnet"])
def test_channels_first_and_last_are_the_same_image(size: int, conv: str) -> None:
    first = gs.Box(0, 255, (3, size, size + 1), np.uint8)
    last = gs.Box(0, 255, (size, size + 1, 3), np.uint8)
    one, other = ImageEncoder(first, NetworkConfig(conv=conv)), ImageEncoder(last, NetworkConfig(conv=conv))
    other.load_state_dict(one.state_dict())
    image = observations(first, 2)
    features = one(image)
    assert features.shape == (2, one.size)
    torch.testing.assert_close(other(image.permute(0, 2, 3, 1)), features)


def test_bytes_are_scaled_to_one_and_the_observation_is_left_alone() -> None:
    encoder, floats = (
        ImageEncoder(gs.Box(0, high, (1, 8, 8), dtype), NetworkConfig()) for high, dtype in ((255, np.uint8), (1, np.float32))
    )
    floats.load_state_dict(encoder.state_dict())
    image = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    as_float = image.float() / 255
    kept = as_float.clone()
    torch.testing.assert_close(floats(as_float), encoder(image))
    assert torch.equal(as_float, kept)


def test_images_keep_any_leading_dimensions() -> None:
    encoder, image = (
        ImageEncoder(gs.Box(0, 255, (10, 10, 1), np.uint8), NetworkConfig()),
        observations(gs.Box(0, 255, (10, 10, 1), np.uint8), 6),
    )
    torch.testing.assert_close(encoder(image.unflatten(0, (3, 2))), encoder(image).unflatten(0, (3, 2)))


def test_own_convolutions_replace_the_usual_ones() -> None:
    encoder = ImageEncoder(gs.Box(0, 255, (3, 20, 20), np.uint8), NetworkConfig(conv_filters=((4, 5, 5), (2, 2, 2))))
    assert encoder.size == 2 * 2 * 2  # 20 → 4 → 2 pixels, two channels


def test_convolutions_that_do_not_fit_are_refused_with_the_size_of_the_image() -> None:
    with pytest.raises(ConfigError, match=r"do not fit an image of 20×21.*conv_filters"):
        ImageEncoder(gs.Box(0, 255, (3, 20, 21), np.uint8), NetworkConfig(conv_filters=((4, 30, 1),)))


@pytest.mark.parametrize("config", [NetworkConfig(conv="vgg"), NetworkConfig(core="transformer")], ids=["conv", "core"])
def test_an_unknown_kind_of_layer_is_refused(config: NetworkConfig) -> None:
    with pytest.raises(ConfigError, match="Use '"):
        Network(gs.Box(0, 255, (3, 20, 20), np.uint8), 2, config)


# -- vectors ------------------------------------------------------------------------------------------------------------


def test_numbers_and_categories_become_one_vector_in_the_order_of_keys() -> None:
    space = gs.Dict(  # pairs keep their order, a dict would be sorted
        [
            ("d", gs.Box(0, 255, (2,), np.uint8)),
            ("c", gs.MultiDiscrete(np.array([[2], [3]]), start=np.array([[1], [0]]))),
            ("b", gs.Discrete(3, start=-1)),
            ("a", gs.Box(-9, 9, (1, 2))),
        ]
    )
    value = {"a": [[[5.0, -6.0]]], "b": [1], "c": [[[2], [1]]], "d": [[255, 51]]}
    dtypes = {"a": torch.float32, "b": torch.int64, "c": torch.int64, "d": torch.uint8}
    part = VectorPart(plan_encoders(space))
    vector = part({key: torch.tensor(value[key], dtype=dtypes[key]) for key in value})
    torch.testing.assert_close(vector, torch.tensor([[5.0, -6.0, 0, 0, 1, 0, 1, 0, 1, 0, 1.0, 0.2]]))
    assert part.size == 12


def test_the_running_norm_is_that_of_everything_it_has_seen() -> None:
    norm, random = RunningNorm(3), np.random.default_rng(0)
    batches = [random.normal([0, 5, -1e3], [1, 0.01, 50], (n, 3)).astype(np.float32) for n in (1, 7, 0, 300, 2, 1000, 1)]
    for batch in batches:
        norm.update(torch.from_numpy(batch))
    everything = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(norm.mean, everything.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(norm.variance, everything.var(axis=0), rtol=1e-4)
    assert float(norm.count) == len(everything)


def test_many_updates_do_not_wear_the_running_norm_out() -> None:
    norm, random = RunningNorm(1), np.random.default_rng(0)
    data = random.normal(3, 2, (2000, 16, 1)).astype(np.float32)
    for batch in data:
        norm.update(torch.from_numpy(batch))
    np.testing.assert_allclose(norm.mean, data.mean(dtype=np.float64), rtol=1e-4)
    np.testing.assert_allclose(norm.variance, data.var(dtype=np.float64), rtol=1e-4)


def test_the_running_norm_scales_to_unit_and_clips_outliers() -> None:
    norm = RunningNorm(2)
    x = torch.randn(5000, 2) * torch.tensor([3.0, 0.1]) + torch.tensor([7.0, -1.0])
    assert torch.equal(norm(x), x.clamp(-10, 10))
    norm.update(x)
    torch.testing.assert_close(norm(x).mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(norm(x).std(0), torch.ones(2), atol=1e-2, rtol=0)
    assert norm(torch.full((1, 2), 1e9)).tolist() == [[10.0, 10.0]]


def test_a_constant_observation_is_normalised_to_zero() -> None:
    norm = RunningNorm(1)
    norm.update(torch.full((100, 1), 4.0))
    assert norm(torch.full((1, 1), 4.0)).tolist() == [[0.0]]


# -- recurrence ---------------------------------------------------------------------------------------------------------


def reference(core: RecurrentCore, inputs: int) -> nn.LSTM | nn.GRU:
    """PyTorch's own layer with the same weights. Gates are ordered alike; the bias of the recurrent part of a GRU's
    candidate stands inside the product with the reset gate, so both biases are kept apart and made to differ."""
    other: nn.LSTM | nn.GRU = nn.LSTM(inputs, core.size) if core.kind == "lstm" else nn.GRU(inputs, core.size)
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for layer, name in ((core.input, "ih"), (core.recurrent, "hh")):
            nn.init.normal_(layer.bias)
            theirs[f"weight_{name}_l0"].copy_(layer.weight)
            theirs[f"bias_{name}_l0"].copy_(layer.bias)
    return other


def run(other: nn.LSTM | nn.GRU, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    first = tuple(s.unsqueeze(0) for s in state)
    out, last = other(x, first if isinstance(other, nn.LSTM) else first[0])
    return out, tuple(s.squeeze(0) for s in (last if isinstance(last, tuple) else (last,)))


KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])


@KINDS
def test_the_recurrent_core_is_the_layer_of_torch(kind: str) -> None:
    core = RecurrentCore(kind, 5, 7)
    other, x = reference(core, 5), torch.randn(6, 3, 5)
    state = tuple(torch.randn(3, 7) for _ in core.initial_state(3))
    out, last = core(x, state, torch.zeros(6, 3, dtype=torch.bool))
    expected, expected_last = run(other, x, state)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(last, expected_last)


@KINDS
def test_gradients_through_time_are_those_of_torch(kind: str) -> None:
    core = RecurrentCore(kind, 5, 7)
    other, x = reference(core, 5), torch.randn(6, 3, 5)
    core(x, core.initial_state(3), torch.zeros(6, 3, dtype=torch.bool))[0].square().sum().backward()
    run(other, x, core.initial_state(3))[0].square().sum().backward()
    for layer, name in ((core.input, "ih"), (core.recurrent, "hh")):
        torch.testing.assert_close(layer.weight.grad, getattr(other, f"weight_{name}_l0").grad)
        torch.testing.assert_close(layer.bias.grad, getattr(other, f"bias_{name}_l0").grad)


@KINDS
def test_first_resets_the_state_as_if_the_sequences_were_run_apart(kind: str) -> None:
    core, x = RecurrentCore(kind, 5, 7), torch.randn(8, 2, 5)
    state = tuple(torch.randn(2, 7) for _ in core.initial_state(2))
    first = torch.zeros(8, 2, dtype=torch.bool)
    first[3, 0] = first[0, 1] = first[6, 1] = True
    out, last = core(x, state, first)

    def alone(begin: int, end: int, row: int, fresh: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        began = core.initial_state(1) if fresh else tuple(s[row : row + 1] for s in state)
        piece, left = core(x[begin:end, row : row + 1], began, torch.zeros(end - begin, 1, dtype=torch.bool))
        return piece[:, 0], left

    pieces = [[alone(0, 3, 0, False), alone(3, 8, 0, True)], [alone(0, 6, 1, True), alone(6, 8, 1, True)]]
    for row, parts in enumerate(pieces):
        torch.testing.assert_close(out[:, row], torch.cat([piece for piece, _ in parts]))
        torch.testing.assert_close(tuple(s[row : row + 1] for s in last), parts[-1][1])


@KINDS
def test_no_gradient_flows_over_the_start_of_an_episode(kind: str) -> None:
    core, x = RecurrentCore(kind, 2, 3), torch.randn(4, 1, 2, requires_grad=True)
    first = torch.tensor([[False], [False], [True], [False]])
    core(x, core.initial_state(1), first)[0][2:].sum().backward()
    assert x.grad is not None
    assert (x.grad[:2] == 0).all()
    assert (x.grad[2:] != 0).all()


def test_an_lstm_begins_by_remembering() -> None:
    bias = RecurrentCore("lstm", 3, 4).input.bias
    assert bias.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


# -- the whole network --------------------------------------------------------------------------------------------------

ENTITIES = gs.Dict({"units": gs.Box(-1, 1, (4, 3)), "units_mask": gs.MultiBinary(4)})
SPACES: dict[str, Space] = {
    "vector": gs.Box(-1, 1, (4,)),
    "matrix": gs.Box(-1, 1, (2, 3)),
    "scalar": gs.Box(-1, 1, ()),
    "bytes": gs.Box(0, 255, (6,), np.uint8),
    "image CHW": gs.Box(0, 255, (3, 12, 10), np.uint8),
    "image HWC": gs.Box(0, 255, (12, 10, 3), np.uint8),
    "image float": gs.Box(0, 1, (1, 5, 5)),
    "image large": gs.Box(0, 255, (4, 40, 40), np.uint8),
    "discrete": gs.Discrete(5, start=2),
    "multidiscrete": gs.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multibinary": gs.MultiBinary((2, 3)),
    "entities": ENTITIES,
    "dict": gs.Dict({"map": gs.Box(0, 255, (9, 9, 2), np.uint8), "self": gs.Box(-1, 1, (3,)), **ENTITIES.spaces}),
    "tuple": gs.Tuple([gs.Box(-1, 1, (2,)), gs.Discrete(3)]),
    "nested": gs.Dict({"a": gs.Tuple([ENTITIES, gs.MultiBinary(2)]), "b": gs.Dict({"c": gs.Box(0, 255, (2, 8, 8), np.uint8)})}),
}
EVERY = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())


def loose(network: Network) -> set[str]:
    """Parameters that no gradient reaches: softmax ignores what is added to every key alike, so a key's bias is one."""
    return {
        name for name, p in network.named_parameters() if (p.grad is None or not p.grad.any()) and not name.endswith("key.bias")
    }


@EVERY
@pytest.mark.parametrize("lead", [(5,), (4, 3)], ids=str)
def test_every_observation_gives_finite_outputs_and_reaches_every_parameter(space: Space, lead: tuple[int, ...]) -> None:
    network = Network(space, 6, NetworkConfig(), free_outputs=(2, 5))
    outputs, value, state = network(observations(space, *lead), (), None)
    assert (outputs.shape, value.shape, state) == ((*lead, 6), lead, ())
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(value).all()
    ((outputs * torch.randn(6)).sum() + value.sum()).backward()
    assert loose(network) == set()


@EVERY
@KINDS
def test_every_observation_may_feed_a_recurrent_network(space: Space, kind: str) -> None:
    network = Network(space, 3, NetworkConfig(core=kind, cell_size=8))
    first = torch.zeros(4, 3, dtype=torch.bool)
    outputs, value, state = network(observations(space, 4, 3), network.initial_state(3), first)
    assert (outputs.shape, value.shape) == ((4, 3, 3), (4, 3))
    assert [s.shape for s in state] == [(3, 8)] * (2 if kind == "lstm" else 1)
    ((outputs * torch.randn(3)).sum() + value.sum()).backward()
    assert loose(network) == set()


@EVERY
def test_rows_of_a_batch_do_not_see_each_other(space: Space) -> None:
    network, observation = Network(space, 3, NetworkConfig()), observations(space, 6)
    outputs, value, _ = network(observation, (), None)
    one_output, one_value, _ = network(map_tree(lambda x: x[2:3], observation), (), None)
    torch.testing.assert_close(one_output, outputs[2:3], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one_value, value[2:3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_the_default_network_is_two_towers_of_dense_layers(activation: str) -> None:
    network = Network(gs.Box(-1, 1, (4,)), 2, NetworkConfig(fcnet_hiddens=(8, 7), fcnet_activation=activation))
    x = torch.randn(5, 4)

    def tower(prefix: str, head: str) -> Tensor:
        weights, y = dict(network.named_parameters()), x
        for layer in range(2):
            y = nn.functional.linear(y, weights[f"{prefix}.dense.{layer}.weight"], weights[f"{prefix}.dense.{layer}.bias"])
            y = ACTIVATIONS[activation](y)
        return nn.functional.linear(y, weights[f"{head}.weight"], weights[f"{head}.bias"])

    outputs, value, _ = network(x, (), None)
    torch.testing.assert_close(outputs, tower("trunk", "head"), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(value, tower("value_trunk", "value_head").squeeze(-1), atol=1e-6, rtol=1e-5)


def test_free_outputs_stand_where_they_were_asked_for_and_ignore_the_observation() -> None:
    network = Network(gs.Box(-1, 1, (4,)), 5, NetworkConfig(), free_outputs=(1, 3))
    assert network.log_std is not None
    network.log_std.data.copy_(torch.tensor([7.0, 9.0]))
    outputs, _, _ = network(torch.randn(6, 4), (), None)
    assert (outputs[:, [1, 3]] == torch.tensor([7.0, 9.0])).all()
    assert (outputs[:, [0, 2, 4]].std(dim=0) > 0).all()
    assert Network(gs.Box(-1, 1, (4,)), 5, NetworkConfig(free_log_std=False), free_outputs=(1, 3)).log_std is None


def test_a_network_of_no_hidden_layers_is_linear() -> None:
    network, x = Network(gs.Box(-1, 1, (4,)), 2, NetworkConfig(fcnet_hiddens=())), torch.randn(3, 4)
    torch.testing.assert_close(network(x, (), None)[0], nn.functional.linear(x, network.head.weight, network.head.bias))


def test_value_and_policy_share_layers_if_configured_or_recurrent() -> None:
    vector = gs.Box(-1, 1, (4,))
    assert Network(vector, 2, NetworkConfig(vf_share_layers=True)).value_trunk is None
    assert Network(vector, 2, NetworkConfig(core="gru")).value_trunk is None
    assert Network(SPACES["image CHW"], 2, NetworkConfig(vf_share_layers=False)).value_trunk is not None
    with pytest.raises(ConfigError, match="recurrent"):
        Network(vector, 2, NetworkConfig(core="gru", vf_share_layers=False))


def test_a_two_dimensional_box_is_an_entity_set_only_with_its_mask() -> None:
    assert len(Network(ENTITIES, 2, NetworkConfig()).trunk.sets) == 1
    alone = gs.Dict({"units": gs.Box(-1, 1, (4, 3)), "units_mask": gs.MultiBinary(3)})
    network = Network(alone, 2, NetworkConfig())
    assert (len(network.trunk.sets), network.vector.size) == (0, 15)


@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_pictures_arranged_for_learning_give_the_same_features(lead: tuple[int, ...]) -> None:
    space = gs.Dict({"a": gs.Tuple((gs.Box(0, 255, (4, 40, 44), np.uint8),)), "b": gs.Box(-1, 1, (2,))})
    network, seen = Network(space, 3, NetworkConfig()), observations(space, *lead)
    to_network_layout = network.to_network_layout(seen)
    assert to_network_layout["a"][0].shape == (*lead, 40, 44, 4)
    for mine, theirs in zip(network(to_network_layout, (), None)[:2], network(seen, (), None)[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
