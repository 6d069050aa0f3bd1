"""A learner's fleet and its workers, over a real Redis server and a real store."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.algorithms.ppo import PPO
from ludus.buffers.segment_validation import SegmentValidator
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.distributed.redis.learner import BatchSettings, FleetRun, PublishedWeights, RedisFleet, VersionAges, channel_of
from ludus.distributed.redis.messages import END, NOTICE, PRESENCE, SPEC, WEIGHTS, Presence, WeightsNotice, WorkerSpec
from ludus.distributed.redis.worker import FleetWorker, WorkerOptions
from ludus.errors import EnvironmentFault, Fenced, IncompatibleCheckpoint, StoreUnavailable, UsageError
from ludus.experiments.assembly.policies import make_policy
from ludus.experiments.assembly.worker_training import EnvironmentShape, probe_environment
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.sampling.sampler import segment_spec
from ludus.storage.base import Bytes
from ludus.storage.local import LocalStore
from ludus.transport.message_stream import open_message_stream
from ludus.transport.shared_memory import BlockLayout
from ludus.transport.stream_memory import StreamWriter
from tests.redis_server import RedisServer
from tests.waiting import wait_until

WAIT_S = 60.0
ENV = "CartPole-v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def _password(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", server.password)


class Rig:
    """What a learner's process has, without the learning."""

    def __init__(self, url: str, directory: Path, *, in_turn: bool = True, blocks: int = 2, **more: Any) -> None:
        self.url = url
        self.store = LocalStore(directory)
        config = AlgorithmConfig(num_envs_per_worker=2)
        self.shape: EnvironmentShape = probe_environment(ENV, config)
        self.policy: Policy = make_policy(self.shape.observation_space, self.shape.action_space, PPO.Config())
        self.layout = BlockLayout(segment_spec(self.policy, self.shape, 4), 2)
        self.blocks, self.version = blocks, 1
        self.is_over = False
        self._writer: StreamWriter | None = None
        self.spec = WorkerSpec(
            channel=channel_of(self.store, directory.parent.name + directory.name),
            room=6,
            env=ENV,
            env_config={},
            preprocess={},
            wrappers=(),
            num_envs=2,
            steps=4,
            description=self.policy.description(),
            masked=False,
            seed=3,
            in_turn=in_turn,
            **more,
        )

    def confirm(self) -> None:
        """No other learner exists."""

    def weights(self) -> Mapping[str, Array]:
        return {name: tensor.detach().numpy() for name, tensor in self.policy.state_dict().items()}

    @contextlib.contextmanager
    def fleet(self, incarnation: int = 1, *, resumed: int | None = None, max_age: int | None = 0) -> Iterator[RedisFleet]:
        validator = SegmentValidator(self.shape.observation_space, self.shape.action_space, self.layout.spec)
        fleet = RedisFleet(
            self.url,
            self.spec,
            FleetRun(self.store, incarnation, lambda: self.is_over, self.confirm),
            PublishedWeights(lambda: (self.version, self.weights()), resumed),
            BatchSettings(self.layout, self.blocks, max_age, validator.find_error),
        )
        try:
            yield fleet
        finally:
            fleet.close()

    def update(self, fleet: RedisFleet) -> None:
        """As a trainer does: take, learn, release, publish."""
        self.taken(fleet)
        self.version += 1
        fleet.publish(self.version, self.weights())

    def taken(self, fleet: RedisFleet) -> Array:
        """The versions of the next batch."""
        wait_until(lambda: fleet.step() and fleet.batches.ready())
        batch = fleet.batches.take()
        assert batch is not None
        versions = batch.version.copy()
        fleet.batches.release(batch)
        return versions

    @contextlib.contextmanager
    def worker(self, name: str, **more: Any) -> Iterator[Work]:
        work = Work(self.url, self.store, WorkerOptions(name=name, **more))
        try:
            yield work
        finally:
            work.end()

    def exchange(self) -> contextlib.closing[Any]:
        return contextlib.closing(open_message_stream(self.url, self.spec.channel, self.spec.room))

    def push(self, seq: int, version: int, worker: str = "by-hand", plan: str | None = None) -> None:
        """One segment, as a worker would send it; with a number of earlier, as it does when it heard no answer."""
        if self._writer is None or plan is not None:
            exchange = open_message_stream(self.url, self.spec.channel, self.spec.room)
            self._writer = StreamWriter(exchange, self.layout, worker=worker, plan=plan or self.spec.fingerprint)
        self._writer._seq = seq
        block = self._writer.reserve(0)
        assert block is not None
        block.version[:] = version
        block.valid[:] = True
        self._writer.commit(block)
        assert not self._writer.outgoing


