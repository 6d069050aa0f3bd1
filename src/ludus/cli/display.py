"""The live display of a training: one table on a terminal, an occasional line everywhere else."""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ludus.experiment.status import bottleneck as bottleneck
from ludus.experiment.status import summary
from ludus.metrics import Numbers

_MATCH = "match/"
_WINS, _JUDGED = "match/win/", "evaluation/win/"
_REDRAW_S = 0.1
_LINE_EVERY_S = 2.0
_COUNTERS = ("timesteps", "iterations")
_BLOCKS = " ▁▂▃▄▅▆▇█"


def say(text: str, *, to_stderr: bool = False) -> None:
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def here(command: str) -> str:
    """A command as it can be typed now: with its path when its folder is not on PATH."""
    if shutil.which(command):
        return command
    beside = Path(sys.argv[0]).parent / command
    return str(beside) if beside.exists() else command


class Display:
    """A metrics sink for people. Leaves the last state on the screen."""

    def __init__(self, *, quiet: bool = False, to_stderr: bool = False) -> None:
        self._quiet, self._stream = quiet, sys.stderr if to_stderr else sys.stdout
        self._live: Any = None
        self._drawn = 0.0
        self._curve: list[float] = []
        self._last: Numbers = {}

    def __enter__(self) -> Display:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            if self._last:
                self._live.update(self._table(), refresh=True)
            self._live.stop()
        elif self._last and not self._quiet:
            print(self._line(), file=self._stream, flush=True)

    def write(self, numbers: Numbers) -> None:
        if self._quiet:
            return
        late = _COUNTERS if "evaluation/episodes" in numbers else ()  # it may be of an earlier version
        self._last = {**self._last, **{name: value for name, value in numbers.items() if name not in late}}
        mean = numbers.get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            self._curve.append(mean)
        now = time.monotonic()
        if self._live is not None:
            if now - self._drawn > _REDRAW_S:
                self._drawn = now
                self._live.update(self._table(), refresh=True)
        elif now - self._drawn > _LINE_EVERY_S:
            self._drawn = now
            print(self._line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Sinks are closed with the run; the screen is left by `__exit__`."""

    def _line(self) -> str:
        n = self._last
        mean = n.get("episode_return_mean")
        shown = "–" if mean is None else f"{mean:.1f}"
        line = f"{n['time_s']:7.1f} s  {int(n['timesteps']):>10,} steps  {n['fps']:>8,.0f} steps/s  return {shown}"
        return "  ".join(part for part in (line, wins(n), summary(n)) if part)

    def _table(self) -> Any:
        from rich.table import Table

        n = self._last
        table = Table.grid(padding=(0, 2))
        mean = n.get("episode_return_mean")
        table.add_row(
            "[bold]return[/]", "–" if mean is None else f"[bold green]{mean:.1f}[/]", f"[green]{sparkline(self._curve, 40)}[/]"
        )
        table.add_row("steps", f"{int(n['timesteps']):,}", f"{n['fps']:,.0f} steps/s, {int(n['episodes']):,} episodes")
        share = 100 * n.get("learner_share", 0.0)
        parts = summary(n)
        table.add_row("time", f"{n['time_s']:.1f} s", parts or f"sampling {100 - share:.0f} %, learning {share:.0f} %")
        if wins(n):
            table.add_row("matches", "", wins(n))
        if told(n):
            table.add_row("", "", told(n))
        if "learner/version" in n and "match/past_version" in n:
            table.add_row(
                "versions", "", f"newest {n['learner/version']:.0f}, of opponents from the past {n['match/past_version']:.0f}"
            )
        if parts:
            table.add_row("limit", "", bottleneck(n))
        if "learner/entropy" in n:
            losses = f"value loss {n['learner/value_loss']:.3g}, KL {n['learner/kl']:.4f}, explained variance {n['learner/explained_variance']:.2f}"
            table.add_row("entropy", f"{n['learner/entropy']:.3f}", losses)
        return table


def wins(numbers: Numbers) -> str:
    """Against whom how many of the last matches were won, and in brackets how many of an evaluation; each with its interval."""
    met, judged = (
        [name.removeprefix(kind).removesuffix("_low") for name in numbers if name.startswith(kind) and name.endswith("_low")]
        for kind in (_WINS, _JUDGED)
    )
    shown = []
    for who in dict.fromkeys((*met, *judged)):
        share = [f"{_share(numbers, _WINS + who)} %"] if who in met else []
        share += [f"({_share(numbers, _JUDGED + who)})"] if who in judged else []
        shown.append(" ".join((who, *share)))
    return f"won: {', '.join(shown)}" if shown else ""


def _share(numbers: Numbers, name: str) -> str:
    mean, low, high = (100 * numbers[f"{name}{which}"] for which in ("", "_low", "_high"))
    return f"{mean:.0f} [{low:.0f}–{high:.0f}]"


def told(numbers: Numbers) -> str:
    """What else the last matches said, in the mean: how long they took, and what became of heroes."""
    shown = [
        f"{name.removeprefix(_MATCH).replace('_', ' ')} {value:,.{1 if abs(value) < 100 else 0}f}"
        for name, value in numbers.items()
        if name.startswith(_MATCH) and "/" not in name.removeprefix(_MATCH) and name != "match/past_version"
    ]
    return ", ".join(shown)


def sparkline(values: list[float], width: int) -> str:
    """The whole history squeezed into `width` characters."""
    if len(values) < 2:
        return ""
    stride = max(1, math.ceil(len(values) / width))
    points = [values[min(i + stride, len(values)) - 1] for i in range(0, len(values), stride)]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[1 + round((p - low) / span * (len(_BLOCKS) - 2))] for p in points)
