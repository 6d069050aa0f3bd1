"""`ludus config`: what the keys of an experiment mean, and what is wrong with a file of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ludus.errors import ConfigError, StoreError, UsageError

app = typer.Typer(help="Explain keys, check files, convert old ones.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A YAML file with experiments.")]


@app.command()
def explain(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY]…", help="With its section or without: lr, model.use_lstm, num_sgd_iter …", show_default=False
        ),
    ] = None,
) -> None:
    """What a key is, its defaults, its other names, or why it is not here. Without KEY: a list of all."""
    from ludus.experiment import keys as known

    if not keys:
        print("\n".join(known.listed()))
        return
    print("\n\n".join("\n".join(known.explain(key)) for key in keys))


@app.command()
def check(file: File) -> None:
    """Say all that is wrong with a file. Nothing is started."""
    from ludus import config as configs
    from ludus.experiment import complaints
    from ludus.model.custom_class import look_in

    look_in(file.parent)
    wrong = complaints.of_file(file)
    if wrong:
        raise ConfigError("\n".join(wrong))
    names = list(configs.load_experiments(file))
    print(f"{file}: {', '.join(names)}: nothing is wrong.")


@app.command()
def convert(
    file: File,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The new file; may not exist yet.", show_default=False)] = None,
    with_defaults: Annotated[
        bool, typer.Option("--with-defaults", help="Write RLlib's defaults where the file says nothing and ours differ.")
    ] = False,
) -> None:
    """Write an old file in its present form, on the screen or to -o; comments say what became of its keys."""
    from ludus import config as configs
    from ludus.experiment.conversion import convert as modern

    text = modern(configs.load_experiments(file), file.name, with_defaults=with_defaults)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        with out.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError as error:
        raise UsageError(f"{out} is already there.", "Choose another name.") from error
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}.") from error
    print(out)