class Work:
    """A worker in a thread."""

    def __init__(self, url: str, store: LocalStore, options: WorkerOptions) -> None:
        self._asked = threading.Event()
        self.ended: str | None = None
        self.error: BaseException | None = None
        self._worker = FleetWorker(url, store, options, stop=self._asked.is_set)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.ended = self._worker.run()
        except BaseException as error:
            self.error = error

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker goes on"

    def end(self) -> None:
        self._asked.set()
        self.join()


@pytest.fixture
def rig(server: RedisServer, tmp_path: Path) -> Rig:
    return Rig(server.url, tmp_path / "run")


# -- ages ----------------------------------------------------------------------------------------------------------------


def test_versions_of_this_learner_are_as_old_as_the_updates_since() -> None:
    age = VersionAges(first=1001, resumed=12)
    age.newest = 1005
    assert [age(v) for v in (1005, 1004, 1001)] == [0, 1, 4]


def test_numbers_jump_at_a_restart_and_ages_do_not() -> None:
    """Version 12 was stored, 1001 has the same weights; 14 was two updates away from it, in a future that was lost."""
    age = VersionAges(first=1001, resumed=12)
    assert [age(v) for v in (12, 11, 14)] == [0, 1, 2]
    age.newest = 1003
    assert age(12) == 2


def test_without_a_checkpoint_everything_from_before_is_as_old_as_can_be() -> None:
    age = VersionAges(first=2001, resumed=None)
    assert age(2000) == 2001


# -- taking turns --------------------------------------------------------------------------------------------------------


def test_in_turn_every_batch_is_of_the_newest_version_alone(rig: Rig) -> None:
    with rig.fleet() as fleet, rig.worker("one"), rig.worker("two"):
        for _ in range(4):
            newest = rig.version
            assert (rig.taken(fleet) == newest).all()
            rig.version += 1
            fleet.publish(rig.version, rig.weights())
        assert rig.version == 5


def test_in_turn_a_worker_waits_for_the_next_version_when_its_share_is_made(rig: Rig) -> None:
    rig.blocks = 1
    with rig.fleet() as fleet, rig.worker("one"), rig.exchange() as exchange:
        wait_until(lambda: exchange.waiting() >= 1)

        def waits() -> bool:
            notices = exchange.posted(PRESENCE)
            return bool(notices) and Presence.decode(notices[f"{PRESENCE}one"]).state == "waiting for weights"

        wait_until(waits)
        assert exchange.waiting() == 1
        assert (rig.taken(fleet) == 1).all()


def test_the_share_of_a_worker_that_does_not_deliver_is_made_by_the_others(rig: Rig) -> None:
    """There are two presences, but only one worker exists."""
    with rig.exchange() as exchange:
        exchange.post(f"{PRESENCE}ghost", Presence("nowhere", 1, "sampling", beat=1).encode())
    with rig.fleet() as fleet, rig.worker("real"):
        wait_until(lambda: fleet.step() and fleet.joined == 2)
        for _ in range(2):
            rig.update(fleet)
    assert rig.version == 3


def test_in_turn_a_segment_that_was_lost_on_the_way_is_asked_for_again(rig: Rig) -> None:
    """The server forgets the only segment of a version; the worker waits for the next version, the learner for the segment."""
    rig.blocks = 1
    with rig.fleet() as fleet, rig.worker("one"), rig.exchange() as exchange:
        wait_until(lambda: exchange.waiting() == 1)
        (lost,) = exchange.pull(1, 1.0)
        exchange.acknowledge([lost.id])
        assert (rig.taken(fleet) == 1).all()


