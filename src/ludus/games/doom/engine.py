"""One player's engine: a ViZDoom process that hosts a duel or joins one, and is advanced tic by tic."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ludus.envs.vizdoom import SCREEN, Bytes, Nearest, unlink_shared, write_launcher
from ludus.errors import WorkerFailed

TICS_PER_S: Final = 35
SIDE: Final = 84

_STILL, _LEFT, _RIGHT = (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)
PRESSES: Final = tuple([*move, fire] for fire in (0.0, 1.0) for move in (_STILL, _LEFT, _RIGHT))
"""By action: nothing, left, right; the same while firing. The three buttons are those of the scenario, which has no turning."""
NOTHING: Final = 0

_HOST = "-host 2 -port {port} -netmode 0 -deathmatch +sv_forcerespawn 1 +sv_noautoaim 1 +sv_spawnfarthest 1"
_JOIN = "-join 127.0.0.1 -port {port}"
_PICK = Nearest(SIDE, SIDE)


@dataclass(frozen=True)
class PlayerView:
    """What one player sees between two tics."""

    screen: Bytes
    """[84, 84, 1]."""
    frags: tuple[int, int]
    """Of both camps, as this engine counts them."""
    dead: bool
    enemy: float | None
    """Where the other player stands in the picture, from −1 (left) to 1; None: not in sight, or not looked for."""


class DoomEngine:
    """Its calls block: both engines have to be advanced at the same time, by threads of their own.

    Every method raises WorkerFailed when the engine is gone.
    """

    def __init__(self, camp: int, port: int, directory: Path, seed: int, *, look_for_enemy: bool) -> None:
        import vizdoom

        self._camp, self._directory, self._look_for_enemy = camp, directory, look_for_enemy
        self._arguments = directory / "arguments"
        self._failed: tuple[type[Exception], ...] = (
            vizdoom.ViZDoomUnexpectedExitException,
            vizdoom.ViZDoomErrorException,
            vizdoom.ViZDoomIsNotRunningException,
            vizdoom.MessageQueueException,
            vizdoom.SharedMemoryException,
        )
        game = self._game = vizdoom.DoomGame()
        game.load_config(str(Path(vizdoom.scenarios_path) / "multi_duel.cfg"))
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.GRAY8)
        game.set_labels_buffer_enabled(look_for_enemy)
        game.set_seed(seed % (1 << 32))
        game.add_game_args((_JOIN if camp else _HOST).format(port=port))
        game.add_game_args(f"+name camp{camp} +colorset {camp}")
        self._frags = vizdoom.GameVariable.PLAYER1_FRAGCOUNT, vizdoom.GameVariable.PLAYER2_FRAGCOUNT
        self._screen: Bytes = np.zeros((SIDE, SIDE, 1), np.uint8)

    def prepare(self) -> None:
        """Write what it is started with: of both engines before either is started. A file that is open for writing at the moment
        in which another thread starts a process cannot be executed, and ViZDoom crashes when its engine cannot be started."""
        self._directory.mkdir(parents=True, exist_ok=True)
        Path("_vizdoom").mkdir(mode=0o700, exist_ok=True)  # of two engines that both make it one would fail
        self._arguments.unlink(missing_ok=True)
        self._game.set_doom_config_path(str(self._directory / "engine.ini"))
        self._game.set_vizdoom_path(str(write_launcher(self._directory / "engine", self._arguments)))

    def start(self) -> None:
        """Returns when both players are in the game, or it is given up: after a minute."""
        try:
            self._game.init()
        except self._failed as error:
            raise self._failure("did not start", error) from error
        finally:
            self.unlink_shared_memory()

    def unlink_shared_memory(self) -> None:
        """Of the memory that it shares with its engine: so it goes away with them. Also from another thread."""
        if self._arguments.exists():
            unlink_shared(self._arguments.read_text(encoding="utf-8").splitlines())

    def look(self) -> PlayerView:
        state = self._game.get_state()
        enemy = None
        if state is not None:
            self._screen = _PICK(state.screen_buffer[..., None])
            if self._look_for_enemy:
                # Its own weapon and body are labelled too, as `Self`; who was shot, as `Gore`.
                found = [label for label in state.labels or () if label.object_category == "Player"]
                enemy = (found[0].x + found[0].width / 2) * 2 / SCREEN[1] - 1 if found else None
        first, second = (int(self._game.get_game_variable(of)) for of in self._frags)
        return PlayerView(self._screen, (first, second), self._game.is_player_dead(), enemy)

    def press(self, action: int) -> None:
        self._game.set_action(PRESSES[action])

    def advance(self, *, show: bool) -> None:
        """One tic. `show`: the next `look` is to see it."""
        try:
            self._game.advance_action(1, show)
        except self._failed as error:
            raise self._failure("is gone", error) from error

    def close(self) -> None:
        with suppress(*self._failed):
            self._game.close()

    def _failure(self, what: str, error: Exception) -> WorkerFailed:
        said = str(error).rstrip(".")
        return WorkerFailed(f"The Doom engine of camp {self._camp} {what}: {said}.", "Its own words, if any, stand before this.")


def reserve_port() -> tuple[int, socket.socket]:
    """A UDP port that is free now, and what keeps other duels of this machine off it while it is open.

    They would not fail: a player would join the wrong one. The port is free on every interface, for the engine cannot be told to
    listen on one of them.
    """
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
            bound.bind(("", 0))
            port = int(bound.getsockname()[1])
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ludus-doom-{port}")  # a name without a file: it is gone with us, however we end
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port, claim
