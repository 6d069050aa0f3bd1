"""A program: the components of a run and how they are joined, as data. A runtime decides where each of them lives.

    program = Program()
    memory = program.add("memory", make_memory, "local", spec, rows=64, blocks=1)
    program.add("sampler", Sampler, environments, source, memory, seed=0)

`add` returns a handle; given as an argument to another component, the runtime replaces it by the component itself when both
live in one process, and by something with the same methods when they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Component(Protocol):
    """A component that works: the runtime calls `step` again and again. Others (a memory, a pool) only serve."""

    def step(self) -> bool:
        """Do one piece of work; False when there was nothing to do."""
        ...


@dataclass(frozen=True)
class Handle:
    """A reference to a component of the same program."""

    name: str


@dataclass(frozen=True)
class Node:
    name: str
    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Program:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """Nodes may refer to nodes added before them."""
        known = {node.name for node in self.nodes}
        if name in known:
            raise ValueError(f"The program has a component {name!r} already.")
        for value in (*args, *kwargs.values()):
            if isinstance(value, Handle) and value.name not in known:
                raise ValueError(f"{name!r} refers to {value.name!r}, which the program does not have.")
        self.nodes.append(Node(name, make, args, kwargs))
        return Handle(name)
