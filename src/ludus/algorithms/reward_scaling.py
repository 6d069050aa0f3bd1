"""Reward scaling: divide rewards by the running standard deviation of the discounted return."""

from __future__ import annotations

from typing import Any

import numpy as np

from ludus.buffers.collate import split_repeated_origins
from ludus.core.types import Bools, Floats, Ints, Segments

_MAX_OPEN_RETURNS = 1 << 17  # interrupted sessions leave their running return behind


class RewardScale:
    """Tracks the discounted return of every row across segments; `origin` identifies a row."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._carry: dict[int, float] = {}
        self._count, self._mean, self._m2 = 0.0, 0.0, 0.0

    def scale(self, segments: Segments) -> Floats:
        """Add the batch to the statistics and return its rewards divided by the standard deviation; signs are kept."""
        returns = self._returns(segments)
        n = returns.size
        if n:
            delta = float(returns.mean()) - self._mean
            total = self._count + n
            self._m2 += float(returns.var()) * n + delta * delta * self._count * n / total
            self._mean += delta * n / total
            self._count = total
        std = np.sqrt(self._m2 / self._count) if self._count else 1.0
        floor = 0.1 * abs(self._mean)  # nearly constant returns must not inflate the rewards
        return (segments.reward / max(std, floor, 1e-8)).astype(np.float32)

    def _returns(self, segments: Segments) -> Floats:
        out = np.zeros_like(segments.reward)
        rows = np.arange(segments.rows)
        last = np.where(segments.valid.any(axis=0), segments.spec.steps - 1 - np.argmax(segments.valid[::-1], axis=0), 0)
        ended = segments.valid[last, rows] & (segments.terminated | segments.truncated)[last, rows]  # [B] by their last step
        for rows in split_repeated_origins(segments.origin):
            out[:, rows] = self._running_returns(segments, rows, ended[rows])
        while len(self._carry) > _MAX_OPEN_RETURNS:
            del self._carry[next(iter(self._carry))]
        return out[segments.valid]

    def _running_returns(self, segments: Segments, rows: Ints, ended: Bools) -> Floats:
        """Return the running returns [T, rows] of rows with distinct origins."""
        origins = segments.origin[rows].tolist()
        carry = np.array([self._carry.get(origin, 0.0) for origin in origins], np.float64)
        first, reward, valid = segments.first[:, rows], segments.reward[:, rows], segments.valid[:, rows]
        out = np.zeros_like(reward)
        for t in np.flatnonzero(valid.any(axis=1)):
            running = np.where(first[t], 0.0, carry) * self._gamma + reward[t]
            carry = np.where(valid[t], running, carry)
            out[t] = carry
        for origin, value, over in zip(origins, carry.tolist(), ended.tolist(), strict=True):
            self._carry.pop(origin, None)
            if not over:  # the next episode starts at 0, and the origin of an ended session is not used again
                self._carry[origin] = value
        return out

    def state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "m2": self._m2}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the statistics; running returns start at 0 because a resumed run restarts its environments."""
        self._count, self._mean, self._m2 = float(state["count"]), float(state["mean"]), float(state["m2"])
        self._carry.clear()
