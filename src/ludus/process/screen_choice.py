"""Which screen the environments and games of this process get: `config.display` of its run, or LUDUS_SCREEN, which overrides it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ludus.errors import ConfigError

SCREEN = "LUDUS_SCREEN"
"""Variable that overrides `config.display`; one of CHOICES."""

AUTO, XVFB, EGL, NONE = "auto", "xvfb", "egl", "none"
CHOICES = (AUTO, XVFB, EGL, NONE)
"""`auto`: the server of DISPLAY if it answers, else a private Xvfb for what needs one. `xvfb`: a private Xvfb for each process.
`egl`: OpenGL without an X server. `none`: no screen."""

_configured = AUTO


def configure(choice: str) -> None:
    """Set the choice of this process to `config.display` of the run that it works for. Raises ConfigError."""
    global _configured  # DISPLAY, which it is about, is a property of the process too
    _check(choice, "config.display")
    _configured = choice


def screen_choice(environ: Mapping[str, str] | None = None) -> str:
    """Return one of CHOICES. Raises ConfigError for an invalid LUDUS_SCREEN."""
    choice = (os.environ if environ is None else environ).get(SCREEN)
    return _configured if not choice else _check(choice, SCREEN)


def _check(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ConfigError(f"{source}={choice!r} is not valid.", f"Use one of: {', '.join(CHOICES)}.")
    return choice
