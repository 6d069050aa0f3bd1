"""How far a run has come, and what of that a checkpoint keeps."""

from __future__ import annotations

import json

from ludus.algorithms.trainer import Progress


def sum_and_count(progress: Progress, result: str) -> tuple[float, float]:
    return progress.results[result].total, progress.results[result].count


def test_match_results_are_part_of_the_progress() -> None:
    before = Progress.with_window(10)
    for k in range(8):
        before.add_result("win/medium", total=float(k % 2) * 2, count=2)
    before.add_result("seconds", 300.0, 1)
    after = Progress.with_window(10)
    after.load_json(json.loads(json.dumps(before.to_json())))
    assert sum_and_count(after, "win/medium") == sum_and_count(before, "win/medium") == (6.0, 10.0)
    assert sum_and_count(after, "seconds") == (300.0, 1.0)
    for progress in (before, after):
        progress.add_result("win/medium", 4.0, 4)
    assert sum_and_count(after, "win/medium") == sum_and_count(before, "win/medium") == (8.0, 10.0)


def test_a_checkpoint_without_them_is_read() -> None:
    old = Progress.with_window(10).to_json()
    del old["results"]
    fresh = Progress.with_window(10)
    fresh.load_json(old)
    assert fresh.results == {}
