"""The metrics of a run as a table: a pandas.DataFrame if pandas is installed, else a `HistoryTable`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ludus.core.metrics import read_jsonl

_SHOWN_ROWS = 20
_SHOWN_COLUMNS = 8
_FIRST = ("timesteps", "iterations", "episodes", "time_s", "fps", "episode_return_mean")


class HistoryLike(Protocol):
    """The common interface of both kinds of table."""

    @property
    def columns(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, column: str, /) -> Any: ...


class HistoryTable:
    """Reports in rows. `table["timesteps"]` is a column as a list, with nan for missing values; iterating gives rows as dicts."""

    def __init__(self, rows: Sequence[dict[str, float]]) -> None:
        self.rows = list(rows)
        self.columns = column_names(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.rows)

    def __getitem__(self, column: str, /) -> list[float]:
        if column not in self.columns:
            raise KeyError(f"{column!r}; the columns are {', '.join(self.columns)}")
        return [row.get(column, math.nan) for row in self.rows]

    def __repr__(self) -> str:
        columns = self.columns[:_SHOWN_COLUMNS]
        lines = ["  ".join(f"{name:>14}" for name in columns)]
        lines += ["  ".join(f"{row.get(name, math.nan):14.6g}" for name in columns) for row in self.rows[-_SHOWN_ROWS:]]
        return "\n".join([*lines, f"{len(self)} rows × {len(self.columns)} columns"])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def column_names(rows: Sequence[dict[str, float]]) -> list[str]:
    """All columns: the counters first, the others by name."""
    names = {name for row in rows for name in row}
    return [name for name in _FIRST if name in names] + sorted(names - set(_FIRST))


def read_history(metrics_file: Path) -> HistoryLike:
    """One row per reported iteration; evaluations are in the row of their iteration."""
    rows = [
        {name: math.nan if value is None else value for name, value in row.items() if name != "incarnation"}
        for row in read_jsonl(metrics_file)
    ]
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore] # not installed everywhere, and slow to import
    except ImportError:
        return HistoryTable(rows)
    table: HistoryLike = pd.DataFrame(rows, columns=column_names(rows))
    return table
