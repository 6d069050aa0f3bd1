"""A league on disk: a journal of events, and snapshots of the whole state, so that a restart does not have to read all events.

    <league>/lock                    held by the one process that writes
    <league>/journal/000000000000.jsonl    events from that number on, one JSON object per line
    <league>/state-000000020000.msgpack    the state after that number of events
    <league>/settings.json           settings at the first event, of leagues of earlier releases; later ones are in the journal

An event is in the journal before it is acknowledged. A process that is killed while it writes leaves a torn last line, which was not
acknowledged and is removed at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack

from ludus.errors import Damaged, Fenced, NotFound, StoreFull
from ludus.io.atomic_file import replace_file
from ludus.league.events import LeagueEvent, SettingsChanged, event_from_json, event_to_json, player_from_json
from ludus.league.payoff import PayoffTable
from ludus.league.players import Player
from ludus.league.ratings import SkillEstimate
from ludus.league.recent import PairResults, RecentResults
from ludus.league.settings import LeagueSettings, settings_from_json, settings_to_json
from ludus.league.state import LeagueState, Refusal, step

log = logging.getLogger(__name__)

SNAPSHOT_EVERY: Final = 20_000
"""Events between two snapshots of the state."""
_KEPT_SNAPSHOTS: Final = 2
_FORMAT: Final = 4
_WITHOUT_SETTINGS, _WITH_DOUBLES = 2, 3
"""Earlier formats of snapshots, which are still read."""
_LOCK_WAIT_S: Final = 0.5
"""Time to wait for the lock, which commands such as `ludus league add` and `status` hold for a moment."""
_JOURNAL: Final = "journal"
_SETTINGS: Final = "settings.json"


class LeagueJournal:
    """The state of a league, stored on disk with every event. Only one process can open it; a second one raises Fenced."""

    def __init__(
        self,
        directory: Path,
        settings: LeagueSettings | None = None,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
        durable: bool = False,
    ) -> None:
        """`settings`: for all events from now on; None: those that the league has.

        `durable`: wait for the disk after every event, against power loss. A killed process loses nothing either way. Raises
        NotFound without `settings` if there is no league.
        """
        self.directory, self._snapshot_every, self._durable = directory, snapshot_every, durable
        if settings is None:
            _require_league(directory)
        with contextlib.ExitStack() as stack:
            try:
                (directory / _JOURNAL).mkdir(parents=True, exist_ok=True)
                stack.callback(os.close, _acquire(directory / "lock"))
            except OSError as error:
                raise StoreFull(f"Cannot write to {directory}: {error.strerror}.", "Choose another directory.") from error
            self.state, self._events = _load(directory)
            self._snapshot_at = self._events
            self._fd = self._open_segment()
            stack.callback(lambda: os.close(self._fd))
            if settings is not None:
                self.change_settings(settings)
            self._stack = stack.pop_all()

    @property
    def events(self) -> int:
        """Number of events since the league was created."""
        return self._events

    def apply(self, event: LeagueEvent) -> Refusal | None:
        """Store the event and change the state, or return why it was refused."""
        after = step(self.state, event)
        if isinstance(after, Refusal):
            return after
        self._append(json.dumps(event_to_json(event), allow_nan=False).encode() + b"\n")
        self.state, self._events = after, self._events + 1
        if self._events - self._snapshot_at >= self._snapshot_every:
            self.snapshot()
        return None

    def change_settings(self, settings: LeagueSettings) -> None:
        """Apply settings to the following events, unless the league has them."""
        if settings != self.state.settings or not self._events:
            self.apply(SettingsChanged(settings))

    def snapshot(self) -> None:
        """Store the whole state, and begin a new segment of the journal."""
        replace_file(self.directory / f"state-{self._events:012d}.msgpack", _pack(self.state, self._events), durable=True)
        self._snapshot_at = self._events
        os.close(self._fd)
        self._fd = self._open_segment()
        for old in sorted(self.directory.glob("state-*.msgpack"))[:-_KEPT_SNAPSHOTS]:
            old.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()

    def _append(self, line: bytes) -> None:
        """Raises OSError, with the journal as before."""
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def _open_segment(self) -> int:
        path = self.directory / _JOURNAL / f"{self._events:012d}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _acquire(path: Path) -> int:
    """Lock the league for this process; the lock ends with the process, also if it is killed. Raises Fenced."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() >= deadline:
            owner = os.read(fd, 100).decode(errors="replace").strip()
            os.close(fd)
            raise Fenced(
                f"Another process runs the league in {path.parent}{f' ({owner})' if owner else ''}.",
                "One league has one coordinator: stop the other one first.",
            )
        time.sleep(0.02)
    os.ftruncate(fd, 0)
    os.write(fd, f"process {os.getpid()} on {platform.node()}".encode())
    return fd


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holds_league(directory: Path) -> bool:
    return (directory / _JOURNAL).is_dir()


