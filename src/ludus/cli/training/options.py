"""The options of `ludus train`, also used by other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.help import COMPATIBILITY
from ludus.cli.run_argument import complete_run, run_place
from ludus.cli.training import coach_options
from ludus.core import trust

EXPERIMENT, RESOURCES, CHECKPOINTS, OUTPUT = "Experiment", "Resources", "Checkpoints", "Output"
RAY, FLEET = "Ray", "Fleets"

Env = Annotated[str | None, typer.Argument(help="Environment: a Gymnasium id or module:function.", show_default=False)]
File = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        "--config-file",
        help="YAML file with one or more experiments.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--preset",
        metavar="NAME|PATH",
        help="Preset (see `ludus presets list`), or a file: path.yaml, path.py, path.py:object.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Level = Annotated[
    str | None,
    typer.Option(
        "-lvl",
        "--level",
        help="Environment of a preset: a level such as hopper, or any ENV.",
        show_default=False,
        rich_help_panel=COMPATIBILITY,
    ),
]
CustomParameter = Annotated[
    list[str] | None,
    typer.Option(
        "-cp",
        "--custom_parameter",
        "--custom-parameter",
        metavar="KEY=VALUE;…",
        help="Override KEY=VALUE with key names of Ludus or Coach; values are parsed, never executed; repeatable.",
        show_default=False,
        rich_help_panel=COMPATIBILITY,
    ),
]
OneExperiment = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        metavar="NAME",
        help="Run only this experiment of the file.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
ExperimentName = Annotated[
    str | None,
    typer.Option(
        "-e",
        "--experiment-name",
        "--experiment_name",
        help="Name of the experiment and of the directory of its runs.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
EnvOption = Annotated[
    str | None,
    typer.Option(
        "--env", "--name-env", help="Environment; same as the argument ENV.", show_default=False, rich_help_panel=EXPERIMENT
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option("--run", help="Algorithm, or module:Class. Default: PPO.", show_default=False, rich_help_panel=EXPERIMENT),
]
NumEnvs = Annotated[
    int | None, typer.Option(help="Environments stepped together by each worker.", show_default=False, rich_help_panel=EXPERIMENT)
]
NumWorkers = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--num-workers",
        "--num_workers",
        metavar="N|auto",
        help="Number of sampling processes; 0 samples in this process.",
        show_default=False,
        rich_help_panel=RESOURCES,
    ),
]
NumCpus = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Cores for sampling; same as --num-workers. The learner uses one more: 35 fills a node with 36 cores.",
        show_default=False,
        rich_help_panel=RESOURCES,
    ),
]
NumGpus = Annotated[
    float | None, typer.Option(help="Number of GPUs for the learner.", show_default=False, rich_help_panel=RESOURCES)
]
NumLearners = Annotated[
    int | None,
    typer.Option(help="Number of learner processes that average their gradients.", show_default=False, rich_help_panel=RESOURCES),
]
NumSamples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of trials with different seeds; a sweep if above 1.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Random seed.", show_default=False, rich_help_panel=EXPERIMENT)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Stop condition: timesteps, episode_return_mean, iterations, episodes or time_s; repeatable, or one JSON object.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="JSON",
        help="Keys of `config:` as JSON; override those of the file.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key, e.g. lr=1e-3 or model.use_lstm=true; repeatable.",
        show_default=False,
        rich_help_panel=EXPERIMENT,
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="csv|wandb|mlflow",
        help="Tracker in addition to TensorBoard; repeatable.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
LocalDir = Annotated[
    str,
    typer.Option(
        "--local-dir",
        "-ep",
        "--experiment_path",
        metavar="DIR|URL",
        help="Directory for runs, or s3://BUCKET/PREFIX.",
        rich_help_panel=OUTPUT,
    ),
]
TempDir = Annotated[
    Path | None,
    typer.Option(help="Directory for sockets and Ray session files. [TMPDIR]", show_default=False, rich_help_panel=RESOURCES),
]
Project = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|URL", help="With --trial: the run directory is DIR/NAME.", show_default=False, rich_help_panel=OUTPUT
    ),
]
Trial = Annotated[str | None, typer.Option(help="Name of the run in --project.", show_default=False, rich_help_panel=OUTPUT)]
CheckpointFreq = Annotated[
    int | None, typer.Option(help="Save a checkpoint every N iterations.", show_default=False, rich_help_panel=CHECKPOINTS)
]
CheckpointAtEnd = Annotated[
    bool | None,
    typer.Option(
        "--checkpoint-at-end/--no-checkpoint-at-end",
        help="Save a checkpoint at the end (the default).",
        show_default=False,
        rich_help_panel=CHECKPOINTS,
    ),
]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(
        "--keep-checkpoints-num",
        help="Number of newest checkpoints to keep; the best is always kept.",
        show_default=False,
        rich_help_panel=CHECKPOINTS,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[RUN]",
        help="Resume a run (directory, last, EXPERIMENT, end of its name); without RUN, the newest of each experiment.",
        show_default=False,
        callback=run_place,
        autocompletion=complete_run,
        rich_help_panel=CHECKPOINTS,
    ),
]
Restore = Annotated[
    str | None,
    typer.Option(
        "--restore",
        "-crd",
        "--checkpoint_restore_dir",
        help="Start a new run from this checkpoint.",
        show_default=False,
        callback=run_place,
        autocompletion=complete_run,
        rich_help_panel=CHECKPOINTS,
    ),
]


def allow_imports(given: bool) -> bool:
    """Callback of --trust: allow the import of modules that stored runs name."""
    if given:
        trust.allow_everything()
    return given


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=allow_imports,
        help="Allow stored runs to import the code they name (environment, wrappers, models).",
        rich_help_panel=EXPERIMENT,
    ),
]
LocalMode = Annotated[
    bool, typer.Option("--local-mode", help="Run everything in this process, for debugging.", rich_help_panel=RESOURCES)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Log more; -vv logs everything.",
        metavar="",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything; show tracebacks.", rich_help_panel=OUTPUT)]

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "--ray-address",
        metavar="HOST:PORT|auto|local",
        help="Ray cluster to sample on; local starts one on this machine. [RAY_ADDRESS, ip_head]",
        show_default=False,
        rich_help_panel=RAY,
    ),
]
RayNumCpus = Annotated[
    int | None, typer.Option(min=1, help="CPUs of a Ray cluster started here.", show_default=False, rich_help_panel=RAY)
]
RayNumGpus = Annotated[
    int | None,
    typer.Option(min=0, help="GPUs of a Ray cluster started here; default: detected.", show_default=False, rich_help_panel=RAY),
]
RayNumNodes = Annotated[
    int | None,
    typer.Option(min=1, help="Emulated Ray nodes; only 1 is supported.", show_default=False, rich_help_panel=COMPATIBILITY),
]
RayMemory = Annotated[
    int | None,
    typer.Option(
        "--ray-object-store-memory",
        min=1,
        help="Object store size in bytes of a Ray cluster started here.",
        show_default=False,
        rich_help_panel=RAY,
    ),
]

Distributed = Annotated[
    bool,
    typer.Option(
        "-dc",
        "--distributed_coach",
        "--distributed",
        help="Train with a learner and -n workers connected by Redis; see --distributed-config.",
        rich_help_panel=FLEET,
    ),
]
DistributedConfig = Annotated[
    Path | None,
    typer.Option(
        "-dcp",
        "--distributed_coach_config_path",
        "--distributed-config",
        metavar="FILE",
        help="INI file with the orchestrator, Redis and data store of --distributed.",
        show_default=False,
        rich_help_panel=FLEET,
    ),
]

SaveSecs = Annotated[
    int | None,
    typer.Option(
        "-s",
        "--checkpoint_save_secs",
        min=0,
        help="Seconds between checkpoints; same as checkpoint_time_s.",
        show_default=False,
        rich_help_panel=COMPATIBILITY,
    ),
]
UntilSolved = Annotated[
    bool,
    typer.Option(
        "-asc",
        "--apply_stop_condition",
        help="Also stop at the target return of the preset or environment.",
        rich_help_panel=COMPATIBILITY,
    ),
]
UseCpu = Annotated[bool, typer.Option("-c", "--use_cpu", help="Use no GPU.", rich_help_panel=COMPATIBILITY)]
EvaluationWorker = Annotated[
    bool,
    typer.Option(
        "-ew",
        "--evaluation_worker",
        help="Evaluate in a separate process; same as evaluation_num_workers: 1.",
        rich_help_panel=COMPATIBILITY,
    ),
]
ListPresets = Annotated[
    bool, typer.Option("-l", "--list", help="List presets; same as `ludus presets list`.", rich_help_panel=COMPATIBILITY)
]
Ignored = Annotated[
    bool,
    typer.Option(*coach_options.names(coach_options.IGNORED), help="Ignored; prints the reason.", rich_help_panel=COMPATIBILITY),
]
Unsupported = Annotated[
    bool,
    typer.Option(
        *coach_options.names(coach_options.UNSUPPORTED),
        help="Not supported; prints the alternative.",
        rich_help_panel=COMPATIBILITY,
    ),
]

ScoreAttr = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-score-attr",
        help="Metric that decides which checkpoint is best.",
        show_default=False,
        rich_help_panel=COMPATIBILITY,
    ),
]
UploadDir = Annotated[
    str | None, typer.Option(help="Not supported; use --local-dir s3://…", show_default=False, rich_help_panel=COMPATIBILITY)
]
ResourcesPerTrial = Annotated[
    str | None, typer.Option(metavar="JSON", help="CPUs per trial of a sweep.", show_default=False, rich_help_panel=COMPATIBILITY)
]
RedisPassword = Annotated[
    str | None,
    typer.Option(help="Ignored; accepted for old RLlib command lines.", show_default=False, rich_help_panel=COMPATIBILITY),
]


def _ignored(option: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        option, help="Ignored; accepted for old RLlib command lines.", rich_help_panel=COMPATIBILITY
    )
    return info


QueueTrials = Annotated[bool, _ignored("--queue-trials")]
Torch = Annotated[bool, _ignored("--torch")]
Eager = Annotated[bool, _ignored("--eager")]
Trace = Annotated[bool, _ignored("--trace")]
NoRayUi = Annotated[bool, _ignored("--no-ray-ui")]
