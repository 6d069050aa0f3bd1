"""The whole service, side by side: `ludus serve` and its peers play the same agents, taking turns in one run on one machine.

    python -m bench.serving.install          once: the venv of the peers
    python -m bench.serve                    every stack and agent, three rounds
    python -m bench.serve --quick            one short round of the most important ones
    python -m bench.serve --only mlp,cnn     parts of the names of stacks
    python -m bench.serve --update           new versions under load: 10,000 recurrent sessions, every reply checked
    python -m bench.serve --soak --minutes 20    memory, open files and latency over time

Agents are an MLP, an LSTM with a state per session, and a Nature CNN, with random weights. `ludus serve` runs as in production:
with tokens, sequence numbers, metrics; peers do without all three. Bodies are raw arrays and replies raw actions, the same bytes
for all. Every reply is compared with what the PyTorch policy would do. Tables show median [min–max]; a complete comparison is kept
with date and commit in `bench/results/`, a partial one in `bench/.build/`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import gateway
from bench.gateway import build_generator, disturbed, figures, save
from bench.peers.install import STAMP
from bench.serving import agents, calls, generator, services, soak, update, verdicts
from bench.serving.agents import Traffic
from bench.serving.generator import Load
from bench.serving.install import SERVING
from bench.serving.process import LOAD_CPU, SERVER_CPU, Server, ServerFailed, adopt_orphans, can_pin, serving
from bench.serving.services import BARE, Served
from bench.serving.stacks import Stack
from bench.train import Row

CONNECTIONS = "1,8,64,256,512"
QUICK = (BARE, "ludus serve", "fastapi batched", "fastapi mlp", "ray serve (HAProxy) mlp")
NOT_QUICK = ("int8", "lstm (onnx", "cnn (onnx")
INT8_AGREES = 0.9  # less is not rounding but a mistake
UPDATE_RATE, SOAK_RATE = 4_000.0, 2_000.0  # far from what a core can do: an open loop must never fall behind for long


# -- agents on disk -----------------------------------------------------------------------------------------------------


@contextmanager
def agents_on_disk(kinds: Sequence[str]) -> Iterator[dict[str, Served]]:
    """Fresh runs of one checkpoint each, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as directory:
        place = Path(directory)
        tokens = place / "tokens"
        tokens.write_text(f"bench {services.TOKEN}\n")
        tokens.chmod(0o600)
        found = {}
        for kind in kinds:
            policy = agents.make_policy(kind, 1)
            agent = found[kind] = Served(kind, place / kind, place / f"{kind}.npz", tokens)
            agent.run.mkdir()
            agents.write_checkpoint(agent.run, policy, 1)
            agents.write_arrays(agent.arrays, kind, policy)
        yield found


# -- the comparison -----------------------------------------------------------------------------------------------------


def compare(stacks: Sequence[Stack], args: argparse.Namespace, traffic: dict[str, Traffic]) -> list[Row]:
    rows: list[Row] = []
    for round_ in range(1, args.rounds + 1):
        for stack in stacks:
            for row in _serve_round(stack, round_, args, traffic):
                rows.append(row | {"round": round_, "model": stack.workload})
                _show(rows[-1])
    return rows


def _show(row: Row) -> None:
    shown = ("round", "stack", "connections", "requests_per_s", "p50_ms", "p99_ms", "cpu_us_per_request", "errors", "agreement")
    report = [*shown, "generator_cores", "foreign_cores", "error", "example"]
    print(json.dumps({key: row[key] for key in report if key in row}), flush=True)


def _serve_round(stack: Stack, round_: int, args: argparse.Namespace, traffic: dict[str, Traffic]) -> Iterator[Row]:
    try:
        with serving(stack) as server:
            for count in args.connections:
                prefix = f"r{round_}c{count}"
                if stack.name == BARE:
                    yield gateway.measure(server, count, args.seconds, prefix, gateway.make_bodies())
                else:
                    yield measure(server, Load(traffic[stack.workload], count, args.seconds, prefix))
    except ServerFailed as error:
        yield {"stack": stack.name, "workload": stack.workload, "connections": 0, "error": str(error)}


def measure(server: Server, load: Load) -> Row:
    stack = server.stack
    row: Row = {"stack": stack.name, "workload": stack.workload, "connections": load.connections, "pinned": server.pinned}
    try:
        result = generator.drive(build_generator(), server, load, gateway._busy_seconds).row
    except ServerFailed as error:
        return row | {"error": str(error)}
    return row | figures(result) | verdict(result, "int8" in stack.name)


