"""Atari games of PettingZoo with several players: multi-agent-ale-py emulates them, and the ROMs are those in the package ale-py.

PettingZoo expects ROMs next to multi-agent-ale-py, where AutoROM downloads them from the internet. `ale-py` contains the same files.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ludus.errors import MissingExtra

PACKAGE: Final = "pettingzoo.atari"
EXTRA: Final = "pettingzoo-atari"


def with_roms(factory: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the constructor with the place of the ROMs. `env_config: {auto_rom_install_path: …}` overrides it. Raises MissingExtra."""
    own = _package_directory("ale_py")
    if own is not None and (own / "roms").is_dir():
        return functools.partial(factory, auto_rom_install_path=str(own / "roms"))
    emulator = _package_directory("multi_agent_ale_py")
    if emulator is not None and (emulator / "roms").is_dir():  # downloaded by AutoROM
        return factory
    raise MissingExtra(f"{name} needs ROMs, which are part of the package 'ale-py'.", f"pip install 'ludus[{EXTRA}]'")


def _package_directory(module: str) -> Path | None:
    """Directory of an installed package, which is not imported."""
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
