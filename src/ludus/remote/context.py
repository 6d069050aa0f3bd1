"""The run that this process takes part in: its directory, the connection to its hub, and everything started here.

ludus.init(project="./atari", trial="ppo-v0")      # creates or reopens ./atari/ppo-v0
ludus.init(project="./atari", trial="ppo-v0", address="auto")      # the same on every node of a Ray cluster: one run
…
ludus.run_until_asked_to_stop()
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import platform
import re
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ludus
from ludus.core.tree import Array
from ludus.distributed.hub.join import JoinedRun, join
from ludus.distributed.hub.ray_discovery import rendezvous_address
from ludus.distributed.hub.server import REPORT_S, HubLocation
from ludus.distributed.hub.weight_cache import WeightCaches
from ludus.errors import AlreadyExists, LudusError, StoreFull, UsageError, WorkerFailed
from ludus.models.weights.module_spec import forbid_while_loading, main_script
from ludus.models.weights.serialization import encode_weights
from ludus.models.weights.shared_weights import SharedWeightsReader, stage
from ludus.process.signals import stop_on_signals
from ludus.process.workers.supervisor import Process, Supervisor
from ludus.remote.client import HubConnection
from ludus.storage.local import LocalStore
from ludus.storage.redact import redact_command

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

META = "meta.json"
REPORT_VARIABLE = "LUDUS_REPORT_S"
_WATCH_S = 0.2


@dataclass(frozen=True)
class JoinTicket:
    """What a child process needs to take part in the run. Pickled only for child processes."""

    location: HubLocation
    main_file: str | None
    classes: dict[str, type[nn.Module]] = field(default_factory=dict)
    """Classes of the models made so far: those of the launching script cannot be imported."""
    threads: int | None = None
    """Number of torch threads in that process; None leaves it unchanged."""


class RunContext:
    """A process that takes part in a run. Created by `init`; a context manager that leaves the run at its end."""

    def __init__(self, joined_run: JoinedRun, ticket: JoinTicket | None = None) -> None:
        self._joined = joined_run
        self.hub, self.location = joined_run.hub, joined_run.location
        self.directory = Path(self.location.directory)
        self._pid = os.getpid()
        self.main_file = ticket.main_file if ticket else main_script()
        self.classes: dict[str, type[nn.Module]] = dict(ticket.classes) if ticket else {}
        self.threads = ticket.threads if ticket else None
        self.shared: dict[tuple[str, str], Any] = {}
        """Objects shared by all handles of one name in this process: ("model", name) → inference, ("buffer", name) → …"""
        self.lock = threading.RLock()
        self.ended = False
        """Iterations over buffers end. A plain flag, because a signal handler may set it and must not use locks."""
        self.preload = ["numpy", "torch", "ludus.remote.model", "ludus.remote.buffer", "ludus.distributed.gateway_workers"]
        """Modules that worker processes import in advance."""
        self._client: HubConnection | None = None
        self._supervisor: Supervisor | None = None
        self._weight_caches: WeightCaches | None = None
        self._close_callbacks: list[Callable[[], None]] = []
        self._watched_processes: list[Process] = []
        self._closed = False
        self._counts: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RunContext of {self.directory}{' (hub)' if self.hub else ''}>"

    @property
    def is_current_process(self) -> bool:
        """False in a fork of its process, which must join anew."""
        return self._pid == os.getpid()

    def exit_error(self) -> WorkerFailed:
        return WorkerFailed(f"This process has left the run {self.directory}.", "Call ludus.init to open it, or another.")

    @property
    def client(self) -> HubConnection:
        client = self._client
        if client is None or self._closed:
            with self.lock:
                if self._closed:
                    raise self.exit_error()
                client = self._client = self._client or HubConnection(self.location)
        return client

    @property
    def lost(self) -> Exception | None:
        """Set when the hub is gone or this process has left the run."""
        if self._closed:
            return self.exit_error()
        return self._client.lost if self._client is not None else None

    @property
    def supervisor(self) -> Supervisor:
        with self.lock:
            if self._closed:
                raise self.exit_error()
            if self._supervisor is None:
                self._supervisor = Supervisor(log_dir=self.log_dir, preload=self.preload)
            return self._supervisor

    @property
    def log_dir(self) -> Path:
        """Machines that share a file system have separate log directories."""
        logs = self.directory / "logs"
        return logs if self.location.is_local else logs / platform.node()

    # -- weights

    def reader(self, info: Mapping[str, Any]) -> SharedWeightsReader:
        """Versions of a model that the hub has described: in its shared memory, or in the cache of this machine."""
        return SharedWeightsReader(Path(info["board"])) if self.location.is_local else self._open_weight_caches().reader(info)

    def graph(self, path: str) -> str:
        """Path of a traced model on this machine."""
        return path if self.location.is_local else self._open_weight_caches().graph(path)

    def _open_weight_caches(self) -> WeightCaches:
        client = self.client
        with self.lock:
            if self._weight_caches is None:
                self._weight_caches = WeightCaches(Path(self.location.mirror), client)
            return self._weight_caches

    @contextlib.contextmanager
    def stage_weights(self, weights: Mapping[str, Array]) -> Iterator[str]:
        """Stage weights for the hub; yields the name of the file. Raises StoreFull."""
        self.client.check()  # the staging directory exists only as long as the hub
        if self.location.is_local:
            file = stage(Path(self.location.staging), weights)
            try:
                yield file.name
            finally:
                file.unlink(missing_ok=True)  # unless the hub has taken it
            return
        name, used = self.client.upload(encode_weights(weights)), False
        try:
            yield name
            used = True
        finally:
            if not used:
                with contextlib.suppress(LudusError):
                    self.client.call({"op": "stage.drop", "file": name})

    def ticket(self, threads: int | None = None) -> JoinTicket:
        return JoinTicket(self.location, self.main_file, dict(self.classes), threads)

    def number(self, kind: str) -> int:
        """Count things of one kind started here (0, 1, 2, …), to name them."""
        with self.lock:
            return next(self._counts[kind])

    def watch(self, process: Process) -> None:
        """Fail the run if this process fails for good."""
        self._watched_processes.append(process)

    def failure(self) -> WorkerFailed | None:
        for process in list(self._watched_processes):
            if process.state == "failed":
                message = f"{process.name} failed: {process.error.rstrip() or 'it died'}"
                return WorkerFailed(message, f"Its log: {self.log_dir / process.name}.log")
        return None

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` when this process leaves the run, in reverse order of registration."""
        self._close_callbacks.append(closer)

    def release_after_fork(self) -> None:
        """In a fork of this process: release the locks, which belong to the parent."""
        for part in (self.hub, self._weight_caches, self._joined):
            if part is not None:
                part.release_after_fork()

    def end_iterations(self) -> None:
        """End all iterations over buffers in this process. May be called in a signal handler."""
        self.ended = True

    def close(self) -> None:
        """Leave the run: stop everything started here, store the newest weights, close the hub if it is in this process."""
        global _current, _former
        with self.lock:
            if self._closed:
                return
            self._closed = True
        self.end_iterations()
        try:
            with contextlib.ExitStack() as parts:  # closes all of them, even if one fails
                for part in (self._joined, self.hub, self._client, self._supervisor):
                    if part is not None:
                        parts.callback(part.close)
                for closer in self._close_callbacks:
                    parts.callback(closer)
        finally:
            atexit.unregister(self.close)
            with _lock:
                if _current is self:
                    _current, _former = None, self


