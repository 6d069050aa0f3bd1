"""`ludus tensorboard RUN`: the curves of a run in a browser, also from another machine: the line of SSH that brings them there is said."""

from __future__ import annotations

import getpass
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ludus.cli.run_argument import complete_run, run_place
from ludus.errors import NotFound, StoreError, UsageError, WorkerFailed

log = logging.getLogger(__name__)

PORT = 6006
_PORTS, _ATTEMPTS = 100, 5
_READY_S, _END_S, _AGAIN_S = 90.0, 5.0, 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 # what listens everywhere is reached at
_EVENTS = "events."


def tensorboard(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run, sweep, or directory or URL with runs.",
            callback=run_place,
            autocompletion=complete_run,
        ),
    ] = "runs",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help=f"Port. Default: the first free one from {PORT}.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; TensorBoard has no password.")] = "127.0.0.1",
    print_: Annotated[bool, typer.Option("--print", help="Only print the SSH tunnel command.")] = False,
) -> None:
    """Start TensorBoard for a run and print the SSH tunnel command for remote machines."""
    if print_:
        print(Forwarding.of(os.environ).line(port or PORT, host))
        return
    if host not in _LOOPBACK:
        print(f"ludus: everybody who reaches {host} on this port can look: TensorBoard has no password", file=sys.stderr)
    with interruptible(), shown_directory(run) as directory, started(directory, host, port) as (process, chosen):
        print(announcement(run, host, chosen, Forwarding.of(os.environ)), flush=True)
        code = process.wait()
        raise WorkerFailed(f"TensorBoard ended by itself, with code {code}.")


# -- the way to it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forwarding:
    """How this machine is reached from the user's own: `jump` is the machine that one logs in to when it cannot be reached directly."""

    user: str
    host: str
    port: int = 22
    jump: str = ""

    @staticmethod
    def of(environ: Mapping[str, str]) -> Forwarding:
        user, here = getpass.getuser(), socket.gethostname()
        address, port = _server(environ)
        if environ.get("SLURM_JOB_ID"):
            # The variables of SSH come from where the job was submitted; the node is behind that machine.
            login = address or environ.get("SLURM_SUBMIT_HOST", "")
            node = environ.get("SLURMD_NODENAME") or here
            if login and login != node:
                return Forwarding(user, node, 22, _jump(user, login, port))
            return Forwarding(user, node)
        return Forwarding(user, address or here, port)

    def line(self, port: int, host: str = "127.0.0.1", ours: int = PORT) -> str:
        """To be typed on the user's own machine; then what listens at `host` here is at its port `ours`."""
        words = ["ssh", "-N"]
        if self.jump:
            words += ["-J", self.jump]
        if self.port != 22:
            words += ["-p", str(self.port)]
        return shlex.join([*words, "-L", f"{ours}:{_bracketed(_EVERY.get(host, host))}:{port}", f"{self.user}@{self.host}"])


def _server(environ: Mapping[str, str]) -> tuple[str, int]:
    """The address and port by which this machine was reached over SSH; "" if it was not."""
    words = environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4 or not words[3].isdigit():
        return "", 22
    return words[2].partition("%")[0], int(words[3])


def _jump(user: str, host: str, port: int) -> str:
    return f"{user}@{_bracketed(host)}" + (f":{port}" if port != 22 else "")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def announcement(run: str, host: str, port: int, forwarding: Forwarding) -> str:
    lines = [f"TensorBoard of {run}: http://{_bracketed(host)}:{port}/ (Ctrl-C ends it)"]
    if host in _LOOPBACK:
        lines += [
            "From another machine, type there:",
            f"  {forwarding.line(port, host)}",
            f"and open http://127.0.0.1:{PORT}/ there.",
        ]
    return "\n".join(lines)


# -- what it shows ------------------------------------------------------------------------------------------------------


@contextmanager
def shown_directory(run: str) -> Iterator[Path]:
    """Where the events are: of a run on a store, copies of them in a directory that goes away again, brought up to date while it lasts."""
    from ludus.experiments.runs.remote_runs import directory_of, is_remote
    from ludus.experiments.runs.run_dir import find_runs

    directory = directory_of(run)
    if not is_remote(directory):
        if not directory.is_dir():
            raise NotFound(f"There is no directory {run}.", "`ludus runs list` shows where runs are.")
        if not find_runs(run) and next(directory.rglob(f"{_EVENTS}*"), None) is None:
            raise NotFound(f"No runs in {run}.", "`ludus train CartPole-v1` makes one.")
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="ludus-tensorboard-") as copies:
        mirror = Mirror(run, directory, Path(copies))
        if not mirror.bring():
            raise NotFound(f"No runs in {run}.", "`ludus runs list` shows where runs are.")
        stop = threading.Event()
        thread = threading.Thread(target=mirror.follow, args=(stop,), name="ludus-events", daemon=True)
        thread.start()
        try:
            yield Path(copies)
        finally:
            stop.set()
            thread.join(_END_S)


