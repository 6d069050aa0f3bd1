"""Two teams of two players and a ball: rewards of groups, and players that are sent off and come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.unity_player.messages import Action, AgentInfo, Behaviour, Sensor
from tests.unity_player.scenes.area import World

TEAMS, PLAYERS = 2, 2
NAMES = tuple(f"Soccer?team={team}" for team in range(TEAMS))
LENGTH, WIDTH, GOAL = 1.0, 0.6, 0.25  # half sizes
LIMIT = 300  # decisions of a match
PUSH, FRICTION, BALL_FRICTION = 0.012, 0.8, 0.96
REACH = 0.09  # of a player's foot
OFF_FOR = 20  # decisions
TOUCH = 0.01  # reward of the player
SEEN = 16


class Soccer:
    """A goal is worth 1 for the group that shot it, less what it took in time, and -1 for the other.

    Branches: forwards and sideways, each still, plus or minus, from the view of the own team. With the parameter `send_off`, a player
    that is at the edge of the field for one decision is sent off: its episode ends, and it comes back with a new id.
    """

    behaviours = tuple(Behaviour(name, branches=(3, 3)) for name in NAMES)
    sensor = Sensor("Field", (SEEN,), properties=(1,))

    def __init__(self, world: World) -> None:
        self._world = world
        self._ids = [[world.new_id() for _ in range(PLAYERS)] for _ in NAMES]
        self._groups = [world.new_group() for _ in NAMES]
        self.reset()

    def reset(self) -> None:
        draw = self._world.random.uniform
        self._decisions = 0
        self._ball = [draw(-0.1, 0.1), draw(-0.3, 0.3), 0.0, 0.0]  # place and speed
        self._players = [[[side * draw(0.3, 0.8), draw(-0.5, 0.5), 0.0, 0.0] for _ in range(PLAYERS)] for side in (-1.0, 1.0)]
        self._rewards = [[0.0] * PLAYERS for _ in NAMES]
        self._group_rewards = [0.0] * TEAMS
        self._off = [[0] * PLAYERS for _ in NAMES]

    def infos(self) -> Iterable[tuple[str, AgentInfo]]:
        for team, name in enumerate(NAMES):
            for player in range(PLAYERS):
                if not self._off[team][player]:
                    yield name, self._info(team, player)
        self._rewards = [[0.0] * PLAYERS for _ in NAMES]
        self._group_rewards = [0.0] * TEAMS

    def _info(self, team: int, player: int, *, done: bool = False, interrupted: bool = False) -> AgentInfo:
        return AgentInfo(
            self._ids[team][player],
            (self.sensor.floats(self._seen_by(team, player)),),
            self._rewards[team][player],
            done,
            interrupted,
            group=self._groups[team],
            group_reward=self._group_rewards[team],
        )

    def _seen_by(self, team: int, player: int) -> list[float]:
        side = 1.0 if team == 0 else -1.0
        x, y, speed_x, speed_y = self._players[team][player]
        ball_x, ball_y, ball_speed_x, ball_speed_y = self._ball
        seen = [x * side, y * side, speed_x * side, speed_y * side]
        seen += [(ball_x - x) * side, (ball_y - y) * side, ball_speed_x * side, ball_speed_y * side]
        for one in (team, 1 - team):
            for other in range(PLAYERS):
                if (one, other) != (team, player):
                    there = self._players[one][other]
                    seen += [(there[0] - x) * side, (there[1] - y) * side]
        return [*seen, self._decisions / LIMIT, 1.0]

    def step(self, actions: Mapping[int, Action]) -> Iterable[tuple[str, AgentInfo]]:
        self._decisions += 1
        finished = []
        for team, name in enumerate(NAMES):
            side = 1.0 if team == 0 else -1.0
            for player in range(PLAYERS):
                if self._off[team][player]:
                    self._off[team][player] -= 1
                    continue
                at_edge = self._move(team, player, actions[self._ids[team][player]], side)
                if at_edge and self._world.parameters.get("send_off", 0.0):
                    finished.append((name, self._info(team, player, done=True)))
                    self._ids[team][player] = self._world.new_id()
                    self._off[team][player] = OFF_FOR
        scored = self._move_ball()
        if scored is None and self._decisions < LIMIT:
            return finished
        if scored is not None:
            self._group_rewards[scored] += 1.0 - 0.5 * self._decisions / LIMIT
            self._group_rewards[1 - scored] -= 1.0
            self._world.statistics.append(("Soccer/Decisions", float(self._decisions)))
        for team, name in enumerate(NAMES):
            for player in range(PLAYERS):
                if not self._off[team][player]:
                    finished.append((name, self._info(team, player, done=True, interrupted=scored is None)))
                    self._ids[team][player] = self._world.new_id()
        self.reset()
        return finished

    def _move(self, team: int, player: int, action: Action, side: float) -> bool:
        """Return whether the player is at the edge of the field."""
        forwards, sideways = action.discrete
        body = self._players[team][player]
        body[2] = FRICTION * body[2] + side * PUSH * (0.0, 1.0, -1.0)[forwards]
        body[3] = FRICTION * body[3] + side * PUSH * (0.0, 1.0, -1.0)[sideways]
        body[0] = min(LENGTH, max(-LENGTH, body[0] + body[2]))
        body[1] = min(WIDTH, max(-WIDTH, body[1] + body[3]))
        away_x, away_y = self._ball[0] - body[0], self._ball[1] - body[1]
        distance = (away_x * away_x + away_y * away_y) ** 0.5
        if distance < REACH:
            kick = 0.05 / max(distance, 0.01)
            self._ball[2], self._ball[3] = away_x * kick, away_y * kick
            self._rewards[team][player] += TOUCH
        return abs(body[0]) == LENGTH or abs(body[1]) == WIDTH

    def _move_ball(self) -> int | None:
        """Return the team that has scored."""
        x, y, speed_x, speed_y = self._ball
        x, y = x + speed_x, y + speed_y
        if abs(x) > LENGTH and abs(y) < GOAL:
            return 0 if x > 0 else 1
        if abs(x) > LENGTH:
            x, speed_x = min(LENGTH, max(-LENGTH, x)), -speed_x
        if abs(y) > WIDTH:
            y, speed_y = min(WIDTH, max(-WIDTH, y)), -speed_y
        self._ball = [x, y, BALL_FRICTION * speed_x, BALL_FRICTION * speed_y]
        return None
