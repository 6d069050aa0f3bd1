"""Shell completion of arguments that name a job, by id or short name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

LAST = "last"
_DIRECTORIES = {"jobs": "local", "ssh": "ssh", "slurm": "slurm"}
"""Folder of the state directory → the launcher whose jobs are in it."""


class RecordedJob(NamedTuple):
    submitted_at: float
    id: str
    name: str
    target: str


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Complete `last`, job names and ids, newest first. Reads only local files, because querying a queue takes seconds."""
    newest_first = sorted(_recorded_jobs(), reverse=True)
    found = {LAST: newest_first[0].id} if newest_first else {}
    for job in newest_first:
        found.setdefault(job.name, f"newest job of this name: {job.id}")
    found |= {job.id: f"on {job.target}" for job in newest_first}
    return [(word, meaning) for word, meaning in found.items() if word.startswith(incomplete)]


def _recorded_jobs() -> Iterator[RecordedJob]:
    from ludus.launch import job_dir

    for directory, target in _DIRECTORIES.items():
        for path in (job_dir.state_dir() / directory).glob(f"*/{job_dir.JOB}"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # removed meanwhile, or damaged
                job = job_dir.job_from_json(path.read_text(encoding="utf-8"))
                yield RecordedJob(path.stat().st_mtime, path.parent.name, job.name, target)
