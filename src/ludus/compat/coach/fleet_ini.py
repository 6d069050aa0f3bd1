"""INI file of a fleet (section `[ludus]` or `[coach]`): orchestrator, memory and store.

    [coach]
    memory_backend = redispubsub
    data_store = s3
    s3_end_point = s3.amazonaws.com
    s3_bucket_name = games
    s3_creds_file = ~/.aws/credentials

It contains no secrets: they are in referenced files or in the environment.
"""

from __future__ import annotations

import configparser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, UsageError
from ludus.io.yaml_documents import read_text
from ludus.launch.job import ORCHESTRATORS
from ludus.storage.s3_url import S3Url, check_endpoint
from ludus.transport.message_stream import PASSWORD, split_password

SECTIONS = ("ludus", "coach")
MEMORIES = ("redis", "redispubsub")
STORES = ("local", "nfs", "s3", "redis")
AMAZON = "amazonaws.com"
KUBERNETES = "kubernetes"
_STORE_PREFIXES = {"local_", "nfs_", "s3_"}
"""Prefixes of the keys that belong to one data store."""

KEYS: Mapping[str, str] = {
    "image": "the container image of all roles, with orchestrator = kubernetes",
    "orchestrator": "local or kubernetes",
    "namespace": "the Kubernetes namespace; default: that of the kubeconfig",
    "cluster_file": "a cluster.yaml with further settings of Kubernetes: resources, node selectors, a service account",
    "memory_backend": "redis (or redispubsub: the same)",
    "redis_url": "redis://[USER@]HOST[:PORT][/DB]; without it a private server is started",
    "redis_password_file": "a file with the password of redis_url; else LUDUS_MEMORY_PASSWORD",
    "data_store": "local, nfs or s3",
    "local_path": "the directory for runs with data_store = local; default: runs",
    "nfs_path": "where the file system that all machines share is mounted; with orchestrator = kubernetes the exported directory",
    "nfs_server": "the NFS server, with orchestrator = kubernetes",
    "s3_bucket_name": "the name of your bucket, with data_store = s3",
    "s3_prefix": "the prefix of runs: BUCKET/PREFIX/NAME; default: BUCKET/NAME",
    "s3_end_point": "the address of a server that is not Amazon's: HOST:PORT (TLS) or http://HOST:PORT",
    "s3_region": "the region of the bucket; else AWS_REGION",
    "s3_creds_file": "a file like ~/.aws/credentials; else the usual places",
}

_MAX_BYTES = 100_000


@dataclass(frozen=True)
class FleetFile:
    """Settings of a fleet. Paths are absolute or relative to the working directory. `notices`: deviations from the file."""

    orchestrator: str = "local"
    image: str = ""
    namespace: str = ""
    cluster_file: Path | None = None
    nfs_server: str = ""
    redis_url: str | None = None
    redis_password: str | None = field(repr=False, default=None)
    """Password that was part of the URL."""
    redis_password_file: Path | None = None
    data_store: str = "local"
    path: Path = Path("runs")
    s3: S3Url | None = None
    credentials: Path | None = None
    notices: tuple[str, ...] = ()

    def place(self, name: str) -> str:
        """Return the directory or URL of a run."""
        return self.s3.below(name).url if self.s3 is not None else str(self.path.absolute() / name)


def load_fleet_file(path: Path) -> FleetFile:
    """Read a fleet file. Raises ConfigError that names the wrong key."""
    text = read_text(Path(path), _MAX_BYTES, "It needs a section [ludus] or [coach] with a few keys.")
    try:
        return read_fleet_file(text, Path(path).parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.hint) from error


