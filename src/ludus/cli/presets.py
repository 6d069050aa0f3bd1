"""`ludus presets`: experiments that come with the package."""

from __future__ import annotations

import typer

from ludus.errors import UsageError

app = typer.Typer(help="Experiments that come with the package.", no_args_is_help=True)


@app.command("list")
def list_presets() -> None:
    """A table of presets."""
    raise UsageError("There are none yet.")


@app.command()
def show(name: str) -> None:
    """The YAML of a preset."""
    raise UsageError(f"There is no preset {name!r}.")
