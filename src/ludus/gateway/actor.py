"""The actor: the user's class that hosts one session of a game, in training and in production."""

from __future__ import annotations

from typing import Any

from ludus.protocol.spec import DEFAULT_OPTIONS, StartOptions


class Actor:
    """Hosts one session: created at `start`, dropped after `end`. Requests and replies are bytes whose format you define.

        class Bot(ludus.Actor):
            def __init__(self, model: str) -> None:
                self.model = ludus.RemoteModel(name=model)

            async def tick(self, body: bytes) -> bytes:
                return (await self.model.forward(features(body))).tobytes()

    `async def` methods and the constructor run on the event loop and must not block it. Plain methods run in a bounded thread
    pool, so slow work belongs into a plain `start`. A session gets one call at a time. An exception ends this session only; a
    `ludus.Refused` from `tick` leaves it open.
    """

    ended_by: str = "game"
    """Why the session ends, set before `end`: game (it sent `end`), silent, timeout, failed or shutdown. Only "game" has a body."""

    match: str = ""
    """The match id that the game sent with `start`; sessions of one match share it. Set before `start`."""

    about: StartOptions = DEFAULT_OPTIONS
    """Further headers of `start` (model, version, temperature). Set before `start`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def start(self, session: str, body: bytes) -> bytes:
        return b""

    async def tick(self, body: bytes) -> bytes:
        raise NotImplementedError(f"{type(self).__name__} has no tick(body).")

    async def end(self, body: bytes) -> bytes:
        return b""
