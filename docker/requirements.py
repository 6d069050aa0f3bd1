"""Print the requirements of the package and of some of its extras, so that an image layer depends on pyproject.toml alone.

python requirements.py redis s3                 the dependencies of ludus[redis,s3]; the extras may also be one word: "redis s3"
python requirements.py arena --without torch    the same without torch, for programs that do not import it
python requirements.py atari --extras-only      what an extra adds
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(project: dict, extras: Sequence[str], without: Sequence[str] = (), *, extras_only: bool = False) -> list[str]:
    """Raises SystemExit for an extra or a package that pyproject.toml does not have."""
    known = project["optional-dependencies"]
    if unknown := sorted(set(extras) - known.keys()):
        raise SystemExit(f"pyproject.toml has no extra {', '.join(unknown)}; it has {', '.join(known)}.")
    lines = [*([] if extras_only else project["dependencies"]), *(line for extra in extras for line in known[extra])]
    if absent := sorted(set(without) - {package_of(line) for line in lines}):
        raise SystemExit(f"--without {', '.join(absent)}: not among the requirements.")
    return [line for line in lines if package_of(line) not in without]


def package_of(requirement: str) -> str:
    """The name in `name[extra]>=1; marker`."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise SystemExit(f"{requirement!r} is not a requirement.")
    return found[0].lower()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--extras-only", action="store_true")
    parser.add_argument("--project", type=Path, default=Path("pyproject.toml"))
    given = parser.parse_args(argv)
    project = tomllib.loads(given.project.read_text(encoding="utf-8"))["project"]
    extras = " ".join(given.extras).split()
    sys.stdout.write("\n".join(requirements(project, extras, given.without, extras_only=given.extras_only)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
