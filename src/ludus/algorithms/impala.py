"""IMPALA (Espeholt et al. 2018): an off-policy actor-critic, corrected by V-trace.

Shapes: T steps of a segment, B rows, N valid steps of a minibatch. π is the learned policy, μ the behaviour policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.gradient_learner import ActorCritic, ActorCriticConfig, mean_metrics
from ludus.algorithms.minibatch import minibatches
from ludus.algorithms.returns import ROUNDING, StepFlags, VTraceClip, explained_variance, gae, next_values, vtrace
from ludus.algorithms.trajectories import PolicyEvaluation, Trajectories
from ludus.buffers.block_replay import BlockReplay
from ludus.config.schema import AlgorithmConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy

_MAX_LOG_RATIO = 20.0  # beyond every clip threshold, with a finite exponential


class IMPALAConfig(ActorCriticConfig):
    """Hyper-parameters of IMPALA, named as in RLlib."""

    iteration_s: ClassVar[float] = 10.0

    sampling: Literal["sync", "pipelined", "async"] = Field(
        "async", description="async: workers never wait; sync: sample and learn in turn; pipelined: one version behind."
    )
    max_lag: int | None = Field(
        32, ge=1, description="Drop (and count) experience older than this many updates; null = keep all."
    )
    lr: Schedule = Field(5e-4, description="Learning rate of Adam: a number, or points [[timestep, value], …].")
    train_batch_size: int = Field(1024, ge=1, description="Environment steps per update.")
    lambda_: float = Field(
        1.0, alias="lambda", ge=0, le=1, description="λ of V-trace: 0 = one-step value estimate, 1 = full return."
    )
    entropy_coeff: Schedule = Field(0.01, description="Weight of the entropy bonus: a number or a schedule.")
    num_epochs: int = Field(1, ge=1, description="Epochs over each batch.")
    minibatch_size: int | None = Field(
        None, ge=1, description="Samples per gradient step, rounded to whole segments; null = the whole batch."
    )
    grad_clip: float | None = Field(1.0, gt=0, description="Maximum gradient norm; null = unlimited.")
    vtrace_clip_rho_threshold: float = Field(1.0, gt=0, description="V-trace ρ̄: clip of the importance weight of the TD error.")
    vtrace_clip_c_threshold: float = Field(1.0, gt=0, description="V-trace c̄: clip of the trace coefficients.")
    vtrace_clip_pg_rho_threshold: float = Field(1.0, gt=0, description="Clip of the importance weight in the policy gradient.")
    replay_proportion: float = Field(0.0, ge=0, description="Replayed batches per new batch.")
    replay_buffer_num_slots: int = Field(100, ge=1, description="Number of batches kept for replay.")
    replay_buffer_bytes: int = Field(1 << 30, ge=1, description="Memory limit of the batches kept for replay.")


@dataclass(frozen=True)
class LossCoefficients:
    """Values of the loss that are the same for all shards of a batch."""

    entropy_coeff: float
    advantage_mean: float = 0.0
    advantage_std: float = 1.0

    def normalize(self, advantage: Tensor) -> Tensor:
        return (advantage - self.advantage_mean) * (1 / self.advantage_std)


class IMPALA(ActorCritic):
    Config: ClassVar[type[AlgorithmConfig]] = IMPALAConfig

    def __init__(self, policy: Policy, config: IMPALAConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config
        self.replay = (
            BlockReplay(config.replay_buffer_num_slots, config.replay_buffer_bytes) if config.replay_proportion else None
        )
        self._replays_due = 0.0  # batches still to be replayed
        self._advantage_drift = 0.0  # V-trace mean advantage minus that of the recorded values, in the latest update

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        if not segments.valid.any() or self.skip_warmup(segments, timestep):
            return {"epochs": 0.0}
        scaled = segments if self.reward_scale is None else replace(segments, reward=self.scale_rewards(segments), cache={})
        entropy_coeff = value_at(self.config.entropy_coeff, timestep)
        coefficients, metrics = self._coefficients(scaled, entropy_coeff)
        steps = self._update(scaled, coefficients)
        if self.config.normalize_advantage:
            self._advantage_drift += mean_metrics(steps)["advantage_mean"] - coefficients.advantage_mean
        metrics |= self._replay_batches(scaled, entropy_coeff, steps)
        self.update_observation_statistics(segments)
        metrics |= mean_metrics(steps)
        epochs = float(self.config.num_epochs)
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": epochs}

    def _coefficients(self, segments: Segments, entropy_coeff: float) -> tuple[LossCoefficients, dict[str, float]]:
        """Compute mean and standard deviation of the advantages from the recorded values, without a pass over the batch.

        The mean is corrected by the drift of the previous update: values move in one direction from version to version.
        """
        value, n, valid = segments.value[:-1], segments.finals, segments.valid
        next_value = next_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        flags = StepFlags.of(segments)
        advantage = gae(segments.reward, value, next_value, flags, self.config.gamma, self.config.lambda_)[valid]
        recorded = value[valid]
        metrics = {"explained_variance": explained_variance(recorded, advantage + recorded)}
        if not self.config.normalize_advantage:
            return LossCoefficients(entropy_coeff), metrics
        mean, std = float(advantage.mean()) + self._advantage_drift, float(advantage.std()) + 1e-8
        return LossCoefficients(entropy_coeff, mean, std), metrics

    def _update(self, segments: Segments, coefficients: LossCoefficients) -> list[dict[str, Tensor]]:
        batch, loss = self.batch(segments), partial(self.loss, coefficients=coefficients)
        rows, steps = self.minibatch_rows(batch), list[dict[str, Tensor]]()
        for _ in range(self.config.num_epochs):
            parts = [batch] if rows >= batch.units else minibatches(batch, rows, self.generator)
            steps += [self.step(loss, part) for part in parts]
        return steps

    def _replay_batches(self, segments: Segments, entropy_coeff: float, steps: list[dict[str, Tensor]]) -> dict[str, float]:
        """Learn from `replay_proportion` earlier batches, appending to `steps`, then keep this one."""
        if self.replay is None:
            return {}
        self._replays_due += self.config.replay_proportion if len(self.replay) else 0.0
        replayed = 0
        while self._replays_due >= 1.0:
            self._replays_due -= 1.0
            old = self.replay[int(torch.randint(len(self.replay), (), generator=self.generator))]
            coefficients, _ = self._coefficients(old, entropy_coeff)
            steps += self._update(old, replace(coefficients, advantage_mean=0.0))  # its recorded values are too old
            replayed += old.steps
        self.replay.add(segments)
        return {"replayed": float(replayed), "replay_bytes": float(self.replay.nbytes)}

    def batch(self, segments: Segments) -> Trajectories:
        batch = Trajectories.from_segments(segments)
        return batch.to_network_layout(self.policy) if self.config.num_epochs > 1 else batch

    def minibatch_rows(self, batch: Trajectories) -> int:
        """Return the number of rows per minibatch."""
        size = self.config.minibatch_size
        return batch.units if size is None else max(1, round(size / len(batch.valid)))

    # -- the loss

    def vtrace_targets(self, batch: Trajectories, ratio: Tensor, now: PolicyEvaluation) -> tuple[Tensor, Tensor]:
        """Return the V-trace value targets and advantages, each [N]."""
        config = self.config
        flags = StepFlags(batch.terminated, batch.truncated, batch.valid)
        clip = VTraceClip(config.vtrace_clip_rho_threshold, config.vtrace_clip_c_threshold)
        grids = (batch.grid(ratio), batch.reward, batch.grid(now.value), now.next_value)
        corrected = vtrace(*grids, flags, config.gamma, config.lambda_, clip)
        device = now.value.device
        return batch.flat(corrected.target, device), batch.flat(corrected.advantage, device)

    def loss(self, policy: Policy, batch: Trajectories, coefficients: LossCoefficients) -> tuple[Tensor, dict[str, Tensor]]:
        """−ρ·log π·(r + γ·v' − V) + value error − entropy bonus (§4.2), averaged over the valid steps."""
        now = batch.evaluate(policy)
        with torch.no_grad():
            log_rho = clamp_log_ratio(now.log_prob - batch.flat(batch.log_prob, now.log_prob.device))
            rho = log_rho.exp()
            target, advantage = self.vtrace_targets(batch, rho, now)
            weighted = rho.clamp(max=self.config.vtrace_clip_pg_rho_threshold) * coefficients.normalize(advantage)
        policy_loss = -(weighted * now.log_prob).mean()
        value_loss = (now.value - target).square().mean()
        entropy = now.entropy.mean()
        loss = policy_loss + self.config.vf_loss_coeff * value_loss - coefficients.entropy_coeff * entropy
        with torch.no_grad():
            metrics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            metrics |= self.ratio_metrics(log_rho, rho) | {"advantage_mean": advantage.mean()}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def ratio_metrics(self, log_ratio: Tensor, rho: Tensor) -> dict[str, Tensor]:
        """`log_ratio` is log π/μ, `rho` the ratio used by V-trace."""
        return {
            "kl": (log_ratio.expm1() - log_ratio).mean(),  # KL of π from μ: low variance, never negative (Schulman 2020)
            "rho_mean": rho.mean(),
            "rho_clipped": (rho > self.config.vtrace_clip_rho_threshold + ROUNDING).float().mean(),
        }

    # -- checkpoint state (without the replayed batches: a resumed run collects new ones)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain | {"advantage_drift": self._advantage_drift}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self._advantage_drift = float(plain.get("advantage_drift", 0.0))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
