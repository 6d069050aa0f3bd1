"""Validation of a user's network before a run starts; every error tells what to change.

The model is tested on random observations of its space, in copies: the one that will learn is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Tree, leaves, map_tree
from ludus.errors import ConfigError
from ludus.models.custom.custom_network import CustomNetwork, ModelOutput
from ludus.models.custom.loader import translate_user_errors
from ludus.models.export.parity import random_observations
from ludus.models.policy import VALUES, Policy

_ROWS = 5
_STEPS = 3  # unroll for a recurrent model
_TRIES = 8  # batches, half of them with perturbed weights, before a gradient counts as always 0
_GRADIENT_ROWS = 64  # rows of such a batch
_TOLERANCE = 1e-4  # float32 rounding
_NORMS = "Use LayerNorm or GroupNorm; observation_filter: MeanStdFilter normalises what comes in."
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def check_custom(policy: Policy) -> None:
    """Raise ConfigError with the remedy if the policy's network cannot be trained."""
    network = policy.network
    assert isinstance(network, CustomNetwork)
    with torch.random.fork_rng(devices=[]):
        one, other = _rebuild(policy, 1), _rebuild(policy, 2)
        checks = _Checks(one, policy)
        checks.parameters()
        with torch.no_grad():
            first = checks.shapes()
            checks.repeatable(first)
            checks.rows_independent(first)
            checks.modes_agree(first)
            checks.rebuilt_equal(first, other)
        checks.gradients()


def _rebuild(policy: Policy, seed: int) -> CustomNetwork:
    """Rebuild it as another process does: by the same name and arguments, then with these weights."""
    torch.manual_seed(seed)
    network = policy.network
    assert isinstance(network, CustomNetwork)
    rebuilt = Policy.from_description(policy.description()).network
    assert isinstance(rebuilt, CustomNetwork)
    own, other = _sizes(network), _sizes(rebuilt)
    if own != other:
        differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise ConfigError(
            f"{network.label}, built a second time, is another network: {', '.join(differing[:3])}.",
            "Sizes may depend on the arguments of __init__ alone.",
        )
    rebuilt.load_state_dict(network.state_dict())
    return rebuilt


def _sizes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


