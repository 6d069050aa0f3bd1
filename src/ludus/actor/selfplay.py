"""Playing against one's own past: versions that this process has seen, a few of them, play the rows that are not learned from.

No version is fetched for it: whoever samples is handed every version anyway, and keeps some. So a version that is deleted meanwhile,
or a pool that is empty, does not matter here.
"""

from __future__ import annotations

import numpy as np
import torch

from ludus.config import SelfPlayConfig
from ludus.game.environment import Environments
from ludus.game.opposed import Opposed
from ludus.model.central import OWN, CentralNetwork, actor_of
from ludus.model.policy import Policy, Weights
from ludus.model.pool import PolicySource
from ludus.model.saved import policy_from
from ludus.tree import Array, Tree
from ludus.types import Bools


class History:
    """Weights of some versions, the newest ones."""

    def __init__(self, settings: SelfPlayConfig) -> None:
        self._settings = settings
        self._kept: dict[int, Weights] = {}

    def note(self, policy: Policy, version: int) -> None:
        if self._kept and version < max(self._kept) + self._settings.every:
            return
        self._kept[version] = policy.weights()
        for old in sorted(self._kept)[: -self._settings.keep]:
            del self._kept[old]

    def draw(self, random: np.random.Generator) -> tuple[int, Weights]:
        version = int(random.choice(sorted(self._kept)))
        return version, self._kept[version]


class PastPlayer:
    """Plays with one kept version for a while, then with another."""

    def __init__(self, policy: Policy, history: History, settings: SelfPlayConfig, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            self._whole = policy_from(policy.description())
        self._policy = actor_of(self._whole)
        self._central = isinstance(self._whole.network, CentralNetwork)
        self._history, self._period = history, settings.period
        self._random = np.random.default_rng([seed, 1])
        self._generator = torch.Generator().manual_seed(seed)
        self._state: tuple[Array, ...] = ()
        self._steps = 0
        self.version = 0

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        if self._steps % self._period == 0:
            self.version, weights = self._history.draw(self._random)
            self._whole.load_weights(weights)
        self._steps += 1
        rows = len(first)
        if self._policy.recurrent:
            before = self._state or tuple(part.numpy() for part in self._policy.initial_state(rows))
            self._state = tuple(np.where(first[:, None], np.float32(0), part) for part in before)
        noise = self._policy.draw_noise(rows, self._generator)
        acted = self._policy.act(observation[OWN] if self._central else observation, self._state, mask, noise)
        self._state = acted.state
        return acted.action


class Watched:
    """A source of policies that lets a history see every version."""

    def __init__(self, source: PolicySource, history: History) -> None:
        self._source, self._history = source, history

    def newest(self) -> tuple[Policy, int]:
        policy, version = self._source.newest()
        self._history.note(policy, version)
        return policy, version


def with_past(environments: Environments, source: PolicySource, settings: SelfPlayConfig, seed: int) -> PolicySource:
    """The source that a sampler of these environments takes: if they have opponents from the past, those are found from now on."""
    if not isinstance(environments, Opposed):
        return source
    history = History(settings)
    watched = Watched(source, history)
    policy, _ = watched.newest()
    environments.player = PastPlayer(policy, history, settings, seed)
    return watched
