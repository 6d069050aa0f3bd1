"""The INI file of a fleet: what it says, what is wrong with it, and that no secret is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.compat.coach.fleet_ini import KEYS, load_fleet_file, read_fleet_file
from ludus.errors import ConfigError
from ludus.launch.redis_role import memory_bytes
from ludus.process.cgroups import Cgroups

S3 = "[coach]\ndata_store = s3\ns3_bucket_name = games\n"


def test_the_file_of_the_familiar_form_is_understood(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\n")
    path = tmp_path / "dist.ini"
    path.write_text(
        "[coach]\nimage = me/coach:latest\nmemory_backend = redispubsub\ndata_store = s3\n"
        f"s3_end_point = s3.amazonaws.com\ns3_bucket_name = games\ns3_creds_file = {credentials}\n"
    )
    found = load_fleet_file(path)
    assert found.orchestrator == "local"
    assert found.redis_url is None
    assert found.place("cartpole") == "s3://games/cartpole"
    assert found.credentials == credentials
    told = "\n".join(found.notices)
    for word in ("processes of this machine", "image = me/coach:latest", "Redis Streams"):
        assert word in told
    assert len(found.notices) == 3


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("", "s3://games/run"),
        ("s3_prefix = team/a/", "s3://games/team/a/run"),
        ("s3_end_point = https://s3.eu-west-1.amazonaws.com", "s3://games/run"),
        ("s3_end_point = minio.example:9000", "s3://games/run?endpoint=https://minio.example:9000"),
        ("s3_end_point = http://127.0.0.1:8333/", "s3://games/run?endpoint=http://127.0.0.1:8333"),
        ("s3_region = eu-west-1", "s3://games/run?region=eu-west-1"),
        ("s3_end_point = amazonaws.com.example", "s3://games/run?endpoint=https://amazonaws.com.example"),
    ],
)
def test_where_a_run_on_s3_is(lines: str, place: str) -> None:
    assert read_fleet_file(S3 + lines).place("run") == place


def test_where_a_run_in_a_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_fleet_file("[ludus]\n").place("run") == str(tmp_path / "runs" / "run")
    assert read_fleet_file("[ludus]\nlocal-path = other").place("run") == str(tmp_path / "other" / "run")
    assert read_fleet_file(f"[LUDUS]\ndata_store = nfs\nnfs path = {tmp_path}").place("run") == str(tmp_path / "run")
    redis = read_fleet_file("[coach]\norchestrator = local\ndata_store = redis")
    assert redis.place("run") == str(tmp_path / "runs" / "run")
    assert len(redis.notices) == 1


def test_files_are_found_next_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "creds").write_text("")
    path = tmp_path / "dist.ini"
    path.write_text(S3 + "s3_creds_file = creds")
    assert load_fleet_file(path).credentials == tmp_path / "creds"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[coach]\nmemory_backned = redis", "memory_backned.*Did you mean 'memory_backend'"),
        ("[couch]\nimage = x", r"\[couch\].*'coach'"),
        ("", r"no section \[ludus\] or \[coach\]"),
        ("[coach]\n[ludus]\n", "2 sections"),
        ("image = x", "section"),
        ("[coach]\nimage = x\nimage = y", "image"),
        ("[coach]\nmemory_backend = kafka", "kafka.*redis"),
        ("[coach]\ndata_store = s4", "s4.*s3"),
        ("[coach]\ndata_store = s3", "s3_bucket_name"),
        ("[coach]\ndata_store = s3\ns3_bucket_name = <bucket-name>", "placeholder of the example"),
        ("[coach]\ndata_store = s3\ns3_bucket_name = games/run", "s3_prefix"),
        ("[coach]\ndata_store = s3\ns3_bucket_name = a b", "a b"),
        (S3 + "s3_end_point = ftp://host", "endpoint"),
        (S3 + "s3_end_point = http://user:hush@host", "endpoint"),
        (S3 + "s3_creds_file = /no/such/file", "s3_creds_file = /no/such/file is not a file"),
        ("[coach]\ndata_store = nfs", "nfs_path"),
        ("[coach]\ndata_store = nfs\nnfs_path = /no/such/mount", "mounted"),
        (
            "[coach]\norchestrator = kubernetes\ndata_store = s3\ns3_bucket_name = games",
            "kubernetes needs image.*REGISTRY/NAME:TAG",
        ),
        ("[coach]\norchestrator = kubernetes\nimage = x", "place that all pods reach.*data_store = s3 or nfs"),
        ("[coach]\norchestrator = kubernetes\nimage = x\ndata_store = nfs\nnfs_path = /exports", "nfs_server"),
        ("[coach]\norchestrator = kubernetes\nimage = x\ncluster_file = none.yaml", "cluster_file = none.yaml is not a file"),
        ("[coach]\norchestrator = lokal", "lokal.*'local'"),
        ("[coach]\nredis_url = http://user:hush@host", "redis://"),
        ("[coach]\nredis_url = redis://user:hush@host:no", "redis://"),
        ("[coach]\nredis_password_file = x", "redis_url"),
        ("[coach]\nredis_url = redis://:hush@host\nredis_password_file = /dev/null", "redis_password_file"),
        ("[coach]\nredis_url = redis://me:12/hush@host", "redis_url: .*@ after its host.*LUDUS_MEMORY_PASSWORD"),
        ("[coach]\nredis_url = redis://me:[hush@host", "redis://"),
        ("[coach]\nredis_url = redis://host/0?password=hush", "redis_url: .*in its query.*LUDUS_MEMORY_PASSWORD"),
        ("[coach]\nredis_url = redis://host/0?db=1&username=me&password=hush", "in its query"),
        ("[coach]\norchestrator = mine:Class\nredis_url = redis://host", "mine:Class.*data_store = nfs or s3"),
        (S3 + "orchestrator = mine:Class", "mine:Class.*Add redis_url"),
        ("image = x", r"no section headers\. It is a section"),
        ("[coach]\ndata_store = s3\ns3_bucket_name = <bucket>", "It is the name of your bucket"),
        ("[coach]\nimage =\n  two\n  lines\n  of it", "one line"),
    ],
)
def test_errors_are_reported_without_secrets(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){complaint}") as caught:
        read_fleet_file(text)
    assert "hush" not in str(caught.value)


def test_a_password_in_the_url_goes_elsewhere() -> None:
    found = read_fleet_file("[ludus]\norchestrator = local\nredis_url = rediss://me:hu%2Fsh@redis.example:6380/2")
    assert found.redis_url == "rediss://me@redis.example:6380/2"
    assert found.redis_password == "hu/sh"
    assert "hu" + "/sh" not in repr(found) + str(found.notices)
    assert len(found.notices) == 1
    assert read_fleet_file("[ludus]\nredis_url = redis://:hush@redis.example").redis_url == "redis://redis.example"


def test_an_orchestrator_of_ones_own_gets_what_all_machines_reach() -> None:
    found = read_fleet_file(S3 + "orchestrator = mine:Class\nredis_url = redis://host\nimage = me/coach")
    assert (found.orchestrator, found.redis_url) == ("mine:Class", "redis://host")
    assert found.notices == ("image = me/coach: not used without orchestrator = kubernetes, because no containers are started",)


def test_kubernetes_gets_its_image_namespace_and_store(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("cpus: 4\n")
    text = "[coach]\norchestrator = kubernetes\nimage = me/coach:1\nnamespace = games\ncluster_file = cluster.yaml\n"
    found = read_fleet_file(f"{text}data_store = nfs\nnfs_server = 10.0.0.5\nnfs_path = /exports/runs", tmp_path)
    assert (found.orchestrator, found.image, found.namespace) == ("kubernetes", "me/coach:1", "games")
    assert (found.nfs_server, found.path, found.cluster_file) == ("10.0.0.5", Path("/exports/runs"), tmp_path / "cluster.yaml")
    assert found.notices == ()
    assert found.redis_url is None, "the job starts its own"
    local = read_fleet_file("[coach]\norchestrator = local\nnamespace = games")
    assert local.notices == ("namespace: not used without orchestrator = kubernetes",)


def test_a_private_server_keeps_to_the_memory_of_its_container(tmp_path: Path) -> None:
    container = Cgroups({"": (tmp_path,)})
    machine = memory_bytes(container)
    assert machine > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(container) == machine
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(container) == 1 << 20


def test_keys_of_another_store_are_reported_as_ignored() -> None:
    found = read_fleet_file("[coach]\norchestrator = local\ns3_bucket_name = games\nnfs_path = /mnt")
    assert found.notices == ("nfs_path, s3_bucket_name: not used with data_store = local",)


def test_empty_values_are_as_good_as_none() -> None:
    empty = "\n".join(f"{key} =" for key in KEYS)
    assert read_fleet_file(f"[coach]\n{empty}") == read_fleet_file("[coach]\n")


@pytest.mark.parametrize(("data", "complaint"), [(b"\xff\xfe", "UTF-8"), (b"[ludus]\n" + b"#" * 200_000, "larger")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "dist.ini"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=complaint):
        load_fleet_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_fleet_file(tmp_path / "none.ini")
