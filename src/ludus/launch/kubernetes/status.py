"""Status of a job from its Kubernetes objects and their events. Pure functions: the time is passed in."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ludus.launch.job import Job, JobState, JobStatus, ProcessState, ProcessStatus, RoleRestart
from ludus.launch.kubernetes.objects import CANCELLED, CANCELLED_AT, INCOMPLETE, INDEX, JOB, RECORD, ROLE, Manifest
from ludus.launch.kubernetes.pod import KILLED_CODES, container_name
from ludus.launch.kubernetes.pod_process import EXIT_CODE
from ludus.process.children import describe_exit

INTERRUPTED, KILLED = 130, 137
NOW, GRACEFULLY = "now", "gracefully"
"""Values of the annotation `CANCELLED`."""

SUBMIT_S = 300
"""Seconds after which a job whose submission was killed half way is ended."""

MainEnd = tuple[JobState, int, str]
"""How a main role ended: state, exit code, reason."""

_PULL = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable")
_STARTING = ("ContainerCreating", "PodInitializing", "")
_CRASH_LOOP = "CrashLoopBackOff"
_RAY_ACTIVE = ("Initializing", "Running", "Waiting", "Suspending", "Retrying")
_RAY_OVER = ("Complete", "Failed", "ValidationFailed")
"""States of a RayJob's deployment. The state of Ray's own job may be ahead of them."""
_RAY_EXIT = re.compile(r"exit code (-?\d+)")
_LONGEST_LINE = 300
_GONE_S = 60.0
"""Seconds after its grace period when a pod that is being deleted counts as gone: its node does not answer."""

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint by which an administrator tells that a node is off, so that its pods are removed."""

_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedCreate", "FailedCreatePodSandBox", "ProvisioningFailed")
"""Reasons of events that explain why a pod does not start."""


# -- record -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobRecord:
    """What a job's owner says about the job, in an annotation. `hosts`: processes in a container of another one: `ray-0` → `main-0`.

    `scaled`: roles whose number of pods may change.
    """

    name: str
    main: str
    restart: RoleRestart = "never"
    processes: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[str, ...] = ()
    place: str = ""
    grace_s: float = 30.0
    submitted_at: float = 0.0
    ttl_s: int = 86_400

    def to_json(self) -> str:
        return json.dumps({**vars(self), "processes": dict(self.processes), "hosts": dict(self.hosts)}, ensure_ascii=False)

    @staticmethod
    def of(job: Job, submitted_at: float = 0.0, **options: Any) -> JobRecord:
        main = next(role for role in job.roles if role.name == job.main)
        processes = {role.name: role.count for role in job.roles}
        return JobRecord(
            job.name, job.main, main.restart, processes, place=job.place, grace_s=job.grace_s, submitted_at=round(submitted_at, 3), **options
        )  # fmt: skip

    @staticmethod
    def from_owner(owner: Manifest) -> JobRecord:
        """Read the record of a job; what is missing in it, as in objects of other versions, gets a default."""
        metadata = owner["metadata"]
        text = (metadata.get("annotations") or {}).get(RECORD, "{}")
        try:
            data = json.loads(text)
            known = {key: value for key, value in data.items() if key in JobRecord.__dataclass_fields__}
        except (ValueError, AttributeError):
            known = {}
        role = str((metadata.get("labels") or {}).get(ROLE, "main"))
        defaults = {"name": metadata["name"], "main": role, "processes": {role: 1}}
        record = JobRecord(**{**defaults, **known, "scaled": tuple(known.get("scaled", ()))})
        return record if record.submitted_at else replace(record, submitted_at=seconds(metadata.get("creationTimestamp")))


