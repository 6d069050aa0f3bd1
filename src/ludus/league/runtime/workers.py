"""Processes of a league on this machine: turns of training players, and evaluations. They end with the coordinator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import LudusError
from ludus.experiments.control.learner_process import SupervisorPipe, pack_error, unpack_error
from ludus.experiments.control.restart_policy import LearnerFailure
from ludus.experiments.resolve import resolve
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.league.runtime.evaluation import play_pairs
from ludus.league.runtime.league_file import player_experiment, read_stored_league
from ludus.league.runtime.learner import train_player
from ludus.league.runtime.pair_task import PairTask
from ludus.league.runtime.player_models import EVALUATION
from ludus.process.signals import stop_on_signals
from ludus.process.workers.supervisor import FINAL_STATES, Context, Process, Supervisor

PRELOAD: Final = ("numpy", "torch", "ludus.experiments.runner", "ludus.experiments.assembly.multi_agent_training", __name__)
LOGS: Final = "logs"
_MAX_LINE_BYTES: Final = 16_000_000


def run_turn(context: Context, league: Path, player: str, steps: int, bundle: CodeBundle) -> None:
    """Entry point of a process: train a player for some steps."""
    pipe = SupervisorPipe(context.fds[0])
    bundle.unpack()
    context.ready()
    try:
        result = train_player(league, player, steps)
    except LudusError as error:
        pipe.send(error=pack_error(error))
    except KeyboardInterrupt:  # stopped before there was anything to save
        pipe.send(ended="interrupted")
    else:
        pipe.send(ended="not wanted" if result is None else result.stopped_by)


def run_evaluation(context: Context, league: Path, tasks: Sequence[PairTask], seed: int, bundle: CodeBundle) -> None:
    """Entry point of a process: play matches between players that do not learn."""
    pipe = SupervisorPipe(context.fds[0])
    bundle.unpack()
    context.ready()
    try:
        config = read_stored_league(league)
        resolved = resolve(player_experiment(config, config.learners()[0], league))
        with stop_on_signals() as stop:
            play_pairs(league, resolved, tasks, seed, stop)
    except LudusError as error:
        pipe.send(error=pack_error(error))
    else:
        pipe.send(ended="finished")


@dataclass
class LeagueTask:
    """A running process. `name`: the player that trains, or `evaluation`."""

    name: str
    process: Process
    reader: LineReader
    fd: int
    end_steps: int = 0
    """Steps that the player will have at the end of its turn."""
    ended: str | None = None
    error: LudusError | None = None

    def read(self) -> None:
        for message in json_lines.decode_valid(self.reader.read_available()):
            self.ended = message.get("ended", self.ended)
            if "error" in message:
                self.error = unpack_error(message["error"])

    def failure(self) -> LearnerFailure | None:
        """Why the process failed; None: it finished its work."""
        if self.ended is not None:
            return None
        if self.error is not None:
            return LearnerFailure(str(self.error), self.error)
        return LearnerFailure(self.process.error.rstrip().rpartition("\n")[2] or "it exited without a message")


class LeagueWorkers:
    """Starts the processes and reports how they ended. A context manager: leaving it ends all of them."""

    def __init__(self, league: Path, bundles: Mapping[str, CodeBundle]) -> None:
        """`bundles`: by training player."""
        self._league, self._bundles = league, bundles
        self._supervisor = Supervisor(log_dir=league / LOGS, preload=PRELOAD)
        self.tasks: dict[str, LeagueTask] = {}

    def __enter__(self) -> LeagueWorkers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._supervisor.close()
        for task in self.tasks.values():
            os.close(task.fd)

    def start_turn(self, player: str, steps: int, end_steps: int) -> None:
        """`end_steps`: steps that the player will have at the end of the turn."""
        self._start(player, run_turn, player, steps, self._bundles[player])
        self.tasks[player].end_steps = end_steps

    def start_evaluation(self, tasks: Sequence[PairTask], seed: int) -> None:
        self._start(EVALUATION, run_evaluation, list(tasks), seed, next(iter(self._bundles.values())))

    def _start(self, name: str, target: Any, *arguments: Any) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            process = self._supervisor.start(name, target, self._league, *arguments, fds=(write_end,))
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.tasks[name] = LeagueTask(name, process, LineReader(read_end, _MAX_LINE_BYTES, skip_long=True), read_end)

    def poll(self) -> list[LeagueTask]:
        """Read what the processes report; returns those that have ended."""
        ended = []
        for task in list(self.tasks.values()):
            final = task.process.state in FINAL_STATES  # before the last read: nothing is written after it
            task.read()
            if final:
                ended.append(self.tasks.pop(task.name))
                os.close(task.fd)
        return ended

    def ask_to_stop(self, grace_s: float) -> None:
        """Ask all processes to write a checkpoint and end; they are killed after `grace_s`."""
        for task in self.tasks.values():
            task.process.ask_to_stop(grace_s)
