"""Battles in environments whose agents stand in two camps: results that can be computed by hand, and the same by other ways."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, Tree
from ludus.envs.pettingzoo import make_match
from ludus.errors import IncompatibleCheckpoint, Unreachable, UsageError
from ludus.experiments.export_run import export_checkpoint
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import GatewaySettings
from ludus.models.inference.batched_policy import BatchedPolicy, State
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import BatchDecision, Policy
from ludus.protocol.codec import SeatSpaces, decode, seats_to_spec
from ludus.sampling.multi_agent.play import play_episode
from ludus.sampling.trained_agent import TrainedAgent
from ludus.serving.worker import FixedPolicySource
from ludus.tournament import players
from ludus.tournament.battle import battle
from ludus.tournament.contestants import (
    Contestant,
    FunctionContestant,
    ScriptedContestant,
    ServedContestant,
    TrainedContestant,
    contestant,
)
from ludus.tournament.env_matches import BattleEnv, EnvStage, split_camps
from ludus.tournament.gamecore_matches import GameLocation
from ludus.tournament.result import BattleResult, MatchResult
from ludus.tournament.settings import BattleSettings, RecordingSettings
from ludus.tournament.stage import MatchEnd
from tests.cards import CARDS, OBSERVATION, Cards
from tests.experiments.small import train
from tests.local_servers import Served as Gateway
from tests.local_servers import gateway

pytest.importorskip("pettingzoo")

TEAMS = ("red_0", "red_1", "blue_0", "blue_1")
ENV = "tests.cards:make_cards"
RANDOM = ScriptedContestant("random")


class Names:
    """Names the card that comes so many after the one it sees; with `counts`, as many after it as it has acted before."""

    observation_space = OBSERVATION
    action_space = gym.spaces.Discrete(CARDS)

    def __init__(self, after: int = 0, counts: bool = False, unsure: int = -1) -> None:
        """`unsure`: at this card it has no answer."""
        self._after, self.recurrent, self._unsure = after, counts, unsure

    def state_spec(self) -> Tree:
        return (ArraySpec((1,), np.dtype(np.float32)),) if self.recurrent else ()

    def draw_noise(self, rows: int, generator: torch.Generator) -> Array:
        drawn: Array = torch.rand((rows, 1), generator=generator).numpy()
        return drawn

    def act(self, observation: Tree, state: State = (), mask: Array | None = None, noise: Array | None = None) -> BatchDecision:
        zeros = np.zeros(len(observation), np.float32)
        shift = state[0][:, 0].astype(np.int64) if self.recurrent else self._after
        if noise is not None:
            shift = shift + (noise[:, 0] * CARDS).astype(np.int64)
        action = (observation.argmax(1) + shift) % CARDS
        sure = np.where(observation.argmax(1) == self._unsure, np.nan, zeros)
        return BatchDecision(action, action, sure, zeros, (state[0] + 1,) if self.recurrent else ())


def named_policy(after: int = 0, counts: bool = False, unsure: int = -1) -> TrainedContestant:
    policy = Names(after, counts, unsure)
    return TrainedContestant(f"names {after}", policy, 1, seats={"": policy})


def run_battle(
    a: Contestant, b: Contestant, games: int = 12, recording_settings: RecordingSettings | None = None, **more: Any
) -> BattleResult:
    terms = BattleSettings(games, **{name: more.pop(name) for name in ("swap_sides", "seed", "deterministic") if name in more})
    return battle(a, b, terms, recording_settings, GameLocation(env=ENV, **more))


# -- the outcome is the outcome -------------------------------------------------------------------------------------------


def test_the_camp_with_the_higher_return_wins_from_either_side() -> None:
    result = run_battle(named_policy(0), named_policy(1), games=40)
    assert (result.won, result.lost, result.drawn) == (40, 0, 0)
    assert [game.a_camp for game in result.games] == [0, 1] * 20
    assert all(game.lopsided == 5.0 and game.ticks == 5 for game in result.games)
    assert result.heroes["a"]["red_1"] == {"games": 20, "return": 5.0, "decisions": 5.0}
    assert result.heroes["b"]["red_1"] == {"games": 20, "return": 0.0, "decisions": 5.0}
    assert result.terms["camps"] == {"blue": ["red_0", "red_1"], "red": ["blue_0", "blue_1"]}
    assert result.lengths["p50"] == 5
    assert not result.clocked
    assert run_battle(named_policy(1), named_policy(0), games=6).lost == 6
    assert run_battle(named_policy(0), named_policy(0), games=6).drawn == 6


def test_recurrent_state_is_per_agent_and_match() -> None:
    """It counts its own acts: in five rounds it is right in the first and in the fifth, whatever else is played beside it."""
    result = run_battle(named_policy(counts=True), named_policy(1), games=40)
    assert result.heroes["a"]["red_0"]["return"] == result.heroes["a"]["blue_1"]["return"] == 2.0


def test_an_agent_that_left_does_not_act() -> None:
    result = run_battle(named_policy(0), RANDOM, games=60, options={"leaves": 2, "rounds": 6})
    assert not result.failed
    decisions = {hero.numbers["decisions"] for game in result.games for hero in game.heroes}
    assert decisions == {2.0, 6.0}


@pytest.mark.parametrize("b", [RANDOM, named_policy(1)], ids=["random", "drawn"])
def test_random_streams_are_per_match(b: Contestant) -> None:
    def played(max_parallel: int, seed: int = 3) -> list[MatchResult]:
        games: list[MatchResult] = []
        terms = BattleSettings(30, seed=seed, deterministic=False)
        with EnvStage((named_policy(0), b), BattleEnv(ENV), terms, max_parallel=max_parallel) as stage:
            stage.play(stage.pairings, lambda end: games.append(end.result))
        return sorted(games, key=lambda game: game.number)

    alone = played(1)
    assert played(7) == alone
    assert played(7, seed=4) != alone
    assert len({game.lopsided for game in alone}) > 3


def test_chance_is_fair() -> None:
    """One card in four: the mean of 2,000 rounds of four agents lies within five standard deviations."""
    result = run_battle(RANDOM, RANDOM, games=400)
    for who in ("a", "b"):
        for numbers in result.heroes[who].values():
            assert abs(numbers["return"] / 5 - 0.25) < 5 * (0.25 * 0.75 / 1000) ** 0.5
    assert result.won > 100
    assert result.lost > 100


def test_repeated_courses_give_a_note() -> None:
    env = GameLocation(env="pettingzoo/tictactoe_v3")
    policy = toe(1)
    always = battle(policy, policy, BattleSettings(20), location=env)
    assert any("only 2 of 20 matches took different courses" in note for note in always.notes)
    drawn = battle(policy, policy, BattleSettings(20, deterministic=False), location=env)
    assert not any("different courses" in note for note in drawn.notes)


def toe(seed: int) -> TrainedContestant:
    match = make_match("pettingzoo/tictactoe_v3")
    try:
        known = match.agents["player_1"]
    finally:
        match.close()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(known.observation, known.action, NetworkConfig(fcnet_hiddens=(16,), core="lstm", cell_size=8))
    return TrainedContestant(f"toe {seed}", policy, 1, seats={"": policy})


def test_batched_turns_equal_play_episode() -> None:
    """Against `play_episode`, which asks for one agent at a time: the same returns and lengths, match for match."""
    a, b = toe(1), toe(2)
    result = battle(a, b, BattleSettings(6), location=GameLocation(env="pettingzoo/tictactoe_v3"))
    match = make_match("pettingzoo/tictactoe_v3")
    try:
        for game in result.games:
            first, second = (a, b) if game.a_camp == 0 else (b, a)
            cast = {"player_1": TrainedAgent(first.policy), "player_2": TrainedAgent(second.policy)}  # type: ignore[arg-type]
            alone = play_episode(match, cast, game.seed)
            assert alone is not None
            assert {hero.name: hero.numbers["return"] for hero in game.heroes} == alone.returns
            assert game.ticks == alone.steps
    finally:
        match.close()


# -- who plays ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("runs") / "toe"
    train(where, 1, env="pettingzoo/tictactoe_v3", evaluation_duration=0)
    return where


def test_a_run_names_its_own_environment(run: Path, tmp_path: Path) -> None:
    result = ludus.battle(run, f"{run}@2", 20)
    assert result.terms["game"] == "pettingzoo/tictactoe_v3"
    assert (result.won, result.lost) in ((10, 10), (0, 0))  # the same player: every match is one of two
    export_checkpoint(run, out=tmp_path / "toe.onnx")
    by_export = ludus.battle(run, tmp_path / "toe.onnx", 20)
    assert [game.winner for game in by_export.games] == [game.winner for game in result.games]
    twice = [ludus.battle(run, "rule:random", 30, deterministic=False, seed=5) for _ in range(2)]
    assert twice[0] == twice[1]
    assert ludus.battle("rule:random", "rule:random", 10, env="pettingzoo/tictactoe_v3").total.games == 10


def test_several_models_play_their_own_agents_unless_one_is_chosen(tmp_path: Path) -> None:
    where = tmp_path / "teams"
    section = {"policies": ["reds", "blues"], "policy_mapping": {"red_*": "reds", "blue_*": "blues"}}
    train(where, 1, env=ENV, multiagent=section, evaluation_duration=0, train_batch_size=64, num_envs_per_worker=4)
    whole, reds = contestant(where), contestant(where, model="reds")
    assert isinstance(whole, TrainedContestant)
    assert isinstance(reds, TrainedContestant)
    assert whole.seats["red_0"] is not whole.seats["blue_0"]
    assert len(set(map(id, reds.seats.values()))) == 1
    assert battle(whole, RANDOM, BattleSettings(4)).terms["game"] == ENV
    with pytest.raises(UsageError, match=r"the models reds, blues.*--model-a"):
        battle(whole, ScriptedContestant("easy"), BattleSettings(1), location=GameLocation(game="arena"))


def actor(one: TrainedContestant, *names: str) -> BuiltinActor:
    return BuiltinActor({name: Seat(BatchedPolicy(FixedPolicySource(one.policy, 1), deterministic=True)) for name in names})


def test_a_served_player_answers_the_same_matches(run: Path) -> None:
    pytest.importorskip("uvicorn")
    mine, theirs = toe(1), toe(2)
    near = battle(mine, theirs, BattleSettings(6), location=GameLocation(env="pettingzoo/tictactoe_v3"))
    spaces = SeatSpaces(theirs.policy.observation_space, theirs.policy.action_space)

    def answering(*names: str) -> contextlib.AbstractContextManager[Gateway]:
        settings = GatewaySettings(spec=seats_to_spec(dict.fromkeys(names, spaces)))
        return gateway(lambda: actor(theirs, *names), settings)

    for names in (("",), ("player_1", "player_2")):
        with answering(*names) as served:
            far = battle(
                mine, ServedContestant(served.url), BattleSettings(6), location=GameLocation(env="pettingzoo/tictactoe_v3")
            )
        assert not far.failed
        assert [(game.winner, game.ticks) for game in far.games] == [(game.winner, game.ticks) for game in near.games]
    with answering("player_1") as served, pytest.raises(IncompatibleCheckpoint, match="no seat 'player_2'"):
        battle(contestant(run), ServedContestant(served.url), BattleSettings(2))
    with answering("") as served, pytest.raises(IncompatibleCheckpoint, match="'red_0'"):
        run_battle(named_policy(0), ServedContestant(served.url))
    with pytest.raises(Unreachable):
        battle(contestant(run), ServedContestant("http://127.0.0.1:9"), BattleSettings(2))


def test_matches_of_an_unreachable_player_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(players, "_RESTART_TIMEOUT_S", 1.0)
    games: list[MatchResult] = []
    with gateway(lambda: actor(toe(2), "")) as served:
        place = BattleEnv("pettingzoo/tictactoe_v3")
        with EnvStage((toe(1), ServedContestant(served.url)), place, BattleSettings(8), max_parallel=2) as stage:

            def on_end(end: MatchEnd) -> None:
                games.append(end.result)
                if len(games) == 2:
                    served.run(served.gateway.close())

            stage.play(stage.pairings, on_end)
    assert len(games) == 8
    assert not any(game.failed for game in games[:2])
    assert sum(bool(game.failed) for game in games) >= 4
    assert all(game.winner is None for game in games if game.failed)


# -- what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [0, 3], ids=["reset", "step"])
def test_a_broken_match_fails_and_the_others_continue(breaks: int, tmp_path: Path) -> None:
    result = run_battle(
        named_policy(0), named_policy(1), games=30, options={"breaks": breaks}, recording_settings=RecordingSettings(tmp_path)
    )
    broken = [game for game in result.games if game.seed % 2]
    assert 0 < len(broken) < 30
    assert list(result.failed) == broken
    assert all("RuntimeError" in game.failed for game in broken)
    assert result.won == 30 - len(broken)
    assert len(list(tmp_path.iterdir())) == result.won


def test_a_match_without_end_is_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.sampling.episode_runner.EPISODE_STEPS", 50)
    result = run_battle(named_policy(0), named_policy(1), games=3, options={"endless": True})
    assert (result.drawn, result.games[0].reason) == (3, "not over after 50 steps")
    assert result.gain == 0.0  # blue has gained more so far, but a draw gains nothing


def test_mismatches_are_refused_before_the_first_match(run: Path) -> None:
    with pytest.raises(IncompatibleCheckpoint, match="cannot play 'red_0': its observation space is"):
        run_battle(contestant(run), RANDOM)
    with pytest.raises(UsageError, match=r"no player 'rule:hard'.*rule:random"):
        run_battle(named_policy(0), ScriptedContestant("hard"))
    with pytest.raises(UsageError, match="--lineup is for the Arena"):
        battle(named_policy(0), named_policy(1), BattleSettings(1, lineups="random"), location=GameLocation(env=ENV))
    with pytest.raises(UsageError, match="Leave out --env"):
        GameLocation(env=ENV, server="127.0.0.1:9")


def test_camps_are_two_agents_two_kinds_or_patterns() -> None:
    assert split_camps(["a1", "a2"], None, "x") == (("a1",), ("a2",))
    assert split_camps(["agent_0", "adversary_0", "adversary_1"], None, "x") == (("agent_0",), ("adversary_0", "adversary_1"))
    assert split_camps(TEAMS, "blue_*/red_0, red_1", "x") == (("blue_0", "blue_1"), ("red_0", "red_1"))
    for agents, said, told in (
        (["p_0", "p_1", "p_2"], None, "which are the two camps"),
        (TEAMS, "red_*", "--camps 'red_*' does not have two parts"),
        (TEAMS, "red_*/blue_0", "'blue_1' of x is in no camp"),
        (TEAMS, "*/blue_*", "'blue_0' of x is in both camps"),
        (["p_0"], "*/q", "A camp of '*/q' is empty"),
    ):
        with pytest.raises(UsageError) as error:
            split_camps(agents, said, "x")
        assert told in error.value.message


# -- what is kept ---------------------------------------------------------------------------------------------------------


def test_recordings_have_every_step_and_the_most_lopsided_has_a_video(tmp_path: Path) -> None:
    import imageio

    result = run_battle(
        named_policy(0), RANDOM, games=10, options={"rounds": 30}, recording_settings=RecordingSettings(tmp_path, videos=1)
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".npz") == [f"game-{i:04d}.npz" for i in range(10)]
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    for game in result.games:
        entries = {str(entry["agent"]): entry for entry in ludus.read_rollout(game.recording or "")}
        for hero in game.heroes:
            entry = entries[hero.name]
            assert entry["reward"].sum() == hero.numbers["return"]
            assert ((entry["observation"].argmax(1) == entry["action"]) == (entry["reward"] == 1.0)).all()
    (filmed,) = [game for game in result.games if game.video]
    assert filmed.lopsided == max(game.lopsided for game in result.games)
    with imageio.get_reader(filmed.video or "") as reader:
        assert reader.count_frames() == 31
        frames = [reader.get_data(i) for i in range(10)]
    cards = ludus.read_rollout(filmed.recording or "")[0]["observation"].argmax(1)
    shown = [int(frame[16, 4::8, 0].argmax()) for frame in frames]
    assert shown == cards[:10].tolist()
    assert not result.notes


def test_a_video_of_an_irreproducible_match_gives_a_note(tmp_path: Path) -> None:
    options = {"kind": "other", "rounds": 30}
    result = run_battle(
        named_policy(0),
        named_policy(1),
        games=2,
        options=options,
        recording_settings=RecordingSettings(tmp_path, most=0, videos=1),
    )
    assert any("shows another course" in note for note in result.notes)
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]


# -- at the edges -----------------------------------------------------------------------------------------------------------


def test_equal_returns_are_a_draw_despite_rounding() -> None:
    """Camps of three and of two, a tenth for everybody: sums and means of tenths differ in their last bit."""
    result = run_battle(named_policy(0), named_policy(1), games=6, options={"kind": "paid", "reds": 3})
    assert (result.drawn, {game.lopsided for game in result.games}) == (6, {0.0})


def test_each_model_of_a_version_plays_its_own_agents(tmp_path: Path) -> None:
    where = tmp_path / "teams"
    section = {"policies": ["reds", "blues"], "policy_mapping": {"red_*": "reds", "blue_*": "blues"}}
    train(where, 1, env=ENV, multiagent=section, evaluation_duration=0, train_batch_size=64, num_envs_per_worker=4)
    whole = contestant(where)
    assert isinstance(whole, TrainedContestant)
    same = contestant(f"{where}@{whole.version}")
    assert isinstance(same, TrainedContestant)
    assert same.several == whole.several == ("reds", "blues")
    assert same.seats["red_1"] is same.seats["red_0"] is not same.seats["blue_0"]
    with pytest.raises(UsageError, match="none that was trained to play 'blue_2'"):
        battle(whole, RANDOM, BattleSettings(2), location=GameLocation(options={"blues": 3}))
    assert not battle(
        contestant(where, model="reds"), RANDOM, BattleSettings(2), location=GameLocation(options={"blues": 3})
    ).failed


def test_noise_is_per_match_with_several_models() -> None:
    policies = {agent: Names(i) for i, agent in enumerate(TEAMS)}
    one = TrainedContestant("four", policies["red_0"], 1, seats=policies)

    def played(max_parallel: int) -> list[MatchResult]:
        games: list[MatchResult] = []
        options = {"leaves": 2, "rounds": 6}
        with EnvStage(
            (one, RANDOM), BattleEnv(ENV, options), BattleSettings(30, deterministic=False), max_parallel=max_parallel
        ) as stage:
            stage.play(stage.pairings, lambda end: games.append(end.result))
        return sorted(games, key=lambda game: game.number)

    assert played(1) == played(7)


def test_a_policy_without_an_action_fails_only_that_match() -> None:
    result = run_battle(named_policy(0, unsure=3), named_policy(1), games=40, options={"rounds": 1})
    lost = [game for game in result.games if game.failed]
    assert 0 < len(lost) < 40
    assert all("'red_0'" in game.failed or "'blue_0'" in game.failed for game in lost)
    assert result.won == 40 - len(lost)


def test_matches_fail_when_environments_cannot_be_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cards, "left", 4)
    games: list[MatchResult] = []
    with EnvStage((named_policy(0), named_policy(1)), BattleEnv(ENV, {"breaks": 3}), BattleSettings(20), max_parallel=2) as stage:
        stage.play(stage.pairings, lambda end: games.append(end.result))
    assert sorted(game.number for game in games) == list(range(20))
    assert any(game.winner == "a" for game in games)
    assert sum("no cards left" in game.failed for game in games) > 5


def test_a_match_that_is_over_at_reset_fails() -> None:
    result = run_battle(named_policy(0), named_policy(1), games=4, options={"kind": "empty"})
    assert len(result.failed) == 4
    assert "over before any agent has acted" in result.failed[0].failed


def test_rewards_after_departure_give_a_note() -> None:
    result = run_battle(named_policy(0), named_policy(1), games=4, options={"kind": "late"})
    assert any(note.startswith("8 rewards came to agents that had left") for note in result.notes)


def test_rewards_of_an_agent_that_never_acted_count() -> None:
    """In turns, the first move ends the match: the second player has lost without a move, and no reward is nobody's."""
    result = battle(
        named_policy(0),
        named_policy(1),
        BattleSettings(4),
        location=GameLocation(env="tests.cards:make_turns", options={"moves": 1}),
    )
    assert [game.winner for game in result.games] == ["a", "b", "a", "b"]
    assert not result.notes


