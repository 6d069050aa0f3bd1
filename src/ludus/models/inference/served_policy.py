"""Policies of an agent that is served over HTTP, by `ludus serve` or another gateway.

Every row of a batch has its own session, so that a recurrent agent keeps a state for each row on its server. Here the state of a row is
the number of its session, 0 before its first action. All rows of a batch are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from ludus.core import spaces
from ludus.core.tree import Array, Tree, leaves, map_tree, stack
from ludus.core.types import Bools
from ludus.errors import IncompatibleCheckpoint, LudusError, Refused, Unreachable
from ludus.models.inference.batched_policy import Decision, State
from ludus.models.policy import BatchDecision
from ludus.protocol.batch_client import BatchClient
from ludus.protocol.codec import ONLY_SEAT, SeatSpaces, decode, encode, parse_seats, random_action

OnFailure = Callable[[str, bool], None]
"""Called with the reason when the server cannot be used, and whether that may change by itself."""

_TIMEOUT_S: Final = 5.0
_RETRIES: Final = 1
"""A server that does not answer delays a batch by up to 10 s. Sampling workers are restarted after `worker_hang_s`, which is longer."""
_BUSY: Final = frozenset({429, 503})
_SESSION_OVER: Final = frozenset({404, 409, 410, 500, 504})
"""Status codes after which one session is over; other sessions are not affected."""
_MAX_LOST: Final = 8
"""Sessions that are lost without a good reply in between, after which the server counts as failed."""
_LOST: Final = -1
"""In place of the number of a session: it is lost, and its match has to be given up."""


class ServedRow(NamedTuple):
    """A request for an action."""

    session: int
    """Number of its session; 0: a new one."""
    seat: str
    observation: Tree
    mask: Bools | None


class ServedAnswer(NamedTuple):
    session: int
    action: Tree
    """None: the session is lost."""


class ServedAgent:
    """The sessions of this process with one server. Thread-safe; close it at the end."""

    def __init__(
        self,
        url: str,
        token: str | None,
        game: SeatSpaces,
        agents: Sequence[str] = (),
        on_failure: OnFailure = lambda reason, temporary: None,
    ) -> None:
        """`game`: the spaces of all agents. `agents`: their names; if the server has several seats, each is played by the seat with its
        name. Without names one seat plays all of them. Raises Unreachable, Refused, IncompatibleCheckpoint.
        """
        self.url, self._on_failure = url, on_failure
        self._client = BatchClient(url, token, _TIMEOUT_S, _RETRIES)
        self._lock = threading.Lock()
        self._prefix, self._number = f"league-{secrets.token_hex(4)}", 0
        self._first_usable = 1  # sessions with smaller numbers were lost with the server
        self._ended: list[str] = []  # sessions to end with the next request
        self._lost_in_a_row = 0
        self._failure: tuple[str, bool] | None = None
        self._waiting: deque[tuple[ServedRow, Future[ServedAnswer]]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="served-agent")  # its thread starts with the first `submit`
        self._parse = spaces.SpaceParser(game.action, "the action")
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.close)
            seats = _choose_seats(url, self._client.spec(), game, agents)
            undo.pop_all()
        self.policies: Mapping[str, ServedPolicy] = {agent: ServedPolicy(self, seat, game) for agent, seat in seats.items()}
        """By agent; "" stands for all agents."""

    def ask(self, rows: Sequence[ServedRow]) -> list[ServedAnswer]:
        """Request actions for rows of different sessions, and wait for all of them."""
        with self._lock:
            numbers = [self._usable_session(row.session) for row in rows]
            known = [(number, row) for number, row in zip(numbers, rows, strict=True) if number != _LOST]
            ended, self._ended = self._ended, []
            replies = self._client.tick_all({self._name(number): _body(row) for number, row in known}, ended)
            actions = {number: self._read(number, row.seat, replies[self._name(number)]) for number, row in known}
        return [ServedAnswer(_LOST if actions.get(number) is None else number, actions.get(number)) for number in numbers]

    def submit(self, row: ServedRow) -> Future[ServedAnswer]:
        """Request one action; does not block. Requests that wait at the same time are sent together."""
        answer: Future[ServedAnswer] = Future()
        self._waiting.append((row, answer))
        self._pool.submit(self._ask_waiting)
        return answer

    def end(self, sessions: Sequence[int]) -> None:
        """End sessions with the next request."""
        with self._lock:
            self._ended += [self._name(number) for number in sessions if number >= self._first_usable]

    def end_episode(self, state: State) -> None:
        """End the session of a row whose episode is over."""
        self.end([int(state[0])])

    def report_failure(self) -> None:
        """Call `on_failure` if the server has failed since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._on_failure(*failure)

    def close(self) -> None:
        """End all sessions."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._client.tick_all({}, self._client.open_sessions)
            self._client.close()

    def _ask_waiting(self) -> None:
        """On the thread of the pool."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not waiting:  # the previous call has taken them
            return
        try:
            answers = self.ask([row for row, _ in waiting])
        except Exception as error:  # passed on to every caller
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), found in zip(waiting, answers, strict=True):
            answer.set_result(found)

    def _usable_session(self, number: int) -> int:
        if number == 0:
            self._number += 1
            return self._number
        return number if number >= self._first_usable else _LOST

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _read(self, number: int, seat: str, reply: bytes | LudusError) -> Tree:
        """The action in a reply; None if the session is lost."""
        if isinstance(reply, LudusError):
            self._handle_error(reply)
            return None
        try:
            message = decode(reply)
            action: Tree = self._parse(message["actions"][seat] if seat else message["action"])
        except (ValueError, KeyError, TypeError) as error:
            self._failure = (f"{self.url} did not answer with a valid action: {error}", False)
            self._ended.append(self._name(number))
            return None
        self._lost_in_a_row = 0
        return action

    def _handle_error(self, error: LudusError) -> None:
        self._lost_in_a_row += 1
        status = error.status if isinstance(error, Refused) else 0
        away = isinstance(error, Unreachable) or status in _BUSY
        if away or self._lost_in_a_row >= _MAX_LOST:
            self._first_usable, self._lost_in_a_row = self._number + 1, 0
            self._ended.clear()
            self._client.forget_all()
            self._failure = (f"{self.url}: {error}", True)
        elif status not in _SESSION_OVER:
            self._failure = (f"{self.url}: {error}", False)


