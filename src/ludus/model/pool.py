"""The pool: where the numbered versions of models live, and how everyone who acts finds the newest.

Versions count per model name and never go backwards, across restarts too: numbers are reserved durably in blocks, so that
after a crash counting goes on above everything that may ever have been seen. Every opening has an incarnation number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ludus.errors import AlreadyExists, Damaged, Fenced, NotFound, UsageError
from ludus.model import saved
from ludus.model.policy import Policy, Weights
from ludus.store.store import Store
from ludus.tree import Array

RESERVED_BLOCK = 1000


class PolicySource(Protocol):
    """Where a sampler, session or server gets its policy from."""

    def newest(self) -> tuple[Policy, int]:
        """The policy with the newest weights this process has, and their version. Does not block."""
        ...


class Versioned(Protocol):
    """Anything whose weights are numbered: it says how it is built, and what its weights are now."""

    def description(self) -> dict[str, Any]: ...
    def weights(self) -> Mapping[str, Array]: ...


Model = TypeVar("Model", bound=Versioned)


@dataclass
class _Entry(Generic[Model]):
    model: Model
    version: int
    reserved: int
    incarnation: int
    kept: list[int] = field(default_factory=list)


class Pool(Generic[Model]):
    """Numbers the versions of models, durably, and stores those that are to be kept."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[str, _Entry[Model]] = {}

    def add(self, name: str, model: Model, above: int = 0) -> None:
        """Create or re-open a model; its next version is above every earlier one, and above `above`."""
        incarnation = self._claim(name)
        last = max(self._reserved(name), above)
        self._entries[name] = _Entry(model, last, last, incarnation)
        self._store.put(f"models/{name}/model.json", json.dumps(model.description(), indent=1).encode())
        self._write_counter(name, last + RESERVED_BLOCK)
        self.publish(name)

    def publish(self, name: str, version: int | None = None) -> int:
        """The weights as they are now become the next version, or the given one. Raises UsageError if that is not higher."""
        entry = self._entries[name]
        number = entry.version + 1 if version is None else version
        if number <= entry.version:
            raise UsageError(f"Version {number} of {name!r} does not come after {entry.version}.", "Versions only grow.")
        if number > entry.reserved:
            self._reserve(name, number - 1 + RESERVED_BLOCK)
        entry.version = number
        return number

    def newest(self, name: str) -> tuple[Model, int]:
        entry = self._entries[name]
        return entry.model, entry.version

    def names(self) -> list[str]:
        return list(self._entries)

    def incarnation(self, name: str) -> int:
        return self._entries[name].incarnation

    def keep(self, name: str) -> int:
        """Store the newest version durably, so that it can be served or played against later."""
        entry = self._entries[name]
        self.put(name, entry.version, entry.model.weights)
        return entry.version

    def put(self, name: str, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Store a version that was published, with the weights it had. Raises Fenced."""
        entry = self._entries[name]
        self._check_owner(name)
        if version not in entry.kept:
            data = saved.encode_weights(weights(), {"model": name, "version": str(version)})
            self._store.put(_version_key(name, version), data)
            entry.kept.append(version)

    def forget(self, name: str, version: int) -> None:
        self._store.delete(_version_key(name, version))

    def close(self) -> None:
        """Give back the numbers that were reserved and not used."""
        for name, entry in self._entries.items():
            self._reserve(name, entry.version)

    def _reserve(self, name: str, upto: int) -> None:
        self._check_owner(name)
        self._write_counter(name, upto)

    def _claim(self, name: str) -> int:
        """The next incarnation number, which nobody else can get: it is created, never replaced."""
        number = self._newest_incarnation(name) + 1
        while True:
            try:
                self._store.put(f"models/{name}/incarnations/{number:06d}", b"", overwrite=False)
            except AlreadyExists:
                number += 1
            else:
                return number

    def _newest_incarnation(self, name: str) -> int:
        return max((int(n) for n in self._store.list(f"models/{name}/incarnations") if n.isdigit()), default=0)

    def _check_owner(self, name: str) -> None:
        """Whoever opened the model last owns it; an older owner that was thought dead must not write any more."""
        newest, mine = self._newest_incarnation(name), self._entries[name].incarnation
        if newest != mine:
            raise Fenced(
                f"Another process has taken over the model {name!r} (incarnation {newest}, this is {mine}).",
                "One run has one trainer: stop the other, or leave this one stopped.",
            )

    def _reserved(self, name: str) -> int:
        """The highest version that may ever have been published."""
        key = _counter_key(name)
        try:
            return int(json.loads(self._store.get(key))["reserved"])
        except NotFound:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{key} is damaged: {error}.") from error

    def _write_counter(self, name: str, upto: int) -> None:
        entry = self._entries[name]
        self._store.put(_counter_key(name), json.dumps({"reserved": upto, "incarnation": entry.incarnation}).encode())
        entry.reserved = upto


class LocalPool(Pool[Policy]):
    """Policies whose learner lives in this process: acting shares the learner's own tensors, publishing copies nothing."""

    def source(self, name: str) -> PolicySource:
        return _Source(self, name)


@dataclass(frozen=True)
class _Source:
    pool: LocalPool
    name: str

    def newest(self) -> tuple[Policy, int]:
        return self.pool.newest(self.name)


def load_version(store: Store, name: str, version: int) -> tuple[Policy, dict[str, Any]]:
    """A stored version as a policy of its own."""
    policy = saved.policy_from(store.get(f"models/{name}/model.json"))
    weights: Weights
    weights, meta = saved.decode_weights(store.get(_version_key(name, version)), _version_key(name, version))
    policy.load_weights(weights)
    return policy, meta


def stored_weights(store: Store, name: str, version: int) -> Weights:
    """The weights of a stored version. Raises NotFound, Damaged."""
    return saved.decode_weights(store.get(_version_key(name, version)), _version_key(name, version))[0]


def stored_versions(store: Store, name: str) -> list[int]:
    return sorted(int(f.split(".")[0]) for f in store.list(f"models/{name}") if f.split(".")[0].isdigit())


def _version_key(name: str, version: int) -> str:
    return f"models/{name}/{version:06d}.safetensors"


def _counter_key(name: str) -> str:
    return f"models/{name}/versions.json"
