"""The far side of jobs by SSH, as a process on this machine: what it answers, what it leaves, what it makes of rubbish."""

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
from ludus.launch.ssh.remote_agent import MARK, Desk, Part, unpack
from ludus.process import identity
from ludus.process.job_env import Surroundings
from ludus.testing.orchestrator_contract import BEATING, is_still
from tests.waiting import wait_until

TOKEN = "ab" * 32
_WAIT_S = 30.0


class Session:
    """Our end of the conversation."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.hello = self.receive()["hello"]

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(MARK), line
        found: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return found

    def ask(self, verb: str, **words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"verb": verb, **words}) + "\n")
        self.process.stdin.flush()
        return self.receive()


@contextlib.contextmanager
def talking(home: Path) -> Iterator[Session]:
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.remote_agent"]
    environment = os.environ | {"LUDUS_STATE_DIR": str(home)}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Session(process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_WAIT_S)
            finally:
                process.kill()


def part(*roles: Role, main: str = "main", seats: dict[str, tuple[int, ...]] | None = None, **more: Any) -> Part:
    seats = {role.name: tuple(range(role.count)) for role in roles} if seats is None else seats
    return Part("trial-1", 0, ("127.0.0.1",), Job("trial", roles, main, **more), seats, port=12_000, workdir="/")


def state_of(session: Session) -> dict[str, Any]:
    found: dict[str, Any] = session.ask("status", job="trial-1", node=0)["ok"]
    return found


def over(session: Session) -> dict[str, Any]:
    wait_until(lambda: state_of(session)["state"] not in ("pending", "running"))
    return state_of(session)


# -- a part's life ----------------------------------------------------------------------------------------------------------


def test_all_ports_of_a_job_are_free_also_that_of_its_first_learner(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    port = desk.answer({"verb": "ports", "job": "trial-1"})["port"]
    entrance = Surroundings(port=port).learners_entrance[1]
    with socket.create_server(("", entrance)):
        assert desk.answer({"verb": "ports", "job": "trial-1"})["port"] != port


def test_a_part_that_is_kept_outlives_the_connection_and_is_found_by_the_next(tmp_path: Path) -> None:
    beat, go = tmp_path / "beat", tmp_path / "go"
    beats = Role("beats", ("sh", "-c", f"pwd; exec sh -c '{BEATING}' {beat}"))
    ends = Role("main", ("sh", "-c", f'echo "$LUDUS_JOB_ID $LUDUS_JOB_RUN"; until [ -e {go} ]; do sleep 0.05; done; exit 7'))
    with talking(tmp_path / "state") as session:
        assert session.hello["ludus"] == ludus.__version__
        assert abs(session.hello["time"] - time.time()) < 60
        port = session.ask("ports", job="trial-1")["ok"]["port"]
        assert 10_000 <= port < 32_000
        assert state_of(session)["state"] == "missing"
        assert session.ask("submit", part=part(beats, ends).text(), token=TOKEN)["ok"]["was"] is False
        assert session.ask("keep", job="trial-1", node=0) == {"ok": {}}
    wait_until(beat.exists)
    with talking(tmp_path / "state") as session:
        assert state_of(session)["state"] == "running"
        assert session.ask("submit", part=part(beats, ends).text(), token=TOKEN)["ok"]["was"] is True, "it is there already"
        assert session.ask("list")["ok"] == {"parts": [{"job": "trial-1", "node": 0}]}
        assert session.ask("token", job="trial-1", node=0)["ok"] == {"token": TOKEN}
        assert "still runs" in session.ask("forget", job="trial-1", node=0)["error"]["message"]
        go.touch()
        found = over(session)
        assert (found["state"], found["exit_code"], found["lost"]) == ("failed", 7, False)
        assert is_still(beat)
        place = tmp_path / "state" / "parts" / "trial-1.0"
        assert (place / "token").stat().st_mode & 0o777 == 0o600
        assert session.ask("logs", job="trial-1", node=0) == {"line": ["beats-0", "/"]}
        assert session.receive() == {"line": ["main-0", f"trial-1 {place / 'run'}"]}
        assert session.receive() == {"ok": {}}
    with talking(tmp_path / "state") as session:
        assert session.ask("forget", job="trial-1", node=0) == {"ok": {}}
        assert not place.exists()


@pytest.mark.parametrize("how", ["hangs up", "is killed"])
def test_a_part_that_nobody_keeps_is_gone_with_the_connection(tmp_path: Path, how: str) -> None:
    beat = tmp_path / "beat"
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=part(Role("main", ("sh", "-c", f"trap '' TERM; {BEATING}", str(beat)))).text(), token=TOKEN)
        wait_until(beat.exists)
        if how == "is killed":
            session.process.terminate()
    assert is_still(beat)
    assert list((tmp_path / "state" / "parts").iterdir()) == []


def test_a_part_whose_second_life_is_not_kept_keeps_its_first(tmp_path: Path) -> None:
    note = tmp_path / "state" / "parts" / "trial-1.0" / "run"
    writes = Role("main", ("sh", "-c", 'echo somewhere > "$LUDUS_JOB_RUN"'))
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=part(writes).text(), token=TOKEN)
        session.ask("keep", job="trial-1", node=0)
        assert over(session)["state"] == "succeeded"
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=part(Role("main", ("sleep", "600"))).text(), token=TOKEN)
    assert note.read_text() == "somewhere\n"


def test_processes_are_counted_as_in_the_whole_job_and_ours_are_not_shown(tmp_path: Path) -> None:
    hold, said = Role("ludus.hold", ("sh", "-c", "echo inner; exec sleep 600")), tmp_path / "said"
    worker = Role("worker", ("sh", "-c", f'echo "$LUDUS_JOB_INDEX $1" >> {said}; exec sleep 600', "sh", "a 'b'"), 3)
    asked = part(hold, worker, main="ludus.hold", seats={"worker": (1, 4, 12)})
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=asked.text(), token=TOKEN)
        wait_until(lambda: said.exists() and len(said.read_text().splitlines()) == 3)
        assert sorted(said.read_text().splitlines()) == ["1 a 'b'", "12 a 'b'", "4 a 'b'"]
        shown = [("worker", 1, "running"), ("worker", 4, "running"), ("worker", 12, "running")]
        wait_until(lambda: [(p["role"], p["index"], p["state"]) for p in state_of(session)["processes"]] == shown)
        assert session.ask("logs", job="trial-1", node=0) == {"ok": {}}
    assert Part.of(asked.text()) == asked


@pytest.mark.parametrize("follow", [False, True])
def test_whoever_reads_logs_and_leaves_has_kept_nothing_by_it(tmp_path: Path, follow: bool) -> None:
    """However soon the connection ends after the last line: the part was never kept, and ends with it."""
    beat = tmp_path / "beat"
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=part(Role("main", ("sh", "-c", BEATING, str(beat)))).text(), token=TOKEN)
        wait_until(beat.exists)
        assert session.process.stdin is not None
        session.process.stdin.write(json.dumps({"verb": "logs", "job": "trial-1", "node": 0, "follow": follow}) + "\n")
        session.process.stdin.close()
        session.process.wait(_WAIT_S)
    assert is_still(beat)
    assert not list((tmp_path / "state" / "parts").glob("*"))


def test_a_reader_that_leaves_is_not_written_to_for_ever(tmp_path: Path) -> None:
    with talking(tmp_path / "state") as session:
        session.ask("submit", part=part(Role("main", ("sleep", "600"))).text(), token=TOKEN)
        session.ask("keep", job="trial-1", node=0)
    with talking(tmp_path / "state") as reader:
        assert reader.process.stdin is not None
        reader.process.stdin.write(json.dumps({"verb": "logs", "job": "trial-1", "node": 0, "follow": True}) + "\n")
        reader.process.stdin.close()
        assert reader.process.wait(_WAIT_S) == 0
        assert identity.start_time(reader.process.pid) is None
    with talking(tmp_path / "state") as session:
        session.ask("cancel", job="trial-1", node=0, at_once=True)
        assert over(session)["state"] == "cancelled"


def test_secrets_are_in_the_environment_and_in_no_file(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    asked = part(Role("main", ("sh", "-c", '[ "${#TEST_SECRET}" = 21 ]')), secrets=("TEST_SECRET",))
    with talking(tmp_path / "state") as session:
        assert "TEST_SECRET" in session.ask("submit", part=asked.text(), token=TOKEN)["error"]["message"]
        session.ask("submit", part=asked.text(), token=TOKEN, secrets={"TEST_SECRET": secret})
        assert over(session)["state"] == "succeeded"
        for path in (tmp_path / "state").rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_old_parts_are_forgotten_and_running_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_agent, "KEPT", 1)
    monkeypatch.chdir(tmp_path)
    desk = Desk(tmp_path)
    try:
        for number, script in enumerate(("sleep 600", "true", "true", "true")):
            asked = Part(f"job-{number}", 0, ("127.0.0.1",), Job("trial", (Role("main", ("sh", "-c", script)),), "main"), {})
            desk.answer({"verb": "submit", "part": asked.text(), "token": TOKEN})
            if script == "true":
                wait_until(lambda: desk.answer({"verb": "status", "job": f"job-{number}", "node": 0})["state"] == "succeeded")  # noqa: B023
        assert [part["job"] for part in desk.answer({"verb": "list"})["parts"]] == ["job-0", "job-2", "job-3"]
    finally:
        desk.abandon()


# -- what cannot be ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rubbish", [b"\xff\xfe\x00", b"hello", b"[]", b"null", b"1", b'"verb"', b"", b'{"verb": "status"'])
def test_rubbish_is_no_request(rubbish: bytes) -> None:
    with pytest.raises(UsageError, match="lines of JSON"):
        remote_agent._parsed(rubbish)


@pytest.mark.parametrize("rubbish", [b"\xff\xfe\x00", b"[" * 100_000])
def test_rubbish_is_answered_by_one_clear_line(tmp_path: Path, rubbish: bytes) -> None:
    words = [sys.executable, "-P", "-m", "ludus.launch.ssh.remote_agent"]
    environment = os.environ | {"LUDUS_STATE_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, input=rubbish + b"\nmore\n", capture_output=True, timeout=60, check=False)
    hello, answer, *rest = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr, rest) == (2, b"", [])
    assert "hello" in hello
    error = json.loads(answer.removeprefix(MARK))["error"]
    assert error["kind"] == "usage"
    assert "lines of JSON" in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_requests_that_make_no_sense_are_refused_and_the_next_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it changes the directory of its process
    desk = Desk(tmp_path)
    asked = part(Role("main", ("true",))).text()
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "is not asked"),
        ({"verb": "__init__"}, "is not asked"),
        ({"verb": ["x"]}, "is not asked"),
        ({"verb": "cancel"}, "makes no sense"),
        ({"verb": "cancel", "job": "trial-1", "node": "x"}, "makes no sense"),
        ({"verb": "cancel", "job": "trial-1", "node": 0}, "Nothing is known"),
        ({"verb": "cancel", "job": "../../etc", "node": 0}, "not the id"),
        ({"verb": "token", "job": "..", "node": 0}, "not the id"),
        ({"verb": "submit"}, "makes no sense"),
        ({"verb": "submit", "part": "{}", "token": TOKEN}, "no part of a job"),
        ({"verb": "submit", "part": asked.replace("trial-1", "../up"), "token": TOKEN}, "not the id"),
        ({"verb": "submit", "part": asked.replace('"main"', '"mian"', 1), "token": TOKEN}, "mian"),
        ({"verb": "submit", "part": asked, "token": TOKEN, "secrets": 5}, "makes no sense"),
        ({"verb": "submit", "part": asked.replace('"workdir": "/"', '"workdir": "/no/such"'), "token": TOKEN}, "/no/such"),
    ]
    for request, match in cases:
        with pytest.raises(LudusError, match=match):
            desk.answer(request)
    with pytest.raises(UnknownName):
        list(desk.lines({"job": "trial-1", "node": 0}))
    assert desk.answer({"verb": "list"}) == {"parts": []}
    assert not desk.waiting


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


def test_files_take_the_place_of_those_that_were(tmp_path: Path) -> None:
    target = tmp_path / "new" / "work"
    assert unpack(archive(("a/b.py", "file", "one"), ("c", "file", "two")), str(target)) == 2
    with open(target / "a" / "b.py") as opened:
        assert unpack(archive(("a/b.py", "file", "three")), str(target)) == 1
        assert opened.read() == "one", "whoever has it open keeps it"
    assert {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()} == {
        "a/b.py": "three", "c": "two",
    }  # fmt: skip


@pytest.mark.parametrize(
    "member", [("../out", "file", "x"), ("/out", "file", "x"), ("link", "link", "/etc/passwd"), ("node", "device", "")]
)
def test_what_would_lead_out_of_the_directory_is_refused_or_stays_inside(tmp_path: Path, member: tuple[str, str, str]) -> None:
    target = tmp_path / "work"
    with contextlib.suppress(UsageError):
        unpack(archive(member), str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    assert not any(path.is_symlink() or path.name == "node" for path in target.rglob("*"))
    assert not Path("/out").exists()


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no archive"):
        unpack(io.BytesIO(b"rubbish" * 1000), str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.*workdir"):
        unpack(archive(), str(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
