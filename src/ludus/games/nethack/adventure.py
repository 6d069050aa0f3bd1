"""One game of NetHack played by orders. An order takes one turn of the hero, or a few turns of rest."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numpy as np

from ludus.games.nethack import squares as sq
from ludus.games.nethack.level import LevelMap, LevelMemory
from ludus.games.nethack.terminal import ESCAPE, Answers, Terminal

_MOVES: Final = tuple(map(ord, "kljhunby"))
"""Keys in the order of `squares.DIRECTIONS`."""
_FIGHT, _EAT, _DOWN, _UP = map(ord, "Fe><")
_KICK: Final = ord("d") & 31
_PRAY: Final = ord("p") | 128
_YES, _NO = ord("y"), ord("n")
_REST: Final = tuple(map(ord, "8s"))
_REST_TURNS: Final = 8
_SEARCH_ENOUGH: Final = 24
"""Turns of search after which another square is searched."""
_FOOD_CLASS: Final = 7
_HUNGRY, _WEAK = 2, 3
_PRAYER_TURNS: Final = 1000
"""Turns after which the god may be asked again."""
_FIRST_PRAYER_TURN: Final = 300
_FAR: Final = 80
_NEAR: Final = 8
"""Steps to a monster that can be fought or fled from."""

X, Y, SCORE, HP, HP_MAX, DEPTH, GOLD, ENERGY, ARMOR = 0, 1, 9, 10, 11, 12, 13, 14, 16
EXPERIENCE_LEVEL, TURN, HUNGER, DUNGEON, LEVEL = 18, 20, 21, 23, 24
"""Fields of the status line."""


class Order(IntEnum):
    EXPLORE = 0
    """Walk to gold in view or to the nearest square from which something new may be seen; open doors; search when all is known."""
    DESCEND = 1
    """Walk to known stairs down and take them."""
    ASCEND = 2
    """Walk to known stairs up and take them, with a monster in view."""
    FIGHT = 3
    """Attack a monster beside the hero, otherwise walk to the nearest one, at most eight steps away."""
    RETREAT = 4
    """Step to where monsters are farthest, with one at most eight steps away."""
    REST = 5
    """Search for eight turns, when wounded or when nothing is left to explore; interrupted when a monster appears."""
    PRAY = 6
    """Pray, in trouble and if the last prayer is long ago."""
    EAT = 7
    """Eat from the inventory when hungry."""


@dataclass(frozen=True)
class Monster:
    name: str
    level: int
    speed: int
    untouchable: bool
    """Harms a character that hits it with bare hands."""


@dataclass(frozen=True)
class Situation:
    """What the hero knows; distances in steps, None without a path."""

    hp: float
    """As a share of the maximum."""
    depth: int
    down: int | None
    up: int | None
    frontier: int | None
    """Distance to gold or to a square that promises something new."""
    monster: int | None
    beside: tuple[Monster, ...]
    """Monsters beside the hero that may be hostile."""
    in_view: int
    """Number of monsters that may be hostile."""
    strongest: Monster | None
    explored: int
    """Visited squares of the level."""
    searched: int
    """Turns of search on the level."""
    allowed: tuple[bool, ...]
    """By order."""


class Adventure:
    """Call `start`, then `give` while not `over`."""

    def __init__(self, character: str) -> None:
        self.terminal = Terminal(character)
        self.score = 0
        """The last score that the status line showed."""
        self.depth = 1
        """The largest depth reached."""
        self._memories: defaultdict[tuple[int, int], LevelMemory] = defaultdict(LevelMemory)
        self._peaceful: set[int] = set()
        self._prayed_at = 0

    def start(self, core_seed: int, display_seed: int) -> None:
        """Start a game. Raises EnvironmentFault."""
        self.terminal.start(core_seed, display_seed)
        self._memories.clear()
        self._peaceful.clear()
        self._prayed_at = _FIRST_PRAYER_TURN - _PRAYER_TURNS
        self.score, self.depth = 0, 1
        self._look()

    @property
    def over(self) -> bool:
        return self.terminal.over

    @property
    def status(self) -> Any:
        return self.terminal.status

    @property
    def turns_to_prayer(self) -> int:
        return max(0, self._prayed_at + _PRAYER_TURNS - int(self.status[TURN]))

    def close(self) -> None:
        self.terminal.close()

    # -- seeing ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the map and the status line."""
        status = self.status
        self.score = max(self.score, int(status[SCORE]))
        self.depth = max(self.depth, int(status[DEPTH]))
        self._at = int(status[X]), int(status[Y])
        self._hero = sq.square(*self._at)
        self._seen = LevelMap(self.terminal.glyphs, self._hero)
        self._memory = self._memories[int(status[DUNGEON]), int(status[LEVEL])]
        self._memory.update(self._seen, self._hero)
        self._hostile = self._find_hostile()
        self._walkable = self._seen.walkable & ~self._memory.blocked & ~self._memory.locked
        self._frontier = self._find_frontier()
        self.situation = self._describe()

    def _find_hostile(self) -> int:
        if not self._peaceful:
            return self._seen.monsters
        (peaceful,) = sq.squares_where(np.isin(self.terminal.glyphs, list(self._peaceful))[None])
        return self._seen.monsters & ~peaceful

    def _find_frontier(self) -> int:
        """Squares not yet visited from which something new may be seen, and gold."""
        seen, memory = self._seen, self._memory
        beside_unknown = sq.around(seen.unknown) & self._walkable & ~memory.visited
        return (beside_unknown | (seen.gold & self._walkable)) & ~self._hero

    def _describe(self) -> Situation:
        status, memory = self.status, self._memory
        groups = (memory.down, memory.up, self._frontier, self._hostile)
        down, up, frontier, monster = sq.distances(self._hero, groups, self._walkable, self._seen.doors)
        beside = tuple(monster_of_glyph(glyph) for _, glyph in self._monsters_beside())
        in_view = [monster_of_glyph(int(glyph)) for glyph in self._glyphs_of(self._hostile)]
        hp = int(status[HP]) / max(1, int(status[HP_MAX]))
        hungry, turn = int(status[HUNGER]), int(status[TURN])
        in_trouble = hp < 1 / 7 or int(status[HP]) < 6 or hungry >= _WEAK
        allowed = [True] * len(Order)
        allowed[Order.DESCEND] = down is not None
        near = monster is not None and monster <= _NEAR
        allowed[Order.ASCEND] = up is not None and int(status[DEPTH]) > 1 and bool(in_view)
        allowed[Order.FIGHT] = near or bool(beside)
        allowed[Order.RETREAT] = near or bool(beside)
        allowed[Order.REST] = hp < 1.0 or frontier is None
        allowed[Order.PRAY] = in_trouble and turn >= self._prayed_at + _PRAYER_TURNS
        allowed[Order.EAT] = hungry >= _HUNGRY and self._food() is not None
        strongest = max(in_view, key=lambda one: one.level, default=None)
        return Situation(
            hp, int(status[DEPTH]), down, up, frontier, monster, beside, len(in_view), strongest,
            sq.count(memory.visited), sum(memory.searched.values()), tuple(allowed),
        )  # fmt: skip

    def _glyphs_of(self, squares: int) -> list[int]:
        glyphs, found = self.terminal.glyphs, []
        while squares:
            lowest = squares & -squares
            y, x = divmod(lowest.bit_length() - 1, sq.COLUMNS + 1)
            found.append(int(glyphs[y, x]))
            squares ^= lowest
        return found

    def _monsters_beside(self) -> list[tuple[int, int]]:
        """(direction, glyph) of monsters on neighbouring squares that may be hostile."""
        if not sq.around(self._hero) & self._hostile:
            return []
        x, y = self._at
        found = []
        for direction, (dx, dy) in enumerate(sq.DIRECTIONS):
            if sq.neighbour(self._hero, direction) & self._hostile:
                found.append((direction, int(self.terminal.glyphs[y + dy, x + dx])))
        return found

    def _food(self) -> int | None:
        """Letter of something to eat."""
        found = np.flatnonzero(self.terminal.item_classes == _FOOD_CLASS)
        return int(self.terminal.item_letters[found[0]]) if len(found) else None

    # -- orders ---------------------------------------------------------------------------------------------------------

    def give(self, order: Order) -> None:
        """Carry out an order; one that is not allowed becomes a rest. Raises EnvironmentFault."""
        if not self.situation.allowed[order]:
            order = Order.REST
        match order:
            case Order.EXPLORE:
                self._explore()
            case Order.DESCEND:
                self._take_stairs(self._memory.down, _DOWN)
            case Order.ASCEND:
                self._take_stairs(self._memory.up, _UP)
            case Order.FIGHT:
                self._fight()
            case Order.RETREAT:
                self._retreat()
            case Order.REST:
                self._rest()
            case Order.PRAY:
                self._prayed_at = int(self.status[TURN])
                self.terminal.send((_PRAY,), {b"sure you want to pray": _YES})
            case Order.EAT:
                self._eat()
        if not self.over:
            self._look()

    def _explore(self) -> None:
        if self._frontier:
            step = sq.first_step(self._hero, self._frontier, self._walkable, self._seen.doors)
            if step is not None:
                self._walk(step.direction)
                return
        for target in (self._locked_door_sides(), self._unsearched_squares()):
            if target & self._hero:
                self._kick_or_search()
                return
            step = sq.first_step(self._hero, target, self._walkable, self._seen.doors)
            if step is not None:
                self._walk(step.direction)
                return
        if self._push_boulder():
            return
        self._kick_or_search()

    def _locked_door_sides(self) -> int:
        """Squares from which a locked door can be kicked."""
        locked = self._memory.locked
        sides = 0
        for direction in range(sq.STRAIGHT):
            sides |= sq.neighbour(locked, direction)
        return sides & self._walkable & ~self._seen.doors

    def _unsearched_squares(self) -> int:
        """Visited squares with the fewest searches, dead ends first, then those beside a wall."""
        enough = 0
        for one, turns in self._memory.searched.items():
            if turns >= _SEARCH_ENOUGH:
                enough |= sq.around(one)
        visited = self._memory.visited & self._walkable
        ends = self._dead_ends(visited) & ~enough
        return ends or (sq.around(self._seen.walls) & self._walkable & ~enough)

    def _dead_ends(self, visited: int) -> int:
        """Squares with at most one walkable neighbour."""
        once = twice = 0
        for direction in range(len(sq.DIRECTIONS)):
            beside = sq.neighbour(self._walkable, direction)
            twice |= once & beside
            once |= beside
        return visited & ~twice

    def _push_boulder(self) -> bool:
        step = sq.first_step(self._hero, self._seen.boulders & ~self._memory.blocked, self._walkable, self._seen.doors)
        if step is not None:
            self._walk(step.direction)
        return step is not None

    def _kick_or_search(self) -> None:
        for direction in range(sq.STRAIGHT):
            if sq.neighbour(self._hero, direction) & self._memory.locked:
                self.terminal.send((_KICK,), {b"direction": _MOVES[direction]})
                return
        if sum(self._memory.searched.values()) > 40 * _SEARCH_ENOUGH:
            self._memory.searched.clear()
        self._rest()

    def _rest(self) -> None:
        self._memory.searched[self._hero] += _REST_TURNS
        self.terminal.send(_REST)

    def _take_stairs(self, stairs: int, key: int) -> None:
        if stairs & self._hero:
            before = int(self.status[DUNGEON]), int(self.status[LEVEL])
            self.terminal.send((key,))
            if not self.over and (int(self.status[DUNGEON]), int(self.status[LEVEL])) == before:
                self._memory.down &= ~self._hero  # a trap door that is gone, or stairs that were an illusion
                self._memory.up &= ~self._hero
            return
        step = sq.first_step(self._hero, stairs, self._walkable, self._seen.doors)
        assert step is not None
        self._walk(step.direction)

    def _fight(self) -> None:
        beside = self._monsters_beside()
        if beside:
            direction, glyph = min(
                beside, key=lambda one: (monster_of_glyph(one[1]).untouchable, -monster_of_glyph(one[1]).level)
            )
            message = self.terminal.send((_FIGHT, _MOVES[direction]), {b"Really attack": ESCAPE})
            self._note_peaceful(message, glyph)
            return
        step = sq.first_step(self._hero, self._hostile, self._walkable, self._seen.doors)
        assert step is not None
        self._walk(step.direction)

    def _retreat(self) -> None:
        """Step to the neighbour with the longest path to the nearest monster."""
        best, farthest = None, -1
        for direction in range(len(sq.DIRECTIONS)):
            target = sq.neighbour(self._hero, direction)
            if not target & self._walkable or (direction >= sq.STRAIGHT and (target | self._hero) & self._seen.doors):
                continue
            (distance,) = sq.distances(target, (self._hostile,), self._walkable, self._seen.doors)
            if (distance or _FAR) > farthest:
                best, farthest = direction, distance or _FAR
        if best is None:
            self._rest()
        else:
            self._walk(best)

    def _eat(self) -> None:
        letter = self._food()
        assert letter is not None
        answers: Answers = {b"eat it": _NO, b"eat one": _NO, b"want to eat": letter}
        self.terminal.send((_EAT,), answers)

    def _walk(self, direction: int) -> None:
        """One step, which may open a door, swap places with a pet or attack what is unseen."""
        target = sq.neighbour(self._hero, direction)
        before = self._at, int(self.status[DUNGEON]), int(self.status[LEVEL])
        x, y = self._at
        dx, dy = sq.DIRECTIONS[direction]
        glyph = int(self.terminal.glyphs[y + dy, x + dx])
        message = self.terminal.send((_MOVES[direction],), {b"Really attack": ESCAPE})
        self._note_peaceful(message, glyph)
        if self.over:
            return
        if b"door is locked" in message:
            self._memory.locked |= target
        elif (self._position(), int(self.status[DUNGEON]), int(self.status[LEVEL])) == before:
            self._memory.count_failure(target)

    def _note_peaceful(self, message: bytes, glyph: int) -> None:
        if b"Really attack" in message:
            self._peaceful.add(glyph)

    def _position(self) -> tuple[int, int]:
        return int(self.status[X]), int(self.status[Y])


_UNTOUCHABLE: Final = frozenset({"floating eye", "cockatrice", "chickatrice", "blue jelly", "acid blob", "green slime"})
_UNKNOWN_MONSTER: Final = Monster("unknown", 1, 12, untouchable=False)


@cache
def monster_of_glyph(glyph: int) -> Monster:
    from nle import nethack

    if not nethack.glyph_is_monster(glyph):
        return _UNKNOWN_MONSTER
    kind = nethack.permonst(nethack.glyph_to_mon(glyph))
    return Monster(kind.mname, kind.mlevel, kind.mmove, kind.mname in _UNTOUCHABLE)
