"""The coordinator of a league: the one process that changes its state.

It reads results and checkpoints, takes snapshots, publishes opponents, and lets players train in turns on this machine. Learners on other
machines (`ludus league learner`) only share the directory with it. Its state is in the journal: after kill -9 it continues where it
stopped.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.config.problem import ConfigErrors, ConfigProblem
from ludus.core.metrics import JsonLinesSink
from ludus.errors import (
    EnvironmentFault,
    ExchangeUnavailable,
    Fenced,
    LudusError,
    MemoryClosed,
    Refused,
    StartTimeout,
    StoreError,
    StoreFull,
    TrainingDiverged,
    Unreachable,
    WorkerFailed,
)
from ludus.experiments.control.restart_policy import GiveUp, RestartPolicy
from ludus.experiments.resolve import ResolvedExperiment
from ludus.experiments.runner import code_bundle_of, code_names
from ludus.experiments.runs import checkpoint, resume_diff
from ludus.experiments.runs.run_dir import holds_run
from ludus.game_theory.meta_solvers import find_meta_solver
from ludus.io.atomic_file import TEMPORARY, replace_file
from ludus.league.events import LeagueEvent, PlayerAdded, PlayerQuarantined, PlayerRetired, PlayerTrained
from ludus.league.journal import LeagueJournal, holds_league
from ludus.league.matchmaking import PSRO
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime import schedule
from ludus.league.runtime.away_players import AwayPlayers
from ludus.league.runtime.code_files import store_code
from ludus.league.runtime.ingest import ResultIngest
from ludus.league.runtime.league_file import LEAGUE_FILE, PLAYERS, LeagueConfig, PlayerSection, model_problem, player_experiment
from ludus.league.runtime.learner import is_claimed
from ludus.league.runtime.pair_task import PairTask
from ludus.league.runtime.player_models import EVALUATION
from ludus.league.runtime.stored_models import copy_checkpoint, find_newest, import_model, model_name, run_directory
from ludus.league.runtime.workers import LeagueTask, LeagueWorkers
from ludus.league.spool import apply_spool
from ludus.league.state import LeagueState, propose_snapshot
from ludus.process.signals import StopSignal, stop_on_signals
from ludus.sampling.league_files import LeagueOpponent, Matchmaking, write_matchmaking
from ludus.sampling.league_policies import ADDRESS, DEFAULT_RULE, RULE, SCRIPT

log = logging.getLogger(__name__)

METRICS: Final = "metrics.jsonl"
_POLL_S: Final = 0.1
_READ_S: Final = 0.5
"""Seconds between two reads of the results."""
_SCAN_S: Final = 1.0
"""Seconds between two scans of the players' checkpoints."""
_PUBLISH_S: Final = 1.0
_RETRY_S: Final = 5.0
"""After an error of the file system, such as a full disk."""
_NOT_ITS_FAULT: Final = (Fenced, StoreFull)
"""Errors of a turn that say nothing about its player: it trains elsewhere, or the disk is full. Not counted as failures."""
_CURABLE: Final = (
    EnvironmentFault, TrainingDiverged, StoreError, MemoryClosed, ExchangeUnavailable, WorkerFailed, StartTimeout, Refused, Unreachable,
)  # fmt: skip
"""Errors of a turn after which the player is tried again, up to `max_failures` times. The other errors are those of its settings."""
_BLOCKED_S: Final = 10.0
"""Before the next turn of a player after such an error."""
_REPORT_S: Final = 5.0
_GRACE_S: Final = 600.0
"""Time for a learner to finish its update and write a checkpoint; a second Ctrl-C does not wait for it."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class LeagueResult:
    """How a league ended."""

    directory: Path
    stopped_by: str
    state: LeagueState

    def to_json(self) -> dict[str, Any]:
        players = {
            name: {"role": one.role.value, "steps": one.steps, "model": one.model, "elo": round(self.state.elo[name], 1)}
            for name, one in self.state.players.items()
        }
        totals = {"timesteps": schedule.total_steps(self.state), "results": self.state.results}
        return {"league": str(self.directory), "stopped_by": self.stopped_by, **totals, "players": players}


def run_league(
    config: LeagueConfig, league: Path, file: bytes, resolved: Mapping[str, ResolvedExperiment], say: Say = log.info
) -> LeagueResult:
    """Run a league until a stop condition or a signal. `file`: content of its file, which learners read from the league's directory.

    Raises Fenced if another process runs it, ConfigError if the file does not fit the existing league.
    """
    if config.matchmaking.scheme == PSRO:
        find_meta_solver(config.matchmaking.meta_solver)(np.zeros((1, 1)))  # fails now if its library is not installed
    settings = config.settings()
    journal = LeagueJournal(league, None if holds_league(league) else settings)
    try:
        _sweep(league / PLAYERS)
        check_runs(journal, config)
        models = prepare_players(journal, config)
        journal.change_settings(settings)  # now that the file fits
        add_players(journal, config, models, say)
        bundles = {name: code_bundle_of(one) for name, one in resolved.items()}
        names = [name for one in resolved.values() for name in code_names(one)]
        scripts = [player.model.removeprefix(SCRIPT) for player in config.players.values() if player.model is not None]
        store_code(league, [*names, *scripts], [files for bundle in bundles.values() for files in bundle.models])
        replace_file(league / LEAGUE_FILE, file)  # last: a file that does not fit must not reach the learners
        with LeagueWorkers(league, bundles) as workers, stop_on_signals() as stop:
            return Coordinator(journal, config, workers, say).run(stop)
    finally:
        journal.close()


class _Interval:
    """A timer that is due at once, and then every `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, -math.inf

    def is_due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Coordinator:
    """The main loop of a league: reads results, takes snapshots, publishes opponents and starts training turns."""

    def __init__(
        self,
        journal: LeagueJournal,
        config: LeagueConfig,
        workers: LeagueWorkers,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._config, self._workers, self._say, self._clock = journal, config, workers, say, clock
        self._league = journal.directory
        self._away = AwayPlayers(clock)
        self._ingest = ResultIngest(journal, clock, self._await_server)
        self._began = clock()
        self._published: dict[str, Matchmaking] = {}
        self._reading, self._scanning = _Interval(_READ_S), _Interval(_SCAN_S)
        self._publishing, self._reporting = _Interval(_PUBLISH_S), _Interval(_REPORT_S)
        self._policies = {name: self._restart_policy() for name in (*config.learners(), EVALUATION)}
        self._retry_at: dict[str, float] = {}
        self._evaluates = True
        self._metrics = JsonLinesSink(self._league / METRICS)

    def _restart_policy(self) -> RestartPolicy:
        return RestartPolicy(self._config.max_failures, curable=_CURABLE)

    @property
    def _state(self) -> LeagueState:
        return self._journal.state

    def run(self, stop: StopSignal) -> LeagueResult:
        try:
            reason = None
            while reason is None:
                reason = self._try_step() or (f"interrupted ({stop.name})" if stop() else None)
            self._finish(reason, stop)
            return LeagueResult(self._league, reason, self._state)
        finally:
            self._away.close()
            self._metrics.close()

    def _try_step(self) -> str | None:
        """Call `step`, then wait. After a file system error wait longer; the state is still that of the journal."""
        try:
            reason = self.step()
        except OSError as error:
            self._say(f"{error}; trying again")
            time.sleep(_RETRY_S)
            return None
        if reason is None:
            time.sleep(_POLL_S)
        return reason

    def step(self) -> str | None:
        """Do one round of work. Returns the stop condition that is reached, if any."""
        if self._reading.is_due(self._clock()):
            self._ingest.poll()
        for task in self._workers.poll():
            self._conclude(task)
        now = self._clock()
        if self._scanning.is_due(now):
            self._scan()
        if self._reporting.is_due(now):
            self._report()
        reason = schedule.reached_stop(self._state, self._config.stop, self._clock() - self._began)
        if reason is None:
            if self._publishing.is_due(now):
                self._publish()
            self._start_tasks()
        return reason

    def _apply(self, event: LeagueEvent) -> bool:
        refused = self._journal.apply(event)
        if refused is not None and not refused.repeated:
            log.warning("%s was refused: %s", type(event).__name__, refused.reason)
        return refused is None

    # -- players

    def _scan(self) -> None:
        """Apply changes by other commands, record new checkpoints of the training players, and take the snapshots that are due."""
        apply_spool(self._journal)
        self._import_models()
        self._end_quarantine_of_served()
        for player in list(self._state.players.values()):
            if not player.role.learns or player.name not in self._policies:
                continue
            newest = find_newest(run_directory(self._league, player.name, player.generation))
            if newest is None:
                continue
            steps, model = player.generation_steps + newest.timesteps, model_name(self._league, newest)
            if (steps, model) != (player.steps, player.model):
                self._apply(PlayerTrained(player.name, steps, model))
            self._take_snapshot(player.name, newest.run / checkpoint.FOLDER / newest.checkpoint)

    def _import_models(self) -> None:
        """Copy models of fixed players that `ludus league add` has added."""
        for player in list(self._state.players.values()):
            if player.role is not PlayerRole.FIXED or not player.available or _is_ready(player.model):
                continue
            try:
                self._apply(PlayerTrained(player.name, player.steps, import_model(self._league, player.name, player.model)))
            except (LudusError, OSError) as error:
                self._quarantine(player.name, str(error))

    def _take_snapshot(self, name: str, where: Path) -> None:
        event = propose_snapshot(self._state, name)
        if event is None:
            return
        try:
            model = copy_checkpoint(self._league, event.snapshot, where)
        except (LudusError, OSError) as error:  # tried again with the next checkpoint
            self._say(f"no snapshot of {name}: {error}")
            return
        if self._apply(replace(event, model=model)):
            again = "; it starts again from its initial weights" if event.reset else ""
            self._say(f"snapshot {event.snapshot} at {self._state.players[name].steps:,} steps{again}")
            self._publish()

    def _quarantine(self, name: str, reason: str) -> None:
        self._apply(PlayerQuarantined(name, reason))
        self._say(f"{name} is quarantined: {reason}")
        self._publish()

    def _await_server(self, player: Player, reason: str) -> None:
        """Called when a served player is quarantined because its server does not answer."""
        delay = self._away.add(player)
        self._say(f"{player.name} gets no matches until its server answers; it is asked again in {delay:.0f} s: {reason}")

    def _end_quarantine_of_served(self) -> None:
        for name in self._away.poll():
            if self._state.players[name].quarantine:
                self._apply(PlayerQuarantined(name, ""))
                self._say(f"{name} takes part again: its server answers")
                self._publish()

    # -- opponents

    def _publish(self, stop: str = "") -> None:
        for name in self._config.learners():
            player = self._state.players[name]
            opponents, due = self._opponents(player), schedule.snapshot_due_at(self._state, player)
            due_at = None if due is None else due - player.generation_steps
            matchmaking = Matchmaking(name, player.generation, opponents, stop or _stop_reason(player, opponents), due_at)
            if self._published.get(name) != matchmaking:
                write_matchmaking(self._league, matchmaking)
                self._published[name] = matchmaking

    def _opponents(self, player: Player) -> tuple[LeagueOpponent, ...]:
        if not player.available:
            return ()
        found = schedule.playable_opponents(self._state, player)
        players = {name: self._state.players[name] for name in found}
        return tuple(
            LeagueOpponent(name, "" if name == player.name else one.model, float(found[name]), one.token_file, one.generation)
            for name, one in players.items()
        )

    # -- tasks

    def _start_tasks(self) -> None:
        workers, config, now = self._workers, self._config, self._clock()
        waiting = {name for name, at in self._retry_at.items() if at > now}
        if EVALUATION not in waiting and self._start_evaluation():
            return
        busy = waiting | workers.tasks.keys()
        free = config.parallel - len(workers.tasks)
        for name in schedule.order_learners(self._state, config.shares(), busy) if free > 0 else ():
            if free <= 0:
                return
            if is_claimed(self._league, name):
                continue
            planned = {task.name: task.end_steps for task in workers.tasks.values() if task.name != EVALUATION}
            steps = schedule.turn_steps(self._state, config, name, planned)
            if not steps:
                return
            self._publish()
            workers.start_turn(name, steps, self._state.players[name].steps + steps)
            free -= 1

    def _start_evaluation(self) -> bool:
        """Play the pairs that have too few results, before any player has its next turn on this machine."""
        tasks = self._workers.tasks
        if not self._evaluates or EVALUATION in tasks or len(tasks) >= max(1, self._config.parallel):
            return False
        pairs = schedule.missing_pairs(self._state, self._config)
        if pairs:
            self._workers.start_evaluation([self._pair_task(*pair) for pair in pairs], self._journal.events)
        return bool(pairs)

    def _pair_task(self, player: str, opponent: str, matches: int) -> PairTask:
        own, other = self._state.players[player], self._state.players[opponent]
        return PairTask(player, own.model, opponent, other.model, matches, own.token_file, other.token_file)

    def _conclude(self, task: LeagueTask) -> None:
        """Record what an ended process has done, or decide how to react to its failure."""
        self._ingest.poll()
        self._scan()
        player = self._state.players.get(task.name)
        failure = task.failure()
        if failure is None:
            self._retry_at.pop(task.name, None)
            self._policies[task.name] = self._restart_policy()
            if task.name != EVALUATION and task.ended not in ("not wanted", "interrupted"):
                self._say(self._describe(task.name))
            return
        log.warning("%s failed: %s", task.name, failure.reason)
        if isinstance(failure.error, _NOT_ITS_FAULT):
            self._retry_at[task.name] = self._clock() + _BLOCKED_S
            self._say(f"{task.name} is tried again in {_BLOCKED_S:.0f} s: {failure.error.message}")
            return
        decision = self._policies[task.name].decide(failure, None if player is None else player.model, set_up=True)
        if not isinstance(decision, GiveUp):
            self._retry_at[task.name] = self._clock() + decision.delay_s
            self._say(f"{task.name} failed and is tried again in {decision.delay_s:.1f} s: {failure.reason}")
        elif task.name == EVALUATION:
            self._evaluates = False
            self._say(f"evaluation of players is switched off: {decision.error}")
        else:
            self._quarantine(task.name, f"its training failed: {decision.error}")

    # -- reports

    def _describe(self, name: str) -> str:
        state = self._state
        rating = f"Elo {state.elo[name]:.0f}"
        return (
            f"{name}: {state.players[name].steps:,} steps, {rating}; the league: {schedule.total_steps(state):,} steps, "
            f"{state.results:,} matches, snapshots: {schedule.count_snapshots(state)}"
        )

    def _report(self) -> None:
        state = self._state
        numbers: dict[str, float] = {
            "iterations": float(self._journal.events),
            "time_s": self._clock() - self._began,
            "timesteps": float(schedule.total_steps(state)),
            "results": float(state.results),
            "players": float(len(state.players)),
            "snapshots": float(schedule.count_snapshots(state)),
            "quarantined": float(sum(bool(one.quarantine) for one in state.players.values())),
            "reports_refused": float(self._ingest.refused),
            "reports_damaged": float(self._ingest.damaged),
        }
        for name in self._config.learners():
            numbers |= {f"{name}/timesteps": float(state.players[name].steps), f"{name}/elo": state.elo[name]}
        try:
            self._metrics.write(numbers)
        except LudusError as error:  # written with the next report
            log.warning("%s", error)

    def _finish(self, reason: str, stop: StopSignal) -> None:
        """End all learners, also those of other machines; record their last checkpoints and results, and compare the last snapshots."""
        stopped = f"the league has stopped: {reason}"
        self._publish(stop=stopped)
        self._end_tasks()
        self._scan()
        in_time = not schedule.is_out_of_time(self._config.stop, self._clock() - self._began)
        if in_time and not stop() and self._start_evaluation():
            while self._workers.tasks and not stop():
                self._ingest.poll()
                self._workers.poll()
                time.sleep(_POLL_S)
            self._end_tasks()
        self._ingest.poll()
        self._publish(stop=stopped)  # with the last snapshot and its results: for PSRO this is the final meta-strategy
        self._report()
        self._journal.snapshot()

    def _end_tasks(self) -> None:
        self._workers.ask_to_stop(_GRACE_S)
        deadline = self._clock() + _GRACE_S
        while self._workers.tasks and self._clock() < deadline:
            for task in self._workers.poll():
                log.info("%s has ended (%s)", task.name, task.ended)
            time.sleep(_POLL_S)


def _stop_reason(player: Player, opponents: Sequence[LeagueOpponent]) -> str:
    """Why a player does not train now; empty: it does."""
    if player.retired:
        return "it is retired"
    return player.quarantine or ("" if opponents else "its opponents have no model yet")


def prepare_players(journal: LeagueJournal, config: LeagueConfig) -> dict[str, str]:
    """Check the players of the league's file, and copy the models of new ones. Returns the names of these in the league.

    Changes nothing in the state of the league. Raises ConfigErrors.
    """
    known = journal.state.players
    problems = [
        ConfigProblem(
            f"players.{name} has the role {section.role} and the rating {section.rating}; in this league it has "
            f"{known[name].role.value} and {known[name].rating}.",
            f"players.{name}",
        )
        for name, section in config.players.items()
        if name in known and (known[name].role, known[name].rating) != (PlayerRole(section.role), section.rating)
    ]
    if problems:
        raise ConfigErrors(problems, "Give the player another name, or the league another directory.")
    return _import_models(journal.directory, {name: one for name, one in config.players.items() if name not in known})


def add_players(journal: LeagueJournal, config: LeagueConfig, models: Mapping[str, str], say: Say) -> None:
    """Bring the players of the league's file into its state. `models`: from `prepare_players`."""
    known, level = journal.state.players, schedule.lowest_level(journal.state, config.shares())
    for name, section in config.players.items():
        if name not in known:
            role, token_file = PlayerRole(section.role), section.token_path
            start = level if role.learns else 0.0
            player = Player(name, role, models[name], rating=section.rating, token_file=token_file, start_level=start)
            journal.apply(PlayerAdded(player))
        elif _is_moved(known[name], section):
            journal.apply(PlayerTrained(name, known[name].steps, section.model or "", section.token_path))
        elif known[name].retired:
            say(f"{name} is in the file of the league, but stays retired; to train it again, give it another name")
    for player in journal.state.players.values():
        if player.role.learns and player.name not in config.players and not player.retired:
            say(f"{player.name} is retired: it is no longer in the file of the league")
            journal.apply(PlayerRetired(player.name))
        elif player.quarantine and not player.retired:
            say(f"{player.name} takes part again; it was quarantined: {player.quarantine}")
            journal.apply(PlayerQuarantined(player.name, ""))


def check_runs(journal: LeagueJournal, config: LeagueConfig) -> None:
    """Check that the runs of the training players can be continued with the settings of the file. Raises ConfigError."""
    for name in config.learners():
        player = journal.state.players.get(name)
        if player is None:
            continue
        directory = run_directory(journal.directory, name, player.generation)
        if holds_run(directory):
            resume_diff.resume_changes(directory, player_experiment(config, name, journal.directory, player.generation))


def _is_ready(model: str) -> bool:
    """Whether samplers can load the model as it is."""
    return model == DEFAULT_RULE or model.startswith((RULE, SCRIPT, f"{PLAYERS}/", *ADDRESS))


def _is_moved(player: Player, section: PlayerSection) -> bool:
    """Whether the file of the league has another address for a served player, or another file with its token."""
    served = player.model.startswith(ADDRESS) and (section.model or "").startswith(ADDRESS)
    return served and (player.model, player.token_file) != (section.model, section.token_path)


def _import_models(league: Path, players: Mapping[str, PlayerSection]) -> dict[str, str]:
    """Copy the models of new fixed players into the league, and check those with which new training players start.

    Returns their names in the league; a training player has no model yet. Raises ConfigErrors.
    """
    models, problems = dict.fromkeys(players, ""), []
    for name, section in players.items():
        model = section.model or ""
        try:
            if PlayerRole(section.role).learns:
                if model:
                    checkpoint.open_checkpoint(model)
            else:
                models[name] = model if _is_ready(model) else import_model(league, name, model)
        except LudusError as error:
            problems.append(model_problem(name, model, error))
    if problems:
        raise ConfigErrors(problems)
    return models


def _sweep(players: Path) -> None:
    """Remove copies that a killed coordinator left incomplete."""
    for path in players.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
