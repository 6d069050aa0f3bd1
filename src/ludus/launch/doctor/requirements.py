"""Estimates of the threads, files and memory that a run needs on each machine, with an explanation of each sum.

The figures are rounded up from measurements: CartPole with 2 workers on 2 cores has 14 threads, 2 of them in each worker of 73 MB;
Ray adds 145 threads. These are estimates, not upper limits.
"""

from __future__ import annotations

from dataclasses import dataclass

MAIN_THREADS, WORKER_THREADS, RAY_THREADS, RAY_CORE_THREADS = 16, 4, 150, 24
"""Threads of driver and learner, plus one per core; of a worker, plus those of its game; of a Ray node, plus those of the idle worker
that Ray keeps per core."""

MAIN_FILES, WORKER_FILES, RAY_FILES = 64, 12, 400
"""Open files of the process that has most, plus some per worker."""

MAIN_BYTES, WORKER_BYTES, RAY_BYTES, RAY_CORE_BYTES = 600 << 20, 150 << 20, 500 << 20, 60 << 20
"""Memory; workers share most of theirs."""

RING_BYTES, RAY_STORE_BYTES, WEIGHTS_BYTES = 32 << 20, 512 << 20, 64 << 20
"""Shared memory: the ring buffer of a worker, the object store of Ray, the weights."""

RUN_BYTES, TEMP_BYTES, STATE_BYTES = 2 << 30, 1 << 30, 100 << 20
"""Free disk: checkpoints and logs of a run; sockets, logs and spilled objects of Ray; records and logs of jobs."""


@dataclass(frozen=True)
class ResourceNeeds:
    """Needs of a run on one machine. `game_threads`, `game_bytes`: of one environment, if measured. `cores`: usable cores."""

    workers: int
    cores: int
    ray: bool = False
    game_threads: int = 0
    game_bytes: int = 0

    @property
    def threads_per_worker(self) -> int:
        return WORKER_THREADS + self.game_threads

    @property
    def threads(self) -> int:
        ray = RAY_THREADS + self.cores * RAY_CORE_THREADS if self.ray else 0
        return MAIN_THREADS + self.cores + self.workers * self.threads_per_worker + ray

    def explain_threads(self) -> str:
        worker = f"({WORKER_THREADS} + {self.game_threads} of a game)" if self.game_threads else str(WORKER_THREADS)
        ray = f" + {RAY_THREADS} of Ray + {self.cores} cores × {RAY_CORE_THREADS}" if self.ray else ""
        return f"{MAIN_THREADS} + {self.cores} cores + {self.workers} workers × {worker}{ray} = {self.threads:,}"

    @property
    def files(self) -> int:
        return MAIN_FILES + self.workers * WORKER_FILES + (RAY_FILES if self.ray else 0)

    def explain_files(self) -> str:
        ray = f" + {RAY_FILES} of Ray" if self.ray else ""
        return f"{MAIN_FILES} + {self.workers} workers × {WORKER_FILES}{ray} = {self.files:,}"

    @property
    def memory_per_worker(self) -> int:
        return WORKER_BYTES + self.game_bytes

    @property
    def memory(self) -> int:
        ray = RAY_BYTES + self.cores * RAY_CORE_BYTES if self.ray else 0
        return MAIN_BYTES + self.workers * self.memory_per_worker + ray

    def explain_memory(self) -> str:
        worker = f"({_mb(WORKER_BYTES)} + {_mb(self.game_bytes)} of a game)" if self.game_bytes else _mb(WORKER_BYTES)
        ray = f" + {_mb(RAY_BYTES)} of Ray + {self.cores} cores × {_mb(RAY_CORE_BYTES)}" if self.ray else ""
        return f"{_mb(MAIN_BYTES)} + {self.workers} workers × {worker}{ray} = {_mb(self.memory)}"

    @property
    def rings(self) -> int:
        """Bytes of ring buffers and weights, whose directory LUDUS_SHM sets."""
        return WEIGHTS_BYTES + self.workers * RING_BYTES

    def explain_rings(self) -> str:
        return f"{self._ring_terms} = {_mb(self.rings)}"

    @property
    def _ring_terms(self) -> str:
        return f"{_mb(WEIGHTS_BYTES)} of weights + {self.workers} rings × {_mb(RING_BYTES)}"

    @property
    def store(self) -> int:
        """Bytes of Ray's object store, which is always in /dev/shm."""
        return RAY_STORE_BYTES if self.ray else 0

    def explain_store(self) -> str:
        return f"{_mb(self.store)} of Ray's store"

    @property
    def shared_memory(self) -> int:
        return self.rings + self.store

    def explain_shared_memory(self) -> str:
        ray = f" + {self.explain_store()}" if self.ray else ""
        return f"{self._ring_terms}{ray} = {_mb(self.shared_memory)}"


def _mb(count: int) -> str:
    return f"{-(-count // (1 << 20)):,} MB"
