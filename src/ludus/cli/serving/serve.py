"""`ludus serve`: serve trained agents to games over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ludus.cli.common_options import ListenHost, ListenPort, trust_option
from ludus.cli.help import option_in
from ludus.cli.run_argument import complete_run, run_places
from ludus.errors import NotFound, UsageError

if TYPE_CHECKING:
    from ludus.gateway.server import GatewaySettings
    from ludus.serving.checkpoint_follower import CheckpointSource
    from ludus.serving.launcher import RunningService
    from ludus.serving.release import Backend

_Word = TypeVar("_Word", bound=str)
_security, _limits, _logs, _versions, _canary = map(
    option_in, ("Security", "Limits", "Logs and recordings", "Versions", "Canary releases")
)


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RUN|CONFIG …",
            help="Run (its newest checkpoint), RUN/best, a checkpoint, or the YAML file of a run. Several named ones (NAME=RUN) share the port; a game chooses by the header `model` or the path /step/NAME.",
            callback=run_places,
            autocompletion=complete_run,
        ),
    ],
    port: ListenPort = 8000,
    host: ListenHost = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that share the port.")] = 1,
    backend: Annotated[
        str, typer.Option(help="Inference backend: torch, onnx or onnx-int8; ONNX is verified against torch first.")
    ] = "torch",
    local_dir: Annotated[str, typer.Option(metavar="DIR|URL", help="Directory with the runs of a YAML file.")] = "runs",
    json_: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
    follow: Annotated[bool, _versions("--follow", help="Load new checkpoints of the run when they are saved.")] = False,
    version: Annotated[int | None, _versions(help="Serve this version instead of the newest.")] = None,
    level: Annotated[list[int] | None, _versions(help="Additional version that a session may select; repeatable.")] = None,
    temperature: Annotated[
        float,
        _versions(
            min=0, max=100, help="Sampling temperature: 0 = most probable action, 1 = as in training; a session may set its own."
        ),
    ] = 0.0,
    max_live_versions: Annotated[
        int, _versions(min=1, help="Versions served at once; beyond it the oldest sessions move to a newer one.")
    ] = 2,
    on_move: Annotated[
        str, _versions(help="Recurrent state of a session that moves to another version: carry or reset.")
    ] = "carry",
    token_file: Annotated[
        Path | None,
        _security(
            help="File with the tokens that games must send, one per line: TOKEN, NAME TOKEN, or NAME TOKEN REQUESTS_PER_S. Reloaded when it changes."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, _security(help="Certificate chain (PEM); enables https.")] = None,
    tls_key: Annotated[Path | None, _security(help="Private key (PEM).")] = None,
    trust: Annotated[bool, trust_option(_security)] = False,
    tick_timeout_s: Annotated[float | None, _limits(help="Time limit of a reply, in seconds. [default: as in training]")] = None,
    silent_s: Annotated[
        float | None, _limits(help="Seconds without a request after which a session is ended. [default: as in training]")
    ] = None,
    max_sessions: Annotated[
        int | None, _limits(min=1, help="Maximum number of open sessions of each worker. [default: as in training]")
    ] = None,
    max_connections: Annotated[int, _limits(min=1, help="Maximum number of connections of each worker.")] = 10_000,
    max_connections_per_address: Annotated[
        int,
        _limits(min=0, help="Maximum connections of one client address in each worker; 0 = unlimited, for use behind a proxy."),
    ] = 0,
    rate: Annotated[float, _limits(min=0, help="Maximum requests per second of each token in each worker; 0 = unlimited.")] = 0.0,
    drain_s: Annotated[float, _limits(min=0, help="Seconds that open sessions may continue after SIGTERM.")] = 30.0,
    access_log: Annotated[str | None, _logs(help="Access log with one JSON line per start, end and refusal; - = stdout.")] = None,
    log_ticks: Annotated[bool, _logs("--log-ticks", help="Also log every tick.")] = False,
    log_format: Annotated[str, _logs(help="Format of the log on stderr: text or json.")] = "text",
    record: Annotated[Path | None, _logs(help="Directory for recorded matches, to train from.")] = None,
    record_fraction: Annotated[float, _logs(min=0, max=1, help="Fraction of sessions to record.")] = 0.01,
    record_mb: Annotated[int, _logs(min=1, help="Maximum size of the recordings in MB.")] = 1024,
    canary: Annotated[float, _canary(min=0, max=100, help="Percentage of new sessions that get a new version first.")] = 0.0,
    canary_s: Annotated[float, _canary(min=0, help="Minimum duration of a canary, in seconds.")] = 300.0,
    canary_requests: Annotated[int, _canary(min=1, help="Minimum number of requests of a canary.")] = 500,
) -> None:
    """Serve trained agents to games over HTTP, with the protocol used in training."""
    import logging
    import time

    from ludus.cli.output import say
    from ludus.gateway.server import GatewaySettings
    from ludus.process.signals import stop_on_signals
    from ludus.serving import log_format as logs
    from ludus.serving.canary import CanarySettings
    from ludus.serving.checkpoint_follower import UpdateSettings, parse_sources
    from ludus.serving.launcher import RunningService
    from ludus.serving.worker import ReplaySettings, ServiceSettings

    form = _one_of("--log-format", log_format, logs.FORMS)
    logs.configure(form, "main")
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key must be given together.")
    if canary and not follow:
        raise UsageError("--canary needs --follow, which loads new versions.", "Add --follow.")
    if log_ticks and access_log is None:
        raise UsageError("--log-ticks needs an access log.", "Add --access-log FILE.")
    if follow and version is not None:
        raise UsageError("--follow and --version cannot be combined.", "Leave one out, or offer the version with --level.")
    recording = None if record is None else ReplaySettings(record, record_fraction, record_mb << 20)
    settings = ServiceSettings(
        temperature=temperature,
        max_live_versions=max_live_versions,
        carry_state=_one_of("--on-move", on_move, ("carry", "reset")) == "carry",
        access_log=access_log,
        log_ticks=log_ticks,
        recording=recording,
        log_form=form,
    )
    trial = CanarySettings(hold_s=canary_s, min_requests=canary_requests)
    offering = UpdateSettings(_backend(backend), version, tuple(level or ()), follow, canary_percent=canary, canary=trial)
    gateway = GatewaySettings(
        token_file=token_file,
        token_rate=rate,
        tls=None if tls_cert is None or tls_key is None else (tls_cert, tls_key),
        drain_s=drain_s,
    )
    with stop_on_signals() as stop:
        try:
            sources = parse_sources(runs, local_dir)
            if not json_:
                export = "" if backend == "torch" else f", exporting to {backend} and verifying"
                say(f"loading {', '.join(source.where for source in sources.values())}{export} …")
            gateway = _with_limits(gateway, sources, tick_timeout_s, silent_s, max_sessions)
            connections = replace(gateway.http, connections=max_connections, connections_per_address=max_connections_per_address)
            gateway = replace(gateway, http=connections)
            running = RunningService(sources, offering, settings, gateway, host=host, port=port, workers=workers)
        except NotFound as error:
            raise UsageError(error.message, error.hint) from error
        with running:
            _announce(running, workers, tls_cert is not None, json_)
            running.follow()
            while not stop():
                time.sleep(0.1)
            if not json_:
                logging.getLogger(__name__).info("draining: open sessions may continue for %g s", drain_s)


def _with_limits(
    gateway: GatewaySettings, sources: dict[str, CheckpointSource], tick_s: float | None, silent_s: float | None, most: int | None
) -> GatewaySettings:
    """The limits of the first run's training, overridden by the command line."""
    http, limits = next(iter(sources.values())).limits()
    limits = limits if most is None else replace(limits, sessions=most)
    limits = limits if tick_s is None else replace(limits, tick_s=tick_s)
    limits = limits if silent_s is None else replace(limits, silent_s=silent_s)
    return replace(gateway, http=http, sessions=limits)


def _announce(running: RunningService, workers: int, secure: bool, as_json: bool) -> None:
    from ludus.cli.output import say
    from ludus.io.addresses import url_host

    host, port = running.fleet.address
    versions = {name: agent.current for name, agent in running.follower.routes.agents.items()}
    if as_json:
        print(json.dumps({"host": host, "port": port, "workers": workers, "versions": versions}), flush=True)
        return
    origins = {name: found.origin for name, found in running.follower.serving().items()}
    models = ", ".join(f"{name} version {number} ({origins[name]})" for name, number in versions.items())
    scheme = "https" if secure else "http"
    say(f"serving {models} at {scheme}://{url_host(host)}:{port}/step with {workers} worker{'s' if workers > 1 else ''}")


def _backend(given: str) -> Backend:
    from ludus.serving.release import BACKENDS

    found: Backend = _one_of("--backend", given, BACKENDS)
    return found


def _one_of(option: str, given: str, known: tuple[_Word, ...]) -> _Word:
    for word in known:
        if word == given:
            return word
    raise UsageError(f"{option} {given!r} is not known.", f"Use {' or '.join(known)}.")
