"""Less than float32 where it is safe: the same learning within its rounding, and a scale that follows overflows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ludus.algorithms.optim.flat_adam import FlatAdam, LossScale
from ludus.errors import ConfigError, TrainingDiverged
from tests.algorithms.experience import experience, policy_for, ppo


@pytest.mark.parametrize("kind", ["mlp", "lstm", "hybrid"])
def test_bf16_learns_the_same_within_its_rounding(kind: str) -> None:
    block = experience(policy_for(kind), 12, 6)
    exact, rounded = ppo(policy_for(kind), lr=1e-3), ppo(policy_for(kind), lr=1e-3, mixed_precision="bf16")
    exact.learn(block, 0)
    rounded.learn(block, 0)
    change = exact.optimizer.flat - ppo(policy_for(kind)).optimizer.flat
    difference = rounded.optimizer.flat - exact.optimizer.flat
    assert rounded.optimizer.flat.dtype == torch.float32
    assert 0 < float(difference.norm()) < 0.5 * float(change.norm())


def test_bf16_computes_in_bf16() -> None:
    seen = []

    def loss(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = model(x)
        seen.append(y.dtype)
        return y.float().square().mean(), {}

    optimizer = FlatAdam(nn.Linear(3, 2), lr=1e-3, precision="bf16")
    optimizer.step(loss, [torch.ones(4, 3)], [1.0])
    assert seen == [torch.bfloat16]
    assert optimizer.grad.dtype == torch.float32


def test_fp16_needs_an_accelerator() -> None:
    with pytest.raises(ConfigError, match=r"mixed_precision is fp16.*Use bf16"):
        FlatAdam(nn.Linear(3, 2), lr=1e-3, precision="fp16")


def scaled(value: float = 2.0**10, patience: int = 2) -> FlatAdam[nn.Linear]:
    """As on an accelerator with fp16, but for the precision."""
    torch.manual_seed(0)
    optimizer = FlatAdam(nn.Linear(3, 2), lr=1e-2, grad_clip=0.5)
    optimizer.scale = LossScale(value, patience)
    return optimizer


def error(model: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(x).square().mean()
    return loss, {"loss": loss.detach()}


def test_a_scaled_loss_gives_the_same_weights() -> None:
    optimizer = scaled()
    torch.manual_seed(0)
    twin = nn.Linear(3, 2)
    plain, x = FlatAdam(twin, lr=1e-2, grad_clip=0.5), torch.randn(8, 3)
    for _ in range(5):
        numbers = optimizer.step(error, [x], [1.0])
        assert float(numbers["loss"]) == pytest.approx(float(plain.step(error, [x], [1.0])["loss"]))
    torch.testing.assert_close(optimizer.flat, plain.flat)
    assert optimizer.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert optimizer.scale is not None
    assert optimizer.scale.value == 2.0**12, "it doubles after every two good gradients"


def test_a_gradient_that_overflows_is_left_out_and_halves_the_scale() -> None:
    optimizer = scaled()
    before = optimizer.flat.clone()
    optimizer.step(error, [torch.full((4, 3), float("inf"))], [1.0])
    assert torch.equal(optimizer.flat, before)
    assert optimizer.updates == 0
    assert optimizer.scale is not None
    assert optimizer.scale.value == 2.0**9


def test_a_gradient_that_overflows_at_any_scale_is_divergence() -> None:
    scale = LossScale(2.0**-9)
    assert not scale.update(finite=False)
    with pytest.raises(TrainingDiverged, match="at every loss scale"):
        scale.update(finite=False)


def test_the_scale_is_part_of_the_state() -> None:
    optimizer = scaled()
    optimizer.step(error, [torch.ones(4, 3)], [1.0])
    other = scaled(value=4.0)
    other.load_state(optimizer.state())
    assert other.scale is not None
    assert (other.scale.value, other.scale.good) == (2.0**10, 1)
