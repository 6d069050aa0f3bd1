"""`ludus tensorboard RUN`: start TensorBoard for a run, and print the SSH tunnel command for a remote machine."""

from __future__ import annotations

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
from typing import Annotated

import typer

from ludus.cli.common_options import run_argument
from ludus.cli.interrupts import handle_stop_signals
from ludus.errors import NotFound, StoreError, UsageError, WorkerFailed
from ludus.process.user import user_name

log = logging.getLogger(__name__)

PORT = 6006
_PORTS, _ATTEMPTS = 100, 5
_READY_S, _END_S, _REFRESH_S = 90.0, 5.0, 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 # wildcard address → loopback address
_EVENTS = "events."


def tensorboard(
    run: Annotated[
        str,
        run_argument(metavar="RUN", help="Run, sweep, or directory or URL with runs."),
    ] = "runs",
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help=f"Port. Default: the first free one from {PORT}.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; TensorBoard has no password.")] = "127.0.0.1",
    print_: Annotated[bool, typer.Option("--print", help="Only print the SSH tunnel command.")] = False,
) -> None:
    """Start TensorBoard for a run and print the SSH tunnel command for remote machines."""
    if print_:
        print(SshTunnel.of(os.environ).line(port or PORT, host))
        return
    if host not in _LOOPBACK:
        print(f"ludus: TensorBoard has no password: anyone who can connect to {host} can read it", file=sys.stderr)
    with exit_on_signals(), event_directory(run) as directory, running_tensorboard(directory, host, port) as (process, chosen):
        print(announcement(run, host, chosen, SshTunnel.of(os.environ)), flush=True)
        code = process.wait()
        raise WorkerFailed(f"TensorBoard exited with code {code}.")


# -- SSH tunnel ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SshTunnel:
    """How to reach this machine over SSH; `jump` is the login host if it cannot be reached directly."""

    user: str
    host: str
    port: int = 22
    jump: str = ""

    @staticmethod
    def of(environ: Mapping[str, str]) -> SshTunnel:
        user, here = user_name(), socket.gethostname()
        words = environ.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
        known = len(words) == 4 and words[3].isdigit()
        address, port = (words[2].partition("%")[0], int(words[3])) if known else ("", 22)
        if environ.get("SLURM_JOB_ID"):
            # SSH_CONNECTION was inherited from the submit host; the node is reached through it.
            login = address or environ.get("SLURM_SUBMIT_HOST", "")
            node = environ.get("SLURMD_NODENAME") or here
            if login and login != node:
                return SshTunnel(user, node, 22, f"{user}@{_bracket_ipv6(login)}" + (f":{port}" if port != 22 else ""))
            return SshTunnel(user, node)
        return SshTunnel(user, address or here, port)

    def line(self, port: int, host: str = "127.0.0.1", ours: int = PORT) -> str:
        """The command to type on the user's machine, which forwards its port `ours` to `host:port` here."""
        words = ["ssh", "-N"]
        if self.jump:
            words += ["-J", self.jump]
        if self.port != 22:
            words += ["-p", str(self.port)]
        return shlex.join([*words, "-L", f"{ours}:{_bracket_ipv6(_WILDCARD.get(host, host))}:{port}", f"{self.user}@{self.host}"])


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def announcement(run: str, host: str, port: int, tunnel: SshTunnel) -> str:
    lines = [f"TensorBoard of {run}: http://{_bracket_ipv6(host)}:{port}/ (Ctrl-C ends it)"]
    if host in _LOOPBACK:
        lines += [
            "From another machine, type there:",
            f"  {tunnel.line(port, host)}",
            f"and open http://127.0.0.1:{PORT}/ there.",
        ]
    return "\n".join(lines)


# -- event files --------------------------------------------------------------------------------------------------------


@contextmanager
def event_directory(run: str) -> Iterator[Path]:
    """The directory with the event files; for runs on a store a temporary copy, which is refreshed in the background."""
    from ludus.experiments.runs.remote_runs import directory_of, is_remote
    from ludus.experiments.runs.run_dir import find_runs

    directory = directory_of(run)
    if not is_remote(directory):
        if not directory.is_dir():
            raise NotFound(f"There is no directory {run}.", "`ludus runs list` shows where runs are.")
        if not find_runs(run) and next(directory.rglob(f"{_EVENTS}*"), None) is None:
            raise NotFound(f"No runs in {run}.", "`ludus train CartPole-v1` creates one.")
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="ludus-tensorboard-") as copies:
        mirror = EventMirror(run, directory, Path(copies))
        if not mirror.refresh():
            raise NotFound(f"No runs in {run}.", "`ludus runs list` shows where runs are.")
        stop = threading.Event()
        thread = threading.Thread(target=mirror.follow, args=(stop,), name="ludus-events", daemon=True)
        thread.start()
        try:
            yield Path(copies)
        finally:
            stop.set()
            thread.join(_END_S)


