"""What `ludus check-env` checks, and what it has found. No I/O.

A mistake keeps a training from working or makes its result wrong, a warning makes it slower or unreliable, an advice is about settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["mistake", "warning", "advice"]
State = Literal["ok", "mistake", "warning", "advice", "not checked"]


@dataclass(frozen=True)
class EnvCheck:
    kind: str
    level: Level
    rule: str
    remedy: str
    stage: str


CHECKS: Mapping[str, EnvCheck] = {
    check.kind: check
    for check in (
        EnvCheck("construct", "mistake", "The environment can be made", "Return a gymnasium.Env; correct the constructor or env_config.", "spaces"),
        EnvCheck("spaces", "mistake", "Spaces are of supported kinds", "Use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple.", "spaces"),
        EnvCheck("text_part", "advice", "Every part of an observation can be learned from", "preprocess: {drop: [part]}, or encode it as numbers.", "spaces"),
        EnvCheck("action_bounds", "warning", "Continuous actions have finite bounds", "Declare low and high: actions are mapped to them.", "spaces"),
        EnvCheck("bounds_equal", "advice", "Bounds of observations leave room", "Declare the real bounds, or leave the numbers out.", "spaces"),
        EnvCheck("reset_arguments", "warning", "reset takes seed and options", "def reset(self, *, seed=None, options=None): wrappers pass both.", "spaces"),
        EnvCheck("raises", "mistake", "reset and step raise no exception", "Correct the line that is named.", "play"),
        EnvCheck("exits", "mistake", "The environment does not end its process", "Raise an exception; never call exit().", "play"),
        EnvCheck("crash", "mistake", "No library crashes", "Run it with one copy under a debugger; ask its maintainers.", "play"),
        EnvCheck("hang", "mistake", "Every call returns in time", "Give waits a time-out; a longer limit: --timeout.", "play"),
        EnvCheck("interface", "mistake", "reset returns 2 values, step returns 5", "Use Gymnasium's interface, not that of the old Gym.", "play"),
        EnvCheck("structure", "mistake", "Observations have the declared keys and shapes", "Correct the space or the observation.", "play"),
        EnvCheck("bounds", "mistake", "Observations are inside their space", "Correct the bounds, or clip the values.", "play"),
        EnvCheck("dtype", "warning", "Observations have the declared dtype", "Convert with astype, or declare the dtype.", "play"),
        EnvCheck("finite", "mistake", "Observations are finite numbers", "No NaN, no infinity: check for a division by zero.", "play"),
        EnvCheck("reward", "mistake", "Rewards are finite numbers", "Return a float.", "play"),
        EnvCheck("reward_type", "mistake", "Rewards are scalars", "Return float(reward), not an array.", "play"),
        EnvCheck("flags", "warning", "terminated and truncated are bool", "Return bool(…).", "play"),
        EnvCheck("agents", "mistake", "Agents are those of possible_agents", "List there all agents that may ever appear.", "play"),
        EnvCheck("info", "mistake", "Infos are dicts", "Return {} if there is nothing to tell.", "play"),
        EnvCheck("info_keys", "warning", "Keys of infos are strings that are not reserved", "Rename the key.", "play"),
        EnvCheck("mask", "mistake", "Masks fit the action space and are always there", "One 0 or 1 per option, in every observation or every info.", "play"),
        EnvCheck("mask_empty", "mistake", "Masks leave a choice", "Allow one option at least, or end the episode.", "play"),
        EnvCheck("spaces_change", "mistake", "Spaces never change", "Make them large enough for all episodes, and mask.", "play"),
        EnvCheck("observation_constant", "warning", "Observations change", "Show the agent the state of the game.", "play"),
        EnvCheck("observation_reused", "warning", "Returned observations do not change afterwards", "Return a copy of the buffer.", "play"),
        EnvCheck("time_limit", "warning", "A time limit truncates and does not terminate", "Return truncated=True when the time is over, unless the agent sees the clock.", "play"),
        EnvCheck("memory", "warning", "Memory does not grow", "Free in reset() what an episode has allocated; limit caches.", "play"),
        EnvCheck("prints", "warning", "Steps print nothing", "Use logging: printing is slow and disturbs --json.", "play"),
        EnvCheck("slow", "advice", "Steps are fast", "Sample in several processes: num_workers.", "play"),
        EnvCheck("uneven", "advice", "Steps take about equally long", "Copies wait for the slowest: fewer of them, more workers.", "play"),
        EnvCheck("endless", "advice", "Episodes end", "preprocess: {max_episode_steps: …}", "play"),
        EnvCheck("observation_scale", "advice", "Numbers of observations are of similar size", "observation_filter: MeanStdFilter", "play"),
        EnvCheck("bounds_wide", "advice", "Declared bounds are near the values", "Declare the real bounds.", "play"),
        EnvCheck("reward_scale", "advice", "Rewards are of size 1", "normalize_reward: true", "play"),
        EnvCheck("reward_outliers", "advice", "No reward is much larger than the others", "preprocess: {clip_reward: …}", "play"),
        EnvCheck("reward_sparse", "advice", "Random play makes a difference", "Reward intermediate goals; explore more: entropy_coeff.", "play"),
        EnvCheck("seeding", "warning", "The same seed and actions give the same episode", "Use self.np_random, and seed it in reset(seed=…).", "seeding"),
        EnvCheck("shared_state", "mistake", "Copies in one process do not influence each other", "No class attributes, globals or numpy.random.*.", "seeding"),
        EnvCheck("second_process", "mistake", "It can be made in several processes at once", "No fixed ports, files or locks: workers need several.", "second process"),
        EnvCheck("process_seed", "warning", "Another process plays the same episode", "Do not depend on the order of a set, hash() or the time.", "second process"),
        EnvCheck("reset_midway", "mistake", "An episode can be left by reset", "reset() must work at any time.", "endings"),
        EnvCheck("after_end", "warning", "A step after the end does no harm", "Raise an exception, or return terminated again.", "endings"),
        EnvCheck("illegal_action", "warning", "A forbidden action does no harm", "Raise an exception, or end the episode.", "illegal action"),
        EnvCheck("render", "warning", "rgb_array renders images", "Return uint8 [height, width, 3].", "rendering"),
        EnvCheck("render_fps", "advice", "metadata has render_fps", "Add it: videos have 30 images per second otherwise.", "rendering"),
        EnvCheck("vector", "mistake", "Its vector version returns rows of the declared shape", "Return [num_envs, …] everywhere.", "vector"),
        EnvCheck("rows_equal", "warning", "Rows of its vector version differ", "Seed every row with its own number.", "vector"),
        EnvCheck("close", "mistake", "close() works", "Correct the line that is named.", "closing"),
        EnvCheck("close_again", "warning", "close() can be called again", "Close only what is open.", "closing"),
        EnvCheck("threads_left", "warning", "close() ends its threads", "Join them in close().", "closing"),
        EnvCheck("processes_left", "warning", "close() ends its processes", "Terminate and wait for them in close().", "closing"),
        EnvCheck("files_left", "warning", "close() closes its files and sockets", "Close them in close().", "closing"),
        EnvCheck("training", "mistake", "The recommended configuration trains", "See the message.", "training"),
    )
}  # fmt: skip


@dataclass
class EnvFinding:
    check: EnvCheck
    seen: str
    """Description of the first occurrence."""
    count: int = 1


class FindingLog:
    """Counts findings by kind; only the first of a kind is described and reported at once."""

    def __init__(self, report: Callable[[EnvFinding], object] = lambda finding: None) -> None:
        self._found: dict[str, EnvFinding] = {}
        self._report = report

    def __iter__(self) -> Iterator[EnvFinding]:
        return iter(self._found.values())

    def __contains__(self, kind: object) -> bool:
        return kind in self._found

    def add(self, kind: str, seen: str, count: int = 1) -> None:
        known = self._found.get(kind)
        if known is not None:
            known.count += count
            return
        self._found[kind] = finding = EnvFinding(CHECKS[kind], seen, count)
        self._report(finding)


@dataclass(frozen=True)
class EnvCheckRow:
    check: EnvCheck
    state: State
    count: int = 0
    seen: str = ""


@dataclass
class EnvReport:
    """Everything that was found out about an environment. `facts`: measured values, as JSON; see `docs/check_env.md`."""

    env: str
    env_config: Mapping[str, Any]
    findings: list[EnvFinding]
    facts: Mapping[str, Any]
    stages: list[str]
    """Stages that were completed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`preprocess`, `wrappers` and `display` that were in force."""

    def add(self, finding: EnvFinding) -> None:
        self.findings.append(finding)

    def complete(self, stage: str) -> None:
        self.stages.append(stage)

    @property
    def rows(self) -> list[EnvCheckRow]:
        found = {finding.check.kind: finding for finding in self.findings}
        out = []
        for kind, check in CHECKS.items():
            finding = found.get(kind)
            if finding is not None:
                out.append(EnvCheckRow(check, check.level, finding.count, finding.seen))
            else:
                out.append(EnvCheckRow(check, "ok" if check.stage in self.stages else "not checked"))
        return out

    def count(self, level: Level) -> int:
        """Number of kinds of findings of a level."""
        return sum(finding.check.level == level for finding in self.findings)

    @property
    def kinds(self) -> set[str]:
        return {finding.check.kind for finding in self.findings}

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.count("mistake"),
            "env": self.env,
            "env_config": dict(self.env_config),
            "mistakes": self.count("mistake"),
            "warnings": self.count("warning"),
            "checks": [
                {"check": row.check.kind, "rule": row.check.rule, "state": row.state, "count": row.count}
                | ({"seen": row.seen, "remedy": row.check.remedy} if row.count else {})
                for row in self.rows
            ],
            "facts": dict(self.facts),
        }
