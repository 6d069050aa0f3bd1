"""A duel inside this process: two engines that are advanced decision by decision, and restarted for the next match."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.errors import WorkerFailed
from ludus.games.doom.engine import DoomEngine, PlayerView
from ludus.io.ports import reserve_udp_port

_START_S = 90.0
_DECISION_S = 30.0
_CLOSE_S = 3.0

Views = list[PlayerView]


class DuelMatch:
    """Two engines, each advanced by a thread of its own. Close it after use; a failed match cannot be used again."""

    def __init__(self, seed: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ludus-doom-duel-"))
        port, self._claim = reserve_udp_port("doom")
        self._homes = [self._directory / str(camp) for camp in (0, 1)]
        self.engines = [
            DoomEngine(camp, port, home, seed, locate_enemy=True, log=home / "engine.log")
            for camp, home in enumerate(self._homes)
        ]
        # The kernel ends an engine with the thread that has started it, so these threads live as long as the match.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="doom")
        self._barrier = threading.Barrier(2)
        self._failure: WorkerFailed | None = None
        """The first one."""
        for engine in self.engines:
            engine.prepare()

    def begin_start(self) -> Sequence[Future[Any]]:
        return self._on_both(lambda camp: self.engines[camp].start())

    def begin_restart(self, seed: int) -> Sequence[Future[PlayerView]]:
        return self._on_both(lambda camp: self._restart(camp, seed))

    def begin_decision(self, actions: Sequence[int], tics: int) -> Sequence[Future[PlayerView]]:
        return self._on_both(lambda camp: self._decide(camp, actions[camp], tics))

    def finish(self, begun: Sequence[Future[Any]]) -> list[Any]:
        """Wait for what both engines do. Raises WorkerFailed."""
        try:
            return [one.result(_START_S) for one in begun]
        except (WorkerFailed, threading.BrokenBarrierError, FutureTimeout) as error:
            self._abort()
            reason = self._failure or error
            raise WorkerFailed(
                f"A duel of Doom has ended: {reason or 'an engine does not answer'}", self._last_words()
            ) from error

    def _on_both(self, task: Callable[[int], Any]) -> list[Future[Any]]:
        return [self._threads.submit(self._guard, task, camp) for camp in (0, 1)]

    def _guard(self, task: Callable[[int], Any], camp: int) -> Any:
        try:
            return task(camp)
        except WorkerFailed as error:
            self._failure = self._failure or error
            self._abort()  # the other engine would wait for this one forever
            raise

    def _abort(self) -> None:
        self._barrier.abort()
        self._kill()

    def _restart(self, camp: int, seed: int) -> PlayerView:
        engine = self.engines[camp]
        self._barrier.wait(_DECISION_S)
        engine.restart(seed)
        return engine.look()

    def _decide(self, camp: int, action: int, tics: int) -> PlayerView:
        engine = self.engines[camp]
        engine.press(action)
        for left in range(tics, 0, -1):  # tic by tic: an engine that runs ahead makes the other one merge tics to catch up
            self._barrier.wait(_DECISION_S)
            engine.advance(show=left == 1)
        return engine.look()

    def _last_words(self) -> str:
        for home in self._homes:
            with suppress(OSError):
                lines = (home / "engine.log").read_text(encoding="utf-8", errors="replace").split()
                if lines:
                    return "Its last output: " + " ".join(lines[-40:])
        return "Its engines wrote nothing."

    def _kill(self) -> None:
        for home in self._homes:
            with suppress(OSError, ValueError):
                os.kill(int((home / "pid").read_text()), signal.SIGKILL)

    def close(self) -> None:
        begun = self._on_both(lambda camp: self.engines[camp].close())
        try:
            for one in begun:
                one.result(_CLOSE_S)
        except FutureTimeout:
            self._kill()  # only then: the id of an engine that has ended may belong to another program
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._claim.close()
        shutil.rmtree(self._directory, ignore_errors=True)
