"""Training from games that call us: the whole of it, from the config to the checkpoint."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ludus
from ludus.core.metrics import read_jsonl
from ludus.core.types import Segments
from ludus.distributed.gateway_workers import bind
from ludus.errors import ConfigError, IncompatibleCheckpoint, Refused, Unreachable, UsageError
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.runs import checkpoint
from ludus.protocol.client import Client
from ludus.storage.local import LocalStore
from tests.cli.programs import program
from tests.experiments.called import LIMIT_S, ONE_SEAT, PLANE, TWO_SEATS, data, games, one_seat, resumed, started, two_seats
from tests.experiments.watching import Watching

WATCHING = "tests.experiments.watching:Watching"


@pytest.fixture
def learned() -> Iterator[list[Segments]]:
    """What the learner of a run with `run=WATCHING` was given."""
    Watching.seen.clear()
    yield Watching.seen
    Watching.seen.clear()


# -- configs ------------------------------------------------------------------------------------------------------------

MASK = {"type": "MultiBinary", "shape": [2]}


@pytest.mark.parametrize(
    ("outside", "words"),
    [
        ({}, "give observation_space and action_space"),
        (ONE_SEAT | TWO_SEATS, "give observation_space and action_space"),
        (ONE_SEAT | {"prot": 1}, "Did you mean 'port'"),
        (ONE_SEAT | {"observation_space": {"type": "Sphere"}}, "not the description of a space"),
        (ONE_SEAT | {"action_space": {"type": "Discrete", "n": 0}}, "not the description of a space"),
        ({"seats": {"a": ONE_SEAT, "b": ONE_SEAT | {"observation_space": MASK}}}, "Seat 'b' has other spaces"),
        (
            ONE_SEAT | {"observation_space": {"type": "Dict", "spaces": {"observation": PLANE, "action_mask": MASK}}},
            "next to the",
        ),
        (
            {"seats": {"a": ONE_SEAT | {"observation_space": {"type": "Dict", "spaces": {"action_mask": MASK, "x": PLANE}}}}},
            "'a'",
        ),
    ],
)
def test_a_wrong_config_is_refused_before_anything_starts(outside: dict[str, Any], words: str) -> None:
    experiment_data = data()
    experiment_data["config"]["env_config"] = outside
    with pytest.raises(ConfigError) as caught:
        resolve(experiment_data)
    assert words in str(caught.value)


def test_a_port_in_use_is_an_error_and_no_run_is_left(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="Cannot listen"):
        runner.train(data(outside=ONE_SEAT | {"port": taken.getsockname()[1]}), project=tmp_path, trial="run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_this_machine_only_with_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="without a token"):
        runner.train(data(outside=ONE_SEAT | {"host": host}), project=tmp_path, trial="run")
    assert not list(tmp_path.iterdir())


def test_a_missing_or_empty_token_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("missing", "empty"):
        outside = ONE_SEAT | {"token_file": str(tmp_path / name)}
        with pytest.raises(UsageError, match=name):
            runner.train(data(outside=outside), project=tmp_path / "p", trial="run")
    assert not (tmp_path / "p").exists()


def test_an_action_space_that_no_policy_can_have_leaves_no_run(tmp_path: Path) -> None:
    outside = ONE_SEAT | {"action_space": {"type": "Box", "shape": [1], "dtype": "int32", "low": 0, "high": 3}}
    with pytest.raises(ConfigError, match="int32"):
        runner.train(data(outside=outside), project=tmp_path, trial="run")
    assert not list(tmp_path.iterdir())


# -- one seat -----------------------------------------------------------------------------------------------------------


def test_what_games_do_is_what_is_learned_from(tmp_path: Path, learned: list[Segments]) -> None:
    with started(tmp_path / "run", data(4, run=WATCHING)) as training, games(training.url) as playing:
        with Client(training.url) as client:
            spec = client.spec()
        result = training.result()
    assert {key: spec[key] for key in ("observation_space", "action_space")} == {
        "observation_space": {"type": "Box", "shape": [2], "dtype": "float32", "low": "-inf", "high": "inf"},
        "action_space": {"type": "Discrete", "n": 2, "start": 0},
    }
    assert playing.matches > 0
    assert len(learned) == 4
    versions = []
    for batch in learned:
        valid = batch.valid
        assert batch.steps >= 48
        assert (np.abs(batch.observation[:-1][valid]) <= 1).all()
        np.testing.assert_array_equal(batch.reward[valid], 0.5 + 0.5 * batch.action[valid])  # each of its own action
        assert (batch.log_prob[valid] < 0).all()
        versions.append(set(batch.version[valid].tolist()))
    assert versions[0] == {1}
    assert all(max(part) == number + 1 for number, part in enumerate(versions)), "the newest version plays"
    assert result.metrics["games/failed"] == 0
    assert result.metrics["timesteps"] == sum(batch.steps for batch in learned)
    assert 0.5 <= result.metrics["episode_return_mean"] <= 11


def test_the_result_is_loaded_and_plays(tmp_path: Path) -> None:
    with started(tmp_path / "run", data(2)) as training, games(training.url):
        result = training.result()
    agent = ludus.load(result.run_dir)
    action, _ = agent.act([0.5, -0.5])
    assert action in (0, 1)
    assert agent.version >= 3


def test_sessions_that_fall_silent_are_truncated_and_counted(tmp_path: Path, learned: list[Segments]) -> None:
    experiment_data = data(2, ONE_SEAT | {"silent_s": 0.2}, run=WATCHING, rollout_fragment_length=8)
    with started(tmp_path / "run", experiment_data) as training, Client(training.url, retries=0) as silent:
        silent.start("silent")
        for number in range(3):
            silent.tick("silent", json.dumps({"observation": [77, number], "reward": 7 * min(number, 1)}).encode())
        while counters(training.url)["silent"] == 0:
            threading.Event().wait(0.02)
        with pytest.raises(Refused) as caught:
            silent.tick("silent", b'{"observation": [77, 3], "reward": 7}')
        assert (caught.value.status, caught.value.error) == (410, "session_lost")
        with games(training.url):
            result = training.result()
    assert result.metrics["games/silent"] == 1
    assert result.metrics["games/discarded_steps"] == 1
    ((batch, row),) = [(b, row) for b in learned for row in range(b.rows) if b.observation[0, row, 0] == 77]
    assert batch.valid[:, row].tolist() == [True, True] + [False] * 6, "what was known of it is learned from"
    assert batch.reward[:2, row].tolist() == [7, 7]
    assert batch.truncated[1, row]
    assert batch.observation[2, row].tolist() == [77, 2]


def counters(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/health", timeout=LIMIT_S) as reply:
        told: dict[str, int] = json.load(reply)
    return told


class Slow(Watching):
    """Takes longer to learn than any request may."""

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        threading.Event().wait(1.0)
        return super().learn(segments, timestep)


@pytest.mark.long
def test_a_learner_that_takes_longer_than_any_limit_costs_no_session(tmp_path: Path, learned: list[Segments]) -> None:
    """While it learns, nobody reads what games have sent: that is no fault of theirs."""
    outside = ONE_SEAT | {"silent_s": 0.6, "tick_timeout_s": 0.6}
    run = "tests.experiments.test_http_training:Slow"
    with started(tmp_path / "run", data(3, outside, run=run)) as training, games(training.url, count=8) as playing:
        result = training.result()
    assert playing.matches > 8
    assert result.metrics["games/silent"] == 0
    assert result.metrics["games/timed_out"] == 0
    assert len(learned) == 3


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    outside = ONE_SEAT | {"token_file": str(tmp_path / "token")}
    with started(tmp_path / "run", data(1, outside)) as training:
        for token in (None, "wrong"):
            with Client(training.url, token) as client, pytest.raises(Refused) as caught:
                client.start("m")
            assert caught.value.status == 401
        random, answer = np.random.default_rng(0), None
        with Client(training.url, "secret") as client:
            client.start("m")
            try:
                for _ in range(200):
                    answer = json.loads(client.tick("m", json.dumps(one_seat(random, answer)).encode()))
            except (Refused, Unreachable):  # the training was over sooner
                pass
        assert training.result().stopped_by == "iterations"


GARBAGE: list[bytes] = [
    b"",
    b"\0\xff" * 100,
    b"{" * 1000,
    b'{"observation": [NaN, 1]}',
    b'{"observation": [Infinity, 1]}',
    b'{"observation": [1e39, 1]}',
    b'{"observation": ["a", "b"]}',
    b'{"observation": [[1, 2]]}',
    b'{"observation": [5, 5], "reward": NaN}',
    b'{"observation": [5, 5], "reward": 1e300}',
    b'{"observation": [5, 5], "reward": 1' + b"0" * 400 + b"}",
    b'{"observation": [5, 5], "reward": true}',
    b'{"observation": [5, 5], "action_mask": [0, 0]}',
    b'{"observation": [5, 5], "terminated": 1}',
    b'{"observation": [5, 5], "unknown": 1}',
    b'{"seats": {"blue": {}}}',
]


def test_a_game_that_sends_garbage_does_not_affect_others(tmp_path: Path, learned: list[Segments]) -> None:
    statuses: set[int] = set()

    def rubbish(url: str) -> None:
        random, port = np.random.default_rng(0), int(url.rpartition(":")[2])
        with Client(url, retries=0, timeout_s=LIMIT_S) as client:
            for number in range(10_000):
                try:
                    if number % 50 == 0:
                        client.start(f"bad-{number}")
                    client.tick(f"bad-{number - number % 50}", GARBAGE[number % len(GARBAGE)])
                    statuses.add(200)
                except Refused as refused:
                    statuses.add(refused.status)
                    if refused.status in (404, 410, 503):
                        return
                except Unreachable:
                    return
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), LIMIT_S) as raw:
                    raw.sendall(random.bytes(200))

    with started(tmp_path / "run", data(12, run=WATCHING)) as training, games(training.url):
        bad = threading.Thread(target=rubbish, args=(training.url,))
        bad.start()
        result = training.result()
        bad.join(LIMIT_S)
    assert not bad.is_alive()
    assert 422 in statuses
    assert 500 not in statuses
    assert result.stopped_by == "iterations"
    for batch in learned:
        valid = batch.valid
        assert (np.abs(batch.observation[:-1][valid]) <= 1).all(), "nothing but good games"
        np.testing.assert_array_equal(batch.reward[valid], 0.5 + 0.5 * batch.action[valid])
        assert np.isfinite(batch.value).all()
    assert all(np.isfinite(value) for value in result.metrics.values() if value is not None)


def test_recurrent_policies_with_masks_learn_from_games(tmp_path: Path, learned: list[Segments]) -> None:
    outside = {"observation_space": PLANE, "action_space": {"type": "Discrete", "n": 4}}

    def masked(random: np.random.Generator, answer: Any) -> dict[str, Any]:
        mask = random.integers(0, 2, 4)
        mask[random.integers(4)] = 1
        return one_seat(random, None) | {"action_mask": mask.tolist(), "reward": 0 if answer is None else answer["action"]}

    settings = {"model": {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}}
    experiment_data = data(4, outside, run=WATCHING, normalize_reward=True, observation_filter="MeanStdFilter", **settings)
    with started(tmp_path / "run", experiment_data) as training, games(training.url, masked):
        result = training.result()
    assert result.stopped_by == "iterations"
    stateful = 0
    for batch in learned:
        for t, row in np.argwhere(batch.valid):
            assert batch.action_mask[t, row, batch.action[t, row]]
        assert not batch.action_mask[:-1][batch.valid].all()
        begins = batch.first[0]
        assert not batch.state[0][0, begins].any()
        stateful += int(batch.state[0][0, ~begins].any(axis=-1).sum())
    assert stateful > 0
    assert {"learner/kl", "learner/entropy"} <= result.metrics.keys()


# -- several seats ------------------------------------------------------------------------------------------------------


def versions_in(run: Path) -> dict[str, list[int]]:
    rows = read_jsonl(run / "metrics.jsonl")
    return {
        name: [int(r[f"{name}/learner/version"]) for r in rows if f"{name}/learner/version" in r] for name in ("navy", "rose")
    }


def test_two_models_learn_side_by_side_and_go_on_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(run, data(8, TWO_SEATS)) as training, games(training.url, two_seats):
        with Client(training.url) as client:
            seats = client.spec()["seats"]
        first = training.result()
    assert {name: seat["action_space"]["n"] for name, seat in seats.items()} == {"blue": 2, "red": 3}
    before = versions_in(run)
    assert all(before.values()), "both have learned"
    stored = checkpoint.newest(LocalStore(run))
    assert set(stored.weights) == {"navy", "rose"}
    assert stored.policy("navy").action_space != stored.policy("rose").action_space

    with resumed(run, 16) as training, games(training.url, two_seats):
        second = training.result()
    after = versions_in(run)
    for name in ("navy", "rose"):
        assert after[name] == sorted(set(after[name])), "versions never go backwards"
        assert len(after[name]) > len(before[name])
    assert second.metrics["iterations"] == 16
    assert second.metrics["timesteps"] > first.metrics["timesteps"] >= 8 * 48
    rows = read_jsonl(run / "metrics.jsonl")
    for name in ("navy", "rose"):
        assert any(np.isfinite(row.get(f"{name}/learner/loss", np.nan)) for row in rows)


def test_seats_of_one_model_learn_together_and_keep_their_own_segments(tmp_path: Path, learned: list[Segments]) -> None:
    def both(random: np.random.Generator, answer: Any) -> dict[str, Any]:
        actions = {} if answer is None else answer["actions"]
        return {"seats": {name: one_seat(random, {"action": actions[name]} if actions else None) for name in ("a", "b")}}

    experiment_data = data(3, {"seats": {"a": ONE_SEAT, "b": ONE_SEAT}}, run=WATCHING)
    with started(tmp_path / "run", experiment_data) as training, games(training.url, both):
        training.result()
    origins = {int(origin) >> 40 for batch in learned for origin in batch.origin}
    assert origins == {0, 1}
    assert {batch.model for batch in learned} == {"model"}


def test_a_checkpoint_of_other_seats_is_refused(tmp_path: Path) -> None:
    with started(tmp_path / "run", data(1)) as training, games(training.url):
        training.result()
    with pytest.raises(IncompatibleCheckpoint, match="no model 'navy'"):
        runner.train(data(1, TWO_SEATS), project=tmp_path, trial="other", restore=tmp_path / "run")
    assert not (tmp_path / "other").exists()


# -- workers ------------------------------------------------------------------------------------------------------------


def test_games_that_play_in_workers_are_learned_from_in_the_same_way_and_resumed(tmp_path: Path, learned: list[Segments]) -> None:
    run = tmp_path / "run"
    experiment_data = data(10, TWO_SEATS, run=WATCHING, num_workers=2)
    with started(run, experiment_data) as training, games(training.url, two_seats, count=4):
        result = training.result()
    assert result.stopped_by == "iterations"
    assert result.metrics["timesteps"] == sum(batch.steps for batch in learned)
    assert result.metrics["games/failed"] == 0
    assert {batch.model for batch in learned} == {"navy", "rose"}
    of_navy = [batch for batch in learned if batch.model == "navy"]
    for batch in of_navy:
        assert (np.abs(batch.observation[:-1][batch.valid]) <= 1).all()
        assert set(batch.action[batch.valid].tolist()) <= {0, 1}
        assert np.isfinite(batch.value).all()
    assert max(int(batch.version[batch.valid].max()) for batch in of_navy) > 1, "new weights reach the workers"
    before = checkpoint.newest(LocalStore(run))
    assert set(before.weights) == {"navy", "rose"}

    with resumed(run, 12) as training, games(training.url, two_seats, count=4):
        again = training.result()
    assert again.metrics["iterations"] == 12
    after = checkpoint.newest(LocalStore(run))
    for name in ("navy", "rose"):
        assert after.state["models"][name]["version"] > before.state["models"][name]["version"]


# -- the command --------------------------------------------------------------------------------------------------------


def test_an_interrupted_training_leaves_a_checkpoint_from_which_it_resumes(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "game.yaml"
    file.write_text(yaml.safe_dump({"game": data(100_000, TWO_SEATS)}))
    with program("train", "-f", file, "--project", tmp_path, "--trial", "run", listens=False) as process:
        said = process.wait_for("games connect to http://")
        with games(said.split()[-1].removesuffix("/step"), two_seats) as playing:
            while playing.matches < 30:
                assert process.process.poll() is None
                threading.Event().wait(0.01)
            process.process.send_signal(signal.SIGINT)
            code, out, err = process.finish()
    assert code == 130, out + err
    assert f"ludus serve {run}" in out
    before = checkpoint.newest(LocalStore(run))
    assert before.state["progress"]["timesteps"] > 0
    assert json.loads((run / "meta.json").read_text())["status"] == "interrupted"
    iterations = int(before.state["progress"]["iterations"])
    with resumed(run, iterations + 2) as training, games(training.url, two_seats):
        result = training.result()
    assert result.metrics["iterations"] == iterations + 2
    after = checkpoint.newest(LocalStore(run))
    for name in ("navy", "rose"):
        assert after.state["models"][name]["version"] > before.state["models"][name]["version"]
