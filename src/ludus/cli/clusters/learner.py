"""`ludus learner`: start, stop and show the learner of a run on the first machine of a list; `ludus actor` joins it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ludus.cli.clusters import roles as r
from ludus.cli.common_options import AsJson
from ludus.cli.help import HelpApp
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.launch.hostfile import Hostfile

app = HelpApp(help="Start and stop the learner of a run on a list of machines.", no_args_is_help=True)

EXPERIMENT = "experiment.yaml"
UNNAMED = "default"
"""Name of an experiment given by an environment and options; messages use its environment instead."""

_UNSUPPORTED = {
    "address": "--address is not supported: `ludus learner` starts its own Ray cluster",
    "distributed": "-dc is not supported: `ludus actor start` starts the workers",
    "local_mode": "--local-mode is not supported: the workers are on other machines",
}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start(
    ctx: typer.Context,
    iplist: r.IpList,
    num: Annotated[
        int, typer.Option("--num", min=0, help="Number of workers on this machine; usually only actors run them.")
    ] = 0,
    node: r.Node = None,
    port: r.Port = r.PORT,
    token_file: r.TokenFile = None,
    log_dir: r.LogDir = None,
    wait: Annotated[
        float, typer.Option("--wait", min=1, metavar="SECONDS", help="Seconds that the training waits for actors.")
    ] = 86_400.0,
    replace: r.Replace = False,
) -> None:
    """Start the learner in the background. Further arguments are those of `ludus train`; without any, ./experiment.yaml is trained.

    Run it on the first machine of the list. On another machine it joins as an additional learner, once per slot. Starting a run again replaces its learner.
    """
    from ludus.launch import roles
    from ludus.launch.hostfile import load_hostfile
    from ludus.launch.local import LocalOrchestrator
    from ludus.launch.local_address import find_local_address
    from ludus.launch.planner import clean_command

    (_, *words), notices = clean_command(["train", *ctx.args])
    listed = load_hostfile(iplist)
    here = find_local_address(listed, os.environ, node)
    rendezvous = r.make_rendezvous(here, port, token_file, log_dir)
    if here.node == 0:
        job, more = _head_job(listed, rendezvous, words, num, wait)
        notices += more
        created = roles.ensure_token(rendezvous.token_file, listed, create=True)
    else:
        created = roles.ensure_token(rendezvous.token_file, listed, create=False)
        assert here.node is not None
        joins = listed.nodes[here.node].slots if listed.entries[here.node].role == "learner" else 0
        if not joins and not num:
            raise UsageError(f"{listed.source} lists this machine as an actor.", "Use `ludus actor start` here.")
        job = roles.joining_job("learner", listed, rendezvous, os.environ, roles.NodeContribution(num, joins))
    r.show_list(listed, here, port)
    for notice in (*r.clean_environment(os.environ), *notices):
        r.say(notice)
    if here.node != 0 and words:
        r.say(f"{' '.join(words)} is ignored here: the first machine of the list defines the training")
    if created:
        r.say(f"created a token: {rendezvous.token_file}; copy it to every other machine, for example with")
        print(roles.copy_command(rendezvous.token_file, listed), flush=True)
    status = r.start_role(job, LocalOrchestrator(), "learner", replaces=replace)
    r.say(f"{status.id} is {status.state}")
    r.say(f"log: {rendezvous.logs / 'learner' / ('train.log' if here.node == 0 else 'rank_*.log')}")


@app.command()
def stop(
    iplist: r.RunList = None,
    node: r.Node = None,
    port: r.OnlyPort = None,
    everything: r.All = False,
    at_once: r.AtOnce = False,
) -> None:
    """Stop the learner of this machine; it saves a checkpoint first."""
    r.stop("learner", r.select_runs(iplist, node, port), everything, at_once)


@app.command()
def status(
    iplist: r.RunList = None,
    node: r.Node = None,
    port: r.OnlyPort = None,
    nodes: r.Machines = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the learner of this machine and its workers. Exit code 1 if there is none."""
    r.show_status("learner", r.select_runs(iplist, node, port), as_json, machines=nodes)


def _head_job(listed: Hostfile, rendezvous: Any, words: Sequence[str], num: int, wait_s: float) -> tuple[Any, list[str]]:
    """The job of the first machine, and notices about it. Raises UsageError for a training that could not start."""
    from ludus.launch import roles

    file = Path(EXPERIMENT).absolute() if Path(EXPERIMENT).is_file() else None
    given = list(words) or (["-f", str(file)] if file else [])
    plan = parse_training(given) if given else TrainingPlan(None, None)
    arguments, notices = roles.train_arguments(words, listed, workers=plan.workers, learners=plan.learners, experiment=file)
    task = roles.TrainingTask(str(Path.cwd()), _check_training(arguments))
    local, remote = plan.learners or listed.head.slots, roles.count_remote_learners(listed)
    notices.append(f"learner_num: {local + remote}" + f" ({remote} on other machines)" * bool(remote))
    return roles.learner_job(listed, rendezvous, arguments, os.environ, cpus=num, wait_s=wait_s, task=task), notices


class TrainingPlan(NamedTuple):
    """Workers, learners and experiments of a command line of `ludus train`; None where it does not set them."""

    workers: int | str | None
    learners: int | None
    experiments: Mapping[str, dict[str, Any]] = {}


def _check_training(words: Sequence[str]) -> tuple[str, ...]:
    """Raise ConfigError if the training cannot start, before a background process would fail; returns its experiment names."""
    from ludus.errors import ConfigError
    from ludus.experiments.validation import validate

    found = parse_training(words).experiments
    wrong = [line for name, data in found.items() for line in validate.validate_experiment({"name": name, **data})]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(str(data.get("env")) if name == UNNAMED else name for name, data in found.items())


def parse_training(words: Sequence[str]) -> TrainingPlan:
    """Parse arguments of `ludus train`. Raises UsageError, and click's error for an unknown option."""
    from ludus.cli import main
    from ludus.cli.training import train

    group: Any = typer.main.get_command(main.app)
    with group.commands["train"].make_context("ludus train", list(words)) as ctx:
        given = ctx.params
    for name, why in _UNSUPPORTED.items():
        if given.get(name):
            raise UsageError(f"{why}.", "Leave it out.")
    workers = train.parse_workers(given["num_workers"], given["num_cpus"])
    if given["resume"] not in (None, train.NEWEST):
        return TrainingPlan(workers or "of the run", given["num_learners"] or 1)  # a resumed run keeps its settings
    source = train.read_source(given["file"], given["preset"], given["level"])
    settings = {"num_workers": workers, "num_learners": given["num_learners"]}
    named = train.choose_environment(given["env"], given["env_option"], None)
    options = train.ExperimentOptions(
        config=train.parse_mapping("--config", given["config"]), top={"env": named}, settings=settings,
        custom=given["custom_parameter"] or (), assignments=given["set_"] or (),
    )  # fmt: skip
    found = train.experiments_from(
        source, options, experiment=given["experiment"], name=given["experiment_name"], say=lambda sentence: None
    )
    configs = [_config(data) for data in found.values()]
    every = [config.get("num_workers") for config in configs]
    shared = next((n for config in configs if (n := config.get("num_learners"))), None)
    return TrainingPlan(every[0] if all(every) else None, shared, found)


def _config(data: dict[str, Any]) -> dict[str, Any]:
    from ludus.config.translation import canonical_config, translate_experiment

    inner = translate_experiment(data).data.get("config", {})
    return canonical_config(inner) if isinstance(inner, dict) else {}
