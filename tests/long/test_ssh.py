"""Jobs by SSH when machines lose power, cables are pulled and whoever looks after them is killed: what is left is nothing, or the job."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.errors import UsageError, WorkerFailed
from ludus.launch.job import Job, JobStatus, Role
from ludus.launch.job_dir import job_to_json
from ludus.launch.ssh.backend import SshOrchestrator
from ludus.testing.orchestrator_contract import BEATING, is_still, wait_until_ended
from tests.cli.programs import program
from tests.long.record import record
from tests.system import ssh_rig
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PATIENCE_S = 4.0
KILLS = 25


@pytest.fixture
def rig() -> Iterator[ssh_rig.SshRig]:
    with ssh_rig.up(3) as found:
        yield found


@pytest.fixture
def orchestrator(rig: ssh_rig.SshRig, tmp_path: Path) -> Iterator[SshOrchestrator]:
    with rig.orchestrator(tmp_path / "laptop", patience_s=PATIENCE_S) as found:
        yield found


def beating(rig: ssh_rig.SshRig, name: str = "beats") -> tuple[Job, list[Path]]:
    """One that beats on each of three machines, until `over` is there; main has a child too."""
    beats = [rig.shared / f"{name}-{host}" for host in range(3)]
    over = rig.shared / "over"
    roles = (
        Role(
            "main", ("sh", "-c", f"({BEATING}) & until [ -e {over} ]; do sleep 0.05; done", str(beats[0])), restart="when-killed"
        ),
        Role("worker", ("sh", "-c", f"exec sh -c '{BEATING}' {rig.shared}/{name}-$LUDUS_JOB_NODE"), 2, "on-failure", at=(1, 2)),
    )
    return Job(name, roles, "main", nodes=3, grace_s=5), beats


def begun(orchestrator: SshOrchestrator, rig: ssh_rig.SshRig) -> tuple[str, list[Path]]:
    asked, beats = beating(rig)
    job_id = orchestrator.submit(asked)
    wait_until(lambda: all(beat.exists() for beat in beats))
    return job_id, beats


def mended(job_id: str) -> tuple[int, str]:
    """By the command: its exit code, and what it says."""
    with program("jobs", "mend", job_id, listens=False) as running:
        code, _, err = running.finish()
    return code, err


def looked(orchestrator: SshOrchestrator, job_id: str, reason: str, timeout_s: float = 60) -> JobStatus:
    """Until the status says so."""
    wait_until(
        lambda: reason in orchestrator.status(job_id).reason,
        timeout_s,
        what=lambda: f"it says {orchestrator.status(job_id).reason!r}, not {reason!r}",
        poll_s=0.2,
    )
    return orchestrator.status(job_id)


def nothing_runs(rig: ssh_rig.SshRig, orchestrator: SshOrchestrator) -> list[list[str]]:
    orchestrator.close()
    return [ssh_rig.until_gone(rig, host) for host in range(3) if rig.hosts._hosts[host].on]


def test_a_worker_that_loses_power_is_reported_and_comes_back(
    rig: ssh_rig.SshRig, orchestrator: SshOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", str(orchestrator.directory.parent))
    job_id, beats = begun(orchestrator, rig)
    rig.power_off(2)
    status = looked(orchestrator, job_id, f"{rig.hosts.address(2)} does not answer since")
    assert status.state == "running"
    assert not is_still(beats[0])
    assert not is_still(beats[1])
    rig.power_on(2)
    looked(orchestrator, job_id, f"its part on {rig.hosts.address(2)} is over")
    assert is_still(beats[2])
    assert mended(job_id) == (0, f"ludus: {job_id} is restarted on {rig.hosts.address(2)}\n")
    wait_until(lambda: not is_still(beats[2]))
    assert orchestrator.status(job_id).reason == ""
    assert mended(job_id) == (0, f"ludus: {job_id} has no missing processes\n")
    (rig.shared / "over").touch()
    status = wait_until_ended(orchestrator, job_id)
    assert (status.state, status.reason) == ("succeeded", "")
    assert all(is_still(beat) for beat in beats)
    assert nothing_runs(rig, orchestrator) == [[], [], []]


def test_a_job_ends_well_without_a_machine_that_stays_dead(rig: ssh_rig.SshRig, orchestrator: SshOrchestrator) -> None:
    job_id, _ = begun(orchestrator, rig)
    rig.power_off(1)
    (rig.shared / "over").touch()
    status = wait_until_ended(orchestrator, job_id)
    assert (status.state, status.exit_code) == ("succeeded", 0)
    assert f"{rig.hosts.address(1)} does not answer since" in status.reason
    assert nothing_runs(rig, orchestrator) == [[], []]


def test_when_the_machine_of_main_loses_power_the_others_end_and_all_can_be_mended(
    rig: ssh_rig.SshRig, orchestrator: SshOrchestrator
) -> None:
    job_id, beats = begun(orchestrator, rig)
    rig.power_off(0)
    status = looked(orchestrator, job_id, f"{rig.hosts.address(0)} does not answer since")
    assert status.state == "running", "as it was when last seen"
    with pytest.raises(WorkerFailed, match="does not answer"):
        orchestrator.mend(job_id)
    wait_until(lambda: is_still(beats[1]) and is_still(beats[2]))
    assert [ssh_rig.until_gone(rig, host) for host in (1, 2) if orchestrator.close() is None] == [[], []]  # type: ignore[func-returns-value]
    rig.power_on(0)
    status = looked(orchestrator, job_id, "its supervisor is gone")
    assert (status.state, status.exit_code) == ("failed", 1)
    assert orchestrator.mend(job_id) == [rig.hosts.address(host) for host in range(3)]
    wait_until(lambda: not any(is_still(beat) for beat in beats))
    assert orchestrator.status(job_id).state == "running"
    (rig.shared / "over").touch()
    assert wait_until_ended(orchestrator, job_id).state == "succeeded"
    assert nothing_runs(rig, orchestrator) == [[], [], []]


def test_a_cancelled_job_whose_first_machine_is_dead_is_over_when_the_others_are(
    rig: ssh_rig.SshRig, orchestrator: SshOrchestrator
) -> None:
    job_id, beats = begun(orchestrator, rig)
    rig.power_off(0)
    with pytest.raises(WorkerFailed, match=f"{rig.hosts.address(0)} could not be notified"):
        orchestrator.cancel(job_id)
    status = wait_until_ended(orchestrator, job_id)
    assert status.state == "cancelled"
    assert f"{rig.hosts.address(0)} does not answer" in status.reason
    assert is_still(beats[1])
    assert is_still(beats[2])
    assert nothing_runs(rig, orchestrator) == [[], []]


def test_a_cable_that_is_pulled_for_long_ends_what_is_behind_it_and_a_short_while_does_not(
    rig: ssh_rig.SshRig, tmp_path: Path
) -> None:
    with rig.orchestrator(tmp_path / "laptop", patience_s=30.0) as orchestrator:
        job_id, beats = begun(orchestrator, rig)
        rig.hosts.cut(1)
        time.sleep(12)  # longer than it takes to notice, shorter than its patience
        rig.hosts.mend(1)
        assert not is_still(beats[1])
        looked(orchestrator, job_id, "")
        wait_until(lambda: orchestrator.status(job_id).reason == "")
        orchestrator.cancel(job_id)
        assert wait_until_ended(orchestrator, job_id).state == "cancelled"
        assert is_still(beats[1]), "it was held again"
    with rig.orchestrator(tmp_path / "laptop", patience_s=PATIENCE_S) as orchestrator:
        job_id, beats = begun(orchestrator, rig)
        rig.hosts.cut(1)
        wait_until(lambda: is_still(beats[1]))
        assert not is_still(beats[2])
        rig.hosts.mend(1)
        looked(orchestrator, job_id, f"its part on {rig.hosts.address(1)} is over")
        assert orchestrator.mend(job_id) == [rig.hosts.address(1)]
        wait_until(lambda: not is_still(beats[1]))
        orchestrator.cancel(job_id)
        assert wait_until_ended(orchestrator, job_id).state == "cancelled"
        assert nothing_runs(rig, orchestrator) == [[], [], []]


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("whom", ["supervisor", "guard"])
def test_when_who_looks_after_a_part_is_killed_nothing_is_left(
    rig: ssh_rig.SshRig, orchestrator: SshOrchestrator, host: int, whom: str
) -> None:
    job_id, beats = begun(orchestrator, rig)
    guard, supervisor = sorted(
        (process for process in rig.processes(host) if "ludus.launch.supervisor" in process.cmdline()),
        key=lambda process: process.create_time(),
    )
    os.kill((guard if whom == "guard" else supervisor).pid, signal.SIGKILL)
    wait_until(lambda: is_still(beats[host]))
    if host == 0:
        status = wait_until_ended(orchestrator, job_id)
        assert status.state == ("cancelled" if whom == "guard" else "failed")
        assert whom in status.reason
        assert all(is_still(beat) for beat in beats)
    else:
        assert looked(orchestrator, job_id, f"its part on {rig.hosts.address(1)} is over").state == "running"
        assert not is_still(beats[0])
        assert orchestrator.mend(job_id) == [rig.hosts.address(1)]
        wait_until(lambda: not is_still(beats[1]))
        orchestrator.cancel(job_id)
        assert wait_until_ended(orchestrator, job_id).state == "cancelled"
    assert nothing_runs(rig, orchestrator) == [[], [], []]


def test_a_job_needs_neither_the_laptop_nor_its_network(rig: ssh_rig.SshRig, orchestrator: SshOrchestrator) -> None:
    job_id, beats = begun(orchestrator, rig)
    orchestrator.close()
    rig.hosts.cut(3)
    time.sleep(2 * PATIENCE_S)
    assert not any(is_still(beat) for beat in beats)
    assert "does not answer" in orchestrator.status(job_id).reason
    (rig.shared / "over").touch()
    rig.hosts.mend(3)
    assert wait_until_ended(orchestrator, job_id).state == "succeeded"
    assert nothing_runs(rig, orchestrator) == [[], [], []]


LAUNCHER = """
import sys
from pathlib import Path
from ludus.launch.job_dir import job_from_json
from ludus.launch.ssh.backend import SshOrchestrator, SshSettings
settings, job = (Path(word).read_text() for word in sys.argv[2:])
orchestrator = SshOrchestrator(Path(sys.argv[1]), SshSettings.from_json(settings))
print("begin", flush=True)
print(orchestrator.submit(job_from_json(job)), flush=True)
"""


def test_a_launcher_that_is_killed_leaves_a_whole_job_or_none(rig: ssh_rig.SshRig, tmp_path: Path) -> None:
    rng = random.Random(0)
    orchestrator = rig.orchestrator(tmp_path / "laptop", patience_s=PATIENCE_S)
    outcomes: dict[str, int] = {}
    (tmp_path / "settings").write_text(replace(rig.settings(), patience_s=PATIENCE_S).to_json())
    for number in range(KILLS):
        asked, beats = beating(rig, f"try-{number}")
        (tmp_path / "job").write_text(job_to_json(asked))
        words = [sys.executable, "-c", LAUNCHER, str(tmp_path / "laptop"), str(tmp_path / "settings"), str(tmp_path / "job")]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "begin\n"
            time.sleep(rng.uniform(0, 2.0))
            launcher.kill()
            job_id = launcher.stdout.readline().strip()
        known = [status for status in orchestrator.list() if status.name == asked.name]
        if job_id:
            wait_until(lambda: all(beat.exists() for beat in beats))  # noqa: B023
            outcome = "whole"
            orchestrator.cancel(job_id)
            assert wait_until_ended(orchestrator, job_id).state == "cancelled"
        elif known:
            orchestrator.cancel(known[0].id)
            outcome = f"known as {ended_within(orchestrator, known[0].id)}"
        else:
            outcome = "none"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        orchestrator.close()
        left = [ssh_rig.until_gone(rig, host, 60) for host in range(3)]
        assert left == [[], [], []], f"turn {number}, {outcome}"
    record("ssh launcher killed", kills=KILLS, **outcomes)


def ended_within(orchestrator: SshOrchestrator, job_id: str, timeout_s: float = 90.0) -> str:
    wait_until(lambda: orchestrator.status(job_id).over, timeout_s, what=lambda: orchestrator.status(job_id), poll_s=0.2)
    return orchestrator.status(job_id).state


def test_a_job_that_is_over_cannot_be_mended(orchestrator: SshOrchestrator) -> None:
    job_id = orchestrator.submit(Job("short", (Role("main", ("sh", "-c", "exit 3")),), "main", nodes=2))
    status = wait_until_ended(orchestrator, job_id)
    assert (status.state, status.exit_code) == ("failed", 3)
    with pytest.raises(UsageError, match="is over"):
        orchestrator.mend(job_id)


def test_a_training_is_spread_over_three_machines_and_ends_with_its_own_code(rig: ssh_rig.SshRig, tmp_path: Path) -> None:
    (tmp_path / "learner.iplist").write_text("".join(f"{rig.hosts.address(host)} root 22 1\n" for host in range(3)))
    environment = {**os.environ, "LUDUS_STATE_DIR": str(tmp_path / "state"), "PATH": f"{rig.directory}:{os.environ['PATH']}"}
    words = [sys.executable, "-P", "-m", "ludus.cli.main", "submit", "--on", "ssh", "--iplist", "learner.iplist", "--cpus", "1"]
    reach = ["--identity", str(rig.identity), "--known-hosts", str(rig.known_hosts), "--workdir", str(rig.shared)]
    train = ["--wait", "--", "train", "CartPole-v1", "--num-workers", "3", "--stop", "timesteps=3000"]
    done = subprocess.run(
        [*words, *reach, *train], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Ray: 3 nodes, 3 cores" in done.stdout
    assert list(rig.shared.glob("runs/default/*/checkpoints/*"))
    assert [ssh_rig.until_gone(rig, host) for host in range(3)] == [[], [], []]
