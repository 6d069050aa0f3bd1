"""`ludus fake`: a dummy agent server and a dummy game client, to develop and load-test the other side of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ludus.cli.common_options import ListenHost, ListenPort
from ludus.cli.help import HelpApp
from ludus.errors import LudusError, UsageError
from ludus.protocol.spec import read_token

if TYPE_CHECKING:
    from ludus.gateway.server import GatewaySettings
    from ludus.process.signals import StopSignal
    from ludus.remote.fake_peers import FakeGamecore

app = HelpApp(help="A dummy agent server and a dummy game client for testing.", no_args_is_help=True)

_POLL_S = 0.05
_HEALTH_S = 2.0

TokenFile = Annotated[Path | None, typer.Option(help="File with the token.")]
Seconds = Annotated[float | None, typer.Option(min=0.0, help="Stop after this many seconds. [default: at Ctrl-C]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line; the last is the summary.")]


@app.command()
def actor(
    port: ListenPort = 8000,
    host: ListenHost = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that share the port.")] = 1,
    tick_return: Annotated[str, typer.Option(help="Reply to every tick.")] = "fake_actor_tick_return",
    tick_return_file: Annotated[Path | None, typer.Option(help="File with the reply to every tick.")] = None,
    end_return: Annotated[str, typer.Option(help="Reply to every end.")] = "fake_actor_end_return",
    end_return_file: Annotated[Path | None, typer.Option(help="File with the reply to every end.")] = None,
    token_file: TokenFile = None,
    seconds: Seconds = None,
    as_json: AsJson = False,
) -> None:
    """Run an agent server with constant replies, to test and load a game client without a model."""
    from ludus.distributed.gateway_workers import check_exposure, run_loop
    from ludus.gateway.server import GatewaySettings
    from ludus.process.signals import stop_on_signals
    from ludus.remote.fake_peers import FakeActors

    settings = GatewaySettings(token=read_token(token_file))
    check_exposure(host, settings.token)
    returns = _content(tick_return, tick_return_file), _content(end_return, end_return_file)
    with tempfile.TemporaryDirectory(prefix="ludus-fake-", ignore_cleanup_errors=True) as directory, stop_on_signals() as stop:
        fakes = FakeActors(*returns, Path(directory))
        report = TrafficReport(as_json, seconds, stop)
        if workers == 1:
            run_loop(_serve_here(fakes, Path(directory), host, port, settings, report))
        else:
            _serve_in_workers(fakes, Path(directory), host, port, workers, settings, report)
        report.conclude()


@app.command()
def gamecore(
    url: Annotated[str, typer.Option(help="URL of the agent server.")] = "http://127.0.0.1:8000",
    games: Annotated[int, typer.Option(min=1, help="Matches played at once.")] = 1,
    ticks: Annotated[int, typer.Option(min=0, help="Ticks of a match.")] = 100,
    connections: Annotated[
        int | None, typer.Option(min=1, help="Connections shared by the matches. [default: one per match]")
    ] = None,
    think_ms: Annotated[float, typer.Option(min=0.0, help="Pause before every tick, in milliseconds.")] = 0.0,
    form: Annotated[
        Literal["raw", "json", "msgpack"],
        typer.Option("--format", help="Format of bodies: raw bytes, or the formats of the built-in actor."),
    ] = "raw",
    body_size: Annotated[int | None, typer.Option(min=0, help="Size of a raw tick in bytes. [default: 64]")] = None,
    body_file: Annotated[Path | None, typer.Option(help="File with the body of a raw tick.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Time limit of a reply, in seconds.")] = 10.0,
    token_file: TokenFile = None,
    seconds: Seconds = None,
    matches: Annotated[int | None, typer.Option(min=1, help="Stop after N matches of each game.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play matches against an agent server and check the actions it returns. Exit code 1 if anything went wrong."""
    from ludus.distributed.gateway_workers import run_loop
    from ludus.process.signals import stop_on_signals
    from ludus.remote.fake_peers import FakeGamecore

    if form != "raw" and (body_size is not None or body_file is not None):
        raise UsageError(f"--format {form} creates bodies from GET /spec.", "Leave out --body-size and --body-file.")
    if body_size is not None and body_file is not None:
        raise UsageError("Both --body-size and --body-file are given.", "Give one of them.")
    body = bytes(64 if body_size is None else body_size) if body_file is None else _read(body_file)
    fake = FakeGamecore(
        url, games, ticks, body, form=None if form == "raw" else form, connections=connections, think_s=think_ms / 1e3,
        token=read_token(token_file), timeout_s=timeout,
    )  # fmt: skip
    with stop_on_signals() as stop:
        report = TrafficReport(as_json, None, stop)
        run_loop(_play(fake, seconds, matches, report))
        report.conclude(**fake.stats.to_json())
    if fake.stats.errors:
        print(f"ludus: {fake.stats.example}", file=sys.stderr)
    if fake.stats.errors or not fake.stats.requests:
        raise typer.Exit(1)