def verdict(result: Row, quantised: bool) -> Row:
    """All replies are compared. Those of 8-bit weights may differ now and then; how often is part of the result."""
    kinds = {name: result[name] for name in ("bad_status", "wrong", "transport", "lost", "differs")}
    agreement = 1 - result["differs"] / max(1, result["ticks"])
    errors = sum(kinds.values()) - (result["differs"] if quantised else 0)
    row: Row = {
        "errors": errors,
        "checked": result["ticks"],
        "agreement": round(agreement, 5),
        "reconnects": result["reconnects"],
    }
    if not result["requests"]:
        row["error"] = "no reply in the whole window"
    elif result["wrong"] or agreement < (INT8_AGREES if quantised else 1.0):
        row["error"] = (
            f"{result['differs']} of {result['ticks']} actions are not those of the policy, {result['wrong']} malformed"
        )
    if errors:
        row |= {"kinds": kinds, "example": f"{result['example_status']} {result['example']}"}
    return row


def explain(args: argparse.Namespace) -> str:
    pins = f"pinned to core {SERVER_CPU}, the generator to core {LOAD_CPU}" if can_pin() else "not pinned (one core)"
    what = "; ".join(f"*{name}*: {kind.what}" for name, kind in agents.KINDS.items())
    return (
        f"Median [min–max] of {args.rounds} interleaved rounds of {args.seconds:g} s. {what}. One session per connection, keep-alive, "
        "closed loop, raw arrays in the body, the action as eight bytes in the reply, one torch thread per process. `ludus serve` "
        "checks a token, numbers, sizes and finite values, keeps sessions that can be retried, and counts for its metrics; the peers "
        "do none of that. *Bare gateway* is the gateway of `bench.gateway` with an actor of its own, without the service around it. "
        f"Servers are {pins}; Ray Serve and LitServe, which work in several processes, share all cores with the generator. CPU "
        "µs/request counts the whole process tree of the server. *others* is what unrelated processes took in the same window. "
        "Every reply of the whole run is compared with the action of the PyTorch policy (in float32 none may differ; observations "
        "whose two best actions are nearly equal are not sent); the replies of the LSTM follow the state of its session over "
        "matches of 1024 ticks (the first of a session is shorter), after which a session ends and another one begins."
    )


def body_of(rows: Sequence[Row], model_calls: Sequence[Row]) -> str:
    parts = [disturbed(rows).strip(), verdicts.table(verdicts.verdicts(rows, model_calls))]
    for model in dict.fromkeys(row["model"] for row in rows):
        parts.append(f"## {model}\n\n{gateway.table([row for row in rows if row['model'] == model])}")
    int8 = [row for row in rows if "int8" in row["stack"] and "agreement" in row]
    agreement = {m: min(row["agreement"] for row in int8 if row["model"] == m) for m in dict.fromkeys(r["model"] for r in int8)}
    if agreement:
        shown = ", ".join(f"{model} {share:.2%}" for model, share in agreement.items())
        parts.append(f"Replies of onnx-int8 that are those of the PyTorch policy, the worst run: {shown}.")
    parts.append(_more_versions())
    return "\n\n".join(part for part in parts if part)


def _more_versions() -> str:
    stamp = SERVING.venv / STAMP
    frozen = json.loads(stamp.read_text())["frozen"] if stamp.exists() else []
    theirs = next((line.split("==")[1] for line in frozen if line.startswith("litserve==")), "not installed")
    return f"Also: onnxruntime {importlib.metadata.version('onnxruntime')} (ours), litserve {theirs} (peers)."


def run_comparison(args: argparse.Namespace) -> int:
    with agents_on_disk(list(agents.KINDS)) as found:
        everything = services.compared(found)
        stacks = [stack for stack in everything if _is_wanted(stack.name, args)]
        if not stacks:
            print(f"no stack has one of these in its name: {args.only}; there are: {', '.join(s.name for s in everything)}")
            return 2
        for stack in stacks:
            print(f"{stack.name}: {stack.settings}" + (f"  ({stack.missing})" if stack.missing else ""), flush=True)
        models = dict.fromkeys(stack.workload for stack in stacks)
        model_calls = [row for model in models for row in calls.measure(model)]
        for row in model_calls:
            print(json.dumps(row), flush=True)
        traffic = {model: agents.make_traffic(model, [agents.make_policy(model, 1)]) for model in models}
        rows = compare(stacks, args, traffic)
    complete = len(stacks) == len(everything) and args.rounds >= 3 and not args.quick
    save(
        "serve",
        complete,
        [*rows, *({"calls": True, **row} for row in model_calls)],
        stacks,
        body_of(rows, model_calls),
        explain(args),
    )
    return int(any("error" in row for row in rows))