# -- the context of this process ----------------------------------------------------------------------------------------

_lock = threading.RLock()
_current: RunContext | None = None
_former: RunContext | None = None
_left: list[RunContext] = []
_inherited: JoinTicket | None = None


def init(
    project: str | Path | None = None,
    trial: str | None = None,
    *,
    address: str | None = None,
    report_interval_s: float | None = None,
) -> RunContext:
    """Open the run `<project>/<trial>` (default: `runs/<time>`), or join it if it is open.

        ludus.init(project="./atari", trial="ppo-v0")

    Models and buffers of the run are found by name from every process; weights, metrics and logs go to its
    directory. A run that was closed or killed continues with its newest weights. Metrics are reported every 10 seconds, or every
    `report_interval_s` or LUDUS_REPORT_S seconds. Raises UsageError when this process takes part in another run.

    With an `address` processes on other machines take part. It is a Ray cluster ("host:port" of its head, or "auto"; also
    set by the variables RAY_ADDRESS and ip_head, for a run with a `trial`), or the machine and port of the hub itself
    ("tcp://host:port", with the run's token in the file named by LUDUS_TOKEN_FILE). Use the same project, trial and address
    everywhere: the first process becomes the hub, which writes the run directory. Raises WorkerFailed if the hub cannot be reached.
    """
    global _current
    forbid_while_loading("ludus.init")
    with _lock:
        here = _find_context()
        if here is not None:
            if (project is not None or trial is not None) and _directory(project, trial, here.directory.name) != here.directory:
                message = f"This process takes part in the run {here.directory} already."
                raise UsageError(message, "A process has one run; start another process.")
            return here
        if address is not None and trial is None:
            raise UsageError(f"address={address!r}: without a trial, other machines cannot find this run.", "Set trial=….")
        if trial is not None:
            address = rendezvous_address(address)
        directory = _directory(project, trial, time.strftime("%Y-%m-%d_%H-%M-%S-") + uuid.uuid4().hex[:5])
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreFull(f"Cannot make the run {directory}: {error.strerror}.", "Choose another project directory.") from error
        joined_run = join(directory, address, _report_interval(report_interval_s))
        if joined_run.hub is not None:
            _write_meta(directory)
        return _enter(RunContext(joined_run))


