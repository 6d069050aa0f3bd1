"""Who plays in matches of environments: policies of ours, somebody who is served elsewhere, chance. Each is asked for all its agents of
all matches at once."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch

from ludus.core import spaces
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.envs.pettingzoo import AgentSpaces, Departure, sample_action
from ludus.errors import EnvironmentFault, IncompatibleCheckpoint, LudusError, Unreachable, UsageError
from ludus.models.inference.batched_policy import ActingPolicy, State
from ludus.protocol.client import Client
from ludus.protocol.codec import ONLY_SEAT, decode, encode, parse_seats
from ludus.sampling.multi_agent import PolicySet, plain_action
from ludus.serving.worker import FixedPolicySource
from ludus.tournament.contestants import RULE, Contestant, Script, Served
from ludus.tournament.result import SHORT, why

log = logging.getLogger(__name__)

AT_RANDOM: Final = "random"
_REACH_S: Final = 5.0
_ANSWER_S: Final = 30.0
_AWAY_S: Final = 60.0
_PAUSE_S: Final = 0.5


class Asked(NamedTuple):
    """An agent of a contestant that is to act, in one of the matches that are played at once."""

    match: int
    agent: str
    observation: Tree
    mask: Bools | None
    reward: float


@dataclass(frozen=True)
class Lost:
    """Instead of an action: its player has none to give, and why."""

    why: str


class Mind(Protocol):
    """A contestant, in all matches at once."""

    def begin(self, match: int, seed: int) -> None: ...

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        """As the environment takes them, or `Lost`."""
        ...

    def leave(self, match: int, left: Departure) -> None:
        """The agent acts no more, at least for now: should it come back, it begins anew."""
        ...

    def end(self, match: int) -> None:
        """It is over, or given up; those who left before it was have been told of."""
        ...

    def close(self) -> None: ...


class Chance:
    """Everything that is allowed is equally likely."""

    def __init__(self, agents: Mapping[str, AgentSpaces], places: int) -> None:
        self._agents = agents
        self._random = [np.random.default_rng()] * places

    def begin(self, match: int, seed: int) -> None:
        self._random[match] = np.random.default_rng(seed)

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        return [plain_action(sample_action(self._agents[one.agent].action, one.mask, self._random[one.match])) for one in asked]

    def leave(self, match: int, left: Departure) -> None:
        """It has no memory."""

    def end(self, match: int) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class Policies:
    """Policies of ours, by agent: a recurrent state for each, and noise for each match."""

    def __init__(self, of: Mapping[str, ActingPolicy], places: int, deterministic: bool) -> None:
        self._of = of
        first: dict[int, str] = {}
        self._models = {agent: first.setdefault(id(policy), agent) for agent, policy in of.items()}
        sources = {model: FixedPolicySource(of[model], 0) for model in first.values()}
        self._minds = PolicySet(sources, torch.Generator(), explore=False)  # noise comes from the matches
        self._draws = not deterministic
        self._generators = [torch.Generator() for _ in range(places)]
        self._states: dict[tuple[int, str], State] = {}

    def begin(self, match: int, seed: int) -> None:
        self._generators[match].manual_seed(seed)

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        noise = [self._drawn(one) for one in asked]
        by_model: dict[str, list[int]] = {}
        for row, one in enumerate(asked):
            by_model.setdefault(self._models[one.agent], []).append(row)
        actions: list[Any] = [None] * len(asked)
        with self._minds.acting():
            for rows in by_model.values():
                for row, action in zip(rows, self._decided([asked[r] for r in rows], [noise[r] for r in rows]), strict=True):
                    actions[row] = action
        return actions

    def _decided(self, asked: Sequence[Asked], noise: Sequence[Array | None]) -> list[Any]:
        """Of one model."""
        told = [(one.observation, self._states.get((one.match, one.agent)), one.mask) for one in asked]
        drawn = [part for part in noise if part is not None]
        try:
            made = self._minds.decide(self._models[asked[0].agent], told, np.concatenate(drawn) if drawn else None)
        except EnvironmentFault as fault:  # it answers what is no number: whom?
            if len(asked) == 1:
                return [Lost(why(fault))]
            return [action for one, own in zip(asked, noise, strict=True) for action in self._decided([one], [own])]
        for one, decision in zip(asked, made, strict=True):
            self._states[one.match, one.agent] = decision.state
        return [plain_action(decision.action) for decision in made]

    def _drawn(self, one: Asked) -> Array | None:
        """From a stream of the match, in the order of its turns: who else plays makes no difference."""
        return self._of[one.agent].draw_noise(1, self._generators[one.match]) if self._draws else None

    def leave(self, match: int, left: Departure) -> None:
        self._states.pop((match, left.agent), None)

    def end(self, match: int) -> None:
        for key in [key for key in self._states if key[0] == match]:
            del self._states[key]

    def close(self) -> None:
        """Whoever lent the policies has them."""


class Called:
    """Somebody who answers games at an address: a session for each match, or one for each agent where there are no seats."""

    def __init__(self, one: Served, agents: Mapping[str, AgentSpaces]) -> None:
        self._served, self._url = one, one.url
        spec = self._spec()
        self._seated = "seats" in spec
        self._check(spec, agents)
        self._client = Client(one.url, one.token, _ANSWER_S)
        self._fit = {agent: spaces.SpaceParser(known.action, f"the action of {agent}") for agent, known in agents.items()}
        self._names: dict[int, str] = {}
        self._open: dict[tuple[int, str], str] = {}
        self._acted: set[tuple[int, str]] = set()
        self._parting: dict[tuple[int, str], dict[str, Any]] = {}  # what those who have left are yet to be told
        self._gone = ""
        self._waited = False

    def _spec(self) -> dict[str, Any]:
        """Told soon, or not at all. Raises Unreachable, Refused."""
        with Client(self._url, self._served.token, _REACH_S, 0) as client:
            return client.spec()

    def _check(self, spec: Mapping[str, Any], agents: Mapping[str, AgentSpaces]) -> None:
        """As far as it says what it plays."""
        if not self._seated and "observation_space" not in spec:
            return
        seats = parse_seats(spec)
        for agent, known in agents.items():
            seat = seats.get(agent if self._seated else ONLY_SEAT)
            if seat is None:
                raise IncompatibleCheckpoint(f"{self._url} has no seat {agent!r}; its seats are {', '.join(seats)}.")
            _check_fits(self._url, seat.observation, seat.action, agent, known)

    def begin(self, match: int, seed: int) -> None:
        self._names[match] = f"battle-{secrets.token_hex(8)}"
        if self._gone and not self._waited:
            self._await()

    def _await(self) -> None:
        """Somebody who is started anew is back within a minute; one who is not, is gone for good."""
        until = time.monotonic() + _AWAY_S
        while self._gone and time.monotonic() < until:
            with contextlib.suppress(LudusError):
                self._spec()
                self._gone = ""
                return
            time.sleep(_PAUSE_S)
        self._waited = True

    def act(self, asked: Sequence[Asked]) -> list[Any]:
        groups: dict[tuple[int, str], list[int]] = {}
        for row, one in enumerate(asked):
            groups.setdefault(self._key(one.match, one.agent), []).append(row)
        actions: list[Any] = [None] * len(asked)
        for key, rows in groups.items():
            for row, action in zip(rows, self._answers(key, [asked[row] for row in rows]), strict=True):
                actions[row] = action
        return actions

    def _key(self, match: int, agent: str) -> tuple[int, str]:
        """Of its session."""
        return match, "" if self._seated else agent

    def _answers(self, key: tuple[int, str], asked: Sequence[Asked]) -> list[Any]:
        if self._gone:
            return [Lost(self._gone)] * len(asked)
        try:
            session = self._session(key)
            if parting := self._said(key[0]):
                self._client.tick(session, encode({"seats": parting}, "msgpack"))
            told = {one.agent: _told(one, rewarded=(one.match, one.agent) in self._acted) for one in asked}
            body = {"seats": told} if self._seated else told[asked[0].agent]
            reply = decode(self._client.tick(session, encode(body, "msgpack")))
            given = reply["actions"] if self._seated else {asked[0].agent: reply["action"]}
            self._acted.update((one.match, one.agent) for one in asked)
            return [plain_action(self._fit[one.agent](given[one.agent])) for one in asked]
        except Unreachable as error:
            self._gone, self._waited = why(error), False
            return [Lost(self._gone)] * len(asked)
        except LudusError as error:
            return [Lost(why(error))] * len(asked)
        except (ValueError, KeyError, TypeError) as error:
            return [Lost(f"{self._url} answered what is no action: {error}"[:SHORT])] * len(asked)

    def _said(self, match: int) -> dict[str, Any]:
        """What the seats of a session hear who have left since it last heard of them."""
        return {agent: self._parting.pop((m, agent)) for m, agent in list(self._parting) if m == match}

    def _session(self, key: tuple[int, str]) -> str:
        if key not in self._open:
            match, agent = key
            name = f"{self._names[match]}-{agent}" if agent else self._names[match]
            self._client.start(name, match=self._names[match])
            self._open[key] = name
        return self._open[key]

    def leave(self, match: int, left: Departure) -> None:
        if (match, left.agent) not in self._acted:
            return
        self._acted.discard((match, left.agent))
        words: dict[str, Any] = {"reward": left.reward, "terminated": True}
        if not left.terminated and left.observation is not None:
            words |= {"terminated": False, "truncated": True, "observation": map_tree(_listed, left.observation)}
        if self._seated:
            self._parting[match, left.agent] = words
        else:
            self._close((match, left.agent), words)

    def end(self, match: int) -> None:
        parting = self._said(match)
        for key in [key for key in self._open if key[0] == match]:
            self._close(key, {"seats": parting} if parting else {})
        self._acted = {key for key in self._acted if key[0] != match}

    def _close(self, key: tuple[int, str], words: Mapping[str, Any]) -> None:
        name = self._open.pop(key, None)
        if name is None or self._gone:
            return
        try:
            self._client.end(name, encode(words, "msgpack") if words else b"")
        except Unreachable as error:
            self._gone, self._waited = why(error), False
        except LudusError:
            log.debug("a session did not end; it is forgotten there after a while", exc_info=True)

    def close(self) -> None:
        for key in list(self._open):
            self._close(key, {})
        self._client.close()


def _told(one: Asked, *, rewarded: bool) -> dict[str, Any]:
    """`rewarded`: what came before its first action belongs to none."""
    said: dict[str, Any] = {"observation": map_tree(_listed, one.observation)}
    said |= {"reward": one.reward} if rewarded else {}
    return said if one.mask is None else said | {"action_mask": one.mask.tolist()}


def _listed(part: Any) -> Any:
    return np.asarray(part).tolist()


def mind_of(one: Contestant, agents: Mapping[str, AgentSpaces], env: str, places: int, deterministic: bool) -> Mind:
    """`agents`: those that it may have to play. Raises UsageError, IncompatibleCheckpoint, Unreachable."""
    if isinstance(one, Script):
        if one.name != AT_RANDOM:
            raise UsageError(f"{env} has no player {one.label!r}.", f"In environments there is {RULE}:{AT_RANDOM}.")
        return Chance(agents, places)
    if isinstance(one, Served):
        return Called(one, agents)
    of = {}
    for agent, known in agents.items():
        if agent not in one.seats and one.several:
            raise UsageError(
                f"{one.label} has the models {', '.join(one.several)}, and none that was trained to play {agent!r} of {env}.",
                "Choose one: --model-a, --model-b.",
            )
        policy = of[agent] = one.seats.get(agent, one.policy)
        _check_fits(one.label, policy.observation_space, policy.action_space, agent, known)
    return Policies(of, places, deterministic)


def _check_fits(who: str, seen: gym.Space[Any], done: gym.Space[Any], agent: str, known: AgentSpaces) -> None:
    """Raises IncompatibleCheckpoint."""
    for what, mine, there in (("sees", seen, known.observation), ("does", done, known.action)):
        if _form(mine, what) != _form(there, what):
            raise IncompatibleCheckpoint(
                f"{who} cannot play {agent!r}: what it {what} is {mine}, and there it is {there}.",
                "If it was trained for one side only: --no-swap-sides.",
            )


def _form(space: gym.Space[Any], what: str) -> Any:
    return spaces.array_spec(space) if what == "sees" else spaces.to_json(space)
