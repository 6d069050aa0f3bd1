"""Runs the leagues of examples/leagues as `ludus league run` does, and loads the policies of their players."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ludus.core.plugins import add_import_directory
from ludus.league.players import PlayerRole
from ludus.league.runtime.coordinator import run_league
from ludus.league.runtime.league_file import check_players, read_league
from ludus.league.runtime.schedule import total_steps
from ludus.league.state import LeagueState
from ludus.models.custom.loader import add_search_directory
from ludus.models.policy import Policy
from ludus.tournament.contestants import TrainedContestant, contestant

EXAMPLES = Path(__file__).parents[2] / "examples" / "leagues"
MAIN = "main"
Sections = Mapping[str, Any]


@dataclass(frozen=True)
class FinishedLeague:
    directory: Path
    state: LeagueState
    cpu_s: float
    """Of the coordinator and its learners."""

    @property
    def steps(self) -> int:
        return total_steps(self.state)

    def policy(self, player: str) -> Policy:
        found = contestant(self.directory / self.state.players[player].model)
        assert isinstance(found, TrainedContestant)
        assert isinstance(found.policy, Policy)
        return found.policy

    def snapshots(self) -> list[str]:
        """Names of the main player's snapshots, the oldest first."""
        found = [one for one in self.state.players.values() if one.role is PlayerRole.HISTORICAL and one.parent == MAIN]
        return [one.name for one in sorted(found, key=lambda one: one.steps)]


def read_example(name: str, seed: int, changes: Sections | None = None) -> dict[str, Any]:
    """The file of a league in examples/leagues, with another seed and changed keys."""
    return _merge(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()), {**(changes or {}), "seed": seed})


def _merge(data: Sections, changes: Sections) -> dict[str, Any]:
    """Replace keys; sections are merged key by key."""
    merged = dict(data)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(data.get(key), Mapping)
        merged[key] = _merge(data[key], value) if both else value
    return merged


@contextmanager
def run_example(name: str, seed: int, changes: Sections | None = None, *, quiet: bool = True) -> Iterator[FinishedLeague]:
    """Run a league of examples/leagues to its end, in a directory that exists until the block ends."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        file, directory = Path(folder) / f"{name}.yaml", Path(folder) / "league"
        file.write_text(yaml.safe_dump(read_example(name, seed, changes)))
        add_search_directory(EXAMPLES)
        add_import_directory(EXAMPLES)
        config = read_league(file)
        began = _cpu_s()
        say = (lambda line: None) if quiet else (lambda line: print(line, flush=True))
        result = run_league(config, directory, file.read_bytes(), check_players(config, directory), say)
        if result.stopped_by.startswith("interrupted"):
            raise SystemExit(f"{name}, seed {seed}: {result.stopped_by}. A league that has not reached its end is not measured.")
        yield FinishedLeague(directory, result.state, round(_cpu_s() - began, 1))


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
