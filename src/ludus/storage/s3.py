"""A store on S3, or on a server that speaks as S3 does: `s3://bucket/prefix?endpoint=http://host:port`.

A bundle is `<key>/.parts-<hex>/<file>…` and, written last and only if there is none yet, `<key>/manifest.json`, which names the
folder of its parts. So it appears at once, two writers never mix, and what a killed one left is told from what is in use.
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
Names = list[str]  # in the class below, `list` is a method
T = TypeVar("T")
S = TypeVar("S")

PART_BYTES = 8 << 20
"""What is larger goes, and comes, in parts of this size. (S3 takes no smaller ones than 5 MB, and no more than 10 000.)"""

AT_ONCE = 4
"""Files of a bundle in flight, and parts of each: at most 16 parts of 8 MB."""

_FOLDER = re.compile(r"\.parts-[0-9a-f]{32}")
_WRITER = "ludus-writer"  # a name of the attempt, kept with an object that must be created by one alone
_PAGE = 1000  # objects of a listing come by so many
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

_writing: list[str] = []  # what this process writes at the moment: not for a sweep
_honest: set[tuple[str, str]] = set()  # (end point, bucket) known to heed conditions
_lock = threading.Lock()


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait and how often to try again; then it is StoreUnavailable."""

    request_s: float = 60.0
    connect_s: float = 5.0
    retries: int = 8
    total_s: float = 60.0
    """No more retries after this time from the first attempt."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RetryPolicy:
        usual = cls()
        return cls(
            request_s=_read_number(environment, "LUDUS_S3_TIMEOUT_S", usual.request_s),
            connect_s=_read_number(environment, "LUDUS_S3_CONNECT_TIMEOUT_S", usual.connect_s),
            retries=int(_read_number(environment, "LUDUS_S3_RETRIES", usual.retries)),
            total_s=_read_number(environment, "LUDUS_S3_RETRY_S", usual.total_s),
        )


class S3Store:
    def __init__(self, url: str) -> None:
        """Nothing is asked over the network yet. Raises UsageError."""
        self._address = S3Url.parse(url)
        self._patience = RetryPolicy.of(os.environ)
        self._credentials = s3_credentials.find_credentials(os.environ)
        self._endpoint = self._address.endpoint or default_endpoint(os.environ)
        self._region = self._find_region()
        if self._credentials is None and self._endpoint and not s3_credentials.client_finds_credentials(os.environ):
            raise UsageError(f"There are no credentials for {self.url}.", s3_credentials.REMEDY)
        self._client = self._connect(self._patience.retries)
        self._single = self._connect(0)  # asks once: what must not happen late is repeated here, and checked again before

    @property
    def url(self) -> str:
        return self._address.url

    # -- single values

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        path, view = self._address.path(key), memoryview(data).cast("B")
        if overwrite:
            self._upload(path, view)
        else:
            self._check_conditions(path)
            self._create(path, view)

    def get(self, key: str) -> bytes:
        return self._download(self._address.path(key))

    # -- bundles

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        target, folder = self._address.path(key), f".parts-{uuid.uuid4().hex}"
        manifest = _add_folder(make_manifest(files), folder)
        if self._exists(f"{target}/{MANIFEST}"):  # spare the upload; whether it is so is decided at the end
            raise AlreadyExists(f"{self._shown(target)} exists already.")
        self._check_conditions(target)
        begun = False

        def last_check() -> None:
            nonlocal begun
            if guard is not None:
                guard()
            begun = True

        with _mark_written(f"{target}/{folder}/"):
            try:
                items = [(f"{target}/{folder}/{name}", memoryview(data).cast("B")) for name, data in files.items()]
                _run_parallel(lambda item: self._upload(*item), items)
                self._create(f"{target}/{MANIFEST}", memoryview(manifest), called=target, guard=last_check)
            except BaseException as error:
                # Where the manifest may be there after all, or still on its way, its parts stay: if it is not, a sweep finds them.
                refused = isinstance(error, AlreadyExists | StoreFull)
                if refused or not (begun or isinstance(error, StoreUnavailable)):
                    with contextlib.suppress(StoreError):
                        self._remove_below(f"{target}/{folder}")
                raise

    def get_bundle(self, key: str) -> dict[str, bytes]:
        check_key(key)
        return self._of_bundle(
            key,
            lambda folder, manifest: dict(_run_parallel(lambda name: (name, self._file(key, folder, name, manifest)), manifest)),
        )

    def get_file(self, key: str, name: str) -> bytes:
        check_key(f"{key}/{name}")

        def read(folder: str, manifest: Mapping[str, tuple[int, int]]) -> bytes:
            if name not in manifest:
                raise NotFound(f"{self._shown(self._address.path(key))} has no file {name}.")
            return self._file(key, folder, name, manifest)

        return self._of_bundle(key, read)

    def _of_bundle(self, key: str, read: Callable[[str, Mapping[str, tuple[int, int]]], T]) -> T:
        """Read by the manifest. A bundle that is deleted meanwhile was not there, rather than damaged."""
        before = b""
        while True:
            text = self._manifest(key)
            try:
                return read(*_parse_manifest(key, text))
            except Damaged:
                if text == before:
                    raise
                before = text

    def _manifest(self, key: str) -> bytes:
        target = self._address.path(key)
        try:
            return self._download(f"{target}/{MANIFEST}")
        except NotFound as error:
            raise NotFound(f"There is no {self._shown(target)}.", error.hint) from error

    def _file(self, key: str, folder: str, name: str, manifest: Mapping[str, tuple[int, int]]) -> bytes:
        target = self._address.path(key)
        try:
            data = self._download(f"{target}/{folder}/{name}")
        except NotFound as error:
            raise Damaged(f"{self._shown(target)}/{name} is missing.", "Use an older checkpoint.") from error
        return check_file(self._shown(target), name, data, manifest[name])

    # -- listing and deleting

    def list(self, prefix: str) -> list[str]:
        folder = self._address.path(prefix) if prefix else self._address.prefix
        files, folders = self._entries(folder)
        return sorted({*files, *self._with_something(folder, folders)})

    def delete(self, key: str) -> None:
        target = self._address.path(key)
        with self._translated(target, "delete"):
            obstore.delete(self._client, target)
        self._remove_below(target)

    def sweep(self, prefix: str) -> int:
        """Remove what crashed writers left directly below `prefix`. Only for the one owner of that prefix."""
        folder = self._address.path(prefix) if prefix else self._address.prefix
        keys = [f"{folder}/{name}" if folder else name for name in self._entries(folder)[1]]
        found = zip(keys, _run_parallel(self._unfinished, keys), strict=True)
        folders = [f"{key}/{name}" for key, names in found for name in names]
        removed = _run_parallel(self._remove_below, folders)
        # Some servers show a folder for a while after it became empty: that is nothing that was left.
        left = {name for name, objects in zip(folders, removed, strict=True) if objects}
        return len(left | self._abort_uploads(folder))

    def _unfinished(self, target: str) -> Names:
        """Folders of parts of the bundle that its manifest does not name, and that nobody here is writing."""
        folders = [name for name in self._entries(target, hidden=True)[1] if _FOLDER.fullmatch(name)]
        if not folders:
            return []
        try:
            used = _parse_manifest(target, self._download(f"{target}/{MANIFEST}"))[0]
        except NotFound:
            used = ""
        except Damaged:
            return []  # which of them it named cannot be known
        return [name for name in folders if name != used and not _is_written_here(f"{target}/{name}/")]

    def _abort_uploads(self, folder: str) -> set[str]:
        """Unfinished uploads in parts, which no listing shows and which are paid for. What they belong to."""
        if self._credentials is None:
            log.info("Unfinished uploads to %s are not looked for: only the client knows the credentials.", self.url)
            return set()
        server = multipart_cleanup.S3Endpoint(self._endpoint, self._address.bucket, self._region, self._patience.request_s)
        aborted: set[str] = set()
        try:
            for upload in multipart_cleanup.list_uploads(server, self._renewed(), f"{folder}/" if folder else ""):
                within = upload.key[len(folder) + 1 :] if folder else upload.key
                name, _, rest = within.partition("/")
                parts = rest.partition("/")[0]
                if _is_written_here(upload.key) or (rest and not _FOLDER.fullmatch(parts)):
                    continue  # in use, or further down
                multipart_cleanup.abort_upload(server, self._renewed(), upload)
                aborted.add("/".join(filter(None, (folder, name, parts))))
        except (OSError, StoreError) as error:  # a right that is missing, a server that cannot: no reason to stop a run
            log.warning("Unfinished uploads to %s were not removed: %s", self.url, error)
        return aborted

    def _entries(self, folder: str, *, hidden: bool = False) -> tuple[Names, Names]:
        """Names of files and of folders directly below."""
        with self._translated(folder, "list"):
            found = obstore.list_with_delimiter(self._client, folder or None)
        start = len(folder) + 1 if folder else 0
        names = [[entry["path"][start:] for entry in found["objects"]], [path[start:] for path in found["common_prefixes"]]]
        # Some servers show the folder itself as an empty object.
        files, folders = ([name for name in kind if name and (hidden or not name.startswith("."))] for kind in names)
        return files, folders

    def _with_something(self, folder: str, names: Names) -> set[str]:
        """Those of the folders below `folder` that have something to show."""
        found: set[str] = set()
        if len(names) > AT_ONCE:  # one listing of all that is below; a question for each, only if there is too much of that
            start = len(folder) + 1 if folder else 0
            with self._translated(folder, "list"):
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
        """How many objects that were. Manifests go first: what is half deleted is not there any more."""
        with self._translated(folder, "delete"):
            paths = [entry["path"] for chunk in obstore.list(self._client, folder) for entry in chunk]
            manifests = {path for path in paths if path.endswith(f"/{MANIFEST}")}
            for batch in (sorted(manifests), [path for path in paths if path not in manifests]):
                if batch:
                    obstore.delete(self._client, batch)
        return len(paths)

    # -- objects

    def _upload(self, path: str, view: memoryview) -> None:
        with self._translated(path, "write"), _mark_written(path):
            obstore.put(
                self._client,
                path,
                view,
                use_multipart=len(view) > PART_BYTES,
                chunk_size=PART_BYTES,
                max_concurrency=AT_ONCE,
            )

    def _create(self, path: str, view: memoryview, *, called: str | None = None, guard: WriteGuard | None = None) -> None:
        """Exactly one of many succeeds. Raises AlreadyExists. The guard is asked before every attempt.

        An answer may be lost on its way, so that the next attempt finds what the last one made: its name tells that it is ours.
        """
        name = uuid.uuid4().hex
        for pause in _retry_delays(self._patience, self._patience.retries):
            if guard is not None:
                guard()
            try:
                with self._translated(path, "create"):
                    obstore.put(self._single, path, view, mode="create", attributes={_WRITER: name}, use_multipart=False)
                return
            except AlreadyExists:
                writer = self._writer(path)
                if writer == name:
                    if self._download(path) != view:  # seen: a server that kept what had come when the connection broke
                        self._upload(path, view)
                    return
                if writer is not None or pause is None:  # else it is deleted at this moment
                    raise AlreadyExists(f"{self._shown(called or path)} exists already.") from None
            except StoreUnavailable:
                if pause is None:
                    raise
            time.sleep(pause)

    def _writer(self, path: str) -> str | None:
        """The name of the attempt that created it; empty when it has none; None when there is no such object."""
        try:
            with self._translated(path, "read"):
                return str(obstore.get(self._client, path, options={"head": True}).attributes.get(_WRITER, ""))
        except NotFound:
            return None

    def _exists(self, path: str) -> bool:
        return self._writer(path) is not None

    def _download(self, path: str) -> bytes:
        # The client itself tries again while nothing has come, and takes up again what breaks off; not for ever, nor with a new tag.
        for pause in _retry_delays(self._patience, min(self._patience.retries, 3)):
            try:
                with self._translated(path, "read"):
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
            # the tag: parts of two values are never put together
            wanted = (start, min(start + PART_BYTES, size))
            return bytes(obstore.get(self._client, path, options={"range": wanted, "if_match": tag}).bytes())

        del result  # what it was about to send comes in parts instead
        return b"".join(_run_parallel(part, range(0, size, PART_BYTES)))

    def _check_conditions(self, wanted: str) -> None:
        """Some servers take no notice of If-None-Match, and let one writer destroy what another has claimed. Amazon's does."""
        server = (self._endpoint or "", self._address.bucket)
        with _lock:
            if self._endpoint is None or server in _honest:
                return
        path = self._address.path(f".probe-{uuid.uuid4().hex}")

        def create() -> None:
            with self._translated(wanted, "create"):
                obstore.put(self._client, path, b"", mode="create", use_multipart=False)

        try:
            create()  # if this one is refused already (its answer was lost, and it was tried again), that shows the same
            create()
        except AlreadyExists:
            with _lock:
                _honest.add(server)
        else:
            raise StoreError(
                f"The server {self._endpoint} takes no notice of If-None-Match: two trainers could destroy each other's run there.",
                "Use a server that heeds conditional writes (docs/stores.md names some), or a shared directory.",
            )
        finally:
            with contextlib.suppress(StoreError), self._translated(path, "delete"):
                obstore.delete(self._client, path)

    # -- the client

    def _connect(self, retries: int) -> obstore.store.S3Store:
        config: obstore.store.S3Config = {
            "disable_bulk_delete": True
        }  # not every server has it, and we delete a handful at a time
        if self._endpoint:
            config["endpoint"] = config["aws_endpoint_url_s3"] = self._endpoint
        if self._region:
            config["region"] = self._region
        if not os.environ.get("AWS_CHECKSUM_ALGORITHM"):
            # Measured: without it SeaweedFS 4.48 takes a connection that breaks before the first byte for an empty value.
            config["checksum_algorithm"] = "SHA256"
        patience = self._patience
        options: obstore.store.ClientConfig = {
            "allow_http": (self._endpoint or "").startswith("http://"),
            "timeout": timedelta(seconds=patience.request_s),
            "connect_timeout": timedelta(seconds=patience.connect_s),
            "user_agent": "ludus",
        }
        if authorities := os.environ.get(multipart_cleanup.AUTHORITIES):
            options["root_certificate"] = _read_authorities(authorities)
        return obstore.store.S3Store(
            self._address.bucket,
            config=config,
            client_options=options,
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=patience.total_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=_PAUSE_S),
                    "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
                    "base": 2,
                },
            },
            credential_provider=None if self._credentials is None else self._provide,
        )

    def _provide(self) -> obstore.store.S3Credential:
        found = self._renewed()
        expires = datetime.now(UTC) if found.file else None  # read again for the next request: others may have renewed them
        return {"access_key_id": found.key_id, "secret_access_key": found.secret, "token": found.token, "expires_at": expires}

    def _renewed(self) -> s3_credentials.Credentials:
        assert self._credentials is not None
        if self._credentials.file is not None:
            try:
                self._credentials = s3_credentials.find_credentials(os.environ) or self._credentials
            except UsageError as error:  # it is being replaced, perhaps; the old ones may do for a while
                log.warning("Credentials were not renewed: %s", error)
        return self._credentials

    def _find_region(self) -> str | None:
        of_file = self._credentials.region if self._credentials else None
        return self._address.region or of_file or s3_credentials.find_region(os.environ)

    def _shown(self, path: str) -> str:
        return f"s3://{self._address.bucket}/{path}"

    @contextlib.contextmanager
    def _translated(self, path: str, verb: s3_errors.Verb) -> Iterator[None]:
        try:
            yield
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            # The client's text is not passed on: a server may repeat a whole signed request in it, token and all.
            raise s3_errors.translate(error, verb, self._shown(path), self._endpoint or "Amazon S3") from None


