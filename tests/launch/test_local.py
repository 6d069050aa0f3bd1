"""Local jobs: the orchestrator contract, and that no process outlives its job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ludus.errors import UnknownName, UsageError
from ludus.io.rotating_log import MAX_BYTES
from ludus.launch import job_index
from ludus.launch.job import Job, JobStatus, Orchestrator, ProcessStatus, Role, open_orchestrator
from ludus.launch.job_dir import (
    JobDirectory,
    JobRecord,
    ProcessIdentity,
    is_this_machine,
    job_from_json,
    job_to_json,
    machine_id,
    make_private,
    state_dir,
)
from ludus.launch.local import LocalOrchestrator
from ludus.process import identity
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, is_still, job, main, wait_until_ended
from tests.waiting import wait_until


class TestLocalOrchestrator(OrchestratorContract):
    @pytest.fixture
    def orchestrator(self, tmp_path: Path) -> LocalOrchestrator:
        return LocalOrchestrator(tmp_path / "state")

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        assert isinstance(orchestrator, LocalOrchestrator)
        return LocalOrchestrator(orchestrator.directory.parent)

    def traces(self, orchestrator: Orchestrator, job_id: str) -> Iterable[Path]:
        assert isinstance(orchestrator, LocalOrchestrator)
        return [path for path in (orchestrator.directory / job_id).rglob("*") if path.is_file()]

    # -- killed supervisors

    def test_a_job_ends_with_its_killed_supervisor(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beats, job_id = start_beating(orchestrator, tmp_path)
        kill(record_of(orchestrator, job_id).supervisor)
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert "supervisor ended with signal SIGKILL" in status.reason
        assert {process.state for process in status.processes} == {"ended"}
        assert all(is_still(beat) for beat in beats)
        assert not JobDirectory(orchestrator.directory / job_id).scratch.exists()

    def test_a_job_ends_with_its_killed_guard(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beats, job_id = start_beating(orchestrator, tmp_path)
        kill(record_of(orchestrator, job_id).guard)
        status = wait_until_ended(orchestrator, job_id)
        assert status.state == "cancelled"
        assert status.reason == "its guard process was killed"
        assert all(is_still(beat) for beat in beats)

    def test_a_job_without_supervisor_and_guard_has_failed(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beat = tmp_path / "beat"
        job_id = orchestrator.submit(job(Role("main", ("sh", "-c", BEATING, str(beat)))))
        wait_until(beat.exists)
        found = record_of(orchestrator, job_id)
        pid = found.status.processes[0].pid or orchestrator.status(job_id).processes[0].pid
        for process in (found.guard, found.supervisor):
            kill(process)
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert pid is None or until_gone(pid)
        assert is_still(beat)

    def test_a_process_may_end_while_the_supervisor_checks_it(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        lives = tmp_path / "lives"
        # The background child keeps the pipe open, so that only the exit of the process shows its end.
        short = Role("short", ("sh", "-c", f"echo . >> {lives}; sleep 600 & exit 3"), restart="always")
        spec = job(main(f"until [ $(wc -l < {lives}) -ge 2 ]; do sleep 0.05; done; exit 4"), short)
        make_private(orchestrator.directory)
        lives.touch()
        directory = JobDirectory(orchestrator.directory / "late")
        directory.create(orchestrator.render(spec), JobStatus("late", "late", "pending"))
        words = [sys.executable, "-c", LATE, str(directory.path)]
        with open(tmp_path / "output", "wb") as output:  # not a pipe, which the supervisor would keep open
            subprocess.run(words, timeout=60, check=True, stdout=output, stderr=output, start_new_session=True)
        status = wait_until_ended(orchestrator, "late")
        assert (status.state, status.exit_code) == ("failed", 4), status.reason

    # -- the submitting process

    @pytest.mark.parametrize("attached", [False, True])
    def test_only_an_attached_job_ends_with_the_submitting_process(
        self, orchestrator: LocalOrchestrator, tmp_path: Path, attached: bool
    ) -> None:
        beat = tmp_path / "beat"
        script = f"""
