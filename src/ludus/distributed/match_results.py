"""Results of matches that workers play: sums and counts that are sent with the blocks."""

from __future__ import annotations

from collections.abc import Iterable

from ludus.core.statistics import ResultWindow
from ludus.core.types import Segments
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.opponents import ZERO_SUM, ZeroSum

_RETURN, _LENGTH = "agent_return", "agent_length"

WORKER_RESULTS = (ZERO_SUM, _RETURN, _LENGTH)
"""Results of blocks that only `MatchResults` reads, after those of the config."""


class EpisodeTotals:
    """In a worker: adds the episodes of single agents to the blocks of their model."""

    def __init__(self, matches: MatchRunner) -> None:
        self._recent = matches.recent
        self._reported = {model: [0.0, 0.0, 0.0] for model in self._recent}

    def add_to(self, block: Segments) -> None:
        """Add the episodes since the last block of this model."""
        totals, reported = self._recent[block.model].totals, self._reported[block.model]
        episodes, *sums = (now - before for now, before in zip(totals, reported, strict=True))
        self._reported[block.model] = list(totals)
        for name, value in zip((_RETURN, _LENGTH), sums, strict=True):
            block.results[0, block.spec.results.index(name)] = value, episodes


class MatchResults:
    """In the learner: results of the blocks of all workers."""

    def __init__(self, models: Iterable[str], smoothing: int) -> None:
        self.zero_sum = ZeroSum()
        self._windows = {model: {name: ResultWindow(smoothing) for name in (_RETURN, _LENGTH)} for model in models}

    def add(self, block: Segments) -> None:
        sums = dict(zip(block.spec.results, block.results.sum(axis=0).tolist(), strict=True))
        self.zero_sum.add_counts(*sums[ZERO_SUM])
        for name, window in self._windows[block.model].items():
            total, count = sums[name]
            if count:
                window.add(total, count)

    def metrics(self) -> dict[str, float]:
        report: dict[str, float] = {"zero_sum": 1.0} if self.zero_sum else {}
        for model, windows in self._windows.items():
            for name, metric in ((_RETURN, "episode_return_mean"), (_LENGTH, "episode_length_mean")):
                if windows[name].count:
                    report[f"{model}/{metric}"] = windows[name].total / windows[name].count
        return report
