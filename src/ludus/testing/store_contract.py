"""Contract suite for stores. A backend is correct if it passes:

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return MyStore(...)                    # empty

    def damage(self, store, key, name, data):  # behind the store's back
        ...
    def abandon(self, store, key, files):      # leave an unfinished write of a killed process
        ...
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ludus.errors import AlreadyExists, Damaged, Fenced, NotFound, StoreError, UsageError
from ludus.storage.base import MANIFEST, Store, make_manifest
from ludus.testing.background_call import Call

FILES: Mapping[str, bytes] = {"a.bin": bytes(range(256)) * 5, "b.json": b'{"n": 1}', "empty": b""}
WRITERS = 16
_WAIT_S = 60.0

ESCAPES = ["..", "../x", "a/../../x", "a/..", "/x", "/", "\\x", "a\\..\\x", "a\0b", "", ".", "./x", "a//b", "a/"]
"""Keys that refer to files outside of the store, or that systems interpret differently."""


class StoreContract:
    writers = WRITERS
    """Number of concurrent writers in a race; fewer for servers with slow locks."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("Override the fixture `store`: an empty store of the kind to be tested.")

    def damage(self, store: Store, key: str, name: str, data: bytes | None) -> None:
        """Without using the store, overwrite the file `name` of the bundle `key`, or remove it if `data` is None."""
        raise NotImplementedError("Override `damage`.")

    def abandon(self, store: Store, key: str, files: Mapping[str, bytes]) -> None:
        """Leave in the store what a writer leaves when it is killed just before the end of `put_bundle(key, files)`."""
        raise NotImplementedError("Override `abandon`.")

    def test_its_address_is_one_line_without_secrets(self, store: Store) -> None:
        assert store.url == store.url.strip() != ""
        assert "\n" not in store.url
        assert "@" not in store.url

    # -- single values

    def test_a_value_comes_back_as_it_was_put(self, store: Store) -> None:
        store.put("a/b/value", b"\x00\xff text \r\n")
        assert store.get("a/b/value") == b"\x00\xff text \r\n"

    def test_an_empty_value_is_a_value(self, store: Store) -> None:
        store.put("nothing", b"")
        assert store.get("nothing") == b""

    @pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
    def test_any_kind_of_bytes_can_be_put(self, store: Store, make: Callable[[bytes], Any]) -> None:
        store.put("value", make(b"same"))
        store.put_bundle("bundle", {"file": make(b"same")})
        assert store.get("value") == b"same"
        assert store.get_bundle("bundle") == {"file": b"same"}

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound, match="no-such-key"):
            store.get("no-such-key")
        with pytest.raises(NotFound, match="no-such-key"):
            store.get_bundle("a/no-such-key")

    def test_putting_again_replaces_the_whole_value(self, store: Store) -> None:
        store.put("value", b"a long first value")
        store.put("value", b"short")
        assert store.get("value") == b"short"

    def test_without_overwrite_the_first_value_stays(self, store: Store) -> None:
        store.put("value", b"first", overwrite=False)
        with pytest.raises(AlreadyExists, match="value"):
            store.put("value", b"second", overwrite=False)
        assert store.get("value") == b"first"

    def test_of_many_writers_without_overwrite_exactly_one_wins(self, store: Store) -> None:
        won = _race(self.writers, lambda i: store.put("race/prize", str(i).encode() * 1000, overwrite=False))
        assert len(won) == 1
        assert store.get("race/prize") == str(won[0]).encode() * 1000

    def test_readers_never_see_a_mixture_of_two_values(self, store: Store) -> None:
        values = [bytes([i]) * 20_000 for i in range(4)]
        store.put("value", values[0])
        seen: set[bytes] = set()

        def write_or_read(i: int) -> None:
            for turn in range(10):
                if i % 2:
                    seen.add(store.get("value"))
                else:
                    store.put("value", values[turn % len(values)])

        assert len(_race(self.writers, write_or_read)) == self.writers  # none failed
        assert seen
        assert seen <= set(values)

    def test_a_large_value_comes_back(self, store: Store) -> None:
        large = bytes(range(256)) * (1 << 16)  # 16 MB
        store.put("large", large)
        store.put_bundle("bundle", {"large": large})
        assert store.get("large") == large
        assert store.get_bundle("bundle")["large"] == large

    def test_many_keys_are_all_there_and_in_order(self, store: Store) -> None:
        names = [f"{i:04d}" for i in range(300)]
        for name in reversed(names):
            store.put(f"many/{name}", name.encode())
        assert store.list("many") == names
        assert all(store.get(f"many/{name}") == name.encode() for name in names)

    # -- bundles

    def test_a_bundle_comes_back_without_its_manifest(self, store: Store) -> None:
        store.put_bundle("checkpoints/000001", FILES)
        assert store.get_bundle("checkpoints/000001") == dict(FILES)

    def test_the_files_of_a_bundle_can_be_read_one_by_one(self, store: Store) -> None:
        store.put_bundle("checkpoints/000001", FILES)
        assert {name: store.get_file("checkpoints/000001", name) for name in FILES} == dict(FILES)

    def test_a_file_that_a_bundle_does_not_have_is_not_found(self, store: Store) -> None:
        store.put_bundle("bundle", FILES)
        store.put("value", b"1")
        with pytest.raises(NotFound, match="no-such-file"):
            store.get_file("bundle", "no-such-file")
        with pytest.raises(NotFound, match="no-such-bundle"):
            store.get_file("no-such-bundle", "a.bin")
        for outside in ("../value", "/value", "..", ""):
            with pytest.raises((NotFound, UsageError)):
                store.get_file("bundle", outside)

    def test_a_bundle_never_changes(self, store: Store) -> None:
        store.put_bundle("bundle", FILES)
        with pytest.raises(AlreadyExists, match="bundle"):
            store.put_bundle("bundle", {"a.bin": b"other"})
        assert store.get_bundle("bundle") == dict(FILES)

    def test_of_many_writers_of_a_bundle_exactly_one_wins(self, store: Store) -> None:
        won = _race(self.writers, lambda i: store.put_bundle("race/bundle", {"who": str(i).encode(), "data": bytes([i]) * 5000}))
        assert len(won) == 1
        assert store.get_bundle("race/bundle") == {"who": str(won[0]).encode(), "data": bytes([won[0]]) * 5000}
        assert store.list("race") == ["bundle"]

    @pytest.mark.parametrize("files", [{}, {MANIFEST: b"{}"}, {"a/b": b""}, {"..": b""}, {"": b""}, {"/x": b""}, {"a\\b": b""}])
    def test_a_bundle_with_impossible_files_is_refused_whole(self, store: Store, files: dict[str, bytes]) -> None:
        with pytest.raises(UsageError):
            store.put_bundle("bundle", {**files, **({"good": b"1"} if files else {})})
        assert store.list("") == []

    def test_a_write_that_fails_half_way_leaves_nothing(self, store: Store) -> None:
        with pytest.raises(TypeError):
            store.put_bundle("checkpoints/000001", {"a": b"1", "b": "not bytes"})  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            store.put("value", "not bytes")  # type: ignore[arg-type]
        assert "000001" not in store.list("checkpoints")
        assert "value" not in store.list("")
        with pytest.raises(NotFound):
            store.get_bundle("checkpoints/000001")

    def test_an_unfinished_bundle_does_not_exist(self, store: Store) -> None:
        store.put_bundle("checkpoints/000001", FILES)
        self.abandon(store, "checkpoints/000002", FILES)
        assert store.list("checkpoints") == ["000001"]
        with pytest.raises(StoreError):
            store.get_bundle("checkpoints/000002")

    def test_an_unfinished_bundle_does_not_stand_in_the_way_of_the_next_writer(self, store: Store) -> None:
        self.abandon(store, "checkpoints/000001", FILES)
        store.put_bundle("checkpoints/000001", {"again": b"1"})
        assert store.get_bundle("checkpoints/000001") == {"again": b"1"}
        assert store.list("checkpoints") == ["000001"]

    def test_the_guard_is_asked_once_when_nothing_can_be_seen_yet(self, store: Store) -> None:
        seen: list[list[str]] = []

        def guard() -> None:
            seen.append(store.list("checkpoints"))
            with pytest.raises(NotFound):
                store.get_bundle("checkpoints/000001")

        store.put_bundle("checkpoints/000001", FILES, guard=guard)
        assert seen == [[]]
        assert store.get_bundle("checkpoints/000001") == dict(FILES)

    def test_a_guard_that_refuses_leaves_nothing(self, store: Store) -> None:
        def guard() -> None:
            raise Fenced("Another process has taken this run over.")

        with pytest.raises(Fenced):
            store.put_bundle("checkpoints/000001", FILES, guard=guard)
        assert store.list("checkpoints") == []
        with pytest.raises(NotFound):
            store.get_bundle("checkpoints/000001")
        assert store.sweep("checkpoints") == 0
        store.put_bundle("checkpoints/000001", {"again": b"1"})
        assert store.get_bundle("checkpoints/000001") == {"again": b"1"}

    # -- sweeping

    def test_a_sweep_removes_what_is_unfinished_and_nothing_else(self, store: Store) -> None:
        store.put_bundle("checkpoints/000001", FILES)
        store.put("checkpoints/best.json", b"{}")
        store.put("checkpoints/deep/er", b"1")
        for key in ("checkpoints/000001", "checkpoints/000002", "checkpoints/000002"):  # also beside one that was written since
            self._abandon_beside(store, key)
        assert store.sweep("checkpoints") == 3
        assert store.sweep("checkpoints") == 0
        assert store.list("checkpoints") == ["000001", "best.json", "deep"]
        assert store.get_bundle("checkpoints/000001") == dict(FILES)
        assert store.get("checkpoints/best.json") == b"{}"
        assert store.get("checkpoints/deep/er") == b"1"

    def _abandon_beside(self, store: Store, key: str) -> None:
        """Also for a key with a bundle: this writer began before the bundle was complete."""
        finished = store.get_bundle(key) if key.rpartition("/")[2] in store.list(key.rpartition("/")[0]) else None
        if finished is not None:
            store.delete(key)
        self.abandon(store, key, FILES)
        if finished is not None:
            store.put_bundle(key, finished)

    def test_a_sweep_keeps_to_its_prefix(self, store: Store) -> None:
        self.abandon(store, "a/1", FILES)
        self.abandon(store, "ab/1", FILES)
        assert store.sweep("b") == 0
        assert store.sweep("a") == 1
        assert store.sweep("ab") == 1

    def test_there_is_nothing_to_sweep_where_all_went_well(self, store: Store) -> None:
        store.put("value", b"1")
        store.put_bundle("bundle", FILES)
        with pytest.raises(AlreadyExists):
            store.put_bundle("bundle", FILES)
        store.put_bundle("other", FILES)
        store.delete("other")
        assert store.sweep("") == 0
        assert store.sweep("no/such") == 0
        assert store.list("") == ["bundle", "value"]

    # -- damage

    @pytest.mark.parametrize("name", ["a.bin", "b.json", "empty"])
    def test_a_missing_file_is_noticed(self, store: Store, name: str) -> None:
        store.put_bundle("bundle", FILES)
        self.damage(store, "bundle", name, None)
        with pytest.raises(Damaged, match=name):
            store.get_bundle("bundle")
        with pytest.raises(Damaged, match=name):
            store.get_file("bundle", name)
        others = [other for other in FILES if other != name]
        assert [store.get_file("bundle", other) for other in others] == [FILES[other] for other in others]

    @pytest.mark.parametrize(
        "damaged",
        [
            pytest.param(b"\x01" + FILES["a.bin"][1:], id="one byte"),
            pytest.param(FILES["a.bin"][:-1], id="truncated"),
            pytest.param(b"", id="emptied"),
            pytest.param(FILES["a.bin"] + b"\0", id="longer"),
            pytest.param(bytes(len(FILES["a.bin"])), id="zeros"),
        ],
    )
    def test_a_changed_file_is_noticed(self, store: Store, damaged: bytes) -> None:
        store.put_bundle("bundle", FILES)
        self.damage(store, "bundle", "a.bin", damaged)
        with pytest.raises(Damaged, match=r"a\.bin"):
            store.get_bundle("bundle")
        with pytest.raises(Damaged, match=r"a\.bin"):
            store.get_file("bundle", "a.bin")

    @pytest.mark.parametrize(
        "manifest",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b"\xff\xfe", id="not text"),
            pytest.param(make_manifest(FILES)[:-20], id="truncated"),
            pytest.param(b"[]", id="a list"),
            pytest.param(b"{}", id="without files"),
            pytest.param(b'{"format": 1, "files": {}}', id="no files"),
            pytest.param(b'{"format": 1, "files": []}', id="files are a list"),
            pytest.param(b'{"format": 1, "files": {"a.bin": 3}}', id="an entry is a number"),
            pytest.param(b'{"format": 1, "files": {"a.bin": {"bytes": "many", "crc32": 0}}}', id="a size is a word"),
            pytest.param(b'{"format": 1, "files": {"a.bin": {"bytes": Infinity, "crc32": 0}}}', id="a size is infinite"),
            pytest.param(b'{"format": 1, "files": {"../secret": {"bytes": 0, "crc32": 0}}}', id="a file outside"),
            pytest.param(make_manifest({**FILES, "a.bin": b"other"}), id="another checksum"),
            pytest.param(make_manifest({**FILES, "more": b""}), id="one file more"),
        ],
    )
    def test_a_changed_manifest_is_noticed(self, store: Store, manifest: bytes) -> None:
        store.put_bundle("bundle", FILES)
        self.damage(store, "bundle", MANIFEST, manifest)
        with pytest.raises(Damaged):
            store.get_bundle("bundle")

    def test_a_bundle_without_its_manifest_is_damaged_or_does_not_exist(self, store: Store) -> None:
        store.put_bundle("bundle", FILES)
        self.damage(store, "bundle", MANIFEST, None)
        with pytest.raises((Damaged, NotFound)):
            store.get_bundle("bundle")
        with pytest.raises((Damaged, NotFound)):
            store.get_file("bundle", "a.bin")

    def test_damage_to_one_bundle_leaves_the_others_readable(self, store: Store) -> None:
        store.put_bundle("checkpoints/000001", FILES)
        store.put_bundle("checkpoints/000002", FILES)
        self.damage(store, "checkpoints/000002", "a.bin", b"")
        assert store.list("checkpoints") == ["000001", "000002"]  # damage shows when a bundle is read, not before
        assert store.get_bundle("checkpoints/000001") == dict(FILES)

    # -- listing and deleting

    def test_a_list_names_what_is_directly_below_in_order(self, store: Store) -> None:
        store.put("b/file", b"")
        store.put_bundle("b/bundle", FILES)
        store.put("b/deep/er/file", b"")
        store.put("b2", b"")
        store.put("B", b"")
        assert store.list("b") == ["bundle", "deep", "file"]
        assert store.list("") == ["B", "b", "b2"]

    def test_a_list_of_nothing_is_empty(self, store: Store) -> None:
        assert store.list("") == []
        assert store.list("no/such") == []

    def test_deleted_is_gone_and_may_be_put_again(self, store: Store) -> None:
        store.put("a/value", b"1")
        store.put_bundle("a/bundle", FILES)
        store.delete("a/value")
        store.delete("a/bundle")
        assert store.list("a") == []
        with pytest.raises(NotFound):
            store.get("a/value")
        with pytest.raises(NotFound):
            store.get_bundle("a/bundle")
        store.put_bundle("a/bundle", {"again": b"1"})
        assert store.get_bundle("a/bundle") == {"again": b"1"}

    def test_deleting_what_is_not_there_does_nothing(self, store: Store) -> None:
        store.put("value", b"1")
        for _ in range(2):
            store.delete("a/no-such-key")
        store.delete("valu")
        assert store.get("value") == b"1"

    def test_deleting_one_leaves_its_neighbours(self, store: Store) -> None:
        for key in ("a/1", "a/10", "a/1x"):
            store.put_bundle(key, {"name": key.encode()})
        store.delete("a/1")
        assert store.list("a") == ["10", "1x"]
        assert store.get_bundle("a/10") == {"name": b"a/10"}

    def test_many_may_delete_the_same(self, store: Store) -> None:
        store.put_bundle("bundle", FILES)
        assert len(_race(self.writers, lambda i: store.delete("bundle"))) == self.writers
        assert store.list("") == []

    # -- keys

    @pytest.mark.parametrize("key", ESCAPES)
    def test_a_key_cannot_leave_the_store(self, store: Store, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b"x"),
            lambda: store.put(key, b"x", overwrite=False),
            lambda: store.get(key),
            lambda: store.put_bundle(key, {"file": b"x"}),
            lambda: store.get_bundle(key),
            lambda: store.get_file(key, "file"),
            lambda: store.delete(key),
        ]
        if key:  # the empty prefix is the whole store
            calls.extend((lambda: store.list(key), lambda: store.sweep(key)))
        store.put("kept", b"1")
        for call in calls:
            with pytest.raises(UsageError, match="key"):
                call()
        assert store.list("") == ["kept"]

    @pytest.mark.parametrize("key", ["a b", "ü/日本", "a..b", "-x", "%2e%2e", "a.", "#?&"])
    def test_unusual_keys_are_just_names(self, store: Store, key: str) -> None:
        store.put(f"keys/{key}", key.encode())
        assert store.get(f"keys/{key}") == key.encode()

    def test_a_name_too_long_for_the_backend_is_a_store_error(self, store: Store) -> None:
        key = "x" * 5000
        writes: list[Callable[[], None]] = [lambda: store.put(key, b"1"), lambda: store.put_bundle(key, {"file": b"1"})]
        for write in writes:
            try:
                write()
            except StoreError:
                continue
            assert store.list("") == [key]  # this backend takes it
            store.delete(key)


def _race(writers: int, act: Callable[[int], None]) -> list[int]:
    """Run many threads at once; return the numbers of those without AlreadyExists. Other errors are raised."""
    ready = threading.Barrier(writers)

    def run(number: int) -> bool:
        ready.wait(_WAIT_S)
        try:
            act(number)
        except AlreadyExists:
            return False
        return True

    calls = [Call(functools.partial(run, number)) for number in range(writers)]
    return [number for number, call in enumerate(calls) if call.result()]
