"""The driver: a learner that dies is replaced and goes on; what a restart cannot cure ends the run with its own error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from ludus import errors
from ludus.core.metrics import Numbers, read_jsonl
from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import (
    ConfigError,
    Damaged,
    EnvironmentFault,
    Fenced,
    LudusError,
    MemoryClosed,
    Refused,
    StoreFull,
    TrainingDiverged,
    UnknownName,
    UsageError,
    WorkerFailed,
)
from ludus.experiments import runner
from ludus.experiments.control.learner_process import pack_error, unpack_error
from ludus.experiments.control.restart_policy import GiveUp, LearnerFailure, RestartAfter, RestartPolicy
from ludus.experiments.resolve import resolve
from ludus.experiments.runs import checkpoint, run_status
from ludus.experiments.runs.run_dir import Run
from ludus.storage.local import LocalStore
from tests.cli.programs import Program, program
from tests.experiments import called, small
from tests.experiments.small import same
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="worker processes need fork()")

DIED = LearnerFailure("killed by SIGKILL")
DYING = "tests.experiments.dying:make_dying"


# -- deciding -----------------------------------------------------------------------------------------------------------


def test_a_death_is_followed_by_a_restart_and_every_further_one_waits_longer() -> None:
    policy = RestartPolicy(limit=5)
    delays = [decision.delay_s for _ in range(4) if isinstance(decision := policy.decide(DIED, None, True), RestartAfter)]
    assert delays == [0.5, 1.0, 2.0, 4.0]


def test_deaths_without_a_new_checkpoint_are_counted_and_a_new_one_forgives_them() -> None:
    policy = RestartPolicy(limit=2)
    for newest in (None, None, "000001", "000001", "000002", "000002"):
        assert isinstance(policy.decide(DIED, newest, True), RestartAfter)
    end = policy.decide(DIED, "000002", True)
    assert isinstance(end, GiveUp)
    assert isinstance(end.error, WorkerFailed)
    assert "died 3 times without a new checkpoint" in str(end.error)
    assert "SIGKILL" in str(end.error)


def test_without_any_patience_the_first_death_ends_the_run() -> None:
    end = RestartPolicy(limit=0).decide(DIED, "000001", True)
    assert isinstance(end, GiveUp)
    assert str(end.error) == "The learner died: killed by SIGKILL."


@pytest.mark.parametrize(
    "error", [UsageError, ConfigError, UnknownName, EnvironmentFault, TrainingDiverged, StoreFull, Fenced, Damaged]
)
def test_what_a_restart_cannot_cure_ends_the_run_with_the_same_error(error: type[LudusError]) -> None:
    raised = error("It is wrong.", "Make it right.")
    end = RestartPolicy(limit=5).decide(LearnerFailure(str(raised), raised), None, False)
    assert isinstance(end, GiveUp)
    assert end.error is raised


@pytest.mark.parametrize("error", [WorkerFailed, MemoryClosed])
def test_what_comes_from_outside_the_learner_is_tried_again_up_to_the_limit(error: type[LudusError]) -> None:
    raised, policy = error("A worker is gone."), RestartPolicy(limit=1)
    assert isinstance(policy.decide(LearnerFailure(str(raised), raised), None, True), RestartAfter)
    end = policy.decide(LearnerFailure(str(raised), raised), None, True)
    assert isinstance(end, GiveUp)
    assert end.error is raised


def test_the_caller_can_choose_the_errors_after_which_a_restart_may_help() -> None:
    policy = RestartPolicy(limit=1, curable=(EnvironmentFault,))
    fault, config = EnvironmentFault("It raised."), ConfigError("It is wrong.")
    assert isinstance(policy.decide(LearnerFailure(str(fault), fault), None, True), RestartAfter)
    assert isinstance(policy.decide(LearnerFailure(str(fault), fault), None, True), GiveUp)
    assert isinstance(RestartPolicy(limit=1, curable=(EnvironmentFault,)).decide(LearnerFailure("", config), None, True), GiveUp)


def test_a_final_error_is_not_retried() -> None:
    raised = WorkerFailed("The head of the cluster is gone.")
    raised.final = True
    crossed = unpack_error(json.loads(json.dumps(pack_error(raised))))
    assert isinstance(RestartPolicy(limit=5).decide(LearnerFailure(str(crossed), crossed), None, True), GiveUp)


def test_a_foreign_exception_is_tried_once_more_and_not_a_third_time() -> None:
    policy, failure = RestartPolicy(limit=5), LearnerFailure("ValueError: a mistake in somebody's code", foreign=True)
    assert isinstance(policy.decide(failure, None, True), RestartAfter)
    assert isinstance(policy.decide(LearnerFailure("KeyError: another one", foreign=True), None, True), RestartAfter)
    assert isinstance(policy.decide(failure, None, True), RestartAfter)
    end = policy.decide(failure, None, True)
    assert isinstance(end, GiveUp)
    assert "a mistake in somebody's code" in str(end.error)


def test_a_port_that_is_still_taken_is_waited_for_once_a_learner_had_it() -> None:
    taken = UsageError("Cannot listen on 127.0.0.1:8000.")
    assert isinstance(RestartPolicy(limit=5).decide(LearnerFailure(str(taken), taken), None, True), RestartAfter)


class Own(EnvironmentFault):
    """Of a user: the supervisor's process need not know it."""


