"""Trains one policy in this process against opponents that are given by hand: what a league's learner does, without a league."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.algorithms.trainer import Trainer
from ludus.envs.pettingzoo import make_match
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy, Weights
from ludus.models.weights.serialization import policy_from
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.multi_agent.seating import SeatAgents, Seating
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.local import LocalMemory

MODEL = "model"
SEGMENT_STEPS = 16


@dataclass
class Opponents:
    """Who plays the other side: the newest version with probability `latest` (then both sides learn), else a player drawn by weight."""

    latest: float = 1.0
    players: list[Weights | None] = field(default_factory=list)
    """None: random actions."""
    weights: Sequence[float] = ()
    active: int = 6
    """Players with loaded weights at a time; drawn anew for every batch."""


@dataclass
class _Learning:
    """The policy that learns, as the source of a sampler and the publisher of a trainer."""

    policy: Policy
    version: int = 1

    def newest(self, name: str = MODEL) -> tuple[Policy, int]:
        return self.policy, self.version

    def publish(self, name: str) -> int:
        self.version += 1
        return self.version


@dataclass(frozen=True)
class TrainingSettings:
    env: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    hiddens: tuple[int, ...] = (64, 64)
    copies: int = 128
    batch_steps: int = 4096
    ppo: Mapping[str, Any] = field(default_factory=dict)


class LeagueLearner:
    """One policy with its optimizer and its matches. All randomness comes from `seed`."""

    def __init__(self, settings: TrainingSettings, seed: int) -> None:
        torch.manual_seed(seed)
        self.settings, self._random = settings, np.random.default_rng([seed, 7])
        self.copies = EnvCopies(lambda: make_match(settings.env, settings.env_config), settings.copies)
        self.agents = list(self.copies[0].agents)
        spaces = self.copies[0].agents[self.agents[0]]

        self.policy = Policy(spaces.observation, spaces.action, NetworkConfig(fcnet_hiddens=settings.hiddens))
        self._learning = _Learning(self.policy)
        self._algorithm = PPO(self.policy, PPOConfig(**settings.ppo), seed)
        blocks = 2 * settings.batch_steps + 4 * settings.copies * len(self.agents) + 16
        batches = MatchBatches({MODEL: LocalMemory(session_spec(self.policy, SEGMENT_STEPS, MODEL), 1, blocks)})
        self._sampler = MultiAgentSampler(
            self.copies, dict.fromkeys(self.agents, MODEL), {MODEL: self._learning}, batches,
            MultiAgentSettings(settings.batch_steps, by_env_steps=True), seed, make_seating=self._make_seating,
        )  # fmt: skip
        self.trainer = Trainer({MODEL: self._algorithm}, batches, self._learning, by_model=False)
        self._opponents = Opponents()
        self._active: list[str | None] = []
        self._loaded: set[str] = set()
        self._renewals = 0

    @property
    def steps(self) -> int:
        return self.trainer.progress.timesteps

    def snapshot(self) -> Weights:
        return self.policy.weights()

    def load(self, weights: Weights) -> None:
        self.policy.load_weights(weights)

    def train(self, steps: int, opponents: Opponents) -> None:
        """Train for that many further environment steps."""
        until = self.steps + steps
        self._opponents = opponents
        self._renew()
        while self.steps < until:
            while self._sampler.step():
                pass
            while self.trainer.step():
                self._renew()

    def metric(self, name: str) -> float:
        return self.trainer.metrics.get(name, float("nan"))

    def _make_seating(self, matches: MatchRunner, policies: PolicySet) -> SeatAgents:
        self._matches, self._policies = matches, policies
        return self._seat

    def _seat(self, copy: int) -> Seating:
        opponents = self._opponents
        if not self._active or self._random.random() < opponents.latest:
            return Seating(dict.fromkeys(self.agents, MODEL), opponent="latest")
        own = int(self._random.integers(2))
        other = self._active[int(self._random.integers(len(self._active)))]
        models = {agent: MODEL if number == own else other for number, agent in enumerate(self.agents)}
        return Seating(models, frozenset([self.agents[own]]), "past")

    def _renew(self) -> None:
        """Load other opponents for the next batch; those of running matches stay."""
        opponents = self._opponents
        if opponents.latest >= 1.0 or not opponents.players:
            self._active = []
            return
        p = np.asarray(opponents.weights, np.float64)
        chosen = self._random.choice(len(opponents.players), size=opponents.active, p=p / p.sum())
        in_use = self._matches.models_in_use()
        for name in self._loaded - in_use:
            self._policies.remove(name)
        self._loaded &= in_use
        self._renewals += 1
        self._active = []
        names: dict[int, str | None] = {}
        for number in chosen.tolist():
            if number not in names:
                names[number] = self._load(number)
            self._active.append(names[number])

    def _load(self, number: int) -> str | None:
        weights = self._opponents.players[number]
        if weights is None:
            return None
        name = f"{number}#{self._renewals}"
        with torch.random.fork_rng(devices=[]):
            policy = policy_from(self.policy.description())
        policy.load_weights(weights)
        self._policies.add_fixed(name, policy)
        self._loaded.add(name)
        return name
