"""Returns and advantages, as pure functions over [T, B] arrays with a validity mask.

An invalid row is ignored: the step before it bootstraps from its value, and no return passes through it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ludus.core.types import Bools, Floats, Ints, Segments

ROUNDING = 1e-3
"""Numerical tolerance of a probability ratio that should be exactly 1."""


class StepFlags(NamedTuple):
    """Flags of recorded steps, each [T, B]."""

    terminated: Bools
    truncated: Bools
    valid: Bools

    @classmethod
    def of(cls, segments: Segments) -> StepFlags:
        return cls(segments.terminated, segments.truncated, segments.valid)


def next_values(value: Floats, final_at: Ints, final_value: Floats) -> Floats:
    """Return V(s_{t+1}) of each step, [T, B].

    This is the value of the next row, except where the next row already belongs to a new episode (Gymnasium's same-step
    autoreset): there it is the value of the recorded final observation.
    """
    next_value = value[1:].copy()
    next_value[final_at[:, 0], final_at[:, 1]] = final_value
    return next_value


def gae(reward: Floats, value: Floats, next_value: Floats, flags: StepFlags, gamma: float, lambda_: float) -> Floats:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    δ_t = r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t);   A_t = δ_t + γλ·A_{t+1} until the episode ends.
    All arrays are [T, B]; `next_value` comes from `next_values`.
    """
    delta = _td_errors(reward, value, next_value, flags, gamma)
    decay = gamma * lambda_ * ~(flags.terminated | flags.truncated)
    advantage = np.zeros_like(delta)
    carry = np.zeros(delta.shape[1], np.float32)
    for t in range(delta.shape[0] - 1, -1, -1):
        carry = (delta[t] + decay[t] * carry) * flags.valid[t]
        advantage[t] = carry
    return advantage


def _td_errors(reward: Floats, value: Floats, next_value: Floats, flags: StepFlags, gamma: float) -> Floats:
    """r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t), [T, B]; 0 at invalid steps."""
    with np.errstate(invalid="ignore", over="ignore"):  # padding may hold any value
        errors: Floats = np.where(flags.valid, reward + gamma * next_value * ~flags.terminated - value, np.float32(0))
    return errors


class VTraceClip(NamedTuple):
    """Clip thresholds of V-trace."""

    rho: float = 1.0
    c: float = 1.0


class VTrace(NamedTuple):
    target: Floats
    """[T, B] value target v_t."""
    advantage: Floats
    """[T, B] advantage of the action taken; the policy gradient weights it by min(ρ̄, ratio)."""


def vtrace(
    ratio: Floats,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    flags: StepFlags,
    gamma: float,
    lambda_: float = 1.0,
    clip: VTraceClip = VTraceClip(),  # noqa: B008
) -> VTrace:
    """Value targets and advantages of policy π from the steps of policy μ (Espeholt et al. 2018, eq. 1 and §4.2).

    ρ_t = min(ρ̄, ratio_t);  c_t = λ·min(c̄, ratio_t);  δ_t = ρ_t·(r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t));
    v_t − V(s_t) = δ_t + γ·c_t·(v_{t+1} − V(s_{t+1})) until the episode ends.
    `ratio` is π/μ of the action taken; `value` and `next_value` are those of π, as in `gae`. If all ratios are 1 the advantage
    equals that of `gae`: for λ < 1 the target of the successor is mixed with its value.
    """
    valid = flags.valid
    ratio = np.where(valid, ratio, np.float32(0))
    error = _td_errors(reward, value, next_value, flags, gamma)
    delta = np.minimum(ratio, np.float32(clip.rho)) * error
    discount = np.where(flags.terminated | flags.truncated, np.float32(0), np.float32(gamma))
    trace = discount * np.minimum(ratio, np.float32(clip.c)) * np.float32(lambda_)
    next_correction = np.zeros_like(delta)  # γ·(v_{t+1} − V(s_{t+1})), 0 where the episode ended
    carry = np.zeros(delta.shape[1], np.float32)
    correction = np.empty_like(delta)  # v_t − V(s_t)
    for t in range(delta.shape[0] - 1, -1, -1):
        next_correction[t] = discount[t] * carry
        carry = delta[t] + trace[t] * carry
        correction[t] = carry
    next_correction[~valid] = 0
    return VTrace(np.where(valid, value + correction, np.float32(0)), error + np.float32(lambda_) * next_correction)


def explained_variance(predicted: Floats, target: Floats) -> float:
    """1 − Var(target − predicted) / Var(target); 1 is perfect, 0 no better than a constant."""
    variance = float(np.var(target))
    return float("nan") if variance == 0 else 1.0 - float(np.var(target - predicted)) / variance
