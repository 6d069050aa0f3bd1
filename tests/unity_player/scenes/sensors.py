"""Scenes of one decision whose observations tell the right action: for every kind of action and observation."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from tests.unity_player.messages import VARIABLE_SIZE, Action, AgentInfo, Behaviour, Sensor
from tests.unity_player.scenes.area import World

ROUNDS = 10


class Guess:
    """Base class: an episode is some independent rounds, each with a reward for its action."""

    behaviours: Sequence[Behaviour]

    def __init__(self, world: World) -> None:
        self._world, self._id = world, world.new_id()
        self.reset()

    def reset(self) -> None:
        self._round, self._reward = 0, 0.0
        self.draw()

    def draw(self) -> None:
        """Draw the next round."""
        raise NotImplementedError

    def observations(self) -> Sequence[bytes]:
        raise NotImplementedError

    def reward(self, action: Action) -> float:
        raise NotImplementedError

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        yield self.behaviours[0].name, AgentInfo(self._id, self.observations(), self._reward)

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        self._reward = self.reward(actions[self._id])
        self._round += 1
        self.draw()
        if self._round < ROUNDS:
            return ()
        last = AgentInfo(self._id, self.observations(), self._reward, done=True)
        self._id = self._world.new_id()
        self.reset()
        return ((self.behaviours[0].name, last),)


class Hybrid(Guess):
    """Two numbers to repeat, and two branches to choose: the sign of the first, and which of three the second is in."""

    behaviours = (Behaviour("Hybrid?team=0", continuous=2, branches=(2, 3)),)
    sensor = Sensor("Targets", (2,), properties=(1,))

    def draw(self) -> None:
        self._targets = self._world.random.uniform(-1, 1), self._world.random.uniform(-1, 1)

    def observations(self) -> Sequence[bytes]:
        return (self.sensor.floats(self._targets),)

    def reward(self, action: Action) -> float:
        first, second = self._targets
        right = (first > 0, (second > -1 / 3) + (second > 1 / 3))
        missed = sum(abs(given - wanted) for given, wanted in zip(action.continuous, self._targets, strict=True))
        hits = sum(given == wanted for given, wanted in zip(action.discrete, right, strict=True))
        return hits - missed


class Pictures(Guess):
    """Pictures of 3 × 8 × 12 as PNG, 1 × 8 × 12 as floats, and 4 × 8 × 12 as two PNG files; the action is the quadrant that is lit."""

    HEIGHT, WIDTH = 8, 12
    behaviours = (Behaviour("Camera?team=0", branches=(4,)),)
    colour = Sensor("Colour", (3, HEIGHT, WIDTH), properties=(1, 2, 2))
    grey = Sensor("Grey", (1, HEIGHT, WIDTH), properties=(1, 2, 2))
    stack = Sensor("Stack", (4, HEIGHT, WIDTH), properties=(1, 2, 2), mapping=(0, 1, 2, 3, -1, -1))

    def draw(self) -> None:
        self._lit = self._world.random.randrange(4)

    def observations(self) -> Sequence[bytes]:
        return self._pictures(self._lit)

    @classmethod
    @functools.cache
    def _pictures(cls, lit: int) -> Sequence[bytes]:
        rows, columns = range(cls.HEIGHT), range(cls.WIDTH)
        light = [[255 if cls._quadrant(row, column) == lit else 51 for column in columns] for row in rows]
        colour = png([[(value, 0, 255 - value) for value in row] for row in light])
        turned = png([[(255 - value, value, 0) for value in row] for row in light])
        grey = [value / 255 for row in light for value in row]
        return (cls.colour.pictures(colour), cls.grey.floats(grey), cls.stack.pictures(colour + turned))

    @classmethod
    def _quadrant(cls, row: int, column: int) -> int:
        return 2 * (row >= cls.HEIGHT // 2) + (column >= cls.WIDTH // 2)

    def reward(self, action: Action) -> float:
        return float(action.discrete[0] == self._lit)


class Crowd(Guess):
    """A buffer of at most 20 entities of 3 numbers; the action is the kind that most of them have, which is their last number."""

    MOST, KINDS = 20, 3
    behaviours = (Behaviour("Crowd?team=0", branches=(KINDS,)),)
    buffer = Sensor("Entities", (MOST, 3), properties=(VARIABLE_SIZE, 1))
    own = Sensor("Self", (2,), properties=(1,))

    def draw(self) -> None:
        draw = self._world.random
        self._most = draw.randrange(self.KINDS)
        kinds = [
            kind for kind in range(self.KINDS) for _ in range(draw.randint(4, 8) if kind == self._most else draw.randint(0, 3))
        ]
        self._entities = [(draw.uniform(-1, 1), draw.uniform(-1, 1), float(kind + 1)) for kind in kinds]

    def observations(self) -> Sequence[bytes]:
        values = [value for entity in self._entities for value in entity]
        padding = [0.0] * (3 * self.MOST - len(values))
        return (self.buffer.floats(values + padding), self.own.floats((len(self._entities) / self.MOST, 1.0)))

    def reward(self, action: Action) -> float:
        return float(action.discrete[0] == self._most)


def png(rows: Sequence[Sequence[tuple[int, int, int]]]) -> bytes:
    """An RGB picture as a PNG file."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    size = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(value for pixel in row for value in pixel) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(lines, 1)) + chunk(b"IEND", b"")