@dataclass(frozen=True)
class JobSnapshot:
    """Objects of a job at one time. `owner`: its Job, Deployment or RayJob.

    `workloads`: Jobs, Deployments and StatefulSets of roles that lack pods. `events`: of its pods, its owner and these.
    """

    owner: Manifest
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    workloads: Sequence[Manifest] = ()

    @property
    def id(self) -> str:
        return str(self.owner["metadata"]["labels"][JOB])

    @property
    def cancelled(self) -> str:
        return str((self.owner["metadata"].get("annotations") or {}).get(CANCELLED, ""))

    @property
    def is_service(self) -> bool:
        return bool(self.owner["kind"] == "Deployment")

    @property
    def is_ray_job(self) -> bool:
        return bool(self.owner["kind"] == "RayJob")

    def pods_of(self, role: str, index: int | None = None) -> list[Manifest]:
        """Return the pods of a role, or of one of its processes, oldest first."""
        found = [
            pod
            for pod in self.pods
            if pod_label(pod, ROLE) == role and (index is None or pod_label(pod, INDEX) in ("", str(index)))
        ]
        return sorted(found, key=lambda pod: (seconds(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]))


# -- job ----------------------------------------------------------------------------------------------------------------------


def job_status(snapshot: JobSnapshot, namespace: str, now: float) -> JobStatus:
    """Return the status of a job. It is over when its main role has ended for good and all its other pods are gone."""
    record = JobRecord.from_owner(snapshot.owner)
    processes = tuple(_processes(snapshot, record, now))
    logs = f"kubectl logs -n {namespace} -l {JOB}={snapshot.id} --all-containers --prefix"
    status = JobStatus(snapshot.id, record.name, "pending", None, processes, "", logs, record.submitted_at, record.place)
    end = main_end(snapshot, record, now)
    if end is None:
        return _unfinished(status, snapshot, record, now)
    *_, reason = end
    active = sorted({process.name for process in processes if process.state != "ended"})
    if active:
        why = f"{reason}; " if reason else ""
        return replace(status, state="running", reason=f"{why}waiting for the end of {_some(active)}")
    return final_status(status, end)


def final_status(status: JobStatus, end: MainEnd) -> JobStatus:
    """Return the status of a job whose main role has ended so, when all its other pods are gone."""
    state, code, reason = end
    processes = tuple(replace(process, state="ended") for process in status.processes)
    return replace(status, state=state, exit_code=code, reason=reason, processes=processes)


def main_end(snapshot: JobSnapshot, record: JobRecord, now: float) -> MainEnd | None:
    """Return how the main role ended for good: state, exit code and reason; None while it runs, or may be started again."""
    pods = snapshot.pods_of(record.main)
    newest = pods[-1] if pods else None
    alive = [pod for pod in pods if not has_ended(pod, now)]
    if snapshot.cancelled:
        if alive or (snapshot.is_ray_job and _operator_state(snapshot.owner) in _RAY_ACTIVE):
            return None
        known = None if newest is None or _is_unknown(newest) else exit_code(newest)
        return (
            "cancelled",
            known if known is not None else KILLED if snapshot.cancelled == NOW else INTERRUPTED,
            "it was cancelled",
        )
    if snapshot.is_service:
        return None
    if snapshot.is_ray_job:
        return _ray_job_end(snapshot.owner)
    if condition := _condition(snapshot.owner, "Complete"):
        return "succeeded", 0, ""
    if alive:
        return None
    if condition := _condition(snapshot.owner, "Failed"):
        reason = _end_reason(newest, record.main) if newest is not None else ""
        return (
            "failed",
            (None if newest is None else exit_code(newest)) or 1,
            reason or f"{condition.get('reason')}: {condition.get('message')}",
        )
    if newest is None or (code := exit_code(newest)) is None:
        return None
    if code == 0:
        return "succeeded", 0, ""
    if not _is_final(code, record.restart, newest):
        return None
    return "failed", code, _end_reason(newest, record.main)


