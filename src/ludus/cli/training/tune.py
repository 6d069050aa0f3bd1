"""`ludus tune`: run many trials of an experiment and print a table of their results."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.help import option_in
from ludus.cli.output import Printer, say
from ludus.cli.training import options as o
from ludus.core.formatting import format_number
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.cli.training.train import ExperimentRunner
    from ludus.experiments.runs.job_resume import JobResumeFile
    from ludus.tuning.messages import TrialEvent
    from ludus.tuning.report import SweepResult

_REDRAW_S = 0.2
_LINE_EVERY_S = 10.0
_ROWS = 40
_TITLES = {"episode_return_mean": "return", "evaluation/return_mean": "evaluated"}
_STATES = {"failed": "failed", "running": "running", "again": "starting again"}
"""State of a trial → its name in the summary of a sweep."""


_sweep = option_in("Sweep")


def tune(
    env: o.Env = None,
    file: o.File = None,
    preset: o.Preset = None,
    level: o.Level = None,
    experiment: o.OneExperiment = None,
    env_option: o.EnvOption = None,
    run: o.Algorithm = None,
    stop: o.Stop = None,
    num_samples: o.NumSamples = None,
    num_workers: o.NumWorkers = None,
    num_gpus: o.NumGpus = None,
    seed: o.Seed = None,
    config: o.Config = None,
    set_: o.Set = None,
    scheduler: Annotated[str | None, _sweep(help="Trial scheduler; same as tune.scheduler.", metavar="asha|pbt")] = None,
    metric: Annotated[str | None, _sweep(help="Metric to optimise; same as tune.metric.")] = None,
    mode: Annotated[str | None, _sweep(help="Direction of the metric; same as tune.mode.", metavar="max|min")] = None,
    max_concurrent: Annotated[int | None, _sweep(help="Trials to run at once. Default: as many as fit.", min=1)] = None,
    max_failures: Annotated[int | None, _sweep(help="Retries of a failed trial.", min=0)] = None,
    checkpoint_freq: o.CheckpointFreq = None,
    keep_checkpoints_num: o.KeepCheckpoints = None,
    resume: Annotated[Path | None, _sweep(help="Resume the sweep in this directory.", metavar="DIR")] = None,
    retry_failed: Annotated[bool, _sweep("--retry-failed", help="Rerun failed trials as well, with --resume.")] = False,
    experiment_name: Annotated[
        str | None, o.output_option("--name", "--experiment-name", help="Name of the sweep and its directory. Default: default.")
    ] = None,
    local_dir: Annotated[Path, o.output_option(help="Directory for sweeps.")] = Path("runs"),
    trust: o.Trust = False,
    quiet: o.Quiet = False,
    json_: o.Json = False,
    debug: o.Debug = False,
    address: Annotated[
        str | None,
        o.ray_option(
            "--address",
            "--ray-address",
            metavar="HOST:PORT|auto",
            help="Ray cluster to run trials on. Default: one started here for the sweep. [RAY_ADDRESS, ip_head]",
        ),
    ] = None,
    ray_num_cpus: o.RayNumCpus = None,
    ray_object_store_memory: o.RayMemory = None,
) -> None:
    """Sweep over seeds and hyper-parameters; Ctrl-C saves all trials, --resume continues."""
    from ludus.cli.training.train import (
        ExperimentOptions,
        experiments_from,
        job_note,
        log_at,
        parse_mapping,
        parse_workers,
        read_source,
    )
    from ludus.config.overrides import parse_stop_values

    log_at(2 if debug else 0)
    runner = SweepRunner(Printer(quiet, json_), local_dir, (address, ray_num_cpus, ray_object_store_memory), max_concurrent)
    runner.note = job_note(runner.printer)
    top = {
        "env": env or env_option, "run": run, "num_samples": num_samples, "max_failures": max_failures,
        "checkpoint_freq": checkpoint_freq, "keep_checkpoints_num": keep_checkpoints_num,
    }  # fmt: skip
    section = {"scheduler": scheduler, "metric": metric, "mode": mode}
    settings = {"num_workers": parse_workers(num_workers, None), "num_gpus": num_gpus, "seed": seed}
    if resume is not None:
        others: dict[str, Any] = {
            "-f": file, "-p": preset, "-lvl": level, "--experiment": experiment, "--stop": stop, "--set": set_, "--config": config,
            "--name": experiment_name,
        }  # fmt: skip
        others |= {"--" + name.replace("_", "-"): value for name, value in (top | section | settings).items()}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise UsageError(f"--resume keeps the settings of the sweep; {', '.join(given)} cannot be changed.")
        runner.resume(resume, retry_failed)
        return
    if retry_failed:
        raise UsageError("--retry-failed needs a sweep with failed trials.", "Add --resume DIR.")
    source = read_source(file, preset, level)
    if source is not None:
        from ludus.models.custom.loader import add_search_directory

        add_search_directory(source.parent)
    stops = parse_stop_values(stop or [])
    options = ExperimentOptions(
        config=parse_mapping("--config", config), top=top, stop=stops, settings=settings, assignments=set_ or ()
    )
    found = experiments_from(source, options, experiment=experiment, name=experiment_name)
    for data in found.values():
        chosen = {name: value for name, value in section.items() if value is not None}
        if chosen:
            data["tune"] = {**(data.get("tune") or {}), **chosen}
    from ludus.cli.training.config_check import require_no_complaints

    require_no_complaints(found, source.file if source is not None else None)
    runner.run(found)


def sweep(
    experiments: Mapping[str, Mapping[str, Any]], experiments_runner: ExperimentRunner, resources: Mapping[str, Any]
) -> None:
    """Run sweeps for `ludus train`, whose experiments have several trials."""
    runner = SweepRunner(
        experiments_runner.printer,
        Path(experiments_runner.local_dir),
        experiments_runner.ray,
        note=experiments_runner.note,
    )
    data = {name: dict(given) for name, given in experiments.items()}
    unknown = [key for key in resources if key not in ("cpu", "gpu")]
    if unknown:
        raise UsageError(f"--resources-per-trial has unknown keys: {', '.join(unknown)}.", "Use cpu and gpu.")
    for given in data.values():
        if "cpu" in resources:
            given["tune"] = {**(given.get("tune") or {}), "cpus_per_trial": resources["cpu"]}
        if "gpu" in resources:
            given["config"] = {**(given.get("config") or {}), "num_gpus": resources["gpu"]}
    if experiments_runner.newest:
        from ludus.tuning.sweep import STATE

        for name in list(data):
            directory = Path(experiments_runner.local_dir) / name
            if (directory / STATE).exists():
                runner.resume(directory, retry_failed=False)
                del data[name]
    if data:
        runner.run(data)


@dataclass
class SweepRunner:
    """Runs sweeps and prints their progress and results."""

    printer: Printer
    local_dir: Path
    ray: tuple[str | None, int | None, int | None]
    max_concurrent: int | None = None
    note: JobResumeFile | None = None

    def run(self, experiments: Mapping[str, Mapping[str, Any]]) -> None:
        """Run sweeps. Those that a previous start of this job created are resumed first."""
        from ludus.tuning.sweep import resume_sweeps, run_sweep

        begun = self._find_in_note(experiments)
        new = {name: data for name, data in experiments.items() if name not in begun}
        results: list[SweepResult] = []
        with SweepDisplay(quiet=self.printer.quiet, to_stderr=self.printer.as_json) as display:
            options = self._options(display)
            if begun:
                self.printer(f"this job ran before: resuming {', '.join(map(str, begun.values()))}")
                results = resume_sweeps(list(begun.values()), options)
            if new and not any(result.interrupted for result in results):
                results += run_sweep(new, options)
        self._conclude(results)

    def _find_in_note(self, experiments: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
        from ludus.tuning.sweep import STATE

        found = dict[str, Path]()
        for name in experiments:
            place = self.note.location(name) if self.note is not None else None
            if self.note is not None and place is not None:
                if (Path(place) / STATE).exists():
                    found[name] = Path(place)
                else:
                    self.printer(f"{place}, named in {self.note.path}, holds no sweep: starting a new one")
        return found

    def _write_note(self, name: str, directory: Path) -> None:
        if self.note is not None and (trouble := self.note.write(name, str(directory.absolute()))):
            self.printer(f"if this job is restarted, it will not resume: {self.note.path} cannot be written: {trouble}")

    def resume(self, directory: Path, retry_failed: bool) -> None:
        from ludus.tuning.sweep import resume_sweep

        with SweepDisplay(quiet=self.printer.quiet, to_stderr=self.printer.as_json) as display:
            result = resume_sweep(directory, self._options(display, retry_failed))
        self._conclude([result])

    def _options(self, display: SweepDisplay, retry_failed: bool = False) -> Any:
        from ludus.experiments.resolve import cluster_of
        from ludus.ray_cluster.cluster import LOCAL
        from ludus.tuning.sweep import SweepOptions

        address, cpus, memory = self.ray
        named = cluster_of(address)
        cluster = cluster_of(named.address if named is not None else LOCAL, cpus, memory)
        return SweepOptions(
            self.local_dir,
            cluster,
            self.max_concurrent,
            retry_failed,
            self.printer,
            display.on_event,
            self._write_note,
            display.begin,
        )

    def _conclude(self, results: Sequence[SweepResult]) -> None:
        for result in results if not self.printer.quiet else ():
            _print_table(result, to_stderr=self.printer.as_json)
        if self.printer.as_json:
            summaries = [_as_json(result) for result in results]
            print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, default=str), flush=True)
        if any(result.interrupted for result in results):
            self.printer(f"resume     ludus tune --resume {next(r.directory for r in results if r.interrupted)}")
            raise typer.Exit(130)
        failed = [row for result in results for row in result.failed]
        for row in failed:
            print(f"ludus: {row['trial']} failed: {row['error'] or 'see ' + row['run_dir'] + '/logs'}", file=sys.stderr)
        if failed and len(failed) == sum(len(result.results) for result in results):
            raise typer.Exit(1)


def _as_json(result: SweepResult) -> dict[str, Any]:
    best = result.best
    return {
        "name": result.name,
        "directory": str(result.directory),
        "metric": result.metric,
        "best": best["trial"] if best else None,
        "best_run": best["run_dir"] if best else None,
        "settings": result.settings,
        "interrupted": result.interrupted,
        "startup_s": round(result.startup_s, 3),
        "wall_s": round(result.wall_s, 3),
        "trials": result.results,
    }


def _print_table(result: SweepResult, *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ludus.config.search_space import format_value

    console = Console(file=sys.stderr if to_stderr else sys.stdout, soft_wrap=False)
    names = list(dict.fromkeys(name for row in result.results for name in row["settings"]))
    table = Table(title=f"{result.name}: {len(result.results)} trials", title_justify="left", header_style="bold")
    table.add_column("trial", overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    repeated = any(row["value_n"] > 1 for row in result.results)
    for name in (_TITLES.get(result.metric, result.metric), *(["mean (seeds)"] if repeated else []), "steps", "time", "status"):
        table.add_column(name, justify="right")
    for number, row in enumerate(result.results[:_ROWS]):
        settings = [format_value(row["settings"].get(name, "")) for name in names]
        values = [_value(row["value"])]
        if repeated:
            values.append("–" if row["value_mean"] is None else f"{_value(row['value_mean'])} ({row['value_n']})")
        cells = [row["trial"].split("_")[0], *settings, *values, f"{row['timesteps']:,}", f"{row['time_s']:.1f} s", row["status"]]
        table.add_row(*cells, style="green" if number == 0 and result.best is row else None)
    if len(result.results) > _ROWS:
        table.caption = f"… and {len(result.results) - _ROWS} more in results.csv"
    console.print(table)
    if result.best is not None:
        say(f"best       {result.best['run_dir']}", to_stderr=to_stderr)
        say(f"train it   ludus train -f {result.directory / 'best.yaml'}", to_stderr=to_stderr)
    say(f"results    {result.directory}  (results.csv, results.json, sweep.png)", to_stderr=to_stderr)
    say(f"{result.wall_s:.1f} s, and {result.startup_s:.1f} s to start Ray", to_stderr=to_stderr)


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


class SweepDisplay:
    """Shows the progress of trials: a table on a terminal, a line every few seconds elsewhere."""

    def __init__(self, *, quiet: bool, to_stderr: bool) -> None:
        self._quiet, self._stream = quiet, sys.stderr if to_stderr else sys.stdout
        self._trials: dict[str, tuple[str, Mapping[str, float]]] = {}
        self._done_before = self._total = 0
        self._live: Any = None
        self._drawn = 0.0

    def __enter__(self) -> SweepDisplay:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def begin(self, done: int, total: int) -> None:
        """Start the display of a sweep with `total` trials, of which `done` ended before; clears the previous sweep."""
        self._trials, self._done_before, self._total = {}, done, total
        if not self._quiet and self._stream.isatty():  # the first trial takes a while to start
            self._draw(True)

    def on_event(self, event: TrialEvent) -> None:
        before = self._trials.get(event.name, ("", {}))[1]
        word = {"started": "running", "reported": "running", "retried": "again"}.get(event.kind, event.kind)
        self._trials[event.name] = (word, {**before, **event.numbers})
        if self._quiet:
            return
        if event.kind == "retried":
            self._line(f"{event.name} failed and is retried: {event.error}")
        if self._stream.isatty():
            self._draw(event.kind != "reported")
        elif event.kind in ("ended", "failed"):
            error = f": {event.error}" if event.error else ""
            self._line(f"{event.name} {event.kind}{error}  {self._numbers(event.name)}  ({self._progress()})")
        elif time.monotonic() > self._drawn + _LINE_EVERY_S:
            self._line(self._summary())

    def _line(self, text: str) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            self._live.console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def _draw(self, at_once: bool) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)
            self._live.start()
        if at_once or time.monotonic() > self._drawn + _REDRAW_S:
            self._drawn = time.monotonic()
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        order = sorted(self._trials, key=lambda name: (self._trials[name][0] not in ("running", "again"), name))
        for name in order[:_ROWS]:
            table.add_row(name, self._trials[name][0], self._numbers(name))
        return Group(table, Text(self._summary()))

    def _numbers(self, name: str) -> str:
        numbers = self._trials[name][1]
        mean = numbers.get("episode_return_mean", math.nan)
        return f"{int(numbers.get('timesteps', 0)):>10,} steps  return {format_number(mean)}"

    def _progress(self) -> str:
        done = self._done_before + sum(word in ("ended", "failed") for word, _ in self._trials.values())
        return f"{done} of {self._total} trials done"

    def _summary(self) -> str:
        words = Counter(word for word, _ in self._trials.values())
        others = [f"{words[word]} {name}" for word, name in _STATES.items() if words[word]]
        return ", ".join((self._progress(), *others))
