"""The doctor's pure checks, by tables of inspected values."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.formatting import format_bytes
from ludus.display.opengl_probe import OpenGL
from ludus.launch.doctor.checks import (
    directories,
    env_smoke_test,
    env_variables,
    gpus,
    graphics,
    limits,
    ports,
    redis,
    shadowed_modules,
    shared_memory,
    slurm,
    store,
    token_file,
    versions,
)
from ludus.launch.doctor.checks.directories import DirectoryStatus
from ludus.launch.doctor.checks.graphics import GraphicsSupport
from ludus.launch.doctor.checks.limits import CpuLimits, OpenFileLimits, ThreadLimit, ThreadLimits
from ludus.launch.doctor.checks.ports import PortStatus
from ludus.launch.doctor.checks.shared_memory import SharedMemory
from ludus.launch.doctor.checks.slurm import NodeKind, Partition, SlurmRequest, SlurmState
from ludus.launch.doctor.checks.token_file import TokenFile
from ludus.launch.doctor.clock import ClockSample, check_clock
from ludus.launch.doctor.finding import (
    DoctorFinding,
    Status,
    failure,
    find_secrets,
    is_healthy,
    ok,
    redact_secrets,
    redact_url,
    skip,
    warning,
)
from ludus.launch.doctor.requirements import ResourceNeeds
from ludus.process import cgroups
from ludus.process.cgroups import SystemMemory

GB = 1 << 30
EIGHT = ResourceNeeds(workers=8, cores=8)
GAMES = ResourceNeeds(workers=8, cores=8, game_threads=300, game_bytes=GB)


def test_only_failures_make_a_machine_unhealthy() -> None:
    assert is_healthy([ok("a", ""), warning("b", "", ""), skip("c", "")])
    assert not is_healthy([ok("a", ""), failure("b", "", "")])


def test_secrets_are_redacted_from_findings() -> None:
    said = DoctorFinding("x", "failed", "redis://:hunter22@host said hunter22\nand %", "export P=hunter22; redis://u:other@h")
    shown = redact_secrets(said, ["hunter22", "", "a"])
    assert "hunter22" not in shown.found + shown.fix
    assert "other" not in shown.fix
    assert "\n" not in shown.found
    assert "a" in shown.found, "what is too short to be a secret stays"


def test_secrets_are_found_in_variables_and_urls() -> None:
    environ = {"LUDUS_MEMORY_PASSWORD": "one", "AWS_SECRET_ACCESS_KEY": "two", "WANDB_API_KEY": "three", "HOME": "/root"}
    found = find_secrets(environ, "redis://user:fo%40ur@host:1/0", "s3://bucket")
    assert set(found) == {"one", "two", "three", "fo@ur", "fo%40ur"}


@pytest.mark.parametrize(("count", "said"), [(512, "512 bytes"), (1536, "1.5 KB"), (3 * GB, "3.0 GB"), (200 * GB, "200 GB")])
def test_bytes_are_formatted_with_units(count: int, said: str) -> None:
    assert format_bytes(count) == said


# -- limits ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 256), st.booleans(), st.integers(0, 1000), st.integers(0, 4 * GB))
def test_explained_sums_equal_the_needs(workers: int, cores: int, ray: bool, threads: int, memory: int) -> None:
    needs = ResourceNeeds(workers, cores, ray, threads, memory - memory % (1 << 20))
    for said, number in (
        (needs.explain_threads(), needs.threads),
        (needs.explain_files(), needs.files),
        (needs.explain_memory(), needs.memory >> 20),
        (needs.explain_shared_memory(), needs.shared_memory >> 20),
    ):
        left, right = said.replace(",", "").rsplit(" = ", 1)
        spelt = left.replace("×", "*")
        for noun in ("of weights", "of Ray's store", "of Ray", "of a game", "workers", "rings", "cores", "MB"):
            spelt = spelt.replace(noun, "")
        assert eval(spelt) == number == int(right.split()[0])


def test_more_workers_games_or_ray_never_need_less() -> None:
    for more in (replace(EIGHT, workers=9), replace(EIGHT, ray=True), replace(EIGHT, game_threads=5, game_bytes=5)):
        for what in ("threads", "files", "memory", "shared_memory"):
            assert getattr(more, what) >= getattr(EIGHT, what)


@pytest.mark.parametrize(
    ("cores", "status", "said"),
    [
        (CpuLimits(8, 8), "ok", "8 cores"),
        (CpuLimits(64, 8), "ok", "64 cores, 8 of them for this process"),
        (CpuLimits(8, 8, 4.0), "warning", "time for 4 (cgroup quota)"),
        (CpuLimits(2, 2), "warning", "8 workers would share them"),
        (CpuLimits(8, 8, 0.5), "warning", "time for 0.5"),
    ],
)
def test_cores(cores: CpuLimits, status: Status, said: str) -> None:
    found = limits.check_cores(cores, EIGHT, {})
    assert (found.status, said in found.found) == (status, True), found


def test_a_cpu_quota_is_fine_if_omp_num_threads_respects_it() -> None:
    assert limits.check_cores(CpuLimits(8, 8, 4.0), EIGHT, {"OMP_NUM_THREADS": "4"}).status == "ok"
    assert limits.check_cores(CpuLimits(8, 8, 4.0), EIGHT, {"OMP_NUM_THREADS": "8"}).status == "warning"


@pytest.mark.parametrize(
    ("memory", "status", "said"),
    [
        (SystemMemory(64 * GB, 60 * GB), "ok", "64.0 GB, 60.0 GB available; needed 600 MB + 8 workers × 150 MB = 1,800 MB"),
        (SystemMemory(64 * GB, 2 * GB), "warning", "2.0 GB available"),
        (SystemMemory(64 * GB, GB), "failed", "1.0 GB available"),
        (SystemMemory(64 * GB, 60 * GB, 2 * GB, GB), "failed", "the cgroup allows 2.0 GB, 1.0 GB of it used"),
        (SystemMemory(64 * GB, 60 * GB, 32 * GB, GB), "ok", "the cgroup allows 32.0 GB"),
        (None, "skipped", "does not report"),
    ],
)
def test_memory(memory: SystemMemory | None, status: Status, said: str) -> None:
    found = limits.check_memory(memory, EIGHT)
    assert (found.status, said in found.found) == (status, True), found


def test_too_little_memory_suggests_fewer_workers() -> None:
    found = limits.check_memory(SystemMemory(4 * GB, GB), EIGHT)
    assert "--num-workers 2" in found.fix
    fits = ResourceNeeds(2, 8).memory
    assert fits <= GB < ResourceNeeds(3, 8).memory


@pytest.mark.parametrize(
    ("shared", "status", "said"),
    [
        (SharedMemory(8 * GB, 8 * GB), "ok", "needed 64 MB of weights + 8 rings × 32 MB = 320 MB"),
        (SharedMemory(64 << 20, 64 << 20), "warning", "rings go to the temporary directory"),
        (SharedMemory(GB, 300 << 20), "failed", "300 MB free"),
        (SharedMemory(why="it is not writable"), "warning", "not writable"),
        (SharedMemory(why="it does not exist"), "warning", "does not exist"),
    ],
)
def test_shared_memory(shared: SharedMemory, status: Status, said: str) -> None:
    found = shared_memory.check_dev_shm(shared, EIGHT)
    assert (found.status, said in found.found) == (status, True), found
    assert status == "ok" or "tmpfs" in found.fix or "--shm-size=1g" in found.fix


@pytest.mark.parametrize(
    ("shared", "status", "said"),
    [
        (
            SharedMemory(8 * GB, 8 * GB),
            "ok",
            "LUDUS_SHM=/big: 8.0 GB, 8.0 GB free; needed 64 MB of weights + 8 rings × 32 MB = 320 MB",
        ),
        (SharedMemory(GB, 100 << 20), "failed", "100 MB free"),
        (SharedMemory(why="it is not writable"), "failed", "not writable"),
        (SharedMemory(why="it does not exist"), "failed", "does not exist"),
    ],
)
def test_the_directory_of_ludus_shm_has_no_fallback(shared: SharedMemory, status: Status, said: str) -> None:
    found = shared_memory.check_ludus_shm("/big", shared, replace(EIGHT, ray=True))
    assert (found.status, said in found.found) == (status, True), found
    assert status == "ok" or "LUDUS_SHM" in found.fix


def test_ludus_shm_does_not_move_rays_object_store() -> None:
    needs = replace(EIGHT, ray=True)
    assert shared_memory.check_ray_store(SharedMemory(GB, GB), needs).status == "ok"
    little = shared_memory.check_ray_store(SharedMemory(64 << 20, 64 << 20), needs)
    assert (little.status, "needed 512 MB of Ray's store" in little.found) == ("failed", True), little
    assert shared_memory.check_ray_store(SharedMemory(why="it does not exist"), needs).status == "warning"


@pytest.mark.parametrize(
    ("files", "status", "fix"),
    [
        (OpenFileLimits(1024, 4096), "ok", ""),
        (OpenFileLimits(100, 4096), "failed", "ulimit -n 4096"),
        (OpenFileLimits(100, 100), "failed", "nofile 4096 in /etc/security/limits.conf"),
        (OpenFileLimits(cgroups.UNLIMITED, cgroups.UNLIMITED), "ok", ""),
    ],
)
def test_open_files(files: OpenFileLimits, status: Status, fix: str) -> None:
    found = limits.check_files(files, EIGHT)
    assert found.status == status
    assert fix in found.fix


@pytest.mark.parametrize(
    ("needs", "bounds", "status", "said", "fix"),
    [
        (EIGHT, (), "ok", "no limit; needed 16 + 8 cores + 8 workers × 4 = 56", ""),
        (EIGHT, (ThreadLimit("ulimit -u", 4096, 100, "raise it"),), "ok", "ulimit -u 4,096, 100 in use", ""),
        (EIGHT, (ThreadLimit("ulimit -u", 4096, 4080, "raise it"),), "failed", "4,080 in use", "raise it"),
        (
            GAMES,
            (ThreadLimit("cgroup pids.max", 1024, 24, "raise it"),),
            "failed",
            "8 workers × (4 + 300 of a game) = 2,456",
            "--num-workers 3",
        ),
        (GAMES, (ThreadLimit("cgroup pids.max", 2600, 24, "raise it"),), "warning", "2,600", "raise it"),
        (GAMES, (ThreadLimit("wide", 10**6, 1, "no"), ThreadLimit("narrow", 100, 1, "yes")), "failed", "narrow 100", "yes"),
    ],
)
def test_threads(needs: ResourceNeeds, bounds: tuple[ThreadLimit, ...], status: Status, said: str, fix: str) -> None:
    found = limits.check_threads(ThreadLimits(bounds), needs)
    assert (found.status, said in found.found, fix in found.fix) == (status, True, True), found


def test_too_few_threads_suggest_fewer_workers() -> None:
    found = limits.check_threads(ThreadLimits((ThreadLimit("pids.max", 1000, 0, "raise it"),)), GAMES)
    assert "--num-workers 3" in found.fix
    assert replace(GAMES, workers=3).threads <= 1000 < replace(GAMES, workers=4).threads


@pytest.mark.parametrize(("maps", "status"), [(65_530, "ok"), (30_000, "warning"), (1_000, "failed"), (cgroups.UNLIMITED, "ok")])
def test_mappings(maps: int, status: Status) -> None:
    assert limits.check_maps(ThreadLimits((), maps), EIGHT).status == status


def test_limits_of_parent_cgroups_apply_in_both_versions(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("4:memory:/outer/inner\n3:cpu,cpuacct:/\n2:pids:/gone\n0::/unified\n")
    root = tmp_path / "cgroup"
    for path, text in {
        "memory/memory.limit_in_bytes": str(1 << 63),
        "memory/outer/memory.limit_in_bytes": str(2 * GB),
        "memory/outer/memory.usage_in_bytes": str(GB),
        "memory/outer/memory.stat": f"total_inactive_file {GB // 2}\n",
        "memory/outer/inner/memory.limit_in_bytes": str(4 * GB),
        "memory/outer/inner/memory.usage_in_bytes": "0",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
        "pids/pids.max": "512",
        "cgroup.controllers": "cpu",
        "unified/cpu.max": "max 100000",
        "unified/pids.max": "max",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    groups = cgroups.find_cgroups(proc, root)
    assert limits.inspect_cores(groups).quota == 1.5
    assert cgroups.read_memory(groups, meminfo) == SystemMemory(64 * GB, 32 * GB, 2 * GB, GB // 2)
    assert [most for most, _ in groups.numbers("pids", "pids.max", "pids.max")] == [512]


# -- versions, accelerators, places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "ray", "expected"),
    [
        ({"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0"}, True, {"python": "ok", "torch": "ok", "ray": "ok"}),
        ({"python": "3.10.2", "torch": "2.5.1", "ray": ""}, False, {"python": "failed", "torch": "failed", "ray": "skipped"}),
        ({"python": "3.14.0", "torch": "", "ray": ""}, True, {"python": "ok", "torch": "failed", "ray": "failed"}),
        ({"python": "3.11.0", "torch": "2.13.0", "ray": "2.9.0"}, False, {"ray": "failed"}),
    ],
)
def test_versions(have: Mapping[str, str], ray: bool, expected: Mapping[str, Status]) -> None:
    found = {finding.check: finding.status for finding in versions.check_versions({"ludus": "0.1.0", **have}, ray=ray)}
    assert {**found, **expected} == found


@pytest.mark.parametrize(
    ("other", "check", "status"),
    [
        ({}, "torch", "ok"),
        ({"torch": "2.13.0+cu126"}, "torch", "ok"),
        ({"torch": "2.12.0+cpu"}, "torch", "failed"),
        ({"torch": "2.13.1+cpu"}, "torch", "failed"),
        ({"torch": ""}, "torch", "failed"),
        ({"ray": "2.59.0"}, "ray", "failed"),
        ({"ray": ""}, "ray", "failed"),
        ({"ludus": "0.2.0"}, "ludus", "failed"),
        ({"python": "3.11.9"}, "python", "ok"),
        ({"python": "3.12.1"}, "python", "failed"),
    ],
)
def test_versions_on_all_nodes(other: Mapping[str, str], check: str, status: Status) -> None:
    have = {"python": "3.11.7", "ludus": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0"}
    found = {finding.check: finding for finding in versions.check_agreement({"a": have, "b": {**have, **other}})}
    assert found[f"{check} on all nodes"].status == status
    assert [finding.status for finding in found.values() if finding.check != f"{check} on all nodes"] == ["ok"] * 3
    if status != "ok":
        assert ": b" in found[f"{check} on all nodes"].found, "whose it is"


def test_a_submitting_machine_needs_neither_pytorch_nor_ray() -> None:
    bare = {"python": "3.11.7", "ludus": "0.1.0", "torch": "", "ray": "2.1.0"}
    found = {finding.check: finding for finding in versions.check_versions(bare, ray=True, launcher=True)}
    assert {check: finding.status for check, finding in found.items()} == {
        "python": "ok",
        "ludus": "ok",
        "torch": "skipped",
        "ray": "skipped",
    }
    assert found["torch"].found.startswith("not installed")
    assert found["ray"].found.startswith("2.1.0")


def test_a_submitting_machine_needs_the_same_ludus_only() -> None:
    have = {"python": "3.11.7", "ludus": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"}
    found = {finding.check: finding.status for finding in versions.check_agreement({"a": have, "here": {"ludus": "0.2.0"}})}
    assert found == {
        "ludus on all nodes": "failed",
        "ray on all nodes": "ok",
        "torch on all nodes": "ok",
        "python on all nodes": "ok",
    }


GPU = gpus.Gpu("A100", 40_000, 100, "550.1")


@pytest.mark.parametrize(
    ("seen", "torch", "environ", "status", "said"),
    [
        (gpus.GpuInventory(), "2.13.0", {}, "skipped", "none"),
        (gpus.GpuInventory((GPU,), 1, True), "2.13.0+cu126", {}, "ok", "A100 (39,900 of 40,000 MB free); driver 550.1"),
        (gpus.GpuInventory((GPU,), 1, True), "2.13.0+cpu", {}, "warning", "built without CUDA"),
        (
            gpus.GpuInventory((GPU,), 1, True),
            "2.13.0",
            {"CUDA_VISIBLE_DEVICES": ""},
            "warning",
            "hidden by CUDA_VISIBLE_DEVICES=''",
        ),
        (gpus.GpuInventory((GPU,), 1, True), "2.13.0", {"CUDA_VISIBLE_DEVICES": "0"}, "ok", "A100"),
        (gpus.GpuInventory((replace(GPU, used_mb=39_000),), 1, True), "2.13.0", {}, "warning", "other processes use most"),
        (gpus.GpuInventory(devices=2), "2.13.0", {}, "warning", "2 devices in /dev, and nvidia-smi is not installed"),
        (gpus.GpuInventory(why="Driver/library version mismatch", tool=True), "2.13.0", {}, "failed", "mismatch"),
    ],
)
def test_gpus(seen: gpus.GpuInventory, torch: str, environ: Mapping[str, str], status: Status, said: str) -> None:
    found = gpus.check_gpus(seen, torch, environ)
    assert (found.status, said in found.found) == (status, True), found


def test_output_of_nvidia_smi_is_parsed_and_invalid_lines_are_skipped() -> None:
    text = "NVIDIA A100-SXM4-40GB, 40960, 512, 550.54.15\nTesla, [N/A], 0, 1\n\nrubbish\n"
    assert gpus.parse_csv(text) == (gpus.Gpu("NVIDIA A100-SXM4-40GB", 40960, 512, "550.54.15"),)


ROOM = DirectoryStatus("/d", "/d", 100 * GB, 10**6, "ext4")


@pytest.mark.parametrize(
    ("what", "place", "shared", "status", "said"),
    [
        ("runs", ROOM, False, "ok", "100 GB free (ext4)"),
        ("runs", replace(ROOM, free=GB), False, "warning", "at least 2.0 GB"),
        ("runs", replace(ROOM, free=GB // 100), False, "failed", "at least 2.0 GB"),
        ("runs", replace(ROOM, inodes=5), False, "failed", "room for 5 more files"),
        ("runs", replace(ROOM, inodes=None), False, "ok", "100 GB"),
        ("runs", replace(ROOM, why="Read-only file system"), False, "failed", "cannot be written to: Read-only"),
        ("temp", replace(ROOM, kind="nfs4"), False, "warning", "slow there"),
        ("temp", replace(ROOM, asked="/" + "x" * 90), False, "warning", "too long"),
        ("state", ROOM, True, "warning", "may not be the same on the nodes"),
        ("state", replace(ROOM, kind="nfs4"), True, "ok", "nfs4"),
        ("state", replace(ROOM, kind="fuse.sshfs"), True, "ok", "sshfs"),
        ("state", ROOM, False, "ok", "ext4"),
        ("state", replace(ROOM, ours=False), False, "failed", "another user"),
        ("state", replace(ROOM, ours=False, asked="/d/x/y"), False, "ok", "/d/x/y"),
    ],
)
def test_directories(what: str, place: DirectoryStatus, shared: bool, status: Status, said: str) -> None:
    found = directories.check_directory(what, place, shared=shared)
    assert (found.status, said in found.found) == (status, True), found


def test_the_file_system_of_a_path_is_the_innermost_and_last_mounted(tmp_path: Path) -> None:
    inner = tmp_path / "a b"
    inner.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(inner).replace(" ", "\\040")
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {point} rw shared:1 - tmpfs x rw\n3 2 0:3 / {point} rw - nfs4 h:/ rw\n"
    )
    assert directories.filesystem_type(inner, mounts) == "nfs4"
    assert directories.filesystem_type(tmp_path, mounts) == "ext4"
    assert directories.filesystem_type(tmp_path, tmp_path / "none") == ""


# -- network, tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status_of", "status", "said"),
    [
        (PortStatus({}, 12_000, 50, (32_768, 60_999)), "ok", "a block of 50 is free"),
        (PortStatus({6379: True}, 12_000), "ok", "6379 free"),
        (PortStatus({6379: False, 80: True}, 12_000), "failed", "in use: 6379"),
        (PortStatus({}, None), "failed", "no 3 ports in a row"),
        (PortStatus({}, 12_000, 3, (1024, 65_535)), "warning", "outgoing connections use 1024 to 65535"),
    ],
)
def test_ports(status_of: PortStatus, status: Status, said: str) -> None:
    found = ports.check_ports(status_of)
    assert (found.status, said in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("ticks", "status", "said"),
    [
        ([ClockSample(100.0, 100.2, 100.1)], "ok", "0.000 s"),
        ([ClockSample(100.0, 100.2, 105.1)], "warning", "5.000 s ahead of this machine, give or take 0.100 s"),
        ([ClockSample(100.0, 100.2, 95.1)], "warning", "5.000 s behind"),
        ([ClockSample(100.0, 100.2, 200.1)], "failed", "100.000 s ahead"),
        ([ClockSample(100.0, 104.0, 103.5)], "ok", "give or take 2.000 s"),
        ([ClockSample(100.0, 104.0, 110.0), ClockSample(110.0, 110.2, 110.1)], "ok", "0.000 s"),
        ([], "skipped", "not reported"),
    ],
)
def test_clocks_are_compared_by_the_fastest_sample_within_its_accuracy(
    ticks: list[ClockSample], status: Status, said: str
) -> None:
    found = check_clock(ticks)
    assert (found.status, said in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("environ", "nodes", "status", "said"),
    [
        ({}, (), None, ""),
        (
            {"http_proxy": "http://u:p@proxy:3128"},
            (),
            "warning",
            "http_proxy set (proxy), and no_proxy does not exclude localhost, 127.0.0.1",
        ),
        ({"HTTPS_PROXY": "proxy:3128", "NO_PROXY": "localhost,127.0.0.0/8"}, (), "ok", "no_proxy excludes"),
        (
            {"http_proxy": "http://proxy", "no_proxy": "localhost,127.0.0.1"},
            ("10.0.0.7",),
            "warning",
            "does not exclude 10.0.0.7",
        ),
        ({"http_proxy": "http://proxy", "no_proxy": "localhost,127.0.0.1,10.0.0.0/8"}, ("10.0.0.7",), "ok", "no_proxy excludes"),
        ({"http_proxy": "http://proxy", "no_proxy": "localhost,127.0.0.1,.lab"}, ("n1.lab",), "ok", "no_proxy excludes"),
        ({"http_proxy": "http://proxy", "no_proxy": "*"}, ("n1",), "ok", "no_proxy excludes"),
        ({"http_proxy": "http://proxy", "no_proxy": "*.lab,localhost"}, ("n1.lab",), "warning", "does not exclude 127.0.0.1"),
    ],
)
def test_proxies(environ: Mapping[str, str], nodes: tuple[str, ...], status: Status | None, said: str) -> None:
    found = env_variables.check_proxies(environ, nodes)
    assert [finding.status for finding in found] == ([status] if status else [])
    for finding in found:
        assert said in finding.found
        assert "u:p" not in finding.found


@pytest.mark.parametrize(
    ("token", "status", "said"),
    [
        (TokenFile("V", "/t", "file"), "ok", "/t (V), private"),
        (TokenFile("V", "/t", "file", mode=0o644), "failed", "mode 0644"),
        (TokenFile("V", "/t", "file", mode=0o620), "failed", "mode 0620"),
        (TokenFile("V", "/t", "file", ours=False), "failed", "another user"),
        (TokenFile("V", "/t", "file", length=0), "failed", "0 characters"),
        (TokenFile("V", "/t", "file", why="Permission denied"), "failed", "cannot be read"),
        (TokenFile("V", "/t", "none", why="No such file"), "failed", "cannot be found"),
        (TokenFile("V", "/t", "other"), "failed", "not a file"),
        (TokenFile("", "/t", "file"), "ok", "private"),
        (TokenFile("", "/t", "file", mode=0o644), "warning", "mode 0644"),
        (TokenFile("", "/t", "file", role=True), "ok", "/t, private"),
        (TokenFile("", "/t", "file", mode=0o644, role=True), "failed", "mode 0644"),
        (TokenFile("V", "/t", "none", why="No such file", role=True), "failed", "cannot be found"),
        (TokenFile("V", "/t", "file", plain=False, role=True), "failed", "does not contain a token"),
        (TokenFile("V", "/t", "file", length=5000, role=True), "failed", "does not contain a token"),
    ],
)
def test_tokens(token: TokenFile, status: Status, said: str) -> None:
    (found,) = token_file.check_tokens([token], {})
    assert (found.status, said in found.found) == (status, True), found


@pytest.mark.parametrize(
    ("told", "status", "said"),
    [
        ({"a": "x", "b": "x"}, "ok", "the same on 2 of 2"),
        ({"a": "x", "b": "y", "c": "x"}, "failed", "they differ (one: a, c; one: b)"),
        ({"a": "x", "b": ""}, "failed", "they differ (one: a; none: b)"),
        ({"a": "", "b": ""}, "skipped", "none yet"),
    ],
)
def test_tokens_on_all_nodes(told: Mapping[str, str], status: Status, said: str) -> None:
    found = token_file.check_equal_tokens(told)
    assert (found.status, said in found.found) == (status, True), found


def test_a_missing_token_fails_only_if_one_is_required() -> None:
    assert [f.status for f in token_file.check_tokens([], {})] == ["skipped"]
    assert [f.status for f in token_file.check_tokens([], {"RAY_AUTH_MODE": "token"})] == ["failed"]
    assert [f.status for f in token_file.check_tokens([TokenFile("", "/t", "file", mode=0o644)], {"RAY_AUTH_MODE": "token"})] == [
        "failed"
    ]


# -- services, graphics, environments -------------------------------------------------------------------------------------


def test_slow_services_are_a_warning() -> None:
    assert redis.check_round_trip("redis://h", 0.0005).status == "ok"
    assert redis.check_round_trip("redis://h", 0.2).status == "warning"
    assert store.check_durations("s3://b", {"write": 0.01, "read": 0.01, "create": 0.02}).status == "ok"
    assert store.check_durations("s3://b", {"write": 3.0}).status == "warning"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:1/0?ssl=1", "redis://host:1/0"),
        ("s3://bucket/run?endpoint=http://h", "s3://bucket/run"),
        ("/a/b", "/a/b"),
    ],
)
def test_urls_are_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert redact_url(url) == shown


NEW = OpenGL("egl", "4.5 Mesa", "llvmpipe")
GLX = OpenGL("glx", "4.6 NVIDIA", "A100")
ABSENT = OpenGL("egl", missing=True)
BROKEN = OpenGL("egl", why="eglInitialize failed")


def support(x_server: OpenGL, egl: OpenGL, xvfb: OpenGL | None = None, choice: str = "auto") -> GraphicsSupport:
    return GraphicsSupport(
        {"X server": x_server, "EGL": egl, "OSMesa": ABSENT, **({"Xvfb": xvfb} if xvfb is not None else {})}, choice
    )


@pytest.mark.parametrize(
    ("seen", "needed", "statuses", "said"),
    [
        (support(GLX, NEW), True, ("ok", "ok", "ok", "skipped"), "by X server"),
        (support(ABSENT, NEW, ABSENT), False, ("ok", "skipped", "ok", "skipped", "skipped"), "by EGL: OpenGL 4.5"),
        (support(BROKEN, BROKEN, GLX), True, ("ok", "warning", "warning", "skipped", "ok"), "by Xvfb"),
        (support(ABSENT, ABSENT, ABSENT), False, ("warning", *["skipped"] * 4), "nothing can draw"),
        (support(ABSENT, ABSENT, ABSENT), True, ("failed", *["skipped"] * 4), "nothing can draw"),
        (support(ABSENT, replace(NEW, version="2.1 Mesa")), True, ("failed", "skipped", "ok", "skipped"), "engines need 3.2"),
        (support(BROKEN, NEW), False, ("ok", "warning", "ok", "skipped"), "by EGL"),
        (support(ABSENT, NEW, GLX, "xvfb"), False, ("ok", "skipped", "ok", "skipped", "ok"), "by Xvfb"),
        (support(ABSENT, NEW, BROKEN, "xvfb"), False, ("failed", "skipped", "ok", "skipped", "warning"), "display: xvfb"),
        (support(GLX, ABSENT, choice="egl"), False, ("failed", "ok", "skipped", "skipped"), "display: egl"),
        (support(GLX, NEW, choice="egl"), True, ("ok", "ok", "ok", "skipped"), "by EGL"),
        (support(ABSENT, NEW, BROKEN), False, ("ok", "skipped", "ok", "skipped", "warning"), "by EGL"),
        (support(BROKEN, ABSENT, choice="none"), False, ("warning", "warning", "skipped", "skipped"), "display: none"),
    ],
)
def test_graphics(seen: GraphicsSupport, needed: bool, statuses: tuple[Status, ...], said: str) -> None:
    found = graphics.check_graphics(seen, needed=needed)
    assert [finding.check for finding in found] == ["graphics", *seen.backends]
    assert tuple(finding.status for finding in found) == statuses, found
    assert said in found[0].found
    assert all(finding.fix for finding in found if finding.status in ("warning", "failed"))


@pytest.mark.parametrize(
    ("seen", "status", "said"),
    [
        (support(ABSENT, NEW, ABSENT), "warning", "by EGL, which has no windows"),
        (support(ABSENT, NEW, choice="none"), "warning", "display: none"),
        (support(ABSENT, NEW, GLX), "ok", "by Xvfb"),
        (support(GLX, NEW), "ok", "by X server: a Unity player draws with OpenGL 4.6 NVIDIA on A100"),
        (support(NEW, NEW), "ok", "by software, llvmpipe"),
        (support(GLX, NEW, choice="egl"), "warning", "by EGL, which has no windows"),
        (support(ABSENT, ABSENT, ABSENT), "failed", "nothing can draw"),
    ],
)
def test_a_game_with_a_window_needs_a_screen(seen: GraphicsSupport, status: Status, said: str) -> None:
    found = graphics.check_graphics(seen, needed=True, window=True)[0]
    assert (found.status, said in found.found) == (status, True), found
    assert status == "ok" or found.fix


@pytest.mark.parametrize(
    ("choice", "xvfb", "said"),
    [
        ("", False, ""),
        ("auto", False, ""),
        ("none", False, ""),
        ("xvfb", True, ""),
        ("xvfb", False, "Xvfb is not installed"),
        ("bogus", True, "'bogus'"),
    ],
)
def test_an_unusable_ludus_screen_is_a_failure(choice: str, xvfb: bool, said: str) -> None:
    found = graphics.check_choice({"LUDUS_SCREEN": choice}, xvfb=xvfb)
    assert [(finding.check, finding.status) for finding in found] == ([("display", "failed")] if said else [])
    assert all(said in finding.found and finding.fix for finding in found)


def test_other_systems_have_a_screen() -> None:
    assert [finding.status for finding in graphics.check_graphics(None, needed=True)] == ["skipped"]


def test_smoke_tests() -> None:
    tried = env_smoke_test.SmokeTest("Pong", 1.5, threads=12, memory=GB, processes=2)
    assert env_smoke_test.check_smoke_test(tried).status == "ok"
    assert "one takes 12 threads, 1.0 GB, 2 processes" in env_smoke_test.check_smoke_test(tried).found
    assert env_smoke_test.check_smoke_test(replace(tried, why="it raised")).status == "failed"
    assert env_smoke_test.check_smoke_test(replace(tried, why="of several", skipped=True)).status == "skipped"
    assert "LUDUS_SCREEN=xvfb" in env_smoke_test.check_smoke_test(replace(tried, private_screen=True)).fix


# -- environment variables, modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LD_PRELOAD", "/gone/lib.so", "/gone/lib.so does not exist"),
        ("LD_PRELOAD", "libm.so.6", "into every game and worker"),
        ("OMP_NUM_THREADS", "64", "64 threads on 4 cores"),
        ("OMP_NUM_THREADS", "4", ""),
        ("PYTHONHOME", "/opt", "/opt"),
        ("CUDA_LAUNCH_BLOCKING", "1", "slow"),
        ("CUDA_LAUNCH_BLOCKING", "0", ""),
        ("PATH", "/bin", ""),
    ],
)
def test_environment_variables(variable: str, value: str, said: str) -> None:
    found = list(env_variables.check_variables({variable: value}, 4))
    assert [(finding.check, finding.status) for finding in found] == ([(variable, "warning")] if said else [])
    assert all(said in finding.found for finding in found)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("random.py", "mine.py"), "has random.py, which hides a module of Python"),
        (("torch.py",), "has torch.py, which hides a package"),
        (("train.py", "torch", "README"), ""),
    ],
)
def test_shadowed_modules(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    found = list(shadowed_modules.check_shadowed_modules({}, tmp_path))
    assert [said in finding.found for finding in found] == [True] * bool(said)


def test_an_unreachable_ray_address_is_a_warning() -> None:
    environ = {"RAY_ADDRESS": "127.0.0.1:1", "ip_head": "auto"}
    assert env_variables.ray_addresses(environ) == {"RAY_ADDRESS": "127.0.0.1:1"}
    assert env_variables.check_ray_address("RAY_ADDRESS", "127.0.0.1:1").fix == "unset RAY_ADDRESS"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert env_variables.check_ray_address("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}").status == "ok"


# -- Slurm ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("02:00:00", 7200),
        ("1-00", 86_400),
        ("1-02:30", 95_400),
        ("2-01:00:01", 176_401),
        ("infinite", math.inf),
        ("n/a", math.inf),
    ],
)
def test_slurm_times(text: str, seconds: int) -> None:
    assert slurm.time_limit_s(text) == seconds


def test_gpus_in_a_gres_string_are_counted() -> None:
    said = {
        "gpu:2": 2,
        "gpu": 1,
        "gpu:a100": 1,
        "gpu:a100:4(S:0-1)": 4,
        "gpu:a:2,gpu:b:1,shard:8": 3,
        "(null)": 0,
        "craynetwork:4": 0,
    }
    assert {gres: slurm.parse_gres(gres) for gres in said} == said


MAIN = Partition("main", True, 7200, (NodeKind(3, 2, 36, gpus=2),))
MIXED = slurm.parse_partitions(
    "gpu|up|1-00:00:00|0/4/0/4|8+|16000+|(null)\nother|up|infinite|0/1/0/1|4|1000|(null)\ngpu|up|1-00:00:00|0/2/0/2|64|256000|gpu:a100:4\n"
)
UP = SlurmState(controller="Slurmctld(primary) at vm is UP", partitions=(MAIN,))


def test_output_of_sinfo_is_parsed() -> None:
    text = "main|up|2:00:00|1/2/0/3|36|4000|gpu:2\nbig|drain|infinite|0/0/1/1|128+|512000+|(null)\nsinfo: error: something\n"
    big = Partition("big", False, math.inf, (NodeKind(1, 0, 128, more=True),))
    assert slurm.parse_partitions(text) == (MAIN, big)


@pytest.mark.parametrize(
    ("seen", "wanted", "statuses", "said"),
    [
        (UP, SlurmRequest(), ("ok", "ok"), "main (3 nodes, 2 idle, at most 02:00:00)"),
        (UP, SlurmRequest("main", "01:00:00", 3), ("ok", "ok"), "36 cores each"),
        (UP, SlurmRequest("main", "03:00:00"), ("ok", "failed"), "--time 03:00:00 is more than main allows"),
        (UP, SlurmRequest("", "03:00:00"), ("ok", "ok", "failed"), "more than main allows"),
        (UP, SlurmRequest("main", nodes=4), ("ok", "failed"), "4 nodes are requested, and main has 3"),
        (UP, SlurmRequest("main", cpus=64), ("ok", "failed"), "1 node with 64 cores wanted, and main has none"),
        (UP, SlurmRequest("main", gpus=3), ("ok", "failed"), "1 node with 3 GPUs wanted, and main has none"),
        (replace(UP, partitions=MIXED), SlurmRequest("gpu", gpus=1), ("ok", "ok"), "6 nodes, 6 idle, 8 cores or more each"),
        (replace(UP, partitions=MIXED), SlurmRequest("gpu", nodes=5), ("ok", "ok"), "6 nodes"),
        (replace(UP, partitions=MIXED), SlurmRequest("gpu", nodes=7), ("ok", "failed"), "7 nodes are requested, and gpu has 6"),
        (replace(UP, partitions=MIXED), SlurmRequest("gpu", nodes=2, cpus=32), ("ok", "ok"), "6 nodes"),
        (
            replace(UP, partitions=MIXED),
            SlurmRequest("gpu", nodes=3, cpus=32),
            ("ok", "warning"),
            "whether 3 nodes of them have 32 cores",
        ),
        (replace(UP, partitions=MIXED), SlurmRequest("gpu", nodes=3, cpus=32, gpus=1), ("ok", "failed"), "gpu has 2 of them"),
        (replace(UP, partitions=MIXED), SlurmRequest("other", cpus=5), ("ok", "failed"), "1 node with 5 cores wanted"),
        (UP, SlurmRequest("main", gpus=1), ("ok", "ok"), "3 nodes"),
        (
            replace(UP, partitions=(replace(MAIN, kinds=(NodeKind(3, 2, 36),)),)),
            SlurmRequest("main", gpus=1),
            ("ok", "failed"),
            "has none",
        ),
        (
            replace(UP, partitions=(replace(MAIN, kinds=(NodeKind(3, 0, 36),)),)),
            SlurmRequest("main"),
            ("ok", "warning"),
            "no node is idle",
        ),
        (replace(UP, partitions=(replace(MAIN, up=False),)), SlurmRequest("main"), ("ok", "failed"), "main is down"),
        (UP, SlurmRequest("gpu"), ("ok", "failed"), "does not exist"),
        (replace(UP, partitions=()), SlurmRequest(), ("ok", "failed"), "sinfo names none"),
        (replace(UP, controller="Slurmctld(primary) at vm is DOWN"), SlurmRequest(), ("failed",), "DOWN"),
        (SlurmState(why="it does not answer within 10 s"), SlurmRequest(), ("failed",), "does not answer"),
        (SlurmState(("sbatch", "sinfo")), SlurmRequest(), ("failed",), "not found: sbatch, sinfo"),
    ],
)
def test_slurm_partitions(seen: SlurmState, wanted: SlurmRequest, statuses: tuple[Status, ...], said: str) -> None:
    found = slurm.check_slurm(seen, wanted)
    assert tuple(finding.status for finding in found) == statuses, found
    assert said in found[-1].found
