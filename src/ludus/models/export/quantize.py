"""Quantisation of exported models to 8-bit integers, with a scale per row for the large matrix products.

The rows of a batch belong to different players, so no row may affect the outputs of another. A range measured over the whole batch
would: one observation of 1e6 makes the steps so coarse that all other rows become zero. So each row has its own scale, taken from its
largest number, unless the range is known: after a tanh or a sigmoid, or because it was measured on typical inputs (convolutions,
whose inputs are clipped to it).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ludus
from ludus.core import plugins
from ludus.core.tree import Array
from ludus.errors import Damaged, UsageError
from ludus.models.export.onnx_export import EXTRA, META, Feed, facts_of, quietly, require_onnx

_AXES_ARE_INPUTS = 18  # of ReduceMax, from this opset on
_MIN_STEP = 1e-30  # the smallest step

Interval = tuple[float, float]


def quantize(data: bytes, calibration: Sequence[Feed]) -> bytes:
    """Return the same model with its large products in 8-bit integers; `calibration` is a few batches of typical inputs.

    Layers that read raw inputs or write outputs stay float32: rounding would hurt there and save little time. Weights are unsigned,
    because signed ones overflow on CPUs without VNNI unless they give up a bit, which doubles the error. Raises UsageError if there is
    nothing to quantise, Damaged if weights are not finite.
    """
    onnx, _ = require_onnx("quantisation")
    model = onnx.load_from_string(data)
    facts = facts_of(model)
    _check_finite(onnx, model)
    _split_gemms(onnx, model)
    convolutions, products = _quantizable(model)
    if not convolutions and not products:
        raise UsageError("This model has no layer between its first and its last one that could be quantised.", "Use float32.")
    if convolutions:
        model = _quantize_convolutions(onnx, model, convolutions, calibration)
    if products:
        _quantize_products(onnx, model, frozenset(products))
    onnx.helper.set_model_props(model, {META: json.dumps(facts | {"precision": "int8"})})
    model.producer_name, model.producer_version = "ludus", ludus.__version__
    return bytes(model.SerializeToString())


def _check_finite(onnx: Any, model: Any) -> None:
    for item in model.graph.initializer:
        if item.data_type == onnx.TensorProto.FLOAT and not np.isfinite(onnx.numpy_helper.to_array(item)).all():
            raise Damaged(f"The weights {item.name} are not finite.")


# -- which layers -------------------------------------------------------------------------------------------------------


_PASSING = frozenset(
    ["Cast", "Concat", "Flatten", "Mul", "Sub", "Add", "Div", "Clip", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Equal"]
)
"""Operators whose outputs are raw numbers if their inputs are."""


def _split_gemms(onnx: Any, model: Any) -> None:
    """Replace Gemm with constant weights by MatMul and Add, in place: only products have an integer form."""
    graph = model.graph
    constants = {item.name: item for item in graph.initializer}
    nodes = []
    for node in graph.node:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        scaled = given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0 or given.get("transA")
        if node.op_type != "Gemm" or scaled or node.input[1] not in constants:
            nodes.append(node)
            continue
        weight = node.input[1]
        if given.get("transB"):
            weight = f"{node.name}.weight"
            turned = onnx.numpy_helper.to_array(constants[node.input[1]]).T
            graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(turned), weight))
        bias = node.input[2] if len(node.input) > 2 else ""
        product = f"{node.name}.product" if bias else node.output[0]
        nodes.append(onnx.helper.make_node("MatMul", [node.input[0], weight], [product], node.name))
        if bias:
            nodes.append(onnx.helper.make_node("Add", [product, bias], [node.output[0]], f"{node.name}.add"))
    _replace_nodes(graph, nodes)


def _quantizable(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of the convolutions (with activations) and of the matrix products to quantise."""
    graph = model.graph
    weights = {item.name for item in graph.initializer}
    raw = weights | {item.name for item in graph.input if not item.name.startswith("state.")}
    for node in graph.node:
        if node.op_type in _PASSING and set(node.input) <= raw:
            raw |= set(node.output)
    last = {item.name for item in graph.output if not item.name.startswith("next_state.")}
    for node in reversed(graph.node):
        if node.op_type not in ("Conv", "MatMul") and last & set(node.output):
            last |= set(node.input)
    convolved = {name for node in graph.node if node.op_type == "Conv" for name in node.output}
    convolutions = [n.name for n in graph.node if n.op_type == "Conv" or (n.op_type == "Relu" and n.input[0] in convolved)]
    matrices = {item.name for item in graph.initializer if len(item.dims) == 2}
    products = [n.name for n in graph.node if n.op_type == "MatMul" and n.input[1] in matrices]
    spared = {n.name for n in graph.node if n.op_type == "MatMul" and (n.input[0] in raw or last & set(n.output))}
    return convolutions, [name for name in products if name not in spared]


