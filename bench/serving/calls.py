"""What one decision costs without any server: `Policy.act` against `OnnxPolicy.act`, taking turns in one process."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from bench.serving import agents
from bench.train import Row
from ludus.models.export import onnx_export
from ludus.models.inference.onnx_policy import OnnxPolicy

BLOCKS = 15
BLOCK_S = 0.02


def measure(kind: str, batches: tuple[int, ...] = (1, 64)) -> list[Row]:
    """Medians of interleaved blocks, µs per call; both on one thread."""
    torch.set_num_threads(1)
    policy = agents.make_policy(kind, 1)
    exported = OnnxPolicy(onnx_export.export_policy(policy, name="bench", version=1))
    policy.network.freeze()  # as it is served
    rows = []
    for batch in batches:
        seen = agents.observations(kind, batch, np.random.default_rng(0))
        state = tuple(part.numpy() for part in policy.initial_state(batch))
        times: dict[str, list[float]] = {"torch": [], "onnx": []}
        for _ in range(BLOCKS):
            for name, player in (("torch", policy), ("onnx", exported)):
                times[name].append(_block_us(player, seen, state))
        medians = {name: statistics.median(found[1:]) for name, found in times.items()}  # the first block warms up
        shown = {f"{name}_us": round(value, 1) for name, value in medians.items()}
        rows.append({"model": kind, "batch": batch, **shown, "ratio": round(medians["torch"] / medians["onnx"], 3)})
    return rows


def _block_us(player: Any, seen: agents.Array, state: tuple[agents.Array, ...]) -> float:
    calls, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < BLOCK_S or not calls:
        player.act(seen, state)
        calls += 1
    return 1e6 * took / calls
