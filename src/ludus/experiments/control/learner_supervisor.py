"""The driver: keeps the learner of a run going. It is a process of its own, and when it dies another one takes its place.

    driver ──Supervisor──▶ learner ──▶ its workers          nothing of it outlives the driver, however that ends
           ◀──a pipe: one JSON object per line: numbers, sentences, how it ended──
           ◀──a nameless file: the weights of the agent at the end──

A learner takes up the run where its newest whole checkpoint left it. What cannot be cured by that ends the run, with the
learner's own error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ludus import errors
from ludus.core.metrics import Numbers, Sink
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import Luggage
from ludus.distributed.hub.server import shared_memory
from ludus.errors import Fenced, LudusError, MemoryClosed, StoreFull, StoreUnavailable, Unreachable, UsageError, WorkerFailed
from ludus.experiments.control.callbacks import find_stop_request, notify_checkpoint
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
from ludus.process.host import StopSignal, stop_on_signals
from ludus.process.temp_dirs import sweep
from ludus.process.workers.forkserver import anonymous_file
from ludus.process.workers.supervisor import OVER, Context, Process, Restart, Supervisor

log = logging.getLogger(__name__)

NAME = "learner"
LOGS = "logs/learner"
GRACE_S = 600.0
"""A learner that is asked to stop ends its update and writes a checkpoint first; a second Ctrl-C does not wait for that."""

START_S = 5.0
"""One that has learned nothing yet has nothing to write: it joins a cluster, or waits for its workers."""

CLOSE_S = 30.0
"""After its last word a learner has this long to leave."""

PRELOAD = ("numpy", "torch", "ludus.experiments.runner", "ludus.experiments.assembly.worker_training")
_POLL_S = 0.1
_FAILURES_KEPT = 20
_ONE_TRAINER = "One run has one trainer: stop the other, or leave this one stopped."
_MAX_LINE_BYTES = 16_000_000

Announce = Callable[[str], None]


class Learn(Protocol):
    """What the learner's process does: the whole training, from wherever the run stands."""

    def __call__(self, *, sinks: Sequence[Sink], announce: Announce | None, again: bool, set_up: bool) -> Result:
        """`again`: another learner of this driver was here before. `set_up`: the run was there once."""
        ...


# -- deciding ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """How a learner ended that did not come to an end."""

    said: str
    error: LudusError | None = None
    """Its own, when it could still say it."""
    foreign: bool = False
    """It raised something that is not ours: a mistake in somebody's code, which a new process will make again."""


@dataclass(frozen=True)
class Again:
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    error: LudusError


class Policy:
    """Decides what follows a failure. Counts failures between which there was no new checkpoint; acts on nothing."""

    CURABLE = (WorkerFailed, MemoryClosed, Unreachable, StoreUnavailable)
    """Errors that come from outside the learner, and may not come again. All others of ours would."""

    def __init__(self, limit: int, backoff: Restart = Restart(limit=None, backoff_s=0.5, max_backoff_s=30.0)) -> None:  # noqa: B008
        self._limit, self._backoff = limit, backoff
        self._in_a_row = 0
        self._newest: str | None = None
        self._said_before = ""

    def decide(self, failure: Failure, newest: str | None, set_up: bool) -> Again | GiveUp:
        """`newest`: the newest checkpoint. `set_up`: a learner of this run once had everything that it needs."""
        if newest != self._newest:
            self._newest, self._in_a_row, self._said_before = newest, 0, ""
        self._in_a_row += 1
        repeated, self._said_before = failure.said == self._said_before, failure.said
        error = failure.error
        if error is not None and not self._curable(error, set_up):
            return GiveUp(error)
        if self._in_a_row > self._limit or (failure.foreign and repeated):
            return GiveUp(self._final(failure))
        delay = self._backoff.delay(self._in_a_row)
        assert delay is not None
        return Again(delay)

    def _curable(self, error: LudusError, set_up: bool) -> bool:
        if isinstance(error, self.CURABLE):
            return not error.final
        # A port that the last learner's processes have not given back yet; what was wrong with the config was wrong before.
        return set_up and type(error) is UsageError and not error.final

    def _final(self, failure: Failure) -> LudusError:
        if failure.error is not None:
            return failure.error
        if self._in_a_row == 1:
            return WorkerFailed(f"The learner died: {failure.said}.")
        return WorkerFailed(f"The learner died {self._in_a_row} times without a new checkpoint in between: {failure.said}.")


# -- the learner's side --------------------------------------------------------------------------------------------------


