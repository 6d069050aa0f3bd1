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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.errors import MissingExtra, Unreachable, UsageError, WorkerFailed
from ludus.process.auth import write_token
from ludus.process.job_env import JobEnv, find_free_ports
from ludus.ray_cluster.membership import AUTO, Member, query_members, run_query
from ludus.ray_cluster.node import NodeSpec, RayNode
from ludus.ray_cluster.ray_temp_dir import ray_temp_dir

log = logging.getLogger(__name__)

LOCAL = "local"
PORT = 6379
CONNECT_S = 10.0
"""Time limit for a TCP connection to the head."""

JOIN_S = 30.0
"""Time limit for its reply after that: a busy machine takes a while to import Ray."""

START_S = 120.0
"""Time limit for the start of a Ray here."""

STORE_BYTES = 512 << 20
"""Size of the object store of a Ray that is started here: room for a few bundles of blocks and two versions of the weights."""

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
"""With these settings the head declares an unreachable node dead after about 8 seconds; the default is more than a minute."""

NODE_LOG_DIR = "LUDUS_NODE_LOG_DIR"
"""Environment variable of a Ray node: log directory of the workers that run there (actor_N.log)."""

_QUERY_S, _PAUSE_S = 3.0, 0.1
_SHUTDOWN_S = 15.0
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a late call would start another Ray
}
_LOCALHOST = ("127.0.0.1", "localhost", "::1")
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this Ray assumes that there are no other machines and listens on 127.0.0.1 only."""

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


class Cluster:
    """A connection to Ray, and Ray itself if it was started here. A context manager."""

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
        self.home: Path | None = None
        """Directory of a Ray that was started here."""
        self.returns = False
        """Whether it is restarted when it is lost."""
        self._undo = contextlib.ExitStack()
        _require_ray()
        if not self.started and (num_cpus is not None or object_store_memory is not None):
            raise UsageError(
                "The number of cores and the size of the object store can be set only when Ray is started.",
                f"Leave --ray-num-cpus and --ray-object-store-memory out, or give them to `ray start`. Address: {address}.",
            )
        with self._undo:  # undone unless all of it succeeds
            job = JobEnv.from_environ(os.environ)
            if self.started:
                self._start(num_cpus, object_store_memory or STORE_BYTES)
            elif job is not None and job.ray and address == job.head:
                self._join_job(job)
            else:
                self._join(address, join_s)
            members = [member for member in self.members() if member.alive]
            self._undo = self._undo.pop_all()
        nodes, cores = len(members), sum(member.cores for member in members)
        self._announce(f"Ray: {nodes} node{'s' * (nodes != 1)}, {cores} core{'s' * (cores != 1)}")

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
            reply = _ray()._private.worker.global_worker.gcs_client.get_all_node_info(timeout=timeout_s)
        except ray_errors() as error:
            raise Unreachable(f"The head of the cluster at {self.address} does not answer: {error}") from error
        return [Member.from_info(info) for info in reply.values()]

    # -- started here

    def _start(self, num_cpus: int | None, store_bytes: int) -> None:
        self._announce("starting Ray …")
        directory = self.home = self._undo.enter_context(ray_temp_dir())
        write_token(directory / "token")
        self._use_token(directory / "token", **_LOOPBACK)
        head = f"{_LOCALHOST[0]}:{find_free_ports(directory.name, 1)}"
        spec = NodeSpec(
            first=True,
            head=head,
            address=_LOCALHOST[0],
            name=node_name(0),
            directory=str(directory / "r"),
            store_bytes=store_bytes,
            wait_s=None,
            cpus=num_cpus,
        )
        with open(directory / "log", "wb") as errors:
            node = self._undo.enter_context(RayNode(spec, os.environ, directory, errors))
        _ray()  # the import takes as long as the start of the node
        node.wait_until_ready(START_S)
        with _loopback(), _keep_signal_handlers():
            self._connect(address=head, _temp_dir=spec.directory)

    def _use_token(self, token: Path | None, **settings: str) -> None:
        settings |= SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._undo.enter_context(environment_variables(settings, remove=("RAY_AUTH_TOKEN", "RAY_ADDRESS")))

    # -- an existing cluster

    def _join(self, address: str, join_s: float) -> None:
        self._announce(
            f"joining the Ray cluster at {address} …" if address != AUTO else "joining the Ray cluster of this machine …"
        )
        found = probe_cluster(address, os.environ, join_s)
        self._undo.enter_context(environment_variables(SETTINGS | found.authentication, remove=found.remove))
        with _keep_signal_handlers():
            self._connect(address=found.address)

    # -- the cluster of the job of this process

    def _join_job(self, job: JobEnv) -> None:
        """The settings are known from the job; wait for the nodes that are missing."""
        self._announce(f"joining the Ray of this job at {job.head} …")
        self.returns = True
        job.token()
        self._use_token(job.token_file)
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
        except ray_errors() as error:
            hint = f"Its logs were in {options['_temp_dir']}/session_latest/logs." if "_temp_dir" in options else ""
            raise WorkerFailed(f"Ray could not be started or joined: {error}", hint) from error
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray._private.worker.print_to_stdstream = _log_output  # else output of the raylets would break progress displays
        self.address: str = context.address_info["address"]
        self.here: str = context.address_info["node_id"]
        """Id of the node on which this process runs."""

    def _leave(self) -> None:
        ray = _ray()
        thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
        if thread.is_alive():
            log.warning("Ray did not shut down within %.0f s", _SHUTDOWN_S)
            import atexit

            atexit.unregister(ray._private.worker.shutdown)  # it would wait once more


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
        """Members and versions, see `query_members`; {} while the head does not reply."""
        try:
            if self._client is None:
                self._client = self.ray._raylet.GcsClient(address=self.address)
            return query_members(self._client, self.address, timeout_s)
        except self.ray.exceptions.AuthenticationError:
            return {"refused": "token"}
        except ray_errors() as error:
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
    address, announced = job.nodes[job.node], False
    while True:
        reply = head.query(_QUERY_S) if is_listening(job.head, _QUERY_S) else {}
        head.check(reply)
        members = [member for member in (Member(**output) for output in reply.get("members", ())) if member.alive]
        mine = [member for member in members if member.address in (address, resolve_host(address))]
        here = next((member for member in mine if member.name == node_name(job.node)), mine[0] if len(mine) == 1 else None)
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
    return _connection_error(address, within_s) is None


def _connection_error(address: str, within_s: float) -> OSError | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError as error:
        return error
    return None


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
    job_id = os.environ.get("LUDUS_JOB_ID")
    logs = f"See `ludus jobs logs {job_id} --role ray`." if job_id else "See their logs."
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
    # Bounded even if a firewall drops packets.
    if address != AUTO and (error := _connection_error(address, min(CONNECT_S, within_s))) is not None:
        why = "it does not respond" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"There is no Ray cluster at {address}: {why}.",
            "Check that its head is running (`ray start --head --port=6379`) and that this machine can reach the port.",
        ) from error
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
    ours = {"Ray": importlib.metadata.version("ray"), "Python": ".".join(map(str, sys.version_info[:2]))}
    theirs = {"Ray": reply["ray"], "Python": ".".join(reply["python"].split(".")[:2])}
    if theirs["Ray"] and ours != theirs:
        differ = ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in ours if ours[name] != theirs[name])
        raise UsageError(f"The Ray cluster at {address} runs {differ}.", "Use the same versions on all machines.")


def _probe(address: str, environ: Mapping[str, str], within_s: float) -> dict[str, Any]:
    try:
        done = run_query(address, environ, within_s)
    except subprocess.TimeoutExpired:
        raise UsageError(f"The head of the Ray cluster at {address} did not reply within {within_s:.0f} s.") from None
    try:
        reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(f"The Ray cluster at {address} cannot be joined: {' '.join(last) or 'no reply'}") from None
    return reply


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


def _ray() -> Any:
    """Ray, including undocumented parts: all uses of those are in this file."""
    import ray

    return ray


def ray_errors() -> tuple[type[Exception], ...]:
    """What calls of Ray raise when a cluster cannot be started, joined or reached; there is no common base."""
    return _ray().exceptions.RayError, RuntimeError, OSError, ValueError, LookupError, AttributeError, AssertionError


def _log_output(output: Mapping[str, Any], **_: Any) -> None:
    """Log what Ray would print: lost nodes and workers with the end of their logs."""
    log.info("Ray: %s", "\n".join(output["lines"]))


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
