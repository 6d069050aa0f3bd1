"""Playing against one's own past: versions that this process has seen, a few of them, play the rows that are not learned from.

No version is fetched for it: whoever samples is handed every version anyway, and keeps some. Whoever begins later also takes those that the
run has kept with its checkpoints, where it can reach them. So a version that is deleted meanwhile, or a pool that is empty, does not
matter here.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from ludus.config.schema import SelfPlayConfig
from ludus.core import spaces
from ludus.core.tree import Array, Tree, copy_into, map_tree
from ludus.core.types import DEFAULT_MODEL, Bools
from ludus.envs.opponents.opponent_rows import Opposed
from ludus.envs.vector_env import Environments
from ludus.errors import LudusError
from ludus.models.centralized_critic import OWN, CentralNetwork, actor_of
from ludus.models.policy import Policy, Weights
from ludus.models.weights.serialization import policy_from
from ludus.models.weights.version_store import PolicySource, stored_weights
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)


class History:
    """Weights of some versions, the newest ones."""

    def __init__(self, settings: SelfPlayConfig) -> None:
        self._settings = settings
        self._kept: dict[int, Weights] = {}
        self._stored: dict[int, Path] = {}
        """Versions of before, by the run that has them."""

    def note(self, policy: Policy, version: int) -> None:
        if self._kept and version < max(self._kept) + self._settings.every:
            return
        self._kept[version] = policy.weights()
        for old in sorted({*self._kept, *self._stored})[: -self._settings.keep]:
            self._kept.pop(old, None)
            self._stored.pop(old, None)

    def recall(self, run: Path, below: int) -> None:
        """What the run has kept of versions before that one, as far apart as those that are noted. They are read when they play.

        Wherever its directory cannot be read, as on another machine, nothing is recalled.
        """
        try:
            there = [int(path.stem) for path in (run / "models" / DEFAULT_MODEL).glob("*.safetensors") if path.stem.isdecimal()]
        except OSError as error:
            log.warning("no earlier versions are recalled: %s", error)
            return
        if not there and below > self._settings.every and not run.is_dir():
            log.warning("no earlier versions are recalled: %s is not on this machine", run)
        newest = below
        for version in sorted(there, reverse=True):
            if version <= newest - self._settings.every and len(self._stored) < self._settings.keep:
                self._stored[version], newest = run, version

    def draw(self, random: np.random.Generator) -> tuple[int, Weights]:
        while True:
            version = int(random.choice(sorted({*self._kept, *self._stored})))
            if version in self._kept:
                return version, self._kept[version]
            try:
                return version, stored_weights(LocalStore(self._stored[version]), DEFAULT_MODEL, version)
            except (OSError, LudusError) as error:  # deleted meanwhile, say
                log.warning("version %d does not play again: %s", version, error)
                del self._stored[version]


class PastPlayer:
    """Plays with one kept version for a while, then with another."""

    def __init__(self, policy: Policy, history: History, settings: SelfPlayConfig, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            self._whole = policy_from(policy.description())
        self._policy = actor_of(self._whole)
        self._central = isinstance(self._whole.network, CentralNetwork)
        self._history, self._period = history, settings.period
        self._random = np.random.default_rng([seed, 1])  # of its own: whoever samples beside it begins with `seed`
        self._generator = torch.Generator().manual_seed(int(self._random.integers(1 << 31)))
        self._spec = spaces.array_spec(self._policy.observation_space)
        self._seen: Tree = None
        self._initial: tuple[Array, ...] = ()
        self._state: tuple[Array, ...] = ()
        self._steps = 0
        self.version = 0

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        rows = len(first)
        if self._steps % self._period == 0:
            self.version, weights = self._history.draw(self._random)
            self._whole.load_weights(weights)
            self._initial = tuple(part.numpy() for part in self._policy.initial_state(rows))
            self._state = self._initial  # what another has kept in mind means nothing to it
        self._steps += 1
        if self._seen is None:
            self._seen = map_tree(lambda spec: spec.zeros(rows), self._spec)
        copy_into(self._seen, observation[OWN] if self._central else observation)
        if self._policy.recurrent:
            both = zip(self._initial, self._state, strict=True)
            self._state = tuple(np.where(_beside(first, now), begin, now) for begin, now in both)
        acted = self._policy.act(self._seen, self._state, mask, self._policy.draw_noise(rows, self._generator))
        self._state = acted.state
        return acted.action


def _beside(first: Bools, part: Array) -> Bools:
    return first.reshape(-1, *(1 for _ in part.shape[1:]))


class Watched:
    """A source of policies that lets a history see every version."""

    def __init__(self, source: PolicySource, history: History) -> None:
        self._source, self._history = source, history

    def newest(self) -> tuple[Policy, int]:
        policy, version = self._source.newest()
        self._history.note(policy, version)
        return policy, version


def with_past(
    environments: Environments, source: PolicySource, settings: SelfPlayConfig, seed: int, run: Path | None = None
) -> PolicySource:
    """The source that a sampler of these environments takes: if they have opponents from the past, those are found from now on.

    `run`: the directory of the run, where it may have kept some.
    """
    if not isinstance(environments, Opposed):
        return source
    history = History(settings)
    watched = Watched(source, history)
    policy, version = watched.newest()
    if run is not None:
        history.recall(run, version)
    environments.player = PastPlayer(policy, history, settings, seed)
    return watched
