"""Exports a policy of a run to ONNX, compares the two, and writes the file with a report of the comparison."""

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
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import agents_playing, choose_model
from ludus.experiments.runs.remote_runs import upload
from ludus.models.export import ml_agents, ml_agents_parity, onnx_export, parity
from ludus.models.export.onnx_export import named_leaves, unflatten_tree
from ludus.models.export.parity import RECORDED_ROWS, ParityReport
from ludus.models.policy import Policy
from ludus.sampling.trained_agent import TrainedAgent
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

LAYOUTS = (onnx_export.LAYOUT, ml_agents.LAYOUT)
PLAY_STEPS, PLAY_TIMEOUT_S = 1000, 60.0
_UNITY = "unity"
_UNREADABLE = (OSError, ValueError, KeyError, zipfile.BadZipFile)


@dataclass(frozen=True)
class ExportResult:
    """`file` is None if the comparison failed; nothing was written then."""

    file: Path | None
    report_file: Path | None
    report: ParityReport
    sha256: str
    places: tuple[str | None, str | None] = (None, None)
    """Locations of both files for users: URLs for a remote run."""

    def to_json(self) -> dict[str, Any]:
        files = dict(zip(("file", "report_file"), self.places, strict=True))
        return {**files, "sha256": self.sha256, **self.report.to_json()}


def export_checkpoint(
    where: str | Path,
    *,
    model: str | None = None,
    layout: str = onnx_export.LAYOUT,
    int8: bool = False,
    opset: int | None = None,
    out: Path | None = None,
    observations: Path | None = None,
) -> ExportResult:
    """Export a model of a run or checkpoint; write file and report only if the export acts like the policy.

    `layout`: one of LAYOUTS. `opset`: None for the usual one of the layout. `observations`: the file of a rollout; None: the newest rollout of the run. For int8, which is calibrated on observations, the agent
    plays its environment briefly if there is no rollout. Raises NotFound, Damaged, UsageError.
    """
    run, stored = checkpoint.open_checkpoint(where)
    name = choose_model(stored, model)
    version = int(stored.state["models"][name]["version"])
    return export_policy(
        stored.policy(name), run, stored.state["config"], name, version,
        layout=layout, int8=int8, opset=opset, out=out, observations=observations,
    )  # fmt: skip


def export_policy(
    policy: Policy,
    run: Path,
    experiment: Mapping[str, Any],
    name: str,
    version: int,
    *,
    layout: str = onnx_export.LAYOUT,
    int8: bool = False,
    opset: int | None = None,
    out: Path | None = None,
    observations: Path | None = None,
) -> ExportResult:
    """As `export_checkpoint`, for a loaded policy. `experiment`: the one of its training."""
    if layout not in LAYOUTS:
        raise UsageError(f"The layout {layout!r} is not known.", f"Use {' or '.join(LAYOUTS)}.")
    if int8 and layout != onnx_export.LAYOUT:
        raise UsageError(f"int8 is not available in the layout {layout}.", "Unity quantises models itself when it imports them.")
    form = "-int8" if int8 else "" if layout == onnx_export.LAYOUT else f"-{layout}"
    file = _output_file(run, out, f"{name}-{version:06d}{form}.onnx")
    recorded, notes = _load_observations(run, experiment, policy, agents_playing(experiment, name), observations, int8)
    every = (experiment["config"].get("env_config") or {}).get("every")
    trained = {"every": every} if isinstance(every, int) else {}
    if layout == ml_agents.LAYOUT:
        channels_last = True if experiment["env"] == _UNITY else None  # as that environment has all images
        sensors = ml_agents.sensors_of(policy, channels_last)
        usual = opset or ml_agents.OPSET
        data = ml_agents.export_policy(policy, sensors, opset=usual, name=name, version=version, trained=trained)
        report = ml_agents_parity.verify(policy, data, recorded, sensors)
    else:
        traced = onnx_export.export_policy(policy, opset=opset or onnx_export.OPSET, name=name, version=version, trained=trained)
        data, report = parity.artefact(policy, traced, int8=int8, recorded=recorded)
    report.notes += notes
    digest = hashlib.sha256(data).hexdigest()
    if not report.passed:
        return ExportResult(None, None, report, digest)
    report_file = file.with_suffix(".report.json")
    store = LocalStore(file.parent)
    # The report first: a file must never exist without one. The digest identifies its file.
    content = {"file": file.name, "sha256": digest, **report.to_json()}  # no paths: both files may be moved
    store.put(report_file.name, json.dumps(content, indent=1).encode())
    store.put(file.name, data)
    stored = upload(report_file)
    return ExportResult(file, report_file, report, digest, (upload(file), stored))


def _output_file(run: Path, out: Path | None, usual: str) -> Path:
    if out is None:
        return run / "exports" / usual
    if out.suffix == ".onnx" and not out.is_dir():
        return out.expanduser()
    if out.suffix and not out.is_dir():
        raise UsageError(f"--out {out} is neither a directory nor a file that ends in .onnx.")
    return out.expanduser() / usual


# -- observations -------------------------------------------------------------------------------------------------------


