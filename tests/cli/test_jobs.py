"""`ludus jobs` with real jobs of local processes: list, logs, cancel, wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ludus.cli.clusters import jobs
from ludus.cli.job_argument import complete_job
from ludus.errors import UsageError, WorkerFailed
from ludus.launch.job import Job, JobStatus, Role
from ludus.launch.local import LocalOrchestrator
from ludus.testing.orchestrator_contract import wait_until_ended
from tests.cli.calling import Call, lines, one_line
from tests.cli.programs import program
from tests.waiting import wait_until

Submit = Callable[..., str]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalOrchestrator]:
    """A state directory of this test's own; what runs is ended with it."""
    monkeypatch.setenv("LUDUS_STATE_DIR", str(tmp_path / "state"))
    orchestrator = LocalOrchestrator()
    yield orchestrator
    for status in orchestrator.list():
        orchestrator.cancel(status.id, at_once=True)
        wait_until_ended(orchestrator, status.id)


@pytest.fixture
def submit(local: LocalOrchestrator) -> Submit:
    """Lines of shell as the main role of a job, and as workers of it."""

    def submitted(main: str, *workers: str, name: str = "trial") -> str:
        others = tuple(Role(f"worker{n}", ("sh", "-c", line)) for n, line in enumerate(workers))
        return local.submit(Job(name, (Role("main", ("sh", "-c", main)), *others), "main"))

    return submitted


# -- the list -----------------------------------------------------------------------------------------------------------


def test_without_jobs_the_list_explains_how_to_submit_one_and_creates_no_files(
    call: Call, tmp_path: Path, local: LocalOrchestrator
) -> None:
    result = call("jobs", "list")
    assert (result.code, result.out) == (0, "")
    assert "ludus submit" in one_line(result)
    assert call("jobs", "list", "--json").json == []
    assert list(tmp_path.iterdir()) == []


