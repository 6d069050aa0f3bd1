"""`ludus train -dc`: a learner and workers with a memory between them, started as one job, watched until it is over."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import typer

from ludus.compat.coach.fleet_ini import FleetFile, load_fleet_file
from ludus.core import trust
from ludus.errors import ConfigError, LudusError, StoreError, UsageError
from ludus.launch import redis_role
from ludus.launch.job import Job, JobStatus, Orchestrator, Role, check_job, open_orchestrator, wait
from ludus.launch.supervisor import STEADY_S
from ludus.transport.message_stream import PASSWORD

LEARNER, WORKER, MEMORY = "learner", "worker", "memory"
LUDUS = (sys.executable, "-P", "-m", "ludus.cli.main")
"""As the command `ludus`: what is called `random.py` where it is run does not take the place of Python's."""
AWS_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
MODELS = "LUDUS_MODEL_PATH"
CREDENTIALS = "LUDUS_S3_CREDENTIALS_FILE"

_OLDER = {"ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID", "SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY"}
"""Names of variables of older trainers."""

GRACE_S = 120.0
"""A learner saves its checkpoint in it, on whatever store."""

LIVES = 5
"""All workers that end so often in a row with code 2 (what they are asked for cannot be), or a memory that fails so often, end the job."""

_LOOK_S = 1.0
_END_S = 4 * GRACE_S
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
) -> None:
    """Train with so many workers, where and as `config_path` says. Ends as the learner did: typer.Exit with its code; Ctrl-C: 130.

    `arguments`: the words that describe the experiment, as `ludus fleet learner` takes them. `as_json`: they say so, and its result
    is all that goes to stdout. `models`: where all roles look for models of the user's own.
    """
    say: Say = _unsaid if quiet else _say
    file = load_fleet_file(config_path) if config_path is not None else FleetFile()
    for notice in file.notices:
        say(notice)
    name = name or time.strftime("fleet-%Y%m%d-%H%M%S")
    use_credentials(file, os.environ, say)
    job = fleet_job(file, name, arguments, workers, redis_role.free_port(), models)
    check_place(job.place)
    with opened(file.orchestrator) as orchestrator:
        check_alone(orchestrator, job.place)
        job_id = orchestrator.submit(job)
        logs = orchestrator.status(job_id).logs
        say(f"{name}: 1 learner and {workers} worker{'s' * (workers != 1)}; the run is {file.place(name)}")
        say(f"the logs of all are in {logs}")
        status, interrupted = follow(orchestrator, job_id, say, as_json=as_json)
    if status.state == "failed":
        say(f"failed: {status.reason or 'no reason is known'}; the logs are in {logs}")
    if interrupted:
        for learner in status.of(LEARNER):
            if learner.exit_code not in (0, 130):  # said to everybody: something is lost
                ended = "" if learner.exit_code is None else f" (code {learner.exit_code})"
                _say(f"the learner was ended before it had saved{ended}; {_newest_checkpoint(job.place)}")
        raise typer.Exit(130)
    raise typer.Exit(1 if status.exit_code is None else status.exit_code)


def check_place(place: str) -> None:
    """Raises UsageError where an experiment has its runs: a run in their midst would hide them."""
    from ludus.experiments.runs.remote_runs import directory_of
    from ludus.experiments.runs.run_dir import find_runs

    try:
        runs = find_runs(place, depth=1)
    except StoreError:  # the learner finds out, and waits or says so
        return
    if runs and runs != [directory_of(place)]:
        raise UsageError(
            f"{place} holds {len(runs)} run{'s' * (len(runs) != 1)} that no fleet began, and a fleet's run would take their place.",
            "Choose another -e.",
        )


def check_alone(orchestrator: Orchestrator, place: str) -> None:
    """Raises UsageError while another job trains that run: the second learner would end the first."""
    for status in orchestrator.list():
        if status.place == place and not status.over:
            raise UsageError(
                f"The job {status.id} trains {place} already.",
                "End it (Ctrl-C where it was started), or choose another -e. "
                f"If its machine is gone for good, remove {Path(status.logs).parent}.",
            )


