"""The file of a rollout: all steps of all episodes as columns of one `.npz`, assembled from one directory per episode."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ludus.core.tree import Array, Tree, leaves
from ludus.errors import Damaged, EnvironmentFault, NotFound, StoreFull

if TYPE_CHECKING:
    from ludus.sampling.multi_agent.play import Step

FINAL = "final."
"""Prefix of columns with one row per episode: the observation after its last step."""

_HEADER, _INFOS = "columns.json", "infos"


class EpisodeSteps:
    """The steps of one episode, written to disk as they come, to bound memory. A context manager."""

    def __init__(self, directory: Path, save_info: bool) -> None:
        self._directory = directory
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, IO[bytes]]] = {}
        with translate_write_errors(directory):
            shutil.rmtree(directory, ignore_errors=True)  # left by a killed process
            directory.mkdir(parents=True)
            self._infos = (directory / _INFOS).open("w", encoding="utf-8") if save_info else None

    def __enter__(self) -> EpisodeSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for *_, file in self._columns.values():
            file.close()
        if self._infos is not None:
            self._infos.close()
        if kind is None:
            head = {name: [dtype.str, list(shape), rows] for name, (dtype, shape, rows, _) in self._columns.items()}
            with translate_write_errors(self._directory):
                (self._directory / _HEADER).write_text(json.dumps(head))

    def add(self, columns: Mapping[str, Any], trees: Mapping[str, Tree], info: Mapping[str, Any] | None = None) -> None:
        """Append a row; a tree has one column per leaf."""
        with translate_write_errors(self._directory):
            for name, value in columns.items():
                self._append(name, np.asarray(value))
            for kind, tree in trees.items():
                for path, leaf in leaves(tree):
                    self._append(f"{kind}.{path}" if path else kind, np.asarray(leaf))
            if self._infos is not None and info is not None:
                self._infos.write(json.dumps(_plain(info), default=_json_default, sort_keys=True) + "\n")

    def _append(self, name: str, value: Array) -> None:
        if name not in self._columns:
            waiting = (self._directory / str(len(self._columns))).open("wb")
            self._columns[name] = value.dtype, value.shape, 0, waiting
        dtype, shape, rows, file = self._columns[name]
        if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise EnvironmentFault(f"The column {name!r} changes its shape from step to step and cannot be written.")
        file.write(np.ascontiguousarray(value, dtype).tobytes())
        self._columns[name] = dtype, shape, rows + 1, file


class AgentStepWriter:
    """Writes rows of several agents: one per action, once its reward is known, which may be turns later.

    Spaces of agents may differ, so each agent has its own observation and action columns.
    """

    def __init__(self, part: EpisodeSteps, episode: int, agents: Collection[str]) -> None:
        self._part, self._episode = part, episode
        self._names = f"U{max(map(len, agents))}"
        self._pending: dict[str, tuple[int, Tree, Any]] = {}

    def add(self, step: Step) -> None:
        for agent, action in step.actions.items():
            self._pending[agent] = step.number, step.observations[agent], action
        final = {agent: observation for agent, observation in step.final.items() if agent in self._pending}
        for agent, reward in step.rewards.items():
            self._write_row(agent, reward, agent in step.terminated, agent in step.truncated)
        for agent, observation in final.items():
            self._part.add({f"{agent}/{FINAL}episode": self._episode}, {f"{agent}/{FINAL}observation": observation})

    def close(self) -> None:
        """Write the last actions, which have no reward."""
        for agent in list(self._pending):
            self._write_row(agent, 0.0, False, False)

    def _write_row(self, agent: str, reward: float, terminated: bool, truncated: bool) -> None:
        if agent not in self._pending:
            return
        number, observation, action = self._pending.pop(agent)
        counters = {"episode": self._episode, "step": number, "agent": np.asarray(agent, self._names), "reward": float(reward)}
        ends = {"terminated": terminated, "truncated": truncated}
        self._part.add(counters | ends, {f"{agent}/observation": observation, f"{agent}/action": action})


class RolloutFile:
    """Assembles episodes in order into one file. Columns are kept in a scratch directory next to it until `write`."""

    def __init__(self, path: Path, save_info: bool) -> None:
        self._path, self._save_info = path, save_info
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, IO[bytes]]] = {}
        self._infos: list[str] = []
        with translate_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._scratch_dir = tempfile.TemporaryDirectory(prefix=".steps-", dir=path.parent)

    @property
    def scratch_dir(self) -> Path:
        """A directory for episodes; deleted with this object."""
        return Path(self._scratch_dir.name)

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(self, *exc: object) -> None:
        for *_, file in self._columns.values():
            file.close()
        self._scratch_dir.cleanup()

    def extend(self, part: Path) -> None:
        """Append the columns of an episode."""
        with translate_write_errors(self._path):
            for i, (name, (kind, sides, rows)) in enumerate(json.loads((part / _HEADER).read_text()).items()):
                dtype, shape = np.dtype(kind), tuple(sides)
                if name not in self._columns:
                    self._columns[name] = dtype, shape, 0, (self.scratch_dir / f"column-{len(self._columns)}").open("w+b")
                known, known_shape, before, file = self._columns[name]
                if (dtype, shape) != (known, known_shape):
                    raise EnvironmentFault(
                        f"The column {name!r} changes its shape from episode to episode and cannot be written."
                    )
                with (part / str(i)).open("rb") as written:
                    shutil.copyfileobj(written, file, 1 << 20)
                self._columns[name] = known, known_shape, before + rows, file
            if self._save_info:
                self._infos += (part / _INFOS).read_text(encoding="utf-8").splitlines()

    def write(self) -> Path | None:
        """Write the `.npz`, without pickled objects. Returns None if there are no steps."""
        if not self._columns:
            return None
        finished = self.scratch_dir / "steps.npz"
        with translate_write_errors(self._path):
            with zipfile.ZipFile(finished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, (dtype, shape, rows, file) in self._columns.items():
                    with archive.open(_member(name), "w", force_zip64=True) as out:
                        header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, *shape)}
                        np.lib.format.write_array_header_2_0(out, header)
                        file.seek(0)
                        shutil.copyfileobj(file, out, 1 << 20)
                if self._save_info:
                    with archive.open(_member("info"), "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, np.asarray(self._infos), allow_pickle=False)
            finished.replace(self._path)
        return self._path


def _member(name: str) -> zipfile.ZipInfo:
    """A zip member without a time stamp, so that equal steps give equal bytes."""
    member = zipfile.ZipInfo(f"{name}.npy")
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Translate OSError, such as a full disk, to StoreFull."""
    try:
        yield
    except OSError as error:
        raise StoreFull(f"Cannot write {path}: {error.strerror}.") from error


