"""Training of one player of a league: an ordinary run below the league's directory, whose opponents the coordinator chooses.

<league>/learners/main.lock       held by the process that trains the player, on any machine
<league>/learners/main.next       held by a process that waits to train it: the coordinator then gives the player no further turn
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

from ludus.config.schema import StopConfig
from ludus.core.metrics import Numbers, Sink
from ludus.core.plugins import did_you_mean
from ludus.errors import Fenced, NotFound, UsageError
from ludus.experiments import runner
from ludus.experiments.control.training_display import TrainingDisplay
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from ludus.experiments.runs import resume_diff
from ludus.experiments.runs.run_dir import Run, holds_run
from ludus.league.journal import read_state
from ludus.league.runtime.league_file import LeagueConfig, player_experiment, read_stored_league
from ludus.league.runtime.stored_models import find_newest, run_directory
from ludus.process.signals import stop_on_signals
from ludus.sampling.league_files import Matchmaking, MatchmakingWatch
from ludus.sampling.league_policies import ADDRESS, SCRIPT, load_script, read_player_token

log = logging.getLogger(__name__)

LEARNERS: Final = "learners"
_LOCK, _NEXT = "lock", "next"
_POLL_S: Final = 1.0
_FIRST_POLL_S: Final = 0.1
_ENDLESS_STEPS: Final = 10**12
"""Stop condition of a player that trains until its league stops: a run without any would end after a default number of steps."""
_SNAPSHOT_S: Final = 15.0
"""Time that a running coordinator may take for a snapshot that is due."""
_PROBE_S: Final = 0.5
"""Time to wait for a lock in any case: `is_claimed` of another process holds it for a moment."""


def check_opponents(league: Path) -> None:
    """Import all scripts and read all tokens: opponents that only this process cannot use must not be quarantined. Raises UsageError."""
    for player in read_state(league).players.values():
        if player.available and player.model.startswith(SCRIPT):
            load_script(league, player.model)
        elif player.available and player.model.startswith(ADDRESS):
            read_player_token(player.model, player.token_file)


def train_player(
    league: Path,
    player: str,
    steps: int | None = None,
    *,
    sinks: Sequence[Sink] = (),
    announce: Announce | None = None,
    wait_s: float = 60.0,
    take_over_s: float = 0.0,
    follow_orders: bool = False,
) -> Result | None:
    """Train a player of the league in this process until `steps` more environment steps, or until the coordinator ends it.

    Continues the player's run from its newest checkpoint. The run ends when a snapshot of the player is due, so that there is a
    checkpoint of that step, and when the player is reset. With `follow_orders` the training then continues here. Waits up to `wait_s` for a coordinator that has not published opponents yet, and up to `take_over_s` for another process
    that trains the player. Returns None if the coordinator has stopped the player before. Raises Fenced if another process trains it.
    """
    config = read_stored_league(league)
    if player not in config.learners():
        raise UsageError(f"The league in {league} has no training player {player!r}.", did_you_mean(player, config.learners()))
    result: Result | None = None
    with claim_player(league, player, take_over_s, announce):
        watch = MatchmakingWatch(league, player)
        while True:
            orders = _await_matchmaking(watch, league, player, wait_s)
            if orders.stop:
                if announce is not None:
                    announce(f"{player} does not train: {orders.stop}")
                return result
            trained = _trained_steps(league, orders)
            ended = _StopOnOrders(watch, orders, trained)
            result = _train(league, config, orders, _turn_end(orders, trained, steps), [*sinks, ended], announce)
            before, trained = trained, _trained_steps(league, orders)
            if steps is not None:
                steps -= trained - before
            goes_on = ended.is_reset or ended.is_outdated or _is_snapshot_due(orders, before, trained)
            interrupted = result.stopped_by.startswith("interrupted")
            if not (follow_orders and goes_on) or interrupted or ended.is_stopped or (steps is not None and steps <= 0):
                return result
            if signal := _await_snapshot(watch, orders):
                return replace(result, stopped_by=f"interrupted ({signal})")
            wait_s = 0.0  # the coordinator has published opponents; if it has stopped the player now, the training ends


def _turn_end(orders: Matchmaking, trained: int, steps: int | None) -> int:
    """Steps of the run at which it ends: after `steps` more, or when a snapshot is due, unless that could not be taken so far."""
    end = _ENDLESS_STEPS if steps is None else trained + steps
    due = orders.snapshot_due_at
    return end if due is None or due <= trained else min(end, due)


def _is_snapshot_due(orders: Matchmaking, before: int, trained: int) -> bool:
    """Whether the training from `before` to `trained` has reached the step of a snapshot."""
    return orders.snapshot_due_at is not None and before < orders.snapshot_due_at <= trained


def _trained_steps(league: Path, orders: Matchmaking) -> int:
    newest = find_newest(run_directory(league, orders.player, orders.generation))
    return 0 if newest is None else newest.timesteps


def _train(
    league: Path,
    config: LeagueConfig,
    orders: Matchmaking,
    end: int,
    sinks: Sequence[Sink],
    announce: Announce | None,
) -> Result:
    player, directory = orders.player, run_directory(league, orders.player, orders.generation)
    experiment = player_experiment(config, player, league, orders.generation)
    experiment["stop"] = {"timesteps": end}
    initial = config.players[player].model
    if not holds_run(directory):
        return runner.train(experiment, place=directory, restore=initial, sinks=sinks, announce=announce)
    changes = resume_diff.resume_changes(directory, experiment)
    saved = Run.open(directory).config()["config"]
    here = experiment["config"]["self_play"]["league"]
    changes["config"] = {**saved, "self_play": {**saved["self_play"], "league": here}}  # it may be mounted elsewhere than before
    return runner.resume(directory, changes=changes, restore=initial, sinks=sinks, announce=announce)


def _await_matchmaking(watch: MatchmakingWatch, league: Path, player: str, wait_s: float) -> Matchmaking:
    """Wait until the player may train; after `wait_s` return also if it is stopped. Raises NotFound, and KeyboardInterrupt on a signal."""
    deadline = time.monotonic() + wait_s
    with stop_on_signals() as stop:
        while True:
            watch.update()
            late = time.monotonic() >= deadline
            if watch.current is not None and (late or not watch.current.stop):
                return watch.current
            if stop():
                raise KeyboardInterrupt
            if late:
                raise NotFound(
                    f"The coordinator of the league in {league} has published no opponents for {player}.",
                    "Start it: ludus league run -f FILE --dir DIR.",
                )
            time.sleep(_FIRST_POLL_S)


def _await_snapshot(watch: MatchmakingWatch, orders: Matchmaking) -> str:
    """Wait until the coordinator has taken the snapshot and has reset the player, if it does: with this player's old weights no more
    results are wanted. Ends after a few seconds without a coordinator. Returns the name of a signal that has arrived.
    """
    deadline = time.monotonic() + _SNAPSHOT_S
    with stop_on_signals() as stop:
        while not stop() and time.monotonic() < deadline:
            watch.update()
            now = watch.current
            if now is None or now.stop or (now.generation, now.snapshot_due_at) != (orders.generation, orders.snapshot_due_at):
                return ""
            time.sleep(_FIRST_POLL_S)
        return stop.name or ""


class PlayerDisplay(TrainingDisplay):
    """Progress of a player, whose run ends with every snapshot and is continued."""

    def __init__(self, steps: int | None, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        """`steps`: after which the training ends; None: when its league stops."""
        super().__init__(quiet=quiet, stream=stream)
        self._is_endless = steps is None

    def begin(self, stop: StopConfig) -> None:
        super().begin(StopConfig() if self._is_endless else stop)


class _StopOnOrders:
    """A sink that ends the run when the coordinator has stopped or reset the player, or has taken a snapshot that was overdue."""

    def __init__(
        self, watch: MatchmakingWatch, orders: Matchmaking, trained: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`trained`: steps of the run at its start."""
        self._watch, self._orders, self._clock = watch, orders, clock
        self._is_overdue = orders.snapshot_due_at is not None and orders.snapshot_due_at <= trained
        self._poll_at = clock() + _POLL_S

    @property
    def is_reset(self) -> bool:
        current = self._watch.current
        return current is not None and current.generation != self._orders.generation

    @property
    def is_outdated(self) -> bool:
        """Whether the run, which began without an end, has to end with the next snapshot."""
        current = self._watch.current
        return self._is_overdue and current is not None and current.snapshot_due_at != self._orders.snapshot_due_at

    @property
    def is_stopped(self) -> bool:
        return self._watch.current is not None and bool(self._watch.current.stop)

    def stop_requested(self) -> str | None:
        if (now := self._clock()) >= self._poll_at:
            self._poll_at = now + _POLL_S
            self._watch.update()
        if self._watch.current is not None and self.is_stopped:
            return self._watch.current.stop
        if self.is_reset:
            return "the player starts again from its initial weights"
        return "its snapshot was taken" if self.is_outdated else None

    def stops_in_order(self) -> bool:
        return True

    def write(self, numbers: Numbers) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to close."""


# -- one learner per player ------------------------------------------------------------------------------------------------------


def _lock_path(league: Path, player: str, kind: str) -> Path:
    return league / LEARNERS / f"{player}.{kind}"


@contextlib.contextmanager
def claim_player(league: Path, player: str, wait_s: float = 0.0, announce: Announce | None = None) -> Iterator[None]:
    """Lock the player for this process, until the end of the block or of the process.

    Waits up to `wait_s` for another process that trains it; meanwhile the coordinator gives the player no further turn. Raises
    Fenced, and KeyboardInterrupt on a signal.
    """
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(_open_lock(_lock_path(league, player, _LOCK)))
        if not _try_lock(fd):
            _await_lock(league, player, fd, wait_s, announce)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield


def _await_lock(league: Path, player: str, fd: int, wait_s: float, announce: Announce | None) -> None:
    deadline, announced = time.monotonic() + max(wait_s, _PROBE_S), False
    with stop_on_signals() as stop, _open_lock(_lock_path(league, player, _NEXT)) as request:
        requested = False
        while not (requested := requested or _try_lock(request)) or not _try_lock(fd):
            if stop():
                raise KeyboardInterrupt
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() >= deadline:
                raise Fenced(
                    f"{player} is trained by another process already ({holder}).",
                    "One player has one learner: stop the other one first, or wait longer (--wait) if it is a turn of the coordinator.",
                )
            if announce is not None and wait_s > _PROBE_S and not announced:
                announced = True
                announce(
                    f"{player} is trained by another process ({holder}); waiting up to {wait_s:.0f} s for the end of its turn"
                )
            time.sleep(_FIRST_POLL_S)


@contextlib.contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks; the run itself is fenced as well
        log.warning("a player cannot be locked: %s", error)
    return True


def is_claimed(league: Path, player: str) -> bool:
    """Whether a process on any machine trains the player now, or waits to train it."""
    return any(_is_locked(_lock_path(league, player, kind)) for kind in (_LOCK, _NEXT))


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
