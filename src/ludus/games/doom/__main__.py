"""`python -m ludus.games.doom`: one duel, as its environment says (docs/gamecore.md). Code 0: it was played to its end."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # While an engine starts, its library takes signals for itself, and dies of them. They are to come to us alone: blocked in all
    # threads, so before there are any, such as those of NumPy.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from ludus.games.doom.main import main
    from ludus.process import identity

    code = main()
    identity.kill_descendants()  # an engine that was about to start does not know yet that it is to end with us
    # Not by the usual way out: a thread that waits in the engine's library would be waited for by its destructors.
    os._exit(code)