def fleet_job(file: FleetFile, name: str, arguments: Sequence[str], workers: int, port: int, models: Path | None = None) -> Job:
    """The program as data. `port`: of a server that is started for it. Raises UsageError; MissingExtra where there is no Redis to start."""
    if workers < 1:
        raise UsageError(f"-n {workers}: a fleet has at least one worker.")
    environment = {} if file.credentials is None else {CREDENTIALS: str(file.credentials)}
    if trusted := os.environ.get(trust.VARIABLE):
        environment[trust.VARIABLE] = trusted
    if models is not None:
        environment[MODELS] = os.pathsep.join([str(models.resolve()), *filter(None, [os.environ.get(MODELS)])])
    url = file.redis_url or f"redis://{redis_role.HOST}:{port}/0"
    reach = ("--memory", url, "--store", file.place(name))
    named = () if "--experiment-name" in arguments else ("--experiment-name", name)
    learner = (*LUDUS, "fleet", "learner", *arguments, *named, *reach, "--num-workers", str(workers))
    roles = [
        # One that was killed goes on at its newest checkpoint. One that ended by itself has said why, and would say so again.
        Role(LEARNER, learner, 1, "when-killed", environment),
        # Always: where a finished run goes on, one that is quicker than the learner finds it finished, and leaves.
        Role(WORKER, (*LUDUS, "fleet", "worker", *reach), workers, "always", environment),
    ]
    if file.redis_url is None:
        roles.insert(0, Role(MEMORY, redis_role.command(port), 1, "always"))
    secrets = tuple(name for name in (PASSWORD, *(AWS_SECRETS if file.s3 is not None else ())) if os.environ.get(name))
    return check_job(Job(name, tuple(roles), LEARNER, secrets, GRACE_S, file.place(name)))


def use_credentials(file: FleetFile, environ: MutableMapping[str, str], say: Say = lambda sentence: None) -> None:
    """Put secrets where all roles inherit them."""
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
        environ[CREDENTIALS] = str(file.credentials)  # for ourselves: we look at the place before anything is started
    if file.s3 is None or file.credentials is not None:
        return
    for older, present in _OLDER.items():
        if environ.get(older) and not environ.get(present):
            environ[present] = environ[older]
            say(f"{older} is taken for {present}")


@contextmanager
def opened(name: str) -> Iterator[Orchestrator]:
    """An orchestrator whose jobs end with this process, if it can do that."""
    if name != "local":
        yield open_orchestrator(name)
        return
    from ludus.launch.local import LocalOrchestrator

    with LocalOrchestrator(attached=True) as local:
        yield local


# -- watching -----------------------------------------------------------------------------------------------------------


def follow(orchestrator: Orchestrator, job_id: str, say: Say, *, as_json: bool = False) -> tuple[JobStatus, bool]:
    """Show what the learner says until the job is over; the second value: whether it was interrupted.

    The first Ctrl-C asks the job to end, and what it says while it does is still shown; the second ends it at once.
    `as_json`: the result, which is the last that it says, goes to stdout, all else to stderr.
    """
    stop, given_up = threading.Event(), list[str]()
    watching = threading.Thread(target=_watch, args=(orchestrator, job_id, say, stop, given_up), name="watch", daemon=True)
    result = ""
    with interrupting(orchestrator, job_id) as asked:
        watching.start()
        try:
            for line in orchestrator.logs(job_id, role=LEARNER, follow=True):
                if as_json and _is_result(line):
                    result = line
                else:
                    print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
            if result:
                print(result, flush=True)
            status = wait(orchestrator, job_id, _END_S)
            if given_up and not asked:
                status = replace(status, state="failed", exit_code=1, reason=given_up[0])
            return status, bool(asked)
        except BrokenPipeError:  # nobody reads any more, as with `| head`
            orchestrator.cancel(job_id)
            wait(orchestrator, job_id, _END_S)
            raise
        finally:
            stop.set()
            watching.join(10 * _LOOK_S)


