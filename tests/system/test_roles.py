"""A learner and an actor that are started by hand on this machine, as a tutorial would have it, with a real Ray between them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.role_hosts import TRAINING, Machine

pytestmark = pytest.mark.system


def test_an_actor_and_a_learner_find_each_other_train_to_the_end_and_leave_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    env = {"ACTOR_NUM": "1", "GAMECORE_SERVER_ADDR": "127.0.0.1:23432", "LD_PRELOAD": "libnothing.so"}
    words = (*TRAINING, "--num-workers", "1", "--stop", "timesteps=1000", "--redis-password", "horse-battery")
    try:
        with ThreadPoolExecutor(2) as pool:  # in any order
            actor = pool.submit(machine.start, "actor", env=env)
            said = machine.start("learner", *words)
        assert "actor_num: 1" in actor.result()
        assert "LD_PRELOAD=libnothing.so is removed" in actor.result()
        for word in ("parse ip list", "node_num: 1", "learner_num: 1", "start learner", "logs/learner/train.log"):
            assert word in said
        machine.until(lambda: machine.state_of("learner") not in ("pending", "running"), 180)
        ended = machine.status("learner")
        assert (ended["state"], ended["exit_code"]) == ("succeeded", 0)
        assert "checkpoint" in machine.log("learner/train.log")
        assert Path(ended["run"], "metrics.jsonl").read_text().count("\n") >= 2
        assert len(list((tmp_path / "logs" / "actor").glob("actor_*.log"))) == 1
        assert machine.state_of("actor") == "running"  # it waits for the next learner
    finally:
        machine.ludus("actor", "stop", code=None)
        if machine.state_of("learner") in ("pending", "running"):
            machine.ludus("learner", "stop", code=None)
    machine.until(lambda: not machine.left(), 30)
    token = (machine.state / "token").read_text()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "token"]
    assert [path for path in written if any(word in path.read_bytes() for word in (token.encode(), b"horse-battery"))] == []
