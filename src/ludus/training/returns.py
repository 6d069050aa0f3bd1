"""Returns and advantages, as pure functions over [T, B] arrays with a validity mask.

All of them treat an invalid row as if it were not there: the step before it bootstraps from its value, nothing flows through.
"""

from __future__ import annotations

import numpy as np

from ludus.types import Bools, Floats, Ints


def successor_values(value: Floats, final_at: Ints, final_value: Floats) -> Floats:
    """[T, B] value of the observation that truly followed each step.

    The next row's value, except where an episode ended and the next row already shows a new one: there the kept final
    observation's value stands in (Gymnasium's same-step autoreset).
    """
    following = value[1:].copy()
    following[final_at[:, 0], final_at[:, 1]] = final_value
    return following


def gae(
    reward: Floats,
    value: Floats,
    following: Floats,
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    gamma: float,
    lambda_: float,
) -> Floats:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    δ_t = r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t);   A_t = δ_t + γλ·A_{t+1} while the episode goes on.
    `value` is [T, B] for the observed rows, `following` the value of each step's true successor.
    """
    delta = np.where(valid, reward + gamma * following * ~terminated - value, np.float32(0))
    goes_on = gamma * lambda_ * ~(terminated | truncated)
    advantage = np.zeros_like(delta)
    carry = np.zeros(delta.shape[1], np.float32)
    for t in range(delta.shape[0] - 1, -1, -1):
        carry = (delta[t] + goes_on[t] * carry) * valid[t]
        advantage[t] = carry
    return advantage


def explained_variance(predicted: Floats, target: Floats) -> float:
    """1 − Var(target − predicted) / Var(target); 1 is perfect, 0 no better than a constant."""
    variance = float(np.var(target))
    return float("nan") if variance == 0 else 1.0 - float(np.var(target - predicted)) / variance
