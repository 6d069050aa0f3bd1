"""Shape `fleet`: a Job for the learner, a Deployment for the workers, and Redis. Pure functions.

Learner and workers share only Redis and the place of the run. Redis is given, or a StatefulSet of the job with a password and an
append-only file on a volume.
"""

from __future__ import annotations

from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import objects, pod
from ludus.launch.kubernetes.objects import JobObjects, Manifest
from ludus.launch.kubernetes.one_pod import HELPED_TTL_S
from ludus.launch.kubernetes.pod import MEMORY_HOST, SECRETS, RolePod
from ludus.launch.kubernetes.pod_process import ENV_SECRETS, PLACEHOLDER
from ludus.launch.kubernetes.settings import KubernetesSettings, PodCount, PodResources, parse_quantity
from ludus.transport.message_stream import PASSWORD

LEARNER, WORKER, MEMORY = "learner", "worker", "memory"
REDIS_PORT = 6379
REDIS_URL = f"redis://$({MEMORY_HOST}):{REDIS_PORT}/0"
"""Address of the job's own Redis, as its commands name it."""

_REDIS_SHARE = 0.75
"""Share of its memory limit that Redis may fill with data; the rest is for buffers and the rewriting of its file."""


def is_fleet(job: Job) -> bool:
    return job.main == LEARNER and any(role.name == WORKER for role in job.roles)


def render_objects(job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    """Return the objects of a fleet."""
    roles = {role.name: role for role in job.roles}
    own_redis = MEMORY in roles
    addresses = {MEMORY_HOST: MEMORY} if own_redis else {}
    password = {PASSWORD: f"{ENV_SECRETS}/{PASSWORD}"} if own_redis else {}
    learner = RolePod(roles[LEARNER], addresses=addresses, secret_files=password)
    worker = RolePod(
        roles[WORKER],
        addresses=addresses,
        secret_files=password,
        resources=settings.scale.worker_resources,
        needs_runs=not settings.storage.url,
    )
    count = settings.scale.workers or PodCount(roles[WORKER].count, roles[WORKER].count)
    found = [pod.main_job(learner, job, settings, identity, ttl_s=HELPED_TTL_S)]
    if own_redis:
        found.append(objects.service(identity, MEMORY, {"redis": REDIS_PORT}))
        found.append(objects.address_map(identity, LEARNER, {MEMORY: objects.object_name(identity, MEMORY)}))
    keys = (PASSWORD, objects.REDIS_CONF) if own_redis else ()
    found += objects.job_wide_objects(job, settings, identity, shared=True, secret_keys=keys)
    if own_redis:
        found[-1]["stringData"][objects.REDIS_CONF] = redis_configuration(PLACEHOLDER, settings.redis.memory)
        found += redis_server(roles[MEMORY], job, settings, identity)
    found.append(pod.deployment(worker, job, settings, identity, count.least))
    if count.scales:
        target = objects.object_name(identity, WORKER)
        found.append(objects.cpu_autoscaler(identity, WORKER, target, count.least, count.most, settings.scale.cpu_percent))
    return JobObjects(tuple(found), scaled=(WORKER,))


def redis_server(role: Role, job: Job, settings: KubernetesSettings, identity: str) -> list[Manifest]:
    """Return the StatefulSet of the job's Redis, and the claim for its data, which is deleted with the job."""
    redis = settings.redis
    server = RolePod(
        Role(role.name, ("redis-server", f"{SECRETS}/{objects.REDIS_CONF}")),
        resources=PodResources(1, redis.memory, shm="64Mi"),
        secret_files={objects.REDIS_CONF: objects.REDIS_CONF},
        needs_runs=False,
        image=redis.image,
        raw_command=True,
        ports={"redis": REDIS_PORT},
        probes={
            "readinessProbe": {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 5},
            "livenessProbe": {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 20, "failureThreshold": 6},
        },
    )
    template = pod.pod_template(server, job, settings, identity, "Always")
    claim = objects.object_name(identity, MEMORY)
    data: Manifest = {"persistentVolumeClaim": {"claimName": claim}} if redis.storage else {"emptyDir": {}}
    template["spec"]["volumes"].append({"name": "data", **data})
    template["spec"]["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    claims = [objects.volume_claim(claim, identity, MEMORY, redis.storage)] if redis.storage else []
    server_set: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": objects.metadata(objects.object_name(identity, MEMORY), identity, MEMORY),
        "spec": {
            "replicas": 1,
            "serviceName": objects.object_name(identity, MEMORY),
            "selector": {"matchLabels": {objects.JOB: identity, objects.ROLE: MEMORY}},
            "template": template,
        },
    }
    return [*claims, server_set]


def redis_configuration(password: str, memory: str) -> str:
    """Return redis.conf. Nothing is evicted: a full server rejects writes. A crash loses at most about a second of data."""
    return (
        f"bind * -::*\nport {REDIS_PORT}\nprotected-mode yes\nrequirepass {_quote(password)}\ndir /data\nappendonly yes\nappendfsync everysec\n"
        f'save ""\ndaemonize no\nlogfile ""\nmaxmemory {int(parse_quantity(memory) * _REDIS_SHARE)}\nmaxmemory-policy noeviction\n'
    )


def _quote(value: str) -> str:
    """Return a value of redis.conf, which may contain blanks, quotes and control characters."""
    escaped = "".join(f"\\x{ord(char):02x}" if char in '\\"' or ord(char) < 0x20 else char for char in value)
    return f'"{escaped}"'
