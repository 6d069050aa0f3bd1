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

from ludus.distributed.hub.ray_discovery import HubAddress, RayDiscoveryProcess, card_address
from ludus.distributed.hub.rpc import Header, RpcConnection
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


def _do_nothing() -> None:
    pass


@dataclass
class JoinedRun:
    """Result of joining a run. `close` releases what joining acquired, after everything else is closed."""

    location: HubLocation
    hub: Hub | None
    close: Callable[[], None] = _do_nothing
    release_after_fork: Callable[[], None] = _do_nothing
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
            with contextlib.suppress(_PortTaken):
                return _open_hub_at(directory, listen, report_s)
        time.sleep(_RETRY_S)


class _PortTaken(Exception):
    """Another process has begun to listen on the port."""


def _open_hub_at(directory: Path, listen: ListenAddress, report_s: float) -> JoinedRun:
    try:
        location, hub = find_or_start(directory, report_s, listen)
    except UsageError:
        if listen.port and _is_listening(listen.host, listen.port):
            raise _PortTaken from None
        raise
    if hub is None and not location.host:
        raise _no_address_error(directory)
    return JoinedRun(location, hub)


def _no_address_error(directory: Path) -> UsageError:
    return UsageError(
        f"The run {directory} is open on this machine, in a process that was started without an address.",
        "Restart that process with the same address.",
    )


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
    discovery = RayDiscoveryProcess(directory, address)
    try:
        while True:
            found = discovery.find_or_claim(max(1.0, deadline - time.monotonic()))
            if isinstance(found, str):
                return _open_hub_in_cluster(discovery, directory, found, report_s)
            try:
                joined = _join_remote_with_token(directory, found)
            except WorkerFailed:  # the hub is ending, or cannot be reached
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
            else:
                discovery.close()
                return joined
    except BaseException:
        discovery.close()
        raise


def _open_hub_in_cluster(discovery: RayDiscoveryProcess, directory: Path, host: str, report_s: float) -> JoinedRun:
    location, hub = find_or_start(directory, report_s, ListenAddress(host))
    if hub is None:
        discovery.close()
        if not location.host:
            raise _no_address_error(directory)
        return JoinedRun(location, None)
    try:
        discovery.publish(HubAddress(hub.address, read_token(location.token_file).decode()))
    except BaseException:
        hub.close()
        raise
    log.info("the hub of %s listens at %s for other nodes", directory, hub.address)
    return JoinedRun(location, hub, discovery.close, discovery.release_after_fork)


def _join_remote_with_token(directory: Path, address_and_token: HubAddress) -> JoinedRun:
    """Join with a token that came in a message: it is stored in a private file for the processes started here."""
    scratch = TempDir(short_temp_dir())
    try:
        write_token(scratch.path / "token", address_and_token.token.encode())
        joined = _join_remote(directory, address_and_token.address, str(scratch.path / "token"))
    except BaseException:
        scratch.close()
        raise
    inner = joined.close

    def close() -> None:
        inner()
        scratch.close()

    return JoinedRun(joined.location, None, close, joined.release_after_fork)


# -- on another machine than the hub ------------------------------------------------------------------------------------


def _join_remote(directory: Path, address: str, token_file: str) -> JoinedRun:
    """Raises WorkerFailed when nothing listens there, UsageError for another run or another token."""
    read_token(token_file)
    with ThreadPoolExecutor(1) as executor:  # the caller may be running an event loop
        hello, local_host = executor.submit(asyncio.run, _request_hello(address, token_file)).result(2 * _REPLY_TIMEOUT_S)
    there = Path(str(hello["place"]["directory"]))
    if there.name != directory.name:
        raise UsageError(f"The hub at {address} has the run {there.name!r}, not {directory.name!r}.", "Set trial=….")
    scratch = TempDir(short_temp_dir())
    try:
        cache_dir = NodeCacheDir(shared_memory_dir(), str(hello["run"]))
    except BaseException:
        scratch.close()
        raise
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

    def close() -> None:
        cache_dir.close()
        scratch.close()

    return JoinedRun(location, None, close, cache_dir.release_after_fork)


async def _request_hello(address: str, token_file: str) -> tuple[Header, str]:
    connection = await RpcConnection.open(address, "The hub of this run", token_file=token_file)
    try:
        reply = await connection.request({"op": "hello"}, timeout_s=_REPLY_TIMEOUT_S)
    except TimeoutError as error:
        raise WorkerFailed(f"The hub at {address} does not respond.", "Its process may be suspended or overloaded.") from error
    finally:
        await connection.close()
    return reply[-1][0], connection.local_host
