"""Renames, tags and deletes runs. Never changes a run that is being trained, nor files outside its directory."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from ludus.errors import StoreFull, UsageError
from ludus.experiments.runs.remote_runs import display_path, is_remote
from ludus.experiments.runs.run_dir import CONFIG, Run, is_script
from ludus.experiments.runs.run_status import read_status

_TRAINING = ("running", "starting", "restarting")
_SILENT_S = 600.0
"""A run on another host counts as being trained for this long after its last status."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")


def check_not_trained(directory: Path, now: float | None = None) -> None:
    """Raises UsageError if the run is being trained, NotFound if there is no run."""
    run = read_status(directory)
    age = (time.time() if now is None else now) - float(run.status.get("written") or 0.0)
    if run.state in _TRAINING or (run.state == "silent" and age < _SILENT_S):
        raise UsageError(
            f"{display_path(directory)} is being trained: {run.sentence}.", "Stop it first (Ctrl-C, or ludus jobs cancel)."
        )


def check_run_directory(directory: Path) -> None:
    """Raises UsageError unless this is a local directory that holds a run and nothing else."""
    if is_remote(directory):
        raise UsageError(
            f"{display_path(directory)} is on a store.", "Use the tools of the store; here only local runs are changed."
        )
    if directory.is_symlink():
        raise UsageError(f"{directory} is a link to {directory.resolve()}.", "Name the run itself.")
    if not (directory / CONFIG).is_file() and not is_script(directory):
        raise UsageError(f"{directory} is not the directory of a run.", "`ludus runs list` shows the runs there are.")
    if not any((directory / name).exists() for name in ("meta.json", "metrics.jsonl", "checkpoints")):
        raise UsageError(f"{directory} has a {CONFIG}, but no other file of a run.", "If it is a run, remove it by hand.")
    here = directory.resolve()
    if here in (Path.cwd(), *Path.cwd().parents, Path.home()):
        raise UsageError(f"{directory} holds the current directory.", "Leave it first.")


def rename_run(directory: Path, name: str) -> Path:
    """Rename the directory of a run within its parent directory. Raises UsageError, NotFound."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a plain name.", "Use letters, digits and . _ + -")
    check_run_directory(directory)
    check_not_trained(directory)
    if (sweep := sweep_of(directory)) is not None:
        raise UsageError(f"{directory} is a trial of the sweep {sweep}, which refers to it by name.", "Tag it instead.")
    target = directory.parent / name
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already.", "Choose another name.")
    directory.rename(target)
    return target


def sweep_of(directory: Path) -> Path | None:
    """The directory of the sweep that a run is a trial of."""
    return next((above for above in directory.absolute().parents[:2] if (above / "sweep.json").exists()), None)


def tag_run(directory: Path, add: Sequence[str] = (), remove: Sequence[str] = ()) -> list[str]:
    """Change the tags of a run and return them. Also works for remote runs and during training. Raises UsageError, StoreError."""
    for tag in add:
        if not _NAME.fullmatch(tag):
            raise UsageError(f"{tag!r} is not a plain tag.", "Use letters, digits and . _ + -")
    run = Run(directory) if is_script(directory) else Run.open(directory)
    before = tags_of(run)
    if missing := [tag for tag in remove if tag not in before]:
        raise UsageError(f"{display_path(directory)} has no tag {', '.join(missing)}.", f"It has: {', '.join(before) or 'none'}.")
    tags = [tag for tag in dict.fromkeys((*before, *add)) if tag not in remove]
    if tags != before:
        run.write_meta({"tags": tags})
    return tags


def tags_of(run: Run) -> list[str]:
    tags = run.meta().get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def size_bytes(directory: Path) -> int:
    """Total size of all files; links are not followed."""
    return sum(
        (Path(above) / name).lstat().st_size for above, _, names in os.walk(directory, followlinks=False) for name in names
    )


def delete_run(directory: Path) -> None:
    """Delete the directory of a run. Links are removed, not their targets. Raises UsageError, NotFound, StoreFull."""
    check_run_directory(directory)
    check_not_trained(directory)
    trash = directory.parent / f".deleted-{os.getpid()}-{directory.name}"  # a partly deleted run must not look like a run
    try:
        directory.rename(trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise StoreFull(f"{directory} cannot be deleted: {error.strerror}.", f"The remaining files are in {trash}.") from error
