"""One run on several machines: every call works away from the hub, and errors are raised there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import ludus
from ludus.core.metrics import read_jsonl
from ludus.distributed.hub import join as joining
from ludus.distributed.hub import rpc
from ludus.distributed.hub.join import join
from ludus.errors import UsageError, WorkerFailed
from ludus.models.policy import Policy
from ludus.process.auth import write_token
from ludus.remote import context as sessions
from ludus.remote import inference_workers
from ludus.remote.context import RunContext
from tests.remote.node import Failed, Node
from tests.remote.parts import Scale, Two, scaled
from tests.waiting import wait_until

X = np.ones(3, np.float32)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """The hub of a run that other machines may join, in this process."""
    project = tmp_path_factory.mktemp("home")
    with ludus.init(project=project, trial="t", address="tcp://127.0.0.1:0", report_interval_s=60) as session:
        ludus.RemoteModel("m", Scale(), forward_args=(X,))
        yield session


def address(hub: RunContext) -> str:
    assert hub.hub is not None
    return hub.hub.address


def node_of(hub: RunContext, base: Path) -> Node:
    return Node(base, LUDUS_TOKEN_FILE=hub.location.token_file)


@pytest.fixture(scope="module")
def node(hub: RunContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A process on another machine, which has joined."""
    with node_of(hub, tmp_path_factory.mktemp("n")) as node:
        joined = node.join(address(hub))
        assert not joined["hub"]
        assert not joined["home"]
        yield node


# -- the calls, from another machine


def test_a_model_answers_there_and_follows_the_weights_of_its_home(hub: RunContext, node: Node) -> None:
    model = ludus.RemoteModel("m")
    assert node.ask("call", "m", 2) == 2
    version = model.publish_weights(scaled(3))
    assert node.ask("until_version", "m", version) == version
    assert node.ask("call", "m", 2) == 6
    assert node.ask("gather", "m", 5) == [3 * (20.0 + i) for i in range(5)]


def test_what_is_published_there_is_used_at_home(hub: RunContext, node: Node) -> None:
    model = ludus.RemoteModel("m")
    version = node.ask("publish", "m", 5)
    assert model.version == version
    assert float(model(X)[0]) == 5


def test_a_model_may_be_made_there_and_cloned(hub: RunContext, node: Node) -> None:
    assert node.ask("make", "theirs", 4.0) == 1
    assert float(ludus.RemoteModel("theirs")(X)[0]) == 4
    assert node.ask("clone", "theirs") == 4


