"""A program in this process: built in order, run in turns, closed in reverse, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.errors import LudusError
from ludus.experiments.assembly.in_process import InProcess
from ludus.experiments.assembly.program import Program


class Part:
    def __init__(self, name: str, diary: list[str], work: int = 0, other: Any = None) -> None:
        self.name, self.diary, self.work, self.other = name, diary, work, other
        diary.append(f"make {name}")

    def step(self) -> bool:
        if self.work == 0:
            return False
        self.work -= 1
        self.diary.append(f"step {self.name}")
        return True

    def close(self) -> None:
        self.diary.append(f"close {self.name}")


def test_components_are_joined_take_turns_and_are_closed_in_reverse() -> None:
    diary: list[str] = []
    program = Program()
    first = program.add_worker("first", Part, "a", diary, work=2)
    second = program.add_worker("second", Part, "b", diary, work=2, other=first)
    with InProcess(program) as runtime:
        assert runtime[second].other is runtime[first]
        runtime.run(lambda: len(diary) >= 6)
    assert diary == ["make a", "make b", "step a", "step b", "step a", "step b", "close b", "close a"]


def test_what_was_made_is_closed_when_a_later_component_fails() -> None:
    diary: list[str] = []

    def broken() -> None:
        raise LudusError("no")

    program = Program()
    program.add("first", Part, "a", diary)
    program.add("second", broken)
    with pytest.raises(LudusError, match="no"), InProcess(program):
        pass
    assert diary == ["make a", "close a"]


def test_a_program_that_can_never_go_on_says_so_instead_of_hanging() -> None:
    program = Program()
    program.add_worker("idle", Part, "a", [])
    with InProcess(program) as runtime, pytest.raises(LudusError, match="wait forever"):
        runtime.run(lambda: False)


def test_names_are_unique_and_references_point_backwards() -> None:
    program = Program()
    handle = program.add("part", Part, "a", [])
    with pytest.raises(ValueError, match="already"):
        program.add("part", Part, "a", [])
    with pytest.raises(ValueError, match="does not have"):
        Program().add("other", Part, "b", [], other=handle)
