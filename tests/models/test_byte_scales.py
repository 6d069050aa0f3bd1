"""What uint8 observations are divided by: pictures by 255, grids of symbols by their largest value; stored with the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ludus.models import byte_scales
from ludus.models.byte_scales import ByteScale, choose
from ludus.models.centralized_critic import OWN, STATE, actor_policy, without_critic
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.serialization import policy_from

GRID = spaces.Box(0, 255, (7, 7, 3), np.uint8)


def divisor(space: Any, seen: int | None = None, setting: bool | float | None = None) -> float:
    look = None if seen is None else lambda: {"": seen}
    return choose(space, setting, look)[0].divisor


def test_a_grid_of_small_integers_is_divided_by_the_largest_that_was_seen() -> None:
    assert divisor(GRID, seen=10) == 10
    assert divisor(GRID, seen=0) == 1


@pytest.mark.parametrize("seen", [32, 255])
def test_a_small_image_is_recognised_by_its_values(seen: int) -> None:
    assert divisor(GRID, seen) == 255


@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84), (64, 64), (32, 40, 3)])
def test_an_image_is_recognised_by_its_size_without_playing(shape: tuple[int, ...]) -> None:
    (scale,) = choose(spaces.Box(0, 255, shape, np.uint8), None, lambda: pytest.fail("nothing to look for"))
    assert scale.divisor == 255
    assert scale.obvious


def test_the_bounds_of_a_space_say_what_its_numbers_are() -> None:
    assert divisor(spaces.Box(0, 6, (9, 9), np.uint8)) == 6
    assert divisor(spaces.Box(0, 1, (84, 84, 4), np.uint8)) == 1


def test_without_an_environment_the_notice_names_the_remedy() -> None:
    (scale,) = choose(GRID, None, None)
    assert scale.divisor == 255
    assert "preprocess.scale" in str(scale)


@pytest.mark.parametrize(("setting", "wanted"), [(255.0, 255), (16.0, 16), (1.0, 1), (False, 1), (True, 8), (None, 8)])
def test_the_setting_decides(setting: bool | float | None, wanted: float) -> None:
    assert divisor(GRID, seen=8, setting=setting) == wanted


def test_only_parts_of_bytes_are_divided() -> None:
    space = spaces.Dict({"grid": GRID, "far": spaces.Tuple((GRID, spaces.Box(-1, 1, (3,)))), "room": spaces.Discrete(4)})
    chosen = choose(space, None, lambda: {"grid": 8, "far.0": 200})
    assert [(scale.path, scale.divisor) for scale in chosen] == [("far.0", 255.0), ("grid", 8.0)]
    assert byte_scales.non_default_scales(chosen) == (("grid", 8.0),)


def test_a_choice_reads_as_a_sentence() -> None:
    assert str(ByteScale("grid", 8.0, "because")) == "observation.grid (uint8) is divided by 8: because"


# -- in the network -----------------------------------------------------------------------------------------------------

MIXED = spaces.Dict({"grid": GRID, "cells": spaces.Box(0, 255, (4,), np.uint8), "speed": spaces.Box(-1, 1, (2,))})


def policy(space: Any, scales: tuple[tuple[str, float], ...] = (), **config: Any) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy(space, spaces.Discrete(3), NetworkConfig(byte_scales=scales, **config))


def test_a_network_divides_by_its_scales() -> None:
    small, whole = policy(MIXED, (("grid", 8.0), ("cells", 4.0))), policy(MIXED)
    rng = np.random.default_rng(0)
    grid, cells = rng.integers(0, 8, (5, 7, 7, 3)), rng.integers(0, 4, (5, 4))
    speed = torch.from_numpy(rng.normal(size=(5, 2)).astype(np.float32))

    def values(of: Policy, grid: Any, cells: Any) -> torch.Tensor:
        observation = {"grid": torch.from_numpy(grid), "cells": torch.from_numpy(cells), "speed": speed}
        outputs: torch.Tensor = of.network(observation, (), None)[0]
        return outputs

    mine = values(small, grid.astype(np.uint8), cells.astype(np.uint8))
    theirs = values(whole, (grid / 8).astype(np.float32), (cells / 4).astype(np.float32))
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(mine, values(whole, grid.astype(np.uint8), cells.astype(np.uint8)))


def test_a_policy_is_stored_with_its_scales() -> None:
    one = policy(MIXED, (("grid", 8.0),))
    again = policy_from(one.description())
    assert again.config.byte_scales == (("grid", 8.0),)


def test_a_policy_of_an_earlier_release_divides_by_255() -> None:
    one = policy(MIXED)
    description = one.description()
    del description["network"]["byte_scales"]
    again = policy_from(description)
    again.load_weights(one.weights())
    rows = MIXED.sample()
    observation = {key: np.asarray(value)[None] for key, value in rows.items()}
    assert {leaf.divisor for leaf in again.network._plan if leaf.space.dtype == np.uint8} == {255.0}  # type: ignore[union-attr]
    np.testing.assert_array_equal(again.act(observation).value, one.act(observation).value)


def test_the_actor_of_a_centralised_value_keeps_its_scales() -> None:
    space = spaces.Dict({OWN: GRID, STATE: spaces.Box(0, 255, (5,), np.uint8)})
    one = policy(space, ((OWN, 8.0), (STATE, 4.0)), central=True)
    description, weights = without_critic(one.description(), one.weights())
    stored = policy_from(description)
    stored.load_weights(weights)
    seen = np.random.default_rng(0).integers(0, 8, (3, 7, 7, 3)).astype(np.uint8)
    for actor in (actor_policy(one), stored):
        assert actor.config.byte_scales == (("", 8.0),)
        logits = actor.network(torch.from_numpy(seen), (), None)[0]
        whole = {OWN: torch.from_numpy(seen), STATE: torch.zeros(3, 5, dtype=torch.uint8)}
        torch.testing.assert_close(logits, one.network(whole, (), None)[0])
