"""Write the player as an executable that starts like a standalone build."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SUFFIX = ".x86_64"


def write_player(
    directory: Path, scene: str = "ball", *, areas: int = 1, faults: Sequence[str] = (), words: Sequence[str] = (), name: str = ""
) -> Path:
    """Write `NAME.x86_64` and return its path. Further arguments of its command line come after the ones given here."""
    words = ["--scene", scene, "--areas", str(areas), *words]
    for fault in faults:
        words += ["--fault", fault]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.unity_player.player import main; sys.exit(main(sys.argv[1:]))"
    )
    # Without the packages of the site: the player starts in 40 ms.
    command = shlex.join([sys.executable, "-I", "-S", "-c", program, *words])
    path = directory / f"{name or scene}{SUFFIX}"
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path
