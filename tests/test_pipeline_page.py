"""What docs/pipeline.md shows can be typed: files are experiments, keys are those of the environment, line-ups are line-ups."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.config.schema import ExperimentConfig
from ludus.envs.opponents.lineups import Lineups
from ludus.gamecore.game_spec import KEYS
from ludus.gamecore.vector_env import GamecoreVectorEnv
from ludus.games.arena.engine.heroes import IDS

PAGE = (Path(__file__).parents[1] / "docs" / "pipeline.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
EXPERIMENTS = [yaml.safe_load(block) for block in BLOCKS if "env: gamecore" in block]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: next(iter(experiment)))
def test_experiments_on_the_page_are_accepted_and_their_environments_made(experiment: dict[str, Any]) -> None:
    (name, data), *_ = experiment.items()
    ExperimentConfig.model_validate({"name": name, **data})
    config = data["config"]
    env = GamecoreVectorEnv(config["num_envs_per_worker"], **config["env_config"])
    env.reset(seed=0)
    env.close()


def test_the_first_example_plays_the_stated_number_of_matches() -> None:
    config = EXPERIMENTS[0]["arena"]["config"]
    env = GamecoreVectorEnv(config["num_envs_per_worker"], **config["env_config"])
    kinds = [slot.kind for slot in env.slots]
    assert (
        f"here {kinds.count('self')} against itself, which take two rows each, and {kinds.count('past')} against the past" in PAGE
    )


def test_every_lineup_on_the_page_is_one() -> None:
    block = next(block for block in BLOCKS if "roundrobin" in block)
    lines = [yaml.safe_load(line)["lineup"] for line in block.splitlines()]
    assert len(lines) == 5
    for lineup in lines:
        Lineups(lineup, 1, IDS)


def test_the_keys_on_the_page_are_those_of_the_environment() -> None:
    section = PAGE.split("## `env_config` of `gamecore`")[1].split("\n\n")[1]
    named = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in section.splitlines())))
    own = set(inspect.signature(GamecoreVectorEnv).parameters) - {"num_envs", "keywords"}
    assert named == own | {"opponent", "side", "lineup"}
    section = PAGE.split("## Your own game")[1].split("| key | |")[1].split("\n\n")[0]
    named |= set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in section.splitlines() if line.count("|") > 1)))
    assert set(KEYS) <= named
