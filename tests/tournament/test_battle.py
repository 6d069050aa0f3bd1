"""Battles: the numbers agree with who plays the same matches by other means."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.core.spaces import split_mask
from ludus.errors import ConfigError, Damaged, IncompatibleCheckpoint, LudusError, Refused, Unreachable, UsageError
from ludus.experiments.export_run import export_checkpoint
from ludus.experiments.runs import remote_runs
from ludus.gamecore.server import state_dir
from ludus.gamecore.server.http.app import RunningServer, running
from ludus.gamecore.server.settings import Settings
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.bots.round_robin import play_pairs
from ludus.games.arena.engine.recording import read_recording, verify
from ludus.games.arena.engine.settings import ArenaSettings
from ludus.games.arena.engine.vector import Arena
from ludus.games.arena.env.seats import action_space, observation_space
from ludus.gateway import threaded_server
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.protocol.gamecore_client import GamecoreClient, GameState
from ludus.sampling.trained_agent import TrainedAgent
from ludus.serving.checkpoint_follower import CheckpointSource
from ludus.serving.worker import FixedPolicySource
from ludus.tournament import gamecore_matches
from ludus.tournament.arena_matches import ArenaRecording, ArenaStage, decision_interval, schedule_matches
from ludus.tournament.battle import battle
from ludus.tournament.contestants import (
    Contestant,
    ContestantSource,
    FunctionContestant,
    ScriptedContestant,
    ServedContestant,
    TrainedContestant,
    contestant,
)
from ludus.tournament.gamecore_matches import GameLocation
from ludus.tournament.result import HeroStats, MatchResult, count_wins, lopsidedness, most_lopsided
from ludus.tournament.settings import BattleSettings, Pairing, RecordingSettings, read_lineups, schedule
from ludus.tournament.stage import MatchEnd
from tests.experiments.small import SETTINGS, train
from tests.local_servers import gateway
from tests.test_gamecore_page import NIM, block

HARD, MEDIUM, EASY = ScriptedContestant("hard"), ScriptedContestant("medium"), ScriptedContestant("easy")
LSTM = NetworkConfig(fcnet_hiddens=(16,), core="lstm", cell_size=8)


def arena_policy(seed: int = 0, size: int = 1, network: NetworkConfig = LSTM) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(split_mask(observation_space(size))[0], action_space(size), network)


def trained(policy: Policy, label: str = "mine", **settings: Any) -> TrainedContestant:
    return TrainedContestant(label, policy, 7, seats={"": policy}, settings=settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred steps of the Arena."""
    where = tmp_path_factory.mktemp("runs") / "arena"
    env_config = {"opponent": "easy", "start": "lane", "seconds": 30, "every": 5}
    model = {"fcnet_hiddens": [16], "use_lstm": True, "lstm_cell_size": 8}
    train(where, 2, env="ludus/Arena-1v1-v0", env_config=env_config, model=model, evaluation_duration=0)
    return where


# -- the matches are the matches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "games", "seconds"), [(1, 20, 300), (3, 6, 200)])
def test_bots_score_as_in_the_round_robin(size: int, games: int, seconds: int) -> None:
    settings = ArenaSettings(seconds=seconds)
    (standing,) = play_pairs(games, size, 9, (("hard", "medium"),), settings)
    result = battle(HARD, MEDIUM, BattleSettings(games, mode=f"{size}v{size}", lineups="random", seconds=seconds, seed=9))
    assert (result.won, result.lost, result.drawn) == (standing.won, standing.lost, standing.drawn)
    assert result.interval == standing.bounds
    assert tuple(game.seconds for game in result.games) == standing.seconds


def test_batched_play_equals_play_seat_by_seat() -> None:
    """Against a loop that knows nothing of batches: one match, one seat, one decision after the other."""
    policy = arena_policy(3)
    terms = BattleSettings(6, seconds=25, seed=5)
    found = last_states(trained(policy), MEDIUM, terms)
    assert found == [_alone(policy, pairing, 25).hash(0) for pairing in schedule_matches(terms, 1)]
    assert len(set(found)) == 6


def last_states(one: Contestant, other: Contestant, terms: BattleSettings) -> list[str]:
    """How each match ended, as the hash of its whole state."""
    ended: list[MatchEnd] = []
    ArenaStage((one, other), 1, 3, terms, records=True).play(schedule_matches(terms, 1), ended.append)
    ended.sort(key=lambda each: each.result.number)
    return [each.recording.recording.hashes[-1].hex() for each in ended if isinstance(each.recording, ArenaRecording)]


