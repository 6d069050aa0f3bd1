"""`ludus fleet`: a learner and workers on machines that share only Redis and a store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.help import HelpApp
from ludus.cli.output import Printer
from ludus.cli.training import options as o
from ludus.core import trust
from ludus.errors import NotFound, UsageError
from ludus.transport.message_stream import PASSWORD, split_password

app = HelpApp(
    help="Train on machines that share only Redis and a store (S3, NFS); workers may join and leave at any time.",
    no_args_is_help=True,
)

_Memory = Annotated[
    str,
    typer.Option(
        metavar="URL", help=f"Redis server: redis://[USER@]HOST:PORT/DB, rediss://…, or module:Class. Password: {PASSWORD}."
    ),
]
_Store = Annotated[str, typer.Option(metavar="PLACE", help="Location of the run: s3://BUCKET/PREFIX, or a shared directory.")]
_PasswordFile = Annotated[Path | None, typer.Option("--memory-password-file", help="File with the Redis password.")]


@app.command()
def learner(
    memory: _Memory,
    store: _Store,
    env: o.Env = None,
    file: o.File = None,
    preset: o.Preset = None,
    level: o.Level = None,
    experiment: o.OneExperiment = None,
    env_option: o.EnvOption = None,
    run: o.Algorithm = None,
    stop: o.Stop = None,
    num_workers: Annotated[
        int | None,
        typer.Option("-n", "--num-workers", min=1, help="Number of workers; a training batch has one segment from each."),
    ] = None,
    num_envs: o.NumEnvs = None,
    num_gpus: o.NumGpus = None,
    seed: o.Seed = None,
    config: o.Config = None,
    set_: o.Set = None,
    custom_parameter: o.CustomParameter = None,
    experiment_name: o.ExperimentName = None,
    checkpoint_freq: o.CheckpointFreq = None,
    keep_checkpoints_num: o.KeepCheckpoints = None,
    password_file: _PasswordFile = None,
    trust_: o.Trust = False,
    quiet: o.Quiet = False,
    json_: o.Json = False,
    verbose: o.Verbose = 0,
    debug: o.Debug = False,
) -> None:
    """Train on the experience that workers send. An existing run at PLACE is resumed; rerunning the same command is safe."""
    from ludus.cli.training import train
    from ludus.config.overrides import parse_stop_values
    from ludus.config.search_space import is_sweep
    from ludus.experiments.runs import remote_runs
    from ludus.experiments.runs.run_dir import CONFIG

    train.log_at(2 if debug else verbose)
    printer = Printer(quiet, json_)
    memory = _export_password(memory, password_file, printer)
    source = train.read_source(file, preset, level)
    if source is not None:
        from ludus.models.custom.loader import add_search_directory

        add_search_directory(source.parent)
    top = {
        "run": run, "env": env or env_option, "memory": memory, "checkpoint_freq": checkpoint_freq,
        "keep_checkpoints_num": keep_checkpoints_num,
    }  # fmt: skip
    settings = {"num_workers": num_workers, "num_envs_per_worker": num_envs, "num_gpus": num_gpus, "seed": seed}
    stops = parse_stop_values(stop or [])
    options = train.ExperimentOptions(
        config=train.parse_mapping("--config", config), top=top, stop=stops, settings=settings,
        custom=custom_parameter or (), assignments=set_ or (),
    )  # fmt: skip
    directory = remote_runs.directory_of(store)
    remote_runs.fetch(directory)
    runner = train.ExperimentRunner(printer, (None, None, None))
    began = (directory / CONFIG).exists()
    if began and source is None and top["env"] is None:
        from ludus.experiments.runs.run_dir import Run

        given = {"config": config, "set": set_ or None, **settings, **top, "memory": None, "env": None}
        if ignored := [f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None]:
            raise UsageError(
                f"{store} already holds a run, which keeps its settings; {', '.join(ignored)} cannot be changed.",
                "Name the environment or the file to see what differs, or leave the option out.",
            )
        data = {**Run.open(directory).config(), "memory": memory, **({"stop": stops} if stops else {})}
        name = str(data.pop("name"))
    else:
        found = train.experiments_from(source, options, experiment=experiment, name=experiment_name, say=printer)
        if len(found) > 1:
            raise UsageError(f"{source} holds {len(found)} experiments, and a fleet trains one.", "Add --experiment.")
        ((name, data),) = found.items()
    if is_sweep(data):
        raise UsageError("This experiment is a sweep, and a fleet trains one run.", "Give every key one value.")
    if began:
        result = runner.continue_run(directory, {"name": name, **data})
        if result is None:  # workers that still wait may have missed the end of the run
            from ludus.distributed.redis.messages import END

            remote_runs.store_of(directory).put(END, b"")
            if json_:
                print(json.dumps(train.read_result(directory).to_json()), flush=True)
    else:
        result = runner.run_with_display(
            lambda experiment, common: experiment.train({"name": name, **data}, place=store, **common)
        )
    runner.conclude({name: result})


@app.command()
def worker(
    memory: _Memory,
    store: _Store,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="Number of worker processes on this machine.")] = 1,
    env: Annotated[
        str | None, typer.Option("--env", help="Environment to accept; a run in the store with another one is refused.")
    ] = None,
    compression: Annotated[str, typer.Option(help="Compression of segments: none, lz4 or zstd.")] = "none",
    when_full: Annotated[str, typer.Option(help="Action when the learner falls behind: wait, or drop segments.")] = "wait",
    password_file: _PasswordFile = None,
    trust_: o.Trust = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    debug: o.Debug = False,
) -> None:
    """Sample for the learner of a run, with its newest weights, until the run ends or SIGTERM. Workers may join and leave at any time."""
    from ludus.cli.training import train

    train.log_at(2 if debug else verbose)
    printer = Printer(quiet)
    memory = _export_password(memory, password_file, printer)
    if compression not in ("none", "lz4", "zstd"):
        raise UsageError(f"--compression {compression} is not none, lz4 or zstd.")
    if when_full not in ("wait", "drop"):
        raise UsageError(f"--when-full {when_full} is not wait or drop.")
    from ludus.distributed.redis.worker import run_workers
    from ludus.transport.message_stream import check_url

    check_url(memory)
    ended = run_workers(memory, store, num, compression, when_full, env, announce=printer)
    printer("the run is over" if ended == "over" else "stopped")


@app.command()
def clear(memory: _Memory, store: _Store, password_file: _PasswordFile = None) -> None:
    """Delete the data of a run from Redis: unused segments and status messages."""
    from ludus.distributed.redis.learner import channel_of
    from ludus.storage.base import open_store
    from ludus.transport.message_stream import open_message_stream

    memory = _export_password(memory, password_file, Printer())
    try:
        channel = channel_of(open_store(store))
    except NotFound:
        raise UsageError(f"{store} holds no run of a fleet.") from None
    exchange = open_message_stream(memory, channel, 1)
    try:
        left = exchange.waiting()
        exchange.drop()
    finally:
        exchange.close()
    print(f"deleted {left} segments and the status messages of {store}")


def _export_password(memory: str, file: Path | None, say: Callable[[str], None]) -> str:
    """Move the password from the URL or the file to the environment of this process and its children; returns the URL."""
    if file is not None:
        try:
            os.environ[PASSWORD] = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UsageError(f"--memory-password-file {file} cannot be read: {error.strerror}.") from error
    memory, password = split_password(memory)
    trust.allow(memory)
    if password is not None:
        os.environ[PASSWORD] = password
        say(f"all users of this machine can see a password on the command line; use {PASSWORD} or --memory-password-file")
    return memory
