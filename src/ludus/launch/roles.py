"""Plans the jobs of `ludus learner`, `ludus actor` and `ludus cluster`: a learner on the first machine, actors on any machine.

Each is a local job on its machine, in any order. They share only the head's address, a port and a token. Nothing is started here.
"""

from __future__ import annotations

import contextlib
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.errors import UsageError
from ludus.launch.hostfile import Hostfile, MachineRole
from ludus.launch.job import Job, Role
from ludus.launch.job_dir import make_private, state_dir
from ludus.launch.local_address import LocalAddress
from ludus.launch.planner import SECRETS
from ludus.process.auth import write_token
from ludus.process.job_env import JobEnv

PORT = 9610
"""Default port of the head, which uses the next two as well: machines that start independently cannot agree on one.

It is outside of Linux' range for outgoing connections and of the range that jobs choose from.
"""

WAIT_S = 86_400.0
"""How long a learner waits for actors, which are started by hand."""

ANY_ACTOR = "any-actor"
"""Stands for the address of an actor, which need not be in the hostfile. Messages about missing nodes show it."""

GRACE_S = 120.0
MAIN, RAY, LIFELINE, HEAD, NODE = "main", "ray", "lifeline", "head", "node"
LEARNER, ACTOR = "learner", "actor"
TOKEN_FILE = "LUDUS_TOKEN_FILE"  # noqa: S105 - the name of a variable
TOKEN = "token"  # noqa: S105
GAMECORE = "GAMECORE_SERVER_ADDR"
ADVERTISE = "LUDUS_ADVERTISE"

EXPERIMENTS = "LUDUS_LEARNER_TRAINS"
"""Names of the learner's experiments, quoted for a shell. With PWD it makes up the `TrainingTask`."""

_MIN_TOKEN, _MAX_TOKEN = 16, 4096
_PYTHON = (sys.executable, "-P", "-m")
_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_RAY_ROLE, _LIFELINE_MODULE = "ludus.launch.ray_role", "ludus.launch.ssh.lifeline"


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a run connect to each other. `logs`: directory for the logs of this machine."""

    here: LocalAddress
    token_file: Path
    logs: Path
    port: int = PORT

    @property
    def address(self) -> str:
        """HOST:PORT of the head, which identifies the run."""
        return f"{_bracket_ipv6(self.here.head)}:{self.port}"


@dataclass(frozen=True)
class TrainingTask:
    """What a learner trains. It distinguishes a restart of the same run from a start that would replace another run.

    `directory`: its working directory, which contains its runs. `experiments`: empty if --resume names a run.
    """

    directory: str
    experiments: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        return {"PWD": self.directory, EXPERIMENTS: shlex.join(self.experiments)}

    @staticmethod
    def of(job: Job) -> TrainingTask | None:
        """Return the task of a learner's job; None if the job joins the training of another machine."""
        variables = next((role.environment for role in job.roles if role.name == job.main), {})
        if not variables.get("PWD") or EXPERIMENTS not in variables:
            return None
        return TrainingTask(variables["PWD"], tuple(shlex.split(variables[EXPERIMENTS])))

    def is_same_run(self, other: TrainingTask) -> bool:
        unknown = not self.experiments or not other.experiments
        return self.directory == other.directory and (unknown or set(self.experiments) == set(other.experiments))

    def __str__(self) -> str:
        return f"{', '.join(self.experiments) or 'a run'} in {self.directory}"


@dataclass(frozen=True)
class NodeContribution:
    """What a machine adds to a run. `cpus`: cores for workers; 0: none. `learners`: number of learner processes.

    `gamecore`: HOST:PORT of the gamecore server of its workers. `advertise`: address of this machine for that server's games.
    `share_weights`: the learner on the same machine runs the workers itself, with its own weights.
    """

    cpus: int = 0
    learners: int = 0
    gamecore: str = ""
    advertise: str = ""
    share_weights: bool = False


def check_family(*addresses: str) -> None:
    """Raises UsageError."""
    for address in addresses:
        if ":" in address:
            raise UsageError(
                f"{address} is an IPv6 address, and the machines of a run connect by IPv4.",
                "Write the IPv4 address; in YAML as `address`, if SSH uses the IPv6 address.",
            )


# -- jobs -----------------------------------------------------------------------------------------------------------------


