"""From runs to a service: which seats a game has, which model plays each, and how new checkpoints reach the games."""

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

from ludus.config import schema as configs
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
from ludus.serving.canary import CanarySettings, Counts
from ludus.serving.release import Backend, Part, Release
from ludus.serving.routing_table import DEFAULT_AGENT, Agent, Lineup, as_file

log = logging.getLogger(__name__)

_AGAIN_S = 10.0
_TOUCH_S = 3600.0
_DEATHS = 2  # of workers during a trial; one may have died of something else
_WITHDRAWN = 16  # versions whose sessions may still have to be told
_PLAY_S = 10.0  # for as long an agent may play, before it is first served, to find out what it sees
_KEPT_S = 60.0  # how long the files of a version that is not offered any more stay, for whoever is reading them


# -- runs ---------------------------------------------------------------------------------------------------------------


def run_of(where: str, local_dir: str | Path) -> str:
    """The run that a YAML file of an experiment has led to last; anything else is a run or checkpoint already."""
    if not where.endswith((".yaml", ".yml")):
        return where
    names = list(configs.load_experiments(Path(where)))
    top = directory_of(local_dir)
    runs = [run for name in names for run in find_runs(top / name) if checkpoint.names(store_of(run))]
    if not runs:
        raise NotFound(f"No run of {', '.join(names)} below {display_path(top)} has a checkpoint.", f"ludus train -f {where}")
    return display_path(runs[-1] if is_remote(top) else max(runs, key=lambda run: run.stat().st_mtime))


@dataclass(frozen=True)
class Source:
    """Where the releases of one agent come from: a run (its newest checkpoint), RUN/best, or one checkpoint."""

    where: str

    def newest(self) -> str:
        """The name of the checkpoint that is to be served now. Raises NotFound."""
        return checkpoint.locate(self.where)[1]

    @property
    def fixed(self) -> bool:
        """It names one checkpoint: nothing new will ever come of it."""
        path = directory_of(self.where)
        return path.is_dir() and path.resolve().parent.name == checkpoint.FOLDER

    @property
    def best(self) -> bool:
        """It follows what is best, which may be older than what was best before."""
        return directory_of(self.where).name == "best"

    def release(self, name: str | None = None) -> Release:
        """Raises NotFound, Damaged, IncompatibleCheckpoint."""
        run, newest = checkpoint.locate(self.where)
        return _release(run, checkpoint.read(store_of(run), name or newest))

    def version(self, number: int) -> Release:
        """The release of this version, from whichever checkpoint has it, or from the versions that the run has kept."""
        run, newest = checkpoint.locate(self.where)
        store = store_of(run)
        for name in reversed(checkpoint.names(store)):
            versions = checkpoint.versions_of(store, name)
            if versions and number == _number(name, versions):
                return _release(run, checkpoint.read(store, name))
        read = checkpoint.read(store, newest)
        found = _release(run, read)
        kept = {name: version_store.stored_versions(store, name) for name in found.parts}
        if len(found.parts) == 1 and number in next(iter(kept.values())):
            (name, part) = next(iter(found.parts.items()))
            described = read.state["models"][name]["description"]
            _, weights = centralized_critic.plain(described, version_store.stored_weights(store, name, number))
            parts = {name: replace(part, weights=serialization.encode_weights(weights), version=number)}
            return Release(number, found.seats, parts, f"a kept version of {display_path(run)}")
        numbers = {_number(name, v) for name in checkpoint.names(store) if (v := checkpoint.versions_of(store, name))}
        there = sorted(numbers | (set(next(iter(kept.values()))) if len(kept) == 1 else set()))
        raise NotFound(f"{display_path(run)} has no version {number}.", f"It has {', '.join(map(str, there))}.")

    def spec(self) -> dict[str, Any]:
        """What `GET /spec` says of it."""
        return _seats(self._newest()).spec()

    def limits(self) -> tuple[HttpLimits, SessionLimits]:
        """What was accepted in training is accepted in service."""
        config = self._newest().state["config"]
        if config["env"] != configs.EXTERNAL:
            return HttpLimits(), SessionLimits()
        outside = configs.external_config(config["config"]["env_config"])
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
        parts[name] = Part(json.dumps(description).encode(), serialization.encode_weights(weights), version)
    number = _number(found.name, {name: part.version for name, part in parts.items()})
    return Release(number, dict(seats.seats), parts, display_path(run / checkpoint.FOLDER / found.name))


def _number(name: str, versions: Mapping[str, int]) -> int:
    """What a game asks for a release by: the version of its model; of several models, the number of their checkpoint."""
    return next(iter(versions.values())) if len(versions) == 1 else int(name.partition("-")[0])


