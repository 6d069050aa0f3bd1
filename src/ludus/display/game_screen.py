"""The screen of one game process that Ludus starts, and the OpenGL that a player with graphics finds there.

with GameScreen(window=True) as screen:
    screen.check_opengl("my_game.x86_64")
    subprocess.run([game], env=screen.environment(os.environ))
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ludus.display import headless, private_screen, x11
from ludus.display.opengl_probe import OpenGL, probe_backend
from ludus.display.private_screen import APT_XVFB, SIZE, PrivateScreen
from ludus.display.screen_grab import Picture, ScreenGrab
from ludus.errors import ConfigError, UsageError
from ludus.process.screen_choice import AUTO, EGL, NONE, SCREEN, screen_choice

log = logging.getLogger(__name__)

MIN_OPENGL = (3, 2)
"""Version of the core profile that Unity players, and most engines of today, need to draw."""


class GameScreen:
    """What `config.display` and LUDUS_SCREEN give to a game: the display of DISPLAY, a private one, or none.

    `window`: the game opens a window, which `egl` has no place for. `recorded`: its frames are read, which is done from private displays
    only. Raises ConfigError, MissingExtra, WorkerFailed. A context manager.
    """

    def __init__(
        self,
        *,
        window: bool = False,
        recorded: bool = False,
        choice: str = "",
        size: str = SIZE,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self.choice = screen_choice({SCREEN: choice} if choice else self._environ)
        if (recorded and self.choice in (EGL, NONE)) or (window and self.choice == EGL):
            what = "a game is recorded from its screen" if recorded else "a game with graphics opens a window"
            raise ConfigError(
                f"display is {self.choice}, and {what}.", "Use display: xvfb or auto, or start the game without graphics."
            )
        private = headless.needs_private_screen(self.choice, self._environ) or recorded
        if private and self.choice == AUTO and not recorded and private_screen.find_xvfb() is None:
            log.info("There is no screen for a game, and Xvfb is not installed (%s).", APT_XVFB)  # a server build needs none
            private = False
        self.private = PrivateScreen(size) if private else None
        self._grab = None if self.private is None else ScreenGrab(self.private)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the variables of this screen."""
        if self.private is None and self.choice == AUTO:
            shared = (x11.DISPLAY, x11.AUTHORITY, headless.WAYLAND, "XDG_RUNTIME_DIR")
            base = {**{name: self._environ[name] for name in shared if name in self._environ}, **base}
        return headless.game_environment(self.choice, base, self.private)

    @property
    def is_there(self) -> bool:
        """Whether games can open a window."""
        return self.private is not None or (self.choice == AUTO and not headless.is_headless(self._environ))

    def check_opengl(self, player: str) -> OpenGL | None:
        """Return what a player with graphics draws with here, None without a screen. Takes 0.3 s, once per process.

        If that is too little for it, raises ConfigError with `xvfb`; with `auto` it is a warning, because builds for servers never draw.
        """
        if not self.is_there:
            return None
        key = "" if self.private is not None else self._environ.get(x11.DISPLAY, "")
        found = _probed.get(key)
        if found is None:
            found = probe_backend("glx", self.environment(self._environ))
            if found.works:
                _probed[key] = found
        if problem := player_problem(found):
            error = ConfigError(f"{player} cannot draw on this machine: {problem}.", player_remedy(found))
            if self.choice != AUTO:
                raise error
            log.warning("%s", error)
            return found
        log.info("%s: %s", player, describe_player(found))
        return found

    def problem(self) -> str:
        """Return why the private display does not work any more; empty if there is no problem."""
        return "" if self.private is None else self.private.problem()

    def frame(self) -> Picture:
        """Return the picture of the game's window. Raises UsageError, WorkerFailed."""
        if self._grab is None:
            raise UsageError("This game has no private screen, and other screens are not recorded.", "Use display: xvfb.")
        return self._grab.frame()

    def close(self) -> None:
        if self._grab is not None:
            self._grab.close()
        if self.private is not None:
            self.private.close()

    def __enter__(self) -> GameScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_probed: dict[str, OpenGL] = {}
"""Results of this process by DISPLAY; "" for private displays, which are all alike."""


# -- players with graphics ----------------------------------------------------------------------------------------------------


def player_problem(found: OpenGL) -> str:
    """Return why a player with graphics, such as Unity's, would not start; empty if it would."""
    if found.missing:
        return "libGL is not installed"
    if not found.works:
        return found.why
    if found.number < MIN_OPENGL:
        needed = f"{MIN_OPENGL[0]}.{MIN_OPENGL[1]}"
        return f"it has OpenGL {found.version} ({found.renderer}), and a Unity player ends at its start without a core profile of {needed}"
    return ""


def player_remedy(found: OpenGL) -> str:
    if found.works and not found.by_software:
        return f"Use another driver, or software rendering with display: xvfb: {APT_XVFB}. Or set no_graphics: true."
    return f"{APT_XVFB}; or set no_graphics: true."


def describe_player(found: OpenGL) -> str:
    """Say what a player with graphics will do, for a log or the doctor."""
    version = f"OpenGL {found.core or found.version}"
    if found.by_software:
        return f"a Unity player draws with {version} by software, {found.renderer}: slowly, on all cores that it may use"
    return f"a Unity player draws with {version} on {found.renderer}"
