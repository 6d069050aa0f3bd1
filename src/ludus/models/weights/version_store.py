"""The pool: where the numbered versions of models live, and how everyone who acts finds the newest.

Versions count per model name and never go backwards, across restarts too: numbers are reserved durably in blocks, so that
after a crash counting goes on above everything that may ever have been seen. Every opening has an incarnation number, which is
claimed: `models/<name>/incarnations/000003` is created by one process and by no other. Whoever made the newest claim owns the
model; everybody else has been cut off, and finds that out by the claim that comes after his own. The numbers have no gaps.
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
"""So many numbers are reserved at first, then ever more: the longer a run lasts, the longer it can do without its store."""

LOOK_S = 0.2
"""Who owns the models is looked at so often, but no more than takes this part of the time:"""

_LOOK_SHARE = 1 / 500
_LOOK_AGAIN_S = 30.0  # when the store did not answer, for which one may have waited long
_LOOK_TOGETHER_S = 0.5
_LARGEST_BLOCK = 16 * RESERVED_BLOCK
_TRIES_PER_BLOCK = 32
_WHOSE = "token"  # in a claim: tells it from that of another process, when a run was deleted and begun anew under its name


class PolicySource(Protocol):
    """Where a sampler, session or server gets its policy from."""

    def newest(self) -> tuple[Policy, int]:
        """The policy with the newest weights this process has, and their version. Does not block."""
        ...


@dataclass(frozen=True)
class FixedSource:
    """A policy as a source of its weights as they are now."""

    policy: Policy

    def newest(self) -> tuple[Policy, int]:
        return self.policy, 0


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
    block: int = RESERVED_BLOCK
    try_at: int = 0
    """The version with which it is time to reserve more."""
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """What the owner of an incarnation said when it began; nothing in claims of earlier versions."""

    number: int
    said: Mapping[str, Any]

    @property
    def who(self) -> str:
        """For people."""
        host, pid, at = (self.said.get(key) for key in ("host", "pid", "at"))
        return f"process {pid} on {host}, since {at}" if host and pid and at else "another process"


def claims_after(store: Store, name: str, number: int) -> Iterator[Claim]:
    """Asks for each by its name: some file systems list a directory as it was up to a minute ago."""
    while True:
        number += 1
        try:
            data = store.get(_claim_key(name, number))
        except NotFound:
            return
        yield Claim(number, _said(data))


def newest_claim(store: Store, name: str) -> Claim | None:
    """The owner's; None before there was one."""
    listed = max((int(n) for n in store.list(_claims(name)) if n.isdecimal()), default=0)
    found = list(claims_after(store, name, max(0, listed - 1)))
    return found[-1] if found else None


def _said(data: bytes) -> Mapping[str, Any]:
    try:
        said = parse_json(data, "A claim")
    except Damaged:  # such as the empty ones of earlier versions
        return {}
    return said if isinstance(said, dict) else {}


