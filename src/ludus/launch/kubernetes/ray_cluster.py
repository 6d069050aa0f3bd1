"""Shape `Ray cluster`: a pod for each node of the job. Pure functions.

`plain`: the main pod runs the Ray head and the training, as node 0 does everywhere; each other node is a Job of its own. A Service has
the address of the head, which stays when the main pod is replaced. `kuberay`: a RayJob, whose objects the operator creates. Its nodes
are started by `pod_process` too, which passes secrets and files to Ray, and Ray passes them to the training on the head.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib import metadata

from ludus.errors import UsageError
from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import objects, pod
from ludus.launch.kubernetes.objects import HEAD_KEY, JobObjects, Manifest
from ludus.launch.kubernetes.one_pod import HELPED_TTL_S
from ludus.launch.kubernetes.pod import HEAD_HOST, POD_IP, SECRETS, RolePod
from ludus.launch.kubernetes.settings import KubernetesSettings, PodResources
from ludus.process import job_env
from ludus.process.job_env import JobEnv

PORT = 6379
LEAVE_S = 1800
"""A node ends for good when the head cannot be reached for this long. A main pod that is replaced is back sooner."""

RAY_JOB_API = "ray.io/v1"
HEAD, RAY = "head", "ray"
DASHBOARD_PORT = 8265

ENTRYPOINT = "LUDUS_ENTRYPOINT"
"""Variable of a RayJob's head with the command of the main role."""

RUN_ENTRYPOINT = "set -f ';' IFS= ';' eval exec '$LUDUS_ENTRYPOINT'"
"""Entrypoint of a RayJob. It reaches the head through bash, list2cmdline and sh, which do not quote alike; this text survives all three."""

OWN_COMMAND = "ray.io/overwrite-container-cmd"
"""Annotation with which the operator keeps the command of a container, and passes its own in KUBERAY_GEN_RAY_START_CMD."""

_RAY_START = ("sh", "-c", "ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD")
_SUBMITTER = PodResources(1, "1Gi", shm="64Mi")


def render_objects(job: Job, settings: KubernetesSettings, identity: str, *, nodes_write_runs: bool = False) -> JobObjects:
    """Return the objects of a job with its own Ray cluster. `nodes_write_runs`: whether all nodes, not only the first, write runs."""
    if settings.flavor == "kuberay":
        return _render_ray_job(job, settings, identity)
    main = next(role for role in job.roles if role.name == job.main)
    beside = tuple(each for each in processes_at(job, 0) if each[0] is not main)
    environment = _node_environment(job, 0)
    owner = pod.main_job(RolePod(main, beside=beside, environment=environment), job, settings, identity, ttl_s=HELPED_TTL_S)
    found = [owner, objects.service(identity, job.main, {"ray": PORT, "learners": PORT + 2})]
    found.append(objects.address_map(identity, job.main, {HEAD_KEY: objects.object_name(identity, job.main)}))
    found += objects.job_wide_objects(job, settings, identity, shared=True)
    hosts = {f"{role.name}-{index}": f"{main.name}-0" for role, index in beside}
    for node in range(1, job.nodes):
        (first, index), *others = processes_at(job, node)
        worker = RolePod(
            _leaving(first),
            index,
            tuple(others),
            _node_environment(job, node),
            {HEAD_HOST: HEAD_KEY},
            needs_runs=nodes_write_runs,
        )
        found.append(pod.process_job(worker, job, settings, identity))
        hosts |= {f"{role.name}-{at}": f"{first.name}-{index}" for role, at in others}
    return JobObjects(tuple(found), hosts)


def processes_at(job: Job, node: int) -> list[tuple[Role, int]]:
    """Return the processes (role, index) of a node, in the order in which they start."""
    return [(role, index) for role in job.roles for index in range(role.count) if role.node(index) == node]


def _leaving(ray: Role) -> Role:
    return replace(ray, command=(*ray.command, "--leave-s", str(LEAVE_S)))


