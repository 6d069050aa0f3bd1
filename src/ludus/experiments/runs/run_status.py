"""The live status of a run (`RUN/status.json`): writing, reading, classifying and formatting it.

The trainer replaces the file atomically once a second. Training does not depend on it; readers show fewer numbers without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ludus.core.formatting import pluralize
from ludus.core.metrics import Numbers, read_jsonl
from ludus.errors import Fenced, NotFound, StoreUnavailable
from ludus.experiments.control.bottleneck import Load, describe_bottleneck, percent
from ludus.experiments.runs import remote_runs
from ludus.experiments.runs.run_dir import CONFIG, META, METRICS
from ludus.io.atomic_file import open_for_replace
from ludus.process import procfs
from ludus.process.identity import is_alive_since, start_ticks
from ludus.storage.base import WriteGuard

log = logging.getLogger(__name__)

FILE = "status.json"
WRITE_EVERY_S = 1.0
SILENT_S = 15.0
"""A run on another host that has not written for this long no longer counts as running."""

ENDED = ("finished", "interrupted", "failed")
_COMPONENTS = ("sampler/", "memory/", "learner/", "games/")
_PROGRESS = ("timesteps", "iterations", "episodes", "time_s", "fps", "episode_return_mean", "learner_share")


# -- processes -----------------------------------------------------------------------------------------------------------


def identity(pid: int | None = None) -> dict[str, Any]:
    """Identifies a process even after its pid is reused."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "started": start_ticks(number) or 0, "host": platform.node(), "space": _pid_space()}


def _pid_space() -> str:
    """The pid namespace: containers may share a host name but not its processes."""
    return str(procfs.pid_namespace() or "")


def is_alive(who: Mapping[str, Any]) -> bool | None:
    """Whether that process runs; None if it is on another host or in another pid namespace."""
    if not who.get("pid") or who.get("host") != platform.node() or who.get("space", "") not in ("", _pid_space()):
        return None
    return is_alive_since(int(who["pid"]), int(who.get("started", 0)))


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# -- writing -------------------------------------------------------------------------------------------------------------


def write(directory: Path, data: Mapping[str, Any], guard: WriteGuard | None = None) -> None:
    """Replace the file atomically. Not synced: the status is worthless after a crash of the host.

    `guard` is called when all is written but the file is not replaced yet; an exception of it discards what was written.
    """
    with open_for_replace(directory / FILE) as file:
        file.write(json.dumps(_finite(dict(data)), indent=1).encode())
        if guard is not None:
            guard()


