"""Recommended configuration of an environment that `ludus.envs.env_check` has examined. Pure: a report in, an experiment out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ludus.core.formatting import format_number
from ludus.envs.env_check.findings import EnvReport
from ludus.process.screen_choice import AUTO

STOP_S = 600
_MAX_EPISODE_STEPS = 1_000
_SLOW_S, _MEDIUM_S = 0.005, 0.001
_LARGE_IMAGE = 96
_IMAGE = (84, 84)
_LONG_EPISODE = 200
_MOST_GAMES = 4
"""Copies in one worker that run a process each, which takes memory and a core."""


@dataclass(frozen=True)
class TrialCost:
    """Measured by a short training: seconds per environment step, and the estimate for workers."""

    sample_s: float
    wait_s: float
    """Part of `sample_s` in which the process waited, such as for a game."""
    learn_s: float
    environment_s: float
    """Part of `sample_s` in the environment; the policy takes the rest."""
    cores: int
    workers: int
    """Best number of workers that take turns with the learner."""
    speeds: Mapping[str, float]
    """Estimated steps per second: `alone`, `workers`, `async`."""


@dataclass
class Recommendation:
    """An experiment as `ludus train -f` reads it, with the reason for every key that is not a default."""

    name: str
    data: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    """Key of `config:`, or of the experiment → reason."""

    def to_yaml(self) -> str:
        lines = [f"{self.name}:"]
        for key, value in self.data.items():
            if key == "config":
                lines.append("  config:" + ("" if value else " {}"))
                lines += [self._line(name, item, 4) for name, item in value.items()]
            else:
                lines.append(self._line(key, value, 2))
        return "\n".join(lines) + "\n"

    def _line(self, key: str, value: Any, indent: int) -> str:
        shown = (
            yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).strip().removesuffix("\n...").strip()
        )
        reason = self.reasons.get(key, "")
        return f"{' ' * indent}{key}: {shown}" + (f"  # {reason}" if reason else "")


def recommend(report: EnvReport, cost: TrialCost | None = None) -> Recommendation:
    """`cost`: None before the trial, which needs a configuration itself."""
    facts, kinds = report.facts, report.kinds
    config: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    if report.env_config:
        config["env_config"] = dict(report.env_config)
    run = _choose_algorithm(report, reasons)
    config |= _copies(report, run, reasons)
    if cost is not None:
        config["num_workers"] = cost.workers
        reasons["num_workers"] = _reason_of_workers(cost)
    preprocess = dict(report.settings.get("preprocess") or {}) | _preprocess(report, reasons)
    if preprocess:
        config["preprocess"] = preprocess
    if report.settings.get("wrappers"):
        config["wrappers"] = list(report.settings["wrappers"])
    if report.settings.get("display", AUTO) != AUTO:
        config["display"] = report.settings["display"]
    if "observation_scale" in kinds:
        config["observation_filter"] = "MeanStdFilter"
        reasons["observation_filter"] = "numbers of the observation differ in size"
    if run == "PPO" and kinds & {"reward_scale", "reward_outliers"}:
        config["normalize_reward"] = True
        reward = facts.get("reward", {})
        reasons["normalize_reward"] = f"rewards from {format_number(reward.get('low'))} to {format_number(reward.get('high'))}"
    length = ((facts.get("episodes") or {}).get("length") or {}).get("mean", 0.0)
    if run == "PPO" and "reward_sparse" in kinds:
        config["entropy_coeff"] = 0.01
        reasons["entropy_coeff"] = "random play is hardly ever rewarded: explore more"
        if length > _LONG_EPISODE:
            config["gamma"] = 0.995
            reasons["gamma"] = f"rewards are rare, and episodes have {length:.0f} steps"
    data = {"env": report.env, "run": run, "stop": {"time_s": STOP_S}, "config": config}
    return Recommendation(_experiment_name(report.env), data, reasons)


def _experiment_name(env: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", env.rpartition("/")[2].rpartition(":")[2]).strip("-") or "experiment"


def _choose_algorithm(report: EnvReport, reasons: dict[str, str]) -> str:
    facts = report.facts
    action = _first_space(facts, "action")["type"]
    step_s = facts.get("step_s", {}).get("median", 0.0)
    if action == "Discrete" and not facts.get("several_agents") and not facts.get("masked") and step_s > _SLOW_S:
        reasons["run"] = f"Discrete actions and slow steps ({1e3 * step_s:.0f} ms): replay uses each of them more often"
        return "DQN"
    reasons["run"] = {"Discrete": "Discrete actions", "Box": "continuous actions"}.get(action, f"actions are a {action}")
    return "PPO"


def _first_space(facts: Mapping[str, Any], kind: str) -> dict[str, Any]:
    spaces: dict[str, Any] = next(iter(facts["spaces"].values()))[kind]
    return spaces


def _copies(report: EnvReport, run: str, reasons: dict[str, str]) -> dict[str, Any]:
    """Number of environments of a process, and steps of an update."""
    step_s, native = report.facts.get("step_s", {}).get("median", 0.0), report.facts.get("native_vector")
    if run == "DQN":
        return {"num_envs_per_worker": 8}
    slow = step_s > _SLOW_S
    number = 8 if slow else 64 if native and step_s < _MEDIUM_S else 32 if step_s < _MEDIUM_S else 16
    if report.facts.get("several_agents") and not native:
        number = min(number, 16)
    if (report.facts.get("processes") or {}).get("count"):
        number = min(number, _MOST_GAMES)
        reasons["num_envs_per_worker"] = "each is a process of its own"
    else:
        takes = f"a step takes {format_number(1e3 * step_s)} ms"
        reasons["num_envs_per_worker"] = f"{takes}, {'with' if native else 'without'} a vector version of its own"
    batch = 1024 if slow else 4096
    return {"num_envs_per_worker": number, "train_batch_size": batch, "minibatch_size": 256 if slow else 512}


def _preprocess(report: EnvReport, reasons: dict[str, str]) -> dict[str, Any]:
    facts, found, why = report.facts, dict[str, Any](), list[str]()
    if facts.get("drop"):
        found["drop"] = list(facts["drop"])
        why.append("text cannot be learned from")
    if "endless" in report.kinds:
        found["max_episode_steps"] = _MAX_EPISODE_STEPS
        why.append("episodes do not end")
    images = [part for part in facts.get("observation", {}).values() if part["image"]]
    if images and not report.settings.get("preprocess"):
        height, width = images[0]["shape"][:2]
        if min(height, width) >= _LARGE_IMAGE:
            found |= {"grey": True, "resize": list(_IMAGE), "stack": 4}
            why.append(f"images of {height} × {width}")
    if why:
        reasons["preprocess"] = "; ".join(why)
    return found


def _reason_of_workers(cost: TrialCost) -> str:
    alone, workers = cost.speeds.get("alone", 0.0), cost.speeds.get("workers", 0.0)
    if not cost.workers:
        return f"{format_number(alone)} steps/s in one process; workers would gain less than 15 %"
    return f"about {format_number(workers)} steps/s on {cost.cores} cores instead of {format_number(alone)}"
