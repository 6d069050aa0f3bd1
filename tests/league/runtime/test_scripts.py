"""Scripts as players: found next to the file of the league, checked before anything starts, copied for other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ludus.core import trust
from ludus.errors import UnknownName, Untrusted, UsageError
from ludus.league.journal import LeagueJournal, read_state
from ludus.league.runtime.code_files import store_code
from ludus.league.settings import LeagueSettings
from ludus.sampling import league_policies
from ludus.sampling.league_policies import ModelKind, kind_of_model, load_script
from tests.league import games
from tests.waiting import wait_until

BOTS = """from helpers import choose


def rock(observation, action_mask):
    return choose(0)


table = [1, 2, 3]
"""
HELPERS = "def choose(action):\n    return action\n"


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget modules that the test imports, and its changes of the import path and of what is trusted."""
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.setenv(trust.PROJECTS, "")
    monkeypatch.setenv(trust.VARIABLE, "")
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a league, its game and its scripts, none of which is on the import path."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "bots.py").write_text(BOTS)
    (directory / "helpers.py").write_text(HELPERS)
    (directory / "unused.py").write_text("raise RuntimeError\n")
    (directory / "shapes.py").write_text(Path(games.__file__).read_text())
    data = {
        "env": "shapes:make_rps",
        "config": {"train_batch_size": 64, "num_envs_per_worker": 16, "num_workers": 1, "model": {"fcnet_hiddens": [8]}},
        "players": {"main": {}, "rock": {"role": "fixed", "model": "script:bots:rock"}},
        "matchmaking": {"scheme": "pfsp"},
        "snapshots": {"main": {"min_steps": 128, "max_steps": 128}},
        "evaluation": {"pairs": "all", "matches": 10},
        "turn_steps": 128,
        "stop": {"timesteps": 128},
    }
    (directory / "league.yaml").write_text(yaml.safe_dump(data))
    return directory


