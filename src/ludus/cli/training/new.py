"""`ludus new`: create a project with an environment, a model, an experiment and a test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new(
    directory: Annotated[Path, typer.Argument(help="Directory of the project; existing files are not overwritten.")],
    env: Annotated[
        str | None, typer.Option(help="Environment to train on (a Gymnasium id or module:function) instead of a generated one.")
    ] = None,
) -> None:
    """Create a project with an environment, a model, an experiment and a test."""
    from ludus.cli.output import runnable, say
    from ludus.experiments.source.scaffold import scaffold

    for path in scaffold(directory, env):
        say(f"wrote  {path}")
    say(f"then   cd {directory} && {runnable('ludus')} train -f experiment.yaml")
