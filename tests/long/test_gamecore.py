"""A gamecore server, its keepers, guards and games are killed, and games misbehave: nothing is left, and the server goes on."""

from __future__ import annotations

import http.client
import os
import random
import signal
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ludus.gateway.actor import Actor
from ludus.process import identity, procfs
from tests.local_servers import gateway
from tests.long.gamecore_rig import PACED, Answer, Server, python
from tests.long.record import record
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

GAMES, KILLS = 50, 20
GONE_S = 15.0
BACK_S = 60.0

STUBBORN = textwrap.dedent(
    """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for leaves in (False, True):
        if os.fork() == 0:
            if leaves:
                os.setsid()
                if os.fork():
                    os._exit(0)
            time.sleep(3600)
    print("all are here", flush=True)
    time.sleep(3600)
    """
)
STUBBORN_PROCESSES = 3

FLOOD = textwrap.dedent(
    """
    import itertools, os
    words = [bytes(word) for word in itertools.islice(itertools.product(range(97, 123), repeat=3), 4000)]
    block = b"".join(b"%s says %d\\n" % (word, i) for i, word in enumerate(words))
    while True:
        os.write(1, block)
    """
)

FORKS = textwrap.dedent(
    """
    import os, time
    print("up", flush=True)
    while True:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        os.wait()
        time.sleep(0.02)
    """
)

WARM = textwrap.dedent(
    f"""
    import sys
    def main(argv):
        exec({PACED!r})
    if __name__ == "__main__":
        main(sys.argv[1:])
    """
)