@contextmanager
def interrupting(orchestrator: Orchestrator, job_id: str) -> Iterator[list[int]]:
    """The numbers of the signals that asked for the end of the job."""
    asked: list[int] = []

    def heed(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        again = len(asked) > 1
        sentence = (
            "ludus: ending it at once\n" if again else "ludus: ending it, the learner saves a checkpoint; once more: at once\n"
        )
        os.write(2, sentence.encode())  # print would fail in the middle of another print
        orchestrator.cancel(job_id, at_once=again)

    heeded = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: a terminal that is closed is no reason
        heeded.remove(signal.SIGHUP)
    before = {number: signal.signal(number, heed) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(orchestrator: Orchestrator, job_id: str, say: Say, stop: threading.Event, given_up: list[str]) -> None:
    """Say which processes were lost and are started again: nobody looks into their logs otherwise. End what will never work."""
    known: dict[str, int] = {}
    patience = Patience()
    while not stop.wait(_LOOK_S):
        try:
            status = orchestrator.status(job_id)
        except LudusError:  # forgotten meanwhile; whoever follows it finds out
            return
        if status.over:
            return
        for sentence in news(status, known):
            say(sentence)
        reason = patience.lost(status, time.monotonic())
        if reason and not given_up:
            given_up.append(reason)
            with suppress(LudusError):  # it is over by now
                orchestrator.cancel(job_id)


class Patience:
    """With roles that are started again for ever: until none of their processes does anything but fail."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._failed: dict[str, int] = {}
        """In a row, by the name of the process."""

    def lost(self, status: JobStatus, now: float) -> str:
        """In a sentence, why the job will come to nothing; empty: it may well come to something."""
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
            if members and all(self._failed.get(member.name, 0) >= LIVES for member in members):
                who = members[0].name if len(members) == 1 else f"each {role}"
                log = Path(status.logs) / f"{members[0].name}.log"
                return f"{who} ended with code {members[0].exit_code} {LIVES} times in a row; its log: {log}{_last_words(log)}"
        return ""


def news(status: JobStatus, known: dict[str, int]) -> Iterator[str]:
    """What happened since `known`, which is brought up to date; nothing once the learner has ended, which is said at the end."""
    if any(learner.state == "ended" for learner in status.of(LEARNER)):
        return
    for process in status.processes:
        ends = process.restarts + (process.state == "waiting" or (process.state == "ended" and process.exit_code != 0))
        if ends > known.get(process.name, 0):
            known[process.name] = ends
            if process.exit_code == 0 and process.role == WORKER:
                continue  # it found the run finished
            again = "" if process.state == "ended" else f" and is started again ({ends})"
            code = "" if process.exit_code is None else f" with code {process.exit_code}"
            log = Path(status.logs) / f"{process.name}.log"
            yield f"{process.name} ended{code}{again}; its log: {log}{_last_words(log)}"


def _is_result(line: str) -> bool:
    with suppress(ValueError):
        found = json.loads(line) if line.startswith("{") else None
        return isinstance(found, dict) and "run_dir" in found
    return False


def _newest_checkpoint(place: str) -> str:
    from ludus.experiments.runs import checkpoint
    from ludus.experiments.runs.remote_runs import directory_of, store_of

    try:
        name = checkpoint.newest_name(store_of(directory_of(place)))
    except LudusError as error:
        return f"which checkpoint is the newest cannot be seen: {error}"
    return f"the newest checkpoint is {name}" if name else "there is no checkpoint"


def _last_words(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read(_TAIL).decode(errors="replace").split("\n")
    except OSError:  # it is on another machine, or gone
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1]}" if said else ""


def _say(sentence: str) -> None:
    print(f"ludus: {sentence}", file=sys.stderr, flush=True)


def _unsaid(sentence: str) -> None:
    """Nobody wants to hear it."""
