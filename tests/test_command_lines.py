"""Whatever the pages tell people to type: such a command exists, and so do its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from ludus.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_TYPED = re.compile(r"(?:^ *|[;&|] *)(?:\$ )?ludus (?!\.)(.*)")
_END = re.compile(r" [#;&|>]|\s+…|\)$")
LUDUS: Any = typer.main.get_command(app)


def typed(page: Path) -> list[list[str]]:
    found = []
    for _, language, block in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if match := _TYPED.search(line):
                said = _END.split(match[1], maxsplit=1)[0]
                try:
                    found.append(shlex.split(said))
                except ValueError:  # a quotation that goes on in the next line
                    found.append(said.split())
    return found


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def complaint(words: list[str]) -> str:
    """What is wrong with it; nothing: empty."""
    command, rest = LUDUS, list(words)
    known = options_of(command)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"there is no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
        known = options_of(command)
    if command.context_settings.get("ignore_unknown_options"):  # it hands them on
        known |= options_of(LUDUS.commands["train"])
    for word in rest:
        if word == "--":
            break
        name = word.split("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", name) and name not in known and name not in {n.replace("_", "-") for n in known}:
            return f"{' '.join(words[: len(words) - len(rest)])} has no option {name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_the_page_exist_with_their_options(page: Path) -> None:
    wrong = {f"ludus {' '.join(words)}": why for words in typed(page) if (why := complaint(words))}
    assert wrong == {}


def test_enough_is_found_to_be_worth_it() -> None:
    assert sum(len(typed(page)) for page in PAGES) > 150
    assert complaint(["battle", "a", "b", "--vdieo", "1"]) == "battle has no option --vdieo"
    assert complaint(["gamecor", "serve"]) == "there is no command 'gamecor'"
