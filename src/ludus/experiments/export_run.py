"""From a checkpoint to an ONNX file that has been compared with it, and the report of that comparison beside it."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np

from ludus.config.schema import EXTERNAL
from ludus.core import spaces
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, Tree, leaves
from ludus.envs.vector_env import make_as_trained
from ludus.errors import EnvironmentFault, LudusError, UsageError
from ludus.experiments.evaluation import rollout
from ludus.experiments.model_choice import agents_playing, choose_model
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import upload
from ludus.models.export import onnx_export, parity
from ludus.models.export.onnx_export import named, unflatten_tree
from ludus.models.export.parity import RECORDED_ROWS, ParityReport
from ludus.models.policy import Policy
from ludus.sampling.trained_agent import TrainedAgent
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

PLAYED_STEPS, PLAYED_S = 1000, 60.0
_DAMAGED = (OSError, ValueError, KeyError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Exported:
    """`file` is None when the comparison failed: then nothing was written."""

    file: Path | None
    report_file: Path | None
    report: ParityReport
    sha256: str
    places: tuple[str | None, str | None] = (None, None)
    """Where the two are, for people: of a run on a store, there."""

    def to_json(self) -> dict[str, Any]:
        files = dict(zip(("file", "report_file"), self.places, strict=True))
        return {**files, "sha256": self.sha256, **self.report.to_json()}


def export_checkpoint(
    where: str | Path,
    *,
    model: str | None = None,
    int8: bool = False,
    opset: int = onnx_export.OPSET,
    out: Path | None = None,
    observations: Path | None = None,
) -> Exported:
    """Export a model of a run or checkpoint, compare the two, and write file and report only if they agree.

    `observations` is the file of a rollout; without one, the newest of the run is taken. For int8, whose ranges are measured
    on what the agent sees, the agent plays its environment a little if there is none. Raises NotFound, Damaged, UsageError.
    """
    run, found = checkpoint.open_checkpoint(where)
    name = choose_model(found, model)
    version = int(found.state["models"][name]["version"])
    return export_policy(
        found.policy(name), run, found.state["config"], name, version,
        int8=int8, opset=opset, out=out, observations=observations,
    )  # fmt: skip


def export_policy(
    policy: Policy,
    run: Path,
    made_with: Mapping[str, Any],
    name: str,
    version: int,
    *,
    int8: bool = False,
    opset: int | None = None,
    out: Path | None = None,
    observations: Path | None = None,
) -> Exported:
    """The same with a policy that is in this process. `made_with`: the experiment that it was trained by."""
    file = _file(run, out, f"{name}-{version:06d}{'-int8' if int8 else ''}.onnx")
    recorded, notes = _recorded(run, made_with, policy, agents_playing(made_with, name), observations, int8)
    every = (made_with["config"].get("env_config") or {}).get("every")
    trained = {"every": every} if isinstance(every, int) else {}
    traced = onnx_export.export_policy(policy, opset=opset or onnx_export.OPSET, name=name, version=version, trained=trained)
    data, report = parity.artefact(policy, traced, int8=int8, recorded=recorded)
    report.notes += notes
    digest = hashlib.sha256(data).hexdigest()
    if not report.passed:
        return Exported(None, None, report, digest)
    report_file = file.with_suffix(".report.json")
    store = LocalStore(file.parent)
    # The report first: a file without one must never be seen. The digest tells which file it speaks of.
    written = {"file": file.name, "sha256": digest, **report.to_json()}  # both may be moved: no paths in it
    store.put(report_file.name, json.dumps(written, indent=1).encode())
    store.put(file.name, data)
    stored = upload(report_file)
    return Exported(file, report_file, report, digest, (upload(file), stored))


def _file(run: Path, out: Path | None, usual: str) -> Path:
    if out is None:
        return run / "exports" / usual
    if out.suffix == ".onnx" and not out.is_dir():
        return out.expanduser()
    if out.suffix and not out.is_dir():
        raise UsageError(f"--out {out} is neither a directory nor a file that ends in .onnx.")
    return out.expanduser() / usual


# -- observations from play ---------------------------------------------------------------------------------------------


def _recorded(
    run: Path, made_with: Mapping[str, Any], policy: Policy, agents: Sequence[str], given: Path | None, play: bool
) -> tuple[Tree | None, list[str]]:
    """(observations, notes about them)."""
    if given is None:
        return _seen_in_play(run, made_with, policy, agents, play, PLAYED_S)
    try:
        return recorded_observations(given, policy, agents), []
    except _DAMAGED as error:
        raise UsageError(f"{given} has no observations of this agent: {error}.", "Give the steps.npz of a rollout.") from error


def observations_of(where: str | Path, policy: Policy, *, play: bool, within_s: float, model: str | None = None) -> Tree | None:
    """What an agent of this run sees: of its newest rollout, or of steps that it plays now, if that takes no longer than this.

    None where neither can be had, for whatever reason: then random observations have to do. `model`: the name of the policy in a
    run with several agents.
    """
    try:
        run, found = checkpoint.open_checkpoint(where)
        made_with = found.state["config"]
        agents = agents_playing(made_with, model) if model is not None else ()
        return _seen_in_play(run, made_with, policy, agents, play, within_s)[0]
    except Exception as error:  # the game's own code runs here, and nobody has asked for it to be played
        log.info("There are no observations of %s: %r", where, error)
        return None


def _seen_in_play(
    run: Path, made_with: Mapping[str, Any], policy: Policy, agents: Sequence[str], play: bool, within_s: float
) -> tuple[Tree | None, list[str]]:  # fmt: skip
    rollouts = sorted((run / "rollouts").glob("*/steps.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in rollouts:
        try:
            return recorded_observations(path, policy, agents), []
        except _DAMAGED as error:
            log.info("%s is of no use here: %s", path, error)
    lacking = "no rollout of the run has observations of this model" if rollouts else "the run has no rollout"
    note = f"Compared on random observations alone: {lacking}. `ludus rollout` makes one."
    if not play or made_with["env"] == EXTERNAL or made_with["config"].get("multiagent"):
        return None, [note]
    try:
        with tempfile.TemporaryDirectory(prefix="ludus-export-") as folder:
            return _played(made_with, policy, Path(folder) / "steps.npz", within_s), []
    except (LudusError, *_DAMAGED) as error:
        return None, [f"{note} The environment could not be played either: {error}"]


def _played(made_with: Mapping[str, Any], policy: Policy, file: Path, within_s: float) -> Tree:
    environment = make_as_trained(made_with)
    hurried, count = _Hurried(environment, within_s), PLAYED_STEPS
    try:
        agent = TrainedAgent(policy)
        rollout.play(
            agent, hurried, made_with["env"], episodes=count, max_steps=count, deterministic=False, steps_file=file
        )  # fmt: skip
    finally:
        environment.close()
    return recorded_observations(file, policy)


class _Hurried(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that is given up when it is slow: what it is played for can be done without."""

    def __init__(self, environment: gym.Env[Any, Any], within_s: float) -> None:
        super().__init__(environment)
        self._within_s, self._until = within_s, time.monotonic() + within_s

    def step(self, action: Any) -> Any:
        if time.monotonic() > self._until:
            raise EnvironmentFault(f"{PLAYED_STEPS} steps take more than {self._within_s:g} s.")
        return super().step(action)


