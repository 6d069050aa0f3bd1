"""The pool: who owns a model, and that an old owner cannot write over a new one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.errors import AlreadyExists, Damaged, Fenced, StoreUnavailable
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.models.weights.version_store import (
    RESERVED_BLOCK,
    LocalVersionStore,
    claims_after,
    list_versions,
    load_version,
    newest_claim,
)
from ludus.storage.base import Bytes
from ludus.storage.local import LocalStore


def a_policy() -> Policy:
    return Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2))


def opened(path: Path) -> LocalVersionStore:
    pool = LocalVersionStore(LocalStore(path))
    pool.add("model", a_policy())
    return pool


def publish_a_block(pool: LocalVersionStore) -> None:
    for _ in range(RESERVED_BLOCK):
        pool.publish("model")


def test_an_owner_that_was_cut_off_cannot_write_over_its_successor(tmp_path: Path) -> None:
    old, new = opened(tmp_path), opened(tmp_path)
    with pytest.raises(Fenced, match="incarnation 2, this is 1"):
        old.keep("model")
    with pytest.raises(Fenced):
        publish_a_block(old)
    assert new.keep("model") > RESERVED_BLOCK
    assert list_versions(LocalStore(tmp_path), "model") == [RESERVED_BLOCK + 1]


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


def test_deleted_versions_are_gone(tmp_path: Path) -> None:
    pool = opened(tmp_path)
    first = pool.keep("model")
    second = pool.publish("model")
    pool.keep("model")
    pool.forget("model", first)
    assert list_versions(LocalStore(tmp_path), "model") == [second]


def test_a_checkpoint_cannot_name_a_class_of_its_own(tmp_path: Path) -> None:
    """Building a policy imports nothing that a file names: such a file may come from anywhere."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Net: pass\n")
    for name in (f"{tmp_path / 'evil.py'}:Net", "evil:Net"):
        with pytest.raises(Damaged, match="does not describe a policy"):
            serialization.policy_from({"class": name, "args": [], "kwargs": {}})
    assert not (tmp_path / "ran").exists()


# -- claims -------------------------------------------------------------------------------------------------------------


def test_a_claim_names_its_owner_and_origin(tmp_path: Path) -> None:
    assert newest_claim(LocalStore(tmp_path), "model") is None
    pool = LocalVersionStore(LocalStore(tmp_path), {"from": "000012"})
    pool.add("model", a_policy())
    pool.confirm()
    said = json.loads(LocalStore(tmp_path).get("models/model/incarnations/000001"))
    assert (said["from"], said["pid"]) == ("000012", os.getpid())
    assert set(said) == {"from", "at", "host", "pid", "token", "confirmed"}
    opened(tmp_path)
    assert [claim.number for claim in claims_after(LocalStore(tmp_path), "model", 0)] == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff"])
