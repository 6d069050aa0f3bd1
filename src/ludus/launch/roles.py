"""The roles of a run, started by hand on each of its machines: a learner on the first of the list, actors wherever they are wanted.

Each is a job of its own machine (`local.py`). They share an address, a port and a token, and nothing else: any order, any time.
What such a job consists of is decided here; nothing is started.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.errors import UsageError
from ludus.launch.hostfile import NodeList, Part
from ludus.launch.job import Job, Role
from ludus.launch.job_dir import make_private, state_home
from ludus.launch.local_address import Here
from ludus.launch.planner import SECRETS
from ludus.process.job_env import Surroundings

PORT = 9610
"""Of the head, when nothing else is said: machines that do not know each other cannot agree on one. The next two are used as well.

Neither one that Linux gives to outgoing connections, nor one of those that jobs choose from.
"""

WAIT_S = 86_400.0
"""For actors: whoever starts a learner by hand starts them by hand, too."""

ANYBODY = "any-actor"
"""In the place of an address: actors need not be in the list. It is read by people, in the sentence that says that nobody came."""

GRACE_S = 120.0
MAIN, RAY, DOOR, HEAD, NODE = "main", "ray", "door", "head", "node"
LEARNER, ACTOR = "learner", "actor"
TOKEN_FILE = "LUDUS_TOKEN_FILE"  # noqa: S105 - the name of a variable
TOKEN = "token"  # noqa: S105
GAMECORE = "GAMECORE_SERVER_ADDR"
ADVERTISE = "LUDUS_ADVERTISE"

TRAINS = "LUDUS_LEARNER_TRAINS"
"""Names of experiments, as words of a shell: beside PWD, what a learner is known by (`Subject`)."""

_MIN_TOKEN, _MAX_TOKEN = 16, 4096
_PYTHON = (sys.executable, "-P", "-m")
_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_RAY_HOST, _TETHER = "ludus.launch.ray_role", "ludus.launch.ssh.lifeline"


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a run meet, as this one has to know it. `logs`: the directory for what is written here."""

    here: Here
    token_file: Path
    logs: Path
    port: int = PORT

    @property
    def place(self) -> str:
        """By which the roles of one run are told from those of another."""
        return f"{_bracketed(self.here.head)}:{self.port}"


@dataclass(frozen=True)
class Subject:
    """What the learner of a machine was started for: by it a start that goes on with a run is told from one that would end another's.

    `directory`: where that was, and so where its runs are. `experiments`: none where --resume names a run, which has its own.
    """

    directory: str
    experiments: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        return {"PWD": self.directory, TRAINS: shlex.join(self.experiments)}

    @staticmethod
    def of(job: Job) -> Subject | None:
        """None: it trains nothing, but joins what is trained elsewhere; or somebody else has started it."""
        told = next((role.environment for role in job.roles if role.name == job.main), {})
        if not told.get("PWD") or TRAINS not in told:
            return None
        return Subject(told["PWD"], tuple(shlex.split(told[TRAINS])))

    def is_same_run(self, other: Subject) -> bool:
        unsaid = not self.experiments or not other.experiments
        return self.directory == other.directory and (unsaid or set(self.experiments) == set(other.experiments))

    def __str__(self) -> str:
        return f"{', '.join(self.experiments) or 'a run'} in {self.directory}"


def check_family(*addresses: str) -> None:
    """Raises UsageError."""
    for address in addresses:
        if ":" in address:
            raise UsageError(
                f"{address} is an IPv6 address, and the machines of a run meet by IPv4.",
                "Write the IPv4 address; in YAML as `address`, where SSH shall go by the other one.",
            )


# -- jobs -----------------------------------------------------------------------------------------------------------------


