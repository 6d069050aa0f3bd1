"""Writes a result with its commit, machine, seeds and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.train import RESULTS, provenance


def write_report(name: str, title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write bench/results/ground-truth-NAME.json with everything, and .md with the table of `columns`."""
    head = provenance()
    (RESULTS / f"ground-truth-{name}.json").write_text(json.dumps(head | more | {"rows": list(rows)}, indent=1) + "\n")
    lines = [f"# {title}", "", f"{head['date']}, commit {head['commit']}, {head['cpu']}", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    if note := more.get("note"):
        lines += ["", str(note)]
    text = "\n".join(lines) + "\n"
    (RESULTS / f"ground-truth-{name}.md").write_text(text)
    print(text, flush=True)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
