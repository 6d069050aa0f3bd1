"""MkDocs hooks of the documentation site: the command line reference, and pages for files of the repository that the docs link to.

The docs also work as plain files in the repository, so they link to `../bench/results/gateway.md` or `../examples/atari`. On the site such a
link leads to a generated page below `source/` that shows the file, or the files of the directory.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
CLI_MARKER = "<!-- commands -->"
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)(`{3,})([\w+-]*)[^`]*$")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$")
_ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
_LANGUAGES = {
    ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cpp": "cpp", ".hpp": "cpp", ".cs": "csharp", ".gd": "gdscript",
    ".json": "json", ".toml": "toml", ".sh": "sh", ".cfg": "ini", ".conf": "nginx", ".service": "ini", ".txt": "text",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file or directory outside docs/ that a page links to, and for what those pages link to."""
    waiting = [
        target for file in list(files.documentation_pages()) for target, _ in outside_links(file.src_uri, file.content_string)
    ]
    while waiting:
        target = waiting.pop()
        if files.get_file_from_path(source_page(target)) is not None:
            continue
        content = source_content(ROOT / target)
        files.append(File.generated(config, source_page(target), content=content))
        if target.endswith(".md"):
            waiting += [linked for linked, _ in outside_links(source_page(target), content)]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if CLI_MARKER in markdown:
        markdown = markdown.replace(CLI_MARKER, command_reference())
    for target, written in outside_links(uri, markdown):
        relative = posixpath.relpath(source_page(target), posixpath.dirname(uri) or ".")
        anchor = "#" + written.partition("#")[2] if "#" in written and target.endswith(".md") else ""
        markdown = markdown.replace(f"]({written})", f"]({relative}{anchor})")
    return for_python_markdown(markdown)


def for_python_markdown(markdown: str) -> str:
    """Adapt Markdown as code hosts read it: one word after a fence, their anchors for repeated headings, children of lists by two spaces."""
    lines, anchors, fence, in_list = [], Counter[str](), "", False
    slug = slugify(case="lower")
    for line in markdown.splitlines():
        opened = _FENCE.match(line)
        if not fence and opened:
            line = f"{opened[1]}{opened[2]}{opened[3]}"
            fence = opened[2]
        elif fence and line.strip() == fence:
            fence = ""
        elif not fence and (heading := _HEADING.match(line)):
            name = slug(heading[1], "-")
            if anchors[name]:
                line += f" {{#{name}-{anchors[name]}}}"
            anchors[name] += 1
        if not fence and line and not line.startswith(" "):
            in_list = bool(_ITEM.match(line))
        lines.append(f"  {line}" if in_list and line.startswith("  ") and not line.startswith("    ") else line)
    return "\n".join(lines) + "\n"


# -- files of the repository ---------------------------------------------------------------------------------------------------


def outside_links(uri: str, markdown: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the repository, link as written) for each link of the page at `uri` that leaves docs/."""
    here = original_path(uri)
    for match in _LINK.finditer(markdown):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        if not target.startswith(("docs/", "..")) and (ROOT / target).exists():
            yield target, match[1] + (match[2] or "")


def original_path(uri: str) -> str:
    """The path in the repository of the page at `uri`."""
    if uri.startswith("source/") and uri.endswith(".md"):
        stem = uri.removeprefix("source/").removesuffix(".md")
        return stem + ".md" if (ROOT / f"{stem}.md").is_file() else stem
    return f"docs/{uri}"


def source_page(target: str) -> str:
    return f"source/{target}" if target.endswith(".md") else f"source/{target}.md"


def source_content(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.suffix == ".md":
        return head + docs_links_from_source(name, path.read_text(encoding="utf-8"))
    if path.is_file():
        return f"{head}# {name}\n\n{fenced(path)}"
    shown = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in {*_LANGUAGES, ".md"}]
    parts = [f"## {file.relative_to(path).as_posix()}\n\n{fenced(file)}" for file in shown if "__pycache__" not in file.parts]
    return f"{head}# {name}/\n\n" + "\n".join(parts)


def fenced(path: Path) -> str:
    if path.suffix == ".ipynb":
        return f"A Jupyter notebook: open `{path.relative_to(ROOT).as_posix()}` of the repository."
    text = path.read_text(encoding="utf-8").rstrip("\n")
    fence = "````" if "```" in text else "```"
    return f"{fence}{_LANGUAGES.get(path.suffix, 'text' if path.suffix != '.md' else 'markdown')}\n{text}\n{fence}\n"


def docs_links_from_source(name: str, markdown: str) -> str:
    """Turn links from a file outside docs/ to a page of docs/ into links between pages of the site."""

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))
        if not target.startswith("docs/"):
            return match[0]
        relative = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(source_page(name)))
        return f"]({relative}{match[2] or ''})"

    return _LINK.sub(on_site, markdown)


# -- the command line ----------------------------------------------------------------------------------------------------------


def command_reference() -> str:
    from ludus.cli.main import app

    return "\n".join(command_sections(typer.main.get_command(app), ["ludus"]))


def command_sections(command: Any, words: list[str]) -> Iterator[str]:
    """Yield the Markdown of a command and of its subcommands, depth first."""
    context = command.make_context(words[-1], [], resilient_parsing=True)
    level = min(len(words), 3) + 1 if len(words) > 1 else 2
    yield f"{'#' * level} {' '.join(words)}\n"
    yield f"{plain(command.help)}\n"
    pieces = " ".join(piece for piece in command.collect_usage_pieces(context) if piece)
    yield f"```text\n{' '.join(words)} {pieces}\n```\n"
    yield from parameter_table(command, context)
    for name, sub in getattr(command, "commands", {}).items():
        if not sub.hidden:
            yield from command_sections(sub, [*words, name])


def parameter_table(command: Any, context: Any) -> Iterator[str]:
    """Yield one table for each panel of the help, arguments first."""
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        record = None if getattr(parameter, "hidden", False) else parameter.get_help_record(context)
        if record:
            argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if argument else "Options")
            names = parameter.name.upper() if argument else record[0]
            panels.setdefault(panel, []).append(f"| <code>{escape(names).replace('|', '&#124;')}</code> | {plain(record[1])} |")
    for panel, rows in panels.items():
        yield "\n".join([f"| {panel} | |", "|---|---|", *rows]) + "\n"


def plain(text: str | None) -> str:
    """Help text as one Markdown paragraph: escape what Markdown would read as HTML or emphasis outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join((text or "").split()))
    return "".join(part if part.startswith("`") else re.sub(r"([<>*_\[\]|])", r"\\\1", part) for part in parts)
