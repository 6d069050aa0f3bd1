"""`ludus train -dc`: run a learner, workers and Redis as one job and follow it until it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import NoReturn

import typer

from ludus.cli.interrupts import handle_stop_signals
from ludus.cli.output import notify
from ludus.compat.coach.fleet_ini import KUBERNETES, FleetFile, load_fleet_file
from ludus.core import trust
from ludus.errors import ConfigError, LudusError, StoreError, UsageError
from ludus.launch import redis_role
from ludus.launch.job import Job, JobStatus, Orchestrator, ProcessStatus, Role, check_job, open_orchestrator, wait
from ludus.launch.supervisor import STEADY_S
from ludus.transport.message_stream import PASSWORD

LEARNER, WORKER, MEMORY = "learner", "worker", "memory"
LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")
"""The command `ludus`; -P keeps a local `random.py` from shadowing the standard library."""
AWS_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
MODELS = "LUDUS_MODEL_PATH"
CREDENTIALS = "LUDUS_S3_CREDENTIALS_FILE"

_COACH_VARIABLES = {"ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID", "SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY"}
"""Environment variables of Coach → those of AWS."""

GRACE_S = 120.0
"""Seconds for the learner to save its checkpoint, also to a remote store."""

MAX_FAILURES = 5
"""The job is cancelled when every worker ended this often in a row with code 2 (usage error), or Redis failed this often."""

_POLL_S = 1.0
_END_S = 4 * GRACE_S
_CANCEL_S = 60.0
"""Time limit for a request to cancel the job that is under way when the command ends."""
_TAIL = 2000

Say = Callable[[str], None]


def run_distributed(
    *,
    arguments: Sequence[str],
    name: str | None,
    workers: int,
    config_path: Path | None,
    quiet: bool = False,
    as_json: bool = False,
    models: Path | None = None,
) -> NoReturn:
    """Train with a learner and workers, configured by the INI file `config_path`.

    Always raises typer.Exit: with the exit code of the learner, or 130 after Ctrl-C. `arguments`: the experiment as arguments of
    `ludus fleet learner`. `as_json`: `arguments` contain --json, and only the result goes to stdout. `models`: directory with the
    user's models, for all roles.
    """
    say: Say = (lambda sentence: None) if quiet else notify
    file = load_fleet_file(config_path) if config_path is not None else FleetFile()
    for notice in file.notices:
        say(notice)
    name = name or time.strftime("fleet-%Y%m%d-%H%M%S")
    use_credentials(file, os.environ, say)
    if file.orchestrator == KUBERNETES:
        from ludus.cli.training.distributed_kubernetes import kubernetes_fleet
        from ludus.launch.kubernetes.plan import secret_notices

        job, opened = kubernetes_fleet(file, name, arguments, workers, models)
        for notice in secret_notices(job.secrets, (), os.environ):
            say(notice)
    else:
        job, opened = fleet_job(file, name, arguments, workers, redis_role.free_port(), models), None
    if opened is None or "://" in job.place:  # a volume can be read in pods only
        check_place(job.place)
    with nullcontext(opened) if opened is not None else open_attached_orchestrator(file.orchestrator) as orchestrator:
        check_not_running(orchestrator, job.place)
        job_id = orchestrator.submit(job)
        logs = _logs_of(orchestrator.status(job_id))
        say(f"{name}: 1 learner and {workers} worker{'s' * (workers != 1)}; the run is {job.place}")
        say(f"all logs are in {logs}" if opened is None else f"all logs: {logs}")
        status, interrupted = follow(orchestrator, job_id, say, as_json=as_json)
    if status.state == "failed":
        say(f"failed: {status.reason or 'no reason is known'}; the logs: {logs}")
    if interrupted:
        for learner in status.of(LEARNER):
            if learner.exit_code not in (0, 130):  # printed even with --quiet: training progress is lost
                code = "" if learner.exit_code is None else f" (code {learner.exit_code})"
                notify(f"the learner ended before it saved a checkpoint{code}; {_newest_checkpoint(job.place)}")
        raise typer.Exit(130)
    raise typer.Exit(1 if status.exit_code is None else status.exit_code)


def check_place(place: str) -> None:
    """Raise UsageError if `place` is a directory with runs: a run created there would hide them."""
    from ludus.experiments.runs.remote_runs import directory_of
    from ludus.experiments.runs.run_dir import find_runs

    try:
        runs = find_runs(place, depth=1)
    except StoreError:  # the learner waits for the store or reports the error
        return
    if runs and runs != [directory_of(place)]:
        raise UsageError(
            f"{place} holds {len(runs)} run{'s' * (len(runs) != 1)} that no fleet created, and the run of this fleet would hide them.",
            "Choose another -e.",
        )


def check_not_running(orchestrator: Orchestrator, place: str) -> None:
    """Raise UsageError while another job trains that run: the second learner would end the first."""
    for status in orchestrator.list():
        if status.place == place and not status.over:
            raise UsageError(
                f"The job {status.id} already trains {place}.",
                f"End it (Ctrl-C where it was started, or `ludus jobs cancel {status.id}`), or choose another -e."
                + (
                    f" If its machine is gone for good, remove {Path(status.logs).parent}."
                    if Path(status.logs).is_absolute()
                    else ""
                ),
            )


def fleet_job(file: FleetFile, name: str, arguments: Sequence[str], workers: int, port: int, models: Path | None = None) -> Job:
    """The job with its roles. `port`: for a Redis server started by the job. Raises UsageError; MissingExtra without Redis."""
    if workers < 1:
        raise UsageError(f"-n {workers}: a fleet needs at least 1 worker.")
    environment = {} if file.credentials is None else {CREDENTIALS: str(file.credentials)}
    if trusted := os.environ.get(trust.VARIABLE):
        environment[trust.VARIABLE] = trusted
    if models is not None:
        environment[MODELS] = os.pathsep.join([str(models.resolve()), *filter(None, [os.environ.get(MODELS)])])
    url = file.redis_url or f"redis://{redis_role.HOST}:{port}/0"
    connection = ("--memory", url, "--store", file.place(name))
    named = () if "--experiment-name" in arguments else ("--experiment-name", name)
    learner = (*LUDUS, "fleet", "learner", *arguments, *named, *connection, "--num-workers", str(workers))
    roles = [
        # A killed learner resumes from its newest checkpoint; one that exited by itself would fail again.
        Role(LEARNER, learner, 1, "when-killed", environment),
        # Always: when a finished run is continued, a worker that starts before the learner sees it finished and exits.
        Role(WORKER, (*LUDUS, "fleet", "worker", *connection), workers, "always", environment),
    ]
    if file.redis_url is None:
        roles.insert(0, Role(MEMORY, redis_role.command(port), 1, "always"))
    secrets = tuple(name for name in (PASSWORD, *(AWS_SECRETS if file.s3 is not None else ())) if os.environ.get(name))
    return check_job(Job(name, tuple(roles), LEARNER, secrets, GRACE_S, file.place(name)))


def use_credentials(file: FleetFile, environ: MutableMapping[str, str], say: Say = lambda sentence: None) -> None:
    """Put secrets into `environ`, which all roles inherit."""
    if file.redis_url is None:
        environ[PASSWORD] = redis_role.new_password()
    elif file.redis_password is not None:
        environ[PASSWORD] = file.redis_password
    elif file.redis_password_file is not None:
        try:
            environ[PASSWORD] = file.redis_password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"redis_password_file = {file.redis_password_file} cannot be read: {error}.") from error
    if file.credentials is not None:
        environ[CREDENTIALS] = str(file.credentials)  # this process reads the store before it starts the roles
    if file.s3 is None or file.credentials is not None:
        return
    for older, present in _COACH_VARIABLES.items():
        if environ.get(older) and not environ.get(present):
            environ[present] = environ[older]
            say(f"{older} is used as {present}")


@contextmanager
def open_attached_orchestrator(name: str) -> Iterator[Orchestrator]:
    """Open an orchestrator whose jobs end with this process, if it supports that."""
    if name != "local":
        yield open_orchestrator(name)
        return
    from ludus.launch.local import LocalOrchestrator

    with LocalOrchestrator(attached=True) as local:
        yield local


# -- monitoring -----------------------------------------------------------------------------------------------------------


def follow(orchestrator: Orchestrator, job_id: str, say: Say, *, as_json: bool = False) -> tuple[JobStatus, bool]:
    """Print the log of the learner until the job ends; returns its status and whether it was interrupted.

    The first Ctrl-C cancels the job and still prints the log until it ends; the second one kills it.
    `as_json`: the result, the last line of the log, goes to stdout, all other lines to stderr.
    """
    stop, reasons = threading.Event(), list[str]()
    monitor = threading.Thread(target=_monitor, args=(orchestrator, job_id, say, stop, reasons), name="watch", daemon=True)
    result = ""
    with cancel_on_signals(orchestrator, job_id) as signals:
        monitor.start()
        try:
            for line in orchestrator.logs(job_id, role=LEARNER, follow=True):
                if as_json and line.startswith("{") and '"run_dir"' in line:
                    result = line
                else:
                    print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
            if result:
                print(result, flush=True)
            status = wait(orchestrator, job_id, _END_S)
            if reasons and not signals:
                status = replace(status, state="failed", exit_code=1, reason=reasons[0])
            return status, bool(signals)
        except BrokenPipeError:  # the reader of our output exited, e.g. `| head`
            orchestrator.cancel(job_id)
            wait(orchestrator, job_id, _END_S)
            raise
        finally:
            stop.set()
            monitor.join(10 * _POLL_S)


@contextmanager
def cancel_on_signals(orchestrator: Orchestrator, job_id: str) -> Iterator[list[int]]:
    """Cancel the job on SIGINT, SIGTERM or SIGHUP, kill it on the second one; yields the list of signals received.

    A thread does it: a signal may interrupt a request of the orchestrator, whose client must not be called again from there.
    """
    received: list[int] = []
    requests: SimpleQueue[bool | None] = SimpleQueue()  # its `put` is reentrant

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = len(received) > 1
        message = (
            "killing the job" if again else "stopping the job; the learner saves a checkpoint (press Ctrl-C again to kill it)"
        )
        os.write(2, f"ludus: {message}\n".encode())  # print is not reentrant
        requests.put(again)

    canceller = threading.Thread(target=_cancel_on_request, args=(orchestrator, job_id, requests), name="cancel", daemon=True)
    canceller.start()
    try:
        with handle_stop_signals(handle):
            yield received
    finally:
        requests.put(None)
        canceller.join(_CANCEL_S)


def _cancel_on_request(orchestrator: Orchestrator, job_id: str, requests: SimpleQueue[bool | None]) -> None:
    """Cancel the job for each request, or kill it for True, until None."""
    while (at_once := requests.get()) is not None:
        try:
            orchestrator.cancel(job_id, at_once=at_once)
        except LudusError as error:
            notify(f"the job could not be cancelled: {error}")


def _monitor(orchestrator: Orchestrator, job_id: str, say: Say, stop: threading.Event, reasons: list[str]) -> None:
    """Report restarts of processes, and cancel a job whose restarts keep failing, with the reason in `reasons`."""
    known: dict[str, int] = {}
    failures = RestartFailures()
    while not stop.wait(_POLL_S):
        try:
            status = orchestrator.status(job_id)
        except LudusError:  # the job was removed; `follow` reports it
            return
        if status.over:
            return
        for message in new_restarts(status, known):
            say(message)
        reason = failures.update(status, time.monotonic())
        if reason and not reasons:
            reasons.append(reason)
            with suppress(LudusError):  # it ended meanwhile
                orchestrator.cancel(job_id)


class RestartFailures:
    """Counts consecutive failures of roles that are restarted without limit, to detect a job that cannot succeed."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._failed: dict[str, int] = {}
        """Process name → consecutive failures."""

    def update(self, status: JobStatus, now: float) -> str:
        """Count the failures since the last call; returns the reason to give up, or an empty string."""
        for process in status.processes:
            name, ends = process.name, process.restarts + (process.state == "waiting")
            new = ends - self._ends.get(name, 0)
            if new:
                hopeless = process.exit_code == 2 if process.role == WORKER else process.exit_code != 0
                self._failed[name] = self._failed.get(name, 0) + new if hopeless else 0
                self._ends[name], self._since[name] = ends, now
            elif process.state == "running" and now - self._since.setdefault(name, now) >= STEADY_S:
                self._failed[name] = 0
        for role in (WORKER, MEMORY):
            members = status.of(role)
            if members and all(self._failed.get(member.name, 0) >= MAX_FAILURES for member in members):
                who = members[0].name if len(members) == 1 else f"each {role}"
                log = _logs_of(status, members[0])
                return (
                    f"{who} ended with code {members[0].exit_code} {MAX_FAILURES} times in a row; its log: {log}{_last_line(log)}"
                )
        return ""


