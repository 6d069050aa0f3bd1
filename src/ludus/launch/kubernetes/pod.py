"""Pods of a job on Kubernetes: container, volumes, security settings, resources. Pure functions.

Every container of Ludus runs `pod_process`, which starts the role's command. A pod is not root, its root file system is read-only, it
has no capabilities, no service account token, and a size limit for shared memory. Secrets are files.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.launch.job import Job, Role, RoleRestart
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.objects import Manifest
from ludus.launch.kubernetes.pod_process import ENV_SECRETS
from ludus.launch.kubernetes.settings import KubernetesSettings, PodResources, RunStorage
from ludus.process import job_env
from ludus.storage.s3_url import S3Url

USER = 10001
GAMECORE_PORT, GAMECORE_HOST_KEY = 23432, "gamecore"
WORK, RUNS, FILES, SECRETS = "/workspace", "/runs", "/etc/ludus/files", "/etc/ludus/secrets"
MODULE = "ludus.launch.kubernetes.pod_process"
POD_IP, MEMORY_HOST, GAMECORE_HOST, HEAD_HOST = "LUDUS_POD_IP", "LUDUS_MEMORY_HOST", "LUDUS_GAMECORE_HOST", "LUDUS_HEAD_HOST"
REFERENCES = (POD_IP, MEMORY_HOST, GAMECORE_HOST, HEAD_HOST)
"""Variables that commands and other variables may contain as $(NAME): addresses that are known only when the pod starts."""
TERMINATION_MARGIN_S = 15
"""Seconds beyond the job's grace period after which the kubelet kills a pod: for the other roles of the pod, and the last log lines."""

MAX_RESTARTS = 6
"""Failures of the main role after which its Job is not continued. Evictions do not count where the server has pod failure policies."""

KILLED_CODES = (130, 134, 135, 136, 137, 139, 143)
"""Exit codes of a process that was interrupted (130, after a checkpoint) or killed: abort, bus error, FPE, kill, segmentation fault, term."""

_DOLLARS = re.compile(r"(\$+)(\([A-Za-z0-9_]*)?")


@dataclass(frozen=True)
class RolePod:
    """A pod for one process of a role. `beside`: processes (role, index) that run in the same container.

    `addresses`: variable → key of the address map. `restart`: how `pod_process` turns the exit code into one that the kubelet restarts.
    `secret_files`: further keys of the Secret → paths below SECRETS. `image`: "": that of the job. `raw_command`: not by `pod_process`.
    `pre_stop_s`: seconds before SIGTERM, in which the pod still works while proxies learn that it ends.
    """

    role: Role
    index: int = 0
    beside: tuple[tuple[Role, int], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    restart: RoleRestart = "never"
    resources: PodResources | None = None
    secret_files: Mapping[str, str] = field(default_factory=dict)
    needs_runs: bool = True
    image: str = ""
    raw_command: bool = False
    ports: Mapping[str, int] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    pre_stop_s: int = 0


# -- pods -------------------------------------------------------------------------------------------------------------------


def pod_template(pod: RolePod, job: Job, settings: KubernetesSettings, identity: str, restart_policy: str) -> Manifest:
    """Return the pod template of a process of a role."""
    volumes, mounts = _volumes(pod, job, settings, identity)
    resources = pod.resources or settings.resources
    environment = {**_common_environment(settings), **pod.role.environment, **pod.environment}
    addresses = {**({GAMECORE_HOST: GAMECORE_HOST_KEY} if settings.gamecore.enabled else {}), **pod.addresses}
    container: Manifest = {
        "name": container_name(pod.role.name),
        "image": pod.image or settings.image.image,
        "command": list(pod.role.command) if pod.raw_command else pod_command(pod, job, identity),
        "workingDir": WORK,
        "env": _variables({} if pod.raw_command else environment, {} if pod.raw_command else addresses, identity),
        "resources": resource_limits(resources),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    if settings.image.pull_policy and not pod.raw_command:
        container["imagePullPolicy"] = settings.image.pull_policy
    if pod.ports:
        container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in pod.ports.items()]
    if pod.pre_stop_s:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(pod.pre_stop_s)]}}}
    container |= pod.probes
    spec = pod_spec(settings, [container], volumes, restart_policy, pod.pre_stop_s + grace_period_s(job.grace_s))
    return {"metadata": _pod_metadata(settings, identity, pod.role.name, pod.index), "spec": spec}


