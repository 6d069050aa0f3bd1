"""The board: the newest weights, readable by every process of the machine, never torn."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from ludus.core.tree import Array
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, StoreError, StoreFull
from ludus.models.policy import Policy
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader, stage
from tests.transport.killing import forked, reap

Publish = Callable[[SharedWeights, int], None]


def weights(value: float) -> dict[str, Array]:
    return {"w": np.full((64, 33), value, np.float32), "n": np.full((), value, np.int64), "flag": np.array([value > 1])}


def publish(board: SharedWeights, version: int) -> None:
    board.publish(version, stage(board.directory, weights(version)))


def publish_copy(board: SharedWeights, version: int) -> None:
    board.publish(version, weights(version))


both_ways = pytest.mark.parametrize("publish", [publish, publish_copy])


@both_ways
def test_a_reader_sees_what_was_published_exactly(tmp_path: Path, publish: Publish) -> None:
    board = SharedWeights(tmp_path / "b")
    reader = SharedWeightsReader(tmp_path / "b")
    assert reader.version == 0
    publish(board, 7)
    assert reader.version == 7
    version, read = reader.read()
    assert version == 7
    for name, array in weights(7).items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


@both_ways
def test_arrays_that_were_read_never_change(tmp_path: Path, publish: Publish) -> None:
    board = SharedWeights(tmp_path)
    publish(board, 1)
    held = SharedWeightsReader(tmp_path).read()[1]
    for version in range(2, 12):
        publish(board, version)
    np.testing.assert_array_equal(held["w"], weights(1)["w"])
    with pytest.raises(ValueError, match="read-only"):
        held["w"][0, 0] = 5


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    board = SharedWeights(tmp_path)
    for version in range(1, 6):
        publish(board, version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000000004.safetensors", "000000000005.safetensors", "version"]


@both_ways
def test_versions_only_grow(tmp_path: Path, publish: Publish) -> None:
    board = SharedWeights(tmp_path)
    publish(board, 3)
    with pytest.raises(StoreError, match="does not come after 3"):
        publish(board, 3)
    assert board.version == 3


def test_missing_shared_weights_are_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no weights"):
        SharedWeightsReader(tmp_path / "nowhere")
    board = SharedWeights(tmp_path)
    publish(board, 1)
    (tmp_path / "000000000001.safetensors").unlink()
    with pytest.raises(NotFound, match="version 1"):
        SharedWeightsReader(tmp_path).read()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="nowhere"):
        stage(tmp_path / "nowhere", weights(1))


@both_ways
def test_no_reader_in_any_process_ever_sees_half_a_version(tmp_path: Path, publish: Publish) -> None:
    """One writer that keeps a single file, so that readers lose the race as often as possible; two forked readers."""
    board = SharedWeights(tmp_path, keep=1)
    publish(board, 1)
    last = 400
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if _reads_whole_versions(tmp_path, last) else 3
            finally:
                os._exit(code)
        children.append(pid)
    writer = threading.Thread(target=_publish_all, args=(board, last, publish))
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def _publish_all(board: SharedWeights, last: int, publish: Publish) -> None:
    for version in range(2, last + 1):
        publish(board, version)


def _reads_whole_versions(directory: Path, last: int) -> bool:
    reader, seen = SharedWeightsReader(directory), 0
    while seen < last:
        version, read = reader.read()
        if version < seen or not (read["w"] == version).all() or read["n"] != version:
            return False
        seen = version
    return True


# -- weights at hand: slots ---------------------------------------------------------------------------------------------


class Large(nn.Module):
    """One number everywhere, in parameters and in buffers; large enough to be overtaken while it is copied."""

    def __init__(self, number: int = 0, width: int = 1000) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((width, 97), float(number)))
        self.second = nn.Parameter(torch.full((7,), float(number)))
        self.register_buffer("count", torch.full((3,), number))
        self.register_buffer("nothing", torch.zeros(0))

    def number(self) -> int:
        """Of the version inside; fails when there are parts of two."""
        numbers = {float(x) for tensor in self.state_dict().values() for x in tensor.unique()}
        assert len(numbers) == 1, f"parts of the versions {numbers}"
        return int(numbers.pop())


def arrays_of(model: nn.Module) -> dict[str, Array]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_weights_are_loaded_into_a_model_in_place_with_its_buffers(tmp_path: Path) -> None:
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    learner, actor = (Policy(space, gym.spaces.Discrete(3), normalise_observations=True) for _ in range(2))
    learner.update_normaliser(torch.randn(10, 4))
    board = SharedWeights(tmp_path, learner.weights())
    reader = SharedWeightsReader(tmp_path)
    parameter = next(actor.parameters())
    with pytest.raises(NotFound, match="version 0"):
        reader.load_into(actor)
    board.publish(4, learner)
    assert reader.load_into(actor) == 4
    assert next(actor.parameters()) is parameter
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(actor.state_dict()[name], value, rtol=0, atol=0)
    assert any("norm" in name for name in learner.state_dict())


def test_what_is_published_is_a_copy(tmp_path: Path) -> None:
    board, model, twin = SharedWeights(tmp_path), Large(1, 10), Large(0, 10)
    board.publish(1, model)
    with torch.no_grad():
        model.first.fill_(5)
    assert SharedWeightsReader(tmp_path).load_into(twin) == 1
    assert twin.number() == 1


def test_one_board_may_be_published_to_in_both_ways(tmp_path: Path) -> None:
    board, reader, model = SharedWeights(tmp_path), SharedWeightsReader(tmp_path), Large(0, 10)
    for version in range(1, 10):
        given = Large(version, 10)
        board.publish(version, given if version % 3 else stage(tmp_path, arrays_of(given)))
        assert reader.version == version
        assert reader.load_into(model) == version
        assert model.number() == version
        assert (reader.read()[1]["first"] == version).all()
    assert len(list(tmp_path.glob("*.safetensors"))) <= 2


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    board, reader, other = SharedWeights(tmp_path, arrays_of(Large(0, 10))), SharedWeightsReader(tmp_path), Large(7, 11)
    board.publish(1, Large(1, 10))
    with pytest.raises(IncompatibleCheckpoint, match="first is float32"):
        board.publish(2, other)
    with pytest.raises(IncompatibleCheckpoint, match="first is float32"):
        reader.load_into(other)
    assert (reader.version, other.number()) == (1, 7)


def test_a_new_writer_goes_on_where_the_one_before_was(tmp_path: Path) -> None:
    reader, model = None, Large(0, 10)
    for version in range(1, 8):
        SharedWeights(tmp_path).publish(version, Large(version, 10))
        reader = reader or SharedWeightsReader(tmp_path)
        assert reader.load_into(model) == version == model.number()


def test_no_room_for_the_slots_is_an_error(tmp_path: Path) -> None:
    def large() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(StoreFull, match="Cannot allocate"):
            SharedWeights(tmp_path, arrays_of(Large()))
        assert [p.name for p in tmp_path.iterdir()] == ["version"]

    assert reap(_forked(large)) == 0


@pytest.mark.parametrize(
    "damage", [lambda d: b"X" + d[1:], lambda d: d[:30] + b"#" + d[31:], lambda d: d[:5000], lambda d: d[:4]]
)
def test_damaged_slots_are_noticed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    SharedWeights(tmp_path).publish(1, Large(1, 10))
    (tmp_path / "slots").write_bytes(damage((tmp_path / "slots").read_bytes()))
    with pytest.raises(Damaged, match="slots"):
        SharedWeightsReader(tmp_path).read()


def test_a_reader_that_is_overtaken_reads_again(tmp_path: Path) -> None:
    """Three readers load as fast as they can while a writer writes as fast as it can."""
    board, last = SharedWeights(tmp_path), 600
    board.publish(1, Large(1))

    def load() -> None:
        reader, model, seen = SharedWeightsReader(tmp_path), Large(), 0
        while seen < last:
            version = reader.load_into(model)
            assert version == model.number()
            assert version >= seen
            seen = version

    children = [_forked(load) for _ in range(3)]
    arrays = arrays_of(Large())
    for version in range(2, last + 1):
        for array in arrays.values():
            array.fill(version)
        board.publish(version, arrays)
    assert [reap(pid) for pid in children] == [0, 0, 0]


def test_a_writer_that_is_killed_leaves_the_version_before(tmp_path: Path) -> None:
    moments, reader, model = random.Random(3), None, Large()
    SharedWeights(tmp_path).publish(1, Large(1))
    for _ in range(15):
        pid = _forked(lambda: _publish_for_ever(tmp_path))
        reader = reader or SharedWeightsReader(tmp_path)
        before, end = reader.version, time.monotonic() + 30
        while reader.version == before and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.003))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert reader.version > before
        assert reader.load_into(model) == reader.version == model.number()


def _publish_for_ever(directory: Path) -> None:
    board, model = SharedWeights(directory), Large()
    while True:
        version = board.version + 1
        for tensor in model.state_dict().values():
            tensor.fill_(version)
        board.publish(version, model)


def _forked(work: Callable[[], None]) -> int:
    def alone() -> None:
        torch.set_num_threads(1)  # the threads of the parent are not there after a fork
        work()

    return forked(alone)