class Post:
    """Where a learner writes to its driver. Blocks while the driver is behind, as a slow sink in this process would."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # the driver is gone, and this process is about to be
            json_lines.write(self._pipe, message)

    def announce(self, sentence: str) -> None:
        self.send(said=sentence)

    def write(self, numbers: Numbers) -> None:
        self.send(numbers={name: float(value) for name, value in numbers.items()})

    def checkpoint_written(self, name: str) -> None:
        self.send(checkpoint=name)

    def close(self) -> None:
        """As a sink: the driver closes its own."""


def _learner(context: Context, learn: Learn, luggage: Luggage, again: bool, set_up: bool, announces: bool) -> None:
    """The life of a learner: train, then say how it ended. Signals end it as they would end a training in the foreground."""
    pipe, file = context.fds
    post = Post(pipe)
    for handler in logging.getLogger("ludus").handlers:  # the rest is in the run's own log
        handler.setLevel(logging.WARNING)
    post.send(pid=os.getpid())  # before it can claim the run, and die of it: whoever looks on must know that it was ours
    luggage.unpack()
    context.ready()
    try:
        result = learn(sinks=[post], announce=post.announce if announces else None, again=again, set_up=set_up)
    except LudusError as error:
        log.exception("the learner ends")
        post.send(error=_packed(error))
        return
    agent = result.agent
    with open(file, "wb", closefd=False) as room:
        room.write(serialization.encode_weights(agent.policy.weights(), {"description": json.dumps(agent.policy.description())}))
    ended: dict[str, Any] = {"stopped_by": result.stopped_by, "version": agent.version, "env": result.env, "model": agent.model}
    ended["checkpoint"] = result.checkpoint.name if result.checkpoint else None
    post.send(ended=ended | {"metrics": {name: float(value) for name, value in result.metrics.items()}})


def _packed(error: LudusError) -> dict[str, Any]:
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return {"class": known.__name__, "message": error.message, "hint": error.hint, "final": error.final}


def _unpacked(data: Mapping[str, Any]) -> LudusError:
    cls = getattr(errors, str(data["class"]), LudusError)
    try:
        error: LudusError = cls(data["message"], data["hint"])
    except TypeError:  # one that is made of more
        error = LudusError(data["message"], data["hint"])
    if data.get("final"):
        error.final = True
    return error


# -- the driver's side ---------------------------------------------------------------------------------------------------


class _Mail:
    """What a learner has written, line by line."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        self._reader = LineReader(self._read, _MAX_LINE_BYTES, skip_long=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> None:
        self._selector.select(timeout_s)

    def take(self) -> Iterator[dict[str, Any]]:
        """All that is there now. A last line that a killed process did not finish is never seen."""
        return json_lines.decode_valid(self._reader.read_available())  # a library may write to a descriptor that is not its own

    def close(self) -> None:
        self._selector.close()
        os.close(self._read)


@dataclass
class _End:
    """What a learner said last."""

    ended: dict[str, Any] | None = None
    error: LudusError | None = None
    at: float | None = None
    reported: bool = False
    """It has learned something."""


