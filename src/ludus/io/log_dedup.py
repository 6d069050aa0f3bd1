"""What a chatty program says, told briefly: lines that come again and again are counted, not written. Pure: bytes in, bytes out.

Three rules, in this order, and everything that they leave out is said in a line that begins with “… ”:

- A group of one to four lines that has come twice in a row is from then on counted: “… the last 3 lines were repeated 120 times”.
  This loses nothing: writing the group so many times gives back what was said, in order.
- Lines that differ in numbers only are one *shape*. More than BURST of a shape within WINDOW_S is a flood: the rest of them is
  counted, and as long as the flood lasts one of them is written every WINDOW_S, with the number of the others.
- Beyond RATE nothing is looked at any more: lines are counted as fast as they can be read, so that whoever writes
  them is not held up.

A carriage return ends a line like a newline (progress bars). A line that is too long is cut, and says so.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

GROUP = 4
BURST, WINDOW_S = 40, 5.0
SAY_S = 10.0
"""A group that goes on and on is spoken of so often."""

RATE, RATE_BURST, LINE_COST = 1_000_000, 2_000_000, 50
"""Bytes per second, and at once; a line counts as so many more. (Looking at one takes 3 to 5 µs.)"""

LINE_BYTES = 8_192
SHAPES = 256
"""Shapes that are watched at a time; and a shape of more than KEY_BYTES is known by its hash."""

KEY_BYTES = 256

MARK = "… ".encode()
_NUMBER = re.compile(rb"0[xX][0-9a-fA-F]+|\b(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b|[0-9]+")
_RETURN = re.compile(rb"\r+\n?")
_CUT_WORDS = 48


@dataclass
class _Shape:
    """One window of it. `sample`: the last line that was left out."""

    opened: float
    seen: int = 0
    flooding: bool = False
    left_out: int = 0
    sample: bytes = b""


class Repeats:
    """`now` is any clock in seconds that never goes back. Whole lines come out, each with its end."""

    def __init__(self, burst: int = BURST, rate: int = RATE, rate_burst: int = RATE_BURST) -> None:
        self.lines = 0
        """How many came in so far."""
        self._burst, self._rate, self._rate_burst = burst, rate, rate_burst
        self._now = 0.0
        self._out: list[bytes] = []

        self._return = b""
        self._rest = b""
        self._rest_cut = 0
        self._rest_since = 0.0

        self._recent: deque[bytes] = deque(maxlen=2 * GROUP)
        self._written: deque[bytes] = deque(maxlen=GROUP)
        """The last lines of the output, as long as nothing but counts of repetitions stands between and after them."""
        self._group: list[bytes] = []
        self._swallowed = 0
        self._cycles = 0
        self._said = 0.0

        self._shapes: dict[bytes | int, _Shape] = {}
        self._flooded = 0
        """Shapes of which something was left out and not spoken of yet."""
        self._allowance, self._allowed = float(rate_burst), 0.0
        self._dropping = False
        self._dropped_lines = self._dropped_bytes = 0

    @property
    def pending(self) -> bool:
        """Whether something waits to be said: then `tick` is to be called about once a second."""
        return bool(self._rest or self._swallowed or self._dropped_lines) or any(
            shape.left_out for shape in self._shapes.values()
        )

    def feed(self, data: bytes, now: float) -> bytes:
        self._now = now
        data = self._skip_repeats(self._whole_lines(data))
        if data and self._affordable(len(data) + LINE_COST * data.count(b"\n")):
            self._dropping = False
            self._say_dropped()
            for line in data[:-1].split(b"\n"):
                self._line(_shortened(line))
        elif data:
            self._drop(data)
        return self._taken()

    def tick(self, now: float) -> bytes:
        """Say what has been waiting long enough to be said."""
        self._now = now
        if self._rest and now - self._rest_since >= WINDOW_S:
            self._line(self._take_rest())
        if now - self._said >= SAY_S:
            self._say_dropped()
            if self._swallowed < len(self._group):  # it has stopped on the way: what came of it is the last that was said
                self._break()
            else:
                self._say_repeats()
        for key, shape in list(self._shapes.items()):
            if now - shape.opened >= WINDOW_S:
                self._end_window(key, shape)
        return self._taken()

    def end(self) -> bytes:
        """Say everything that has not been said."""
        self._say_dropped()
        if self._rest:
            self._line(self._take_rest())
        self._break()
        for shape in self._shapes.values():
            self._say_left_out(shape)
        self._shapes.clear()
        return self._taken()

    # -- lines

    def _whole_lines(self, data: bytes) -> bytes:
        """What is complete by now; the rest is kept until its end comes."""
        if self._return or b"\r" in data:
            data = self._return + data
            self._return = b"\r" if data.endswith(b"\r") else b""  # its newline may come with the next
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
        rest = _shortened(self._rest, self._rest_cut)
        self._rest, self._rest_cut = b"", 0
        return rest

    def _line(self, line: bytes) -> None:
        self.lines += 1
        if self._group:
            if line == self._group[self._swallowed % len(self._group)]:
                self._swallowed += 1
                return
            self._break()
        self._recent.append(line)
        self._pass(line)
        self._look_for_group()

    # -- groups

    def _look_for_group(self) -> None:
        recent = list(self._recent)
        for size in range(1, len(recent) // 2 + 1):
            if recent[-1] == recent[-1 - size] and recent[-size:] == recent[-2 * size : -size]:
                self._group, self._swallowed, self._cycles, self._said = recent[-size:], 0, 0, self._now
                return

    def _skip_repeats(self, data: bytes) -> bytes:
        """The rest of whole lines after as many repetitions of the group as they begin with: at the speed of a comparison."""
        if not self._group or not data:
            return data
        at = self._swallowed % len(self._group)
        unit = b"\n".join(self._group[at:] + self._group[:at]) + b"\n"
        times = len(data) // len(unit)
        if not times or not data.startswith(unit * times):
            return data
        self.lines += times * len(self._group)
        self._swallowed += times * len(self._group)
        return data[times * len(unit) :]

    def _break(self) -> None:
        """Something else comes: say how often the group came, and write the lines of it that came since."""
        if not self._group:
            return
        self._say_repeats()  # what is left after it is the beginning of one more
        begun = self._group[: self._swallowed]
        self._recent.extend(self._group * min(self._cycles, 2 * GROUP) + begun)
        self._group, self._swallowed = [], 0
        for line in begun:
            self._pass(line)

    def _say_repeats(self) -> None:
        if not self._group:
            return
        size = len(self._group)
        times, self._swallowed = divmod(self._swallowed, size)
        self._said = self._now
        if times == 0:
            return
        self._cycles += times
        if list(self._written)[-size:] != self._group:  # it was left out, as part of a flood: so it is what comes last
            for line in self._group:
                self._pass(line)
            times -= 1
            if list(self._written)[-size:] != self._group:
                for line in self._group:
                    self._leave_out(self._shape(line), line, times)
                return
        if times * size == 1:
            self._write(self._group[0])
        elif times:
            what = "line was" if size == 1 else f"{size} lines were"
            self._out.append(MARK + f"the last {what} repeated {times:,} time{'s' * (times != 1)}\n".encode())

    # -- floods

    def _pass(self, line: bytes) -> None:
        shape = self._shape(line)
        shape.seen += 1
        if shape.flooding or shape.seen > self._burst:
            self._leave_out(shape, line, 1)
        else:
            self._write(line)

    def _shape(self, line: bytes) -> _Shape:
        form = _NUMBER.sub(b"0", line)
        key = form if len(form) <= KEY_BYTES else hash(form)
        shape = self._shapes.get(key)
        if shape is not None and self._now - shape.opened >= WINDOW_S:
            self._end_window(key, shape)
            shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= SHAPES:
                oldest = next(iter(self._shapes))
                self._say_left_out(self._shapes.pop(oldest))
            shape = self._shapes[key] = _Shape(self._now)
        return shape

    def _leave_out(self, shape: _Shape, line: bytes, times: int) -> None:
        if times:
            self._flooded += not shape.left_out
            shape.left_out += times
            shape.sample = line

    def _end_window(self, key: bytes | int, shape: _Shape) -> None:
        self._say_left_out(shape)
        del self._shapes[key]
        if shape.seen > self._burst:
            self._shapes[key] = _Shape(self._now, flooding=True)

    def _say_left_out(self, shape: _Shape) -> None:
        if shape.left_out:
            self._write(shape.sample)
            more = shape.left_out - 1
            if more:
                what = "line" if more == 1 else "lines"
                self._out.append(MARK + f"{more:,} more {what} like this one, apart from numbers, left out\n".encode())
                self._written.clear()
            self._flooded -= 1
            shape.left_out, shape.sample = 0, b""

    # -- too much

    def _affordable(self, cost: int) -> bool:
        self._allowance = min(self._rate_burst, self._allowance + (self._now - self._allowed) * self._rate)
        self._allowed = self._now
        if self._allowance < (self._rate if self._dropping else cost):
            return False
        self._allowance -= cost
        return True

    def _drop(self, data: bytes) -> None:
        if not self._dropping:
            self._break()
            self._recent.clear()
            self._dropping, self._said = True, self._now
        count = data.count(b"\n")
        self.lines += count
        self._dropped_lines += count
        self._dropped_bytes += len(data)

    def _say_dropped(self) -> None:
        if self._dropped_lines:
            lines, size = self._dropped_lines, self._dropped_bytes
            what = "line" if lines == 1 else "lines"
            self._out.append(MARK + f"{lines:,} {what} ({size:,} bytes) came too fast and were left out\n".encode())
            self._written.clear()
            self._dropped_lines = self._dropped_bytes = 0
            self._said = self._now

    # -- output

    def _write(self, line: bytes) -> None:
        self._written.append(line)
        self._out.append((b" " if line.lstrip(b" ").startswith(MARK) else b"") + line + b"\n")  # it is not mistaken for a count

    def _taken(self) -> bytes:
        taken = b"".join(self._out)
        self._out.clear()
        return taken


def _shortened(line: bytes, missing: int = 0) -> bytes:
    """`missing`: bytes that are known to have been cut off already."""
    if len(line) <= LINE_BYTES and not missing:
        return line
    kept = LINE_BYTES - _CUT_WORDS
    return line[:kept] + f" … and {len(line) - kept + missing:,} bytes more".encode()