def test_an_error_crosses_to_the_driver_with_its_class_its_message_and_its_hint() -> None:
    names = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, LudusError)]
    for name in names:
        cls = getattr(errors, name)
        if cls is not Refused:
            back = unpack_error(json.loads(json.dumps(pack_error(cls("It is so.", "Do this.")))))
            assert (type(back), back.message, back.hint) == (cls, "It is so.", "Do this.")
    assert type(unpack_error(pack_error(Own("mine")))) is EnvironmentFault
    assert "busy" in str(unpack_error(pack_error(Refused(503, "busy", "The server is busy."))))


@pytest.mark.parametrize(
    ("data", "driven"),
    [
        (small.data(), False),
        (small.data(num_workers=2), True),
        (small.data(num_learners=2), True),
        (called.data(num_workers=1), False),  # on any free port: games would not find the next learner
        (called.data(outside=called.ONE_SEAT | {"port": 8000}, num_workers=1), True),
        (called.data(outside=called.ONE_SEAT | {"port": 8000}), False),
    ],
)
def test_a_run_that_has_other_processes_has_a_driver(data: dict[str, Any], driven: bool) -> None:
    assert runner.needs_supervisor(resolve(data)) is driven


# -- the same as in this process ----------------------------------------------------------------------------------------


class Kept:
    """A sink of the caller's."""

    def __init__(self) -> None:
        self.numbers: list[Numbers] = []
        self.closed = 0

    def write(self, numbers: Numbers) -> None:
        self.numbers.append(numbers)

    def close(self) -> None:
        self.closed += 1


def test_a_run_in_a_learner_process_is_the_same_run_and_its_result_comes_back(tmp_path: Path) -> None:
    there, here = Kept(), Kept()
    data = small.data(3, seed=4)
    one = runner.train(data, project=tmp_path, trial="there", sinks=[there], supervised=True)
    two = runner.train(data, project=tmp_path, trial="here", sinks=[here], supervised=False)
    assert (one.stopped_by, one.env, one.run_dir) == (two.stopped_by, two.env, tmp_path / "there")
    assert one.checkpoint == tmp_path / "there" / "checkpoints" / "000003"
    assert one.agent.version == two.agent.version
    assert same(one.agent.policy.weights(), two.agent.policy.weights())
    assert one.metrics["timesteps"] == two.metrics["timesteps"]
    assert [n["iterations"] for n in there.numbers] == [n["iterations"] for n in here.numbers]
    assert there.closed == 1
    assert Run.open(tmp_path / "there").meta()["status"] == "finished"
    seen = run_status.read_status(tmp_path / "there")
    assert (seen.state, seen.status["stopped_by"]) == ("finished", "iterations")


