"""The options of `ludus train`, each with what it says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus import trust
from ludus.cli import coach
from ludus.cli.run_argument import complete_run, run_place

RAY, FLEET, OLDER = "Ray", "Fleets", "Of older trainers"

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
        help="An experiment of the gallery, by its name or by Coach's; or a file: path.yaml, path.py, path.py:object.",
        show_default=False,
    ),
]
Level = Annotated[
    str | None,
    typer.Option("-lvl", "--level", help="Which environment of a preset: a level like hopper, or any ENV.", show_default=False),
]
CustomParameter = Annotated[
    list[str] | None,
    typer.Option(
        "-cp",
        "--custom_parameter",
        "--custom-parameter",
        metavar="KEY=VALUE;…",
        help="Keys, ours or Coach's, and values, which are read and never run; repeatable.",
        show_default=False,
    ),
]
OneExperiment = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help="Only this one of the file.", show_default=False)
]
ExperimentName = Annotated[
    str | None,
    typer.Option(
        "-e",
        "--experiment-name",
        "--experiment_name",
        help="Names the directory of its runs. Default: default; with -dc: fleet-TIME.",
        show_default=False,
    ),
]
EnvOption = Annotated[str | None, typer.Option("--env", "--name-env", help="The same as ENV.", show_default=False)]
Algorithm = Annotated[str | None, typer.Option("--run", help="Algorithm, or module:Class. Default: PPO.", show_default=False)]
NumEnvs = Annotated[int | None, typer.Option(help="Environments stepped together.", show_default=False)]
NumWorkers = Annotated[
    str | None,
    typer.Option(
        "-n", "--num-workers", "--num_workers", metavar="N|auto", help="Sampling processes; 0 = this one.", show_default=False
    ),
]
NumCpus = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Cores that collect experience: the same as --num-workers. The learner has one more: 35 fills a node of 36.",
        show_default=False,
    ),
]
NumGpus = Annotated[float | None, typer.Option(help="Accelerators for the learner.", show_default=False)]
NumLearners = Annotated[int | None, typer.Option(help="Processes that share every gradient.", show_default=False)]
NumSamples = Annotated[
    int | None, typer.Option(min=1, help="Trials, each with a seed of its own; more than 1 is a sweep.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same run.", show_default=False)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="timesteps, episode_return_mean, iterations, episodes or time_s; repeatable, or all as JSON.",
        show_default=False,
    ),
]
Config = Annotated[
    str | None, typer.Option("--config", metavar="JSON", help="Keys of config, over those of the file.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key, e.g. lr=1e-3 or model.use_lstm=true; repeatable.", show_default=False
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="csv|wandb|mlflow", help="Where numbers go besides TensorBoard; repeatable.", show_default=False),
]
LocalDir = Annotated[
    str,
    typer.Option("--local-dir", "-ep", "--experiment_path", metavar="DIR|URL", help="Where runs go; also s3://BUCKET/PREFIX."),
]
TempDir = Annotated[
    Path | None, typer.Option(help="Where sockets, and the session of a Ray, go while it runs. [TMPDIR]", show_default=False)
]
Project = Annotated[str | None, typer.Option(metavar="DIR|URL", help="With --trial: the run is DIR/NAME.", show_default=False)]
Trial = Annotated[str | None, typer.Option(help="Name of the run inside --project.", show_default=False)]
CheckpointFreq = Annotated[int | None, typer.Option(help="Checkpoint every N iterations.", show_default=False)]
CheckpointAtEnd = Annotated[
    bool | None,
    typer.Option("--checkpoint-at-end/--no-checkpoint-at-end", help="Checkpoint when it ends (the default).", show_default=False),
]
KeepCheckpoints = Annotated[
    int | None, typer.Option("--keep-checkpoints-num", help="Keep the newest N, and the best.", show_default=False)
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
LocalMode = Annotated[bool, typer.Option("--local-mode", help="Everything in this process, for debugging.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Json = Annotated[bool, typer.Option("--json", help="The last line of output is the result as JSON.")]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Log what happens; -vv: everything.", metavar="")]
Debug = Annotated[bool, typer.Option("--debug", help="Log everything; show tracebacks.")]

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "--ray-address",
        metavar="HOST:PORT|auto|local",
        help="Sample on all machines of this Ray cluster; local starts one here. [RAY_ADDRESS, ip_head]",
        show_default=False,
        rich_help_panel=RAY,
    ),
]
RayNumCpus = Annotated[
    int | None, typer.Option(min=1, help="Of a Ray that is started here.", show_default=False, rich_help_panel=RAY)
]
RayNumGpus = Annotated[
    int | None, typer.Option(min=0, help="Of a Ray that is started here: it finds them.", show_default=False, rich_help_panel=RAY)
]
RayNumNodes = Annotated[int | None, typer.Option(min=1, help="Emulated nodes: only 1.", show_default=False, rich_help_panel=RAY)]
RayMemory = Annotated[
    int | None,
    typer.Option(
        "--ray-object-store-memory", min=1, help="Bytes; of a Ray that is started here.", show_default=False, rich_help_panel=RAY
    ),
]

Distributed = Annotated[
    bool,
    typer.Option(
        "-dc",
        "--distributed_coach",
        "--distributed",
        help="A learner and -n workers, with a memory between them, wherever -dcp says.",
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
        help="Where they run, and what is between them: an INI file.",
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
        help="Seconds between checkpoints: checkpoint_time_s.",
        show_default=False,
        rich_help_panel=OLDER,
    ),
]
UntilSolved = Annotated[
    bool,
    typer.Option(
        "-asc",
        "--apply_stop_condition",
        help="Also stop at the return that the preset, or its environment, is known for.",
        rich_help_panel=OLDER,
    ),
]
UseCpu = Annotated[bool, typer.Option("-c", "--use_cpu", help="No accelerator.", rich_help_panel=OLDER)]
EvaluationWorker = Annotated[
    bool,
    typer.Option(
        "-ew", "--evaluation_worker", help="Evaluate in a process of its own: evaluation_num_workers: 1.", rich_help_panel=OLDER
    ),
]
ListPresets = Annotated[bool, typer.Option("-l", "--list", help="The same as ludus presets list.", rich_help_panel=OLDER)]
Noted = Annotated[bool, typer.Option(*coach.names(coach.NOTED), help="Have no meaning here; why is said.", rich_help_panel=OLDER)]
NotHere = Annotated[
    bool, typer.Option(*coach.names(coach.REFUSED), help="Are not here; what to do instead is said.", rich_help_panel=OLDER)
]

ScoreAttr = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-score-attr", help="What the best checkpoint has most of.", show_default=False, rich_help_panel=OLDER
    ),
]
UploadDir = Annotated[str | None, typer.Option(help="Not here.", show_default=False, rich_help_panel=OLDER)]
ResourcesPerTrial = Annotated[
    str | None, typer.Option(metavar="JSON", help="Cores of a trial of a sweep.", show_default=False, rich_help_panel=OLDER)
]
RedisPassword = Annotated[str | None, typer.Option(help="Has no meaning any more.", show_default=False, rich_help_panel=OLDER)]


def _noted(option: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(option, help="Has no meaning any more.", rich_help_panel=OLDER)
    return info


QueueTrials = Annotated[bool, _noted("--queue-trials")]
Torch = Annotated[bool, _noted("--torch")]
Eager = Annotated[bool, _noted("--eager")]
Trace = Annotated[bool, _noted("--trace")]
NoRayUi = Annotated[bool, _noted("--no-ray-ui")]
