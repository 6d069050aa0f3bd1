"""Rock, paper, scissors over HTTP: matches that connect to the port of a training, on threads of the test."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from ludus.errors import LudusError, Refused, Unreachable
from ludus.protocol.client import Client

SPACES: dict[str, Any] = {
    "observation_space": {"type": "Box", "shape": [1], "low": 0, "high": 1},
    "action_space": {"type": "Discrete", "n": 3},
}
_PAUSE_S = 0.05


class Game:
    """Plays one match after the other until `close`; a match that fails is abandoned."""

    def __init__(self, url: str, *, seats: bool = False, rounds: int = 1, report_winner: bool = False) -> None:
        """`seats`: one session plays both sides. `report_winner`: rewards are all 0, and the end names the winner."""
        self._url, self._seats, self._rounds, self._report_winner = url, seats, rounds, report_winner
        self.played = self.unsure = 0
        """Matches whose end was acknowledged; matches whose end may have arrived."""
        self.refusals: list[Refused] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(60)

    def _run(self) -> None:
        names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        with Client(self._url, timeout_s=20.0) as client:
            while not self._closing.is_set():
                ending = False
                try:
                    match = next(names)
                    (self._start_seats if self._seats else self._start_sides)(client, match)
                    gains = [0.0, 0.0]
                    for number in range(self._rounds):
                        chosen = self._tick(client, match, gains if number else None)
                        gain = float(((chosen[0] - chosen[1] + 1) % 3) - 1)
                        gains = [gain, -gain]
                    ending = True
                    self._end(client, match, gains)
                    self.played += 1
                except Unreachable:
                    self.unsure += ending
                    self._closing.wait(_PAUSE_S)
                except LudusError as error:
                    if isinstance(error, Refused):
                        self.refusals.append(error)
                    self._closing.wait(_PAUSE_S)

    def _start_sides(self, client: Client, match: str) -> None:
        for side in "01":
            client.start(f"{match}-{side}", match=match, side=side)

    def _start_seats(self, client: Client, match: str) -> None:
        client.start(match)

    def _tick(self, client: Client, match: str, gains: list[float] | None) -> list[int]:
        steps = [{"observation": [1.0]} | ({} if gains is None else self._reward(gain)) for gain in gains or (0.0, 0.0)]
        if self._seats:
            message = {"seats": dict(zip(("left", "right"), steps, strict=True))}
            actions = json.loads(client.tick(match, json.dumps(message).encode()))["actions"]
            return [actions["left"], actions["right"]]
        return [
            json.loads(client.tick(f"{match}-{side}", json.dumps(step).encode()))["action"] for side, step in enumerate(steps)
        ]

    def _reward(self, gain: float) -> dict[str, float]:
        return {"reward": 0.0 if self._report_winner else gain}

    def _end(self, client: Client, match: str, gains: list[float]) -> None:
        last = [{"terminated": True} | self._reward(gain) for gain in gains]
        winner = None if gains[0] == 0 else int(gains[1] > 0)
        info = {"info": {"result": {"winner": winner}}} if self._report_winner else {}
        if self._seats:
            client.end(match, json.dumps({"seats": dict(zip(("left", "right"), last, strict=True))} | info).encode())
            return
        for side, step in enumerate(last):
            client.end(f"{match}-{side}", json.dumps(step | info).encode())


@contextlib.contextmanager
def games(url: str, number: int = 2, **options: Any) -> Iterator[list[Game]]:
    running = [Game(url, **options) for _ in range(number)]
    try:
        yield running
    finally:
        for game in running:
            game.close()