def is_expired(snapshot: JobSnapshot, now: float) -> bool:
    """Return whether an owner is due to be deleted by a client: Kubernetes does that only with Jobs.

    Those are services and RayJobs that ended more than their `ttl_s` ago, and owners whose submission was not completed.
    """
    if snapshot.owner["kind"] == "Job" or any(not has_ended(pod, now) for pod in snapshot.pods):
        return False
    metadata, record = snapshot.owner["metadata"], JobRecord.from_owner(snapshot.owner)
    annotations = metadata.get("annotations") or {}
    if INCOMPLETE in annotations:
        return now > record.submitted_at + SUBMIT_S
    if main_end(snapshot, record, now) is None:
        return False
    return now >= _end_time(snapshot.owner) + record.ttl_s


def _end_time(owner: Manifest) -> float:
    """Return when an owner that is not a Job was cancelled or ended; when it was created if that is not known."""
    metadata = owner["metadata"]
    if ended := (owner.get("status") or {}).get("endTime"):
        return seconds(ended)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return float(metadata["annotations"][CANCELLED_AT])
    return seconds(metadata.get("creationTimestamp"))


def _ray_job_end(owner: Manifest) -> MainEnd | None:
    """Return how a RayJob ended, from what the operator wrote. Ray's message has the exit code."""
    status, state = owner.get("status") or {}, _operator_state(owner)
    if state not in _RAY_OVER:
        return None
    if status.get("jobStatus") == "SUCCEEDED" and state == "Complete":
        return "succeeded", 0, ""
    message = str(status.get("message") or status.get("reason") or status.get("jobStatus") or state)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    found = _RAY_EXIT.search(lines[0]) if lines else None
    if found is None:
        return "failed", 1, " ".join(lines)[:_LONGEST_LINE]
    code = int(found[1])
    code = 128 - code if code < 0 else code
    last = f": {lines[-1][:_LONGEST_LINE]}" if len(lines) > 1 else ""
    return "failed", code or 1, f"main-0 ended with code {code}{last}"


def _operator_state(owner: Manifest) -> str:
    """Return the state of a RayJob's deployment; "" before the operator has seen it."""
    return str((owner.get("status") or {}).get("jobDeploymentStatus") or "")


def _is_final(code: int, restart: RoleRestart, pod: Manifest) -> bool:
    """Return whether a failed main role is not started again. A server without pod failure policies would start it again."""
    if restart == "never":
        return True
    return restart == "when-killed" and code not in KILLED_CODES and not _disruption(pod)


def _unfinished(status: JobStatus, snapshot: JobSnapshot, record: JobRecord, now: float) -> JobStatus:
    mains = [process for process in status.processes if process.role == record.main]
    running = any(process.state == "running" for process in mains)
    problems = _problems(snapshot, record, now)
    if snapshot.cancelled:
        problems = ["it is being cancelled", *problems]
    elif not running:
        pods = snapshot.pods_of(record.main)
        if not pods:
            problems = [_creation_problem(snapshot, record.main) or _absence(snapshot.owner), *problems]
        ended = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Failed"]
        if ended and not snapshot.is_service:
            problems = [f"{_end_reason(ended[-1], record.main)}; it is started again", *problems]
    return replace(status, state="running" if running else "pending", reason="; ".join(problems))


def missing_processes(snapshot: JobSnapshot, record: JobRecord) -> dict[str, list[int]]:
    """Return role → indices of its processes without a pod; those in a container of another process are not counted."""
    found: dict[str, list[int]] = {}
    for role, count in record.processes.items():
        indices = [index for index in range(count) if f"{role}-{index}" not in record.hosts]
        pods = snapshot.pods_of(role)
        if role in record.scaled or (pods and not pod_label(pods[0], INDEX)):
            missing = indices[len(pods) :]
        else:
            missing = [index for index in indices if not snapshot.pods_of(role, index)]
        if missing:
            found[role] = missing
    return found


