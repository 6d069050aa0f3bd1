"""compose.yaml against the Compose specification, the Dockerfile and the command line; tests/long/test_containers.py starts it."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.cli.clusters.submit import check_command
from ludus.process.children import start_child
from tests.containers.test_dockerfile import load
from tests.redis_server import require_redis
from tests.s3 import free_ports
from tests.system.containers import DOCKERFILE, PROJECT, targets
from tests.tools import need, skip
from tests.waiting import wait_until

DIRECTORY = PROJECT / "docker"
FILE = DIRECTORY / "compose.yaml"
BUILD_SECRETS = DIRECTORY / "compose" / "build_secrets.yaml"
PAGE = PROJECT / "docs" / "containers.md"
_VARIABLE = re.compile(r"\$\{(\w+):?-([^}]*)\}")
TEXT = _VARIABLE.sub(r"\2", FILE.read_text(encoding="utf-8"))
"""With the defaults of its variables."""
STACK: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]


def test_the_file_keeps_to_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="needs Linux: pip install compose-spec")
    assert sorted(compose_spec.PyCompose.from_yaml(yaml.safe_dump(STACK)).service_names()) == sorted(SERVICES)
    with pytest.raises(ValueError, match="cap_dorp"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(STACK).replace("cap_drop", "cap_dorp"))


def test_every_variable_has_a_default_and_a_row_in_the_documentation() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count("${") == len(_VARIABLE.findall(text))
    rows = re.findall(r"^\| ((?:`LUDUS_\w+`(?:, )?)+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {name for name, _ in _VARIABLE.findall(text)} == {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_whole_pipeline_is_there() -> None:
    assert {"learner", "actor", "gamecore", "redis", "s3"} <= SERVICES.keys()


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "entrypoint" not in service])
def test_the_command_of_a_service_is_a_ludus_command(name: str) -> None:
    check_command([str(word) for word in SERVICES[name]["command"]])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == ("0:0" if name == "secrets" else "10001:10001")
    assert "ports" not in service
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_refers_to_exists(name: str) -> None:
    service = SERVICES[name]
    assert service.get("build", {}).get("target", "cpu") in targets()
    assert set(service.get("depends_on", {})) <= SERVICES.keys()
    assert set(service.get("networks", [])) <= STACK["networks"].keys()
    if service.get("entrypoint", [""])[0] == "python":
        assert f"docker/compose/{Path(service['entrypoint'][1]).name}" in DOCKERFILE.read_text(encoding="utf-8")
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (DIRECTORY / source).is_file() if source.startswith(".") else source in STACK["volumes"], volume


@pytest.mark.parametrize("name", SERVICES)
def test_images_of_others_have_a_version(name: str) -> None:
    service = SERVICES[name]
    if "build" not in service:
        assert re.fullmatch(r"docker\.io/[\w/]+:[\d.]+", service["image"])


@pytest.mark.parametrize("name", ["redis", "s3"])
def test_volumes_are_mounted_where_public_images_have_nothing(name: str) -> None:
    """Their /data belongs to a user of the image and has files; Docker copies them into an empty volume."""
    service = SERVICES[name]
    targets = [volume.split(":")[1] for volume in service["volumes"]]
    assert not [target for target in targets if Path(target).parts[1] in ("data", "etc", "usr", "var")]
    assert "/data" in service["tmpfs"], "the images declare it as a volume, which would be anonymous"


def test_the_gamecore_server_has_no_secret_of_redis_or_s3() -> None:
    assert mounts("gamecore", "secrets-") == {"secrets-games"}
    for name in ("redis", "s3", "bucket"):
        assert mounts(name, "secrets-") == {"secrets-data"}
    for name in ("learner", "actor"):
        assert mounts(name, "secrets-") == {"secrets-data", "secrets-games"}
    assert all(volume.endswith(":ro") for name in SERVICES if name != "secrets" for volume in secret_volumes(name))


def mounts(name: str, prefix: str) -> set[str]:
    """Named volumes of a service that start with the prefix."""
    sources = {volume.split(":")[0] for volume in SERVICES[name].get("volumes", [])}
    return {source for source in sources if source.startswith(prefix)}


def secret_volumes(name: str) -> list[str]:
    return [volume for volume in SERVICES[name].get("volumes", []) if volume.startswith("secrets-")]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_limits(name: str) -> None:
    service = SERVICES[name]
    assert int(service["pids_limit"]) > 0
    assert service["logging"]["options"]["max-size"]
    assert name == "secrets" or re.fullmatch(r"\d+g", service["mem_limit"])


def test_the_memory_of_redis_is_limited_below_that_of_its_container() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory") + 1] == "1gb"
    assert int(SERVICES["redis"]["mem_limit"][:-1]) >= 2, "rewriting the log may take as much again"


def test_arguments_of_the_build_have_the_defaults_of_the_dockerfile() -> None:
    dockerfile = DOCKERFILE.read_text(encoding="utf-8")
    built = [service["build"]["args"] for service in SERVICES.values() if "build" in service]
    assert built
    for arguments in built:
        assert arguments.keys() == {"BASE", "TORCH_INDEX", "VERSION", "REVISION"}
        for name, value in arguments.items():
            assert f"{name}={value}" in dockerfile


# -- Docker Compose itself --------------------------------------------------------------------------------------------------


def compose(*words: str, environment: dict[str, str] | None = None) -> str:
    """Output of a Docker Compose command that needs no engine."""
    command = [need("docker-compose"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | (environment or {}), cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Docker Compose is installed from Debian packages")
def test_docker_compose_reads_the_file() -> None:
    services = json.loads(compose("--file", str(FILE), "config", "--format", "json"))["services"]
    assert services.keys() == SERVICES.keys()
    assert services["s3"]["environment"]["WEED_LEVELDB2_DIR"] == "/s3/filerldb2"
    assert services["learner"]["build"]["args"]["TORCH_INDEX"] == "https://download.pytorch.org/whl/cpu"


@pytest.mark.skipif(sys.platform != "linux", reason="Docker Compose is installed from Debian packages")
def test_build_secrets_reach_every_build_and_an_empty_index_is_passed() -> None:
    variables = {"LUDUS_PIP_CONF": "/etc/pip.conf", "LUDUS_TORCH_INDEX": ""}
    text = compose("--file", str(FILE), "--file", str(BUILD_SECRETS), "config", "--format", "json", environment=variables)
    services = json.loads(text)["services"]
    built = [service["build"] for service in services.values() if "build" in service]
    assert len(built) == 5
    for build in built:
        assert build["args"]["TORCH_INDEX"] == ""
        ids = {secret["source"] for secret in build["secrets"]}
        assert ids == set(re.findall(r"--mount=type=secret,id=([\w.]+)", DOCKERFILE.read_text(encoding="utf-8")))


@pytest.mark.skipif(sys.platform != "linux", reason="Docker Compose is installed from Debian packages")
def test_commands_of_the_documentation_name_services_and_ludus_commands() -> None:
    services = set(compose("--file", str(FILE), "config", "--services").split())
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in re.findall(r"^docker compose -f docker/compose\.yaml ((?:run|exec) .*)$", text, re.M):
        words = shlex.split(line, comments=True)
        place = next(index for index, word in enumerate(words) if word in services)
        given = words[place + 1 :]
        found.append((words[0], words[place], given[0]))
        check_command(given[1:] if given[0] == "ludus" else given)
    assert ("run", "learner", "export") in found


# -- its programs -----------------------------------------------------------------------------------------------------------


def test_seaweedfs_starts_although_its_image_has_the_database_elsewhere(tmp_path: Path) -> None:
    """/etc/seaweedfs/filer.toml of the image names a directory that the user of the service cannot write."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or skip("weed is not installed")
    (tmp_path / "filer.toml").write_text('[leveldb2]\nenabled = true\ndir = "/proc/nowhere/filerldb2"\n')
    (tmp_path / "s3").mkdir()
    service = SERVICES["s3"]
    names = (
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "s3.port.grpc",
    )
    ports = dict(zip((*names, "s3.port"), free_ports(len(names) + 1), strict=True))
    words = [word.replace("-dir=/s3", f"-dir={tmp_path}/s3") for word in service["command"] if not word.startswith("-s3.config")]
    command = [weed, *words, *(f"-{name}={port}" for name, port in ports.items())]
    environment = os.environ | {
        name: value.replace("/s3", f"{tmp_path}/s3") for name, value in service.get("environment", {}).items()
    }
    with open(tmp_path / "log", "wb") as log:
        server = start_child(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: accepts(ports["s3.port"]), 60, what=(tmp_path / "log").read_text, failed=server.poll)
        wait_until((tmp_path / "s3" / "filerldb2").is_dir, what=(tmp_path / "log").read_text)
    finally:
        server.kill()
        server.wait(30)


