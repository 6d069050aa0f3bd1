"""Action distributions: one per action space, composed for Dict and Tuple spaces.

A distribution is a pure function of (outputs, mask, noise). Noise is an argument so that a policy is reproducible, can be exported
with its randomness outside, and a sampler can draw the noise of a whole segment at once.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.core.spaces import ArraySpec, array_spec
from ludus.core.tree import Array, Tree
from ludus.errors import ConfigError

MASKED = -1e9  # finite, so that probability·log-probability of a masked option is 0 and never NaN
_LOG_STD_RANGE = (-20.0, 2.0)
_ZERO = np.zeros((), np.int64)
_MIN_PROBABILITY = 1e-12  # clamp with a finite logarithm


class Distribution(Protocol):
    """Sizes are per row; every tensor may have any leading dimensions."""

    num_outputs: int
    noise_size: int
    mask_size: int
    free_outputs: list[int]
    """Outputs that need not depend on the observation: the log standard deviations."""

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard noise of shape [*lead, noise_size]."""
        ...

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        """Return (action, log-probability); without noise the most probable action."""
        ...

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (log-probability, entropy) of given actions."""
        ...

    def to_environment(self, action: Tree) -> Tree:
        """Convert NumPy actions for the environment: shifted, scaled and clipped to the space."""
        ...


def make_distribution(space: gym.Space[Any], where: str = "action") -> Distribution:
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(int(space.n), np.asarray(space.start, space.dtype))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return MultiCategorical(space.nvec, np.asarray(space.start))
    if isinstance(space, gym.spaces.MultiBinary):
        return Bernoulli(array_spec(space))
    if isinstance(space, gym.spaces.Box):
        if not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(f"{where} is a Box of {space.dtype}.", "Use MultiDiscrete for whole numbers.")
        return Gaussian(space)
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space.spaces)
        return Composite(keys, [make_distribution(space.spaces[key], f"{where}.{key}") for key in keys])
    if isinstance(space, gym.spaces.Tuple):
        return Composite(None, [make_distribution(item, f"{where}.{i}") for i, item in enumerate(space.spaces)])
    raise ConfigError(
        f"{where} is a {type(space).__name__} space; actions may be Discrete, MultiDiscrete, MultiBinary, Box, Dict, Tuple."
    )


def make_q_distribution(space: gym.Space[Any]) -> EpsilonGreedy:
    """Return the ε-greedy distribution of a value-based policy."""
    if not isinstance(space, gym.spaces.Discrete):
        raise ConfigError(
            f"DQN learns the value of each action and needs Discrete actions; these are {space}.",
            "Use PPO, APPO or IMPALA, or a wrapper that makes the actions discrete.",
        )
    return EpsilonGreedy(int(space.n), np.asarray(space.start, space.dtype))


def apply_mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else torch.where(mask, logits, MASKED)


def sample_category(logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (choice, log-probability), with Gumbel noise (the Gumbel-max trick) or without."""
    log_p = F.log_softmax(logits, dim=-1)
    choice = (log_p if noise is None else log_p + noise).argmax(dim=-1)
    return choice, log_prob_of(log_p, choice)


