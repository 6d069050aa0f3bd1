"""Players of environment matches: local policies, a remote agent over HTTP, random actions. Each acts for all its agents of all matches
in one call."""

from __future__ import annotations

import abc
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
import torch

from ludus.core import spaces
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.envs.pettingzoo import AgentSpaces, Departure, sample_action
from ludus.errors import EnvironmentFault, IncompatibleCheckpoint, LudusError, Unreachable, UsageError, user_frame
from ludus.models.inference.batched_policy import ActingPolicy, State
from ludus.protocol.client import Client
from ludus.protocol.codec import ONLY_SEAT, decode, encode, parse_seats
from ludus.sampling.multi_agent.policy_set import PolicySet, plain_action
from ludus.serving.worker import FixedPolicySource
from ludus.tournament.contestants import RULE, Contestant, FunctionContestant, ScriptedContestant, ServedContestant
from ludus.tournament.result import MAX_REASON_CHARS, failure_text

log = logging.getLogger(__name__)

RANDOM_PLAYER: Final = "random"
_CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 30.0
_RESTART_TIMEOUT_S: Final = 60.0
_RETRY_INTERVAL_S: Final = 0.5

T = TypeVar("T")


class ActionRequest(NamedTuple):
    """An agent that must act now in the match with this slot number."""

    match: int
    agent: str
    observation: Tree
    mask: Bools | None
    reward: float


@dataclass(frozen=True)
class NoAction:
    """Returned instead of an action when the player has none; the match fails."""

    reason: str


class MatchPlayer(abc.ABC):
    """A contestant in all matches that are played at the same time."""

    @abc.abstractmethod
    def begin(self, match: int, seed: int) -> None: ...

    @abc.abstractmethod
    def act(self, requests: Sequence[ActionRequest]) -> list[Any]:
        """Actions in the form that the environment takes, or `NoAction`."""

    def leave(self, match: int, left: Departure) -> None:  # noqa: B027 - optional
        """An agent has left the match. If it returns, it starts with a new state."""

    def end(self, match: int) -> None:  # noqa: B027 - optional
        """The match is over or failed. `leave` was called for the agents that left before."""

    def close(self) -> None:  # noqa: B027 - optional
        """No match will follow."""


