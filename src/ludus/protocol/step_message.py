"""JSON and msgpack messages of a game to the built-in actor: parsed, and checked against the spaces of each seat.

Every function raises Refused (422). The built-in actor, the matches of a gamecore server and `ludus check-game` all use them.
"""

from __future__ import annotations

import contextlib
import numbers
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import gymnasium as gym

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.core.tree import Tree
from ludus.core.types import Bools
from ludus.errors import ConfigError, Refused
from ludus.protocol import codec
from ludus.protocol.codec import ONLY_SEAT

MAX_MAGNITUDE = 1e15
"""Limit of a reward or value: squares of sums of such numbers still fit into the float32 in which losses are computed."""
_KEYS = frozenset({"observation", "reward", "terminated", "truncated", "action_mask"})
_MAX_NAME, _MAX_QUOTE = 80, 300  # characters that an error quotes of a name, and of another error


class StepFields(NamedTuple):
    """The part of a message for one seat."""

    observation: Any
    action_mask: Any
    """Not checked yet, like the observation."""
    reward: float
    terminated: bool
    truncated: bool

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


def decode_message(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the message and whether it is msgpack."""
    packed = codec.is_msgpack(body)
    try:
        message = codec.decode(body)
    except ValueError as error:
        kind = "msgpack" if packed else "JSON"
        raise Refused(422, "malformed", f"The body is not {kind}: {error}.", 'Send {"observation": …}.') from None
    if not isinstance(message, dict):
        raise Refused(422, "malformed", "The body is not an object.", 'Send {"observation": …}.')
    return message, packed


def encode_message(message: dict[str, Any], packed: bool) -> bytes:
    return codec.encode(message, "msgpack" if packed else "json")


def split_seats(message: dict[str, Any], names: Collection[str], *, allow_none: bool = False) -> Mapping[str, Any]:
    """Return the parts of a message by seat. `allow_none`: the message may have no seat at all."""
    if len(names) == 1 and ONLY_SEAT in names:
        return {ONLY_SEAT: message}
    seats = message.get("seats")
    if not isinstance(seats, dict) or message.keys() - {"seats"} or not (seats or allow_none):
        hint = f'Send {{"seats": {{name: …}}}}; the names are {", ".join(sorted(names))}.'
        raise Refused(422, "seats", "This game has several seats.", hint)
    for name in seats:
        if name not in names:
            quoted = str(name)[:_MAX_NAME]
            raise Refused(422, "seats", f"There is no seat {quoted!r}.", did_you_mean(quoted, names))
    return seats


def parse_step(part: Any, seat: str = ONLY_SEAT, *, playing: bool, last: bool = False) -> StepFields:
    """Parse the part of one seat. `playing`: it has acted in this episode; `last`: this ends the session."""
    where = f" of seat {seat!r}" if seat else ""
    if not isinstance(part, dict):
        raise Refused(422, "malformed", f"The step{where} is not an object.", 'Send {"observation": …, "reward": …}.')
    if unknown := part.keys() - _KEYS:
        key = str(min(unknown, key=str))[:_MAX_NAME]
        raise Refused(422, "unknown_key", f"The step{where} has an unknown key {key!r}.", did_you_mean(key, _KEYS))
    terminated, truncated = part.get("terminated", False), part.get("truncated", False)
    for key, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, bool):
            raise Refused(422, key, f"{key}{where} is {reprlib.repr(value)}.", "It is true or false.")
    reward = parse_reward(part.get("reward", 0.0), where)
    if reward and not playing:
        raise reward_before_action(reward, where)
    if last:
        terminated = terminated or not truncated
    observation = part.get("observation")
    if observation is None and not terminated:
        hint = "A truncated episode needs its last" if truncated else "Send it as"
        raise Refused(422, "observation", f"The observation{where} is missing.", f'{hint} "observation".')
    return StepFields(observation, part.get("action_mask"), reward, terminated, truncated)


def parse_reward(given: Any, where: str = "") -> float:
    if not isinstance(given, bool) and isinstance(given, numbers.Real):
        with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
            reward = float(given)
            if abs(reward) <= MAX_MAGNITUDE:
                return reward
    hint = f"It is a number up to {MAX_MAGNITUDE:g}, better around 1."
    raise Refused(422, "reward", f"The reward{where} is {reprlib.repr(given)}.", hint)


def reward_before_action(reward: float, where: str = "") -> Refused:
    return Refused(422, "reward", f"A reward{where} of {reward:g} came before any action.", "Send rewards after an action.")


def misfit(what: str, error: Exception) -> Refused:
    """Build the refusal of an `observation` or `action_mask` that does not fit its space."""
    hint = "GET /spec shows the space." if what == "observation" else "One 0 or 1 per option."
    text = str(error)[:_MAX_QUOTE].removesuffix(".")
    return Refused(422, what, f"The {what.replace('_', ' ')} does not fit: {text}.", hint)


class SeatParser:
    """Converts the observations and action masks of one seat."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._fit = spaces.SpaceParser(observation_space)
        self._choices = spaces.choices(action_space)

    def observation(self, given: Any) -> Tree:
        try:
            return self._fit(given)
        except ValueError as error:
            raise misfit("observation", error) from None

    def mask(self, given: Any) -> Bools | None:
        if given is None:
            return None
        try:
            flat = spaces.flat_mask(given, self.action_space)
        except (ConfigError, ValueError, TypeError) as error:
            raise misfit("action_mask", error) from None
        for part in self._choices:
            if not flat[part].any():
                message = f"The action mask forbids every action (options {part.start} to {part.stop - 1})."
                raise Refused(422, "action_mask", message, "Leave at least one option of every choice allowed.")
        return flat