def test_constant_players_still_play_different_matches() -> None:
    policy = Names()
    policy.act = lambda observation, *more: BatchDecision(  # type: ignore[method-assign]
        np.zeros(len(observation), np.int64),
        np.zeros(len(observation)),
        np.zeros(len(observation)),
        np.zeros(len(observation)),
        (),
    )
    always = TrainedContestant("zero", policy, 1, seats={"": policy})
    assert not run_battle(always, always, games=40).notes  # the cards are others


def test_an_impossible_video_is_refused_or_noted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="renders nothing"):
        run_battle(
            named_policy(0),
            named_policy(1),
            games=2,
            options={"kind": "blind"},
            recording_settings=RecordingSettings(tmp_path, videos=1),
        )
    for speed in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(UsageError, match="times the speed"):
            RecordingSettings(tmp_path, videos=1, speed=speed)
    (tmp_path / "game-0000.mp4").mkdir()
    blocked = run_battle(
        named_policy(0), named_policy(1), games=1, recording_settings=RecordingSettings(tmp_path, most=0, videos=1)
    )
    assert blocked.won == 1
    assert any("game 0 has no video" in note for note in blocked.notes)
    Cards.left = 17  # one to look at, sixteen to play, none for the film
    try:
        result = run_battle(
            named_policy(0), named_policy(1), games=20, recording_settings=RecordingSettings(tmp_path / "late", most=0, videos=1)
        )
    finally:
        Cards.left = 1 << 30
    assert result.won == 20
    assert any("has no video" in note and "no cards left" in note for note in result.notes)


