"""Networks of the user's own: found by name, checked with remedies, and the same network wherever a policy runs."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.algorithms.optim.flat_adam import FlatAdam
from ludus.core.tree import Tree, map_tree
from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import ConfigError, IncompatibleCheckpoint, LudusError, UnknownName, Untrusted
from ludus.models.autoregressive_actions import Branch
from ludus.models.custom import loader
from ludus.models.custom.custom_network import CustomNetwork
from ludus.models.custom.loader import ModelFiles, find_class
from ludus.models.custom.validation import check_custom
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy
from ludus.models.weights import serialization
from ludus.testing import check_model

Write = Callable[..., Path]

BOX, PAIR = gs.Box(-1, 1, (4,), np.float32), gs.Discrete(2)

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
"""
GOOD = """
class CustomModel(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name, hidden=8):
        super().__init__()
        self.body = nn.Linear(obs_space.shape[0], hidden)
        self.head = nn.Linear(hidden, num_outputs)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        x = torch.tanh(self.body(obs))
        return self.head(x), self.value(x)
"""
RECURRENT = """
class CustomModel(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__()
        self.cell = nn.LSTMCell(obs_space.shape[0], 6)
        self.head = nn.Linear(6, num_outputs)
        self.value = nn.Linear(6, 1)

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 6), torch.zeros(batch_size, 6)

    def forward(self, obs, state):
        h, c = self.cell(obs, state)
        return self.head(h), self.value(h).squeeze(1), (h, c)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A project in an empty directory, which is the present one; `write` puts a model into it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(loader.VARIABLE, raising=False)
    monkeypatch.setattr(loader, "_registered", {})

    def put(text: str = GOOD, name: str = "customnet", root: Path = tmp_path, folder: str = "model") -> Path:
        (root / folder).mkdir(parents=True, exist_ok=True)
        path = root / folder / f"{name}.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return path

    yield put
    for name in [name for name in sys.modules if name.startswith(("ludus_models_", "mine_"))]:
        del sys.modules[name]


def made(name: str = "customnet", observation_space: Any = BOX, action_space: Any = PAIR, **given: Any) -> Policy:
    kind = given.pop("kind", "probabilities")
    normalise = given.pop("normalise", False)
    return Policy(observation_space, action_space, NetworkConfig(custom_model=name, **given), normalise, kind)


def inside(policy: Policy) -> Any:
    assert isinstance(policy.network, CustomNetwork)
    return policy.network.model


# -- finding ------------------------------------------------------------------------------------------------------------


def test_a_plain_name_is_a_file_in_the_model_folder_of_the_present_directory(write: Write) -> None:
    write()
    assert find_class("customnet").__name__ == "CustomModel"


def test_the_named_path_comes_first_then_here_then_pythons_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("named", "along"):
        write(GOOD + f"    place = {place!r}\n", root=tmp_path / place)
    monkeypatch.syspath_prepend(str(tmp_path / "along"))
    assert vars(find_class("customnet"))["place"] == "along"
    write(GOOD + "    place = 'here'\n")
    assert vars(find_class("customnet"))["place"] == "here"
    monkeypatch.setenv(loader.VARIABLE, os.pathsep.join(["", str(tmp_path / "none"), str(tmp_path / "named")]))
    assert vars(find_class("customnet"))["place"] == "named"


def test_the_named_path_may_be_the_folder_of_the_files_itself(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(root=tmp_path / "elsewhere", folder="nets")
    monkeypatch.setenv(loader.VARIABLE, str(tmp_path / "elsewhere" / "nets"))
    assert find_class("customnet").__name__ == "CustomModel"


def test_the_folder_of_an_experiments_file_is_looked_into_first(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.VARIABLE, str(tmp_path / "other"))
    write(root=tmp_path / "beside")
    for _ in range(2):
        loader.add_search_directory(tmp_path / "beside")
    assert os.environ[loader.VARIABLE] == os.pathsep.join([str(tmp_path / "beside"), str(tmp_path / "other")])
    assert find_class("customnet").__name__ == "CustomModel"


def test_a_missing_model_error_lists_the_searched_places_and_the_remedy(write: Write, tmp_path: Path) -> None:
    write()
    with pytest.raises(UnknownName) as told:
        find_class("customnett")
    for word in (str(tmp_path), "sys.path", "'customnet'", "LUDUS_MODEL_PATH", "project's directory"):
        assert word in str(told.value)


@pytest.mark.parametrize(
    "name",
    [
        *("model/customnet.py", "customnet.py", "../customnet", "/tmp/customnet", "a.b", "", " ", "customnet ", "a" * 200),
        *("__init__", "__main__", "os:__class__", "__builtins__:object", "a.__b__:C", "a..b:C", ".a:C", "a:b.c", "a:", ":C"),
        *("a/b:C", "model\\customnet", "customnet\n", "a\0b", "café"),
    ],
)
def test_only_names_are_names(write: Write, name: str) -> None:
    write()
    with pytest.raises(ConfigError, match="not the name of a model"):
        find_class(name)


def test_a_path_is_answered_with_the_name_that_was_meant(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"custom_model: customnet;"):
        find_class("model/customnet.py")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("class Net(nn.Module): pass", "has no class CustomModel. It has Net: call the model CustomModel"),
        ("x = 1", r"has no class CustomModel. Write  class CustomModel\(nn.Module\)"),
        ("class CustomModel: pass", "CustomModel is not a torch.nn.Module"),
        ("CustomModel = nn.Linear(2, 2)", "a Linear is not a torch.nn.Module"),
        ("CustomModel = nn.Module", "torch.nn.Module itself"),
        ("class CustomModel(nn.Module)\n    pass", "line 5: expected ':'"),
        (
            "import no_such_package\nclass CustomModel: pass",
            "customnet.py, line 5: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("1 / 0\nclass CustomModel: pass", "line 5: ZeroDivisionError: division by zero"),
        ("class CustomModel: pass\nraise SystemExit(3)", "SystemExit: 3"),
        ("(" * 5000, "cannot be imported"),
        ("class CustomModel: pass\ndel CustomModel", "a NoneType is not a torch.nn.Module"),
    ],
)
def test_a_file_without_a_model_is_reported_with_its_line_and_remedy(write: Write, text: str, match: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=match):
        find_class("customnet")


def test_files_of_the_folder_import_each_other(write: Write) -> None:
    write("SIZE = 7", "blocks")
    write("from .blocks import SIZE\nfrom model.blocks import SIZE as again\n" + GOOD + "    size = SIZE + again\n")
    assert vars(find_class("customnet"))["size"] == 14


def test_sibling_files_do_not_matter_unless_imported(write: Write, tmp_path: Path) -> None:
    write()
    (tmp_path / "model" / "picture.py").write_bytes(b"\x89PNG\xff")
    (tmp_path / "model" / "broken.py").write_text("def")
    (tmp_path / "model" / "folder.py").mkdir()
    (tmp_path / "model" / "large.py").write_text("#" * (1 << 20))
    assert find_class("customnet").__name__ == "CustomModel"
    assert sorted(loader.files_of("customnet").texts) == ["broken", "customnet"]


def test_a_file_is_read_before_it_is_run_and_not_run_without_the_class(write: Write, tmp_path: Path) -> None:
    write("import pathlib; pathlib.Path('ran').touch()\nclass Net(nn.Module): pass")
    with pytest.raises(ConfigError, match="has no class CustomModel"):
        find_class("customnet")
    assert not (tmp_path / "ran").exists()


def test_an_edited_file_is_loaded_again(write: Write) -> None:
    write(GOOD + "    size = 1\n")
    before = find_class("customnet")
    assert find_class("customnet") is before
    write(GOOD + "    size = 2\n")  # the same length, within the same second
    assert vars(find_class("customnet"))["size"] == 2
    assert vars(before)["size"] == 1


def test_a_file_that_is_no_text_or_too_large_is_refused(write: Write) -> None:
    write().write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"Cannot read model/customnet\.py"):
        find_class("customnet")
    write().write_text("x = '" + "y" * (1 << 20) + "'")
    with pytest.raises(ConfigError, match="too many for a model"):
        find_class("customnet")


def test_a_class_is_found_in_a_module(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(GOOD, "nets", folder="mine_package")
    assert find_class("mine_package.nets:CustomModel").__name__ == "CustomModel"
    with pytest.raises(UnknownName, match="Did you mean 'CustomModel'"):
        find_class("mine_package.nets:CustomModle")


def test_a_module_is_read_before_it_is_run_and_not_run_without_the_class(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import pathlib; pathlib.Path('ran').touch()\ndef attack(): pass\nclass Other: pass"
    write(text, "mine_side_effects", folder=".")
    with pytest.raises(UnknownName, match="has no class"):
        find_class("mine_side_effects:Net")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="not a torch"):
        find_class("mine_side_effects:Other")


@pytest.mark.parametrize(
    "name", ["antigravity:fly", "os:system", "no_such_module:Net", "no.such.module:Net", "numpy.no_such:Net"]
)
def test_what_a_foreign_checkpoint_might_name_is_not_imported(write: Write, name: str) -> None:
    before = set(sys.modules)
    with pytest.raises((UnknownName, ConfigError, Untrusted)):
        find_class(name)
    assert not {"antigravity", "webbrowser"} & (set(sys.modules) - before)


# -- building -----------------------------------------------------------------------------------------------------------


def test_the_constructor_is_given_the_spaces_the_outputs_the_section_and_its_own_keywords(write: Write) -> None:
    write(
        GOOD.replace(
            "super().__init__()", "super().__init__(); self.given = (obs_space, action_space, num_outputs, model_config, name)"
        )
    )
    policy = made(fcnet_hiddens=(32, 16), custom_model_config={"hidden": 5}, max_seq_len=7)
    model = inside(policy)
    observation_space, action_space, outputs, section, name = model.given
    assert (observation_space, action_space, outputs, name) == (BOX, PAIR, 2, "customnet")
    assert model.body.out_features == 5
    assert section["fcnet_hiddens"] == [32, 16]
    assert section["max_seq_len"] == 7
    assert section["custom_model_config"] == {"hidden": 5}
    assert json.loads(json.dumps(section)) == section
    assert inside(made()).given[3]["fcnet_hiddens"] == [64, 64]


@pytest.mark.parametrize(
    ("text", "given", "match"),
    [
        (GOOD, {"hiden": 3}, "custom_model_config.hiden is not an argument .* Did you mean 'hidden'"),
        (GOOD.replace("hidden=8", "hidden"), {}, r"needs 'hidden'.* Add  custom_model_config: \{hidden: …\}"),
        (GOOD.replace(", hidden=8", ""), {"hidden": 3}, "takes nothing beyond obs_space"),
        (GOOD, {"name": "x"}, "every model gets name already"),
        (GOOD, {"hidden": "many"}, "cannot be built: customnet.py, line 9: TypeError"),
        (GOOD.replace("obs_space, action_space, num_outputs, model_config, name, hidden=8", "obs_space, hidden=8"), {}, "Write  def __init__"),
        (GOOD.replace("        super().__init__()\n", ""), {}, r"Call super\(\).__init__\(\) first"),
        ("class CustomModel(nn.Module):\n    def forward(self, obs): return obs", {}, "has no __init__"),
        (GOOD.replace("def forward", "def forwards"), {}, r"has no forward. Write  def forward\(self, obs\)"),
        (GOOD.replace("forward(self, obs)", "forward(self, input_dict, state, seq_lens)"), {}, r'ModelV2. Write .* input_dict\["obs"\] was'),
        (GOOD.replace("forward(self, obs)", "forward(self, obs, state)"), {}, "no initial_state, so it keeps no state"),
        (GOOD.replace("forward(self, obs)", "forward(self)"), {}, r"Write  def forward\(self, obs\)"),
        (RECURRENT.replace("forward(self, obs, state)", "forward(self, obs)"), {}, "has initial_state, so it is recurrent"),
        (RECURRENT.replace("def initial_state(self, batch_size)", "def get_initial_state(self)"), {}, "Write  def initial_state"),
    ],
)  # fmt: skip
def test_a_class_with_a_wrong_signature_gets_the_correct_one(write: Write, text: str, given: dict[str, Any], match: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=match):
        made(custom_model_config=given)


def test_a_recurrent_layer_of_ours_is_not_put_on_top(write: Write) -> None:
    write()
    with pytest.raises(ConfigError, match="use_lstm is set together with custom_model"):
        made(core="lstm")


def test_autoregressive_actions_are_rejected_for_custom_models(write: Write) -> None:
    write()
    with pytest.raises(ConfigError, match="autoregressive is set together with custom_model"):
        made(autoregressive=(Branch(1, (1,)),))


def test_lazy_layers_take_their_size_from_the_observation(write: Write) -> None:
    write(GOOD.replace("nn.Linear(obs_space.shape[0], hidden)", "nn.LazyLinear(hidden)"))
    policy = made()
    assert inside(policy).body.in_features == 4
    check_custom(policy)


# -- the check ----------------------------------------------------------------------------------------------------------


def spoilt(**changes: str) -> str:
    """The good model with other lines: init adds to the constructor, body, head and value are what forward computes."""
    body = changes.get("body", "torch.tanh(self.body(obs))")
    returned = changes.get("returned", "self.head(x), self.value(x)")
    text = GOOD.replace(
        "self.value = nn.Linear(hidden, 1)", "self.value = nn.Linear(hidden, 1)\n        " + changes.get("init", "pass")
    )
    return text.replace("x = torch.tanh(self.body(obs))", f"x = {body}").replace(
        "return self.head(x), self.value(x)", f"return {returned}"
    )


RUBBISH = {
    "too many outputs": (spoilt(init="self.head = nn.Linear(hidden, 3)"), r"shape \[5, 3\] for a batch of 5, not \[5, 2\]. End with"),
    "rows lost": (spoilt(returned="self.head(x).mean(0), self.value(x)"), r"outputs of shape \[2\]"),
    "outputs and value swapped": (spoilt(returned="self.value(x), self.head(x)"), "in this order"),
    "value of two numbers": (spoilt(returned="self.head(x), self.head(x)"), r"value has shape \[5, 2\]"),
    "value of one number for all": (spoilt(returned="self.head(x), self.value(x).mean()"), r"value has shape \[\]"),
    "no value": (spoilt(returned="self.head(x)"), "returned no value estimate"),
    "an empty list as others return": (spoilt(returned="self.head(x), []"), "returned no value estimate"),
    "a dict": (spoilt(returned="{'outputs': x}"), r"forward returned a dict. It returns \(outputs, value\)"),
    "three things": (spoilt(returned="x, x, x"), "forward returned a tuple of 3"),
    "nothing": (spoilt(returned="None"), "forward returned a NoneType"),
    "an array": (spoilt(returned="self.head(x).detach().numpy(), self.value(x)"), "ndarray as outputs"),
    "float64": (spoilt(returned="self.head(x).double(), self.value(x)"), "outputs are float64. Make it float32"),
    "float64 parameters": (spoilt(init="self.double()"), "body.weight is float64"),
    "half": (spoilt(returned="self.head(x), self.value(x).half()"), "value is float16"),
    "nan": (spoilt(body="torch.tanh(self.body(obs)) / 0 * 0"), "not a number"),
    "infinite": (spoilt(returned="self.head(x), self.value(x) / 0"), "the value is what is not a number"),
    "no gradient": (spoilt(returned="self.head(x).detach(), self.value(x).detach()"), "no gradient reaches its parameters"),
    "no gradient through outputs": (spoilt(returned="self.head(x).detach(), self.value(x)"), "no gradient goes through the outputs"),
    "no gradient through value": (spoilt(returned="self.head(x), self.value(x).detach()"), "no gradient goes through the value"),
    "trunk detached": (spoilt(body="torch.tanh(self.body(obs)).detach()"), "no gradient reaches body.weight, body.bias"),
    "layer not used": (spoilt(init="self.spare = nn.Linear(3, 3)"), "no gradient reaches spare.weight, spare.bias. Use it"),
    "gradient not a number": (
        spoilt(body="torch.tanh(self.body(obs)) + (self.body(obs) * 0).sqrt()"), "the gradient of body.weight, body.bias is not a number"),
    "gradient always 0": (
        spoilt(init="self.extra = nn.Linear(4, 8)", body="torch.tanh(self.body(obs)) + 0 * self.extra(obs)"),
        "the gradient of extra.weight, extra.bias is always 0. .* requires_grad_"),
    "all units dead": (
        spoilt(init="nn.init.constant_(self.body.bias, -100.0)", body="F.relu(self.body(obs))"),
        "the gradient of body.weight, body.bias, head.weight, value.weight is always 0"),
    "a gate that is rounded": (
        spoilt(init="self.gate = nn.Linear(4, 8)", body="torch.tanh(self.body(obs)) * torch.round(torch.sigmoid(self.gate(obs)))"),
        "the gradient of gate.weight, gate.bias is always 0"),
    "layers in a list": (
        spoilt(init="self.extra = [nn.Linear(8, 8)]", body="self.extra[0](torch.tanh(self.body(obs)))"), "nn.ModuleList"),
    "a tensor that is no parameter": (
        spoilt(init="self.extra = torch.ones(8, requires_grad=True)", body="torch.tanh(self.body(obs)) * self.extra"),
        r"a tensor of shape \[8\] takes part and is not among its parameters"),
    "random and not a buffer": (
        spoilt(init="self.extra = torch.randn(8)", body="torch.tanh(self.body(obs)) * self.extra"), "register_buffer"),
    "batch norm": (
        spoilt(init="self.norm = nn.BatchNorm1d(8)", body="self.norm(torch.tanh(self.body(obs)))"), "norm is a BatchNorm: Use LayerNorm"),
    "dropout": (spoilt(body="F.dropout(torch.tanh(self.body(obs)), 0.5)"), "draw nothing at random"),
    "a dropout layer": (
        spoilt(init="self.drop = nn.Dropout(0.5)", body="self.drop(torch.tanh(self.body(obs)))"), "drop is Dropout. Remove it"),
    "softmax over the rows": (spoilt(body="F.softmax(self.body(obs), 0)"), r"depends on the other rows. Compute along"),
    "mean of the batch": (spoilt(body="torch.tanh(self.body(obs - obs.mean(0)))"), "depends on the other rows"),
    "squeezes the only row": (spoilt(returned="self.head(x).squeeze(), self.value(x)"), r"outputs have shape \[2\] for a batch of 1"),
    "only for batches": (spoilt(body="torch.tanh(self.body(obs[:2].mean(0) + obs[1:].mean(0) * 0 + obs))"), "depends on the other rows|batch of 1"),
    "keeps a state": (
        spoilt(init="self.before = 0", body="self.remember(torch.tanh(self.body(obs)))")
        + "    def remember(self, x):\n        self.before = self.before + x.detach().mean()\n        return x + self.before\n",
        "asked twice, get different answers|depends on what it was asked before"),
    "remembers the rows": (
        spoilt(init="self.before = None", body="self.remember(torch.tanh(self.body(obs)))")
        + "    def remember(self, x):\n        y = x if self.before is None else x + self.before\n        self.before = x.detach()\n"
        + "        return y\n",
        "initial_state"),
    "fixed batch": (spoilt(body="torch.tanh(self.body(obs)).reshape(5, 8)"), "forward failed for a batch of 1: customnet.py, line 15"),
    "another mode": (
        spoilt(body="torch.tanh(self.body(obs)) * (1 if self.training else 2)"), r"after .eval\(\) it answers differently"),
    "changes the observation": (spoilt(body="torch.tanh(self.body(obs.mul_(2)))"), "forward changes the observation"),
    "raises": (spoilt(body="self.body(obs.flatten())"), r"RuntimeError: .* Observations come as float32\[5, 4\]: rows first"),
    "no parameters": (spoilt(init="self.requires_grad_(False)"), "no parameter to learn"),
    "another network each time": (
        GOOD.replace("super().__init__()", "super().__init__(); CustomModel.made = getattr(CustomModel, 'made', 7) + 1; hidden = CustomModel.made"),
        "built a second time, is another network: model.body.bias"),
    "a parameter made in forward": (
        spoilt(body="torch.tanh(self.late()(obs))")
        + "    def late(self):\n        if not hasattr(self, 'made'): self.made = nn.Linear(4, 8)\n        return self.made\n",
        "made in __init__|among its weights"),
}  # fmt: skip


GOOD_HABITS = {
    "a head that begins as zeros": spoilt(init="nn.init.zeros_(self.head.weight); nn.init.zeros_(self.value.weight)"),
    "a block that begins as nothing": spoilt(
        init="self.block = nn.Linear(8, 8); self.share = nn.Parameter(torch.zeros(1))",
        body="torch.tanh(self.body(obs)); x = x + self.share * torch.tanh(self.block(x))",
    ),
    "a part that is used now and then": spoilt(
        init="self.rare = nn.Linear(4, 8)", body="torch.tanh(self.body(obs)) + (obs[:, :1] > 0.95) * self.rare(obs)"
    ),
    "a part that stays as it is": spoilt(
        init="self.extra = nn.Linear(4, 8).requires_grad_(False)", body="torch.tanh(self.body(obs)) + 0 * self.extra(obs)"
    ),
}


@pytest.mark.parametrize("what", GOOD_HABITS)
def test_a_gradient_that_is_0_only_in_the_beginning_or_now_and_then_is_no_fault(write: Write, what: str) -> None:
    write(GOOD_HABITS[what])
    assert check_model("customnet", (BOX, PAIR)) is not None


@pytest.mark.parametrize("what", RUBBISH)
def test_a_model_that_cannot_be_learned_with_is_refused_with_the_remedy(write: Write, what: str) -> None:
    text, match = RUBBISH[what]
    write(text)
    with pytest.raises(ConfigError, match=match) as told:
        check_model("customnet", (BOX, PAIR))
    assert told.value.hint


RECURRENT_RUBBISH = {
    "state of the wrong dtype": (("torch.zeros(batch_size, 6), torch", "torch.zeros(batch_size, 6).double(), torch"), "float64 as state 0"),
    "state that is not zero": (("return torch.zeros(batch_size, 6)", "return torch.ones(batch_size, 6)"), "initial_state is not zeros"),
    "rows second": (
        ("return torch.zeros(batch_size, 6), torch.zeros(batch_size, 6)", "return torch.zeros(1, batch_size, 6)"), "nn.LSTM has them second"),
    "state grows": (("(h, c)", "(h, torch.cat([c, c], 1))"), r"state of shape \[5, 12\], not \[5, 6\]"),
    "fewer states": ((", (h, c)", ", (h,)"), "forward returned 1 states, initial_state 2"),
    "no state": ((", (h, c)", ""), "forward returned a tuple of 2. It returns"),
    "keeps it itself": (
        ("h, c = self.cell(obs, state)", "h, c = self.cell(obs, getattr(self, 'kept', state)); self.kept = (h.detach(), c.detach())"),
        "asked twice|batch of"),
    "initial_state raises": (("return torch.zeros(batch_size, 6)", "return 1 / 0"), r"initial_state\(1\) failed: customnet.py, line 14"),
}  # fmt: skip


@pytest.mark.parametrize("what", RECURRENT_RUBBISH)
def test_a_recurrent_model_that_cannot_be_learned_with_is_refused_with_the_remedy(write: Write, what: str) -> None:
    (old, new), match = RECURRENT_RUBBISH[what]
    assert old in RECURRENT
    write(RECURRENT.replace(old, new))
    with pytest.raises(ConfigError, match=match):
        check_model("customnet", (BOX, PAIR))


ACCEPTED = {
    "value_function as RLlib users write it": spoilt(body="torch.tanh(self.body(obs)); self.last = x", returned="self.head(x)")
    + "    def value_function(self):\n        return self.value(self.last).squeeze(1)\n",
    "outputs and an empty list beside value_function": spoilt(body="torch.tanh(self.body(obs)); self.last = x", returned="self.head(x), []")
    + "    def value_function(self):\n        return self.value(self.last)\n",
    "a head of zeros": spoilt(init="nn.init.zeros_(self.head.weight)"),
    "a layer that stays as it is": spoilt(init="self.body.requires_grad_(False)"),
    "tied layers": spoilt(init="self.again = nn.Linear(4, hidden); self.again.weight = self.body.weight", body="torch.tanh(self.body(obs) + self.again(obs))"),
    "frozen batch norm": spoilt(
        init="self.norm = nn.BatchNorm1d(8, affine=False).eval(); self.norm.train = lambda mode=True: self.norm", body="self.norm(torch.tanh(self.body(obs)))"),
    "layer norm": spoilt(init="self.norm = nn.LayerNorm(8)", body="self.norm(torch.tanh(self.body(obs)))"),
    "recurrent": RECURRENT,
    "recurrent with value_function": RECURRENT.replace(
        "return self.head(h), self.value(h).squeeze(1), (h, c)", "self.last = h; return self.head(h), [h, c]")
    + "    def value_function(self):\n        return self.value(self.last)\n",
}  # fmt: skip


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_is_unusual_and_right_is_accepted(write: Write, what: str) -> None:
    write(ACCEPTED[what])
    policy = check_model("customnet", (BOX, PAIR))
    acted = policy.act(np.zeros((3, 4), np.float32), tuple(spec.zeros(3) for spec in policy.state_spec()))
    assert acted.value.shape == (3,)


def test_the_check_touches_neither_the_model_nor_the_random_numbers(write: Write) -> None:
    write()
    policy = made()
    before, drawn = policy.weights(), torch.get_rng_state()
    check_custom(policy)
    assert all(np.array_equal(before[name], value) for name, value in policy.weights().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert "last" not in vars(inside(policy))


def test_a_custom_q_network_may_return_no_value(write: Write) -> None:
    write(spoilt(returned="self.head(x)", init="del self.value"))
    policy = check_model("customnet", (BOX, PAIR), values=True)
    seen = torch.rand(3, 4)
    assert torch.equal(policy.value(seen), inside(policy)(seen).amax(dim=1))
    with pytest.raises(ConfigError, match="returned no value estimate"):
        check_model("customnet", (BOX, PAIR))


def test_check_model_takes_a_class_an_environment_or_its_name(write: Write) -> None:
    write()
    assert check_model(find_class("customnet"), "CartPole-v1").config.custom_model is not None
    with pytest.raises(LudusError):
        check_model("customnet", "CartPole-v1", {"hiden": 3})


# -- the same as calling the model by hand ------------------------------------------------------------------------------


def test_leading_dimensions_are_one_batch_for_the_model(write: Write) -> None:
    write()
    policy = made()
    seen = torch.rand(3, 5, 4)
    outputs, value, _ = policy.network(seen, (), None)
    by_hand = inside(policy)(seen.reshape(15, 4))
    assert torch.equal(outputs, by_hand[0].reshape(3, 5, 2))
    assert torch.equal(value, by_hand[1].reshape(3, 5))
    assert policy.network(seen[:0], (), None)[0].shape == (0, 5, 2)


def test_a_sequence_is_unrolled_and_its_state_set_back_where_episodes_start(write: Write) -> None:
    write(RECURRENT)
    policy = made()
    model, generator = inside(policy), torch.Generator().manual_seed(1)
    seen, first = torch.rand(6, 3, 4, generator=generator), torch.rand(6, 3, generator=generator) < 0.4
    state = tuple(torch.rand(3, 6, generator=generator) for _ in range(2))
    outputs, value, after = policy.network(seen, state, first)
    for row in range(3):
        h, c = (part[row : row + 1] for part in state)
        for t in range(6):
            if first[t, row]:
                h, c = torch.zeros(1, 6), torch.zeros(1, 6)
            wanted, worth, (h, c) = model(seen[t, row : row + 1], (h, c))
            torch.testing.assert_close(outputs[t, row], wanted[0])
            torch.testing.assert_close(value[t, row], worth[0])
        torch.testing.assert_close(after[1][row], c[0])


def test_a_lone_tensor_as_state_comes_back_as_one(write: Write) -> None:
    text = RECURRENT.replace("LSTMCell", "GRUCell").replace(
        "torch.zeros(batch_size, 6), torch.zeros(batch_size, 6)", "torch.zeros(batch_size, 6)"
    )
    write(text.replace("h, c = self.cell", "h = self.cell").replace("(h, c)", "h"))
    policy = check_model("customnet", (BOX, PAIR))
    assert [spec.shape for spec in policy.state_spec()] == [(6,)]


def test_observations_come_in_the_structure_of_their_space(write: Write) -> None:
    space = gs.Dict(
        {
            "picture": gs.Box(0, 255, (12, 12, 3), np.uint8),
            "kind": gs.Discrete(4, start=2),
            "more": gs.Tuple(
                (gs.MultiDiscrete([2, 3], start=[1, 5]), gs.Box(-np.inf, np.inf, (2, 2), np.float64), gs.MultiBinary(3))
            ),
        }
    )
    write("""
    class CustomModel(nn.Module):
        def __init__(self, obs_space, action_space, num_outputs, model_config, name):
            super().__init__()
            self.kind, self.first, self.second = nn.Embedding(4, 3), nn.Embedding(2, 2), nn.Embedding(3, 2)
            self.head = nn.Linear(3 * 12 * 12 + 3 + 4 + 4 + 3, num_outputs + 1)

        def forward(self, obs):
            self.seen = obs
            choices, numbers, bits = obs["more"]
            parts = [obs["picture"].flatten(1) / 255, self.kind(obs["kind"]), self.first(choices[:, 0]), self.second(choices[:, 1])]
            both = self.head(torch.cat([*parts, numbers.flatten(1), bits], dim=1))
            return both[:, :-1], both[:, -1]
    """)
    policy = check_model("customnet", (space, gs.Box(-1, 1, (2,))))
    space.seed(3)
    samples = [space.sample() for _ in range(4)]
    rows = map_tree(lambda *x: torch.from_numpy(np.stack(x)), *[_tree(sample) for sample in samples])
    policy.network(rows, (), None)
    seen = inside(policy).seen
    assert seen["picture"].dtype == torch.uint8
    assert seen["picture"].shape == (4, 12, 12, 3)
    assert seen["kind"].dtype == torch.int64
    assert torch.equal(seen["kind"], rows["kind"] - 2)
    assert torch.equal(seen["more"][0], rows["more"][0] - torch.tensor([1, 5]))
    assert policy.network.pixels == 144


def _tree(sample: Any) -> Tree:
    kinds = {"float64": np.float32}
    if isinstance(sample, dict):
        return {key: _tree(item) for key, item in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_tree(item) for item in sample)
    return np.asarray(sample, kinds.get(str(np.asarray(sample).dtype)))


def test_the_filter_normalises_numbers_before_the_model_sees_them(write: Write) -> None:
    space = gs.Dict({"a": gs.Box(-9, 9, (2, 2), np.float32), "kind": gs.Discrete(3), "z": gs.Box(-9, 9, (), np.float32)})
    write("""
    class CustomModel(nn.Module):
        def __init__(self, obs_space, action_space, num_outputs, model_config, name):
            super().__init__()
            self.head = nn.Linear(6, num_outputs + 1)

        def forward(self, obs):
            self.seen = obs
            both = self.head(torch.cat([obs["a"].flatten(1), obs["z"][:, None], obs["kind"][:, None].float()], 1))
            return both[:, :-1], both[:, -1]
    """)
    policy = made(observation_space=space, normalise=True)
    check_custom(policy)
    generator = torch.Generator().manual_seed(0)
    rows = {
        "a": torch.randn(50, 2, 2, generator=generator) * 3 + 1,
        "kind": torch.ones(50, dtype=torch.int64),
        "z": torch.rand(50),
    }
    policy.update_normaliser(rows)
    policy.network(rows, (), None)
    seen = inside(policy).seen
    for key in ("a", "z"):
        x = rows[key]
        torch.testing.assert_close(seen[key], (x - x.mean(0)) / x.var(0, correction=0).sqrt(), rtol=1e-4, atol=1e-4)
    assert torch.equal(seen["kind"], rows["kind"])
    twin = serialization.policy_from(policy.description())
    twin.load_weights(policy.weights())
    assert torch.equal(twin.value(rows), policy.value(rows))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_flat_optimizer_learns_tied_and_frozen_parameters_as_torch_does(write: Write, threads: int) -> None:
    write(
        spoilt(
            init="self.again = nn.Linear(4, hidden); self.again.weight = self.body.weight; self.value.bias.requires_grad_(False)",
            body="torch.tanh(self.body(obs) + self.again(obs))",
        )
    )
    ours, theirs = check_model("customnet", (BOX, PAIR)), made()
    theirs.load_weights(ours.weights())
    optimizer = FlatAdam(ours, 0.01, threads=threads)
    adam = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], 0.01, eps=1e-5)
    seen = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))

    def loss(policy: Policy, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, value, _ = policy.network(rows, (), None)
        return outputs.square().mean() + (value - 1).square().mean(), {}

    for _ in range(5):
        optimizer.step(loss, list(seen.chunk(threads)), [1 / threads] * threads)
        adam.zero_grad()
        loss(theirs, seen)[0].backward()
        adam.step()
    optimizer.close()
    assert inside(ours).again.weight is inside(ours).body.weight
    for name, value in theirs.weights().items():
        np.testing.assert_allclose(ours.weights()[name], value, rtol=1e-4, atol=1e-6)


# -- elsewhere ----------------------------------------------------------------------------------------------------------


def test_a_description_holds_the_name_and_the_keywords_and_nothing_of_the_place(write: Write, tmp_path: Path) -> None:
    write()
    policy = made(custom_model_config={"hidden": 3})
    text = json.dumps(policy.description())
    assert '"customnet"' in text
    assert str(tmp_path) not in text
    assert "tanh(" not in text
    twin = serialization.policy_from(text.encode())
    twin.load_weights(policy.weights())
    seen = torch.rand(2, 4)
    assert torch.equal(twin.value(seen), policy.value(seen))


def test_a_checkpoint_with_a_missing_model_names_the_remedy(write: Write, tmp_path: Path) -> None:
    path = write()
    description = made().description()
    path.unlink()
    with pytest.raises(
        IncompatibleCheckpoint, match=r"custom model 'customnet'.*no model/customnet.py.*LUDUS_MODEL_PATH"
    ) as told:
        serialization.policy_from(description)
    assert told.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/tmp/evil", "os:system", "__main__:__builtins__", "a:__b__", "model/customnet", 7, ["x"]]
)
def test_a_checkpoint_that_names_something_else_is_refused(write: Write, name: Any) -> None:
    write()
    description = made().description()
    description["network"] = {**description["network"], "custom_model": name}
    with pytest.raises(LudusError):
        serialization.policy_from(description)


def test_a_model_that_was_changed_since_does_not_take_the_weights(write: Write) -> None:
    write()
    policy = made()
    write(GOOD.replace("hidden=8", "hidden=9"))
    with pytest.raises(IncompatibleCheckpoint, match="shape"):
        serialization.policy_from(policy.description()).load_weights(policy.weights())


def test_files_go_along_to_where_they_are_not(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("SIZE = 7", "blocks")
    write("from .blocks import SIZE\n" + GOOD.replace("hidden=8", "hidden=SIZE"))
    code_bundle = CodeBundle.of("CartPole-v1", models=["customnet", None])
    write("raise RuntimeError('edited meanwhile')")
    code_bundle.unpack()
    monkeypatch.chdir("/")
    (tmp_path / "model" / "blocks.py").unlink()
    assert inside(made()).body.out_features == 7


def test_a_code_bundle_with_a_missing_file_fails_where_the_run_starts(write: Write) -> None:
    with pytest.raises(UnknownName, match=r"no model/customnet\.py"):
        CodeBundle.of(models=["customnet"])
    assert CodeBundle.of(models=["mine_module:Net"]).models == ()


def test_files_are_plain_values() -> None:
    assert ModelFiles("a", "/x", {"a": "1"}).package == ModelFiles("a", "/x", {"a": "1"}).package
    assert ModelFiles("a", "/x", {"a": "1"}).package != ModelFiles("a", "/x", {"a": "2"}).package


def test_values_and_probabilities_are_kinds_of_one_class(write: Write) -> None:
    write()
    assert made(kind=VALUES).kind == VALUES


def test_the_models_of_the_page_can_be_learned_with(write: Write) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class CustomModel" in block]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        write(block, f"net{number}")
        check_model(f"net{number}", "CartPole-v1")