def _creation_problem(snapshot: JobSnapshot, role: str) -> str:
    """Return why the controller could not create a pod of a role: a quota, an admission controller, a missing service account."""
    message = _creation_message(snapshot, role)
    if not message:
        return ""
    if "exceeded quota" in message:
        return f"the quota of the namespace does not allow its pod: {_after_forbidden(message)}"
    return f"its pod cannot be created: {_after_forbidden(message)}"


def _absence(owner: Manifest) -> str:
    """Return why the main role of a job has no pod yet."""
    if INCOMPLETE in (owner["metadata"].get("annotations") or {}):
        return "its submission is not complete"
    if owner["kind"] == "RayJob":
        state = _operator_state(owner)
        return f"the KubeRay operator starts its Ray cluster ({state})" if state else "the KubeRay operator has not seen it yet"
    return "its pod is being created"


def _creation_message(snapshot: JobSnapshot, role: str) -> str:
    """Return the message of the last event of a role's objects, or of the condition by which a Deployment reports it."""
    owners = [snapshot.owner, *snapshot.workloads]
    mine = [owner for owner in owners if pod_label(owner, ROLE) == role]
    for owner in mine:
        if condition := _condition(owner, "ReplicaFailure"):
            return str(condition.get("message") or condition.get("reason"))
    names = [str(owner["metadata"]["name"]) for owner in mine]
    messages = [
        str(event.get("message", ""))
        for event in snapshot.events
        if event.get("reason") == "FailedCreate" and (event.get("involvedObject") or {}).get("name") in names
    ]
    return messages[-1] if messages else ""


def _after_forbidden(message: str) -> str:
    """Error creating: pods "x" is forbidden: exceeded quota: … → exceeded quota: …"""
    return message.partition(" is forbidden: ")[2] or message.removeprefix("Error creating: ")


def _problems(snapshot: JobSnapshot, record: JobRecord, now: float) -> list[str]:
    """Return a sentence for each pod that does not start, keeps failing or does not answer; equal ones once."""
    found: dict[str, list[str]] = {}
    for role, indices in missing_processes(snapshot, record).items():
        if role != record.main and (problem := _creation_problem(snapshot, role)):
            found.setdefault(problem, []).extend(f"{role}-{index}" for index in indices)
    for role in record.processes:
        pods = snapshot.pods_of(role)
        for number, pod in enumerate(pods):
            newest = not any(pod_label(later, INDEX) == pod_label(pod, INDEX) for later in pods[number + 1 :])
            if newest or role in record.scaled:
                problem = pod_problem(pod, snapshot.events, now)
                if problem:
                    found.setdefault(problem, []).append(process_name(pod))
    return [f"{_some(names)}: {problem}" for problem, names in found.items()]


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# -- pods ---------------------------------------------------------------------------------------------------------------------


def _processes(snapshot: JobSnapshot, record: JobRecord, now: float) -> list[ProcessStatus]:
    found: dict[str, ProcessStatus] = {}
    for role, count in record.processes.items():
        pods = snapshot.pods_of(role)
        if role in record.scaled or (pods and not pod_label(pods[0], INDEX)):
            active = [pod for pod in pods if not has_ended(pod, now)]
            statuses = [_process([pod], role, index, now) for index, pod in enumerate(active)]
            ending = bool(snapshot.cancelled) or main_end(snapshot, record, now) is not None
            statuses += [ProcessStatus(role, index, "ended" if ending else "pending") for index in range(len(active), count)]
        else:
            statuses = [_process(snapshot.pods_of(role, index), role, index, now) for index in range(count)]
        found |= {process.name: process for process in statuses}
    for name, host in record.hosts.items():
        if name in found and host in found:
            with_it = found[host]
            found[name] = replace(found[name], state=with_it.state, host=with_it.host)
    over = main_end(snapshot, record, now) is not None
    if over:  # a process without a pod was not started, or its pod is deleted
        indices = {(pod_label(pod, ROLE), pod_label(pod, INDEX)) for pod in snapshot.pods}
        for name, process in found.items():
            absent = (process.role, str(process.index)) not in indices and process.role not in record.scaled
            if process.state in ("pending", "waiting") and absent and name not in record.hosts:
                found[name] = replace(process, state="ended")
    return list(found.values())


