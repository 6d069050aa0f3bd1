"""CartPole as a separate game process that gets its actions from a server over plain HTTP.

    python game.py --port 8000 --games 32              # until the server stops
    python game.py --port 8000 --matches 100           # one hundred matches, then the mean score

Each match is a session: start, a tick for every step, end. All matches of this process advance together, each over its own
connection. The HTTP code uses only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
import uuid
from typing import Any

import gymnasium as gym

TOKEN = os.environ.get("LUDUS_TOKEN", "")  # if the server has one
LIMIT = 500  # steps after which a match is truncated


class ServerGone(Exception):
    pass


class SessionLost(Exception):
    """The server lost this match because its worker died; start another one."""


class Match:
    """Consecutive games over one connection."""

    def __init__(self, host: str, port: int, seed: int, own_rule: bool) -> None:
        self.own_rule = own_rule
        self.env = gym.make("CartPole-v1").unwrapped
        self.seed = seed
        self.socket = socket.create_connection((host, port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.begin()

    def begin(self) -> None:
        self.session = uuid.uuid4().hex
        self.observation, _ = self.env.reset(seed=self.seed)
        self.score, self.reward = 0, 0.0
        self.send("start", b"")
        self.receive()

    def ask(self) -> None:
        self.send("tick", json.dumps({"observation": self.observation.tolist(), "reward": self.reward}).encode())

    def act(self) -> int | None:
        """Apply the received action. Return the score if the match is over, else None."""
        answer = self.receive()
        angle, turning = float(self.observation[2]), float(self.observation[3])
        action = int(angle + turning > 0) if self.own_rule else json.loads(answer)["action"]
        self.observation, self.reward, fell, _, _ = self.env.step(action)
        self.score += 1
        if not fell and self.score < LIMIT:
            return None
        last: dict[str, Any] = {"reward": self.reward, "terminated": bool(fell), "truncated": not fell}
        self.send("end", json.dumps(last | {"observation": self.observation.tolist()}).encode())
        self.receive()
        return self.score

    def send(self, kind: str, body: bytes) -> None:
        head = f"POST /step HTTP/1.1\r\nHost: game\r\nsession: {self.session}\r\nstep_kind: {kind}\r\nContent-Length: {len(body)}"
        head += f"\r\nAuthorization: Bearer {TOKEN}" if TOKEN else ""
        self.socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def receive(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        while len(body) < length:
            body += self._more()
        status = int(head.split(b" ", 2)[1])
        if status == 503:
            raise ServerGone
        if status == 410:
            raise SessionLost
        if status != 200:
            raise SystemExit(f"{status}: {body.decode()}")
        return body

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise ServerGone
        return data


def connect(host: str, port: int, seed: int, own_rule: bool, patience_s: float) -> Match:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return Match(host, port, seed, own_rule)
        except (ConnectionError, ServerGone):
            if time.monotonic() > deadline:
                raise SystemExit(f"No server listens at {host}:{port}.") from None
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--games", type=int, default=32, help="concurrent matches")
    parser.add_argument("--matches", type=int, default=0, help="stop after this many; 0 = play until the server stops")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own-rule", action="store_true", help="request actions but play by a built-in rule (for measurements)")
    options = parser.parse_args()
    games = min(options.games, options.matches or options.games)
    matches = [connect(options.host, options.port, options.seed + i, options.own_rule, patience_s=30) for i in range(games)]
    scores: list[tuple[int, int]] = []
    steps, begun, began = 0, games, time.monotonic()
    try:
        while matches and time.monotonic() - began < options.seconds:
            for match in matches:
                match.ask()
            for match in list(matches):
                steps += 1
                try:
                    score = match.act()
                except SessionLost:
                    match.begin()
                    continue
                if score is None:
                    continue
                scores.append((match.seed, score))
                if options.matches and begun >= options.matches:
                    matches.remove(match)
                    continue
                match.seed = options.seed + begun
                begun += 1
                match.begin()
    except (ConnectionError, ServerGone):
        print("the server stopped")
    rate = steps / (time.monotonic() - began)
    mean = sum(score for _, score in scores) / max(1, len(scores))
    result = {"matches": len(scores), "mean_score": mean, "steps": steps, "steps_per_s": round(rate, 1)}
    print(json.dumps(result | {"scores": [score for _, score in sorted(scores)] if options.matches else []}))


if __name__ == "__main__":
    main()
