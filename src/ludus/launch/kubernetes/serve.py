"""Shape `serve`: a Deployment of `ludus serve` with Service, autoscaler and disruption budget. Pure functions.

All requests of a session must reach the same pod. The Service keeps a client address on its pod; the headless Service has the addresses
of all pods, for clients and proxies that choose one by the session.
"""

from __future__ import annotations

from ludus.launch.job import Job
from ludus.launch.kubernetes import objects, pod
from ludus.launch.kubernetes.objects import JobObjects, Manifest
from ludus.launch.kubernetes.pod import SECRETS, RolePod
from ludus.launch.kubernetes.settings import KubernetesSettings

PORT = 8000
DRAIN_S = 30.0
PRE_STOP_S = 5
"""Seconds that a pod accepts sessions after it was removed from the Services: proxies and nodes learn of the removal later."""

PROBE_TIMEOUT_S = 5
AFFINITY_S = 10_800
TOKEN_FILE = f"{SECRETS}/{objects.SERVE_TOKEN}"


def render_objects(job: Job, settings: KubernetesSettings, identity: str, *, port: int = PORT, tls: bool = False) -> JobObjects:
    """Return the objects of a service. `port`, `tls`: as its command listens."""
    main = next(role for role in job.roles if role.name == job.main)
    replicas = settings.scale.replicas
    server = RolePod(
        main,
        secret_files={objects.SERVE_TOKEN: objects.SERVE_TOKEN},
        ports={"http": port},
        # A loaded pod replies late. If it were taken out of the Services, the others would get its load.
        probes={
            "startupProbe": _probe("/health", port, tls, period_s=2, failures=150),
            "readinessProbe": _probe("/ready", port, tls, period_s=2, failures=10),
            "livenessProbe": _probe("/health", port, tls, period_s=10, failures=6),
        },
        pre_stop_s=PRE_STOP_S,
    )
    service = objects.service(identity, main.name, {"http": port}, ready_only=True)
    service["metadata"]["name"] = identity
    service["spec"] |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": AFFINITY_S}}}
    owner = pod.deployment(server, job, settings, identity, replicas.least, name=identity)
    # A new pod must be ready before an old one drains; an old one keeps its sessions until they end or the time for draining is over.
    owner["spec"]["strategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    found = [
        owner,
        service,
        objects.service(identity, main.name, {"http": port}, headless=True, ready_only=True),
        *objects.job_wide_objects(
            job, settings, identity, shared=True, secret_keys=(objects.SERVE_TOKEN,), open_ports=((main.name, port),)
        ),
        _disruption_budget(identity, main.name),
        *objects.pod_monitor(identity, main.name, settings, port="http", token=objects.SERVE_TOKEN, tls=tls),
        *objects.prometheus_rule(identity, main.name, settings),
    ]
    if replicas.scales:
        found.append(_autoscaler(identity, main.name, settings))
    return JobObjects(tuple(found), scaled=(main.name,))


def _probe(path: str, port: int, tls: bool, *, period_s: int, failures: int) -> Manifest:
    get = {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": PROBE_TIMEOUT_S, "failureThreshold": failures}


def _disruption_budget(identity: str, role: str) -> Manifest:
    """Return a budget by which a drain of nodes ends one pod at a time, also the only one of a service without replicas."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": objects.metadata(identity, identity, role),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {objects.JOB: identity, objects.ROLE: role}}},
    }


def _autoscaler(identity: str, role: str, settings: KubernetesSettings) -> Manifest:
    scale = settings.scale
    if not scale.sessions:
        return objects.cpu_autoscaler(identity, role, identity, scale.replicas.least, scale.replicas.most, scale.cpu_percent)
    metric = {"metric": {"name": "ludus_sessions"}, "target": {"type": "AverageValue", "averageValue": str(scale.sessions)}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": objects.metadata(objects.object_name(identity, role), identity, role),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": identity},
            "minReplicas": scale.replicas.least,
            "maxReplicas": scale.replicas.most,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    }
