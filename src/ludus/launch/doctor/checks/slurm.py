"""Checks Slurm as seen from the submitting machine: programs, controller, partitions and their limits."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass

from ludus.errors import LudusError, UsageError
from ludus.launch.doctor.finding import DoctorFinding, failure, format_count, ok, warning
from ludus.launch.slurm import commands
from ludus.launch.slurm.sbatch import parse_time

PROGRAMS = ("sbatch", "srun", "scancel", "squeue", "scontrol", "sinfo")
_FORM = "%R|%a|%l|%F|%c|%m|%G"
_LINE = re.compile(r"([^|]*)\|(\w+)\|([^|]*)\|(\d+)/(\d+)/(\d+)/(\d+)\|(\d+)(\+?)\|\d+\+?\|(.*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?=[,(]|$)")


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
    seconds: float
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
    if missing := tuple(program for program in PROGRAMS if shutil.which(program) is None):
        return SlurmState(missing)
    try:
        return SlurmState((), commands.ping(), parse_partitions(commands.list_partitions(_FORM)))
    except LudusError as error:
        return SlurmState(why=error.message)


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


def time_limit_s(text: str) -> float:
    """Return the seconds of a Slurm time; infinite for other text."""
    try:
        return parse_time(text)
    except UsageError:
        return math.inf


def check_slurm(state: SlurmState, wanted: SlurmRequest) -> list[DoctorFinding]:
    if state.missing:
        remedy = "Log in to a machine of the cluster, or `module load slurm`."
        return [failure("slurm", f"not found: {', '.join(state.missing)}", remedy)]
    if state.why or "UP" not in state.controller:
        text = state.why or state.controller or "no output"
        return [failure("slurm controller", text, "`scontrol ping`; is SLURM_CONF right, and munged running?")]
    found = [ok("slurm controller", state.controller.splitlines()[0])]
    if not state.partitions:
        return [*found, failure("partitions", "sinfo names none", "Request access: `sinfo -a` shows hidden ones.")]
    if not wanted.partition:
        names = ", ".join(f"{each.name} ({_format_nodes(each)}, {_format_time(each.seconds)})" for each in state.partitions)
        found.append(ok("partitions", names))
        usable = [each for each in state.partitions if not _shortage(each, wanted)]
        if not usable:
            found.append(failure("partition", _shortage(state.partitions[0], wanted), "Request less: --nodes, --time, --cpus."))
        return found
    chosen = next((each for each in state.partitions if each.name == wanted.partition), None)
    if chosen is None:
        known = ", ".join(each.name for each in state.partitions)
        return [*found, failure(f"partition {wanted.partition}", "it does not exist", f"Use one of: {known}.")]
    return [*found, _check_partition(chosen, wanted)]


def _check_partition(partition: Partition, wanted: SlurmRequest) -> DoctorFinding:
    least, most = (bound(kind.cpus for kind in partition.kinds) for bound in (min, max))
    cores = f"{least} cores or more" if any(kind.more for kind in partition.kinds) else f"{least} to {most} cores"
    cores = f"{least} cores" if cores == f"{most} to {most} cores" else cores
    check, text = f"partition {partition.name}", f"{_format_nodes(partition)}, {cores} each, {_format_time(partition.seconds)}"
    if short := _shortage(partition, wanted):
        return failure(check, f"{text}; {short}", "Request less, or another partition: `sinfo`.")
    if partition.count_fitting(wanted) < wanted.nodes:
        text += f"; whether {format_count(wanted.nodes, 'node')} of them have {format_count(wanted.cpus, 'core')} is unknown"
        return warning(check, text, f"`sinfo -N -p {partition.name} -o '%N %c %G'` lists their resources.")
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


def _format_nodes(partition: Partition) -> str:
    return f"{format_count(partition.nodes, 'node')}, {partition.idle} idle"


def _format_time(limit_s: float) -> str:
    if limit_s == math.inf:
        return "no time limit"
    days, rest = divmod(int(limit_s), 86_400)
    return f"at most {f'{days}-' if days else ''}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
