"""All games of one server: started, watched, ended, started again, remembered. Every method belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from ludus.errors import Refused, WorkerFailed
from ludus.gamecore.server import state_dir as homes
from ludus.gamecore.server.catalogue import Catalogue
from ludus.gamecore.server.command import launch, uses_wine
from ludus.gamecore.server.game_record import GONE_S, Match
from ludus.gamecore.server.game_status import ALIVE, State, Status, Verdict, verdict
from ludus.gamecore.server.launchers import Starters
from ludus.gamecore.server.request import Order, shown
from ludus.gamecore.server.resource_usage import Usage
from ludus.gamecore.server.state_dir import Home
from ludus.gamecore.server.task_results import Tasks
from ludus.process import identity
from ludus.process.commands.command import CommandExit, CommandProcess

log = logging.getLogger(__name__)

SAMPLE_S, SAMPLE_SHARE = 2.0, 0.04
"""How often games are looked at; with many of them less often, so that it takes no more than this part of the time."""

ANSWER_S = 10.0
_STARTS, _DISK = 8, 4
"""Threads: a start takes some milliseconds, and up to ten seconds on a machine that is overloaded."""

_SOON_S, _FIRST_LINE_S, _LOOK_S = 0.1, 0.1, 5.0
_PORTS = 1000
_SEEDS = 1 << 31
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Bounds:
    """Of what a server holds."""

    games: int = 200
    """At once."""
    keep: int = 1000
    """Games that are over, with their directories."""
    keep_bytes: int = 4_000_000_000


class Hall:
    """`surroundings`: the environment of which games inherit a part."""

    def __init__(self, catalogue: Catalogue, home: Home, bounds: Bounds, surroundings: Mapping[str, str] = os.environ) -> None:
        self.catalogue, self.home, self.bounds = catalogue, home, bounds
        self._surroundings = surroundings
        self._matches: dict[str, Match] = {}
        self._known: dict[str, Status] = {}
        """Those that are over, the oldest first: also from earlier lives of the server."""
        self._bytes: dict[str, int] = {}
        self.tasks = Tasks(home.directory / "tasks.jsonl")
        self._lives: set[asyncio.Task[None]] = set()
        self._ports: deque[int] = deque(maxlen=_PORTS)
        self._ports_lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        """(game, what happened)."""
        self._closing = False
        self._starts = ThreadPoolExecutor(_STARTS, "gamecore-start")
        self._disk = ThreadPoolExecutor(_DISK, "gamecore-disk")
        self._starters: Starters | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Hall:
        for status, size in await self._in(self._disk, self.home.load):
            self._known[status.runtime_id], self._bytes[status.runtime_id] = status, size
            if status.state == "lost":
                self.counts[status.game, "lost"] += 1
        self._starters = Starters(self._surroundings, self.home.mark)  # after everything that has this mark is gone
        await self._in(self._disk, self.tasks.load)
        await self._in(self._disk, self.home.empty_trash)
        self._watching = asyncio.create_task(self._watch_all())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop all games and wait until nothing of them is left."""
        if self._closing:
            return
        self._closing = True
        for match in self.running:
            match.end("stopped", "The server was ended.", min(grace_s, match.entry.grace_s))
        if self._lives:
            await asyncio.wait(self._lives, timeout=grace_s + GONE_S)
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._starters is not None:
            await asyncio.to_thread(self._starters.close)
        for pool in (self._starts, self._disk):
            await asyncio.to_thread(pool.shutdown)

    # -- what callers ask for

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def known(self) -> int:
        """Games that are over and not forgotten."""
        return len(self._known)

    @property
    def running(self) -> list[Match]:
        return [match for match in self._matches.values() if not match.status.is_over]

    async def start(self, order: Order) -> tuple[Match, bool]:
        """The game, and whether it was started for this order (else it runs already). Raises Refused."""
        state = None
        if order.start_from is not None and order.runtime_id not in self._matches:
            state = await self._in(self._disk, self.home.choose_state, order)
        present = self._matches.get(order.runtime_id)
        if present is not None:
            if present.order != order:
                raise Refused(
                    409,
                    "conflict",
                    f"{order.runtime_id} runs already, and with another order.",
                    "Stop it first, or choose another runtime_id.",
                )
            await self._begun(present)
            return present, False
        match = self._admit(order, state)
        life = asyncio.create_task(self._live(match))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        await self._begun(match)
        return match, True

    def status(self, runtime_id: str) -> dict[str, Any]:
        """Raises Refused."""
        match = self._matches.get(runtime_id)
        if match is not None:
            return match.shown()
        if runtime_id in self._known:
            return self._known[runtime_id].to_json()
        raise Refused(404, "unknown_id", f"There is no game {shown(runtime_id)}.", "It was never started, or it is forgotten.")

    def exists(self, runtime_id: str) -> bool:
        """Whether it runs, or is being started."""
        return runtime_id in self._matches

    async def look(self, runtime_id: str) -> dict[str, Any]:
        """Its status with what it uses and says now. Raises Refused."""
        match = self._matches.get(runtime_id)
        if match is not None and match.process is not None:
            self._note(match, await self._in(self._disk, match.seen))
            lines = await self._in(self._disk, match.last_lines)
            if not match.status.is_over:
                return {**match.shown(), "last_lines": lines}
        return self.status(runtime_id)

    def listed(self, state: str | None = None, task_id: str | None = None) -> list[dict[str, Any]]:
        """The oldest first; of their last lines only the very last."""
        found = [*(status.to_json() for status in self._known.values()), *(match.shown() for match in self._matches.values())]
        chosen = [one for one in found if state in (None, one["state"]) and task_id in (None, one["task_id"])]
        return [{**one, "last_lines": one["last_lines"][-1:]} for one in chosen]

    async def wait(self, runtime_id: str, timeout_s: float) -> dict[str, Any]:
        """Its status when it is over, or after so long. Raises Refused."""
        match = self._matches.get(runtime_id)
        if match is not None:
            await _set_within(match.over, timeout_s)
            if match.status.is_over:
                return match.status.to_json()  # also if it was forgotten, or played again, meanwhile
        return self.status(runtime_id)

    async def stop(self, runtime_id: str, grace_s: float | None = None) -> dict[str, Any]:
        """Raises Refused for one that never was; one that is over is as it is."""
        match = self._matches.get(runtime_id)
        if match is None:
            return self.status(runtime_id)
        grace_s = match.entry.grace_s if grace_s is None else grace_s
        match.end("stopped", "It was stopped.", grace_s)
        await _set_within(match.over, grace_s + GONE_S + 5.0)
        return match.status.to_json()

    async def log_lines(self, runtime_id: str, lines: int) -> list[str]:
        """Raises Refused."""
        self.status(runtime_id)
        return await self._in(self._disk, homes.last_lines, self.home.place(runtime_id).log, lines)

    async def kept(self, runtime_id: str, what: str) -> tuple[BinaryIO, int]:
        """What a game calls its `recording`, or its `video`, and its size. Raises Refused."""
        status = self.status(runtime_id)
        if status["state"] in ALIVE:
            raise Refused(409, "conflict", f"Game {runtime_id} is not over, and has no {what} yet.", "Wait for its end.")
        return await self._in(self._disk, homes.open_kept, self.home.place(runtime_id).directory, status.get("result"), what)

    async def read(self, file: BinaryIO, size: int) -> bytes:
        """The next part of a file, without holding up the games."""
        return await self._in(self._disk, file.read, size)

    async def offered(self) -> dict[str, Any]:
        """What can be asked for; not how it is started."""
        alike = Counter(match.order.game for match in self.running)
        found = {}
        for name, entry in self.catalogue.games.items():
            saved = await self._in(self._disk, self.home.saved, name)
            found[name] = {
                "modes": list(entry.modes),
                "options": {key: option.model_dump(exclude_none=True) for key, option in entry.options.items()},
                "limits": entry.limits.model_dump(exclude_none=True),
                "states": len(saved),
                "running": alike[name],
            }
        return found

    async def task(self, task_id: str) -> list[dict[str, Any]]:
        """The games of a task that are over."""
        return await self._in(self._disk, self.tasks.of, task_id)

    async def forget_task(self, task_id: str | None) -> None:
        """What is kept of the games of one task; None: of all."""
        self.tasks.remove(task_id)
        await self._in(self._disk, self.tasks.write)

    async def forget(self, runtime_id: str) -> None:
        """Raises Refused for one that runs."""
        self.status(runtime_id)
        if runtime_id in self._matches:
            raise Refused(409, "conflict", f"{runtime_id} still runs.", "Stop it first.")
        self._drop(runtime_id)
        await self._in(self._disk, self.home.empty_trash)

    async def clear(self) -> int:
        """Forget all that are over."""
        gone = list(self._known)
        for runtime_id in gone:
            self._drop(runtime_id)
        await self._in(self._disk, self.home.empty_trash)
        return len(gone)

    # -- one life after the other

    def _admit(self, order: Order, start_from: Path | None) -> Match:
        running = self.running
        entry = self.catalogue.games[order.game]
        if self._closing:
            raise Refused(503, "closing", "This server is being ended.", "Try another one.", 1)
        if len(running) >= self.bounds.games:
            raise Refused(503, "full", f"{len(running)} games run, and no more may (--max-games).", "Try again later.", 1)
        alike = sum(match.order.game == order.game for match in running)
        if entry.limits.games is not None and alike >= entry.limits.games:
            raise Refused(503, "full", f"{alike} games of {order.game} run, and no more may.", "Try again later.", 1)
        seed = random.randrange(_SEEDS) if order.seed is None else order.seed  # noqa: S311
        status = Status(
            order.runtime_id,
            order.game,
            order.mode,
            started=time.time(),
            eval_mode=order.eval_mode,
            task_id=order.task_id,
            seed=seed,
            start_from=start_from.name if start_from else None,
        )
        share = 0.0 if entry.states is None or order.eval_mode else entry.states.ratio
        saves = random.random() < (1.0 if share and order.plays_on else share)  # noqa: S311
        match = Match(order, entry, self.home.place(order.runtime_id), status, start_from, saves)
        self._known.pop(order.runtime_id, None)
        self._bytes.pop(order.runtime_id, None)
        self._matches[order.runtime_id] = match
        return match

    async def _begun(self, match: Match) -> None:
        """Or not within ANSWER_S: then the caller is told that it is still starting. Raises Refused."""
        await _set_within(match.begun, ANSWER_S)
        if match.failure is not None:
            raise Refused(500, "cannot_start", match.failure.message, "The log of the server says more.")

    async def _live(self, match: Match) -> None:
        """From its first start to its end."""
        try:
            while (how := await self._one_life(match)) is not None:
                await self._pause(match, how)
        except Exception:  # whatever it is, nobody may wait for this game for ever
            log.exception("%s: looking after it failed", match.status.runtime_id)
            if match.process is not None:
                match.process.ask_to_stop(0.0)
            await self._finish(match, "crashed", "The server failed to look after it; see its log.")
        finally:
            match.begun.set()

    async def _one_life(self, match: Match) -> Verdict | None:
        """None: it was the last. Else it is started again."""
        status = match.status
        exited: asyncio.Future[CommandExit] = asyncio.get_running_loop().create_future()
        await self._get_ready(match)
        if match.asked is not None:  # before there is anything to be ended
            await self._finish(match, *match.asked)
            return None
        try:
            match.process = await self._in(self._starts, self._start, match, exited)
        except WorkerFailed as error:
            log.error("%s", error)
            match.failure = error if not match.begun.is_set() else None
            await self._finish(match, "crashed", error.message)
            return None
        ended = await self._watch(match, exited)
        status.exit_code, status.last_lines = ended.code, list(ended.last_lines)
        status.pid = match.process = None
        how = verdict(ended.code, f"It {ended}.", match.asked, status.restarts, match.entry.restart)
        if ended.left:
            how = replace(how, reason=f"{how.reason} Processes {list(ended.left)} could not be killed.".strip())
        if how.again_s is not None:
            return how
        await self._finish(match, how.state, how.reason)
        return None

    async def _get_ready(self, match: Match) -> None:
        """A module that is to be kept warm may take long to be imported; one may stop the game meanwhile."""
        assert self._starters is not None
        ready = asyncio.ensure_future(self._starters.ready(match.order.game, match.entry))
        wanted = asyncio.ensure_future(match.wanted.wait())
        try:
            done, _ = await asyncio.wait((ready, wanted), timeout=_SOON_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                match.status.reason = "The module that it is a fork of is being imported."
            await asyncio.wait((ready, wanted), return_when=asyncio.FIRST_COMPLETED)
            match.is_fork = ready.done() and ready.result()
        finally:
            for waiting in (ready, wanted):
                waiting.cancel()

    def _start(self, match: Match, exited: asyncio.Future[CommandExit]) -> CommandProcess:
        """In a thread: it blocks until the program runs."""
        order, status, place = match.order, match.status, match.place
        loop = exited.get_loop()
        assert self._starters is not None
        if match.begun.is_set():
            with contextlib.suppress(OSError):
                place.result.unlink()
        else:
            try:
                config = order.config(status.seed, str(match.start_from) if match.start_from else None)
                self.home.make(place, config, with_prefix=uses_wine(match.entry, self._surroundings))
            except OSError as error:
                raise WorkerFailed(f"{place.directory} cannot be made: {error.strerror}.", "Is the disk full?") from error
        states = self.home.states_of(order.game, order.kind) if match.saves else None
        match.quiet_size = match.log_size()
        self.home.save(status)  # before there is anything that could be lost
        what = launch(self.catalogue, order, place, states, self._surroundings, self._free_port)

        def on_exit(game: CommandProcess) -> None:
            assert game.exit is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, exited, game.exit)

        process = self._starters.start(order.game, match.entry, what, place, order.runtime_id, on_exit, warm=match.is_fork)
        status.pid = process.pid
        loop.call_soon_threadsafe(self._has_begun, match, process)
        began = {pid: since for pid in (process.pid, process.guard) if (since := identity.start_time(pid)) is not None}
        self.home.save(status, began)
        return process

    def _has_begun(self, match: Match, process: CommandProcess) -> None:
        first = not match.begun.is_set()
        match.process = process
        if first:
            match.began = asyncio.get_running_loop().time()
            match.deadline = match.began + match.allowed_s
        if not match.status.is_over:
            match.status.state = "starting" if match.entry.limits.start_s is not None else "running"
            match.status.reason = ""
        if match.asked is not None:  # while it was being started
            process.ask_to_stop(match.grace_s)
        match.begun.set()
        log.info(
            "%s: %s %s, process %d", match.status.runtime_id, match.order.game, "begins" if first else "begins again", process.pid
        )
        self.counts[match.order.game, "started" if first else "restarted"] += 1

    async def _watch(self, match: Match, exited: asyncio.Future[CommandExit]) -> CommandExit:
        """Until it has ended, by itself or because it took too long."""
        loop, limits = asyncio.get_running_loop(), match.entry.limits
        begun = loop.time()
        while not exited.done():
            now = loop.time()
            if now >= match.gone_by:
                return CommandExit(None, killed=True)
            due = [match.deadline if match.asked is None else match.gone_by, now + _LOOK_S]
            if match.status.state == "starting":
                due.append(now + _FIRST_LINE_S)
                if match.log_size() != match.quiet_size:
                    match.status.state = "running"
                elif limits.start_s is not None and now >= begun + limits.start_s and match.asked is None:
                    match.end("crashed", f"It printed nothing within {limits.start_s:g} s of its start.", 0.0)
            if now >= match.deadline and match.asked is None:
                match.end_late()
            await asyncio.wait([exited], timeout=max(0.0, min(due) - loop.time()))
        return exited.result()

    async def _pause(self, match: Match, how: Verdict) -> None:
        """Before its next life."""
        status, seconds = match.status, how.again_s or 0.0
        status.state, status.restarts = "starting", status.restarts + 1
        status.reason = f"{how.reason} It is started again in {seconds:g} s."
        log.warning("%s: %s", status.runtime_id, status.reason)
        match.live_again()
        loop = asyncio.get_running_loop()
        await _set_within(match.wanted, min(seconds, max(0.0, match.deadline - loop.time())))
        if match.asked is None and loop.time() >= match.deadline:
            match.end_late()

    async def _finish(self, match: Match, state: State, reason: str) -> None:
        """Written down before anybody is told: then the same id may be played again, in the same directory."""
        seconds = round(asyncio.get_running_loop().time() - match.began, 3)
        status = replace(match.status, state=state, reason=reason, pid=None, finished=time.time(), seconds=seconds)
        size = await self._in(self._disk, self._file_away, match, status)
        match.status = status
        self._matches.pop(status.runtime_id, None)
        self._known[status.runtime_id], self._bytes[status.runtime_id] = status, size
        self.counts[status.game, state] += 1
        level = logging.WARNING if state in ("crashed", "timed-out") else logging.INFO
        log.log(level, "%s: %s", status.runtime_id, f"{state}: {status.reason}" if status.reason else state)
        match.over.set()
        match.begun.set()
        self._forget_oldest()
        if match.entry.states is not None:
            await self._in(self._disk, self.home.prune_states, match.order.game, match.entry.states)

    def _file_away(self, match: Match, status: Status) -> int:
        """In a thread. Returns how many bytes there are of it."""
        status.result, wrong = homes.read_result(match.place.result)
        status.reason = " ".join(filter(None, (status.reason, wrong)))
        size = self.home.size(match.place)
        if match.place.directory.exists():
            self.home.save(status, size=size)
        if status.task_id is not None:
            self.tasks.add(status)
            self.tasks.write()
        return size

    def _forget_oldest(self) -> None:
        total = sum(self._bytes.values())
        for runtime_id in list(self._known):
            if len(self._known) <= self.bounds.keep and total <= self.bounds.keep_bytes:
                return
            total -= self._bytes.get(runtime_id, 0)
            self._drop(runtime_id)

    def _drop(self, runtime_id: str) -> None:
        self._known.pop(runtime_id, None)
        self._bytes.pop(runtime_id, None)
        self.home.discard(self.home.place(runtime_id))

    # -- watching

    async def _watch_all(self) -> None:
        loop, took = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(max(SAMPLE_S, took / SAMPLE_SHARE))
            began = loop.time()
            try:
                for match, used in await self._in(self._disk, _seen, self.running):
                    self._note(match, used)
                took = loop.time() - began
                await self._in(self._disk, self.home.empty_trash)
            except Exception:  # the games go on
                log.exception("looking at the games failed")

    def _note(self, match: Match, used: Usage) -> None:
        status, limits = match.status, match.entry.limits
        if status.is_over or match.process is None or not used.threads:
            return
        status.cpu_s, status.memory_mb, status.threads = round(used.cpu_s, 2), round(used.memory_mb, 1), used.threads
        if match.asked is not None:
            return
        if limits.memory_mb is not None and used.memory_mb > limits.memory_mb:
            match.end("crashed", f"It used {used.memory_mb:,.0f} MB, and {limits.memory_mb:,} may be used.", 0.0)
        elif limits.threads is not None and used.threads > limits.threads:
            match.end("crashed", f"It had {used.threads:,} threads, and {limits.threads:,} are allowed.", 0.0)

    # -- small things

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., _Found], *given: Any) -> _Found:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *given)

    def _free_port(self) -> int:
        """One that was free just now, and was not given to another game lately."""
        with self._ports_lock:
            for _ in range(_PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = int(probe.getsockname()[1])
                if port not in self._ports:
                    break
            self._ports.append(port)
            return port


def _seen(matches: list[Match]) -> list[tuple[Match, Usage]]:
    return [(match, match.seen()) for match in matches]


def _settle(exited: asyncio.Future[CommandExit], how: CommandExit) -> None:
    if not exited.done():
        exited.set_result(how)


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
