"""Plans the job for a `ludus` command on Kubernetes: where its runs go, its roles, its grace period. Pure functions without I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.errors import UsageError
from ludus.io.addresses import ANY_HOST
from ludus.launch.job import Job, Role, check_job
from ludus.launch.kubernetes import fleet, serve
from ludus.launch.kubernetes.objects import GAMECORE_TOKEN
from ludus.launch.kubernetes.pod import GAMECORE_PORT, RUNS, SECRETS
from ludus.launch.kubernetes.settings import KubernetesSettings, RunStorage
from ludus.launch.planner import SECRETS as KNOWN_SECRETS
from ludus.launch.planner import NodeRequest, PlannedJob, RuntimeEnv, password_error, plan_job
from ludus.storage.s3_url import S3Url
from ludus.transport.message_stream import split_password

PYTHON = "python"
"""The interpreter in the image."""

_LOCAL_DIR = ("--local-dir", "-ep", "--experiment-path")


def plan_kubernetes(
    words: Sequence[str],
    settings: KubernetesSettings,
    *,
    environ: Mapping[str, str],
    name: str | None = None,
    nodes: NodeRequest,
    runtime: RuntimeEnv,
    grace_s: float = 60.0,
    storage_given: bool = True,
) -> PlannedJob:
    """Plan the job for a command line. `storage_given`: whether the user has chosen a storage, possibly none. Raises UsageError."""
    command = CommandLine.of(words)
    cores = max(1, int(settings.resources.cpus))
    nodes = replace(nodes, cpus=(cores,), gpus=(settings.resources.gpus,))
    if settings.scale.workers is not None and command.words[:2] != ("fleet", "learner"):
        raise UsageError(
            f"`ludus {command.words[0]}` has no workers in other pods.",
            "--workers is for `fleet learner`; train and tune use --nodes, serve uses --replicas.",
        )
    if command.words[0] in ("train", "tune"):
        command = _with_run_storage(command, settings.storage, storage_given, nodes.count)
    elif command.words[0] == "serve":
        command = command.with_default("--host", ANY_HOST).with_default("--token-file", serve.TOKEN_FILE)
        grace_s = max(grace_s, command.number("--drain-s", default=serve.DRAIN_S) + 10)
    elif command.words[:2] == ("gamecore", "serve"):
        command = command.with_default("--host", ANY_HOST).with_default("--token-file", f"{SECRETS}/{GAMECORE_TOKEN}")
        if command.number("--port", default=GAMECORE_PORT) != GAMECORE_PORT:
            raise UsageError(f"On Kubernetes a gamecore server listens on port {GAMECORE_PORT}.", "Leave --port out.")
    forwarded = (
        {} if settings.extras.service_account else environ
    )  # keys of this shell would override the identity of the account
    planned = plan_job(command.words, environ=forwarded, name=name, nodes=nodes, runtime=runtime, grace_s=grace_s)
    job = planned.job
    notices = (*planned.notices, *secret_notices(job.secrets, runtime.secrets, environ))
    if settings.scale.workers is not None:
        arguments = command.words[2:]
        job = fleet_job(job.name, arguments, settings.scale.workers.least, settings, base=job)
    return PlannedJob(replace(job, place=job.place or _place(settings.storage)), notices)


def secret_notices(secrets: Sequence[str], named: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return notices about variables of the shell that contain credentials and are not named in `secrets`."""
    unnamed = [variable for variable in KNOWN_SECRETS if environ.get(variable) and variable not in named]
    sent = ", ".join(variable for variable in unnamed if variable in secrets)
    kept = ", ".join(variable for variable in unnamed if variable not in secrets)
    return [
        *([f"environment variables passed on as secrets: {sent}"] if sent else []),
        *(
            [f"not passed on, because the job has a service account: {kept}; name them in `secrets` if it needs them"]
            if kept
            else []
        ),
    ]