def _is_wanted(name: str, args: argparse.Namespace) -> bool:
    if args.words:
        return any(word in name for word in args.words)
    if args.quick:
        return any(name.startswith(start) for start in QUICK) and not any(word in name for word in NOT_QUICK)
    return True


# -- new versions, and a long time --------------------------------------------------------------------------------------


def run_updates(args: argparse.Namespace) -> int:
    short: dict[str, Any] = {"sessions": 2_000, "quiet_s": 5.0, "gap_s": 6.0, "versions": 3} if args.quick else {}
    common = {**short, "workers": args.workers, "backend": args.backend}
    paced = args.rate or UPDATE_RATE
    plans = [update.Plan(**common, live=live, rate=rate) for live, rate in ((8, paced), (2, paced), (8, 0.0), (2, 0.0))]
    rows, stacks = [], []
    for plan in plans[: 2 if args.quick else 4]:
        policies = [agents.make_policy("lstm", seed) for seed in range(1, plan.versions + 1)]
        with agents_on_disk(["lstm"]) as found:
            stacks.append(replace(plan.stack(found["lstm"]), name=plan.name))
            rows.append(update.measure(plan, found["lstm"], policies, build_generator(), gateway._busy_seconds))
        print(json.dumps(rows[-1]), flush=True)
    how = (
        "`ludus serve --follow` with an LSTM; new checkpoints are written into its run while all sessions play. *Kept*: sessions stay "
        "with their version (--max-live-versions 8), every reply of every session is compared with that version. *Moved*: at most "
        "two versions live, sessions of older ones move and take their recurrent state along; the replies of a sample of sessions "
        f"are explained tick by tick. *During*: the {update.DURING_S:g} s after each checkpoint was written. *Before*: all the time "
        "before the first. With so many ticks/s the load is open: a tick counts from the moment at which it was due."
    )
    asked = [
        f"- {row['what']}: failed ticks {row['failed']} (asked: 0), wrong-state replies {row['wrong_state']} (asked: 0), p99 during ÷ "
        f"before {row['ratio']:.2f} (asked: ≤ 3), longest {row['max_before_ms']} ms before, {row['max_during_ms']} ms during; "
        f"matches by version {row['matches_by_version']}"
        for row in rows
    ]
    text = f"{disturbed(rows)}{update.table(rows)}\n\n" + "\n".join(asked)
    save("serve-update", not args.quick, rows, stacks, text, how)
    return int(any(row["failed"] or row["wrong_state"] for row in rows))


def run_soak(args: argparse.Namespace) -> int:
    minutes = 0.75 if args.quick else args.minutes
    slice_s = 5.0 if args.quick else 60.0
    plan = soak.Plan(minutes, args.rate or SOAK_RATE, slice_s=slice_s, backend=args.backend, workers=args.workers)
    with agents_on_disk(["lstm"]) as found:
        stack = plan.stack(found["lstm"])
        row = soak.measure(plan, found["lstm"], build_generator(), gateway._busy_seconds)
    how = (
        f"`ludus serve` with an LSTM, {plan.sessions} sessions over {plan.connections} connections, open loop of {plan.rate:,.0f} "
        f"ticks/s; a session plays {soak.MATCH} ticks, ends, and another one begins under a new id. RSS, open files and threads of "
        f"all its processes every {soak.SAMPLE_S:g} s; lines through means per minute, without the first tenth of the time."
    )
    save("serve-soak", not args.quick, [row], [stack], f"{disturbed([row])}{soak.report(row)}", how)
    return int(bool(row["errors"]))


# -- the command --------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", default=CONNECTIONS)
    parser.add_argument("--only", default="", help="parts of names of stacks, by comma")
    parser.add_argument("--quick", action="store_true", help="one short round, fewer stacks; of --update and --soak a short one")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--minutes", type=float, default=20.0, help="of --soak")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help=f"ticks/s of the open loop of --update [{UPDATE_RATE:.0f}] and --soak [{SOAK_RATE:.0f}]",
    )
    parser.add_argument("--workers", type=int, default=1, help="of --soak and --update")
    parser.add_argument("--backend", default="torch", choices=services.BACKENDS, help="of --soak and --update")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.seconds = 1, min(args.seconds, 1.0)
        args.connections = "1,64" if args.connections == CONNECTIONS else args.connections
    args.connections = [int(word) for word in args.connections.split(",")]
    args.words = [word.strip() for word in args.only.split(",") if word.strip()]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = gateway.NOFILE if hard == resource.RLIM_INFINITY else min(gateway.NOFILE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended on the way out
    adopt_orphans()
    build_generator()
    run = run_updates if args.update else run_soak if args.soak else run_comparison
    try:
        return run(args)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
