"""APPO: asynchronous PPO. The clipped surrogate around a target policy, on steps of older ones, corrected by V-trace.

Three policies: μ acted, π_t is the target, refreshed now and then, π learns. V-trace and the weight of a step go by
π_t / μ; the surrogate is clipped in π / π_t (Luo et al. 2020, IMPACT; Hilton et al. 2021 call π_t the proximal policy).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.impala import IMPALA, IMPALAConfig, Terms, bounded
from ludus.algorithms.kl_penalty import KLPenalty
from ludus.algorithms.trajectories import Trajectories
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy

_PASS = 2048  # samples at a time in a pass without gradients: bounds its memory


class APPOConfig(IMPALAConfig):
    """Hyper-parameters of APPO; names as RLlib users know them."""

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
        # With a frequency of 1 the target is the policy before the first step of an update: no copy is needed.
        kept = config.vtrace and (config.target_network_update_freq > 1 or config.tau < 1)
        self.target = _frozen(policy) if kept else None
        self._age = 0  # updates since the target was refreshed
        self.penalty = KLPenalty(config.kl_coeff if config.use_kl_loss else 0.0, config.kl_target)

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        if self.target is not None and self._age >= self.config.target_network_update_freq:
            self._refresh(self.target)
        metrics = super().learn(segments, timestep)
        self._age += 1
        if self.config.use_kl_loss and "target_kl" in metrics:
            self.penalty.adapt(metrics["target_kl"])
            metrics["kl_coeff"] = self.penalty.coeff
        return metrics

    @torch.no_grad()
    def _refresh(self, target: Policy) -> None:
        for mine, theirs in zip(target.parameters(), self.policy.parameters(), strict=True):
            mine.lerp_(theirs, self.config.tau)
        for kept, now in zip(target.buffers(), self.policy.buffers(), strict=True):
            kept.copy_(now)
        self._age = 0

    def batch(self, segments: Segments) -> Trajectories:
        """With the target's log-probabilities, where they are not those of the first and only pass over the batch."""
        batch = super().batch(segments)
        if not self.config.vtrace:
            return replace(batch, anchor=batch.log_prob)
        once = self.config.num_epochs == 1 and self.rows_of(batch) >= batch.units
        if self.target is None and once:
            return batch
        target = self.policy if self.target is None else self.target
        return replace(batch, anchor=batch.evaluated(target, _PASS).log_prob)

    # -- the loss

    def loss(self, policy: Policy, batch: Trajectories, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """The surrogate around the target policy, weighted by min(ρ̄, π_t/μ); value error against V-trace; entropy bonus."""
        now, clip = batch.evaluate(policy), self.config.clip_param
        device = now.log_prob.device
        with torch.no_grad():
            acted = batch.flat(batch.log_prob, device)
            anchor = now.log_prob.detach() if batch.anchor is None else batch.flat(batch.anchor, device)
            rho = bounded(anchor - acted).exp()
            target, advantage = self.corrected(batch, rho, now)
            weighted = rho.clamp(max=self.config.vtrace_clip_pg_rho_threshold) * terms.scaled(advantage)
        log_ratio = bounded(now.log_prob - anchor)
        ratio = log_ratio.exp()
        gain = torch.min(ratio * weighted, ratio.clamp(1 - clip, 1 + clip) * weighted)
        divergence = ((ratio - 1) - log_ratio).mean()
        policy_loss, entropy = -gain.mean(), now.entropy.mean()
        value_loss = (now.value - target).square().mean()
        loss = policy_loss + self.config.vf_loss_coeff * value_loss - terms.entropy_coeff * entropy
        if self.penalty.coeff:
            loss = loss + self.penalty.coeff * divergence
        with torch.no_grad():
            numbers = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            numbers |= self.of_ratios(bounded(now.log_prob - acted), rho)
            numbers |= {"target_kl": divergence, "advantage_mean": advantage.mean()}
            numbers["clip_fraction"] = ((ratio - 1).abs() > clip).float().mean()
        return loss, {name: number.detach() for name, number in numbers.items()}

    # -- what a resumed run needs

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        if self.target is not None:
            arrays |= {f"target.{name}": value for name, value in self.target.weights().items()}
        return arrays, plain | {"target_age": self._age} | self.penalty.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        if self.target is not None:
            kept = {name.removeprefix("target."): value for name, value in arrays.items() if name.startswith("target.")}
            # A run that had no target of its own begins one from the policy, which has been loaded before this.
            self.target.load_weights(kept or self.policy.weights())
        self._age = int(plain.get("target_age", 0))
        self.penalty.load_state(plain)


def _frozen(policy: Policy) -> Policy:
    return copy.deepcopy(policy).requires_grad_(False)