def log_prob_of(log_p: Tensor, choice: Tensor) -> Tensor:
    return log_p.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def entropy_of(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(dim=-1)


class CategoricalBase:
    """What distributions over categories share: Gumbel noise, masks, and actions that count from the start of the space."""

    def __init__(self, options: int, start: Array) -> None:
        self.noise_size = self.mask_size = self.num_outputs = options
        self.free_outputs: list[int] = []
        self._start = start

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty((*lead, self.noise_size)).exponential_(generator=generator).log_().neg_()

    def to_environment(self, action: Tree) -> Tree:
        return (action + self._start if self._start.any() else action).astype(self._start.dtype, copy=False)


class Categorical(CategoricalBase):
    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        return sample_category(apply_mask(outputs, mask), noise)

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(apply_mask(outputs, mask), dim=-1)
        return log_prob_of(log_p, action), entropy_of(log_p)


class EpsilonGreedy(nn.Module):
    """The action with the highest Q-value or, with probability `epsilon`, a random allowed one.

    `epsilon` is a buffer, so it is published with the weights. Noise is uniform in [0, 1): the first number explores if it is above
    1 − epsilon, the argmax of the others is the random action. No noise is greedy; scaled-down noise explores less.
    """

    epsilon: Tensor

    def __init__(self, n: int, start: Array = _ZERO) -> None:
        super().__init__()
        self.num_outputs = self.mask_size = n
        self.noise_size = 1 + n
        self.free_outputs: list[int] = []
        self._start = start
        self.register_buffer("epsilon", torch.ones(()))

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty((*lead, self.noise_size)).uniform_(generator=generator)

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        best = apply_mask(outputs, mask).argmax(dim=-1)
        chosen = best
        if noise is not None:
            explores = noise[..., 0] > 1 - self.epsilon
            chosen = torch.where(explores, apply_mask(noise[..., 1:], mask).argmax(dim=-1), best)
        return chosen, self._log_prob(chosen == best, self._exploration_probability(mask))

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        each = self._exploration_probability(mask)
        best = apply_mask(outputs, mask).argmax(dim=-1)
        count = self.num_outputs if mask is None else mask.sum(dim=-1)
        greedy, other = 1 - self.epsilon + each, each
        entropy = -(
            greedy * greedy.clamp(min=_MIN_PROBABILITY).log() + (count - 1) * other * other.clamp(min=_MIN_PROBABILITY).log()
        )
        return self._log_prob(action == best, each), entropy.expand(best.shape)

    def best(self, outputs: Tensor, mask: Tensor | None) -> Tensor:
        """The Q-value of the best allowed action."""
        return apply_mask(outputs, mask).amax(dim=-1)

    def _exploration_probability(self, mask: Tensor | None) -> Tensor:
        """Probability that exploration takes one given action."""
        return self.epsilon / (self.num_outputs if mask is None else mask.sum(dim=-1))

    def _log_prob(self, greedy: Tensor, each: Tensor) -> Tensor:
        return torch.where(greedy, 1 - self.epsilon + each, each).clamp(min=_MIN_PROBABILITY).log()

    def to_environment(self, action: Tree) -> Tree:
        return (action + self._start if self._start.any() else action).astype(self._start.dtype, copy=False)


class MultiCategorical(CategoricalBase):
    def __init__(self, nvec: Array, start: Array) -> None:
        super().__init__(int(nvec.sum()), start)
        self._shape, self._sizes = nvec.shape, [int(n) for n in nvec.reshape(-1)]

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        logits = apply_mask(outputs, mask).split(self._sizes, dim=-1)
        noises = noise.split(self._sizes, dim=-1) if noise is not None else [None] * len(logits)
        picks = [sample_category(part, n) for part, n in zip(logits, noises, strict=True)]
        action = torch.stack([choice for choice, _ in picks], dim=-1)
        log_prob = torch.stack([lp for _, lp in picks], dim=-1).sum(dim=-1)
        return action.unflatten(-1, self._shape), log_prob

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        flat = action.flatten(-len(self._shape))
        log_probs, entropies = [], []
        for i, part in enumerate(apply_mask(outputs, mask).split(self._sizes, dim=-1)):
            log_p = F.log_softmax(part, dim=-1)
            log_probs.append(log_prob_of(log_p, flat[..., i]))
            entropies.append(entropy_of(log_p))
        return torch.stack(log_probs, dim=-1).sum(dim=-1), torch.stack(entropies, dim=-1).sum(dim=-1)


class Bernoulli:
    """Independent bits; a mask entry of False keeps its bit at 0."""

    def __init__(self, spec: ArraySpec) -> None:
        self._shape = spec.shape
        self.num_outputs = self.noise_size = self.mask_size = math.prod(spec.shape)
        self.free_outputs: list[int] = []

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.empty((*lead, self.noise_size)).uniform_(1e-7, 1 - 1e-7, generator=generator)
        return torch.logit(uniform)

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        logits = apply_mask(outputs, mask)
        bits = (logits if noise is None else logits + noise) > 0
        return bits.to(torch.int8).unflatten(-1, self._shape), self._log_prob(logits, bits)

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = apply_mask(outputs, mask)
        p = torch.sigmoid(logits)
        entropy = -(p * F.logsigmoid(logits) + (1 - p) * F.logsigmoid(-logits))
        return self._log_prob(logits, action.flatten(-len(self._shape)) > 0), entropy.sum(dim=-1)

    @staticmethod
    def _log_prob(logits: Tensor, bits: Tensor) -> Tensor:
        # −softplus(−x) is logsigmoid(x), which ONNX would compute as log(sigmoid(x)): −∞ below −88.
        return -F.softplus(torch.where(bits, -logits, logits)).sum(dim=-1)

    def to_environment(self, action: Tree) -> Tree:
        return action


class Gaussian:
    """Independent normals in a space where [-1, 1] is the Box; outputs are means, then log standard deviations.

    The unclipped sample is recorded and learned from; only the environment gets it clipped to its bounds.
    """

    def __init__(self, space: gym.spaces.Box) -> None:
        self._shape = space.shape
        self._n = math.prod(space.shape)
        self._low, self._high, self._dtype = space.low, space.high, space.dtype
        self._bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
        if self._bounded:
            self._middle, self._half = 0.5 * space.high + 0.5 * space.low, 0.5 * space.high - 0.5 * space.low
        self.num_outputs, self.noise_size, self.mask_size = 2 * self._n, self._n, 0
        self.free_outputs = list(range(self._n, 2 * self._n))

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty((*lead, self.noise_size)).normal_(generator=generator)

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        mean, log_std = self._split(outputs)
        action = mean if noise is None else mean + log_std.exp() * noise
        return action.reshape(*action.shape[:-1], *self._shape), self._log_prob(mean, log_std, action)

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, log_std = self._split(outputs)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)
        return self._log_prob(mean, log_std, action.reshape(mean.shape)), entropy

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.split(self._n, dim=-1)
        return mean, log_std.clamp(*_LOG_STD_RANGE)

    @staticmethod
    def _log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        z = (action - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def to_environment(self, action: Tree) -> Tree:
        if self._bounded:
            action = self._middle + np.clip(action, -1.0, 1.0) * self._half
        return np.clip(action, self._low, self._high).astype(self._dtype, copy=False)  # rounding may leave the bounds


class Composite:
    """Independent parts of a Dict (`keys` given) or Tuple action; log-probabilities and entropies add up."""

    def __init__(self, keys: list[str] | None, parts: list[Distribution]) -> None:
        self._keys, self._parts = keys, parts
        self._outputs = [part.num_outputs for part in parts]
        self._noises = [part.noise_size for part in parts]
        self._masks = [part.mask_size for part in parts]
        self.num_outputs, self.noise_size, self.mask_size = sum(self._outputs), sum(self._noises), sum(self._masks)
        starts = np.cumsum([0, *self._outputs[:-1]]).tolist()
        self.free_outputs = [at + i for at, part in zip(starts, parts, strict=True) for i in part.free_outputs]

    def noise(self, lead: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.cat([part.noise(lead, generator) for part in self._parts], dim=-1)

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        noises = noise.split(self._noises, dim=-1) if noise is not None else [None] * len(self._parts)
        inputs = zip(self._parts, outputs.split(self._outputs, dim=-1), self._split_mask(mask), noises, strict=True)
        picks = [part.sample(o, m, n) for part, o, m, n in inputs]
        return self._join([action for action, _ in picks]), torch.stack([lp for _, lp in picks]).sum(dim=0)

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = zip(self._parts, outputs.split(self._outputs, dim=-1), self._items(action), self._split_mask(mask), strict=True)
        pairs = [part.evaluate(o, a, m) for part, o, a, m in inputs]
        return torch.stack([lp for lp, _ in pairs]).sum(dim=0), torch.stack([e for _, e in pairs]).sum(dim=0)

    def to_environment(self, action: Tree) -> Tree:
        return self._join([part.to_environment(a) for part, a in zip(self._parts, self._items(action), strict=True)])

    def _split_mask(self, mask: Tensor | None) -> list[Tensor | None]:
        if mask is None:
            return [None] * len(self._parts)
        pieces = mask.split(self._masks, dim=-1)
        return [piece if size else None for piece, size in zip(pieces, self._masks, strict=True)]

    def _items(self, action: Tree) -> list[Any]:
        return list(action) if self._keys is None else [action[key] for key in self._keys]

    def _join(self, items: list[Any]) -> Tree:
        return tuple(items) if self._keys is None else dict(zip(self._keys, items, strict=True))