# -- parts of bundles ---------------------------------------------------------------------------------------------------


def _add_folder(manifest: bytes, folder: str) -> bytes:
    return json.dumps({**json.loads(manifest), "parts": folder}, indent=1).encode()


def _parse_manifest(key: str, text: bytes) -> tuple[str, dict[str, tuple[int, int]]]:
    """The folder of the parts, and what is in it. Raises Damaged."""
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


# -- small things -------------------------------------------------------------------------------------------------------


def _run_parallel(act: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """In the order of the items; the first error ends it."""
    todo = list(items)
    if len(todo) < 2:
        return [act(item) for item in todo]
    with ThreadPoolExecutor(min(AT_ONCE, len(todo))) as pool:
        futures = [pool.submit(act, item) for item in todo]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _retry_delays(patience: RetryPolicy, retries: int) -> Iterator[float | None]:
    """How long to wait after each attempt when it fails; None after the last."""
    deadline = time.monotonic() + patience.total_s
    backoff = Backoff(_PAUSE_S, _LONGEST_PAUSE_S, jitter=(0.5, 1.0), generator=random)
    for _ in range(retries):
        yield backoff.next_delay()
        if time.monotonic() > deadline:
            break
    yield None


def _read_authorities(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"{file} (named by {multipart_cleanup.AUTHORITIES}) cannot be read: {error.strerror}.") from error


def _read_number(environment: Mapping[str, str], name: str, usual: float) -> float:
    text = environment.get(name, "")
    try:
        number = float(text) if text else usual
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e6:
        raise UsageError(f"{name}={text!r} is not a number of seconds or of times.", f"Usual is {usual:g}.")
    return number
