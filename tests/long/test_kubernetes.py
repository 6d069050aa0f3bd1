"""Jobs on a real Kubernetes cluster, held by the contract of orchestrators.

    LUDUS_TEST_KUBECONFIG=…  LUDUS_TEST_IMAGE=localhost/ludus:cpu  LUDUS_TEST_SHARED=DIR  pytest -m long tests/long/test_kubernetes.py

The directory must be the same on this machine and on all nodes.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.launch.job import Orchestrator, Role
from ludus.launch.kubernetes.backend import KubernetesOrchestrator
from ludus.launch.kubernetes.client import KubernetesClient
from ludus.launch.kubernetes.settings import KubernetesSettings, PodExtras, PodImage, PodResources
from ludus.testing import orchestrator_contract
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, is_still, job, main, wait_until_ended

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

SOURCES = Path(__file__).parents[2] / "src"
KINDS = ("Job", "Pod", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment", "StatefulSet", "PersistentVolumeClaim")


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    if not os.environ.get("LUDUS_TEST_KUBECONFIG"):
        pytest.skip("LUDUS_TEST_KUBECONFIG names no cluster")
    os.environ["KUBECONFIG"] = os.environ["LUDUS_TEST_KUBECONFIG"]
    name = f"ludus-{secrets.token_hex(3)}"
    client = KubernetesClient(namespace=name)
    client._json("POST", "/api/v1/namespaces", "create", name, body={"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}})
    try:
        yield name
    finally:
        client._json("DELETE", f"/api/v1/namespaces/{name}", "delete", name)


class TestKubernetesOrchestrator(OrchestratorContract):
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(orchestrator_contract, "_WAIT_S", 180.0)  # a pod takes seconds to start, and a restart ten
        monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))

    @pytest.fixture
    def shared(self) -> Iterator[Path]:
        path = Path(os.environ["LUDUS_TEST_SHARED"]) / secrets.token_hex(4)
        path.mkdir()
        path.chmod(0o777)
        yield path
        shutil.rmtree(path)

    @pytest.fixture
    def orchestrator(self, namespace: str) -> Iterator[Orchestrator]:
        shared = os.environ["LUDUS_TEST_SHARED"]
        volumes = [{"name": "shared", "hostPath": {"path": shared}}, {"name": "src", "hostPath": {"path": str(SOURCES)}}]
        mounts = [{"name": "shared", "mountPath": shared}, {"name": "src", "mountPath": "/src", "readOnly": True}]
        settings = KubernetesSettings(
            namespace,
            image=PodImage(os.environ["LUDUS_TEST_IMAGE"], "Never"),
            resources=PodResources(0.05, "128Mi", shm="16Mi"),
            extras=PodExtras(volumes=tuple(volumes), mounts=tuple(mounts)),
        )
        found = SourcesOrchestrator(settings)
        yield found
        for status in found.list():
            found.client.delete("Job", status.id, grace_s=0)

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        assert isinstance(orchestrator, KubernetesOrchestrator)
        return KubernetesOrchestrator(orchestrator.settings)

    def test_what_does_not_listen_is_killed_when_its_time_is_up(self, orchestrator: Orchestrator, shared: Path) -> None:
        beat = shared / "beat"
        deaf = Role("deaf", ("sh", "-c", f"trap '' TERM; {BEATING}", str(beat)))
        status = wait_until_ended(orchestrator, orchestrator.submit(job(main(f"until [ -s {beat} ]; do sleep 0.05; done; exit 3"), deaf)))
        assert isinstance(orchestrator, KubernetesOrchestrator)
        assert (status.state, status.exit_code) == ("failed", 3)
        # An old server does not always say how a pod ended that it has deleted.
        assert status.of("deaf")[0].exit_code in ((137,) if orchestrator._keeps_pods() else (137, None))
        assert is_still(beat)


class SourcesOrchestrator(KubernetesOrchestrator):
    """Runs the sources of this machine in the image."""

    def submit(self, job: orchestrator_contract.Job) -> str:
        import dataclasses

        roles = tuple(dataclasses.replace(role, environment={"PYTHONPATH": "/src", **role.environment}) for role in job.roles)
        return super().submit(dataclasses.replace(job, roles=roles))
