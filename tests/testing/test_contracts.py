"""The contract suites themselves: a backend that is wrong in a plausible way must not pass them."""

from __future__ import annotations

import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import AlreadyExists, MemoryClosed, NotFound
from ludus.storage.base import MANIFEST, Bytes, Store, WriteGuard
from ludus.storage.local import LocalStore
from ludus.testing.memory_contract import MemoryContract
from ludus.testing.store_contract import StoreContract
from ludus.transport.local import LocalMemory

FAILED = (AssertionError, pytest.fail.Exception, NotFound, MemoryClosed)
"""How a test fails: its assertion, nothing raised where something should have been, or something lost."""

# -- stores that are wrong ----------------------------------------------------------------------------------------------


class _Replaces(LocalStore):
    """Looks, then writes: two writers both find nothing there."""

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        if not overwrite and self._path(key).exists():
            raise AlreadyExists(f"{key} exists already.")
        super().put(key, data)


class _Tears(LocalStore):
    """Writes a bundle where it will be read."""

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        for name, data in files.items():
            self.put(f"{key}/{name}", data)
        self.put(f"{key}/{MANIFEST}", b"{}")


class _Late(LocalStore):
    """Asks the guard when it is too late."""

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        super().put_bundle(key, files)
        if guard is not None:
            guard()


class _Careless(LocalStore):
    """Reads one file without looking at the manifest."""

    def get_file(self, key: str, name: str) -> bytes:
        return self.get(f"{key}/{name}")


class _Zealous(LocalStore):
    """Sweeps away what is whole."""

    def sweep(self, prefix: str) -> int:
        for name in self.list(prefix):
            self.delete(f"{prefix}/{name}" if prefix else name)
        return super().sweep(prefix)


class _Lazy(LocalStore):
    def sweep(self, prefix: str) -> int:
        return 0


class _Believes(LocalStore):
    """Reads what is there without looking at the manifest."""

    def get_bundle(self, key: str) -> dict[str, bytes]:
        return {name: self.get(f"{key}/{name}") for name in self.list(key) if name != MANIFEST}


class _Unsorted(LocalStore):
    def list(self, prefix: str) -> list[str]:
        return super().list(prefix)[::-1]


class _Forgets(LocalStore):
    """Deletes what begins with the key."""

    def delete(self, key: str) -> None:
        folder, _, start = key.rpartition("/")
        for name in self.list(folder):
            if name.startswith(start):
                super().delete(f"{folder}/{name}" if folder else name)


class _StoreSuite(StoreContract):
    __test__ = False

    def damage(self, store: Store, key: str, name: str, data: bytes | None) -> None:
        assert isinstance(store, LocalStore)
        path = store.root / key / name
        path.unlink() if data is None else path.write_bytes(data)

    def abandon(self, store: Store, key: str, files: Mapping[str, bytes]) -> None:
        assert isinstance(store, LocalStore)
        folder = (store.root / key).parent / f".aside-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        (folder / "a.bin").write_bytes(files["a.bin"])


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (_Replaces, lambda s, store: s.test_of_many_writers_without_overwrite_exactly_one_wins(store)),
        (_Tears, lambda s, store: s.test_a_bundle_never_changes(store)),
        (_Tears, lambda s, store: s.test_a_write_that_fails_half_way_leaves_nothing(store)),
        (_Late, lambda s, store: s.test_the_guard_is_asked_once_when_nothing_can_be_seen_yet(store)),
        (_Late, lambda s, store: s.test_a_guard_that_refuses_leaves_nothing(store)),
        (_Careless, lambda s, store: s.test_a_changed_file_is_noticed(store, b"")),
        (_Zealous, lambda s, store: s.test_a_sweep_removes_what_is_unfinished_and_nothing_else(store)),
        (_Zealous, lambda s, store: s.test_there_is_nothing_to_sweep_where_all_went_well(store)),
        (_Lazy, lambda s, store: s.test_a_sweep_removes_what_is_unfinished_and_nothing_else(store)),
        (_Lazy, lambda s, store: s.test_a_sweep_keeps_to_its_prefix(store)),
        (_Believes, lambda s, store: s.test_a_changed_file_is_noticed(store, b"")),
        (_Believes, lambda s, store: s.test_a_missing_file_is_noticed(store, "a.bin")),
        (_Unsorted, lambda s, store: s.test_many_keys_are_all_there_and_in_order(store)),
        (_Forgets, lambda s, store: s.test_deleting_one_leaves_its_neighbours(store)),
        (_Forgets, lambda s, store: s.test_deleting_what_is_not_there_does_nothing(store)),
    ],
)
def test_a_store_that_is_wrong_is_caught(
    tmp_path: Path, wrong: type[LocalStore], caught_by: Callable[[_StoreSuite, LocalStore], None]
) -> None:
    def try_often() -> None:  # a race is not lost every time
        for attempt in range(20):
            caught_by(_StoreSuite(), wrong(tmp_path / str(attempt)))

    with pytest.raises(FAILED):
        try_often()