def recorded_observations(path: Path, policy: Policy, agents: Sequence[str] = ()) -> Tree:
    """The first observations in the file of a rollout, as the policy takes them. Raises one of several errors if they are not.

    `agents`: those that the policy plays, whose columns begin with their names; empty in an environment with one agent.
    """
    specs = spaces.array_spec(policy.observation_space)
    with zipfile.ZipFile(path) as archive:
        columns = set(archive.namelist())
        owners = [f"{agent}/" for agent in agents if any(column.startswith(f"{agent}/") for column in columns)] or [""]
        found = [_columns_of(archive, columns, owner, specs) for owner in owners]
    tree = unflatten_tree(specs, (np.concatenate(parts)[:RECORDED_ROWS] for parts in zip(*found, strict=True)))
    if len(next(leaves(tree))[1]) == 0:
        raise ValueError("there are no steps in it")
    return tree


def _columns_of(archive: zipfile.ZipFile, columns: Set[str], owner: str, specs: Tree) -> list[Array]:
    """The leaves of an observation, in the order of `specs`; of the agent whose columns begin with `owner`."""
    flat = []
    for name, spec in named("observation", specs):
        # Beside an action mask the only other entry is called `observation` too.
        column = next((c for c in (f"{owner}{name}.npy", f"{owner}observation.{name}.npy") if c in columns), None)
        if column is None:
            raise KeyError(f"no column {owner}{name}")
        with archive.open(column) as file:
            flat.append(_first_rows(file, name, spec))
    return flat


def _first_rows(file: IO[bytes], name: str, spec: ArraySpec) -> Array:
    """Not all of them: pictures of a long rollout may not fit into memory."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if tuple(shape[1:]) != spec.shape or fortran or dtype.hasobject or not np.can_cast(dtype, spec.dtype, "same_kind"):
        raise ValueError(f"{name} is {dtype}{list(shape[1:])}, not {spec.dtype}{list(spec.shape)}")
    rows = min(int(shape[0]), RECORDED_ROWS)
    size = rows * int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(file.read(size), dtype).reshape(rows, *spec.shape).astype(spec.dtype)
