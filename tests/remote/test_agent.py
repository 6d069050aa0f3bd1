"""`ludus.Agent`: custom actors push what happened, in the documented form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.errors import Refused, UsageError
from ludus.models.network_config import NetworkConfig
from ludus.protocol.client import Client
from ludus.remote.agent import STEPS
from ludus.remote.context import RunContext
from tests.gateway.scripted import ACTION, tiny_policy
from tests.remote.parts import Scale

SEEN = [0.5, -1.0, 2.0]


def made(run: RunContext, core: str | None = None) -> ludus.Policy:
    policy = tiny_policy(core=core)
    ludus.RemoteModel("bot", model=policy)
    return policy


async def play(agent: ludus.Agent, steps: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """An episode that terminates; what was seen, allowed, done and earned."""
    random = np.random.default_rng(seed)
    told: list[dict[str, Any]] = []
    for _ in range(steps):
        seen, mask = random.normal(size=3).astype(np.float32), random.random(4) < [0.5, 0.5, 0.5, 1.1]
        reward = told[-1]["reward"] if told else 0.0
        action = await agent.act(seen, mask, reward=reward)
        assert mask[int(action)]
        told.append({"seen": seen, "mask": mask, "action": int(action), "reward": float(np.float32(random.normal()))})
    await agent.finish(terminated=True, reward=told[-1]["reward"])
    return told


def taken(buffer: ludus.RemoteBuffer, count: int) -> list[Any]:
    return [buffer.take(20) for _ in range(count)]


@pytest.mark.parametrize("by_name", [True, False])
def test_segments_arrive_in_the_documented_form(run: RunContext, by_name: bool) -> None:
    policy = made(run)
    buffer = ludus.RemoteBuffer("segments")
    agent = ludus.Agent("bot", "segments") if by_name else ludus.Agent(ludus.RemoteModel("bot"), buffer)
    told = asyncio.run(play(agent, STEPS + 10))
    first, second = taken(buffer, 2)
    shapes = {
        **dict.fromkeys(("action", "reward", "terminated", "truncated", "valid", "log_prob", "version"), (STEPS,)),
        **dict.fromkeys(("value", "first"), (STEPS + 1,)),
        "observation": (STEPS + 1, 3),
        "action_mask": (STEPS + 1, 4),
        "episode_return": (),
        "episode_length": (),
    }
    for item in (first, second):
        assert {name: array.shape for name, array in item.items()} == shapes
    got = [(item, t) for item in (first, second) for t in np.flatnonzero(item["valid"])]
    assert len(got) == len(told)
    for (item, t), step in zip(got, told, strict=True):
        assert item["observation"][t].tolist() == step["seen"].tolist()
        assert item["action_mask"][t].tolist() == step["mask"].tolist()
        assert item["action"][t] == step["action"]
        assert item["reward"][t] == pytest.approx(step["reward"], abs=1e-6)
        assert item["version"][t] == ludus.RemoteModel("bot").version
    with torch.no_grad():
        observation, mask = torch.from_numpy(np.array(first["observation"])), torch.from_numpy(np.array(first["action_mask"]))
        log_prob, _, value = policy.evaluate(observation[:-1], torch.from_numpy(np.array(first["action"])), mask[:-1])
        following = policy.value(observation[-1:])
    np.testing.assert_allclose(first["log_prob"], log_prob.numpy(), atol=1e-5)
    np.testing.assert_allclose(first["value"], [*value.tolist(), float(following[0])], atol=1e-5)
    assert first["first"].tolist() == [True] + [False] * STEPS
    assert not first["terminated"].any()
    assert np.flatnonzero(second["terminated"]).tolist() == [9]
    assert np.isnan(first["episode_return"])
    assert float(second["episode_return"]) == pytest.approx(sum(step["reward"] for step in told), abs=1e-4)
    assert int(second["episode_length"]) == STEPS + 10


def test_segments_of_every_length_stack_into_batches(run: RunContext) -> None:
    made(run, core="lstm")
    buffer = ludus.RemoteBuffer("segments", batch_size=4)

    async def episodes() -> None:
        for seed, steps in enumerate((1, 3, 7, 5)):
            await play(ludus.Agent("bot", "segments", steps=8), steps, seed=seed)

    asyncio.run(episodes())
    batch = buffer.take(20)
    assert batch["observation"].shape == (4, 9, 3)
    assert batch["valid"].sum(axis=1).tolist() == [1, 3, 7, 5]
    assert [part.shape for part in batch["state"]] == [(4, 4, 5), (4, 4, 5)], "a state for every two steps"
    assert not batch["state"][0][:, 0].any()


@pytest.mark.parametrize("workers", [None, 1])
def test_a_recurrent_agent_remembers_through_its_episode_and_no_longer(run: RunContext, workers: int | None) -> None:
    policy = tiny_policy(core="gru")
    ludus.RemoteModel("bot", model=policy, num_workers=workers)
    buffer = ludus.RemoteBuffer("segments")

    async def twice() -> None:
        agent = ludus.Agent("bot", "segments", steps=8)
        await play(agent, 6, seed=1)
        await play(agent, 6, seed=1)

    asyncio.run(twice())
    first, second = taken(buffer, 2)
    state, values = policy.initial_state(1), []
    for seen in first["observation"][:6]:
        with torch.no_grad():
            _, _, value, state = policy.step(torch.from_numpy(np.array(seen[None])), state)
        values.append(float(value[0]))
    np.testing.assert_allclose(first["value"][:6], values, atol=1e-5)
    np.testing.assert_allclose(second["value"][:6], values, atol=1e-5)


def test_without_a_buffer_nothing_is_pushed(run: RunContext) -> None:
    made(run)
    buffer = ludus.RemoteBuffer("segments")
    asyncio.run(play(ludus.Agent("bot"), 20))
    asyncio.run(play(ludus.Agent(ludus.RemoteModel("bot"), None), 20))
    assert buffer.stats()["pushed"] == 0


def test_what_does_not_fit_is_refused(run: RunContext) -> None:
    made(run)

    async def wrong() -> None:
        agent = ludus.Agent("bot", ludus.RemoteBuffer("segments"))
        for arguments in (([1, 2],), (SEEN, [0, 0, 0, 0]), (SEEN, None, "much")):
            with pytest.raises(Refused):
                await agent.act(*arguments)

    asyncio.run(wrong())


def test_a_model_that_is_no_policy_cannot_be_an_agent(run: RunContext) -> None:
    ludus.RemoteModel("scale", model=Scale())
    with pytest.raises(UsageError, match="Policy"):
        ludus.Agent("scale")


def test_new_weights_are_stamped_and_end_a_segment(run: RunContext) -> None:
    made(run)
    model, buffer = ludus.RemoteModel("bot"), ludus.RemoteBuffer("segments")

    async def across() -> int:
        agent, before = ludus.Agent("bot", buffer, steps=8), model.version
        for number in range(5):
            if number == 3:
                model.publish_weights(ludus.get_torch_model_weights(tiny_policy(seed=7)))
            await agent.act(SEEN)
        await agent.finish(terminated=True)
        return before

    before = asyncio.run(across())
    old, new = taken(buffer, 2)
    assert (int(old["valid"].sum()), int(new["valid"].sum())) == (3, 2)
    assert old["version"][old["valid"]].tolist() == [before] * 3
    assert new["version"][new["valid"]].tolist() == [model.version] * 2 != [before] * 2
    assert not new["first"].any()
    assert old["value"][3] == pytest.approx(float(new["value"][0]), abs=1e-6)


class Bot(ludus.Actor):
    """As the documentation shows it."""

    def __init__(self, model: str, buffer: str | None = None) -> None:
        self.agent = ludus.Agent(model, buffer)

    async def tick(self, body: bytes) -> bytes:
        state = json.loads(body)
        return json.dumps(int(await self.agent.act(state["seen"], reward=state["reward"]))).encode()

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            self.agent.finish(terminated=True, reward=json.loads(body)["reward"])
        else:
            self.agent.break_off()
        return b""


def test_an_actor_made_of_an_agent_plays_over_http_and_a_corrected_request_counts_once(run: RunContext, tmp_path: Path) -> None:
    policy = ludus.Policy(gym.spaces.Box(-10.0, 10.0, (3,), np.float32), ACTION, NetworkConfig(fcnet_hiddens=(8,)))
    ludus.RemoteModel("bot", model=policy)
    buffer = ludus.RemoteBuffer("segments")
    actor = ludus.RemoteActor(port=0)
    actor.serve(Bot, model="bot", buffer="segments")
    with Client(f"http://127.0.0.1:{actor.address[1]}", timeout_s=20) as client:
        client.start("m")
        for number in range(3):
            with pytest.raises(Refused) as caught:
                client.tick("m", json.dumps({"seen": [1], "reward": number}).encode())
            assert caught.value.status == 422
            assert json.loads(client.tick("m", json.dumps({"seen": SEEN, "reward": number}).encode())) in range(4)
        client.end("m", b'{"reward": 9}')
    (item,) = taken(buffer, 1)
    assert item["reward"][item["valid"]].tolist() == [1, 2, 9]
