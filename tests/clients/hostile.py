"""Misbehaving servers, and a proxy that loses requests and replies."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

PATIENCE_S = 20.0
"""Time limit of every wait in these threads."""

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass(frozen=True)
class Misbehaviour:
    """What a server does after it has read a request: sends something, then closes or misbehaves."""

    data: bytes = b""
    stay: bool = False
    """Keep the connection open silently, until the client closes or the test ends."""
    pour: bytes = b""
    """Sent repeatedly, without end."""
    every_s: float = 0.0
    reset: bool = False
    """Close with RST instead of FIN."""

    def __call__(self, connected: socket.socket, over: threading.Event) -> None:
        connected.sendall(self.data)
        if self.stay:
            wait_for_end(connected, over)
        while self.pour and not over.is_set():
            connected.sendall(self.pour)
            over.wait(self.every_s)
        if self.reset:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


_HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def _length(value: str) -> bytes:
    return _HEAD + f"Content-Length: {value}\r\n\r\n".encode()


MISBEHAVIOURS: dict[str, Misbehaviour] = {
    "closes without a word": Misbehaviour(),
    "resets": Misbehaviour(reset=True),
    "closes within the status line": Misbehaviour(b"HTTP/1."),
    "closes within the headers": Misbehaviour(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "closes within the body": Misbehaviour(_length("10") + b"abc"),
    "closes within a chunk": Misbehaviour(CHUNKED + b"a\r\nabc"),
    "closes instead of the length": Misbehaviour(_HEAD + b"\r\nabc"),
    "stays silent": Misbehaviour(stay=True),
    "stalls within the headers": Misbehaviour(b"HTTP/1.1 200 OK\r\nConte", stay=True),
    "stalls within the body": Misbehaviour(_length("10") + b"abc", stay=True),
    "stalls within a chunk": Misbehaviour(CHUNKED + b"a\r\nabc", stay=True),
    "trickles headers": Misbehaviour(_HEAD + b"x: ", pour=b"x", every_s=0.01),
    "trickles a body": Misbehaviour(_length("100000"), pour=b"x", every_s=0.01),
    "talks rubbish": Misbehaviour(bytes(range(256)) * 4),
    "talks another protocol": Misbehaviour(b"220 mail ESMTP\r\n\r\n"),
    "has a status that is none": Misbehaviour(b"HTTP/1.1 2oo OK\r\nContent-Length: 0\r\n\r\n"),
    "has a long status": Misbehaviour(b"HTTP/1.1 20000 OK\r\nContent-Length: 0\r\n\r\n"),
    "has another version": Misbehaviour(b"HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n"),
    "has no length": Misbehaviour(_HEAD + b"\r\nabc", stay=True),
    "has a huge length": Misbehaviour(_length("9000000000000000000"), stay=True),
    "has a length that overflows": Misbehaviour(_length("18446744073709551618") + b"ok"),
    "has an endless length": Misbehaviour(_length("9" * 400), stay=True),
    "has a negative length": Misbehaviour(_length("-5") + b"abcde"),
    "has a length in hex": Misbehaviour(_length("0x2") + b"ab"),
    "has a length with a plus": Misbehaviour(_length("+2") + b"ab"),
    "has two lengths": Misbehaviour(_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc"),
    "has a length and chunks": Misbehaviour(
        _HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    ),
    "has an unknown coding": Misbehaviour(_HEAD + b"Transfer-Encoding: gzip\r\n\r\n2\r\nab\r\n0\r\n\r\n"),
    "has chunks of no size": Misbehaviour(CHUNKED + b"zz\r\nab\r\n0\r\n\r\n"),
    "has chunks of negative size": Misbehaviour(CHUNKED + b"-2\r\nab\r\n0\r\n\r\n"),
    "has huge chunks": Misbehaviour(CHUNKED + b"7fffffffffffffff\r\nab", stay=True),
    "has chunks whose size overflows": Misbehaviour(CHUNKED + b"10000000000000002\r\nok\r\n0\r\n\r\n"),
    "has chunks without ends": Misbehaviour(CHUNKED + b"2\r\nabXX0\r\n\r\n"),
    "has endless headers": Misbehaviour(_HEAD, pour=b"x: y\r\n" * 1000),
    "has an endless header": Misbehaviour(_HEAD + b"x: ", pour=b"x" * 4096),
    "has an endless status line": Misbehaviour(b"HTTP/1.1 200 ", pour=b"x" * 4096),
    "has an endless size of a chunk": Misbehaviour(CHUNKED, pour=b"0" * 4096),
    "has endless trailers": Misbehaviour(CHUNKED + b"0\r\n", pour=b"x: y\r\n" * 1000),
    "continues for ever": Misbehaviour(pour=b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
    "says more than it was asked": Misbehaviour(OK + OK, stay=True),
}
"""Misbehaviour that a client must report as an error in time, without a crash, hang or reply."""

STRANGE: dict[str, tuple[bytes, bytes]] = {
    "in chunks": (CHUNKED + b"1;x=y\r\no\r\n1\r\nk\r\n0\r\nx: y\r\n\r\n", b"ok"),
    "after a 100": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
    "without a reason": (b"HTTP/1.1 200\r\ncontent-length:2\r\n\r\nok", b"ok"),
    "of version 1.0": (b"HTTP/1.0 200 OK\r\nContent-Length:   2  \r\n\r\nok", b"ok"),
    "with the same length twice": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", b"ok"),
}
"""Unusual but valid replies, with their bodies."""

REFUSALS: dict[str, bytes] = {
    "no JSON": b"<html>oops</html>",
    "empty": b"",
    "another JSON": b"[1, 2, {}]",
    "half a JSON": b'{"error": "seq", "message": "x',
    "deep": b'{"error":' + b"[" * 100_000,
    "other types": b'{"error": 5, "message": null, "hint": {}, "last": "x"}',
    "a last beyond all numbers": b'{"error": "seq", "message": "m", "hint": "h", "last": 99999999999999999999999999}',
    "a negative last": b'{"error": "seq", "message": "m", "hint": "h", "last": -7}',
    "binary": bytes(range(256)),
}
"""Bodies of refusals from servers other than Ludus."""


_REFUSED = b'{"error": "seq", "message": "m\\u00f6\\ud83d\\ude00\\n", "hint": [1, {"a": "]"}], "last": 7}'
_WHOLE = (
    OK,
    CHUNKED + b"3;a=b\r\nabc\r\n1f\r\n" + bytes(31) + b"\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    b"HTTP/1.1 409 Conflict\r\nRetry-After: 0.01\r\nContent-Length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED),
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}",
)
_INSERTED = (b"\r\n", b"\0", b"9", b":", b" ", b"\xff", b"Content-Length: 3\r\n", b"\r\n\r\n")


def mutated(rng: random.Random) -> bytes:
    """A randomly damaged reply, an empty one, or random bytes."""
    whole = bytearray(rng.choice(_WHOLE))
    kind = rng.choice(("rubbish", "cut", "changed", "shortened", "lengthened"))
    if kind == "rubbish":
        return rng.randbytes(rng.randrange(1, 300))
    if kind == "cut":
        return bytes(whole[: rng.randrange(len(whole))])
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(whole))
        if kind == "changed":
            whole[at] = rng.randrange(256)
        elif kind == "shortened":
            del whole[at : at + rng.randrange(1, 8)]
            whole = whole or bytearray(b"H")
        else:
            whole[at:at] = rng.choice(_INSERTED)
    return bytes(whole)


def refusal(body: bytes, status: str = "409 Conflict", retry_after_s: float | None = None) -> bytes:
    after = "" if retry_after_s is None else f"Retry-After: {retry_after_s:g}\r\n"
    return f"HTTP/1.1 {status}\r\n{after}Content-Length: {len(body)}\r\n\r\n".encode() + body


# -- servers ------------------------------------------------------------------------------------------------------------


@dataclass
class Hostile:
    port: int
    requests: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def hostile(misbehave: Misbehaviour, *, after: int = 0) -> Iterator[Hostile]:
    """Answers `after` requests with OK, on whatever connections they come, and misbehaves at every later one; then that
    connection is closed."""
    count = itertools.count()

    def serve(connected: socket.socket, over: threading.Event) -> None:
        while (request := read_request(connected)) is not None:
            server.requests.append(request)
            if next(count) >= after:
                misbehave(connected, over)
                return
            connected.sendall(OK)

    with listening(serve) as port:
        server = Hostile(port)
        yield server


@contextlib.contextmanager
def answering(*replies: bytes, port: int = 0) -> Iterator[Hostile]:
    """Sends these replies in turn, the last one for all further requests."""
    left = list(replies)

    def serve(connected: socket.socket, over: threading.Event) -> None:
        while (request := read_request(connected)) is not None:
            server.requests.append(request)
            connected.sendall(left.pop(0) if len(left) > 1 else left[0])

    server = Hostile(port)
    with listening(serve, port=port) as server.port:
        yield server


# -- a wire -------------------------------------------------------------------------------------------------------------

FATES = {
    "pass": "the request arrives, and so does its reply",
    "lose request": "the connection breaks before the request arrives",
    "lose reply": "the request arrives, then the connection breaks",
    "swallow request": "nothing arrives, and nothing breaks",
    "swallow reply": "the request arrives, its reply never does, and nothing breaks",
    "delay request": "the request arrives when its client has given up",
    "hold request": "the request arrives when the test says so",
    "hang up": "the request arrives, and the connection breaks at once",
    "full": "the server has no room, for longer than anybody waits",
    "500": "the request arrives, and a proxy answers",
    "502": "the request arrives, and a proxy answers",
    "504": "the request arrives, and a proxy answers",
}
_FULL = refusal(b'{"error": "worker_busy", "message": "m", "hint": "wait"}', "503 Service Unavailable", 30)
_PROXY = {
    status: refusal(b"<html>", f"{status} {reason}", 0.01)
    for status, reason in (("500", "Internal Server Error"), ("502", "Bad Gateway"), ("504", "Gateway Timeout"))
}


@dataclass
class Wire:
    """A proxy to the server at `port_behind` that applies a scripted fate to each request in order."""

    port_behind: int
    port: int = 0
    fates: list[str] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    done: int = 0
    """Requests whose fate is complete."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *fates: str) -> None:
        """Set the fates of the next requests; later ones pass."""
        assert set(fates) <= FATES.keys()
        with self.changed:
            self.fates[:] = fates

    @property
    def seqs(self) -> list[int]:
        return [int(header(request, "ludus-seq")) for request in self.requests]

    def heard(self, count: int) -> None:
        """Wait until this many requests have arrived."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= count, PATIENCE_S), (count, self.requests)

    def settled(self, count: int) -> None:
        """Wait until the fates of this many requests are complete: a client may give up earlier."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.done >= count, PATIENCE_S), (count, self.done, self.requests)

    def release(self) -> None:
        """Release held requests. Wait for `settled` until they are answered."""
        self.released.set()

    def serve(self, connected: socket.socket, over: threading.Event) -> None:
        with socket.create_connection(("127.0.0.1", self.port_behind), PATIENCE_S) as behind:
            while (request := read_request(connected)) is not None:
                with self.changed:
                    self.requests.append(request)
                    fate = self.fates.pop(0) if self.fates else "pass"
                    self.changed.notify_all()
                if fate == "delay request":
                    wait_for_end(connected, over)
                while fate == "hold request" and not self.released.wait(0.02) and not over.is_set():
                    pass
                reply = self._carried(request, fate, behind)
                with self.changed:
                    self.done += 1
                    self.changed.notify_all()
                if fate in ("swallow request", "swallow reply"):
                    wait_for_end(connected, over)
                if not reply:
                    return
                connected.sendall(reply)

    def _carried(self, request: bytes, fate: str, behind: socket.socket) -> bytes:
        """Forward a request, and return the reply for the client, if any."""
        if fate in ("lose request", "swallow request"):
            return b""
        if fate == "full":
            return _FULL
        behind.sendall(request)
        if fate == "hang up":
            return b""
        reply = read_reply(behind)
        return reply if fate == "pass" else _PROXY.get(fate, b"")