def ludus(directory: Path, *words: object, code: int = 0) -> str:
    """Run a command of a league in a directory; returns what it prints."""
    directory.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LUDUS_")}
    command = [sys.executable, "-m", "ludus.cli.main", "league", *map(str, words)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.system
def test_scripts_next_to_the_file_play_from_any_directory_and_on_machines_without_them(project: Path, tmp_path: Path) -> None:
    league, elsewhere = tmp_path / "league", tmp_path / "elsewhere"
    ludus(elsewhere, "run", "-f", project / "league.yaml", "--dir", league)
    state = read_state(league)
    assert not state.players["rock"].quarantine
    trained = state.payoff.record("main", "rock").games
    assert trained >= 128  # by a worker process, which may sample ahead
    assert state.payoff.record("main.1", "rock").games == 10  # in the evaluation
    assert {path.name for path in (league / "code").glob("*.py")} == {"bots.py", "helpers.py", "shapes.py"}

    matched = ludus(elsewhere, "match", league, "main.1", "rock", "--games", 4, code=2)
    assert "shapes is not on the import path. The league has a copy" in matched
    assert "--trust" in matched
    assert "4 games" in ludus(elsewhere, "match", league, "main.1", "rock", "--games", 4, "--trust")

    # Another machine has the directory of the league and nothing else.
    file = project / "again.yaml"
    text = (project / "league.yaml").read_text()
    file.write_text(text.replace("timesteps: 128", "timesteps: 1000000").replace("turn_steps: 128", "parallel: 0"))
    words = [sys.executable, "-m", "ludus.cli.main", "league", "run", "-f", str(file), "--dir", str(league)]
    with subprocess.Popen(words, cwd=elsewhere, stdout=subprocess.DEVNULL) as coordinator:
        try:
            wait_until(lambda: "parallel: 0" in (league / "league.yaml").read_text(), 60)
            project.rename(tmp_path / "moved")
            refused = ludus(elsewhere, "learner", league, "-p", "main", code=2)
            assert "bots is not on the import path. The league has a copy" in refused
            assert "--trust" in refused
            ludus(elsewhere, "learner", league, "-p", "main", "--steps", 64, "--trust")
            wait_until(lambda: read_state(league).payoff.record("main", "rock").games > trained, 60)
        finally:
            coordinator.kill()
    assert not read_state(league).players["rock"].quarantine


@pytest.mark.system
def test_league_run_imports_no_copy_without_consent(project: Path, tmp_path: Path) -> None:
    """The file names the script, but a copy in a league of another person may contain anything; so may modules beside it."""
    league, file = tmp_path / "league", project / "league.yaml"
    file.write_text(file.read_text().replace("shapes:make_rps", "ludus/RockPaperScissors-v0"))
    (league / "code").mkdir(parents=True)
    (league / "code" / "bots.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{BOTS}")
    (league / "code" / "helpers.py").write_text(HELPERS)
    (project / "bots.py").unlink()
    refused = ludus(tmp_path / "elsewhere", "run", "-f", file, "--dir", league, code=2)
    assert "bots is not on the import path. The league has a copy" in refused
    assert "add --trust" in refused
    assert not (tmp_path / "ran").exists()
    ludus(tmp_path / "elsewhere", "run", "-f", file, "--dir", league, "--trust")
    assert (tmp_path / "ran").exists()


@pytest.mark.system
def test_a_script_that_is_added_plays_in_a_league_that_runs_elsewhere(project: Path, tmp_path: Path) -> None:
    league, file = tmp_path / "league", tmp_path / "league.yaml"
    data = yaml.safe_load((project / "league.yaml").read_text()) | {"env": "ludus/RockPaperScissors-v0", "players": {"main": {}}}
    data["config"]["num_workers"] = 0
    file.write_text(yaml.safe_dump(data | {"evaluation": {}}))
    LeagueJournal(league, LeagueSettings()).close()
    assert "is a player" in ludus(project, "add", league, "stone", "script:bots:rock")
    ludus(tmp_path / "elsewhere", "run", "-f", file, "--dir", league, "--trust")
    state = read_state(league)
    assert not state.players["stone"].quarantine
    assert state.payoff.record("main", "stone").games == 128


def test_kinds_of_models() -> None:
    assert kind_of_model("rule:random") is ModelKind.RULE
    assert kind_of_model("script:a:b") is ModelKind.SCRIPT
    assert kind_of_model("runs/a@3") is ModelKind.STORED
    assert kind_of_model("http://host:1") is kind_of_model("https://host") is ModelKind.SERVED
    with pytest.raises(UsageError, match="cannot play in training"):
        kind_of_model("x.onnx")


@pytest.fixture
def copied(project: Path, tmp_path: Path, imports: None) -> Path:
    """A league with copies of the scripts, whose originals are gone."""
    league = tmp_path / "league"
    trust.add_project(project)
    sys.path.insert(0, str(project))
    store_code(league, ["bots:rock", "gymnasium:make", "__main__:x", "CartPole-v1"])
    sys.path.remove(str(project))
    project.rename(tmp_path / "moved")
    return league


def test_copies_have_the_modules_of_the_project_that_a_script_imports(copied: Path) -> None:
    assert sorted(path.name for path in (copied / "code").iterdir()) == ["bots.py", "helpers.py"]


def test_copies_run_only_with_consent(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName):
        load_script(None, "script:bots:rock")
    monkeypatch.chdir(copied.parent)  # the directory of a league is not part of the project around it
    with pytest.raises(Untrusted, match="bots is not on the import path"):
        load_script(copied, "script:bots:rock")
    trust.allow("script:bots:rock")
    with pytest.raises(Untrusted, match="add --trust"):  # the name was given, but not the content of the copy
        load_script(copied, "script:bots:rock")
    assert str(copied / league_policies.CODE) not in sys.path
    trust.allow_everything()
    assert load_script(copied, "script:bots:rock")(None, None) == 0
    assert "unused" not in sys.modules


def test_packages_are_copied_with_their_parents(tmp_path: Path, imports: None) -> None:
    package = tmp_path / "project" / "robots" / "simple"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "moves.py").write_text(
        "from robots import rules\nfrom . import names\n\n\ndef rock(observation, mask):\n    return 0\n"
    )
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("import torch\n")
    (package.parent / "rules.py").write_text("")
    (package.parent / "other.py").write_text("")
    trust.add_project(tmp_path / "project")
    sys.path.insert(0, str(tmp_path / "project"))
    store_code(tmp_path, ["robots.simple.moves:rock"])
    code = tmp_path / "code"
    assert sorted(path.relative_to(code).as_posix() for path in code.rglob("*.py")) == [
        "robots/__init__.py", "robots/rules.py", "robots/simple/__init__.py", "robots/simple/moves.py", "robots/simple/names.py",
    ]  # fmt: skip


def test_folders_without_init_are_packages_too(tmp_path: Path, imports: None) -> None:
    folder = tmp_path / "project" / "robots"
    folder.mkdir(parents=True)
    (folder / "moves.py").write_text(
        "import robots.names\nfrom .rules import x\n\n\ndef rock(observation, mask):\n    return x\n"
    )
    (folder / "names.py").write_text("")
    (folder / "rules.py").write_text("x = 0\n")
    trust.add_project(tmp_path / "project")
    sys.path.insert(0, str(tmp_path / "project"))
    store_code(tmp_path, ["robots.moves:rock"])
    code = tmp_path / "code"
    assert sorted(path.relative_to(code).as_posix() for path in code.rglob("*.py")) == [
        "robots/moves.py", "robots/names.py", "robots/rules.py",
    ]  # fmt: skip
