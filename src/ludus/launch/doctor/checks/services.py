"""Checks Redis servers and stores: connect, write, read back, delete. All keys are unique to the check."""

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
from ludus.launch.doctor.checks.directories import filesystem_type
from ludus.launch.doctor.finding import DoctorFinding, failed, ok, warning
from ludus.ray_cluster.cluster import environment_variables
from ludus.storage.base import open_store
from ludus.transport.message_stream import PASSWORD, open_message_stream, split_password

T = TypeVar("T")

_REDIS_S = 3.0
_ROUND_TRIPS = 5
_S3_TIMEOUTS = {"LUDUS_S3_CONNECT_TIMEOUT_S": "2", "LUDUS_S3_TIMEOUT_S": "5", "LUDUS_S3_RETRIES": "1", "LUDUS_S3_RETRY_S": "3"}
"""Time-outs of S3, shorter than those of a run; the environment overrides them."""

SLOW_REDIS_S, SLOW_STORE_S = 0.02, 1.0
_PAYLOAD = b"ludus doctor " * 1000


@dataclass(frozen=True)
class ServiceProbe:
    """Result of a probe. `seconds`: duration of each completed step. `why`: the failure after them."""

    label: str
    seconds: Mapping[str, float]
    why: str = ""
    fix: str = ""
    note: str = ""


# -- Redis ----------------------------------------------------------------------------------------------------------------


def inspect_redis(url: str) -> ServiceProbe:
    """Probe the message exchange of a fleet, on a unique channel that is deleted."""
    label, durations = redact_url(url), dict[str, float]()
    try:
        exchange = open_message_stream(url, f"doctor-{uuid.uuid4().hex}", 4)
        with contextlib.closing(exchange):
            try:
                durations["connect"] = _measure(lambda: exchange.read("hello"))[0]
                durations["write"], pushed = _measure(lambda: exchange.push(_PAYLOAD, _REDIS_S))
                if not pushed:
                    return ServiceProbe(
                        label, durations, "it rejects writes: its memory is full (maxmemory)", "Raise maxmemory, or empty it."
                    )
                durations["read"], deliveries = _measure(lambda: exchange.pull(1, _REDIS_S))
                if [bytes(delivery.data) for delivery in deliveries] != [_PAYLOAD]:
                    return ServiceProbe(label, durations, "what was written did not come back", "Use Redis 6.2 or later.")
                exchange.acknowledge([delivery.id for delivery in deliveries])
                durations["round trip"] = min(_measure(lambda: exchange.read("hello"))[0] for _ in range(_ROUND_TRIPS))
            finally:
                with contextlib.suppress(LudusError):
                    exchange.drop()
    except LudusError as error:
        remedy = "Is it running, and is its port open for this machine?" if isinstance(error, ExchangeUnavailable) else ""
        return ServiceProbe(label, durations, error.message.rstrip("."), error.hint or remedy)
    return ServiceProbe(label, durations)


def check_redis(service: ServiceProbe) -> DoctorFinding:
    if service.why:
        return failed("memory server", f"{service.label}: {service.why}", service.fix or "See docs/fleets.md.")
    trip = service.seconds["round trip"]
    text = f"{service.label}: written, read back and removed; {_ms(trip)} for a round trip"
    if trip > SLOW_REDIS_S:
        return warning("memory server", text, "It is far away or busy: move it near the learner.")
    return ok("memory server", text)


# -- stores ---------------------------------------------------------------------------------------------------------------


def inspect_store(location: str) -> ServiceProbe:
    """Probe a store: write, read back, create exclusively and delete a file and a bundle."""
    label, durations = redact_url(location), dict[str, float]()
    key = f".doctor-{uuid.uuid4().hex}"
    before = _missing_directories(location)
    try:
        with environment_variables({name: os.environ.get(name, value) for name, value in _S3_TIMEOUTS.items()}):
            store = open_store(location)
        try:
            durations["write"], _ = _measure(lambda: store.put(f"{key}/value", _PAYLOAD))
            durations["read"], read = _measure(lambda: store.get(f"{key}/value"))
            if read != _PAYLOAD:
                return ServiceProbe(
                    label, durations, "what was written did not come back", "The store is not reliable: use another one."
                )
            durations["create"], _ = _measure(lambda: store.put(f"{key}/once", b"1", overwrite=False))
            try:
                store.put(f"{key}/once", b"2", overwrite=False)
            except AlreadyExists:
                pass
            else:
                why = "two writers can create the same file: two trainers could overwrite each other's run"
                return ServiceProbe(label, durations, why, "Use a store with conditional writes: see docs/stores.md.")
            durations["bundle"], _ = _measure(lambda: store.put_bundle(f"{key}/bundle", {"a": _PAYLOAD}))
            if store.get_bundle(f"{key}/bundle") != {"a": _PAYLOAD}:
                return ServiceProbe(
                    label,
                    durations,
                    "a bundle did not come back as it was written",
                    "The store is not reliable: use another one.",
                )
        finally:
            with contextlib.suppress(StoreError):
                durations["delete"], _ = _measure(lambda: store.delete(key))
    except LudusError as error:
        return ServiceProbe(label, durations, error.message.rstrip("."), error.hint)
    finally:
        _remove_empty(before)
    note = "" if "://" in location and not location.startswith(("file://", "nfs://")) else filesystem_type(_path(location))
    return ServiceProbe(label, durations, note=note)


def check_store(service: ServiceProbe) -> DoctorFinding:
    if service.why:
        return failed(
            "store", f"{service.label}: {service.why}", service.fix or "Check that it exists and is writable. See docs/stores.md."
        )
    times = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in service.seconds.items())
    text = f"{service.label}{f' ({service.note})' if service.note else ''}: written, read back and removed ({times})"
    if max(service.seconds.get(name, 0.0) for name in ("write", "read", "create")) > SLOW_STORE_S:
        return warning(
            "store", text, "It is slow: checkpoints will take a multiple of that. Checkpoint less often, or use another store."
        )
    return ok("store", text)


def _path(location: str) -> Path:
    return Path(location.partition("://")[2] if "://" in location else location)


def _missing_directories(location: str) -> list[Path]:
    """Return the directories that the store would create, the innermost first."""
    if "://" in location and not location.startswith(("file://", "nfs://")):
        return []
    path = _path(location).absolute()
    return [each for each in (path, *path.parents) if not each.exists()]


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # it is not empty
            directory.rmdir()


# -- both -----------------------------------------------------------------------------------------------------------------


def find_secrets(environ: Mapping[str, str], *urls: str) -> list[str]:
    """Return the passwords in URLs and the values of variables with names of secrets, which must not be shown."""
    found = [value for name, value in environ.items() if value and re.search(r"PASSWORD|SECRET|TOKEN$|API_KEY|ACCESS_KEY", name)]
    for url in urls:
        with contextlib.suppress(LudusError, ValueError):
            if (password := split_password(url)[1]) is not None:
                found.append(password)
        with contextlib.suppress(ValueError):
            if raw := urlsplit(url).password:
                found.append(raw)
    return found


def redact_url(url: str) -> str:
    """Return a URL without user, password and query."""
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def secret_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of variables that another machine needs to use the same services."""
    for name in environ:
        if name == PASSWORD or name.startswith(("AWS_", "LUDUS_S3_")):
            yield name


def _measure(action: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
