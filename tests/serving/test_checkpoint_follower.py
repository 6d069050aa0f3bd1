"""The checkpoint follower and `ludus serve`: runs, versions, updates, canaries."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import ludus
from ludus.cli.main import app
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, Refused, UsageError
from ludus.experiments.runs import checkpoint
from ludus.models.weights.version_store import LocalVersionStore
from ludus.protocol.client import Client
from ludus.protocol.spec import StartOptions
from ludus.serving import checkpoint_follower, release
from ludus.serving.canary import CanarySettings
from ludus.serving.checkpoint_follower import CheckpointFollower, CheckpointSource, UpdateSettings
from ludus.serving.launcher import service_spec
from ludus.serving.worker import ServedActor, ServiceSettings, ServingWorker
from ludus.storage.local import LocalStore
from tests.cli.programs import Program, program
from tests.experiments import small
from tests.experiments.called import LIMIT_S, ONE_SEAT, TWO_SEATS, data, games, one_seat, started, two_seats
from tests.gateway import wire
from tests.serving import releases
from tests.serving.releases import (
    HUGE,
    MODEL,
    Twin,
    broken,
    checkpointed,
    metrics,
    observations,
    policy,
    total,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short runs of every kind."""
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


def loaded(directory: Path, *runs: Path, settings: ServiceSettings | None = None) -> tuple[ServingWorker, dict[str, Any]]:
    """A loaded worker without a gateway, and its spec."""
    sources = {f"agent{number}": CheckpointSource(str(run)) for number, run in enumerate(runs)}
    CheckpointFollower(sources, directory, UpdateSettings()).open()
    service = ServingWorker(directory, settings or ServiceSettings())
    service.load()
    return service, service_spec(sources)


def answers(actor: ServedActor, messages: list[dict[str, Any]], about: StartOptions | None = None) -> list[Any]:
    async def play() -> list[Any]:
        actor.about = about or StartOptions()
        await actor.start("s", b"")
        return [json.loads(await actor.tick(json.dumps(message).encode())) for message in messages]

    return asyncio.run(play())


def seen(count: int, width: int = 2) -> list[list[float]]:
    return [[float(x) for x in row] for row in np.random.default_rng(0).uniform(-2, 2, (count, width))]


@pytest.mark.parametrize(("name", "width"), [("one", 2), ("recurrent", 2), ("cartpole", 4)])
def test_the_service_acts_as_the_loaded_agent_does(runs: dict[str, Path], name: str, width: int, tmp_path: Path) -> None:
    service, _ = loaded(tmp_path, runs[name])
    agent, state, expected = ludus.load(runs[name]), None, []
    for observation in seen(40, width):
        action, state = agent.act(observation, state)
        expected.append({"action": action})
    assert answers(service(), [{"observation": observation} for observation in seen(40, width)]) == expected


def test_every_seat_is_played_by_its_own_model(runs: dict[str, Path], tmp_path: Path) -> None:
    service, spec = loaded(tmp_path, runs["two"])
    assert {name: seat["action_space"]["n"] for name, seat in spec["seats"].items()} == {"blue": 2, "red": 3}
    navy, rose = (ludus.load(runs["two"], model=name) for name in ("navy", "rose"))
    messages = [{"seats": {"blue": {"observation": row}, "red": {"observation": i % 3}}} for i, row in enumerate(seen(20))]
    for i, answer in enumerate(answers(service(), messages)):
        assert answer == {"actions": {"blue": navy.act(seen(20)[i])[0], "red": rose.act(i % 3)[0]}}


def test_an_agent_of_an_environment_plays_the_only_seat_of_its_spaces(runs: dict[str, Path], tmp_path: Path) -> None:
    _, spec = loaded(tmp_path, runs["cartpole"])
    assert spec["observation_space"]["shape"] == [4]
    assert spec["action_space"] == {"type": "Discrete", "n": 2, "start": 0}


