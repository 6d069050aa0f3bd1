"""`ludus serve` as operators run it: processes, signals, kills, full disks and hot updates, with every answer compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.errors import Refused, Unreachable
from ludus.experiments import runner
from ludus.experiments.runs import checkpoint
from ludus.gateway.server import owner_of
from ludus.models.policy import Policy
from ludus.protocol.client import AsyncClient
from ludus.serving.checkpoint_follower import CheckpointSource
from ludus.storage.local import LocalStore
from ludus.transport.replay_log import ReadCounts, read_recorded
from tests.cli.programs import Program, program
from tests.experiments import small
from tests.gateway.wire import ask, raw, step
from tests.serving.releases import SOON_S, Wanderer, checkpointed, metrics, observations, policy, total
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")]

TOKEN = "s3cret"
AUTHORIZED = f"Authorization: Bearer {TOKEN}"


@contextlib.contextmanager
def served(*words: str | Path) -> Iterator[tuple[Program, int]]:
    with program("serve", *words, "--port", "0", "--json", listens=False) as running:
        yield running, int(json.loads(running.wait_for('"port"'))["port"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With one checkpoint, of version 1."""
    checkpointed(tmp_path / "run", 1, policy(1))
    return tmp_path / "run"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"studio {TOKEN}\n")
    return tmp_path / "token"


def workers(port: int) -> dict[int, int]:
    """Slot → process id, of the workers that listen there."""
    found = {}
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            name = comm.read_text().strip()
            if name.startswith(f"gateway-{port}-"):
                found[int(name.rpartition("-")[2])] = int(comm.parent.name)
    return found


@dataclass
class Tally:
    by_session: dict[str, int] = field(default_factory=dict)
    done: int = 0
    moves: int = 0
    versions: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)

    @property
    def ticks(self) -> int:
        return sum(self.by_session.values())

    def further(self, count: int) -> Callable[[], bool]:
        """Whether from now on every session has played so many ticks more, or it has come to an end."""
        before = dict(self.by_session)
        return lambda: bool(self.wrong or self.refused) or all(self.by_session[s] >= n + count for s, n in before.items())


