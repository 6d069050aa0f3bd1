"""Proximal policy optimisation (Schulman et al. 2017) for any space, with action masks and recurrence.

Off-policy steps (pipelined sampling) are corrected by V-trace with the values of the current policy, and by the decoupled
objective of Hilton et al. 2021: the surrogate is clipped around the proximal policy (the policy before this update) and
weighted by its ratio to the behaviour policy μ. For steps more than one version old the surrogate is clipped around μ instead.

Shapes: T steps of a segment, B rows, M samples of a minibatch (or [L, S]: S sequences of L steps).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from ludus.algorithms.gradient_learner import ActorCritic, ActorCriticConfig, mean_metrics
from ludus.algorithms.kl_penalty import KLPenalty
from ludus.algorithms.minibatch import Batch, make_batch, mean_over, minibatches
from ludus.algorithms.returns import ROUNDING, StepFlags, explained_variance, gae, next_values, vtrace
from ludus.algorithms.trajectories import Trajectories
from ludus.config.schema import AlgorithmConfig
from ludus.core.schedule import value_at
from ludus.core.tree import Array
from ludus.core.types import Bools, Floats, Segments
from ludus.models.policy import Policy

_RLLIB_KL_COEFF = 0.2  # RLlib's default, applied if only kl_target is given


class PPOConfig(ActorCriticConfig):
    """Hyper-parameters of PPO, named as in RLlib."""

    clip_param: float = Field(0.2, gt=0, description="Clip range of the probability ratio.")
    vf_clip_param: float | None = Field(None, gt=0, description="Clip of the squared value error; null = unlimited.")
    kl_coeff: float = Field(0.0, ge=0, description="Initial weight of the KL penalty; 0.2 if only kl_target is given.")
    kl_target: float = Field(0.01, gt=0, description="Target KL divergence; the penalty weight adapts towards it.")
    stop_kl: float | None = Field(None, gt=0, description="Stop the epochs of an update when the KL divergence exceeds this.")
    minibatch_size: int = Field(1024, ge=1, description="Samples per gradient step.")

    @model_validator(mode="before")
    @classmethod
    def _default_kl_coeff(cls, data: Any) -> Any:
        """Applied before validation because a saved configuration contains every key."""
        if isinstance(data, dict) and "kl_target" in data:
            if data["kl_target"] is None:
                return {key: value for key, value in data.items() if key != "kl_target"}
            return {"kl_coeff": _RLLIB_KL_COEFF, **data}
        return data

    @field_validator("sampling")
    @classmethod
    def _reject_async_sampling(cls, sampling: str) -> str:
        if sampling == "async":
            raise ValueError("PPO learns from steps that are at most one version old; use pipelined, or run: APPO")
        return sampling


class PPO(ActorCritic):
    Config: ClassVar[type[AlgorithmConfig]] = PPOConfig

    def __init__(self, policy: Policy, config: PPOConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config
        self.penalty = KLPenalty(config.kl_coeff, config.kl_target)

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        entropy_coeff = value_at(self.config.entropy_coeff, timestep)
        if not segments.valid.any() or self.skip_warmup(segments, timestep):
            return {"epochs": 0.0}
        batch, metrics = self.prepare(segments)
        length = 1 if batch.valid is None else batch.valid.shape[0]
        size = max(1, self.config.minibatch_size // length)
        steps: list[dict[str, Tensor]] = []
        epochs = 0
        for epoch in range(self.config.num_epochs):
            diagnose = epoch == self.config.num_epochs - 1 or self.config.stop_kl is not None
            loss = partial(self.loss, entropy_coeff=entropy_coeff, diagnose=diagnose)
            steps += [self.step(loss, minibatch) for minibatch in minibatches(batch, size, self.generator)]
            epochs += 1
            if self.config.stop_kl is not None and float(steps[-1]["kl"]) > self.config.stop_kl:
                break
        self.update_observation_statistics(segments)
        metrics |= mean_metrics(steps)
        if self.penalty.coeff:
            self.penalty.adapt(metrics["kl"])
            metrics["kl_coeff"] = self.penalty.coeff
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": float(epochs)}

    # -- advantages and targets, once per batch

    def prepare(self, segments: Segments) -> tuple[Batch, dict[str, float]]:
        reward = self.scale_rewards(segments)
        current = int(segments.version[segments.valid].max()) if self.version is None else self.version
        is_pipelined = self.version is None and self.config.sampling == "pipelined"
        if is_pipelined or (segments.version[segments.valid] < current).any():  # some steps are of an older policy
            return self._prepare_off_policy(replace(segments, reward=reward, cache={}), current)
        value, n = segments.value[:-1], segments.finals
        next_value = next_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        advantage = gae(reward, value, next_value, StepFlags.of(segments), self.config.gamma, self.config.lambda_)
        target, valid = advantage + value, segments.valid
        metrics = {"explained_variance": explained_variance(value[valid], target[valid])}
        return make_batch(self.policy, segments, self._normalize_advantage(advantage, valid), target), metrics

    def _normalize_advantage(self, advantage: Floats, valid: Bools) -> Floats:
        if not self.config.normalize_advantage:
            return advantage
        samples = advantage[valid]
        normalized: Floats = (advantage - samples.mean()) / (samples.std() + 1e-8)
        return normalized

    def _prepare_off_policy(self, segments: Segments, current: int) -> tuple[Batch, dict[str, float]]:
        """Evaluate all steps once with the current (= proximal) policy to get its values and its ratio to μ."""
        proximal = Trajectories.from_segments(segments).evaluate_grids(self.policy, self.config.minibatch_size)
        valid, gamma, lambda_ = segments.valid, self.config.gamma, self.config.lambda_
        log_ratio = np.where(valid, proximal.log_prob - segments.log_prob, np.float32(0))
        ratio = np.exp(np.clip(log_ratio, -20, 20))
        flags = StepFlags.of(segments)
        corrected = vtrace(ratio, segments.reward, proximal.value, proximal.next_value, flags, gamma, lambda_)
        rho = ratio[valid]
        metrics = {
            "explained_variance": explained_variance(proximal.value[valid], corrected.target[valid]),
            "rho_mean": float(rho.mean()),
            "rho_clipped": float((rho > 1 + ROUNDING).mean()),
        }
        # CartPole, mean return over 70 updates: 181 without lag. One version of lag: 173 clipped around the proximal policy,
        # 163 around μ. Three versions: 132 and 143; there, clipping around the proximal policy oscillates.
        recent = segments.version >= current - 1
        anchor = np.where(recent, proximal.log_prob, segments.log_prob)
        # The weight is positive, so it can be multiplied into the advantage inside the minimum of the surrogate.
        weight = np.where(recent, np.minimum(ratio, np.float32(1)), np.float32(1))
        advantage = weight * self._normalize_advantage(corrected.advantage, valid)
        return make_batch(self.policy, replace(segments, log_prob=anchor), advantage, corrected.target), metrics

    # -- the loss

    def loss(self, policy: Policy, batch: Batch, entropy_coeff: float, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate (eq. 7), value error and entropy bonus (eq. 9), averaged over the valid samples."""
        log_prob, entropy, value = policy.evaluate(batch.observation, batch.action, batch.mask, batch.state, batch.first)
        log_ratio = log_prob - batch.log_prob
        if batch.valid is not None:
            log_ratio = torch.where(batch.valid, log_ratio, 0.0)  # padding may hold anything
        ratio = log_ratio.exp()
        clip = self.config.clip_param
        surrogate = torch.min(ratio * batch.advantage, ratio.clamp(1 - clip, 1 + clip) * batch.advantage)
        value_error = (value - batch.target).square()
        if self.config.vf_clip_param is not None:
            value_error = value_error.clamp(max=self.config.vf_clip_param)

        mean = mean_over(batch.valid)
        policy_loss, value_loss = -mean(surrogate), mean(value_error)
        loss = policy_loss + self.config.vf_loss_coeff * value_loss
        kl = mean((ratio - 1) - log_ratio) if self.penalty.coeff or diagnose else None  # never negative (Schulman 2020)
        if self.penalty.coeff and kl is not None:
            loss = loss + self.penalty.coeff * kl
        entropy_mean = mean(entropy) if entropy_coeff or diagnose else None
        if entropy_coeff and entropy_mean is not None:
            loss = loss - entropy_coeff * entropy_mean
        if not diagnose or entropy_mean is None or kl is None:
            return loss, {}
        with torch.no_grad():
            metrics = {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy_mean.detach(),
                "kl": kl.detach(),
                "clip_fraction": mean(((ratio - 1).abs() > clip).float()),
            }
        return loss, metrics

    # -- checkpoint state

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain | self.penalty.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self.penalty.load_state(plain)
