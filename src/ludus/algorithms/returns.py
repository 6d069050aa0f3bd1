"""Returns and advantages, as pure functions over [T, B] arrays with a validity mask.

All of them treat an invalid row as if it were not there: the step before it bootstraps from its value, nothing flows through.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ludus.core.types import Bools, Floats, Ints

ROUNDING = 1e-3
"""A policy's ratio to itself differs from 1 by less than this."""


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
    delta = _errors(reward, value, following, terminated, valid, gamma)
    goes_on = gamma * lambda_ * ~(terminated | truncated)
    advantage = np.zeros_like(delta)
    carry = np.zeros(delta.shape[1], np.float32)
    for t in range(delta.shape[0] - 1, -1, -1):
        carry = (delta[t] + goes_on[t] * carry) * valid[t]
        advantage[t] = carry
    return advantage


def _errors(reward: Floats, value: Floats, following: Floats, terminated: Bools, valid: Bools, gamma: float) -> Floats:
    """[T, B] r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t); 0 where nothing is valid."""
    with np.errstate(invalid="ignore", over="ignore"):  # padding may hold anything
        errors: Floats = np.where(valid, reward + gamma * following * ~terminated - value, np.float32(0))
    return errors


class VTrace(NamedTuple):
    target: Floats
    """[T, B] v_s, what the value should have been."""
    advantage: Floats
    """[T, B] of the action taken over V(s); the policy gradient weighs it by min(ρ̄, ratio)."""


def vtrace(
    ratio: Floats,
    reward: Floats,
    value: Floats,
    following: Floats,
    terminated: Bools,
    truncated: Bools,
    valid: Bools,
    gamma: float,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Values and advantages of one policy from the steps of another (Espeholt et al. 2018, eq. 1 and §4.2).

    ρ_t = min(ρ̄, ratio_t);  c_t = λ·min(c̄, ratio_t);  δ_t = ρ_t·(r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t));
    v_t − V(s_t) = δ_t + γ·c_t·(v_{t+1} − V(s_{t+1})) while the episode goes on.
    `ratio` is π/μ of the action taken: the learned policy's probability over that of the policy that acted. `value` and
    `following` are the learned policy's, as in `gae`. Where all ratios are 1 the advantage is that of `gae`: for λ < 1 the
    successor's target is mixed with its value.
    """
    ratio = np.where(valid, ratio, np.float32(0))
    error = _errors(reward, value, following, terminated, valid, gamma)
    delta = np.minimum(ratio, np.float32(rho_bar)) * error
    goes_on = np.where(terminated | truncated, np.float32(0), np.float32(gamma))
    passes = goes_on * np.minimum(ratio, np.float32(c_bar)) * np.float32(lambda_)
    ahead = np.zeros_like(delta)  # γ·(v_{t+1} − V(s_{t+1})), where the episode goes on
    carry = np.zeros(delta.shape[1], np.float32)
    excess = np.empty_like(delta)
    for t in range(delta.shape[0] - 1, -1, -1):
        ahead[t] = goes_on[t] * carry
        carry = delta[t] + passes[t] * carry
        excess[t] = carry
    ahead[~valid] = 0
    return VTrace(np.where(valid, value + excess, np.float32(0)), error + np.float32(lambda_) * ahead)


def explained_variance(predicted: Floats, target: Floats) -> float:
    """1 − Var(target − predicted) / Var(target); 1 is perfect, 0 no better than a constant."""
    variance = float(np.var(target))
    return float("nan") if variance == 0 else 1.0 - float(np.var(target - predicted)) / variance