# -- fake actor ---------------------------------------------------------------------------------------------------------


async def _serve_here(
    fakes: Callable[[], Any], directory: Path, host: str, port: int, settings: GatewaySettings, report: TrafficReport
) -> None:
    from ludus.distributed.gateway_workers import bind
    from ludus.gateway.server import Gateway
    from ludus.remote.fake_peers import Traffic

    bound = bind(host, port)
    gateway = Gateway(fakes, settings)
    await gateway.start([bound])

    async def sample() -> TrafficSample:
        return TrafficSample.of(Traffic.sum(directory), [gateway.counters()], [os.getpid()])

    try:
        await report.every_second(sample, server_line, f"serving on http://{host}:{bound.getsockname()[1]}")
    finally:
        await gateway.close()


def _serve_in_workers(
    fakes: Callable[[], Any],
    directory: Path,
    host: str,
    port: int,
    workers: int,
    settings: GatewaySettings,
    report: TrafficReport,
) -> None:
    from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers, run_loop
    from ludus.process.workers.supervisor import Supervisor
    from ludus.remote.fake_peers import Traffic

    with Supervisor(preload=("numpy", "ludus.gateway.server")) as supervisor:
        fleet = GatewayWorkers(supervisor, GatewayProgram(fakes, settings), host=host, port=port, workers=workers)
        try:
            fleet.wait_ready(60.0)

            async def sample() -> TrafficSample:
                healths = [await asyncio.to_thread(_health, address, settings.token) for address in fleet.direct_addresses]
                return TrafficSample.of(Traffic.sum(directory), healths, [worker.pid for worker in fleet.workers if worker.pid])

            opening = f"serving on http://{host}:{fleet.address[1]} with {workers} workers"
            run_loop(report.every_second(sample, server_line, opening))
        finally:
            fleet.close()


def _health(address: tuple[str, int], token: str | None) -> dict[str, Any]:
    """The counters of one worker; empty while it is restarted."""
    connection = http.client.HTTPConnection(*address, timeout=_HEALTH_S)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {token}"} if token else {})
        counters: dict[str, Any] = json.loads(connection.getresponse().read())
        return counters
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()


# -- fake gamecore ------------------------------------------------------------------------------------------------------


async def _play(fake: FakeGamecore, seconds: float | None, matches: int | None, report: TrafficReport) -> None:
    played = asyncio.create_task(fake.play(seconds, matches))
    watched = asyncio.create_task(report.every_second(lambda: _game_sample(fake), game_line, ""))
    try:
        await asyncio.wait([played, watched], return_when=asyncio.FIRST_COMPLETED)
        fake.stop()
        await played
        report.note(await _game_sample(fake))
    finally:
        for task in (played, watched):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watched
        with contextlib.suppress(asyncio.CancelledError, LudusError):  # an error of `play` has been raised above
            await played


async def _game_sample(fake: FakeGamecore) -> TrafficSample:
    stats = fake.stats
    sample = TrafficSample.of((stats.requests, stats.bytes_in, stats.bytes_out), [], [os.getpid()])
    sample.sessions = fake.playing
    sample.errors.update(stats.errors)
    sample.extra = {f"p{q}_ms": round(stats.latencies.quantile(q / 100) * 1e3, 2) for q in (50, 99)} if stats.requests else {}
    return sample


# -- reporting ----------------------------------------------------------------------------------------------------------


@dataclass
class TrafficSample:
    """Cumulative counters at one time."""

    at: float
    requests: int
    bytes_in: int
    bytes_out: int
    cpu_s: float
    rss_bytes: int
    sessions: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, traffic: tuple[int, int, int], healths: Iterable[dict[str, Any]], pids: Iterable[int]) -> TrafficSample:
        used = [usage(pid) for pid in pids]
        sample = cls(time.monotonic(), *traffic, sum(cpu for cpu, _ in used), sum(rss for _, rss in used))
        for health in healths:
            sample.sessions += health.get("sessions", 0)
            sample.errors.update(_errors(health))
        return sample

    def since(self, before: TrafficSample) -> dict[str, Any]:
        """Rates and differences since an earlier sample."""
        took = max(self.at - before.at, 1e-9)
        errors = self.errors - before.errors
        return {
            "sessions": self.sessions,
            "requests_per_s": round((self.requests - before.requests) / took, 1),
            "bytes_in_per_s": round((self.bytes_in - before.bytes_in) / took),
            "bytes_out_per_s": round((self.bytes_out - before.bytes_out) / took),
            "cpu_percent": round(100 * max(0.0, self.cpu_s - before.cpu_s) / took, 1),
            "rss_bytes": self.rss_bytes,
            "errors": dict(errors),
            **self.extra,
        }