def learner_job(
    hosts: Hostfile,
    rendezvous: Rendezvous,
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpus: int = 0,
    wait_s: float = WAIT_S,
    task: TrainingTask | None = None,
) -> Job:
    """Plan the job of the head: Ray, the lifeline server and the training. `words`: of `ludus train`. `cpus`: for workers on the head.

    The training waits for all learners of the hostfile, and for one actor if `cpus` is 0.
    """
    wanted = 1 if cpus else 2
    addresses = (rendezvous.here.address, *(node.node_address for node in hosts.nodes[1:]))
    addresses += (ANY_ACTOR,) * (wanted - len(addresses))
    env = JobEnv(addresses, 0, rendezvous.port, rendezvous.token_file, wanted, wait_s)
    variables, logs = role_environment(env), rendezvous.logs / LEARNER
    main = role_environment(replace(env, learners=count_remote_learners(hosts))) | (task.environment() if task else {})
    return Job(
        LEARNER,
        (
            Role(RAY, (*_PYTHON, _RAY_ROLE, "--cpus", str(cpus)), 1, "on-failure", variables, log=str(logs / "ray.log")),
            Role(LIFELINE, (*_PYTHON, _LIFELINE_MODULE, "serve"), 1, "on-failure", variables, log=str(logs / "lifeline.log")),
            Role(MAIN, (*_PYTHON, "ludus.cli.main", "train", *words), 1, "when-killed", main, log=str(logs / "train.log")),
        ),
        MAIN,
        secrets=tuple(name for name in SECRETS if environ.get(name)),
        grace_s=GRACE_S,
        place=rendezvous.address,
    )


def joining_job(
    part: MachineRole,
    hosts: Hostfile,
    rendezvous: Rendezvous,
    environ: Mapping[str, str],
    share: NodeContribution,
) -> Job:
    """Plan the job of workers, learners or both that join a head until they are stopped, on another machine or on the head itself.

    They wait for a head, and rejoin after it has been restarted.
    """
    here = rendezvous.here
    node = here.node or len(hosts.nodes)  # a further node if it is not listed, or is the head itself
    others = [each.node_address for each in hosts.nodes[1:]]
    addresses = [here.head, *others[: node - 1], here.address, *others[node:]]
    variables = role_environment(JobEnv(tuple(addresses), node, rendezvous.port, rendezvous.token_file, 1))
    if share.gamecore:
        variables[GAMECORE] = share.gamecore
    if share.advertise:
        variables[ADVERTISE] = share.advertise
    logs = rendezvous.logs / part
    roles = []
    if share.cpus:
        words = ["--cpus", str(share.cpus), *(["--gamecore", share.gamecore] if share.gamecore else []), "--log-dir", str(logs)]
        words += [*(["--share-weights"] if share.share_weights else []), "--stay"]
        ray_log = str(logs / "ray.log")
        roles.append(Role(RAY, (*_PYTHON, _RAY_ROLE, *words), 1, "always", variables, cpus=share.cpus, log=ray_log))
    if share.learners:
        command, log = (*_PYTHON, "ludus.distributed.learners.remote_rank"), str(logs / "rank_{index}.log")
        roles.append(Role(LEARNER, command, share.learners, "always", variables, log=log))
    # It ends with the learner and is restarted, to wait for the next one.
    roles.append(
        Role(MAIN, (*_PYTHON, _LIFELINE_MODULE, "hold", "--stay"), 1, "always", variables, log=str(logs / "monitor.log"))
    )
    return Job(
        part,
        tuple(roles),
        MAIN,
        secrets=tuple(name for name in SECRETS if environ.get(name)),
        grace_s=GRACE_S,
        place=rendezvous.address,
    )


def role_environment(env: JobEnv) -> dict[str, str]:
    """Return the variables of a role. On loopback, Ray must be told that it is alone, or it uses another address of this machine."""
    alone = {_ALONE: "0"} if env.nodes[0].startswith("127.") else {}
    return env.environment() | alone


def count_remote_learners(hosts: Hostfile) -> int:
    """Return the number of learners on machines other than the first."""
    return sum(entry.node.slots for entry in hosts.entries[1:] if entry.role == LEARNER)


