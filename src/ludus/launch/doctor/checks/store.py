"""Checks a store (a directory, a mount or S3): write, read back, create exclusively, write a bundle, delete."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ludus.errors import AlreadyExists, LudusError, StoreError
from ludus.launch.doctor.checks.directories import filesystem_type
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, redact_url, warning
from ludus.ray_cluster.cluster import environment_variables
from ludus.storage.base import Store, open_store

T = TypeVar("T")

SLOW_S = 1.0
_S3_TIMEOUTS = {"LUDUS_S3_CONNECT_TIMEOUT_S": "2", "LUDUS_S3_TIMEOUT_S": "5", "LUDUS_S3_RETRIES": "1", "LUDUS_S3_RETRY_S": "3"}
"""Time-outs of S3, shorter than those of a run; the environment overrides them."""

_PAYLOAD = b"ludus doctor " * 1000


def check_store(location: str) -> DoctorFinding:
    """Write below a unique key, which is deleted."""
    label, key = redact_url(location), f".doctor-{uuid.uuid4().hex}"
    path = _local_path(location)
    try:
        with _remove_created(path):
            with environment_variables({name: os.environ.get(name, value) for name, value in _S3_TIMEOUTS.items()}):
                store = open_store(location)
            try:
                seconds = _measure_store(store, key)
            finally:
                with contextlib.suppress(StoreError):
                    store.delete(key)
    except LudusError as error:
        remedy = error.hint or "Check that it exists and is writable. See docs/stores.md."
        return failure("store", f"{label}: {error.message.rstrip('.')}", remedy)
    kind = filesystem_type(path) if path is not None else ""
    return check_durations(f"{label}{f' ({kind})' if kind else ''}", seconds)


def _measure_store(store: Store, key: str) -> dict[str, float]:
    """Return the seconds of each operation. Raises StoreError if one fails or has a wrong result."""
    seconds: dict[str, float] = {}

    def measure(name: str, action: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = action()
        seconds[name] = time.perf_counter() - start
        return result

    unreliable = "The store is not reliable: use another one."
    measure("write", lambda: store.put(f"{key}/value", _PAYLOAD))
    if measure("read", lambda: store.get(f"{key}/value")) != _PAYLOAD:
        raise StoreError("what was written did not come back", unreliable)
    measure("create", lambda: store.put(f"{key}/once", b"1", overwrite=False))
    try:
        store.put(f"{key}/once", b"2", overwrite=False)
    except AlreadyExists:
        pass
    else:
        why = "two writers can create the same file: two trainers could overwrite each other's run"
        raise StoreError(why, "Use a store with conditional writes: see docs/stores.md.")
    measure("bundle", lambda: store.put_bundle(f"{key}/bundle", {"a": _PAYLOAD}))
    if store.get_bundle(f"{key}/bundle") != {"a": _PAYLOAD}:
        raise StoreError("a bundle did not come back as it was written", unreliable)
    return seconds


def check_durations(label: str, seconds: Mapping[str, float]) -> DoctorFinding:
    times = ", ".join(f"{name} {duration * 1000:.1f} ms" for name, duration in seconds.items())
    text = f"{label}: written, read back and removed ({times})"
    if max(seconds.get(name, 0.0) for name in ("write", "read", "create")) > SLOW_S:
        remedy = "It is slow: checkpoints will take a multiple of that. Checkpoint less often, or use another store."
        return warning("store", text, remedy)
    return ok("store", text)


def _local_path(location: str) -> Path | None:
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(location).absolute()
    return Path(rest) if scheme in ("file", "nfs") else None


@contextlib.contextmanager
def _remove_created(path: Path | None) -> Iterator[None]:
    """Remove the directories that a store creates at `path`."""
    missing = [each for each in (path, *path.parents) if not each.exists()] if path is not None else []
    try:
        yield
    finally:
        for directory in missing:
            with contextlib.suppress(OSError):  # it is not empty
                directory.rmdir()
