"""Short names of runs: `last`, the name of an experiment (its newest run), the name of a run's directory or the end of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ludus.errors import UsageError
from ludus.experiments.runs.run_dir import find_runs

LAST = "last"
RUNS = Path("runs")
"""Where short names are looked for: where `ludus train` puts runs unless it is told otherwise."""

_SHORTEST_SUFFIX = 3
_SHOWN = 5
_SHORT = re.compile(r"([\w.+-]+)((?:[/@].*)?)", re.DOTALL)  # what may follow: RUN/best, RUN/checkpoints/000120, RUN@131


def resolve_run(word: str, below: Path = RUNS) -> str:
    """The path of a run that is named in short, with what follows the name; `word` itself if it is a path, a URL or unknown.

    Raises UsageError when several runs are meant.
    """
    matched = _SHORT.fullmatch(word)
    if matched is None or Path(word).expanduser().exists() or Path(matched[1]).exists():
        return word
    found = run_named(matched[1], find_runs(below))
    return word if found is None else f"{found}{matched[2]}"


def resolve_runs(word: str, below: Path = RUNS) -> str:
    """As `resolve_run`, where several runs may be meant: the name of an experiment is the directory of all its runs."""
    experiment = below / word
    if word and "/" not in word and not Path(word).exists() and experiment.is_dir():
        return str(experiment)
    return resolve_run(word, below)


def resolve_one_run(word: str, below: Path = RUNS) -> str:
    """As `resolve_run`, for what cannot be undone: the name of an experiment is refused, since it means another run tomorrow."""
    place = resolve_run(word, below)
    if place != word and word not in (LAST, Path(place).name) and Path(place).parent.name == word:
        number = len(find_runs(Path(place).parent))
        raise UsageError(
            f"{word} is an experiment with {number} runs.", f"Name a run of it; the newest one is {Path(place).name}."
        )
    return place


def run_named(name: str, runs: Sequence[Path]) -> Path | None:
    """`runs`: oldest first. None: no run is called so. Raises UsageError when several end so."""
    if name == LAST:
        return runs[-1] if runs else None
    called = [run for run in runs if run.name == name]
    of_experiment = [run for run in runs if run.parent.name == name]
    for found in (called, of_experiment):
        if found:
            return found[-1]
    ending = [run for run in runs if len(name) >= _SHORTEST_SUFFIX and run.name.endswith(name)]
    if len(ending) > 1:
        listed = ", ".join(run.name for run in ending[-_SHOWN:])
        raise UsageError(f"{len(ending)} runs end with {name!r}.", f"Use more of the name: {listed}.")
    return ending[0] if ending else None


def short_names(runs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(short name, what it means) of every run and experiment, newest first."""
    if runs:
        yield LAST, runs[-1].name
    for experiment in dict.fromkeys(run.parent.name for run in reversed(runs)):
        yield experiment, "newest run of this experiment"
    for run in reversed(runs):
        yield short_name(run, runs), run.name


def short_name(run: Path, runs: Sequence[Path]) -> str:
    """The random end of a run's directory name if no other run ends so, else the whole directory name."""
    suffix = run.name.rpartition("-")[2]
    alone = sum(other.name.endswith(suffix) for other in runs) == 1
    return suffix if len(suffix) >= _SHORTEST_SUFFIX and alone and re.fullmatch(r"[0-9a-f]{5}", suffix) else run.name