class Pool(Generic[Model]):
    """Numbers the versions of models, durably, and stores those that are to be kept."""

    def __init__(self, store: Store, began: Mapping[str, Any] | None = None, verify: Callable[[], None] | None = None) -> None:
        """`began`: from where; it becomes part of every claim.

        `verify` raises when that is not so any more. It is asked once the first claim is made, from when on nobody else writes; until
        it has agreed the claim says nothing of `began`: whoever is late must not disown what others have made meanwhile.
        """
        self._store, self._verify = store, verify
        self._began, self._since, self._token = dict(began or {}), _now(), uuid.uuid4().hex
        self._entries: dict[str, _Entry[Model]] = {}
        self._fenced: Fenced | None = None
        self._looking, self._looked_at, self._look_at = threading.Lock(), 0.0, 0.0

    @property
    def began(self) -> Mapping[str, Any]:
        return self._began

    def add(self, name: str, model: Model, above: int = 0) -> None:
        """Create or re-open a model; its next version is above every earlier one, and above `above`. Raises Fenced, and what `verify` does."""
        self.check()  # of two that take over several models at once, one is to have them all
        incarnation = self._claim(name)
        if self._verify is not None:
            if incarnation > 1:  # else nobody was here before
                self._verify()
            self._verify = None
            self._check_claim(name, incarnation)
            self._store.put(_claim_key(name, incarnation), self._claim_of())
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
        """Store the newest version durably, so that it can be served or played against later."""
        entry = self._entries[name]
        self.put(name, entry.version, entry.model.weights)
        return entry.version

    def put(self, name: str, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Store a version that was published, with the weights it had. Raises Fenced."""
        entry = self._entries[name]
        self._check_owner(name)
        if version not in entry.kept:
            data = serialization.encode_weights(weights(), {"model": name, "version": str(version)})
            self._store.put(_version_key(name, version), data)
            entry.kept.append(version)

    def forget(self, name: str, version: int) -> None:
        self._store.delete(_version_key(name, version))

    def close(self) -> None:
        """Give back the numbers that were reserved and not used."""
        for name, entry in self._entries.items():
            try:
                self._check_owner(name)
                self._write_counter(name, entry.version)
            except Fenced:
                return  # they are the other's to count from
            except StoreError as error:
                log.warning("the next version of %r will be above %d: %s", name, entry.reserved, error)

    # -- who owns them

    def check(self) -> None:
        """Raises Fenced when another process has taken over; StoreUnavailable when that cannot be known."""
        for name in list(self._entries):  # another thread may be adding one
            self._check_owner(name)

    def look(self, after_s: float = 0.0) -> None:
        """As `check`, for those who ask all the time: the answer is a moment old, but it is none from before a long sleep.

        `after_s`: leave it so long to other threads, which have more time to wait for a store that does not answer.
        """
        if self._fenced is not None:
            raise self._fenced
        now = time.monotonic()
        if now < self._look_at + after_s:
            return
        if not self._looking.acquire(timeout=max(0.0, self._looked_at + _LOOK_TOGETHER_S - now)):
            return  # another thread is about it, and it takes long
        try:
            began = self._looked_at = time.monotonic()
            if began >= self._look_at + after_s:
                self._look_at = began + _LOOK_AGAIN_S
                self.check()
                took = time.monotonic() - began
                self._look_at = began + took + max(LOOK_S, took / _LOOK_SHARE)
        finally:
            self._looking.release()
        if self._fenced is not None:
            raise self._fenced

    def confirm(self) -> None:
        """As `check`, and nothing that this machine remembers is believed.

        A client of a network file system may go on for a minute saying that a file is not there; what it changes itself in that
        directory makes it ask again.
        """
        for name, entry in list(self._entries.items()):
            self._check_owner(name)
            self._store.put(_claim_key(name, entry.incarnation), self._claim_of(confirmed=_now()))
            self._check_owner(name)

    def _claim(self, name: str) -> int:
        """The next incarnation number, which nobody else can get: it is created, never replaced."""
        last = newest_claim(self._store, name)
        number = 1 if last is None else last.number + 1
        while True:
            try:
                self._store.put(_claim_key(name, number), self._claim_of(), overwrite=False)
            except AlreadyExists:
                if self._is_mine(name, number):  # the answer to the first attempt was lost
                    return number
                number += 1
            else:
                return number

    def _is_mine(self, name: str, number: int) -> bool:
        """Raises StoreUnavailable when there is no such claim: the numbers must not have gaps."""
        try:
            said = _said(self._store.get(_claim_key(name, number)))
        except NotFound as error:
            raise StoreUnavailable(
                f"{self._store.url} says that incarnation {number} of {name!r} exists, and does not have it.", "Try again."
            ) from error
        return said.get(_WHOSE) == self._token

    def _claim_of(self, **more: Any) -> bytes:
        said = {"at": self._since, "host": platform.node(), "pid": os.getpid(), _WHOSE: self._token}
        return json.dumps(said | (self._began if self._verify is None else {}) | more).encode()

    def _check_owner(self, name: str) -> None:
        """Whoever opened the model last owns it; an older owner that was thought dead must not write any more."""
        self._check_claim(name, self._entries[name].incarnation)

    def _check_claim(self, name: str, mine: int) -> None:
        later = list(claims_after(self._store, name, mine))
        if later:
            newest = later[-1]
            self._fence(
                f"Another process has taken over the model {name!r} (incarnation {newest.number}, this is {mine}): {newest.who}."
            )
        try:
            own = Claim(mine, _said(self._store.get(_claim_key(name, mine))))
        except NotFound as error:
            raise StoreUnavailable(
                f"{self._store.url} does not have the claim of this process any more.",
                "Check that the file system is mounted and the run was not deleted.",
            ) from error
        if own.said.get(_WHOSE, self._token) != self._token:
            self._fence(f"Another process has begun the model {name!r} anew (incarnation {mine}): {own.who}.")

    def _fence(self, why: str) -> NoReturn:
        self._fenced = Fenced(why, "One run has one trainer: stop the other, or leave this one stopped.")
        raise self._fenced

    # -- counting

    def _reserve_more(self, name: str, number: int) -> None:
        """Half a block ahead of need. While the store is away, what was reserved is used up."""
        entry = self._entries[name]
        block = min(2 * entry.block, _LARGEST_BLOCK)
        try:
            self._check_owner(name)
            self._write_counter(name, number - 1 + block)
        except StoreUnavailable as error:
            if number > entry.reserved:
                raise
            entry.try_at = number + max(1, entry.block // _TRIES_PER_BLOCK)
            log.warning("versions of %r are reserved up to %d, and more cannot be for now: %s", name, entry.reserved, error)
            return
        entry.block = block

    def _reserved(self, name: str) -> int:
        """The highest version that may ever have been published."""
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
    policy = serialization.policy_from(store.get(f"models/{name}/model.json"))
    weights: Weights
    weights, meta = serialization.decode_weights(store.get(_version_key(name, version)), _version_key(name, version))
    policy.load_weights(weights)
    return policy, meta


def stored_weights(store: Store, name: str, version: int) -> Weights:
    """The weights of a stored version. Raises NotFound, Damaged."""
    return serialization.decode_weights(store.get(_version_key(name, version)), _version_key(name, version))[0]


def stored_versions(store: Store, name: str) -> list[int]:
    return sorted(int(f.split(".")[0]) for f in store.list(f"models/{name}") if f.split(".")[0].isdigit())


def _version_key(name: str, version: int) -> str:
    return f"models/{name}/{version:06d}.safetensors"


def _counter_key(name: str) -> str:
    return f"models/{name}/versions.json"


def _claims(name: str) -> str:
    return f"models/{name}/incarnations"


def _claim_key(name: str, number: int) -> str:
    return f"{_claims(name)}/{number:06d}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