def _act_in_groups(
    requests: Sequence[ActionRequest],
    group_of: Callable[[ActionRequest], T],
    act: Callable[[T, Sequence[ActionRequest]], Sequence[Any]],
) -> list[Any]:
    """Call `act` once per group of requests; returns the actions in the order of the requests."""
    groups: dict[T, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(group_of(request), []).append(row)
    actions: list[Any] = [None] * len(requests)
    for group, rows in groups.items():
        for row, action in zip(rows, act(group, [requests[row] for row in rows]), strict=True):
            actions[row] = action
    return actions


class RandomPlayer(MatchPlayer):
    """Samples uniformly from the allowed actions."""

    def __init__(self, agents: Mapping[str, AgentSpaces], max_matches: int) -> None:
        self._agents = agents
        self._random = [np.random.default_rng()] * max_matches

    def begin(self, match: int, seed: int) -> None:
        self._random[match] = np.random.default_rng(seed)

    def act(self, requests: Sequence[ActionRequest]) -> list[Any]:
        return [
            plain_action(sample_action(self._agents[request.agent].action, request.mask, self._random[request.match]))
            for request in requests
        ]


class FunctionPlayer(MatchPlayer):
    """A function of the user. A match in which it raises, or returns something else than an action, fails."""

    def __init__(self, contestant: FunctionContestant, agents: Mapping[str, AgentSpaces]) -> None:
        self._contestant = contestant
        self._fit = {agent: spaces.SpaceParser(known.action, f"the action of {agent}") for agent, known in agents.items()}

    def act(self, requests: Sequence[ActionRequest]) -> list[Any]:
        return [self._act_once(request) for request in requests]

    def begin(self, match: int, seed: int) -> None:
        """A function has no state."""

    def _act_once(self, request: ActionRequest) -> Any:
        try:
            return plain_action(self._fit[request.agent](self._contestant.function(request.observation, request.mask)))
        except Exception as error:  # code of the user
            log.debug("%s failed", self._contestant.label, exc_info=True)
            return NoAction(f"{self._contestant.label} failed: {error!r}{user_frame(error)}"[:MAX_REASON_CHARS])


class PolicyPlayer(MatchPlayer):
    """Local policies by agent, with a recurrent state per agent and match and a noise stream per match."""

    def __init__(self, policies: Mapping[str, ActingPolicy], max_matches: int, deterministic: bool) -> None:
        self._by_agent = policies
        first: dict[int, str] = {}
        self._models = {agent: first.setdefault(id(policy), agent) for agent, policy in policies.items()}
        sources = {model: FixedPolicySource(policies[model], 0) for model in first.values()}
        self._policies = PolicySet(sources, torch.Generator(), explore=False)  # noise comes from the matches
        self._draws = not deterministic
        self._generators = [torch.Generator() for _ in range(max_matches)]
        self._states: dict[tuple[int, str], State] = {}

    def begin(self, match: int, seed: int) -> None:
        self._generators[match].manual_seed(seed)

    def act(self, requests: Sequence[ActionRequest]) -> list[Any]:
        noise: dict[tuple[int, str], Array] = {}
        if self._draws:  # from the stream of the match in the order of its turns, so that other matches have no influence
            for match, agent, *_ in requests:
                noise[match, agent] = self._by_agent[agent].draw_noise(1, self._generators[match])
        with self._policies.acting():
            return _act_in_groups(
                requests, lambda request: self._models[request.agent], lambda model, rows: self._decide_batch(model, rows, noise)
            )

    def _decide_batch(self, model: str, requests: Sequence[ActionRequest], noise: Mapping[tuple[int, str], Array]) -> list[Any]:
        inputs = [(request.observation, self._states.get((request.match, request.agent)), request.mask) for request in requests]
        drawn = np.concatenate([noise[request.match, request.agent] for request in requests]) if noise else None
        try:
            decisions = self._policies.decide(model, inputs, drawn)
        except EnvironmentFault as fault:  # an output is not finite
            if len(requests) == 1:
                return [NoAction(failure_text(fault))]
            # Only the matches concerned may fail: decide row by row.
            return [action for request in requests for action in self._decide_batch(model, [request], noise)]
        for request, decision in zip(requests, decisions, strict=True):
            self._states[request.match, request.agent] = decision.state
        return [plain_action(decision.action) for decision in decisions]

    def leave(self, match: int, left: Departure) -> None:
        self._states.pop((match, left.agent), None)

    def end(self, match: int) -> None:
        for key in [key for key in self._states if key[0] == match]:
            del self._states[key]


class RemotePlayer(MatchPlayer):
    """An agent served over HTTP: one session per match, or one per agent if the server has no seats."""

    def __init__(self, contestant: ServedContestant, agents: Mapping[str, AgentSpaces]) -> None:
        self._served, self._url = contestant, contestant.url
        spec = self._fetch_spec()
        self._seated = "seats" in spec
        self._check_spaces(spec, agents)
        self._client = Client(contestant.url, contestant.token, _ANSWER_TIMEOUT_S)
        self._fit = {agent: spaces.SpaceParser(known.action, f"the action of {agent}") for agent, known in agents.items()}
        self._names: dict[int, str] = {}
        self._sessions: dict[tuple[int, str], str] = {}
        self._agents_acted: set[tuple[int, str]] = set()
        self._departures: dict[tuple[int, str], dict[str, Any]] = {}  # final messages to send with the next request
        self._outage = ""
        """Why the server cannot be reached; empty: it answers."""
        self._gave_up = False

    def _fetch_spec(self) -> dict[str, Any]:
        """Without retries. Raises Unreachable, Refused."""
        with Client(self._url, self._served.token, _CONNECT_TIMEOUT_S, 0) as client:
            return client.spec()

    def _check_spaces(self, spec: Mapping[str, Any], agents: Mapping[str, AgentSpaces]) -> None:
        """Compare the spaces if the server publishes them. Raises IncompatibleCheckpoint."""
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
        if self._outage and not self._gave_up:
            self._wait_for_return()

    def _wait_for_return(self) -> None:
        """Wait once for a server that may be restarting; after that all matches fail at once."""
        until = time.monotonic() + _RESTART_TIMEOUT_S
        while self._outage and time.monotonic() < until:
            with contextlib.suppress(LudusError):
                self._fetch_spec()
                self._outage = ""
                return
            time.sleep(_RETRY_INTERVAL_S)
        self._gave_up = True

    def act(self, requests: Sequence[ActionRequest]) -> list[Any]:
        return _act_in_groups(
            requests, lambda request: (request.match, "" if self._seated else request.agent), self._request_actions
        )

    def _request_actions(self, key: tuple[int, str], requests: Sequence[ActionRequest]) -> list[Any]:
        if self._outage:
            return [NoAction(self._outage)] * len(requests)
        try:
            session = self._session(key)
            if departures := self._take_departures(key[0]):
                self._client.tick(session, encode({"seats": departures}, "msgpack"))
            messages = {request.agent: self._message(request) for request in requests}
            body = {"seats": messages} if self._seated else messages[requests[0].agent]
            reply = decode(self._client.tick(session, encode(body, "msgpack")))
            actions = reply["actions"] if self._seated else {requests[0].agent: reply["action"]}
            self._agents_acted.update((request.match, request.agent) for request in requests)
            return [plain_action(self._fit[request.agent](actions[request.agent])) for request in requests]
        except Unreachable as error:
            self._outage, self._gave_up = failure_text(error), False
            return [NoAction(self._outage)] * len(requests)
        except LudusError as error:
            return [NoAction(failure_text(error))] * len(requests)
        except (ValueError, KeyError, TypeError) as error:
            return [NoAction(f"{self._url} did not answer with a valid action: {error}"[:MAX_REASON_CHARS])] * len(requests)

    def _message(self, request: ActionRequest) -> dict[str, Any]:
        message: dict[str, Any] = {"observation": map_tree(_to_list, request.observation)}
        if (request.match, request.agent) in self._agents_acted:  # a reward before its first action belongs to no action
            message["reward"] = request.reward
        return message if request.mask is None else message | {"action_mask": request.mask.tolist()}

    def _take_departures(self, match: int) -> dict[str, Any]:
        """Remove and return the final messages of the seats that left a match since its last request."""
        return {agent: self._departures.pop((m, agent)) for m, agent in list(self._departures) if m == match}

    def _session(self, key: tuple[int, str]) -> str:
        if key not in self._sessions:
            match, agent = key
            name = f"{self._names[match]}-{agent}" if agent else self._names[match]
            self._client.start(name, match=self._names[match])
            self._sessions[key] = name
        return self._sessions[key]

    def leave(self, match: int, left: Departure) -> None:
        if (match, left.agent) not in self._agents_acted:
            return
        self._agents_acted.discard((match, left.agent))
        message: dict[str, Any] = {"reward": left.reward, "terminated": True}
        if not left.terminated and left.observation is not None:
            message |= {"terminated": False, "truncated": True, "observation": map_tree(_to_list, left.observation)}
        if self._seated:
            self._departures[match, left.agent] = message
        else:
            self._close((match, left.agent), message)

    def end(self, match: int) -> None:
        departures = self._take_departures(match)
        for key in [key for key in self._sessions if key[0] == match]:
            self._close(key, {"seats": departures} if departures else {})
        self._agents_acted = {key for key in self._agents_acted if key[0] != match}

    def _close(self, key: tuple[int, str], message: Mapping[str, Any]) -> None:
        name = self._sessions.pop(key, None)
        if name is None or self._outage:
            return
        try:
            self._client.end(name, encode(message, "msgpack") if message else b"")
        except Unreachable as error:
            self._outage, self._gave_up = failure_text(error), False
        except LudusError:
            log.debug("ending session %s failed; the server expires it", name, exc_info=True)

    def close(self) -> None:
        for key in list(self._sessions):
            self._close(key, {})
        self._client.close()


def _to_list(part: Any) -> Any:
    return np.asarray(part).tolist()


def make_player(
    contestant: Contestant, agents: Mapping[str, AgentSpaces], env: str, max_matches: int, deterministic: bool
) -> MatchPlayer:
    """`agents`: all agents that the contestant plays in some match. Raises UsageError, IncompatibleCheckpoint, Unreachable."""
    if isinstance(contestant, ScriptedContestant):
        if contestant.name != RANDOM_PLAYER:
            raise UsageError(f"{env} has no player {contestant.label!r}.", f"Environments have only {RULE}:{RANDOM_PLAYER}.")
        return RandomPlayer(agents, max_matches)
    if isinstance(contestant, ServedContestant):
        return RemotePlayer(contestant, agents)
    if isinstance(contestant, FunctionContestant):
        return FunctionPlayer(contestant, agents)
    policies = {}
    for agent, known in agents.items():
        if agent not in contestant.seats and contestant.several:
            raise UsageError(
                f"{contestant.label} has the models {', '.join(contestant.several)}, and none that was trained to play {agent!r} of {env}.",
                "Choose one: --model-a, --model-b.",
            )
        policy = policies[agent] = contestant.seats.get(agent, contestant.policy)
        _check_fits(contestant.label, policy.observation_space, policy.action_space, agent, known)
    return PolicyPlayer(policies, max_matches, deterministic)


def _check_fits(label: str, observation: gym.Space[Any], action: gym.Space[Any], agent: str, known: AgentSpaces) -> None:
    """Raises IncompatibleCheckpoint. Bounds of observations may differ."""
    for kind, mine, there, same in (
        ("observation", observation, known.observation, spaces.array_spec(observation) == spaces.array_spec(known.observation)),
        ("action", action, known.action, spaces.to_json(action) == spaces.to_json(known.action)),
    ):
        if not same:
            raise IncompatibleCheckpoint(
                f"{label} cannot play {agent!r}: its {kind} space is {mine}, that of the environment is {there}.",
                "If it was trained for one side only: --no-swap-sides.",
            )
