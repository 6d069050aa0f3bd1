"""The clients under the name that earlier releases documented; `ludus.protocol.client` has the code."""

from ludus.protocol.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
