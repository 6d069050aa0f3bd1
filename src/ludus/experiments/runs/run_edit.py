"""Rename, tag and delete runs. A run that is being trained is never touched, and nothing outside of its directory."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ludus.errors import StoreFull, UsageError
from ludus.experiments.runs.remote_runs import is_remote, shown
from ludus.experiments.runs.run_dir import CONFIG, Run, is_script
from ludus.experiments.runs.run_status import look

_TRAINING = ("running", "starting", "restarting")
_SILENT_S = 600.0
"""A run on a machine that cannot be seen from here counts as being trained for so long after its last sign of life."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")


def check_not_trained(directory: Path, now: float | None = None) -> None:
    """Raises UsageError for a run that is being trained, as far as that can be seen; NotFound where there is no run."""
    seen = look(directory)
    age = (time.time() if now is None else now) - float(seen.status.get("written") or 0.0)
    if seen.state in _TRAINING or (seen.state == "silent" and age < _SILENT_S):
        raise UsageError(f"{shown(directory)} is being trained: {seen.said}.", "Stop it first (Ctrl-C, or ludus jobs cancel).")


def check_run_directory(directory: Path) -> None:
    """Raises UsageError unless this is a local directory that holds a run, and only that."""
    if is_remote(directory):
        raise UsageError(f"{shown(directory)} is on a store.", "Use the tools of the store; here only local runs are changed.")
    if directory.is_symlink():
        raise UsageError(f"{directory} is a link to {directory.resolve()}.", "Name the run itself.")
    if not (directory / CONFIG).is_file() and not is_script(directory):
        raise UsageError(f"{directory} is not the directory of a run.", "`ludus runs list` shows the runs there are.")
    if not any((directory / name).exists() for name in ("meta.json", "metrics.jsonl", "checkpoints")):
        raise UsageError(f"{directory} has a {CONFIG}, but nothing else of a run.", "If it is one, remove it by hand.")
    here = directory.resolve()
    if here in (Path.cwd(), *Path.cwd().parents, Path.home()):
        raise UsageError(f"{directory} holds the current directory.", "Leave it first.")


def rename_run(directory: Path, name: str) -> Path:
    """Give the run's directory another name, beside the old one. Raises UsageError, NotFound."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a plain name.", "Use letters, digits and . _ + -")
    check_run_directory(directory)
    check_not_trained(directory)
    if (sweep := sweep_of(directory)) is not None:
        raise UsageError(f"{directory} is a trial of the sweep {sweep}, which knows it by its name.", "Tag it instead.")
    target = directory.parent / name
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already.", "Choose another name.")
    directory.rename(target)
    return target


def sweep_of(directory: Path) -> Path | None:
    """The directory of the sweep that a run is a trial of."""
    return next((above for above in directory.absolute().parents[:2] if (above / "sweep.json").exists()), None)


def tag_run(directory: Path, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[str]:
    """Its tags from now on. Works for runs on a store and for runs that are being trained, too. Raises UsageError, StoreError."""
    for tag in add:
        if not _NAME.fullmatch(tag):
            raise UsageError(f"{tag!r} is not a plain tag.", "Use letters, digits and . _ + -")
    run = Run(directory) if is_script(directory) else Run.open(directory)
    before = tags_of(run)
    if missing := [tag for tag in remove if tag not in before]:
        raise UsageError(f"{shown(directory)} has no tag {', '.join(missing)}.", f"It has: {', '.join(before) or 'none'}.")
    tags = [tag for tag in dict.fromkeys((*before, *add)) if tag not in remove]
    if tags != before:
        run.write_meta({"tags": tags})
    return tags


def tags_of(run: Run) -> list[str]:
    found = run.meta().get("tags")
    return [str(tag) for tag in found] if isinstance(found, list) else []


def size_bytes(directory: Path) -> int:
    """Of all files; links are not followed."""
    return sum(
        (Path(above) / name).lstat().st_size for above, _, names in os.walk(directory, followlinks=False) for name in names
    )


def delete_run(directory: Path) -> None:
    """Remove the whole directory of a run. Links in it are removed, not what they point to. Raises UsageError, NotFound, StoreFull."""
    check_run_directory(directory)
    check_not_trained(directory)
    aside = directory.parent / f".deleted-{os.getpid()}-{directory.name}"  # a run that is half gone must not look like a run
    try:
        directory.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise StoreFull(f"{directory} cannot be removed: {error.strerror}.", f"What is left of it is in {aside}.") from error