def new_restarts(status: JobStatus, known: dict[str, int]) -> Iterator[str]:
    """A message for each process that ended since `known`, which is updated; none once the learner has ended."""
    if any(learner.state == "ended" for learner in status.of(LEARNER)):
        return
    for process in status.processes:
        ends = process.restarts + (process.state == "waiting" or (process.state == "ended" and process.exit_code != 0))
        if ends > known.get(process.name, 0):
            known[process.name] = ends
            if process.exit_code == 0 and process.role == WORKER:
                continue  # the worker found the run finished
            again = "" if process.state == "ended" else f" and is restarted ({ends})"
            code = "" if process.exit_code is None else f" with code {process.exit_code}"
            log = _logs_of(status, process)
            yield f"{process.name} ended{code}{again}; its log: {log}{_last_line(log)}"


def _newest_checkpoint(place: str) -> str:
    from ludus.experiments.runs import checkpoint
    from ludus.experiments.runs.remote_runs import directory_of, store_of

    try:
        name = checkpoint.newest_name(store_of(directory_of(place)))
    except LudusError as error:
        return f"the newest checkpoint is unknown: {error}"
    return f"the newest checkpoint is {name}" if name else "there is no checkpoint"


def _logs_of(status: JobStatus, process: ProcessStatus | None = None) -> str:
    """Where the logs of a job or of a process are: a path, or a command if they are not on this machine."""
    if Path(status.logs).is_absolute():
        return str(Path(status.logs) / f"{process.name}.log") if process is not None else status.logs
    return f"`ludus jobs logs {status.id}{f' --role {process.role}' if process is not None else ''}`"


def _last_line(log: str) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, Path(log).stat().st_size - _TAIL))
            lines = file.read(_TAIL).decode(errors="replace").split("\n")
    except OSError:  # on another machine, or removed
        return ""
    nonempty = [line.strip() for line in lines if line.strip()]
    return f": {nonempty[-1]}" if nonempty else ""
