"""The agent of SSH jobs, as a process on this machine: its answers, its clean-up, and its handling of invalid requests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.errors import LudusError, UnknownName, UsageError
from ludus.launch.job import Job, Role
from ludus.launch.ssh import remote_agent
from ludus.launch.ssh.remote_agent import MARK, JobPart, RemoteAgent, unpack
from ludus.process import identity
from ludus.process.job_env import JobEnv
from ludus.testing.orchestrator_contract import BEATING, is_still
from tests.waiting import wait_until

TOKEN = "ab" * 32
_WAIT_S = 30.0


class AgentSession:
    """Client end of a connection to an agent process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.hello = self.receive()["hello"]

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(MARK), line
        found: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return found

    def request(self, verb: str, **words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"verb": verb, **words}) + "\n")
        self.process.stdin.flush()
        return self.receive()


@contextlib.contextmanager
def connect(home: Path) -> Iterator[AgentSession]:
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.remote_agent"]
    environment = os.environ | {"LUDUS_STATE_DIR": str(home)}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield AgentSession(process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_WAIT_S)
            finally:
                process.kill()


def part(*roles: Role, main: str = "main", seats: dict[str, tuple[int, ...]] | None = None, **more: Any) -> JobPart:
    seats = {role.name: tuple(range(role.count)) for role in roles} if seats is None else seats
    return JobPart("trial-1", 0, ("127.0.0.1",), Job("trial", roles, main, **more), seats, port=12_000, workdir="/")


def state_of(session: AgentSession) -> dict[str, Any]:
    found: dict[str, Any] = session.request("status", job="trial-1", node=0)["ok"]
    return found


def wait_until_over(session: AgentSession) -> dict[str, Any]:
    wait_until(lambda: state_of(session)["state"] not in ("pending", "running"))
    return state_of(session)


# -- parts ------------------------------------------------------------------------------------------------------------------


def test_all_ports_of_a_job_are_free(tmp_path: Path) -> None:
    agent = RemoteAgent(tmp_path)
    port = agent.answer({"verb": "ports", "job": "trial-1"})["port"]
    entrance = JobEnv(port=port).learner_address[1]
    with socket.create_server(("", entrance)):
        assert agent.answer({"verb": "ports", "job": "trial-1"})["port"] != port


def test_a_confirmed_part_outlives_the_connection(tmp_path: Path) -> None:
    beat, go = tmp_path / "beat", tmp_path / "go"
    beats = Role("beats", ("sh", "-c", f"pwd; exec sh -c '{BEATING}' {beat}"))
    ends = Role("main", ("sh", "-c", f'echo "$LUDUS_JOB_ID $LUDUS_JOB_RUN"; until [ -e {go} ]; do sleep 0.05; done; exit 7'))
    with connect(tmp_path / "state") as session:
        assert session.hello["ludus"] == ludus.__version__
        assert abs(session.hello["time"] - time.time()) < 60
        port = session.request("ports", job="trial-1")["ok"]["port"]
        assert 10_000 <= port < 32_000
        assert state_of(session)["state"] == "missing"
        assert session.request("submit", part=part(beats, ends).text(), token=TOKEN)["ok"]["was"] is False
        assert session.request("keep", job="trial-1", node=0) == {"ok": {}}
    wait_until(beat.exists)
    with connect(tmp_path / "state") as session:
        assert state_of(session)["state"] == "running"
        assert session.request("submit", part=part(beats, ends).text(), token=TOKEN)["ok"]["was"] is True, "it is there already"
        assert session.request("list")["ok"] == {"parts": [{"job": "trial-1", "node": 0}]}
        assert session.request("token", job="trial-1", node=0)["ok"] == {"token": TOKEN}
        assert "still runs" in session.request("forget", job="trial-1", node=0)["error"]["message"]
        go.touch()
        found = wait_until_over(session)
        assert (found["state"], found["exit_code"], found["lost"]) == ("failed", 7, False)
        assert is_still(beat)
        directory = tmp_path / "state" / "parts" / "trial-1.0"
        assert (directory / "token").stat().st_mode & 0o777 == 0o600
        assert session.request("logs", job="trial-1", node=0) == {"line": ["beats-0", "/"]}
        assert session.receive() == {"line": ["main-0", f"trial-1 {directory / 'run'}"]}
        assert session.receive() == {"ok": {}}
    with connect(tmp_path / "state") as session:
        assert session.request("forget", job="trial-1", node=0) == {"ok": {}}
        assert not directory.exists()


