"""Callbacks for arguments that name a run: `run_place` resolves short names, `complete_run` completes them in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def run_place(value: str | None) -> str | None:
    """Resolve `last`, an experiment's name or the end of a run's name to the path of the run. Used as `callback`."""
    from ludus.experiments.runs.run_names import resolve_run

    return None if value is None else resolve_run(value)


def run_places(values: list[str] | None) -> list[str] | None:
    """`run_place` for an argument with several values. Keeps the NAME of `NAME=RUN`, and directories with runs."""
    from ludus.experiments.runs.run_names import resolve_run

    if values is None:
        return None
    named = [("", "", value) if "://" in value else value.rpartition("=") for value in values]
    return [f"{name}{equals}{resolve_run(run)}" for name, equals, run in named]


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """Complete short names and directories. Used as `autocompletion`."""
    return [*_short_names(incomplete), *_directories(incomplete)]


def _short_names(incomplete: str) -> Iterator[tuple[str, str]]:
    from ludus.experiments.runs.run_dir import find_runs
    from ludus.experiments.runs.run_names import RUNS, short_names

    for name, meaning in short_names(find_runs(RUNS)):
        if name.startswith(incomplete):
            yield name, meaning


def _directories(incomplete: str) -> Iterator[tuple[str, str]]:
    above = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent).expanduser()
    begin = "" if incomplete.endswith("/") else Path(incomplete).name
    prefix = incomplete.removesuffix(begin)
    try:
        entries = sorted(above.iterdir())
    except OSError:
        return
    for path in entries:
        if path.name.startswith(begin) and (begin.startswith(".") or not path.name.startswith(".")) and path.is_dir():
            yield f"{prefix}{path.name}/", ""
