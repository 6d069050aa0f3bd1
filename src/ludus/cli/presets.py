"""`ludus presets`: experiments that come with the package."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

app = typer.Typer(help="Experiments that come with the package.", no_args_is_help=True)


@app.command("list")
def list_presets(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What there is, and the return that each reaches within so many steps."""
    from rich.console import Console
    from rich.table import Table

    from ludus.experiment import gallery

    found = [gallery.summary(name) for name in gallery.names()]
    if json_:
        print(json.dumps([asdict(item) | {"target": item.target.model_dump()} for item in found]))
        return
    table = Table(box=None, pad_edge=False)
    for heading, side in (("name", "left"), ("run", "left"), ("return", "right"), ("within", "right"), ("", "left")):
        table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=heading != "")
    for item in found:
        table.add_row(item.name, item.run, f"{item.target.return_mean:g}", f"{item.target.timesteps:,}", item.description)
    console = Console()
    console.print(table)
    console.print(
        "\nludus train -p NAME trains one; ludus presets show NAME > mine.yaml is a beginning for your own.", style="dim"
    )


@app.command()
def show(name: Annotated[str, typer.Argument(help="As `ludus presets list` says.")]) -> None:
    """The YAML of a preset."""
    from ludus.experiment import gallery

    print(gallery.preset(name).read_text(encoding="utf-8"), end="")
