"""What the learner of a fleet tells its workers: the orders, which stay as they are, and the bulletin, which changes all the time.

The orders are a file in the store, the bulletin a notice on the board of the exchange, the weights that it names a file again.
All of it is plain data. But the orders name an environment, which a worker imports: whoever may write them chooses what it runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import ludus
from ludus.errors import Damaged, IncompatibleCheckpoint
from ludus.storage.safe_read import parse_json

PROTOCOL = 1
"""Of orders, bulletins and messages; others are refused."""

ORDERS = "fleet/orders.json"
CHANNEL = "fleet/channel"
END = "fleet/over"
"""Is there when the run has come to its end; for workers that could not hear of it."""
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
    self_play: Mapping[str, Any] = field(default_factory=dict)
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
            plain = parse_json(data, ORDERS)
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
    timesteps: int = 0
    """How far training had come when this version was made."""
    over: bool = False
    """The run has come to its end: workers may go home."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Bulletin:
        """Raises Damaged."""
        return cls(**_read(cls, data, "The bulletin of the fleet"))


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
        return json.dumps(asdict(self) | {"why": self.why[:_LONG], "host": self.host[:_LONG]}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Presence:
        """Raises Damaged."""
        return cls(**_read(cls, data, "A worker's notice"))


def weights_key(version: int) -> str:
    return f"{WEIGHTS}/{version:08d}.safetensors"


def channel_in(orders: bytes) -> tuple[str, int]:
    """Channel and room of orders of any version. Raises Damaged."""
    try:
        plain = json.loads(orders)
        return str(plain["channel"]), _integer(plain["room"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{ORDERS} is damaged: {type(error).__name__}.") from error


# -- what anybody may have written --------------------------------------------------------------------------------------

_LONG = 500


def _read(cls: type[Any], data: bytes, what: str) -> dict[str, Any]:
    """The fields of a notice, each of its kind. Raises Damaged."""
    try:
        plain = json.loads(data)
        return {field.name: _KINDS[str(field.type)](plain[field.name]) for field in fields(cls)}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Damaged(f"{what} is damaged: {type(error).__name__}.") from error


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError("not a count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number")
    return float(value)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "str": lambda value: str(value)[:_LONG],
    "int": _integer,
    "float": _number,
    "bool": bool,
}
