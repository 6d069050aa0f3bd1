"""Plans the job for a `ludus` command: its roles, and the node of each process. Pure functions without I/O."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ludus.errors import UsageError
from ludus.launch.job import Job, Role, RoleRestart
from ludus.process.job_env import LEARNERS, WAIT
from ludus.transport.message_stream import PASSWORD

MAIN, RAY, WORKER, LEARNER = "main", "ray", "worker", "learner"
SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    PASSWORD,
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
)
"""Variables that are passed on as secrets whenever they are set."""

NodeUse = Literal["ray", "each", "one"]
"""How a command uses several nodes: through Ray, as one process on each node, or not at all."""

_NODE_USES: Mapping[tuple[str, ...], NodeUse] = {("train",): "ray", ("tune",): "ray", ("fleet", "worker"): "each"}
_RESTARTS: Mapping[str, RoleRestart] = {
    "train": "when-killed", "tune": "when-killed", "serve": "on-failure", "fleet": "on-failure",
}  # fmt: skip
_RAY_OPTIONS = ("--address", "--ray-address", "--local-mode")
IGNORED_OPTION = "--redis-password"
_URL_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


@dataclass(frozen=True)
class NodeRequest:
    """Nodes of a job. `cpus` and `gpus`: one value per node; the last value also applies to all further nodes.

    `minimum`: nodes that must have joined Ray, within `wait_s`, before work starts; None: all. `learners`: the first nodes that
    compute gradients; on node 0 the training itself does.
    """

    count: int = 1
    cpus: Sequence[int | None] = (None,)
    gpus: Sequence[int] = (0,)
    learners: int = 1
    minimum: int | None = None
    wait_s: float = 300.0

    def resources(self, node: int) -> tuple[int, int]:
        """Return the cores and GPUs of a node; 0 where they are not given."""
        return self.cpus[min(node, len(self.cpus) - 1)] or 0, self.gpus[min(node, len(self.gpus) - 1)] or 0


@dataclass(frozen=True)
class RuntimeEnv:
    """Interpreter and environment of the processes of a job. `secrets`: names of further variables to pass on."""

    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()


ONE_NODE = NodeRequest()
THIS_PYTHON = RuntimeEnv()


@dataclass(frozen=True)
class PlannedJob:
    """`notices`: sentences for the user about ignored or changed options."""

    job: Job
    notices: tuple[str, ...] = ()


def plan_job(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    name: str | None = None,
    nodes: NodeRequest = ONE_NODE,
    runtime: RuntimeEnv = THIS_PYTHON,
    grace_s: float = 60.0,
) -> PlannedJob:
    """Plan the job for a command line. `words`: the arguments of `ludus`. `environ`: where secrets are found. Raises UsageError."""
    words, notices = clean_command(words)
    use = node_use(words)
    several = nodes.count > 1
    if use == "one" and several:
        raise UsageError(
            f"`ludus {words[0]}` runs on one machine, and the job has {nodes.count} nodes.",
            "Leave --nodes out; train, tune and fleet worker use several.",
        )
    ray = nodes.count if use == "ray" and several else 0
    if ray and (option := next((word.split("=")[0] for word in words if option_of(word) in _RAY_OPTIONS), None)):
        raise UsageError(
            f"The job has {nodes.count} nodes and starts its own Ray cluster, and the command names another cluster or none.",
            f"Leave {option} out.",
        )
    if nodes.learners > 1 and (words[0] != "train" or nodes.learners > nodes.count):
        raise UsageError(
            f"`ludus {words[0]}` cannot learn on {nodes.learners} of {nodes.count} nodes.",
            "Only train has learners on several nodes, and at most one on each node.",
        )
    environment = dict(runtime.variables)
    cpus, gpus = nodes.resources(0)
    main = Role(
        MAIN,
        (runtime.python, "-P", "-m", "ludus.cli.main", *words),
        restart=_RESTARTS.get(words[0], "never"),
        environment=environment,
        cpus=cpus or 1,
        gpus=gpus,
    )
    others = tuple(_ray_roles(nodes, runtime)) if ray else ()
    if nodes.learners > 1:
        main = replace(main, environment={**environment, LEARNERS: str(nodes.learners - 1), WAIT: f"{nodes.wait_s:g}"})
        at = tuple(range(1, nodes.learners))
        command = (runtime.python, "-P", "-m", "ludus.distributed.learners.remote_rank")
        others += (Role(LEARNER, command, len(at), "always", environment, main.cpus, main.gpus, at),)
    if use == "each" and several:
        at = tuple(range(1, nodes.count))
        others = (Role(WORKER, main.command, len(at), "on-failure", main.environment, main.cpus, main.gpus, at),)
    secrets = tuple(dict.fromkeys([*runtime.secrets, *(name for name in SECRETS if environ.get(name))]))
    # Ray comes before main, so that it starts while the training imports its modules.
    job = Job(
        name or _default_name(words),
        (*others, main),
        MAIN,
        secrets,
        grace_s,
        nodes=nodes.count,
        ray=min(nodes.minimum or ray, ray),
        wait_s=nodes.wait_s,
    )
    return PlannedJob(job, tuple(notices))


def node_use(words: Sequence[str]) -> NodeUse:
    return next((use for start, use in _NODE_USES.items() if tuple(words[: len(start)]) == start), "one")


def _ray_roles(nodes: NodeRequest, runtime: RuntimeEnv) -> list[Role]:
    """Return one role for each run of consecutive nodes with equal resources; the first one contains the Ray head."""
    roles: list[Role] = []
    start = 0
    while start < nodes.count:
        cpus, gpus = nodes.resources(start)
        end = next((node for node in range(start, nodes.count) if nodes.resources(node) != (cpus, gpus)), nodes.count)
        words = [runtime.python, "-P", "-m", "ludus.launch.ray_role"]
        words += ["--cpus", str(cpus)] if cpus else []
        words += ["--gpus", str(gpus)] if gpus else []
        name = RAY if not roles else f"{RAY}-{len(roles) + 1}"
        at = tuple(range(start, end))
        roles.append(Role(name, tuple(words), len(at), "on-failure", dict(runtime.variables), cpus or 1, gpus, at))
        start = end
    return roles


def clean_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command without options that expose a password, and notices about them. Raises UsageError."""
    words = list(words)
    if words[:1] == ["ludus"]:
        words = words[1:]
    if words[:1] == [WORKER]:
        words = ["fleet", *words]
    if not words or words[0].startswith("-"):
        raise UsageError("There is no command to run.", "It comes after `--`: ludus submit --on slurm -- train CartPole-v1")
    kept: list[str] = []
    notices: list[str] = []
    rest = iter(words)
    for word in rest:
        if option_of(word) == IGNORED_OPTION:
            if "=" not in word:
                next(rest, None)
            notices.append(f"{IGNORED_OPTION} is ignored: Ray no longer uses a Redis password; every job has its own token")
            continue
        if _URL_PASSWORD.search(word):
            raise password_error()
        kept.append(word)
    return kept, notices


def password_error() -> UsageError:
    """Return the error about a URL with a password, which would become a part of a command."""
    return UsageError(
        "A password in a command is visible to all users of the machines it runs on.",
        f"Leave it out of the URL, and set {PASSWORD}, or for a store AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: "
        "they are passed on as secrets.",
    )


def option_of(word: str) -> str:
    """Return the option name of a word, with dashes for underscores."""
    return word.split("=")[0].replace("_", "-")


def _default_name(words: Sequence[str]) -> str:
    """Derive a job name from the command and its first argument, such as train-CartPole-v1."""
    subject = next((word for word in words[1:] if not word.startswith("-")), "")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", f"{words[0]}-{subject.rpartition('/')[2].removesuffix('.yaml')}").strip("-")
    return stem[:40].strip("-") or "job"