def test_spec_lists_several_agents_by_name(runs: dict[str, Path], tmp_path: Path) -> None:
    service, spec = loaded(tmp_path, runs["one"], runs["cartpole"])
    assert spec["observation_space"]["shape"] == [2]
    assert {name: agent["observation_space"]["shape"] for name, agent in spec["models"].items()} == {"agent0": [2], "agent1": [4]}
    for name, width in (("agent0", 2), ("agent1", 4)):
        assert answers(service(), [{"observation": seen(1, width)[0]}], StartOptions(model=name))


def test_exploring_actions_vary_and_others_do_not(runs: dict[str, Path], tmp_path: Path) -> None:
    same = [{"observation": [0.1, 0.1]}] * 60
    for default, about, different in (
        (0.0, None, 1),
        (0.0, StartOptions(temperature=1.0), 2),
        (1.0, None, 2),
        (1.0, StartOptions(temperature=0.0), 1),
    ):
        service, _ = loaded(tmp_path, runs["one"], settings=ServiceSettings(temperature=default))
        assert len({answer["action"] for answer in answers(service(), same, about)}) == different


def test_what_was_accepted_in_training_is_accepted_in_service(runs: dict[str, Path]) -> None:
    http, sessions = CheckpointSource(str(runs["one"])).limits()
    assert (http.body_bytes, sessions.silent_s) == (5000, 7)
    assert CheckpointSource(str(runs["cartpole"])).limits()[1].silent_s == 60


def test_a_config_file_resolves_to_its_newest_run_with_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "game.yaml"
    file.write_text(yaml.safe_dump({"duel": {"env": "CartPole-v1"}}))
    with pytest.raises(NotFound, match="No run of duel"):
        checkpoint_follower.resolve_run(str(file), tmp_path)
    for name in ("a", "b"):
        small.train(tmp_path / "duel" / name, 1)
    assert checkpoint_follower.resolve_run(str(file), tmp_path) == str(tmp_path / "duel" / "b")
    assert checkpoint_follower.resolve_run("elsewhere", tmp_path) == "elsewhere"


def test_runs_are_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert checkpoint_follower.parse_sources(["runs/x"], tmp_path) == {"default": CheckpointSource("runs/x")}
    assert checkpoint_follower.parse_sources(["easy=runs/x", "hard=runs/y=z"], tmp_path) == {
        "easy": CheckpointSource("runs/x"),
        "hard": CheckpointSource("runs/y=z"),
    }
    there = str(tmp_path / "a=b")
    assert checkpoint_follower.parse_sources([there], tmp_path) == {"default": CheckpointSource(there)}, "what exists is a path"
    for twice in (["runs/x", "runs/y"], ["a=x", "a=y"]):
        with pytest.raises(UsageError, match="Two runs have the name"):
            checkpoint_follower.parse_sources(twice, tmp_path)


def test_a_directory_without_a_checkpoint_is_reported(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "best"):
        with pytest.raises(NotFound):
            CheckpointFollower({"default": CheckpointSource(str(place))}, tmp_path, UpdateSettings()).open()


# -- versions -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint of version 1."""
    checkpointed(tmp_path / "run", 1, policy(1))
    return tmp_path / "run"


def follower(run: Path | str, directory: Path, **offering: Any) -> CheckpointFollower:
    directory.mkdir(exist_ok=True)
    made = CheckpointFollower(
        {"default": CheckpointSource(str(run))}, directory, UpdateSettings(follow_s=0.0, **{"follow": True, **offering})
    )
    made.open()
    return made


def serves(made: CheckpointFollower) -> int:
    return made.routes.agents["default"].current


def test_a_version_is_found_in_checkpoints_and_among_those_that_were_kept(run: Path, tmp_path: Path) -> None:
    checkpointed(run, 5, policy(5))
    kept = LocalVersionStore(LocalStore(run))
    kept.add(MODEL, policy(3), above=2)
    assert kept.keep(MODEL) == 3
    made = follower(run, tmp_path / "service", version=3, levels=(1, 5))
    agent = made.routes.agents["default"]
    assert (agent.current, sorted(agent.releases), agent.levels) == (3, [1, 3, 5], (1, 5))
    with releases.serving(tmp_path / "service") as served:
        for version, headers in ((3, []), (1, ["version: 1"]), (5, ["version: 5"])):
            assert answered(served.port, f"v{version}", headers, [policy(version)]) == 0
    with pytest.raises(NotFound, match="no version 4") as missing:
        CheckpointSource(str(run)).version(4)
    assert "1, 3, 5" in missing.value.hint


