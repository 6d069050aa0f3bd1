"""Self-play against past versions: some of the versions seen by this process play the rows that are not learned from.

No version is fetched for this: the sampler receives every version anyway and keeps some. A sampler that starts later also uses the
versions stored with the run's checkpoints, if it can read them. A deleted version or an empty store is not an error.
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
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import Environments
from ludus.errors import LudusError
from ludus.models.centralized_critic import OWN, CentralNetwork, actor_policy
from ludus.models.policy import Policy, Weights
from ludus.models.weights.serialization import policy_from
from ludus.models.weights.version_store import PolicySource, read_weights
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)


class PolicyHistory:
    """Weights of the newest kept versions."""

    def __init__(self, settings: SelfPlayConfig, model: str = DEFAULT_MODEL) -> None:
        self._settings, self._model = settings, model
        self._kept: dict[int, Weights] = {}
        self._stored: dict[int, Path] = {}
        """Version → directory of the run that stores it."""

    def add(self, policy: Policy, version: int) -> None:
        if self._kept and version < max(self._kept) + self._settings.every:
            return
        self._kept[version] = policy.weights()
        for old in sorted({*self._kept, *self._stored})[: -self._settings.keep]:
            self._kept.pop(old, None)
            self._stored.pop(old, None)

    def load_from_run(self, run: Path, below: int) -> None:
        """Register the versions below `below` that the run has stored, spaced like those of `add`. They are read when drawn.

        If the directory cannot be read, as on another machine, none are registered.
        """
        try:
            stored = [int(path.stem) for path in (run / "models" / self._model).glob("*.safetensors") if path.stem.isdecimal()]
        except OSError as error:
            log.warning("earlier versions are not available as opponents: %s", error)
            return
        if not stored and below > self._settings.every and not run.is_dir():
            log.warning("earlier versions are not available as opponents: %s is not on this machine", run)
        newest = below
        for version in sorted(stored, reverse=True):
            if version <= newest - self._settings.every and len(self._stored) < self._settings.keep:
                self._stored[version], newest = run, version

    def draw(self, random: np.random.Generator) -> tuple[int, Weights]:
        while True:
            version = int(random.choice(sorted({*self._kept, *self._stored})))
            if version in self._kept:
                return version, self._kept[version]
            try:
                return version, read_weights(LocalStore(self._stored[version]), self._model, version)
            except (OSError, LudusError) as error:  # for example deleted in the meantime
                log.warning("version %d is no longer used as an opponent: %s", version, error)
                del self._stored[version]


class PastPlayer:
    """Plays with one kept version for `period` steps, then with another."""

    def __init__(self, policy: Policy, history: PolicyHistory, settings: SelfPlayConfig, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            self._full_policy = policy_from(policy.description())
        self._policy = actor_policy(self._full_policy)
        self._central = isinstance(self._full_policy.network, CentralNetwork)
        self._history, self._period = history, settings.period
        self._random = np.random.default_rng([seed, 1])  # separate from the sampler, which uses `seed`
        self._generator = torch.Generator().manual_seed(int(self._random.integers(1 << 31)))
        self._spec = spaces.array_spec(self._policy.observation_space)
        self._observation: Tree = None
        self._initial: tuple[Array, ...] = ()
        self._state: tuple[Array, ...] = ()
        self._steps = 0
        self.version = 0

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        rows = len(first)
        if self._steps % self._period == 0:
            self.version, weights = self._history.draw(self._random)
            self._full_policy.load_weights(weights)
            self._initial = tuple(part.numpy() for part in self._policy.initial_state(rows))
            self._state = self._initial  # the state of another version is meaningless
        self._steps += 1
        if self._observation is None:
            self._observation = map_tree(lambda spec: spec.zeros(rows), self._spec)
        copy_into(self._observation, observation[OWN] if self._central else observation)
        if self._policy.recurrent:
            pairs = zip(self._initial, self._state, strict=True)
            self._state = tuple(np.where(first.reshape(-1, *(1 for _ in now.shape[1:])), begin, now) for begin, now in pairs)
        acted = self._policy.act(self._observation, self._state, mask, self._policy.draw_noise(rows, self._generator))
        self._state = acted.state
        return acted.action


class RecordedSource:
    """A policy source that adds every version to a history."""

    def __init__(self, source: PolicySource, history: PolicyHistory) -> None:
        self._source, self._history = source, history

    def newest(self) -> tuple[Policy, int]:
        policy, version = self._source.newest()
        self._history.add(policy, version)
        return policy, version


def with_past_opponents(
    environments: Environments, source: PolicySource, settings: SelfPlayConfig, seed: int, run: Path | None = None
) -> PolicySource:
    """Return the policy source for a sampler; if the environments have opponent rows, past versions play them from now on.

    `run`: directory of the run, which may have stored versions.
    """
    if not isinstance(environments, OpponentRows):
        return source
    history = PolicyHistory(settings)
    recorded = RecordedSource(source, history)
    policy, version = recorded.newest()
    if run is not None:
        history.load_from_run(run, version)
    environments.player = PastPlayer(policy, history, settings, seed)
    return recorded
