"""Options and arguments that several commands have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ludus.cli.run_argument import complete_run, run_place
from ludus.core import trust

AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
ListenPort = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free port.")]
ListenHost = Annotated[str, typer.Option(help="Address to listen on; one beyond this machine requires --token-file.")]

RUN_NAME: dict[str, Any] = {"callback": run_place, "autocompletion": complete_run}
run_argument = functools.partial(typer.Argument, **RUN_NAME)
"""An argument that names a run, also by a short name."""
Run = Annotated[str, run_argument(metavar="RUN", help="Run: its directory or URL, last, EXPERIMENT or the end of its name.")]


def trust_option(option: Callable[..., Any] = typer.Option) -> Any:
    """The option --trust. `option`: the option type of a help panel, from `option_in`."""

    def allow_imports(given: bool) -> bool:
        if given:
            trust.allow_everything()
        return given

    what = "Allow stored runs to import the code they name (environment, wrappers, models)."
    return option("--trust", callback=allow_imports, help=what)