@contextlib.asynccontextmanager
async def playing(
    port: int, versions: list[Policy], count: int, tally: Tally, ticks: Callable[[int], bool], pause_s: float = 0.0
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Sessions that go on while `ticks(number)` says so, each on a connection of its own; at the end all of them are over."""

    async def play(number: int) -> None:
        session, twin = f"match-{number}", Wanderer(versions)
        async with AsyncClient(f"http://127.0.0.1:{port}", TOKEN, timeout_s=SOON_S) as client:
            try:
                await client.start(session)
                tick = 0
                while ticks(tick):
                    seen = observations(1, seed=1000 * number + tick)[0]
                    answer = json.loads(await client.tick(session, json.dumps({"observation": seen}).encode()))["action"]
                    if not twin.check(seen, answer):
                        tally.wrong.append(f"{session}: tick {tick}: {answer}")
                        return
                    tick += 1
                    tally.by_session[session] = tick
                    await asyncio.sleep(pause_s)
                await client.end(session)
                tally.done += 1
            except Refused as refused:
                tally.refused.append((session, refused.status, refused.error))
            except Unreachable as error:
                tally.refused.append((session, 0, str(error)))
            finally:
                tally.moves += twin.moves
                tally.versions.add(twin.at + 1)

    tasks = [asyncio.create_task(play(number)) for number in range(count)]
    try:
        yield tasks
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
    finally:
        for task in tasks:
            task.cancel()


async def reached(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():
            await asyncio.sleep(0.02)


def test_sigterm_under_load_lets_every_session_finish_and_takes_no_other(run: Path, token: Path) -> None:
    tally, over = Tally(), threading.Event()
    options: list[Any] = ["--workers", "2", "--token-file", token, "--drain-s", "60"]
    with served(run, *options) as (running, port):

        async def under_load() -> float:
            async with playing(port, [policy(1)], 40, tally, lambda _: not over.is_set(), 0.005):
                await reached(lambda: tally.ticks > 400)
                running.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(wait_until, lambda: ask(port, raw("GET /ready")).status == 503)
                refused = await asyncio.to_thread(ask, port, step("start", "late", headers=[AUTHORIZED]))
                assert refused.refusal == (503, "draining")
                before = tally.ticks
                await reached(lambda: tally.ticks > before + 400)
                over.set()
            return time.monotonic()

        ended = asyncio.run(under_load())
        code, _, err = running.finish()
        assert time.monotonic() - ended < SOON_S, "it ends with the last session, not with the drain time"
    assert (tally.wrong, tally.refused, tally.done) == ([], [], 40)
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.long
def test_who_plays_on_after_the_drain_time_is_told_and_the_exit_is_in_order(run: Path, token: Path) -> None:
    tally = Tally()
    with served(run, "--workers", "2", "--token-file", token, "--drain-s", "1") as (running, port):

        async def under_load() -> None:
            async with playing(port, [policy(1)], 10, tally, lambda _: True, 0.005):
                await reached(lambda: tally.ticks > 100)
                running.process.send_signal(signal.SIGTERM)

        began = time.monotonic()
        asyncio.run(under_load())
        code, _, err = running.finish()
        assert time.monotonic() - began >= 1
    assert (tally.wrong, tally.done, len(tally.refused)) == ([], 0, 10)
    assert code == 0, err


def test_a_killed_worker_costs_its_own_sessions_only(run: Path, token: Path) -> None:
    tally, over = Tally(), threading.Event()
    with served(run, "--workers", "2", "--token-file", token) as (_, port):

        async def under_load() -> int:
            async with playing(port, [policy(1)], 40, tally, lambda _: not over.is_set(), 0.005):
                await reached(lambda: tally.ticks > 400)
                pids = workers(port)
                assert set(pids) == {0, 1}
                os.kill(pids[1], signal.SIGKILL)
                await reached(lambda: workers(port).get(1, pids[1]) != pids[1])
                before = tally.ticks
                await reached(lambda: tally.ticks > before + 200)
                over.set()
            return pids[1]

        asyncio.run(under_load())
        theirs = {f"match-{n}" for n in range(40) if owner_of(f"match-{n}".encode(), 2) == 1}
        assert tally.wrong == []
        assert {session for session, _, _ in tally.refused} == theirs
        assert {(status, error) for _, status, error in tally.refused} == {(410, "session_lost")}
        again = Tally()

        async def afterwards() -> None:
            async with playing(port, [policy(1)], 40, again, lambda tick: tick < 10):
                pass

        asyncio.run(afterwards())
        assert (again.done, again.wrong, again.refused) == (40, [], [])
        wait_until(lambda: total(metrics(port, AUTHORIZED), "ludus_worker_restarts_total") == 1)


@pytest.mark.long
def test_200_sessions_that_remember_over_hot_updates(run: Path, token: Path, tmp_path: Path) -> None:
    """Two workers, with everything on: no failed tick, no wrong answer, and what was recorded is what was played."""
    versions, tally, over, count = [policy(n) for n in range(1, 6)], Tally(), threading.Event(), 200
    log, replay = tmp_path / "access.log", tmp_path / "replay"
    options: list[Any] = ["--workers", "2", "--token-file", token, "--follow", "--max-live-versions", "1", "--access-log", log]
    options += ["--record", replay, "--record-fraction", "1"]
    with served(run, *options) as (running, port):

        def everywhere(version: int) -> bool:
            found = metrics(port, AUTHORIZED)
            return total(found, "ludus_model_version") == 2 * version

        async def under_load() -> None:
            async with playing(port, versions, count, tally, lambda _: not over.is_set(), 0.02):
                await reached(lambda: len(tally.by_session) == count)
                await reached(tally.further(2))
                for version in range(2, 6):
                    checkpointed(run, version, versions[version - 1])
                    await asyncio.to_thread(wait_until, lambda version=version: everywhere(version))
                    await reached(tally.further(2))
                over.set()

        asyncio.run(under_load())
        assert (tally.wrong[:3], tally.refused[:3], tally.done) == ([], [], count)
        wait_until(lambda: total(metrics(port, AUTHORIZED), "ludus_sessions_moved_total", how="carried") == 4 * count)
        found = metrics(port, AUTHORIZED)
        running.process.send_signal(signal.SIGTERM)
        code, _, err = running.finish()
    assert code == 0, err
    assert (tally.versions, tally.moves) == ({5}, 4 * count)
    assert total(found, "ludus_errors_total") == 0
    assert total(found, "ludus_update_refused_total") == 0
    text = log.read_text()
    assert TOKEN not in text
    lines = [json.loads(line) for line in text.splitlines()]
    for kind in ("start", "end"):
        assert sum(line["kind"] == kind and line["status"] == 200 and line["caller"] == "studio" for line in lines) == count
    recorded_as_played(replay, versions, count)


def recorded_as_played(where: Path, versions: list[Policy], count: int) -> None:
    counts = ReadCounts()
    segments = list(read_recorded(where, counts=counts))
    assert (counts.damaged, counts.torn, counts.unfit) == (0, 0, 0)
    assert len({int(segment.origin[0]) for segment in segments}) == count
    for segment in segments[::10]:
        valid = int(segment.valid.sum())
        twin = Wanderer([versions[int(segment.version[0, 0]) - 1]])
        for seen, action in zip(segment.observation[:valid, 0], segment.action[:valid, 0], strict=True):
            assert twin.check(seen, np.clip(action, -1, 1))


def test_a_training_is_followed_while_it_runs(tmp_path: Path) -> None:
    run, done = tmp_path / "run", threading.Event()
    small.train(run, 1, top={"checkpoint_freq": 1})
    faults: list[BaseException] = []

    def train() -> None:
        try:
            runner.resume(run, stop={"iterations": 8})
        except BaseException as error:
            faults.append(error)
        done.set()

    played: list[tuple[list[list[float]], list[int]]] = []
    with served(run, "--follow", "--workers", "1") as (_, port):

        async def under_load() -> None:
            random = np.random.default_rng(0)
            async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=SOON_S) as client:
                number = 0
                while not done.is_set() or number < 5:
                    seen = random.uniform(-2, 2, (20, 4)).tolist()
                    await client.start(f"m{number}")
                    answers = [json.loads(await client.tick(f"m{number}", json.dumps({"observation": o}).encode())) for o in seen]
                    await client.end(f"m{number}")
                    played.append((seen, [answer["action"] for answer in answers]))
                    number += 1

        training = threading.Thread(target=train, daemon=True)
        training.start()
        asyncio.run(under_load())
        training.join(SOON_S)
        assert not faults, faults
        newest = CheckpointSource(str(run)).release().version
        wait_until(lambda: total(metrics(port), "ludus_model_version") == newest)
        assert total(metrics(port), "ludus_update_refused_total") == 0
        assert total(metrics(port), "ludus_errors_total") == 0
    store = LocalStore(run)
    policies = [checkpoint.read(store, name).policy("model") for name in checkpoint.names(store)] if played else []
    assert len(policies) == 8
    for seen, actions in played:
        by_version = [made.act(np.array(seen, np.float32)).action.tolist() for made in policies]
        assert actions in by_version, "one version has played all of it"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A very small file system."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr!r}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.long
def test_a_full_disk_stops_the_log_and_the_recording_and_nothing_else(run: Path, token: Path, disk: Path) -> None:
    tally, total_ticks = Tally(), 30
    options: list[Any] = ["--token-file", token, "--access-log", disk / "log", "--log-ticks"]
    options += ["--record", disk / "replay", "--record-fraction", "1"]
    with served(run, *options) as (running, port):

        async def load(tally: Tally) -> None:
            async with playing(port, [policy(1)], 60, tally, lambda tick: tick < total_ticks):
                pass

        asyncio.run(load(tally))
        assert (tally.done, tally.wrong, tally.refused) == (60, [], [])
        wait_until(lambda: total(metrics(port, AUTHORIZED), "ludus_log_dropped_total") > 0)
        wait_until(lambda: total(metrics(port, AUTHORIZED), "ludus_replay_dropped_total") > 0)
        again = Tally()
        asyncio.run(load(again))
        assert (again.done, again.wrong, again.refused) == (60, [], [])
        running.process.send_signal(signal.SIGTERM)
        code, _, err = running.finish()
    assert code == 0, err
    counts = ReadCounts()
    list(read_recorded(disk / "replay", counts=counts)) if (disk / "replay").exists() else []
    assert counts.damaged == 0
    whole = (disk / "log").read_bytes()
    for line in whole[: whole.rfind(b"\n")].splitlines():
        assert line.startswith(b"{")
