"""Backend that runs jobs on Kubernetes. The record of a job is in the cluster: any machine with the kubeconfig can use it.

The object of the main role, a Job or a Deployment, is created first and owns all others: Kubernetes deletes them with it. Pods have no
access to the API. When the main role has ended, the other pods are ended by the next client that looks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ludus.core.plugins import did_you_mean
from ludus.errors import UnknownName, UsageError
from ludus.io.atomic_file import replace_json
from ludus.io.yaml_documents import read_text
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, check_job
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.client import KubernetesClient
from ludus.launch.kubernetes.fleet import redis_configuration
from ludus.launch.kubernetes.objects import CANCELLED, JOB, JobObjects, Manifest
from ludus.launch.kubernetes.pod import TERMINATION_MARGIN_S
from ludus.launch.kubernetes.pod_logs import JobLogReader
from ludus.launch.kubernetes.render import render_job, to_files
from ludus.launch.kubernetes.settings import KubernetesSettings
from ludus.launch.kubernetes.status import (
    GRACEFULLY,
    NOW,
    JobRecord,
    JobSnapshot,
    container_state,
    final_status,
    has_ended,
    job_status,
    main_end,
    pod_label,
    restart_count,
    seconds,
)
from ludus.transport.message_stream import PASSWORD

log = logging.getLogger(__name__)

SUBMIT_S = 300
"""If a submission is killed half way, Kubernetes ends the job after this many seconds."""

DEADLINE_VERSION = (1, 22)
SERVE_TOKEN, GAMECORE_TOKEN = "LUDUS_SERVE_TOKEN", "LUDUS_GAMECORE_TOKEN"
"""Variables with the tokens of services, where they are not to be generated."""

_OWNERS = ("Job", "Deployment", "RayJob")
_MAX_CREDENTIALS = 100_000
_POLL_S = 1.0
_ATTEMPTS = 5
_END_AGAIN_S = 30.0
_LOST_S = 15.0
_PLACES = "kubernetes.json"
_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class KubernetesOrchestrator:
    """Jobs of one namespace. `settings`: for new jobs; the others need only its context and namespace."""

    def __init__(self, settings: KubernetesSettings | None = None) -> None:
        self.settings = settings or KubernetesSettings()
        self._client = KubernetesClient(self.settings.context, self.settings.namespace)
        self._ended: dict[str, float] = {}
        self._final: dict[str, JobStatus] = {}
        self._version: tuple[int, int] | None = None

    # -- the protocol

    def render(self, job: Job) -> dict[str, str]:
        return to_files(render_job(check_job(job), self.settings, objects.job_id(job.name)))

    def submit(self, job: Job) -> str:
        check_job(job, os.environ)
        for _ in range(_ATTEMPTS):
            identity = objects.job_id(job.name, objects.id_suffix(secrets.randbits(40)))
            found = render_job(job, self.settings, identity, time.time())
            values = self._secret_values(job, found)
            owner = self._create_owner(found.owner)
            if owner is not None:
                break
        else:
            raise UsageError(f"There is no free name for the job {job.name} in the namespace {self._client.namespace}.")
        remember_place(
            self._client.context, self._client.namespace
        )  # now: the job can be cancelled even if this process is killed
        with contextlib.ExitStack() as undo:  # also for an interrupt: a half-created job would wait for the rest
            undo.callback(self._client.delete, owner["kind"], identity, grace_s=0)
            self._create_others(found, owner, values)
            self._start(found.owner, owner)
            undo.pop_all()
        return identity

    def status(self, job_id: str) -> JobStatus:
        """Return the status. A job that was deleted after its end, for example by its TTL, keeps the one that this object has seen."""
        try:
            return self._settle(self._snapshot(job_id))
        except UnknownName:
            if job_id not in self._final:
                raise
            return self._final[job_id]

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        record = JobRecord.from_owner(self._owner(job_id))
        if role is not None and role not in record.processes:
            raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, list(record.processes)))
        return self._lines(job_id, role, follow)

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        snapshot = self._snapshot(job_id)
        if self._settle(snapshot).over:
            return
        self._ended.pop(job_id, None)
        mark = {"metadata": {"annotations": {CANCELLED: NOW if at_once else GRACEFULLY}}}
        self._client.patch(snapshot.owner["kind"], job_id, mark)
        if at_once:
            self._kill(snapshot)
        else:
            self._stop_main(snapshot)
            self._stop_others(snapshot, JobRecord.from_owner(snapshot.owner).grace_s + TERMINATION_MARGIN_S)

    def list(self) -> list[JobStatus]:
        """Return all jobs of the namespace, with one request for each kind of object."""
        owners = [
            owner
            for kind in _OWNERS
            for owner in self._list(kind)
            if owner["metadata"]["name"] == owner["metadata"]["labels"].get(JOB)
        ]
        pods = self._list("Pod") if owners else []
        found = []
        for owner in owners:
            identity = owner["metadata"]["name"]
            found.append(self._settle(JobSnapshot(owner, [pod for pod in pods if pod_label(pod, JOB) == identity])))
        return sorted(found, key=lambda status: (status.submitted_at, status.id))

    # -- beyond the protocol

    def remove(self, job_id: str) -> None:
        """Delete a job that is over, with all its objects. Raises UnknownName; UsageError while it is not over."""
        snapshot = self._snapshot(job_id)
        if not self._settle(snapshot).over:
            raise UsageError(f"The job {job_id} is not over.", f"Cancel it first: ludus jobs cancel {job_id}")
        self._client.delete(snapshot.owner["kind"], job_id)
        self._final.pop(job_id, None)

    @property
    def client(self) -> KubernetesClient:
        return self._client

    # -- submitting

    def _create_owner(self, manifest: Manifest) -> Manifest | None:
        """Create the owner; None if its name is taken."""
        incomplete = {**manifest, "spec": {**manifest["spec"], **_unfinished_spec(manifest)}}
        try:
            return self._client.create(incomplete)
        except UsageError as error:
            if "exists already" in error.message:
                return None
            raise

    def _create_others(self, found: JobObjects, owner: Manifest, values: Mapping[str, str]) -> None:
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": False,
            "blockOwnerDeletion": False,
        }
        addresses: dict[str, str] = {}
        for manifest in found.manifests[1:]:
            metadata = manifest["metadata"]
            if JOB not in metadata["labels"]:  # the claim of the runs, which is kept
                self._create_if_missing(manifest)
                continue
            owned = {**manifest, "metadata": {**metadata, "ownerReferences": [reference]}}
            if manifest["kind"] == "Secret":
                owned = objects.fill_secret(owned, values)
            elif manifest["kind"] == "ConfigMap" and metadata["name"] == objects.object_name(
                metadata["labels"][JOB], "addresses"
            ):
                owned["data"] = {
                    key: objects.mapped_host(key, addresses.get(host, host)) for key, host in manifest["data"].items()
                }
            created = self._create_optional(owned)
            if manifest["kind"] == "Service" and created is not None:
                addresses[metadata["name"]] = str(created["spec"].get("clusterIP") or metadata["name"])

    def _create_if_missing(self, manifest: Manifest) -> None:
        try:
            self._client.get(manifest["kind"], manifest["metadata"]["name"])
        except UnknownName:
            self._client.create(manifest)

    def _create_optional(self, manifest: Manifest) -> Manifest | None:
        """Create an object. A budget for disruptions is left out where the server is too old for it. Raises UsageError."""
        try:
            return self._client.create(manifest)
        except UnknownName as error:
            if manifest["apiVersion"] == objects.MONITORING_API:
                raise UsageError(
                    f"The server does not know {manifest['kind']} of {manifest['apiVersion']}.",
                    "Install the Prometheus operator, or leave pod_monitor and prometheus_rule out.",
                ) from error
            if manifest["kind"] != "PodDisruptionBudget":
                raise
            log.warning("the server does not know %s of %s, which is left out", manifest["kind"], manifest["apiVersion"])
            return None

    def _start(self, manifest: Manifest, owner: Manifest) -> None:
        """Undo what would have ended an incomplete job."""
        complete = {key: manifest["spec"].get(key) for key in _unfinished_spec(manifest)}
        now = self._client.patch(owner["kind"], owner["metadata"]["name"], {"spec": complete})
        if (now["metadata"].get("annotations") or {}).get(CANCELLED):  # by another process, before everything existed
            raise UsageError(f"The job {owner['metadata']['name']} was cancelled while it was submitted.")

    def _secret_values(self, job: Job, found: JobObjects) -> dict[str, str]:
        """Return the values of the Secret, from the environment and the files that the settings name. Raises UsageError."""
        values = {objects.TOKEN: secrets.token_hex(32), **{name: os.environ[name] for name in job.secrets}}
        keys = {key for manifest in found.manifests if manifest["kind"] == "Secret" for key in manifest["stringData"]}
        if PASSWORD in keys:
            values.setdefault(PASSWORD, secrets.token_hex(24))
        if objects.REDIS_CONF in keys:
            values[objects.REDIS_CONF] = redis_configuration(values[PASSWORD], self.settings.redis.memory)
        if objects.CREDENTIALS in keys:
            values[objects.CREDENTIALS] = read_text(Path(self.settings.storage.credentials), _MAX_CREDENTIALS)
        for key, variable in ((objects.SERVE_TOKEN, SERVE_TOKEN), (objects.GAMECORE_TOKEN, GAMECORE_TOKEN)):
            values[key] = os.environ.get(variable) or secrets.token_hex(24)
        return values

    # -- ending

    def _settle(self, snapshot: JobSnapshot) -> JobStatus:
        """Return the status of a job; if its main role has ended, end its other pods."""
        now = time.time()
        status = job_status(snapshot, self._client.namespace, now)
        record = JobRecord.from_owner(snapshot.owner)
        end = main_end(snapshot, record, now)
        if end is not None:
            self._final[snapshot.id] = final_status(status, end)
        if end is not None and now - self._ended.get(snapshot.id, 0.0) > _END_AGAIN_S:
            self._ended[snapshot.id] = now
            self._finish_owner(snapshot)
            self._stop_others(snapshot, 0)
        return status

    def _finish_owner(self, snapshot: JobSnapshot) -> None:
        """Keep a server without pod failure policies from starting a failed main role again."""
        conditions = (snapshot.owner.get("status") or {}).get("conditions") or ()
        if snapshot.owner["kind"] == "Job" and not any(each.get("type") in ("Complete", "Failed") for each in conditions):
            self._patch_if_exists("Job", snapshot.id, {"spec": {"backoffLimit": 0}})

    def _keeps_pods(self) -> bool:
        """Whether a pod that is ended by a deadline reports its exit code. Kubelets before 1.22 report nothing after the deadline."""
        if self._version is None:
            numbers = [int(number) for number in re.findall(r"\d+", self._client.version())[:2]]
            self._version = (numbers[0], numbers[1]) if len(numbers) == 2 else DEADLINE_VERSION
        return self._version >= DEADLINE_VERSION

    def _stop_main(self, snapshot: JobSnapshot) -> None:
        """Request the end of the main role. Its pod is not deleted: its exit code and its log are kept."""
        if snapshot.is_service:
            self._scale("Deployment", snapshot.id, 0)
            return
        self._patch_if_exists("Job", snapshot.id, {"spec": {"backoffLimit": 0}})
        main = JobRecord.from_owner(snapshot.owner).main
        started = [self._end_pod(pod, 0) for pod in snapshot.pods_of(main)]
        if not started or not all(started):
            self._patch_if_exists("Job", snapshot.id, {"spec": {"activeDeadlineSeconds": 1}})  # its pod has not started

    def _stop_others(self, snapshot: JobSnapshot, delay_s: float) -> None:
        """End all pods that are not those of the main role, after a delay. Pods of Jobs are kept, for their logs."""
        selected = objects.selector(snapshot.id)
        main = JobRecord.from_owner(snapshot.owner).main
        for job in self._client.list("Job", selected):
            name = job["metadata"]["name"]
            if name == snapshot.id or (job.get("status") or {}).get("conditions"):
                continue
            self._patch_if_exists("Job", name, {"spec": {"backoffLimit": 0}})
            pods = [pod for pod in snapshot.pods if pod_label(pod, "job-name") == name]
            if pods and delay_s and not self._keeps_pods():
                continue  # the next client ends it, after main
            started = [self._end_pod(pod, delay_s) for pod in pods]
            if not started or not all(started):
                self._client.delete("Job", name)
        if set(JobRecord.from_owner(snapshot.owner).processes) == {main} and not snapshot.is_service:
            return
        for autoscaler in self._client.list("HorizontalPodAutoscaler", selected):
            self._client.delete("HorizontalPodAutoscaler", autoscaler["metadata"]["name"])
        for kind in ("Deployment", *(("StatefulSet",) if not delay_s else ())):
            for workload in self._client.list(kind, selected):
                if workload["spec"].get("replicas", 1) and workload["metadata"]["name"] != snapshot.id:
                    self._scale(kind, workload["metadata"]["name"], 0)

    def _kill(self, snapshot: JobSnapshot) -> None:
        """Kill all pods of a job."""
        selected = objects.selector(snapshot.id)
        for job in self._client.list("Job", selected):
            self._patch_if_exists("Job", job["metadata"]["name"], {"spec": {"activeDeadlineSeconds": 1, "backoffLimit": 0}})
        for autoscaler in self._client.list("HorizontalPodAutoscaler", selected):
            self._client.delete("HorizontalPodAutoscaler", autoscaler["metadata"]["name"])
        for kind in ("Deployment", "StatefulSet"):
            for workload in self._client.list(kind, selected):
                self._scale(kind, workload["metadata"]["name"], 0)
        for pod in self._client.list("Pod", selected):
            if not has_ended(pod, time.time()):
                # Not 0, by which a pod disappears before its processes have ended, unless its node does not answer.
                due = seconds(pod["metadata"].get("deletionTimestamp"))
                self._client.delete("Pod", pod["metadata"]["name"], grace_s=0 if 0 < due < time.time() - _LOST_S else 1)

    def _end_pod(self, pod: Manifest, delay_s: float) -> bool:
        """Let the kubelet end a pod after a delay: SIGTERM, then SIGKILL after its grace period.

        Returns False if that is not possible, because the pod has not started, or the server is too old: its Job must be ended.
        """
        started = (pod.get("status") or {}).get("startTime")
        if has_ended(pod, time.time()):
            return True
        if not self._keeps_pods():
            return False
        if not started or not ({"running", "terminated"} & container_state(pod).keys() or restart_count(pod)):
            return False
        deadline = int(max(1.0, time.time() - seconds(started) + delay_s if delay_s else 1.0))
        self._patch_if_exists("Pod", pod["metadata"]["name"], {"spec": {"activeDeadlineSeconds": deadline}})
        return True

    def _scale(self, kind: str, name: str, replicas: int) -> None:
        self._patch_if_exists(kind, name, {"spec": {"replicas": replicas}})

    def _patch_if_exists(self, kind: str, name: str, changes: Manifest) -> None:
        with contextlib.suppress(UnknownName):
            self._client.patch(kind, name, changes)

    # -- reading

    def _owner(self, job_id: str) -> Manifest:
        if _ID.fullmatch(job_id):
            for kind in _OWNERS:
                with contextlib.suppress(UnknownName):
                    found = self._client.get(kind, job_id)
                    if (found["metadata"].get("labels") or {}).get(JOB) == job_id:
                        return found | {"kind": kind}
        raise UnknownName(f"There is no job {job_id!r} of Kubernetes in the namespace {self._client.namespace}.")

    def _snapshot(self, job_id: str) -> JobSnapshot:
        owner = self._owner(job_id)
        pods = self._client.list("Pod", objects.selector(job_id))
        snapshot = JobSnapshot(owner, pods)
        if any((pod.get("status") or {}).get("phase") == "Pending" for pod in pods) or not pods:
            events = [*self._events(job_id), *(event for pod in pods for event in self._events(pod["metadata"]["name"]))]
            return replace(snapshot, events=events)
        return snapshot

    def _events(self, name: str) -> Sequence[Manifest]:
        try:
            found = self._client.list("Event", fields=f"involvedObject.name={name}")
        except UsageError:  # events only explain; the user may not be allowed to read them
            return []
        return sorted(found, key=lambda event: seconds(event.get("lastTimestamp") or event.get("eventTime")))

    def _list(self, kind: str) -> Sequence[Manifest]:
        try:
            found = self._client.list(kind, f"{objects.MANAGED_BY}={objects.LUDUS}")
        except UsageError:
            if kind != "RayJob":  # the operator may not be installed, or not be for this user
                raise
            return []
        return [each | {"kind": kind} for each in found]  # the items of a list have none

    # -- logs

    def _lines(self, job_id: str, role: str | None, follow: bool) -> Iterator[str]:
        reader = JobLogReader(self._client.read_log, role)
        told = ""
        while True:
            try:
                snapshot = self._snapshot(job_id)
            except UnknownName:  # deleted meanwhile
                return
            status = self._settle(snapshot)
            over = not follow or status.over
            if follow and status.state == "pending" and status.reason != told:
                told = status.reason
                log.warning("%s is pending: %s", job_id, status.reason)
            found = False
            for line in reader.new_lines(snapshot):
                found = True
                yield line
            if over and not found:
                return
            if not over:
                time.sleep(_POLL_S)


def _unfinished_spec(manifest: Manifest) -> dict[str, Any]:
    """Return what ends or stops an owner whose submission is not completed."""
    return {"activeDeadlineSeconds": SUBMIT_S} if manifest["kind"] == "Job" else {"replicas": 0}


# -- places -------------------------------------------------------------------------------------------------------------------


def remember_place(context: str, namespace: str) -> None:
    """Store that this user has jobs there, so that `ludus jobs` asks this cluster without --on."""
    known = remembered_places()
    if (context, namespace) in known:
        return
    with contextlib.suppress(OSError, UsageError):  # it only saves an option later
        home = job_dir.make_private(job_dir.state_dir())
        replace_json(home / _PLACES, [*map(list, known), [context, namespace]], mode=0o600)


def remembered_places() -> list[tuple[str, str]]:
    """Return (context, namespace) of the clusters to which this user has submitted jobs from this machine."""
    try:
        data = json.loads((Path(job_dir.state_dir()) / _PLACES).read_text(encoding="utf-8"))
        return [(str(context), str(namespace)) for context, namespace in data]
    except (OSError, ValueError, TypeError):
        return []
