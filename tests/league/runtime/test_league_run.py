"""Whole leagues of rock, paper, scissors: players in turns, snapshots, restarts, and players that fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.core import trust
from ludus.errors import ConfigError, EnvironmentFault, Fenced, LudusError, StoreFull
from ludus.experiments.control.restart_policy import LearnerFailure
from ludus.experiments.runs import checkpoint
from ludus.league.events import PlayerRetired, ResultsReported, SnapshotTaken
from ludus.league.journal import read_events, read_state
from ludus.league.matchmaking import opponent_probabilities
from ludus.league.players import PlayerRole
from ludus.league.runtime import coordinator
from ludus.league.runtime.coordinator import LeagueResult, run_league
from ludus.league.runtime.league_file import LeagueConfig, allow_tokens, check_players
from ludus.league.runtime.learner import claim_player, is_claimed
from ludus.league.runtime.workers import LeagueTask
from ludus.league.spool import submit_events
from ludus.sampling.league_files import read_matchmaking
from ludus.tournament.contestants import TrainedContestant, contestant
from tests.waiting import wait_until

pytestmark = pytest.mark.system

ENV = "tests.league.games:make_rps"


def league(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "env": ENV,
        "config": {"train_batch_size": 64, "num_envs_per_worker": 16, "lr": 0.01, "model": {"fcnet_hiddens": [8]}},
        "players": {
            "main": {},
            "hunter": {"role": "main_exploiter"},
            "random": {"role": "fixed", "model": "rule:random", "rating": 1000},
        },
        "snapshots": {role: {"min_steps": 200, "max_steps": 200} for role in ("main", "main_exploiter", "league_exploiter")},
        "turn_steps": 128,
        "stop": {"timesteps": 768},
    }
    return base | sections


def run(directory: Path, data: dict[str, Any], said: list[str] | None = None) -> LeagueResult:
    trust.allow(data)
    config = LeagueConfig.model_validate(data)
    allow_tokens(config)
    resolved = check_players(config, directory)
    return run_league(config, directory, yaml.safe_dump(data).encode(), resolved, (said if said is not None else []).append)


def test_a_league_trains_in_turns_takes_snapshots_and_goes_on_after_its_end(tmp_path: Path) -> None:
    result = run(tmp_path, league(tmp_path))
    state = result.state
    assert result.stopped_by == "timesteps 768"
    assert {name: state.players[name].steps for name in ("main", "hunter")} == {"main": 384, "hunter": 384}
    assert {one.name for one in state.players.values() if one.role is PlayerRole.HISTORICAL} == {"main.1", "hunter.1"}
    # Every environment step is one match here: none is missing and none is counted twice.
    assert state.results == 768
    # An exploiter was reset at its snapshot and trained on in a new run.
    assert (state.players["hunter"].generation, state.players["hunter"].generation_steps) == (1, 256)
    assert state.players["hunter"].model.startswith("players/hunter/g1@")
    assert (tmp_path / "players/main/g0/checkpoints").is_dir()
    orders = read_matchmaking(tmp_path, "main")
    assert orders is not None
    assert "has stopped" in orders.stop
    snapshot = contestant(tmp_path / "players/main.1")
    assert isinstance(snapshot, TrainedContestant)
    assert snapshot.env == ENV
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["results"] == 768

    again = run(tmp_path, league(tmp_path, stop={"timesteps": 1024}))
    assert again.state.results == 1024
    assert again.state.players["main.1"] == state.players["main.1"]


def test_a_player_with_a_quarter_of_the_share_has_a_quarter_of_the_steps(tmp_path: Path) -> None:
    players = {"main": {}, "hunter": {"role": "main_exploiter", "share": 0.25}}
    state = run(tmp_path, league(tmp_path, players=players, turn_steps=64, stop={"timesteps": 320})).state
    assert [state.players[name].steps for name in ("main", "hunter")] == [256, 64]


def test_several_players_train_at_once(tmp_path: Path) -> None:
    result = run(tmp_path, league(tmp_path, parallel=2, stop={"snapshots": 4}))
    assert sum(one.role is PlayerRole.HISTORICAL for one in result.state.players.values()) >= 4
    assert result.state.results == sum(result.state.players[name].steps for name in ("main", "hunter"))


def test_turns_at_the_same_time_end_at_the_stop_of_the_league(tmp_path: Path) -> None:
    players: dict[str, Any] = {"main": {}, "second": {}, "third": {}}
    state = run(
        tmp_path, league(tmp_path, players=players, parallel=3, turn_steps=192, snapshots={}, stop={"timesteps": 384})
    ).state
    assert sum(state.players[name].steps for name in players) == 384


def test_an_exploiter_does_not_train_against_itself_while_main_has_no_model(tmp_path: Path) -> None:
    """Both could train at once; the exploiter waits for the first checkpoint of the main player."""
    data = league(tmp_path, parallel=2, turn_steps=192, snapshots={}, stop={"timesteps": 384})
    run(tmp_path, data)
    reports = [one for one in read_events(tmp_path) if isinstance(one, ResultsReported) and one.player == "hunter"]
    assert {one.opponent for one in reports} == {"main"}


def test_a_player_that_joins_later_trains_as_much_as_the_others_from_then_on(tmp_path: Path) -> None:
    data = league(tmp_path, players={"main": {}}, snapshots={}, stop={"timesteps": 512})
    run(tmp_path, data)
    players = {"main": {}, "hunter": {"role": "main_exploiter"}}
    state = run(tmp_path, data | {"players": players, "stop": {"timesteps": 1024}}).state
    assert [state.players[name].steps for name in players] == [768, 256]


def test_one_player_alone_plays_against_itself(tmp_path: Path) -> None:
    result = run(tmp_path, league(tmp_path, players={"main": {}}, stop={"timesteps": 128}))
    assert (result.state.results, list(result.state.players)) == (128, ["main"])


def test_psro_fills_the_payoffs_of_its_population(tmp_path: Path) -> None:
    players = {"main": {}, "rock": {"role": "fixed", "model": "script:tests.league.games:rock"}}
    data = league(
        tmp_path,
        players=players,
        matchmaking={"scheme": "psro"},
        evaluation={"matches": 40},
        stop={"snapshots": 2},
        turn_steps=256,
    )
    state = run(tmp_path, data).state
    names = ["rock", "main.1", "main.2"]
    counts = state.payoff.counts(names)
    assert [int(counts[i, j]) for i, j in ((0, 1), (0, 2), (1, 2))] == [40, 40, 40]
    assert state.payoff.mean_gains(names)[1, 0] == pytest.approx(-state.payoff.mean_gains(names)[0, 1])
    # The published meta-strategy includes the last snapshot, whose matches were played after the league had stopped.
    published = read_matchmaking(tmp_path, "main")
    assert published is not None
    expected = opponent_probabilities(state.view(), state.players["main"], state.settings.matchmaking)
    assert {one.name: one.probability for one in published.opponents} == pytest.approx(expected)


def test_a_snapshot_that_cannot_be_read_is_excluded_and_the_rest_goes_on(tmp_path: Path) -> None:
    data = league(tmp_path, players={"main": {}}, matchmaking={"scheme": "fictitious"}, turn_steps=256, stop={"timesteps": 256})
    run(tmp_path, data)
    (broken,) = (tmp_path / "players/main.1/models").glob("*/*.safetensors")
    broken.write_bytes(b"\x00" * 64)
    state = run(tmp_path, data | {"stop": {"timesteps": 1024}}).state
    assert "safetensors" in state.players["main.1"].quarantine
    assert state.results == 1024


def test_a_learner_that_dies_is_tried_again_and_then_excluded(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    players = {"main": {}, "fragile": {"config": {"env_config": {"killed_by": str(trap)}}}}
    data = league(tmp_path, players=players, max_failures=1)
    said: list[str] = []
    run(tmp_path / "league", data | {"stop": {"timesteps": 256}}, said)
    trap.touch()
    state = run(tmp_path / "league", data | {"stop": {"timesteps": 5120}}, said).state  # enough turns for the retries in between
    assert "SIGKILL" in state.players["fragile"].quarantine
    assert (state.players["fragile"].steps, state.players["main"].steps) == (128, 4992)
    assert any("fragile failed and is tried again" in line for line in said)
    trap.unlink()
    healed = run(tmp_path / "league", data | {"stop": {"timesteps": 5632}}, said).state
    assert not healed.players["fragile"].quarantine
    assert healed.players["fragile"].steps == 640


def test_retired_players_and_those_that_left_the_file_do_not_train_and_meet_nobody(tmp_path: Path) -> None:
    data = league(tmp_path, players={"main": {}, "hunter": {}, "gone": {}}, turn_steps=256)
    run(tmp_path, data)
    before = read_state(tmp_path)
    assert submit_events(tmp_path, [PlayerRetired("hunter"), PlayerRetired("main.1")]) == []
    players: dict[str, Any] = {"main": {}, "hunter": {}}
    state = run(tmp_path, data | {"players": players, "stop": {"timesteps": 1024}}).state
    assert [state.players[name].steps for name in ("hunter", "gone", "main")] == [256, 256, 512]
    assert state.players["gone"].retired
    assert state.payoff.record("main", "main.1") == before.payoff.record("main", "main.1")


def test_a_file_that_does_not_fit_the_league_is_refused(tmp_path: Path) -> None:
    data = league(tmp_path, stop={"timesteps": 64})
    run(tmp_path, data)
    with pytest.raises(ConfigError, match=r"players\.hunter has the role main"):
        run(tmp_path, data | {"players": data["players"] | {"hunter": {"role": "main"}}})
    with pytest.raises(ConfigError, match=r"config\.lr is 0\.01 in the run, but 0\.5"):
        run(tmp_path, data | {"config": data["config"] | {"lr": 0.5}})
    with pytest.raises(ConfigError, match=r"players\.old\.model is runs/none"):
        run(tmp_path, data | {"players": data["players"] | {"old": {"role": "fixed", "model": "runs/none"}}})


def test_a_checkpoint_becomes_a_fixed_player_and_the_start_of_another(tmp_path: Path) -> None:
    run(tmp_path / "first", league(tmp_path, stop={"timesteps": 256}))
    old = str(tmp_path / "first/players/main/g0")
    players = {"main": {"model": old}, "old": {"role": "fixed", "model": old, "rating": 1200}}
    state = run(tmp_path / "second", league(tmp_path, players=players, stop={"timesteps": 64})).state
    assert state.players["old"].model.startswith("players/old@")
    assert state.payoff.record("main", "old").games > 0
    begun = checkpoint.open_checkpoint(tmp_path / "second/players/main/g0")[1]
    assert begun.state["progress"]["timesteps"] == 64


# -- processes --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(*words: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "ludus.cli.main", "league", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "LUDUS_TRUST": ENV},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def test_a_learner_by_hand_trains_through_resets_and_stops_with_the_league(tmp_path: Path) -> None:
    file, directory = tmp_path / "league.yaml", tmp_path / "league"
    data = league(tmp_path, players={"main": {}, "other": {}}, parallel=0, checkpoint_time_s=0.5, stop={"snapshots": 3})
    file.write_text(yaml.safe_dump(data | {"snapshots": {"main": {"min_steps": 200, "max_steps": 200, "reset": 1.0}}}))
    with command("run", "-f", file, "--dir", directory) as coordinator:
        wait_until(lambda: (directory / "league.yaml").exists(), 60)
        with command("run", "-f", file, "--dir", directory) as second:
            assert (
                f"Another process runs the league in {directory} (process {coordinator.pid}" in second.communicate(timeout=60)[0]
            )
        assert second.returncode == 1
        with command("learner", directory, "--player", "main") as learner:
            wait_until(lambda: is_claimed(directory, "main"), 60)
            with pytest.raises(Fenced, match=f"process {learner.pid}"), claim_player(directory, "main"):
                pass
            out = learner.communicate(timeout=120)[0]
        assert coordinator.communicate(timeout=60)[0].count("snapshot main.") >= 3
    assert (learner.returncode, coordinator.returncode) == (0, 0), out
    state = read_state(directory)
    assert (state.players["other"].steps, state.players["main"].generation) == (0, 3)
    assert (directory / "players/main/g2/checkpoints").is_dir(), "it has trained after the second reset"
    assert state.results > 0


@pytest.mark.parametrize(
    "sections",
    [
        {"snapshots": {"main": {"min_steps": 200, "max_steps": 200}}},
        {"snapshots": {"main": {"min_steps": 200, "max_steps": 200, "reset": 1.0}}},
        {
            "snapshots": {"main": {"min_steps": 200, "max_steps": 200}},
            "matchmaking": {"scheme": "psro", "meta_solver": "uniform"},
            "evaluation": {"matches": 4},
        },
    ],
    ids=["league", "reset", "psro"],
)
def test_a_learner_by_hand_saves_a_checkpoint_when_a_snapshot_is_due(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Its other checkpoints are far apart: without it, the first snapshot would be taken after `checkpoint_time_s`."""
    file, directory = tmp_path / "league.yaml", tmp_path / "league"
    data = league(tmp_path, players={"main": {}}, parallel=0, checkpoint_time_s=1000.0, stop={"snapshots": 3}, **sections)
    file.write_text(yaml.safe_dump(data))
    with command("run", "-f", file, "--dir", directory) as coordinator:
        wait_until(lambda: (directory / "league.yaml").exists(), 60)
        with command("learner", directory, "--player", "main") as learner:
            out = learner.communicate(timeout=60)[0]
        coordinator.communicate(timeout=60)
    assert (learner.returncode, coordinator.returncode) == (0, 0), out
    players = read_state(directory).players
    assert [players[f"main.{number}"].steps for number in (1, 2, 3)] == [256, 512, 768], "batches have 64 steps"


