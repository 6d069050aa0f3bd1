"""Jobs by SSH on real machines: the contract on one, and on three what makes a job of its parts. (Who dies when: tests/long.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import ludus
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.launch.job import Job, Orchestrator, Role
from ludus.launch.ssh.backend import SshOrchestrator, SshSettings
from ludus.testing.orchestrator_contract import BEATING, OrchestratorContract, is_still, job, main, wait_until_ended
from tests.system import ssh_rig
from tests.waiting import wait_until

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


# -- several machines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three(rig: ssh_rig.SshRig, connected: SshOrchestrator, tmp_path: Path) -> Iterator[SshOrchestrator]:
    connected.close()  # whose far side is a process there
    with rig.orchestrator(tmp_path / "laptop") as found:
        yield found
    assert [ssh_rig.until_gone(rig, host) for host in range(3)] == [[], [], []]


@pytest.fixture
def shared(rig: ssh_rig.SshRig, tmp_path: Path) -> Path:
    path = rig.shared / tmp_path.name
    path.mkdir()
    return path


def test_processes_run_where_they_belong_and_know_it(rig: ssh_rig.SshRig, three: SshOrchestrator, shared: Path) -> None:
    says = (
        'umask 022; { hostname; echo "$LUDUS_JOB_ROLE $LUDUS_JOB_INDEX $LUDUS_JOB_NODE $LUDUS_JOB_NODES $LUDUS_JOB_PORT $LUDUS_JOB_ID"; '
        'stat -c %a "$LUDUS_JOB_TOKEN_FILE"; sha256sum < "$LUDUS_JOB_TOKEN_FILE"; '
        f"}} > {shared}/part-$LUDUS_JOB_ROLE-$LUDUS_JOB_INDEX; cd {shared}; "
        "mv part-$LUDUS_JOB_ROLE-$LUDUS_JOB_INDEX $LUDUS_JOB_ROLE-$LUDUS_JOB_INDEX; echo $LUDUS_JOB_INDEX here; "
    )
    ready = " && ".join(f"[ -e {shared}/worker-{i} ]" for i in range(4))
    roles = (
        Role("worker", ("sh", "-c", f"{says} exec sleep 600"), 4, at=(1, 2, 1, 0)),
        Role("main", ("sh", "-c", f"{says} until {ready}; do sleep 0.05; done")),
    )
    job_id = three.submit(Job("spread", roles, "main", nodes=3))
    status = wait_until_ended(three, job_id)
    assert (status.state, status.exit_code, status.reason) == ("succeeded", 0, "")
    said = {path.name: path.read_text().splitlines() for path in shared.iterdir()}
    nodes = {"main-0": 0, "worker-0": 1, "worker-1": 2, "worker-2": 1, "worker-3": 0}
    assert {name: lines[0] for name, lines in said.items()} == {name: f"h{node}" for name, node in nodes.items()}
    addresses = [rig.hosts.address(host) for host in range(3)]
    for name, (_, told, mode, _) in said.items():
        role, index = name.rsplit("-", 1)
        *found, port, its_id = told.split()
        assert found == [role, index, str(nodes[name]), ",".join(addresses)]
        assert (its_id, mode) == (job_id, "600")
        assert 10_000 <= int(port) < 32_000
    assert len({lines[1].split()[4] for lines in said.values()}) == 1, "all know one port"
    assert len({lines[3] for lines in said.values()}) == 1, "all have one token"
    assert [(p.name, p.host) for p in status.processes] == [
        (name, addresses[nodes[name]]) for name in (*sorted(nodes)[1:], "main-0")
    ]
    assert sorted(three.logs(job_id)) == [f"{name}: {name[-1]} here" for name in sorted(nodes)]
    assert list(three.logs(job_id, role="main")) == ["0 here"]
    assert any("node 2 connected" in line for line in three.logs(job_id, inner=True))


def test_the_others_serve_until_main_has_saved(three: SshOrchestrator, shared: Path) -> None:
    beat, saved = shared / "beat", shared / "saved"
    # It saves only if the other machine still does something after it was asked to end.
    saves = f"trap 'n=$(wc -c < {beat}); until [ $(wc -c < {beat}) -gt $n ]; do sleep 0.05; done; echo saved > {saved}; exit 130' TERM; "
    roles = (
        Role("main", ("sh", "-c", f"{saves} while :; do sleep 0.05; done")),
        Role("worker", ("sh", "-c", BEATING, str(beat)), at=(2,)),
    )
    job_id = three.submit(Job("saves", roles, "main", nodes=3))
    wait_until(beat.exists)
    assert three.status(job_id).state == "running"
    three.cancel(job_id)
    status = wait_until_ended(three, job_id)
    assert (status.state, status.exit_code, saved.read_text()) == ("cancelled", 130, "saved\n")
    assert {process.state for process in status.processes} == {"ended"}
    assert is_still(beat)
    with pytest.raises(UsageError, match="is over"):
        three.mend(job_id)


def test_words_and_secrets_arrive_elsewhere_and_nobody_sees_them(
    rig: ssh_rig.SshRig, three: SshOrchestrator, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setenv("TEST_SECRET", secret)
    words = ("a b", "$HOME", "it's", 'say "no"', "back\\slash", "*", "", "ö—语", "two\nlines", "-n", "~", "!x")
    script = f'[ "$TEST_SECRET" = {secret[:7]}-"horse-battery" ] && printf "<%s>\n" "$@" > {shared}/part && mv {shared}/part {shared}/said; sleep 600'
    roles = (
        Role("main", ("sh", "-c", f"until [ -e {shared}/over ]; do sleep 0.05; done")),
        Role("worker", ("sh", "-c", script, "sh", *words), 2, at=(0, 2)),
    )
    job_id = three.submit(Job("quiet", roles, "main", ("TEST_SECRET",), nodes=3))
    wait_until((shared / "said").exists)
    token = next((rig.state(2) / "parts" / f"{job_id}.2").glob("token")).read_text()
    assert len(token) == 64
    visible = b"".join(_words(process.pid) for host in range(3) for process in rig.hosts.processes(host))
    visible += b"".join(_words(process.pid) for process in psutil.Process().children(recursive=True))
    assert b"ludus.launch.ssh.remote_agent" in visible
    assert secret.encode() not in visible
    assert token.encode() not in visible
    (shared / "over").touch()
    assert wait_until_ended(three, job_id).state == "succeeded"
    assert (shared / "said").read_text() == "".join(f"<{word}>\n" for word in words)
    kept = [path for place in (three.directory, *map(rig.state, range(3))) for path in place.rglob("*") if path.is_file()]
    assert [path for path in kept if secret.encode() in path.read_bytes()] == []
    assert {path.name for path in kept if token.encode() in path.read_bytes()} == {"token"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept if path.name == "token")


def test_files_are_sent_and_setup_is_run_first_however_much_it_says(rig: ssh_rig.SshRig, tmp_path: Path, shared: Path) -> None:
    program = tmp_path / "pro gram"
    program.mkdir()
    (program / "play.py").write_text("import os; print('played', os.environ['COLOUR'], os.getcwd())")
    setup = ("echo this is noise; cat", "export COLOUR='dark red'", "echo '{\"ok\": {}}'")
    changes = {"setup": setup, "copy": (program, program / "play.py"), "workdir": str(shared / "work")}
    with rig.orchestrator(tmp_path / "laptop", 1, **changes) as orchestrator:
        job_id = orchestrator.submit(job(Role("main", ("sh", "-c", '"$0" "pro gram/play.py" && "$0" play.py', sys.executable))))
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert list(orchestrator.logs(job_id)) == 2 * [f"played dark red {shared / 'work'}"]
        with pytest.raises(UsageError, match=r"setup lines failed on 10\.77\.0\.1.*no-such-module"):
            rig.orchestrator(tmp_path, 1, setup=("no-such-module load",)).submit(job(main("true")))


# -- what cannot be -------------------------------------------------------------------------------------------------------


def test_a_machine_that_is_not_as_it_should_be_is_named_with_the_remedy(rig: ssh_rig.SshRig, tmp_path: Path) -> None:
    address = rig.hosts.address(0)
    nobody, changed, stranger = tmp_path / "nobody", tmp_path / "changed", tmp_path / "stranger"
    nobody.touch()
    keys = rig.known_hosts.read_text().splitlines()
    changed.write_text(f"{address} {keys[1].split(maxsplit=1)[1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True, timeout=20)
    bare = sys._base_executable  # type: ignore[attr-defined] # an interpreter that has nothing installed
    own, node = rig.settings(1), rig.settings(1).nodes[0]
    cases: list[tuple[SshSettings, type[LudusError], str]] = [
        (replace(own, known_hosts=nobody), UsageError, f"host key of {address} is not known.*ssh-keyscan -p 22 {address} >> {nobody}"),
        (replace(own, known_hosts=changed), UsageError, "different host key.*ssh-keygen -R"),
        (replace(own, known_hosts=nobody, options=("StrictHostKeyChecking=no",)), UsageError, "host key of .* is not known"),
        (replace(own, identity=stranger), UsageError, "root@.* rejects the login with .*stranger.*ssh-copy-id"),
        (replace(own, nodes=(replace(node, user="nobody-of-that-name"),)), UsageError, "rejects the login"),
        (replace(own, nodes=(replace(node, port=2222),)), WorkerFailed, f"{address} does not answer.*refused"),
        (replace(own, nodes=(replace(node, host="10.77.0.99"),), connect_s=1), WorkerFailed, "10.77.0.99 does not answer"),
        (replace(own, python="/no/such/python"), UsageError, f"/no/such/python cannot be run on {address}"),
        (replace(own, python=bare), UsageError, f"{bare} on {address} has no Ludus"),
        (replace(own, workdir="/no/such/place"), UsageError, "/no/such/place on h0: No such file"),
        (replace(own, program="/no/such/ssh"), UsageError, "/no/such/ssh cannot be run"),
    ]  # fmt: skip
    for settings, kind, match in cases:
        with SshOrchestrator(tmp_path / "laptop", settings) as orchestrator:
            with pytest.raises(kind, match=match):
                orchestrator.submit(job(main("true")))
            assert orchestrator.list() == []
    assert ssh_rig.until_gone(rig, 0) == []


def test_another_version_of_ludus_is_refused(rig: ssh_rig.SshRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ludus, "__version__", "9.9")
    with rig.orchestrator(tmp_path, 2) as orchestrator, pytest.raises(UsageError, match=r"has Ludus .*, and this machine 9\.9"):
        orchestrator.submit(Job("trial", (main("true"),), "main", nodes=2))


def test_when_one_machine_will_not_have_its_part_none_has(rig: ssh_rig.SshRig, three: SshOrchestrator, shared: Path) -> None:
    state = rig.state(2) / "parts"
    aside = state.with_name("aside")
    if state.exists():
        state.rename(aside)
    state.write_text("not a directory")
    try:
        roles = (main(f"touch {shared}/main; sleep 600"), Role("worker", ("sleep", "600"), 2, at=(1, 2)))
        with pytest.raises(LudusError, match=r"10\.77\.0\.13: .*parts"):
            three.submit(Job("half", roles, "main", nodes=3))
        assert three.list() == []
    finally:
        state.unlink()
        if aside.exists():
            aside.rename(state)
    assert [ssh_rig.until_gone(rig, host) for host in range(3)] == [[], [], []]
    assert [list((rig.state(host) / "parts").glob("half-*")) for host in range(2)] == [[], []]
    assert not (shared / "main").exists(), "main does not begin before the others are there"


# -- for these tests ------------------------------------------------------------------------------------------------------


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
