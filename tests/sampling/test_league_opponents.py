"""Opponents from a league in real matches: who plays, that results are those of the game, and that bad models stop nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.config.schema import SelfPlayConfig
from ludus.core import trust
from ludus.models.policy import BatchDecision, Policy
from ludus.models.weights import serialization
from ludus.sampling import league_opponents
from ludus.sampling.league_files import (
    LeagueOpponent,
    Matchmaking,
    PairReport,
    SpoolReader,
    SpoolReport,
    UnusableModel,
    write_matchmaking,
)
from ludus.sampling.league_opponents import LeagueOpponents, match_of_sides
from ludus.sampling.match_opponents import seat_self_play
from ludus.storage.local import LocalStore
from tests.sampling.test_match_opponents import ACTIONS, AGENTS, LENGTH, SelfPlay, Versions, is_constant


def choosing(policy: Policy, action: int) -> dict[str, Any]:
    """Weights with which a policy always takes one action."""
    weights = {name: np.zeros_like(value) for name, value in policy.weights().items()}
    bias = next(name for name, value in weights.items() if value.shape == (ACTIONS,))
    weights[bias][action] = 100.0
    return weights


def store(league: Path, name: str, action: int, version: int = 1) -> str:
    """Store a player that always takes one action; returns its model."""
    policy, target = Versions().policy, LocalStore(league / "players" / name)
    target.put("models/m/model.json", json.dumps(policy.description()).encode())
    target.put(f"models/m/{version:06d}.safetensors", serialization.encode_weights(choosing(policy, action)))
    return f"players/{name}@{version}"


def publish(league: Path, *opponents: tuple[str, str, float], generation: int = 0) -> None:
    write_matchmaking(league, Matchmaking("main", generation, tuple(LeagueOpponent(*one) for one in opponents)))


def settings(league: Path, **more: Any) -> SelfPlayConfig:
    return SelfPlayConfig(opponents="league", league=str(league), player="main", **more)


def reports(league: Path) -> list[SpoolReport]:
    return [report for path in sorted((league / "results").glob("*.jsonl")) for report in SpoolReader(path).read()]


def test_opponents_play_whole_matches_and_results_are_those_of_the_game(tmp_path: Path) -> None:
    low, high = store(tmp_path, "low", 0), store(tmp_path, "high", 49)
    publish(tmp_path, ("low", low, 0.5), ("high", high, 0.3), ("main", "", 0.2))
    play = SelfPlay(settings(tmp_path, period=20))
    batches = play.run(30)
    play.sampler.close()
    matches = play.whole_matches()
    opponents = Counter[str]()
    for match in matches:
        numbers = {agent: match[0][agent] for agent in AGENTS}
        own = [number for number in numbers.values() if number not in (0, 49)]
        for agent in AGENTS:
            assert is_constant(match, agent) or numbers[agent] not in (0, 49), "an opponent was replaced in a match"
        opponents["low" if 0 in numbers.values() else "high" if 49 in numbers.values() else "main"] += 1
        assert own, "the learning side always plays"
    counted = {one.opponent: one for one in _sum(reports(tmp_path))}
    assert {name: one.wins + one.draws + one.losses for name, one in counted.items()} == dict(opponents)
    assert (counted["low"].losses, counted["high"].wins) == (0, 0)
    assert counted["low"].gain == LENGTH * counted["low"].wins
    assert counted["high"].gain == -LENGTH * counted["high"].losses
    recorded = sum(int(batch.valid.sum()) for batch in batches)
    learning_sides = len(matches) + opponents["main"]  # both, if the player meets itself
    assert recorded == pytest.approx(LENGTH * learning_sides, abs=6 * LENGTH)


def _sum(found: list[SpoolReport]) -> list[PairReport]:
    out: dict[str, PairReport] = {}
    for one in found:
        assert isinstance(one, PairReport)
        last = out.get(one.opponent, PairReport(0, "main", one.opponent, 0, 0, 0, 0, 0.0))
        out[one.opponent] = PairReport(
            0,
            "main",
            one.opponent,
            0,
            last.wins + one.wins,
            last.draws + one.draws,
            last.losses + one.losses,
            last.gain + one.gain,
        )
    return list(out.values())


class Chooser:
    """A chooser with a clock and a step counter that the test advances."""

    def __init__(self, league: Path, period: int = 10) -> None:
        self.now, self.steps, self.versions = 0.0, 0, Versions()
        self.policies = _Policies()
        self.in_use: frozenset[str] = frozenset()
        self.chooser = LeagueOpponents(
            league, "main", self.policies, "m", self.versions.policy, lambda: self.steps, period=period, clock=lambda: self.now
        )  # fmt: skip
        self.random = np.random.default_rng(0)

    def draw(self, n: int, seconds: float = 0.3, steps: int = 10) -> Counter[str | None]:
        found = Counter[str | None]()
        for _ in range(n):
            self.now, self.steps = self.now + seconds, self.steps + steps
            found[self.chooser.choose(self.random, lambda: self.in_use).model] += 1
        return found


class _Policies(dict[str, Any]):
    """Records what is loaded, like a PolicySet."""

    def add_fixed(self, model: str, policy: Any) -> None:
        self[model] = policy

    def remove(self, model: str) -> None:
        del self[model]


def test_opponents_are_drawn_with_the_published_probabilities(tmp_path: Path) -> None:
    a, b = store(tmp_path, "a", 1), store(tmp_path, "b", 2)
    publish(tmp_path, ("a", a, 0.6), ("b", b, 0.1), ("r", "rule:random", 0.1), ("main", "", 0.2))
    chooser = Chooser(tmp_path)
    drawn = chooser.draw(4000)
    shares = {model: count / 4000 for model, count in drawn.items()}
    assert shares == {
        f"league {a}": pytest.approx(0.6, abs=0.05),
        f"league {b}": pytest.approx(0.1, abs=0.04),
        None: pytest.approx(0.1, abs=0.04),
        "m": pytest.approx(0.2, abs=0.05),
    }
    publish(tmp_path, ("b", b, 1.0))
    chooser.draw(5)  # within the poll interval it may still be the old one
    assert set(chooser.draw(100)) == {f"league {b}"}
    chooser.chooser.close()


def test_an_opponent_that_trains_is_drawn_with_its_probability_in_slow_games(tmp_path: Path) -> None:
    """100 steps a second: without its slots, which it loses with every new model, it would be drawn in one match of six."""
    still = store(tmp_path, "still", 1)
    for version in range(1, 101):
        store(tmp_path, "trains", 2, version)
    chooser, drawn = Chooser(tmp_path, period=2_000), Counter[bool]()
    for version in range(1, 101):
        publish(tmp_path, ("still", still, 0.5), ("trains", f"players/trains@{version}", 0.5))
        for model, count in chooser.draw(20, seconds=0.5, steps=50).items():
            assert model is not None
            drawn["trains" in model] += count
    chooser.chooser.close()
    assert drawn[True] / drawn.total() == pytest.approx(0.5, abs=0.1)


def test_slots_are_drawn_anew_after_some_time_in_slow_games(tmp_path: Path) -> None:
    models = [store(tmp_path, f"p{n}", n) for n in range(20)]
    publish(tmp_path, *((f"p{n}", model, 1 / 20) for n, model in enumerate(models)))
    chooser = Chooser(tmp_path, period=2_000)
    assert len(chooser.draw(400, seconds=1.0, steps=1)) == 20  # less than one period
    chooser.chooser.close()


def test_results_name_the_generation_of_the_opponent(tmp_path: Path) -> None:
    a = store(tmp_path, "a", 1)
    write_matchmaking(tmp_path, Matchmaking("main", 0, (LeagueOpponent("a", a, 1.0, generation=4),)))
    chooser = Chooser(tmp_path)
    begun = chooser.chooser.choose(chooser.random, frozenset)
    write_matchmaking(tmp_path, Matchmaking("main", 0, (LeagueOpponent("a", a, 1.0, generation=5),)))
    chooser.now += 10
    later = chooser.chooser.choose(chooser.random, frozenset)
    for match in (begun, later):
        assert match.on_finished is not None
        match.on_finished(match_of_sides([1.0], [0.0]))
    chooser.chooser.close()
    found = [one for one in reports(tmp_path) if isinstance(one, PairReport)]
    assert [one.opponent_generation for one in found] == [4, 5]


def test_models_in_use_are_asked_for_only_when_policies_are_dropped(tmp_path: Path) -> None:
    """Asking goes through all matches: it must not happen with every match that begins."""
    publish(tmp_path, ("a", store(tmp_path, "a", 1), 0.5), ("b", store(tmp_path, "b", 2), 0.5))
    chooser, asked = Chooser(tmp_path), 0

    def in_use() -> frozenset[str]:
        nonlocal asked
        asked += 1
        return frozenset()

    for _ in range(100):
        chooser.now, chooser.steps = chooser.now + 0.3, chooser.steps + 10
        chooser.chooser.choose(chooser.random, in_use)
    chooser.chooser.close()
    assert asked == 0


def test_an_opponent_with_a_new_model_is_loaded_again(tmp_path: Path) -> None:
    publish(tmp_path, ("a", store(tmp_path, "a", 1, version=1), 1.0))
    chooser = Chooser(tmp_path)
    assert set(chooser.draw(10)) == {"league players/a@1"}
    publish(tmp_path, ("a", store(tmp_path, "a", 2, version=2), 1.0))
    chooser.draw(5)
    assert set(chooser.draw(10)) == {"league players/a@2"}
    chooser.chooser.close()


def test_models_that_cannot_be_used_are_reported_once_and_left_out(tmp_path: Path) -> None:
    good = store(tmp_path, "good", 1)
    damaged, wrong = store(tmp_path, "damaged", 2), store(tmp_path, "nan", 3)
    (tmp_path / "players/damaged/models/m/000001.safetensors").write_bytes(b"\x00" * 100)
    nan = {name: np.full_like(value, np.nan) for name, value in Versions().policy.weights().items()}
    LocalStore(tmp_path / "players/nan").put("models/m/000001.safetensors", serialization.encode_weights(nan))
    bad = (("damaged", damaged), ("nan", wrong), ("absent", "players/absent@7"), ("odd", "???"), ("script", "script:no_module:f"))
    publish(tmp_path, ("good", good, 0.01), *((name, model, 0.2) for name, model in bad))
    chooser = Chooser(tmp_path)
    assert set(chooser.draw(300)) == {f"league {good}"}
    chooser.chooser.close()
    unusable = [one for one in reports(tmp_path) if isinstance(one, UnusableModel)]
    assert sorted((one.player, one.model) for one in unusable) == sorted(bad)


def test_without_usable_opponents_the_player_meets_itself(tmp_path: Path) -> None:
    chooser = Chooser(tmp_path)  # no coordinator yet
    assert set(chooser.draw(10)) == {"m"}
    publish(tmp_path, ("absent", "players/absent@7", 1.0))
    assert set(chooser.draw(20)) == {"m"}
    chooser.chooser.close()


def test_few_policies_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(league_opponents, "_KEPT", 10)
    publish(tmp_path, *((f"p{n}", store(tmp_path, f"p{n}", n), 1 / 40) for n in range(40)))
    chooser = Chooser(tmp_path)
    drawn = chooser.draw(600)
    assert len(drawn) == 40
    assert len(chooser.policies) <= 10
    chooser.chooser.close()


def always_seven(observation: Any, mask: Any) -> int:
    return 7


def fails_later(observation: Any, mask: Any) -> int:
    raise RuntimeError("no more")


def test_scripts_play_and_a_failing_script_is_reported(tmp_path: Path) -> None:
    name = __name__
    trust.allow(f"{name}:always_seven", f"{name}:fails_later")
    publish(tmp_path, ("seven", f"script:{name}:always_seven", 0.5), ("broken", f"script:{name}:fails_later", 0.5))
    play = SelfPlay(settings(tmp_path, period=20, swap_sides=False))
    play.run(10)
    play.sampler.close()
    assert any(is_constant(match, "b") and match[0]["b"] == 7 for match in play.whole_matches())
    unusable = [one for one in reports(tmp_path) if isinstance(one, UnusableModel)]
    assert [(one.player, "no more" in one.reason) for one in unusable] == [("broken", True)]
    results = [one.opponent for one in reports(tmp_path) if isinstance(one, PairReport)]
    assert set(results) == {"seven"}, "matches of a failed script do not count"


works = False


def works_again(observation: Any, mask: Any) -> int:
    if not works:
        raise RuntimeError("no file")
    return 8


def test_a_repaired_script_that_is_published_again_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process outlives a restart of the coordinator, which ends the quarantine."""
    model = f"script:{__name__}:works_again"
    trust.allow(f"{__name__}:works_again")
    publish(tmp_path, ("again", model, 1.0))
    chooser = Chooser(tmp_path)

    def act(name: str | None) -> BatchDecision:
        assert name is not None
        chooser.in_use = frozenset({name})
        decision: BatchDecision = chooser.policies[name].act(np.zeros((2, 2), np.float32))
        return decision

    first = chooser.chooser.choose(chooser.random, frozenset).model
    lost = act(first).lost
    assert lost is not None
    assert lost.all()
    publish(tmp_path, ("main", "", 1.0))  # quarantined
    assert set(chooser.draw(5)) <= {"m"}
    monkeypatch.setattr(f"{__name__}.works", True)
    publish(tmp_path, ("again", model, 1.0))
    chooser.draw(5)
    (second,) = chooser.draw(5)
    assert (act(second).lost, act(second).action.tolist()) == (None, [8, 8])
    assert second != first, "a match that is not over may still use the first one"
    assert act(first).lost is not None
    chooser.in_use = frozenset()
    publish(tmp_path, ("again", model, 0.5), ("low", store(tmp_path, "low", 0), 0.5))
    chooser.draw(50)
    assert first not in chooser.policies, "it is dropped when no match uses it"
    chooser.chooser.close()
    assert len([one for one in reports(tmp_path) if isinstance(one, UnusableModel)]) == 1


def test_seating_is_made_from_plain_settings(tmp_path: Path) -> None:
    publish(tmp_path, ("main", "", 1.0))
    assert callable(seat_self_play(settings(tmp_path), dict.fromkeys(AGENTS, "m"), Versions(), 0))