# -- convolutions -------------------------------------------------------------------------------------------------------


def _quantize_convolutions(onnx: Any, model: Any, nodes: Sequence[str], calibration: Sequence[Feed]) -> Any:
    """Quantise these nodes with the ranges of the calibration."""
    quantization = plugins.require("onnxruntime.quantization", EXTRA, "quantisation")
    with tempfile.TemporaryDirectory(prefix="ludus-int8-") as folder, quietly():
        path = Path(folder) / "model.onnx"
        quantization.quantize_static(
            model,
            path,
            _Calibration(model, calibration),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Relu"],
            nodes_to_quantize=list(nodes),
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QUInt8,
            per_channel=True,
        )
        return onnx.load(path)


class _Calibration:
    """Calibration batches in the interface of the quantiser."""

    def __init__(self, model: Any, batches: Sequence[Feed]) -> None:
        names = {item.name for item in model.graph.input}
        self._batches = iter([{key: value for key, value in batch.items() if key in names} for batch in batches])

    def get_next(self) -> Feed | None:
        return next(self._batches, None)


# -- products -----------------------------------------------------------------------------------------------------------


def _quantize_products(onnx: Any, model: Any, products: Collection[str]) -> None:
    """Convert these products to integers, in place: rounded input times rounded weights, times the scales of both."""
    graph = model.graph
    weights = {item.name: item for item in graph.initializer}
    known = _intervals(onnx, graph)
    writer = _GraphWriter(onnx, graph, next(item.version for item in model.opset_import if item.domain == ""))
    quantize_input: dict[str, _QuantizedInput] = {}
    for node in graph.node:
        if node.name not in products:
            writer.nodes.append(node)
            continue
        x, weight = node.input[0], onnx.numpy_helper.to_array(weights[node.input[1]])
        if x not in quantize_input:  # several layers may read the same input
            quantize_input[x] = writer.quantize_input(x, known.get(x))
        writer.product(node, quantize_input[x], weight)
    _replace_nodes(graph, writer.nodes)


class _QuantizedInput(NamedTuple):
    """A quantised input: number = step · (integer − zero), times the scale of its row if it has one."""

    integers: str
    zero: str
    step: float
    row_scale: str | None


class _GraphWriter:
    """Appends nodes and constants to a graph, using only standard ONNX operators."""

    def __init__(self, onnx: Any, graph: Any, opset: int) -> None:
        self._onnx, self._graph, self._opset = onnx, graph, opset
        self.nodes: list[Any] = []

    def quantize_input(self, x: str, interval: Interval | None) -> _QuantizedInput:
        if interval is not None and np.isfinite(interval).all():
            step, zero_point = _grid(interval)
            return _QuantizedInput(*self._quantize_linear(x, x, step, zero_point), step, None)
        positive = interval is not None and interval[0] >= 0
        sizes = x if positive else self._node("Abs", [x], f"{x}.sizes")
        if self._opset < _AXES_ARE_INPUTS:
            scale = self._node("ReduceMax", [sizes], f"{x}.scale", axes=[-1], keepdims=1)
        else:
            axes = self._constant(f"{x}.axes", np.array([-1], np.int64))
            scale = self._node("ReduceMax", [sizes, axes], f"{x}.scale", keepdims=1)
        # A row of zeros divided by zero may become any integers; times its scale they are zero again.
        share = self._node("Div", [x, scale], f"{x}.share")
        step, zero_point = _grid((0.0, 1.0) if positive else (-1.0, 1.0))
        return _QuantizedInput(*self._quantize_linear(x, share, step, zero_point), step, scale)

    def product(self, node: Any, x: _QuantizedInput, weight: Array) -> None:
        name = node.name
        integers, steps, zeros = _quantize_columns(weight)
        weights = [self._constant(f"{name}.weights", integers), x.zero, self._constant(f"{name}.weight_zeros", zeros)]
        whole = self._node("MatMulInteger", [x.integers, *weights], f"{name}.whole")
        numbers = self._node("Cast", [whole], f"{name}.numbers", to=self._onnx.TensorProto.FLOAT)
        steps_name = self._constant(f"{name}.weight_steps", (steps * x.step).astype(np.float32))
        if x.row_scale is None:
            self._node("Mul", [numbers, steps_name], node.output[0])
        else:
            self._node("Mul", [self._node("Mul", [numbers, steps_name], f"{name}.shares"), x.row_scale], node.output[0])

    def _quantize_linear(self, name: str, x: str, step: float, zero_point: int) -> tuple[str, str]:
        zero = self._constant(f"{name}.zero", np.uint8(zero_point))
        given = [x, self._constant(f"{name}.step", np.float32(step)), zero]
        return self._node("QuantizeLinear", given, f"{name}.integers"), zero

    def _node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), [output], f"{output}.{kind}", **attributes))
        return output

    def _constant(self, name: str, value: Any) -> str:
        self._graph.initializer.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name


