"""`ludus jobs`: list the jobs of all launchers, print their logs, wait for them, cancel them."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.common_options import AsJson
from ludus.cli.help import HelpApp
from ludus.cli.interrupts import detach_on_interrupt
from ludus.cli.job_argument import LAST, complete_job
from ludus.cli.output import make_console, make_facts, make_table, notify
from ludus.core.backoff import Backoff
from ludus.errors import LudusError, MissingExtra, UnknownName, UsageError, WorkerFailed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ludus.launch.job import JobStatus, Orchestrator, ProcessStatus

app = HelpApp(help="List jobs of `ludus submit`, read their logs, wait for them, cancel them.", no_args_is_help=True)

TIMED_OUT = 124
"""Exit code of `wait --timeout` for a job that is not over by then, as of timeout(1); no training exits with it."""

KUBERNETES = "kubernetes"
_SHORTEST_SUFFIX = 3
_MAINS = ("main", "learner")
_RECENT, _LAST_LINES = 10, 15
_FIRST_POLL_S, _POLL_S, _REMOTE_POLL_S = 0.1, 0.5, 3.0
_UNREACHABLE_S = 1800.0
"""Seconds after which waiting for an unreachable backend ends."""

_CANCEL_S = 900.0
_READ_S = 2.0
"""Time limit for reading the existing lines of a log, in addition to twice the time that counting them took."""

STILL_RUNNING = "{id} is still running; `ludus jobs wait {id}` waits for it, `ludus jobs cancel {id}` stops it"
_COLOURS = {"pending": "yellow", "running": "green", "succeeded": "green", "cancelled": "yellow", "failed": "red"}

_Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Job id, its beginning or its end; last; the name of a job or experiment; or the Slurm job number.",
        autocompletion=complete_job,
    ),
]
_On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="NAME|module:Class",
        help="Launcher whose jobs to consider; kubernetes/NAMESPACE for one namespace. Default: all.",
    ),
]


@app.command("list")
def list_jobs(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help=f"Show all finished jobs, not only the last {_RECENT}.")
    ] = False,
    on: _On = None,
    as_json: AsJson = False,
) -> None:
    """List pending, running and recently finished jobs, newest last."""
    found = all_jobs(on)
    over = [job for job in found if job.status.over]
    hidden = [] if everything else over[: max(0, len(over) - _RECENT)]
    visible = [job for job in found if job not in hidden]
    if as_json:
        print(json.dumps([job.to_json() for job in visible]))
        return
    if visible:
        make_console().print(_table(visible, time.time()))
    if hidden:
        notify(f"{len(hidden)} older jobs are hidden; --all shows them")
    if not found:
        notify("no jobs; `ludus submit -- train CartPole-v1` submits one")


@app.command()
def status(job_id: _Id, on: _On = None, as_json: AsJson = False) -> None:
    """Show the state of a job and its processes, and where its logs are."""
    found = find(job_id, on)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    make_console().print(_page(found, time.time()))


@app.command()
def logs(
    job_id: _Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job is over; Ctrl-C stops following.")] = False,
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="Role of the processes to show.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Start with the last N lines.")] = None,
    on: _On = None,
) -> None:
    """Print the logs of a job; with several processes each line is prefixed with the process name."""
    found = find(job_id, on)
    try:
        for line in _lines(found, role, follow, tail):
            print(line, flush=follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def cancel(
    job_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Jobs, as for `status`.", autocompletion=complete_job)],
    now: Annotated[bool, typer.Option("--now", help="Kill at once, without a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs are over.")] = False,
    on: _On = None,
) -> None:
    """Cancel a job: the training saves a checkpoint, then all its processes end."""
    jobs = [find(job_id, on) for job_id in job_ids]
    for found in jobs:
        if found.status.over:
            notify(f"{found.id} is already over: {_describe_end(found.status)}")
            continue
        found.orchestrator.cancel(found.id, at_once=now)
        notify(f"{found.id} is being {'killed' if now else 'cancelled'}")
    for found in jobs if wait else ():
        ended = wait_for_end(found, _CANCEL_S)
        if ended is None:
            raise LudusError(f"The job {found.id} is not over after {_CANCEL_S:g} s.", "Try --now.")
        notify(f"{found.id}: {_describe_end(ended)}")


@app.command()
def clean(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    on: _On = None,
) -> None:
    """Delete the records and logs of jobs that are over, after a prompt. Their runs are kept."""
    found = [job for job in all_jobs(on) if job.status.over and hasattr(job.orchestrator, "remove")]
    if not found:
        notify("no job is over: nothing to clean")
        return
    for job in found:
        print(f"{job.id}  {_describe_end(job.status)}")
    if not yes:
        typer.confirm(f"Remove the records and logs of {len(found)} jobs?", abort=True)
    for job in found:
        job.orchestrator.remove(job.id)  # type: ignore[attr-defined]
        print(f"removed: {job.id}")


@app.command()
def mend(job_id: _Id, on: _On = None) -> None:
    """Restart the processes that an SSH job lost with a machine that is back. Slurm does this by itself."""
    found = find(job_id, on)
    restart = getattr(found.orchestrator, "mend", None)
    if restart is None:
        raise UsageError(f"{found.id} runs on {found.on}, which does not support mend.", "Use it for SSH jobs.")
    hosts = restart(found.id)
    notify(f"{found.id} is restarted on {', '.join(hosts)}" if hosts else f"{found.id} has no missing processes")


@app.command()
def wait(
    job_id: _Id,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="S", help=f"Time limit in seconds; then exit with code {TIMED_OUT}. Default: none."),
    ] = None,
    on: _On = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a job is over. The exit code is that of the training."""
    found = find(job_id, on)
    with detach_on_interrupt(STILL_RUNNING.format(id=found.id)):
        ended = wait_for_end(found, math.inf if timeout is None else timeout)
    if ended is None:
        notify(f"{found.id} is not over after {timeout:g} s")
        raise typer.Exit(TIMED_OUT)
    if as_json:
        print(json.dumps(JobHandle(found.on, found.orchestrator, ended).to_json()))
    raise typer.Exit(conclude(JobHandle(found.on, found.orchestrator, ended), last_lines=not as_json))