def _alone(policy: Policy, pairing: Pairing, seconds: int) -> Arena:
    arena = Arena(1, 1, ArenaSettings(seconds=seconds), lenient=True)
    arena.reset([pairing.seed])
    agent, state, me = TrainedAgent(policy), None, pairing.a_camp
    who = np.full((1, 2), BOTS.index("medium"), np.int8)
    who[0, me] = -1
    while not arena.over[0]:
        arena.observe()
        seen = {
            "entities": arena.entities[0, me],
            "scalars": arena.scalars[0, me],
            "target_mask": arena.target_mask[0, me].view(np.int8),
        }
        orders = arena.bot_actions(who)
        orders[0, me], state = agent.act(seen, state, arena.mask[0, me])
        arena.step(orders)
    return arena


@pytest.mark.parametrize("kind", ["script", "policy"])
def test_a_player_against_itself_wins_as_often_as_it_loses(kind: str) -> None:
    """The same match from both sides: whoever wins it as A loses it as B."""
    one: Contestant = EASY if kind == "script" else trained(arena_policy(1))
    heroes = ((107,), (111,)), ((190,), (117,)), ((173,), (141,)), ((107,), (107,))
    queue = [Pairing(2 * k + camp, camp, k, both) for k, both in enumerate(heroes) for camp in (0, 1)]
    ended: list[MatchEnd] = []
    ArenaStage((one, one), 1, 3, BattleSettings(len(queue), seconds=480 if kind == "script" else 60)).play(queue, ended.append)
    games = sorted((each.result for each in ended), key=lambda game: game.number)
    share = count_wins(games)
    assert share.won == share.lost
    assert share.games == 8
    for blue, red in zip(games[::2], games[1::2], strict=True):
        assert (blue.winner, red.winner) in {("a", "b"), ("b", "a"), (None, None)}
        assert blue.ticks == red.ticks
        assert {hero.who: hero.numbers for hero in blue.heroes} == {
            {"a": "b", "b": "a"}[hero.who]: hero.numbers for hero in red.heroes
        }
    if kind == "script":
        assert share.won, "something must happen for this to mean anything"


def test_swapping_a_and_b_swaps_the_results() -> None:
    terms = BattleSettings(8, seconds=240, seed=2)
    queue = schedule_matches(terms, 1)
    turned = [replace(pairing, a_camp=1 - pairing.a_camp) for pairing in queue]
    results: list[list[MatchResult]] = []
    for pair, plan in (((HARD, EASY), queue), ((EASY, HARD), turned)):
        ended: list[MatchEnd] = []
        ArenaStage(pair, 1, 3, terms).play(plan, ended.append)
        results.append(sorted((each.result for each in ended), key=lambda game: game.number))
    ahead, behind = map(count_wins, results)
    assert (ahead.won, ahead.lost, ahead.drawn) == (behind.lost, behind.won, behind.drawn)
    assert ahead.won > ahead.lost


def test_parallelism_does_not_change_the_results_of_bots() -> None:
    terms = BattleSettings(10, seconds=200, seed=4, lineups="random")
    found = []
    for max_parallel in (1, 3, 64):
        ended: list[MatchEnd] = []
        ArenaStage((MEDIUM, EASY), 1, 3, terms, max_parallel=max_parallel).play(schedule_matches(terms, 1), ended.append)
        found.append(sorted((each.result for each in ended), key=lambda game: game.number))
    assert found[0] == found[1] == found[2]


def test_a_battle_is_reproducible_by_its_seed() -> None:
    one, other = trained(arena_policy(1)), trained(arena_policy(2), "other")
    drawn = BattleSettings(4, seconds=15, seed=3, deterministic=False, lineups="random")
    assert battle(one, other, drawn) == battle(one, other, drawn)
    found = [
        last_states(one, other, terms) for terms in (drawn, drawn, replace(drawn, seed=4), replace(drawn, deterministic=True))
    ]
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert not set(found[0]) & set(found[3]), "the most probable actions are others than those that are drawn"


