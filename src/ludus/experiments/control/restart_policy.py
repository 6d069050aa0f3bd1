"""Decides what follows the failure of a learner: a restart after a delay, or the end of the run."""

from __future__ import annotations

from dataclasses import dataclass

from ludus.errors import LudusError, MemoryClosed, StoreUnavailable, Unreachable, UsageError, WorkerFailed
from ludus.process.workers.supervisor import WorkerRestart


@dataclass(frozen=True)
class LearnerFailure:
    """How a learner ended before the end of its run."""

    reason: str
    error: LudusError | None = None
    """The error that it reported, if it could."""
    foreign: bool = False
    """It raised an error that is not ours: a bug in other code, which a new process will meet again."""


@dataclass(frozen=True)
class RestartAfter:
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    error: LudusError


class RestartPolicy:
    """Counts failures without a new checkpoint in between, and decides. Has no side effects."""

    CURABLE = (WorkerFailed, MemoryClosed, Unreachable, StoreUnavailable)
    """Errors from outside the learner, which may not occur again. All our other errors would."""

    def __init__(
        self,
        limit: int,
        backoff: WorkerRestart = WorkerRestart(limit=None, backoff_s=0.5, max_backoff_s=30.0),  # noqa: B008
        curable: tuple[type[LudusError], ...] = CURABLE,
    ) -> None:
        """`limit`: most failures without a new checkpoint. `curable`: errors of ours after which a restart may help."""
        self._limit, self._backoff, self._curable = limit, backoff, curable
        self._failures = 0
        self._checkpoint: str | None = None
        self._last_reason = ""

    def decide(self, failure: LearnerFailure, newest: str | None, set_up: bool) -> RestartAfter | GiveUp:
        """`newest`: the newest checkpoint. `set_up`: a learner of this run has created the run directory."""
        if newest != self._checkpoint:
            self._checkpoint, self._failures, self._last_reason = newest, 0, ""
        self._failures += 1
        repeated, self._last_reason = failure.reason == self._last_reason, failure.reason
        error = failure.error
        if error is not None and not self._is_curable(error, set_up):
            return GiveUp(error)
        if self._failures > self._limit or (failure.foreign and repeated):
            return GiveUp(self._final_error(failure))
        delay = self._backoff.delay(self._failures)
        assert delay is not None
        return RestartAfter(delay)

    def _is_curable(self, error: LudusError, set_up: bool) -> bool:
        if isinstance(error, self._curable):
            return not error.final
        # A port that processes of the last learner still hold. A wrong config would have failed before the set-up.
        return set_up and type(error) is UsageError and not error.final

    def _final_error(self, failure: LearnerFailure) -> LudusError:
        if failure.error is not None:
            return failure.error
        if self._failures == 1:
            return WorkerFailed(f"The learner died: {failure.reason}.")
        return WorkerFailed(f"The learner died {self._failures} times without a new checkpoint in between: {failure.reason}.")
