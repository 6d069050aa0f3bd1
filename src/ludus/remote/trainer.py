"""RemoteTrainer: the user's training function in one or several learner processes that average their gradients."""

from __future__ import annotations

import datetime
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludus.errors import UsageError, WorkerFailed
from ludus.process.host import keep_freed_memory, usable_cores
from ludus.process.workers.supervisor import NEVER, Context, Process
from ludus.remote.context import JoinTicket, adopt, current, metric

log = logging.getLogger(__name__)

JOIN_S = 120.0
"""Time limit for all learners to join."""
GRADIENT_S = 6 * 3600.0
"""Time limit for the gradient of the slowest learner: games may pause for hours, and a dead learner is detected separately."""


class RemoteTrainer:
    """Runs `train(**kwargs)` once in each of `num_workers` processes, with unchanged keyword arguments.

        def train(model, buffer, batch_size, num_steps):
            learner = ludus.learner()
            remote_model = ludus.RemoteModel(name=model)
            network = learner.wrap(remote_model.get_model())
            for batch in ludus.RemoteBuffer(buffer, batch_size=batch_size):
                …

        trainer = ludus.RemoteTrainer(num_workers=2)
        trainer.train(train=train, model="atari", buffer="replay", batch_size=8, num_steps=100_000)

    `use_gpu=None` uses a GPU if there is one.
    """

    def __init__(self, use_gpu: bool | None = False, num_workers: int = 1) -> None:
        if not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(f"num_workers={num_workers!r}: a trainer has at least one learner.", "It is the total number.")
        if use_gpu and not torch.cuda.is_available():
            hint = "Pass use_gpu=False, or None to use one if available."
            raise UsageError("use_gpu=True, but PyTorch finds no GPU here.", hint)
        self._use_gpu = bool(use_gpu) or (use_gpu is None and torch.cuda.is_available())
        self._num_workers = num_workers
        self._run = current("RemoteTrainer")
        # Optimizers import torch._dynamo, which takes as long as torch itself: preload it once for all learners.
        self._run.preload += ["ludus.remote.trainer", "torch._dynamo"]
        self._learners: list[Process] = []
        self._first_failure: Process | None = None
        """The learner that failed first: the others fail because it is missing."""

    def train(self, train: Callable[..., Any], **kwargs: Any) -> None:
        """Start the learners; returns at once. Raises UsageError when they are running."""
        if not callable(train):
            raise UsageError(f"train={train!r} is not a function.")
        if any(not learner.wait(0) for learner in self._learners):
            raise UsageError("This trainer is training already.", "Make another RemoteTrainer.")
        run = self._run
        number = run.number("trainer")
        rendezvous = str(Path(run.location.scratch) / f"ddp-{uuid.uuid4().hex[:12]}")
        threads = max(1, usable_cores() // self._num_workers)
        names = [f"learner-{number}-{rank}" if number else f"learner-{rank}" for rank in range(self._num_workers)]
        self._learners = []
        for rank, name in enumerate(names):
            learner_role = Learner(rank, self._num_workers, self._use_gpu, rendezvous)
            process = run.supervisor.start(
                name, learn, run.ticket(threads), learner_role, train, kwargs, restart=NEVER, on_change=self._on_change
            )
            self._learners.append(process)
            run.watch(process)
        run.client.call({"op": "component", "kind": "trainer", "name": f"trainer-{number}", "details": {"learners": names}})

    def wait(self, timeout_s: float) -> bool:
        """Return whether every learner has returned from `train`. Raises WorkerFailed, with its traceback, when one failed."""
        deadline = time.monotonic() + timeout_s
        for learner in self._learners:
            learner.wait(max(0.0, deadline - time.monotonic()))
            failed = self._first_failure
            if failed is not None and failed.state == "failed":
                message = f"{failed.name} failed: {failed.error.rstrip() or 'it died'}"
                raise WorkerFailed(message, "The other learners were stopped.")
        return all(learner.wait(0) for learner in self._learners)

    def stop(self) -> None:
        for learner in self._learners:
            learner.stop()

    def _on_change(self, process: Process) -> None:
        """Runs in the supervisor's thread and must not wait."""
        if process.state == "failed" and self._first_failure is None:
            self._first_failure = process
            log.error("%s failed:\n%s", process.name, process.error.rstrip() or "it died")
            for other in self._learners:
                if other is not process:
                    other.stop()


class Learner:
    """This process's role in data-parallel training: `ludus.learner()` inside a train function.

    Outside of one it is the only learner, so that the function can be called and debugged directly.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, use_gpu: bool = False, rendezvous: str = "") -> None:
        self.rank, self.world_size = rank, world_size
        self._use_gpu, self._rendezvous = use_gpu, rendezvous
        self._store: Any = None

    def __repr__(self) -> str:
        return f"<Learner {self.rank} of {self.world_size}>"

    @property
    def device(self) -> torch.device:
        if not self._use_gpu:
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    @property
    def stopping(self) -> bool:
        """Whether this learner was asked to stop. Iterations over buffers end by themselves; check this in other loops."""
        return current("ludus.learner").ended

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this learner's device; with several learners, gradients are averaged over all of them."""
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        self._join()
        return nn.parallel.DistributedDataParallel(model)

    def metric(self, name: str, value: float, **labels: Any) -> None:
        """Report a number once for all learners (from rank 0)."""
        if self.rank == 0:
            metric(name, value, **labels)

    def _join(self) -> None:
        if torch.distributed.is_initialized():
            return
        from torch.distributed import FileStore  # type: ignore[attr-defined] # missing if torch is built without it

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # learners of one machine use loopback only
        self._store = FileStore(self._rendezvous, self.world_size)
        self._store.set_timeout(datetime.timedelta(seconds=JOIN_S))
        timeout = datetime.timedelta(seconds=GRADIENT_S)
        torch.distributed.init_process_group(
            "gloo", store=self._store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def leave(self) -> None:
        if self._store is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


_current_learner: Learner | None = None


def learner() -> Learner:
    """Rank, number of learners and `wrap` for data-parallel training, inside a train function."""
    return _current_learner or Learner()


def learn(context: Context, ticket: JoinTicket, learner_role: Learner, train: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Program of a learner process."""
    global _current_learner
    run = adopt(ticket)
    _current_learner = learner_role
    torch.set_num_threads(ticket.threads or 1)
    keep_freed_memory()
    context.on_stop(run.end_iterations)
    context.ready()
    try:
        train(**kwargs)
    except Exception:  # user code may raise anything
        if not context.stopping:
            raise
        log.info("ended by an error while stopping", exc_info=True)  # caused by learners that ended first
    finally:
        if not context.stopping:
            learner_role.leave()
        run.close()
