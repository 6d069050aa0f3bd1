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
from ludus.games.doom.engine import NOTHING, TICS_PER_S, Engine, reserved_port
from ludus.games.doom.launch_spec import Briefing
from ludus.games.doom.player import RETRIES, ActorPlayer, Player, ScriptPlayer
from ludus.process import identity

_START_S = 75.0
"""The engines give up looking for each other after a minute."""
_STALL_S = 15.0
"""A tic takes a millisecond or two; also on a busy machine far less than this."""
_LEAVE_S = 2.0
"""For the players, when one has failed or everything is to stop; and more than they wait for each other."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Rules:
    tics: int
    """The match is over then."""
    frags: int
    """Or when somebody has so many; 0: never."""
    frame_skip: int
    """Tics that a decision lasts."""

    @classmethod
    def of(cls, briefing: Briefing) -> Rules:
        """Raises UsageError."""
        options = {"seconds": 120.0, "frags": 0, "frame_skip": 4} | dict(briefing.options)
        try:
            tics = round(float(options["seconds"]) * TICS_PER_S)
            found = cls(min(tics, briefing.max_frames or tics), int(options["frags"]), int(options["frame_skip"]))
        except (TypeError, ValueError) as error:
            raise UsageError(f"The options {options} cannot be used: {error}.") from error
        if not (found.tics > 0 and found.frags >= 0 and found.frame_skip > 0):
            raise UsageError(f"The options make {found}.", "A match has at least one tic, a decision lasts at least one.")
        return found


class Stopped(Exception):
    """Somebody asked for it, or the other player is gone."""


class Duel:
    """`play` is called once, in a process of its own, which is to end when it raises: it may have left engines that end with it."""

    def __init__(self, briefing: Briefing) -> None:
        self._rules = Rules.of(briefing)
        self._directory = briefing.directory / "engines"
        self._patience_s = _STALL_S + (RETRIES + 1) * max([camp.timeout_s for camp in briefing.camps if camp], default=0.0)
        self._players: list[Player] = [
            ScriptPlayer(briefing.seed * 2 + number)
            if camp is None
            else ActorPlayer(number, camp, briefing.runtime_id, eval_mode=briefing.eval_mode)
            for number, camp in enumerate(briefing.camps)
        ]
        port, self._claim = reserved_port()
        self._engines = [
            Engine(n, port, self._directory / str(n), briefing.seed, look_for_enemy=briefing.camps[n] is None) for n in (0, 1)
        ]
        self._together = threading.Barrier(2)
        self._scores = [(0, 0), (0, 0)]  # as either engine tells it
        self._met_at = time.monotonic()
        self._starting: set[int] = set()
        self._stop_at: float | None = None
        self._ended: queue.SimpleQueue[_Side | BaseException] = queue.SimpleQueue()

    def stop(self) -> None:
        """From any thread: the players leave before their next decision, and `play` raises Stopped."""
        self._stop_at = self._stop_at or time.monotonic()

    def play(self) -> dict[str, Any]:
        """What came of it. Raises LudusError when an engine or an actor failed, Stopped."""
        for engine in self._engines:
            engine.prepare()
        began = self._met_at = time.monotonic()
        threads = [threading.Thread(target=self._run, args=(n,), name=f"camp-{n}", daemon=True) for n in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            sides = sorted((self._next_ended(), self._next_ended()), key=lambda side: side.camp)
        except BaseException:
            self._together.abort()
            self._clear_out(threads)
            raise
        finally:
            self._claim.close()
            shutil.rmtree(self._directory, ignore_errors=True)
        first, second = sides[0].frags
        return {
            "winner": None if first == second else int(second > first),
            "frags": [first, second],
            "tics": sides[0].tics,
            "decisions": [side.decisions for side in sides],
            "players": [player.kind for player in self._players],
            "seconds": round(time.monotonic() - began, 3),
        }

    def _clear_out(self, threads: list[threading.Thread]) -> None:
        """So that actors know, and nothing is left that does not end with this process."""
        if self._starting:
            # ViZDoom crashes when an engine ends that has not fully started. They end with us.
            for camp in list(self._starting):
                self._engines[camp].forget_names()
                self._players[camp].leave()
            return
        identity.kill_descendants()  # an engine whose other half is gone waits for ever, and so does its thread
        until = time.monotonic() + _LEAVE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _next_ended(self) -> _Side:
        while True:
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=_LOOK_S)
                if isinstance(ended, _Side):
                    return ended
                if isinstance(ended, Stopped) and self._stop_at is None:
                    break
                raise ended  # of two errors the first is the cause; the other one only finds itself alone
            now = time.monotonic()
            if self._stop_at is not None and (now > self._stop_at + _LEAVE_S or self._starting):
                raise Stopped
            if now > self._met_at + self._patience_s + (_START_S if self._starting else _LEAVE_S):
                break
        stood_s = time.monotonic() - self._met_at
        raise WorkerFailed(
            f"An engine did not come to its next tic within {stood_s:.0f} s.", "Does it hang, or is the machine overloaded?"
        )

    def _run(self, camp: int) -> None:
        try:
            self._ended.put(self._side(camp))
        except BaseException as error:  # whatever it is, the main thread waits for it
            self._ended.put(error)
            self._together.abort()
            self._players[camp].leave()

    def _side(self, camp: int) -> _Side:
        """One camp's part of the match, in a thread of its own."""
        engine, player, rules = self._engines[camp], self._players[camp], self._rules
        player.begin()  # before the engine: an actor that is not there costs no start
        self._meet()
        self._starting.add(camp)
        engine.start()
        self._starting.discard(camp)
        side = _Side(camp)
        told = 0
        while True:
            seen = engine.look()
            side.frags = self._scores[camp] = seen.frags
            self._meet()
            lead = seen.frags[camp] - seen.frags[1 - camp]
            if side.tics >= rules.tics or (rules.frags and max(map(max, self._scores)) >= rules.frags):
                break
            if self._stop_at is not None:
                raise Stopped
            action = NOTHING
            if not seen.dead:
                action = player.act(seen, float(lead - told))
                told, side.decisions = lead, side.decisions + 1
            engine.press(action)
            side.tics += self._advance(engine, min(rules.frame_skip, rules.tics - side.tics))
        engine.close()
        player.end(float(lead - told))
        return side

    def _advance(self, engine: Engine, tics: int) -> int:
        # Tic by tic: an engine that is let run gets ahead, and the other makes two tics of one to catch up.
        for left in range(tics, 0, -1):
            self._meet()
            engine.advance(show=left == 1)
        return tics

    def _meet(self) -> None:
        try:
            self._together.wait(self._patience_s)
        except threading.BrokenBarrierError as error:
            raise Stopped from error
        self._met_at = time.monotonic()


@dataclass
class _Side:
    camp: int
    frags: tuple[int, int] = (0, 0)
    tics: int = 0
    decisions: int = 0