@pytest.mark.parametrize("mode", ["1v1", "3v3"])
def test_a_policy_takes_only_legal_actions(mode: str) -> None:
    size = int(mode[0])
    one = trained(arena_policy(1, size, NetworkConfig(fcnet_hiddens=(16,))))
    result = battle(one, MEDIUM, BattleSettings(4, mode=mode, seconds=40, deterministic=False, lineups="random"))
    assert len(result.games) == 4
    mine = [hero for game in result.games for hero in game.heroes if hero.who == "a"]
    assert len(mine) == 4 * size
    assert sum(hero.numbers["illegal"] for hero in mine) == 0


# -- who can take part ----------------------------------------------------------------------------------------------------


def test_a_run_a_checkpoint_and_a_version_are_the_same_player(run: Path) -> None:
    (name,) = [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()]
    (kept,) = run.glob("models/*/*.safetensors")
    version = int(kept.stem)
    names: list[ContestantSource] = [
        run,
        run / "checkpoints" / name,
        f"{run}@{version}",
        f"{run}@{version:06d}",
        kept,
        ludus.load(run),
    ]
    found = [contestant(name) for name in names]
    assert all(isinstance(one, TrainedContestant) and one.version == version for one in found)
    results = [last_states(one, EASY, BattleSettings(2, seconds=10)) for one in found]
    assert all(result == results[0] for result in results)


def test_an_exported_policy_plays_the_same_matches(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    export_checkpoint(run, out=tmp_path / "agent.onnx")
    exported = contestant(tmp_path / "agent.onnx")
    assert isinstance(exported, TrainedContestant)
    assert exported.to_json() == {
        "name": f"agent.onnx@{exported.version}",
        "kind": "onnx",
        "where": str(tmp_path / "agent.onnx"),
        "version": exported.version,
    }
    terms = BattleSettings(4, seconds=20)
    assert last_states(exported, EASY, terms) == last_states(contestant(run), EASY, terms)
    assert exported.every == 5  # as it was trained
    with pytest.raises(UsageError, match="There is no file"):
        contestant(tmp_path / "nothing.onnx")
    (tmp_path / "rubbish.onnx").write_bytes(b"nonsense")
    with pytest.raises(Damaged):
        contestant(tmp_path / "rubbish.onnx")


def test_a_version_without_a_checkpoint_is_read_from_the_stored_versions(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (kept,) = copy.glob("models/*/*.safetensors")
    shutil.copy(kept, kept.with_name("000900.safetensors"))
    one = contestant(f"{copy}@900")
    assert isinstance(one, TrainedContestant)
    assert (one.version, one.every) == (900, 5)
    assert battle(one, contestant(run), BattleSettings(2, seconds=10)).drawn == 2


def test_a_remote_run_is_a_contestant(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "cache"))
    settings: dict[str, Any] = {**SETTINGS, "env_config": {"seconds": 30}, "evaluation_duration": 0}
    where = ludus.train("ludus/Arena-1v1-v0", stop={"iterations": 1}, local_dir=s3_url, **settings).place
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "another machine"))
    one = contestant(where)
    assert isinstance(one, TrainedContestant)
    other = contestant(where.replace("?", f"@{one.version}?"))
    terms = BattleSettings(2, seconds=5)
    assert last_states(one, EASY, terms) == last_states(other, EASY, terms)


def test_unknown_names_are_refused_with_a_suggestion(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'rule:hard'"):
        contestant("hard")
    with pytest.raises(UsageError, match=r"'hrad'.*Did you mean 'rule:hard'"):
        battle(ScriptedContestant("hrad"), EASY)
    with pytest.raises(UsageError, match="There is no run or checkpoint"):
        contestant(tmp_path / "nothing")
    with pytest.raises(UsageError, match="has no version 4711; it has"):
        contestant(f"{run}@4711")
    with pytest.raises(IncompatibleCheckpoint, match=r"no model 'mdel'.*Did you mean 'model'"):
        contestant(run, model="mdel")


def test_a_checkpoint_with_other_spaces_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=r"observes \{entities: \[32.*the match has.*36.*--mode 1v1"):
        battle(contestant(run), EASY, BattleSettings(2, mode="3v3"))
    train(tmp_path / "poles", 1, evaluation_duration=0)
    with pytest.raises(IncompatibleCheckpoint, match="--server and --game"):
        battle(contestant(tmp_path / "poles"), EASY, BattleSettings(2))


def test_the_decision_interval_is_that_of_the_first_policy(run: Path) -> None:
    mine, other = contestant(run), trained(arena_policy(), "other")
    assert decision_interval(BattleSettings(), (mine, EASY)) == (5, [])
    assert decision_interval(BattleSettings(), (EASY, EASY))[0] == 3
    every, notes = decision_interval(BattleSettings(), (mine, other))
    assert every == 5
    assert notes == ["other was trained to decide every 3 ticks, and decides every 5 here"]
    assert len(decision_interval(BattleSettings(every=3), (mine, other))[1]) == 1