def test_an_irreproducible_video_gives_a_note_without_rewards(tmp_path: Path) -> None:
    options = {"kind": "other", "rounds": 30}
    result = run_battle(
        named_policy(1),
        named_policy(2),
        games=2,
        options=options,
        recording_settings=RecordingSettings(tmp_path, most=0, videos=1),
    )
    assert result.drawn == 2
    assert any("shows another course" in note for note in result.notes)


def test_many_agents_are_recorded_with_few_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        result = run_battle(
            RANDOM, RANDOM, games=18, options={"reds": 15, "blues": 15}, recording_settings=RecordingSettings(tmp_path)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(tmp_path.iterdir())) == result.total.games == 18


def test_only_the_sides_that_are_played_need_to_fit() -> None:
    wrong = Names()
    wrong.observation_space = gym.spaces.Box(0.0, 1.0, (CARDS + 1,), np.float32)
    reds = TrainedContestant("reds", Names(), 1, seats={"red_0": Names(), "red_1": Names(), "blue_0": wrong, "blue_1": wrong})
    assert run_battle(reds, named_policy(1), games=3, swap_sides=False).sides["blue"].won == 3
    assert run_battle(reds, named_policy(1), games=1).won == 1
    with pytest.raises(IncompatibleCheckpoint, match="--no-swap-sides"):
        run_battle(reds, named_policy(1), games=2)


