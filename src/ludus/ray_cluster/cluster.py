"""The Ray cluster of a run that goes beyond one machine: found by its address or started here, and left without a trace.

    with Cluster(address_of(option, os.environ), announce=print) as cluster:
        for member in cluster.members(): ...

We join only what we were pointed at. Whether a cluster wants a token is found out before Ray is touched, by a process of its
own: Ray itself decides by what happens to lie in the home directory, tries for half a minute, and may end the process it is in.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.errors import MissingExtra, Unreachable, UsageError, WorkerFailed
from ludus.process import identity, reaper, temp_dirs
from ludus.process.job_env import JobEnv

log = logging.getLogger(__name__)

LOCAL, AUTO = "local", "auto"
PORT = 6379
REACH_S = 10.0
"""For a connection to the head; whoever does not answer by then is not there."""

JOIN_S = 30.0
"""For what it has to say to us, after that: a machine that is busy takes a while to import Ray."""

STORE_BYTES = 512 << 20
"""Of the object store of a Ray that we start: it holds a few bundles of blocks and two versions of the weights."""

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
"""With these the head takes a node that is cut off for dead after about 8 seconds; by default it takes more than a minute."""

SHARES = "ludus-shares-weights"
"""A label of nodes of Ray; see `Member.shares`."""

NODE_LOG_DIR = "LUDUS_NODE_LOG_DIR"
"""Of a node of Ray: where the logs of the workers go that run there, as actor_N.log."""

_ASK_S, _PAUSE_S = 3.0, 0.1
_SHUTDOWN_S = 15.0
_END_S = 5.0
_NOTE = "owner"
_PREFIX = "ludus-ray-"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call that comes too late would start a Ray of its own
}
_LOCALHOST = ("127.0.0.1", "localhost", "::1")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where Ray believes that there can be no other machines, it listens on 127.0.0.1 alone."""

Announce = Callable[[str], None]


def address_of(option: str | None, environ: Mapping[str, str]) -> str | None:
    """Which cluster is meant: the option, else RAY_ADDRESS, else ip_head, else that of the job this process belongs to.

    None: no Ray at all. Raises UsageError.
    """
    named = [value.strip() for value in (option, environ.get("RAY_ADDRESS"), environ.get("ip_head")) if value and value.strip()]
    if not named:
        job = JobEnv.from_environ(environ)
        return job.head if job is not None and job.ray else None
    address = named[0]
    if address == AUTO:  # whichever runs on this machine, unless the environment names one
        address = next((value for value in named[1:] if value != AUTO), AUTO)
    return _checked(address)


