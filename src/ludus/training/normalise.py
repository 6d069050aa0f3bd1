"""Reward scaling: divide rewards by the running deviation of the discounted return, so that one learning rate fits all games."""

from __future__ import annotations

from typing import Any

import numpy as np

from ludus.types import Bools, Floats, Segments


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
        carry = np.array([self._carry.get(int(o), 0.0) for o in segments.origin], np.float64)
        out = np.zeros_like(segments.reward)
        for t in range(segments.spec.steps):
            gained = np.where(segments.first[t], 0.0, carry) * self._gamma + segments.reward[t]
            carry = np.where(segments.valid[t], gained, carry)
            out[t] = carry
        over = self._ended(segments)
        for origin, value, ended in zip(segments.origin.tolist(), carry.tolist(), over.tolist(), strict=True):
            if ended:  # a session never comes back: what it leaves behind would pile up
                self._carry.pop(origin, None)
            else:
                self._carry[origin] = value
        return out[segments.valid]

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
