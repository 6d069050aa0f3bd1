"""`ludus config`: explain the keys of an experiment, check files, convert old ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.help import HelpApp
from ludus.errors import ConfigError, LudusError, StoreError, UsageError

app = HelpApp(help="Explain config keys, check files, convert old ones.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="YAML file with experiments.")]


@app.command()
def explain(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]…", help="Key, with or without its section: lr, model.use_lstm, num_sgd_iter …"),
    ] = None,
) -> None:
    """Explain a key: meaning, defaults, other names, or why it is not supported. Without KEY, list all keys."""
    from ludus.experiments.validation import explain as known

    if not keys:
        print("\n".join(known.list_keys()))
        return
    print("\n\n".join("\n".join(known.explain(key)) for key in keys))


@app.command()
def check(
    file: File,
    num_gpus: Annotated[float | None, typer.Option(help="Check for training with this option of `ludus train`.")] = None,
) -> None:
    """Print all errors of a file, and the keys that are ignored. Nothing is started.

    A file that passes starts with `ludus train -f FILE` on this machine.
    """
    from ludus.cli.training.config_check import check_file
    from ludus.config.experiment_file import load_experiments
    from ludus.models.custom.loader import add_search_directory

    add_search_directory(file.parent)
    found = check_file(file, {} if num_gpus is None else {"num_gpus": num_gpus})
    for notice in found.notices:
        print(notice)
    if found.errors:
        raise ConfigError("\n".join(found.errors))
    names = list(load_experiments(file))
    print(f"{file}: {', '.join(names)}: no errors.")


@app.command()
def convert(
    file: File,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; it must not exist yet.")] = None,
    with_defaults: Annotated[
        bool,
        typer.Option(
            "--with-defaults", help="Write RLlib's default for every key that the file omits and whose default differs here."
        ),
    ] = False,
) -> None:
    """Rewrite a file with current keys, to the terminal or to -o; comments explain the fate of each key.

    Exit code 1 if a dropped key changes the experiment: the file is still written, and the dropped keys are listed.
    """
    from ludus.config.experiment_file import load_experiments
    from ludus.experiments.validation.convert import convert as modern

    converted = modern(load_experiments(file), file.name, with_defaults=with_defaults)
    _write(converted.text, out)
    if converted.lost:
        keys = "\n".join(converted.lost)
        raise LudusError(f"The converted file differs from the experiment in {file}, because it lacks:\n{keys}")


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        with out.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError as error:
        raise UsageError(f"{out} already exists.", "Choose another name.") from error
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}.") from error
    print(out)