def _finite(value: Any) -> Any:
    """Convert to plain JSON: NumPy numbers become Python numbers, non-finite ones null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return (int(number) if number.is_integer() else round(number, 6)) if math.isfinite(number) else None


class StatusWriter:
    """Writes the fields that `read_fields()` returns, on a background thread, also during long updates and evaluations.

    A context manager. `read_fields` must not block; it is called on that thread until the block is left. `guard` raises Fenced if
    another process owns the run now; then writing stops.
    """

    def __init__(
        self,
        directory: Path,
        read_fields: Callable[[], Mapping[str, Any]],
        every_s: float = WRITE_EVERY_S,
        guard: WriteGuard | None = None,
    ) -> None:
        self._directory, self._read_fields, self._every_s, self._guard = directory, read_fields, every_s, guard
        self._since, self._who = now_text(), identity()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ludus-status", daemon=True)
        self._warned = False
        self.final: Mapping[str, Any] = {"state": "failed"}
        """Fields of the last write. Set them before leaving the block, else the run counts as failed."""
        self._rates = WorkerRates()

    def __enter__(self) -> StatusWriter:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(5.0)
        self._write(ended=now_text(), **self.final)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._write()

    def _write(self, **more: Any) -> None:
        try:
            fields = {**self._who, "since": self._since, "written": time.time(), **self._read_fields(), **more}
            self._rates.add_to(fields.get("sampling", {}).get("workers", []), time.monotonic())
            write(self._directory, fields, self._check_ownership)
        except Fenced:  # the trainer reports it
            self._over.set()
        except Exception:  # e.g. a full disk, or a worker that joins during the read: must not stop training
            if not self._warned:
                self._warned = True
                log.warning("%s could not be written", self._directory / FILE, exc_info=True)

    def _check_ownership(self) -> None:
        if self._guard is not None:
            with contextlib.suppress(StoreUnavailable):  # ownership cannot be checked now
                self._guard()


class WorkerRates:
    """Steps per second and time shares of each worker, from the difference between two readings of its counters."""

    SHARES: ClassVar[Mapping[str, str]] = {
        "environment_s": "env_share",
        "policy_s": "policy_share",
        "blocked_s": "blocked_share",
        "weights_wait_s": "weights_wait_share",
    }

    def __init__(self) -> None:
        self._before: dict[Any, tuple[float, dict[str, Any]]] = {}
        self._rates: dict[Any, dict[str, float]] = {}

    def add_to(self, workers: Sequence[dict[str, Any]], now: float) -> None:
        for worker in workers:
            key = worker.get("worker")
            then, before = self._before.get(key, (now, worker))
            seconds, steps = now - then, worker.get("steps", 0.0) - before.get("steps", 0.0)
            spent = {name: worker[name] - before[name] for name in self.SHARES if name in worker and name in before}
            if seconds > 0 and steps >= 0 and not steps and not any(spent.values()) and key in self._rates:
                worker.update({name: value for name, value in self._rates[key].items() if name not in worker})
                continue  # no segment finished since the last reading: extend the window
            self._before[key] = now, dict(worker)
            if seconds <= 0 or steps < 0:  # its first reading, or it restarted and counts from 0
                continue
            window = max(seconds, sum(spent.values()))  # counters cover whole segments, which may have begun before the window
            rates = {"fps": steps / window} | {self.SHARES[name]: value / window for name, value in spent.items()}
            self._rates[key] = rates
            for name, value in rates.items():
                worker.setdefault(name, value)


def status_fields(numbers: Numbers, sampling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a status that come from the metrics of a run and from its samplers."""
    return {
        "progress": {name: numbers[name] for name in _PROGRESS if name in numbers},
        "numbers": {name: value for name, value in numbers.items() if name.startswith(_COMPONENTS)},
        "bottleneck": describe_bottleneck(numbers),
        **({"sampling": dict(sampling)} if sampling else {}),
    }


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """The status of a run as another process sees it."""

    run: Path
    state: str
    """running, starting, restarting, finished, interrupted, failed, dead, silent or unknown."""
    sentence: str
    """The state in words, with times and what to do."""
    status: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.status.items() if key != "state"}
        restarts = self.meta.get("learner_restarts", kept.get("restarts", 0))
        return {
            "run": remote_runs.display_path(self.run),
            "state": self.state,
            "said": self.sentence,
            **kept,
            "restarts": restarts,
        }


def read_status(where: str | Path, *, fetched: bool = False) -> RunStatus:
    """Raises NotFound if there is no run, StoreError if its store does not answer. `fetched`: the working directory is up to date."""
    directory = remote_runs.directory_of(where)
    if not fetched:
        remote_runs.fetch(directory, metrics=False)  # they may be large, and the status has the newest values
    meta, status, hub = (_read_json(directory / name) for name in (META, FILE, "hub.json"))
    if not (directory / CONFIG).exists() and not meta:
        raise NotFound(
            f"{remote_runs.display_path(directory)} is not the directory of a run.", "`ludus runs list` shows what there is."
        )
    state, sentence = classify_run(meta, status, hub, time.time(), is_alive)
    if not status.get("progress"):
        if not fetched:
            remote_runs.fetch(directory)
        status |= _from_metrics(directory)
    return RunStatus(directory, state, sentence, status, meta)


def classify_run(
    meta: Mapping[str, Any],
    status: Mapping[str, Any],
    hub: Mapping[str, Any],
    now: float,
    living: Callable[[Mapping[str, Any]], bool | None],
) -> tuple[str, str]:
    """(state, sentence) from the files of the run. `living`: whether a process runs; None: unknown."""
    if status.get("state") in ("starting", "restarting") and living(status):
        return status["state"], str(status.get("why") or "the learner starts")
    if meta.get("status") in ENDED:
        how = (
            f" ({describe_stop(str(status['stopped_by']))})"
            if status.get("stopped_by") and status.get("state") == meta["status"]
            else ""
        )
        why = f": {meta['error']}" if meta.get("error") else ""
        return meta["status"], f"{meta['status']}{how} at {meta.get('ended', 'an unknown time')}{why}"
    if meta.get("kind") == "session":
        return _classify_session(hub, living)
    if not status:
        return (
            "unknown",
            f"started {meta.get('started', '?')}; it has left no {FILE}, so whether it still runs is unknown",
        )
    here, age = living(status), now - float(status.get("written") or 0.0)
    where = f"process {status.get('pid')} on {status.get('host')}"
    if here is False:
        return (
            "dead",
            f"dead: {where} is gone, last seen {_format_age(age)}; `ludus train --resume` continues from its newest checkpoint",
        )
    if here is None and age > SILENT_S:
        return (
            "silent",
            f"silent: {where} has not written for {_format_age(age).removesuffix(' ago')}; it cannot be seen from here",
        )
    return "running", f"running since {status.get('since', '?')} as {where}"


