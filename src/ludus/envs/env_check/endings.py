"""Unusual calls: reset in the middle of an episode, a step after its end, a forbidden action."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from ludus.core import spaces
from ludus.envs.env_check.session import CallFailed, CheckSession
from ludus.envs.env_check.subject import Moment, SoloSubject, Subject, flat_mask, make_subject, random_actions
from ludus.envs.pettingzoo import sample_action

_MOST_STEPS = 2_000


def check_endings(session: CheckSession) -> None:
    """Stage `endings`."""
    random, session.step = np.random.default_rng(session.request.seed), 0
    subject = make_subject(session)
    try:
        _reset_midway(session, subject, random)
        if isinstance(subject, SoloSubject):
            _step_after_end(session, subject, random)
    finally:
        session.try_call("close", subject.close)


def _reset_midway(session: CheckSession, subject: Subject, random: np.random.Generator) -> None:
    moment = subject.reset(session.request.seed)
    for _ in range(3):
        session.step += 1
        moment = subject.reset(None) if moment.over else subject.step(random_actions(subject, moment, random))
    reset = subject.env.reset if isinstance(subject, SoloSubject) else functools.partial(subject.match.reset, 0)
    _, failure = session.try_call("reset in the middle of an episode", reset)
    if failure:
        session.findings.add("reset_midway", f"reset after {session.step} steps: {failure}")
        raise CallFailed("reset")
    _, failure = session.try_call("reset after reset", reset)
    if failure:
        session.findings.add("reset_midway", f"two resets in a row: {failure}")


def _step_after_end(session: CheckSession, subject: SoloSubject, random: np.random.Generator) -> None:
    moment, session.step, actions, until = subject.reset(None), 0, dict[str, Any](), session.deadline()
    while not moment.over and session.step < _MOST_STEPS and time.perf_counter() < until:
        session.step += 1
        actions = random_actions(subject, moment, random)
        moment = subject.step(actions)
    if not moment.over:
        return
    session.step += 1
    made, failure = session.try_call("step after the end of an episode", lambda: subject.env.step(actions[""]))
    ended = isinstance(made, tuple) and len(made) == 5 and bool(made[2] or made[3])
    session.facts["step_after_end"] = f"raises {failure}" if failure else "returns the end again" if ended else "goes on"


def check_illegal_action(session: CheckSession) -> None:
    """Stage `illegal action`: only if the environment has masks."""
    random, session.step = np.random.default_rng(session.request.seed), 0
    subject = make_subject(session)
    try:
        moment, until = subject.reset(session.request.seed), session.deadline()
        while session.step < _MOST_STEPS and time.perf_counter() < until:
            agent = _restricted_agent(subject, moment)
            if agent is not None:
                session.facts["illegal_action"] = _act_illegally(session, subject, moment, agent, random)
                return
            if moment.over and not moment.observations:
                moment = subject.reset(None)
            elif not moment.masks and moment.observations:
                return
            session.step += 1
            moment = subject.step(random_actions(subject, moment, random))
    finally:
        session.try_call("close", subject.close)


def _restricted_agent(subject: Subject, moment: Moment) -> str | None:
    for agent in moment.observations:
        mask = flat_mask(subject, agent, moment)
        if mask is not None and any(not mask[part].all() for part in spaces.choices(subject.agents[agent].action)):
            return agent
    return None


def _act_illegally(session: CheckSession, subject: Subject, moment: Moment, agent: str, random: np.random.Generator) -> str:
    """Describe what a forbidden action does."""
    mask = flat_mask(subject, agent, moment)
    forbidden = mask.copy()
    for part in spaces.choices(subject.agents[agent].action):
        if not mask[part].all():
            forbidden[part] = ~mask[part]
            break
    action = sample_action(subject.agents[agent].action, forbidden, random)
    actions = {**random_actions(subject, moment, random), agent: action[()] if isinstance(action, np.ndarray) else action}
    session.step += 1
    what = "a step with a forbidden action"
    if isinstance(subject, SoloSubject):
        made, failure = session.try_call(what, subject.env.step, actions[""])
        ended = not failure and bool(made[2] or made[3])
    else:
        made, failure = session.try_call(what, subject.match.step, actions)
        ended = not failure and bool(made.over)
    if failure:
        return "raises an exception"
    return "ends the episode" if ended else "is accepted"
