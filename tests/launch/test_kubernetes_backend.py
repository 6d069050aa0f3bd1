"""The Kubernetes backend against a small API server on loopback: what it creates, in which order, and what it ends."""

from __future__ import annotations

import base64
import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import UnknownName, UsageError, WorkerFailed
from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import backend as backend_module
from ludus.launch.kubernetes import objects
from ludus.launch.kubernetes.backend import KubernetesOrchestrator, remembered_places
from ludus.launch.kubernetes.plan import fleet_job, plan_kubernetes
from ludus.launch.kubernetes.pod import MEMORY_HOST
from ludus.launch.kubernetes.settings import (
    GamecoreSettings,
    KubernetesSettings,
    PodCount,
    PodImage,
    ScaleSettings,
    parse_storage,
)
from ludus.launch.kubernetes.status import SUBMIT_S
from ludus.launch.planner import NodeRequest, RuntimeEnv
from ludus.process.job_env import JobEnv
from ludus.transport.message_stream import PASSWORD
from tests.launch.kubernetes_api import ApiServer, container, running_api

SECRET = "horse-battery-staple"
SETTINGS = KubernetesSettings(image=PodImage("ludus:cpu"), storage=parse_storage("s3://games/runs"))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(backend_module, "_POLL_S", 0.01)
    with running_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config")))
        yield server


def trial(*others: Role, restart: Any = "when-killed", secrets: tuple[str, ...] = ()) -> Job:
    return Job("Trial", (*others, Role("main", ("sh", "-c", "true"), restart=restart)), "main", secrets, place="s3://games/run")


def train(nodes: int = 1) -> Job:
    runtime = RuntimeEnv("python")
    return plan_kubernetes(["train", "CartPole-v1"], SETTINGS, environ={}, nodes=NodeRequest(nodes), runtime=runtime).job


def service() -> Job:
    words = ["serve", "s3://games/runs/best"]
    return plan_kubernetes(words, SETTINGS, environ={}, nodes=NodeRequest(), runtime=RuntimeEnv("python")).job


# -- submitting ---------------------------------------------------------------------------------------------------------------


def test_the_owner_is_created_first_and_owns_all_others(api: ApiServer) -> None:
    job_id = KubernetesOrchestrator(SETTINGS).submit(train(nodes=3))
    created = [path for method, path in api.requests if method == "POST"]
    assert created[0] == "jobs"
    assert created.index("secrets") < created.index("jobs", 1), "other pods are created when all they need exists"
    owner = api.objects["jobs", job_id]
    for (_, name), found in api.objects.items():
        if name != job_id or found["kind"] != "Job":
            (reference,) = found["metadata"]["ownerReferences"]
            assert (reference["uid"], reference["kind"], reference["name"]) == (owner["metadata"]["uid"], "Job", job_id)
    KubernetesOrchestrator(SETTINGS).client.delete("Job", job_id)
    assert api.objects == {}


def test_addresses_of_services_are_known_without_dns(api: ApiServer) -> None:
    job_id = KubernetesOrchestrator(SETTINGS).submit(train(nodes=2))
    service = api.objects["services", f"{job_id}-main"]
    assert api.objects["configmaps", f"{job_id}-addresses"]["data"] == {"head": service["spec"]["clusterIP"]}


def test_addresses_of_services_on_ipv6_are_in_brackets_in_urls(api: ApiServer) -> None:
    api.service_network = "fd00:10:96::"
    fleet = replace(SETTINGS, scale=ScaleSettings(PodCount(1, 1)))
    base = Job("fleet", (Role("main", ("python", "-P", "-m", "ludus.cli.main")),), "main")
    job_id = KubernetesOrchestrator(fleet).submit(fleet_job("fleet", ["CartPole-v1"], 1, fleet, base=base))
    assert api.objects["configmaps", f"{job_id}-addresses"]["data"] == {"memory": "[fd00:10:96::1]"}
    games = replace(SETTINGS, gamecore=GamecoreSettings(enabled=True))
    job_id = KubernetesOrchestrator(games).submit(train(nodes=2))
    found = api.objects["configmaps", f"{job_id}-addresses"]["data"]
    assert found["gamecore"].startswith("[fd00:10:96::")
    assert found["head"].startswith("fd00:10:96::"), "it is one of a list of addresses"
    assert JobEnv((found["head"],), port=6379).head == f"[{found['head']}]:6379"


