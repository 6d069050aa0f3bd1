"""Matches that are fought at different places of one map: soldiers are created, commanded and read together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.core.types import Floats, Ints
from ludus.games.zero_ad.game_process import MAP_SIZE, ZeroADGame
from ludus.games.zero_ad.observations import IDLE, Facts

SPACING: Final = 112.0
"""Metres between the centres of neighbouring matches."""
_EDGE: Final = 96.0
PER_SIDE: Final = int((MAP_SIZE - 2 * _EDGE) // SPACING) + 1
MAX_MATCHES: Final = PER_SIDE**2
HALF_FIELD: Final = 44.0
"""Soldiers are not sent farther than this from the centre, in x and z. Soldiers act on commands alone, so matches do not matter to each other."""
_PLAYERS: Final = (1, 2)
_CODE: Final = (Path(__file__).parent / "skirmish.js").read_text(encoding="utf-8")


def centre_of(number: int) -> tuple[float, float]:
    """The centre of a match on the map."""
    return _EDGE + SPACING * (number % PER_SIDE), _EDGE + SPACING * (number // PER_SIDE)


class Battlefield:
    """One running game with `count` matches of `templates` against the same. Raises MissingExtra, EnvironmentFault."""

    def __init__(self, count: int, templates: Sequence[str]) -> None:
        self.count, self._templates, soldiers = count, list(templates), len(templates)
        self._centres = np.array([centre_of(number) for number in range(count)], np.float32)
        self._ids: Ints = np.zeros((count, 2, soldiers), np.int64)
        self.place: Floats = np.zeros((count, 2, soldiers, 2), np.float32)
        self.health: Floats = np.zeros((count, 2, soldiers), np.float32)
        self.orders: Ints = np.full((count, 2, soldiers), IDLE)
        self._commands: list[tuple[int, dict[str, Any]]] = []
        self._game = ZeroADGame()
        try:
            self.restart(0)
            self.facts = self._read_facts()
        except BaseException:
            self.close()
            raise

    def restart(self, seed: int) -> None:
        """Start the map anew, without soldiers."""
        self._game.start_map(seed)
        self._game.evaluate(_CODE)
        self._ids[:] = 0

    def _read_facts(self) -> Facts:
        kinds = {kind: self._game.evaluate(f"ludus.facts({json.dumps(kind)})") for kind in sorted(set(self._templates))}
        health, reach, shoots = np.array([kinds[kind] for kind in self._templates], np.float32).T
        return Facts(health, reach, shoots)

    def deploy(self, numbers: Sequence[int], places: Floats) -> None:
        """Replace the soldiers of these matches by new ones at `places` [K, 2, U, 2], relative to the centres. They look at the enemy."""
        old = self._ids[list(numbers)].reshape(-1).tolist()
        rows = [
            [self._templates[soldier], _PLAYERS[team], float(x), float(z), float(np.pi / 2 if team == 0 else -np.pi / 2)]
            for number, match in zip(numbers, places, strict=True)
            for team in (0, 1)
            for soldier, (x, z) in enumerate(match[team] + self._centres[number])
        ]
        self._game.evaluate(f"ludus.remove({json.dumps([one for one in old if one])})")
        created = self._game.evaluate(f"ludus.spawn({json.dumps(rows)})")
        self._ids[list(numbers)] = np.array(created, np.int64).reshape(len(numbers), *self._ids.shape[1:])
        self.orders[list(numbers)] = IDLE

    def attack(self, match: int, team: int, soldier: int, enemy: int) -> None:
        """A new order is sent only if it differs: a repeated one would start the blow or shot anew."""
        if self.orders[match, team, soldier] == enemy:
            return
        self.orders[match, team, soldier] = enemy
        target = int(self._ids[match, 1 - team, enemy])
        self._command(match, team, soldier, {"type": "attack", "target": target, "allowCapture": False})

    def move(self, match: int, team: int, soldier: int, offset: Floats) -> None:
        place = np.clip(self.place[match, team, soldier] + offset, -HALF_FIELD, HALF_FIELD) + self._centres[match]
        self.orders[match, team, soldier] = -2
        self._command(match, team, soldier, {"type": "walk", "x": round(float(place[0]), 2), "z": round(float(place[1]), 2)})

    def _command(self, match: int, team: int, soldier: int, command: dict[str, Any]) -> None:
        entities = [int(self._ids[match, team, soldier])]
        self._commands.append((_PLAYERS[team], {**command, "entities": entities, "queued": False, "pushFront": False}))

    def advance(self, turns: int) -> None:
        """Send the commands, simulate turns and read all soldiers."""
        self._game.step(self._commands)
        self._commands = []
        for _ in range(turns - 1):
            self._game.step()
        self.read()

    def read(self) -> None:
        found = self._game.evaluate(f"ludus.states({json.dumps(self._ids.reshape(-1).tolist())})")
        states = np.array(found, np.float32).reshape(*self._ids.shape, 3)
        self.health[:] = states[..., 2]
        places = states[..., :2] - self._centres[:, None, None]
        self.place[:] = np.where(self.health[..., None] > 0, places, self.place)
        dead = (self.orders >= 0) & (np.take_along_axis(self.health[:, ::-1], np.maximum(self.orders, 0), axis=2) <= 0)
        self.orders[dead] = IDLE

    def close(self) -> None:
        self._game.close()