def _checked(address: str) -> str:
    if address in (LOCAL, AUTO):
        return address
    if "://" in address:
        raise UsageError(
            f"{address} is the address of a Ray client server, which carries no bulk data.",
            "Start the run on a machine of the cluster, and give the address of its head: --address HOST:6379.",
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{address!r} is not the address of a Ray cluster.", "Give HOST:PORT of its head, `local` or `auto`.")
    return f"{host}:{port}"


@dataclass(frozen=True)
class Member:
    """A machine of the cluster, as the head sees it."""

    id: str
    host: str
    address: str
    cores: int
    alive: bool
    head: bool
    name: str = ""
    shares: bool = False
    """Its cores are for the learner on the same machine to use, if there is one."""
    directory: str = ""


class Cluster:
    """A connection to Ray, and the Ray itself if it was started here. A context manager, to be used from the main thread:
    the kernel ends what was started when the thread that started it ends.
    """

    def __init__(
        self,
        address: str,
        *,
        num_cpus: int | None = None,
        object_store_memory: int | None = None,
        announce: Announce | None = None,
        join_s: float = JOIN_S,
    ) -> None:
        """Connects. Raises MissingExtra, and UsageError when there is no such cluster or it does not let us in."""
        self._say = announce or (lambda sentence: None)
        self.started = address == LOCAL
        self.returns = False
        """Whether somebody starts it again when it is gone."""
        self._undo = contextlib.ExitStack()
        _need_ray()
        if not self.started and (num_cpus is not None or object_store_memory is not None):
            raise UsageError(
                "The number of cores and the size of the object store are settled where a Ray is started.",
                f"Leave --ray-num-cpus and --ray-object-store-memory out, or give them to `ray start`. Address: {address}.",
            )
        try:
            job = JobEnv.from_environ(os.environ)
            if self.started:
                self._start(num_cpus, object_store_memory or STORE_BYTES)
            elif job is not None and job.ray and address == job.head:
                self._join_job(job)
            else:
                self._join(address, join_s)
            members = [member for member in self.members() if member.alive]
        except BaseException:
            self._undo.close()
            raise
        cores = sum(member.cores for member in members)
        self._say(f"Ray: {_count(len(members), 'node')}, {_count(cores, 'core')}")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; end what was started here. Nobody may use Ray in this process any more. Again: no effect."""
        self._undo.close()

    def members(self, timeout_s: float = 3.0) -> list[Member]:
        """All machines that are or were part of the cluster. Raises Unreachable when the head does not answer in time."""
        try:
            answer = _worker().gcs_client.get_all_node_info(timeout=timeout_s)
        except Exception as error:  # Ray raises what its C++ part hands it: RpcError, RaySystemError, ValueError …
            raise Unreachable(f"The head of the cluster at {self.address} does not answer: {error}") from error
        return [_member(info) for info in answer.values()]

    # -- a Ray of our own

    def _start(self, num_cpus: int | None, store_bytes: int) -> None:
        self._say("starting Ray …")
        place = self._undo.enter_context(home())
        token = place / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._undo.enter_context(reaped(place))
        settings = SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _LOOPBACK: "0"}
        self._undo.enter_context(environment(settings, remove=("RAY_AUTH_TOKEN", "RAY_ADDRESS")))
        with _loopback(), _signals_kept():
            self._connect(
                address=LOCAL,
                num_cpus=num_cpus,
                object_store_memory=store_bytes,
                include_dashboard=False,
                _temp_dir=str(place / "r"),
                _system_config=HEALTH,
            )
        self.home: Path | None = place
        _drop_helpers()

    # -- another's

    def _join(self, address: str, join_s: float) -> None:
        self._say(f"joining the Ray cluster at {address} …" if address != AUTO else "joining the Ray cluster of this machine …")
        found = find(address, os.environ, join_s)
        self.home = None
        self._undo.enter_context(environment(SETTINGS | found.authentication, remove=found.remove))
        with _signals_kept():
            self._connect(address=found.address)

    # -- the one of the job that this process belongs to

    def _join_job(self, job: JobEnv) -> None:
        """Nothing has to be found out, and whoever is not there yet is on his way."""
        self._say(f"joining the Ray of this job at {job.head} …")
        self.home, self.returns = None, True
        job.token()
        settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(job.token_file)}
        self._undo.enter_context(environment(SETTINGS | settings, remove=("RAY_AUTH_TOKEN", "RAY_ADDRESS")))
        here = assembled(job, Head(job.head), time.monotonic() + job.wait_s, self._say)
        # Where Ray is told of 127.0.0.1 it takes another address of this machine, unless it believes that there are no others.
        here_only = _loopback() if job.nodes[0] in _LOCALHOST else contextlib.nullcontext()
        with _signals_kept(), here_only:
            self._connect(address=job.head, _temp_dir=here.directory)

    def _connect(self, **options: Any) -> None:
        ray = _ray()
        _forget_cached_settings()
        if ray.is_initialized():
            raise UsageError("This process is connected to a Ray cluster already.", "Call ray.shutdown() first.")
        self._undo.callback(self._leave)
        try:
            context = ray.init(log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # see members()
            raise WorkerFailed(f"Ray could not be started or joined: {error}", _log_hint(options.get("_temp_dir"))) from error
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray._private.worker.print_to_stdstream = _to_log  # else the raylets' last words appear in the middle of a display
        self.address: str = context.address_info["address"]
        self.here: str = context.address_info["node_id"]
        """The member on which this process runs."""

    def _leave(self) -> None:
        ray = _ray()
        node = getattr(ray._private.worker, "_global_node", None)
        infos = [info for infos in getattr(node, "all_processes", {}).values() for info in infos] if self.started else []
        thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
        if thread.is_alive():
            log.warning("Ray did not shut down within %.0f s", _SHUTDOWN_S)
            import atexit

            atexit.unregister(ray._private.worker.shutdown)  # it would wait once more
        _end([info.process for info in infos])


# -- the Ray of a job -----------------------------------------------------------------------------------------------------


class Head:
    """The head of a job's Ray, asked from this process: how it wants to be spoken to is known. Imports Ray."""

    def __init__(self, address: str) -> None:
        self.address = address
        _need_ray()
        self.ray = _ray()
        _forget_cached_settings()
        self._client: Any = None

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """As `_ask`; {} while it does not answer."""
        try:
            if self._client is None:
                self._client = self.ray._raylet.GcsClient(address=self.address)
            return _answer(self._client, self.address, timeout_s)
        except self.ray.exceptions.AuthenticationError:
            return {"refused": "token"}
        except Exception as error:  # see Cluster.members
            log.debug("the head at %s does not answer: %s", self.address, error)
            self._client = None
            return {}

    def check(self, answer: Mapping[str, Any]) -> None:
        """Raises UsageError: token, versions."""
        if answer.get("refused") == "token":
            raise UsageError(
                f"The Ray of this job at {self.address} does not accept the token of this process.",
                "Do all processes of the job see the same file? Or does another Ray listen at that port?",
            )
        if answer:
            _same_versions(answer, self.address)


def assembled(job: JobEnv, head: Head, deadline: float, say: Announce) -> Member:
    """Wait until as many nodes as the job asks for are there, and the one of this process among them, which is returned.

    Raises UsageError (token, versions), WorkerFailed at the deadline.
    """
    told = False
    while True:
        answer = head.ask(_ASK_S) if listens(job.head, _ASK_S) else {}
        head.check(answer)
        members = [member for member in (Member(**said) for said in answer.get("members", ())) if member.alive]
        here = _here(job, members)
        if here is not None and len(members) >= job.ray:
            return here
        if time.monotonic() > deadline:
            raise _incomplete(job, members, answer)
        if not told and answer:
            say(f"waiting for nodes: {len(members)} of {job.ray} {'is' if len(members) == 1 else 'are'} here")
            told = True
        time.sleep(_PAUSE_S)  # Ray tells nobody that somebody has joined, without being asked


def node_name(node: int) -> str:
    """What a node of a job is called in its Ray: where several are on one machine, their addresses are the same."""
    return f"node-{node}"


def listens(address: str, within_s: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError:
        return False
    return True


def _here(job: JobEnv, members: list[Member]) -> Member | None:
    """The node on which this process runs."""
    address = job.nodes[job.node]
    mine = [member for member in members if member.address in (address, resolved(address))]
    return next((member for member in mine if member.name == node_name(job.node)), mine[0] if len(mine) == 1 else None)


def absent(nodes: tuple[str, ...], came: list[str]) -> list[str]:
    """Addresses from which nobody came; of several nodes at one address, as often as nobody did."""
    rest = Counter(resolved(address) for address in came)
    missing = []
    for node in nodes:
        if rest[resolved(node)]:
            rest[resolved(node)] -= 1
        else:
            missing.append(node)
    return missing


def _incomplete(job: JobEnv, members: list[Member], answer: Mapping[str, Any]) -> WorkerFailed:
    logs = (
        f"`ludus jobs logs {os.environ['LUDUS_JOB_ID']} --role ray` says" if os.environ.get("LUDUS_JOB_ID") else "Their logs say"
    )
    if not answer:
        error = WorkerFailed(f"The head of this job's Ray at {job.head} did not answer within {job.wait_s:g} s.", f"{logs} why.")
    else:
        missing = absent(job.nodes, [member.address for member in members])
        error = WorkerFailed(
            f"{len(members)} of {job.ray} nodes came within {job.wait_s:g} s; nobody came from {', '.join(missing)}.",
            f"{logs} why. Can those machines reach {job.head}?",
        )
    error.final = True  # whoever starts the learner again would wait as long again
    return error


def resolved(address: str) -> str:
    """Nodes may be given by name; Ray speaks of numbers."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    return address


# -- finding out about a cluster -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    address: str
    authentication: dict[str, str]
    remove: tuple[str, ...]


def find(address: str, environ: Mapping[str, str], within_s: float) -> Found:
    """Reach the head and learn how it wants to be spoken to. Raises UsageError: unreachable, token, versions, not a member."""
    if address != AUTO:
        _reach(address, min(REACH_S, within_s))
    authentication, remove, source = _token(environ)
    # Speaking with a token to a cluster that has none would work until it calls back: so both ways are tried.
    ways = [{"RAY_AUTH_MODE": "disabled"}] + ([authentication] if source else [])
    with ThreadPoolExecutor(len(ways)) as threads:
        open_to_all, *answers = threads.map(lambda way: _probe(address, {**environ, **way}, within_s), ways)
    if open_to_all.get("refused") != "token":
        if environ.get("RAY_AUTH_MODE", "").lower() == "token":
            raise UsageError(
                f"The Ray cluster at {address} asks for no token, but RAY_AUTH_MODE=token is set.",
                "Start the cluster with RAY_AUTH_MODE=token, or unset it here: anyone who reaches the cluster can run code in it.",
            )
        return Found(accepted(open_to_all, address), {"RAY_AUTH_MODE": "disabled"}, ())
    if source is None:
        raise UsageError(
            f"The Ray cluster at {address} asks for a token, and there is none here.",
            "Set RAY_AUTH_TOKEN_PATH to a file with the token of the cluster (or RAY_AUTH_TOKEN), or put it into ~/.ray/auth_token.",
        )
    if answers[0].get("refused") == "token":
        raise UsageError(f"The Ray cluster at {address} does not accept the token from {source}.", "Is it the one of its head?")
    return Found(accepted(answers[0], address), authentication, remove)


def _token(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...], str | None]:
    """How to authenticate with the token there is, which variables are in the way, and where the token comes from."""
    if environ.get("RAY_AUTH_TOKEN"):
        return {"RAY_AUTH_MODE": "token"}, ("RAY_AUTH_TOKEN_PATH",), "RAY_AUTH_TOKEN"
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    source = Path(path) if path else Path(environ.get("HOME") or Path.home()) / ".ray" / "auth_token"
    if path or source.exists():
        try:
            if source.read_text().strip():
                return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(source)}, ("RAY_AUTH_TOKEN",), str(source)
        except OSError as error:
            raise UsageError(f"The token of the Ray cluster in {source} cannot be read: {error.strerror}.") from error
        raise UsageError(f"The file {source} holds no token.", "Copy the token file of the cluster's head.")
    return {}, (), None


def accepted(answer: Mapping[str, Any], address: str) -> str:
    if "refused" in answer:
        raise UsageError(f"The Ray cluster at {address} cannot be joined: {answer['refused']}")
    _same_versions(answer, address)
    members = [Member(**member) for member in answer["members"]]
    living = sorted({member.address for member in members if member.alive})
    if not any(_is_ours(ip) for ip in living):
        raise UsageError(
            f"This machine is not part of the Ray cluster at {address}; its nodes are {', '.join(living) or 'gone'}.",
            f"Run `ray start --address={answer['address']}` here first (add --num-cpus=0 if no workers should run here).",
        )
    return str(answer["address"])


def _same_versions(answer: Mapping[str, Any], address: str) -> None:
    ours = {"Ray": _version(), "Python": ".".join(map(str, sys.version_info[:2]))}
    theirs = {"Ray": answer["ray"], "Python": ".".join(answer["python"].split(".")[:2])}
    if theirs["Ray"] and ours != theirs:
        differ = ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in ours if ours[name] != theirs[name])
        raise UsageError(f"The Ray cluster at {address} runs {differ}.", "Use the same versions on all machines.")


def _reach(address: str, within_s: float) -> None:
    """Whether anybody listens there; a firewall that swallows packets shall not cost more than the deadline."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"There is no Ray cluster at {address}: {why}.",
            "Is its head running (`ray start --head --port=6379`), and is the port open for this machine?",
        ) from error


def _probe(address: str, environ: Mapping[str, str], within_s: float) -> dict[str, Any]:
    """Ask the head, in a process of its own: what Ray has once read of its settings it does not read again."""
    script = f"import sys; sys.path[:] = {sys.path!r}; from ludus.ray_cluster.cluster import _ask; _ask({address!r})"
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with a script of ours
            [sys.executable, "-c", script], env=dict(environ), capture_output=True, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"The head of the Ray cluster at {address} did not answer within {within_s:.0f} s.") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"The Ray cluster at {address} cannot be joined: {' '.join(last) or 'no answer'}") from None
    return answer


