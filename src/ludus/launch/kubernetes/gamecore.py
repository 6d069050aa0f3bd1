"""Gamecore server on Kubernetes: beside a training, or alone as a service. Games are child processes of its pod. Pure functions.

There is one pod: a game is known only to the server that started it. Games connect to the workers by the addresses of their pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ludus.io.addresses import ANY_HOST
from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import objects, pod
from ludus.launch.kubernetes.objects import JobObjects, Manifest
from ludus.launch.kubernetes.pod import GAMECORE_HOST_KEY, GAMECORE_PORT, SECRETS, RolePod
from ludus.launch.kubernetes.pod_process import PLACEHOLDER
from ludus.launch.kubernetes.settings import GamecoreSettings, KubernetesSettings

ROLE = "gamecore"


def render_service(job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    """Return the objects of a gamecore server that is a job of its own: `ludus gamecore serve`."""
    main = next(role for role in job.roles if role.name == job.main)
    server = _server_pod(main, settings, settings)
    found = [
        _server_deployment(server, job, settings, identity, name=identity),
        objects.service(identity, main.name, {"gamecore": GAMECORE_PORT}, ready_only=True),
        *objects.job_wide_objects(
            job, settings, identity, shared=False, secret_keys=(objects.GAMECORE_TOKEN,), open_ports=((main.name, GAMECORE_PORT),)
        ),
        *objects.pod_monitor(identity, main.name, settings, port="gamecore", token=objects.GAMECORE_TOKEN),
    ]
    return JobObjects(tuple(found))


def add_server(found: JobObjects, job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    """Return the objects of a job with a gamecore server beside its main role, if the settings ask for one."""
    if not settings.gamecore.enabled:
        return found
    main = next(role for role in job.roles if role.name == job.main)
    command = (pod.python_of(main), "-P", "-m", "ludus.cli.main", *server_command(settings.gamecore))
    role = Role(ROLE, command, environment=main.environment)
    # Without the variables of a client: the server's own games must not order matches from it.
    alone = replace(settings, gamecore=replace(settings.gamecore, enabled=False))
    server = _server_deployment(_server_pod(role, settings, alone), job, alone, identity)
    service = objects.service(identity, ROLE, {"gamecore": GAMECORE_PORT}, ready_only=True)
    manifests = [*found.manifests, server]
    manifests.insert(1, service)
    host = objects.object_name(identity, ROLE)
    if not any(_is_address_map(each, identity) for each in manifests):
        manifests.insert(2, objects.address_map(identity, job.main, {}))
    for manifest in manifests:
        if _is_address_map(manifest, identity):
            manifest["data"][GAMECORE_HOST_KEY] = host
        elif manifest["kind"] == "Secret":
            manifest["stringData"][objects.GAMECORE_TOKEN] = PLACEHOLDER
    return replace(
        found, manifests=tuple(manifests), extra_processes={**found.extra_processes, ROLE: 1}, scaled=(*found.scaled, ROLE)
    )


def server_command(gamecore: GamecoreSettings) -> tuple[str, ...]:
    """Return the arguments of `ludus` that start the server in a pod."""
    catalogue = ("--games", gamecore.games) if gamecore.games else ()
    listen = ("--host", ANY_HOST, "--port", str(GAMECORE_PORT))  # the network policy admits the job's own pods only
    return (
        "gamecore",
        "serve",
        *listen,
        "--max-games",
        str(gamecore.max_games),
        *catalogue,
        "--token-file",
        f"{SECRETS}/{objects.GAMECORE_TOKEN}",
    )


def _server_deployment(server: RolePod, job: Job, settings: KubernetesSettings, identity: str, *, name: str = "") -> Manifest:
    """Return a Deployment that ends its pod before it starts another: two servers would share the address."""
    found = pod.deployment(server, job, settings, identity, 1, name=name)
    found["spec"]["strategy"] = {"type": "Recreate"}
    return found


def _server_pod(role: Role, settings: KubernetesSettings, alone: KubernetesSettings) -> RolePod:
    probe: Mapping[str, Any] = {"httpGet": {"path": "/health", "port": GAMECORE_PORT}, "timeoutSeconds": 5}
    return RolePod(
        role,
        resources=settings.gamecore.resources or alone.resources,
        secret_files={objects.GAMECORE_TOKEN: objects.GAMECORE_TOKEN},
        needs_runs=False,
        image=settings.gamecore.image,
        ports={"gamecore": GAMECORE_PORT},
        probes={
            "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 60},
            "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 6},
            "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 6},
        },
    )


def _is_address_map(manifest: Manifest, identity: str) -> bool:
    return bool(manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"] == objects.object_name(identity, "addresses"))
