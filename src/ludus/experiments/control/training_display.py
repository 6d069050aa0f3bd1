"""Progress display of a training: a live table in a terminal, one updated line in a notebook, an occasional line elsewhere.

Used by the `ludus` command and by the Python API. Everything below `RecentRates` is a pure function of reported numbers.
"""

from __future__ import annotations

import html
import io
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

from ludus.config.schema import StopConfig
from ludus.core.formatting import MISSING, bar, format_duration, format_number, sparkline
from ludus.core.metrics import Numbers
from ludus.experiments.control.bottleneck import describe_bottleneck
from ludus.experiments.runs.run_status import summarize_load

_MATCH = "match/"
_WINS, _JUDGED = "match/win/", "evaluation/win/"
_REDRAWS_PER_S = 4.0
_LINE_EVERY_S = 2.0
_RECENT_S = 10.0
_BAR_WIDTH = 24
_CURVE_WIDTH = 40
_COUNTERS = ("timesteps", "iterations", "training_iteration", "episodes")
_UNITS = {"timesteps": "steps", "iterations": "iterations", "training_iteration": "iterations", "episodes": "episodes"}


class TrainingDisplay:
    """A metrics sink that prints progress, and a context manager. The last state stays on the screen.

    `live`: redraw in place; None: when `stream` is a terminal. Not live, a line is printed every few seconds.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet, self._stream, self._clock = quiet, stream or sys.stdout, clock
        self._is_live = self._stream.isatty() if live is None else live
        self._live: Any = None
        self._stop = StopConfig()
        self._rates = RecentRates()
        self._curve: list[float] = []
        self._last: Numbers = {}
        self._written_at = self._printed_at = -math.inf
        self._is_printed = True

    def __enter__(self) -> TrainingDisplay:
        if not self._quiet and self._is_live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream) if self._stream.isatty() else Console()
            self._live = Live(
                console=console, get_renderable=self.render, refresh_per_second=_REDRAWS_PER_S, vertical_overflow="crop"
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._written_at = math.inf  # stop the clock of the last table
            live.stop()
        elif not self._is_printed:
            self._print_line()

    def begin(self, stop: StopConfig) -> None:
        """Set the stop conditions that progress is measured by."""
        self._stop = stop

    def write(self, numbers: Numbers) -> None:
        if self._quiet:
            return
        evaluated = "evaluation/episodes" in numbers  # its version, and so its counters, may be older
        news = {name: value for name, value in numbers.items() if not (evaluated and name in ("timesteps", "iterations"))}
        if evaluated:
            news["evaluation/timesteps"] = numbers.get("timesteps", math.nan)
        self._last = {**self._last, **news}
        if not evaluated:
            self._rates.add(numbers)
        mean = numbers.get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            self._curve.append(mean)
        now = self._clock()
        self._written_at, self._is_printed = now, False
        # The last report is printed at the end, once, with the evaluation that may follow it.
        if self._live is None and now - self._printed_at > _LINE_EVERY_S and not is_reached(self._stop, self._last):
            self._print_line()

    def close(self) -> None:
        """Does nothing: `__exit__` ends the display."""

    def line(self) -> str:
        """The newest numbers in one line."""
        return progress_line(self._last, self._stop, self._rates)

    def render(self) -> Any:
        """The newest numbers as a table of rich."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in progress_rows(self._current(), self._stop, self._rates, self._curve):
            table.add_row(Text(name), Text(value, style="green" if name in ("progress", "return") else ""))
        return table

    def _current(self) -> Numbers:
        """The last report, with the time that has passed since: an update may take minutes."""
        since = self._clock() - self._written_at
        passed = since if 0 < since < math.inf and "time_s" in self._last else 0.0
        return {**self._last, "time_s": self._last["time_s"] + passed} if passed else self._last

    def _print_line(self) -> None:
        self._printed_at, self._is_printed = self._clock(), True
        if self._last and not self._quiet:
            print(self.line(), file=self._stream, flush=True)


