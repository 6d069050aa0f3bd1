"""The pool: who owns a model, and that an old owner cannot write over a new one."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from ludus.errors import Damaged, Fenced
from ludus.model import saved
from ludus.model.policy import Policy
from ludus.model.pool import RESERVED_BLOCK, LocalPool, load_version, stored_versions
from ludus.store.local import LocalStore


def a_policy() -> Policy:
    return Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2))


def opened(path: Path) -> LocalPool:
    pool = LocalPool(LocalStore(path))
    pool.add("model", a_policy())
    return pool


def test_an_owner_that_was_cut_off_cannot_write_over_its_successor(tmp_path: Path) -> None:
    old, new = opened(tmp_path), opened(tmp_path)
    with pytest.raises(Fenced, match="incarnation 2, this is 1"):
        old.keep("model")
    for _ in range(RESERVED_BLOCK - 1):
        old.publish("model")
    with pytest.raises(Fenced):
        old.publish("model")
    assert new.keep("model") > RESERVED_BLOCK
    assert stored_versions(LocalStore(tmp_path), "model") == [RESERVED_BLOCK + 1]


def test_a_kept_version_is_a_policy_of_its_own(tmp_path: Path) -> None:
    pool = opened(tmp_path)
    policy, _ = pool.newest("model")
    kept = pool.keep("model")
    before = policy.weights()
    policy.load_weights({name: value + 1 for name, value in before.items()})
    loaded, meta = load_version(LocalStore(tmp_path), "model", kept)
    assert meta == {"model": "model", "version": str(kept)}
    for name, value in loaded.weights().items():
        assert (value == before[name]).all()


def test_forgotten_versions_are_gone(tmp_path: Path) -> None:
    pool = opened(tmp_path)
    first = pool.keep("model")
    second = pool.publish("model")
    pool.keep("model")
    pool.forget("model", first)
    assert stored_versions(LocalStore(tmp_path), "model") == [second]


def test_a_checkpoint_cannot_name_a_class_of_its_own(tmp_path: Path) -> None:
    """Building a policy imports nothing that a file names: such a file may come from anywhere."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: pass\n")
    for name in (f"{tmp_path / 'evil.py'}:Net", "evil:Net"):
        with pytest.raises(Damaged, match="does not describe a policy"):
            saved.policy_from({"class": name, "args": [], "kwargs": {}})
    assert not (tmp_path / "ran").exists()
