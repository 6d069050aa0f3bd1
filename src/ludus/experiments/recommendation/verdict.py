"""What was measured about an environment, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.core.formatting import format_bytes, format_number
from ludus.envs.env_check.findings import EnvReport
from ludus.envs.env_check.play import format_ms
from ludus.experiments.recommendation.settings import TrialCost

_NOTABLE_GAIN = 1.15
_NOTABLE_WAIT = 0.2


def describe_facts(report: EnvReport, cost: TrialCost | None) -> dict[str, str]:
    """Name → text; empty texts are left out by the caller."""
    facts = report.facts
    found = {"agents": _agents(facts), "step": _step(facts), "reset": _reset(facts), "episodes": _episodes(facts)}
    found |= {"rewards": _rewards(facts), "observations": _observations(facts), "memory": _memory(facts)}
    found |= {
        "processes": _processes(facts),
        "forbidden action": _masks(facts),
        "step after end": facts.get("step_after_end", ""),
    }
    found |= {"infos": ", ".join(facts.get("info_keys", [])), "video": _video(facts)}
    return {**found, "vector version": _vector(facts), "workers": describe_workers(cost)}


def _agents(facts: Mapping[str, Any]) -> str:
    agents = list(facts.get("spaces", {}))
    return f"{len(agents)}: {', '.join(agents[:8])}{' …' * (len(agents) > 8)}" if facts.get("several_agents") else ""


def _step(facts: Mapping[str, Any]) -> str:
    times = facts.get("step_s")
    if not times:
        return ""
    spread = f"(5 … 95 %: {format_ms(times['p05'])} … {format_ms(times['p95'])}, longest {format_ms(times['max'])})"
    return f"{format_ms(times['median'])} {spread}, {facts['steps']:,} steps"


def _reset(facts: Mapping[str, Any]) -> str:
    times = facts.get("reset_s")
    return f"{format_ms(times['median'])}, longest {format_ms(times['max'])}" if times else ""


def _episodes(facts: Mapping[str, Any]) -> str:
    episodes = facts.get("episodes")
    if not episodes:
        return ""
    if not episodes["count"]:
        return "none has ended"
    length, returns = episodes["length"], episodes["return"]
    ends = ", ".join(f"{count} {kind}" for kind, count in episodes["ends"].items())
    lengths = f"length {_range(length)}, return {_range(returns)}"
    return f"{episodes['count']:,} at random ({ends}): {lengths}"


def _range(values: Mapping[str, float]) -> str:
    if values["low"] == values["high"]:
        return format_number(values["mean"])
    return f"{format_number(values['mean'])} ({format_number(values['low'])} … {format_number(values['high'])})"


def _rewards(facts: Mapping[str, Any]) -> str:
    reward = facts.get("reward")
    if not reward:
        return ""
    share = f"{100 * reward['nonzero_share']:.3g} % are not 0"
    return f"{format_number(reward['low'])} … {format_number(reward['high'])}, deviation {format_number(reward['deviation'])}, {share}"


def _observations(facts: Mapping[str, Any]) -> str:
    parts = facts.get("observation") or {}
    shown = [
        f"{name and name + ' '}{part['dtype']}{part['shape']} {format_number(part['low'])} … {format_number(part['high'])}"
        for name, part in list(parts.items())[:6]
    ]
    return "; ".join(shown) + " …" * (len(parts) > 6)


def _memory(facts: Mapping[str, Any]) -> str:
    memory = facts.get("memory")
    if not memory:
        return ""
    growth = f"{format_bytes(max(0, memory['growth_bytes']))} more after {memory['growth_steps']:,} steps"
    return f"{format_bytes(memory['bytes'])} with the interpreter, {growth}"


def _processes(facts: Mapping[str, Any]) -> str:
    processes = facts.get("processes")
    if not processes or not processes["count"]:
        return ""
    return f"{processes['count']} for one copy, {format_bytes(processes['bytes'])}"


def _masks(facts: Mapping[str, Any]) -> str:
    if not facts.get("masked"):
        return ""
    legal = f"{100 * facts['mask']['legal_share']:.0f} % of {facts['mask']['options']} options are allowed"
    return f"{facts.get('illegal_action', 'never seen')}; {legal}"


def _video(facts: Mapping[str, Any]) -> str:
    modes = facts.get("render_modes")
    if modes is None:
        return ""
    if facts.get("no_video"):
        return f"none: {facts['no_video']}"
    if facts.get("frame"):
        height, width = facts["frame"][:2]
        return f"{width} × {height}"
    return f"none; render modes: {', '.join(modes) or 'none'}"


def _vector(facts: Mapping[str, Any]) -> str:
    if "native_vector" not in facts:
        return ""
    text = "its own" if facts["native_vector"] else "none of its own; Ludus steps copies in a loop"
    speeds = facts.get("rows_steps_per_s") or {}
    return text + "".join(f", {rows} at once: {format_number(speed)} steps/s" for rows, speed in speeds.items())


def describe_workers(cost: TrialCost | None) -> str:
    if cost is None:
        return ""
    alone, best, apart = (cost.speeds[key] for key in ("alone", "workers", "async"))
    waits = f", {100 * cost.wait_s / cost.sample_s:.0f} % of it waiting" if cost.wait_s > _NOTABLE_WAIT * cost.sample_s else ""
    policy_s = cost.sample_s - cost.environment_s
    costs = (
        f"per step {_us(cost.environment_s)} in the environment{waits}, {_us(policy_s)} for actions, {_us(cost.learn_s)} to learn"
    )
    shown = f"{costs}; on {cost.cores} cores about {format_number(alone)} steps/s alone, {format_number(best)} with workers"
    if apart > _NOTABLE_GAIN * max(best, alone):
        return f"{shown}, {format_number(apart)} if they never wait (run: APPO, sampling: async)"
    return f"{shown}; asynchronous sampling would not be faster"


def _us(seconds: float) -> str:
    return f"{format_number(1e6 * seconds)} µs"
