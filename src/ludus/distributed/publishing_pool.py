"""A model pool whose new versions are also sent to the processes that act with them."""

from __future__ import annotations

from collections.abc import Callable

from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore


class PublishingPool:
    """Wraps the pool of a run. `send` is called with each published model and version, in the trainer's thread."""

    def __init__(self, pool: LocalVersionStore, send: Callable[[str, int], None]) -> None:
        self._pool, self._send = pool, send

    def newest(self, name: str) -> tuple[Policy, int]:
        return self._pool.newest(name)

    def publish(self, name: str) -> int:
        version = self._pool.publish(name)
        self._send(name, version)
        return version
