"""The checkpoint follower: turns checkpoints of runs into releases and offers them to the workers of a service."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ludus.config.experiment_file import load_experiments
from ludus.config.schema import EXTERNAL
from ludus.config.validation import parse_external_config
from ludus.core.tree import Tree
from ludus.errors import Damaged, IncompatibleCheckpoint, LudusError, NotFound, StoreError, UsageError
from ludus.experiments.assembly.http_training import gateway_settings
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import directory_of, display_path, is_remote, store_of
from ludus.experiments.runs.run_dir import find_runs
from ludus.experiments.validation.game_seats import GameSeats, seats_of, single_model_seats
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.sessions import SessionLimits
from ludus.models import centralized_critic
from ludus.models.policy import Policy
from ludus.models.weights import serialization, version_store
from ludus.serving import canary, prometheus, release
from ludus.serving.canary import CanarySettings, VersionCounts
from ludus.serving.release import Backend, Release, ReleasedModel
from ludus.serving.routing_table import DEFAULT_AGENT, AgentRoutes, RoutingTable, escape_file_name

log = logging.getLogger(__name__)

_RETRY_S = 10.0
_TOUCH_S = 3600.0
_MAX_DEATHS = 2  # of workers during a trial; one may have another cause
_MAX_WITHDRAWN = 16  # withdrawn versions kept in the routing table, until their sessions have moved
_PLAY_S = 10.0  # time limit for collecting observations by play, before an agent is first served
_DELETE_S = 60.0  # delay before the files of a version that is no longer offered are deleted: workers may be reading them


# -- runs ---------------------------------------------------------------------------------------------------------------


def resolve_run(where: str, local_dir: str | Path) -> str:
    """Return the latest run of a YAML experiment file; any other argument is returned unchanged. Raises NotFound."""
    if not where.endswith((".yaml", ".yml")):
        return where
    names = list(load_experiments(Path(where)))
    top = directory_of(local_dir)
    runs = [run for name in names for run in find_runs(top / name) if checkpoint.names(store_of(run))]
    if not runs:
        raise NotFound(f"No run of {', '.join(names)} below {display_path(top)} has a checkpoint.", f"ludus train -f {where}")
    return display_path(runs[-1] if is_remote(top) else max(runs, key=lambda run: run.stat().st_mtime))


@dataclass(frozen=True)
class CheckpointSource:
    """The origin of an agent's releases: a run (its newest checkpoint), RUN/best, or one checkpoint."""

    where: str

    def newest(self) -> str:
        """Return the name of the checkpoint to serve now. Raises NotFound."""
        return checkpoint.locate(self.where)[1]

    @property
    def fixed(self) -> bool:
        """Whether it names a single checkpoint."""
        path = directory_of(self.where)
        return path.is_dir() and path.resolve().parent.name == checkpoint.FOLDER

    @property
    def best(self) -> bool:
        """Whether it follows RUN/best, which may become an older version."""
        return directory_of(self.where).name == "best"

    def release(self, name: str | None = None) -> Release:
        """Raises NotFound, Damaged, IncompatibleCheckpoint."""
        run, newest = checkpoint.locate(self.where)
        return _release(run, checkpoint.read(store_of(run), name or newest))

    def version(self, number: int) -> Release:
        """Return the release of a version, from a checkpoint or from the stored versions of the run. Raises NotFound."""
        run, newest = checkpoint.locate(self.where)
        store = store_of(run)
        for name in reversed(checkpoint.names(store)):
            versions = checkpoint.versions_of(store, name)
            if versions and number == _release_number(name, versions):
                return _release(run, checkpoint.read(store, name))
        read = checkpoint.read(store, newest)
        found = _release(run, read)
        kept = {name: version_store.list_versions(store, name) for name in found.parts}
        if len(found.parts) == 1 and number in next(iter(kept.values())):
            (name, part) = next(iter(found.parts.items()))
            described = read.state["models"][name]["description"]
            _, weights = centralized_critic.without_critic(described, version_store.read_weights(store, name, number))
            parts = {name: replace(part, weights=serialization.encode_weights(weights), version=number)}
            return Release(number, found.seats, parts, f"a kept version of {display_path(run)}")
        numbers = {_release_number(name, v) for name in checkpoint.names(store) if (v := checkpoint.versions_of(store, name))}
        there = sorted(numbers | (set(next(iter(kept.values()))) if len(kept) == 1 else set()))
        raise NotFound(f"{display_path(run)} has no version {number}.", f"It has {', '.join(map(str, there))}.")

    def spec(self) -> dict[str, Any]:
        """Content of `GET /spec` for this agent."""
        return _seats(self._newest()).spec()

    def limits(self) -> tuple[HttpLimits, SessionLimits]:
        """Return the limits used in training."""
        config = self._newest().state["config"]
        if config["env"] != EXTERNAL:
            return HttpLimits(), SessionLimits()
        outside = parse_external_config(config["config"]["env_config"])
        settings = gateway_settings(outside.model_copy(update={"token_file": None}), seats_of(outside))
        return settings.http, settings.sessions

    def _newest(self) -> checkpoint.Checkpoint:
        return checkpoint.open_checkpoint(self.where)[1]


