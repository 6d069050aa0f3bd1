"""`ludus new`: a directory with an environment, a model, an experiment and a test, to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.errors import UsageError


def new(directory: Annotated[Path, typer.Argument(help="Is made; may not exist yet.")]) -> None:
    """Begin a project: environment, model, experiment and test."""
    raise UsageError(f"There is nothing to put into {directory} yet.")
