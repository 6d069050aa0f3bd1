"""`self_play` of games that are no environments with several agents: the Arena, and games that call us over HTTP."""

from __future__ import annotations

import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.core.types import Segments
from ludus.errors import ConfigError, Refused, Unreachable
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.validation import validate
from ludus.protocol.client import Client
from tests.experiments import called
from tests.experiments.watching import Watching

ARENA = "ludus/Arena-1v1-v0"
WATCHING = "tests.experiments.watching:Watching"


@pytest.fixture
def learned() -> Iterator[list[Segments]]:
    """What the learner of a run with `run=WATCHING` was given."""
    Watching.seen.clear()
    yield Watching.seen
    Watching.seen.clear()


# -- the Arena ----------------------------------------------------------------------------------------------------------


def arena(self_play: dict[str, Any], env_config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    config = {
        "num_envs_per_worker": 4,
        "train_batch_size": 128,
        "minibatch_size": 64,
        "num_epochs": 1,
        "model": {"fcnet_hiddens": [8]},
        "evaluation_duration": 0,
        "env_config": {"seconds": 5, "start": "lane", **(env_config or {})},
        "self_play": self_play,
    }
    return {"env": ARENA, "run": WATCHING, "stop": {"iterations": 6}, "config": {**config, **settings}}


def match_results(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("match/")}


@pytest.mark.parametrize(
    ("self_play", "kinds"),
    [
        ({"opponents": "latest"}, {"latest"}),
        ({"opponents": "past", "every": 1}, {"past"}),
        ({"opponents": "mix", "latest": 0.5, "every": 1}, {"latest", "past"}),
    ],
)
def test_the_arena_is_trained_by_self_play(
    self_play: dict[str, Any], kinds: set[str], tmp_path: Path, learned: list[Segments]
) -> None:
    result = runner.train(arena(self_play), project=tmp_path, trial="run")
    found = match_results(result.metrics)
    assert {name.rpartition("/")[2] for name in found if name.startswith("match/win/") and name.count("_") == 0} == kinds
    assert ("match/past_version" in found) == ("past" in kinds)
    assert all(batch.rows == 4 for batch in learned), "the rows of one side of four matches"


def test_workers_play_the_same_matches(tmp_path: Path) -> None:
    self_play = {"opponents": "mix", "latest": 0.5, "every": 1}
    here, there = (
        runner.train(arena(self_play, num_workers=workers), project=tmp_path, trial=f"run-{workers}").metrics
        for workers in (0, 1)
    )
    assert match_results(here) == match_results(there) != {}


@pytest.mark.parametrize(
    ("self_play", "env_config", "words"),
    [
        ({"opponents": "mix"}, {"opponent": {"self": 0.5, "past": 0.5}}, "config.env_config.opponent"),
        ({"opponents": "past"}, {"side": 1}, "config.env_config.side"),
        ({"opponents": "past", "sides": [["a"], ["b"]]}, {}, "two sides of its own"),
        ({"every": 3}, {}, "has no opponents from the past"),
    ],
)
def test_two_settings_of_the_opponent_are_refused(
    self_play: dict[str, Any], env_config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        runner.train(arena(self_play, env_config), project=tmp_path, trial="run")
    (said,) = validate.find_keys_without_effect(arena(self_play, env_config))
    assert words in said


def test_opponents_of_the_environment_keep_their_meaning() -> None:
    given = {"opponent": {"self": 0.5, "past": 0.25, "easy": 0.25}}
    assert validate.find_keys_without_effect(arena({"every": 5, "keep": 20}, given)) == []


# -- games over HTTP ----------------------------------------------------------------------------------------------------


class TwoSides:
    """Matches of two sessions, until the server stops. Both see the number of the match and their side, and act in turn."""

    def __init__(self, url: str, first: int) -> None:
        self.url, self.first, self.faults = url, first, list[BaseException]()
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def _play(self) -> None:
        try:
            with Client(self.url, timeout_s=called.LIMIT_S, retries=0) as client:
                for number in range(self.first, self.first + 10_000):
                    self._match(client, number)
        except Unreachable:
            pass
        except Refused as refused:
            if refused.status not in (404, 410, 503):  # what one hears of a server that is stopping
                self.faults.append(refused)
        except BaseException as fault:
            self.faults.append(fault)

    def _match(self, client: Client, number: int) -> None:
        match, body = uuid.uuid4().hex, [json.dumps({"observation": [number, side]}).encode() for side in (0, 1)]
        for side in (0, 1):
            client.start(f"{match}-{side}", match=match, side=str(side))
        for _ in range(6):
            for side in (0, 1):
                client.tick(f"{match}-{side}", body[side])
        for side in (0, 1):
            client.end(f"{match}-{side}", json.dumps({"reward": 2 * side - 1, "terminated": True}).encode())


@pytest.mark.parametrize("workers", [0, 2])
def test_one_side_of_every_match_over_http_is_learned_from(workers: int, tmp_path: Path, learned: list[Segments]) -> None:
    self_play = {"opponents": "mix", "latest": 0.5, "snapshot_every": 1}
    experiment = called.data(6, run=WATCHING, num_workers=workers, self_play=self_play)
    with called.started(tmp_path / "run", experiment) as training:
        games = [TwoSides(training.url, first) for first in (0, 20_000, 40_000)]
        result = training.result()
        for game in games:
            game.thread.join(called.LIMIT_S)
    assert not any(game.faults for game in games)
    sides = defaultdict(set)
    for batch in learned:
        for number, side in batch.observation[:-1][batch.valid].tolist():
            sides[number].add(side)
    assert len(sides) > 20
    assert all(len(found) == 1 for found in sides.values()), "of one side only"
    assert {side for found in sides.values() for side in found} == {0.0, 1.0}
    assert result.metrics["games/failed"] == 0
    if not workers:  # which report once a second
        assert result.metrics["games/opponent_sessions"] > 20


@pytest.mark.parametrize(
    ("self_play", "outside", "words"),
    [
        ({"opponents": "past"}, called.TWO_SEATS, "needs one model for both sides; the seats have navy, rose"),
        ({"opponents": "past", "sides": [["a"], ["a"]]}, called.ONE_SEAT, "Two lists of names"),
        ({"opponents": "past", "sides": [["a"], []]}, called.ONE_SEAT, "Two lists of names"),
        (
            {"opponents": "past", "sides": [["a"], ["c"]]},
            {"seats": {"a": called.ONE_SEAT, "b": called.ONE_SEAT}},
            "the seats are a, b",
        ),
    ],
)
def test_sides_that_cannot_play_are_refused(self_play: dict[str, Any], outside: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(called.data(1, outside, self_play=self_play))


def test_self_play_of_sessions_needs_opponents() -> None:
    (said,) = validate.find_keys_without_effect(called.data(1, self_play={"every": 3}))
    assert "has no effect without opponents" in said
    assert validate.find_keys_without_effect(called.data(1, self_play={"opponents": "past"})) == []
