"""Short names of runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.experiments.runs.run_names import resolve_run, resolve_runs, run_named, short_name, short_names

NAMES = [
    "pong/PPO_Pong_2026-01-01_00-00-00-aaaaa",
    "cart/PPO_CartPole_2026-01-02_00-00-00-bbbbb",
    "pong/DQN_Pong_2026-01-03_00-00-00-1aaaa",
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate([*NAMES, "mine/first"]):
        run = Path("runs") / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("x: {env: CartPole-v1}")
        os.utime(run / "config.yaml", (1000 + age, 1000 + age))
    return [Path("runs") / name for name in [*NAMES, "mine/first"]]


@pytest.mark.parametrize(
    ("word", "index", "tail"),
    [
        ("last", 3, ""),
        ("pong", 2, ""),
        ("cart", 1, ""),
        ("bbbbb", 1, ""),
        ("bbb", 1, ""),
        ("aaaaa", 0, ""),
        ("first", 3, ""),
        ("last/best", 3, "/best"),
        ("bbbbb/checkpoints/000120", 1, "/checkpoints/000120"),
        ("pong@131", 2, "@131"),
    ],
)
def test_a_run_is_found_by_a_short_name(runs: list[Path], word: str, index: int, tail: str) -> None:
    assert resolve_run(word) == f"{runs[index]}{tail}"


@pytest.mark.parametrize("word", ["nothing", "bb", "s3://bucket/last", "/last", "./last", "rule:hard", "http://here:80", ""])
def test_what_is_no_short_name_stays_what_it_is(runs: list[Path], word: str) -> None:
    assert resolve_run(word) == word


def test_where_several_runs_may_be_meant_an_experiment_is_all_of_its_runs(runs: list[Path]) -> None:
    assert resolve_runs("pong") == "runs/pong"
    assert resolve_runs("bbbbb") == str(runs[1])
    assert resolve_runs("runs") == "runs"


def test_a_path_that_exists_is_meant_as_a_path(runs: list[Path]) -> None:
    Path("last").mkdir()
    assert resolve_run("last") == "last"
    assert resolve_run("last/best") == "last/best"
    assert resolve_run("runs/cart") == "runs/cart"


def test_an_end_that_several_runs_have_is_refused_with_their_names(runs: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"2 runs end with 'aaaa'.*1aaaa"):
        resolve_run("aaaa")


def test_without_runs_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_run("last") == "last"
    assert run_named("last", []) is None
    assert list(short_names([])) == []


def test_short_names_lead_back_to_their_runs(runs: list[Path]) -> None:
    assert [short_name(run, runs) for run in runs] == ["aaaaa", "bbbbb", "1aaaa", "first"]
    for name, meaning in short_names(runs):
        found = run_named(name, runs)
        assert found is not None
        assert meaning in (found.name, "newest run of this experiment")


def test_the_shell_completes_names_and_directories(runs: list[Path]) -> None:
    from ludus.cli.run_argument import complete_run

    assert [name for name, _ in complete_run("b")] == ["bbbbb"]
    assert {"last", "pong", "cart", "mine", "aaaaa", "runs/"} <= {name for name, _ in complete_run("")}
    assert [name for name, _ in complete_run("runs/p")] == ["runs/pong/"]
    assert [name for name, _ in complete_run("runs/pong/DQN")] == [f"{runs[2]}/"]


def test_of_several_arguments_each_is_resolved_and_names_are_kept(runs: list[Path]) -> None:
    from ludus.cli.run_argument import run_places

    assert run_places(["last", "red=bbbbb", "runs"]) == [str(runs[3]), f"red={runs[1]}", "runs"]
    assert run_places(None) is None
