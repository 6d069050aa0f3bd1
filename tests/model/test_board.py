"""The board: the newest weights, readable by every process of the machine, never torn."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ludus.errors import NotFound, StoreError, StoreFull
from ludus.model.board import Board, BoardReader, stage
from ludus.tree import Array


def weights(value: float) -> dict[str, Array]:
    return {"w": np.full((64, 33), value, np.float32), "n": np.full((), value, np.int64), "flag": np.array([value > 1])}


def publish(board: Board, version: int) -> None:
    board.publish(version, stage(board.directory, weights(version)))


def test_a_reader_sees_what_was_published_exactly(tmp_path: Path) -> None:
    board = Board(tmp_path / "b")
    reader = BoardReader(tmp_path / "b")
    assert reader.version == 0
    publish(board, 7)
    assert reader.version == 7
    version, read = reader.read()
    assert version == 7
    for name, array in weights(7).items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_arrays_that_were_read_never_change(tmp_path: Path) -> None:
    board = Board(tmp_path)
    publish(board, 1)
    held = BoardReader(tmp_path).read()[1]
    for version in range(2, 12):
        publish(board, version)
    np.testing.assert_array_equal(held["w"], weights(1)["w"])
    with pytest.raises(ValueError, match="read-only"):
        held["w"][0, 0] = 5


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    board = Board(tmp_path)
    for version in range(1, 6):
        publish(board, version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000000004.safetensors", "000000000005.safetensors", "version"]


def test_versions_only_grow(tmp_path: Path) -> None:
    board = Board(tmp_path)
    publish(board, 3)
    with pytest.raises(StoreError, match="does not come after 3"):
        publish(board, 3)
    assert board.version == 3


def test_a_board_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no weights"):
        BoardReader(tmp_path / "nowhere")
    board = Board(tmp_path)
    publish(board, 1)
    (tmp_path / "000000000001.safetensors").unlink()
    with pytest.raises(NotFound, match="version 1"):
        BoardReader(tmp_path).read()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="nowhere"):
        stage(tmp_path / "nowhere", weights(1))


def test_no_reader_in_any_process_ever_sees_half_a_version(tmp_path: Path) -> None:
    """One writer that keeps a single file, so that readers lose the race as often as possible; two forked readers."""
    board = Board(tmp_path, keep=1)
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
    writer = threading.Thread(target=_publish_all, args=(board, last))
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]


def _publish_all(board: Board, last: int) -> None:
    for version in range(2, last + 1):
        publish(board, version)


def _reads_whole_versions(directory: Path, last: int) -> bool:
    reader, seen = BoardReader(directory), 0
    while seen < last:
        version, read = reader.read()
        if version < seen or not (read["w"] == version).all() or read["n"] != version:
            return False
        seen = version
    return True
