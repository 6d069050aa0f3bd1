"""Games: those that we call, and those that call us. `from ludus.game import GamecoreClient` brings nothing else with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.protocol.client import AsyncClient as AsyncClient
    from ludus.protocol.client import Client as Client
    from ludus.protocol.gamecore_client import GamecoreClient as GamecoreClient

_WHERE = {
    "AsyncClient": "ludus.protocol.client",
    "Client": "ludus.protocol.client",
    "GamecoreClient": "ludus.protocol.gamecore_client",
}

__all__ = ["AsyncClient", "Client", "GamecoreClient"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ludus.game' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