def test_several_models_are_requested_by_the_number_of_their_checkpoint(runs: dict[str, Path]) -> None:
    store = LocalStore(runs["two"])
    name = checkpoint.names(store)[-1]
    versions = checkpoint.versions_of(store, name)
    for found in (CheckpointSource(str(runs["two"])).version(int(name)), CheckpointSource(str(runs["two"])).release()):
        assert found.version == int(name)
        assert {model: part.version for model, part in found.parts.items()} == versions


def test_a_level_that_is_current_at_first_stays_a_level(run: Path, tmp_path: Path) -> None:
    made = follower(run, tmp_path / "service", levels=(1,))
    checkpointed(run, 2, policy(2))
    made.poll()
    agent = made.routes.agents["default"]
    assert (agent.current, sorted(agent.releases)) == (2, [1, 2])


def answered(port: int, session: str, headers: list[str], candidates: list[Any], ticks: int = 6) -> int:
    """Play a short session, and return which policy played it."""
    twin = Twin(*candidates)
    with wire.Wire(port) as connected:
        assert connected.ask(wire.step("start", session, headers=headers)).status == 200
        for observation in observations(ticks):
            reply = connected.ask(wire.step("tick", session, json.dumps({"observation": observation}).encode()))
            assert reply.status == 200, reply
            assert twin.check(observation, json.loads(reply.body)["action"]), session
        assert connected.ask(wire.step("end", session)).status == 200
    (which,) = twin.left
    return which


def test_new_checkpoints_reach_new_sessions(run: Path, tmp_path: Path) -> None:
    made = follower(run, tmp_path / "service")
    with releases.serving(tmp_path / "service") as served:
        assert answered(served.port, "first", [], [policy(1)]) == 0
        for version in (2, 3, 7):
            checkpointed(run, version, policy(version))
            made.poll()
            assert serves(made) == version
            wait_until(lambda version=version: releases.current(served.port) == version)  # type: ignore[misc]
            assert answered(served.port, f"v{version}", [], [policy(version)]) == 0
    assert not made.refused


def test_without_follow_the_version_does_not_change(run: Path, tmp_path: Path) -> None:
    made = follower(run, tmp_path / "service", follow=False)
    checkpointed(run, 2, policy(2))
    made.poll()
    assert serves(made) == 1


