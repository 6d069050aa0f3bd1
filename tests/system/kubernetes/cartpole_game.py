"""CartPole as a game process below a gamecore server. The dynamics are those of Gymnasium's CartPole-v1.

The camp with an actor balances the pole; the other camp does nothing. With `together` the process plays one match after the other.
"""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

from ludus.game import Client

STEPS = 500
_GRAVITY, _CART, _POLE, _HALF_LENGTH, _FORCE, _TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_MAX_X, _MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360


def step(state: list[float], action: int) -> list[float]:
    """Return the state 20 ms later."""
    x, speed, angle, spin = state
    total, moment = _CART + _POLE, _POLE * _HALF_LENGTH
    push = ((_FORCE if action == 1 else -_FORCE) + moment * spin**2 * math.sin(angle)) / total
    bend = (_GRAVITY * math.sin(angle) - math.cos(angle) * push) / (_HALF_LENGTH * (4 / 3 - _POLE * math.cos(angle) ** 2 / total))
    slide = push - moment * bend * math.cos(angle) / total
    return [x + _TAU * speed, speed + _TAU * slide, angle + _TAU * spin, spin + _TAU * bend]


def has_fallen(state: list[float]) -> bool:
    return abs(state[0]) > _MAX_X or abs(state[2]) > _MAX_ANGLE


def play(client: Client, match: dict[str, Any], camp: int) -> list[dict[str, Any]]:
    """Play one match. Returns the matches that replies announced."""
    name, chance = f"{match['runtime_id']}-{camp}", random.Random(match["seed"])
    further: dict[str, dict[str, Any]] = {}

    def read(reply: bytes) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(reply) if reply else {}
        further.update({each["runtime_id"]: each for each in found.get("matches", ())})
        return found

    read(client.start(name, match=match["runtime_id"], body=json.dumps({"camp": camp}).encode()))
    state = [chance.uniform(-0.05, 0.05) for _ in range(4)]
    for count in range(STEPS):
        tick = {"observation": state, "reward": 1.0 if count else 0.0}
        state = step(state, read(client.tick(name, json.dumps(tick).encode()))["action"])
        if has_fallen(state):
            break
    over = {"reward": 1.0, "terminated": has_fallen(state), "truncated": not has_fallen(state), "observation": state}
    read(client.end(name, json.dumps(over | {"info": {"result": {"winner": camp}}}).encode()))
    return list(further.values())


def main() -> None:
    first = json.loads(Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())
    camp, actor = next((camp, actor) for camp, actor in enumerate(first["camps"]) if actor is not None)
    known, waiting = {first["runtime_id"]}, [first]
    with Client(actor["url"], os.environ.get(f"LUDUS_GAME_TOKEN_{camp}"), actor["timeout_s"]) as client:
        while waiting:
            match = waiting.pop(0)
            camp = next(number for number, player in enumerate(match["camps"]) if player)
            found = [each for each in play(client, match, camp) if each["runtime_id"] not in known]
            known |= {each["runtime_id"] for each in found}
            waiting += found
    result = Path(os.environ["LUDUS_GAME_RESULT"])
    result.with_suffix(".aside").write_text(json.dumps({"winner": camp}))
    result.with_suffix(".aside").replace(result)


if __name__ == "__main__":
    main()
