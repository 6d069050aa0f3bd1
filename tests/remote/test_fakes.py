"""Fakes: a model without a network, a buffer that is always full."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.errors import UsageError
from ludus.models.policy import Policy
from ludus.remote.context import RunContext
from tests.remote.parts import Scale, Two

X = np.ones(4, np.float32)


def test_a_fake_model_returns_outputs_of_the_given_shape(run: RunContext) -> None:
    outputs = {"logits": np.zeros(6, np.float32), "pair": (np.float32(0), np.array([9, 9], np.int64)), "flag": np.bool_(True)}
    ludus.fake.FakeModel("atari", outputs=outputs)
    model = ludus.RemoteModel(name="atari")
    answers: list[Any] = [asyncio.run(model.forward(X)) for _ in range(20)]  # type: ignore[arg-type]
    for answer in answers:
        assert answer["logits"].shape == (6,)
        assert answer["logits"].dtype == np.float32
        assert answer["pair"][0].shape == ()
        assert answer["pair"][1].dtype == np.int64
        assert ((answer["pair"][1] >= 0) & (answer["pair"][1] <= 9)).all()
        assert answer["flag"].dtype == np.bool_
    assert len({float(answer["logits"][0]) for answer in answers}) > 10, "it is not random"
    assert max(answer["pair"][1].max() for answer in answers) > 1


def test_a_fake_model_can_be_asked_trained_and_published_like_any_other(run: RunContext) -> None:
    model = ludus.fake.FakeModel("m", outputs=np.zeros(2, np.float32), forward_args=(X,))
    network = model.get_model()
    loss = network(torch.ones(3, 4)).sum()
    loss.backward()
    assert model.publish_weights(ludus.get_torch_model_weights(network)) == 2
    assert model(X).shape == (2,)
    with pytest.raises(UsageError):
        model(np.ones(5, np.float32))


def full(name: str) -> dict[str, int]:
    buffer = ludus.RemoteBuffer(name)
    deadline = time.monotonic() + 20
    while (stats := buffer.stats())["waiting"] < stats["size"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.005)
    return stats


def test_a_fake_buffer_is_always_full_of_things_like_the_example(run: RunContext) -> None:
    example = {"x": np.full(3, 5, np.float32), "n": np.int64(4), "pair": (1.0, True)}
    fake = ludus.fake.FakeBuffer("b", example, size=20)
    assert full("b")["dropped"] == 0
    buffer = ludus.RemoteBuffer("b", batch_size=8)
    for _ in range(5):
        batch = buffer.take(10)
        assert batch["x"].shape == (8, 3)
        assert batch["x"].dtype == np.float32
        assert np.abs(batch["x"] - 5).max() < 1
        assert len(np.unique(batch["x"])) > 8, "nothing varies"
        assert (batch["n"] == 4).all()
        assert batch["pair"][1].all()
    assert full("b")["dropped"] == 0
    fake.close()


def segment_of(run: RunContext, **arguments: Any) -> Any:
    fake = ludus.fake.FakeBuffer("b", steps=5, **arguments)
    taken = ludus.RemoteBuffer("b").take(10)
    fake.close()
    return taken


def test_without_an_example_it_makes_segments_from_the_inputs_of_the_only_model(run: RunContext) -> None:
    ludus.RemoteModel("net", Two(), forward_args=(X,))
    segment = segment_of(run)
    assert segment["observation"].shape == (6, 4)
    assert segment["observation"].dtype == np.float32
    for name in ("action", "reward", "terminated", "truncated", "valid", "log_prob", "version"):
        assert segment[name].shape == (5,), name
    assert segment["value"].shape == (6,)
    assert segment["action"].dtype == np.int64
    assert set(segment["action"].tolist()) <= {0, 1}, "Two has two outputs"


def test_segments_of_a_policy_come_from_its_spaces(run: RunContext) -> None:
    spaces = gym.spaces.Dict({"a": gym.spaces.Box(0, 1, (2,)), "b": gym.spaces.Discrete(3)}), gym.spaces.MultiDiscrete([2, 5])
    ludus.RemoteModel("one", Policy(*spaces))
    ludus.RemoteModel("two", Scale())
    segment = segment_of(run, model="one")
    assert segment["observation"]["a"].shape == (6, 2)
    assert segment["action"].shape == (5, 2)


def test_a_model_that_declares_no_inputs_gets_lone_numbers_and_a_warning(
    run: RunContext, caplog: pytest.LogCaptureFixture
) -> None:
    ludus.RemoteModel("net", Two())
    assert segment_of(run)["observation"].shape == (6, 1)
    assert "declares no inputs" in caplog.text


def test_which_model_is_meant_must_be_clear(run: RunContext) -> None:
    with pytest.raises(UsageError, match="0 models"):
        ludus.fake.FakeBuffer("b")
    ludus.RemoteModel("one", Scale())
    ludus.RemoteModel("two", Scale())
    with pytest.raises(UsageError, match="one, two"):
        ludus.fake.FakeBuffer("b")
    with pytest.raises(UsageError, match="Give one of them"):
        ludus.fake.FakeBuffer("b", X, model="one")
