"""Shape `Ray cluster`: a pod for each node of the job. Pure functions.

`plain`: the main pod runs the Ray head and the training, as node 0 does everywhere; each other node is a Job of its own. A Service has
the address of the head, which stays when the main pod is replaced. `kuberay`: a RayJob, whose objects the operator creates.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import objects, pod
from ludus.launch.kubernetes.objects import HEAD_KEY, JobObjects, Manifest
from ludus.launch.kubernetes.one_pod import HELPED_TTL_S
from ludus.launch.kubernetes.pod import HEAD_HOST, POD_IP, SECRETS, RolePod
from ludus.launch.kubernetes.settings import KubernetesSettings
from ludus.process import job_env
from ludus.process.job_env import JobEnv

PORT = 6379
LEAVE_S = 1800
"""A node ends for good when the head cannot be reached for this long. A main pod that is replaced is back sooner."""

RAY_JOB_API = "ray.io/v1"


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
    """Return a RayJob. The operator starts Ray and submits the command; the image needs `ray[default]`."""
    main = next(role for role in job.roles if role.name == job.main)
    nodes = Role("ray", ("ray",), job.nodes - 1)
    submitter = replace(main, command=(*main.command, "--address", "auto"))
    shared = pod.main_environment(job, settings, identity)
    owner: Manifest = {
        "apiVersion": RAY_JOB_API,
        "kind": "RayJob",
        "metadata": objects.metadata(identity, identity, job.main, 0),
        "spec": {
            "entrypoint": shlex.join(submitter.command),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": settings.ttl_s if settings.ttl_s is not None else HELPED_TTL_S,
            "backoffLimit": pod.MAX_RESTARTS,
            "submitterPodTemplate": _operator_pod(RolePod(main), job, settings, identity, "Never"),
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": f"{settings.resources.cpus:g}"},  # noqa: S104
                    "template": _operator_pod(
                        RolePod(replace(nodes, name="head"), environment=shared), job, settings, identity, "Always"
                    ),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": job.nodes - 1,
                        "minReplicas": job.nodes - 1,
                        "maxReplicas": job.nodes - 1,
                        "rayStartParams": {"num-cpus": f"{settings.resources.cpus:g}"},
                        "template": _operator_pod(RolePod(nodes), job, settings, identity, "Always"),
                    }
                ],
            },
        },
    }
    found = [owner, *objects.job_wide_objects(job, settings, identity, shared=True)]
    return JobObjects(tuple(found), scaled=("ray",))


def _operator_pod(role_pod: RolePod, job: Job, settings: KubernetesSettings, identity: str, restart_policy: str) -> Manifest:
    """Return a pod template without a command, which the operator sets."""
    template = pod.pod_template(role_pod, job, settings, identity, restart_policy)
    del template["spec"]["containers"][0]["command"]
    del template["spec"]["restartPolicy"]
    return template
