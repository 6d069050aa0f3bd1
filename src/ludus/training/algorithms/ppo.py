"""Proximal policy optimisation (Schulman et al. 2017), for any space, with masks and recurrence.

Letters: T steps of a segment, B rows, M samples (or [L, S] for S sequences of L steps) of a minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ludus.config import AlgorithmConfig, Schedule
from ludus.errors import TrainingDiverged
from ludus.model.policy import Policy
from ludus.training.normalise import RewardScale
from ludus.training.optimizer import Optimizer
from ludus.training.returns import explained_variance, gae, successor_values
from ludus.training.schedule import value_at
from ludus.tree import Array, Tree, map_tree
from ludus.types import Bools, Floats, Segments


class PPOConfig(AlgorithmConfig):
    """Hyper-parameters of PPO; names as RLlib users know them."""

    lr: Schedule = Field(1e-3, description="Learning rate of Adam: a number, or points [[timestep, value], …].")
    lambda_: float = Field(0.95, alias="lambda", ge=0, le=1, description="GAE: 0 trusts the value, 1 the return.")
    clip_param: float = Field(0.2, gt=0, description="How far the probability ratio may leave 1.")
    vf_clip_param: float | None = Field(None, gt=0, description="Largest squared value error of a sample; null = unlimited.")
    vf_loss_coeff: float = Field(0.5, ge=0, description="Weight of the mean squared value error.")
    entropy_coeff: Schedule = Field(0.0, description="Weight of the entropy bonus: a number or a schedule.")
    kl_target: float | None = Field(None, gt=0, description="Stop the epochs once the KL divergence exceeds 1.5 × this.")
    num_epochs: int = Field(4, ge=1, description="Passes over each batch.")
    minibatch_size: int = Field(1024, ge=1, description="Samples per gradient step.")
    normalize_advantage: bool = Field(True, description="Scale advantages of a batch to mean 0, deviation 1.")
    normalize_reward: bool = Field(False, description="Divide rewards by the running deviation of the return.")
    adam_epsilon: float = Field(1e-5, gt=0, description="Epsilon of Adam.")
    grad_clip: float | None = Field(0.5, gt=0, description="Largest norm of the whole gradient; null = unlimited.")


@dataclass
class Batch:
    """What the epochs run over. Leaves are [M, …], or [L, S, …] with a state per sequence for a recurrent policy."""

    observation: Tree
    action: Tree
    mask: Tensor | None
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    valid: Tensor | None = None
    first: Tensor | None = None
    state: tuple[Tensor, ...] = ()

    def select(self, index: Tensor) -> Batch:
        """Samples of a flat batch, or sequences of a recurrent one."""
        dim = 0 if self.valid is None else 1

        def pick(x: Tensor) -> Tensor:
            return x.index_select(dim, index)

        return Batch(
            observation=map_tree(pick, self.observation),
            action=map_tree(pick, self.action),
            mask=None if self.mask is None else pick(self.mask),
            log_prob=pick(self.log_prob),
            value=pick(self.value),
            advantage=pick(self.advantage),
            target=pick(self.target),
            valid=None if self.valid is None else pick(self.valid),
            first=None if self.first is None else pick(self.first),
            state=tuple(s.index_select(0, index) for s in self.state),
        )

    @property
    def samples(self) -> int:
        return self.advantage.shape[0] if self.valid is None else int(self.valid.sum())

    def split(self, parts: int) -> list[Batch]:
        """Shards of nearly equal size, none of them empty; sequences stay whole."""
        total = self.advantage.shape[-1]
        if parts == 1 or total < 2 * parts:
            return [self]
        return [self.select(index) for index in torch.arange(total).tensor_split(parts)]


class PPO:
    Config: ClassVar[type[AlgorithmConfig]] = PPOConfig

    def __init__(self, policy: Policy, config: PPOConfig, seed: int) -> None:
        self.policy, self.config = policy, config
        self.optimizer = Optimizer(
            policy,
            value_at(config.lr, 0),
            eps=config.adam_epsilon,
            grad_clip=config.grad_clip,
            threads=config.learner_threads,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.reward_scale = RewardScale(config.gamma) if config.normalize_reward else None

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        entropy_coeff = value_at(self.config.entropy_coeff, timestep)
        if not segments.valid.any():
            return {"epochs": 0.0}
        batch, metrics = self.prepare(segments)
        diagnostics: list[dict[str, Tensor]] = []
        epochs = 0
        for epoch in range(self.config.num_epochs):
            last = epoch == self.config.num_epochs - 1
            for minibatch in self._minibatches(batch):
                diagnose = last or self.config.kl_target is not None
                diagnostics.append(self._step(minibatch, entropy_coeff, diagnose))
            epochs += 1
            if self.config.kl_target is not None and float(diagnostics[-1]["kl"]) > 1.5 * self.config.kl_target:
                break
        self.policy.update_normaliser(self._seen(segments))
        shown = [numbers for numbers in diagnostics if numbers]
        metrics |= {name: float(torch.stack([n[name] for n in shown]).mean()) for name in shown[-1]}
        return metrics | {"lr": self.optimizer.lr, "grad_norm": self.optimizer.grad_norm, "epochs": float(epochs)}

    # -- advantages and targets, once per batch

    def prepare(self, segments: Segments) -> tuple[Batch, dict[str, float]]:
        reward = segments.reward if self.reward_scale is None else self.reward_scale.scaled(segments)
        value, n = segments.value[:-1], segments.finals
        following = successor_values(segments.value, segments.final_at[:n], segments.final_value[:n])
        ends = (segments.terminated, segments.truncated, segments.valid)
        advantage = gae(reward, value, following, *ends, self.config.gamma, self.config.lambda_)
        target, valid = advantage + value, segments.valid
        metrics = {"explained_variance": explained_variance(value[valid], target[valid])}
        if self.config.normalize_advantage:
            inside = advantage[valid]
            advantage = (advantage - inside.mean()) / (inside.std() + 1e-8)
        make = self._sequences if self.policy.recurrent else self._samples
        return make(segments, advantage, target), metrics

    def _samples(self, segments: Segments, advantage: Floats, target: Floats) -> Batch:
        """All valid rows as one flat batch. Padding and reset rows never reach the loss."""
        t = segments.spec.steps
        valid = segments.valid
        keep = None if valid.all() else torch.from_numpy(np.flatnonzero(valid))

        def flat(x: Array) -> Tensor:
            tensor = torch.from_numpy(x[:t]).flatten(0, 1)
            return tensor if keep is None else tensor.index_select(0, keep)

        return Batch(
            observation=self.policy.arranged(map_tree(flat, segments.observation)),
            action=map_tree(flat, segments.action),
            mask=flat(segments.action_mask) if segments.spec.mask_size else None,
            log_prob=flat(segments.log_prob),
            value=flat(segments.value),
            advantage=flat(advantage),
            target=flat(target),
        )

    def _sequences(self, segments: Segments, advantage: Floats, target: Floats) -> Batch:
        """Segments cut into sequences of `state_every` steps, each with the recurrent state it began in."""
        length, count, b = segments.spec.state_every, segments.spec.states, segments.rows

        t, missing = segments.spec.steps, length * count - segments.spec.steps

        def cut(x: Array) -> Tensor:
            seen = np.where(segments.valid.reshape(t, b, *[1] * (x.ndim - 2)), x[:t], np.zeros((), x.dtype))
            if missing:  # the last sequence is shorter than the others
                seen = np.concatenate([seen, np.zeros((missing, *seen.shape[1:]), seen.dtype)])
            sequences: Tensor = torch.from_numpy(seen).unflatten(0, (count, length)).transpose(0, 1)
            return sequences.flatten(1, 2)  # [L, count·B, …]; what is not valid is 0

        batch = Batch(
            observation=self.policy.arranged(map_tree(cut, segments.observation)),
            action=map_tree(cut, segments.action),
            mask=cut(segments.action_mask) if segments.spec.mask_size else None,
            log_prob=cut(segments.log_prob),
            value=cut(segments.value),
            advantage=cut(advantage),
            target=cut(target),
            valid=cut(segments.valid),
            first=cut(segments.first),
            state=tuple(torch.from_numpy(s.reshape(count * b, *s.shape[2:])) for s in segments.state),
        )
        assert batch.valid is not None
        return batch.select(torch.nonzero(batch.valid.any(dim=0)).squeeze(1))

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        """A random partition into parts of equal size, as near to `minibatch_size` samples as that allows."""
        total = batch.advantage.shape[-1]
        size = self.config.minibatch_size
        if batch.valid is not None:
            size = max(1, size // batch.valid.shape[0])
        order = torch.randperm(total, generator=self.generator)
        for index in order.tensor_split(max(1, round(total / size))):
            yield batch.select(index)

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

        mean = _mean_over(batch.valid)
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

    def _step(self, batch: Batch, entropy_coeff: float, diagnose: bool) -> dict[str, Tensor]:
        def loss(policy: Policy, shard: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return self.loss(policy, shard, entropy_coeff, diagnose)

        shards = batch.split(self.optimizer.threads)
        samples = [shard.samples for shard in shards]
        try:
            return self.optimizer.step(loss, shards, [n / sum(samples) for n in samples])
        except TrainingDiverged as error:
            raise TrainingDiverged(
                f"{error.message} {_describe(batch)}",
                "Lower lr, set grad_clip, or look for extreme observations and rewards.",
            ) from error

    def _seen(self, segments: Segments) -> Tree:
        """Observations of the valid rows [N, …], for the running statistics."""
        if self.policy.network.norm is None:
            return ()
        valid: Bools = segments.valid
        return map_tree(lambda x: torch.from_numpy(x[: segments.spec.steps][valid]), segments.observation)

    def close(self) -> None:
        self.optimizer.close()

    # -- what a resumed run needs

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays = self.optimizer.state() | {"generator": self.generator.get_state().numpy()}
        return arrays, {} if self.reward_scale is None else {"reward_scale": self.reward_scale.state()}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        self.optimizer.load_state(arrays)
        self.generator.set_state(torch.from_numpy(arrays["generator"].copy()))
        if self.reward_scale is not None and "reward_scale" in plain:
            self.reward_scale.load_state(plain["reward_scale"])


def _mean_over(valid: Tensor | None) -> Any:
    if valid is None:
        return torch.mean
    count = valid.sum().clamp(min=1)
    return lambda x: torch.where(valid, x, 0.0).sum() / count


def _describe(batch: Batch) -> str:
    parts = []
    for name in ("advantage", "target", "value", "log_prob"):
        x: Tensor = getattr(batch, name)
        bad = int((~torch.isfinite(x)).sum())
        parts.append(
            f"{name} min {float(x.min()):.3g} mean {float(x.mean()):.3g} max {float(x.max()):.3g}"
            + (f" ({bad} not finite)" if bad else "")
        )
    return "Batch: " + "; ".join(parts) + "."
