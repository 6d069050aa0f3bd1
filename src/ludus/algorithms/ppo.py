"""Proximal policy optimisation (Schulman et al. 2017), for any space, with masks and recurrence.

Steps of an older policy are corrected: V-trace with the values of the policy that learns, and the decoupled objective of
Hilton et al. 2021, whose surrogate is clipped around that policy and weighted by its ratio to the one that acted. Steps that
are more than one version old are clipped around the policy that acted: what has been learned since then is not learned again.

Letters: T steps of a segment, B rows, M samples (or [L, S] for S sequences of L steps) of a minibatch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from ludus.algorithms.gradient_learner import ActorCritic, ActorCriticConfig, means
from ludus.algorithms.kl_penalty import KLPenalty
from ludus.algorithms.minibatch import Batch, make_batch, mean_over, minibatches
from ludus.algorithms.returns import ROUNDING, explained_variance, gae, successor_values, vtrace
from ludus.algorithms.trajectories import Trajectories
from ludus.config.schema import AlgorithmConfig
from ludus.core.schedule import value_at
from ludus.core.tree import Array
from ludus.core.types import Bools, Floats, Segments
from ludus.models.policy import Policy

_USUAL_KL_COEFF = 0.2  # RLlib's, whose users write kl_target alone


class PPOConfig(ActorCriticConfig):
    """Hyper-parameters of PPO; names as RLlib users know them."""

    clip_param: float = Field(0.2, gt=0, description="Clip range of the probability ratio.")
    vf_clip_param: float | None = Field(None, gt=0, description="Clip of the squared value error; null = unlimited.")
    kl_coeff: float = Field(
        0.0,
        ge=0,
        description="Initial weight of the KL penalty; 0.2 if only kl_target is given.",
    )
    kl_target: float = Field(0.01, gt=0, description="Target KL divergence; the penalty weight adapts towards it.")
    stop_kl: float | None = Field(None, gt=0, description="Stop the epochs of an update when the KL divergence exceeds this.")
    minibatch_size: int = Field(1024, ge=1, description="Samples per gradient step.")

    @model_validator(mode="before")
    @classmethod
    def _target_without_weight(cls, data: Any) -> Any:
        """Here, not when it is used: a saved configuration names every key."""
        if isinstance(data, dict) and "kl_target" in data:
            if data["kl_target"] is None:
                return {key: value for key, value in data.items() if key != "kl_target"}
            return {"kl_coeff": _USUAL_KL_COEFF, **data}
        return data

    @field_validator("sampling")
    @classmethod
    def _near_the_policy(cls, sampling: str) -> str:
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
        if not segments.valid.any() or self.heated(segments, timestep):
            return {"epochs": 0.0}
        batch, metrics = self.prepare(segments)
        length = 1 if batch.valid is None else batch.valid.shape[0]
        size = max(1, self.config.minibatch_size // length)
        numbers: list[dict[str, Tensor]] = []
        epochs = 0
        for epoch in range(self.config.num_epochs):
            diagnose = epoch == self.config.num_epochs - 1 or self.config.stop_kl is not None
            loss = partial(self.loss, entropy_coeff=entropy_coeff, diagnose=diagnose)
            numbers += [self.step(loss, minibatch) for minibatch in minibatches(batch, size, self.generator)]
            epochs += 1
            if self.config.stop_kl is not None and float(numbers[-1]["kl"]) > self.config.stop_kl:
                break
        self.observe(segments)
        metrics |= means(numbers)
        if self.penalty.coeff:
            self.penalty.adapt(metrics["kl"])
            metrics["kl_coeff"] = self.penalty.coeff
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": float(epochs)}

    # -- advantages and targets, once per batch

    def prepare(self, segments: Segments) -> tuple[Batch, dict[str, float]]:
        reward = self.rewards(segments)
        if self._outdated(segments):
            return self._corrected(replace(segments, reward=reward, cache={}))
        value, n = segments.value[:-1], segments.finals
        following = successor_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        ends = (segments.terminated, segments.truncated, segments.valid)
        advantage = gae(reward, value, following, *ends, self.config.gamma, self.config.lambda_)
        target, valid = advantage + value, segments.valid
        metrics = {"explained_variance": explained_variance(value[valid], target[valid])}
        return make_batch(self.policy, segments, self._normalised(advantage, valid), target), metrics

    def _normalised(self, advantage: Floats, valid: Bools) -> Floats:
        if not self.config.normalize_advantage:
            return advantage
        inside = advantage[valid]
        normalised: Floats = (advantage - inside.mean()) / (inside.std() + 1e-8)
        return normalised

    def _outdated(self, segments: Segments) -> bool:
        """Whether a step was made with older weights than those that learn."""
        if self.version is None and self.config.sampling == "pipelined":
            return True
        acted = segments.version[segments.valid]
        return bool((acted < self._newest(segments)).any())

    def _newest(self, segments: Segments) -> int:
        return int(segments.version[segments.valid].max()) if self.version is None else self.version

    def _corrected(self, segments: Segments) -> tuple[Batch, dict[str, float]]:
        """One pass of the current policy, which is the proximal one, over all steps: its values, and its ratio to μ."""
        now = Trajectories.of(segments).evaluated(self.policy, self.config.minibatch_size)
        valid = segments.valid
        log_ratio = np.where(valid, now.log_prob - segments.log_prob, np.float32(0))
        ratio = np.exp(np.clip(log_ratio, -20, 20))
        ends = (segments.terminated, segments.truncated, valid)
        found = vtrace(ratio, segments.reward, now.value, now.following, *ends, self.config.gamma, self.config.lambda_)
        seen = ratio[valid]
        metrics = {
            "explained_variance": explained_variance(now.value[valid], found.target[valid]),
            "rho_mean": float(seen.mean()),
            "rho_clipped": float((seen > 1 + ROUNDING).mean()),
        }
        # CartPole, mean return over 70 updates: 181 in turns; one version behind 173 clipped around the proximal policy, 163
        # around the one that acted; three behind 132 and 143: by then it swings, for want of a brake.
        near = segments.version >= self._newest(segments) - 1
        anchor = np.where(near, now.log_prob, segments.log_prob)
        # The weight is positive: it may as well stand inside the minimum of the surrogate.
        weight = np.where(near, np.minimum(ratio, np.float32(1)), np.float32(1))
        advantage = weight * self._normalised(found.advantage, valid)
        return make_batch(self.policy, replace(segments, log_prob=anchor), advantage, found.target), metrics

    # -- the loss

    def loss(self, policy: Policy, batch: Batch, entropy_coeff: float, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The clipped surrogate (eq. 7), value error and entropy bonus (eq. 9), averaged over the valid samples."""
        log_prob, entropy, value = policy.evaluate(batch.observation, batch.action, batch.mask, batch.state, batch.first)
        log_ratio = log_prob - batch.log_prob
        if batch.valid is not None:
            log_ratio = torch.where(batch.valid, log_ratio, 0.0)  # padding may hold anything
        ratio = log_ratio.exp()
        clip = self.config.clip_param
        gain = torch.min(ratio * batch.advantage, ratio.clamp(1 - clip, 1 + clip) * batch.advantage)
        error = (value - batch.target).square()
        if self.config.vf_clip_param is not None:
            error = error.clamp(max=self.config.vf_clip_param)

        mean = mean_over(batch.valid)
        policy_loss, value_loss = -mean(gain), mean(error)
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
            numbers = {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy_mean.detach(),
                "kl": kl.detach(),
                "clip_fraction": mean(((ratio - 1).abs() > clip).float()),
            }
        return loss, numbers

    # -- what a resumed run needs

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain | self.penalty.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self.penalty.load_state(plain)