def _ask(address: str) -> None:
    """The probe's whole life: one line of JSON. Nothing that the head sends is more than data to whoever reads it."""
    ray = _ray()
    try:
        if address == AUTO:
            found = ray._private.services.canonicalize_bootstrap_address(AUTO)
            if not found:
                raise ConnectionError("no Ray runs on this machine that `ray start` has started")
            address = str(found)
        answer = _answer(ray._raylet.GcsClient(address=address), address, 5)
    except ray.exceptions.AuthenticationError:
        answer = {"refused": "token"}
    except Exception as error:  # whatever it is, it is the answer
        answer = {"refused": f"{error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads have nothing to tidy up, and may wait for a head that is gone


def _answer(client: Any, address: str, timeout_s: float) -> dict[str, Any]:
    """Who is part of the cluster, and what it runs. Raises whatever Ray does."""
    metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=timeout_s) or b"{}")
    members = [vars(_member(info)) for info in client.get_all_node_info(timeout=timeout_s).values()]
    versions = {"ray": metadata.get("ray_version", ""), "python": metadata.get("python_version", "")}
    return {"address": address, "members": members, **versions}


def _member(info: Any) -> Member:
    return Member(
        info.node_id.hex(),
        info.node_manager_hostname,
        info.node_manager_address,
        int(dict(info.resources_total).get("CPU", 0)),
        info.state == 0,
        info.is_head_node,
        info.node_name,
        SHARES in dict(info.labels),
        info.temp_dir,
    )


