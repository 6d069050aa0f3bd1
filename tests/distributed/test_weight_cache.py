"""Weights between machines: complete or not at all, once per machine, and no directory outlives its users."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.distributed.frames import Header
from ludus.distributed.hub import weight_cache
from ludus.distributed.hub.rpc import RpcConnection
from ludus.distributed.hub.server import Hub, HubLocation, ListenAddress, find_or_start
from ludus.distributed.hub.weight_cache import NodeCacheDir, WeightCaches
from ludus.distributed.hub.weight_transfer import WeightReceiver, WeightSender
from ludus.errors import Damaged, NotFound, StoreFull, UsageError
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader, stage
from ludus.process.auth import Authenticator, write_token

RUN = "0123456789abcdef"


# -- the directory of a run on another machine


def test_all_processes_of_a_machine_have_one_directory_and_the_last_removes_it(tmp_path: Path) -> None:
    one, two = NodeCacheDir(tmp_path, RUN), NodeCacheDir(tmp_path, RUN)
    assert one.path == two.path
    assert one.node == two.node
    assert one.path.stat().st_mode & 0o777 == 0o700
    (one.path / "file").touch()
    one.close()
    assert two.path.exists()
    two.close()
    assert list(tmp_path.iterdir()) == []
    again = NodeCacheDir(tmp_path, RUN)
    assert again.node != two.node
    again.close()


@contextlib.contextmanager
def another_process(then: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """A copy of this process that does something and then waits; what is given kills it."""
    tell, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            held = then()
            os.write(told, b"!")
            signal.pause()
            del held
        finally:
            os._exit(1)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    try:
        os.close(told)
        assert os.read(tell, 1) == b"!"
        yield kill
    finally:
        kill()
        os.close(tell)


def test_directories_whose_users_were_killed_are_swept_and_those_in_use_are_not(tmp_path: Path) -> None:
    living = NodeCacheDir(tmp_path, "a" * 16)
    with another_process(lambda: NodeCacheDir(tmp_path, "b" * 16)) as kill:
        NodeCacheDir(tmp_path, RUN).close()
        assert len(list(tmp_path.glob("ludus-away-*"))) == 2
        kill()
        NodeCacheDir(tmp_path, RUN).close()
        assert list(tmp_path.glob("ludus-away-*")) == [living.path]
    living.close()


def test_a_copy_of_the_process_does_not_hold_the_directory(tmp_path: Path) -> None:
    share = NodeCacheDir(tmp_path, RUN)
    with another_process(share.release_after_fork):
        share.close()
        assert not share.path.exists()


def test_a_directory_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"ludus-away-{os.getuid()}-{RUN}").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="not a private directory"):
        NodeCacheDir(tmp_path, RUN)
    with pytest.raises(Damaged, match="not the id of a run"):
        NodeCacheDir(tmp_path, "../x")


# -- the way out


class Listener:
    """The peer of a connection, as far as a source needs it."""

    is_closed = False

    def send(self, header: Header, *parts: bytes) -> None:
        raise AssertionError(header)


def weights(value: float, size: int = 1000) -> dict[str, Any]:
    return {"w": np.full(size, value, np.float32)}


def publish(board: SharedWeights, version: int, value: float) -> None:
    board.publish(version, stage(board.directory, weights(value)))


def test_a_follower_slower_than_the_publisher_still_gets_a_whole_version(tmp_path: Path) -> None:
    board, answers = SharedWeights(tmp_path / "0001"), asyncio.Queue[Any]()
    peer: Any = Listener()
    publish(board, 1, 1)

    async def main() -> None:
        source = WeightSender(lambda who, header, *parts: answers.put_nowait(header))
        source.wait_for_newer((peer, 1), "m", 0, 5, board.directory)
        head = await asyncio.wait_for(answers.get(), 5)
        for version in range(2, 9):
            publish(board, version, version)
            source.on_publish("m")
        half = head["size"] // 2
        data = bytes(source.part(peer, "m", 1, 0, half)) + bytes(source.part(peer, "m", 1, half, head["size"] - half))
        assert hashlib.sha256(data).hexdigest() == head["sum"]
        with pytest.raises(NotFound, match="not being sent"):
            source.part(peer, "m", 1, 0, 10)
        source.wait_for_newer((peer, 2), "m", 1, 5, board.directory)
        assert (await asyncio.wait_for(answers.get(), 5))["version"] == 8, "the newest, not the next"
        source.on_disconnect(peer)
        assert source._being_sent == {}

    asyncio.run(main())


def test_a_request_is_answered_by_a_new_version_or_after_its_time_out(tmp_path: Path) -> None:
    board, answers = SharedWeights(tmp_path / "0001"), asyncio.Queue[Any]()
    peer: Any = Listener()
    publish(board, 1, 1)

    async def main() -> None:
        source = WeightSender(lambda who, header, *parts: answers.put_nowait((who[1], header["version"], bool(header["size"]))))
        source.wait_for_newer((peer, 1), "m", 1, 0.01, board.directory)
        assert await asyncio.wait_for(answers.get(), 5) == (1, 1, False)
        source.wait_for_newer((peer, 2), "m", 1, 60, board.directory)
        source.on_publish("another")
        source.on_publish("m")  # nothing new: the same model was made again
        publish(board, 2, 2)
        source.on_publish("m")
        assert await asyncio.wait_for(answers.get(), 5) == (2, 2, True)
        source.wait_for_newer((peer, 3), "m", 2, 60, board.directory)
        source.on_disconnect(peer)
        publish(board, 3, 3)
        source.on_publish("m")
        assert answers.empty()

    asyncio.run(main())


# -- the way in


def test_parts_become_a_staged_file_and_those_of_a_peer_that_is_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    landing, peer = WeightReceiver(tmp_path / "staging"), Listener()
    name = f"aside-{'0' * 32}"
    landing.write_part(peer, name, 0, b"abc")  # type: ignore[arg-type]
    landing.write_part(peer, name, 3, b"def")  # type: ignore[arg-type]
    assert (tmp_path / "staging" / name).read_bytes() == b"abcdef"
    with pytest.raises(Damaged, match="begins at 1, not at 6"):
        landing.write_part(peer, name, 1, b"x")  # type: ignore[arg-type]
    with pytest.raises(Damaged, match="not the name of a staged file"):
        landing.write_part(peer, "../x", 0, b"x")  # type: ignore[arg-type]
    landing.on_disconnect(peer)  # type: ignore[arg-type]
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_full_file_system_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    landing = WeightReceiver(Path("/dev/full").parent / "nowhere")
    with pytest.raises(StoreFull, match="Cannot write weights"):
        landing.write_part(Listener(), f"aside-{'0' * 32}", 0, b"abc")  # type: ignore[arg-type]
    assert landing._sizes == {}


# -- a mirror and a hub


class Line:
    """What a client is to its mirrors, on an event loop of the test."""

    def __init__(self, place: HubLocation, hub: Hub) -> None:
        self._place, self._hub = place, hub
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.submit(self._shut()).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()

    async def _shut(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)

    async def connect(self) -> RpcConnection:
        return await RpcConnection.open(self._hub.address, "The hub", token_file=self._place.token_file)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def check(self) -> None:
        pass


def test_damage_on_the_way_is_noticed_and_what_was_damaged_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_token(tmp_path / "token")
    _, hub = find_or_start(tmp_path, listen=ListenAddress("127.0.0.1", token_file=str(tmp_path / "token")))
    assert hub is not None
    assert isinstance(hub._authenticator, Authenticator)
    staged = stage(Path(hub.location.staging), weights(7))
    description = {"class": "x:Y", "args": [], "kwargs": {}}
    info = hub._models.registry.create("m", description, staged.name, 0.0)
    line = Line(hub.location, hub)
    part, calls = WeightSender.part, []

    def damaged(self: WeightSender, *args: Any) -> memoryview:
        data = part(self, *args)
        calls.append(1)
        return memoryview(bytes(len(data))) if len(calls) == 1 else data

    monkeypatch.setattr(WeightSender, "part", damaged)
    monkeypatch.setattr(weight_cache, "RETRY_S", 0.01)
    share = NodeCacheDir(tmp_path, hub.run_id)
    mirrors = WeightCaches(share.path, line)
    try:
        reader = mirrors.reader(info, 20)
        assert isinstance(reader, SharedWeightsReader)
        assert len(calls) == 2
        version, read = reader.read()
        assert version == 1
        np.testing.assert_array_equal(read["w"], weights(7)["w"])
        assert list((share.path / Path(info["board"]).name).glob("aside-*")) == []
    finally:
        line.close()
        hub.close()
        share.close()
