"""Slurm, as whoever submits sees it: the programs, the controller, the partitions and what they allow."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.launch.doctor.finding import Finding, failed, ok, several, warning

PROGRAMS = ("sbatch", "srun", "scancel", "squeue", "scontrol", "sinfo")
_ASK_S = 10.0
_FORM = "%R|%a|%l|%F|%c|%m|%G"
_LINE = re.compile(r"([^|]*)\|(\w+)\|([^|]*)\|(\d+)/(\d+)/(\d+)/(\d+)\|(\d+)(\+?)\|\d+\+?\|(.*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?=[,(]|$)")
INFINITE = 1 << 40


@dataclass(frozen=True)
class Kind:
    """Nodes with the same accelerators. `cpus`: of the smallest; `more`: others of them have more, and nobody says how many."""

    nodes: int
    idle: int
    cpus: int
    more: bool = False
    gpus: int = 0

    def has(self, wanted: Wanted, *, perhaps: bool = False) -> bool:
        """Each of them; `perhaps`: some of them may."""
        return self.gpus >= wanted.gpus and (self.cpus >= wanted.cpus or (perhaps and self.more))


@dataclass(frozen=True)
class Partition:
    """`seconds`: that a job may take at most. `kinds`: sinfo has a line for each."""

    name: str
    up: bool
    seconds: int
    kinds: tuple[Kind, ...]

    @property
    def nodes(self) -> int:
        return sum(kind.nodes for kind in self.kinds)

    @property
    def idle(self) -> int:
        return sum(kind.idle for kind in self.kinds)

    def fitting(self, wanted: Wanted, *, perhaps: bool = False) -> int:
        """Nodes that have what is wanted of each."""
        return sum(kind.nodes for kind in self.kinds if kind.has(wanted, perhaps=perhaps))


@dataclass(frozen=True)
class Queue:
    """`missing`: programs. `controller`: what it says when it is asked whether it is there; `why`: it does not answer."""

    missing: tuple[str, ...] = ()
    controller: str = ""
    partitions: tuple[Partition, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Wanted:
    """By the job; empty or 0: what Slurm gives by itself. `cpus`, `gpus`: of each node."""

    partition: str = ""
    time: str = ""
    nodes: int = 1
    cpus: int = 0
    gpus: int = 0


def look_queue() -> Queue:
    missing = tuple(program for program in PROGRAMS if shutil.which(program) is None)
    if "scontrol" in missing or "sinfo" in missing:
        return Queue(missing)
    try:
        controller = _run(["scontrol", "ping"])
        listed = _run(["sinfo", "--noheader", f"--format={_FORM}"])
    except (subprocess.TimeoutExpired, OSError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        return Queue(missing, why=f"it does not answer within {_ASK_S:g} s" if late else str(error))
    return Queue(missing, controller, read_partitions(listed))


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL, check=False)  # noqa: S603
    return done.stdout.strip() or done.stderr.strip()


def read_partitions(text: str) -> tuple[Partition, ...]:
    """What sinfo says in our form: a line for each kind of accelerator in a partition. One that is not understood is left out. Pure."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        matched = _LINE.fullmatch(line.strip())
        if matched is not None:
            name, state, time, _, idle, _, total, cpus, more, gres = matched.groups()
            kind = Kind(int(total), int(idle), int(cpus), bool(more), gpus_of(gres))
            known = found[name].kinds if name in found else ()
            found[name] = Partition(name, state == "up", seconds_of(time), (*known, kind))
    return tuple(found.values())


def gpus_of(gres: str) -> int:
    """Of one node, from what Slurm says of its resources: `gpu:a100:4(S:0-1),shard:8` has 4. Pure."""
    return sum(int(number or 1) for number in _GPUS.findall(re.sub(r"\([^()]*\)", "", gres)))