# -- finding ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobHandle:
    """The status of a job, with the orchestrator that runs it."""

    on: str
    orchestrator: Orchestrator
    status: JobStatus

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def runs(self) -> dict[str, str]:
        """Experiment → place of its run or sweep, for those that the job has started; empty if the job is on another machine."""
        from ludus.experiments.runs.job_resume import JobResumeFile
        from ludus.launch.job_dir import RUN

        place = Path(self.status.logs).parent
        if not place.is_absolute() or place.name != self.id:  # on another machine, or a user's orchestrator with other paths
            return {}
        return JobResumeFile.read(place / RUN).locations

    def to_json(self) -> dict[str, Any]:
        return {"on": self.on, **asdict(self.status), "runs": self.runs}


def find(word: str, on: str | None = None) -> JobHandle:
    """Find a job by id, Slurm number, short name or a unique prefix of its id.

    Raises UnknownName, or the error of a backend that could not be queried.
    """
    troubles: list[LudusError] = []
    backends = list(orchestrators(on))
    for name, orchestrator in backends:
        try:
            with _wrap_user_errors(name):
                return JobHandle(name, orchestrator, orchestrator.status(word))
        except UnknownName:
            continue
        except LudusError as error:  # the backend cannot be queried; another one may have the job
            troubles.append(error)
    known = sorted((job for job in _list_all(backends, troubles) if word), key=lambda job: (job.status.submitted_at, job.id))
    if (named := _by_short_name(word, known)) is not None:
        return named
    matching = [job for job in known if job.id.startswith(word)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UnknownName(
            f"{len(matching)} jobs begin with {word!r}.", f"Use a longer prefix: {', '.join(job.id for job in matching[-5:])}."
        )
    if troubles:
        raise troubles[0]
    from ludus.core.plugins import did_you_mean

    nearest = did_you_mean(word, [job.id for job in known[-50:]])
    raise UnknownName(f"There is no job {word!r}.", nearest or "`ludus jobs list` lists all jobs.")


def _by_short_name(word: str, known: Sequence[JobHandle]) -> JobHandle | None:
    """`last`, the newest job of this name or experiment, or the only one whose id ends with `word`. `known`: oldest first."""
    named = known if word == LAST else [job for job in known if word == job.status.name or word in job.runs]
    if named:
        return named[-1]
    ending = [job for job in known if len(word) >= _SHORTEST_SUFFIX and job.id.endswith(word)]
    return ending[0] if len(ending) == 1 else None


def all_jobs(on: str | None = None) -> list[JobHandle]:
    """All jobs, oldest first. A backend that cannot be queried is skipped with a message."""
    troubles: list[LudusError] = []
    found = list(_list_all(list(orchestrators(on)), troubles))
    for error in troubles:
        notify(f"skipped: {error}")
    return sorted(found, key=lambda job: (job.status.submitted_at, job.id))


def orchestrators(on: str | None = None) -> Iterator[tuple[str, Orchestrator]]:
    """The orchestrators that may have jobs of this user, or only `on`. Those that cannot be opened on this machine are skipped."""
    from ludus.launch.job import ORCHESTRATORS, open_orchestrator

    if on is not None and on.partition("/")[0] == KUBERNETES:
        yield from _kubernetes_orchestrators(on.partition("/")[2], ask_current=True)
        return
    if on is not None:
        with _wrap_user_errors(on):
            orchestrator = open_orchestrator(on)
        yield on, orchestrator
        return
    for name in ORCHESTRATORS:
        if name == KUBERNETES:
            yield from _kubernetes_orchestrators("", ask_current=False)
            continue
        with suppress(UsageError):
            yield name, open_orchestrator(name)
    for name in known_orchestrators():
        try:
            with _wrap_user_errors(name):
                orchestrator = open_orchestrator(name)
        except (UnknownName, MissingExtra):  # not importable from this directory
            continue
        except LudusError as error:
            notify(f"skipped: {error}")
            continue
        yield name, orchestrator


def _kubernetes_orchestrators(namespace: str, *, ask_current: bool) -> Iterator[tuple[str, Orchestrator]]:
    """One orchestrator for each namespace to which this user has submitted jobs from this machine.

    `namespace`: only this one, of the current context. `ask_current`: also that of the current context, which may be slow to answer.
    """
    from ludus.launch.job import open_orchestrator
    from ludus.launch.kubernetes.backend import remembered_places
    from ludus.launch.kubernetes.settings import KubernetesSettings

    places = [] if namespace else remembered_places()
    for context, known in places:
        yield KUBERNETES, open_orchestrator(KUBERNETES, settings=KubernetesSettings(known, context))
    if namespace or ask_current:
        current: Any = open_orchestrator(KUBERNETES, settings=KubernetesSettings(namespace))
        if (current.client.context, current.client.namespace) not in places:
            yield KUBERNETES, current


def _list_all(backends: Sequence[tuple[str, Orchestrator]], troubles: list[LudusError]) -> Iterator[JobHandle]:
    for name, orchestrator in backends:
        try:
            with _wrap_user_errors(name):
                listed = orchestrator.list()
        except LudusError as error:
            troubles.append(error)
            continue
        yield from (JobHandle(name, orchestrator, status) for status in listed)


# -- orchestrators of the user (module:Class) -----------------------------------------------------------------------------


@contextmanager
def _wrap_user_errors(name: str) -> Iterator[None]:
    """Turn any exception of a user's orchestrator into WorkerFailed, so that commands can still use the other ones."""
    try:
        yield
    except (UnknownName, MissingExtra, WorkerFailed):
        raise
    except Exception as error:  # user code may raise anything
        if ":" not in name:
            raise  # a bug of a built-in orchestrator must not be hidden
        reason = error.message if isinstance(error, LudusError) else f"{type(error).__name__}: {error}."
        raise WorkerFailed(
            f"The orchestrator {name} failed: {reason}", "`--on local` selects only the jobs of this machine."
        ) from error


def add_orchestrator(name: str) -> None:
    """Store the name of a user's orchestrator, so that `ludus jobs` finds its jobs without --on."""
    from ludus.io.atomic_file import replace_file
    from ludus.launch import job_dir
    from ludus.launch.job import ORCHESTRATORS

    known = known_orchestrators()
    if name in ORCHESTRATORS or name in known:
        return
    home = job_dir.make_private(job_dir.state_dir())
    replace_file(home / "orchestrators", "".join(f"{line}\n" for line in (*known, name)))


def known_orchestrators() -> list[str]:
    from ludus.launch import job_dir

    try:
        path = job_dir.state_dir() / "orchestrators"
        if path.stat().st_uid != os.getuid():  # these modules are imported: trust only a file of this user
            return []
        return [line for line in path.read_text(encoding="utf-8").splitlines() if ":" in line]
    except (OSError, ValueError):
        return []


# -- waiting ------------------------------------------------------------------------------------------------------------


def wait_for_end(found: JobHandle, timeout_s: float) -> JobStatus | None:
    """Wait until a job is over and return its status; None after `timeout_s`. Raises LudusError if its backend stays unreachable."""
    deadline = time.monotonic() + timeout_s
    polls = Backoff(_FIRST_POLL_S, _POLL_S if found.on == "local" else _REMOTE_POLL_S, factor=1.2)
    unreachable_since: float | None = None
    while True:
        try:
            status = found.orchestrator.status(found.id)
            unreachable_since = None
            if status.over:
                return status
        except UsageError:
            raise
        except LudusError as error:  # a network or a queue may be unavailable for a while
            if unreachable_since is None:
                notify(f"{found.on} cannot be queried at the moment: {error}")
                unreachable_since = time.monotonic()
            elif time.monotonic() - unreachable_since > _UNREACHABLE_S:
                raise
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(polls.next_delay(), left))


