"""Encode requests to actors and parse their replies, in msgpack, JSON or raw arrays. No I/O.

A session plays the heroes of a camp as seats `hero_0`, `hero_1`, …, or (`lone`) one hero, whose steps are not nested in a seat.
"""

from __future__ import annotations

import json
import reprlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from ludus.games.arena.engine.layout import AIMED, BUTTONS, DIRECTIONS, HEADS, MOVE_DIRECTION, SKILL_DIRECTION, USES

Format = Literal["msgpack", "json", "raw"]
MATCHES: Final = "matches"
"""Key of further matches in a reply."""
FORMATS: Final = ("msgpack", "json", "raw")
Action = tuple[int, ...]

INFO: Final = "info"
"""Key of optional information, which actors may reject."""
_HEAD = struct.Struct("<fI")
_TERMINATED, _TRUNCATED, _MASKED = 1, 2, 4
_ACTION = struct.Struct(f"<{len(HEADS)}q")
_REPR: Final = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 60
_MAX_REPLY = 1 << 20
_NAME = 40


class HeroObservation(NamedTuple):
    """Observation of one hero, in the order of the raw format."""

    entities: npt.NDArray[np.float32]
    scalars: npt.NDArray[np.float32]
    target_mask: npt.NDArray[np.bool_]
    state: npt.NDArray[np.float32] | None = None
    """State for a centralised value function, with the option `whole`."""


class SeatStep(NamedTuple):
    """Message to one seat: a tick has a mask, the end has terminated or truncated."""

    seat: str
    reward: float
    observation: HeroObservation | None = None
    mask: npt.NDArray[np.bool_] | None = None
    terminated: bool = False
    truncated: bool = False


@dataclass
class ParsedReply:
    """By seat: actions, or errors; and the names of seats that were not asked for."""

    actions: dict[str, Action]
    wrong: dict[str, str]
    others: set[str]
    matches: Sequence[Any] = ()
    """Further matches to play."""


class BodyCodec:
    """Encodes and parses the bodies of one session."""

    def __init__(self, kind: Format, options: Sequence[int], *, lone: bool = False, packed_masks: bool = False) -> None:
        """`options`: number of options of each action head. Raw arrays imply `lone`. `packed_masks`: masks as bytes in msgpack."""
        self.kind, self.lone = kind, lone or kind == "raw"
        self._packed_masks = packed_masks and kind == "msgpack"
        self._options = tuple(options)
        self._array: Callable[[npt.NDArray[Any]], Any] = np.ndarray.tobytes if kind == "msgpack" else _to_list

    def start(self, about: Mapping[str, Any]) -> bytes:
        return self._encode({"format": self.kind, **about})

    def steps(self, steps: Sequence[SeatStep], info: Mapping[str, Any] | None = None) -> bytes:
        """Encode the body of a tick or an end; empty without steps and information."""
        if not steps and (not info or self.kind == "raw"):
            return b""
        if self.kind == "raw":
            return _encode_raw(steps[0])
        step_fields = {step.seat: self._step(step) for step in steps}
        message: dict[str, Any] = {} if not step_fields else step_fields[steps[0].seat] if self.lone else {"seats": step_fields}
        return self._encode(message | {INFO: info} if info else message)

    def read(self, body: bytes, seats: Collection[str]) -> ParsedReply:
        """Parse an untrusted reply to a tick. Never raises."""
        try:
            message = self._message(body)
            given = self._actions(message, seats)
        except ValueError as error:
            return ParsedReply({}, dict.fromkeys(seats, f"The reply {error}."), set())
        reply = ParsedReply({}, {}, {str(name)[:_NAME] for name in given.keys() - seats}, _further_matches(message))
        for name in seats:
            if why := self._find_error(given.get(name)):
                reply.wrong[name] = why
            else:
                reply.actions[name] = tuple(given[name])
        return reply

    def matches_in(self, body: bytes) -> Sequence[Any]:
        """Return the further matches in the reply to a start or an end; none if it is invalid."""
        try:
            return _further_matches(self._message(body)) if body else ()
        except ValueError:
            return ()

    def _message(self, body: bytes) -> Any:
        """Raises ValueError, in words that go on after “The reply”."""
        if len(body) > _MAX_REPLY:
            raise ValueError(f"has {len(body):,} bytes")
        if self.kind == "raw":
            if len(body) != _ACTION.size:
                raise ValueError(f"has {len(body)} bytes, an action has {_ACTION.size}")
            return {"action": _ACTION.unpack(body)}
        try:
            return msgpack.unpackb(body) if self.kind == "msgpack" else json.loads(body)
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"is not {self.kind}: {str(error)[:80] or type(error).__name__}") from None

    def _actions(self, message: Any, seats: Collection[str]) -> dict[Any, Any]:
        """Raises ValueError, in words that go on after “The reply”."""
        key = "action" if self.lone else "actions"
        given = message.get(key) if isinstance(message, dict) else None
        if self.lone:
            if given is None:
                raise ValueError(f"has no {key!r}: {_REPR.repr(message)}")
            return dict.fromkeys(seats, given)
        if not isinstance(given, dict):
            raise ValueError(f"has no {key!r} with seats: {_REPR.repr(message)}")
        return given

    def _find_error(self, given: Any) -> str:
        """Return why an action is malformed; empty if it is not. Does not check legality."""
        if given is None:
            return "There is no action for it."
        if not isinstance(given, (list, tuple)) or len(given) != len(self._options):
            return f"The action is {_REPR.repr(given)}, it is a list of {len(self._options)} whole numbers ({', '.join(HEADS)})."
        for head, options, value in zip(HEADS, self._options, given, strict=True):
            if type(value) is not int:
                return f"{head!r} is {_REPR.repr(value)}, it is a whole number."
            if not 0 <= value < options:
                return f"{head!r} is {_REPR.repr(value)}, it is from 0 to {options - 1}."
        return ""

    def _step(self, step: SeatStep) -> dict[str, Any]:
        step_fields: dict[str, Any] = {"reward": step.reward}
        if step.observation is not None:
            array, (entities, scalars, target_mask, state) = self._array, step.observation
            seen = {"entities": array(entities), "scalars": array(scalars), "target_mask": array(target_mask)}
            step_fields["observation"] = seen if state is None else {"observation": seen, "state": array(state)}
        if step.mask is not None:
            # Numbers rather than bools: one byte in msgpack, two in JSON.
            step_fields["action_mask"] = step.mask.tobytes() if self._packed_masks else step.mask.view(np.uint8).tolist()
        if step.terminated:
            step_fields["terminated"] = True
        if step.truncated:
            step_fields["truncated"] = True
        return step_fields

    def _encode(self, message: Mapping[str, Any]) -> bytes:
        if self.kind == "msgpack":
            packed: bytes = msgpack.packb(message)
            return packed
        return json.dumps(message).encode()


