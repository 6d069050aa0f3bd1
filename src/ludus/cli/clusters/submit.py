"""`ludus submit`: run any `ludus` command as a job on this machine, over SSH, with Slurm or on Kubernetes."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.cli.clusters import jobs
from ludus.cli.help import COMPATIBILITY, option_in
from ludus.cli.interrupts import detach_on_interrupt
from ludus.cli.output import notify
from ludus.errors import LudusError, UnknownName, UsageError

if TYPE_CHECKING:
    from ludus.launch.cluster_file import ClusterConfig
    from ludus.launch.job import Job, Orchestrator
    from ludus.launch.slurm.backend import SlurmOrchestrator

SETTINGS = {"allow_interspersed_args": False}
"""Options after the first word belong to the submitted command, even without `--`."""

_job, _machines, _ssh, _slurm, _kubernetes, _output = map(option_in, ("Job", "Machines", "SSH", "Slurm", "Kubernetes", "Output"))

Say = Callable[[str], None]


def submit(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND [OPTION]...", help="Command to run, as after `ludus`: train CartPole-v1 …"),
    ] = None,
    on: Annotated[
        str | None, _job("--on", metavar="local|ssh|slurm|kubernetes|module:Class", help="Launcher of the job. Default: local.")
    ] = None,
    file: Annotated[
        Path | None, _job("-f", "--file", help="Cluster file with these settings; options on the command line override it.")
    ] = None,
    name: Annotated[str | None, _job("--name", help="Prefix of the job id.")] = None,
    env: Annotated[
        list[str] | None, _job("--env", metavar="NAME=VALUE", help="Environment variable of the job's processes; repeatable.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        _job("--secret", metavar="NAME", help="Variable to pass on from here, never written to a file; repeatable."),
    ] = None,
    grace_s: Annotated[float | None, _job("--grace-s", help="Seconds to shut down after SIGTERM. Default: 60.")] = None,
    nodes: Annotated[int | None, _machines("--nodes", "-N", help="Number of machines; train and tune use all of them.")] = None,
    cpus: Annotated[int | None, _machines("--cpus", help="Cores to use on each machine.")] = None,
    gpus: Annotated[int | None, _machines("--gpus", help="GPUs of each machine.")] = None,
    min_nodes: Annotated[int | None, _machines("--min-nodes", help="Machines to start with. Default: all.")] = None,
    learner_nodes: Annotated[int | None, _machines("--learner-nodes", help="Machines with a learner. Default: 1.")] = None,
    wait_s: Annotated[float | None, _machines("--wait-s", help="Seconds to wait for the machines. Default: 300.")] = None,
    setup: Annotated[
        list[str] | None,
        _machines("--setup", metavar="LINE", help="Shell line to run first, such as `module load …`; repeatable."),
    ] = None,
    python: Annotated[str | None, _machines("--python", help="Python interpreter on the machines.")] = None,
    workdir: Annotated[str | None, _machines("--workdir", metavar="DIR", help="Working directory on the machines.")] = None,
    iplist: Annotated[
        Path | None, _ssh("--iplist", metavar="FILE", help="List of machines, one `ip user port slots` per line, or YAML.")
    ] = None,
    identity: Annotated[Path | None, _ssh("--identity", metavar="FILE", help="Private SSH key.")] = None,
    known_hosts: Annotated[Path | None, _ssh("--known-hosts", metavar="FILE", help="Known-hosts file.")] = None,
    copy: Annotated[
        list[Path] | None,
        _machines(
            "--copy",
            metavar="PATH",
            help="SSH, Kubernetes: file or directory to copy to the working directory first; repeatable.",
        ),
    ] = None,
    time: Annotated[
        str | None,
        _slurm("--time", "-t", metavar="[D-]HH:MM:SS", help="Slurm time limit; the job then continues in a new allocation."),
    ] = None,
    memory: Annotated[
        str | None,
        _machines("--memory", metavar="SIZE", help="Slurm: memory per node, e.g. 32G. Kubernetes: per pod, e.g. 32Gi."),
    ] = None,
    account: Annotated[str | None, _slurm("--account", "-A", help="Slurm account to charge.")] = None,
    partition: Annotated[str | None, _slurm("--partition", "-p", help="Slurm partition.")] = None,
    qos: Annotated[str | None, _slurm("--qos", help="Quality of service.")] = None,
    constraint: Annotated[str | None, _slurm("--constraint", "-C", help="Required node features.")] = None,
    extra: Annotated[
        list[str] | None,
        _slurm("--extra", metavar="OPTION", help="Other sbatch option, e.g. --extra=--mail-type=END; repeatable."),
    ] = None,
    requeue: Annotated[
        bool | None, _slurm("--requeue/--no-requeue", help="Requeue the job when its time limit is reached. Default: yes.")
    ] = None,
    signal_s: Annotated[int | None, _slurm("--signal-s", help="Seconds to save before the limit. Default: 120.")] = None,
    interactive: Annotated[
        bool, _slurm("--interactive", help="Run in the current salloc allocation; without one, request one.")
    ] = False,
    namespace: Annotated[
        str | None, _kubernetes("--namespace", help="Namespace. Default: that of the kubeconfig's context.")
    ] = None,
    context: Annotated[str | None, _kubernetes("--context", help="Context of the kubeconfig. Default: the current one.")] = None,
    image: Annotated[str | None, _kubernetes("--image", metavar="NAME:TAG", help="Container image with Ludus.")] = None,
    storage: Annotated[
        str | None,
        _kubernetes(
            "--storage",
            metavar="PLACE",
            help="Place of the runs: s3://BUCKET/PREFIX, pvc:NAME, new:50Gi (a new volume claim), nfs:SERVER:/PATH, or none.",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        _kubernetes("--workers", metavar="N|MIN-MAX", help="Pods of the workers of `fleet learner`; a range follows the load."),
    ] = None,
    replicas: Annotated[
        str | None, _kubernetes("--replicas", metavar="N|MIN-MAX", help="Pods of `serve`; a range follows the load.")
    ] = None,
    redis: Annotated[
        str | None, _kubernetes("--redis", metavar="URL", help="Redis of a fleet. Default: one of the job's own.")
    ] = None,
    gamecore: Annotated[
        bool | None, _kubernetes("--gamecore/--no-gamecore", help="Run a gamecore server beside the training.")
    ] = None,
    flavor: Annotated[
        str | None, _kubernetes("--flavor", metavar="plain|kuberay", help="Objects of a Ray cluster. Default: plain.")
    ] = None,
    render: Annotated[
        Path | None, _kubernetes("--render", metavar="DIR", help="Write the objects as YAML files to DIR instead of submitting.")
    ] = None,
    redis_password: Annotated[
        str | None, option_in(COMPATIBILITY)("--redis-password", help="Ignored; accepted for old command lines.")
    ] = None,
    dry_run: Annotated[bool, _output("--dry-run", help="Print the files and commands without doing anything.")] = False,
    wait: Annotated[
        bool, _output("--wait", help="Follow the log until the job is over and exit with its code. Ctrl-C leaves it running.")
    ] = False,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object on the last line.")] = False,
    quiet: Annotated[bool, _output("--quiet", "-q", help="Print only the job id.")] = False,
) -> None:
    """Run a `ludus` command as a job on this machine, over SSH, with Slurm or on Kubernetes; print its id.

    ludus submit --on slurm --nodes 3 --time 02:00:00 -- train ALE/Pong-v5 --run APPO --num-workers auto
    """
    from ludus.launch.cluster_file import ClusterConfig, load_cluster_file, open_backend, plan_command
    from ludus.launch.job import check_job

    say: Say = (lambda sentence: None) if quiet else notify
    if redis_password is not None:
        say("--redis-password is ignored: Ray no longer uses a Redis password; every job has its own token")
    base = load_cluster_file(file) if file is not None else ClusterConfig()
    target = base.merge(
        on=on, name=name, nodes=nodes, min_nodes=min_nodes, learner_nodes=learner_nodes, wait_s=wait_s, cpus=cpus, gpus=gpus, memory=memory,
        environment=_environment(base, env), secrets=_extend(base.secrets, secret), setup=_extend(base.setup, setup),
        python=python, workdir=workdir, grace_s=grace_s, iplist=iplist, identity=absolute(identity), known_hosts=absolute(known_hosts),
        copy=_extend(base.copy_, copy), time=time, account=account, partition=partition, qos=qos, constraint=constraint,
        extra=_extend(base.extra, extra), requeue=requeue, signal_s=signal_s, namespace=namespace, context=context, image=image,
        storage=storage, workers=workers, replicas=replicas, redis=redis, gamecore=gamecore, flavor=flavor,
    )  # fmt: skip
    if target.on == "local" and target.workdir is not None:
        _change_directory(Path(target.workdir))
    launch = plan_command(target, words or [], {} if render else os.environ)  # files are the same in every shell
    check_command(command_of(launch.job))
    check_job(launch.job, None if render else os.environ)  # also for --dry-run, which must not print an invalid job
    for notice in launch.notices:
        say(notice)
    orchestrator = open_backend(target, command_of(launch.job))
    if render is not None:
        write_rendered(target, render, orchestrator.render(launch.job), say)
    elif dry_run:
        files = orchestrator.render(launch.job)
        if (command := getattr(orchestrator, "command", None)) is not None:
            files["command"] = f"{command()}\n"
        if interactive and not _in_allocation():
            words = salloc_command(_require_slurm(target, orchestrator).salloc_words(launch.job), sys.argv[1:])
            files["command"] = shlex.join(words) + "\n"
        print(_format_files(target, files, as_json))
    elif interactive:
        raise typer.Exit(run_interactively(target, orchestrator, launch.job))
    else:
        _submit(target.on, orchestrator, launch.job, say, wait=wait, as_json=as_json)


def write_rendered(target: ClusterConfig, directory: Path, files: dict[str, str], say: Say) -> None:
    """Write the objects of a Kubernetes job as files. Existing files of other names are left alone. Raises UsageError."""
    if target.on != "kubernetes":
        raise UsageError(f"--render is for --on kubernetes, not for {target.on}.", "--dry-run prints what would be written.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}.") from error
    for name in files:
        print(directory / name)
    claims = [name for name in files if name.startswith("persistentvolumeclaim-") and name not in files["kustomization.yaml"]]
    volume = f", and the volume by kubectl apply -f {shlex.quote(str(directory / claims[0]))}" if claims else ""
    say(f"create the Secret as secret.yaml.example says{volume}; then: kubectl apply -k {shlex.quote(str(directory))}")


def absolute(path: Path | None) -> Path | None:
    """Make a path absolute: it is stored with the job and read again from other directories."""
    try:
        return path and path.expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{path} is in the home directory of a user unknown on this machine.") from error


def _change_directory(workdir: Path) -> None:
    """Enter the working directory: local jobs run in the directory they are submitted from."""
    try:
        os.chdir(workdir.expanduser())
    except OSError as error:
        raise UsageError(f"--workdir {workdir}: {error.strerror}.") from error


def _submit(on: str, orchestrator: Orchestrator, job: Job, say: Say, *, wait: bool, as_json: bool) -> None:
    jobs.add_orchestrator(on)
    job_id = orchestrator.submit(job)
    if not wait:
        print(json.dumps(_job_handle(on, orchestrator, job, job_id).to_json()) if as_json else job_id, flush=True)
        say(f"submitted to {on}; `ludus jobs logs -f {job_id}` follows its log, `ludus jobs cancel {job_id}` stops it")
        return
    say(f"{job_id} is submitted to {on}; Ctrl-C leaves it running")
    with detach_on_interrupt(jobs.STILL_RUNNING.format(id=job_id)):
        ended = follow(_job_handle(on, orchestrator, job, job_id), job.main, as_json=as_json)
    if as_json:
        print(json.dumps(ended.to_json()))
    raise typer.Exit(jobs.conclude(ended, last_lines=False))


def _job_handle(on: str, orchestrator: Orchestrator, job: Job, job_id: str) -> jobs.JobHandle:
    """The submitted job; if its status cannot be queried, one with the id and the error as reason."""
    from ludus.launch.job import JobStatus

    try:
        return jobs.JobHandle(on, orchestrator, orchestrator.status(job_id))
    except LudusError as error:
        return jobs.JobHandle(on, orchestrator, JobStatus(job_id, job.name, "pending", reason=str(error)))


def follow(found: jobs.JobHandle, main: str, *, as_json: bool) -> jobs.JobHandle:
    """Print the log of the main role until the job is over; if the connection breaks, keep waiting without the log."""
    try:
        for line in found.orchestrator.logs(found.id, role=main, follow=True):
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)
    except UsageError:
        raise
    except LudusError as error:
        notify(f"the log of {found.id} cannot be read any longer: {error}")
    ended = jobs.wait_for_end(found, math.inf)
    assert ended is not None
    return jobs.JobHandle(found.on, found.orchestrator, ended)


# -- Slurm allocations (--interactive) --------------------------------------------------------------------------------------------


def run_interactively(target: ClusterConfig, orchestrator: Orchestrator, job: Job) -> int:
    """Run the job in the foreground of the current allocation and return its exit code.

    Without an allocation, replaces this process by `salloc`, which runs the same command again in a new one.
    """
    slurm = _require_slurm(target, orchestrator)
    if _in_allocation():
        return slurm.run_here(job)
    words = salloc_command(slurm.salloc_words(job), sys.argv[1:])
    sys.stdout.flush()
    try:
        os.execvp(words[0], words)  # noqa: S606 # keeps our terminal, signals and exit code
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be run: {error.strerror}.", "--interactive needs Slurm on this machine.") from error


def _require_slurm(target: ClusterConfig, orchestrator: Orchestrator) -> SlurmOrchestrator:
    from ludus.launch.slurm.backend import SlurmOrchestrator

    if not isinstance(orchestrator, SlurmOrchestrator):
        raise UsageError(f"--interactive needs Slurm and cannot be used with --on {target.on}.", "Use --wait.")
    return orchestrator


def _in_allocation() -> bool:
    return bool(os.environ.get("SLURM_JOB_ID"))


def salloc_command(salloc: Sequence[str], words: Sequence[str]) -> list[str]:
    """This command in a new allocation, without --dry-run and the ignored --redis-password."""
    from ludus.launch.planner import IGNORED_OPTION, option_of

    kept: list[str] = []
    skip = False
    for word in words:
        if skip or option_of(word) == IGNORED_OPTION:
            skip = not skip and "=" not in word
        elif word != "--dry-run":
            kept.append(word)
    return [*salloc, sys.executable, "-P", "-m", "ludus.cli.main", *kept]


# -- submitted command --------------------------------------------------------------------------------------------------------


def command_of(job: Job) -> list[str]:
    """The command line of the job after `ludus`."""
    main = next(role for role in job.roles if role.name == job.main)
    return list(main.command[main.command.index("ludus.cli.main") + 1 :])


def check_command(words: Sequence[str]) -> None:
    """Parse the command line as the job will, to report errors before it is queued. Raises UnknownName, click's usage errors."""
    from typer.main import get_command

    from ludus.cli.main import app
    from ludus.core.plugins import did_you_mean

    command: Any = get_command(app)
    context: Any = command.context_class(command, info_name="ludus")
    rest = list(words)
    while hasattr(command, "list_commands"):
        known = command.list_commands(context)
        if not rest or rest[0] not in known:
            prefix = " ".join(["ludus", *words[: len(words) - len(rest)]])
            error = f"`{prefix}` has no command {rest[0]!r}." if rest else f"`{prefix}` needs a command."
            raise UnknownName(error, did_you_mean(rest[0] if rest else "", known))
        context = command.context_class(command.get_command(context, rest[0]), info_name=rest.pop(0), parent=context)
        command = context.command
    command.make_context(context.info_name, rest, parent=context.parent)


def _environment(target: ClusterConfig, given: Sequence[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    found = dict(target.environment)
    for word in given:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(
                f"--env {name} has no value.", f"Use --env {name}=…, or --secret {name} to pass on the value set here."
            )
        found[name] = value
    return found


def _extend(known: Sequence[Any], given: Sequence[Any] | None) -> list[str] | None:
    """The values of the file with those of the command line; None if the command line has none."""
    return [*map(str, known), *map(str, given)] if given else None


def _format_files(target: ClusterConfig, files: dict[str, str], as_json: bool) -> str:
    if as_json:
        return json.dumps({"on": target.on, "files": files})
    if target.on == "kubernetes":  # one stream of documents, for kubectl
        shown = {name: text for name, text in files.items() if name != "kustomization.yaml"}
        return "".join(_comment(text) if name.endswith(".example") else f"---\n{text}" for name, text in shown.items()).rstrip(
            "\n"
        )
    return "\n".join(f"==> {name} <==\n{text.rstrip(chr(10))}\n" for name, text in files.items()).rstrip("\n")


def _comment(text: str) -> str:
    """Return the lines of a YAML file as comments: what kubectl must not create from the stream."""
    return "".join(line if line.startswith("#") else f"# {line}" for line in text.splitlines(keepends=True))
