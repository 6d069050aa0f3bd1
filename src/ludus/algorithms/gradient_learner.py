"""Base classes of gradient-based algorithms: optimizer, gradient step, warm-up, running statistics, checkpoint state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.minibatch import D, rank_part, split
from ludus.algorithms.optim.flat_adam import FlatAdam
from ludus.config.schema import AlgorithmConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Segments
from ludus.errors import TrainingDiverged
from ludus.models.devices import to_device
from ludus.models.policy import Policy

if TYPE_CHECKING:
    from ludus.algorithms.reward_scaling import RewardScale

Loss = Callable[[Policy, D], tuple[Tensor, dict[str, Tensor]]]
"""(policy, shard) → mean loss over the shard's samples, and metrics that are means over the same samples."""


class GradientLearnerConfig(AlgorithmConfig):
    """Keys of every gradient-based algorithm, named as in RLlib."""

    lr: Schedule = Field(1e-3, description="Learning rate of Adam: a number, or points [[timestep, value], …].")
    adam_epsilon: float = Field(1e-5, gt=0, description="Epsilon of Adam.")
    grad_clip: float | None = Field(0.5, gt=0, description="Maximum gradient norm; null = unlimited.")
    num_steps_sampled_before_learning_starts: int = Field(
        0,
        ge=0,
        description="Warm-up: batches that begin before this many steps are not trained on; running statistics are updated. They count as timesteps.",
    )
    heatup_episodes: int = Field(0, ge=0, description="Warm-up by episodes: do not train until this many episodes have ended.")


class ActorCriticConfig(GradientLearnerConfig):
    """Keys of the actor-critic algorithms."""

    lambda_: float = Field(
        0.95, alias="lambda", ge=0, le=1, description="λ of GAE: 0 = one-step value estimate, 1 = full return."
    )
    vf_loss_coeff: float = Field(0.5, ge=0, description="Weight of the value loss.")
    entropy_coeff: Schedule = Field(0.0, description="Weight of the entropy bonus: a number or a schedule.")
    num_epochs: int = Field(4, ge=1, description="Epochs over each batch.")
    normalize_advantage: bool = Field(True, description="Normalise the advantages of a batch to mean 0 and standard deviation 1.")
    normalize_reward: bool = Field(False, description="Divide rewards by the running standard deviation of the return.")


class GradientLearner:
    """Owns the optimizer and the random generator of one policy."""

    version: int | None = None
    """Version of the weights being updated, set by the trainer before `learn`. None: the newest version in the batch."""

    def __init__(self, policy: Policy, config: GradientLearnerConfig, seed: int) -> None:
        self.policy = policy
        self.optimizer = FlatAdam(
            policy,
            value_at(config.lr, 0),
            eps=config.adam_epsilon,
            grad_clip=config.grad_clip,
            threads=config.learner_threads,
            accumulation=config.gradient_accumulation,
            precision=config.mixed_precision,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self._warmup = (config.num_steps_sampled_before_learning_starts, config.heatup_episodes)
        self._warmup_episodes = 0  # episodes that ended before this block; counted only during the warm-up

    def in_warmup(self, segments: Segments, timestep: int) -> bool:
        """Return whether the block belongs to the warm-up, which is not learned from. Call once per block, in order."""
        steps, episodes = self._warmup
        if timestep == 0:  # a new run; the loaded state may come from another one
            self._warmup_episodes = 0
        before = self._warmup_episodes
        if before < episodes:  # counted from the flags, which are the same for all learners of a group
            self._warmup_episodes += int(np.count_nonzero(segments.terminated | segments.truncated))
        return timestep < steps or before < episodes

    def step(self, loss: Loss[D], batch: D) -> dict[str, Tensor]:
        """Update once from a minibatch and return the mean metrics. Raises TrainingDiverged with a description of the batch.

        All learners of a group call this with the same minibatch; each differentiates its part.
        """
        shards, weights = self._shards(batch)
        if not shards:
            return {}
        try:
            return self.optimizer.step(loss, shards, weights)
        except TrainingDiverged as error:
            raise TrainingDiverged(
                f"{error.message} {batch.describe()}",
                "Lower lr, set grad_clip, or look for extreme observations and rewards.",
            ) from error

    def _shards(self, batch: D) -> tuple[list[D], list[float]]:
        """Return the shards that this learner differentiates, and the weight of each in the mean over the whole minibatch."""
        group = self.optimizer.group
        part = batch if group.size == 1 else rank_part(batch, group.rank, group.size)
        shards = [] if part is None else split(part, self.optimizer.max_shards)
        samples = [shard.samples for shard in shards]
        total = sum(samples) if group.size == 1 else batch.samples
        weighted = [(shard, n / total) for shard, n in zip(shards, samples, strict=True) if n]
        if not weighted:  # a learner without samples still takes part in the all-reduce, with weight 0
            return ([batch], [0.0]) if batch.samples else ([], [])
        return [shard for shard, _ in weighted], [weight for _, weight in weighted]

    def update_observation_statistics(self, segments: Segments) -> None:
        """Add the valid observations to the running statistics. Call after the update that learned from them."""
        if self.policy.network.norm is None:
            return
        valid: Bools = segments.valid
        observation: Tree = map_tree(lambda x: torch.from_numpy(x[: segments.spec.steps][valid]), segments.observation)
        self.policy.update_normaliser(map_tree(lambda x: to_device(x, self.policy.device), observation))

    def close(self) -> None:
        self.optimizer.close()

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        plain = {"episodes_before_learning": self._warmup_episodes} if self._warmup_episodes else {}
        return self.optimizer.state() | {"generator": self.generator.get_state().numpy()}, plain

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        self.optimizer.load_state(arrays)
        self.generator.set_state(torch.from_numpy(arrays["generator"].copy()))
        self._warmup_episodes = int(plain.get("episodes_before_learning", 0))


class ActorCritic(GradientLearner):
    """A GradientLearner with optional reward scaling."""

    def __init__(self, policy: Policy, config: ActorCriticConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.reward_scale: RewardScale | None = None
        if config.normalize_reward:
            from ludus.algorithms.reward_scaling import RewardScale

            self.reward_scale = RewardScale(config.gamma)

    def skip_warmup(self, segments: Segments, timestep: int) -> bool:
        """Return True for a block of the warm-up, after updating the running statistics from it."""
        if not self.in_warmup(segments, timestep):
            return False
        self.scale_rewards(segments)
        self.update_observation_statistics(segments)
        return True

    def scale_rewards(self, segments: Segments) -> Floats:
        """Return the rewards to learn from. Call once per new block: it updates the running statistics."""
        return segments.reward if self.reward_scale is None else self.reward_scale.scale(segments)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain if self.reward_scale is None else plain | {"reward_scale": self.reward_scale.state()}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        if self.reward_scale is not None and "reward_scale" in plain:
            self.reward_scale.load_state(plain["reward_scale"])


def mean_metrics(steps: list[dict[str, Tensor]]) -> dict[str, float]:
    """Average the metrics of several gradient steps; steps without metrics are left out."""
    reported = [step for step in steps if step]
    return {name: float(torch.stack([step[name] for step in reported]).mean()) for name in reported[-1]}
