"""Entry point: read the launch specification, play the duel, write its result."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback

from ludus.core import plugins
from ludus.errors import LudusError
from ludus.games.doom.duel import Duel, DuelStopped
from ludus.games.doom.launch_spec import LaunchSpec, write_result

_STOPPING = {signal.SIGTERM, signal.SIGINT}


def main() -> int:
    """Return the exit code; 0 if the duel was completed. Stop signals must be blocked in all threads; a thread waits for them."""
    faulthandler.enable()  # prints a traceback if the engine's library crashes
    try:
        plugins.require("vizdoom", "doom", "The Doom duel")
        spec = LaunchSpec.from_environment()
        os.chdir(spec.directory)  # engines write files to the working directory
        duel = Duel(spec)
        threading.Thread(target=_stop_on_signal, args=(duel,), daemon=True).start()
        result = duel.play()
        write_result(spec.result, result)
    except DuelStopped:
        return 128 + signal.SIGTERM
    except LudusError as error:
        _log(f"doom: {error}")
        return error.exit_code
    except Exception:  # top level: report any error and exit with 1
        _log(traceback.format_exc())
        return 1
    _log(f"doom: {result}")
    return 0


def _stop_on_signal(duel: Duel) -> None:
    signal.sigwait(_STOPPING)
    duel.stop()


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
