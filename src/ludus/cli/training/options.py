"""The options of `ludus train`, also used by other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.common_options import RUN_NAME, trust_option
from ludus.cli.help import COMPATIBILITY, option_in
from ludus.cli.training import coach_options

_experiment, _resources, _checkpoints, _fleet = map(option_in, ("Experiment", "Resources", "Checkpoints", "Fleets"))
output_option, ray_option, compatibility_option = map(option_in, ("Output", "Ray", COMPATIBILITY))

Env = Annotated[str | None, typer.Argument(help="Environment: a Gymnasium id or module:function.")]
File = Annotated[Path | None, _experiment("-f", "--file", "--config-file", help="YAML file with one or more experiments.")]
Preset = Annotated[
    str | None,
    _experiment(
        "-p",
        "--preset",
        metavar="NAME|PATH",
        help="Preset (see `ludus presets list`), or a file: path.yaml, path.py, path.py:object.",
    ),
]
Level = Annotated[
    str | None, compatibility_option("-lvl", "--level", help="Environment of a preset: a level such as hopper, or any ENV.")
]
CustomParameter = Annotated[
    list[str] | None,
    compatibility_option(
        "-cp",
        "--custom_parameter",
        "--custom-parameter",
        metavar="KEY=VALUE;…",
        help="Override KEY=VALUE with key names of Ludus or Coach; values are parsed, never executed; repeatable.",
    ),
]
OneExperiment = Annotated[str | None, _experiment("--experiment", metavar="NAME", help="Run only this experiment of the file.")]
ExperimentName = Annotated[
    str | None,
    output_option(
        "-e", "--experiment-name", "--experiment_name", help="Name of the experiment and of the directory of its runs."
    ),
]
EnvOption = Annotated[str | None, _experiment("--env", "--name-env", help="Environment; same as the argument ENV.")]
Algorithm = Annotated[str | None, _experiment("--run", help="Algorithm, or module:Class. Default: PPO.")]
NumEnvs = Annotated[int | None, _experiment(help="Environments stepped together by each worker.")]
NumWorkers = Annotated[
    str | None,
    _resources(
        "-n", "--num-workers", "--num_workers", metavar="N|auto", help="Number of sampling processes; 0 samples in this process."
    ),
]
NumCpus = Annotated[
    int | None,
    _resources(
        min=0, help="Cores for sampling; same as --num-workers. The learner uses one more: 35 fills a node with 36 cores."
    ),
]
NumGpus = Annotated[float | None, _resources(help="Number of GPUs for the learner.")]
NumLearners = Annotated[int | None, _resources(help="Number of learner processes that average their gradients.")]
NumSamples = Annotated[int | None, _experiment(min=1, help="Number of trials with different seeds; a sweep if above 1.")]
Seed = Annotated[int | None, _experiment(help="Random seed.")]
Stop = Annotated[
    list[str] | None,
    _experiment(
        metavar="KEY=VALUE",
        help="Stop condition: timesteps, episode_return_mean, iterations, episodes or time_s; repeatable, or one JSON object.",
    ),
]
Config = Annotated[
    str | None, _experiment("--config", metavar="JSON", help="Keys of `config:` as JSON; override those of the file.")
]
Set = Annotated[
    list[str] | None,
    _experiment("--set", metavar="KEY=VALUE", help="Set any key, e.g. lr=1e-3 or model.use_lstm=true; repeatable."),
]
Track = Annotated[
    list[str] | None, output_option(metavar="csv|wandb|mlflow", help="Tracker in addition to TensorBoard; repeatable.")
]
LocalDir = Annotated[
    str,
    output_option(
        "--local-dir", "-ep", "--experiment_path", metavar="DIR|URL", help="Directory for runs, or s3://BUCKET/PREFIX."
    ),
]
TempDir = Annotated[Path | None, _resources(help="Directory for sockets and Ray session files. [TMPDIR]")]
Project = Annotated[str | None, output_option(metavar="DIR|URL", help="With --trial: the run directory is DIR/NAME.")]
Trial = Annotated[str | None, output_option(help="Name of the run in --project.")]
CheckpointFreq = Annotated[int | None, _checkpoints(help="Save a checkpoint every N iterations.")]
CheckpointAtEnd = Annotated[
    bool | None, _checkpoints("--checkpoint-at-end/--no-checkpoint-at-end", help="Save a checkpoint at the end (the default).")
]
KeepCheckpoints = Annotated[
    int | None, _checkpoints("--keep-checkpoints-num", help="Number of newest checkpoints to keep; the best is always kept.")
]
Resume = Annotated[
    str | None,
    _checkpoints(
        metavar="[RUN]",
        help="Resume a run (directory, last, EXPERIMENT, end of its name); without RUN, the newest of each experiment.",
        **RUN_NAME,
    ),
]
Restore = Annotated[
    str | None,
    _checkpoints("--restore", "-crd", "--checkpoint_restore_dir", help="Start a new run from this checkpoint.", **RUN_NAME),
]


Trust = Annotated[bool, trust_option(_experiment)]
LocalMode = Annotated[bool, _resources("--local-mode", help="Run everything in this process, for debugging.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="No progress display.")]
Json = Annotated[bool, output_option("--json", help="Print the result as JSON on the last line.")]
Verbose = Annotated[int, output_option("-v", "--verbose", count=True, help="Log more; -vv logs everything.")]
Debug = Annotated[bool, output_option("--debug", help="Log everything; show tracebacks.")]

Address = Annotated[
    str | None,
    ray_option(
        "--address",
        "--ray-address",
        metavar="HOST:PORT|auto|local",
        help="Ray cluster to sample on; local starts one on this machine. [RAY_ADDRESS, ip_head]",
    ),
]
RayNumCpus = Annotated[int | None, ray_option(min=1, help="CPUs of a Ray cluster started here.")]
RayNumGpus = Annotated[int | None, ray_option(min=0, help="GPUs of a Ray cluster started here; default: detected.")]
RayNumNodes = Annotated[int | None, compatibility_option(min=1, help="Emulated Ray nodes; only 1 is supported.")]
RayMemory = Annotated[
    int | None, ray_option("--ray-object-store-memory", min=1, help="Object store size in bytes of a Ray cluster started here.")
]

Distributed = Annotated[
    bool,
    _fleet(
        "-dc",
        "--distributed_coach",
        "--distributed",
        help="Train with a learner and -n workers connected by Redis; see --distributed-config.",
    ),
]
DistributedConfig = Annotated[
    Path | None,
    _fleet(
        "-dcp",
        "--distributed_coach_config_path",
        "--distributed-config",
        metavar="FILE",
        help="INI file with the orchestrator, Redis and data store of --distributed.",
    ),
]

SaveSecs = Annotated[
    int | None,
    compatibility_option("-s", "--checkpoint_save_secs", min=0, help="Seconds between checkpoints; same as checkpoint_time_s."),
]
UntilSolved = Annotated[
    bool,
    compatibility_option("-asc", "--apply_stop_condition", help="Also stop at the target return of the preset or environment."),
]
UseCpu = Annotated[bool, compatibility_option("-c", "--use_cpu", help="Use no GPU.")]
EvaluationWorker = Annotated[
    bool,
    compatibility_option("-ew", "--evaluation_worker", help="Evaluate in a separate process; same as evaluation_num_workers: 1."),
]
ListPresets = Annotated[bool, compatibility_option("-l", "--list", help="List presets; same as `ludus presets list`.")]
Ignored = Annotated[bool, compatibility_option(*coach_options.names(coach_options.IGNORED), help="Ignored; prints the reason.")]
Unsupported = Annotated[
    bool, compatibility_option(*coach_options.names(coach_options.UNSUPPORTED), help="Not supported; prints the alternative.")
]

ScoreAttr = Annotated[
    str | None, compatibility_option("--checkpoint-score-attr", help="Metric that decides which checkpoint is best.")
]
UploadDir = Annotated[str | None, compatibility_option(help="Not supported; use --local-dir s3://…")]
ResourcesPerTrial = Annotated[str | None, compatibility_option(metavar="JSON", help="CPUs per trial of a sweep.")]
_IGNORED = "Ignored; accepted for old RLlib command lines."
RedisPassword = Annotated[str | None, compatibility_option(help=_IGNORED)]

QueueTrials = Annotated[bool, compatibility_option("--queue-trials", help=_IGNORED)]
Torch = Annotated[bool, compatibility_option("--torch", help=_IGNORED)]
Eager = Annotated[bool, compatibility_option("--eager", help=_IGNORED)]
Trace = Annotated[bool, compatibility_option("--trace", help=_IGNORED)]
NoRayUi = Annotated[bool, compatibility_option("--no-ray-ui", help=_IGNORED)]
