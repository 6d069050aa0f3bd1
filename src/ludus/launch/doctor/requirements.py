"""What a run will take from each machine, in numbers that can be compared with its limits. Pure; every sum is said in words.

The figures are rounded up from what was measured: CartPole with 2 workers on 2 cores has 14 threads (2 in each worker, which has 73 MB
of its own), and a Ray beside it 145 more. An estimate before the run, not a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

MAIN_THREADS, WORKER_THREADS, RAY_THREADS, RAY_CORE_THREADS = 16, 4, 150, 24
"""Of the driver and the learner, beside one for each core; of a worker, beside those of its game; of a Ray node's own processes, and of
the idle worker that it keeps for each core."""

MAIN_FILES, WORKER_FILES, RAY_FILES = 64, 12, 400
"""Open files: in the process that has most of them, a few for each worker."""

MAIN_BYTES, WORKER_BYTES, RAY_BYTES, RAY_CORE_BYTES = 600 << 20, 150 << 20, 500 << 20, 60 << 20
"""Of memory; workers share what they have in common, which is most of it."""

RING_BYTES, RAY_STORE_BYTES, WEIGHTS_BYTES = 32 << 20, 512 << 20, 64 << 20
"""Of shared memory: the ring of a worker, the store of a Ray that we start, the weights that all of them read."""

RUN_BYTES, TEMP_BYTES, STATE_BYTES = 2 << 30, 1 << 30, 100 << 20
"""Of free disk: checkpoints and logs of a run; sockets, Ray's logs and what is spilled; records and logs of jobs."""


@dataclass(frozen=True)
class Needs:
    """Of one machine. `game_threads`, `game_bytes`: of one game or environment, measured where one was tried. `cores`: that may be used."""

    workers: int
    cores: int
    ray: bool = False
    game_threads: int = 0
    game_bytes: int = 0

    @property
    def threads(self) -> int:
        of_ray = RAY_THREADS + self.cores * RAY_CORE_THREADS if self.ray else 0
        return MAIN_THREADS + self.cores + self.workers * self.threads_per_worker + of_ray

    def threads_said(self) -> str:
        games = f" + {self.game_threads} of a game" if self.game_threads else ""
        parts = [f"{MAIN_THREADS} + {self.cores} cores", f"{self.workers} workers × {_each(str(WORKER_THREADS), games)}"]
        return _sum(
            [*parts, *([f"{RAY_THREADS} of Ray + {self.cores} cores × {RAY_CORE_THREADS}"] if self.ray else [])],
            f"{self.threads:,}",
        )

    @property
    def threads_per_worker(self) -> int:
        return WORKER_THREADS + self.game_threads

    @property
    def memory_per_worker(self) -> int:
        return WORKER_BYTES + self.game_bytes

    @property
    def files(self) -> int:
        return MAIN_FILES + self.workers * WORKER_FILES + (RAY_FILES if self.ray else 0)

    def files_said(self) -> str:
        parts = [str(MAIN_FILES), f"{self.workers} workers × {WORKER_FILES}"]
        return _sum([*parts, *([f"{RAY_FILES} of Ray"] if self.ray else [])], f"{self.files:,}")

    @property
    def memory(self) -> int:
        return MAIN_BYTES + self.workers * self.memory_per_worker + (RAY_BYTES + self.cores * RAY_CORE_BYTES if self.ray else 0)

    def memory_said(self) -> str:
        games = f" + {_mb(self.game_bytes)} of a game" if self.game_bytes else ""
        parts = [_mb(MAIN_BYTES), f"{self.workers} workers × {_each(_mb(WORKER_BYTES), games)}"]
        return _sum(
            [*parts, *([f"{_mb(RAY_BYTES)} of Ray + {self.cores} cores × {_mb(RAY_CORE_BYTES)}"] if self.ray else [])],
            _mb(self.memory),
        )

    @property
    def shared(self) -> int:
        return self.rings + self.store

    def shared_said(self) -> str:
        return _sum([*self._ring_parts(), *([f"{_mb(self.store)} of Ray's store"] if self.ray else [])], _mb(self.shared))

    @property
    def rings(self) -> int:
        """And the weights: what LUDUS_SHM moves."""
        return WEIGHTS_BYTES + self.workers * RING_BYTES

    def rings_said(self) -> str:
        return _sum(self._ring_parts(), _mb(self.rings))

    def _ring_parts(self) -> list[str]:
        return [f"{_mb(WEIGHTS_BYTES)} of weights", f"{self.workers} rings × {_mb(RING_BYTES)}"]

    @property
    def store(self) -> int:
        """Which Ray has in /dev/shm, whatever LUDUS_SHM says."""
        return RAY_STORE_BYTES if self.ray else 0

    def store_said(self) -> str:
        return f"{_mb(self.store)} of Ray's store"


def _each(own: str, games: str) -> str:
    return f"({own}{games})" if games else own


def _sum(parts: list[str], result: str) -> str:
    return f"{' + '.join(parts)} = {result}"


def _mb(count: int) -> str:
    return f"{-(-count // (1 << 20)):,} MB"
