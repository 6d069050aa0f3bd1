"""Calls sbatch, squeue, scontrol and scancel. Each call has a time-out; errors quote Slurm's message."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UsageError, WorkerFailed

QUERY_S = 30.0
SUBMIT_S = 120.0
"""A busy controller answers late; sbatch itself retries."""

_UNAVAILABLE = re.compile(
    r"unable to contact|connection refused|timed out|socket|communication|zero bytes|temporarily|try again|backup|munge|"
    r"configuration source",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
_ENDED_JOB = re.compile(
    r"invalid job id|already completing or completed|no active|not running|pending execution|can not be altered now",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class QueueState:
    """`state`: Slurm's name of it, such as PENDING, RUNNING or TIMEOUT. `why`: Slurm's reason for a pending job."""

    state: str
    why: str = ""


def submit(directory: Path, script: str, environ: Mapping[str, str]) -> str:
    """Submit the script and return Slurm's job number. Raises UsageError if Slurm rejects it; WorkerFailed."""
    output = _call(("sbatch", "--parsable", script), SUBMIT_S, environ=environ, cwd=directory)
    number = output.strip().splitlines()[-1].partition(";")[0] if output.strip() else ""
    if not number.isdigit():
        raise WorkerFailed(f"sbatch printed no job number, but {output.strip()!r}.")
    return number


def cluster_name() -> str:
    """Return the name of the Slurm cluster, or "". Raises WorkerFailed, UsageError."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _call(("scontrol", "show", "config"), QUERY_S), re.MULTILINE)
    return found[1] if found else ""


def ping() -> str:
    """Return what Slurm says about its controllers. Raises WorkerFailed, UsageError."""
    return _call(("scontrol", "ping"), QUERY_S).strip()


def list_partitions(form: str) -> str:
    """Return the output of sinfo. `form`: its --format. Raises WorkerFailed, UsageError."""
    return _call(("sinfo", "--noheader", f"--format={form}"), QUERY_S)


def states(numbers: Sequence[str]) -> dict[str, QueueState]:
    """Return the states by job number; Slurm forgets jobs some minutes after their end. Raises WorkerFailed, UsageError."""
    if not numbers:
        return {}
    words = ("squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--format=%i|%T|%r")
    try:
        output = _call(words, QUERY_S)
    except UsageError as error:
        if _UNKNOWN_JOB.search(error.message):  # squeue fails for one unknown number, and omits it among several
            return {}
        raise
    found: dict[str, QueueState] = {}
    for line in output.splitlines():
        number, state, why = [*line.strip().split("|", 2), "", ""][:3]
        found.setdefault(number.partition("+")[0].partition("_")[0], QueueState(state, "" if why == "None" else why))
    return found


def exit_code(number: str) -> int | None:
    """Return the batch script's exit code, 128 + N for signal N."""
    found = re.search(r"\bExitCode=(\d+):(\d+)", _call(("scontrol", "--oneliner", "show", "job", number), QUERY_S))
    if found is None:
        return None
    code, by = int(found[1]), int(found[2])
    return 128 + by if by else code


def cancel_waiting(number: str) -> None:
    """Cancel the job if it has not started yet."""
    _call_if_active(("scancel", "--state=PENDING", number))


def signal(number: str, name: str) -> None:
    """Signal the batch script only, whose process is the supervisor, if it runs."""
    _call_if_active(("scancel", f"--signal={name}", "--batch", number))


def cancel(number: str) -> None:
    """Let Slurm kill all processes of the job."""
    _call_if_active(("scancel", number))


def requeue(number: str) -> str:
    """Queue the job again; return the error, or ""."""
    try:
        _call(("scontrol", "requeue", number), QUERY_S)
    except (UsageError, WorkerFailed) as error:
        return str(error)
    return ""


def host_names(nodes: str) -> list[str]:
    """n[1-3] → n1 n2 n3"""
    return _call(("scontrol", "show", "hostnames", nodes), QUERY_S).split()


def node_addresses(names: Sequence[str]) -> dict[str, str]:
    """Return the address that Slurm uses for each node: a host name or an IP address."""
    output = _call(("scontrol", "--oneliner", "show", "node", ",".join(dict.fromkeys(names))), QUERY_S)
    found: dict[str, str] = {}
    for line in output.splitlines():
        values = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "NodeName" in values:
            found[values["NodeName"]] = values.get("NodeAddr", values["NodeName"])
    return found


def _call_if_active(words: Sequence[str]) -> None:
    try:
        _call(words, QUERY_S)
    except (UsageError, WorkerFailed) as error:
        if not _ENDED_JOB.search(error.message):
            raise


def _call(words: Sequence[str], timeout_s: float, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"{words[0]} is not installed here, or not on the PATH.", "Submit from a login node of the cluster.")
    try:
        done = subprocess.run(  # noqa: S603
            [program, *words[1:]],
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"{words[0]} did not answer in {timeout_s:g} s.", "Is Slurm's controller up? scontrol ping") from error
    except OSError as error:
        raise WorkerFailed(f"{program} cannot be started: {error.strerror}.") from error
    if done.returncode == 0:
        return done.stdout
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    output = " ".join(re.sub(rf"^{words[0]}: (error: )?", "", line) for line in lines) or "nothing"
    if _UNAVAILABLE.search(output):
        raise WorkerFailed(f"Slurm does not answer; {words[0]}: {output}", "Is its controller up? scontrol ping")
    raise UsageError(f"Slurm refused the request; {words[0]}: {output}")
