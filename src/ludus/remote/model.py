"""RemoteModel: a named network of the run, usable and updatable from every process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from ludus.core.tree import Tree, map_tree
from ludus.core.types import Bools
from ludus.errors import UsageError
from ludus.models.inference.batched_policy import ActingPolicy, ActingPolicySource, BatchedPolicy, Decision, State
from ludus.models.inference.engine import MAX_BATCH_SIZE, EnginePolicySource, Inference, InferenceEngine
from ludus.models.policy import Policy
from ludus.models.weights import module_spec as modules
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.remote.context import RunContext, current
from ludus.remote.inference_workers import InferenceWorkers, RemoteInference, gpus_of_workers

if TYPE_CHECKING:
    from ludus.models.inference.onnx_hot_reload import OnnxEngine

get_torch_model_weights = modules.weights_of
set_torch_model_weights = modules.load_weights


class InferenceBackend(Protocol):
    """Answers requests to a model in this process: a module here, or workers in other processes."""

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]: ...
    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]: ...
    def call(self, *args: Tree, **kwargs: Tree) -> Any: ...


class SharedModel:
    """State that all handles of one model share in this process."""

    def __init__(self, run: RunContext, info: Mapping[str, Any], max_batch_size: int | None) -> None:
        self.run, self.name = run, str(info["name"])
        self.description: dict[str, Any] = dict(info["description"])
        self.frozen, self.workers = bool(info["frozen"]), list(info["workers"])
        self.max_batch_size = int(max_batch_size or info["settings"].get("max_batch_size") or MAX_BATCH_SIZE)
        self._info = dict(info)
        self.graph: str | None = info["settings"].get("graph")
        """File of the traced model for onnxruntime, on the hub's machine."""
        self._batched_policies: dict[asyncio.AbstractEventLoop, BatchedPolicy[ActingPolicy]] = {}
        self._noise = torch.Generator()
        self._noise.seed()
        self._noise_lock = threading.Lock()
        if run.location.is_local or not self.workers:  # else this machine does not need the weights
            _ = self.shapes

    @functools.cached_property
    def reader(self) -> SharedWeightsReader:
        return self.run.reader(self._info)

    @functools.cached_property
    def shapes(self) -> modules.Shapes:
        return modules.shapes_in(self.reader.read()[1])

    def _blank(self) -> nn.Module:
        return serialization.model_from(self.description, self.run.classes.get(self.name.split("/")[0]))

    def build(self) -> nn.Module:
        """A new instance of the module, with fresh weights."""
        built = self._blank()
        if modules.shapes_of(built) != self.shapes:
            raise UsageError(
                f"The class of {self.name!r} builds another network here than where it was made.",
                "Its file may have changed since: restart every process of the run.",
            )
        return built

    @functools.cached_property
    def backend(self) -> InferenceBackend:
        inputs = self.description.get("inputs")
        if self.workers:
            return RemoteInference(self.run, self.workers, inputs, self.max_batch_size)
        if self.run.threads is not None:
            torch.set_num_threads(self.run.threads)
        inference = Inference(self.build(), inputs, self.reader, self.max_batch_size)
        if self.graph:
            inference.engine = self.onnx_engine()
        return inference

    def onnx_engine(self) -> OnnxEngine:
        """A new onnxruntime engine with the newest weights."""
        assert self.graph
        from ludus.models.inference.onnx_hot_reload import OnnxEngine, read_graph  # onnxruntime is an extra

        return OnnxEngine(self.build(), self.reader, read_graph(self.run.graph(self.graph)))

    @functools.cached_property
    def policy(self) -> Policy:
        return EnginePolicySource(InferenceEngine(self.build(), self.reader)).newest()[0]

    @functools.cached_property
    def outline(self) -> Policy:
        """The policy without its weights: spaces, distribution and initial state."""
        return EnginePolicySource(InferenceEngine(self._blank())).newest()[0]

    def decide(self, observation: Tree, state: State | None, mask: Bools | None, temperature: float) -> asyncio.Future[Decision]:
        loop = asyncio.get_running_loop()
        if self.workers:
            return asyncio.ensure_future(self._decide_with_workers(observation, state, mask, temperature))
        batched = self._batched_policies.get(loop)
        if batched is None:
            for other in [other for other in self._batched_policies if other.is_closed()]:
                self._batched_policies.pop(other, None)
            if self.run.threads is not None:
                torch.set_num_threads(self.run.threads)
            batched = self._batched_policies[loop] = BatchedPolicy(self._source(), max_batch_size=self.max_batch_size)
        return batched.decide(observation, state, mask, temperature)

    def _source(self) -> ActingPolicySource[ActingPolicy]:
        """One per event loop, so that they never wait for each other."""
        if not self.graph:
            return EnginePolicySource(InferenceEngine(self.build(), self.reader))
        from ludus.models.inference.onnx_hot_reload import OnnxPolicySource

        return OnnxPolicySource(self.onnx_engine())

    async def _decide_with_workers(
        self, observation: Tree, state: State | None, mask: Bools | None, temperature: float
    ) -> Decision:
        """Decide through the workers. Noise and initial state come from here, so that workers are stateless."""
        policy = self.outline
        before = tuple(s[0].numpy() for s in policy.initial_state(1)) if state is None and policy.recurrent else state or ()
        with self._noise_lock:
            noise = policy.draw_noise(1, self._noise)[0] * np.float32(temperature)
        answer = self.backend.forward_versioned(observation, before, None, mask, noise)
        (chosen, log_prob, value, after), version = await answer
        action = policy.distribution.to_environment(map_tree(lambda x: x[None], chosen))
        return Decision(map_tree(lambda x: x[0], action), chosen, float(log_prob), float(value), after, version)


