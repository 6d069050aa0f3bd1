"""One against one as Gymnasium environments: many matches stepped together, or a single one.

gymnasium.make_vec("ludus/Arena-1v1-v0", 64, opponent="medium")
gymnasium.make("ludus/Arena-1v1-v0", opponent=["easy", "hard"], side=0, lineup=[["mage"], ["tank"]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.errors import ConfigError
from ludus.games.arena.layout import TICKS_PER_SECOND
from ludus.games.arena.seats import RANDOM, Observation, Options, Seats, action_space, observation_space, row_of
from ludus.games.arena.settings import SECONDS
from ludus.types import Bools, Floats

Actions = npt.NDArray[np.integer]
_RENDER_MODES = ("rgb_array",)


class ArenaVectorEnv(gym.vector.VectorEnv[Observation, Actions, Any]):
    """`num_envs` rows, each of which plays one hero of a match of its own; with `opponent: self` rows 2k and 2k + 1 play each other.

    After the end of a match the next step only begins a new one (next-step autoreset). Observations are arrays of their own.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        opponent: str | Sequence[str] = "easy",
        side: int | str = RANDOM,
        lineup: str | Sequence[Any] | None = None,
        seconds: int = SECONDS,
        every: int = 3,
        weights: Mapping[str, float] | None = None,
        sparse: bool = False,
        zero_sum: bool = True,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        options = Options(
            1, opponent, side, lineup, seconds, every, weights or {}, sparse, 0.0, zero_sum, max_episode_steps
        )  # fmt: skip
        check_render_mode(render_mode)
        self.metadata = {
            "render_modes": list(_RENDER_MODES),
            "render_fps": TICKS_PER_SECOND // every,
            "autoreset_mode": AutoresetMode.NEXT_STEP,
        }
        self.num_envs, self.render_mode = num_envs, render_mode
        pairs = [(0, 1)] * (num_envs // 2) + [(0,)] * (num_envs % 2)
        self.seats = Seats(options, pairs if options.against_self else [(0,)] * num_envs)
        self.single_observation_space, self.single_action_space = observation_space(1), action_space(1)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._painter: Any = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """`seed`: of the first match, the others follow; or one for each match."""
        matches = self.seats.arena.matches
        seeds = [None if seed is None else seed + m for m in range(matches)] if seed is None or isinstance(seed, int) else list(seed)
        if len(seeds) != matches:
            raise ConfigError(f"{len(seeds)} seeds for {matches} matches.", "One for each.")
        self.seats.seed(seeds)
        self.seats.begin()
        return self.seats.observe(), {}

    def step(self, actions: Actions) -> tuple[Observation, Floats, Bools, Bools, dict[str, Any]]:
        over = self.seats.over()
        reward, terminated, truncated = self.seats.step(actions)
        infos: dict[str, Any] = {}
        ended = terminated | truncated
        if ended.any():
            for name, values in self.seats.result().items():
                infos[name], infos[f"_{name}"] = np.where(ended, values, 0), ended
        if len(over):
            self.seats.begin(over)
        return self.seats.observe(), reward, terminated, truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        """A picture of every row's match."""
        if self.render_mode is None:
            return None
        arena = self.seats.arena
        self._painter = self._painter or painter(1)
        pictures = [self._painter.rgb(arena.units[m], arena.match[m]) for m in range(arena.matches)]
        return tuple(pictures[m] for m in self.seats.match_of)


class ArenaEnv(gym.Env[Observation, Actions]):
    """One hero of one match."""

    metadata = {"render_modes": list(_RENDER_MODES), "render_fps": TICKS_PER_SECOND // 3}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        *,
        opponent: str | Sequence[str] = "easy",
        side: int | str = RANDOM,
        lineup: str | Sequence[Any] | None = None,
        seconds: int = SECONDS,
        every: int = 3,
        weights: Mapping[str, float] | None = None,
        sparse: bool = False,
        zero_sum: bool = True,
        render_mode: str | None = None,
    ) -> None:
        check_render_mode(render_mode)
        self.metadata = {**type(self).metadata, "render_fps": TICKS_PER_SECOND // every}
        self.render_mode = render_mode
        options = Options(1, opponent, side, lineup, seconds, every, weights or {}, sparse, 0.0, zero_sum)
        self.seats = Seats(options, [(0,)])
        self.observation_space, self.action_space = observation_space(1), action_space(1)
        self._painter: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.seats.seed([seed])
        self.seats.begin()
        return self._seen(), self._info()

    def step(self, action: Actions) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self.seats.step(np.asarray(action)[None])
        return self._seen(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._info()

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        self._painter = self._painter or painter(1)
        return self._painter.rgb(self.seats.arena.units[0], self.seats.arena.match[0])

    def _seen(self) -> Observation:
        return row_of(self.seats.observe(), 0)

    def _info(self) -> dict[str, Any]:
        return {name: int(values[0]) for name, values in self.seats.result().items()}


def check_render_mode(render_mode: str | None) -> None:
    if render_mode is not None and render_mode not in _RENDER_MODES:
        raise ConfigError(f"The Arena has no render_mode {render_mode!r}.", f"It has {', '.join(_RENDER_MODES)}.")


def painter(size: int) -> Any:
    from ludus.games.arena.picture import Painter  # brings Pillow, which only pictures need

    return Painter(size)
