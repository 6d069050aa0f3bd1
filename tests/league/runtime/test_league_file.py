from __future__ import annotations

from pathlib import Path

import pytest

from ludus.config.problem import ConfigErrors
from ludus.core import trust
from ludus.errors import ConfigError
from ludus.league.players import PlayerRole
from ludus.league.runtime.league_file import check_players, locate_problems, player_experiment, read_league
from ludus.league.settings import SnapshotRule

ENV = "tests.league.games:make_rps"


def league(tmp_path: Path, text: str) -> Path:
    trust.allow(ENV)
    path = tmp_path / "league.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    """Message lines without the directory."""
    with pytest.raises(ConfigError) as caught:
        _check(path)
    return [line.removeprefix(f"{path.parent}/") for line in str(caught.value).splitlines()]


def _check(path: Path) -> None:
    config = read_league(path)
    try:
        check_players(config, path.parent)
    except ConfigErrors as error:
        raise locate_problems(error, path) from error


def test_all_errors_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    path = league(
        tmp_path,
        f"""env: {ENV}
players:
  main: {{role: mian}}
  ex ploiter: {{role: main}}
  still: {{role: fixed}}
matchmaking:
  schem: league
  weighting: cubed
snapshots:
  main: {{min_steps: 10, max_steps: 5}}
parallel: true
turnsteps: 3
""",
    )
    found = problems(path)
    assert [line.partition(": ")[0] for line in found] == [f"league.yaml:{n}" for n in (3, 4, 5, 7, 8, 10, 11, 12)]
    for line, part in zip(
        found,
        (
            "'mian'",
            "letters, digits",
            "needs a model",
            "'scheme'",
            "squared, variance",
            "less than min_steps",
            "a number",
            "'turn_steps'",
        ),
        strict=True,
    ):
        assert part in line


def test_errors_in_the_settings_of_players_name_their_place(tmp_path: Path) -> None:
    path = league(
        tmp_path,
        f"""env: {ENV}
config:
  train_batch_sizes: 64
players:
  main: {{}}
  other:
    config: {{gama: 0.9}}
""",
    )
    found = problems(path)
    assert len(found) == 2
    assert found[0].startswith("league.yaml:3: Unknown key 'config.train_batch_sizes'")
    assert found[1].startswith("league.yaml:7: Unknown key 'players.other.config.gama'")


def test_a_league_needs_a_training_player_and_two_sides(tmp_path: Path) -> None:
    assert (
        "no player of the league trains"
        in problems(league(tmp_path, f"env: {ENV}\nplayers: {{r: {{role: fixed, model: 'rule:random'}}}}\n"))[0]
    )
    assert "two sides" in problems(league(tmp_path, "env: CartPole-v1\nplayers: {main: {}}\n"))[0]


def test_settings_of_players_override_shared_ones_and_seeds_differ(tmp_path: Path) -> None:
    path = league(
        tmp_path,
        f"""env: {ENV}
env_config: {{killed_by: never}}
config: {{lr: 0.1, gamma: 0.9, model: {{fcnet_hiddens: [8], fcnet_activation: relu}}}}
players:
  main: {{}}
  other: {{role: main_exploiter, config: {{learning_rate: 0.2, model: {{fcnet_hiddens: [4]}}}}}}
snapshots: {{main_exploiter: {{min_steps: 50}}}}
""",
    )
    config = read_league(path)
    resolved = check_players(config, tmp_path)
    main, other = (resolved[name].config for name in ("main", "other"))
    assert (main.lr, other.lr, other.gamma) == (0.1, 0.2, 0.9)  # type: ignore[attr-defined]
    assert (other.model.fcnet_hiddens, other.model.fcnet_activation) == ([4], "relu")
    assert main.env_config == {"killed_by": "never"}
    assert (other.self_play.opponents, other.self_play.player) == ("league", "other")
    generations = [player_experiment(config, name, tmp_path, n)["config"]["seed"] for name in ("main", "other") for n in range(3)]
    assert len(set(generations)) == 6
    assert config.settings().snapshots[PlayerRole.MAIN_EXPLOITER] == SnapshotRule(50, 100, 0.7, reset=1.0)
    assert config.settings().snapshots[PlayerRole.LEAGUE_EXPLOITER].reset == 0.25


def test_a_rating_is_a_finite_number(tmp_path: Path) -> None:
    path = league(tmp_path, f"env: {ENV}\nplayers:\n  main: {{}}\n  old: {{role: fixed, model: 'rule:random', rating: .nan}}\n")
    (line,) = problems(path)
    assert line.startswith("league.yaml:4: players.old.rating is nan")


def test_a_share_is_positive_and_for_players_that_train(tmp_path: Path) -> None:
    players = """players:
  main: {share: 0}
  other: {share: .inf}
  still: {role: fixed, model: "rule:random", share: 0.5}
"""
    found = problems(league(tmp_path, f"env: {ENV}\n{players}"))
    assert [line.partition(" is ")[0] for line in found[:2]] == [
        "league.yaml:3: players.main.share",
        "league.yaml:4: players.other.share",
    ]
    assert "a fixed player does not train: leave its share out" in found[2]
    config = read_league(league(tmp_path, f"env: {ENV}\nplayers: {{main: {{}}, cheap: {{role: main_exploiter, share: 0.25}}}}\n"))
    assert config.shares() == {"main": 1.0, "cheap": 0.25}
