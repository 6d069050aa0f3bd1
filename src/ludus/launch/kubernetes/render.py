"""Chooses the shape of a job and renders its objects, as dictionaries and as YAML files. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from ludus.launch.job import Job
from ludus.launch.kubernetes import fleet, gamecore, one_pod, ray_cluster, serve
from ludus.launch.kubernetes.objects import RECORD, JobObjects, Manifest, is_kept
from ludus.launch.kubernetes.plan import CommandLine, main_words
from ludus.launch.kubernetes.pod_process import PLACEHOLDER
from ludus.launch.kubernetes.settings import KubernetesSettings, check_settings
from ludus.launch.kubernetes.status import JobRecord

KUSTOMIZATION = "kustomization.yaml"
EXAMPLE = "secret.yaml.example"
"""File with the keys of the Secret. `kubectl` reads only files that end in yaml, yml or json."""

_FILL_NOTE = """# Example of the Secret; nothing applies this file. Create the Secret from files with its values:
#   kubectl create secret generic {name} {options}
# or from a copy of this file in which each {placeholder!r} is replaced. The pods wait for it and refuse placeholders.
"""
_OWNER_NOTE = """# Rendered by `ludus submit --on kubernetes --render`. `kubectl apply -k .` creates all but the Secret{claims}.
# Objects created this way are not deleted with {kind} {name}: kubectl delete -k .
"""
_CLAIM_NOTE = """# The volume of the runs. It is not in the kustomization: `kubectl delete -k .` keeps it, and the runs in it. Create it once:
#   kubectl apply -f {file}
# Deleting it deletes the runs.
"""


def render_job(job: Job, settings: KubernetesSettings, identity: str, submitted_at: float = 0.0) -> JobObjects:
    """Return the objects of a job. Raises UsageError if the settings are invalid."""
    check_settings(settings)
    found = gamecore.add_server(_render_shape(job, settings, identity), job, settings, identity)
    by_kind = found.owner["spec"]["ttlSecondsAfterFinished"] if found.owner["kind"] == "Job" else one_pod.ALONE_TTL_S
    ttl_s = by_kind if settings.ttl_s is None else settings.ttl_s
    record = JobRecord.of(job, submitted_at, hosts=found.hosts, scaled=found.scaled, ttl_s=ttl_s)
    record = replace(record, processes={**record.processes, **found.extra_processes})
    found.owner["metadata"].setdefault("annotations", {})[RECORD] = record.to_json()
    return found


def _render_shape(job: Job, settings: KubernetesSettings, identity: str) -> JobObjects:
    command = CommandLine(main_words(job))
    if command.words[:1] == ("serve",):
        port = int(command.number("--port", "-p", default=serve.PORT))
        return serve.render_objects(job, settings, identity, port=port, tls=command.value("--tls-cert") is not None)
    if command.words[:2] == ("gamecore", "serve"):
        return gamecore.render_service(job, settings, identity)
    if fleet.is_fleet(job):
        return fleet.render_objects(job, settings, identity)
    if job.ray:
        # Trials run on any node and write below the directory of the sweep; the workers of a training write nothing.
        return ray_cluster.render_objects(job, settings, identity, nodes_write_runs=command.words[:1] == ("tune",))
    return one_pod.render_objects(job, settings, identity)


def to_files(objects: JobObjects) -> dict[str, str]:
    """Return the objects as YAML files by name, and a kustomization that lists those that may be deleted with the job.

    The Secret is an example with placeholders. The claim for runs, and the number of pods that an autoscaler sets, are left to the cluster.
    """
    files: dict[str, str] = {}
    resources: list[str] = []
    kept = [manifest for manifest in objects.manifests if is_kept(manifest)]
    scaled = [_scale_target(manifest) for manifest in objects.manifests if manifest["kind"] == "HorizontalPodAutoscaler"]
    for manifest in objects.manifests:
        kind, name = str(manifest["kind"]), str(manifest["metadata"]["name"])
        file = f"{kind.lower()}-{name}.yaml"
        if kind == "Secret":
            options = " ".join(f"--from-file={key}=FILE" for key in manifest["stringData"])
            files[EXAMPLE] = _FILL_NOTE.format(placeholder=PLACEHOLDER, name=name, options=options) + to_yaml(manifest)
            continue
        if manifest in kept:
            files[file] = _CLAIM_NOTE.format(file=file) + to_yaml(manifest)
            continue
        claims = " and the volume of the runs" if kept else ""
        note = _OWNER_NOTE.format(kind=kind, name=name, claims=claims) if manifest is objects.owner else ""
        files[file] = note + to_yaml(_without_replicas(manifest) if (kind, name) in scaled else manifest)
        resources.append(file)
    files[KUSTOMIZATION] = to_yaml(
        {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}
    )
    return files


def _scale_target(autoscaler: Manifest) -> tuple[str, str]:
    target = autoscaler["spec"]["scaleTargetRef"]
    return str(target["kind"]), str(target["name"])


def _without_replicas(manifest: Manifest) -> Manifest:
    """Return the object without its number of pods, to which each `kubectl apply` would reset what the autoscaler has set."""
    return {**manifest, "spec": {key: value for key, value in manifest["spec"].items() if key != "replicas"}}


def to_yaml(manifest: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return a document in the order of its keys, with multi-line strings as blocks."""
    return str(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def join_documents(manifests: Sequence[Manifest]) -> str:
    return "---\n".join(map(to_yaml, manifests))


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, indents lists, and multi-line strings as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text and not any(line != line.rstrip() for line in text.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