def test_the_mode_is_that_of_the_training(run: Path) -> None:
    assert battle(contestant(run), EASY, BattleSettings(1, seconds=5)).terms["mode"] == "1v1"
    assert battle(EASY, trained(arena_policy(size=3)), BattleSettings(1, seconds=5)).terms["mode"] == "3v3"


def test_the_functions_of_the_package_do_the_same(run: Path) -> None:
    result = ludus.battle(ludus.load(run), "rule:easy", 2, seconds=20, lineup=[["mage"], ["tank"]])
    assert result.total.games == 2
    assert {name for found in result.heroes.values() for name in found} == {"Ember", "Bulwark"}


# -- what is kept ---------------------------------------------------------------------------------------------------------


def test_recordings_replay_bit_for_bit(tmp_path: Path) -> None:
    result = battle(trained(arena_policy(1)), EASY, BattleSettings(5, seconds=15), RecordingSettings(tmp_path / "all"))
    for game in result.games:
        recording = read_recording(Path(game.recording or ""))
        verify(recording)
        assert recording.result["ticks"] == game.ticks
        assert recording.seed == game.seed
        assert recording.names == (("mine", "rule:easy") if game.a_camp == 0 else ("rule:easy", "mine"))
    assert len(list((tmp_path / "all").iterdir())) == 5


