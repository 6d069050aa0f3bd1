"""Configuration of sampling workers: plain data that is sent to processes and to agents on other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.config.schema import PreprocessConfig, SelfPlayConfig
from ludus.core.types import SegmentSpec
from ludus.distributed.code_bundle import CodeBundle
from ludus.distributed.match_blocks import MatchSamplingPlan
from ludus.envs.wrappers import WrapperList
from ludus.process.screen_choice import AUTO
from ludus.process.workers.supervisor import WorkerRestart
from ludus.sampling.sampler import VersionClock
from ludus.transport.shared_memory import BlockLayout, BlockLayouts

STEP_COUNTERS = ("steps", "blocks", "environment_s", "policy_s", "blocked_s", "weights_wait_s", "env_restarts")
MATCH_COUNTERS = ("matches", "env_steps", "agent_steps", "late_rewards", "discarded_steps", "unrecorded_steps")
"""Of environments with several agents."""
COUNTERS = (*STEP_COUNTERS, *MATCH_COUNTERS)
"""Counters that a worker keeps in its ring, in this order; its node can read them at any time."""

WEIGHTS = "weights"


@dataclass(frozen=True)
class SamplingPlan:
    """Configuration of the workers."""

    env: str
    env_config: Mapping[str, Any]
    num_envs: int
    description: Mapping[str, Any]
    """Of the policy, as in `model.json`. Empty with several agents."""
    spec: SegmentSpec
    seed: int
    first_version: int
    """The version that the workers begin with; with several models the sum of their versions."""
    ahead: int | None
    """Number of updates by which a block may be sampled early; None: at any time, with the newest weights."""
    slots: int
    """Number of blocks of a worker that may wait."""
    hang_s: float = 60.0
    restart: WorkerRestart = field(default_factory=lambda: WorkerRestart(limit=None))
    forgiving: bool = False
    explore: bool = True
    device: str = "cpu"
    self_play: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    run: str = ""
    """The run directory; empty if it is not needed (it does not exist on every machine)."""
    clock: VersionClock | None = None
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    wrappers: WrapperList = ()
    display: str = AUTO
    """Screen of the environments, as `config.display`."""
    min_nodes: int = 1
    """Machines of a Ray cluster without which the run does not start."""
    code_bundle: CodeBundle = field(default_factory=CodeBundle)
    """The code of `env`, if it is a function of the user's script."""
    matches: MatchSamplingPlan | None = None
    """None: environments with one agent."""

    @property
    def layouts(self) -> BlockLayouts:
        """Layouts of the blocks that a worker writes."""
        if self.matches is None:
            return BlockLayouts([BlockLayout(self.spec, self.num_envs)])
        return BlockLayouts([BlockLayout(spec, self.matches.rows) for spec in self.matches.specs])

    @property
    def blocks_per_update(self) -> int:
        """Blocks that a worker writes between two versions: one of each model that is trained."""
        return 1 if self.matches is None else len(self.matches.specs)

    def needed_version(self, block: int) -> int:
        """The version with which block number `block` may begin."""
        if self.ahead is None:
            return self.first_version
        return self.first_version + (block // self.blocks_per_update - self.ahead) * self.blocks_per_update

    def seed_of(self, index: int, block: int, incarnation: int) -> int:
        """Distinct seeds for the environments of all workers; a restarted worker does not repeat earlier samples."""
        if block == 0 and incarnation == 1:
            return (self.seed + index * self.num_envs) % (1 << 30)
        return int(np.random.SeedSequence((self.seed, index, block, incarnation)).generate_state(1)[0]) % (1 << 30)


def ring_path(directory: Path, index: int) -> Path:
    """The ring of a worker in the directory of its node."""
    return directory / f"worker-{index}.ring"