def learner_job(
    listed: NodeList,
    meeting: Meeting,
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    cpus: int = 0,
    wait_s: float = WAIT_S,
    subject: Subject | None = None,
) -> Job:
    """On the head: Ray, the door, and the training itself. `words`: of `ludus train`. `cpus`: workers that may run here, too.

    Work begins when there is somebody to do it: all learners of the list, and an actor, unless there is room for workers here.
    """
    wanted = 1 if cpus else 2
    addresses = (meeting.here.address, *(node.reached for node in listed.nodes[1:]))
    addresses += (ANYBODY,) * (wanted - len(addresses))
    around = Surroundings(addresses, 0, meeting.port, meeting.token_file, wanted, wait_s)
    told, logs = told_of(around), meeting.logs / LEARNER
    trains = told_of(replace(around, learners=learners_elsewhere(listed))) | (subject.environment() if subject else {})
    return Job(
        LEARNER,
        (
            Role(RAY, (*_PYTHON, _RAY_HOST, "--cpus", str(cpus)), 1, "on-failure", told, log=str(logs / "ray.log")),
            Role(DOOR, (*_PYTHON, _TETHER, "door"), 1, "on-failure", told, log=str(logs / "door.log")),
            Role(MAIN, (*_PYTHON, "ludus.cli.main", "train", *words), 1, "when-killed", trains, log=str(logs / "train.log")),
        ),
        MAIN,
        secrets=tuple(name for name in SECRETS if environ.get(name)),
        grace_s=GRACE_S,
        place=meeting.place,
    )


def joining_job(
    part: Part,
    listed: NodeList,
    meeting: Meeting,
    environ: Mapping[str, str],
    *,
    cpus: int = 0,
    learners: int = 0,
    gamecore: str = "",
    advertise: str = "",
    share_weights: bool = False,
) -> Job:
    """On any other machine, or once more on the head: workers, learners or both, for as long as they are not stopped.

    They wait for a head that is not there, and join the next one when that is gone.
    """
    here = meeting.here
    node = here.node or len(listed.nodes)  # beside the head, and where it is not in the list, it is one more
    others = [each.reached for each in listed.nodes[1:]]
    addresses = [here.head, *others[: node - 1], here.address, *others[node:]]
    told = told_of(Surroundings(tuple(addresses), node, meeting.port, meeting.token_file, 1))
    if gamecore:
        told[GAMECORE] = gamecore
    if advertise:
        told[ADVERTISE] = advertise
    logs = meeting.logs / part
    roles = []
    if cpus:
        words = ["--cpus", str(cpus), *(["--gamecore", gamecore] if gamecore else []), "--log-dir", str(logs)]
        words += [*(["--share-weights"] if share_weights else []), "--stay"]
        roles.append(Role(RAY, (*_PYTHON, _RAY_HOST, *words), 1, "always", told, cpus=cpus, log=str(logs / "ray.log")))
    if learners:
        log = str(logs / "rank_{index}.log")
        roles.append(Role(LEARNER, (*_PYTHON, "ludus.distributed.learners.remote_rank"), learners, "always", told, log=log))
    # It ends when the learner does, and is started again: whoever is here waits for the next one.
    roles.append(Role(MAIN, (*_PYTHON, _TETHER, "hold", "--stay"), 1, "always", told, log=str(logs / "monitor.log")))
    return Job(
        part,
        tuple(roles),
        MAIN,
        secrets=tuple(name for name in SECRETS if environ.get(name)),
        grace_s=GRACE_S,
        place=meeting.place,
    )


def told_of(around: Surroundings) -> dict[str, str]:
    """What processes of a role are told. Ray takes 127.0.0.1 for any address of this machine, unless it believes to be alone on it."""
    alone = {_ALONE: "0"} if around.nodes[0].startswith("127.") else {}
    return around.environment() | alone


def learners_elsewhere(listed: NodeList) -> int:
    """Learners on other machines than the first."""
    return sum(entry.node.slots for entry in listed.entries[1:] if entry.role == LEARNER)


