"""`ludus runs`: list, show, compare, plot, rename, tag and delete runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.common_options import Run
from ludus.cli.help import HelpApp
from ludus.cli.output import make_table
from ludus.cli.run_argument import complete_run
from ludus.core.formatting import format_duration, format_number
from ludus.errors import LudusError, NotFound

if TYPE_CHECKING:
    from ludus.experiments.runs.compare import Comparison, GroupScore

app = HelpApp(help="List, inspect, compare, plot, rename, tag and delete runs.", no_args_is_help=True)

Directories = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PLACE]...",
        help="Runs (also as last or the end of a name), experiments, or directories or URLs with runs. [default: runs]",
        autocompletion=complete_run,
    ),
]
Metric = Annotated[str, typer.Option(help="Metric of metrics.jsonl, e.g. evaluation/return_mean.")]
Over = Annotated[str, typer.Option(help="X axis: timesteps, iterations, episodes or time_s.")]
Smoothing = Annotated[float, typer.Option(help="Smoothing: 0 = none, 0.9 = over about ten points.")]
_ResultAsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
METRIC = "episode_return_mean"
EVALUATION = "evaluation/return_mean"
_ALL_PAIRS = 5
_OTHER_RETURNS = ("return", "best", "evaluation")
"""Columns that a comparison omits, because it shows the compared value."""

_TITLES = {
    "return": "training return",
    "best": "best training return",
    "evaluation": "evaluation return",
    "fps": "steps/s",
    "time_s": "time",
}


@app.command("list")
def list_runs(
    directories: Directories = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="List only runs with this tag.")] = None,
    as_json: _ResultAsJson = False,
) -> None:
    """List runs with their state, returns and speed."""
    rows = [_summary(run) for run in _find_runs(directories)]
    if tag is not None:
        rows = [row for row in rows if tag in row["tags"]]
        if not rows and not as_json:
            raise NotFound(f"No run has the tag {tag!r}.", "`ludus runs tag RUN TAG` adds a tag.")
    _print_table(rows, as_json)


@app.command()
def compare(
    directories: Directories = None,
    group_by: Annotated[
        str, typer.Option(metavar="KEY,…", help="Keys that define a group: name, env, lr …; auto: all settings but the seed.")
    ] = "auto",
    metric: Metric = METRIC,
    over: Over = "timesteps",
    at: Annotated[
        str,
        typer.Option(metavar="last|best|NUMBER", help="Value to compare: mean of the last tenth, the best, or at N timesteps."),
    ] = "last",
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Rank lower values first, as for a loss, cost or time.")
    ] = False,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("compare.png"),
    smoothing: Smoothing = 0.0,
    as_json: _ResultAsJson = False,
) -> None:
    """Compare runs: the settings that differ, and groups of seeds with mean, interval and whether the difference is significant."""
    from ludus.experiments.runs import compare as comparing
    from ludus.experiments.runs.plot import draw_panels, read_curves

    runs = _find_runs(directories)
    lowest = lower_is_better and metric == METRIC
    rows = [_summary(run, lowest) | settings for run, settings in zip(runs, _differences(runs, every=as_json), strict=True)]
    try:
        groups = comparing.group_runs(read_curves(runs, metric, over), group_by)
    except NotFound as error:  # no curves yet: list the runs without a comparison
        _print_comparison(_sort_best_first(rows, "best", lowest), None, [str(error)], None, as_json)
        return
    result = comparing.compare_groups(groups, at, lower_is_better=lower_is_better)
    compared = {run: value for standing in result.scores for run, value in standing.values.items()}
    column = f"{metric} ({at})"
    after = list(rows[0]).index("status") + 1
    for index, row in enumerate(rows):
        cells = list(row.items())
        rows[index] = dict([*cells[:after], (column, compared.get(row["run"])), *cells[after:]])
    rows = _sort_best_first(rows, column, lower_is_better)
    title = "" if all(len(g.curves) == 1 for g in groups) else "mean over seeds, 95 % interval (bootstrap)"
    envs = dict.fromkeys(g.env for g in groups)
    panels = {
        "; ".join(part for part in (env if len(envs) > 1 else "", title) if part): {
            g.label: g.curves for g in groups if g.env == env
        }
        for env in envs
    }
    picture = draw_panels(panels, out, metric, over, smoothing)
    notes = list(result.notes)
    if len(groups) == 1 and group_by == comparing.AUTO:
        notes.append("all runs have the same settings except for the seed; --group-by name compares experiments")
    if not as_json:
        print(f"Compared: {comparing.describe_values(metric, at)}.\n")
        rows = [{name: value for name, value in row.items() if name not in _OTHER_RETURNS} for row in rows]
    _print_comparison(rows, result, notes, picture, as_json)


@app.command()
def show(
    run: Run,
    full: Annotated[bool, typer.Option("--full", help="Print the whole configuration, metadata and last report too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print configuration, metadata, last report and checkpoints as JSON.")
    ] = False,
) -> None:
    """Show one run on a page: state, times, learning curves, checkpoints and changed settings."""
    import shutil
    import time

    from ludus.cli.evaluation.run_page import collect, page_lines
    from ludus.experiments.runs.remote_runs import directory_of, fetch

    directory = directory_of(run)
    fetch(directory)
    facts = collect(directory)
    dump = {
        "meta": facts.meta,
        "last": facts.rows[-1] if facts.rows else None,
        "checkpoints": facts.checkpoints,
        "best": facts.best.checkpoint if facts.best is not None else None,
    }
    if as_json:
        print(json.dumps({"run": facts.place, "config": facts.config, "changed": facts.changed, **dump}))
        return
    for line in page_lines(facts, time.time(), shutil.get_terminal_size((100, 24)).columns):
        print(line)
    if full:
        print()
        if facts.config:
            print((directory / "config.yaml").read_text(encoding="utf-8"))
        print(json.dumps(dump, indent=1))


@app.command()
def rename(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="New name of the run's directory, in the same experiment.")],
) -> None:
    """Rename the directory of a run that is not being trained."""
    from ludus.experiments.runs.run_edit import rename_run

    print(f"renamed: {rename_run(Path(run), name)}")


@app.command()
def tag(
    run: Run,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", "-r", metavar="TAG", help="Tags to remove.")] = None,
) -> None:
    """Add or remove tags of a run; `ludus runs list --tag TAG` selects by them. Without tags, print those of the run."""
    from ludus.experiments.runs.remote_runs import directory_of, display_path
    from ludus.experiments.runs.run_edit import tag_run

    directory = directory_of(run)
    print(f"{display_path(directory)}: {', '.join(tag_run(directory, tags or (), remove or ())) or 'no tags'}")


@app.command()
def delete(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Directories of runs, last, or the ends of names.", autocompletion=complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete runs with everything in their directories, after a prompt. A run that is being trained is refused."""
    from ludus.experiments.runs import run_edit
    from ludus.experiments.runs.run_names import resolve_one_run

    found = list(dict.fromkeys(Path(resolve_one_run(word)) for word in runs))
    for run in found:  # check all of them before the first is deleted
        run_edit.check_run_directory(run)
        run_edit.check_not_trained(run)
        sweep = run_edit.sweep_of(run)
        trial = "" if sweep is None else f", a trial of the sweep {sweep.name}"
        print(f"{run}  ({run_edit.size_bytes(run) / 1e6:,.1f} MB{trial})")
    if not yes:
        typer.confirm(f"Delete {'this run' if len(found) == 1 else f'these {len(found)} runs'}?", abort=True)
    for run in found:
        run_edit.delete_run(run)
        print(f"deleted: {run}")


