"""The suite for orchestrators itself: a backend that is wrong in a plausible way must not pass it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.errors import LudusError
from ludus.launch.job import Job, JobStatus, Role
from ludus.launch.job_dir import JOB
from ludus.launch.local import LocalOrchestrator
from ludus.testing import orchestrator_contract
from ludus.testing.orchestrator_contract import OrchestratorContract

FAILED = (AssertionError, pytest.fail.Exception, StopIteration, LudusError)


class _Optimist(LocalOrchestrator):
    """What ended, ended well."""

    def status(self, job_id: str) -> JobStatus:
        found = super().status(job_id)
        return replace(found, state="succeeded", exit_code=0) if found.over else found


class _Joins(LocalOrchestrator):
    """Lets a shell take the words apart again."""

    def submit(self, job: Job) -> str:
        return super().submit(replace(job, roles=tuple(replace(r, command=("sh", "-c", " ".join(r.command))) for r in job.roles)))


class _Leaks(LocalOrchestrator):
    """Writes down the whole environment."""

    def render(self, job: Job) -> dict[str, str]:
        files = super().render(job)
        return {JOB: files[JOB], "environment.json": json.dumps(dict(os.environ))}


class _Dates(LocalOrchestrator):
    count = 0

    def render(self, job: Job) -> dict[str, str]:
        _Dates.count += 1
        return {**super().render(job), "made": str(_Dates.count)}


class _Glances(LocalOrchestrator):
    """Shows what is there at the moment, whoever wants to follow."""

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        return super().logs(job_id, role=role)


class _Mixes(LocalOrchestrator):
    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        return (re.sub(r"^\w+-\d+: ", "", line) for line in super().logs(job_id, role=role, follow=follow))


class _Once(LocalOrchestrator):
    """Starts nothing again."""

    def submit(self, job: Job) -> str:
        return super().submit(replace(job, roles=tuple(replace(role, restart="never") for role in job.roles)))


class _Deaf(LocalOrchestrator):
    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        if at_once:
            super().cancel(job_id, at_once=True)


class _Brutal(LocalOrchestrator):
    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        super().cancel(job_id, at_once=True)


class _Alike(LocalOrchestrator):
    """Does not tell the processes of a role who they are."""

    def submit(self, job: Job) -> str:
        def blind(role: Role) -> Role:
            return replace(role, command=("env", "LUDUS_JOB_INDEX=0", *role.command))

        return super().submit(replace(job, roles=tuple(blind(role) for role in job.roles)))


class _Suite(OrchestratorContract):
    __test__ = False

    def traces(self, orchestrator: object, job_id: str) -> list[Path]:
        assert isinstance(orchestrator, LocalOrchestrator)
        return [path for path in (orchestrator.directory / job_id).rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (_Optimist, lambda s, o, p, m: s.test_the_exit_code_is_that_of_the_main_role(o, "exit 7", 7)),
        (_Joins, lambda s, o, p, m: s.test_words_arrive_as_they_are(o)),
        (_Leaks, lambda s, o, p, m: s.test_secrets_are_handed_on_and_leave_no_trace(o, m)),
        (_Dates, lambda s, o, p, m: s.test_rendering_is_pure(o)),
        (_Glances, lambda s, o, p, m: s.test_logs_can_be_followed_until_the_job_is_over(o, p)),
        (_Mixes, lambda s, o, p, m: s.test_lines_of_several_processes_say_whose_they_are(o, p)),
        (_Once, lambda s, o, p, m: s.test_a_process_is_started_again_where_that_was_asked_for(o, p)),
        (_Deaf, lambda s, o, p, m: s.test_a_cancelled_job_is_asked_to_end_and_then_is_gone(o, p)),
        (_Brutal, lambda s, o, p, m: s.test_a_cancelled_job_is_asked_to_end_and_then_is_gone(o, p)),
        (_Alike, lambda s, o, p, m: s.test_a_process_has_the_environment_of_its_role_and_knows_who_it_is(o, p)),
    ],
)
def test_an_orchestrator_that_is_wrong_does_not_pass(
    wrong: type[LocalOrchestrator],
    caught_by: Callable[[_Suite, LocalOrchestrator, Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = wrong in (_Once, _Deaf, _Alike)  # for what never happens
    monkeypatch.setattr(orchestrator_contract, "_WAIT_S", 0.8 if waits else 60.0)
    orchestrator = wrong(tmp_path / "state")
    try:
        with pytest.raises(FAILED):
            caught_by(_Suite(), orchestrator, tmp_path, monkeypatch)
    finally:
        monkeypatch.setattr(orchestrator_contract, "_WAIT_S", 60.0)
        right = LocalOrchestrator(tmp_path / "state")
        for status in right.list():
            right.cancel(status.id, at_once=True)
            orchestrator_contract.wait_until_ended(right, status.id)
