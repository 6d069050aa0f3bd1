"""GamecoreVectorEnv with a real gamecore server: observations, results, failures."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludus
from ludus.core.tree import Tree, leaves
from ludus.envs.vector_env import Environments, make_environments
from ludus.errors import ConfigError, EnvironmentFault
from ludus.gamecore import match_scheduler
from ludus.gamecore.live_matches import LiveMatches, MatchActor
from ludus.gamecore.server.http.app import Settings, running
from ludus.gamecore.vector_env import GamecoreVectorEnv
from ludus.process import identity
from ludus.protocol.codec import random_action
from ludus.protocol.gamecore_client import GamecoreClient, GameState
from tests.long.gamecore_rig import Server
from tests.waiting import wait_until

pytestmark = pytest.mark.system

COUNTING = {
    "command": ["{python}", "-S", str(Path(__file__).with_name("counting.py"))],
    "modes": ["1v1"],
    "options": {
        "length": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 8},
        "fault": {"type": "string", "default": "none"},
        "share": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
        "together": {"type": "integer", "minimum": 0, "maximum": 1, "default": 0},
    },
}
DECLARED: dict[str, Any] = {
    "game": "counting",
    "mode": "1v1",
    "observation_space": {"type": "Box", "shape": [3], "low": -1, "high": 10},
    "action_space": {"type": "Discrete", "n": 2},
    "masked": True,
    "expects": {"rules": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the Arena and a counting game."""
    directory = tmp_path_factory.mktemp("gamecore")
    built_in = Path(ludus.__file__).with_name("gamecore") / "server" / "games.yaml"
    games = directory / "games.yaml"
    games.write_text(built_in.read_text() + f"  counting: {COUNTING}\n".replace("'", '"'))
    with running(Settings(port=0, games=games, state_dir=directory / "state")) as found:
        yield f"127.0.0.1:{found.port}"


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """Creates environments and closes them after the test."""
    environments: list[Any] = []
    yield environments
    for one in environments:
        one.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step wait until all rows have a match."""
    ready_to_step = LiveMatches.ready_to_step
    monkeypatch.setattr(LiveMatches, "ready_to_step", lambda matches, *, wait_for_all: ready_to_step(matches, wait_for_all=True))


def counting(
    made: list[Any], server: str, num: int = 2, *, fault: str = "none", share: float = 1.0, **more: Any
) -> GamecoreVectorEnv:
    options = {"fault": fault, "share": share, "length": more.pop("length", 8)}
    env = GamecoreVectorEnv(num, server=server, options=options, **{**DECLARED, "opponent": "rule", **more})
    made.append(env)
    env.reset(seed=1)
    return env


def ones(env: GamecoreVectorEnv) -> Any:
    return np.ones(env.num_envs, np.int64)


def played(env: GamecoreVectorEnv, steps: int) -> None:
    for _ in range(steps):
        env.step(ones(env))


# -- what rows see --------------------------------------------------------------------------------------------------------


def same(one: Tree, other: Tree, where: object) -> None:
    for (path, ours), (named, theirs) in zip(leaves(one), leaves(other), strict=True):
        assert (path, ours.dtype) == (named, theirs.dtype)
        assert np.array_equal(ours, theirs), f"{path} differs at {where}"


def random_actions(environments: Environments, mask: Any, random: np.random.Generator) -> Any:
    return np.stack([random_action(environments.action_space, random, one) for one in mask])


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (2, {"mode": "1v1", "opponent": "self", "seconds": 12}),
        (1, {"mode": "1v1", "opponent": "medium", "seconds": 27, "start": "lane"}),  # long enough for blows
        (
            3,
            {
                "mode": "3v3", "opponent": ["easy", "hard"], "seconds": 10, "whole": True, "start": {"home": 1, "lane": 1}, "lineup": "random",
                "weights": {"gold": 2.0}, "every": 2, "zero_sum": False,
            },
        ),
        (5, {"opponent": {"self": 2, "hard": 3}, "seconds": 12, "start": {"home": 1, "lane": 1}, "lineup": "random", "together": 2}),
        (2, {"opponent": "easy", "seconds": 12, "together": 0}),
        (1, {"opponent": ["easy", "hard"], "matchmaking": "even", "lineup": [[[107], [190]], [[190], [107]], [[111], [141]]], "seconds": 4}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("patient")
def test_rows_get_the_same_numbers_over_http_as_in_this_process(
    server: str, made: list[Any], rows: int, config: dict[str, Any]
) -> None:
    far = make_environments("gamecore", rows, {"server": server, **config})
    near = make_environments(
        "ludus.games.arena.env.gym_env:ArenaVectorEnv", rows, {k: v for k, v in config.items() if k != "together"}
    )
    made += [far, near]
    random = np.random.default_rng(0)
    far.reset(3)
    seen = near.reset(3)
    begun = far.step(np.zeros((rows, 4), np.int64))
    assert begun.lost is not None
    assert begun.lost.all()
    same(begun.observations.observation, seen.observation, "the beginning")
    ends = 0
    for step in range(140):  # into a second match
        actions = random_actions(near, seen.mask, random)
        expected, got = near.step(actions), far.step(actions)
        assert got.lost is None
        same(got.observations.observation, expected.observations.observation, step)
        same((got.reward, got.terminated, got.truncated), (expected.reward, expected.terminated, expected.truncated), step)
        over = expected.terminated | expected.truncated
        if over.any():
            same(got.results, expected.results, step)
        else:
            same(got.observations.mask, expected.observations.mask, step)
        ends += int(over.any())
        seen = expected.observations
    assert ends >= 1


def test_creating_the_environment_needs_no_server() -> None:
    environments = make_environments("gamecore", 1, {"server": "127.0.0.1:9", "mode": "3v3"})
    seen = environments.reset(0)
    assert environments.masked
    assert {path: leaf.shape for path, leaf in leaves(seen.observation)}["entities"][0] == 1
    environments.close()


def test_a_declared_game_is_played_to_its_end_and_restarted(server: str, made: list[Any]) -> None:
    env = counting(made, server, opponent="self", side=0)
    _, _, _, _, infos = env.step(ones(env))
    assert infos["lost"].all()
    seen, rewards = [], []
    for _ in range(10):
        observation, reward, terminated, truncated, infos = env.step(np.array([1, 0]))
        assert "lost" not in infos
        seen.append(observation[:, 0].tolist())
        rewards.append(reward.tolist())
        assert not truncated.any()
        if terminated.any():
            assert terminated.all()
            assert infos["won"].tolist() == [1, -1]
            assert infos["camp"].tolist() == [0, 1]
    steps = [[k / 8] * 2 for k in (1, 2, 3, 4, 5, 6, 7, 7, 0, 1)]  # the end shows what was seen last; the next step begins anew
    assert np.allclose(seen, steps)
    assert rewards == [[1, 0]] * 8 + [[0, 0]] + [[1, 0]]


def test_results_of_matches_reach_the_opponent_sampler(server: str, made: list[Any]) -> None:
    env = counting(made, server, 2, matchmaking="even", length=2)
    rivals = env.game.opponent_sampler
    until_s = time.monotonic() + 60
    while rivals.matches[0, 0] < 6 and time.monotonic() < until_s:
        env.step(np.array([1, 1]))  # which wins where nobody else is
    assert rivals.names == ("",)
    assert rivals.matches[0, 0] >= 6
    assert rivals.win_rate[0, 0] == pytest.approx((0.5 + rivals.matches[0, 0]) / (1 + rivals.matches[0, 0]))


def test_results_are_reported_by_opponent(server: str, made: list[Any]) -> None:
    env = counting(made, server, 2, opponent={"rule": 0.5, "past": 0.5}, length=2)
    assert env.result_names == ("win/rule", "loss/rule", "win/past", "loss/past", "past_version")
    told = np.zeros(3)
    until_s = time.monotonic() + 60
    while not (told[0] and told[1]) and time.monotonic() < until_s:
        infos = env.step(np.array([1, 1, 0]))[4]
        if "win/rule" in infos:
            told += infos["_win/past"] * infos["win/past"] + 10 * infos["_win/rule"] * infos["win/rule"]
    assert 1 <= told[0] < 10  # against a past opponent, who chose 0 and has nothing to tell
    assert told[1] >= 10
    assert told[2] == 0


def test_rows_of_past_opponents_come_last_and_are_marked(server: str, made: list[Any]) -> None:
    env = counting(made, server, 5, opponent={"past": 0.4, "rule": 0.2, "self": 0.4})
    assert env.num_envs == 7
    assert env.opponent_rows.tolist() == [False] * 5 + [True] * 2
    for _ in range(3):
        observation, *_ = env.step(ones(env))
    camps = observation[:, 2]
    assert camps[0] != camps[1]
    assert {(camps[2], camps[5]), (camps[3], camps[6])} <= {(0.0, 1.0), (1.0, 0.0)}


# -- several matches of a process -----------------------------------------------------------------------------------------


def processes(env: GamecoreVectorEnv, server: str, *states: str) -> dict[str, GameState]:
    """Running games of this environment by id."""
    backend = env._backend
    assert backend is not None
    prefix = backend.scheduler._prefix
    with GamecoreClient(server) as client:
        found = [game for game in client.list() if game.runtime_id.startswith(prefix)]
    return {game.runtime_id: game for game in found if game.state in (states or ("starting", "running"))}


def arena(made: list[Any], server: str, num: int, **config: Any) -> GamecoreVectorEnv:
    env = GamecoreVectorEnv(num, server=server, opponent="easy", **config)
    made.append(env)
    env.reset(seed=1)
    nothing(env)
    return env


def nothing(env: GamecoreVectorEnv) -> dict[str, Any]:
    """Step all rows with this action, and return the result."""
    return dict(env.step(np.zeros((env.num_envs, 4), np.int64))[4])


def finished(env: GamecoreVectorEnv) -> int:
    assert env._backend is not None
    return env._backend.matches.counts["finished"]


@pytest.mark.usefixtures("patient")
def test_a_process_plays_one_match_after_another(server: str, made: list[Any]) -> None:
    env = counting(made, server, 2, together=1, length=3)
    env.step(ones(env))
    begun = {name: game.pid for name, game in processes(env, server).items()}
    assert len(begun) == 2
    for _ in range(40):  # three to count, one to begin anew
        assert "lost" not in env.step(ones(env))[4]
    assert finished(env) == 20
    assert {name: game.pid for name, game in processes(env, server).items()} == begun


@pytest.mark.usefixtures("patient")
def test_matches_are_shared_out_evenly_and_processes_stay(server: str, made: list[Any]) -> None:
    env = arena(made, server, 5, seconds=1, together=4)  # three and two
    begun = processes(env, server)
    assert len(begun) == 2
    for _ in range(30):
        assert "lost" not in nothing(env)
    assert finished(env) >= 15
    assert processes(env, server).keys() == begun.keys()


def test_a_process_that_is_killed_costs_its_matches_and_no_others(server: str, made: list[Any]) -> None:
    env = arena(made, server, 4, together=2)
    backend = env._backend
    assert backend is not None
    shared: dict[str, list[int]] = {}
    for slot in backend.matches.slots:
        assert slot.current is not None
        assert slot.current.process is not None
        shared.setdefault(slot.current.process.id, []).extend(slot.rows)
    assert sorted(map(len, shared.values())) == [2, 2]
    victim, rows = next(iter(shared.items()))
    pid = processes(env, server)[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    lost = np.zeros(4, np.int64)
    infos: dict[str, Any] = {}
    until_s = time.monotonic() + 60
    while (lost.sum() == 0 or "lost" in infos) and time.monotonic() < until_s:
        infos = nothing(env)
        lost += infos.get("lost", 0)
    assert set(np.flatnonzero(lost).tolist()) == set(rows)
    assert "lost" not in infos
    assert env.restarts == 2
    assert len(processes(env, server)) == 2


def forfeits(env: GamecoreVectorEnv, *rows: int) -> None:
    actions = np.zeros((env.num_envs, 4), np.int64)
    actions[list(rows), 0] = 99
    assert np.flatnonzero(env.step(actions)[2]).tolist() == list(rows)


def all_play(env: GamecoreVectorEnv) -> bool:
    return "lost" not in nothing(env)


def test_a_process_that_is_killed_while_its_matches_begin_is_replaced(server: str, made: list[Any]) -> None:
    env = arena(made, server, 4, start_s=20.0, options={"on_illegal": "forfeit"})
    forfeits(env, 1, 2, 3)
    (game,) = processes(env, server).values()
    assert game.pid is not None
    os.kill(game.pid, signal.SIGKILL)
    wait_until(lambda: all_play(env) and env.restarts > 0, what="a match for all rows")  # they begin one after the other
    assert env.restarts == 4


def test_a_server_without_room_for_another_process_costs_nothing(
    tmp_path: Path, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Settings(port=0, state_dir=tmp_path, max_games=1)) as found:
        server = f"127.0.0.1:{found.port}"
        env = arena(made, server, 4, together=4, options={"on_illegal": "forfeit"})
        begun = processes(env, server).keys()
        monkeypatch.setattr(match_scheduler, "_MAX_AGE_S", 0.0)  # another one is due
        for row in range(4):
            forfeits(env, row)
            wait_until(lambda: all_play(env), what="a match for all rows")
        assert processes(env, server).keys() == begun
        assert (finished(env), env.restarts) == (4, 0)
        env.close()


def test_an_unknown_match_is_announced_again(server: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = MatchActor.end

    async def unheard(actor: MatchActor, body: bytes) -> bytes:
        await ended(actor, body)
        return b"\x80"

    monkeypatch.setattr(MatchActor, "end", unheard)
    env = arena(made, server, 2, together=2, options={"on_illegal": "forfeit"})
    forfeits(env, 0)
    wait_until(lambda: all_play(env), what="a match for both rows")
    assert (finished(env), env.restarts) == (1, 0)


def test_an_error_in_drawing_a_match_is_raised(server: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    env = arena(made, server, 2, options={"on_illegal": "forfeit"})

    def draw(*_: object) -> None:
        raise ZeroDivisionError("drawing")

    monkeypatch.setattr(env.game, "draw", draw)
    with pytest.raises(EnvironmentFault, match="drawing"):  # noqa: PT012 - in the step of its end, or in the next
        forfeits(env, 0)
        nothing(env)


@pytest.mark.usefixtures("patient")
def test_weights_that_have_changed_count_from_the_next_match_on(server: str, made: list[Any]) -> None:
    config = {"opponent": "hard", "seconds": 20, "start": "lane", "weights": {"health": [[0, 1.0], [100, 30.0]]}}
    far = make_environments("gamecore", 2, {"server": server, "together": 2, **config})
    near = make_environments("ludus.games.arena.env.gym_env:ArenaVectorEnv", 2, config)
    made += [far, near]
    far.reset(3)
    near.reset(3)
    far.step(np.zeros((2, 4), np.int64))
    for environments in (far, near):
        environments.progress(100)
    forward = np.array([[1, 0, 0, 0]] * 2)  # to where the enemy is, for one of the sides
    rewards: list[list[Any]] = [[], []]
    for match, steps in enumerate((100, 101)):
        for _ in range(steps):
            expected, got = near.step(forward), far.step(forward)
            rewards[match].append((expected.reward, got.reward))
        assert (expected.terminated | expected.truncated).all()
    first, second = (np.array(of) for of in rewards)
    assert np.abs(first[:, 0]).max() > 2 * np.abs(first[:, 1]).max() > 0
    assert np.array_equal(second[:, 0], second[:, 1])
    assert np.abs(second).max() > 0


def test_an_old_process_gets_no_further_matches(server: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_scheduler, "_MAX_AGE_S", 0.0)
    env = arena(made, server, 2, seconds=1, together=2)
    begun = processes(env, server).keys()
    for _ in range(20):
        nothing(env)
    assert finished(env) >= 4
    assert not begun & processes(env, server).keys()
    assert env.restarts == 0


@pytest.mark.usefixtures("patient")
def test_a_match_that_ends_early_does_not_delay_others_of_its_process(server: str, made: list[Any]) -> None:
    env = arena(made, server, 3, together=3, timeout_s=5.0, options={"on_illegal": "forfeit"})
    ends = np.zeros(3, np.int64)
    for step in range(60):
        actions = np.zeros((3, 4), np.int64)
        if step % 10 == 5:
            actions[step // 10 % 2, 0] = 99  # the first and the second forfeit in turn
        _, _, terminated, _, infos = env.step(actions)
        assert "lost" not in infos
        ends += terminated
    assert ends.tolist() == [3, 3, 0]
    assert env.restarts == 0
    assert len(processes(env, server)) == 1


def test_matches_from_saved_states_have_processes_of_their_own(server: str, made: list[Any]) -> None:
    env = arena(made, server, 3, start_from="any", together=3)
    assert len(processes(env, server)) == 3


def test_the_learning_side_is_drawn_for_every_match(server: str, made: list[Any]) -> None:
    env = counting(made, server, 1, length=1)
    camps = {float(env.step(ones(env))[0][0, 2]) for _ in range(40)}
    assert camps == {0.0, 1.0}


def test_requests_need_the_token_which_the_server_never_writes(
    server: str, made: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    env = counting(made, server)
    env.step(ones(env))
    backend = env._backend
    assert backend is not None
    connection = http.client.HTTPConnection("127.0.0.1", backend.gateway.port, timeout=20)
    connection.request("POST", "/step", b"{}", {"session": "x", "step_kind": "start"})
    assert connection.getresponse().status == 401
    connection.close()
    all_paths = tmp_path_factory.getbasetemp().rglob("*")
    written = [
        path for path in all_paths if path.is_file() and path.stat().st_size < 1 << 20
    ]  # other tests leave huge sparse files
    assert any(path.name == "config.json" for path in written)
    assert not any(backend.token.encode() in path.read_bytes() for path in written)
    commands = [Path(f"/proc/{game.pid}/cmdline").read_bytes() for game in processes(env, server, "running").values()]
    assert any(b"counting.py" in command for command in commands)
    assert not any(backend.token.encode() in command for command in commands)


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_ppo_trains_on_matches_that_run_elsewhere(server: str, tmp_path: Path, workers: int) -> None:
    result = ludus.train(
        "gamecore",
        stop={"timesteps_total": 600},
        local_dir=tmp_path,
        env_config={"server": server, "opponent": "self", "seconds": 8},
        num_workers=workers,
        num_envs_per_worker=4,
        rollout_fragment_length=25,
        train_batch_size=100 * max(1, workers),
        sgd_minibatch_size=50,
        num_sgd_iter=1,
        evaluation_duration=0,
    )
    assert result.metrics["timesteps"] >= 600
    assert result.metrics["episodes"] > 0
    assert np.isfinite(result.metrics["learner/loss"])


# -- what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan", "shape", "mask", "reward", "words", "crash"])
def test_an_invalid_game_loses_only_its_match(server: str, made: list[Any], fault: str) -> None:
    env = counting(made, server, 4, fault=fault, share=0.4)
    ended, lost = 0, 0
    until_s = time.monotonic() + 60
    while (ended < 12 or env.restarts < 3) and time.monotonic() < until_s:
        observation, reward, terminated, truncated, infos = env.step(ones(env))
        assert np.isfinite(observation).all()
        assert np.isfinite(reward).all()
        gone = infos.get("lost", np.zeros(4, np.bool_))
        assert not (gone & (terminated | truncated)).any()
        assert infos["action_mask"].any(axis=1).all()
        lost += int(gone.sum())
        ended += int(terminated.sum())
    assert ended >= 12
    assert lost >= env.restarts >= 3


def test_a_match_with_an_invalid_last_observation_has_no_result(server: str, made: list[Any]) -> None:
    """A truncated match whose last observation is NaN: its result is discarded."""
    env = counting(made, server, 4, fault="last", share=0.5)
    counted = ended = 0
    until_s = time.monotonic() + 60
    while (ended < 6 or env.restarts < 3) and time.monotonic() < until_s:
        observation, _, terminated, truncated, infos = env.step(ones(env))
        assert np.isfinite(observation).all()
        assert not truncated.any()
        over = infos.get("_won", np.zeros(4, np.bool_))
        assert (over == terminated).all()
        counted, ended = counted + int(over.sum()), ended + int(terminated.sum())
    assert counted == ended >= 6
    assert env.restarts >= 3


def test_a_game_that_always_fails_is_an_error_with_the_reason(server: str, made: list[Any]) -> None:
    env = counting(made, server, 4, fault="protocol")
    with pytest.raises(EnvironmentFault, match=r"were lost.*version 2 of the protocol"):
        played(env, 100)


def test_a_different_game_is_not_played(server: str, made: list[Any]) -> None:
    env = counting(made, server, 2, expects={"rules": 7})
    with pytest.raises(EnvironmentFault, match="rules of this game is 1, expected 7"):
        played(env, 100)


def test_a_game_that_hangs_is_given_up(server: str, made: list[Any]) -> None:
    env = counting(made, server, 2, fault="hang", share=0.5, timeout_s=0.5, length=3)
    beats: list[int] = []
    env.beat = lambda: beats.append(1)
    ended = 0
    until_s = time.monotonic() + 60
    while (ended < 3 or env.restarts < 1) and time.monotonic() < until_s:
        ended += int(env.step(ones(env))[2].sum())
    assert ended >= 3
    assert env.restarts >= 1
    assert beats


def test_a_game_that_ticks_its_camps_sequentially_is_reported(server: str, made: list[Any]) -> None:
    env = counting(made, server, 4, fault="turns", opponent="self", timeout_s=0.1)
    with pytest.raises(EnvironmentFault, match="at the same time"):
        env.step(ones(env))


def test_a_game_that_is_killed_costs_its_own_rows(server: str, made: list[Any]) -> None:
    env = counting(made, server, 4, length=10_000)
    for _ in range(3):
        env.step(ones(env))
    backend = env._backend
    assert backend is not None
    victim = next(slot.current.id for slot in backend.matches.slots if slot.current is not None and slot.rows == (2,))
    with GamecoreClient(server) as client:
        pid = client.state(victim).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    lost, infos = np.zeros(4, np.int64), {}
    until_s = time.monotonic() + 60
    while (lost.sum() == 0 or "lost" in infos) and time.monotonic() < until_s:
        infos = env.step(ones(env))[4]
        lost += infos.get("lost", 0)
    assert lost[2] > 0
    assert lost.sum() == lost[2]
    assert "lost" not in infos


def test_training_waits_for_a_killed_server_and_continues(tmp_path: Path, made: list[Any]) -> None:
    with Server(tmp_path, {"counting": COUNTING}) as rig:
        env = counting(made, f"127.0.0.1:{rig.port}", 2, length=10_000)
        for _ in range(5):
            env.step(ones(env))
        games = [game["pid"] for game in rig.games("running")]
        assert rig.process is not None
        rig.process.kill()
        rig.process.wait()
        wait_until(lambda: not any(identity.start_time(pid) for pid in games), what="the end of the games")
        beats: list[float] = []

        def beat() -> None:
            beats.append(time.monotonic())
            if len(beats) == 12:  # some seconds later
                rig.start()

        env.beat = beat
        infos = env.step(ones(env))[4]
        assert infos["lost"].all()
        assert len(beats) >= 12
        wait_until(lambda: "lost" not in env.step(ones(env))[4], what="a match for all rows")
        assert env.restarts == 2
        env.close()


def test_a_server_that_stays_away_is_an_error(made: list[Any]) -> None:
    env = counting(made, "127.0.0.1:9", away_s=0.5)
    with pytest.raises(EnvironmentFault, match=r"unreachable for 0.5 s: No gamecore server listens on 127.0.0.1:9"):
        env.step(ones(env))


def test_what_the_server_does_not_start_is_an_error_at_once(server: str, made: list[Any]) -> None:
    env = GamecoreVectorEnv(1, server=server, opponent="easy", options={"paze": 3})
    made.append(env)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="paze"):
        env.step(np.zeros((1, 4), np.int64))
    other = counting(made, server, game="draughts")
    with pytest.raises(EnvironmentFault, match="draughts"):
        other.step(ones(other))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mode": "3v4"}, "no mode"),
        ({"opponent": "mediun"}, "medium"),
        ({"linup": "random"}, "lineup"),
        ({"lineup": [[107], [999]], "mode": "3v3"}, "3v3"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"together": -1}, "together"),
        ({"together": True}, "together"),
        ({"game": "other"}, "observation_space"),
        ({**DECLARED, "paze": 1}, "paze"),
        ({**DECLARED, "side": 2}, "side"),
        ({**DECLARED, "seats": "x"}, "seats"),
    ],
)
def test_an_invalid_config_is_reported_before_anything_starts(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GamecoreVectorEnv(2, **config)


def test_rows_come_in_whole_groups(server: str, made: list[Any]) -> None:
    env = GamecoreVectorEnv(4, server=server, mode="3v3")
    made.append(env)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="a multiple of 3"):
        env.step(np.zeros((4, 4), np.int64))
