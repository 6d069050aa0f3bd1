"""Agents that are served over HTTP as fixed players of a league: training, evaluation, `league match`, and servers that go away."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.config.problem import ConfigErrors
from ludus.core import trust
from ludus.errors import ConfigError, Untrusted
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import GatewaySettings
from ludus.league.events import PlayerAdded, PlayerQuarantined
from ludus.league.journal import LeagueJournal, read_events, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime.away_players import AwayPlayers, answers
from ludus.league.runtime.league_file import LeagueConfig, allow_tokens, check_players
from ludus.league.runtime.learner import check_opponents
from ludus.league.settings import LeagueSettings
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.weights.version_store import FixedSource
from ludus.protocol.codec import SeatSpaces, seats_to_spec
from ludus.sampling.league_policies import ScriptedPolicy, load_league_policies
from tests.league.games import RockPaperScissors, rock
from tests.league.runtime.test_league_run import command, league, run
from tests.local_servers import Served, gateway
from tests.waiting import wait_until

TOKEN = "a token that nobody guesses"
GAME = SeatSpaces(RockPaperScissors().observation_space(""), RockPaperScissors().action_space(""))


class _Like:
    observation_space, action_space = GAME.observation, GAME.action


@contextlib.contextmanager
def serve_rock(port: int = 0, *names: str, token: str | None = None) -> Iterator[Served]:
    """A server that always plays rock."""
    deciding = BatchedPolicy(FixedSource(ScriptedPolicy(rock, _Like(), lambda reason: None)))
    seats = names or ("",)
    settings = GatewaySettings(token=token, spec=seats_to_spec(dict.fromkeys(seats, GAME)))
    with gateway(lambda: BuiltinActor({name: Seat(deciding) for name in seats}), settings, port=port) as served:
        yield served


def served_league(tmp_path: Path, url: str, **sections: Any) -> dict[str, Any]:
    players = {"main": {}, "rock": {"role": "fixed", "model": url, **sections.pop("rock", {})}}
    return league(tmp_path, players=players, matchmaking={"scheme": "pfsp"}, **sections)


@pytest.mark.system
@pytest.mark.parametrize(("workers", "names"), [(0, ("left", "right", "other")), (1, ())])
def test_a_player_learns_to_beat_a_served_agent(tmp_path: Path, workers: int, names: tuple[str, ...]) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    directory = tmp_path / "league"
    with serve_rock(0, *names, token=TOKEN) as served:
        data = served_league(
            tmp_path,
            served.url,
            rock={"token_file": str(token_file), "rating": 1000},
            evaluation={"matches": 20, "pairs": "fixed"},
            turn_steps=1024,
            snapshots={"main": {"min_steps": 2048, "max_steps": 2048}},
            stop={"timesteps": 2048},
        )
        data["config"] |= {"num_workers": workers}
        state = run(directory, data).state
        stats = served.gateway.sessions.stats
    assert not state.players["rock"].quarantine
    against = state.payoff.record("main", "rock")
    matches = state.results - 20
    assert matches == 2048 if workers == 0 else matches >= 2048, "every step is a match here; workers play some more"
    assert against.games == matches
    if workers == 0:
        assert stats.started == stats.ended == matches + 20, "a session for every match, and none is left"
    assert against.wins > against.games / 2, "paper beats rock"
    (snapshot,) = (one for one in state.players.values() if one.role is PlayerRole.HISTORICAL)
    assert state.payoff.record(snapshot.name, "rock").games == 20
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()], "the token is not stored"


@pytest.mark.system
def test_a_server_that_goes_away_is_left_out_until_it_is_back(tmp_path: Path) -> None:
    file, directory = tmp_path / "league.yaml", tmp_path / "league"

    def games() -> int:
        return read_state(directory).payoff.record("main", "rock").games

    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serve_rock())
        data = served_league(tmp_path, served.url, stop={"timesteps": 10_000_000}, turn_steps=1_000_000, snapshots={})
        file.write_text(yaml.safe_dump(data))
        coordinator = stack.enter_context(command("run", "-f", file, "--dir", directory))
        wait_until(lambda: (directory / "league.yaml").exists() and games() > 100, 120)
        with contextlib.suppress(RuntimeError):
            served.run(served.gateway.close())
        wait_until(lambda: read_state(directory).players["rock"].quarantine, 60)
        assert served.url in read_state(directory).players["rock"].quarantine
        for _ in range(2):  # training continues; results of matches before the failure may still arrive in the first round
            before, played = read_state(directory).results, games()
            wait_until(lambda: read_state(directory).results > before + 200, 60)  # noqa: B023
        assert games() == played
        stack.enter_context(serve_rock(served.port))
        wait_until(lambda: not read_state(directory).players["rock"].quarantine, 60)
        wait_until(lambda: games() > played + 100, 60)
        coordinator.send_signal(signal.SIGINT)
        out = coordinator.communicate(timeout=60)[0]
    assert "rock gets no matches until its server answers" in out
    assert "rock takes part again: its server answers" in out
    state = read_state(directory)
    assert not state.players["main"].quarantine
    events = [one for one in read_events(directory) if isinstance(one, PlayerQuarantined)]
    assert {one.name for one in events} == {"rock"}
    assert [bool(one.reason) for one in events] == [True, False] * (len(events) // 2)


@pytest.mark.system
def test_an_address_that_never_answers_stops_neither_training_nor_evaluation(tmp_path: Path) -> None:
    said: list[str] = []
    data = served_league(tmp_path, "http://127.0.0.1:9", evaluation={"matches": 5, "pairs": "fixed"}, stop={"timesteps": 512})
    state = run(tmp_path, data, said).state
    assert state.players["main"].steps == 512
    assert "127.0.0.1:9" in state.players["rock"].quarantine
    assert state.payoff.record("main", "rock").games == 0
    assert any("rock gets no matches" in line for line in said)


@pytest.mark.system
def test_a_server_of_another_game_is_quarantined_for_good(tmp_path: Path) -> None:
    said: list[str] = []
    other = SeatSpaces(GAME.observation, gym.spaces.Discrete(7))
    with gateway(lambda: None, GatewaySettings(spec=seats_to_spec({"": other}))) as served:
        state = run(tmp_path, served_league(tmp_path, served.url, stop={"timesteps": 256}), said).state
    assert "its action space is Discrete(7)" in state.players["rock"].quarantine
    assert not any("asked again" in line for line in said)


def test_match_and_add_take_a_served_player_with_its_token(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    LeagueJournal(tmp_path / "league", LeagueSettings()).close()
    cli = CliRunner()
    with serve_rock(0, "left", "right", token=TOKEN) as served:
        added = cli.invoke(app, ["league", "add", str(tmp_path / "league"), "live", served.url, "--token-file", str(token_file)])
        assert added.exit_code == 0, added.output
        cli.invoke(app, ["league", "add", str(tmp_path / "league"), "dice", "rule:random"])
        player = read_state(tmp_path / "league").players["live"]
        assert (player.model, player.token_file) == (served.url, str(token_file))
        words = ["league", "match", str(tmp_path / "league"), "live", "dice", "--games", "30", "--record", "--json"]
        played = cli.invoke(app, [*words, "--env", "tests.league.games:make_rps", "--trust"])
        assert played.exit_code == 0, played.output
    assert json.loads(played.stdout.splitlines()[0])["players"] == ["live", "dice"]
    assert read_state(tmp_path / "league").payoff.record("live", "dice").games == 30


@pytest.mark.parametrize("given", ["nothing", "another address", "the pair", "--trust"])
def test_a_token_is_sent_only_to_the_address_with_which_the_user_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Address and file are in the journal of the league, which may be that of another person."""
    monkeypatch.setenv(trust.VARIABLE, "")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    league = tmp_path / "league"
    journal = LeagueJournal(league, LeagueSettings())
    with serve_rock(0, token=TOKEN) as served:
        player = Player("live", PlayerRole.FIXED, served.url, token_file=str(token_file))
        journal.apply(PlayerAdded(player))
        journal.close()
        if given == "--trust":
            trust.allow_everything()
        if given != "nothing":
            trust.allow_token(served.url if given == "the pair" else "http://127.0.0.1:9", str(token_file))
        if given in ("the pair", "--trust"):
            check_opponents(league)
            load_league_policies(
                league, served.url, _Like(), lambda reason, temporary=False: None, token_file=str(token_file)
            ).close()
            assert answers(player)
            return
        with pytest.raises(Untrusted, match="Nothing was sent"):
            check_opponents(league)
        with pytest.raises(Untrusted, match="Nothing was sent"):
            load_league_policies(league, served.url, _Like(), lambda reason, temporary=False: None, token_file=str(token_file))
        assert not answers(player)
        words = ["league", "match", str(league), "live", "live", "--games", "1", "--env", "tests.league.games:make_rps"]
        assert isinstance(CliRunner().invoke(app, words).exception, Untrusted | SystemExit)
        assert served.gateway.sessions.stats.started == 0


