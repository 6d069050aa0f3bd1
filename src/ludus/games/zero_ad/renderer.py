"""Pictures of a skirmish from above, drawn with pygame. No display is needed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pygame

from ludus.core.types import Floats, Ints
from ludus.games.zero_ad.battlefield import HALF_FIELD
from ludus.games.zero_ad.observations import Facts

_SIZE: Final = 560
_MARGIN_M: Final = 6.0
_SCALE: Final = _SIZE / (2 * (HALF_FIELD + _MARGIN_M))
_GROUND, _GRID, _TEXT, _BAR = (92, 110, 66), (84, 101, 60), (240, 240, 230), (40, 30, 30)
_TEAMS: Final = ((60, 120, 255), (220, 60, 50))


class SkirmishRenderer:
    """Draws one match: round soldiers fight hand to hand, square ones shoot; lines lead to the enemies that they attack."""

    def __init__(self, facts: Facts) -> None:
        pygame.font.init()
        self._facts = facts
        self._font = pygame.font.Font(None, 26)

    def draw(self, place: Floats, health: Floats, orders: Ints, seconds: float) -> npt.NDArray[np.uint8]:
        """[height, width, 3]."""
        surface = pygame.Surface((_SIZE, _SIZE))
        surface.fill(_GROUND)
        for line in range(0, _SIZE, round(10 * _SCALE)):
            pygame.draw.line(surface, _GRID, (line, 0), (line, _SIZE))
            pygame.draw.line(surface, _GRID, (0, line), (_SIZE, line))
        living = np.argwhere(health > 0).tolist()
        for team, soldier in living:
            enemy = int(orders[team, soldier])
            if enemy >= 0:
                colour = tuple(part // 2 + 60 for part in _TEAMS[team])
                pygame.draw.line(surface, colour, _pixel(place[team, soldier]), _pixel(place[1 - team, enemy]), 1)
        for team, soldier in living:
            self._draw_soldier(surface, _pixel(place[team, soldier]), team, soldier, float(health[team, soldier]))
        for team, left in ((0, 10), (1, _SIZE - 60)):
            share = f"{100 * health[team].sum() / self._facts.health.sum():.0f} %"
            surface.blit(self._font.render(share, True, _TEAMS[team]), (left, 8))
        clock = self._font.render(f"{seconds:.0f} s", True, _TEXT)
        surface.blit(clock, ((_SIZE - clock.get_width()) // 2, 8))
        picture: npt.NDArray[np.uint8] = np.ascontiguousarray(pygame.surfarray.array3d(surface).swapaxes(0, 1))
        return picture

    def _draw_soldier(self, surface: Any, at: tuple[float, float], team: int, soldier: int, health: float) -> None:
        if self._facts.shoots[soldier]:
            box = pygame.Rect(0, 0, 14, 14)
            box.center = (round(at[0]), round(at[1]))
            pygame.draw.rect(surface, _TEAMS[team], box)
            pygame.draw.rect(surface, _TEXT, box, 1)
        else:
            pygame.draw.circle(surface, _TEAMS[team], at, 9)
            pygame.draw.circle(surface, _TEXT, at, 9, 1)
        share = health / float(self._facts.health[soldier])
        pygame.draw.rect(surface, _BAR, pygame.Rect(round(at[0]) - 12, round(at[1]) - 17, 24, 4))
        pygame.draw.rect(surface, (90, 220, 90), pygame.Rect(round(at[0]) - 12, round(at[1]) - 17, max(1, round(24 * share)), 4))


def _pixel(place: Floats) -> tuple[float, float]:
    x, z = (float(part) for part in place)
    return (x + HALF_FIELD + _MARGIN_M) * _SCALE, (HALF_FIELD + _MARGIN_M - z) * _SCALE