def test_the_notice_is_posted_again_after_a_server_lost_its_data(server: RedisServer, tmp_path: Path) -> None:
    rig = Rig(server.url, tmp_path / "run", in_turn=False, blocks=1)
    with rig.fleet(max_age=None) as fleet:
        wait_until(lambda: fleet._publisher is not None and fleet._publisher.published == 1)
        with contextlib.closing(server.client()) as client:
            client.flushall()
        with rig.worker("late"):
            assert (rig.taken(fleet) == 1).all()


def test_without_turns_a_worker_goes_on_with_its_last_weights_until_there_is_no_room(server: RedisServer, tmp_path: Path) -> None:
    rig = Rig(server.url, tmp_path / "run", in_turn=False)
    with rig.fleet() as fleet:
        wait_until(lambda: fleet._publisher is not None and fleet._publisher.published == 1)
    # the learner is gone, its notice and its weights are not
    with rig.worker("alone"), rig.exchange() as exchange:
        wait_until(lambda: exchange.waiting() == rig.spec.room)
    with rig.fleet(2, max_age=None) as fleet:  # a later learner finds the segments
        assert (rig.taken(fleet) == 1).all()


# -- who is there --------------------------------------------------------------------------------------------------------


def test_joining_and_leaving_are_counted(rig: Rig) -> None:
    with rig.fleet() as fleet:
        with rig.worker("one"):
            wait_until(lambda: fleet.step() and fleet.metrics()["sampler/workers"] == 1)
            rig.update(fleet)
        wait_until(lambda: fleet.step() and fleet.metrics()["sampler/workers"] == 0)
        numbers = fleet.metrics()
        assert (numbers["fleet/joined"], numbers["fleet/left"], numbers["fleet/silent"]) == (1, 1, 0)


HELD = threading.Event()


class Held(gym.Env[Any, Any]):
    """CartPole's spaces; the third step does not return before HELD is set."""

    def __init__(self) -> None:
        cart_pole = gym.make(ENV)
        self.observation_space, self.action_space = cart_pole.observation_space, cart_pole.action_space
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        assert self._steps < 3 or HELD.wait(WAIT_S)
        return np.zeros(4, np.float32), 1.0, False, False, {}


def test_steps_count_before_their_segment_is_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.redis.worker.BEAT_S", 0.1)
    monkeypatch.setattr("ludus.distributed.redis.learner._UPDATE_S", 0.1)
    rig.spec = replace(rig.spec, env="tests.distributed.test_redis_fleet:Held")
    with rig.fleet() as fleet, rig.worker("slow"):
        try:
            wait_until(lambda: fleet.step() and fleet.has_sampled())
            assert fleet._roster.totals()["blocks"] == 0
            assert fleet.status()["workers"][0]["state"] == "sampling"
        finally:
            HELD.set()


@pytest.mark.parametrize("spent", [(0.5, 0.5, 0.5, 0.0), (30.0, 10.0, 40.0, 20.0), (0.0, 0.0, 0.0, 0.0)])
def test_shares_of_time_add_up_to_at_most_100_percent(rig: Rig, spent: tuple[float, float, float, float]) -> None:
    environment_s, policy_s, blocked_s, weights_wait_s = spent
    before = Presence("host", 1, "sampling", beat=1)
    after = replace(
        before, beat=2, environment_s=environment_s, policy_s=policy_s, blocked_s=blocked_s, weights_wait_s=weights_wait_s
    )
    now = 100.0
    with rig.exchange() as exchange, rig.fleet() as fleet:
        fleet._clock = lambda: now
        exchange.post(f"{PRESENCE}one", before.encode())
        fleet._update()
        fleet.metrics()
        now += 2.0
        exchange.post(f"{PRESENCE}one", after.encode())
        fleet._update()
        fleet._waited_s += 6.0  # a wait that began before the window
        numbers = fleet.metrics()
    shares = [numbers[f"sampler/{name}_share"] for name in ("env", "policy", "blocked", "weights_wait")]
    assert sum(shares) == pytest.approx(min(1.0, sum(spent) / 2.0))
    assert numbers["learner/wait_share"] == 1.0


