"""Network: input four grey frames of 42×42, output one logit per action and a value. Inputs are batched; actors send single rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ACTIONS = 6
SIDE, FRAMES = 42, 4


class AtariModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(FRAMES, 16, 4, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(),
        )  # fmt: skip
        self.logits, self.value = nn.Linear(128, ACTIONS), nn.Linear(128, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 42, 42, 4] → ([B, actions], [B])."""
        features = self.encoder(frames.permute(0, 3, 1, 2))
        return self.logits(features), self.value(features).squeeze(-1)


if __name__ == "__main__":
    print(AtariModel()(torch.zeros(2, SIDE, SIDE, FRAMES)))
