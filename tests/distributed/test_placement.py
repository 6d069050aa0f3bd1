"""Placement of workers: even by cores, and without unnecessary moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.distributed.placement import place

CORES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 64), min_size=1)


def load(placed: dict[int, str], cores: dict[str, int]) -> float:
    count = Counter(placed.values())
    return max(count[node] / cores[node] for node in cores)


@given(st.integers(0, 80), CORES)
def test_no_other_placement_of_one_worker_makes_the_fullest_node_less_full(workers: int, cores: dict[str, int]) -> None:
    placed = place(workers, cores, {})
    assert sorted(placed) == list(range(workers))
    count = Counter(placed.values())
    for full in cores:
        for other in cores:
            if count[full]:
                assert count[full] / cores[full] <= (count[other] + 1) / cores[other] + 1e-9


@given(st.integers(1, 40), CORES)
def test_what_is_placed_well_stays(workers: int, cores: dict[str, int]) -> None:
    placed = place(workers, cores, {})
    assert place(workers, cores, placed) == placed


@given(st.integers(1, 40), CORES, st.data())
def test_when_a_node_is_lost_only_its_workers_move(workers: int, cores: dict[str, int], data: st.DataObject) -> None:
    if len(cores) < 2:
        return
    placed = place(workers, cores, {})
    lost = data.draw(st.sampled_from(sorted(cores)))
    left = {node: number for node, number in cores.items() if node != lost}
    after = place(workers, left, placed)
    assert lost not in after.values()
    assert load(after, left) <= load(place(workers, left, {}), left) + 1e-9


def test_a_node_that_comes_back_gets_its_share() -> None:
    alone = place(4, {"a": 2}, {})
    both = place(4, {"a": 2, "b": 2}, alone)
    assert Counter(both.values()) == {"a": 2, "b": 2}
    assert [worker for worker in both if both[worker] != alone[worker]] == [2, 3]


def test_without_a_node_there_is_no_place() -> None:
    with pytest.raises(ValueError):
        place(1, {}, {})
