"""Modules as data: what can be rebuilt elsewhere is, what cannot is refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from ludus.core import trust
from ludus.errors import Damaged, IncompatibleCheckpoint, UnknownName, UsageError
from ludus.models.policy import Policy
from ludus.models.weights import module_spec, serialization


class Plain(nn.Module):
    def __init__(self, width: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width, bias=bias)

    class Inner(nn.Module):
        pass


class Needy(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layer = nn.Linear(sizes[0], sizes[1])


class Moody(nn.Module):
    built = 0

    def __init__(self) -> None:
        super().__init__()
        Moody.built += 1
        self.layer = nn.Linear(1, Moody.built)


def rebuilt(described: module_spec.DescribedModule) -> nn.Module:
    return module_spec.build(json.loads(json.dumps(described.description)))


def test_an_instance_whose_class_builds_without_arguments_has_a_twin() -> None:
    described = module_spec.describe(Plain(), inputs=module_spec.inputs_of((np.zeros(2, np.float32),), {}))
    assert described.description["class"] == "tests.models.test_module_spec:Plain"
    twin = rebuilt(described)
    module_spec.load_weights(twin, module_spec.weights_of(described.module))
    x = torch.ones(1, 2)
    assert torch.equal(twin.layer(x), described.module.layer(x))  # type: ignore[operator]


def test_a_class_is_built_from_its_arguments() -> None:
    described = module_spec.describe(Plain, [5], {"bias": False})
    assert module_spec.shapes_of(rebuilt(described)) == {"layer.weight": ((5, 2), "float32")}


def test_an_instance_may_come_with_its_arguments() -> None:
    described = module_spec.describe(Needy([2, 4]), args=([2, 4],))
    assert module_spec.shapes_of(rebuilt(described)) == module_spec.shapes_of(described.module)


def test_a_nested_class_is_found() -> None:
    assert isinstance(rebuilt(module_spec.describe(Plain.Inner())), Plain.Inner)


def test_a_policy_of_ours_describes_itself() -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2))
    twin = rebuilt(module_spec.describe(policy))
    assert isinstance(twin, Policy)
    assert module_spec.shapes_of(twin) == module_spec.shapes_of(policy)


class Unsaid(Policy):
    """Does not say that it is another class."""


@pytest.mark.parametrize(
    ("model", "args", "message", "remedy"),
    [
        (Needy([2, 4]), (), "cannot be built", "model_args"),
        (Needy, (), "cannot be built", "model_args"),
        (lambda x: x, (), "not a torch module", "torch.nn.Module"),
        ("tests.models.test_module_spec:Plain", (), "not a torch module", "torch.nn.Module"),
        (Plain(4), (), "another network: layer", "model_args"),
        (Moody(), (), "another network", "model_args"),
        (Plain, (np.float32(3),), "cannot be stored as JSON", "numbers, strings"),
        (Unsaid(gym.spaces.Discrete(2), gym.spaces.Discrete(2)), (), "another class", "description"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_the_remedy(model: Any, args: Any, message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        module_spec.describe(model, args)
    assert remedy in caught.value.hint


def test_a_class_inside_a_function_is_refused() -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(UsageError, match="inside a function") as caught:
        module_spec.describe(Local())
    assert "top level" in caught.value.hint


def test_a_class_with_a_wrong_module_is_rejected() -> None:
    moved = type("Plain", (nn.Module,), {"__module__": __name__, "__qualname__": "Plain"})
    with pytest.raises(UsageError, match="another object"):
        module_spec.describe(moved())


def test_a_class_of_the_program_itself_is_found_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text("from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n")
    trust.add_project(tmp_path)
    net = module_spec.find_class(f"{script}:Net")
    assert module_spec.find_class(f"{script}:Net") is net, "the script ran twice"
    assert module_spec.describe(net()).description["class"] == f"{script}:Net"
    with pytest.raises(UnknownName, match="no class 'Other'"):
        module_spec.find_class(f"{script}:Other")
    with pytest.raises(UnknownName, match="no longer exists"):
        module_spec.find_class(f"{tmp_path}/gone.py:Net")


def test_a_class_called_main_belongs_to_the_launching_script(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text("")
    cls = type("Net", (nn.Module,), {"__module__": "__main__", "__qualname__": "Net"})
    assert module_spec.describe(cls, main_file=str(script)).description["class"] == f"{script}:Net"
    with pytest.raises(UsageError, match="not a file"):
        module_spec.describe(cls, main_file="<stdin>")


def test_a_script_that_launches_while_searched_for_a_class_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import ludus\nludus.init()\n")
    trust.add_project(tmp_path)
    with pytest.raises(UsageError, match=r"ludus.init was called while .*unguarded.py") as caught:
        module_spec.find_class(f"{script}:Net")
    assert "__main__" in caught.value.hint
    module_spec.forbid_while_loading("anything")  # the ban ends with the import


def test_descriptions_are_the_same_model_when_class_and_arguments_are() -> None:
    one = module_spec.describe(Plain, [3]).description
    assert module_spec.same(one, module_spec.describe(Plain, [3], inputs=module_spec.inputs_of((1.0,), {})).description)
    assert not module_spec.same(one, module_spec.describe(Plain, [4]).description)
    two, three = (module_spec.describe(Plain, [3], inputs=module_spec.inputs_of((x,), {})).description for x in (1.0, 1))
    assert not module_spec.same(two, three)


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = Plain()
    before = module_spec.weights_of(model)
    for wrong in ({}, before | {"more": np.zeros(1)}, before | {"layer.bias": np.zeros(4, np.float32)}):
        with pytest.raises(IncompatibleCheckpoint, match="do not fit"):
            module_spec.load_weights(model, wrong)
    with pytest.raises(IncompatibleCheckpoint, match=r"layer\.bias is float64"):
        module_spec.load_weights(model, before | {"layer.bias": np.zeros(3)})
    assert all(np.array_equal(before[name], value) for name, value in module_spec.weights_of(model).items())


def test_weights_are_copies_in_both_directions() -> None:
    model = Plain()
    weights = module_spec.weights_of(model)
    weights["layer.bias"][:] = 9
    assert not (module_spec.weights_of(model)["layer.bias"] == 9).any()
    module_spec.load_weights(model, weights)
    weights["layer.bias"][:] = 1
    assert (module_spec.weights_of(model)["layer.bias"] == 9).all()


def test_weights_that_numpy_does_not_know_are_refused() -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        module_spec.weights_of(Plain().to(torch.bfloat16))


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"class": "ludus.models.policy:Policy"}', b'{"class": "os:system"}'])
def test_a_damaged_description_is_named_as_such(text: bytes) -> None:
    with pytest.raises(Damaged, match=r"model\.json"):
        serialization.policy_from(text)


def test_a_module_is_not_mistaken_for_a_policy() -> None:
    description = module_spec.describe(Plain()).description
    assert isinstance(serialization.model_from(description), Plain)
    with pytest.raises(Damaged, match="does not describe a policy"):
        serialization.policy_from(description)
