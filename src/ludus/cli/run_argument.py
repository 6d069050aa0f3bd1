"""A run as an argument: short names are resolved, and the shell completes them. Give both to `typer.Argument` or `typer.Option`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def run_place(value: str | None) -> str | None:
    """As `callback`: `last`, an experiment's name or the end of a run's name becomes the path of the run."""
    from ludus.experiments.runs.run_names import resolve_run

    return None if value is None else resolve_run(value)


def run_places(values: list[str] | None) -> list[str] | None:
    """The same for an argument that takes several. `NAME=RUN` and directories with runs stay what they are."""
    from ludus.experiments.runs.run_names import resolve_run

    if values is None:
        return None
    named = [("", "", value) if "://" in value else value.rpartition("=") for value in values]
    return [f"{name}{equals}{resolve_run(run)}" for name, equals, run in named]


def complete_run(incomplete: str) -> list[tuple[str, str]]:
    """As `autocompletion`: short names and directories."""
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
    shown = incomplete.removesuffix(begin)
    try:
        entries = sorted(above.iterdir())
    except OSError:
        return
    for path in entries:
        if path.name.startswith(begin) and (begin.startswith(".") or not path.name.startswith(".")) and path.is_dir():
            yield f"{shown}{path.name}/", ""
