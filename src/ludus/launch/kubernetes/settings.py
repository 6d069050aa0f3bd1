"""Settings of jobs on Kubernetes, and their checks. Pure values without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.errors import UsageError
from ludus.storage.s3_url import S3Url

Flavor = Literal["plain", "kuberay"]
"""Objects of a Ray cluster: those that every cluster knows, or a RayJob for the KubeRay operator."""

FLAVORS: tuple[Flavor, ...] = ("plain", "kuberay")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
ACCESS_MODES = ("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany")

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]i|[kMGTPE]|m|)")
_FACTORS: Mapping[str, float] = {
    "": 1, "m": 1e-3,
    **{unit: 1000.0 ** (n + 1) for n, unit in enumerate("kMGTPE")},
    **{f"{unit}i": 1024.0 ** (n + 1) for n, unit in enumerate("KMGTPE")},
}  # fmt: skip
_INTERVAL = re.compile(r"[0-9]{1,6}(ms|s|m)")
_SCALE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


# -- values -----------------------------------------------------------------------------------------------------------------


def parse_quantity(text: str) -> float:
    """Return the number of a Kubernetes quantity: "2Gi" → 2147483648, "500m" → 0.5. Raises ValueError."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return float(found[1]) * _FACTORS[found[2]]


@dataclass(frozen=True)
class PodResources:
    """Resources of one pod. `cpus`: cores, also fractions such as 0.5. `memory`, `shm`: Kubernetes quantities. `shm` is part of `memory`."""

    cpus: float = 2
    memory: str = "4Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    shm: str = "1Gi"


@dataclass(frozen=True)
class PodScheduling:
    """Where pods may run. `tolerations`, `affinity`: as in a pod specification."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    priority_class: str = ""


@dataclass(frozen=True)
class PodImage:
    """`image`: "" until it is given. `pull_secrets`: names of Secrets with the credentials of a private registry."""

    image: str = ""
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class PodExtras:
    """What all pods of a job get in addition. `volumes`, `mounts`: as in a pod specification. `service_account`: it needs no API rights."""

    service_account: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Mapping[str, Any], ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class RunStorage:
    """Where runs are kept: an S3 URL, an existing claim, a claim to create, an NFS export, or nowhere (all fields empty).

    A created claim is not deleted with the job. `credentials`: a file on this machine, like ~/.aws/credentials, for the pods.
    """

    url: str = ""
    claim: str = ""
    size: str = ""
    nfs: str = ""
    storage_class: str = ""
    access_mode: str = ""
    credentials: str = ""

    @property
    def is_volume(self) -> bool:
        return bool(self.claim or self.size or self.nfs)

    @property
    def lasts(self) -> bool:
        """Whether runs survive their pod."""
        return bool(self.url) or self.is_volume


@dataclass(frozen=True)
class RedisSettings:
    """`url`: an existing server, without a password; "": the job starts its own. `storage`: size of its volume; "": none."""

    url: str = ""
    image: str = "redis:7.4-alpine"
    memory: str = "1Gi"
    storage: str = "2Gi"


@dataclass(frozen=True)
class PodCount:
    """Number of pods: fixed, or scaled between `least` and `most` by the load."""

    least: int = 1
    most: int = 1

    @property
    def scales(self) -> bool:
        return self.most > self.least


@dataclass(frozen=True)
class ScaleSettings:
    """`workers`: pods of a fleet's workers; None: no fleet. `replicas`: pods of a service. `cpu_percent`: load at which pods are added.

    `sessions`: open sessions for each replica of a service at which replicas are added; 0: by the load of the CPU.
    """

    workers: PodCount | None = None
    worker_resources: PodResources | None = None
    replicas: PodCount = PodCount()
    cpu_percent: int = 70
    sessions: int = 0


@dataclass(frozen=True)
class GamecoreSettings:
    """A gamecore server beside the training. `image`: "": that of the job. `resources`: of the server with all its games.

    `games`: its catalogue, one of the files of the job; "": the Arena.
    """

    enabled: bool = False
    image: str = ""
    resources: PodResources | None = None
    max_games: int = 200
    games: str = ""


@dataclass(frozen=True)
class MonitoringSettings:
    """Objects of the Prometheus operator for a service. `labels`: by which the operator selects them. `interval`: between two scrapes."""

    pod_monitor: bool = False
    prometheus_rule: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    interval: str = "15s"


@dataclass(frozen=True)
class KubernetesSettings:
    """`context`, `namespace`: "": the current ones of the kubeconfig. `ttl_s`: seconds after which a finished job is deleted; None: by its shape.

    `files`: path in the working directory → content, for all pods.
    """

    namespace: str = ""
    context: str = ""
    image: PodImage = PodImage()
    resources: PodResources = PodResources()
    scheduling: PodScheduling = PodScheduling()
    extras: PodExtras = PodExtras()
    storage: RunStorage = RunStorage()
    redis: RedisSettings = RedisSettings()
    scale: ScaleSettings = ScaleSettings()
    gamecore: GamecoreSettings = GamecoreSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    ttl_s: int | None = None
    network_policy: bool = True
    flavor: Flavor = "plain"
    files: Mapping[str, bytes] = field(default_factory=dict)


# -- parsing ----------------------------------------------------------------------------------------------------------------


def parse_count(text: str, name: str) -> PodCount:
    """Parse `3`, or `2-10` for a number that follows the load. Raises UsageError."""
    found = _SCALE.fullmatch(text)
    least = int(found[1]) if found else 0
    most = int(found[2]) if found and found[2] else least
    if not 1 <= least <= most:
        raise UsageError(f"{name} {text!r} is not a number of pods.", "Use a number such as 3, or a range such as 2-10.")
    return PodCount(least, most)


def parse_storage(text: str, storage_class: str = "", access_mode: str = "") -> RunStorage:
    """Parse the place of runs: s3://…, pvc:NAME, new:SIZE, nfs:SERVER:/PATH or none. Raises UsageError."""
    if text in ("", "none"):
        return RunStorage()
    kind, _, rest = text.partition(":")
    if text.startswith("s3://"):
        S3Url.parse(text)
        return RunStorage(url=text.rstrip("/"))
    if kind == "pvc" and _SUBDOMAIN.fullmatch(rest):
        return RunStorage(claim=rest)
    if kind == "new" and _is_quantity(rest):
        return RunStorage(size=rest, storage_class=storage_class, access_mode=access_mode)
    if kind == "nfs" and re.fullmatch(r"[A-Za-z0-9.-]+:/.*", rest):
        return RunStorage(nfs=rest)
    raise UsageError(
        f"storage {text!r} is not a place for runs.",
        "Use s3://BUCKET/PREFIX, pvc:NAME for an existing volume claim, new:50Gi for a new one, nfs:SERVER:/PATH, or none.",
    )