def conclude(found: JobHandle, *, last_lines: bool) -> int:
    """Return the exit code of a job; print why it did not succeed, with the last log lines of its main role."""
    status = found.status
    if status.state != "succeeded":
        notify(f"{found.id}: {_describe_end(status)}")
        if last_lines and status.state == "failed":
            with suppress(LudusError):  # the logs may be unreachable
                for line in _lines(found, main_role(status), False, _LAST_LINES):
                    print(f"  {line}", file=sys.stderr)
            print(f"  full log: ludus jobs logs {found.id}", file=sys.stderr)
    return 1 if status.exit_code is None else status.exit_code


def main_role(status: JobStatus) -> str | None:
    """The role whose exit code is that of the job; None if it cannot be determined."""
    roles = list(dict.fromkeys(process.role for process in status.processes))
    if len(roles) == 1:
        return roles[0]
    return next((role for role in _MAINS if role in roles), None)


# -- logs ---------------------------------------------------------------------------------------------------------------


def _lines(found: JobHandle, role: str | None, follow: bool, tail: int | None) -> Iterator[str]:
    """The log lines of a job. With `tail` only the last ones of those that exist; with `follow` also the new ones."""
    if tail is None:
        yield from found.orchestrator.logs(found.id, role=role, follow=follow)
        return
    if not follow:
        yield from deque(found.orchestrator.logs(found.id, role=role, follow=False), maxlen=tail)
        return
    from ludus.cli.log_tail import tail_lines

    names = [process.name for process in found.status.processes if role in (None, process.role)]

    def process_of(line: str) -> str:
        name = line.partition(": ")[0]
        return name if len(names) > 1 and name in names else ""

    began = time.monotonic()
    existing = Counter(map(process_of, found.orchestrator.logs(found.id, role=role, follow=False)))
    took_s = time.monotonic() - began

    def follow_log() -> Iterator[str]:
        with _wrap_user_errors(found.on):
            yield from found.orchestrator.logs(found.id, role=role, follow=True)

    yield from tail_lines(follow_log(), tail, existing, process_of, within_s=_READ_S + 2 * took_s)