def fleet_job(name: str, arguments: Sequence[str], workers: int, settings: KubernetesSettings, *, base: Job) -> Job:
    """Plan a fleet. `arguments`: of `ludus fleet learner`. `base`: the job whose secrets, environment and grace period it gets.

    Without --memory and without a given Redis, the job starts its own. Raises UsageError.
    """
    command = CommandLine(tuple(arguments))
    store = command.value("--store") or run_place(settings.storage, name)
    if not store:
        raise UsageError(
            "A fleet needs a place for its run that all pods reach.", "Add --storage s3://…, pvc:NAME or nfs:SERVER:/PATH."
        )
    memory = command.value("--memory") or settings.redis.url or fleet.REDIS_URL
    if split_password(memory)[1] is not None:
        raise password_error()
    connection = ("--memory", memory, "--store", store)
    for option, value in zip(connection[::2], connection[1::2], strict=True):
        command = command.with_default(option, value)
    if command.value("--num-workers", "-n") is None:
        command = command.with_default("--num-workers", str(workers))
    main = next(role for role in base.roles if role.name == base.main)
    ludus = main.command[: main.command.index("ludus.cli.main") + 1]
    roles = [
        Role(
            fleet.LEARNER, (*ludus, "fleet", "learner", *command.words), 1, "when-killed", main.environment, main.cpus, main.gpus
        ),
        Role(fleet.WORKER, (*ludus, "fleet", "worker", *connection), workers, "always", main.environment),
    ]
    if memory == fleet.REDIS_URL:
        roles.insert(0, Role(fleet.MEMORY, ("redis-server",), 1, "always"))
    return check_job(replace(base, name=name, roles=tuple(roles), main=fleet.LEARNER, place=store))


def run_place(storage: RunStorage, name: str) -> str:
    """Return the place of one run below the storage, as pods see it; "" without storage."""
    if storage.url:
        return S3Url.parse(storage.url).below(name).url
    return f"{RUNS}/{name}" if storage.is_volume else ""


def _place(storage: RunStorage) -> str:
    if storage.nfs:
        return f"nfs:{storage.nfs}"
    return storage.url or (f"pvc:{storage.claim}" if storage.claim else "")


def _with_run_storage(command: CommandLine, storage: RunStorage, given: bool, nodes: int) -> CommandLine:
    if command.value(*_LOCAL_DIR) is not None or command.value("--resume") is not None:
        return command
    if not given:
        raise UsageError(
            "The run would be lost with its pod: no storage is given.",
            "Add --storage s3://BUCKET/PREFIX, pvc:NAME, new:50Gi or nfs:SERVER:/PATH; --storage none if the run may be lost.",
        )
    if command.words[0] == "tune" and (storage.url or (nodes > 1 and not storage.is_volume)):
        raise UsageError(
            f"A sweep needs a directory that its processes share, not {'S3' if storage.url else 'one of each pod'}.",
            "Use --storage pvc:NAME, new:50Gi or nfs:SERVER:/PATH.",
        )
    return command.with_default("--local-dir", storage.url or RUNS)


@dataclass(frozen=True)
class CommandLine:
    """Arguments of a command, in which options are looked up and added. Options are written `--name value` or `--name=value`."""

    words: tuple[str, ...]

    @staticmethod
    def of(words: Sequence[str]) -> CommandLine:
        """Raises UsageError if there is no command."""
        kept = tuple(words[1:] if words[:1] == ["ludus"] else words)
        if not kept:
            raise UsageError(
                "There is no command to run.", "It comes after `--`: ludus submit --on kubernetes … -- train CartPole-v1"
            )
        return CommandLine(("fleet", *kept) if kept[0] == "worker" else kept)

    def value(self, *names: str) -> str | None:
        """Return the last value of an option; None if it is not given."""
        found = None
        for at, word in enumerate(self.words):
            option, equals, value = word.partition("=")
            if option.replace("_", "-") in names:
                found = value if equals else next(iter(self.words[at + 1 : at + 2]), "")
        return found

    def number(self, *names: str, default: float) -> float:
        """Return the last value of an option as a number. Raises UsageError."""
        text = self.value(*names)
        try:
            found = default if text is None else float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise UsageError(f"{names[0]} {text!r} is not a number.", f"Use a number such as {default:g}.")
        return found

    def with_default(self, name: str, value: str) -> CommandLine:
        """Return the command with an option, unless it is given."""
        return self if self.value(name) is not None else CommandLine((*self.words, name, value))


def main_words(job: Job) -> tuple[str, ...]:
    """Return the arguments of `ludus` of the main role; () if its command is another program."""
    command = next(role.command for role in job.roles if role.name == job.main)
    return command[command.index("ludus.cli.main") + 1 :] if "ludus.cli.main" in command else ()
