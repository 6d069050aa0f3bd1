"""Prometheus metrics of the server and its games."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ludus.gamecore.server.resource_usage import own_usage

if TYPE_CHECKING:
    from ludus.gamecore.server.process_table import ProcessTable

MEDIA = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, str], float]
Family = tuple[str, str, str, list[Sample]]


def render(table: ProcessTable, replies: Mapping[int, int]) -> bytes:
    """Render all metrics. Ids and names contain only letters, digits and '._-', so labels are not escaped."""
    lines: list[str] = []
    for name, kind, help_text, samples in _families(table, replies):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            inner = ",".join(f'{key}="{label}"' for key, label in labels.items())
            number = int(value) if float(value).is_integer() else float(value)
            lines.append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")
    return ("\n".join(lines) + "\n").encode()


def _families(table: ProcessTable, replies: Mapping[int, int]) -> Iterator[Family]:
    running = table.running
    states = Counter((record.request.game, record.status.state) for record in running)
    yield "ludus_gamecore_games", "gauge", "Games that run.", [
        ({"game": game, "state": state}, states[game, state]) for game in table.catalogue.games for state in ("starting", "running")
    ]  # fmt: skip
    yield "ludus_gamecore_games_limit", "gauge", "Games that may run.", [({}, table.limits.games)]
    events: list[Sample] = [({"game": game, "event": event}, count) for (game, event), count in sorted(table.counts.items())]
    yield "ludus_gamecore_events_total", "counter", "What happened to games: started, restarted, and how they ended.", events
    yield "ludus_gamecore_known_games", "gauge", "Games that are over and not forgotten.", [({}, table.finished_count)]
    for name, kind, help_text, key in (
        ("ludus_gamecore_game_cpu_seconds_total", "counter", "Processor time of a game, its children included.", "cpu_s"),
        ("ludus_gamecore_game_memory_bytes", "gauge", "Memory of a game, its children included.", "memory_mb"),
        ("ludus_gamecore_game_threads", "gauge", "Threads of a game, its children included.", "threads"),
        ("ludus_gamecore_game_restarts", "gauge", "How often a game was started again.", "restarts"),
    ):
        scale = 1e6 if key == "memory_mb" else 1.0
        yield name, kind, help_text, [
            ({"runtime_id": record.status.runtime_id, "game": record.request.game}, getattr(record.status, key) * scale)
            for record in running
        ]  # fmt: skip
    ages: list[Sample] = [
        ({"runtime_id": record.status.runtime_id, "game": record.request.game}, round(time.time() - record.status.started, 3))
        for record in running
    ]
    yield "ludus_gamecore_game_seconds", "gauge", "How long a game has run.", ages
    server, files = own_usage()
    yield "ludus_gamecore_server_cpu_seconds_total", "counter", "Processor time of the server.", [({}, server.cpu_s)]
    yield "ludus_gamecore_server_memory_bytes", "gauge", "Memory of the server.", [({}, server.memory_mb * 1e6)]
    yield "ludus_gamecore_server_threads", "gauge", "Threads of the server.", [({}, server.threads)]
    yield "ludus_gamecore_server_open_files", "gauge", "Open files of the server.", [({}, files)]
    counts: list[Sample] = [({"status": str(status)}, count) for status, count in sorted(replies.items())]
    yield "ludus_gamecore_requests_total", "counter", "Requests that were answered, by status.", counts
