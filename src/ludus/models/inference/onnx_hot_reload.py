"""A model of a run that onnxruntime executes: traced and checked once, where it is made; then it follows new weights everywhere.

graph = Graph.of(module, inputs, args, kwargs, FLOAT32)         # raises UsageError when it does not do what the module does
engine = OnnxEngine(module, reader, graph)
outputs, version = engine.run(structure, leaves, rows)

New weights need milliseconds to become a session, and tenths of a second in int8. An event loop does not wait for that: the
version before goes on answering until the new one is ready. Plain code does wait, and gets the newest.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ludus.core.spaces import array_spec
from ludus.core.tree import Array, Tree, decode, encode, map_tree
from ludus.errors import Damaged, LudusError, UsageError
from ludus.models.export import onnx_export, parity
from ludus.models.export.onnx_export import Feed, named
from ludus.models.export.quantize import quantize
from ludus.models.inference.engine import Engine, Versions, unflatten
from ludus.models.inference.onnx_policy import OnnxModule, OnnxPolicy
from ludus.models.policy import Policy
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

FLOAT32, INT8 = "float32", "int8"

Runner = OnnxPolicy | OnnxModule


@dataclass(frozen=True)
class Graph:
    """The traced model with the weights it had then, and typical inputs for int8 (none: float32)."""

    model: bytes
    calibration: tuple[Feed, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        inputs: Mapping[str, Any] | None,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        precision: str,
    ) -> Graph:
        """Trace and check. A policy needs no declared inputs; `args` and `kwargs` are the examples of another module's."""
        if isinstance(module, Policy):
            return cls._of_policy(module, precision)
        if not inputs or not (inputs["args"] or inputs["kwargs"]):
            raise UsageError("use_onnx needs to know the inputs.", "Give examples of them: forward_args=(…).")
        graph = cls(onnx_export.export_module(module, inputs))
        feeds = parity.module_feeds(args, kwargs)
        arguments = onnx_export.arguments_of(inputs)
        _refuse(type(module).__name__, parity.verify_module(module, graph.model, feeds, arguments))
        if precision == INT8:
            graph = cls(graph.model, tuple(feeds[:8]))
            _refuse(type(module).__name__, parity.verify_module(module, graph.ready(), feeds, arguments), "use_onnx=True")
        return graph

    @classmethod
    def _of_policy(cls, policy: Policy, precision: str) -> Graph:
        model = onnx_export.export_policy(policy)
        _refuse("The policy", parity.verify(policy, model).reasons)
        if precision == FLOAT32:
            return cls(model)
        graph = cls(model, tuple(parity.calibration_of(policy)))
        eight = graph.ready()
        reasons = parity.independent(policy, eight)
        error = parity.rounding_error(policy, eight)
        if not error <= parity.INT8_ERROR:
            reasons.append(f"rounding changes the logits by {error:.1%} of how much they vary")
        _refuse("The policy", reasons, "use_onnx=True")
        return graph

    def ready(self, weights: Mapping[str, Array] | None = None) -> bytes:
        """The model as it is executed, with these weights."""
        model = self.model if weights is None else onnx_export.with_weights(self.model, weights)
        return quantize(model, self.calibration) if self.calibration else model

    def encode(self) -> bytes:
        return encode({"model": np.frombuffer(self.model, np.uint8), "calibration": self.calibration})

    @classmethod
    def decode(cls, data: bytes) -> Graph:
        """Raises Damaged."""
        tree, _ = decode(data)
        try:
            return cls(tree["model"].tobytes(), tuple(tree["calibration"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"This is not a traced model: {error!r}.") from error


def write_graph(directory: Path, graph: Graph) -> Path:
    """A file of its own below `directory`, seen whole or not at all. Raises StoreFull."""
    store, name = LocalStore(directory), f"graph-{uuid.uuid4().hex}"
    store.put(name, graph.encode())
    return directory / name


def read_graph(path: str) -> Graph:
    """Raises NotFound, Damaged."""
    file = Path(path)
    return Graph.decode(LocalStore(file.parent).get(file.name))


def _refuse(what: str, reasons: Sequence[str], instead: str = "leave use_onnx out") -> None:
    if reasons:
        raise UsageError(
            f"{what} as ONNX does not do what it does in PyTorch: {'; '.join(reasons)}.", f"Use it as it is: {instead}."
        )


class OnnxEngine(Engine):
    """An `Engine` whose batches onnxruntime computes. The module itself only says what it is.

    `version` is that of the weights that answer. One version is prepared at a time, and always the newest.
    """

    def __init__(self, module: nn.Module, versions: Versions, graph: Graph) -> None:
        super().__init__(module, versions)
        self._graph, self._following = graph, versions
        self._signature = inspect.signature(Policy.step) if isinstance(module, Policy) else None
        self._preparing = threading.Lock()
        self._refused = -1
        self.runner, self.version = self._prepared()

    def newest(self) -> int:
        return self.version

    def follow(self) -> None:
        """Take up the newest weights: at once in plain code, as soon as they are ready on an event loop."""
        if self._following.version == self.version:
            return
        if asyncio._get_running_loop() is None:
            with self._preparing:
                self._take()
        elif self._following.version != self._refused and self._preparing.acquire(blocking=False):
            # Not a daemon: a process that ends waits for it, rather than to tear onnxruntime down under it.
            threading.Thread(target=self._take_aside, name="ludus-onnx-weights").start()

    def _take_aside(self) -> None:
        """Holds the lock that `follow` has acquired."""
        wanted = self._following.version
        try:
            self._take()
        except Exception as error:  # whatever it is, nobody waits here: the version before goes on, and `version` tells so
            self._refused = wanted
            what = str(error) if isinstance(error, LudusError) else repr(error)
            log.error("Version %s of the weights was not loaded, %s stays in use: %s", wanted, self.version, what)
        finally:
            self._preparing.release()

    def _take(self) -> None:
        if self._following.version == self.version:
            return
        runner, version = self._prepared()
        with self.lock:  # between two batches
            self.runner, self.version = runner, version

    def _prepared(self) -> tuple[Runner, int]:
        version, weights = self._following.read()
        data = self._graph.ready(weights)
        return (OnnxPolicy(data) if self._signature else OnnxModule(data)), version

    def run(self, structure: Hashable, leaves: list[Array], count: int) -> tuple[Any, int]:
        self.follow()
        with self.lock:
            self.batches += 1
            self.rows += count
            args, kwargs = unflatten(structure, list(leaves))
            runner = self.runner
            if isinstance(runner, OnnxPolicy):
                return self._step(runner, args, kwargs), self.version
            feed: Feed = dict(named("args", args)) | dict(named("kwargs", kwargs))
            return runner({name: feed[name] for name in runner.inputs}), self.version

    def _step(self, policy: OnnxPolicy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Policy.step`, whose arguments these are."""
        assert self._signature is not None
        given = self._signature.bind(None, *args, **kwargs).arguments
        state, first = given.get("state", ()), given.get("first")
        if first is not None:
            state = tuple(part * ~first.astype(np.bool_)[:, None] for part in state)
        specs = array_spec(policy.observation_space)
        seen = map_tree(lambda spec, x: x.astype(spec.dtype, copy=False), specs, given["observation"])
        acted = policy.act(seen, state, given.get("mask"), given.get("noise"))
        return acted.chosen, acted.log_prob, acted.value, acted.state


class NewestOnnx:
    """An engine's policy as a source of players: the newest that is ready, each time it is asked."""

    def __init__(self, engine: OnnxEngine) -> None:
        self._engine = engine

    def newest(self) -> tuple[OnnxPolicy, int]:
        engine = self._engine
        engine.follow()
        with engine.lock:
            runner, version = engine.runner, engine.version
        if not isinstance(runner, OnnxPolicy):
            raise UsageError(
                f"{type(engine.module).__name__} does not choose actions by itself.", "Use forward(), or give a ludus Policy."
            )
        return runner, version
