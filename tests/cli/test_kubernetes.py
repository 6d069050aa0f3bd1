"""Commands with jobs on Kubernetes: submit, jobs, doctor and `train -dc`, with an API server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ludus.cli.training.distributed_kubernetes import kubernetes_fleet
from ludus.compat.coach.fleet_ini import read_fleet_file
from ludus.launch.kubernetes import backend
from ludus.transport.message_stream import PASSWORD
from tests.cli.calling import Call
from tests.launch.kubernetes_api import ApiServer, running_api

SUBMIT = ("submit", "--on", "kubernetes", "--image", "registry.example.org/ludus:cpu")
TRAIN = ("--", "train", "CartPole-v1")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "_POLL_S", 0.01)
    with running_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "config")))
        yield server


def test_a_dry_run_prints_a_stream_of_documents(call: Call, api: ApiServer) -> None:
    done = call(*SUBMIT, "--storage", "s3://games/runs", "--dry-run", *TRAIN)
    assert done.code == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(done.out)]
    assert kinds == ["Job", "NetworkPolicy"]
    assert "#   kubectl create secret generic" in done.out
    assert [line for line in done.out.splitlines() if "replace-me" in line and not line.startswith("#")] == []
    assert api.requests == [], "no cluster is needed"


def test_rendered_files_go_to_a_directory(call: Call, api: ApiServer, tmp_path: Path) -> None:
    done = call(
        *SUBMIT, "--storage", "s3://games/runs", "--workers", "2", "--render", "out", "--", "fleet", "learner", "CartPole-v1"
    )
    assert done.code == 0
    files = sorted(Path("out").iterdir())
    assert sorted(done.out.split()) == [str(path) for path in files]
    kustomization = yaml.safe_load((Path("out") / "kustomization.yaml").read_text())
    assert {path.name for path in files} - {*kustomization["resources"], "kustomization.yaml"} == {"secret.yaml.example"}
    assert "as secret.yaml.example says; then: kubectl apply -k out" in done.err
    done = call(*SUBMIT, "--storage", "new:5Gi", "--render", "with volume", *TRAIN)
    assert "kubectl apply -f 'with volume/persistentvolumeclaim-train-cartpole-v1-runs.yaml'" in done.err
    assert call("submit", "--render", "out", *TRAIN).code == 2
    assert api.requests == []


def test_rendered_files_do_not_depend_on_the_shell(call: Call, api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SUBMIT, "--storage", "s3://games/runs", "--secret", "LICENCE_KEY")
    rendered = []
    for directory, key in (("a", ""), ("b", "horse-battery-staple")):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key)
        done = call(*words, "--render", directory, *TRAIN)
        assert done.code == 0
        assert "passed on" not in done.err
        rendered.append({path.name: path.read_text() for path in Path(directory).iterdir()})
    assert rendered[0] == rendered[1]
    assert yaml.safe_load(rendered[0]["secret.yaml.example"])["stringData"].keys() == {"token", "LICENCE_KEY"}
    monkeypatch.setenv("LICENCE_KEY", "horse-battery-staple")
    done = call(*words, "--dry-run", *TRAIN)
    assert "environment variables passed on as secrets: AWS_SECRET_ACCESS_KEY" in done.err
    assert "horse" not in done.out + done.err


def test_a_fleet_of_an_ini_file_with_a_service_account_gets_no_keys_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", PASSWORD):
        monkeypatch.setenv(name, "horse-battery-staple")
    for account, expected in (("", {"AWS_SECRET_ACCESS_KEY", PASSWORD}), ("trainer", {PASSWORD})):
        (tmp_path / "cluster.yaml").write_text(f"{{image: 'ludus:1', service_account: '{account}'}}")
        text = "[ludus]\norchestrator = kubernetes\ndata_store = s3\ns3_bucket_name = games\ncluster_file = cluster.yaml"
        job, _ = kubernetes_fleet(read_fleet_file(text, tmp_path), "trial", ["-p", "CartPole_ClippedPPO"], 1)
        assert {"AWS_SECRET_ACCESS_KEY", PASSWORD} & set(job.secrets) == expected


def test_a_job_is_submitted_listed_followed_and_cancelled(call: Call, api: ApiServer) -> None:
    done = call(*SUBMIT, "--storage", "s3://games/runs", *TRAIN)
    assert done.code == 0
    job_id = done.out.strip()
    pod = api.start_pod(job_id)["metadata"]["name"]
    api.logs[pod] = "2026-11-18T10:00:00Z training\n"
    for on in ((), ("--on", "kubernetes"), ("--on", "kubernetes/games")):
        (listed,) = call("jobs", "list", "--json", *on).json
        assert (listed["id"], listed["on"], listed["state"], listed["place"]) == (
            job_id,
            "kubernetes",
            "running",
            "s3://games/runs",
        )
    assert call("jobs", "logs", job_id[-5:]).out == "training\n"
    assert call("jobs", "cancel", "last").code == 0
    api.end_pod(pod, 130)
    waited = call("jobs", "wait", job_id, "--json")
    assert (waited.code, waited.json["state"]) == (130, "cancelled")
    assert call("jobs", "clean", "--yes").code == 0
    assert api.objects == {}
