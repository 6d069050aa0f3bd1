"""The notebook in examples/ runs from its first cell to its last, as in a fresh kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "python_api.ipynb"


def cells(kind: str) -> list[str]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    """As a script: its classes are in __main__, as those of a notebook are."""
    script = tmp_path / "notebook.py"
    number = "print('the end', score.mean, exported.report.passed, agent.version)"
    script.write_text("\n".join([*cells("code"), number]), encoding="utf-8")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-1].startswith("the end")


def test_links_of_the_notebook_lead_somewhere() -> None:
    for text in cells("markdown"):
        for target in [part.partition(")")[0] for part in text.split("](")[1:]]:
            assert (NOTEBOOK.parent / target).exists(), target


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
