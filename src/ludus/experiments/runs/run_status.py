"""`RUN/status.json`: what a run is doing now, for whoever looks from outside. And how it is read, judged and put into words.

Whoever trains writes it once a second, always as a whole. Nothing depends on it: a run without it has fewer numbers to show.
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

from ludus.core.metrics import Numbers, read_jsonl
from ludus.errors import Fenced, NotFound, StoreUnavailable
from ludus.experiments.control.bottleneck import Load, describe_bottleneck, percent
from ludus.experiments.control.stop_reason import in_words
from ludus.experiments.runs import remote_runs
from ludus.experiments.runs.run_dir import CONFIG, META, METRICS
from ludus.io.atomic_file import replace_json
from ludus.process import procfs
from ludus.process.identity import is_alive_since, start_ticks
from ludus.storage.base import WriteGuard

log = logging.getLogger(__name__)

FILE = "status.json"
WRITE_EVERY_S = 1.0
SILENT_S = 15.0
"""A run on another host that has not written for so long is not called running any more."""

ENDED = ("finished", "interrupted", "failed")
_COMPONENTS = ("sampler/", "memory/", "learner/", "games/")
_PROGRESS = ("timesteps", "iterations", "episodes", "time_s", "fps", "episode_return_mean", "learner_share")


# -- who -----------------------------------------------------------------------------------------------------------------


def identity(pid: int | None = None) -> dict[str, Any]:
    """A process, so that it can be told from another one that gets its number later."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "started": start_ticks(number) or 0, "host": platform.node(), "space": _pid_space()}


def _pid_space() -> str:
    """Containers may share a host's name, and not its processes."""
    return str(procfs.pid_namespace() or "")


def lives(who: Mapping[str, Any]) -> bool | None:
    """Whether that process runs; None when it cannot be seen from here."""
    if not who.get("pid") or who.get("host") != platform.node() or who.get("space", "") not in ("", _pid_space()):
        return None
    return is_alive_since(int(who["pid"]), int(who.get("started", 0)))


def now_text() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


# -- writing -------------------------------------------------------------------------------------------------------------


def write(directory: Path, data: Mapping[str, Any]) -> None:
    """Replace the file as a whole. Not synced: after a crash of the machine nobody asks what the run was doing."""
    replace_json(directory / FILE, _finite(dict(data)), indent=1)


def _finite(value: Any) -> Any:
    """Plain JSON: numbers of NumPy become Python's, what is not finite becomes null."""
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
    """Writes what `look()` says, in a thread of its own: also while an update or an evaluation takes minutes.

    A context manager. `look` must not wait, and may be called from that thread until the block is left. `guard` raises Fenced when
    the run is another process's now; then nothing more is written.
    """

    def __init__(
        self,
        directory: Path,
        look: Callable[[], Mapping[str, Any]],
        every_s: float = WRITE_EVERY_S,
        guard: WriteGuard | None = None,
    ) -> None:
        self._directory, self._look, self._every_s, self._guard = directory, look, every_s, guard
        self._since, self._who = now_text(), identity()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ludus-status", daemon=True)
        self._complained = False
        self.final: Mapping[str, Any] = {"state": "failed"}
        """What is said at the end beside the last look, until somebody knows better."""
        self._rates = Rates()

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
            seen = {**self._who, "since": self._since, "written": time.time(), **self._look(), **more}
            self._rates.add_to(seen.get("sampling", {}).get("workers", []), time.monotonic())
            if self._guard is not None:
                with contextlib.suppress(StoreUnavailable):  # for the moment nobody knows
                    self._guard()
            write(self._directory, seen)
        except Fenced:  # the training itself says so
            self._over.set()
        except Exception:  # a full disk, a worker that comes just now: the run itself must not suffer from being watched
            if not self._complained:
                self._complained = True
                log.warning("%s could not be written", self._directory / FILE, exc_info=True)


class Rates:
    """Steps per second and shares of time of each worker, from its counters as they were a moment before."""

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
                continue  # a segment takes longer than the time between two looks: the window grows until it is there
            self._before[key] = now, dict(worker)
            if seconds <= 0 or steps < 0:  # its first moment; or it was moved, and counts from 0
                continue
            whole = max(seconds, sum(spent.values()))  # counters come with whole segments, which may have begun before the window
            rates = {"fps": steps / whole} | {self.SHARES[name]: value / whole for name, value in spent.items()}
            self._rates[key] = rates
            for name, value in rates.items():
                worker.setdefault(name, value)


