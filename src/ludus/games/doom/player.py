"""Players of a camp of the duel: an actor over HTTP, or a bot."""

from __future__ import annotations

import abc
import random
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ludus.errors import EnvironmentFault, LudusError
from ludus.games.doom.engine import NOTHING, PRESSES, PlayerView
from ludus.games.doom.launch_spec import ActorAddress
from ludus.protocol.client import Client
from ludus.protocol.codec import decode, encode

RETRIES = 2
_AIM_TOLERANCE = 0.04
"""Distance from the middle of the screen at which a rocket still hits, by its blast radius."""
_DODGE_SHARE = 0.3
"""Share of decisions with a visible enemy that dodge instead of aim."""
_LEFT, _RIGHT, _FIRE = 1, 2, 3


class DuelPlayer(abc.ABC):
    """Plays one camp; used by one thread."""

    kind: str

    @abc.abstractmethod
    def act(self, view: PlayerView, reward: float) -> int:
        """Return an action. `reward`: change since the previous action."""

    def begin(self) -> None:  # noqa: B027 - optional
        """Get ready before the engine starts."""

    def end(self, reward: float) -> None:  # noqa: B027 - optional
        """End after a completed match."""

    def leave(self) -> None:  # noqa: B027 - optional
        """End an incomplete match, also after an error. Does not raise LudusError."""


class ActorPlayer(DuelPlayer):
    """Requests actions from the actor of its camp. Raises EnvironmentFault that names the actor."""

    kind = "actor"

    def __init__(self, number: int, camp: ActorAddress, match: str, *, eval_mode: bool = False) -> None:
        self._number, self._camp, self._match = number, camp, match
        self._about = {"game": "doom", "camp": number, "eval_mode": eval_mode}
        self._client = Client(camp.url, camp.token, camp.timeout_s, RETRIES)
        # Unique: after a crash the same match may run again while the actor still has the old session.
        self._session = f"{match}.{number}.{uuid.uuid4().hex[:12]}"
        self._open = False

    def begin(self) -> None:
        about = encode(self._about, "msgpack")
        self._request(lambda: self._client.start(self._session, about, self._match, side=str(self._number)))
        self._open = True

    def act(self, view: PlayerView, reward: float) -> int:
        body = encode({"observation": view.screen.tobytes(), "reward": reward}, "msgpack")
        reply = self._request(lambda: self._client.tick(self._session, body))
        try:
            action: Any = decode(reply)["action"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._invalid_reply(reply) from error
        if isinstance(action, bool) or not isinstance(action, int) or not 0 <= action < len(PRESSES):
            raise self._invalid_reply(reply)
        return action

    def end(self, reward: float) -> None:
        body = encode({"reward": reward, "terminated": True}, "msgpack")
        self._request(lambda: self._client.end(self._session, body))
        self._open = False
        self._client.close()

    def leave(self) -> None:
        if self._open:
            self._open = False
            with suppress(LudusError):  # the actor may have failed; it expires sessions without an end
                self._client.end(self._session)
        self._client.close()

    def _request(self, ask: Callable[[], bytes]) -> bytes:
        try:
            return ask()
        except LudusError as error:
            raise EnvironmentFault(
                f"The actor of camp {self._number} at {self._camp.url} failed: {error.message}", error.hint
            ) from error

    def _invalid_reply(self, reply: bytes) -> EnvironmentFault:
        return EnvironmentFault(
            f"The actor of camp {self._number} at {self._camp.url} answered {reply[:60]!r}.",
            f'An action is a msgpack map {{"action": 0 … {len(PRESSES) - 1}}}.',
        )


class BotPlayer(DuelPlayer):
    """Moves in front of the enemy and fires; dodges at random."""

    kind = "script"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a game
        self._direction, self._steps_left = _LEFT, 0

    def act(self, view: PlayerView, reward: float) -> int:
        if self._steps_left > 0:
            self._steps_left -= 1
            return self._direction
        if view.enemy is None or self._random.random() < _DODGE_SHARE:
            self._direction, self._steps_left = self._random.choice((_LEFT, _RIGHT)), self._random.randrange(1, 6)
            return self._direction
        if abs(view.enemy) < _AIM_TOLERANCE:
            return NOTHING + _FIRE
        return (_RIGHT if view.enemy > 0 else _LEFT) + (_FIRE if abs(view.enemy) < 2 * _AIM_TOLERANCE else 0)
