"""Compares the clocks of this machine and another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.launch.doctor.finding import DoctorFinding, failure, ok, skip, warning

SKEW_S, SKEW_FAILED_S = 1.0, 60.0
"""Clock differences above the first disorder logs and shorten leases; above the second, tokens and S3 signatures are soon rejected."""


@dataclass(frozen=True)
class ClockSample:
    """One reading of another machine's clock: local times of request and answer, and its time. Seconds since the epoch."""

    asked: float
    answered: float
    remote: float

    @property
    def trip(self) -> float:
        return self.answered - self.asked

    @property
    def skew(self) -> float:
        """How far the other clock is ahead, accurate to half of the round trip."""
        return self.remote - (self.asked + self.answered) / 2


def check_clock(samples: Sequence[ClockSample]) -> DoctorFinding:
    """Evaluate the sample with the shortest round trip."""
    if not samples:
        return skip("clock", "the time was not reported")
    best = min(samples, key=lambda sample: sample.trip)
    accuracy = best.trip / 2
    text = f"{abs(best.skew):.3f} s {'ahead of' if best.skew > 0 else 'behind'} this machine, give or take {accuracy:.3f} s"
    remedy = "Synchronize all machines with one time server: systemctl enable --now systemd-timesyncd (or chrony)."
    if abs(best.skew) - accuracy > SKEW_FAILED_S:
        return failure("clock", text, remedy)
    if abs(best.skew) - accuracy > SKEW_S:
        return warning("clock", text, remedy)
    return ok("clock", text)