def described(numbers: Numbers, sampling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The part of a status that comes from the numbers of a run, and from whoever samples."""
    return {
        "progress": {name: numbers[name] for name in _PROGRESS if name in numbers},
        "numbers": {name: value for name, value in numbers.items() if name.startswith(_COMPONENTS)},
        "bottleneck": describe_bottleneck(numbers),
        **({"sampling": dict(sampling)} if sampling else {}),
    }


# -- reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """One look at a run from outside."""

    run: Path
    state: str
    """running, starting, restarting, finished, interrupted, failed, dead, silent or unknown."""
    said: str
    """The same as a sentence: since when, until when, what to do."""
    status: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.status.items() if key != "state"}
        restarts = self.meta.get("learner_restarts", kept.get("restarts", 0))
        return {"run": remote_runs.shown(self.run), "state": self.state, "said": self.said, **kept, "restarts": restarts}


def look(where: str | Path, *, fetched: bool = False) -> Look:
    """Raises NotFound when there is no run, StoreError when its store does not answer. `fetched`: it was asked just now."""
    directory = remote_runs.directory_of(where)
    if not fetched:
        remote_runs.fetch(directory, metrics=False)  # they may be long, and a status has what is needed of them
    meta, status, hub = (_json(directory / name) for name in (META, FILE, "hub.json"))
    if not (directory / CONFIG).exists() and not meta:
        raise NotFound(f"{remote_runs.shown(directory)} is not the directory of a run.", "`ludus runs list` shows what there is.")
    state, said = judge(meta, status, hub, time.time(), lives)
    if not status.get("progress"):
        if not fetched:
            remote_runs.fetch(directory)
        status |= _from_metrics(directory)
    return Look(directory, state, said, status, meta)


def judge(
    meta: Mapping[str, Any],
    status: Mapping[str, Any],
    hub: Mapping[str, Any],
    now: float,
    living: Callable[[Mapping[str, Any]], bool | None],
) -> tuple[str, str]:
    """(state, sentence) from what the run has written; `living` says whether a process runs, None when that cannot be seen."""
    if status.get("state") in ("starting", "restarting") and living(status):
        return status["state"], str(status.get("why") or "the learner starts")
    if meta.get("status") in ENDED:
        how = (
            f" ({in_words(str(status['stopped_by']))})"
            if status.get("stopped_by") and status.get("state") == meta["status"]
            else ""
        )
        why = f": {meta['error']}" if meta.get("error") else ""
        return meta["status"], f"{meta['status']}{how} at {meta.get('ended', 'an unknown time')}{why}"
    if meta.get("kind") == "session":
        return _judged_session(hub, living)
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
            f"dead: {where} is gone, last seen {_ago(age)}; `ludus train --resume` continues from its newest checkpoint",
        )
    if here is None and age > SILENT_S:
        return "silent", f"silent: {where} has not written for {_ago(age).removesuffix(' ago')}; it cannot be seen from here"
    return "running", f"running since {status.get('since', '?')} as {where}"


def _judged_session(hub: Mapping[str, Any], living: Callable[[Mapping[str, Any]], bool | None]) -> tuple[str, str]:
    """A trial of a script: its hub says where it is."""
    if not hub:
        return "finished", "closed: no process has it open"
    where = f"process {hub.get('pid')} on {hub.get('host')}"
    here = living(hub)
    if here is False:
        return "dead", f"dead: {where} is gone; opening it again continues from its newest weights"
    return ("running", f"open in {where}") if here else ("unknown", f"opened by {where}, which cannot be seen from here")


def _ago(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 0:
        return "at an unknown time"
    for size, word in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago"
    return f"{seconds:.0f} s ago"


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # absent, or not ours
        data = json.loads(path.read_bytes())
        return data if isinstance(data, dict) else {}
    return {}


def _from_metrics(directory: Path) -> dict[str, Any]:
    rows = read_jsonl(directory / METRICS)
    numbers = {name: value for name, value in (rows[-1] if rows else {}).items() if isinstance(value, (int, float))}
    return described(numbers) if numbers else {}


# -- in words ------------------------------------------------------------------------------------------------------------


def summary(numbers: Numbers) -> str:
    """How the parts of a run keep up with each other, in one line; empty for a run in one process."""
    parts: list[str] = []
    if not any(name.startswith("sampler/") or name in ("learner/wait_share", "learner/restarts") for name in numbers):
        return ""
    load = Load.from_metrics(numbers)
    if load.is_measured:
        waits = f", learner waits {percent(numbers['learner/wait_share'])}" if "learner/wait_share" in numbers else ""
        parts.append(f"sampler {percent(load.sampling)} busy{waits}")
    if "learner/lag_mean" in numbers:
        most = f" (max {numbers['learner/lag_max']:.0f})" if _known(numbers, "learner/lag_max") else ""
        parts.append(f"lag {numbers['learner/lag_mean']:.1f}{most}")
    drops = sum(numbers.get(name, 0.0) for name in ("memory/dropped", "learner/dropped_lag"))
    if drops:
        parts.append(f"{drops:,.0f} dropped")
    if counted := _counted(numbers):
        parts.append(counted)
    return " · ".join(parts)


def _counted(numbers: Numbers) -> str:
    words = []
    if "sampler/workers" in numbers:
        words.append(many(numbers["sampler/workers"], "worker"))
    if numbers.get("sampler/nodes", 1.0) > 1:
        words.append(many(numbers["sampler/nodes"], "node"))
    if numbers.get("sampler/lost_nodes"):
        words.append(many(numbers["sampler/lost_nodes"], "node") + " lost")
    if numbers.get("sampler/restarts"):
        words.append(many(numbers["sampler/restarts"], "restart"))
    if numbers.get("sampler/env_restarts"):
        words.append(many(numbers["sampler/env_restarts"], "environment") + " made anew")
    if numbers.get("learner/restarts"):
        words.append(f"learner restarted {numbers['learner/restarts']:.0f}×")
    return ", ".join(words)


def _known(numbers: Numbers, name: str) -> bool:
    return math.isfinite(numbers.get(name, math.nan))


def many(number: float, word: str) -> str:
    return f"{number:,.0f} {word}{'' if number == 1 else 's'}"
