"""Jobs on a real Slurm of three nodes: the contract (what of it takes little), nodes of several kinds, an allocation, and who is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.errors import UsageError, WorkerFailed
from ludus.launch.job import Job, Orchestrator, Role
from ludus.launch.slurm.backend import SlurmGroup, SlurmOrchestrator, SlurmSettings
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, is_still, job, main, wait_until_ended
from tests.system.slurm_rig import SlurmRig, processes_of, slurm_rig
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def rig() -> Iterator[SlurmRig]:
    with slurm_rig() as found:
        yield found


@pytest.fixture(autouse=True)
def _reachable(rig: SlurmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rig.environment.items():
        monkeypatch.setenv(name, value)


class SlurmContract(OrchestratorContract):
    @pytest.fixture
    def orchestrator(self, tmp_path: Path) -> SlurmOrchestrator:
        return SlurmOrchestrator(tmp_path / "state")

    @pytest.fixture(autouse=True)
    def _kept(self, rig: SlurmRig) -> None:
        self.rig = rig

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        assert isinstance(orchestrator, SlurmOrchestrator)
        return SlurmOrchestrator(orchestrator.directory.parent)

    def traces(self, orchestrator: Orchestrator, job_id: str) -> Iterable[Path]:
        """Slurm's own files too: it writes down the environment and the script of every job."""
        assert isinstance(orchestrator, SlurmOrchestrator)
        places = [orchestrator.directory / job_id, self.rig.base]
        return [path for place in places for path in place.rglob("*") if path.is_file()]


_LONG = (
    "test_the_exit_code_is_that_of_the_main_role",
    "test_what_cannot_be_started_has_failed",
    "test_roles_other_than_main_may_end_before_it",
    "test_a_process_is_started_again_where_that_was_asked_for",
    "test_a_main_role_that_was_killed_may_be_started_again_too",
    "test_what_does_not_listen_is_killed_when_its_time_is_up",
    "test_lines_of_several_processes_say_whose_they_are",
    "test_what_a_job_works_on_can_be_seen_by_others",
    "test_a_process_has_the_environment_of_its_role_and_knows_who_it_is",
)
"""Of the contract: those are the supervisor's, which has passed them on this machine; tests/long has them here too."""


class TestSlurmOrchestrator(SlurmContract):
    for _name in _LONG:
        locals()[_name] = None
    del _name


# -- several nodes ------------------------------------------------------------------------------------------------------


def test_a_job_of_three_nodes_runs_on_them_and_knows_them(orchestrator: SlurmOrchestrator, tmp_path: Path) -> None:
    said = 'echo "$LUDUS_JOB_NODE $SLURMD_NODENAME $SLURM_CPUS_PER_TASK $LUDUS_JOB_NODES ${LD_PRELOAD-none}"'
    told = (
        f"{said} > {tmp_path}/$LUDUS_JOB_NODE.part; mv {tmp_path}/$LUDUS_JOB_NODE.part {tmp_path}/said-$LUDUS_JOB_NODE; sleep 600"
    )
    far = Role("far", ("sh", "-c", told), 2, at=(1, 2))
    first = main(
        f'until [ -e {tmp_path}/said-1 ] && [ -e {tmp_path}/said-2 ]; do sleep 0.05; done; {said}; stat -c %a "$LUDUS_JOB_TOKEN_FILE"; exit 5'
    )
    settings = SlurmSettings(cpus=2)
    slurm = SlurmOrchestrator(orchestrator.directory.parent, settings)
    job_id = slurm.submit(Job("three", (far, first), "main", nodes=3))
    status = wait_until_ended(slurm, job_id)
    assert (status.state, status.exit_code) == ("failed", 5), status
    assert [process.host for process in status.processes] == ["n2", "n3", "n1"]
    addresses = "127.0.0.2,127.0.0.3,127.0.0.4"
    assert list(slurm.logs(job_id, role="main")) == [f"0 n1 2 {addresses} none", "600"]
    assert [(tmp_path / f"said-{i}").read_text() for i in (1, 2)] == [f"{i} n{i + 1} 2 {addresses} none\n" for i in (1, 2)]
    wait_until(lambda: not processes_of(job_id))


