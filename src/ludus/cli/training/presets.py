"""`ludus presets`: list and print the experiments that come with the package."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ludus.cli.help import HelpApp
from ludus.cli.output import make_table

app = HelpApp(help="List and show the experiments that come with the package.", no_args_is_help=True)


@app.command("list")
def list_presets(json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the presets with the return that each reaches and the steps it takes."""
    from rich.console import Console

    from ludus.experiments.source import preset_index

    found = [preset_index.read_summary(name) for name in preset_index.names()]
    others, missing = preset_index.coach_presets(), preset_index.unsupported_coach_presets()
    if json_:
        rows = [asdict(item) | {"target": item.target.model_dump()} for item in found]
        rows += [asdict(other) | {"target": other.target and other.target.model_dump()} for other in others]
        rows += [{"name": name, "missing": why.why, "instead": why.instead} for name, why in missing.items()]
        print(json.dumps(rows))
        return
    table = make_table(("name", "run", "return", "within", ""), right=("return", "within"), wrapped=("",), header_style=None)
    for item in found:
        table.add_row(item.name, item.run, f"{item.target.return_mean:g}", f"{item.target.timesteps:,}", item.description)
    table.add_section()
    for other in others:
        reached = (f"{other.target.return_mean:g}", f"{other.target.timesteps:,}") if other.target else ("", "")
        levels = f"-lvl {' | '.join(other.levels[:2])} … ({len(other.levels)})" if other.levels else f"like {other.preset}"
        table.add_row(other.name, other.run, *reached, levels)
    console = Console()
    console.print(table)
    console.print(
        f"\nThe second part lists preset names of Coach. {len(missing)} more of them have no equivalent; using one names the nearest preset.\n"
        "ludus train -p NAME trains a preset; ludus presets show NAME > mine.yaml copies one to edit.",
        style="dim",
        soft_wrap=True,
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of the preset, see `ludus presets list`.")],
    level: Annotated[str | None, typer.Option("-lvl", "--level", help="Environment, for a preset that supports several.")] = None,
) -> None:
    """Print the YAML of a preset."""
    from ludus.experiments.source import preset_index
    from ludus.io.yaml_documents import dump_yaml

    if level is None and name in preset_index.names():
        print(preset_index.preset(name).read_text(encoding="utf-8"), end="")
    else:
        print(dump_yaml(preset_index.experiments(name, level)), end="")
