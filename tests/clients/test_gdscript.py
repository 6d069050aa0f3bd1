"""The GDScript clients, in the engines themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.contract import Contract, CornerContract, HostileContract, can_be_won_and_lost, environment, makes_no_mistakes
from tests.clients.driving import CLIENTS, DRIVERS, Driver, driver
from tests.tools import need

GDSCRIPT = CLIENTS / "gdscript"


@pytest.fixture(scope="module")
def godot3(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = project(tmp_path_factory.mktemp("godot3"), GDSCRIPT / "ludus.gd", DRIVERS / "driver.gd", 4)
    return [need("godot3-server"), "--path", made, "-s", "driver.gd"]


@pytest.fixture(scope="module")
def godot4(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = project(tmp_path_factory.mktemp("godot4"), GDSCRIPT / "godot4" / "ludus.gd", DRIVERS / "driver4.gd", 5)
    return [need("godot4"), "--headless", "--path", made, "-s", "driver.gd"]


def project(directory: Path, client: Path, script: Path, version: int) -> Path:
    shutil.copy(client, directory / "ludus.gd")
    shutil.copy(script, directory / "driver.gd")
    (directory / "project.godot").write_text(f'config_version={version}\n[application]\nconfig/name="driver"\n')
    return directory


class TestGodot3(Contract, HostileContract, CornerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot3: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot3, environment(tmp_path_factory.mktemp("home")), by_port=True) as driven:
            yield driven


class TestGodot3FrameByFrame(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot3: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot3, environment(tmp_path_factory.mktemp("home")), "async=1", by_port=True) as driven:
            yield driven


class TestGodot4(Contract, HostileContract, CornerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot4: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot4, environment(tmp_path_factory.mktemp("home")), by_port=True) as driven:
            yield driven


class TestGodot4FrameByFrame(Contract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, godot4: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
        with driver(godot4, environment(tmp_path_factory.mktemp("home")), "async=1", by_port=True) as driven:
            yield driven


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    made = tmp_path_factory.mktemp("cartpole") / "game"
    shutil.copytree(GDSCRIPT / "example", made)  # an engine may write into its project
    return [need("godot3-server"), "--path", made, "--fixed-fps", "60", "--url={url}", "--matches=3"]


def test_the_example_is_a_game_that_can_be_won_and_lost(game: list[str | Path], tmp_path: Path) -> None:
    can_be_won_and_lost(*game, home=tmp_path)


def test_the_example_makes_no_mistakes(game: list[str | Path], tmp_path: Path) -> None:
    makes_no_mistakes(*game, home=tmp_path)
