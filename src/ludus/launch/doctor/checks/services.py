"""Redis and stores: reached, written to, read back, and left as they were. All of it on keys of our own that nobody else has."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ludus.errors import AlreadyExists, ExchangeUnavailable, LudusError, StoreError
from ludus.launch.doctor.checks.directories import kind_of
from ludus.launch.doctor.finding import Finding, failed, ok, warning
from ludus.ray_cluster.cluster import environment
from ludus.storage.base import open_store
from ludus.transport.message_stream import PASSWORD, open_message_stream, split_password

T = TypeVar("T")

_REDIS_S = 3.0
_TRIES = 5
_IMPATIENT = {"LUDUS_S3_CONNECT_TIMEOUT_S": "2", "LUDUS_S3_TIMEOUT_S": "5", "LUDUS_S3_RETRIES": "1", "LUDUS_S3_RETRY_S": "3"}
"""Of a store on S3: a run waits much longer, and who asks a doctor does not. What the environment says goes before."""

SLOW_REDIS_S, SLOW_STORE_S = 0.02, 1.0
_PAYLOAD = b"ludus doctor " * 1000


@dataclass(frozen=True)
class Service:
    """What trying it gave. `seconds`: of each thing that was done, in that order. `why`: and then this happened."""

    shown: str
    seconds: Mapping[str, float]
    why: str = ""
    fix: str = ""
    note: str = ""


# -- Redis ----------------------------------------------------------------------------------------------------------------


def look_redis(url: str) -> Service:
    """By the exchange that a fleet uses, on a channel of its own, which is removed again."""
    shown, took = shown_address(url), dict[str, float]()
    try:
        exchange = open_message_stream(url, f"doctor-{uuid.uuid4().hex}", 4)
        with contextlib.closing(exchange):
            try:
                took["connect"] = _timed(lambda: exchange.read("hello"))[0]
                took["write"], pushed = _timed(lambda: exchange.push(_PAYLOAD, _REDIS_S))
                if not pushed:
                    return Service(
                        shown, took, "it takes nothing more: it has no memory left (maxmemory)", "Raise maxmemory, or empty it."
                    )
                took["read"], deliveries = _timed(lambda: exchange.pull(1, _REDIS_S))
                if [bytes(delivery.data) for delivery in deliveries] != [_PAYLOAD]:
                    return Service(shown, took, "what was written did not come back", "Is it a Redis of version 6.2 or later?")
                exchange.acknowledge([delivery.id for delivery in deliveries])
                took["round trip"] = min(_timed(lambda: exchange.read("hello"))[0] for _ in range(_TRIES))
            finally:
                with contextlib.suppress(LudusError):
                    exchange.drop()
    except LudusError as error:
        remedy = "Is it running, and is its port open for this machine?" if isinstance(error, ExchangeUnavailable) else ""
        return Service(shown, took, error.message.rstrip("."), error.hint or remedy)
    return Service(shown, took)


def judge_redis(service: Service) -> Finding:
    if service.why:
        return failed("memory server", f"{service.shown}: {service.why}", service.fix or "See docs/fleets.md.")
    trip = service.seconds["round trip"]
    said = f"{service.shown}: written, read back and removed; {_ms(trip)} for a round trip"
    if trip > SLOW_REDIS_S:
        return warning("memory server", said, "It is far away, or busy: put it near the learner.")
    return ok("memory server", said)


# -- stores ---------------------------------------------------------------------------------------------------------------


def look_store(place: str) -> Service:
    """A file and a bundle are written, read back, refused where they exist, and deleted."""
    shown, took = shown_address(place), dict[str, float]()
    key = f".doctor-{uuid.uuid4().hex}"
    before = _missing(place)
    try:
        with environment({name: os.environ.get(name, value) for name, value in _IMPATIENT.items()}):
            store = open_store(place)
        try:
            took["write"], _ = _timed(lambda: store.put(f"{key}/value", _PAYLOAD))
            took["read"], read = _timed(lambda: store.get(f"{key}/value"))
            if read != _PAYLOAD:
                return Service(
                    shown, took, "what was written did not come back", "The store is not to be trusted: use another one."
                )
            took["create"], _ = _timed(lambda: store.put(f"{key}/once", b"1", overwrite=False))
            try:
                store.put(f"{key}/once", b"2", overwrite=False)
            except AlreadyExists:
                pass
            else:
                why = "two writers can both create the same file: two trainers could destroy each other's run there"
                return Service(shown, took, why, "Use a store that heeds conditional writes: docs/stores.md names some.")
            took["bundle"], _ = _timed(lambda: store.put_bundle(f"{key}/bundle", {"a": _PAYLOAD}))
            if store.get_bundle(f"{key}/bundle") != {"a": _PAYLOAD}:
                return Service(shown, took, "a bundle did not come back as it was written", "The store is not to be trusted.")
        finally:
            with contextlib.suppress(StoreError):
                took["delete"], _ = _timed(lambda: store.delete(key))
    except LudusError as error:
        return Service(shown, took, error.message.rstrip("."), error.hint)
    finally:
        _remove(before)
    note = "" if "://" in place and not place.startswith(("file://", "nfs://")) else kind_of(_path(place))
    return Service(shown, took, note=note)


def judge_store(service: Service) -> Finding:
    if service.why:
        return failed(
            "store", f"{service.shown}: {service.why}", service.fix or "Is it there, and may we write to it? See docs/stores.md."
        )
    times = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in service.seconds.items())
    said = f"{service.shown}{f' ({service.note})' if service.note else ''}: written, read back and removed ({times})"
    if max(service.seconds.get(name, 0.0) for name in ("write", "read", "create")) > SLOW_STORE_S:
        return warning(
            "store", said, "It is slow: checkpoints will take a multiple of that. Checkpoint less often, or use another store."
        )
    return ok("store", said)


def _path(place: str) -> Path:
    return Path(place.partition("://")[2] if "://" in place else place)


def _missing(place: str) -> list[Path]:
    """Directories that would be made for it, the innermost first."""
    if "://" in place and not place.startswith(("file://", "nfs://")):
        return []
    path = _path(place).absolute()
    return [each for each in (path, *path.parents) if not each.exists()]


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # never one with something in it
            directory.rmdir()


# -- both -----------------------------------------------------------------------------------------------------------------


def secrets_of(environ: Mapping[str, str], *urls: str) -> list[str]:
    """Whatever must not be shown: passwords in addresses, and what is in variables that are made for secrets."""
    found = [value for name, value in environ.items() if value and re.search(r"PASSWORD|SECRET|TOKEN$|API_KEY|ACCESS_KEY", name)]
    for url in urls:
        with contextlib.suppress(LudusError, ValueError):
            if (password := split_password(url)[1]) is not None:
                found.append(password)
        with contextlib.suppress(ValueError):
            if raw := urlsplit(url).password:
                found.append(raw)
    return found


def shown_address(url: str) -> str:
    """Without user, password and options."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def secret_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Names of variables that another machine needs to reach the same services."""
    for name in environ:
        if name == PASSWORD or name.startswith(("AWS_", "LUDUS_S3_")):
            yield name


def _timed(action: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