def _release(run: Path, found: checkpoint.Checkpoint) -> Release:
    seats, models = _seats(found), found.state["models"]
    parts = {}
    for name in seats.models:
        description, weights = found.acting(name)
        version = int(models[name]["version"])
        parts[name] = ReleasedModel(json.dumps(description).encode(), serialization.encode_weights(weights), version)
    number = _release_number(found.name, {name: part.version for name, part in parts.items()})
    return Release(number, dict(seats.seats), parts, display_path(run / checkpoint.FOLDER / found.name))


def _release_number(name: str, versions: Mapping[str, int]) -> int:
    """The number that games request: the version of the model, or with several models the number of the checkpoint."""
    return next(iter(versions.values())) if len(versions) == 1 else int(name.partition("-")[0])


def _seats(found: checkpoint.Checkpoint) -> GameSeats:
    """Return the seats of training. A single-agent environment has one seat, unless it names them; in a multi-agent
    environment every agent is a seat.
    """
    config = found.state["config"]
    several = config["config"].get("multiagent")
    if several:
        played = {name: found.policy(name) for name in found.weights}
        spaces = {name: (policy.observation_space, policy.action_space) for name, policy in played.items()}
        mapping = several.get("policy_mapping")
        if not isinstance(mapping, Mapping):
            raise Damaged(f"Checkpoint {found.name} has no mapping of agents to models.")
        return GameSeats(spaces, mapping)
    if config["env"] == EXTERNAL:
        return seats_of(parse_external_config(config["config"]["env_config"]))
    (name,) = found.weights
    policy = found.policy(name)
    return GameSeats({name: (policy.observation_space, policy.action_space)}, single_model_seats(config, name))


# -- updates ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateSettings:
    """How releases are chosen and offered."""

    backend: Backend = "torch"
    version: int | None = None
    """Serve this version instead of the newest."""
    levels: tuple[int, ...] = ()
    """Further versions that sessions may request."""
    follow: bool = False
    follow_s: float = 1.0
    follow_far_s: float = 5.0
    """Poll interval for runs in an object store, where every poll costs several requests."""
    canary_percent: float = 0.0
    """Percentage of new sessions that get a new version first; 0: all sessions get it at once."""
    canary: CanarySettings = field(default_factory=CanarySettings)


