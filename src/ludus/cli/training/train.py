"""`ludus train`: train an agent on an environment or from a YAML file."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ludus.cli.help import HelpCommand
from ludus.cli.output import Printer, print_error, runnable
from ludus.cli.training import coach_options, presets
from ludus.cli.training import options as o
from ludus.errors import LudusError, UsageError
from ludus.experiments.source.experiment_source import ExperimentOptions as ExperimentOptions
from ludus.experiments.source.experiment_source import Experiments, ExperimentSource
from ludus.experiments.source.experiment_source import experiments_from as experiments_from
from ludus.experiments.source.experiment_source import read_source as read_source

if TYPE_CHECKING:
    from ludus.experiments.resolve import ClusterOptions
    from ludus.experiments.result import Result
    from ludus.experiments.runs.job_resume import JobResumeFile

NEWEST = "newest"
"""Value of --resume when no run follows it."""


class TrainCommand(HelpCommand):
    """Accepts `--resume` without a value, and stores the command line, so that notices quote the options as they were typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[coach_options.WORDS] = [word.partition("=")[0] for word in args]
        return super().parse_args(ctx, add_resume_value(args))


def add_resume_value(words: Sequence[str]) -> list[str]:
    """The command line with the value NEWEST after each `--resume` that has none."""
    out: list[str] = []
    for at, word in enumerate(words):
        alone = word == "--resume" and (at + 1 == len(words) or words[at + 1].startswith("-"))
        out += ["--resume", NEWEST] if alone else [word]
    return out


