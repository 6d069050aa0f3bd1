"""A scripted game, and the catalogue of a gamecore server that has it."""

from __future__ import annotations

from pathlib import Path

HEROES = [[{"hero_id": 190}, {"hero_id": 173}, {"hero_id": 117}], [{"hero_id": 141}, {"hero_id": 111}, {"hero_id": 107}]]
LINEUP = {"mode": "3v3", "heroes": HEROES}

TOY = """
import json, os, signal, sys
from pathlib import Path

config = json.loads(Path(os.environ["LUDUS_GAME_CONFIG"]).read_text())
print("the toy plays", config["mode"], flush=True)
if config["options"]["behave"] == "crash":
    sys.exit("the map is missing")
if config["options"]["behave"] == "go on":
    signal.pause()
tokens = [os.environ.get(f"LUDUS_GAME_TOKEN_{camp}") for camp in (0, 1)]
result = Path(os.environ["LUDUS_GAME_RESULT"])
aside = result.with_suffix(".aside")
lost = {"lost": {"0": "Nothing listens on 127.0.0.1:9."}} if config["options"]["behave"] == "lose camp" else {}
result.with_name("moves.txt").write_text("none at all")
aside.write_text(json.dumps({"winner": 1, "config": config, "tokens": tokens, "recording": "moves.txt"} | lost))
aside.replace(result)
"""
CATALOGUE = """
games:
  toy:
    command: ["{python}", -P, -S, toy.py]
    directory: .
    modes: [1v1, 3v3]
    options:
      behave: {type: string, choices: [end, crash, go on, lose camp], default: end}
"""


def save(place: Path, catalogue: str = CATALOGUE) -> Path:
    """Into a directory; the file of the catalogue."""
    (place / "toy.py").write_text(TOY)
    (place / "games.yaml").write_text(catalogue)
    return place / "games.yaml"
