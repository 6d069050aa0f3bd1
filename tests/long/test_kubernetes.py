"""Jobs on a real Kubernetes: the whole contract, trainings of every shape, drained and lost nodes, killed pods; nothing is left."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.launch.job import Orchestrator, Role
from ludus.launch.kubernetes.backend import KubernetesOrchestrator
from ludus.launch.kubernetes.settings import KubernetesSettings, PodExtras, PodImage, PodResources
from ludus.testing import orchestrator_contract
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, is_still, job, main, wait_until_ended
from tests.system.kubernetes.product_image import IMAGE
from tests.system.kubernetes_rig import KubernetesRig
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # the first one builds the cluster

GONE_S = 60.0


@pytest.fixture
def rig(ludus_kubernetes: KubernetesRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesRig:
    for name, value in {**ludus_kubernetes.environment, "LUDUS_STATE_DIR": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    return ludus_kubernetes


@pytest.fixture
def namespace(rig: KubernetesRig) -> Iterator[str]:
    """A new namespace, deleted with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    rig.kubectl("create", "namespace", name)
    yield name
    rig.kubectl("delete", "namespace", name, "--wait=false")
    wait_until(lambda: not rig.pod_processes(), GONE_S, what=rig.pod_processes)


class TestContract(OrchestratorContract):
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(orchestrator_contract, "_WAIT_S", 180.0)  # a pod takes seconds to start, and a restart ten

    @pytest.fixture
    def shared(self, rig: KubernetesRig) -> Iterator[Path]:
        """Pods see it under the same path."""
        path = rig.base / "shared" / uuid.uuid4().hex
        path.mkdir(parents=True)
        path.chmod(0o777)
        yield path
        shutil.rmtree(path, ignore_errors=True)

    @pytest.fixture
    def orchestrator(self, namespace: str, shared: Path) -> KubernetesOrchestrator:
        return KubernetesOrchestrator(
            KubernetesSettings(
                namespace=namespace,
                image=PodImage(IMAGE, "Never"),
                resources=PodResources(cpus=0.4, memory="256Mi", shm="16Mi"),
                extras=PodExtras(
                    volumes=({"name": "shared", "hostPath": {"path": str(shared)}},),
                    mounts=({"name": "shared", "mountPath": str(shared)},),
                ),
            )
        )

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        assert isinstance(orchestrator, KubernetesOrchestrator)
        return KubernetesOrchestrator(orchestrator.settings)

    def test_what_does_not_listen_is_killed_when_its_time_is_up(self, orchestrator: Orchestrator, shared: Path) -> None:
        """As in the contract, but an old server does not always say how a pod ended that it has deleted."""
        beat = shared / "beat"
        deaf = Role("deaf", ("sh", "-c", f"trap '' TERM; {BEATING}", str(beat)))
        short = replace(job(main(f"until [ -s {beat} ]; do sleep 0.05; done; exit 3"), deaf), grace_s=0.2)
        status = wait_until_ended(orchestrator, orchestrator.submit(short))
        assert (status.state, status.exit_code) == ("failed", 3)
        assert status.of("deaf")[0].exit_code in (137, None)
        assert is_still(beat)
