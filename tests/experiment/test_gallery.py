"""The presets: each of them is an experiment that could start now, and says what it reaches."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus import config as configs
from ludus.cli import presets
from ludus.errors import UnknownName
from ludus.experiment import experiment, gallery

ISSUED = {
    "acrobot",
    "breakout",
    "cartpole",
    "cartpole-lstm",
    "doom-basic",
    "halfcheetah",
    "hopper",
    "hybrid",
    "lunarlander",
    "masked",
    "mountaincar-continuous",
    "pong",
}
PUBLISHED = {"cartpole": (490, 100_000), "cartpole-lstm": (450, 100_000), "lunarlander": (230, 1_000_000)} | {
    "halfcheetah": (2000, 1_000_000),
    "hopper": (2200, 1_000_000),
}


def test_the_gallery_is_whole() -> None:
    assert set(gallery.names()) >= ISSUED


@pytest.mark.parametrize("name", gallery.names())
def test_a_preset_is_an_experiment_with_a_target_within_its_stop(name: str) -> None:
    ((key, data),) = configs.load_experiments(gallery.preset(name)).items()
    assert key == name
    about = gallery.summary(name)
    assert about.description
    for module, family in (("ale_py", "NoFrameskip"), ("vizdoom", "Vizdoom"), ("mpe2", "mpe2/"), ("pettingzoo", "pettingzoo/")):
        if about.env.startswith(family) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    resolved = experiment.resolve({"name": key, **data})
    assert resolved.experiment.stop.timesteps == about.target.timesteps
    if name in PUBLISHED:
        assert (about.target.return_mean, about.target.timesteps) == PUBLISHED[name]


def test_a_preset_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"no preset 'cartpol'.*'cartpole'"):
        gallery.preset("cartpol")
    with pytest.raises(UnknownName):
        gallery.preset("../gallery")


def test_presets_are_listed_and_shown_on_the_command_line(tmp_path: Path) -> None:
    listed = CliRunner().invoke(presets.app, ["list", "--json"])
    assert {item["name"] for item in json.loads(listed.output)} == set(gallery.names())
    table = CliRunner().invoke(presets.app, ["list"])
    assert all(name in table.output for name in gallery.names())
    shown = CliRunner().invoke(presets.app, ["show", "hybrid"])
    copied = tmp_path / "mine.yaml"
    copied.write_text(shown.output)
    assert configs.load_experiments(copied)["hybrid"]["env"] == "ludus.game.toys:golf"
