"""The doctor on other machines: a real sshd with several addresses, and a real Slurm; healthy, broken and silent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ludus
from ludus.errors import UsageError
from ludus.launch.cluster_file import ClusterConfig
from ludus.launch.doctor import runner
from ludus.launch.doctor.finding import DoctorFinding, is_healthy
from ludus.launch.doctor.local_checks import DoctorRequest
from ludus.launch.doctor.remote_nodes import RemoteNode, check_nodes
from ludus.launch.doctor.runner import ALL, IN_ALLOCATION, MODULE, DoctorRun, allocation_command, run_in_allocation
from ludus.launch.ssh.connection import SshNode, SshSettings, explain_failure, ssh_words
from tests.system.slurm_rig import slurm_rig
from tests.tools import need

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="an sshd of our own needs root on Linux"),
]

_START_S = 20.0
ANSWER_S = 60.0


class Sshd:
    """One SSH server on several loopback addresses, each of which counts as a machine."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, _free_port()
        for name in ("host", "user", "stranger"):
            words = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(words, check=True, timeout=30)
        kind, public, *_ = (directory / "host.pub").read_text().split()
        self.known_hosts = directory / "known_hosts"
        self.known_hosts.write_text("".join(f"[127.0.0.{n}]:{self.port} {kind} {public}\n" for n in (1, 2)))
        (directory / "conf").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nListenAddress 127.0.0.3\n"
            f"HostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\nPasswordAuthentication no\n"
            f"UsePAM no\nStrictModes no\nPidFile none\nSetEnv HOME={directory}\n"  # what this user's shell does at its start is no matter
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(directory / "log", "wb") as log:
            self._process = subprocess.Popen([need("sshd"), "-D", "-e", "-f", str(directory / "conf")], stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, "sshd did not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def settings(self, *hosts: str) -> SshSettings:
        nodes = tuple(SshNode(host, "root", self.port) for host in hosts)
        return SshSettings(
            nodes, self.directory / "user", self.known_hosts, sys.executable, connect_s=3.0, options=("User=root",)
        )

    def target(self, *hosts: str) -> ClusterConfig:
        return ClusterConfig(on="ssh").merge(
            machines=[{"host": host, "user": "root", "port": self.port} for host in hosts],
            identity=str(self.directory / "user"),
            known_hosts=str(self.known_hosts),
            python=sys.executable,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_START_S)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    for program in ("sshd", "ssh", "ssh-keygen"):
        need(program)
    directory = Path(tempfile.mkdtemp(prefix="doctor-ssh-"))
    server = Sshd(directory)
    yield server
    server.close()
    shutil.rmtree(directory, ignore_errors=True)


def node_of(settings: SshSettings, at: int = 0) -> RemoteNode:
    return RemoteNode(
        settings.nodes[at].host,
        tuple(ssh_words(settings, at, MODULE)),
        "ssh",
        lambda code, said: explain_failure(settings, at, code, said),
    )


def of_node(found: list[DoctorFinding], node: str) -> dict[str, DoctorFinding]:
    return {finding.check: finding for finding in found if finding.node == node}


def test_all_machines_are_checked_in_parallel_and_compared(sshd: Sshd, tmp_path: Path) -> None:
    """An unreachable machine is one finding, and the others are still checked."""
    target = sshd.target("127.0.0.1", "127.0.0.2", "127.0.0.3")
    request = DoctorRequest(workers=6, store=str(tmp_path / "store"), quick=True)
    found = DoctorRun(request, target, ANSWER_S).findings({})
    for name in ("127.0.0.1", "127.0.0.2"):
        seen = of_node(found, name)
        assert seen["ssh"].status == "ok"
        assert seen["clock"].status == "ok"
        assert seen["ludus"].found == ludus.__version__
        assert "needed 16 + " in seen["threads"].found
        assert "2 workers × 4" in seen["threads"].found, "a third of the run's"
        assert "of Ray" in seen["threads"].found
    unknown = of_node(found, "127.0.0.3")
    assert list(unknown) == ["ssh"]
    assert unknown["ssh"].status == "failed"
    assert "host key" in unknown["ssh"].found
    assert "ssh-keyscan" in unknown["ssh"].fix
    together = of_node(found, ALL)
    assert {finding.status for finding in together.values()} == {"ok"}
    assert not is_healthy(found)


def test_machines_of_a_hostfile_must_have_the_same_token(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are this machine with one token; the fingerprint does not reveal it."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("feedfacecafebeef")
    (tmp_path / "iplist").write_text(f"127.0.0.1 root {sshd.port} 1\n127.0.0.2 root {sshd.port} 1\n")
    target = sshd.target().merge(iplist=tmp_path / "iplist", environment={"LUDUS_TOKEN_FILE": str(token)})
    together = of_node(DoctorRun(DoctorRequest(quick=True), target, ANSWER_S).findings({}), ALL)
    assert (together["token on all nodes"].status, together["token on all nodes"].found) == ("ok", "the same on 2 of 2")
    node = node_of(sshd.settings("127.0.0.1"))
    (first,), (again,) = (
        check_nodes([node], DoctorRequest(quick=True, launcher=True, key=key), target.environment, ANSWER_S) for key in "ab"
    )
    assert first.token
    assert first.token != again.token


def test_failed_logins_and_missing_ludus_are_explained(sshd: Sshd) -> None:
    whole = sshd.settings("127.0.0.1")
    spoilt = {
        "key": replace(whole, identity=sshd.directory / "stranger"),
        "python": replace(whole, python="/nowhere/python"),
        "ludus": replace(whole, python="/usr/bin/python3"),
        "name": replace(whole, nodes=(SshNode("no-such-host.invalid", "root", sshd.port),)),
        "port": replace(whole, nodes=(SshNode("127.0.0.1", "root", _free_port()),)),
    }
    answers = check_nodes(
        [replace(node_of(settings), name=name) for name, settings in spoilt.items()], DoctorRequest(quick=True), {}, ANSWER_S
    )
    found = {answer.node: answer.findings for answer in answers}
    assert all(len(findings) == 1 and findings[0].status == "failed" for findings in found.values()), found
    assert "rejects the login" in found["key"][0].found
    assert "cannot be run" in found["python"][0].found
    assert "Ludus" in found["ludus"][0].found
    assert found["ludus"][0].check == "ludus there"
    assert "cannot be resolved" in found["name"][0].found
    assert "does not answer" in found["port"][0].found
    assert all(findings[0].fix for findings in found.values())


def test_a_silent_machine_times_out_and_leaves_no_process() -> None:
    words = (sys.executable, "-c", "import time; print('Welcome!', flush=True); time.sleep(600)")
    silent = RemoteNode("mute", words, "ssh", lambda code, said: explain_failure(SshSettings((SshNode("mute"),)), 0, code, said))
    (answer,) = check_nodes([silent], DoctorRequest(quick=True), {}, 1.0)
    assert [(finding.node, finding.check, finding.status) for finding in answer.findings] == [("mute", "ssh", "failed")]
    assert "does not answer" in answer.findings[0].found
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if "time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_secrets_are_sent_over_stdin_and_never_shown(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_MEMORY_PASSWORD", raising=False)
    settings = sshd.settings("127.0.0.1")
    request = DoctorRequest(memory="redis://player@127.0.0.1:1", quick=False, launcher=True)
    node = node_of(settings)
    assert "hunter22" not in " ".join(node.words)
    (answer,) = check_nodes([node], request, {"LUDUS_MEMORY_PASSWORD": "hunter22"}, ANSWER_S)
    seen = {finding.check: finding for finding in answer.findings}
    assert seen["memory server"].status == "failed"
    assert "password" not in seen["memory server"].found, "it had one, and the server is away"
    assert "hunter22" not in json.dumps([finding.to_json() for finding in answer.findings])


def test_a_clock_that_is_ahead_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "ahead.py"
    script.write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 30\nfrom ludus.launch.doctor.__main__ import main\nmain()\n"
    )
    node = RemoteNode("ahead", (sys.executable, str(script)), "ssh", lambda code, said: RuntimeError(said))  # type: ignore[arg-type,return-value]
    (answer,) = check_nodes([node], DoctorRequest(quick=True, launcher=True), {}, ANSWER_S)
    (clock,) = [finding for finding in answer.findings if finding.check == "clock"]
    assert clock.status == "warning"
    assert clock.found.startswith(("30.0", "29.9"))


