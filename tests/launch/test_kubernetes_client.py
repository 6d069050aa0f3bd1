"""The Kubernetes client against an HTTP server on loopback: credentials, requests, and the translation of errors."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.errors import LudusError, UnknownName, UsageError, WorkerFailed
from ludus.launch.kubernetes import client as client_module
from ludus.launch.kubernetes.client import KubernetesClient
from tests.launch.kubernetes_api import ApiServer, running_api


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with running_api() as server:
        yield server


@pytest.fixture
def client(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesClient:
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config")))
    return KubernetesClient()


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": {}}


# -- credentials --------------------------------------------------------------------------------------------------------------


def test_the_context_of_the_kubeconfig_has_the_namespace(client: KubernetesClient) -> None:
    assert (client.context, client.namespace) == ("test", "games")
    assert client.version() == "v1.32.1"


def test_the_token_of_a_credential_plugin_is_sent(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As EKS and GKE configure it, with the description of the cluster in KUBERNETES_EXEC_INFO."""
    plugin = tmp_path / "plugin"
    plugin.write_text(
        '#!/bin/sh\nprintf \'%s\' "$KUBERNETES_EXEC_INFO" > "$(dirname "$0")/info"\n'
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "from-the-plugin"}}\'\n'
    )
    plugin.chmod(0o700)
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(plugin),
        "interactiveMode": "Never",
        "provideClusterInfo": True,
    }
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config", exec=run)))
    seen = record_headers(api, monkeypatch)
    KubernetesClient().list("Pod")
    assert seen == ["Bearer from-the-plugin"]
    info = json.loads((tmp_path / "info").read_text())
    assert info["spec"]["cluster"]["server"] == api.url


def record_headers(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    handler: Any = api._server.RequestHandlerClass
    serve = handler._serve

    def recording(self: Any) -> None:
        seen.append(self.headers.get("Authorization"))
        serve(self)

    monkeypatch.setattr(handler, "do_GET", recording)
    return seen


def test_a_failing_credential_plugin_is_reported(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", "echo log in first >&2; exit 1"]}
    monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "config", exec=run)))
    with pytest.raises(UsageError, match=r"credential plugin of the context test failed.*log in first"):
        KubernetesClient().list("Pod")


def test_a_kubeconfig_that_is_missing_or_incomplete_is_reported(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match=r"no kubeconfig.*none does not exist.*update-kubeconfig"):
        KubernetesClient().list("Pod")
    path = api.write_kubeconfig(tmp_path / "config")
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UsageError, match=r"no context 'prod'.*test"):
        KubernetesClient("prod").list("Pod")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "current-context": ""}))
    with pytest.raises(UsageError, match="no current context"):
        KubernetesClient().list("Pod")
    path.write_text("a: [")
    with pytest.raises(UsageError, match=r"kubeconfig .* cannot be used"):
        KubernetesClient().list("Pod")