def cluster_job(
    name: str, hosts: Hostfile, *, cpus: int | None = None, port: int | None = None, wait_s: float = 300.0, python: str = ""
) -> Job:
    """Plan a Ray cluster over all machines of the hostfile that runs until it is cancelled; for the SSH backend."""
    check_family(*(node.node_address for node in hosts.nodes))
    interpreter = python or sys.executable

    def words(entry_actors: int) -> tuple[str, ...]:
        cores = cpus if cpus is not None else entry_actors or None
        options = [] if cores is None else ["--cpus", str(cores)]
        return (interpreter, "-P", "-m", _RAY_ROLE, *options, "--stay")

    variables = {} if port is None else {"LUDUS_JOB_PORT": str(port)}
    roles = [Role(HEAD, words(hosts.entries[0].actors), 1, "when-killed", variables, at=(0,))]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, entry in enumerate(hosts.entries[1:], 1):
        kinds.setdefault(words(entry.actors), []).append(index)
    for number, (command, at) in enumerate(kinds.items()):
        role = NODE if not number else f"{NODE}-{number + 1}"
        roles.append(Role(role, command, len(at), "on-failure", variables, at=tuple(at)))
    count = len(hosts.entries)
    return Job(name, tuple(roles), HEAD, grace_s=30.0, place=f"cluster {name}", nodes=count, ray=count, wait_s=wait_s)


# -- training -----------------------------------------------------------------------------------------------------------------


def train_arguments(
    words: Sequence[str], hosts: Hostfile, *, workers: int | str | None, learners: int | None, experiment: Path | None
) -> tuple[list[str], list[str]]:
    """Complete the arguments of `ludus train` from the hostfile; return them with notices for the user. Raises UsageError.

    `workers`, `learners`: as given by the words or their file. `experiment`: an existing file to train if there are no words.
    """
    notices: list[str] = []
    arguments = list(words)
    if not arguments:
        if experiment is None:
            raise UsageError(
                "There is nothing to train for the learner.",
                "Add the arguments of `ludus train` (an environment, -f FILE, options), or create an experiment.yaml here.",
            )
        arguments = ["-f", str(experiment)]
        notices.append(f"no arguments of a training are given: {experiment} is trained")
    if not workers:
        if not hosts.actors:
            raise UsageError(
                "The number of workers of the learner is not given.",
                "Add --num-workers N: the sum of ACTOR_NUM of all machines with actors (or list them in YAML, with `actors:`).",
            )
        arguments += ["--num-workers", str(hosts.actors)]
    if learners is None and hosts.head.slots > 1:
        arguments += ["--num-learners", str(hosts.head.slots)]
    return arguments, notices


# -- token ----------------------------------------------------------------------------------------------------------------


def token_path(option: Path | None, environ: Mapping[str, str]) -> Path:
    named = option or (Path(environ[TOKEN_FILE]) if environ.get(TOKEN_FILE) else None)
    return (named.expanduser() if named is not None else state_dir() / TOKEN).absolute()


def ensure_token(path: Path, hosts: Hostfile, *, create: bool) -> bool:
    """Check that the run's token exists and is private. With `create`, create it if missing, and return whether it was. Raises UsageError."""
    created = False
    if create and not path.exists():
        try:
            if path.parent == state_dir():
                make_private(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # created by another process meanwhile
                write_token(path)
                created = True
        except OSError as error:
            hint = "Name another file: --token-file."
            raise UsageError(f"The token {path} cannot be written: {error.strerror}.", hint) from error
    _check_token(path, hosts)
    return created


def _check_token(path: Path, hosts: Hostfile) -> None:
    try:
        status = path.stat()
        text = path.read_text(encoding="ascii") if status.st_size <= _MAX_TOKEN else ""
    except FileNotFoundError:
        raise UsageError(
            f"The token {path}, which the machines of a run share, does not exist.",
            f"Start the learner first, which creates it; then copy it to this machine: {copy_command(path, hosts)}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The token {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise UsageError(f"The token {path} can be read by other users.", f"chmod 600 {shlex.quote(str(path))}")
    if len(text.strip()) < _MIN_TOKEN or not text.strip().isalnum():
        raise UsageError(f"The file {path} does not contain a token.", f"Copy it from the head: {copy_command(path, hosts)}")


def copy_command(path: Path, hosts: Hostfile) -> str:
    """Return the command that copies the token from the head to this machine."""
    head = hosts.head
    home = Path.home()
    there = path.relative_to(home) if path.is_relative_to(home) else path  # the user on the head may have another home directory
    port = f"-P {head.port} " if head.port != 22 else ""
    who = f"{head.user}@" if head.user else ""
    source = shlex.quote(f"{who}{_bracket_ipv6(head.host)}:{there}")
    return f"mkdir -p -m 700 {shlex.quote(str(path.parent))} && scp {port}{source} {shlex.quote(str(path))}"


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
