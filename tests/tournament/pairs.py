"""A game of two camps with two seats each, as a process below a gamecore server: whoever chooses 1 scores, and the tank counts double."""

import json
import os
from pathlib import Path
from typing import Any

from ludus.game import Client

SEATS = {"tank": 2, "mage": 1}
ROUNDS = 4


class Camp:
    def __init__(self, camp: int, actor: dict[str, Any], match: str) -> None:
        self.name, self.score = f"{match}-{camp}", 0
        self.client = Client(actor["url"], os.environ.get(f"LUDUS_GAME_TOKEN_{camp}"), actor["timeout_s"])
        self.client.start(self.name, json.dumps({"camp": camp}).encode(), match=match)

    def play(self, number: int) -> None:
        seats = {seat: {"observation": [number / ROUNDS, worth], "reward": 0.0} for seat, worth in SEATS.items()}
        actions = json.loads(self.client.tick(self.name, json.dumps({"seats": seats}).encode()))["actions"]
        self.score += sum(SEATS[seat] for seat, action in actions.items() if action == 1)

    def end(self) -> None:
        seats = {seat: {"reward": float(self.score), "terminated": True} for seat in SEATS}
        self.client.end(self.name, json.dumps({"seats": seats}).encode())


def main() -> None:
    config = json.loads(Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())
    camps = {i: Camp(i, actor, config["runtime_id"]) for i, actor in enumerate(config["camps"]) if actor is not None}
    for number in range(ROUNDS):
        for camp in camps.values():
            camp.play(number)
    for camp in camps.values():
        camp.end()
    scores = [camps[i].score if i in camps else 5 for i in range(2)]  # the rule is tank at first, and mage at last
    winner = None if scores[0] == scores[1] else int(scores[1] > scores[0])
    result = Path(os.environ["LUDUS_GAME_RESULT"])
    result.with_suffix(".aside").write_text(json.dumps({"winner": winner, "scores": scores}))
    result.with_suffix(".aside").replace(result)


main()