import sys
from pathlib import Path
from ludus.launch.job import Job, Role
from ludus.launch.local import LocalOrchestrator
orchestrator = LocalOrchestrator(Path({str(orchestrator.directory.parent)!r}), attached={attached})
print(orchestrator.submit(Job("trial", (Role("main", ("sh", "-c", {BEATING!r}, {str(beat)!r})),), "main")), flush=True)
sys.stdin.read()
"""
        words = [sys.executable, "-c", script]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as submitter:
            assert submitter.stdout is not None
            job_id = submitter.stdout.readline().strip()
            wait_until(beat.exists)
            submitter.kill()
        if attached:
            status = wait_until_ended(orchestrator, job_id)
            assert (status.state, status.reason) == ("cancelled", "the process that started it is gone")
            assert is_still(beat)
        else:
            wait_until(lambda: not is_still(beat))
            assert orchestrator.status(job_id).state == "running"

    def test_closing_the_orchestrator_ends_attached_jobs(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        with LocalOrchestrator(tmp_path / "state", attached=True) as attached:
            job_id = attached.submit(job(main("sleep 600")))
            wait_until(lambda: orchestrator.status(job_id).state == "running")
        assert wait_until_ended(orchestrator, job_id).state == "cancelled"

    # -- clean-up and records

    def test_a_child_in_another_session_is_killed(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beat = tmp_path / "beat"
        hides = f"setsid sh -c '{BEATING}' {beat} </dev/null >/dev/null 2>&1 & until [ -s {beat} ]; do sleep 0.05; done"
        assert wait_until_ended(orchestrator, orchestrator.submit(job(main(hides)))).state == "succeeded"
        assert is_still(beat)

    def test_a_child_that_writes_for_ever_does_not_delay_the_end(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main("echo y; setsid yes & sleep 0.1; exit 3")))
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 3)
        assert next(orchestrator.logs(job_id)) == "y"

    def test_only_the_owner_can_read_a_job_directory(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main('echo kept > "$LUDUS_JOB_SCRATCH/file"; stat -c %a "$LUDUS_JOB_SCRATCH"')))
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert list(orchestrator.logs(job_id)) == ["700"]
        directory = orchestrator.directory / job_id
        assert not (directory / "scratch").exists()
        for path in (orchestrator.directory.parent, orchestrator.directory, directory, *directory.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path

    def test_a_process_that_reuses_the_id_is_never_signalled(self, orchestrator: LocalOrchestrator) -> None:
        with subprocess.Popen(["sleep", "600"]) as stranger:
            directory = JobDirectory(orchestrator.directory / "old-job")
            make_private(orchestrator.directory)
            status = JobStatus("old-job", "old", "running", processes=(ProcessStatus("main", 0, "running", pid=stranger.pid),))
            directory.create({"job.json": job_to_json(job(main("true")))}, status)
            directory.write(
                JobRecord(
                    status,
                    machine_id(),
                    ProcessIdentity(stranger.pid, "an older start"),
                    ProcessIdentity(stranger.pid, "an older start"),
                )
            )
            orchestrator.cancel("old-job", at_once=True)
            found = orchestrator.status("old-job")
            assert (found.state, found.reason) == ("failed", "its supervisor is gone")
            assert identity.send_signal(stranger.pid, "an older start", signal.SIGKILL) is False
            assert stranger.poll() is None
            assert identity.send_signal(stranger.pid, identity.start_time(stranger.pid) or "", signal.SIGKILL) is True
            assert stranger.wait(60) == -signal.SIGKILL

    def test_a_job_of_another_machine_cannot_be_cancelled_here(self, orchestrator: LocalOrchestrator) -> None:
        make_private(orchestrator.directory)
        directory = JobDirectory(orchestrator.directory / "far")
        status = JobStatus("far", "far", "running")
        directory.create({}, status)
        directory.write(JobRecord(status, "elsewhere pid:[1] another-start", ProcessIdentity(1, "x"), ProcessIdentity(1, "x")))
        assert orchestrator.status("far").state == "running"
        with pytest.raises(UsageError, match="runs on elsewhere"):
            orchestrator.cancel("far")
        shutil.rmtree(directory.path)

    def test_a_damaged_record_is_a_failed_job(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main("true")))
        wait_until_ended(orchestrator, job_id)
        (orchestrator.directory / job_id / "status.json").write_text('{"status": {')
        status = orchestrator.status(job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert "damaged" in status.reason
        assert [found.id for found in orchestrator.list()] == [job_id]

    def test_old_jobs_are_deleted_and_running_ones_are_not(
        self, orchestrator: LocalOrchestrator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_index, "MAX_ENDED_JOBS", 1)
        running = orchestrator.submit(job(main("sleep 600")))
        over = [orchestrator.submit(job(main("true"))) for _ in range(2)]
        for job_id in over:
            wait_until_ended(orchestrator, job_id)
        last = orchestrator.submit(job(main("true")))
        assert {status.id for status in orchestrator.list()} == {running, over[1], last}

    def test_the_size_of_logs_is_bounded(self, orchestrator: LocalOrchestrator) -> None:
        lines = 3 * MAX_BYTES // 100
        job_id = orchestrator.submit(job(main(f"head -c {100 * lines} /dev/zero | tr '\\0' 'x' | fold -w 99; echo; echo last")))
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        sizes = [path.stat().st_size for path in (orchestrator.directory / job_id / "logs").glob("main-0.log*")]
        assert len(sizes) == 2
        assert sum(sizes) <= 2 * MAX_BYTES
        assert list(orchestrator.logs(job_id))[-1] == "last"

    def test_a_directory_of_another_user_is_refused(self, tmp_path: Path) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can create a directory of another user")
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(UsageError, match=r"another user.*LUDUS_STATE_DIR"):
            LocalOrchestrator(tmp_path).submit(job(main("true")))
        os.chown(tmp_path, 0, 0)


# -- values -------------------------------------------------------------------------------------------------------------


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LUDUS_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert state_dir() == tmp_path / ".local" / "state" / "ludus"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    assert state_dir() == tmp_path / ".local" / "state" / "ludus"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_dir() == Path("/xdg/ludus")
    monkeypatch.setenv("LUDUS_STATE_DIR", "/own")
    assert state_dir() == Path("/own")


def test_machine_ids_show_whether_processes_would_be_visible_here() -> None:
    host, space, boot = machine_id().split()
    assert is_this_machine(machine_id())
    assert is_this_machine(f"renamed {space} {boot}"), "the host has another name now"
    assert is_this_machine(f"{host} pid:[1] older"), "the same host after a reboot"
    assert not is_this_machine(f"{host} pid:[1] {boot}"), "another container"
    assert not is_this_machine(f"other {space} other")


def test_a_job_survives_a_round_trip_through_json() -> None:
    spec = Job(
        "trial",
        (Role("main", ("a b", "ö\n")), Role("worker", ("x",), 3, "on-failure", {"A": "b"}, 2, 0.5)),
        "main",
        ("SECRET",),
        grace_s=3.0,
    )
    assert job_from_json(job_to_json(spec)) == spec


def test_an_orchestrator_is_found_by_name() -> None:
    assert isinstance(open_orchestrator("local"), LocalOrchestrator)
    assert isinstance(open_orchestrator("ludus.launch.local:LocalOrchestrator"), LocalOrchestrator)
    with pytest.raises(UnknownName, match=r"'locale'.*'local'"):
        open_orchestrator("locale")


# -- helpers ------------------------------------------------------------------------------------------------------------


LATE = """
import itertools, sys
from ludus.launch import supervisor
real, turns = supervisor._has_exited, {}
def has_exited(process):  # first False, then True
    return next(turns.setdefault(process.pid, itertools.cycle([False, True]))) and real(process)
supervisor._has_exited = has_exited
sys.exit(supervisor.main(sys.argv[1:]))
"""


def record_of(orchestrator: LocalOrchestrator, job_id: str) -> JobRecord:
    return JobDirectory(orchestrator.directory / job_id).read()


def start_beating(orchestrator: LocalOrchestrator, tmp_path: Path) -> tuple[list[Path], str]:
    """Start a job with a child, a grandchild, and a process in another session, which all write heartbeats."""
    beats = [tmp_path / f"beat-{i}" for i in range(3)]
    one, two, three = (f"sh -c '{BEATING}' {beat}" for beat in beats)
    job_id = orchestrator.submit(job(main(f"{one} & setsid {two} & wait"), Role("other", ("sh", "-c", f"exec {three}"))))
    wait_until(lambda: all(beat.exists() for beat in beats))
    return beats, job_id


def kill(process: ProcessIdentity | None) -> None:
    assert process is not None
    assert identity.send_signal(process.pid, process.started, signal.SIGKILL)


def until_gone(pid: int) -> bool:
    wait_until(lambda: identity.start_time(pid) is None)
    return True
