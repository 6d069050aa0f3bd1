"""The agents that `bench.serve` serves: policies with random weights, written as runs, and traffic whose replies are known.

Bodies are those of the raw format (reward, flags, observation), replies the action as a little-endian int64: the same bytes for
every stack. Observations whose two best actions are nearly equal are left out, so that rounding cannot change a reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.experiments.runs import checkpoint
from ludus.gateway.raw_codec import HEAD
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.storage.local import LocalStore

Array = np.ndarray[Any, Any]
MARGIN = 2e-3  # between the two best logits, which have a spread of about 2
REPLY_BYTES = 8
VECTOR = gym.spaces.Box(-np.inf, np.inf, (64,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)


@dataclass(frozen=True)
class Kind:
    space: gym.spaces.Box
    actions: int
    network: NetworkConfig
    what: str


KINDS = {
    "mlp": Kind(VECTOR, 10, NetworkConfig(fcnet_hiddens=(256, 256), vf_share_layers=True), "MLP 64 → 256 → 256 → 10, tanh"),
    "lstm": Kind(
        VECTOR,
        10,
        NetworkConfig(fcnet_hiddens=(256,), core="lstm", cell_size=256),
        "64 → 256 (tanh) → LSTM 256 → 10, a state per session",
    ),
    "cnn": Kind(IMAGE, 6, NetworkConfig(), "Nature CNN, 84×84×4 uint8 → 512 → 6"),
}


@dataclass(frozen=True)
class Traffic:
    """What games send, and what they must hear from each version of the agent."""

    bodies: Array
    """[count, bytes] uint8; with `match`: lanes of so many ticks, one after the other."""
    expected: Array
    """[versions, count] int64."""
    match: int = 0


def observations(kind: str, n: int, random: np.random.Generator) -> Array:
    return pictures(n, random)[0] if kind == "cnn" else random.standard_normal((n, *VECTOR.shape)).astype(np.float32)


def pictures(n: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Dim patterns, most with one bright patch, and where that is (0: there is none). Of noise alone a convolution sees its mean."""
    seen = random.integers(0, 110, (n, 6, 6, 4), dtype=np.uint8).repeat(14, axis=1).repeat(14, axis=2)
    place = random.integers(0, KINDS["cnn"].actions, n)
    for number, at in enumerate(place):
        if at:
            top, left = 42 * (at // 3), 28 * (at % 3)
            seen[number, top : top + 42, left : left + 28] += 140
    return np.ascontiguousarray(seen), place


def make_policy(kind: str, seed: int) -> Policy:
    """With weights that make every action likely, and preferred as clearly as by an agent that was trained."""
    of = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(of.space, gym.spaces.Discrete(of.actions), of.network)
        torch.nn.init.normal_(policy.network.head.weight, std=0.1)
    random = np.random.default_rng(seed)
    if kind == "cnn":
        _teach(policy, random)
    else:
        _spread(policy, kind, random)
    return policy


def _spread(policy: Policy, kind: str, random: np.random.Generator) -> None:
    """Logits around 0 with a deviation of 2, over 20 ticks where there is a state."""
    state = _zero_state(policy, 256)
    for _ in range(20 if policy.recurrent else 1):
        outputs, state = _outputs(policy, observations(kind, 256, random), state)
    with torch.no_grad():
        scale = 2.0 / float(outputs.std(axis=0).mean())
        policy.network.head.weight.mul_(scale)
        policy.network.head.bias.copy_(torch.from_numpy(-scale * outputs.mean(axis=0)))


def _teach(policy: Policy, random: np.random.Generator) -> None:
    """Ridge regression of the last layer: the action is where the bright patch is. Noise has none."""
    seen, place = pictures(768, random)
    noise = random.integers(0, 256, (256, *IMAGE.shape), dtype=np.uint8)
    with torch.inference_mode():
        features = policy.network.trunk(None, torch.from_numpy(np.concatenate([seen, noise]))).numpy().astype(np.float64)
    target = 16.0 * np.eye(KINDS["cnn"].actions)[np.concatenate([place, np.zeros(len(noise), int)])]
    rows = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    weights = np.linalg.solve(
        rows.T @ rows + 1e-2 * np.trace(rows.T @ rows) / rows.shape[1] * np.eye(rows.shape[1]), rows.T @ target
    )
    with torch.no_grad():
        policy.network.head.weight.copy_(torch.from_numpy(weights[:-1].T.copy()))
        policy.network.head.bias.copy_(torch.from_numpy(weights[-1]))


def _zero_state(policy: Policy, rows: int) -> tuple[Array, ...]:
    return tuple(part.numpy() for part in policy.initial_state(rows))


def _outputs(policy: Policy, seen: Array, state: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    with torch.inference_mode():
        outputs, _, after = policy._outputs(torch.from_numpy(seen), tuple(map(torch.from_numpy, state)), None)
    return outputs.numpy(), tuple(part.numpy() for part in after)


def margins(outputs: Array) -> Array:
    best = np.sort(outputs, axis=-1)
    found: Array = best[..., -1] - best[..., -2]
    return found


def packed(seen: Array) -> Array:
    """Raw bodies without reward and flags."""
    flat = np.ascontiguousarray(seen).reshape(len(seen), -1).view(np.uint8)
    return np.concatenate([np.zeros((len(seen), HEAD.size), np.uint8), flat], axis=1)


def make_traffic(kind: str, policies: list[Policy], match: int = 1024, lanes: int = 32) -> Traffic:
    """Of as many versions as there are policies. Raises ValueError when an agent would not notice what it sees."""
    random = np.random.default_rng(7)
    made = _matches(kind, policies, match, lanes, random) if policies[0].recurrent else _lone(kind, policies, random)
    shares = np.bincount(made.expected[0], minlength=KINDS[kind].actions) / made.expected.shape[1]
    if shares.min() < 0.02:
        raise ValueError(f"the {kind} agent is degenerate: its actions have the shares {shares.round(3).tolist()}")
    return made


def _lone(kind: str, policies: list[Policy], random: np.random.Generator) -> Traffic:
    wanted = 256 if kind == "cnn" else 4096
    seen = observations(kind, wanted + wanted // 4, random)
    sure = np.min([margins(_outputs(policy, seen, ())[0]) for policy in policies], axis=0) > MARGIN
    seen = seen[sure][:wanted]
    return Traffic(packed(seen), np.stack([np.asarray(policy.act(seen).action, np.int64) for policy in policies]))


def _matches(kind: str, policies: list[Policy], match: int, lanes: int, random: np.random.Generator) -> Traffic:
    bodies = np.zeros((lanes, match, HEAD.size + VECTOR.shape[0] * 4), np.uint8)
    expected = np.zeros((len(policies), lanes, match), np.int64)
    states = [_zero_state(policy, lanes) for policy in policies]
    for tick in range(match):
        tries = np.stack([observations(kind, lanes, random) for _ in range(2)])
        outputs = [[_outputs(policy, seen, state) for seen in tries] for policy, state in zip(policies, states, strict=True)]
        sure = np.min([[margins(out) for out, _ in of_policy] for of_policy in outputs], axis=0)  # [tries, lanes]
        taken = np.where(sure[0] > MARGIN, 0, sure.argmax(axis=0))
        rows = np.arange(lanes)
        bodies[:, tick] = packed(tries[taken, rows])
        for number, of_policy in enumerate(outputs):
            expected[number, :, tick] = np.stack([out.argmax(axis=-1) for out, _ in of_policy])[taken, rows]
            parts = zip(*(after for _, after in of_policy), strict=True)
            states[number] = tuple(np.stack(part)[taken, rows] for part in parts)
    return Traffic(bodies.reshape(lanes * match, -1), expected.reshape(len(policies), -1), match)


# -- as files -----------------------------------------------------------------------------------------------------------


def write_checkpoint(run: Path, policy: Policy, version: int) -> str:
    """As a trainer would, into the directory of a run."""
    state = {
        "progress": {"timesteps": version, "iterations": version},
        "config": {"env": "bench", "run": "PPO"},
        "evaluation": 0.0,
    }
    sampler = {"generator": np.zeros(1, np.uint8)}
    algorithms = {DEFAULT_MODEL: PPO(policy, PPOConfig(), 0)}
    return checkpoint.write(LocalStore(run), version, algorithms, {DEFAULT_MODEL: version}, sampler, state)


def write_arrays(path: Path, kind: str, policy: Policy) -> None:
    """For the peers, which know torch and NumPy alone: what `bench.serving.player` reads."""
    names = {name.removeprefix("network."): array for name, array in policy.weights().items() if "value_head" not in name}
    np.savez(path, kind=np.array(kind), **names)