def _classify_session(hub: Mapping[str, Any], living: Callable[[Mapping[str, Any]], bool | None]) -> tuple[str, str]:
    """State of a script's trial; its hub.json names the process that has it open."""
    if not hub:
        return "finished", "closed: no process has it open"
    where = f"process {hub.get('pid')} on {hub.get('host')}"
    here = living(hub)
    if here is False:
        return "dead", f"dead: {where} is gone; opening it again continues from its newest weights"
    return ("running", f"open in {where}") if here else ("unknown", f"opened by {where}, which cannot be seen from here")


def _format_age(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 0:
        return "at an unknown time"
    for size, word in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago"
    return f"{seconds:.0f} s ago"


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # absent, or not JSON
        data = json.loads(path.read_bytes())
        return data if isinstance(data, dict) else {}
    return {}


def _from_metrics(directory: Path) -> dict[str, Any]:
    rows = read_jsonl(directory / METRICS)
    numbers = {name: value for name, value in (rows[-1] if rows else {}).items() if isinstance(value, (int, float))}
    return status_fields(numbers) if numbers else {}


# -- formatting ----------------------------------------------------------------------------------------------------------

STOP_REASONS = {
    "timesteps": "step limit reached",
    "iterations": "iteration limit reached",
    "training_iteration": "iteration limit reached",
    "episodes": "episode limit reached",
    "time_s": "time limit reached",
    "episode_return_mean": "target return reached",
}
"""Key of the stop condition → text."""

_INTERRUPTED = "interrupted"


def is_interruption(stopped_by: str) -> bool:
    return stopped_by.startswith(_INTERRUPTED)


def describe_stop(stopped_by: str) -> str:
    """`time limit reached`, from the key of the stop condition; `interrupted by Ctrl-C`, from `interrupted (SIGINT)`."""
    if is_interruption(stopped_by):
        signal = stopped_by.removeprefix(_INTERRUPTED).strip(" ()")
        return f"interrupted by {'Ctrl-C' if signal == 'SIGINT' else signal}" if signal else _INTERRUPTED
    return STOP_REASONS.get(stopped_by, stopped_by)


def summarize_load(numbers: Numbers) -> str:
    """One line about the load of samplers and learner; empty for a run in one process."""
    parts: list[str] = []
    if not any(name.startswith("sampler/") or name in ("learner/wait_share", "learner/restarts") for name in numbers):
        return ""
    load = Load.from_metrics(numbers)
    if load.is_measured:
        waits = f", learner waits {percent(numbers['learner/wait_share'])}" if "learner/wait_share" in numbers else ""
        parts.append(f"sampler {percent(load.sampling)} busy{waits}")
    if "learner/lag_mean" in numbers:
        most = f" (max {numbers['learner/lag_max']:.0f})" if _is_finite(numbers, "learner/lag_max") else ""
        parts.append(f"lag {numbers['learner/lag_mean']:.1f}{most}")
    drops = sum(numbers.get(name, 0.0) for name in ("memory/dropped", "learner/dropped_lag"))
    if drops:
        parts.append(f"{drops:,.0f} dropped")
    if counted := _worker_counts(numbers):
        parts.append(counted)
    return " · ".join(parts)


def _worker_counts(numbers: Numbers) -> str:
    words = []
    if "sampler/workers" in numbers:
        words.append(pluralize(numbers["sampler/workers"], "worker"))
    if numbers.get("sampler/nodes", 1.0) > 1:
        words.append(pluralize(numbers["sampler/nodes"], "node"))
    if numbers.get("sampler/lost_nodes"):
        words.append(pluralize(numbers["sampler/lost_nodes"], "node") + " lost")
    if numbers.get("sampler/restarts"):
        words.append(pluralize(numbers["sampler/restarts"], "restart"))
    if numbers.get("sampler/env_restarts"):
        words.append(pluralize(numbers["sampler/env_restarts"], "environment") + " recreated")
    if numbers.get("learner/restarts"):
        words.append(f"learner restarted {numbers['learner/restarts']:.0f}×")
    return ", ".join(words)


def _is_finite(numbers: Numbers, name: str) -> bool:
    return math.isfinite(numbers.get(name, math.nan))