def test_a_silent_worker_is_counted_as_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.redis.roster.SILENT_S", 0.5)
    with rig.exchange() as exchange:
        exchange.post(f"{PRESENCE}dead", Presence("nowhere", 1, "sampling", beat=9, steps=40).encode())
        with rig.fleet() as fleet:
            wait_until(lambda: fleet.step() and fleet.joined == 1)
            wait_until(lambda: fleet.step() and fleet.left == 1)
            assert fleet.silent == 1
            assert exchange.posted(PRESENCE) == {}


def test_rubbish_among_the_notices_is_not_a_worker(rig: Rig) -> None:
    good = json.loads(Presence("host", 1, "sampling").encode())
    with rig.exchange() as exchange, rig.fleet() as fleet:
        for i, data in enumerate(
            [
                b"\x80\x04pickle",
                json.dumps(good | {"steps": 10**400}).encode(),
                json.dumps(good | {"blocked_s": float("nan")}).encode(),
                b"[" * 100_000,
                json.dumps(good | {"why": "x" * 100_000, "steps": -1}).encode(),
            ]
        ):
            exchange.post(f"{PRESENCE}{i}", data)
        fleet._update()
        assert fleet.joined == 0
        assert exchange.posted(PRESENCE) == {}
        exchange.post(NOTICE, json.dumps({"incarnation": float("inf")}).encode(), 1)
        fleet._update()
        fleet.metrics()


def test_workers_end_when_the_run_is_over_and_not_when_the_learner_only_stops(rig: Rig, server: RedisServer) -> None:
    with rig.worker("one") as work:
        with rig.fleet() as fleet:
            rig.update(fleet)
        time.sleep(0.2)
        assert not work.is_over()
        rig.is_over = True
        with rig.fleet(2):
            pass
        work.join()
        assert work.ended == "over"
    assert rig.store.list(WEIGHTS) == []
    with contextlib.closing(server.client()) as client:
        assert client.keys(f"*{rig.spec.channel}*") == [], "a run that is over leaves nothing in the server"


def test_workers_end_although_the_server_was_down_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.redis.worker._NO_NEWS_S", 0.2)
    with RedisServer(tmp_path / "redis") as server:
        monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", server.password)
        rig = Rig(server.url, tmp_path / "run")
        with rig.worker("one") as work:
            with rig.fleet() as fleet:
                rig.update(fleet)
                rig.is_over = True
                server.kill()
            server.start()
            work.join()
            assert work.ended == "over"