def test_the_list_shows_the_newest_last(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    first, second = submit("exit 3", name="first"), submit("sleep 600", name="second")
    wait_until_ended(local, first)
    wait_until(lambda: local.status(second).state == "running")
    result = call("jobs", "list")
    head, *rows = [line.split() for line in result.out.splitlines()]
    assert head == ["id", "on", "state", "exit", "age", "place", "run"]
    assert [row[:4] for row in rows] == [[first, "local", "failed", "3"], [second, "local", "running", "–"]]
    found = call("jobs", "list", "--json").json
    assert [(job["id"], job["on"], job["exit_code"]) for job in found] == [(first, "local", 3), (second, "local", None)]


def test_old_ones_are_shown_on_demand(
    call: Call, local: LocalOrchestrator, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_RECENT", 1)
    ids = [submit("exit 0") for _ in range(3)]
    for job_id in ids:
        wait_until_ended(local, job_id)
    ids = [status.id for status in local.list()]  # those of one second are in any order
    result = call("jobs", "list")
    assert [line.split()[0] for line in result.out.splitlines()[1:]] == ids[-1:]
    assert "2 older jobs are hidden" in one_line(result)
    assert [line.split()[0] for line in call("jobs", "list", "--all").out.splitlines()[1:]] == ids


@pytest.mark.parametrize(
    ("seconds", "message"), [(-1.0, "0 s"), (5.4, "5 s"), (119.0, "119 s"), (120.0, "2 min"), (7300.0, "2 h"), (2e5, "2 d")]
)
def test_an_age_is_formatted_as_number_and_unit(seconds: float, message: str) -> None:
    assert jobs.age(seconds) == message


# -- finding one --------------------------------------------------------------------------------------------------------


def test_a_job_is_found_by_its_id_and_by_a_beginning_that_no_other_has(
    call: Call, local: LocalOrchestrator, submit: Submit
) -> None:
    one, other = submit("exit 0", name="atari-a"), submit("exit 0", name="atari-b")
    for word in (one, one[:10], "atari-a"):
        assert call("jobs", "status", word, "--json").json["id"] == one
    result = call("jobs", "status", "atari")
    assert result.code == 2
    assert "2 jobs begin with 'atari'" in one_line(result)
    assert one in result.err
    assert other in result.err


def test_a_job_is_found_by_short_names(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    first = submit('echo \'{"pong": "/runs/x"}\' > $LUDUS_JOB_DIR/run.json', name="atari")
    second = submit("exit 0", name="cart")
    wait_until_ended(local, first)
    for word, meant in {"last": second, "atari": first, "pong": first, first[-4:]: first, "cart": second}.items():
        assert call("jobs", "status", word, "--json").json["id"] == meant


def test_the_shell_completes_ids_and_short_names_of_jobs(local: LocalOrchestrator, submit: Submit) -> None:
    assert complete_job("") == []
    first, second = submit("exit 0", name="atari"), submit("exit 0", name="cart")
    wait_until_ended(local, first)
    assert {word for word, _ in complete_job("")} == {"last", "atari", "cart", first, second}
    assert [word for word, _ in complete_job("at")] == ["atari", first]
    assert dict(complete_job("la")) == {"last": second}
    for command in ("status", "cancel"):
        assert completions("jobs", command, second[:6]) == [second]


def completions(*words: str) -> list[str]:
    """What bash is offered for the last of these words of a `ludus` command."""
    line = {"_LUDUS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("ludus", *words)), "COMP_CWORD": str(len(words))}
    ludus = Path(sys.executable).with_name("ludus")
    return subprocess.run([ludus], env=os.environ | line, capture_output=True, text=True, check=True).stdout.split()


def test_only_finished_jobs_are_cleaned(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    over, running = submit("exit 0", name="over"), submit("sleep 600", name="running")
    wait_until_ended(local, over)
    result = call("jobs", "clean", "--yes")
    assert result.code == 0
    assert f"removed: {over}" in result.out
    assert [status.id for status in local.list()] == [running]
    with pytest.raises(UsageError, match="is not over"):
        local.remove(running)
    assert "nothing to clean" in call("jobs", "clean", "--yes").err


def test_an_unknown_one_is_answered_with_the_nearest(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    assert "There is no job 'x'. `ludus jobs list`" in one_line(call("jobs", "status", "x"))
    job_id = submit("exit 0")
    for command in ("status", "logs", "cancel", "wait"):
        result = call("jobs", command, job_id.replace("trial", "tiral"))
        assert result.code == 2
        assert f"Did you mean {job_id!r}?" in one_line(result)
    assert call("jobs", "status", "").code == 2


def test_a_backend_may_be_named(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit("exit 0")
    assert call("jobs", "status", job_id, "--on", "local", "--json").json["id"] == job_id
    result = call("jobs", "list", "--on", "lokal")
    assert result.code == 2
    assert "Did you mean 'local'?" in one_line(result)


class Away(LocalOrchestrator):
    """Cannot be asked."""

    def list(self) -> list[JobStatus]:
        raise WorkerFailed("squeue did not answer in 10 s.")

    def status(self, job_id: str) -> JobStatus:
        raise WorkerFailed("squeue did not answer in 10 s.")


def test_an_unreachable_backend_does_not_hide_the_jobs_of_others(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit("exit 0")
    jobs.add_orchestrator("tests.cli.test_jobs:Away")
    jobs.add_orchestrator("no.such.module:Class")
    result = call("jobs", "list")
    assert job_id in result.out
    assert "skipped: squeue did not answer" in one_line(result)
    assert call("jobs", "status", job_id[:8], "--json").json["id"] == job_id
    result = call("jobs", "status", "another")
    assert result.code == 1
    assert "squeue did not answer" in one_line(result), "it may be there"


class Unmade(LocalOrchestrator):
    def __init__(self) -> None:
        raise OSError("there is no such disk")


class Unsound(LocalOrchestrator):
    """Its author did not think of our errors."""

    def list(self) -> list[JobStatus]:
        raise RuntimeError("a surprise")

    def status(self, job_id: str) -> JobStatus:
        raise RuntimeError("a surprise")


def test_failing_user_orchestrators_do_not_hide_the_jobs_of_others(
    call: Call, local: LocalOrchestrator, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "does_not_parse.py").write_text("class Mine(:\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job_id = submit("exit 3")
    wait_until_ended(local, job_id)
    wrong = {
        "does_not_parse:Mine": "SyntaxError: ",
        "raises:Mine": "RuntimeError: at import.",
        "tests.cli.test_jobs:Unmade": "OSError: there is no such disk.",
        "tests.cli.test_jobs:Unsound": "RuntimeError: a surprise.",
    }
    for name in wrong:
        jobs.add_orchestrator(name)
    listed = call("jobs", "list", "--json")
    assert (listed.code, [job["id"] for job in listed.json]) == (0, [job_id])
    assert len(lines(listed)) == len(wrong)
    for result, (name, why) in zip(lines(listed), wrong.items(), strict=True):
        assert result.startswith(f"ludus: skipped: The orchestrator {name} failed: ")
        assert why.rstrip(".") in result
        assert why.rstrip(".") in lines(call("jobs", "list", "--on", name))[0]
    for command, code in (("status", 0), ("logs", 0), ("cancel", 0), ("wait", 3)):
        answer = call("jobs", command, job_id)
        assert answer.code == code, answer.err


# -- status and logs ----------------------------------------------------------------------------------------------------


def test_the_status_names_processes_logs_and_why_it_failed(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit("exit 7", "sleep 600")
    status = wait_until_ended(local, job_id)
    page = call("jobs", "status", job_id).out
    assert "main-0 ended with code 7" in page
    assert status.logs in page
    rows = [line.split() for line in page.splitlines() if line.startswith(("main-0", "worker0-0"))]
    assert [row[:3] for row in rows] == [["main-0", "ended", "7"], ["worker0-0", "ended", "143"]]
    found = call("jobs", "status", job_id, "--json").json
    assert (found["on"], found["state"], found["exit_code"]) == ("local", "failed", 7)
    assert [process["role"] for process in found["processes"]] == ["main", "worker0"]


def test_logs_are_shown_whole_by_role_and_from_their_end(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit(
        "until [ -e $LUDUS_JOB_DIR/result ]; do sleep 0.02; done; echo one; echo two; echo three",
        "echo hello; touch $LUDUS_JOB_DIR/result",
    )
    wait_until_ended(local, job_id)
    mains = ["main-0: one", "main-0: two", "main-0: three"]
    assert call("jobs", "logs", job_id).out.splitlines() == [*mains, "worker0-0: hello"]
    assert call("jobs", "logs", job_id, "--role", "main").out == "one\ntwo\nthree\n"
    assert call("jobs", "logs", job_id, "--role", "main", "--tail", "2").out == "two\nthree\n"
    assert call("jobs", "logs", job_id, "--tail", "0").out == ""
    result = call("jobs", "logs", job_id, "--role", "mian")
    assert result.code == 2
    assert "Did you mean 'main'?" in one_line(result)


def test_following_prints_each_new_line_once(local: LocalOrchestrator, submit: Submit, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job_id = submit(
        f"echo one; echo two; touch $LUDUS_JOB_DIR/result; until [ -e {go} ]; do sleep 0.02; done; echo three",
        "echo a; echo b; sleep 600",
    )
    wait_until(lambda: {"main-0: two", "worker0-0: b"} <= set(local.logs(job_id)))
    with (
        program("jobs", "logs", job_id, "-f", listens=False) as all_of_it,
        program("jobs", "logs", job_id, "-f", "--tail", "1", listens=False) as end,
    ):
        all_of_it.wait_for("two")
        end.wait_for("worker0-0: b")
        go.touch()
        code, out, _ = all_of_it.finish()
        assert (code, sorted(out.splitlines())) == (
            0, ["main-0: one", "main-0: three", "main-0: two", "worker0-0: a", "worker0-0: b"],
        )  # fmt: skip
        assert end.finish()[:2] == (0, "worker0-0: b\nmain-0: three\n")


class Turned(LocalOrchestrator):
    """Its log turns after it was counted: most of what was there is gone when it is followed."""

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        if follow:
            path = self._find(job_id).log("main-0")
            left = path.read_bytes().split(b"\n")[-4:]
            with open(path, "r+b") as log:  # whoever writes appends to it
                log.truncate()
                log.write(b"\n".join(left))
        return super().logs(job_id, role=role, follow=follow)


def test_of_a_log_that_turns_meanwhile_nothing_that_comes_is_left_out(
    local: LocalOrchestrator, submit: Submit, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    more = "; ".join(f"echo new {n}" for n in range(5))
    job_id = submit(
        f"for n in $(seq 100); do echo old $n; done; printf ha; until [ -e {go} ]; do sleep 0.02; done; echo lf; {more}"
    )
    wait_until(lambda: "ha" in list(local.logs(job_id)))
    with program("jobs", "logs", job_id, "-f", "--tail", "2", "--on", "tests.cli.test_jobs:Turned", listens=False) as end:
        end.wait_for("old 100")
        go.touch()
        code, out, err = end.finish()
    assert (code, err) == (0, "")
    assert out.splitlines() == ["old 99", "old 100", "half", *(f"new {n}" for n in range(5))]


def test_the_run_of_a_job_is_shown(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    places = {"pong": "s3://bucket/runs/pong/PPO_Pong_1?endpoint=x", "cartpole": "/shared/runs/PPO_CartPole_2"}
    job_id = submit(f"echo '{json.dumps(places)}' > $LUDUS_JOB_DIR/run.json")
    none, other = submit("exit 0", name="none"), submit("echo nonsense > $LUDUS_JOB_DIR/run.json", name="nonsense")
    for each in (job_id, none, other):
        wait_until_ended(local, each)
    rows = {line.split()[0]: line for line in call("jobs", "list").out.splitlines()[1:]}
    assert rows[job_id].endswith(" PPO_Pong_1, PPO_CartPole_2")
    assert rows[none].split()[-1] == rows[other].split()[-1] == "–"
    page = [line.strip() for line in call("jobs", "status", job_id).out.splitlines()]
    at = next(n for n, line in enumerate(page) if line.startswith("run "))
    assert [page[at].split()[1], page[at + 1]] == list(places.values())
    assert not any(line.startswith("run ") for line in call("jobs", "status", none).out.splitlines())
    assert call("jobs", "status", job_id, "--json").json["runs"] == places
    assert call("jobs", "status", none, "--json").json["runs"] == {}


# -- ending and waiting -------------------------------------------------------------------------------------------------


def test_cancelling_asks_and_now_kills(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    asked = submit("trap 'echo saved; exit 130' TERM; echo ready; while :; do sleep 0.02; done")
    killed = submit("trap '' TERM; echo ready; while :; do sleep 0.02; done")
    wait_until(lambda: all("ready" in list(local.logs(job_id)) for job_id in (asked, killed)))
    result = call("jobs", "cancel", asked, "--wait")
    assert result.code == 0
    assert f"{asked}: cancelled with code 130" in result.err
    assert "saved" in list(local.logs(asked))
    assert call("jobs", "wait", asked).code == 130
    assert call("jobs", "cancel", killed, "--now", "--wait").code == 0
    assert local.status(killed).exit_code == 137
    result = call("jobs", "cancel", killed, asked)
    assert result.code == 0
    assert result.err.count("is already over") == 2


@pytest.mark.parametrize("code", [0, 1, 2, 77])
def test_waiting_ends_with_the_code_of_the_job(call: Call, submit: Submit, code: int) -> None:
    result = call("jobs", "wait", submit(f"echo the last word; exit {code}", "echo not this; sleep 600"))
    assert result.code == code
    if code:
        assert f"failed: main-0 ended with code {code}" in result.err
        assert "  the last word" in result.err.splitlines()
        assert "not this" not in result.err
    else:
        assert result.err == ""


def test_waiting_may_have_an_end_of_its_own(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit("sleep 600")
    result = call("jobs", "wait", job_id, "--timeout", "0.05")
    assert result.code == 124
    assert "is not over after 0.05 s" in one_line(result)
    assert not local.status(job_id).over


def test_wait_with_json_prints_the_final_status(call: Call, submit: Submit) -> None:
    result = call("jobs", "wait", submit("exit 5"), "--json")
    assert result.code == 5
    assert (result.json["state"], result.json["exit_code"]) == ("failed", 5)


class Interrupted(LocalOrchestrator):
    """Somebody types Ctrl-C when it is asked for the third time."""

    asked = 0

    def status(self, job_id: str) -> JobStatus:
        self.asked += 1
        if self.asked == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().status(job_id)


def test_an_interrupt_ends_the_waiting_and_not_the_job(call: Call, local: LocalOrchestrator, submit: Submit) -> None:
    job_id = submit("sleep 600")
    result = call("jobs", "wait", job_id, "--on", "tests.cli.test_jobs:Interrupted")
    assert (result.code, result.out) == (130, "")
    assert f"{job_id} is still running" in result.err
    assert f"ludus jobs cancel {job_id}" in result.err
    assert not local.status(job_id).over


class Shaky(LocalOrchestrator):
    """Cannot be asked the first two times."""

    asked = 0

    def status(self, job_id: str) -> JobStatus:
        self.asked += 1
        if self.asked <= 2:
            raise WorkerFailed("The network is away.")
        return super().status(job_id)


def test_a_backend_that_is_away_for_a_moment_is_waited_for(
    local: LocalOrchestrator, submit: Submit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit("exit 4")
    first = wait_until_ended(local, job_id)
    status = jobs.wait_for_end(jobs.JobHandle("shaky", Shaky(), first), 30.0)
    assert status is not None
    assert status.exit_code == 4
    assert capsys.readouterr().err.count("cannot be queried at the moment: The network is away.") == 1
    monkeypatch.setattr(jobs, "_UNREACHABLE_S", 0.0)
    with pytest.raises(WorkerFailed):
        jobs.wait_for_end(jobs.JobHandle("away", Away(), first), 30.0)


def test_a_user_orchestrator_is_stored_once_in_a_file_of_this_user(local: LocalOrchestrator, tmp_path: Path) -> None:
    for name in ("mine:Orchestrator", "local", "mine:Orchestrator", "yours:Orchestrator"):
        jobs.add_orchestrator(name)
    assert jobs.known_orchestrators() == ["mine:Orchestrator", "yours:Orchestrator"]
    assert json.dumps(sorted(path.name for path in (tmp_path / "state").iterdir())) == '["orchestrators"]'


# -- mending ------------------------------------------------------------------------------------------------------------


def test_mend_is_not_supported_for_local_jobs(call: Call, submit: Submit) -> None:
    job_id = submit("sleep 600")
    result = call("jobs", "mend", job_id)
    assert result.code == 2
    assert f"{job_id} runs on local, which does not support mend. Use it for SSH jobs." in one_line(result)


class Mending(LocalOrchestrator):
    missing: tuple[str, ...] = ("10.0.0.3", "10.0.0.4")

    def mend(self, job_id: str) -> Sequence[str]:
        return [f"{host}, which had {job_id}" for host in self.missing]


class Whole(Mending):
    missing = ()


def test_mend_prints_the_restarted_hosts(call: Call, submit: Submit) -> None:
    job_id = submit("sleep 600")
    mended = call("jobs", "mend", "trial", "--on", "tests.cli.test_jobs:Mending")
    assert mended.code == 0
    assert f"{job_id} is restarted on 10.0.0.3, which had {job_id}, 10.0.0.4" in one_line(mended)
    assert f"{job_id} has no missing processes" in one_line(call("jobs", "mend", job_id, "--on", "tests.cli.test_jobs:Whole"))
