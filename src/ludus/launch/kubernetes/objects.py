"""Names, labels and the small objects of a job on Kubernetes: Service, Secret, ConfigMap, claim, NetworkPolicy. Pure functions."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from ludus.errors import UsageError
from ludus.io.addresses import url_host
from ludus.launch.job import Job
from ludus.launch.kubernetes.pod_process import PLACEHOLDER
from ludus.launch.kubernetes.settings import KubernetesSettings, RunStorage

Manifest = dict[str, Any]

NAME, MANAGED_BY, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/managed-by", "app.kubernetes.io/component"
JOB, ROLE, INDEX = "ludus.dev/job", "ludus.dev/role", "ludus.dev/index"
LUDUS = "ludus"

RECORD = "ludus.dev/record"
"""Annotation of the owner with the `JobRecord` as JSON."""
CANCELLED = "ludus.dev/cancelled"
"""Annotation of the owner once it is cancelled: `gracefully` or `now`."""
CANCELLED_AT = "ludus.dev/cancelled-at"
"""Annotation of the owner with the time of the last cancellation, in seconds since 1970."""
INCOMPLETE = "ludus.dev/incomplete"
"""Annotation of the owner until all other objects exist."""

TOKEN, REDIS_CONF, CREDENTIALS, SERVE_TOKEN, GAMECORE_TOKEN = (
    "token",
    "redis.conf",
    "credentials",
    "serve-token",
    "gamecore-token",
)
"""Keys of the Secret that are not names of environment variables."""

HEAD_KEY = "head"
"""Key of the address map for the head of the job's Ray."""

MONITORING_API = "monitoring.coreos.com/v1"
"""API of the Prometheus operator."""

MAX_ID = 40
"""Length of a job id: names of objects add a role and an index, and a Service's name has at most 63 characters."""

_MAX_NAME = 52
"""Length of the name of an object: the pods of a Job and of a Deployment add up to 11 characters, of 63."""

MAX_FILES_BYTES = 900_000
"""Total size of files in a ConfigMap, which the API server limits to 1 MiB."""

KEEP = {"argocd.argoproj.io/sync-options": "Delete=false,Prune=false", "kustomize.toolkit.fluxcd.io/prune": "disabled"}
"""Annotations by which Argo CD and Flux never delete an object."""

_UNSAFE = re.compile(r"[^a-z0-9]+")
_SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_FILE_KEY = re.compile(r"[^A-Za-z0-9._-]")
_MAX_KEY = 200


@dataclass(frozen=True)
class JobObjects:
    """Objects of a job, its owner first. `hosts`: processes in the container of another one: `ray-0` → `main-0`.

    `scaled`: roles whose number of pods may change. `extra_processes`: processes of roles that the launcher adds, such as Redis.
    """

    manifests: tuple[Manifest, ...]
    hosts: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[str, ...] = ()
    extra_processes: Mapping[str, int] = field(default_factory=dict)

    @property
    def owner(self) -> Manifest:
        return self.manifests[0]


def job_id(name: str, suffix: str = "") -> str:
    """Return the id of a job, which is a DNS label: `train-CartPole-v1` → `train-cartpole-v1-x7k2p`."""
    stem = _UNSAFE.sub("-", name.lower()).strip("-")
    if not stem or not stem[0].isalpha():
        stem = f"job-{stem}".rstrip("-")
    room = MAX_ID - (len(suffix) + 1 if suffix else 0)
    stem = stem[:room].rstrip("-")
    return f"{stem}-{suffix}" if suffix else stem


