from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ludus.algorithms.optim.flat_adam import FlatAdam, Metrics
from ludus.errors import TrainingDiverged

Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def convolution() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(45, 3)
    )
    return body.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def batches(model: nn.Module, count: int, rows: int = 12) -> Iterator[Pair]:
    shape = (6,) if isinstance(model[0], nn.Linear) else (3, 6, 6)  # type: ignore[index]
    for _ in range(count):
        yield torch.randn(rows, *shape), 5 * torch.randn(rows, 3)


def error(model: nn.Module, batch: Pair) -> tuple[Tensor, Metrics]:
    loss = (model(batch[0]) - batch[1]).square().mean()
    return loss, {"loss": loss.detach()}


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


MODELS = pytest.mark.parametrize("make", [dense, convolution])


@MODELS
@pytest.mark.parametrize("grad_clip", [None, 0.5, 1e6])
def test_fifty_steps_are_those_of_torch(make: type[nn.Module], grad_clip: float | None) -> None:
    model = make()
    twin = copy.deepcopy(model)
    ours = FlatAdam(model, lr=3e-3, betas=(0.8, 0.99), eps=1e-5, grad_clip=grad_clip)
    theirs = torch.optim.Adam(twin.parameters(), lr=3e-3, betas=(0.8, 0.99), eps=1e-5)
    for batch in batches(model, 50):
        ours.step(error, [batch], [1.0])
        theirs.zero_grad()
        error(twin, batch)[0].backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), grad_clip or float("inf"))
        theirs.step()
        assert ours.grad_norm == pytest.approx(float(norm), rel=1e-4)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-5)
    assert ours.updates == 50


@MODELS
def test_parameters_keep_their_values_and_layout_and_become_views_of_one_vector(make: type[nn.Module]) -> None:
    model = make()
    before, strides = weights(model), [p.stride() for p in model.parameters()]
    optimizer = FlatAdam(model, lr=1e-3)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert [p.stride() for p in model.parameters()] == strides
    optimizer.flat.fill_(7)
    optimizer.grad.fill_(9)
    for p in model.parameters():
        assert p.grad is not None
        assert ((p == 7) & (p.grad == 9)).all()


@MODELS
@pytest.mark.parametrize("threads", [2, 3])
def test_shards_on_several_threads_give_the_gradient_of_the_whole(make: type[nn.Module], threads: int) -> None:
    model = make()
    twin = copy.deepcopy(model)
    alone, shared = FlatAdam(model, lr=1e-3, grad_clip=1.0), FlatAdam(twin, lr=1e-3, grad_clip=1.0, threads=threads)
    for x, y in batches(model, 10, rows=13):
        cut = torch.arange(13).tensor_split(threads)
        whole = alone.step(error, [(x, y)], [1.0])
        parts = shared.step(error, [(x[i], y[i]) for i in cut], [len(i) / 13 for i in cut])
        torch.testing.assert_close(parts, whole)
        assert shared.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
    shared.close()
    torch.testing.assert_close(weights(twin), weights(model), rtol=1e-4, atol=1e-5)


def test_fewer_shards_than_threads_leave_no_old_gradient_behind() -> None:
    model, batch = dense(), next(batches(dense(), 1))
    twin = copy.deepcopy(model)
    alone, shared = FlatAdam(model, lr=1e-3), FlatAdam(twin, lr=1e-3, threads=2)
    alone.step(error, [batch], [1.0])
    alone.step(error, [batch], [1.0])
    shared.step(error, [batch, batch], [0.5, 0.5])
    shared.step(error, [batch], [1.0])
    shared.close()
    torch.testing.assert_close(weights(twin), weights(model), rtol=1e-4, atol=1e-6)


def test_buffers_are_shared_with_the_threads() -> None:
    model = nn.BatchNorm1d(3)
    optimizer = FlatAdam(model, lr=0.0, threads=2)
    model.eval()
    assert model.running_mean is not None
    model.running_mean.fill_(100)

    def seen(m: nn.BatchNorm1d, x: Tensor) -> tuple[Tensor, Metrics]:
        y = m.eval()(x)
        return y.sum(), {"mean": y.detach().mean()}

    numbers = optimizer.step(seen, [torch.zeros(2, 3), torch.zeros(2, 3)], [0.5, 0.5])
    optimizer.close()
    assert float(numbers["mean"]) == pytest.approx(-100, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_gradient_that_is_no_number_stops_training_and_changes_nothing(bad: float, threads: int) -> None:
    model = dense()
    good, fine, poisoned = batches(model, 3)
    optimizer = FlatAdam(model, lr=1e-2, grad_clip=0.5, threads=threads)
    optimizer.step(error, [good], [1.0])
    before, state = weights(model), optimizer.state()
    poisoned[1][3, 1] = bad
    with pytest.raises(TrainingDiverged, match="at update 1"):
        optimizer.step(error, [fine, poisoned][-threads:], [1 / threads] * threads)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert all(np.array_equal(state[name], value) for name, value in optimizer.state().items())
    optimizer.step(error, [fine], [1.0])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    optimizer.close()


@MODELS
def test_a_restored_state_continues_identically(make: type[nn.Module]) -> None:
    model = make()
    optimizer, data = FlatAdam(model, lr=1e-2), list(batches(model, 12))
    for batch in data[:6]:
        optimizer.step(error, [batch], [1.0])
    other, state = make(), {name: value.copy() for name, value in optimizer.state().items()}
    other.load_state_dict(model.state_dict())
    resumed = FlatAdam(other, lr=1e-2)
    resumed.load_state(state)
    for batch in data[6:]:
        optimizer.step(error, [batch], [1.0])
        resumed.step(error, [batch], [1.0])
    torch.testing.assert_close(weights(other), weights(model), rtol=0, atol=0)
    assert resumed.updates == 12


def test_a_state_is_a_copy() -> None:
    model = dense()
    optimizer = FlatAdam(model, lr=1e-2)
    state = optimizer.state()
    for batch in batches(model, 2):
        optimizer.step(error, [batch], [1.0])
    assert not state["mean"].any()
    assert int(state["updates"]) == 0


def test_a_new_learning_rate_counts_from_the_next_step() -> None:
    model = dense()
    optimizer, (one, two) = FlatAdam(model, lr=0.0), batches(model, 2)
    before = weights(model)
    optimizer.step(error, [one], [1.0])
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    optimizer.lr = 0.1
    optimizer.step(error, [two], [1.0])
    assert all((a != b).any() for a, b in zip(weights(model), before, strict=True))


def test_the_plain_formula_gives_what_the_fused_kernel_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        optimizer = FlatAdam(model, lr=0.01, grad_clip=0.5)
        if not fused:
            monkeypatch.setattr("ludus.algorithms.optim.flat_adam._FUSED", None)
        for step in range(20):
            optimizer.grad.copy_(torch.sin(torch.arange(42.0) * (step + 1)))
            optimizer.apply()
        results.append(optimizer.flat.clone())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)