def _errors(health: dict[str, Any]) -> Counter[str]:
    """Counts of refusals by error word, and of sessions that failed or timed out."""
    found: Counter[str] = Counter()
    for name, value in health.items():
        if isinstance(value, dict):
            found.update(value)
        elif name in ("silent", "timed_out", "failed") and value:
            found[name] += value
    return found


def usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process; zeros if it is gone or not accessible."""
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss
    except psutil.Error:
        return 0.0, 0


class TrafficReport:
    """Prints a line per second, and a summary at the end."""

    def __init__(self, as_json: bool, seconds: float | None, stop: StopSignal) -> None:
        self._as_json, self._seconds, self._stop = as_json, seconds, stop
        self._first: TrafficSample | None = None
        self._last: TrafficSample | None = None

    async def every_second(
        self, sample: Callable[[], Awaitable[TrafficSample]], line: Callable[[dict[str, Any]], str], opening: str
    ) -> None:
        """Print a line per second until the time limit or Ctrl-C. Prints `opening` after the first sample, when counting works."""
        first = before = self._first = self._last = await sample()
        if opening:
            print(opening, file=sys.stderr if self._as_json else sys.stdout, flush=True)
        while not self._over(first.at):
            await asyncio.sleep(_POLL_S)
            if time.monotonic() - before.at >= 1.0 or self._over(first.at):
                self._last = now = await sample()
                row = {"seconds": round(now.at - first.at, 1), **now.since(before)}
                print(json.dumps(row) if self._as_json else line(row), flush=True)
                before = now

    def note(self, last: TrafficSample) -> None:
        """Set the final sample."""
        self._last = last

    def _over(self, began: float) -> bool:
        return self._stop() or (self._seconds is not None and time.monotonic() - began >= self._seconds)

    def conclude(self, **more: Any) -> None:
        if self._first is None or self._last is None:
            return
        first, last = self._first, self._last
        row = {
            "summary": True,
            "seconds": round(last.at - first.at, 1),
            **last.since(first),
            "requests": last.requests,
            "bytes_in": last.bytes_in,
            "bytes_out": last.bytes_out,
            **more,
        }
        if self._as_json:
            print(json.dumps(row), flush=True)
            return
        matches = f" in {row['matches']:,} matches" if "matches" in row else ""
        print(
            f"total {row['requests']:,} requests{matches} in {row['seconds']:.1f} s: {row['requests_per_s']:,.0f}/s, "
            f"in {_size(row['bytes_in'])}, out {_size(row['bytes_out'])}, CPU {row['cpu_percent']:.0f} %"
            f"{_latency(row)}{_format_errors(row['errors']) or ', no errors'}",
            flush=True,
        )


def server_line(row: dict[str, Any]) -> str:
    return (
        f"{row['seconds']:7.1f} s  {row['sessions']:>6,} sessions  {row['requests_per_s']:>9,.0f} requests/s  "
        f"in {_size(row['bytes_in_per_s']):>8}/s  out {_size(row['bytes_out_per_s']):>8}/s  "
        f"CPU {row['cpu_percent']:>4.0f} %  RSS {_size(row['rss_bytes'])}{_format_errors(row['errors'])}"
    )


def game_line(row: dict[str, Any]) -> str:
    return (
        f"{row['seconds']:7.1f} s  {row['sessions']:>6,} games  {row['requests_per_s']:>9,.0f} requests/s{_latency(row)}  "
        f"in {_size(row['bytes_in_per_s']):>8}/s  out {_size(row['bytes_out_per_s']):>8}/s  "
        f"CPU {row['cpu_percent']:>4.0f} %  RSS {_size(row['rss_bytes'])}{_format_errors(row['errors'])}"
    )


def _latency(row: dict[str, Any]) -> str:
    return f"  p50 {row['p50_ms']:.2f} ms  p99 {row['p99_ms']:.2f} ms" if row.get("p50_ms") is not None else ""


def _format_errors(errors: dict[str, int]) -> str:
    return "  errors: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(errors.items())) if errors else ""


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _content(text: str, file: Path | None) -> bytes:
    return text.encode() if file is None else _read(file)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from error
