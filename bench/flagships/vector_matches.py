"""Matches of two sides in an environment that steps many matches with one call: policies, scripts and random play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ludus
from bench.flagships.report import Row, TrainedRun, match_row
from ludus.core.statistics import confidence_interval
from ludus.core.types import Floats, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.models.policy import Policy

Player = Callable[[Any, Any], Ints]
"""(observations [K, …], action masks [K, M] or None) → actions [K]."""


def load_policy(where: Path) -> Policy:
    policy = ludus.load(where).policy
    assert isinstance(policy, Policy)
    return policy


def trained_run(directory: Path) -> TrainedRun:
    """A run that has been trained before; its CPU time is not known."""
    seconds = TrainedRun(directory, 0.0, float("nan")).reports("time_s")[-1][2]
    return TrainedRun(directory, seconds, float("nan"))


def policy_player(policy: Policy, seed: int, *, explore: bool = True) -> Player:
    """Samples actions as in training, or takes the most probable ones."""
    generator = torch.Generator().manual_seed(seed) if explore else None

    def choose(observation: Any, mask: Any) -> Ints:
        noise = None if generator is None else policy.draw_noise(len(observation), generator)
        actions: Ints = np.asarray(policy.act(observation, mask=mask, noise=noise).action)
        return actions

    return choose


def script_player(script: Callable[[Any, Any], int]) -> Player:
    """Calls a script for every observation."""

    def choose(observation: Any, mask: Any) -> Ints:
        masks = [None] * len(observation) if mask is None else mask
        return np.array([script(own, allowed) for own, allowed in zip(observation, masks, strict=True)], np.int64)

    return choose


def random_player(actions: int, seed: int) -> Player:
    """Chooses among the allowed actions with equal probability."""
    random = np.random.default_rng(seed)

    def choose(observation: Any, mask: Any) -> Ints:
        weights = random.random((len(observation), actions))
        chosen: Ints = np.argmax(weights if mask is None else np.where(mask, weights, -1.0), axis=1)
        return chosen

    return choose


@dataclass(frozen=True)
class Results:
    """Of one side in many matches."""

    returns: Floats
    """[matches] mean return of its agents minus that of the others', halved."""

    @property
    def won(self) -> int:
        return int((self.returns > 0).sum())

    @property
    def lost(self) -> int:
        return int((self.returns < 0).sum())

    @property
    def drawn(self) -> int:
        return int((self.returns == 0).sum())


def result_row(player: str, opponent: str, results: Results, column: str) -> Row:
    """Shares of matches won, and in `column` the mean gain of a match with its bootstrapped 95 % interval."""
    low, high = confidence_interval(results.returns.tolist())
    mean = float(results.returns.mean())
    return match_row(player, opponent, results.won, results.drawn, results.lost) | {
        column: f"{mean:.2f} [{low:.2f}, {high:.2f}]",
        "gain": mean,
        "gain_low": low,
        "gain_high": high,
    }


def play_matches(env: VectorMultiAgentEnv, own: Player, other: Player, seed: int) -> Results:
    """One match in each place of the environment; `own` plays the first half of the agents in half of the matches, the second half in the others."""
    count, width = env.num_envs, len(env.possible_agents)
    sides = np.arange(width) >= width // 2
    ours = np.where((np.arange(count) % 2 == 0)[:, None], ~sides, sides)  # [N, A]
    step = env.reset(np.arange(count) + 1000 * seed, np.arange(count))
    returns: Floats = np.zeros((count, width), np.float32)
    over = np.zeros(count, np.bool_)
    while not over.all():
        actions: Ints = np.zeros((count, width), np.int64)
        for player, rows in ((own, ours), (other, ~ours)):
            acting = step.acting & rows & ~over[:, None]
            if acting.any():
                actions[acting] = player(*_seen(step, acting))
        step = env.step(actions, ~over)
        returns[~over] += step.reward[~over]
        over |= (step.terminated | step.truncated).all(axis=1)
    first, second = returns[:, : width // 2].mean(axis=1), returns[:, width // 2 :].mean(axis=1)
    gain = (first - second) / 2
    return Results(np.where(ours[:, 0], gain, -gain))


def _seen(step: VectorMultiAgentStep, acting: Any) -> tuple[Any, Any]:
    return step.observation[acting], None if step.action_mask is None else step.action_mask[acting]
