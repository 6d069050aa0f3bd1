"""Jobs by SSH on real machines: the contract on one, and on three what makes a job of its parts. (Who dies when: tests/long.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ludus.cluster.cluster import Orchestrator
from ludus.cluster.ssh import SshOrchestrator
from ludus.testing.orchestrator_contract import OrchestratorContract
from tests.system import ssh_rig

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def rig() -> Iterator[ssh_rig.SshRig]:
    with ssh_rig.up(3) as found:
        yield found


@pytest.fixture(scope="module")
def connected(rig: ssh_rig.SshRig) -> Iterator[SshOrchestrator]:
    with rig.orchestrator(rig.directory / "laptop", 1) as found:
        yield found


class TestContract(OrchestratorContract):
    @pytest.fixture
    def orchestrator(self, connected: SshOrchestrator, tmp_path: Path) -> SshOrchestrator:
        """One that knows of no jobs, and has a connection already."""
        connected.directory = tmp_path / "laptop" / "ssh"
        return connected

    @pytest.fixture
    def shared(self, rig: ssh_rig.SshRig, tmp_path: Path) -> Path:
        path = rig.shared / tmp_path.name
        path.mkdir()
        return path

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        assert isinstance(orchestrator, SshOrchestrator)
        return SshOrchestrator(orchestrator.directory.parent, orchestrator._settings)

    def traces(self, orchestrator: Orchestrator, job_id: str) -> Iterable[Path]:
        assert isinstance(orchestrator, SshOrchestrator)
        here = orchestrator.directory.parent
        there = Path(orchestrator.status(job_id).logs.partition(":")[2]).parents[2]
        found = [path for place in (here, there) for path in place.rglob("*") if path.is_file()]
        assert any(path.name == "part.json" for path in found)
        return found