@app.command()
def plot(
    directories: Directories = None,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("curves.png"),
    metric: Metric = METRIC,
    over: Over = "timesteps",
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,…", help="Group runs: auto (by settings, seeds together), name, env, lr … [default: no groups]"
        ),
    ] = None,
    smoothing: Smoothing = 0.0,
) -> None:
    """Plot learning curves of several runs, or of groups with mean and interval, to a PNG."""
    from ludus.experiments.runs import compare as comparing
    from ludus.experiments.runs import plot as plotting

    runs = _find_runs(directories)
    if group_by is None:
        print(plotting.plot(runs, out, metric, over, smoothing))
        return
    groups = comparing.group_runs(plotting.read_curves(runs, metric, over), group_by)
    print(plotting.draw({group.label: group.curves for group in groups}, out, metric, over, smoothing))


def _find_runs(directories: list[str] | None) -> list[Path]:
    from ludus.experiments.runs.run_dir import find_runs
    from ludus.experiments.runs.run_names import resolve_runs

    places = [resolve_runs(word) for word in directories or ["runs"]]
    found = dict.fromkeys(run for place in places for run in find_runs(place))  # without duplicates
    runs = [run for run in found if _is_readable(run)]
    if not runs:
        raise NotFound(f"No runs in {', '.join(places)}.", "`ludus train CartPole-v1` creates one.")
    return runs


def _is_readable(run: Path) -> bool:
    from ludus.experiments.runs.run_dir import Run, is_script

    try:
        return is_script(run) or bool(Run(run).config())
    except LudusError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return False


