"""A whole game as arrays, level by level, so that traversals are vectorised. Built once per game.

A *strategy* is one array of probabilities with a slot for every action of every information set of both players; the slots of an
information set are adjacent and add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.errors import ConfigError
from ludus.game_theory.extensive_game import CHANCE, TERMINAL, ExtensiveGame

Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_MAX_NODES = 5_000_000


@dataclass(frozen=True)
class InformationSet:
    """A decision of a player: the states that look the same to that player."""

    key: Hashable
    player: int
    actions: tuple[int, ...]
    first_slot: int
    state: Any
    """One of its states, for policies that need an observation."""


@dataclass(frozen=True)
class Level:
    """All nodes of one depth, and the edges to the next depth."""

    utility: Doubles
    """[nodes] return of player 0 at finished games, else 0."""
    terminal: npt.NDArray[np.bool_]
    parent: Indices
    """[edges] node of this level."""
    child: Indices
    """[edges] node of the next level; every node has one parent."""
    slot: Indices
    """[edges] slot of the action in a strategy; -1 at chance nodes."""
    player: Indices
    """[edges] acting player: 0, 1 or CHANCE."""
    chance: Doubles
    """[edges] probability of a chance outcome, 1 elsewhere."""


@dataclass(frozen=True)
class GameTree:
    game: ExtensiveGame
    levels: Sequence[Level]
    information_sets: Sequence[InformationSet]
    slots: int
    starts: Indices
    """[information sets] first slot."""
    sizes: Indices
    slot_player: Indices
    """[slots] the player who acts."""

    def uniform(self) -> Doubles:
        return np.repeat(1.0 / self.sizes, self.sizes)

    def strategy(self, probabilities: Callable[[InformationSet], Sequence[float]]) -> Doubles:
        """Build a strategy from the action probabilities of every information set."""
        return np.concatenate([np.asarray(probabilities(one), np.float64) for one in self.information_sets])

    def normalise(self, weights: Doubles) -> Doubles:
        """Scale the slots of each information set to a sum of 1; all zeros become uniform."""
        totals = np.add.reduceat(weights, self.starts)
        spread = np.repeat(totals, self.sizes)
        return np.where(spread > 0, weights / np.where(spread > 0, spread, 1.0), self.uniform())

    def edge_probabilities(self, level: Level, strategy: Doubles) -> Doubles:
        return np.where(level.slot >= 0, strategy[level.slot], level.chance)

    def value(self, strategy: Doubles) -> float:
        """Expected return of player 0 if both players follow the strategy."""
        values = np.zeros(0)
        for level in reversed(self.levels):
            own = level.utility.copy()
            if level.parent.size:
                own += np.bincount(
                    level.parent, self.edge_probabilities(level, strategy) * values[level.child], minlength=own.size
                )
            values = own
        return float(values[0])

    def reach(self, strategy: Doubles, of_player: int, *, own: bool) -> list[Doubles]:
        """By level, the probability with which that player (`own`), or chance and the other player, lead to each node."""
        reached = [np.ones(1)]
        for level in self.levels[:-1]:
            counts = (level.player == of_player) == own
            factor = np.where(counts, self.edge_probabilities(level, strategy), 1.0)
            below = np.empty(level.child.size)
            below[level.child] = reached[-1][level.parent] * factor
            reached.append(below)
        return reached


def build_tree(game: ExtensiveGame, max_nodes: int = _MAX_NODES) -> GameTree:
    """Enumerate the game. Raises ConfigError if it has more than `max_nodes` nodes."""
    sets: dict[tuple[int, Hashable], InformationSet] = {}
    levels: list[Level] = []
    states: list[Any] = [game.root()]
    slots = nodes = 0
    while states:
        nodes += len(states)
        if nodes > max_nodes:
            raise ConfigError(
                f"{game.name} has more than {max_nodes:,} states.",
                "Train a best response instead: ludus exploit RUN --budget STEPS.",
            )
        utility, below = np.zeros(len(states)), []
        terminal = np.zeros(len(states), np.bool_)
        edges: list[tuple[int, int, int, float]] = []
        for number, state in enumerate(states):
            player = game.player(state)
            if player == TERMINAL:
                utility[number], terminal[number] = game.returns(state), True
            elif player == CHANCE:
                for outcome, probability in game.chance_outcomes(state):
                    edges.append((number, -1, CHANCE, probability))
                    below.append(game.child(state, outcome))
            else:
                key = player, game.information(state)
                found = sets.get(key)
                if found is None:
                    found = sets[key] = InformationSet(key[1], player, tuple(game.legal_actions(state)), slots, state)
                    slots += len(found.actions)
                for offset, action in enumerate(found.actions):
                    edges.append((number, found.first_slot + offset, player, 1.0))
                    below.append(game.child(state, action))
        columns = zip(*edges, strict=True) if edges else ((), (), (), ())
        parent, slot, acting, chance = columns
        levels.append(
            Level(
                utility,
                terminal,
                np.array(parent, np.int64),
                np.arange(len(edges), dtype=np.int64),
                np.array(slot, np.int64),
                np.array(acting, np.int64),
                np.array(chance, np.float64),
            )
        )
        states = below
    ordered = list(sets.values())
    sizes = np.array([len(one.actions) for one in ordered], np.int64)
    return GameTree(
        game,
        levels,
        ordered,
        slots,
        np.array([one.first_slot for one in ordered], np.int64),
        sizes,
        np.repeat(np.array([one.player for one in ordered], np.int64), sizes),
    )
