"""Supervises the learner process of a run: restarts it when it dies, and hands its reports to the caller's sinks.

    LearnerSupervisor ──starts──▶ learner process ──starts──▶ workers      all of them end with the supervisor's process
                      ◀──pipe: one JSON object per line (learner_process.py)
                      ◀──anonymous file: weights of the agent at the end

A new learner resumes the run from its newest complete checkpoint. An error that a restart cannot cure ends the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ludus.core.metrics import Sink
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import Fenced, LudusError, StoreFull, StoreUnavailable, WorkerFailed
from ludus.experiments.control.callbacks import find_stop_request, notify_checkpoint
from ludus.experiments.control.learner_process import Learn, run_learner, unpack_error
from ludus.experiments.control.restart_policy import GiveUp, LearnerFailure, RestartAfter, RestartPolicy
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint, run_status
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import CONFIG, Run
from ludus.experiments.runs.run_sync import RunSync
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.models.weights import serialization
from ludus.models.weights.version_store import Claim, newest_claim
from ludus.process.signals import StopSignal, stop_on_signals
from ludus.process.temp_dirs import shared_memory_dir, sweep
from ludus.process.workers.forkserver import anonymous_file
from ludus.process.workers.supervisor import FINAL_STATES, Process, Supervisor

log = logging.getLogger(__name__)

NAME = "learner"
LOGS = "logs/learner"
GRACE_S = 600.0
"""A learner that has to stop finishes its update and writes a checkpoint first; a second Ctrl-C does not wait for it."""

START_S = 5.0
"""The same before its first report: it joins a cluster or waits for its workers, and has nothing to write."""

CLOSE_S = 30.0
"""Time that a learner has to exit after its last message."""

PRELOAD = ("numpy", "torch", "ludus.experiments.runner", "ludus.experiments.assembly.worker_training")
_POLL_S = 0.1
_FAILURES_KEPT = 20
_ONE_TRAINER = "One run has one trainer: stop the other, or leave this one stopped."
_MAX_LINE_BYTES = 16_000_000


class _LearnerMessages:
    """The reading end of the pipe from a learner."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        self._reader = LineReader(self._read, _MAX_LINE_BYTES, skip_long=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> None:
        self._selector.select(timeout_s)

    def take(self) -> Iterator[dict[str, Any]]:
        """All complete messages so far; an unfinished line of a killed process is dropped."""
        return json_lines.decode_valid(self._reader.read_available())  # a library may write to a descriptor that is not its own

    def close(self) -> None:
        self._selector.close()
        os.close(self._read)


@dataclass
class _LearnerEnd:
    """The last messages of a learner."""

    ended: dict[str, Any] | None = None
    error: LudusError | None = None
    at: float | None = None
    reported: bool = False
    """It has reported an update."""


