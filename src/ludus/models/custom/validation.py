"""Whether a network of the user's can be learned with, found out before a run begins: every complaint says what to change.

The model is tried on random observations of its space, in copies of its own: the one that will learn is not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Tree, leaves, map_tree
from ludus.errors import ConfigError
from ludus.models.custom.custom_network import Answer, CustomNetwork
from ludus.models.custom.loader import told
from ludus.models.export.parity import random_observations
from ludus.models.policy import VALUES, Policy

_ROWS = 5
_STEPS = 3  # of a recurrent model
_TRIES = 8  # batches, half of them with other weights, before a gradient is taken for always 0
_MANY = 64  # rows of such a batch
_CLOSE = 1e-4  # float32, sums in another order
_NORMS = "Use LayerNorm or GroupNorm; observation_filter: MeanStdFilter normalises what comes in."
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def check_custom(policy: Policy) -> None:
    """Raises ConfigError with the remedy when the policy's own network cannot be learned with."""
    network = policy.network
    assert isinstance(network, CustomNetwork)
    with torch.random.fork_rng(devices=[]):
        one, other = _rebuilt(policy, 1), _rebuilt(policy, 2)
        checks = _Checks(one, policy)
        checks.parameters()
        with torch.no_grad():
            first = checks.shapes()
            checks.repeatable(first)
            checks.rows_apart(first)
            checks.modes_agree(first)
            checks.same_elsewhere(first, other)
        checks.gradients()


def _rebuilt(policy: Policy, seed: int) -> CustomNetwork:
    """As another process builds it: by the same name and arguments, then with these weights."""
    torch.manual_seed(seed)
    network = policy.network
    assert isinstance(network, CustomNetwork)
    twin = Policy.from_description(policy.description()).network
    assert isinstance(twin, CustomNetwork)
    own, other = _sizes(network), _sizes(twin)
    if own != other:
        differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise ConfigError(
            f"{network.shown}, built a second time, is another network: {', '.join(differing[:3])}.",
            "Sizes may depend on the arguments of __init__ alone.",
        )
    twin.load_state_dict(network.state_dict())
    return twin


def _sizes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in network.state_dict().items()}


