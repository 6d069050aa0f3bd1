"""`ludus doctor --on kubernetes` against an API server on loopback: what is missing is named, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.launch.cluster_file import ClusterConfig
from ludus.launch.doctor.finding import DoctorFinding
from ludus.launch.doctor.kubernetes_checks import PERMISSIONS, check_kubernetes
from ludus.launch.kubernetes import status
from ludus.launch.kubernetes.client import KINDS, KubernetesClient
from tests.launch.kubernetes_api import ApiServer, running_api

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes" / "troubleshooting.md"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with running_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config")))
        server.objects["namespaces", "games"] = {"metadata": {"name": "games"}}
        amounts = {"cpu": "7900m", "memory": "31Gi", "nvidia.com/gpu": "1"}
        labels = {"pool": "gpu"}
        server.objects["nodes", "a"] = {"metadata": {"name": "a", "labels": labels}, "status": {"allocatable": amounts}}
        yield server


def examine(**keys: Any) -> dict[str, DoctorFinding]:
    settings = ClusterConfig().merge(on="kubernetes", **keys).kubernetes_settings()
    found = check_kubernetes(KubernetesClient(settings.context, settings.namespace), settings)
    return {finding.check: finding for finding in found}


def test_a_cluster_with_all_that_is_needed_is_in_order(api: ApiServer) -> None:
    found = examine(storage="s3://games/runs")
    assert {finding.status for finding in found.values()} == {"ok"}
    assert {"kubernetes", "permissions", "nodes"} <= found.keys()
    assert "v1.32.1, context test, namespace games" in found["kubernetes"].found


def test_every_missing_permission_is_named(api: ApiServer) -> None:
    api.denied = {("create", "jobs"), ("get", "pods/log"), ("patch", "deployments"), ("list", "events")}
    found = examine()
    assert found["permissions"].status == "failed"
    assert "missing in the namespace games: create jobs.batch; patch deployments.apps; get pods/log" in found["permissions"].found
    assert "list events" in found["events"].found
    assert found["events"].status == "warning", "jobs work without"


def test_permissions_for_objects_of_operators_are_needed_only_with_them(api: ApiServer) -> None:
    api.denied = {("create", "rayjobs"), ("create", "podmonitors"), ("create", "prometheusrules")}
    assert examine()["permissions"].status == "ok"
    missing = examine(flavor="kuberay", pod_monitor=True, prometheus_rule=True)["permissions"].found
    for name in ("rayjobs.ray.io", "podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com"):
        assert f"create {name}" in missing


@pytest.mark.parametrize(
    ("keys", "check", "api_version", "hint"),
    [
        ({"flavor": "kuberay"}, "kuberay", "ray.io/v1", "--flavor plain"),
        ({"pod_monitor": True}, "monitoring", "monitoring.coreos.com/v1", "Prometheus operator"),
        ({"replicas": "1-3"}, "metrics", "metrics.k8s.io/v1beta1", "metrics-server"),
        ({"workers": "1-3"}, "metrics", "metrics.k8s.io/v1beta1", "metrics-server"),
        ({"replicas": "1-3", "sessions": 100}, "metrics", "custom.metrics.k8s.io/v1beta1", "prometheus-adapter"),
    ],
)
def test_an_api_that_is_not_installed_is_named(
    api: ApiServer, keys: dict[str, Any], check: str, api_version: str, hint: str
) -> None:
    found = examine(**keys)[check]
    assert found.status == "failed"
    assert hint in found.fix
    api.apis.add(api_version)
    assert examine(**keys)[check].status == "ok"


@pytest.mark.parametrize(
    ("keys", "check", "text"),
    [
        ({"service_account": "trainer"}, "service_account trainer", "there is no ServiceAccount trainer in the namespace games"),
        ({"image_pull_secrets": ["registry"]}, "image_pull_secrets registry", "there is no Secret registry"),
        ({"storage": "pvc:runs"}, "storage runs", "there is no PersistentVolumeClaim runs"),
        ({"priority_class": "high"}, "priority class high", "does not exist"),
        ({"storage": "new:5Gi", "storage_class": "fast"}, "storage class fast", "does not exist"),
        ({"cpus": 8}, "nodes", "none of 1 node can have a pod with 8 cores and 4Gi"),
        ({"memory": "32Gi"}, "nodes", "none of 1 node"),
        ({"gpus": 2}, "nodes", "2 GPUs"),
        ({"node_selector": {"pool": "cpu"}}, "nodes", "none of 0 nodes with these labels"),
        ({"namespace": "nowhere"}, "namespace", "nowhere does not exist"),
    ],
)
def test_what_does_not_exist_or_fit_is_named(api: ApiServer, keys: dict[str, Any], check: str, text: str) -> None:
    found = examine(**keys)[check]
    assert found.status == "failed"
    assert text in found.found


def test_a_quota_that_is_used_up_is_a_warning(api: ApiServer) -> None:
    status = {"hard": {"requests.cpu": "4", "pods": "10"}, "used": {"requests.cpu": "4000m", "pods": "3"}}
    api.objects["resourcequotas", "team"] = {"metadata": {"name": "team"}, "status": status}
    found = examine()["quota team"]
    assert (found.status, "used up: requests.cpu" in found.found) == ("warning", True)


def test_an_old_server_is_a_warning(api: ApiServer) -> None:
    api.version = "v1.20.2"
    assert examine()["kubernetes"].status == "warning"


def test_a_server_that_does_not_answer_is_one_finding(api: ApiServer) -> None:
    api.close()
    (found,) = examine().values()
    assert (found.status, "does not answer" in found.found) == ("failed", True)
    assert "kubectl cluster-info" in found.fix


def test_no_kubeconfig_and_an_unknown_context_are_one_finding(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = examine(context="production").values()
    assert "has no context 'production'" in found.found
    assert "test" in found.fix
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (found,) = examine().values()
    assert "no kubeconfig" in found.found


def test_the_role_in_the_documentation_has_all_permissions() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documents = [block for part in text.split("```yaml\n")[1:] for block in yaml.safe_load_all(part.partition("```")[0])]
    role = next(document for document in documents if document["kind"] == "Role")
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {(KINDS[kind].group, KINDS[kind].plural, verb) for kind, verbs in PERMISSIONS.items() for verb in verbs}
    assert allowed == needed | {("", "pods/log", "get"), ("", "events", "list")}


def test_messages_in_the_documentation_are_those_of_the_code() -> None:
    """The reasons of a job in the page, up to the part that varies, are in the module that writes them."""
    source = Path(status.__file__).read_text(encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8").partition("## Reasons")[2].partition("\n## ")[0]
    reasons = [cell.split(" … ")[-1] for line in text.splitlines() for cell in re.findall(r"^\| `([^`]+)`", line)]
    assert len(reasons) >= 6
    assert [reason for reason in reasons if reason not in source] == []
