"""The documentation site: every page has a place in the navigation, every link leads somewhere, and MkDocs builds it without warnings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ludus

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
PACKAGES = {path.name for path in Path(ludus.__file__).parent.iterdir() if (path / "__init__.py").is_file()}
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function for the anchors; here it is only a string."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    return loaded


def nav_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from nav_pages(value)
    else:
        for value in entry:
            yield from nav_pages(value)


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors of a page as code hosts and the site make them: from headings, and from `<a id="…">`."""
    text = prose(page)
    counts: Counter[str] = Counter()
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(nav_pages(settings()["nav"]))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    wrong = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert settings()["theme"]["font"] is False
    assert not [page for page in PAGES if re.search(r"!\[[^]]*\]\(https?:", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("image", sorted(DOCS.rglob("*.png")), ids=lambda image: image.name)
def test_pictures_are_small(image: Path) -> None:
    assert image.stat().st_size < 150_000


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    index = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    numbers = []
    for page in sorted((DOCS / "decisions").glob("*.md")):
        for number in re.findall(r'^<a id="decision-(\d+)"></a>$', page.read_text(encoding="utf-8"), re.MULTILINE):
            numbers.append(int(number))
            assert f"({page.name}#decision-{number})" in index
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 55


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_package_is_on_the_page(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert {name for name in PACKAGES if f"`{name}`" not in text} - {"testing"} == set()


def test_folders_of_tests_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(r"`(tests/\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [folder for folder in named if not (ROOT / folder).is_dir()] == []


def test_modules_that_the_design_pages_name_exist() -> None:
    text = "\n".join(prose(page) for page in (DOCS / "architecture.md", *sorted((DOCS / "decisions").glob("*.md"))))
    named = set(re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.[a-z_0-9]+)+)`", text))
    assert len(named) > 15
    assert {name for name in named if not is_importable(name)} == set()


def is_importable(name: str) -> bool:
    """Whether `ludus.name` is a module, or an attribute of one."""
    parts = Path(ludus.__file__).parent.joinpath(*name.split("."))
    inside = parts.parent.with_suffix(".py")
    return (
        parts.is_dir() or parts.with_suffix(".py").is_file() or (inside.is_file() and f"def {parts.name}" in inside.read_text())
    )


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: ludus\.(\w+)$", text, re.MULTILINE))
    assert set(ludus.__all__) - shown - {"LudusError", "Refused", "__version__"} == set()  # the errors are shown by their module


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="MkDocs is installed by `make docs`")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=200)
    assert out.returncode == 0, out.stdout + out.stderr
    commands = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    assert 'id="ludus-train"' in commands
    assert "--num-workers" in commands
    assert 'id="ludus.train"' in (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    assert (tmp_path / "source" / "bench" / "results" / "gateway.html").is_file()