class CheckpointFollower:
    """Maintains the routing table of a service. Runs in the process that started the workers."""

    def __init__(self, sources: Mapping[str, CheckpointSource], directory: Path, settings: UpdateSettings) -> None:
        self._sources, self._directory, self._settings = sources, directory, settings
        self._serving: dict[str, Release] = {}
        self._last_checkpoint: dict[str, str] = {}
        self._last_errors: dict[str, str] = {}
        self._trials: dict[str, _CanaryTrial] = {}
        self._exported: dict[str, tuple[bytes, bytes]] = {}  # model → description, ONNX model
        self._retry_at: dict[str, float] = {}
        self._restarts = 0
        self._touch_at = 0.0
        self._observations: dict[
            tuple[str, str], Tree | None
        ] = {}  # (agent, model) → observations from play, to check int8 parity
        self._to_delete: list[tuple[float, Path]] = []
        self._poll_at = 0.0
        self.routes = RoutingTable()
        self.refused: Counter[str] = Counter()
        self.rolled_back: Counter[str] = Counter()
        self.promoted: Counter[str] = Counter()

    def open(self) -> None:
        """Write the first routing table. Raises NotFound, Damaged, IncompatibleCheckpoint, UsageError."""
        agents = {}
        for name, source in self._sources.items():
            if source.fixed and self._settings.follow:
                raise UsageError(f"{source.where} is a single checkpoint and cannot be followed.", "Give the run, or RUN/best.")
            self._last_checkpoint[name] = source.newest()
            wanted = self._settings.version
            first = source.release(self._last_checkpoint[name]) if wanted is None else source.version(wanted)
            others = [source.version(number) for number in self._settings.levels if number != first.version]
            for found in (first, *others):
                self._write(name, found, None if found is first else first)
            self._serving[name] = first
            paths = {found.version: _path(name, found.version) for found in (first, *others)}
            agents[name] = AgentRoutes(first.version, paths, self._settings.levels)
        self._publish(RoutingTable(agents))

    def serving(self) -> dict[str, Release]:
        """Return the current release of each agent."""
        return dict(self._serving)

    def poll(self, restarts: int = 0) -> None:
        """Check for new versions and judge canaries. Call it regularly; errors of a version are logged, not raised."""
        now = time.monotonic()
        if now < self._poll_at:
            return
        self._poll_at = now + self._settings.follow_s
        self._restarts = restarts
        for name in self._sources:
            if name in self._trials:
                try:
                    self._judge(name, now)
                except OSError as error:  # the routing table could not be written
                    log.error("%s: the trial of version %s continues: %s", name, self._trials[name].offered.version, error)
            elif self._settings.follow:
                self._follow(name, now)
        self._delete_old(now)
        self._touch(now)
        counted = {"refused": dict(self.refused), "rolled_back": dict(self.rolled_back), "promoted": dict(self.promoted)}
        prometheus.write_snapshot(self._directory, prometheus.FOLLOWER, {**counted, "restarts": restarts})

    def _follow(self, name: str, now: float) -> None:
        source, found = self._sources[name], ""
        if now < self._retry_at.get(name, 0.0):
            return
        if is_remote(directory_of(source.where)):
            self._retry_at[name] = now + self._settings.follow_far_s
        try:
            found = source.newest()
            if found == self._last_checkpoint[name]:
                self._last_errors.pop(name, None)
                return
            offered = source.release(found)
            serving = self._serving[name]
            if offered.version == serving.version:
                self._last_checkpoint[name] = found
                return
            self._retry_at.pop(name, None)
            if offered.version < serving.version and not source.best:
                raise IncompatibleCheckpoint(f"Its version {offered.version} is older than the served version {serving.version}.")
            self._write(name, offered, serving)
            self._offer(name, offered, now)
            self._last_checkpoint[name] = found
        except Exception as error:  # any defect of a new version: keep serving the old one
            if found and _is_temporary(error):
                self._retry_at[name] = now + _RETRY_S
            elif found:
                self._last_checkpoint[name] = found
            self._refuse(name, found, error)

    def _refuse(self, name: str, found: str, error: Exception) -> None:
        message = str(error) if isinstance(error, LudusError) else repr(error)
        problem = f"checkpoint {found} was refused" if found else "no checkpoint to follow"
        if self._last_errors.get(name) == problem + message:  # log and count the same error once
            return
        self._last_errors[name] = problem + message
        self.refused[name] += 1
        log.error("%s: %s, still serving version %s: %s", name, problem, self._serving[name].version, message)

    def _offer(self, name: str, offered: Release, now: float) -> None:
        agent = self.routes.agents[name]
        releases = {**agent.releases, offered.version: _path(name, offered.version)}
        if self._settings.canary_percent > 0:
            counts = _TrialCounts(self._directory, name, (agent.current, offered.version))
            withdrawn = tuple(number for number in agent.withdrawn if number != offered.version)  # it may be tried again
            percent = self._settings.canary_percent
            self._publish_agent(
                name, replace(agent, releases=releases, canary=offered.version, percent=percent, withdrawn=withdrawn)
            )
            self._trials[name] = _CanaryTrial(offered, now, counts, self._restarts)
            log.info("%s: version %s is on trial (%s)", name, offered.version, offered.origin)
        else:
            self._make_current(name, offered)

    def _make_current(self, name: str, offered: Release) -> None:
        agent = self.routes.agents[name]
        releases = {n: path for n, path in agent.releases.items() if n in agent.levels}
        releases[offered.version] = _path(name, offered.version)
        withdrawn = tuple(number for number in agent.withdrawn if number != offered.version)
        self._publish_agent(name, AgentRoutes(offered.version, releases, agent.levels, withdrawn=withdrawn))
        self._serving[name] = offered
        log.info("%s: now serving version %s (%s)", name, offered.version, offered.origin)

    def _judge(self, name: str, now: float) -> None:
        trial, agent = self._trials[name], self.routes.agents[name]
        stable, trial_counts = (trial.counts.of(number) for number in trial.counts.refresh())
        decision = canary.judge(stable, trial_counts, now - trial.since, self._settings.canary)
        deaths = self._restarts - trial.restarts
        if deaths >= _MAX_DEATHS:
            decision = canary.CanaryDecision(canary.ROLL_BACK, f"Workers died {deaths} times since the trial began.")
        if decision.action == canary.WAIT:
            return
        version = trial.offered.version
        if decision.action == canary.PROMOTE:
            self._make_current(name, trial.offered)
            self.promoted[name] += 1
            log.info("%s: version %s was promoted: %s", name, version, decision.reason)
        else:
            releases = {n: path for n, path in agent.releases.items() if n != version or n in agent.levels}
            withdrawn = (*agent.withdrawn, version)[-_MAX_WITHDRAWN:]
            self._publish_agent(name, replace(agent, releases=releases, canary=None, percent=0.0, withdrawn=withdrawn))
            self.rolled_back[name] += 1
            log.error("%s: version %s was rolled back: %s", name, version, decision.reason)
        del self._trials[name]

    def _publish_agent(self, name: str, agent: AgentRoutes) -> None:
        self._publish(RoutingTable({**self.routes.agents, name: agent}))

    def _publish(self, routes: RoutingTable) -> None:
        routes.write(self._directory)
        before, self.routes = self.routes, routes
        offered = {path for agent in routes.agents.values() for path in agent.releases.values()}
        gone = {path for agent in before.agents.values() for path in agent.releases.values()} - offered
        back = {self._directory / path for path in offered}
        self._to_delete = [(at, path) for at, path in self._to_delete if path not in back]
        self._to_delete += [(time.monotonic() + _DELETE_S, self._directory / path) for path in gone]

    def _delete_old(self, now: float) -> None:
        for at, path in [item for item in self._to_delete if item[0] <= now]:
            self._to_delete.remove((at, path))
            shutil.rmtree(path, ignore_errors=True)

    def _touch(self, now: float) -> None:
        """Refresh file times, so that cleaners of temporary files do not delete what a replaced worker needs."""
        if now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_S
        for path in (self._directory, *self._directory.rglob("*")):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _write(self, name: str, offered: Release, serving: Release | None) -> None:
        policies = release.validate_release(offered, serving)
        exported_models = None
        if self._settings.backend != "torch":
            exported_models = {model: self._export(name, model, policy, offered) for model, policy in policies.items()}
        release.write(offered, self._directory / _path(name, offered.version), exported_models)

    def _export(self, name: str, model: str, policy: Policy, offered: Release) -> bytes:
        """Export a model to ONNX and check parity. Raises IncompatibleCheckpoint when its outputs differ."""
        from ludus.experiments.export_run import observations_of
        from ludus.models.export import onnx_export, parity

        part, int8 = offered.parts[model], self._settings.backend == "onnx-int8"
        before = self._exported.get(model)
        if before is not None and before[0] == part.description:  # the same network: replace the weights only
            traced = onnx_export.with_weights(before[1], policy.weights(), part.version)
        else:
            traced = onnx_export.export_policy(policy, name=model, version=part.version)
        self._exported[model] = part.description, traced
        if (name, model) not in self._observations:
            where = self._sources[name].where
            self._observations[name, model] = observations_of(where, policy, play=int8, within_s=_PLAY_S, model=model)
        exported, report = parity.artefact(policy, traced, int8=int8, recorded=self._observations[name, model])
        if not report.passed:
            raise IncompatibleCheckpoint(
                f"{model!r} as {self._settings.backend} differs from the network: {' '.join(report.reasons)}",
                "Serve it with another --backend.",
            )
        return exported


