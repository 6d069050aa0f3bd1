"""Connect Four in NumPy: all matches are stepped by one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.core.types import Bools, Floats, Ints
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.errors import ConfigError

ENV_NAME: Final = "ludus/ConnectFour-v0"
ROWS, COLUMNS, PLAYERS = 6, 7, 2
MAX_OPENING_MOVES = ROWS
"""With more, a move could fall on a full column or end the match."""
_EMPTY = 2
"""The plane of empty squares, after those of the players."""
_HEIGHT = ROWS + 1  # bits of a column; the top one stays empty, so that no line of four crosses from one column to the next
_DIRECTIONS: Final = tuple(np.uint64(step) for step in (1, _HEIGHT - 1, _HEIGHT, _HEIGHT + 1))
_CELL = 16  # pixels
_COLOURS: Final = np.array([[220, 60, 50], [240, 200, 40], [235, 235, 235]], np.uint8)  # of the players and of empty squares
_BOARD_COLOUR: Final = (40, 80, 160)


class ConnectFourEnv(VectorMultiAgentEnv):
    """Agents act in turn: they drop a stone into one of seven columns. Four stones in a row win 1 point from the other player.

    The observation has three planes of 6 × 7 squares, the lowest row first: stones of player 0, of player 1, empty squares, as in
    OpenSpiel's connect_four. `egocentric_obs_tensor`: the first plane has the stones of the other player, the second one those of the
    player who observes. `opening_moves`: a match begins after a random number of random moves, at most this many. Full columns are masked.
    """

    metadata: Mapping[str, Any] = {"name": ENV_NAME, "render_modes": ["rgb_array"], "render_fps": 2}
    possible_agents = ("player_0", "player_1")
    single_observation_space = gym.spaces.Box(0.0, 1.0, (PLAYERS + 1, ROWS, COLUMNS), np.float32)
    single_action_space = gym.spaces.Discrete(COLUMNS)

    def __init__(
        self, num_envs: int = 1, egocentric_obs_tensor: bool = False, opening_moves: int = 0, render_mode: str | None = None
    ) -> None:
        if not 0 <= opening_moves <= MAX_OPENING_MOVES:
            raise ConfigError(f"{ENV_NAME} has no opening_moves {opening_moves!r}.", f"Use 0 to {MAX_OPENING_MOVES}.")
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"{ENV_NAME} has no render_mode {render_mode!r}.", "It renders rgb_array.")
        self.num_envs, self._opening_moves = num_envs, opening_moves
        self._planes = np.array([[1, 0], [0, 1]] if egocentric_obs_tensor else [[0, 1], [0, 1]])  # [observer, player]
        self._stones = np.zeros((num_envs, PLAYERS), np.uint64)  # bit = column × _HEIGHT + row
        self._heights: Ints = np.zeros((num_envs, COLUMNS), np.int64)
        self._moves: Ints = np.zeros(num_envs, np.int64)
        shape = (num_envs, PLAYERS)
        self._result = VectorMultiAgentStep(
            acting=np.zeros(shape, np.bool_),
            observation=np.zeros((*shape, PLAYERS + 1, ROWS, COLUMNS), np.float32),
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            action_mask=np.ones((*shape, COLUMNS), np.bool_),
        )

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        """The game has no chance: seeds determine only the opening moves."""
        result = self._result
        self._stones[matches] = 0
        self._heights[matches] = self._moves[matches] = 0
        result.observation[matches] = 0.0
        result.observation[matches, :, _EMPTY] = 1.0
        result.action_mask[matches] = True  # type: ignore[index]
        result.terminated[matches] = False
        result.acting[matches] = [True, False]
        if self._opening_moves:
            self._open(matches, seeds)
        return result

    def _open(self, matches: Ints, seeds: Ints) -> None:
        moves = np.array([self._draw_opening(seed) for seed in seeds.tolist()], np.int64).reshape(len(seeds), self._opening_moves)
        for number in range(self._opening_moves):
            opening = moves[:, number] >= 0
            ours, column = matches[opening], moves[opening, number]
            player = np.full(len(ours), number % PLAYERS)
            self._place(ours, player, self._heights[ours, column], column)
            self._moves[ours] += 1
        self._result.acting[matches] = np.arange(PLAYERS) == (self._moves[matches] % PLAYERS)[:, None]

    def _draw_opening(self, seed: int) -> Ints:
        """Columns of the opening moves, then -1."""
        random = np.random.default_rng(seed)
        columns = random.integers(COLUMNS, size=self._opening_moves)
        columns[random.integers(self._opening_moves + 1) :] = -1
        return columns

    def step(self, actions: Ints, playing: Bools) -> VectorMultiAgentStep:
        matches, result = np.flatnonzero(playing), self._result
        player = self._moves[matches] % PLAYERS
        column = actions[matches, player]
        row = self._heights[matches, column]
        if (row >= ROWS).any():
            raise ValueError(f"column {int(column[row >= ROWS][0])} of match {int(matches[row >= ROWS][0])} is full")
        self._place(matches, player, row, column)
        self._moves[matches] += 1
        won = has_four(self._stones[matches, player])
        over = won | (self._moves[matches] == ROWS * COLUMNS)
        result.reward[matches, player] = won
        result.reward[matches, 1 - player] = -won.astype(np.float32)
        result.terminated[matches] = over[:, None]
        result.acting[matches, player] = False
        result.acting[matches, 1 - player] = ~over
        return result

    def _place(self, matches: Ints, player: Ints, row: Ints, column: Ints) -> None:
        observation, mask = self._result.observation, self._result.action_mask
        assert mask is not None
        self._stones[matches, player] |= np.uint64(1) << (column * _HEIGHT + row).astype(np.uint64)
        self._heights[matches, column] = row + 1
        for observer in range(PLAYERS):
            observation[matches, observer, self._planes[observer, player], row, column] = 1.0
        observation[matches, :, _EMPTY, row, column] = 0.0
        mask[matches, :, column] = (row + 1 < ROWS)[:, None]

    def render(self) -> npt.NDArray[np.uint8]:
        """The board of match 0."""
        planes: Floats = self._result.observation[0, 0]
        squares = _COLOURS[planes.argmax(axis=0)[::-1]]  # [6, 7, 3], the lowest row last
        picture = np.repeat(np.repeat(squares, _CELL, axis=0), _CELL, axis=1)
        place = (np.arange(_CELL) - (_CELL - 1) / 2) ** 2
        corners = place[:, None] + place > (0.44 * _CELL) ** 2
        picture[np.tile(corners, (ROWS, COLUMNS))] = _BOARD_COLOUR
        return picture


def has_four(stones: npt.NDArray[np.uint64]) -> Bools:
    """Whether four of these stones [N] are in a row."""
    found = np.zeros(stones.shape, np.uint64)
    for step in _DIRECTIONS:
        pairs = stones & (stones >> step)
        found |= pairs & (pairs >> (step + step))
    any_found: Bools = found != 0
    return any_found
