"""Comparison of runs: groups that differ only in their seed, their scores, and significance tests between groups."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.core import renamed
from ludus.core.plugins import did_you_mean
from ludus.core.statistics import Difference, confidence_interval, difference
from ludus.errors import ConfigError, UsageError
from ludus.experiments.runs.plot import Curve
from ludus.experiments.runs.remote_runs import display_path, is_remote
from ludus.experiments.runs.run_dir import Run, is_script, start_time
from ludus.experiments.runs.tracking import flatten

AUTO = "auto"
"""Group runs that differ only in the seed."""

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
"""Settings of execution and evaluation. They do not define the experiment: runs that differ only in them are repetitions."""

_FRAGMENT = "config.rollout_fragment_length"
_SHARES_OF_BATCH = ("num_workers", "num_envs_per_worker", "rollout_fragment_length", "train_batch_size")
_KEY_ALIASES = {"algorithm": "run"}
_NOT_SETTINGS = {"name", SEED}
_MIN_LENGTH_SHARE = 0.9
"""Of several runs with the same seed, the newest counts whose length is at least this share of the longest."""

_FINAL_SHARE = 0.1
"""Share of a run whose values make up its final score."""

_MIN_SEEDS = 3
_MAX_LABEL_CHARS = 80


# -- settings ------------------------------------------------------------------------------------------------------------


def settings_of(run: Path) -> dict[str, Any]:
    """All settings of a run by path: name, env, run, config.lr …; for a script only its name."""
    if is_script(run):
        return {"name": run.parent.name, "env": None, "run": "script", "trial": run.name}
    data = Run(run).config()
    names = {key: renamed.current_name(data[key]) if data.get(key) else None for key in ("env", "run")}
    return {"name": data["name"], **names, **flatten({"config": data.get("config", {})})}


def read_all_settings(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Settings of every run. A key that the release of a run lacks gets the value that all others of its algorithm have."""
    read_all_settings = [settings_of(run) for run in runs]
    for algorithm in {one["run"] for one in read_all_settings}:
        alike = [one for one in read_all_settings if one["run"] == algorithm]
        for key in {key for one in alike for key in one}:
            present = {json.dumps(one[key]) for one in alike if key in one}
            if len(present) == 1:
                for one in alike:
                    one.setdefault(key, json.loads(next(iter(present))))
    return read_all_settings


def defining_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that define the experiment: environment, algorithm, hyper-parameters and seed.

    A `rollout_fragment_length` that only divides the batch among the workers is omitted, as the number of workers is.
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


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key)) for one in settings}) > 1]


# -- groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is excluded because another one of its group has the same seed and is not an independent sample."""

    run: Path
    instead: Path
    why: str


@dataclass(frozen=True)
class RunGroup:
    """Repetitions of one experiment in one environment."""

    label: str
    curves: tuple[Curve, ...]
    left_out: tuple[ExcludedRun, ...] = ()
    env: str | None = None
    notes: tuple[str, ...] = ()


def group_runs(curves: Sequence[Curve], by: str = AUTO) -> list[RunGroup]:
    """Group runs, oldest group first. Runs of different environments are never in one group. Raises ConfigError.

    `by`: auto, or keys such as lr, config.lr, name, env, algorithm, joined by commas.
    """
    runs = [c.run for c in curves]
    settings = dict(zip(runs, read_all_settings(runs), strict=True))
    core = {run: defining_settings(one) for run, one in settings.items()}
    differ = differing_keys(list(core.values()))
    if by == AUTO:
        keys = [key for key in differ if key not in _NOT_SETTINGS]
        labelled = _label_keys(list(core.values()), keys, differ, automatic=True)
    else:
        asked = _parse_keys(by, list(settings.values()))
        keys = list(dict.fromkeys(["env", *asked]))
        apart = {json.dumps([one.get(key) for key in keys]) for one in settings.values()}
        alike = {json.dumps([one.get(key) for key in asked]) for one in settings.values()}
        every = differing_keys(
            list(settings.values())
        )  # labels name the environment if the requested keys do not distinguish the groups
        labelled = _label_keys(list(settings.values()), keys if len(apart) > len(alike) else asked, every, automatic=False)
    found: dict[str, list[Curve]] = {}
    for c in curves:
        source = core[c.run] if by == AUTO else settings[c.run]
        found.setdefault(json.dumps({key: source.get(key) for key in keys}), []).append(c)
    groups: list[RunGroup] = []
    for text, members in found.items():
        first = settings[members[0].run]
        label = _unique(_label(json.loads(text), labelled[first["env"], first["run"]], first), [g.label for g in groups])
        kept, left_out = _one_per_seed(members, {c.run: _seed_key(c.run, core[c.run]) for c in members})
        notes = _execution_note(label, [settings[c.run] for c in kept])
        groups.append(RunGroup(label, kept, left_out, first["env"], notes))
    return groups


