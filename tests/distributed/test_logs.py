"""Logs of workers: rotated at the start of a worker and while it lives, without losing a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ludus.process.workers import forkserver


def test_a_large_log_is_put_aside_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "LOG_BYTES", 4)
    log = tmp_path / "one.log"
    assert not forkserver.rotate(log), "there is none"
    for text in ("first", "second", "third", "fourth"):
        log.write_text(text)
        assert forkserver.rotate(log)
    log.write_text("tiny")
    assert not forkserver.rotate(log)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"one.log": "tiny", "one.log.1": "fourth", "one.log.2": "third", "one.log.3": "second"}


_WRITER = """
import sys
from pathlib import Path
from ludus.process.workers import forkserver

forkserver.LOG_BYTES, forkserver.LOG_CHECK_S = 2000, 0.005
log = Path(sys.argv[1])
forkserver._log_output_to(log)
number = 0
while not Path(f"{log}.3").exists():
    print(number, flush=True)
    number += 1
print(number, flush=True)
"""


def test_the_log_of_a_worker_that_writes_a_lot_is_rotated_while_it_lives_and_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "talkative.log"
    subprocess.run([sys.executable, "-c", _WRITER, str(log)], check=True, timeout=60)
    files = [path for path in (*(Path(f"{log}.{n}") for n in (3, 2, 1)), log) if path.exists()]
    lines = [int(line) for line in "".join(path.read_text() for path in files).splitlines() if line]
    assert len(files) >= 3
    assert lines == list(range(lines[0], lines[-1] + 1))
