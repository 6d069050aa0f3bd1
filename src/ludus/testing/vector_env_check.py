"""Check of a game that steps many matches with one call, for your tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ludus.core.tree import leaves, map_tree
from ludus.core.types import Bools, Ints
from ludus.envs.matches.rows import RowStep
from ludus.envs.matches.vector_multi_agent import VectorMatches, VectorMultiAgentEnv
from ludus.envs.pettingzoo import sample_action
from ludus.errors import EnvironmentFault


def check_vector_multi_agent_env(
    make: Callable[[int], VectorMultiAgentEnv], matches: int = 5, steps: int = 300, seed: int = 0
) -> None:
    """Raise EnvironmentFault unless every match depends on its seed and its actions alone. `make`: number of matches → environment.

    Random actions are played in `matches` matches of one environment, of which some pause in every step, and in as many environments of one
    match. All of them must give the same results.

    def test_my_game():
        check_vector_multi_agent_env(lambda num_envs: MyGame(num_envs))
    """
    many, single = (
        VectorMatches(make(matches), "the environment"),
        [VectorMatches(make(1), "the environment") for _ in range(matches)],
    )
    random = np.random.default_rng(seed)
    try:
        for _ in range(steps):
            over = np.flatnonzero(many.over)
            if len(over):
                seeds = random.integers(1 << 31, size=len(over))
                together = many.reset(over, seeds)
                for number, own in zip(over.tolist(), seeds, strict=True):
                    _compare(many, together, single[number], single[number].reset(np.zeros(1, np.int64), own[None]), number)
            playing = ~many.over & (random.random(matches) < 0.8)
            _choose_actions(many, single, random)
            together = many.step(playing)
            for number in np.flatnonzero(playing).tolist():
                _compare(many, together, single[number], single[number].step(np.ones(1, np.bool_)), number)
    finally:
        for env in (many, *single):
            env.close()


def _choose_actions(many: VectorMatches, single: list[VectorMatches], random: np.random.Generator) -> None:
    space = next(iter(many.agents.values())).action
    for row in range(many.rows):
        mask = None if many.mask is None or not many.acting[row] else many.mask[row]
        action, match = sample_action(space, mask, random), single[row // many.width]
        map_tree(lambda all_rows, own, row=row: all_rows.__setitem__(row, own), many.actions, action)
        map_tree(lambda all_rows, own, row=row: all_rows.__setitem__(row % many.width, own), match.actions, action)


def _compare(many: VectorMatches, together: RowStep, one: VectorMatches, alone: RowStep, number: int) -> None:
    first = number * many.width
    rows = slice(first, first + many.width)

    def differ(what: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"Match {number} of {many.num} has other {what} after {one.steps} steps than the same match in an environment of its own.",
            "Let a match depend on its seed and its own actions only, and change only the matches that are reset or playing.",
        )

    own = _rows_within(together.turns, rows)
    if (together.turns[own] - first).tolist() != alone.turns.tolist():
        raise differ("acting agents")
    if together.turn_reward[own].tolist() != alone.turn_reward.tolist():
        raise differ("rewards")
    own = _rows_within(together.departures, rows)
    ends = list(zip((together.departures[own] - first).tolist(), together.terminated[own].tolist(), strict=True))
    if ends != list(zip(alone.departures.tolist(), alone.terminated.tolist(), strict=True)):
        raise differ("terminated or truncated agents")
    if together.departure_reward[own].tolist() != alone.departure_reward.tolist():
        raise differ("rewards")
    seen = np.concatenate([alone.turns, alone.departures[alone.observed]])
    for (path, all_rows), (_, own_rows) in zip(leaves(many.observation), leaves(one.observation), strict=True):
        if not np.array_equal(all_rows[rows][seen], own_rows[seen]):
            raise differ(f"observations ({path})" if path else "observations")
    if many.mask is not None and one.mask is not None and not np.array_equal(many.mask[rows][alone.turns], one.mask[alone.turns]):
        raise differ("action masks")


def _rows_within(rows: Ints, match: slice) -> Bools:
    within: Bools = (rows >= match.start) & (rows < match.stop)
    return within
