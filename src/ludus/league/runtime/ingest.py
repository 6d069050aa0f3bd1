"""Transfers the reports of all sources into the journal, each exactly once. Runs in the coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ludus.league.events import PlayerQuarantined, ReportIgnored, ResultsReported, SourceClosed
from ludus.league.journal import LeagueJournal
from ludus.league.players import Player
from ludus.league.spool import apply_spool
from ludus.sampling.league_files import RESULTS, PairReport, SpoolReader, SpoolReport, UnusableModel

log = logging.getLogger(__name__)

_QUIET_S: Final = 10.0
"""Seconds without a new report before a file whose writer has ended is removed: some file systems do not share locks."""


class ResultIngest:
    """Follows the files in `results/`. A restarted coordinator reads them again; the journal ignores reports that it has counted."""

    def __init__(
        self,
        journal: LeagueJournal,
        clock: Callable[[], float] = time.monotonic,
        on_away: Callable[[Player, str], None] = lambda player, reason: None,
    ) -> None:
        """`on_away`: called with a player whose server does not answer, and the reason; the player is in quarantine then."""
        self._journal, self._clock, self._on_away = journal, clock, on_away
        self._directory: Path = journal.directory / RESULTS
        self._readers: dict[str, SpoolReader] = {}
        self._read_at: dict[str, float] = {}
        self.refused = 0
        """Reports that were not counted, other than repeated ones."""
        self._damaged_before = 0
        self._close_removed_sources()

    def _close_removed_sources(self) -> None:
        """Forget sources whose file was removed just before the coordinator was killed."""
        apply_spool(self._journal)  # first: what it has counted before is refused by its source, which is forgotten below
        for source in self._journal.state.reports if self._directory.is_dir() else ():
            if not (self._directory / f"{source}.jsonl").exists():
                self._journal.apply(SourceClosed(source))

    @property
    def damaged(self) -> int:
        """Number of complete lines that are not valid reports."""
        return self._damaged_before + sum(reader.damaged for reader in self._readers.values())

    def poll(self) -> int:
        """Count the new reports of all sources; returns their number."""
        counted = 0
        for path in sorted(self._directory.glob("*.jsonl")):
            reader = self._readers.setdefault(path.name, SpoolReader(path))
            counted += self._read(reader)
        return counted

    def _read(self, reader: SpoolReader) -> int:
        before, now, counted = reader.offset, self._clock(), 0
        try:
            for report in reader.read():
                counted += self._count(reader.source, report)
        except OSError as error:
            log.warning("reports in %s cannot be read now: %s", reader.path, error)
            return counted
        if reader.offset != before or reader.path.name not in self._read_at:
            self._read_at[reader.path.name] = now
        elif now - self._read_at[reader.path.name] >= _QUIET_S and reader.is_finished():
            self._remove(reader)
        return counted

    def _remove(self, reader: SpoolReader) -> None:
        self._damaged_before += reader.damaged
        reader.path.unlink(missing_ok=True)
        self._readers.pop(reader.path.name)
        self._read_at.pop(reader.path.name)
        self._journal.apply(SourceClosed(reader.source))

    def _count(self, source: str, report: SpoolReport) -> bool:
        if isinstance(report, UnusableModel):
            self._quarantine(source, report)
            return True
        refused = self._journal.apply(_event_of(source, report))
        if refused is not None and not refused.repeated:
            self.refused += 1
            log.warning("a report of %s is not counted: %s", source, refused.reason)
        return refused is None

    def _quarantine(self, source: str, report: UnusableModel) -> None:
        """Quarantine a player whose model cannot be used and has not changed since. Training players get a new model with their turn.

        The journal knows reports that were read before, so that a restarted coordinator does not repeat a quarantine that it has ended.
        """
        player = self._journal.state.players.get(report.player)
        if player is None or player.model != report.model or player.role.learns or not player.available:
            self._journal.apply(ReportIgnored(source, report.number))
            return
        if self._journal.apply(PlayerQuarantined(player.name, report.reason, source, report.number)) is not None:
            return
        log.warning("the player %s is quarantined: %s", player.name, report.reason)
        if report.temporary:
            self._on_away(player, report.reason)


def _event_of(source: str, report: PairReport) -> ResultsReported:
    return ResultsReported(
        source,
        report.number,
        report.player,
        report.opponent,
        report.wins,
        report.draws,
        report.losses,
        report.gain,
        report.generation,
        report.opponent_generation,
    )