class _Checks:
    """What is asked of a model, in an order in which each question can be answered."""

    def __init__(self, network: CustomNetwork, policy: Policy) -> None:
        self.network, self.model, self.shown = network, network.model, network.shown
        self.values = policy.kind == VALUES
        self._space, self._rng = policy.observation_space, np.random.default_rng(0)
        self.seen, self.others = self._observations(_ROWS), self._observations(_ROWS)

    def _observations(self, rows: int) -> Tree:
        return self.network._prepared(map_tree(torch.from_numpy, random_observations(self._space, rows, self._rng)))

    def fail(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.shown}: {what}", remedy)

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

    def ask(self, seen: Tree, state: tuple[Tensor, ...], network: CustomNetwork | None = None) -> Answer:
        network = network or self.network
        before = map_tree(Tensor.clone, (seen, state))
        rows = len(next(leaves(seen))[1])
        try:
            said = network.answer(seen, state)
        except Exception as error:  # the user's code may raise anything
            norms = self._of(_BATCH_NORMS)
            hint = (
                f"{', '.join(norms)} is a BatchNorm: {_NORMS}" if norms else f"Observations come as {_shapes(seen)}: rows first."
            )
            raise told(f"{self.shown}: forward failed for a batch of {rows}", error, hint) from error
        for (path, was), (_, now) in zip(leaves(before), leaves((seen, state)), strict=True):
            if not torch.equal(was, now):
                what = "the observation" if path.startswith("0") else "the state"
                raise self.fail(
                    f"forward changes {what} it is given.", "Others read it, too: write x = x / 255, not x.div_(255) or x /= 255."
                )
        return said

    def unrolled(self, seen: Tree, network: CustomNetwork | None = None, steps: int = _STEPS) -> Answer:
        """The last answer; a recurrent model sees the same observations several times."""
        network = network or self.network
        rows = len(next(leaves(seen))[1])
        state = self._initial(network, rows)
        for _ in range(steps if network.recurrent else 1):
            said = self.ask(seen, state, network)
            state = said.state
        return said

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

    # -- questions

    def shapes(self) -> Answer:
        """Of what it says to a batch; returns that."""
        said = self.ask(self.seen, self._initial(self.network, _ROWS))
        self._check_tensor("outputs", said.outputs)
        wanted, found = [_ROWS, self.network.num_outputs], list(said.outputs.shape)
        if found != wanted:
            swapped = isinstance(said.value, Tensor) and list(said.value.shape) == wanted
            raise self.fail(
                f"forward returned outputs of shape {found} for a batch of {_ROWS}, not {wanted}.",
                "Return (outputs, value), in this order."
                if swapped
                else "End with nn.Linear(…, num_outputs); keep the rows first.",
            )
        if said.value is None and not self.values:
            raise self.fail(
                "forward() returned no value estimate; this algorithm needs one.",
                "Return (outputs, value), or add  def value_function(self): return the value of the last forward, [B].",
            )
        if said.value is not None:
            self._check_tensor("value", said.value)
            if list(said.value.shape) not in ([_ROWS], [_ROWS, 1]):
                raise self.fail(
                    f"the value has shape {list(said.value.shape)} for a batch of {_ROWS}, not [{_ROWS}] or [{_ROWS}, 1].",
                    "One number for each row: nn.Linear(…, 1).",
                )
        if self.network.recurrent:
            before = self.network.initial_state(_ROWS)
            if len(said.state) != len(before):
                raise self.fail(f"forward returned {len(said.state)} states, initial_state {len(before)}.", "Return as many.")
            for i, part in enumerate(said.state):
                self._check_state("forward", i, part, _ROWS, before[i])
        return self.unrolled(self.seen)

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

    def repeatable(self, first: Answer) -> None:
        """The same again gives the same, whatever was asked between."""
        again = self.unrolled(self.seen)
        if self._differ(first, again):
            raise self._random_or_kept("the same observations, asked twice, get different answers")
        self.unrolled(self.others)
        if self._differ(first, self.unrolled(self.seen)):
            raise self._random_or_kept("what it answers depends on what it was asked before")

    def _random_or_kept(self, what: str) -> ConfigError:
        dropouts = self._of(_DROPOUTS)
        if dropouts:
            return self.fail(
                f"{what}: {', '.join(dropouts)} is Dropout.", "Remove it: acting and learning must agree on probabilities."
            )
        return self.fail(
            f"{what}.",
            "Keep nothing in self between calls and draw nothing at random; memory is a state: "
            "initial_state(batch_size), and forward(obs, state) → (outputs, value, state).",
        )

    def rows_apart(self, first: Answer) -> None:
        """A row gets the same answer alone, in a pair, and among others."""
        for begin, end in ((0, 1), (0, 2), (3, 5)):
            part = self.unrolled(map_tree(lambda x, b=begin, e=end: x[b:e], self.seen))
            if list(part.outputs.shape) != [end - begin, self.network.num_outputs]:
                raise self.fail(
                    f"outputs have shape {list(part.outputs.shape)} for a batch of {end - begin}.",
                    "Keep the rows first, also when there is one: no squeeze() without a dimension.",
                )
            if self._differ(first, part, slice(begin, end)):
                norms = self._of(_BATCH_NORMS)
                if norms:
                    raise self.fail(f"a row's answer depends on the rows beside it: {', '.join(norms)} is a BatchNorm.", _NORMS)
                raise self.fail(
                    "a row's answer depends on the rows beside it.",
                    "Compute along the dimensions after the first; no mean(0) or softmax(0).",
                )

    def modes_agree(self, first: Answer) -> None:
        """It is learned in one mode and exported in the other."""
        with _evaluating(self.network):
            other = self.unrolled(self.seen)
        if self._differ(first, other):
            named = self._of((*_BATCH_NORMS, *_DROPOUTS))
            raise self.fail(
                f"after .eval() it answers differently{': ' + ', '.join(named) if named else ''}.",
                "It is learned in one mode and served in the other: use layers that do not tell them apart.",
            )

    def same_elsewhere(self, first: Answer, other: CustomNetwork) -> None:
        """Built again and given the weights, it is the same: nothing that matters is outside of the weights."""
        if self._differ(first, self.unrolled(self.seen, other)):
            raise self.fail(
                "built again, with the same weights, it answers differently: something is not among its weights.",
                "Layers in a list belong into nn.ModuleList; a tensor made in __init__ into register_buffer or nn.Parameter.",
            )

    def gradients(self) -> None:
        """They reach whatever is to be learned."""
        targets = self._targets(self.seen)
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
        self._check_strays(total, named.values())
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        missed = [name for name, grad in zip(named, found, strict=True) if grad is None]
        if missed:
            raise self.fail(
                f"no gradient reaches {_some(missed)}.",
                "Use it in forward, remove it, or freeze it: requires_grad_(False).",
            )
        wild = [name for name, grad in zip(named, found, strict=True) if grad is not None and not torch.isfinite(grad).all()]
        if wild:
            raise self.fail(
                f"the gradient of {_some(wild)} is not a number.", "A root or logarithm of 0? Add a small number inside."
            )
        still = {name: named[name] for name, grad in zip(named, found, strict=True) if grad is not None and not grad.any()}
        self._check_still(still)

    def _targets(self, seen: Tree) -> list[Tensor]:
        said = self.unrolled(seen)
        return [said.outputs] if said.value is None else [said.outputs, said.value]

    def _check_still(self, still: dict[str, nn.Parameter]) -> None:
        """A gradient that was 0 once may be so by chance, or because a layer behind it begins as zeros, which is a good habit.

        So: many more observations, then with weights moved away from where they begin. The network is a copy, and this is
        the last question.
        """
        for number in range(_TRIES):
            if not still:
                return
            if number >= _TRIES // 2:
                self._move_weights()
            found = torch.autograd.grad(_total(self._targets(self._observations(_MANY))), list(still.values()), allow_unused=True)
            still = {name: p for (name, p), grad in zip(still.items(), found, strict=True) if grad is None or not grad.any()}
        if still:
            raise self.fail(
                f"the gradient of {_some(list(still))} is always 0: it would never change.",
                "Is it multiplied by 0, rounded, compared, or behind a ReLU that is never above 0? "
                "Else remove it, or freeze it: requires_grad_(False).",
            )

    @torch.no_grad()
    def _move_weights(self) -> None:
        for parameter in self.model.parameters():
            inputs = parameter[0].numel() if parameter.ndim > 1 else _MANY
            parameter.add_(torch.randn_like(parameter) / inputs**0.5)

    def _check_strays(self, total: Tensor, registered: Any) -> None:
        """Whatever else a gradient reaches would never be learned, nor saved."""
        known = {id(parameter) for parameter in registered}
        stray = next((leaf for leaf in _graph_leaves(total) if id(leaf) not in known), None)
        if stray is not None:
            raise self.fail(
                f"a tensor of shape {list(stray.shape)} takes part and is not among its parameters.",
                "Layers in a list belong into nn.ModuleList, a lone tensor into nn.Parameter, and all are made in __init__.",
            )

    # -- small parts

    def _of(self, kinds: tuple[type, ...]) -> list[str]:
        return [name or type(module).__name__ for name, module in self.model.named_modules() if isinstance(module, kinds)]

    @staticmethod
    def _differ(one: Answer, other: Answer, rows: slice = slice(None)) -> bool:
        pairs = [(one.outputs, other.outputs), *zip(one.state, other.state, strict=True)]
        if one.value is not None:
            pairs.append((one.value, other.value))
        return any(
            mine[rows].shape != theirs.shape
            or not torch.allclose(mine[rows], theirs, rtol=1e-3, atol=_CLOSE * (1 + float(mine.abs().max())))
            for mine, theirs in pairs
        )


def _total(targets: Sequence[Tensor]) -> Tensor:
    """One number in which every answer takes part."""
    return torch.stack([target.square().sum() + target.sum() for target in targets]).sum()


def _graph_leaves(result: Tensor) -> Iterator[Tensor]:
    """Tensors at which the gradient of a result would be collected."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(before for before, _ in node.next_functions)


@contextlib.contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    network.eval()
    try:
        yield
    finally:
        network.train()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shapes(seen: Tree) -> str:
    return ", ".join(f"{path + ' ' if path else ''}{_dtype(leaf)}{list(leaf.shape)}" for path, leaf in leaves(seen))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
