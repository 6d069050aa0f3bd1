"""Runs on a remote store (`s3://bucket/prefix/run`): each has a local working directory in the cache.

    <cache>/runs/s3/bucket/.place            URL of the bucket; directories below it correspond to keys below that URL
    <cache>/runs/s3/bucket/prefix/run/       like the directory of any run, but without checkpoints and models

The store is authoritative. The working directory may be empty, outdated, or deleted whenever no trainer uses it. Checkpoints and
metadata go to the store directly; growing files (metrics, logs) are written locally and uploaded by `RunSync`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ludus.errors import NotFound, StoreError, StoreFull, UsageError
from ludus.storage.base import STORES, Store, check_key, open_store
from ludus.storage.local import LocalStore
from ludus.storage.redact import redact_passwords

log = logging.getLogger(__name__)

CACHE_DIR = "LUDUS_CACHE_DIR"
PLACE_FILE = ".place"
SYNC_OWNER_FILE = ".worker"
"""File in a working directory that identifies the process that uploads from it."""

MAX_FILE_BYTES = 256 << 20
"""Larger files are not uploaded."""

EVALUATION_VIDEO = "evaluation-iteration-"
"""Name prefix of videos that evaluations record during training, in `videos/` of a run."""

SYNCED_PATTERNS = ("metrics.jsonl", "status.json", "metrics.csv", "logs/*", "plots/*", f"videos/{EVALUATION_VIDEO}*", "events.*")
"""Files of a working directory that are uploaded periodically, the most important first."""

_METRICS, _LOGS = ("metrics.jsonl",), ("metrics.csv", "logs/learner/train.log")
_DESCRIPTION = ("config.yaml", "meta.json")
_LAST_ID_FILE = ".last"  # id of the run, while the store has none
_KEEP_WEIGHTS_S = 7 * 86_400.0
_LOCAL = ("file", "nfs")
_URL = re.compile(r"([A-Za-z][\w.+-]*(?::[A-Za-z_]\w*)?)://(.*)", re.DOTALL)  # a scheme may be a class: module:Class


# -- locations ----------------------------------------------------------------------------------------------------------


def is_remote(where: str | Path) -> bool:
    """Whether this is the URL of a remote store, or a working directory of one."""
    return _parse_url(where) is not None or (isinstance(where, Path) and _url_of(where) is not None)


def directory_of(where: str | Path) -> Path:
    """The working directory of a run: the path itself, or for a URL a directory in the cache, which is created.

    Does not access the network. Raises UsageError for an invalid URL or one that contains a secret.
    """
    url = _parse_url(where)
    if url is None:
        return Path(_plain(str(where))).expanduser()
    scheme, bucket, key, query = _split(url)
    end_point = query or _default_endpoint(scheme)
    mark = "-" + hashlib.sha256(end_point.encode()).hexdigest()[:8] if end_point else ""
    top = cache_root() / "runs" / scheme / f"{bucket}{mark}"
    place = _join_url(scheme, bucket, "", query)
    directory = top / key if key else top
    try:
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        if _read_place_file(top / PLACE_FILE) != place:
            LocalStore(top).put(PLACE_FILE, place.encode())
    except OSError as error:
        raise StoreFull(f"Cannot write {directory}: {error.strerror}.", f"Set {CACHE_DIR} to another directory.") from error
    if _read_place_file(top / PLACE_FILE) != place:
        raise UsageError(f"{top / PLACE_FILE} does not belong to this user.", f"Set {CACHE_DIR} to a directory that you own.")
    return directory


def store_of(directory: Path) -> Store:
    """The store of a run: its directory, or the remote store of a working directory."""
    url = _url_of(directory)
    return LocalStore(directory) if url is None else _open_cached(url, os.getpid(), hash(frozenset(os.environ.items())))


@functools.lru_cache(maxsize=32)
def _open_cached(url: str, process: int, environment: int) -> Store:
    """Cached: creating a client takes tens of milliseconds. `environment` is part of the key, as it may hold other credentials."""
    return open_store(url)


def display_path(directory: Path) -> str:
    """The location of a run for users: a URL or a path."""
    return _url_of(directory) or str(directory)


def cache_root() -> Path:
    """`$LUDUS_CACHE_DIR`, else `$XDG_CACHE_HOME/ludus`, else `~/.cache/ludus`."""
    given, xdg = os.environ.get(CACHE_DIR), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).expanduser().absolute()
    return (Path(xdg).expanduser().absolute() if xdg else Path.home() / ".cache") / "ludus"


def _parse_url(where: str | Path) -> str | None:
    """The URL of a remote store, or None for a local path. Restores the double slashes that a `Path` collapses."""
    text = str(where)
    scheme = text.partition(":/")[0]
    if isinstance(where, Path) and (scheme in STORES or ":" in scheme):
        text = re.sub(r"(^[\w.:]+?|=https?):/(?!/)", r"\1://", text)
    match = _URL.fullmatch(text)
    return None if match is None or match[1].lower() in _LOCAL else text


def _plain(text: str) -> str:
    match = _URL.fullmatch(text)
    return text if match is None else match[2]


def _split(url: str) -> tuple[str, str, str, str]:
    """(scheme, bucket, key, query) of an address. Raises UsageError."""
    scheme, _, rest = url.partition("://")
    parts = urlsplit(f"//{rest}")
    if scheme.lower() == "s3":
        from ludus.storage.s3_url import S3Url

        S3Url.parse(url)  # has stricter checks for secrets
    key = parts.path.strip("/")
    secrets = [parts.netloc, *(value for _, value in parse_qsl(parts.query))]
    if any("@" in part for part in secrets):
        raise UsageError(
            f"{redact_passwords(url)} contains a user or password.", "Pass credentials in the way of the store: docs/stores.md."
        )
    if not parts.netloc or parts.fragment:
        raise UsageError(f"{url} is not the URL of a run.", "Use s3://BUCKET/PREFIX.")
    if key:
        check_key(key)
    return scheme, parts.netloc, key, parts.query


def _join_url(scheme: str, bucket: str, key: str, query: str) -> str:
    return f"{scheme}://{bucket}" + (f"/{key}" if key else "") + (f"?{query}" if query else "")


def _default_endpoint(scheme: str) -> str:
    """The configured S3 endpoint: two servers may have buckets of the same name."""
    if scheme != "s3":
        return ""
    from ludus.storage.s3_url import default_endpoint

    return default_endpoint(os.environ) or ""


def _url_of(directory: Path) -> str | None:
    """The URL of a working directory, from the place file of a parent. Never searches outside the cache, where others may write."""
    directory, root = directory.expanduser().absolute(), cache_root() / "runs"
    for top in (directory, *directory.parents):
        if not (top.is_relative_to(root) or top.is_relative_to(root.resolve())):
            return None
        place = _read_place_file(top / PLACE_FILE)
        if place is not None:
            scheme, bucket, key, query = _split(place)
            below = directory.relative_to(top).as_posix()
            parts = [part for part in (key, "" if below == "." else below) if part]
            return _join_url(scheme, bucket, "/".join(parts), query)
    return None


def _read_place_file(path: Path) -> str | None:
    """Content of a place file; None if it does not belong to this user."""
    try:
        with path.open(encoding="utf-8") as file:
            mine = os.fstat(file.fileno()).st_uid == os.geteuid()
            return file.read().strip() or None if mine else None
    except (OSError, ValueError):
        return None


# -- from the store -----------------------------------------------------------------------------------------------------


def fetch(
    directory: Path,
    *,
    growing: bool = True,
    metrics: bool = True,
    logs: bool = False,
    get: Callable[[str], bytes] | None = None,
) -> None:
    """Update the working directory from the store. No-op for a local run.

    `growing`: fetch the status and, with `metrics`, the metrics. `logs`: fetch the logs, to which a resumed run appends. A local file
    that extends the stored one, or that the store does not have, stays: its writer could not upload it. While another process of this
    host trains in the directory, growing files are not touched. `get`: reads a file of the run, if the caller has an open store.
    Raises StoreError.
    """
    if not is_remote(directory):
        return
    get, local = get or store_of(directory).get, LocalStore(directory)
    before, busy = _identity(directory) or _last_identity(directory), _is_in_use(directory)
    for name in _DESCRIPTION:
        if not _fetch_file(get, local, name):
            local.delete(name)
    now = _identity(directory)
    if before and not now:  # deleted, or temporarily missing on the server: keep the id to compare it with the next run
        local.put(_LAST_ID_FILE, before.encode())
    if before and now and before != now and not busy:
        clear(directory)  # files of an earlier run of the same name
    if not growing or busy:
        return
    for name in (*(_METRICS if metrics else ()), *(_LOGS if logs else ())):
        _fetch_file(get, local, name, keep=_extends)
    _fetch_file(get, local, "status.json")


def clear(directory: Path) -> None:
    """Delete the files of an earlier run of the same name from the working directory. No-op for a local run."""
    if not is_remote(directory):
        return
    for _, path in synced_files(directory):
        path.unlink(missing_ok=True)


def write_cached_weights(directory: Path, data: bytes) -> Path:
    """Write weights to a file in the working directory, named by their hash; files older than a week are deleted."""
    folder = directory / ".weights"
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.safetensors"
    local = LocalStore(folder)
    for old in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another process deleted it
            if time.time() - old.stat().st_mtime > _KEEP_WEIGHTS_S:
                old.unlink()
    local.put(name, data)
    return folder / name


def _fetch_file(
    get: Callable[[str], bytes],
    local: LocalStore,
    name: str,
    keep: Callable[[bytes, bytes], bool] = lambda ours, theirs: False,
) -> bool:
    """Fetch one file unless `keep(local, remote)`. Returns False if the store does not have it."""
    try:
        theirs = get(name)
    except NotFound:
        return False
    try:
        ours = local.get(name)
    except NotFound:
        ours = None
    if ours is None or (ours != theirs and not keep(ours, theirs)):
        local.put(name, theirs)
    return True


def _extends(ours: bytes, theirs: bytes) -> bool:
    return len(ours) > len(theirs) and ours.startswith(theirs)


def _identity(directory: Path) -> str:
    """The id of the run from its metadata; empty if there is no run."""
    try:
        return str(json.loads((directory / "meta.json").read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _last_identity(directory: Path) -> str:
    try:
        return (directory / _LAST_ID_FILE).read_text()
    except (OSError, ValueError):
        return ""


def _is_in_use(directory: Path) -> bool:
    """Whether another process of this host uploads from here. (The status names the trainer, but not its working directory.)"""
    from ludus.experiments.runs import run_status  # imports this module

    try:
        who = json.loads((directory / SYNC_OWNER_FILE).read_bytes())
        return who["pid"] != os.getpid() and bool(run_status.is_alive(who))
    except (OSError, ValueError, KeyError, TypeError):
        return False


# -- to the store -------------------------------------------------------------------------------------------------------


def upload(path: Path) -> str:
    """Upload one file of a working directory; returns its location for users.

    A file of a local run stays where it is, as does one that is too large or that the store rejects (a reader may lack write access);
    the latter are logged.
    """
    if not is_remote(path):
        return str(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        log.warning("%s is larger than %d MB and is not uploaded", path, MAX_FILE_BYTES >> 20)
        return str(path)
    try:
        store_of(path.parent).put(path.name, path.read_bytes())
    except StoreError as error:
        log.warning("%s was not uploaded: %s", path, error)
        return str(path)
    return display_path(path)


def synced_files(directory: Path) -> list[tuple[str, Path]]:
    """Existing files that match `SYNCED_PATTERNS`, in the order of the patterns and then by name."""
    here = [path for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []
    below = [path for top in ("logs", "plots", "videos") for path in (directory / top).rglob("*") if path.is_file()]
    named = [(path.relative_to(directory).as_posix(), path) for path in (*here, *below) if not path.name.startswith(".")]
    return [(name, path) for pattern in SYNCED_PATTERNS for name, path in sorted(named) if fnmatch(name, pattern)]
