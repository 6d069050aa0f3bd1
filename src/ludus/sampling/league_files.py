"""Files by which the coordinator of a league and the sampling processes of its players communicate, without a server.

    <league>/matchmaking/<player>.json    coordinator → samplers: opponents with their probabilities; replaced in one step
    <league>/results/<source>.jsonl       samplers → coordinator: numbered reports, only appended

A source is one sampling process. It holds a lock on its file while it lives; a file whose lock is free gets no further reports.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ludus.errors import Damaged
from ludus.io import json_lines
from ludus.io.atomic_file import replace_json, temporary_path

log = logging.getLogger(__name__)

MATCHMAKING, RESULTS = "matchmaking", "results"
_MAX_COUNT: Final = 1 << 40
_MAX_REASON: Final = 500


# -- coordinator → samplers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeagueOpponent:
    """One opponent of a player. `model`: where its policy is, relative to the league; empty for the player itself."""

    name: str
    model: str
    probability: float
    token_file: str = ""
    """File with the token of a served address. The token itself is not stored in the league."""
    generation: int = 0
    """Number of its resets so far."""


@dataclass(frozen=True)
class Matchmaking:
    """Instructions of the coordinator for the samplers of one player."""

    player: str
    generation: int = 0
    """Number of resets of the player so far. Training of an earlier generation has to end."""
    opponents: tuple[LeagueOpponent, ...] = ()
    stop: str = ""
    """Why training has to end; empty: it continues."""
    snapshot_due_at: int | None = None
    """Environment steps of this generation at which a snapshot is taken; None: its league has no rule for it."""


def matchmaking_path(league: Path, player: str) -> Path:
    return league / MATCHMAKING / f"{player}.json"


def write_matchmaking(league: Path, matchmaking: Matchmaking) -> None:
    path = matchmaking_path(league, matchmaking.player)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, asdict(matchmaking))


def read_matchmaking(league: Path, player: str) -> Matchmaking | None:
    """None: the coordinator has not written it yet. Raises Damaged."""
    path = matchmaking_path(league, player)
    try:
        values = json.loads(path.read_bytes())
        opponents = tuple(
            LeagueOpponent(
                str(one["name"]),
                str(one["model"]),
                float(one["probability"]),
                str(one.get("token_file", "")),
                int(one.get("generation", 0)),
            )
            for one in values["opponents"]
        )
        due = values.get("snapshot_due_at")
        return Matchmaking(
            str(values["player"]), int(values["generation"]), opponents, str(values["stop"]), None if due is None else int(due)
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {error!r}.", "The coordinator of the league writes it anew when it starts.") from error


class MatchmakingWatch:
    """The newest matchmaking of a player; reads the file only when it has changed."""

    def __init__(self, league: Path, player: str) -> None:
        self._league, self._player = league, player
        self._path = matchmaking_path(league, player)
        self._read: tuple[int, int, int] | None = None
        self.current: Matchmaking | None = None

    def update(self) -> bool:
        """Return whether it has changed. A file that cannot be read is ignored until the next change."""
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._read:
                return False
            after = read_matchmaking(self._league, self._player)
        except (OSError, Damaged) as error:
            if self.current is not None:  # for example a network file system that does not answer
                log.warning("new opponents of %s cannot be read, the previous ones are used: %s", self._player, error)
            return False
        self._read, changed = stamp, after is not None and after != self.current
        self.current = after or self.current
        return changed


# -- samplers → coordinator ---------------------------------------------------------------------------------------------------


@dataclass
class _PairCount:
    wins: int = 0
    draws: int = 0
    losses: int = 0
    gain: float = 0.0


@dataclass(frozen=True)
class PairReport:
    """Results of matches of one pair. `gain`: sum over the matches of half the difference between the sides' mean returns."""

    number: int
    player: str
    opponent: str
    generation: int
    wins: int
    draws: int
    losses: int
    gain: float
    opponent_generation: int | None = None
    """None: not known, as in reports of earlier releases."""


@dataclass(frozen=True)
class UnusableModel:
    """A sampler cannot use the policy of a player."""

    number: int
    player: str
    model: str
    reason: str
    temporary: bool = False
    """Its server does not answer; the player can be used again when it does."""


SpoolReport = PairReport | UnusableModel


