"""The Ray cluster of a run on several machines: joined by its address or started here, and left without leftovers.

    with Cluster(address_of(option, os.environ), announce=print) as cluster:
        for member in cluster.members(): ...

Only the given cluster is joined. Whether it requires a token is determined first, in a separate process: Ray itself decides by the
files in the home directory, retries for half a minute, and may terminate its process.
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
CONNECT_S = 10.0
"""Time limit for a TCP connection to the head."""

JOIN_S = 30.0
"""Time limit for its reply after that: a busy machine takes a while to import Ray."""

STORE_BYTES = 512 << 20
"""Size of the object store of a Ray that is started here: room for a few bundles of blocks and two versions of the weights."""

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
"""With these settings the head declares an unreachable node dead after about 8 seconds; the default is more than a minute."""

SHARES = "ludus-shares-weights"
"""Label of Ray nodes; see `Member.shares`."""

NODE_LOG_DIR = "LUDUS_NODE_LOG_DIR"
"""Environment variable of a Ray node: log directory of the workers that run there (actor_N.log)."""

_QUERY_S, _PAUSE_S = 3.0, 0.1
_SHUTDOWN_S = 15.0
_END_S = 5.0
_OWNER_FILE = "owner"
_PREFIX = "ludus-ray-"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a late call would start another Ray
}
_LOCALHOST = ("127.0.0.1", "localhost", "::1")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0 Ray assumes that there are no other machines and listens on 127.0.0.1 only."""

Announce = Callable[[str], None]


def address_of(option: str | None, environ: Mapping[str, str]) -> str | None:
    """Address of the cluster: the option, else RAY_ADDRESS, else ip_head, else that of the job of this process.

    None: no Ray. Raises UsageError.
    """
    named = [value.strip() for value in (option, environ.get("RAY_ADDRESS"), environ.get("ip_head")) if value and value.strip()]
    if not named:
        job = JobEnv.from_environ(environ)
        return job.head if job is not None and job.ray else None
    address = named[0]
    if address == AUTO:  # the one on this machine, unless the environment names one
        address = next((value for value in named[1:] if value != AUTO), AUTO)
    return _parse_address(address)


