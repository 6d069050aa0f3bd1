"""A store of a kind of its own: boxes are directories that are named by `box://NAME/prefix`, and may be out of reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ludus.errors import StoreUnavailable
from ludus.storage.base import Bytes, WriteGuard
from ludus.storage.local import LocalStore

BOXES = "TEST_BOXES"
AWAY = ".away"


class Box(LocalStore):
    """For tests that need a run elsewhere, and no server: it is a `LocalStore` that is reached by a URL."""

    def __init__(self, url: str) -> None:
        boxes = Path(os.environ[BOXES])
        super().__init__(boxes / url.partition("://")[2].partition("?")[0])
        self._url, self._away = url, boxes / AWAY

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        self._reach()
        super().put(key, data, overwrite=overwrite)

    def get(self, key: str) -> bytes:
        self._reach()
        return super().get(key)

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        self._reach()
        super().put_bundle(key, files, guard=guard)

    def get_bundle(self, key: str) -> dict[str, bytes]:
        self._reach()
        return super().get_bundle(key)

    def get_file(self, key: str, name: str) -> bytes:
        self._reach()
        return super().get_file(key, name)

    def list(self, prefix: str) -> list[str]:
        self._reach()
        return super().list(prefix)

    def _reach(self) -> None:
        if self._away.exists():
            raise StoreUnavailable(f"{self._url} cannot be reached.", "Wait until it can.")
