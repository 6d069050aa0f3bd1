"""Store in a directory, which several machines may share.

Exclusive creation relies only on rename(2): a directory cannot be renamed to a non-empty one. Network file systems do not
always support locks, and on some of them two machines can both create a file with O_EXCL or link it (measured on a FUSE mount
of SeaweedFS: two winners in three of four races; renamed directories had one winner in each of 40 races).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ludus.errors import AlreadyExists, Damaged, NotFound, StoreError, StoreFull, StoreUnavailable, is_unavailable
from ludus.io.atomic_file import TEMPORARY, open_for_replace, sync_directory, sync_file, temporary_path
from ludus.storage.base import MANIFEST, Bytes, WriteGuard, check_file, check_key, make_manifest, read_manifest
from ludus.storage.safe_read import MAX_JSON_BYTES, read_regular_file

_ONCE = ".once-"  # prefix of the directory that claims a key written with overwrite=False; it contains the value
_VALUE = "value"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
_LOOKS = 3
_TRIES, _PAUSE_S = 10, 0.01


class LocalStore:
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._seen = False

    @property
    def url(self) -> str:
        return str(self.root)

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        target = self._path(key)
        with self._translate_errors(target):
            self._make(target.parent)
            if overwrite:
                _replace_file(target, data)
            else:
                _create_once(target, data)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._translate_errors(path):
            for tries_left in range(_TRIES, -1, -1):
                with contextlib.suppress(FileNotFoundError):
                    return _read(path)
                try:
                    return _read(_claim_path(path) / _VALUE)  # claimed, not published yet
                except FileNotFoundError:
                    if not tries_left or not _has_hidden_file(path.parent):
                        raise
                time.sleep(_PAUSE_S)
            raise AssertionError("the last attempt returns or raises")

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        target = self._path(key)
        manifest = make_manifest(files)
        with self._translate_errors(target):
            if (target / MANIFEST).exists():  # not `target`: attribute caches may show a directory deleted elsewhere
                raise AlreadyExists(f"{target} exists already.")
            self._make(target.parent)
            with _temporary_directory(target) as aside:
                for name, data in {**files, MANIFEST: manifest}.items():
                    _write(aside / name, data)
                sync_directory(aside)
                if guard is not None:
                    guard()
                _rename_to(aside, target)
            sync_directory(target.parent)

    def get_bundle(self, key: str) -> dict[str, bytes]:
        path = self._path(key)
        with self._translate_errors(path):
            manifest = _load_manifest(key, path)
            return {name: _read_part(path, name, entry) for name, entry in manifest.items()}

    def get_file(self, key: str, name: str) -> bytes:
        path = self._path(key)
        with self._translate_errors(path):
            manifest = _load_manifest(key, path)
            if name not in manifest:
                raise NotFound(f"{path} has no file {name}.")
            return _read_part(path, name, manifest[name])

    def list(self, prefix: str) -> list[str]:
        return [name for name in self._names(prefix) if not name.startswith(".")]

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translate_errors(path):
            self._check_there()
            if path.is_dir() and not path.is_symlink():
                _remove_directory(path)
                return
            _remove_directory(_claim_path(path))  # first: otherwise the next writer would publish the value again
            path.unlink(missing_ok=True)

    def sweep(self, prefix: str) -> int:
        path = self._path(prefix) if prefix else self.root
        left = [path / name for name in self._names(prefix) if name.startswith(TEMPORARY)]
        with self._translate_errors(path):
            for entry in left:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
            return sum(not entry.exists() for entry in left)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _names(self, prefix: str) -> Sequence[str]:
        path = self._path(prefix) if prefix else self.root
        with self._translate_errors(path):
            try:
                return sorted(entry.name for entry in path.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                self._check_there()
                return []

    def _make(self, directory: Path) -> None:
        if not directory.is_dir():
            self._check_there()
            directory.mkdir(parents=True, exist_ok=True)
        self._seen = True

    def _check_there(self) -> None:
        """Raise StoreUnavailable if the root has disappeared: an unmounted file system leaves an empty mount point."""
        if self._seen and not self.root.exists():
            raise StoreUnavailable(f"{self.root} is gone.", "Check that the file system is mounted and it was not deleted.")

    @contextlib.contextmanager
    def _translate_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._check_there()
            raise NotFound(f"There is no {path}.") from error
        except NotFound:
            self._check_there()
            raise
        except OSError as error:
            raise _translate_error(error, path) from error
        else:
            self._seen = self._seen or self.root.exists()


# -- writing ------------------------------------------------------------------------------------------------------------


def _replace_file(target: Path, data: Bytes) -> None:
    for tries_left in range(_TRIES, -1, -1):
        try:
            with open_for_replace(target, durable=True) as file:
                file.write(data)
            return
        except FileNotFoundError:  # another owner swept the temporary file, or FUSE hides it (see `_has_hidden_file`)
            if not tries_left:
                raise
        time.sleep(_PAUSE_S)


def _create_once(target: Path, data: Bytes) -> None:
    """Create the target. The writer that renames its directory to the claim wins; it or a later writer publishes the value."""
    if target.exists():
        raise AlreadyExists(f"{target} exists already.")
    once = _claim_path(target)
    with _temporary_directory(target) as aside:
        _write(aside / _VALUE, data)
        sync_directory(aside)
        try:
            _rename_to(aside, once)
        except AlreadyExists:
            with contextlib.suppress(OSError):  # the winner may have died before it published the value
                _publish(once / _VALUE, target)
            raise AlreadyExists(f"{target} exists already.") from None
    sync_directory(target.parent)
    _publish(once / _VALUE, target)
    sync_directory(target.parent)
    if _read(target) != bytes(data):  # a concurrent put with overwrite=True
        raise AlreadyExists(f"{target} exists already.")


def _publish(value: Path, target: Path) -> None:
    """Make the value visible at the target atomically, unless the target exists."""
    try:
        os.link(value, target)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not target.exists():
            _replace_file(target, _read(value))


def _rename_to(aside: Path, target: Path) -> None:
    """Rename a directory to the target. Raises AlreadyExists."""
    try:
        os.rename(aside, target)
    except OSError as error:
        # The error depends on the file system: ENOTEMPTY, EEXIST, or EPERM with sshfs.
        if aside.exists() and target.exists():
            raise AlreadyExists(f"{target} exists already.") from error
        raise


@contextlib.contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    aside = temporary_path(target)
    try:
        aside.mkdir()
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(path: Path, data: Bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        sync_file(file)


def _remove_directory(directory: Path) -> None:
    """Rename a directory, so that it disappears atomically, then remove it."""
    aside = temporary_path(directory)
    try:
        os.rename(directory, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)  # files open in a reader stay as `.nfs…` until the next sweep


# -- reading ------------------------------------------------------------------------------------------------------------


def _load_manifest(key: str, path: Path) -> dict[str, tuple[int, int]]:
    if not path.is_dir():
        raise NotFound(f"There is no {path}.")
    try:
        return read_manifest(key, _read(path / MANIFEST, limit=MAX_JSON_BYTES))
    except FileNotFoundError:
        if not path.is_dir():  # deleted meanwhile
            raise
        raise Damaged(f"{path} has no {MANIFEST}: it is not a complete checkpoint or version.") from None


def _read_part(path: Path, name: str, expected: tuple[int, int]) -> bytes:
    try:
        data = _read(path / name, size=expected[0])
    except FileNotFoundError as error:
        if not path.is_dir():
            raise
        raise Damaged(f"{path / name} is missing.", "Use an older checkpoint.") from error
    return check_file(str(path), name, data, expected)


def _has_hidden_file(directory: Path) -> bool:
    """Whether an open file is being replaced: FUSE mounts rename it first, so that it is missing for a moment."""
    try:
        return any(entry.name.startswith(".fuse_hidden") for entry in directory.iterdir())
    except FileNotFoundError:
        return False


def _read(path: Path, *, size: int | None = None, limit: int | None = None) -> bytes:
    """Raises Damaged, or FileNotFoundError, also for a file that another machine removed while it was open (ESTALE)."""
    for _ in range(_LOOKS):
        try:
            return read_regular_file(path, size=size, limit=limit)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _claim_path(target: Path) -> Path:
    return target.parent / f"{_ONCE}{target.name}"


def _translate_error(error: OSError, path: Path) -> StoreError:
    if error.errno in _FULL:
        return StoreFull(f"No space left to write {path}.", "Free some space; everything written before is intact.")
    if error.errno in _REFUSED:
        return StoreFull(f"Not allowed to write {path} ({error.strerror}).", "Choose another --local-dir.")
    if is_unavailable(error):
        return StoreUnavailable(f"{path} cannot be reached: {error.strerror}.", "Is its file system still mounted?")
    return StoreError(f"{path}: {error.strerror or error}.")
