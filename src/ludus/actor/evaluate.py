"""Playing whole episodes with a fixed policy: evaluations that do not disturb training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludus.game.environment import Environments
from ludus.model.policy import Policy
from ludus.tree import Array, map_tree


@dataclass(frozen=True)
class Score:
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    complete: bool = True
    """All episodes that were asked for have ended."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))


@torch.inference_mode()
def play(
    policy: Policy,
    environments: Environments,
    episodes: int,
    seed: int,
    *,
    deterministic: bool = True,
    max_steps: int = 100_000,
    interrupted: Callable[[], bool] = lambda: False,
) -> Score:
    """`episodes` episodes, each row playing its equal share, so that short episodes are not over-counted.

    Rows play ⌈episodes / rows⌉ or one fewer; `max_steps` bounds an environment that never ends; what is open then, or when
    `interrupted` says so, is left out, and so is what an environment did before it failed. Inside `policy.acting()`.
    """
    n = environments.num
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    generator = torch.Generator().manual_seed(seed)
    seen, state = environments.reset(seed), policy.initial_state(n)
    first, over = np.ones(n, np.bool_), np.zeros(n, np.bool_)
    running, length = np.zeros(n), np.zeros(n, np.int64)
    returns: list[float] = []
    lengths: list[int] = []
    for _ in range(max_steps):
        if not quota.any() or interrupted():
            break
        observation = map_tree(torch.from_numpy, map_tree(_stored, seen.observation))
        mask = None if seen.mask is None else torch.from_numpy(seen.mask | over[:, None])
        noise = None if deterministic else policy.distribution.noise((n,), generator)
        action, _, _, state = policy.step(observation, state, torch.from_numpy(first), mask, noise)
        outcome = environments.step(policy.distribution.to_environment(map_tree(Tensor.numpy, action)))
        running += np.where(over, 0.0, outcome.reward)
        length += ~over
        done = (outcome.terminated | outcome.truncated) & ~over
        for row in np.flatnonzero(done & (quota > 0)):
            returns.append(float(running[row]))
            lengths.append(int(length[row]))
            quota[row] -= 1
        begun = done if environments.resets_at_once else over
        over = np.zeros(n, np.bool_) if environments.resets_at_once else done
        gone = done if outcome.lost is None else done | outcome.lost  # an episode whose environment failed is not scored
        running[gone], length[gone] = 0.0, 0
        first = begun if outcome.lost is None else begun | outcome.lost
        seen = outcome.seen
    return Score(tuple(returns), tuple(lengths), complete=not quota.any())


def _stored(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype == np.float64 else np.ascontiguousarray(x)