@pytest.mark.parametrize("how", ["hangs up", "is killed"])
def test_an_unconfirmed_part_ends_with_the_connection(tmp_path: Path, how: str) -> None:
    beat = tmp_path / "beat"
    with connect(tmp_path / "state") as session:
        session.request(
            "submit", part=part(Role("main", ("sh", "-c", f"trap '' TERM; {BEATING}", str(beat)))).text(), token=TOKEN
        )
        wait_until(beat.exists)
        if how == "is killed":
            session.process.terminate()
    assert is_still(beat)
    assert list((tmp_path / "state" / "parts").iterdir()) == []


def test_an_unconfirmed_restart_keeps_the_files_of_the_first_start(tmp_path: Path) -> None:
    note = tmp_path / "state" / "parts" / "trial-1.0" / "run"
    writes = Role("main", ("sh", "-c", 'echo somewhere > "$LUDUS_JOB_RUN"'))
    with connect(tmp_path / "state") as session:
        session.request("submit", part=part(writes).text(), token=TOKEN)
        session.request("keep", job="trial-1", node=0)
        assert wait_until_over(session)["state"] == "succeeded"
    with connect(tmp_path / "state") as session:
        session.request("submit", part=part(Role("main", ("sleep", "600"))).text(), token=TOKEN)
    assert note.read_text() == "somewhere\n"


def test_processes_have_the_indices_of_the_whole_job_and_internal_ones_are_hidden(tmp_path: Path) -> None:
    hold, output = Role("ludus.hold", ("sh", "-c", "echo inner; exec sleep 600")), tmp_path / "output"
    worker = Role("worker", ("sh", "-c", f'echo "$LUDUS_JOB_INDEX $1" >> {output}; exec sleep 600', "sh", "a 'b'"), 3)
    asked = part(hold, worker, main="ludus.hold", seats={"worker": (1, 4, 12)})
    with connect(tmp_path / "state") as session:
        session.request("submit", part=asked.text(), token=TOKEN)
        wait_until(lambda: output.exists() and len(output.read_text().splitlines()) == 3)
        assert sorted(output.read_text().splitlines()) == ["1 a 'b'", "12 a 'b'", "4 a 'b'"]
        shown = [("worker", 1, "running"), ("worker", 4, "running"), ("worker", 12, "running")]
        wait_until(lambda: [(p["role"], p["index"], p["state"]) for p in state_of(session)["processes"]] == shown)
        assert session.request("logs", job="trial-1", node=0) == {"ok": {}}
    assert JobPart.of(asked.text()) == asked


@pytest.mark.parametrize("follow", [False, True])
def test_reading_logs_does_not_confirm_a_part(tmp_path: Path, follow: bool) -> None:
    """The part ends with the connection, however soon that closes after the last line."""
    beat = tmp_path / "beat"
    with connect(tmp_path / "state") as session:
        session.request("submit", part=part(Role("main", ("sh", "-c", BEATING, str(beat)))).text(), token=TOKEN)
        wait_until(beat.exists)
        assert session.process.stdin is not None
        session.process.stdin.write(json.dumps({"verb": "logs", "job": "trial-1", "node": 0, "follow": follow}) + "\n")
        session.process.stdin.close()
        session.process.wait(_WAIT_S)
    assert is_still(beat)
    assert not list((tmp_path / "state" / "parts").glob("*"))


def test_the_agent_ends_with_the_reader_of_logs(tmp_path: Path) -> None:
    with connect(tmp_path / "state") as session:
        session.request("submit", part=part(Role("main", ("sleep", "600"))).text(), token=TOKEN)
        session.request("keep", job="trial-1", node=0)
    with connect(tmp_path / "state") as reader:
        assert reader.process.stdin is not None
        reader.process.stdin.write(json.dumps({"verb": "logs", "job": "trial-1", "node": 0, "follow": True}) + "\n")
        reader.process.stdin.close()
        assert reader.process.wait(_WAIT_S) == 0
        assert identity.start_time(reader.process.pid) is None
    with connect(tmp_path / "state") as session:
        session.request("cancel", job="trial-1", node=0, at_once=True)
        assert wait_until_over(session)["state"] == "cancelled"


