"""Ray as a role of a job: resources and ports of a node, trainings that join it, and its clean-up."""

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
from ludus.launch.ray_role import (
    GRAIN,
    RayNodeOptions,
    assign_ports,
    block_size,
    limit_store,
    node_cpus,
    node_environment,
    node_gpus,
    reserve_ports,
)
from ludus.process.host import usable_cores
from ludus.process.job_env import PORTS, JobEnv, candidate_ports, find_free_ports
from ludus.ray_cluster import dashboard_stub
from ludus.ray_cluster.node import NodeSpec
from tests.waiting import wait_until

BUSY_S = 120.0
STORE = 80 << 20


# -- resources, ports and environment


@pytest.mark.parametrize(
    ("given", "environ", "meant"),
    [(None, {}, usable_cores()), (None, {"SLURM_CPUS_ON_NODE": "36"}, 36), (3, {"SLURM_CPUS_ON_NODE": "36"}, 3), (0, {}, 0)],
)
def test_cores_come_from_the_option_or_from_slurm(given: int | None, environ: dict[str, str], meant: int) -> None:
    assert node_cpus(RayNodeOptions(cpus=given), environ) == meant


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
def test_gpus_come_from_the_option_slurm_or_cuda_else_ray_detects_them(
    given: int | None, environ: dict[str, str], meant: int | None
) -> None:
    assert node_gpus(RayNodeOptions(gpus=given), environ) == meant


def test_the_object_store_takes_at_most_half_of_the_free_shared_memory() -> None:
    assert limit_store(512 << 20, 8 << 30) == 512 << 20
    assert limit_store(512 << 20, 400 << 20) == 200 << 20
    assert limit_store(512 << 20, 64 << 20) == 80 << 20


@pytest.mark.parametrize("cpus", [0, 1, 7, 64, 256])
def test_ports_are_pinned_within_the_block_and_grow_with_the_cores(cpus: int) -> None:
    size = block_size(cpus)
    ports = assign_ports(20_000, size)
    single = [port for name, port in ports.items() if "worker" not in name]
    workers = range(ports["min_worker_port"], ports["max_worker_port"] + 1)
    assert size % GRAIN == 0
    assert len(set(single)) == len(single)
    assert not set(single) & set(workers)
    assert {*single, *workers} <= set(range(20_000, 20_000 + size))
    assert len(workers) >= cpus + 20, "an agent, trials and drivers"


