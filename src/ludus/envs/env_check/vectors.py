"""The environment's own vector version: whether it exists, what it returns, and what it gains."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import array_spec
from ludus.core.tree import leaves, map_tree
from ludus.envs import pettingzoo
from ludus.envs.env_check.session import CheckSession
from ludus.envs.env_check.subject import is_match
from ludus.envs.env_check.values import problems_of
from ludus.envs.pettingzoo import sample_action
from ludus.envs.vector_env import Environments, LoopEnvironments, make_environments

_ROWS = 4
_STEPS = 60
_MOST_ROWS = 32
_START_S = 3.0
"""Time in which the measured copies must be made and reset, as far as one copy can tell."""


def check_vector(session: CheckSession) -> None:
    """Stage `vector`."""
    session.step = 0
    if is_match(session):
        _measure_matches(session)
        return
    environments = _make(session, _ROWS)
    try:
        session.facts["native_vector"] = native = not isinstance(environments, LoopEnvironments)
        if native:
            _check_rows(session, environments)
    finally:
        session.try_call("close", environments.close)
    if any(finding.check.level == "mistake" for finding in session.findings):
        return  # it would raise them again, in other words
    many = _MOST_ROWS
    if not native:
        one_s = session.facts.get("construct_s", 0.0) + session.facts.get("reset_s", {}).get("max", 0.0)
        many = max(2, min(_MOST_ROWS, int(_START_S / max(one_s, 1e-6))))
    session.facts["rows_steps_per_s"] = {str(rows): _measure(session, rows) for rows in (1, many)}


def _make(session: CheckSession, rows: int) -> Environments:
    request, preprocess = session.request, session.preprocessing
    made: Environments = session.call(
        "its constructor", make_environments, request.env, rows, request.env_config, preprocess=preprocess,
        wrappers=request.wrappers, beat=session.beat("a call of several copies"), kind="construct",
    )  # fmt: skip
    return made


def _random_rows(space: gym.Space[Any], mask: Any, rows: int, random: np.random.Generator) -> Any:
    drawn = [sample_action(space, None if mask is None else _usable(mask[row]), random) for row in range(rows)]
    return map_tree(lambda *parts: np.stack(parts), *drawn)


def _usable(mask: Any) -> Any:
    return mask if mask.any() else None


def _check_rows(session: CheckSession, environments: Environments) -> None:
    log, random, rows = session.findings, np.random.default_rng(session.request.seed), environments.num
    if rows != _ROWS:
        log.add("vector", f"it has {rows} rows where num_envs was {_ROWS}")
        return
    seen = session.call("reset of the vector version", environments.reset, session.request.seed, kind="vector")
    differ, until = False, session.deadline()
    for step in range(_STEPS):
        session.step = step
        if time.perf_counter() > until:
            return
        if not _check_observation(session, environments, seen.observation):
            return
        differ = differ or any(np.any(np.asarray(leaf) != np.asarray(leaf)[:1]) for _, leaf in leaves(seen.observation))
        action = _random_rows(environments.action_space, seen.mask, rows, random)
        result = session.call("step of the vector version", environments.step, action, kind="vector")
        for name in ("reward", "terminated", "truncated"):
            shape = np.shape(getattr(result, name))
            if shape != (rows,):
                log.add("vector", f"{name} has shape {list(shape)} at step {step}, {rows} rows need [{rows}]")
                return
        if not np.isfinite(np.asarray(result.reward, np.float64)).all():
            log.add("reward", f"a reward of the vector version is not finite at step {step}")
        seen = result.observations
    if not differ and rows > 1:
        log.add("rows_equal", f"all {rows} rows had the same observations in {_STEPS} steps, with different actions")


def _check_observation(session: CheckSession, environments: Environments, observation: Any) -> bool:
    given = dict(leaves(observation))
    for path, spec in leaves(array_spec(environments.observation_space)):
        where = path or "the observation"
        if path not in given:
            session.findings.add("vector", f"{where} is missing in the observations at step {session.step}")
            return False
        shape, expected = np.shape(given[path]), (environments.num, *spec.shape)
        if shape != expected:
            session.findings.add("vector", f"{where} has shape {list(shape)} at step {session.step}, not {list(expected)}")
            return False
    for row in range(environments.num):
        one = map_tree(lambda part, row=row: np.asarray(part)[row], observation)
        for problem in problems_of(environments.observation_space, one):
            session.findings.add(problem.kind, f"row {row} of the vector version: {problem.text}, at step {session.step}")
    return True


def _measure(session: CheckSession, rows: int) -> float:
    """Steps per second of all rows together."""
    random, environments = np.random.default_rng(session.request.seed), _make(session, rows)
    try:
        seen = session.call("reset of several copies", environments.reset, session.request.seed)
        count, began, busy = 0, time.perf_counter(), 0.0
        while time.perf_counter() < began + session.request.measure_s or not count:
            action = _random_rows(environments.action_space, seen.mask, rows, random)
            seen = session.call("step of several copies", environments.step, action).observations
            count, busy = count + rows, busy + session.last_call_s
        return count / busy
    finally:
        session.try_call("close", environments.close)


def _measure_matches(session: CheckSession) -> None:
    request = session.request
    made = session.call(
        "its constructor", pettingzoo.make_vector_matches, request.env, _ROWS, request.env_config, request.wrappers,
        session.preprocessing, kind="construct",
    )  # fmt: skip
    session.facts["native_vector"] = made is not None
    if made is not None:
        session.try_call("close", made.close)
