"""Leagues of a game that a gamecore server runs: snapshots, scripts of the game and served agents as opponents, and results."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.config.schema import SelfPlayConfig
from ludus.core.metrics import read_jsonl
from ludus.envs.vector_env import make_environments, training_env_config
from ludus.gamecore.server.http.app import Settings, running
from ludus.league.players import PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, check_players
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource
from ludus.sampling.league_files import LeagueOpponent, Matchmaking, PairReport, SpoolReader, write_matchmaking
from ludus.sampling.self_play import with_past_opponents
from tests.gamecore.test_vector_env import COUNTING, DECLARED
from tests.league.runtime.test_external_league import problems
from tests.league.runtime.test_league_run import run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the counting game, whose script does as its option `rule` says: it always chooses 0 or 1."""
    directory = tmp_path_factory.mktemp("gamecore")
    games = directory / "games.yaml"
    entry: dict[str, Any] = copy.deepcopy(COUNTING)
    entry["options"]["rule"] = {"type": "string", "default": "zero"}
    games.write_text(yaml.safe_dump({"games": {"counting": entry}}))
    with running(Settings(port=0, games=games, state_dir=directory / "state")) as found:
        yield f"127.0.0.1:{found.port}"


def counting_league(server: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "env": "gamecore",
        "env_config": {**DECLARED, "server": server, "options": {"length": 2}, "together": 1},
        "config": {
            "train_batch_size": 32, "num_envs_per_worker": 4, "rollout_fragment_length": 8, "lr": 0.01, "self_play": {"period": 8},
            "model": {"fcnet_hiddens": [8]},
        },
        "players": {
            "main": {},
            "one": {"role": "fixed", "model": "rule:one"},
            "zero": {"role": "fixed", "model": "rule", "rating": 1000},
            "dice": {"role": "fixed", "model": "rule:random"},
        },
        "matchmaking": {"scheme": "pfsp"},
        "snapshots": {"main": {"min_steps": 100, "max_steps": 100}},
        "turn_steps": 128,
        "stop": {"timesteps": 256},
    }  # fmt: skip
    return base | sections


@pytest.mark.system
def test_a_league_trains_in_a_game_of_a_server(tmp_path: Path, server: str) -> None:
    data = counting_league(server, evaluation={"matches": 4, "pairs": "all"})
    state = run(tmp_path, data).state
    players, payoff = state.players, state.payoff
    assert not {name: one.quarantine for name, one in players.items() if one.quarantine}
    assert players["main"].steps >= 256
    snapshots = [one.name for one in players.values() if one.role is PlayerRole.HISTORICAL]
    assert snapshots == ["main.1", "main.2"]
    matches = {name: payoff.record("main", name).games for name in ("one", "zero", "dice", "main.1")}
    assert all(matches.values()), "scripts of the game, random actions and a snapshot are opponents"
    # The higher last choice wins: 1 is never beaten, 0 never wins.
    assert (payoff.record("main", "one").wins, payoff.record("main", "zero").losses) == (0, 0)
    pairs = [(a, b) for a in snapshots for b in (*snapshots, "one", "zero", "dice") if a < b or b not in snapshots]
    assert {payoff.record(*pair).games for pair in pairs} == {4}
    assert payoff.record("one", "zero").games == 0, "a server runs one script in a match"
    assert payoff.record("one", "dice").games == 4
    episodes = sum(read_jsonl(path)[-1]["episodes"] for path in tmp_path.glob("players/main/g*/metrics.jsonl"))
    evaluated = 4 * (len(pairs) + 2)
    played = CliRunner().invoke(app, ["league", "match", str(tmp_path), "one", "dice", "--games", "6", "--json"])
    assert played.exit_code == 0, played.output
    found = json.loads(played.stdout)
    assert (found["games"], found["lost"]) == (6, 0)
    assert episodes <= state.results - evaluated <= episodes + 4, (
        "every match is counted once; those of the last step are in no batch"
    )


def test_scripts_of_a_game_are_known_for_the_arena_only() -> None:
    data = counting_league("127.0.0.1:9")
    assert check_players(LeagueConfig.model_validate(data), Path("leagues/x")).keys() == {"main"}
    arena = data | {
        "env_config": {"server": "127.0.0.1:9"},
        "players": {"main": {}, "x": {"role": "fixed", "model": "rule:hart"}},
    }
    assert "'hard'" in problems(arena)["players.x.model"]


@pytest.mark.system
def test_results_belong_to_the_opponent_of_their_match_also_if_games_crash(tmp_path: Path, server: str) -> None:
    opponents = [LeagueOpponent("one", "rule:one", 0.4), LeagueOpponent("zero", "rule", 0.4), LeagueOpponent("main", "", 0.2)]
    write_matchmaking(tmp_path, Matchmaking("main", 0, tuple(opponents)))
    keywords = counting_league(server)["env_config"] | {"options": {"length": 2, "fault": "crash", "share": 0.3}}
    self_play = SelfPlayConfig(opponents="league", league=str(tmp_path), player="main", period=1)
    environments = make_environments("gamecore", 4, training_env_config("gamecore", keywords, self_play))
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig(fcnet_hiddens=(4,)))
    with_past_opponents(environments, FixedSource(policy), self_play, 0)
    environments.reset(0)
    random, ended = np.random.default_rng(0), 0
    try:
        while ended < 80:
            result = environments.step(random.integers(0, 2, 4))
            ended += int(result.terminated.sum())
        assert environments.restarts > 5
    finally:
        environments.close()
    reports = [one for path in (tmp_path / "results").glob("*.jsonl") for one in SpoolReader(path).read()]
    counts = Counter[tuple[str, str]]()
    for one in reports:
        assert isinstance(one, PairReport)
        counts += Counter(
            {(one.opponent, "win"): one.wins, (one.opponent, "draw"): one.draws, (one.opponent, "loss"): one.losses}
        )
    assert counts.total() == ended, "every match that ended, and none that was lost"
    assert counts["one", "win"] == counts["zero", "loss"] == 0
    assert counts["one", "loss"] > 5
    assert counts["zero", "win"] > 5
    assert counts["main", "win"] + counts["main", "loss"] > 0
