"""Comparing runs: which of them differ only in their seed, how well each such group does, and whether that is more than chance."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.core.statistics import Difference, confidence_interval, difference
from ludus.errors import ConfigError, UsageError
from ludus.experiments.runs.plot import Curve
from ludus.experiments.runs.remote_runs import is_remote, shown
from ludus.experiments.runs.run_dir import Run, began, is_script
from ludus.experiments.runs.tracking import flat

AUTO = "auto"
"""Groups of runs that differ in nothing but the seed."""

SEED = "config.seed"
EXECUTION = frozenset(
    f"config.{key}"
    for key in (
        "num_workers", "blocks_ahead", "num_learners", "gradient_accumulation", "learner_threads", "torch_threads",
        "learner_device", "inference_device", "num_gpus", "restart_failed_sub_environments", "max_worker_restarts",
        "worker_restart_backoff_s", "worker_hang_s", "evaluation_interval", "evaluation_interval_unit", "evaluation_duration",
        "evaluation_duration_unit", "evaluation_num_workers", "evaluation_video", "min_time_s_per_iteration",
    )
)  # fmt: skip
"""Settings of how a run is executed and observed. They do not define the experiment: runs that differ in them are repetitions."""

_FRAGMENT = "config.rollout_fragment_length"
_SHARES_OF_BATCH = ("num_workers", "num_envs_per_worker", "rollout_fragment_length", "train_batch_size")
_OTHER_NAMES = {"algorithm": "run"}
_NOT_SETTINGS = {"name", SEED}
_AS_LONG = 0.9
"""Of several runs with one seed the newest counts among those that are at least so long, as a share of the longest."""

_FINAL = 0.1
"""The end of a training is its last tenth."""

_FEWEST = 3
_LONGEST_LABEL = 80


# -- settings ------------------------------------------------------------------------------------------------------------


def settings_of(run: Path) -> dict[str, Any]:
    """Everything that a run was made with, by path: name, env, run, config.lr … A script says nothing of that."""
    if is_script(run):
        return {"name": run.parent.name, "env": None, "run": "script", "trial": run.name}
    data = Run(run).config()
    return {"name": data["name"], "env": data.get("env"), "run": data.get("run"), **flat({"config": data.get("config", {})})}


def all_settings(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Of every run. A key that another version did not have yet counts as what all others of the same algorithm say."""
    found = [settings_of(run) for run in runs]
    for algorithm in {one["run"] for one in found}:
        alike = [one for one in found if one["run"] == algorithm]
        for key in {key for one in alike for key in one}:
            present = {json.dumps(one[key]) for one in alike if key in one}
            if len(present) == 1:
                for one in alike:
                    one.setdefault(key, json.loads(next(iter(present))))
    return found


