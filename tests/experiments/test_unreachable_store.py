"""A store that is away for a while, in the middle of a training and at its end: a real server, whose answers a proxy replaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.core.metrics import Numbers
from ludus.errors import StoreUnavailable
from ludus.experiments import runner
from ludus.experiments.control import checkpointer
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import directory_of, store_of
from ludus.storage.base import Store
from tests.experiments import small
from tests.s3 import Fault, Proxy, Server

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def impatient(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits long, on this side of a server that is there already."""
    for key, value in {"LUDUS_CACHE_DIR": str(tmp_path / "cache"), "LUDUS_S3_RETRY_S": "0.2", "LUDUS_S3_RETRIES": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(checkpointer, "RETRY_S", 1e-6)
    monkeypatch.setattr(checkpointer, "LAST_AGAIN_S", 0.05)


class At:
    """A sink that does something when an iteration is reported."""

    def __init__(self, acts: dict[int, Callable[[], None]]) -> None:
        self._acts, self.seen = acts, list[dict[str, float]]()

    def write(self, numbers: Numbers) -> None:
        if not any(name.startswith("evaluation/") for name in numbers):
            self.seen.append(dict(numbers))
        self._acts.pop(int(numbers["iterations"]), lambda: None)()

    def close(self) -> None: ...


def go_away(proxy: Proxy) -> None:
    proxy.on("", Fault(status=503), times=10**9)


def come_back(proxy: Proxy) -> None:
    proxy.clear()


def straight(place: str, server: Server, proxy: Proxy) -> Store:
    return store_of(directory_of(place.replace(proxy.endpoint, server.endpoint)))


def test_training_goes_on_while_the_store_is_away(s3_server: Server, s3_proxy: Proxy) -> None:
    place = s3_server.url(endpoint=s3_proxy.endpoint)
    store = straight(place, s3_server, s3_proxy)
    there: dict[str, list[str]] = {}

    def back() -> None:
        there["meanwhile"] = checkpoint.names(store)
        come_back(s3_proxy)

    sink = At({2: lambda: go_away(s3_proxy), 5: back})
    result = runner.train(small.data(6, top={"checkpoint_freq": 1}), place=place, sinks=[sink])
    assert result.stopped_by == "iterations"
    assert there["meanwhile"] == ["000001"]
    assert checkpoint.names(store) == ["000001", "000005", "000006"]
    assert checkpoint.newest(store).state["progress"]["iterations"] == 6
    failures = [numbers.get("checkpoint/failures", 0.0) for numbers in sink.seen]
    assert failures[:2] == [0.0, 0.0]
    assert failures[5] == failures[4] >= 2.0


def test_the_end_waits_for_the_store_and_gives_up_in_the_end(
    s3_server: Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = s3_server.url(endpoint=s3_proxy.endpoint)
    monkeypatch.setattr(checkpointer, "LAST_S", 0.5)
    with pytest.raises(StoreUnavailable):
        runner.train(small.data(2, top={"checkpoint_freq": 1}), place=place, sinks=[At({2: lambda: go_away(s3_proxy)})])
    come_back(s3_proxy)
    store = straight(place, s3_server, s3_proxy)
    assert checkpoint.names(store) == ["000001"]
    again = runner.resume(place)
    assert again.stopped_by == "iterations"
    assert checkpoint.newest(store).state["progress"]["iterations"] == 2
