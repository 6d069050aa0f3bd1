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
from pathlib import Path
from typing import Final

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
from ludus.sampling.league_policies import SCRIPT, load_script

log = logging.getLogger(__name__)

LEARNERS: Final = "learners"
_LOCK, _NEXT = "lock", "next"
_POLL_S: Final = 1.0
_FIRST_POLL_S: Final = 0.1
_ENDLESS_STEPS: Final = 10**12
"""Stop condition of a player that trains until its league stops: a run without any would end after a default number of steps."""
_PROBE_S: Final = 0.5
"""Time to wait for a lock in any case: `is_claimed` of another process holds it for a moment."""


def check_scripts(league: Path) -> None:
    """Import the scripts of all players: opponents that only this machine cannot import must not be quarantined. Raises UsageError."""
    for player in read_state(league).players.values():
        if player.available and player.model.startswith(SCRIPT):
            load_script(league, player.model)


def train_player(
    league: Path,
    player: str,
    steps: int | None = None,
    *,
    sinks: Sequence[Sink] = (),
    announce: Announce | None = None,
    wait_s: float = 60.0,
    take_over_s: float = 0.0,
    follow_resets: bool = False,
) -> Result | None:
    """Train a player of the league in this process until `steps` more environment steps, or until the coordinator ends it.

    Continues the player's run from its newest checkpoint. After a reset a new run begins: here with `follow_resets`, else with the next
    call. Waits up to `wait_s` for a coordinator that has not published opponents yet, and up to `take_over_s` for another process
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
            ended = _StopOnOrders(watch, orders.generation)
            result = _train(league, config, orders, steps, [*sinks, ended], announce)
            if steps is not None:
                steps -= _trained_steps(league, orders) - trained
            if not (follow_resets and ended.is_reset) or ended.is_stopped or (steps is not None and steps <= 0):
                return result


def _trained_steps(league: Path, orders: Matchmaking) -> int:
    newest = find_newest(run_directory(league, orders.player, orders.generation))
    return 0 if newest is None else newest.timesteps


def _train(
    league: Path,
    config: LeagueConfig,
    orders: Matchmaking,
    steps: int | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
) -> Result:
    player, directory = orders.player, run_directory(league, orders.player, orders.generation)
    experiment = player_experiment(config, player, league, orders.generation)
    experiment["stop"] = {"timesteps": _ENDLESS_STEPS if steps is None else _trained_steps(league, orders) + steps}
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


class PlayerDisplay(TrainingDisplay):
    """Progress of a player that trains until its league stops."""

    def begin(self, stop: StopConfig) -> None:
        super().begin(stop if stop.timesteps != _ENDLESS_STEPS else StopConfig())


class _StopOnOrders:
    """A sink that ends the run when the coordinator has stopped or reset the player."""

    def __init__(self, watch: MatchmakingWatch, generation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch, self._generation, self._clock = watch, generation, clock
        self._poll_at = clock() + _POLL_S

    @property
    def is_reset(self) -> bool:
        current = self._watch.current
        return current is not None and current.generation != self._generation

    @property
    def is_stopped(self) -> bool:
        return self._watch.current is not None and bool(self._watch.current.stop)

    def stop_requested(self) -> str | None:
        if (now := self._clock()) >= self._poll_at:
            self._poll_at = now + _POLL_S
            self._watch.update()
        if self._watch.current is not None and self.is_stopped:
            return self._watch.current.stop
        return "the player starts again from its initial weights" if self.is_reset else None

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
