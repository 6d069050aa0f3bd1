"""`ludus config`: what the keys of an experiment mean, and what is wrong with a file of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Explain keys, check files, convert old ones.", no_args_is_help=True)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A YAML file with experiments.")]) -> None:
    """Say all that is wrong with a file; nothing is started."""
    from ludus import config as configs

    for name, data in configs.load_experiments(file).items():
        configs.experiment({"name": name, **data})
        print(name)