# -- memories that are wrong --------------------------------------------------------------------------------------------


class _LastInFirstOut(LocalMemory):
    def commit(self, segments: Segments) -> None:
        super().commit(segments)
        self._ready.rotate(1)


class _Trusting(LocalMemory):
    """Takes back whatever it is given."""

    @staticmethod
    def _give_back(holders: set[int], segments: Segments, wrong: str) -> None:
        holders.discard(id(segments))


class _Unbounded(LocalMemory):
    """Makes another block rather than push back."""

    def reserve(self, timeout_s: float) -> Segments | None:
        if not self._free and not self._closed:
            self._free.append(Segments.empty(self._spec, self._rows))
        return super().reserve(timeout_s)

    def __init__(self, spec: SegmentSpec, rows: int, blocks: int) -> None:
        super().__init__(spec, rows, blocks)
        self._spec, self._rows = spec, rows


class _Eager(LocalMemory):
    """Frees a block when it is taken."""

    def take(self, timeout_s: float) -> Segments | None:
        block = super().take(timeout_s)
        if block is not None:
            self._free.append(block)
        return block

    def release(self, segments: Segments) -> None:
        self._reading.discard(id(segments))
        self._released += 1


class _Hasty(LocalMemory):
    """Drops what is waiting when it is closed."""

    def close(self) -> None:
        self._ready = deque()
        super().close()


class _Lossy(LocalMemory):
    """Shares one block between all writers."""

    def __init__(self, spec: SegmentSpec, rows: int, blocks: int) -> None:
        super().__init__(spec, rows, 0)
        only = Segments.empty(spec, rows)
        self._free.extend(Segments(**{name: getattr(only, name) for name in only.__dataclass_fields__}) for _ in range(blocks))


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        (_LastInFirstOut, lambda s, make: s.test_blocks_come_out_in_the_order_in_which_they_were_committed(make)),
        (_Trusting, lambda s, make: s.test_a_block_of_another_memory_is_rejected(make)),
        (_Trusting, lambda s, make: s.test_a_block_can_be_given_back_only_once_and_only_by_its_holder(make)),
        (_Unbounded, lambda s, make: s.test_a_full_memory_pushes_back(make)),
        (_Eager, lambda s, make: s.test_a_full_memory_pushes_back(make)),
        (_Eager, lambda s, make: s.test_a_block_can_be_given_back_only_once_and_only_by_its_holder(make)),
        (_Hasty, lambda s, make: s.test_what_was_committed_before_closing_can_still_be_taken(make)),
        (_Lossy, lambda s, make: s.test_reserved_blocks_do_not_overlap(make)),
        (_Lossy, lambda s, make: s.test_a_taken_block_is_not_given_to_another_reader(make)),
    ],
)
def test_a_memory_that_is_wrong_is_caught(wrong: type[LocalMemory], caught_by: Callable[[MemoryContract, Any], None]) -> None:
    with pytest.raises(FAILED):
        caught_by(MemoryContract(), wrong)


# -- what a user needs to use them --------------------------------------------------------------------------------------


def test_a_suite_without_its_hooks_names_what_to_override(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="damage"):
        StoreContract().test_a_missing_file_is_noticed(LocalStore(tmp_path / "a"), "a.bin")
    with pytest.raises(NotImplementedError, match="abandon"):
        StoreContract().test_an_unfinished_bundle_does_not_exist(LocalStore(tmp_path / "b"))


def test_only_the_contract_suites_need_pytest() -> None:
    package = Path(ludus.__file__).parent
    using = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"^\s*(import|from) pytest\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"testing/memory_contract.py", "testing/store_contract.py"} <= using
    assert [name for name in using if not re.fullmatch(r"testing/\w+_contract\.py", name)] == []
