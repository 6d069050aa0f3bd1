"""Checks of a Kubernetes cluster before a job is submitted: connection, permissions, namespace, quota, storage, room on the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.errors import LudusError, UnknownName, UsageError
from ludus.launch.doctor.finding import DoctorFinding, failure, format_count, ok, skip, warning
from ludus.launch.kubernetes.client import KINDS, KubernetesClient
from ludus.launch.kubernetes.objects import MONITORING_API, run_claim_name
from ludus.launch.kubernetes.ray_cluster import RAY_JOB_API
from ludus.launch.kubernetes.settings import KubernetesSettings, PodResources, parse_quantity

OLDEST = (1, 26)
"""From this version on, servers have pod failure policies."""

_READ, _WRITE = ("get", "list"), ("create", "delete", "patch")
PERMISSIONS: Mapping[str, tuple[str, ...]] = {
    "Job": (*_READ, *_WRITE),
    "Pod": (*_READ, "delete", "patch"),
    "Secret": ("create",),
    "ConfigMap": ("create",),
    "Service": ("create",),
    "NetworkPolicy": ("create",),
    "Deployment": (*_READ, *_WRITE),
    "StatefulSet": (*_READ, "create", "patch"),
    "PersistentVolumeClaim": ("get", "create"),
    "HorizontalPodAutoscaler": ("list", "create", "delete"),
    "PodDisruptionBudget": ("create",),
}
"""What `ludus submit` and `ludus jobs` need in the namespace, for all shapes. docs/kubernetes/troubleshooting.md has a Role with these."""

CUSTOM_METRICS = ("custom.metrics.k8s.io/v1beta2", "custom.metrics.k8s.io/v1beta1")
_SUBRESOURCES = (("get", "Pod", "log"),)
_OPTIONAL = (("list", "Event", ""),)


@dataclass(frozen=True)
class NodeRoom:
    """What a node has for pods that are new: `cpus`, `memory` in bytes, `gpus`, as far as it was read."""

    name: str
    cpus: float
    memory: float
    gpus: int
    schedulable: bool

    def fits(self, wanted: PodResources) -> bool:
        memory = parse_quantity(wanted.memory)
        return self.schedulable and self.cpus >= wanted.cpus and self.memory >= memory and self.gpus >= wanted.gpus


def check_kubernetes(client: KubernetesClient, settings: KubernetesSettings, name: str = "") -> Iterator[DoctorFinding]:
    """Check the cluster for jobs with these settings. `name`: of the job, if it is known. Stops when the server does not answer."""
    try:
        version = client.version()
    except LudusError as error:
        yield failure("kubernetes", error.message, error.hint)
        return
    where = f"context {client.context}" if client.context else "this pod's service account"
    yield _check_version(version, f"{where}, namespace {client.namespace}")
    try:
        yield from check_permissions(client, needed_permissions(settings))
        yield from _check_namespace(client)
        yield from _check_named_objects(client, settings, name)
        yield from _check_room(client, settings)
        if settings.flavor == "kuberay":
            yield _check_api(client, "kuberay", RAY_JOB_API, "Install the KubeRay operator, or use --flavor plain.")
        if settings.monitoring.pod_monitor or settings.monitoring.prometheus_rule:
            hint = "Install the Prometheus operator, or leave pod_monitor and prometheus_rule out."
            yield _check_api(client, "monitoring", MONITORING_API, hint)
        if settings.scale.replicas.scales or (settings.scale.workers is not None and settings.scale.workers.scales):
            yield _check_metrics(client, by_sessions=settings.scale.sessions > 0)
    except LudusError as error:
        yield failure("kubernetes", error.message, error.hint)


def _check_version(version: str, where: str) -> DoctorFinding:
    numbers = tuple(int(part) for part in version.lstrip("v").split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST:
        text = f"{version}, {where}: a failed training is started again until a client sees it, and cancelled pods keep no log"
        return warning("kubernetes", text, f"Use {OLDEST[0]}.{OLDEST[1]} or later.")
    return ok("kubernetes", f"{version}, {where}")


# -- permissions --------------------------------------------------------------------------------------------------------------


def needed_permissions(settings: KubernetesSettings) -> dict[str, tuple[str, ...]]:
    """Return kind → verbs that jobs with these settings need: PERMISSIONS, and those for objects of operators."""
    found = dict(PERMISSIONS)
    if settings.flavor == "kuberay":
        found["RayJob"] = (*_READ, *_WRITE)
    if settings.monitoring.pod_monitor:
        found["PodMonitor"] = ("create",)
    if settings.monitoring.prometheus_rule:
        found["PrometheusRule"] = ("create",)
    return found


def check_permissions(client: KubernetesClient, needed: Mapping[str, Sequence[str]] = PERMISSIONS) -> Iterator[DoctorFinding]:
    """Ask the server for every verb and resource that jobs need. `needed`: kind → verbs."""
    asked = [(verb, kind, "") for kind, verbs in needed.items() for verb in verbs]
    missing = [_describe(verb, kind, sub) for verb, kind, sub in (*asked, *_SUBRESOURCES) if not _allows(client, verb, kind, sub)]
    total = len(asked) + len(_SUBRESOURCES)
    if missing:
        rules = "; ".join(missing)
        yield failure(
            "permissions",
            f"missing in the namespace {client.namespace}: {rules}",
            "Ask for a Role with these: docs/kubernetes/troubleshooting.md has one.",
        )
    else:
        yield ok("permissions", f"all {total} that jobs need")
    lacking = [_describe(verb, kind, sub) for verb, kind, sub in _OPTIONAL if not _allows(client, verb, kind, sub)]
    if lacking:
        text = f"not allowed: {', '.join(lacking)}; the status cannot say why a pod does not start"
        yield warning("events", text, "Ask for this verb too.")


def _allows(client: KubernetesClient, verb: str, kind: str, subresource: str) -> bool:
    return client.allows(verb, KINDS[kind].plural, KINDS[kind].group, subresource)[0]


def _describe(verb: str, kind: str, subresource: str) -> str:
    resource = KINDS[kind].plural + (f"/{subresource}" if subresource else "")
    return f"{verb} {resource}{f'.{KINDS[kind].group}' if KINDS[kind].group else ''}"


# -- namespace ----------------------------------------------------------------------------------------------------------------


def _check_namespace(client: KubernetesClient) -> Iterator[DoctorFinding]:
    try:
        client.read(f"/api/v1/namespaces/{client.namespace}", f"namespace {client.namespace}")
    except UnknownName:
        yield failure("namespace", f"{client.namespace} does not exist", f"kubectl create namespace {client.namespace}")
        return
    except UsageError:
        yield skip("namespace", f"{client.namespace}: its existence cannot be checked without permission to read it")
    try:
        quotas = client.list("ResourceQuota")
    except LudusError:
        return
    for quota in quotas:
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        text = ", ".join(f"{used.get(key, '0')} of {limit} {key}" for key, limit in hard.items())
        full = [key for key, limit in hard.items() if _number(used.get(key, "0")) >= _number(limit)]
        name = f"quota {quota['metadata']['name']}"
        yield warning(name, f"{text}; used up: {', '.join(full)}", "End other jobs, or ask for more.") if full else ok(name, text)


def _check_named_objects(client: KubernetesClient, settings: KubernetesSettings, name: str) -> Iterator[DoctorFinding]:
    """Check that the objects that the settings name exist."""
    named: list[tuple[str, str, str]] = [("ServiceAccount", settings.extras.service_account, "service_account")]
    named += [("Secret", secret, "image_pull_secrets") for secret in settings.image.pull_secrets]
    named.append(("PersistentVolumeClaim", settings.storage.claim, "storage"))
    for kind, each, key in named:
        if each:
            yield _check_object(client, kind, each, key)
    if settings.scheduling.priority_class:
        path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{settings.scheduling.priority_class}"
        yield _check_path(client, path, "priority class", settings.scheduling.priority_class)
    storage = settings.storage
    if storage.storage_class:
        path = f"/apis/storage.k8s.io/v1/storageclasses/{storage.storage_class}"
        yield _check_path(client, path, "storage class", storage.storage_class)
    if storage.size and name:
        yield ok("storage", f"the claim {run_claim_name(name)} of {storage.size} is created, or used again")
    elif not storage.lasts:
        yield skip("storage", "none is given: a training needs --storage")


def _check_object(client: KubernetesClient, kind: str, name: str, key: str) -> DoctorFinding:
    check = f"{key} {name}"
    try:
        client.get(kind, name)
    except UnknownName:
        return failure(check, f"there is no {kind} {name} in the namespace {client.namespace}", "Create it, or correct the name.")
    except UsageError:
        return skip(check, f"not checked: there is no permission to get the {kind}")
    return ok(check, "found")


def _check_path(client: KubernetesClient, path: str, check: str, name: str) -> DoctorFinding:
    try:
        client.read(path, f"{check} {name}")
    except UnknownName:
        return failure(f"{check} {name}", "it does not exist", f"`kubectl get {check.replace(' ', '')}es` lists them.")
    except UsageError:
        return skip(f"{check} {name}", "not checked: there is no permission to read it")
    return ok(f"{check} {name}", "found")


# -- nodes ----------------------------------------------------------------------------------------------------------------------


def _check_room(client: KubernetesClient, settings: KubernetesSettings) -> Iterator[DoctorFinding]:
    """Compare the size of a pod with the size of the nodes. What other pods use of them is not read."""
    try:
        nodes = client.read("/api/v1/nodes", "nodes").get("items") or []
    except UsageError:
        yield skip("nodes", "not checked: there is no permission to list nodes")
        return
    rooms = [
        node_room(node, settings.resources.gpu_resource) for node in nodes if _selected(node, settings.scheduling.node_selector)
    ]
    wanted = settings.resources
    text = f"{wanted.cpus:g} core{'s' * (wanted.cpus != 1)} and {wanted.memory}"
    text += f", {format_count(wanted.gpus, 'GPU')}" if wanted.gpus else ""
    fitting = [room for room in rooms if room.fits(wanted)]
    total = format_count(len(rooms), "node") + (" with these labels" if settings.scheduling.node_selector else "")
    if fitting:
        yield ok("nodes", f"{len(fitting)} of {total} can have a pod with {text}, if no other pods use them")
    else:
        yield failure(
            "nodes",
            f"none of {total} can have a pod with {text}",
            "Request less: --cpus, --memory, --gpus. A cluster that adds nodes may still do.",
        )


def node_room(node: Mapping[str, Any], gpu_resource: str) -> NodeRoom:
    amounts = (node.get("status") or {}).get("allocatable") or {}
    return NodeRoom(
        str(node["metadata"]["name"]),
        _number(amounts.get("cpu", "0")),
        _number(amounts.get("memory", "0")),
        int(_number(amounts.get(gpu_resource, "0"))),
        not (node.get("spec") or {}).get("unschedulable"),
    )


def _selected(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    own = node["metadata"].get("labels") or {}
    return all(own.get(key) == value for key, value in labels.items())


def _check_api(client: KubernetesClient, check: str, api: str, hint: str) -> DoctorFinding:
    if client.find_api(api):
        return ok(check, f"{api} is known to the server")
    return failure(check, f"{api} is not known to the server", hint)


def _check_metrics(client: KubernetesClient, *, by_sessions: bool) -> DoctorFinding:
    """Check that autoscalers have what they scale by: the load of the CPU, or the metric `ludus_sessions` of an adapter."""
    if by_sessions:
        if any(client.find_api(api) for api in CUSTOM_METRICS):
            return ok("metrics", "the server has custom metrics of pods; ludus_sessions must be one of them")
        return failure(
            "metrics",
            "the server has no custom metrics of pods: the number of pods will not follow the sessions",
            "Install prometheus-adapter (docs/kubernetes/monitoring.md), or leave sessions out to scale by the load of the CPU.",
        )
    if client.find_api("metrics.k8s.io/v1beta1"):
        return ok("metrics", "the server has metrics of pods, which autoscalers need")
    return failure(
        "metrics",
        "the server has no metrics of pods: the number of pods will not follow the load",
        "Install metrics-server, or give a fixed number.",
    )


def _number(text: object) -> float:
    try:
        return parse_quantity(str(text))
    except ValueError:
        return 0.0