def test_nodes_of_several_kinds_are_one_job(orchestrator: SlurmOrchestrator, tmp_path: Path) -> None:
    said = 'echo "$SLURM_CPUS_PER_TASK ${CUDA_VISIBLE_DEVICES-none}"'
    told = f"{said} > {tmp_path}/part-$LUDUS_JOB_NODE; mv {tmp_path}/part-$LUDUS_JOB_NODE {tmp_path}/said-$LUDUS_JOB_NODE"
    roles = (Role("sampler", ("sh", "-c", told), 2, at=(1, 2)), main(f"until [ -e {tmp_path}/said-1 ] && [ -e {tmp_path}/said-2 ]; do sleep 0.05; done; {said}"))  # fmt: skip
    groups = (SlurmGroup(1, cpus=1), SlurmGroup(2, cpus=3, gpus=1))
    slurm = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(groups=groups))
    job_id = slurm.submit(Job("kinds", roles, "main", nodes=3))
    status = wait_until_ended(slurm, job_id)
    assert status.state == "succeeded", (status, list(slurm.logs(job_id)))
    assert [line.split()[-1] for line in slurm.logs(job_id, role="main")] == ["none"]
    assert [(tmp_path / f"said-{i}").read_text() for i in (1, 2)] == ["3 0\n"] * 2
    assert len({process.host for process in status.processes}) == 3


def test_a_far_process_saves_what_it_has_before_it_ends(orchestrator: SlurmOrchestrator, tmp_path: Path) -> None:
    saves = f"trap 'echo saved > {tmp_path}/saved; exit 3' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    beat = tmp_path / "beat"
    deaf = Role("deaf", ("sh", "-c", f"trap '' TERM; setsid sh -c '{BEATING}' {beat}"), at=(1,))
    roles = (main("sleep 600"), Role("far", ("sh", "-c", saves), at=(1,)), deaf)
    job_id = orchestrator.submit(replace(job(*roles), nodes=2, grace_s=2.0))
    wait_until(lambda: beat.exists() and (tmp_path / "ready").exists())
    orchestrator.cancel(job_id)
    status = wait_until_ended(orchestrator, job_id)
    assert status.state == "cancelled"
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert (status.of("far")[0].exit_code, status.of("deaf")[0].exit_code) == (3, 137)
    wait_until(lambda: not processes_of(job_id))
    assert is_still(beat)


def test_two_jobs_run_side_by_side_and_do_not_meet(orchestrator: SlurmOrchestrator, tmp_path: Path) -> None:
    def one(name: str) -> Job:
        told = (
            f"echo $LUDUS_JOB_PORT > {tmp_path}/$LUDUS_JOB_ID; until [ $(ls {tmp_path}/pair-* | wc -l) = 2 ]; do sleep 0.05; done"
        )
        return Job(
            "pair", (main(told.replace("$LUDUS_JOB_ID", f"pair-{name}")), Role("far", ("sleep", "600"), at=(1,))), "main", nodes=2
        )

    ids = [orchestrator.submit(one(name)) for name in ("a", "b")]
    assert [wait_until_ended(orchestrator, job_id).state for job_id in ids] == ["succeeded"] * 2
    ports = {(tmp_path / f"pair-{name}").read_text() for name in ("a", "b")}
    assert len(ports) == 2


# -- by hand ------------------------------------------------------------------------------------------------------------


def test_in_an_allocation_a_job_runs_in_the_foreground(rig: SlurmRig, tmp_path: Path) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(
        textwrap.dedent(f"""\
        import sys
        from pathlib import Path
        from ludus.launch.job import Job, Role
        from ludus.launch.slurm.backend import SlurmOrchestrator
        roles = (Role("main", ("sh", "-c", "echo on $SLURMD_NODENAME; exit 6")), Role("far", ("sleep", "600"), at=(1,)))
        sys.exit(SlurmOrchestrator(Path({str(tmp_path / "state")!r})).run_here(Job("byhand", roles, "main", nodes=2)))
        """)
    )
    slurm = SlurmOrchestrator(tmp_path / "state")
    asked = Job("byhand", (main("true"),), "main", nodes=2)
    with pytest.raises(UsageError, match=r"not in a Slurm allocation.*salloc --job-name=byhand --nodes=2"):
        slurm.run_here(asked)
    words = [*slurm.salloc_words(asked), sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6, done.stderr
    assert done.stdout.splitlines()[0] == "on n1"  # then srun says how it ended
    (status,) = slurm.list()
    assert (status.state, status.exit_code) == ("failed", 6)
    wait_until(lambda: not processes_of(status.id))


# -- what Slurm says ----------------------------------------------------------------------------------------------------


def test_what_waits_says_why_and_can_be_cancelled_by_its_number(orchestrator: SlurmOrchestrator, rig: SlurmRig) -> None:
    slurm = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(extra=("--begin=now+1hour",)))
    job_id = slurm.submit(job(main("true")))
    status = slurm.status(job_id)
    assert (status.state, status.reason) == ("pending", "waiting in the queue: BeginTime")
    (number,) = rig.jobs()
    assert slurm.status(number).id == job_id
    slurm.cancel(number)
    status = wait_until_ended(slurm, job_id)
    assert (status.state, status.exit_code) == ("cancelled", 130)
    assert {process.state for process in status.processes} == {"ended"}


