"""The store in a directory: the contract of every store, and what only a directory can do to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

from ludus.errors import NotFound, StoreError, StoreFull, UnknownName
from ludus.storage.base import Store, open_store
from ludus.storage.local import LocalStore
from ludus.testing.store_contract import FILES, StoreContract

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


class _Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "store")

    def damage(self, store: Store, key: str, name: str, data: bytes | None) -> None:
        assert isinstance(store, LocalStore)
        path = store.root / key / name
        path.unlink() if data is None else path.write_bytes(data)

    def abandon(self, store: Store, key: str, files: Mapping[str, bytes]) -> None:
        """Dies just before the rename, and cannot clean up."""
        with (
            mock.patch("os.rename", side_effect=_Killed),
            mock.patch("shutil.rmtree"),
            pytest.raises(_Killed),
        ):
            store.put_bundle(key, files)


def _everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_no_temporary_files_are_left_after_a_put(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/value", b"1")
    store.put("a/value", b"2")
    store.put("a/other", b"1", overwrite=False)
    store.put_bundle("a/bundle", {"file": b"1"})
    with pytest.raises(StoreError):
        store.put("a/other", b"2", overwrite=False)
    with pytest.raises(StoreError):
        store.put_bundle("a/bundle", {"file": b"2"})
    store.delete("a/bundle")
    assert _everything(tmp_path) == ["a", "a/.once-other", "a/.once-other/value", "a/other", "a/value"]
    store.delete("a/other")
    assert _everything(tmp_path) == ["a", "a/value"]


def test_nothing_is_made_before_something_is_put(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    assert store.list("") == []
    store.delete("a/b")
    with pytest.raises(NotFound):
        store.get("a/b")
    assert not (tmp_path / "store").exists()


def test_a_bundle_is_a_directory_that_other_tools_can_read(tmp_path: Path) -> None:
    LocalStore(tmp_path).put_bundle("checkpoints/000001", FILES)
    assert _everything(tmp_path / "checkpoints" / "000001") == sorted([*FILES, "manifest.json"])
    assert (tmp_path / "checkpoints" / "000001" / "a.bin").read_bytes() == FILES["a.bin"]


def test_sweep_removes_what_killed_writers_left_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_bundle("checkpoints/000001", FILES)
    store.put("checkpoints/best.json", b"{}")
    suite = TestLocalStore()
    for _ in range(3):
        suite.abandon(store, "checkpoints/000002", FILES)
    with mock.patch("os.replace", side_effect=_Killed), mock.patch.object(Path, "unlink"), pytest.raises(_Killed):
        store.put("checkpoints/best.json", b"{...")
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6
    assert store.sweep("checkpoints") == 4
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["000001", "best.json"]
    assert store.get_bundle("checkpoints/000001") == dict(FILES)
    assert store.sweep("checkpoints") == 0
    assert store.sweep("no/such") == 0


def test_a_delete_that_is_killed_half_way_leaves_no_half_bundle(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_bundle("checkpoints/000001", FILES)
    with mock.patch("shutil.rmtree", side_effect=_Killed), pytest.raises(_Killed):
        store.delete("checkpoints/000001")
    assert store.list("checkpoints") == []
    with pytest.raises(NotFound):
        store.get_bundle("checkpoints/000001")
    assert store.sweep("checkpoints") == 1
    assert _everything(tmp_path) == ["checkpoints"]


def test_a_value_whose_writing_was_swept_away_by_another_is_written_all_the_same(tmp_path: Path) -> None:
    store, replace, swept = LocalStore(tmp_path), os.replace, list[int]()

    def sweep_first(source: Path, target: Path) -> None:
        if not swept:
            swept.append(LocalStore(tmp_path).sweep("a"))
        replace(source, target)

    with mock.patch("os.replace", side_effect=sweep_first):
        store.put("a/value", b"1")
    assert swept == [1]
    assert store.get("a/value") == b"1"
    assert _everything(tmp_path) == ["a", "a/value"]


def test_a_symbolic_link_in_the_store_is_no_way_to_delete_what_it_points_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("1")
    store = LocalStore(tmp_path / "store")
    store.put("kept", b"1")
    (tmp_path / "store" / "link").symlink_to(outside, target_is_directory=True)
    store.delete("link")
    assert (outside / "precious").read_text() == "1"


# -- a disk that is full, or that may not be written --------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    if not ROOT or not sys.platform.startswith("linux"):
        pytest.skip("only root may mount a small file system; the limit on file sizes is tested instead")
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_is_reported_and_damages_nothing(tiny_disk: Path) -> None:
    store = LocalStore(tiny_disk)
    store.put("value", b"old")
    store.put_bundle("checkpoints/000001", FILES)
    with pytest.raises(StoreFull, match=r"No space left to write .*value.* Free some space"):
        store.put("value", bytes(1 << 17))
    with pytest.raises(StoreFull, match=r"000002"):
        store.put_bundle("checkpoints/000002", {"small": b"1", "large": bytes(1 << 17)})
    assert store.get("value") == b"old"
    assert store.get_bundle("checkpoints/000001") == dict(FILES)
    assert store.list("checkpoints") == ["000001"]
    assert _everything(tiny_disk) == sorted(
        ["checkpoints", "checkpoints/000001", *(f"checkpoints/000001/{name}" for name in [*FILES, "manifest.json"]), "value"]
    )
    store.put("value", b"new")  # what was half written gave its room back
    assert store.get("value") == b"new"


_LIMITED = """
import resource, signal, sys
from ludus.errors import StoreFull
from ludus.storage.local import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store = LocalStore(sys.argv[1])
try:
    store.put_bundle("checkpoints/000002", {"large": bytes(10000)})
except StoreFull as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on file sizes")
def test_a_file_beyond_the_allowed_size_is_a_full_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_bundle("checkpoints/000001", FILES)
    said = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("No space left to write")
    assert store.list("checkpoints") == ["000001"]
    assert store.get_bundle("checkpoints/000001") == dict(FILES)
    assert store.sweep("checkpoints") == 0


@pytest.mark.skipif(ROOT, reason="root may write everywhere")
def test_a_directory_without_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreFull, match=r"Not allowed to write .*closed.* Choose another --local-dir"):
        LocalStore(tmp_path / "closed").put("value", b"1")


def test_a_read_only_file_system_is_reported(tiny_disk: Path) -> None:
    store = LocalStore(tiny_disk)
    store.put("value", b"old")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    writes: list[Callable[[], None]] = [lambda: store.put("value", b"new"), lambda: store.put_bundle("bundle", {"file": b"1"})]
    for write in writes:
        with pytest.raises(StoreFull, match=r"Not allowed to write .*Read-only file system.* Choose another --local-dir"):
            write()
    with pytest.raises(StoreFull):
        store.delete("value")
    assert store.get("value") == b"old"


def test_a_file_where_a_directory_should_be_is_a_store_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match="file"):
        store.put("value", b"1")
    with pytest.raises(StoreError, match="file"):
        store.put_bundle("checkpoints/000001", FILES)
    assert (tmp_path / "file").read_text() == "1"


# -- opening ------------------------------------------------------------------------------------------------------------


def test_a_store_is_opened_by_path_or_url(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        store = open_store(url)
        store.put("value", url.encode())
        assert (tmp_path / "value").read_bytes() == url.encode()


def test_an_unknown_kind_of_store_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"Unknown store 'ftp'.*local"):
        open_store("ftp://host/path")