def read_fleet_file(text: str, directory: Path = Path()) -> FleetFile:
    """Parse the text of a fleet file. `directory`: directory in which referenced files are searched too."""
    values = _read_values(text)
    notices: list[str] = []
    found = _read_orchestrator(FleetFile(), values, directory, notices.append)
    found = _read_memory(found, values, directory, notices.append)
    found = _read_store(found, values, directory, notices.append)
    if found.orchestrator == KUBERNETES:
        if found.data_store == "local" and found.cluster_file is None:
            raise ConfigError(
                "With orchestrator = kubernetes the run needs a place that all pods reach.",
                "Add data_store = s3 or nfs, or cluster_file with `storage`.",
            )
    elif found.orchestrator != "local" and (found.redis_url is None or found.data_store == "local"):
        raise ConfigError(
            f"With orchestrator = {found.orchestrator} roles may run on other machines, and could not reach the memory or the store.",
            "Add redis_url, and data_store = nfs or s3.",
        )
    others = _STORE_PREFIXES - {f"{found.data_store}_"}
    if unused := sorted(key for key in values if key.startswith(tuple(others))):
        notices.append(f"{', '.join(unused)}: not used with data_store = {found.data_store}")
    return replace(found, notices=tuple(notices))


def _read_values(text: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, default_section="\0")  # a password may contain %
    try:
        parser.read_string(text)
    except configparser.Error as error:
        said = str(error).replace("<string>", "the file").splitlines()[0]
        raise ConfigError(f"{said.rstrip('.')}.", "It is a section [ludus] or [coach] with lines `key = value`.") from error
    ours = [name for name in parser.sections() if name.lower() in SECTIONS]
    others = [name for name in parser.sections() if name not in ours]
    if others:
        raise ConfigError(f"There is no section [{others[0]}].", did_you_mean(others[0].lower(), SECTIONS))
    if len(ours) != 1:
        raise ConfigError(f"It has {len(ours)} sections: {', '.join(ours)}." if ours else "It has no section [ludus] or [coach].")
    values = {key.replace("-", "_").replace(" ", "_"): value.strip() for key, value in parser.items(ours[0])}
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError(f"Unknown key {key!r}.", did_you_mean(key, KEYS))
        if value.startswith("<") and value.endswith(">"):
            raise ConfigError(f"{key} = {value} is the placeholder of the example.", f"It is {KEYS[key]}.")
        if "\n" in value:
            raise ConfigError(f"{key} has more than one line.")
    return {key: value for key, value in values.items() if value}


def _read_orchestrator(found: FleetFile, values: Mapping[str, str], directory: Path, notice: Callable[[str], None]) -> FleetFile:
    name = values.get("orchestrator", "")
    if name in ("ssh", "slurm"):
        raise ConfigError(
            f"orchestrator = {name} needs settings that this file cannot hold: machines, account, time limit.",
            f"Submit the roles: `ludus submit --on {name} … -- fleet learner …` and `ludus submit --on {name} --nodes N … -- fleet worker …`, "
            "with the same --memory and --store.",
        )
    if name and name not in ORCHESTRATORS and ":" not in name:
        raise ConfigError(f"orchestrator = {name} is unknown.", did_you_mean(name, ORCHESTRATORS))
    if name == KUBERNETES:
        if "image" not in values and "cluster_file" not in values:
            raise ConfigError("orchestrator = kubernetes needs image.", f"It is {KEYS['image']}: REGISTRY/NAME:TAG.")
        cluster_file = _file("cluster_file", values, directory)
        return replace(
            found,
            orchestrator=name,
            image=values.get("image", ""),
            namespace=values.get("namespace", ""),
            cluster_file=cluster_file,
        )
    if not name:
        notice("orchestrator is not set: all roles are processes of this machine (local)")
    if "image" in values:
        notice(f"image = {values['image']}: not used without orchestrator = kubernetes, because no containers are started")
    if unused := [key for key in ("namespace", "cluster_file", "nfs_server") if key in values]:
        notice(f"{', '.join(unused)}: not used without orchestrator = kubernetes")
    return replace(found, orchestrator=name or "local")


