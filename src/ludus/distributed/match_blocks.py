"""Sampling of matches into blocks of fixed size, for the workers of this machine, of Ray nodes and of fleets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ludus.config.schema import SelfPlayConfig
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.match_results import EpisodeTotals
from ludus.models.policy import Policy
from ludus.models.weights.version_store import PolicySource
from ludus.sampling.match_opponents import seat_self_play
from ludus.sampling.multi_agent.batches import MultiAgentSettings, match_batches
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.sampler import Interruption, SamplerTimes


@dataclass(frozen=True)
class MatchSamplingPlan:
    """Configuration of workers whose environments have several agents."""

    policy_mapping: Mapping[str, str]
    """Agent → model."""
    descriptions: Mapping[str, Mapping[str, Any]]
    """Model → description, as in `model.json`; of all models, in the order of their weights."""
    specs: tuple[SegmentSpec, ...]
    """Of the models that are trained; a worker writes one block of each in turn."""
    rows: int
    """Rows of a block."""
    settings: MultiAgentSettings
    separate_rows: bool = False
    """Every segment has its own row, for replay buffers; otherwise segments of one agent share a row, one after the other."""


class ModelBlockWriter(Protocol):
    """SegmentWriter for the blocks of several models."""

    def reserve(self, timeout_s: float, model: str | None = None) -> Segments | None: ...
    def commit(self, segments: Segments) -> None: ...


class PinnedSource:
    """PolicySource whose version changes only with `refresh`, between two batches."""

    def __init__(self, source: PolicySource) -> None:
        self._source = source
        self._pinned: tuple[Policy, int] | None = None

    def refresh(self) -> None:
        self._pinned = self._source.newest()

    def newest(self) -> tuple[Policy, int]:
        if self._pinned is None:
            self.refresh()
        assert self._pinned is not None
        return self._pinned


class MatchBlockSampler:
    """Plays matches and writes one block of every trained model per `step`. Reproducible: all randomness comes from `seed`."""

    def __init__(
        self,
        copies: MatchCopies,
        plan: MatchSamplingPlan,
        sources: Mapping[str, PolicySource],
        writer: ModelBlockWriter,
        seed: int,
        *,
        self_play: SelfPlayConfig,
        interruption: Interruption,
        run: Path | None = None,
        worker: int = 0,
        skip: int = 0,
    ) -> None:
        """`run`: directory with stored versions for self-play. `worker`: its number, which makes its rows distinct.
        `skip`: number of blocks of the first step that were written by a predecessor.
        """
        self._plan, self._writer, self._skip = plan, writer, skip
        seating = None
        if self_play.opponents is not None:
            (source,) = sources.values()
            seating = seat_self_play(self_play, plan.policy_mapping, source, seed, run)
        self._batches = match_batches(plan.specs, plan.settings, copies)
        self._sampler = MultiAgentSampler(
            copies, plan.policy_mapping, sources, self._batches, plan.settings, seed,
            interruption=interruption, make_seating=seating, first_copy=worker * len(copies),
        )  # fmt: skip
        self.matches = self._sampler.matches
        self._episodes = EpisodeTotals(self.matches)

    @property
    def times(self) -> SamplerTimes:
        times, matches = self.matches.times, self.matches
        times.steps = matches.env_steps if self._plan.settings.by_env_steps else matches.agent_steps
        return times

    def close(self) -> None:
        """Close the seating, which may have results to report."""
        self._sampler.close()

    def is_between_batches(self) -> bool:
        """Whether the next `step` begins to play for a new batch."""
        return not self._batches.ready()

    def step(self, timeout_s: float) -> bool:
        """Play until the batches of all models are complete, and write them. False if there was no room for all of them in time: the
        next call continues with the rest.
        """
        while not self._batches.ready():
            self._sampler.step()
        while self._batches.ready():
            if self._skip:
                self._skip -= 1
                self._batches.discard()
                continue
            block = self._writer.reserve(timeout_s, self._batches.next_model)
            if block is None:
                return False
            self._batches.take_into(block, separate=self._plan.separate_rows)
            self._episodes.add_to(block)
            self._writer.commit(block)
        return True