def test_a_learner_by_hand_takes_over_at_the_end_of_a_turn(tmp_path: Path) -> None:
    file, directory, pause = tmp_path / "league.yaml", tmp_path / "league", tmp_path / "pause"
    data = league(tmp_path, players={"main": {}}, env_config={"paused_by": str(pause)}, stop={"timesteps": 1_000_000})
    file.write_text(yaml.safe_dump(data | {"snapshots": {}}))
    pause.touch()
    with command("run", "-f", file, "--dir", directory) as coordinator:
        wait_until(lambda: is_claimed(directory, "main"), 90)
        with command("learner", directory, "--player", "main", "--steps", 128, "--json") as learner:
            wait_until((directory / "learners/main.next").exists, 90)
            pause.unlink()
            out = learner.communicate(timeout=150)[0]
        assert learner.returncode == 0, out
        assert "main is trained by another process" in out
        assert json.loads(out.splitlines()[-1])["timesteps"] == 256, "one turn of the coordinator, then this learner"
        wait_until(lambda: read_state(directory).players["main"].steps > 256, 90)  # then the coordinator again
        coordinator.send_signal(signal.SIGINT)
        said = coordinator.communicate(timeout=60)[0]
    assert "failed" not in said
    assert "tried again" not in said


def test_a_process_that_waits_for_a_player_is_the_next_to_train_it(tmp_path: Path) -> None:
    announced: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def take_over() -> None:
        with claim_player(tmp_path, "main", 60.0, announced.append):
            entered.set()
            leave.wait(60)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        with claim_player(tmp_path, "main"):
            waiting = pool.submit(take_over)
            wait_until(lambda: announced, 30)
            assert f"process {os.getpid()}" in announced[0]
            assert not entered.is_set()
        assert is_claimed(tmp_path, "main"), "the coordinator gives it no further turn"
        assert entered.wait(30)
        with pytest.raises(Fenced, match="One player has one learner"), claim_player(tmp_path, "main", 1.0):
            pass
        leave.set()
        waiting.result(30)
    assert not is_claimed(tmp_path, "main")


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_kill_9_of_the_coordinator_ends_its_learners_and_loses_nothing(tmp_path: Path, kills: int) -> None:
    file, directory = tmp_path / "league.yaml", tmp_path / "league"
    file.write_text(yaml.safe_dump(league(tmp_path, stop={"timesteps": 1_000_000})))
    for kill in range(kills):
        with command("run", "-f", file, "--dir", directory) as coordinator:
            enough = 300 * (kill + 1)
            wait_until(lambda: (directory / "league.yaml").exists() and read_state(directory).results >= enough, 90)  # noqa: B023
            coordinator.send_signal(signal.SIGKILL)
            coordinator.wait(10)
            assert coordinator.stdout is not None
        wait_until(lambda: not any(is_claimed(directory, name) for name in ("main", "hunter")), 30)
    with command("run", "-f", file, "--dir", directory) as coordinator:
        wait_until(lambda: read_state(directory).results >= 300 * (kills + 1), 90)
        coordinator.send_signal(signal.SIGINT)
        coordinator.communicate(timeout=60)
    assert coordinator.returncode == 130
    events = list(read_events(directory))
    counted = [(one.source, one.number) for one in events if isinstance(one, ResultsReported)]
    assert len(counted) == len(set(counted))
    taken = [one for one in events if isinstance(one, SnapshotTaken)]
    assert all((directory / "players" / one.snapshot / "config.yaml").exists() for one in taken)


