"""What `mlagents-envs` and Ludus make of the same player, step by step, in one notation.

`python -m tests.unity_player.traces` steps every scene with `mlagents-envs` and writes a digest of each step to `official_steps.json`,
with which the quick tests compare. Needs `python -m bench.peers.install mlagents_envs`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.peers import GAME_CLIENTS
from bench.peers.unity_steps import choose as choose
from ludus.envs.unity.behaviors import Behavior
from ludus.envs.unity.player import UnityPlayer
from ludus.envs.unity.unity_config import parse_unity_config
from tests.unity_player.executable import write_player
from tests.unity_player.scenes import SCENES

Row = dict[str, Any]

DIGESTS = Path(__file__).with_name("official_steps.json")
STEPS, SEED = 1000, 7
AREAS = {"ball": 4, "walk": 3, "shifts": 2, "hybrid": 2, "pictures": 1, "crowd": 2, "soccer": 2}
ARGUMENTS = {"soccer": ("--parameter", "send_off=1")}
TIMEOUT_S = 120.0


def player_of(scene: str, directory: Path) -> Path:
    return write_player(directory, scene, areas=AREAS[scene], words=ARGUMENTS.get(scene, ()))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:8]


def official_rows(scene: str, directory: Path, steps: int = STEPS) -> Iterator[Row]:
    """One row per step, from `mlagents-envs`."""
    peer = GAME_CLIENTS["mlagents_envs"]
    record = directory / f"{scene}.jsonl"
    words = [str(player_of(scene, directory)), "--seed", str(SEED), "--worker-id", str(free_port() - 5005)]
    subprocess.run(
        [peer.python, peer.script(""), *words, "--steps", str(steps), "--record", record],
        check=True,
        timeout=TIMEOUT_S,
        capture_output=True,
    )
    with record.open() as lines:
        yield from map(json.loads, lines)


def our_rows(scene: str, directory: Path, steps: int = STEPS) -> Iterator[Row]:
    """One row per step, from Ludus."""
    settings = {"file_name": str(player_of(scene, directory)), "base_port": free_port(), "seed": SEED, "no_graphics": True}
    player = UnityPlayer(parse_unity_config(settings), scene)
    try:
        agents = player.reset()
        for step in range(steps):
            row: Row = {}
            actions = {}
            for name, behavior in sorted(player.behaviors.items()):
                present = agents.get(name, [])
                deciding = [agent for agent in present if not agent.done]
                row[name] = {
                    "decisions": _describe(behavior, deciding, masks=True),
                    "terminals": _describe(behavior, [agent for agent in present if agent.done], masks=False),
                }
                actions[name] = [action_of(behavior, step, place, agent) for place, agent in enumerate(deciding)]
            yield {"behaviours": row, "statistics": _names(player.channels.take_statistics())}
            agents = player.step(actions)
    finally:
        player.close()


def action_of(behavior: Behavior, step: int, place: int, agent: Any) -> Any:
    """The action that the official client sends, in the form of our action space."""
    allowed = behavior.mask(agent)
    masks = [] if allowed is None else np.split(~allowed, np.cumsum(behavior.branches)[:-1])
    numbers, branches = choose(step, behavior.full_name, place, behavior.continuous, [mask.tolist() for mask in masks])
    if not behavior.branches:
        return numbers
    return {"continuous": numbers, "discrete": branches} if behavior.continuous else branches


def _describe(behavior: Behavior, agents: Sequence[Any], *, masks: bool) -> Row:
    described: Row = {
        "ids": [agent.id for agent in agents],
        "rewards": [agent.reward for agent in agents],
        "groups": [agent.group_id for agent in agents],
        "group_rewards": [agent.group_reward for agent in agents],
        "observations": [
            [_as_sent(behavior, number, agent).tolist() for agent in agents] for number in range(len(behavior.sensors))
        ],
    }
    if not masks:
        described["interrupted"] = [agent.max_step_reached for agent in agents]
    elif behavior.branches and agents:
        forbidden = np.array([~_allowed(behavior, agent) for agent in agents]).reshape(len(agents), sum(behavior.branches))
        described["masks"] = [mask.tolist() for mask in np.split(forbidden, np.cumsum(behavior.branches)[:-1], axis=1)]
    return described


def _allowed(behavior: Behavior, agent: Any) -> Any:
    allowed = behavior.mask(agent)
    assert allowed is not None
    return allowed


def _as_sent(behavior: Behavior, number: int, agent: Any) -> Any:
    """An observation with its channels first and between 0 and 1, as `mlagents-envs` returns it."""
    seen: Any = behavior.observation(agent)
    array = np.asarray(seen[f"obs_{number}"] if len(behavior.sensors) > 1 else seen)
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / np.float32(255.0)
    return np.moveaxis(array, -1, 0) if behavior.sensors[number].is_image else array


def _names(statistics: dict[str, float]) -> list[str]:
    return sorted(statistics)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for scene in SCENES:
            found[scene] = "".join(digest(row) for row in official_rows(scene, Path(directory)))
            print(f"{scene}: {len(found[scene]) // 8} steps", flush=True)  # noqa: T201
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
