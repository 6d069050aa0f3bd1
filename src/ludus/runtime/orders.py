"""What the learner of a fleet tells its workers: the orders, which stay as they are, and the bulletin, which changes all the time.

The orders are a file in the store, the bulletin a notice on the board of the exchange, the weights that it names a file again.
All of it is plain data: a worker runs nothing but what is installed where it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import ludus
from ludus.errors import Damaged, IncompatibleCheckpoint

PROTOCOL = 1
"""Of orders, bulletins and messages; others are refused."""

ORDERS = "fleet/orders.json"
WEIGHTS = "fleet/weights"
BULLETIN = "bulletin"
PRESENCE = "worker/"


@dataclass(frozen=True)
class Orders:
    """What a worker has to do."""

    channel: str
    """Of the exchange: no two runs have the same."""
    room: int
    env: str
    env_config: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    wrappers: tuple[Any, ...]
    num_envs: int
    steps: int
    description: Mapping[str, Any]
    """Of the policy, spaces included, as `model.json` says it."""
    masked: bool
    seed: int
    in_turn: bool
    """Wait for the next version when the share of this one is made; else never wait."""
    explore: bool = True
    forgiving: bool = False
    device: str = "cpu"
    protocol: int = PROTOCOL
    ludus: str = ludus.__version__

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @property
    def fingerprint(self) -> str:
        """The same for the same orders: every message says which ones it was made by."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, data: bytes) -> Orders:
        """Raises IncompatibleCheckpoint when they are of another version of the code, Damaged when they are no orders."""
        try:
            plain = json.loads(data)
            made_by, protocol = str(plain["ludus"]), plain["protocol"]
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{ORDERS} is damaged: {error!r}.") from error
        if protocol != PROTOCOL or made_by != ludus.__version__:
            raise IncompatibleCheckpoint(
                f"The learner is ludus {made_by} (fleet protocol {protocol}), this worker {ludus.__version__} (protocol {PROTOCOL}).",
                "Install the same version on both sides.",
            )
        names = {field.name for field in fields(cls)}
        try:
            orders = cls(**{**plain, "wrappers": tuple(plain["wrappers"])})
            if plain.keys() != names or not (orders.channel and orders.env):
                raise ValueError(f"it has the keys {sorted(plain)}")
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{ORDERS} is damaged: {error!r}.") from error
        return orders


@dataclass(frozen=True)
class Bulletin:
    """What is new: which weights to use, and how many segments to make with them."""

    incarnation: int
    """Of the learner; an older one cannot take a newer one's notice down."""
    version: int
    share: int
    """Segments that each worker makes with this version, where sampling and learning take turns."""
    orders: str
    """Fingerprint of the orders that are in force."""
    over: bool = False
    """The run has come to its end: workers may go home."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Bulletin:
        """Raises Damaged."""
        try:
            plain = json.loads(data)
            return cls(
                int(plain["incarnation"]), int(plain["version"]), int(plain["share"]), str(plain["orders"]), bool(plain["over"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"The bulletin of the fleet is damaged: {error!r}.") from error


@dataclass(frozen=True)
class Presence:
    """What a worker says of itself every few seconds."""

    host: str
    pid: int
    state: str
    """starting, sampling, waiting for weights, waiting for room, refused, failed."""
    why: str = ""
    beat: int = 0
    """Goes up as long as it lives."""
    version: int = 0
    steps: int = 0
    blocks: int = 0
    dropped: int = 0
    environment_s: float = 0.0
    policy_s: float = 0.0
    blocked_s: float = 0.0
    weights_wait_s: float = 0.0
    env_restarts: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Presence:
        """Raises Damaged."""
        try:
            plain = json.loads(data)
            values = {field.name: _KINDS[str(field.type)](plain[field.name]) for field in fields(cls)}
            return cls(**values)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Damaged(f"A worker's notice is damaged: {error!r}.") from error


_KINDS: Mapping[str, Callable[[Any], Any]] = {"str": lambda value: str(value)[:500], "int": int, "float": float}


def weights_key(version: int) -> str:
    return f"{WEIGHTS}/{version:08d}.safetensors"