def _process(pods: Sequence[Manifest], role: str, index: int, now: float) -> ProcessStatus:
    """Return the status of a process from its pods, oldest first: a Job replaces a pod that failed."""
    if not pods:
        return ProcessStatus(role, index, "pending")
    newest = pods[-1]
    restarts = len(pods) - 1 + sum(restart_count(pod) for pod in pods)
    codes = [code for code in map(exit_code, pods) if code is not None]
    host = str(newest["spec"].get("nodeName") or "")
    return ProcessStatus(role, index, _process_state(newest, now), codes[-1] if codes else None, restarts, None, host)


def _process_state(pod: Manifest, now: float) -> ProcessState:
    if has_ended(pod, now):
        return "ended"
    state = container_state(pod)
    if "running" in state:
        return "running"
    if "terminated" in state or state.get("waiting", {}).get("reason") == _CRASH_LOOP:
        return "waiting"
    return "pending"


def _is_lost(pod: Manifest, now: float) -> bool:
    """Return whether a pod has been deleted and its kubelet does not confirm it. Such a pod stays until its Node object is deleted.

    From 1.29 on, a Job with a pod failure policy starts no other pod before.
    """
    deleted = pod["metadata"].get("deletionTimestamp")  # includes the grace period
    states = [each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or ()]
    ended = bool(states) and all("terminated" in state for state in states)
    return bool(deleted) and now > seconds(deleted) + _GONE_S and bool(pod["spec"].get("nodeName")) and not ended


def has_ended(pod: Manifest, now: float) -> bool:
    """Return whether all containers of a pod have ended for good. The phase alone may be ahead of them."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    if (deleted := metadata.get("deletionTimestamp")) and now > seconds(deleted) + _GONE_S:
        return True
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    if metadata.get("deletionTimestamp") and states and all("terminated" in state for state in states):
        return True  # its volumes may take a while
    # Kubelets before 1.22 report a container that they have removed as `waiting`. A phase `Failed` is final.
    return status.get("phase") in ("Succeeded", "Failed") and all("running" not in state for state in states)


def exit_code(pod: Manifest) -> int | None:
    """Return the exit code of the command of the last container that ended; None if none did."""
    ended = _termination(pod)
    if ended is None:
        return None
    message = str(ended.get("message") or "")
    if message.startswith(EXIT_CODE):
        with contextlib.suppress(ValueError):
            return int(message.removeprefix(EXIT_CODE).split()[0])
    return int(ended.get("exitCode", 1))


def _is_unknown(pod: Manifest) -> bool:
    """Return whether the kubelet has removed the container before it read its exit code. It then reports 137."""
    ended = _termination(pod)
    return ended is not None and ended.get("reason") == "ContainerStatusUnknown"


def _termination(pod: Manifest) -> Mapping[str, Any] | None:
    """Return how the last container that ended did; None if none did."""
    status = _container_status(pod)
    return (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated")


def restart_count(pod: Manifest) -> int:
    return int(_container_status(pod).get("restartCount", 0))


def container_state(pod: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _container_status(pod).get("state") or {}
    return found


def job_container(pod: Manifest) -> Mapping[str, Any]:
    """Return the container of the pod's role. Others may have been injected before or after it, such as a proxy of a service mesh."""
    found: Sequence[Mapping[str, Any]] = pod["spec"]["containers"]
    name = container_name(pod_label(pod, ROLE))
    return next((each for each in found if each["name"] == name), found[0])


def _container_status(pod: Manifest) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or ()
    name = job_container(pod)["name"]
    return next((each for each in found if each["name"] == name), {})


