"""The options of `ludus train`, each with what it says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.run_argument import complete_run, run_place
from ludus.cli.training import coach_options
from ludus.core import trust

RAY, FLEET, OLDER = "Ray", "Fleets", "RLlib and Coach compatibility"

Env = Annotated[str | None, typer.Argument(help="Environment: a Gymnasium id or module:function.", show_default=False)]
File = Annotated[
    Path | None, typer.Option("-f", "--file", "--config-file", help="A YAML file with experiments.", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--preset",
        metavar="NAME|PATH",
        help="Preset by its name or Coach's name (see `ludus presets list`), or a file: path.yaml, path.py, path.py:object.",
        show_default=False,
    ),
]
Level = Annotated[
    str | None,
    typer.Option("-lvl", "--level", help="Environment of a preset: a level such as hopper, or any ENV.", show_default=False),
]
CustomParameter = Annotated[
    list[str] | None,
    typer.Option(
        "-cp",
        "--custom_parameter",
        "--custom-parameter",
        metavar="KEY=VALUE;…",
        help="Overrides KEY=VALUE with our or Coach's key names; values are parsed, never executed; repeatable.",
        show_default=False,
    ),
]
OneExperiment = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help="Run only this experiment of the file.", show_default=False)
]
ExperimentName = Annotated[
    str | None,
    typer.Option(
        "-e",
        "--experiment-name",
        "--experiment_name",
        help="Experiment name, the directory of its runs. Default: default; with -dc: fleet-TIME.",
        show_default=False,
    ),
]
EnvOption = Annotated[
    str | None, typer.Option("--env", "--name-env", help="Environment; same as the argument ENV.", show_default=False)
]
Algorithm = Annotated[str | None, typer.Option("--run", help="Algorithm, or module:Class. Default: PPO.", show_default=False)]
NumEnvs = Annotated[int | None, typer.Option(help="Environments stepped together by each worker.", show_default=False)]
NumWorkers = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--num-workers",
        "--num_workers",
        metavar="N|auto",
        help="Number of sampling processes; 0 samples in this process; or auto.",
        show_default=False,
    ),
]
NumCpus = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Cores for sampling; same as --num-workers. The learner uses one more: 35 fills a node with 36 cores.",
        show_default=False,
    ),
]
NumGpus = Annotated[float | None, typer.Option(help="Number of GPUs for the learner.", show_default=False)]
NumLearners = Annotated[
    int | None, typer.Option(help="Number of learner processes that average their gradients.", show_default=False)
]
NumSamples = Annotated[
    int | None, typer.Option(min=1, help="Number of trials with different seeds; more than 1 is a sweep.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(help="Random seed.", show_default=False)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Stop condition: timesteps, episode_return_mean, iterations, episodes or time_s; repeatable, or one JSON object.",
        show_default=False,
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="JSON", help="Keys of config as JSON; they override those of the file.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set any key, e.g. lr=1e-3 or model.use_lstm=true; repeatable.", show_default=False
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="csv|wandb|mlflow", help="Tracker besides TensorBoard: wandb, mlflow or csv; repeatable.", show_default=False
    ),
]
LocalDir = Annotated[
    str,
    typer.Option("--local-dir", "-ep", "--experiment_path", metavar="DIR|URL", help="Directory for runs, or s3://BUCKET/PREFIX."),
]
TempDir = Annotated[Path | None, typer.Option(help="Directory for sockets and Ray session files. [TMPDIR]", show_default=False)]
Project = Annotated[
    str | None, typer.Option(metavar="DIR|URL", help="With --trial: the run directory is DIR/NAME.", show_default=False)
]
Trial = Annotated[str | None, typer.Option(help="Name of the run in --project.", show_default=False)]
CheckpointFreq = Annotated[int | None, typer.Option(help="Save a checkpoint every N iterations.", show_default=False)]
CheckpointAtEnd = Annotated[
    bool | None,
    typer.Option(
        "--checkpoint-at-end/--no-checkpoint-at-end", help="Save a checkpoint at the end (the default).", show_default=False
    ),
]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(
        "--keep-checkpoints-num", help="Number of newest checkpoints to keep; the best is always kept.", show_default=False
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[RUN]",
        help="Continue that run (a directory, last, EXPERIMENT, the end of its name); without RUN the newest of each experiment.",
        show_default=False,
        callback=run_place,
        autocompletion=complete_run,
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
    ),
]


def _trust_names(given: bool) -> bool:
    if given:
        trust.allow_everything()
    return given


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust_names,
        help="Import whatever code a stored run names (environment, wrappers, models). Only for runs from people you trust.",
    ),
]
LocalMode = Annotated[bool, typer.Option("--local-mode", help="Run everything in this process, for debugging.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Log more; -vv logs everything.", metavar="")]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything; show tracebacks.")]

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
    int | None, typer.Option(min=1, help="Emulated Ray nodes; only 1 is supported.", show_default=False, rich_help_panel=RAY)
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
        help="Train distributed: a learner and -n workers connected by Redis, as the file -dcp says.",
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
        help="INI file: orchestrator, Redis and data store of the distributed training.",
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
        rich_help_panel=OLDER,
    ),
]
UntilSolved = Annotated[
    bool,
    typer.Option(
        "-asc",
        "--apply_stop_condition",
        help="Also stop at the target return of the preset or environment.",
        rich_help_panel=OLDER,
    ),
]
UseCpu = Annotated[bool, typer.Option("-c", "--use_cpu", help="Use no GPU.", rich_help_panel=OLDER)]
EvaluationWorker = Annotated[
    bool,
    typer.Option(
        "-ew",
        "--evaluation_worker",
        help="Evaluate in a separate process; same as evaluation_num_workers: 1.",
        rich_help_panel=OLDER,
    ),
]
ListPresets = Annotated[
    bool, typer.Option("-l", "--list", help="List presets; same as `ludus presets list`.", rich_help_panel=OLDER)
]
Noted = Annotated[
    bool, typer.Option(*coach_options.names(coach_options.NOTED), help="Ignored; prints the reason.", rich_help_panel=OLDER)
]
NotHere = Annotated[
    bool,
    typer.Option(
        *coach_options.names(coach_options.REFUSED), help="Not supported; prints the alternative.", rich_help_panel=OLDER
    ),
]

ScoreAttr = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-score-attr", help="Metric that decides which checkpoint is best.", show_default=False, rich_help_panel=OLDER
    ),
]
UploadDir = Annotated[
    str | None, typer.Option(help="Not supported; use --local-dir s3://…", show_default=False, rich_help_panel=OLDER)
]
ResourcesPerTrial = Annotated[
    str | None, typer.Option(metavar="JSON", help="CPUs per trial of a sweep.", show_default=False, rich_help_panel=OLDER)
]
RedisPassword = Annotated[
    str | None, typer.Option(help="Ignored; accepted for old RLlib command lines.", show_default=False, rich_help_panel=OLDER)
]


def _noted(option: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        option, help="Ignored; accepted for old RLlib command lines.", rich_help_panel=OLDER
    )
    return info


QueueTrials = Annotated[bool, _noted("--queue-trials")]
Torch = Annotated[bool, _noted("--torch")]
Eager = Annotated[bool, _noted("--eager")]
Trace = Annotated[bool, _noted("--trace")]
NoRayUi = Annotated[bool, _noted("--no-ray-ui")]
