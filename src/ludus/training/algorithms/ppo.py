"""Proximal policy optimisation (Schulman et al. 2017), for any space, with masks and recurrence.

Letters: T steps of a segment, B rows, M samples (or [L, S] for S sequences of L steps) of a minibatch.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ludus.config import AlgorithmConfig
from ludus.model.policy import Policy
from ludus.training.batch import Batch, make_batch, mean_over, minibatches
from ludus.training.learner import Learner, LearnerConfig, means
from ludus.training.returns import explained_variance, gae, successor_values
from ludus.training.schedule import value_at
from ludus.types import Segments


class PPOConfig(LearnerConfig):
    """Hyper-parameters of PPO; names as RLlib users know them."""

    clip_param: float = Field(0.2, gt=0, description="How far the probability ratio may leave 1.")
    vf_clip_param: float | None = Field(None, gt=0, description="Largest squared value error of a sample; null = unlimited.")
    kl_target: float | None = Field(None, gt=0, description="Stop the epochs once the KL divergence exceeds 1.5 × this.")
    minibatch_size: int = Field(1024, ge=1, description="Samples per gradient step.")


class PPO(Learner):
    Config: ClassVar[type[AlgorithmConfig]] = PPOConfig

    def __init__(self, policy: Policy, config: PPOConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        entropy_coeff = value_at(self.config.entropy_coeff, timestep)
        if not segments.valid.any():
            return {"epochs": 0.0}
        batch, metrics = self.prepare(segments)
        length = 1 if batch.valid is None else batch.valid.shape[0]
        size = max(1, self.config.minibatch_size // length)
        numbers: list[dict[str, Tensor]] = []
        epochs = 0
        for epoch in range(self.config.num_epochs):
            diagnose = epoch == self.config.num_epochs - 1 or self.config.kl_target is not None
            loss = partial(self.loss, entropy_coeff=entropy_coeff, diagnose=diagnose)
            numbers += [self.step(loss, minibatch) for minibatch in minibatches(batch, size, self.generator)]
            epochs += 1
            if self.config.kl_target is not None and float(numbers[-1]["kl"]) > 1.5 * self.config.kl_target:
                break
        self.observe(segments)
        metrics |= means(numbers)
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": float(epochs)}

    def prepare(self, segments: Segments) -> tuple[Batch, dict[str, float]]:
        """Advantages and targets, once per batch."""
        reward = self.rewards(segments)
        value, n = segments.value[:-1], segments.finals
        following = successor_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        ends = (segments.terminated, segments.truncated, segments.valid)
        advantage = gae(reward, value, following, *ends, self.config.gamma, self.config.lambda_)
        target, valid = advantage + value, segments.valid
        metrics = {"explained_variance": explained_variance(value[valid], target[valid])}
        if self.config.normalize_advantage:
            inside = advantage[valid]
            advantage = (advantage - inside.mean()) / (inside.std() + 1e-8)
        return make_batch(self.policy, segments, advantage, target), metrics

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
        entropy_mean = mean(entropy) if entropy_coeff or diagnose else None
        if entropy_coeff and entropy_mean is not None:
            loss = loss - entropy_coeff * entropy_mean
        if not diagnose or entropy_mean is None:
            return loss, {}
        with torch.no_grad():
            numbers = {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy_mean.detach(),
                "kl": mean((ratio - 1) - log_ratio),  # low-variance and never negative (Schulman 2020)
                "clip_fraction": mean(((ratio - 1).abs() > clip).float()),
            }
        return loss, numbers