def test_workers_end_although_their_announced_weights_are_gone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner came to its end right after its last version, and could not say so."""
    monkeypatch.setattr("ludus.distributed.redis.worker._NO_NEWS_S", 0.2)
    with rig.worker("one") as work:
        with rig.fleet() as fleet:
            rig.update(fleet)
        with rig.exchange() as exchange:
            exchange.post(NOTICE, WeightsNotice(1, 99, 2, rig.spec.fingerprint).encode(), 1)
        rig.store.put(END, b"")
        work.join()
        assert work.ended == "over"


def test_a_stopped_worker_removes_its_presence(rig: Rig) -> None:
    with rig.fleet() as fleet:
        with rig.worker("one") as work:
            rig.update(fleet)
            work.end()
            assert work.ended == "stopped"
        with rig.exchange() as exchange:
            assert exchange.posted(PRESENCE) == {}


# -- who is refused ------------------------------------------------------------------------------------------------------


def test_another_observation_space_is_refused_with_the_reason_on_both_sides(rig: Rig) -> None:
    space = {**rig.spec.description["observation_space"], "shape": [7]}
    rig.spec = replace(rig.spec, description={**rig.spec.description, "observation_space": space})
    with rig.fleet() as fleet, rig.worker("misfit") as work:
        work.join()
        assert isinstance(work.error, IncompatibleCheckpoint)
        assert "observation space" in str(work.error)
        wait_until(lambda: fleet.step() and fleet.metrics()["fleet/refused"] == 1)


def test_another_version_of_the_code_is_refused_and_the_learner_hears_of_it(rig: Rig) -> None:
    rig.spec = replace(rig.spec, ludus="0.0.0")
    with rig.fleet() as fleet, rig.worker("old") as work:
        work.join()
        assert isinstance(work.error, IncompatibleCheckpoint)
        assert "0.0.0" in str(work.error)
        wait_until(lambda: fleet.step() and fleet.metrics()["fleet/refused"] == 1)


def test_a_worker_for_one_environment_refuses_a_spec_that_names_another(rig: Rig) -> None:
    with rig.fleet(), rig.worker("careful", env="Acrobot-v1") as work:
        work.join()
        assert isinstance(work.error, IncompatibleCheckpoint)
        assert "CartPole-v1" in str(work.error)


def test_a_wrong_password_ends_a_worker_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.fleet():
        monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", "wrong-secret")
        with rig.worker("one") as work:
            work.join()
            assert isinstance(work.error, UsageError)
            assert "wrong-secret" not in str(work.error)


def test_an_environment_that_fails_ends_the_worker_and_the_learner_hears_why(server: RedisServer, tmp_path: Path) -> None:
    rig = Rig(server.url, tmp_path / "run")
    rig.spec = replace(rig.spec, env="tests.environments:make_fragile", env_config={"crash": 0.2})
    with rig.fleet() as fleet, rig.worker("one") as work:
        work.join()
        assert isinstance(work.error, EnvironmentFault)
        wait_until(lambda: fleet.step() and fleet.left + len(fleet._roster.refused) == 1)


def test_workers_restart_when_the_spec_changes(rig: Rig) -> None:
    with rig.worker("one"):
        with rig.fleet() as fleet:
            rig.update(fleet)
        rig.spec = replace(rig.spec, seed=4)
        with rig.fleet(2) as fleet:
            rig.version += 1000
            fleet.publish(rig.version, rig.weights())
            assert (rig.taken(fleet) == rig.version).all()


def test_a_worker_that_hears_nothing_looks_for_another_spec(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was begun anew at the same place: its channel is another one."""
    monkeypatch.setattr("ludus.distributed.redis.worker._NO_NEWS_S", 0.2)
    rig.blocks = 1
    with rig.worker("one"):
        with rig.fleet() as fleet:
            rig.update(fleet)
        rig.spec = replace(rig.spec, channel=f"{rig.spec.channel}-again")
        with rig.fleet(2) as fleet:
            assert (rig.taken(fleet) == rig.version).all()


# -- what counts ---------------------------------------------------------------------------------------------------------


def test_nothing_counts_twice_in_one_lineage_and_what_was_lost_is_counted(rig: Rig) -> None:
    """A learner stores its state, learns on, and dies; the next one begins with that state."""
    rig.blocks = 1
    with rig.fleet(max_age=None) as fleet:
        for seq in range(2):
            rig.push(seq, 1)
            rig.taken(fleet)
        stored = fleet.state()
        rig.push(2, 1)
        rig.taken(fleet)  # learned and acknowledged after the checkpoint: gone with its learner
        rig.push(3, 1)
        wait_until(lambda: fleet.step() and fleet.batches.ready())
        assert fleet.batches.take() is not None  # taken and not released: it comes again
    rig.push(1, 1)  # a duplicate of what is in the checkpoint
    with rig.fleet(2, max_age=None) as fleet:
        fleet.load_state(stored)
        rig.taken(fleet)
        fleet.step()
        assert not fleet.batches.ready()
        numbers = fleet.metrics()
        assert (numbers["fleet/duplicates"], numbers["fleet/lost"]) == (1, 1)
        with rig.exchange() as exchange:
            fleet._reader.settle()
            assert exchange.waiting() == 0


def test_segments_of_another_time_are_discarded_and_counted(rig: Rig) -> None:
    rig.version, rig.blocks = 5, 1
    with rig.fleet() as fleet:
        rig.push(0, 4)
        rig.push(1, 5)
        rig.push(2, 99)
        assert (rig.taken(fleet) == 5).all()
        wait_until(lambda: fleet.step() and fleet.metrics()["fleet/discarded"] == 2)


def test_segments_of_another_spec_are_rejected_and_counted(rig: Rig) -> None:
    with rig.fleet() as fleet:
        rig.push(0, 1, plan="0123456789abcdef")
        wait_until(lambda: fleet.step() and (fleet.batches.ready() or fleet.metrics()["fleet/rejected"] == 1))
        assert fleet.batches.waiting == 0


