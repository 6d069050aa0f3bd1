"""Rendering: whether the mode `rgb_array` gives images for videos."""

from __future__ import annotations

from typing import Any

import numpy as np

from ludus.envs.env_check.session import CheckSession
from ludus.envs.env_check.subject import Subject, make_subject, random_actions

VIDEO_MODE = "rgb_array"


def check_rendering(session: CheckSession) -> None:
    """Stage `rendering`."""
    plain = make_subject(session)
    modes = [str(mode) for mode in plain.metadata.get("render_modes", ())]
    session.try_call("close", plain.close)
    session.facts["render_modes"] = modes
    if VIDEO_MODE not in modes:
        return
    if not plain.metadata.get("render_fps"):
        session.findings.add("render_fps", f"metadata is {dict(plain.metadata)}"[:160])
    subject = make_subject(session, VIDEO_MODE)
    try:
        frames = _render_some(session, subject)
    finally:
        session.try_call("close", subject.close)
    session.facts["frame"] = list(np.shape(frames[0])) if frames else None


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