def make_display(progress: bool | None) -> TrainingDisplay | None:
    """A display on standard error, redrawn in place where possible. `progress` None: only in a terminal or a notebook."""
    from rich.console import Console

    if Console().is_jupyter:  # also Colab and the like
        return TrainingDisplay(stream=cast(TextIO, UpdatingOutput(_show_in_cell())), live=False)
    return TrainingDisplay(stream=sys.stderr) if progress or sys.stderr.isatty() else None


def _show_in_cell() -> Callable[[str], None]:
    """Shows a text in the running cell of a notebook, in place of the last one."""
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore] # every notebook has it

    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        shown = HTML(f"<pre>{html.escape(text)}</pre>")
        if handle is None:
            handle = display(shown, display_id=True)
        else:
            handle.update(shown)

    return show


class UpdatingOutput(io.TextIOBase):
    """A text file of which only the last line is shown."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show, self._open = show, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._open = (self._open + text).split("\n")
        if lines:
            self._show(lines[-1])
        return len(text)


class RecentRates:
    """How fast counters grow, per second of training, over the last seconds."""

    def __init__(self, window_s: float = _RECENT_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, numbers: Numbers) -> None:
        counted = {name: numbers[name] for name in _COUNTERS if name in numbers}
        if "time_s" not in numbers or not counted:
            return
        if self._points and numbers["time_s"] < self._points[-1][0]:  # a learner that was restarted from a checkpoint
            self._points.clear()
        self._points.append((numbers["time_s"], counted))
        while len(self._points) > 2 and self._points[1][0] <= numbers["time_s"] - self._window_s:
            self._points.popleft()

    def rate(self, counter: str) -> float:
        """nan: not known yet."""
        if len(self._points) < 2:
            return math.nan
        (then, before), (now, after) = self._points[0], self._points[-1]
        grown = after.get(counter, math.nan) - before.get(counter, math.nan)
        return grown / (now - then) if now > then else math.nan


class StopProgress(NamedTuple):
    """How far a run is towards one of its stop conditions."""

    key: str
    share: float
    text: str
    """`34,000 of 100,000 steps`."""
    left_s: float
    """nan: cannot be estimated."""


def progress_towards_stop(
    stop: StopConfig, numbers: Numbers, rates: RecentRates, first_return: float | None = None
) -> StopProgress | None:
    """Towards the condition that will end the run first, as far as that can be estimated; None: it has none.

    A target return is measured from `first_return`; it counts only where nothing else ends the run, since the time until it is
    reached cannot be estimated.
    """
    found = [_counter_progress(key, getattr(stop, key), numbers, rates) for key in _COUNTERS if getattr(stop, key) is not None]
    if stop.time_s is not None:
        passed = numbers.get("time_s", 0.0)
        text = f"{format_duration(min(passed, stop.time_s))} of {format_duration(stop.time_s)}"
        found.append(StopProgress("time_s", passed / stop.time_s, text, max(0.0, stop.time_s - passed)))
    if found:
        return min(found, key=lambda one: (math.isnan(one.left_s), one.left_s if not math.isnan(one.left_s) else -one.share))
    if stop.episode_return_mean is None:
        return None
    target, mean = stop.episode_return_mean, numbers.get("episode_return_mean", math.nan)
    began = mean if first_return is None else first_return
    share = 1.0 if mean >= target else (mean - began) / (target - began) if began < target else 0.0
    text = f"return {format_number(mean)} of {format_number(target)}"
    return StopProgress("episode_return_mean", 0.0 if math.isnan(share) else share, text, math.nan)


def _counter_progress(key: str, limit: float, numbers: Numbers, rates: RecentRates) -> StopProgress:
    done, rate = numbers.get(key, 0.0), rates.rate(key)
    if math.isnan(rate) and numbers.get("time_s"):
        rate = done / numbers["time_s"]
    left = max(0.0, limit - done)
    left_s = 0.0 if left == 0 else left / rate if rate > 0 else math.nan
    return StopProgress(key, done / limit, f"{done:,.0f} of {limit:,.0f} {_UNITS[key]}", left_s)


def is_reached(stop: StopConfig, numbers: Numbers) -> bool:
    """Whether a stop condition holds, so that this report is the last one of its run."""
    limits = stop.model_dump(exclude_none=True)
    return any(numbers.get(key, -math.inf) >= limit for key, limit in limits.items())


def progress_line(numbers: Numbers, stop: StopConfig, rates: RecentRates) -> str:
    """One line: how far, how fast, how good."""
    towards = progress_towards_stop(stop, numbers, rates)
    counted = [] if towards and towards.key == "timesteps" else [f"{numbers.get('timesteps', 0.0):,.0f} steps"]
    clock = [] if towards and towards.key == "time_s" else [format_duration(numbers.get("time_s"))]
    gauge = [f"{_percent(towards):>5} {bar(towards.share, 10)}", towards.text] if towards else []
    left = [_time_left(towards)] if towards else []
    good = [win_rate(numbers)] if is_zero_sum(numbers) else [wins(numbers), _return(numbers, stop), _evaluation(numbers)]
    parts = (*gauge, *counted, *clock, *left, _speed(numbers, rates), *good)
    return "  ".join(part for part in (*parts, summarize_load(numbers)) if part)


def progress_rows(numbers: Numbers, stop: StopConfig, rates: RecentRates, curve: Sequence[float]) -> Iterable[tuple[str, str]]:
    """(label, text) of every row of the live table."""
    if not numbers:
        yield "progress", "waiting for the first update …"
        return
    towards = progress_towards_stop(stop, numbers, rates, curve[0] if curve else None)
    steps = f"{numbers.get('timesteps', 0.0):,.0f} steps"
    if towards is None:
        yield "progress", f"{steps}; no stop condition, Ctrl-C saves and stops"
    else:
        yield "progress", f"{bar(towards.share, _BAR_WIDTH)} {_percent(towards)}  {towards.text}"
    clock = [format_duration(numbers.get("time_s")), _time_left(towards) if towards else ""]
    yield "time", ", ".join(part for part in clock if part)
    done = "" if towards is None or towards.key == "timesteps" else f"{steps}, "
    yield "speed", f"{done}{_speed(numbers, rates)}, {numbers.get('episodes', 0.0):,.0f} episodes"
    width = min(_CURVE_WIDTH, max(10, shutil.get_terminal_size().columns - 40))
    if is_zero_sum(numbers):
        yield "win rate", win_rate(numbers).removeprefix("win rate ")
        yield from _detail_rows(numbers)
        return
    if won := wins(numbers):
        yield "matches", won
    yield "return", f"{_return(numbers, stop).removeprefix('return ')}  {sparkline(curve, width)}".rstrip()
    if evaluation := _evaluation(numbers):
        at = numbers.get("evaluation/timesteps", math.nan)
        yield "evaluation", evaluation.removeprefix("evaluation ") + ("" if math.isnan(at) else f" at {at:,.0f} steps")
    yield from _detail_rows(numbers)


def _detail_rows(numbers: Numbers) -> Iterable[tuple[str, str]]:
    if results := match_results(numbers):
        yield "", results
    if "learner/version" in numbers and "match/past_version" in numbers:
        newest, past = numbers["learner/version"], numbers["match/past_version"]
        yield "versions", f"newest {newest:.0f}, of opponents from the past {past:.0f}"
    share = numbers.get("learner_share", 0.0)
    if parts := summarize_load(numbers):
        yield "parts", parts
        yield "limit", describe_bottleneck(numbers)
    elif "learner_share" in numbers:
        yield "parts", f"sampling {100 * (1 - share):.0f} %, learning {100 * share:.0f} % of the time"
    losses = {
        "entropy": "entropy",
        "value_loss": "value loss",
        "kl": "KL",
        "explained_variance": "explained variance",
        "td_error_mean": "TD error",
        "q_mean": "mean Q",
        "epsilon": "ε",
    }
    found = [f"{name} {format_number(numbers[f'learner/{key}'])}" for key, name in losses.items() if f"learner/{key}" in numbers]
    if found:
        yield "learner", ", ".join(found)


def _percent(towards: StopProgress) -> str:
    return f"{math.floor(100 * min(1.0, max(0.0, towards.share)) + 1e-9):.0f} %"


def _time_left(towards: StopProgress) -> str:
    return "" if math.isnan(towards.left_s) or towards.left_s == 0 else f"{format_duration(towards.left_s)} left"


def _speed(numbers: Numbers, rates: RecentRates) -> str:
    rate = rates.rate("timesteps")
    rate = numbers.get("fps", math.nan) if math.isnan(rate) else rate
    return f"{MISSING if math.isnan(rate) else f'{rate:,.0f}' if rate >= 10 else format_number(rate)} steps/s"


def _return(numbers: Numbers, stop: StopConfig) -> str:
    mean = numbers.get("episode_return_mean", math.nan)
    target = "" if stop.episode_return_mean is None else f" (stops at {format_number(stop.episode_return_mean)})"
    return f"{'no episode ended yet' if math.isnan(mean) else f'return {format_number(mean)}'}{target}"


def _evaluation(numbers: Numbers) -> str:
    mean = numbers.get("evaluation/return_mean")
    return "" if mean is None else f"evaluation {format_with_interval(mean, numbers, 'evaluation/return')}"


def format_with_interval(mean: float, numbers: Mapping[str, float], name: str) -> str:
    """`0.833 [0.710 to 0.956]`; without the interval where it is not known."""
    low, high = (numbers.get(f"{name}_{side}", math.nan) for side in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return format_number(mean)
    return f"{format_number(mean)} [{format_number(low)} to {format_number(high)}]"


def wins(numbers: Numbers) -> str:
    """Share of won matches against each opponent, in parentheses that of the last evaluation, each with its interval."""
    met, judged = _opponents(numbers, _WINS), _opponents(numbers, _JUDGED)
    shown = []
    for who in dict.fromkeys((*met, *judged)):
        share = [f"{_share(numbers, _WINS + who)} %"] if who in met else []
        share += [f"({_share(numbers, _JUDGED + who)})"] if who in judged else []
        shown.append(" ".join((who, *share)))
    return f"won: {', '.join(shown)}" if shown else ""


def _share(numbers: Numbers, name: str) -> str:
    mean, low, high = (100 * numbers[f"{name}{which}"] for which in ("", "_low", "_high"))
    return f"{mean:.0f} [{low:.0f}–{high:.0f}]"


def is_zero_sum(numbers: Numbers) -> bool:
    """Whether the game is zero-sum: the mean return of its agents is always 0."""
    return bool(numbers.get("zero_sum"))


def win_rate(numbers: Numbers) -> str:
    """Of the last evaluation, with its 95 % interval: `win rate 80 % [58–92] against random, 5 % lost`."""
    return f"win rate {'; '.join(evaluated_win_rates(numbers)) or 'not evaluated yet'}"


def evaluated_win_rates(numbers: Numbers) -> list[str]:
    """Of the last evaluation, one for each opponent: `80 % [58–92] against random, 5 % lost`."""
    return [
        _win_rate(numbers, _JUDGED, who, numbers.get(f"evaluation/loss/{who}", math.nan)) for who in _opponents(numbers, _JUDGED)
    ]


def training_win_rates(numbers: Numbers) -> list[str]:
    """Of the last matches of the training, one for each opponent: `37 % [28–47] against medium`."""
    return [_win_rate(numbers, _WINS, who) for who in _opponents(numbers, _WINS)]


def _win_rate(numbers: Numbers, kind: str, who: str, lost: float = math.nan) -> str:
    mean, low, high = (100 * numbers[f"{kind}{who}{which}"] for which in ("", "_low", "_high"))
    also_lost = "" if math.isnan(lost) else f", {100 * lost:.0f} % lost"
    return f"{mean:.0f} % [{low:.0f}–{high:.0f}] against {who}{also_lost}"


def _opponents(numbers: Numbers, kind: str) -> list[str]:
    return [name.removeprefix(kind).removesuffix("_low") for name in numbers if name.startswith(kind) and name.endswith("_low")]


def match_results(numbers: Numbers) -> str:
    """Means of the other results of the last matches, such as their length."""
    shown = [
        f"{name.removeprefix(_MATCH).replace('_', ' ')} {value:,.{1 if abs(value) < 100 else 0}f}"
        for name, value in numbers.items()
        if name.startswith(_MATCH) and "/" not in name.removeprefix(_MATCH) and name != "match/past_version"
    ]
    return ", ".join(shown)
