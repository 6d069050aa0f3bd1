"""Reward scaling: divide rewards by the running deviation of the discounted return, so that one learning rate fits all games."""

from __future__ import annotations

from typing import Any

import numpy as np

from ludus.buffers.collate import rows_in_turn
from ludus.core.types import Bools, Floats, Ints, Segments

_MOST_OPEN = 1 << 17  # running returns that are kept; sessions that broke off leave theirs behind


class RewardScale:
    """Follows the discounted return of every row across segments (rows are told apart by their origin)."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._carry: dict[int, float] = {}
        self._count, self._mean, self._m2 = 0.0, 0.0, 0.0

    def scaled(self, segments: Segments) -> Floats:
        """Rewards over the deviation after taking this batch in; the sign and zero of a reward never change."""
        returns = self._returns(segments)
        n = returns.size
        if n:
            delta = float(returns.mean()) - self._mean
            total = self._count + n
            self._m2 += float(returns.var()) * n + delta * delta * self._count * n / total
            self._mean += delta * n / total
            self._count = total
        deviation = np.sqrt(self._m2 / self._count) if self._count else 1.0
        floor = 0.1 * abs(self._mean)  # returns that hardly differ must not blow rewards up
        return (segments.reward / max(deviation, floor, 1e-8)).astype(np.float32)

    def _returns(self, segments: Segments) -> Floats:
        out = np.zeros_like(segments.reward)
        ended = self._ended(segments)
        for rows in rows_in_turn(segments.origin):
            out[:, rows] = self._follow(segments, rows, ended[rows])
        while len(self._carry) > _MOST_OPEN:
            del self._carry[next(iter(self._carry))]
        return out[segments.valid]

    def _follow(self, segments: Segments, rows: Ints, ended: Bools) -> Floats:
        """[T, rows] the running returns of rows that are of different origins."""
        origins = segments.origin[rows].tolist()
        carry = np.array([self._carry.get(origin, 0.0) for origin in origins], np.float64)
        first, reward, valid = segments.first[:, rows], segments.reward[:, rows], segments.valid[:, rows]
        out = np.zeros_like(reward)
        for t in np.flatnonzero(valid.any(axis=1)):
            gained = np.where(first[t], 0.0, carry) * self._gamma + reward[t]
            carry = np.where(valid[t], gained, carry)
            out[t] = carry
        for origin, value, over in zip(origins, carry.tolist(), ended.tolist(), strict=True):
            self._carry.pop(origin, None)
            if not over:  # the next episode starts at 0 anyway, and a session that has ended never comes back
                self._carry[origin] = value
        return out

    @staticmethod
    def _ended(segments: Segments) -> Bools:
        """[B] rows whose last step ended their episode: the next one starts at 0 anyway."""
        last = np.where(segments.valid.any(axis=0), segments.spec.steps - 1 - np.argmax(segments.valid[::-1], axis=0), 0)
        rows = np.arange(segments.rows)
        ended: Bools = segments.valid[last, rows] & (segments.terminated | segments.truncated)[last, rows]
        return ended

    def state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "m2": self._m2}

    def load_state(self, state: dict[str, Any]) -> None:
        """Statistics only: environments restart when a run is resumed, so the running returns begin anew."""
        self._count, self._mean, self._m2 = float(state["count"]), float(state["mean"]), float(state["m2"])
        self._carry.clear()