def _load_observations(
    run: Path, experiment: Mapping[str, Any], policy: Policy, agents: Sequence[str], given: Path | None, play: bool
) -> tuple[Tree | None, list[str]]:
    """(observations, notes about them)."""
    if given is None:
        return _observations_of_run(run, experiment, policy, agents, play, PLAY_TIMEOUT_S)
    try:
        return recorded_observations(given, policy, agents), []
    except _UNREADABLE as error:
        raise UsageError(f"{given} has no observations of this agent: {error}.", "Give the steps.npz of a rollout.") from error


def observations_of(where: str | Path, policy: Policy, *, play: bool, within_s: float, model: str | None = None) -> Tree | None:
    """Observations of an agent from the newest rollout of its run, or with `play` from steps played now within `within_s`.

    None if neither is possible; the caller uses random observations then. `model`: the name of the policy in a multi-agent run.
    """
    try:
        run, stored = checkpoint.open_checkpoint(where)
        experiment = stored.state["config"]
        agents = agents_playing(experiment, model) if model is not None else ()
        return _observations_of_run(run, experiment, policy, agents, play, within_s)[0]
    except (LudusError, *_UNREADABLE) as error:  # the observations are optional
        log.info("no observations of %s: %r", where, error)
        return None


def _observations_of_run(
    run: Path, experiment: Mapping[str, Any], policy: Policy, agents: Sequence[str], play: bool, within_s: float
) -> tuple[Tree | None, list[str]]:  # fmt: skip
    rollouts = sorted((run / "rollouts").glob("*/steps.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in rollouts:
        try:
            return recorded_observations(path, policy, agents), []
        except _UNREADABLE as error:
            log.info("%s has no observations of this policy: %s", path, error)
    lacking = "no rollout of the run has observations of this model" if rollouts else "the run has no rollout"
    note = f"Compared only on random observations: {lacking}. `ludus rollout` makes one."
    if not play or experiment["env"] == EXTERNAL or experiment["config"].get("multiagent"):
        return None, [note]
    try:
        with tempfile.TemporaryDirectory(prefix="ludus-export-") as folder:
            return _play_observations(experiment, policy, Path(folder) / "steps.npz", within_s), []
    except (LudusError, *_UNREADABLE) as error:
        return None, [f"{note} The environment could not be played either: {error}"]


def _play_observations(experiment: Mapping[str, Any], policy: Policy, file: Path, within_s: float) -> Tree:
    environment = make_as_trained(experiment)
    hurried, count = _TimeLimited(environment, within_s), PLAY_STEPS
    try:
        files = rollout.RolloutFiles(steps=file)
        rollout.play(
            TrainedAgent(policy), hurried, experiment["env"], episodes=count, max_steps=count, deterministic=False, files=files
        )
    finally:
        environment.close()
    return recorded_observations(file, policy)


class _TimeLimited(gym.Wrapper[Any, Any, Any, Any]):
    """Raises EnvironmentFault when the environment has taken longer than `within_s`."""

    def __init__(self, environment: gym.Env[Any, Any], within_s: float) -> None:
        super().__init__(environment)
        self._within_s, self._until = within_s, time.monotonic() + within_s

    def step(self, action: Any) -> Any:
        if time.monotonic() > self._until:
            raise EnvironmentFault(f"{PLAY_STEPS} steps take more than {self._within_s:g} s.")
        return super().step(action)


def recorded_observations(path: Path, policy: Policy, agents: Sequence[str] = ()) -> Tree:
    """The first observations in the file of a rollout, in the form of the policy. Raises OSError, ValueError, KeyError, BadZipFile.

    `agents`: those that the policy plays; their names prefix the columns. Empty in a single-agent environment.
    """
    specs = spaces.array_spec(policy.observation_space)
    with zipfile.ZipFile(path) as archive:
        columns = set(archive.namelist())
        owners = [f"{agent}/" for agent in agents if any(column.startswith(f"{agent}/") for column in columns)] or [""]
        found = [_read_columns(archive, columns, owner, specs) for owner in owners]
    tree = unflatten_tree(specs, (np.concatenate(parts)[:RECORDED_ROWS] for parts in zip(*found, strict=True)))
    if len(next(leaves(tree))[1]) == 0:
        raise ValueError("it has no steps")
    return tree


def _read_columns(archive: zipfile.ZipFile, columns: Set[str], owner: str, specs: Tree) -> list[Array]:
    """The leaves of an observation in the order of `specs`. `owner`: prefix of the agent's columns."""
    flat = []
    for name, spec in named_leaves("observation", specs):
        # With an action mask, the only other entry is also called `observation`.
        column = next((c for c in (f"{owner}{name}.npy", f"{owner}observation.{name}.npy") if c in columns), None)
        if column is None:
            raise KeyError(f"no column {owner}{name}")
        with archive.open(column) as file:
            flat.append(_first_rows(file, name, spec))
    return flat


def _first_rows(file: IO[bytes], name: str, spec: ArraySpec) -> Array:
    """Reads only the first rows: images of a long rollout may not fit into memory."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if tuple(shape[1:]) != spec.shape or fortran or dtype.hasobject or not np.can_cast(dtype, spec.dtype, "same_kind"):
        raise ValueError(f"{name} is {dtype}{list(shape[1:])}, not {spec.dtype}{list(spec.shape)}")
    rows = min(int(shape[0]), RECORDED_ROWS)
    size = rows * int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(file.read(size), dtype).reshape(rows, *spec.shape).astype(spec.dtype)