def seconds_of(text: str) -> int:
    """Slurm's times: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; what is none: no limit. Pure."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()) or len(parts) > 3:
        return INFINITE
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def judge_queue(queue: Queue, wanted: Wanted) -> list[Finding]:
    if queue.missing:
        return [
            failed(
                "slurm", f"not found: {', '.join(queue.missing)}", "Log in to a machine of the cluster, or `module load slurm`."
            )
        ]
    if queue.why or "UP" not in queue.controller:
        said = queue.why or queue.controller or "it says nothing"
        return [failed("slurm controller", said, "`scontrol ping`; is SLURM_CONF right, and munged running?")]
    found = [ok("slurm controller", queue.controller.splitlines()[0])]
    if not queue.partitions:
        return [*found, failed("partitions", "sinfo names none", "Ask for access: `sinfo -a` shows those that are hidden.")]
    if not wanted.partition:
        names = ", ".join(f"{each.name} ({_nodes(each)}, {_time(each.seconds)})" for each in queue.partitions)
        found.append(ok("partitions", names))
        usable = [each for each in queue.partitions if not _short(each, wanted)]
        if not usable:
            found.append(failed("partition", _short(queue.partitions[0], wanted), "Ask for less: --nodes, --time, --cpus."))
        return found
    chosen = next((each for each in queue.partitions if each.name == wanted.partition), None)
    if chosen is None:
        known = ", ".join(each.name for each in queue.partitions)
        return [*found, failed(f"partition {wanted.partition}", "there is none of that name", f"There are: {known}.")]
    return [*found, _judge(chosen, wanted)]


def _judge(partition: Partition, wanted: Wanted) -> Finding:
    check, said = f"partition {partition.name}", f"{_nodes(partition)}, {_cores(partition)}, {_time(partition.seconds)}"
    if short := _short(partition, wanted):
        return failed(check, f"{said}; {short}", "Ask for less, or for another partition: `sinfo`.")
    if partition.fitting(wanted) < wanted.nodes:
        return warning(
            check,
            f"{said}; whether {several(wanted.nodes, 'node')} of them have {several(wanted.cpus, 'core')}, sinfo does not say",
            f"`sinfo -N -p {partition.name} -o '%N %c %G'` says what each has.",
        )
    if not partition.idle:
        return warning(check, f"{said}; no node is idle", "The job will wait: `squeue --start` says how long.")
    return ok(check, said)


def _short(partition: Partition, wanted: Wanted) -> str:
    """What it does not allow."""
    if not partition.up:
        return f"{partition.name} is down"
    if wanted.nodes > partition.nodes:
        return f"{several(wanted.nodes, 'node')} are wanted, and {partition.name} has {partition.nodes}"
    if wanted.time and seconds_of(wanted.time) > partition.seconds:
        return f"--time {wanted.time} is more than {partition.name} allows"
    if wanted.gpus and not any(kind.gpus for kind in partition.kinds):
        return f"accelerators are wanted, and {partition.name} has none"
    fitting = partition.fitting(wanted, perhaps=True)
    if fitting < wanted.nodes:
        each = [several(wanted.cpus, "core")] * bool(wanted.cpus) + [several(wanted.gpus, "accelerator")] * bool(wanted.gpus)
        return f"{several(wanted.nodes, 'node')} with {' and '.join(each)} wanted, and {partition.name} has {fitting or 'none'} of them"
    return ""


def _cores(partition: Partition) -> str:
    least, most = (bound(kind.cpus for kind in partition.kinds) for bound in (min, max))
    if least == most and not any(kind.more for kind in partition.kinds):
        return f"{least} cores each"
    return f"{least} cores or more each" if any(kind.more for kind in partition.kinds) else f"{least} to {most} cores each"


def _nodes(partition: Partition) -> str:
    return f"{several(partition.nodes, 'node')}, {partition.idle} idle"


def _time(seconds: int) -> str:
    if seconds >= INFINITE:
        return "no time limit"
    days, rest = divmod(seconds, 86_400)
    return f"at most {f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


# -- in an allocation -----------------------------------------------------------------------------------------------------


def allocated(nodelist: str) -> list[str]:
    """The names of its nodes, from Slurm's short form of them. Raises OSError, subprocess.SubprocessError."""
    words = ["scontrol", "show", "hostnames", nodelist]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL, check=True)  # noqa: S603
    return done.stdout.split()


def step_words(node: str, command: Sequence[str], cpus: int = 0) -> tuple[str, ...]:
    """A step beside whatever runs in the allocation, with so many cores; 0: as many as Slurm gives to one process, mostly one."""
    bound = (f"--cpus-per-task={cpus}",) if cpus else ()
    return ("srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", *bound, f"--nodelist={node}", "--input=all", *command)
