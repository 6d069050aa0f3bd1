"""The whole way of a game team: a gamecore server, a learner and actors, on one machine and on two; and all of it attacked."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import ludus
from tests.gamecore.test_vector_env import COUNTING, DECLARED
from tests.long.gamecore_rig import Server
from tests.system.hosts import SHARED
from tests.system.role_hosts import LUDUS, Machine, RoleHosts, role_hosts
from tests.waiting import wait_until

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


SMALLER = tuple(
    word
    for change in (
        *("num_envs_per_worker=4", "train_batch_size=256", "rollout_fragment_length=32", "num_epochs=1"),
        *("env_config.seconds=30", "evaluation_duration=2", "minibatch_size=128"),
    )
    for word in ("--set", f"config.{change}")
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
            wait_until(
                lambda: not old & {g["runtime_id"] for g in server.games("running")},
                60,
                what="the end of games whose actor is gone",
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
        wait_until(lambda: not server.games("running"), 60, what="no games")
    assert machine.left() == []


def test_the_page_on_three_machines_and_the_one_with_the_actors_is_lost(tmp_path: Path) -> None:
    """docs/pipeline.md, "On two machines, by hand", with actors on a third: its file, its commands, smaller."""
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    experiment = re.findall(r"```yaml\n# arena.yaml\n(.*?)```", page, re.DOTALL)[0]
    with role_hosts(3, tmp_path, lambda hosts: f"{hosts.address(0)} root 36000 1\n") as roles:
        for host in range(3):
            (roles.place(host) / "gamecore.token").write_text("a-token-for-games\n")
        (roles.place(0) / "arena.yaml").write_text(experiment)
        there, server = SHARED / "h1", f"{roles.hosts.address(1)}:23432"
        words = ["gamecore", "serve", "--host", "0.0.0.0", "--token-file", str(there / "gamecore.token"), "--supervise"]
        home = {"HOME": str(there), "LUDUS_STATE_DIR": str(there / "state")}
        with (tmp_path / "serve.out").open("wb") as out:
            roles.hosts.run(1, [*LUDUS, *words], env={**roles.env, **home}, output=out)
        roles.until(lambda: "gamecore server at" in (tmp_path / "serve.out").read_text(), BUSY_S)
        known = ("--server", server, "--token-file", "gamecore.token")
        roles.ludus(1, "gamecore", "test", *known)

        games = {"GAMECORE_SERVER_ADDR": server, "LUDUS_GAMECORE_TOKEN_FILE": str(SHARED / "h0" / "gamecore.token")}
        roles.start(0, "learner", "-f", "arena.yaml", "--num-workers", "2", *SMALLER, "--stop", "timesteps=3000", env=games)
        roles.share_token()
        secret = {"LUDUS_GAMECORE_TOKEN_FILE": str(SHARED / "h2" / "gamecore.token")}
        assert f"gamecore server: {server}" in roles.start(2, "actor", "--num", "2", "--gamecore", server, env=secret)
        roles.until(lambda: roles.status(0, "learner")["state"] == "succeeded", 4 * BUSY_S)
        run = roles.status(0, "learner")["run"]
        said = (Path(outside(run, tmp_path)) / "metrics.jsonl").read_text()
        assert "match/win/past_low" in said
        assert "evaluation/win/medium" in said, "the learner has ordered matches as well"

        for where in ((), (*known, "--game", "arena")):
            told = roles.ludus(0, "battle", run, "rule:hard", "--games", "2", "--seconds", "8", *where, "--json")
            assert json.loads(told.splitlines()[-1])["failed"] == 0

        roles.start(0, "learner", "-f", "arena.yaml", "--num-workers", "2", *SMALLER, "--stop", "timesteps=1000000", env=games)
        roles.until(lambda: playing(roles, known), 2 * BUSY_S)
        roles.hosts.power_off(2)
        roles.until(lambda: not playing(roles, known), 300)  # they try to reach it again for a while
        roles.ludus(0, "learner", "stop")


def playing(roles: RoleHosts, known: tuple[str, ...]) -> list[Any]:
    listed = json.loads(roles.ludus(1, "gamecore", "list", *known, "--json").splitlines()[-1])
    return [game for game in listed if game["state"] == "running"]


def outside(path: str, base: Path) -> str:
    """A path of the hosts, as it is called here."""
    return str(base / Path(path).relative_to(SHARED))
