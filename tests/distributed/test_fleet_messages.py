"""Encoding of the messages of a fleet; decoding must survive arbitrary bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ludus.distributed.redis.messages import Presence, WeightsNotice, WorkerSpec, weights_key
from ludus.errors import Damaged, IncompatibleCheckpoint

SPEC = WorkerSpec(
    channel="c0ffee",
    room=4,
    env="CartPole-v1",
    env_config={"sutton_barto_reward": True},
    preprocess={"stack": 2},
    wrappers=({"a:B": {"c": 1}},),
    num_envs=3,
    steps=5,
    description={"class": "x"},
    masked=False,
    seed=1,
    in_turn=True,
)


def test_a_worker_spec_survives_a_round_trip() -> None:
    assert WorkerSpec.decode(SPEC.encode()) == SPEC


def test_equal_specs_have_equal_fingerprints_and_others_do_not() -> None:
    assert WorkerSpec.decode(SPEC.encode()).fingerprint == SPEC.fingerprint
    assert replace(SPEC, steps=6).fingerprint != SPEC.fingerprint


@pytest.mark.parametrize(("key", "value"), [("ludus", "0.0.0+other"), ("protocol", 99)])
def test_a_spec_of_another_version_of_the_code_is_refused_with_both_versions(key: str, value: object) -> None:
    data = json.dumps(json.loads(SPEC.encode()) | {key: value}).encode()
    with pytest.raises(IncompatibleCheckpoint, match=str(value).replace("+", r"\+")):
        WorkerSpec.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95pickle",
        b"[]",
        b"{}",
        b"null",
        json.dumps({k: v for k, v in json.loads(SPEC.encode()).items() if k != "env"}).encode(),
        json.dumps(json.loads(SPEC.encode()) | {"more": 1}).encode(),
        json.dumps(json.loads(SPEC.encode()) | {"channel": ""}).encode(),
    ],
    ids=range(8),
)
def test_a_malformed_spec_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        WorkerSpec.decode(data)


def test_a_weights_notice_survives_a_round_trip() -> None:
    notice = WeightsNotice(3, 17, 2, SPEC.fingerprint, over=True)
    assert WeightsNotice.decode(notice.encode()) == notice


def test_a_presence_comes_back_as_it_was_posted() -> None:
    presence = Presence("host", 7, "sampling", "why", 3, 4, 5, 6, 7, 0.5, 0.25, 0.125, 1.5, 2)
    assert Presence.decode(presence.encode()) == presence


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"version": "x"}', b"\xff"], ids=range(5))
def test_notices_that_are_rubbish_are_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        WeightsNotice.decode(data)
    with pytest.raises(Damaged):
        Presence.decode(data)


def test_a_worker_cannot_make_the_learner_keep_a_long_story() -> None:
    presence = Presence("host", 7, "sampling", "x" * 100_000)
    assert len(Presence.decode(presence.encode()).why) <= 500


def test_weights_of_later_versions_sort_after_earlier_ones() -> None:
    assert weights_key(9) < weights_key(10) < weights_key(1010)