@pytest.mark.parametrize("seated", [False, True])
def test_a_served_agent_that_returns_starts_with_a_new_state(seated: bool) -> None:
    pytest.importorskip("uvicorn")
    counting = named_policy(counts=True)
    names = TEAMS if seated else ("",)
    spaces = dict.fromkeys(names, SeatSpaces(OBSERVATION, counting.policy.action_space))
    options = {"kind": "away", "rounds": 6}
    near = run_battle(counting, named_policy(1), games=4, options=options)
    with gateway(lambda: actor(counting, *names), GatewaySettings(spec=seats_to_spec(spaces))) as served:
        far = run_battle(ServedContestant(served.url), named_policy(1), games=4, options=options)
    assert not far.failed
    assert [game.heroes for game in far.games] == [game.heroes for game in near.games]
    assert near.heroes["a"]["red_0"]["decisions"] == 5.0  # of six rounds; right in the first, and in the first after it is back
    assert near.heroes["a"]["red_0"]["return"] == 2.0


class Listening(BuiltinActor):
    """Writes down how sessions end."""

    heard: ClassVar[list[Any]] = []

    async def end(self, body: bytes) -> bytes:
        if self.ended_by == "game":
            Listening.heard.append(decode(body))
        return await super().end(body)


def test_a_served_player_receives_the_final_reward() -> None:
    pytest.importorskip("uvicorn")
    Listening.heard.clear()
    one = named_policy(0)
    with gateway(lambda: Listening({"": Seat(BatchedPolicy(FixedPolicySource(one.policy, 1), deterministic=True))})) as served:
        result = run_battle(ServedContestant(served.url), named_policy(1), games=2, options={"rounds": 2})
    assert not result.failed
    assert Listening.heard == [{"reward": 1.0, "terminated": True}] * 4


