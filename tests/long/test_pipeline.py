"""The whole way of a game team: a gamecore server, a learner and actors, on one machine and on two; and all of it attacked."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import ludus
from tests.actor.test_gamecored import COUNTING, DECLARED
from tests.long.gamecore_rig import Server, until
from tests.system.hosts import SHARED
from tests.system.role_hosts import LUDUS, Machine, role_hosts

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

BUSY_S = 120.0
SMALL: dict[str, Any] = {
    "num_envs_per_worker": 4,
    "rollout_fragment_length": 32,
    "num_sgd_iter": 1,
    "sgd_minibatch_size": 128,
    "evaluation_duration": 0,
}
ARENA = (
    *("gamecore", "--run", "PPO", "--num-envs", "4", "--seed", "1", "--num-workers", "2"),
    *("--set", "config.train_batch_size=256", "--set", "config.rollout_fragment_length=32", "--set", "config.num_epochs=1"),
    *("--set", "config.evaluation_interval=0", "--set", "config.env_config.seconds=30"),
    *("--set", "config.env_config.opponent.self=0.5", "--set", "config.env_config.opponent.past=0.5"),
)


def steps_of(run: str | Path) -> int:
    lines = Path(run, "metrics.jsonl").read_text().splitlines() if Path(run, "metrics.jsonl").exists() else []
    return int(json.loads(lines[-1])["timesteps"]) if lines else 0


def test_a_fifth_of_the_games_crash_or_talk_nonsense_and_training_goes_on(tmp_path: Path) -> None:
    with Server(tmp_path / "server", {"counting": COUNTING}) as server:
        for fault in ("crash", "nan", "shape", "protocol", "words"):
            options = {"fault": fault, "share": 0.2, "length": 20}
            env_config = {**DECLARED, "server": f"127.0.0.1:{server.port}", "opponent": "self", "options": options}
            result = ludus.train(
                "gamecore",
                stop={"timesteps_total": 4000},
                local_dir=tmp_path,
                env_config=env_config,
                num_workers=2,
                train_batch_size=256,
                **SMALL,
            )
            assert result.metrics["timesteps"] >= 4000
            assert result.metrics["episodes"] > 50
            assert result.metrics["sampler/env_restarts"] > 0
            assert result.metrics["sampler/restarts"] == 0


def test_whatever_is_killed_training_goes_on(tmp_path: Path) -> None:
    """The server twice, games, the workers, and the training itself: each comes back, and the run goes on."""
    machine = Machine(tmp_path)
    with Server(tmp_path / "server", None) as server:
        env = {"ACTOR_NUM": "2", "GAMECORE_SERVER_ADDR": f"127.0.0.1:{server.port}"}
        try:
            machine.start("learner", *ARENA, "--checkpoint-freq", "5", "--stop", "time_s=800")
            machine.start("actor", env=env)
            machine.until(lambda: machine.status("learner").get("run"), BUSY_S)
            run = machine.status("learner")["run"]
            machine.until(lambda: steps_of(run) > 500, 2 * BUSY_S)
            for _ in range(2):
                assert server.process is not None
                server.process.kill()
                server.process.wait()
                before = steps_of(run)
                server.start()
                machine.until(lambda before=before: steps_of(run) > before + 500, 2 * BUSY_S)  # type: ignore[misc]
            for game in server.games("running")[:2]:
                os.kill(game["pid"], signal.SIGKILL)
            before = steps_of(run)
            machine.until(lambda: steps_of(run) > before + 500, BUSY_S)
            workers = [w["pid"] for w in json.loads(Path(run, "status.json").read_text())["sampling"]["workers"] if w["pid"]]
            old = {game["runtime_id"] for game in server.games("running")}
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            before = steps_of(run)
            machine.until(lambda: steps_of(run) > before + 500, BUSY_S)
            until(
                "the end of games whose actor is gone", lambda: not old & {g["runtime_id"] for g in server.games("running")}, 60
            )
            assert machine.state_of("learner") == "running"
            (learner,) = (process for process in machine.status("learner")["processes"] if process["role"] == "main")
            os.kill(learner["pid"], signal.SIGKILL)
            before = steps_of(run)
            machine.until(lambda: steps_of(run) > before + 500, 2 * BUSY_S)
            after = machine.status("learner")
            assert (after["state"], after["run"]) == ("running", run)
            assert [process["restarts"] for process in after["processes"] if process["role"] == "main"] == [1]
        finally:
            machine.ludus("learner", "stop", code=None)
            machine.ludus("actor", "stop", code=None)
        until("no games", lambda: not server.games("running"), 60)
    assert machine.left() == []


def test_two_machines_one_has_games_and_actors_the_other_learns(tmp_path: Path) -> None:
    """docs/pipeline.md, command by command."""
    with role_hosts(2, tmp_path, lambda hosts: f"{hosts.address(0)} root 36000 1\n") as roles:
        token = roles.place(1) / "gamecore.token"
        token.write_text("a-token-for-games\n")
        there = SHARED / "h1"
        words = ["gamecore", "serve", "--host", "0.0.0.0", "--token-file", str(there / "gamecore.token")]
        home = {"HOME": str(there), "LUDUS_STATE_DIR": str(there / "state")}
        with (tmp_path / "serve.out").open("wb") as out:
            roles.hosts.run(1, [*LUDUS, *words], env={**roles.env, **home}, output=out)
        roles.until(lambda: "gamecore server at" in (tmp_path / "serve.out").read_text(), BUSY_S)
        roles.start(0, "learner", *ARENA, "--stop", "timesteps=3000")
        roles.share_token()
        server = f"{roles.hosts.address(1)}:23432"
        secret = {"LUDUS_GAMECORE_TOKEN_FILE": str(there / "gamecore.token")}
        said = roles.start(1, "actor", "--num", "2", "--gamecore", server, env=secret)
        assert f"gamecore server: {server}" in said
        roles.until(lambda: roles.status(0, "learner")["state"] == "succeeded", 3 * BUSY_S)
        assert "match/win/past" in (Path(outside(roles.status(0, "learner")["run"], tmp_path)) / "metrics.jsonl").read_text()
        assert list((roles.place(1) / "logs" / "actor").glob("actor_*.log"))
        roles.ludus(1, "actor", "stop")


def outside(path: str, base: Path) -> str:
    """A path of the hosts, as it is called here."""
    return str(base / Path(path).relative_to(SHARED))
