"""Frames per second of training through HTTP, against what the same game process reaches when nobody thinks.

    python -m bench.http_training [--rounds 3] [--games 32]

In turn, several times: the game of examples/cartpole_http against `ludus fake actor` (which answers a constant; the game
plays by a rule of its own, so that matches are long and few requests are wasted on starting), and against `ludus train`,
which learns from it until the mean return is 475. One session per match, one request per step. Both servers are one process.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.train import provenance

ROOT = Path(__file__).parent.parent
GAME = ROOT / "examples" / "cartpole_http" / "game.py"
LUDUS = [sys.executable, "-m", "ludus.cli.main"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def play(port: int, games: int, *words: str) -> dict:
    command = [sys.executable, str(GAME), "--port", str(port), "--games", str(games), *words]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def against_fake(games: int, seconds: float) -> float:
    port = free_port()
    words = ["fake", "actor", "--port", str(port), "--tick-return", '{"action": 0}']
    server = subprocess.Popen([*LUDUS, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        return float(play(port, games, "--own-rule", "--seconds", str(seconds))["steps_per_s"])
    finally:
        server.terminate()
        server.wait(timeout=20)


def training(games: int, seed: int) -> dict:
    port = free_port()
    with tempfile.TemporaryDirectory() as runs:
        words = [
            "train",
            "-f",
            str(GAME.with_name("cartpole.yaml")),
            "--local-dir",
            runs,
            "--quiet",
            "--json",
            "--seed",
            str(seed),
        ]
        server = subprocess.Popen([*LUDUS, *words, "--set", f"config.env_config.port={port}"], stdout=subprocess.PIPE, text=True)
        time.sleep(3)
        game = play(port, games, "--seed", str(seed * 10_000))
        out, _ = server.communicate(timeout=60)
        result = json.loads(out.splitlines()[-1])
    return {"steps_per_s": game["steps_per_s"], "timesteps": result["timesteps"], "return": result["episode_return_mean"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--games", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        fake = against_fake(options.games, options.seconds)
        learned = training(options.games, number)
        rounds.append({"fake_steps_per_s": fake, **learned, "ratio": learned["steps_per_s"] / fake})
        print(rounds[-1], flush=True)
    ratios = [r["ratio"] for r in rounds]
    print(f"training ÷ fake actor: {statistics.median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]")
    out = ROOT / "bench" / "results" / "http-training.json"
    out.write_text(json.dumps({**provenance(), "games": options.games, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
