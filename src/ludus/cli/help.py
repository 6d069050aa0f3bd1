"""Help pages with compact option tables; options for other systems' scripts appear only with `--help-all`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

COMPATIBILITY = "Compatibility with RLlib and Coach"
"""Panel of options that exist for scripts written for other systems."""

HELP_ALL = "--help-all"

_SHOW_ALL = "ludus.help_all"
_OTHER_NAMES = frozenset({"--config-file", "--name-env", "--ray-address", "--monitor"})
"""Second names of options, for scripts of other systems."""

_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH"}


class HelpCommand(TyperCommand):
    """A command whose help page leaves out the panel `COMPATIBILITY` and second names of options unless `--help-all` is given."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if not self.epilog and any(_is_compatibility(param) for param in self.params):
            self.epilog = f"{HELP_ALL} also shows the options for scripts written for RLlib and Coach."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if HELP_ALL in args[: args.index("--") if "--" in args else None]:
            ctx.meta[_SHOW_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        show_all, params = ctx.meta.get(_SHOW_ALL, False), self.params
        self.params = [_compact(param, keep_names=show_all) for param in params if show_all or not _is_compatibility(param)]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = params


class HelpApp(typer.Typer):
    """`typer.Typer` whose commands are `HelpCommand`s."""

    def command(self, name: str | None = None, **keywords: Any) -> Callable[[Any], Any]:
        keywords.setdefault("cls", HelpCommand)
        return super().command(name, **keywords)


def option_in(panel: str) -> Callable[..., Any]:
    """`typer.Option` for the options of one panel of a help page."""
    return functools.partial(typer.Option, rich_help_panel=panel)


def _is_compatibility(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) == COMPATIBILITY


def _compact(param: Any, keep_names: bool) -> Any:
    """Return a copy of a parameter for display: a short name for its type, no default `None`, and without second names."""
    compact = copy.copy(param)
    if param.default is None:  # older versions of Typer show it
        compact.show_default = False
    if not isinstance(param, TyperOption):
        return compact
    if param.is_flag or param.count:
        vars(compact).update(metavar="", show_default=param.show_default and not param.count)
    elif param.metavar is None and hasattr(param, "bare_type"):  # not in every version of Typer
        compact.metavar = _METAVARS.get(str(param.bare_type()))
    if hasattr(param, "min"):  # otherwise Typer prints the range next to the type
        vars(compact).update(min=None, max=None)
    names = param.opts if keep_names else [name for name in param.opts if not _is_second_name(name)]
    compact.opts = names if any(name.startswith("--") for name in names) else param.opts
    return compact


def _is_second_name(name: str) -> bool:
    """Whether another system uses this name: `--snake_case`, or a single dash before several letters."""
    return name in _OTHER_NAMES or "_" in name or (not name.startswith("--") and len(name) > 2)