def id_suffix(number: int, length: int = 5) -> str:
    """Return a number as characters that form no words."""
    return "".join(
        _SUFFIX_ALPHABET[(number // len(_SUFFIX_ALPHABET) ** place) % len(_SUFFIX_ALPHABET)] for place in range(length)
    )


def labels(identity: str, role: str, index: int | None = None) -> dict[str, str]:
    # A role's name is a valid label value: both have the same alphabet and at most 63 characters.
    found = {NAME: LUDUS, MANAGED_BY: LUDUS, COMPONENT: role, JOB: identity, ROLE: role}
    return found if index is None else {**found, INDEX: str(index)}


def selector(identity: str, role: str = "") -> str:
    """Return the label selector of all objects of a job, or of one role."""
    return f"{JOB}={identity}" + (f",{ROLE}={role}" if role else "")


def metadata(name: str, identity: str, role: str, index: int | None = None) -> Manifest:
    return {"name": name, "labels": labels(identity, role, index)}


def object_name(identity: str, role: str, index: int | None = None) -> str:
    """Return the name of an object of a role: a DNS label. A long one is cut, and ends with a digest that tells it from others."""
    stem = f"{identity}-{_UNSAFE.sub('-', role.lower()).strip('-')}"
    ending = "" if index is None else f"-{index}"
    if len(stem) + len(ending) > _MAX_NAME:
        ending = f"-{_digest(role, 6)}{ending}"
    return f"{stem[: _MAX_NAME - len(ending)].rstrip('-')}{ending}"


# -- objects ----------------------------------------------------------------------------------------------------------------


def service(identity: str, role: str, ports: Mapping[str, int], *, headless: bool = False, ready_only: bool = False) -> Manifest:
    """Return a Service for the pods of a role. `ready_only`: without pods that are not ready."""
    spec: Manifest = {
        "selector": {JOB: identity, ROLE: role},
        "ports": [{"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports.items()],
    }
    if headless:
        spec["clusterIP"] = "None"
    if not ready_only:
        spec["publishNotReadyAddresses"] = True
    name = object_name(identity, f"{role}-pods" if headless else role)
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(name, identity, role), "spec": spec}


def address_map(identity: str, role: str, addresses: Mapping[str, str]) -> Manifest:
    """Return the ConfigMap with host names by key. `submit` replaces the names of Services by their cluster IPs, so that no DNS is needed."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(object_name(identity, "addresses"), identity, role),
        "data": dict(addresses),
    }


def mapped_host(key: str, host: str) -> str:
    """Return a host as the address map has it: the head of Ray as an address, the others as a part of URLs."""
    return host if key == HEAD_KEY else url_host(host)


def file_map(identity: str, role: str, files: Mapping[str, bytes]) -> Manifest:
    """Return the ConfigMap with the files of the working directory. Raises UsageError if they are too large."""
    if (size := sum(map(len, files.values()))) > MAX_FILES_BYTES:
        raise UsageError(
            f"The files to copy have {size:,} bytes, and a ConfigMap has room for {MAX_FILES_BYTES:,}.",
            "Put them into the image, or on the volume of the runs.",
        )
    data, binary = dict[str, str](), dict[str, str]()
    for path, content in files.items():
        try:
            data[file_key(path)] = content.decode()
        except UnicodeDecodeError:
            binary[file_key(path)] = base64.b64encode(content).decode()
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(object_name(identity, "files"), identity, role),
    }
    return manifest | ({"data": data} if data else {}) | ({"binaryData": binary} if binary else {})


def file_key(path: str) -> str:
    """Return the key of a file in a ConfigMap, where slashes are not allowed. Keys of other paths than plain names have a digest."""
    key = _FILE_KEY.sub("_", path.replace("/", "__"))
    return path if key == path and "__" not in path and len(path) <= _MAX_KEY else f"{key[:_MAX_KEY]}-{_digest(path, 8)}"


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def secret(identity: str, role: str, keys: Iterable[str]) -> Manifest:
    """Return the Secret with placeholders; `submit` replaces them by the values."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(identity, identity, role),
        "type": "Opaque",
        "stringData": dict.fromkeys(keys, PLACEHOLDER),
    }


def fill_secret(manifest: Manifest, values: Mapping[str, str]) -> Manifest:
    """Return the Secret with its values. All keys must have one."""
    data = {key: base64.b64encode(values[key].encode()).decode() for key in manifest["stringData"]}
    return {key: value for key, value in manifest.items() if key != "stringData"} | {"data": data}


def volume_claim(name: str, identity: str, role: str, size: str, *, mode: str = "", storage_class: str = "") -> Manifest:
    spec: Manifest = {"accessModes": [mode or "ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata(name, identity, role), "spec": spec}


def run_claim(job: Job, identity: str, storage: RunStorage, *, shared: bool) -> list[Manifest]:
    """Return the claim for runs that is to be created, if any. It belongs to the job's name, not to its id: the next job finds the runs."""
    if not storage.size:
        return []
    mode = storage.access_mode or ("ReadWriteMany" if shared else "ReadWriteOnce")
    name = run_claim_name(job.name)
    manifest = volume_claim(name, identity, job.main, storage.size, mode=mode, storage_class=storage.storage_class)
    del manifest["metadata"]["labels"][JOB]  # not part of the job: it is kept
    manifest["metadata"]["annotations"] = dict(KEEP)
    return [manifest]


def is_kept(manifest: Manifest) -> bool:
    """Whether an object belongs to no job, and stays when the job is deleted."""
    return JOB not in manifest["metadata"]["labels"]


def run_claim_name(name: str) -> str:
    return object_name(job_id(name), "runs")


def network_policy(
    identity: str, role: str, settings: KubernetesSettings, open_ports: Sequence[tuple[str, int]] = ()
) -> list[Manifest]:
    """Return the policies by which only pods of the job reach its pods. `open_ports`: (role, port) that everybody may reach."""
    if not settings.network_policy:
        return []
    spec: Manifest = {
        "podSelector": {"matchLabels": {JOB: identity}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {JOB: identity}}}]}],
    }
    found = [_policy(identity, role, identity, spec)]
    for name, port in open_ports:
        found += ingress_policy(identity, name, "open", {"ports": [{"protocol": "TCP", "port": port}]})
    return found


