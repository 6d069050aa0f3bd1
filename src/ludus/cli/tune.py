"""`ludus tune`: many trials of one experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.errors import UsageError


def tune(file: Annotated[Path, typer.Option("-f", "--file", help="A YAML file with experiments.")]) -> None:
    """Sweep over seeds and hyper-parameters."""
    raise UsageError(f"Sweeps ({file}) are not there yet.")
