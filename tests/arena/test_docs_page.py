"""docs/arena.md matches the code."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

import gymnasium as gym
import yaml
from typer.main import get_command

from ludus.cli.games.games import arena
from ludus.core.spaces import ACTION_MASK, from_json
from ludus.gamecore.server import catalogue
from ludus.games.arena.engine.layout import BUTTONS, HEADS
from ludus.games.arena.engine.observations import ENTITY_FEATURES, SCALAR_FEATURES
from ludus.games.arena.engine.settings import PARTS, USUAL
from ludus.games.arena.env.gym_env import ArenaVectorEnv
from ludus.games.arena.env.seats import ArenaOptions, action_space, observation_space
from ludus.games.arena.host import match

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "arena.md").read_text(encoding="utf-8")


def test_the_tables_match_the_code() -> None:
    filled = runpy.run_path(str(ROOT / "scripts" / "arena_page.py"))["filled"]
    assert filled(TEXT) == TEXT, "docs/arena.md is outdated: run  python scripts/arena_page.py"
    for i, name in enumerate(ENTITY_FEATURES):
        assert f"{i} `{name}`" in TEXT
    for i, name in enumerate(SCALAR_FEATURES):
        assert f"{i} `{name}`" in TEXT
    assert all(f"| `{part}` |" in TEXT for part in PARTS)


def test_buttons_and_heads_have_the_names_of_the_code() -> None:
    assert ", ".join(f"{i} {name}" for i, name in enumerate(BUTTONS)) in TEXT
    assert [found for found in re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) if found in HEADS] == list(HEADS)


def test_every_keyword_of_the_environments_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", TEXT.split("| keyword | |")[1].split("\n\n")[0]))
    keywords = {field.name for field in fields(ArenaOptions)} | {"render_mode", "render_width"}
    assert keywords - {"mode"} <= explained, keywords - explained


def test_every_option_of_the_process_is_explained_and_offered_by_the_server() -> None:
    explained = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|", TEXT.split("| option | |")[1].split("\n\n")[0], re.M)))
    )
    weights = {f"weight_{part}" for part in PARTS}
    assert explained | weights == set(catalogue.read().games["arena"].options)
    assert explained - weights == match.HostOptions.__dataclass_fields__.keys() - {"weights"}


def test_every_command_on_the_page_exists() -> None:
    known = get_command(arena)
    for name, rest in re.findall(r"^ludus games arena (\w+)([^#\n]*)", TEXT, re.MULTILINE):
        options = {option for parameter in known.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, name


def test_the_ladder_on_the_page_matches_the_committed_results() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "arena-ladder.json").read_text())["rows"]
    for first, second in {(row["first"], row["second"]) for row in rows if row["first"] != row["second"]}:
        found = {row["mode"]: row for row in rows if (row["first"], row["second"]) == (first, second)}
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| `{first}` against `{second}` |"))
        for mode, cell in zip(("1v1", "3v3"), line.split("|")[2:4], strict=True):
            assert cell.split("%")[0].strip() == f"{100 * found[mode]['rate']:.0f}"


def test_the_example_actor_has_the_spaces_of_the_arena() -> None:
    example = yaml.safe_load((ROOT / "examples" / "gamecore" / "arena.yaml").read_text())["arena_http"]
    (seat,) = example["config"]["env_config"]["seats"].values()
    seen = {name: part for name, part in observation_space(1).spaces.items() if name != ACTION_MASK}
    space = from_json(seat["observation_space"])
    assert isinstance(space, gym.spaces.Dict)
    assert {name: (type(part), part.shape) for name, part in space.items()} == {
        name: (type(part), part.shape) for name, part in seen.items()
    }
    for name in ("entities", "scalars"):  # the example has two numbers: the widest bounds
        mine, theirs = space[name], seen[name]
        assert isinstance(mine, gym.spaces.Box)
        assert isinstance(theirs, gym.spaces.Box)
        assert (mine.low.min(), mine.high.max()) == (theirs.low.min(), theirs.high.max())
    assert from_json(seat["action_space"]) == action_space(1)


def test_the_training_example_runs() -> None:
    example = yaml.safe_load(TEXT.split("```yaml")[1].split("```")[0])["arena"]
    ArenaVectorEnv(2, **example["config"]["env_config"])
    ArenaVectorEnv(2, **example["config"]["evaluation_config"]["env_config"])
    assert set(USUAL) == {1, 3}  # the default line-ups on the page