def _summary(run: Path, lowest: bool = False) -> dict[str, Any]:
    """The row of a run in `ludus runs list`. `lowest`: the best return is the lowest."""
    from ludus.core.metrics import read_jsonl
    from ludus.experiments.runs.compare import settings_of
    from ludus.experiments.runs.remote_runs import display_path
    from ludus.experiments.runs.run_dir import Run
    from ludus.experiments.runs.run_edit import tags_of
    from ludus.experiments.runs.run_status import read_status

    settings = settings_of(run)
    rows = read_jsonl(run / "metrics.jsonl")
    means = [float(row["episode_return_mean"]) for row in rows if row.get("episode_return_mean") is not None]
    last = next((row for row in reversed(rows) if "time_s" in row), rows[-1] if rows else {})  # rows of evaluations have no time
    return {
        "run": display_path(run),
        "env": settings["env"],
        "algorithm": settings["run"],
        "status": read_status(run, fetched=True).state,
        "timesteps": last.get("timesteps"),
        "return": means[-1] if means else None,
        "best": (min if lowest else max)(means, default=None),
        "evaluation": next((float(row[EVALUATION]) for row in reversed(rows) if row.get(EVALUATION) is not None), None),
        "fps": last.get("fps"),
        "time_s": last.get("time_s"),
        "tags": tags_of(Run(run)),
    }


def _sort_best_first(rows: list[dict[str, Any]], column: str, lower_is_better: bool = False) -> list[dict[str, Any]]:
    sign = 1.0 if lower_is_better else -1.0
    return sorted(rows, key=lambda row: (row[column] is None, sign * (row[column] or 0.0)))


def _differences(runs: list[Path], every: bool) -> list[dict[str, Any]]:
    """The settings in which runs differ: `every` one, or those that define an experiment and differ between comparable runs.

    Comparable runs have the same environment and algorithm; other algorithms have other keys.
    """
    from ludus.experiments.runs.compare import EXECUTION, differing_keys, read_all_settings

    settings = read_all_settings(runs)
    kinds: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for one in settings:
        kinds.setdefault((one["env"], one["run"]), []).append(one)
    within = dict.fromkeys(key for alike in kinds.values() for key in differing_keys(alike) if key not in EXECUTION)
    keys = [key for key in (differing_keys(settings) if every else within) if key.startswith("config.")]
    return [{key.removeprefix("config."): one.get(key) for key in keys} for one in settings]


def _print_comparison(
    rows: list[dict[str, Any]], result: Comparison | None, notes: list[str], picture: Path | None, as_json: bool
) -> None:
    if as_json:
        judged = {"groups": [], "differences": []} if result is None else result.to_json()
        print(json.dumps({"runs": rows, **judged, "notes": notes, "picture": None if picture is None else str(picture)}))
        return
    _print_table(rows, as_json=False)
    if result is not None:
        print()
        _print_table([_group_row(s) for s in result.scores], as_json=False)
        print()
        best = {verdict.a: None for verdict in result.differences if verdict.a not in {other.b for other in result.differences}}
        few = len(result.scores) <= _ALL_PAIRS
        for verdict in result.differences:
            if few or verdict.a in best:
                print(verdict.sentence)
        if not few:
            print(f"({len(result.differences)} comparisons, corrected for multiple testing; --json prints all of them)")
    for note in notes:
        print(f"note: {note}")
    if picture is not None:
        print(f"written: {picture}")


def _group_row(score: GroupScore) -> dict[str, Any]:
    numbers = {"mean": score.mean, "95 %: from": score.low, "to": score.high, "std": score.std}
    finite = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    return {"group": score.label, "n": score.n, **finite}


def _print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console

    names = [name for name in rows[0] if name != "tags" or any(row[name] for row in rows)]
    if "run" in names:
        names = [*(name for name in names if name != "run"), "run"]  # the longest column last
    numbers = [_title(name) for name in names if any(isinstance(row[name], (int, float)) for row in rows)]
    table = make_table(map(_title, names), right=numbers, wrapped=("run",))
    for row in rows:
        table.add_row(*(format_duration(row[name]) if name == "time_s" else _cell(row[name]) for name in names))
    Console(width=10_000).print(table)  # never truncated, so that paths can be copied


def _title(name: str) -> str:
    """`training return (last)` for `episode_return_mean (last)`."""
    known = {METRIC: _TITLES["return"], EVALUATION: _TITLES["evaluation"], **_TITLES}
    return next(
        (title + name.removeprefix(key) for key, title in known.items() if name == key or name.startswith(f"{key} (")), name
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    if value is None:
        return "–"
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