class ServedPolicy:
    """One seat of a served agent. Implements ActingPolicy; temperature and version of the actions are the server's."""

    recurrent = True

    def __init__(self, agent: ServedAgent, seat: str, game: SeatSpaces) -> None:
        self.agent, self._seat = agent, seat
        self.observation_space: gym.Space[Any] = game.observation
        self.action_space: gym.Space[Any] = game.action
        self._parse = spaces.SpaceParser(game.action, "the action")
        self._random = np.random.default_rng(0)

    def state_spec(self) -> Tree:
        return (spaces.ArraySpec((), np.dtype(np.int64)),)

    def draw_noise(self, rows: int, generator: torch.Generator) -> Array:
        return np.zeros((rows, 0), np.float32)

    def act(
        self, observation: Tree, state: State = (), mask: Array | None = None, noise: Array | None = None
    ) -> BatchDecision:  # fmt: skip
        """Rows whose session is lost have a random action, and are marked in `lost`."""
        rows = len(next(leaf for _, leaf in leaves(observation)))
        sessions = state[0].tolist() if state else [0] * rows
        asked = [
            self.row(sessions[row], map_tree(lambda part: part[row], observation), None if mask is None else mask[row])  # noqa: B023
            for row in range(rows)
        ]
        answers = self.agent.ask(asked)
        self.agent.report_failure()
        lost = np.array([answer.action is None for answer in answers], np.bool_)
        actions = [
            self._random_action(row.mask) if answer.action is None else answer.action
            for row, answer in zip(asked, answers, strict=True)
        ]
        action, zeros = stack(actions), np.zeros(rows, np.float32)
        after = np.array([answer.session for answer in answers], np.int64)
        return BatchDecision(action, action, zeros, zeros, (after,), lost if lost.any() else None)

    def row(self, session: int, observation: Tree, mask: Bools | None) -> ServedRow:
        return ServedRow(int(session), self._seat, observation, mask)

    def _random_action(self, mask: Bools | None) -> Tree:
        return self._parse(random_action(self.action_space, self._random, mask))


