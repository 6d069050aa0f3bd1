"""Output that commands share: messages and tables."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.errors import LudusError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def notify(sentence: str) -> None:
    """Print a message to stderr, so that results on stdout stay parseable."""
    say(f"ludus: {sentence}", to_stderr=True)


def print_error(error: LudusError, name: str = "") -> None:
    """Print an error to stderr, with its traceback if the user asked for it. `name`: the experiment that it belongs to."""
    if is_debug():
        traceback.print_exception(error)
    notify(f"{name}: {error}" if name else str(error))


def is_debug() -> bool:
    return "--debug" in sys.argv or bool(os.environ.get("LUDUS_DEBUG"))


class Printer:
    """Prints messages for people: to stderr with --json, nothing with --quiet."""

    def __init__(self, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet, self.as_json = quiet, as_json

    def __call__(self, sentence: str) -> None:
        if not self.quiet:
            say(sentence, to_stderr=self.as_json)


def runnable(command: str) -> str:
    """The command to type on this machine: with its path if its directory is not on PATH."""
    if shutil.which(command):
        return command
    sibling = Path(sys.argv[0]).parent / command
    return str(sibling) if sibling.exists() else command


def make_console(**settings: Any) -> Console:
    """A console for tables. In a pipe nothing is truncated, so that ids and paths can be copied."""
    from rich.console import Console

    console = Console(**settings)
    return console if console.is_terminal else Console(width=10_000, soft_wrap=True, **settings)


def make_table(columns: Iterable[str], *, right: Collection[str] = (), wrapped: Collection[str] = (), **style: Any) -> Table:
    """A table without borders. `right`: columns aligned to the right; `wrapped`: columns that may have several lines."""
    from rich.table import Table

    table = Table(**{"box": None, "header_style": "bold", "pad_edge": False, **style})
    for name in columns:
        table.add_column(name, no_wrap=name not in wrapped, overflow="fold", justify="right" if name in right else "left")
    return table


def make_facts(facts: Mapping[str, str], state_style: str = "") -> Table:
    """A page of facts, one per line; empty ones are left out. `state_style`: colour of the fact `state`."""
    from rich.table import Table
    from rich.text import Text

    page = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value:
            page.add_row(name, Text(value, style=state_style if name == "state" else ""))
    return page
