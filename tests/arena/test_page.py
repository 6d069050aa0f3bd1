"""docs/arena.md says what the code does."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import yaml

from ludus.games.arena.gym import ArenaVectorEnv
from ludus.games.arena.layout import BUTTONS, HEADS
from ludus.games.arena.observe import ENTITY_FEATURES, SCALAR_FEATURES
from ludus.games.arena.seats import Options
from ludus.games.arena.settings import PARTS, USUAL

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "arena.md").read_text(encoding="utf-8")


def test_the_tables_are_what_the_code_says() -> None:
    filled = runpy.run_path(str(ROOT / "scripts" / "arena_page.py"))["filled"]
    assert filled(TEXT) == TEXT, "docs/arena.md is outdated: run  python scripts/arena_page.py"
    for i, name in enumerate(ENTITY_FEATURES):
        assert f"{i} `{name}`" in TEXT
    for i, name in enumerate(SCALAR_FEATURES):
        assert f"{i} `{name}`" in TEXT
    assert all(f"| `{part}` |" in TEXT for part in PARTS)


def test_buttons_and_parts_of_an_action_are_named_as_they_are() -> None:
    assert ", ".join(f"{i} {name}" for i, name in enumerate(BUTTONS)) in TEXT
    assert [found for found in re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) if found in HEADS] == list(HEADS)


def test_every_keyword_of_the_environments_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", TEXT.split("| keyword | |")[1].split("\n\n")[0]))
    keywords = {field.name for field in fields(Options)} | {"render_mode", "render_width"}
    assert keywords - {"mode"} <= explained, keywords - explained


def test_its_example_can_be_trained_on() -> None:
    example = yaml.safe_load(TEXT.split("```yaml")[1].split("```")[0])["arena"]
    ArenaVectorEnv(2, **example["config"]["env_config"])
    ArenaVectorEnv(2, **example["config"]["evaluation_config"]["env_config"])
    assert set(USUAL) == {1, 3}  # the usual line-ups that the page names