def _parse_address(address: str) -> str:
    if address in (LOCAL, AUTO):
        return address
    if "://" in address:
        raise UsageError(
            f"{address} is the address of a Ray client server, which cannot transfer bulk data.",
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
    """A Ray node, as the head reports it."""

    id: str
    host: str
    address: str
    cores: int
    alive: bool
    head: bool
    name: str = ""
    shares: bool = False
    """Its cores are used by the learner on the same machine, if there is one."""
    directory: str = ""


class Cluster:
    """A connection to Ray, and Ray itself if it was started here. A context manager, for use in the main thread: the kernel ends what
    was started when the starting thread ends.
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
        """Connect. Raises MissingExtra; UsageError when there is no such cluster or it cannot be joined."""
        self._announce = announce or (lambda sentence: None)
        self.started = address == LOCAL
        self.returns = False
        """Whether it is restarted when it is lost."""
        self._undo = contextlib.ExitStack()
        _require_ray()
        if not self.started and (num_cpus is not None or object_store_memory is not None):
            raise UsageError(
                "The number of cores and the size of the object store can be set only when Ray is started.",
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
        self._announce(f"Ray: {_count(len(members), 'node')}, {_count(cores, 'core')}")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, and end what was started here. Ray must not be used in this process afterwards. Idempotent."""
        self._undo.close()

    def members(self, timeout_s: float = 3.0) -> list[Member]:
        """All nodes that are or were part of the cluster. Raises Unreachable when the head does not reply in time."""
        try:
            reply = _worker().gcs_client.get_all_node_info(timeout=timeout_s)
        except Exception as error:  # the C++ part of Ray raises RpcError, RaySystemError, ValueError …
            raise Unreachable(f"The head of the cluster at {self.address} does not answer: {error}") from error
        return [_member(info) for info in reply.values()]

    # -- started here

    def _start(self, num_cpus: int | None, store_bytes: int) -> None:
        self._announce("starting Ray …")
        directory = self._undo.enter_context(ray_temp_dir())
        token = directory / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._undo.enter_context(reaper_process(directory))
        settings = SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _LOOPBACK: "0"}
        self._undo.enter_context(environment_variables(settings, remove=("RAY_AUTH_TOKEN", "RAY_ADDRESS")))
        with _loopback(), _keep_signal_handlers():
            self._connect(
                address=LOCAL,
                num_cpus=num_cpus,
                object_store_memory=store_bytes,
                include_dashboard=False,
                _temp_dir=str(directory / "r"),
                _system_config=HEALTH,
            )
        self.home: Path | None = directory
        _kill_unused_processes()

    # -- an existing cluster

    def _join(self, address: str, join_s: float) -> None:
        self._announce(
            f"joining the Ray cluster at {address} …" if address != AUTO else "joining the Ray cluster of this machine …"
        )
        found = probe_cluster(address, os.environ, join_s)
        self.home = None
        self._undo.enter_context(environment_variables(SETTINGS | found.authentication, remove=found.remove))
        with _keep_signal_handlers():
            self._connect(address=found.address)

    # -- the cluster of the job of this process

    def _join_job(self, job: JobEnv) -> None:
        """The settings are known from the job; wait for the nodes that are missing."""
        self._announce(f"joining the Ray of this job at {job.head} …")
        self.home, self.returns = None, True
        job.token()
        settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(job.token_file)}
        self._undo.enter_context(environment_variables(SETTINGS | settings, remove=("RAY_AUTH_TOKEN", "RAY_ADDRESS")))
        here = wait_for_nodes(job, RayHead(job.head), time.monotonic() + job.wait_s, self._announce)
        # Given 127.0.0.1, Ray uses another address of this machine, unless it assumes that there are no others.
        here_only = _loopback() if job.nodes[0] in _LOCALHOST else contextlib.nullcontext()
        with _keep_signal_handlers(), here_only:
            self._connect(address=job.head, _temp_dir=here.directory)

    def _connect(self, **options: Any) -> None:
        ray = _ray()
        _forget_cached_settings()
        if ray.is_initialized():
            raise UsageError("This process is connected to a Ray cluster already.", "Call ray.shutdown() first.")
        self._undo.callback(self._leave)
        try:
            context = ray.init(log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # as in members()
            raise WorkerFailed(f"Ray could not be started or joined: {error}", _log_hint(options.get("_temp_dir"))) from error
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray._private.worker.print_to_stdstream = _log_output  # else output of the raylets would break progress displays
        self.address: str = context.address_info["address"]
        self.here: str = context.address_info["node_id"]
        """Id of the node on which this process runs."""

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
        _wait_or_kill([info.process for info in infos])


# -- the cluster of a job -------------------------------------------------------------------------------------------------


class RayHead:
    """The head of a job's Ray, queried from this process, whose authentication settings are known. Imports Ray."""

    def __init__(self, address: str) -> None:
        self.address = address
        _require_ray()
        self.ray = _ray()
        _forget_cached_settings()
        self._client: Any = None

    def query(self, timeout_s: float) -> dict[str, Any]:
        """Members and versions, like `_print_query`; {} while the head does not reply."""
        try:
            if self._client is None:
                self._client = self.ray._raylet.GcsClient(address=self.address)
            return _query_members(self._client, self.address, timeout_s)
        except self.ray.exceptions.AuthenticationError:
            return {"refused": "token"}
        except Exception as error:  # as in Cluster.members
            log.debug("the head at %s does not reply: %s", self.address, error)
            self._client = None
            return {}

    def check(self, reply: Mapping[str, Any]) -> None:
        """Raises UsageError for a refused token or different versions."""
        if reply.get("refused") == "token":
            raise UsageError(
                f"The Ray of this job at {self.address} does not accept the token of this process.",
                "All processes of the job must see the same token file; another Ray may be listening on that port.",
            )
        if reply:
            _check_versions(reply, self.address)


def wait_for_nodes(job: JobEnv, head: RayHead, deadline: float, announce: Announce) -> Member:
    """Wait until the job's number of nodes has joined, including that of this process, which is returned.

    Raises UsageError (token, versions), WorkerFailed at the deadline.
    """
    announced = False
    while True:
        reply = head.query(_QUERY_S) if is_listening(job.head, _QUERY_S) else {}
        head.check(reply)
        members = [member for member in (Member(**output) for output in reply.get("members", ())) if member.alive]
        here = _own_member(job, members)
        if here is not None and len(members) >= job.ray:
            return here
        if time.monotonic() > deadline:
            raise _incomplete_error(job, members, reply)
        if not announced and reply:
            announce(f"waiting for nodes: {len(members)} of {job.ray} joined")
            announced = True
        time.sleep(_PAUSE_S)  # Ray has no notification for joining nodes


def node_name(node: int) -> str:
    """Name of a node of a job in its Ray: several nodes on one machine have the same address."""
    return f"node-{node}"


def is_listening(address: str, within_s: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError:
        return False
    return True


def _own_member(job: JobEnv, members: list[Member]) -> Member | None:
    """The node on which this process runs."""
    address = job.nodes[job.node]
    mine = [member for member in members if member.address in (address, resolve_host(address))]
    return next((member for member in mine if member.name == node_name(job.node)), mine[0] if len(mine) == 1 else None)


def missing_nodes(nodes: tuple[str, ...], came: list[str]) -> list[str]:
    """Addresses of nodes that have not joined; several nodes may have the same address."""
    rest = Counter(resolve_host(address) for address in came)
    missing = []
    for node in nodes:
        if rest[resolve_host(node)]:
            rest[resolve_host(node)] -= 1
        else:
            missing.append(node)
    return missing


def _incomplete_error(job: JobEnv, members: list[Member], reply: Mapping[str, Any]) -> WorkerFailed:
    logs = (
        f"See `ludus jobs logs {os.environ['LUDUS_JOB_ID']} --role ray`." if os.environ.get("LUDUS_JOB_ID") else "See their logs."
    )
    if not reply:
        error = WorkerFailed(f"The head of this job's Ray at {job.head} did not reply within {job.wait_s:g} s.", logs)
    else:
        missing = missing_nodes(job.nodes, [member.address for member in members])
        error = WorkerFailed(
            f"{len(members)} of {job.ray} nodes joined within {job.wait_s:g} s; missing: {', '.join(missing)}.",
            f"{logs} Check that those machines can reach {job.head}.",
        )
    error.final = True  # a restarted learner would wait as long again
    return error


def resolve_host(address: str) -> str:
    """IP address of a host: nodes may be given by name, but Ray reports addresses."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    return address


# -- joining an existing cluster ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterAccess:
    address: str
    authentication: dict[str, str]
    remove: tuple[str, ...]


def probe_cluster(address: str, environ: Mapping[str, str], within_s: float) -> ClusterAccess:
    """Contact the head and determine how to authenticate. Raises UsageError: unreachable, token, versions, not a member."""
    if address != AUTO:
        _check_reachable(address, min(CONNECT_S, within_s))
    authentication, remove, source = _find_token(environ)
    # A token is harmful with a cluster that has none (its calls back fail), so both variants are tried.
    ways = [{"RAY_AUTH_MODE": "disabled"}] + ([authentication] if source else [])
    with ThreadPoolExecutor(len(ways)) as threads:
        without_token, *replies = threads.map(lambda way: _probe(address, {**environ, **way}, within_s), ways)
    if without_token.get("refused") != "token":
        if environ.get("RAY_AUTH_MODE", "").lower() == "token":
            raise UsageError(
                f"The Ray cluster at {address} requires no token, but RAY_AUTH_MODE=token is set.",
                "Start the cluster with RAY_AUTH_MODE=token, or unset it here: without a token anyone can run code in the cluster.",
            )
        return ClusterAccess(check_membership(without_token, address), {"RAY_AUTH_MODE": "disabled"}, ())
    if source is None:
        raise UsageError(
            f"The Ray cluster at {address} requires a token, and none is set.",
            "Set RAY_AUTH_TOKEN_PATH to a file with the token of the cluster (or RAY_AUTH_TOKEN), or put it into ~/.ray/auth_token.",
        )
    if replies[0].get("refused") == "token":
        raise UsageError(f"The Ray cluster at {address} does not accept the token from {source}.", "Use the token of its head.")
    return ClusterAccess(check_membership(replies[0], address), authentication, remove)


def _find_token(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...], str | None]:
    """Settings for the available token, variables to remove, and the source of the token."""
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
        raise UsageError(f"The file {source} is empty.", "Copy the token file of the cluster's head.")
    return {}, (), None


def check_membership(reply: Mapping[str, Any], address: str) -> str:
    if "refused" in reply:
        raise UsageError(f"The Ray cluster at {address} cannot be joined: {reply['refused']}")
    _check_versions(reply, address)
    members = [Member(**member) for member in reply["members"]]
    addresses = sorted({member.address for member in members if member.alive})
    if not any(_is_local_address(ip) for ip in addresses):
        raise UsageError(
            f"This machine is not part of the Ray cluster at {address}; its nodes are {', '.join(addresses) or 'gone'}.",
            f"Run `ray start --address={reply['address']}` here first (add --num-cpus=0 if no workers should run here).",
        )
    return str(reply["address"])


def _check_versions(reply: Mapping[str, Any], address: str) -> None:
    ours = {"Ray": _version(), "Python": ".".join(map(str, sys.version_info[:2]))}
    theirs = {"Ray": reply["ray"], "Python": ".".join(reply["python"].split(".")[:2])}
    if theirs["Ray"] and ours != theirs:
        differ = ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in ours if ours[name] != theirs[name])
        raise UsageError(f"The Ray cluster at {address} runs {differ}.", "Use the same versions on all machines.")


def _check_reachable(address: str, within_s: float) -> None:
    """Raises UsageError if nothing listens there. Bounded even if a firewall drops packets."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError as error:
        why = "it does not respond" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"There is no Ray cluster at {address}: {why}.",
            "Check that its head is running (`ray start --head --port=6379`) and that this machine can reach the port.",
        ) from error


def _probe(address: str, environ: Mapping[str, str], within_s: float) -> dict[str, Any]:
    """Query the head in a separate process: Ray reads its settings only once per process."""
    script = (
        f"import sys; sys.path[:] = {sys.path!r}; from ludus.ray_cluster.cluster import _print_query; _print_query({address!r})"
    )
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with a script of ours
            [sys.executable, "-c", script], env=dict(environ), capture_output=True, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"The head of the Ray cluster at {address} did not reply within {within_s:.0f} s.") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"The Ray cluster at {address} cannot be joined: {' '.join(last) or 'no reply'}") from None
    return reply


