"""What algorithms that follow a gradient share: the optimizer, one guarded step, statistics, and what a resumed run needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ludus.algorithms.minibatch import D, part_of, split
from ludus.algorithms.optim.flat_adam import Optimizer
from ludus.algorithms.reward_scaling import RewardScale
from ludus.config.schema import AlgorithmConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Segments
from ludus.errors import TrainingDiverged
from ludus.models.devices import moved
from ludus.models.policy import Policy

Loss = Callable[[Policy, D], tuple[Tensor, dict[str, Tensor]]]
"""(policy, shard) → the mean loss of the shard's samples and numbers to report, which are means as well."""


class LearnerConfig(AlgorithmConfig):
    """Keys of every algorithm that follows a gradient; names as RLlib users know them."""

    lr: Schedule = Field(1e-3, description="Learning rate of Adam: a number, or points [[timestep, value], …].")
    adam_epsilon: float = Field(1e-5, gt=0, description="Epsilon of Adam.")
    grad_clip: float | None = Field(0.5, gt=0, description="Maximum gradient norm; null = unlimited.")
    num_steps_sampled_before_learning_starts: int = Field(
        0,
        ge=0,
        description="Warm-up: batches that begin before this many steps are not trained on; running statistics are updated. They count as timesteps.",
    )
    heatup_episodes: int = Field(0, ge=0, description="Warm-up by episodes: do not train until this many episodes have ended.")


class ActorCriticConfig(LearnerConfig):
    """Keys of those that learn a policy and what states are worth, from what was sampled last."""

    lambda_: float = Field(
        0.95, alias="lambda", ge=0, le=1, description="λ of GAE: 0 = one-step value estimate, 1 = full return."
    )
    vf_loss_coeff: float = Field(0.5, ge=0, description="Weight of the value loss.")
    entropy_coeff: Schedule = Field(0.0, description="Weight of the entropy bonus: a number or a schedule.")
    num_epochs: int = Field(4, ge=1, description="Epochs over each batch.")
    normalize_advantage: bool = Field(True, description="Normalise the advantages of a batch to mean 0 and standard deviation 1.")
    normalize_reward: bool = Field(False, description="Divide rewards by the running standard deviation of the return.")


class Learner:
    """Owns the optimizer and the random numbers with which one policy learns."""

    version: int | None = None
    """Of the weights that learn now, set by the trainer before `learn`; None: the newest that a batch was made with."""

    def __init__(self, policy: Policy, config: LearnerConfig, seed: int) -> None:
        self.policy = policy
        self.optimizer = Optimizer(
            policy,
            value_at(config.lr, 0),
            eps=config.adam_epsilon,
            grad_clip=config.grad_clip,
            threads=config.learner_threads,
            accumulation=config.gradient_accumulation,
            precision=config.mixed_precision,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self._heatup = (config.num_steps_sampled_before_learning_starts, config.heatup_episodes)
        self._ended = 0  # episodes before this block; counted while somebody asks

    def heating(self, segments: Segments, timestep: int) -> bool:
        """Whether a block is of the heat-up: it is not learned from. Once for every block, in their order."""
        steps, episodes = self._heatup
        if timestep == 0:  # of this run; the state may come from another one
            self._ended = 0
        before = self._ended
        if before < episodes:  # the ends that all learners of a group see
            self._ended += int(np.count_nonzero(segments.terminated | segments.truncated))
        return timestep < steps or before < episodes

    def step(self, loss: Loss[D], batch: D) -> dict[str, Tensor]:
        """One update from a minibatch; returns the means of the loss's numbers. Raises TrainingDiverged, with the batch told.

        All learners of a group call this with the same minibatch; each computes its own part.
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
        """What this learner differentiates, and the share of each shard in the mean over the whole minibatch."""
        group = self.optimizer.group
        part = batch if group.size == 1 else part_of(batch, group.rank, group.size)
        shards = [] if part is None else split(part, self.optimizer.pieces)
        samples = [shard.samples for shard in shards]
        whole = sum(samples) if group.size == 1 else batch.samples
        found = [(shard, n / whole) for shard, n in zip(shards, samples, strict=True) if n]
        if not found:  # a learner without a sample comes to the common sum all the same, with nothing
            return ([batch], [0.0]) if batch.samples else ([], [])
        return [shard for shard, _ in found], [weight for _, weight in found]

    def observe(self, segments: Segments) -> None:
        """Take the observations of the valid rows into the running statistics; after the update that learned from them."""
        if self.policy.network.norm is None:
            return
        valid: Bools = segments.valid
        seen: Tree = map_tree(lambda x: torch.from_numpy(x[: segments.spec.steps][valid]), segments.observation)
        self.policy.update_normaliser(map_tree(lambda x: moved(x, self.policy.device), seen))

    def close(self) -> None:
        self.optimizer.close()

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        plain = {"episodes_before_learning": self._ended} if self._ended else {}
        return self.optimizer.state() | {"generator": self.generator.get_state().numpy()}, plain

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        self.optimizer.load_state(arrays)
        self.generator.set_state(torch.from_numpy(arrays["generator"].copy()))
        self._ended = int(plain.get("episodes_before_learning", 0))


class ActorCritic(Learner):
    """Also owns the scale of rewards."""

    def __init__(self, policy: Policy, config: ActorCriticConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.reward_scale = RewardScale(config.gamma) if config.normalize_reward else None

    def heated(self, segments: Segments, timestep: int) -> bool:
        """True: a block of the heat-up, of which the statistics have been taken."""
        if not self.heating(segments, timestep):
            return False
        self.rewards(segments)
        self.observe(segments)
        return True

    def rewards(self, segments: Segments) -> Floats:
        """As they are learned from; call once per fresh block."""
        return segments.reward if self.reward_scale is None else self.reward_scale.scaled(segments)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        return arrays, plain if self.reward_scale is None else plain | {"reward_scale": self.reward_scale.state()}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        if self.reward_scale is not None and "reward_scale" in plain:
            self.reward_scale.load_state(plain["reward_scale"])


def means(numbers: list[dict[str, Tensor]]) -> dict[str, float]:
    """Of the numbers of several steps; those of steps that reported none are left out."""
    shown = [n for n in numbers if n]
    return {name: float(torch.stack([n[name] for n in shown]).mean()) for name in shown[-1]}
