"""Jobs of local processes: the contract, and that nothing of them outlives them, whoever is killed."""

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
from ludus.launch.job_dir import JobDirectory, Record, Watcher, is_here, machine, make_private, read_job, state_home, write_job
from ludus.launch.local import LocalOrchestrator
from ludus.launch.supervisor import FIRST_BACKOFF_S, MAX_BACKOFF_S, backoff_s
from ludus.process import identity
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, ended, is_still, job, main
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

    # -- whoever is killed

    def test_a_supervisor_that_is_killed_takes_its_job_along(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beats, job_id = beating(orchestrator, tmp_path)
        kill(record_of(orchestrator, job_id).supervisor)
        status = ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert "supervisor ended with signal SIGKILL" in status.reason
        assert {process.state for process in status.processes} == {"ended"}
        assert all(is_still(beat) for beat in beats)
        assert not JobDirectory(orchestrator.directory / job_id).scratch.exists()

    def test_so_does_its_keeper(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beats, job_id = beating(orchestrator, tmp_path)
        kill(record_of(orchestrator, job_id).keeper)
        status = ended(orchestrator, job_id)
        assert status.state == "cancelled"
        assert status.reason == "its keeper was killed"
        assert all(is_still(beat) for beat in beats)

    def test_with_both_of_them_gone_the_status_still_says_so(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beat = tmp_path / "beat"
        job_id = orchestrator.submit(job(Role("main", ("sh", "-c", BEATING, str(beat)))))
        wait_until(beat.exists)
        found = record_of(orchestrator, job_id)
        pid = found.status.processes[0].pid or orchestrator.status(job_id).processes[0].pid
        for watcher in (found.keeper, found.supervisor):
            kill(watcher)
        status = ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert pid is None or until_gone(pid)
        assert is_still(beat)

    def test_a_process_may_end_while_its_supervisor_looks_at_it(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        lives = tmp_path / "lives"
        # What it leaves behind holds its pipe open, so that only its end is seen, and not that of the pipe.
        short = Role("short", ("sh", "-c", f"echo . >> {lives}; sleep 600 & exit 3"), restart="always")
        asked = job(main(f"until [ $(wc -l < {lives}) -ge 2 ]; do sleep 0.05; done; exit 4"), short)
        make_private(orchestrator.directory)
        lives.touch()
        place = JobDirectory(orchestrator.directory / "late")
        place.create(orchestrator.render(asked), JobStatus("late", "late", "pending"))
        words = [sys.executable, "-c", LATE, str(place.path)]
        with open(tmp_path / "said", "wb") as said:  # not a pipe, which the supervisor would hold open
            subprocess.run(words, timeout=60, check=True, stdout=said, stderr=said, start_new_session=True)
        status = ended(orchestrator, "late")
        assert (status.state, status.exit_code) == ("failed", 4), status.reason

    # -- whoever submits it

    @pytest.mark.parametrize("attached", [False, True])
    def test_a_job_goes_on_without_whoever_submitted_it_unless_it_is_attached(
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
            status = ended(orchestrator, job_id)
            assert (status.state, status.reason) == ("cancelled", "the process that started it is gone")
            assert is_still(beat)
        else:
            wait_until(lambda: not is_still(beat))
            assert orchestrator.status(job_id).state == "running"

    def test_closing_ends_what_is_attached(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        with LocalOrchestrator(tmp_path / "state", attached=True) as attached:
            job_id = attached.submit(job(main("sleep 600")))
            wait_until(lambda: orchestrator.status(job_id).state == "running")
        assert ended(orchestrator, job_id).state == "cancelled"

    # -- what is left

    def test_a_process_that_hides_in_a_session_of_its_own_is_found(self, orchestrator: LocalOrchestrator, tmp_path: Path) -> None:
        beat = tmp_path / "beat"
        hides = f"setsid sh -c '{BEATING}' {beat} </dev/null >/dev/null 2>&1 & until [ -s {beat} ]; do sleep 0.05; done"
        assert ended(orchestrator, orchestrator.submit(job(main(hides)))).state == "succeeded"
        assert is_still(beat)

    def test_one_that_hides_and_writes_for_ever_keeps_nobody_waiting(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main("echo y; setsid yes & sleep 0.1; exit 3")))
        status = ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 3)
        assert next(orchestrator.logs(job_id)) == "y"

    def test_only_its_owner_can_look_into_a_job(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main('echo kept > "$LUDUS_JOB_SCRATCH/file"; stat -c %a "$LUDUS_JOB_SCRATCH"')))
        assert ended(orchestrator, job_id).state == "succeeded"
        assert list(orchestrator.logs(job_id)) == ["700"]
        directory = orchestrator.directory / job_id
        assert not (directory / "scratch").exists()
        for path in (orchestrator.directory.parent, orchestrator.directory, directory, *directory.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path

    def test_another_process_with_the_same_number_is_never_signalled(self, orchestrator: LocalOrchestrator) -> None:
        with subprocess.Popen(["sleep", "600"]) as stranger:
            place = JobDirectory(orchestrator.directory / "old-job")
            make_private(orchestrator.directory)
            status = JobStatus("old-job", "old", "running", processes=(ProcessStatus("main", 0, "running", pid=stranger.pid),))
            place.create({"job.json": write_job(job(main("true")))}, status)
            place.write(
                Record(status, machine(), Watcher(stranger.pid, "an older start"), Watcher(stranger.pid, "an older start"))
            )
            orchestrator.cancel("old-job", at_once=True)
            found = orchestrator.status("old-job")
            assert (found.state, found.reason) == ("failed", "its supervisor is gone")
            assert identity.send_signal(stranger.pid, "an older start", signal.SIGKILL) is False
            assert stranger.poll() is None
            assert identity.send_signal(stranger.pid, identity.start_time(stranger.pid) or "", signal.SIGKILL) is True
            assert stranger.wait(60) == -signal.SIGKILL

    def test_a_job_of_another_machine_is_believed_and_left_alone(self, orchestrator: LocalOrchestrator) -> None:
        make_private(orchestrator.directory)
        place = JobDirectory(orchestrator.directory / "far")
        status = JobStatus("far", "far", "running")
        place.create({}, status)
        place.write(Record(status, "elsewhere pid:[1] another-start", Watcher(1, "x"), Watcher(1, "x")))
        assert orchestrator.status("far").state == "running"
        with pytest.raises(UsageError, match="runs on elsewhere"):
            orchestrator.cancel("far")
        shutil.rmtree(place.path)

    def test_a_damaged_record_is_a_failed_job(self, orchestrator: LocalOrchestrator) -> None:
        job_id = orchestrator.submit(job(main("true")))
        ended(orchestrator, job_id)
        (orchestrator.directory / job_id / "status.json").write_text('{"status": {')
        status = orchestrator.status(job_id)
        assert (status.state, status.exit_code) == ("failed", 1)
        assert "damaged" in status.reason
        assert [found.id for found in orchestrator.list()] == [job_id]

    def test_old_jobs_are_forgotten_and_running_ones_are_not(
        self, orchestrator: LocalOrchestrator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_index, "KEPT", 1)
        running = orchestrator.submit(job(main("sleep 600")))
        over = [orchestrator.submit(job(main("true"))) for _ in range(2)]
        for job_id in over:
            ended(orchestrator, job_id)
        last = orchestrator.submit(job(main("true")))
        assert {status.id for status in orchestrator.list()} == {running, over[1], last}

    def test_what_one_writes_without_end_is_bounded(self, orchestrator: LocalOrchestrator) -> None:
        lines = 3 * MAX_BYTES // 100
        job_id = orchestrator.submit(job(main(f"head -c {100 * lines} /dev/zero | tr '\\0' 'x' | fold -w 99; echo; echo last")))
        assert ended(orchestrator, job_id).state == "succeeded"
        sizes = [path.stat().st_size for path in (orchestrator.directory / job_id / "logs").glob("main-0.log*")]
        assert len(sizes) == 2
        assert sum(sizes) <= 2 * MAX_BYTES
        assert list(orchestrator.logs(job_id))[-1] == "last"

    def test_a_directory_of_somebody_else_is_refused(self, tmp_path: Path) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can make a directory of somebody else")
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(UsageError, match=r"another user.*LUDUS_STATE_DIR"):
            LocalOrchestrator(tmp_path).submit(job(main("true")))
        os.chown(tmp_path, 0, 0)


# -- values -------------------------------------------------------------------------------------------------------------


def test_the_state_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LUDUS_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert state_home() == tmp_path / ".local" / "state" / "ludus"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    assert state_home() == tmp_path / ".local" / "state" / "ludus"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_home() == Path("/xdg/ludus")
    monkeypatch.setenv("LUDUS_STATE_DIR", "/own")
    assert state_home() == Path("/own")


def test_it_is_known_whether_a_job_could_be_seen_from_here() -> None:
    host, space, boot = machine().split()
    assert is_here(machine())
    assert is_here(f"renamed {space} {boot}"), "the host has another name now"
    assert is_here(f"{host} pid:[1] older"), "it has been started anew: what ran there runs no more"
    assert not is_here(f"{host} pid:[1] {boot}"), "another container"
    assert not is_here(f"other {space} other")


def test_a_job_read_again_is_the_same() -> None:
    asked = Job(
        "trial",
        (Role("main", ("a b", "ö\n")), Role("worker", ("x",), 3, "on-failure", {"A": "b"}, 2, 0.5)),
        "main",
        ("SECRET",),
        grace_s=3.0,
    )
    assert read_job(write_job(asked)) == asked


def test_back_off_doubles_up_to_a_bound() -> None:
    delays = [backoff_s(lives) for lives in range(1, 100)]
    assert delays[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert max(delays) == delays[-1] == MAX_BACKOFF_S


def test_an_orchestrator_is_found_by_name() -> None:
    assert isinstance(open_orchestrator("local"), LocalOrchestrator)
    assert isinstance(open_orchestrator("ludus.launch.local:LocalOrchestrator"), LocalOrchestrator)
    with pytest.raises(UnknownName, match=r"'kubernetes' is not available.*ludus fleet worker"):
        open_orchestrator("kubernetes")
    with pytest.raises(UnknownName, match=r"'locale'.*'local'"):
        open_orchestrator("locale")


# -- for these tests ----------------------------------------------------------------------------------------------------


LATE = """
import itertools, sys
from ludus.launch import supervisor
real, turns = supervisor._exited, {}
def exited(process):  # the kernel says no, and a moment later yes
    return next(turns.setdefault(process.pid, itertools.cycle([False, True]))) and real(process)
supervisor._exited = exited
sys.exit(supervisor.main(sys.argv[1:]))
"""


def record_of(orchestrator: LocalOrchestrator, job_id: str) -> Record:
    return JobDirectory(orchestrator.directory / job_id).read()


def beating(orchestrator: LocalOrchestrator, tmp_path: Path) -> tuple[list[Path], str]:
    """A job with a child, a grandchild, and one in a session of its own."""
    beats = [tmp_path / f"beat-{i}" for i in range(3)]
    one, two, three = (f"sh -c '{BEATING}' {beat}" for beat in beats)
    job_id = orchestrator.submit(job(main(f"{one} & setsid {two} & wait"), Role("other", ("sh", "-c", f"exec {three}"))))
    wait_until(lambda: all(beat.exists() for beat in beats))
    return beats, job_id


def kill(watcher: Watcher | None) -> None:
    assert watcher is not None
    assert identity.send_signal(watcher.pid, watcher.started, signal.SIGKILL)


def until_gone(pid: int) -> bool:
    wait_until(lambda: identity.start_time(pid) is None)
    return True