@contextlib.contextmanager
def wire(port_behind: int, *, tls: ssl.SSLContext | None = None) -> Iterator[Wire]:
    between = Wire(port_behind)
    with listening(between.serve, tls) as port:
        between.port = port
        yield between


# -- what all of them share ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(
    serve: Callable[[socket.socket, threading.Event], None], tls: ssl.SSLContext | None = None, port: int = 0
) -> Iterator[int]:
    """Serve every connection to the yielded port in its own thread, and close it afterwards."""
    over, threads, open_sockets = threading.Event(), list[threading.Thread](), list[socket.socket]()

    def handle(connected: socket.socket) -> None:
        with contextlib.suppress(OSError), connected:  # the client may leave at any moment
            served = connected if tls is None else tls.wrap_socket(connected, server_side=True)
            with served:
                open_sockets.append(served)
                if not over.is_set():
                    serve(served, over)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                connected = listener.accept()[0]
                connected.settimeout(PATIENCE_S)
                threads.append(threading.Thread(target=handle, args=(connected,), daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", port)) as listener:
        accepting = threading.Thread(target=accept, args=(listener,), daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(PATIENCE_S)
            for connected in open_sockets:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(PATIENCE_S)


def wait_for_end(connected: socket.socket, over: threading.Event) -> None:
    """Read and ignore data until the peer closes."""
    with contextlib.suppress(OSError):
        while not over.is_set() and connected.recv(65536):
            pass


def read_request(connected: socket.socket) -> bytes | None:
    """Read one request by its Content-Length; None at the end of the connection."""
    data = _read_head(connected)
    return None if data is None else _read_body(connected, data)


def read_reply(connected: socket.socket) -> bytes:
    data = _read_head(connected)
    assert data is not None, "the server behind the wire hung up"
    return _read_body(connected, data)


def _read_head(connected: socket.socket) -> bytes | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connected.recv(65536)
        if not more:
            return None
        data += more
    return data


def _read_body(connected: socket.socket, data: bytes) -> bytes:
    end = data.index(b"\r\n\r\n") + 4 + int(header(data, "content-length") or 0)
    while len(data) < end:
        more = connected.recv(65536)
        if not more:
            break
        data += more
    return data


def header(message: bytes, name: str) -> str:
    """The value; empty when there is none."""
    for line in message.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name:
            return value.strip()
    return ""


def body_of(message: bytes) -> bytes:
    return message.partition(b"\r\n\r\n")[2]
