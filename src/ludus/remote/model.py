"""RemoteModel: a named network of the run. Anyone may ask it, anyone may publish its next version."""

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
from ludus.remote.context import Session, current
from ludus.remote.inference_workers import Crew, RemoteInference, gpus_of_workers

if TYPE_CHECKING:
    from ludus.models.inference.onnx_hot_reload import OnnxEngine

get_torch_model_weights = modules.weights_of
set_torch_model_weights = modules.load_weights


class Asked(Protocol):
    """Whatever answers for a model in this process: a module here, or workers elsewhere."""

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]: ...
    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]: ...
    def call(self, *args: Tree, **kwargs: Tree) -> Any: ...


class Shared:
    """What all handles of one model share in this process."""

    def __init__(self, session: Session, info: Mapping[str, Any], max_batch_size: int | None) -> None:
        self.session, self.name = session, str(info["name"])
        self.description: dict[str, Any] = dict(info["description"])
        self.frozen, self.workers = bool(info["frozen"]), list(info["workers"])
        self.max_batch_size = int(max_batch_size or info["settings"].get("max_batch_size") or MAX_BATCH_SIZE)
        self._info = dict(info)
        self.graph: str | None = info["settings"].get("graph")
        """The file of the traced model, where onnxruntime executes it; on the machine of the hub."""
        self._deciding: dict[asyncio.AbstractEventLoop, BatchedPolicy[ActingPolicy]] = {}
        self._noise = torch.Generator()
        self._noise.seed()
        self._noise_lock = threading.Lock()
        if session.location.is_local or not self.workers:  # else the weights need not travel: the workers have them
            _ = self.shapes

    @functools.cached_property
    def reader(self) -> SharedWeightsReader:
        return self.session.reader(self._info)

    @functools.cached_property
    def shapes(self) -> modules.Shapes:
        return modules.shapes_in(self.reader.read()[1])

    def _blank(self) -> nn.Module:
        return serialization.model_from(self.description, self.session.classes.get(self.name.split("/")[0]))

    def build(self) -> nn.Module:
        """Another instance of the module, with fresh weights."""
        built = self._blank()
        if modules.shapes_of(built) != self.shapes:
            raise UsageError(
                f"The class of {self.name!r} builds another network here than where it was made.",
                "Was its file changed since? Restart every process of the run.",
            )
        return built

    @functools.cached_property
    def asked(self) -> Asked:
        inputs = self.description.get("inputs")
        if self.workers:
            return RemoteInference(self.session, self.workers, inputs, self.max_batch_size)
        if self.session.threads is not None:
            torch.set_num_threads(self.session.threads)
        inference = Inference(self.build(), inputs, self.reader, self.max_batch_size)
        if self.graph:
            inference.engine = self.onnx_engine()
        return inference

    def onnx_engine(self) -> OnnxEngine:
        """Another engine by onnxruntime, with the newest weights."""
        assert self.graph
        from ludus.models.inference.onnx_hot_reload import OnnxEngine, read_graph  # onnxruntime is an extra

        return OnnxEngine(self.build(), self.reader, read_graph(self.session.graph(self.graph)))

    @functools.cached_property
    def policy(self) -> Policy:
        return EnginePolicySource(InferenceEngine(self.build(), self.reader)).newest()[0]

    @functools.cached_property
    def outline(self) -> Policy:
        """The policy without its weights: its spaces, distribution and initial state."""
        return EnginePolicySource(InferenceEngine(self._blank())).newest()[0]

    def decide(self, observation: Tree, state: State | None, mask: Bools | None, temperature: float) -> asyncio.Future[Decision]:
        loop = asyncio.get_running_loop()
        if self.workers:
            return asyncio.ensure_future(self._decide_there(observation, state, mask, temperature))
        deciding = self._deciding.get(loop)
        if deciding is None:
            for other in [other for other in self._deciding if other.is_closed()]:
                self._deciding.pop(other, None)
            if self.session.threads is not None:
                torch.set_num_threads(self.session.threads)
            deciding = self._deciding[loop] = BatchedPolicy(self._source(), max_batch_size=self.max_batch_size)
        return deciding.decide(observation, state, mask, temperature)

    def _source(self) -> ActingPolicySource[ActingPolicy]:
        """One for each loop: they never wait for each other."""
        if not self.graph:
            return EnginePolicySource(InferenceEngine(self.build(), self.reader))
        from ludus.models.inference.onnx_hot_reload import OnnxPolicySource

        return OnnxPolicySource(self.onnx_engine())

    async def _decide_there(self, observation: Tree, state: State | None, mask: Bools | None, temperature: float) -> Decision:
        """The same through the workers: noise and initial state come from here, so that a worker needs no memory."""
        policy = self.outline
        before = tuple(s[0].numpy() for s in policy.initial_state(1)) if state is None and policy.recurrent else state or ()
        with self._noise_lock:
            noise = policy.draw_noise(1, self._noise)[0] * np.float32(temperature)
        answer = self.asked.forward_versioned(observation, before, None, mask, noise)
        (chosen, log_prob, value, after), version = await answer
        action = policy.distribution.to_environment(map_tree(lambda x: x[None], chosen))
        return Decision(map_tree(lambda x: x[0], action), chosen, float(log_prob), float(value), after, version)


