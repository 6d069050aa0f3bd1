"""Numbered versions of models, stored durably and fenced.

Versions count per model name and never decrease, also across restarts: numbers are reserved durably in blocks, so that after a crash
counting continues above every number that may have been used. Every opening creates the next claim
`models/<name>/incarnations/000003`, which only one process can create. The owner of the newest claim owns the model; an earlier owner
is fenced when it sees a later claim. Incarnation numbers have no gaps.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from ludus.core.tree import Array
from ludus.errors import AlreadyExists, Damaged, Fenced, NotFound, StoreError, StoreUnavailable, UsageError
from ludus.models.policy import Policy, Weights
from ludus.models.weights import serialization
from ludus.storage.base import Store
from ludus.storage.safe_read import parse_json

log = logging.getLogger(__name__)

RESERVED_BLOCK = 1000
"""Size of the first block of reserved numbers; later blocks are larger, so that a long run can continue longer without its store."""

LOOK_S = 0.2
"""Minimum interval between two ownership checks of `check_recently`; longer if they take more than this share of the time:"""

_CHECK_SHARE = 1 / 500
_CHECK_RETRY_S = 30.0  # retry interval when the store does not answer
_CHECK_WAIT_S = 0.5
_LARGEST_BLOCK = 16 * RESERVED_BLOCK
_TRIES_PER_BLOCK = 32
_OWNER_KEY = "token"  # in a claim: identifies the process, also if a run was deleted and restarted under the same name


class PolicySource(Protocol):
    """Where a sampler, session or server gets its policy from."""

    def newest(self) -> tuple[Policy, int]:
        """Return the policy with the newest weights of this process, and their version. Does not block."""
        ...


AnyPolicy = TypeVar("AnyPolicy")


@dataclass(frozen=True)
class FixedSource(Generic[AnyPolicy]):
    """A policy source that always returns the same policy."""

    policy: AnyPolicy

    def newest(self) -> tuple[AnyPolicy, int]:
        return self.policy, 0


class Versioned(Protocol):
    """A model with numbered weights: provides its description and its current weights."""

    def description(self) -> dict[str, Any]: ...
    def weights(self) -> Mapping[str, Array]: ...


Model = TypeVar("Model", bound=Versioned)


@dataclass
class _ManagedModel(Generic[Model]):
    model: Model
    version: int
    reserved: int
    incarnation: int
    block: int = RESERVED_BLOCK
    try_at: int = 0
    """The version at which more numbers are reserved."""
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """The claim of an incarnation; claims of earlier releases are empty."""

    number: int
    content: Mapping[str, Any]

    @property
    def who(self) -> str:
        """The owner, for messages."""
        host, pid, at = (self.content.get(key) for key in ("host", "pid", "at"))
        return f"process {pid} on {host}, since {at}" if host and pid and at else "another process"


def claims_after(store: Store, name: str, number: int) -> Iterator[Claim]:
    """Yield the claims after `number`, each read by name: some file systems list a directory with a delay of up to a minute."""
    while True:
        number += 1
        try:
            data = store.get(_claim_key(name, number))
        except NotFound:
            return
        yield Claim(number, _parse_claim(data))


def newest_claim(store: Store, name: str) -> Claim | None:
    """Return the owner's claim; None before the first."""
    listed = max((int(n) for n in store.list(f"models/{name}/incarnations") if n.isdecimal()), default=0)
    claims = list(claims_after(store, name, max(0, listed - 1)))
    return claims[-1] if claims else None


def _parse_claim(data: bytes) -> Mapping[str, Any]:
    try:
        content = parse_json(data, "A claim")
    except Damaged:  # such as the empty claims of earlier releases
        return {}
    return content if isinstance(content, dict) else {}