def _grid(interval: Interval) -> tuple[float, int]:
    """Return (step, zero point) of 8-bit integers over an interval that contains zero."""
    low, high = min(interval[0], 0.0), max(interval[1], 0.0)
    if low == -high:  # represents zero and both ends exactly
        return max(high, _MIN_STEP) / 127, 128
    step = (high - low) / 255
    return step, round(-low / step)


def _quantize_columns(weight: Array) -> tuple[Array, Array, Array]:
    """Return (integers, step of each column, zero point of each column)."""
    low, high = np.minimum(weight.min(axis=0), 0), np.maximum(weight.max(axis=0), 0)
    steps = np.maximum((high - low).astype(np.float64) / 255, _MIN_STEP)
    zeros = np.rint(-low / steps)
    return np.clip(np.rint(weight / steps) + zeros, 0, 255).astype(np.uint8), steps, zeros.astype(np.uint8)


_OUTPUT_RANGES: Mapping[str, Interval] = {
    "Tanh": (-1.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Relu": (0.0, np.inf),
}
_RESHAPING = frozenset(["Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity"])


def _intervals(onnx: Any, graph: Any) -> dict[str, Interval]:
    """Return tensor → bounds of its numbers for any input, as far as they are easily derived."""
    intervals = _propagate_intervals(onnx, graph, {})
    outputs = {item.name for item in graph.output}
    # A state is zero, or an output of the previous step.
    states = {name: f"next_{name}" for name in (item.name for item in graph.input) if name.startswith("state.")}
    return _propagate_intervals(
        onnx, graph, {name: intervals[after] for name, after in states.items() if after in outputs & intervals.keys()}
    )


def _propagate_intervals(onnx: Any, graph: Any, given: Mapping[str, Interval]) -> dict[str, Interval]:
    constants = {item.name: item for item in graph.initializer}
    intervals = dict(given)
    for node in graph.node:
        sources = [intervals.get(name) for name in node.input]
        if node.op_type in _OUTPUT_RANGES:
            intervals[node.output[0]] = _OUTPUT_RANGES[node.op_type]
        elif node.op_type in _RESHAPING and sources[0] is not None:
            intervals[node.output[0]] = sources[0]
        elif node.op_type == "Mul" and sources[0] is not None and sources[1] is not None:
            ends = [a * b for a in sources[0] for b in sources[1]]
            if np.isfinite(ends).all():
                intervals[node.output[0]] = min(ends), max(ends)
        elif node.op_type == "DequantizeLinear" and len(node.input) == 3 and set(node.input[1:]) <= constants.keys():
            step, zero = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:])
            if step.ndim == 0 and zero.dtype == np.uint8:
                intervals[node.output[0]] = -float(step) * int(zero), float(step) * (255 - int(zero))
    return intervals


def _replace_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    """Replace the nodes, and keep only the initialisers that they use."""
    used = {name for node in nodes for name in node.input}
    kept = [item for item in graph.initializer if item.name in used]
    for field, items in (("node", list(nodes)), ("initializer", kept)):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    graph.ClearField("value_info")