def test_rewards_before_the_first_action_are_not_sent(tmp_path: Path) -> None:
    """Of agents in turns the second has been paid before it first acts: a served one is not told of that."""
    pytest.importorskip("uvicorn")
    one = named_policy(0)
    env = GameLocation(env="tests.cards:make_turns")
    with gateway(lambda: actor(one, "")) as served:
        far = battle(ServedContestant(served.url), named_policy(1), BattleSettings(4), location=env)
    assert not far.failed
    assert [game.winner for game in far.games] == [
        game.winner for game in battle(one, named_policy(1), BattleSettings(4), location=env).games
    ]


def test_nested_spaces_and_masks_in_infos(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    where = tmp_path / "parcels"
    env = "tests.cards:make_parcels"
    train(where, 1, env=env, evaluation_duration=0, train_batch_size=64, num_envs_per_worker=4, multiagent={})
    one = contestant(where)
    assert isinstance(one, TrainedContestant)
    near = battle(one, RANDOM, BattleSettings(6), RecordingSettings(tmp_path / "kept"))
    assert not near.failed
    assert ludus.read_rollout(near.games[0].recording or "")[0]["action.to"].shape == (3,)
    with gateway(lambda: actor(one, "")) as served:
        far = battle(ServedContestant(served.url), RANDOM, BattleSettings(6), location=GameLocation(env=env))
    assert [game.heroes for game in far.games] == [game.heroes for game in near.games]


def test_a_policy_with_a_centralised_value(tmp_path: Path) -> None:
    where = tmp_path / "central"
    train(
        where,
        1,
        env=ENV,
        evaluation_duration=0,
        train_batch_size=64,
        num_envs_per_worker=4,
        multiagent={"centralized_value": True},
    )
    assert ludus.battle(where, "rule:random", 4).total.games == 4
    assert ludus.battle(f"{where}@2", where, 4, deterministic=False).total.games == 4


def test_options_without_effect_are_refused() -> None:
    for more in ({"limit_s": 5.0}, {"advertise": "node1"}, {"token_file": "x"}):
        with pytest.raises(UsageError, match="is for games of a server"):
            run_battle(named_policy(0), named_policy(1), games=2, **more)
    with pytest.raises(UsageError, match="--camps is for environments"):
        battle(
            ScriptedContestant("easy"),
            ScriptedContestant("easy"),
            BattleSettings(1, seconds=5),
            location=GameLocation(camps="a/b"),
        )
    assert run_battle(named_policy(0), named_policy(1), games=4, parallel=1).won == 4


# -- functions of the user ------------------------------------------------------------------------------------------------------


def test_a_function_plays_and_gains_are_half_of_the_difference_of_mean_returns() -> None:
    location = GameLocation(env="tests.league.games:make_rps")
    rock = contestant("script:tests.league.games:rock")
    even = battle(rock, rock, BattleSettings(games=6), location=location)
    assert (even.drawn, even.gain) == (6, 0.0)
    result = battle(rock, RANDOM, BattleSettings(games=40), location=location)
    assert result.gain == result.won - result.lost  # every match pays 1
    assert 0 < result.won < 40
    teams = battle(RANDOM, RANDOM, BattleSettings(games=10), location=GameLocation(env=ENV, camps="blue_*/red_*"))
    by_hand = [
        0.25 * sum(hero.numbers["return"] * (1 if hero.who == "a" else -1) for hero in game.heroes) for game in teams.games
    ]
    assert [game.gain for game in teams.games] == by_hand
    assert all({"a": 1.0, "b": -1.0, None: 0.0}[game.winner] == np.sign(game.gain or 0.0) for game in teams.games)


@pytest.mark.parametrize("function", [lambda observation, mask: 1 // 0, lambda observation, mask: 7])
def test_matches_in_which_a_function_fails_have_no_result(function: Any) -> None:
    bad = FunctionContestant("script:a:bad", function)
    result = battle(bad, RANDOM, BattleSettings(games=2), location=GameLocation(env="tests.league.games:make_rps"))
    assert len(result.failed) == 2
    assert result.failed[0].failed.startswith("script:a:bad failed: ")


def test_a_function_does_not_play_on_a_server() -> None:
    one = FunctionContestant("script:a:one", lambda observation, mask: 0)
    with pytest.raises(UsageError, match="script:a:one plays in this process only"):
        battle(one, ServedContestant("http://127.0.0.1:9"), BattleSettings(games=1))
