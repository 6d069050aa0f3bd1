"""`ludus/NetHackOrders-v0`: NetHack as a Gymnasium environment with eight orders and a vector of features."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core.types import Floats
from ludus.games.nethack import adventure as game
from ludus.games.nethack.adventure import Adventure, Monster, Order, Situation
from ludus.games.nethack.script import SCRIPTS
from ludus.games.nethack.terminal import check_character

Bytes = npt.NDArray[np.uint8]
_FAR = 60.0
_MAX_SEED = 1 << 31


class NetHackOrders(gym.Env[Floats, Any]):
    """Observation: features of the situation in about 0 … 1. `infos["action_mask"]`: the orders that are possible.

    The reward is what the score of the status line gains: gold, four points per point of experience, 50 for each new depth. An episode
    ends with the hero; it is truncated after `max_orders`. Results of an episode: score, depth, experience level, turns.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012 - Gymnasium declares it so

    result_names = ("score", "depth", "experience_level", "turns")

    def __init__(
        self,
        character: str = "mon-hum-neu-mal",
        max_orders: int = 1500,
        reward_scale: float = 1.0,
        render_mode: str | None = None,
    ) -> None:
        """Raises MissingExtra, EnvironmentFault."""
        check_character(character)
        self.render_mode = render_mode
        self._adventure = Adventure(character)
        self._max_orders, self._reward_scale = max_orders, reward_scale
        self._orders = 0
        self.action_space = gym.spaces.Discrete(len(Order))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (FEATURES,), np.float32)

    @property
    def situation(self) -> Situation:
        return self._adventure.situation

    def script_action(self, name: str) -> int:
        """What a script would do now; `ludus.games.nethack.script` has them."""
        return int(SCRIPTS[name](self.situation))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        core, display = (int(one) for one in self.np_random.integers(_MAX_SEED, size=2))
        self._adventure.start(core, display)
        self._orders = 0
        return self._observe(), self._info()

    def step(self, action: Any) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        before = self._adventure.score
        self._adventure.give(Order(int(action)))
        self._orders += 1
        reward = (self._adventure.score - before) * self._reward_scale
        terminated = self._adventure.over
        truncated = not terminated and self._orders >= self._max_orders
        info = self._info()
        if terminated or truncated:
            info |= self._results()
        return self._observe(), reward, terminated, truncated, info

    def render(self) -> Bytes:
        """The screen of the terminal."""
        from ludus.games.nethack.screen import draw_screen

        return draw_screen(self._adventure.terminal.screen, self._adventure.terminal.colors)

    def close(self) -> None:
        self._adventure.close()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array(self.situation.allowed, np.int8)}

    def _results(self) -> dict[str, float]:
        status = self._last_status
        return {
            "score": float(self._adventure.score),
            "depth": float(self._adventure.depth),
            "experience_level": float(status[game.EXPERIENCE_LEVEL]),
            "turns": float(status[game.TURN]),
        }

    def _observe(self) -> Floats:
        if not self._adventure.over:  # the status line is empty after the end
            self._last_status = self._adventure.status.copy()
            self._last = features(self._adventure, self._orders / self._max_orders)
        return self._last


def features(adventure: Adventure, elapsed: float) -> Floats:
    """The situation as numbers; `elapsed`: share of the orders that have been given."""
    status, now = adventure.status, adventure.situation
    level = int(status[game.EXPERIENCE_LEVEL])
    hunger = int(status[game.HUNGER])
    return np.array(
        [
            now.hp,
            status[game.HP] / 50,
            status[game.HP_MAX] / 100,
            level / 10,
            (10 - status[game.ARMOR]) / 10,
            now.depth / 10,
            (level - now.depth) / 5,
            *(float(hunger == state) for state in range(1, 5)),
            adventure.turns_to_prayer / 1000,
            elapsed,
            int(status[game.TURN]) / 5000,
            *_closeness(now.down),
            *_closeness(now.up),
            *_closeness(now.frontier),
            *_closeness(now.monster),
            now.in_view / 5,
            len(now.beside) / 3,
            *_strength(max(now.beside, key=lambda one: one.level, default=None), level),
            *_strength(now.strongest, level),
            float(any(one.untouchable for one in now.beside)),
            float(all(one.untouchable for one in now.beside) and bool(now.beside)),
            now.explored / 300,
            now.searched / 300,
            *map(float, now.allowed),
        ],
        np.float32,
    )


def _closeness(distance: int | None) -> tuple[float, float, float]:
    """Whether there is a path, whether it is at most one step, and how short it is."""
    if distance is None:
        return 0.0, 0.0, 0.0
    return 1.0, float(distance <= 1), 1.0 - min(distance, _FAR) / _FAR


def _strength(monster: Monster | None, level: int) -> tuple[float, float, float]:
    if monster is None:
        return 0.0, 0.0, 0.0
    return monster.level / 10, (monster.level - level) / 5, monster.speed / 12


FEATURES = 46
