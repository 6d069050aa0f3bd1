"""Segments: the one form in which experience reaches a learner.

Shapes: T steps, B rows (one row is one agent in one environment), K stored final observations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.core.tree import Tree, leaves, map_tree

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

DEFAULT_MODEL = "model"


@dataclass(frozen=True)
class SegmentSpec:
    """Shapes and dtypes of the segments of one model; sufficient to allocate them."""

    steps: int
    observation: Tree
    action: Tree
    mask_size: int = 0
    state: Tree = ()
    state_every: int = 0
    """The recurrent state is stored at steps 0, state_every, 2·state_every, …; 0 when the model has none."""
    finals: int = 0
    """Capacity for final observations of truncated episodes whose next step already belongs to the next episode."""
    model: str = DEFAULT_MODEL
    results: tuple[str, ...] = ()
    """Names of the results that environments report at the end of an episode."""

    @property
    def states(self) -> int:
        return -(-self.steps // self.state_every) if self.state_every else 0


@dataclass
class Segments:
    """A block of B segments as arrays over time, written in place.

    Index t holds the observation before step t, the action, and its result. The index after the last valid step holds the
    bootstrap observation and its value. `valid` is False for padding and for steps in which an environment only resets.
    """

    spec: SegmentSpec
    observation: Tree  # [T+1, B, …]
    action: Tree  # [T, B, …] as sampled by the policy
    reward: Floats  # [T, B] of the action at the same index
    terminated: Bools  # [T, B]
    truncated: Bools  # [T, B]
    valid: Bools  # [T, B]
    first: Bools  # [T+1, B] an episode starts here: the recurrent state before it is the initial one
    log_prob: Floats  # [T, B] under the behaviour policy
    value: Floats  # [T+1, B] as estimated by the behaviour policy
    version: Ints  # [T, B] of the behaviour policy's weights
    action_mask: Bools  # [T+1, B, M]
    state: Tree  # [states, B, …]
    origin: Ints  # [B] id of the worker's row that wrote it, constant over the run
    final_at: Ints  # [K, 2] (t, b) of the stored final observations; only the first `finals` entries are used
    final_observation: Tree  # [K, …]
    final_value: Floats  # [K]
    results: Floats  # [B, R, 2] of the episodes that ended here: sum and count of each result
    finals: int = 0
    episode_return: Floats = field(default_factory=lambda: np.zeros(0, np.float32))  # [E] of the episodes that ended here
    episode_length: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [E]
    model: str = DEFAULT_MODEL
    env_steps: int | None = None
    """Environment steps, when several agents share an environment; None = the number of valid steps."""
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Views of these arrays in another library, owned by the writer of the block; never transported."""

    @classmethod
    def empty(cls, spec: SegmentSpec, rows: int) -> Segments:
        """Allocate zeroed segments; `valid` is False everywhere."""
        t, b, k = spec.steps, rows, spec.finals

        def tree(lead: tuple[int, ...], specs: Tree) -> Tree:
            return map_tree(lambda s: s.zeros(*lead), specs)

        return cls(
            spec=spec,
            observation=tree((t + 1, b), spec.observation),
            action=tree((t, b), spec.action),
            reward=np.zeros((t, b), np.float32),
            terminated=np.zeros((t, b), np.bool_),
            truncated=np.zeros((t, b), np.bool_),
            valid=np.zeros((t, b), np.bool_),
            first=np.zeros((t + 1, b), np.bool_),
            log_prob=np.zeros((t, b), np.float32),
            value=np.zeros((t + 1, b), np.float32),
            version=np.zeros((t, b), np.int64),
            action_mask=np.ones((t + 1, b, spec.mask_size), np.bool_),
            state=tree((spec.states, b), spec.state),
            origin=np.zeros(b, np.int64),
            final_at=np.zeros((k, 2), np.int64),
            final_observation=tree((k,), spec.observation),
            final_value=np.zeros(k, np.float32),
            results=np.zeros((b, len(spec.results), 2), np.float32),
            model=spec.model,
        )

    @property
    def rows(self) -> int:
        return int(self.reward.shape[1])

    @property
    def steps(self) -> int:
        """Number of valid steps."""
        return int(np.count_nonzero(self.valid))

    @property
    def used_steps(self) -> int:
        """Number of steps up to the last valid one of any row."""
        valid = np.flatnonzero(self.valid.any(axis=1))
        return int(valid[-1]) + 1 if len(valid) else 0

    def trim(self) -> Segments:
        """Return views without the padding at the end that all rows share. Final observations are not included."""
        used = self.used_steps
        if used == self.spec.steps:
            return self
        spec = replace(self.spec, steps=used)

        def cut(name: str, rows: int) -> Tree:
            return map_tree(lambda x: x[:rows], getattr(self, name))

        over_steps = {name: cut(name, used) for name in OVER_STEPS}
        after_steps = {name: cut(name, used + 1) for name in OVER_STEPS_AND_AFTER}
        return replace(self, spec=spec, state=cut("state", spec.states), **over_steps, **after_steps)

    def arrays(self) -> dict[str, Tree]:
        """Return all arrays by field name: the content that a transport must carry."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_ARRAYS}

    @property
    def nbytes(self) -> int:
        return sum(int(leaf.nbytes) for _, leaf in leaves(self.arrays()))


OVER_STEPS = ("action", "reward", "terminated", "truncated", "valid", "log_prob", "version")
"""Arrays [T, B, …]."""
OVER_STEPS_AND_AFTER = ("observation", "first", "value", "action_mask")
"""Arrays [T+1, B, …]."""

_NOT_ARRAYS = frozenset({"spec", "finals", "model", "env_steps", "cache"})
