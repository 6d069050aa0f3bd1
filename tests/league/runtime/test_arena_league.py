"""Leagues in the Arena: the example files, training against scripts and snapshots, and evaluation by battles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.core import trust
from ludus.games.arena.env.seats import ArenaOptions
from ludus.league.players import PlayerRole
from ludus.league.runtime.arena_evaluation import ArenaPairs, draw_lineups, is_arena
from ludus.league.runtime.coordinator import LeagueResult, run_league
from ludus.league.runtime.league_file import LeagueConfig, check_players, read_league
from ludus.league.runtime.pair_task import ModelUnusable, PairTask
from ludus.sampling.league_files import PairReport, ResultSpool, SpoolReader, UnusableModel

EXAMPLES = Path(__file__).parents[3] / "examples/leagues"
VECTOR_ENV = "ludus.games.arena.env.gym_env:ArenaVectorEnv"
ROLES = ("main", "main_exploiter", "league_exploiter")


def shrink(name: str, **config: Any) -> dict[str, Any]:
    """An example of a league with the same parts, for a test: short matches, small batches and networks."""
    data: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    rows = 12
    data["env_config"] |= {"max_episode_steps": 5}
    data["config"] |= {"num_envs_per_worker": rows, "train_batch_size": 8 * rows, "minibatch_size": 4 * rows, "num_epochs": 1}
    data["config"]["model"] |= {"entity_dim": 4, "fcnet_hiddens": [8]}
    data["config"] |= config
    data["snapshots"] = {role: {"min_steps": 8 * rows, "max_steps": 8 * rows} for role in ROLES}
    data |= {"turn_steps": 8 * rows, "evaluation": {"matches": 4, "pairs": "fixed"}, "stop": {"timesteps": 4 * 8 * rows}}
    return data


def run(directory: Path, data: dict[str, Any]) -> LeagueResult:
    trust.allow(data)
    config = LeagueConfig.model_validate(data)
    resolved = check_players(config, directory)
    return run_league(config, directory, yaml.safe_dump(data).encode(), resolved, lambda line: None)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))  # scripts are searched next to the file
    config = read_league(path)
    if config.env == "pettingzoo/pong_v3":
        pytest.importorskip("multi_agent_ale_py", reason="pip install 'ludus[pettingzoo-atari]'")
    trust.allow(config.model_dump())
    resolved = check_players(config, tmp_path)
    assert list(resolved) == config.learners()
    assert all(one.config.self_play.opponents == "league" for one in resolved.values())


@pytest.mark.system
def test_a_league_trains_in_the_arena(tmp_path: Path) -> None:
    result = run(tmp_path, shrink("arena-1v1.yaml", num_workers=0, sampling="sync"))
    players, payoff = result.state.players, result.state.payoff
    assert result.stopped_by == "timesteps 384"
    assert not [one for one in players.values() if one.quarantine]
    assert {one.role for one in players.values()} == set(PlayerRole)
    assert "main.1" in players
    # Snapshots and scripts have played battles, and scripts were met in training.
    scripts = ("easy", "medium", "hard")
    assert all(payoff.record("main.1", script).games >= 4 for script in scripts)
    assert sum(payoff.record(name, script).games for name in ("main", "hunter") for script in scripts) > 0
    runs = [path.read_text().splitlines()[-1] for path in tmp_path.glob("players/*/g*/metrics.jsonl")]
    trained = sum(int(json.loads(line)["episodes"]) for line in runs)
    snapshots = sum(one.role is PlayerRole.HISTORICAL for one in players.values())
    assert result.state.results == trained + 4 * (3 + 3 * snapshots), "every match is counted once"
    # Matches of five steps are ended by their time: all are draws.
    assert all(payoff.record(a, b).wins == 0 for a in players for b in players if a != b)


@pytest.mark.system
def test_teams_with_a_centralised_value_train_with_a_worker(tmp_path: Path) -> None:
    data = shrink("arena-3v3.yaml")
    data["players"] = {name: data["players"][name] for name in ("main", "easy", "hard")}
    data |= {"turn_steps": 192, "stop": {"snapshots": 1}}
    players, payoff = (result := run(tmp_path, data)).state.players, result.state.payoff
    assert not [one for one in players.values() if one.quarantine]
    assert [payoff.record("main.1", script).games for script in ("easy", "hard")] == [4, 4]
    assert sum(payoff.record("main", script).games for script in ("easy", "hard")) >= 4


def evaluate(league: Path, task: PairTask, env_config: dict[str, Any] | None = None) -> list[Any]:
    spool = ResultSpool(league, "evaluation")
    try:
        ArenaPairs(league, env_config or {}, spool).play(task, 3, lambda: False)
    finally:
        spool.close()
        found = list(SpoolReader(spool.path).read())
        spool.path.unlink()
    return found


def test_battles_of_scripts_are_counted_for_the_side_that_won(tmp_path: Path) -> None:
    (one,) = evaluate(tmp_path, PairTask("hard", "rule:hard", "random", "rule:random", 6))
    assert isinstance(one, PairReport)
    assert (one.wins, one.draws, one.losses, one.gain) == (6, 0, 0, 6.0)
    (other,) = evaluate(tmp_path, PairTask("random", "rule:random", "hard", "rule:hard", 6))
    assert isinstance(other, PairReport)
    assert (other.wins, other.draws, other.losses, other.gain) == (0, 0, 6, -6.0)


@pytest.mark.parametrize("model", ["players/gone@3", "rule:nothing", "script:no_module:f"])
def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path, model: str) -> None:
    spool = ResultSpool(tmp_path, "evaluation")
    pairs = ArenaPairs(tmp_path, {"mode": "3v3"}, spool)
    with pytest.raises(ModelUnusable):
        pairs.play(PairTask("gone", model, "hard", "rule:hard", 2), 0, lambda: False)
    spool.close()
    (report,) = SpoolReader(spool.path).read()
    assert isinstance(report, UnusableModel)
    assert (report.player, report.model) == ("gone", model)


def test_battles_have_the_line_ups_of_training() -> None:
    pair = [[[107], [190]], [[190], [117]]]
    drawn = draw_lineups(ArenaOptions(lineup=pair).lineups(), 40, 0)
    assert drawn is not None
    assert set(drawn) == {((107,), (190,)), ((190,), (117,))}
    cycle = ArenaOptions(lineup={"cycle": pair}).lineups()
    assert draw_lineups(cycle, 2, 0) != draw_lineups(cycle, 2, 1)
    assert draw_lineups(ArenaOptions().lineups(), 5, 0) == (((107,), (107,)),) * 5, "the default line-up"


def problems(**sections: Any) -> list[str]:
    data = {"env": VECTOR_ENV, "players": {"main": {}}} | sections
    trust.allow(data)
    from ludus.config.problem import ConfigErrors

    with pytest.raises(ConfigErrors) as caught:
        check_players(LeagueConfig.model_validate(data), Path("leagues/x"))
    return [f"{one.path}: {one}" for one in caught.value.problems]


def test_errors_of_a_league_in_the_arena_name_the_key() -> None:
    (script,) = problems(players={"main": {}, "x": {"role": "fixed", "model": "rule:hart"}})
    assert script.startswith("players.x.model: ")
    assert "'hard'" in script
    (opponent,) = problems(env_config={"opponent": "hard"})
    assert "env_config.opponent" in opponent
    (sides,) = problems(env="CartPole-v1")
    assert sides.startswith("env: ")
    assert "two sides" in sides


def test_which_environments_are_the_arena() -> None:
    assert is_arena("ludus/Arena-1v1-v0")
    assert is_arena(VECTOR_ENV)
    assert not is_arena("CartPole-v1")
