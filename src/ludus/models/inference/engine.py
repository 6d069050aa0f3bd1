"""Inference in this process: rows from many callers become one forward pass, and new weights arrive between two of them.

    inference = Inference(module, inputs, reader)
    logits = await inference.forward(observation)        # on any event loop; batched with whoever else asks in this turn
    logits = inference.call(observation)                 # from any thread; batched with other threads that wait

Every batch is stacked into memory of its own, and every caller gets arrays of its own: nothing that is handed out is ever
written again.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Array, Tree
from ludus.errors import UsageError
from ludus.models.inference.micro_batcher import Batcher
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules

MAX_BATCH_SIZE = 256
_MAX_LANES = 64
_NOTHING: Any = object()
_ARRAY, _running = np.ndarray, asyncio._get_running_loop  # looked up once: they are in the path of every request


class Versions(Protocol):
    """Where new weights come from: a `BoardReader`, or nothing at all."""

    @property
    def version(self) -> int: ...
    def read(self) -> tuple[int, dict[str, Array]]: ...


# -- inputs -------------------------------------------------------------------------------------------------------------


class Inputs:
    """The declared inputs of a model; `fits` is the quick test for the commonest kind, a lone array."""

    def __init__(self, declared: Mapping[str, Any] | None) -> None:
        self.declared = declared if declared and (declared["args"] or declared["kwargs"]) else None
        self.structure: Hashable | None = None
        self.dtype: np.dtype[Any] | None = None
        self.shape: tuple[int, ...] | None = None
        if self.declared:
            args = tuple(modules.example_of(spec) for spec in self.declared["args"])
            kwargs = {key: modules.example_of(spec) for key, spec in self.declared["kwargs"].items()}
            self.structure = _flatten((args, kwargs), [])
            if len(args) == 1 and not kwargs and isinstance(args[0], np.ndarray):
                self.dtype, self.shape = args[0].dtype, args[0].shape

    def taken_apart(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree]) -> tuple[Hashable, list[Array]]:
        """(structure, arrays) of one caller's inputs. Raises UsageError when they are not as declared."""
        leaves: list[Array] = []
        structure = _flatten((args, dict(kwargs)), leaves)
        if not leaves:
            raise UsageError("A model needs at least one array as its input.")
        if self.structure is not None and structure != self.structure:
            raise UsageError(
                f"The inputs do not fit the model: {_told(structure)} was given, it takes {_told(self.structure)}.",
                "Inputs have no batch dimension, and exactly the declared shapes and dtypes.",
            )
        return structure, leaves


def _flatten(tree: Tree, leaves: list[Array]) -> Hashable:
    """Append the arrays of a tree to `leaves`; returns its structure, which can be compared and hashed."""
    if tree is None:
        return ("none",)
    if isinstance(tree, Mapping):
        return "dict", tuple((key, _flatten(tree[key], leaves)) for key in sorted(tree))
    if isinstance(tree, (tuple, list)):
        return "tuple", tuple(_flatten(item, leaves) for item in tree)
    try:
        array = np.asarray(tree)
    except ValueError as error:
        raise UsageError(f"An input is not an array: {error}.") from error
    if array.dtype.kind not in "biuf":
        raise UsageError(f"An input is a {type(tree).__name__}, not an array of numbers.")
    leaves.append(array)
    return array.dtype, array.shape


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """The tree of a structure, with `leaves` (consumed from the front) as its leaves."""
    if structure[0] == "dict":
        return {key: unflatten(item, leaves) for key, item in structure[1]}
    if structure[0] == "tuple":
        return tuple(unflatten(item, leaves) for item in structure[1])
    return None if structure[0] == "none" else leaves.pop(0)


def _told(structure: Any) -> str:
    """A structure in words. The outermost one is the pair (args, kwargs)."""
    (_, (args, kwargs)) = structure
    parts = [_told_part(item) for item in args[1]] + [f"{key}={_told_part(item)}" for key, item in kwargs[1]]
    return f"({', '.join(parts)})"


def _told_part(structure: Any) -> str:
    if structure[0] == "dict":
        return "{" + ", ".join(f"{key}: {_told_part(item)}" for key, item in structure[1]) + "}"
    if structure[0] == "tuple":
        return "(" + ", ".join(_told_part(item) for item in structure[1]) + ")"
    return "None" if structure[0] == "none" else f"{structure[0]}{list(structure[1])}"


