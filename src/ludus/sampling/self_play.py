"""Self-play: the newest version, or one of the versions seen by this process, plays the side that is not learned from.

Opponents are drawn between matches; a match keeps its opponent to its end. No version is fetched for this: the sampler receives every
version anyway and keeps some. A sampler that starts later also uses the versions stored with the run's checkpoints, if it can read them.
A deleted version or an empty store is not an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ludus.config.schema import SelfPlayConfig
from ludus.core import spaces
from ludus.core.tree import Array, Tree, copy_into, map_tree
from ludus.core.types import DEFAULT_MODEL, Bools, Ints
from ludus.envs.opponents.opponent_mix import LATEST, PAST
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import Environments
from ludus.errors import LudusError
from ludus.models.centralized_critic import OWN, CentralNetwork, actor_policy
from ludus.models.policy import Policy, Weights
from ludus.models.weights.serialization import policy_from
from ludus.models.weights.version_store import PolicySource, read_weights
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

ACTIVE = 4
"""Past versions that the new matches of a process play against."""
_LOADED = 8  # versions of new and of running matches; a forward pass per version and step


class PolicyHistory:
    """Weights of the newest kept versions."""

    def __init__(self, settings: SelfPlayConfig, model: str = DEFAULT_MODEL) -> None:
        self._settings, self._model = settings, model
        self._kept: dict[int, Weights] = {}
        self._stored: dict[int, Path] = {}
        """Version → directory of the run that stores it."""

    def __len__(self) -> int:
        return len({*self._kept, *self._stored})

    def add(self, policy: Policy, version: int) -> None:
        if self._settings.opponents == LATEST:
            return  # no past version is drawn
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


class OpponentDraw:
    """Draws the opponents of matches: the newest version, or one of a few past versions, which are replaced one by one."""

    def __init__(self, settings: SelfPlayConfig, history: PolicyHistory) -> None:
        self._latest = {LATEST: 1.0, PAST: 0.0}.get(settings.opponents or PAST, settings.latest)
        self._history, self._period, self._renew_at = history, settings.period, 0
        self.active: dict[int, Weights] = {}
        """Past versions of new matches, at most ACTIVE."""

    def draw(self, random: np.random.Generator, steps: int, in_use: Callable[[], Collection[int]] = tuple) -> int | None:
        """Return a version of `active`; None: the newest version.

        `steps`: environment steps of this process so far. `in_use`: returns the versions that play matches; called when one is drawn anew.
        """
        if self._latest >= 1.0 or random.random() < self._latest:
            return None
        self._renew(random, steps, in_use)
        return list(self.active)[int(random.integers(len(self.active)))]

    def _renew(self, random: np.random.Generator, steps: int, in_use: Callable[[], Collection[int]]) -> None:
        """Add past versions until enough are active; then replace the oldest entry every `period` steps."""
        if len(self.active) >= min(ACTIVE, len(self._history)):
            if steps < self._renew_at or len({*self.active, *in_use()}) >= _LOADED:
                return
            del self.active[next(iter(self.active))]
        self._renew_at = steps + self._period
        version, weights = self._history.draw(random)
        self.active.setdefault(version, weights)


class OpponentPolicies:
    """Policies of past versions, loaded while they are active or play a match."""

    def __init__(self, like: Policy) -> None:
        """`like`: a policy with the architecture of the opponents."""
        self._description = like.description()
        self._loaded: dict[int, Policy] = {}

    def load(self, version: int, weights: Weights) -> None:
        if version not in self._loaded:
            with torch.random.fork_rng(devices=[]):
                policy = policy_from(self._description)
            policy.load_weights(weights)
            actor = actor_policy(policy)
            with torch.inference_mode():
                actor.network.freeze(values=False)  # never thawed: the weights stay as they are
            self._loaded[version] = actor

    def keep(self, versions: Collection[int]) -> None:
        """Drop all others."""
        self._loaded = {version: policy for version, policy in self._loaded.items() if version in versions}

    def __getitem__(self, version: int) -> Policy:
        return self._loaded[version]

    def __len__(self) -> int:
        return len(self._loaded)


class FollowedSource:
    """A policy source that remembers what it returned last, which is what the sampler plays with now."""

    def __init__(self, source: PolicySource) -> None:
        self._source = source
        self.policy, self.version = self.newest()

    def newest(self) -> tuple[Policy, int]:
        self.policy, self.version = self._source.newest()
        return self.policy, self.version


class RecordedSource(FollowedSource):
    """A followed source that adds every version to a history."""

    def __init__(self, source: PolicySource, history: PolicyHistory) -> None:
        self._history = history
        super().__init__(source)

    def newest(self) -> tuple[Policy, int]:
        newest = super().newest()
        self._history.add(*newest)
        return newest


class PolicyRowPlayer:
    """What players of opponent rows have in common: rows by match, what the rows see, and the newest version of the learner."""

    def __init__(self, source: FollowedSource, match_of_row: Ints, seed: int) -> None:
        """`source`: the one that the sampler uses. `match_of_row`: by opponent row, a number of its match."""
        self._source = source
        self._newest: tuple[Policy, Policy] = source.policy, actor_policy(source.policy)
        self._central = isinstance(source.policy.network, CentralNetwork)
        self._random = np.random.default_rng([seed, 1])  # separate from the sampler, which uses `seed`
        self._generator = torch.Generator().manual_seed(int(self._random.integers(1 << 31)))
        self._rows_of = {match: np.flatnonzero(match_of_row == match) for match in dict.fromkeys(match_of_row.tolist())}
        rows = len(match_of_row)
        self._observation: Tree = map_tree(lambda spec: spec.zeros(rows), spaces.array_spec(self._newest[1].observation_space))

    def _see(self, observation: Tree) -> None:
        """Keep the part of an observation that the policies see."""
        copy_into(self._observation, observation[OWN] if self._central else observation)

    def _begun_matches(self, first: Bools) -> Iterator[Ints]:
        """The rows of every match that begins; the rows of a match begin together."""
        return (rows for rows in self._rows_of.values() if first[rows[0]])

    def _newest_actor(self) -> Policy:
        """The policy that the sampler uses now; it does not change within a block."""
        if self._source.policy is not self._newest[0]:
            self._newest = self._source.policy, actor_policy(self._source.policy)
        return self._newest[1]


def join_rows(parts: Sequence[tuple[Ints, Tree]]) -> Tree:
    """The actions of all rows, from those of groups of rows."""
    if len(parts) == 1:
        return parts[0][1]
    number = sum(len(rows) for rows, _ in parts)
    whole = map_tree(lambda x: np.empty((number, *x.shape[1:]), x.dtype), parts[0][1])
    for rows, action in parts:
        map_tree(lambda target, x, rows=rows: target.__setitem__(rows, x), whole, action)
    return whole


_NEWEST = -1  # in place of a version


class OpponentPlayer(PolicyRowPlayer):
    """Plays the opponent rows of vector environments, every match with one opponent from its first step to its last.

    The newest version follows the learner; a past version does not change. One forward pass per step and version.
    """

    def __init__(
        self, source: FollowedSource, history: PolicyHistory, settings: SelfPlayConfig, match_of_row: Ints, seed: int
    ) -> None:
        super().__init__(source, match_of_row, seed)
        self._past, self._draw = OpponentPolicies(source.policy), OpponentDraw(settings, history)
        rows = len(match_of_row)
        self._opponents: Ints = np.full(rows, _NEWEST, np.int64)
        self._state: tuple[Array, ...] = tuple(part.numpy().copy() for part in self._newest[1].initial_state(rows))
        self._steps = 0

    @property
    def versions(self) -> Ints:
        """By row: the version that plays it."""
        return np.where(self.latest, self._source.version, self._opponents)

    @property
    def latest(self) -> Bools:
        """By row: whether the newest version plays it."""
        return np.equal(self._opponents, _NEWEST)

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        """Return actions as the environment takes them. `first`: rows whose match begins."""
        if first.any():
            self._draw_opponents(first)
        self._steps += 1
        self._see(observation)
        noise = self._newest_actor().draw_noise(len(first), self._generator)
        groups = [(version, np.flatnonzero(self._opponents == version)) for version in np.unique(self._opponents).tolist()]
        return join_rows([(rows, self._play_rows(version, rows, mask, first, noise)) for version, rows in groups])

    def finish(self, row: int, score: float) -> None:
        """Results do not change who is drawn."""

    def close(self) -> None:
        """Nothing to close."""

    def _draw_opponents(self, first: Bools) -> None:
        for rows in self._begun_matches(first):
            version = self._draw.draw(self._random, self._steps, self._versions_in_use)
            if version is not None:
                self._past.load(version, self._draw.active[version])
            self._opponents[rows] = _NEWEST if version is None else version
        self._past.keep({*self._opponents.tolist(), *self._draw.active})

    def _versions_in_use(self) -> set[int]:
        return set(self._opponents[~self.latest].tolist())

    def _play_rows(self, opponent: int, rows: Ints, mask: Bools | None, first: Bools, noise: Array) -> Tree:
        policy = self._newest_actor() if opponent == _NEWEST else self._past[opponent]
        state: tuple[Array, ...] = ()
        if policy.recurrent:
            if (begun := rows[first[rows]]).size:
                for part, initial in zip(self._state, policy.initial_state(len(begun)), strict=True):
                    part[begun] = initial.numpy()
            state = tuple(part[rows] for part in self._state)
        seen = map_tree(lambda x: x[rows], self._observation)
        acted = policy.act(seen, state, None if mask is None else mask[rows], noise[rows])
        for part, after in zip(self._state, acted.state, strict=True):
            part[rows] = after
        return acted.action


def with_past_opponents(
    environments: Environments, source: PolicySource, settings: SelfPlayConfig, seed: int, run: Path | None = None
) -> PolicySource:
    """Return the policy source for a sampler; if the environments have opponent rows, versions of the policy or players of a league
    play them from now on.

    `run`: directory of the run, which may have stored versions.
    """
    if not isinstance(environments, OpponentRows):
        return source
    if settings.opponents == "league":
        from ludus.sampling.league_rows import with_league_opponents  # imports this module

        return with_league_opponents(environments, source, settings, seed)
    history = PolicyHistory(settings)
    recorded = RecordedSource(source, history)
    if run is not None:
        history.load_from_run(run, recorded.version)
    environments.player = OpponentPlayer(recorded, history, settings, environments.match_of_opponent, seed)
    return recorded