def read_owner(directory: Path) -> str:
    """The process that runs the league; empty if none does. Takes the lock for a moment if it is free."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY)
    except OSError:
        return ""
    try:
        if _try_lock(fd, fcntl.LOCK_SH):
            return ""
        return os.read(fd, 100).decode(errors="replace").strip() or "unknown process"
    finally:
        os.close(fd)


# -- reading ------------------------------------------------------------------------------------------------------------------


def read_state(directory: Path) -> LeagueState:
    """The state on disk, without the lock: for status pages while the league runs. Raises NotFound, Damaged."""
    _require_league(directory)
    return _load(directory, repair=False)[0]


def read_events(directory: Path) -> Iterator[LeagueEvent]:
    """All events from the beginning, without the lock; the first one has the settings. Raises NotFound, Damaged."""
    _require_league(directory)
    if (first := _first_settings(directory)) is not None:
        yield SettingsChanged(first)
    for path in sorted((directory / _JOURNAL).glob("*.jsonl")):
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield event_from_json(json.loads(line))


def _require_league(directory: Path) -> None:
    if not holds_league(directory):
        raise NotFound(f"There is no league in {directory}.", "`ludus league run` creates one.")


def _first_settings(directory: Path) -> LeagueSettings | None:
    """Settings of a league of an earlier release, whose journal does not begin with them. Raises Damaged."""
    path = directory / _SETTINGS
    try:
        return settings_from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{path} is damaged: {error}.", "Restore it from a backup.") from error


def _load(directory: Path, *, repair: bool = True) -> tuple[LeagueState, int]:
    """The newest readable snapshot and the events after it. Raises Damaged."""
    settings = _first_settings(directory) or LeagueSettings()
    state, events = LeagueState(settings), 0
    for path in sorted(directory.glob("state-*.msgpack"), reverse=True):
        try:
            with _pause_garbage_collection():
                state, events = _unpack(path.read_bytes(), settings)
            break
        except (Damaged, OSError) as error:
            log.warning("%s cannot be read (%s); an earlier snapshot is used", path, error)
    segments = sorted((directory / _JOURNAL).glob("*.jsonl"))
    for path, following in itertools.zip_longest(segments, segments[1:]):
        first = int(path.stem)
        if following is not None and int(following.stem) <= events:
            continue
        if first > events:
            raise Damaged(f"Events {events} to {first} of the league in {directory} are missing.", "Restore them from a backup.")
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and following is not None:
            raise Damaged(f"{path} ends in the middle of an event.", "Restore it from a backup.")
        if whole < len(data) and repair:
            os.truncate(path, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=first):
            if number < events:
                continue
            state = _replay(state, line, path, number)
            events += 1
    return state, events


def _replay(state: LeagueState, line: bytes, path: Path, number: int) -> LeagueState:
    try:
        after = step(state, event_from_json(json.loads(line)))
    except ValueError as error:
        raise Damaged(f"Event {number} in {path} is damaged: {error}.", "Restore it from a backup.") from error
    if isinstance(after, Refusal):
        raise Damaged(f"Event {number} in {path} does not fit the events before it: {after.reason}")
    return after


# -- the format of snapshots --------------------------------------------------------------------------------------------------


def _pack(state: LeagueState, events: int) -> bytes:
    content = {
        "format": _FORMAT,
        "events": events,
        "settings": settings_to_json(state.settings),
        "players": [dataclasses.asdict(player) for player in state.players.values()],
        "payoff": state.payoff.half(),
        "elo": dict(state.elo),
        "skill": {name: dataclasses.astuple(skill) for name, skill in state.skill.items()},
        "quality": dict(state.quality),
        "recent": {name: recent.entries for name, recent in state.recent.items()},
        "results": state.results,
        "reports": dict(state.reports),
    }
    packed: bytes = msgpack.packb(content)
    return packed


def _recent_results(entries: Sequence[Sequence[Any]]) -> RecentResults:
    made = tuple(PairResults._make(entry) for entry in entries)
    return RecentResults(made, sum(one.games for one in made))


def _without_doubles(recent: Mapping[str, RecentResults], players: Sequence[Player]) -> dict[str, RecentResults]:
    """Keep a match of two training players under the name that sorts first. Earlier formats have it among the latest results of both."""
    settled = {player.name for player in players if not player.role.learns}
    learning = {player.name for player in players if player.role.learns}
    return {
        own: results.against(settled | {other for other in learning if own < other}) if own in learning else results
        for own, results in recent.items()
    }


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Unpacking a snapshot creates up to a million tuples without cycles; the collector would take two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unpack(data: bytes, first: LeagueSettings) -> tuple[LeagueState, int]:
    """`first`: settings at the first event, for snapshots without settings."""
    try:
        content: Mapping[str, Any] = msgpack.unpackb(data, use_list=False)
        if content["format"] not in (_FORMAT, _WITHOUT_SETTINGS, _WITH_DOUBLES):
            raise Damaged(f"It has format {content['format']}; this release reads {_FORMAT}.", "Update Ludus.")
        players = [player_from_json(values) for values in content["players"]]
        recent = {name: _recent_results(entries) for name, entries in content["recent"].items()}
        if content["format"] != _FORMAT:
            recent = _without_doubles(recent, players)
        state = LeagueState(
            first if content["format"] == _WITHOUT_SETTINGS else settings_from_json(content["settings"]),
            {player.name: player for player in players},
            PayoffTable.from_half(content["payoff"]),
            content["elo"],
            {name: SkillEstimate(*values) for name, values in content["skill"].items()},
            content["quality"],
            recent,
            content["results"],
            content["reports"],
        )
        return state, int(content["events"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise Damaged(f"It is not a snapshot of a league: {error}.") from error
