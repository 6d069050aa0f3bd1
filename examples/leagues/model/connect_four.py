"""A network for Connect Four that sees lines of four: which ones each side can still complete, and which squares complete one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

ROWS, COLUMNS, FOUR = 6, 7, 4


def lines_of_four() -> Tensor:
    """[42, 69]: 1 where a square belongs to a line."""
    found = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            for up, right in ((0, 1), (1, 0), (1, 1), (-1, 1)):
                line = [(row + step * up, column + step * right) for step in range(FOUR)]
                if all(0 <= r < ROWS and c < COLUMNS for r, c in line):
                    found.append([r * COLUMNS + c for r, c in line])
    squares = torch.tensor(found)
    return torch.zeros(ROWS * COLUMNS, len(found)).scatter_(0, squares.T, 1.0)


class CustomModel(nn.Module):
    """Takes the planes of `ludus/ConnectFour-v0` with `egocentric_obs_tensor`: stones of the other player, own stones, empty squares."""

    def __init__(
        self,
        obs_space: gym.spaces.Box,
        action_space: gym.spaces.Discrete,
        num_outputs: int,
        model_config: dict[str, Any],
        name: str,
        hidden: int = 256,
    ) -> None:
        super().__init__()
        lines = lines_of_four()
        self.register_buffer("lines", lines, persistent=False)
        inputs = 2 * lines.shape[1] + 4 * ROWS * COLUMNS + 4 * COLUMNS
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU())
        self.head = nn.Linear(hidden // 2, num_outputs)
        self.column_head = nn.Linear(4 + ROWS, 1)  # the same for all columns
        self.value = nn.Linear(hidden // 2, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        other, own, empty = obs.flatten(2).unbind(1)  # [B, 42]
        own_lines, other_lines = self.open_lines(own, other), self.open_lines(other, own)
        own_wins, other_wins = self.winning_squares(own_lines, empty), self.winning_squares(other_lines, empty)
        board = obs[:, 2]  # [B, 6, 7]
        landing = board * (1.0 - nn.functional.pad(board, (0, 0, 1, 0))[:, :-1])  # the square on which a stone comes to rest
        above = nn.functional.pad(landing, (0, 0, 1, 0))[:, :-1]
        wins = [squares.unflatten(1, (ROWS, COLUMNS)) for squares in (own_wins, other_wins)]
        threats = torch.stack([(place * squares).sum(1) for place in (landing, above) for squares in wins], 1)  # [B, 4, 7]
        features = self.body(torch.cat([own_lines, other_lines, own, other, own_wins, other_wins, threats.flatten(1)], 1))
        columns = torch.cat([threats, landing], 1).transpose(1, 2)  # [B, 7, 10]
        return self.head(features) + self.column_head(columns).squeeze(2), self.value(features)

    def open_lines(self, own: Tensor, other: Tensor) -> Tensor:
        """[B, 69]: number of own stones in each line, 0 if the other player has a stone in it."""
        return (own @ self.lines) * torch.relu(1.0 - other @ self.lines)

    def winning_squares(self, open_lines: Tensor, empty: Tensor) -> Tensor:
        """[B, 42]: 1 for empty squares that complete a line."""
        threes = torch.relu(open_lines - (FOUR - 2))
        return (threes @ self.lines.T).clamp(max=1.0) * empty
