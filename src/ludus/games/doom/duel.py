"""A duel: two engines and two players, one thread for each camp, synchronized at every tic."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from dataclasses import dataclass
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.games.doom.engine import NOTHING, TICS_PER_S, DoomEngine
from ludus.games.doom.launch_spec import LaunchSpec
from ludus.games.doom.player import RETRIES, ActorPlayer, BotPlayer, DuelPlayer
from ludus.io.ports import reserve_udp_port
from ludus.process import children

_START_S = 75.0
"""Start time limit; engines stop waiting for each other after a minute."""
_STALL_S = 15.0
"""Time limit of a tic, which takes one or two milliseconds."""
_LEAVE_S = 2.0
"""Time for the players to end after a failure or a stop."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class DuelRules:
    tics: int
    """Time limit in tics."""
    frags: int
    """Frags that end the match; 0: no limit."""
    frame_skip: int
    """Tics per decision."""

    @classmethod
    def of(cls, spec: LaunchSpec) -> DuelRules:
        """Read the rules from the options. Raises UsageError."""
        options = {"seconds": 120.0, "frags": 0, "frame_skip": 4} | dict(spec.options)
        try:
            tics = round(float(options["seconds"]) * TICS_PER_S)
            found = cls(min(tics, spec.max_frames or tics), int(options["frags"]), int(options["frame_skip"]))
        except (TypeError, ValueError) as error:
            raise UsageError(f"The options {options} cannot be used: {error}.") from error
        if not (found.tics > 0 and found.frags >= 0 and found.frame_skip > 0):
            raise UsageError(f"The options give {found}.", "A match has at least one tic, a decision lasts at least one.")
        return found


class DuelStopped(Exception):
    """The duel was stopped, or the other player failed."""


class Duel:
    """Plays one duel. Call `play` once, in a separate process, and exit when it raises: engines may be left that end with the process."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._rules = DuelRules.of(spec)
        self._directory = spec.directory / "engines"
        self._patience_s = _STALL_S + (RETRIES + 1) * max([camp.timeout_s for camp in spec.camps if camp], default=0.0)
        self._players: list[DuelPlayer] = [
            BotPlayer(spec.seed * 2 + number)
            if camp is None
            else ActorPlayer(number, camp, spec.runtime_id, eval_mode=spec.eval_mode)
            for number, camp in enumerate(spec.camps)
        ]
        port, self._claim = reserve_udp_port("doom")
        self._engines = [
            DoomEngine(n, port, self._directory / str(n), spec.seed, locate_enemy=spec.camps[n] is None) for n in (0, 1)
        ]
        self._barrier = threading.Barrier(2)
        self._scores = [(0, 0), (0, 0)]  # by engine
        self._last_tic_at = time.monotonic()
        self._starting: set[int] = set()
        self._stop_at: float | None = None
        self._ended: queue.SimpleQueue[_SideResult | BaseException] = queue.SimpleQueue()

    def stop(self) -> None:
        """Stop before the next decision; `play` raises DuelStopped. Thread-safe."""
        self._stop_at = self._stop_at or time.monotonic()

    def play(self) -> dict[str, Any]:
        """Play and return the result. Raises LudusError when an engine or an actor fails, and DuelStopped."""
        for engine in self._engines:
            engine.prepare()
        began = self._last_tic_at = time.monotonic()
        threads = [threading.Thread(target=self._run, args=(n,), name=f"camp-{n}", daemon=True) for n in (0, 1)]
        for thread in threads:
            thread.start()
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._claim.close)
            with contextlib.ExitStack() as after_failure:
                after_failure.callback(self._shut_down, threads)
                sides = sorted((self._wait_for_side(), self._wait_for_side()), key=lambda result: result.camp)
                after_failure.pop_all()
        first, second = sides[0].frags
        return {
            "winner": None if first == second else int(second > first),
            "frags": [first, second],
            "tics": sides[0].tics,
            "decisions": [result.decisions for result in sides],
            "players": [player.kind for player in self._players],
            "seconds": round(time.monotonic() - began, 3),
        }

    def _shut_down(self, threads: list[threading.Thread]) -> None:
        """End the sessions of actors and the engines that would outlive this process."""
        self._barrier.abort()
        if self._starting:
            # ViZDoom crashes if an engine ends during its start. These end with this process.
            for camp in list(self._starting):
                self._engines[camp].unlink_shared_memory()
                self._players[camp].leave()
            return
        children.kill_descendants()  # an engine without its peer blocks its thread forever
        until = time.monotonic() + _LEAVE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait_for_side(self) -> _SideResult:
        while True:
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=_LOOK_S)
                if isinstance(ended, _SideResult):
                    return ended
                if isinstance(ended, DuelStopped) and self._stop_at is None:
                    break
                raise ended  # of two errors the first is the cause
            now = time.monotonic()
            if self._stop_at is not None and (now > self._stop_at + _LEAVE_S or self._starting):
                raise DuelStopped
            if now > self._last_tic_at + self._patience_s + (_START_S if self._starting else _LEAVE_S):
                break
        stood_s = time.monotonic() - self._last_tic_at
        raise WorkerFailed(f"An engine did not reach its next tic within {stood_s:.0f} s.", "Check the load of the machine.")

    def _run(self, camp: int) -> None:
        try:
            self._ended.put(self._play_side(camp))
        except BaseException as error:  # the main thread raises it
            self._ended.put(error)
            self._barrier.abort()
            self._players[camp].leave()

    def _play_side(self, camp: int) -> _SideResult:
        """Play one camp; runs in its own thread."""
        engine, player, rules = self._engines[camp], self._players[camp], self._rules
        player.begin()  # before the engine, which is not started for a missing actor
        self._wait_for_other()
        self._starting.add(camp)
        engine.start()
        self._starting.discard(camp)
        result = _SideResult(camp)
        reported = 0
        while True:
            view = engine.look()
            result.frags = self._scores[camp] = view.frags
            self._wait_for_other()
            lead = view.frags[camp] - view.frags[1 - camp]
            if result.tics >= rules.tics or (rules.frags and max(map(max, self._scores)) >= rules.frags):
                break
            if self._stop_at is not None:
                raise DuelStopped
            action = NOTHING
            if not view.dead:
                action = player.act(view, float(lead - reported))
                reported, result.decisions = lead, result.decisions + 1
            engine.press(action)
            tics = min(rules.frame_skip, rules.tics - result.tics)
            for left in range(tics, 0, -1):  # tic by tic: an engine that runs ahead makes the other one merge tics to catch up
                self._wait_for_other()
                engine.advance(show=left == 1)
            result.tics += tics
        engine.close()
        player.end(float(lead - reported))
        return result

    def _wait_for_other(self) -> None:
        try:
            self._barrier.wait(self._patience_s)
        except threading.BrokenBarrierError as error:
            raise DuelStopped from error
        self._last_tic_at = time.monotonic()


@dataclass
class _SideResult:
    camp: int
    frags: tuple[int, int] = (0, 0)
    tics: int = 0
    decisions: int = 0