def _is_ours(ip: str) -> bool:
    """Whether this machine has that address: then one can bind to it."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as tried:
        tried.bind((ip, 0))
        return True
    return False


# -- Ray's surroundings ---------------------------------------------------------------------------------------------------


def _need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("Runs on a cluster need Ray, which is not installed.", "pip install 'ludus[cluster]'")


def _version() -> str:
    return importlib.metadata.version("ray")


def _ray() -> Any:
    """Much of what we need is no part of Ray's documented interface; here is all of it, in one file."""
    import ray

    return ray


def _worker() -> Any:
    return _ray()._private.worker.global_worker


def _to_log(said: Mapping[str, Any], **_: Any) -> None:
    """What Ray would print: that a node or a worker was lost, with the end of its log."""
    log.info("Ray: %s", "\n".join(said["lines"]))


def _log_hint(temp_dir: str | None) -> str:
    return f"Its logs were in {temp_dir}/session_latest/logs." if temp_dir else ""


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """A private directory for a Ray, with a short name: the path of a unix socket may have about 100 bytes, and Ray takes 64."""
    base = _base()
    sweep(base)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        (made / _NOTE).write_text(f"{os.getpid()} {identity.start_ticks(os.getpid()) or 0}")
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _base() -> Path:
    temp = Path(tempfile.gettempdir())
    return temp if len(os.fsencode(temp)) <= 15 or not Path("/tmp").is_dir() else Path("/tmp")  # noqa: S108


