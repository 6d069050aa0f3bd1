"""`ludus/DoomDuel-v0`: duels in ViZDoom's `multi_duel` as an environment with two agents, for self-play."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core import plugins
from ludus.core.types import Bools, Floats, Ints
from ludus.envs.faults import close_quietly
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.errors import ConfigError
from ludus.games.doom.engine import PRESSES, TICS_PER_S, PlayerView
from ludus.games.doom.match import DuelMatch

ENV_NAME: Final = "ludus/DoomDuel-v0"
_ROCKETS: Final = 4
_FEATURES: Final = 10 + 3 * _ROCKETS
_FRAMES: Final = 2
_ZOOM: Final = 3


class DoomDuelEnv(VectorMultiAgentEnv):
    """Both agents act at the same time: stand, left or right, each with or without firing a rocket.

    The observation is what the agent's own screen shows, as ViZDoom's labels name it, now and at the last decision: where the enemy and
    the nearest rockets are; and its own health, ammunition, readiness, position and speed to the side. The reward is the change of (own
    frags − enemy frags), plus `damage_reward` per point of damage dealt, minus the same per point taken; so it is zero-sum. A match lasts
    `seconds` of game time; the rockets of a player last for about as long. Every match has two engines, which start with the first match and
    stay.
    """

    metadata: Mapping[str, Any] = {"name": ENV_NAME, "render_modes": ["rgb_array"], "render_fps": 9}
    possible_agents = ("camp_0", "camp_1")
    single_observation_space = gym.spaces.Box(-np.inf, np.inf, (_FRAMES * _FEATURES,), np.float32)
    single_action_space = gym.spaces.Discrete(len(PRESSES))

    def __init__(
        self,
        num_envs: int = 1,
        seconds: float = 15.0,
        frame_skip: int = 4,
        damage_reward: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        """Raises MissingExtra, ConfigError."""
        plugins.require("vizdoom", "doom", ENV_NAME)
        self._decisions = round(seconds * TICS_PER_S / frame_skip) if frame_skip > 0 else 0
        if self._decisions < 1:
            raise ConfigError(
                f"{ENV_NAME} cannot play {seconds} s with a frame skip of {frame_skip}.", "A match has at least one decision."
            )
        self.num_envs = num_envs
        self._frame_skip, self._damage_reward = frame_skip, damage_reward
        self._matches: list[DuelMatch] = []
        self.views: list[list[PlayerView]] = [[] for _ in range(num_envs)]
        """By match and camp."""
        self._scores = np.zeros(num_envs)
        self._made: Ints = np.zeros(num_envs, np.int64)
        shape = (num_envs, 2)
        self._result = VectorMultiAgentStep(
            acting=np.ones(shape, np.bool_),
            observation=np.zeros((*shape, _FRAMES * _FEATURES), np.float32),
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
        )

    @property
    def frags(self) -> Ints:
        """[matches, 2] of the matches now."""
        return np.array([views[0].frags for views in self.views], np.int64)

    @property
    def observation(self) -> Floats:
        """[matches, 2, features] now."""
        found: Floats = self._result.observation
        return found

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        """Raises WorkerFailed."""
        if not self._matches:
            self._start(int(seeds[0]))
        begun = [self._matches[match].begin_restart(int(seed)) for match, seed in zip(matches, seeds, strict=True)]
        for match, waiting in zip(matches.tolist(), begun, strict=True):
            self.views[match] = self._matches[match].finish(waiting)
            self._observe(match, first=True)
            self._scores[match] = self._score(self.views[match])  # the engines go on counting damage
        self._made[matches] = 0
        self._result.acting[matches] = True
        self._result.terminated[matches] = False
        return self._result

    def step(self, actions: Ints, playing: Bools) -> VectorMultiAgentStep:
        """Raises WorkerFailed."""
        matches, result = np.flatnonzero(playing), self._result
        begun = [self._matches[match].begin_decision(actions[match].tolist(), self._frame_skip) for match in matches]
        for match, waiting in zip(matches.tolist(), begun, strict=True):
            self.views[match] = self._matches[match].finish(waiting)
            self._observe(match)
            score = self._score(self.views[match])
            gain = score - self._scores[match]
            result.reward[match] = gain, -gain
            self._scores[match] = score
        self._made[matches] += 1
        over = self._made[matches] >= self._decisions
        result.terminated[matches] = over[:, None]
        result.acting[matches] = ~over[:, None]
        return result

    def render(self) -> npt.NDArray[np.uint8]:
        """The screens of both players of match 0."""
        screens = [engine.screen for engine in self._matches[0].engines]
        line = np.full((screens[0].shape[0], 4, 1), 255, np.uint8)
        picture = np.concatenate([screens[0], line, screens[1]], axis=1)
        return np.repeat(np.repeat(np.repeat(picture, 3, axis=2), _ZOOM, axis=0), _ZOOM, axis=1)

    def close(self) -> None:
        for match in self._matches:
            close_quietly(match)
        self._matches = []

    def _start(self, seed: int) -> None:
        for number in range(self.num_envs):
            self._matches.append(DuelMatch(seed + number))
        starts: list[Sequence[Any]] = [match.begin_start() for match in self._matches]
        for match, begun in zip(self._matches, starts, strict=True):
            match.finish(begun)

    def _observe(self, match: int, *, first: bool = False) -> None:
        for camp, view in enumerate(self.views[match]):
            frames = self._result.observation[match, camp]
            now = features(view)
            frames[:_FEATURES] = now if first else frames[_FEATURES:]
            frames[_FEATURES:] = now

    def _score(self, views: list[PlayerView]) -> float:
        """Lead of camp 0."""
        first, second = views[0].frags
        return first - second + self._damage_reward * (views[0].damage - views[1].damage)


def features(view: PlayerView) -> Floats:
    """What a player sees and has."""
    health, ammunition, ready, x, y, speed_x, speed_y, angle = view.status
    side_x, side_y = math.sin(math.radians(angle)), -math.cos(math.radians(angle))  # to the right of where it looks
    rockets = [(1.0, at, 5.0 * width) for at, width in view.rockets[:_ROCKETS]]
    rockets += [(0.0, 0.0, 0.0)] * (_ROCKETS - len(rockets))
    enemy = view.enemy
    aim = 0.0 if enemy is None else enemy
    return np.array(
        [
            max(0.0, health) / 100,  # the dead have −999,900
            ammunition / 50,
            ready,
            float(view.dead),
            (x * side_x + y * side_y) / 200,
            (speed_x * side_x + speed_y * side_y) / 10,
            float(enemy is not None),
            aim,
            max(-1.0, min(1.0, 8 * aim)),  # finer near the middle
            len(view.rockets) / 5,
            *(value for rocket in rockets for value in rocket),
        ],
        np.float32,
    )
