"""The Ray of a job: what a node of it is told to be, that a training joins it, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ludus.launch import ray_role
from ludus.launch.ray_role import GRAIN, Options, block, block_size, cpus_of, environment_of, gpus_of, ports_of, store_of
from ludus.process.host import usable_cores
from ludus.process.job_env import PORTS, JobEnv, candidate_ports, find_free_ports
from ludus.ray_cluster import dashboard_stub
from ludus.ray_cluster.node_process import Orders
from tests.waiting import wait_until

BUSY_S = 120.0
STORE = 80 << 20


# -- what follows from what it is told


@pytest.mark.parametrize(
    ("given", "environ", "meant"),
    [(None, {}, usable_cores()), (None, {"SLURM_CPUS_ON_NODE": "36"}, 36), (3, {"SLURM_CPUS_ON_NODE": "36"}, 3), (0, {}, 0)],
)
def test_cores_are_as_asked_for_or_as_the_queue_gave_them(given: int | None, environ: dict[str, str], meant: int) -> None:
    assert cpus_of(Options(cpus=given), environ) == meant


@pytest.mark.parametrize(
    ("given", "environ", "meant"),
    [
        (None, {}, None),
        (None, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
        (None, {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (None, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        (1, {"SLURM_GPUS_ON_NODE": "4"}, 1),
    ],
)
def test_accelerators_too_and_without_a_word_ray_looks_itself(
    given: int | None, environ: dict[str, str], meant: int | None
) -> None:
    assert gpus_of(Options(gpus=given), environ) == meant


def test_the_object_store_leaves_room_in_shared_memory_and_is_never_smaller_than_ray_allows() -> None:
    assert store_of(512 << 20, 8 << 30) == 512 << 20
    assert store_of(512 << 20, 400 << 20) == 200 << 20
    assert store_of(512 << 20, 64 << 20) == 80 << 20


@pytest.mark.parametrize("cpus", [0, 1, 7, 64, 256])
def test_ports_are_pinned_within_the_block_and_grow_with_the_cores(cpus: int) -> None:
    size = block_size(cpus)
    ports = ports_of(20_000, size)
    single = [port for name, port in ports.items() if "worker" not in name]
    workers = range(ports["min_worker_port"], ports["max_worker_port"] + 1)
    assert size % GRAIN == 0
    assert len(set(single)) == len(single)
    assert not set(single) & set(workers)
    assert {*single, *workers} <= set(range(20_000, 20_000 + size))
    assert len(workers) >= cpus + 20, "an agent, trials, and whoever drives them"


def test_what_runs_in_ray_is_not_taken_for_the_main_role_nor_led_astray(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin", "LD_PRELOAD": "x.so", "RAY_ADDRESS": "other:1", "RAY_AUTH_TOKEN": "other", "ip_head": "other:2",
        "LUDUS_JOB_RUN": "run.json", "LUDUS_JOB_RAY": "3", "LUDUS_JOB_ID": "j",
    }  # fmt: skip
    made = environment_of(environ, Options(gamecore="10.0.0.5:23432", log_dir=tmp_path / "logs"), tmp_path)
    assert {name: made[name] for name in ("PATH", "LUDUS_JOB_ID", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")} == {
        "PATH": "/bin", "LUDUS_JOB_ID": "j", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }  # fmt: skip
    assert (made["GAMECORE_SERVER_ADDR"], made["LUDUS_NODE_LOG_DIR"]) == ("10.0.0.5:23432", str(tmp_path / "logs"))
    assert not {"LD_PRELOAD", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "ip_head", "LUDUS_JOB_RUN", "LUDUS_JOB_RAY"} & made.keys()


def test_blocks_have_one_owner_and_are_passed_over_where_somebody_listens() -> None:
    job = secrets.token_hex(4)
    with block(job, 0, GRAIN, ()) as first, block(job, 0, GRAIN, ()) as second:
        assert first != second, "nobody listens there yet, and it is taken all the same"
    with block(job, 0, GRAIN, ()) as again:
        assert again == first, "it follows from the name of the job"
    with block(job, 0, GRAIN, range(first + 10, first + 13)) as other:
        assert other != first, "those are the job's own"
    with socket.create_server(("127.0.0.1", first + 7)), block(job, 0, GRAIN, ()) as other:
        assert other != first
    with block(job, 0, 2 * GRAIN, ()) as large, block(job, 1, GRAIN, range(large)) as small:
        assert not large <= small < large + 2 * GRAIN


def test_words_are_options_and_auto_leaves_it_to_the_surroundings() -> None:
    words = [
        "--cpus",
        "auto",
        "--gpus",
        "2",
        "--gamecore",
        "h:1",
        "--share-weights",
        "--log-dir",
        "logs",
        "--stay",
        "--store-bytes",
        "100",
        "--memory",
        "7",
    ]
    assert ray_role.options_of(words) == Options(None, 2, 7, 100, "h:1", True, Path("logs"), True)


def test_orders_arrive_as_they_were_given() -> None:
    orders = Orders(True, "a:1", "a", "node-0", "/tmp/x", 1, None, 2, ports={"node_manager_port": 3}, labels={"x": "1"})
    assert Orders.read(orders.line()) == orders


def test_of_a_log_what_went_wrong_is_told() -> None:
    lines = [
        "[2026-11-16 16:30:57,525 I 25070 25070] (raylet) main.cc:283: Setting cluster ID",
        "[2026-11-16 16:30:58,525 E 25070 25070] (raylet) node.cc:1: lost",
        "[state-dump] Node ID",
        "[2026-11-16 16:30:59,525 C 25070 25070] (raylet) node.cc:2:  Check failed: alive marked dead",
    ]
    assert ray_role.meaningful(lines) == [lines[1], lines[3]]


def test_what_stands_for_the_agent_of_a_dashboard_says_that_there_is_none_and_stays_as_long_as_its_parent(tmp_path: Path) -> None:
    words = [str(tmp_path / "agent.py"), "--node-id=abc", f"--session-dir={tmp_path}", "--minimal"]
    starter = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', *sys.argv[1:]])\nprint(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter, dashboard_stub.__file__, *words], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        idle = psutil.Process(int(parent.stdout.readline()))
        ports = [tmp_path / f"{name}_abc" for name in dashboard_stub.PORTS]
        deadline = time.monotonic() + BUSY_S
        while not all(path.exists() for path in ports):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [path.read_text() for path in ports] == ["-1"] * 3
        assert idle.is_running()
        parent.kill()
    assert psutil.wait_procs([idle], timeout=20)[1] == []


def test_outside_of_a_job_it_says_so(tmp_path: Path) -> None:
    done = run({})
    assert (done.returncode, "belongs to no job" in done.stdout) == (2, True)
    done = run(JobEnv(port=20_000, token_file=tmp_path / "token", ray=1).environment())
    assert (done.returncode, "token" in done.stdout) == (2, True), done.stdout


def run(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ludus.launch.ray_role"],
        env={**clean(), **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=BUSY_S,
    )


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LUDUS_JOB", "ip_head", "SLURM_"))}


# -- with a real Ray


class Rig:
    """The machines of a job, which are addresses of this one."""

    def __init__(self, base: Path, nodes: int, wait_s: float = BUSY_S) -> None:
        self.base, self.id = base, f"test-{secrets.token_hex(4)}"
        self.token = base / "job-token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        addresses = tuple(f"127.0.0.{2 + node}" for node in range(nodes))
        port = find_free_ports(self.id, PORTS, "port")
        self.around = JobEnv(addresses, 0, port, self.token, nodes, wait_s)
        self.popens: dict[int, subprocess.Popen[str]] = {}
        self.homes: set[Path] = set()
        (base / "tmp").mkdir()

    def environment(self, node: int, **other: str) -> dict[str, str]:
        around = self.around.environment() | {"LUDUS_JOB_NODE": str(node), "LUDUS_JOB_ID": self.id}
        return {**clean(), **around, "HOME": str(self.base), "PYTHONUNBUFFERED": "1", **other}

    def start(self, node: int, *words: str, **other: str) -> subprocess.Popen[str]:
        with open(self.base / f"ray-{node}.log", "a") as log:
            popen = self.popens[node] = subprocess.Popen(
                [sys.executable, "-P", "-m", "ludus.launch.ray_role", "--cpus", "1", f"--store-bytes={STORE}", *words],
                env=self.environment(node, **other),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return popen

    def said(self, node: int) -> str:
        with contextlib.suppress(OSError):
            return (self.base / f"ray-{node}.log").read_text()
        return ""

    def up(self, node: int) -> bool:
        if self.said(node).count("Ray is up") < 1:
            return False
        self.family()
        return True

    def family(self) -> list[psutil.Process]:
        """All processes that have to do with this Ray; those of the nodes' roles are not among them."""
        roles = {popen.pid for popen in self.popens.values()}
        found = []
        for process in psutil.process_iter(["pid"]):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                home = Path(environ.get("RAY_AUTH_TOKEN_PATH", "/")).parent
                if environ.get("LUDUS_JOB_ID") == self.id and process.pid not in roles and home.name.startswith("ludus-ray-"):
                    self.homes.add(home)
                    found.append(process)
        return found

    def until(self, what: Callable[[], object], within_s: float = BUSY_S) -> None:
        wait_until(what, within_s, what=lambda: "\n".join(self.said(node) for node in self.popens), poll_s=0.05)

    def left(self) -> list[str]:
        """Files of these Rays."""
        return [str(home) for home in self.homes if home.exists()]

    def close(self) -> None:
        for popen in self.popens.values():
            popen.terminate()
        for popen in self.popens.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(20)
            popen.kill()
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def rig(base: Path, nodes: int, wait_s: float = BUSY_S) -> Iterator[Rig]:
    made = Rig(base, nodes, wait_s)
    try:
        yield made
    finally:
        made.close()


