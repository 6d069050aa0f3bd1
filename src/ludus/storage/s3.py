"""Store on S3 or an S3-compatible server: `s3://bucket/prefix?endpoint=http://host:port`.

A bundle is `<key>/.parts-<hex>/<file>…` and `<key>/manifest.json`, which names the folder of its parts and is created last, by a
conditional write. So it becomes visible atomically, concurrent writers never mix, and unreferenced folders can be removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ludus.core import plugins
from ludus.core.backoff import Backoff
from ludus.errors import AlreadyExists, Damaged, NotFound, StoreError, StoreFull, StoreUnavailable, UsageError
from ludus.storage import multipart_cleanup, s3_credentials, s3_errors
from ludus.storage.base import MANIFEST, Bytes, WriteGuard, check_file, check_key, make_manifest, read_manifest
from ludus.storage.s3_url import S3Url, default_endpoint

if TYPE_CHECKING:
    import obstore
    import obstore.exceptions
    import obstore.store
else:
    obstore = plugins.require("obstore", "s3", "A store on S3")
    plugins.require("obstore.exceptions", "s3", "A store on S3")
    plugins.require("obstore.store", "s3", "A store on S3")

log = logging.getLogger(__name__)
Names = list[str]  # `list` is a method of the class below
T = TypeVar("T")
S = TypeVar("S")

PART_BYTES = 8 << 20
"""Larger objects are transferred in parts of this size. (S3 allows at most 10 000 parts of at least 5 MB.)"""

AT_ONCE = 4
"""Concurrent files of a bundle, and concurrent parts of each file: at most 16 parts of 8 MB."""

_FOLDER = re.compile(r"\.parts-[0-9a-f]{32}")
_WRITER = "ludus-writer"  # attribute of an exclusively created object with the id of the attempt
_PAGE = 1000  # objects per page of a listing
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_BACKOFF: obstore.store.BackoffConfig = {
    "init_backoff": timedelta(seconds=_PAUSE_S), "max_backoff": timedelta(seconds=_MAX_PAUSE_S), "base": 2,
}  # fmt: skip

_writing: list[str] = []  # paths that this process is writing: a sweep skips them
_conditional: set[tuple[str, str]] = set()  # (endpoint, bucket) known to support conditional writes
_lock = threading.Lock()


@dataclass(frozen=True)
class RetryPolicy:
    """Time limits and retries of requests, before StoreUnavailable is raised."""

    request_s: float = 60.0
    connect_s: float = 5.0
    retries: int = 8
    total_s: float = 60.0
    """Seconds after the first attempt when retries end."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RetryPolicy:
        default = cls()
        return cls(
            request_s=_read_number(environment, "LUDUS_S3_TIMEOUT_S", default.request_s),
            connect_s=_read_number(environment, "LUDUS_S3_CONNECT_TIMEOUT_S", default.connect_s),
            retries=int(_read_number(environment, "LUDUS_S3_RETRIES", default.retries)),
            total_s=_read_number(environment, "LUDUS_S3_RETRY_S", default.total_s),
        )