def _one_per_seed(members: Sequence[Curve], draws: Mapping[Path, str]) -> tuple[tuple[Curve, ...], tuple[ExcludedRun, ...]]:
    """Keep the newest of the long runs of every seed."""
    kept: dict[str, Curve] = {}
    for draw in dict.fromkeys(draws[c.run] for c in members):
        same = [c for c in members if draws[c.run] == draw]
        longest = max(float(c.x[-1]) for c in same)
        kept[draw] = max((c for c in same if c.x[-1] >= _MIN_LENGTH_SHARE * longest), key=lambda c: _modified_time(c.run))
    left_out = [
        ExcludedRun(
            c.run,
            best.run,
            "is newer" if c.x[-1] >= _MIN_LENGTH_SHARE * best.x[-1] else f"is longer ({best.x[-1]:,.0f}, not {c.x[-1]:,.0f})",
        )
        for c in members
        if (best := kept[draws[c.run]]).run != c.run
    ]
    return tuple(c for c in members if c in kept.values()), tuple(left_out)


def _execution_note(label: str, settings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note about execution settings in which the runs of a group differ."""
    differ = [key for key in differing_keys(settings) if key in EXECUTION]
    if not differ:
        return ()
    values = (f"{key.removeprefix('config.')} ({', '.join(sorted({str(one.get(key)) for one in settings}))})" for key in differ)
    return (f"{label}: its runs differ in {', '.join(values)}, which do not define the experiment",)


def _label_keys(
    settings: Sequence[Mapping[str, Any]], keys: Sequence[str], differ: Sequence[str], automatic: bool
) -> dict[tuple[Any, Any], list[str]]:
    """(env, run) → keys of the labels of its groups. Algorithms have different keys: with automatic grouping, a label has only keys
    in which runs of the same algorithm differ."""
    alike: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for one in settings:
        alike.setdefault((one["env"], one["run"]), []).append(one)
    kinds = [key for key in ("env", "run") if key in differ]
    if not automatic:
        return dict.fromkeys(alike, [key for key in keys if key in differ] or list(keys))
    return {kind: [key for key in keys if key in {*kinds, *differing_keys(members)}] for kind, members in alike.items()}


def _seed_key(run: Path, core: Mapping[str, Any]) -> str:
    """Equal for runs of the same experiment and seed. Each script's run is its own."""
    return str(run) if core.get("run") == "script" else json.dumps(core)


def _modified_time(run: Path) -> float:
    if is_remote(run):
        return start_time(run)
    return max((path.stat().st_mtime for path in (run / "config.yaml", run / "meta.json") if path.exists()), default=0.0)


def _parse_keys(by: str, settings: Sequence[Mapping[str, Any]]) -> list[str]:
    known = {key for one in settings for key in one}
    keys = []
    for asked in by.split(","):
        name = _KEY_ALIASES.get(asked.strip(), asked.strip())
        key = name if name in known else f"config.{name}"
        if key not in known:
            raise ConfigError(f"--group-by {asked.strip()!r} is no setting of these runs.", did_you_mean(name, known))
        keys.append(key)
    return keys


def _label(own: Mapping[str, Any], shown: Sequence[str], settings: Mapping[str, Any]) -> str:
    parts = [
        str(own[key]) if key in ("name", "env", "run", "trial") else f"{key.removeprefix('config.')}={_format_value(own[key])}"
        for key in shown
        if own[key] is not None or (key in settings and key.startswith("config."))
    ]
    label = ", ".join(parts) or f"{settings['run']} {settings['env'] or settings['name']}"
    return label if len(label) <= _MAX_LABEL_CHARS else f"{label[: _MAX_LABEL_CHARS - 1]}…"


def _unique(label: str, taken: Sequence[str]) -> str:
    numbered = (label if i == 1 else f"{label} ({i})" for i in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)


# -- scores --------------------------------------------------------------------------------------------------------------


_RETURNS = {
    "episode_return_mean": "training return (episode_return_mean: episodes of the policy while it explores)",
    "evaluation/return_mean": "evaluation return (evaluation/return_mean: episodes played for the evaluation)",
}


def describe_values(metric: str, at: str) -> str:
    """Describes the compared value of each run."""
    when = {"last": "mean of the last tenth of each run", "best": "best value of each run"}.get(
        at, f"mean of the tenth before {at}"
    )
    return f"{_RETURNS.get(metric, metric)}, {when}"


def value_at(c: Curve, at: str, lower_is_better: bool = False) -> float:
    """The value of a run. `last`: mean of the last tenth; `best`: the maximum, or minimum; a number: mean of the tenth before it, or
    nan if the run is shorter. Raises UsageError.
    """
    if at == "best":
        return float(c.y.min() if lower_is_better else c.y.max())
    try:
        end = c.x[-1] if at == "last" else float(at)
    except ValueError:
        raise UsageError(f"--at {at!r} is neither last, nor best, nor a number.", "Example: --at 100000.") from None
    if end > c.x[-1]:
        return math.nan
    inside = (c.x > (1.0 - _FINAL_SHARE) * end) & (c.x <= end)
    if not inside.any():
        return float(np.interp(end, c.x, c.y)) if end >= c.x[0] else math.nan
    return float(c.y[inside].mean())


@dataclass(frozen=True)
class GroupScore:
    """The score of a group; `low` and `high` are the 95 % interval of its mean, nan for a single run."""

    label: str
    n: int
    mean: float
    low: float
    high: float
    std: float
    values: dict[str, float] = field(repr=False)
    """Run → value."""


@dataclass(frozen=True)
class GroupDifference:
    """The difference between groups `a` and `b`. `p` is corrected for the number of comparisons (Holm, 1979)."""

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
    def sentence(self) -> str:
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
    scores: list[GroupScore]
    """By environment, the best of each first."""
    differences: list[GroupDifference]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "groups": [asdict(s) for s in self.scores],
            "differences": [asdict(v) | {"said": v.sentence} for v in self.differences],
            "notes": self.notes,
        }
        cleaned: dict[str, Any] = _without_nan(plain)
        return cleaned


