"""The Kubernetes of `tests.system.kubernetes_rig` behaves like one: nodes, pods, services, volumes, limits, users, faults; and it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.system.kubernetes.images import BUSYBOX
from tests.system.kubernetes_rig import RESTRICTED, KubernetesRig, remove_stale
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # the first one builds it

_READY_S = 60.0


@pytest.fixture
def rig(kubernetes: KubernetesRig) -> Iterator[KubernetesRig]:
    yield kubernetes
    for kind in ("deployments", "jobs", "services", "pods", "persistentvolumeclaims"):
        names = kubernetes.kubectl("get", kind, "--selector=app=trial", "--output=name").split()
        if names:
            kubernetes.kubectl("delete", *names, "--grace-period=0", "--force")
    wait_until(lambda: kubernetes.objects() == [], _READY_S, what=kubernetes.objects)
    wait_until(lambda: kubernetes.pod_processes() == [], _READY_S, what=kubernetes.pod_processes)


def pod(script: str, *, node: str = "", **container: Any) -> dict[str, Any]:
    """A pod template that runs a shell script as the user 10001."""
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sh", "-c", script], **container}
    spec: dict[str, Any] = {"containers": [container], "securityContext": {"runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}}  # fmt: skip
    spec |= {"restartPolicy": "Never", "enableServiceLinks": False, "automountServiceAccountToken": False}
    spec |= {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    return {"metadata": {"labels": {"app": "trial"}}, "spec": spec}


def create(rig: KubernetesRig, kind: str, name: str, **body: Any) -> None:
    version = {"Job": "batch/v1", "Deployment": "apps/v1"}.get(kind, "v1")
    metadata = {"name": name, "labels": {"app": "trial"}}
    rig.kubectl(
        "create", "--filename=-", stdin=yaml.safe_dump({"apiVersion": version, "kind": kind, "metadata": metadata, **body})
    )


def create_job(rig: KubernetesRig, name: str, template: dict[str, Any], **spec: Any) -> None:
    create(rig, "Job", name, spec={"backoffLimit": 0, "template": template, **spec})


def deployment(template: dict[str, Any], replicas: int) -> dict[str, Any]:
    template["spec"]["restartPolicy"] = "Always"
    return {"replicas": replicas, "selector": {"matchLabels": {"app": "trial"}}, "template": template}


def wait_job(rig: KubernetesRig, name: str, condition: str = "complete") -> None:
    rig.kubectl("wait", f"job/{name}", f"--for=condition={condition}", f"--timeout={_READY_S:g}s", timeout_s=_READY_S + 10)


def running(rig: KubernetesRig) -> dict[str, str]:
    """Pods that run and are not being ended, and their nodes."""
    pods = rig.get("pods", "--selector=app=trial")["items"]
    return {
        it["metadata"]["name"]: it["spec"]["nodeName"]
        for it in pods
        if it["status"]["phase"] == "Running" and "deletionTimestamp" not in it["metadata"]
    }


def test_a_job_runs_to_completion_and_its_output_can_be_read(rig: KubernetesRig) -> None:
    create_job(rig, "hello", pod("echo hello; id -u; sleep 1"))
    wait_job(rig, "hello")
    assert rig.kubectl("logs", "job/hello") == "hello\n10001\n"


def test_a_job_that_fails_has_the_exit_code_of_its_container(rig: KubernetesRig) -> None:
    create_job(rig, "fails", pod("exit 7"))
    wait_job(rig, "fails", "failed")
    (failed,) = rig.get("pods", "--selector=job-name=fails")["items"]
    assert failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7


def test_pods_of_two_nodes_are_reached_through_a_service_and_by_exec(rig: KubernetesRig) -> None:
    serve = "mkdir /tmp/web && hostname > /tmp/web/index.html && exec httpd -f -p 8080 -h /tmp/web"
    spread = pod(serve, readinessProbe={"tcpSocket": {"port": 8080}, "periodSeconds": 1})
    spread["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "trial"}},
        }
    ]
    create(rig, "Deployment", "web", spec=deployment(spread, 2))
    create(rig, "Service", "web", spec={"selector": {"app": "trial"}, "ports": [{"port": 80, "targetPort": 8080}]})
    rig.kubectl("rollout", "status", "deployment/web", f"--timeout={_READY_S:g}s", timeout_s=_READY_S + 10)
    names = running(rig)
    assert sorted(names.values()) == rig.nodes

    # From here to the pods; from each pod to all through the service; that is also between the nodes.
    addresses = {it["metadata"]["name"]: it["status"]["podIP"] for it in rig.get("pods", "--selector=app=trial")["items"]}
    for name, address in addresses.items():
        assert read(f"http://{address}:8080") == f"{name}\n"
    service = rig.get("service", "web")["spec"]["clusterIP"]
    wait_until(lambda: {read(f"http://{service}") for _ in range(10)} == {f"{name}\n" for name in names})
    for name in names:
        say = f"for i in $(seq 20); do wget -q -O - http://{service}; done"
        wait_until(lambda name=name, say=say: set(rig.kubectl("exec", name, "--", "sh", "-c", say).split()) == set(names))  # type: ignore[misc]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_pod_reaches_this_machine_and_nothing_beyond_it(rig: KubernetesRig) -> None:
    create_job(
        rig, "out", pod(f"nc -w 2 {rig.machine_address} 1; echo $?; nc -w 2 192.0.2.77 80 2>&1; ip route | grep default | wc -l")
    )
    wait_job(rig, "out")
    said = rig.kubectl("logs", "job/out")
    assert "refused" in said, "this machine answers, no server is there"
    assert "unreachable" in said


def test_memory_limits_and_the_size_of_shared_memory_hold(rig: KubernetesRig) -> None:
    template = pod(
        "df -m /dev/shm | tail -n 1; head -c 200000000 /dev/zero | tail -c 190000000 | wc -c",
        resources={"limits": {"memory": "50Mi"}},
        volumeMounts=[{"name": "shm", "mountPath": "/dev/shm"}],
    )
    template["spec"]["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}]
    create(rig, "Pod", "greedy", **template | {"metadata": {"name": "greedy", "labels": {"app": "trial"}}})
    wait_until(lambda: rig.get("pod", "greedy")["status"]["phase"] in ("Failed", "Succeeded"), _READY_S)
    status = rig.get("pod", "greedy")["status"]
    assert status["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled", status
    assert re.search(r"\s16\s", rig.kubectl("logs", "greedy"))


def test_a_volume_is_provisioned_shared_by_two_nodes_and_removed_with_its_claim(rig: KubernetesRig) -> None:
    create(
        rig,
        "PersistentVolumeClaim",
        "data",
        spec={"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    )

    def use(name: str, node: str, script: str) -> None:
        template = pod(script, node=node, volumeMounts=[{"name": "data", "mountPath": "/data"}])
        template["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
        create_job(rig, name, template)
        wait_job(rig, name)

    use("writes", "node1", "echo kept > /data/file")
    use("reads", "node2", "cat /data/file")
    assert rig.kubectl("logs", "job/reads") == "kept\n"
    assert [path.read_text() for path in rig.volumes.glob("*/file")] == ["kept\n"]
    rig.kubectl("delete", "jobs/writes", "jobs/reads", "persistentvolumeclaims/data")
    wait_until(lambda: list(rig.volumes.iterdir()) == [], _READY_S)


def test_a_restricted_user_may_see_pods_and_nothing_else(rig: KubernetesRig) -> None:
    assert rig.kubectl("get", "pods", f"--context={RESTRICTED}", "--output=name") == ""
    with pytest.raises(AssertionError, match=r'"restricted" cannot create resource "jobs"'):
        rig.kubectl("create", "job", "no", f"--image={BUSYBOX}", f"--context={RESTRICTED}")
    with pytest.raises(AssertionError, match="cannot list"):
        rig.kubectl("get", "secrets", f"--context={RESTRICTED}")


def test_what_an_object_owns_and_what_has_finished_is_collected(rig: KubernetesRig) -> None:
    create_job(rig, "short", pod("true"), ttlSecondsAfterFinished=1)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "short", "uid": rig.get("job", "short")["metadata"]["uid"]}
    owned = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [owner]}}
    rig.kubectl("create", "--filename=-", stdin=yaml.safe_dump(owned))
    wait_until(lambda: rig.objects() == [], _READY_S, what=rig.objects)


def test_a_drained_node_ends_its_pods_with_grace_and_they_go_on_elsewhere(rig: KubernetesRig) -> None:
    script = "trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    create_job(rig, "moves", pod(script), backoffLimit=5)
    wait_until(lambda: running(rig), _READY_S)
    ((name, node),) = running(rig).items()
    with subprocess.Popen(
        [rig.programs.path("kubectl"), "logs", "--follow", name],
        env={**os.environ, **rig.environment}, stdout=subprocess.PIPE, text=True,
    ) as follow:  # fmt: skip
        assert follow.stdout is not None
        assert follow.stdout.readline() == "up\n"
        rig.drain(node)
        try:
            assert follow.stdout.readline() == "asked\n"
            wait_until(lambda: list(running(rig).values()) == [it for it in rig.nodes if it != node], _READY_S)
        finally:
            rig.uncordon(node)
            follow.kill()


def test_pods_of_a_node_without_power_are_replaced_and_the_node_comes_back(rig: KubernetesRig) -> None:
    create(rig, "Deployment", "stays", spec=deployment(pod("exec sleep 1000"), 1))
    wait_until(lambda: running(rig), _READY_S)
    ((_, node),) = running(rig).items()
    rig.power_off(node)
    try:
        wait_until(lambda: list(running(rig).values()) == [it for it in rig.nodes if it != node], _READY_S)
        assert node not in rig.ready_nodes()
    finally:
        rig.power_on(node)
    create_job(rig, "again", pod("true", node=node))
    wait_job(rig, "again")


def test_a_cluster_whose_test_is_killed_is_gone() -> None:
    def links() -> set[str]:
        return {name for name in os.listdir("/sys/class/net") if name.startswith("ludus-k8s")}

    def processes() -> list[str]:
        found = psutil.process_iter(["cmdline"])
        return [str(process) for process in found if any(str(base) in word for word in process.info["cmdline"] or ())]

    def rules() -> int:
        return subprocess.run(["iptables-save"], capture_output=True, text=True, check=False).stdout.count("KUBE")

    before = links(), rules()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.system.kubernetes_rig"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"KUBECONFIG=(\S+)/kubeconfig", process.stdout.readline())
            assert found
            base = Path(found[1])
            assert processes()
            assert links() != before[0]
        finally:
            process.send_signal(signal.SIGKILL)
    wait_until(lambda: processes() == [], what=processes)
    wait_until(lambda: (links(), rules()) == before, what=lambda: (links(), rules()))
    assert str(base) not in Path("/proc/self/mounts").read_text()
    remove_stale()  # as the next cluster does
    assert not base.exists()
    assert list(Path("/sys/fs/cgroup").glob(f"*/{base.name}")) == []
