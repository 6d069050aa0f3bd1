"""The ViZDoom process of one player, which hosts or joins a duel and is advanced tic by tic."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ludus.envs.vizdoom import SCREEN, Bytes, Nearest, unlink_shared, write_launcher
from ludus.errors import WorkerFailed

TICS_PER_S: Final = 35
SIDE: Final = 84

_STILL, _LEFT, _RIGHT = (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)
PRESSES: Final = tuple([*move, fire] for fire in (0.0, 1.0) for move in (_STILL, _LEFT, _RIGHT))
"""Button states by action: nothing, left, right; the same while firing. The scenario has no turning."""
NOTHING: Final = 0
STATUS: Final = (
    "HEALTH", "SELECTED_WEAPON_AMMO", "ATTACK_READY", "POSITION_X", "POSITION_Y", "VELOCITY_X", "VELOCITY_Y", "ANGLE",
)  # fmt: skip
"""Variables of ViZDoom."""

_HOST = "-host 2 -port {port} -netmode 0 -deathmatch +sv_forcerespawn 1 +sv_noautoaim 1 +sv_spawnfarthest 1"
_JOIN = "-join 127.0.0.1 -port {port}"
_PICK = Nearest(SIDE, SIDE)


@dataclass(frozen=True)
class PlayerView:
    """View of one player between two tics."""

    screen: Bytes
    """[84, 84, 1]."""
    frags: tuple[int, int]
    """Frags of both camps, as this engine counts them."""
    dead: bool
    enemy: float | None
    """Horizontal position of the enemy on the screen, from −1 (left) to 1; None: not visible or not located."""
    rockets: tuple[tuple[float, float], ...] = ()
    """(horizontal position as of `enemy`, width as a share of the screen) of visible rockets, the widest first, if they are located."""
    status: tuple[float, ...] = ()
    """Values of `STATUS`, if objects are located."""
    damage: int = 0
    """Damage that this player has dealt since the match began."""


class DoomEngine:
    """Calls block until both engines make the same call: use one thread for each.

    Every method raises WorkerFailed when the engine has ended.
    """

    def __init__(self, camp: int, port: int, directory: Path, seed: int, *, locate_enemy: bool, log: Path | None = None) -> None:
        """`locate_enemy`: views name the enemy, rockets and the status. `log`: file for the output of the engine, which then runs in the
        directory of that file."""
        import vizdoom

        self._log = log
        self._camp, self._directory, self._locate_enemy = camp, directory, locate_enemy
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
        game.set_labels_buffer_enabled(locate_enemy)
        game.set_seed(seed % (1 << 32))
        game.add_game_args((_JOIN if camp else _HOST).format(port=port))
        game.add_game_args(f"+name camp{camp} +colorset {camp}")
        self._frags = vizdoom.GameVariable.PLAYER1_FRAGCOUNT, vizdoom.GameVariable.PLAYER2_FRAGCOUNT
        self._damage = vizdoom.GameVariable.DAMAGECOUNT
        self._status = [getattr(vizdoom.GameVariable, name) for name in STATUS]
        self.screen: Bytes = np.zeros((*SCREEN, 1), np.uint8)
        """The last whole screen."""

    def prepare(self) -> None:
        """Write the launcher; call for both engines before either is started. A file open for writing while another thread starts a
        process cannot be executed, and ViZDoom crashes when its engine cannot be started."""
        self._directory.mkdir(parents=True, exist_ok=True)
        home = Path() if self._log is None else self._log.parent
        (home / "_vizdoom").mkdir(mode=0o700, exist_ok=True)  # ViZDoom fails if two engines create it at once
        self._arguments.unlink(missing_ok=True)
        self._game.set_doom_config_path(str(self._directory / "engine.ini"))
        self._game.set_vizdoom_path(str(write_launcher(self._directory / "engine", self._arguments, self._log)))

    def start(self) -> None:
        """Start the engine and wait for the other player, at most a minute."""
        try:
            self._game.init()
        except self._failed as error:
            raise self._failure("did not start", error) from error
        finally:
            self.unlink_shared_memory()

    def unlink_shared_memory(self) -> None:
        """Unlink the shared memory, so that it is freed with its processes. Thread-safe."""
        if self._arguments.exists():
            unlink_shared(self._arguments.read_text(encoding="utf-8").splitlines())

    def look(self) -> PlayerView:
        state, value = self._game.get_state(), self._game.get_game_variable
        enemy: float | None = None
        rockets: tuple[tuple[float, float], ...] = ()
        status: tuple[float, ...] = ()
        if state is not None:
            self.screen = state.screen_buffer[..., None]
            if self._locate_enemy:
                # The own weapon and body have the category `Self`, corpses `Gore`.
                players = [label for label in state.labels or () if label.object_category == "Player"]
                enemy = _position(players[0]) if players else None
                found = [
                    (_position(label), label.width / SCREEN[1]) for label in state.labels or () if label.object_name == "Rocket"
                ]
                rockets = tuple(sorted(found, key=lambda rocket: -rocket[1]))
        if self._locate_enemy:
            status = tuple(float(value(of)) for of in self._status)
        first, second = (int(value(of)) for of in self._frags)
        damage = int(value(self._damage))
        return PlayerView(_PICK(self.screen), (first, second), self._game.is_player_dead(), enemy, rockets, status, damage)

    def restart(self, seed: int) -> None:
        """Start the match anew, with all scores at 0."""
        try:
            self._game.set_seed(seed % (1 << 32))
            self._game.new_episode()
        except self._failed as error:
            raise self._failure("did not start a match", error) from error

    def press(self, action: int) -> None:
        self._game.set_action(PRESSES[action])

    def advance(self, *, show: bool) -> None:
        """Advance one tic. `show`: update the screen for `look`."""
        try:
            self._game.advance_action(1, show)
        except self._failed as error:
            raise self._failure("ended", error) from error

    def close(self) -> None:
        with suppress(*self._failed):
            self._game.close()

    def _failure(self, what: str, error: Exception) -> WorkerFailed:
        reason = str(error).rstrip(".")
        return WorkerFailed(f"The Doom engine of camp {self._camp} {what}: {reason}.", "See its output above.")


def _position(label: Any) -> float:
    """Horizontal position of an object on the screen, from −1 (left) to 1."""
    return float((label.x + label.width / 2) * 2 / SCREEN[1] - 1)