def stacked(arrays: Sequence[Array]) -> Array:
    """Rows of one shape and dtype along a new first axis, in fresh memory. Three times as fast as `np.stack`."""
    first = arrays[0]
    if first.ndim == 0:
        return np.array(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *first.shape)


# -- outputs ------------------------------------------------------------------------------------------------------------


def rows_of(outputs: Any, count: int, where: str = "") -> list[Any]:
    """Take the batch dimension off: one value per row, each with memory of its own. Raises UsageError."""
    if isinstance(outputs, (Tensor, np.ndarray)):
        array = outputs.detach().cpu().numpy() if isinstance(outputs, Tensor) else outputs
        if array.ndim == 0 or array.shape[0] != count:
            raise UsageError(
                f"The model's output{where} has shape {list(array.shape)} for a batch of {count}.",
                "Every output keeps the batch dimension first.",
            )
        if array.ndim == 1:
            return [array[i, ...].copy() for i in range(count)]
        return [row.copy() for row in array]
    if isinstance(outputs, Mapping):
        columns = [rows_of(item, count, f"{where}.{key}") for key, item in outputs.items()]
        keys = list(outputs)
        return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(outputs, (tuple, list)):
        if not outputs:
            return [()] * count
        return list(zip(*(rows_of(item, count, f"{where}.{i}") for i, item in enumerate(outputs)), strict=True))
    raise UsageError(
        f"The model's output{where} is a {type(outputs).__name__}.", "forward returns a tensor, or tuples and dicts of tensors."
    )


# -- the engine ---------------------------------------------------------------------------------------------------------


class Engine:
    """A module in eval mode that runs batches, and takes up new weights before a batch, never during one. Safe for threads."""

    def __init__(self, module: nn.Module, versions: Versions | None = None) -> None:
        self.module = module.eval()
        self.version = 0
        self._versions = versions
        self._policy = module if isinstance(module, Policy) else None
        self._function: Callable[..., Any] = module if self._policy is None else self._policy.step
        self.lock = threading.Lock()
        self.batches = self.rows = 0

    def refresh_if_newer(self) -> None:
        """Take up the newest weights. The caller holds the lock."""
        if self._versions is None or self._versions.version == self.version:
            return
        version, weights = self._versions.read()
        if self._policy is not None:
            self._policy.network.thaw()
        modules.load_weights(self.module, weights)
        if self._policy is not None:
            with torch.inference_mode():
                self._policy.network.freeze()
        self.version = version

    def newest(self) -> int:
        return self.version if self._versions is None else self._versions.version

    def run(self, structure: Hashable, leaves: list[Array], count: int) -> tuple[Any, int]:
        """One forward pass over stacked inputs: (outputs with their batch dimension, version of the weights)."""
        with self.lock:
            self.refresh_if_newer()
            self.batches += 1
            self.rows += count
            with torch.inference_mode():
                args, kwargs = unflatten(structure, [torch.from_numpy(leaf) for leaf in leaves])
                return self._function(*args, **kwargs), self.version


class Newest:
    """An engine's policy as a `PolicySource`: the newest weights each time it is asked. For one event loop alone."""

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.module, Policy):
            raise UsageError(
                f"{type(engine.module).__name__} does not choose actions by itself.", "Use forward(), or give a ludus Policy."
            )
        self._engine, self._policy = engine, engine.module

    def newest(self) -> tuple[Policy, int]:
        with self._engine.lock:
            self._engine.refresh_if_newer()
            return self._policy, self._engine.version


