"""The models of one run: descriptions, newest weights on this machine, and durably kept versions.

No sockets and no clock: the hub calls it and passes the time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.plugins import did_you_mean
from ludus.core.tree import Array
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, UnknownName, UsageError
from ludus.models.weights import module_spec
from ludus.models.weights.shared_weights import SharedWeights, map_weights, stage
from ludus.models.weights.version_store import VersionStore, list_versions, read_weights
from ludus.storage.base import Store
from ludus.storage.safe_read import parse_json

CHECKPOINT_S = 600.0
_NAME = re.compile(r"[\w+-][\w.+-]*")
_CLONE = re.compile(r"(?P<parent>.+)/clone-step-(?P<step>\d+)")


@dataclass
class _Model:
    """One model of the run. A clone is frozen: its version never changes."""

    plain: Mapping[str, Any]
    shared: SharedWeights
    frozen: bool = False
    interval: int | None = None
    keep: int | None = None
    kept: list[int] = field(default_factory=list)
    marked: tuple[int, float] = (0, 0.0)
    """The last version chosen to be kept, and when."""
    pending: dict[int, dict[str, Array]] = field(default_factory=dict)
    """Versions that are being written."""
    settings: dict[str, Any] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)

    def description(self) -> dict[str, Any]:
        return dict(self.plain)

    def weights(self) -> dict[str, Array]:
        return self.shared.read()[1]


class ModelRegistry:
    """Creates, finds, publishes and clones models. Weights are exchanged as files in `staging`."""

    def __init__(self, store: Store, boards: Path) -> None:
        self._store, self._boards = store, boards
        self.staging = boards / "staging"
        self.staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._models: dict[str, _Model] = {}
        self._pool: VersionStore[_Model] = VersionStore(store)
        self._created = 0

    def names(self) -> list[str]:
        """Names of all models of this run, including earlier incarnations."""
        return sorted({*self._models, *self._store.list("models")})

    def versions(self) -> dict[str, int]:
        return {name: model.shared.version for name, model in self._models.items() if not model.frozen}

    def info(self, name: str) -> dict[str, Any]:
        """Return what a process needs to use the model."""
        model = self._models[name]
        return {
            "name": name,
            "description": dict(model.plain),
            "board": str(model.shared.directory),
            "frozen": model.frozen,
            "settings": dict(model.settings),
            "workers": list(model.workers),
        }

    def find(self, name: str, now: float) -> dict[str, Any] | None:
        """Return the model, re-opened from the store if an earlier incarnation of the run created it; None if there is none."""
        if name not in self._models:
            clone = _CLONE.fullmatch(name)
            if clone:
                if self.find(clone["parent"], now) is None or int(clone["step"]) not in self._kept_versions(clone["parent"]):
                    return None
                return self._add_clone(clone["parent"], int(clone["step"]))
            if not self._reopen(check_name(name), now):
                return None
        return self.info(name)

    def create(
        self,
        name: str,
        description: Mapping[str, Any],
        staged: str,
        now: float,
        override: bool = False,
        interval: int | None = None,
        keep: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Create a model with the staged weights; an existing one with the same description is kept.

        It is kept durably every `interval` versions (None: every ten minutes), with the `keep` newest of those retained (None: all).
        `settings` are passed on to users of the model. Raises UsageError if another model has the name and must not be overridden.
        """
        path = self._staging_path(staged)
        try:
            known = self.find(check_name(name), now)
            if known is not None and not override:
                self._check_same(name, description, map_weights(path))
            else:
                self._add(name, description, path, now)
        finally:
            path.unlink(missing_ok=True)
        model = self._models[name]
        model.interval = model.interval if interval is None else interval
        model.keep = model.keep if keep is None else keep
        model.settings |= {key: value for key, value in (settings or {}).items() if value is not None}
        return self.info(name)

    def publish(self, name: str, staged: str, step: int, now: float) -> int:
        """Publish the staged weights as the next version, or as version `step`. Raises IncompatibleCheckpoint, UsageError, Fenced."""
        path = self._staging_path(staged)
        try:
            model = self._get(name)
            if model.frozen:
                raise UsageError(f"{name!r} is a clone: its weights never change.", "Publish to the model it was cloned from.")
            module_spec.check_fit(module_spec.shapes_in(model.weights()), module_spec.shapes_in(map_weights(path)))
            version = self._pool.publish(name, None if step < 0 else step)
            model.shared.publish(version, path)
        finally:
            path.unlink(missing_ok=True)
        return version

    def due(self, name: str, now: float) -> bool:
        """Return whether the newest version of a model should be kept."""
        model = self._get(name)
        if model.frozen:
            return False
        version, at = model.marked
        return now - at >= CHECKPOINT_S if model.interval is None else model.shared.version - version >= model.interval

    def make_keep_task(self, name: str, now: float) -> Callable[[], None]:
        """Return a function that stores the current newest version; it does disk I/O and may run in another thread."""
        model = self._get(name)
        version, weights = model.shared.read()
        before = model.marked
        model.marked = version, now  # at once, so that it is not due again during the write
        model.pending[version] = weights

        def keep() -> None:
            with contextlib.ExitStack() as undo:
                undo.callback(setattr, model, "marked", before)
                try:
                    self._pool.put(name, version, lambda: weights)
                    if version not in model.kept:
                        model.kept.append(version)
                    self._delete_old_versions(name, model)
                finally:
                    model.pending.pop(version, None)
                undo.pop_all()

        return keep

    def clone(self, name: str, step: int, now: float) -> dict[str, Any]:
        """Make a frozen copy of the nearest kept version at or below `step`, or of the newest (which is kept first) for -1."""
        if self.find(name, now) is None:
            raise UnknownName(f"There is no model {name!r}.", did_you_mean(name, self.names()))
        model = self._models[name]
        if model.frozen:
            raise UsageError(f"{name!r} is a clone already.")
        newest = model.shared.version
        candidates = sorted(
            {v for v in self._kept_versions(name) if 0 <= v <= step} | ({newest} if step < 0 or newest <= step else set())
        )
        if not candidates:
            raise NotFound(
                f"{name!r} has no version at or below {step}.", f"Kept: {self._kept_versions(name)}, newest: {newest}."
            )
        if candidates[-1] == newest:
            self.make_keep_task(name, now)()
        return self._add_clone(name, candidates[-1])

    def set_workers(self, name: str, workers: list[str]) -> None:
        """Set the addresses of the model's inference workers."""
        self._get(name).workers = workers

    def close(self) -> None:
        """Keep the newest weights of every model, and return unused version numbers."""
        for name, model in self._models.items():
            if not model.frozen and model.shared.version not in model.kept:
                self.make_keep_task(name, 0.0)()
        self._pool.close()

    # -- inside

    def _get(self, name: str) -> _Model:
        if name not in self._models:
            raise UnknownName(f"There is no model {name!r}.", did_you_mean(name, self.names()))
        return self._models[name]

    def _staging_path(self, file: str) -> Path:
        """Validate a file name sent by a client: it may only name a staged file."""
        if not re.fullmatch(r"aside-[0-9a-f]{32}", file):
            raise Damaged(f"{file!r} is not the name of a staged file.")
        return self.staging / file

    def _make_shared_weights(self) -> SharedWeights:
        self._created += 1
        return SharedWeights(self._boards / f"{self._created:04d}")

    def _add(self, name: str, description: Mapping[str, Any], staged: Path, now: float) -> None:
        model = self._models.get(name) or _Model(dict(description), self._make_shared_weights())
        model.plain, model.kept = dict(description), []  # an overridden model keeps its location
        self._pool.add(name, model)
        model.shared.publish(self._pool.newest(name)[1], staged)
        self._models[name] = model
        self.make_keep_task(name, now)()

    def _reopen(self, name: str, now: float) -> bool:
        versions = list_versions(self._store, name)
        if not versions:
            return False
        try:
            plain = parse_json(self._store.get(f"models/{name}/model.json"), f"models/{name}/model.json")
        except NotFound:
            return False
        except ValueError as error:
            raise Damaged(f"models/{name}/model.json is damaged: {error}.") from error
        model = _Model(plain, self._make_shared_weights(), kept=versions)
        staged = stage(self.staging, read_weights(self._store, name, versions[-1]))
        self._pool.add(name, model, above=versions[-1])
        model.shared.publish(self._pool.newest(name)[1], staged)
        model.marked = model.shared.version, now  # the version that it continues from is already kept
        self._models[name] = model
        return True

    def _check_same(self, name: str, description: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        model = self._models[name]
        hint = "Give it another name, open another trial, or pass override_model=True to replace it."
        if not module_spec.same(model.plain, description):
            raise UsageError(f"{name!r} is another model already: {_short(model.plain)}, not {_short(description)}.", hint)
        try:
            module_spec.check_fit(module_spec.shapes_in(model.weights()), module_spec.shapes_in(weights))
        except IncompatibleCheckpoint as error:
            raise UsageError(f"The class of {name!r} has changed since its weights were stored. {error}", hint) from error
        if not model.plain.get("inputs"):
            model.plain = {**model.plain, "inputs": description.get("inputs") or {}}

    def _kept_versions(self, name: str) -> list[int]:
        model = self._models[name]
        return sorted({*model.pending, *model.kept})

    def _add_clone(self, parent: str, step: int) -> dict[str, Any]:
        name = f"{parent}/clone-step-{step}"
        if name not in self._models:
            shared, origin = self._make_shared_weights(), self._models[parent]
            weights = origin.pending.get(step) or read_weights(self._store, parent, step)
            shared.publish(step, stage(self.staging, weights))
            self._models[name] = _Model(dict(origin.plain), shared, frozen=True, settings=dict(origin.settings))
        return self.info(name)

    def _delete_old_versions(self, name: str, model: _Model) -> None:
        """Delete old versions beyond the number to keep; a version used by a clone stays."""
        if model.keep is None:
            return
        for version in sorted(model.kept)[: -model.keep]:
            if f"{name}/clone-step-{version}" not in self._models:
                self._pool.forget(name, version)
                model.kept.remove(version)


def check_name(name: str) -> str:
    """Check the name of a model or buffer, which is also a file name. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a plain name.", "Use letters, digits, and . _ + - inside.")
    return name


def _short(description: Mapping[str, Any]) -> str:
    return f"{description.get('class')}{description.get('args', '')}{description.get('kwargs') or ''}"