def _node_environment(job: Job, node: int) -> dict[str, str]:
    """Return the variables that describe the nodes. Of the others only the address of the head is known, and needed."""
    addresses = [f"$({POD_IP})" if at == node else f"$({HEAD_HOST})" if not at else f"node-{at}" for at in range(job.nodes)]
    env = JobEnv(tuple(addresses), node, PORT, None, job.ray, job.wait_s)
    return {**env.environment(), job_env.TOKEN: f"{SECRETS}/{objects.TOKEN}"}


# -- KubeRay ------------------------------------------------------------------------------------------------------------------


def _render_ray_job(job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    """Return a RayJob. The operator starts Ray and submits the command, which runs on the head; the image needs `ray[default]`.

    Raises UsageError if the job has other roles than Ray's: the operator starts none.
    """
    main = next(role for role in job.roles if role.name == job.main)
    if others := [role.name for role in job.roles if role is not main and role.name.partition("-")[0] != RAY]:
        raise UsageError(f"A RayJob has no pods for the role {others[0]!r}.", "Use --flavor plain, or leave learner_nodes out.")
    command = (*main.command, "--address", "auto")
    shared = {**pod.main_environment(job, settings, identity), ENTRYPOINT: shlex.join(command)}
    head = RolePod(replace(main, name=HEAD, command=_RAY_START), environment=shared)
    node = RolePod(replace(main, name=RAY, command=_RAY_START))
    submitter = RolePod(main, resources=_SUBMITTER, needs_runs=False)
    cores = {"num-cpus": f"{settings.resources.cpus:g}"}
    nodes = job.nodes - 1
    cluster: Manifest = {
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", **cores},  # noqa: S104 # the network policy admits the operator only
            "template": _node_pod(head, job, settings, identity),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": nodes,
                "minReplicas": nodes,
                "maxReplicas": nodes,
                "rayStartParams": cores,
                "template": _node_pod(node, job, settings, identity),
            }
        ],
    }
    if version := installed_ray_version():
        cluster = {"rayVersion": version, **cluster}
    owner: Manifest = {
        "apiVersion": RAY_JOB_API,
        "kind": "RayJob",
        "metadata": {**objects.metadata(identity, identity, job.main, 0), "annotations": {OWN_COMMAND: "true"}},
        "spec": {
            "entrypoint": RUN_ENTRYPOINT,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 0,  # of its Ray cluster: the RayJob itself stays
            "backoffLimit": 0,
            "submitterPodTemplate": _submitter_pod(submitter, job, settings, identity),
            "rayClusterSpec": cluster,
        },
    }
    found = [owner, *_operator_policy(identity, settings), *objects.job_wide_objects(job, settings, identity, shared=True)]
    return JobObjects(tuple(found), scaled=(RAY,), extra_processes={HEAD: 1, RAY: nodes})


def installed_ray_version() -> str:
    """Return the version of Ray on this machine, which that of the image should equal; "" without Ray. The operator has no default."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""


def _node_pod(role_pod: RolePod, job: Job, settings: KubernetesSettings, identity: str) -> Manifest:
    """Return the template of a Ray node, whose restart policy the operator sets."""
    template = pod.pod_template(role_pod, job, settings, identity, "Always")
    del template["spec"]["restartPolicy"]
    if role_pod.role.name == RAY:
        del template["metadata"]["labels"][objects.INDEX]  # its pods are alike
    return template


def _submitter_pod(role_pod: RolePod, job: Job, settings: KubernetesSettings, identity: str) -> Manifest:
    """Return the template of the pod that submits the entrypoint and prints its output, by a command of the operator."""
    template = pod.pod_template(role_pod, job, settings, identity, "Never")
    del template["spec"]["containers"][0]["command"]
    return template


def _operator_policy(identity: str, settings: KubernetesSettings) -> list[Manifest]:
    """Return the policy that opens the dashboard of the head to the operator, in any namespace, and to no other pod: it runs commands."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {objects.COMPONENT: "kuberay-operator"}}}
    ingress = {"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]}
    return objects.ingress_policy(identity, HEAD, "operator", ingress) if settings.network_policy else []
