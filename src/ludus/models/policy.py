"""A policy: everything that turns a raw observation into an action, in one versioned object.

Sampler, session, server and exporter run this object; algorithms train it with `evaluate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ludus.core import spaces
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.errors import ConfigError, IncompatibleCheckpoint
from ludus.models.autoregressive_actions import AutoregressiveDistribution, check_pointers
from ludus.models.distributions import Distribution, EpsilonGreedy, apply_mask, make_distribution, make_q_distribution
from ludus.models.network_config import NetworkConfig
from ludus.models.networks import Network, PolicyNetwork
from ludus.models.observation_encoder import entities_of
from ludus.models.q_network import QNetwork

Weights = dict[str, Array]

PROBABILITIES, VALUES = "probabilities", "values"
"""What the network outputs for the actions: probabilities or Q-values."""


class BatchDecision(NamedTuple):
    """Decisions for N rows, as arrays with N first."""

    action: Tree
    """As the environment takes it."""
    chosen: Tree
    """As the policy chose it; this is recorded."""
    log_prob: Array
    value: Array
    state: tuple[Array, ...]
    lost: Bools | None = None
    """Rows without a decision, whose match has to be given up; None: there are none. Only policies outside this process lose rows."""


class Policy(nn.Module):
    """A network with the distribution of its action space.

    Methods take tensors with a leading batch dimension [N, …], or [T, B, …] with `first` for a recurrent sequence.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: NetworkConfig | None = None,
        normalise_observations: bool = False,
        kind: str = PROBABILITIES,
    ) -> None:
        super().__init__()
        spaces.check_usable(observation_space, "observation")
        spaces.check_usable(action_space, "action")
        self.kind = kind
        self.observation_space, self.action_space = observation_space, action_space
        self.config = config or NetworkConfig()
        self.normalise_observations = normalise_observations
        self.distribution = self._make_distribution()
        self.network = self._make_network()
        if kind == VALUES and self.network.recurrent:
            raise ConfigError("The model is recurrent, but DQN learns from single steps.", "Use PPO, APPO or IMPALA.")
        if normalise_observations:
            self.network.normalise_observations()

    def _make_distribution(self) -> Distribution:
        if self.kind == VALUES:
            self._check_values()
            return make_q_distribution(self.action_space)
        if self.config.autoregressive and self.config.custom_model is None:
            check_pointers(self.action_space, self.config.autoregressive, entities_of(self.observation_space, self.config))
            return AutoregressiveDistribution(self.action_space, self.config.autoregressive)
        return make_distribution(self.action_space)

    def _check_values(self) -> None:
        for key, wanted in (("autoregressive", self.config.autoregressive), ("centralized_value", self.config.central)):
            if wanted:
                raise ConfigError(
                    f"model.{key} applies to policies with action probabilities; DQN learns action values.",
                    "Use PPO, APPO or IMPALA, or leave it out.",
                )

    def _make_network(self) -> PolicyNetwork:
        if self.config.custom_model is not None:
            from ludus.models.custom.custom_network import CustomNetwork

            return CustomNetwork(self.observation_space, self.action_space, self.distribution.num_outputs, self.config)
        if self.config.central:
            from ludus.models.centralized_critic import CentralNetwork

            free = self.distribution.free_outputs
            return CentralNetwork(self.observation_space, self.distribution.num_outputs, self.config, free)
        if self.kind == VALUES:
            return QNetwork(self.observation_space, self.distribution.num_outputs, self.config)
        return Network(self.observation_space, self.distribution.num_outputs, self.config, self.distribution.free_outputs)

    # -- acting

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Freeze the weights inside the block, which enables faster forms of `step` and `value`."""
        with torch.inference_mode():
            self.network.freeze()
            try:
                yield
            finally:
                self.network.thaw()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def recurrent(self) -> bool:
        return self.network.recurrent

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return self.network.initial_state(rows)

    def state_spec(self) -> Tree:
        return tuple(ArraySpec(tuple(s.shape[1:]), np.dtype(np.float32)) for s in self.initial_state(1))

    def step(
        self,
        observation: Tree,
        state: tuple[Tensor, ...] = (),
        first: Tensor | None = None,
        mask: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tree, Tensor, Tensor, tuple[Tensor, ...]]:
        """One decision for N rows: (action, log-probability, value, next state). Without noise: the most probable action."""
        outputs, value, state = self._outputs(observation, state, first)
        action, log_prob = self.distribution.sample(outputs, mask, noise)
        return action, log_prob, self.state_value(outputs, value, mask), state

    def state_value(self, outputs: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the state value: the network's value, or the Q-value of the best allowed action."""
        if isinstance(self.distribution, EpsilonGreedy) and (mask is not None or self.config.custom_model is not None):
            return self.distribution.best(outputs, mask)
        return value

    def act(
        self,
        observation: Tree,
        state: tuple[Array, ...] = (),
        mask: Array | None = None,
        noise: Array | None = None,
    ) -> BatchDecision:
        """`step` with arrays instead of tensors. Without noise, or where it is zero: the most probable action."""
        with torch.inference_mode():
            chosen, log_prob, value, after = self.step(
                map_tree(torch.from_numpy, observation),
                tuple(map(torch.from_numpy, state)),
                None,
                None if mask is None else torch.from_numpy(mask),
                None if noise is None else torch.from_numpy(noise),
            )
        chosen_arrays = map_tree(Tensor.numpy, chosen)
        action = self.distribution.to_environment(chosen_arrays)
        return BatchDecision(action, chosen_arrays, log_prob.numpy(), value.numpy(), tuple(map(Tensor.numpy, after)))

    def action_probabilities(self, observation: Tree, mask: Array | None = None, *, deterministic: bool = False) -> Array:
        """Return the probabilities [N, actions] with which a policy without recurrence takes each of its Discrete actions.

        `deterministic`: of its play without noise. Raises ConfigError for other action spaces and recurrent policies.
        """
        if not isinstance(self.action_space, gym.spaces.Discrete) or self.recurrent:
            what = "is recurrent" if self.recurrent else f"has the actions {self.action_space}"
            raise ConfigError(
                f"The policy {what}: its action probabilities are not a table.", "Use a feed-forward model of Discrete actions."
            )
        with torch.inference_mode():
            outputs, _, _ = self._outputs(map_tree(torch.from_numpy, observation), (), None)
            allowed = None if mask is None else torch.from_numpy(mask)
            if deterministic or self.kind == VALUES:
                chosen, _ = self.distribution.sample(outputs, allowed, None)
                return torch.nn.functional.one_hot(chosen, int(self.action_space.n)).double().numpy()
            return torch.softmax(apply_mask(outputs.double(), allowed), dim=-1).numpy()

    def draw_noise(self, rows: int, generator: torch.Generator) -> Array:
        """Draw the noise for `act`. Noise multiplied by T gives temperature T: options are drawn from logits ÷ T."""
        noise: Array = self.distribution.noise((rows,), generator).numpy()
        return noise

    def value(self, observation: Tree, state: tuple[Tensor, ...] = (), first: Tensor | None = None) -> Tensor:
        outputs, value, _ = self._outputs(observation, state, first)
        return self.state_value(outputs, value, None)

    def action_values(self, observation: Tree) -> Tensor:
        """Return the Q-values [N, A] of a value-based policy."""
        if isinstance(self.network, QNetwork):
            return self.network.action_values(observation)
        return self._outputs(observation, (), None)[0]

    def _outputs(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if not self.recurrent:
            outputs, value, _ = self.network(observation, (), None)
            return outputs, value, ()
        rows = state[0].shape[0]
        first = torch.zeros(rows, dtype=torch.bool, device=state[0].device) if first is None else first
        sequence = map_tree(lambda x: x.unsqueeze(0), observation)
        outputs, value, state = self.network(sequence, state, first.unsqueeze(0))
        return outputs.squeeze(0), value.squeeze(0), state

    # -- learning

    def evaluate(
        self,
        observation: Tree,
        action: Tree,
        mask: Tensor | None = None,
        state: tuple[Tensor, ...] = (),
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log-probability, entropy, value) of recorded actions; a recurrent policy takes [T, B, …] and unrolls."""
        outputs, value, _ = self.network(observation, state, first)
        log_prob, entropy = self.distribution.evaluate(outputs, action, mask)
        return log_prob, entropy, value

    def to_network_layout(self, observation: Tree) -> Tree:
        """Convert observations to the memory layout that makes repeated `evaluate` calls fast; `step` accepts both layouts."""
        return self.network.to_network_layout(observation)

    @torch.no_grad()
    def update_normaliser(self, observation: Tree) -> None:
        """Learner only: merge a batch [N, …] of observations into the running statistics."""
        self.network.observe(observation)

    # -- weights

    def weights(self) -> Weights:
        """A copy of all parameters and buffers."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy weights in place; modules that share these tensors see the new values. Raises IncompatibleCheckpoint."""
        own = self.state_dict()
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        if missing or extra:
            raise IncompatibleCheckpoint(f"The weights do not fit this model: missing {missing[:3]}, unexpected {extra[:3]}.")
        for name, value in own.items():
            given = weights[name]
            if tuple(given.shape) != tuple(value.shape):
                raise IncompatibleCheckpoint(f"{name} has shape {tuple(given.shape)}, this model has {tuple(value.shape)}.")
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(torch.from_numpy(np.array(weights[name])))

    def description(self) -> dict[str, Any]:
        """Return the content of `model.json`: the class, and its constructor arguments as JSON values."""
        return {
            "class": "ludus.models.policy:Policy",
            "observation_space": spaces.to_json(self.observation_space),
            "action_space": spaces.to_json(self.action_space),
            "network": asdict(self.config),
            "normalise_observations": self.normalise_observations,
            "kind": self.kind,
        }

    @classmethod
    def from_description(cls, data: Mapping[str, Any]) -> Policy:
        network = {k: v if k == "custom_model_config" else _to_tuples(v) for k, v in data["network"].items()}
        return cls(
            spaces.from_json(data["observation_space"]),
            spaces.from_json(data["action_space"]),
            NetworkConfig(**network),
            bool(data["normalise_observations"]),
            str(data.get("kind", PROBABILITIES)),
        )


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(v) for v in value) if isinstance(value, list) else value