def train(rig: Rig, *options: str) -> subprocess.Popen[str]:
    words = ("--num-workers", "3", "--num-envs", "2", "--seed", "1", "--project", str(rig.base), "--trial", "run")
    small = ("train_batch_size=192", "rollout_fragment_length=32", "num_epochs=1", "evaluation_interval=0")
    settings = [word for setting in small for word in ("--set", f"config.{setting}")]
    with open(rig.base / "train.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ludus.cli.main", "train", "CartPole-v1", *words, *settings, *options],
            env=rig.environment(0),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.system
@pytest.mark.long
def test_a_training_joins_the_ray_of_its_job_which_is_pinned_and_private_and_leaves_nothing(tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with rig(tmp_path, 3) as job:
        taken = candidate_ports(job.id, block_size(1), "ray-1")[0]
        with socket.create_server(("127.0.0.1", taken)):
            training = train(job, "--stop", "timesteps_total=1500", "--redis-password", "hunter2")  # it has to wait
            logs = tmp_path / "logs" / "actor"
            for node in (2, 1, 0):  # whoever comes first waits for the head
                job.start(node, *(("--log-dir", str(logs)) if node == 2 else ()), **({"LD_PRELOAD": ""} if node else {}))
            job.until(lambda: all(job.up(node) for node in range(3)) or training.poll() is not None)
            said = (tmp_path / "train.log").read_text
            assert training.wait(BUSY_S) == 0, said() + "".join(job.said(node) for node in range(3))
        assert re.search(r"Ray: 3 nodes, 3 cores\n", said())
        assert json.loads((tmp_path / "run" / "meta.json").read_text())["status"] != "failed"
        assert len(list(logs.glob("actor_[0-2].log"))) == 1, "one worker of three was there"
        assert f"ports {taken}-" not in job.said(1)
        assert "waiting for the head" in job.said(1) + job.said(2)

        family = job.family()
        assert len(family) >= 6
        assert all(home.stat().st_mode & 0o777 == 0o700 for home in job.homes)
        secret = job.token.read_text()
        shown = [word for process in family for word in process.cmdline()] + [job.said(node) for node in range(3)] + [said()]
        assert not any(secret in word or "hunter2" in word for word in shown)

        began = time.monotonic()
        job.popens[1].kill()
        for node in (0, 2):
            job.popens[node].terminate()
        assert [job.popens[node].wait(20) for node in (0, 2)] == [0, 0]
        assert time.monotonic() - began < 15, "Ray itself would take half a minute"
        job.until(lambda: not job.family() and not job.left(), 30)
        assert len(job.homes) == 3
    job.until(lambda: not {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("plasma")}, 10)


@pytest.mark.long
@pytest.mark.system
def test_nobody_is_let_in_with_another_token_and_a_head_that_never_comes_is_told(tmp_path: Path) -> None:
    with rig(tmp_path, 2, wait_s=1.0) as job:
        assert job.start(1).wait(BUSY_S) == 1
        assert f"The head of this job's Ray at {job.around.head} was not there within 1 s" in job.said(1)
        job.start(0)
        job.until(lambda: job.up(0))
        other = tmp_path / "other-token"
        other.write_text(secrets.token_hex(32))
        other.chmod(0o600)
        assert job.start(1, LUDUS_JOB_TOKEN_FILE=str(other)).wait(BUSY_S) == 1
        assert "does not accept the token" in job.said(1)


def workers_on(job: Rig) -> dict[str, int]:
    """Node → how many of its workers are ready."""
    try:
        sampling = json.loads((job.base / "run" / "status.json").read_text()).get("sampling", {})
    except (OSError, ValueError):
        return {}
    count = {node["name"]: 0 for node in sampling.get("nodes", [])}
    for worker in sampling.get("workers", []):
        count[worker["node"]] = count.get(worker["node"], 0) + (worker["state"] == "ready")
    return count


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(400)
def test_a_node_whose_ray_dies_ends_comes_back_and_is_used_again(tmp_path: Path) -> None:
    with rig(tmp_path, 2) as job:
        training = train(job, "--stop", "time_s=300")
        for node in (0, 1):
            job.start(node)
        try:
            job.until(lambda: len(workers_on(job)) == 2 and sum(workers_on(job).values()) == 3)
            first = job.popens[1]
            raylet = next(p for p in psutil.Process(first.pid).children(recursive=True) if p.name() == "raylet")
            raylet.kill()
            assert first.wait(20) == 1
            assert "raylet ended with signal 9" in job.said(1)
            job.until(lambda: len(workers_on(job)) == 1 and sum(workers_on(job).values()) == 3)
            job.start(1)  # as whoever looks after it does
            job.until(lambda: len(workers_on(job)) == 2 and sum(workers_on(job).values()) == 3)
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == 130
        finally:
            training.kill()
            training.wait(20)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(300)
def test_killed_in_the_middle_of_a_training_it_leaves_nothing_and_the_training_goes_on_in_the_next_ray(tmp_path: Path) -> None:
    with rig(tmp_path, 2) as job:
        training = train(job, "--stop", "time_s=300")
        for node in (0, 1):
            job.start(node)
        try:
            job.until(lambda: len(workers_on(job)) == 2 and sum(workers_on(job).values()) == 3)
            family = {process.pid for process in job.family()}
            assert scratch_of(family), "rings of workers"
            for node in (1, 0):
                job.popens[node].kill()
                job.popens[node].wait(20)
            job.until(lambda: not job.family() and not job.left() and not scratch_of(family), 40)

            for node in (0, 1):  # as whoever looks after them does
                job.start(node)
            job.until(lambda: (tmp_path / "train.log").read_text().count("Ray: 2 nodes, 2 cores") == 2)
            job.until(lambda: len(workers_on(job)) == 2 and sum(workers_on(job).values()) == 3)
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == 130
        finally:
            training.kill()
            training.wait(20)


def scratch_of(pids: set[int]) -> list[str]:
    """What these processes have in shared memory."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("ludus-") and set(name.split("-")) & set(map(str, pids))]


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(400)
def test_an_actor_on_the_learners_machine_can_use_the_learners_copy_of_the_weights(tmp_path: Path) -> None:
    with rig(tmp_path, 2) as job:
        job.around = replace(job.around, nodes=(job.around.nodes[0],) * 2)  # one machine, two nodes of Ray
        job.start(0, "--cpus", "0")
        job.start(1, "--cpus", "2", "--share-weights")
        training = train(job, "--stop", "timesteps_total=1500")
        assert training.wait(2 * BUSY_S) == 0, (tmp_path / "train.log").read_text() + job.said(0) + job.said(1)
        said = (tmp_path / "train.log").read_text()
        assert f"workers on {socket.gethostname()} (2)\n" in said
        assert "starting agents" not in said
