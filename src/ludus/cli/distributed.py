"""`ludus train -dc`: a learner and workers with a memory between them, started as one job, watched until it is over."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from ludus.cluster import redis_server
from ludus.cluster.cluster import Job, JobStatus, Orchestrator, Role, checked, open_orchestrator, wait
from ludus.cluster.fleet_file import FleetFile, load_fleet_file
from ludus.cluster.redis_server import PASSWORD
from ludus.errors import ConfigError, LudusError, UsageError

LEARNER, WORKER, MEMORY = "learner", "worker", "memory"
LUDUS = (sys.executable, "-m", "ludus.cli.main")
SECRETS = (PASSWORD, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_OLDER = {"ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID", "SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY"}
"""Names of variables of older trainers."""

_LOOK_S = 1.0
_END_S = 300.0
_TAIL = 2000

Say = Callable[[str], None]


def run_distributed(
    *, arguments: Sequence[str], name: str | None, workers: int, config_path: Path | None, quiet: bool = False
) -> None:
    """Train with so many workers, where and as `config_path` says. Ends as the learner did: typer.Exit with its code; Ctrl-C: 130.

    `arguments`: the words that describe the experiment, as `ludus fleet learner` takes them.
    """
    say: Say = _unsaid if quiet else _say
    file = load_fleet_file(config_path) if config_path is not None else FleetFile()
    for notice in file.notices:
        say(notice)
    name = name or time.strftime("fleet-%Y%m%d-%H%M%S")
    use_credentials(file, os.environ, say)
    job = fleet_job(file, name, arguments, workers, redis_server.free_port())
    with opened(file.orchestrator) as orchestrator:
        job_id = orchestrator.submit(job)
        logs = orchestrator.status(job_id).logs
        say(f"{name}: 1 learner and {workers} worker{'s' * (workers != 1)}; the run is {file.place(name)}")
        say(f"the logs of all are in {logs}")
        status, interrupted = follow(orchestrator, job_id, say)
    if status.state == "failed":
        say(f"failed: {status.reason or 'no reason is known'}; the logs are in {logs}")
    if interrupted:
        raise typer.Exit(130)
    raise typer.Exit(1 if status.exit_code is None else status.exit_code)


def fleet_job(file: FleetFile, name: str, arguments: Sequence[str], workers: int, port: int) -> Job:
    """The program as data. `port`: of a server that is started for it. Raises UsageError; MissingExtra where there is no Redis to start."""
    if workers < 1:
        raise UsageError(f"-n {workers}: a fleet has at least one worker.")
    environment = {} if file.credentials is None else {"LUDUS_S3_CREDENTIALS_FILE": str(file.credentials)}
    url = file.redis_url or f"redis://{redis_server.HOST}:{port}/0"
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
        roles.insert(0, Role(MEMORY, redis_server.command(port), 1, "always"))
    return checked(Job(name, tuple(roles), LEARNER, tuple(secret for secret in SECRETS if os.environ.get(secret))))


def use_credentials(file: FleetFile, environ: MutableMapping[str, str], say: Say = lambda sentence: None) -> None:
    """Put secrets where all roles inherit them."""
    if file.redis_url is None:
        environ[PASSWORD] = redis_server.new_password()
    elif file.redis_password is not None:
        environ[PASSWORD] = file.redis_password
    elif file.redis_password_file is not None:
        try:
            environ[PASSWORD] = file.redis_password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"redis_password_file = {file.redis_password_file} cannot be read: {error}.") from error
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
    from ludus.cluster.local import LocalOrchestrator

    with LocalOrchestrator(attached=True) as local:
        yield local


# -- watching -----------------------------------------------------------------------------------------------------------


def follow(orchestrator: Orchestrator, job_id: str, say: Say) -> tuple[JobStatus, bool]:
    """Show what the learner says until the job is over; the second value: whether it was interrupted.

    The first Ctrl-C asks the job to end, and what it says while it does is still shown; the second ends it at once.
    """
    stop = threading.Event()
    watching = threading.Thread(target=_watch, args=(orchestrator, job_id, say, stop), name="watch", daemon=True)
    with interrupting(orchestrator, job_id) as asked:
        watching.start()
        try:
            for line in orchestrator.logs(job_id, role=LEARNER, follow=True):
                print(line, flush=True)
            return wait(orchestrator, job_id, _END_S), bool(asked)
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


def _watch(orchestrator: Orchestrator, job_id: str, say: Say, stop: threading.Event) -> None:
    """Say which processes were lost and are started again: nobody looks into their logs otherwise."""
    known: dict[str, int] = {}
    while not stop.wait(_LOOK_S):
        try:
            status = orchestrator.status(job_id)
        except LudusError:  # forgotten meanwhile; whoever follows it finds out
            return
        if status.over:
            return
        for sentence in news(status, known):
            say(sentence)


def news(status: JobStatus, known: dict[str, int]) -> Iterator[str]:
    """What happened since `known`, which is brought up to date. How the learner ended is said at the end."""
    for process in status.processes:
        if process.role == LEARNER and process.state == "ended":
            continue
        ends = process.restarts + (process.state == "waiting" or (process.state == "ended" and process.exit_code != 0))
        if ends > known.get(process.name, 0):
            known[process.name] = ends
            if process.exit_code == 0 and process.role == WORKER:
                continue  # it found the run finished
            again = "" if process.state == "ended" else f" and is started again ({ends})"
            code = "" if process.exit_code is None else f" with code {process.exit_code}"
            log = Path(status.logs) / f"{process.name}.log"
            yield f"{process.name} ended{code}{again}; its log: {log}{_last_words(log)}"


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
