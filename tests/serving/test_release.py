"""Releases: files, validation, warm-up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.errors import Damaged, IncompatibleCheckpoint
from ludus.models.weights import serialization
from ludus.serving import release
from ludus.serving.release import Release, ReleasedModel
from tests.serving.releases import MODEL, broken, observations, policy, released


def answers(player: object, count: int = 20) -> list[np.ndarray]:
    state = tuple(np.stack([spec.zeros()]) for spec in policy(1).state_spec())
    given_: list[np.ndarray] = []
    for row in observations(count):
        acted = player.act(np.array([row], np.float32), state)  # type: ignore[attr-defined]
        state = acted.state
        given_.append(acted.action)
    return given_


def test_a_written_release_loads_and_acts_the_same(tmp_path: Path) -> None:
    release.write(released(7), tmp_path / "deep" / "7")
    found = release.read(tmp_path / "deep" / "7")
    assert (found.version, dict(found.seats), dict(found.versions)) == (7, {"": MODEL}, {MODEL: 7})
    assert json.loads(found.descriptions[MODEL]) == json.loads(json.dumps(policy(7).description()))
    np.testing.assert_allclose(answers(found.policies[MODEL]), answers(policy(7)), atol=1e-5)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["7"], "nothing is left beside it"


def test_a_release_replaces_one_of_the_same_place(tmp_path: Path) -> None:
    release.write(released(7), tmp_path / "7")
    release.write(released(7, policy(8)), tmp_path / "7")
    np.testing.assert_allclose(answers(release.read(tmp_path / "7").policies[MODEL]), answers(policy(8)), atol=1e-5)


def test_model_names_may_have_any_characters(tmp_path: Path) -> None:
    one = released(3).parts[MODEL]
    several = Release(3, {"blue": "a/b", "red": "../c", "grey": "ä\n"}, dict.fromkeys(("a/b", "../c", "ä\n"), one))
    release.write(several, tmp_path / "3")
    found = release.read(tmp_path / "3")
    assert set(found.policies) == {"a/b", "../c", "ä\n"}
    assert dict(found.seats) == dict(several.seats)


def test_exported_models_are_run_instead_of_the_networks(tmp_path: Path) -> None:
    from ludus.models.export import onnx_export

    made = policy(5)
    release.write(released(5), tmp_path / "5", {MODEL: onnx_export.export_policy(made, name=MODEL, version=5)})
    assert not list((tmp_path / "5").glob("*.safetensors"))
    np.testing.assert_allclose(answers(release.read(tmp_path / "5").policies[MODEL]), answers(made), atol=1e-4)


def test_without_values_the_actions_are_the_same(tmp_path: Path) -> None:
    for core in (None, "lstm"):
        release.write(released(5, policy(5, core=core)), tmp_path / "5")
        for values in (False, True):
            player = release.read(tmp_path / "5", values=values).policies[MODEL]
            state = tuple(np.stack([spec.zeros()] * 20) for spec in player.state_spec())
            seen = np.array(observations(20), np.float32)
            acted, wanted = player.act(seen, state), policy(5, core=core).act(seen, state)
            np.testing.assert_allclose(acted.action, wanted.action, atol=1e-5)
            np.testing.assert_allclose(acted.log_prob, wanted.log_prob, atol=1e-5)
            np.testing.assert_allclose(acted.value, wanted.value if values else np.zeros(20), atol=1e-5)


def test_a_sound_release_is_accepted() -> None:
    assert set(release.validate_release(released(2), released(1))) == {MODEL}
    assert set(release.validate_release(released(2, policy(2, cell=8, core="gru")), released(1))) == {MODEL}, (
        "the network is its own affair"
    )
    assert set(release.validate_release(released(2, broken(2)), released(1))) == {MODEL}, "nobody plays what it has no answer to"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["first", "last"])
def test_weights_that_are_not_finite_are_refused(number: float, which: str) -> None:
    weights = policy(2).weights()
    name = sorted(weights)[0 if which == "first" else -1]
    weights[name].reshape(-1)[-1] = number
    part = replace(released(2).parts[MODEL], weights=serialization.encode_weights(weights))
    with pytest.raises(Damaged, match="not finite"):
        release.validate_release(Release(2, {"": MODEL}, {MODEL: part}))


def test_a_model_with_non_finite_outputs_is_refused() -> None:
    made = policy(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(3e38)
    with pytest.raises(Damaged, match="not finite"):
        release.validate_release(released(2, made))


@pytest.mark.parametrize("shape", [(4,), (3, 1), ()])
def test_other_observations_are_refused_with_both_spaces_named(shape: tuple[int, ...]) -> None:
    other = policy(2, observation=gym.spaces.Box(-2.0, 2.0, shape, np.float32))
    with pytest.raises(IncompatibleCheckpoint, match=r"observation space.*the served one is") as refused:
        release.validate_release(released(2, other), released(1))
    assert "separate model" in refused.value.hint


def test_other_seats_are_refused() -> None:
    part = released(2).parts[MODEL]
    with pytest.raises(IncompatibleCheckpoint, match="seats"):
        release.validate_release(Release(2, {"blue": MODEL, "red": MODEL}, {MODEL: part}), released(1))


@settings(max_examples=40)
@given(st.data())
def test_damaged_weights_raise_only_documented_errors(data: st.DataObject) -> None:
    """Flipped, cut or added bytes raise a documented error, or the weights stay finite."""
    whole = bytearray(released(2).parts[MODEL].weights)
    how = data.draw(st.sampled_from(["flip", "cut", "add"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if how == "flip":
        whole[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del whole[at:]
    else:
        whole[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    part = ReleasedModel(released(2).parts[MODEL].description, bytes(whole), 2)
    try:
        found = release.validate_release(Release(2, {"": MODEL}, {MODEL: part}))
    except (Damaged, IncompatibleCheckpoint):
        return
    for array in found[MODEL].weights().values():
        assert np.isfinite(array).all()


@pytest.mark.parametrize("gone", ["release.json", "0.json", "0.safetensors"])
def test_missing_or_damaged_files_are_reported(tmp_path: Path, gone: str) -> None:
    release.write(released(7), tmp_path / "7")
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "7", whole)
    (tmp_path / "7" / gone).unlink()
    with pytest.raises((OSError, Damaged)):
        release.read(tmp_path / "7")
    (whole / gone).write_bytes(b"{")
    with pytest.raises((ValueError, Damaged)):
        release.read(whole)
