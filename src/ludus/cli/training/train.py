"""`ludus train`: an environment or a YAML file in, a trained agent out."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ludus.cli.help import HelpCommand
from ludus.cli.training import coach_options, presets
from ludus.cli.training import options as o
from ludus.errors import LudusError, UsageError
from ludus.experiments.source.experiment_source import Experiments, ExperimentSource
from ludus.experiments.source.experiment_source import experiments_from as experiments_from
from ludus.experiments.source.experiment_source import read_source as read_source

if TYPE_CHECKING:
    from ludus.experiments.resolve import ClusterOptions
    from ludus.experiments.result import Result
    from ludus.experiments.runs.job_resume import JobResumeFile

NEWEST = "newest"
"""What --resume means when no directory follows."""


class TrainCommand(HelpCommand):
    """`--resume` may stand alone, as it did in older trainers; the words are kept, to be spoken of as they were written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[coach_options.WORDS] = [word.partition("=")[0] for word in args]
        return super().parse_args(ctx, with_newest(args))


def with_newest(words: Sequence[str]) -> list[str]:
    """The words of a command, in which every `--resume` has a value."""
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
    noted: o.Noted = False,
    refused: o.NotHere = False,
) -> None:
    """Train an agent; Ctrl-C saves a checkpoint and stops."""
    log_at(2 if debug else verbose)
    voice = Voice(quiet, json_)
    older = {"--queue-trials": queue_trials, "--torch": torch, "--eager": eager, "--trace": trace, "--no-ray-ui": no_ray_ui}
    voice.notices(older | {"--redis-password": redis_password is not None, "--ray-num-gpus": ray_num_gpus is not None})
    if list_:
        presets.list_presets(json_)
        return
    for remark in coach_options.remarks(ctx.meta.get(coach_options.WORDS, ())) if noted or refused else ():
        voice(remark)
    _refuse(ray_num_nodes, upload_dir, checkpoint_score_attr)
    _use_temp_dir(temp_dir)
    note = note_of_job(voice)

    from ludus.config.overrides import parse_stop_values

    stops = parse_stop_values(stop or [])
    workers = workers_of(num_workers, num_cpus)
    asked = coach_options.Asked(save_secs, until_solved, use_cpu, evaluation_worker)
    own = {"num_envs_per_worker": num_envs, "num_learners": num_learners, "num_gpus": num_gpus, "seed": seed}
    settings = own | {"num_workers": workers} | ({"num_workers": 0, "num_learners": 0} if local_mode else {})
    top = {
        "run": run, "num_samples": num_samples, "checkpoint_freq": checkpoint_freq, "checkpoint_at_end": checkpoint_at_end,
        "keep_checkpoints_num": keep_checkpoints_num,
    }  # fmt: skip
    ray = (None if local_mode else address, ray_num_cpus, ray_object_store_memory)
    changing = {
        "--set": set_, "--config": config, "--track": track, "--num-cpus": num_cpus, "--num-workers": num_workers,
        "-lvl": level, "-cp": custom_parameter,
    } | {_option(key): value for key, value in (top | own).items()} | asked.given()  # fmt: skip
    if resume is not None and resume != NEWEST and not distributed:
        given = {
            "ENV": env or env_option, "-f": file, "-p": preset, "--restore": restore, "--project": project, "--trial": trial,
        } | changing  # fmt: skip
        _resume_one(resume, given, stops, Starter(voice, ray, note=note))
        return
    if resume == NEWEST and restore is not None:
        raise UsageError(f"--resume continues a run, and --restore {restore} begins a new one.", "Keep one.")
    named = environment_of(env, env_option, level if preset is None and file is None else None)
    top["env"] = named
    source = read_source(file, preset, level or (named if preset is not None else None))
    changes = [*(f"track.{name}={'true' if name == 'csv' else '{}'}" for name in track or []), *asked.overrides()]
    found = experiments_from(
        source, experiment, experiment_name, top, stops, settings, mapping_of("--config", config), [*changes, *(set_ or [])],
        custom=custom_parameter or (), say=Voice(quiet=True, as_json=json_) if distributed else voice,  # the learner says it
    )  # fmt: skip
    if until_solved:
        changes += [coach_options.stop_when_solved(data) for data in found.values()]
    if distributed:
        fleet(ctx, found, source, changes, experiment_name, workers, distributed_config, quiet)
        return
    if distributed_config is not None:
        voice(f"-dcp {distributed_config} changes nothing: it is for -dc.")
    changed = [name for name, value in ({"--stop": stop or None} | changing).items() if value is not None]
    starter = Starter(voice, ray, local_dir, project, trial, restore, resume == NEWEST, changed, note)
    starter.run_all(found, source, mapping_of("--resources-per-trial", resources_per_trial))


