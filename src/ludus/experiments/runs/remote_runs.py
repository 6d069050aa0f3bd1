"""Runs on a store: such a run (`s3://bucket/prefix/run`) is worked on in a local directory that knows where it belongs.

    <cache>/runs/s3/bucket/.place            the address of that bucket; everything below it belongs below that address
    <cache>/runs/s3/bucket/prefix/run/       as the directory of any run, without what only the store has: checkpoints, models

The store is the truth, the directory a cache: it may be empty, old, or deleted at any time when nobody trains in it. Checkpoints
and metadata go to the store as they are written. What grows (metrics, logs) is written here; a `Carrier` takes it there.
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
PLACE = ".place"
WORKER = ".worker"
"""In a working directory: the process that carries from it."""

MOST_BYTES = 256 << 20
"""A file that is longer stays here."""

EVALUATION_VIDEO = "evaluation-iteration-"
"""How the names of videos begin that an evaluation records during training, in `videos/` of a run."""

CARRIED = ("metrics.jsonl", "status.json", "metrics.csv", "logs/*", "plots/*", f"videos/{EVALUATION_VIDEO}*", "events.*")
"""What grows in a directory and is not stored as it is written; what is needed most comes first."""

_GROWING, _LOGS = ("metrics.jsonl",), ("metrics.csv", "logs/learner/train.log")
_WHOLE = ("config.yaml", "meta.json")
_LAST = ".last"  # which run this was, while the store has none
_KEEP_WEIGHTS_S = 7 * 86_400.0
_LOCAL = ("file", "nfs")
_URL = re.compile(r"([A-Za-z][\w.+-]*(?::[A-Za-z_]\w*)?)://(.*)", re.DOTALL)  # a scheme may be a class: module:Class


# -- places -------------------------------------------------------------------------------------------------------------


def is_remote(where: str | Path) -> bool:
    """Whether this is, or belongs to, a place that is not a directory."""
    return _address(where) is not None or (isinstance(where, Path) and _place(where) is not None)


def directory_of(where: str | Path) -> Path:
    """The directory in which a run at that place is worked on: a path is its own; of a URL it is in the cache, and is made.

    Nothing is asked over a network. Raises UsageError for a URL that cannot be one, or has a secret in it.
    """
    url = _address(where)
    if url is None:
        return Path(_plain(str(where))).expanduser()
    scheme, bucket, key, query = _split(url)
    end_point = query or _usual_end_point(scheme)
    mark = "-" + hashlib.sha256(end_point.encode()).hexdigest()[:8] if end_point else ""
    top = cache_root() / "runs" / scheme / f"{bucket}{mark}"
    place = _joined(scheme, bucket, "", query)
    directory = top / key if key else top
    try:
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        if _read_place(top / PLACE) != place:
            LocalStore(top).put(PLACE, place.encode())
    except OSError as error:
        raise StoreFull(f"Cannot write {directory}: {error.strerror}.", f"Set {CACHE_DIR} to another directory.") from error
    if _read_place(top / PLACE) != place:
        raise UsageError(f"{top / PLACE} does not belong to this user.", f"Set {CACHE_DIR} to a directory that is your own.")
    return directory


def store_of(directory: Path) -> Store:
    """The store of a run's directory: that directory, or the place it belongs to."""
    url = _place(directory)
    return LocalStore(directory) if url is None else _opened(url, os.getpid(), hash(frozenset(os.environ.items())))


@functools.lru_cache(maxsize=32)
def _opened(url: str, process: int, environment: int) -> Store:
    """A client takes tens of milliseconds to make, and some ask every second. Another environment may have other credentials."""
    return open_store(url)


def shown(directory: Path) -> str:
    """Where it is, as people write it: a URL, or a path."""
    return _place(directory) or str(directory)


def cache_root() -> Path:
    """`$LUDUS_CACHE_DIR`, else `$XDG_CACHE_HOME/ludus`, else `~/.cache/ludus`."""
    given, xdg = os.environ.get(CACHE_DIR), os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given).expanduser().absolute()
    return (Path(xdg).expanduser().absolute() if xdg else Path.home() / ".cache") / "ludus"


def _address(where: str | Path) -> str | None:
    """The URL that is meant, if it is one of a backend; a `Path` has lost a slash wherever there were two."""
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

        S3Url.parse(url)  # which knows more of what a secret may look like
    key = parts.path.strip("/")
    secrets = [parts.netloc, *(value for _, value in parse_qsl(parts.query))]
    if any("@" in part for part in secrets):
        raise UsageError(
            f"{redact_passwords(url)} has a user or password in it.", "Give them as your store's tools take them: docs/stores.md."
        )
    if not parts.netloc or parts.fragment:
        raise UsageError(f"{url} is not the address of a run.", "s3://BUCKET/PREFIX")
    if key:
        check_key(key)
    return scheme, parts.netloc, key, parts.query


def _joined(scheme: str, bucket: str, key: str, query: str) -> str:
    return f"{scheme}://{bucket}" + (f"/{key}" if key else "") + (f"?{query}" if query else "")


