"""Client for many sessions of one server: their requests are sent together and the replies read in order (HTTP pipelining).

    with BatchClient("http://127.0.0.1:8000") as client:
        replies = client.tick_all({"match-1": seen, "match-2": other})     # starts sessions that are not open yet
        replies = client.tick_all({"match-2": seen}, ended=["match-1"])

A batch takes one round trip, not one for each session. Uses the standard library only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ludus.errors import LudusError
from ludus.protocol.client import Client, _Attempt, _Deadline, _HttpReplyParser, _Reply, _Steps
from ludus.protocol.spec import END, START, TICK

_WINDOW: Final = 128
"""Requests that are sent before their replies are read. A server reads fewer at a time (32); replies to all fit into its send buffer."""


class BatchClient(Client):
    """`Client` with methods for many sessions at once; use one per thread.

    A session whose request failed is forgotten: another tick with its name starts a new one.
    """

    def tick_all(self, bodies: Mapping[str, bytes], ended: Iterable[str] = ()) -> dict[str, bytes | LudusError]:
        """Send a tick to each session, by name, and wait for all replies; returns a reply or an error for each.

        `ended`: sessions to end as well. Those that cannot be ended expire on the server.
        """
        sessions = self._protocol.sessions
        begun = [(START, session, b"") for session in bodies if session not in sessions]
        closed = [(END, session, b"") for session in dict.fromkeys(ended) if session in sessions]
        results = self._step_all([*closed, *begun])
        for _, session, _ in closed:
            results.pop(session)
            sessions.pop(session, None)
        open_ones = [(TICK, session, body) for session, body in bodies.items() if session not in _failed(results)]
        results |= self._step_all(open_ones)
        for session in _failed(results):
            sessions.pop(session, None)
        return results

    @property
    def open_sessions(self) -> list[str]:
        return list(self._protocol.sessions)

    def forget_all(self) -> None:
        """Forget all sessions without ending them."""
        self._protocol.sessions.clear()

    def _step_all(self, requests: Sequence[tuple[str, str, bytes]]) -> dict[str, bytes | LudusError]:
        """Send requests (kind, session, body) of different sessions, with retries; returns the outcomes by session."""
        results: dict[str, bytes | LudusError] = {}
        waiting: list[tuple[str, _Steps, _Attempt]] = []
        for kind, session, body in requests:
            steps = self._protocol.step(kind, session, body)
            waiting.append((session, steps, next(steps)))
        while waiting:
            if delay_s := max(attempt.after_s for _, _, attempt in waiting):
                time.sleep(delay_s)
            outcomes = self._exchange([attempt for _, _, attempt in waiting])
            again: list[tuple[str, _Steps, _Attempt]] = []
            for (session, steps, _), outcome in zip(waiting, outcomes, strict=True):
                try:
                    again.append((session, steps, steps.send(outcome)))
                except StopIteration as stop:
                    results[session] = stop.value
                except LudusError as error:
                    results[session] = error
            waiting = again
        return results

    def _send_attempt(self, attempt: _Attempt) -> _Reply:
        (outcome,) = self._exchange([attempt])
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def _exchange(self, attempts: Sequence[_Attempt]) -> list[_Reply | OSError]:
        """Send requests and read their replies. When the connection fails, all that have no reply yet get its error."""
        outcomes: list[_Reply | OSError] = []
        while len(outcomes) < len(attempts):
            try:
                for reply in self._send_window(attempts[len(outcomes) : len(outcomes) + _WINDOW]):
                    outcomes.append(reply)
            except OSError as error:
                return outcomes + [error] * (len(attempts) - len(outcomes))
        return outcomes

    def _send_window(self, window: Sequence[_Attempt]) -> Iterator[_Reply]:
        """Send requests at once; yields their replies, fewer if the server closes the connection after one. Raises OSError."""
        address, deadline = window[0].address, _Deadline(window[0].timeout_s)
        kept = self._kept.pop(address, None)
        connected, reader = kept or (self._connect(address, deadline), _HttpReplyParser(pipelined=True))
        with contextlib.ExitStack() as undo:
            undo.callback(connected.close)
            connected.settimeout(max(deadline.left_s, 1e-3))
            connected.sendall(b"".join(attempt.request for attempt in window))
            for _ in window:
                reply = reader.take()
                while reply is None:
                    if deadline.left_s <= 0:
                        raise TimeoutError("timed out")
                    connected.settimeout(deadline.left_s)
                    reply = reader.feed(connected.recv(65536))
                yield reply
                if reply.close:
                    return
            if reader.has_data:
                raise ConnectionError("unexpected data after the last reply")
            self._kept[address] = connected, reader
            undo.pop_all()


def _failed(results: Mapping[str, bytes | LudusError]) -> list[str]:
    return [session for session, result in results.items() if isinstance(result, LudusError)]