def environment_of(env: str | None, option: str | None, level: str | None) -> str | None:
    """However it is named. Raises UsageError where two are."""
    named = list(dict.fromkeys(name for name in (env, option, level) if name is not None))
    if len(named) > 1:
        raise UsageError(f"The environment is named twice: {' and '.join(named)}.", "Keep one.")
    return named[0] if named else None


def fleet(
    ctx: typer.Context,
    found: Experiments,
    source: ExperimentSource | None,
    changes: Sequence[str],
    name: str | None,
    workers: int | str | None,
    config_path: Path | None,
    quiet: bool,
) -> None:
    """Hand the experiment over to a learner and workers of their own."""
    if len(found) > 1:
        raise UsageError(f"There are {len(found)} experiments, and -dc trains one.", "Add --experiment.")
    given = {
        parameter: value
        for parameter, value in ctx.params.items()
        if getattr(ctx.get_parameter_source(parameter), "name", "") == "COMMANDLINE"
    }
    models = source.parent if source is not None else None
    coach_options.hand_over(next(iter(found.values())), given, changes, name, workers, config_path, quiet, models)


# -- options ------------------------------------------------------------------------------------------------------------

_NOTES = {
    "--queue-trials": "trials always wait until there is room",
    "--torch": "networks are always PyTorch's",
    "--eager": "it is of TensorFlow, and networks are PyTorch's",
    "--trace": "it is of TensorFlow, and networks are PyTorch's",
    "--no-ray-ui": "no dashboard is ever started",
    "--redis-password": "Ray no longer uses a Redis password; clusters use tokens",
    "--ray-num-gpus": "a Ray that is started here finds the GPUs of this machine by itself",
}


class Voice:
    """What is said to people, where they read it."""

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.quiet, self.as_json = quiet, as_json

    def __call__(self, sentence: str) -> None:
        from ludus.cli.output import say

        if not self.quiet:
            say(sentence, to_stderr=self.as_json)

    def notices(self, given: Mapping[str, bool]) -> None:
        for option, is_given in given.items():
            if is_given:
                self(f"{option} changes nothing: {_NOTES[option]}.")


def log_at(level: int) -> None:
    if level:
        chosen = logging.DEBUG if level > 1 else logging.INFO
        logging.basicConfig(level=chosen, format="%(levelname)s %(name)s: %(message)s")


def _refuse(nodes: int | None, upload_dir: str | None, score: str | None) -> None:
    if nodes is not None and nodes > 1:
        raise UsageError(
            f"--ray-num-nodes {nodes}: nodes that are only emulated have no more cores than this machine.",
            "Leave it out and set --num-workers; for several machines name their cluster: --address HOST:PORT.",
        )
    if upload_dir is not None:
        raise UsageError(
            f"--upload-dir {upload_dir}: runs are not copied while they train.",
            "Let them be where they are to be: --local-dir takes a store (s3://BUCKET/PREFIX), or a disk that all machines share.",
        )
    from ludus.config.aliases import rllib_keys

    foreign = rllib_keys.UNSUPPORTED[rllib_keys.EXPERIMENT]["checkpoint_score_attr"]
    if score is not None and not foreign.matches_default(score):
        raise UsageError(f"--checkpoint-score-attr {score} {foreign.why}")


