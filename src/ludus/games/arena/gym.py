"""One against one as Gymnasium environments: many matches stepped together, or a single one.

gymnasium.make_vec("ludus/Arena-1v1-v0", 64, opponent="medium")
gymnasium.make("ludus/Arena-1v1-v0", opponent=["easy", "hard"], side=0, lineup=[["mage"], ["tank"]])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.errors import ConfigError
from ludus.games.arena.layout import TICKS_PER_SECOND
from ludus.games.arena.seats import CAMPS, Observation, Options, Seats, action_space, observation_space, row_of
from ludus.types import Bools, Floats, Ints32

Actions = npt.NDArray[np.integer]
RENDER_WIDTH: Final = 1280
_RENDER_MODES: Final = ("rgb_array",)


class ArenaVectorEnv(gym.vector.VectorEnv[Observation, Actions, Any]):
    """`num_envs` rows, each of which plays one hero of a match of its own; with `opponent: self` rows 2k and 2k + 1 play each other.

    After the end of a match the next step only begins a new one (next-step autoreset). Observations are arrays of their own.
    """

    def __init__(
        self, num_envs: int = 1, *, render_mode: str | None = None, render_width: int = RENDER_WIDTH, **keywords: Any
    ) -> None:
        """Keywords: `Options`, but for its mode. Raises ConfigError."""
        options = Options(mode=1, **keywords)
        self.pictures = Pictures(1, render_mode, render_width)
        self.metadata = metadata(options) | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.render_mode = num_envs, render_mode
        pairs = [(0, 1)] * (num_envs // 2) + [(0,)] * (num_envs % 2)
        self.seats = Seats(options, pairs if options.against_self else [(0,)] * num_envs)
        self.single_observation_space, self.single_action_space = observation_space(1), action_space(1)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """`seed`: of the first match, the others follow; or one for each match."""
        matches = self.seats.arena.matches
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + m for m in range(matches)]
        if len(seed) != matches:
            raise ConfigError(f"{len(seed)} seeds for {matches} matches.", "One for each.")
        self.seats.seed(seed)
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
        pictures = [self.pictures.of(arena.units[m], arena.match[m]) for m in range(arena.matches)]
        return tuple(pictures[m] for m in self.seats.match_of)


class ArenaEnv(gym.Env[Observation, Actions]):
    """One hero of one match."""

    metadata = {"render_modes": list(_RENDER_MODES), "render_fps": TICKS_PER_SECOND // 3}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, *, render_mode: str | None = None, render_width: int = RENDER_WIDTH, **keywords: Any) -> None:
        """Keywords: `Options`, but for its mode. Raises ConfigError."""
        options = Options(mode=1, **keywords)
        self.pictures = Pictures(1, render_mode, render_width)
        self.metadata, self.render_mode = metadata(options), render_mode
        self.seats = Seats(options, [(0,)])
        self.observation_space, self.action_space = observation_space(1), action_space(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.seats.seed([seed])
        self.seats.begin()
        return self._seen(), self._info()

    def step(self, action: Actions) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self.seats.step(np.asarray(action)[None])
        return self._seen(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._info()

    def render(self) -> Any:
        arena = self.seats.arena
        return None if self.render_mode is None else self.pictures.of(arena.units[0], arena.match[0])

    def _seen(self) -> Observation:
        return row_of(self.seats.observe(), 0)

    def _info(self) -> dict[str, Any]:
        return {name: int(values[0]) for name, values in self.seats.result().items()}


def metadata(options: Options) -> dict[str, Any]:
    return {"render_modes": list(_RENDER_MODES), "render_fps": max(1, TICKS_PER_SECOND // options.every)}


class Pictures:
    """Of matches of `size` against `size`. The painter is made for the first: it brings Pillow, which only pictures need."""

    def __init__(self, size: int, render_mode: str | None, width: int) -> None:
        if render_mode is not None and render_mode not in _RENDER_MODES:
            raise ConfigError(f"The Arena has no render_mode {render_mode!r}.", f"It has {', '.join(_RENDER_MODES)}.")
        self._size, self._width = size, width
        self._painter: Any = None

    def of(self, units: Ints32, match: Ints32) -> Any:
        """uint8 [height, width, 3]."""
        if self._painter is None:
            from ludus.games.arena.picture import Painter

            first, second = (name.capitalize() for name in CAMPS)
            self._painter = Painter(self._size, self._width, names=(first, second))
        return self._painter.rgb(units, match)
