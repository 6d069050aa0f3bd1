"""A match: two engines, two players, one thread for each pair, and nobody a tic ahead of the other."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from dataclasses import dataclass
from typing import Any

from ludus.errors import UsageError, WorkerFailed
from ludus.games.doom.engine import NOTHING, TICS_PER_S, DoomEngine, reserve_port
from ludus.games.doom.launch_spec import LaunchSpec
from ludus.games.doom.player import RETRIES, ActorPlayer, BotPlayer, DuelPlayer
from ludus.process import identity

_START_S = 75.0
"""The engines give up looking for each other after a minute."""
_STALL_S = 15.0
"""A tic takes a millisecond or two; also on a busy machine far less than this."""
_LEAVE_S = 2.0
"""For the players, when one has failed or everything is to stop; and more than they wait for each other."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class DuelRules:
    tics: int
    """The match is over then."""
    frags: int
    """Or when somebody has so many; 0: never."""
    frame_skip: int
    """Tics that a decision lasts."""

    @classmethod
    def of(cls, spec: LaunchSpec) -> DuelRules:
        """Raises UsageError."""
        options = {"seconds": 120.0, "frags": 0, "frame_skip": 4} | dict(spec.options)
        try:
            tics = round(float(options["seconds"]) * TICS_PER_S)
            found = cls(min(tics, spec.max_frames or tics), int(options["frags"]), int(options["frame_skip"]))
        except (TypeError, ValueError) as error:
            raise UsageError(f"The options {options} cannot be used: {error}.") from error
        if not (found.tics > 0 and found.frags >= 0 and found.frame_skip > 0):
            raise UsageError(f"The options make {found}.", "A match has at least one tic, a decision lasts at least one.")
        return found


class DuelStopped(Exception):
    """Somebody asked for it, or the other player is gone."""


class Duel:
    """`play` is called once, in a process of its own, which is to end when it raises: it may have left engines that end with it."""

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
        port, self._claim = reserve_port()
        self._engines = [
            DoomEngine(n, port, self._directory / str(n), spec.seed, look_for_enemy=spec.camps[n] is None) for n in (0, 1)
        ]
        self._barrier = threading.Barrier(2)
        self._scores = [(0, 0), (0, 0)]  # as either engine tells it
        self._last_tic_at = time.monotonic()
        self._starting: set[int] = set()
        self._stop_at: float | None = None
        self._ended: queue.SimpleQueue[_SideResult | BaseException] = queue.SimpleQueue()

    def stop(self) -> None:
        """From any thread: the players leave before their next decision, and `play` raises Stopped."""
        self._stop_at = self._stop_at or time.monotonic()

    def play(self) -> dict[str, Any]:
        """What came of it. Raises LudusError when an engine or an actor failed, Stopped."""
        for engine in self._engines:
            engine.prepare()
        began = self._last_tic_at = time.monotonic()
        threads = [threading.Thread(target=self._run, args=(n,), name=f"camp-{n}", daemon=True) for n in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            sides = sorted((self._wait_for_side(), self._wait_for_side()), key=lambda result: result.camp)
        except BaseException:
            self._barrier.abort()
            self._shut_down(threads)
            raise
        finally:
            self._claim.close()
            shutil.rmtree(self._directory, ignore_errors=True)
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
        """So that actors know, and nothing is left that does not end with this process."""
        if self._starting:
            # ViZDoom crashes when an engine ends that has not fully started. They end with us.
            for camp in list(self._starting):
                self._engines[camp].unlink_shared_memory()
                self._players[camp].leave()
            return
        identity.kill_descendants()  # an engine whose other half is gone waits for ever, and so does its thread
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
                raise ended  # of two errors the first is the cause; the other one only finds itself alone
            now = time.monotonic()
            if self._stop_at is not None and (now > self._stop_at + _LEAVE_S or self._starting):
                raise DuelStopped
            if now > self._last_tic_at + self._patience_s + (_START_S if self._starting else _LEAVE_S):
                break
        stood_s = time.monotonic() - self._last_tic_at
        raise WorkerFailed(
            f"An engine did not come to its next tic within {stood_s:.0f} s.", "Does it hang, or is the machine overloaded?"
        )

    def _run(self, camp: int) -> None:
        try:
            self._ended.put(self._play_side(camp))
        except BaseException as error:  # whatever it is, the main thread waits for it
            self._ended.put(error)
            self._barrier.abort()
            self._players[camp].leave()

    def _play_side(self, camp: int) -> _SideResult:
        """One camp's part of the match, in a thread of its own."""
        engine, player, rules = self._engines[camp], self._players[camp], self._rules
        player.begin()  # before the engine: an actor that is not there costs no start
        self._wait_for_other()
        self._starting.add(camp)
        engine.start()
        self._starting.discard(camp)
        result = _SideResult(camp)
        told = 0
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
                action = player.act(view, float(lead - told))
                told, result.decisions = lead, result.decisions + 1
            engine.press(action)
            result.tics += self._advance(engine, min(rules.frame_skip, rules.tics - result.tics))
        engine.close()
        player.end(float(lead - told))
        return result

    def _advance(self, engine: DoomEngine, tics: int) -> int:
        # Tic by tic: an engine that is let run gets ahead, and the other makes two tics of one to catch up.
        for left in range(tics, 0, -1):
            self._wait_for_other()
            engine.advance(show=left == 1)
        return tics

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