def train(
    ctx: typer.Context,
    env: o.Env = None,
    file: o.File = None,
    preset: o.Preset = None,
    level: o.Level = None,
    experiment: o.OneExperiment = None,
    env_option: o.EnvOption = None,
    run: o.Algorithm = None,
    stop: o.Stop = None,
    num_envs: o.NumEnvs = None,
    num_workers: o.NumWorkers = None,
    num_cpus: o.NumCpus = None,
    num_gpus: o.NumGpus = None,
    num_learners: o.NumLearners = None,
    num_samples: o.NumSamples = None,
    seed: o.Seed = None,
    config: o.Config = None,
    set_: o.Set = None,
    custom_parameter: o.CustomParameter = None,
    temp_dir: o.TempDir = None,
    checkpoint_freq: o.CheckpointFreq = None,
    checkpoint_at_end: o.CheckpointAtEnd = None,
    keep_checkpoints_num: o.KeepCheckpoints = None,
    resume: o.Resume = None,
    restore: o.Restore = None,
    trust: o.Trust = False,
    local_mode: o.LocalMode = False,
    experiment_name: o.ExperimentName = None,
    local_dir: o.LocalDir = "runs",
    project: o.Project = None,
    trial: o.Trial = None,
    track: o.Track = None,
    quiet: o.Quiet = False,
    json_: o.Json = False,
    verbose: o.Verbose = 0,
    debug: o.Debug = False,
    distributed: o.Distributed = False,
    distributed_config: o.DistributedConfig = None,
    address: o.Address = None,
    ray_num_cpus: o.RayNumCpus = None,
    ray_num_gpus: o.RayNumGpus = None,
    ray_num_nodes: o.RayNumNodes = None,
    ray_object_store_memory: o.RayMemory = None,
    checkpoint_score_attr: o.ScoreAttr = None,
    upload_dir: o.UploadDir = None,
    resources_per_trial: o.ResourcesPerTrial = None,
    redis_password: o.RedisPassword = None,
    queue_trials: o.QueueTrials = False,
    torch: o.Torch = False,
    eager: o.Eager = False,
    trace: o.Trace = False,
    no_ray_ui: o.NoRayUi = False,
    save_secs: o.SaveSecs = None,
    until_solved: o.UntilSolved = False,
    use_cpu: o.UseCpu = False,
    evaluation_worker: o.EvaluationWorker = False,
    list_: o.ListPresets = False,
    noted: o.Ignored = False,
    refused: o.Unsupported = False,
) -> None:
    """Train an agent; Ctrl-C saves a checkpoint and stops."""
    log_at(2 if debug else verbose)
    printer = Printer(quiet, json_)
    ignored = {"--queue-trials": queue_trials, "--torch": torch, "--eager": eager, "--trace": trace, "--no-ray-ui": no_ray_ui}
    ignored |= {"--redis-password": redis_password is not None, "--ray-num-gpus": ray_num_gpus is not None}
    for option in (name for name, is_given in ignored.items() if is_given):
        printer(f"{option} changes nothing: {_WHY_IGNORED[option]}.")
    if list_:
        presets.list_presets(json_)
        return
    for notice in coach_options.notices(ctx.meta.get(coach_options.WORDS, ())) if noted or refused else ():
        printer(notice)
    _check_unsupported(ray_num_nodes, upload_dir, checkpoint_score_attr)
    _use_temp_dir(temp_dir)
    note = job_note(printer)

    from ludus.config.overrides import parse_stop_values

    stops = parse_stop_values(stop or [])
    workers = parse_workers(num_workers, num_cpus)
    coach = coach_options.CoachOverrides(save_secs, until_solved, use_cpu, evaluation_worker)
    own = {"num_envs_per_worker": num_envs, "num_learners": num_learners, "num_gpus": num_gpus, "seed": seed}
    settings = own | {"num_workers": workers} | ({"num_workers": 0, "num_learners": 0} if local_mode else {})
    top = {
        "run": run, "num_samples": num_samples, "checkpoint_freq": checkpoint_freq, "checkpoint_at_end": checkpoint_at_end,
        "keep_checkpoints_num": keep_checkpoints_num,
    }  # fmt: skip
    ray = (None if local_mode else address, ray_num_cpus, ray_object_store_memory)
    changing = {
        "--set": set_, "--config": config, "--track": track, "--num-cpus": num_cpus, "--num-workers": num_workers,
        "-lvl": level, "-cp": custom_parameter, "--num-envs": num_envs,
    } | {f"--{key.replace('_', '-')}": value for key, value in (top | own).items() if key != "num_envs_per_worker"} | coach.options()  # fmt: skip
    if resume is not None and resume != NEWEST and not distributed:
        given = {
            "ENV": env or env_option, "-f": file, "-p": preset, "--restore": restore, "--project": project, "--trial": trial,
        } | changing  # fmt: skip
        _resume_one(resume, given, stops, ExperimentRunner(printer, ray, note=note))
        return
    if resume == NEWEST and restore is not None:
        raise UsageError(f"--resume resumes a run, and --restore {restore} starts a new one.", "Keep one.")
    named = choose_environment(env, env_option, level if preset is None and file is None else None)
    top["env"] = named
    source = read_source(file, preset, level or (named if preset is not None else None))
    changes = [*(f"track.{name}={'true' if name == 'csv' else '{}'}" for name in track or []), *coach.overrides()]
    options = ExperimentOptions(
        config=parse_mapping("--config", config), top=top, stop=stops, settings=settings,
        custom=custom_parameter or (), assignments=[*changes, *(set_ or [])],
    )  # fmt: skip
    say = Printer(quiet=True, as_json=json_) if distributed else printer  # the learner prints the notices
    found = experiments_from(source, options, experiment=experiment, name=experiment_name, say=say)
    if until_solved:
        changes += [coach_options.stop_when_solved(data) for data in found.values()]
    if distributed:
        coach_options.train_as_fleet(ctx, found, source, changes, workers)
    if distributed_config is not None:
        printer(f"-dcp {distributed_config} changes nothing without -dc.")
    changed = [name for name, value in ({"--stop": stop or None} | changing).items() if value is not None]
    runner = ExperimentRunner(printer, ray, local_dir, project, trial, restore, resume == NEWEST, changed, note)
    runner.run_all(found, source, parse_mapping("--resources-per-trial", resources_per_trial))


