"""The README is short, and its Python example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


def test_the_table_of_results_has_few_rows_and_names_their_scripts() -> None:
    section = README.read_text(encoding="utf-8").split("## Measured")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert 1 <= len(rows) <= 6
    for row in rows:
        (script,) = re.findall(r"\[`bench\.(\w+)`\]\(bench/results/", row)
        assert (README.parent / "bench" / f"{script}.py").is_file()


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    code = code.replace('"episode_return_mean": 475', '"timesteps": 8000')
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert out.returncode == 0, out.stderr
