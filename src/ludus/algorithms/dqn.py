"""DQN (Mnih et al. 2015), optionally double (van Hasselt et al. 2016), dueling (Wang et al. 2016), with n-step returns and
prioritized replay (Schaul et al. 2016).

Shapes: N transitions of a minibatch, A actions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from ludus.algorithms.gradient_learner import GradientLearner, GradientLearnerConfig, mean_metrics
from ludus.algorithms.minibatch import describe_tensors
from ludus.algorithms.target_network import TargetNetwork
from ludus.buffers.prioritized_replay import Priorities, TransitionBatch, TransitionReplay
from ludus.buffers.sum_tree import Doubles
from ludus.config.batch_shape import REPLAYED_STEPS
from ludus.config.schema import AlgorithmConfig, ModelConfig, ReplayBufferConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.spaces import array_spec
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Segments
from ludus.models.devices import to_device
from ludus.models.distributions import EpsilonGreedy
from ludus.models.policy import VALUES, Policy

log = logging.getLogger(__name__)

_REPLAY_PREFIX = "replay/"
_TRAIN_BATCH_SIZE = 32


def _check_probability(schedule: Any) -> Any:
    if max([value for _, value in schedule] if isinstance(schedule, list) else [schedule]) > 1:
        raise ValueError("a probability is at most 1")
    return schedule


class DQNConfig(GradientLearnerConfig):
    """Hyper-parameters of DQN, named as in RLlib."""

    learns: ClassVar[str] = VALUES
    replays: ClassVar[bool] = True
    report_s: ClassVar[float] = 0.5
    iteration_timesteps: ClassVar[int] = 1000

    sampling: Literal["sync", "pipelined", "async"] = Field(
        "async", description="async: workers never wait; sync: sample and learn in turn; pipelined: one version behind."
    )
    num_envs_per_worker: int = Field(8, ge=1, description="Environments stepped together by each worker.")
    rollout_fragment_length: int | None = Field(
        REPLAYED_STEPS, ge=1, description="Steps of every environment between two updates."
    )
    train_batch_size: int = Field(_TRAIN_BATCH_SIZE, ge=1, description="Samples per gradient step.")
    training_intensity: float = Field(
        _TRAIN_BATCH_SIZE / REPLAYED_STEPS,
        gt=0,
        description="Trained steps per sampled step. null, or omitted when train_batch_size or rollout_fragment_length is set: "
        "train_batch_size / (rollout_fragment_length × num_envs_per_worker × num_workers), where the last two count as 1 if "
        "they are not set.",
    )
    num_steps_sampled_before_learning_starts: int = Field(
        1000, ge=0, description="Warm-up: steps stored before the first update; actions follow epsilon."
    )
    heatup_episodes: int = Field(
        0, ge=0, description="Warm-up by episodes: number of episodes that must have ended before the first update."
    )
    replay_buffer_config: ReplayBufferConfig = Field(default_factory=ReplayBufferConfig, description="Replay buffer settings.")
    store_buffer_in_checkpoints: bool = Field(
        False, description="Save the replay buffer in checkpoints; otherwise a resumed run refills it before it learns."
    )
    epsilon: Annotated[Schedule, AfterValidator(_check_probability)] = Field(
        [(0, 1.0), (10_000, 0.05)], description="Exploration: probability ε of a random action, a number or a schedule."
    )
    lr: Schedule = Field(5e-4, description="Learning rate of Adam: a number, or points [[timestep, value], …].")
    adam_epsilon: float = Field(1e-8, gt=0, description="Epsilon of Adam.")
    grad_clip: float | None = Field(40.0, gt=0, description="Maximum gradient norm; null = unlimited.")
    target_network_update_freq: int = Field(500, ge=1, description="Sampled steps between two updates of the target network.")
    tau: float = Field(1.0, gt=0, le=1, description="Fraction by which an update moves the target network; 1 = copy.")
    n_step: int = Field(1, ge=1, le=64, description="n of n-step returns.")
    double_q: bool = Field(
        True, description="Double DQN: the online network chooses the next action, the target network evaluates it."
    )
    dueling: bool = Field(True, description="Dueling network: separate state value and action advantages.")
    hiddens: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="Dense layers after those of `model:`; two sets of them if dueling."
    )
    td_error_loss_fn: Literal["huber", "mse"] = Field("huber", description="Loss of the TD error: mse or huber.")

    @model_validator(mode="before")
    @classmethod
    def _default_training_intensity(cls, data: Any) -> Any:
        """RLlib's default: one minibatch per round of all workers, each with one environment unless configured otherwise.

        Applied before validation because a saved configuration contains every key and its number of workers may change.
        """
        if not isinstance(data, dict) or data.get("training_intensity") is not None:
            return data
        if not data.keys() & {"training_intensity", "train_batch_size", "rollout_fragment_length"}:
            return data
        others = {key: value for key, value in data.items() if key != "training_intensity"}
        workers = data.get("num_workers", 0)
        try:
            steps = int(data.get("rollout_fragment_length") or REPLAYED_STEPS) * int(data.get("num_envs_per_worker", 1))
            natural = int(data.get("train_batch_size", _TRAIN_BATCH_SIZE)) / (
                steps * max(1, 0 if workers == "auto" else int(workers))
            )
        except (TypeError, ValueError, ArithmeticError):
            return others  # the validation of the wrong field reports it
        return others | {"training_intensity": natural} if natural > 0 else others

    @field_validator("model")
    @classmethod
    def _reject_recurrent_model(cls, model: ModelConfig) -> ModelConfig:
        if model.core or model.use_lstm:
            raise ValueError("DQN learns from single steps and cannot train a recurrent model; use PPO, APPO or IMPALA")
        return model


@dataclass(frozen=True)
class ReplayBatch:
    """A minibatch sampled from the replay buffer, as tensors [N, …]."""

    observation: Tree
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_observation: Tree
    next_mask: Tensor | None
    weight: Tensor
    position: Tensor
    """Index of each sample in the whole minibatch."""
    td_error: Tensor
    """TD errors of the whole minibatch, written by the loss; shared by all shards."""

    @classmethod
    def from_transitions(cls, transitions: TransitionBatch, device: torch.device) -> ReplayBatch:
        names = ("observation", "action", "reward", "discount", "next_observation", "next_mask", "weight")
        arrays = {name: getattr(transitions, name) for name in names}
        tensors = map_tree(lambda x: None if x is None else to_device(torch.from_numpy(x), device), arrays)
        count = len(transitions.reward)
        return cls(**tensors, position=torch.arange(count, device=device), td_error=torch.empty(count, device=device))

    @property
    def units(self) -> int:
        return len(self.reward)

    @property
    def samples(self) -> int:
        return len(self.reward)

    def select(self, index: Tensor) -> ReplayBatch:
        index = to_device(index, self.reward.device)
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "td_error"}
        return replace(self, **map_tree(lambda x: None if x is None else x[index], tensors))

    def describe(self) -> str:
        columns = [("reward", self.reward), ("discount", self.discount), ("weight", self.weight), ("error", self.td_error)]
        return describe_tensors(columns)


class DQN(GradientLearner):
    Config: ClassVar[type[AlgorithmConfig]] = DQNConfig

    def __init__(self, policy: Policy, config: DQNConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config
        self.target = TargetNetwork(policy, self.optimizer.flat)
        buffer = config.replay_buffer_config
        self.replay = TransitionReplay(
            array_spec(policy.observation_space),
            array_spec(policy.action_space, "action"),
            buffer.capacity,
            n_step=config.n_step,
            gamma=config.gamma,
            priorities=Priorities(buffer.alpha, buffer.eps) if buffer.prioritized else None,
            max_bytes=buffer.max_bytes,
        )
        if config.store_buffer_in_checkpoints:
            log.warning(
                "store_buffer_in_checkpoints: every checkpoint takes %.1f MB more once the replay buffer is full; "
                "keep_checkpoints_num limits how many are kept",
                self.replay.full_bytes / 1e6,
            )
        self._gradient_steps_due = 0.0
        self._target_updated_at = 0.0  # timestep
        self._target_updates = 0
        self._set_epsilon(0)

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        sampled = segments.steps
        # The state may come from a run that is ahead: a restored one, or another trial of a sweep.
        self._target_updated_at = min(self._target_updated_at, timestep)
        self.replay.add(segments)
        self.update_observation_statistics(segments)
        in_warmup = self.config.heatup_episodes and self.in_warmup(segments, timestep)
        due, steps = 0 if in_warmup else self._take_gradient_steps_due(sampled), list[dict[str, Tensor]]()
        beta = value_at(self.config.replay_buffer_config.beta, timestep)
        for k in range(due):
            steps.append(self._update(beta, diagnose=k == due - 1))
            self._update_target(timestep + sampled * (k + 1) / due)
        self._set_epsilon(timestep + sampled)
        return (mean_metrics(steps) if steps else {}) | self._metrics(due)

    def _take_gradient_steps_due(self, sampled: int) -> int:
        """Return the number of gradient steps to make now; a fraction is carried over to the next call."""
        if not len(self.replay) or self.replay.added < self.config.num_steps_sampled_before_learning_starts:
            return 0
        self._gradient_steps_due += sampled * self.config.training_intensity / self.config.train_batch_size
        due = int(self._gradient_steps_due)
        self._gradient_steps_due -= due
        return due

    def _update(self, beta: float, diagnose: bool) -> dict[str, Tensor]:
        def uniform(count: int) -> Doubles:
            return torch.rand(count, generator=self.generator, dtype=torch.float64).numpy()

        transitions = self.replay.sample(self.config.train_batch_size, uniform, beta)
        batch = ReplayBatch.from_transitions(transitions, self.optimizer.device)
        metrics = self.step(partial(self.loss, diagnose=diagnose), batch)
        if self.replay.priorities is not None:
            self._allreduce_td_errors(batch.td_error)
            self.replay.update_priorities(transitions.slot, batch.td_error.cpu().numpy())
        return metrics

    def _allreduce_td_errors(self, td_error: Tensor) -> None:
        """Exchange the errors between learners: each computed its part, and all must keep the same priorities."""
        group = self.optimizer.group
        if group.size == 1:
            return
        parts = torch.arange(len(td_error)).tensor_split(group.size)
        for rank, part in enumerate(parts):
            if rank != group.rank:
                td_error[part] = 0.0
        for chunk in td_error.split(self.optimizer.allreduce_buffer.numel()):  # at most the size of a gradient
            group.sum_(chunk)

    def _update_target(self, timestep: float) -> None:
        if timestep - self._target_updated_at >= self.config.target_network_update_freq:
            self.target.update(self.config.tau)
            self._target_updated_at, self._target_updates = timestep, self._target_updates + 1

    def _set_epsilon(self, timestep: int) -> None:
        assert isinstance(self.policy.distribution, EpsilonGreedy)
        self.policy.distribution.epsilon.fill_(value_at(self.config.epsilon, timestep))

    # -- the loss

    def loss(self, policy: Policy, batch: ReplayBatch, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """TD error Q(s, a) − (r + discount · Q_target(s', a')), averaged with the importance weights of the samples."""
        target = self.targets(policy, batch)
        q_NA = policy.action_values(batch.observation)
        q = q_NA.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        td_error = q - target
        batch.td_error[batch.position] = td_error.detach()
        losses = F.huber_loss(q, target, reduction="none") if self.config.td_error_loss_fn == "huber" else td_error.square()
        loss = (batch.weight * losses).mean()
        if not diagnose:
            return loss, {}
        with torch.no_grad():
            metrics = {"loss": loss, "td_error_mean": td_error.abs().mean(), "q_mean": q_NA.mean(), "q_max": q_NA.max()}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    @torch.no_grad()
    def targets(self, policy: Policy, batch: ReplayBatch) -> Tensor:
        """r + discount · max_a Q_target(s', a); for double DQN a is the best action of the online network."""
        assert isinstance(policy.distribution, EpsilonGreedy)
        next_q_NA = self.target.policy.action_values(batch.next_observation)
        if self.config.double_q:
            online_q_NA = policy.action_values(batch.next_observation)
            action, _ = policy.distribution.sample(online_q_NA, batch.next_mask, None)
            next_q = next_q_NA.gather(1, action.unsqueeze(1)).squeeze(1)
        else:
            next_q = policy.distribution.best(next_q_NA, batch.next_mask)
        return batch.reward + batch.discount * next_q

    # -- metrics and checkpoint state

    def _metrics(self, due: int) -> dict[str, float]:
        assert isinstance(self.policy.distribution, EpsilonGreedy)
        metrics = {
            "epsilon": float(self.policy.distribution.epsilon),
            "lr": self.optimizer.lr,
            "grad_norm": self.optimizer.grad_norm,
            "gradient_steps": float(self.optimizer.updates),
            "gradient_steps_this_iteration": float(due),
            "target_updates": float(self._target_updates),
            "replay_size": float(len(self.replay)),
            "replay_bytes": float(self.replay.nbytes),
        }
        return metrics if self.replay.priorities is None else metrics | {"priority_max": self.replay.priority_max}

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        arrays |= {"target": self.target.weights()}
        if self.config.store_buffer_in_checkpoints:
            arrays |= {f"{_REPLAY_PREFIX}{name}": array for name, array in self.replay.state().items()}
        counters = {
            "owed": self._gradient_steps_due,
            "followed_at": self._target_updated_at,
            "target_updates": self._target_updates,
        }
        return arrays, plain | {"dqn": counters}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self.target.load_weights(arrays["target"])
        stored = {name.removeprefix(_REPLAY_PREFIX): array for name, array in arrays.items() if name.startswith(_REPLAY_PREFIX)}
        if stored and self.config.store_buffer_in_checkpoints:
            self.replay.load_state(stored)
        else:
            needed = self.config.num_steps_sampled_before_learning_starts
            log.info("the replay buffer is empty: learning continues when it holds %d steps", needed)
        counters = plain["dqn"]
        self._gradient_steps_due, self._target_updated_at = float(counters["owed"]), float(counters["followed_at"])
        self._target_updates = int(counters["target_updates"])
