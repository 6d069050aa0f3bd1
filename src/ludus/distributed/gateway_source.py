"""Experience from gateway workers: games play in other processes and never wait for the learner.

Segments arrive through shared memory, one or two versions old; weights are sent to the workers in the same way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ludus.buffers.collate import CollatedBatches
from ludus.core.tree import Array
from ludus.distributed.gateway_workers import GatewayProgram, GatewayWorkers
from ludus.errors import WorkerFailed
from ludus.gateway.server import GatewaySettings
from ludus.gateway.worker_policies import COUNTER_METRICS, GAUGE_METRICS, WorkerActorFactory, WorkerSelfPlay
from ludus.models.policy import Policy
from ludus.models.weights.shared_weights import SharedWeights, stage
from ludus.process.temp_dirs import TempDir, shared_memory_dir
from ludus.process.workers.supervisor import Supervisor
from ludus.sampling.segment_recorder import session_spec
from ludus.transport.multi_producer import MultiProducerMemory

_TURN_S = 0.25
_START_S = 60.0
_PAUSE_S = 0.002  # workers commit hundreds of segments per second; waking up for each one would waste CPU time


class GatewaySharedMemory:
    """Shared memory of the workers: the weights of each model, and the memory for segments. Removed by `close`."""

    def __init__(self, policies: Mapping[str, Policy], steps: int, capacity: int) -> None:
        self._scratch = TempDir(shared_memory_dir())
        self.weights = {name: SharedWeights(self._scratch.path / name) for name in policies}
        specs = {name: session_spec(policy, steps, name) for name, policy in policies.items()}
        segments = self._scratch.path / ".segments"  # not a valid name of a model
        segments.mkdir(mode=0o700)
        self.memory = MultiProducerMemory(specs, segments, capacity, COUNTER_METRICS, GAUGE_METRICS)
        self.policies, self.steps = dict(policies), steps

    def publish(self, name: str, version: int) -> None:
        self.weights[name].publish(version, stage(self._scratch.path, self.policies[name].weights()))

    def close(self) -> None:
        self.memory.close()
        self._scratch.close()


class GatewaySource:
    """Starts gateway workers; `step` waits for a batch, or for _TURN_S."""

    def __init__(
        self,
        listening: socket.socket,
        settings: GatewaySettings,
        seats: Mapping[str, str],
        workers: int,
        shared: GatewaySharedMemory,
        memory: CollatedBatches,
        log_dir: Path,
        *,
        explore: bool = True,
        self_play: WorkerSelfPlay | None = None,
    ) -> None:
        self._shared, self._memory = shared, memory
        models = {
            name: (json.dumps(shared.policies[name].description()).encode(), str(weights.directory))
            for name, weights in shared.weights.items()
        }
        played = WorkerActorFactory(dict(seats), models, shared.steps, shared.memory.add_lanes(workers), explore, self_play)
        self._supervisor = Supervisor(log_dir=log_dir)
        with contextlib.ExitStack() as undo:
            undo.callback(self._supervisor.close)
            self._workers = GatewayWorkers(
                self._supervisor,
                GatewayProgram(played, settings, played.load, played.report, played),
                listening=listening,
                workers=workers,
            )
            self.address = self._workers.address
            self._workers.wait_ready(_START_S)
            undo.pop_all()

    def step(self) -> bool:
        deadline = time.monotonic() + _TURN_S
        while not self._memory.ready() and (left := deadline - time.monotonic()) > 0:
            self._shared.memory.wait(left)
            time.sleep(_PAUSE_S)
        for pid in self._shared.memory.cut_off():
            for worker in self._workers.workers:
                if worker.pid == pid:
                    worker.kill()
        for worker in self._workers.workers:
            if worker.state == "failed":
                raise WorkerFailed(f"{worker.name} failed: {worker.error}")
        return True

    def metrics(self) -> dict[str, float]:
        memory = self._shared.memory
        report = {f"games/{name}": memory.total(name) for name in (*COUNTER_METRICS, *GAUGE_METRICS)}
        report["games/dropped_segments"] = float(memory.stats().dropped)
        return report

    def has_sampled(self) -> bool:
        return self._shared.memory.total("requests") > 0

    def waiting_for(self) -> str:
        return f"a game to connect to http://{self.address[0]}:{self.address[1]}/step"

    def unlearned_steps(self) -> int:
        return self._memory.waiting_steps

    def state(self) -> dict[str, Array]:
        return {}  # workers draw their own random numbers; games are not repeatable

    def load_state(self, state: dict[str, Array]) -> None:
        pass

    def close(self) -> None:
        self._workers.close()
        self._supervisor.close()
