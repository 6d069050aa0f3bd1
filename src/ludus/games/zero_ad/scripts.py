"""Scripted soldiers, as functions of one observation. `script:ludus.games.zero_ad.scripts:attack_nearest` names one in battles and leagues."""

from __future__ import annotations

from ludus.core.types import Bools, Floats
from ludus.games.zero_ad import observations as seen


def attack_nearest(observation: Floats, action_mask: Bools | None = None) -> int:
    """Attack the nearest living enemy."""
    enemies = _enemies(observation)
    living = [slot for slot in range(len(enemies)) if enemies[slot, seen.ENEMY_ALIVE]]
    if not living:
        return seen.KEEP
    return _attack(min(living, key=lambda slot: float(enemies[slot, seen.ENEMY_DISTANCE])), action_mask)


def attack_weakest(observation: Floats, action_mask: Bools | None = None) -> int:
    """Attack the living enemy with the fewest hitpoints; all soldiers of a team choose the same one."""
    enemies = _enemies(observation)
    return _attack(0, action_mask) if enemies[0, seen.ENEMY_ALIVE] else seen.KEEP


def _enemies(observation: Floats) -> Floats:
    """[slots, numbers]"""
    return observation[-seen.ENEMY * seen.soldiers_of(len(observation)) :].reshape(-1, seen.ENEMY)


def _attack(slot: int, action_mask: Bools | None) -> int:
    action = seen.FIRST_ATTACK + slot
    return action if action_mask is None or action_mask[action] else seen.KEEP