def test_a_player_that_another_process_takes_at_the_start_of_its_turn_is_not_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "is_claimed", lambda league, player: False)  # it was free when the turn was handed out
    said: list[str] = []
    with claim_player(tmp_path, "hunter"):
        state = run(tmp_path, league(tmp_path, stop={"timesteps": 384}), said).state
    assert any("hunter is tried again" in line for line in said)
    assert not state.players["hunter"].quarantine
    assert state.players["main"].steps == 384


def fail_with(monkeypatch: pytest.MonkeyPatch, player: str, failures: list[LudusError]) -> None:
    """Let the next turns of a player end with these errors, as its process would report them."""
    failure_of = LeagueTask.failure

    def failure(task: LeagueTask) -> LearnerFailure | None:
        return failure_of(task) if task.name != player or not failures else LearnerFailure(str(failures[-1]), failures.pop())

    monkeypatch.setattr(LeagueTask, "failure", failure)


@pytest.mark.parametrize("error", [StoreFull("No space left."), Fenced("It trains elsewhere."), EnvironmentFault("It raised.")])
def test_errors_that_a_retry_may_repair_do_not_exclude_a_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: LudusError
) -> None:
    monkeypatch.setattr(coordinator, "_BLOCKED_S", 0.1)
    failures = [error] * 3
    fail_with(monkeypatch, "main", failures)
    state = run(tmp_path, league(tmp_path, players={"main": {}}, max_failures=1, stop={"timesteps": 512})).state
    assert not failures
    assert (state.players["main"].quarantine, state.players["main"].steps) == ("", 512)