def test_redis_accepts_its_command_line(tmp_path: Path) -> None:
    script = load("compose/create_secrets")
    (tmp_path / "redis.conf").write_text(script.data_secrets()["redis.conf"])
    (port,) = free_ports(1)
    settings = SERVICES["redis"]["command"][1:]
    command = [require_redis(), str(tmp_path / "redis.conf"), *(str(tmp_path) if word == "/state" else word for word in settings)]
    with open(tmp_path / "log", "wb") as log:
        server = start_child([*command, "--port", str(port)], stdout=log, stderr=log)
    try:
        wait_until(lambda: accepts(port), 60, what=(tmp_path / "log").read_text, failed=server.poll)
        wait_until((tmp_path / "appendonlydir").is_dir, what=(tmp_path / "log").read_text)
    finally:
        server.kill()
        server.wait(30)


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def test_games_reach_neither_redis_nor_s3() -> None:
    assert SERVICES["gamecore"]["networks"] == ["games"]
    assert SERVICES["redis"]["networks"] == SERVICES["s3"]["networks"] == ["data"]
    assert all(network["internal"] for network in STACK["networks"].values())


def test_secrets_are_files() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("password|secret|token|key", name, re.I) or name.endswith("_FILE"), f"{name}={value}"


def test_the_experiment_is_valid() -> None:
    command = [sys.executable, "-P", "-m", "ludus.cli.main", "config", "check", str(DIRECTORY / "compose" / "arena.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no errors" in done.stdout


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="needs root, to give files to another user")
def test_secrets_are_created_once_for_the_user_of_the_images(tmp_path: Path) -> None:
    data, games, volume = tmp_path / "data", tmp_path / "games", tmp_path / "volume"
    for directory in (data, games, volume):
        directory.mkdir()
    command = [sys.executable, str(DIRECTORY / "compose" / "create_secrets.py"), str(data), str(games), str(volume)]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b""
    paths = [*data.iterdir(), *games.iterdir()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o400 and path.stat().st_uid == 10001 for path in paths)
    assert all(directory.stat().st_uid == 10001 for directory in (data, games, volume))
    assert {path.name for path in games.iterdir()} == {"complete", "gamecore-token"}
    files = {path.name: path.read_text(encoding="utf-8") for path in data.iterdir()}
    (identity,) = json.loads(files["s3.json"])["identities"]
    credentials = configparser.ConfigParser(interpolation=None)
    credentials.read_string(files["s3-credentials"])
    assert identity["credentials"] == [
        {
            "accessKey": credentials["default"]["aws_access_key_id"],
            "secretKey": credentials["default"]["aws_secret_access_key"],
        }
    ]
    assert f"requirepass {files['redis-password'].strip()}\n" in files["redis.conf"]
    subprocess.run(command, check=True, timeout=60)
    assert {path.name: path.read_text(encoding="utf-8") for path in data.iterdir()} == files