class _Checks:
    """The checks, in an order in which each builds on the previous ones."""

    def __init__(self, network: CustomNetwork, policy: Policy) -> None:
        self.network, self.model, self.label = network, network.model, network.label
        self.values = policy.kind == VALUES
        self._space, self._rng = policy.observation_space, np.random.default_rng(0)
        self.observation, self.other_observation = self._observations(_ROWS), self._observations(_ROWS)

    def _observations(self, rows: int) -> Tree:
        return self.network._prepare(map_tree(torch.from_numpy, random_observations(self._space, rows, self._rng)))

    def fail(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.label}: {what}", remedy)

    # -- the module

    def parameters(self) -> None:
        named = dict(self.model.named_parameters())
        if not any(p.requires_grad for p in named.values()):
            raise self.fail(
                "it has no parameter to learn.", "Keep layers in attributes (self.head = nn.Linear(…)), made in __init__."
            )
        for name, parameter in named.items():
            if parameter.dtype != torch.float32:
                raise self.fail(
                    f"{name} is {_dtype(parameter)}.", "Parameters are float32; mixed_precision makes them less where it is safe."
                )
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor) or value.dtype == torch.bfloat16 or value.is_complex():
                raise self.fail(f"{name} cannot be saved.", "Buffers are float32, integers or booleans.")

    # -- calls

    def call(self, observation: Tree, state: tuple[Tensor, ...], network: CustomNetwork | None = None) -> ModelOutput:
        network = network or self.network
        before = map_tree(Tensor.clone, (observation, state))
        rows = len(next(leaves(observation))[1])
        shapes = [f"{path + ' ' if path else ''}{_dtype(leaf)}{list(leaf.shape)}" for path, leaf in leaves(observation)]
        norms = self._modules_of_type(_BATCH_NORMS)
        hint = (
            f"{', '.join(norms)} is a BatchNorm: {_NORMS}" if norms else f"Observations come as {', '.join(shapes)}: rows first."
        )
        with translate_user_errors(f"{self.label}: forward failed for a batch of {rows}", hint):
            output = network.call_model(observation, state)
        for (path, was), (_, now) in zip(leaves(before), leaves((observation, state)), strict=True):
            if not torch.equal(was, now):
                what = "the observation" if path.startswith("0") else "the state"
                raise self.fail(
                    f"forward changes {what} it is given.", "Others read it, too: write x = x / 255, not x.div_(255) or x /= 255."
                )
        return output

    def unroll(self, observation: Tree, network: CustomNetwork | None = None, steps: int = _STEPS) -> ModelOutput:
        """Return the last output; a recurrent model gets the same observations several times."""
        network = network or self.network
        rows = len(next(leaves(observation))[1])
        state = self._initial(network, rows)
        for _ in range(steps if network.recurrent else 1):
            output = self.call(observation, state, network)
            state = output.state
        return output

    def _initial(self, network: CustomNetwork, rows: int) -> tuple[Tensor, ...]:
        state = network.initial_state(rows) if network.recurrent else ()
        for i, part in enumerate(state):
            self._check_state(f"initial_state({rows})", i, part, rows, None)
            if part.any():
                raise self.fail(
                    "initial_state is not zeros.",
                    "A state starts as zeros everywhere; in forward, add what yours shall start with.",
                )
        return state

    def _check_state(self, what: str, i: int, part: Any, rows: int, like: Tensor | None) -> None:
        if not isinstance(part, Tensor) or part.dtype != torch.float32:
            found = f"a {type(part).__name__}" if not isinstance(part, Tensor) else _dtype(part)
            raise self.fail(f"{what} gives {found} as state {i}.", "A state is a float32 tensor [B, …], or a tuple of them.")
        if part.ndim < 1 or part.shape[0] != rows or (like is not None and part.shape != like.shape):
            expected = f"[{rows}, …]" if like is None else str(list(like.shape))
            raise self.fail(
                f"{what} gives a state of shape {list(part.shape)}, not {expected}.",
                "Rows come first and the shape stays the same; nn.LSTM has them second: transpose(0, 1), or use nn.LSTMCell.",
            )

    # -- checks

    def shapes(self) -> ModelOutput:
        """Check the shapes of the outputs for a batch; return the output."""
        output = self.call(self.observation, self._initial(self.network, _ROWS))
        self._check_tensor("outputs", output.outputs)
        wanted, found = [_ROWS, self.network.num_outputs], list(output.outputs.shape)
        if found != wanted:
            swapped = isinstance(output.value, Tensor) and list(output.value.shape) == wanted
            raise self.fail(
                f"forward returned outputs of shape {found} for a batch of {_ROWS}, not {wanted}.",
                "Return (outputs, value), in this order."
                if swapped
                else "End with nn.Linear(…, num_outputs); keep the rows first.",
            )
        if output.value is None and not self.values:
            raise self.fail(
                "forward() returned no value estimate; this algorithm needs one.",
                "Return (outputs, value), or add  def value_function(self): return the value of the last forward, [B].",
            )
        if output.value is not None:
            self._check_tensor("value", output.value)
            if list(output.value.shape) not in ([_ROWS], [_ROWS, 1]):
                raise self.fail(
                    f"the value has shape {list(output.value.shape)} for a batch of {_ROWS}, not [{_ROWS}] or [{_ROWS}, 1].",
                    "One number for each row: nn.Linear(…, 1).",
                )
        if self.network.recurrent:
            before = self.network.initial_state(_ROWS)
            if len(output.state) != len(before):
                raise self.fail(f"forward returned {len(output.state)} states, initial_state {len(before)}.", "Return as many.")
            for i, part in enumerate(output.state):
                self._check_state("forward", i, part, _ROWS, before[i])
        return self.unroll(self.observation)

    def _check_tensor(self, what: str, found: Any) -> None:
        if not isinstance(found, Tensor):
            raise self.fail(f"forward returned a {type(found).__name__} as {what}.", "Return tensors: (outputs, value).")
        if found.dtype != torch.float32:
            raise self.fail(
                f"the {what} are {_dtype(found)}." if what == "outputs" else f"the value is {_dtype(found)}.",
                "Make it float32: .float().",
            )
        if not torch.isfinite(found).all():
            raise self.fail(
                f"the {what} {'hold' if what == 'outputs' else 'is'} what is not a number (NaN or infinite) for ordinary observations.",
                "Look for a division by 0, the log or root of what may be 0, or weights that were never set.",
            )

    def repeatable(self, first: ModelOutput) -> None:
        """The same inputs give the same outputs, independent of calls in between."""
        again = self.unroll(self.observation)
        if self._differ(first, again):
            raise self._not_repeatable_error("the same observations, asked twice, get different answers")
        self.unroll(self.other_observation)
        if self._differ(first, self.unroll(self.observation)):
            raise self._not_repeatable_error("what it answers depends on what it was asked before")

    def _not_repeatable_error(self, what: str) -> ConfigError:
        dropouts = self._modules_of_type(_DROPOUTS)
        if dropouts:
            return self.fail(
                f"{what}: {', '.join(dropouts)} is Dropout.", "Remove it: acting and learning must agree on probabilities."
            )
        return self.fail(
            f"{what}.",
            "Keep nothing in self between calls and draw nothing at random; memory is a state: "
            "initial_state(batch_size), and forward(obs, state) → (outputs, value, state).",
        )

    def rows_independent(self, first: ModelOutput) -> None:
        """A row gives the same output alone, in a pair, and in a batch."""
        for begin, end in ((0, 1), (0, 2), (3, 5)):
            part = self.unroll(map_tree(lambda x, b=begin, e=end: x[b:e], self.observation))
            if list(part.outputs.shape) != [end - begin, self.network.num_outputs]:
                raise self.fail(
                    f"outputs have shape {list(part.outputs.shape)} for a batch of {end - begin}.",
                    "Keep the rows first, also when there is one: no squeeze() without a dimension.",
                )
            if self._differ(first, part, slice(begin, end)):
                norms = self._modules_of_type(_BATCH_NORMS)
                if norms:
                    raise self.fail(f"a row's output depends on the other rows: {', '.join(norms)} is a BatchNorm.", _NORMS)
                raise self.fail(
                    "a row's output depends on the other rows.",
                    "Compute along the dimensions after the first; no mean(0) or softmax(0).",
                )

    def modes_agree(self, first: ModelOutput) -> None:
        """Training and eval mode must agree: it is trained in one and served in the other."""
        self.network.eval()
        other = self.unroll(self.observation)
        self.network.train()
        if self._differ(first, other):
            named = self._modules_of_type((*_BATCH_NORMS, *_DROPOUTS))
            raise self.fail(
                f"after .eval() it answers differently{': ' + ', '.join(named) if named else ''}.",
                "It is learned in one mode and served in the other: use layers that do not tell them apart.",
            )

    def rebuilt_equal(self, first: ModelOutput, other: CustomNetwork) -> None:
        """Rebuilt with the same weights it gives the same outputs: nothing that matters is outside of the weights."""
        if self._differ(first, self.unroll(self.observation, other)):
            raise self.fail(
                "built again, with the same weights, it answers differently: something is not among its weights.",
                "Layers in a list belong into nn.ModuleList; a tensor made in __init__ into register_buffer or nn.Parameter.",
            )

    def gradients(self) -> None:
        """Gradients reach all trainable parameters."""
        targets = self._targets(self.observation)
        if not any(target.requires_grad for target in targets):
            raise self.fail(
                "no gradient reaches its parameters.",
                "No torch.no_grad(), detach(), .data or NumPy between them and the outputs.",
            )
        for what, target in zip(("outputs", "value"), targets, strict=False):
            if not target.requires_grad and not (what == "value" and self.values):
                raise self.fail(
                    f"no gradient goes through the {what}.", "No torch.no_grad(), detach(), .data or NumPy on the way."
                )
        total = _total(targets)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._check_unregistered(total, named.values())
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        unreached = [name for name, grad in zip(named, found, strict=True) if grad is None]
        if unreached:
            raise self.fail(
                f"no gradient reaches {_some(unreached)}.",
                "Use it in forward, remove it, or freeze it: requires_grad_(False).",
            )
        not_finite = [
            name for name, grad in zip(named, found, strict=True) if grad is not None and not torch.isfinite(grad).all()
        ]
        if not_finite:
            raise self.fail(
                f"the gradient of {_some(not_finite)} is not a number.", "A root or logarithm of 0? Add a small number inside."
            )
        zero = {name: named[name] for name, grad in zip(named, found, strict=True) if grad is not None and not grad.any()}
        self._check_zero_gradients(zero)

    def _targets(self, observation: Tree) -> list[Tensor]:
        output = self.unroll(observation)
        return [output.outputs] if output.value is None else [output.outputs, output.value]

    def _check_zero_gradients(self, zero: dict[str, nn.Parameter]) -> None:
        """A gradient may be 0 by chance, or because a later layer is initialised with zeros.

        So try many more observations, then perturbed weights. The network is a copy, and this is the last check.
        """
        for number in range(_TRIES):
            if not zero:
                return
            if number >= _TRIES // 2:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        inputs = parameter[0].numel() if parameter.ndim > 1 else _GRADIENT_ROWS
                        parameter.add_(torch.randn_like(parameter) / inputs**0.5)
            found = torch.autograd.grad(
                _total(self._targets(self._observations(_GRADIENT_ROWS))), list(zero.values()), allow_unused=True
            )
            zero = {name: p for (name, p), grad in zip(zero.items(), found, strict=True) if grad is None or not grad.any()}
        if zero:
            raise self.fail(
                f"the gradient of {_some(list(zero))} is always 0: it would never change.",
                "Is it multiplied by 0, rounded, compared, or behind a ReLU that is never above 0? "
                "Else remove it, or freeze it: requires_grad_(False).",
            )

    def _check_unregistered(self, total: Tensor, registered: Any) -> None:
        """Tensors that get a gradient but are not registered would never be trained or saved."""
        known = {id(parameter) for parameter in registered}
        unregistered = next((leaf for leaf in _graph_leaves(total) if id(leaf) not in known), None)
        if unregistered is not None:
            raise self.fail(
                f"a tensor of shape {list(unregistered.shape)} takes part and is not among its parameters.",
                "Layers in a list belong into nn.ModuleList, a lone tensor into nn.Parameter, and all are made in __init__.",
            )

    # -- helpers

    def _modules_of_type(self, kinds: tuple[type, ...]) -> list[str]:
        return [name or type(module).__name__ for name, module in self.model.named_modules() if isinstance(module, kinds)]

    @staticmethod
    def _differ(one: ModelOutput, other: ModelOutput, rows: slice = slice(None)) -> bool:
        pairs = [(one.outputs, other.outputs), *zip(one.state, other.state, strict=True)]
        if one.value is not None:
            pairs.append((one.value, other.value))
        return any(
            mine[rows].shape != theirs.shape
            or not torch.allclose(mine[rows], theirs, rtol=1e-3, atol=_TOLERANCE * (1 + float(mine.abs().max())))
            for mine, theirs in pairs
        )


def _total(targets: Sequence[Tensor]) -> Tensor:
    """One number that depends on every output."""
    return torch.stack([target.square().sum() + target.sum() for target in targets]).sum()


def _graph_leaves(result: Tensor) -> Iterator[Tensor]:
    """Yield the tensors at which the gradient of a result would accumulate."""
    waiting, visited = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(before for before, _ in node.next_functions)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