CATALOGUE: dict[str, Any] = {
    "paced": python(PACED),
    "stubborn": python(STUBBORN),
    "flood": python(FLOOD, limits={"log_mb": 2}),
    "forks": python(FORKS),
    "silent": python("import time; time.sleep(3600)", limits={"start_s": 1}),
    "hangs": python("import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"),
    "crashes": python("print('oh no'); raise SystemExit(9)", restart={"on": "crash", "times": 2, "backoff_s": 0.1}),
    "lives": python(PACED, restart={"on": "crash", "times": 1000, "backoff_s": 0.1}),
    "warm": {**python(WARM, restart={"on": "crash", "times": 1000, "backoff_s": 0.1}), "warm": "rig_warm_game"},
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server finds the module that is kept warm."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "rig_warm_game.py").write_text(WARM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    return folder


@pytest.fixture
def server(tmp_path: Path, modules: Path) -> Iterator[Server]:
    with Server(tmp_path / "server", CATALOGUE) as server:
        yield server


def all_of(server: Server) -> dict[int, str]:
    """Every process of it, with when it began."""
    return {pid: since for pid in server.everything() if (since := identity.start_time(pid)) is not None}


def alive(began: dict[int, str]) -> list[int]:
    return [pid for pid, since in began.items() if identity.is_alive(pid, since)]


# -- the server is killed


@pytest.mark.parametrize("words", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_games_end_with_a_server_that_is_killed_and_the_next_one_serves_their_ids(
    words: tuple[str, ...], tmp_path: Path, modules: Path
) -> None:
    names = {f"g-{i}": ("paced", "stubborn", "warm")[i % 3] for i in range(GAMES)}
    with Server(tmp_path / "server", CATALOGUE, *words) as server, ThreadPoolExecutor(8) as pool:
        for life in range(2):
            states = list(pool.map(lambda name: server.play(name, names[name]), names))
            assert {state["state"] for state in states} == {"running"}
            wait_until(
                lambda: all(
                    state["last_lines"] or "all are here" in server.ask("GET", f"/v1/games/{name}/log")
                    for name, kind in names.items()
                    if kind == "stubborn" and (state := server.state(name))
                ),
                what="the children of the stubborn",
            )
            first = server.pid
            supervisor = {server.process.pid} if words and server.process else set()
            before = {pid: since for pid, since in all_of(server).items() if pid not in supervisor}
            assert len(before) > 2 * GAMES
            assert len(procfs.list_children(first)) == 2, "one keeper is warm"
            os.kill(first, signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda before=before: not alive(before), GONE_S, what="the end of all games")  # type: ignore[misc]
            gone_s = time.monotonic() - killed
            if not words:
                assert server.process is not None
                server.process.wait(10)
                server.start()
            wait_until(server.is_up, BACK_S, what="the next server")
            back_s = time.monotonic() - killed
            assert server.pid != first
            lost = {state["runtime_id"]: state for state in server.games("lost")}
            assert set(lost) == set(names)
            assert all(state["pid"] is None and state["reason"] for state in lost.values())
            assert not alive(before)
            record(
                "gamecore server killed",
                words=" ".join(words),
                life=life,
                games=GAMES,
                processes=len(before),
                gone_s=gone_s,
                back_s=back_s,
            )
        again = server.play("g-0", "paced")
        assert (again["state"], server.halt("g-0")["state"]) == ("running", "stopped")
        assert server.stop() == 0
        assert server.everything() == {}


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path, modules: Path) -> None:
    with Server(tmp_path / "server", CATALOGUE, "--supervise") as server:
        for i in range(9):
            server.play(f"g-{i}", ("paced", "stubborn", "warm")[i % 3])
        before = all_of(server)
        assert len(before) > 18
        assert server.process is not None
        server.process.kill()
        wait_until(lambda: not alive(before), 2 * GONE_S, what="the end of all")
        server.process.wait(10)
        server.start()
        assert {state["state"] for state in server.games()} <= {"lost", "stopped"}
        assert server.play("g-0", "stubborn")["state"] == "running"


def test_a_server_that_is_told_to_end_takes_all_games_along(server: Server) -> None:
    for i in range(10):
        server.play(f"g-{i}", ("paced", "stubborn", "forks", "hangs", "warm")[i % 5])
    assert server.stop() == 0
    assert server.everything() == {}
    server.start()
    assert {state["state"] for state in server.games()} == {"stopped"}


# -- games that misbehave


def test_games_that_misbehave_are_ended_and_disturb_nobody(server: Server) -> None:
    innocent = server.play("innocent", "paced")
    for name in ("flood", "stubborn", "forks", "hangs", "silent", "crashes"):
        server.play(name, name, **({"timeout_s": 2.0} if name == "hangs" else {}))
    began, slowest = time.monotonic(), 0.0
    while time.monotonic() - began < 8.0:
        asked = time.monotonic()
        assert server.state("innocent")["pid"] == innocent["pid"]
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.05)
    place = server.state_dir / "games" / "flood"
    size = sum(file.stat().st_size for file in place.glob("game.log*"))
    assert 0 < size <= 2_000_000 + 4096
    assert (state := server.state("hangs"))["state"] == "timed-out", state
    assert (state := server.state("silent"))["state"] == "crashed", state
    assert "said nothing within 1 s" in state["reason"]
    crashed = server.state("crashes")
    assert (crashed["state"], crashed["exit_code"], crashed["restarts"]) == ("crashed", 9, 2)
    assert crashed["last_lines"][-1] == "oh no"
    took: dict[str, float] = {}
    for name in ("flood", "stubborn", "forks"):
        asked = time.monotonic()
        assert server.halt(name, grace_s=0.5)["state"] == "stopped"
        took[name] = round(time.monotonic() - asked, 2)
    assert server.state("innocent")["state"] == "running"
    server.halt("innocent")
    # The server, and its keepers: nothing of any game.
    wait_until(
        lambda: all("gamecore" in line or "keeper" in line for line in server.everything().values()), what="that nothing is left"
    )
    assert len(procfs.list_descendants(server.pid)) <= 2
    record("gamecore games misbehave", slowest_answer_s=slowest, **{f"stop_{name}_s": value for name, value in took.items()})


# -- the actor is gone


class Idle(Actor):
    """Plays without doing anything."""

    asked = threading.Event()

    async def start(self, session: str, body: bytes) -> bytes:
        return b""

    async def tick(self, body: bytes) -> bytes:
        self.asked.set()
        seats = msgpack.unpackb(body)["seats"]
        return msgpack.packb({"actions": {seat: [0, 0, 0, 0] for seat in seats}})  # type: ignore[no-any-return]

    async def end(self, body: bytes) -> bytes:
        return b""


