"""Contract suite for orchestrators. A backend is correct if it passes:

class TestMyOrchestrator(OrchestratorContract):
    @pytest.fixture
    def orchestrator(self) -> Orchestrator:
        return MyOrchestrator(...)             # with no jobs yet

Jobs are `sh` commands that write files to a directory shared by all machines of the backend (fixture `shared`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ludus.errors import UnknownName, UsageError
from ludus.launch.job import Job, JobStatus, Orchestrator, Role, RoleRestart
from ludus.launch.job import wait as wait_for

_WAIT_S = 60.0  # how long a test waits for what must happen; never reached when it does
_STILL_S = 0.2  # how long nothing must happen
_SECRET = "horse-battery-staple"  # noqa: S105

BEATING = "while :; do echo . >> $0; sleep 0.05; done"
"""Runs forever, and appends to the file that is its first argument."""


class OrchestratorContract:
    @pytest.fixture
    def orchestrator(self) -> Orchestrator:
        raise NotImplementedError("Override the fixture `orchestrator`: one that knows of no jobs.")

    @pytest.fixture
    def shared(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture(autouse=True)
    def _cancel_remaining_jobs(self, orchestrator: Orchestrator) -> Iterator[None]:
        yield
        for status in orchestrator.list():
            orchestrator.cancel(status.id, at_once=True)
            wait_until_ended(orchestrator, status.id)

    def again(self, orchestrator: Orchestrator) -> Orchestrator:
        """Return the same orchestrator as opened by another process."""
        return orchestrator

    def traces(self, orchestrator: Orchestrator, job_id: str) -> Iterable[Path]:
        """Return all files that the backend wrote for a job, which are searched for secrets."""
        return []

    # -- to the end

    def test_a_job_that_ends_well_has_succeeded(self, orchestrator: Orchestrator) -> None:
        job_id = orchestrator.submit(job(main("echo one; echo two >&2")))
        status = wait_until_ended(orchestrator, job_id)
        assert (status.id, status.name, status.state, status.exit_code) == (job_id, "trial", "succeeded", 0)
        assert status.reason == ""
        assert [(p.role, p.index, p.state, p.exit_code) for p in status.processes] == [("main", 0, "ended", 0)]
        assert list(orchestrator.logs(job_id)) == ["one", "two"]

    @pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exec /no/such/program", 127)])
    def test_the_exit_code_is_that_of_the_main_role(self, orchestrator: Orchestrator, script: str, code: int) -> None:
        status = wait_until_ended(orchestrator, orchestrator.submit(job(main(script))))
        assert (status.state, status.exit_code) == ("failed", code)
        assert status.reason

    def test_what_cannot_be_started_has_failed(self, orchestrator: Orchestrator) -> None:
        job_id = orchestrator.submit(job(Role("main", ("/no/such/program", "--at-all"))))
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("failed", 127)
        assert any("/no/such/program" in line for line in orchestrator.logs(job_id))

    def test_when_the_main_role_ends_so_does_everything(self, orchestrator: Orchestrator, shared: Path) -> None:
        beat = shared / "beat"
        worker = Role("worker", ("sh", "-c", f"({BEATING}) & wait", str(beat)), count=2)
        status = wait_until_ended(
            orchestrator, orchestrator.submit(job(main(f"until [ -s {beat} ]; do sleep 0.05; done"), worker))
        )
        assert (status.state, status.exit_code) == ("succeeded", 0)
        assert {process.state for process in status.processes} == {"ended"}
        assert is_still(beat)

    def test_roles_other_than_main_may_end_before_it(self, orchestrator: Orchestrator, shared: Path) -> None:
        done = shared / "done"
        short = Role("short", ("sh", "-c", f"touch {done}; exit 4"))
        status = wait_until_ended(
            orchestrator, orchestrator.submit(job(main(f"until [ -e {done} ]; do sleep 0.05; done"), short))
        )
        assert (status.state, status.exit_code) == ("succeeded", 0)
        assert status.of("short")[0].restarts == 0

    # -- what arrives

    def test_words_arrive_as_they_are(self, orchestrator: Orchestrator) -> None:
        words = ("a b", "$HOME", "`id`", "it's", 'say "no"', "back\\slash", "*", "", "ö—语", "two\nlines", "{0}%s", "-n")
        job_id = orchestrator.submit(job(Role("main", ("printf", "<%s>\n", *words))))
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert "\n".join(orchestrator.logs(job_id)) == "\n".join(f"<{word}>" for word in words)

    def test_a_process_has_the_environment_of_its_role_and_knows_who_it_is(
        self, orchestrator: Orchestrator, shared: Path
    ) -> None:
        say = 'echo "$LUDUS_JOB_ROLE $LUDUS_JOB_INDEX $COLOUR"'
        worker = Role(
            "worker",
            (
                "sh",
                "-c",
                f"{say} > {shared}/$LUDUS_JOB_INDEX.part; mv {shared}/$LUDUS_JOB_INDEX.part {shared}/said-$LUDUS_JOB_INDEX",
            ),
            2,
            environment={"COLOUR": "dark $red"},
        )
        job_id = orchestrator.submit(job(main(f"until [ -e {shared}/said-0 ] && [ -e {shared}/said-1 ]; do sleep 0.05; done; {say}"), worker))  # fmt: skip
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert [(shared / f"said-{i}").read_text() for i in range(2)] == ["worker 0 dark $red\n", "worker 1 dark $red\n"]
        assert [line.rstrip() for line in orchestrator.logs(job_id, role="main")] == ["main 0"]

    def test_secrets_are_handed_on_and_leave_no_trace(self, orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEST_SECRET", _SECRET)
        hidden = Job("trial", (main('[ "${#TEST_SECRET}" = 20 ] && echo it is here'),), "main", ("TEST_SECRET",))
        assert _SECRET not in "".join(orchestrator.render(hidden).values())
        job_id = orchestrator.submit(hidden)
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert list(orchestrator.logs(job_id)) == ["it is here"]
        for path in self.traces(orchestrator, job_id):
            assert _SECRET.encode() not in path.read_bytes(), path

    def test_a_job_whose_secrets_would_be_seen_is_refused(
        self, orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def expect_refusal(role: Role, match: str) -> None:
            with pytest.raises(UsageError, match=match) as caught:
                orchestrator.submit(Job("trial", (role,), "main", ("TEST_SECRET",)))
            assert _SECRET not in str(caught.value)

        monkeypatch.delenv("TEST_SECRET", raising=False)
        expect_refusal(main("true"), "not in the environment")
        monkeypatch.setenv("TEST_SECRET", _SECRET)
        expect_refusal(main(f"login --password={_SECRET}"), "command")
        expect_refusal(dataclasses.replace(main("true"), environment={"TEST_SECRET": "x"}), "written")
        expect_refusal(dataclasses.replace(main("true"), environment={"URL": f"redis://:{_SECRET}@host"}), "written")
        assert orchestrator.list() == []

    # -- starting again

    def test_a_process_is_started_again_where_that_was_asked_for(self, orchestrator: Orchestrator, shared: Path) -> None:
        cases: list[tuple[RoleRestart, str, int]] = [
            ("never", "exit 3", 1), ("when-killed", "exit 3", 1), ("when-killed", "kill -9 $$", 2), ("on-failure", "exit 3", 2),
            ("on-failure", "kill -9 $$", 2), ("on-failure", "exit 0", 1), ("always", "exit 0", 2),
        ]  # fmt: skip
        begun = [shared / f"begun-{i}" for i in range(len(cases))]
        workers = [
            Role(f"worker-{i}", ("sh", "-c", f"echo . >> {here}; [ $(wc -l < {here}) -ge 2 ] && exec sleep 600; {ends}"), restart=restart)
            for i, (here, (restart, ends, _)) in enumerate(zip(begun, cases, strict=True))
        ]  # fmt: skip
        over = shared / "over"
        job_id = orchestrator.submit(job(main(f"until [ -e {over} ]; do sleep 0.05; done"), *workers))
        expected = [("main", "running", 0)]
        expected += [(f"worker-{i}", "running" if lives > 1 else "ended", lives - 1) for i, (*_, lives) in enumerate(cases)]
        until(lambda: [(p.role, p.state, p.restarts) for p in orchestrator.status(job_id).processes] == expected)
        over.touch()
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert [here.read_text().count(".") for here in begun] == [lives for *_, lives in cases]

    def test_a_main_role_that_was_killed_may_be_started_again_too(self, orchestrator: Orchestrator, shared: Path) -> None:
        first = shared / "first"
        again = Role("main", ("sh", "-c", f"[ -e {first} ] && exit 5; touch {first}; kill -9 $$"), restart="when-killed")
        status = wait_until_ended(orchestrator, orchestrator.submit(job(again)))
        assert (status.state, status.exit_code, status.of("main")[0].restarts) == ("failed", 5, 1)

    # -- cancelling

    def test_a_cancelled_job_is_asked_to_end_and_then_is_gone(self, orchestrator: Orchestrator, shared: Path) -> None:
        beat, saved = shared / "beat", shared / "saved"
        saves = f"trap 'echo saved > {saved}; exit 130' TERM; touch {shared}/ready; while :; do sleep 0.05; done"
        worker = Role("worker", ("sh", "-c", BEATING, str(beat)), restart="on-failure")
        job_id = orchestrator.submit(job(main(saves), worker))
        until(lambda: beat.exists() and (shared / "ready").exists())
        until(lambda: orchestrator.status(job_id).state == "running")  # a backend may learn it after the processes have begun
        self.again(orchestrator).cancel(job_id)
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("cancelled", 130)
        assert {process.state for process in status.processes} == {"ended"}
        assert saved.read_text() == "saved\n"
        assert is_still(beat), "a process that was ended was started again, or never ended"

    def test_what_does_not_listen_is_killed_at_once_if_that_is_wanted(self, orchestrator: Orchestrator, shared: Path) -> None:
        beat = shared / "beat"
        job_id = orchestrator.submit(job(Role("main", ("sh", "-c", f"trap '' TERM INT HUP; ({BEATING}) & {BEATING}", str(beat)))))
        until(beat.exists)
        orchestrator.cancel(job_id)
        orchestrator.cancel(job_id, at_once=True)
        status = wait_until_ended(orchestrator, job_id)
        assert (status.state, status.exit_code) == ("cancelled", 137)
        assert is_still(beat)

    def test_what_does_not_listen_is_killed_when_its_time_is_up(self, orchestrator: Orchestrator, shared: Path) -> None:
        beat = shared / "beat"
        deaf = Role("deaf", ("sh", "-c", f"trap '' TERM; {BEATING}", str(beat)))
        short = dataclasses.replace(job(main(f"until [ -s {beat} ]; do sleep 0.05; done; exit 3"), deaf), grace_s=0.2)
        status = wait_until_ended(orchestrator, orchestrator.submit(short))
        assert (status.state, status.exit_code, status.of("deaf")[0].exit_code) == ("failed", 3, 137)
        assert is_still(beat)

    def test_a_job_can_be_cancelled_as_soon_as_it_is_submitted(self, orchestrator: Orchestrator) -> None:
        job_id = orchestrator.submit(job(main("exec sleep 600"), Role("worker", ("sleep", "600"), 20)))
        orchestrator.cancel(job_id)
        status = wait_until_ended(orchestrator, job_id)
        assert status.state == "cancelled"
        assert {process.state for process in status.processes} == {"ended"}

    def test_cancelling_what_is_over_changes_nothing(self, orchestrator: Orchestrator) -> None:
        job_id = orchestrator.submit(job(main("exit 3")))
        before = wait_until_ended(orchestrator, job_id)
        orchestrator.cancel(job_id)
        orchestrator.cancel(job_id, at_once=True)
        assert orchestrator.status(job_id) == before
        assert before.state == "failed"

    # -- looking

    def test_logs_can_be_followed_until_the_job_is_over(self, orchestrator: Orchestrator, shared: Path) -> None:
        go = shared / "go"
        job_id = orchestrator.submit(job(main(f"echo first; until [ -e {go} ]; do sleep 0.05; done; echo second; printf third")))
        lines = self.again(orchestrator).logs(job_id, role="main", follow=True)
        assert next(lines) == "first"
        go.touch()
        assert list(lines) == ["second", "third"]
        assert orchestrator.status(job_id).over

    def test_lines_of_several_processes_say_whose_they_are(self, orchestrator: Orchestrator, shared: Path) -> None:
        said = f"echo hello; touch {shared}/$LUDUS_JOB_INDEX"
        job_id = orchestrator.submit(
            job(main(f"echo begin; until [ -e {shared}/0 ] && [ -e {shared}/1 ]; do sleep 0.05; done"), Role("worker", ("sh", "-c", said), 2))
        )  # fmt: skip
        assert wait_until_ended(orchestrator, job_id).state == "succeeded"
        assert sorted(orchestrator.logs(job_id)) == ["main-0: begin", "worker-0: hello", "worker-1: hello"]
        assert sorted(orchestrator.logs(job_id, role="worker")) == ["worker-0: hello", "worker-1: hello"]
        with pytest.raises(UnknownName, match=r"wroker.*worker"):
            orchestrator.logs(job_id, role="wroker")

    def test_jobs_are_listed_in_the_order_in_which_they_came(self, orchestrator: Orchestrator) -> None:
        assert orchestrator.list() == []
        ids = [orchestrator.submit(job(main("true"), name=name)) for name in ("one", "two", "one")]
        assert len(set(ids)) == 3
        over = [wait_until_ended(orchestrator, job_id) for job_id in ids]
        assert self.again(orchestrator).list() == over
        assert [status.name for status in over] == ["one", "two", "one"]

    def test_what_a_job_works_on_can_be_seen_by_others(self, orchestrator: Orchestrator) -> None:
        job_id = orchestrator.submit(dataclasses.replace(job(main("true")), place="s3://games/run"))
        assert [status.place for status in self.again(orchestrator).list()] == ["s3://games/run"]
        assert wait_until_ended(orchestrator, job_id).place == "s3://games/run"

    def test_a_job_that_does_not_exist_is_unknown(self, orchestrator: Orchestrator) -> None:
        asked: list[Callable[[str], object]] = [orchestrator.status, orchestrator.logs, orchestrator.cancel]
        for ask in asked:
            for name in ("nothing", "../jobs", "", "a/b"):
                with pytest.raises(UnknownName):
                    ask(name)

    # -- before anything is done

    def test_rendering_is_pure(self, orchestrator: Orchestrator) -> None:
        asked = job(
            Role("main", ("program", "--with", "two words"), environment={"COLOUR": "dark-red"}), Role("worker", ("other",), 3)
        )
        first = orchestrator.render(asked)
        assert first == orchestrator.render(asked) == self.again(orchestrator).render(asked)
        text = "".join(first.values())
        for part in ("program", "two words", "other", "COLOUR", "dark-red"):
            assert part in text
        assert orchestrator.list() == []

    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            (Job("a b", (Role("main", ("true",)),), "main"), "'a b'"),
            (Job("../up", (Role("main", ("true",)),), "main"), "name"),
            (Job("trial", (), "main"), "no roles"),
            (Job("trial", (Role("main", ("true",)),), "mian"), "mian.*main"),
            (Job("trial", (Role("main", ("true",)), Role("main", ("true",))), "main"), "two roles"),
            (Job("trial", (Role("main", ("true",), count=2),), "main"), "2 processes"),
            (Job("trial", (Role("main", ()),), "main"), "command"),
            (Job("trial", (Role("main", ("true",), restart="often"),), "main"), "often.*never"),  # type: ignore[arg-type]
            (Job("trial", (Role("main", ("true",)),), "main", grace_s=-1), "grace_s=-1"),
            (Job("trial", (Role("main", ("true",)), Role("worker", ("true",), count=0)), "main"), "0 processes"),
            (Job("trial", (Role("main", ("true",), environment={"a=b": ""}),), "main"), "a=b"),
            (Job("trial", (Role("main", ("true", "a\0b")),), "main"), "command"),
        ],
    )
    def test_a_job_that_cannot_be_is_refused_before_anything_is_done(
        self, orchestrator: Orchestrator, wrong: Job, match: str
    ) -> None:
        with pytest.raises(UsageError, match=match):
            orchestrator.render(wrong)
        with pytest.raises(UsageError, match=match):
            orchestrator.submit(wrong)
        assert orchestrator.list() == []


# -- for these tests, and yours -----------------------------------------------------------------------------------------


def job(*roles: Role, name: str = "trial") -> Job:
    return Job(name, roles, "main")


def main(script: str) -> Role:
    return Role("main", ("sh", "-c", script))


def wait_until_ended(orchestrator: Orchestrator, job_id: str) -> JobStatus:
    return wait_for(orchestrator, job_id, _WAIT_S, every_s=0.03)


def until(happened: Callable[[], bool], timeout_s: float | None = None) -> None:
    deadline = time.monotonic() + (_WAIT_S if timeout_s is None else timeout_s)
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_still(path: Path) -> bool:
    """Whether a file stays unchanged for a while."""
    before = path.read_bytes()
    time.sleep(_STILL_S)
    return path.read_bytes() == before