def _seats(found: checkpoint.Checkpoint) -> GameSeats:
    """As the games were told in training; an agent trained in environments plays the only seat, unless they have names.

    Of an environment with several agents every agent is a seat.
    """
    config = found.state["config"]
    several = config["config"].get("multiagent")
    if several:
        played = {name: found.policy(name) for name in found.weights}
        spaces = {name: (policy.observation_space, policy.action_space) for name, policy in played.items()}
        mapping = several.get("policy_mapping")
        if not isinstance(mapping, Mapping):
            raise Damaged(f"Checkpoint {found.name} does not say which model plays which agent.")
        return GameSeats(spaces, mapping)
    if config["env"] == configs.EXTERNAL:
        return seats_of(configs.external_config(config["config"]["env_config"]))
    (name,) = found.weights
    policy = found.policy(name)
    return GameSeats({name: (policy.observation_space, policy.action_space)}, single_model_seats(config, name))


# -- what is offered, now and later ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offering:
    """How releases come into the line-up."""

    backend: Backend = "torch"
    version: int | None = None
    """Serve this one, and not the newest."""
    levels: tuple[int, ...] = ()
    """Versions that sessions may ask for, besides."""
    follow: bool = False
    follow_s: float = 1.0
    follow_far_s: float = 5.0
    """Of runs on a store: every look at one is several requests, which are paid for."""
    canary_percent: float = 0.0
    """Of the new sessions that try a new version first; 0: all sessions get it at once."""
    canary: CanarySettings = field(default_factory=CanarySettings)


