"""Hot reload of an ONNX model: traced and verified once, then updated with new weights in every process.

graph = OnnxGraph.trace(module, inputs, args, kwargs, FLOAT32)  # raises UsageError if it does not reproduce the module
engine = OnnxEngine(module, reader, graph)
outputs, version = engine.run(structure, leaves, rows)

Preparing a session for new weights takes milliseconds, in int8 tenths of a second. An event loop does not wait for that: the previous
version answers until the new one is ready. Synchronous code waits and gets the newest.
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
from ludus.models.export.onnx_export import Feed, named_leaves
from ludus.models.export.quantize import quantize
from ludus.models.inference.engine import InferenceEngine, WeightsSource, unflatten
from ludus.models.inference.onnx_policy import OnnxModule, OnnxPolicy
from ludus.models.policy import Policy
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

FLOAT32, INT8 = "float32", "int8"

Runner = OnnxPolicy | OnnxModule


@dataclass(frozen=True)
class OnnxGraph:
    """The traced model with its initial weights, and calibration inputs for int8 (none: float32)."""

    model: bytes
    calibration: tuple[Feed, ...] = ()

    @classmethod
    def trace(
        cls,
        module: nn.Module,
        inputs: Mapping[str, Any] | None,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        precision: str,
    ) -> OnnxGraph:
        """Trace and verify. A policy needs no declared inputs; `args` and `kwargs` are example inputs of other modules."""
        if isinstance(module, Policy):
            return cls._trace_policy(module, precision)
        if not inputs or not (inputs["args"] or inputs["kwargs"]):
            raise UsageError("use_onnx needs to know the inputs.", "Give examples of them: forward_args=(…).")
        graph = cls(onnx_export.export_module(module, inputs))
        feeds = parity.module_feeds(args, kwargs)
        arguments = onnx_export.arguments_of(inputs)
        _raise_if_different(type(module).__name__, parity.verify_module(module, graph.model, feeds, arguments))
        if precision == INT8:
            graph = cls(graph.model, tuple(feeds[:8]))
            _raise_if_different(
                type(module).__name__, parity.verify_module(module, graph.build(), feeds, arguments), "use_onnx=True"
            )
        return graph

    @classmethod
    def _trace_policy(cls, policy: Policy, precision: str) -> OnnxGraph:
        model = onnx_export.export_policy(policy)
        _raise_if_different("The policy", parity.verify(policy, model).reasons)
        if precision == FLOAT32:
            return cls(model)
        graph = cls(model, tuple(parity.calibration_of(policy)))
        int8_model = graph.build()
        reasons = parity.independent(policy, int8_model)
        error = parity.rounding_error(policy, int8_model)
        if not error <= parity.INT8_ERROR:
            reasons.append(f"rounding changes the logits by {error:.1%} of how much they vary")
        _raise_if_different("The policy", reasons, "use_onnx=True")
        return graph

    def build(self, weights: Mapping[str, Array] | None = None) -> bytes:
        """Return the executable model with these weights."""
        model = self.model if weights is None else onnx_export.with_weights(self.model, weights)
        return quantize(model, self.calibration) if self.calibration else model

    def encode(self) -> bytes:
        return encode({"model": np.frombuffer(self.model, np.uint8), "calibration": self.calibration})

    @classmethod
    def decode(cls, data: bytes) -> OnnxGraph:
        """Raises Damaged."""
        tree, _ = decode(data)
        try:
            return cls(tree["model"].tobytes(), tuple(tree["calibration"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"This is not a traced model: {error!r}.") from error


def write_graph(directory: Path, graph: OnnxGraph) -> Path:
    """Write the graph atomically to a new file below `directory`. Raises StoreFull."""
    store, name = LocalStore(directory), f"graph-{uuid.uuid4().hex}"
    store.put(name, graph.encode())
    return directory / name


def read_graph(path: str) -> OnnxGraph:
    """Raises NotFound, Damaged."""
    file = Path(path)
    return OnnxGraph.decode(LocalStore(file.parent).get(file.name))


def _raise_if_different(what: str, reasons: Sequence[str], instead: str = "leave use_onnx out") -> None:
    if reasons:
        raise UsageError(
            f"{what} as ONNX does not reproduce its PyTorch outputs: {'; '.join(reasons)}.", f"Use PyTorch: {instead}."
        )


class OnnxEngine(InferenceEngine):
    """An `InferenceEngine` that runs batches with onnxruntime; the module only provides its description.

    `version` is that of the weights in use. One version is prepared at a time, always the newest.
    """

    def __init__(self, module: nn.Module, versions: WeightsSource, graph: OnnxGraph) -> None:
        super().__init__(module, versions)
        self._graph, self._weights_source = graph, versions
        self._signature = inspect.signature(Policy.step) if isinstance(module, Policy) else None
        self._preparing = threading.Lock()
        self._failed_version = -1
        self.runner, self.version = self._make_runner()

    def newest(self) -> int:
        return self.version

    def refresh(self) -> None:
        """Load the newest weights: at once in synchronous code, in the background on an event loop."""
        if self._weights_source.version == self.version:
            return
        if asyncio._get_running_loop() is None:
            with self._preparing:
                self._load_newest()
        elif self._weights_source.version != self._failed_version and self._preparing.acquire(blocking=False):
            # Not a daemon: tearing down onnxruntime under a running thread would crash at exit.
            threading.Thread(target=self._load_in_background, name="ludus-onnx-weights").start()

    def _load_in_background(self) -> None:
        """Release the lock that `refresh` has acquired."""
        wanted = self._weights_source.version
        try:
            self._load_newest()
        except Exception as error:  # no caller waits here; the previous version stays in use
            self._failed_version = wanted
            what = str(error) if isinstance(error, LudusError) else repr(error)
            log.error("Version %s of the weights was not loaded, %s stays in use: %s", wanted, self.version, what)
        finally:
            self._preparing.release()

    def _load_newest(self) -> None:
        if self._weights_source.version == self.version:
            return
        runner, version = self._make_runner()
        with self.lock:  # between two batches
            self.runner, self.version = runner, version

    def _make_runner(self) -> tuple[Runner, int]:
        version, weights = self._weights_source.read()
        data = self._graph.build(weights)
        return (OnnxPolicy(data) if self._signature else OnnxModule(data)), version

    def run(self, structure: Hashable, leaves: list[Array], count: int) -> tuple[Any, int]:
        self.refresh()
        with self.lock:
            self.batches += 1
            self.rows += count
            args, kwargs = unflatten(structure, list(leaves))
            runner = self.runner
            if isinstance(runner, OnnxPolicy):
                return self._step(runner, args, kwargs), self.version
            feed: Feed = dict(named_leaves("args", args)) | dict(named_leaves("kwargs", kwargs))
            return runner({name: feed[name] for name in runner.inputs}), self.version

    def _step(self, policy: OnnxPolicy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Policy.step` with these arguments."""
        assert self._signature is not None
        given = self._signature.bind(None, *args, **kwargs).arguments
        state, first = given.get("state", ()), given.get("first")
        if first is not None:
            state = tuple(part * ~first.astype(np.bool_)[:, None] for part in state)
        specs = array_spec(policy.observation_space)
        converted = map_tree(lambda spec, x: x.astype(spec.dtype, copy=False), specs, given["observation"])
        acted = policy.act(converted, state, given.get("mask"), given.get("noise"))
        return acted.chosen, acted.log_prob, acted.value, acted.state


class OnnxPolicySource:
    """An engine's policy as a policy source: the newest that is ready."""

    def __init__(self, engine: OnnxEngine) -> None:
        self._engine = engine

    def newest(self) -> tuple[OnnxPolicy, int]:
        engine = self._engine
        engine.refresh()
        with engine.lock:
            runner, version = engine.runner, engine.version
        if not isinstance(runner, OnnxPolicy):
            raise UsageError(
                f"{type(engine.module).__name__} does not choose actions by itself.", "Use forward(), or give a ludus Policy."
            )
        return runner, version
