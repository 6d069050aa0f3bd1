"""The objects of jobs on Kubernetes: golden files, strict schemas, security settings of every pod, and no secrets."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import UsageError
from ludus.launch.cluster_file import ClusterConfig, load_cluster_file, open_backend, plan_command
from ludus.launch.job import Job, Role
from ludus.launch.kubernetes import objects, ray_cluster
from ludus.launch.kubernetes.backend import KubernetesOrchestrator
from ludus.launch.kubernetes.client import KINDS
from ludus.launch.kubernetes.fleet import redis_configuration
from ludus.launch.kubernetes.objects import JobObjects, job_id
from ludus.launch.kubernetes.pod import escape
from ludus.launch.kubernetes.render import EXAMPLE, join_documents, render_job, to_files
from ludus.launch.kubernetes.settings import KubernetesSettings, PodImage
from ludus.launch.kubernetes.status import JobRecord
from ludus.transport.message_stream import PASSWORD

GOLDEN = Path(__file__).parent / "golden" / "kubernetes"
VERSIONS = ("1.32", "1.37")
SECRET = "horse-battery-staple"
IMAGE = "registry.example.org/games/ludus:1.0-cpu"
S3 = "s3://games/runs"

FULL: Mapping[str, Any] = {
    "namespace": "games", "cpus": 8, "memory": "32Gi", "gpus": 1, "shm": "8Gi", "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"], "node_selector": {"pool": "gpu"}, "priority_class": "training", "service_account": "trainer",
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]}}},
    "pod_annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "recordings", "readOnly": True}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "environment": {"OMP_NUM_THREADS": "8", "GREETING": "a $(NAME) and a $$HOME"}, "secrets": ["LICENCE_KEY"],
    "storage": "new:100Gi", "storage_class": "fast", "ttl_s": 7200, "grace_s": 120.0, "name": "nightly",
}  # fmt: skip

CASES: dict[str, tuple[Mapping[str, Any], list[str]]] = {
    "one-pod": ({"storage": S3}, ["train", "CartPole-v1", "--stop", "timesteps=100000"]),
    "one-pod-full": (FULL, ["train", "CartPole-v1"]),
    "ray": ({"nodes": 3, "learner_nodes": 2, "min_nodes": 2, "storage": "pvc:runs"}, ["train", "CartPole-v1", "--num-workers", "auto"]),
    "tune": ({"nodes": 2, "storage": "new:20Gi"}, ["tune", "CartPole-v1", "--num-samples", "4"]),
    "kuberay": ({"nodes": 3, "storage": "pvc:runs", "flavor": "kuberay"}, ["train", "CartPole-v1", "--num-workers", "auto"]),
    "fleet": ({"workers": 3, "storage": S3, "worker_cpus": 1.5}, ["fleet", "learner", "CartPole-v1"]),
    "fleet-scaled": (
        {"workers": "2-10", "storage": "nfs:10.0.0.5:/exports/runs", "redis": "redis://redis.example.org:6379/0", "network_policy": False},
        ["fleet", "learner", "CartPole-v1"],
    ),
    "gamecore": (
        {"nodes": 2, "gamecore": True, "gamecore_image": "registry.example.org/games/ludus:1.0-gamecore", "gamecore_memory": "8Gi", "storage": S3},
        ["train", "--run", "PPO", "gamecore", "--num-workers", "4"],
    ),
    "gamecore-server": ({}, ["gamecore", "serve", "--max-games", "50"]),
    "serve": ({"replicas": "2-8", "grace_s": 30.0}, ["serve", f"{S3}/best", "--port", "8080", "--drain-s", "120"]),
    "serve-sessions": ({"replicas": "1-20", "sessions": 500}, ["serve", f"{S3}/best", "--follow"]),
    "serve-monitored": (
        {"pod_monitor": True, "prometheus_rule": True, "monitor_labels": {"release": "prometheus"}, "monitor_interval": "30s"},
        ["serve", f"{S3}/best", "--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key"],
    ),
    "helpers": ({"storage": "none", "nodes": 2}, ["fleet", "worker", "--memory", "redis://10.0.0.5", "--store", "s3://games/run"]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def ray_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "installed_ray_version", lambda: "2.60.0")


def config(name: str) -> tuple[ClusterConfig, list[str]]:
    keys, words = CASES[name]
    return ClusterConfig().merge(on="kubernetes", image=IMAGE, **keys), words


def job_objects(name: str) -> JobObjects:
    found, words = config(name)
    job = plan_command(found, words, {}).job
    return render_job(job, found.kubernetes_settings(), job_id(job.name))


def pod_templates(manifest: Any) -> Iterator[dict[str, Any]]:
    """All pod templates inside an object."""
    if isinstance(manifest, dict):
        if "containers" in manifest.get("spec", {}):
            yield manifest
        for value in manifest.values():
            yield from pod_templates(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from pod_templates(value)


@pytest.mark.parametrize("name", CASES)
def test_the_objects_equal_the_golden_file(name: str) -> None:
    text = join_documents(job_objects(name).manifests)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("LUDUS_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert text == join_documents(job_objects(name).manifests), "rendering is deterministic"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_schema_of_current_versions_accepts_every_object(name: str, version: str) -> None:
    for document in yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()):
        if document["kind"] not in ("RayJob", "PodMonitor", "PrometheusRule"):  # custom resources
            kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_rejects_a_misspelt_field() -> None:
    document = next(yaml.safe_load_all((GOLDEN / "one-pod.yaml").read_text()))
    document["spec"]["template"]["spec"]["containers"][0]["imagePullPolcy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", CASES)
def test_every_pod_is_restricted(name: str) -> None:
    templates = [template for manifest in job_objects(name).manifests for template in pod_templates(manifest)]
    assert templates
    for template in templates:
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert min(security["runAsUser"], security["runAsGroup"]) > 10_000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["terminationGracePeriodSeconds"] > 30
        shared = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
        assert shared["emptyDir"]["medium"] == "Memory"
        assert shared["emptyDir"]["sizeLimit"]
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            inner = container["securityContext"]
            assert inner["readOnlyRootFilesystem"] is True
            assert inner["allowPrivilegeEscalation"] is False
            assert inner["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {"/tmp", "/dev/shm"} <= mounted
            assert not any("secretKeyRef" in json.dumps(variable) for variable in container.get("env", ()))
        assert template["metadata"]["labels"][objects.JOB]


@pytest.mark.parametrize("name", CASES)
def test_every_object_has_the_labels_of_the_job_and_a_valid_name(name: str) -> None:
    found = job_objects(name)
    identity = found.owner["metadata"]["name"]
    for manifest in found.manifests:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
        kept = manifest["kind"] == "PersistentVolumeClaim" and manifest["metadata"]["name"].endswith("-runs")
        assert manifest["metadata"]["labels"].get(objects.JOB) == (None if kept else identity)
        assert manifest["kind"] in KINDS
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in found.manifests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", CASES)
def test_a_pod_waits_for_all_that_it_uses_by_the_secret(name: str) -> None:
    """Pods of the owner start at once: what they refer to must exist before the Secret, for which they wait."""
    found = job_objects(name)
    kinds = [manifest["kind"] for manifest in found.manifests]
    secret = kinds.index("Secret")
    needed = ("Service", "ConfigMap", "NetworkPolicy")
    assert all(at < secret for at, kind in enumerate(kinds) if kind in needed)
    for template in pod_templates(found.owner):
        assert any("secret" in volume for volume in template["spec"]["volumes"])


def test_the_nodes_of_a_ray_job_get_secrets_and_files_and_the_operator_reaches_its_head() -> None:
    found = job_objects("kuberay")
    spec = found.owner["spec"]
    cluster = spec["rayClusterSpec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"], cluster["rayVersion"]) == (0, 0, "2.60.0")
    assert JobRecord.from_owner(found.owner).processes == {"head": 1, "ray": 2, "main": 1}
    assert found.owner["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    head, node = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]
    for template in (head, node):
        command = template["spec"]["containers"][0]["command"]
        assert "ludus.launch.kubernetes.pod_process" in command, "it reads secrets and copies files"
        assert "$KUBERAY_GEN_RAY_START_CMD" in command[-1]
    submitter = spec["submitterPodTemplate"]["spec"]
    assert submitter["restartPolicy"] == "Never", "a Job does not accept another"
    assert "command" not in submitter["containers"][0], "that is the operator's"
    policy = next(each for each in found.manifests if each["metadata"]["name"].endswith("head-operator"))
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert rule["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= head["metadata"]["labels"].items()


def test_the_command_of_a_ray_job_survives_all_shells(tmp_path: Path) -> None:
    """The operator puts the entrypoint into a script of bash, `ray job submit` joins its words, and the head gives the text to sh."""
    words = ["a  b", "it's", '"', "$HOME", "*", "a;b", "two\nlines", "\\", ""]
    joined = tmp_path / "joined.py"
    joined.write_text("import subprocess, sys\nprint(subprocess.list2cmdline(sys.argv[1:]), end='')\n")
    script = f"{sys.executable} {joined} {ray_cluster.RUN_ENTRYPOINT} ; true"
    text = subprocess.run(["/bin/bash", "-ce", "--", script], check=True, capture_output=True, text=True).stdout
    command = shlex.join([sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *words])
    environment = {ray_cluster.ENTRYPOINT: command}
    done = subprocess.run(text, shell=True, env=environment, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout) == words


def test_a_ray_job_has_no_further_learners() -> None:
    found = ClusterConfig().merge(on="kubernetes", image=IMAGE, storage=S3, nodes=3, learner_nodes=2, flavor="kuberay")
    job = plan_command(found, ["train", "CartPole-v1"], {}).job
    with pytest.raises(UsageError, match=r"'learner'.*flavor plain"):
        render_job(job, found.kubernetes_settings(), "trial")


def test_all_nodes_of_a_sweep_mount_its_directory_and_those_of_a_training_do_not() -> None:
    """Trials run on any node, and write below the directory of the sweep."""
    for name, mounting in (("tune", [True, True]), ("ray", [True, False, False])):
        found = [template["spec"] for manifest in job_objects(name).manifests for template in pod_templates(manifest)]
        assert ["runs" in {volume["name"] for volume in spec["volumes"]} for spec in found] == mounting
    volume = {"name": "runs", "persistentVolumeClaim": {"claimName": "tune-cartpole-v1-runs"}}
    assert all(volume in manifest["spec"]["template"]["spec"]["volumes"] for manifest in job_objects("tune").manifests if manifest["kind"] == "Job")  # fmt: skip


@pytest.mark.parametrize(
    ("password", "written"),
    [("abc", '"abc"'), ("two words # ' x", '"two words # \' x"'), ('a"b\\c\n', r'"a\x22b\x5cc\x0a"'), ("ü", '"ü"')],
)
def test_a_password_of_redis_may_contain_any_character(password: str, written: str) -> None:
    assert f"\nrequirepass {written}\ndir /data\n" in redis_configuration(password, "1Gi")


def test_a_service_selects_pods_that_exist() -> None:
    for name in CASES:
        found = job_objects(name)
        labels = [template["metadata"]["labels"] for manifest in found.manifests for template in pod_templates(manifest)]
        for manifest in found.manifests:
            if manifest["kind"] == "Service":
                chosen = manifest["spec"]["selector"].items()
                assert any(chosen <= each.items() for each in labels), name


@pytest.mark.parametrize("name", CASES)
def test_no_secret_is_rendered(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[default]\naws_secret_access_key = {SECRET}\n")
    environ = {
        variable: f"{SECRET}-{variable}" for variable in ("LICENCE_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", PASSWORD)
    }
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    found, words = config(name)
    found = found.merge(secrets=[*environ], storage_credentials=credentials)
    job = plan_command(found, words, environ).job
    assert set(job.secrets) == set(environ)
    files = open_backend(found, words).render(job)
    assert SECRET not in "".join(files.values())
    secret = files[EXAMPLE]
    assert "kubectl create secret generic" in secret
    keys = yaml.safe_load(secret)["stringData"]
    assert {*environ, objects.TOKEN, objects.CREDENTIALS} <= keys.keys()
    assert all("replace-me" in value for value in keys.values())
    assert not any("secret" in file for file in yaml.safe_load(files["kustomization.yaml"])["resources"])


def test_no_file_that_kubectl_reads_contains_a_secret() -> None:
    """`kubectl apply -f DIR` reads yaml, yml and json. A service would accept a token that everybody knows."""
    for name in CASES:
        files = to_files(job_objects(name))
        read = [yaml.safe_load(text) for file, text in files.items() if file.endswith((".yaml", ".yml", ".json"))]
        assert "Secret" not in {manifest["kind"] for manifest in read}
        assert yaml.safe_load(files[EXAMPLE])["kind"] == "Secret"


def test_deleting_the_rendered_objects_keeps_the_runs() -> None:
    files = to_files(job_objects("tune"))
    claim = "persistentvolumeclaim-tune-cartpole-v1-runs.yaml"
    assert claim not in yaml.safe_load(files["kustomization.yaml"])["resources"]
    assert f"kubectl apply -f {claim}" in files[claim]
    annotations = yaml.safe_load(files[claim])["metadata"]["annotations"]
    assert annotations["argocd.argoproj.io/sync-options"] == "Delete=false,Prune=false"
    assert "all but the Secret and the volume of the runs" in files["job-tune-cartpole-v1.yaml"]
    redis = to_files(job_objects("fleet"))
    resources = yaml.safe_load(redis["kustomization.yaml"])["resources"]
    assert "persistentvolumeclaim-fleet-learner-memory.yaml" in resources, "it is deleted with the fleet"


def test_applying_the_files_again_keeps_the_number_of_pods_that_an_autoscaler_has_set() -> None:
    for name, counted in (("serve", False), ("fleet-scaled", False), ("fleet", True)):
        found = [yaml.safe_load(text) for text in to_files(job_objects(name)).values()]
        assert ["replicas" in each["spec"] for each in found if each["kind"] == "Deployment"] == [counted], name
    assert job_objects("serve").owner["spec"]["replicas"] == 2, "a submitted job starts with the smallest number"


@pytest.mark.parametrize("url", [f"redis://:{SECRET}@host", f"redis://me:{SECRET}@host:6379/1", f"redis://:{SECRET}/x@host"])
def test_a_password_in_a_command_is_refused(url: str) -> None:
    """Also one in `redis`, which becomes a part of the commands of learner and workers."""
    found, words = config("fleet")
    for keys, arguments in (({}, ["--memory", url]), ({"redis": url}, [])):
        with pytest.raises(UsageError, match="password") as caught:
            plan_command(found.merge(**keys), [*words, *arguments], {})
        assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_variables_of_the_shell_are_passed_on_with_a_notice() -> None:
    found, words = config("one-pod")
    environ = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET, "WANDB_API_KEY": ""}
    planned = plan_command(found, words, environ)
    assert planned.job.secrets == ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    assert planned.notices == ("environment variables passed on as secrets: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",)
    assert plan_command(found.merge(secrets=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]), words, environ).notices == ()


def test_keys_of_the_shell_do_not_override_a_service_account() -> None:
    found, words = config("one-pod")
    environ = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET, "WANDB_API_KEY": SECRET}
    planned = plan_command(found.merge(service_account="trainer", secrets=["WANDB_API_KEY"]), words, environ)
    assert planned.job.secrets == ("WANDB_API_KEY",)
    (notice,) = planned.notices
    assert notice.startswith(
        "not passed on, because the job has a service account: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; name"
    )


def expand(text: str, variables: Mapping[str, str]) -> str:
    """What the kubelet does with commands and variables (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = f"{out}$", at + 2
        elif text[at + 1] == "(" and ")" in text[at:]:
            end = text.index(")", at)
            name = text[at + 2 : end]
            out, at = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


@given(st.text(alphabet="$()aB_ \n{}`", max_size=30))
def test_words_arrive_as_they_are(text: str) -> None:
    assert expand(escape(text), {"a": "x", "B_": "y", "": "z"}) == text


def test_only_addresses_are_expanded() -> None:
    assert expand(escape("redis://$(LUDUS_MEMORY_HOST):6379/0"), {"LUDUS_MEMORY_HOST": "10.0.0.1"}) == "redis://10.0.0.1:6379/0"
    assert escape("echo $HOME") == "echo $HOME"
    assert escape("kill -9 $$") == "kill -9 $$$$"
    assert escape("echo $(date)") == "echo $$(date)"


def test_an_id_is_a_dns_label() -> None:
    assert job_id("train-CartPole-v1", "x7k2p") == "train-cartpole-v1-x7k2p"
    assert job_id("7 wonders!", "x7k2p") == "job-7-wonders-x7k2p"
    assert job_id("..") == "job"
    assert len(job_id("a" * 63, "x7k2p")) == objects.MAX_ID
    assert objects.object_name("a" * 40, "b" * 63, 12345).endswith("-12345")
    assert len(objects.object_name("a" * 40, "b" * 63, 12345)) <= 52
    names = {objects.object_name("a" * 40, f"worker-pool-{pool}", 0) for pool in "ab"}
    assert len(names) == 2, "a long name is cut"
    assert all(len(name) <= 52 for name in names)
    assert objects.object_name("trial-x7k2p", "worker-pool-a", 0) == "trial-x7k2p-worker-pool-a-0"
    assert len({objects.id_suffix(number) for number in range(1000)}) == 1000


def test_the_record_of_a_job_survives_unknown_and_missing_keys() -> None:
    job = Job(
        "trial",
        (Role("main", ("true",), restart="on-failure"), Role("worker", ("true",), 2)),
        "main",
        place="s3://a/b",
        grace_s=7,
    )
    owner = render_job(job, KubernetesSettings(image=PodImage(IMAGE)), "trial-abc", 12.5).owner
    record = JobRecord.from_owner(owner)
    assert (record.name, record.main, record.restart, record.processes) == (
        "trial",
        "main",
        "on-failure",
        {"main": 1, "worker": 2},
    )
    assert (record.place, record.grace_s, record.submitted_at) == ("s3://a/b", 7, 12.5)
    annotations = owner["metadata"]["annotations"]
    annotations[objects.RECORD] = annotations[objects.RECORD].replace('"grace_s"', '"of_a_later_version"')
    assert JobRecord.from_owner(owner).name == "trial"
    annotations[objects.RECORD] = "{"
    assert (
        JobRecord.from_owner(owner | {"metadata": owner["metadata"] | {"creationTimestamp": "1970-01-01T00:01:00Z"}}).submitted_at
        == 60
    )


def test_a_pod_of_a_service_accepts_sessions_until_proxies_know_that_it_ends() -> None:
    """SIGTERM refuses new sessions at once, and nodes and ingresses learn of the end of a pod some seconds later."""
    spec = job_objects("serve").owner["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert spec["terminationGracePeriodSeconds"] == 120 + 10 + 15 + 5, "the sleep takes none of the time for draining"


def test_a_loaded_pod_of_a_service_stays_in_the_service() -> None:
    for name in ("serve", "gamecore-server"):
        (container,) = job_objects(name).owner["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["timeoutSeconds"] == 5, "the default is one second"
            assert container[probe]["periodSeconds"] * container[probe]["failureThreshold"] >= 20


@pytest.mark.parametrize("name", ["gamecore", "gamecore-server"])
def test_there_are_never_two_gamecore_servers(name: str) -> None:
    """A game is known only to the server that started it."""
    found = job_objects(name).manifests
    (server,) = (each["spec"] for each in found if each["kind"] == "Deployment")
    (service,) = (each["spec"] for each in found if each["kind"] == "Service" and each["spec"]["ports"][0]["name"] == "gamecore")
    assert server["replicas"] == 1
    assert server["strategy"] == {"type": "Recreate"}
    assert "publishNotReadyAddresses" not in service, "a pod that ends or starts is not the server"


def test_two_files_never_have_one_key() -> None:
    paths = ("a/b.yaml", "a__b.yaml", "a/b yaml", "a/b_yaml", "a b.yaml", "a_b.yaml", "ä.yaml", "ü.yaml", "x" * 250)
    keys = [objects.file_key(path) for path in paths]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in keys)
    assert objects.file_key("experiment_1.yaml") == "experiment_1.yaml"


def test_files_are_sent_in_a_config_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text("x:\n  env: CartPole-v1\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").write_text("class Net: ...\n")
    (tmp_path / "weights.bin").write_bytes(b"\xff\x00")
    words = ["train", "-f", "experiment.yaml"]
    found = ClusterConfig().merge(on="kubernetes", image=IMAGE, storage=S3, copy=["model", "weights.bin"])
    files = open_backend(found, words).render(plan_command(found, words, {}).job)
    sent = yaml.safe_load(files["configmap-train-experiment-files.yaml"])
    key = objects.file_key("model/net.py")
    assert sent["data"] == {key: "class Net: ...\n", "experiment.yaml": "x:\n  env: CartPole-v1\n"}
    assert sent["binaryData"] == {"weights.bin": "/wA="}
    volume = next(
        each
        for each in yaml.safe_load(files["job-train-experiment.yaml"])["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "files"
    )
    assert {"key": key, "path": "model/net.py"} in volume["configMap"]["items"]
    (tmp_path / "weights.bin").write_bytes(bytes(objects.MAX_FILES_BYTES))
    with pytest.raises(UsageError, match="ConfigMap has room"):
        open_backend(found, words).render(plan_command(found, words, {}).job)
    with pytest.raises(UsageError, match="outside of this directory"):
        open_backend(found, ["train", "-f", str(tmp_path / "experiment.yaml")])


def test_the_catalogue_of_games_is_sent_to_the_gamecore_server(tmp_path: Path) -> None:
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "mine.yaml").write_text("games: {}\n")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"{{on: kubernetes, image: '{IMAGE}', storage: '{S3}', gamecore: true, gamecore_games: games/mine.yaml}}\n"
    )
    found, words = load_cluster_file(cluster), ["train", "gamecore"]
    files = open_backend(found, words).render(plan_command(found, words, {}).job)
    assert yaml.safe_load(files["configmap-train-gamecore-files.yaml"])["data"] == {"mine.yaml": "games: {}\n"}
    server = yaml.safe_load(files["deployment-train-gamecore-gamecore.yaml"])["spec"]["template"]["spec"]
    command = server["containers"][0]["command"]
    assert command[command.index("--games") + 1] == "mine.yaml"
    assert "files" in {volume["name"] for volume in server["volumes"]}


@pytest.mark.parametrize(
    ("keys", "words", "match"),
    [
        ({}, ["train", "CartPole-v1"], "lost with its pod.*--storage none"),
        ({"storage": "s4://x"}, ["train", "CartPole-v1"], "not a place for runs"),
        ({"storage": "pvc:Runs"}, ["train", "CartPole-v1"], "not a place for runs"),
        ({"storage": S3}, ["tune", "CartPole-v1"], "sweep needs a directory.*not S3"),
        ({"storage": "none", "nodes": 2}, ["tune", "CartPole-v1"], "sweep needs a directory.*not one of each pod"),
        ({"storage": S3, "workers": 3}, ["train", "CartPole-v1"], "no workers in other pods.*--nodes"),
        ({"workers": "3-2", "storage": S3}, ["fleet", "learner", "CartPole-v1"], "not a number of pods"),
        ({"workers": 3}, ["fleet", "learner", "CartPole-v1"], "place for its run"),
        ({"storage": S3, "nodes": 2}, ["serve", S3], "runs on one machine"),
        ({}, ["gamecore", "serve", "--port", "1"], "23432"),
        ({}, ["gamecore", "serve", "--port", "http"], "--port 'http' is not a number"),
        ({}, ["serve", S3, "--drain-s", "abc"], "--drain-s 'abc' is not a number.*30"),
        ({}, ["serve", S3, "--drain-s=inf"], "--drain-s 'inf' is not a number"),
        ({}, [], "no command"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_work_is_refused(keys: Mapping[str, Any], words: list[str], match: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){match}"):
        plan_command(ClusterConfig().merge(on="kubernetes", image=IMAGE, **keys), words, {})


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"image": ""}, "No container image.*--image"),
        ({"image": "a b"}, "image 'a b'"),
        ({"namespace": "Games"}, "namespace 'Games'"),
        ({"image_pull_policy": "always"}, "image_pull_policy.*Always"),
        ({"memory": "4GB"}, "memory '4GB'.*4Gi"),
        ({"memory": "4m"}, "memory '4m'"),
        ({"shm": "8Gi", "memory": "4Gi"}, "shm 8Gi is more than memory 4Gi"),
        ({"worker_memory": "much"}, "worker_memory 'much'"),
        ({"redis_memory": "1 GB"}, "redis_memory '1 GB'"),
        ({"priority_class": "High"}, "priority_class 'High'"),
        ({"image_pull_secrets": ["my secret"]}, "image_pull_secrets 'my secret'"),
        ({"storage": "new:1Gi", "storage_mode": "RWX"}, "storage_mode.*ReadWriteMany"),
        ({"monitor_interval": "often"}, "monitor_interval 'often'.*15s"),
    ],
)
def test_settings_that_the_server_would_reject_are_refused(keys: Mapping[str, Any], match: str) -> None:
    found = ClusterConfig().merge(on="kubernetes", **{"image": IMAGE, "storage": S3, **keys})
    job = Job("trial", (Role("main", ("true",)),), "main")
    with pytest.raises(UsageError, match=match):
        KubernetesOrchestrator(found.kubernetes_settings()).render(job)