def _use_temp_dir(directory: Path | None) -> None:
    """For this process and all that it starts."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"--temp-dir {directory} cannot be written: {error.strerror}.") from error
    os.environ["TMPDIR"] = str(directory.resolve())
    tempfile.tempdir = None  # looked up again when it is next asked for


def workers_of(workers: str | None, cpus: int | None) -> int | str | None:
    if cpus is not None and workers is not None and workers != str(cpus):
        raise UsageError(f"--num-cpus is {cpus} and --num-workers is {workers}; they mean the same.", "Keep one.")
    if cpus is not None:
        return cpus
    return int(workers) if workers is not None and workers.isdigit() else workers


def mapping_of(option: str, text: str | None) -> dict[str, Any]:
    """JSON, or YAML, which contains it."""
    if text is None:
        return {}
    from ludus.io.yaml_documents import parse_yaml

    found = parse_yaml(text, option)
    if not isinstance(found, dict):
        raise UsageError(f"{option} {text!r} is not of the form {{key: value, …}}.")
    return found


def _option(key: str) -> str:
    return {"num_envs_per_worker": "--num-envs"}.get(key, "--" + key.replace("_", "-"))


# -- running ------------------------------------------------------------------------------------------------------------


def _resume_one(where: str, given: Mapping[str, Any], stop: Mapping[str, Any], starter: Starter) -> None:
    changed = [name for name, value in given.items() if value is not None]
    if changed:
        raise UsageError(
            f"--resume continues a run with its own settings; {', '.join(changed)} cannot be changed.",
            "Use --restore to start a new run from it.",
        )
    result = starter.resume(where, {"stop": dict(stop)} if stop else {})
    starter.conclude({result.run_dir.name: result})


def note_of_job(voice: Callable[[str], None]) -> JobResumeFile | None:
    """Which runs this command has begun, if it is the main one of a job and has lived before."""
    from ludus.experiments.runs.job_resume import JobResumeFile

    note = JobResumeFile.take(os.environ)
    if note is not None and note.trouble:
        voice(f"what {note.path} says is ignored: {note.trouble}")
    return note


@dataclass
class Starter:
    """Starts experiments, one after another, and says how they went."""

    voice: Voice
    ray: tuple[str | None, int | None, int | None]
    local_dir: str | Path = "runs"
    project: str | Path | None = None
    trial: str | None = None
    restore: str | None = None
    newest: bool = False
    changed: Sequence[str] = ()
    """The options that say what is trained."""
    note: JobResumeFile | None = None

    def run_all(self, experiments: Experiments, source: ExperimentSource | None, resources: Mapping[str, Any]) -> None:
        """One that fails is reported, and the others are run all the same; an interruption ends them all."""
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
                self.voice(f"\n{name} ({number} of {len(experiments)})")
            try:
                with located_errors(name, data, source.file if source is not None else None):
                    results[name] = self._run(name, data, resources)
            except LudusError as error:
                if not several:
                    raise
                failed[name] = error
                _report(name, error)
            except typer.Exit as ended:  # a sweep
                if not several or ended.exit_code == 130:
                    raise
                if ended.exit_code:
                    failed[name] = LudusError(f"The sweep {name} ended with code {ended.exit_code}.")
            last = results.get(name)
            if last is not None and interrupted(last):
                break
        self.conclude(results, failed, several=several)

    def _check(self, experiments: Experiments, source: ExperimentSource | None) -> None:
        """All of them before the first begins."""
        from ludus.cli.training.config_check import require_no_complaints

        if self.trial is not None and len(experiments) > 1:
            raise UsageError(f"--trial names one run, and {source} holds {len(experiments)} experiments.", "Add --experiment.")
        require_no_complaints(experiments, source.file if source is not None else None)

    def _run(self, name: str, data: dict[str, Any], resources: Mapping[str, Any]) -> Result | None:
        if is_sweep(data):
            self._sweep(name, data, resources)
            return None
        if resources:
            self.voice("--resources-per-trial changes nothing: this is a single run.")
        whole = {"name": name, **data}
        begun, place = self._noted(name, whole)
        if begun is not None:
            return self._go_on(begun, whole)
        before = self._before(name) if self.newest else None
        if before is not None:
            return self.continue_(before, whole, self.noting(name))
        rest = {
            "local_dir": self.local_dir,
            "project": self.project,
            "trial": self.trial,
            "restore": self.restore,
            "place": place,
        }
        return self.shown(lambda experiment, told: experiment.train(whole, **rest, on_directory=self.noting(name), **told))

    def continue_(self, before: Path, data: Mapping[str, Any], noted: Callable[[Path], None] | None = None) -> Result | None:
        """The run goes on; None: it is finished. What differs from it is an error, or said. `noted`: hears of it before."""
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs import resume_diff
        from ludus.experiments.runs.remote_runs import display_path as place_of

        cluster = self.cluster()
        changes = resume_diff.resume_changes(before, data, cluster)
        if _is_finished(before) and ("stop" not in changes or experiment.is_over(before, changes, cluster)):
            self.voice(f"{place_of(before)} is finished")
            return None
        if noted is not None:
            noted(before)
        told = ", ".join(f"{key}: {_plain(value)}" for key, value in changes.items())
        self.voice(f"continuing {place_of(before)}" + f" with {told}" * bool(told))
        return self.shown(lambda experiment, told: experiment.resume(before, changes=changes, **told))

    # -- the lives of a job

    def noting(self, name: str) -> Callable[[Path], None]:
        """Says to the job, if this is one, where the run or the sweep of an experiment is."""

        def note(directory: Path) -> None:
            from ludus.experiments.runs.remote_runs import display_path, is_remote

            if self.note is not None:
                place = display_path(directory) if is_remote(directory) else str(directory.expanduser().absolute())
                if trouble := self.note.write(name, place):
                    self.voice(f"if this job is restarted, it will not resume: {self.note.path} cannot be written: {trouble}")

        return note

    def resume(self, where: str, changes: Mapping[str, Any]) -> Result:
        """As --resume asks. In a job that has begun so before, the run may have come to its end since."""
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs.remote_runs import directory_of, display_path, is_remote

        again = False
        if self.note is not None:
            directory = directory_of(where)
            again = self.note.names(display_path(directory) if is_remote(directory) else str(directory.absolute()))
            if not again and not experiment.is_over(directory, changes, self.cluster()):
                self.noting(directory.name)(directory)
        return self.shown(lambda experiment, told: experiment.resume(where, changes=changes, again=again, **told))

    def _noted(self, name: str, data: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
        """(the run that an earlier life of this job has begun, or where it was about to begin it). Raises StoreError."""
        from ludus.config.translation import translate_experiment
        from ludus.experiments.runs.remote_runs import directory_of, display_path
        from ludus.experiments.runs.run_dir import Run, holds_run

        place = self.note.location(name) if self.note is not None else None
        if self.note is None or place is None:
            return None, None
        directory = directory_of(place)
        if not holds_run(directory):
            self.voice(f"{display_path(directory)}, which {self.note.path} names, holds no run: starting a new one")
            return None, directory
        ours, theirs = (translate_experiment(each).data for each in (data, Run.open(directory).config()))
        if (ours.get("env"), ours.get("run", "PPO")) != (theirs.get("env"), theirs.get("run", "PPO")):
            self.voice(f"what {self.note.path} says is ignored: {display_path(directory)} is another experiment's")
            return None, None
        return directory, None

    def _go_on(self, begun: Path, data: Mapping[str, Any]) -> Result:
        """With what an earlier life of this job has begun. Nothing that was changed since then is a reason to fail."""
        from ludus.cli.clusters.fleet import stored_result
        from ludus.errors import ConfigError
        from ludus.experiments import runner as experiment
        from ludus.experiments.runs import resume_diff
        from ludus.experiments.runs.remote_runs import display_path as place_of

        cluster, changes = self.cluster(), dict[str, Any]()
        if self.newest:
            try:
                changes = resume_diff.resume_changes(begun, data, cluster)
            except ConfigError as error:
                self.voice(f"resuming with the original settings: {error.message}")
        if _is_finished(begun) and ("stop" not in changes or experiment.is_over(begun, changes, cluster)):
            self.voice(f"{place_of(begun)} is finished")
            return stored_result(begun)
        self.voice(f"this job ran before: resuming {place_of(begun)}")
        more = {"changes": changes, "restore": self.restore, "again": True}
        return self.shown(lambda experiment, told: experiment.resume(begun, **more, **told))

    def _sweep(self, name: str, data: dict[str, Any], resources: Mapping[str, Any]) -> None:
        from ludus.cli.training.tune import sweep
        from ludus.tuning.sweep import STATE

        if self.newest and self.changed and (Path(self.local_dir) / name / STATE).exists():
            raise UsageError(
                f"--resume continues a sweep with its own settings; {', '.join(self.changed)} cannot be changed.",
                "Leave it out, or give the sweep another name.",
            )
        sweep({name: data}, self, resources)

    def _before(self, name: str) -> Path | None:
        """The newest run of an experiment, or the one that --project and --trial name."""
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
            self.voice(f"there is no run in {display_path(place)} to continue: a new one begins")
            return None
        return runs[-1]

    def cluster(self) -> ClusterOptions | None:
        from ludus.experiments.resolve import cluster_of

        address, cpus, memory = self.ray
        found = cluster_of(address)
        if found is None and (cpus is not None or memory is not None):
            self.voice("--ray-num-cpus and --ray-object-store-memory change nothing: without --address no Ray is started.")
            return None
        return cluster_of(address, cpus, memory)

    def shown(self, work: Callable[[Any, dict[str, Any]], Result]) -> Result:
        self.voice("starting …")
        from ludus.experiments import runner as experiment
        from ludus.experiments.control.training_display import TrainingDisplay

        cluster = self.cluster()
        with TrainingDisplay(quiet=self.voice.quiet, stream=sys.stderr if self.voice.as_json else sys.stdout) as display:
            result = work(experiment, {"sinks": [display], "announce": self.voice, "cluster": cluster})
        self._tell(result)
        return result

    def _tell(self, result: Result) -> None:
        from ludus.cli.output import here
        from ludus.experiments.runs.run_summary import summary_lines

        for line in summary_lines(result, here("ludus")):
            self.voice(line)

    def conclude(
        self, results: Mapping[str, Result | None], failed: Mapping[str, LudusError] | None = None, *, several: bool = False
    ) -> None:
        """The last line as JSON, and the exit code."""
        ended = {name: result for name, result in results.items() if result is not None}
        if self.voice.as_json and several:
            lines = [{"experiment": name, **result.to_json()} for name, result in ended.items()]
            errors = [{"experiment": name, "error": str(error)} for name, error in (failed or {}).items()]
            print(json.dumps([*lines, *errors]), flush=True)
        elif self.voice.as_json and ended:
            print(json.dumps(next(iter(ended.values())).to_json()), flush=True)
        if any(interrupted(result) for result in ended.values()):
            raise typer.Exit(130)
        if failed:
            self.voice(f"{len(failed)} failed: {', '.join(failed)}")
            raise typer.Exit(1)


def is_sweep(data: Mapping[str, Any]) -> bool:
    """Whether an experiment is many trials."""
    from ludus.config import search_space

    return search_space.is_sweep(data)


def _plain(value: Any) -> str:
    given = {key: each for key, each in value.items() if each is not None} if isinstance(value, Mapping) else value
    return json.dumps(given)


def _is_finished(directory: Path) -> bool:
    from ludus.experiments.runs.run_dir import Run

    return bool(Run.open(directory).meta().get("status") == "finished")


def interrupted(result: Result) -> bool:
    return result.stopped_by.startswith("interrupted")


def _report(name: str, error: LudusError) -> None:
    if "--debug" in sys.argv or os.environ.get("LUDUS_DEBUG"):
        traceback.print_exception(error)
    print(f"ludus: {name}: {error}", file=sys.stderr, flush=True)
