"""Why a training ended, as text."""

from __future__ import annotations

REASONS = {
    "timesteps": "step limit reached",
    "iterations": "iteration limit reached",
    "training_iteration": "iteration limit reached",
    "episodes": "episode limit reached",
    "time_s": "time limit reached",
    "episode_return_mean": "target return reached",
}
"""Key of the stop condition → text."""

_INTERRUPTED = "interrupted"
_SIGNALS = {"SIGINT": "Ctrl-C"}


def is_interruption(stopped_by: str) -> bool:
    return stopped_by.startswith(_INTERRUPTED)


def in_words(stopped_by: str) -> str:
    """`time limit reached`, from the key of the stop condition; `interrupted by Ctrl-C`, from `interrupted (SIGINT)`."""
    if is_interruption(stopped_by):
        signal = stopped_by.removeprefix(_INTERRUPTED).strip(" ()")
        return f"interrupted by {_SIGNALS.get(signal, signal)}" if signal else _INTERRUPTED
    return REASONS.get(stopped_by, stopped_by)