def current(what: str) -> RunContext:
    """The run of this process; opens one if there never was one. `what`: the caller, for errors. Raises WorkerFailed after its end."""
    forbid_while_loading(what)
    context = _find_context()
    if context is None and _former is not None:  # a late call must not silently open another run
        raise _former.exit_error()
    return context or init()


def adopt(ticket: JoinTicket) -> RunContext:
    """Take part in the run of the parent process."""
    global _current
    with _lock:
        if _current is None:
            _enter(RunContext(JoinedRun(ticket.location, None), ticket))
        assert _current is not None
        return _current


def _find_context() -> RunContext | None:
    with _lock:
        if _current is None and _inherited is not None:
            adopt(_inherited)
        return _current


def _enter(context: RunContext) -> RunContext:
    global _current
    _current = context
    atexit.register(context.close)
    return context


def _after_fork() -> None:
    """A fork is not the hub and must not use its connections; it makes its own when needed."""
    global _current, _inherited, _lock
    _lock = threading.RLock()
    if _current is not None:
        _current.release_after_fork()
        _left.append(_current)  # keep a reference, so that no finalizer of the parent's objects runs here
        atexit.unregister(_current.close)
        _inherited = _current.ticket(_current.threads)
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _directory(project: str | Path | None, trial: str | None, default: str) -> Path:
    name = default if trial is None else trial
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise UsageError(f"trial={name!r} is not a plain name.", "Use letters, digits, and . _ + - inside.")
    if re.match(r"\w{2,}:/", str(project)):
        hint = "The trial of a script needs a directory; a training may use a store URL."
        raise UsageError(f"project={str(project)!r} is not a directory.", hint)
    return (Path("runs" if project is None else project).expanduser() / name).resolve()


def _report_interval(given: float | None) -> float:
    text = os.environ.get(REPORT_VARIABLE, "") if given is None else str(given)
    try:
        seconds = float(text) if text else REPORT_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise UsageError(f"The report interval {text!r} is not a positive number of seconds.")
    return seconds


def _write_meta(directory: Path) -> None:
    """Write once: a reopened run keeps its original metadata."""
    versions = {"ludus": ludus.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        module = sys.modules.get(package)
        if module is not None:
            versions[package] = str(getattr(module, "__version__", "unknown"))
    meta = {
        "kind": "session",
        "versions": versions,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "command": redact_command(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    with contextlib.suppress(AlreadyExists):
        LocalStore(directory).put(META, json.dumps(meta, indent=1).encode(), overwrite=False)


# -- public functions ---------------------------------------------------------------------------------------------------


def metric(name: str, value: float, **labels: Any) -> None:
    """Report a number. Its mean over each report interval goes to `metrics.jsonl` and TensorBoard of the run.

        ludus.metric("episode_return", 21.0)
        ludus.metric("win", 1, map="ice")          # named win{map=ice}

    May be called from any process and thread of the run, and from an event loop; never blocks. `timesteps` is special: the
    highest value becomes the x-axis.
    """
    text = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    current("ludus.metric").client.metric(f"{name}{{{text}}}" if text else name, float(value))


def run_until_asked_to_stop() -> None:
    """Wait for Ctrl-C or SIGTERM, then close everything. Raises WorkerFailed when a part of the run fails for good."""
    context = current("ludus.run_until_asked_to_stop")
    try:
        with stop_on_signals() as stop:
            while not stop():
                time.sleep(_WATCH_S)
                failure = context.failure()
                if failure is not None:
                    raise failure
                context.client.check()
    finally:
        with contextlib.suppress(LudusError) if sys.exc_info()[0] else contextlib.nullcontext():
            context.close()