class Mirror:
    """Copies of the events of the runs at a place of a store. Not in their working directories, which belong to whoever trains."""

    def __init__(self, place: str, top: Path, copies: Path) -> None:
        self._place, self._top, self._copies = place, top, copies
        self._whole: set[Path] = set()
        """Runs that ended before they were copied: nothing of them changes, unless they are resumed, which a new scan finds out."""

    def bring(self) -> int:
        """How many runs there are. Raises StoreError."""
        from ludus.experiments.runs.run_dir import find_runs

        runs = find_runs(self._place)
        for run in runs:
            self._bring(run)
        return len(runs)

    def follow(self, stop: threading.Event) -> None:
        said = False
        while not stop.wait(_AGAIN_S):
            try:
                self.bring()
                said = False
            except StoreError as error:  # it may be there again the next time
                if not said:
                    log.warning("what is shown may be old: %s", error)
                said = True

    def _bring(self, run: Path) -> None:
        from ludus.experiments.runs.remote_runs import store_of
        from ludus.experiments.runs.run_status import ENDED, read_status

        ended = read_status(run, fetched=True).state in ENDED
        if ended and run in self._whole:
            return
        there = self._copies / run.relative_to(self._top)
        there.mkdir(parents=True, exist_ok=True)
        store = store_of(run)
        for name in store.list(""):
            if name.startswith(_EVENTS):
                with suppress(NotFound):  # between the list and now
                    _grow(there / name, store.get(name))
        (self._whole.add if ended else self._whole.discard)(run)


def _grow(path: Path, data: bytes) -> None:
    """Events are only ever added, and TensorBoard keeps the file open: it would not see another one in its place."""
    have = path.stat().st_size if path.exists() else 0
    with open(path, "ab") as file:
        file.write(data[have:])


# -- the process --------------------------------------------------------------------------------------------------------


@contextmanager
def started(directory: Path, host: str, port: int | None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """TensorBoard, answering, and its port; ended with all that it started when this is left, or when this process is gone."""
    with tempfile.TemporaryFile("w+b") as said:
        for attempt in range(_ATTEMPTS):
            chosen = _free(host, port)
            process = _start(directory, host, chosen, said.fileno())
            try:
                if _answers(process, host, chosen):
                    yield process, chosen
                    return
            finally:
                _end(process)
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
            taken = any("already in use" in line or "could not bind" in line for line in words)  # somebody was quicker
            if not taken or port is not None or attempt == _ATTEMPTS - 1:
                raise WorkerFailed(f"TensorBoard did not start: {words[-1] if words else f'no answer in {_READY_S:g} s'}")
            said.seek(0)
            said.truncate()


def _start(directory: Path, host: str, port: int, said: int) -> subprocess.Popen[bytes]:
    from ludus.process import identity

    parent = os.getpid()
    return subprocess.Popen(  # noqa: S603
        [
            *(sys.executable, "-P", "-m", "tensorboard.main"),
            *("--logdir", str(directory), "--host", host, "--port", str(port)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        start_new_session=True,
        preexec_fn=lambda: identity.end_with(parent, signal.SIGTERM),
    )


def _answers(process: subprocess.Popen[bytes], host: str, port: int) -> bool:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return process.poll() is None
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """It leads a session of its own: what it started is in it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _free(host: str, port: int | None) -> int:
    """Raises UsageError where none is."""
    asked = range(PORT, PORT + _PORTS) if port is None else (port,)
    for candidate in asked:
        if _is_free(host, candidate):
            return candidate
    if port is not None:
        raise UsageError(f"Port {port} of {host} is taken, or not ours to take.", "Leave --port out, and a free one is found.")
    raise UsageError(f"No port from {asked[0]} to {asked[-1]} of {host} is free.", "Choose another one: --port.")


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine: {error}.") from error
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(address)
        except OSError:
            return False
    return True


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is how it ends, and no failure."""

    def heed(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heeded = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: a terminal that is closed is no reason
        heeded.remove(signal.SIGHUP)
    before = {number: signal.signal(number, heed) for number in heeded}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