class RemoteModel:
    """A network with a name. Made once with `model=`; after that, `RemoteModel(name=…)` finds it from any process of the run.

        model = ludus.RemoteModel(name="atari", model=AtariModel(), forward_args=(image,))
        logits = await model.forward(image)                  # in an actor: batched with every other session
        logits = model(image)                                # in plain code
        network = model.get_model()                          # in a trainer: a torch module of your own
        model.publish_weights(ludus.get_torch_model_weights(network))

    `model` is an instance whose class builds without arguments, or a class with `model_args` and `model_kwargs` (plain
    values). `forward_args` and `forward_kwargs` are examples of the inputs, without a batch dimension; they need not be
    given, but then nothing can be said about inputs that do not fit. `forward` adds the batch dimension and takes it off.

    `num_workers` processes run the network, on the machine where that is said, for callers on every machine of the run; each
    has `gpus_per_worker` GPUs to itself (0.5: two share one). By default every process that asks runs the network itself, which
    is fastest for small ones, and which `local_mode` asks for even where there are workers.

    `checkpoint_interval` says after how many versions one is stored durably (None: every ten minutes), and `keep` how many of
    those stay (None: all). Making a model again attaches to it; another model of the same name is refused, unless
    `override_model` is given.

    `use_onnx` lets onnxruntime compute the answers: True or "infer" in float32 ("train" means the same), "quantize" in 8-bit
    integers. The model is traced and compared with the original where it is made, which takes seconds, and follows
    new weights like any other. It needs the `serve` extra, and `forward_args` unless the model is a ludus Policy.
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
        _check_numbers(max_batch_size, num_workers, checkpoint_interval, keep)
        precision = _precision(use_onnx)
        if local_mode and num_workers:
            raise UsageError(f"local_mode=True and num_workers={num_workers} contradict each other.", "Give one of them.")
        gpus = gpus_of_workers(num_workers or 0, gpus_per_worker)
        if any(gpus) and precision:
            raise UsageError("With use_onnx the workers compute on the CPU.", "Leave out use_onnx, or gpus_per_worker.")
        self.name = name
        self._max_batch_size = max_batch_size
        self._held: Shared | None = None
        session = current("RemoteModel")
        if model is None:
            given: dict[str, Any] = {"model_args": model_args, "model_kwargs": model_kwargs, "override_model": override_model}
            given |= {"forward_args": forward_args, "forward_kwargs": forward_kwargs}
            given |= {"checkpoint_interval": checkpoint_interval, "keep": keep, "use_onnx": use_onnx}
            _refuse_for_attaching(name, given)
            info = session.client.call({"op": "model.find", "name": name}) if num_workers or local_mode else None
        else:
            inputs = modules.inputs_of(forward_args, forward_kwargs or {}) if forward_args or forward_kwargs else None
            described = modules.describe(model, model_args, model_kwargs, inputs, session.main_file)
            settings: dict[str, Any] = {"max_batch_size": max_batch_size}
            if precision and (override_model or not _has_graph(session, name, precision)):
                settings |= _traced(session, described, forward_args, forward_kwargs or {}, precision)
            elif override_model or use_onnx is False:
                settings |= {"graph": "", "precision": ""}
            info = _created(session, name, described, override_model, checkpoint_interval, keep, settings)
            session.classes[name] = type(described.module)
        if info is not None:
            _placed(session, info, max_batch_size, gpus, local_mode, override_model)
        _ = self._shared

    def __reduce__(self) -> tuple[Any, ...]:
        """As an argument to another process of the run, a model is its name; it is attached when it is first used there."""
        return _unattached, (self.name,)

    def __repr__(self) -> str:
        return f"RemoteModel({self.name!r})"

    @property
    def _shared(self) -> Shared:
        held = self._held
        if held is not None and held.session.here:
            return held
        session = current("RemoteModel")
        key = ("model", self.name)
        with session.lock:
            shared: Shared | None = session.shared.get(key)
            if shared is None:
                info = session.client.call({"op": "model.find", "name": self.name})
                shared = session.shared[key] = Shared(session, info, self._max_batch_size)
        if self._max_batch_size not in (None, shared.max_batch_size):
            raise UsageError(
                f"{self.name!r} has max_batch_size={shared.max_batch_size} in this process, not {self._max_batch_size}.",
                "Give it once, where the model is made.",
            )
        self._held = shared
        return shared

    # -- asking

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]:
        """`await` it on an event loop: NumPy arrays in and out, without a batch dimension. Raises what the model raises."""
        asked = self._shared.asked
        self.forward = asked.forward  # type: ignore[method-assign] # from now on without this detour
        return asked.forward(*args, **kwargs)

    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]:
        """The same, with the version of the weights that answered: what a recorded step must be stamped with."""
        return self._shared.asked.forward_versioned(*args, **kwargs)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Any:
        """The same for plain code, in any thread: blocks until the answer is there."""
        return self._shared.asked.call(*args, **kwargs)

    # -- choosing actions, where the model is a ludus Policy

    @property
    def policy(self) -> Policy:
        """The policy in this process, with its spaces. Raises UsageError when the model is another kind of module."""
        return self._shared.policy

    def decide(
        self,
        observation: Tree,
        state: State | None = None,
        mask: Bools | None = None,
        temperature: float | None = None,
    ) -> asyncio.Future[Decision]:
        """What an agent of this policy does; the exploration noise is drawn here, times `temperature` (1). On an event loop only."""
        return self._shared.decide(observation, state, mask, 1.0 if temperature is None else temperature)

    # -- weights

    @property
    def inputs(self) -> dict[str, Any]:
        """The declared inputs as data; empty when none were declared."""
        return dict(self._shared.description.get("inputs") or {})

    @property
    def version(self) -> int:
        """The newest version of the weights."""
        return self._shared.reader.version

    step = version

    def get_model(self) -> nn.Module:
        """A torch module of your own with the newest weights."""
        shared = self._shared
        built = shared.build()
        modules.load_weights(built, shared.reader.read()[1])
        return built

    def publish_weights(self, weights: Mapping[str, Any], step: int = -1) -> int:
        """Make these weights the next version, or version `step`; returns its number. They reach every process at its next batch
        (with `use_onnx`, and on other machines, a moment later).

        Raises IncompatibleCheckpoint when they are not those of the model; UsageError when `step` is not above the newest.
        """
        shared = self._shared
        arrays = modules.as_arrays(weights)
        modules.check_fit(shared.shapes, modules.shapes_in(arrays))
        with shared.session.staged(arrays) as file:
            publish = {"op": "model.publish", "name": self.name, "file": file, "step": int(step)}
            return int(shared.session.client.call(publish)["version"])

    def clone(self, step: int = -1) -> RemoteModel:
        """A frozen copy of the newest kept version at or below `step` (-1: of the version that is the newest now).

        It is a model of its own, called `<name>/clone-step-<version>`, and found by that name from anywhere.
        """
        session = self._shared.session
        info = session.client.call({"op": "model.clone", "name": self.name, "step": int(step)})
        return RemoteModel(str(info["name"]))


def _unattached(name: str) -> RemoteModel:
    handle = RemoteModel.__new__(RemoteModel)
    handle.name, handle._max_batch_size, handle._held = name, None, None
    return handle


def _refuse_for_attaching(name: str, given: Mapping[str, Any]) -> None:
    """Nothing that was asked for is ignored in silence."""
    meant = [key for key, value in given.items() if value]
    if meant:
        raise UsageError(
            f"RemoteModel({name!r}, {', '.join(meant)}) has no model=, so it attaches to an existing one.",
            "Give these where the model is made.",
        )


def _placed(
    session: Session,
    info: Mapping[str, Any],
    max_batch_size: int | None,
    gpus: Sequence[str],
    local_mode: bool,
    anew: bool,
) -> None:
    """Decide who answers for the model in this process: workers, started now if need be, or a module here."""
    name = str(info["name"])
    with session.lock:
        known: Shared | None = session.shared.get(("model", name))
        if gpus and not info["workers"]:
            info = {**info, "workers": Crew(session, name, gpus).paths}
        if local_mode:
            info = {**info, "workers": []}
        other = known is not None and known.graph != info["settings"].get("graph")
        if known is None or anew or other or ((gpus or local_mode) and known.workers != info["workers"]):
            session.shared["model", name] = Shared(session, info, max_batch_size)


def _precision(use_onnx: bool | str | None) -> str | None:
    if use_onnx in (None, False):
        return None
    if use_onnx is True or use_onnx in ("infer", "train"):
        return "float32"
    if use_onnx == "quantize":
        return "int8"
    raise UsageError(f"use_onnx={use_onnx!r} is not known.", 'Use True or "infer" for float32, "quantize" for int8.')


def _has_graph(session: Session, name: str, precision: str) -> bool:
    """Whether another process of the run has traced this model already."""
    if name not in session.client.call({"op": "names"})["models"]:
        return False
    settings = session.client.call({"op": "model.find", "name": name})["settings"]
    return bool(settings.get("graph")) and settings.get("precision") == precision


def _traced(
    session: Session, described: modules.DescribedModule, args: Sequence[Tree], kwargs: Mapping[str, Tree], precision: str
) -> dict[str, Any]:
    """Trace and check a model, and lay the result where all processes of the run find it. Raises UsageError."""
    from ludus.models.inference.onnx_hot_reload import OnnxGraph, write_graph  # onnxruntime is an extra

    graph = OnnxGraph.trace(described.module, described.description.get("inputs"), args, kwargs, precision)
    if session.location.is_local:
        path = str(write_graph(Path(session.location.staging).parent, graph))
    else:
        file = session.client.upload(graph.encode())
        path = str(session.client.call({"op": "graph.keep", "file": file})["path"])
    return {"graph": path, "precision": precision}


def _created(
    session: Session,
    name: str,
    described: modules.DescribedModule,
    override: bool,
    interval: int | None,
    keep: int | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    with session.staged(modules.weights_of(described.module)) as file:
        what = {"name": name, "description": described.description, "file": file, "override": override}
        how = {"interval": interval, "keep": keep, "settings": dict(settings)}
        return session.client.call({"op": "model.create", **what, **how})


def _check_numbers(max_batch_size: int | None, num_workers: int | None, interval: int | None, keep: int | None) -> None:
    smallest = {"max_batch_size": (max_batch_size, 1), "num_workers": (num_workers, 0)}
    smallest |= {"checkpoint_interval": (interval, 1), "keep": (keep, 1)}
    for what, (value, least) in smallest.items():
        if value is not None and (not isinstance(value, int) or value < least):
            raise UsageError(f"{what}={value!r} is not a whole number from {least}.")


def only_model(session: Session) -> RemoteModel:
    """The one model of the run. Raises UsageError when there are none or several."""
    names = session.client.call({"op": "names"})["models"]
    if len(names) != 1:
        raise UsageError(f"The run has {len(names)} models: {', '.join(names) or 'none'}.", "Choose one with model=.")
    return RemoteModel(names[0])
