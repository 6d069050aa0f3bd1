"""Layers over parts that stand side by side, against the plain form: join them, then go apply_mlp the layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ludus.models.layers import apply_mlp, mlp

WIDE = 400


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hiddens", [[16], [16, 8], []])
@pytest.mark.parametrize("learned", [(True, False), (False, True), (True, False, False, True), (False, False), (True, True)])
def test_parts_side_by_side_are_one_input(activation: str, hiddens: list[int], learned: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    widths = [7 if needed else WIDE + i for i, needed in enumerate(learned)]
    layers = mlp(sum(widths), hiddens, activation)
    joined = torch.randn(2, 5, sum(widths))

    def gradients(split: bool) -> tuple[Tensor, ...]:
        parts = [part.clone().requires_grad_(needed) for part, needed in zip(joined.split(widths, -1), learned, strict=True)]
        out = apply_mlp(layers, parts) if split else layers(torch.cat(parts, dim=-1))
        wanted = [*layers.parameters(), *(part for part in parts if part.requires_grad)]
        if not wanted:
            return (out,)
        return (out, *torch.autograd.grad((out.sin() * out).sum(), wanted))

    for ours, plain in zip(gradients(split=True), gradients(split=False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_what_was_observed_leads_to_no_product_of_gradients() -> None:
    """The widest product of the pass back is then that of the weights."""
    layers = mlp(8 + WIDE, [16], "relu")
    features, seen = torch.randn(32, 8, requires_grad=True), torch.randn(32, WIDE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        apply_mlp(layers, [features, seen]).sum().backward()
    products = {tuple(map(tuple, event.input_shapes[:2])) for event in profile.events() if event.name == "aten::mm"}
    assert products, "the profiler has seen nothing"
    assert not any(((32, 16), (16, width)) in products for width in (WIDE, 8 + WIDE))