class LearnerSupervisor:
    """Runs learners, one after the other, until one has come to the end of the run."""

    def __init__(
        self,
        directory: Path,
        learn: Learn,
        luggage: Luggage,
        *,
        max_failures: int,
        seed: int,
        sinks: Sequence[Sink] = (),
        announce: Announce | None = None,
    ) -> None:
        self._directory, self._learn, self._luggage, self._seed = directory, learn, luggage, seed
        self._sinks, self._announce = sinks, announce
        self._policy = Policy(max_failures)
        self._again = self._set_up = False
        self._newest: str | None = None
        self._pids: set[int] = set()
        self._claims: dict[str, int] = {}  # model → the newest incarnation when this driver began

    def run(self) -> Result:
        """Raises the error that ended the run; KeyboardInterrupt when it was interrupted before there was anything to keep."""
        made = _make(self._directory / LOGS)
        run = Run(self._directory)
        self._set_up = (self._directory / CONFIG).exists()
        restarts = int(run.meta().get("learner_restarts", 0))
        self._claims = {name: claim.number for name, claim in _claims_of(run)}
        shared = shared_memory()  # asked before a learner can have filled it
        try:
            with _quiet(), Supervisor(log_dir=self._directory / LOGS, preload=PRELOAD) as supervisor, stop_on_signals() as stop:
                while True:
                    found = self._one(supervisor, stop, restarts)
                    if isinstance(found, Result):
                        return found
                    sweep(shared)
                    self._set_up = self._set_up or (self._directory / CONFIG).exists()
                    self._again, restarts = True, restarts + 1
                    if not stop():
                        self._restart(found, restarts, stop)
                    if stop():
                        self._break_off(found)
        except (LudusError, KeyboardInterrupt):
            if not (self._directory / CONFIG).exists():
                _unmake(made, self._directory / LOGS)
            raise
        finally:
            sweep(shared)  # a learner that was killed could not do it, and nobody knows when the next one comes
            for sink in self._sinks:
                sink.close()

    # -- one learner

    def _one(self, supervisor: Supervisor, stop: StopSignal, restarts: int) -> Result | Failure:
        mail, file, end = _Mail(), anonymous_file(), _End()
        try:
            try:
                process = supervisor.start(
                    NAME,
                    _learner,
                    self._learn,
                    self._luggage,
                    self._again,
                    self._set_up,
                    self._announce is not None,
                    fds=(mail.write_end, file),
                )
            finally:
                os.close(mail.write_end)
            try:
                self._listen(process, mail, end, stop, restarts)
            except BaseException:
                process.kill()  # a second Ctrl-C, or a sink of the caller's that raised
                raise
            wanted = stop() or find_stop_request(self._sinks) is not None
            if end.ended is not None and (wanted or not end.ended["stopped_by"].startswith("interrupted")):
                return self._result(end.ended, file, stop)
        finally:
            mail.close()
            os.close(file)
        if end.ended is not None:
            return Failure(f"it was ended by a signal that this process did not send ({end.ended['stopped_by']})")
        if end.error is not None:
            return Failure(str(end.error), end.error)
        said = process.error.rstrip().rpartition("\n")[2] or "it ended without a word"
        return Failure(said, foreign="Traceback" in process.error)

    def _listen(self, process: Process, mail: _Mail, end: _End, stop: StopSignal, restarts: int) -> None:
        """Until it is over: hand on what it says."""
        asked_at, over = math.inf, False
        while not over:
            over = process.state in OVER  # looked at before the pipe is read: what it said before its end is in there
            if not over:
                mail.wait(_POLL_S)
            for message in mail.take():
                self._hear(message, end, restarts)
            if (stop() or (end.reported and find_stop_request(self._sinks))) and math.isinf(asked_at):
                asked_at = time.monotonic()
                process.ask_to_stop(GRACE_S)
            if time.monotonic() > asked_at + START_S and not end.reported and end.at is None and not over:
                log.info("the learner has not begun %.0f s after it was asked to stop; it is killed", START_S)
                process.kill()
            if end.at is not None and time.monotonic() > end.at + CLOSE_S and not over:
                log.warning("the learner has not left %.0f s after its last word; it is killed", CLOSE_S)
                process.kill()

    def _hear(self, message: Mapping[str, Any], end: _End, restarts: int) -> None:
        if "pid" in message:
            self._pids.add(int(message["pid"]))
        elif "numbers" in message:
            end.reported = True
            self._set_up = True  # also if its directory is gone by the time that the learner dies
            numbers = message["numbers"] | ({"learner/restarts": float(restarts)} if restarts else {})
            for sink in self._sinks:
                sink.write(numbers)
        elif "checkpoint" in message:
            notify_checkpoint(self._sinks, str(message["checkpoint"]))
        elif "said" in message:
            self._say(message["said"])
        elif "ended" in message:
            end.ended, end.at = message["ended"], time.monotonic()
        elif "error" in message:
            end.error, end.at = _unpacked(message["error"]), time.monotonic()

    def _result(self, ended: Mapping[str, Any], file: int, stop: StopSignal) -> Result:
        with open(file, "rb", closefd=False) as room:
            room.seek(0)
            weights, meta = serialization.decode_weights(room.read(), "the learner's agent")
        policy = serialization.policy_from(json.loads(meta["description"]))
        policy.load_weights(weights)
        where = self._directory / checkpoint.FOLDER / ended["checkpoint"] if ended["checkpoint"] else None
        stopped_by = ended["stopped_by"]
        if stopped_by.startswith("interrupted"):
            stopped_by = f"interrupted ({stop.name})" if stop() else self._requested_stop()
        model = ended.get("model", DEFAULT_MODEL)
        agent = RunAgent(policy, self._seed, int(ended["version"]), run_dir=self._directory, model=model)
        return Result(self._directory, where, stopped_by, dict(ended["metrics"]), agent, ended["env"])

    def _requested_stop(self) -> str:
        """Why a callback ended the run. If it did so in order, the run is finished, although a signal ended the learner."""
        reason, in_order = find_stop_request(self._sinks) or ("", False)
        if in_order:
            self._note({"status": "finished"})
            with contextlib.suppress(LudusError, OSError):  # a full disk must not hide the result
                seen = run_status.read_status(self._directory, fetched=True).status
                run_status.write(self._directory, {**seen, "state": "finished", "stopped_by": reason})
        return reason

    # -- between two learners

    def _restart(self, failure: Failure, restarts: int, stop: StopSignal) -> None:
        """Wait as long as the policy says. Raises the error with which the run ends, when it says so."""
        with contextlib.suppress(StoreUnavailable):  # the next learner will find out
            self._check_owner()  # a run that another trainer has taken over is not taken back
        newest = self._newest_checkpoint()
        decision = self._policy.decide(failure, newest, self._set_up)
        if isinstance(decision, GiveUp):
            self._give_up(decision.error)
        assert isinstance(decision, Again)
        where = f"from checkpoint {newest}" if newest else "from the beginning: there is no checkpoint yet"
        sentence = f"the learner died ({failure.said}); restart {restarts} in {decision.delay_s:.1f} s, {where}"
        self._say(sentence, warn=True)
        entry = {"at": run_status.now_text(), "why": failure.said, "checkpoint": newest}
        with contextlib.suppress(StoreUnavailable):  # the restart itself needs no note
            failures = Run(self._directory).meta().get("learner_failures", [])
            self._note({"learner_restarts": restarts, "learner_failures": [*failures, entry][-_FAILURES_KEPT:]})
        self._show(sentence, restarts)
        self._carry()
        deadline = time.monotonic() + decision.delay_s
        while (left := deadline - time.monotonic()) > 0 and not stop():
            time.sleep(min(left, _POLL_S))

    def _newest_checkpoint(self) -> str | None:
        """As far as one can see: a store that is away for a moment has what it had."""
        with contextlib.suppress(StoreUnavailable):
            names = checkpoint.names(Run(self._directory).store)
            self._newest = names[-1] if names else self._newest
        return self._newest

    def _carry(self) -> None:
        """To its store what a learner that died could not take there any more, its last words among it."""
        if (self._directory / CONFIG).exists():
            with RunSync(self._directory, guard=self._check_owner):
                pass

    def _check_owner(self) -> None:
        """Raises Fenced when another trainer, of whatever machine, has taken the run over from the learners of this driver."""
        for name, claim in _claims_of(Run(self._directory)):
            mine = claim.said.get("host") == platform.node() and claim.said.get("pid") in self._pids
            if claim.number > self._claims.get(name, 0) and not mine:
                raise Fenced(f"Another process has taken over the model {name!r}: {claim.who}.", _ONE_TRAINER)

    def _break_off(self, failure: Failure) -> NoReturn:
        """Interrupted while there is no learner that could store anything."""
        if isinstance(failure.error, StoreUnavailable) or (failure.error and not isinstance(failure.error, Policy.CURABLE)):
            self._give_up(failure.error)  # such as a full disk: it could not store what it had learned
        if self._set_up:
            self._note({"status": "interrupted", "ended": run_status.now_text()})
            self._carry()
            self._say(f"interrupted; `ludus train --resume {display_path(self._directory)}` goes on from the newest checkpoint")
        raise KeyboardInterrupt

    def _give_up(self, error: LudusError) -> NoReturn:
        if isinstance(error, Fenced):  # what is written of the run from now on is its new owner's
            raise error
        self._note({"status": "failed", "ended": run_status.now_text(), "error": str(error)})
        self._carry()
        if isinstance(error, WorkerFailed) and not error.hint and self._set_up:
            log_file = self._directory / LOGS / f"{NAME}.log"
            again = f"`ludus train --resume {display_path(self._directory)}` goes on."
            raise WorkerFailed(error.message, f"Its log: {log_file}. {again}") from None
        raise error

    def _say(self, sentence: str, *, warn: bool = False) -> None:
        if self._announce is not None:
            self._announce(sentence)
        elif warn:
            log.warning("%s", sentence)

    def _note(self, changes: Mapping[str, Any]) -> None:
        """Into the run's metadata, which is ours while there is no learner."""
        if (self._directory / CONFIG).exists():
            with contextlib.suppress(LudusError):  # a full disk must not hide what really happened
                run = Run(self._directory)
                run.guard = self._check_owner
                run.write_meta(changes)

    def _show(self, sentence: str, restarts: int) -> None:
        if (self._directory / CONFIG).exists():
            known = {"state": "restarting", "why": sentence, "restarts": restarts, "written": time.time()}
            with contextlib.suppress(OSError):
                run_status.write(self._directory, {**run_status.identity(), "since": run_status.now_text(), **known})


# -- around it -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The supervisor reports the death of every worker; what becomes of the learner is for the driver to say."""

    def others(record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args[:1] == (NAME,))

    logger = logging.getLogger("ludus.process.workers.supervisor")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def _claims_of(run: Run) -> Iterator[tuple[str, Claim]]:
    for name in run.store.list("models"):
        claim = newest_claim(run.store, name)
        if claim is not None:
            yield name, claim


def _make(directory: Path) -> list[Path]:
    """Make a directory; returns those that were not there, the deepest first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFull(f"Cannot write {directory}: {error.strerror}.", "Choose another directory, or free some room.") from error
    return missing


def _unmake(made: Sequence[Path], logs: Path) -> None:
    """A run that could not be set up leaves nothing behind: its error has been told."""
    with contextlib.suppress(OSError):  # somebody else put something there
        (logs / f"{NAME}.log").unlink(missing_ok=True)
        for path in made:
            path.rmdir()
