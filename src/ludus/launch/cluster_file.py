"""The file cluster.yaml: on which backend and with which resources a job runs. `ludus submit` has an option for each key.

    on: slurm
    nodes: 3
    cpus: 36
    time: "02:00:00"
    account: games
    setup: [module purge, source ~/ludus/bin/activate]

The file holds names of secrets only. Their values come from the environment of the process that submits the job.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, UsageError
from ludus.io.yaml_documents import parse_yaml, read_text
from ludus.launch.hostfile import load_hostfile
from ludus.launch.job import ORCHESTRATORS, Orchestrator, open_orchestrator
from ludus.launch.kubernetes.objects import MAX_FILES_BYTES
from ludus.launch.kubernetes.plan import PYTHON, CommandLine, plan_kubernetes
from ludus.launch.kubernetes.settings import (
    GamecoreSettings,
    KubernetesSettings,
    MonitoringSettings,
    PodExtras,
    PodImage,
    PodResources,
    PodScheduling,
    RedisSettings,
    ScaleSettings,
    parse_count,
    parse_storage,
)
from ludus.launch.planner import NodeRequest, PlannedJob, RuntimeEnv, plan_job
from ludus.launch.slurm.backend import SlurmGroup, SlurmSettings
from ludus.launch.ssh.backend import SshNode, SshSettings

MAX_BYTES = 100_000
Words = tuple[str, ...]
Positive = Annotated[int, Field(ge=1)]


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class NodeGroup(StrictModel):
    """Nodes of one kind in a heterogeneous Slurm job. Missing values are those of the whole job."""

    nodes: Positive = 1
    cpus: Positive | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    memory: str | None = None
    partition: str | None = None
    constraint: str | None = None
    extra: Words = ()


class SshMachine(StrictModel):
    host: str
    user: str = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    slots: Annotated[int, Field(ge=0)] = 1
    address: str = ""
    python: str = ""


class JobKeys(StrictModel):
    """Keys for all backends. `workdir` and `python` are paths on the machines that run the job."""

    on: str = Field("local", description="local, ssh, slurm, kubernetes, or module:Class")
    name: str | None = None
    nodes: Positive | None = None
    cpus: Positive | None = Field(None, description="usable cores of each node")
    gpus: Annotated[int, Field(ge=0)] = 0
    environment: dict[str, str] = Field(default_factory=dict)
    secrets: Words = Field((), description="names of environment variables to pass on without writing their values")
    setup: Words = Field((), description="shell lines to run first: modules, conda, a virtual environment")
    python: str | None = None
    workdir: str | None = None
    wait_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    min_nodes: Positive | None = None
    learner_nodes: Positive = Field(1, description="number of nodes, from the first, that compute gradients")
    grace_s: Annotated[float, Field(ge=0, le=3_600)] = 60.0


class SlurmKeys(StrictModel):
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    memory: str | None = None
    extra: Words = ()
    groups: tuple[NodeGroup, ...] = ()
    requeue: bool = True
    signal_s: Annotated[int, Field(ge=10, le=65_535)] = 120


class SshKeys(StrictModel):
    """All paths are on the submitting machine."""

    iplist: Path | None = None
    machines: tuple[SshMachine, ...] = ()
    identity: Path | None = None
    known_hosts: Path | None = None
    ssh_options: Words = ()
    copy_: tuple[Path, ...] = Field((), alias="copy")


class KubernetesKeys(StrictModel):
    """docs/kubernetes.md describes them. `tolerations`, `affinity`, `volumes` and `volume_mounts` are as in a pod specification."""

    namespace: str | None = None
    context: str | None = None
    image: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: Words = ()
    gpu_resource: str = PodResources.gpu_resource
    shm: str | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = Field(default_factory=dict)
    priority_class: str | None = None
    service_account: str | None = None
    pod_annotations: dict[str, str] = Field(default_factory=dict)
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()
    storage: str | None = Field(None, description="s3://…, pvc:NAME, new:SIZE, nfs:SERVER:/PATH or none")
    storage_class: str | None = None
    storage_mode: str | None = None
    storage_credentials: Path | None = None
    redis: str | None = Field(None, description="URL of an existing server, without a password")
    redis_image: str = RedisSettings.image
    redis_memory: str = RedisSettings.memory
    redis_storage: str = RedisSettings.storage
    workers: int | str | None = Field(None, description="pods of a fleet's workers: 3, or 2-10")
    worker_cpus: Annotated[float, Field(gt=0)] | None = None
    worker_memory: str | None = None
    replicas: int | str | None = Field(None, description="pods of a service: 2, or 2-10")
    cpu_percent: Annotated[int, Field(ge=1, le=1000)] = ScaleSettings.cpu_percent
    sessions: Annotated[int, Field(ge=0)] = 0
    gamecore: bool = False
    gamecore_image: str | None = None
    gamecore_games: Path | None = Field(None, description="catalogue of the server, copied to the pods; default: the Arena")
    gamecore_cpus: Annotated[float, Field(gt=0)] | None = None
    gamecore_memory: str | None = None
    max_games: Annotated[int, Field(ge=1)] = GamecoreSettings.max_games
    pod_monitor: bool = False
    prometheus_rule: bool = False
    monitor_labels: dict[str, str] = Field(default_factory=dict)
    monitor_interval: str = MonitoringSettings.interval
    ttl_s: Annotated[int, Field(ge=0)] | None = None
    network_policy: bool = True
    flavor: Literal["plain", "kuberay"] = "plain"


class ClusterConfig(KubernetesKeys, SshKeys, SlurmKeys, JobKeys):
    """Where and how a job runs. docs/jobs.md describes each key."""

    @property
    def size(self) -> int:
        """Number of nodes."""
        if self.groups:
            return sum(group.nodes for group in self.groups)
        return self.nodes or (len(self.ssh_nodes()) if self.on == "ssh" else 1)

    def merge(self, **options: Any) -> ClusterConfig:
        """Return a copy in which the options that are not None replace the values of the file."""
        given = {key: value for key, value in options.items() if value is not None}
        return _validate({**self.model_dump(by_alias=True, exclude_unset=True), **given}, "the options")

    def notices(self) -> list[str]:
        """Return a notice about the given keys that the backend does not use, if there are any."""
        unused = sorted(key for key in self.model_fields_set if self.on not in _BACKENDS.get(key, (self.on,)))
        return [f"{', '.join(name.rstrip('_') for name in unused)}: without meaning on {self.on}"] if unused else []

    def ssh_nodes(self) -> tuple[SshNode, ...]:
        """Raises UsageError if no machines are given; ConfigError if the list is invalid."""
        if self.machines and self.iplist is not None:
            raise UsageError(f"Both machines and iplist {self.iplist} list the machines.", "Keep one.")
        if self.machines:
            found = tuple(SshNode(**machine.model_dump()) for machine in self.machines)
        elif self.iplist is not None:
            found = load_hostfile(self.iplist).nodes
        else:
            raise UsageError(
                "No machines are given.", "Add --iplist FILE (`ip user port slots` in each line), or machines in cluster.yaml."
            )
        if self.nodes is not None and self.nodes > len(found):
            raise UsageError(f"The job needs {self.nodes} nodes, and {len(found)} are listed.")
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

    def kubernetes_settings(self, words: Sequence[str] = ()) -> KubernetesSettings:
        """Return the settings, with the files to copy and those that the command `words` names. Raises UsageError."""
        storage = parse_storage(self.storage or "", self.storage_class or "", self.storage_mode or "")
        own = self._pod_resources(self.cpus, self.memory)
        return KubernetesSettings(
            namespace=self.namespace or "",
            context=self.context or "",
            image=PodImage(self.image or "", self.image_pull_policy or "", self.image_pull_secrets),
            resources=own,
            scheduling=PodScheduling(self.node_selector, self.tolerations, self.affinity, self.priority_class or ""),
            extras=PodExtras(self.service_account or "", self.pod_annotations, self.volumes, self.volume_mounts),
            storage=replace(storage, credentials=str(self.storage_credentials or "")),
            redis=RedisSettings(self.redis or "", self.redis_image, self.redis_memory, self.redis_storage),
            scale=ScaleSettings(
                workers=None if self.workers is None else parse_count(str(self.workers), "workers"),
                worker_resources=self._pod_resources(self.worker_cpus or self.cpus, self.worker_memory or self.memory, gpus=0),
                replicas=parse_count(str(self.replicas or 1), "replicas"),
                cpu_percent=self.cpu_percent,
                sessions=self.sessions,
            ),
            gamecore=GamecoreSettings(
                self.gamecore,
                self.gamecore_image or "",
                self._pod_resources(self.gamecore_cpus or self.cpus, self.gamecore_memory or self.memory, gpus=0),
                self.max_games,
                self.gamecore_games.name if self.gamecore_games else "",
            ),
            monitoring=MonitoringSettings(self.pod_monitor, self.prometheus_rule, self.monitor_labels, self.monitor_interval),
            ttl_s=self.ttl_s,
            network_policy=self.network_policy,
            flavor=self.flavor,
            files=read_job_files((*self.copy_, *((self.gamecore_games,) if self.gamecore_games else ())), words),
        )

    def _pod_resources(self, cpus: float | None, memory: str | None, gpus: int | None = None) -> PodResources:
        found = PodResources(
            cpus or PodResources.cpus, memory or PodResources.memory, self.gpus if gpus is None else gpus, self.gpu_resource
        )
        return replace(found, shm=self.shm) if self.shm else found


_BACKENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(SshKeys.model_fields, ("ssh",)),
    **dict.fromkeys(SlurmKeys.model_fields, ("slurm",)),
    **dict.fromkeys(KubernetesKeys.model_fields, ("kubernetes",)),
    "setup": ("ssh", "slurm"),
    "memory": ("slurm", "kubernetes"),
    "copy_": ("ssh", "kubernetes"),
    "workdir": ("local", "ssh", "slurm"),
}
"""Keys that only some backends use, and these backends."""


def load_cluster_file(path: Path) -> ClusterConfig:
    """Read cluster.yaml; paths in it are relative to its directory. Raises ConfigError that names the invalid key."""
    text = read_text(path, MAX_BYTES, "Write a few keys into it, such as `on: slurm`.")
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a mapping.", "Write lines of the form `key: value`, such as `on: slurm`.")
    config = _validate(data, str(path))
    paths = {
        name: getattr(config, name) for name in ("iplist", "identity", "known_hosts", "storage_credentials", "gamecore_games")
    }
    resolved: dict[str, Any] = {name: _resolve_path(path, value) for name, value in paths.items() if value is not None}
    if config.copy_:
        resolved["copy_"] = tuple(_resolve_path(path, value) for value in config.copy_)
    return config.model_copy(update=resolved)


def plan_command(config: ClusterConfig, words: Sequence[str], environ: Mapping[str, str]) -> PlannedJob:
    """Plan the job that runs a `ludus` command as the config says. Raises UsageError."""
    cpus: list[int | None] = [config.cpus]
    gpus = [config.gpus]
    if config.groups:
        cpus = [group.cpus or config.cpus for group in config.groups for _ in range(group.nodes)]
        gpus = [config.gpus if group.gpus is None else group.gpus for group in config.groups for _ in range(group.nodes)]
    nodes = NodeRequest(config.size, cpus, gpus, config.learner_nodes, config.min_nodes, config.wait_s)
    if config.on == "kubernetes":
        planned = plan_kubernetes(
            words,
            config.kubernetes_settings(),
            environ=environ,
            name=config.name,
            nodes=nodes,
            runtime=RuntimeEnv(config.python or PYTHON, config.environment, config.secrets),
            grace_s=config.grace_s,
            storage_given=config.storage is not None,
        )
    else:
        planned = plan_job(
            words,
            environ=environ,
            name=config.name,
            nodes=nodes,
            runtime=RuntimeEnv(config.python or sys.executable, config.environment, config.secrets),
            grace_s=config.grace_s,
        )
    return PlannedJob(planned.job, (*planned.notices, *config.notices()))


def open_backend(config: ClusterConfig, words: Sequence[str] = ()) -> Orchestrator:
    """Create the orchestrator that the config names. `words`: the command, whose files it may have to send.

    Raises UnknownName; UsageError if it cannot be used.
    """
    if config.on == "kubernetes":
        return open_orchestrator("kubernetes", settings=config.kubernetes_settings(words))
    if config.on == "slurm":
        return open_orchestrator("slurm", settings=config.slurm_settings())
    if config.on == "ssh":
        return open_orchestrator("ssh", settings=config.ssh_settings())
    return open_orchestrator(config.on)


def read_job_files(paths: Sequence[Path], words: Sequence[str]) -> dict[str, bytes]:
    """Read the files to send to a job: those at `paths`, by name, and the experiment file that the command names. Raises UsageError."""
    found: dict[str, bytes] = {}
    for path in paths:
        inside = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in inside:
            found[str(file.relative_to(path.parent))] = _read_job_file(file)
    named = CommandLine(tuple(words)).value("-f", "--file", "--config-file")
    if named is not None and named not in found and Path(named).is_file():
        if Path(named).is_absolute() or ".." in Path(named).parts:
            raise UsageError(
                f"{named} is outside of this directory, and the job's pods have a directory of their own.",
                "Change to its directory, and name it by a relative path.",
            )
        found[named] = _read_job_file(Path(named))
    return found


def _read_job_file(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILES_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _validate(data: Mapping[str, Any], source: str) -> ClusterConfig:
    try:
        # In JSON mode, strict pydantic accepts a list for a tuple and a string for a path, but not 1 for a string.
        config = ClusterConfig.model_validate_json(json.dumps(data, default=str))
    except pydantic.ValidationError as error:
        raise _config_error(error, source) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} holds an invalid value: {error}.") from error
    if config.on not in ORCHESTRATORS and ":" not in config.on:
        raise ConfigError(f"{source}: on: {config.on} is unknown.", did_you_mean(config.on, ORCHESTRATORS))
    if config.groups and (config.nodes is not None or config.on != "slurm"):
        raise ConfigError(f"{source}: groups needs on: slurm, and no nodes.", "Leave nodes out, and set on: slurm.")
    if config.min_nodes is not None and config.nodes is not None and config.min_nodes > config.nodes:
        raise ConfigError(f"{source}: min_nodes {config.min_nodes} is more than nodes {config.nodes}.")
    return config


def _config_error(error: pydantic.ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        model = NodeGroup if where.startswith("groups.") else SshMachine if where.startswith("machines.") else ClusterConfig
        names = [field.alias or name for name, field in model.model_fields.items()]
        return ConfigError(f"{source}: unknown key {where!r}.", did_you_mean(str(first["loc"][-1]), names))
    return ConfigError(f"{source}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}.")


def _resolve_path(file: Path, path: Path) -> Path:
    """Resolve a path against the directory of the file, so that the working directory does not matter."""
    try:
        return file.absolute().parent / path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{file}: {path} is in the home directory of an unknown user.") from error