@pytest.mark.parametrize(("on_lost", "state"), [("rule", "finished"), ("end", "crashed")])
def test_a_match_whose_actor_is_gone_comes_to_an_end(on_lost: str, state: str, tmp_path: Path) -> None:
    with Server(tmp_path / "server", None) as server:
        Idle.asked.clear()
        with gateway(Idle) as served:
            options = {"on_lost": on_lost, "patience_s": 1.0, "pace": 200}
            camps = [None, {"url": served.url, "timeout_s": 1.0}]
            server.play("m-1", "arena", mode="1v1", camps=camps, options=options, max_frames=2000, seed=1)
            assert Idle.asked.wait(60)
        ended = wait_until(lambda: _over(server, "m-1"), 120, what="the end of the match")
        assert ended["state"] == state, ended
        assert ended["result"] is not None
        assert ended["restarts"] == 0


def _over(server: Server, name: str) -> dict[str, Any] | None:
    state = server.state(name)
    return None if state["state"] in ("starting", "running") else state


# -- random parts


def test_random_parts_are_killed_and_games_go_on(tmp_path: Path, modules: Path) -> None:
    """Whoever wants twelve games to run starts those again that are over, as a trainer does."""
    chance, tally = random.Random(7), Counter[str]()
    names = {f"g-{i}": ("lives", "warm", "stubborn")[i % 3] for i in range(12)}
    over = threading.Event()
    refused: list[str] = []

    def want(server: Server) -> None:
        while not over.is_set():
            for name, kind in names.items():
                try:
                    server.play(name, kind)
                except (OSError, http.client.HTTPException):
                    time.sleep(0.1)  # it is being restarted
                except Answer as answer:
                    if answer.status not in (500, 503):
                        refused.append(str(answer))
            over.wait(0.2)

    with Server(tmp_path / "server", CATALOGUE, "--supervise") as server:
        wanting = threading.Thread(target=want, args=(server,), daemon=True)
        wanting.start()
        slowest = 0.0
        for kill in range(KILLS):
            wait_until(lambda: _running(server) == set(names), BACK_S, what=f"all to run before kill {kill}")
            part, victim = _victim(server, chance)
            tally[part] += 1
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            wait_until(lambda victim=victim: identity.start_time(victim) is None, 10, what="that it is gone")  # type: ignore[misc]
            wait_until(lambda: _running(server) == set(names), BACK_S, what=f"all to run after the {part} was killed")
            slowest = max(slowest, time.monotonic() - began)
        over.set()
        wanting.join(30)
        assert refused == []
        for name in names:
            server.halt(name, grace_s=0.2)
        wait_until(lambda: _strays(server) == [], GONE_S, what="only those that look after games")
        descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        assert server.stop() == 0
        assert server.everything() == {}
        record(
            "gamecore parts killed",
            kills=KILLS,
            back_s=slowest,
            descriptors=descriptors,
            **{part.replace(" ", "_"): n for part, n in tally.items()},
        )


def _running(server: Server) -> set[str]:
    try:
        return {state["runtime_id"] for state in server.games("running") if state["pid"] and identity.start_time(state["pid"])}
    except (OSError, http.client.HTTPException, Answer):
        return set()


def _victim(server: Server, chance: random.Random) -> tuple[str, int]:
    keepers = procfs.list_children(server.pid)
    guards = [guard for keeper in keepers for guard in procfs.list_children(keeper)]
    games = [game for guard in guards for game in procfs.list_children(guard)]
    part = chance.choice(["server", "keeper", "guard", "game", "game"])
    return part, chance.choice({"server": [server.pid], "keeper": keepers, "guard": guards, "game": games}[part])


def _strays(server: Server) -> list[str]:
    keepers = set(procfs.list_children(server.pid))
    ours = {server.pid, *keepers} | ({server.process.pid} if server.process else set())
    return [line for pid, line in server.everything().items() if pid not in ours]
