"""Adaptive KL penalty (Schulman et al. 2017, §4), with RLlib's factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MIN_COEFF = 1e-4  # from which the penalty can still grow again


class KLPenalty:
    """A coefficient that rises while the KL divergence is above its target, and falls while it is below."""

    def __init__(self, coeff: float, target: float) -> None:
        self.coeff, self._start, self._target = coeff, coeff, target

    def adapt(self, kl: float) -> None:
        """Adapt the coefficient to the KL divergence of the latest update."""
        if kl > 2.0 * self._target:
            self.coeff *= 1.5
        elif kl < 0.5 * self._target:
            self.coeff = max(0.5 * self.coeff, min(_MIN_COEFF, self.coeff))

    def state(self) -> dict[str, Any]:
        return {"kl_coeff": self.coeff, "kl_coeff_start": self._start}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient, unless this run is configured with another initial one."""
        if state.get("kl_coeff_start", self._start) == self._start:
            self.coeff = float(state.get("kl_coeff", self.coeff))
