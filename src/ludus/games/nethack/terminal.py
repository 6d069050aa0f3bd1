"""A game of NetHack in this process, driven by keys: prompts are answered or declined, so that every command leaves the map in view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ludus.core import plugins
from ludus.errors import EnvironmentFault

ESCAPE: Final = 27
_SPACE: Final = 32
_KEYS: Final = ("glyphs", "blstats", "message", "misc", "program_state", "inv_letters", "inv_oclasses", "tty_chars", "tty_colors")
_PROMPTS: Final = 200
"""Prompts of one command; more are a loop."""
_IN_GAME: Final = 3
"""Field of `program_state`: the main loop has begun."""

Answers = Mapping[bytes, int]
"""Text of a question → key that answers it."""


class Terminal:
    """Arrays are those of the game and change with every key. Close it after use."""

    def __init__(self, character: str) -> None:
        """Raises MissingExtra."""
        plugins.require("nle", "nethack", "NetHack")
        from nle import nethack

        options = [option for option in nethack.NETHACKOPTIONS if not option.startswith("pickup_types")]
        self._game: Any = nethack.Nethack(
            observation_keys=_KEYS,
            playername=f"Agent-{character}",
            ttyrec=None,
            options=[*options, "pickup_types:$", "!tombstone"],
            fix_moon_phase=True,
        )
        buffers = self._game._obs_buffers
        self.glyphs: npt.NDArray[np.int16] = buffers["glyphs"]
        self.status: npt.NDArray[np.int64] = buffers["blstats"]
        self.item_letters: npt.NDArray[np.uint8] = buffers["inv_letters"]
        self.item_classes: npt.NDArray[np.uint8] = buffers["inv_oclasses"]
        self.screen: npt.NDArray[np.uint8] = buffers["tty_chars"]
        self.colors: npt.NDArray[np.int8] = buffers["tty_colors"]
        self._message: npt.NDArray[np.uint8] = buffers["message"]
        self._prompt: npt.NDArray[np.int32] = buffers["misc"]
        self._state: npt.NDArray[np.int32] = buffers["program_state"]
        self.over = True

    def start(self, core_seed: int, display_seed: int) -> None:
        """Start a game. Raises EnvironmentFault."""
        self._game.set_initial_seeds(core_seed, display_seed, False, None)
        self._game.reset()
        self.over = False
        for _ in range(_PROMPTS):
            if self._state[_IN_GAME]:
                return
            self._press(_SPACE)
        raise EnvironmentFault("NetHack does not begin its game.", "Try another seed.")

    def send(self, keys: tuple[int, ...], answers: Answers | None = None) -> bytes:
        """Press keys and answer the questions that follow; any other is declined. Returns all messages. Raises EnvironmentFault."""
        messages = []
        for key in keys:
            if not self.over:
                self._press(key)
        for _ in range(_PROMPTS):
            messages.append(self._message.tobytes().rstrip(b"\0"))
            reply = self._reply(messages[-1], answers or {})
            if self.over or reply is None:
                return b" ".join(messages)
            self._press(reply)
        raise EnvironmentFault(f"NetHack still asks after {_PROMPTS} answers: {messages[-1]!r}.")

    def _reply(self, message: bytes, answers: Answers) -> int | None:
        """The key that answers what the game waits for; None: it waits for a command."""
        asks_choice, asks_line, waits = self._prompt
        if waits:
            return _SPACE
        if asks_choice:
            return next((key for question, key in answers.items() if question in message), ESCAPE)
        return ESCAPE if asks_line else None

    def _press(self, key: int) -> None:
        _, self.over = self._game.step(key)

    def close(self) -> None:
        self._game.close()


def check_character(character: str) -> None:
    """Check a character such as `mon-hum-neu-mal`. Raises EnvironmentFault."""
    if len(character.split("-")) != 4:
        raise EnvironmentFault(
            f"{character!r} is not a character of NetHack.", "Use role-race-alignment-gender: mon-hum-neu-mal."
        )
