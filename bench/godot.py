"""Games of Godot: a trained lander, and the speed of `env: godot_rl`.

    python -m bench.godot lander --minutes 8
    python -m bench.godot steps                 # needs: python -m bench.peers.install godot_rl

`lander`: the game of clients/gdscript/lander over HTTP, against a scripted and a random player. `ludus train` learns from games of the engine (godot3-server, or godot4 of scripts/tools.sh) that it starts itself and that run as
fast as the machine allows. Then `ludus serve` plays the most probable actions of the newest checkpoint, and the same game is played by
its rule and at random.

`steps`: `env: godot_rl` and the package `godot-rl` step the same game in turn, with equal actions at every step: the stand-in of the tests,
and a game in the engine's physics.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import godot_rl_steps
from bench.peers.peers import GAME_CLIENTS
from bench.train import provenance
from ludus.core.statistics import confidence_interval
from ludus.envs.godot_rl.match import GodotMatch
from ludus.envs.pettingzoo import sample_action
from tests.envs.godot_rl.stand_in import game_at
from tests.envs.godot_rl.test_engines import make_game

ROOT = Path(__file__).parent.parent
LANDER = ROOT / "clients" / "gdscript" / "lander"
RESULTS = ROOT / "bench" / "results"
LUDUS = [sys.executable, "-m", "ludus.cli.main"]
START_S = 120.0
PLAY_S = 600.0
FRAMERATE = 60
SIDES = ("ludus", "godot-rl", "godot-rl with arrays")
_EPISODE = re.compile(r"^episode \d+: return (-?[\d.]+), (\d+) decisions, (.*)$", re.MULTILINE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def game(engine: str, *words: str) -> list[str]:
    return [engine, "--path", str(LANDER), "--fixed-fps", "60", *words]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "LC_ALL": "C.UTF-8"}


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"it ended with code {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"nothing listens on port {port} after {START_S:g} s")


def play(engine: str, home: Path, episodes: int, *words: str) -> dict[str, Any]:
    """Play episodes and summarise what the game prints."""
    began = time.monotonic()
    done = subprocess.run(
        game(engine, f"--episodes={episodes}", "--seed=1000", *words),
        capture_output=True,
        text=True,
        timeout=PLAY_S,
        env=environment(home),
        check=True,
    )
    played = _EPISODE.findall(done.stdout)
    returns = [float(total) for total, _, _ in played]
    low, high = confidence_interval(returns)
    return {
        "episodes": len(played),
        "return": sum(returns) / len(returns),
        "low": low,
        "high": high,
        "landed": sum(outcome == "landed" for _, _, outcome in played) / len(played),
        "decisions": sum(int(decisions) for _, decisions, _ in played) / len(played),
        "seconds": time.monotonic() - began,
    }


def train(engine: str, home: Path, minutes: float, games: int, seed: int) -> tuple[Path, dict[str, Any]]:
    """Train for some minutes of wall-clock time; return the directory of the run, and its curve."""
    words = [
        "train",
        "-f",
        str(LANDER / "lander.yaml"),
        "--local-dir",
        str(home / "runs"),
        "--seed",
        str(seed),
        "--json",
        "--quiet",
    ]
    command = game(engine, "--url={url}", f"--seed={seed * 100}{{number}}")
    for key, value in (("port", "0"), ("games", str(games)), ("game_command", json.dumps(command))):
        words += ["--set", f"config.env_config.{key}={value}"]
    words += ["--stop", f"time_s={minutes * 60}"]
    done = subprocess.run(
        [*LUDUS, *words], stdout=subprocess.PIPE, text=True, env=environment(home), timeout=minutes * 60 + START_S
    )
    if done.returncode:
        raise SystemExit(f"the training ended with code {done.returncode}")
    result = json.loads(done.stdout.splitlines()[-1])
    (metrics,) = (home / "runs").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    curve = [
        {"seconds": row["time_s"], "steps": row["timesteps"], "return": row["episode_return_mean"]}
        for row in rows
        if row.get("episode_return_mean") is not None
    ]
    return metrics.parent, {"steps": result["timesteps"], "curve": curve}


def play_trained(engine: str, home: Path, run: Path, episodes: int) -> dict[str, Any]:
    port = free_port()
    words = ["serve", str(run), "--port", str(port), "--workers", "1", "--temperature", "0"]
    with subprocess.Popen([*LUDUS, *words], stdout=subprocess.DEVNULL) as server:
        try:
            wait_for_port(port, server)
            return play(engine, home, episodes, f"--url=http://127.0.0.1:{port}")
        finally:
            server.terminate()


def lander(asked: argparse.Namespace) -> None:
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        players = {name: play(asked.engine, home, asked.episodes, f"--player={name}") for name in ("random", "script")}
        run, training = train(asked.engine, home, asked.minutes, asked.games, asked.seed)
        players["trained"] = play_trained(asked.engine, home, run, asked.episodes)
    version = subprocess.run([asked.engine, "--version"], capture_output=True, text=True, timeout=60).stdout.strip()
    result = {
        **provenance(),
        "engine": version,
        "minutes": asked.minutes,
        "games": asked.games,
        "seed": asked.seed,
        "load_before": load_before,
        "players": players,
        **training,
    }
    (RESULTS / "godot-lander.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "godot-lander.md").write_text(lander_report(result))
    print(lander_report(result))


def lander_report(result: dict[str, Any]) -> str:
    lines = [
        "# Godot lander",
        "",
        f"{result['date']}, commit {result['commit']}, {result['cpu']}, Python {result['python']}, Godot {result['engine']}",
        "",
        f"PPO, {result['minutes']:g} minutes of wall-clock time, {result['games']} games over HTTP, {result['steps']:,} decisions, seed "
        f"{result['seed']}. Load of the machine before: {result['load_before']:.1f} (other programs). 95 % intervals by bootstrap.",
        "",
        "| player | episodes | return | landed on the pad | decisions per episode |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in result["players"].items():
        interval = f"{one['return']:.2f} [{one['low']:.2f} to {one['high']:.2f}]"
        lines.append(f"| {name} | {one['episodes']} | {interval} | {one['landed']:.0%} | {one['decisions']:.0f} |")
    lines += ["", "| seconds | decisions | mean return in training |", "|---:|---:|---:|"]
    curve = result["curve"]
    for row in curve[:: max(1, len(curve) // 12)] + curve[-1:]:
        lines.append(f"| {row['seconds']:.0f} | {row['steps']:,} | {row['return']:.2f} |")
    return "\n".join(lines) + "\n"


# -- steps per second ---------------------------------------------------------------------------------------------------


def step_with_ludus(program: Path, port: int, seconds: float) -> dict[str, float]:
    match = GodotMatch("godot_rl", {"env_path": str(program), "port": port, "framerate": FRAMERATE, "done_agents": "continue"})
    random = np.random.default_rng(0)
    actions = {name: sample_action(spaces.action, None, random) for name, spaces in match.agents.items()}

    def step() -> None:
        if match.step(actions).over:
            match.reset(0)

    try:
        match.reset(0)
        for _ in range(godot_rl_steps.WARMUP_STEPS):
            step()
        count, began, cpu = 0, time.perf_counter(), time.process_time()
        while (taken := time.perf_counter() - began) < seconds:
            step()
            count += 1
        return {"steps_per_s": count / taken, "cpu_us_per_step": 1e6 * (time.process_time() - cpu) / count}
    finally:
        match.close()


def step_with_package(program: Path, port: int, seconds: float, *words: str) -> dict[str, float]:
    peer = GAME_CLIENTS["godot_rl"]
    command = [str(peer.python), str(peer.script("steps")), str(program), "--port", str(port), "--seconds", str(seconds), *words]
    command += ["--framerate", str(FRAMERATE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_S, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def steps(asked: argparse.Namespace) -> None:
    load_before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        programs = {scene: game_at(home, scene) for scene in ("one", "chase", "hybrid")}
        (home / "engine").mkdir()
        programs["chase in Godot 3"] = make_game(home / "engine", "godot3-server")
        for name, program in programs.items():
            taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for _ in range(asked.rounds):
                taken["ludus"].append(step_with_ludus(program, free_port(), asked.seconds))
                taken["godot-rl"].append(step_with_package(program, free_port(), asked.seconds))
                taken["godot-rl with arrays"].append(step_with_package(program, free_port(), asked.seconds, "--arrays"))
            rows.append({"game": name, **taken})
    result = {**provenance(), "rounds": asked.rounds, "seconds": asked.seconds, "load_before": load_before, "rows": rows}
    (RESULTS / "godot-steps.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "godot-steps.md").write_text(steps_report(result))
    print(steps_report(result))


def steps_report(result: dict[str, Any]) -> str:
    lines = [
        "# Steps of games with the plugin of Godot RL Agents",
        "",
        f"{result['date']}, commit {result['commit']}, {result['cpu']}, Python {result['python']}, godot-rl 0.8.2",
        "",
        f"Median [min to max] of {result['rounds']} rounds of {result['seconds']:g} s, in turn. *CPU* is that of the side of Python, in µs per step. "
        f"Load of the machine before: {result['load_before']:.1f} (other programs). *one*, *chase* and *hybrid* are the stand-in of the tests "
        "(1, 4 and 2 agents; *hybrid* with images), a Python program that takes part of every step; *chase in Godot 3* has 4 agents.",
        "",
        "*godot-rl with arrays* also makes an array per part of the observations, as its wrapper for Stable-Baselines3 does; *ludus* makes one per "
        "agent and part, checks its size and that its numbers are finite.",
        "",
        f"| game | {' | '.join(f'{side}, steps/s' for side in SIDES)} | {' | '.join(f'{side}, CPU' for side in SIDES)} |",
        f"|---|{'---:|' * 2 * len(SIDES)}",
    ]
    for row in result["rows"]:
        cells = [row["game"]]
        for key in ("steps_per_s", "cpu_us_per_step"):
            for side in SIDES:
                values = [one[key] for one in row[side]]
                cells.append(f"{statistics.median(values):,.0f} [{min(values):,.0f} to {max(values):,.0f}]")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("lander")
    part.add_argument("--engine", default="godot3-server")
    part.add_argument("--minutes", type=float, default=8.0)
    part.add_argument("--games", type=int, default=4)
    part.add_argument("--seed", type=int, default=0)
    part.add_argument("--episodes", type=int, default=200)
    part.set_defaults(part=lander)
    part = parts.add_parser("steps")
    part.add_argument("--rounds", type=int, default=5)
    part.add_argument("--seconds", type=float, default=4.0)
    part.set_defaults(part=steps)
    asked = parser.parse_args(argv)
    asked.part(asked)


if __name__ == "__main__":
    main()
