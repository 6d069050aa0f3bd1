"""The note of a job: which runs its main command has begun, so that its next life goes on with them and begins no others.

    {"cartpole": "/shared/runs/cartpole/PPO_CartPole-v1_2026-11-16_12-00-00-1a2b3", "pong": "s3://bucket/runs/pong/…"}

Experiment → where its run is, or its sweep. It is written before there is anything at that place: no run is ever begun twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ludus.errors import LudusError
from ludus.process.job_env import RUN

_MOST_BYTES = 1 << 20


class Note:
    """`trouble`: why what was in the file says nothing; then it is replaced."""

    def __init__(self, path: Path, places: Mapping[str, str] | None = None, trouble: str = "") -> None:
        self.path, self.trouble = path, trouble
        self._places = dict(places or {})

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Note | None:
        """The note that the environment names, which does not name it any more: whatever this process starts is not the job's main."""
        named = environ.pop(RUN, "")
        return cls.read(Path(named).absolute()) if named else None

    @classmethod
    def read(cls, path: Path) -> Note:
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            return cls(path, trouble=f"it cannot be read: {error.strerror}")
        return cls(path, *_places(data))

    @property
    def places(self) -> dict[str, str]:
        return dict(self._places)

    def place(self, experiment: str) -> str | None:
        """Where its run or sweep is; None: it has not begun."""
        return self._places.get(experiment)

    def names(self, place: str) -> bool:
        return place in self._places.values()

    def write(self, experiment: str, place: str) -> str:
        """Say where it is, at once and as a whole. Returns why that cannot be: no training fails for it."""
        if self._places.get(experiment) == place:
            return ""
        from ludus.storage.local import LocalStore  # the commands read notes before they load anything

        self._places[experiment] = place
        try:
            LocalStore(self.path.parent).put(self.path.name, json.dumps(self._places, indent=1).encode())
        except LudusError as error:
            return str(error)
        return ""


def _places(data: bytes) -> tuple[dict[str, str], str]:
    if not data.strip():
        return {}, ""
    try:
        found = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError):  # also what is not UTF-8
        found = None
    if isinstance(found, dict) and all(isinstance(place, str) and place for place in found.values()):
        return found, ""
    return {}, "it is not the note of a job"
