"""The stages of a check, in their order. Each makes its own copies of the environment."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core import spaces
from ludus.envs.env_check import closing, endings, play, rendering, seeding, vectors
from ludus.envs.env_check.findings import EnvReport, FindingLog
from ludus.envs.env_check.session import CallFailed, CheckRequest, CheckSession
from ludus.envs.env_check.subject import MatchSubject, SoloSubject, make_subject
from ludus.envs.preprocessing import drop_parts
from ludus.errors import ConfigError, LudusError
from ludus.process import screen_choice

Stage = Callable[[CheckSession], None]

SECOND_PROCESS = "second process"
VITAL = ("spaces", "play")
"""Stages without which the others make no sense."""


def check_spaces(session: CheckSession) -> None:
    """Stage `spaces`."""
    session.step = 0
    subject = make_subject(session)
    session.facts["construct_s"] = session.last_call_s
    session.try_call("close", subject.close)
    if isinstance(subject, SoloSubject):
        _check_reset_arguments(session, subject.env.unwrapped.reset)
    session.facts["several_agents"] = isinstance(subject, MatchSubject)
    drop: set[str] = set()
    agents: dict[str, Any] = {}
    for agent, view in subject.agents.items():
        who = f"{agent}: " if agent else ""
        texts = _unlearnable_parts(view.observation)
        for part in texts:
            session.findings.add("text_part", f"{who}{part} is not numbers")
        drop |= set(texts)
        try:
            rest = _without(view.observation, texts)
            spaces.check_usable(rest, "observation")
            spaces.check_usable(view.action, "action")
        except ConfigError as error:
            session.findings.add("spaces", f"{who}{error.message}")
            raise CallFailed("spaces") from error
        _check_action_bounds(session, view.action, who)
        _check_room(session, rest, who)
        agents[agent] = {"observation": spaces.to_json(rest), "action": spaces.to_json(view.action)}
    session.facts["drop"] = sorted(drop)
    session.facts["spaces"] = agents
    session.drop = tuple(sorted(drop))


def _unlearnable_parts(space: gym.Space[Any]) -> list[str]:
    """Parts of a Dict without a fixed array shape, such as text, which `preprocess: {drop: …}` can remove."""
    if not isinstance(space, gym.spaces.Dict):
        return []
    found = []
    for path, leaf in spaces.space_leaves(space):
        try:
            spaces.array_spec(leaf)
        except ConfigError:
            found.append(path)
    return found


def _without(space: gym.Space[Any], drop: list[str]) -> gym.Space[Any]:
    return drop_parts(space, drop, "the observation")[0] if drop else space


def _check_action_bounds(session: CheckSession, space: gym.Space[Any], who: str) -> None:
    for path, leaf in spaces.space_leaves(space):
        if isinstance(leaf, gym.spaces.Box) and not (np.isfinite(leaf.low).all() and np.isfinite(leaf.high).all()):
            text = f"{who}{path or 'the action'} is {leaf.low.min()} … {leaf.high.max()}"
            session.findings.add("action_bounds", text)


def _check_room(session: CheckSession, space: gym.Space[Any], who: str) -> None:
    for path, leaf in spaces.space_leaves(space):
        if isinstance(leaf, gym.spaces.Box) and leaf.shape and (equal := leaf.low == leaf.high).any():
            text = f"{who}{path or 'the observation'}: {int(equal.sum())} of {equal.size} numbers have one value only"
            session.findings.add("bounds_equal", text)


def _check_reset_arguments(session: CheckSession, reset: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):  # no signature, for example of a C function
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    lacking = [name for name in ("seed", "options") if name not in parameters]
    if lacking:
        session.findings.add("reset_arguments", f"reset({', '.join(parameters)}) has no {' and no '.join(lacking)}")


STAGES: Mapping[str, Stage] = {
    "spaces": check_spaces,
    "play": play.play_at_random,
    "endings": endings.check_endings,
    "seeding": seeding.check_seeding,
    "illegal action": endings.check_illegal_action,
    "vector": vectors.check_vector,
    "closing": closing.check_closing,
    "rendering": rendering.check_rendering,
}


def run_stage(session: CheckSession, stage: str) -> bool:
    """Run one stage; returns False if it ended early. Findings and facts are in the session. Raises UsageError.

    An unexpected error is one of the check: raised as LudusError, so that it is not taken for one of the environment.
    """
    try:
        if stage == SECOND_PROCESS:
            seeding.check_second_process(session)
        else:
            STAGES[stage](session)
    except CallFailed:
        return False
    except LudusError:
        raise
    except Exception as error:
        where = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == Path(__file__).parent
        ][-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        raise LudusError(
            f"The stage {stage!r} of the check failed at {place}: {type(error).__name__}: {error}.",
            "This is not your fault; please report it.",
        ) from error
    return True


def check_in_process(request: CheckRequest, log: FindingLog | None = None) -> EnvReport:
    """Check an environment in this process: without time limits, and a crash ends this process. Raises UsageError."""
    screen_choice.configure(request.display)
    session, done = CheckSession(request, log), list[str]()
    for stage in STAGES:
        complete = run_stage(session, stage)
        if complete:
            done.append(stage)
        elif stage in VITAL:
            break
    return report_of(session, done)


def report_of(session: CheckSession, stages: list[str]) -> EnvReport:
    request = session.request
    return EnvReport(
        request.env, dict(request.env_config), list(session.findings), session.facts, stages, request.reported_settings
    )
