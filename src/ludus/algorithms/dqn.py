"""DQN (Mnih et al. 2015) from a store of earlier steps: double (van Hasselt et al. 2016), dueling (Wang et al. 2016), over n
steps, drawn uniformly or by priority (Schaul et al. 2016).

Letters: N transitions of a minibatch, A actions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from ludus.algorithms.gradient_learner import Learner, LearnerConfig, means
from ludus.algorithms.minibatch import described
from ludus.algorithms.target_network import Target
from ludus.buffers.prioritized_replay import Drawn, Priorities, Transitions
from ludus.buffers.sum_tree import Doubles
from ludus.config.batch_shape import REPLAYED_STEPS
from ludus.config.schema import AlgorithmConfig, ModelConfig, ReplayBufferConfig, Schedule
from ludus.core.schedule import value_at
from ludus.core.spaces import array_spec
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Segments
from ludus.models.devices import moved
from ludus.models.distributions import EpsilonGreedy
from ludus.models.policy import VALUES, Policy

log = logging.getLogger(__name__)

_STORED = "replay/"
_BATCH = 32


def _probability(schedule: Any) -> Any:
    if max([value for _, value in schedule] if isinstance(schedule, list) else [schedule]) > 1:
        raise ValueError("a probability is at most 1")
    return schedule


class DQNConfig(LearnerConfig):
    """Hyper-parameters of DQN; names as RLlib users know them."""

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
    train_batch_size: int = Field(_BATCH, ge=1, description="Samples per gradient step.")
    training_intensity: float = Field(
        _BATCH / REPLAYED_STEPS,
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
    epsilon: Annotated[Schedule, AfterValidator(_probability)] = Field(
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
    def _natural_intensity(cls, data: Any) -> Any:
        """RLlib's: one minibatch for what all workers bring in one round, each with one environment unless more are asked for.

        Here, not when it is used: a saved configuration names every key, and its number of workers may be changed.
        """
        if not isinstance(data, dict) or data.get("training_intensity") is not None:
            return data
        if not data.keys() & {"training_intensity", "train_batch_size", "rollout_fragment_length"}:
            return data
        others = {key: value for key, value in data.items() if key != "training_intensity"}
        workers = data.get("num_workers", 0)
        try:
            steps = int(data.get("rollout_fragment_length") or REPLAYED_STEPS) * int(data.get("num_envs_per_worker", 1))
            natural = int(data.get("train_batch_size", _BATCH)) / (steps * max(1, 0 if workers == "auto" else int(workers)))
        except (TypeError, ValueError, ArithmeticError):
            return others  # the field with which something is wrong says so
        return others | {"training_intensity": natural} if natural > 0 else others

    @field_validator("model")
    @classmethod
    def _no_memory(cls, model: ModelConfig) -> ModelConfig:
        if model.core or model.use_lstm:
            raise ValueError("DQN learns from single steps, which tell a recurrent model nothing; use PPO, APPO or IMPALA")
        return model


@dataclass(frozen=True)
class Replayed:
    """A minibatch that was drawn from the buffer, as tensors [N, …]."""

    observation: Tree
    action: Tensor
    reward: Tensor
    discount: Tensor
    following: Tree
    mask: Tensor | None
    weight: Tensor
    position: Tensor
    """Of each in the whole minibatch."""
    error: Tensor
    """[whole minibatch] where the errors of its samples are written to."""

    @classmethod
    def of(cls, drawn: Drawn, device: torch.device) -> Replayed:
        def there(x: Array) -> Tensor:
            return moved(torch.from_numpy(x), device)

        count = len(drawn.reward)
        return cls(
            map_tree(there, drawn.observation),
            there(drawn.action),
            there(drawn.reward),
            there(drawn.discount),
            map_tree(there, drawn.following),
            None if drawn.mask is None else there(drawn.mask),
            there(drawn.weight),
            torch.arange(count, device=device),
            torch.empty(count, device=device),
        )

    @property
    def units(self) -> int:
        return len(self.reward)

    @property
    def samples(self) -> int:
        return len(self.reward)

    def select(self, index: Tensor) -> Replayed:
        index = moved(index, self.reward.device)

        def pick(x: Tensor) -> Tensor:
            return x[index]

        return Replayed(
            map_tree(pick, self.observation),
            pick(self.action),
            pick(self.reward),
            pick(self.discount),
            map_tree(pick, self.following),
            None if self.mask is None else pick(self.mask),
            pick(self.weight),
            pick(self.position),
            self.error,
        )

    def describe(self) -> str:
        return described([("reward", self.reward), ("discount", self.discount), ("weight", self.weight), ("error", self.error)])


class DQN(Learner):
    Config: ClassVar[type[AlgorithmConfig]] = DQNConfig

    def __init__(self, policy: Policy, config: DQNConfig, seed: int) -> None:
        super().__init__(policy, config, seed)
        self.config = config
        self.target = Target(policy, self.optimizer.flat)
        buffer = config.replay_buffer_config
        self.replay = Transitions(
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
        self._owed = 0.0  # gradient steps
        self._followed_at = 0.0  # timestep at which the target network followed last
        self._target_updates = 0
        self._explore(0)

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self.optimizer.lr = value_at(self.config.lr, timestep)
        sampled = segments.steps
        # The weights may come from a run that is ahead: restored from it, or taken over from another trial of a sweep.
        self._followed_at = min(self._followed_at, timestep)
        self.replay.add(segments)
        self.observe(segments)
        by_episodes = self.config.heatup_episodes and self.heating(segments, timestep)
        due, numbers = 0 if by_episodes else self._due(sampled), list[dict[str, Tensor]]()
        beta = value_at(self.config.replay_buffer_config.beta, timestep)
        for k in range(due):
            numbers.append(self._update(beta, diagnose=k == due - 1))
            self._follow(timestep + sampled * (k + 1) / due)
        self._explore(timestep + sampled)
        return (means(numbers) if numbers else {}) | self._numbers(due)

    def _due(self, sampled: int) -> int:
        """Gradient steps to be made now; what is left of one is made up for later."""
        if not len(self.replay) or self.replay.added < self.config.num_steps_sampled_before_learning_starts:
            return 0
        self._owed += sampled * self.config.training_intensity / self.config.train_batch_size
        due = int(self._owed)
        self._owed -= due
        return due

    def _update(self, beta: float, diagnose: bool) -> dict[str, Tensor]:
        drawn = self.replay.draw(self.config.train_batch_size, self._uniform, beta)
        batch = Replayed.of(drawn, self.optimizer.device)
        numbers = self.step(partial(self.loss, diagnose=diagnose), batch)
        if self.replay.priorities is not None:
            self._gather(batch.error)
            self.replay.learned(drawn.place, batch.error.cpu().numpy())
        return numbers

    def _uniform(self, count: int) -> Doubles:
        numbers: Doubles = torch.rand(count, generator=self.generator, dtype=torch.float64).numpy()
        return numbers

    def _gather(self, error: Tensor) -> None:
        """With several learners: every one knows the errors of its own part, and all must draw the same steps next time."""
        group = self.optimizer.group
        if group.size == 1:
            return
        parts = torch.arange(len(error)).tensor_split(group.size)
        for rank, part in enumerate(parts):
            if rank != group.rank:
                error[part] = 0.0
        for piece in error.split(self.optimizer.wire.numel()):  # there is room for as much as a gradient
            group.sum_(piece)

    def _follow(self, timestep: float) -> None:
        if timestep - self._followed_at >= self.config.target_network_update_freq:
            self.target.follow(self.config.tau)
            self._followed_at, self._target_updates = timestep, self._target_updates + 1

    def _explore(self, timestep: int) -> None:
        assert isinstance(self.policy.distribution, EpsilonGreedy)
        self.policy.distribution.epsilon.fill_(value_at(self.config.epsilon, timestep))

    # -- the loss

    def loss(self, policy: Policy, batch: Replayed, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The error towards reward + discount · (what follows is worth), averaged with the weights of the samples."""
        target = self.targets(policy, batch)
        worth_NA = policy.action_values(batch.observation)
        worth = worth_NA.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        error = worth - target
        batch.error[batch.position] = error.detach()
        each = F.huber_loss(worth, target, reduction="none") if self.config.td_error_loss_fn == "huber" else error.square()
        loss = (batch.weight * each).mean()
        if not diagnose:
            return loss, {}
        with torch.no_grad():
            numbers = {"loss": loss, "td_error_mean": error.abs().mean(), "q_mean": worth_NA.mean(), "q_max": worth_NA.max()}
        return loss, {name: number.detach() for name, number in numbers.items()}

    @torch.no_grad()
    def targets(self, policy: Policy, batch: Replayed) -> Tensor:
        """Double: what the target network says of the action that the network which learns would choose."""
        assert isinstance(policy.distribution, EpsilonGreedy)
        later_NA = self.target.policy.action_values(batch.following)
        if self.config.double_q:
            chosen, _ = policy.distribution.sample(policy.action_values(batch.following), batch.mask, None)
            later = later_NA.gather(1, chosen.unsqueeze(1)).squeeze(1)
        else:
            later = policy.distribution.best(later_NA, batch.mask)
        return batch.reward + batch.discount * later

    # -- what is told, and what a resumed run needs

    def _numbers(self, due: int) -> dict[str, float]:
        assert isinstance(self.policy.distribution, EpsilonGreedy)
        numbers = {
            "epsilon": float(self.policy.distribution.epsilon),
            "lr": self.optimizer.lr,
            "grad_norm": self.optimizer.grad_norm,
            "gradient_steps": float(self.optimizer.updates),
            "gradient_steps_this_iteration": float(due),
            "target_updates": float(self._target_updates),
            "replay_size": float(len(self.replay)),
            "replay_bytes": float(self.replay.nbytes),
        }
        return numbers if self.replay.priorities is None else numbers | {"priority_max": self.replay.priority_max}

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays, plain = super().state()
        arrays |= {"target": self.target.weights()}
        if self.config.store_buffer_in_checkpoints:
            arrays |= {f"{_STORED}{name}": array for name, array in self.replay.state().items()}
        counters = {"owed": self._owed, "followed_at": self._followed_at, "target_updates": self._target_updates}
        return arrays, plain | {"dqn": counters}

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        super().load_state(arrays, plain)
        self.target.load_weights(arrays["target"])
        stored = {name.removeprefix(_STORED): array for name, array in arrays.items() if name.startswith(_STORED)}
        if stored and self.config.store_buffer_in_checkpoints:
            self.replay.load_state(stored)
        else:
            needed = self.config.num_steps_sampled_before_learning_starts
            log.info("the replay buffer is empty: learning continues when it holds %d steps", needed)
        counters = plain["dqn"]
        self._owed, self._followed_at = float(counters["owed"]), float(counters["followed_at"])
        self._target_updates = int(counters["target_updates"])