class S3Store:
    def __init__(self, url: str) -> None:
        """Does not connect yet. Raises UsageError."""
        self._url = S3Url.parse(url)
        self._policy = RetryPolicy.from_environment(os.environ)
        self._credentials = s3_credentials.find_credentials(os.environ)
        self._endpoint = self._url.endpoint or default_endpoint(os.environ)
        of_file = self._credentials.region if self._credentials else None
        self._region = self._url.region or of_file or s3_credentials.find_region(os.environ)
        if self._credentials is None and self._endpoint and not s3_credentials.client_finds_credentials(os.environ):
            raise UsageError(f"There are no credentials for {self.url}.", s3_credentials.REMEDY)
        self._client = self._connect(self._policy.retries)
        self._no_retry = self._connect(0)  # for exclusive creation: `_create` repeats it, after checking the guard again

    @property
    def url(self) -> str:
        return self._url.url

    # -- single values

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        path, view = self._url.path(key), memoryview(data).cast("B")
        if overwrite:
            self._upload(path, view)
        else:
            self._check_conditions(path)
            self._create(path, view)

    def get(self, key: str) -> bytes:
        return self._download(self._url.path(key))

    # -- bundles

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        target, folder = self._url.path(key), f".parts-{uuid.uuid4().hex}"
        manifest = json.dumps({**json.loads(make_manifest(files)), "parts": folder}, indent=1).encode()
        if self._writer(f"{target}/{MANIFEST}") is not None:  # saves the upload; the conditional write decides
            raise AlreadyExists(f"{self._format(target)} exists already.")
        self._check_conditions(target)
        with _mark_written(f"{target}/{folder}/"), contextlib.ExitStack() as undo:
            undo.callback(self._discard_parts, f"{target}/{folder}")

            def last_check() -> None:
                if guard is not None:
                    guard()
                undo.pop_all()  # from now on the manifest may exist: its parts stay, and a later sweep removes them if it does not

            try:
                items = [(f"{target}/{folder}/{name}", memoryview(data).cast("B")) for name, data in files.items()]
                _run_parallel(lambda item: self._upload(*item), items)
                self._create(f"{target}/{MANIFEST}", memoryview(manifest), called=target, guard=last_check)
            except StoreUnavailable:
                undo.pop_all()
                raise
            except (AlreadyExists, StoreFull):  # the manifest was rejected
                self._discard_parts(f"{target}/{folder}")
                raise

    def _discard_parts(self, folder: str) -> None:
        with contextlib.suppress(StoreError):
            self._remove_below(folder)

    def get_bundle(self, key: str) -> dict[str, bytes]:
        check_key(key)
        return self._read_bundle(
            key,
            lambda folder, manifest: dict(_run_parallel(lambda name: (name, self._file(key, folder, name, manifest)), manifest)),
        )

    def get_file(self, key: str, name: str) -> bytes:
        check_key(f"{key}/{name}")

        def read(folder: str, manifest: Mapping[str, tuple[int, int]]) -> bytes:
            if name not in manifest:
                raise NotFound(f"{self._format(self._url.path(key))} has no file {name}.")
            return self._file(key, folder, name, manifest)

        return self._read_bundle(key, read)

    def _read_bundle(self, key: str, read: Callable[[str, Mapping[str, tuple[int, int]]], T]) -> T:
        """Call `read(folder, manifest)`. Raises NotFound rather than Damaged if the bundle is deleted meanwhile."""
        before = b""
        target = self._url.path(key)
        while True:
            try:
                text = self._download(f"{target}/{MANIFEST}")
            except NotFound as error:
                raise NotFound(f"There is no {self._format(target)}.", error.hint) from error
            try:
                return read(*_parse_manifest(key, text))
            except Damaged:
                if text == before:
                    raise
                before = text

    def _file(self, key: str, folder: str, name: str, manifest: Mapping[str, tuple[int, int]]) -> bytes:
        target = self._url.path(key)
        try:
            data = self._download(f"{target}/{folder}/{name}")
        except NotFound as error:
            raise Damaged(f"{self._format(target)}/{name} is missing.", "Use an older checkpoint.") from error
        return check_file(self._format(target), name, data, manifest[name])

    # -- listing and deleting

    def list(self, prefix: str) -> list[str]:
        folder = self._url.path(prefix) if prefix else self._url.prefix
        files, folders = self._entries(folder)
        return sorted({*files, *self._non_empty(folder, folders)})

    def delete(self, key: str) -> None:
        target = self._url.path(key)
        with self._translate_errors(target, "delete"):
            obstore.delete(self._client, target)
        self._remove_below(target)

    def sweep(self, prefix: str) -> int:
        folder = self._url.path(prefix) if prefix else self._url.prefix
        keys = [f"{folder}/{name}" if folder else name for name in self._entries(folder)[1]]
        found = zip(keys, _run_parallel(self._find_unfinished, keys), strict=True)
        folders = [f"{key}/{name}" for key, names in found for name in names]
        removed = _run_parallel(self._remove_below, folders)
        # Some servers list a folder for a while after it became empty: do not count it.
        left = {name for name, objects in zip(folders, removed, strict=True) if objects}
        return len(left | self._abort_uploads(folder))

    def _find_unfinished(self, target: str) -> Names:
        """Return folders of parts that the manifest of a bundle does not name and that this process is not writing."""
        folders = [name for name in self._entries(target, hidden=True)[1] if _FOLDER.fullmatch(name)]
        if not folders:
            return []
        try:
            used = _parse_manifest(target, self._download(f"{target}/{MANIFEST}"))[0]
        except NotFound:
            used = ""
        except Damaged:
            return []  # the folder that it named is unknown
        return [name for name in folders if name != used and not _is_written_here(f"{target}/{name}/")]

    def _abort_uploads(self, folder: str) -> set[str]:
        """Abort unfinished multipart uploads, which listings do not show and which cost money; return their folders."""
        if self._credentials is None:
            log.info("cannot list unfinished uploads to %s: only the S3 client has the credentials", self.url)
            return set()
        server = multipart_cleanup.S3Endpoint(self._endpoint, self._url.bucket, self._region, self._policy.request_s)
        aborted: set[str] = set()
        try:
            for upload in multipart_cleanup.list_uploads(server, self._reload_credentials(), f"{folder}/" if folder else ""):
                within = upload.key[len(folder) + 1 :] if folder else upload.key
                name, _, rest = within.partition("/")
                parts = rest.partition("/")[0]
                if _is_written_here(upload.key) or (rest and not _FOLDER.fullmatch(parts)):
                    continue  # in use, or deeper
                multipart_cleanup.abort_upload(server, self._reload_credentials(), upload)
                aborted.add("/".join(filter(None, (folder, name, parts))))
        except (OSError, StoreError) as error:  # missing permission or unsupported by the server: the run continues
            log.warning("could not remove unfinished uploads to %s: %s", self.url, error)
        return aborted

    def _entries(self, folder: str, *, hidden: bool = False) -> tuple[Names, Names]:
        """Return the names of files and folders directly below."""
        with self._translate_errors(folder, "list"):
            found = obstore.list_with_delimiter(self._client, folder or None)
        start = len(folder) + 1 if folder else 0
        names = [[entry["path"][start:] for entry in found["objects"]], [path[start:] for path in found["common_prefixes"]]]
        # Some servers list the folder itself as an empty object.
        files, folders = ([name for name in kind if name and (hidden or not name.startswith("."))] for kind in names)
        return files, folders

    def _non_empty(self, folder: str, names: Names) -> set[str]:
        """Return those of the folders below `folder` that contain visible objects."""
        found: set[str] = set()
        if len(names) > AT_ONCE:  # one recursive listing; if it has too many pages, one listing per folder
            start = len(folder) + 1 if folder else 0
            with self._translate_errors(folder, "list"):
                pages = obstore.list(self._client, folder or None, chunk_size=_PAGE)
                for page in itertools.islice(pages, 1 + len(names) // AT_ONCE):
                    split = (entry["path"][start:].partition("/") for entry in page)
                    found |= {name for name, _, rest in split if rest and not rest.startswith(".")}
                if next(pages, None) is None:
                    return found.intersection(names)
        left = [name for name in names if name not in found]
        below = _run_parallel(lambda name: any(self._entries(f"{folder}/{name}" if folder else name)), left)
        return found.intersection(names).union(name for name, shown in zip(left, below, strict=True) if shown)

    def _remove_below(self, folder: str) -> int:
        """Delete all objects of a folder and return their number. Manifests first, so that bundles disappear at once."""
        with self._translate_errors(folder, "delete"):
            paths = [entry["path"] for chunk in obstore.list(self._client, folder) for entry in chunk]
            manifests = {path for path in paths if path.endswith(f"/{MANIFEST}")}
            for batch in (sorted(manifests), [path for path in paths if path not in manifests]):
                if batch:
                    obstore.delete(self._client, batch)
        return len(paths)

    # -- objects

    def _upload(self, path: str, view: memoryview) -> None:
        with self._translate_errors(path, "write"), _mark_written(path):
            multipart = len(view) > PART_BYTES
            obstore.put(self._client, path, view, use_multipart=multipart, chunk_size=PART_BYTES, max_concurrency=AT_ONCE)

    def _create(self, path: str, view: memoryview, *, called: str | None = None, guard: WriteGuard | None = None) -> None:
        """Create an object exclusively. Raises AlreadyExists. The guard is called before every attempt.

        A reply may be lost, so that a retry finds the object of the attempt before: its writer id tells that it is ours.
        """
        name = uuid.uuid4().hex
        for pause in _retry_delays(self._policy, self._policy.retries):
            if guard is not None:
                guard()
            try:
                with self._translate_errors(path, "create"):
                    obstore.put(self._no_retry, path, view, mode="create", attributes={_WRITER: name}, use_multipart=False)
                return
            except AlreadyExists:
                writer = self._writer(path)
                if writer == name:
                    if self._download(path) != view:  # observed: a server kept a truncated body of a broken connection
                        self._upload(path, view)
                    return
                if writer is not None or pause is None:  # otherwise it was just deleted
                    raise AlreadyExists(f"{self._format(called or path)} exists already.") from None
            except StoreUnavailable:
                if pause is None:
                    raise
            time.sleep(pause)

    def _writer(self, path: str) -> str | None:
        """Return the writer id of an object, '' if it has none, None if there is no such object."""
        try:
            with self._translate_errors(path, "read"):
                return str(obstore.get(self._client, path, options={"head": True}).attributes.get(_WRITER, ""))
        except NotFound:
            return None

    def _download(self, path: str) -> bytes:
        # The client retries and resumes broken downloads by itself, but only for a while and with the same ETag.
        for pause in _retry_delays(self._policy, min(self._policy.retries, 3)):
            try:
                with self._translate_errors(path, "read"):
                    return self._download_once(path)
            except StoreUnavailable:
                if pause is None:
                    raise
            time.sleep(pause)
        raise AssertionError("the last pause is None")

    def _download_once(self, path: str) -> bytes:
        result = obstore.get(self._client, path)
        size, tag = result.meta["size"], result.meta["e_tag"]
        if size <= PART_BYTES or not tag:
            return bytes(result.bytes())

        def part(start: int) -> bytes:
            # the ETag: parts of two versions are never combined
            byte_range = (start, min(start + PART_BYTES, size))
            return bytes(obstore.get(self._client, path, options={"range": byte_range, "if_match": tag}).bytes())

        del result  # cancels the whole download: the parts replace it
        return b"".join(_run_parallel(part, range(0, size, PART_BYTES)))

    def _check_conditions(self, wanted: str) -> None:
        """Raise StoreError if the server ignores If-None-Match, as some do: writers could overwrite each other's objects."""
        server = (self._endpoint or "", self._url.bucket)
        with _lock:
            if self._endpoint is None or server in _conditional:
                return
        path = self._url.path(f".probe-{uuid.uuid4().hex}")

        def create() -> None:
            with self._translate_errors(wanted, "create"):
                obstore.put(self._client, path, b"", mode="create", use_multipart=False)

        try:
            create()  # may already raise AlreadyExists, if a reply was lost and the request repeated
            create()
        except AlreadyExists:
            with _lock:
                _conditional.add(server)
        else:
            raise StoreError(
                f"The server {self._endpoint} ignores If-None-Match: two trainers could overwrite each other's run there.",
                "Use a server with conditional writes (docs/stores.md names some), or a shared directory.",
            )
        finally:
            with contextlib.suppress(StoreError), self._translate_errors(path, "delete"):
                obstore.delete(self._client, path)

    # -- the client

    def _connect(self, retries: int) -> obstore.store.S3Store:
        # Bulk deletion is not supported by every server, and we delete few objects at a time.
        config: obstore.store.S3Config = {"disable_bulk_delete": True}
        if self._endpoint:
            config["endpoint"] = config["aws_endpoint_url_s3"] = self._endpoint
        if self._region:
            config["region"] = self._region
        if not os.environ.get("AWS_CHECKSUM_ALGORITHM"):
            # Measured: without it SeaweedFS 4.48 stores an empty object when a connection breaks before the first byte.
            config["checksum_algorithm"] = "SHA256"
        policy = self._policy
        options: obstore.store.ClientConfig = {
            "allow_http": (self._endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=policy.request_s),
            "connect_timeout": timedelta(seconds=policy.connect_s),
            "user_agent": "ludus",
        }
        if authorities := os.environ.get(multipart_cleanup.AUTHORITIES):
            try:
                options["root_certificate"] = Path(authorities).expanduser().read_bytes()
            except OSError as error:
                what = f"{authorities} (named by {multipart_cleanup.AUTHORITIES})"
                raise UsageError(f"{what} cannot be read: {error.strerror}.") from error
        return obstore.store.S3Store(
            self._url.bucket,
            config=config,
            client_options=options,
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=policy.total_s), "backoff": _BACKOFF},
            credential_provider=None if self._credentials is None else self._provide_credentials,
        )

    def _provide_credentials(self) -> obstore.store.S3Credential:
        current = self._reload_credentials()
        expires = datetime.now(UTC) if current.file else None  # read the file again for the next request: it may be renewed
        return {
            "access_key_id": current.key_id,
            "secret_access_key": current.secret,
            "token": current.token,
            "expires_at": expires,
        }

    def _reload_credentials(self) -> s3_credentials.Credentials:
        assert self._credentials is not None
        if self._credentials.file is not None:
            try:
                self._credentials = s3_credentials.find_credentials(os.environ) or self._credentials
            except UsageError as error:  # the file may be in the middle of a replacement: keep the old ones
                log.warning("could not reload credentials: %s", error)
        return self._credentials

    def _format(self, path: str) -> str:
        return f"s3://{self._url.bucket}/{path}"

    @contextlib.contextmanager
    def _translate_errors(self, path: str, verb: s3_errors.Verb) -> Iterator[None]:
        try:
            yield
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            # `from None`: the client's message may contain a whole signed request with its token.
            raise s3_errors.translate(error, verb, self._format(path), self._endpoint or "Amazon S3") from None