def _path(name: str, version: int) -> str:
    return f"releases/{escape_file_name(name)}/{version:06d}"


@dataclass(frozen=True)
class _CanaryTrial:
    offered: Release
    since: float
    counts: _TrialCounts
    restarts: int
    """Worker restarts before the trial."""


class _TrialCounts:
    """Counters of two versions since the trial began, over all workers including replaced ones."""

    def __init__(self, directory: Path, agent: str, versions: tuple[int, int]) -> None:
        self._directory, self._agent, self._versions = directory, agent, versions
        self._last: dict[tuple[str, int], tuple[float, _WorkerCounts]] = {}
        self._errors: Counter[int] = Counter()
        self._buckets: dict[int, Counter[int]] = {version: Counter() for version in versions}
        self._passes: dict[int, Counter[int]] = {version: Counter() for version in versions}
        self._seconds: dict[int, Counter[int]] = {version: Counter() for version in versions}
        self.refresh()
        self._errors.clear()
        for version in versions:
            for counts in (self._buckets[version], self._passes[version], self._seconds[version]):
                counts.clear()

    def refresh(self) -> tuple[int, int]:
        """Read the snapshots, and return the two versions, the stable one first."""
        for worker, numbers in prometheus.read_snapshots(self._directory).items():
            found = numbers.get("agents", {}).get(self._agent, {}).get("versions", {})
            for version in self._versions:
                if str(version) in found:
                    self._add(worker, version, numbers["began"], found[str(version)])
        return self._versions

    def _add(self, worker: str, version: int, began: float, counted: Mapping[str, Any]) -> None:
        seen = _WorkerCounts(
            counted["failed"] + counted["timed_out"], counted["buckets"], counted["batches"], counted["batch_seconds"]
        )
        life, before = self._last.get((worker, version), (began, _WorkerCounts()))
        if life != began:  # the worker was replaced and counts from zero
            before = _WorkerCounts()
        self._last[worker, version] = began, seen
        self._errors[version] += seen.errors - before.errors
        for counts, now, then in (
            (self._buckets, seen.buckets, before.buckets),
            (self._passes, seen.passes, before.passes),
            (self._seconds, seen.seconds, before.seconds),
        ):
            for k, count in enumerate(now):
                counts[version][k] += count - (then[k] if k < len(then) else 0)  # type: ignore[assignment]

    def of(self, version: int) -> VersionCounts:
        buckets, passes, seconds = self._buckets[version], self._passes[version], self._seconds[version]
        latency = [buckets[k] for k in range(max(buckets, default=-1) + 1)]
        timed = [(passes[k], float(seconds[k])) for k in range(max(passes, default=-1) + 1)]
        return VersionCounts(sum(latency) + self._errors[version], self._errors[version], latency, timed)


class _WorkerCounts(NamedTuple):
    """Counters of one version in the last snapshot of a worker."""

    errors: int = 0
    buckets: Sequence[int] = ()
    passes: Sequence[int] = ()
    seconds: Sequence[float] = ()


def _is_temporary(error: Exception) -> bool:
    """Whether the same version may succeed later, for example after a full disk or an unreachable store."""
    return isinstance(error, (OSError, MemoryError)) or (isinstance(error, StoreError) and not isinstance(error, Damaged))


def parse_sources(given: Sequence[str], local_dir: str | Path) -> dict[str, CheckpointSource]:
    """Parse `RUN` or `NAME=RUN` arguments; several need names. Raises UsageError, NotFound."""
    found: dict[str, CheckpointSource] = {}
    for item in given:
        name, equals, where = item.partition("=")
        if not equals or "/" in name or Path(item).exists():
            name, where = DEFAULT_AGENT, item
        if name in found:
            raise UsageError(f"Two runs have the name {name!r}.", "Name them: ludus serve easy=RUN hard=RUN")
        found[name] = CheckpointSource(resolve_run(where, local_dir))
    return found