# -- Slurm ----------------------------------------------------------------------------------------------------------------


def test_slurm_outside_and_inside_an_allocation(tmp_path: Path) -> None:
    with slurm_rig(2) as rig:
        environ = {**os.environ, **rig.environment, "LUDUS_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}

        def doctor(*options: str) -> tuple[int, list[dict[str, str]], str]:
            words = [sys.executable, "-P", "-m", "ludus.cli.main", "doctor", "--on", "slurm", "--json", *options]
            done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.stdout, done.stderr
            return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr

        code, found, _ = doctor("--quick", "--partition", "main")
        seen = {finding["check"]: finding for finding in found}
        assert code == 0
        assert "UP" in seen["slurm controller"]["found"]
        assert seen["partition main"]["found"].startswith("2 nodes, 2 idle, 4 cores each")
        assert seen["nodes"]["status"] == "skipped", "it is said that the nodes were not looked at"
        assert "--time" in seen["nodes"]["fix"]

        (tmp_path / "cluster.yaml").write_text("on: slurm\ncpus: 3\ngpus: 1\n")
        code, found, said = doctor("-f", "cluster.yaml", "--time", "2", "--nodes", "2", "--num-workers", "2")
        nodes = {finding["node"] for finding in found}
        assert {"n1", "n2", ALL} <= nodes, said
        assert {finding["status"] for finding in found if finding["check"] in ("srun", "clock")} == {"ok"}
        assert [finding["status"] for finding in found if finding["node"] == ALL] == ["ok"] * 4
        assert code == (1 if any(finding["status"] == "failed" for finding in found) else 0)
        assert rig.jobs() == []


def test_the_salloc_command_has_no_secret_and_a_short_time_limit() -> None:
    target = ClusterConfig(on="slurm").merge(nodes=2, time="02:00:00", partition="main", account="games")
    asked = ["--on", "slurm", "--json", "--time", "02:00:00", "--memory", "redis://:hunter22@host:1"]
    words, environ = allocation_command(target, asked, {"A": "b"})
    assert words[:3] == ["salloc", "--quiet", "--immediate=120"]
    assert {"--nodes=2", "--time=10", "--partition=main", "--account=games"} <= set(words)
    assert "--time=02:00:00" not in words
    assert words[-7:] == ["--on", "slurm", "--time", "02:00:00", "--memory", "redis://host:1", "--json"]
    assert environ == {"A": "b", "LUDUS_MEMORY_PASSWORD": "hunter22", IN_ALLOCATION: "1"}


def test_the_allocation_requests_what_the_run_would_request() -> None:
    target = ClusterConfig(on="slurm").merge(nodes=2, cpus=8, gpus=1, memory="16G", exclusive=True)
    words, _ = allocation_command(target, [], {})
    assert {"--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:1", "--mem=16G", "--exclusive"} <= set(words)
    words, _ = allocation_command(ClusterConfig(on="slurm"), [], {})
    assert not any(word.startswith(("--cpus", "--gres", "--mem", "--exclusive")) for word in words)


def test_a_password_is_removed_from_any_form_of_the_option() -> None:
    for asked in (["--memory=redis://:hunter22@host:1"], ["--memory", "redis://:hunter22@host:1"]):
        words, environ = allocation_command(ClusterConfig(on="slurm"), asked, {})
        assert "hunter22" not in " ".join(words)
        assert "redis://host:1" in words[-2]
        assert environ["LUDUS_MEMORY_PASSWORD"] == "hunter22"
    for asked in (["--store=s3://key:hunter22@host/b"], ["--store", "s3://key:hunter22@host/b"]):
        with pytest.raises(UsageError) as refused:
            allocation_command(ClusterConfig(on="slurm"), asked, {})
        assert "--store" in refused.value.message
        assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize("deaf", [False, True])
def test_an_allocation_is_released_after_a_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    """A killed salloc does not release its nodes; after SIGTERM it may wait for its command for ever, after SIGHUP it does not."""
    salloc, heard = tmp_path / "salloc", tmp_path / "heard"
    salloc.write_text(
        f"#!/bin/sh\ntrap 'echo TERM >> {heard}{'' if deaf else '; exit 1'}' TERM\n"
        f"trap 'echo HUP >> {heard}; exit 1' HUP\nwhile :; do sleep 0.1; done\n"
    )
    salloc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(runner, "_END_S", 1.0)
    (found,) = run_in_allocation(ClusterConfig(on="slurm").merge(time="5"), [], dict(os.environ), 1.0, around_s=1.0)
    assert "no answer within 2 s" in found.found
    assert heard.read_text().split() == (["TERM", "HUP"] if deaf else ["TERM"])


def test_no_allocation_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    salloc = tmp_path / "salloc"
    salloc.write_text("#!/bin/sh\necho 'salloc: error: Unable to allocate resources: Invalid account' >&2; exit 1\n")
    salloc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    target = ClusterConfig(on="slurm").merge(time="5")
    (found,) = run_in_allocation(target, ["--on", "slurm", "--time", "5"], dict(os.environ))
    assert (found.node, found.check, found.status) == (ALL, "nodes", "failed")
    assert "Invalid account" in found.found
    salloc.unlink()
    (found,) = run_in_allocation(target, ["--on", "slurm", "--time", "5"], dict(os.environ))
    assert "salloc cannot be run" in found.found


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