def test_secrets_reach_the_secret_and_nothing_else(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LICENCE_KEY", SECRET)
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(secrets=("LICENCE_KEY",)))
    data = api.objects["secrets", job_id]["data"]
    assert base64.b64decode(data["LICENCE_KEY"]).decode() == SECRET
    assert len(base64.b64decode(data[objects.TOKEN])) == 64
    encoded = base64.b64encode(SECRET.encode())
    bodies = [body for body in api.bodies if SECRET.encode() in body or encoded in body]
    assert len(bodies) == 1
    assert b'"kind": "Secret"' in bodies[0]
    other = orchestrator.submit(trial(secrets=("LICENCE_KEY",)))
    assert api.objects["secrets", other]["data"][objects.TOKEN] != data[objects.TOKEN]


def test_a_redis_of_its_own_has_a_password_that_its_clients_get(api: ApiServer) -> None:
    settings = replace(SETTINGS, scale=ScaleSettings(PodCount(2, 2)))
    base = Job("fleet", (Role("main", ("python", "-P", "-m", "ludus.cli.main")),), "main")
    job_id = KubernetesOrchestrator(settings).submit(fleet_job("fleet", ["CartPole-v1"], 2, settings, base=base))
    data = {key: base64.b64decode(value).decode() for key, value in api.objects["secrets", job_id]["data"].items()}
    assert f'requirepass "{data[PASSWORD]}"\n' in data[objects.REDIS_CONF]
    assert len(data[PASSWORD]) >= 32
    assert "maxmemory 805306368\n" in data[objects.REDIS_CONF]
    pod = api.objects["deployments", f"{job_id}-worker"]["spec"]["template"]["spec"]
    assert f"redis://$({MEMORY_HOST}):6379/0" in pod["containers"][0]["command"]
    assert api.objects["configmaps", f"{job_id}-addresses"]["data"]["memory"].startswith("10.96.")


@pytest.mark.parametrize("plural", ["services", "configmaps", "networkpolicies", "secrets", "jobs"])
def test_a_submission_that_fails_leaves_nothing(api: ApiServer, plural: str) -> None:
    created = itertools.count()
    answer = api.answer

    def failing(method: str, target: str, body: Any) -> tuple[int, Any]:
        if method == "POST" and target.partition("?")[0].endswith(f"/{plural}") and (plural != "jobs" or next(created) == 1):
            return 403, {"message": "exceeded quota: small, requested: cpu=4", "code": 403}
        return answer(method, target, body)

    api.answer = failing  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="quota"):
        KubernetesOrchestrator(SETTINGS).submit(train(nodes=2))
    assert api.objects == {}