def cluster_job(
    name: str, listed: NodeList, *, cpus: int | None = None, port: int | None = None, wait_s: float = 300.0, python: str = ""
) -> Job:
    """A Ray over all machines of the list that stands until it is taken down; for the orchestrator `ssh`."""
    check_family(*(node.reached for node in listed.nodes))
    interpreter = python or sys.executable

    def words(entry_actors: int) -> tuple[str, ...]:
        cores = cpus if cpus is not None else entry_actors or None
        chosen = [] if cores is None else ["--cpus", str(cores)]
        return (interpreter, "-P", "-m", _RAY_HOST, *chosen, "--stay")

    told = {} if port is None else {"LUDUS_JOB_PORT": str(port)}
    roles = [Role(HEAD, words(listed.entries[0].actors), 1, "when-killed", told, at=(0,))]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for index, entry in enumerate(listed.entries[1:], 1):
        kinds.setdefault(words(entry.actors), []).append(index)
    for number, (command, at) in enumerate(kinds.items()):
        called = NODE if not number else f"{NODE}-{number + 1}"
        roles.append(Role(called, command, len(at), "on-failure", told, at=tuple(at)))
    count = len(listed.entries)
    return Job(name, tuple(roles), HEAD, grace_s=30.0, place=f"cluster {name}", nodes=count, ray=count, wait_s=wait_s)


# -- the training that a learner is started with ----------------------------------------------------------------------------


def train_words(
    words: Sequence[str], listed: NodeList, *, workers: int | str | None, learners: int | None, experiment: Path | None
) -> tuple[list[str], list[str]]:
    """What `ludus train` is given, and what is to be said about it. Raises UsageError.

    `workers`, `learners`: as the words or the file that they name say it. `experiment`: a file that is there, for when no words are.
    """
    said: list[str] = []
    found = list(words)
    if not found:
        if experiment is None:
            raise UsageError(
                "What shall the learner train?",
                "Add what you would give to `ludus train` (an environment, -f FILE, options), or have an experiment.yaml here.",
            )
        found = ["-f", str(experiment)]
        said.append(f"no arguments of a training are given: {experiment} is trained")
    if not workers:
        if not listed.actors:
            raise UsageError(
                "How many workers shall sample for the learner?",
                "Add --num-workers N: the sum of ACTOR_NUM of all machines with actors (or list them in YAML, with `actors:`).",
            )
        found += ["--num-workers", str(listed.actors)]
    if learners is None and listed.head.slots > 1:
        found += ["--num-learners", str(listed.head.slots)]
    return found, said


# -- the token ------------------------------------------------------------------------------------------------------------


def token_path(option: Path | None, environ: Mapping[str, str]) -> Path:
    named = option or (Path(environ[TOKEN_FILE]) if environ.get(TOKEN_FILE) else None)
    return (named.expanduser() if named is not None else state_home() / TOKEN).absolute()


def need_token(path: Path, listed: NodeList, *, create: bool) -> bool:
    """See that the secret of the run is there, and private; True: it was made just now. Raises UsageError."""
    made = False
    if create and not path.exists():
        _make_folder(path)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            made = True
        except FileExistsError:
            pass
        except OSError as error:
            raise UsageError(
                f"The token {path} cannot be written: {error.strerror}.", "Name another place: --token-file."
            ) from error
    _check_token(path, listed)
    return made


def _make_folder(path: Path) -> None:
    if path.parent == state_home():
        make_private(path.parent)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The token {path} cannot be written: {error.strerror}.", "Name another place: --token-file.") from error


def _check_token(path: Path, listed: NodeList) -> None:
    try:
        found = path.stat()
        text = path.read_text(encoding="ascii") if found.st_size <= _MAX_TOKEN else ""
    except FileNotFoundError:
        raise UsageError(
            f"There is no token in {path}: with it the machines of a run know each other.",
            f"Start the learner first, which makes one; then copy it to here: {copy_line(path, listed)}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The token {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise UsageError(f"The token {path} can be read by others.", f"chmod 600 {shlex.quote(str(path))}")
    if len(text.strip()) < _MIN_TOKEN or not text.strip().isalnum():
        raise UsageError(f"The file {path} holds no token.", f"Copy it from the head: {copy_line(path, listed)}")


def copy_line(path: Path, listed: NodeList) -> str:
    """The command that brings the token here."""
    head = listed.head
    home = Path.home()
    there = path.relative_to(home) if path.is_relative_to(home) else path  # another user's home may be elsewhere
    port = f"-P {head.port} " if head.port != 22 else ""
    who = f"{head.user}@" if head.user else ""
    source = shlex.quote(f"{who}{_bracketed(head.host)}:{there}")
    return f"mkdir -p -m 700 {shlex.quote(str(path.parent))} && scp {port}{source} {shlex.quote(str(path))}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
