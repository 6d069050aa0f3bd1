"""A directory that several machines share: the contract through a real network file system, and across two mounts of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from ludus.errors import AlreadyExists, Fenced, NotFound, StoreUnavailable
from ludus.experiments.runs import checkpoint
from ludus.models.weights.version_store import LocalVersionStore, newest_claim
from ludus.storage.base import Bytes, Store, WriteGuard
from ludus.storage.local import LocalStore
from ludus.testing.store_contract import FILES, StoreContract
from tests.models.test_version_store import a_policy
from tests.mounts import Mount, sshfs_mounts, weed_mounts

RACERS = 16
_WAIT_S = 60.0


class _Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class TwoMachines:
    """What one machine writes, the other reads; where only one of many may succeed, they are on both."""

    def __init__(self, roots: list[Path], behind_s: float = 0.0) -> None:
        """`behind_s`: so long a machine may see less than the other one has written."""
        self._behind_s = behind_s
        self.writer, self.reader = (LocalStore(root) for root in roots)
        self._turns, self._lock = itertools.cycle((self.writer, self.reader)), threading.Lock()

    @property
    def _either(self) -> LocalStore:
        with self._lock:
            return next(self._turns)

    @property
    def _reader(self) -> LocalStore:
        deadline = time.monotonic() + self._behind_s
        while time.monotonic() < deadline and _all_below(self.writer.root) != _all_below(self.reader.root):
            time.sleep(0.01)
        return self.reader

    @property
    def url(self) -> str:
        return self.writer.url

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        store = self.writer if overwrite else self._either
        store.put(key, data, overwrite=overwrite)

    def get(self, key: str) -> bytes:
        return self._reader.get(key)

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        self._either.put_bundle(key, files, guard=guard)

    def get_bundle(self, key: str) -> dict[str, bytes]:
        return self._reader.get_bundle(key)

    def get_file(self, key: str, name: str) -> bytes:
        return self._reader.get_file(key, name)

    def list(self, prefix: str) -> list[str]:
        return self._reader.list(prefix)

    def delete(self, key: str) -> None:
        self.writer.delete(key)

    def sweep(self, prefix: str) -> int:
        return self._reader.sweep(prefix)


def _all_below(root: Path) -> list[tuple[str, int]]:
    found = []
    for directory, _, names in os.walk(root):
        with contextlib.suppress(FileNotFoundError):
            found += [(str(Path(directory, name).relative_to(root)), Path(directory, name).stat().st_size) for name in names]
    return sorted(found)


class _Shared(StoreContract):
    def damage(self, store: Store, key: str, name: str, data: bytes | None) -> None:
        path = Path(store.url) / key / name
        path.unlink() if data is None else path.write_bytes(data)

    def abandon(self, store: Store, key: str, files: Mapping[str, bytes]) -> None:
        with mock.patch("os.rename", side_effect=_Killed), mock.patch("shutil.rmtree"), pytest.raises(_Killed):
            store.put_bundle(key, files)


def _here(mounts: list[Mount]) -> list[Path]:
    """A place of its own, seen through each of the mounts."""
    name = uuid.uuid4().hex
    return [mount.path / name for mount in mounts]


# -- sshfs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attentive() -> Iterator[list[Mount]]:
    """They list a directory as it is now."""
    with sshfs_mounts(2, "dir_cache=no") as mounts:
        yield mounts


@pytest.fixture(scope="module")
def usual() -> Iterator[list[Mount]]:
    """As they are mounted by those who give no options: a directory is listed as it was up to 20 s ago."""
    with sshfs_mounts(2) as mounts:
        yield mounts


@pytest.mark.long
@pytest.mark.system
class TestThroughANetworkFileSystem(_Shared):
    @pytest.fixture
    def store(self, usual: list[Mount]) -> Store:
        return LocalStore(_here(usual)[0])


@pytest.mark.system
class TestAcrossTwoMounts(_Shared):
    @pytest.fixture
    def store(self, attentive: list[Mount]) -> Store:
        return TwoMachines(_here(attentive))


@pytest.mark.system
def test_without_hard_links_too_exactly_one_of_two_machines_wins() -> None:
    with sshfs_mounts(2, "disable_hardlink") as mounts:
        roots = _here(mounts)
        _race_for_values(roots, 5)
        with pytest.raises(PermissionError):
            os.link(roots[0] / "prize0", roots[0] / "other")  # or the test shows nothing


@pytest.mark.system
def test_exactly_one_of_two_machines_wins_also_with_stale_lists(usual: list[Mount]) -> None:
    roots = _here(usual)
    for root in roots:
        LocalStore(root).put("first", b"")
        LocalStore(root).list("")  # from now on they believe to know what there is
    _race_for_values(roots, 5)
    _race_for_bundles(roots, 5)


@pytest.mark.system
def test_an_owner_is_cut_off_at_once_by_another_machine_although_its_lists_are_stale(usual: list[Mount]) -> None:
    roots = _here(usual)
    here, there = (LocalVersionStore(LocalStore(root), {checkpoint.BEGUN_FROM: None}) for root in roots)
    here.add("model", a_policy())
    here.check()
    here.confirm()
    LocalStore(roots[0]).list("models/model/incarnations")
    there.add("model", a_policy())
    for ask in (here.check, here.confirm, here.check_recently, lambda: here.keep("model")):
        with pytest.raises(Fenced, match="incarnation 2, this is 1"):
            ask()
    there.confirm()
    claim = newest_claim(LocalStore(roots[0]), "model")
    assert claim is not None
    assert (claim.number, claim.content["pid"]) == (2, os.getpid())


@pytest.mark.system
def test_a_new_owner_of_a_run_sees_the_latest_writes(usual: list[Mount]) -> None:
    here, there = (LocalStore(root) for root in _here(usual))
    here.put_bundle("checkpoints/000001", FILES)
    assert there.list("checkpoints") == ["000001"]
    here.put_bundle("checkpoints/000002", FILES)
    checkpoint.refresh_listing(there)
    assert checkpoint.names(there) == ["000001", "000002"]


@pytest.mark.system
def test_a_mount_whose_server_is_gone_is_a_store_that_is_away_and_comes_back() -> None:
    with sshfs_mounts(2, "reconnect") as mounts:
        here, there = (LocalStore(root) for root in _here(mounts))
        here.put("value", b"1")
        here.put_bundle("bundle", FILES)
        with sshfs_mounts(1) as lonely:
            gone = LocalStore(_here(lonely)[0])
            gone.put("value", b"1")
            lonely[0].cut()
            asked: list[Callable[[], object]] = [
                lambda: gone.get("value"),
                lambda: gone.put("value", b"2"),
                lambda: gone.put("other", b"2", overwrite=False),
                lambda: gone.put_bundle("bundle", FILES),
                lambda: gone.get_bundle("bundle"),
                lambda: gone.list("models"),
                lambda: gone.delete("value"),
                lambda: gone.sweep("models"),
            ]
            for ask in asked:
                with pytest.raises(StoreUnavailable, match="mounted"):
                    ask()
        mounts[1].cut()
        assert _once_it_is_back(lambda: there.get_bundle("bundle")) == dict(FILES)
        there.put("value", b"2")
        assert here.get("value") == b"2"


@pytest.mark.system
def test_after_an_unmount_nothing_is_written_below_the_mount_point_and_no_writer_is_fenced() -> None:
    with sshfs_mounts(1) as mounts:
        (root,) = _here(mounts)
        pool = LocalVersionStore(LocalStore(root), {checkpoint.BEGUN_FROM: None})
        pool.add("model", a_policy())
        mounts[0].close()
        for ask in (pool.check, pool.confirm, lambda: pool.keep("model")):
            with pytest.raises(StoreUnavailable, match="file system is mounted"):
                ask()
        pool.close()
        assert list(mounts[0].path.iterdir()) == []


def _once_it_is_back(read: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return read()
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# -- SeaweedFS ----------------------------------------------------------------------------------------------------------
# There two mounts can both create one file with O_EXCL, and both link to one name: what this store does not rely on.


@pytest.fixture(scope="module")
def weed() -> Iterator[list[Mount]]:
    with weed_mounts(2) as mounts:
        yield mounts


@pytest.mark.long
@pytest.mark.system
class TestAcrossTwoMountsOfAFiler(_Shared):
    @pytest.fixture
    def store(self, weed: list[Mount]) -> Store:
        return TwoMachines(_here(weed), behind_s=0.5)


@pytest.mark.long
@pytest.mark.system
def test_of_two_machines_on_a_filer_exactly_one_wins(weed: list[Mount]) -> None:
    roots = _here(weed)
    _race_for_values(roots, 30)
    _race_for_bundles(roots, 30)


# -- races --------------------------------------------------------------------------------------------------------------


def _race_for_values(roots: list[Path], times: int) -> None:
    stores = [LocalStore(root) for root in roots]
    for key in (f"prize{turn}" for turn in range(times)):
        won = _race(functools.partial(_put_value, stores, key))
        assert len(won) == 1
        assert [store.get(key) for store in stores] == [str(won[0]).encode() * 100] * len(stores)


def _race_for_bundles(roots: list[Path], times: int) -> None:
    stores = [LocalStore(root) for root in roots]
    for key in (f"bundle{turn}" for turn in range(times)):
        won = _race(functools.partial(_put_bundle, stores, key))
        assert len(won) == 1
        assert [store.get_bundle(key) for store in stores] == [{"who": str(won[0]).encode()}] * len(stores)


def _put_value(stores: list[LocalStore], key: str, racer: int) -> None:
    stores[racer % len(stores)].put(key, str(racer).encode() * 100, overwrite=False)


def _put_bundle(stores: list[LocalStore], key: str, racer: int) -> None:
    stores[racer % len(stores)].put_bundle(key, {"who": str(racer).encode()})


def _race(write: Callable[[int], None]) -> list[int]:
    start = threading.Barrier(RACERS)

    def run(racer: int) -> int | None:
        start.wait(_WAIT_S)
        try:
            write(racer)
        except AlreadyExists:
            return None
        return racer

    with ThreadPoolExecutor(RACERS) as pool:
        return [racer for racer in pool.map(run, range(RACERS), timeout=_WAIT_S) if racer is not None]


def test_a_value_whose_writer_died_before_it_was_shown_is_there_and_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with mock.patch("os.link", side_effect=_Killed), pytest.raises(_Killed):
        store.put("models/claim", b"the dead one", overwrite=False)
    assert not (tmp_path / "models" / "claim").exists(), "or the test shows nothing"
    assert store.get("models/claim") == b"the dead one"
    with pytest.raises(AlreadyExists):
        store.put("models/claim", b"the next one", overwrite=False)
    assert store.list("models") == ["claim"]
    assert store.get("models/claim") == b"the dead one"
    store.delete("models/claim")
    with pytest.raises(NotFound):
        store.get("models/claim")
    store.put("models/claim", b"the next one", overwrite=False)
    assert store.get("models/claim") == b"the next one"
