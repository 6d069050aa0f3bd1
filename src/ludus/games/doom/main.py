"""From what the environment says to a duel, its result, and an exit code."""

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
    """0: it was played to its end. The signals that stop it are blocked in all threads; they are waited for here."""
    faulthandler.enable()  # the engine's library may crash
    try:
        plugins.require("vizdoom", "doom", "The Doom duel")
        spec = LaunchSpec.from_environment()
        os.chdir(spec.directory)  # the engines leave a few files where they stand
        duel = Duel(spec)
        threading.Thread(target=_stop_on_signal, args=(duel,), daemon=True).start()
        result = duel.play()
        write_result(spec.result, result)
    except DuelStopped:
        return 128 + signal.SIGTERM
    except LudusError as error:
        _log(f"doom: {error}")
        return error.exit_code
    except Exception:
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
