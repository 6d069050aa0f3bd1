"""Moved to `ludus.pids`."""

from ludus.pids import *  # noqa: F403
