"""The SSH backend without other machines: rendered files, parts, combined statuses and errors. tests/system/test_ssh.py uses machines."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.errors import LudusError, UnknownName, UsageError, WorkerFailed
from ludus.launch.job import Job, JobStatus, ProcessStatus, Role, open_orchestrator
from ludus.launch.ssh import backend
from ludus.launch.ssh.backend import SshNode, SshOrchestrator, SshSettings
from ludus.launch.ssh.connection import check_settings, explain_failure, ssh_words
from ludus.launch.ssh.job_split import CLIENT_ROLE, SERVER_ROLE, KnownStatus, combine_statuses, split_job
from ludus.launch.ssh.remote_agent import JobPartStatus
from ludus.testing.orchestrator_contract import job, main, wait_until_ended
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden" / "ssh"
PYTHON = "/opt/ludus/bin/python"

ONE = SshSettings((SshNode("node1.example.org", "alice"),), python=PYTHON)
THREE = SshSettings(
    (
        SshNode("10.0.0.2", "root", 36000, slots=4, address="192.168.0.2"),
        SshNode("node2", python="/usr/bin/python3.12"),
        SshNode("node3"),
    ),
    identity=Path("/keys/cluster key"),
    known_hosts=Path("/keys/known_hosts"),
    python=PYTHON,
    setup=("module load cuda/12.4", 'source "$HOME/it\'s/bin/activate"'),
    workdir="~/games",
    copy=(Path("agents"),),
    options=("ProxyJump=login.example.org", "ConnectTimeout=3"),
    patience_s=300,
)
SPREAD = Job(
    "pong",
    (
        Role("ray", (sys.executable, "-P", "-m", "ludus.launch.ray_role"), 3, "on-failure", {"COLOUR": "dark $red"}, at=(0, 1, 2)),
        Role("main", (sys.executable, "-P", "-m", "ludus.cli.main", "train", "it's; rm -rf /"), restart="when-killed"),
        Role("worker", ("play", "two words"), 4, at=(1, 2), log="logs/actor_{index}.log"),
    ),
    "main",
    ("WANDB_API_KEY",),
    nodes=3,
    ray=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "asked"),
    [("one", ONE, Job("tiny", (Role("main", ("train", "CartPole-v1")),), "main")), ("three", THREE, SPREAD)],
)
def test_rendered_files_equal_the_golden_files(name: str, settings: SshSettings, asked: Job, tmp_path: Path) -> None:
    """LUDUS_WRITE_GOLDEN=1 rewrites the golden files."""
    rendered = SshOrchestrator(tmp_path, settings).render(asked)
    rendered = {file: text.replace(sys.executable, "/here/bin/python") for file, text in rendered.items()}
    if os.environ.get("LUDUS_WRITE_GOLDEN"):
        for file, text in rendered.items():
            (GOLDEN / name / file).parent.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name / file).write_text(text, encoding="utf-8")
    kept = {
        str(path.relative_to(GOLDEN / name)): path.read_text("utf-8") for path in (GOLDEN / name).rglob("*") if path.is_file()
    }
    assert rendered == kept
    assert list(tmp_path.iterdir()) == []


def test_shellcheck_accepts_local_and_remote_commands(tmp_path: Path) -> None:
    for settings, asked in ((ONE, job(main("true"))), (THREE, SPREAD)):
        there = ssh_words(settings, 0)[-1]
        for text in (SshOrchestrator(tmp_path, settings).render(asked)["commands.txt"], there, shlex.split(there)[-1]):
            # SC1090, SC1091: shellcheck cannot follow `source`. SC2029: local expansion is intended.
            checker = [str(Path(sys.executable).with_name("shellcheck")), "-s", "bash", "-e", "SC1090,SC1091,SC2029", "-"]
            done = subprocess.run(checker, input=text, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stdout


# -- the parts of a job -----------------------------------------------------------------------------------------------------


def test_each_machine_gets_its_own_part() -> None:
    parts = split_job(SPREAD, THREE, "pong-1", 12_000)
    assert [[role.name for role in part.job.roles] for part in parts] == [
        [SERVER_ROLE, "ray", "main"], [CLIENT_ROLE, "ray", "worker"], [CLIENT_ROLE, "ray", "worker"],
    ]  # fmt: skip
    assert [part.job.main for part in parts] == ["main", CLIENT_ROLE, CLIENT_ROLE]
    assert [part.seats for part in parts] == [
        {"ray": (0,), "main": (0,)}, {"ray": (1,), "worker": (0, 2)}, {"ray": (2,), "worker": (1, 3)},
    ]  # fmt: skip
    assert {part.nodes for part in parts} == {("192.168.0.2", "node2", "node3")}
    assert [part.job.roles[1].command[0] for part in parts] == [PYTHON, "/usr/bin/python3.12", PYTHON], (
        "the interpreter of each machine"
    )
    assert all(role.at == () for part in parts for role in part.job.roles)
    variables = parts[2].local_job(Path("/t"), Path("/n")).roles[1].environment
    assert {name: variables[name] for name in ("LUDUS_JOB_NODE", "LUDUS_JOB_PORT", "LUDUS_JOB_RAY", "LUDUS_JOB_TOKEN_FILE", "COLOUR")} == {
        "LUDUS_JOB_NODE": "2", "LUDUS_JOB_PORT": "12000", "LUDUS_JOB_RAY": "3", "LUDUS_JOB_TOKEN_FILE": "/t", "COLOUR": "dark $red",
    }  # fmt: skip
    alone = split_job(job(main("true")), THREE, "tiny-1")
    assert [[role.name for role in part.job.roles] for part in alone] == [["main"]], "one machine needs no lifeline"


def test_a_job_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match="needs 3 machines, and 1 are listed"):
        split_job(SPREAD, ONE, "x")
    with pytest.raises(UsageError, match=r"'ludus\.lifeline' is reserved"):
        split_job(Job("trial", (main("true"), Role(SERVER_ROLE, ("true",))), "main"), ONE, "x")


# -- combined status --------------------------------------------------------------------------------------------------------

HOSTS = ("h0", "h1")
PAIR = Job("pair", (main("true"), Role("worker", ("true",), at=(1,))), "main", nodes=2)
PENDING = KnownStatus(JobStatus("pair-1", "pair", "pending", submitted_at=1000.0))
RUNS = KnownStatus(
    replace(
        PENDING.status,
        state="running",
        processes=(ProcessStatus("main", 0, "running"), ProcessStatus("worker", 0, "running", pid=7)),
    )
)
AWAY = WorkerFailed("no answer")


def part_status(state: str, role: str = "", code: int | None = None, reason: str = "", lost: bool = False) -> JobPartStatus:
    ended = state not in ("pending", "running")
    process = ProcessStatus(role, 0, "ended" if ended else "running", code, pid=None if ended else 5, host="elsewhere")
    return JobPartStatus(state, code, reason, "/logs", lost, (process,) if role else ())


@pytest.mark.parametrize(
    ("known", "head", "other", "cancelled", "state", "code", "reason", "final"),
    [
        (PENDING, part_status("running", "main"), part_status("running", "worker"), False, "running", None, "", False),
        (RUNS, part_status("succeeded", "main", 0), part_status("succeeded", "worker", 143), False, "succeeded", 0, "", True),
        (RUNS, part_status("failed", "main", 3, "main-0 ended"), part_status("cancelled", "worker", 143), False, "failed", 3, "main-0 ended", True),
        (RUNS, part_status("cancelled", "main", 130, "it was"), part_status("succeeded", "worker"), True, "cancelled", 130, "it was", True),
        (RUNS, part_status("succeeded", "main", 0), part_status("running", "worker"), False, "running", None, "", False),
        (RUNS, part_status("running", "main"), AWAY, False, "running", None, "h1 does not answer since", False),
        (RUNS, part_status("succeeded", "main", 0), AWAY, False, "succeeded", 0, "h1 does not answer since", False),
        (RUNS, AWAY, part_status("running", "worker"), False, "running", None, "h0 does not answer since", False),
        (RUNS, AWAY, part_status("failed", "worker", 1), False, "running", None, "h0 does not answer since", False),
        (RUNS, AWAY, part_status("running", "worker"), True, "running", None, "h0 does not answer since", False),
        (RUNS, AWAY, part_status("cancelled", "worker"), True, "cancelled", 1, "h0 does not answer since", False),
        (RUNS, AWAY, AWAY, True, "cancelled", 1, "h0 does not answer since", False),
        (RUNS, part_status("running", "main"), part_status("failed", "worker", 1, "cut off"), False, "running", None, "part on h1 is over: cut off", False),
        (RUNS, part_status("running", "main"), part_status("missing"), False, "running", None, "part on h1 is over: missing", False),
        (RUNS, part_status("failed", "main", 1, "gone", lost=True), part_status("running", "worker"), False, "running", None, "part on h0 is over: gone", False),
        (PENDING, part_status("missing"), part_status("missing"), False, "pending", None, "", False),
        (RUNS, part_status("missing"), part_status("missing"), False, "failed", 1, "h0 does not know the job", True),
        (PENDING, part_status("missing"), part_status("missing"), True, "cancelled", 1, "h0 does not know the job", True),
        (RUNS, part_status("missing"), part_status("running", "worker"), False, "running", None, "", False),
    ],
)  # fmt: skip
def test_the_status_of_a_job_follows_from_those_of_its_parts(
    known: KnownStatus, head: JobPartStatus | LudusError, other: JobPartStatus | LudusError, cancelled: bool, state: str, code: int | None,
    reason: str, final: bool,
) -> None:  # fmt: skip
    found = combine_statuses(PAIR, HOSTS, known, [head, other], 1010.0, cancelled=cancelled)
    assert (found.status.state, found.status.exit_code, found.final) == (state, code, final)
    assert found.status.reason == reason if not reason else reason in found.status.reason
    assert [process.name for process in found.status.processes] == ["main-0", "worker-0"]
    assert [process.host for process in found.status.processes] == ["h0", "h1"]
    assert KnownStatus.of(found.text()) == found
    if isinstance(other, JobPartStatus) and other.over:
        assert found.status.of("worker")[0].state == "ended"
    if other is AWAY and known is RUNS:
        assert found.status.of("worker")[0] == ProcessStatus("worker", 0, "running", pid=7, host="h1"), "as it was"


def test_the_status_is_final_when_a_machine_was_silent_for_too_long() -> None:
    runs = part_status("running", "main")
    first = combine_statuses(PAIR, HOSTS, RUNS, [runs, AWAY], 2000.0, patience_s=100)
    later = combine_statuses(PAIR, HOSTS, first, [runs, AWAY], 2050.0, patience_s=100)
    assert first.silent == later.silent == {"h1": 2000.0}
    assert first.status.reason == later.status.reason
    over = part_status("succeeded", "main", 0)
    assert not combine_statuses(PAIR, HOSTS, later, [over, AWAY], 2099.0, patience_s=100).final
    assert combine_statuses(PAIR, HOSTS, later, [over, AWAY], 2101.0, patience_s=100).final
    back = combine_statuses(PAIR, HOSTS, later, [runs, part_status("running", "worker")], 2060.0, patience_s=100)
    assert (back.silent, back.status.reason) == ({}, "")


def test_an_interrupted_submission_fails_after_a_while() -> None:
    nothing = [part_status("missing"), part_status("missing")]
    assert combine_statuses(PAIR, HOSTS, PENDING, nothing, 1030.0).status.state == "pending"
    found = combine_statuses(PAIR, HOSTS, PENDING, nothing, 1100.0)
    assert (found.status.state, found.final) == ("failed", True)
    assert "not submitted completely" in found.status.reason


# -- commands and settings --------------------------------------------------------------------------------------------------


def test_user_options_cannot_override_security_options() -> None:
    careless = replace(
        ONE, options=("StrictHostKeyChecking=no", "BatchMode=no", "PasswordAuthentication=yes", "ForwardAgent=yes")
    )
    words = ssh_words(careless, 0)
    options = [words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "-o"]
    first: dict[str, str] = {}
    for name, value in options:
        first.setdefault(name, value)  # as SSH does
    assert {
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "PasswordAuthentication": "no",
        "ForwardAgent": "no",
    }.items() <= first.items()
    named = ssh_words(replace(ONE, options=("ConnectTimeout=3",)), 0)
    assert named.index("ConnectTimeout=3") < named.index("ConnectTimeout=10"), "the user's option comes first"
    assert words[words.index("--") + 1] == "node1.example.org"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"nodes": ()}, "No machines"),
        ({"nodes": (SshNode("-oProxyCommand=id"),)}, "not a valid host"),
        ({"nodes": (SshNode("a b"),)}, "not a valid host"),
        ({"nodes": (SshNode("a", "-l"),)}, "not a valid user"),
        ({"nodes": (SshNode("a", address="x,y"),)}, "not a valid address"),
        ({"nodes": (SshNode("a", port=0),)}, "port 0"),
        ({"nodes": (SshNode("a"), SshNode("b", address="a"))}, "a is listed twice"),
        ({"options": ("-v",)}, "not an SSH option"),
        ({"options": ("A=b\nProxyCommand id",)}, "not an SSH option"),
        ({"connect_s": 0.0}, "connect_s=0"),
        ({"patience_s": float("inf")}, "patience_s=inf"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, object], match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        SshOrchestrator(tmp_path, replace(ONE, **changes))  # type: ignore[arg-type]


def test_settings_survive_a_round_trip_through_json() -> None:
    kept = replace(check_settings(THREE), copy=())
    assert SshSettings.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    ("code", "text", "kind", "match"),
    [
        (255, "Host key verification failed.", UsageError, r"not known.*ssh-keyscan -p 36000 10\.0\.0\.2 >> /keys/known_hosts"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", UsageError, "different host key"),
        (255, "root@10.0.0.2: Permission denied (publickey).", UsageError, "ssh-copy-id -p 36000 root@10.0.0.2"),
        (255, "ssh: Could not resolve hostname x: Name or service not known", UsageError, "cannot be resolved"),
        (255, "ssh: connect to host 10.0.0.2 port 36000: Connection timed out", WorkerFailed, "does not answer: .*timed out"),
        (1, f"{PYTHON}: Error while finding module specification for 'ludus.launch.ssh.remote_agent' (ModuleNotFoundError: No module named 'ludus')",
         UsageError, "has no Ludus.*pip install"),
        (2, "Unknown option: -P\nusage: python3 [option]", UsageError, r"older than Python 3\.11"),
        (127, "bash: line 1: /opt/ludus/bin/python: No such file or directory", UsageError, "cannot be run"),
        (97, "bash: module: command not found", UsageError, "setup lines failed.*module: command not found"),
        (None, "", WorkerFailed, r"10\.0\.0\.2 does not answer\."),
        (1, "", WorkerFailed, "SSH ended with code 1"),
    ],
)  # fmt: skip
def test_failures_of_ssh_are_translated_into_errors_with_a_remedy(
    code: int | None, text: str, kind: type[LudusError], match: str
) -> None:
    error = explain_failure(THREE, 0, code, text)
    assert type(error) is kind
    assert error.hint
    with pytest.raises(kind, match=match):
        raise error


# -- a fake ssh that runs commands on this machine ----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshOrchestrator]:
    """An orchestrator whose ssh program prints a greeting and runs its last argument on this machine."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\necho "Welcome to this machine"; for last; do :; done; exec sh -c "$last"\n')
    program.chmod(0o700)
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "there"))
    settings = SshSettings((SshNode("127.0.0.1"),), program=str(program), workdir="/")
    with SshOrchestrator(tmp_path / "here", settings) as orchestrator:
        yield orchestrator


