"""A store in a directory. Also right on a network file system: it relies on rename and O_EXCL, never on locks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.errors import AlreadyExists, Damaged, NotFound, StoreError, StoreFull
from ludus.store.store import MANIFEST, Bytes, Guard, check_file, check_key, make_manifest, read_manifest

_ASIDE = ".aside-"  # unfinished files and bundles; never listed, never read
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


class LocalStore:
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    @property
    def url(self) -> str:
        return str(self.root)

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        target = self._path(key)
        with _translated(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = self._aside(target)
            try:
                _write(aside, data)
                if overwrite:
                    os.replace(aside, target)
                else:
                    os.link(aside, target)  # atomic, and fails when the target exists
            except FileExistsError as error:
                raise AlreadyExists(f"{target} exists already.") from error
            finally:
                aside.unlink(missing_ok=True)
            _sync(target.parent)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _translated(path):
            return path.read_bytes()

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: Guard | None = None) -> None:
        target = self._path(key)
        manifest = make_manifest(files)
        with _translated(target):
            if target.exists():
                raise AlreadyExists(f"{target} exists already.")
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = self._aside(target)
            try:
                aside.mkdir()
                for name, data in {**files, MANIFEST: manifest}.items():
                    _write(aside / name, data)
                _sync(aside)
                if guard is not None:
                    guard()
                os.rename(aside, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise AlreadyExists(f"{target} exists already.") from error
                raise
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            _sync(target.parent)

    def get_bundle(self, key: str) -> dict[str, bytes]:
        path = self._path(key)
        with _translated(path):
            if not path.is_dir():
                raise NotFound(f"There is no {path}.")
            if not (path / MANIFEST).exists():
                raise Damaged(f"{path} has no {MANIFEST}: it is not a complete checkpoint or version.")
            manifest = read_manifest(key, (path / MANIFEST).read_bytes())
            return {name: check_file(str(path), name, self._read(path / name), entry) for name, entry in manifest.items()}

    def get_file(self, key: str, name: str) -> bytes:
        path = self._path(key)
        with _translated(path):
            if not path.is_dir():
                raise NotFound(f"There is no {path}.")
            if not (path / MANIFEST).exists():
                raise Damaged(f"{path} has no {MANIFEST}: it is not a complete checkpoint or version.")
            manifest = read_manifest(key, (path / MANIFEST).read_bytes())
            if name not in manifest:
                raise NotFound(f"{path} has no file {name}.")
            return check_file(str(path), name, self._read(path / name), manifest[name])

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise Damaged(f"{path} is missing.", "Use an older checkpoint.") from error

    def list(self, prefix: str) -> list[str]:
        path = self._path(prefix) if prefix else self.root
        with _translated(path):
            if not path.is_dir():
                return []
            return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path), contextlib.suppress(FileNotFoundError):
            if not path.is_dir():
                path.unlink()
                return
            aside = self._aside(path)
            os.rename(path, aside)  # gone at once for readers, then removed
            shutil.rmtree(aside, ignore_errors=True)

    def sweep(self, prefix: str) -> int:
        """Remove what crashed writers left below `prefix`. Only for the one owner of that prefix."""
        path = self._path(prefix) if prefix else self.root
        left = [entry for entry in path.iterdir() if entry.name.startswith(_ASIDE)] if path.is_dir() else []
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        return len(left)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @staticmethod
    def _aside(target: Path) -> Path:
        return target.parent / f"{_ASIDE}{uuid.uuid4().hex}"


def _write(path: Path, data: Bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    if os.name == "nt":  # a directory cannot be opened there; rename is durable enough
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"There is no {path}.") from error
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(f"No space left to write {path}.", "Free some room; everything written before is intact.") from error
        if error.errno in _REFUSED:
            raise StoreFull(f"Not allowed to write {path} ({error.strerror}).", "Choose another --local-dir.") from error
        raise StoreError(f"{path}: {error.strerror or error}.") from error