def pod_spec(
    settings: KubernetesSettings, containers: list[Manifest], volumes: list[Manifest], restart_policy: str, grace_s: int
) -> Manifest:
    """Return the specification that all pods of all shapes share."""
    spec: Manifest = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    scheduling = settings.scheduling
    optional: Manifest = {
        "serviceAccountName": settings.extras.service_account,
        "imagePullSecrets": [{"name": name} for name in settings.image.pull_secrets],
        "priorityClassName": scheduling.priority_class,
        "nodeSelector": dict(scheduling.node_selector),
        "tolerations": [dict(each) for each in scheduling.tolerations],
        "affinity": dict(scheduling.affinity),
    }
    return spec | {key: value for key, value in optional.items() if value} | {"containers": containers, "volumes": volumes}


def pod_command(pod: RolePod, job: Job, identity: str) -> list[str]:
    """Return the command of the container: `pod_process` with the command of the role."""
    words = [python_of(pod.role), "-P", "-m", MODULE, "--job", identity, "--role", pod.role.name, "--index", str(pod.index)]
    words += ["--grace-s", f"{job.grace_s:g}"]
    if pod.restart != "never":
        words += ["--restart", pod.restart]
    for role, index in pod.beside:
        words += ["--beside", f"{role.name}-{index}={shlex.join(role.command)}"]
    return [escape(word) for word in (*words, "--", *pod.role.command)]


def python_of(role: Role) -> str:
    """Return the interpreter in the image: that of the role's command if it has one."""
    return role.command[0] if role.command[1:3] == ("-P", "-m") else "python"


def resource_limits(resources: PodResources) -> Manifest:
    """Return requests and limits. They are equal: pods of the class `Guaranteed` are evicted last, and programs see their real number of cores."""
    amounts: Manifest = {"cpu": _format_cpus(resources.cpus), "memory": resources.memory}
    if resources.gpus:
        amounts[resources.gpu_resource] = str(resources.gpus)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def container_name(role: str) -> str:
    """Return a DNS label, which role names need not be."""
    return objects.job_id(role)


def grace_period_s(grace_s: float) -> int:
    return math.ceil(grace_s) + TERMINATION_MARGIN_S


def escape(text: str) -> str:
    """Keep Kubernetes from changing a command or a variable, where $(NAME) is a variable and $$ a dollar, except for the references."""

    def double(found: re.Match[str]) -> str:
        dollars, name = found[1], found[2]
        if len(dollars) == 1 and (name is None or name[1:] in REFERENCES):
            return found[0]
        return dollars * 2 + (name or "")

    return _DOLLARS.sub(double, text)


def _format_cpus(cpus: float) -> str:
    return f"{cpus:g}" if float(cpus).is_integer() else f"{math.ceil(cpus * 1000)}m"


def _pod_metadata(settings: KubernetesSettings, identity: str, role: str, index: int) -> Manifest:
    found: Manifest = {"labels": objects.labels(identity, role, index)}
    if settings.extras.annotations:
        found["annotations"] = dict(settings.extras.annotations)
    return found


# -- environment --------------------------------------------------------------------------------------------------------------


def _common_environment(settings: KubernetesSettings) -> dict[str, str]:
    """Return the variables of all pods of Ludus. HOME is an emptyDir: the root file system is read-only."""
    found = {"HOME": "/tmp"}  # noqa: S108
    if settings.storage.credentials:
        found["LUDUS_S3_CREDENTIALS_FILE"] = f"{SECRETS}/{objects.CREDENTIALS}"
    if settings.gamecore.enabled:
        found |= {
            "GAMECORE_SERVER_ADDR": f"$({GAMECORE_HOST}):{GAMECORE_PORT}",
            "LUDUS_GAMECORE_TOKEN_FILE": f"{SECRETS}/{objects.GAMECORE_TOKEN}",
            "LUDUS_ADVERTISE": f"$({POD_IP})",
        }
    return found