class Inference:
    """`forward` and `call` of one model in this process. Several event loops and threads may use it at once."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, Any] | None = None,
        versions: Versions | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
    ) -> None:
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size={max_batch_size} is not a positive number.", "1 runs every request alone.")
        self.engine = Engine(module, versions)
        self._inputs = Inputs(inputs)
        self._max = max_batch_size
        self._dtype, self._shape = self._inputs.dtype, self._inputs.shape
        self._quick: tuple[asyncio.AbstractEventLoop | None, Callable[[Any], asyncio.Future[Any]]] = (None, _no_loop)
        """The loop that asked last, and where it leaves lone arrays; one value, so that threads never see half of it."""
        self._lanes: dict[asyncio.AbstractEventLoop, dict[Hashable, Batcher[Any, Any]]] = {}
        self._pending: deque[_Call] = deque()
        self._turn = threading.Lock()

    @property
    def version(self) -> int:
        """Of the weights that the next batch will use."""
        return self.engine.newest()

    def forward(self, x: Tree = _NOTHING, /, *rest: Tree, **kwargs: Tree) -> Awaitable[Any]:
        """Inputs without a batch dimension → outputs without one. Batched with every other call of this turn of the loop.

        Outside an event loop it returns a coroutine, for `asyncio.run`.
        """
        loop, submit = self._quick
        quick = x.__class__ is _ARRAY and x.dtype is self._dtype and x.shape == self._shape
        if quick and loop is not None and loop is _running() and not rest and not kwargs:
            return submit(x)
        return self._forward(() if x is _NOTHING else (x, *rest), kwargs, False)

    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]:
        """The same with the version of the weights that answered."""
        return self._forward(args, kwargs, True)

    def _forward(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Awaitable[Any]:
        loop = asyncio._get_running_loop()
        if loop is None:
            return self._later(args, kwargs, versioned)
        try:
            structure, leaves = self._inputs.taken_apart(args, kwargs)
        except UsageError as error:  # for this caller alone
            future: asyncio.Future[Any] = loop.create_future()
            future.set_exception(error)
            return future
        submit = self._lane(loop, structure, versioned).submit
        if self._shape is not None and not versioned:
            self._quick = loop, submit
        return submit(leaves[0] if len(leaves) == 1 else leaves)

    async def _later(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Any:
        return await self._forward(args, kwargs, versioned)

    def _lane(self, loop: asyncio.AbstractEventLoop, structure: Hashable, versioned: bool) -> Batcher[Any, Any]:
        lanes = self._lanes.get(loop)
        if lanes is None:
            for other in [other for other in self._lanes if other.is_closed()]:
                self._lanes.pop(other, None)
            lanes = self._lanes[loop] = {}
        batcher = lanes.get((structure, versioned))
        if batcher is None:
            if len(lanes) >= _MAX_LANES:  # inputs of ever new shapes; those that still wait are held by their loop
                lanes.clear()
            batcher = Batcher(functools.partial(self._run, structure, versioned), self._max)
            lanes[structure, versioned] = batcher
        return batcher

    def _run(self, structure: Hashable, versioned: bool, rows: list[Any]) -> list[Any]:
        """Rows of one structure: arrays where it has one leaf, else lists of arrays."""
        count = len(rows)
        lone = rows[0].__class__ is np.ndarray
        leaves = [stacked(rows)] if lone else [stacked(column) for column in zip(*rows, strict=True)]
        outputs, version = self.engine.run(structure, leaves, count)
        results = rows_of(outputs, count)
        return [(result, version) for result in results] if versioned else results

    # -- plain code

    def call(self, *args: Tree, **kwargs: Tree) -> Any:
        """The same from any thread, also one that runs an event loop: blocks until the answer is there."""
        structure, leaves = self._inputs.taken_apart(args, kwargs)
        call = _Call(structure, leaves[0] if len(leaves) == 1 else leaves)
        self._pending.append(call)
        with self._turn:  # whoever gets it works for all that came meanwhile
            while not call.done:
                self._work()
        if call.error is not None:
            raise call.error
        return call.result

    def _work(self) -> None:
        first = self._pending.popleft()
        batch = [first]
        while len(batch) < self._max and self._pending and self._pending[0].structure == first.structure:
            batch.append(self._pending.popleft())
        try:
            results = self._run(first.structure, False, [call.row for call in batch])
        except Exception as error:  # the model's own: every caller in the batch gets it
            for call in batch:
                call.error, call.done = error, True
            return
        for call, result in zip(batch, results, strict=True):
            call.result, call.done = result, True


class _Call:
    __slots__ = ("done", "error", "result", "row", "structure")

    def __init__(self, structure: Hashable, row: Any) -> None:
        self.structure, self.row = structure, row
        self.done = False
        self.error: Exception | None = None
        self.result: Any = None


def _no_loop(row: Any) -> asyncio.Future[Any]:
    raise AssertionError("no loop has asked yet")
