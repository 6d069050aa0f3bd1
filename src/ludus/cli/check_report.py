"""The look of reports of checks: `ludus check-game` and `ludus check-env`."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.cli.output import make_table

COLOURS = {"ok": "green", "advice": "cyan", "warning": "yellow", "mistake": "bold red", "not checked": "dim"}


def finding_line(level: str, rule: str, seen: str, remedy: str) -> str:
    """One finding, printed when it is made."""
    return f"{level:<8} {rule}: {seen}\n         → {remedy}"


def print_rows(rows: Sequence[tuple[str, int, str, str]]) -> None:
    """A table of all checks: (state, number of findings, rule, remedy)."""
    from rich.console import Console
    from rich.text import Text

    table = make_table(("", "count", "check", "what to do"), right=("count",))
    for state, count, rule, remedy in rows:
        cells = (str(count), rule, remedy) if count else ("", rule, "")
        table.add_row(Text(state, style=COLOURS[state]), *map(Text, cells))
    print()
    Console(width=10_000).print(table)