def defining(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that define the experiment, the seed included: environment, algorithm and what it learns with.

    A `rollout_fragment_length` that only shares the batch between the workers there are is left out, as their number is.
    """
    kept = {key: value for key, value in settings.items() if key not in EXECUTION and key != "name"}
    workers, envs, fragment, batch = (settings.get(f"config.{key}") for key in _SHARES_OF_BATCH)
    if (
        isinstance(envs, int)
        and isinstance(fragment, int)
        and isinstance(workers, int)
        and batch == max(1, workers) * envs * fragment
    ):
        kept[_FRAGMENT] = None
    return kept


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all of them."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key)) for one in settings}) > 1]


# -- groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOut:
    """A run that does not count, since another one of its group has the same seed: it would count the same draw twice."""

    run: Path
    instead: Path
    why: str


@dataclass(frozen=True)
class Group:
    """Runs that are repetitions of one another, in one environment."""

    label: str
    curves: tuple[Curve, ...]
    left_out: tuple[LeftOut, ...] = ()
    env: str | None = None
    notes: tuple[str, ...] = ()


def grouped(curves: Sequence[Curve], by: str = AUTO) -> list[Group]:
    """`by`: auto, or keys such as lr, config.lr, name, env, algorithm, joined by commas. Oldest group first. Raises ConfigError.

    Runs of different environments are never in one group.
    """
    runs = [c.run for c in curves]
    settings = dict(zip(runs, all_settings(runs), strict=True))
    core = {run: defining(one) for run, one in settings.items()}
    differ = differing(list(core.values()))
    if by == AUTO:
        keys = [key for key in differ if key not in _NOT_SETTINGS]
        labelled = _shown_keys(list(core.values()), keys, differ, automatic=True)
    else:
        asked = _keys(by, list(settings.values()))
        keys = list(dict.fromkeys(["env", *asked]))
        apart = {json.dumps([one.get(key) for key in keys]) for one in settings.values()}
        alike = {json.dumps([one.get(key) for key in asked]) for one in settings.values()}
        every = differing(list(settings.values()))  # the environment is named where the asked keys do not tell groups apart
        labelled = _shown_keys(list(settings.values()), keys if len(apart) > len(alike) else asked, every, automatic=False)
    found: dict[str, list[Curve]] = {}
    for c in curves:
        source = core[c.run] if by == AUTO else settings[c.run]
        found.setdefault(json.dumps({key: source.get(key) for key in keys}), []).append(c)
    groups: list[Group] = []
    for text, members in found.items():
        first = settings[members[0].run]
        label = _unique(_label(json.loads(text), labelled[first["env"], first["run"]], first), [g.label for g in groups])
        kept, left_out = _one_per_seed(members, {c.run: _draw_of(c.run, core[c.run]) for c in members})
        notes = _execution_note(label, [settings[c.run] for c in kept])
        groups.append(Group(label, kept, left_out, first["env"], notes))
    return groups


def _one_per_seed(members: Sequence[Curve], draws: Mapping[Path, str]) -> tuple[tuple[Curve, ...], tuple[LeftOut, ...]]:
    """Of every draw the newest run among the long ones."""
    kept: dict[str, Curve] = {}
    for draw in dict.fromkeys(draws[c.run] for c in members):
        same = [c for c in members if draws[c.run] == draw]
        longest = max(float(c.x[-1]) for c in same)
        kept[draw] = max((c for c in same if c.x[-1] >= _AS_LONG * longest), key=lambda c: _age(c.run))
    left_out = [
        LeftOut(
            c.run,
            best.run,
            "is newer" if c.x[-1] >= _AS_LONG * best.x[-1] else f"is longer ({best.x[-1]:,.0f}, not {c.x[-1]:,.0f})",
        )
        for c in members
        if (best := kept[draws[c.run]]).run != c.run
    ]
    return tuple(c for c in members if c in kept.values()), tuple(left_out)


def _execution_note(label: str, settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """In what the runs of a group differ that does not define the experiment."""
    differ = [key for key in differing(settings) if key in EXECUTION]
    if not differ:
        return ()
    values = (f"{key.removeprefix('config.')} ({', '.join(sorted({str(one.get(key)) for one in settings}))})" for key in differ)
    return (f"{label}: its runs differ in {', '.join(values)}, which do not define the experiment",)


def _shown_keys(
    settings: Sequence[Mapping[str, Any]], keys: Sequence[str], differ: Sequence[str], automatic: bool
) -> dict[tuple[Any, Any], list[str]]:
    """(env, run) → what its groups are labelled with. Another algorithm has other keys altogether: of those that nobody asked
    for, only such are named in which runs of the same algorithm differ."""
    alike: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for one in settings:
        alike.setdefault((one["env"], one["run"]), []).append(one)
    kinds = [key for key in ("env", "run") if key in differ]
    if not automatic:
        return dict.fromkeys(alike, [key for key in keys if key in differ] or list(keys))
    return {kind: [key for key in keys if key in {*kinds, *differing(members)}] for kind, members in alike.items()}


def _draw_of(run: Path, core: Mapping[str, Any]) -> str:
    """What makes two runs of a group the same draw: what defines the experiment, with the seed. Scripts do not say."""
    return str(run) if core.get("run") == "script" else json.dumps(core)


def _age(run: Path) -> float:
    if is_remote(run):
        return began(run)
    return max((path.stat().st_mtime for path in (run / "config.yaml", run / "meta.json") if path.exists()), default=0.0)


def _keys(by: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    known = {key for one in settings for key in one}
    keys = []
    for asked in by.split(","):
        name = _OTHER_NAMES.get(asked.strip(), asked.strip())
        key = name if name in known else f"config.{name}"
        if key not in known:
            raise ConfigError(f"--group-by {asked.strip()!r} is no setting of these runs.", did_you_mean(name, known))
        keys.append(key)
    return keys


def _label(own: Mapping[str, Any], shown: Sequence[str], settings: Mapping[str, Any]) -> str:
    parts = [
        str(own[key]) if key in ("name", "env", "run", "trial") else f"{key.removeprefix('config.')}={_brief(own[key])}"
        for key in shown
        if own[key] is not None or (key in settings and key.startswith("config."))
    ]
    label = ", ".join(parts) or f"{settings['run']} {settings['env'] or settings['name']}"
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _unique(label: str, taken: Sequence[str]) -> str:
    numbered = (label if i == 1 else f"{label} ({i})" for i in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)


def _brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)


# -- how well ------------------------------------------------------------------------------------------------------------


_RETURNS = {
    "episode_return_mean": "training return (episode_return_mean: episodes of the policy while it explores)",
    "evaluation/return_mean": "evaluation return (evaluation/return_mean: episodes played for the evaluation)",
}


def describe_values(metric: str, at: str) -> str:
    """What number of each run is compared."""
    when = {"last": "mean of the last tenth of each run", "best": "best value of each run"}.get(
        at, f"mean of the tenth before {at}"
    )
    return f"{_RETURNS.get(metric, metric)}, {when}"


def value_at(c: Curve, at: str, lower_is_better: bool = False) -> float:
    """`last`: the mean of the last tenth; `best`: the highest, or the lowest if that is better; a number: the mean of the tenth
    before it (nan: not reached).

    Raises UsageError.
    """
    if at == "best":
        return float(c.y.min() if lower_is_better else c.y.max())
    try:
        end = c.x[-1] if at == "last" else float(at)
    except ValueError:
        raise UsageError(f"--at {at!r} is neither last, nor best, nor a number.", "--at 100000: after so many.") from None
    if end > c.x[-1]:
        return math.nan
    inside = (c.x > (1.0 - _FINAL) * end) & (c.x <= end)
    if not inside.any():
        return float(np.interp(end, c.x, c.y)) if end >= c.x[0] else math.nan
    return float(c.y[inside].mean())


@dataclass(frozen=True)
class Standing:
    """How a group does; `low` and `high` are the 95 % interval of its mean, nan for a single run."""

    label: str
    n: int
    mean: float
    low: float
    high: float
    std: float
    values: dict[str, float] = field(repr=False)
    """Run → value."""


@dataclass(frozen=True)
class Verdict:
    """Whether group `a` differs from group `b`. `p` is corrected for the number of comparisons (Holm, 1979)."""

    a: str
    b: str
    n: tuple[int, int]
    difference: float
    low: float
    high: float
    p_value: float
    p: float
    enough: bool
    significant: bool

    @property
    def said(self) -> str:
        counts = f"n = {self.n[0]} and {self.n[1]}"
        if math.isnan(self.difference):
            return f"{self.a} and {self.b}: no values to compare ({counts})."
        more = "higher" if self.difference >= 0 else "lower"
        apart = f"{self.a} is {abs(self.difference):.4g} {more} than {self.b}"
        if not self.enough:
            return f"{apart}: not enough seeds to tell ({counts})."
        sides = sorted((self.low, self.high)) if self.difference >= 0 else sorted((-self.low, -self.high))
        numbers = f"95 % interval {sides[0]:.4g} to {sides[1]:.4g}, p = {self.p:.2g}, {counts}"
        return f"{apart} ({numbers}): {'significant' if self.significant else 'could be chance'}."


@dataclass(frozen=True)
class Comparison:
    standings: list[Standing]
    """By environment, the best of each first."""
    verdicts: list[Verdict]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "groups": [asdict(s) for s in self.standings],
            "differences": [asdict(v) | {"said": v.said} for v in self.verdicts],
            "notes": self.notes,
        }
        cleaned: dict[str, Any] = _without_nan(plain)
        return cleaned


def compared(groups: Sequence[Group], at: str = "last", alpha: float = 0.05, lower_is_better: bool = False) -> Comparison:
    """Every group against every other one of its environment. Returns of different environments say nothing about each other."""
    notes = [note for group in groups for note in (*_left_out_notes(group), *group.notes)]
    by_env: dict[str | None, list[Standing]] = {}
    for group in groups:
        values = {shown(c.run): value_at(c, at, lower_is_better) for c in group.curves}
        missing = [Path(run) for run, value in values.items() if math.isnan(value)]
        if missing:
            notes.append(f"{group.label}: {_listed(missing)} left out: not trained up to {at}")
        reached = {run: value for run, value in values.items() if not math.isnan(value)}
        by_env.setdefault(group.env, []).append(_standing(group.label, reached))
    for standings in by_env.values():
        standings.sort(key=lambda s: (math.isnan(s.mean), s.mean if lower_is_better else -s.mean))
    for env in by_env:
        ends = [float(c.x[-1]) for group in groups if group.env == env for c in group.curves]
        if at == "last" and max(ends) > 1.05 * min(ends):
            of = f" of {env}" if len(by_env) > 1 else ""
            notes.append(
                f"the runs{of} end at different points ({min(ends):,.0f} to {max(ends):,.0f}); --at {min(ends):.0f} compares all at one"
            )
    if len(by_env) > 1:
        notes.append(f"{len(by_env)} environments; groups are compared only within one of them")
    pairs = [(a, b) for standings in by_env.values() for a, b in itertools.combinations(standings, 2)]
    return Comparison([s for standings in by_env.values() for s in standings], _verdicts(pairs, alpha), notes)


def _left_out_notes(group: Group) -> Iterator[str]:
    for one in group.left_out:
        yield f"{group.label}: {_listed([one.run])} left out: {_listed([one.instead])} has the same seed and {one.why}"


def _standing(label: str, values: dict[str, float]) -> Standing:
    if not values:
        return Standing(label, 0, math.nan, math.nan, math.nan, math.nan, values)
    array = np.array(list(values.values()))
    low, high = confidence_interval(array)
    std = float(array.std(ddof=1)) if len(array) > 1 else math.nan
    return Standing(label, len(array), float(array.mean()), low, high, std, values)


def _verdicts(pairs: Sequence[tuple[Standing, Standing]], alpha: float) -> list[Verdict]:
    raw: list[tuple[Standing, Standing, Difference]] = []
    for a, b in pairs:
        if not a.n or not b.n:
            raw.append((a, b, Difference(math.nan, math.nan, math.nan, math.nan)))
            continue
        raw.append((a, b, difference(list(a.values.values()), list(b.values.values()))))
    tested = [i for i, (a, b, _) in enumerate(raw) if min(a.n, b.n) >= _FEWEST]
    corrected = dict(zip(tested, holm([raw[i][2][3] for i in tested]), strict=True))
    verdicts = []
    for i, (a, b, (mean, low, high, p_value)) in enumerate(raw):
        p = corrected.get(i, math.nan)
        # The clearest difference there can be: all of one group above all of the other. If even that says nothing, neither do we.
        enough = i in corrected and smallest_p(a.n, b.n) * len(tested) <= alpha
        verdicts.append(Verdict(a.label, b.label, (a.n, b.n), mean, low, high, p_value, p, enough, enough and p <= alpha))
    return verdicts


def smallest_p(n: int, m: int) -> float:
    """Of a two-sided permutation test: one way of sharing n + m values in two groups, or two when the groups are alike."""
    return (2 if n == m else 1) / math.comb(n + m, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for the number of them (Holm, 1979): the chance of one false alarm among all stays what it was for one."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = highest
    return out


def _listed(runs: Sequence[Path]) -> str:
    names = [f"{run.parent.name}/{run.name}" for run in runs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
