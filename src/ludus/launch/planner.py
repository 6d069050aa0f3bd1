"""A `ludus` command as a job: which processes it takes on which node. Nothing is read, written or started here."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ludus.errors import UsageError
from ludus.launch.job import Job, Restart, Role
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
"""Handed on as secrets wherever they are set."""

Way = Literal["ray", "each", "one"]
"""A command uses all nodes through Ray; or is run on each of them; or on one."""

_WAYS: Mapping[tuple[str, ...], Way] = {("train",): "ray", ("tune",): "ray", ("fleet", "worker"): "each"}
_RESTARTS: Mapping[str, Restart] = {"train": "when-killed", "tune": "when-killed", "serve": "on-failure", "fleet": "on-failure"}
_OWN_RAY = ("--address", "--ray-address", "--local-mode")
IGNORED = "--redis-password"
_PASSWORD_INSIDE = re.compile(r"://[^/@\s]*:[^/@\s]+@")


@dataclass(frozen=True)
class Launch:
    """`notices`: what is different from what was written."""

    job: Job
    notices: tuple[str, ...] = ()


def launch(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    name: str | None = None,
    nodes: int = 1,
    cpus: Sequence[int | None] = (None,),
    gpus: Sequence[int] = (0,),
    learner_nodes: int = 1,
    min_nodes: int | None = None,
    wait_s: float = 300.0,
    grace_s: float = 60.0,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
) -> Launch:
    """`words`: as after `ludus`. `cpus`, `gpus`: of each node; fewer than nodes: the last one's of all others.

    `learner_nodes`: so many of the first nodes have a learner; that of the first is the training itself. Raises UsageError.
    """
    words, notices = cleaned(words)
    way = way_of(words)
    if way == "one" and nodes > 1:
        raise UsageError(
            f"`ludus {words[0]}` runs on one machine, and the job has {nodes} nodes.",
            "Leave --nodes out; train, tune and fleet worker use several.",
        )
    ray = nodes if way == "ray" and nodes > 1 and not any(option_of(word) in _OWN_RAY for word in words) else 0
    if way == "ray" and nodes > 1 and not ray:
        raise UsageError(
            f"The job has {nodes} nodes and a Ray of its own, and the command names another cluster or none.",
            f"Leave {_named(words)} out.",
        )
    interpreter = python or sys.executable
    main = Role(
        MAIN,
        (interpreter, "-P", "-m", "ludus.cli.main", *words),
        restart=_RESTARTS.get(words[0], "never"),
        environment=dict(environment or {}),
        cpus=_of(cpus, 0) or 1,
        gpus=_of(gpus, 0),
    )
    others: tuple[Role, ...] = ()
    if learner_nodes > 1 and (words[0] != "train" or learner_nodes > nodes):
        raise UsageError(
            f"`ludus {words[0]}` shall learn on {learner_nodes} of {nodes} nodes.",
            "Only train has learners on several nodes, and not more than there are.",
        )
    if ray:
        others = tuple(_ray_roles(interpreter, nodes, cpus, gpus, dict(environment or {})))
    if learner_nodes > 1:
        main = replace(main, environment={**main.environment, LEARNERS: str(learner_nodes - 1), WAIT: f"{wait_s:g}"})
        at = tuple(range(1, learner_nodes))
        words_there = (interpreter, "-P", "-m", "ludus.distributed.learners.remote_rank")
        others += (Role(LEARNER, words_there, len(at), "always", dict(environment or {}), main.cpus, main.gpus, at),)
    if way == "each" and nodes > 1:
        at = tuple(range(1, nodes))
        others = (Role(WORKER, main.command, len(at), "on-failure", main.environment, main.cpus, main.gpus, at),)
    kept = tuple(dict.fromkeys([*secrets, *(known for known in SECRETS if environ.get(known))]))
    wanted = min(min_nodes or ray, ray)
    # Ray before main, so that it starts while the training is still being imported.
    job = Job(name or _name(words), (*others, main), MAIN, kept, grace_s, nodes=nodes, ray=wanted, wait_s=wait_s)
    return Launch(job, tuple(notices))


def way_of(words: Sequence[str]) -> Way:
    return next((way for start, way in _WAYS.items() if tuple(words[: len(start)]) == start), "one")


def _ray_roles(
    python: str, nodes: int, cpus: Sequence[int | None], gpus: Sequence[int], environment: dict[str, str]
) -> list[Role]:
    """One role for all nodes of a kind; they follow one another, so the head's is the first."""
    roles: list[Role] = []
    at = 0
    while at < nodes:
        kind = (_of(cpus, at), _of(gpus, at))
        alike = next((node for node in range(at, nodes) if (_of(cpus, node), _of(gpus, node)) != kind), nodes)
        words = [python, "-P", "-m", "ludus.launch.ray_role"]
        words += ["--cpus", str(kind[0])] if kind[0] else []
        words += ["--gpus", str(kind[1])] if kind[1] else []
        name = RAY if not roles else f"{RAY}-{len(roles) + 1}"
        roles.append(
            Role(name, tuple(words), alike - at, "on-failure", environment, kind[0] or 1, kind[1], tuple(range(at, alike)))
        )
        at = alike
    return roles


def cleaned(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command without what must not be seen in a list of processes, and what is to be said about that. Raises UsageError."""
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
        if option_of(word) == IGNORED:
            if "=" not in word:
                next(rest, None)
            notices.append(f"{IGNORED} is ignored: Ray no longer uses a Redis password; every job has its own token")
            continue
        if _PASSWORD_INSIDE.search(word):
            raise UsageError(
                "A password in a command is seen by everyone on the machines it runs on.",
                f"Leave it out of the URL, and set {PASSWORD} here, or for a store AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: "
                "they are handed on.",
            )
        kept.append(word)
    return kept, notices


def option_of(word: str) -> str:
    """Its name; underscores do as well as dashes."""
    return word.split("=")[0].replace("_", "-")


def _of(values: Sequence[int | None], node: int) -> int:
    return values[min(node, len(values) - 1)] or 0


def _named(words: Sequence[str]) -> str:
    return next(word.split("=")[0] for word in words if option_of(word) in _OWN_RAY)


def _name(words: Sequence[str]) -> str:
    """From the command and what it is about: train-CartPole-v1."""
    about = next((word for word in words[1:] if not word.startswith("-")), "")
    stem = re.sub(r"[^A-Za-z0-9]+", "-", f"{words[0]}-{about.rpartition('/')[2].removesuffix('.yaml')}").strip("-")
    return stem[:40].strip("-") or "job"
