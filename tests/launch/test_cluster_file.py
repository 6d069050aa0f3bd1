"""cluster.yaml and the command-line options that override it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ludus.errors import ConfigError, LudusError, UsageError
from ludus.launch.cluster_file import (
    _BACKENDS,
    ClusterConfig,
    NodeGroup,
    SshMachine,
    load_cluster_file,
    open_backend,
    plan_command,
)
from ludus.launch.slurm.backend import SlurmOrchestrator
from ludus.launch.slurm.sbatch import SlurmGroup
from ludus.launch.ssh.backend import SshOrchestrator
from ludus.launch.ssh.connection import SshNode

SLURM = """
on: slurm
name: pong
nodes: 3
cpus: 36
time: "02:00:00"
account: games
qos: high
extra: [--mail-type=END]
setup:
  - module purge
  - source ~/ludus/bin/activate
environment: {SDL_VIDEODRIVER: dummy}
secrets: [WANDB_API_KEY]
min_nodes: 2
"""


def write_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_sets_the_backend_and_its_resources(tmp_path: Path) -> None:
    config = load_cluster_file(write_file(tmp_path, SLURM))
    settings = config.slurm_settings()
    assert (settings.time, settings.account, settings.qos, settings.cpus) == ("02:00:00", "games", "high", 36)
    assert settings.setup == ("module purge", "source ~/ludus/bin/activate")
    job = plan_command(config, ["train", "ALE/Pong-v5"], {"WANDB_API_KEY": "x" * 20}).job
    assert (job.name, job.nodes, job.ray, job.secrets) == ("pong", 3, 2, ("WANDB_API_KEY",))
    assert all(role.environment["SDL_VIDEODRIVER"] == "dummy" for role in job.roles)
    assert isinstance(open_backend(config), SlurmOrchestrator)


def test_options_override_the_file(tmp_path: Path) -> None:
    config = load_cluster_file(write_file(tmp_path, SLURM)).merge(nodes=5, time="10", account=None, extra=("--nice",))
    assert (config.nodes, config.time, config.account, config.extra) == (5, "10", "games", ("--nice",))


def test_keys_that_the_backend_does_not_use_are_reported(tmp_path: Path) -> None:
    config = load_cluster_file(write_file(tmp_path, SLURM)).merge(on="local")
    (notice,) = config.notices()
    assert notice == "account, extra, qos, setup, time: without meaning on local"
    assert ClusterConfig(on="slurm", time="10").notices() == []


def test_groups_are_nodes_of_several_kinds(tmp_path: Path) -> None:
    text = "on: slurm\ncpus: 8\ngroups:\n  - {gpus: 1, partition: gpu}\n  - {nodes: 2, cpus: 36, partition: cpu}\n"
    config = load_cluster_file(write_file(tmp_path, text))
    assert config.size == 3
    assert config.slurm_settings().groups == (SlurmGroup(gpus=1, partition="gpu"), SlurmGroup(2, 36, partition="cpu"))
    job = plan_command(config, ["train", "x"], {}).job
    assert [(role.at, role.cpus, role.gpus) for role in job.roles] == [((0,), 8, 1), ((1, 2), 36, 0), ((), 8, 1)]


def test_machines_are_listed_in_the_file_or_in_another(tmp_path: Path) -> None:
    (tmp_path / "learner.iplist").write_text("10.0.0.1 root 36000 1\n10.0.0.2 root 36000 4\n10.0.0.3 root 36000 4\n")
    config = load_cluster_file(write_file(tmp_path, "on: ssh\niplist: learner.iplist\n"))
    assert config.size == 3
    assert config.merge(nodes=2).ssh_nodes()[1] == SshNode("10.0.0.2", "root", 36000, 4)
    assert isinstance(open_backend(config), SshOrchestrator)
    listed = load_cluster_file(write_file(tmp_path, "on: ssh\nmachines: [{host: a}, {host: b, user: me, address: 10.0.0.2}]\n"))
    assert listed.ssh_nodes() == (SshNode("a"), SshNode("b", "me", address="10.0.0.2"))
    with pytest.raises(UsageError, match="list the machines"):
        listed.merge(iplist=str(tmp_path / "learner.iplist")).ssh_nodes()
    with pytest.raises(UsageError, match="4 nodes, and 3"):
        config.merge(nodes=4).ssh_nodes()
    with pytest.raises(UsageError, match="No machines"):
        ClusterConfig(on="ssh").ssh_nodes()


def test_paths_are_relative_to_the_file_and_not_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for directory, address in ((there, "10.0.0.1"), (here, "10.9.9.9")):
        directory.mkdir()
        (directory / "nodes").write_text(f"{address} root 22 1\n")
        for name in ("id", "known", "agents"):
            (directory / name).touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "on: ssh\niplist: nodes\nidentity: id\nknown_hosts: known\ncopy: [agents, /srv/data, ~/more]\n"
    write_file(there, text)
    for path in (there / "cluster.yaml", Path("../there/cluster.yaml")):
        settings = load_cluster_file(path).merge(name="other").ssh_settings()
        assert [node.host for node in settings.nodes] == ["10.0.0.1"]
        assert settings.identity is not None
        assert settings.known_hosts is not None
        found = (settings.identity, settings.known_hosts, *settings.copy)
        assert all(path.is_absolute() for path in found)
        assert [path.resolve() for path in found] == [
            there / "id", there / "known", there / "agents", Path("/srv/data"), tmp_path / "more",
        ]  # fmt: skip


def test_the_documentation_names_every_key_and_its_backends() -> None:
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")
    section = page.partition("## cluster.yaml\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    named = {key: where.strip() for keys, where in rows for key in re.findall(r"`(\w+)`", keys)}
    assert named.keys() == {field.alias or name for name, field in ClusterConfig.model_fields.items()}
    only = {name.rstrip("_"): ", ".join(where) for name, where in _BACKENDS.items()}
    assert named == {key: only.get(key, "" if key == "on" else "all") for key in named}
    for word, model in (("machines", SshMachine), ("groups", NodeGroup)):
        sentence = re.search(rf"An entry of `{word}`(.*?)(?:An entry of|\Z)", section, re.DOTALL)
        assert sentence is not None
        assert set(model.model_fields) <= set(re.findall(r"`(\w+)`", sentence.group(1)))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("on: slrum", r"slrum is unknown.*slurm"),
        ("nodez: 3", r"unknown key 'nodez'.*nodes"),
        ("on: ssh\nidentity: ~no-such-user/id", "~no-such-user/id is in the home directory of an unknown user"),
        ("nodes: 0", "nodes"),
        ("nodes: three", "nodes"),
        ("nodes: 3\nmin_nodes: 4", "min_nodes 4 is more"),
        ("on: slurm\nnodes: 2\ngroups: [{nodes: 1}]", "groups"),
        ("groups: [{nodes: 1}]", "groups"),
        ("on: slurm\ngroups: [{noodles: 1}]", r"groups\.0\.noodles.*nodes"),
        ("environment: {A: 1}", "environment"),
        ("- a\n- b", "not a mapping"),
        ("account: [a]", "account"),
        ("time: 90", "time"),
        ("a: &a [*a]", "contains it"),
        ("\x00", "YAML"),
    ],
)
def test_an_error_names_the_invalid_key(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(LudusError, match=match) as caught:
        open_backend(load_cluster_file(write_file(tmp_path, text)))
    assert isinstance(caught.value, ConfigError) or "kubernetes" in text


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster_file(tmp_path / "no.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * 200_000)
    with pytest.raises(ConfigError, match="larger"):
        load_cluster_file(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_cluster_file(tmp_path / "latin.yaml")