def test_the_files_of_versions_that_are_gone_are_deleted_later(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark(run, 1)
    made = follower(f"{run}/best", tmp_path / "service")
    monkeypatch.setattr(checkpoint_follower, "_DELETE_S", 0.0)
    there = tmp_path / "service" / "releases" / "default"
    for version in (2, 3):
        checkpointed(run, version, policy(version))
        mark(run, version)
        made.poll()
    assert serves(made) == 3
    made.poll()
    assert [path.name for path in there.iterdir()] == ["000003"]
    monkeypatch.setattr(checkpoint_follower, "_DELETE_S", 3600.0)
    for version in (2, 3):  # back, and forth again, before what is leaving has left
        mark(run, version)
        made.poll()
        assert serves(made) == version
    assert sorted(path.name for path in there.iterdir()) == ["000002", "000003"]
    assert [path.name for _, path in made._to_delete] == ["000002"], "what is served again does not leave"


def mark(run: Path, number: int) -> None:
    checkpoint.mark_best(LocalStore(run), f"{number:06d}", float(number), "reward")


def test_the_best_may_go_back_and_the_newest_may_not(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointed(run, 5, policy(5))
    mark(run, 5)
    best, newest = follower(f"{run}/best", tmp_path / "best"), follower(run, tmp_path / "newest")
    mark(run, 1)
    checkpointed(run, 6, policy(4), version=4)
    best.poll()
    newest.poll()
    assert (serves(best), serves(newest)) == (1, 5)
    assert newest.refused == {"default": 1}
    assert "version 4 is older than the served version 5" in caplog.text
    assert not best.refused


# -- what is refused ----------------------------------------------------------------------------------------------------------


def nan(version: int) -> Any:
    made = policy(version)
    with torch.no_grad():
        next(iter(made.parameters()))[0] = float("nan")
    return made


WRONG: Mapping[str, Any] = {
    "not finite": nan,
    "observation space": lambda version: policy(version, observation=gym.spaces.Box(-2, 2, (4,), np.float32)),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_unusable_version_is_refused_once_and_the_old_one_is_served(
    run: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = follower(run, tmp_path / "service")
    with releases.serving(tmp_path / "service") as served:
        checkpointed(run, 2, WRONG[what](2))
        for _ in range(3):
            made.poll()
        assert (serves(made), made.refused) == (1, {"default": 1})
        assert caplog.text.count("was refused") == 1
        assert what in caplog.text
        assert answered(served.port, "still", [], [policy(1)]) == 0
        assert total(metrics(served.port), "ludus_update_refused_total", model="default") == 1
        checkpointed(run, 3, policy(3))
        made.poll()
        wait_until(lambda: releases.current(served.port) == 3)
        assert answered(served.port, "after", [], [policy(3)]) == 0


def test_no_damage_of_a_checkpoint_reaches_a_game(run: Path, tmp_path: Path) -> None:
    """Damage every file at many offsets: a flipped byte, a truncation, a missing file."""
    made = follower(run, tmp_path / "service")
    checkpointed(tmp_path / "source", 2, policy(2))
    source, number, taken = tmp_path / "source" / "checkpoints" / "000002", 1, 0
    for name in sorted(path.name for path in source.iterdir()):
        whole = (source / name).read_bytes()
        places = sorted({0, 7, len(whole) // 3, len(whole) // 2, len(whole) - 1})
        for damage in [*places, "cut", "gone"]:
            number += 1
            target = run / "checkpoints" / f"{number:06d}"
            shutil.copytree(source, target)
            if damage == "gone":
                (target / name).unlink()
            elif damage == "cut":
                (target / name).write_bytes(whole[: len(whole) // 2])
            else:
                assert isinstance(damage, int)
                (target / name).write_bytes(whole[:damage] + bytes([whole[damage] ^ 0x55]) + whole[damage + 1 :])
            before = made.refused["default"]
            made.poll()
            if serves(made) == 2:  # a letter of the manifest that says nothing about the files
                assert name == "manifest.json"
                written = release.read(tmp_path / "service" / "releases" / "default" / "000002")
                assert small.same(written.policies[MODEL].weights(), policy(2).weights())  # type: ignore[attr-defined]
                taken += 1
                shutil.rmtree(target)
                made = follower(run, tmp_path / "service")
            else:
                assert serves(made) == 1
                passed_over = name in ("manifest.json", "state.json")  # its state cannot be read: it is not even a candidate
                assert made.refused["default"] - before in ((0, 1) if passed_over else (1,)), f"{name} damaged: {damage}"
                shutil.rmtree(target)
    assert taken < 4
    checkpointed(run, number + 1, policy(2), version=2)
    made.poll()
    assert serves(made) == 2


def test_a_missing_run_is_reported_once_and_followed_when_it_returns(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_follower, "_RETRY_S", 0.0)
    made = follower(run, tmp_path / "service")
    run.rename(tmp_path / "moved")
    for _ in range(5):
        made.poll()
    assert (serves(made), made.refused["default"], caplog.text.count("no checkpoint to follow")) == (1, 1, 1)
    (tmp_path / "moved").rename(run)
    made.poll()
    checkpointed(run, 2, policy(2))
    made.poll()
    assert serves(made) == 2
    run.rename(tmp_path / "moved")
    made.poll()
    assert made.refused["default"] == 2


def test_a_routing_table_that_cannot_be_written_is_written_later(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_follower, "_RETRY_S", 0.0)
    made = follower(run, tmp_path / "service")
    (tmp_path / "service").rename(tmp_path / "aside")
    (tmp_path / "service").write_text("a file")  # even root cannot write below it
    checkpointed(run, 2, policy(2))
    made.poll()
    assert (serves(made), made.refused) == (1, {"default": 1})
    (tmp_path / "service").unlink()
    (tmp_path / "aside").rename(tmp_path / "service")
    made.poll()
    assert serves(made) == 2


def test_the_first_version_must_be_sound(tmp_path: Path) -> None:
    checkpointed(tmp_path / "run", 1, nan(1))
    with pytest.raises(Damaged):
        follower(tmp_path / "run", tmp_path / "service")
    other = policy(2, observation=gym.spaces.Box(-2, 2, (4,), np.float32))
    checkpointed(tmp_path / "levels", 1, policy(1))
    checkpointed(tmp_path / "levels", 2, other)
    with pytest.raises(IncompatibleCheckpoint):
        follower(tmp_path / "levels", tmp_path / "service", levels=(1,))


# -- as ONNX ------------------------------------------------------------------------------------------------------------------


def test_versions_are_served_as_onnx(run: Path, tmp_path: Path) -> None:
    made = follower(run, tmp_path / "service", backend="onnx")
    with releases.serving(tmp_path / "service") as served:
        assert answered(served.port, "first", [], [policy(1)]) == 0
        checkpointed(run, 2, policy(2))
        made.poll()
        assert serves(made) == 2, made.refused
        wait_until(lambda: releases.current(served.port) == 2)
        assert answered(served.port, "second", [], [policy(2)]) == 0
        assert list((tmp_path / "service").rglob("*.onnx"))
        assert not list((tmp_path / "service").rglob("*.safetensors"))


# -- trials -------------------------------------------------------------------------------------------------------------------

TRIAL = CanarySettings(hold_s=0.0, min_requests=60, give_up_s=3600, max_latency_ratio=50, fast_enough_ms=500)
"""Latency is not judged: the machine may be busy."""


def tries(made: CheckpointFollower) -> int | None:
    return made.routes.agents["default"].canary


def trial(run: Path, directory: Path, settings: CanarySettings = TRIAL) -> CheckpointFollower:
    return follower(run, directory, canary_percent=50.0, canary=settings)


def traffic(port: int, count: int, prefix: str, *, bad: int = 0) -> list[int]:
    """Sessions of ten ticks; in every `bad`-th the last tick is HUGE. The statuses of those last ticks."""
    last = []
    with wire.Wire(port) as connected:
        for number in range(count):
            session = f"{prefix}-{number}"
            assert connected.ask(wire.step("start", session)).status == 200
            for tick, seen in enumerate(observations(10)):
                huge = bad and number % bad == 0 and tick == 9
                body = json.dumps({"observation": HUGE if huge else seen}).encode()
                status = connected.ask(wire.step("tick", session, body)).status
            last.append(status)
            connected.ask(wire.step("end", session))
    metrics(port)  # its snapshot is of now
    return last


def test_a_good_canary_is_promoted(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = trial(run, tmp_path / "service")
    with releases.serving(tmp_path / "service") as served:
        traffic(served.port, 10, "before")
        checkpointed(run, 2, policy(2))
        made.poll()
        assert (serves(made), tries(made)) == (1, 2)
        wait_until(lambda: total(metrics(served.port), "ludus_canary_version") == 2)
        made.poll()
        assert serves(made) == 1, "nobody has played it"
        for batch in range(20):
            traffic(served.port, 10, f"trial{batch}")
            made.poll()
            if serves(made) == 2:
                break
        assert serves(made) == 2
        assert (made.promoted, made.rolled_back, made.refused) == ({"default": 1}, {}, {})
        wait_until(lambda: releases.current(served.port) == 2)
        assert answered(served.port, "now", [], [policy(2)]) == 0
        made.poll()
        found = metrics(served.port)
        assert total(found, "ludus_canary_promoted_total") == 1
        assert total(found, "ludus_canary_version") == 0
    assert "was promoted" in caplog.text


def test_a_failing_canary_is_rolled_back_and_its_sessions_move(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trial(run, tmp_path / "service")
    with releases.serving(tmp_path / "service") as served:
        checkpointed(run, 2, broken(2))
        made.poll()
        wait_until(lambda: total(metrics(served.port), "ludus_canary_version") == 2)
        number = next(n for n in range(100) if made.routes.agents["default"].choose(f"stays-{n}", -1) == 2)
        twin = Twin(broken(2))
        with wire.Wire(served.port) as stays:
            stays.ask(wire.step("start", f"stays-{number}"))

            def tick(seen: list[float]) -> bool:
                reply = stays.ask(wire.step("tick", f"stays-{number}", json.dumps({"observation": seen}).encode()))
                return twin.check(seen, json.loads(reply.body)["action"])

            assert all(tick(seen) for seen in observations(5))
            statuses = []
            for batch in range(20):
                statuses += traffic(served.port, 10, f"trial{batch}", bad=2)
                made.poll()
                if made.rolled_back:
                    break
            assert set(statuses) == {200, 500}, "only who has the new version fails"
            assert (serves(made), made.rolled_back, made.promoted) == (1, {"default": 1}, {})
            assert made.routes.agents["default"].withdrawn == (2,)
            wait_until(lambda: total(metrics(served.port), "ludus_live_versions") == 1)
            twin.carry_on(policy(1), carry=True)
            assert all(tick(seen) for seen in observations(5))
        assert set(traffic(served.port, 10, "after", bad=2)) == {200}
        made.poll()
        assert (serves(made), tries(made)) == (1, None), "the same checkpoint is not tried again"
        checkpointed(run, 3, policy(3))
        made.poll()
        assert (serves(made), tries(made)) == (1, 3), "the next one is"
    assert "was rolled back" in caplog.text


def test_a_rolled_back_best_version_is_tried_again(run: Path, tmp_path: Path) -> None:
    hasty = CanarySettings(hold_s=0.0, give_up_s=0.0, min_requests=1, fast_enough_ms=500)
    checkpointed(run, 2, policy(2))
    mark(run, 1)
    made = follower(f"{run}/best", tmp_path / "service", canary_percent=50.0, canary=hasty)
    with releases.serving(tmp_path / "service") as served:
        mark(run, 2)
        made.poll()
        wait_until(lambda: total(metrics(served.port), "ludus_canary_version") == 2)
        traffic(served.port, 6, "few")  # not enough to prove anything: given up at once
        made.poll()
        assert (made.rolled_back, made.routes.agents["default"].withdrawn) == ({"default": 1}, (2,))
        wait_until(lambda: total(metrics(served.port), "ludus_live_versions") == 1)
        for best in (1, 2):
            mark(run, best)
            made.poll()
        agent = made.routes.agents["default"]
        assert (agent.canary, agent.withdrawn) == (2, ())
        wait_until(lambda: total(metrics(served.port), "ludus_canary_version") == 2)
        assert {answered(served.port, f"again-{n}", [], [policy(1), policy(2)]) for n in range(12)} == {0, 1}


def test_a_worker_replaced_during_a_trial_keeps_the_counts_exact(run: Path, tmp_path: Path) -> None:
    patient = CanarySettings(hold_s=3600.0, min_requests=10**9)
    made = trial(run, tmp_path / "service", patient)

    def counted() -> list[int]:
        made.poll()
        counts = made._trials["default"].counts
        return [counts.of(version).requests for version in counts.refresh()]

    ticks = 0
    with releases.serving(tmp_path / "service") as first:
        traffic(first.port, 5, "before")
        checkpointed(run, 2, policy(2))
        made.poll()
        wait_until(lambda: total(metrics(first.port), "ludus_canary_version") == 2)
        assert counted() == [0, 0], "what was before the trial does not count"
        traffic(first.port, 10, "first")
        ticks += 100
        assert sum(counted()) == ticks
        assert min(counted()) > 0
    assert sum(counted()) == ticks
    with releases.serving(tmp_path / "service") as second:
        for batch in range(3):  # soon more than the one before it
            traffic(second.port, 10, f"second{batch}")
            ticks += 100
            assert sum(counted()) == ticks
        counts = made._trials["default"].counts
        assert all(count >= 0 for version in (1, 2) for count in counts.of(version).latency)


def test_each_of_several_agents_is_followed_for_itself(run: Path, tmp_path: Path) -> None:
    checkpointed(tmp_path / "other", 10, policy(10))
    sources = {"easy": CheckpointSource(str(run)), "hard/er": CheckpointSource(str(tmp_path / "other"))}
    (tmp_path / "service").mkdir()
    made = CheckpointFollower(sources, tmp_path / "service", UpdateSettings(follow=True, follow_s=0.0))
    made.open()
    with releases.serving(tmp_path / "service") as served:
        checkpointed(tmp_path / "other", 11, policy(11))
        checkpointed(run, 2, nan(2))
        made.poll()
        wait_until(lambda: releases.current(served.port, "hard/er") == 11)
        assert releases.current(served.port, "easy") == 1
        assert made.refused == {"easy": 1}
        assert answered(served.port, "e", [], [policy(1)]) == 0
        assert answered(served.port, "h", ["model: hard/er"], [policy(11)]) == 0


# -- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, str]]:
    """`ludus serve` with two workers and a token."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("secret\n")
    words: list[str | Path] = ["serve", runs["recurrent"], "--port", "0", "--workers", "2", "--token-file", token, "--json"]
    with program(*words, listens=False) as running:
        told = json.loads(running.wait_for('"port"'))
        assert told["workers"] == 2
        assert set(told["versions"]) == {"default"}
        yield running, f"http://127.0.0.1:{told['port']}"


AUTHORIZED = ["Authorization: Bearer secret"]


def test_several_workers_answer_as_one(runs: dict[str, Path], service: tuple[Program, str]) -> None:
    """A session stays with its worker, which keeps its recurrent state."""
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
    wait_until(lambda: total(metrics(port, *AUTHORIZED), "ludus_requests_total", kind="tick") == 120)  # of both workers
    assert total(metrics(port, *AUTHORIZED), "ludus_up") == 2


@pytest.mark.parametrize("token", [None, "wrong", "secret2"])
def test_without_the_token_every_page_is_refused(service: tuple[Program, str], token: str | None) -> None:
    with Client(service[1], token, timeout_s=LIMIT_S) as client:
        for ask in (lambda: client.start("m"), client.spec):
            with pytest.raises(Refused) as caught:
                ask()
            assert caught.value.status == 401


def test_a_signal_stops_it_in_order(runs: dict[str, Path]) -> None:
    with program("serve", runs["one"], "--port", "0", "--drain-s", "0.2", listens=False) as running:
        said = running.wait_for("serving default version")
        with Client(said.split(" at ")[1].split("/step")[0], timeout_s=LIMIT_S) as client:
            client.start("m")
            assert set(json.loads(client.tick("m", b'{"observation": [0, 1]}'))) == {"action"}
        running.process.send_signal(signal.SIGINT)
        code, _, err = running.finish()
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing"], "There is no run or checkpoint"),
        (["."], "not the directory of a run"),
        (["RUN", "--backend", "tensorflow"], "--backend"),
        (["RUN", "--on-move", "forget"], "--on-move"),
        (["RUN", "--tls-cert", "RUN"], "--tls-key"),
        (["RUN", "--tls-cert", "nowhere", "--tls-key", "nowhere"], "certificate"),
        (["RUN", "--token-file", "nowhere"], "token file"),
        (["RUN", "--access-log", "nowhere/log"], "access log"),
        (["RUN", "--host", "0.0.0.0"], "without a token"),
        (["RUN", "--version", "987"], "no version 987"),
        (["RUN", "--level", "987"], "no version 987"),
        (["RUN", "RUN"], "Two runs"),
    ],
)
def test_invalid_arguments_exit_with_code_2(
    runs: dict[str, Path], tmp_path: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(runs["one"]) if word == "RUN" else word for word in words]
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # the log of the command is not that of these tests
    error = CliRunner().invoke(app, ["serve", *given, "--port", "0"]).exception
    assert isinstance(error, UsageError), error
    assert error.exit_code == 2
    assert told in str(error)


def test_a_wrong_path_is_reported_without_a_traceback(tmp_path: Path) -> None:
    with program("serve", tmp_path / "missing", "--port", "0", listens=False) as running:
        code, out, err = running.finish()
    assert code == 2
    assert str(tmp_path) in err
    assert "Traceback" not in err + out