# -- parts of bundles ---------------------------------------------------------------------------------------------------


def _parse_manifest(key: str, text: bytes) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the folder of the parts, and its files. Raises Damaged."""
    manifest = read_manifest(key, text)
    folder = json.loads(text).get("parts")
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise Damaged(f"The manifest of {key} is damaged: it does not name the folder of its parts.")
    return folder, manifest


@contextlib.contextmanager
def _mark_written(path: str) -> Iterator[None]:
    with _lock:
        _writing.append(path)
    try:
        yield
    finally:
        with _lock:
            _writing.remove(path)


def _is_written_here(path: str) -> bool:
    with _lock:
        return any(path == used or (used.endswith("/") and path.startswith(used)) for used in _writing)


# -- helpers ------------------------------------------------------------------------------------------------------------


def _run_parallel(act: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Apply `act` to all items in parallel and return the results in order; the first error cancels the rest."""
    todo = list(items)
    if len(todo) < 2:
        return [act(item) for item in todo]
    with ThreadPoolExecutor(min(AT_ONCE, len(todo))) as pool:
        return list(pool.map(act, todo))


def _retry_delays(policy: RetryPolicy, retries: int) -> Iterator[float | None]:
    """Yield the delay after each failed attempt; None after the last."""
    deadline = time.monotonic() + policy.total_s
    backoff = Backoff(_PAUSE_S, _MAX_PAUSE_S, jitter=(0.5, 1.0), generator=random)
    for _ in range(retries):
        yield backoff.next_delay()
        if time.monotonic() > deadline:
            break
    yield None


def _read_number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise UsageError(f"{name}={text!r} is not a number from 0 upwards.", f"The default is {default:g}.")
    return number