def sweep_leftovers() -> None:
    """Remove what Rays and workers of this user have left that were killed: directories, rings, weights, logs."""
    sweep(_base())
    temp_dirs.sweep_all()


def sweep(base: Path) -> int:
    """Remove the directories of Rays whose owners were killed; what ran in them died with the owners."""
    swept = 0
    for home in base.glob(f"{_PREFIX}*"):
        try:
            if home.is_symlink() or home.stat().st_uid != os.getuid():
                continue
            pid, started = map(int, (home / _NOTE).read_text().split())
        except (OSError, ValueError):  # of another user; or it is being made, or removed, at this moment
            continue
        if not identity.is_alive_since(pid, started):
            shutil.rmtree(home, ignore_errors=True)
            swept += 1
    return swept


@contextlib.contextmanager
def reaped(home: Path) -> Iterator[None]:
    """If this process is killed inside the block, whatever was started with `home` as its directory is ended."""
    if not Path("/proc/self/environ").exists():  # no Linux: what Ray does by itself has to be enough
        yield
        return
    command = [sys.executable, "-I", "-S", reaper.__file__, str(home), *map(str, temp_dirs.base_dirs())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={}, start_new_session=True, cwd="/") as process:  # noqa: S603 - ours
        assert process.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"!")
                process.stdin.close()
            _end([process])


@contextlib.contextmanager
def environment(settings: Mapping[str, str], remove: tuple[str, ...] = ()) -> Iterator[None]:
    """Variables that Ray and the processes that it starts read; as they were before when the block is left."""
    environ: MutableMapping[str, str] = os.environ
    before = {name: environ.get(name) for name in (*settings, *remove)}
    environ.update(settings)
    for name in remove:
        environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray would put its own handler of SIGTERM in the place of ours, also while it starts: then the process ends with code 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    its = _ray()._private.utils
    puts = its.set_sigterm_handler
    its.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        its.set_sigterm_handler = puts
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """For a Ray that was imported before we could set the variable."""
    constants = _ray()._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _forget_cached_settings() -> None:
    """Ray reads its variables when it is imported, and the token once. This process may have had another cluster before."""
    ray = _ray()
    ray._private.auto_init_hook.enable_auto_connect = False
    _raylet = ray._raylet
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _drop_helpers() -> None:
    """End what a Ray of one machine does not need: the autoscaler's monitor listens on all interfaces, and each costs 100 MB."""
    node = _ray()._private.worker._global_node
    for part in ("monitor", "log_monitor", "dashboard"):
        if part in getattr(node, "all_processes", {}):
            getattr(node, f"kill_{part}")(check_alive=False)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """They have been asked to end; see that they do. Never raises."""
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # why we leave is more important than what stays
                process.wait(_END_S)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