class Wide(nn.Module):
    """Eleven megabytes: several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1700, 1700))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor[0, 0]


def test_large_weights_travel_in_parts_both_ways(hub: RunContext, node: Node) -> None:
    model = ludus.RemoteModel("wide", Wide())
    rows = torch.arange(1700 * 1700, dtype=torch.float32).reshape(1700, 1700).numpy()
    version = model.publish_weights({"factor": rows})
    assert node.ask("until_version", "wide", version) == version
    published, size = node.ask("large", "wide")
    assert size == 4 * 1700 * 1700
    assert (published, model.version) == (version + 1, version + 1)
    np.testing.assert_array_equal(model._shared_model.reader.read()[1]["factor"], np.full((1700, 1700), 7, np.float32))


def test_buffers_metrics_gateways_and_trainers_work_there(hub: RunContext, node: Node, tmp_path: Path) -> None:
    ludus.RemoteModel("m").publish_weights(scaled(2))
    mine = ludus.RemoteBuffer("b", size=16, batch_size=2)
    node.ask("push", "b", [1.0, 2.0])
    assert mine.take(10).tolist() == [1.0, 2.0]
    ludus.RemoteBuffer("c").push(3.0, 4.0, 5.0).wait(10)
    assert node.ask("take", "c", 3) == [3.0, 4.0, 5.0]
    node.ask("until_version", "m", ludus.RemoteModel("m").version)
    seen = ludus.RemoteBuffer("seen", batch_size=2)
    assert node.ask("serve", "m", "seen") == [4.0, 6.0]
    np.testing.assert_array_equal(seen.take(10)["y"][:, 0], [4.0, 6.0])
    node.ask("stop_serving")
    for buffer in (mine, seen):
        buffer.close()
    ludus.RemoteBuffer("factors").push(6.0)
    node.ask("train", "m", "factors", str(tmp_path))
    assert float(ludus.RemoteModel("m")(X)[0]) == 6
    node.ask("metric", "from_afar", 7.5)
    hub.client.call({"op": "report"})
    wait_until(lambda: any(row.get("from_afar") == 7.5 for row in read_jsonl(hub.directory / "metrics.jsonl")))


@pytest.mark.long
def test_the_workers_of_a_model_serve_other_machines_and_their_death_loses_no_reply(hub: RunContext, node: Node) -> None:
    model = ludus.RemoteModel("central", Scale(), forward_args=(X,), num_workers=2)
    processes = [hub.supervisor._processes[f"inference-central-{index}"] for index in range(2)]
    assert all(path.startswith("/") for path in model._shared_model.workers), "at home by a unix socket"
    assert all(path.startswith("tcp://") for path in node.ask("workers", "central"))
    assert node.ask("gather", "central", 40) == [20.0 + i for i in range(40)]
    node.tell("play_for", "central", 2.0)
    for process in processes:
        time.sleep(0.5)
        process.kill()
        process.wait_ready(30)
    played = node.answer()
    assert played["asked"] > 20
    assert played["longest"] < inference_workers.UNREACHABLE_S
    assert sum(process.incarnation for process in processes) == 4
    for process in processes:
        process.stop()


def test_workers_that_were_started_there_serve_the_home(hub: RunContext, node: Node) -> None:
    assert all(path.startswith("/") for path in node.ask("crew", "outpost", 1))
    model = ludus.RemoteModel("outpost")
    assert all(path.startswith("tcp://") for path in model._shared_model.workers)
    assert float(model(np.full(3, 5, np.float32))[0]) == 5


def test_a_policy_decides_through_its_workers_without_its_weights_travelling(hub: RunContext, node: Node) -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(3))
    ludus.RemoteModel("policy", policy, num_workers=1)
    decided = node.ask("decide", "policy")
    assert 0 <= decided["action"] < 3
    assert decided["version"] == 1
    assert "policy" not in decided["copies"]
    hub.supervisor._processes["inference-policy-0"].stop()


@pytest.mark.long
def test_traced_models_travel_both_ways(hub: RunContext, node: Node) -> None:
    pytest.importorskip("onnxruntime")
    x = np.arange(4, dtype=np.float32)
    home = ludus.RemoteModel("traced", Two(), forward_args=(x,), use_onnx=True)
    there, made_there = node.ask("onnx", "traced", "traced_there")
    np.testing.assert_allclose(home(x), there, atol=1e-5)
    np.testing.assert_allclose(ludus.RemoteModel("traced_there")(x), made_there, atol=1e-5)
    assert ludus.RemoteModel("traced_there")._shared_model.graph


def test_a_forked_copy_works_there_too_and_leaves_the_copy_of_the_weights_alone(hub: RunContext, node: Node) -> None:
    ludus.RemoteModel("forked", Scale(), forward_args=(X,))
    assert node.ask("fork", "forked", "from_the_fork") == 0
    buffer = ludus.RemoteBuffer("from_the_fork")
    assert float(buffer.take(10)) == 2
    buffer.close()
    version = ludus.RemoteModel("forked").publish_weights(scaled(5))
    assert node.ask("until_version", "forked", version) == version


# -- one copy of the weights for each machine


@pytest.mark.long
def test_two_processes_of_a_machine_share_one_copy_and_the_second_goes_on_when_the_first_is_killed(
    hub: RunContext, node: Node
) -> None:
    assert hub.hub is not None
    model = ludus.RemoteModel("shared", Scale(), forward_args=(X,))
    with node_of(hub, node.base) as first:
        assert first.join(address(hub))["mirror"] == node.ask("where")
        assert first.ask("call", "shared", 2) == 2
        assert node.ask("call", "shared", 2) == 2
        assert first.ask("leads", "shared")
        assert not node.ask("leads", "shared")
        parcels = hub.hub._models.sender.sent
        version = model.publish_weights(scaled(3))
        node.ask("until_version", "shared", version)
        assert hub.hub._models.sender.sent == parcels + 1, "each version travels once to a machine"
    version = model.publish_weights(scaled(4))
    assert node.ask("until_version", "shared", version) == version
    assert node.ask("call", "shared", 2) == 8
    assert node.ask("leads", "shared")


# -- what breaks


def test_other_machines_notice_when_the_hub_is_killed(tmp_path: Path) -> None:
    with Node(tmp_path / "h") as home, Node(tmp_path / "n", LUDUS_TOKEN_FILE=str(tmp_path / "token")) as node:
        opened = home.ask("open", str(tmp_path / "h" / "runs"), "t")
        (tmp_path / "token").write_text(Path(opened["token_file"]).read_text())  # a copy: it is swept up with the one who made it
        (tmp_path / "token").chmod(0o600)
        node.join(opened["address"])
        assert node.ask("call", "m", 2) == 2
        node.tell("take_for_ever", "b")
        wait_until(lambda: home.ask("peers") >= 3)  # its calls, its copy of the weights, its place in the queue
        home.process.kill()
        with pytest.raises(Failed, match="gone") as caught:
            node.answer()
        assert caught.value.kind == "WorkerFailed"
        assert caught.value.seconds < 10
        for late in (["publish", "m", 2], ["push", "b", [1.0]], ["wait_for_the_end"]):
            with pytest.raises(Failed, match="WorkerFailed"):
                node.ask(*late)


def test_a_process_with_another_token_or_none_is_refused_with_an_error(
    hub: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    assert hub.hub._authenticator is not None
    (tmp_path / "token").write_text("f" * 64)
    before = hub.hub._authenticator.refused
    monkeypatch.setenv("LUDUS_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(UsageError, match="refused the token"):
        join(tmp_path / "t", address(hub))
    assert hub.hub._authenticator.refused == before + 1
    monkeypatch.delenv("LUDUS_TOKEN_FILE")
    with pytest.raises(UsageError, match="Set LUDUS_TOKEN_FILE"):
        join(tmp_path / "t", address(hub))


def test_another_trial_than_the_one_of_the_hub_is_refused(
    hub: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_TOKEN_FILE", hub.location.token_file)
    with pytest.raises(UsageError, match="has the run 't', not 'other'"):
        join(tmp_path / "other", address(hub))


def test_a_missing_hub_is_an_error_on_another_machine_after_a_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_token(tmp_path / "token")
    monkeypatch.setenv("LUDUS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(joining, "JOIN_S", 0.5)
    monkeypatch.setattr(rpc, "CONNECT_S", 0.5)
    with pytest.raises(WorkerFailed, match=r"could not be reached at tcp://192\.0\.2\.1:9"):
        join(tmp_path / "t", "tcp://192.0.2.1:9")


def test_of_two_that_come_to_an_address_one_becomes_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("LUDUS_SHM", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "a" / "t").mkdir(parents=True)
    (tmp_path / "b" / "t").mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        came = list(pool.map(lambda name: join(tmp_path / name / "t", f"tcp://127.0.0.1:{port}"), "ab"))
    hubs = [joined.hub for joined in came if joined.hub is not None]
    assert len(hubs) == 1
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    for joined in came:
        joined.close()
    hubs[0].close()


def test_the_token_is_in_its_file_alone(hub: RunContext, node: Node) -> None:
    token_file = Path(hub.location.token_file)
    token = token_file.read_text()
    assert len(token) == 64
    assert token_file.stat().st_mode & 0o777 == 0o600
    written = [path for path in (*hub.directory.rglob("*"), *node.base.rglob("*")) if path.is_file()]
    assert (hub.directory / "hub.json") in written
    assert [path for path in written if token.encode() in path.read_bytes()] == []
    for pid in (os.getpid(), node.process.pid):
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert token not in repr(hub.location)


def listening() -> set[str]:
    """Local addresses of the TCP ports at which this process listens."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {fields[1] for fields in rows if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine}


