"""A walk on a line with forbidden moves; and workers that want decisions at different times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.unity_player.messages import Action, AgentInfo, Behaviour, Sensor
from tests.unity_player.scenes.area import World

LENGTH = 7
STAY, LEFT, RIGHT = 0, 1, 2
SLOW, FAST = 0, 1
LIMIT = 50  # decisions
STEP_COST, GOAL = -0.01, 1.0


class Walk:
    """Walk to the right end. Two branches: direction and pace. Walls are masked; next to the goal, running is, too.

    A forbidden action ends the player: Python must never choose one.
    """

    behaviours = (Behaviour("Walk?team=0", branches=(3, 2)),)
    sensor = Sensor("Place", (LENGTH,), properties=(1,))

    def __init__(self, world: World) -> None:
        self._world, self._id = world, world.new_id()
        self.reset()

    def reset(self) -> None:
        self._place, self._decisions, self._reward = self._world.random.randrange(LENGTH - 1), 0, 0.0

    def _mask(self) -> tuple[bool, ...]:
        return (False, self._place == 0, False, False, self._place == LENGTH - 2)

    def _info(self, *, done: bool = False, interrupted: bool = False) -> AgentInfo:
        seen = [float(place == self._place) for place in range(LENGTH)]
        return AgentInfo(self._id, (self.sensor.floats(seen),), self._reward, done, interrupted, mask=self._mask())

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        yield self.behaviours[0].name, self._info()

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        direction, pace = actions[self._id].discrete
        mask = self._mask()
        if mask[direction] or mask[3 + pace]:
            raise ValueError(f"forbidden action {direction, pace} at {self._place}")
        way = {STAY: 0, LEFT: -1, RIGHT: 1}[direction] * (2 if pace == FAST else 1)
        self._place = min(LENGTH - 1, max(0, self._place + way))
        self._decisions += 1
        arrived = self._place == LENGTH - 1
        self._reward = GOAL if arrived else STEP_COST
        if not arrived and self._decisions < LIMIT:
            return ()
        last = self._info(done=True, interrupted=not arrived)
        self._id = self._world.new_id()
        self.reset()
        return ((self.behaviours[0].name, last),)


class Shifts:
    """Three agents; the first wants a decision at every step, the others at every second and third one.

    The observation is the number of the own decisions. The reward is the number of steps since the last decision, plus the action.
    """

    behaviours = (Behaviour("Worker?team=0", branches=(2,)),)
    sensor = Sensor("Count", (1,), properties=(1,))
    PERIODS = (1, 2, 3)
    DECISIONS = 20

    def __init__(self, world: World) -> None:
        self._world = world
        self._ids = [world.new_id() for _ in self.PERIODS]
        self.reset()

    def reset(self) -> None:
        self._step = 0
        self._counts = [0] * len(self.PERIODS)
        self._rewards = [0.0] * len(self.PERIODS)

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        for worker, period in enumerate(self.PERIODS):
            if self._step % period == 0:
                yield self.behaviours[0].name, self._info(worker)
                self._rewards[worker] = 0.0

    def _info(self, worker: int, *, done: bool = False) -> AgentInfo:
        seen = (float(self._counts[worker]),)
        return AgentInfo(self._ids[worker], (self.sensor.floats(seen),), self._rewards[worker], done)

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        finished = []
        self._step += 1
        for worker in range(len(self.PERIODS)):
            self._rewards[worker] += 1.0
            if self._ids[worker] not in actions:
                continue
            self._rewards[worker] += actions[self._ids[worker]].discrete[0]
            self._counts[worker] += 1
            if self._counts[worker] == self.DECISIONS:
                finished.append((self.behaviours[0].name, self._info(worker, done=True)))
                self._ids[worker] = self._world.new_id()
                self._counts[worker], self._rewards[worker] = 0, 0.0
        return finished
