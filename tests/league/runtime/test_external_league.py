"""Leagues of games that connect over HTTP: who plays, that every match is counted once, and turns that share a port."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.config.problem import ConfigErrors
from ludus.distributed.gateway_workers import bind
from ludus.league.events import ResultsReported
from ludus.league.journal import read_events, read_state
from ludus.league.players import PlayerRole
from ludus.league.runtime.league_file import LeagueConfig, check_players
from ludus.league.runtime.learner import is_claimed
from tests.league.http_game import SPACES, Game, games
from tests.league.runtime.test_league_run import command, league, run
from tests.waiting import wait_until


def free_port() -> int:
    with bind("127.0.0.1", 0) as bound:
        return int(bound.getsockname()[1])


def external(tmp_path: Path, port: int, seats: bool = False, **sections: Any) -> dict[str, Any]:
    spaces = {"seats": dict.fromkeys(("left", "right"), SPACES)} if seats else SPACES
    data = league(tmp_path, env="external", env_config={"port": port, **spaces}, matchmaking={"scheme": "pfsp"}, **sections)
    data["config"] = {
        "train_batch_size": 64, "rollout_fragment_length": 8, "lr": 0.01, "model": {"fcnet_hiddens": [8]}, "self_play": {"period": 16},
    }  # fmt: skip
    return data


def played_matches(playing: list[Game]) -> tuple[int, int]:
    """Matches whose end was acknowledged, and the most that may have been counted."""
    played = sum(game.played for game in playing)
    return played, played + sum(game.unsure for game in playing)


@pytest.mark.system
def test_a_league_trains_in_turns_with_games_that_connect_to_one_port(tmp_path: Path) -> None:
    port = free_port()
    with games(f"http://127.0.0.1:{port}", rounds=2) as playing:
        state = run(tmp_path, external(tmp_path, port)).state
    least, most = played_matches(playing)
    assert {name: state.players[name].steps for name in ("main", "hunter")} == {"main": 384, "hunter": 384}
    assert {one.name for one in state.players.values() if one.role is PlayerRole.HISTORICAL} == {"main.1", "hunter.1"}
    assert not [one for one in state.players.values() if one.quarantine]
    assert least <= state.results <= most, "every match is counted once"
    opponents = ("main.1", "hunter.1", "random")
    met = {name: state.payoff.record("main", name).games for name in opponents}
    assert met["random"] > 0
    assert met["main.1"] > 0, "snapshots are opponents"
    pairs = [state.payoff.record(player, name) for player in ("main", "hunter") for name in opponents]
    assert all(pair.wins + pair.draws + pair.losses == pair.games for pair in pairs)
    total = [sum(getattr(pair, kind) for pair in pairs) for kind in ("wins", "draws", "losses")]
    assert min(total) > state.results / 10, "wins, draws and losses are told apart"
    refused = {(error.status, error.error) for game in playing for error in game.refusals}
    assert refused <= {(410, "session_lost"), (404, "unknown_session"), (503, "stopping")}, "only when a turn ends"


@pytest.mark.system
@pytest.mark.parametrize(("workers", "seats"), [(1, False), (2, True)])
def test_workers_serve_the_games_of_a_league(tmp_path: Path, workers: int, seats: bool) -> None:
    port = free_port()
    data = external(tmp_path, port, seats, stop={"timesteps": 128})
    data["players"].pop("hunter")
    data["config"] |= {"num_workers": workers}
    with games(f"http://127.0.0.1:{port}", seats=seats, report_winner=True) as playing:
        state = run(tmp_path, data).state
    least, most = played_matches(playing)
    assert least <= state.results <= most
    pair = state.payoff.record("main", "random")
    assert pair.games == state.results >= 128
    assert min(pair.wins, pair.draws, pair.losses) > 0
    assert pair.gain == pair.wins - pair.losses, "the winner that the game reports, not the rewards, which are 0"


@pytest.mark.long
@pytest.mark.system
def test_kill_9_of_coordinator_and_learner_loses_no_counted_result(tmp_path: Path) -> None:
    port, file, directory = free_port(), tmp_path / "league.yaml", tmp_path / "league"
    file.write_text(yaml.safe_dump(external(tmp_path, port, stop={"timesteps": 1_000_000}, checkpoint_time_s=0.5)))
    counted = 0
    with games(f"http://127.0.0.1:{port}") as playing:
        for _ in range(2):
            with command("run", "-f", file, "--dir", directory) as coordinator:
                enough = counted + 200
                wait_until(lambda: (directory / "league.yaml").exists() and read_state(directory).results >= enough, 120)  # noqa: B023
                coordinator.send_signal(signal.SIGKILL)
                coordinator.wait(10)
            wait_until(lambda: not any(is_claimed(directory, name) for name in ("main", "hunter")), 30)
            assert read_state(directory).results >= enough, "what was counted stays"
            counted = read_state(directory).results
        with command("run", "-f", file, "--dir", directory) as coordinator:
            wait_until(lambda: read_state(directory).results >= counted + 200, 120)
            coordinator.send_signal(signal.SIGINT)
            out = coordinator.communicate(timeout=60)[0]
    assert coordinator.returncode == 130, out
    assert f"games connect to port {port}" in out
    state = read_state(directory)
    assert counted + 200 <= state.results <= played_matches(playing)[1], "no match is counted twice"
    reports = [(one.source, one.number) for one in read_events(directory) if isinstance(one, ResultsReported)]
    assert len(reports) == len(set(reports))
    assert all(state.players[name].steps > 0 for name in ("main", "hunter"))


@pytest.mark.system
def test_a_league_that_waits_for_its_game_stops_when_asked(tmp_path: Path) -> None:
    state = run(tmp_path, external(tmp_path, free_port(), stop={"time_s": 5})).state
    assert (state.results, state.players["main"].steps) == (0, 0)
    assert not state.players["main"].quarantine


def problems(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigErrors) as caught:
        check_players(LeagueConfig.model_validate(data), Path("leagues/x"))
    return {one.path: str(one) for one in caught.value.problems}


def test_errors_of_a_league_of_an_external_game_name_the_key(tmp_path: Path) -> None:
    data = external(tmp_path, 8000)
    assert (
        "no such script"
        in problems(data | {"players": {"main": {}, "x": {"role": "fixed", "model": "rule:hard"}}})["players.x.model"]
    )
    assert "no matches between players" in problems(data | {"evaluation": {"pairs": "all"}})["evaluation.pairs"]
    assert "main and hunter listen on the same port 8000" in problems(data | {"parallel": 2})["parallel"]
    assert "is 0" in problems(data | {"env_config": data["env_config"] | {"port": 0}})["env_config.port"]
    (several,) = problems(data | {"config": data["config"] | {"num_workers": 2}}).values()
    assert "num_workers" in several
    other = {"main": {}, "hunter": {"config": {"env_config": {"port": 8001}}}}
    assert check_players(LeagueConfig.model_validate(data | {"parallel": 2, "players": other}), tmp_path).keys() == {
        "main",
        "hunter",
    }