def _print_query(address: str) -> None:
    """Program of the probe process: print one line of JSON, which the reader treats as data only."""
    ray = _ray()
    try:
        if address == AUTO:
            found = ray._private.services.canonicalize_bootstrap_address(AUTO)
            if not found:
                raise ConnectionError("no Ray started by `ray start` runs on this machine")
            address = str(found)
        reply = _query_members(ray._raylet.GcsClient(address=address), address, 5)
    except ray.exceptions.AuthenticationError:
        reply = {"refused": "token"}
    except Exception as error:  # any error is the result
        reply = {"refused": f"{error}"}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads need no cleanup, and may wait for a head that is gone


def _query_members(client: Any, address: str, timeout_s: float) -> dict[str, Any]:
    """Members and versions of the cluster. Raises the errors of Ray."""
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


def _is_local_address(ip: str) -> bool:
    """Return whether the address belongs to this machine: then it can be bound."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as tried:
        tried.bind((ip, 0))
        return True
    return False


# -- environment of Ray -------------------------------------------------------------------------------------------------


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MissingExtra("Runs on a cluster need Ray, which is not installed.", "pip install 'ludus[cluster]'")


def _version() -> str:
    return importlib.metadata.version("ray")


def _ray() -> Any:
    """Ray, including undocumented parts: all uses of those are in this file."""
    import ray

    return ray


def _worker() -> Any:
    return _ray()._private.worker.global_worker


def _log_output(output: Mapping[str, Any], **_: Any) -> None:
    """Log what Ray would print: lost nodes and workers with the end of their logs."""
    log.info("Ray: %s", "\n".join(output["lines"]))


def _log_hint(temp_dir: str | None) -> str:
    return f"Its logs were in {temp_dir}/session_latest/logs." if temp_dir else ""


@contextlib.contextmanager
def ray_temp_dir() -> Iterator[Path]:
    """A private directory for Ray, with a short name: a unix socket path may have about 100 bytes, of which Ray uses 64."""
    base = _short_temp_dir()
    sweep(base)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        (made / _OWNER_FILE).write_text(f"{os.getpid()} {identity.start_ticks(os.getpid()) or 0}")
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _short_temp_dir() -> Path:
    temp = Path(tempfile.gettempdir())
    return temp if len(os.fsencode(temp)) <= 15 or not Path("/tmp").is_dir() else Path("/tmp")  # noqa: S108


def sweep_leftovers() -> None:
    """Remove leftovers of killed Ray processes and workers of this user: directories, rings, weights, logs."""
    sweep(_short_temp_dir())
    temp_dirs.sweep_all()


def sweep(base: Path) -> int:
    """Remove the directories of Ray clusters whose owners were killed; their processes died with the owners."""
    swept = 0
    for home in base.glob(f"{_PREFIX}*"):
        try:
            if home.is_symlink() or home.stat().st_uid != os.getuid():
                continue
            pid, started = map(int, (home / _OWNER_FILE).read_text().split())
        except (OSError, ValueError):  # of another user, or being created or removed
            continue
        if not identity.is_alive_since(pid, started):
            shutil.rmtree(home, ignore_errors=True)
            swept += 1
    return swept


@contextlib.contextmanager
def reaper_process(home: Path) -> Iterator[None]:
    """If this process is killed inside the block, a reaper process ends what was started with `home` as its directory."""
    if not Path("/proc/self/environ").exists():  # not Linux: rely on Ray's own cleanup
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
            _wait_or_kill([process])


@contextlib.contextmanager
def environment_variables(settings: Mapping[str, str], remove: tuple[str, ...] = ()) -> Iterator[None]:
    """Set environment variables for Ray and its processes; restored afterwards."""
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
def _keep_signal_handlers() -> Iterator[None]:
    """Keep the signal handlers of this process: Ray would install its own for SIGTERM, which exits with code 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    utils = _ray()._private.utils
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """The same effect as the variable, for a Ray that is already imported."""
    constants = _ray()._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _forget_cached_settings() -> None:
    """Ray reads its variables at import, and the token once; this process may have used another cluster before."""
    ray = _ray()
    ray._private.auto_init_hook.enable_auto_connect = False
    _raylet = ray._raylet
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _kill_unused_processes() -> None:
    """End processes that a Ray of one machine does not need: the autoscaler's monitor listens on all interfaces; each takes 100 MB."""
    node = _ray()._private.worker._global_node
    for part in ("monitor", "log_monitor", "dashboard"):
        if part in getattr(node, "all_processes", {}):
            getattr(node, f"kill_{part}")(check_alive=False)


def _wait_or_kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that were asked to end, and kill those that do not. Never raises."""
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the error that leads here is more important
                process.wait(_END_S)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