def test_claims_of_earlier_versions_count_and_say_nothing(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    for number in (1, 2):
        store.put(f"models/model/incarnations/{number:06d}", content)
    pool = opened(tmp_path)
    assert pool.incarnation("model") == 3
    first = next(claims_after(store, "model", 0))
    assert (first.number, first.content, first.who) == (1, {}, "another process")
    store.put("models/model/incarnations/000004", content)  # an earlier version takes over
    with pytest.raises(Fenced, match=r"incarnation 4, this is 3.*: another process"):
        pool.check()


def test_a_fenced_owner_stays_fenced_after_the_claims_are_deleted(tmp_path: Path) -> None:
    old = opened(tmp_path)
    opened(tmp_path)
    with pytest.raises(Fenced):
        old.check()
    LocalStore(tmp_path).delete("models/model/incarnations/000002")
    with pytest.raises(Fenced):
        old.check_recently()


def test_a_run_that_was_deleted_is_not_a_run_that_was_taken_over(tmp_path: Path) -> None:
    pool = opened(tmp_path)
    LocalStore(tmp_path).delete("models/model/incarnations/000001")
    with pytest.raises(StoreUnavailable, match="no longer has the claim"):
        pool.confirm()
    assert LocalStore(tmp_path).list("models/model/incarnations") == [], "and it is not written again"


def test_of_two_that_take_over_several_models_one_has_them_all(tmp_path: Path) -> None:
    first, second = LocalVersionStore(LocalStore(tmp_path)), LocalVersionStore(LocalStore(tmp_path))
    first.add("left", a_policy())
    second.add("left", a_policy())
    with pytest.raises(Fenced):
        first.add("right", a_policy())
    second.add("right", a_policy())
    second.confirm()


class _Away(LocalStore):
    away = False

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        if self.away:
            raise StoreUnavailable(f"{key} cannot be reached.")
        super().put(key, data, overwrite=overwrite)


def test_versions_go_on_while_the_store_is_away_as_far_as_they_are_reserved(tmp_path: Path) -> None:
    store = _Away(tmp_path)
    pool = LocalVersionStore(store)
    pool.add("model", a_policy())
    store.away = True
    while pool.newest("model")[1] < RESERVED_BLOCK:
        pool.publish("model")
    with pytest.raises(StoreUnavailable):
        pool.publish("model")
    assert pool.newest("model")[1] == RESERVED_BLOCK
    store.away = False
    last = pool.publish("model")
    assert last == RESERVED_BLOCK + 1
    assert json.loads(store.get("models/model/versions.json"))["reserved"] >= last
    store.away = True
    pool.close()  # says so, and raises nothing
    assert opened(tmp_path).newest("model")[1] > last


# -- claims that are late, lost, or another's ---------------------------------------------------------------------------


def claimed(path: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(LocalStore(path).get(f"models/model/incarnations/{number:06d}"))
    return found


def test_a_claim_names_its_origin_only_after_verification(tmp_path: Path) -> None:
    opened(tmp_path)
    said = list[dict[str, Any]]()
    pool = LocalVersionStore(LocalStore(tmp_path), {"from": "000001"}, verify=lambda: said.append(claimed(tmp_path, 2)))
    pool.add("model", a_policy())
    assert len(said) == 1
    assert "from" not in said[0]
    assert claimed(tmp_path, 2)["from"] == "000001"
    pool.add("other", a_policy())
    assert len(said) == 1, "nobody else has written since the first claim"


def test_and_never_if_it_is_not(tmp_path: Path) -> None:
    opened(tmp_path)

    def refuse() -> None:
        raise StoreUnavailable("There is a newer one.")

    pool = LocalVersionStore(LocalStore(tmp_path), {"from": "000001"}, verify=refuse)
    with pytest.raises(StoreUnavailable, match="newer"):
        pool.add("model", a_policy())
    assert "from" not in claimed(tmp_path, 2)
    assert opened(tmp_path).incarnation("model") == 3


def test_a_deleted_and_restarted_run_has_one_owner(tmp_path: Path) -> None:
    old = opened(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    new = opened(tmp_path / "run")
    before = claimed(tmp_path / "run", 1)
    for attempt in (old.check, old.confirm, old.check_recently, lambda: old.keep("model")):
        with pytest.raises(Fenced, match="restarted"):
            attempt()
    assert claimed(tmp_path / "run", 1) == before
    new.confirm()
    assert new.keep("model") == 1


class _Answers(LocalStore):
    """Says once that a claim exists already: because the answer to the first attempt was lost, or for no reason."""

    applies, times = True, 1

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        lies = not overwrite and self.times > 0
        if not lies or self.applies:
            super().put(key, data, overwrite=overwrite)
        if lies:
            self.times -= 1
            raise AlreadyExists(f"{key} exists already.")


def test_a_claim_whose_answer_was_lost_is_our_own(tmp_path: Path) -> None:
    pool = LocalVersionStore(_Answers(tmp_path))
    pool.add("model", a_policy())
    assert pool.incarnation("model") == 1
    pool.check()


def test_a_claim_that_exists_and_is_not_there_leaves_no_gap(tmp_path: Path) -> None:
    store = _Answers(tmp_path)
    store.applies = False
    with pytest.raises(StoreUnavailable, match="incarnation 1"):
        LocalVersionStore(store).add("model", a_policy())
    assert store.list("models/model/incarnations") == []