def test_an_error_of_the_set_up_is_raised_here_and_leaves_no_directory(tmp_path: Path) -> None:
    data = small.data(env="tests.environments:make_faulty", env_config={"fault": "raises in reset"})
    with pytest.raises(EnvironmentFault, match="no game server"):
        runner.train(data, project=tmp_path / "new", trial="run", supervised=True)
    assert not (tmp_path / "new").exists()


# -- deaths -------------------------------------------------------------------------------------------------------------


def test_a_dead_learner_is_restarted_from_its_checkpoint_until_the_limit(tmp_path: Path) -> None:
    """First the file is there and a learner removes it as it dies; later it stays."""
    run, marker, said = tmp_path / "run", tmp_path / "deadly", list[str]()
    marker.touch()
    settings: dict[str, Any] = {"env": DYING, "evaluation_duration": 0}
    top = {"checkpoint_freq": 1, "max_failures": 1}
    data = small.data(6, top=top, env_config={"at": 100, "while_exists": str(marker), "removes": True}, **settings)
    result = runner.train(data, project=tmp_path, trial="run", announce=said.append, supervised=True)
    assert result.metrics["iterations"] == 6
    assert [sentence for sentence in said if "died" in sentence] == [
        "the learner died (killed by SIGKILL); restart 1 in 0.5 s, from checkpoint 000003"
    ]
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[3]["learner/version"] > rows[2]["learner/version"] + 900, "numbers that were reserved are not used again"
    meta = Run.open(run).meta()
    assert (meta["status"], meta["learner_restarts"]) == ("finished", 1)
    assert meta["learner_failures"][0]["checkpoint"] == "000003"

    changed = Run.open(run).config()
    changed["config"]["env_config"] = {"at": 5}
    Run.open(run).write_config({changed.pop("name"): changed})
    with pytest.raises(WorkerFailed, match=r"died 2 times without a new checkpoint .*SIGKILL.*--resume"):
        runner.resume(run, stop={"iterations": 10}, supervised=True)
    meta = Run.open(run).meta()
    assert (meta["status"], meta["learner_restarts"]) == ("failed", 2)
    assert run_status.read_status(run).state == "failed"


class Killing(Kept):
    """Looks into shared memory and kills every learner, at its first numbers."""

    def __init__(self, run: Path, shared: Path) -> None:
        super().__init__()
        self.run, self.shared = run, shared
        self.used: dict[int, list[str]] = {}

    def write(self, numbers: Numbers) -> None:
        super().write(numbers)
        pid = int(json.loads((self.run / "status.json").read_text())["pid"])
        if pid not in self.used:
            self.used[pid] = os.listdir(self.shared)
            os.kill(pid, signal.SIGKILL)


def test_a_killed_learner_leaves_nothing_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is waited for the next one, nor when the run is given up."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("LUDUS_SHM", str(shared))
    killing, left = Killing(tmp_path / "run", shared), list[list[str]]()

    def hear(sentence: str) -> None:
        if "died" in sentence:
            left.append(os.listdir(shared))

    data = small.data(1_000_000, top={"max_failures": 1}, num_workers=1, evaluation_duration=0)
    with pytest.raises(WorkerFailed, match="died 2 times"):
        runner.train(data, project=tmp_path, trial="run", sinks=[killing], announce=hear)
    assert len(killing.used) == 2
    assert all(killing.used.values()), "there was something to leave"
    assert left == [[]]
    assert os.listdir(shared) == []


class Unmounting(Kept):
    """Kills the first learner at some numbers, and takes the run away, as if its file system were not mounted any more."""

    def __init__(self, run: Path, away: Path) -> None:
        super().__init__()
        self.run, self.away, self.done, self.below = run, away, False, list[str]()

    def write(self, numbers: Numbers) -> None:
        super().write(numbers)
        if numbers.get("iterations") == 2 and not self.done:
            self.done = True
            os.kill(int(json.loads((self.run / "status.json").read_text())["pid"]), signal.SIGKILL)
            self.run.rename(self.away)

    def hear(self, sentence: str) -> None:
        if "does not hold the run any more" in sentence and not self.below:
            self.below = [path.name for path in self.run.rglob("*")] + ["."]
            shutil.rmtree(self.run, ignore_errors=True)
            self.away.rename(self.run)


