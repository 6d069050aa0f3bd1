"""Gymnasium environments of the Arena: a vector environment of many matches, and one hero of one match.

gymnasium.make_vec("ludus/Arena-1v1-v0", 64, opponent="medium")
ArenaVectorEnv(96, mode="3v3", opponent={"self": 0.6, "past": 0.2, "medium": 0.2}, whole=True)
gymnasium.make("ludus/Arena-1v1-v0", opponent=["easy", "hard"], side=0, lineup=[["mage"], ["tank"]])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.core.types import Bools, Floats, Ints, Ints32
from ludus.envs.opponents.opponent_mix import PAST, PAST_VERSION, RULE, SELF, assign_opponents, outcome_names
from ludus.errors import ConfigError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine.layout import CAMP_NAMES, TICKS_PER_SECOND
from ludus.games.arena.env.seats import (
    RANDOM,
    STATISTICS,
    ArenaOptions,
    Observation,
    Seats,
    action_space,
    observation_space,
    row_of,
)

Actions = npt.NDArray[np.integer]
RENDER_WIDTH: Final = 1280
_RENDER_MODES: Final = ("rgb_array",)


class ArenaVectorEnv(gym.vector.VectorEnv[Observation, Actions, Any]):
    """Vector environment whose rows play one hero each. A *group* is the rows of one camp of a match, as many as it has heroes.

    Against a bot every group has its own match; with `self` groups 2k and 2k + 1 play each other. Shares of bots, `self` and `past`
    are assigned to groups permanently. Rows that play for `past` follow the requested `num_envs` and are marked in `opponent_rows`;
    they are not trained on. Bots fill the rest of an incomplete group.

    After the end of a match the next step only starts a new one (next-step autoreset). Observations are new arrays.
    """

    only_training: Final = ("repeat", "states", "matchmaking")
    """Options that evaluations ignore."""
    self_play_keywords: Final[Mapping[str, Any]] = {"opponent": PAST, "side": RANDOM}
    """Options of training with `self_play.opponents`."""
    script_names: Final = BOTS
    """Bots that can play rows by `script_actions`."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        mode: str | int = 1,
        render_mode: str | None = None,
        render_width: int = RENDER_WIDTH,
        **keywords: Any,
    ) -> None:
        """Keywords: `ArenaOptions`. Raises ConfigError."""
        options = ArenaOptions(mode=mode, **keywords)
        size = options.size
        self.renderer = LazyRenderer(size, render_mode, render_width)
        self.metadata = metadata(options) | {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode
        self.kinds, learner_heroes, past_heroes = _assign_matches(num_envs, size, options.shares)
        """By match: `self`, `past`, or empty for a bot."""
        self.seats = Seats(options, learner_heroes, past_heroes)
        self.num_envs = self.seats.rows
        self.opponent_rows: Bools = np.arange(self.num_envs) >= num_envs
        self.match_of_row: Ints = self.seats.match_of
        self.group_rows = size
        complete = np.arange(self.num_envs) < num_envs // size * size
        self._reports: Bools = complete & (np.arange(self.num_envs) % size == 0)
        """Rows that report wins and losses: one of each complete group."""
        against = [kind.removeprefix(RULE) for kind in options.shares if kind != SELF]  # the same for any number of rows
        self.result_names = (
            *outcome_names(against),
            "seconds",
            *STATISTICS,
            *((PAST_VERSION,) if PAST in options.shares else ()),
        )
        """Names in `infos` of finished matches: wins and losses by opponent, length, and statistics of heroes."""
        self.single_observation_space = observation_space(size, whole=options.whole)
        self.single_action_space = action_space(size)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """`seed`: seed of the first match, incremented for the others; or one for each match."""
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
            result = self.seats.result()
            for name, values in result.items():
                infos[name], infos[f"_{name}"] = np.where(ended, values, 0), ended
            infos |= self._match_results(result, ended)
        if len(over):
            self.seats.begin(over)
        return self.seats.observe(), reward, terminated, truncated, infos

    def script_actions(self, rows: Ints, scripts: Sequence[str]) -> Actions:
        """Return what bots would do now in these rows, [len(rows), 4]. `scripts`: a name of `script_names` by row."""
        return self.seats.bot_actions(rows, [BOTS.index(name) for name in scripts])

    def set_timesteps(self, timesteps: int) -> None:
        """Set the timesteps of training, for reward schedules."""
        self.seats.set_timesteps(timesteps)

    def _match_results(self, result: Mapping[str, npt.NDArray[Any]], ended: Bools) -> dict[str, Any]:
        """Return `infos` of finished matches by opponent. Matches against `self` are not counted."""
        matches = self.seats.match_of
        against = np.array([kind or BOTS[int(bot)] for kind, bot in zip(self.kinds, self.seats.bot_of, strict=True)])
        fields = {"seconds": result["ticks"] / TICKS_PER_SECOND, "_seconds": ended}
        for name in (name for name in self.result_names if "/" in name):
            how, _, who = name.partition("/")
            fields[name] = (result["won"] == (1 if how == "win" else -1)).astype(np.float32)
            fields[f"_{name}"] = ended & self._reports & (against[matches] == who)
        if PAST_VERSION in self.result_names:
            fields[PAST_VERSION], fields[f"_{PAST_VERSION}"] = (
                np.zeros(self.num_envs),
                ended & self._reports & (against[matches] == PAST),
            )
        return fields

    def render(self) -> tuple[Any, ...] | None:
        """Return a frame of the match of every row."""
        if self.render_mode is None:
            return None
        arena = self.seats.arena
        frames = [self.renderer.rgb(arena.units[m], arena.match[m]) for m in range(arena.matches)]
        return tuple(frames[m] for m in self.seats.match_of)


def _assign_matches(rows: int, size: int, shares: Mapping[str, float]) -> tuple[list[str], list[range], list[range]]:
    """Return for each match the kind of its opponent (empty: a bot), the learner's heroes and the heroes of `past`."""
    by_bot = sum(share for kind, share in shares.items() if kind.startswith(RULE))
    by_kind = {
        SELF: shares.get(SELF, 0.0),
        PAST: shares.get(PAST, 0.0),
        "": by_bot,
    }  # `self` first: its groups are pairs
    dealt = assign_opponents(rows // size, by_kind, stand_in="")
    matches = [kind for i, kind in enumerate(dealt) if kind != SELF or i % 2 == 0]
    learner_heroes = [range(2 * size if kind == SELF else size) for kind in matches]
    past_heroes = [range(size, 2 * size) if kind == PAST else range(0) for kind in matches]
    if rows % size:
        matches, learner_heroes, past_heroes = [*matches, ""], [*learner_heroes, range(rows % size)], [*past_heroes, range(0)]
    return matches, learner_heroes, past_heroes


class ArenaEnv(gym.Env[Observation, Actions]):
    """One hero of one match."""

    metadata = {"render_modes": list(_RENDER_MODES), "render_fps": TICKS_PER_SECOND // 3}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, *, render_mode: str | None = None, render_width: int = RENDER_WIDTH, **keywords: Any) -> None:
        """Keywords: `ArenaOptions` without `mode`. Raises ConfigError."""
        options = ArenaOptions(mode=1, **keywords)
        if any(not kind.startswith(RULE) for kind in options.shares):
            raise ConfigError(
                f"A single match of one hero has the opponent {options.opponent!r}.",
                "Name scripts only; `self` and `past` need the vector environment.",
            )
        self.renderer = LazyRenderer(1, render_mode, render_width)
        self.metadata, self.render_mode = metadata(options), render_mode
        self.seats = Seats(options, [(0,)])
        self.observation_space, self.action_space = observation_space(1, whole=options.whole), action_space(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.seats.seed([seed])
        self.seats.begin()
        return self._observe(), self._info()

    def step(self, action: Actions) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated = self.seats.step(np.asarray(action)[None])
        return self._observe(), float(reward[0]), bool(terminated[0]), bool(truncated[0]), self._info()

    def render(self) -> Any:
        arena = self.seats.arena
        return None if self.render_mode is None else self.renderer.rgb(arena.units[0], arena.match[0])

    def _observe(self) -> Observation:
        observation: Observation = row_of(self.seats.observe(), 0)
        return observation

    def _info(self) -> dict[str, Any]:
        return {name: int(values[0]) for name, values in self.seats.result().items()}


def metadata(options: ArenaOptions) -> dict[str, Any]:
    return {"render_modes": list(_RENDER_MODES), "render_fps": max(1, TICKS_PER_SECOND // options.every)}


class LazyRenderer:
    """Renders matches of `size` against `size`. Imports Pillow and creates the `Renderer` on first use."""

    def __init__(self, size: int, render_mode: str | None, width: int) -> None:
        if render_mode is not None and render_mode not in _RENDER_MODES:
            raise ConfigError(f"The Arena has no render_mode {render_mode!r}.", f"It has {', '.join(_RENDER_MODES)}.")
        self._size, self._width = size, width
        self._renderer: Any = None

    def rgb(self, units: Ints32, match: Ints32) -> Any:
        """uint8 [height, width, 3]."""
        if self._renderer is None:
            from ludus.games.arena.render.renderer import Renderer

            first, second = (name.capitalize() for name in CAMP_NAMES)
            self._renderer = Renderer(self._size, self._width, names=(first, second))
        return self._renderer.rgb(units, match)