def test_without_an_address_nothing_listens_for_other_machines(hub: RunContext, tmp_path: Path) -> None:
    before = listening()
    assert before, "the hub of the other tests has a door"
    alone = join(tmp_path)
    assert alone.hub is not None
    assert listening() == before
    assert (alone.location.host, alone.location.token_file, alone.location.is_local) == ("", "", True)
    alone.hub.close()


def test_an_address_needs_a_trial_that_others_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_current", None)
    with pytest.raises(UsageError, match="without a trial"):
        sessions.init(address="tcp://127.0.0.1:0")


def test_without_gpus_a_worker_that_wants_one_is_refused(hub: RunContext) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="2 workers with gpus_per_worker=1 need 2 GPUs, and PyTorch finds 0"):
        ludus.RemoteModel("m", num_workers=2, gpus_per_worker=1)
    with pytest.raises(UsageError, match="is invalid"):
        ludus.RemoteModel("m", gpus_per_worker=1)


@pytest.mark.parametrize(
    ("count", "each", "expected"),
    [
        (2, 1, ["4", "5"]),
        (2, 2, ["4,5", "6,7"]),
        (4, 0.5, ["4", "4", "5", "5"]),
        (3, 0.3, ["4", "4", "4"]),
        (1, 4, ["4,5,6,7"]),
    ],
)
def test_workers_get_gpus_of_their_own_or_a_part_of_one(count: int, each: float, expected: list[str]) -> None:
    assert inference_workers.assign_gpus(count, each, ["4", "5", "6", "7"]) == expected


def test_an_engine_computes_where_its_module_is(hub: RunContext) -> None:
    class Versions:
        version = 1

        def read(self) -> tuple[int, dict[str, Any]]:
            return 1, scaled(3)

    engine = inference_workers.DeviceEngine(torch.device("cpu"), Scale(), Versions())
    structure = ("tuple", (("tuple", ((X.dtype, X.shape),)), ("dict", ())))
    outputs, version = engine.run(structure, [X[None]], 1)
    np.testing.assert_array_equal(outputs, 3 * X[None])
    assert version == 1
