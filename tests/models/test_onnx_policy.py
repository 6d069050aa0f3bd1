"""Exported policies at work: the same decisions as the original's, through the same methods."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch

from ludus.core.tree import leaves
from ludus.errors import Damaged, MissingExtra, UsageError
from ludus.models.export import onnx_export, parity
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.inference.onnx_policy import OnnxPolicy
from ludus.models.policy import BatchDecision, Policy
from ludus.models.weights import serialization
from ludus.serving.release import Release, ReleasedModel, read, warm_up, write
from tests.models.test_onnx_export import made, one_layer, traced

LSTM = "lstm, entities, hybrid"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_same(mine: BatchDecision, theirs: BatchDecision) -> None:
    assert mine.lost is theirs.lost is None
    for (path, a), (other, b) in zip(leaves(tuple(mine)[:-1]), leaves(tuple(theirs)[:-1]), strict=True):
        assert (path, a.dtype, a.shape) == (other, b.dtype, b.shape)
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=path)


def test_decisions_have_the_structure_and_the_numbers_of_the_original() -> None:
    policy, exported, rng = made(LSTM), OnnxPolicy(traced(LSTM)), np.random.default_rng(0)
    seen = parity.random_observations(policy.observation_space, 33, rng)
    mask, noise = parity.random_mask(policy.action_space, 33, rng), policy.draw_noise(33, torch.Generator().manual_seed(1))
    state = tuple(rng.normal(size=(33, 24)).astype(np.float32) for _ in range(2))
    check_same(policy.act(seen, state, mask, noise), exported.act(seen, state, mask, noise))
    check_same(policy.act(seen, state), exported.act(seen, state))
    np.testing.assert_array_equal(exported.draw_noise(33, torch.Generator().manual_seed(1)), noise)
    assert exported.recurrent
    assert exported.state_spec() == policy.state_spec()
    check_same(exported.act(seen, exported.initial_state(33)), exported.act(seen))


@pytest.mark.parametrize("kind", [LSTM, "gru, tuple"])
def test_a_hundred_steps_with_its_own_state_stay_together(kind: str) -> None:
    policy, exported, rng = made(kind), OnnxPolicy(traced(kind)), np.random.default_rng(0)
    mine = theirs = tuple(spec.zeros(4) for spec in policy.state_spec())
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        seen = parity.random_observations(policy.observation_space, 4, rng)
        noise = policy.draw_noise(4, generator)
        one, two = policy.act(seen, mine, None, noise), exported.act(seen, theirs, None, noise)
        check_same(one, two)
        mine, theirs = one.state, two.state


def test_noise_times_t_draws_from_logits_divided_by_t() -> None:
    exported, rows = OnnxPolicy(traced("mlp")), 40_000
    seen = np.repeat(parity.random_observations(exported.observation_space, 1, np.random.default_rng(3)), rows, axis=0)
    logits = exported.logits(seen[:1])[0].astype(np.float64)
    noise = exported.draw_noise(rows, torch.Generator().manual_seed(0))
    for temperature in (0.5, 1.0, 3.0):
        drawn = np.bincount(exported.act(seen, (), None, noise * np.float32(temperature)).action, minlength=5) / rows
        p = np.exp(logits / temperature)
        np.testing.assert_allclose(drawn, p / p.sum(), atol=0.012)  # five standard deviations
    assert set(exported.act(seen, (), None, noise * 0).action) == {int(logits.argmax())} == set(exported.act(seen).action)


def test_a_masked_option_is_never_chosen() -> None:
    exported = OnnxPolicy(traced("mlp"))
    rng = np.random.default_rng(0)
    mask = parity.random_mask(exported.action_space, 2000, rng)
    seen = parity.random_observations(exported.observation_space, 2000, rng)
    assert mask is not None
    chosen = exported.act(seen, (), mask, exported.draw_noise(2000, torch.Generator().manual_seed(0))).chosen
    assert mask[np.arange(2000), chosen].all()
    assert not mask[np.arange(2000), exported.act(seen).chosen].all()


def test_without_the_value_the_actions_are_the_same() -> None:
    whole, part = OnnxPolicy(traced("mlp")), OnnxPolicy(traced("mlp"), value=False)
    seen = parity.random_observations(whole.observation_space, 50, np.random.default_rng(0))
    np.testing.assert_array_equal(whole.act(seen).action, part.act(seen).action)
    assert not part.act(seen).value.any()
    assert whole.act(seen).value.all()
    left = {item.name for item in onnx.load_from_string(onnx_export.without(traced("mlp"), ["value"])).graph.initializer}
    assert not {name for name in left if "value" in name}


def test_new_weights_are_taken_up() -> None:
    policy, exported = made("mlp", seed=5), OnnxPolicy(traced("mlp"))
    seen = parity.random_observations(policy.observation_space, 50, np.random.default_rng(0))
    assert exported.version == 7
    assert np.abs(exported.act(seen).value - policy.act(seen).value).max() > 0.1
    exported.load_weights(policy.weights(), 9)
    check_same(policy.act(seen), exported.act(seen))
    assert exported.version == 9


def test_an_exported_policy_answers_sessions() -> None:
    exported = OnnxPolicy(traced(LSTM))

    class Source:
        def newest(self) -> tuple[OnnxPolicy, int]:
            return exported, 3

    async def play() -> None:
        deciding = BatchedPolicy(Source(), deterministic=True)
        seen = [parity.random_observations(exported.observation_space, 1, np.random.default_rng(i)) for i in range(3)]
        rows = [{key: value[0] for key, value in one.items()} for one in seen]
        first = await asyncio.gather(*(deciding.decide(row) for row in rows))
        again = await deciding.decide(rows[1], first[1].state)
        alone = exported.act(seen[1], exported.act(seen[1]).state)
        assert again.version == 3
        assert again.action["fire"] == alone.action["fire"][0]
        np.testing.assert_allclose(again.state[0], alone.state[0][0], atol=1e-6)

    asyncio.run(play())


@pytest.mark.parametrize("exported", [False, True])
def test_a_release_is_warmed_up_before_it_serves(exported: bool, tmp_path: Path) -> None:
    policy = made("mlp")
    part = ReleasedModel(json.dumps(policy.description()).encode(), serialization.encode_weights(policy.weights()), 7)
    artefacts = {"it": traced("mlp")} if exported else None
    write(Release(7, {"": "it"}, {"it": part}), tmp_path / "release", artefacts)
    player = read(tmp_path / "release", values=False).policies["it"]
    assert isinstance(player, OnnxPolicy if exported else Policy)
    if isinstance(player, OnnxPolicy):
        assert player._defaults.keys() == {1, 8, 64}  # inputs that were left out, by batch size

    class Counting(Policy):
        sizes: ClassVar[list[int]] = []

        def act(self, observation: Any, *rest: Any) -> BatchDecision:
            self.sizes.append(len(observation))
            return super().act(observation, *rest)

    warm_up(Counting(policy.observation_space, policy.action_space))
    assert Counting.sizes == [1, 8, 64]


def test_a_file_is_read_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "it.onnx"
    file.write_bytes(traced("mlp"))
    assert OnnxPolicy(file).model == OnnxPolicy(str(file)).model == "it"
    with pytest.raises(UsageError, match="Cannot read"):
        OnnxPolicy(tmp_path / "none.onnx")
    with pytest.raises(Damaged):
        OnnxPolicy(traced("mlp")[:-50])
    foreign = onnx.load_from_string(traced("mlp"))
    del foreign.metadata_props[:]
    with pytest.raises(UsageError, match="not exported by ludus"):
        OnnxPolicy(foreign.SerializeToString())
    with pytest.raises(UsageError, match="not a policy"):
        OnnxPolicy(one_layer())


def test_without_onnxruntime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = traced("mlp")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ludus\[serve\]'"):
        OnnxPolicy(model)