def compare_groups(
    groups: Sequence[RunGroup], at: str = "last", alpha: float = 0.05, lower_is_better: bool = False
) -> Comparison:
    """Compare each pair of groups of the same environment."""
    notes = [note for group in groups for note in (*_excluded_notes(group), *group.notes)]
    by_env: dict[str | None, list[GroupScore]] = {}
    for group in groups:
        values = {display_path(c.run): value_at(c, at, lower_is_better) for c in group.curves}
        missing = [Path(run) for run, value in values.items() if math.isnan(value)]
        if missing:
            notes.append(f"{group.label}: {_format_runs(missing)} left out: not trained up to {at}")
        reached = {run: value for run, value in values.items() if not math.isnan(value)}
        by_env.setdefault(group.env, []).append(_score(group.label, reached))
    for scores in by_env.values():
        scores.sort(key=lambda s: (math.isnan(s.mean), s.mean if lower_is_better else -s.mean))
    for env in by_env:
        ends = [float(c.x[-1]) for group in groups if group.env == env for c in group.curves]
        if at == "last" and max(ends) > 1.05 * min(ends):
            of = f" of {env}" if len(by_env) > 1 else ""
            notes.append(
                f"the runs{of} end at different points ({min(ends):,.0f} to {max(ends):,.0f}); --at {min(ends):.0f} compares all at one"
            )
    if len(by_env) > 1:
        notes.append(f"{len(by_env)} environments; groups are compared only within one of them")
    pairs = [(a, b) for scores in by_env.values() for a, b in itertools.combinations(scores, 2)]
    return Comparison([s for scores in by_env.values() for s in scores], _test_pairs(pairs, alpha), notes)


def _excluded_notes(group: RunGroup) -> Iterator[str]:
    for one in group.left_out:
        yield f"{group.label}: {_format_runs([one.run])} left out: {_format_runs([one.instead])} has the same seed and {one.why}"


def _score(label: str, values: dict[str, float]) -> GroupScore:
    if not values:
        return GroupScore(label, 0, math.nan, math.nan, math.nan, math.nan, values)
    array = np.array(list(values.values()))
    low, high = confidence_interval(array)
    std = float(array.std(ddof=1)) if len(array) > 1 else math.nan
    return GroupScore(label, len(array), float(array.mean()), low, high, std, values)


def _test_pairs(pairs: Sequence[tuple[GroupScore, GroupScore]], alpha: float) -> list[GroupDifference]:
    raw: list[tuple[GroupScore, GroupScore, Difference]] = []
    for a, b in pairs:
        if not a.n or not b.n:
            raw.append((a, b, Difference(math.nan, math.nan, math.nan, math.nan)))
            continue
        raw.append((a, b, difference(list(a.values.values()), list(b.values.values()))))
    tested = [i for i, (a, b, _) in enumerate(raw) if min(a.n, b.n) >= _MIN_SEEDS]
    corrected = dict(zip(tested, holm([raw[i][2][3] for i in tested]), strict=True))
    differences = []
    for i, (a, b, (mean, low, high, p_value)) in enumerate(raw):
        p = corrected.get(i, math.nan)
        # Not enough if even complete separation of the groups could not be significant.
        enough = i in corrected and smallest_p(a.n, b.n) * len(tested) <= alpha
        differences.append(
            GroupDifference(a.label, b.label, (a.n, b.n), mean, low, high, p_value, p, enough, enough and p <= alpha)
        )
    return differences


def smallest_p(n: int, m: int) -> float:
    """Smallest p of a two-sided permutation test: one split of n + m values in two groups, or two if the groups have equal size."""
    return (2 if n == m else 1) / math.comb(n + m, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm (1979) correction: bounds the probability of any false positive among all tests."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = highest
    return out


def _format_runs(runs: Sequence[Path]) -> str:
    names = [f"{run.parent.name}/{run.name}" for run in runs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
