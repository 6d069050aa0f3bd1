"""The file of a rollout: every step of every episode, as columns of one `.npz`. Written from parts, one for each episode."""

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
    from ludus.sampling.multi_agent import Step

FINAL = "final."
"""Columns with one row for each episode: what was seen after its last step."""

_HEAD, _INFOS = "columns.json", "infos"


class Part:
    """The steps of one episode, on disk, so that a long one of pictures does not fill the memory. A context manager."""

    def __init__(self, directory: Path, save_info: bool) -> None:
        self._directory = directory
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, IO[bytes]]] = {}
        with written_to(directory):
            shutil.rmtree(directory, ignore_errors=True)  # of one who died while he wrote it
            directory.mkdir(parents=True)
            self._infos = (directory / _INFOS).open("w", encoding="utf-8") if save_info else None

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for *_, file in self._columns.values():
            file.close()
        if self._infos is not None:
            self._infos.close()
        if kind is None:
            head = {name: [dtype.str, list(shape), rows] for name, (dtype, shape, rows, _) in self._columns.items()}
            with written_to(self._directory):
                (self._directory / _HEAD).write_text(json.dumps(head))

    def add(self, columns: Mapping[str, Any], trees: Mapping[str, Tree], info: Mapping[str, Any] | None = None) -> None:
        """A value for each column; a tree becomes one column for each of its leaves."""
        with written_to(self._directory):
            for name, value in columns.items():
                self._append(name, np.asarray(value))
            for kind, tree in trees.items():
                for path, leaf in leaves(tree):
                    self._append(f"{kind}.{path}" if path else kind, np.asarray(leaf))
            if self._infos is not None and info is not None:
                self._infos.write(json.dumps(_plain(info), default=_readable, sort_keys=True) + "\n")

    def _append(self, name: str, value: Array) -> None:
        if name not in self._columns:
            waiting = (self._directory / str(len(self._columns))).open("wb")
            self._columns[name] = value.dtype, value.shape, 0, waiting
        dtype, shape, rows, file = self._columns[name]
        if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise EnvironmentFault(f"The column {name!r} changes its shape from step to step and cannot be written.")
        file.write(np.ascontiguousarray(value, dtype).tobytes())
        self._columns[name] = dtype, shape, rows + 1, file


class Ledger:
    """Rows of several agents: one for each action, written when it is known what came of it, which may be turns later.

    Agents may see different things: each has columns of its own for what it sees and does.
    """

    def __init__(self, part: Part, episode: int, agents: Collection[str]) -> None:
        self._part, self._episode = part, episode
        self._names = f"U{max(map(len, agents))}"
        self._open: dict[str, tuple[int, Tree, Any]] = {}

    def note(self, step: Step) -> None:
        for agent, action in step.actions.items():
            self._open[agent] = step.number, step.observations[agent], action
        seen_last = {agent: observation for agent, observation in step.final.items() if agent in self._open}
        for agent, reward in step.rewards.items():
            self._settle(agent, reward, agent in step.terminated, agent in step.truncated)
        for agent, observation in seen_last.items():
            self._part.add({f"{agent}/{FINAL}episode": self._episode}, {f"{agent}/{FINAL}observation": observation})

    def close(self) -> None:
        """Nobody says what became of the last actions."""
        for agent in list(self._open):
            self._settle(agent, 0.0, False, False)

    def _settle(self, agent: str, reward: float, terminated: bool, truncated: bool) -> None:
        if agent not in self._open:
            return
        number, observation, action = self._open.pop(agent)
        counters = {"episode": self._episode, "step": number, "agent": np.asarray(agent, self._names), "reward": float(reward)}
        ends = {"terminated": terminated, "truncated": truncated}
        self._part.add(counters | ends, {f"{agent}/observation": observation, f"{agent}/action": action})


class StepLog:
    """All parts, in order, in one file. Columns wait on disk, beside the file they end up in."""

    def __init__(self, path: Path, save_info: bool) -> None:
        self._path, self._save_info = path, save_info
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, IO[bytes]]] = {}
        self._infos: list[str] = []
        with written_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._aside = tempfile.TemporaryDirectory(prefix=".steps-", dir=path.parent)

    @property
    def aside(self) -> Path:
        """A directory for parts; gone with the log."""
        return Path(self._aside.name)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *exc: object) -> None:
        for *_, file in self._columns.values():
            file.close()
        self._aside.cleanup()

    def extend(self, part: Path) -> None:
        """Append the columns of an episode."""
        with written_to(self._path):
            for i, (name, (kind, sides, rows)) in enumerate(json.loads((part / _HEAD).read_text()).items()):
                dtype, shape = np.dtype(kind), tuple(sides)
                if name not in self._columns:
                    self._columns[name] = dtype, shape, 0, (self.aside / f"column-{len(self._columns)}").open("w+b")
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
        """`.npz`: no pickled objects; `numpy.load` opens it with its defaults. None if empty."""
        if not self._columns:
            return None
        finished = self.aside / "steps.npz"
        with written_to(self._path):
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
    """Without the time of day: the same steps are the same bytes."""
    member = zipfile.ZipInfo(f"{name}.npy")
    member.compress_type = zipfile.ZIP_DEFLATED
    return member


@contextlib.contextmanager
def written_to(path: Path) -> Iterator[None]:
    """A full disk, once, as the error that says so."""
    try:
        yield
    except OSError as error:
        raise StoreFull(f"Cannot write {path}: {error.strerror}.") from error


def _plain(info: Any) -> Any:
    """JSON has words for keys."""
    return {str(key): _plain(item) for key, item in info.items()} if isinstance(info, Mapping) else info


def _readable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value)


# -- reading ------------------------------------------------------------------------------------------------------------


def read_rollout(path: str | Path) -> list[dict[str, Array]]:
    """The episodes of a rollout's file, in order, each as its columns.

    `observation`, `action` (of nested spaces `observation.<path>` …), `reward`, `terminated`, `truncated` have one row for each
    step, `final_observation` is what was seen after the last one; `episode` is its number. Of several agents there is one entry
    for each agent of an episode, whose name is in `agent`. Raises NotFound, Damaged.
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
        found = [entry for agent in dict.fromkeys(columns["agent"].tolist()) for entry in _of_agent(columns, agent)]
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


def _of_agent(columns: Mapping[str, Array], agent: str) -> list[dict[str, Array]]:
    """Columns of one agent alone have its name before them, and only its rows."""
    rows = columns["agent"] == agent
    shared = {name: column[rows] for name, column in columns.items() if "/" not in name and name != "agent"}
    own = {name: column for name, column in columns.items() if name.startswith(f"{agent}/")}
    entries = _episodes({name.removeprefix(f"{agent}/"): column for name, column in {**shared, **own}.items()})
    return [entry | {"agent": np.asarray(agent)} for entry in entries]
