"""RemoteActor: games on one side, models and buffers of the run on the other."""

from __future__ import annotations

import socket

import numpy as np
import pytest

import ludus
from ludus.errors import Refused, UsageError
from ludus.protocol.client import Client
from ludus.remote.context import RunContext
from tests.remote.parts import Echo, Scale, scaled

X = np.arange(3, dtype=np.float32)


def url(actor: ludus.RemoteActor) -> str:
    host, port = actor.address
    return f"http://{host}:{port}"


def test_a_game_is_answered_by_the_model_of_the_run_and_what_it_saw_reaches_the_buffer(busy: RunContext) -> None:
    model = ludus.RemoteModel("m", Scale(), forward_args=(X,))
    buffer = ludus.RemoteBuffer("b", batch_size=2)
    actor = ludus.RemoteActor(port=0, num_workers=2)
    actor.serve(Actor=Echo, model="m", buffer="b")
    with Client(url(actor)) as client:
        client.start("one")
        np.testing.assert_array_equal(np.frombuffer(client.tick("one", X.tobytes()), np.float32), X)
        model.publish_weights(scaled(3))  # here; the worker that answers is another process
        np.testing.assert_array_equal(np.frombuffer(client.tick("one", X.tobytes()), np.float32), 3 * X)
        client.end("one")
    batch = buffer.take(10)
    np.testing.assert_array_equal(batch["x"], np.stack([X, X]))
    np.testing.assert_array_equal(batch["y"], np.stack([X, 3 * X]))
    names = busy.client.call({"op": "names"})
    assert names["models"] == ["m"]
    assert names["buffers"] == ["b"]
    assert names["components"][-1]["details"]["actor"] == "Echo"
    with pytest.raises(UsageError, match="serves already"):
        actor.serve(Echo, model="m")
    actor.close()


def test_a_token_keeps_others_out_and_time_limits_are_passed_on(busy: RunContext) -> None:
    ludus.RemoteModel("m2", Scale())
    actor = ludus.RemoteActor(port=0, token="secret", tick_timeout=7, session_timeout=9)
    assert (actor._settings.sessions.tick_s, actor._settings.sessions.silent_s) == (7, 9)
    actor.serve(Echo, "m2")
    with Client(url(actor)) as client, pytest.raises(Refused) as caught:
        client.start("one")
    assert caught.value.status == 401
    with Client(url(actor), token="secret") as client:
        client.start("one")
        assert client.tick("one", X.tobytes()) == X.tobytes()
    actor.close()


def test_what_cannot_be_served_is_refused(busy: RunContext) -> None:
    with pytest.raises(UsageError, match="at least one process"):
        ludus.RemoteActor(num_workers=0)
    with pytest.raises(UsageError, match="not an actor class"):
        ludus.RemoteActor(port=0).serve("Echo")
    with pytest.raises(UsageError, match="without a token"):
        ludus.RemoteActor(port=0, host="0.0.0.0").serve(Echo, model="m")
    with pytest.raises(UsageError, match="does not serve yet"):
        _ = ludus.RemoteActor(port=0).address
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="Cannot listen"):
            ludus.RemoteActor(port=taken.getsockname()[1]).serve(Echo, model="m")
