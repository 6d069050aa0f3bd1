"""Observations of very many categories: embedded above a bound, refused above another, one-hot in earlier checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

import ludus
from ludus.envs import registry
from ludus.errors import ConfigError
from ludus.experiments.runs import checkpoint
from ludus.models.export import onnx_export, parity
from ludus.models.network_config import NetworkConfig
from ludus.models.observation_encoder import EMBED_ABOVE, EMBEDDING_SIZE, MAX_CATEGORIES
from ludus.models.policy import Policy
from ludus.models.weights.serialization import policy_from
from ludus.sampling.trained_agent import TrainedAgent
from tests.generated_spaces import Random

ROOM = gs.Dict({"room": gs.Discrete(100_000, start=-5), "items": gs.MultiDiscrete([3, 5000]), "speed": gs.Box(-1, 1, (2,))})


def policy_of(space: gym.Space[Any], norm: bool = False, embed_above: int | None = EMBED_ABOVE) -> Policy:
    return Policy(space, gs.Discrete(3), NetworkConfig(fcnet_hiddens=(8,), embed_above=embed_above), norm)


def test_many_categories_are_embedded_and_few_stay_one_hot() -> None:
    policy = policy_of(ROOM, norm=True)
    assert policy.network.vector.size == 2 + EMBEDDING_SIZE * 3
    assert policy.network.norm is not None
    assert policy.network.norm.mean.shape == (2,)  # embeddings are learned, not normalised
    seen = {"room": torch.tensor([-5, 99_994]), "items": torch.tensor([[0, 0], [2, 4999]]), "speed": torch.randn(2, 2)}
    policy.update_normaliser(seen)
    log_prob, _, value = policy.evaluate(seen, torch.tensor([0, 1]))
    (log_prob.sum() + value.sum()).backward()
    table = policy.network.vector.embeddings[1].table.weight  # type: ignore[union-attr,index]
    assert table.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [0, 99_999]
    assert not any("embeddings" in name for name in policy_of(gs.Discrete(EMBED_ABOVE)).weights())


def test_an_embedding_acts_the_same_when_loaded_frozen_and_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "BATCH_SIZES", (1, 20))
    policy = policy_of(ROOM)
    loaded = policy_from(json.dumps(policy.description()).encode())
    loaded.load_weights(policy.weights())
    shown = [ROOM.sample() for _ in range(8)]
    assert [TrainedAgent(policy).act(one) for one in shown] == [TrainedAgent(loaded).act(one) for one in shown]
    rows = {key: torch.from_numpy(np.stack([one[key] for one in shown])) for key in shown[0]}
    with torch.no_grad():
        value = policy.value(rows)
    with policy.acting():
        torch.testing.assert_close(policy.value(rows), value, atol=1e-5, rtol=1e-5)
    _, report = parity.artefact(policy, onnx_export.export_policy(policy))
    assert report.passed, report.reasons


def test_too_many_categories_are_refused_with_the_figure() -> None:
    with pytest.raises(ConfigError, match=r"observation\.id has 10,000,000 categories; .* 5\.1 GB .*At most 4,194,304"):
        policy_of(gs.Dict({"id": gs.Discrete(10_000_000)}))
    assert MAX_CATEGORIES == 4_194_304


def test_a_run_of_an_earlier_release_goes_on_with_one_hot_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ludus.register_env("rooms", lambda: Random(gs.Discrete(1500), gs.Discrete(2)))
    small: Any = {"num_envs": 2, "train_batch_size": 8, "minibatch_size": 8, "num_epochs": 1, "model": {"fcnet_hiddens": [4]}}
    try:
        with monkeypatch.context() as earlier:
            earlier.setattr("ludus.experiments.assembly.policies.EMBED_ABOVE", None)
            first = ludus.train("rooms", stop={"timesteps": 8}, local_dir=tmp_path, **small)
        assert checkpoint.open_checkpoint(first.run_dir)[1].embed_above("model") is None
        later = ludus.resume(first.run_dir, {"timesteps": 16})
        assert later.agent.policy.network.vector.size == 1500
    finally:
        registry._registered.pop("rooms")
