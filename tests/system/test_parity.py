"""The same recorded episodes through the policy that was trained, the service with each backend, and every client: step by step
the same actions, the same logits, the same recurrent state. And the served agent scores what the trained one does."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.core.tree import Array
from ludus.experiments.runs import checkpoint
from ludus.models.policy import Policy
from ludus.protocol.client import AsyncClient, Client
from ludus.serving.checkpoint_follower import CheckpointSource, UpdateSettings
from ludus.serving.launcher import RunningService
from ludus.serving.release import Backend
from ludus.serving.worker import ReplaySettings, ServiceSettings
from ludus.transport.replay_log import read_recorded
from tests.clients import test_cpp, test_csharp, test_gdscript
from tests.clients.contract import environment
from tests.clients.driving import CLIENTS, DRIVERS, driver
from tests.experiments import small
from tests.tools import need

pytestmark = pytest.mark.system

EPISODES, STEPS = 6, 60
RAW = b'{"format": "raw"}'
SURE = 4.0  # standard errors


@dataclass(frozen=True)
class Episode:
    seen: Array
    actions: Array
    log_probs: Array
    values: Array
    states: tuple[Array, ...]
    """Before every step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recurrent agent that has learned something, with normalised observations."""
    where: Path = tmp_path_factory.mktemp("parity") / "run"
    model = {"fcnet_hiddens": [32], "use_lstm": True, "lstm_cell_size": 16}
    settings: dict[str, Any] = {"train_batch_size": 1024, "minibatch_size": 256, "num_epochs": 4, "lr": 2e-3}
    small.train(where, 25, model=model, observation_filter="MeanStdFilter", **settings)
    return where


@pytest.fixture(scope="module")
def episodes(run: Path) -> list[Episode]:
    """Played by the very object that was trained, in the form in which it learned."""
    policy = checkpoint.open_checkpoint(run)[1].policy("model")
    return [_played(policy, seed) for seed in range(EPISODES)]


@torch.inference_mode()
def _played(policy: Policy, seed: int) -> Episode:
    env: gym.Env[Any, Any] = gym.make("CartPole-v1")
    seen, state = env.reset(seed=seed)[0], policy.initial_state(1)
    rows: list[tuple[Array, int, float, float, tuple[Array, ...]]] = []
    for _ in range(STEPS):
        before = tuple(part[0].numpy().copy() for part in state)
        action, log_prob, value, state = policy.step(torch.from_numpy(seen[None]), state)
        rows.append((seen, int(action[0]), float(log_prob[0]), float(value[0]), before))
        seen, _, over, _, _ = env.step(rows[-1][1])
        if over:
            break
    observations, actions, log_probs, values, states = zip(*rows, strict=True)
    parts = tuple(np.array(part) for part in zip(*states, strict=True))
    return Episode(np.array(observations), np.array(actions), np.array(log_probs), np.array(values), parts)


# -- clients ------------------------------------------------------------------------------------------------------------

Play = Callable[[str, str, bytes], bytes]
"""(kind, session, body) → reply."""


@contextmanager
def python(url: str, where: Path) -> Iterator[Play]:
    with Client(url) as client:

        def play(kind: str, session: str, body: bytes) -> bytes:
            reply: bytes = getattr(client, kind)(session, body)
            return reply

        yield play


@contextmanager
def _driven(command: list[str | Path], url: str, where: Path, *, by_port: bool = False) -> Iterator[Play]:
    with driver(command, environment(where), by_port=by_port) as driven:
        driven.open(url)
        yield lambda kind, session, body: driven.ok(kind, body, **({"session": session} if kind == "start" else {}))


def cpp(url: str, where: Path) -> AbstractContextManager[Play]:
    test_cpp.compiled(DRIVERS / "driver.cpp", "-std=c++11", "-O1", "-o", where / "driver")
    return _driven([where / "driver"], url, where)


def csharp(url: str, where: Path) -> AbstractContextManager[Play]:
    program = test_csharp.compiled(where / "driver.exe", CLIENTS / "csharp" / "Ludus.cs", DRIVERS / "Driver.cs")
    return _driven([need("mono"), program], url, where)


def godot3(url: str, where: Path) -> AbstractContextManager[Play]:
    test_gdscript.project(where, CLIENTS / "gdscript" / "ludus.gd", DRIVERS / "driver.gd", 4)
    return _driven([need("godot3-server"), "--path", where, "-s", "driver.gd"], url, where, by_port=True)


def godot4(url: str, where: Path) -> AbstractContextManager[Play]:
    test_gdscript.project(where, CLIENTS / "gdscript" / "godot4" / "ludus.gd", DRIVERS / "driver4.gd", 5)
    return _driven([need("godot4"), "--headless", "--path", where, "-s", "driver.gd"], url, where, by_port=True)


def replayed(play: Play, episodes: list[Episode], name: str) -> list[list[int]]:
    """The actions that the service names when it is shown what the trained policy saw."""
    answers = []
    for number, episode in enumerate(episodes):
        session = f"{name}-{number}"
        play("start", session, RAW)
        actions = []
        for step, seen in enumerate(episode.seen):
            reply = play("tick", session, struct.pack("<fI", float(step > 0), 0) + seen.astype("<f4").tobytes())
            actions.append(struct.unpack("<q", reply)[0])
        play("end", session, struct.pack("<fI", 1.0, 1))
        answers.append(actions)
    return answers


# -- the service --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    url: str
    backend: Backend


@pytest.fixture(scope="module", params=["torch", "onnx", "onnx-int8"])
def served(request: pytest.FixtureRequest, run: Path) -> Iterator[Served]:
    with RunningService({"default": CheckpointSource(str(run))}, UpdateSettings(backend=request.param), workers=2) as service:
        yield Served(service.url, request.param)


@pytest.mark.parametrize("client", [python, cpp, csharp, godot3, godot4])
def test_every_backend_acts_through_every_client_as_the_trained_policy(
    served: Served, episodes: list[Episode], client: Callable[[str, Path], AbstractContextManager[Play]], tmp_path: Path
) -> None:
    with client(served.url, tmp_path) as play:
        answers = replayed(play, episodes, client.__name__)
    asked = np.concatenate([episode.actions for episode in episodes])
    same = np.concatenate(answers) == asked
    assert len(asked) > EPISODES * 20
    if served.backend == "onnx-int8":
        assert same.mean() >= 0.99
    else:
        assert same.all(), np.flatnonzero(~same)


def test_logits_values_and_states_are_those_of_the_trained_policy(run: Path, episodes: list[Episode], tmp_path: Path) -> None:
    """Read back from what the service records of its sessions."""
    for backend, allowed in (("torch", 1e-4), ("onnx", 1e-4), ("onnx-int8", 0.3)):
        recorded = tmp_path / backend
        settings = ServiceSettings(recording=ReplaySettings(recorded, fraction=1.0, limit_bytes=64 << 20))
        service = RunningService({"default": CheckpointSource(str(run))}, UpdateSettings(backend=backend), settings)  # type: ignore[arg-type]
        with service, python(service.url, tmp_path) as play:
            replayed(play, episodes, backend)
        found = {segments.observation[0, 0].tobytes(): segments for segments in read_recorded(recorded)}
        assert len(found) == EPISODES
        for episode in episodes:
            segments = found[episode.seen[0].astype(np.float32).tobytes()]
            length = len(episode.actions)
            assert segments.valid[:length, 0].all()
            np.testing.assert_allclose(segments.observation[:length, 0], episode.seen, atol=0)
            same = segments.action[:length, 0] == episode.actions
            np.testing.assert_allclose(segments.log_prob[:length, 0][same], episode.log_probs[same], atol=allowed)
            np.testing.assert_allclose(segments.value[:length, 0], episode.values, atol=10 * allowed)
            every = segments.spec.state_every
            for kept, known in zip(segments.state, episode.states, strict=True):
                shown = known[::every]
                np.testing.assert_allclose(kept[: len(shown), 0], shown, atol=allowed)


# -- the score ----------------------------------------------------------------------------------------------------------


async def scores(url: str, episodes: int, at_once: int = 20) -> list[float]:
    """Episodes of the environment, played by whoever serves at `url`."""
    numbers = iter(range(episodes))
    returns: list[float] = []

    async def one_after_the_other() -> None:
        async with AsyncClient(url) as client:
            for number in numbers:
                env: gym.Env[Any, Any] = gym.make("CartPole-v1")
                seen, over, total, session = env.reset(seed=number)[0], False, 0.0, f"score-{number}"
                await client.start(session, RAW)
                while not over:
                    body = struct.pack("<fI", float(total > 0), 0) + seen.astype("<f4").tobytes()
                    seen, reward, fell, late, _ = env.step(struct.unpack("<q", await client.tick(session, body))[0])
                    total, over = total + float(reward), fell or late
                await client.end(session)
                returns.append(total)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return returns


def test_the_served_agent_scores_what_the_trained_one_does(tmp_path: Path) -> None:
    """100 episodes each, drawn as in training: the means differ by no more than chance explains."""
    run = tmp_path / "run"
    small.train(run, 12, train_batch_size=1024, minibatch_size=256)
    policy = checkpoint.open_checkpoint(run)[1].policy("model")
    trained = _returns(policy, 100)
    with RunningService({"default": CheckpointSource(str(run))}, settings=ServiceSettings(temperature=1.0)) as service:
        live = asyncio.run(scores(service.url, 100))
    assert len(live) == len(trained) == 100
    error = math.sqrt((np.var(live) + np.var(trained)) / 100)
    assert abs(np.mean(live) - np.mean(trained)) < SURE * error, (np.mean(live), np.mean(trained), error)


@torch.inference_mode()
def _returns(policy: Policy, episodes: int) -> list[float]:
    generator, returns = torch.Generator().manual_seed(7), []
    for number in range(episodes):
        env: gym.Env[Any, Any] = gym.make("CartPole-v1")
        seen, over, total = env.reset(seed=number)[0], False, 0.0
        while not over:
            noise = policy.distribution.noise((1,), generator)
            action = policy.step(torch.from_numpy(seen[None]), noise=noise)[0]
            seen, reward, fell, late, _ = env.step(int(action[0]))
            total, over = total + float(reward), fell or late
        returns.append(total)
    return returns
