"""The process table of a gamecore server: starts, watches, restarts and stops game processes, and keeps their results.

All public methods run on one event loop; blocking work runs in two thread pools.
"""

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
from ludus.gamecore.server import state_dir as state_dirs
from ludus.gamecore.server.catalogue import Catalogue
from ludus.gamecore.server.command import build_command, uses_wine
from ludus.gamecore.server.game_record import EXIT_S, GameRecord
from ludus.gamecore.server.game_status import ALIVE, EndDecision, GameStatus, State, decide_end
from ludus.gamecore.server.launchers import GameLaunchers
from ludus.gamecore.server.request import GameRequest, quote
from ludus.gamecore.server.resource_usage import ResourceUsage
from ludus.gamecore.server.state_dir import StateDir
from ludus.gamecore.server.task_results import TaskResults
from ludus.process import identity
from ludus.process.commands.command import GameExit, GameProcess
from ludus.process.screen_choice import NONE

log = logging.getLogger(__name__)

SAMPLE_S, SAMPLE_SHARE = 2.0, 0.04
"""Interval between measurements of resource usage, extended so that they take at most this share of the time."""

START_REPLY_S = 10.0
_START_THREADS, _DISK_THREADS = 8, 4
"""A start takes some milliseconds, and up to ten seconds on an overloaded machine."""

_PREPARE_S, _FIRST_LINE_S, _POLL_S = 0.1, 0.1, 5.0
_PORTS = 1000
_SEEDS = 1 << 31
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TableLimits:
    """Maximum sizes of a process table."""

    games: int = 200
    """Running games."""
    keep: int = 1000
    """Finished games that are kept with their directories."""
    keep_bytes: int = 4_000_000_000
    """Disk space of finished games."""