def test_slurms_own_words_reach_whoever_asked_for_the_wrong_thing(
    orchestrator: SlurmOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(partition="nowhere"))
    with pytest.raises(UsageError, match=r"[Ii]nvalid partition"):
        wrong.submit(job(main("true")))
    odd = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(extra=("--bogus=1",)))
    with pytest.raises(UsageError, match="bogus"):
        odd.submit(job(main("true")))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"sbatch is not installed.*login node"):
        orchestrator.submit(job(main("true")))
    assert list(orchestrator.directory.iterdir()) == []


def test_options_come_before_variables_of_ones_profile(
    orchestrator: SlurmOrchestrator, rig: SlurmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = {
        "PARTITION": "urgent",
        "TIMELIMIT": "9",
        "JOB_NAME": "theirs",
        "OUTPUT": "/dev/null",
        "NO_REQUEUE": "1",
        "QOS": "any",
    }
    for name, value in profile.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    slurm = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(partition="main", time="30"))
    job_id = slurm.submit(job(main('scontrol --oneliner show job "$SLURM_JOB_ID"')))
    assert wait_until_ended(slurm, job_id).state == "succeeded"
    (told,) = slurm.logs(job_id)
    said = set(told.split())
    assert {"Partition=main", "TimeLimit=00:30:00", "Requeue=1"} <= said
    assert {"JobName=theirs", "StdOut=/dev/null"}.isdisjoint(said)


def test_a_setup_that_fails_is_a_failed_job_that_says_where_to_look(orchestrator: SlurmOrchestrator) -> None:
    slurm = SlurmOrchestrator(orchestrator.directory.parent, SlurmSettings(setup=("echo no such module >&2; exit 9",)))
    job_id = slurm.submit(job(main("true")))
    status = wait_until_ended(slurm, job_id)
    assert (status.state, status.exit_code) == ("failed", 9)
    assert "before any of its processes was started" in status.reason
    (said,) = (slurm.directory / job_id / "logs").glob("slurm-*.out")
    assert said.read_text() == "no such module\n"


@pytest.fixture
def orchestrator(tmp_path: Path) -> SlurmOrchestrator:
    return SlurmOrchestrator(tmp_path / "state")


def test_without_a_controller_nothing_is_submitted_and_what_is_known_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_rig(1) as lonely:
        monkeypatch.setenv("SLURM_CONF", str(lonely.conf))
        slurm = SlurmOrchestrator(tmp_path / "state")
        job_id = slurm.submit(job(main("exec sleep 600")))
        wait_until(lambda: slurm.status(job_id).state == "running")
        conf = lonely.conf.read_text().replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1")
        lonely.conf.write_text(conf.replace("SlurmctldTimeout=30", "SlurmctldTimeout=1"))
        with pytest.raises((WorkerFailed, UsageError), match="sbatch"):
            SlurmOrchestrator(tmp_path / "other").submit(job(main("true")))
        status = SlurmOrchestrator(tmp_path / "state").status(job_id)
        assert status.state == "running"
        assert "squeue" in status.reason
        assert os.listdir(tmp_path / "other" / "slurm") == []


def test_a_job_of_another_cluster_is_neither_judged_nor_ended_here(
    orchestrator: SlurmOrchestrator, rig: SlurmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who logs in to two clusters has one home on both."""
    job_id = orchestrator.submit(job(main("exec sleep 600")))
    wait_until(lambda: orchestrator.status(job_id).state == "running")
    token = orchestrator.directory / job_id / "token"
    with slurm_rig(1) as other:
        monkeypatch.setenv("SLURM_CONF", str(other.conf))
        there = SlurmOrchestrator(orchestrator.directory.parent)
        (status,) = there.list()
        assert (status.state, status.exit_code) == ("running", None)
        assert "another cluster, rig" in status.reason
        assert token.exists()
        with pytest.raises(UsageError, match="Cancel it there"):
            there.cancel(job_id)
    monkeypatch.setenv("SLURM_CONF", str(rig.conf))
    assert orchestrator.status(job_id).state == "running"
    orchestrator.cancel(job_id)
    assert wait_until_ended(orchestrator, job_id).state == "cancelled"
