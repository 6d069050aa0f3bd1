"""Short names of runs: `last`, the name of an experiment (its newest run), or the name of a run directory or its suffix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ludus.errors import UsageError
from ludus.experiments.runs.run_dir import find_runs

LAST = "last"
RUNS = Path("runs")
"""Directory in which short names are searched: the default of `ludus train`."""

_SHORTEST_SUFFIX = 3
_MAX_LISTED = 5
_SHORT = re.compile(r"([\w.+-]+)((?:[/@].*)?)", re.DOTALL)  # a name may be followed by /best, /checkpoints/000120, @131


def resolve_run(word: str, below: Path = RUNS) -> str:
    """The path for a short name, including its suffix such as /best; `word` itself if it is a path, a URL or unknown.

    Raises UsageError if the name is ambiguous.
    """
    matched = _SHORT.fullmatch(word)
    if matched is None or Path(word).expanduser().exists() or Path(matched[1]).exists():
        return word
    found = run_named(matched[1], find_runs(below))
    return word if found is None else f"{found}{matched[2]}"


def resolve_runs(word: str, below: Path = RUNS) -> str:
    """As `resolve_run`, but the name of an experiment stands for the directory of all its runs."""
    experiment = below / word
    if word and "/" not in word and not Path(word).exists() and experiment.is_dir():
        return str(experiment)
    return resolve_run(word, below)


def resolve_one_run(word: str, below: Path = RUNS) -> str:
    """As `resolve_run`, but refuses the name of an experiment; for irreversible commands, as its newest run changes over time."""
    place = resolve_run(word, below)
    if place != word and word not in (LAST, Path(place).name) and Path(place).parent.name == word:
        number = len(find_runs(Path(place).parent))
        raise UsageError(
            f"{word} is an experiment with {number} runs.", f"Name a run of it; the newest one is {Path(place).name}."
        )
    return place


def run_named(name: str, runs: Sequence[Path]) -> Path | None:
    """The run of that name, or None. `runs`: oldest first. Raises UsageError if several runs have that suffix."""
    if name == LAST:
        return runs[-1] if runs else None
    by_name = [run for run in runs if run.name == name]
    by_experiment = [run for run in runs if run.parent.name == name]
    for matches in (by_name, by_experiment):
        if matches:
            return matches[-1]
    ending = [run for run in runs if len(name) >= _SHORTEST_SUFFIX and run.name.endswith(name)]
    if len(ending) > 1:
        listed = ", ".join(run.name for run in ending[-_MAX_LISTED:])
        raise UsageError(f"{len(ending)} runs end with {name!r}.", f"Use more of the name: {listed}.")
    return ending[0] if ending else None


def short_names(runs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(short name, its meaning) of every run and experiment, newest first."""
    if runs:
        yield LAST, runs[-1].name
    for experiment in dict.fromkeys(run.parent.name for run in reversed(runs)):
        yield experiment, "newest run of this experiment"
    for run in reversed(runs):
        yield short_name(run, runs), run.name


def short_name(run: Path, runs: Sequence[Path]) -> str:
    """The random suffix of the directory name if no other run has it, else the full name."""
    suffix = run.name.rpartition("-")[2]
    alone = sum(other.name.endswith(suffix) for other in runs) == 1
    return suffix if len(suffix) >= _SHORTEST_SUFFIX and alone and re.fullmatch(r"[0-9a-f]{5}", suffix) else run.name
