"""Finds what limits the speed of a run: the learner, the workers, both in turn, or neither.

`find_bottleneck` decides from measured shares of time and the policy lag; it does no I/O and has no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ludus.core.metrics import Numbers

_MUCH, _LITTLE = 0.25, 0.10
_HIGH_LAG = 2.0
"""Updates. Workers that sample while the learner learns are one update behind, a segment that spans an update up to two."""


class Bottleneck(StrEnum):
    """What would have to be faster to make the run faster."""

    LEARNER = "the learner"
    ENVIRONMENTS = "the environments"
    POLICY = "the decisions of the policy"
    NETWORK = "the network"
    MACHINE = "the machine"
    SAMPLING = "sampling"
    TURNS = "taking turns"
    BALANCED = "balanced"


@dataclass(frozen=True)
class BottleneckFinding:
    limit: Bottleneck
    reason: str

    def __str__(self) -> str:
        return f"{self.limit}: {self.reason}"


@dataclass(frozen=True)
class Load:
    """Where the time of workers and learner goes. Shares are 0 to 1, those of workers are means over all workers."""

    environment: float = 0.0
    policy: float = 0.0
    blocked: float = 0.0
    """Workers wait for the learner: for room in the queue, or for new weights."""
    learner_wait: float = 0.0
    """The learner waits for a batch."""
    learner_busy: float | None = None
    """The learner computes updates. Decides alone where sampling and learning share one process."""
    lag: float = 0.0
    """Mean age in updates of the weights that sampled a batch: how long segments wait for the learner."""
    nodes: int = 1
    workers: bool = True
    """Other processes sample."""

    @classmethod
    def from_metrics(cls, numbers: Numbers) -> Load:
        """From the metrics of a run as docs/metrics.md names them; what is missing or not finite counts as 0."""

        def number(name: str) -> float:
            value = numbers.get(name, 0.0)
            return value if math.isfinite(value) else 0.0

        busy = numbers.get("learner_share", math.nan)
        lags = [number(name) for name in numbers if name == "learner/lag_mean" or name.endswith("/learner/lag_mean")]
        return cls(
            environment=number("sampler/env_share"),
            policy=number("sampler/policy_share"),
            blocked=number("sampler/blocked_share") + number("sampler/weights_wait_share"),
            learner_wait=number("learner/wait_share"),
            learner_busy=busy if math.isfinite(busy) else None,
            lag=max(lags, default=0.0),  # of several models the one that is furthest behind
            nodes=max(1, int(number("sampler/nodes"))),
            workers="sampler/env_share" in numbers or "learner/wait_share" in numbers,
        )

    @property
    def sampling(self) -> float:
        """Share of the workers' time in which they sample."""
        return self.environment + self.policy

    @property
    def is_measured(self) -> bool:
        """Whether workers have reported any time: in the first second of a run all shares are 0."""
        return self.sampling + self.blocked > 0


def find_bottleneck(load: Load) -> BottleneckFinding | None:
    """What limits the run, and why; None when the measurements do not show it.

    Waiting decides first: the side that waits more is not the limit. The lag decides only when neither side waits, because many
    workers make the lag high even when the learner waits for them: each segment then spans many updates.
    """
    if not load.workers:
        return _find_in_one_process(load)
    if not load.is_measured:
        return None
    waits, blocked = load.learner_wait, load.blocked
    if min(waits, blocked) >= _MUCH:
        return BottleneckFinding(
            Bottleneck.TURNS,
            f"workers wait {percent(blocked)} of their time for the learner, and it {percent(waits)} for them; "
            "sampling: pipelined or async would overlap them",
        )
    if blocked >= _LITTLE and blocked >= waits:
        return BottleneckFinding(Bottleneck.LEARNER, f"workers wait for it {percent(blocked)} of their time")
    if waits >= _LITTLE:
        return _find_in_workers(load)
    if load.lag >= _HIGH_LAG:
        return BottleneckFinding(
            Bottleneck.LEARNER,
            f"it waits {percent(waits)} of its time, and its batches are {load.lag:.1f} updates old on average",
        )
    return BottleneckFinding(
        Bottleneck.BALANCED, f"workers are {percent(load.sampling)} busy, the learner waits {percent(waits)}"
    )


def _find_in_workers(load: Load) -> BottleneckFinding:
    why = f"the learner waits {percent(load.learner_wait)} of its time"
    if load.sampling < 0.5:
        where = Bottleneck.NETWORK if load.nodes > 1 else Bottleneck.MACHINE
        return BottleneckFinding(where, f"workers are only {percent(load.sampling)} busy, and {why}")
    if load.environment >= load.policy:
        return BottleneckFinding(Bottleneck.ENVIRONMENTS, f"{percent(load.environment)} of the workers' time, and {why}")
    return BottleneckFinding(Bottleneck.POLICY, f"{percent(load.policy)} of the workers' time, and {why}")


def _find_in_one_process(load: Load) -> BottleneckFinding | None:
    if load.learner_busy is None:
        return None
    if load.learner_busy >= 0.5:
        return BottleneckFinding(Bottleneck.LEARNER, f"{percent(load.learner_busy)} of the time")
    return BottleneckFinding(Bottleneck.SAMPLING, f"{percent(1 - load.learner_busy)} of the time")


def describe_bottleneck(numbers: Numbers) -> str:
    """The bottleneck in the metrics of a run as text; empty when they do not show one."""
    finding = find_bottleneck(Load.from_metrics(numbers))
    return "" if finding is None else str(finding)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "– %"
