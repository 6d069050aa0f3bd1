"""Distribution of the learner's seats over kinds of opponents. Pure.

A *group* is one side of a match that the learner plays: one seat of 1v1, three of 3v3. In self-play the learner plays both sides,
so such a match takes two groups; any other takes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError

SELF: Final = "self"
"""Both sides are the newest version, and both are learned from."""
PAST: Final = "past"
"""The other side is an older version; or, if self-play draws it, the newest one, which is not learned from."""
LATEST: Final = "latest"
"""In names of results: the newest version played a row of `past`."""
PAST_VERSION: Final = "past_version"
"""Name of the episode result with the opponent's version number. The environment marks the episodes that have one; the player
of the opponent rows fills in the number.
"""
RULE: Final = "rule:"
"""Prefix of the name of a scripted player of the game."""


def outcome_names(opponents: Iterable[str]) -> list[str]:
    """Return the names of wins and losses by opponent. `past` also has those against the newest version."""
    names = list(opponents)
    return [f"{how}/{name}" for name in (*names, *([LATEST] if PAST in names else [])) for how in ("win", "loss")]


def parse_opponent_mix(opponent: str | Sequence[str] | Mapping[str, float], rules: Sequence[str]) -> dict[str, float]:
    """Return kind of opponent → share of the groups; shares add up to 1.

    `opponent` is a name, several names (with equal shares), or names with their shares. A name is `self`, `past`, or one of `rules`,
    with or without the prefix `rule:`. Raises ConfigError.
    """
    given: list[tuple[Any, Any]]
    if isinstance(opponent, Mapping):
        given = list(opponent.items())
    elif isinstance(opponent, Sequence) and not isinstance(opponent, str):
        given = [(name, 1.0) for name in opponent]
    else:
        given = [(opponent, 1.0)]
    shares: dict[str, float] = {}
    for name, share in given:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
            raise ConfigError(
                f"The share of opponent {name!r} is {share!r}.", "Give a number of at least 0, as in {self: 0.8, past: 0.2}."
            )
        kind = _parse_kind(name, rules)
        if share:
            shares[kind] = shares.get(kind, 0.0) + share
    if not shares:
        raise ConfigError(f"opponent is {opponent!r}: there is no opponent.", f"Name one of {', '.join([SELF, PAST, *rules])}.")
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items()}


def _parse_kind(name: Any, rules: Sequence[str]) -> str:
    if name in (SELF, PAST):
        return str(name)
    rule = name.removeprefix(RULE) if isinstance(name, str) else name
    if rule not in rules:
        raise ConfigError(f"There is no opponent {name!r}.", did_you_mean(str(name), [SELF, PAST, *rules]))
    return f"{RULE}{rule}"


def assign_opponents(count: int, shares: Mapping[str, float], *, stand_in: str = f"{RULE}medium") -> list[str]:
    """Return the kind of opponent of each of `count` groups, in the order of `shares`; `self` gets an even number.

    The counts are as close to the shares as whole matches allow (largest remainder), with at least one match per kind while there are
    enough groups, larger shares first. A group left over when only `self` is configured plays against `stand_in`.
    """
    units = {kind: 2 if kind == SELF else 1 for kind, share in shares.items() if share > 0}
    total = sum(shares[kind] for kind in units)
    target_groups = {kind: count * shares[kind] / total for kind in units}
    assigned = dict.fromkeys(units, 0)
    left = count
    for kind in sorted(units, key=lambda kind: -target_groups[kind]):
        if units[kind] <= left:
            assigned[kind], left = units[kind], left - units[kind]
    while fitting := [kind for kind in units if units[kind] <= left]:
        # Give the next match to the kind that it brings closest to its target.
        best = max(fitting, key=lambda kind: target_groups[kind] - assigned[kind] - units[kind] / 2)
        assigned[best], left = assigned[best] + units[best], left - units[best]
    return [kind for kind in assigned for _ in range(assigned[kind])] + [stand_in] * left