def test_the_file_of_a_league_gives_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    allow_tokens(LeagueConfig.model_validate(served_league(tmp_path, "http://127.0.0.1:9", rock={"token_file": "live.token"})))
    assert trust.is_token_allowed("http://127.0.0.1:9", str(tmp_path / "live.token"))
    assert not trust.is_token_allowed("http://127.0.0.1:8", str(tmp_path / "live.token"))
    assert not trust.is_token_allowed("http://127.0.0.1:9", str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("player", "problem"),
    [
        ({"role": "main", "model": "http://127.0.0.1:9"}, "only a fixed player can be served"),
        ({"role": "fixed", "model": "http://me:secret@host:80"}, "no user or password"),
        ({"role": "fixed", "model": "rule:random", "token_file": "x"}, "token_file is for a model that is served"),
    ],
)
def test_wrong_sections_of_served_players_are_refused(player: dict[str, Any], problem: str) -> None:
    from ludus.config.validation import parse_section

    with pytest.raises(ConfigError, match=problem):
        parse_section(LeagueConfig, {"env": "tests.league.games:make_rps", "players": {"main": {}, "x": player}})


def test_a_token_file_that_cannot_be_read_is_a_problem_of_the_file(tmp_path: Path) -> None:
    data = served_league(tmp_path, "http://127.0.0.1:9", rock={"token_file": str(tmp_path / "none")})
    with pytest.raises(ConfigErrors) as caught:
        check_players(LeagueConfig.model_validate(data), tmp_path)
    assert [one.path for one in caught.value.problems] == ["players.rock.token_file"]


def test_servers_are_asked_with_growing_delays() -> None:
    now, asked, up = [0.0], list[float](), [False]

    def ask(player: Player) -> bool:
        asked.append(now[0])
        return up[0]

    away = AwayPlayers(lambda: now[0], ask)
    away.add(Player("live", PlayerRole.FIXED, "http://x"))

    def pass_time(seconds: float) -> list[str]:
        returned = []
        for _ in range(round(seconds / 0.5)):
            now[0] += 0.5
            returned += away.poll()
            wait_until(lambda: all(one.answer is None or one.answer.done() for one in away._players.values()))
        return returned

    assert pass_time(300) == []
    delays = np.diff([0.0, *asked])
    assert delays[:4] == pytest.approx([2, 4.5, 8.5, 16.5], abs=1)
    assert delays.max() < 62
    up[0] = True
    assert pass_time(65) == ["live"]
    assert pass_time(50) == [], "once"
    up[0] = False
    away.add(Player("live", PlayerRole.FIXED, "http://x"))
    assert away.add(Player("live", PlayerRole.FIXED, "http://x")) > 30, "it was not available for long"
    away.close()
