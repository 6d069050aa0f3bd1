"""Evaluation of pairs of players: what counts as a result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ludus.core import trust
from ludus.league.runtime.arena_evaluation import ArenaPairs
from ludus.league.runtime.evaluation import EnvPairs
from ludus.league.runtime.league_file import LeagueConfig, check_players
from ludus.league.runtime.pair_task import ModelUnusable, PairTask
from ludus.sampling.league_files import PairReport, ResultSpool, SpoolReader, SpoolReport, UnusableModel
from tests.league.games import rock
from tests.league.runtime.test_league_run import league

calls = 0


def fail_later(observation: Any, mask: Any) -> Any:
    """Plays rock, or a hero of the Arena, 50 times."""
    global calls
    calls += 1
    if calls > 50:
        raise RuntimeError("no more")
    return [0, 0, 0, 0] if isinstance(observation, Mapping) else rock(observation, mask)


def reports(directory: Path) -> list[SpoolReport]:
    return [report for path in sorted((directory / "results").glob("*.jsonl")) for report in SpoolReader(path).read()]


def play_env(directory: Path, task: PairTask, **sections: Any) -> list[SpoolReport]:
    data = league(directory, **sections)
    trust.allow(data)
    resolved = check_players(LeagueConfig.model_validate(data), directory)
    with (
        contextlib.closing(ResultSpool(directory, "evaluation")) as spool,
        EnvPairs(directory, resolved["main"], task.matches, spool) as pairs,
    ):
        pairs.play(task, 0, lambda: False)
    return reports(directory)


def test_a_match_that_is_not_over_at_the_step_limit_is_a_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a battle: it has no winner, and nothing is gained, although one side has gained more so far."""
    monkeypatch.setattr("ludus.sampling.episode_runner.EPISODE_STEPS", 20)
    env: dict[str, Any] = {"env": "tests.cards:Cards", "env_config": {"endless": True, "reds": 1, "blues": 1}}
    (found,) = play_env(tmp_path, PairTask("a", "rule:random", "b", "rule:random", 4), **env)
    assert isinstance(found, PairReport)
    assert (found.wins, found.draws, found.losses, found.gain) == (0, 4, 0, 0.0)


def test_a_script_that_fails_ends_the_evaluation_of_its_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:fail_later"
    trust.allow(name)
    monkeypatch.setattr(f"{__name__}.calls", 0)
    *results, unusable = sorted(
        play_env(tmp_path, PairTask("bad", f"script:{name}", "random", "rule:random", 400)),
        key=lambda one: isinstance(one, UnusableModel),
    )
    assert isinstance(unusable, UnusableModel)
    assert (unusable.player, "no more" in unusable.reason) == ("bad", True)
    assert sum(one.wins + one.draws + one.losses for one in results if isinstance(one, PairReport)) <= 50


def test_a_script_that_fails_in_the_arena_ends_the_evaluation_of_its_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:fail_later"
    trust.allow(name)
    monkeypatch.setattr(f"{__name__}.calls", 0)
    with contextlib.closing(ResultSpool(tmp_path, "evaluation")) as spool:
        pairs = ArenaPairs(tmp_path, {"mode": "1v1", "seconds": 30}, spool)
        with pytest.raises(ModelUnusable, match="no more"):
            pairs.play(PairTask("bad", f"script:{name}", "easy", "rule:easy", 4), 0, lambda: False)
    (found,) = reports(tmp_path)
    assert isinstance(found, UnusableModel)
    assert found.player == "bad"
