"""Checks Slurm as seen from the submitting machine: programs, controller, partitions and their limits."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.launch.doctor.finding import DoctorFinding, failed, format_count, ok, warning

PROGRAMS = ("sbatch", "srun", "scancel", "squeue", "scontrol", "sinfo")
_QUERY_S = 10.0
_FORM = "%R|%a|%l|%F|%c|%m|%G"
_LINE = re.compile(r"([^|]*)\|(\w+)\|([^|]*)\|(\d+)/(\d+)/(\d+)/(\d+)\|(\d+)(\+?)\|\d+\+?\|(.*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?=[,(]|$)")
INFINITE = 1 << 40


@dataclass(frozen=True)
class NodeKind:
    """Nodes with the same GPUs. `cpus`: of the smallest; `more`: some have an unknown larger number."""

    nodes: int
    idle: int
    cpus: int
    more: bool = False
    gpus: int = 0

    def fits(self, wanted: SlurmRequest, *, perhaps: bool = False) -> bool:
        """Return whether each of the nodes fits; `perhaps`: whether some of them may."""
        return self.gpus >= wanted.gpus and (self.cpus >= wanted.cpus or (perhaps and self.more))


@dataclass(frozen=True)
class Partition:
    """`seconds`: time limit of a job. `kinds`: one per line of sinfo."""

    name: str
    up: bool
    seconds: int
    kinds: tuple[NodeKind, ...]

    @property
    def nodes(self) -> int:
        return sum(kind.nodes for kind in self.kinds)

    @property
    def idle(self) -> int:
        return sum(kind.idle for kind in self.kinds)

    def count_fitting(self, wanted: SlurmRequest, *, perhaps: bool = False) -> int:
        """Return the number of nodes that fit the request."""
        return sum(kind.nodes for kind in self.kinds if kind.fits(wanted, perhaps=perhaps))


@dataclass(frozen=True)
class SlurmState:
    """`missing`: programs. `controller`: output of `scontrol ping`. `why`: why Slurm does not answer."""

    missing: tuple[str, ...] = ()
    controller: str = ""
    partitions: tuple[Partition, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class SlurmRequest:
    """Request of a job; "" or 0: Slurm's default. `cpus`, `gpus`: per node."""

    partition: str = ""
    time: str = ""
    nodes: int = 1
    cpus: int = 0
    gpus: int = 0


def query_slurm() -> SlurmState:
    missing = tuple(program for program in PROGRAMS if shutil.which(program) is None)
    if "scontrol" in missing or "sinfo" in missing:
        return SlurmState(missing)
    try:
        controller = _run(["scontrol", "ping"])
        listed = _run(["sinfo", "--noheader", f"--format={_FORM}"])
    except (subprocess.TimeoutExpired, OSError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        return SlurmState(missing, why=f"it does not answer within {_QUERY_S:g} s" if late else str(error))
    return SlurmState(missing, controller, parse_partitions(listed))


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_QUERY_S, stdin=subprocess.DEVNULL, check=False)  # noqa: S603
    return done.stdout.strip() or done.stderr.strip()


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Parse the output of sinfo, which has a line for each kind of GPU in a partition; invalid lines are skipped."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        matched = _LINE.fullmatch(line.strip())
        if matched is not None:
            name, state, time, _, idle, _, total, cpus, more, gres = matched.groups()
            kind = NodeKind(int(total), int(idle), int(cpus), bool(more), parse_gres(gres))
            known = found[name].kinds if name in found else ()
            found[name] = Partition(name, state == "up", time_limit_s(time), (*known, kind))
    return tuple(found.values())


def parse_gres(gres: str) -> int:
    """Return the number of GPUs in a GRES string: `gpu:a100:4(S:0-1),shard:8` has 4."""
    return sum(int(number or 1) for number in _GPUS.findall(re.sub(r"\([^()]*\)", "", gres)))


def time_limit_s(text: str) -> int:
    """Parse a Slurm time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]; other text: no limit."""
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


