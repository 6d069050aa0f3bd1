"""Backend that runs jobs on Kubernetes. The record of a job is in the cluster: any machine with the kubeconfig can use it.

The object of the main role, a Job or a Deployment, is created first and owns all others: Kubernetes deletes them with it. Pods have no
access to the API. When the main role has ended, the other pods are ended by the next client that looks. It also deletes objects that
Kubernetes itself does not: those of a service that was cancelled, and of one whose submission was killed.
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
from ludus.launch.kubernetes.objects import CANCELLED, CANCELLED_AT, INCOMPLETE, JOB, ROLE, JobObjects, Manifest
from ludus.launch.kubernetes.pod import TERMINATION_MARGIN_S
from ludus.launch.kubernetes.pod_logs import JobLogReader
from ludus.launch.kubernetes.render import render_job, to_files
from ludus.launch.kubernetes.settings import KubernetesSettings
from ludus.launch.kubernetes.status import (
    GRACEFULLY,
    NOW,
    SUBMIT_S,
    JobRecord,
    JobSnapshot,
    MainEnd,
    container_state,
    disrupted,
    final_status,
    has_ended,
    is_expired,
    job_status,
    main_end,
    missing_processes,
    pod_label,
    restart_count,
    seconds,
)
from ludus.transport.message_stream import PASSWORD

log = logging.getLogger(__name__)

DEADLINE_VERSION = (1, 22)
SERVE_TOKEN, GAMECORE_TOKEN = "LUDUS_SERVE_TOKEN", "LUDUS_GAMECORE_TOKEN"
"""Variables with the tokens of services, where they are not to be generated."""

LIST_CONNECT_S = 2.0
"""Time limit of an attempt to connect for a list: `ludus jobs` asks all clusters that it remembers, which may be gone."""

_OWNERS = ("Job", "Deployment", "RayJob")
_MAX_CREDENTIALS = 100_000
_POLL_S = 1.0
_ATTEMPTS = 5
_END_AGAIN_S = 30.0
_LOST_S = 15.0
_SLACK_S = 60.0
"""Seconds beyond the time that a pod has for its end after which the controller ends its Job."""

_PLACES = "kubernetes.json"
_WORKLOADS = ("Job", "Deployment", "StatefulSet")
_EXPLAINED = 3
"""Pods of each role whose absence is explained; each takes a request."""
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
        annotations = {CANCELLED: NOW if at_once else GRACEFULLY, CANCELLED_AT: str(int(time.time()))}
        ending = {"spec": {"suspend": True}} if snapshot.is_ray_job else {}  # the operator then deletes its Ray cluster
        self._client.patch(snapshot.owner["kind"], job_id, {"metadata": {"annotations": annotations}, **ending})
        if at_once:
            self._kill(snapshot)
        else:
            self._stop_main(snapshot)
            delay_s = JobRecord.from_owner(snapshot.owner).grace_s + TERMINATION_MARGIN_S
            self._stop_others(snapshot, delay_s, self._read_workloads(job_id))

    def list(self) -> list[JobStatus]:
        """Return all jobs of the namespace, with one request for each kind of object. A cluster that is gone costs a few seconds.

        It also ends what is left of jobs that are over, as far as this user may, and forgets a place without jobs.
        """
        owners = [
            owner
            for kind in _OWNERS
            for owner in self._list(kind)
            if owner["metadata"]["name"] == owner["metadata"]["labels"].get(JOB)
        ]
        if not owners:
            forget_place(self._client.context, self._client.namespace)
        pods = self._list("Pod") if owners else []
        workloads = WorkloadReader(self._client, f"{objects.MANAGED_BY}={objects.LUDUS}")
        found = []
        for owner in owners:
            identity = owner["metadata"]["name"]
            mine = [pod for pod in pods if pod_label(pod, JOB) == identity]
            found.append(self._settle(JobSnapshot(owner, mine), workloads))
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
        metadata = manifest["metadata"]
        annotations = {**metadata.get("annotations", {}), INCOMPLETE: "true"}
        incomplete = {
            **manifest,
            "metadata": {**metadata, "annotations": annotations},
            "spec": {**manifest["spec"], **_unfinished_spec(manifest)},
        }
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
        changes = {"metadata": {"annotations": {INCOMPLETE: None}}, "spec": complete}
        now = self._client.patch(owner["kind"], owner["metadata"]["name"], changes)
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

    def _settle(self, snapshot: JobSnapshot, workloads: WorkloadReader | None = None) -> JobStatus:
        """Return the status of a job; if its main role has ended, end its other pods, as far as this user may."""
        now = time.time()
        status = job_status(snapshot, self._client.namespace, now)
        end = main_end(snapshot, JobRecord.from_owner(snapshot.owner), now)
        if end is not None:
            self._final[snapshot.id] = final_status(status, end)
        if (end is not None or is_expired(snapshot, now)) and now - self._ended.get(snapshot.id, 0.0) > _END_AGAIN_S:
            self._ended[snapshot.id] = now
            try:
                self._finish(snapshot, end, workloads or self._read_workloads(snapshot.id))
            except UsageError as error:  # a user who may only look
                log.info("what is left of %s is not ended: %s", snapshot.id, error)
        return status

    def _finish(self, snapshot: JobSnapshot, end: MainEnd | None, workloads: WorkloadReader) -> None:
        """End or delete what is left of a job whose main role has ended, or whose submission was not completed."""
        now = time.time()
        if is_expired(snapshot, now):
            self._client.delete(snapshot.owner["kind"], snapshot.id)
            return
        if end is None:
            return
        self._finish_owner(snapshot, end)
        main = JobRecord.from_owner(snapshot.owner).main
        others = [pod for pod in snapshot.pods if pod_label(pod, ROLE) != main]
        if any((pod.get("status") or {}).get("phase") != "Succeeded" for pod in others):  # others may replace one that failed
            self._stop_others(snapshot, 0, workloads)

    def _read_workloads(self, job_id: str) -> WorkloadReader:
        return WorkloadReader(self._client, objects.selector(job_id))

    def _finish_owner(self, snapshot: JobSnapshot, end: MainEnd) -> None:
        """Keep a server without pod failure policies from starting a main role again that has failed, or was cancelled."""
        conditions = (snapshot.owner.get("status") or {}).get("conditions") or ()
        finished = any(each.get("type") in ("Complete", "Failed") for each in conditions)
        if snapshot.owner["kind"] == "Job" and end[0] != "succeeded" and not finished:
            self._patch_if_exists("Job", snapshot.id, {"spec": {"activeDeadlineSeconds": 1}})

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
        if snapshot.owner["kind"] != "Job":
            return
        record, now = JobRecord.from_owner(snapshot.owner), time.time()
        pods = snapshot.pods_of(record.main)
        alive = [pod for pod in pods if not has_ended(pod, now)]
        if not alive or not self._end_pods(alive, 0):
            self._patch_if_exists("Job", snapshot.id, {"spec": {"activeDeadlineSeconds": 1}})  # its pod has not started
            return
        due_s = record.grace_s + TERMINATION_MARGIN_S + _SLACK_S
        self._limit_job(snapshot.owner, pods, due_s)

    def _stop_others(self, snapshot: JobSnapshot, delay_s: float, workloads: WorkloadReader) -> None:
        """End all pods that are not those of the main role, after a delay. Pods of Jobs are kept, for their logs."""
        main = JobRecord.from_owner(snapshot.owner).main
        for job in workloads.read("Job", snapshot.id):
            if job["metadata"]["name"] != snapshot.id and not (job.get("status") or {}).get("conditions"):
                self._stop_job(job, snapshot, delay_s)
        if set(JobRecord.from_owner(snapshot.owner).processes) == {main} and not snapshot.is_service:
            return
        for autoscaler in workloads.read("HorizontalPodAutoscaler", snapshot.id):
            self._client.delete("HorizontalPodAutoscaler", autoscaler["metadata"]["name"])
        for kind in ("Deployment", *(("StatefulSet",) if not delay_s else ())):
            for workload in workloads.read(kind, snapshot.id):
                if workload["spec"].get("replicas", 1) and workload["metadata"]["name"] != snapshot.id:
                    self._scale(kind, workload["metadata"]["name"], 0)

    def _stop_job(self, job: Manifest, snapshot: JobSnapshot, delay_s: float) -> None:
        """End the Job of a process that is not main, after a delay. Its number of retries is kept until then: main may still need it."""
        name, now = job["metadata"]["name"], time.time()
        pods = [pod for pod in snapshot.pods if pod_label(pod, "job-name") == name]
        if pods and delay_s and not self._keeps_pods():
            return  # the next client ends it, after main
        alive = [pod for pod in pods if not has_ended(pod, now)]
        if pods and not alive and not delay_s:
            self._patch_if_exists("Job", name, {"spec": {"activeDeadlineSeconds": 1}})  # keeps pods that have ended
        elif not pods or not self._end_pods(alive, delay_s):
            self._client.delete("Job", name)
        else:
            due_s = delay_s + JobRecord.from_owner(snapshot.owner).grace_s + TERMINATION_MARGIN_S + _SLACK_S
            self._limit_job(job, pods, due_s, retries=delay_s > 0)

    def _limit_job(self, job: Manifest, pods: Sequence[Manifest], due_s: float, *, retries: bool = False) -> None:
        """Keep a Job whose pods are ending from starting others. `due_s`: from now, after which it ends in any case."""
        limits: dict[str, Any] = {"activeDeadlineSeconds": deadline_after(job, due_s, time.time())}
        if not retries:
            limits["backoffLimit"] = last_backoff_limit(job, pods)
        self._patch_if_exists("Job", job["metadata"]["name"], {"spec": limits})

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

    def _end_pods(self, pods: Sequence[Manifest], delay_s: float) -> bool:
        """End pods as `_end_pod` does; return whether that was possible for all of them."""
        ended = [self._end_pod(pod, delay_s) for pod in pods]
        return all(ended)

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
        for kind in _OWNERS if _ID.fullmatch(job_id) else ():
            try:
                found = self._client.get(kind, job_id)
            except UnknownName:
                continue
            except UsageError:
                if kind != "RayJob":  # the operator may not be installed, or not be for this user
                    raise
                continue
            if (found["metadata"].get("labels") or {}).get(JOB) == job_id:
                return found | {"kind": kind}
        raise UnknownName(f"There is no job {job_id!r} of Kubernetes in the namespace {self._client.namespace}.")

    def _snapshot(self, job_id: str) -> JobSnapshot:
        owner = self._owner(job_id)
        pods = self._client.list("Pod", objects.selector(job_id))
        snapshot = JobSnapshot(owner, pods)
        record = JobRecord.from_owner(owner)
        missing = {} if main_end(snapshot, record, time.time()) else missing_processes(snapshot, record)
        workloads = self._workloads(job_id, missing) if missing else []
        waiting = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"]
        names = [each["metadata"]["name"] for each in (*workloads, *waiting)]
        if waiting or not pods or record.main in missing:
            names.insert(0, job_id)
        events = [event for name in names for event in self._events(name)]
        return replace(snapshot, events=events, workloads=workloads)

    def _workloads(self, job_id: str, missing: Mapping[str, Sequence[int]]) -> Sequence[Manifest]:
        """Return the objects that should have created the missing pods: those of the first few of each role. The owner is not one."""
        names = {
            objects.object_name(job_id, role, index)
            for role, indices in missing.items()
            for index in (None, *indices[:_EXPLAINED])
        }
        found: list[Manifest] = []
        for kind in _WORKLOADS:
            with contextlib.suppress(UsageError):  # they only explain; the user may not be allowed to read them
                found += self._client.list(kind, objects.selector(job_id))
        return [each for each in found if each["metadata"]["name"] in names]

    def _events(self, name: str) -> Sequence[Manifest]:
        try:
            found = self._client.list("Event", fields=f"involvedObject.name={name}")
        except UsageError:  # events only explain; the user may not be allowed to read them
            return []
        return sorted(found, key=lambda event: seconds(event.get("lastTimestamp") or event.get("eventTime")))

    def _list(self, kind: str) -> Sequence[Manifest]:
        try:
            found = self._client.list(kind, f"{objects.MANAGED_BY}={objects.LUDUS}", connect_s=LIST_CONNECT_S)
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


class WorkloadReader:
    """Reads the objects of one job or of all, each kind once. `selector`: their labels."""

    def __init__(self, client: KubernetesClient, selector: str) -> None:
        self._client, self._selector = client, selector
        self._found: dict[str, Sequence[Manifest]] = {}

    def read(self, kind: str, job_id: str) -> list[Manifest]:
        """Return the objects of a kind that belong to a job."""
        if kind not in self._found:
            self._found[kind] = self._client.list(kind, self._selector)
        return [each for each in self._found[kind] if pod_label(each, JOB) == job_id]


# -- limits of Jobs -----------------------------------------------------------------------------------------------------------


def last_backoff_limit(job: Manifest, pods: Sequence[Manifest]) -> int:
    """Return the lowest number of retries with which the controller lets the live pods of a Job end by themselves.

    Controllers from 1.22 on delete them at once, with exit code and log, if there were more failures, or as many restarts by the kubelet.
    """
    status, policy = job.get("status") or {}, "podFailurePolicy" in job["spec"]
    failed = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Failed" and not (policy and disrupted(pod))]
    restarts = sum(
        int(container.get("restartCount", 0))
        for pod in pods
        for container in (pod.get("status") or {}).get("containerStatuses") or ()
        if pod not in failed
    )
    return max(int(status.get("failed") or 0), len(failed), restarts + 1 if restarts else 0)


def deadline_after(job: Manifest, delay_s: float, now: float) -> int:
    """Return the `activeDeadlineSeconds` by which a Job ends `delay_s` from now: it counts from its start."""
    started = (job.get("status") or {}).get("startTime") or job["metadata"].get("creationTimestamp")
    return max(1, int(now - seconds(started) + delay_s))


def _unfinished_spec(manifest: Manifest) -> dict[str, Any]:
    """Return what ends or stops an owner whose submission is not completed."""
    stops: Mapping[str, dict[str, Any]] = {
        "Job": {"activeDeadlineSeconds": SUBMIT_S},
        "Deployment": {"replicas": 0},
        "RayJob": {"suspend": True},
    }
    return stops[manifest["kind"]]


# -- places -------------------------------------------------------------------------------------------------------------------


def remember_place(context: str, namespace: str) -> None:
    """Store that this user has jobs there, so that `ludus jobs` asks this cluster without --on."""
    known = remembered_places()
    if (context, namespace) not in known:
        _write_places([*known, (context, namespace)])


def forget_place(context: str, namespace: str) -> None:
    """Store that there are no jobs any more."""
    known = remembered_places()
    if (context, namespace) in known:
        _write_places([place for place in known if place != (context, namespace)])


def _write_places(places: Sequence[tuple[str, str]]) -> None:
    with contextlib.suppress(OSError, UsageError):  # it only saves an option later
        home = job_dir.make_private(job_dir.state_dir())
        replace_json(home / _PLACES, [*map(list, places)], mode=0o600)


def remembered_places() -> list[tuple[str, str]]:
    """Return (context, namespace) of the clusters to which this user has submitted jobs from this machine."""
    try:
        data = json.loads((Path(job_dir.state_dir()) / _PLACES).read_text(encoding="utf-8"))
        return [(str(context), str(namespace)) for context, namespace in data]
    except (OSError, ValueError, TypeError):
        return []
