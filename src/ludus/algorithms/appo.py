"""APPO, asynchronous PPO (Luo et al. 2020, IMPACT): a clipped surrogate around a target policy, corrected by V-trace.

Three policies: μ is the behaviour policy, π_t the target policy (updated periodically), π the learned policy. V-trace and the
importance weight use π_t / μ; the surrogate is clipped in π / π_t. Hilton et al. 2021 call π_t the proximal policy.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.impala import IMPALA, IMPALAConfig, LossCoefficients, clamp_log_ratio
from ludus.algorithms.kl_penalty import KLPenalty
from ludus.algorithms.trajectories import Trajectories
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy

_EVALUATION_SAMPLES = 2048  # per chunk of a pass without gradients: bounds its memory


class APPOConfig(IMPALAConfig):
    """Hyper-parameters of APPO, named as in RLlib."""

    lambda_: float = Field(
        0.95, alias="lambda", ge=0, le=1, description="λ of V-trace: 0 = one-step value estimate, 1 = full return."
    )
    vtrace: bool = Field(
        True, description="Correct for policy lag with V-trace; false = GAE with the ratio to the behaviour policy clipped."
    )
    clip_param: float = Field(0.3, gt=0, description="Clip range of the probability ratio to the target policy.")
    use_kl_loss: bool = Field(False, description="Also penalise the KL divergence from the target policy.")
    kl_coeff: float = Field(1.0, ge=0, description="Initial weight of the KL penalty.")
    kl_target: float = Field(0.01, gt=0, description="Target KL divergence; the penalty weight adapts towards it.")
    target_network_update_freq: int = Field(
        1, ge=1, description="Updates between two refreshes of the target policy; 1 = the policy at the start of each update."
    )
    tau: float = Field(1.0, gt=0, le=1, description="Fraction by which a refresh moves the target towards the policy.")


class APPO(IMPALA):
    Config: ClassVar[type[AlgorithmConfig]] = APPOConfig
    config: APPOConfig

    def __init__(self, policy: Policy, config: APPOConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        # With a frequency of 1 the target is the policy at the start of each update: no copy is needed.
        needs_copy = config.vtrace and (config.target_network_update_freq > 1 or config.tau < 1)
        self.target = copy.deepcopy(policy).requires_grad_(False) if needs_copy else None
        self._target_age = 0  # updates since the target was updated
        self.penalty = KLPenalty(config.kl_coeff if config.use_kl_loss else 0.0, config.kl_target)

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        if self.target is not None and self._target_age >= self.config.target_network_update_freq:
            self._update_target(self.target)
        metrics = super().learn(segments, timestep)
        self._target_age += 1
        if self.config.use_kl_loss and "target_kl" in metrics:
            self.penalty.adapt(metrics["target_kl"])
            metrics["kl_coeff"] = self.penalty.coeff
        return metrics

    @torch.no_grad()
    def _update_target(self, target: Policy) -> None:
        for target_parameter, parameter in zip(target.parameters(), self.policy.parameters(), strict=True):
            target_parameter.lerp_(parameter, self.config.tau)
        for target_buffer, buffer in zip(target.buffers(), self.policy.buffers(), strict=True):
            target_buffer.copy_(buffer)
        self._target_age = 0

    def batch(self, segments: Segments) -> Trajectories:
        """Add the log-probabilities of π_t, unless they equal those of the single pass that `loss` makes over the batch."""
        batch = super().batch(segments)
        if not self.config.vtrace:
            return replace(batch, anchor=batch.log_prob)
        single_pass = self.config.num_epochs == 1 and self.minibatch_rows(batch) >= batch.units
        if self.target is None and single_pass:
            return batch
        target = self.policy if self.target is None else self.target
        return replace(batch, anchor=batch.evaluate_grids(target, _EVALUATION_SAMPLES).log_prob)

    # -- the loss

    def loss(self, policy: Policy, batch: Trajectories, coefficients: LossCoefficients) -> tuple[Tensor, dict[str, Tensor]]:
        """Surrogate clipped around π_t, weighted by min(ρ̄, π_t/μ); value error against V-trace targets; entropy bonus."""
        now, clip = batch.evaluate(policy), self.config.clip_param
        device = now.log_prob.device
        with torch.no_grad():
            behaviour = batch.flat(batch.log_prob, device)
            anchor = now.log_prob.detach() if batch.anchor is None else batch.flat(batch.anchor, device)
            rho = clamp_log_ratio(anchor - behaviour).exp()
            target, advantage = self.vtrace_targets(batch, rho, now)
            weighted = rho.clamp(max=self.config.vtrace_clip_pg_rho_threshold) * coefficients.normalize(advantage)
        log_ratio = clamp_log_ratio(now.log_prob - anchor)
        ratio = log_ratio.exp()
        surrogate = torch.min(ratio * weighted, ratio.clamp(1 - clip, 1 + clip) * weighted)
        target_kl = ((ratio - 1) - log_ratio).mean()
        policy_loss, entropy = -surrogate.mean(), now.entropy.mean()
        value_loss = (now.value - target).square().mean()
        loss = policy_loss + self.config.vf_loss_coeff * value_loss - coefficients.entropy_coeff * entropy
        if self.penalty.coeff:
            loss = loss + self.penalty.coeff * target_kl
        with torch.no_grad():
            metrics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            metrics |= self.ratio_metrics(clamp_log_ratio(now.log_prob - behaviour), rho)
            metrics |= {"target_kl": target_kl, "advantage_mean": advantage.mean()}
            metrics["clip_fraction"] = ((ratio - 1).abs() > clip).float().mean()
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    # -- checkpoint state

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        if self.target is not None:
            arrays |= {f"target.{name}": value for name, value in self.target.weights().items()}
        return arrays, plain | {"target_age": self._target_age} | self.penalty.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        if self.target is not None:
            saved = {name.removeprefix("target."): value for name, value in arrays.items() if name.startswith("target.")}
            # The state of a run without a target copy: start from the policy, whose weights are already loaded.
            self.target.load_weights(saved or self.policy.weights())
        self._target_age = int(plain.get("target_age", 0))
        self.penalty.load_state(plain)
