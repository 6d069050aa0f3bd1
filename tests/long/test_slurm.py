"""Slurm at its roughest: the whole contract, near and far; time limits, preemption, nodes that fail, whoever is killed, other users."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.launch.job import Job, Orchestrator, Role
from ludus.launch.job_dir import JobDirectory
from ludus.launch.slurm.backend import SlurmOrchestrator, SlurmSettings
from ludus.process import identity
from ludus.testing.orchestrator_contract import BEATING, is_still, job, main, wait_until_ended
from tests.system import test_slurm
from tests.system.slurm_rig import SlurmRig, as_user, processes_of, slurm_rig
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

GONE_S = 10.0


@pytest.fixture(scope="module")
def rig() -> Iterator[SlurmRig]:
    with slurm_rig() as found:
        yield found


@pytest.fixture(autouse=True)
def _reachable(rig: SlurmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rig.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def orchestrator(tmp_path: Path) -> SlurmOrchestrator:
    return SlurmOrchestrator(tmp_path / "state")


class TestNear(test_slurm.SlurmContract):
    pass


class _Spread(SlurmOrchestrator):
    """All but main are on another node."""

    def submit(self, job: Job) -> str:
        roles = tuple(role if role.name == job.main else replace(role, at=(1,)) for role in job.roles)
        return super().submit(replace(job, nodes=2, roles=roles))


class TestFar(test_slurm.SlurmContract):
    @pytest.fixture
    def orchestrator(self, tmp_path: Path) -> SlurmOrchestrator:
        return _Spread(tmp_path / "state")

    def test_a_process_is_started_again_where_that_was_asked_for(self, orchestrator: Orchestrator, shared: Path) -> None:
        """As in the contract, but a process that has been started here has perhaps not begun there."""
        begun = shared / "begun"
        script = f"echo . >> {begun}; [ $(wc -l < {begun}) -ge 2 ] && exec sleep 600; kill -9 $$"
        first = main(f"touch {begun}; until [ $(wc -l < {begun}) -ge 2 ]; do sleep 0.05; done")
        status = wait_until_ended(
            orchestrator, orchestrator.submit(job(first, Role("worker", ("sh", "-c", script), restart="when-killed")))
        )
        assert (status.state, status.of("worker")[0].restarts) == ("succeeded", 1)


# -- a real training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--wait", "--interactive"])
def test_a_training_is_spread_over_three_nodes_and_ends_with_its_own_code(tmp_path: Path, rig: SlurmRig, how: str) -> None:
    environment = {**os.environ, **rig.environment, "LUDUS_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    words = [sys.executable, "-P", "-m", "ludus.cli.main", "submit", "--on", "slurm", "--nodes", "3", "--cpus", "1", how]
    old = ["--redis-password", "horse-battery", "--", "train", "CartPole-v1", "--redis_password", "horse-battery"]
    train = [*old, "--num-workers", "3", "--stop", "timesteps=3000"]
    done = subprocess.run(
        [*words, *train], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Ray: 3 nodes, 3 cores" in done.stdout
    assert list(tmp_path.glob("runs/default/*/checkpoints/*"))
    (status,) = SlurmOrchestrator(tmp_path / "state").list()
    assert (status.state, status.exit_code) == ("succeeded", 0)
    wait_until(lambda: not processes_of(status.id) and not rig.jobs())
    written = [path for place in (tmp_path, rig.base) for path in place.rglob("*") if path.is_file()]
    assert [path for path in written if b"horse-battery" in path.read_bytes()] == [], "also Slurm writes down what it is told"


# -- interrupted, and going on --------------------------------------------------------------------------------------------


def lives(tmp_path: Path, nodes: int) -> Job:
    """Its first life saves when it is asked to end, its second ends well."""
    script = textwrap.dedent(f"""\
        echo "$SLURM_RESTART_COUNT" >> {tmp_path}/lives
        if [ -e {tmp_path}/saved ]; then exit 0; fi
        trap 'echo saved >> {tmp_path}/saved; exit 130' TERM
        touch {tmp_path}/ready
        while :; do sleep 0.05; done""")
    far = Role("far", ("sh", "-c", BEATING, str(tmp_path / "beat")), nodes - 1, at=tuple(range(1, nodes)))
    return Job("lives", (far, main(script)), "main", nodes=nodes, grace_s=5.0)


@pytest.mark.parametrize("whose", ["its own", "of its partition"])
def test_before_its_time_is_up_a_job_saves_and_is_queued_again_and_goes_on(tmp_path: Path, rig: SlurmRig, whose: str) -> None:
    rig.ask("scontrol", "update", "PartitionName=urgent", "DefaultTime=1")
    limited = SlurmSettings(time="1") if whose == "its own" else SlurmSettings(partition="urgent")
    slurm = SlurmOrchestrator(tmp_path / "state", replace(limited, signal_s=20))
    job_id = slurm.submit(lives(tmp_path, 3))
    wait_until((tmp_path / "ready").exists)
    wait_until((tmp_path / "saved").exists, 90)
    wait_until(lambda: slurm.status(job_id).over, 120)
    status = slurm.status(job_id)
    assert (status.state, status.exit_code, status.of("main")[0].restarts) == ("succeeded", 0, 1), status
    assert len((tmp_path / "lives").read_text().splitlines()) == 2
    assert (tmp_path / "saved").read_text() == "saved\n"
    wait_until(lambda: not processes_of(job_id), GONE_S)
    assert is_still(tmp_path / "beat")


def test_a_job_that_makes_room_for_another_goes_on_afterwards(tmp_path: Path) -> None:
    slurm = SlurmOrchestrator(tmp_path / "state", SlurmSettings(exclusive=True))
    urgent = SlurmOrchestrator(tmp_path / "state", SlurmSettings(exclusive=True, partition="urgent"))
    job_id = slurm.submit(lives(tmp_path, 3))
    wait_until((tmp_path / "ready").exists)
    first = urgent.submit(Job("urgent", (main(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done"),), "main", nodes=3))
    wait_until(lambda: urgent.status(first).state == "running")
    assert slurm.status(job_id).state == "pending"
    assert not processes_of(job_id)
    (tmp_path / "go").touch()
    assert wait_until_ended(urgent, first).state == "succeeded"
    wait_until(lambda: slurm.status(job_id).over, 120)
    status = slurm.status(job_id)
    assert (status.state, status.of("main")[0].restarts) == ("succeeded", 1), status
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_a_job_whose_node_fails_is_started_again(tmp_path: Path, rig: SlurmRig) -> None:
    script = (
        f"echo . >> {tmp_path}/lives; [ $(wc -l < {tmp_path}/lives) -ge 2 ] && exit 0; touch {tmp_path}/ready; exec sleep 600"
    )
    slurm = SlurmOrchestrator(tmp_path / "state")
    far = Role("far", ("sh", "-c", BEATING, str(tmp_path / "beat")), at=(1,))
    job_id = slurm.submit(Job("fails", (far, main(script)), "main", nodes=2))
    wait_until(lambda: (tmp_path / "ready").exists() and (tmp_path / "beat").exists())
    lost = slurm.status(job_id).of("far")[0].host
    rig.lose(lost)
    try:
        assert is_still(tmp_path / "beat")
        wait_until(lambda: slurm.status(job_id).over, 180)
        status = slurm.status(job_id)
        assert (status.state, status.of("main")[0].restarts) == ("succeeded", 1), status
        assert lost not in {process.host for process in status.processes}
    finally:
        rig.start_node(lost)
        wait_until(lambda: rig.ask("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "3"], 60)


# -- ended, and nothing is left -------------------------------------------------------------------------------------------


def running(slurm: SlurmOrchestrator, tmp_path: Path, *, alone: bool = False) -> tuple[str, list[Path]]:
    """Main ends a moment after it is asked to, as one does that saves something. `alone`: it has started nothing."""
    beats = [tmp_path / f"beat-{i}" for i in range(3)]
    one, two, three = (f"sh -c '{BEATING}' {beat}" for beat in beats)
    far = Role("far", ("sh", "-c", f"{one} & setsid {two} & wait"), at=(1,))
    first = f"exec {three}" if alone else f"trap 'sleep 0.5; exit 130' TERM; setsid {three} & while :; do sleep 0.05; done"
    job_id = slurm.submit(replace(job(main(first), far), nodes=2, grace_s=2.0))
    wait_until(lambda: all(beat.exists() for beat in beats))
    return job_id, beats


def test_scancel_by_hand_leaves_no_process(orchestrator: SlurmOrchestrator, tmp_path: Path, rig: SlurmRig) -> None:
    job_id, beats = running(orchestrator, tmp_path)
    (number,) = rig.jobs()
    rig.ask("scancel", number)
    wait_until(lambda: not processes_of(job_id), GONE_S + 5)
    status = wait_until_ended(orchestrator, job_id)
    assert (status.state, status.exit_code) == ("cancelled", 130), status
    assert all(is_still(beat) for beat in beats)
    assert not (orchestrator.directory / job_id / "token").exists()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_cancelled_job_is_gone_within_ten_seconds(orchestrator: SlurmOrchestrator, tmp_path: Path, at_once: bool) -> None:
    job_id, beats = running(orchestrator, tmp_path)
    orchestrator.cancel(job_id, at_once=at_once)
    wait_until(lambda: not processes_of(job_id), GONE_S)
    assert wait_until_ended(orchestrator, job_id).state == "cancelled"
    assert all(is_still(beat) for beat in beats)


@pytest.mark.parametrize("who", [("supervisor",), ("guard",), ("guard", "supervisor")], ids="+".join)
def test_whoever_is_killed_nothing_is_left(
    orchestrator: SlurmOrchestrator, tmp_path: Path, who: tuple[str, ...], rig: SlurmRig
) -> None:
    # With both gone, and without the control groups that clusters have, Slurm does not find what main had started here.
    job_id, beats = running(orchestrator, tmp_path, alone=len(who) == 2)
    found = JobDirectory(orchestrator.directory / job_id).read()
    for name in who:
        watcher = getattr(found, name)
        identity.send_signal(watcher.pid, watcher.started, signal.SIGKILL)
    wait_until(lambda: not processes_of(job_id), GONE_S + 5)
    status = wait_until_ended(orchestrator, job_id)
    assert status.state in ("failed", "cancelled"), status
    assert status.exit_code != 0
    assert all(is_still(beat) for beat in beats)
    wait_until(lambda: not rig.jobs())


# -- other users ----------------------------------------------------------------------------------------------------------


def test_two_users_at_once_do_not_see_each_other(orchestrator: SlurmOrchestrator, rig: SlurmRig, tmp_path: Path) -> None:
    """Another user needs an interpreter that he may read: the system's, with the package from here."""
    python = shutil.which("python3.11", path="/usr/bin")
    source = Path(test_slurm.__file__).parents[2] / "src"
    if python is None or not _can_read(source, rig):
        pytest.skip("no interpreter and sources that another user may read")
    place = rig.base / "nobody"
    place.mkdir()
    os.chown(place, 65534, 65534)
    script = textwrap.dedent(f"""\
        from pathlib import Path
        from ludus.launch.job import Job, Role, wait
        from ludus.launch.slurm.backend import SlurmOrchestrator, SlurmSettings
        slurm = SlurmOrchestrator(Path({str(place / "state")!r}), SlurmSettings(python={python!r}, workdir="/"))
        roles = (Role("main", ("sh", "-c", "id -un; sleep 1")), Role("far", ("sleep", "600"), at=(1,)))
        job_id = slurm.submit(Job("his", roles, "main", nodes=2))
        print(wait(slurm, job_id, 60).state, *slurm.logs(job_id, role="main"))
        """)
    mine = orchestrator.submit(replace(job(main("id -un; sleep 2"), Role("far", ("sleep", "600"), at=(1,))), nodes=2))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "HOME": str(place), **rig.environment}
    done = as_user("nobody", [python, "-c", script], environment, place)
    assert done.stdout == "succeeded nobody\n", done.stderr
    assert wait_until_ended(orchestrator, mine).state == "succeeded"
    assert list(orchestrator.logs(mine, role="main")) == ["root"]
    assert [status.id for status in orchestrator.list()] == [mine]


def _can_read(path: Path, rig: SlurmRig) -> bool:
    words = ["/usr/bin/python3.11", "-c", "import ludus.launch.slurm.backend"]
    try:
        return as_user("nobody", words, {"PYTHONPATH": str(path), "PATH": "/usr/bin"}, Path("/")).returncode == 0
    except OSError:
        return False


def test_these_tests_left_no_process(rig: SlurmRig) -> None:
    wait_until(lambda: not rig.jobs(), 30)
    left = subprocess.run(
        ["pgrep", "-f", r"ludus\.cluster\.member (near|far) (srun|sh)"], capture_output=True, text=True, check=False
    )
    assert left.stdout == "", f"{left.stdout} of {sys.executable}"
