"""`ludus train -dc` with `orchestrator = kubernetes`: the fleet of an INI file as a job on Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ludus.compat.coach.fleet_ini import FleetFile
from ludus.core import trust
from ludus.errors import UsageError
from ludus.launch.cluster_file import ClusterConfig, load_cluster_file, read_job_files
from ludus.launch.job import Job, Orchestrator, Role, open_orchestrator
from ludus.launch.kubernetes.plan import PYTHON, fleet_job
from ludus.launch.kubernetes.pod import WORK
from ludus.launch.planner import MAIN, SECRETS
from ludus.transport.message_stream import PASSWORD

KUBERNETES = "kubernetes"
GRACE_S = 120.0
MODELS = "LUDUS_MODEL_PATH"


def kubernetes_fleet(
    file: FleetFile, name: str, arguments: Sequence[str], workers: int, models: Path | None = None
) -> tuple[Job, Orchestrator]:
    """The job of a fleet, and the orchestrator for it. `arguments`: of `ludus fleet learner`. Raises UsageError."""
    if workers < 1:
        raise UsageError(f"-n {workers}: a fleet needs at least 1 worker.")
    config = cluster_config(file, workers)
    settings = config.kubernetes_settings(arguments)
    environment = dict(config.environment)
    if trusted := os.environ.get(trust.VARIABLE):
        environment[trust.VARIABLE] = trusted
    if models is not None:
        environment[MODELS] = f"{WORK}/{models.name}"
        settings = replace(settings, files={**settings.files, **read_job_files([models], ())})
    # Keys of this shell would override the identity of a service account. The password of Redis may come from the INI file.
    known = (PASSWORD,) if config.service_account else (PASSWORD, *SECRETS)
    secrets = tuple(dict.fromkeys([*config.secrets, *(each for each in known if os.environ.get(each))]))
    python = config.python or PYTHON
    main = Role(MAIN, (python, "-P", "-m", "ludus.cli.main"), environment=environment)
    base = Job(name, (main,), MAIN, secrets, GRACE_S)
    named = () if "--experiment-name" in arguments else ("--experiment-name", name)
    job = fleet_job(name, (*arguments, *named), workers, settings, base=base)
    return job, open_orchestrator(KUBERNETES, settings=settings)


def cluster_config(file: FleetFile, workers: int) -> ClusterConfig:
    """The cluster file that the INI file names, with the keys of the INI file."""
    base = load_cluster_file(file.cluster_file) if file.cluster_file is not None else ClusterConfig()
    storage = None
    if file.s3 is not None:
        storage = file.s3.url
    elif file.nfs_server:
        storage = f"nfs:{file.nfs_server}:{file.path}"
    return base.merge(
        on=KUBERNETES,
        image=file.image or None,
        namespace=file.namespace or None,
        storage=storage,
        storage_credentials=file.credentials,
        redis=file.redis_url,
        workers=str(workers),
    )
