"""Rendering: whether the mode `rgb_array` gives images for videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ludus.envs.env_check.session import CallFailed, CheckSession
from ludus.envs.env_check.subject import Subject, make_subject, random_actions
from ludus.errors import UsageError

VIDEO_MODE = "rgb_array"


def check_rendering(session: CheckSession) -> None:
    """Stage `rendering`."""
    plain = make_subject(session)
    metadata = plain.metadata
    session.try_call("close", plain.close)
    if not metadata.get("render_modes"):
        metadata = _metadata_with_video(session)
    modes = [str(mode) for mode in metadata.get("render_modes", ())]
    session.facts["render_modes"] = modes
    if VIDEO_MODE not in modes:
        return
    if not metadata.get("render_fps"):
        session.findings.add("render_fps", f"metadata is {dict(metadata)}"[:160])
    try:
        frames = _render_one(session)
    except UsageError as error:  # a matter of this machine or of the settings, such as a game without a screen
        session.facts["no_video"] = str(error)
        return
    session.facts["frame"] = list(np.shape(frames[0])) if frames else None


def _render_one(session: CheckSession) -> list[Any]:
    subject = make_subject(session, VIDEO_MODE)
    try:
        return _render_some(session, subject)
    finally:
        session.try_call("close", subject.close)


def _metadata_with_video(session: CheckSession) -> Mapping[str, Any]:
    """Of an environment that training makes as a vector, which says nothing about rendering, and rollouts as a single one."""
    quiet = CheckSession(session.request, marks=session.marks)
    try:
        shown = make_subject(quiet, VIDEO_MODE)
    except (CallFailed, UsageError):
        return {}
    quiet.try_call("close", shown.close)
    return shown.metadata


def _render_some(session: CheckSession, subject: Subject) -> list[Any]:
    random, session.step, frames = np.random.default_rng(session.request.seed), 0, list[Any]()
    moment = subject.reset(session.request.seed)
    for _ in range(4):
        frame = subject.render()
        problem = frame_problem(frame)
        if problem:
            session.findings.add("render", f"render() returned {problem} at step {session.step}")
            return []
        if frames and np.shape(frame) != np.shape(frames[0]):
            session.findings.add(
                "render", f"the size of images changes from {list(np.shape(frames[0]))} to {list(np.shape(frame))}"
            )
            return []
        frames.append(np.array(frame))
        session.step += 1
        moment = subject.reset(None) if moment.over else subject.step(random_actions(subject, moment, random))
    return frames


def frame_problem(frame: Any) -> str:
    """What keeps a frame from being an image of a video; empty if nothing does."""
    if frame is None:
        return "None"
    if isinstance(frame, (list, tuple)):
        return f"a {type(frame).__name__} of {len(frame)}"
    array = np.asarray(frame)
    if array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8:
        return ""
    flat = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    return f"{array.dtype}{list(array.shape)}" + (
        ", which is a depth map and not an image" if flat and array.dtype.kind == "f" else ""
    )