def _to_list(part: npt.NDArray[Any]) -> Any:
    return part.view(np.uint8).tolist() if part.dtype == np.bool_ else part.tolist()


def _encode_raw(step: SeatStep) -> bytes:
    flags = _TERMINATED * step.terminated | _TRUNCATED * step.truncated | _MASKED * (step.mask is not None)
    parts = [] if step.observation is None else [part.tobytes() for part in step.observation if part is not None]
    if step.mask is not None:
        parts.append(step.mask.tobytes())
    return b"".join((_HEAD.pack(step.reward, flags), *parts))


def _further_matches(message: Any) -> Sequence[Any]:
    given = message.get(MATCHES) if isinstance(message, dict) else None
    return given if isinstance(given, list) else ()


def explain_refusal(action: Action, mask: npt.NDArray[np.bool_], target_mask: npt.NDArray[np.bool_]) -> str:
    """Return why an action is illegal, and the legal ones. `mask` is flat; `target_mask` has a row for each button with a target."""
    buttons, moves, skills, _ = np.split(mask, np.cumsum([len(BUTTONS), DIRECTIONS, DIRECTIONS]))
    may = ", ".join(name for name, allowed in zip(BUTTONS, buttons, strict=True) if allowed)
    what, uses = action[0], USES[action[0]]
    wrong = f"{BUTTONS[what]!r} is not allowed now."
    rest = [f"what: {may}"]
    if buttons[what]:
        wrong = f"{BUTTONS[what]!r} is not allowed like this."
        directions = (moves, MOVE_DIRECTION), (skills, SKILL_DIRECTION)
        rest += [f"{HEADS[head]}: {_format_indices(part)}" for part, head in directions if uses[head]]
        if what in AIMED:
            rest.append(f"target of {BUTTONS[what]!r}: {_format_indices(target_mask[AIMED.index(what)])}")
    return f"{list(action)}: {wrong} Allowed: {'; '.join(rest)}."


def _format_indices(allowed: npt.NDArray[np.bool_]) -> str:
    return ", ".join(str(i) for i in np.flatnonzero(allowed)) or "none"