class RemoteModel:
    """A network with a name. Created once with `model=`; then `RemoteModel(name=…)` finds it from any process of the run.

        model = ludus.RemoteModel(name="atari", model=AtariModel(), forward_args=(image,))
        logits = await model.forward(image)                  # in an actor: batched with every other session
        logits = model(image)                                # in plain code
        network = model.get_model()                          # in a trainer: a separate torch module
        model.publish_weights(ludus.get_torch_model_weights(network))

    `model` is an instance whose class can be built without arguments, or a class with `model_args` and `model_kwargs` (plain
    values). `forward_args` and `forward_kwargs` are examples of the inputs, without a batch dimension; they are optional, but without
    them inputs cannot be checked. `forward` adds the batch dimension and removes it.

    `num_workers` processes on this machine run the network for callers on every machine of the run; each
    has `gpus_per_worker` GPUs (0.5: two share one). By default every calling process runs the network itself, which
    is fastest for small networks; `local_mode` requests that even if there are workers.

    `checkpoint_interval`: every how many versions one is stored durably (None: every ten minutes); `keep`: how many of
    those are kept (None: all). Creating a model again attaches to it; another model of the same name is refused, unless
    `override_model` is set.

    `use_onnx` computes with onnxruntime: True or "infer" in float32 ("train" means the same), "quantize" in 8-bit
    integers. The model is traced and compared with the original where it is created, which takes seconds, and follows
    new weights. It needs the `serve` extra, and `forward_args` unless the model is a ludus Policy.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module | type[nn.Module] | None = None,
        forward_args: Sequence[Tree] = (),
        forward_kwargs: Mapping[str, Tree] | None = None,
        *,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] | None = None,
        max_batch_size: int | None = None,
        num_workers: int | None = None,
        gpus_per_worker: float = 0,
        local_mode: bool = False,
        checkpoint_interval: int | None = None,
        keep: int | None = None,
        override_model: bool = False,
        use_onnx: bool | str | None = None,
    ) -> None:
        minimums = {"max_batch_size": (max_batch_size, 1), "num_workers": (num_workers, 0)}
        minimums |= {"checkpoint_interval": (checkpoint_interval, 1), "keep": (keep, 1)}
        for what, (value, least) in minimums.items():
            if value is not None and (not isinstance(value, int) or value < least):
                raise UsageError(f"{what}={value!r} is not an integer of at least {least}.")
        precision = _precision(use_onnx)
        if local_mode and num_workers:
            raise UsageError(f"local_mode=True and num_workers={num_workers} contradict each other.", "Give one of them.")
        gpus = gpus_of_workers(num_workers or 0, gpus_per_worker)
        if any(gpus) and precision:
            raise UsageError("With use_onnx the workers compute on the CPU.", "Omit use_onnx, or gpus_per_worker.")
        self.name = name
        self._max_batch_size = max_batch_size
        self._cached: SharedModel | None = None
        run = current("RemoteModel")
        if model is None:
            given: dict[str, Any] = {"model_args": model_args, "model_kwargs": model_kwargs, "override_model": override_model}
            given |= {"forward_args": forward_args, "forward_kwargs": forward_kwargs}
            given |= {"checkpoint_interval": checkpoint_interval, "keep": keep, "use_onnx": use_onnx}
            if ineffective := [key for key, value in given.items() if value]:
                message = f"RemoteModel({name!r}, {', '.join(ineffective)}) has no model=, so it attaches to an existing one."
                raise UsageError(message, "Set these where the model is created.")
            info = run.client.call({"op": "model.find", "name": name}) if num_workers or local_mode else None
        else:
            inputs = modules.inputs_of(forward_args, forward_kwargs or {}) if forward_args or forward_kwargs else None
            described = modules.describe(model, model_args, model_kwargs, inputs, run.main_file)
            settings: dict[str, Any] = {"max_batch_size": max_batch_size}
            if precision and (override_model or not _has_graph(run, name, precision)):
                settings |= _trace_model(run, described, forward_args, forward_kwargs or {}, precision)
            elif override_model or use_onnx is False:
                settings |= {"graph": "", "precision": ""}
            with run.stage_weights(modules.weights_of(described.module)) as file:
                create: dict[str, Any] = {"op": "model.create", "name": name, "description": described.description, "file": file}
                create |= {"override": override_model, "interval": checkpoint_interval, "keep": keep, "settings": settings}
                info = run.client.call(create)
            run.classes[name] = type(described.module)
        if info is not None:
            _choose_backend(run, info, max_batch_size, gpus, local_mode, override_model)
        _ = self._shared_model

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the name; it attaches on first use in the other process of the run."""
        return {"name": self.name, "_max_batch_size": None, "_cached": None}

    def __repr__(self) -> str:
        return f"RemoteModel({self.name!r})"

    @property
    def _shared_model(self) -> SharedModel:
        cached = self._cached
        if cached is not None and cached.run.is_current_process:
            return cached
        run = current("RemoteModel")
        key = ("model", self.name)
        with run.lock:
            shared: SharedModel | None = run.shared.get(key)
            if shared is None:
                info = run.client.call({"op": "model.find", "name": self.name})
                shared = run.shared[key] = SharedModel(run, info, self._max_batch_size)
        if self._max_batch_size not in (None, shared.max_batch_size):
            raise UsageError(
                f"{self.name!r} has max_batch_size={shared.max_batch_size} in this process, not {self._max_batch_size}.",
                "Set it once, where the model is created.",
            )
        self._cached = shared
        return shared

    # -- inference

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]:
        """Run the model on an event loop: NumPy arrays in and out, without a batch dimension. Raises the errors of the model."""
        backend = self._shared_model.backend
        self.forward = backend.forward  # type: ignore[method-assign] # skips this method from now on
        return backend.forward(*args, **kwargs)

    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]:
        """Like `forward`, with the version of the weights, which recorded steps need."""
        return self._shared_model.backend.forward_versioned(*args, **kwargs)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Any:
        """Like `forward`, for plain code in any thread: blocks until the result is there."""
        return self._shared_model.backend.call(*args, **kwargs)

    # -- choosing actions, if the model is a ludus Policy

    @property
    def policy(self) -> Policy:
        """The policy in this process, with its spaces. Raises UsageError when the model is another kind of module."""
        return self._shared_model.policy

    def decide(
        self, observation: Tree, state: State | None = None, mask: Bools | None = None, temperature: float | None = None
    ) -> asyncio.Future[Decision]:
        """Decision of an agent with this policy; exploration noise is drawn here, times `temperature` (1). On an event loop only."""
        return self._shared_model.decide(observation, state, mask, 1.0 if temperature is None else temperature)

    # -- weights

    @property
    def inputs(self) -> dict[str, Any]:
        """The declared inputs as data; empty if none were declared."""
        return dict(self._shared_model.description.get("inputs") or {})

    @property
    def version(self) -> int:
        """The newest version of the weights."""
        return self._shared_model.reader.version

    step = version

    def get_model(self) -> nn.Module:
        """A separate torch module with the newest weights."""
        shared = self._shared_model
        built = shared.build()
        modules.load_weights(built, shared.reader.read()[1])
        return built

    def publish_weights(self, weights: Mapping[str, Any], step: int = -1) -> int:
        """Publish these weights as the next version, or as version `step`; returns its number.

        They reach every process at its next batch (with `use_onnx`, and on other machines, slightly later).
        Raises IncompatibleCheckpoint when they do not match the model; UsageError when `step` is not above the newest.
        """
        shared = self._shared_model
        arrays = modules.as_arrays(weights)
        modules.check_fit(shared.shapes, modules.shapes_in(arrays))
        with shared.run.stage_weights(arrays) as file:
            publish = {"op": "model.publish", "name": self.name, "file": file, "step": int(step)}
            return int(shared.run.client.call(publish)["version"])

    def clone(self, step: int = -1) -> RemoteModel:
        """A frozen copy of the newest stored version at or below `step` (-1: of the current version).

        It is a separate model named `<name>/clone-step-<version>`, which every process can find by that name.
        """
        run = self._shared_model.run
        info = run.client.call({"op": "model.clone", "name": self.name, "step": int(step)})
        return RemoteModel(str(info["name"]))