def test_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(UsageError, match="This pod has no access to the API server"):
        KubernetesClient().list("Pod")
    from kubernetes.config import incluster_config

    for name, text in (("token", "the-token"), ("ca.crt", "certificate"), ("namespace", "arena")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(client_module, "_SERVICE_ACCOUNT", tmp_path)
    inside = KubernetesClient()
    with pytest.raises(LudusError):  # no server there
        inside.version()
    assert (inside.context, inside.namespace) == ("", "arena")


# -- objects ------------------------------------------------------------------------------------------------------------------


def test_objects_are_created_listed_changed_and_deleted(api: ApiServer, client: KubernetesClient) -> None:
    created = client.create(pod("a", job="x"))
    client.create(pod("b", job="y"))
    assert created["metadata"]["uid"]
    assert [each["metadata"]["name"] for each in client.list("Pod", "job=x")] == ["a"]
    assert len(client.list("Pod")) == 2
    changed = client.patch("Pod", "a", {"metadata": {"annotations": {"k": "v"}, "labels": {"job": None}}})
    assert changed["metadata"]["annotations"] == {"k": "v"}
    assert "job" not in client.get("Pod", "a")["metadata"]["labels"]
    client.delete("Pod", "a", grace_s=0)
    client.delete("Pod", "a")  # a second time is no error
    with pytest.raises(UnknownName, match="no Pod a in the namespace games"):
        client.get("Pod", "a")
    api.logs["b"] = "2026-11-18T10:00:00.1Z line\n"
    assert client.read_log("b", "main") == "2026-11-18T10:00:00.1Z line\n"


def test_long_lists_are_read_page_by_page(api: ApiServer, client: KubernetesClient, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"": (["a", "b"], "next"), "next": (["c"], "")}

    def answer(method: str, target: str, body: Any) -> tuple[int, Any]:
        token = target.partition("continue=")[2].partition("&")[0]
        names, more = pages[token]
        return 200, {"metadata": {"continue": more}, "items": [pod(name) for name in names]}

    monkeypatch.setattr(api, "answer", answer)
    assert [each["metadata"]["name"] for each in client.list("Pod")] == ["a", "b", "c"]


def test_access_is_reviewed(api: ApiServer, client: KubernetesClient) -> None:
    api.denied.add(("create", "jobs"))
    assert client.allows("create", "jobs", "batch") == (False, "")
    assert client.allows("list", "jobs", "batch")[0]
    assert client.find_api("batch/v1")
    assert not client.find_api("ray.io/v1")


# -- errors -------------------------------------------------------------------------------------------------------------------

FORBIDDEN = 'jobs.batch is forbidden: User "system:serviceaccount:games:ci" cannot create resource "jobs" in API group "batch" in the namespace "games"'
QUOTA = 'pods "x" is forbidden: exceeded quota: small, requested: cpu=4, used: cpu=7, limited: cpu=8'


@pytest.mark.parametrize(
    ("code", "message", "kind", "match"),
    [
        (403, FORBIDDEN, UsageError, "system:serviceaccount:games:ci may not create jobs.batch in the namespace games.*'create'.*'jobs.batch'.*doctor"),
        (403, QUOTA, UsageError, "quota of the namespace games.*requested: cpu=4, used: cpu=7, limited: cpu=8.*--cpus"),
        (403, 'violates PodSecurity "restricted:latest"', UsageError, "does not allow to create Job x.*PodSecurity"),
        (401, "Unauthorized", UsageError, "does not accept the credentials.*log in again"),
        (404, 'namespaces "games" not found', UsageError, "no namespace games.*kubectl create namespace games"),
        (409, 'jobs.batch "x" already exists', UsageError, "Job x exists already"),
        (422, 'Job.batch "x" is invalid: spec.template: Required value', UsageError, "refuses Job x.*spec.template"),
        (503, "etcdserver: leader changed", WorkerFailed, r"\(503\): etcdserver: leader changed.*Try again"),
        (418, "I am a teapot", WorkerFailed, r"\(418\): I am a teapot"),
    ],
)  # fmt: skip
def test_errors_of_the_server_are_explained(
    api: ApiServer, client: KubernetesClient, code: int, message: str, kind: type[LudusError], match: str
) -> None:
    api.failures["POST", "jobs"] = (code, message, 100)
    with pytest.raises(kind, match=f"(?s){match}") as caught:
        client.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {}})
    assert type(caught.value) is kind


def test_a_read_is_repeated_while_the_server_is_busy(api: ApiServer, client: KubernetesClient) -> None:
    api.failures["GET", "pods"] = (503, "starting", 2)
    assert client.list("Pod") == []
    assert len([request for request in api.requests if request == ("GET", "pods")]) == 3


def test_a_write_is_not_repeated(api: ApiServer, client: KubernetesClient) -> None:
    api.failures["POST", "pods"] = (503, "perhaps done", 2)
    with pytest.raises(WorkerFailed):
        client.create(pod("a"))
    assert len(api.requests) == 1


def test_a_server_that_is_not_there_is_reported(tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = yaml.safe_load(api.write_kubeconfig(tmp_path / "config").read_text())
        config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{unused.getsockname()[1]}"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(WorkerFailed, match=r"does not answer.*kubectl cluster-info"):
        KubernetesClient().version()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kept: list[socket.socket] = []
        threading.Thread(target=lambda: kept.extend(silent.accept()[0] for _ in range(9)), daemon=True).start()
        config = yaml.safe_load(api.write_kubeconfig(tmp_path / "config").read_text())
        config["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        with pytest.raises(WorkerFailed, match="does not answer"):
            KubernetesClient().version()
        for connection in kept:
            connection.close()


def test_an_answer_that_is_not_json_is_reported(
    api: ApiServer, client: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "answer", lambda *_: (200, "<html>log in</html>"))
    with pytest.raises(WorkerFailed, match=r"not JSON.*proxy"):
        client.version()


def test_private_keys_of_the_kubeconfig_are_not_left_readable(tmp_path: Path, api: ApiServer) -> None:
    """The library writes them to temporary files, which must be private."""
    from kubernetes.config import kube_config

    write: Any = kube_config._create_temp_file_with_content
    path = Path(write(b"a private key", str(tmp_path)))
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
