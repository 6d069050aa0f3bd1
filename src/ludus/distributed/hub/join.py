"""How a process comes into a run: it finds the hub on this machine or on another one, or becomes the hub.

address                     who is the hub
None                        whoever holds the run's lock on this machine; no other machine takes part
"tcp://host:port"           whoever listens there; a process on that host opens it when nobody does
"host:port", "auto"         whoever holds the run's name in that Ray cluster
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

from ludus.distributed.hub.ray_discovery import Keeper, Spot, card_address
from ludus.distributed.hub.rpc import Connection, Header
from ludus.distributed.hub.server import REPORT_S, Door, Hub, Place, find_or_start, found_here, shared_memory, short_temp
from ludus.distributed.hub.weight_cache import Share
from ludus.errors import UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp
from ludus.process.auth import read_token, write_token
from ludus.process.temp_dirs import TempDir

log = logging.getLogger(__name__)

JOIN_S = 30.0
"""How long a process waits for a hub on another machine."""
TOKEN_VARIABLE = "LUDUS_TOKEN_FILE"  # noqa: S105 - the name of a variable
_ANSWER_S = 10.0
_AGAIN_S = 0.2


def _nothing() -> None:
    pass


@dataclass
class Joined:
    """A process's part in a run: `close` gives back what joining took, after everything else is closed."""

    place: Place
    hub: Hub | None
    close: Callable[[], None] = _nothing
    forget: Callable[[], None] = _nothing
    """In a copy of this process made by fork()."""


def join(directory: Path, address: str | None = None, report_s: float = REPORT_S) -> Joined:
    """Find the hub of the run or become it. Raises WorkerFailed when it cannot be reached, UsageError for a wrong token."""
    if address is None:
        return Joined(*find_or_start(directory, report_s))
    here = found_here(directory)
    if here is not None and here.host:
        return Joined(here, None)
    if is_tcp(address):
        return _join_at(directory, address, report_s)
    return _join_in_cluster(directory, address, report_s)


# -- at an address ------------------------------------------------------------------------------------------------------


def _join_at(directory: Path, address: str, report_s: float) -> Joined:
    host, port = host_and_port(address)
    door, ours = Door(host, port, os.environ.get(TOKEN_VARIABLE, "")), _is_ours(host)
    if ours and door.token_file:
        with contextlib.suppress(FileExistsError):
            write_token(Path(door.token_file))
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            if port and (door.token_file or not ours or _listens(host, port)):
                return _away(directory, address, _given(door.token_file, deadline))
        except WorkerFailed as error:  # nobody is there yet
            if time.monotonic() > deadline:
                raise WorkerFailed(
                    f"The hub of {directory.name} could not be reached at {address} within {JOIN_S:g} s.", error.message
                ) from error
        if ours:
            with contextlib.suppress(_Taken):
                return _opened_at(directory, door, report_s)
        time.sleep(_AGAIN_S)


class _Taken(Exception):
    """Somebody else listens there since a moment ago."""


def _opened_at(directory: Path, door: Door, report_s: float) -> Joined:
    try:
        place, hub = find_or_start(directory, report_s, door)
    except UsageError:
        if door.port and _listens(door.host, door.port):
            raise _Taken from None
        raise
    if hub is None and not place.host:
        raise _alone(directory)
    return Joined(place, hub)


def _alone(directory: Path) -> UsageError:
    return UsageError(
        f"The run {directory} is open on this machine, by a process that gave no address.",
        "Give it the address too, and start it again.",
    )


def _given(token_file: str, deadline: float) -> str:
    """Raises WorkerFailed while the file may still come: on a shared file system the hub makes it."""
    if not token_file:
        raise UsageError(
            "The hub asks for a token, and none is given.", f"Set {TOKEN_VARIABLE} to the file with the run's token."
        )
    if not Path(token_file).exists() and time.monotonic() < deadline:
        raise WorkerFailed(f"There is no token at {token_file} yet.")
    return token_file


def _is_ours(host: str) -> bool:
    """Whether an address is one of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


# -- in a cluster -------------------------------------------------------------------------------------------------------


def _join_in_cluster(directory: Path, address: str, report_s: float) -> Joined:
    deadline = time.monotonic() + 2 * JOIN_S  # a worker of Ray has to start for the notice
    log.info("looking for the run %s in the Ray cluster at %s", directory, address)
    keeper = Keeper(directory, address)
    try:
        while True:
            found = keeper.find_or_claim(max(1.0, deadline - time.monotonic()))
            if isinstance(found, str):
                return _opened_in(keeper, directory, found, report_s)
            try:
                joined = _away_with(directory, found)
            except WorkerFailed:  # it is ending, and its notice with it, or it is cut off
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)
            else:
                keeper.close()
                return joined
    except BaseException:
        keeper.close()
        raise


def _opened_in(keeper: Keeper, directory: Path, host: str, report_s: float) -> Joined:
    place, hub = find_or_start(directory, report_s, Door(host))
    if hub is None:
        keeper.close()
        if not place.host:
            raise _alone(directory)
        return Joined(place, None)
    try:
        keeper.leave(Spot(hub.address, read_token(place.token_file).decode()))
    except BaseException:
        hub.close()
        raise
    log.info("the hub of %s listens at %s for the other nodes", directory, hub.address)
    return Joined(place, hub, keeper.close, keeper.forget)


def _away_with(directory: Path, spot: Spot) -> Joined:
    """The token came by message: it is laid down where our own processes find it, and nobody else."""
    scratch = TempDir(short_temp())
    try:
        write_token(scratch.path / "token", spot.token.encode())
        joined = _away(directory, spot.address, str(scratch.path / "token"))
    except BaseException:
        scratch.close()
        raise
    inner = joined.close

    def close() -> None:
        inner()
        scratch.close()

    return Joined(joined.place, None, close, joined.forget)


# -- away from the hub --------------------------------------------------------------------------------------------------


def _away(directory: Path, address: str, token_file: str) -> Joined:
    """Raises WorkerFailed when nobody listens there, UsageError when it is another run or another token."""
    read_token(token_file)
    with ThreadPoolExecutor(1) as aside:  # the caller may itself be on an event loop
        hello, local_host = aside.submit(asyncio.run, _greeted(address, token_file)).result(2 * _ANSWER_S)
    there = Path(str(hello["place"]["directory"]))
    if there.name != directory.name:
        raise UsageError(f"The hub at {address} has the run {there.name!r}, not {directory.name!r}.", "Say trial=….")
    scratch = TempDir(short_temp())
    try:
        share = Share(shared_memory(), str(hello["run"]))
    except BaseException:
        scratch.close()
        raise
    place = Place(
        directory=str(directory),
        socket=address,
        scratch=str(scratch.path),
        staging="",
        node=share.node,
        host=card_address() or local_host,
        token_file=token_file,
        mirror=str(share.path),
    )

    def close() -> None:
        share.close()
        scratch.close()

    return Joined(place, None, close, share.forget)


async def _greeted(address: str, token_file: str) -> tuple[Header, str]:
    connection = await Connection.open(address, "The hub of this run", token_file=token_file)
    try:
        reply = await connection.request({"op": "hello"}, timeout_s=_ANSWER_S)
    except TimeoutError as error:
        raise WorkerFailed(f"The hub at {address} does not answer.", "Is its process held?") from error
    finally:
        await connection.close()
    return reply[-1][0], connection.local_host
