"""The file in which a job records its runs, so that its main command continues them after a restart instead of starting new ones.

It is a path, or a URL of a store where the restarted command may run on another machine without a common file system.

    {"cartpole": "/shared/runs/cartpole/PPO_CartPole-v1_2026-11-16_12-00-00-1a2b3", "pong": "s3://bucket/runs/pong/…"}

It maps each experiment to the location of its run or sweep. An entry is written before the run is created, so no run starts twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ludus.errors import LudusError, NotFound
from ludus.process.job_env import RUN

_MAX_BYTES = 1 << 20


class JobResumeFile:
    """`trouble`: why the file could not be read; the next write replaces it."""

    def __init__(self, path: Path | str, locations: Mapping[str, str] | None = None, trouble: str = "") -> None:
        self.path, self.trouble = path, trouble
        self._locations = dict(locations or {})

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> JobResumeFile | None:
        """Read the file that the environment names and remove the variable: child processes are not the job's main command.

        Raises StoreError if its store cannot be read: then it is unknown whether there is a run to resume.
        """
        path = environ.pop(RUN, "")
        if "://" in path:
            return cls._read_store(path)
        return cls.read(Path(path).absolute()) if path else None

    @classmethod
    def _read_store(cls, url: str) -> JobResumeFile:
        from ludus.storage.base import open_store

        place, key = _split_url(url)
        try:
            return cls(url, *_parse_locations(open_store(place).get(key)))
        except NotFound:
            return cls(url)

    @classmethod
    def read(cls, path: Path) -> JobResumeFile:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            return cls(path, trouble=f"it cannot be read: {error.strerror}")
        return cls(path, *_parse_locations(data))

    @property
    def locations(self) -> dict[str, str]:
        return dict(self._locations)

    def location(self, experiment: str) -> str | None:
        """Location of the experiment's run or sweep; None: it has not started."""
        return self._locations.get(experiment)

    def names(self, location: str) -> bool:
        return location in self._locations.values()

    def write(self, experiment: str, location: str) -> str:
        """Record a location atomically. Returns the error message, or "": training must not fail because of it."""
        if self._locations.get(experiment) == location:
            return ""
        from ludus.storage.base import open_store  # commands read this file before slow imports

        self._locations[experiment] = location
        place, key = _split_url(str(self.path))
        try:
            open_store(place).put(key, json.dumps(self._locations, indent=1).encode())
        except LudusError as error:
            return str(error)
        return ""


def _split_url(url: str) -> tuple[str, str]:
    """Return the store and the key of a path or URL: s3://bucket/a/b.json?region=x → s3://bucket/a?region=x and b.json."""
    if "://" not in url:
        return str(Path(url).parent), Path(url).name
    path, mark, query = url.partition("?")
    place, _, key = path.rpartition("/")
    return f"{place}{mark}{query}", key


def _parse_locations(data: bytes) -> tuple[dict[str, str], str]:
    if not data.strip():
        return {}, ""
    try:
        locations = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):  # ValueError: also invalid UTF-8
        locations = None
    if isinstance(locations, dict) and all(isinstance(location, str) and location for location in locations.values()):
        return locations, ""
    return {}, "it is not the resume file of a job"