def pod_problem(pod: Manifest, events: Sequence[Manifest], now: float) -> str:
    """Return why a pod does not run, or will not for long; "" if it does."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Failed", "Succeeded"):
        return ""
    if _is_lost(pod, now):
        where = pod["spec"].get("nodeName") or "its node"
        return f"its node {where} does not answer; delete the node or taint it {OUT_OF_SERVICE}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"no node can run it: {condition.get('message') or condition.get('reason')}"
    waiting = container_state(pod).get("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in _PULL:
        return f"its image {job_container(pod)['image']} cannot be pulled: {message or reason}"
    if reason == _CRASH_LOOP:
        return f"it keeps failing and is restarted with growing delays ({_ended_reason(pod)})"
    if reason not in _STARTING:
        return f"its container cannot be started: {message or reason}"
    if waiting or not status.get("containerStatuses"):
        return _event_problem(pod, events)
    return ""


def _event_problem(pod: Manifest, events: Sequence[Manifest]) -> str:
    name = pod["metadata"]["name"]
    mine = [
        event for event in events if (event.get("involvedObject") or {}).get("name") == name and event.get("reason") in _EVENTS
    ]
    return str(mine[-1].get("message", "")) if mine else ""


def _end_reason(pod: Manifest, role: str) -> str:
    return f"{role}-0: {why}" if (why := _disruption(pod)) else f"{role}-0 {_ended_reason(pod)}"


def _ended_reason(pod: Manifest) -> str:
    """Return how the last container of a pod ended, with its last line of output."""
    ended = _termination(pod)
    if ended is None:
        return str((pod.get("status") or {}).get("message") or (pod.get("status") or {}).get("reason") or "it ended")
    if ended.get("reason") == "OOMKilled":
        limit = ((job_container(pod).get("resources") or {}).get("limits") or {}).get("memory", "")
        return f"used more memory than its limit of {limit} and was killed (OOMKilled)"
    code = exit_code(pod)
    if ended.get("reason") in ("ContainerCannotRun", "StartError"):
        return f"could not be started: {ended.get('message')}"
    text = describe_exit(128 - code if code is not None and code > 128 and code != INTERRUPTED else code or 0)
    message = str(ended.get("message") or "")
    last = "" if message.startswith(EXIT_CODE) else next((line for line in reversed(message.splitlines()) if line.strip()), "")
    return f"ended with {text}{': ' if last else ''}{last.strip()[:_LONGEST_LINE]}"


def disrupted(pod: Manifest) -> bool:
    """Return whether the cluster has ended a pod, which a pod failure policy does not count as a failure."""
    return _condition(pod, "DisruptionTarget") is not None


def _disruption(pod: Manifest) -> str:
    """Return why the cluster ended a pod: eviction, preemption, loss of its node; "" if it did not."""
    status = pod.get("status") or {}
    where = pod["spec"].get("nodeName") or "its node"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"the cluster ended it on {where}: {condition.get('message') or condition.get('reason')}"
    if status.get("reason") == "Evicted":
        return f"it was evicted from {where}: {status.get('message') or ''}".rstrip(": ")
    if status.get("reason") in ("NodeLost", "NodeAffinity", "Shutdown", "Terminated", "Preempting", "NodeShutdown"):
        return f"it was lost with {where}: {status.get('message') or status.get('reason')}"
    return ""


# -- fields -------------------------------------------------------------------------------------------------------------------


def pod_label(pod: Manifest, name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def process_name(pod: Manifest) -> str:
    index = pod_label(pod, INDEX)
    return f"{pod_label(pod, ROLE)}-{index}" if index else str(pod["metadata"]["name"])


def seconds(timestamp: object) -> float:
    """Return the seconds of a time of the API: 2026-11-18T13:00:00Z."""
    text = re.sub(r"(\.\d{6})\d+", r"\1", str(timestamp or ""))
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _condition(manifest: Manifest, kind: str) -> Mapping[str, Any] | None:
    conditions: Sequence[Mapping[str, Any]] = (manifest.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind and each.get("status") == "True"), None)