def test_variables_of_the_main_role_are_removed_from_rays_environment(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin", "LD_PRELOAD": "x.so", "RAY_ADDRESS": "other:1", "RAY_AUTH_TOKEN": "other", "ip_head": "other:2",
        "LUDUS_JOB_RUN": "run.json", "LUDUS_JOB_RAY": "3", "LUDUS_JOB_ID": "j",
    }  # fmt: skip
    made = node_environment(environ, RayNodeOptions(gamecore="10.0.0.5:23432", log_dir=tmp_path / "logs"), tmp_path)
    assert {name: made[name] for name in ("PATH", "LUDUS_JOB_ID", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")} == {
        "PATH": "/bin", "LUDUS_JOB_ID": "j", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }  # fmt: skip
    assert (made["GAMECORE_SERVER_ADDR"], made["LUDUS_NODE_LOG_DIR"]) == ("10.0.0.5:23432", str(tmp_path / "logs"))
    assert not {"LD_PRELOAD", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "ip_head", "LUDUS_JOB_RUN", "LUDUS_JOB_RAY"} & made.keys()


def test_a_port_block_has_one_owner_and_no_listeners() -> None:
    job = secrets.token_hex(4)
    with reserve_ports(job, 0, GRAIN, ()) as first, reserve_ports(job, 0, GRAIN, ()) as second:
        assert first != second, "reserved, although no process listens there yet"
    with reserve_ports(job, 0, GRAIN, ()) as again:
        assert again == first, "it follows from the name of the job"
    with reserve_ports(job, 0, GRAIN, range(first + 10, first + 13)) as other:
        assert other != first, "those are the job's own"
    with socket.create_server(("127.0.0.1", first + 7)), reserve_ports(job, 0, GRAIN, ()) as other:
        assert other != first


def test_port_blocks_of_different_sizes_do_not_overlap() -> None:
    def begin_alike(job: str) -> bool:
        large, small = candidate_ports(job, 2 * GRAIN, "ray-0")[0], candidate_ports(job, GRAIN, "ray-1")[0]
        return large <= small < large + 2 * GRAIN

    job = next(job for job in iter(lambda: secrets.token_hex(4), "") if begin_alike(job))
    with reserve_ports(job, 0, 2 * GRAIN, ()) as large, reserve_ports(job, 1, GRAIN, ()) as small:
        assert not large <= small < large + 2 * GRAIN


def test_arguments_are_parsed_and_auto_means_detected() -> None:
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
    assert ray_role.parse_options(words) == RayNodeOptions(None, 2, 7, 100, "h:1", True, Path("logs"), True)


def test_a_node_spec_survives_a_round_trip() -> None:
    orders = NodeSpec(True, "a:1", "a", "node-0", "/tmp/x", 1, None, 2, ports={"node_manager_port": 3}, labels={"x": "1"})
    assert NodeSpec.from_json(orders.to_json()) == orders


def test_error_lines_of_a_ray_log_are_found() -> None:
    lines = [
        "[2026-11-16 16:30:57,525 I 25070 25070] (raylet) main.cc:283: Setting cluster ID",
        "[2026-11-16 16:30:58,525 E 25070 25070] (raylet) node.cc:1: lost",
        "[state-dump] Node ID",
        "[2026-11-16 16:30:59,525 C 25070 25070] (raylet) node.cc:2:  Check failed: alive marked dead",
    ]
    assert ray_role.error_lines(lines) == [lines[1], lines[3]]


def test_the_dashboard_stub_reports_no_ports_and_ends_with_its_parent(tmp_path: Path) -> None:
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


def test_outside_of_a_job_it_is_a_usage_error(tmp_path: Path) -> None:
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
    """A job whose nodes are loopback addresses of this machine."""

    def __init__(self, base: Path, nodes: int, wait_s: float = BUSY_S) -> None:
        self.base, self.id = base, f"test-{secrets.token_hex(4)}"
        self.token = base / "job-token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        addresses = tuple(f"127.0.0.{2 + node}" for node in range(nodes))
        port = find_free_ports(self.id, PORTS, "port")
        self.env = JobEnv(addresses, 0, port, self.token, nodes, wait_s)
        self.popens: dict[int, subprocess.Popen[str]] = {}
        self.directories: set[Path] = set()
        (base / "tmp").mkdir()

    def environment(self, node: int, **other: str) -> dict[str, str]:
        around = self.env.environment() | {"LUDUS_JOB_NODE": str(node), "LUDUS_JOB_ID": self.id}
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

    def log_of(self, node: int) -> str:
        with contextlib.suppress(OSError):
            return (self.base / f"ray-{node}.log").read_text()
        return ""

    def up(self, node: int) -> bool:
        if self.log_of(node).count("Ray is up") < 1:
            return False
        self.ray_processes()
        return True

    def ray_processes(self) -> list[psutil.Process]:
        """Return all processes of this Ray cluster, without those of the roles."""
        roles = {popen.pid for popen in self.popens.values()}
        found = []
        for process in psutil.process_iter(["pid"]):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                home = Path(environ.get("RAY_AUTH_TOKEN_PATH", "/")).parent
                if environ.get("LUDUS_JOB_ID") == self.id and process.pid not in roles and home.name.startswith("ludus-ray-"):
                    self.directories.add(home)
                    found.append(process)
        return found

    def until(self, what: Callable[[], object], within_s: float = BUSY_S) -> None:
        wait_until(what, within_s, what=lambda: "\n".join(self.log_of(node) for node in self.popens), poll_s=0.05)

    def leftover_files(self) -> list[str]:
        return [str(home) for home in self.directories if home.exists()]

    def close(self) -> None:
        for popen in self.popens.values():
            popen.terminate()
        for popen in self.popens.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(20)
            popen.kill()
        for process in self.ray_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def start_rig(base: Path, nodes: int, wait_s: float = BUSY_S) -> Iterator[Rig]:
    made = Rig(base, nodes, wait_s)
    try:
        yield made
    finally:
        made.close()


def train(start_rig: Rig, *options: str) -> subprocess.Popen[str]:
    words = ("--num-workers", "3", "--num-envs", "2", "--seed", "1", "--project", str(start_rig.base), "--trial", "run")
    small = ("train_batch_size=192", "rollout_fragment_length=32", "num_epochs=1", "evaluation_interval=0")
    settings = [word for setting in small for word in ("--set", f"config.{setting}")]
    with open(start_rig.base / "train.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ludus.cli.main", "train", "CartPole-v1", *words, *settings, *options],
            env=start_rig.environment(0),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.system
@pytest.mark.long
def test_a_training_joins_the_private_ray_of_its_job_which_leaves_nothing(tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with start_rig(tmp_path, 3) as job:
        taken = candidate_ports(job.id, block_size(1), "ray-1")[0]
        with socket.create_server(("127.0.0.1", taken)):
            training = train(job, "--stop", "timesteps_total=1500", "--redis-password", "hunter2")  # it has to wait
            logs = tmp_path / "logs" / "actor"
            for node in (2, 1, 0):  # the others wait for the head
                job.start(node, *(("--log-dir", str(logs)) if node == 2 else ()), **({"LD_PRELOAD": ""} if node else {}))
            job.until(lambda: all(job.up(node) for node in range(3)) or training.poll() is not None)
            said = (tmp_path / "train.log").read_text
            assert training.wait(BUSY_S) == 0, said() + "".join(job.log_of(node) for node in range(3))
        assert re.search(r"Ray: 3 nodes, 3 cores\n", said())
        assert json.loads((tmp_path / "run" / "meta.json").read_text())["status"] != "failed"
        assert len(list(logs.glob("actor_[0-2].log"))) == 1, "one worker of three was there"
        assert f"ports {taken}-" not in job.log_of(1)
        assert "waiting for the head" in job.log_of(1) + job.log_of(2)

        family = job.ray_processes()
        assert len(family) >= 6
        assert all(home.stat().st_mode & 0o777 == 0o700 for home in job.directories)
        secret = job.token.read_text()
        shown = [word for process in family for word in process.cmdline()] + [job.log_of(node) for node in range(3)] + [said()]
        assert not any(secret in word or "hunter2" in word for word in shown)

        began = time.monotonic()
        job.popens[1].kill()
        for node in (0, 2):
            job.popens[node].terminate()
        assert [job.popens[node].wait(20) for node in (0, 2)] == [0, 0]
        assert time.monotonic() - began < 15, "Ray itself would take half a minute"
        job.until(lambda: not job.ray_processes() and not job.leftover_files(), 30)
        assert len(job.directories) == 3
    job.until(lambda: not {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("plasma")}, 10)


@pytest.mark.long
@pytest.mark.system
def test_a_wrong_token_and_a_missing_head_are_errors(tmp_path: Path) -> None:
    with start_rig(tmp_path, 2, wait_s=1.0) as job:
        assert job.start(1).wait(BUSY_S) == 1
        assert f"The head of this job's Ray at {job.env.head} was not reachable within 1 s" in job.log_of(1)
        job.start(0)
        job.until(lambda: job.up(0))
        other = tmp_path / "other-token"
        other.write_text(secrets.token_hex(32))
        other.chmod(0o600)
        assert job.start(1, LUDUS_JOB_TOKEN_FILE=str(other)).wait(BUSY_S) == 1
        assert "does not accept the token" in job.log_of(1)


def ready_workers(job: Rig) -> dict[str, int]:
    """Return the number of ready workers by node."""
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
def test_a_restarted_node_is_used_again(tmp_path: Path) -> None:
    with start_rig(tmp_path, 2) as job:
        training = train(job, "--stop", "time_s=300")
        for node in (0, 1):
            job.start(node)
        try:
            job.until(lambda: len(ready_workers(job)) == 2 and sum(ready_workers(job).values()) == 3)
            first = job.popens[1]
            raylet = next(p for p in psutil.Process(first.pid).children(recursive=True) if p.name() == "raylet")
            raylet.kill()
            assert first.wait(20) == 1
            assert "raylet ended with signal 9" in job.log_of(1)
            job.until(lambda: len(ready_workers(job)) == 1 and sum(ready_workers(job).values()) == 3)
            job.start(1)  # as the supervisor does
            job.until(lambda: len(ready_workers(job)) == 2 and sum(ready_workers(job).values()) == 3)
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == 130
        finally:
            training.kill()
            training.wait(20)


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_training_continues_after_all_nodes_were_killed_and_restarted(tmp_path: Path) -> None:
    with start_rig(tmp_path, 2) as job:
        training = train(job, "--stop", "time_s=300")
        for node in (0, 1):
            job.start(node)
        try:
            job.until(lambda: len(ready_workers(job)) == 2 and sum(ready_workers(job).values()) == 3)
            family = {process.pid for process in job.ray_processes()}
            assert shared_memory_of(family), "rings of workers"
            for node in (1, 0):
                job.popens[node].kill()
                job.popens[node].wait(20)
            job.until(lambda: not job.ray_processes() and not job.leftover_files() and not shared_memory_of(family), 40)

            for node in (0, 1):  # as the supervisor does
                job.start(node)
            job.until(lambda: (tmp_path / "train.log").read_text().count("Ray: 2 nodes, 2 cores") == 2)
            job.until(lambda: len(ready_workers(job)) == 2 and sum(ready_workers(job).values()) == 3)
            training.send_signal(signal.SIGINT)
            assert training.wait(60) == 130
        finally:
            training.kill()
            training.wait(20)


def shared_memory_of(pids: set[int]) -> list[str]:
    """Return the shared memory files of these processes."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("ludus-") and set(name.split("-")) & set(map(str, pids))]


@pytest.mark.long
@pytest.mark.system
@pytest.mark.timeout(400)
def test_an_actor_on_the_learners_machine_can_use_the_learners_copy_of_the_weights(tmp_path: Path) -> None:
    with start_rig(tmp_path, 2) as job:
        job.env = replace(job.env, nodes=(job.env.nodes[0],) * 2)  # one machine, two nodes of Ray
        job.start(0, "--cpus", "0")
        job.start(1, "--cpus", "2", "--share-weights")
        training = train(job, "--stop", "timesteps_total=1500")
        assert training.wait(2 * BUSY_S) == 0, (tmp_path / "train.log").read_text() + job.log_of(0) + job.log_of(1)
        said = (tmp_path / "train.log").read_text()
        assert f"workers on {socket.gethostname()} (2)\n" in said
        assert "starting agents" not in said
