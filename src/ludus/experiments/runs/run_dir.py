"""The directory of a run: its configuration, metadata, metrics and log; creating, opening and finding runs."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import ludus
from ludus.core import trust
from ludus.errors import AlreadyExists, ConfigError, Damaged, LudusError, NotFound, UsageError
from ludus.experiments.runs import remote_runs
from ludus.experiments.runs.remote_runs import directory_of, display_path, store_of
from ludus.io.yaml_documents import dump_yaml
from ludus.storage.base import WriteGuard
from ludus.storage.local import LocalStore
from ludus.storage.redact import redact_command
from ludus.storage.safe_read import MAX_JSON_BYTES, parse_json, read_regular_file

log = logging.getLogger(__name__)

CONFIG, META, METRICS = "config.yaml", "meta.json", "metrics.jsonl"
LOG_FILE = "logs/learner/train.log"
_PARALLEL_FETCHES = 8


class Run:
    """The directory of a run and its metadata. `Run.create` makes a new one, `Run.open` opens an existing one.

    A run on a remote store has a local working directory with copies of its configuration and metadata.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = store_of(directory)
        self.guard: WriteGuard | None = None
        """Raises Fenced if another process owns the run now; nothing more is written then."""
        self._postponed: tuple[Mapping[str, Any], dict[str, Any]] | None = None
        self._handler: logging.Handler | None = None
        self._level_before = logging.NOTSET
        self.status = "failed"  # until the trainer sets another one

    @classmethod
    def create(cls, directory: Path, config: Mapping[str, Any]) -> Run:
        """Raises UsageError if the directory already holds a run, StoreFull if it cannot be written."""
        cls.check_free(directory)
        remote_runs.clear(directory)
        run = cls(directory)
        try:
            run._write(CONFIG, dump_yaml(dict(config)).encode(), overwrite=not remote_runs.is_remote(directory))
        except AlreadyExists as error:  # another host created it meanwhile
            raise _already_exists(directory) from error
        run.write_meta({"status": "running", **_initial_meta(config)})
        return run

    @staticmethod
    def check_free(directory: Path) -> None:
        """Raises UsageError when the directory already holds a run."""
        if holds_run(directory):
            raise _already_exists(directory)

    @classmethod
    def open(cls, directory: Path) -> Run:
        """Raises NotFound if there is no run, StoreError if its store does not answer."""
        trust.note_run(directory)
        remote_runs.fetch(directory)
        if not (directory / CONFIG).exists():
            raise NotFound(
                f"{display_path(directory)} is not the directory of a run (it has no {CONFIG}).",
                "`ludus runs list` shows what there is.",
            )
        return cls(directory)

    def sweep(self) -> None:
        """Remove files that a killed process left incomplete. Only the owner of the run may call it."""
        for prefix in ("", "checkpoints", "fleet/weights", *(f"models/{name}" for name in self.store.list("models"))):
            self.store.sweep(prefix)
        if remote_runs.is_remote(self.directory):
            LocalStore(self.directory).sweep("")

    @property
    def metrics_path(self) -> Path:
        return self.directory / METRICS

    def config(self) -> dict[str, Any]:
        from ludus.config.experiment_file import load_experiments

        read_regular_file(self.directory / CONFIG, limit=MAX_JSON_BYTES)  # refuses a pipe, which would block
        loaded = load_experiments(self.directory / CONFIG)
        ((name, data),) = loaded.items()
        return {"name": name, **data}

    def meta(self) -> dict[str, Any]:
        try:
            data = parse_json(self.store.get(META), META)
        except (NotFound, Damaged):
            return {}
        return data if isinstance(data, dict) else {}

    def write_meta(self, changes: Mapping[str, Any]) -> None:
        """Raises Fenced, StoreError."""
        if self._postponed is not None:
            self._postponed[1].update(changes)
            return
        if self.guard is not None:
            self.guard()
        self._write(META, json.dumps(self.meta() | dict(changes), indent=1).encode())

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self.guard is not None:
            self.guard()
        self._write(CONFIG, dump_yaml(dict(config)).encode())

    def prepare_resume(self, config: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Hold back all writes until `commit_resume`: before the claim, the run may belong to another process."""
        initial = {} if self.meta().get("id") else _initial_meta(config)  # killed between its configuration and its metadata
        self._postponed = config, initial | dict(meta)

    def commit_resume(self) -> None:
        """Write what `prepare_resume` held back; call it once the run is claimed. No-op for a new run. Raises Fenced, StoreError."""
        if self._postponed is not None:
            (config, meta), self._postponed = self._postponed, None
            self.write_config(config)
            self.write_meta(meta)

    def _write(self, name: str, data: bytes, *, overwrite: bool = True) -> None:
        self.store.put(name, data, overwrite=overwrite)
        if remote_runs.is_remote(self.directory):
            LocalStore(self.directory).put(name, data)

    def close(self) -> None:
        """Write the final status into the metadata, unless the run was never claimed, and close the log."""
        try:
            self.write_meta({"status": self.status, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        except LudusError as error:  # must not hide the error that ended the run
            log.warning("could not record status %s in the metadata of %s: %s", self.status, display_path(self.directory), error)
        finally:
            self.stop_log()

    def start_log(self) -> None:
        """Write the package's log into the run, with bounded size; other handlers of the process stay."""
        path = self.directory / LOG_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = _QuietFileHandler(path, maxBytes=5_000_000, backupCount=3, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handler.setLevel(logging.INFO)
        ours = logging.getLogger("ludus")
        ours.addHandler(self._handler)
        self._level_before = ours.level
        if ours.getEffectiveLevel() > logging.INFO:
            ours.setLevel(logging.INFO)

    def stop_log(self) -> None:
        if self._handler is not None:
            logging.getLogger("ludus").removeHandler(self._handler)
            logging.getLogger("ludus").setLevel(self._level_before)
            with contextlib.suppress(OSError):  # the disk is full
                self._handler.close()
            self._handler = None


class _QuietFileHandler(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        """Ignored: the failed write of a checkpoint or metric already reports a full disk."""


def config_seed(config: Mapping[str, Any]) -> Any:
    inner = next(iter(config.values())) if len(config) == 1 else config
    return inner.get("config", {}).get("seed") if isinstance(inner, Mapping) else None


def holds_run(directory: Path) -> bool:
    """Whether there is a run, locally or on the store. Raises StoreError."""
    remote_runs.fetch(directory, growing=False)
    return (directory / CONFIG).exists()


def _already_exists(directory: Path) -> UsageError:
    where = display_path(directory)
    return UsageError(f"{where} already holds a run.", f"Continue it with --resume {where}, or choose another name.")


def run_directory(
    name: str, algorithm: str, env: str, local_dir: str | Path, project: str | Path | None, trial: str | None
) -> Path:
    """`<local-dir>/<experiment>/<RUN>_<env>_<time>-<id>`, or `<project>/<trial>` when given."""
    if (project is None) != (trial is None):
        raise ConfigError("--project and --trial go together.")
    if project is not None and trial is not None:
        if not re.fullmatch(r"[\w.+-]+", trial) or trial.startswith("."):
            raise ConfigError(f"--trial {trial!r} is not a plain name.")
        return directory_of(project) / trial
    safe = re.sub(r"[^\w.+-]+", "-", env)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    return directory_of(local_dir) / name / f"{re.sub(r'[^A-Za-z0-9]+', '-', algorithm)}_{safe}_{stamp}-{uuid.uuid4().hex[:5]}"


def is_script(directory: Path) -> bool:
    """Whether this is the trial of a script (`ludus.init`), which has metadata and metrics but no config."""
    return not (directory / CONFIG).exists() and Run(directory).meta().get("kind") == "session"


def find_runs(where: str | Path, depth: int = 4) -> list[Path]:
    """All runs at or below a path or URL, trials of sweeps and scripts included, oldest first.

    For a remote store: their working directories, updated from the store.
    """
    directory = directory_of(where)
    if remote_runs.is_remote(directory):
        return _find_remote_runs(directory, depth)
    found = _runs_below(directory, depth)
    return sorted(found, key=lambda run: _marker_file(run).stat().st_mtime)


def _find_remote_runs(directory: Path, depth: int) -> list[Path]:
    store, found, level = store_of(directory), list[str](), [""]
    with ThreadPoolExecutor(_PARALLEL_FETCHES, "ludus-find") as pool:
        for left in range(depth, -1, -1):
            listed = dict(zip(level, pool.map(store.list, level), strict=True))
            runs = [key for key, names in listed.items() if CONFIG in names or META in names]
            found += runs
            below = [f"{key}/{name}".lstrip("/") for key, names in listed.items() if key not in runs for name in names]
            level = below if left else []
        list(
            pool.map(
                lambda key: remote_runs.fetch(directory / key, get=lambda name: store.get(f"{key}/{name}".lstrip("/"))), found
            )
        )
    return sorted((directory / key for key in found), key=start_time)


def start_time(run: Path) -> float:
    """Start time from the metadata, since file times of a remote run are those of the last fetch."""
    with contextlib.suppress(OSError, Damaged, ValueError, KeyError, TypeError):
        return datetime.fromisoformat(
            parse_json(read_regular_file(run / META, limit=MAX_JSON_BYTES), META)["started"]
        ).timestamp()
    return 0.0


def _runs_below(directory: Path, depth: int) -> list[Path]:
    if (directory / CONFIG).exists() or ((directory / META).exists() and is_script(directory)):
        return [directory]
    if depth == 0 or not directory.is_dir():
        return []
    return [run for child in sorted(directory.iterdir()) if _may_hold_runs(child) for run in _runs_below(child, depth - 1)]


def _may_hold_runs(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")  # hidden: being written or deleted


def _marker_file(run: Path) -> Path:
    return run / (CONFIG if (run / CONFIG).exists() else META)


def _initial_meta(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_provenance(), "seed": config_seed(config)}


def _provenance() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"ludus": ludus.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "versions": versions,
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git_commit": _git_commit(),
        "id": uuid.uuid4().hex,  # distinguishes runs of the same name
        "command": redact_command(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git_commit() -> str | None:
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None
