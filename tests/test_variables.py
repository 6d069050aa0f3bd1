"""Variables of the environment that the pages name are those that the program reads, or one of its examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAME = re.compile(r"\bLUDUS_[A-Z0-9]+(?:_[A-Z0-9]+)*\b")
SOURCES = [
    *(REPOSITORY / "src").rglob("*.py"),
    *(REPOSITORY / "examples").rglob("*.py"),
    *(REPOSITORY / "clients").rglob("*.cpp"),
    *(REPOSITORY / "clients").rglob("*.cs"),
    *(REPOSITORY / "docker").rglob("*.yaml"),
]
KNOWN = set(NAME.findall("\n".join(path.read_text(encoding="utf-8") for path in SOURCES)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_that_a_page_names_is_one_of_the_program(page: Path) -> None:
    assert set(NAME.findall(page.read_text(encoding="utf-8"))) - KNOWN == set()


def test_there_are_variables_to_be_compared() -> None:
    assert {"LUDUS_STATE_DIR", "LUDUS_MEMORY_PASSWORD"} <= KNOWN
    assert {"LUDUS_STATE_DIR", "LUDUS_MEMORY_PASSWORD"} <= set(NAME.findall("".join(page.read_text() for page in PAGES)))