def choose_environment(env: str | None, option: str | None, level: str | None) -> str | None:
    """The environment named by ENV, --env or -lvl. Raises UsageError if they differ."""
    named = list(dict.fromkeys(name for name in (env, option, level) if name is not None))
    if len(named) > 1:
        raise UsageError(f"The environment is named twice: {' and '.join(named)}.", "Keep one.")
    return named[0] if named else None


# -- options ------------------------------------------------------------------------------------------------------------

_WHY_IGNORED = {
    "--queue-trials": "trials always wait for free resources",
    "--torch": "networks always use PyTorch",
    "--eager": "it is for TensorFlow, and networks use PyTorch",
    "--trace": "it is for TensorFlow, and networks use PyTorch",
    "--no-ray-ui": "no dashboard is ever started",
    "--redis-password": "Ray no longer uses a Redis password; clusters use tokens",
    "--ray-num-gpus": "a Ray cluster started here detects the GPUs of this machine",
}


def log_at(level: int) -> None:
    if level:
        chosen = logging.DEBUG if level > 1 else logging.INFO
        logging.basicConfig(level=chosen, format="%(levelname)s %(name)s: %(message)s")


def _check_unsupported(nodes: int | None, upload_dir: str | None, score: str | None) -> None:
    if nodes is not None and nodes > 1:
        raise UsageError(
            f"--ray-num-nodes {nodes}: emulated nodes have no more cores than this machine.",
            "Leave it out and set --num-workers; for several machines pass their cluster: --address HOST:PORT.",
        )
    if upload_dir is not None:
        raise UsageError(
            f"--upload-dir {upload_dir}: runs are not copied while they train.",
            "Write them there directly: --local-dir takes a store (s3://BUCKET/PREFIX) or a directory that all machines share.",
        )
    from ludus.config.aliases.unsupported_keys import unsupported_keys

    foreign = unsupported_keys()[""]["checkpoint_score_attr"]
    if score is not None and not foreign.matches_default(score):
        raise UsageError(f"--checkpoint-score-attr {score} {foreign.why}")


