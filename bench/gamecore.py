"""A gamecore server with many games: what a start takes, what a game costs, and that nothing stays behind.

    python -m bench.gamecore --warm       games of Python as commands, and as forks of a warm spawner: time and memory of each
    python -m bench.gamecore --starts     a start request beside 100 games that run at 15 ticks a second
    python -m bench.gamecore --leaks      200 games, started and stopped ten times over: processes, threads, descriptors, memory
    … --smoke: few games and one round, to see that it works

The server is `ludus gamecore serve`, asked over HTTP. Whole measurements are kept with date and commit in
`bench/results/gamecore-*`, others (--smoke) in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.train import Row
from bench.transport import keep
from ludus.process import procfs
from ludus.process.commands.command import GameProcess, Games
from tests.long.gamecore_rig import MARK, PACED, Server, percentile, python
from tests.waiting import wait_until

ARENA = "ludus.games.arena.main"
PACE = 15
CALLERS = 8
SPAWNERS = 2
SETTLED_S = 60.0
LONG = ("--mode", "3v3", "--pace", str(PACE))
SHORT = ("--mode", "3v3", "--max-frames", "1")


@dataclass(frozen=True)
class Size:
    games: int = 200
    rounds: int = 10
    beside: int = 100
    starts: int = 300
    each: int = 15


WHOLE, SMOKE = Size(), Size(games=20, rounds=2, beside=10, starts=20, each=5)


# -- what is looked at ------------------------------------------------------------------------------------------------------


def memory(pid: int) -> dict[str, float]:
    """Of one process, in MB. Pss: what several share is divided among them. Private: what nobody shares."""
    found: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[name] = int(rest.split()[0]) / 1024
    return {"rss_mb": found["Rss"], "pss_mb": found["Pss"], "private_mb": found["Private_Clean"] + found["Private_Dirty"]}


def seen(server: Server) -> Row:
    """The server's process and all below it; first it alone."""
    below = procfs.list_descendants(server.pid)
    status = Path(f"/proc/{server.pid}/status").read_text()
    pss = 0.0
    for pid in below:
        with contextlib.suppress(OSError, KeyError):  # it has just ended
            pss += memory(pid)["pss_mb"]
    return {
        "threads": int(status.split("Threads:")[1].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{server.pid}/fd")),
        **{f"server_{name}": value for name, value in memory(server.pid).items() if name != "pss_mb"},
        "processes_below": len(below),
        "pss_below_mb": pss,
    }


def catalogue(pace: int = PACE) -> dict[str, Any]:
    """The Arena twice, as a command and as forks; and a script of a few lines, which costs what Python costs."""
    arena = {
        "command": ["{python}", "-P", "-m", "ludus.games.arena"],
        "modes": ["1v1", "3v3"],
        "inherit": [MARK],
        "restart": {"on": "never"},
        "options": {"pace": {"type": "number", "minimum": 0, "maximum": 1000, "default": pace}},
    }
    return {"arena": arena, "arena-warm": {**arena, "warm": ARENA}, "script": python(PACED)}


def _mode(game: str) -> str:
    return "1v1" if game == "script" else "3v3"


# -- one game ---------------------------------------------------------------------------------------------------------------


def warm(size: Size) -> list[Row]:
    """Of `Games` itself, without the server: as a command and as a fork, in turn."""
    ways = {"command": [sys.executable, "-P", "-m", "ludus.games.arena"], "fork": [ARENA]}
    with tempfile.TemporaryDirectory() as folder, Games(warm=ARENA) as forks, Games() as plain:
        began = time.monotonic()
        forks.wait_until_warm()
        rows: list[Row] = [{"way": "spawner", "seconds": time.monotonic() - began, **memory(forks.spawner_pid)}]
        running: list[tuple[Row, GameProcess]] = []
        for number in range(size.each):
            for way, words in ways.items():
                games, is_warm = (forks, True) if way == "fork" else (plain, False)
                before = time.monotonic()
                game = games.start([*words, *SHORT], warm=is_warm, log=Path(folder) / f"short-{way}-{number}.log")
                row: Row = {"way": way, "start_ms": 1000 * (time.monotonic() - before)}
                ended = game.wait(SETTLED_S)
                if ended is None or ended.code != 0:
                    raise RuntimeError(f"a match of one tick: {ended}")
                row["over_ms"] = 1000 * (time.monotonic() - before)
                game = games.start([*words, *LONG], warm=is_warm, log=Path(folder) / f"{way}-{number}.log")
                running.append((row, game))
        wait_until(lambda: all(_plays(game.pid) for _, game in running), 5 * SETTLED_S, what="that all play")
        time.sleep(3.0)
        for row, game in running:
            guard = {f"guard_{name}": value for name, value in memory(game.guard).items()}
            rows.append(row | {"threads": game.count_threads()} | memory(game.pid) | guard)
        for _, game in running:
            game.ask_to_stop()
        rows.append({"way": "ends", "codes": sorted({str(game.stop().code) for _, game in running})})
    return rows


def _plays(pid: int) -> bool:
    """Its event loop is there, and waits for the next tick from then on."""
    with contextlib.suppress(FileNotFoundError):  # one was closed just now: it does something else
        return any("eventpoll" in str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def warm_table(rows: Sequence[Row]) -> str:
    lines = [
        "| | games | start, ms | a match of one tick, ms | RSS, MB | Pss, MB | private, MB | its guard, private, MB | threads |",
        "|---|" + "---:|" * 8,
    ]
    for way in ("command", "fork"):
        found = [row for row in rows if row["way"] == way]
        keys = ("start_ms", "over_ms", "rss_mb", "pss_mb", "private_mb", "guard_private_mb", "threads")
        lines.append(f"| {way} | {len(found)} | " + " | ".join(_spread([row[key] for row in found]) for key in keys) + " |")
    spawner = rows[0]
    lines += [
        "",
        f"The warm spawner itself: imported and prepared within {spawner['seconds']:.1f} s, {spawner['private_mb']:.0f} MB private.",
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    digits = 0 if middle >= 100 else 1 if middle >= 1 else 2
    return f"{middle:.{digits}f} [{least:.{digits}f}–{most:.{digits}f}]"


# -- a start beside many ------------------------------------------------------------------------------------------------------


def starts(size: Size) -> list[Row]:
    """One caller, one request after the other: a game is started, and stopped by another thread, so that as many run all the time."""
    rows: list[Row] = []
    for game in catalogue():
        with _server() as server, ThreadPoolExecutor(CALLERS) as pool:
            try:
                _latencies(server, pool, game, 1, "first")
                alone = _latencies(server, pool, game, min(size.starts, 50), "alone")
                list(pool.map(lambda i, game=game: server.play(f"beside-{i}", game, mode=_mode(game)), range(size.beside)))
                if game != "script":
                    wait_until(
                        lambda server=server: all(_plays(one["pid"]) for one in server.games("running")),
                        300,
                        what="that all play",
                    )
                time.sleep(3.0)
                cpu = _load(server, 5.0)
                beside = _latencies(server, pool, game, size.starts, "beside")
                running = len(server.games("running"))
                over = [
                    state
                    for state in server.games()
                    if "beside-" in state["runtime_id"] and state["state"] not in ("running", "stopped")
                ]
                if over:
                    raise RuntimeError(f"{len(over)} of {size.beside} are over: {over[0]}")
                found = seen(server)
            except Exception as error:  # one kind that does not work does not hide the others
                rows.append({"game": game, "error": f"{type(error).__name__}: {error}"[:500]})
                print(rows[-1], flush=True)
                continue
            row: Row = {
                "game": game,
                "beside": size.beside,
                "running": running,
                "cores": cpu,
                "load": os.getloadavg()[0],
                **found,
            }
            for what, values in (("alone", alone), ("beside", beside)):
                row |= {
                    f"{what}_ms": {
                        "n": len(values),
                        "median": statistics.median(values),
                        "p99": percentile(values, 0.99),
                        "max": max(values),
                    }
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def _latencies(server: Server, pool: ThreadPoolExecutor, game: str, count: int, name: str) -> list[float]:
    """Of the request, in milliseconds: until the server says that the process runs."""
    found, stops = [], []
    for i in range(count):
        began = time.perf_counter()
        state = server.play(f"{name}-start-{i}", game, mode=_mode(game))
        found.append(1000 * (time.perf_counter() - began))
        if state["state"] not in ("starting", "running"):
            raise RuntimeError(f"the game did not start: {state}")
        stops.append(pool.submit(server.halt, f"{name}-start-{i}", 1.0))
        stops[i - 1 if i else 0].result(60)  # at most two more than are to run
    for stop in stops:
        stop.result(60)
    return found


def _load(server: Server, seconds: float) -> float:
    """Cores that the server and all its games use."""

    def used() -> float:
        total = 0.0
        for pid in (server.pid, *procfs.list_descendants(server.pid)):
            with contextlib.suppress(OSError):
                total += _cpu_s(pid)
        return total

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def starts_table(rows: Sequence[Row]) -> str:
    lines = [
        "| game | alone: median, ms | p99 | beside 100: median, ms | p99 | most | cores used | server, MB | all games, Pss, MB |",
        "|---|" + "---:|" * 8,
    ]
    for row in rows:
        if "error" not in row:
            alone, beside = row["alone_ms"], row["beside_ms"]
            figures = [alone["median"], alone["p99"], beside["median"], beside["p99"], beside["max"]]
            lines.append(
                f"| {row['game']} | " + " | ".join(f"{value:.1f}" for value in figures)
                + f" | {row['cores']:.2f} | {row['server_private_mb']:.0f} | {row['pss_below_mb']:,.0f} |"
            )  # fmt: skip
    return "\n".join(lines)


# -- what stays ---------------------------------------------------------------------------------------------------------------


def leaks(size: Size) -> list[Row]:
    rows: list[Row] = []
    for game in ("script", "arena-warm"):
        with _server() as server, ThreadPoolExecutor(CALLERS) as pool:
            rows.append({"game": game, "round": 0, "when": "before", **seen(server)})
            for number in range(1, size.rounds + 1):
                try:
                    rows += _round(server, pool, game, number, size.games)
                except Exception as error:  # what was measured before it is worth keeping
                    rows.append({"game": game, "round": number, "error": f"{type(error).__name__}: {error}"[:500]})
                    print(rows[-1], flush=True)
                    break
            code = server.stop()
            rows.append({"game": game, "round": size.rounds, "when": "ended", "code": code, "left": len(server.everything())})
            print(rows[-1], flush=True)
    return rows


def _round(server: Server, pool: ThreadPoolExecutor, game: str, number: int, count: int) -> list[Row]:
    names = [f"{game}-{i}" for i in range(count)]
    began = time.monotonic()
    list(pool.map(lambda name: server.play(name, game, mode=_mode(game)), names))
    started_s = time.monotonic() - began
    wait_until(lambda: len(server.games("running")) == count, 60, what="all to run")
    running = {"game": game, "round": number, "when": "running", "took_s": started_s, **seen(server)}
    began = time.monotonic()

    def halt(name: str) -> None:
        server.halt(name)
        server.hang_up()

    stopping = [threading.Thread(target=halt, args=(name,), daemon=True) for name in names]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(120)
    stopped_s = time.monotonic() - began
    states = {state["state"] for state in server.games()}
    wait_until(lambda: len(procfs.list_descendants(server.pid)) <= SPAWNERS, 30, what="that only spawners are below it")
    time.sleep(2.0)  # connections of the threads that asked are closed
    after = {"game": game, "round": number, "when": "stopped", "took_s": stopped_s, "states": sorted(states), **seen(server)}
    for row in (running, after):
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return [running, after]


def leaks_table(rows: Sequence[Row]) -> str:
    lines = [
        "| game | round | | took, s | processes below | server: threads | descriptors | private, MB | all below, Pss, MB |",
        "|---|---:|---|" + "---:|" * 6,
    ]
    for row in rows:
        if "threads" in row:
            lines.append(
                f"| {row['game']} | {row['round']} | {row['when']} | {row.get('took_s', 0):.1f} | {row['processes_below']} | {row['threads']} | "
                f"{row['descriptors']} | {row['server_private_mb']:.1f} | {row['pss_below_mb']:,.0f} |"
            )  # fmt: skip
    ended = [
        f"{row['game']}: exit code {row['code']}, {row['left']} processes left" for row in rows if row.get("when") == "ended"
    ]
    return "\n".join([*lines, "", "After the end of the server: " + "; ".join(ended) + "."])


@contextlib.contextmanager
def _server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server", catalogue()) as server:
        yield server


PARTS: dict[str, tuple[Callable[[Size], list[Row]], Callable[[Sequence[Row]], str], str]] = {
    "warm": (warm, warm_table, "One game: a command, and a fork of a warm spawner"),
    "starts": (starts, starts_table, "A start request beside 100 games at 15 ticks a second"),
    "leaks": (leaks, leaks_table, "200 games, started and stopped ten times over"),
}

HOW = {
    "warm": f"""\
The Arena, 3v3 between rule AIs, at {PACE} ticks a second, started by `Games` without a server; as a command
(`python -P -m ludus.games.arena`) and as a fork of a spawner that has imported {ARENA}, in turn. *Start*: until `Games.start` returns,
which is when the process exists. *A match of one tick*: from the order to the end of a process that plays no more than that. Memory is that
of as many games again, which all run when they are measured. Pss divides what processes share among them. Median [least–most].""",
    "starts": f"""\
`ludus gamecore serve` on this machine; *beside* so many games of the same kind, which all run at {PACE} ticks a second by then, one caller
starts one game after the other over HTTP, and each is stopped again meanwhile, so that no more than two others run. Latency is that of the
request, until the server has answered that the process runs. *arena*: 3v3 of rule AIs as a command; *arena-warm*: as forks of a warm
spawner; *script*: Python, without any import, with {PACE} ticks a second.""",
    "leaks": f"""\
`ludus gamecore serve` on this machine. Each round starts all games over HTTP from {CALLERS} threads, looks when all run, stops all at once, and
looks again when they are gone. Threads, descriptors and memory are the server's own; below it are its spawners and, while games run, two
processes for each.""",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, _, title) in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=title)
    parser.add_argument("--smoke", action="store_true", help="few games, kept elsewhere")
    args = parser.parse_args(argv)
    failed = 0
    for name in [name for name in PARTS if getattr(args, name)] or list(PARTS):
        work, table, title = PARTS[name]
        load = os.getloadavg()[0]
        rows = work(SMOKE if args.smoke else WHOLE)
        body = f"## {title}\n\n{table(rows)}\n\nLoad of the machine before it: {load:.1f}."
        errors = [f"- {row['game']}: {row['error']}" for row in rows if "error" in row]
        if errors:
            body += "\n\n## What did not work\n\n" + "\n".join(errors)
        keep(f"gamecore-{name}", not args.smoke, rows, body, HOW[name])
        failed += len(errors)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