def test_errors_of_settings_exclude_a_player_at_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[LudusError] = [ConfigError("config.lr is wrong.", "Make it right.")]
    fail_with(monkeypatch, "hunter", failures)
    state = run(tmp_path, league(tmp_path, max_failures=5, stop={"timesteps": 512})).state
    assert state.players["hunter"].quarantine == "its training failed: config.lr is wrong. Make it right."
    assert (state.players["hunter"].steps, state.players["main"].steps) == (128, 384)


def test_a_refused_file_changes_nothing(tmp_path: Path) -> None:
    data = league(tmp_path, players={"main": {}, "other": {}}, stop={"timesteps": 128})
    run(tmp_path, data)
    stored, state = (tmp_path / "league.yaml").read_bytes(), read_state(tmp_path)
    for players in ({"main": {"role": "league_exploiter"}, "new": {}}, {"main": {"config": {"model": {"fcnet_hiddens": [4]}}}}):
        with pytest.raises(ConfigError):
            run(tmp_path, data | {"players": players})
        assert (tmp_path / "league.yaml").read_bytes() == stored
        assert read_state(tmp_path).players == state.players
    changed = {"decay": 0.5, "matchmaking": {"scheme": "pfsp"}}
    with pytest.raises(ConfigError):
        run(tmp_path, data | changed | {"players": {"main": {"role": "league_exploiter"}}})
    with pytest.raises(ConfigError, match=r"config\.lr is"):
        run(tmp_path, data | changed | {"config": data["config"] | {"lr": 0.5}})
    with pytest.raises(ConfigError, match="runs/none"):
        run(tmp_path, data | changed | {"players": data["players"] | {"old": {"role": "fixed", "model": "runs/none"}}})
    assert read_state(tmp_path).settings == state.settings
    assert run(tmp_path, data | changed).state.settings.decay == 0.5


def test_a_player_that_returns_to_the_file_stays_retired_and_that_is_said(tmp_path: Path) -> None:
    data = league(tmp_path, players={"main": {}, "other": {}}, stop={"timesteps": 128})
    said: list[str] = []
    run(tmp_path, data | {"players": {"main": {}, "other": {}}})
    run(tmp_path, data | {"players": {"main": {}}}, said)
    assert any("other is retired" in line for line in said)
    run(tmp_path, data, said)
    assert any("other is in the file of the league, but stays retired" in line for line in said)