def _use_temp_dir(directory: Path | None) -> None:
    """Set the temporary directory of this process and its children."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"--temp-dir {directory} cannot be written: {error.strerror}.") from error
    os.environ["TMPDIR"] = str(directory.resolve())
    tempfile.tempdir = None  # makes tempfile read TMPDIR again


def parse_workers(workers: str | None, cpus: int | None) -> int | str | None:
    if cpus is not None and workers is not None and workers != str(cpus):
        raise UsageError(f"--num-cpus is {cpus} and --num-workers is {workers}; they mean the same.", "Keep one.")
    if cpus is not None:
        return cpus
    return int(workers) if workers is not None and workers.isdigit() else workers


def parse_mapping(option: str, text: str | None) -> dict[str, Any]:
    """Parse the value of an option as a mapping in JSON or YAML. Raises UsageError."""
    if text is None:
        return {}
    from ludus.io.yaml_documents import parse_yaml

    found = parse_yaml(text, option)
    if not isinstance(found, dict):
        raise UsageError(f"{option} {text!r} is not of the form {{key: value, …}}.")
    return found


# -- running ------------------------------------------------------------------------------------------------------------


def _resume_one(where: str, given: Mapping[str, Any], stop: Mapping[str, Any], runner: ExperimentRunner) -> None:
    changed = [name for name, value in given.items() if value is not None]
    if changed:
        raise UsageError(
            f"--resume keeps the settings of the run; {', '.join(changed)} cannot be changed.",
            "Use --restore to start a new run from it.",
        )
    result = runner.resume(where, {"stop": dict(stop)} if stop else {})
    runner.conclude({result.run_dir.name: result})


def job_note(printer: Callable[[str], None]) -> JobResumeFile | None:
    """The note of runs that this job has started before, if this command is the main process of a job."""
    from ludus.experiments.runs.job_resume import JobResumeFile

    note = JobResumeFile.take(os.environ)
    if note is not None and note.trouble:
        printer(f"{note.path} is ignored: {note.trouble}")
    return note


@dataclass
class ExperimentRunner:
    """Runs experiments one after another and prints their results."""

    printer: Printer
    ray: tuple[str | None, int | None, int | None]
    local_dir: str | Path = "runs"
    project: str | Path | None = None
    trial: str | None = None
    restore: str | None = None
    newest: bool = False
    changed: Sequence[str] = ()
    """Options given on the command line that change the experiment."""
    note: JobResumeFile | None = None

    def run_all(self, experiments: Experiments, source: ExperimentSource | None, resources: Mapping[str, Any]) -> None:
        """Run all experiments. A failure is reported and the next one runs; an interruption ends them all."""
        if source is not None:
            from ludus.models.custom.loader import add_search_directory

            add_search_directory(source.parent)
        from ludus.cli.training.config_check import located_errors

        several = len(experiments) > 1
        self._check(experiments, source)
        results: dict[str, Result | None] = {}
        failed: dict[str, LudusError] = {}
        for number, (name, data) in enumerate(experiments.items(), 1):
            if several:
                self.printer(f"\n{name} ({number} of {len(experiments)})")
            try:
                with located_errors(name, data, source.file if source is not None else None):
                    results[name] = self._run(name, data, resources)
            except LudusError as error:
                if not several:
                    raise
                failed[name] = error
                print_error(error, name)
            except typer.Exit as ended:  # a sweep
                if not several or ended.exit_code == 130:
                    raise
                if ended.exit_code:
                    failed[name] = LudusError(f"The sweep {name} ended with code {ended.exit_code}.")
            last = results.get(name)
            if last is not None and is_interrupted(last):
                break
        self.conclude(results, failed, several=several)

    def _check(self, experiments: Experiments, source: ExperimentSource | None) -> None:
        """Check all experiments before the first one starts."""
        from ludus.cli.training.config_check import require_no_complaints

        if self.trial is not None and len(experiments) > 1:
            raise UsageError(f"--trial names one run, and {source} holds {len(experiments)} experiments.", "Add --experiment.")
        require_no_complaints(experiments, source.file if source is not None else None)

    def _run(self, name: str, data: dict[str, Any], resources: Mapping[str, Any]) -> Result | None:
        from ludus.config.search_space import is_sweep

        if is_sweep(data):
            self._sweep(name, data, resources)
            return None
        if resources:
            self.printer("--resources-per-trial changes nothing: this is a single run.")
        whole = {"name": name, **data}
        begun, place = self._find_in_note(name, whole)
        if begun is not None:
            return self._resume_after_restart(begun, whole)
        before = self._newest_run(name) if self.newest else None
        if before is not None:
            return self.continue_run(before, whole, self.note_writer(name))
        rest = {
            "local_dir": self.local_dir,
            "project": self.project,
            "trial": self.trial,
            "restore": self.restore,
            "place": place,
        }
        return self.run_with_display(
            lambda experiment, common: experiment.train(whole, **rest, on_directory=self.note_writer(name), **common)
        )

    def continue_run(
        self, before: Path, data: Mapping[str, Any], on_directory: Callable[[Path], None] | None = None
    ) -> Result | None:
        """Resume a run with the settings of `data`; None if it is already finished.

        Raises ConfigError for a setting that cannot change; prints the other changes. `on_directory` is called before the start.
        """
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs import resume_diff
        from ludus.experiments.runs.remote_runs import display_path as place_of

        cluster = self.cluster()
        changes = resume_diff.resume_changes(before, data, cluster)
        if _is_finished(before) and ("stop" not in changes or experiment.is_over(before, changes, cluster)):
            self.printer(f"{place_of(before)} is finished")
            return None
        if on_directory is not None:
            on_directory(before)
        changed = ", ".join(f"{key}: {_format_change(value)}" for key, value in changes.items())
        self.printer(f"continuing {place_of(before)}" + f" with {changed}" * bool(changed))
        return self.run_with_display(lambda experiment, common: experiment.resume(before, changes=changes, **common))

    # -- restarts of a job

    def note_writer(self, name: str) -> Callable[[Path], None]:
        """A function that stores the directory of an experiment's run or sweep in the note of the job, if this is one."""

        def write(directory: Path) -> None:
            from ludus.experiments.runs.remote_runs import display_path, is_remote

            if self.note is not None:
                place = display_path(directory) if is_remote(directory) else str(directory.expanduser().absolute())
                if trouble := self.note.write(name, place):
                    self.printer(f"if this job is restarted, it will not resume: {self.note.path} cannot be written: {trouble}")

        return write

    def resume(self, where: str, changes: Mapping[str, Any]) -> Result:
        """Resume the run of `--resume RUN`. A restarted job may find it finished by its previous start."""
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs.remote_runs import directory_of, display_path, is_remote

        again = False
        if self.note is not None:
            directory = directory_of(where)
            again = self.note.names(display_path(directory) if is_remote(directory) else str(directory.absolute()))
            if not again and not experiment.is_over(directory, changes, self.cluster()):
                self.note_writer(directory.name)(directory)
        return self.run_with_display(lambda experiment, common: experiment.resume(where, changes=changes, again=again, **common))

    def _find_in_note(self, name: str, data: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
        """The run that a previous start of this job created, and the directory it had reserved for one. Raises StoreError."""
        from ludus.config.translation import translate_experiment
        from ludus.experiments.runs.remote_runs import directory_of, display_path
        from ludus.experiments.runs.run_dir import Run, holds_run

        place = self.note.location(name) if self.note is not None else None
        if self.note is None or place is None:
            return None, None
        directory = directory_of(place)
        if not holds_run(directory):
            self.printer(f"{display_path(directory)}, named in {self.note.path}, holds no run: starting a new one")
            return None, directory
        ours, theirs = (translate_experiment(each).data for each in (data, Run.open(directory).config()))
        if _names_of(ours) != _names_of(theirs):
            self.printer(f"{self.note.path} is ignored: {display_path(directory)} belongs to another experiment")
            return None, None
        return directory, None

    def _resume_after_restart(self, begun: Path, data: Mapping[str, Any]) -> Result:
        """Resume the run that a previous start of this job created, even if the settings have changed since."""
        from ludus.errors import ConfigError
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs import resume_diff
        from ludus.experiments.runs.remote_runs import display_path as place_of

        cluster, changes = self.cluster(), dict[str, Any]()
        if self.newest:
            try:
                changes = resume_diff.resume_changes(begun, data, cluster)
            except ConfigError as error:
                self.printer(f"resuming with the original settings: {error.message}")
        if _is_finished(begun) and ("stop" not in changes or experiment.is_over(begun, changes, cluster)):
            self.printer(f"{place_of(begun)} is finished")
            return read_result(begun)
        self.printer(f"this job ran before: resuming {place_of(begun)}")
        more = {"changes": changes, "restore": self.restore, "again": True}
        return self.run_with_display(lambda experiment, common: experiment.resume(begun, **more, **common))

    def _sweep(self, name: str, data: dict[str, Any], resources: Mapping[str, Any]) -> None:
        from ludus.cli.training.tune import sweep
        from ludus.tuning.sweep import STATE

        if self.newest and self.changed and (Path(self.local_dir) / name / STATE).exists():
            raise UsageError(
                f"--resume keeps the settings of the sweep; {', '.join(self.changed)} cannot be changed.",
                "Leave it out, or give the sweep another name.",
            )
        sweep({name: data}, self, resources)

    def _newest_run(self, name: str) -> Path | None:
        """The newest run of an experiment, or the one named by --project and --trial."""
        from ludus.experiments.runs.remote_runs import directory_of, display_path
        from ludus.experiments.runs.run_dir import CONFIG, find_runs, run_directory

        named = self.project is not None or self.trial is not None
        place = (
            run_directory(name, "", "", self.local_dir, self.project, self.trial)
            if named
            else directory_of(self.local_dir) / name
        )
        runs = [run for run in find_runs(place, depth=0 if named else 1) if (run / CONFIG).exists()]
        if not runs:
            self.printer(f"{display_path(place)} holds no run to resume: starting a new one")
            return None
        return runs[-1]

    def cluster(self) -> ClusterOptions | None:
        from ludus.experiments.resolve import cluster_of

        address, cpus, memory = self.ray
        found = cluster_of(address)
        if found is None and (cpus is not None or memory is not None):
            self.printer("--ray-num-cpus and --ray-object-store-memory change nothing: Ray is started only with --address.")
            return None
        return cluster_of(address, cpus, memory)

    def run_with_display(self, work: Callable[[Any, dict[str, Any]], Result]) -> Result:
        """Call `work(module, common_arguments)` with a progress display, and print the summary of its result."""
        self.printer("starting …")
        from ludus.experiments import runner as experiment
        from ludus.experiments.control.training_display import TrainingDisplay
        from ludus.experiments.runs.run_summary import summary_lines

        cluster = self.cluster()
        with TrainingDisplay(quiet=self.printer.quiet, stream=sys.stderr if self.printer.as_json else sys.stdout) as display:
            result = work(experiment, {"sinks": [display], "announce": self.printer, "cluster": cluster})
        for line in summary_lines(result, runnable("ludus")):
            self.printer(line)
        return result

    def conclude(
        self, results: Mapping[str, Result | None], failed: Mapping[str, LudusError] | None = None, *, several: bool = False
    ) -> None:
        """Print the results with --json; raise typer.Exit with code 130 if interrupted, 1 if one failed."""
        ended = {name: result for name, result in results.items() if result is not None}
        if self.printer.as_json and several:
            lines = [{"experiment": name, **result.to_json()} for name, result in ended.items()]
            errors = [{"experiment": name, "error": str(error)} for name, error in (failed or {}).items()]
            print(json.dumps([*lines, *errors]), flush=True)
        elif self.printer.as_json and ended:
            print(json.dumps(next(iter(ended.values())).to_json()), flush=True)
        if any(is_interrupted(result) for result in ended.values()):
            raise typer.Exit(130)
        if failed:
            self.printer(f"{len(failed)} failed: {', '.join(failed)}")
            raise typer.Exit(1)


def _format_change(value: Any) -> str:
    return json.dumps({key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else value)


def _is_finished(directory: Path) -> bool:
    from ludus.experiments.runs.run_dir import Run

    return bool(Run.open(directory).meta().get("status") == "finished")


def is_interrupted(result: Result) -> bool:
    return result.stopped_by.startswith("interrupted")


def _names_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """Environment and algorithm of an experiment by their present names."""
    from ludus.core.renamed import current_name

    return current_name(str(data.get("env"))), current_name(str(data.get("run", "PPO")))


def read_result(directory: Path) -> Result:
    """The result of a finished run, read from its directory; without an agent."""
    from ludus.core.metrics import read_jsonl
    from ludus.experiments.result import Result
    from ludus.experiments.runs import checkpoint, remote_runs, run_status

    rows = read_jsonl(directory / "metrics.jsonl")
    metrics = {name: float(value) for name, value in (rows[-1] if rows else {}).items() if isinstance(value, (int, float))}
    name = checkpoint.newest_name(remote_runs.store_of(directory))
    why = run_status.read_status(directory, fetched=True).status.get("stopped_by", "finished")
    no_agent = cast(Any, None)
    return Result(directory, directory / checkpoint.FOLDER / name if name else None, why, metrics, no_agent)
