"""A replaced file is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.io.atomic_file import (
    TEMPORARY,
    create_once,
    open_for_replace,
    path_for_replace,
    replace_file,
    replace_json,
    sync_directory,
    temporary_path,
)

_KILLED_BEFORE_RENAME = """
import os, pathlib, sys
from ludus.io.atomic_file import replace_file
os.replace = lambda *_: os._exit(9)
replace_file(pathlib.Path(sys.argv[1]), b"new", durable=True)
"""


@given(data=st.one_of(st.binary(max_size=4096), st.text(max_size=1024)), durable=st.booleans())
def test_a_file_holds_what_was_written_last(data: bytes | str, durable: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        for content in ("an earlier content that may be longer", data):
            replace_file(path, content, durable=durable)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
        assert os.listdir(directory) == ["file"]


@given(parts=st.lists(st.binary(max_size=64)), failing=st.integers(0, 10))
def test_an_exception_at_any_point_leaves_the_old_file(parts: list[bytes], failing: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(b"old")
        try:
            with open_for_replace(path) as file:
                for number, part in enumerate(parts):
                    if number == failing:
                        raise ZeroDivisionError
                    file.write(part)
        except ZeroDivisionError:
            assert path.read_bytes() == b"old"
        else:
            assert path.read_bytes() == b"".join(parts)
        assert os.listdir(directory) == ["file"]


def test_json_is_read_back(tmp_path: Path) -> None:
    replace_json(tmp_path / "value.json", {"ä": [1, None]}, indent=1)
    assert json.loads((tmp_path / "value.json").read_bytes()) == {"ä": [1, None]}


@pytest.mark.parametrize("mode", [0o600, 0o666, 0o640])
def test_mode_bits_are_those_asked_for_without_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o027)
    try:
        path = tmp_path / "file"
        path.write_bytes(b"old")
        path.chmod(0o777)
        with open_for_replace(path, mode=mode) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == mode & ~0o027  # already while it is written
        assert path.stat().st_mode & 0o777 == mode & ~0o027
        create_once(tmp_path / "once", b"", mode=mode)
        assert (tmp_path / "once").stat().st_mode & 0o777 == mode & ~0o027
    finally:
        os.umask(before)


def test_a_process_killed_before_the_rename_leaves_the_old_file_and_a_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    killed = subprocess.run([sys.executable, "-c", _KILLED_BEFORE_RENAME, str(path)], check=False, timeout=60)
    assert killed.returncode == 9
    assert path.read_bytes() == b"old"
    (left,) = tmp_path.glob(f"{TEMPORARY}*")
    assert left.read_bytes() == b"new"
    replace_file(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_an_error_is_reported_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "directory", b"x")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "absent" / "file", b"x")
    assert os.listdir(tmp_path) == ["directory"]


def test_readers_find_a_complete_file_while_many_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + number]) * 50_000 for number in range(4)]
    replace_file(path, contents[0])

    def write(content: bytes) -> None:
        for _ in range(50):
            replace_file(path, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    for writer in writers:
        writer.join()
    assert os.listdir(tmp_path) == ["file"]


def test_of_many_that_create_a_file_one_succeeds(tmp_path: Path) -> None:
    path, won, lost, ready = tmp_path / "file", list[bytes](), list[bytes](), threading.Barrier(8)

    def create(content: bytes) -> None:
        ready.wait(30)
        try:
            create_once(path, content)
            won.append(content)
        except FileExistsError:
            lost.append(content)

    writers = [threading.Thread(target=create, args=(b"%d" % number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.read_bytes()] == won
    assert len(lost) == 7
    assert os.listdir(tmp_path) == ["file"]


def test_a_caller_can_create_the_file_itself_and_finds_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with path_for_replace(path) as temporary:
        assert (temporary.parent, temporary.suffix) == (tmp_path, ".mp4")
        temporary.write_bytes(b"film")
        assert not path.exists()
    assert path.read_bytes() == b"film"
    with pytest.raises(FileNotFoundError), path_for_replace(path):
        pass  # a caller that creates nothing
    with pytest.raises(ZeroDivisionError), path_for_replace(path) as temporary:
        1 // temporary.write_bytes(b"")
    assert path.read_bytes() == b"film"
    assert os.listdir(tmp_path) == ["film.mp4"]


def test_a_name_of_the_greatest_length_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    replace_file(path, b"1")
    assert path.read_bytes() == b"1"
    assert len(temporary_path(path).name) < 40


def test_the_content_is_synced_before_the_rename_and_the_directory_after_it(tmp_path: Path) -> None:
    calls: list[str] = []
    replace, sync = os.replace, os.fsync

    def note_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    def note_sync(descriptor: int) -> None:
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    with mock.patch("os.replace", note_replace), mock.patch("os.fsync", note_sync):
        replace_file(tmp_path / "file", b"1", durable=True)
        replace_file(tmp_path / "file", b"2")
    assert calls == ["file", "rename", "directory", "rename"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_not_an_error(tmp_path: Path, number: int) -> None:
    with mock.patch("os.fsync", side_effect=OSError(number, "no")):
        replace_file(tmp_path / "file", b"1", durable=True)
    assert (tmp_path / "file").read_bytes() == b"1"


def test_a_failed_sync_is_an_error_and_keeps_the_old_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")
    with mock.patch("os.fsync", side_effect=OSError(errno.EIO, "lost")):
        with pytest.raises(OSError, match="lost"):
            replace_file(tmp_path / "file", b"new", durable=True)
        with pytest.raises(OSError, match="lost"):
            sync_directory(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
