"""IMPALA (Espeholt et al. 2018): an actor-critic that learns from the steps of older policies, corrected by V-trace.

Letters: T steps of a segment, B rows, N valid steps of a minibatch. π is the policy that learns, μ the one that acted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.gradient_learner import ActorCritic, ActorCriticConfig, means
from ludus.algorithms.minibatch import minibatches
from ludus.algorithms.returns import ROUNDING, explained_variance, gae, successor_values, vtrace
from ludus.algorithms.trajectories import Evaluated, Trajectories
from ludus.buffers.block_replay import Replay
from ludus.config.schema import AlgorithmConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.models.policy import Policy

_MOST = 20.0  # of |log ratio|: beyond every threshold, and its exponential is still a number


class IMPALAConfig(ActorCriticConfig):
    """Hyper-parameters of IMPALA; names as RLlib users know them."""

    iteration_s: ClassVar[float] = 10.0

    sampling: Literal["sync", "pipelined", "async"] = Field(
        "async",
        description="async: workers never wait; sync: sample and learn in turn; pipelined: one version behind.",
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
class Terms:
    """What all shards of a minibatch have in common. Advantages are scaled by what is known without looking at all of them."""

    entropy_coeff: float
    centre: float = 0.0
    deviation: float = 1.0

    def scaled(self, advantage: Tensor) -> Tensor:
        return (advantage - self.centre) * (1 / self.deviation)


class IMPALA(ActorCritic):
    Config: ClassVar[type[AlgorithmConfig]] = IMPALAConfig

    def __init__(self, policy: Policy, config: IMPALAConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config
        self.replay = Replay(config.replay_buffer_num_slots, config.replay_buffer_bytes) if config.replay_proportion else None
        self._owed = 0.0  # batches that are to be learned from again
        self._drift = 0.0  # how far the mean advantage was from that by recorded values, in the latest update

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        if not segments.valid.any() or self.heated(segments, timestep):
            return {"epochs": 0.0}
        fresh = segments if self.reward_scale is None else replace(segments, reward=self.rewards(segments), cache={})
        entropy_coeff = value_at(self.config.entropy_coeff, timestep)
        terms, metrics = self._terms(fresh, entropy_coeff)
        numbers = self._update(fresh, terms)
        if self.config.normalize_advantage:
            self._drift += means(numbers)["advantage_mean"] - terms.centre
        metrics |= self._again(fresh, entropy_coeff, numbers)
        self.observe(segments)
        metrics |= means(numbers)
        epochs = float(self.config.num_epochs)
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": epochs}

    def _terms(self, segments: Segments, entropy_coeff: float) -> tuple[Terms, dict[str, float]]:
        """Mean and deviation of the advantages by the values that were recorded, which costs no pass over the batch.

        From version to version all values move in one direction, and with them the mean: by as much as in the update before.
        """
        value, n, valid = segments.value[:-1], segments.finals, segments.valid
        following = successor_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        ends = (segments.terminated, segments.truncated, valid)
        inside = gae(segments.reward, value, following, *ends, self.config.gamma, self.config.lambda_)[valid]
        known = value[valid]
        metrics = {"explained_variance": explained_variance(known, inside + known)}
        if not self.config.normalize_advantage:
            return Terms(entropy_coeff), metrics
        return Terms(entropy_coeff, float(inside.mean()) + self._drift, float(inside.std()) + 1e-8), metrics

    def _update(self, segments: Segments, terms: Terms) -> list[dict[str, Tensor]]:
        batch, loss = self.batch(segments), partial(self.loss, terms=terms)
        return [self.step(loss, part) for _ in range(self.config.num_epochs) for part in self._minibatches(batch)]

    def _again(self, fresh: Segments, entropy_coeff: float, numbers: list[dict[str, Tensor]]) -> dict[str, float]:
        """Learn from earlier batches as often as `replay_proportion` says, then keep this one."""
        if self.replay is None:
            return {}
        self._owed += self.config.replay_proportion if len(self.replay) else 0.0
        replayed = 0
        while self._owed >= 1.0:
            self._owed -= 1.0
            old = self.replay[int(torch.randint(len(self.replay), (), generator=self.generator))]
            terms, _ = self._terms(old, entropy_coeff)
            numbers += self._update(old, replace(terms, centre=0.0))  # its recorded values are too old to tell
            replayed += old.steps
        self.replay.add(fresh)
        return {"replayed": float(replayed), "replay_bytes": float(self.replay.nbytes)}

    def batch(self, segments: Segments) -> Trajectories:
        batch = Trajectories.of(segments)
        return batch.laid_out(self.policy) if self.config.num_epochs > 1 else batch

    def rows_of(self, batch: Trajectories) -> int:
        """Rows of a minibatch."""
        size = self.config.minibatch_size
        return batch.units if size is None else max(1, round(size / len(batch.valid)))

    def _minibatches(self, batch: Trajectories) -> Iterable[Trajectories]:
        rows = self.rows_of(batch)
        return [batch] if rows >= batch.units else minibatches(batch, rows, self.generator)

    # -- the loss

    def corrected(self, batch: Trajectories, ratio: Tensor, now: Evaluated) -> tuple[Tensor, Tensor]:
        """(targets, advantages) [N] by V-trace."""
        config = self.config
        ends = (batch.terminated, batch.truncated, batch.valid)
        bars = (config.vtrace_clip_rho_threshold, config.vtrace_clip_c_threshold)
        grids = (batch.grid(ratio), batch.reward, batch.grid(now.value), now.following)
        found = vtrace(*grids, *ends, config.gamma, config.lambda_, *bars)
        device = now.value.device
        return batch.flat(found.target, device), batch.flat(found.advantage, device)

    def loss(self, policy: Policy, batch: Trajectories, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """−ρ·log π·(r + γ·v' − V) + value error − entropy bonus (§4.2), averaged over the valid steps."""
        now = batch.evaluate(policy)
        with torch.no_grad():
            log_rho = bounded(now.log_prob - batch.flat(batch.log_prob, now.log_prob.device))
            rho = log_rho.exp()
            target, advantage = self.corrected(batch, rho, now)
            weighted = rho.clamp(max=self.config.vtrace_clip_pg_rho_threshold) * terms.scaled(advantage)
        policy_loss = -(weighted * now.log_prob).mean()
        value_loss = (now.value - target).square().mean()
        entropy = now.entropy.mean()
        loss = policy_loss + self.config.vf_loss_coeff * value_loss - terms.entropy_coeff * entropy
        with torch.no_grad():
            numbers = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
            numbers |= self.of_ratios(log_rho, rho) | {"advantage_mean": advantage.mean()}
        return loss, {name: number.detach() for name, number in numbers.items()}

    def of_ratios(self, log_ratio: Tensor, rho: Tensor) -> dict[str, Tensor]:
        """`log_ratio` is log π/μ, `rho` the ratio that V-trace goes by."""
        return {
            "kl": (log_ratio.expm1() - log_ratio).mean(),  # of π from μ; low-variance and never negative (Schulman 2020)
            "rho_mean": rho.mean(),
            "rho_clipped": (rho > self.config.vtrace_clip_rho_threshold + ROUNDING).float().mean(),
        }

    # -- what a resumed run needs (earlier batches are not among it: it begins to collect them anew)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain | {"advantage_drift": self._drift}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self._drift = float(plain.get("advantage_drift", 0.0))


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MOST, _MOST)
