"""Export from PyTorch to ONNX: a policy as one graph from observation to action, or a user's module.

The weights are inputs of the tracer and become initialisers afterwards, under their `state_dict` names. So no weight is folded into
the graph, and `with_weights` replaces them without another trace.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import ludus
from ludus.core import plugins, spaces
from ludus.core.spaces import ArraySpec, array_spec
from ludus.core.tree import Array, Tree, leaves
from ludus.errors import IncompatibleCheckpoint, UsageError
from ludus.models.custom.loader import own_line
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules

EXTRA = "serve"
LAYOUT = "onnx"
OPSET, OLDEST_OPSET, NEWEST_OPSET = 18, 15, 22
META = "ludus"
"""Metadata key of the model file under which its facts are stored as JSON."""
_NO_FUNCTION = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
EXAMPLE_ROWS = 3  # a batch of 0 or 1 would be taken for a constant

Feed = dict[str, Array]
Arguments = Callable[[Iterator[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def require_onnx(what: str) -> tuple[Any, Any]:
    """(onnx, onnxruntime). Raises MissingExtra."""
    return plugins.require("onnx", EXTRA, what), plugins.require("onnxruntime", EXTRA, what)


# -- names --------------------------------------------------------------------------------------------------------------


def named_leaves(prefix: str, tree: Tree) -> list[tuple[str, Any]]:
    """Return (name in the graph, leaf): `observation`, or `observation.key` and so on for nested trees."""
    return [(f"{prefix}.{path}" if path else prefix, leaf) for path, leaf in leaves(tree)]


def unflatten_tree(like: Tree, flat: Iterator[Any]) -> Tree:
    """Return a tree with the structure of `like`, whose leaves are taken from `flat` in the order of `tree.leaves`."""
    if isinstance(like, Mapping):
        return {key: unflatten_tree(like[key], flat) for key in sorted(like)}
    if isinstance(like, tuple):
        return tuple(unflatten_tree(item, flat) for item in like)
    return next(flat)


# -- a policy -----------------------------------------------------------------------------------------------------------


class _PolicyStep(nn.Module):
    """One decision of a policy for N rows, without a time dimension."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.network = policy.network
        self.distribution = policy.distribution  # the attribute name is part of its weight names
        self._state_value, self._action_space = policy.state_value, policy.action_space

    def forward(self, observation: Tree, mask: Tensor | None, noise: Tensor | None, state: tuple[Tensor, ...]) -> dict[str, Tree]:
        logits, value, after = self.network.decide(observation, state)
        chosen, log_prob = self.distribution.sample(logits, mask, noise)
        return {
            "action": for_environment(self._action_space, chosen),
            "chosen": chosen,
            "log_prob": log_prob,
            "value": self._state_value(logits, value, mask),
            "logits": logits,
            "next_state": after,
        }


def for_environment(space: gym.Space[Any], chosen: Tree) -> Tree:
    """`Distribution.to_environment` on tensors."""
    if isinstance(space, gym.spaces.Dict):
        return {key: for_environment(space.spaces[key], chosen[key]) for key in sorted(space.spaces)}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(for_environment(item, chosen[i]) for i, item in enumerate(space.spaces))
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        start = np.asarray(space.start)
        shifted = chosen + torch.as_tensor(start.astype(np.int64)) if start.any() else chosen + 0
        return shifted.to(torch.from_numpy(np.zeros((), space.dtype)).dtype)
    if isinstance(space, gym.spaces.Box):
        low, high = torch.from_numpy(space.low.copy()), torch.from_numpy(space.high.copy())
        action = chosen
        if space.is_bounded("both"):
            action = (0.5 * high + 0.5 * low) + chosen.clamp(-1.0, 1.0).to(low.dtype) * (0.5 * high - 0.5 * low)
        return torch.minimum(torch.maximum(action.to(low.dtype), low), high)  # rounding may leave the bounds
    return chosen + 0  # a separate output, not an alias of `chosen`


def policy_inputs(policy: Any) -> dict[str, ArraySpec]:
    """Return the inputs of a policy's graph by name, in order; shapes are per row."""
    inputs = dict(named_leaves("observation", array_spec(policy.observation_space)))
    distribution = policy.distribution
    if distribution.mask_size:
        inputs["mask"] = ArraySpec((distribution.mask_size,), np.dtype(np.bool_))
    if distribution.noise_size:
        inputs["noise"] = ArraySpec((distribution.noise_size,), np.dtype(np.float32))
    return inputs | dict(named_leaves("state", policy.state_spec()))