class ResultSpool:
    """Counts results of finished matches and appends them as numbered reports to a file of this process."""

    def __init__(self, league: Path, prefix: str) -> None:
        """`prefix`: of the file's name. Raises OSError."""
        self._league, self._prefix = league, prefix
        self._pending: dict[tuple[str, str, int, int], _PairCount] = {}
        self._failed = False
        self._open()

    def _open(self) -> None:
        directory = self._league / RESULTS
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{self._prefix}.{secrets.token_hex(6)}.jsonl"
        temporary = temporary_path(self.path)
        self._fd = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: the coordinator keeps the file
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, self.path)  # the coordinator never sees it without its lock
        self._number = 0

    @property
    def source(self) -> str:
        return self.path.name.removesuffix(".jsonl")

    def add(self, player: str, opponent: str, generation: int, score: float, gain: float, opponent_generation: int = 0) -> None:
        """Count a finished match. `score` of the player: 1, 0.5 or 0."""
        count = self._pending.setdefault((player, opponent, generation, opponent_generation), _PairCount())
        count.wins += score > 0.5
        count.draws += score == 0.5
        count.losses += score < 0.5
        count.gain += gain

    def report_unusable(self, player: str, model: str, reason: str, temporary: bool = False) -> None:
        with contextlib.suppress(OSError):
            self._append(UnusableModel(self._number + 1, player, model, reason[:_MAX_REASON], temporary))

    def flush(self) -> None:
        """Append the results since the last call. If that fails, they stay until the next call."""
        for pair, count in list(self._pending.items()):
            player, opponent, generation, theirs = pair
            counts = (count.wins, count.draws, count.losses)
            report = PairReport(self._number + 1, player, opponent, generation, *counts, count.gain, theirs)
            try:
                self._append(report)
            except OSError as error:
                if not self._failed:
                    log.warning("results cannot be written to %s now and are written later: %s", self.path, error)
                self._failed = True
                return
            self._failed = False
            del self._pending[pair]

    def _append(self, report: SpoolReport) -> None:
        """Raises OSError, with the file as before."""
        if not os.fstat(self._fd).st_nlink:  # removed by a coordinator that does not see our lock
            os.close(self._fd)
            self._open()
            report = replace(report, number=1)
        line = json_lines.encode(asdict(report))
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, size)
            raise
        self._number = report.number

    def close(self) -> None:
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1


def parse_report(line: bytes) -> SpoolReport:
    """Parse one line of a file of results. Raises ValueError."""
    values = json_lines.decode(line)
    try:
        if "model" in values:
            player, model, reason = (_text(values, key) for key in ("player", "model", "reason"))
            return UnusableModel(_count(values, "number"), player, model, reason, values.get("temporary") is True)
        generation, wins, draws, losses = (_count(values, key) for key in ("generation", "wins", "draws", "losses"))
        gain = values["gain"]
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not math.isfinite(gain):
            raise ValueError(f"gain is {gain!r}")
        pair = (_text(values, "player"), _text(values, "opponent"))
        theirs = None if values.get("opponent_generation") is None else _count(values, "opponent_generation")
        return PairReport(_count(values, "number"), *pair, generation, wins, draws, losses, float(gain), theirs)
    except KeyError as error:
        raise ValueError(f"{error} is missing") from error


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{key} is {value!r}")
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    if not isinstance(values[key], str):
        raise ValueError(f"{key} is {values[key]!r}")
    return str(values[key])


@dataclass
class SpoolReader:
    """Reads the reports of one source; the coordinator's side."""

    path: Path
    offset: int = 0
    damaged: int = 0
    """Number of complete lines that are not valid reports."""

    @property
    def source(self) -> str:
        return self.path.name.removesuffix(".jsonl")

    def read(self) -> Iterator[SpoolReport]:
        """Yield the reports since the last call, without a line that is not complete yet. Raises OSError."""
        if self.path.stat().st_size == self.offset:
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    report = parse_report(line)
                except ValueError as error:
                    self.damaged += 1
                    log.warning("a report in %s is damaged and not counted: %s", self.path, error)
                else:
                    yield report
                self.offset += len(line)  # after the reader has stored it: otherwise it is read again

    def is_finished(self) -> bool:
        """Whether its writer has ended and all complete lines are read. False if that cannot be determined."""
        try:
            with open(self.path, "rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                file.seek(self.offset)  # with the lock: the writer may have added lines after the last read, and then ended
                return b"\n" not in file.read()
        except OSError:
            return False