def _variables(environment: Mapping[str, str], addresses: Mapping[str, str], identity: str) -> list[Manifest]:
    """Return the variables of a container. The address of the pod comes first: values may refer to earlier variables only."""
    found: list[Manifest] = [{"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    source = objects.object_name(identity, "addresses")
    for name, key in addresses.items():
        found.append({"name": name, "valueFrom": {"configMapKeyRef": {"name": source, "key": key}}})
    return found + [{"name": name, "value": escape(value)} for name, value in environment.items()]


def run_location(storage: RunStorage) -> str:
    """Return the directory or URL for runs as the pods see it. Without storage it is in the pod and lost with it."""
    return storage.url or RUNS


def resume_location(storage: RunStorage, identity: str) -> str:
    """Return the file or URL in which the main role records its runs, so that the pod that replaces it resumes them; "": none lasts."""
    name = f".jobs/{identity}.json"
    if storage.url:
        return S3Url.parse(storage.url).below(name).url
    return f"{RUNS}/{name}" if storage.is_volume else ""


def main_environment(job: Job, settings: KubernetesSettings, identity: str) -> dict[str, str]:
    """Return the variables of the main role only."""
    location = resume_location(settings.storage, identity)
    return {job_env.RUN: location} if location else {}


# -- volumes ----------------------------------------------------------------------------------------------------------------


def _volumes(pod: RolePod, job: Job, settings: KubernetesSettings, identity: str) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes of a pod, and where its container mounts them."""
    resources = pod.resources or settings.resources
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "workspace", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": resources.shm}},
        {"name": "secrets", "secret": {"secretName": identity, "defaultMode": 0o440, "items": _secret_items(job, pod, settings)}},
    ]
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 # an emptyDir of the pod
        {"name": "workspace", "mountPath": WORK},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
    ]
    if settings.files:
        items = [{"key": objects.file_key(path), "path": path} for path in settings.files]
        volumes.append({"name": "files", "configMap": {"name": objects.object_name(identity, "files"), "items": items}})
        mounts.append({"name": "files", "mountPath": FILES, "readOnly": True})
    if pod.needs_runs and not settings.storage.url:
        volumes.append({"name": "runs", **_run_volume(settings.storage, job)})
        mounts.append({"name": "runs", "mountPath": RUNS})
    volumes += [dict(volume) for volume in settings.extras.volumes]
    mounts += [dict(mount) for mount in settings.extras.mounts]
    return volumes, mounts


def _secret_items(job: Job, pod: RolePod, settings: KubernetesSettings) -> list[Manifest]:
    files = dict(pod.secret_files)
    if not pod.raw_command:
        files = {objects.TOKEN: objects.TOKEN, **{name: f"{ENV_SECRETS}/{name}" for name in job.secrets}, **files}
        files |= {objects.CREDENTIALS: objects.CREDENTIALS} if settings.storage.credentials else {}
        files |= {objects.GAMECORE_TOKEN: objects.GAMECORE_TOKEN} if settings.gamecore.enabled else {}
    return [{"key": key, "path": path} for key, path in files.items()]


def _run_volume(storage: RunStorage, job: Job) -> Manifest:
    if storage.nfs:
        server, _, path = storage.nfs.partition(":")
        return {"nfs": {"server": server, "path": path}}
    if claim := storage.claim or (objects.run_claim_name(job.name) if storage.size else ""):
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"emptyDir": {}}


# -- the objects that run pods ----------------------------------------------------------------------------------------------


def main_job(pod: RolePod, job: Job, settings: KubernetesSettings, identity: str, *, ttl_s: int) -> Manifest:
    """Return the Job of the main role, which owns all other objects of the job. A pod that was lost or killed is replaced."""
    restart = pod.role.restart
    pod = replace(pod, restart="never", environment={**main_environment(job, settings, identity), **pod.environment})
    spec: Manifest = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0 if restart == "never" else MAX_RESTARTS,
        "ttlSecondsAfterFinished": settings.ttl_s if settings.ttl_s is not None else ttl_s,
    }
    if restart == "when-killed":
        spec["podFailurePolicy"] = _failure_policy(container_name(pod.role.name))
    spec["template"] = pod_template(pod, job, settings, identity, "Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": objects.metadata(identity, identity, pod.role.name, 0),
        "spec": spec,
    }


def _failure_policy(container: str) -> Manifest:
    """Return the policy of servers from 1.26 on. Older ones ignore it; then the next client that sees the failure ends the Job."""
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": container, "operator": "NotIn", "values": list(KILLED_CODES)},
            },
        ]
    }


def process_job(pod: RolePod, job: Job, settings: KubernetesSettings, identity: str) -> Manifest:
    """Return the Job of one process of a role that is not main. Its pod is replaced when its node is lost."""
    never = pod.role.restart == "never"
    spec = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0 if never else 1000,
        "template": pod_template(
            replace(pod, restart=pod.role.restart), job, settings, identity, "Never" if never else "OnFailure"
        ),
    }
    name = objects.object_name(identity, pod.role.name, pod.index)
    metadata = objects.metadata(name, identity, pod.role.name, pod.index)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def deployment(pod: RolePod, job: Job, settings: KubernetesSettings, identity: str, replicas: int, *, name: str = "") -> Manifest:
    template = pod_template(pod, job, settings, identity, "Always")
    del template["metadata"]["labels"][objects.INDEX]  # its pods are alike
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": objects.metadata(name or objects.object_name(identity, pod.role.name), identity, pod.role.name),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {objects.JOB: identity, objects.ROLE: pod.role.name}},
            "template": template,
        },
    }