class ProcessTable:
    """All running and finished games of one server."""

    def __init__(
        self, catalogue: Catalogue, state_dir: StateDir, limits: TableLimits, base_environment: Mapping[str, str] = os.environ
    ) -> None:
        self.catalogue, self.state_dir, self.limits = catalogue, state_dir, limits
        self._base_environment = base_environment
        self._running: dict[str, GameRecord] = {}
        self._finished: dict[str, GameStatus] = {}
        """Oldest first; includes games of earlier server processes."""
        self._sizes: dict[str, int] = {}
        self.tasks = TaskResults(state_dir.directory / "tasks.jsonl")
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports: deque[int] = deque(maxlen=_PORTS)
        self._ports_lock = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        """Counts by (game, event)."""
        self._closing = False
        self._start_pool = ThreadPoolExecutor(_START_THREADS, "gamecore-start")
        self._disk_pool = ThreadPoolExecutor(_DISK_THREADS, "gamecore-disk")
        self._launchers: GameLaunchers | None = None
        self._sampler: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProcessTable:
        for status, size in await self._run_in(self._disk_pool, self.state_dir.load):
            self._finished[status.runtime_id], self._sizes[status.runtime_id] = status, size
            if status.state == "lost":
                self.counts[status.game, "lost"] += 1
        # Only now: `load` has killed all old processes with this mark.
        self._launchers = GameLaunchers(self._base_environment, self.state_dir.mark)
        await self._run_in(self._disk_pool, self.tasks.load)
        await self._run_in(self._disk_pool, self.state_dir.empty_trash)
        self._sampler = asyncio.create_task(self._sample_usage())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop all games and wait until their processes are gone."""
        if self._closing:
            return
        self._closing = True
        for record in self.running:
            record.request_end("stopped", "The server was stopped.", min(grace_s, record.entry.grace_s))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s + EXIT_S)
        if self._sampler is not None:
            self._sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampler
        if self._launchers is not None:
            await asyncio.to_thread(self._launchers.close)
        for pool in (self._start_pool, self._disk_pool):
            await asyncio.to_thread(pool.shutdown)

    # -- requests of callers

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def finished_count(self) -> int:
        """Number of finished games that are kept."""
        return len(self._finished)

    @property
    def running(self) -> list[GameRecord]:
        return [record for record in self._running.values() if not record.status.is_over]

    async def start(self, request: GameRequest) -> tuple[GameRecord, bool]:
        """Start a game, or find it running. Returns its record and whether it was started now. Raises Refused."""
        state = None
        if request.start_from is not None and request.runtime_id not in self._running:
            state = await self._run_in(self._disk_pool, self.state_dir.choose_state, request)
        present = self._running.get(request.runtime_id)
        if present is not None:
            if present.request != request:
                message = f"{request.runtime_id} is already running with a different request."
                raise Refused(409, "conflict", message, "Stop it first, or choose another runtime_id.")
            await self._wait_until_started(present)
            return present, False
        record = self._admit(request, state)
        life = asyncio.create_task(self._supervise(record))
        self._tasks.add(life)
        life.add_done_callback(self._tasks.discard)
        await self._wait_until_started(record)
        return record, True

    def status(self, runtime_id: str) -> dict[str, Any]:
        """Raises Refused."""
        record = self._running.get(runtime_id)
        if record is not None:
            return record.to_json()
        if runtime_id in self._finished:
            return self._finished[runtime_id].to_json()
        hint = "It was never started, or its record was removed."
        raise Refused(404, "unknown_id", f"There is no game {quote(runtime_id)}.", hint)

    def exists(self, runtime_id: str) -> bool:
        """Whether the game is running or starting."""
        return runtime_id in self._running

    async def refresh(self, runtime_id: str) -> dict[str, Any]:
        """Return the status with current resource usage and output. Raises Refused."""
        record = self._running.get(runtime_id)
        if record is not None and record.process is not None:
            self._record_usage(record, await self._run_in(self._disk_pool, record.usage))
            lines = await self._run_in(self._disk_pool, record.last_lines)
            if not record.status.is_over:
                return {**record.to_json(), "last_lines": lines}
        return self.status(runtime_id)

    def list_games(self, state: str | None = None, task_id: str | None = None) -> list[dict[str, Any]]:
        """List statuses, oldest first, with the last line of output only."""
        games: list[GameStatus | GameRecord] = [*self._finished.values(), *self._running.values()]
        found = [game.to_json() for game in games]
        chosen = [one for one in found if state in (None, one["state"]) and task_id in (None, one["task_id"])]
        return [{**one, "last_lines": one["last_lines"][-1:]} for one in chosen]

    async def wait(self, runtime_id: str, timeout_s: float) -> dict[str, Any]:
        """Wait for the end of a game or the time-out, and return its status. Raises Refused."""
        record = self._running.get(runtime_id)
        if record is not None:
            await _wait_for(record.ended, timeout_s)
            if record.status.is_over:
                return record.status.to_json()  # even if it was removed or started again meanwhile
        return self.status(runtime_id)

    async def stop(self, runtime_id: str, grace_s: float | None = None) -> dict[str, Any]:
        """Stop a running game and return its status. Raises Refused for an unknown id."""
        record = self._running.get(runtime_id)
        if record is None:
            return self.status(runtime_id)
        grace_s = record.entry.grace_s if grace_s is None else grace_s
        record.request_end("stopped", "It was stopped.", grace_s)
        await _wait_for(record.ended, grace_s + EXIT_S + 5.0)
        return record.status.to_json()

    async def log_lines(self, runtime_id: str, lines: int) -> list[str]:
        """Raises Refused."""
        self.status(runtime_id)
        return await self._run_in(self._disk_pool, state_dirs.last_lines, self.state_dir.game_dir(runtime_id).log, lines)

    async def open_artifact(self, runtime_id: str, what: str) -> tuple[BinaryIO, int]:
        """Open the `recording` or `video` that a finished game left, and return its size. Raises Refused."""
        status = self.status(runtime_id)
        if status["state"] in ALIVE:
            raise Refused(409, "conflict", f"Game {runtime_id} is still running and has no {what} yet.", "Wait for its end.")
        directory = self.state_dir.game_dir(runtime_id).path
        return await self._run_in(self._disk_pool, state_dirs.open_artifact, directory, status.get("result"), what)

    async def read(self, file: BinaryIO, size: int) -> bytes:
        """Read the next part of a file in a thread."""
        return await self._run_in(self._disk_pool, file.read, size)

    async def describe_catalogue(self) -> dict[str, Any]:
        """Describe the games that callers can start, without their commands."""
        alike = Counter(record.request.game for record in self.running)
        found = {}
        for name, entry in self.catalogue.games.items():
            saved = await self._run_in(self._disk_pool, self.state_dir.list_states, name)
            found[name] = {
                "modes": list(entry.modes),
                "options": {key: option.model_dump(exclude_none=True) for key, option in entry.options.items()},
                "limits": entry.limits.model_dump(exclude_none=True),
                "states": len(saved),
                "running": alike[name],
            }
        return found

    async def task_results(self, task_id: str) -> list[dict[str, Any]]:
        """Results of the finished games of a task."""
        return await self._run_in(self._disk_pool, self.tasks.games_of, task_id)

    async def remove_task(self, task_id: str | None) -> None:
        """Remove the results of one task; None: of all tasks."""
        self.tasks.remove(task_id)
        await self._run_in(self._disk_pool, self.tasks.write)

    async def forget(self, runtime_id: str) -> None:
        """Remove a finished game and its directory. Raises Refused if it is running."""
        self.status(runtime_id)
        if runtime_id in self._running:
            raise Refused(409, "conflict", f"{runtime_id} is still running.", "Stop it first.")
        self._remove(runtime_id)
        await self._run_in(self._disk_pool, self.state_dir.empty_trash)

    async def clear(self) -> int:
        """Remove all finished games; returns their number."""
        gone = list(self._finished)
        for runtime_id in gone:
            self._remove(runtime_id)
        await self._run_in(self._disk_pool, self.state_dir.empty_trash)
        return len(gone)

    # -- life cycle of a game

    def _admit(self, request: GameRequest, start_from: Path | None) -> GameRecord:
        running = self.running
        entry = self.catalogue.games[request.game]
        if self._closing:
            raise Refused(503, "closing", "This server is stopping.", "Try another one.", 1)
        if len(running) >= self.limits.games:
            raise Refused(503, "full", f"{len(running)} games are running, the limit (--max-games).", "Try again later.", 1)
        alike = sum(record.request.game == request.game for record in running)
        if entry.limits.games is not None and alike >= entry.limits.games:
            raise Refused(503, "full", f"{alike} games of {request.game} are running, their limit.", "Try again later.", 1)
        seed = random.randrange(_SEEDS) if request.seed is None else request.seed  # noqa: S311
        status = GameStatus(
            request.runtime_id,
            request.game,
            request.mode,
            started=time.time(),
            eval_mode=request.eval_mode,
            task_id=request.task_id,
            seed=seed,
            start_from=start_from.name if start_from else None,
        )
        share = 0.0 if entry.states is None or request.eval_mode else entry.states.ratio
        saves = random.random() < (1.0 if share and request.plays_several else share)  # noqa: S311
        record = GameRecord(request, entry, self.state_dir.game_dir(request.runtime_id), status, start_from, saves)
        self._finished.pop(request.runtime_id, None)
        self._sizes.pop(request.runtime_id, None)
        self._running[request.runtime_id] = record
        return record

    async def _wait_until_started(self, record: GameRecord) -> None:
        """Wait up to START_REPLY_S; after that the reply is the status `starting`. Raises Refused if the start failed."""
        await _wait_for(record.started, START_REPLY_S)
        if record.failure is not None:
            raise Refused(500, "cannot_start", record.failure.message, "See the log of the server.")

    async def _supervise(self, record: GameRecord) -> None:
        """Run a game from its first start to its end, with restarts."""
        try:
            while (decision := await self._run_once(record)) is not None:
                await self._wait_before_restart(record, decision)
        except Exception:  # last resort of this task: a bug ends the game, so that callers do not wait for ever
            log.exception("%s: supervising the game failed", record.status.runtime_id)
            if record.process is not None:
                record.process.ask_to_stop(0.0)
            await self._finish(record, "crashed", "The server failed to supervise it; see the server's log.")
        finally:
            record.started.set()

    async def _run_once(self, record: GameRecord) -> EndDecision | None:
        """Run one process of a game. Returns the decision to restart it, or None after its end."""
        status = record.status
        exited: asyncio.Future[GameExit] = asyncio.get_running_loop().create_future()
        await self._prepare(record)
        if record.requested_end is not None:  # stopped before its process existed
            await self._finish(record, *record.requested_end)
            return None
        try:
            record.process = await self._run_in(self._start_pool, self._start, record, exited)
            ended = await self._watch(record, exited)
        except WorkerFailed as error:
            log.error("%s", error)
            record.failure = error if not record.started.is_set() else None
            await self._finish(record, "crashed", error.message)
            return None
        finally:
            await self._run_in(self._start_pool, record.close_screen)
        status.exit_code, status.last_lines = ended.code, list(ended.last_lines)
        status.pid = record.process = None
        decision = decide_end(ended.code, f"It {ended}.", record.requested_end, status.restarts, record.entry.restart)
        if ended.left:
            decision = replace(decision, reason=f"{decision.reason} Processes {list(ended.left)} could not be killed.".strip())
        if decision.again_s is not None:
            return decision
        await self._finish(record, decision.state, decision.reason)
        return None

    async def _prepare(self, record: GameRecord) -> None:
        """Wait for the import of a prefork module, which may take long; the game can be stopped meanwhile."""
        assert self._launchers is not None
        ready = asyncio.ensure_future(self._launchers.wait_until_warm(record.request.game, record.entry))
        wanted = asyncio.ensure_future(record.stop_requested.wait())
        try:
            done, _ = await asyncio.wait((ready, wanted), timeout=_PREPARE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                record.status.reason = "Waiting for the import of its prefork module."
            await asyncio.wait((ready, wanted), return_when=asyncio.FIRST_COMPLETED)
            record.is_forked = ready.done() and ready.result()
        finally:
            for waiting in (ready, wanted):
                waiting.cancel()

    def _start(self, record: GameRecord, exited: asyncio.Future[GameExit]) -> GameProcess:
        """Start the process. Runs in a thread; blocks until the program runs."""
        request, status, game_dir = record.request, record.status, record.game_dir
        loop = exited.get_loop()
        assert self._launchers is not None
        if record.started.is_set():
            with contextlib.suppress(OSError):
                game_dir.result.unlink()
        else:
            try:
                config = request.game_config(status.seed, str(record.start_from) if record.start_from else None)
                self.state_dir.create(game_dir, config, with_prefix=uses_wine(record.entry, self._base_environment))
            except OSError as error:
                message = f"Cannot create {game_dir.path}: {error.strerror}."
                raise WorkerFailed(message, "Check whether the disk is full.") from error
        states = self.state_dir.states_dir(request.game, request.kind) if record.saves_states else None
        record.initial_log_size = record.log_size()
        self.state_dir.save(status)  # before the process starts, so that a killed server can find it
        command = build_command(self.catalogue, request, game_dir, states, self._base_environment, self._free_port)
        if record.entry.display != NONE:
            command = replace(command, environment=record.open_screen(self._base_environment).environment(command.environment))

        def set_exit(found: GameExit | None) -> None:
            assert found is not None
            if not exited.done():
                exited.set_result(found)

        def on_exit(game: GameProcess) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_exit, game.exit)

        process = self._launchers.start(
            request.game, record.entry, command, game_dir, request.runtime_id, on_exit, warm=record.is_forked
        )
        status.pid = process.pid
        loop.call_soon_threadsafe(self._on_started, record, process)
        began = {pid: since for pid in (process.pid, process.guard) if (since := identity.start_time(pid)) is not None}
        self.state_dir.save(status, began)
        return process

    def _on_started(self, record: GameRecord, process: GameProcess) -> None:
        first = not record.started.is_set()
        record.process = process
        if first:
            record.began = asyncio.get_running_loop().time()
            record.deadline = record.began + record.time_limit_s
        if not record.status.is_over:
            record.status.state = "starting" if record.entry.limits.start_s is not None else "running"
            record.status.reason = ""
        if record.requested_end is not None:  # stopped while it was starting
            process.ask_to_stop(record.grace_s)
        record.started.set()
        event = "started" if first else "restarted"
        log.info("%s: %s %s, process %d", record.status.runtime_id, event, record.request.game, process.pid)
        self.counts[record.request.game, event] += 1

    async def _watch(self, record: GameRecord, exited: asyncio.Future[GameExit]) -> GameExit:
        """Wait for the exit of the process, and enforce its time limits."""
        loop, limits = asyncio.get_running_loop(), record.entry.limits
        begun = loop.time()
        while not exited.done():
            now = loop.time()
            if now >= record.kill_deadline:
                return GameExit(None, killed=True)
            due = [record.deadline if record.requested_end is None else record.kill_deadline, now + _POLL_S]
            if record.status.state == "starting":
                due.append(now + _FIRST_LINE_S)
                if record.log_size() != record.initial_log_size:
                    record.status.state = "running"
                elif limits.start_s is not None and now >= begun + limits.start_s and record.requested_end is None:
                    record.request_end("crashed", f"It printed nothing within {limits.start_s:g} s of its start.", 0.0)
            if now >= record.deadline and record.requested_end is None:
                record.request_timeout()
            await asyncio.wait([exited], timeout=max(0.0, min(due) - loop.time()))
        return exited.result()

    async def _wait_before_restart(self, record: GameRecord, decision: EndDecision) -> None:
        """Wait for the back-off, or for a stop request."""
        status, seconds = record.status, decision.again_s or 0.0
        status.state, status.restarts = "starting", status.restarts + 1
        status.reason = f"{decision.reason} Restarting in {seconds:g} s."
        log.warning("%s: %s", status.runtime_id, status.reason)
        record.prepare_restart()
        loop = asyncio.get_running_loop()
        await _wait_for(record.stop_requested, min(seconds, max(0.0, record.deadline - loop.time())))
        if record.requested_end is None and loop.time() >= record.deadline:
            record.request_timeout()

    async def _finish(self, record: GameRecord, state: State, reason: str) -> None:
        """Save the final status, then notify waiters: the same id and directory may be used again after that."""
        seconds = round(asyncio.get_running_loop().time() - record.began, 3)
        status = replace(record.status, state=state, reason=reason, pid=None, finished=time.time(), seconds=seconds)
        size = await self._run_in(self._disk_pool, self._save_result, record, status)
        record.status = status
        self._running.pop(status.runtime_id, None)
        self._finished[status.runtime_id], self._sizes[status.runtime_id] = status, size
        self.counts[status.game, state] += 1
        level = logging.WARNING if state in ("crashed", "timed-out") else logging.INFO
        log.log(level, "%s: %s", status.runtime_id, f"{state}: {status.reason}" if status.reason else state)
        record.ended.set()
        record.started.set()
        self._evict_oldest()
        if record.entry.states is not None:
            await self._run_in(self._disk_pool, self.state_dir.prune_states, record.request.game, record.entry.states)

    def _save_result(self, record: GameRecord, status: GameStatus) -> int:
        """Read and save the result. Runs in a thread; returns the size of the game's directory."""
        status.result, wrong = state_dirs.read_result(record.game_dir.result)
        status.reason = " ".join(filter(None, (status.reason, wrong)))
        size = self.state_dir.size(record.game_dir)
        if record.game_dir.path.exists():
            self.state_dir.save(status, size=size)
        if status.task_id is not None:
            self.tasks.add(status)
            self.tasks.write()
        return size

    def _evict_oldest(self) -> None:
        total = sum(self._sizes.values())
        for runtime_id in list(self._finished):
            if len(self._finished) <= self.limits.keep and total <= self.limits.keep_bytes:
                return
            total -= self._sizes.get(runtime_id, 0)
            self._remove(runtime_id)

    def _remove(self, runtime_id: str) -> None:
        self._finished.pop(runtime_id, None)
        self._sizes.pop(runtime_id, None)
        self.state_dir.discard(self.state_dir.game_dir(runtime_id))

    # -- resource usage

    async def _sample_usage(self) -> None:
        loop, took = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(max(SAMPLE_S, took / SAMPLE_SHARE))
            began = loop.time()
            try:
                for record in self.running:
                    self._record_usage(record, await self._run_in(self._disk_pool, record.usage))
                took = loop.time() - began
                await self._run_in(self._disk_pool, self.state_dir.empty_trash)
            except OSError:  # the games continue without measurements
                log.exception("measuring the games failed")

    def _record_usage(self, record: GameRecord, used: ResourceUsage) -> None:
        status, limits = record.status, record.entry.limits
        if status.is_over or record.process is None or not used.threads:
            return
        status.cpu_s, status.memory_mb, status.threads = round(used.cpu_s, 2), round(used.memory_mb, 1), used.threads
        if record.requested_end is not None:
            return
        if limits.memory_mb is not None and used.memory_mb > limits.memory_mb:
            record.request_end("crashed", f"It used {used.memory_mb:,.0f} MB; the limit is {limits.memory_mb:,}.", 0.0)
        elif limits.threads is not None and used.threads > limits.threads:
            record.request_end("crashed", f"It had {used.threads:,} threads; the limit is {limits.threads:,}.", 0.0)

    async def _run_in(self, pool: ThreadPoolExecutor, function: Callable[..., _Result], *given: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *given)

    def _free_port(self) -> int:
        """Return a free port that was not given to another game recently."""
        with self._ports_lock:
            for _ in range(_PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = int(probe.getsockname()[1])
                if port not in self._ports:
                    break
            self._ports.append(port)
            return port


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