def export_policy(
    policy: Policy, *, opset: int = OPSET, name: str = "model", version: int = 0, trained: Mapping[str, Any] | None = None
) -> bytes:
    """Return the whole policy as the bytes of a self-contained ONNX file. Raises UsageError, MissingExtra.

    `trained`: facts about the training that a player needs, such as its decision interval; JSON values.
    """
    inputs = policy_inputs(policy)
    observation_spec = array_spec(policy.observation_space)
    masks, noises = "mask" in inputs, "noise" in inputs

    def arguments(flat: Iterator[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        observation = unflatten_tree(observation_spec, flat)
        mask, noise = next(flat) if masks else None, next(flat) if noises else None
        return (observation, mask, noise, tuple(flat)), {}

    facts = {
        "kind": "policy",
        "model": name,
        "version": version,
        "observation_space": spaces.to_json(policy.observation_space),
        "action_space": spaces.to_json(policy.action_space),
        "state": [list(spec.shape) for spec in policy.state_spec()],
        "decides_by": policy.kind,
        "trained": dict(trained or {}),
    }
    example = {name: spec.zeros(EXAMPLE_ROWS) for name, spec in inputs.items()}
    for path, (lowest, _) in spaces.categories(policy.observation_space).items():
        example[f"observation.{path}" if path else "observation"] += lowest
    return trace(_PolicyStep(policy), example, arguments, "", opset, facts)


# -- any module ---------------------------------------------------------------------------------------------------------


def export_module(module: nn.Module, inputs: Mapping[str, Any], *, opset: int = OPSET, name: str = "model") -> bytes:
    """Export a user's module with the declared inputs of `module_spec.inputs_of`. Raises UsageError if it cannot be traced."""
    args, kwargs = _argument_specs(inputs)
    example = {key: spec.zeros(EXAMPLE_ROWS) for key, spec in (*named_leaves("args", args), *named_leaves("kwargs", kwargs))}
    return trace(module, example, arguments_of(inputs), "output", opset, {"kind": "module", "model": name})


def arguments_of(inputs: Mapping[str, Any]) -> Arguments:
    """Return a function that makes (args, kwargs) from the flat inputs of a module's graph."""
    args, kwargs = _argument_specs(inputs)
    return lambda flat: (unflatten_tree(args, flat), unflatten_tree(kwargs, flat))


def _argument_specs(inputs: Mapping[str, Any]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    kwargs = {key: modules.array_specs(spec) for key, spec in inputs["kwargs"].items()}
    return tuple(map(modules.array_specs, inputs["args"])), kwargs


# -- tracing ------------------------------------------------------------------------------------------------------------


class _Flat(nn.Module):
    """A module as a function of a flat list: its weights, then its inputs. It does not own the module, so that no weight becomes a
    constant.
    """

    def __init__(self, call: Callable[..., Tree], weights: Sequence[str], arguments: Arguments) -> None:
        super().__init__()
        self._call, self._weights, self._arguments = call, list(weights), arguments

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        count = len(self._weights)
        args, kwargs = self._arguments(iter(flat[count:]))
        result = self._call(dict(zip(self._weights, flat[:count], strict=True)), args, kwargs)
        return tuple(leaf for _, leaf in leaves(plain_outputs(result)))


def plain_outputs(outputs: Any, where: str = "") -> Tree:
    """Return tuples and dicts of tensors. Raises UsageError for any other output of a module."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return {str(key): plain_outputs(item, f"{where}.{key}") for key, item in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(plain_outputs(item, f"{where}.{i}") for i, item in enumerate(outputs))
    raise UsageError(
        f"The model's output{where} is a {type(outputs).__name__}.", "forward returns a tensor, or tuples and dicts of tensors."
    )


def trace(
    module: nn.Module,
    inputs: Mapping[str, Array],
    arguments: Arguments,
    prefix: str,
    opset: int,
    facts: Mapping[str, Any],
) -> bytes:
    """Return a module as a self-contained ONNX file. `arguments` makes its arguments from the flat inputs; `facts` become metadata."""
    onnx, _ = require_onnx("export to ONNX")
    plugins.require("onnxscript", EXTRA, "export to ONNX")
    _check_opset(opset)
    was_training = module.training
    module.eval()
    try:
        weights = {key: value.detach() for key, value in module.state_dict().items()}
        clash = weights.keys() & inputs.keys()
        if clash:
            raise UsageError(f"The weight {sorted(clash)[0]!r} of the module has the name of an input.", "Rename it.")
        example = [torch.from_numpy(value) for value in inputs.values()]
        with torch.no_grad():
            args, kwargs = arguments(iter(example))
            outputs = plain_outputs(module(*args, **kwargs))
            call = functools.partial(torch.func.functional_call, module, tie_weights=False)  # every weight is a separate input
            flat = _Flat(call, list(weights), arguments).eval()
            names = [name for name, _ in (named_leaves(prefix, outputs) if prefix else leaves(outputs))]
            model = _export_proto(flat, weights, dict(zip(inputs, example, strict=True)), names)
    finally:
        module.train(was_training)
    _weights_to_initializers(onnx, model, modules.weights_of(module))
    _strip_traces(model)
    metadata = {"ludus": ludus.__version__, "torch": torch.__version__, "opset": OPSET, "precision": "float32", **facts}
    metadata["weights"] = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in weights.items()}
    metadata["outputs"] = _skeleton(outputs)
    onnx.helper.set_model_props(model, {META: json.dumps(metadata)})
    model.producer_name, model.producer_version = "ludus", ludus.__version__
    onnx.checker.check_model(model)
    data = bytes(model.SerializeToString())
    return data if opset == OPSET else at_opset(data, opset)


def _skeleton(outputs: Tree) -> Any:
    """The structure of the outputs as JSON values; a leaf is null."""
    if isinstance(outputs, Mapping):
        return {key: _skeleton(item) for key, item in outputs.items()}
    return [_skeleton(item) for item in outputs] if isinstance(outputs, tuple) else None


def _export_proto(flat: nn.Module, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Any:
    batch = torch.export.Dim("batch", min=1)
    shapes = (*(None for _ in weights), *({0: batch} for _ in inputs))
    try:
        with quietly():
            program = torch.onnx.export(
                flat,
                (*weights.values(), *inputs.values()),
                dynamo=True,
                verbose=False,
                optimize=True,
                opset_version=OPSET,
                input_names=[*weights, *inputs],
                output_names=list(outputs),
                dynamic_shapes=(shapes,),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise UsageError(*_explain_failure(error)) from error
    assert program is not None
    return program.model_proto


def _explain_failure(error: BaseException) -> tuple[str, str]:
    """Return why a model cannot be traced, and the remedy."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    where = next((line for link in reversed(chain) if (line := own_line(link))), "")
    for link in chain:
        operator = _NO_FUNCTION.search(str(link))
        if operator:
            message = f"This model cannot be written as ONNX: its operation {operator[1]} has no ONNX equivalent."
            return message, "Use another one in forward, or serve the model with PyTorch: ludus serve --backend torch."
    reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"This model cannot be written as ONNX: {where}{reason}",
        "Decisions in Python on the values of tensors cannot be traced: use torch.where.",
    )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress progress output of the exporter and deprecation warnings of other packages."""
    names = ("torch.onnx", "torch.onnx._internal.exporter._registration", "onnxscript", "onnx_ir", "torch.fx", "torch.export")
    before = {name: logging.getLogger(name).level for name in names}
    root = logging.getLogger()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # it prints the graph of a failed trace
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        root.addFilter(_is_error)  # advice of the quantiser on the root logger; other loggers are not affected
        try:
            yield
        finally:
            root.removeFilter(_is_error)
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _weights_to_initializers(onnx: Any, model: Any, weights: Mapping[str, Array]) -> None:
    """Turn weight inputs into initialisers; weights that no output depends on are dropped."""
    graph = model.graph
    attributes = [item for item in graph.input if item.name not in weights]
    del graph.input[:]
    graph.input.extend(attributes)
    used = {name for node in graph.node for name in node.input}
    for name, value in weights.items():
        if name in used:
            graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))


def _strip_traces(model: Any) -> None:
    """Remove stack traces with local paths, which the tracer records."""
    model.doc_string = model.graph.doc_string = ""
    graph = model.graph
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        if hasattr(item, "doc_string"):
            item.doc_string = ""


# -- opsets -------------------------------------------------------------------------------------------------------------


_WIDENED = frozenset(["Identity", "Where", "GreaterOrEqual", "LessOrEqual"])
"""Operators that only support more types since opset 15."""


def at_opset(data: bytes, opset: int) -> bytes:
    """Return the same model in another opset. Raises UsageError."""
    onnx, _ = require_onnx("another opset")
    _check_opset(opset)
    model = onnx.load_from_string(data)
    if opset < OPSET:
        _lower(onnx, model, opset)
    elif opset > OPSET:
        try:
            model = plugins.require("onnx.version_converter", EXTRA, "another opset").convert_version(model, opset)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"This model cannot be written for opset {opset}: {error}", f"Use {OPSET}.") from error
    onnx.helper.set_model_props(model, {META: json.dumps(facts_of(model) | {"opset": opset})})
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _check_opset(opset: int) -> None:
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UsageError(f"opset {opset} cannot be written.", f"Use one of {OLDEST_OPSET} to {NEWEST_OPSET}; {OPSET} is usual.")


def _lower(onnx: Any, model: Any, opset: int) -> None:
    """Convert to an older opset, in place. The converter of the onnx package cannot downgrade Split and some others."""
    graph = model.graph
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    constants |= {n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in graph.node if n.op_type == "Constant"}
    for node in graph.node:
        attributes = list(node.attribute)
        if onnx.defs.get_schema(node.op_type, OPSET).since_version <= opset:
            continue
        if node.op_type == "Split":
            attributes = [a for a in attributes if a.name != "num_outputs"]
        elif node.op_type.startswith("Reduce") and (len(node.input) < 2 or node.input[1] in constants):
            attributes = [a for a in attributes if a.name != "noop_with_empty_axes"]
            if len(node.input) == 2:
                attributes.append(onnx.helper.make_attribute("axes", constants[node.input.pop()].tolist()))
        elif node.op_type not in _WIDENED:
            raise UsageError(f"The operator {node.op_type} cannot be written for opset {opset}.", f"Use opset {OPSET} or newer.")
        del node.attribute[:]
        node.attribute.extend(attributes)
    for item in model.opset_import:
        if item.domain == "":
            item.version = opset


# -- metadata and weights of a file ----------------------------------------------------------------------------------------------


def facts_of(model: Any) -> dict[str, Any]:
    """Return what the exporter wrote into a loaded model. Raises UsageError if it was not exported by ludus."""
    for item in model.metadata_props:
        if item.key == META:
            return dict(json.loads(item.value))
    raise UsageError("This ONNX model was not exported by ludus.", "Write it with `ludus export`.")


def with_weights(data: bytes, weights: Mapping[str, Array], version: int | None = None) -> bytes:
    """Return the same float32 graph with other weights. Raises IncompatibleCheckpoint if they do not fit."""
    onnx, _ = require_onnx("ONNX")
    model = onnx.load_from_string(data)
    facts = facts_of(model)
    if facts["precision"] != "float32":
        raise UsageError(f"Weights cannot be put into a model of {facts['precision']}.", "Put them into the float32 one.")
    expected = {key: (tuple(shape), dtype) for key, (dtype, shape) in facts["weights"].items()}
    given = modules.shapes_in(weights)
    if expected != given:
        modules.check_fit(expected, given)
        raise IncompatibleCheckpoint("The weights do not fit this model.")
    for item in model.graph.initializer:
        if item.name in weights:
            item.ClearField("float_data")
            item.raw_data = np.ascontiguousarray(weights[item.name]).tobytes()
    if version is not None:
        onnx.helper.set_model_props(model, {META: json.dumps(facts | {"version": version})})
    return bytes(model.SerializeToString())


def without(data: bytes, outputs: Sequence[str]) -> bytes:
    """Return the same model without these outputs and the nodes that only they need; onnxruntime always computes the whole graph."""
    onnx, _ = require_onnx("ONNX")
    model = onnx.load_from_string(data)
    graph = model.graph
    attributes = [item for item in graph.output if item.name not in outputs]
    needed, nodes = {item.name for item in attributes}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(node.input)
    initializers = [item for item in graph.initializer if item.name in needed]
    for field, items in (("output", attributes), ("node", nodes[::-1]), ("initializer", initializers)):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    graph.ClearField("value_info")
    return bytes(model.SerializeToString())
