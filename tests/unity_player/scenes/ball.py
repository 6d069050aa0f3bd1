"""A ball on a platform: the agent tilts the platform so that the ball stays on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tests.unity_player.messages import Action, AgentInfo, Behaviour, Sensor
from tests.unity_player.scenes.area import World

NAME = "3DBall?team=0"
TICK_S = 0.02
TICKS = 5  # between two decisions
DECISIONS = 1000  # an episode at most
REWARD, FALL = 0.1, -1.0
GRAVITY = 9.81
ROLLING = 5 / 7  # share of the acceleration that moves a rolling sphere
TURN = math.radians(2.0)  # of a full action, per decision
STEEPEST = math.radians(25.0)
START_TILT = math.radians(10.0)
START_PLACE, EDGE = 1.5, 3.0
RADIUS = 0.5

SENSOR = Sensor("VectorSensor_size8", (8,), properties=(1,))


class Ball:
    """0.1 for each decision on the platform and -1 for the fall; 100 is the most. Parameter: `gravity`."""

    behaviours = (Behaviour(NAME, continuous=2),)

    def __init__(self, world: World) -> None:
        self._world, self._id = world, world.new_id()
        self.reset()

    def reset(self) -> None:
        draw = self._world.random.uniform
        self._tilt = [draw(-START_TILT, START_TILT), draw(-START_TILT, START_TILT)]
        self._place = [draw(-START_PLACE, START_PLACE), draw(-START_PLACE, START_PLACE)]
        self._speed = [0.0, 0.0]
        self._reward, self._decisions = 0.0, 0

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        yield NAME, self._info()

    def _info(self, *, done: bool = False, interrupted: bool = False) -> AgentInfo:
        (tilt_x, tilt_z), (x, z), (speed_x, speed_z) = self._tilt, self._place, self._speed
        height, climb = -math.sin(tilt_x) * x - math.sin(tilt_z) * z, -math.sin(tilt_x) * speed_x - math.sin(tilt_z) * speed_z
        seen = (math.sin(tilt_z / 2), math.sin(tilt_x / 2), x, height + RADIUS, z, speed_x, climb, speed_z)
        return AgentInfo(self._id, (SENSOR.floats(seen),), self._reward, done, interrupted)

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        turns = actions[self._id].continuous
        pull = GRAVITY * self._world.parameters.get("gravity", 1.0) * ROLLING
        on_platform = True
        for axis in (0, 1):
            turned = self._tilt[axis] + TURN * min(1.0, max(-1.0, turns[axis]))
            self._tilt[axis] = tilt = min(STEEPEST, max(-STEEPEST, turned))
            acceleration = pull * math.sin(tilt) * TICK_S
            place, speed = self._place[axis], self._speed[axis]
            for _ in range(TICKS):
                speed += acceleration
                place += speed * TICK_S
            self._place[axis], self._speed[axis] = place, speed
            on_platform = on_platform and abs(place) <= EDGE
        self._decisions += 1
        self._reward = REWARD if on_platform else FALL
        finished = not on_platform or self._decisions >= DECISIONS
        if not finished:
            return ()
        last = self._info(done=True, interrupted=on_platform)
        self._world.statistics.append(("Ball/Seconds", self._decisions * TICKS * TICK_S))
        self._id = self._world.new_id()
        self.reset()
        return ((NAME, last),)