def _read_memory(found: FleetFile, values: Mapping[str, str], directory: Path, notice: Callable[[str], None]) -> FleetFile:
    backend = values.get("memory_backend", "redis")
    if backend not in MEMORIES:
        raise ConfigError(f"memory_backend = {backend} is unknown.", did_you_mean(backend, MEMORIES))
    if backend == "redispubsub":
        notice("memory_backend = redispubsub: Redis Streams are used; they lose no messages while no process reads")
    if "redis_url" not in values:
        if "redis_password_file" in values:
            raise ConfigError("redis_password_file needs redis_url.", "A private server gets a generated password.")
        return found
    try:
        url = urlsplit(values["redis_url"])
        if url.scheme not in ("redis", "rediss") or not url.hostname or (url.port is not None and url.port < 1):
            raise ValueError
    except ValueError:
        # The value is not shown: it may contain a password.
        raise ConfigError("redis_url is not of the form redis://[USER@]HOST[:PORT][/DB].") from None
    try:
        plain, password = split_password(values["redis_url"])
    except UsageError as error:
        raise ConfigError(f"redis_url: {error.message}", error.hint) from None
    if password is not None:
        notice(f"redis_url: its password is in the file; redis_password_file or {PASSWORD} keeps it apart")
    file = _file("redis_password_file", values, directory)
    if password is not None and file is not None:
        raise ConfigError("redis_url has a password, and redis_password_file names another.", "Keep one.")
    return replace(found, redis_url=plain, redis_password=password, redis_password_file=file)


def _read_store(found: FleetFile, values: Mapping[str, str], directory: Path, notice: Callable[[str], None]) -> FleetFile:
    kind = values.get("data_store", "local")
    if kind not in STORES:
        raise ConfigError(f"data_store = {kind} is unknown.", did_you_mean(kind, STORES))
    if kind == "redis":
        notice("data_store = redis: weights and checkpoints are kept in a directory (local); they would not survive the server")
        kind = "local"
    if kind == "local":
        return replace(found, data_store=kind, path=Path(values.get("local_path", "runs")).expanduser())
    if kind == "nfs":
        if "nfs_path" not in values:
            raise ConfigError("data_store = nfs needs nfs_path.", f"It is {KEYS['nfs_path']}.")
        if found.orchestrator == KUBERNETES:
            if "nfs_server" not in values or not values["nfs_path"].startswith("/"):
                raise ConfigError("data_store = nfs on Kubernetes needs nfs_server, and an absolute nfs_path that it exports.")
            return replace(found, data_store=kind, nfs_server=values["nfs_server"], path=Path(values["nfs_path"]))
        path = Path(values["nfs_path"]).expanduser()
        if not path.is_dir():
            raise ConfigError(f"nfs_path = {path} is not a directory.", "Is it mounted?")
        return replace(found, data_store=kind, path=path)
    bucket = values.get("s3_bucket_name", "").removeprefix("s3://").rstrip("/")
    if not bucket:
        raise ConfigError("data_store = s3 needs s3_bucket_name.")
    if "/" in bucket:
        raise ConfigError(f"s3_bucket_name = {bucket} is not the name of a bucket.", "Put what follows the / into s3_prefix.")
    prefix = values.get("s3_prefix", "").strip("/")
    try:
        address = S3Url.parse(f"s3://{bucket}{'/' if prefix else ''}{prefix}")
        end_point = _endpoint_url(values.get("s3_end_point", ""))
    except UsageError as error:
        raise ConfigError(error.message, error.hint) from error
    address = replace(address, endpoint=end_point, region=values.get("s3_region"))
    return replace(found, data_store=kind, s3=address, credentials=_file("s3_creds_file", values, directory))


def _endpoint_url(written: str) -> str | None:
    """Return the endpoint as a URL (https without a scheme, as in Coach); None for Amazon S3."""
    if not written:
        return None
    url = check_endpoint(written if "://" in written else f"https://{written}")
    host = urlsplit(url).hostname or ""
    return None if host == AMAZON or host.endswith(f".{AMAZON}") else url


def _file(key: str, values: Mapping[str, str], directory: Path) -> Path | None:
    if key not in values:
        return None
    path = Path(values[key]).expanduser()
    for candidate in (path, directory / path):
        if candidate.is_file():
            return candidate.absolute()
    raise ConfigError(f"{key} = {path} is not a file.")