def test_a_submission_that_is_killed_ends_by_itself(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until everything exists, the owner has a deadline, after which Kubernetes ends it. The job can be found and cancelled before."""
    orchestrator = KubernetesOrchestrator(SETTINGS)
    seen: list[Any] = []
    monkeypatch.setattr(
        orchestrator,
        "_create_others",
        lambda *_: seen.append((api.all("jobs")[0]["spec"]["activeDeadlineSeconds"], remembered_places())),
    )
    job_id = orchestrator.submit(trial())
    assert seen == [(SUBMIT_S, [(orchestrator.client.context, orchestrator.client.namespace)])]
    assert "activeDeadlineSeconds" not in api.objects["jobs", job_id]["spec"]


def test_a_job_cancelled_during_its_submission_leaves_nothing(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    create = orchestrator._create_others

    def cancelled_meanwhile(found: Any, owner: Any, values: Any) -> None:
        create(found, owner, values)
        KubernetesOrchestrator(SETTINGS).cancel(owner["metadata"]["name"])

    monkeypatch.setattr(orchestrator, "_create_others", cancelled_meanwhile)
    with pytest.raises(UsageError, match="cancelled while it was submitted"):
        orchestrator.submit(train(nodes=2))
    assert api.objects == {}


def test_names_that_are_taken_are_avoided(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([1, 1, 2])
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(numbers))
    orchestrator = KubernetesOrchestrator(SETTINGS)
    first, second = orchestrator.submit(trial()), orchestrator.submit(trial())
    assert first != second
    assert first.startswith("trial-")


def test_the_claim_of_the_runs_is_kept_and_used_again(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(replace(SETTINGS, storage=parse_storage("new:10Gi")))
    first = orchestrator.submit(trial())
    orchestrator.submit(trial())
    (claim,) = api.all("persistentvolumeclaims")
    assert "ownerReferences" not in claim["metadata"]
    orchestrator.client.delete("Job", first)
    assert len(api.all("persistentvolumeclaims")) == 1


def test_a_server_without_budgets_for_disruptions_gets_none(api: ApiServer) -> None:
    api.apis.discard("policy/v1")
    job_id = KubernetesOrchestrator(SETTINGS).submit(service())
    assert api.objects["deployments", job_id]["spec"]["replicas"] == 1
    assert api.all("poddisruptionbudgets") == []


def test_the_place_of_a_job_is_remembered(api: ApiServer) -> None:
    assert remembered_places() == []
    KubernetesOrchestrator(SETTINGS).submit(trial())
    KubernetesOrchestrator(SETTINGS).submit(trial())
    assert remembered_places() == [("test", "games")]


def test_a_place_without_jobs_is_forgotten(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    orchestrator.list()
    assert remembered_places() == [("test", "games")]
    orchestrator.client.delete("Job", job_id)
    api.failures["GET", "jobs"] = (500, "not now", 100)
    with pytest.raises(WorkerFailed):
        orchestrator.list()
    assert remembered_places() == [("test", "games")], "an error says nothing about jobs"
    api.failures.clear()
    assert orchestrator.list() == []
    assert remembered_places() == []


def test_a_cluster_that_is_gone_delays_a_list_by_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "LIST_CONNECT_S", 0.2)
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # the queue is full: further connections are not answered, as by a machine that is gone
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with running_api() as server:
            config = server.write_kubeconfig(tmp_path / "config")
            address = "http://{}:{}".format(*listener.getsockname())
            config.write_text(config.read_text().replace(server.url, address))
            monkeypatch.setenv("KUBECONFIG", str(config))
            started = time.monotonic()
            with pytest.raises(WorkerFailed, match="does not answer"):
                KubernetesOrchestrator().list()
            assert time.monotonic() - started < 5


# -- looking ------------------------------------------------------------------------------------------------------------------


def test_a_job_is_seen_from_any_machine(api: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job_id = KubernetesOrchestrator(SETTINGS).submit(trial(Role("worker", ("true",), 2)))
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "elsewhere"))
    other = KubernetesOrchestrator()
    status = other.status(job_id)
    assert (status.id, status.name, status.state, status.place) == (job_id, "Trial", "pending", "s3://games/run")
    assert [process.name for process in status.processes] == ["worker-0", "worker-1", "main-0"]
    assert status.reason == "its pod is being created"
    api.start_pod(job_id)
    assert other.status(job_id).state == "running"
    assert other.list() == [other.status(job_id)]
    for name in ("nothing", "../jobs", "", "a/b", f"{job_id}-worker-0"):
        with pytest.raises(UnknownName):
            other.status(name)


def test_a_foreign_job_is_not_ours(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator()
    orchestrator.client.create(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "theirs", "labels": {}}, "spec": {}}
    )
    assert orchestrator.list() == []
    with pytest.raises(UnknownName):
        orchestrator.cancel("theirs")


def test_events_explain_a_pod_that_does_not_start(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    message = 'Error creating: pods "x" is forbidden: exceeded quota: small, requested: cpu=4, used: cpu=7, limited: cpu=8'
    event: dict[str, Any] = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e1"}, "involvedObject": {"name": job_id}}
    orchestrator.client.create({**event, "reason": "FailedCreate", "message": message, "lastTimestamp": "2026-11-18T10:00:00Z"})
    assert orchestrator.status(job_id).reason == (
        "the quota of the namespace does not allow its pod: exceeded quota: small, requested: cpu=4, used: cpu=7, limited: cpu=8"
    )
    api.failures["GET", "events"] = (403, "events is forbidden", 100)
    assert orchestrator.status(job_id).reason == "its pod is being created", "events only explain"


def test_a_quota_that_holds_back_other_roles_is_shown(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), 2)))
    for name in (job_id, f"{job_id}-worker-0"):
        api.start_pod(name)
    message = 'Error creating: pods "x" is forbidden: exceeded quota: small'
    event: dict[str, Any] = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e1"}, "reason": "FailedCreate"}
    orchestrator.client.create({**event, "involvedObject": {"name": f"{job_id}-worker-1"}, "message": message})
    status = orchestrator.status(job_id)
    assert (status.state, status.reason) == (
        "running",
        "worker-1: the quota of the namespace does not allow its pod: exceeded quota: small",
    )


@pytest.mark.parametrize("fleet", [False, True])
def test_a_quota_that_holds_back_a_deployment_is_shown(api: ApiServer, fleet: bool) -> None:
    """The events are those of a ReplicaSet, whose name is not known; the Deployment has a condition."""
    settings = replace(SETTINGS, scale=ScaleSettings(PodCount(2, 2)))
    orchestrator = KubernetesOrchestrator(settings)
    if fleet:
        base = Job("fleet", (Role("main", ("python", "-P", "-m", "ludus.cli.main")),), "main")
        job_id = orchestrator.submit(fleet_job("fleet", ["CartPole-v1"], 2, settings, base=base))
        api.start_pod(job_id)
        api.start_pod(f"{job_id}-worker", plural="deployments")
    else:
        job_id = orchestrator.submit(service())
    condition = {"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: exceeded quota: small'}
    api.set_status("deployments", f"{job_id}-worker" if fleet else job_id, conditions=[condition])
    reason = "the quota of the namespace does not allow its pod: exceeded quota: small"
    assert orchestrator.status(job_id).reason == (f"worker-1: {reason}" if fleet else reason)


def test_a_user_without_the_role_for_ray_jobs_is_told_that_a_job_is_gone(api: ApiServer) -> None:
    api.apis.add("ray.io/v1")
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 3)
    assert orchestrator.status(job_id).exit_code == 3
    orchestrator.client.delete("Job", job_id)
    api.failures["GET", "rayjobs"] = (
        403, 'rayjobs.ray.io is forbidden: User "alice" cannot get resource "rayjobs" in API group "ray.io" in the namespace "games"', 100,
    )  # fmt: skip
    assert orchestrator.status(job_id).exit_code == 3, "it was deleted by its TTL"
    with pytest.raises(UnknownName):
        KubernetesOrchestrator().status(job_id)


# -- ending -------------------------------------------------------------------------------------------------------------------


def test_when_main_has_ended_the_next_client_ends_the_others(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), 2, "on-failure")))
    main, worker = api.start_pod(job_id), api.start_pod(f"{job_id}-worker-0")
    api.end_pod(main["metadata"]["name"], 0)
    status = KubernetesOrchestrator().status(job_id)
    assert (status.state, status.reason) == ("running", "waiting for the end of worker-0")
    assert api.objects["pods", worker["metadata"]["name"]]["spec"]["activeDeadlineSeconds"] == 1, "its pod is kept, for its log"
    assert api.objects["jobs", f"{job_id}-worker-0"]["spec"]["backoffLimit"] == 0
    assert ("jobs", f"{job_id}-worker-1") not in api.objects, "it had not started"
    api.end_pod(worker["metadata"]["name"], 143)
    status = KubernetesOrchestrator().status(job_id)
    assert (status.state, status.exit_code, status.of("worker")[0].exit_code) == ("succeeded", 0, 143)


def test_a_job_that_kubernetes_deletes_after_its_end_keeps_its_exit_code(api: ApiServer) -> None:
    """A short TTL may expire while its other pods are still ending."""
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), restart="on-failure")))
    main = api.start_pod(job_id)["metadata"]["name"]
    api.start_pod(f"{job_id}-worker-0")
    api.end_pod(main, 3)
    assert orchestrator.status(job_id).state == "running"
    orchestrator.client.delete("Job", job_id)
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code, {process.state for process in status.processes}) == ("failed", 3, {"ended"})
    with pytest.raises(UnknownName):
        KubernetesOrchestrator().status(job_id)


def test_a_failed_main_role_is_not_started_again_by_a_server_without_failure_policies(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    pod = api.start_pod(job_id)["metadata"]["name"]
    api.end_pod(pod, 2, message="ludus: Unknown key 'lr'.\n")
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code) == ("failed", 2)
    assert status.reason == "main-0 ended with code 2: ludus: Unknown key 'lr'."
    assert api.objects["jobs", job_id]["spec"]["activeDeadlineSeconds"] == 1


def test_a_job_that_has_succeeded_after_a_restart_is_not_ended_as_failed(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 137)
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 0)
    before = dict(api.objects["jobs", job_id]["spec"])
    assert orchestrator.status(job_id).state == "succeeded"
    assert api.objects["jobs", job_id]["spec"] == before, "its controller has not yet seen the end"


def test_a_graceful_cancel_keeps_the_live_pod_of_a_job_with_failures(api: ApiServer) -> None:
    """From 1.22 on, the controller deletes the live pod if there were more failures than the limit of the Job."""
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    for _ in range(2):
        api.end_pod(api.start_pod(job_id)["metadata"]["name"], 137)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 1000))
    api.set_status("jobs", job_id, failed=2, startTime=started)
    main = api.start_pod(job_id)["metadata"]["name"]
    api.requests.clear()
    orchestrator.cancel(job_id)
    spec = api.objects["jobs", job_id]["spec"]
    assert spec["backoffLimit"] == 2, "not fewer than have failed, and the next failure is the last"
    assert 1000 + 30 < spec["activeDeadlineSeconds"] < 1000 + 30 + 15 + 120, "if the limit is too high, this ends the Job"
    assert api.objects["pods", main]["spec"]["activeDeadlineSeconds"] == 1
    patches = [path for method, path in api.requests if method == "PATCH"]
    assert patches.index(f"pods/{main}") < len(patches) - 1 - patches[::-1].index(f"jobs/{job_id}")


def test_a_job_that_waits_for_its_next_pod_is_cancelled_at_once(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 137)
    orchestrator.cancel(job_id)
    assert api.objects["jobs", job_id]["spec"]["activeDeadlineSeconds"] == 1


def test_a_graceful_cancel_keeps_helpers_that_were_restarted(api: ApiServer) -> None:
    """With `OnFailure` the controller deletes a pod whose restarts reach the limit of its Job."""
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), restart="on-failure")))
    main, helper = api.start_pod(job_id)["metadata"]["name"], f"{job_id}-worker-0"
    pod = api.start_pod(helper)
    worker = pod["metadata"]["name"]
    api.set_status("pods", worker, containerStatuses=[container(pod, restarts=3, running={})])
    limit = api.objects["jobs", helper]["spec"]["backoffLimit"]
    orchestrator.cancel(job_id)
    assert api.objects["jobs", helper]["spec"]["backoffLimit"] == limit, "main still saves"
    assert api.objects["pods", worker]["spec"]["activeDeadlineSeconds"] > 30
    assert api.objects["jobs", helper]["spec"]["activeDeadlineSeconds"] > 60
    api.end_pod(main, 130)
    KubernetesOrchestrator().status(job_id)
    assert api.objects["pods", worker]["spec"]["activeDeadlineSeconds"] == 1
    assert api.objects["jobs", helper]["spec"]["backoffLimit"] == 4
    api.end_pod(worker, 143)
    assert KubernetesOrchestrator().status(job_id).state == "cancelled"


def test_a_killed_main_role_is_waited_for(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 137)
    assert orchestrator.status(job_id).state == "pending"
    api.start_pod(job_id)
    status = orchestrator.status(job_id)
    assert (status.state, status.processes[0].restarts, status.processes[0].exit_code) == ("running", 1, 137)


def test_cancelling_ends_main_first_and_keeps_its_log(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",))))
    main, worker = (api.start_pod(name)["metadata"]["name"] for name in (job_id, f"{job_id}-worker-0"))
    KubernetesOrchestrator().cancel(job_id)
    assert api.objects["pods", main]["spec"]["activeDeadlineSeconds"] == 1
    assert api.objects["pods", worker]["spec"]["activeDeadlineSeconds"] > 30, "it serves main while that saves"
    assert orchestrator.status(job_id).reason == "it is being cancelled"
    api.end_pod(main, 130)
    assert api.objects["pods", worker]["spec"]["activeDeadlineSeconds"] > 1
    orchestrator.status(job_id)
    assert api.objects["pods", worker]["spec"]["activeDeadlineSeconds"] == 1
    api.end_pod(worker, 143)
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code, status.reason) == ("cancelled", 130, "it was cancelled")
    before = dict(api.objects)
    orchestrator.cancel(job_id, at_once=True)
    assert api.objects == before, "a job that is over does not change"


def test_cancelling_a_job_whose_pods_have_not_started(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",))))
    orchestrator.cancel(job_id)
    assert api.objects["jobs", job_id]["spec"]["activeDeadlineSeconds"] == 1
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code) == ("cancelled", 130)
    assert {process.state for process in status.processes} == {"ended"}


def test_killing_deletes_all_pods(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",))))
    for name in (job_id, f"{job_id}-worker-0"):
        api.start_pod(name)
    orchestrator.cancel(job_id, at_once=True)
    assert api.all("pods") == []
    assert {job["spec"]["activeDeadlineSeconds"] for job in api.all("jobs")} == {1}, "none is started again"
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code) == ("cancelled", 137)


def test_workers_of_a_fleet_end_with_it(api: ApiServer) -> None:
    settings = replace(SETTINGS, scale=ScaleSettings(PodCount(2, 4)))
    base = Job("fleet", (Role("main", ("python", "-P", "-m", "ludus.cli.main")),), "main")
    orchestrator = KubernetesOrchestrator(settings)
    job_id = orchestrator.submit(fleet_job("fleet", ["CartPole-v1"], 2, settings, base=base))
    learner = api.start_pod(job_id)["metadata"]["name"]
    workers = [api.start_pod(f"{job_id}-worker", f"{job_id}-worker-{n}", plural="deployments") for n in range(2)]
    memory = api.start_pod(f"{job_id}-memory", f"{job_id}-memory-0", plural="statefulsets")
    assert [(each.name, each.state) for each in orchestrator.status(job_id).processes] == [
        ("memory-0", "running"), ("learner-0", "running"), ("worker-0", "running"), ("worker-1", "running"),
    ]  # fmt: skip
    api.end_pod(learner, 0)
    orchestrator.status(job_id)
    assert api.all("horizontalpodautoscalers") == []
    assert api.objects["deployments", f"{job_id}-worker"]["spec"]["replicas"] == 0
    assert api.objects["statefulsets", f"{job_id}-memory"]["spec"]["replicas"] == 0
    for pod in (*workers, memory):
        del api.objects["pods", pod["metadata"]["name"]]
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code) == ("succeeded", 0)
    assert {process.state for process in status.processes} == {"ended"}


def test_a_service_runs_until_it_is_cancelled(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(replace(SETTINGS, scale=ScaleSettings(replicas=PodCount(2, 5))))
    job_id = orchestrator.submit(service())
    assert api.objects["deployments", job_id]["spec"]["replicas"] == 2
    assert orchestrator.status(job_id).state == "pending"
    pods = [api.start_pod(job_id, f"{job_id}-{n}", plural="deployments")["metadata"]["name"] for n in range(2)]
    assert orchestrator.status(job_id).state == "running"
    orchestrator.cancel(job_id)
    assert api.objects["deployments", job_id]["spec"]["replicas"] == 0
    assert api.all("horizontalpodautoscalers") == []
    for pod in pods:
        del api.objects["pods", pod]
    assert orchestrator.status(job_id).state == "cancelled"
    orchestrator.remove(job_id)
    assert api.objects == {}


@pytest.mark.parametrize("ttl_s", [0, 3600])
def test_a_service_is_deleted_after_its_end(api: ApiServer, monkeypatch: pytest.MonkeyPatch, ttl_s: int) -> None:
    """Kubernetes deletes finished Jobs only: the next client that looks deletes a service that was cancelled."""
    orchestrator = KubernetesOrchestrator(replace(SETTINGS, ttl_s=ttl_s))
    job_id = orchestrator.submit(service())
    pod = api.start_pod(job_id, plural="deployments")["metadata"]["name"]
    orchestrator.cancel(job_id)
    assert orchestrator.status(job_id).state == "running"
    del api.objects["pods", pod]
    assert orchestrator.status(job_id).state == "cancelled"
    if ttl_s:
        assert KubernetesOrchestrator().status(job_id).state == "cancelled"
        later = time.time() + ttl_s + 1
        monkeypatch.setattr(time, "time", lambda: later)
        KubernetesOrchestrator().list()
    assert api.objects == {}
    assert orchestrator.status(job_id).state == "cancelled"


def test_a_service_whose_submission_was_killed_is_deleted(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    monkeypatch.setattr(orchestrator, "_start", lambda *_: None)  # as if it were killed before
    job_id = orchestrator.submit(service())
    assert KubernetesOrchestrator().status(job_id).reason == "its submission is not complete"
    assert api.objects["deployments", job_id]["spec"]["replicas"] == 0
    later = time.time() + SUBMIT_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    KubernetesOrchestrator().list()
    assert api.objects == {}


def ray_job(api: ApiServer) -> tuple[KubernetesOrchestrator, Job]:
    api.apis.add("ray.io/v1")
    return KubernetesOrchestrator(replace(SETTINGS, flavor="kuberay")), train(nodes=3)


def test_a_ray_job_is_suspended_until_its_submission_is_complete(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator, job = ray_job(api)
    start = orchestrator._start
    seen: list[Any] = []

    def observed(manifest: Any, owner: Any) -> None:
        seen.extend(api.all("rayjobs"))
        start(manifest, owner)

    monkeypatch.setattr(orchestrator, "_start", observed)
    job_id = orchestrator.submit(job)
    assert seen[0]["spec"]["suspend"] is True
    owner = api.objects["rayjobs", job_id]
    assert "suspend" not in owner["spec"]
    assert "replicas" not in owner["spec"], "it is no field of a RayJob"
    assert objects.INCOMPLETE not in owner["metadata"]["annotations"]
    assert {process.name for process in orchestrator.status(job_id).processes} == {"head-0", "ray-0", "ray-1", "main-0"}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_cancelled_ray_job_is_suspended(api: ApiServer, at_once: bool) -> None:
    """The operator then deletes head, workers and submitter."""
    orchestrator, job = ray_job(api)
    job_id = orchestrator.submit(job)
    api.set_status("rayjobs", job_id, jobDeploymentStatus="Running", jobStatus="RUNNING")
    head = {
        "apiVersion": "v1",
        "kind": "Pod",
        **api.objects["rayjobs", job_id]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"],
    }
    head["metadata"] = {**head["metadata"], "name": f"{job_id}-head"}
    orchestrator.client.create(head)
    orchestrator.cancel(job_id, at_once=at_once)
    assert api.objects["rayjobs", job_id]["spec"]["suspend"] is True
    assert not orchestrator.status(job_id).over
    orchestrator.client.delete("Pod", f"{job_id}-head")
    api.set_status("rayjobs", job_id, jobDeploymentStatus="Suspended", jobStatus="")
    status = orchestrator.status(job_id)
    assert (status.state, status.exit_code) == ("cancelled", 137 if at_once else 130)


def test_a_user_who_may_only_look_sees_the_jobs(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), restart="on-failure")))
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 2)
    api.start_pod(f"{job_id}-worker-0")
    for method in ("PATCH", "DELETE"):
        for plural in ("jobs", "pods"):
            api.failures[method, plural] = (403, f"{plural} is forbidden", 100)
    viewer = KubernetesOrchestrator()
    assert [status.reason for status in viewer.list()] == ["main-0 ended with code 2; waiting for the end of worker-0"]
    assert viewer.status(job_id).state == "running"
    with pytest.raises(UsageError, match="forbidden"):
        viewer.cancel(job_id)


def test_a_helper_that_was_evicted_is_not_replaced_after_the_end(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), restart="on-failure")))
    api.end_pod(api.start_pod(f"{job_id}-worker-0")["metadata"]["name"], 143)
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 0)
    assert orchestrator.status(job_id).state == "succeeded"
    assert api.objects["jobs", f"{job_id}-worker-0"]["spec"]["activeDeadlineSeconds"] == 1


def test_a_list_takes_one_request_for_each_kind(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    for _ in range(4):
        job_id = orchestrator.submit(trial(Role("worker", ("true",))))
        api.set_status("jobs", job_id, conditions=[{"type": "Complete", "status": "True"}])
        for name in (job_id, f"{job_id}-worker-0"):
            api.end_pod(api.start_pod(name)["metadata"]["name"], 0)
    api.requests.clear()
    assert [status.state for status in KubernetesOrchestrator().list()] == ["succeeded"] * 4
    assert sorted(api.requests) == [("GET", "deployments"), ("GET", "jobs"), ("GET", "pods")], "nothing is left to be ended"
    for job in api.all("jobs")[1::2]:
        api.start_pod(job["metadata"]["name"])
    api.requests.clear()
    KubernetesOrchestrator().list()
    assert [path for method, path in api.requests if method == "GET"].count("jobs") == 2, (
        "owners, and once the helpers of all jobs"
    )


def test_a_job_that_is_over_can_be_removed(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    with pytest.raises(UsageError, match="not over"):
        orchestrator.remove(job_id)
    api.end_pod(api.start_pod(job_id)["metadata"]["name"], 0)
    orchestrator.remove(job_id)
    assert api.objects == {}


# -- logs ---------------------------------------------------------------------------------------------------------------------


def test_lines_are_followed_once_each_over_restarts(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    first = api.start_pod(job_id)["metadata"]["name"]
    api.logs[first] = "2026-11-18T10:00:00.5Z one\n"
    lines = orchestrator.logs(job_id, follow=True)
    assert next(lines) == "one"
    api.logs[first] += "2026-11-18T10:00:00.5Z one\n2026-11-18T10:00:00.50001Z two\n"
    assert [next(lines), next(lines)] == ["one", "two"], "an equal line with an equal time is another line"
    api.end_pod(first, 137)
    second = api.start_pod(job_id)["metadata"]["name"]
    api.logs[second] = "2026-11-18T10:00:00.1Z again\n2026-11-18T10:00:01Z three\n"
    assert [next(lines), next(lines)] == ["again", "three"]
    api.end_pod(second, 0)
    assert list(lines) == []


def test_lines_of_processes_in_one_container_are_told_apart(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(train(nodes=2))
    main, node = (api.start_pod(name)["metadata"]["name"] for name in (job_id, f"{job_id}-ray-1"))
    api.logs[main] = "2026-11-18T10:00:00Z ray-0: the head\n2026-11-18T10:00:01Z training\n"
    api.logs[node] = "2026-11-18T10:00:00Z joined\n"
    assert list(orchestrator.logs(job_id, role="main")) == ["training"]
    assert list(orchestrator.logs(job_id, role="ray")) == ["ray-0: the head", "ray-1: joined"]
    assert sorted(orchestrator.logs(job_id)) == ["main-0: training", "ray-0: the head", "ray-1: joined"]
    with pytest.raises(UnknownName, match=r"rya.*ray"):
        orchestrator.logs(job_id, role="rya")


def test_a_log_of_a_container_that_was_restarted(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial(Role("worker", ("true",), restart="on-failure")))
    pod = api.start_pod(f"{job_id}-worker-0")
    name = pod["metadata"]["name"]
    ended = {"terminated": {"exitCode": 3}}
    api.set_status("pods", name, containerStatuses=[container(pod, restarts=1, last=ended, running={})])
    api.logs[name] = "2026-11-18T10:00:00Z hello\n"
    assert list(orchestrator.logs(job_id, role="worker")) == ["hello"]
    process = orchestrator.status(job_id).of("worker")[0]
    assert (process.state, process.restarts, process.exit_code) == ("running", 1, 3)


def test_an_unreachable_server_is_an_error_of_the_backend(api: ApiServer) -> None:
    orchestrator = KubernetesOrchestrator(SETTINGS)
    job_id = orchestrator.submit(trial())
    api.failures["GET", "jobs"] = (503, "gone", 100)
    with pytest.raises(WorkerFailed, match="503"):
        orchestrator.status(job_id)
