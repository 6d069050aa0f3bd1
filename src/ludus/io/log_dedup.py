"""Deduplication of log output: repeated lines are counted instead of written. No I/O and no clock: bytes in, bytes out.

Three rules, in this order; each omission is reported in a line that begins with “… ”:

- A group of one to four lines that occurred twice in a row is counted from then on: “… the last 3 lines were repeated 120
  times”. This is lossless.
- Lines that differ only in numbers have the same *shape*. After BURST lines of a shape within WINDOW_S, the rest is counted, and
  one line is written every WINDOW_S with the number of the omitted ones.
- Beyond RATE, lines are only counted, so that the writing program is not slowed down.

A carriage return ends a line like a newline (progress bars). Long lines are truncated with a note.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

GROUP = 4
BURST, WINDOW_S = 40, 5.0
REPORT_S = 10.0
"""Seconds between reports of a group that keeps repeating."""

RATE, RATE_BURST, LINE_COST = 1_000_000, 2_000_000, 50
"""Bytes per second, burst, and extra cost of each line in bytes. (Processing a line takes 3 to 5 µs.)"""

LINE_BYTES = 8_192
SHAPES = 256
"""Maximum number of tracked shapes; shapes longer than KEY_BYTES are identified by a hash."""

KEY_BYTES = 256

MARK = "… ".encode()
_NUMBER = re.compile(rb"0[xX][0-9a-fA-F]+|\b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b|[0-9]+")
_RETURN = re.compile(rb"\r+\n?")
_CUT_WORDS = 48


@dataclass
class _Shape:
    """Counts of one shape in its current window. `sample`: the last omitted line."""

    started: float
    count: int = 0
    flooding: bool = False
    omitted: int = 0
    sample: bytes = b""


class LogDeduplicator:
    """`now` is a monotonic time in seconds. The output consists of complete lines."""

    def __init__(self, burst: int = BURST, rate: int = RATE, rate_burst: int = RATE_BURST) -> None:
        self.lines = 0
        """Number of input lines so far."""
        self._burst, self._rate, self._rate_burst = burst, rate, rate_burst
        self._now = 0.0
        self._out: list[bytes] = []

        self._return = b""
        self._rest = b""
        self._rest_cut = 0
        self._rest_since = 0.0

        self._recent: deque[bytes] = deque(maxlen=2 * GROUP)
        self._written: deque[bytes] = deque(maxlen=GROUP)
        """The last lines of the output, if only repetition counts are between and after them."""
        self._group: list[bytes] = []
        self._matched = 0  # lines of the group that were counted and not reported yet
        self._cycles = 0
        self._reported = 0.0

        self._shapes: dict[bytes | int, _Shape] = {}
        self._allowance, self._allowed = float(rate_burst), 0.0
        self._dropping = False
        self._dropped_lines = self._dropped_bytes = 0

    @property
    def pending(self) -> bool:
        """Whether `tick` must be called about once per second, because something is not reported yet."""
        return bool(self._rest or self._matched or self._dropped_lines) or any(shape.omitted for shape in self._shapes.values())

    def feed(self, data: bytes, now: float) -> bytes:
        self._now = now
        data = self._skip_repeats(self._whole_lines(data))
        if data and self._affordable(len(data) + LINE_COST * data.count(b"\n")):
            self._dropping = False
            self._report_dropped()
            for line in data[:-1].split(b"\n"):
                self._line(_truncate(line))
        elif data:
            self._drop(data)
        return self._take_output()

    def tick(self, now: float) -> bytes:
        """Report counts that have been pending long enough."""
        self._now = now
        if self._rest and now - self._rest_since >= WINDOW_S:
            self._line(self._take_rest())
        if now - self._reported >= REPORT_S:
            self._report_dropped()
            if self._matched < len(self._group):  # the group stopped in the middle: write its lines
                self._end_group()
            else:
                self._report_repeats()
        for key, shape in list(self._shapes.items()):
            if now - shape.started >= WINDOW_S:
                self._end_window(key, shape)
        return self._take_output()

    def end(self) -> bytes:
        """Write and report everything that is pending."""
        self._report_dropped()
        if self._rest:
            self._line(self._take_rest())
        self._end_group()
        for shape in self._shapes.values():
            self._report_omitted(shape)
        self._shapes.clear()
        return self._take_output()

    # -- lines

    def _whole_lines(self, data: bytes) -> bytes:
        """Return the complete lines, and keep the incomplete last one."""
        if self._return or b"\r" in data:
            data = self._return + data
            self._return = b"\r" if data.endswith(b"\r") else b""  # a newline may follow in the next chunk
            data = _RETURN.sub(b"\n", data.rstrip(b"\r") if self._return else data)
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep_rest(data)
            return b""
        if self._rest:
            first = data.index(b"\n")
            self._keep_rest(data[:first])
            data = self._take_rest() + data[first:]
            end = data.rfind(b"\n") + 1
        self._keep_rest(data[end:])
        return data[:end]

    def _keep_rest(self, data: bytes) -> None:
        if not data:
            return
        if not self._rest:
            self._rest_since = self._now
        room = LINE_BYTES - len(self._rest)
        self._rest += data[:room]
        self._rest_cut += max(0, len(data) - room)

    def _take_rest(self) -> bytes:
        rest = _truncate(self._rest, self._rest_cut)
        self._rest, self._rest_cut = b"", 0
        return rest

    def _line(self, line: bytes) -> None:
        self.lines += 1
        if self._group:
            if line == self._group[self._matched % len(self._group)]:
                self._matched += 1
                return
            self._end_group()
        self._recent.append(line)
        self._write_or_omit(line)
        self._find_group()

    # -- groups

    def _find_group(self) -> None:
        recent = list(self._recent)
        for size in range(1, len(recent) // 2 + 1):
            if recent[-1] == recent[-1 - size] and recent[-size:] == recent[-2 * size : -size]:
                self._group, self._matched, self._cycles, self._reported = recent[-size:], 0, 0, self._now
                return

    def _skip_repeats(self, data: bytes) -> bytes:
        """Count the repetitions of the group at the beginning of complete lines, and return the rest (fast path)."""
        if not self._group or not data:
            return data
        at = self._matched % len(self._group)
        unit = b"\n".join(self._group[at:] + self._group[:at]) + b"\n"
        times = len(data) // len(unit)
        if not times or not data.startswith(unit * times):
            return data
        self.lines += times * len(self._group)
        self._matched += times * len(self._group)
        return data[times * len(unit) :]

    def _end_group(self) -> None:
        """Report the repetitions of the group, and write the lines of an incomplete one."""
        if not self._group:
            return
        self._report_repeats()
        partial = self._group[: self._matched]
        self._recent.extend(self._group * min(self._cycles, 2 * GROUP) + partial)
        self._group, self._matched = [], 0
        for line in partial:
            self._write_or_omit(line)

    def _report_repeats(self) -> None:
        if not self._group:
            return
        size = len(self._group)
        times, self._matched = divmod(self._matched, size)
        self._reported = self._now
        if times == 0:
            return
        self._cycles += times
        if list(self._written)[-size:] != self._group:  # it was omitted as part of a flood: write it before its count
            for line in self._group:
                self._write_or_omit(line)
            times -= 1
            if list(self._written)[-size:] != self._group:
                for line in self._group:
                    self._omit(self._shape(line), line, times)
                return
        if times * size == 1:
            self._write(self._group[0])
        elif times:
            what = "line was" if size == 1 else f"{size} lines were"
            self._out.append(MARK + f"the last {what} repeated {times:,} time{'s' * (times != 1)}\n".encode())

    # -- floods

    def _write_or_omit(self, line: bytes) -> None:
        shape = self._shape(line)
        shape.count += 1
        if shape.flooding or shape.count > self._burst:
            self._omit(shape, line, 1)
        else:
            self._write(line)

    def _shape(self, line: bytes) -> _Shape:
        form = _NUMBER.sub(b"0", line)
        key = form if len(form) <= KEY_BYTES else hash(form)
        shape = self._shapes.get(key)
        if shape is not None and self._now - shape.started >= WINDOW_S:
            self._end_window(key, shape)
            shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= SHAPES:
                oldest = next(iter(self._shapes))
                self._report_omitted(self._shapes.pop(oldest))
            shape = self._shapes[key] = _Shape(self._now)
        return shape

    def _omit(self, shape: _Shape, line: bytes, times: int) -> None:
        if times:
            shape.omitted += times
            shape.sample = line

    def _end_window(self, key: bytes | int, shape: _Shape) -> None:
        self._report_omitted(shape)
        del self._shapes[key]
        if shape.count > self._burst:
            self._shapes[key] = _Shape(self._now, flooding=True)

    def _report_omitted(self, shape: _Shape) -> None:
        if shape.omitted:
            self._write(shape.sample)
            more = shape.omitted - 1
            if more:
                what = "line" if more == 1 else "lines"
                self._out.append(MARK + f"{more:,} more {what} like this one, apart from numbers, left out\n".encode())
                self._written.clear()
            shape.omitted, shape.sample = 0, b""

    # -- rate limit

    def _affordable(self, cost: int) -> bool:
        self._allowance = min(self._rate_burst, self._allowance + (self._now - self._allowed) * self._rate)
        self._allowed = self._now
        if self._allowance < (self._rate if self._dropping else cost):
            return False
        self._allowance -= cost
        return True

    def _drop(self, data: bytes) -> None:
        if not self._dropping:
            self._end_group()
            self._recent.clear()
            self._dropping, self._reported = True, self._now
        count = data.count(b"\n")
        self.lines += count
        self._dropped_lines += count
        self._dropped_bytes += len(data)

    def _report_dropped(self) -> None:
        if self._dropped_lines:
            lines, size = self._dropped_lines, self._dropped_bytes
            what = "line" if lines == 1 else "lines"
            self._out.append(MARK + f"{lines:,} {what} ({size:,} bytes) came too fast and were left out\n".encode())
            self._written.clear()
            self._dropped_lines = self._dropped_bytes = 0
            self._reported = self._now

    # -- output

    def _write(self, line: bytes) -> None:
        self._written.append(line)
        escape = b" " if line.lstrip(b" ").startswith(MARK) else b""  # input that looks like a report
        self._out.append(escape + line + b"\n")

    def _take_output(self) -> bytes:
        output = b"".join(self._out)
        self._out.clear()
        return output


def _truncate(line: bytes, missing: int = 0) -> bytes:
    """Truncate a line to LINE_BYTES with a note; `missing`: bytes that were cut off before."""
    if len(line) <= LINE_BYTES and not missing:
        return line
    kept = LINE_BYTES - _CUT_WORDS
    return line[:kept] + f" … and {len(line) - kept + missing:,} bytes more".encode()
