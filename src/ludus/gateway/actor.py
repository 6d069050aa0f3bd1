"""The actor: your class that hosts one session of a game. The same class trains and serves."""

from __future__ import annotations

from typing import Any

from ludus.protocol.spec import NOTHING_ASKED, About


class Actor:
    """One object per session: made at `start`, dropped after `end`. Bytes in, bytes out; what they mean is yours.

        class Bot(ludus.Actor):
            def __init__(self, model: str) -> None:
                self.model = ludus.RemoteModel(name=model)

            async def tick(self, body: bytes) -> bytes:
                return (await self.model.forward(features(body))).tobytes()

    `async def` methods and the constructor run on the event loop and must not block it; plain methods run in a bounded pool of
    threads: what takes long belongs into a plain `start`. Within a
    session one call is made at a time. An exception ends this session alone; a `ludus.Refused` from `tick` leaves it open.
    """

    ended_by: str = "game"
    """Set before `end` is called: game (it said so), silent, timeout, failed or shutdown. Only "game" brings a body."""

    match: str = ""
    """The match id that the game sent with `start`, set before `start` is called: sessions of one match share it."""

    about: About = NOTHING_ASKED
    """What else the headers of `start` asked for (model, version, temperature), set before `start` is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def start(self, session: str, body: bytes) -> bytes:
        return b""

    async def tick(self, body: bytes) -> bytes:
        raise NotImplementedError(f"{type(self).__name__} has no tick(body).")

    async def end(self, body: bytes) -> bytes:
        return b""
