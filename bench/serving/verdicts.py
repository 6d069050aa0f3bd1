"""What `bench.serve` is read for: each figure that was asked of the service, and what came out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serving.services import BACKENDS, BARE, FASTAPI, FASTAPI_BATCHED, LITSERVE, RAY_BEST, RAY_PLAIN
from bench.train import Row

Value = Callable[[float, float], float]


@dataclass(frozen=True)
class Verdict:
    what: str
    asked: str
    found: float
    low: float
    high: float
    met: bool

    def line(self) -> str:
        spread = f" [{self.low:.2f}–{self.high:.2f}]" if self.high > self.low else ""
        word = ("yes" if self.met else "**no**") if self.asked else ""
        return f"| {self.what} | {self.asked} | {self.found:.2f}{spread} | {word} |"


class Rounds:
    """The rows of a run, so that stacks can be compared round by round: what disturbs one round disturbs both."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["stack"], row["connections"], row["round"]): row for row in rows if "error" not in row}
        self._rounds = sorted({row["round"] for row in rows})

    def values(self, stack: str, connections: int, key: str) -> dict[int, float]:
        found = {n: self._rows.get((stack, connections, n)) for n in self._rounds}
        return {n: row[key] for n, row in found.items() if row is not None}

    def ratio(self, what: str, key: str, over: str, under: str, connections: int, asked: str = "") -> Verdict | None:
        """`asked` is like "≥ 8" or "≤ 0.2"."""
        a, b = self.values(over, connections, key), self.values(under, connections, key)
        return judged(what, [a[n] / b[n] for n in a if b.get(n)], asked)

    def queueing(self, stack: str) -> Verdict | None:
        """p99 at 512 connections, as a multiple of the time in which 512 requests are answered."""
        p99, rate = self.values(stack, 512, "p99_ms"), self.values(stack, 512, "requests_per_s")
        found = [p99[n] / (512_000 / rate[n]) for n in p99]
        return judged(f"{stack}: p99 at 512 connections ÷ (512 ÷ requests/s)", found, "≤ 3")


def judged(what: str, found: Sequence[float], asked: str) -> Verdict | None:
    if not found:
        return None
    middle = statistics.median(found)
    met = True
    if asked:
        sign, number = asked.split()
        met = middle >= float(number) if sign == "≥" else middle <= float(number)
    return Verdict(what, asked, middle, min(found), max(found), met)


def verdicts(rows: Sequence[Row], calls: Sequence[Row]) -> list[Verdict]:
    rounds = Rounds(rows)
    rate, p99, cpu = "requests_per_s", "p99_ms", "cpu_us_per_request"
    found: list[Verdict | None] = []
    mlp = "ludus serve mlp (torch)"
    found.append(rounds.ratio("service ÷ bare gateway, mlp, 64 connections", rate, mlp, BARE, 64, "≥ 0.8"))
    found.append(rounds.ratio("the same by CPU µs/request, which others disturb less", cpu, BARE, mlp, 64))
    for call in calls:
        asked = "≥ 1.3" if (call["model"], call["batch"]) == ("mlp", 1) else ""
        what = f"model call, {call['model']}, batch {call['batch']}: ONNX ÷ torch ({call['torch_us']} µs, {call['onnx_us']} µs)"
        found.append(judged(what, [call["ratio"]], asked))
    found.append(rounds.ratio("requests/s, ONNX ÷ torch, mlp, 1 connection", rate, "ludus serve mlp (onnx)", mlp, 1, "≥ 1.3"))
    found.append(rounds.ratio("the same by CPU µs/request", cpu, mlp, "ludus serve mlp (onnx)", 1))
    for kind in ("mlp", "lstm", "cnn"):
        first = kind == "mlp"
        asked_of = {
            RAY_BEST: ("≥ 8" if first else "≥ 1.5" if kind == "cnn" else "", "≤ 0.2" if first else ""),
            RAY_PLAIN: ("", ""),
            FASTAPI: ("≥ 4" if first else "", "≤ 0.2" if first else ""),
            FASTAPI_BATCHED: ("≥ 1.5" if kind == "cnn" else "", ""),
            LITSERVE: ("", ""),
        }
        for backend in BACKENDS:
            ours = f"ludus serve {kind} ({backend})"
            for peer, (asked_rate, asked_p99) in asked_of.items():
                theirs = f"{peer} {kind}"
                found.append(rounds.ratio(f"requests/s, {ours} ÷ {theirs}, 64 connections", rate, ours, theirs, 64, asked_rate))
                found.append(rounds.ratio(f"CPU µs/request, {theirs} ÷ {ours}, 64 connections", cpu, theirs, ours, 64))
                found.append(rounds.ratio(f"p99, {ours} ÷ {theirs}, 64 connections", p99, ours, theirs, 64, asked_p99))
            found.append(rounds.queueing(ours))
    return [verdict for verdict in found if verdict is not None]


def table(found: Sequence[Verdict]) -> str:
    lines = ["| what | asked | median of the rounds [min–max] | met |", "|---|---:|---:|---|"]
    return "\n".join([*lines, *(verdict.line() for verdict in found)])
