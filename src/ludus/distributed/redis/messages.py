"""Messages between the learner of a fleet and its workers: the worker spec, which does not change, and the weights notice, which does.

The spec is a file in the store, the notice a message in the stream, and the weights that it names are a file again. All of it is
plain data, but the spec names an environment that workers import: write access to it means control over what they run.
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
from ludus.process.screen_choice import AUTO
from ludus.storage.safe_read import parse_json

PROTOCOL = 2
"""Version of the spec, notices and messages; others are refused."""

SPEC = "fleet/orders.json"
CHANNEL = "fleet/channel"
END = "fleet/over"
"""Exists when the run has ended, for workers that missed the last notice."""
WEIGHTS = "fleet/weights"
NOTICE = "bulletin"
PRESENCE = "worker/"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker does."""

    channel: str
    """Of the message stream; unique per run."""
    room: int
    env: str
    env_config: Mapping[str, Any]
    preprocess: Mapping[str, Any]
    wrappers: tuple[Any, ...]
    num_envs: int
    steps: int
    description: Mapping[str, Any]
    """Of the policy, including its spaces, as in `model.json`."""
    masked: bool
    seed: int
    in_turn: bool
    """Wait for the next version after the share of this one is made; else never wait."""
    explore: bool = True
    forgiving: bool = False
    device: str = "cpu"
    display: str = AUTO
    self_play: Mapping[str, Any] = field(default_factory=dict)
    matches: Mapping[str, Any] | None = None
    """Of environments with several agents: `MatchSpec`; None with one agent."""
    protocol: int = PROTOCOL
    ludus: str = ludus.__version__

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @property
    def fingerprint(self) -> str:
        """Hash of the spec, which every message contains."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    @classmethod
    def decode(cls, data: bytes) -> WorkerSpec:
        """Raises IncompatibleCheckpoint for a spec of another version of the code, Damaged for a malformed one."""
        try:
            plain = parse_json(data, SPEC)
            made_by, protocol = str(plain["ludus"]), plain["protocol"]
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{SPEC} is damaged: {error!r}.") from error
        if protocol != PROTOCOL or made_by != ludus.__version__:
            raise IncompatibleCheckpoint(
                f"The learner is ludus {made_by} (fleet protocol {protocol}), this worker {ludus.__version__} (protocol {PROTOCOL}).",
                "Install the same version on both sides.",
            )
        names = {field.name for field in fields(cls)}
        try:
            spec = cls(**{**plain, "wrappers": tuple(plain["wrappers"])})
            if plain.keys() != names or not (spec.channel and spec.env):
                raise ValueError(f"it has the keys {sorted(plain)}")
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{SPEC} is damaged: {error!r}.") from error
        return spec


@dataclass(frozen=True)
class MatchSpec:
    """What a worker needs besides if the environment has several agents, which one policy plays."""

    policy_mapping: Mapping[str, str]
    """Agent → model, the same for all."""
    settings: Mapping[str, Any]
    """Of `MultiAgentSettings`."""
    rows: int
    results: tuple[str, ...]
    separate_rows: bool

    @property
    def model(self) -> str:
        return next(iter(self.policy_mapping.values()))

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, plain: Mapping[str, Any]) -> MatchSpec:
        """Raises Damaged."""
        try:
            spec = cls(**{**plain, "results": tuple(map(str, plain["results"]))})
            if not spec.policy_mapping or not isinstance(spec.rows, int) or spec.rows < 1:
                raise ValueError("it has no agents or no rows")
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{SPEC} is damaged: {error!r}.") from error
        return spec


@dataclass(frozen=True)
class WeightsNotice:
    """Which weights to use, and how many segments to make with them."""

    incarnation: int
    """Of the learner; an older learner cannot replace the notice of a newer one."""
    version: int
    share: int
    """Segments that each worker makes with this version, if sampling and learning alternate."""
    orders: str
    """Fingerprint of the current worker spec."""
    timesteps: int = 0
    """Timesteps of training when this version was made."""
    over: bool = False
    """The run has ended: workers exit."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> WeightsNotice:
        """Raises Damaged."""
        return cls(**_read(cls, data, "The weights notice"))


@dataclass(frozen=True)
class Presence:
    """State of a worker, posted every few seconds."""

    host: str
    pid: int
    state: str
    """starting, sampling, waiting for weights, waiting for room, refused, failed."""
    why: str = ""
    beat: int = 0
    """Increases as long as the worker is alive."""
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
        return json.dumps(asdict(self) | {"why": self.why[:_MAX_CHARACTERS], "host": self.host[:_MAX_CHARACTERS]}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Presence:
        """Raises Damaged."""
        return cls(**_read(cls, data, "The presence message of a worker"))


def weights_key(version: int) -> str:
    return f"{WEIGHTS}/{version:08d}.safetensors"


def channel_in(spec: bytes) -> tuple[str, int]:
    """Channel and capacity in a spec of any version. Raises Damaged."""
    try:
        plain = json.loads(spec)
        return str(plain["channel"]), _integer(plain["room"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{SPEC} is damaged: {type(error).__name__}.") from error


# -- decoding of untrusted data -----------------------------------------------------------------------------------------

_MAX_CHARACTERS = 500


def _read(cls: type[Any], data: bytes, what: str) -> dict[str, Any]:
    """Decode the fields of a message, each according to its type. Raises Damaged."""
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
    "str": lambda value: str(value)[:_MAX_CHARACTERS],
    "int": _integer,
    "float": _number,
    "bool": bool,
}