def test_a_state_that_another_kind_of_sampling_left_is_not_taken_for_numbers(rig: Rig) -> None:
    with rig.fleet() as fleet:
        fleet.load_state({"generator": np.zeros(3, np.uint8)})
        assert fleet.state()["high"].size == 0


# -- two learners --------------------------------------------------------------------------------------------------------


def test_of_two_learners_the_older_is_fenced_off(rig: Rig) -> None:
    with rig.fleet(1) as older, rig.exchange() as exchange:
        wait_until(lambda: exchange.read(NOTICE) is not None)
        with rig.fleet(2) as newer:

            def posted() -> bool:
                notice = exchange.read(NOTICE)
                return notice is not None and WeightsNotice.decode(notice).incarnation == 2

            wait_until(posted)
            with pytest.raises(Fenced, match="taken over this run"):
                wait_until(lambda: older.step() and False)
            older.publish(50, rig.weights())  # what it still does has no effect
            newer.step()
            assert posted()


def test_a_learner_that_was_suspended_keeps_nothing_from_its_successor(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up in the middle of waiting, and gets what was meant for the other."""
    monkeypatch.setattr("ludus.distributed.redis.roster.SILENT_S", 0.5)
    rig.blocks, rig.version = 1, 7
    with rig.fleet(1) as older, rig.exchange() as exchange:
        wait_until(lambda: exchange.read(NOTICE) is not None)
        rig.version = 1007
        with rig.fleet(2) as newer:

            def posted() -> bool:
                notice = exchange.read(NOTICE)
                return notice is not None and WeightsNotice.decode(notice).incarnation == 2

            wait_until(posted)
            rig.push(0, 1007)
            older._reader.wait(5.0)
            with pytest.raises(Fenced):
                older.batches.ready()
            assert (rig.taken(newer) == 1007).all()


def test_the_spec_of_a_learner_that_was_cut_off_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.distributed.redis.learner._CHECK_SPEC_S", 0.0)
    with rig.fleet() as fleet:
        rig.store.put(SPEC, replace(rig.spec, steps=9).encode())
        fleet._update()
        assert rig.store.get(SPEC) == rig.spec.encode()


def test_weights_that_are_asked_for_again_and_again_stay_in_the_store(rig: Rig) -> None:
    """A slow store: the notice is amended while the weights that it names are on their way."""
    with rig.fleet() as fleet:
        press = fleet._publisher
        assert press is not None
        for share in range(12):
            press.publish(WeightsNotice(1, 1, share + 2, rig.spec.fingerprint), serialization.encode_weights(rig.weights()))
            wait_until(lambda: press._next is None)
        assert rig.store.list(WEIGHTS) == ["00000001.safetensors"]


class _Away(LocalStore):
    """A directory on a server that does not answer for a while."""

    away = False

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        if self.away:
            raise StoreUnavailable("The store is away.")
        super().put(key, data, overwrite=overwrite)


def test_an_outage_of_the_store_blocks_nothing_and_the_newest_weights_are_published_afterwards(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.distributed.redis.publisher._RETRY_S", 0.05)
    rig = Rig(server.url, tmp_path / "run", in_turn=False, blocks=1)
    rig.store = store = _Away(tmp_path / "run")
    with rig.fleet(max_age=None) as fleet, rig.worker("one"):
        rig.update(fleet)
        wait_until(lambda: fleet._publisher is not None and fleet._publisher.published == 2)
        store.away = True
        for _ in range(3):
            rig.update(fleet)  # with segments of the version that the worker has
        failures = fleet.metrics()["fleet/publish_failures"]
        wait_until(lambda: fleet.metrics()["fleet/publish_failures"] > failures + 1)  # the last of them with the newest weights
        store.away = False
        wait_until(lambda: bool((rig.taken(fleet) == rig.version).all()))
        # One that was on its way when the store came back may have arrived, too.
        assert fleet.metrics()["fleet/published"] <= 4, "those in between were not worth the way"


def test_the_channel_of_a_run_stays_the_same(rig: Rig) -> None:
    with rig.fleet():
        pass
    assert channel_of(rig.store, "another") == rig.spec.channel
    assert rig.store.get(SPEC) == rig.spec.encode()
