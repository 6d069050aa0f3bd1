"""Random play: checks every value that the environment returns, and measures speed, memory, rewards and episodes."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import numpy as np

from ludus.core.formatting import format_bytes, format_number
from ludus.envs.env_check.session import CheckSession, printed_bytes
from ludus.envs.env_check.subject import Moment, Subject, make_subject, random_actions
from ludus.envs.env_check.values import NumberStatistics, is_image, leaf_spaces, leaf_value, problems_of
from ludus.process import procfs

_WARM_STEPS = 20
_MEMORY_POINTS = 16
_MEMORY_GROWTH = 2 << 20
_RISING_SHARE = 0.7
"""Share of the measurements that must rise before a growth counts: an allocator grows in a few large steps, a leak always."""
_FEW_EPISODES = 5
_LIMIT_LENGTH = 8
"""Shorter episodes of equal length are likely a rule of the game, not a time limit."""
_ENDLESS_STEPS = 1_000
_SLOW_S = 0.02
_UNEVEN, _UNEVEN_S = 20.0, 0.02
_LARGE, _RATIO = 10.0, 100.0
_WIDE = 100.0
_SPARSE = 0.02
_REUSE_STEPS = 50
_MOST_SIZES = 100_000
"""Rewards that are kept for their typical size."""
_MANY_STEPS = 500
"""Fewer steps say nothing about how often something happens."""


def play_at_random(session: CheckSession) -> None:
    """Stage `play`."""
    before = set(procfs.list_descendants(os.getpid()))
    subject = make_subject(session)
    gc.collect()
    gc.freeze()  # collections before measurements of memory then take no time
    try:
        recorder = PlayRecorder(session, subject)
        _play(session, subject, recorder)
        _count_processes(session, before)
    finally:
        gc.unfreeze()
        session.try_call("close", subject.close)
    recorder.conclude()


def _play(session: CheckSession, subject: Subject, recorder: PlayRecorder) -> None:
    request, random = session.request, np.random.default_rng(session.request.seed)
    session.step, points = 0, 0
    moment = recorder.reset(subject.reset(request.seed))
    began, printed = time.perf_counter(), printed_bytes()  # libraries may be loaded by the first reset
    while session.step < request.steps:
        progress = max(session.step / request.steps, (time.perf_counter() - began) / request.seconds)
        if progress >= 1 and session.step >= _WARM_STEPS:
            break
        if progress >= (points + 1) / _MEMORY_POINTS:
            points += 1
            recorder.measure_memory()
        session.step += 1
        if moment.over:
            moment = recorder.reset(subject.reset(None))
            continue
        moment = recorder.step(subject.step(random_actions(subject, moment, random)))
    printed = printed_bytes() - printed
    if printed:
        session.findings.add("prints", f"{printed:,} bytes on the standard output in {session.step:,} steps")


def _count_processes(session: CheckSession, before: set[int]) -> None:
    """Processes that one copy has started, such as a game."""
    started = set(procfs.list_descendants(os.getpid())) - before
    memory = sum(procfs.proportional_memory(pid) for pid in started)
    session.facts["processes"] = {"count": len(started), "bytes": memory}


class PlayRecorder:
    """Collects what random play shows, in bounded memory."""

    def __init__(self, session: CheckSession, subject: Subject) -> None:
        self._session, self._subject = session, subject
        views = list(subject.agents.values())
        self._shared = all(view.observation == views[0].observation for view in views)
        self._parts: dict[str, NumberStatistics] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}  # agent → path in its observation, name of the part
        for agent, view in subject.agents.items():
            prefix = "" if self._shared or not agent else f"{agent}: "
            self._places[agent] = []
            for path, leaf in leaf_spaces(view.declared):
                if path.partition(".")[0] == "action_mask":
                    continue
                self._places[agent].append((path, prefix + path))
                self._parts.setdefault(prefix + path, NumberStatistics(leaf))
        self._step_s: list[float] = []
        self._preempted: list[bool] = []
        self._reset_s: list[float] = []
        self._memory: list[int] = []
        self._rewards = NumberStatistics(_SCALAR)
        self._nonzero_count = 0
        self._sizes: list[float] = []  # of the first rewards that are not 0
        self._length, self._lengths, self._ends = 0, list[int](), list[str]()
        self._return, self._returns = dict[str, float](), list[float]()
        self._info_keys: set[str] = set()
        self._before: dict[str, list[tuple[Any, Any]]] = {}  # agent → arrays of its last observation, and copies of them
        self._masks = self._options = 0
        self._legal = 0.0

    def reset(self, moment: Moment) -> Moment:
        self._reset_s.append(self._session.last_call_s)
        self._length, self._return = 0, {}
        self._read(moment)
        return moment

    def step(self, moment: Moment) -> Moment:
        self._step_s.append(self._session.last_call_s)
        self._preempted.append(self._session.last_call_preempted)
        self._length += 1
        for agent, reward in moment.rewards.items():
            self._rewards.add(reward)
            self._return[agent] = self._return.get(agent, 0.0) + reward
            self._nonzero_count += bool(reward)
            if reward and len(self._sizes) < _MOST_SIZES:
                self._sizes.append(abs(reward))
        self._read(moment)
        if moment.over:
            self._lengths.append(self._length)
            self._returns += self._return.values() or [0.0]
            kinds = set(moment.ended.values()) or {"terminated"}
            self._ends.append(kinds.pop() if len(kinds) == 1 else "mixed")
        return moment

    def _read(self, moment: Moment) -> None:
        log, step = self._session.findings, self._session.step
        if step <= _REUSE_STEPS:
            self._check_reuse(moment)
        self._info_keys |= {str(key) for key in moment.infos}
        for agent, observation in moment.observations.items():
            who = f"{agent}: " if agent else ""
            for problem in problems_of(self._subject.agents[agent].declared, observation):
                log.add(problem.kind, f"{who}{problem.text}, at step {step}")
            for path, part in self._places[agent]:
                value = leaf_value(observation, path)
                statistics = self._parts[part]
                if value is None or np.shape(value) != statistics.space.shape or (is_image(statistics.space) and step % 16):
                    continue
                numbers = np.asarray(value)
                if numbers.dtype.kind in "biuf" and (numbers.dtype.kind != "f" or np.isfinite(numbers).all()):
                    statistics.add(numbers)
        for mask in moment.masks.values():
            flat = np.concatenate([np.asarray(part).reshape(-1) for part in _mask_parts(mask)])
            self._masks, self._legal, self._options = self._masks + 1, self._legal + float(np.mean(flat != 0)), flat.size

    def _check_reuse(self, moment: Moment) -> None:
        """Whether the arrays of an earlier observation have changed."""
        for agent, observation in moment.observations.items():
            if any(not np.array_equal(array, copy, equal_nan=True) for array, copy in self._before.get(agent, ())):
                who = f"{agent}: " if agent else ""
                self._session.findings.add(
                    "observation_reused", f"{who}step {self._session.step} has changed the observation before"
                )
            parts = (leaf_value(observation, path) for path, _ in self._places[agent])
            numbers = [part for part in parts if isinstance(part, np.ndarray) and part.dtype.kind in "biuf"]
            self._before[agent] = [(part, part.copy()) for part in numbers]

    def measure_memory(self) -> None:
        gc.collect()
        pids = [os.getpid(), *procfs.list_descendants(os.getpid())]
        pages = sum(stat.resident for stat in map(procfs.read_stat, pids) if stat is not None)
        self._memory.append(pages * os.sysconf("SC_PAGE_SIZE"))

    # -- conclusions

    def conclude(self) -> None:
        self._conclude_speed()
        self._conclude_memory()
        self._conclude_episodes()
        self._conclude_rewards()
        self._conclude_observations()
        facts = self._session.facts
        facts["steps"] = len(self._step_s)
        facts["info_keys"] = sorted(self._info_keys)[:40]
        facts["masked"] = self._masks > 0
        if self._masks:
            facts["mask"] = {"options": self._options, "legal_share": self._legal / self._masks}

    def _conclude_speed(self) -> None:
        facts, log = self._session.facts, self._session.findings
        undisturbed = [time_s for time_s, preempted in zip(self._step_s, self._preempted, strict=True) if not preempted]
        measured = undisturbed if 2 * len(undisturbed) > len(self._step_s) else self._step_s
        times = np.array(measured[_WARM_STEPS // 2 :] or measured or [0.0])
        p05, median, p95, p99 = np.percentile(times, (5, 50, 95, 99)).tolist()
        mean = float(times.mean())
        facts["step_s"] = {"p05": p05, "median": median, "mean": mean, "p95": p95, "p99": p99, "max": float(times.max())}
        resets = np.array(self._reset_s or [0.0])
        facts["reset_s"] = {"median": float(np.median(resets)), "max": float(resets.max())}
        if median > _SLOW_S:
            log.add("slow", f"a step takes {format_ms(median)}: {format_number(1 / median)} steps/s in one process")
        if len(times) >= 50 and p99 > _UNEVEN_S and p99 > _UNEVEN * median:
            log.add("uneven", f"half of the steps take up to {format_ms(median)}, one in a hundred {format_ms(p99)} or more")

    def _conclude_memory(self) -> None:
        half = self._memory[len(self._memory) // 3 :]
        if len(half) < 6:
            return
        rises = np.diff(half)
        growth = half[-1] - half[0]
        steps = len(self._step_s) * len(half) // len(self._memory)
        self._session.facts["memory"] = {"bytes": half[-1], "growth_bytes": growth, "growth_steps": steps}
        if growth > _MEMORY_GROWTH and (rises > 0).mean() >= _RISING_SHARE:
            text = f"{format_bytes(growth)} more after {steps:,} steps, {format_bytes(growth / max(1, steps))} per step"
            self._session.findings.add("memory", text)

    def _conclude_episodes(self) -> None:
        log, lengths, steps = self._session.findings, self._lengths, len(self._step_s)
        if not lengths and steps >= _ENDLESS_STEPS:
            log.add("endless", f"no episode has ended in {steps:,} steps of random play")
        if (
            len(lengths) >= _FEW_EPISODES
            and lengths[0] >= _LIMIT_LENGTH
            and len(set(lengths)) == 1
            and set(self._ends) == {"terminated"}
        ):
            log.add("time_limit", f"all {len(lengths)} episodes were terminated after exactly {lengths[0]} steps")
        self._session.facts["episodes"] = {
            "count": len(lengths),
            "length": _summary(lengths),
            "return": _summary(self._returns),
            "ends": {kind: self._ends.count(kind) for kind in sorted(set(self._ends))},
        }

    def _conclude_rewards(self) -> None:
        log, rewards = self._session.findings, self._rewards
        if not rewards.count:
            return
        low, high = float(rewards.low), float(rewards.high)
        share, largest = self._nonzero_count / rewards.count, max(abs(low), abs(high))
        typical = float(np.median(self._sizes)) if self._sizes else 0.0
        self._session.facts["reward"] = {
            "low": low, "high": high, "mean": float(rewards._mean), "deviation": float(rewards.deviation), "nonzero_share": share,
            "typical_size": typical,
        }  # fmt: skip
        if largest > _LARGE or (self._nonzero_count and largest < 1 / _RATIO):
            log.add("reward_scale", f"rewards are from {format_number(low)} to {format_number(high)}")
        if typical and largest > _RATIO * typical and largest > _LARGE:
            log.add("reward_outliers", f"half of the rewards are up to {format_number(typical)}, one is {format_number(largest)}")
        if len(self._lengths) >= _FEW_EPISODES and share and not np.ptp(self._returns):
            log.add("reward_sparse", f"all {len(self._lengths):,} episodes had the return {format_number(self._returns[0])}")
        if rewards.count >= _MANY_STEPS and share < _SPARSE:
            text = (
                f"{self._nonzero_count:,} of {rewards.count:,} rewards are not 0"
                if self._nonzero_count
                else f"all {rewards.count:,} rewards are 0"
            )
            log.add("reward_sparse", text)

    def _conclude_observations(self) -> None:
        parts = {name: statistics.to_json() for name, statistics in self._parts.items() if statistics.count}
        self._session.facts["observation"] = parts
        log = self._session.findings
        one_step = bool(self._lengths) and max(self._lengths) == 1  # a game whose players see nothing, such as a matrix game
        many = not one_step and min((self._parts[name].count for name in parts), default=0) >= 50
        if many and all(part["constant"] == part["numbers"] for part in parts.values()):
            log.add(
                "observation_constant", f"none of {sum(part['numbers'] for part in parts.values()):,} numbers has ever changed"
            )
        for name, part in parts.items():
            if part["image"] or not gets_numbers(self._parts[name].space):
                continue
            where = name or "the observation"
            size = max(abs(part["low"]), abs(part["high"]))
            if size > _LARGE:
                log.add("observation_scale", f"{where} is from {format_number(part['low'])} to {format_number(part['high'])}")
            elif many and part["smallest_deviation"] and part["largest_deviation"] > _RATIO * part["smallest_deviation"]:
                small, large = format_number(part["smallest_deviation"]), format_number(part["largest_deviation"])
                log.add("observation_scale", f"the numbers of {where} vary by {small} to {large}")
            declared = max(abs(part["declared_low"] or 0.0), abs(part["declared_high"] or 0.0))
            if many and size and declared > _WIDE * size:
                low, high = (format_number(part[key]) for key in ("declared_low", "declared_high"))
                log.add("bounds_wide", f"{where} is declared as {low} … {high}, and was at most {format_number(size)}")


def gets_numbers(space: Any) -> bool:
    """Whether networks get the numbers of a part as they are: bytes are divided, categories become one-hot."""
    return type(space).__name__ == "Box" and space.dtype != np.uint8


def format_ms(seconds: float) -> str:
    """0.012 ms · 3.4 ms · 1,200 ms."""
    return f"{format_number(1e3 * seconds)} ms"


def _summary(values: list[Any]) -> dict[str, float] | None:
    if not values:
        return None
    return {"low": float(min(values)), "mean": float(np.mean(values)), "high": float(max(values))}


def _mask_parts(mask: Any) -> list[Any]:
    if isinstance(mask, dict):
        return [part for item in mask.values() if item is not None for part in _mask_parts(item)]
    if isinstance(mask, tuple):
        return [part for item in mask if item is not None for part in _mask_parts(item)]
    return [np.frombuffer(mask, np.uint8) if isinstance(mask, bytes) else np.asarray(mask)]


class _Scalar:
    shape: tuple[int, ...] = ()


_SCALAR = _Scalar()
