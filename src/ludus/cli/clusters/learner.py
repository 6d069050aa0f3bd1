"""`ludus learner`: the machine that learns, started by hand on the first machine of a list; actors join it from theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ludus.cli.clusters import roles as r
from ludus.cli.help import HelpApp
from ludus.errors import UsageError

if TYPE_CHECKING:
    from ludus.launch.hostfile import Hostfile

app = HelpApp(help="Start and stop the learner of a run on a list of machines.", no_args_is_help=True)

EXPERIMENT = "experiment.yaml"
UNNAMED = "default"
"""What an experiment is called that was given as an environment and options: its environment says more."""

_ELSEWHERE = {
    "address": "--address: the run has a Ray of its own",
    "distributed": "-dc: its workers come by `ludus actor start`",
    "local_mode": "--local-mode: its workers are on other machines",
}

_Num = Annotated[int, typer.Option("--num", min=0, help="Workers on this machine as well. Default: none; actors run them.")]
_Wait = Annotated[float, typer.Option("--wait", min=1, metavar="SECONDS", help="Seconds that the training waits for actors.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def start(
    ctx: typer.Context,
    iplist: r.IpList,
    num: _Num = 0,
    node: r.Node = None,
    port: r.Port = r.PORT,
    token_file: r.TokenFile = None,
    log_dir: r.LogDir = None,
    wait: _Wait = 86_400.0,
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

    (_, *words), said = clean_command(["train", *ctx.args])
    listed = load_hostfile(iplist)
    here = find_local_address(listed, os.environ, node)
    meeting = r.meeting_of(here, port, token_file, log_dir)
    if here.node == 0:
        job, more = _learning(listed, meeting, words, num, wait)
        said += more
        made = roles.ensure_token(meeting.token_file, listed, create=True)
    else:
        made = roles.ensure_token(meeting.token_file, listed, create=False)
        assert here.node is not None
        joins = listed.nodes[here.node].slots if listed.entries[here.node].role == "learner" else 0
        if not joins and not num:
            raise UsageError(f"{listed.source} has this machine as an actor.", "Use `ludus actor start` here.")
        job = roles.joining_job("learner", listed, meeting, os.environ, roles.NodeContribution(num, joins))
    r.show_list(listed, here, port)
    for notice in (*r.clean(os.environ), *said):
        r.say(notice)
    if here.node != 0 and words:
        r.say(f"{' '.join(words)}: without meaning here, the first machine of the list says what is trained")
    if made:
        r.say(f"a token was made: {meeting.token_file}; every other machine needs it, for example by")
        print(roles.copy_command(meeting.token_file, listed), flush=True)
    status = r.begin(job, LocalOrchestrator(), "learner", replaces=replace)
    r.say(f"{status.id} is {status.state}")
    r.say(f"log: {meeting.logs / 'learner' / ('train.log' if here.node == 0 else 'rank_*.log')}")


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
    as_json: r.AsJson = False,
) -> None:
    """Show the state of the learner of this machine and its workers. Exit code 1 if there is none."""
    r.show_status("learner", r.select_runs(iplist, node, port), as_json, machines=nodes)


def _learning(listed: Hostfile, meeting: Any, words: Sequence[str], num: int, wait_s: float) -> tuple[Any, list[str]]:
    """The job of the first machine, and what is to be said about it. Raises UsageError for a training that could not begin."""
    from ludus.launch import roles

    there = Path(EXPERIMENT).absolute() if Path(EXPERIMENT).is_file() else None
    given = list(words) or (["-f", str(there)] if there else [])
    asked = training_of(given) if given else Training(None, None)
    found, said = roles.train_arguments(words, listed, workers=asked.workers, learners=asked.learners, experiment=there)
    names = _checked(found)
    here, elsewhere = asked.learners or listed.head.slots, roles.count_remote_learners(listed)
    said.append(f"learner_num: {here + elsewhere}" + f" ({elsewhere} on other machines)" * bool(elsewhere))
    subject = roles.TrainingTask(str(Path.cwd()), names)
    return roles.learner_job(listed, meeting, found, os.environ, cpus=num, wait_s=wait_s, task=subject), said


class Training(NamedTuple):
    """Of a training, as its arguments or the file that they name say it; None: they do not. `experiments`: as far as they are known."""

    workers: int | str | None
    learners: int | None
    experiments: Mapping[str, dict[str, Any]] = {}


def _checked(words: Sequence[str]) -> tuple[str, ...]:
    """Whether it can be trained, before anything is started whose log nobody reads; what it is, by names. Raises ConfigError."""
    from ludus.errors import ConfigError
    from ludus.experiments.validation import validate

    found = training_of(words).experiments
    wrong = [line for name, data in found.items() for line in validate.validate_experiment({"name": name, **data})]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(str(data.get("env")) if name == UNNAMED else name for name, data in found.items())


def training_of(words: Sequence[str]) -> Training:
    """Read arguments of `ludus train` as that would. Raises UsageError; click's own for an option that there is not."""
    from ludus.cli import main
    from ludus.cli.training import train

    group: Any = typer.main.get_command(main.app)
    with group.commands["train"].make_context("ludus train", list(words)) as ctx:
        given = ctx.params
    for name, why in _ELSEWHERE.items():
        if given.get(name):
            raise UsageError(f"{why}.", "Leave it out.")
    workers = train.workers_of(given["num_workers"], given["num_cpus"])
    if given["resume"] not in (None, train.NEWEST):
        return Training(workers or "of the run", given["num_learners"] or 1)  # it goes on as it began
    source = train.read_source(given["file"], given["preset"], given["level"])
    settings = {"num_workers": workers, "num_learners": given["num_learners"]}
    named = train.environment_of(given["env"], given["env_option"], None)
    found = train.experiments_from(
        source, given["experiment"], given["experiment_name"], {"env": named}, {}, settings, train.mapping_of("--config", given["config"]),
        given["set_"] or [], custom=given["custom_parameter"] or (), say=lambda sentence: None,
    )  # fmt: skip
    configs = [_config(data) for data in found.values()]
    every = [config.get("num_workers") for config in configs]
    shared = next((n for config in configs if (n := config.get("num_learners"))), None)
    return Training(every[0] if all(every) else None, shared, found)


def _config(data: dict[str, Any]) -> dict[str, Any]:
    from ludus.config.translation import canonical_config, translate_experiment

    inner = translate_experiment(data).data.get("config", {})
    return canonical_config(inner) if isinstance(inner, dict) else {}
