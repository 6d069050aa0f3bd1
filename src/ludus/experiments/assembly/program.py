"""A program: the components of a run and how they are joined, as data. A runtime decides where each of them lives.

    program = Program()
    memory = program.add("memory", make_memory, "local", spec, rows=64, blocks=1)
    program.add_worker("sampler", Sampler, environments, source, memory, seed=0)

`add` and `add_worker` return a handle; given as an argument to another component, the runtime replaces it by the component itself when both
live in one process, and by something with the same methods when they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Worker(Protocol):
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
    works: bool = False


class Program:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """A component that serves others. Nodes may refer to nodes added before them."""
        return self._add(Node(name, make, args, kwargs))

    def add_worker(self, name: str, make: Callable[..., Worker], *args: Any, **kwargs: Any) -> Handle:
        """A component that the runtime lets work."""
        return self._add(Node(name, make, args, kwargs, works=True))

    def _add(self, node: Node) -> Handle:
        known = {other.name for other in self.nodes}
        if node.name in known:
            raise ValueError(f"The program has a component {node.name!r} already.")
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, Handle) and value.name not in known:
                raise ValueError(f"{node.name!r} refers to {value.name!r}, which the program does not have.")
        self.nodes.append(node)
        return Handle(node.name)
