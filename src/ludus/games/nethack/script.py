"""Scripts that give orders by fixed rules: baselines for trained policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ludus.games.nethack.adventure import Order, Situation

_WOUNDED: Final = 0.5
_RESTED: Final = 0.8


def descend(now: Situation) -> Order:
    """Fight what is beside the hero, take stairs down as soon as they are known, explore otherwise."""
    if now.beside:
        return Order.FIGHT
    return Order.DESCEND if now.allowed[Order.DESCEND] else Order.EXPLORE


def careful(now: Situation) -> Order:
    """As `descend`, but pray in trouble, eat when hungry, and rest when wounded and alone."""
    if now.allowed[Order.PRAY]:
        return Order.PRAY
    if now.beside:
        return Order.FIGHT
    if now.allowed[Order.EAT]:
        return Order.EAT
    if now.hp < _WOUNDED and not now.in_view:
        return Order.REST
    return Order.DESCEND if now.allowed[Order.DESCEND] else Order.EXPLORE


def thorough(now: Situation) -> Order:
    """As `careful`, but explore every level completely before leaving it."""
    order = careful(now)
    return Order.EXPLORE if order is Order.DESCEND and now.frontier is not None else order


SCRIPTS: Final[dict[str, Callable[[Situation], Order]]] = {"descend": descend, "careful": careful, "thorough": thorough}
