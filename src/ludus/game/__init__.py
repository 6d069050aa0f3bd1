"""Clients for game programs: of actor and gamecore servers over HTTP. Needs only the standard library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludus.protocol.client import AsyncClient as AsyncClient
    from ludus.protocol.client import Client as Client
    from ludus.protocol.gamecore_client import GamecoreClient as GamecoreClient

_MODULES = {
    "AsyncClient": "ludus.protocol.client",
    "Client": "ludus.protocol.client",
    "GamecoreClient": "ludus.protocol.gamecore_client",
}

__all__ = ["AsyncClient", "Client", "GamecoreClient"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ludus.game' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