def check_settings(settings: KubernetesSettings) -> KubernetesSettings:
    """Check values that the API server would reject late, or that would be inserted into other values. Raises UsageError."""
    if not settings.image.image:
        raise UsageError("No container image is given.", "Add --image REGISTRY/NAME:TAG, or `image` to cluster.yaml.")
    images = {"image": settings.image.image, "redis_image": settings.redis.image, "gamecore_image": settings.gamecore.image}
    for key, image in images.items():
        if image and not _IMAGE.fullmatch(image):
            raise UsageError(f"{key} {image!r} is not the name of an image.", "Use REGISTRY/NAME:TAG.")
    if settings.image.pull_policy not in ("", *PULL_POLICIES):
        raise UsageError(f"image_pull_policy is {settings.image.pull_policy!r}.", f"Use one of: {', '.join(PULL_POLICIES)}.")
    if settings.namespace and not _LABEL.fullmatch(settings.namespace):
        raise UsageError(f"namespace {settings.namespace!r} is not a valid name.", "Use lower-case letters, digits and dashes.")
    names = (("priority_class", settings.scheduling.priority_class), ("service_account", settings.extras.service_account))
    for key, name in (*names, *(("image_pull_secrets", each) for each in settings.image.pull_secrets)):
        if name and not _SUBDOMAIN.fullmatch(name):
            raise UsageError(f"{key} {name!r} is not the name of an object.", "Use lower-case letters, digits, dots and dashes.")
    if settings.storage.access_mode not in ("", *ACCESS_MODES):
        raise UsageError(f"storage_mode is {settings.storage.access_mode!r}.", f"Use one of: {', '.join(ACCESS_MODES)}.")
    if not _INTERVAL.fullmatch(settings.monitoring.interval):
        raise UsageError(f"monitor_interval {settings.monitoring.interval!r} is not a time.", "Use a time such as 15s.")
    if settings.flavor not in FLAVORS:
        raise UsageError(f"flavor is {settings.flavor!r}.", f"Use one of: {', '.join(FLAVORS)}.")
    if settings.ttl_s is not None and settings.ttl_s < 0:
        raise UsageError(f"ttl_s is {settings.ttl_s}.", "Use a number of seconds >= 0.")
    for name, resources in (
        ("", settings.resources),
        ("worker_", settings.scale.worker_resources),
        ("gamecore_", settings.gamecore.resources),
    ):
        if resources is not None:
            _check_resources(name, resources)
    for key, size in (("redis_memory", settings.redis.memory), ("redis_storage", settings.redis.storage)):
        if size and not _is_quantity(size):
            raise UsageError(f"{key} {size!r} is not a size.", "Use a size such as 2Gi.")
    return settings


def _check_resources(prefix: str, resources: PodResources) -> None:
    if not 0 < resources.cpus <= 10_000 or resources.gpus < 0:
        raise UsageError(f"A pod cannot have {resources.cpus:g} cores and {resources.gpus} GPUs.")
    for key, size in (("memory", resources.memory), ("shm", resources.shm)):
        if not _is_quantity(size) or parse_quantity(size) < 1 << 20:
            raise UsageError(f"{prefix}{key} {size!r} is not a size of memory.", "Use a size such as 4Gi.")
    if parse_quantity(resources.shm) > parse_quantity(resources.memory):
        raise UsageError(
            f"{prefix}shm {resources.shm} is more than {prefix}memory {resources.memory}.",
            "Shared memory is part of the memory of a pod: set a smaller shm.",
        )


def _is_quantity(text: str) -> bool:
    return _QUANTITY.fullmatch(text) is not None
