"""The gamecore client under the name that earlier releases documented; `ludus.protocol.gamecore_client` has the code."""

from ludus.protocol.gamecore_client import GamecoreClient

__all__ = ["GamecoreClient"]
