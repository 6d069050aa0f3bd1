"""Errors of the user's environments, raised as EnvironmentFault or MissingExtra with their location."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from ludus.errors import EnvironmentFault, LudusError, MissingExtra, user_frame

log = logging.getLogger(__name__)


class environment_errors:  # noqa: N801 - a class because entering a generator would cost more than the steps of small games
    """Translate the errors of a call of an environment. A context manager."""

    __slots__ = ("_call", "_name", "_row", "_step")

    def __init__(self, name: str, call: str, step: int, row: int | None = None) -> None:
        self._name, self._call, self._step, self._row = name, call, step, row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):  # user code may raise anything
            who = self._name if self._row is None else f"environment {self._row} of {self._name}"
            raise EnvironmentFault(
                f"{who} raised {type(error).__name__} in {self._call} (step {self._step}): {error}{user_frame(error)}."
            ) from error


@contextlib.contextmanager
def construction_errors(name: str, extra: str | None = None) -> Iterator[None]:
    """Translate the errors of a constructor. `extra`: the extra of Ludus that has its packages; None: guessed from the error."""
    try:
        yield
    except LudusError:
        raise
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        extra = extra or next((family for family in ("mujoco", "box2d") if family in str(error).lower()), "all")
        raise MissingExtra(f"{name} needs more packages: {error}.", f"pip install 'ludus[{extra}]'") from error
    except TypeError as error:
        raise EnvironmentFault(
            f"{name} could not be constructed: {error}{user_frame(error)}.", "Check config.env_config."
        ) from error
    except gym.error.Error as error:
        raise EnvironmentFault(f"{name} could not be constructed: {error}.") from error
    except Exception as error:  # user code may raise anything
        raise EnvironmentFault(f"{name} raised {type(error).__name__} in its constructor: {error}{user_frame(error)}.") from error


def close_quietly(env: Any) -> None:
    """Close an environment that is no longer needed or has failed; errors are logged."""
    try:
        env.close()
    except Exception:  # user code may raise anything
        log.debug("closing an environment failed", exc_info=True)
