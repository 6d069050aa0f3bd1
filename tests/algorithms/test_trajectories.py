"""Trajectories: what a policy says about recorded steps is what it said when it made them, whatever is padded, cut or kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ludus.algorithms.returns import next_values
from ludus.algorithms.trajectories import Trajectories
from ludus.core.types import Segments
from tests.algorithms.sampled import Sampled, disturbed, padded

LSTM = {"core": "lstm", "cell_size": 8, "max_seq_len": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vector, next-step reset": ("CartPole-v1", {}),
    "truncated, next-step reset": ("tests.games:endless", {}),
    "truncated, same-step reset": ("tests.games:endless_same_step", {}),
    "masks, hybrid actions, dict observations": ("tests.games:remember_and_aim", {}),
    "pictures": ("tests.games:BrightSide", {}),
    "entities and bits": ("tests.games:Nearest", {}),
    "filtered": ("Pendulum-v1", {"normalise": True}),
    "lstm": ("CartPole-v1", LSTM),
    "gru, sequences of another length than the segment": ("CartPole-v1", LSTM | {"core": "gru", "max_seq_len": 5}),
    "lstm, one sequence": ("tests.games:endless", LSTM | {"max_seq_len": 50}),
    "lstm, same-step reset": ("tests.games:endless_same_step", LSTM),
    "lstm, masks, hybrid actions": ("tests.games:remember_and_aim", LSTM),
    "lstm, pictures": ("tests.games:BrightSide", LSTM),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def sampled(request: pytest.FixtureRequest) -> Any:
    env, settings = request.param
    source = Sampled(env, 6, 12, **settings)
    yield source
    source.close()


def recorded_following(block: Segments) -> Any:
    n = block.finals
    return next_values(block.value, block.final_at[:n], block.final_value[:n])


def test_evaluation_reproduces_the_outputs_of_acting(sampled: Sampled) -> None:
    for block in (sampled.block(), sampled.block()):
        batch = Trajectories.from_segments(block)
        found = batch.evaluate(sampled.policy)
        assert found.log_prob.requires_grad
        assert found.value.requires_grad
        np.testing.assert_allclose(found.log_prob.detach(), block.log_prob[block.valid], atol=2e-5)
        np.testing.assert_allclose(found.value.detach(), block.value[:-1][block.valid], atol=2e-5)
        goes_on = block.valid & ~block.terminated
        np.testing.assert_allclose(found.next_value[goes_on], recorded_following(block)[goes_on], atol=2e-5)


def test_chunks_evaluate_like_the_whole_batch(sampled: Sampled) -> None:
    block = sampled.block()
    disturbed(sampled.policy)
    batch = Trajectories.from_segments(block)
    whole = batch.evaluate_grids(sampled.policy, 10_000)
    in_parts = batch.to_network_layout(sampled.policy).evaluate_grids(sampled.policy, 25)
    index = torch.tensor([4, 0, 5])
    few = batch.select(index).evaluate_grids(sampled.policy, 10_000)
    valid, goes_on = block.valid, block.valid & ~block.terminated
    for all_of, parts, some, needed in zip(whole, in_parts, few, (valid, valid, goes_on), strict=True):
        np.testing.assert_allclose(parts[needed], all_of[needed], atol=2e-5)
        np.testing.assert_allclose(some[needed[:, index]], all_of[:, index][needed[:, index]], atol=2e-5)
    assert not np.allclose(whole.log_prob[valid], block.log_prob[valid], atol=1e-3), "the policy has moved"


@pytest.mark.parametrize("extra", [1, 4, 7])
def test_padding_is_never_looked_at(sampled: Sampled, extra: int) -> None:
    block = sampled.block()
    block.valid[8:, 2] = False  # one row is shorter than the others
    block.terminated[7, 2] = block.truncated[7, 2] = False
    disturbed(sampled.policy)
    short, long = (Trajectories.from_segments(b).evaluate(sampled.policy) for b in (block, padded(block, extra)))
    steps = block.spec.steps
    for mine, theirs in zip(short[:3], long[:3], strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), atol=1e-6)
    needed = block.valid & ~block.terminated
    np.testing.assert_allclose(long.next_value[:steps][needed], short.next_value[needed], atol=1e-6)
    for output in long[:3]:
        output.sum().backward(retain_graph=True)
    grads = [p.grad for p in sampled.policy.parameters() if p.grad is not None]
    assert grads
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


def test_selected_rows_keep_their_final_observations() -> None:
    source = Sampled("tests.games:endless_same_step", 6, 12)
    block = source.block()
    assert block.finals > 6
    batch = Trajectories.from_segments(block)
    few = batch.select(torch.tensor([5, 2]))
    expected = {(t, [5, 2].index(b)) for t, b in block.final_at[: block.finals].tolist() if b in (5, 2)}
    assert set(map(tuple, few.final_at.tolist())) == expected
    assert len(few.final_observation) == len(expected) == len(few.final_value)
    assert batch.final_at.tolist() == block.final_at[: block.finals].tolist(), "the whole is left as it was"
    source.close()


def test_neighbours_are_a_view_and_the_whole_is_itself() -> None:
    source = Sampled("CartPole-v1", 6, 12)
    batch = Trajectories.from_segments(source.block())
    assert batch.select(torch.arange(6)) is batch
    few = batch.select(torch.arange(2, 5))
    assert few.observation.data_ptr() == batch.observation[:, 2:].data_ptr()
    source.close()