def _choose_backend(
    run: RunContext, info: Mapping[str, Any], max_batch_size: int | None, gpus: Sequence[str], local_mode: bool, is_new: bool
) -> None:
    """Choose the backend of the model in this process: workers, started now if needed, or a module here."""
    name = str(info["name"])
    with run.lock:
        known: SharedModel | None = run.shared.get(("model", name))
        if gpus and not info["workers"]:
            info = {**info, "workers": InferenceWorkers(run, name, gpus).paths}
        if local_mode:
            info = {**info, "workers": []}
        other = known is not None and known.graph != info["settings"].get("graph")
        if known is None or is_new or other or ((gpus or local_mode) and known.workers != info["workers"]):
            run.shared["model", name] = SharedModel(run, info, max_batch_size)


def _precision(use_onnx: bool | str | None) -> str | None:
    if use_onnx in (None, False):
        return None
    if use_onnx is True or use_onnx in ("infer", "train"):
        return "float32"
    if use_onnx == "quantize":
        return "int8"
    raise UsageError(f"use_onnx={use_onnx!r} is not known.", 'Use True or "infer" for float32, "quantize" for int8.')


def _has_graph(run: RunContext, name: str, precision: str) -> bool:
    """Return whether another process of the run has already traced this model."""
    if name not in run.client.call({"op": "names"})["models"]:
        return False
    settings = run.client.call({"op": "model.find", "name": name})["settings"]
    return bool(settings.get("graph")) and settings.get("precision") == precision


def _trace_model(
    run: RunContext, described: modules.DescribedModule, args: Sequence[Tree], kwargs: Mapping[str, Tree], precision: str
) -> dict[str, Any]:
    """Trace and check a model, and store the result for all processes of the run. Raises UsageError."""
    from ludus.models.inference.onnx_hot_reload import OnnxGraph, write_graph  # onnxruntime is an extra

    graph = OnnxGraph.trace(described.module, described.description.get("inputs"), args, kwargs, precision)
    if run.location.is_local:
        path = str(write_graph(Path(run.location.staging).parent, graph))
    else:
        file = run.client.upload(graph.encode())
        path = str(run.client.call({"op": "graph.keep", "file": file})["path"])
    return {"graph": path, "precision": precision}


def only_model(run: RunContext) -> RemoteModel:
    """The only model of the run. Raises UsageError if there are none or several."""
    names = run.client.call({"op": "names"})["models"]
    if len(names) != 1:
        raise UsageError(f"The run has {len(names)} models: {', '.join(names) or 'none'}.", "Choose one with model=.")
    return RemoteModel(names[0])
