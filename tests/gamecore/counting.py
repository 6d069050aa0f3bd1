"""A game for tests, as a process below a gamecore server: it counts to `length`. With `fault` set, some of its matches go wrong; with
`together` it goes on with the matches that it is handed, one after the other.

Standard library only, so that it begins at once. An actor sees [how far, what was chosen, the camp], and is rewarded for choosing 1.
"""

import http.client
import json
import math
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Session:
    def __init__(self, camp: int, url: str, match: str, token: str) -> None:
        at = urlsplit(url)
        self.connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
        self.headers = {"session": f"{match}-{camp}", "match": match, "Authorization": f"Bearer {token}"}
        self.seq = 0

    def say(self, kind: str, message: dict[str, Any] | bytes) -> None:
        headers = {**self.headers, "step_kind": kind, "seq": str(self.seq)}
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.connection.request("POST", "/step", body, headers)

    def hear(self) -> dict[str, Any]:
        reply = self.connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            sys.exit(f"{reply.status} {body.decode()}")
        self.seq += 1
        found: dict[str, Any] = json.loads(body) if body[:1] == b"{" else {}
        return found


def main() -> None:
    config = json.loads(Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())
    actor = next(actor for actor in config["camps"] if actor is not None)
    token = next(value for name, value in os.environ.items() if name.startswith("LUDUS_GAME_TOKEN_"))
    waiting = [config]
    while waiting:
        waiting += play(waiting.pop(0), token)
        for match in waiting:
            match["options"] = config["options"] | {"rule": "zero"} | match["options"]  # the default, unless it is given
            match["camps"] = [actor if camp else None for camp in match["camps"]]


def play(config: dict[str, Any], token: str) -> list[dict[str, Any]]:
    """Matches announced in a reply."""
    options, match = config["options"], config["runtime_id"]
    further: list[dict[str, Any]] = []
    chance = random.Random(config["seed"])
    length, fault = options["length"], options["fault"]
    if chance.random() >= options["share"]:
        fault = "none"
    at = chance.randrange(length)
    sessions = {
        camp: Session(camp, actor["url"], match, token) for camp, actor in enumerate(config["camps"]) if actor is not None
    }
    for camp, session in sessions.items():
        session.say("start", {"camp": camp, "rules": 1} | ({"protocol": 2} if fault == "protocol" else {}))
        session.hear()
    rewards, chosen = dict.fromkeys(sessions, 0.0), dict.fromkeys(sessions, 0)
    for step in range(length):
        wrong = fault if step == at or fault == "turns" else "none"
        if wrong == "crash":
            os._exit(9)
        if wrong == "hang":
            time.sleep(3600)
        for camp, session in sessions.items():
            seen: list[Any] = [step / length, chosen[camp], camp]
            if wrong == "nan":
                seen[0] = math.nan
            if wrong == "shape":
                seen.append(0)
            message: dict[str, Any] = {"observation": seen, "reward": rewards[camp], "action_mask": [1, 1]}
            if wrong == "mask":
                message["action_mask"] = [0, 0]
            if wrong == "reward":
                message["reward"] = math.inf
            if wrong == "words":
                message = {"observation": "nothing"}
            session.say("tick", message)
            if wrong == "turns":  # it asks one after the other
                session.hear()
        for camp, session in sessions.items():
            chosen[camp] = session.hear()["action"]
            rewards[camp] = float(chosen[camp])
    if options.get("rule"):  # a script plays the other camp
        chosen |= {camp: int(options["rule"] == "one") for camp in (0, 1) if camp not in sessions}
    winner = max(chosen, key=lambda camp: chosen[camp]) if len(set(chosen.values())) > 1 or len(chosen) == 1 else None
    for camp, session in sessions.items():
        told = {"reward": rewards[camp], "terminated": True, "info": {"result": {"winner": winner, "ticks": length}}}
        session.say("end", _cut_with_nonsense(told) if fault == "last" else told)
    for session in sessions.values():
        further += session.hear().get("matches", [])
    Path(os.environ["LUDUS_GAME_RESULT"]).write_text(json.dumps({"winner": winner}))
    return further if options["together"] else []


def _cut_with_nonsense(told: dict[str, Any]) -> bytes:
    """The last observation is NaN, as raw bytes that are checked only when the batch is built."""
    last = struct.pack("<3f", math.nan, 0, 0)
    return _packed(told | {"terminated": False, "truncated": True, "observation": last})


def _packed(value: Any) -> bytes:
    """Short values as msgpack, which is not in the standard library."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(_packed(key) + _packed(item) for key, item in value.items())
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, bytes):
        return bytes([0xC4, len(value)]) + value
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    return bytes([{None: 0xC0, False: 0xC2, True: 0xC3}[value] if value is None or isinstance(value, bool) else value])


if __name__ == "__main__":
    main()
