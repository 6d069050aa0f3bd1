"""Autoregressive actions: a first part, and parts whose choice depends on it.

p(action) = p(first part) · ∏ p(part | first part); a part that does not apply to the chosen option is not part of the action. The
first part has few options, so the network outputs logits for all of them at once. As every distribution this is a pure function of
(outputs, mask, noise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.distributions import CategoricalBase, apply_mask, entropy_of, log_prob_of, sample_category


@dataclass(frozen=True)
class Branch:
    """A part of a MultiDiscrete action that applies only after some options of the first part, with separate logits for each of them."""

    part: int
    after: tuple[int, ...]
    """Options of part 0."""
    points_at: str | None = None
    """An entity set of the observation; the part chooses one of its entities."""
    mask: str | None = None
    """Key of the observation, [len(after), options]: allowed choices after each option."""


class AutoregressiveDistribution(CategoricalBase):
    """Outputs: the unconditional parts, then for every branch one row of logits per option in `after`."""

    def __init__(self, space: gym.Space[Any], branches: Sequence[Branch]) -> None:
        sizes = sizes_of(space)
        check(sizes, branches)
        assert isinstance(space, gym.spaces.MultiDiscrete)
        super().__init__(sum(sizes), np.asarray(space.start))
        self._sizes = sizes
        branching = {branch.part for branch in branches}
        self._always = [part for part in range(len(sizes)) if part not in branching]
        self._branches = sorted(branches, key=lambda branch: branch.points_at is not None)
        """In the order of the outputs: pointers come last."""
        self._rows = [[b.after.index(k) if k in b.after else -1 for k in range(sizes[0])] for b in self._branches]
        """By branch and option of part 0: the row of logits; -1 where the part does not apply."""
        self.blocks = [sizes[part] for part in self._always] + [len(b.after) * sizes[b.part] for b in self._branches]
        self.num_outputs = sum(self.blocks)

    def sample(self, outputs: Tensor, mask: Tensor | None, noise: Tensor | None) -> tuple[Tree, Tensor]:
        allowed, drawn = self._split(mask), self._split(noise)
        always, branches = self._parts(outputs)
        samples = [sample_category(apply_mask(logits, allowed[part]), drawn[part]) for part, logits in always.items()]
        picks = {part: choice for part, (choice, _) in zip(always, samples, strict=True)}
        log_prob = _sum([lp for _, lp in samples])
        for branch, rows, logits in zip(self._branches, self._rows, branches, strict=True):
            row = _lookup(rows, picks[0])
            chosen = _select_row(logits, row.clamp(min=0))
            picks[branch.part], taken = sample_category(apply_mask(chosen, allowed[branch.part]), drawn[branch.part])
            log_prob = log_prob + torch.where(row >= 0, taken, 0.0)
        return torch.stack([picks[part] for part in range(len(self._sizes))], dim=-1), log_prob

    def evaluate(self, outputs: Tensor, action: Tree, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The entropy is that of the whole action: each branch is weighted by the probability that it applies."""
        allowed = self._split(mask)
        always, branches = self._parts(outputs)
        log_ps = {part: F.log_softmax(apply_mask(logits, allowed[part]), dim=-1) for part, logits in always.items()}
        log_prob = _sum([log_prob_of(log_p, action[..., part]) for part, log_p in log_ps.items()])
        entropy = _sum([entropy_of(log_p) for log_p in log_ps.values()])
        probabilities = log_ps[0].exp()
        for branch, rows, logits in zip(self._branches, self._rows, branches, strict=True):
            allowed_here = allowed[branch.part]
            log_p = F.log_softmax(apply_mask(logits, None if allowed_here is None else allowed_here.unsqueeze(-2)), dim=-1)
            row = _lookup(rows, action[..., 0])
            taken = log_prob_of(_select_row(log_p, row.clamp(min=0)), action[..., branch.part])
            log_prob = log_prob + torch.where(row >= 0, taken, 0.0)
            entropy = entropy + (probabilities[..., list(branch.after)] * entropy_of(log_p)).sum(dim=-1)
        return log_prob, entropy

    def _split(self, whole: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(self._sizes) if whole is None else whole.split(self._sizes, dim=-1)

    def _parts(self, outputs: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Logits of the unconditional parts, by part; of every branch, one row per option."""
        blocks = outputs.split(self.blocks, dim=-1)
        count = len(self._always)
        rows = [
            block.unflatten(-1, (len(branch.after), self._sizes[branch.part]))
            for branch, block in zip(self._branches, blocks[count:], strict=True)
        ]
        return dict(zip(self._always, blocks[:count], strict=True)), rows


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum(dim=0)


def _lookup(table: list[int], index: Tensor) -> Tensor:
    return torch.tensor(table, device=index.device)[index]


def _select_row(rows: Tensor, index: Tensor) -> Tensor:
    """[*, R, N], [*] → [*, N]"""
    if rows.shape[-2] == 1:
        return rows.squeeze(-2)
    row_index = index.unsqueeze(-1).unsqueeze(-1).expand(*index.shape, 1, rows.shape[-1])
    return rows.gather(-2, row_index).squeeze(-2)


# -- validation ------------------------------------------------------------------------------------------


def sizes_of(space: gym.Space[Any]) -> list[int]:
    """Raises ConfigError."""
    if not isinstance(space, gym.spaces.MultiDiscrete) or space.nvec.ndim != 1:
        raise ConfigError(f"model.autoregressive needs a MultiDiscrete action space; this is {space}.", "Leave it out.")
    return [int(n) for n in space.nvec]


def check(sizes: Sequence[int], branches: Sequence[Branch]) -> None:
    """Raises ConfigError."""
    where = "model.autoregressive"
    for branch in branches:
        if not 0 < branch.part < len(sizes):
            raise ConfigError(
                f"{where} names part {branch.part}.", f"The parts that may follow the first are 1 to {len(sizes) - 1}."
            )
        wrong = [option for option in branch.after if not 0 <= option < sizes[0]]
        if wrong or not branch.after or len(set(branch.after)) < len(branch.after):
            raise ConfigError(
                f"{where}: part {branch.part} comes after {list(branch.after)}.",
                f"Options of the first part, each once: 0 to {sizes[0] - 1}.",
            )
    parts = [branch.part for branch in branches]
    if len(set(parts)) < len(parts):
        raise ConfigError(f"{where} names a part twice.", "Once for each part.")


def check_pointers(space: gym.Space[Any], branches: Sequence[Branch], entities: Mapping[str, int]) -> None:
    """`entities`: number of entities of each set of the observation. Raises ConfigError."""
    sizes = sizes_of(space)
    check(sizes, branches)
    for branch in branches:
        entity_count = entities.get(branch.points_at or "")  # the network reports an unknown set
        if entity_count is not None and entity_count != sizes[branch.part]:
            raise ConfigError(
                f"model.autoregressive: part {branch.part} has {sizes[branch.part]} options and points at {branch.points_at!r}, "
                f"which has {entity_count} entities.",
                "One option for each entity.",
            )
