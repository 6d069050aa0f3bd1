"""The tutorials work: their blocks are run in order, in an empty directory.

`# name.ext` as the first line of a yaml or python block makes it a file; other python blocks and all sh blocks are run. An HTML comment of
the page steers this: `<!-- test: skip REASON -->` leaves out the next block, `<!-- test: port N -->` replaces the port N of the whole
page by a free one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
LIMIT_S = 150.0
_BLOCK = re.compile(
    r"(?:^<!-- test: skip (?P<skip>.+?) -->\n)?^```(?P<language>sh|python|yaml)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_PORT = re.compile(r"^<!-- test: port (\d+) -->$", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:yaml|py))$", re.MULTILINE)
NEEDS = {"arena_self_play": "numba", "league": "pyspiel"}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    skip: str | None

    @property
    def file(self) -> str | None:
        match = _FILE.match(self.text)
        return match[1] if match else None


def blocks(page: str) -> list[Block]:
    for port in _PORT.findall(page):
        page = re.sub(rf"\b{port}\b(?! -->)", str(free_port()), page)
    return [Block(match["language"], match["text"], match["skip"]) for match in _BLOCK.finditer(page)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(block: Block, directory: Path) -> None:
    """Run one block; end what it has left in the background."""
    program = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": binaries, "LUDUS_STATE_DIR": str(directory / "state")}
    with subprocess.Popen(
        [*program, block.text], cwd=directory, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{block.text}\n--- printed ---\n{printed}"


@pytest.mark.system
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tutorial_works_as_printed(page: Path, tmp_path: Path) -> None:
    module = NEEDS.get(page.stem)
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.skip:
            sys.stdout.write(f"{page.name}: left out, {block.skip}:\n{block.text}\n")
        elif block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        else:
            assert block.language != "yaml", f"a yaml block needs a first line '# name.yaml':\n{block.text}"
            run(block, tmp_path)


def test_every_tutorial_has_commands_that_run() -> None:
    assert {page.stem for page in PAGES} == {"arena_self_play", "first_agent", "http_game", "laptop_to_slurm", "league"}
    for page in PAGES:
        found = blocks(page.read_text(encoding="utf-8"))
        assert sum(block.language == "sh" and not block.skip for block in found) >= 2


def test_ports_are_replaced_everywhere_and_files_are_recognised() -> None:
    page = "<!-- test: port 8000 -->\n```yaml\n# a.yaml\nport: 8000\n```\n\n<!-- test: skip why -->\n```sh\nludus serve --port 8000\n```\n"
    file, command = blocks(page)
    assert (file.file, file.skip, command.skip) == ("a.yaml", None, "why")
    assert "8000" not in file.text + command.text
