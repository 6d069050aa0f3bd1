"""The programs of Slurm: sbatch, squeue, scontrol, scancel. Each call has an end, and says in Slurm's own words why it failed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UsageError, WorkerFailed

ASK_S = 30.0
SUBMIT_S = 120.0
"""A busy controller answers late; sbatch itself waits and tries again."""

_AWAY = re.compile(
    r"unable to contact|connection refused|timed out|socket|communication|zero bytes|temporarily|try again|backup|munge|"
    r"configuration source",
    re.IGNORECASE,
)
_NO_SUCH = re.compile(r"invalid job id", re.IGNORECASE)
_NOT_ANY_MORE = re.compile(
    r"invalid job id|already completing or completed|no active|not running|pending execution|can not be altered now",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Queued:
    """`state`: as Slurm calls it, PENDING, RUNNING, TIMEOUT … `why`: Slurm's word for what it waits for."""

    state: str
    why: str = ""


def submit(directory: Path, script: str, environ: Mapping[str, str]) -> str:
    """The number of the job. Raises UsageError where Slurm will not have it as it is; WorkerFailed."""
    said = _call(("sbatch", "--parsable", script), SUBMIT_S, environ=environ, cwd=directory)
    number = said.strip().splitlines()[-1].partition(";")[0] if said.strip() else ""
    if not number.isdigit():
        raise WorkerFailed(f"sbatch did not say which job it has made, but {said.strip()!r}.")
    return number


def cluster() -> str:
    """The name of the one that the programs here speak to; empty where they do not say. Raises WorkerFailed, UsageError."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _call(("scontrol", "show", "config"), ASK_S), re.MULTILINE)
    return found[1] if found else ""


def states(numbers: Sequence[str]) -> dict[str, Queued]:
    """Of those that Slurm still knows of, also for some minutes after their end. Raises WorkerFailed, UsageError."""
    if not numbers:
        return {}
    words = ("squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", "--format=%i|%T|%r")
    try:
        said = _call(words, ASK_S)
    except UsageError as error:
        if _NO_SUCH.search(error.message):  # one number that is unknown is an error; of several they are left out
            return {}
        raise
    found: dict[str, Queued] = {}
    for line in said.splitlines():
        number, state, why = [*line.strip().split("|", 2), "", ""][:3]
        found.setdefault(number.partition("+")[0].partition("_")[0], Queued(state, "" if why == "None" else why))
    return found


def exit_code(number: str) -> int | None:
    """Of the batch script, as a shell says it."""
    found = re.search(r"\bExitCode=(\d+):(\d+)", _call(("scontrol", "--oneliner", "show", "job", number), ASK_S))
    if found is None:
        return None
    code, by = int(found[1]), int(found[2])
    return 128 + by if by else code


def cancel_waiting(number: str) -> None:
    """Only if it has not been started yet."""
    _leave(("scancel", "--state=PENDING", number))


def signal(number: str, name: str) -> None:
    """To the batch script alone, which is our supervisor; nothing where it does not run."""
    _leave(("scancel", f"--signal={name}", "--batch", number))


def cancel(number: str) -> None:
    """Everything of it is ended by Slurm."""
    _leave(("scancel", number))


def requeue(number: str) -> str:
    """Why it could not be, or nothing."""
    try:
        _call(("scontrol", "requeue", number), ASK_S)
    except (UsageError, WorkerFailed) as error:
        return str(error)
    return ""


def host_names(nodes: str) -> list[str]:
    """n[1-3] → n1 n2 n3"""
    return _call(("scontrol", "show", "hostnames", nodes), ASK_S).split()


def addresses(names: Sequence[str]) -> dict[str, str]:
    """Where Slurm itself reaches the nodes: a name or a number."""
    said = _call(("scontrol", "--oneliner", "show", "node", ",".join(dict.fromkeys(names))), ASK_S)
    found: dict[str, str] = {}
    for line in said.splitlines():
        values = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "NodeName" in values:
            found[values["NodeName"]] = values.get("NodeAddr", values["NodeName"])
    return found


def _leave(words: Sequence[str]) -> None:
    try:
        _call(words, ASK_S)
    except (UsageError, WorkerFailed) as error:
        if not _NOT_ANY_MORE.search(error.message):
            raise


def _call(words: Sequence[str], timeout_s: float, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(
            f"{words[0]} is not installed here, or not on the PATH.",
            "Submit from a login node of the cluster, where Slurm's programs are.",
        )
    try:
        done = subprocess.run(  # noqa: S603
            [program, *words[1:]],
            env=dict(os.environ if environ is None else environ),
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
    said = " ".join(re.sub(rf"^{words[0]}: (error: )?", "", line) for line in done.stderr.strip().splitlines()) or "nothing"
    if _AWAY.search(said):
        raise WorkerFailed(f"Slurm does not answer; {words[0]} says: {said}", "Is its controller up? scontrol ping")
    raise UsageError(f"Slurm refuses; {words[0]} says: {said}")
