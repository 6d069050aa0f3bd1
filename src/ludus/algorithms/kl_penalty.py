"""The adaptive penalty on how far an update moves a policy (Schulman et al. 2017, §4), in RLlib's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAST = 1e-4  # from which the penalty can still grow again


class KLPenalty:
    """A coefficient that rises while the divergence is above its target, and falls below."""

    def __init__(self, coeff: float, target: float) -> None:
        self.coeff, self._start, self._target = coeff, coeff, target

    def adapt(self, kl: float) -> None:
        """After an update that moved the policy by `kl`."""
        if kl > 2.0 * self._target:
            self.coeff *= 1.5
        elif kl < 0.5 * self._target:
            self.coeff = max(0.5 * self.coeff, min(_LEAST, self.coeff))

    def state(self) -> dict[str, Any]:
        return {"kl_coeff": self.coeff, "kl_coeff_start": self._start}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there; but a run that was told to begin with another weight begins with that."""
        if state.get("kl_coeff_start", self._start) == self._start:
            self.coeff = float(state.get("kl_coeff", self.coeff))
