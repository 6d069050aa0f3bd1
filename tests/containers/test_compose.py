"""compose.yaml against the Compose specification, the Dockerfile and the command line; tests/long/test_containers.py starts it."""

from __future__ import annotations

import configparser
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.cli.clusters.submit import check_command
from tests.system.containers import PROJECT, targets

DIRECTORY = PROJECT / "docker"
FILE = DIRECTORY / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
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
    page = (PROJECT / "docs" / "containers.md").read_text(encoding="utf-8")
    assert {name for name, _ in _VARIABLE.findall(text)} == set(re.findall(r"^\| `(LUDUS_\w+)` \|", page, re.M))


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
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (DIRECTORY / source).is_file() if source.startswith(".") else source in STACK["volumes"], volume


@pytest.mark.parametrize("name", SERVICES)
def test_images_of_others_have_a_version(name: str) -> None:
    service = SERVICES[name]
    if "build" not in service:
        assert re.fullmatch(r"docker\.io/[\w/]+:[\d.]+", service["image"])


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
    directory, volume = tmp_path / "secrets", tmp_path / "volume"
    directory.mkdir()
    volume.mkdir()
    command = [sys.executable, str(DIRECTORY / "compose" / "create_secrets.py"), str(directory), str(volume)]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == b""
    files = {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o400 and path.stat().st_uid == 10001 for path in directory.iterdir())
    assert volume.stat().st_uid == 10001
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
    assert {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()} == files
