"""`python -m ludus.games.doom`: one duel, as its environment says (docs/gamecore.md). Code 0: it was played to its end."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback

from ludus import plugins
from ludus.errors import LudusError
from ludus.games.doom.briefing import Briefing, write_result
from ludus.games.doom.duel import Duel, Stopped

_STOPPING = {signal.SIGTERM, signal.SIGINT}


def main() -> int:
    faulthandler.enable()  # the engine's library may crash
    try:
        plugins.require("vizdoom", "doom", "The Doom duel")
        briefing = Briefing.from_environment()
        os.chdir(briefing.directory)  # the engines leave a few files where they stand
        # While an engine starts, its library takes signals for itself, and dies of them. Blocked in all threads they come to us alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        duel = Duel(briefing)
        threading.Thread(target=_stop_on_signal, args=(duel,), daemon=True).start()
        result = duel.play()
        write_result(briefing.result, result)
    except Stopped:
        return 128 + signal.SIGTERM
    except LudusError as error:
        _say(f"doom: {error}")
        return error.exit_code
    except Exception:
        _say(traceback.format_exc())
        return 1
    _say(f"doom: {result}")
    return 0


def _stop_on_signal(duel: Duel) -> None:
    signal.sigwait(_STOPPING)
    duel.stop()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    # Not by the usual way out: a thread that waits in the engine's library would be waited for by its destructors.
    os._exit(main())