class ServedDecider:
    """A served policy for the sessions of one match on an event loop. `decide` raises Refused (410) when the match has to be given up."""

    def __init__(self, policy: ServedPolicy) -> None:
        self.policy = policy
        self.lost = False
        """Whether the server has not answered: the match must not be counted."""
        self._sessions: set[int] = set()

    def decide(
        self, observation: Tree, state: State | None = None, mask: Bools | None = None, temperature: float | None = None
    ) -> asyncio.Future[Decision]:
        """`state`: of the previous decision, None at the start of an episode. `temperature` is the server's."""
        return asyncio.ensure_future(self._decide(observation, state, mask))

    async def _decide(self, observation: Tree, state: State | None, mask: Bools | None) -> Decision:
        row = self.policy.row(0 if state is None else int(state[0]), observation, mask)
        answer = await asyncio.wrap_future(self.policy.agent.submit(row))
        self.policy.agent.report_failure()
        if answer.action is None:
            self.lost = True
            raise Refused(
                410, "session_lost", f"The opponent {self.policy.agent.url} does not answer.", "End the match, and start another."
            )
        self._sessions.add(answer.session)
        return Decision(answer.action, answer.action, 0.0, 0.0, (np.array(answer.session),), 0)

    def close(self) -> None:
        """The match is over."""
        self.policy.agent.end(sorted(self._sessions))


def _body(row: ServedRow) -> bytes:
    """A tick in msgpack, with arrays as raw bytes."""
    message: dict[str, Any] = {"observation": map_tree(lambda part: np.ascontiguousarray(part).tobytes(), row.observation)}
    if row.mask is not None:
        message["action_mask"] = np.asarray(row.mask, np.uint8).tobytes()
    return encode({"seats": {row.seat: message}} if row.seat else message, "msgpack")


def _choose_seats(url: str, spec: Mapping[str, Any], game: SeatSpaces, agents: Sequence[str]) -> dict[str, str]:
    """Agent → seat of the server; "" stands for all agents. Raises IncompatibleCheckpoint."""
    if "seats" not in spec:
        if "observation_space" in spec:
            _check_spaces(url, ONLY_SEAT, parse_seats(spec)[ONLY_SEAT], game)
        return {"": ONLY_SEAT}
    seats = parse_seats(spec)
    chosen = {agent: agent for agent in agents} or {"": next(iter(seats))}
    for seat in chosen.values():
        if seat not in seats:
            raise IncompatibleCheckpoint(f"{url} has no seat {seat!r}; its seats are {', '.join(seats)}.")
        _check_spaces(url, seat, seats[seat], game)
    return chosen


def _check_spaces(url: str, seat: str, served: SeatSpaces, game: SeatSpaces) -> None:
    """Raises IncompatibleCheckpoint. Bounds of observations may differ."""
    for kind, theirs, ours, same in (
        ("observation", served.observation, game.observation, _same_arrays(served.observation, game.observation)),
        ("action", served.action, game.action, spaces.to_json(served.action) == spaces.to_json(game.action)),
    ):
        if not same:
            where = f" of seat {seat!r}" if seat else ""
            raise IncompatibleCheckpoint(
                f"{url} cannot play this game: its {kind} space{where} is {theirs}, that of the game is {ours}."
            )


def _same_arrays(one: gym.Space[Any], other: gym.Space[Any]) -> bool:
    return bool(spaces.array_spec(one) == spaces.array_spec(other))
