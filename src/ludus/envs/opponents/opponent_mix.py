"""Who plays against whom: how the seats of the learner are shared out among kinds of opponents. Pure.

A *group* is one side of a match that the learner plays: one seat of 1v1, three of 3v3. Against itself it plays both sides, so such
matches take two groups; any other takes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError

SELF: Final = "self"
"""Both sides are the newest version, and both are learned from."""
PAST: Final = "past"
"""The other side is an older version."""
PAST_VERSION: Final = "past_version"
"""The number, among those that episodes end with, that says which older version it was against. The environment says of which
episodes there is one; whoever plays those rows says the number."""
RULE: Final = "rule:"
"""Before the name of a player that belongs to the game."""


def shares_of(opponent: str | Sequence[str] | Mapping[str, float], rules: Sequence[str]) -> dict[str, float]:
    """Kind of opponent → share of the groups; they sum to 1.

    `opponent` is a name, several (in equal shares), or names with their shares. A name is `self`, `past`, or one of `rules` with or
    without `rule:` before it. Raises ConfigError.
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
                f"The share of opponent {name!r} is {share!r}.", "It is a number from 0 up, as in {self: 0.8, past: 0.2}."
            )
        kind = _kind(name, rules)
        if share:
            shares[kind] = shares.get(kind, 0.0) + share
    if not shares:
        raise ConfigError(f"opponent is {opponent!r}: there is nobody to play against.", f"Name one of {_names(rules)}.")
    total = sum(shares.values())
    return {kind: share / total for kind, share in shares.items()}


def _kind(name: Any, rules: Sequence[str]) -> str:
    if name in (SELF, PAST):
        return str(name)
    rule = name.removeprefix(RULE) if isinstance(name, str) else name
    if rule not in rules:
        raise ConfigError(f"There is no opponent {name!r}.", did_you_mean(str(name), [SELF, PAST, *rules]))
    return f"{RULE}{rule}"


def _names(rules: Sequence[str]) -> str:
    return ", ".join([SELF, PAST, *rules])


def groups(count: int, shares: Mapping[str, float], *, stand_in: str = f"{RULE}medium") -> list[str]:
    """Which kind of opponent each of `count` groups has, kinds in the order of `shares`; those of `self` are even in number.

    As near to the shares as whole matches allow (largest remainder), and at least one match of each kind while there is room, the
    larger shares first. What remains when `self` is the only kind and the number is odd plays against `stand_in`.
    """
    units = {kind: 2 if kind == SELF else 1 for kind, share in shares.items() if share > 0}
    total = sum(shares[kind] for kind in units)
    missing = {kind: count * shares[kind] / total for kind in units}
    got = dict.fromkeys(units, 0)
    left = count
    for kind in sorted(units, key=lambda kind: -missing[kind]):
        if units[kind] <= left:
            got[kind], left = units[kind], left - units[kind]
    while fitting := [kind for kind in units if units[kind] <= left]:
        # Another match is worth most where it brings the number nearest to what it should be.
        best = max(fitting, key=lambda kind: missing[kind] - got[kind] - units[kind] / 2)
        got[best], left = got[best] + units[best], left - units[best]
    return [kind for kind in got for _ in range(got[kind])] + [stand_in] * left
