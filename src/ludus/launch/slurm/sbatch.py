"""Renders and checks the Slurm batch script of a job. Pure functions without I/O."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UsageError
from ludus.launch.job import Job
from ludus.launch.job_dir import CANCEL, JOB

SCRIPT = "job.sbatch"
STARTER = "ludus.launch.slurm.backend:SlurmStarter"
MAX_TIME_S = 10 * 365 * 86_400

_VALUE = re.compile(r"[A-Za-z0-9_.,:@%/+=*&|()\[\]!^~-]+")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?)")
_OPTION = re.compile(r"(?:(--[a-z][a-z0-9-]*)|(-[A-Za-z]))(?:[= ](.*))?", re.DOTALL)
_CONFIG_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("--job-name", "-J"), "name"),
    **dict.fromkeys(("--nodes", "-N"), "nodes"),
    **dict.fromkeys(("--time", "-t"), "time"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "cpus"),
    **dict.fromkeys(("--signal", "--requeue", "--no-requeue"), "signal_s and requeue"),
    **dict.fromkeys(("--chdir", "-D"), "workdir"),
}
_REFUSED = ("--ntasks", "-n", "--ntasks-per-node", "--output", "-o", "--error", "-e", "--open-mode", "--array", "-a", "--wrap",
            "--parsable", "--wait", "-W", "--input", "-i", "--test-only")  # fmt: skip

_LINE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE"}
_UNWANTED = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_INPUT", "SBATCH_ERROR", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
"""Environment variables of sbatch that would change the kind of the job, or contradict its script."""


@dataclass(frozen=True)
class SlurmGroup:
    """Nodes of one kind in a heterogeneous job. Missing values are those of the whole job."""

    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None
    memory: str = ""
    partition: str = ""
    constraint: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmSettings:
    """`cpus`, `gpus`, `memory`: per node. `extra`: further options of sbatch, such as --mail-type=END. `setup`: shell lines to run
    first. `python`, `workdir`: on the nodes; empty: those of the submitting process. `signal_s`: seconds before the time limit at which
    the job is stopped and, with `requeue`, queued again. `groups`: kinds of nodes; node 0 is the first of the first group.
    """

    account: str = ""
    partition: str = ""
    qos: str = ""
    time: str = ""
    constraint: str = ""
    reservation: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = False
    cpus: int | None = None
    gpus: int = 0
    memory: str = ""
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = ""
    workdir: str = ""
    signal_s: int = 120
    requeue: bool = True
    groups: tuple[SlurmGroup, ...] = ()


def render_script(job: Job, settings: SlurmSettings) -> str:
    """Return the bash script, to be submitted from the job's directory. Raises UsageError."""
    check_settings(job, settings)
    first, *others = node_groups(job, settings)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={job.name}"]
    lines += ["#SBATCH --output=logs/slurm-%j.out", "#SBATCH --open-mode=append"]
    lines += _directives(settings, first)
    for group in others:
        lines += ["#SBATCH hetjob", *_directives(settings, group)]
    python, workdir = settings.python or sys.executable, Path(settings.workdir or Path.cwd()).expanduser()
    lines += [
        "",
        "directory=$SLURM_SUBMIT_DIR",
        f'if [ ! -r "$directory/{JOB}" ]; then',
        '    echo "$directory is not on $(hostname): set LUDUS_STATE_DIR to a directory that all nodes share." >&2',
        "    exit 1",
        "fi",
        f'if [ -e "$directory/{CANCEL}" ]; then exit 130; fi',
        "unset LD_PRELOAD",
        *(line for text in settings.setup for line in text.splitlines()),
        *(["unset LD_PRELOAD"] if settings.setup else []),  # modules of some sites set it
        f"cd {shlex.quote(str(workdir))} || exit 1",
        f'exec {shlex.quote(python)} -P -m ludus.launch.supervisor "$directory" --stay --starter {STARTER}',
    ]
    return "\n".join(lines) + "\n"


def overriding_variables(script: str) -> frozenset[str]:
    """Return the environment variables that would override `#SBATCH` lines of the script."""
    names = {f"SBATCH_{_VARIABLES.get(name, name.upper().replace('-', '_'))}" for name in _LINE.findall(script)}
    return frozenset(names.union(_UNWANTED))


def salloc_options(job: Job, settings: SlurmSettings) -> tuple[str, ...]:
    """Return the options of `salloc` that request the same nodes as the script. Raises UsageError."""
    check_settings(job, settings)
    words = [f"--job-name={job.name}"]
    for number, group in enumerate(node_groups(job, settings)):
        words += [":"] if number else []
        for text in node_options(settings, group):
            words += shlex.split(text)
    return tuple(words)


def node_groups(job: Job, settings: SlurmSettings) -> tuple[SlurmGroup, ...]:
    return settings.groups or (SlurmGroup(job.nodes),)