def test_an_orchestrator_without_settings_finds_submitted_jobs(here: SshOrchestrator) -> None:
    job_id = here.submit(job(main("echo done")))
    other = SshOrchestrator(here.directory.parent)
    assert wait_until_ended(other, job_id).state == "succeeded"
    assert list(other.logs(job_id)) == ["done"]
    with pytest.raises(UsageError, match="No machines are given"):
        other.submit(job(main("true")))
    opened = open_orchestrator("ssh", directory=here.directory.parent)
    assert [status.id for status in opened.list()] == [job_id]
    assert here.hellos()[0]["protocol"] == 1  # type: ignore[index]


def test_a_broken_connection_is_replaced(here: SshOrchestrator, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job_id = here.submit(job(main(f"until [ -e {go} ]; do sleep 0.05; done")))
    for connection in here._connections.values():
        connection._process.kill()
        connection._process.wait(30)
    assert here.status(job_id).state == "running"
    go.touch()
    assert wait_until_ended(here, job_id).state == "succeeded"


def test_a_silent_machine_is_contacted_again_after_a_pause(
    here: SshOrchestrator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = here.submit(job(main("sleep 600")))
    wait_until(lambda: here.status(job_id).state == "running")
    monkeypatch.setattr(backend, "_RETRY_S", 2.0)
    program = tmp_path / "ssh"
    works = program.read_text()
    program.write_text(f"#!/bin/sh\necho . >> {tmp_path}/asked; echo 'No route to host' >&2; exit 255\n")
    here.close()
    for _ in range(5):
        status = here.status(job_id)
        assert (status.state, status.reason.partition(" since ")[0]) == ("running", "127.0.0.1 does not answer")
    assert (tmp_path / "asked").read_text() == ".\n"
    with pytest.raises(WorkerFailed, match=r"127\.0\.0\.1 could not be notified"):
        here.cancel(job_id)
    assert here.status(job_id).state == "cancelled"
    program.write_text(works)
    wait_until(lambda: here.status(job_id).state == "running")
    here.cancel(job_id, at_once=True)
    assert wait_until_ended(here, job_id).state == "cancelled"


def test_a_damaged_record_is_a_failed_job_and_old_jobs_are_deleted(
    here: SshOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_ENDED_JOBS", 1)
    first, second = (here.submit(job(main("true"))) for _ in range(2))
    for job_id in (first, second):
        wait_until_ended(here, job_id)
    (here.directory / second / "known.json").write_text('{"status": {')
    damaged = here.status(second)
    assert (damaged.state, damaged.exit_code) == ("failed", 1)
    assert "cannot be read" in damaged.reason
    last = here.submit(job(main("true")))
    assert len(here.list()) == 2
    assert {status.id for status in here.list()} >= {last}
    with pytest.raises(UnknownName):
        here.mend("nothing")


def test_stored_files_are_private_and_contain_no_secret(here: SshOrchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "correct-horse-battery")
    job_id = here.submit(Job("trial", (main("true"),), "main", ("TEST_SECRET",)))
    wait_until_ended(here, job_id)
    files = sorted((here.directory / job_id).iterdir())
    assert [path.name for path in files] == ["job.json", "known.json", "port", "ssh.json"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (here.directory, here.directory / job_id, *files))
    assert all("correct-horse" not in path.read_text() for path in files)
    assert json.loads((here.directory / job_id / "ssh.json").read_text())["nodes"][0]["host"] == "127.0.0.1"
