"""Training of one player of a league: an ordinary run below the league's directory, whose opponents the coordinator chooses."""

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

from ludus.core.metrics import Numbers, Sink
from ludus.core.plugins import did_you_mean
from ludus.errors import Fenced, NotFound, UsageError
from ludus.experiments import runner
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from ludus.experiments.runs import resume_diff
from ludus.experiments.runs.run_dir import Run, holds_run
from ludus.league.runtime.league_file import LEAGUE_FILE, LeagueConfig, player_experiment, read_league
from ludus.league.runtime.stored_models import find_newest, run_directory
from ludus.process.signals import stop_on_signals
from ludus.sampling.league_files import Matchmaking, MatchmakingWatch

log = logging.getLogger(__name__)

LEARNERS: Final = "learners"
_POLL_S: Final = 1.0
_FIRST_POLL_S: Final = 0.1


def train_player(
    league: Path,
    player: str,
    steps: int | None = None,
    *,
    sinks: Sequence[Sink] = (),
    announce: Announce | None = None,
    wait_s: float = 60.0,
) -> Result | None:
    """Train a player of the league in this process until `steps` more environment steps, or until the coordinator ends it.

    Continues the player's run from its newest checkpoint; after a reset a new run begins. Waits up to `wait_s` for a coordinator that has
    not published opponents yet. Returns None if the coordinator has stopped the player. Raises Fenced if another process trains the player.
    """
    config = read_league(league / LEAGUE_FILE)
    if player not in config.learners():
        raise UsageError(f"The league in {league} has no training player {player!r}.", did_you_mean(player, config.learners()))
    with claim_player(league, player):
        watch = MatchmakingWatch(league, player)
        orders = _await_matchmaking(watch, league, player, wait_s)
        if orders.stop:
            if announce is not None:
                announce(f"{player} does not train: {orders.stop}")
            return None
        return _train(league, config, orders, steps, [*sinks, _StopOnOrders(watch, orders.generation)], announce)


def _train(
    league: Path,
    config: LeagueConfig,
    orders: Matchmaking,
    steps: int | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
) -> Result:
    player, directory = orders.player, run_directory(league, orders.player, orders.generation)
    newest = find_newest(directory)
    trained = 0 if newest is None else newest.timesteps
    experiment = player_experiment(config, player, league, orders.generation)
    experiment["stop"] = {} if steps is None else {"timesteps": trained + steps}
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


class _StopOnOrders:
    """A sink that ends the run when the coordinator has stopped or reset the player."""

    def __init__(self, watch: MatchmakingWatch, generation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch, self._generation, self._clock = watch, generation, clock
        self._poll_at = clock() + _POLL_S

    def stop_requested(self) -> str | None:
        if (now := self._clock()) >= self._poll_at:
            self._poll_at = now + _POLL_S
            self._watch.update()
        current = self._watch.current
        if current is None:
            return None
        if current.generation != self._generation:
            return "the player starts again from its initial weights"
        return current.stop or None

    def stops_in_order(self) -> bool:
        return True

    def write(self, numbers: Numbers) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to close."""


# -- one learner per player ------------------------------------------------------------------------------------------------------


def _lock_path(league: Path, player: str) -> Path:
    return league / LEARNERS / f"{player}.lock"


@contextlib.contextmanager
def claim_player(league: Path, player: str) -> Iterator[None]:
    """Lock the player for this process, until the end of the block or of the process. Raises Fenced."""
    path = _lock_path(league, player)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Fenced(
                f"{player} is trained by another process already ({os.read(fd, 200).decode(errors='replace').strip() or 'unknown'}).",
                "One player has one learner: stop the other one first.",
            ) from error
        except OSError as error:  # a file system without locks; the run itself is fenced as well
            log.warning("%s cannot be locked: %s", path, error)
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        os.close(fd)


def is_claimed(league: Path, player: str) -> bool:
    """Whether a process on any machine trains the player now."""
    try:
        with open(_lock_path(league, player), "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
