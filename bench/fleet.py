"""Fleets that have only a Redis and a bucket between them: what the way costs, what a checkpoint costs, and whether it learns.

    python -m bench.fleet --transport      items of 4 KB, 96 KB and 1 MB from one process to another: ours, bare Redis, ZeroMQ, the ring
    python -m bench.fleet --checkpoints    saving and restoring 10 and 100 MB: a local disk, a shared mount, S3
    python -m bench.fleet --learn          CartPole to 475 by a learner and two workers, undisturbed and with each of them killed once
    … --smoke                              the same, short, to see that it works
    … --transport --only "ludus,streams, bare"    some of the ways (by comma and no blank), --sizes "96 KB"

Needs redis-server, and for the other two parts SeaweedFS and FUSE (`scripts/tools.sh redis-server weed fusermount3`); ZeroMQ is
measured where pyzmq is installed. Everything is started on free ports of this machine and ended. Whole measurements are kept with
date and commit in `bench/results/fleet-*`, others in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.fleets import checkpoints, items, learning, transport
from bench.fleets.ways import BARE, BARE_DURABLE, OURS, OURS_DURABLE, READ, ROOM, SEED, WAYS
from bench.train import Row, spread
from bench.transport import keep

HERE = Path(__file__).parent
LIMIT_S = 90.0


# -- the ways between two processes -------------------------------------------------------------------------------------


def one(name: str, size: str, seconds: float, records: Path) -> Row:
    """In a process of its own, so that none inherits what another left."""
    command = [
        sys.executable,
        "-m",
        "bench.fleet",
        "--one",
        name,
        "--sizes",
        size,
        "--seconds",
        str(seconds),
        "--records",
        str(records),
    ]
    row: Row = {"way": name, "size": size, "load": round(os.getloadavg()[0], 1)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE.parent, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return row | {"error": f"no end after {LIMIT_S:g} s"}
    finally:  # with its writer and its server, if it did not come to end them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return row | {"error": (errors.strip().splitlines() or ["?"])[-1][:300]}
    found: Row = json.loads(out.strip().splitlines()[-1])
    return row | found


def transports(names: list[str], sizes: list[str], rounds: int, seconds: float) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="ludus-bench-") as directory:
        items.prepare(Path(directory), sizes)
        for number in range(rounds):
            for size in sizes:
                for name in names:
                    row = one(name, size, seconds, Path(directory)) | {"round": number}
                    rows.append(row)
                    print(
                        f"{number} {size:5} {name:24} {row.get('items_per_s', 0):10,.0f} items/s {row.get('error', '')}",
                        flush=True,
                    )
    return rows


def transport_tables(rows: Sequence[Row], sizes: Sequence[str]) -> str:
    return "\n\n".join(f"## {size}\n\n{_transport_table(rows, size)}\n\n{_verdict(rows, size)}" for size in sizes)


def _transport_table(rows: Sequence[Row], size: str) -> str:
    titles = ["way", "rounds", "items/s", "MB/s", "CPU µs/item", "writer", "reader", "server", "lost", "server peak MB"]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for name in WAYS:
        rates = _column(rows, name, size, "items_per_s")
        failed = [row["error"] for row in rows if row["way"] == name and row["size"] == size and "error" in row]
        if failed:
            lines.append(f"| {name} | {len(failed)} failed: {failed[0][:120]} |" + " |" * (len(titles) - 2))
        if rates:
            lines.append(
                f"| {name} | {len(rates)} | {spread(rates)} | {_median(rows, name, size, 'mb_per_s')} | {_median(rows, name, size, 'cpu_us')} | "
                + " | ".join(_median(rows, name, size, f"{who}_cpu_us") for who in ("writer", "reader", "server"))
                + f" | {_lost(rows, name, size)} | {_median(rows, name, size, 'server_peak_mb')} |"
            )
    return "\n".join(lines)


def _column(rows: Sequence[Row], name: str, size: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["way"] == name and row["size"] == size and key in row]


def _median(rows: Sequence[Row], name: str, size: str, key: str) -> str:
    found = _column(rows, name, size, key)
    return f"{statistics.median(found):,.0f}" if found else ""


def _lost(rows: Sequence[Row], name: str, size: str) -> str:
    share = statistics.median(_column(rows, name, size, "lost_share"))
    return f"{share:.0%}" if WAYS[name].lossy else "0"


def _verdict(rows: Sequence[Row], size: str) -> str:
    """The two figures that matter: against bare Redis, and against what is replaced. Of medians; in brackets of each round."""
    found = []
    pubsub = (SEED, f"{SEED}, RESP3", f"{SEED}, paced")
    for mine, other in ((OURS, BARE), (OURS_DURABLE, BARE_DURABLE), *((OURS, name) for name in pubsub), (OURS, "list")):
        ours, theirs = (_column(rows, name, size, "items_per_s") for name in (mine, other))
        if ours and theirs:
            each = [a / b for a, b in zip(ours, theirs, strict=False)]
            less = statistics.median(_column(rows, other, size, "cpu_us")) / statistics.median(
                _column(rows, mine, size, "cpu_us")
            )
            ratio = statistics.median(ours) / statistics.median(theirs)
            found.append(
                f"- {mine} ÷ {other}: **{ratio:.2f}** [{min(each):.2f}–{max(each):.2f}] of the items/s; per CPU-second {less:.2f}"
            )
    return "\n".join(found)


def run_transports(args: argparse.Namespace) -> int:
    names = [name for name in args.only.split(",") if name] if args.only else list(WAYS)
    names = _joined(names)
    sizes = args.sizes.split(",") if args.sizes else list(items.SPECS)
    rounds, seconds = (1, 0.5) if args.smoke else (args.rounds, args.seconds)
    rows = transports(names, sizes, rounds, seconds)
    how = (
        f"One writer process, one reader process, a server where there is one, on this machine over TCP. Median [quartiles] of {rounds} interleaved "
        f"rounds of {seconds:g} s. The writer fills every array of a record, the reader copies every item into a batch of 16. Room for {ROOM} items, "
        f"{READ} per read. CPU is that of the process named. *lost*: published and never read. *server peak*: what its memory grew by at most.\n\n"
        + "\n".join(f"- {name}: {WAYS[name].about}" for name in names)
    )
    keep(
        "fleet-transport",
        names == list(WAYS) and sizes == list(items.SPECS) and rounds >= 3,
        rows,
        transport_tables(rows, sizes),
        how,
    )
    return int(any("error" in row and "not installed" not in row["error"] for row in rows))


def _joined(words: list[str]) -> list[str]:
    """Names have commas themselves: what begins with a blank belongs to the word before it."""
    names: list[str] = []
    for word in words:
        if word.startswith(" ") and names:
            names[-1] += f",{word}"
        else:
            names.append(word)
    return names


# -- checkpoints --------------------------------------------------------------------------------------------------------


def run_checkpoints(args: argparse.Namespace) -> int:
    sizes, rounds = ([1], 1) if args.smoke else ([10, 100], args.rounds)
    rows: list[Row] = []
    with checkpoints.places() as places:
        for megabytes in sizes:
            files = checkpoints.make(megabytes)
            for number in range(-1, rounds):  # the first is not counted: connections, directories and volumes are made in it
                for name, place in places.items():
                    row: Row = {"place": name, "megabytes": megabytes, "round": number}
                    if isinstance(place, str):
                        row["error"] = place
                    else:
                        row |= checkpoints.measured(place, f"{megabytes}-{number}", files)
                    if number >= 0:
                        rows.append(row)
                        took = f"saved in {row.get('save_s', 0):.3f} s, restored in {row.get('restore_s', 0):.3f} s"
                        print(f"{number} {megabytes:3} MB {name:20} {row.get('error', took)}", flush=True)
        about = "\n".join(f"- {name}: {place if isinstance(place, str) else place.about}" for name, place in places.items())
    how = f"{checkpoints.__doc__}\nMedian [quartiles] of {rounds} interleaved rounds, milliseconds; CPU is that of the client.\n\n{about}"
    complete = not args.smoke and rounds >= 3 and not any("error" in row for row in rows)
    keep("fleet-checkpoints", complete, rows, _checkpoint_table(rows), how)
    return 0


def _checkpoint_table(rows: Sequence[Row]) -> str:
    lines = ["| MB | place | save ms | MB/s | CPU ms | restore ms | MB/s | CPU ms |", "|---:|---|" + "---:|" * 6]
    for megabytes, name in dict.fromkeys((row["megabytes"], row["place"]) for row in rows):
        own = [row for row in rows if (row["megabytes"], row["place"]) == (megabytes, name)]
        if "error" in own[0]:
            lines.append(f"| {megabytes} | {name} | not measured: {own[0]['error']} |" + " |" * 5)
            continue
        cells = []
        for what in ("save", "restore"):
            cells += [spread([1000 * row[f"{what}_s"] for row in own], 1)]
            cells += [f"{statistics.median(row[f'{what}_mb_per_s'] for row in own):,.0f}"]
            cells += [f"{1000 * statistics.median(row[f'{what}_cpu_s'] for row in own):,.0f}"]
        lines.append(f"| {megabytes} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- learning -----------------------------------------------------------------------------------------------------------


def run_learn(args: argparse.Namespace) -> int:
    target, seeds = (150.0, [1]) if args.smoke else (475.0, list(range(1, args.seeds + 1)))
    rows = []
    for seed in seeds:
        for killing in (False, True):
            row = learning.measured(args.preset, target, seed, killing)
            rows.append(row)
            print(json.dumps(row), flush=True)
    how = (
        f"`ludus fleet learner -p {args.preset}` and {learning.WORKERS} times `ludus fleet worker` on this machine, over a Redis with an append-only file "
        f"and a bucket of SeaweedFS, until the mean return of training episodes is {target:g}. *seconds* from the start of the three commands to the end of "
        f"the learner. *killed*: each of the three once, by SIGKILL and started again, the learner with an empty cache; when the mean return had come to "
        f"{', '.join(f'{share:.0%} ({who})' for who, share in learning.KILL_AT.items())} of the target. *evaluation*: {learning.EPISODES} deterministic "
        f"episodes of the final policy, fetched from the bucket. Duplicates came again and were dropped, lost are gaps in the numbers of a worker. "
        "*recovered*: until more steps were learned from than before the kill."
    )
    keep("fleet-learn", not args.smoke and len(seeds) >= 3, rows, _learning_table(rows), how)
    wrong = [
        row for row in rows if "error" in row or not row["reached"] or len(row["kills"]) != row["killing"] * len(learning.KILL_AT)
    ]
    return int(bool(wrong))


def _learning_table(rows: Sequence[Row]) -> str:
    titles = [
        "seed",
        "",
        "seconds",
        "steps",
        "return",
        "evaluation [min–max]",
        "killed at s",
        "recovered in s",
        "orphans",
        *learning.COUNTS,
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---:|---|" + "---:|" * (len(titles) - 2)]
    for row in rows:
        kind = "killed" if row["killing"] else "undisturbed"
        if "error" in row:
            lines.append(f"| {row['seed']} | {kind} | failed: {row['error'][:200]} |" + " |" * (len(titles) - 3))
            continue
        kills = row["kills"]
        played = row["evaluation_returns"]
        cells = [
            *(str(row["seed"]), kind, f"{row['seconds']:.1f}", f"{row['timesteps']:,}", f"{row['return']:.0f}"),
            f"{row['evaluation_mean']:.1f} [{min(played):.0f}–{max(played):.0f}]",
            ", ".join(f"{kill['who']} {kill['after_s']:.0f}" for kill in kills) or "–",
            ", ".join(f"{kill['recovered_s']:.1f}" if "recovered_s" in kill else "–" for kill in kills) or "–",
            str(sum(kill["orphans"] for kill in kills)),
            *(str(row[name]) for name in learning.COUNTS),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("transport", "checkpoints", "learn"):
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="as short as possible")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of --transport")
    parser.add_argument("--only", default="", help=f"by comma; all: {', '.join(WAYS)}")
    parser.add_argument("--sizes", default="", help=f"by comma; all: {', '.join(items.SPECS)}")
    parser.add_argument("--seeds", type=int, default=3, help="of --learn, each undisturbed and with kills")
    parser.add_argument("--preset", default="cartpole", help="of --learn")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, default=Path(), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and mounts end with it
    if args.one:
        print(json.dumps(transport.measured(WAYS[args.one], args.records, args.sizes, args.seconds)))
        return 0
    code = 0
    if args.transport:
        code |= run_transports(args)
    if args.checkpoints:
        code |= run_checkpoints(args)
    if args.learn:
        code |= run_learn(args)
    if not (args.transport or args.checkpoints or args.learn):
        parser.error("say what: --transport, --checkpoints, --learn")
    return code


if __name__ == "__main__":
    sys.exit(main())