class Follower:
    """Keeps the line-up of a service. Lives in the process that started the workers; its time is not theirs."""

    def __init__(self, sources: Mapping[str, Source], directory: Path, offering: Offering) -> None:
        self._sources, self._directory, self._offering = sources, directory, offering
        self._serving: dict[str, Release] = {}
        self._seen: dict[str, str] = {}
        self._complaints: dict[str, str] = {}
        self._trials: dict[str, _Trial] = {}
        self._exported: dict[str, tuple[bytes, bytes]] = {}  # model → its description, its ONNX form
        self._again_at: dict[str, float] = {}
        self._restarts = 0
        self._touch_at = 0.0
        self._observed: dict[tuple[str, str], Tree | None] = {}  # agent, model → observations from play, to measure int8 on
        self._leaving: list[tuple[float, Path]] = []
        self._look_at = 0.0
        self.lineup = Lineup()
        self.refused: Counter[str] = Counter()
        self.rolled_back: Counter[str] = Counter()
        self.promoted: Counter[str] = Counter()

    def open(self) -> None:
        """The first line-up. Raises NotFound, Damaged, IncompatibleCheckpoint, UsageError."""
        agents = {}
        for name, source in self._sources.items():
            if source.fixed and self._offering.follow:
                raise UsageError(f"{source.where} is one checkpoint: there is nothing to follow.", "Give the run, or RUN/best.")
            self._seen[name] = source.newest()
            wanted = self._offering.version
            first = source.release(self._seen[name]) if wanted is None else source.version(wanted)
            others = [source.version(number) for number in self._offering.levels if number != first.version]
            for found in (first, *others):
                self._write(name, found, None if found is first else first)
            self._serving[name] = first
            paths = {found.version: _path(name, found.version) for found in (first, *others)}
            agents[name] = Agent(first.version, paths, self._offering.levels)
        self._announce(Lineup(agents))

    def serving(self) -> dict[str, Release]:
        """What new sessions get, by agent."""
        return dict(self._serving)

    def poll(self, restarts: int = 0) -> None:
        """Now and then: look for new versions, judge those on trial. Never raises for what a version has wrong."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self._offering.follow_s
        self._restarts = restarts
        for name in self._sources:
            if name in self._trials:
                try:
                    self._judge(name, now)
                except OSError as error:  # the line-up could not be written: the trial goes on
                    log.error("%s: the trial of version %s goes on: %s", name, self._trials[name].offered.version, error)
            elif self._offering.follow:
                self._follow(name, now)
        self._sweep(now)
        self._touch(now)
        counted = {"refused": dict(self.refused), "rolled_back": dict(self.rolled_back), "promoted": dict(self.promoted)}
        prometheus.write_snapshot(self._directory, prometheus.FOLLOWER, {**counted, "restarts": restarts})

    def _follow(self, name: str, now: float) -> None:
        source, found = self._sources[name], ""
        if now < self._again_at.get(name, 0.0):
            return
        if is_remote(directory_of(source.where)):
            self._again_at[name] = now + self._offering.follow_far_s
        try:
            found = source.newest()
            if found == self._seen[name]:
                self._complaints.pop(name, None)
                return
            offered = source.release(found)
            serving = self._serving[name]
            if offered.version == serving.version:
                self._seen[name] = found
                return
            self._again_at.pop(name, None)
            if offered.version < serving.version and not source.best:
                raise IncompatibleCheckpoint(f"Its version {offered.version} comes before {serving.version}, which is served.")
            self._write(name, offered, serving)
            self._take(name, offered, now)
            self._seen[name] = found
        except Exception as error:  # whatever a new version has wrong, the old one goes on serving
            if found and _passing(error):
                self._again_at[name] = now + _AGAIN_S
            elif found:
                self._seen[name] = found
            self._refuse(name, found, error)

    def _refuse(self, name: str, found: str, error: Exception) -> None:
        what = str(error) if isinstance(error, LudusError) else repr(error)
        complaint = f"checkpoint {found} is refused" if found else "there is nothing to follow"
        if self._complaints.get(name) == complaint + what:  # a run that is not there is not there a second later either
            return
        self._complaints[name] = complaint + what
        self.refused[name] += 1
        log.error("%s: %s, version %s goes on: %s", name, complaint, self._serving[name].version, what)

    def _take(self, name: str, offered: Release, now: float) -> None:
        agent = self.lineup.agents[name]
        releases = {**agent.releases, offered.version: _path(name, offered.version)}
        if self._offering.canary_percent > 0:
            tally = _Tally(self._directory, name, (agent.current, offered.version))
            withdrawn = tuple(number for number in agent.withdrawn if number != offered.version)  # it gets another chance
            percent = self._offering.canary_percent
            self._announce_one(
                name, replace(agent, releases=releases, canary=offered.version, percent=percent, withdrawn=withdrawn)
            )
            self._trials[name] = _Trial(offered, now, tally, self._restarts)
            log.info("%s: version %s is on trial (%s)", name, offered.version, offered.origin)
        else:
            self._make_current(name, offered)

    def _make_current(self, name: str, offered: Release) -> None:
        agent = self.lineup.agents[name]
        releases = {n: path for n, path in agent.releases.items() if n in agent.levels}
        releases[offered.version] = _path(name, offered.version)
        withdrawn = tuple(number for number in agent.withdrawn if number != offered.version)
        self._announce_one(name, Agent(offered.version, releases, agent.levels, withdrawn=withdrawn))
        self._serving[name] = offered
        log.info("%s: version %s is served now (%s)", name, offered.version, offered.origin)

    def _judge(self, name: str, now: float) -> None:
        trial, agent = self._trials[name], self.lineup.agents[name]
        stable, tried = (trial.tally.counts(number) for number in trial.tally.refresh())
        verdict = canary.judge(stable, tried, now - trial.since, self._offering.canary)
        deaths = self._restarts - trial.restarts
        if deaths >= _DEATHS:
            verdict = canary.Verdict(canary.ROLL_BACK, f"Workers died {deaths} times since its trial began.")
        if verdict.what == canary.WAIT:
            return
        version = trial.offered.version
        if verdict.what == canary.PROMOTE:
            self._make_current(name, trial.offered)
            self.promoted[name] += 1
            log.info("%s: version %s has passed its trial: %s", name, version, verdict.reason)
        else:
            releases = {n: path for n, path in agent.releases.items() if n != version or n in agent.levels}
            withdrawn = (*agent.withdrawn, version)[-_WITHDRAWN:]
            self._announce_one(name, replace(agent, releases=releases, canary=None, percent=0.0, withdrawn=withdrawn))
            self.rolled_back[name] += 1
            log.error("%s: version %s is taken back: %s", name, version, verdict.reason)
        del self._trials[name]

    def _announce_one(self, name: str, agent: Agent) -> None:
        self._announce(Lineup({**self.lineup.agents, name: agent}))

    def _announce(self, lineup: Lineup) -> None:
        lineup.write(self._directory)
        before, self.lineup = self.lineup, lineup
        offered = {path for agent in lineup.agents.values() for path in agent.releases.values()}
        gone = {path for agent in before.agents.values() for path in agent.releases.values()} - offered
        back = {self._directory / path for path in offered}
        self._leaving = [(at, path) for at, path in self._leaving if path not in back]
        self._leaving += [(time.monotonic() + _KEPT_S, self._directory / path) for path in gone]

    def _sweep(self, now: float) -> None:
        for at, path in [item for item in self._leaving if item[0] <= now]:
            self._leaving.remove((at, path))
            shutil.rmtree(path, ignore_errors=True)

    def _touch(self, now: float) -> None:
        """Whoever cleans up temporary files goes by their age; a worker that is replaced needs these."""
        if now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_S
        for path in (self._directory, *self._directory.rglob("*")):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _write(self, name: str, offered: Release, serving: Release | None) -> None:
        policies = release.tried(offered, serving)
        artefacts = None
        if self._offering.backend != "torch":
            artefacts = {model: self._artefact(name, model, policy, offered) for model, policy in policies.items()}
        release.write(offered, self._directory / _path(name, offered.version), artefacts)

    def _artefact(self, name: str, model: str, policy: Policy, offered: Release) -> bytes:
        """The model as ONNX, compared with the network it is made of. Raises IncompatibleCheckpoint when they differ."""
        from ludus.experiments.export_run import observations_of
        from ludus.models.export import onnx_export, parity

        part, int8 = offered.parts[model], self._offering.backend == "onnx-int8"
        before = self._exported.get(model)
        if before is not None and before[0] == part.description:  # the same network: only its weights are exchanged
            traced = onnx_export.with_weights(before[1], policy.weights(), part.version)
        else:
            traced = onnx_export.export_policy(policy, name=model, version=part.version)
        self._exported[model] = part.description, traced
        if (name, model) not in self._observed:
            where = self._sources[name].where
            self._observed[name, model] = observations_of(where, policy, play=int8, within_s=_PLAY_S, model=model)
        exported, report = parity.artefact(policy, traced, int8=int8, recorded=self._observed[name, model])
        if not report.passed:
            raise IncompatibleCheckpoint(
                f"{model!r} as {self._offering.backend} does not act as it should: {' '.join(report.reasons)}",
                "Serve it with another --backend.",
            )
        return exported


def _path(name: str, version: int) -> str:
    return f"releases/{as_file(name)}/{version:06d}"


@dataclass(frozen=True)
class _Trial:
    offered: Release
    since: float
    tally: _Tally
    restarts: int
    """Workers that had died before."""


class _Tally:
    """What was counted of two versions since the trial began, over all workers, whatever became of them meanwhile."""

    def __init__(self, directory: Path, agent: str, versions: tuple[int, int]) -> None:
        self._directory, self._agent, self._versions = directory, agent, versions
        self._last: dict[tuple[str, int], tuple[float, _Seen]] = {}
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
        """Look again; the two versions, the stable one first."""
        for worker, numbers in prometheus.snapshots(self._directory).items():
            found = numbers.get("agents", {}).get(self._agent, {}).get("versions", {})
            for version in self._versions:
                if str(version) in found:
                    self._add(worker, version, numbers["began"], found[str(version)])
        return self._versions

    def _add(self, worker: str, version: int, began: float, counted: Mapping[str, Any]) -> None:
        seen = _Seen(counted["failed"] + counted["timed_out"], counted["buckets"], counted["batches"], counted["batch_seconds"])
        life, before = self._last.get((worker, version), (began, _Seen()))
        if life != began:  # another worker in its place: it counts from zero
            before = _Seen()
        self._last[worker, version] = began, seen
        self._errors[version] += seen.errors - before.errors
        for counts, now, then in (
            (self._buckets, seen.buckets, before.buckets),
            (self._passes, seen.passes, before.passes),
            (self._seconds, seen.seconds, before.seconds),
        ):
            for k, count in enumerate(now):
                counts[version][k] += count - (then[k] if k < len(then) else 0)  # type: ignore[assignment]

    def counts(self, version: int) -> Counts:
        buckets, passes, seconds = self._buckets[version], self._passes[version], self._seconds[version]
        latency = [buckets[k] for k in range(max(buckets, default=-1) + 1)]
        timed = [(passes[k], float(seconds[k])) for k in range(max(passes, default=-1) + 1)]
        return Counts(sum(latency) + self._errors[version], self._errors[version], latency, timed)


class _Seen(NamedTuple):
    """What a worker had counted of a version when we looked last."""

    errors: int = 0
    buckets: Sequence[int] = ()
    passes: Sequence[int] = ()
    seconds: Sequence[float] = ()


def _passing(error: Exception) -> bool:
    """The disk was full, the run was away: another time the same version may do."""
    return isinstance(error, (OSError, MemoryError)) or (isinstance(error, StoreError) and not isinstance(error, Damaged))


def named_sources(given: Sequence[str], local_dir: str | Path) -> dict[str, Source]:
    """`RUN` or `NAME=RUN`, several only with names. Raises UsageError, NotFound."""
    found: dict[str, Source] = {}
    for item in given:
        name, equals, where = item.partition("=")
        if not equals or "/" in name or Path(item).exists():
            name, where = DEFAULT_AGENT, item
        if name in found:
            raise UsageError(f"Two runs are called {name!r}.", "Name them: ludus serve easy=RUN hard=RUN")
        found[name] = Source(run_of(where, local_dir))
    return found
