"""Shape `one pod`: a Job with one pod for the main role, and a Job for each process of the other roles. Pure."""

from __future__ import annotations

from ludus.launch.job import Job
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.objects import JobObjects
from ludus.launch.kubernetes.pod import RolePod, main_job, process_job
from ludus.launch.kubernetes.settings import KubernetesSettings

ALONE_TTL_S = 86_400
"""A finished pod uses no resources: its log is kept for a day."""

HELPED_TTL_S = 3_600
"""If nobody looks at a finished job, its other pods run until it is deleted."""


def render_objects(job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    """Return the objects of a job, its owner first."""
    main = next(role for role in job.roles if role.name == job.main)
    others = [role for role in job.roles if role is not main]
    owner = main_job(RolePod(main), job, settings, identity, ttl_s=HELPED_TTL_S if others else ALONE_TTL_S)
    found = [owner, *objects.job_wide_objects(job, settings, identity, shared=bool(others))]
    for role in others:
        found += [process_job(RolePod(role, index), job, settings, identity) for index in range(role.count)]
    return JobObjects(tuple(found))
