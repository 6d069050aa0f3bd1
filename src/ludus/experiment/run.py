"""A run: one execution of an experiment, with a directory that holds everything it leaves behind."""

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
from pathlib import Path
from typing import Any

import ludus
from ludus.config import dump_yaml
from ludus.errors import ConfigError, LudusError, NotFound, UsageError
from ludus.store.local import LocalStore

CONFIG, META, METRICS = "config.yaml", "meta.json", "metrics.jsonl"
LOG_FILE = "logs/learner/train.log"


class Run:
    """The directory and its metadata; `Run.create` makes a new one, `Run.open` takes up an old one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = LocalStore(directory)
        self._handler: logging.Handler | None = None
        self._level_before = logging.NOTSET
        self.status = "failed"  # until the one who trains says otherwise

    @classmethod
    def create(cls, directory: Path, config: Mapping[str, Any]) -> Run:
        """Raises UsageError when the directory already holds a run; StoreFull when it cannot be written."""
        cls.check_free(directory)
        run = cls(directory)
        run.write_config(config)
        run.write_meta({"status": "running", **_provenance(), "seed": config_seed(config)})
        return run

    @staticmethod
    def check_free(directory: Path) -> None:
        """Raises UsageError when the directory already holds a run."""
        if (directory / CONFIG).exists():
            raise UsageError(
                f"{directory} already holds a run.", f"Continue it with --resume {directory}, or choose another name."
            )

    @classmethod
    def open(cls, directory: Path) -> Run:
        """Raises NotFound when there is no run."""
        if not (directory / CONFIG).exists():
            raise NotFound(
                f"{directory} is not the directory of a run (it has no {CONFIG}).", "`ludus runs list` shows what there is."
            )
        return cls(directory)

    def sweep(self) -> None:
        """Remove what a killed process left half written. Only for the one that takes the run over."""
        for prefix in ("", "checkpoints", *(f"models/{name}" for name in self.store.list("models"))):
            self.store.sweep(prefix)

    @property
    def metrics_path(self) -> Path:
        return self.directory / METRICS

    def config(self) -> dict[str, Any]:
        from ludus.config import load_experiments

        loaded = load_experiments(self.directory / CONFIG)
        ((name, data),) = loaded.items()
        return {"name": name, **data}

    def meta(self) -> dict[str, Any]:
        try:
            data = json.loads(self.store.get(META))
        except (NotFound, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def write_meta(self, changes: Mapping[str, Any]) -> None:
        self.store.put(META, json.dumps(self.meta() | dict(changes), indent=1).encode())

    def write_config(self, config: Mapping[str, Any]) -> None:
        self.store.put(CONFIG, dump_yaml(dict(config)).encode())

    def close(self) -> None:
        """How it went goes into the metadata, and the log ends."""
        try:
            with contextlib.suppress(LudusError):  # a full disk must not hide what really happened
                self.write_meta({"status": self.status, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        finally:
            self.stop_log()

    def start_log(self) -> None:
        """Write the package's log into the run, bounded, beside whatever else the process does with logging."""
        path = self.directory / LOG_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = _RunLog(path, maxBytes=5_000_000, backupCount=3, encoding="utf-8")
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
            with contextlib.suppress(OSError):  # what did not fit on a full disk
                self._handler.close()
            self._handler = None


class _RunLog(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of logging
        """A full disk is said once, by what could not be stored; not again by every line of the log."""


def config_seed(config: Mapping[str, Any]) -> Any:
    inner = next(iter(config.values())) if len(config) == 1 else config
    return inner.get("config", {}).get("seed") if isinstance(inner, Mapping) else None


def run_directory(name: str, algorithm: str, env: str, local_dir: Path, project: Path | None, trial: str | None) -> Path:
    """`<local-dir>/<experiment>/<RUN>_<env>_<time>-<id>`, or `<project>/<trial>` when given."""
    if (project is None) != (trial is None):
        raise ConfigError("--project and --trial go together.")
    if project is not None and trial is not None:
        if not re.fullmatch(r"[\w.+-]+", trial) or trial.startswith("."):
            raise ConfigError(f"--trial {trial!r} is not a plain name.")
        return project.expanduser() / trial
    safe = re.sub(r"[^\w.+-]+", "-", env)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    return local_dir.expanduser() / name / f"{re.sub(r'[^A-Za-z0-9]+', '-', algorithm)}_{safe}_{stamp}-{uuid.uuid4().hex[:5]}"


def is_script(directory: Path) -> bool:
    """Whether this is the trial of a script (`ludus.init`): it has no config, only what it says of itself and its metrics."""
    return not (directory / CONFIG).exists() and Run(directory).meta().get("kind") == "session"


def find_runs(directory: Path, depth: int = 4) -> list[Path]:
    """All runs at or below a directory, trials of sweeps and of scripts among them, oldest first."""
    found = _runs_below(directory, depth)
    return sorted(found, key=lambda run: _marked(run).stat().st_mtime)


def _runs_below(directory: Path, depth: int) -> list[Path]:
    if (directory / CONFIG).exists() or ((directory / META).exists() and is_script(directory)):
        return [directory]
    if depth == 0 or not directory.is_dir():
        return []
    return [run for child in sorted(directory.iterdir()) if child.is_dir() for run in _runs_below(child, depth - 1)]


def _marked(run: Path) -> Path:
    return run / (CONFIG if (run / CONFIG).exists() else META)


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
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git_commit() -> str | None:
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None