class VersionStore(Generic[Model]):
    """Numbers the versions of models durably and stores the kept ones."""

    def __init__(self, store: Store, began: Mapping[str, Any] | None = None, verify: Callable[[], None] | None = None) -> None:
        """`began`: origin of the run; it becomes part of every claim.

        `verify` raises if that origin is outdated. It is called after the first claim, when no other process can write any more; until it has
        returned, the claim omits `began`, so that a late process does not invalidate what others have written meanwhile.
        """
        self._store, self._verify = store, verify
        self._began, self._since, self._token = dict(began or {}), _now(), uuid.uuid4().hex
        self._entries: dict[str, _ManagedModel[Model]] = {}
        self._fenced: Fenced | None = None
        self._check_lock, self._checked_at, self._next_check_at = threading.Lock(), 0.0, 0.0

    @property
    def began(self) -> Mapping[str, Any]:
        return self._began

    def add(self, name: str, model: Model, above: int = 0) -> None:
        """Create or re-open a model; its next version is above every earlier one and above `above`. Raises Fenced, and errors of `verify`."""
        self.check()  # if two processes take over several models at once, one must get all of them
        incarnation = self._claim(name)
        if self._verify is not None:
            if incarnation > 1:  # otherwise there was no earlier owner
                self._verify()
            self._verify = None
            self._check_claim(name, incarnation)
            self._store.put(_claim_key(name, incarnation), self._claim_content())
        last = max(self._highest_reserved(name), above)
        self._entries[name] = _ManagedModel(model, last, last, incarnation)
        self._store.put(f"models/{name}/model.json", json.dumps(model.description(), indent=1).encode())
        self._write_counter(name, last + RESERVED_BLOCK)
        self.publish(name)

    def publish(self, name: str, version: int | None = None) -> int:
        """Number the current weights as the next version, or the given one. Raises UsageError if that is not higher."""
        entry = self._entries[name]
        number = entry.version + 1 if version is None else version
        if number <= entry.version:
            raise UsageError(f"Version {number} of {name!r} does not come after {entry.version}.", "Versions only grow.")
        if number > entry.reserved or number >= entry.try_at:
            self._reserve_more(name, number)
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
        """Store the newest version durably, to be served or played against later."""
        entry = self._entries[name]
        self.put(name, entry.version, entry.model.weights)
        return entry.version

    def put(self, name: str, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Store a published version with its weights. Raises Fenced."""
        entry = self._entries[name]
        self._check_claim(name)
        if version not in entry.kept:
            data = serialization.encode_weights(weights(), {"model": name, "version": str(version)})
            self._store.put(_version_key(name, version), data)
            entry.kept.append(version)

    def forget(self, name: str, version: int) -> None:
        self._store.delete(_version_key(name, version))

    def close(self) -> None:
        """Return reserved numbers that were not used."""
        for name, entry in self._entries.items():
            try:
                self._check_claim(name)
                self._write_counter(name, entry.version)
            except Fenced:
                return  # the new owner counts from them
            except StoreError as error:
                log.warning("the next version of %r will be above %d: %s", name, entry.reserved, error)

    # -- ownership

    def check(self) -> None:
        """Raise Fenced if another process has taken over; StoreUnavailable if that cannot be determined."""
        for name in list(self._entries):  # another thread may add one
            self._check_claim(name)

    def check_recently(self, after_s: float = 0.0) -> None:
        """As `check`, rate-limited for frequent callers; a result from before a long sleep is not reused.

        `after_s`: delay the check by this time, to leave it to threads that can wait longer for a slow store.
        """
        if self._fenced is not None:
            raise self._fenced
        now = time.monotonic()
        if now < self._next_check_at + after_s:
            return
        if not self._check_lock.acquire(timeout=max(0.0, self._checked_at + _CHECK_WAIT_S - now)):
            return  # another thread is checking, and it takes long
        try:
            began = self._checked_at = time.monotonic()
            if began >= self._next_check_at + after_s:
                self._next_check_at = began + _CHECK_RETRY_S
                self.check()
                took = time.monotonic() - began
                self._next_check_at = began + took + max(LOOK_S, took / _CHECK_SHARE)
        finally:
            self._check_lock.release()
        if self._fenced is not None:
            raise self._fenced

    def confirm(self) -> None:
        """As `check`, without trusting caches of this machine.

        A client of a network file system may report for a minute that a file does not exist; its own write to that directory makes it ask
        the server again.
        """
        for name, entry in list(self._entries.items()):
            self._check_claim(name)
            self._store.put(_claim_key(name, entry.incarnation), self._claim_content(confirmed=_now()))
            self._check_claim(name)

    def _claim(self, name: str) -> int:
        """Create the next incarnation number, which no other process can get: it is created, never replaced."""
        last = newest_claim(self._store, name)
        number = 1 if last is None else last.number + 1
        while True:
            try:
                self._store.put(_claim_key(name, number), self._claim_content(), overwrite=False)
            except AlreadyExists:
                if self._is_mine(name, number):  # the response to the first attempt was lost
                    return number
                number += 1
            else:
                return number

    def _is_mine(self, name: str, number: int) -> bool:
        """Raise StoreUnavailable if there is no such claim: the numbers must not have gaps."""
        try:
            content = _parse_claim(self._store.get(_claim_key(name, number)))
        except NotFound as error:
            raise StoreUnavailable(
                f"{self._store.url} reports that incarnation {number} of {name!r} exists, but does not return it.", "Try again."
            ) from error
        return content.get(_OWNER_KEY) == self._token

    def _claim_content(self, **more: Any) -> bytes:
        content = {"at": self._since, "host": platform.node(), "pid": os.getpid(), _OWNER_KEY: self._token}
        return json.dumps(content | (self._began if self._verify is None else {}) | more).encode()

    def _check_claim(self, name: str, mine: int | None = None) -> None:
        """The last opener owns the model; an earlier owner that was thought dead must not write any more."""
        mine = self._entries[name].incarnation if mine is None else mine
        later = list(claims_after(self._store, name, mine))
        if later:
            newest = later[-1]
            self._fence(
                f"Another process has taken over the model {name!r} (incarnation {newest.number}, this is {mine}): {newest.who}."
            )
        try:
            own = Claim(mine, _parse_claim(self._store.get(_claim_key(name, mine))))
        except NotFound as error:
            raise StoreUnavailable(
                f"{self._store.url} no longer has the claim of this process.",
                "Check that the file system is mounted and the run was not deleted.",
            ) from error
        if own.content.get(_OWNER_KEY, self._token) != self._token:
            self._fence(f"Another process has restarted the model {name!r} (incarnation {mine}): {own.who}.")

    def _fence(self, why: str) -> NoReturn:
        self._fenced = Fenced(why, "One run has one trainer: stop the other, or leave this one stopped.")
        raise self._fenced

    # -- counting

    def _reserve_more(self, name: str, number: int) -> None:
        """Reserve half a block ahead of need. While the store is unavailable, reserved numbers are used up."""
        entry = self._entries[name]
        block = min(2 * entry.block, _LARGEST_BLOCK)
        try:
            self._check_claim(name)
            self._write_counter(name, number - 1 + block)
        except StoreUnavailable as error:
            if number > entry.reserved:
                raise
            entry.try_at = number + max(1, entry.block // _TRIES_PER_BLOCK)
            log.warning("versions of %r are reserved up to %d; reserving more failed: %s", name, entry.reserved, error)
            return
        entry.block = block

    def _highest_reserved(self, name: str) -> int:
        """Return the highest version that may ever have been published."""
        key = _counter_key(name)
        try:
            return int(parse_json(self._store.get(key), key)["reserved"])
        except NotFound:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{key} is damaged: {error}.") from error

    def _write_counter(self, name: str, upto: int) -> None:
        entry = self._entries[name]
        self._store.put(_counter_key(name), json.dumps({"reserved": upto, "incarnation": entry.incarnation}).encode())
        entry.reserved = upto
        entry.try_at = upto - (upto - entry.version) // 2


class LocalVersionStore(VersionStore[Policy]):
    """Policies whose learner runs in this process: acting shares the learner's tensors, publishing copies nothing."""

    def source(self, name: str) -> PolicySource:
        return _LocalSource(self, name)


@dataclass(frozen=True)
class _LocalSource:
    pool: LocalVersionStore
    name: str

    def newest(self) -> tuple[Policy, int]:
        return self.pool.newest(self.name)


def load_version(store: Store, name: str, version: int) -> tuple[Policy, dict[str, Any]]:
    """Load a stored version as a new policy."""
    policy = serialization.policy_from(store.get(f"models/{name}/model.json"))
    key = _version_key(name, version)
    weights, meta = serialization.decode_weights(store.get(key), key)
    policy.load_weights(weights)
    return policy, meta


def read_weights(store: Store, name: str, version: int) -> Weights:
    """Return the weights of a stored version. Raises NotFound, Damaged."""
    return serialization.decode_weights(store.get(_version_key(name, version)), _version_key(name, version))[0]


def list_versions(store: Store, name: str) -> list[int]:
    return sorted(int(f.split(".")[0]) for f in store.list(f"models/{name}") if f.split(".")[0].isdigit())


def _version_key(name: str, version: int) -> str:
    return f"models/{name}/{version:06d}.safetensors"


def _counter_key(name: str) -> str:
    return f"models/{name}/versions.json"


def _claim_key(name: str, number: int) -> str:
    return f"models/{name}/incarnations/{number:06d}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
