"""`ludus new`: a project to begin with, whose parts pass at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from gymnasium.utils.env_checker import check_env

from ludus.config.experiment_file import load_experiments
from ludus.envs.vector_env import make_one
from ludus.errors import AlreadyExists, StoreFull, UnknownName, UsageError
from ludus.experiments.resolve import resolve
from ludus.experiments.source.scaffold import scaffold
from ludus.testing import check_model

FILES = ["README.md", "environment.py", "experiment.yaml", "model/customnet.py", "test_project.py"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "catcher"))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    return tmp_path


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=250, env=dict(os.environ)
    )


def test_the_parts_of_a_new_project_fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = scaffold(Path("catcher"))
    assert sorted(str(path.relative_to("catcher")) for path in written) == FILES
    monkeypatch.chdir("catcher")
    ((name, data),) = load_experiments(Path("experiment.yaml")).items()
    assert name == "catcher"
    resolved = resolve({"name": name, **data})
    assert resolved.config.model.custom_model == "customnet"
    environment = make_one("environment:Catch", {}, "rgb_array")
    check_env(environment, skip_render_check=True)
    environment.reset(seed=0)
    assert environment.render().shape == (144, 112, 3)  # type: ignore[union-attr]
    check_model("customnet", environment, {"hidden": 16})
    assert "$" not in "".join(path.read_text() for path in Path().rglob("*.*") if path.is_file())


def test_the_readme_names_every_package_that_the_tests_need_beside_ludus(here: Path) -> None:
    scaffold(here / "game")
    readme = (here / "game" / "README.md").read_text(encoding="utf-8")
    assert "pip install pytest" in readme


def test_its_own_environment_ends_with_caught_or_missed(here: Path) -> None:
    scaffold(Path("catcher"))
    environment = make_one("environment:Catch", {"width": 3, "height": 4})
    for target in range(3):
        environment.reset(seed=target)
        ball, total, steps = environment.unwrapped.ball, 0.0, 0  # type: ignore[attr-defined]
        over = False
        while not over:
            paddle = environment.unwrapped.paddle  # type: ignore[attr-defined]
            _, reward, over, truncated, _ = environment.step(1 + (ball > paddle) - (ball < paddle))
            total, steps = total + float(reward), steps + 1
            assert not truncated
        assert (total, steps) == (1.0, 3)


def test_a_project_for_another_environment_brings_none_of_its_own(here: Path) -> None:
    scaffold(Path("pole"), "CartPole-v1")
    assert not Path("pole/environment.py").exists()
    assert yaml.safe_load(Path("pole/experiment.yaml").read_text())["pole"]["env"] == "CartPole-v1"


class _Words(gym.ObservationWrapper[dict[str, int], int, object]):
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space: gym.Space[Any] = gym.spaces.Dict({"word": gym.spaces.Discrete(3)})

    def observation(self, observation: object) -> dict[str, int]:
        return {"word": 1}


def words() -> gym.Env[dict[str, int], int]:
    return _Words()


def test_what_does_not_fit_is_refused_before_anything_is_written(here: Path) -> None:
    with pytest.raises(UsageError, match=r"are a Dict, .* takes a Box"):
        scaffold(Path("p"), f"{__name__}:words")
    with pytest.raises(UnknownName):
        scaffold(Path("p"), "CartPoll-v1")
    assert not Path("p").exists()


def test_nothing_is_overwritten(here: Path) -> None:
    Path("p/model").mkdir(parents=True)
    Path("p/model/customnet.py").write_text("mine")
    with pytest.raises(AlreadyExists, match=r"model/customnet\.py already"):
        scaffold(Path("p"))
    assert Path("p/model/customnet.py").read_text() == "mine"
    assert sorted(str(path) for path in Path("p").rglob("*")) == ["p/model", "p/model/customnet.py"]


def test_a_directory_that_cannot_be_written_is_told(here: Path) -> None:
    Path("file").write_text("")
    with pytest.raises(StoreFull, match="Cannot write"):
        scaffold(Path("file/p"))


@pytest.mark.long
@pytest.mark.system
def test_a_new_project_trains_learns_and_passes_its_tests_and_the_linters(here: Path) -> None:
    assert run("ludus.cli.main", "new", "catcher", cwd=here).returncode == 0
    project = here / "catcher"
    trained = run("ludus.cli.main", "train", "-f", "experiment.yaml", "--json", "-q", cwd=project)
    assert trained.returncode == 0, trained.stderr
    assert yaml.safe_load(trained.stdout.splitlines()[-1])["episode_return_mean"] > 0.8
    tested = run("pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert "3 passed" in tested.stdout, tested.stdout
    for words in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "--line-length", "130", "."],
        ["mypy", "--strict", "environment.py", "model/customnet.py"],
    ):
        checked = run(*words, cwd=project)
        assert checked.returncode == 0, checked.stdout + checked.stderr
