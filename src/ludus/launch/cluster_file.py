"""Where a job shall run, and on what terms: the file cluster.yaml, or the options of `ludus submit`, or both.

    on: slurm
    nodes: 3
    cpus: 36
    time: "02:00:00"
    account: games
    setup: [module purge, source ~/ludus/bin/activate]

It holds no secrets: those are named, and taken from the environment of whoever submits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, UsageError
from ludus.io.yaml_documents import parse_yaml, read_text
from ludus.launch.hostfile import load_iplist
from ludus.launch.job import ORCHESTRATORS, PLANNED, Orchestrator, open_orchestrator
from ludus.launch.planner import Launch, launch
from ludus.launch.slurm.backend import SlurmGroup, SlurmSettings
from ludus.launch.ssh.backend import SshNode, SshSettings

MAX_BYTES = 100_000
Words = tuple[str, ...]
Positive = Annotated[int, Field(ge=1)]


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Group(Strict):
    """Nodes of one kind in a job of several: what is not said is as for the whole job."""

    nodes: Positive = 1
    cpus: Positive | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    memory: str | None = None
    partition: str | None = None
    constraint: str | None = None
    extra: Words = ()


class Machine(Strict):
    host: str
    user: str = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    slots: Annotated[int, Field(ge=0)] = 1
    address: str = ""
    python: str = ""


class Target(Strict):
    """Paths of `iplist`, `identity`, `known_hosts` and `copy` are of this machine; `workdir` and `python` of those that it runs on.

    What each means to people is the table of docs/jobs.md.
    """

    on: str = Field("local", description="local, ssh, slurm, or module:Class")
    name: str | None = None
    nodes: Positive | None = None
    cpus: Positive | None = Field(None, description="cores of each node that may be used")
    gpus: Annotated[int, Field(ge=0)] = 0
    memory: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    secrets: Words = Field((), description="names of variables of the environment, handed on and never written")
    setup: Words = Field((), description="lines of shell before our processes: modules, conda, a virtual environment")
    python: str | None = None
    workdir: str | None = None
    wait_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    min_nodes: Positive | None = None
    learner_nodes: Positive = Field(1, description="so many of the first nodes compute gradients")
    grace_s: Annotated[float, Field(ge=0, le=3_600)] = 60.0

    time: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    extra: Words = ()
    groups: tuple[Group, ...] = ()
    requeue: bool = True
    signal_s: Annotated[int, Field(ge=10, le=65_535)] = 120

    iplist: Path | None = None
    machines: tuple[Machine, ...] = ()
    identity: Path | None = None
    known_hosts: Path | None = None
    ssh_options: Words = ()
    copy_: tuple[Path, ...] = Field((), alias="copy")

    @property
    def size(self) -> int:
        """How many nodes."""
        if self.groups:
            return sum(group.nodes for group in self.groups)
        return self.nodes or (len(self.ssh_nodes()) if self.on == "ssh" else 1)

    def merged(self, **options: Any) -> Target:
        """With what an option says in place of what the file says; None: it says nothing."""
        said = {key: value for key, value in options.items() if value is not None}
        return _validated({**self.model_dump(by_alias=True, exclude_unset=True), **said}, "the options")

    def notices(self) -> list[str]:
        """What was said and means nothing there."""
        unused = sorted(set(self.model_fields_set) & (_ONLY.keys() - {key for key, on in _ONLY.items() if self.on in on}))
        return [f"{', '.join(name.rstrip('_') for name in unused)}: without meaning on {self.on}"] if unused else []

    def ssh_nodes(self) -> tuple[SshNode, ...]:
        """Raises UsageError where none are named, ConfigError."""
        if self.machines and self.iplist is not None:
            raise UsageError(f"The machines are listed twice: by machines, and by iplist {self.iplist}.", "Keep one.")
        if self.machines:
            found = tuple(SshNode(**machine.model_dump()) for machine in self.machines)
        elif self.iplist is not None:
            found = load_iplist(self.iplist).nodes
        else:
            raise UsageError(
                "No machines are named.", "Add --iplist FILE (`ip user port slots` in each line), or machines in cluster.yaml."
            )
        if self.nodes is not None and self.nodes > len(found):
            raise UsageError(f"The job shall have {self.nodes} nodes, and {len(found)} are listed.")
        return found[: self.nodes]

    def slurm_settings(self) -> SlurmSettings:
        groups = tuple(SlurmGroup(**group.model_dump(exclude_none=True)) for group in self.groups)
        return SlurmSettings(
            account=self.account or "", partition=self.partition or "", qos=self.qos or "", time=self.time or "",
            constraint=self.constraint or "", reservation=self.reservation or "", nodelist=self.nodelist or "",
            exclude=self.exclude or "", exclusive=self.exclusive, cpus=self.cpus, gpus=self.gpus, memory=self.memory or "",
            extra=self.extra, setup=self.setup, python=self.python or "", workdir=self.workdir or "",
            signal_s=self.signal_s, requeue=self.requeue, groups=groups,
        )  # fmt: skip

    def ssh_settings(self) -> SshSettings:
        return SshSettings(
            self.ssh_nodes(), self.identity, self.known_hosts, self.python or "", self.setup, self.workdir or "",
            self.copy_, options=self.ssh_options,
        )  # fmt: skip


_SSH, _SLURM, _BOTH = ("ssh",), ("slurm",), ("ssh", "slurm")
_ONLY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("iplist", "machines", "identity", "known_hosts", "ssh_options", "copy_"), _SSH),
    **dict.fromkeys(
        ("time", "account", "partition", "qos", "constraint", "reservation", "nodelist", "exclude", "exclusive"), _SLURM
    ),
    **dict.fromkeys(("extra", "groups", "requeue", "signal_s", "memory"), _SLURM),
    "setup": _BOTH,
}
"""Keys that mean something on these only."""


def load_target(path: Path) -> Target:
    """Raises ConfigError with the key that is wrong. Paths in it are looked for beside it."""
    text = read_text(path, MAX_BYTES, "It is meant to have a few keys, the first one perhaps `on: slurm`.")
    found = parse_yaml(text, str(path))
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no mapping.", "Its lines are `key: value`, the first one perhaps `on: slurm`.")
    target = _validated(found, str(path))
    named = {name: getattr(target, name) for name in ("iplist", "identity", "known_hosts")}
    found_beside: dict[str, Any] = {name: _beside(path, where) for name, where in named.items() if where is not None}
    if target.copy_:
        found_beside["copy_"] = tuple(_beside(path, where) for where in target.copy_)
    return target.model_copy(update=found_beside)


def launched(target: Target, words: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """The job that a `ludus` command is there. Raises UsageError."""
    nodes = target.size
    cpus: list[int | None] = [target.cpus]
    gpus = [target.gpus]
    if target.groups:
        cpus = [group.cpus or target.cpus for group in target.groups for _ in range(group.nodes)]
        gpus = [target.gpus if group.gpus is None else group.gpus for group in target.groups for _ in range(group.nodes)]
    made = launch(
        words, environ=environ, name=target.name, nodes=nodes, cpus=cpus, gpus=gpus, min_nodes=target.min_nodes, learner_nodes=target.learner_nodes,
        wait_s=target.wait_s, grace_s=target.grace_s, python=target.python, environment=target.environment,
        secrets=target.secrets,
    )  # fmt: skip
    return Launch(made.job, (*made.notices, *target.notices()))


def opened(target: Target) -> Orchestrator:
    """Raises UnknownName; UsageError where it cannot be used."""
    if target.on == "slurm":
        return open_orchestrator("slurm", settings=target.slurm_settings())
    if target.on == "ssh":
        return open_orchestrator("ssh", settings=target.ssh_settings())
    return open_orchestrator(target.on)


def _validated(data: Mapping[str, Any], source: str) -> Target:
    try:
        target = Target.model_validate_json(_json(data, source))
    except pydantic.ValidationError as error:
        raise _complaint(error, source) from error
    known = (*ORCHESTRATORS, *PLANNED)
    if target.on not in known and ":" not in target.on:
        raise ConfigError(f"{source}: on: {target.on} is unknown.", did_you_mean(target.on, known))
    if target.groups and (target.nodes is not None or target.on != "slurm"):
        raise ConfigError(
            f"{source}: groups say how many nodes of which kind a Slurm job has.", "Leave nodes out, and set on: slurm."
        )
    if target.min_nodes is not None and target.nodes is not None and target.min_nodes > target.nodes:
        raise ConfigError(f"{source}: min_nodes {target.min_nodes} is more than nodes {target.nodes}.")
    return target


def _json(data: Mapping[str, Any], source: str) -> str:
    """By JSON, in which a list may be a tuple and a word a path, and 1 is no word."""
    import json

    try:
        return json.dumps(data, default=str)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} holds what is no value: {error}.") from error


def _complaint(error: pydantic.ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        model = Group if where.startswith("groups.") else Machine if where.startswith("machines.") else Target
        names = [field.alias or name for name, field in model.model_fields.items()]
        return ConfigError(f"{source}: unknown key {where!r}.", did_you_mean(str(first["loc"][-1]), names))
    return ConfigError(f"{source}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}.")


def _beside(path: Path, named: Path) -> Path:
    """Never in the working directory: the same file means the same machines wherever it is submitted from."""
    try:
        return path.absolute().parent / named.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {named} is in the home of a user that is not known here.") from error
