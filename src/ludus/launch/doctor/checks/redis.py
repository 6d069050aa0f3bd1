"""Checks a Redis server: connect, write, read back, delete, on a channel that is unique to the check."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid

from ludus.errors import LudusError
from ludus.launch.doctor.finding import DoctorFinding, failure, ok, redact_url, warning
from ludus.transport.message_stream import open_message_stream

SLOW_S = 0.02
_TIMEOUT_S = 3.0
_ROUND_TRIPS = 5
_PAYLOAD = b"ludus doctor " * 1000
_CHECK = "memory server"


def check_redis(url: str) -> DoctorFinding:
    label = redact_url(url)
    try:
        with contextlib.closing(open_message_stream(url, f"doctor-{uuid.uuid4().hex}", 4)) as stream:
            try:
                if not stream.push(_PAYLOAD, _TIMEOUT_S):
                    text = f"{label}: it rejects writes: its memory is full (maxmemory)"
                    return failure(_CHECK, text, "Raise maxmemory, or empty it.")
                deliveries = stream.pull(1, _TIMEOUT_S)
                if [bytes(delivery.data) for delivery in deliveries] != [_PAYLOAD]:
                    return failure(_CHECK, f"{label}: what was written did not come back", "Use Redis 6.2 or later.")
                stream.acknowledge([delivery.id for delivery in deliveries])
                times = [time.perf_counter()]
                for _ in range(_ROUND_TRIPS):
                    stream.read("hello")
                    times.append(time.perf_counter())
            finally:
                with contextlib.suppress(LudusError):
                    stream.drop()
    except LudusError as error:
        remedy = error.hint or "Is it running, and is its port open for this machine? See docs/fleets.md."
        return failure(_CHECK, f"{label}: {error.message.rstrip('.')}", remedy)
    return check_round_trip(label, min(end - start for start, end in itertools.pairwise(times)))


def check_round_trip(label: str, seconds: float) -> DoctorFinding:
    text = f"{label}: written, read back and removed; {seconds * 1000:.1f} ms for a round trip"
    if seconds > SLOW_S:
        return warning(_CHECK, text, "It is far away or busy: move it near the learner.")
    return ok(_CHECK, text)