def test_a_run_whose_file_system_is_not_mounted_is_not_started_again(tmp_path: Path) -> None:
    run, data = tmp_path / "run", small.data(5, top={"checkpoint_freq": 1}, evaluation_duration=0)
    mount = Unmounting(run, tmp_path / "away")
    result = runner.train(data, project=tmp_path, trial="run", sinks=[mount], announce=mount.hear, supervised=True)
    assert mount.below, "the next learner has said so"
    assert not {"config.yaml", "meta.json", "checkpoints", "models"} & set(mount.below)
    assert result.metrics["iterations"] == 5
    assert [row["iterations"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert Run.open(run).meta()["status"] == "finished"


def test_a_learner_that_died_after_its_last_checkpoint_had_finished(tmp_path: Path) -> None:
    first = small.train(tmp_path / "run", 3)
    Run.open(tmp_path / "run").write_meta({"status": "running"})
    result = runner.resume_in_process(tmp_path / "run", None, None, [], None, None, again=True)
    assert result.to_json() | {"time_s": 0, "fps": 0} == first.to_json() | {"time_s": 0, "fps": 0}
    assert same(result.agent.policy.weights(), first.agent.policy.weights())
    assert Run.open(tmp_path / "run").meta()["status"] == "finished"


def test_a_new_run_from_a_checkpoint_that_died_before_its_own_first_one_begins_with_it_again(tmp_path: Path) -> None:
    old = small.train(tmp_path / "old", 4)
    Run.create(tmp_path / "run", resolve(small.data(1)).to_dict())
    result = runner.resume_in_process(tmp_path / "run", None, str(tmp_path / "old"), [], None, None, again=True)
    assert result.metrics["iterations"] == 1, "it counts from 0"
    assert result.agent.version > old.agent.version


# -- the command --------------------------------------------------------------------------------------------------------

SMALL = ["--num-envs", "8", "--set", "train_batch_size=512", "--set", "evaluation_duration=0", "--checkpoint-freq", "1"]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Program]:
    """CartPole with two sampling workers, in `tmp_path/run`."""
    words: list[str | Path] = ["train", "CartPole-v1", "--project", tmp_path, "--trial", "run", "--num-workers", "2", *SMALL]
    with program(*words, "--keep-checkpoints-num", "3", "--stop", "timesteps=1000000000", listens=False) as running:
        yield running


def learner(run: Path, process: subprocess.Popen[str], other_than: int = 0) -> dict[str, Any]:
    """The status of a learner that is at work, with both its workers."""

    def found() -> dict[str, Any]:
        assert process.poll() is None, "the training ended by itself"
        try:
            seen: dict[str, Any] = json.loads((run / "status.json").read_text())
        except OSError:
            return {}
        ready = [worker for worker in seen.get("sampling", {}).get("workers", []) if worker["pid"]]
        return seen if seen["state"] == "running" and seen["pid"] != other_than and len(ready) == 2 and seen["progress"] else {}

    found_one: dict[str, Any] = wait_until(found)
    return found_one


def alive(pid: int) -> bool:
    return run_status.is_alive(run_status.identity(pid)) is True


def test_a_killed_learner_is_replaced_and_ctrl_c_ends_the_run_in_order(tmp_path: Path, training: Program) -> None:
    run = tmp_path / "run"
    first = learner(run, training.process)
    seen = run_status.read_status(run)
    assert seen.state == "running"
    assert {worker["node"] for worker in seen.status["sampling"]["workers"]} == {"here"}
    os.kill(first["pid"], signal.SIGKILL)
    training.wait_for("the learner died (killed by SIGKILL); restart 1")
    second = learner(run, training.process, other_than=first["pid"])
    before = [worker["pid"] for worker in first["sampling"]["workers"]]
    wait_until(lambda: not any(alive(pid) for pid in before))
    training.process.send_signal(signal.SIGINT)
    code, out, err = training.finish()
    assert code == 130, out + err
    assert "Interrupted by Ctrl-C" in out
    assert err == ""
    workers = [worker["pid"] for worker in second["sampling"]["workers"]]
    assert not any(alive(pid) for pid in (second["pid"], *workers))
    meta = Run.open(run).meta()
    assert (meta["status"], meta["learner_restarts"]) == ("interrupted", 1)
    newest = checkpoint.newest(LocalStore(run))
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[-1]["iterations"] == newest.state["progress"]["iterations"]
    versions = [row["learner/version"] for row in rows]
    assert versions == sorted(set(versions))


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("LUDUS_SHM", str(shared))
    return shared


def test_nothing_survives_a_killed_driver_and_the_run_can_be_resumed(
    tmp_path: Path, shared_memory: Path, training: Program
) -> None:
    run = tmp_path / "run"
    seen = learner(run, training.process)
    ours = [seen["pid"], *(worker["pid"] for worker in seen["sampling"]["workers"])]
    assert all(alive(pid) for pid in ours)
    wait_until(lambda: checkpoint.newest_name(LocalStore(run)))
    assert os.listdir(shared_memory)
    training.process.kill()
    training.process.wait(30)
    wait_until(lambda: not any(alive(pid) for pid in ours), 10.0)
    wait_until(lambda: os.listdir(shared_memory) == [], 10.0)
    left = run_status.read_status(run)
    assert (left.state, Run.open(run).meta()["status"]) == ("dead", "running")
    reached = checkpoint.newest(LocalStore(run)).state["progress"]["iterations"]
    result = runner.resume(run, stop={"iterations": reached + 2})
    assert result.metrics["iterations"] == reached + 2
    assert run_status.read_status(run).state == "finished"


_SCRIPT = """
import sys
from pathlib import Path

from gymnasium.envs.classic_control import CartPoleEnv

from ludus.experiments import runner
from tests.experiments import small


class Mine(CartPoleEnv):
    pass


def make(**settings):
    return Mine()


print(runner.train(small.data(1, env="__main__:make"), local_dir=Path("runs"), supervised=True).stopped_by)
"""


@pytest.mark.long
def test_functions_of_the_script_are_known_to_the_learner(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "mine.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["iterations"], done.stderr


def test_an_environment_that_the_script_registered_goes_along() -> None:
    gym.register("Mine-v7", entry_point="tests.environments:make_count", max_episode_steps=100)
    try:
        code_bundle = CodeBundle.of("Mine-v7", "PPO")
    finally:
        del gym.registry["Mine-v7"]
    code_bundle.unpack()
    try:
        assert gym.registry["Mine-v7"].entry_point == "tests.environments:make_count"
    finally:
        del gym.registry["Mine-v7"]


_STUCK = """
import sys
from pathlib import Path
from ludus.experiments import runner
from tests.experiments import small
data = small.data(1, env="tests.experiments.dying:make_stuck", env_config={"says": sys.argv[1]})
runner.train(data, local_dir=Path("runs"), supervised=True)
"""


@pytest.mark.long
def test_a_second_ctrl_c_does_not_wait_for_a_learner_that_is_stuck(tmp_path: Path) -> None:
    says = tmp_path / "stuck"
    shared = tmp_path / "shared"
    shared.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "LUDUS_SHM": str(shared)}
    words = [sys.executable, "-c", _STUCK, str(says)]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: says.exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            (run,) = (tmp_path / "runs" / "default").iterdir()
            pid = json.loads((run / "status.json").read_text())["pid"]
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
            assert alive(pid), "it was asked, and is waited for"
            assert os.listdir(shared)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in err
    assert not alive(pid)
    assert os.listdir(shared) == []