# -- output -------------------------------------------------------------------------------------------------------------


def _describe_end(status: JobStatus) -> str:
    code = f" with code {status.exit_code}"
    if status.exit_code is None or code in status.reason:
        code = ""
    return f"{status.state}{code}{': ' if status.reason else ''}{status.reason}"


def age(seconds: float) -> str:
    for size, word in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(0.0, seconds):.0f} s"


def _table(jobs: Sequence[JobHandle], now: float) -> RenderableType:
    from rich.text import Text

    columns = ("id", "on", "state", "exit", "age", "place", "run")
    table = make_table(columns, right=("exit", "age"), wrapped=("place", "run"))
    for job in jobs:
        status = job.status
        code = "–" if status.exit_code is None else str(status.exit_code)
        since = age(now - status.submitted_at) if status.submitted_at else "–"
        state = Text(status.state, style=_COLOURS.get(status.state, ""))
        runs = ", ".join(place.partition("?")[0].rstrip("/").rpartition("/")[2] for place in job.runs.values())
        place = status.place or ", ".join(dict.fromkeys(process.host for process in status.processes if process.host))
        table.add_row(Text(job.id), Text(job.on), state, code, since, Text(place or "–"), Text(runs or "–"))
    return table


def _page(found: JobHandle, now: float) -> RenderableType:
    from rich.console import Group

    status = found.status
    facts = {
        "job": status.id,
        "on": found.on,
        "state": status.state,
        "exit code": "" if status.exit_code is None else str(status.exit_code),
        "reason": status.reason,
        "submitted": f"{age(now - status.submitted_at)} ago" if status.submitted_at else "",
        "place": status.place,
        "run": "\n".join(found.runs.values()),
        "logs": status.logs,
    }
    head = make_facts(facts, _COLOURS.get(status.state, ""))
    return Group(head, "", _processes(status.processes)) if status.processes else head


def _processes(processes: Sequence[ProcessStatus]) -> RenderableType:
    from rich.text import Text

    table = make_table(("process", "state", "exit", "restarts", "pid", "host"), right=("exit", "restarts", "pid"))
    for process in processes:
        numbers = ("–" if value is None else str(value) for value in (process.exit_code, process.restarts, process.pid))
        table.add_row(Text(process.name), process.state, *numbers, Text(process.host or "–"))
    return table