def test_the_most_lopsided_matches_are_recorded_and_rendered(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    result = battle(
        HARD,
        ScriptedContestant("random"),
        BattleSettings(6, seconds=40),
        RecordingSettings(tmp_path, most=2, videos=1, speed=200.0),
    )
    kept = [game for game in result.games if game.recording]
    assert len(kept) == 2
    assert sorted(game.lopsided for game in kept) == sorted(game.lopsided for game in result.games)[-2:]
    (filmed,) = [game for game in result.games if game.video]
    assert filmed.lopsided == max(game.lopsided for game in result.games)
    assert Path(filmed.video or "").stat().st_size > 1000
    assert len(list(tmp_path.iterdir())) == 3


def test_recordings_need_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--record"):
        RecordingSettings(None, videos=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(LudusError, match="file"):
        battle(EASY, EASY, BattleSettings(1, seconds=5), RecordingSettings(tmp_path / "file" / "below"))


# -- counting -------------------------------------------------------------------------------------------------------------


def test_failed_matches_do_not_count_and_draws_are_not_wins() -> None:
    games = [
        MatchResult(0, 0, 1, "a"),
        MatchResult(1, 1, 2, "b"),
        MatchResult(2, 0, 3),
        MatchResult(3, 1, 4, failed="it crashed"),
    ]
    share = count_wins(games)
    assert (share.won, share.lost, share.drawn, share.games) == (1, 1, 1, 3)
    assert share.rate == pytest.approx(1 / 3)
    # Newcombe (1998), table I, method 3: 1 of 3 … by the formula with z = 1.96.
    assert share.bounds == pytest.approx((0.0615, 0.7923), abs=1e-4)


def test_lopsidedness_compares_buildings_and_gold() -> None:
    assert lopsidedness((1.0, 0.0), (900.0, 100.0)) == pytest.approx(1.8)
    assert lopsidedness((0.5, 0.5), (100.0, 100.0)) == 0.0
    assert lopsidedness((0.0, 1.0), (0.0, 0.0)) == 1.0
    games = [
        MatchResult(0, 0, 0, "a", lopsided=0.3),
        MatchResult(1, 0, 0, "b", lopsided=1.2),
        MatchResult(2, 0, 0, failed="x", lopsided=2.0),
    ]
    assert [game.number for game in most_lopsided(games, 5)] == [1, 0]


def test_both_contestants_play_the_same_heroes_from_both_sides() -> None:
    lineups = read_lineups("mage/107; 117 / Falcon")
    assert lineups == ((("mage",), (107,)), ((117,), ("Falcon",)))
    plan = schedule(BattleSettings(5, lineups=lineups), 1)
    assert [(one.a_camp, one.heroes[0][0]) for one in plan if one.heroes] == [
        (0, "mage"),
        (1, "mage"),
        (0, 117),
        (1, 117),
        (0, "mage"),
    ]
    assert len({one.seed for one in plan}) == 5
    assert {one.a_camp for one in schedule(BattleSettings(5, swap_sides=False), 1)} == {0}
    with pytest.raises(UsageError, match="heroes of red"):
        read_lineups("1,2,3")
    with pytest.raises(ConfigError, match="no hero"):
        battle(EASY, EASY, BattleSettings(2, lineups=read_lineups("nobody/107")))


def test_hero_statistics_are_means_over_their_matches() -> None:
    games = tuple(
        MatchResult(number, 0, 0, "a", heroes=(HeroStats("a", name, {"kills": kills}), HeroStats("b", "Lancer", {"kills": 1})))
        for number, (name, kills) in enumerate([("Ember", 2), ("Ember", 4), ("Grace", 0)])
    )
    from ludus.tournament.result import BattleResult

    result = BattleResult({}, {}, {}, games)
    assert result.heroes["a"] == {"Ember": {"games": 2, "kills": 3.0}, "Grace": {"games": 1, "kills": 0.0}}
    json.dumps(result.to_json())


# -- games on a server ------------------------------------------------------------------------------------------------------


def test_a_match_over_http_equals_the_match_in_process(tmp_path: Path) -> None:
    """Two policies that always do the same: over HTTP and in this process the states are equal to the last bit."""
    pytest.importorskip("uvicorn")
    mine, theirs = arena_policy(1), arena_policy(2)
    terms = BattleSettings(2, seconds=6, seed=8)

    def actor() -> BuiltinActor:
        return BuiltinActor({"": Seat(BatchedPolicy(FixedPolicySource(theirs, 1), deterministic=True))})

    with gateway(actor) as served:
        far = battle(trained(mine), ServedContestant(served.url), terms, RecordingSettings(tmp_path / "far"))
    near = battle(trained(mine), trained(theirs, "other"), terms, RecordingSettings(tmp_path / "near"))
    assert not far.failed
    assert far.terms["where"] == "a private server"
    for one, other in zip(far.games, near.games, strict=True):
        hashes = [verify(read_recording(Path(game.recording or ""))) for game in (one, other)]
        assert hashes[0] == hashes[1]
        assert (one.ticks, one.seconds, one.a_camp, one.seed) == (other.ticks, other.seconds, other.a_camp, other.seed)
    assert read_recording(tmp_path / "far" / "game-0001.arena").names == (served.url, "mine")


FILMED = """
import json, os, pathlib

seed = json.loads(pathlib.Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())["seed"]
result = pathlib.Path(os.environ["LUDUS_GAME_RESULT"])
result.with_name("match.replay").write_text(f"replay {seed}")
result.with_name("match.webm").write_text(f"film {seed}")
told = {"winner": 0, "score": [seed % 1000, 0], "recording": "match.replay", "video": "match.webm"}
if json.loads(pathlib.Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())["options"]["alike"]:
    told["recording"] = "replay.webm"
    result.with_name("match.replay").rename(result.with_name("replay.webm"))
result.write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Nim, as the page has it; and games that crash, or say nonsense."""
    pytest.importorskip("uvicorn")
    place = tmp_path_factory.mktemp("server")
    (place / "nim.py").write_text(NIM)
    crashing = """
  crashing:
    command: [sh, -c, 'case "{runtime_id}" in *[13]) echo half way; exit 3;; esac; echo "{{\\"winner\\": 1}}" > "$LUDUS_GAME_RESULT"']
  odd: {command: [sh, -c, 'echo "{{\\"winner\\": 5}}" > "$LUDUS_GAME_RESULT"']}
  mute: {command: [sh, -c, 'exit 0']}
"""
    (place / "filmed.py").write_text(FILMED)
    options = "{alike: {type: integer, minimum: 0, maximum: 1, default: 0}}"
    crashing += f"  filmed: {{command: ['{{python}}', '{place / 'filmed.py'}'], options: {options}}}\n"
    (place / "games.yaml").write_text(block("yaml", "nim.py").rstrip() + crashing)
    with running(Settings(port=0, games=place / "games.yaml", state_dir=place / "state")) as started:
        yield started


def nim(greedy: bool) -> Policy:
    """Takes as many stones as it may, or one at a time."""
    policy = Policy(gym.spaces.Box(0, 1000, (1,), np.float32), gym.spaces.Discrete(3), NetworkConfig(fcnet_hiddens=(8,)))
    weights = {name: np.zeros_like(array) for name, array in policy.weights().items()}
    (bias,) = [name for name, array in weights.items() if array.shape == (3,)]
    weights[bias] = np.array([0.0, 0.5, 1.0] if greedy else [1.0, 0.5, 0.0], np.float32)
    policy.load_weights(weights)
    return policy


def test_the_winner_of_any_two_camp_game_counts(server: RunningServer) -> None:
    """Of 21 stones the one who begins wins if it plays well: the rule does, so each contestant wins as blue."""
    result = battle(
        ScriptedContestant(""),
        ScriptedContestant(""),
        BattleSettings(4, mode="1v1"),
        location=GameLocation(server.url, "nim", parallel=2),
    )
    assert (result.won, result.lost, result.drawn, result.failed) == (2, 2, 0, ())
    assert result.sides["blue"].won == 2
    assert result.sides["red"].lost == 2


def test_recordings_and_videos_of_a_game_are_downloaded(server: RunningServer, tmp_path: Path) -> None:
    """What its result names; of the most lopsided by their score. The bytes are those that the game has written."""
    place = GameLocation(server.url, "filmed")
    result = battle(
        ScriptedContestant(""), ScriptedContestant(""), BattleSettings(6), RecordingSettings(tmp_path, most=2, videos=1), place
    )
    scores = {game.number: game.seed % 1000 for game in result.games}
    assert [game.lopsided for game in result.games] == list(scores.values())
    best = sorted(scores, key=lambda number: -scores[number])
    assert {game.number for game in result.games if game.recording} == set(best[:2])
    (filmed,) = [game for game in result.games if game.video]
    assert filmed.number == best[0]
    assert Path(filmed.video or "").name == f"game-{best[0]:04d}.webm"
    assert Path(filmed.video or "").read_text().strip() == f"film {filmed.seed}"
    assert Path(filmed.recording or "").read_text().strip() == f"replay {filmed.seed}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"game-{number:04d}.replay" for number in best[:2]] + [f"game-{best[0]:04d}.webm"]
    )
    assert not result.notes


def test_a_recording_and_a_video_with_the_same_suffix_are_two_files(server: RunningServer, tmp_path: Path) -> None:
    place = GameLocation(server.url, "filmed", options={"alike": 1})
    result = battle(
        ScriptedContestant(""), ScriptedContestant(""), BattleSettings(1), RecordingSettings(tmp_path, videos=1), place
    )
    (game,) = result.games
    assert Path(game.recording or "").read_text() == f"replay {game.seed}"
    assert Path(game.video or "").read_text() == f"film {game.seed}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["game-0000-film.webm", "game-0000.webm"]


def test_a_failed_download_does_not_fail_the_match(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(client: GamecoreClient, runtime_id: str, what: str) -> bytes:
        raise Refused(404, "no_file", "gone")

    monkeypatch.setattr(GamecoreClient, "download", refused)
    result = battle(
        ScriptedContestant(""),
        ScriptedContestant(""),
        BattleSettings(3),
        RecordingSettings(tmp_path, videos=1),
        GameLocation(server.url, "filmed"),
    )
    assert (result.total.games, result.notes) == (3, ("3 games have no recording: gone",))
    monkeypatch.setattr(GamecoreClient, "download", lambda client, runtime_id, what: b"nonsense")
    pytest.importorskip("uvicorn")
    with running(Settings(port=0, state_dir=tmp_path / "state")) as arena:
        spoilt = battle(EASY, EASY, BattleSettings(2, seconds=5), RecordingSettings(tmp_path / "arena"), GameLocation(arena.url))
    assert spoilt.total.games == 2
    assert any(note.startswith("2 games have no recording: ") for note in spoilt.notes)


def test_a_game_without_recordings_gives_a_note(server: RunningServer, tmp_path: Path) -> None:
    result = battle(
        ScriptedContestant(""),
        ScriptedContestant(""),
        BattleSettings(3),
        RecordingSettings(tmp_path),
        GameLocation(server.url, "crashing"),
    )
    assert any(note == "2 games have no recording: crashing names no recording in its result" for note in result.notes)
    moves = battle(
        ScriptedContestant(""),
        ScriptedContestant(""),
        BattleSettings(1, mode="1v1"),
        RecordingSettings(tmp_path, videos=1),
        GameLocation(server.url, "nim"),
    )
    assert sum(json.loads(Path(moves.games[0].recording or "").read_text())) == 21
    assert any("names no video" in note for note in moves.notes)


@pytest.mark.parametrize(
    ("score", "lopsided"),
    [([5, 2], 3.0), ([2.5, 5], 2.5), ([10**400, 0], 0), ("53", 0), ({"0": 5, "1": 300}, 0), ([True, 0], 0), ([1], 0), (None, 0)],
)
def test_a_score_is_two_numbers(score: Any, lopsided: float) -> None:
    state = GameState("x", "finished", result={"winner": 0, "score": score, "heroes": [{"camp": 0, "gold": 10**400}]})
    game = gamecore_matches.parse_match_result(MatchResult(0, 0, 1), state)
    assert (game.winner, game.lopsided) == ("a", lopsided)
    assert game.heroes[0].numbers == {}


@pytest.mark.parametrize("name", ["../../lock", "/etc/hostname", "pipe", "link", "missing", "", 7, None, ".hidden", "big"])
def test_only_regular_files_of_the_game_are_served(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dir, "MAX_ARTIFACT", 100)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "big").write_bytes(bytes(101))
    (tmp_path / "small").write_bytes(bytes(100))
    file, size = state_dir.open_artifact(tmp_path, {"recording": "small"}, "recording")
    with file:
        assert (size, file.read()) == (100, bytes(100))
    with pytest.raises(Refused) as refused:
        state_dir.open_artifact(tmp_path, {"recording": name}, "recording")
    assert refused.value.status == 404


def test_recordings_of_the_arena_are_downloaded_from_a_server(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    terms = BattleSettings(2, seconds=6, seed=8)
    mine = arena_policy(1)
    with running(Settings(port=0, state_dir=tmp_path / "state")) as started:
        far = battle(trained(mine), EASY, terms, RecordingSettings(tmp_path / "far"), GameLocation(started.url))
    near = battle(trained(mine), EASY, terms, RecordingSettings(tmp_path / "near"))
    for one, other in zip(far.games, near.games, strict=True):
        recordings = [read_recording(Path(game.recording or "")) for game in (one, other)]
        assert recordings[0].names == recordings[1].names
        assert verify(recordings[0]) == verify(recordings[1])


def test_a_local_policy_plays_a_game_of_the_server(server: RunningServer) -> None:
    """Of 7 stones three leave four, from which the rule cannot win against whoever takes the rest; one leaves six, from which it does."""
    place = GameLocation(server.url, "nim", options={"stones": 7})
    greedy = battle(trained(nim(greedy=True)), ScriptedContestant(""), BattleSettings(4, mode="1v1"), location=place)
    assert not greedy.failed
    assert (greedy.sides["blue"].won, greedy.sides["red"].lost) == (2, 2)
    modest = battle(trained(nim(greedy=False)), ScriptedContestant(""), BattleSettings(4, mode="1v1"), location=place)
    assert (modest.lost, modest.failed) == (4, ())
    both = battle(trained(nim(greedy=True)), trained(nim(greedy=False), "modest"), BattleSettings(4, mode="1v1"), location=place)
    assert (both.won, both.lost) == (4, 0), "7, 4, 3, 0 and 7, 6, 3, 2, 0: the last stones are for who is greedy"


def test_seat_names_of_training_hold_in_battle_and_service(tmp_path: Path) -> None:
    """One policy for two seats, which are called as `env_config` calls them: in training, battle and service."""
    pytest.importorskip("uvicorn")
    game = f"games: {{pairs: {{command: ['{{python}}', '{Path(__file__).with_name('pairs.py')}'], modes: [2v2]}}}}"
    (tmp_path / "games.yaml").write_text(game)
    spaces = {
        "observation_space": {"type": "Box", "shape": [2], "low": 0, "high": 2},
        "action_space": {"type": "Discrete", "n": 2},
    }
    with running(Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")) as server:
        config = {"server": server.url, "game": "pairs", "mode": "2v2", "seats": ["tank", "mage"], "opponent": "rule", **spaces}
        small: dict[str, Any] = {"num_envs_per_worker": 4, "train_batch_size": 16, "minibatch_size": 16, "evaluation_duration": 0}
        train(tmp_path / "run", 2, env="gamecore", env_config=config, **small)
        one = contestant(tmp_path / "run")
        result = battle(one, ScriptedContestant(""), BattleSettings(2, mode="2v2"), location=GameLocation(server.url, "pairs"))
    assert isinstance(one, TrainedContestant)
    assert set(one.seats) == {"tank", "mage"}
    assert result.failed == ()
    assert set(CheckpointSource(str(tmp_path / "run")).spec()["seats"]) == {"tank", "mage"}


def test_a_crashed_game_is_a_failed_match(server: RunningServer) -> None:
    result = battle(
        ScriptedContestant(""),
        ScriptedContestant(""),
        BattleSettings(5),
        location=GameLocation(server.url, "crashing", parallel=3),
    )
    assert [game.number for game in result.failed] == [1, 3]
    assert all("crashed" in game.failed and "3" in game.failed for game in result.failed)
    assert result.total.games == 3
    assert result.lost == 3, "camp 1 wins, and A was camp 0 in games 0, 2 and 4"
    assert result.to_json()["failed"] == 2


@pytest.mark.parametrize(("game", "why"), [("odd", "unknown camp 5"), ("mute", "no result")])
def test_an_invalid_result_is_a_failed_match(server: RunningServer, game: str, why: str) -> None:
    result = battle(ScriptedContestant(""), ScriptedContestant(""), BattleSettings(2), location=GameLocation(server.url, game))
    assert len(result.failed) == 2
    assert why in result.failed[0].failed
    assert result.win_rate is None
    json.dumps(result.to_json())


def test_unplayable_settings_are_refused_before_the_first_match(server: RunningServer, tmp_path: Path) -> None:
    place = GameLocation(server.url, "nim")
    with pytest.raises(UsageError, match=r"no game 'nmi'.*'nim'"):
        battle(EASY, EASY, BattleSettings(1), location=replace(place, game="nmi"))
    with pytest.raises(UsageError, match="no option 'rule'"):
        battle(EASY, EASY, BattleSettings(1), location=place)
    with pytest.raises(UsageError, match="one rule"):
        battle(EASY, HARD, BattleSettings(1), location=place)
    with pytest.raises(UsageError, match="--server"):
        battle(ScriptedContestant(""), ScriptedContestant(""), BattleSettings(1), location=GameLocation(game="nim"))
    with pytest.raises(UsageError, match="--limit is for games of a server"):
        battle(EASY, EASY, BattleSettings(1), location=GameLocation(limit_s=5.0))
    with pytest.raises(Unreachable, match=re.escape("127.0.0.1:9")):
        battle(ScriptedContestant(""), ScriptedContestant(""), BattleSettings(1), location=GameLocation("127.0.0.1:9"))
    with pytest.raises(Unreachable):
        battle(EASY, ServedContestant("http://127.0.0.1:9"), BattleSettings(1))


@pytest.mark.parametrize("way", ["advertise", "variable", "towards the server"])
def test_games_connect_to_the_advertised_or_local_address(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    at: list[str] = []

    original = threaded_server.listen_on

    def listen_on(host: str) -> socket.socket:
        at.append(host)
        return original(host)

    monkeypatch.setattr(threaded_server, "listen_on", listen_on)
    place = GameLocation(server.url, "nim", options={"stones": 7})
    if way == "variable":
        monkeypatch.setenv("LUDUS_ADVERTISE", "localhost")
    told = battle(
        trained(nim(greedy=True)), ScriptedContestant(""), BattleSettings(2, mode="1v1"),
        location=replace(place, advertise="localhost" if way == "advertise" else None),
    )  # fmt: skip
    assert (told.won, told.lost) == (1, 1)
    assert at == ["127.0.0.1" if way == "towards the server" else "localhost"]


def test_a_function_plays_the_arena_and_its_exception_ends_the_battle() -> None:
    calls: list[tuple[str, ...]] = []

    def wait(observation: Any, mask: Any) -> Any:
        calls.append(tuple(sorted(observation)))
        return np.zeros(action_space(1).shape, np.int64)

    settings = BattleSettings(games=2, mode="1v1", seconds=10)
    result = battle(FunctionContestant("script:a:wait", wait), ScriptedContestant("easy"), settings)
    assert (result.a["name"], result.total.games, result.gain) == ("script:a:wait", 2, None)
    own = split_mask(observation_space(1))[0]
    assert isinstance(own, gym.spaces.Dict)
    assert set(calls) == {tuple(sorted(own))}
    with pytest.raises(UsageError, match="script:a:bad: its script failed: ZeroDivisionError"):
        battle(FunctionContestant("script:a:bad", lambda observation, mask: 1 // 0), ScriptedContestant("easy"), settings)