def _usual_end_point(scheme: str) -> str:
    """Two servers may have buckets of one name."""
    if scheme != "s3":
        return ""
    from ludus.storage.s3_url import default_endpoint

    return default_endpoint(os.environ) or ""


def _place(directory: Path) -> str | None:
    """The URL that a directory belongs to, found by walking up: not out of the cache, where others may have put such a file."""
    directory, root = directory.expanduser().absolute(), cache_root() / "runs"
    for top in (directory, *directory.parents):
        if not (top.is_relative_to(root) or top.is_relative_to(root.resolve())):
            return None
        place = _read_place(top / PLACE)
        if place is not None:
            scheme, bucket, key, query = _split(place)
            below = directory.relative_to(top).as_posix()
            parts = [part for part in (key, "" if below == "." else below) if part]
            return _joined(scheme, bucket, "/".join(parts), query)
    return None


def _read_place(path: Path) -> str | None:
    """Nothing if it is not this user's own."""
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
    """Make the working directory what the store says of the run. Nothing happens to a local run.

    `growing`: with its status and, unless it is without `metrics`, these; `logs`: with what else whoever takes the run up adds lines
    to. If there are more lines here, and the same before them, they stay, as does all of a file that the store does not have:
    whoever wrote them could not carry them any more. While another process of this machine trains in the directory, what grows is
    left to it. `get`: how to read a file of the run, for who has opened a store already. Raises StoreError.
    """
    if not is_remote(directory):
        return
    get, local = get or store_of(directory).get, LocalStore(directory)
    before, busy = _identity(directory) or _remembered(directory), _is_worked_on(directory)
    for name in _WHOLE:
        if not _take(get, local, name):
            local.delete(name)
    now = _identity(directory)
    if before and not now:  # deleted; or a server that says so for a while: whose the rest is, is known when there is a run again
        local.put(_LAST, before.encode())
    if before and now and before != now and not busy:
        clear(directory)  # of another run, which had this name before
    if not growing or busy:
        return
    for name in (*(_GROWING if metrics else ()), *(_LOGS if logs else ())):
        _take(get, local, name, keep=_goes_on)
    _take(get, local, "status.json")


def clear(directory: Path) -> None:
    """Forget what an earlier run of that name has left in the working directory. Nothing happens to a local run."""
    if not is_remote(directory):
        return
    for _, path in carried_files(directory):
        path.unlink(missing_ok=True)


def kept_file(directory: Path, data: bytes) -> Path:
    """A file in the working directory with that content, for a process that reads files."""
    folder = directory / ".weights"
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.safetensors"
    local = LocalStore(folder)
    for old in folder.glob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another process was quicker
            if time.time() - old.stat().st_mtime > _KEEP_WEIGHTS_S:
                old.unlink()
    local.put(name, data)
    return folder / name


def _take(
    get: Callable[[str], bytes],
    local: LocalStore,
    name: str,
    keep: Callable[[bytes, bytes], bool] = lambda ours, theirs: False,
) -> bool:
    """Whether the store has it; if not, it stays as it is here."""
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


def _goes_on(ours: bytes, theirs: bytes) -> bool:
    return len(ours) > len(theirs) and ours.startswith(theirs)


def _identity(directory: Path) -> str:
    """By which a run is told from another one of that name; nothing where there is no run."""
    try:
        return str(json.loads((directory / "meta.json").read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remembered(directory: Path) -> str:
    try:
        return (directory / _LAST).read_text()
    except (OSError, ValueError):
        return ""


def _is_worked_on(directory: Path) -> bool:
    """Whether another process of this machine carries from here. (Who trains the run, a status says; not where it is worked on.)"""
    from ludus.experiments.runs import run_status  # which reads runs, and they are here

    try:
        who = json.loads((directory / WORKER).read_bytes())
        return who["pid"] != os.getpid() and bool(run_status.lives(who))
    except (OSError, ValueError, KeyError, TypeError):
        return False


# -- to the store -------------------------------------------------------------------------------------------------------


def upload(path: Path) -> str:
    """Take one file of a working directory to its place, now; returns where it is, for people. A local file stays where it is.

    So does one that is too long, or that the store does not take: that is said, since whoever looks may not be one who may write.
    """
    if not is_remote(path):
        return str(path)
    if path.stat().st_size > MOST_BYTES:
        log.warning("%s is longer than %d MB, and stays here", path, MOST_BYTES >> 20)
        return str(path)
    try:
        store_of(path.parent).put(path.name, path.read_bytes())
    except StoreError as error:
        log.warning("%s stays here: %s", path, error)
        return str(path)
    return shown(path)


def carried_files(directory: Path) -> list[tuple[str, Path]]:
    """What is there of `CARRIED`, by name and in that order; what only the store has is not looked at."""
    here = [path for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []
    below = [path for top in ("logs", "plots", "videos") for path in (directory / top).rglob("*") if path.is_file()]
    named = [(path.relative_to(directory).as_posix(), path) for path in (*here, *below) if not path.name.startswith(".")]
    return [(name, path) for pattern in CARRIED for name, path in sorted(named) if fnmatch(name, pattern)]
