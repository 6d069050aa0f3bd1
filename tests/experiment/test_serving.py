"""What was trained answers games: the same actor, the same actions."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ludus
from ludus.actor.builtin import BuiltinActor
from ludus.errors import NotFound, Refused
from ludus.experiment import serving
from ludus.game.client import Client
from ludus.serve.service import Served
from tests.actor import wire
from tests.cli.programs import Program, program
from tests.experiment import small
from tests.experiment.called import LIMIT_S, ONE_SEAT, TWO_SEATS, data, games, one_seat, started, two_seats


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs of every kind."""
    where = tmp_path_factory.mktemp("runs")
    recurrent = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8]}
    made = {
        "one": (data(2, ONE_SEAT | {"silent_s": 7, "max_body_bytes": 5000}), one_seat),
        "two": (data(4, TWO_SEATS), two_seats),
        "recurrent": (data(2, model=recurrent, observation_filter="MeanStdFilter"), one_seat),
    }
    for name, (experiment_data, ticks) in made.items():
        with started(where / name, experiment_data) as training, games(training.url, ticks):
            training.result()
    small.train(where / "cartpole", 1)
    return {name: where / name for name in (*made, "cartpole")}


def loaded(run: Path, **settings: Any) -> tuple[Served, dict[str, Any]]:
    service, spec = serving.served(run, **settings)
    service.load()
    return service, spec


def answers(actor: BuiltinActor, messages: list[dict[str, Any]]) -> list[Any]:
    async def play() -> list[Any]:
        return [json.loads(await actor.tick(json.dumps(message).encode())) for message in messages]

    return asyncio.run(play())


def seen(count: int, width: int = 2) -> list[list[float]]:
    return [[float(x) for x in row] for row in np.random.default_rng(0).uniform(-2, 2, (count, width))]


@pytest.mark.parametrize(("name", "width"), [("one", 2), ("recurrent", 2), ("cartpole", 4)])
def test_the_service_acts_as_the_loaded_agent_does(runs: dict[str, Path], name: str, width: int) -> None:
    service, _ = loaded(runs[name])
    agent, state, expected = ludus.load(runs[name]), None, []
    for observation in seen(40, width):
        action, state = agent.act(observation, state)
        expected.append({"action": action})
    assert answers(service(), [{"observation": observation} for observation in seen(40, width)]) == expected


def test_every_seat_is_played_by_its_own_model(runs: dict[str, Path]) -> None:
    service, spec = loaded(runs["two"])
    assert {name: seat["action_space"]["n"] for name, seat in spec["seats"].items()} == {"blue": 2, "red": 3}
    navy, rose = (ludus.load(runs["two"], model=name) for name in ("navy", "rose"))
    messages = [{"seats": {"blue": {"observation": row}, "red": {"observation": i % 3}}} for i, row in enumerate(seen(20))]
    for i, answer in enumerate(answers(service(), messages)):
        assert answer == {"actions": {"blue": navy.act(seen(20)[i])[0], "red": rose.act(i % 3)[0]}}


def test_an_agent_of_an_environment_plays_the_only_seat_of_its_spaces(runs: dict[str, Path]) -> None:
    _, spec = loaded(runs["cartpole"])
    assert spec["observation_space"]["shape"] == [4]
    assert spec["action_space"] == {"type": "Discrete", "n": 2, "start": 0}


def test_exploring_actions_vary_and_others_do_not(runs: dict[str, Path]) -> None:
    same = [{"observation": [0.1, 0.1]}] * 60
    steady, _ = loaded(runs["one"])
    assert len({answer["action"] for answer in answers(steady(), same)}) == 1
    exploring, _ = loaded(runs["one"], deterministic=False)
    assert len({answer["action"] for answer in answers(exploring(), same)}) == 2


def test_what_was_accepted_in_training_is_accepted_in_service(runs: dict[str, Path]) -> None:
    http, sessions = serving.limits_of(runs["one"])
    assert (http.body_bytes, sessions.silent_s) == (5000, 7)
    assert serving.limits_of(runs["cartpole"])[1].silent_s == 60


def test_a_config_stands_for_its_newest_run_with_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "game.yaml"
    file.write_text(yaml.safe_dump({"duel": {"env": "CartPole-v1"}}))
    with pytest.raises(NotFound, match="No run of duel"):
        serving.run_of(str(file), tmp_path)
    for name in ("a", "b"):
        small.train(tmp_path / "duel" / name, 1)
    assert serving.run_of(str(file), tmp_path) == str(tmp_path / "duel" / "b")
    assert serving.run_of("elsewhere", tmp_path) == "elsewhere"


def test_a_place_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "best"):
        with pytest.raises(NotFound):
            serving.served(place)


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, str]]:
    """Two workers behind a token; the command and its address."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("secret\n")
    words: list[str | Path] = ["serve", runs["recurrent"], "--port", "0", "--workers", "2", "--token-file", token, "--json"]
    with program(*words, listens=False) as running:
        told = json.loads(running.wait_for('"port"'))
        assert told["workers"] == 2
        yield running, f"http://127.0.0.1:{told['port']}"


AUTHORIZED = ["Authorization: Bearer secret"]


def test_several_workers_answer_as_one(runs: dict[str, Path], service: tuple[Program, str]) -> None:
    """A session stays with the worker that its id belongs to, and with it the memory of its model."""
    agent, workers, port = ludus.load(runs["recurrent"]), set(), int(service[1].rpartition(":")[2])
    for number in range(12):
        session, state = f"match-{number}", None
        workers.add(wire.ask(port, wire.step("start", session, headers=AUTHORIZED)).headers["ludus-endpoint"])
        for observation in seen(10):
            action, state = agent.act(observation, state)
            body = json.dumps({"observation": observation}).encode()
            reply = wire.ask(port, wire.step("tick", session, body, headers=AUTHORIZED))  # each on another connection
            assert json.loads(reply.body) == {"action": action}
        assert wire.ask(port, wire.step("end", session, b'{"reward": 1}', headers=AUTHORIZED)).body == b"{}"
    assert len(workers) == 2
    with Client(service[1], "secret", timeout_s=LIMIT_S) as client:
        assert client.spec()["observation_space"]["shape"] == [2]


@pytest.mark.parametrize("token", [None, "wrong", "secret2"])
def test_without_the_token_nothing_is_answered(service: tuple[Program, str], token: str | None) -> None:
    with Client(service[1], token, timeout_s=LIMIT_S) as client:
        for ask in (lambda: client.start("m"), client.spec):
            with pytest.raises(Refused) as caught:
                ask()
            assert caught.value.status == 401


def test_a_signal_stops_it_in_order(runs: dict[str, Path]) -> None:
    with program("serve", runs["one"], "--port", "0", listens=False) as running:
        said = running.wait_for("serving model version")
        with Client(said.split(" at ")[1].split("/step")[0], timeout_s=LIMIT_S) as client:
            client.start("m")
            assert set(json.loads(client.tick("m", b'{"observation": [0, 1]}'))) == {"action"}
        running.process.send_signal(signal.SIGINT)
        code, _, err = running.finish()
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.parametrize("where", ["missing", "."])
def test_a_wrong_path_is_told_with_exit_code_2(tmp_path: Path, where: str) -> None:
    with program("serve", tmp_path / where, "--port", "0", listens=False) as running:
        code, out, err = running.finish()
    assert code == 2
    assert str(tmp_path) in err
    assert "Traceback" not in err + out