def check_slurm(state: SlurmState, wanted: SlurmRequest) -> list[DoctorFinding]:
    if state.missing:
        return [
            failed(
                "slurm", f"not found: {', '.join(state.missing)}", "Log in to a machine of the cluster, or `module load slurm`."
            )
        ]
    if state.why or "UP" not in state.controller:
        text = state.why or state.controller or "no output"
        return [failed("slurm controller", text, "`scontrol ping`; is SLURM_CONF right, and munged running?")]
    found = [ok("slurm controller", state.controller.splitlines()[0])]
    if not state.partitions:
        return [*found, failed("partitions", "sinfo names none", "Request access: `sinfo -a` shows hidden ones.")]
    if not wanted.partition:
        names = ", ".join(f"{each.name} ({_format_nodes(each)}, {_format_time(each.seconds)})" for each in state.partitions)
        found.append(ok("partitions", names))
        usable = [each for each in state.partitions if not _shortage(each, wanted)]
        if not usable:
            found.append(failed("partition", _shortage(state.partitions[0], wanted), "Request less: --nodes, --time, --cpus."))
        return found
    chosen = next((each for each in state.partitions if each.name == wanted.partition), None)
    if chosen is None:
        known = ", ".join(each.name for each in state.partitions)
        return [*found, failed(f"partition {wanted.partition}", "it does not exist", f"Use one of: {known}.")]
    return [*found, _check_partition(chosen, wanted)]


def _check_partition(partition: Partition, wanted: SlurmRequest) -> DoctorFinding:
    check, text = (
        f"partition {partition.name}",
        f"{_format_nodes(partition)}, {_format_cores(partition)}, {_format_time(partition.seconds)}",
    )
    if short := _shortage(partition, wanted):
        return failed(check, f"{text}; {short}", "Request less, or another partition: `sinfo`.")
    if partition.count_fitting(wanted) < wanted.nodes:
        return warning(
            check,
            f"{text}; whether {format_count(wanted.nodes, 'node')} of them have {format_count(wanted.cpus, 'core')} is unknown",
            f"`sinfo -N -p {partition.name} -o '%N %c %G'` lists their resources.",
        )
    if not partition.idle:
        return warning(check, f"{text}; no node is idle", "The job will wait: `squeue --start` estimates the start.")
    return ok(check, text)


def _shortage(partition: Partition, wanted: SlurmRequest) -> str:
    """Return what the partition lacks for the request, or ""."""
    if not partition.up:
        return f"{partition.name} is down"
    if wanted.nodes > partition.nodes:
        return f"{format_count(wanted.nodes, 'node')} are requested, and {partition.name} has {partition.nodes}"
    if wanted.time and time_limit_s(wanted.time) > partition.seconds:
        return f"--time {wanted.time} is more than {partition.name} allows"
    if wanted.gpus and not any(kind.gpus for kind in partition.kinds):
        return f"GPUs are requested, and {partition.name} has none"
    count_fitting = partition.count_fitting(wanted, perhaps=True)
    if count_fitting < wanted.nodes:
        each = [format_count(wanted.cpus, "core")] * bool(wanted.cpus) + [format_count(wanted.gpus, "GPU")] * bool(wanted.gpus)
        return f"{format_count(wanted.nodes, 'node')} with {' and '.join(each)} wanted, and {partition.name} has {count_fitting or 'none'} of them"
    return ""


def _format_cores(partition: Partition) -> str:
    least, most = (bound(kind.cpus for kind in partition.kinds) for bound in (min, max))
    if least == most and not any(kind.more for kind in partition.kinds):
        return f"{least} cores each"
    return f"{least} cores or more each" if any(kind.more for kind in partition.kinds) else f"{least} to {most} cores each"


def _format_nodes(partition: Partition) -> str:
    return f"{format_count(partition.nodes, 'node')}, {partition.idle} idle"


def _format_time(seconds: int) -> str:
    if seconds >= INFINITE:
        return "no time limit"
    days, rest = divmod(seconds, 86_400)
    return f"at most {f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


# -- in an allocation -----------------------------------------------------------------------------------------------------


def expand_nodelist(nodelist: str) -> list[str]:
    """Expand a node list such as n[1-3]. Raises OSError, subprocess.SubprocessError."""
    words = ["scontrol", "show", "hostnames", nodelist]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_QUERY_S, stdin=subprocess.DEVNULL, check=True)  # noqa: S603
    return done.stdout.split()


def srun_words(node: str, command: Sequence[str], cpus: int = 0) -> tuple[str, ...]:
    """Return the srun command of a step that overlaps with others in the allocation. `cpus`: 0: Slurm's default, mostly one."""
    bound = (f"--cpus-per-task={cpus}",) if cpus else ()
    return ("srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", *bound, f"--nodelist={node}", "--input=all", *command)
