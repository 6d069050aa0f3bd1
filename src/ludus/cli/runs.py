"""`ludus runs`: what was trained, and how it went."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.errors import LudusError, NotFound

app = typer.Typer(help="List, inspect, compare and plot runs.", no_args_is_help=True)

Directories = Annotated[
    list[Path] | None, typer.Argument(help="Runs, or directories of runs. [default: runs]", show_default=False)
]


@app.command("list")
def list_runs(directories: Directories = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """A table of runs."""
    _print_table([_summary(run) for run in _found(directories)], as_json)


@app.command()
def compare(directories: Directories = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Runs side by side, best first, with the settings in which they differ."""
    runs = _found(directories)
    rows = [_summary(run) | settings for run, settings in zip(runs, _differences(runs), strict=True)]
    rows.sort(key=lambda row: (row["best"] is None, -(row["best"] or 0.0)))
    _print_table(rows, as_json)


@app.command()
def show(directory: Annotated[Path, typer.Argument(help="A run.")]) -> None:
    """One run in full: configuration, provenance, last numbers, checkpoints."""
    from ludus.experiment import checkpoint
    from ludus.experiment.run import Run
    from ludus.metrics import read_jsonl

    run = Run.open(directory)
    rows = read_jsonl(run.metrics_path)
    print((directory / "config.yaml").read_text(encoding="utf-8"))
    print(json.dumps({"meta": run.meta(), "last": rows[-1] if rows else None}, indent=1))
    print(json.dumps({"checkpoints": checkpoint.names(run.store), "best": checkpoint.best_name(run.store)}))


@app.command()
def plot(
    directories: Directories = None,
    out: Annotated[Path, typer.Option(help="The PNG.")] = Path("curves.png"),
    metric: Annotated[str, typer.Option(help="Any name in metrics.jsonl.")] = "episode_return_mean",
    over: Annotated[str, typer.Option(help="timesteps, iterations, episodes or time_s.")] = "timesteps",
) -> None:
    """Learning curves of several runs in one PNG."""
    from ludus.experiment.plot import plot as draw

    print(draw(_found(directories), out, metric, over))


def _found(directories: list[Path] | None) -> list[Path]:
    from ludus.experiment.run import find_runs

    asked = directories or [Path("runs")]
    runs = [run for directory in asked for run in find_runs(directory) if _readable(run)]
    if not runs:
        raise NotFound(f"No runs in {', '.join(map(str, asked))}.", "`ludus train CartPole-v1` makes one.")
    return runs


def _readable(run: Path) -> bool:
    from ludus.experiment.run import Run

    try:
        Run(run).config()
    except LudusError as error:
        print(f"left out: {error}", file=sys.stderr)
        return False
    return True


def _summary(run: Path) -> dict[str, Any]:
    from ludus.experiment.run import Run
    from ludus.metrics import read_jsonl

    opened = Run(run)
    config = opened.config()
    rows = read_jsonl(run / "metrics.jsonl")
    means = [row["episode_return_mean"] for row in rows if row.get("episode_return_mean") is not None]
    last = rows[-1] if rows else {}
    return {
        "run": str(run),
        "env": config["env"],
        "algorithm": config["run"],
        "status": opened.meta().get("status"),
        "timesteps": last.get("timesteps"),
        "return": means[-1] if means else None,
        "best": max(means) if means else None,
        "fps": last.get("fps"),
        "time_s": last.get("time_s"),
    }


def _differences(runs: list[Path]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs."""
    from ludus.experiment.run import Run

    flat = [_flat(Run(run).config().get("config", {})) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    differing = [key for key in keys if len({json.dumps(settings.get(key)) for settings in flat}) > 1]
    return [{key: settings.get(key) for key in differing} for settings in flat]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    names = [name for name in rows[0] if name != "run"] + ["run"]  # the longest last, where it may break
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        number = any(isinstance(row[name], (int, float)) for row in rows)
        table.add_column(name, no_wrap=name != "run", overflow="fold", justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    Console(width=10_000).print(table)  # never squeezed: a path that is cut cannot be copied


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return (
        f"{value:,.1f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )
