"""Pictures of a match from above, drawn with pygame. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pygame

from ludus.core.types import Floats
from ludus.games.rocket_league import field, simulator

_SCALE: Final = 0.055
"""Pixels per unreal unit."""
_MARGIN, _HEADER = 8, 32
_CAR_LENGTH, _CAR_WIDTH = 440, 290
"""Of the drawn cars, almost four times as long as the real ones."""
_GROUND, _LINE, _BALL, _SHADOW = (34, 68, 46), (120, 150, 125), (245, 245, 245), (20, 44, 30)
_TEAMS: Final = ((70, 140, 255), (255, 150, 40))
_PAD_FULL, _PAD_EMPTY, _FLAME = (240, 210, 60), (60, 90, 60), (255, 90, 40)


class TopDownRenderer:
    """Draws one match. Blue's goal is on the left."""

    def __init__(self, pads: Mapping[tuple[float, float], bool]) -> None:
        """`pads`: place → whether it is a big one, in the order of the states."""
        pygame.font.init()
        self._pads = pads
        self._font = pygame.font.Font(None, 28)
        self._size = (
            _even(2 * (field.BACK_WALL_Y + field.GOAL_DEPTH) * _SCALE + 2 * _MARGIN),
            _even(2 * field.SIDE_WALL_X * _SCALE + 2 * _MARGIN + _HEADER),
        )
        self._background = self._draw_background()

    def draw(self, ball: Floats, cars: Floats, pads: Floats, goals: Sequence[int], seconds_left: float) -> npt.NDArray[np.uint8]:
        """[height, width, 3]. States are those that blue sees."""
        surface = self._background.copy()
        for (place, big), full in zip(self._pads.items(), pads.tolist(), strict=True):
            pygame.draw.circle(surface, _PAD_FULL if full else _PAD_EMPTY, self._pixel(place), 7 if big else 3)
        for index, car in enumerate(cars):
            self._draw_car(surface, car, _TEAMS[index // (len(cars) // 2)])
        x, y, height = ball[simulator.BALL_POSITION].tolist()
        radius = field.BALL_RADIUS * _SCALE * (1.4 + height / 900)
        pygame.draw.circle(surface, _SHADOW, self._pixel((x, y)), radius + 2)
        pygame.draw.circle(surface, _BALL, self._pixel((x, y)), radius)
        self._draw_header(surface, goals, seconds_left)
        picture: npt.NDArray[np.uint8] = np.ascontiguousarray(pygame.surfarray.array3d(surface).swapaxes(0, 1))
        return picture

    def _pixel(self, place: tuple[float, float]) -> tuple[float, float]:
        """x is drawn downwards and y to the right: seen from above, the left of a car is the left of its picture."""
        across = _MARGIN + (field.BACK_WALL_Y + field.GOAL_DEPTH + place[1]) * _SCALE
        return across, _HEADER + _MARGIN + (field.SIDE_WALL_X + place[0]) * _SCALE

    def _draw_background(self) -> Any:
        surface = pygame.Surface(self._size)
        surface.fill((16, 26, 20))
        wall_x, wall_y, cut = field.SIDE_WALL_X, field.BACK_WALL_Y, 1152.0
        corners = [
            (sign_x * x, sign_y * y)
            for sign_x, sign_y, order in ((-1, -1, 1), (1, -1, -1), (1, 1, 1), (-1, 1, -1))
            for x, y in [(wall_x, wall_y - cut), (wall_x - cut, wall_y)][::order]
        ]
        pygame.draw.polygon(surface, _GROUND, [self._pixel(corner) for corner in corners])
        pygame.draw.polygon(surface, _LINE, [self._pixel(corner) for corner in corners], 2)
        for side, colour in zip((-1, 1), _TEAMS, strict=True):
            half, line, back = field.GOAL_HALF_WIDTH, side * field.BACK_WALL_Y, side * (field.BACK_WALL_Y + field.GOAL_DEPTH)
            mouth = [self._pixel(place) for place in ((-half, line), (-half, back), (half, back), (half, line))]
            pygame.draw.polygon(surface, tuple(part // 3 for part in colour), mouth)
            pygame.draw.polygon(surface, colour, mouth, 2)
        pygame.draw.line(surface, _LINE, self._pixel((-field.SIDE_WALL_X, 0)), self._pixel((field.SIDE_WALL_X, 0)), 1)
        pygame.draw.circle(surface, _LINE, self._pixel((0, 0)), 915 * _SCALE, 1)
        return surface

    def _draw_car(self, surface: Any, car: Floats, colour: tuple[int, int, int]) -> None:
        if car[simulator.CAR_DEMOLISHED]:
            return
        x, y, height = car[simulator.CAR_POSITION].tolist()
        forward = car[simulator.CAR_AXES][:2]
        forward = forward / max(float(np.linalg.norm(forward)), 1e-6)
        side, size = np.array([-forward[1], forward[0]]), 1 + height / 1500
        ahead, across = forward * _CAR_LENGTH / 2 * size, side * _CAR_WIDTH / 2 * size
        middle = np.array([x, y])
        body = [
            middle + ahead * 0.4 + across,
            middle + ahead,
            middle + ahead * 0.4 - across,
            middle - ahead - across,
            middle - ahead + across,
        ]
        pygame.draw.polygon(surface, colour, [self._pixel((float(px), float(py))) for px, py in body])
        pygame.draw.polygon(surface, _SHADOW, [self._pixel((float(px), float(py))) for px, py in body], 1)
        tail = middle - ahead * 1.15
        strength = float(car[simulator.CAR_BOOST]) / 100
        pygame.draw.circle(surface, _FLAME, self._pixel((float(tail[0]), float(tail[1]))), 1 + 4 * strength)

    def _draw_header(self, surface: Any, goals: Sequence[int], seconds_left: float) -> None:
        middle = self._size[0] // 2
        for text, colour, place in (
            (str(goals[0]), _TEAMS[0], middle - 70),
            (f"{seconds_left:.0f} s", _BALL, middle),
            (str(goals[1]), _TEAMS[1], middle + 70),
        ):
            written = self._font.render(text, True, colour)
            surface.blit(written, (place - written.get_width() // 2, 8))


def _even(length: float) -> int:
    """Video encoders need even sizes."""
    return 2 * round(length / 2)