def _plain(info: Any) -> Any:
    """Convert keys to strings for JSON."""
    return {str(key): _plain(item) for key, item in info.items()} if isinstance(info, Mapping) else info


def _json_default(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value)


# -- reading ------------------------------------------------------------------------------------------------------------


def read_rollout(path: str | Path) -> list[dict[str, Array]]:
    """The episodes of a rollout file in order, each as its columns.

    `observation`, `action` (`observation.<path>` for nested spaces), `reward`, `terminated`, `truncated` have one row per step;
    `final_observation` is the one after the last step; `episode` is its number. A multi-agent episode has one entry per agent, whose
    name is in `agent`. Raises NotFound, Damaged.
    """
    try:
        with np.load(path) as file:
            columns = {name: file[name] for name in file.files}
        columns["episode"]
    except FileNotFoundError as error:
        raise NotFound(f"There is no rollout at {path}.") from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise Damaged(f"{path} is not the file of a rollout: {error}.") from error
    try:
        if "agent" not in columns:
            return _episodes(columns)
        found = [entry for agent in dict.fromkeys(columns["agent"].tolist()) for entry in _agent_episodes(columns, agent)]
    except (KeyError, IndexError) as error:
        raise Damaged(f"{path} is not the file of a rollout: {error!r}.") from error
    return sorted(found, key=lambda entry: int(entry["episode"]))


def _episodes(columns: Mapping[str, Array]) -> list[dict[str, Array]]:
    own = {name: column for name, column in columns.items() if not name.startswith(FINAL) and name != "episode"}
    last = {name.removeprefix(FINAL): column for name, column in columns.items() if name.startswith(FINAL)}
    ends = {int(number): i for i, number in enumerate(last.pop("episode", ()))}
    episodes = []
    for number in dict.fromkeys(columns["episode"].tolist()):
        rows = columns["episode"] == number
        entry = {"episode": np.asarray(number)} | {name: column[rows] for name, column in own.items()}
        if number in ends:
            entry |= {f"final_{name}": column[ends[number]] for name, column in last.items()}
        episodes.append(entry)
    return episodes


def _agent_episodes(columns: Mapping[str, Array], agent: str) -> list[dict[str, Array]]:
    """Episodes of one agent. Its own columns are prefixed with its name and have only its rows."""
    rows = columns["agent"] == agent
    shared = {name: column[rows] for name, column in columns.items() if "/" not in name and name != "agent"}
    own = {name: column for name, column in columns.items() if name.startswith(f"{agent}/")}
    entries = _episodes({name.removeprefix(f"{agent}/"): column for name, column in {**shared, **own}.items()})
    return [entry | {"agent": np.asarray(agent)} for entry in entries]