class EventMirror:
    """Copies the event files of runs on a store to a separate directory; the run directories belong to the training."""

    def __init__(self, place: str, top: Path, copies: Path) -> None:
        self._place, self._top, self._copies = place, top, copies
        self._complete: set[Path] = set()
        """Runs that had ended when they were copied; they are copied again only if they are resumed."""

    def refresh(self) -> int:
        """Copy new events of all runs; returns the number of runs. Raises StoreError."""
        from ludus.experiments.runs.run_dir import find_runs

        runs = find_runs(self._place)
        for run in runs:
            self._copy_events(run)
        return len(runs)

    def follow(self, stop: threading.Event) -> None:
        """Refresh the copies until `stop` is set."""
        warned = False
        while not stop.wait(_REFRESH_S):
            try:
                self.refresh()
                warned = False
            except StoreError as error:  # retried the next time
                if not warned:
                    log.warning("the curves may be out of date: %s", error)
                warned = True

    def _copy_events(self, run: Path) -> None:
        from ludus.experiments.runs.remote_runs import store_of
        from ludus.experiments.runs.run_status import ENDED, read_status

        ended = read_status(run, fetched=True).state in ENDED
        if ended and run in self._complete:
            return
        copy = self._copies / run.relative_to(self._top)
        copy.mkdir(parents=True, exist_ok=True)
        store = store_of(run)
        for name in store.list(""):
            if name.startswith(_EVENTS):
                with suppress(NotFound):  # deleted since it was listed
                    data = store.get(name)
                    with open(copy / name, "ab") as file:  # event files only grow, and TensorBoard keeps them open
                        file.write(data[file.tell() :])
        (self._complete.add if ended else self._complete.discard)(run)


# -- process ------------------------------------------------------------------------------------------------------------


@contextmanager
def running_tensorboard(directory: Path, host: str, port: int | None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start TensorBoard; yields its process and port once it accepts connections. It ends with the block or this process."""
    with tempfile.TemporaryFile("w+b") as output:
        for attempt in range(_ATTEMPTS):
            chosen = _find_free_port(host, port)
            process = _start(directory, host, chosen, output.fileno())
            try:
                if _wait_until_ready(process, host, chosen):
                    yield process, chosen
                    return
            finally:
                _end(process)
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            taken = any("already in use" in line or "could not bind" in line for line in lines)  # taken since it was checked
            if not taken or port is not None or attempt == _ATTEMPTS - 1:
                raise WorkerFailed(f"TensorBoard did not start: {lines[-1] if lines else f'no answer in {_READY_S:g} s'}")
            output.seek(0)
            output.truncate()


def _start(directory: Path, host: str, port: int, output: int) -> subprocess.Popen[bytes]:
    from ludus.process import children

    parent = os.getpid()
    return subprocess.Popen(  # noqa: S603
        [
            *(sys.executable, "-P", "-m", "tensorboard.main"),
            *("--logdir", str(directory), "--host", host, "--port", str(port)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: children.die_with_parent(parent, signal.SIGTERM),
    )


def _wait_until_ready(process: subprocess.Popen[bytes], host: str, port: int) -> bool:
    deadline = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return process.poll() is None
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process and all others of its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _find_free_port(host: str, port: int | None) -> int:
    """`port`, or the first free one from PORT on. Raises UsageError if there is none."""
    candidates = range(PORT, PORT + _PORTS) if port is None else (port,)
    for candidate in candidates:
        if _is_port_free(host, candidate):
            return candidate
    if port is not None:
        raise UsageError(f"Port {port} of {host} is in use or not permitted.", "Leave out --port to use a free one.")
    raise UsageError(f"No port from {candidates[0]} to {candidates[-1]} of {host} is free.", "Choose another one: --port.")


def _is_port_free(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host} is not an address of this machine: {error}.") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with code 0 on SIGINT, SIGTERM or SIGHUP."""
    try:
        with handle_stop_signals(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