def parse_time(time: str) -> float:
    """Return the seconds of a Slurm time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; UNLIMITED. Raises UsageError."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    hint = "Use MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS."
    found = _TIME.fullmatch(time)
    if found is None or len(time) > 24:
        raise UsageError(f"{time!r} is not a valid time.", hint)
    part = {name: int(text or 0) for name, text in found.groupdict().items()}
    if found["d"] is not None:
        total = part["d"] * 86_400 + part["dh"] * 3_600 + part["dm"] * 60 + part["ds"]
    elif found["c"] is not None:
        total = part["a"] * 3_600 + part["b"] * 60 + part["c"]
    else:
        total = part["a"] * 60 + part["b"]
    if not 0 < total <= MAX_TIME_S:
        raise UsageError(f"The time {time} is {'zero' if not total else 'more than ten years'}.", hint)
    return total


# -- checks ---------------------------------------------------------------------------------------------------------------


def check_settings(job: Job, settings: SlurmSettings) -> None:
    """Reject values that would inject lines or options into the script, or that Slurm does not understand. Raises UsageError."""
    kinds: tuple[SlurmSettings | SlurmGroup, ...] = (settings, *settings.groups)
    for kind in kinds:
        for name in ("account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude"):
            value = getattr(kind, name, "")
            if value and not _VALUE.fullmatch(value):
                raise UsageError(f"{name} {value!r} is not a valid Slurm name.", "Use no spaces, quotes or line breaks.")
        if kind.memory and not _MEMORY.fullmatch(kind.memory):
            raise UsageError(f"memory {kind.memory!r} is not a valid size.", "Use a number of megabytes, or a size such as 16G.")
        if (kind.cpus is not None and kind.cpus < 1) or (kind.gpus is not None and kind.gpus < 0):
            raise UsageError(f"A node cannot have {kind.cpus} cores and {kind.gpus} GPUs.", "Use cpus >= 1 and gpus >= 0.")
        for option in kind.extra:
            _check_option(option)
    if settings.groups:
        _check_groups(job, settings)
    for name, text in (("python", settings.python), ("workdir", settings.workdir), *(("setup", line) for line in settings.setup)):
        if any(ord(char) < 32 and not (name == "setup" and char in "\n\t") for char in text):
            raise UsageError(f"{name} {text!r} contains a control character.")
    if not 10 <= settings.signal_s <= 65_535:
        raise UsageError(f"signal_s is {settings.signal_s}.", "Use 10 to 65535 seconds.")
    if settings.time:
        _check_time(job, settings)


def _check_option(option: str) -> None:
    found = _OPTION.fullmatch(option)
    if found is None or any(ord(char) < 32 for char in option) or "#" in option:
        raise UsageError(f"extra {option!r} is not an option of sbatch.", "Write it as --mail-type=END, without #SBATCH.")
    name = found[1] or found[2]
    if name in _CONFIG_KEYS:
        raise UsageError(f"extra {option!r} is already a key of cluster.yaml.", f"Use {_CONFIG_KEYS[name]}.")
    if name in _REFUSED:
        raise UsageError(f"extra {option!r} would change how the job is run.", "Leave it out.")
    try:
        shlex.split(option)
    except ValueError as error:
        raise UsageError(f"extra {option!r}: {error}.") from error


def _check_groups(job: Job, settings: SlurmSettings) -> None:
    if any(group.nodes < 1 for group in settings.groups):
        raise UsageError("A group has no nodes.", "Leave it out.")
    if (total := sum(group.nodes for group in settings.groups)) != job.nodes:
        raise UsageError(f"The groups have {total} nodes, and the job {job.name} has {job.nodes}.")
    if settings.nodelist or settings.exclude:
        raise UsageError("nodelist and exclude do not work with groups.", "Use extra of each group.")


def _check_time(job: Job, settings: SlurmSettings) -> None:
    limit_s = parse_time(settings.time)
    if limit_s < 2 * settings.signal_s:  # it would be stopped and requeued as soon as it has started
        raise UsageError(
            f"The job {job.name} has the time limit {settings.time}, and signal_s {settings.signal_s} stops it too early.",
            "Set a longer time, or a smaller signal_s.",
        )
    if job.grace_s >= settings.signal_s:
        raise UsageError(
            f"The job {job.name} may take {job.grace_s:g} s to end, and is stopped {settings.signal_s} s before its time limit.",
            "Set a smaller grace_s, or a greater signal_s.",
        )


def _directives(settings: SlurmSettings, group: SlurmGroup) -> list[str]:
    lines = node_options(settings, group)
    if not settings.time or parse_time(settings.time) < float("inf"):  # without a time, the limit of the partition applies
        # B: signal the batch script only, whose process has become the supervisor.
        lines.append(f"--signal=B:{'USR1' if settings.requeue else 'TERM'}@{settings.signal_s}")
    lines.append("--requeue" if settings.requeue else "--no-requeue")
    return [f"#SBATCH {line}" for line in lines]


def node_options(settings: SlurmSettings, group: SlurmGroup) -> list[str]:
    """Return the options of sbatch and salloc that request the nodes of a group."""
    cpus = group.cpus or settings.cpus
    gpus = settings.gpus if group.gpus is None else group.gpus
    values = [
        ("--account", settings.account),
        ("--partition", group.partition or settings.partition),
        ("--qos", settings.qos),
        ("--time", settings.time),
        ("--constraint", group.constraint or settings.constraint),
        ("--reservation", settings.reservation),
        ("--nodelist", settings.nodelist),
        ("--exclude", settings.exclude),
        ("--nodes", str(group.nodes)),
        ("--ntasks-per-node", "1"),
        ("--cpus-per-task", str(cpus or "")),
        ("--mem", group.memory or settings.memory),
        ("--gres", f"gpu:{gpus}" if gpus else ""),
    ]
    lines = [f"{name}={value}" for name, value in values if value]
    if settings.exclusive:
        lines.append("--exclusive")
    return [*lines, *settings.extra, *group.extra]
