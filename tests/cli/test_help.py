"""Help pages of all commands, as snapshots at 100 columns. `python -m tests.cli.test_help` writes them anew."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer.main

from ludus.cli.main import app

SNAPSHOTS = Path(__file__).with_name("help")
SCREEN = 50
"""Lines of a screen; `ludus train --help` fits two of them."""


def command_paths() -> list[tuple[str, ...]]:
    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        for name, each in getattr(command, "commands", {}).items():
            yield from below(each, (*path, name))

    return list(below(typer.main.get_command(app), ()))


def help_page(*words: str) -> str:
    """What a terminal of 100 columns without colours shows."""
    out = io.StringIO()
    variables = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    with patch.dict(os.environ, variables), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        typer.main.get_command(app).main(list(words), prog_name="ludus")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() + "\n"


def snapshot(path: tuple[str, ...]) -> Path:
    return SNAPSHOTS / f"{'-'.join(('ludus', *path))}.txt"


@pytest.mark.parametrize("path", command_paths(), ids=" ".join)
def test_a_help_page_matches_its_snapshot(path: tuple[str, ...]) -> None:
    assert help_page(*path, "--help") == snapshot(path).read_text(encoding="utf-8"), "python -m tests.cli.test_help"


def test_every_snapshot_belongs_to_a_command() -> None:
    assert {file.name for file in SNAPSHOTS.iterdir()} == {snapshot(path).name for path in command_paths()}


def test_the_help_page_of_train_fits_two_screens() -> None:
    assert len(help_page("train", "--help").splitlines()) <= 2 * SCREEN


def test_commands_are_grouped() -> None:
    page = help_page("--help")
    titles = ["Train and evaluate", "Serve and export", "Clusters", "Games", "Tools"]
    assert [page.index(title) for title in titles] == sorted(page.index(title) for title in titles)
    assert "╭─ Commands" not in page


def test_options_for_other_systems_are_shown_on_request() -> None:
    short, full = help_page("train", "--help"), help_page("train", "--help-all")
    for option in ("--queue-trials", "--apply_stop_condition"):
        assert option not in short
        assert option in full
    assert "Compatibility with RLlib and Coach" in full


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.iterdir():
        old.unlink()
    for each in command_paths():
        snapshot(each).write_text(help_page(*each, "--help"), encoding="utf-8")
