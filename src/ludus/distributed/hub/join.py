"""How a process joins a run: it finds the hub on this machine or another one, or becomes the hub.

address                     the hub is
None                        the process that holds the lock of the run on this machine; other machines cannot join
"tcp://host:port"           the process that listens there; started by a process on that host if there is none
"host:port", "auto"         the process that holds the name of the run in that Ray cluster
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ludus.distributed.frames import Header
from ludus.distributed.hub.ray_discovery import HubAddress, RayDiscoveryProcess, card_address
from ludus.distributed.hub.rpc import RpcConnection
from ludus.distributed.hub.server import REPORT_S, Hub, HubLocation, ListenAddress, find_local_hub, find_or_start
from ludus.distributed.hub.weight_cache import NodeCacheDir
from ludus.errors import UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp
from ludus.process.auth import read_token, write_token
from ludus.process.temp_dirs import TempDir, shared_memory_dir, short_temp_dir

log = logging.getLogger(__name__)

JOIN_S = 30.0
"""How long a process waits for a hub on another machine."""
TOKEN_VARIABLE = "LUDUS_TOKEN_FILE"  # noqa: S105 - the name of a variable
_REPLY_TIMEOUT_S = 10.0
_RETRY_S = 0.2


@dataclass
class JoinedRun:
    """Result of joining a run. `close` releases what joining acquired, after everything else is closed."""

    location: HubLocation
    hub: Hub | None
    close: Callable[[], None] = lambda: None
    release_after_fork: Callable[[], None] = lambda: None
    """For a fork of this process."""


def join(directory: Path, address: str | None = None, report_s: float = REPORT_S) -> JoinedRun:
    """Find the hub of the run or become it. Raises WorkerFailed when it cannot be reached, UsageError for a wrong token."""
    if address is None:
        return JoinedRun(*find_or_start(directory, report_s))
    here = find_local_hub(directory)
    if here is not None and here.host:
        return JoinedRun(here, None)
    if is_tcp(address):
        return _join_at(directory, address, report_s)
    return _join_in_cluster(directory, address, report_s)


# -- at an address ------------------------------------------------------------------------------------------------------


def _join_at(directory: Path, address: str, report_s: float) -> JoinedRun:
    host, port = host_and_port(address)
    listen, is_local = ListenAddress(host, port, os.environ.get(TOKEN_VARIABLE, "")), _is_local_address(host)
    if is_local and listen.token_file:
        with contextlib.suppress(FileExistsError):
            write_token(Path(listen.token_file))
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            if port and (listen.token_file or not is_local or _is_listening(host, port)):
                return _join_remote(directory, address, _check_token_file(listen.token_file, deadline))
        except WorkerFailed as error:  # there is no hub yet
            if time.monotonic() > deadline:
                raise WorkerFailed(
                    f"The hub of {directory.name} could not be reached at {address} within {JOIN_S:g} s.", error.message
                ) from error
        if is_local:
            try:
                location, hub = find_or_start(directory, report_s, listen)
            except UsageError:
                if not (port and _is_listening(host, port)):  # else another process has taken the port since
                    raise
            else:
                return JoinedRun(_check_has_address(location), hub)
        time.sleep(_RETRY_S)


def _check_has_address(location: HubLocation) -> HubLocation:
    """Raises UsageError for a hub that other machines cannot reach."""
    if not location.host:
        raise UsageError(
            f"The run {location.directory} is open on this machine, in a process that was started without an address.",
            "Restart that process with the same address.",
        )
    return location


def _check_token_file(token_file: str, deadline: float) -> str:
    """Check the token file. Raises WorkerFailed while it may still appear: on a shared file system the hub creates it."""
    if not token_file:
        raise UsageError(
            "The hub requires a token, and none is given.", f"Set {TOKEN_VARIABLE} to the file with the run's token."
        )
    if not Path(token_file).exists() and time.monotonic() < deadline:
        raise WorkerFailed(f"There is no token at {token_file} yet.")
    return token_file


def _is_local_address(host: str) -> bool:
    """Return whether an address is one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


# -- in a cluster -------------------------------------------------------------------------------------------------------


def _join_in_cluster(directory: Path, address: str, report_s: float) -> JoinedRun:
    deadline = time.monotonic() + 2 * JOIN_S  # Ray has to start a worker for the actor
    log.info("looking for the run %s in the Ray cluster at %s", directory, address)
    with contextlib.ExitStack() as undo:
        discovery = RayDiscoveryProcess(directory, address)
        undo.callback(discovery.close)
        while True:
            found = discovery.find_or_claim(max(1.0, deadline - time.monotonic()))
            if isinstance(found, str):
                location, hub = find_or_start(directory, report_s, ListenAddress(found))
                if hub is None:
                    return JoinedRun(_check_has_address(location), None)
                undo.callback(hub.close)
                discovery.publish(HubAddress(hub.address, read_token(location.token_file).decode()))
                log.info("the hub of %s listens at %s for other nodes", directory, hub.address)
                undo.pop_all()
                return JoinedRun(location, hub, discovery.close, discovery.release_after_fork)
            try:
                return _join_remote(directory, found.address, token=found.token)
            except WorkerFailed:  # the hub is ending, or cannot be reached
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)


# -- on another machine than the hub ------------------------------------------------------------------------------------


def _join_remote(directory: Path, address: str, token_file: str = "", token: str = "") -> JoinedRun:
    """`token`: one without a file; it is stored in a private file for the processes started here.

    Raises WorkerFailed when nothing listens there, UsageError for another run or another token.
    """
    with contextlib.ExitStack() as undo:
        scratch = TempDir(short_temp_dir())
        undo.callback(scratch.close)
        if token:
            token_file = str(scratch.path / "token")
            write_token(Path(token_file), token.encode())
        with ThreadPoolExecutor(1) as executor:  # the caller may be running an event loop
            hello, local_host = executor.submit(asyncio.run, _request_hello(address, token_file)).result(2 * _REPLY_TIMEOUT_S)
        there = Path(str(hello["place"]["directory"]))
        if there.name != directory.name:
            raise UsageError(f"The hub at {address} has the run {there.name!r}, not {directory.name!r}.", "Set trial=….")
        cache_dir = NodeCacheDir(shared_memory_dir(), str(hello["run"]))
        undo.callback(cache_dir.close)
        location = HubLocation(
            directory=str(directory),
            socket=address,
            scratch=str(scratch.path),
            staging="",
            node=cache_dir.node,
            host=card_address() or local_host,
            token_file=token_file,
            mirror=str(cache_dir.path),
        )
        return JoinedRun(location, None, undo.pop_all().close, cache_dir.release_after_fork)


async def _request_hello(address: str, token_file: str) -> tuple[Header, str]:
    connection = await RpcConnection.open(address, "The hub of this run", token_file=token_file)
    try:
        reply = await connection.request({"op": "hello"}, timeout_s=_REPLY_TIMEOUT_S)
    except TimeoutError as error:
        raise WorkerFailed(f"The hub at {address} does not respond.", "Its process may be suspended or overloaded.") from error
    finally:
        await connection.close()
    return reply[-1][0], connection.local_host
