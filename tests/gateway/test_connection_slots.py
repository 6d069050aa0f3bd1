"""Admission and eviction of connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ludus.gateway.connection_slots import ConnectionSlots


def test_the_oldest_unauthorized_connection_is_evicted() -> None:
    slots: ConnectionSlots[str] = ConnectionSlots(3)
    for name in ("client", "idle 1", "idle 2"):
        assert slots.admit(name).evicted is None
    slots.authorize("client")
    assert slots.admit("idle 3").evicted == "idle 1"
    assert slots.admit("idle 4").evicted == "idle 2"
    assert "client" in slots
    assert (len(slots), slots.unauthorized_count) == (3, 2)


def test_authorized_connections_are_never_evicted() -> None:
    slots: ConnectionSlots[int] = ConnectionSlots(2)
    for number in range(2):
        assert slots.admit(number, authorized=True).admitted
    refused = slots.admit(2)
    assert (refused.admitted, refused.evicted) == (False, None)
    assert "too many connections" in refused.reason
    slots.release(0)
    assert slots.admit(3).admitted


def test_after_new_tokens_every_connection_may_be_evicted_again() -> None:
    slots: ConnectionSlots[int] = ConnectionSlots(2)
    slots.admit(0, authorized=True)
    slots.admit(1, authorized=True)
    slots.revoke_all()
    slots.authorize(0)
    assert slots.admit(2).evicted == 1


def test_connections_of_one_address_are_bounded() -> None:
    slots: ConnectionSlots[int] = ConnectionSlots(10, per_address=2)
    assert slots.admit(0, "10.0.0.1", authorized=True).admitted
    assert slots.admit(1, "10.0.0.1").admitted
    assert "2 connections from 10.0.0.1" in slots.admit(2, "10.0.0.1").reason
    assert slots.admit(3, "10.0.0.2").admitted
    slots.release(0)
    assert slots.admit(4, "10.0.0.1").admitted


@given(st.lists(st.tuples(st.sampled_from(["admit", "authorize", "release", "revoke"]), st.integers(0, 12)), max_size=60))
def test_slots_match_a_reference_model(events: list[tuple[str, int]]) -> None:
    slots: ConnectionSlots[int] = ConnectionSlots(4, per_address=3)
    held: list[int] = []
    strangers: list[int] = []
    for event, key in events:
        address = str(key % 3)
        if event == "admit" and key not in held:
            admission = slots.admit(key, address)
            if sum(str(other % 3) == address for other in held) >= 3:
                assert not admission.admitted
                continue
            if len(held) == 4 and not strangers:
                assert not admission.admitted
                continue
            if len(held) == 4:
                assert admission.evicted == strangers[0]
                held.remove(strangers.pop(0))
            assert admission.admitted
            held.append(key)
            strangers.append(key)
        elif event == "authorize" and key in strangers:
            slots.authorize(key)
            strangers.remove(key)
        elif event == "release":
            slots.release(key)
            held, strangers = [k for k in held if k != key], [k for k in strangers if k != key]
        elif event == "revoke":
            slots.revoke_all()
            strangers = list(held)
        assert (len(slots), slots.unauthorized_count) == (len(held), len(strangers))
        assert all(slots.is_authorized(k) == (k not in strangers) for k in held)
