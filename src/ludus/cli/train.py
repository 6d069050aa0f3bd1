"""`ludus train`: an environment or a YAML file in, a trained agent out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.experiment.experiment import Result


def train(
    env: Annotated[str | None, typer.Argument(help="Environment: a Gymnasium id or module:function.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="A YAML file with one experiment.", show_default=False)
    ] = None,
    env_option: Annotated[str | None, typer.Option("--env", "--name-env", help="The same as ENV.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option(help="Algorithm, or module:Class. [default: PPO]", show_default=False)] = None,
    num_envs: Annotated[int | None, typer.Option(help="Environments stepped together.", show_default=False)] = None,
    num_workers: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Sampling processes; 0 = this one.", show_default=False)
    ] = None,
    num_learners: Annotated[int | None, typer.Option(help="Processes that share every gradient.", show_default=False)] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            "--ray-address",
            metavar="HOST:PORT|auto|local",
            help="Sample on all machines of this Ray cluster; local starts one here. [RAY_ADDRESS, ip_head]",
            show_default=False,
        ),
    ] = None,
    ray_num_cpus: Annotated[int | None, typer.Option(help="Of a Ray that is started here.", show_default=False)] = None,
    ray_object_store_memory: Annotated[
        int | None, typer.Option(help="Bytes; of a Ray that is started here.", show_default=False)
    ] = None,
    num_cpus: Annotated[int | None, typer.Option(help="Cores that this process may use.", show_default=False)] = None,
    num_gpus: Annotated[float | None, typer.Option(help="Accelerators for the learner.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="timesteps, episode_return_mean, iterations or time_s; repeatable.", show_default=False
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key, e.g. config.lr=1e-3 or model.use_lstm=true; repeatable.",
            show_default=False,
        ),
    ] = None,
    local_dir: Annotated[Path, typer.Option(help="Where runs go.")] = Path("runs"),
    project: Annotated[Path | None, typer.Option(help="With --trial: the run is DIR/NAME.", show_default=False)] = None,
    trial: Annotated[str | None, typer.Option(help="Name of the run inside --project.", show_default=False)] = None,
    checkpoint_freq: Annotated[int | None, typer.Option(help="Checkpoint every N iterations.", show_default=False)] = None,
    checkpoint_at_end: Annotated[
        bool | None,
        typer.Option(
            "--checkpoint-at-end/--no-checkpoint-at-end", help="Checkpoint when it ends (the default).", show_default=False
        ),
    ] = None,
    keep_checkpoints_num: Annotated[int | None, typer.Option(help="Keep the newest N, and the best.", show_default=False)] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this directory.", show_default=False)] = None,
    restore: Annotated[str | None, typer.Option(help="Start a new run from this checkpoint.", show_default=False)] = None,
    local_mode: Annotated[bool, typer.Option("--local-mode", help="Everything in this process, for debugging.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="The last line of output is the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log everything; show tracebacks.")] = False,
) -> None:
    """Train an agent. Ctrl-C saves a checkpoint and stops."""
    from ludus import config as configs

    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    stops = configs.stop_values(stop or [])
    if resume is not None:
        fixed = {
            "ENV": env or env_option, "-f": file, "--run": run, "--restore": restore, "--set": set_, "--seed": seed,
            "--num-envs": num_envs, "--num-workers": num_workers, "--num-learners": num_learners, "--num-cpus": num_cpus, "--num-gpus": num_gpus,
            "--project": project, "--trial": trial, "--checkpoint-freq": checkpoint_freq,
            "--checkpoint-at-end": checkpoint_at_end, "--keep-checkpoints-num": keep_checkpoints_num,
        }  # fmt: skip
        given = [name for name, value in fixed.items() if value is not None]
        if given:
            raise UsageError(
                f"--resume continues a run as it is configured; {', '.join(given)} cannot be changed.",
                "Use --restore to start a new run from it.",
            )
    data = {} if resume is not None else experiment_from(
        file, env or env_option, run, set_ or [], stops,
        {"num_envs_per_worker": num_envs, "num_workers": 0 if local_mode else _workers(num_workers), "num_learners": 0 if local_mode else num_learners, "torch_threads": num_cpus, "learner_threads": num_cpus, "num_gpus": num_gpus, "seed": seed},
        {"checkpoint_freq": checkpoint_freq, "checkpoint_at_end": checkpoint_at_end, "keep_checkpoints_num": keep_checkpoints_num},
    )  # fmt: skip
    from ludus.cli.display import Display, say

    if not quiet:
        say("starting …", to_stderr=json_)
    from ludus.experiment import experiment

    def announce(sentence: str) -> None:
        if not quiet:
            say(sentence, to_stderr=json_)

    cluster = None if local_mode else experiment.cluster_of(address, ray_num_cpus, ray_object_store_memory)
    with Display(quiet=quiet, to_stderr=json_) as display:
        told: dict[str, Any] = {"sinks": [display], "announce": announce, "cluster": cluster}
        if resume is not None:
            result = experiment.resume(resume, stop=stops, **told)
        else:
            result = experiment.start(data, local_dir=local_dir, project=project, trial=trial, restore=restore, **told)
    _conclude(result, quiet=quiet, as_json=json_)


def _workers(given: str | None) -> int | str | None:
    return int(given) if given is not None and given.isdigit() else given


def experiment_from(
    file: Path | None,
    env: str | None,
    run: str | None,
    overrides: list[str],
    stop: dict[str, Any],
    settings: dict[str, Any],
    top: dict[str, Any],
) -> dict[str, Any]:
    """The experiment that the options describe: the file first, then single options, then --set."""
    from ludus import config as configs

    data: dict[str, Any] = {}
    if file is not None:
        experiments = configs.load_experiments(file)
        if len(experiments) > 1:
            raise UsageError(f"{file} holds {len(experiments)} experiments; this version runs one.", "Split the file.")
        ((name, found),) = experiments.items()
        data = {"name": name, **found}
    if env is not None:
        data["env"] = env
    if run is not None:
        data["run"] = run
    if "env" not in data:
        raise UsageError("Which environment?", "ludus train CartPole-v1   or   ludus train -f experiment.yaml")
    if stop:
        data["stop"] = stop
    data |= {key: value for key, value in top.items() if value is not None}
    given = {key: value for key, value in settings.items() if value is not None}
    inner = {k: v for k, v in (data.get("config") or {}).items() if configs.ALIASES.get(k, k) not in given}
    data["config"] = inner | given
    for assignment in overrides:
        configs.override(data, assignment)
    return data


def _conclude(result: Result, *, quiet: bool, as_json: bool) -> None:
    from ludus.cli.display import here, say
    from ludus.config import EXTERNAL

    interrupted = result.stopped_by.startswith("interrupted")
    if not quiet:
        mean = result.to_json()["episode_return_mean"]
        shown = "no episode ended" if mean is None else f"mean return {mean:.1f}"
        say(
            f"{result.stopped_by} · {shown} · {result.to_json()['timesteps']:,} steps in {result.metrics.get('time_s', 0):.1f} s",
            to_stderr=as_json,
        )
        say(f"run         {result.run_dir}", to_stderr=as_json)
        if result.checkpoint:
            say(f"checkpoint  {result.checkpoint}", to_stderr=as_json)
            played = result.env == EXTERNAL
            then = f"serve it    {here('ludus')} serve" if played else f"watch it    {here('ludus')} rollout"
            say(f"{then} {result.run_dir}{'' if played else ' --video'}", to_stderr=as_json)
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    if interrupted:
        raise typer.Exit(130)
