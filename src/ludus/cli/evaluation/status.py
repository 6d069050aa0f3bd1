"""`ludus status RUN`: print the current state of a run, from its files alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.common_options import Run
from ludus.cli.output import make_console, make_facts, make_table
from ludus.core.formatting import format_duration, format_number, pluralize

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ludus.experiments.runs.run_status import RunStatus

_WATCH_S, _WATCH_REMOTE_S = 1.0, 5.0  # a run on a store uploads its status at most this often
_ACTIVE = ("running", "starting", "restarting")
_COLOURS = {"running": "green", "finished": "green", "starting": "yellow", "restarting": "yellow", "interrupted": "yellow"}


def status(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one line of JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every second (every 5 s on a remote store) until the run has ended.")
    ] = False,
) -> None:
    """Show the state of a run, its workers and what limits its speed."""
    from ludus.experiments.runs.run_status import read_status

    current = read_status(run)
    if as_json:
        print(json.dumps(current.to_json()), flush=True)
        while watch and current.state in _ACTIVE:
            current = _wait_and_read(run)
            print(json.dumps(current.to_json()), flush=True)
        return
    _show(run, current, watch=watch)


def _show(run: str, current: RunStatus, *, watch: bool) -> None:
    from rich.live import Live

    console = make_console()
    if watch and console.is_terminal:
        with Live(page(current), console=console, auto_refresh=False) as live:
            while current.state in _ACTIVE:
                current = _wait_and_read(run)
                live.update(page(current), refresh=True)
        return
    console.print(page(current))
    while watch and current.state in _ACTIVE:
        current = _wait_and_read(run)
        console.print(page(current))


def _wait_and_read(run: str) -> RunStatus:
    from ludus.experiments.runs.remote_runs import directory_of, is_remote
    from ludus.experiments.runs.run_status import read_status

    time.sleep(_WATCH_REMOTE_S if is_remote(directory_of(run)) else _WATCH_S)
    return read_status(run)


def page(current: RunStatus) -> RenderableType:
    """The status as a table of facts and a table of workers."""
    from rich.console import Group

    from ludus.experiments.runs.remote_runs import display_path

    facts = {"run": display_path(current.run), "state": current.sentence, **dict(_facts(current))}
    parts: list[RenderableType] = [make_facts(facts, _COLOURS.get(current.state, "red"))]
    sampling = current.status.get("sampling") or {}
    if current.state in _ACTIVE and sampling.get("workers"):
        parts += ["", _workers(sampling["workers"])]
    return Group(*parts)


def _facts(current: RunStatus) -> Iterable[tuple[str, str]]:
    from ludus.experiments.runs.run_status import summarize_load

    known, progress = current.status, current.status.get("progress") or {}
    numbers = {name: value for name, value in (known.get("numbers") or {}).items() if isinstance(value, (int, float))}
    if progress:
        mean = progress.get("episode_return_mean")
        result = "no episode has ended" if mean is None else f"mean return {format_number(mean)}"
        speed = f", {progress['fps']:,.0f} steps/s" if progress.get("fps") else ""
        steps, took = f"{progress.get('timesteps', 0):,.0f} steps", format_duration(progress.get("time_s", 0.0))
        yield "progress", f"{steps} in {took}{speed}, {result}"
    if known.get("env"):
        yield "training", f"{known.get('algorithm', '')} on {known['env']}".strip()
    if known.get("checkpoint"):
        yield "checkpoint", str(known["checkpoint"])
    if current.state in _ACTIVE:
        nodes = (known.get("sampling") or {}).get("nodes") or []
        if len(nodes) > 1:
            yield "nodes", ", ".join(f"{node.get('name')} ({pluralize(node.get('cores', 0), 'core')})" for node in nodes)
        if parts := summarize_load(numbers):
            yield "parts", parts
        if "memory/waiting" in numbers:
            yield "queue", f"{numbers['memory/waiting']:,.0f} segments wait for the learner"
        if known.get("bottleneck"):
            yield "limit", str(known["bottleneck"])
    if restarts := current.meta.get("learner_restarts"):
        last = (current.meta.get("learner_failures") or [{}])[-1]
        why = f", the last time at {last['at']}: {last.get('why', '')}" if last.get("at") else ""
        yield "learner", f"restarted {restarts}×{why}"


_COLUMNS = (
    ("worker", "worker", "{}"),  # a number, or the name of a worker of a fleet
    ("node", "node", "{}"),
    ("state", "state", "{}"),
    ("pid", "pid", "{:.0f}"),
    ("fps", "steps/s", "{:,.0f}"),
    ("env_share", "environment", "{:.0%}"),
    ("policy_share", "policy", "{:.0%}"),
    ("blocked_share", "blocked", "{:.0%}"),
    ("weights_wait_share", "waits for weights", "{:.0%}"),
    ("restarts", "restarts", "{:.0f}"),
    ("error", "last error", "{}"),
)


def _workers(workers: Iterable[Mapping[str, Any]]) -> RenderableType:
    from rich.text import Text

    numbers = [title for _, title, form in _COLUMNS if form != "{}"]
    table = make_table((title for _, title, _ in _COLUMNS), right=numbers, wrapped=("last error",))
    for worker in workers:
        cells = [form.format(worker[key]) if worker.get(key) is not None else "–" for key, _, form in _COLUMNS]
        table.add_row(*(Text(cell) for cell in cells))
    return table
