"""Rocket League matches of one or two cars a side, all stepped by one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core.types import Bools, Floats, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.errors import ConfigError
from ludus.games.rocket_league import field
from ludus.games.rocket_league.controls import CONTROL_TABLE, GROUND_CONTROLS
from ludus.games.rocket_league.observations import observation_size, observe
from ludus.games.rocket_league.rewards import SHAPED, WEIGHT_NAMES, RewardWeights, reward
from ludus.games.rocket_league.simulator import BALL_POSITION, BALL_VELOCITY, Arenas, Placement

TEAM_NAMES: Final = ("blue", "orange")
MAX_TEAM_SIZE: Final = 3
TICK_SKIP: Final = 8
_CONTROLS: Final = {"all": len(CONTROL_TABLE), "ground": GROUND_CONTROLS}
"""Number of rows of the control table."""


class RocketLeagueEnv(VectorMultiAgentEnv):
    """Agents drive cars and push a ball into the goal of the other team. After a goal the match goes on from a new kickoff.

    `seconds`: length of a match. `reward`: `goals` counts 1 for a goal and -1 for one conceded; `shaped` helps to learn; a mapping sets
    the weights of `RewardWeights`. `controls`: `all`, or `ground` for cars that drive and do not jump or fly. `kickoffs`: share of the
    phases of play that start with a kickoff; the others start with cars and ball at random places. An agent observes its own car, the ball, goals, boost pads and the other cars, and chooses a row of the control table
    for the next 8 ticks of 1/120 s.
    """

    def __init__(
        self,
        num_envs: int = 1,
        team_size: int = 1,
        seconds: float = 30.0,
        reward: str | Mapping[str, float] = "goals",
        controls: str = "all",
        kickoffs: float = 1.0,
        render_mode: str | None = None,
    ) -> None:
        name = f"ludus/RocketLeague-{team_size}v{team_size}-v0"
        if not 1 <= team_size <= MAX_TEAM_SIZE:
            raise ConfigError(f"ludus/RocketLeague has no team_size {team_size!r}.", f"Use 1 to {MAX_TEAM_SIZE}.")
        if not (math.isfinite(seconds) and seconds >= 1):
            raise ConfigError(f"{name}: seconds is {seconds!r}.", "Give a length of at least 1.")
        if not 0 <= kickoffs <= 1:
            raise ConfigError(f"{name}: kickoffs is {kickoffs!r}.", "Give a share from 0 to 1.")
        if controls not in _CONTROLS:
            raise ConfigError(f"{name} has no controls {controls!r}.", f"Use {' or '.join(_CONTROLS)}.")
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"{name} has no render_mode {render_mode!r}.", "It renders rgb_array.")
        self._weights = reward_weights(reward, name)
        self.num_envs, self._team_size, self._kickoffs = num_envs, team_size, kickoffs
        self._steps_per_match = round(seconds * field.TICKS_PER_SECOND / TICK_SKIP)
        self.possible_agents = tuple(f"{team}_{number}" for team in TEAM_NAMES for number in range(team_size))
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (observation_size(team_size),), np.float32)
        self.single_action_space = gym.spaces.Discrete(_CONTROLS[controls])
        self.metadata = {"name": name, "render_modes": ["rgb_array"], "render_fps": field.TICKS_PER_SECOND // TICK_SKIP}
        self._arenas = Arenas(num_envs, team_size)
        self._random = [np.random.default_rng(0) for _ in range(num_envs)]
        self._steps: Ints = np.zeros(num_envs, np.int64)
        self.goals: Ints = np.zeros((num_envs, 2), np.int64)
        """[N, team] of the current match."""
        self._renderer: Any = None

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        for number, seed in zip(matches.tolist(), seeds.tolist(), strict=True):
            self._random[number] = np.random.default_rng(seed)
            self._arenas.create(number)
            self._start_phase(number)
        self._steps[matches] = 0
        self.goals[matches] = 0
        return self._result(np.zeros((self.num_envs, 2 * self._team_size), np.float32))

    def step(self, actions: Ints, playing: Bools) -> VectorMultiAgentStep:
        before = self._arenas.ball[:, :, BALL_VELOCITY].copy()
        self._arenas.step(actions, playing, TICK_SKIP)
        self._steps[playing] += 1
        height: Floats = self._arenas.ball[:, 0, BALL_POSITION][:, 1]
        scored = playing & (np.abs(height) > field.GOAL_LINE_Y + field.BALL_RADIUS)
        goals = np.where(scored, np.sign(height), 0).astype(np.float32)
        self.goals[:, 0] += goals > 0
        self.goals[:, 1] += goals < 0
        earned = reward(self._arenas, before, goals, self._weights)
        for number in np.flatnonzero(scored & (self._steps < self._steps_per_match)).tolist():
            self._start_phase(number)
        return self._result(earned)

    def _result(self, earned: Floats) -> VectorMultiAgentStep:
        time_left = (1 - self._steps / self._steps_per_match).astype(np.float32)
        difference = (self.goals[:, 0] - self.goals[:, 1]).astype(np.float32)
        over = np.repeat((self._steps >= self._steps_per_match)[:, None], 2 * self._team_size, axis=1)
        return VectorMultiAgentStep(
            acting=~over,
            observation=observe(self._arenas, time_left, difference),
            reward=earned,
            terminated=over,
            truncated=np.zeros_like(over),
        )

    def _start_phase(self, number: int) -> None:
        random = self._random[number]
        start = kickoff if random.random() < self._kickoffs else random_start
        self._arenas.place(number, *start(self._team_size, random))

    def render(self) -> npt.NDArray[np.uint8]:
        """Match 0 from above; blue plays to the right."""
        if self._renderer is None:
            from ludus.games.rocket_league.renderer import TopDownRenderer

            self._renderer = TopDownRenderer(self._arenas.pad_positions(0))
        seconds = float(self._steps_per_match - self._steps[0]) * TICK_SKIP / field.TICKS_PER_SECOND
        picture: npt.NDArray[np.uint8] = self._renderer.draw(
            self._arenas.ball[0, 0], self._arenas.cars[0, :, 0], self._arenas.pads[0, 0], self.goals[0].tolist(), seconds
        )
        return picture


def rocket_league_1v1(num_envs: int = 1, **keywords: Any) -> RocketLeagueEnv:
    """`ludus/RocketLeague-1v1-v0`."""
    return RocketLeagueEnv(num_envs, 1, **keywords)


def rocket_league_2v2(num_envs: int = 1, **keywords: Any) -> RocketLeagueEnv:
    """`ludus/RocketLeague-2v2-v0`."""
    return RocketLeagueEnv(num_envs, 2, **keywords)


def reward_weights(given: str | Mapping[str, float], name: str) -> RewardWeights:
    """Raises ConfigError."""
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(WEIGHT_NAMES))
        if unknown:
            raise ConfigError(f"{name}: reward has no part {unknown[0]!r}.", f"It has {', '.join(WEIGHT_NAMES)}.")
        return RewardWeights(**{part: float(weight) for part, weight in given.items()})
    known = {"goals": RewardWeights(), "shaped": SHAPED}
    if given not in known:
        raise ConfigError(f"{name} has no reward {given!r}.", "Use goals, shaped, or a mapping of weights.")
    return known[given]


_KICKOFF_OFFSET = np.array([30.0, 30.0, 0.03])
"""Largest offset of a car from its kickoff place: x, y, yaw."""


# -- starts of a phase of play ------------------------------------------------------------------------------------------------


def kickoff(team_size: int, random: np.random.Generator) -> tuple[Placement, list[Placement]]:
    """The ball rests in the centre; both teams stand at the same drawn places, each car a little off so that few matches are alike."""
    places = [field.KICKOFFS[index] for index in random.permutation(len(field.KICKOFFS))[:team_size]]
    cars = []
    for turn in (1, -1):
        for x, y, yaw in places:
            off_x, off_y, off_yaw = random.uniform(-1.0, 1.0, 3) * _KICKOFF_OFFSET
            position = (turn * x + off_x, turn * y + off_y, field.CAR_REST_HEIGHT)
            cars.append(Placement(position, yaw=(yaw if turn == 1 else yaw - math.pi) + off_yaw))
    return Placement((0.0, 0.0, field.BALL_REST_HEIGHT)), cars


def random_start(team_size: int, random: np.random.Generator) -> tuple[Placement, list[Placement]]:
    """The ball rolls or flies anywhere; cars stand or drive on the ground not far from it, with any amount of boost."""
    wide, long = 0.8 * field.SIDE_WALL_X, 0.85 * field.BACK_WALL_Y
    x, y, z = random.uniform((-wide, -long, field.BALL_REST_HEIGHT), (wide, long, 800.0))
    flies = random.random() < 0.2
    velocity = random.uniform(-800.0, 800.0, 3)
    ball = Placement((x, y, z if flies else field.BALL_REST_HEIGHT), (velocity[0], velocity[1], velocity[2] if flies else 0.0))
    cars = []
    for _ in range(2 * team_size):
        distance, direction, yaw = random.uniform((400.0, -math.pi, -math.pi), (2500.0, math.pi, math.pi))
        car_x = min(max(x + distance * math.cos(direction), -wide), wide)
        car_y = min(max(y + distance * math.sin(direction), -long), long)
        speed = random.uniform(0.0, 1500.0)
        cars.append(
            Placement(
                (car_x, car_y, field.CAR_REST_HEIGHT),
                (speed * math.cos(yaw), speed * math.sin(yaw), 0.0),
                yaw,
                boost=float(random.uniform(0.0, 100.0)),
            )
        )
    return ball, cars
