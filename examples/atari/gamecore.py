"""Game: an Atari game (ALE) in its own process that requests every action from a server over HTTP.

    python gamecore.py --port 8000 --game ALE/Pong-v5

The body format is agreed with the actor: a float32 reward and a small grey picture. The reply is one byte, the action.
Requests are numbered (`seq`), so a lost request can be sent again.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import struct
import time
import uuid
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np


def picture(frame: np.ndarray) -> bytes:
    """210×160 grey pixels → 42×42: every fourth pixel, without the score at the top."""
    small = np.zeros((42, 42), np.uint8)
    small[1:41, 1:41] = frame[34:194:4, ::4]
    return small.tobytes()


class Server:
    """Consecutive sessions over one connection."""

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=60)
        self._token = token

    def step(self, session: str, kind: str, seq: int, body: bytes) -> bytes:
        headers = {"session": session, "step_kind": kind, "seq": str(seq)}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        for attempt in itertools.count():
            try:
                self._connection.request("POST", "/step", body, headers)
                reply = self._connection.getresponse()
                answer = reply.read()
            except (OSError, http.client.HTTPException):
                self._connection.close()
                if attempt == 5:
                    raise
                time.sleep(0.2 * 2**attempt)
                continue
            if reply.status == 503 and attempt < 5:
                time.sleep(float(reply.headers.get("Retry-After", 1)))
                continue
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {json.loads(answer)}")
            return answer
        raise AssertionError


def play(server: Server, env: gym.Env, max_steps: int) -> float:
    """Play one match and return its score."""
    session, seq = uuid.uuid4().hex, itertools.count()
    server.step(session, "start", next(seq), b"")
    frame, _ = env.reset()
    score = reward = 0.0
    terminated = False
    for _ in range(max_steps):
        answer = server.step(session, "tick", next(seq), struct.pack("<f", reward) + picture(frame))
        frame, reward, terminated, truncated, _ = env.step(answer[0])
        score += float(reward)
        if terminated or truncated:
            break
    # A truncated match is not over: the actor needs the last picture to estimate its value.
    server.step(session, "end", next(seq), struct.pack("<f", reward) + (b"" if terminated else picture(frame)))
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-file", help="file with the token of the server")
    parser.add_argument("--game", default="ALE/Pong-v5")
    parser.add_argument("--matches", type=int, default=0, help="number of matches; 0 = unlimited")
    parser.add_argument("--max-steps", type=int, default=10_000)
    options = parser.parse_args()
    gym.register_envs(ale_py)
    env = gym.make(options.game, obs_type="grayscale", frameskip=4, repeat_action_probability=0.0)
    token = Path(options.token_file).read_text().strip() if options.token_file else None
    server = Server(options.host, options.port, token)
    for number in itertools.count(1):
        began = time.monotonic()
        score = play(server, env, options.max_steps)
        print(f"match {number}: score {score:g} in {time.monotonic() - began:.1f} s", flush=True)
        if number == options.matches:
            return


if __name__ == "__main__":
    main()
