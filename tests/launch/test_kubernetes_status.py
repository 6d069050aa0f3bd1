"""Status of jobs on Kubernetes, from objects that a real cluster (1.20) returned, and variants of them as later versions write them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ludus.launch.job import JobStatus
from ludus.launch.kubernetes.objects import CANCELLED, RECORD
from ludus.launch.kubernetes.status import (
    JobSnapshot,
    container_state,
    exit_code,
    has_ended,
    job_container,
    job_status,
    restart_count,
    seconds,
)

RECORDED = Path(__file__).parent / "recorded" / "kubernetes"
NOW = seconds("2026-11-18T15:00:00Z")


def snapshot(name: str) -> JobSnapshot:
    data = json.loads((RECORDED / f"{name}.json").read_text())
    return JobSnapshot(data["owner"], data["pods"], data["events"])


def status_of(found: JobSnapshot) -> JobStatus:
    return job_status(found, "games", NOW)


@pytest.mark.parametrize(
    ("name", "state", "code", "reason"),
    [
        ("succeeded", "succeeded", 0, ""),
        ("failed", "failed", 2, "main-0 ended with code 2: ludus: Unknown key"),
        (
            "oom-killed", "pending", None,
            "main-0 used more memory than its limit of 128Mi and was killed (OOMKilled); it is started again",
        ),
        ("unschedulable", "pending", None, "main-0: no node can run it: 0/2 nodes are available: 2 Insufficient cpu."),
        (
            "image-cannot-be-pulled", "pending", None,
            'main-0: its image localhost/no-such-image:1 cannot be pulled: Container image "localhost/no-such-image:1" is not present with pull policy of Never',
        ),
        (
            "quota", "pending", None,
            "the quota of the namespace does not allow its pod: exceeded quota: small, requested: cpu=50m, used: cpu=50m, limited: cpu=10m",
        ),
        ("crash-loop", "running", None, "worker-0: it keeps failing and is restarted with growing delays (ended with code 1: no model)"),
    ],
)  # fmt: skip
def test_a_recorded_job_has_its_state_and_reason(name: str, state: str, code: int | None, reason: str) -> None:
    status = status_of(snapshot(name))
    assert (status.state, status.exit_code, status.reason) == (state, code, reason)
    assert status.logs.startswith("kubectl logs -n games -l ludus.dev/job=recorded-")


def test_the_reason_of_a_registry_is_shown() -> None:
    reason = status_of(snapshot("image-cannot-be-pulled-from-registry")).reason
    assert reason.startswith("main-0: its image registry.example.org/no-such-image:1 cannot be pulled: ")
    assert reason.endswith("connect: connection refused")


def test_a_process_has_its_node_exit_code_and_restarts() -> None:
    (process,) = status_of(snapshot("succeeded")).processes
    assert (process.role, process.index, process.state, process.exit_code, process.restarts) == ("main", 0, "ended", 0, 0)
    assert process.host.startswith("node")
    worker, main = status_of(snapshot("crash-loop")).processes
    assert (worker.state, worker.exit_code) == ("waiting", 1)
    assert worker.restarts >= 1
    assert main.state == "running"


# -- what later versions write ------------------------------------------------------------------------------------------------


def changed(name: str, **status: Any) -> JobSnapshot:
    """The snapshot with another status of its newest main pod."""
    found = copy.deepcopy(snapshot(name))
    found.pods[-1]["status"] |= status
    return found


def with_owner(found: JobSnapshot, conditions: list[dict[str, Any]], annotations: dict[str, str] | None = None) -> JobSnapshot:
    owner = copy.deepcopy(found.owner)
    owner["status"] = {"conditions": conditions}
    owner["metadata"]["annotations"] = {**owner["metadata"].get("annotations", {}), **(annotations or {})}
    return JobSnapshot(owner, found.pods, found.events)


def ended(code: int, **terminated: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "restartCount": 0, "state": {"terminated": {"exitCode": code, **terminated}}, "lastState": {}}]


def test_an_evicted_pod_is_replaced() -> None:
    message = "The node was low on resource: memory."
    found = with_owner(changed("succeeded", phase="Failed", reason="Evicted", message=message, containerStatuses=[]), [])
    status = status_of(found)
    assert status.state == "pending"
    assert status.reason == f"main-0: it was evicted from {status.processes[0].host}: {message}; it is started again"


def test_a_drained_node_is_no_failure_of_the_training() -> None:
    """The training has saved and ended with 130; the eviction API has marked the pod."""
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
    }
    found = with_owner(changed("succeeded", phase="Failed", conditions=[target], containerStatuses=ended(130)), [])
    status = status_of(found)
    assert status.state == "pending"
    assert "Eviction API: evicting; it is started again" in status.reason


@pytest.mark.parametrize("code", [130, 137, 139, 143])
def test_a_killed_training_is_waited_for(code: int) -> None:
    assert status_of(with_owner(changed("succeeded", phase="Failed", containerStatuses=ended(code)), [])).state == "pending"


def test_a_job_that_kubernetes_gave_up_has_failed() -> None:
    condition = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "Job has reached the specified backoff limit",
    }
    status = status_of(
        with_owner(changed("succeeded", phase="Failed", containerStatuses=ended(137, reason="OOMKilled")), [condition])
    )
    assert (status.state, status.exit_code) == ("failed", 137)
    assert status.reason == "main-0 used more memory than its limit of 128Mi and was killed (OOMKilled)"
    nothing = JobSnapshot(with_owner(snapshot("succeeded"), [condition]).owner)
    assert status_of(nothing).reason == "BackoffLimitExceeded: Job has reached the specified backoff limit"


def test_a_signal_is_named() -> None:
    condition = {"type": "Failed", "status": "True"}
    status = status_of(with_owner(changed("succeeded", phase="Failed", containerStatuses=ended(139)), [condition]))
    assert status.reason == "main-0 ended with signal SIGSEGV"


def test_a_phase_that_is_ahead_of_its_containers_is_not_the_end() -> None:
    running = [{"name": "main", "restartCount": 0, "state": {"running": {}}, "lastState": {}}]
    found = changed("succeeded", phase="Failed", reason="DeadlineExceeded", containerStatuses=running)
    assert not has_ended(found.pods[-1], NOW)


def test_a_pod_on_a_lost_node_counts_as_gone_after_a_while() -> None:
    found = changed("succeeded", phase="Running", containerStatuses=[{"name": "main", "state": {"running": {}}}])
    pod = found.pods[-1]
    pod["metadata"]["deletionTimestamp"] = "2026-11-18T15:00:00Z"
    assert not has_ended(pod, NOW + 30)
    assert has_ended(pod, NOW + 61)


def test_a_lost_node_is_named_with_what_to_do() -> None:
    """A Job with a pod failure policy starts no other pod while the one of a dead node is terminating."""
    found = with_owner(changed("succeeded", phase="Running", containerStatuses=[{"name": "main", "state": {"running": {}}}]), [])
    pod = found.pods[-1]
    pod["spec"]["nodeName"] = "node7"
    pod["metadata"]["deletionTimestamp"] = "2026-11-18T14:59:30Z"
    assert status_of(found).state == "running"
    pod["metadata"]["deletionTimestamp"] = "2026-11-18T14:58:00Z"
    status = status_of(found)
    assert status.state == "pending"
    assert status.reason == (
        "main-0: its node node7 does not answer; delete the node or taint it node.kubernetes.io/out-of-service"
    )


def test_a_deleted_pod_has_ended_with_its_containers() -> None:
    found = changed("succeeded", phase="Running", containerStatuses=ended(0))
    pod = found.pods[-1]
    assert not has_ended(pod, NOW)
    pod["metadata"]["deletionTimestamp"] = "2026-11-18T15:00:00Z"
    assert has_ended(pod, NOW)


def test_a_deleted_pod_whose_container_the_kubelet_has_removed_has_ended() -> None:
    """As Kubernetes 1.20 reports a pod that ran, for up to a minute, until it deletes the pod."""
    pod = copy.deepcopy(snapshot("failed").pods[-1])
    pod["metadata"]["deletionTimestamp"] = "2026-11-18T15:00:45Z"
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    assert has_ended(pod, NOW)
    pod["status"]["phase"] = "Pending"
    assert not has_ended(pod, NOW)


def test_a_cancelled_job_has_the_exit_code_of_its_training() -> None:
    found = with_owner(
        changed("succeeded", phase="Failed", reason="DeadlineExceeded", containerStatuses=ended(130)),
        [],
        {CANCELLED: "gracefully"},
    )
    assert (status_of(found).state, status_of(found).exit_code) == ("cancelled", 130)
    (removed,) = ended(137, reason="ContainerStatusUnknown")
    removed |= {"state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": removed["state"]}
    unread = changed("succeeded", phase="Failed", containerStatuses=[removed])
    assert status_of(with_owner(unread, [], {CANCELLED: "gracefully"})).exit_code == 130, "the kubelet does not know the code"
    killed = JobSnapshot(with_owner(found, [], {CANCELLED: "now"}).owner)
    assert (status_of(killed).state, status_of(killed).exit_code) == ("cancelled", 137)


def test_the_exit_code_of_a_role_that_must_not_be_restarted_is_in_its_message() -> None:
    pod = changed("succeeded", containerStatuses=ended(0, message="exit code 3")).pods[-1]
    assert exit_code(pod) == 3
    assert exit_code(changed("succeeded", containerStatuses=ended(75, message="exit code 0")).pods[-1]) == 0
    assert exit_code(changed("succeeded", containerStatuses=ended(4, message="exit code 3 was seen\nelsewhere")).pods[-1]) == 3
    assert exit_code(changed("succeeded", containerStatuses=[]).pods[-1]) is None


def test_the_state_of_a_pod_is_that_of_its_role_and_not_of_an_injected_proxy() -> None:
    found = changed("failed", containerStatuses=[
        {"name": "istio-proxy", "restartCount": 4, "state": {"running": {}}, "lastState": {}},
        *ended(2, message="no such key"),
    ])  # fmt: skip
    pod = found.pods[-1]
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "proxy"})
    assert (exit_code(pod), restart_count(pod), "terminated" in container_state(pod)) == (2, 0, True)
    assert job_container(pod)["name"] == "main"
    pod["status"]["containerStatuses"] = pod["status"]["containerStatuses"][:1]
    assert (exit_code(pod), container_state(pod)) == (None, {}), "the proxy has started and the role has not"


def test_a_mount_that_fails_is_explained_by_its_event() -> None:
    waiting = [{"name": "main", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": {}}]
    found = with_owner(changed("succeeded", phase="Pending", containerStatuses=waiting), [])
    event = {
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "runs": no such export',
        "involvedObject": {"name": found.pods[-1]["metadata"]["name"]},
    }
    assert status_of(found).reason == ""
    assert status_of(JobSnapshot(found.owner, found.pods, [event])).reason == f"main-0: {event['message']}"


def test_a_ray_job_has_the_state_that_its_operator_wrote() -> None:
    owner = copy.deepcopy(snapshot("succeeded").owner) | {"kind": "RayJob"}
    said = "Job entrypoint command failed with exit code 2, last available logs (truncated to 20,000 chars):\nusage\nludus: no such key\n"
    for status, expected in (
        ({"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}, ("succeeded", 0, "")),
        (
            {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "message": said},
            ("failed", 2, "main-0 ended with code 2: ludus: no such key"),
        ),
        ({"jobDeploymentStatus": "ValidationFailed", "message": "no entrypoint"}, ("failed", 1, "no entrypoint")),
    ):
        found = status_of(JobSnapshot(owner | {"status": status}))
        assert (found.state, found.exit_code, found.reason) == expected
    for status in (
        {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"},
        {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Running"},
        {"jobStatus": "FAILED", "jobDeploymentStatus": "Retrying"},
    ):
        assert status_of(JobSnapshot(owner | {"status": status})).state == "pending", "the operator has not finished"
    assert status_of(JobSnapshot(owner)).reason == "the KubeRay operator has not seen it yet"


@pytest.mark.parametrize(("state", "expected"), [("Suspending", "pending"), ("Suspended", "cancelled"), ("", "cancelled")])
def test_a_cancelled_ray_job_is_over_when_its_cluster_is_deleted(state: str, expected: str) -> None:
    owner = with_owner(snapshot("succeeded"), [], {CANCELLED: "gracefully"}).owner | {"kind": "RayJob"}
    assert status_of(JobSnapshot(owner | {"status": {"jobDeploymentStatus": state}})).state == expected


def test_times_of_the_server_are_read() -> None:
    assert seconds("1970-01-01T00:01:00Z") == 60
    assert seconds("1970-01-01T00:00:00.123456789Z") == pytest.approx(0.123456)
    assert seconds(None) == seconds("soon") == 0


def test_objects_without_a_record_have_a_status() -> None:
    owner = copy.deepcopy(snapshot("succeeded").owner)
    del owner["metadata"]["annotations"][RECORD]
    status = status_of(JobSnapshot(owner, snapshot("succeeded").pods))
    assert (status.state, status.name) == ("succeeded", status.id)
