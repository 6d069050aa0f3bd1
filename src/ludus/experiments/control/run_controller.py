"""The conductor: after every update it reports, checkpoints, evaluates, and decides whether the run is over."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ludus.algorithms.trainer import Progress, Trainer
from ludus.config.schema import ExperimentConfig, StopConfig
from ludus.core.backoff import Backoff
from ludus.core.metrics import Numbers, Sink
from ludus.core.tree import Array
from ludus.errors import EnvironmentFault, Fenced, LudusError, NotFound, StartTimeout, StoreError, StoreUnavailable
from ludus.experiments.control.callbacks import notify_checkpoint
from ludus.experiments.control.stopping import FINAL_EVALUATION_S
from ludus.experiments.evaluation.evaluation_video import show_videos
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import Best
from ludus.models.weights.version_store import LocalVersionStore
from ludus.sampling.episode_runner import Score
from ludus.storage.base import Store

log = logging.getLogger(__name__)

SOON_S = 30.0
"""A learner that replaces a dead one checkpoints after this time, then after twice as much, up to the time of the schedule."""

CONCLUDE_S = 300.0
"""At the end of a run, the longest wait for evaluations that go on elsewhere."""

RETRY_S = 10.0
"""A checkpoint that could not be stored is tried again after this time of training, then after twice as much, …"""

_RETRY_AT_MOST_S = 300.0

LAST_S = 120.0
LAST_AGAIN_S = 1.0
"""The last checkpoint of a run is tried for so long; again after this time, then after twice as much, …"""

_SHARE_OF_DISPLAY = 20.0
"""Training lasts so many times as long as an evaluation that is only shown."""

_LOOK_S = 0.2
_LOOK_AFTER_S = 2.0  # whoever writes the status looks more often
Evaluate = Callable[[int], Score]
"""Plays the evaluation episodes of one iteration, while training waits."""


@runtime_checkable
class EvaluateElsewhere(Protocol):
    """Plays them while training goes on: one checkpoint at a time."""

    @property
    def busy(self) -> bool: ...

    @property
    def interrupted(self) -> Callable[[], bool]: ...

    def begin(self, iteration: int, checkpoint: str) -> None: ...

    def finished(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
        """(iteration, its score), or None: not yet. Waits at most so long."""
        ...


@dataclass(frozen=True)
class _Played:
    """A checkpoint that is being evaluated, or waits for it."""

    checkpoint: str
    iterations: int
    timesteps: int


class Experience(Protocol):
    """Whoever plays: a sampler of environments, or games that call us."""

    def state(self) -> dict[str, Array]:
        """What a resumed run needs of it."""
        ...

    def load_state(self, state: dict[str, Array]) -> None: ...

    def metrics(self) -> Numbers: ...

    def unlearned_steps(self) -> int:
        """Steps that were sampled since the last batch: nothing learns from them when the run ends now."""
        ...


@runtime_checkable
class SampledElsewhere(Protocol):
    """Experience that other processes sample, after a start-up that may fail to end."""

    def has_sampled(self) -> bool:
        """Whether a step was sampled since this process began."""
        ...

    def awaited(self) -> str:
        """What the first step is waiting for, as the object of "waited for"."""
        ...


@dataclass(frozen=True)
class Schedule:
    """When things happen, in iterations unless it says otherwise; 0 = not by count."""

    stop: StopConfig
    checkpoint_freq: int
    keep: int | None
    evaluation_interval: int
    report_every_s: float = 0.0
    checkpoint_time_s: float = 0.0
    evaluation_unit: Literal["iterations", "timesteps", "episodes"] = "iterations"
    least_iteration: tuple[int, float] = (0, 0.0)
    """Steps and seconds that a `training_iteration` takes at least."""
    start_timeout_s: float | None = None
    """Seconds within which the first step has to be sampled."""

    def evaluation_is_due(self, progress: Progress, before: int) -> bool:
        """Whether the count has come to, or beyond, a multiple of the interval since it was `before`."""
        every, now = self.evaluation_interval, getattr(progress, self.evaluation_unit)
        return bool(every) and now // every > before // every


def reached(stop: StopConfig, progress: Progress) -> str | None:
    """The key of the first stop condition that holds."""
    mean = progress.episode_return_mean
    if stop.episode_return_mean is not None and not math.isnan(mean) and mean >= stop.episode_return_mean:
        return "episode_return_mean"
    if stop.timesteps is not None and progress.timesteps >= stop.timesteps:
        return "timesteps"
    if stop.iterations is not None and progress.iterations >= stop.iterations:
        return "iterations"
    if stop.training_iteration is not None and progress.training_iteration >= stop.training_iteration:
        return "training_iteration"
    if stop.episodes is not None and progress.episodes >= stop.episodes:
        return "episodes"
    if stop.time_s is not None and progress.time_s >= stop.time_s:
        return "time_s"
    return None


class Conductor:
    def __init__(
        self,
        trainer: Trainer,
        source: Experience,
        pool: LocalVersionStore,
        store: Store,
        schedule: Schedule,
        sinks: Sequence[Sink],
        config: ExperimentConfig,
        evaluate: Evaluate | EvaluateElsewhere | None,
        always: Numbers | None = None,
    ) -> None:
        """`always`: numbers that are part of every report."""
        self._always = dict(always or {})
        self._trainer, self._source, self._pool, self._store = trainer, source, pool, store
        self._schedule, self._sinks = schedule, sinks
        self._elsewhere = evaluate if isinstance(evaluate, EvaluateElsewhere) else None
        self._inline = None if evaluate is None or isinstance(evaluate, EvaluateElsewhere) else evaluate
        self._playing: _Played | None = None
        self._next: _Played | None = None
        self._surplus: set[str] = set()  # checkpoints that were made for their evaluation alone
        self._passed_over = 0
        self._evaluated: dict[str, float] = {}
        self._scored_at, self._score_took_s = trainer.progress.time_s, 0.0
        self._config = config
        self._seen = trainer.progress.iterations
        self._counted: int = getattr(trainer.progress, schedule.evaluation_unit)
        self._scored = -1  # the iteration that was evaluated last
        self._at_end: dict[str, float] = {}
        self._reported_at = -math.inf
        self._checkpointed = -1
        self._checkpointed_at = trainer.progress.time_s
        self._soon_s = math.inf
        self._reported: dict[str, float] = {}
        self._mine: set[str] = set()
        self._failures = 0
        self._unreported = False
        self._backoff, self._retry_at = Backoff(RETRY_S, _RETRY_AT_MOST_S), math.inf  # in the time of the training
        self._best: Best | None = None  # as it is written down: a trainer that was cut off may write another one later
        with contextlib.suppress(StoreError):  # a damaged one is replaced
            self._best = checkpoint.best(store)
        self._unmarked: Best | None = None  # one that could not be written down yet
        self._loose: set[tuple[str, int]] = set()  # versions whose checkpoint could not be stored
        self.stopped_by: str | None = None
        self.last_checkpoint: str | None = None

    def hurry(self) -> None:
        """Deaths may come more often than checkpoints by time: let the first ones come soon, or the run never gets on."""
        self._soon_s = SOON_S

    def numbers(self) -> dict[str, float]:
        """The newest of every number: those of the last update, and what else was in the last report. From any thread."""
        return {**self._trainer.counts(), **self._reported, **self._trainer.metrics, **self._evaluated, **self._at_end}

    def step(self) -> bool:
        """Report, then checkpoint, then evaluate: a kill in between loses neither what was learned nor what was said of it."""
        progress = self._trainer.progress
        with contextlib.suppress(StoreUnavailable):  # that is said when there is something to store
            self._pool.check_recently(_LOOK_AFTER_S)
        heard = self._collect()
        self._check_start()
        if progress.iterations == self._seen:
            return self._out_of_time() or heard
        self._seen = progress.iterations
        progress.count_training_iteration(*self._schedule.least_iteration)
        if self._schedule.stop.training_iteration is not None:
            self._trainer.metrics["training_iteration"] = progress.training_iteration
        self.stopped_by = self.stopped_by or reached(self._schedule.stop, progress)
        if self.stopped_by or progress.time_s - self._reported_at >= self._schedule.report_every_s:
            self._reported_at = progress.time_s
            self._trainer.metrics |= {**self._source.metrics(), **self._always, **self._troubles()}
            self._reported = dict(self._trainer.metrics)
            self._report(self._reported)
        due = self._checkpoint_is_due(progress)
        away = False
        if due and self.stopped_by is None:
            away = self._try(self.checkpoint) is None
        elif due:
            self.checkpoint_at_last()
        counted, self._counted = self._counted, getattr(progress, self._schedule.evaluation_unit)
        if due or self._schedule.evaluation_is_due(progress, counted):
            self._score(due, away or self._is_away)
        elif self._display_is_due(progress):
            self._score_inline(progress, judge=False)
        if self.stopped_by is not None:
            self._conclude()
            self._mark_at_last()
        return True

    def _check_start(self) -> None:
        """Start the clock with the first sampled step. Raises StartTimeout when it does not come."""
        clock, source, bound = self._trainer.clock, self._source, self._schedule.start_timeout_s
        if clock.started or not isinstance(source, SampledElsewhere):
            return
        if source.has_sampled():
            clock.start()
        elif bound is not None and clock.startup_s >= bound:
            raise StartTimeout(
                f"No step was sampled within {bound:g} s of the start; waited for {source.awaited()}.",
                "Nothing was learned; see the logs in the run's directory. config.start_timeout_s allows a longer start.",
            )

    def _out_of_time(self) -> bool:
        """The time may be up between two updates: while a batch is sampled, or while games stay away."""
        if self.stopped_by is not None or not self._trainer.clock.is_up():
            return False
        self.stopped_by = "time_s"
        self.settle()
        if self._config.checkpoint_at_end:
            self.checkpoint_at_last()
            iterations = self._trainer.progress.iterations
            if iterations and iterations != self._scored:
                self._score(True, self._is_away)
        self._conclude()
        self._mark_at_last()
        return True

    def settle(self) -> None:
        """Count what has happened since the last update: the run ends without another one."""
        progress = self._trainer.progress
        progress.time_s = max(progress.time_s, self._trainer.clock.elapsed_s)
        fps = progress.timesteps / progress.time_s if progress.time_s else 0.0
        unlearned = self._source.unlearned_steps()
        self._at_end |= {**self._source.metrics(), "time_s": progress.time_s, "fps": fps, "unlearned_steps": unlearned}
        log.info("%d sampled steps are discarded: they are less than a batch", unlearned)

    def _checkpoint_is_due(self, progress: Progress) -> bool:
        if self.stopped_by is not None:
            return self._config.checkpoint_at_end
        freq, seconds = self._schedule.checkpoint_freq, self._schedule.checkpoint_time_s
        by_time = bool(seconds) and progress.time_s - self._checkpointed_at >= min(seconds, self._soon_s)
        if not math.isinf(self._retry_at):  # the store is away: not more often than that
            return progress.time_s >= self._retry_at
        return by_time or bool(freq and progress.iterations % freq == 0)

    def _report(self, numbers: Numbers) -> None:
        for sink in self._sinks:
            try:
                sink.write(numbers)
            except StoreUnavailable as error:  # a directory that is shared: what is learned does not depend on it
                if not self._unreported:
                    log.warning("not reported for now: %s", error)
                self._unreported = True
            else:
                self._unreported = False

    def checkpoint(self, due: bool = True) -> str:
        """Store everything as it is now (once per iteration), and drop what is too old.

        Not `due`: it is made for an evaluation, and goes again unless it turns out to be the best.
        """
        progress = self._trainer.progress
        if self._checkpointed == progress.iterations and self.last_checkpoint:
            if due:
                self._surplus.discard(self.last_checkpoint)
            return self.last_checkpoint
        name = self._write()
        self.last_checkpoint, self._checkpointed = name, progress.iterations
        self._mine.add(name)
        self._backoff.reset()
        self._retry_at = math.inf
        if due:
            self._checkpointed_at = progress.time_s
            self._soon_s *= 2
            notify_checkpoint(self._sinks, name)
        else:
            self._surplus.add(name)
        if self._inline is None and self._elsewhere is None:
            self._judge(progress.episode_return_mean, "training")
        with self._tolerated():
            self._mark_what_is_left()
            self._tidy()
        log.info("checkpoint %s at %d timesteps", name, progress.timesteps)
        return name

    def _write(self) -> str:
        """Raises Fenced: then nothing of it can be seen."""
        versions = {name: self._keep(name) for name in self._trainer.algorithms}
        try:
            name = self._put(versions)
        except NotFound:  # what was half written was swept away: by the one that has taken over, or by one that thought it had
            self._pool.check()
            name = self._put(versions)
        self._loose -= set(versions.items())
        try:
            self._pool.check()
        except StoreUnavailable:
            pass
        except Fenced:  # taken over in the moment between the guard and the checkpoint
            with contextlib.suppress(StoreError):
                checkpoint.drop(self._store, name)
            raise
        return name

    def _put(self, versions: Mapping[str, int]) -> str:
        progress, algorithms = self._trainer.progress, self._trainer.algorithms
        state = {"progress": progress.to_json(), "config": _plain(self._config)}
        return checkpoint.write(
            self._store, progress.iterations, algorithms, versions, self._source.state(), state,
            incarnations={model: self._pool.incarnation(model) for model in algorithms}, guard=self._pool.confirm,
        )  # fmt: skip

    def _keep(self, model: str) -> int:
        self._loose.add((model, self._pool.newest(model)[1]))
        return self._pool.keep(model)

    def checkpoint_at_last(self) -> str:
        """As `checkpoint`, for the end of a run: what is not stored now is lost. Raises StoreUnavailable after a while."""
        backoff, deadline = Backoff(LAST_AGAIN_S, 15 * LAST_AGAIN_S), time.monotonic() + LAST_S
        while True:
            try:
                name = self.checkpoint()
                self._mark_what_is_left()
                return name
            except StoreUnavailable as error:
                wait_s = backoff.next_delay()
                if time.monotonic() + wait_s > deadline:
                    raise
                log.warning(
                    "the last checkpoint cannot be stored, and is tried again for %d s: %s", deadline - time.monotonic(), error
                )
            time.sleep(wait_s)

    def _mark_at_last(self) -> None:
        if self._unmarked is not None:
            with self._tolerated():  # the checkpoint itself is stored
                self.checkpoint_at_last()

    # -- a store that is away

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Training goes on, and what could not be stored is tried again."""
        try:
            yield
        except StoreUnavailable as error:
            self._postpone(error)

    def _try(self, store: Callable[[], str]) -> str | None:
        try:
            return store()
        except StoreUnavailable as error:
            self._postpone(error)
            return None

    def _postpone(self, error: StoreUnavailable) -> None:
        self._failures += 1
        retry_s = self._backoff.next_delay()
        self._retry_at = self._trainer.progress.time_s + retry_s
        log.warning("not stored, and tried again in %.0f s (failure %d): %s", retry_s, self._failures, error)

    @property
    def _is_away(self) -> bool:
        """It did not answer a moment ago: every further question may take as long as that one."""
        return self._trainer.progress.time_s < self._retry_at < math.inf

    def _troubles(self) -> dict[str, float]:
        return {"checkpoint/failures": float(self._failures)} if self._failures else {}

    def _tidy(self) -> None:
        """Drop what is too old, and what has been evaluated and found not to be the best; never the newest. Raises Fenced."""
        self._pool.check()
        self._mark_again()
        self._drop_what_is_astray()
        spared = {played.checkpoint for played in (self._playing, self._next) if played is not None}
        spared |= {best.checkpoint for best in (self._best, self._unmarked) if best is not None}
        gone = checkpoint.retain(self._store, self._schedule.keep, self.last_checkpoint, spared=spared, surplus=self._surplus)
        for name in self._surplus - spared - {self.last_checkpoint}:
            gone[name] = checkpoint.drop(self._store, name)
            self._surplus.discard(name)
        for versions in gone.values():
            for model, version in versions.items():
                self._pool.forget(model, version)
        for model, version in self._loose:
            self._pool.forget(model, version)
        self._loose.clear()

    def _tidy_if_possible(self) -> None:
        if not self._is_away:  # else with the next checkpoint
            with self._tolerated():
                self._tidy()

    def _drop_what_is_astray(self) -> None:
        """What a trainer has written that was cut off; if all are to be kept, it is only passed over."""
        if self._schedule.keep is None or checkpoint.FROM not in self._pool.began:
            return
        began = self._pool.began[checkpoint.FROM]
        strange = [n for n in checkpoint.names(self._store) if n not in self._mine and checkpoint.after(n, began)]
        for name in strange:
            if self._best is not None and name == self._best.checkpoint:
                continue
            if checkpoint.astray(self._store, name):
                log.warning("checkpoint %s is of a trainer that had been cut off; it is deleted", name)
                checkpoint.drop(self._store, name)

    def _judge(self, score: float, by: str, name: str | None = None) -> None:
        """The best so far is kept, whether a checkpoint was due or not. `name`: the one that was judged, if not of now."""
        if math.isnan(score):
            return
        if self._is_away:
            if name is not None and self._is_best(score):
                self._unmarked = Best(name, score, by)
            return
        with self._tolerated():
            if self._is_best(score):
                best = name or self.checkpoint()
                self._unmarked = Best(best, score, by)
                self._surplus.discard(best)
                self._mark_what_is_left()

    def _is_best(self, score: float) -> bool:
        return all(score >= best.score for best in (self._best, self._unmarked) if best is not None)

    def _mark_what_is_left(self) -> None:
        if self._unmarked is None:
            return
        self._pool.check()
        self._mark(self._unmarked)
        self._best, self._unmarked = self._unmarked, None

    def _mark_again(self) -> None:
        """A trainer that was cut off between its look at the claims and its mark has replaced ours."""
        if self._best is not None and checkpoint.best_name(self._store) != self._best.checkpoint:
            log.warning("the mark of the best checkpoint, %s, was replaced; it is made again", self._best.checkpoint)
            self._mark(self._best)

    def _mark(self, best: Best) -> None:
        incarnation = self._pool.incarnation(self._pool.names()[0])
        checkpoint.mark_best(self._store, best.checkpoint, best.score, best.by, incarnation)

    # -- evaluations

    def _score(self, due: bool, away: bool) -> None:
        """`away`: a checkpoint of now could not be stored, and is not tried once more."""
        progress = self._trainer.progress
        self._scored = progress.iterations
        if self._elsewhere is not None:
            name = None if away else self._try(functools.partial(self.checkpoint, due))
            if name is not None:
                self._have_played(_Played(name, progress.iterations, progress.timesteps))
        elif self._inline is not None:
            self._score_inline(progress)

    def _score_inline(self, progress: Progress, *, judge: bool = True) -> None:
        assert self._inline is not None
        began = time.monotonic()
        try:
            score = self._inline(progress.iterations)
        except EnvironmentFault as fault:  # what is learned does not depend on it
            log.warning("an evaluation failed: %s", fault)
            return
        finally:
            self._scored_at, self._score_took_s = progress.time_s, time.monotonic() - began
        self._tell(score, progress.iterations, progress.timesteps, judge=judge)

    def _display_is_due(self, progress: Progress) -> bool:
        """Whether an evaluation wants to be shown between those of the schedule, and takes little time. It judges no checkpoint."""
        every_s = getattr(self._inline, "every_s", None)
        return every_s is not None and progress.time_s - self._scored_at >= max(every_s, _SHARE_OF_DISPLAY * self._score_took_s)

    def _have_played(self, played: _Played) -> None:
        assert self._elsewhere is not None
        if self._playing is None:
            self._playing = played
            self._elsewhere.begin(played.iterations, played.checkpoint)
            return
        if self._next is not None:
            log.log(
                logging.INFO if self._passed_over else logging.WARNING,
                "evaluations take longer than the time between them; checkpoint %s is passed over",
                self._next.checkpoint,
            )
            self._passed_over += 1
        self._next = played
        self._tidy_if_possible()

    def _collect(self, timeout_s: float = 0.0) -> bool:
        """Take in an evaluation that has ended elsewhere, and begin with the next. Whether there was one."""
        if self._elsewhere is None or self._playing is None:
            return False
        finished = self._elsewhere.finished(timeout_s)
        if finished is None:
            return False
        played, waiting, self._playing, self._next = self._playing, self._next, None, None
        if finished[1] is not None:
            self._tell(finished[1], played.iterations, played.timesteps, played.checkpoint)
        if waiting is not None:
            self._have_played(waiting)
        self._tidy_if_possible()
        return True

    def _conclude(self) -> None:
        """The last version shall be judged too: the one place where a run waits for evaluations elsewhere."""
        if self._elsewhere is None or self._playing is None:
            return
        log.info("waiting for the last evaluations, at most %d s", CONCLUDE_S)
        deadline = time.monotonic() + CONCLUDE_S
        while self._playing is not None:
            up = self._trainer.clock.is_up(FINAL_EVALUATION_S)
            if up or self._elsewhere.interrupted() or time.monotonic() >= deadline:
                self._leave_out(f"of checkpoint {self._playing.checkpoint} ")
                break
            self._collect(_LOOK_S)

    def _leave_out(self, which: str = "") -> None:
        """An evaluation was broken off: nothing is known of it."""
        self._at_end["evaluation/unfinished"] = 1.0
        why = "the time limit was reached" if self._trainer.clock.is_up() else "the run was stopped"
        log.info("the evaluation %swas not finished: %s", which, why)

    def _tell(self, score: Score, iterations: int, timesteps: int, name: str | None = None, *, judge: bool = True) -> None:
        """Report a score at the steps of the version it belongs to, and let it judge."""
        if not score.complete:
            self._leave_out(f"({len(score.returns)} episodes ended) ")
            return
        if not score.returns:
            log.warning("an evaluation has no score: none of its episodes ended")
            return
        self._at_end.pop("evaluation/unfinished", None)
        numbers = {
            "evaluation/return_mean": score.mean,
            "evaluation/return_low": score.low,
            "evaluation/return_high": score.high,
            "evaluation/return_min": min(score.returns),
            "evaluation/return_max": max(score.returns),
            "evaluation/length_mean": sum(score.lengths) / len(score.lengths),
            "evaluation/episodes": len(score.returns),
            "evaluation/cut": score.cut,
            **{f"evaluation/{name}": value for name, value in score.numbers().items()},
        }
        numbers = {key: value for key, value in numbers.items() if not math.isnan(value)}
        self._evaluated = numbers
        self._report({"timesteps": timesteps, "iterations": iterations, **numbers})
        show_videos(self._sinks, score.videos, timesteps)
        if judge:
            self._judge(score.mean, "evaluation", name)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except LudusError:  # a full disk; the other sinks are closed all the same
                log.exception("closing %s failed", type(sink).__name__)


def _plain(config: ExperimentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=False, exclude_none=False)
