import pytest, os
from dataclasses import replace
from ludus.cluster.slurm import *
from ludus.testing.orchestrator_contract import *
from tests.system.slurm_rig import slurm_rig, SlurmRig

@pytest.fixture(scope="module")
def rig():
    with slurm_rig() as r: yield r

@pytest.fixture(autouse=True)
def env(rig, monkeypatch): monkeypatch.setenv("SLURM_CONF", str(rig.conf))

class TestS(OrchestratorContract):
    @pytest.fixture
    def orchestrator(self, tmp_path): return SlurmOrchestrator(tmp_path/"state")
    def again(self, o): return SlurmOrchestrator(o.directory.parent)
    def traces(self, o, job_id):
        import pathlib
        return [p for p in (o.directory/job_id).rglob("*") if p.is_file()]

class Spread(SlurmOrchestrator):
    def submit(self, job):
        return super().submit(replace(job, nodes=2, roles=tuple(r if r.name=="main" else replace(r, at=(1,)) for r in job.roles)))
class TestFar(TestS):
    @pytest.fixture
    def orchestrator(self, tmp_path): return Spread(tmp_path/"state")
