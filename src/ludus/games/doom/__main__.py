"""`python -m ludus.games.doom`: play the duel that the environment variables describe (docs/gamecore.md); exit code 0 if completed."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # While an engine starts, its library handles signals itself and dies of them. Block them in all threads, so before any library
    # (such as NumPy) starts one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from ludus.games.doom.main import main
    from ludus.process import children

    code = main()
    children.kill_descendants()  # an engine that is just starting does not end with its parent
    # Skips destructors: those of the engine's library would wait for its threads.
    os._exit(code)
