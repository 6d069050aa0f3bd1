"""docs/python.md lists the whole Python API, and the pages for users of other libraries name keys that are known."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludus
from ludus.algorithms.base import config_schemas
from ludus.experiments.validation import explain

DOCS = Path(__file__).parent.parent / "docs"
PYTHON = (DOCS / "python.md").read_text(encoding="utf-8")
PAGES = ["from_sb3.md", "from_cleanrl.md", "from_ml_agents.md"]
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| .* \|$", re.MULTILINE)


def blocks(page: str) -> Iterator[str]:
    yield from re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_every_public_name_is_on_the_page() -> None:
    assert [name for name in ludus.__all__ if not re.search(rf"\bludus\.{name}\b", PYTHON) and f"`{name}`" not in PYTHON] == []


@pytest.mark.parametrize("name", ["train", "resume"])
def test_every_argument_is_on_the_page(name: str) -> None:
    parameters = inspect.signature(getattr(ludus, name)).parameters
    assert [each for each in parameters if each not in PYTHON] == []


@pytest.mark.parametrize("method", ["act", "evaluate", "export"])
def test_every_argument_of_an_agent_is_on_the_page(method: str) -> None:
    (shown,) = re.findall(rf"^\| `{method}\((.*?)\)`", PYTHON, re.MULTILINE)
    expected = [name for name in inspect.signature(getattr(ludus.RunAgent, method)).parameters if name != "self"]
    assert [name for name in shown.split(", ") if name != "*"] == expected


def test_every_method_of_a_callback_is_on_the_page() -> None:
    for name, method in inspect.getmembers(ludus.Callback, inspect.isfunction):
        if name.startswith("on_"):
            arguments = ", ".join(list(inspect.signature(method).parameters)[1:])
            assert f"| `{name}({arguments})` |" in PYTHON


@pytest.mark.parametrize("page", ["python.md", *PAGES])
def test_calls_on_the_pages_have_arguments_that_exist(page: str) -> None:
    for block in blocks((DOCS / page).read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "ludus":
                check_arguments(node, getattr(ludus, node.func.attr))


def check_arguments(call: ast.Call, function: object) -> None:
    assert callable(function)
    parameters = inspect.signature(function).parameters
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            assert "settings" in parameters, keyword.arg
            assert explain.explain(keyword.arg), keyword.arg


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_other_libraries_are_known_by_the_names_on_the_page(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = ROW.findall(text.partition("| key of ")[2])
    assert len(rows) > 12
    names = {name.rstrip("_") for schema in config_schemas().values() for name in schema.model_fields}
    names |= set(inspect.signature(ludus.train).parameters)
    for theirs, ours in rows:
        assert explain.explain(theirs), theirs
        for name in re.findall(r"`([\w.]+)`", ours):
            assert name in names or explain.explain(name), name


@pytest.mark.parametrize("page", ["python.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