def ingress_policy(identity: str, role: str, suffix: str, ingress: Manifest) -> list[Manifest]:
    """Return the policy ID-ROLE-SUFFIX, by which others reach the pods of a role."""
    selector = {"matchLabels": {JOB: identity, ROLE: role}}
    spec: Manifest = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [ingress]}
    return [_policy(object_name(identity, f"{role}-{suffix}"), role, identity, spec)]


def _policy(name: str, role: str, identity: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(name, identity, role),
        "spec": spec,
    }


def cpu_autoscaler(identity: str, role: str, target: str, least: int, most: int, percent: int) -> Manifest:
    """Return an autoscaler by CPU load. Version 1 of the API is enough for that, and every server has it."""
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(object_name(identity, role), identity, role),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicas": least,
            "maxReplicas": most,
            "targetCPUUtilizationPercentage": percent,
        },
    }


def pod_monitor(
    identity: str, role: str, settings: KubernetesSettings, *, port: str, token: str, tls: bool = False
) -> list[Manifest]:
    """Return the object by which the Prometheus operator scrapes every pod of a role, if the settings ask for it.

    `port`: its name. `token`: key of the Secret. Prometheus' label `job` is "ludus", as the alert rules expect.
    """
    monitoring = settings.monitoring
    if not monitoring.pod_monitor:
        return []
    endpoint: Manifest = {
        "port": port,
        "path": "/metrics",
        "interval": monitoring.interval,
        "authorization": {"type": "Bearer", "credentials": {"name": identity, "key": token}},
    }
    if tls:  # Prometheus connects to the address of a pod, which no certificate names
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    spec = {
        "jobLabel": NAME,
        "selector": {"matchLabels": {JOB: identity, ROLE: role}},
        "podMetricsEndpoints": [endpoint],
    }
    return [_monitoring_object("PodMonitor", identity, role, settings, spec)]


def prometheus_rule(identity: str, role: str, settings: KubernetesSettings) -> list[Manifest]:
    """Return the alert rules of a service for the Prometheus operator, if the settings ask for them."""
    if not settings.monitoring.prometheus_rule:
        return []
    return [_monitoring_object("PrometheusRule", identity, role, settings, yaml.safe_load(_alert_rules()))]


def _monitoring_object(kind: str, identity: str, role: str, settings: KubernetesSettings, spec: Manifest) -> Manifest:
    found = metadata(identity, identity, role)
    found["labels"] |= settings.monitoring.labels
    return {"apiVersion": MONITORING_API, "kind": kind, "metadata": found, "spec": spec}


@functools.cache
def _alert_rules() -> str:
    """Return the text of deploy/prometheus-alerts.yml, of which the package has a copy."""
    return resources.files(__package__).joinpath("prometheus-alerts.yml").read_text(encoding="utf-8")


def job_wide_objects(
    job: Job,
    settings: KubernetesSettings,
    identity: str,
    *,
    shared: bool,
    secret_keys: Sequence[str] = (),
    open_ports: Sequence[tuple[str, int]] = (),
) -> list[Manifest]:
    """Return the claim for runs, files, network policies, and the Secret, which comes last: pods wait for it.

    `shared`: whether several pods use the claim. `secret_keys`: further keys of the Secret.
    """
    found = run_claim(job, identity, settings.storage, shared=shared)
    if settings.files:
        found.append(file_map(identity, job.main, settings.files))
    found += network_policy(identity, job.main, settings, open_ports)
    credentials = [CREDENTIALS] if settings.storage.credentials else []
    return [*found, secret(identity, job.main, dict.fromkeys((TOKEN, *job.secrets, *credentials, *secret_keys)))]