def test_secrets_are_in_the_environment_and_in_no_file(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    asked = part(Role("main", ("sh", "-c", '[ "${#TEST_SECRET}" = 21 ]')), secrets=("TEST_SECRET",))
    with connect(tmp_path / "state") as session:
        assert "TEST_SECRET" in session.request("submit", part=asked.text(), token=TOKEN)["error"]["message"]
        session.request("submit", part=asked.text(), token=TOKEN, secrets={"TEST_SECRET": secret})
        assert wait_until_over(session)["state"] == "succeeded"
        for path in (tmp_path / "state").rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_old_parts_are_deleted_and_running_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agent, "MAX_PARTS", 1)
    monkeypatch.chdir(tmp_path)
    agent = RemoteAgent(tmp_path)
    try:
        for number, script in enumerate(("sleep 600", "true", "true", "true")):
            asked = JobPart(f"job-{number}", 0, ("127.0.0.1",), Job("trial", (Role("main", ("sh", "-c", script)),), "main"), {})
            agent.answer({"verb": "submit", "part": asked.text(), "token": TOKEN})
            if script == "true":
                wait_until(lambda: agent.answer({"verb": "status", "job": f"job-{number}", "node": 0})["state"] == "succeeded")  # noqa: B023
        assert [part["job"] for part in agent.answer({"verb": "list"})["parts"]] == ["job-0", "job-2", "job-3"]
    finally:
        agent.abandon()


# -- invalid requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"hello", b"[]", b"null", b"1", b'"verb"', b"", b'{"verb": "status"'])
def test_garbage_is_not_a_request(garbage: bytes) -> None:
    with pytest.raises(UsageError, match="line of JSON"):
        remote_agent._parse(garbage)


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"[" * 100_000])
def test_garbage_is_answered_with_one_error(tmp_path: Path, garbage: bytes) -> None:
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.remote_agent"]
    environment = os.environ | {"LUDUS_STATE_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, input=garbage + b"\nmore\n", capture_output=True, timeout=60, check=False)
    hello, answer, *rest = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr, rest) == (2, b"", [])
    assert "hello" in hello
    error = json.loads(answer.removeprefix(MARK))["error"]
    assert error["kind"] == "usage"
    assert "line of JSON" in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_invalid_requests_are_refused_and_the_next_one_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it changes the directory of its process
    agent = RemoteAgent(tmp_path)
    asked = part(Role("main", ("true",))).text()
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "Unknown request"),
        ({"verb": "__init__"}, "Unknown request"),
        ({"verb": ["x"]}, "Unknown request"),
        ({"verb": "cancel"}, "is invalid"),
        ({"verb": "cancel", "job": "trial-1", "node": "x"}, "is invalid"),
        ({"verb": "cancel", "job": "trial-1", "node": 0}, "is unknown on"),
        ({"verb": "cancel", "job": "../../etc", "node": 0}, "not a valid job id"),
        ({"verb": "token", "job": "..", "node": 0}, "not a valid job id"),
        ({"verb": "submit"}, "is invalid"),
        ({"verb": "submit", "part": "{}", "token": TOKEN}, "part of the job is invalid"),
        ({"verb": "submit", "part": asked.replace("trial-1", "../up"), "token": TOKEN}, "not a valid job id"),
        ({"verb": "submit", "part": asked.replace('"main"', '"mian"', 1), "token": TOKEN}, "mian"),
        ({"verb": "submit", "part": asked, "token": TOKEN, "secrets": 5}, "is invalid"),
        ({"verb": "submit", "part": asked.replace('"workdir": "/"', '"workdir": "/no/such"'), "token": TOKEN}, "/no/such"),
    ]
    for request, match in cases:
        with pytest.raises(LudusError, match=match):
            agent.answer(request)
    with pytest.raises(UnknownName):
        list(agent.lines({"job": "trial-1", "node": 0}))
    assert agent.answer({"verb": "list"}) == {"parts": []}
    assert not agent.waiting


# -- files ------------------------------------------------------------------------------------------------------------------


def archive(*members: tuple[str, str, str]) -> io.BytesIO:
    """Of (name, kind, text or target)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "device": tarfile.CHRTYPE}[kind]
            info.linkname = text if kind == "link" else ""
            data = text.encode() if kind == "file" else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    target = tmp_path / "new" / "work"
    assert unpack(archive(("a/b.py", "file", "one"), ("c", "file", "two")), str(target)) == 2
    with open(target / "a" / "b.py") as opened:
        assert unpack(archive(("a/b.py", "file", "three")), str(target)) == 1
        assert opened.read() == "one", "an open file keeps its content"
    assert {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()} == {
        "a/b.py": "three", "c": "two",
    }  # fmt: skip


@pytest.mark.parametrize(
    "member", [("../out", "file", "x"), ("/out", "file", "x"), ("link", "link", "/etc/passwd"), ("node", "device", "")]
)
def test_archive_members_cannot_leave_the_directory(tmp_path: Path, member: tuple[str, str, str]) -> None:
    target = tmp_path / "work"
    with contextlib.suppress(UsageError):
        unpack(archive(member), str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    assert not any(path.is_symlink() or path.name == "node" for path in target.rglob("*"))
    assert not Path("/out").exists()


def test_an_invalid_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        unpack(io.BytesIO(b"garbage" * 1000), str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.*workdir"):
        unpack(archive(), str(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