class LearnerSupervisor:
    """Runs learner processes, one after the other, until one reaches the end of the run."""

    def __init__(
        self,
        directory: Path,
        learn: Learn,
        bundle: CodeBundle,
        *,
        max_failures: int,
        seed: int,
        sinks: Sequence[Sink] = (),
        announce: Announce | None = None,
    ) -> None:
        self._directory, self._learn, self._bundle, self._seed = directory, learn, bundle, seed
        self._sinks, self._announce = sinks, announce
        self._policy = RestartPolicy(max_failures)
        self._again = self._set_up = False
        self._newest: str | None = None
        self._pids: set[int] = set()
        self._claims: dict[str, int] = {}  # model → its newest incarnation before this supervisor started

    def run(self) -> Result:
        """Raises the error that ended the run; KeyboardInterrupt when it was interrupted before there was anything to keep."""
        created = _create_directory(self._directory / LOGS)
        run = Run(self._directory)
        self._set_up = (self._directory / CONFIG).exists()
        restarts = int(run.meta().get("learner_restarts", 0))
        self._claims = {name: claim.number for name, claim in _claims_of(run)}
        shared = shared_memory_dir()  # looked up before a learner can fill it
        try:
            with (
                _mute_supervisor(),
                Supervisor(log_dir=self._directory / LOGS, preload=PRELOAD) as supervisor,
                stop_on_signals() as stop,
            ):
                while True:
                    outcome = self._run_learner(supervisor, stop, restarts)
                    if isinstance(outcome, Result):
                        return outcome
                    sweep(shared)
                    self._set_up = self._set_up or (self._directory / CONFIG).exists()
                    self._again, restarts = True, restarts + 1
                    if not stop():
                        self._wait_for_restart(outcome, restarts, stop)
                    if stop():
                        self._end_interrupted(outcome)
        except (LudusError, KeyboardInterrupt):
            if not (self._directory / CONFIG).exists():
                _remove_directories(created, self._directory / LOGS)
            raise
        finally:
            sweep(shared)  # a killed learner could not, and there may be no next one
            for sink in self._sinks:
                sink.close()

    # -- one learner

    def _run_learner(self, supervisor: Supervisor, stop: StopSignal, restarts: int) -> Result | LearnerFailure:
        messages, file, end = _LearnerMessages(), anonymous_file(), _LearnerEnd()
        try:
            try:
                process = supervisor.start(
                    NAME,
                    run_learner,
                    self._learn,
                    self._bundle,
                    self._again,
                    self._set_up,
                    self._announce is not None,
                    fds=(messages.write_end, file),
                )
            finally:
                os.close(messages.write_end)
            try:
                self._follow(process, messages, end, stop, restarts)
            finally:
                process.kill()  # after a second Ctrl-C, or an error in a sink of the caller; else it has exited
            wanted = stop() or find_stop_request(self._sinks) is not None
            if end.ended is not None and (wanted or not end.ended["stopped_by"].startswith("interrupted")):
                return self._read_result(end.ended, file, stop)
        finally:
            messages.close()
            os.close(file)
        if end.ended is not None:
            return LearnerFailure(f"it was stopped by a signal from another process ({end.ended['stopped_by']})")
        if end.error is not None:
            return LearnerFailure(str(end.error), end.error)
        reason = process.error.rstrip().rpartition("\n")[2] or "it exited without a message"
        return LearnerFailure(reason, foreign="Traceback" in process.error)

    def _follow(self, process: Process, messages: _LearnerMessages, end: _LearnerEnd, stop: StopSignal, restarts: int) -> None:
        """Handle the messages of a learner until it exits; stop it on a signal or a stop request."""
        stopping_since, over = math.inf, False
        while not over:
            over = process.state in FINAL_STATES  # before the pipe is read: its last messages are in there
            if not over:
                messages.wait(_POLL_S)
            for message in messages.take():
                self._handle(message, end, restarts)
            if (stop() or (end.reported and find_stop_request(self._sinks))) and math.isinf(stopping_since):
                stopping_since = time.monotonic()
                process.ask_to_stop(GRACE_S)
            if time.monotonic() > stopping_since + START_S and not end.reported and end.at is None and not over:
                log.info("the learner has reported nothing %.0f s after the request to stop; it is killed", START_S)
                process.kill()
            if end.at is not None and time.monotonic() > end.at + CLOSE_S and not over:
                log.warning("the learner has not exited %.0f s after its last message; it is killed", CLOSE_S)
                process.kill()

    def _handle(self, message: Mapping[str, Any], end: _LearnerEnd, restarts: int) -> None:
        if "pid" in message:
            self._pids.add(int(message["pid"]))
        elif "numbers" in message:
            end.reported = True
            self._set_up = True  # even if the directory is gone when the learner dies
            numbers = message["numbers"] | ({"learner/restarts": float(restarts)} if restarts else {})
            for sink in self._sinks:
                sink.write(numbers)
        elif "checkpoint" in message:
            notify_checkpoint(self._sinks, str(message["checkpoint"]))
        elif "notice" in message:
            self._announce_notice(message["notice"])
        elif "ended" in message:
            end.ended, end.at = message["ended"], time.monotonic()
        elif "error" in message:
            end.error, end.at = unpack_error(message["error"]), time.monotonic()

    def _read_result(self, ended: Mapping[str, Any], file: int, stop: StopSignal) -> Result:
        with open(file, "rb", closefd=False) as stored:
            stored.seek(0)
            weights, meta = serialization.decode_weights(stored.read(), "the learner's agent")
        policy = serialization.policy_from(json.loads(meta["description"]))
        policy.load_weights(weights)
        where = self._directory / checkpoint.FOLDER / ended["checkpoint"] if ended["checkpoint"] else None
        stopped_by = ended["stopped_by"]
        if stopped_by.startswith("interrupted"):
            stopped_by = f"interrupted ({stop.name})" if stop() else self._requested_stop_reason()
        model = ended.get("model", DEFAULT_MODEL)
        agent = RunAgent(policy, self._seed, int(ended["version"]), run_dir=self._directory, model=model)
        return Result(self._directory, where, stopped_by, dict(ended["metrics"]), agent, ended["env"])

    def _requested_stop_reason(self) -> str:
        """Why a callback ended the run. Unless it failed, the run counts as finished although a signal ended the learner."""
        reason, in_order = find_stop_request(self._sinks) or ("", False)
        if in_order:
            self._write_meta({"status": "finished"})
            with contextlib.suppress(LudusError, OSError):  # a full disk must not hide the result
                known = run_status.read_status(self._directory, fetched=True).status
                run_status.write(self._directory, {**known, "state": "finished", "stopped_by": reason})
        return reason

    # -- between two learners

    def _wait_for_restart(self, failure: LearnerFailure, restarts: int, stop: StopSignal) -> None:
        """Wait for the delay of the policy. Raises the error that ends the run, if the policy gives up."""
        with contextlib.suppress(StoreUnavailable):  # the next learner will see
            self._check_owner()  # a run that another trainer has taken over stays with it
        newest = self._newest_checkpoint()
        decision = self._policy.decide(failure, newest, self._set_up)
        if isinstance(decision, GiveUp):
            self._give_up(decision.error)
        assert isinstance(decision, RestartAfter)
        where = f"from checkpoint {newest}" if newest else "from the beginning: there is no checkpoint yet"
        notice = f"the learner died ({failure.reason}); restart {restarts} in {decision.delay_s:.1f} s, {where}"
        self._announce_notice(notice, warn=True)
        entry = {"at": run_status.now_text(), "why": failure.reason, "checkpoint": newest}
        with contextlib.suppress(StoreUnavailable):  # the restart does not depend on it
            failures = Run(self._directory).meta().get("learner_failures", [])
            self._write_meta({"learner_restarts": restarts, "learner_failures": [*failures, entry][-_FAILURES_KEPT:]})
        self._write_status(notice, restarts)
        self._upload()
        deadline = time.monotonic() + decision.delay_s
        while (left := deadline - time.monotonic()) > 0 and not stop():
            time.sleep(min(left, _POLL_S))

    def _newest_checkpoint(self) -> str | None:
        """While the store is unavailable: the newest one that was seen before."""
        with contextlib.suppress(StoreUnavailable):
            names = checkpoint.names(Run(self._directory).store)
            self._newest = names[-1] if names else self._newest
        return self._newest

    def _upload(self) -> None:
        """Upload what a dead learner could not, such as the end of its log."""
        if (self._directory / CONFIG).exists():
            with RunSync(self._directory, guard=self._check_owner):
                pass

    def _check_owner(self) -> None:
        """Raises Fenced when another trainer, on any machine, has taken the run over from our learners."""
        for name, claim in _claims_of(Run(self._directory)):
            mine = claim.content.get("host") == platform.node() and claim.content.get("pid") in self._pids
            if claim.number > self._claims.get(name, 0) and not mine:
                raise Fenced(f"Another process has taken over the model {name!r}: {claim.who}.", _ONE_TRAINER)

    def _end_interrupted(self, failure: LearnerFailure) -> NoReturn:
        """End a run that was interrupted while there was no learner."""
        if isinstance(failure.error, StoreUnavailable) or (
            failure.error and not isinstance(failure.error, RestartPolicy.CURABLE)
        ):
            self._give_up(failure.error)  # such as a full disk: the learner could not store its state
        if self._set_up:
            self._write_meta({"status": "interrupted", "ended": run_status.now_text()})
            self._upload()
            self._announce_notice(
                f"interrupted; `ludus train --resume {display_path(self._directory)}` goes on from the newest checkpoint"
            )
        raise KeyboardInterrupt

    def _give_up(self, error: LudusError) -> NoReturn:
        if isinstance(error, Fenced):  # only the new owner may write to the run
            raise error
        self._write_meta({"status": "failed", "ended": run_status.now_text(), "error": str(error)})
        self._upload()
        if isinstance(error, WorkerFailed) and not error.hint and self._set_up:
            log_file = self._directory / LOGS / f"{NAME}.log"
            again = f"`ludus train --resume {display_path(self._directory)}` goes on."
            raise WorkerFailed(error.message, f"Its log: {log_file}. {again}") from None
        raise error

    def _announce_notice(self, notice: str, *, warn: bool = False) -> None:
        if self._announce is not None:
            self._announce(notice)
        elif warn:
            log.warning("%s", notice)

    def _write_meta(self, changes: Mapping[str, Any]) -> None:
        """Change the metadata of the run. Only while no learner runs, which owns it."""
        if (self._directory / CONFIG).exists():
            with contextlib.suppress(LudusError):  # a full disk must not hide the original error
                run = Run(self._directory)
                run.guard = self._check_owner
                run.write_meta(changes)

    def _write_status(self, notice: str, restarts: int) -> None:
        if (self._directory / CONFIG).exists():
            known = {"state": "restarting", "why": notice, "restarts": restarts, "written": time.time()}
            with contextlib.suppress(OSError):
                run_status.write(self._directory, {**run_status.identity(), "since": run_status.now_text(), **known})


# -- helpers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mute_supervisor() -> Iterator[None]:
    """Drop log lines of the process supervisor about the learner: this module reports what follows its death."""

    def is_other(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args[:1] == (NAME,))

    logger = logging.getLogger("ludus.process.workers.supervisor")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _claims_of(run: Run) -> Iterator[tuple[str, Claim]]:
    for name in run.store.list("models"):
        claim = newest_claim(run.store, name)
        if claim is not None:
            yield name, claim


def _create_directory(directory: Path) -> list[Path]:
    """Returns the directories that did not exist, the deepest first. Raises StoreFull."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFull(
            f"Cannot write {directory}: {error.strerror}.", "Choose another directory, or free some space."
        ) from error
    return missing


def _remove_directories(created: Sequence[Path], logs: Path) -> None:
    """Remove what a run that could not be set up has left."""
    with contextlib.suppress(OSError):  # another process has written there
        (logs / f"{NAME}.log").unlink(missing_ok=True)
        for path in created:
            path.rmdir()
