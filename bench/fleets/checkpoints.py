"""How long a checkpoint takes to be kept, and to be had again: by our stores, and by the plainest way to the same place.

A checkpoint is a bundle of weights, the optimizer's moments (twice their size) and a little state, of random bytes. It is saved
under a new name each time and restored in full, checked against its manifest. From the shared mount it is restored through another
mount than the one it was written through, as another machine would: nothing of it is in that one's cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.fleets import services
from bench.fleets.services import Missing, Seaweed
from bench.train import Row
from ludus.storage.base import Store, open_store
from ludus.storage.local import LocalStore

MB = 1_000_000
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Place:
    """`save` under a name; `restore` it, in full."""

    save: Callable[[str, Files], None]
    restore: Callable[[str], Mapping[str, bytes]]
    forget: Callable[[str], None]
    about: str


def make(megabytes: int, seed: int = 0) -> Files:
    rng, third = np.random.default_rng(seed), megabytes * MB // 3
    return {"weights.safetensors": rng.bytes(third), "optimizer.safetensors": rng.bytes(2 * third), "state.json": rng.bytes(1000)}


@contextlib.contextmanager
def places() -> Iterator[dict[str, Place | str]]:
    """By name; or the reason why there is none."""
    with contextlib.ExitStack() as stack:
        services.BUILD.mkdir(exist_ok=True)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoints-", dir=services.BUILD)))
        found: dict[str, Place | str] = {
            "local disk": _ours(LocalStore(directory / "store"), None, "LocalStore, restored from the page cache"),
            "local disk, plain": _plain(directory / "plain", directory / "plain", "files written, synced and read; no checksum"),
        }
        names = ("shared mount", "shared mount, plain", "S3", "S3, plain")
        try:
            server = stack.enter_context(services.seaweed())
        except Missing as missing:
            return (yield found | dict.fromkeys(names, str(missing)))
        os.environ |= server.environment
        try:
            here, there = (stack.enter_context(services.mounted(server, directory / name)) for name in ("here", "there"))
            found["shared mount"] = _ours(
                LocalStore(here / "store"), LocalStore(there / "store"), "LocalStore on `weed mount` (FUSE)"
            )
            found["shared mount, plain"] = _plain(here / "plain", there / "plain", "files written, synced and read; no checksum")
        except Missing as missing:
            found |= dict.fromkeys(names[:2], str(missing))
        store = open_store(server.url("ours"))
        found["S3"] = _ours(store, store, "S3Store on SeaweedFS of this machine")
        found["S3, plain"] = _objects(server, "the same objects by obstore alone, one after the other; no manifest, no checksum")
        yield found


def _ours(store: Store, other: Store | None, about: str) -> Place:
    return Place(store.put_bundle, (other or store).get_bundle, store.delete, about)


def _plain(here: Path, there: Path, about: str) -> Place:
    def save(name: str, files: Files) -> None:
        (here / name).mkdir(parents=True)
        for file, data in files.items():
            with open(here / name / file, "wb") as target:
                target.write(data)
                target.flush()
                os.fsync(target.fileno())

    def restore(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (there / name).iterdir()}

    return Place(save, restore, lambda name: shutil.rmtree(here / name), about)


def _objects(server: Seaweed, about: str) -> Place:
    import obstore

    client = services.bucket(server)
    names = tuple(make(0))

    def save(name: str, files: Files) -> None:
        for file, data in files.items():
            obstore.put(client, f"plain/{name}/{file}", data)

    def restore(name: str) -> dict[str, bytes]:
        return {file: bytes(obstore.get(client, f"plain/{name}/{file}").bytes()) for file in names}

    return Place(save, restore, lambda name: obstore.delete(client, [f"plain/{name}/{file}" for file in names]), about)


def measured(place: Place, name: str, files: Files) -> Row:
    """Saved, restored and removed once. What came back is compared, outside of the time."""
    size = sum(map(len, files.values()))
    cpu, began = time.process_time(), time.perf_counter()
    place.save(name, files)
    saved, saved_cpu = time.perf_counter() - began, time.process_time() - cpu
    cpu, began = time.process_time(), time.perf_counter()
    back = place.restore(name)
    restored, restored_cpu = time.perf_counter() - began, time.process_time() - cpu
    if dict(back) != dict(files):
        raise AssertionError(f"{name} came back as something else")
    place.forget(name)
    return {
        "save_s": saved,
        "restore_s": restored,
        "save_mb_per_s": size / saved / MB,
        "restore_mb_per_s": size / restored / MB,
        "save_cpu_s": saved_cpu,
        "restore_cpu_s": restored_cpu,
    }
