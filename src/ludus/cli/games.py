"""`ludus games`: the games that come with Ludus."""

from __future__ import annotations

import typer

app = typer.Typer(help="Games that come with Ludus: their matches, pictures and films.", no_args_is_help=True)
arena = typer.Typer(help="The Arena, a lane battle of two teams.", no_args_is_help=True)
app.add_typer(arena, name="arena")


@app.callback()
def _games() -> None:
    pass


@arena.callback()
def _arena() -> None:
    pass
